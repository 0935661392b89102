"""A system's function or class that makes a schedule: its arguments, and the rates that it gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.state.rates import Told
from statekit.tensors.typed import fits


@dataclass(frozen=True)
class Function:
    """What makes a schedule.

    Attributes:
        parameters: Its parameters, in their order.
        read: What it comes to, of its arguments by name and the learning rate that a group of parameters begins with,
            which is None where it is unknown. An argument may be missing, or anything.
        defaults: What stands for an argument that a call leaves out.
        beside: Parameters that say nothing of the rate.
    """

    parameters: tuple[str, ...]
    read: Callable[[Mapping[str, Any], float | None], Told]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def is_number(value: Any) -> bool:
    """Tells whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def says(state: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Tells whether a record has all of these fields, each of its type."""
    return all(name in state and fits(state[name], kind) for name, kind in fields.items())


def is_count(value: Any) -> bool:
    """Tells whether a value is a number of updates."""
    return type(value) is int and value >= 0


def fault(
    arguments: Mapping[str, Any],
    needed: Iterable[str],
    counts: Iterable[str] = (),
    others: Iterable[str] = (),
) -> str | None:
    """Returns the fault of arguments that must be numbers: missing ones, or those of another type."""
    names = list(needed)
    if missing := [name for name in names if arguments.get(name) is None]:
        return f"missing {', '.join(missing)}"
    fits = {name: is_count if name in counts else is_number for name in names if name not in others}
    wrong = [
        f"{name} is {arguments[name]!r:.80}" for name, is_fit in fits.items() if not is_fit(arguments[name])
    ]
    return ", ".join(wrong) or None
