"""Reads an HDF5 file as a tree: groups are dicts, datasets tensors, and a group's attributes lie under `@`.

The file is parsed here, piece by piece, and each piece once: libhdf5 trusts the pointers in a file, and a node that is
its own child ends the process. Links to elsewhere, values in other files, filters that would have to be loaded, and
sizes that the file doesn't hold are refused before anything is read.

Groups and datasets stand in the order in which they were written (`links`); members named by numbers by those.

Source: The HDF Group, HDF5 File Format Specification 3.0; keras-team/keras, keras/src/saving/saving_lib.py,
`H5IOStore`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from statekit.converters.formats.hdf5.attributes import Attributes
from statekit.converters.formats.hdf5.chunks import DEFLATE, Chunks
from statekit.converters.formats.hdf5.headers import DATASPACE, DATATYPE, Header, read_header
from statekit.converters.formats.hdf5.layouts import Lying, where
from statekit.converters.formats.hdf5.links import links
from statekit.converters.formats.hdf5.structure import AT_ONCE, Structure, broken
from statekit.converters.formats.hdf5.types import Kind, read_kind, read_space
from statekit.converters.formats.storage import MOST_OF_ONE, ZLIB, dense
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.checksums import OF_FILTERS
from statekit.files.source import Held, Part, Source
from statekit.tensors.tensor import DTYPES, Array, DType, Index, Shape, Stored
from statekit.tensors.tree import MAX_DEPTH

_MEMBER_NODES = 8
"""Values of a tree that a group or data set counts for."""
_MEMBER_STEPS = 64
"""Steps of work that one takes."""


def open_hdf5(source: Source, place: str) -> dict[str, Any]:
    """Parses the headers of an HDF5 file, and returns the tree of what it holds.

    Args:
        source: The file, which stays open.
        place: What errors call it.

    Raises:
        CorruptError: The headers are broken, or speak of more than there is.
        RefusedError: It wants values of other files, or filters that aren't allowed.
        FormatError: A dtype, or a part of the format, that statekit doesn't carry.
    """
    reader = _Reader(Structure(source, place))
    root = reader.header(reader.file.root, "", 0)
    group = reader.group(root, "", 0)
    if group is None:
        raise broken(root.place, "no root group")
    return group.tree


class _Group(NamedTuple):
    """A group that was read.

    Attributes:
        first: Where the first data set at or below it is described; None if it has none.
        tree: Its contents.
    """

    first: int | None
    tree: dict[str, Any]


class _Reader:
    """Walks a file once; counts what it meets."""

    def __init__(self, file: Structure) -> None:
        self.file, self._source = file, file.source
        self._attributes = Attributes(file)
        self._seen: set[int] = set()

    def header(self, address: int, name: str, depth: int) -> Header:
        """Returns what is described at an address, which nothing else is."""
        if address in self._seen or depth > MAX_DEPTH:
            raise RefusedError(
                "An HDF5 file holds something twice, or too much.",
                place=f"{name} in {self.file.place}",
                expected=f"a tree of at most {MAX_DEPTH} levels",
            )
        place = f"byte {address} of {self.file.place}"
        self._source.account.step(_MEMBER_STEPS, "An HDF5 file", place)
        self._source.account.nodes(_MEMBER_NODES, "An HDF5 file", place)
        self._seen.add(address)
        return read_header(self.file, address)

    def group(self, header: Header, name: str, depth: int) -> _Group | None:
        """Returns a group and all below it; None if the header is no group's."""
        members = links(self.file, header, name)
        if members is None:
            return None
        attributes = self._attributes.of(header, name)
        parts, starts = dict[str, Any](), dict[str, int]()
        firsts: list[int] = []
        for number, (key, address, _) in enumerate(members):
            if number % AT_ONCE == 0:
                self.file.bring(link.address for link in members[number:])
            path = f"{name}/{key}" if name else key
            if key == ATTRIBUTES:
                raise FormatError("A member of an HDF5 file has an unusable name.", place=path, found=key)
            member = self.header(address, path, depth + 1)
            inner = self.group(member, path, depth + 1)
            first, parts[key] = (address, self._tensor(member, path)) if inner is None else inner
            starts[key] = address if first is None else first
            firsts += [] if first is None else [first]
        # Where the names of some tell nothing, those of none do.
        ordered = all(link.order is not None for link in members)
        orders = {link.name: link.order if ordered else starts[link.name] for link in members}
        tree: dict[str, Any] = {ATTRIBUTES: attributes} if attributes else {}
        tree |= {key: parts[key] for key in sorted(parts, key=lambda key: (_number(key), orders[key]))}
        return _Group(min(firsts, default=None), tree)

    def _tensor(self, header: Header, name: str) -> Stored:
        place = f"{name} in {self.file.place}"
        kind_fields, space = header.fields(DATATYPE), header.fields(DATASPACE)
        if kind_fields is None or space is None:
            raise FormatError("An HDF5 file holds a named type.", place=place)
        kind, shape = read_kind(kind_fields), read_space(space)
        if shape is None:
            raise FormatError("A dataset has no usable shape.", place=place, found="no value")
        dtype = self._dtype(header, kind, name, place)
        lying = where(self.file, header, shape, kind.size, place)
        self._check_size(lying, dtype, shape, place)
        if lying.chunks is not None and lying.listed is not None:
            checksum = next(
                (OF_FILTERS[code] for code, _ in reversed(lying.filters) if code in OF_FILTERS), ""
            )
            lies_as, cut = stored_dtype(kind), lying.chunks
            chunks = Chunks(self._source, lying.listed, shape, cut, lies_as, lying.filters, place)
            read = _Fetch(chunks, lies_as, dtype).read
            return Stored(shape, dtype, read, name, self.file.place, cut, checksum=checksum)
        return self._run(lying, kind, dtype, shape, name)

    def _run(self, lying: Lying, kind: Kind, dtype: DType, shape: Shape, name: str) -> Stored:
        """Returns a tensor whose values lie in one run, as NumPy has them or with the other order of bytes."""
        size = math.prod(shape) * kind.size
        source: Source
        if lying.inside is not None:
            source = Held(lying.inside, self.file.place, self._source.account)
        else:
            source = Part(self._source, lying.start or 0, size)
        is_plain = kind.dtype is not None and (kind.dtype.isnative or kind.dtype.kind == "V")
        lies_as = np.dtype(np.uint8) if dtype.kind == "b" else dtype
        stored = dense(name, self.file.place, lies_as, shape, size, source.read)
        if is_plain and lies_as == dtype:
            return stored
        return Stored(shape, dtype, _Fetch(stored, stored_dtype(kind), dtype).read, name, self.file.place)

    def _dtype(self, header: Header, kind: Kind, name: str, place: str) -> DType:
        """Returns the dtype that values of a data set are carried in."""
        is_opaque = kind.dtype is not None and kind.dtype.kind == "V" and kind.size == 2
        if is_opaque and self._attributes.of(header, name, only="dtype").get("dtype") == "bfloat16":
            return DTYPES["bfloat16"]
        native = None if kind.dtype is None else kind.dtype.newbyteorder("=")
        if native is None or native.name not in DTYPES:
            name_of_kind = kind.name or native
            raise FormatError(
                "A dataset has a dtype that statekit doesn't carry.", place=place, found=name_of_kind
            )
        return native

    def _check_size(self, lying: Lying, dtype: DType, shape: Shape, place: str) -> None:
        size = math.prod(shape) * dtype.itemsize
        stored = lying.size if lying.chunks is None else self._source.size
        deflated = any(code == DEFLATE for code, _ in lying.filters)
        if size > stored * (MOST_OF_ONE[ZLIB] if deflated else 1):
            raise CorruptError(
                "A dataset holds fewer values than it says.",
                place=place,
                expected=f"{size} bytes for {dtype} {shape}",
                found=f"{stored} bytes",
            )
        if lying.start is not None and lying.start + lying.size > self._source.size:
            raise CorruptError("A dataset lies beyond the end of the file.", place=place)


def stored_dtype(kind: Kind) -> DType:
    """Returns the dtype of elements as they lie in the file; a Boolean may be any byte."""
    assert kind.dtype is not None
    return np.dtype(np.uint8) if kind.dtype.kind == "b" else kind.dtype


def _number(name: str) -> int:
    return int(name) if name.isdecimal() and len(name) < 19 else -1


@dataclass(frozen=True)
class _Fetch:
    """Reads blocks of one dataset whose values aren't stored as they are carried.

    Attributes:
        stored: Reads their bytes, as elements of the same size.
        lies_as: How they are stored.
        dtype: What they are carried in.
    """

    stored: Chunks | Stored
    lies_as: DType
    dtype: DType

    def read(self, index: Index) -> Array:
        """Returns a block."""
        block = self.stored.read(index)
        if self.dtype.kind == "b":
            return np.not_equal(block, 0)
        as_stored = np.ascontiguousarray(block).reshape(-1).view(self.lies_as).reshape(block.shape)
        if self.lies_as.kind == "V":
            return as_stored.view(self.dtype)
        return as_stored.astype(self.dtype, copy=False)
