"""Types and spaces of HDF5: what its elements are, and how many.

Source: The HDF Group, HDF5 File Format Specification 3.0, IV.A.2.b "The Dataspace Message", IV.A.2.d "The Datatype
Message"; h5py, h5t.pyx: a Boolean is an enumeration of FALSE and TRUE, a complex number a compound of r and i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from statekit.converters.formats.hdf5.structure import Fields, broken
from statekit.errors import FormatError
from statekit.tensors.tensor import DType, Shape

_FIXED, _FLOAT, _STRING, _OPAQUE, _COMPOUND, _ENUM, _VARIABLE = 0, 1, 3, 5, 6, 8, 9
_NAMES = (
    *("integer", "float", "time", "string", "bitfield", "opaque", "compound", "reference", "enumeration"),
    *("variable length", "array", "complex"),
)
_IEEE = {2: (15, 10, 5, 10, 15), 4: (31, 23, 8, 23, 127), 8: (63, 52, 11, 52, 1023)}
"""Bytes -> place of the sign, place and bits of the exponent, bits of the mantissa, bias of the exponent."""
_DEEPEST = 4
_MOST_AXES = 32
_NULL = 2


@dataclass(frozen=True)
class Kind:
    """The type of elements.

    Attributes:
        dtype: As NumPy has them where they lie as they are stored; None of texts of variable length.
        size: Bytes of an element.
        is_text: Whether it is a text.
        name: What it is called in errors.
    """

    dtype: DType | None
    size: int
    is_text: bool = False
    name: str = ""


def read_kind(fields: Fields, depth: int = 0) -> Kind:
    """Reads a type.

    Raises:
        CorruptError: It is broken.
        FormatError: It is none that statekit carries.
    """
    first, bits, size = fields.number(1), fields.number(3), fields.number(4)
    version, code = first >> 4, first & 15
    if not 1 <= version <= 5 or not size or depth > _DEEPEST:
        raise broken(fields.place, f"a type of version {version} with {size} bytes")
    if code == _FIXED:
        return Kind(_integer(fields, bits, size), size)
    if code == _FLOAT:
        return Kind(_float(fields, bits, size), size)
    if code == _STRING:
        return Kind(np.dtype(f"S{size}"), size, True, f"texts of {size} bytes")
    if code == _OPAQUE:
        fields.take(min(bits & 0xFF, fields.left))
        return Kind(np.dtype(f"V{size}"), size, False, f"{size} opaque bytes")
    if code == _VARIABLE and bits & 15 == 1:
        read_kind(fields, depth + 1)
        return Kind(None, size, True, "texts")
    if code == _ENUM:
        return _enumeration(fields, bits & 0xFFFF, version, depth)
    if code == _COMPOUND:
        return _complex(fields, bits & 0xFFFF, size, version, depth)
    raise _uncarried(fields, _NAMES[code] if code < len(_NAMES) else f"class {code}")


def _integer(fields: Fields, bits: int, size: int) -> DType:
    start, precision = fields.number(2), fields.number(2)
    if size not in (1, 2, 4, 8) or start or precision != 8 * size:
        raise _uncarried(fields, f"integers of {precision} bits from bit {start} in {size} bytes")
    return np.dtype(f"{'>' if bits & 1 else '<'}{'i' if bits & 8 else 'u'}{size}")


def _float(fields: Fields, bits: int, size: int) -> DType:
    start, precision = fields.number(2), fields.number(2)
    exponent, width, mantissa, digits = (fields.number(1) for _ in range(4))
    form = (bits >> 8 & 0xFF, exponent, width, digits, fields.number(4))
    is_usual = _IEEE.get(size) == form and not (start or mantissa) and precision == 8 * size
    if not is_usual or bits >> 4 & 3 != 2 or bits & 0x40:
        raise _uncarried(
            fields, f"floats of {precision} bits in {size} bytes, of another form than IEEE 754's"
        )
    return np.dtype(f"{'>' if bits & 1 else '<'}f{size}")


def _enumeration(fields: Fields, count: int, version: int, depth: int) -> Kind:
    base = read_kind(fields, depth + 1)
    if base.dtype is None or base.dtype.kind not in "iu":
        raise _uncarried(fields, "an enumeration of no integers")
    names = []
    for _ in range(count):
        start = fields.at
        names.append(fields.text())
        if version < 3:
            fields.align(start)
    values = np.ndarray(count, base.dtype, fields.take(count * base.size)).tolist()
    if base.size == 1 and dict(zip(names, values, strict=True)) == {b"FALSE": 0, b"TRUE": 1}:
        return Kind(np.dtype(bool), 1)
    return base


def _complex(fields: Fields, count: int, size: int, version: int, depth: int) -> Kind:
    members = {}
    for _ in range(count if count == 2 else 0):
        start = fields.at
        name = fields.text()
        if version < 3:
            fields.align(start)
        at = fields.number(4 if version < 3 else max(1, (size.bit_length() + 7) // 8))
        fields.take(28 if version == 1 else 0)
        members[name, at] = read_kind(fields, depth + 1).dtype
    kinds = {*members.values()}
    real = kinds.pop() if len(kinds) == 1 else None
    if (
        real is None
        or real.kind != "f"
        or [*members] != [(b"r", 0), (b"i", size // 2)]
        or real.itemsize * 2 != size
    ):
        raise _uncarried(fields, "a compound")
    if size not in (8, 16):
        raise _uncarried(fields, f"complex numbers of {size} bytes")
    return Kind(np.dtype(f"{real.byteorder.replace('=', '<')}c{size}"), size)


def _uncarried(fields: Fields, name: str) -> FormatError:
    return FormatError("A dataset has a dtype that statekit doesn't carry.", place=fields.place, found=name)


_MOST_VALUES = 2**55
"""Values of a data set at most: of 16 bytes each they are addressed by 63 bits, with room for 16 times as many."""


def read_space(fields: Fields) -> Shape | None:
    """Reads a shape; None if there are no elements at all, not even one.

    Raises:
        CorruptError: It is broken.
    """
    version, rank, flags = fields.number(1), fields.number(1), fields.number(1)
    if version not in (1, 2) or rank > _MOST_AXES:
        raise broken(fields.place, f"a space of version {version} with {rank} axes")
    kind = fields.number(1)
    if version == 1:
        fields.take(4)
    if version == 2 and kind == _NULL:
        return None
    shape = tuple(fields.length() for _ in range(rank))
    if math.prod(max(n, 1) for n in shape) >= _MOST_VALUES:  # NumPy takes no other, though an axis be 0
        raise broken(fields.place, f"a shape of {shape}")
    if flags & 1:
        for _ in range(rank):
            fields.length()
    return shape
