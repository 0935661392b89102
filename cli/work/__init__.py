"""`statekit work` and `convert --on`: one conversion, carried out by many processes; and what both show.

In goes a conversion as `statekit convert` takes it, or the folder of a work. Out comes the target, or how far the work
is: one bar over all bytes, a table, or JSON.
"""
