"""The stack machine behind `converters.pickle_reader`: what its opcodes act on, without ever running anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from statekit.converters.formats.pickle.names import CALLS, Call, constructor, shown
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.tensors.tree import Record

Persistent: TypeAlias = Callable[[Any], Any]

MAX_KEY_DEPTH = 16
MAX_KEY_NODES = 1000
MAX_COMPOSITE_KEYS = 200_000
MAX_INT_KEY = 2**61 - 1
"""Larger integers can be chosen to collide in a dict: CPython hashes them modulo this prime."""
MAX_NOTES = 20


class TruncatedPickle(CorruptError):
    """The bytes end before the pickle does."""


class Machine:
    """The stack machine: bytes, position, stack, marks and memo."""

    __slots__ = (
        "at", "calls", "data", "final", "grown", "keys", "marks", "memo", "mentioned", "notes", "origin",
        "persistent", "place", "pos", "stack",
    )  # fmt: skip

    def __init__(self, data: bytes, place: str, start: int, persistent: Persistent | None) -> None:
        self.data, self.place, self.pos, self.at = data, place, start, start
        self.calls: dict[str, Call] = dict(CALLS)
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.notes: dict[str, None] = {}
        self.keys = 0
        # Pickle makes an object in steps (create, append, set items, give state) while Records are frozen: each
        # step makes another Record. `final` leads from the one that the memo holds to the newest one, `origin` back.
        self.final: dict[int, tuple[Record, Any]] = {}
        self.origin: dict[int, Record] = {}
        self.mentioned: set[int] = set()
        self.grown: set[int] = set()

    def where(self) -> str:
        """Returns the place of the current opcode."""
        return f"{self.place}, byte {self.at}"

    def refused(self, subject: str, expected: str, found: str) -> RefusedError:
        """Makes the error for a pickle that asks for too much."""
        return RefusedError(subject, place=self.where(), expected=expected, found=found)

    def broken(self, found: str) -> FormatError:
        """Makes the error for bytes that aren't a pickle."""
        return FormatError("A pickle doesn't follow its format.", place=self.where(), found=found)

    def truncated(self) -> TruncatedPickle:
        """Makes the error for a pickle that ends too early."""
        return TruncatedPickle("A pickle is cut off.", place=self.where(), found=f"{len(self.data)} bytes")

    def note(self, text: str) -> None:
        """Remembers what had no place in the tree."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    def take(self, count: int) -> bytes:
        """Returns the next bytes of the pickle."""
        end = self.pos + count
        if end > len(self.data):
            raise self.truncated()
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def line(self) -> bytes:
        """Returns the rest of the line, without its end."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise self.truncated()
        piece = self.data[self.pos : end]
        self.pos = end + 1
        return piece

    def cut(self) -> list[Any]:
        """Returns all above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def call(self, callee: Any, args: Any) -> Any:
        """Returns the inert value of a call."""
        plain = callee.__class__ is Record and not callee.args and callee.state is None
        if not plain or args.__class__ is not tuple:
            raise self.broken("a call of something that isn't a name")
        name = callee.name
        make = self.calls.get(name)
        if make is None:
            make = constructor(name)
            if make is None:
                raise RefusedError(
                    "A pickle calls a function that statekit doesn't know to be harmless; nothing was run.",
                    place=self.where(),
                    expected="tensors, numbers, text and objects of plain classes",
                    found=f"a call of {shown(name)}",
                    remedy="if you trust its origin, open it with the program that wrote it and save plain data",
                )
            self.calls[name] = make
        return self._make(make, args)

    def new(self, cls: Any, args: Any) -> Any:
        """Returns the inert value of an object made without calling its class."""
        if cls.__class__ is not Record or args.__class__ is not tuple:
            raise self.broken("an object of something that isn't a class")
        make = self.calls.get(cls.name)
        return self._make(make, args) if make else Record(cls.name, args)

    def _make(self, make: Call, args: tuple[Any, ...]) -> Any:
        try:
            return make(args)
        except FormatError as error:
            if error.place is not None:
                raise
            raise type(error)(
                error.subject,
                place=self.where(),
                expected=error.expected,
                found=error.found,
                remedy=error.remedy,
            ) from None

    def become(self, new: Any) -> None:
        """Puts a more complete form of the object in place of the one on top of the stack."""
        old = self.stack[-1]
        origin = self.origin.pop(id(old), old)
        if id(origin) in self.mentioned:
            self.note(
                f"an object of {shown(origin.name)} mentions itself; the mention is kept without its state"
            )
        self.final[id(origin)] = (origin, new)
        self.origin[id(new)] = origin
        self.stack[-1] = new

    def items(self, kind: type[Any]) -> Any:
        """Returns the list or dict that the object on top of the stack collects its items in."""
        target = self.stack[-1]
        if target.__class__ is kind:
            return target
        if target.__class__ is not Record:
            raise self.broken(f"items for a {target.__class__.__name__}")
        if target.args and target.args[-1].__class__ is kind and id(target.args[-1]) in self.grown:
            return target.args[-1]
        items = kind()
        self.grown.add(id(items))
        self.become(Record(target.name, (*target.args, items), target.state))
        return items

    def key(self, value: Any) -> Any:
        """Returns a hashable form of a dict's key: lists and dicts inside become tuples."""
        if value.__class__ is int:
            if -MAX_INT_KEY < value < MAX_INT_KEY:
                return value
            raise self.refused("A dict has a huge key.", "integers below 2**61", f"{value.bit_length()} bits")
        if value is None or value.__class__ in (str, bool, float, bytes):
            return value
        self.keys += 1
        if self.keys > MAX_COMPOSITE_KEYS:
            raise self.refused("Dicts have too many compound keys.", f"at most {MAX_COMPOSITE_KEYS}", "more")
        return self._frozen(value, MAX_KEY_DEPTH, [MAX_KEY_NODES])

    def _frozen(self, value: Any, depth: int, left: list[int]) -> Any:
        left[0] -= 1
        if not depth or left[0] < 0:
            raise self.refused(
                "The key of a dict is too large.",
                f"at most {MAX_KEY_NODES} parts, {MAX_KEY_DEPTH} levels",
                "more",
            )
        freeze = partial(self._frozen, depth=depth - 1, left=left)
        if isinstance(value, dict):
            return tuple((freeze(k), freeze(v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        if isinstance(value, Record):
            return Record(value.name, tuple(map(freeze, value.args)), freeze(value.state))
        return value
