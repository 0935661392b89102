"""Changes of a run that the user asks for: their options, their execution, and their effect on the next update.

Input: words of the command line, of `statekit.convert` or of a `load_optimizer`, and a state. Output: the state that
was asked for, with a sentence on each change by name, and what the next update will do with it.
"""
