"""JSON that nobody vouches for, parsed within limits that are the same in every Python."""

from __future__ import annotations

import json
from typing import Any

from statekit.errors import FormatError, RefusedError
from statekit.tensors.tree import MAX_DEPTH

MAX_BYTES = 100_000_000


def strict_json(text: bytes | str, place: object) -> Any:
    """Parses JSON; refuses duplicate keys, NaN and infinities, numbers that overflow, and absurd sizes or nesting.

    Raises:
        FormatError: The text isn't JSON of that kind.
    """
    return _parsed(text, place, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def loose_json(text: bytes | str, place: object) -> Any:
    """Parses JSON as Python's own programs write and read it, with NaN and infinities; refuses absurd sizes or nesting.

    Raises:
        FormatError: The text isn't JSON of that kind.
    """
    return _parsed(text, place)


def _parsed(text: bytes | str, place: object, **rules: Any) -> Any:
    if len(text) > MAX_BYTES:
        raise RefusedError(
            "A JSON header is too large.",
            place=place,
            expected=f"at most {MAX_BYTES} bytes",
            found=f"{len(text)}",
        )
    try:
        value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **rules)
        too_deep = _deeper(value, MAX_DEPTH)
    except RecursionError:  # how deep Python's parser itself can go differs between its versions
        too_deep = True
    except ValueError as error:
        raise FormatError("This isn't valid JSON.", place=place, found=error) from None
    if too_deep:
        raise FormatError(
            "This isn't valid JSON of a reasonable depth.",
            place=place,
            expected=f"at most {MAX_DEPTH} levels",
            found="more",
        )
    return value


def _deeper(value: Any, levels: int) -> bool:
    """Tells whether lists and objects stand in one another more than so many times."""
    nodes = [value]
    for _ in range(levels + 1):
        nodes = [n for n in nodes if isinstance(n, (dict, list))]
        if not nodes:
            return False
        nodes = [child for n in nodes for child in (n.values() if isinstance(n, dict) else n)]
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"the key {twice!r} stands twice")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:40]} overflows")
    return value
