"""The service over HTTP: who may ask, what may be asked, and how it is answered.

Input: a request; it is measured, its host, sender and origin are checked, and only then is it read. Output: a page,
JSON, a stream of events, or a problem that says subject, place, expected, found and remedy. What is asked for is done
by the catalogue, the jobs and the library's public verbs: nothing here opens a checkpoint.
"""
