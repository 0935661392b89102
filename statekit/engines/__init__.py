"""Engines: the schedulers that run the tasks of a work. Each is thin, and loaded when `--on` names it.

An engine takes a work's folder and a task's number, and returns whether the attempt ended well. The attempt's output
lies in the work's folder; no tensor passes through an engine.
"""
