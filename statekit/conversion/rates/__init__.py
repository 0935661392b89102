"""The learning rate of a run that goes on, said to the system that goes on with it.

In goes a run's schedule. Out come the lines that make it there: code (Optax' schedules, or plain Python), classes of
Keras and MXNet, or a comment where a system takes no rate from code.
"""
