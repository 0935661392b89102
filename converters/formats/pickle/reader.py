"""Reads pickles without running them: opcodes in, an inert tree out.

A pickle is a program for a stack machine that may import and call anything. This machine imports and calls nothing:
a name it meets becomes a `Record` of that name, a call becomes the value of an inert constructor from an allow-list
(`names`) or, for an object of a foreign class, a `Record` of its class, arguments and state.
Anything else is refused.

What the machine holds and does is counted as it goes, in bytes and steps of the job's budget: a few bytes of a pickle
can copy a large dict again and again, or use a large tuple as a key many times.
"""

from __future__ import annotations

import codecs
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from statekit.budget import NODE_BYTES, Account
from statekit.converters.formats.pickle.names import (
    BUILDS,
    CALLS,
    Build,
    Call,
    constructor,
    modern_name,
    shown,
)
from statekit.errors import CorruptError, FormatError, RefusedError, StatekitError
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import MAX_DEPTH, Record

Persistent: TypeAlias = Callable[[Any], Any]

MAX_KEY_DEPTH = 16
MAX_KEY_NODES = 1000
"""Levels and parts of a key at most: shared lists in one another make one of any size of a few bytes."""
MAX_INT_KEY = 2**61 - 1
"""Larger integers can be chosen to collide in a dict: CPython hashes them modulo this prime."""
MAX_NOTES, MAX_NAMES = 20, 200
"""How many things are told that have no place in a tree, and how many names of code."""
_SLOT, _ITEM, _ENTRY, _OBJECT = 8, 64, 104, 640
"""Bytes that are counted for a reference, for a small object, for an entry of a dict, and for the value of a call.

Measured in CPython 3.11: an empty dict has 64 bytes, one with an entry 232, a large one 104 for each; a tuple has 40
and 8 for each part; a tensor over a storage, with what describes it, 800.
"""


_COPIED: Mapping[type, tuple[int, int]] = {
    tuple: (_SLOT, 1),
    list: (_SLOT, 1),
    dict: (_ENTRY, 1),
    str: (1, _ITEM),
    bytes: (1, _ITEM),
}
"""Bytes for each part of what a call copies, and how many parts are a step of work."""


class TruncatedPickle(CorruptError):
    """The bytes end before the pickle does."""


class Machine:
    """The stack machine: bytes, position, stack, marks and memo."""

    __slots__ = (
        "account", "at", "calls", "cost", "data", "far", "final", "grown", "hashes", "keys", "marks", "memo",
        "mentioned", "named", "notes", "origin", "persistent", "place", "pos", "stack", "work",
    )  # fmt: skip

    def __init__(
        self, data: bytes, place: str, start: int, persistent: Persistent | None, account: Account
    ) -> None:
        self.account, self.cost, self.work = account, 0, 0
        self.data, self.place, self.pos, self.at = data, place, start, start
        self.calls: dict[str, Call] = dict(CALLS)
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: list[Any] = []  # as writers number what they remember; from a gap on `far` has what is new
        self.far: dict[int, Any] = {}
        self.notes: dict[str, None] = {}
        self.named: dict[str, None] = {}
        self.keys: set[str] = set()
        self.hashes: dict[int, int] = {}
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

    def settle(self) -> None:
        """Asks the budget for what the machine has come to hold, and for the work that it did, since last time."""
        cost, work, self.cost, self.work = self.cost, self.work, 0, 0
        self.account.hold(cost, "A pickle", self.where())
        self.account.step(work, "A pickle", self.where())

    def drop(self) -> None:
        """Lets go of all values: an error's traceback keeps the machine while another reader tries."""
        for items in (self.stack, *self.marks, self.marks, self.memo):
            items.clear()
        for named in (self.far, self.final, self.origin):
            named.clear()

    def copied(self, parts: Collection[Any]) -> None:
        """Counts what a call copies: its arguments, and what these hold themselves."""
        self.work += len(parts)
        if self.work > BATCH:
            self.settle()
        cost, work = _ENTRY + _SLOT * len(parts), 0
        for part in parts:
            counted = _COPIED.get(part.__class__)
            if counted is not None:
                count = len(part)
                cost += counted[0] * count
                work += count // counted[1]
        self.cost += cost
        self.work += work
        if self.cost > LARGE or self.work > BATCH:
            self.settle()

    def note(self, text: str) -> None:
        """Remembers what had no place in the tree."""
        if len(self.notes) < MAX_NOTES:
            self.notes[text] = None

    def take(self, count: int) -> bytes:
        """Returns the next bytes of the pickle."""
        end = self.pos + count
        if end > len(self.data):
            raise self.truncated()
        if count > LARGE:
            self.cost += count
            self.settle()
        piece = self.data[self.pos : end]
        self.pos = end
        return piece

    def line(self) -> bytes:
        """Returns the rest of the line, without its end."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            raise self.truncated()
        self.cost += _ITEM + 4 * (end - self.pos)
        if self.cost > LARGE:
            self.settle()
        piece = self.data[self.pos : end]
        self.pos = end + 1
        return piece

    def cut(self) -> list[Any]:
        """Returns all above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        self.cost += _SLOT * len(items)
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
        self.copied(args)
        self.cost += _OBJECT if args else 0
        try:
            return make(args)
        except FormatError as error:
            raise self._placed(error) from None

    def new(self, cls: Any, args: Any) -> Any:
        """Returns the inert value of an object made without calling its class."""
        if cls.__class__ is not Record or args.__class__ is not tuple:
            raise self.broken("an object of something that isn't a class")
        make = self.calls.get(cls.name)
        self.copied(args)
        try:
            return make(args) if make else Record(cls.name, args)
        except FormatError as error:
            raise self._placed(error) from None

    def _placed(self, error: FormatError) -> FormatError:
        if error.place is not None:
            return error
        return type(error)(
            error.subject, place=self.where(), expected=error.expected, found=error.found, remedy=error.remedy
        )

    def remember(self, index: int, value: Any) -> None:
        """Puts a value into the memo."""
        if index == len(self.memo) and not self.far:
            self.memo.append(value)
        elif index < len(self.memo):
            self.memo[index] = value
        else:
            self.far[index] = value

    def newest(self, value: Record) -> Any:
        """Returns the newest form of an object that the memo holds, or notes that the unfinished one is mentioned."""
        complete = self.final.get(id(value))
        if complete is None:
            self.mentioned.add(id(value))
            return value
        return complete[1]

    def become(self, new: Any) -> None:
        """Puts a more complete form of the object in place of the one on top of the stack."""
        self.cost += 4 * _ENTRY
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
        self.copied(target.args)
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
        left = [MAX_KEY_NODES]
        key = self._frozen(value, MAX_KEY_DEPTH, left)
        self.work += MAX_KEY_NODES - left[0]
        text = repr(key)
        self.cost += len(text) + _ITEM * (MAX_KEY_NODES - left[0])
        if self.cost > LARGE or self.work > BATCH:
            self.settle()
        if text not in self.keys:  # texts are hashed with a secret
            self.keys.add(text)
            hashed = hash(key)
            # CPython's hash of a tuple of numbers isn't keyed, so that many can be chosen to collide, and a dict
            # compares each with all before it.
            self.hashes[hashed] = equal = self.hashes.get(hashed, 0) + 1
            self.work += (equal - 1) * (MAX_KEY_NODES - left[0])
            if self.work > BATCH:
                self.settle()
        return key

    def _frozen(self, value: Any, depth: int, left: list[int]) -> Any:
        left[0] -= 1
        if not depth or left[0] < 0:
            raise self.refused(
                "The key of a dict is too large.",
                f"at most {MAX_KEY_NODES} parts, {MAX_KEY_DEPTH} levels",
                "more",
            )
        if value is None or value.__class__ in _PLAIN:
            return value
        freeze = partial(self._frozen, depth=depth - 1, left=left)
        if isinstance(value, dict):
            return tuple((freeze(k), freeze(v)) for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return tuple(map(freeze, value))
        if isinstance(value, Record):
            return Record(value.name, tuple(map(freeze, value.args)), freeze(value.state))
        if not isinstance(value, (str, int, float, bytes, Tensor)):
            raise self.broken(f"a {value.__class__.__name__} in the key of a dict")
        return value


_PLAIN = frozenset((str, int, bool, float, bytes))
"""Classes of what is a key as it stands."""
MAX_LONG_BYTES = 255
"""A stored integer: 2040 bits, what protocol 2 writes with its short opcode."""
MAX_TEXT_NUMBER = 1000
"""Digits of a number written as text: reading takes the square of their count."""
MAX_ATTRIBUTES = 20
"""How many attributes of an object are told that have no place in a tree."""

Op: TypeAlias = Callable[[Machine], None]


def _constant(value: Any) -> Op:
    def op(m: Machine) -> None:
        m.cost += _SLOT
        m.stack.append(value)

    return op


def _fresh(kind: Callable[[], Any]) -> Op:
    def op(m: Machine) -> None:
        m.cost += _ITEM + 2 * _SLOT
        m.stack.append(kind())

    return op


def _number(code: str) -> Op:
    layout = struct.Struct(code)
    unpack, size = layout.unpack_from, layout.size

    def op(m: Machine) -> None:
        m.cost += _ITEM
        pos = m.pos
        m.stack.append(unpack(m.data, pos)[0])
        m.pos = pos + size

    return op


def _sized(code: str, decode: Callable[[Machine, bytes], Any]) -> Op:
    layout = struct.Struct(code)
    unpack, size = layout.unpack_from, layout.size

    def op(m: Machine) -> None:
        count = unpack(m.data, m.pos)[0]
        m.pos += size
        if count < 0:
            raise m.broken(f"a length of {count}")
        value = decode(m, m.take(count))
        m.cost += _ITEM if count > LARGE else sys.getsizeof(value)
        m.stack.append(value)

    return op


def _text(m: Machine, raw: bytes) -> str:
    if len(raw) > LARGE:
        _widen(m, raw)
    return str(raw, "utf-8", "surrogatepass")


def _old_text(m: Machine, raw: bytes) -> str | bytes:
    # Python 2 wrote text and bytes alike; text is what torch.load's default encoding takes them for.
    if len(raw) > LARGE:
        _widen(m, raw)
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        return raw


def _widen(m: Machine, raw: bytes) -> None:
    m.cost += len(raw) if raw.isascii() else 4 * len(raw)  # one character may make four bytes of each
    m.settle()


def _raw(_: Machine, raw: bytes) -> bytes:
    return raw


def _long(m: Machine, raw: bytes) -> int:
    if len(raw) > MAX_LONG_BYTES:
        raise m.refused(
            "A pickle holds a huge integer.", f"at most {MAX_LONG_BYTES} bytes", f"{len(raw)} bytes"
        )
    return int.from_bytes(raw, "little", signed=True)


def _number_line(m: Machine) -> str:
    raw = m.line()
    if len(raw) > MAX_TEXT_NUMBER:
        raise m.refused("A pickle holds a huge number.", f"at most {MAX_TEXT_NUMBER} digits", f"{len(raw)}")
    return raw.decode("ascii")


def _int_line(m: Machine) -> None:
    text = _number_line(m)
    m.stack.append({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _long_line(m: Machine) -> None:
    m.stack.append(int(_number_line(m).removesuffix("L")))


def _float_line(m: Machine) -> None:
    m.stack.append(float(_number_line(m)))


def _string_line(m: Machine) -> None:
    raw = m.line()
    if len(raw) < 2 or raw[0] != raw[-1] or raw[:1] not in (b"'", b'"'):
        raise m.broken("a string without quotes")
    m.stack.append(_old_text(m, codecs.escape_decode(raw[1:-1])[0]))


def _unicode_line(m: Machine) -> None:
    m.stack.append(m.line().decode("raw-unicode-escape"))


def _tuple1(m: Machine) -> None:
    m.cost += _ITEM
    m.stack[-1] = (m.stack[-1],)


def _tuple3(m: Machine) -> None:
    m.cost += _ITEM
    last, middle = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)


def _list(m: Machine) -> None:
    m.cost += _ITEM
    items = m.cut()
    m.stack.append(items)


def _dict(m: Machine) -> None:
    m.cost += _ITEM
    items = m.cut()
    m.stack.append({})
    _set(m, items)


def _frozenset(m: Machine) -> None:
    m.cost += _OBJECT
    items = m.cut()
    m.stack.append(Record("builtins.frozenset", (items,)))


def _append(m: Machine) -> None:
    value = m.stack.pop()
    m.items(list).append(value)


def _appends(m: Machine) -> None:
    values = m.cut()
    m.items(list).extend(values)


def _additems(m: Machine) -> None:
    values = m.cut()
    target = m.stack[-1]
    if (
        target.__class__ is not Record
        or target.name != "builtins.set"
        or target.args[0].__class__ is not list
    ):
        raise m.broken("members for something that isn't a set")
    target.args[0].extend(values)


def _set(m: Machine, pairs: list[Any]) -> None:
    if len(pairs) % 2:
        raise m.broken("a key without a value")
    target = m.items(dict)
    m.cost += _ITEM + _ENTRY * (len(pairs) // 2)
    for i in range(0, len(pairs), 2):
        key = pairs[i]
        target[key if key.__class__ is str else m.key(key)] = pairs[i + 1]


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set(m, [key, value])


def _setitems(m: Machine) -> None:
    _set(m, m.cut())


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.cut()


def _dup(m: Machine) -> None:
    m.cost += _SLOT
    m.stack.append(m.stack[-1])


def _pop_mark(m: Machine) -> None:
    m.cut()


def _get(m: Machine, index: int) -> None:
    m.cost += _SLOT
    memo = m.memo
    value = memo[index] if 0 <= index < len(memo) else m.far[index]
    m.stack.append(m.newest(value) if value.__class__ is Record else value)


def _put(m: Machine, index: int) -> None:
    if index < 0:
        raise m.broken("a negative place in the memo")
    m.cost += _ENTRY
    m.remember(index, m.stack[-1])


def _get_line(m: Machine) -> None:
    _get(m, int(_number_line(m)))


def _long_binget(m: Machine) -> None:
    m.pos = end = m.pos + 4
    _get(m, _WORD(m.data, end - 4)[0])


def _put_line(m: Machine) -> None:
    _put(m, int(_number_line(m)))


_WORD = struct.Struct("<I").unpack_from


def _named(m: Machine, module: Any, name: Any) -> Record:
    if module.__class__ is not str or name.__class__ is not str:
        raise m.broken("a name that isn't text")
    m.copied((module, name))
    whole = modern_name(module, name)
    if len(m.named) < MAX_NAMES:
        m.named[whole] = None
    return Record(whole)


def _global(m: Machine) -> None:
    module = m.line().decode("utf-8")
    m.stack.append(_named(m, module, m.line().decode("utf-8")))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(_named(m, module, name))


def _extension(m: Machine) -> None:
    raise m.refused("A pickle names code of a private registry.", "names of classes", "an extension opcode")


def _buffer(m: Machine) -> None:
    raise m.refused("A pickle keeps bytes outside itself.", "all bytes inside", "an out-of-band buffer")


def _newobj(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.new(m.stack[-1], args)


def _newobj_ex(m: Machine) -> None:
    keywords, args = m.stack.pop(), m.stack.pop()
    if args.__class__ is not tuple:
        raise m.broken("arguments that aren't a tuple")
    m.copied(args)
    m.stack[-1] = m.new(m.stack[-1], (*args, keywords) if keywords else args)


def _inst(m: Machine) -> None:
    module = m.line().decode("utf-8")
    callee = _named(m, module, m.line().decode("utf-8"))
    args = tuple(m.cut())
    m.stack.append(m.call(callee, args))


def _obj(m: Machine) -> None:
    callee, *args = m.cut()
    m.stack.append(m.call(callee, tuple(args)))


def _build(m: Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if target.__class__ is Record:
        if target.state is not None:
            raise m.broken(f"a second state for an object of {shown(target.name)}")
        build: Build = BUILDS.get(target.name, _with_state)
        if build is not _with_state:
            m.copied((state,))
            m.copied(state if state.__class__ is tuple else ())
            m.cost += _OBJECT
        m.become(build(target, state))
    elif target.__class__ is dict or isinstance(target, Tensor):
        _note_attributes(m, "a dict" if target.__class__ is dict else "a tensor", state)
    else:
        raise m.broken(f"a state for a {target.__class__.__name__}")


def _with_state(target: Record, state: Any) -> Record:
    return Record(target.name, target.args, state)


def _note_attributes(m: Machine, owner: str, state: Any) -> None:
    m.copied((state,))
    names = list(state) if isinstance(state, dict) else ["state"]
    # Every torch state_dict carries `_metadata`, the versions of its modules.
    for name in [name for name in names if name != "_metadata"][:MAX_ATTRIBUTES]:
        m.note(f"attribute {shown(name)} of {owner} has no place in the tree")


def _persid(m: Machine) -> None:
    m.stack.append(m.line().decode("ascii"))
    _binpersid(m)


def _binpersid(m: Machine) -> None:
    if m.persistent is None:
        raise m.refused(
            "A pickle refers to something outside itself.", "all values inside", "a persistent id"
        )
    m.copied((m.stack[-1],))
    m.cost += _OBJECT
    m.stack[-1] = m.persistent(m.stack[-1])


def _proto(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise m.broken(f"protocol {version}")


def _frame(m: Machine) -> None:
    m.take(8)


def _unknown(m: Machine) -> None:
    raise m.broken(f"opcode {m.data[m.at]:#04x}")


_STOP, _BINGET, _LONG_BINGET, _BINPUT, _LONG_BINPUT, _MEMOIZE = b".hjqr\x94"
_BININT1, _MARK, _REDUCE, _TUPLE, _TUPLE2 = b"K(Rt\x86"
_OPS: dict[str, Op] = {  # but those that `_batch` does itself
    "N": _constant(None), "\x88": _constant(True), "\x89": _constant(False), ")": _constant(()),
    "]": _fresh(list), "}": _fresh(dict), "\x8f": _fresh(lambda: Record("builtins.set", ([],))),
    "J": _number("<i"), "M": _number("<H"), "G": _number(">d"),
    "I": _int_line, "L": _long_line, "F": _float_line, "S": _string_line, "V": _unicode_line,
    "T": _sized("<i", _old_text), "U": _sized("<B", _old_text),
    "X": _sized("<I", _text), "\x8c": _sized("<B", _text), "\x8d": _sized("<Q", _text),
    "B": _sized("<I", _raw), "C": _sized("<B", _raw), "\x8e": _sized("<Q", _raw), "\x96": _sized("<Q", _raw),
    "\x8a": _sized("<B", _long), "\x8b": _sized("<i", _long),
    "\x85": _tuple1, "\x87": _tuple3,
    "l": _list, "d": _dict, "\x91": _frozenset, "0": _pop, "1": _pop_mark, "2": _dup,
    "a": _append, "e": _appends, "s": _setitem, "u": _setitems, "\x90": _additems,
    "g": _get_line, "j": _long_binget, "p": _put_line,
    "c": _global, "\x93": _stack_global, "\x82": _extension, "\x83": _extension, "\x84": _extension,
    "\x81": _newobj, "\x92": _newobj_ex, "i": _inst, "o": _obj, "b": _build,
    "P": _persid, "Q": _binpersid, "\x80": _proto, "\x95": _frame, "\x97": _buffer, "\x98": _buffer,
}  # fmt: skip
TABLE: list[Op] = [_OPS.get(chr(code), _unknown) for code in range(256)]


Vocabulary: TypeAlias = Callable[[Callable[[str], None]], Mapping[str, Call]]

BATCH = 4096
"""Opcodes between two questions to the budget."""
LARGE = 2**20
"""Bytes that aren't taken before the budget has been asked."""


@dataclass(frozen=True)
class Unpickled:
    """What a pickle holds.

    Attributes:
        value: The tree.
        end: Offset of the first byte behind the pickle.
        notes: What had no place in the tree, such as attributes of a dict; one sentence each.
        named: The first names of code that it has, each once.
    """

    value: Any
    end: int
    notes: tuple[str, ...]
    named: tuple[str, ...] = ()


def read_pickle(
    data: bytes,
    place: str,
    *,
    start: int = 0,
    calls: Vocabulary | None = None,
    persistent: Persistent | None = None,
    account: Account | None = None,
) -> Unpickled:
    """Reads one pickle as inert data.

    Args:
        data: The bytes that hold the pickle.
        place: Name of the file, for errors.
        start: Offset of the pickle in `data`.
        calls: Makes the inert constructors besides the plain ones (dotted name -> function of the argument tuple);
            it is given a function to call with what has no place in the tree, for `notes`.
        persistent: Returns the value of a persistent id; None refuses them.
        account: What it draws on; one of its own if None.

    Raises:
        TruncatedPickle: `data` ends before the pickle does.
        BudgetError: It asks for more memory or work than the job may take; what parts share counts again for each.
        RefusedError: It calls what isn't inert, holds itself, or has more than 512 levels.
        FormatError: The bytes aren't a pickle.
    """
    if account is None:
        account = Account()
        account.read(len(data))
    with account.passing() as taken:
        machine = Machine(data, place, start, persistent, taken)
        if calls:
            machine.calls |= calls(machine.note)
        try:
            _run(machine)
            if not machine.stack:
                raise machine.broken("no value at its end")
            value = machine.stack[-1]
            nodes = _expanded(value, place, taken)
        except StatekitError:
            machine.drop()
            raise
    account.nodes(nodes, "What a pickle holds", place)
    return Unpickled(value, machine.pos, tuple(machine.notes), tuple(machine.named))


def _run(m: Machine) -> None:
    """Runs to the STOP opcode, whose value is then on top of the stack."""
    try:
        while not _batch(m):
            m.work += BATCH
            m.settle()
        m.settle()
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


def _batch(m: Machine) -> bool:  # noqa: PLR0912, PLR0915 - a branch for each of them
    """Runs the next opcodes; those that stand in every tensor, a dozen times or more, without a call for each.

    Returns:
        Whether that ended at STOP.
    """
    data, table, memo, far, marks, stack = m.data, TABLE, m.memo, m.far, m.marks, m.stack
    at = pos = m.pos
    cost = 0
    try:
        for _ in range(BATCH):
            at, pos = pos, pos + 1
            code = data[at]
            if code > _LONG_BINGET:
                if code == _LONG_BINPUT:
                    pos += 4
                    index = _WORD(data, at + 1)[0]
                    if index == len(memo) and not far:
                        memo.append(stack[-1])
                    else:
                        m.remember(index, stack[-1])
                    cost += _ENTRY
                    continue
                if code == _MEMOIZE:
                    m.remember(len(memo) + len(far), stack[-1])
                    cost += _ENTRY
                    continue
                if code == _TUPLE2:
                    last = stack.pop()
                    stack[-1] = (stack[-1], last)
                    cost += _ITEM
                    continue
                if code == _TUPLE:
                    items = tuple(stack)
                    stack = m.stack = marks.pop()
                    stack.append(items)
                    cost += _ITEM + _SLOT * len(items)
                    continue
                if code == _BINPUT:
                    pos += 1
                    m.remember(data[at + 1], stack[-1])
                    cost += _ENTRY
                    continue
            elif code == _BININT1:
                pos += 1
                stack.append(data[at + 1])  # CPython has one object for each small integer
                cost += _SLOT
                continue
            elif code == _BINGET:
                pos += 1
                _get(m, data[at + 1])
                continue
            elif code == _MARK:
                marks.append(stack)
                stack = m.stack = []
                cost += _ITEM
                continue
            elif code == _REDUCE:
                m.at = at
                args = stack.pop()
                stack[-1] = m.call(stack[-1], args)
                continue
            m.at, m.pos = at, pos
            if code == _STOP:
                return True
            table[code](m)
            pos, stack = m.pos, m.stack
    finally:
        m.at, m.pos = at, max(m.pos, pos)  # an operation that failed has set where it came to
        m.cost += cost
    return False


def _expanded(tree: Any, place: str, account: Account) -> int:
    """Returns the nodes of a tree once what its parts share is written out, visiting each part once."""
    most = account.budget.limits.held // NODE_BYTES
    sizes: dict[int, int] = {}  # by id, like the levels; what has no parts isn't listed
    heights: dict[int, int] = {}
    above: set[int] = set()
    work = [tree]
    counted = 0
    while work:
        node = work.pop()
        if node is _FINISHED:
            node, nodes, holders = work.pop(), work.pop(), work.pop()
            above.discard(id(node))
        elif id(node) in sizes:
            continue
        else:
            if id(node) in above:
                raise _refused(place, "a part that holds itself")
            parts = _parts(node)
            counted += NODE_BYTES + _SLOT * len(parts)
            if counted > LARGE:
                account.hold(counted, "What a pickle holds", place)
                counted = 0
            holders = [part for part in parts if part.__class__ in _HOLDERS and part]
            nodes = 1 + len(parts) - len(holders)
            if holders:
                above.add(id(node))
                work += (holders, nodes, node, _FINISHED, *holders)
                continue
        levels = 1
        for part in holders:
            nodes += sizes[id(part)]
            levels = max(levels, heights[id(part)] + 1)
        sizes[id(node)], heights[id(node)] = nodes, levels
        if nodes > most:
            account.nodes(nodes, "What a pickle holds", place)
        if levels > MAX_DEPTH:
            raise _refused(place, f"{levels} levels")
    return sizes[id(tree)]


_HOLDERS = frozenset((dict, list, tuple, Record))
_FINISHED = object()
"""Comes in the work before a node whose parts are counted."""


def _parts(node: Any) -> Collection[Any]:
    if node.__class__ is dict:
        return node.values()
    if node.__class__ is list or node.__class__ is tuple:
        return node
    return (node.args, node.state) if node.__class__ is Record else ()


def _refused(place: str, what: str) -> RefusedError:
    return RefusedError(
        "The values of a pickle cannot be a checkpoint.",
        place=place,
        expected=f"at most {MAX_DEPTH} levels, no cycles",
        found=what,
    )
