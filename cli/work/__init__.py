"""`statekit work` and `convert --on`: one conversion, carried out by many processes; and what both show.

Input: a conversion as `statekit convert` takes it, or the folder of a work. Output: the target, or how far the work
is: one bar over all bytes, a table, or JSON.
"""
