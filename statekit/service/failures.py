"""What has gone wrong with a job, as plain data: what a task, a worker and the table of jobs say of it."""

from __future__ import annotations

from typing import Any

from statekit.errors import StatekitError, printable


def problem_of(error: BaseException) -> dict[str, Any]:
    """Returns an error as plain data: its kind, its parts, and its faults one by one."""
    if not isinstance(error, StatekitError):
        said = "There is not enough memory for this job." if isinstance(error, MemoryError) else str(error)
        expected = isinstance(error, OSError | MemoryError)
        subject = (
            said if expected and said else f"statekit itself has failed: {type(error).__name__}: {error}"
        )
        error_kind = "MemoryError" if isinstance(error, MemoryError) else "StatekitError"
        return {"kind": error_kind, "subject": _text(subject[:2000]), "place": None, "expected": None, "found": None,
                "remedy": None, "faults": []}  # fmt: skip
    parts = {name: getattr(error, name) for name in ("subject", "place", "expected", "found", "remedy")}
    return {
        "kind": error.kind,
        **{name: None if value in (None, "") else _text(value) for name, value in parts.items()},
        "faults": [{"what": _text(what), "place": _text(place)} for what, place in error.faults[:1000]],
    }


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
