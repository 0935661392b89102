"""Attributes of HDF5 groups and data sets as plain data: numbers, texts and lists of them.

Source: The HDF Group, HDF5 File Format Specification 3.0, IV.A.2.m "The Attribute Message", IV.A.2.p "The Attribute
Info Message", VIII "Appendix: Types of Indexes"; what h5py's AttributeManager gives for each type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from statekit.converters.formats.hdf5.headers import ATTRIBUTE, ATTRIBUTE_INFO, SHARED, Header
from statekit.converters.formats.hdf5.heaps import global_heap, objects
from statekit.converters.formats.hdf5.structure import Fields, Structure, broken
from statekit.converters.formats.hdf5.types import Kind, read_kind, read_space
from statekit.errors import CorruptError, FormatError
from statekit.tensors.tensor import Shape

_RECORDS = 8
_TRACKED = 1
_STEPS = 16
"""Steps of work that an attribute takes."""


class Attributes:
    """Reads the attributes of a file."""

    def __init__(self, file: Structure) -> None:
        self._file, self._account = file, file.source.account
        self._heaps: dict[int, dict[int, bytes]] = {}

    def of(self, header: Header, owner: str, only: str | None = None) -> dict[str, Any]:
        """Returns the attributes of a group or data set by name.

        Args:
            header: Its header.
            owner: Its name, for errors.
            only: The name of the one that is asked for; all if None.

        Raises:
            CorruptError: One is broken.
            FormatError: One isn't plain data.
        """
        values: dict[str, Any] = {}
        for fields in self._stored(header):
            self._account.step(_STEPS, "An HDF5 file", fields.place)
            self._account.nodes(1, "An HDF5 file", fields.place)
            name, kind, space, data = self._parts(fields)
            place = f"{owner}@{name} in {self._file.place}"
            if name in values:
                raise broken(place, "two attributes of one name")
            if only in (None, name):
                values[name] = self._value(self._kind(kind, place), read_space(space), data, place)
        return values

    def _stored(self, header: Header) -> Iterator[Fields]:
        for message in header.all_of(ATTRIBUTE):
            if message.flags & SHARED:
                raise broken(header.place, "an attribute that lies elsewhere")
            yield message.fields
        info = header.fields(ATTRIBUTE_INFO)
        if info is None:
            return
        version, flags = info.number(1), info.number(1)
        if version:
            raise broken(info.place, f"attributes of version {version}")
        info.take(2 if flags & _TRACKED else 0)
        heap, index = info.address(), info.address()
        yield from objects(self._file, heap, index, _RECORDS, 0)

    def _parts(self, fields: Fields) -> tuple[str, Fields, Fields, Fields]:
        """Returns an attribute's name, type, space and values."""
        version, flags = fields.number(1), fields.number(1)
        sizes = [fields.number(2) for _ in range(3)]
        if version not in (1, 2, 3):
            raise broken(fields.place, f"an attribute of version {version}")
        if version > 1 and flags & 3:
            raise FormatError("An HDF5 file holds a named type.", place=fields.place)
        fields.take(1 if version == 3 else 0)
        parts = []
        for size in sizes:
            start = fields.at
            parts.append(fields.part(size))
            if version == 1:
                fields.align(start)
        name, kind, space = parts
        return name.text().decode("utf-8", "surrogateescape"), kind, space, fields

    def _kind(self, fields: Fields, place: str) -> Kind:
        try:
            kind = read_kind(fields)
        except CorruptError:
            raise
        except FormatError as error:
            raise FormatError("An attribute isn't plain data.", place=place, found=error.found) from error
        if not kind.is_text and (kind.dtype is None or kind.dtype.kind not in "biuf"):
            raise FormatError("An attribute isn't plain data.", place=place, found=kind.name or kind.dtype)
        return kind

    def _value(self, kind: Kind, shape: Shape | None, data: Fields, place: str) -> Any:
        if shape is None:
            raise FormatError("An attribute isn't plain data.", place=place, found="no value")
        count = math.prod(shape)
        if count * kind.size > data.left:
            raise broken(place, f"{data.left} bytes of {count} elements")
        self._account.nodes(count, "An attribute", place)
        self._account.hold(count * kind.size, "An attribute", place)
        if kind.dtype is not None:
            return np.ndarray(shape, kind.dtype, data.take(count * kind.size)).tolist()
        texts = np.empty(count, object)
        texts[:] = [self._text(data, place) for _ in range(count)]
        return texts.reshape(shape).tolist()

    def _text(self, data: Fields, place: str) -> str:
        """Returns a text of variable length: its bytes lie in a global heap."""
        size, heap, number = data.number(4), data.address(), data.number(4)
        if not size or not heap:
            return ""
        if heap not in self._heaps:
            self._heaps[heap] = global_heap(self._file, heap)
        content = self._heaps[heap].get(number, b"")
        if size > len(content):
            raise broken(place, f"a text of {size} bytes in an object of {len(content)}")
        self._account.hold(size, "An attribute", place)
        return content[:size].partition(b"\0")[0].decode("utf-8", "surrogateescape")
