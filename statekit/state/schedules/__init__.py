"""What the schedules of each system do to the learning rate: from what its files or its users say to `Rates`.

Input: a record, an object or a call as the system has it, in its own names. Output: its canonical form, or a
sentence that says why it has none, by the name of what isn't known.
"""
