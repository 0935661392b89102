"""The service: a catalogue of checkpoints by reference, jobs over the library's verbs, and lineage.

It scans folders, answers requests, and keeps records (records.py) of checkpoints and jobs. It copies no checkpoint. The
library alone opens, converts and judges, in processes of its own: if one of them dies, the service goes on.
"""
