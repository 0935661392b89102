"""One plan, many workers: a conversion is split into tasks that any processes carry out, and finished by one.

In goes a plan and a folder that all workers see. The folder has `work.json`, a record of each task that is done, and
what each attempt at a task writes. Out comes the target that one process would write, cut alike. No process
coordinates the others: whoever finds a task without a record may run it, and an attempt that comes second is dropped.
"""
