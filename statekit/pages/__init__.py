"""Pages: the drawing of results in a browser, in the service and as one self-contained file.

The results of verbs, as plain data, become HTML of one design; plots carry their formula and their numbers. Nothing
here knows files, databases or HTTP. All text counts as a stranger's.
"""
