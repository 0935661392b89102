"""Pages: how anything is drawn in a browser, in the service and as one file that needs nothing beside it.

In go results of verbs as plain data. Out comes HTML with one design, whose plots carry their formula and their numbers.
Nothing here knows files, databases or HTTP; all text counts as a stranger's.
"""
