"""The common part of the lines by which each system resumes from a checkpoint.

From a state as plain data and the facts of its checkpoint (`SavedRun`), these modules make an optimizer's arguments,
the run's learning rate as code of each system, and the lines of statekit's own optimizers. Each layout prints its own.
"""
