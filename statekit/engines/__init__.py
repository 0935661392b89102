"""Engines that people already run: where the tasks of a work go. Each is thin, and loaded when `--on` names it.

In goes a work's folder and a task's number. Out comes whether the attempt ended well; what it wrote is in the work's
folder, and no tensor passes through an engine.
"""
