"""The command line: one module per verb, imported when the verb is called.

A verb parses the words of a call, lets the library do the work, and prints text for people or JSON for programs.
"""
