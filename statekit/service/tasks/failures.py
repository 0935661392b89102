"""What has gone wrong with a job, as plain data: what a task, a worker and the table of jobs say of it."""

from __future__ import annotations

import errno
from typing import Any

from statekit.errors import StatekitError, printable

_BOUNDED = "do it by the command line, where no service bounds it: what a job takes grows with its checkpoints' bytes"
"""What to do where the service's own bounds are what ends a job (`worker._limits`), and not the disk."""


def problem_of(error: BaseException) -> dict[str, Any]:
    """Returns an error as plain data: its kind, its parts, and its faults one by one."""
    if not isinstance(error, StatekitError):
        detail = "There is not enough memory for this job." if isinstance(error, MemoryError) else str(error)
        expected = isinstance(error, OSError | MemoryError)
        subject = (
            detail if expected and detail else f"statekit itself has failed: {type(error).__name__}: {error}"
        )
        error_kind = "MemoryError" if isinstance(error, MemoryError) else "StatekitError"
        remedy = _BOUNDED if isinstance(error, MemoryError) or _is_too_large(error) else None
        return {"kind": error_kind, "subject": _text(subject[:2000]), "place": None, "expected": None, "found": None,
                "remedy": remedy, "faults": []}  # fmt: skip
    parts = {name: getattr(error, name) for name in ("subject", "place", "expected", "found", "remedy")}
    if _is_too_large(error):
        parts["remedy"] = _BOUNDED
    return {
        "kind": error.kind,
        **{name: None if value in (None, "") else _text(value) for name, value in parts.items()},
        "faults": [{"what": _text(fault), "place": _text(place)} for fault, place in error.faults[:1000]],
    }


def _is_too_large(error: BaseException | None) -> bool:
    """Tells whether a file became longer than the process may write one, whatever that error was made into."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return True
        error = error.__cause__
    return False


def _text(value: object) -> str:
    """Returns a part of an error, as it can be written down and shown whatever names are in it."""
    return printable(str(value)[:8000], keep="\n")


def crash(why: str) -> dict[str, Any]:
    """Returns the problem of a job whose process has ended without an answer."""
    return {
        "kind": "Crash", "subject": "The job's process has ended without an answer.", "place": None, "expected": None,
        "found": why, "remedy": "ask for it again; a checkpoint that ends it each time is damaged or hostile",
        "faults": [],
    }  # fmt: skip
