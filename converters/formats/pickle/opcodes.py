"""What each opcode of a pickle does to the machine. Source: CPython Lib/pickletools.py, protocols 0 to 5."""

from __future__ import annotations

import codecs
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from statekit.converters.formats.pickle.machine import Machine
from statekit.converters.formats.pickle.names import BUILDS, Build, modern_name, shown
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record

MAX_LONG_BYTES = 255
"""A stored integer: 2040 bits, what protocol 2 writes with its short opcode."""
MAX_TEXT_NUMBER = 1000
"""Digits of a number written as text: reading takes the square of their count."""
MAX_ATTRIBUTES = 20

Op: TypeAlias = Callable[[Machine], None]


def _constant(value: Any) -> Op:
    return lambda m: m.stack.append(value)


def _fresh(kind: Callable[[], Any]) -> Op:
    return lambda m: m.stack.append(kind())


def _number(code: str) -> Op:
    layout = struct.Struct(code)

    def op(m: Machine) -> None:
        m.stack.append(layout.unpack_from(m.data, m.pos)[0])
        m.pos += layout.size

    return op


def _sized(code: str, decode: Callable[[Machine, bytes], Any]) -> Op:
    layout = struct.Struct(code)

    def op(m: Machine) -> None:
        count = layout.unpack_from(m.data, m.pos)[0]
        m.pos += layout.size
        if count < 0:
            raise m.broken(f"a length of {count}")
        m.stack.append(decode(m, m.take(count)))

    return op


def _text(_: Machine, raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _old_text(_: Machine, raw: bytes) -> str | bytes:
    # Python 2 wrote text and bytes alike; text is what torch.load's default encoding takes them for.
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        return raw


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


def _tuple(m: Machine) -> None:
    items = tuple(m.cut())
    m.stack.append(items)


def _tuple1(m: Machine) -> None:
    m.stack[-1] = (m.stack[-1],)


def _tuple2(m: Machine) -> None:
    last = m.stack.pop()
    m.stack[-1] = (m.stack[-1], last)


def _tuple3(m: Machine) -> None:
    last, middle = m.stack.pop(), m.stack.pop()
    m.stack[-1] = (m.stack[-1], middle, last)


def _list(m: Machine) -> None:
    items = m.cut()
    m.stack.append(items)


def _dict(m: Machine) -> None:
    items = m.cut()
    m.stack.append({})
    _set(m, items)


def _frozenset(m: Machine) -> None:
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
    for i in range(0, len(pairs), 2):
        key = pairs[i]
        target[key if key.__class__ is str else m.key(key)] = pairs[i + 1]


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _set(m, [key, value])


def _setitems(m: Machine) -> None:
    _set(m, m.cut())


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _pop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.cut()


def _dup(m: Machine) -> None:
    m.stack.append(m.stack[-1])


def _pop_mark(m: Machine) -> None:
    m.cut()


def _get(m: Machine, index: int) -> None:
    value = m.memo[index]
    if value.__class__ is Record:
        newest = m.final.get(id(value))
        if newest is None:
            m.mentioned.add(id(value))
        else:
            value = newest[1]
    m.stack.append(value)


def _put(m: Machine, index: int) -> None:
    if index < 0:
        raise m.broken("a negative place in the memo")
    m.memo[index] = m.stack[-1]


def _memoize(m: Machine) -> None:
    m.memo[len(m.memo)] = m.stack[-1]


def _binget(m: Machine) -> None:
    m.pos += 1
    _get(m, m.data[m.pos - 1])


def _binput(m: Machine) -> None:
    m.pos += 1
    m.memo[m.data[m.pos - 1]] = m.stack[-1]


def _indexed(act: Callable[[Machine, int], None]) -> tuple[Op, Op]:
    """Returns an operation on the memo with its index as text, and as four bytes."""

    def line(m: Machine) -> None:
        act(m, int(_number_line(m)))

    def word(m: Machine) -> None:
        m.pos += 4
        act(m, _WORD(m.data, m.pos - 4)[0])

    return line, word


_WORD = struct.Struct("<I").unpack_from


def _named(m: Machine, module: Any, name: Any) -> Record:
    if module.__class__ is not str or name.__class__ is not str:
        raise m.broken("a name that isn't text")
    return Record(modern_name(module, name))


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


def _reduce(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.call(m.stack[-1], args)


def _newobj(m: Machine) -> None:
    args = m.stack.pop()
    m.stack[-1] = m.new(m.stack[-1], args)


def _newobj_ex(m: Machine) -> None:
    keywords, args = m.stack.pop(), m.stack.pop()
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
        m.become(build(target, state))
    elif target.__class__ is dict or isinstance(target, Tensor):
        _note_attributes(m, "a dict" if target.__class__ is dict else "a tensor", state)
    else:
        raise m.broken(f"a state for a {target.__class__.__name__}")


def _with_state(target: Record, state: Any) -> Record:
    return Record(target.name, target.args, state)


def _note_attributes(m: Machine, owner: str, state: Any) -> None:
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
    m.stack[-1] = m.persistent(m.stack[-1])


def _proto(m: Machine) -> None:
    version = m.take(1)[0]
    if version > 5:
        raise m.broken(f"protocol {version}")


def _frame(m: Machine) -> None:
    m.take(8)


def _unknown(m: Machine) -> None:
    raise m.broken(f"opcode {m.data[m.at]:#04x}")


STOP = ord(".")
_GET, _LONG_BINGET = _indexed(_get)
_PUT, _LONG_BINPUT = _indexed(_put)
_OPS: dict[str, Op] = {
    "N": _constant(None), "\x88": _constant(True), "\x89": _constant(False), ")": _constant(()),
    "]": _fresh(list), "}": _fresh(dict), "\x8f": _fresh(lambda: Record("builtins.set", ([],))),
    "J": _number("<i"), "K": _number("<B"), "M": _number("<H"), "G": _number(">d"),
    "I": _int_line, "L": _long_line, "F": _float_line, "S": _string_line, "V": _unicode_line,
    "T": _sized("<i", _old_text), "U": _sized("<B", _old_text),
    "X": _sized("<I", _text), "\x8c": _sized("<B", _text), "\x8d": _sized("<Q", _text),
    "B": _sized("<I", _raw), "C": _sized("<B", _raw), "\x8e": _sized("<Q", _raw), "\x96": _sized("<Q", _raw),
    "\x8a": _sized("<B", _long), "\x8b": _sized("<i", _long),
    "(": _mark, "t": _tuple, "\x85": _tuple1, "\x86": _tuple2, "\x87": _tuple3,
    "l": _list, "d": _dict, "\x91": _frozenset, "0": _pop, "1": _pop_mark, "2": _dup,
    "a": _append, "e": _appends, "s": _setitem, "u": _setitems, "\x90": _additems,
    "g": _GET, "h": _binget, "j": _LONG_BINGET, "p": _PUT, "q": _binput, "r": _LONG_BINPUT, "\x94": _memoize,
    "c": _global, "\x93": _stack_global, "\x82": _extension, "\x83": _extension, "\x84": _extension,
    "R": _reduce, "\x81": _newobj, "\x92": _newobj_ex, "i": _inst, "o": _obj, "b": _build,
    "P": _persid, "Q": _binpersid, "\x80": _proto, "\x95": _frame, "\x97": _buffer, "\x98": _buffer,
}  # fmt: skip
TABLE: list[Op] = [_OPS.get(chr(code), _unknown) for code in range(256)]
