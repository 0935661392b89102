"""One plan, many workers: any processes run the tasks of a conversion, and one process finishes it.

All workers see one folder. It has `work.json`, a record of each task that is done, and the output of each attempt. The
target is the one that a single process would write with the same cut. No process coordinates the others: any worker
may run a task without a record, and a second attempt is dropped.
"""
