"""The law of verbs: what a user says of a checkpoint reaches every function that a verb hands the checkpoint to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef

_MAKERS = ("statekit.cli.arguments", "statekit.conversion.checkpoint_ref")
"""Modules that make a ref, piece by piece."""


def check_passed_on(ref: CheckpointRef, verb: Callable[[], object]) -> None:
    """Checks that every function of statekit which a verb hands a ref of this path to gets all that was told.

    Args:
        ref: What was told; its path may hold anything.
        verb: The call, which may end in any error.

    Raises:
        AssertionError: No function got a ref of this path, or one lacks what was told; names both.
    """
    # Whatever the file is: by the time of an error the verb has handed its ref on.
    with _watched(ref) as passed, suppress(Exception):
        verb()
    assert passed, "no function of statekit got the ref"
    for function, other in passed:
        lost = [name for name, value in ref.options().items() if getattr(other, name) != value]
        assert not lost, f"{function} isn't told {', '.join(lost)}"


@contextmanager
def _watched(ref: CheckpointRef) -> Iterator[list[tuple[str, CheckpointRef]]]:
    """Yields the refs of a path that functions of statekit are called with from here on, each with the function."""
    passed = list[tuple[str, CheckpointRef]]()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("statekit.") or module in _MAKERS:
            return
        code = frame.f_code
        for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            value = frame.f_locals.get(name)
            if isinstance(value, CheckpointRef) and value.path == ref.path:
                passed.append((f"{module}.{code.co_qualname}", value))

    sys.setprofile(watch)
    try:
        yield passed
    finally:
        sys.setprofile(None)
