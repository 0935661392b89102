"""Reads pickles without running them: opcodes in, an inert tree out.

A pickle is a program for a stack machine that may import and call anything. This machine imports and calls nothing:
a name it meets becomes a `Record` of that name, a call becomes the value of an inert constructor from an allow-list
(`converters.pickle_names`) or, for an object of a foreign class, a `Record` of its class, arguments and state.
Anything else is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.converters.formats.pickle.machine import Machine, Persistent
from statekit.converters.formats.pickle.names import Call, shown
from statekit.converters.formats.pickle.opcodes import STOP, TABLE
from statekit.errors import RefusedError, StatekitError
from statekit.tensors.tree import MAX_DEPTH, MAX_NODES, Record

Vocabulary: TypeAlias = Callable[[Callable[[str], None]], Mapping[str, Call]]

BATCH = 4096
"""Opcodes between two checks of the budgets."""
MIN_OPCODES = 1_000_000
MAX_OPCODES = 50_000_000
"""A tensor of an optimizer takes about 22 opcodes in 70 bytes, so the budget grows with the pickle up to this."""
MAX_STACK = 1_000_000
"""Values at once: a tuple lies there whole before it is made, lists and dicts come in thousands."""
MAX_MARKS = 10_000


@dataclass(frozen=True)
class Unpickled:
    """What a pickle holds.

    Attributes:
        value: The tree.
        end: Offset of the first byte behind the pickle.
        notes: What had no place in the tree, such as attributes of a dict; one sentence each.
    """

    value: Any
    end: int
    notes: tuple[str, ...]


def read_pickle(
    data: bytes,
    place: str,
    *,
    start: int = 0,
    calls: Vocabulary | None = None,
    persistent: Persistent | None = None,
) -> Unpickled:
    """Reads one pickle as inert data.

    Opcodes are limited to 1 000 000 or half the bytes of `data`, whichever is more, and to 50 000 000 in any case.

    Args:
        data: The bytes that hold the pickle.
        place: Name of the file, for errors.
        start: Offset of the pickle in `data`.
        calls: Makes the inert constructors besides the plain ones (dotted name -> function of the argument tuple);
            it is given a function to call with what has no place in the tree, for `notes`.
        persistent: Returns the value of a persistent id; None refuses them.

    Raises:
        TruncatedPickle: `data` ends before the pickle does.
        RefusedError: It calls what isn't inert, asks for absurd memory, holds itself, or expands to a tree of more
            than 2 000 000 nodes or 512 levels.
        FormatError: The bytes aren't a pickle.
    """
    machine = Machine(data, place, start, persistent)
    if calls:
        machine.calls |= calls(machine.note)
    _run(machine)
    if not machine.stack:
        raise machine.broken("no value at its end")
    value = machine.stack[-1]
    _bound(value, place)
    return Unpickled(value, machine.pos, tuple(machine.notes))


def _run(m: Machine) -> None:
    """Runs to the STOP opcode, whose value is then on top of the stack."""
    try:
        limit = min(max(MIN_OPCODES, len(m.data) // 2), MAX_OPCODES)
        for _ in range(limit // BATCH + 1):
            if _batch(m):
                return
            _check_budgets(m)
        raise m.refused("A pickle takes too many steps.", f"at most {limit} opcodes", "more")
    except StatekitError:
        raise
    except struct.error:
        raise m.truncated() from None
    except IndexError as error:
        if m.pos > len(m.data):
            raise m.truncated() from None
        raise m.broken(f"{error}") from None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise m.broken(f"{type(error).__name__}: {shown(error)}") from None


def _batch(m: Machine) -> bool:
    data, table = m.data, TABLE
    for _ in range(BATCH):
        m.at = at = m.pos
        m.pos = at + 1
        code = data[at]
        if code == STOP:
            return True
        table[code](m)
    return False


def _check_budgets(m: Machine) -> None:
    deep = len(m.stack) + sum(map(len, m.marks))
    if deep > MAX_STACK or len(m.marks) > MAX_MARKS:
        raise m.refused(
            "A pickle piles up too much.",
            f"at most {MAX_STACK} values on the stack, {MAX_MARKS} marks",
            f"{deep} values, {len(m.marks)} marks",
        )


def _bound(tree: Any, place: str) -> None:
    """Refuses cycles and trees that are too large once what they share is written out, visiting each part once."""
    sizes: dict[int, tuple[int, int]] = {}  # id -> nodes, levels; leaves aren't listed
    above: set[int] = set()
    work = [(tree, False)]
    while work:
        node, finished = work.pop()
        if not finished:
            parts = _parts(node)
            if not parts or id(node) in sizes:
                continue
            if id(node) in above:
                raise _too_large(place, "a part that holds itself")
            above.add(id(node))
            work.append((node, True))
            work.extend((part, False) for part in parts)
            continue
        above.discard(id(node))
        inner = [sizes.get(id(part), (1, 0)) for part in _parts(node)]
        size = sizes[id(node)] = (1 + sum(n for n, _ in inner), 1 + max(depth for _, depth in inner))
        if size[0] > MAX_NODES or size[1] > MAX_DEPTH:
            raise _too_large(place, f"{size[0]} nodes, {size[1]} levels")


def _parts(node: Any) -> Collection[Any]:
    if node.__class__ is dict:
        return node.values()
    if node.__class__ is list or node.__class__ is tuple:
        return node
    return (node.args, node.state) if node.__class__ is Record else ()


def _too_large(place: str, found: str) -> RefusedError:
    return RefusedError(
        "What a pickle holds is too large to be a checkpoint.",
        place=place,
        expected=f"at most {MAX_NODES} nodes, {MAX_DEPTH} levels, no cycles",
        found=found,
    )
