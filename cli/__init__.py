"""The command line: one module per verb, imported when the verb is called.

In go the words of a call. Out comes text for people, or JSON for programs, and an exit code; the work is the library's.
"""
