"""The law of printed code: the arguments that are printed for a ref reopen the same ref, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import click

from statekit.cli.arguments import checkpoint_options
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef

_FRESH = """
import sys
from statekit.testing.printed_code import read_back
print(*read_back(sys.argv[1], sys.argv[2:]), sep="\\n")
"""


def check_printed_code(ref: CheckpointRef, *, fresh: bool = True) -> None:
    """Checks that the code of a ref, in Python's spelling and a shell's, reopens the same ref.

    Args:
        ref: A ref with a path.
        fresh: Whether a process of its own reads the code.

    Raises:
        AssertionError: Another ref is opened; names the fields that differ.
    """
    words = [str(ref.path), *ref.words()]
    if fresh:
        command = [sys.executable, "-c", _FRESH, ref.code(), *words]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert lines == [repr(ref)] * 2, f"a fresh process reads {lines}, expected {ref!r}"
        return
    for spelling, other in zip(("Python", "shell"), _read(ref.code(), words), strict=True):
        lost = [known.name for known in OPTIONS if getattr(other, known.name) != getattr(ref, known.name)]
        assert not lost and other.path == ref.path, f"{spelling} code doesn't tell {', '.join(lost)}"


def read_back(code: str, words: Sequence[str]) -> list[str]:
    """Returns the refs that arguments of Python, and words of a command line, make; as their text."""
    return [repr(ref) for ref in _read(code, words)]


def _read(code: str, words: Sequence[str]) -> list[CheckpointRef]:
    command: Any = click.command()(checkpoint_options(lambda ref: ref))
    ref: CheckpointRef = command.main(list(words), standalone_mode=False)
    scope = {"CheckpointRef": CheckpointRef}
    return [eval(f"CheckpointRef({code})", scope), ref]
