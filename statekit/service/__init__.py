"""The service: a catalogue of checkpoints by reference, jobs over the library's verbs, and who was made of whom.

In go folders that are scanned, and requests. Out come records (records.py) of what lies there and of what was done.
Nothing is copied into the service, and nothing is opened, converted or judged by other code than the library's: that
runs in processes of its own, whose end is never the service's.
"""
