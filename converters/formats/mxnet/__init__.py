"""MXNet's `.params` and `.states`.

This package reads and writes both kinds of file, without MXNet. Input: an open file, or arrays by name and states by
index. Output: these, with the generation and form that a file is written in; or a file.
"""
