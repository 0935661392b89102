"""The command line: one module per verb, imported when the verb is called.

Input: the words of a call. Output: text for people or JSON for programs, and an exit code. The library does the work.
"""
