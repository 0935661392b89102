"""What every layout needs in order to print the lines by which its own system goes on from a checkpoint.

In goes a state as plain data, and what is known of its checkpoint (`SavedRun`). Out come an optimizer's arguments, the
run's learning rate as code of each system, and the lines of statekit's own optimizers.
"""
