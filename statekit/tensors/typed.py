"""Checks the values of a file against a declared type, once, as they are read.

A type is written as annotations are: a TypedDict for a record, `dict[str, T]`, `list[T]`, `Sequence[T]` for a list or a
tuple, unions, `Literal`, and `Natural`, `Name` or another bounded type. Input: a value that a reader made of foreign
bytes. Output: the same value, or one error that names every place in it where something else stands.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypeAlias,
    TypedDict,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from statekit.errors import Faults, FormatError, StatekitError, printable
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record

T = TypeVar("T")
Place: TypeAlias = tuple[Any, ...]
MOST_FAULTS = 1000
"""How many faults of one value are looked for."""


@dataclass(frozen=True)
class Limit:
    """What a type with further bounds is, in words, and whether a value of the type keeps to them."""

    text: str
    holds: Callable[[Any], bool]


def is_unicode(text: str) -> bool:
    """Tells whether text can be written down: without the halves of characters that pickles and JSON may hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


Natural: TypeAlias = Annotated[int, Limit("a whole number from 0 on", lambda n: 0 <= n < 2**63)]
"""A count, a size, an index: of at most 63 bits."""
Positive: TypeAlias = Annotated[int, Limit("a whole number above 0", lambda n: 0 < n < 2**63)]
"""What something is divided by."""
Finite: TypeAlias = Annotated[float, Limit("a finite number", math.isfinite)]
Name: TypeAlias = Annotated[str, Limit("text in Unicode", is_unicode)]
"""Text that becomes a name of ours, and so must be writable."""


class Described(TypedDict):
    """A tensor in the JSON view of a tree."""

    name: Name
    shape: list[Natural]
    dtype: str


def typed(
    value: object,
    kind: type[T],
    place: object,
    subject: str = "What a file says has another form than its format gives it",
    error: type[StatekitError] = FormatError,
) -> T:
    """Returns a foreign value, held to a type.

    Args:
        value: What a reader made of a file.
        kind: The type; keys that a TypedDict doesn't name may be there.
        place: Where the value stands: the file.
        subject: What is wrong if it isn't of the type, without a full stop.
        error: The error's class.

    Raises:
        StatekitError: Of class `error`; lists every place where something else stands.

    Example:
        >>> class Group(TypedDict):
        ...     lr: float
        ...     betas: NotRequired[Sequence[float]]
        >>> typed([{"lr": 0.1}, {"betas": 5}], list[Group], "run.pt")
        Traceback (most recent call last):
        ...
        statekit.errors.FormatError: What a file says has another form than its format gives it: 2 faults.
          at: run.pt
          found:
            is missing, expected a number @ 1/lr
            is 5, expected a list of numbers @ 1/betas
    """
    faults = Faults(islice(misfits(value, kind), MOST_FAULTS))
    faults.check(error, subject, place=place)
    return value  # type: ignore[return-value]  # that is what was found out


def fits(value: object, kind: Any) -> bool:
    """Tells whether a value is of a type."""
    form = _form(kind)
    return form.takes(value) if form.is_leaf else next(form.faults(value, ()), None) is None


def misfits(value: object, kind: Any, within: Place = ()) -> Iterator[tuple[str, str]]:
    """Yields what isn't of a type in a value, and where: below the path `within`, at which the value stands."""
    for fault, path in _form(kind).faults(value, within):
        yield fault, "/".join(map(str, path)) or "the top"


def shown(value: object) -> str:
    """Returns a foreign value as it may stand in a message: short, and a container by its kind alone."""
    if isinstance(value, Mapping):
        return "a map"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, Record):
        return f"an object of {printable(value.name)[:80]}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {value.shape}"
    return (
        printable(f"{value!r:.80}") if not isinstance(value, int) or abs(value) < 2**64 else "a huge number"
    )


_Faults: TypeAlias = Iterator[tuple[str, Place]]


@dataclass(frozen=True)
class _Form:
    """A type as it is checked.

    Attributes:
        text: What it is, in words.
        plural: Several of it.
        faults: Yields what isn't of it, and where, of a value that stands at a place.
        takes: Whether a value is of it on the outside, whatever it holds.
        is_leaf: Whether that is all that it is.
    """

    text: str
    plural: str
    faults: Callable[[Any, Place], _Faults]
    takes: Callable[[Any], bool]
    is_leaf: bool = False


def _leaf(text: str, plural: str, takes: Callable[[Any], bool]) -> _Form:
    def faults(value: Any, place: Place) -> _Faults:
        if not takes(value):
            yield f"is {shown(value)}, expected {text}", place

    return _Form(text, plural, faults, takes, True)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _HUGE)


_HUGE = 2**1023
"""Integers from here on may have no float."""
_LEAVES: Mapping[Any, _Form] = {
    Any: _leaf("anything", "anything", lambda value: True),
    object: _leaf("anything", "anything", lambda value: True),
    bool: _leaf("true or false", "flags", lambda value: isinstance(value, bool)),
    int: _leaf("a whole number", "whole numbers", lambda value: type(value) is int),
    float: _leaf("a number", "numbers", _is_number),
    str: _leaf("text", "texts", lambda value: isinstance(value, str)),
    bytes: _leaf("bytes", "bytes", lambda value: isinstance(value, bytes)),
    type(None): _leaf("nothing", "nothing", lambda value: value is None),
    Record: _leaf("an object", "objects", lambda value: isinstance(value, Record)),
    Tensor: _leaf("a tensor", "tensors", lambda value: isinstance(value, Tensor)),
}


@cache
def _form(kind: Any) -> _Form:
    """Returns the form of a type."""
    if kind in _LEAVES:
        return _LEAVES[kind]
    if is_typeddict(kind):
        return _of_record(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(_form(inner[0]), inner[1])
    if origin is Literal:
        text = " or ".join(map(repr, inner))
        return _leaf(
            text, text, lambda value: any(type(value) is type(form) and value == form for form in inner)
        )
    if origin in (Union, types.UnionType):
        return _either([_form(form) for form in inner])
    if origin in (list, Sequence):
        return _of_items(_form(inner[0]), (list,) if origin is list else (list, tuple))
    if origin in (dict, Mapping):
        return _of_entries(_form(inner[0]), _form(inner[1]))
    if origin is tuple:
        return (
            _of_items(_form(inner[0]), (tuple,)) if inner[1:] == (...,) else _of_places([*map(_form, inner)])
        )
    raise TypeError(f"{kind} can't be checked")


def _bounded(form: _Form, limit: Limit) -> _Form:
    def takes(value: Any) -> bool:
        return form.takes(value) and limit.holds(value)

    return _leaf(limit.text, f"{form.plural}, each {limit.text}", takes)


def _either(forms: Sequence[_Form]) -> _Form:
    text = " or ".join(form.text for form in forms)

    def takes(value: Any) -> bool:
        return any(form.takes(value) for form in forms)

    def faults(value: Any, place: Place) -> _Faults:
        fitting = [form for form in forms if form.takes(value)]
        if not fitting:
            yield f"is {shown(value)}, expected {text}", place
        elif all(next(form.faults(value, place), None) for form in fitting):
            yield from fitting[0].faults(value, place)

    return _Form(text, text, faults, takes, all(form.is_leaf for form in forms))


def _of_items(item: _Form, classes: tuple[type, ...]) -> _Form:
    text = f"a list of {item.plural}"

    def takes(value: Any) -> bool:
        return isinstance(value, classes)

    def faults(value: Any, place: Place) -> _Faults:
        if not takes(value):
            yield f"is {shown(value)}, expected {text}", place
            return
        for i, entry in enumerate(value):
            if not (item.is_leaf and item.takes(entry)):
                yield from item.faults(entry, (*place, i))

    return _Form(text, f"lists of {item.plural}", faults, takes)


def _of_places(items: Sequence[_Form]) -> _Form:
    text = f"a list of {len(items)}: {', '.join(item.text for item in items)}"

    def takes(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == len(items)

    def faults(value: Any, place: Place) -> _Faults:
        if not takes(value):
            yield f"is {shown(value)}, expected {text}", place
            return
        for i, (entry, item) in enumerate(zip(value, items, strict=True)):
            yield from item.faults(entry, (*place, i))

    return _Form(text, text, faults, takes)


def _of_entries(key: _Form, item: _Form) -> _Form:
    text = "a map" if item.text == "anything" else f"a map of {item.plural}"

    def faults(value: Any, place: Place) -> _Faults:
        if not isinstance(value, Mapping):
            yield f"is {shown(value)}, expected {text}", place
            return
        is_anything = item.text == "anything"
        for name, member in value.items():
            if not key.takes(name):
                yield f"has the key {shown(name)}, expected {key.text}", place
            elif not is_anything and not (item.is_leaf and item.takes(member)):
                yield from item.faults(member, (*place, name))

    return _Form(text, f"maps of {item.plural}", faults, lambda value: isinstance(value, Mapping))


def _of_record(kind: Any) -> _Form:
    hints = get_type_hints(kind, include_extras=True)
    fields: dict[str, tuple[_Form, bool]] = {}
    for name, hint in hints.items():
        origin = get_origin(hint)
        inner = get_args(hint)[0] if origin in (Required, NotRequired) else hint
        fields[name] = _form(inner), origin is Required or (kind.__total__ and origin is not NotRequired)

    def faults(value: Any, place: Place) -> _Faults:
        if not isinstance(value, Mapping):
            yield f"is {shown(value)}, expected a map", place
            return
        for name, (form, needed) in fields.items():
            if name in value:
                yield from form.faults(value[name], (*place, name))
            elif needed:
                yield f"is missing, expected {form.text}", (*place, name)

    return _Form("a map", "maps", faults, lambda value: isinstance(value, Mapping))
