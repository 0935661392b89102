"""JSON that nobody vouches for, parsed within the job's budget, and as deep as a checkpoint may be in every Python.

What Python's parser will make of a text is bounded before it begins: each value but the first follows a comma or an
opening bracket, so that 60 MB of `[],` are refused by counting.
"""

from __future__ import annotations

import json
import re
from typing import Any

from statekit.errors import FormatError
from statekit.files.budget import NODE_BYTES, Account
from statekit.tensors.tree import MAX_DEPTH

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string, or one that doesn't end: what a match can't begin with is tried once."""


def strict_json(text: bytes | str, place: object, account: Account | None = None) -> Any:
    """Parses JSON; refuses duplicate keys, NaN and infinities, numbers that overflow, and absurd nesting.

    Args:
        text: The text.
        place: Where it stands.
        account: What it draws on, which holds the values until it is closed; one of its own if None.

    Raises:
        FormatError: The text isn't JSON of that kind.
        BudgetError: What it says is more than the job may hold.
    """
    rules = {"object_pairs_hook": _unique, "parse_constant": _no_constant, "parse_float": _finite}
    return _parsed(text, place, account or Account(), rules)


def loose_json(text: bytes | str, place: object, account: Account | None = None) -> Any:
    """Parses JSON as Python's own programs write and read it, with NaN and infinities; refuses absurd nesting.

    Args:
        text: The text.
        place: Where it stands.
        account: As in `strict_json`.

    Raises:
        FormatError: The text isn't JSON of that kind.
        BudgetError: What it says is more than the job may hold.
    """
    return _parsed(text, place, account or Account(), {})


def _parsed(text: bytes | str, place: object, account: Account, rules: dict[str, Any]) -> Any:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    size = len(raw) if raw.isascii() else 4 * len(raw)  # one character may make four bytes of each
    account.hold(size, "A JSON document", f"{place}")  # the strings in it, once they are values
    with account.passing() as taken:
        taken.hold(size, "A JSON document", f"{place}")
        few = account.budget.limits.held // 8
        account.nodes(_most_values(raw, few), "A JSON document", f"{place}")
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


def _most_values(text: bytes, few: int) -> int:
    """Returns how many values a text has at most; beyond a few bytes of them, marks in its strings aren't counted."""
    values = 1 + _marks(text)
    if values * NODE_BYTES <= few:
        return values
    return values - sum(_marks(match[0]) for match in _STRING.finditer(text))


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


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
        known: set[str] = set()
        twice = next(key for key, _ in pairs if key in known or known.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:40]} overflows")
    return value
