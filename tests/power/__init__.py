"""Power loss: what is left of a conversion if the power goes at any of its system calls.

`recording_fs` is a file system in memory that writes down every call that changes it; `disk` replays such a journal up
to any call and keeps what was synced, and of the rest whatever a disk may have kept; `conversions` is what is recorded.
"""
