"""What a user wants changed of a run as it goes on: which changes there are, carrying them out, and what comes of it.

Input: words of the command line, of `statekit.convert` or of a `load_optimizer`, and a state. Output: the state that
was asked for, with a sentence on each change by name, and what the next update will do with it.
"""
