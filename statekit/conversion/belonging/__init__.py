"""What belongs to one checkpoint: whether its files are of one step, and whether all parts of the run are read.

In go an opened checkpoint and the state that it decodes to. Out come findings, a sentence on each.
"""
