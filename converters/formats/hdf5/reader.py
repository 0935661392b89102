"""Reads an HDF5 file as a tree: groups are dicts, datasets tensors, and a group's attributes lie under `@`.

The library that parses HDF5 is the original one. What it would do on the file's word alone isn't asked of it: links
to elsewhere, values in other files, filters that would have to be loaded, and sizes that the file doesn't hold are
refused before anything is read.

Groups and datasets stand in the order in which they were written. The library lists members by name. Where they are
described doesn't tell their order either: what a group that grew left free, a later and smaller member takes. But names
are put into the group's local heap one behind the other; where a group has none, the places of what it holds count.

Source: The HDF Group, HDF5 File Format Specification 3.0, III.D "Local Heaps", IV.A.1.a "Version 1 Data Object Header
Prefix", IV.A.2.r "The Symbol Table Message"; keras-team/keras, keras/src/saving/saving_lib.py, `H5IOStore`.
"""

from __future__ import annotations

import atexit
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from statekit.budget import Account
from statekit.converters.formats.decompression import MOST_OF_ONE, ZLIB
from statekit.converters.formats.hdf5.chunks import DEFLATE, FLETCHER32, SHUFFLE, Chunks
from statekit.converters.formats.hdf5.heaps import Watched
from statekit.converters.formats.storage import dense
from statekit.errors import CorruptError, FormatError, RefusedError, StatekitError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.checksums import OF_FILTERS
from statekit.files.source import Part, Source, as_file
from statekit.tensors.tensor import DTYPES, Array, DType, Index, Shape, Stored
from statekit.tensors.tree import MAX_DEPTH

Read: TypeAlias = Callable[[int, int], bytes]
"""Gives so many bytes from an address on; fewer at the end of the file."""

_SYMBOL_TABLE, _CONTINUATION = 0x11, 0x10
_PREFIX, _MESSAGE, _HEAP = struct.Struct("<BxHIIxxxx"), struct.Struct("<HHxxxx"), struct.Struct("<4sB3xQQQ")
_TWO = struct.Struct("<QQ")
_ALIGNED = 8


class Names:
    """Reads groups' names, of a file whose addresses have 8 bytes; no more bytes of it than there are."""

    def __init__(self, read: Read, size: int, account: Account, place: str) -> None:
        self._read, self._left, self._account, self._place = read, size, account, place

    def of(self, address: int) -> dict[str, int]:
        """Returns where each name of a group stands among them; none if the group has no local heap.

        Args:
            address: Where the group is described.
        """
        try:
            heap = self._heap(address)
            if heap is None:
                return {}
            mark, version, size, free, start = _HEAP.unpack(self._bytes(heap, _HEAP.size))
            if (mark, version) != (b"HEAP", 0):
                return {}
            with self._account.passing() as passing:
                passing.hold(2 * size, "The names of a group", f"byte {start} of {self._place}")
                return _heap_names(self._bytes(start, size), free)
        except (struct.error, OSError, OverflowError, ValueError):
            return {}

    def _bytes(self, address: int, length: int) -> bytes:
        self._left -= length
        if self._left < 0:
            raise ValueError("headers lie over each other")
        with self._account.passing() as passing:
            passing.hold(length, "A header", f"byte {address} of {self._place}")
            return self._read(address, length)

    def _heap(self, address: int) -> int | None:
        """Returns the address of a group's heap."""
        version, _, _, size = _PREFIX.unpack(self._bytes(address, _PREFIX.size))
        blocks = [(address + _PREFIX.size, size)] if version == 1 else []
        for at, length in blocks:  # grows while headers go on elsewhere
            block, here = self._bytes(at, length), 0
            while here + _MESSAGE.size <= len(block):
                kind, size = _MESSAGE.unpack_from(block, here)
                here += _MESSAGE.size
                if kind == _SYMBOL_TABLE:
                    return int(_TWO.unpack_from(block, here)[1])
                if kind == _CONTINUATION:
                    blocks.append(_TWO.unpack_from(block, here))
                here += size
        return None


def _heap_names(heap: bytes, free: int) -> dict[str, int]:
    """Returns where in a heap each name begins, given where its free space does."""
    offsets: dict[str, int] = {}
    here = 0
    while here < len(heap) and here != free:
        end = heap.find(b"\0", here)
        if end < 0:
            break
        offsets[heap[here:end].decode("utf-8", "replace")] = here
        here = end + _ALIGNED - end % _ALIGNED
    return offsets


if TYPE_CHECKING:
    import h5py

_MEMBER_NODES = 8
"""Values of a tree that a group or data set counts for, with what the library keeps of it."""
_MEMBER_STEPS = 64
"""Steps of work that one takes."""
_ATTRIBUTE_STEPS = 16
"""Steps of work that an attribute takes."""
_FILTERS = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32"}
_VIRTUAL = 3
_FAULTS = (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError, IndexError, MemoryError)


@dataclass(frozen=True)
class Opened:
    """An HDF5 file.

    Attributes:
        tree: What it holds.
        file: To be closed.
    """

    tree: dict[str, Any]
    file: h5py.File

    def close(self) -> None:
        """Closes the file."""
        self.file.close()
        atexit.unregister(self.file.close)


def open_hdf5(source: Source, place: str) -> Opened:
    """Parses the headers of an HDF5 file.

    Args:
        source: The file.
        place: What errors call it.

    Raises:
        CorruptError: The headers are broken, or speak of more than there is.
        RefusedError: It wants values of other files, or filters that aren't allowed.
        FormatError: A dtype that statekit doesn't carry.
    """
    import h5py

    raw = as_file(source)
    watched = Watched(raw, source.account, place)
    with parsing(place):
        file = h5py.File(watched, "r")
    try:
        with parsing(place):
            names = _names(file, raw, source.account, place)
            tree = _Reader(file, source, place, watched, names).group(file["/"], "", 0)[1]
    except BaseException:
        file.close()
        raise
    watched.watching = False
    atexit.register(file.close)  # one that is open still when Python ends crashes it
    return Opened(tree, file)


@contextmanager
def parsing(place: str) -> Iterator[None]:
    """Turns what the HDF5 library raises into a CorruptError."""
    try:
        yield
    except StatekitError:
        raise
    except _FAULTS as error:
        raise CorruptError(
            "An HDF5 file can't be read.",
            place=place,
            found=f"{type(error).__name__}: {error}"[:300],
            remedy="copy the file again, whole",
        ) from error


def _names(file: Any, source: Any, account: Account, place: str) -> Names | None:
    """Returns what reads the names of a file's groups; None where addresses aren't as usual."""
    if file.id.get_create_plist().get_sizes() != (8, 8) or file.userblock_size:
        return None

    def read(address: int, length: int) -> bytes:
        source.seek(address)
        return bytes(source.read(length) or b"")

    return Names(read, int(file.id.get_filesize()), account, place)


class _Reader:
    """Walks a file once; counts what it meets."""

    def __init__(self, file: Any, source: Source, place: str, watched: Watched, names: Names | None) -> None:
        self._file, self._source, self._place, self._names = file, source, place, names
        self._watched = watched
        self._seen: set[int] = set()

    def group(self, group: Any, name: str, depth: int) -> tuple[int, dict[str, Any]]:
        """Returns a group's contents, and where in the file the first of its datasets is described."""
        import h5py

        address = self._met(group, name, depth)
        members: list[tuple[tuple[int, int], str, Any]] = []
        keys = list(group)
        named = self._names.of(address) if self._names and len(keys) > 1 else {}  # one needs no order
        named = named if all(key in named for key in keys) else {}
        firsts = []
        for key in keys:
            path = f"{name}/{key}" if name else key
            if group.id.links.get_info(key.encode("utf-8", "surrogateescape")).type != h5py.h5l.TYPE_HARD:
                raise RefusedError(
                    "An HDF5 file links to something elsewhere.",
                    place=f"{path} in {self._place}",
                    expected="values that lie where they are named",
                    remedy="write it again with the library it came from",
                )
            if key == ATTRIBUTES:
                raise FormatError("A member of an HDF5 file has an unusable name.", place=path, found=key)
            member = group[key]
            value: Any
            if isinstance(member, h5py.Group):
                at, value = self.group(member, path, depth + 1)
            elif isinstance(member, h5py.Dataset):
                at, value = self._met(member, path, depth), self._tensor(member, path)
            else:
                raise FormatError("An HDF5 file holds a named type.", place=f"{path} in {self._place}")
            number = int(key) if key.isdecimal() and len(key) < 19 else -1
            members.append(((number, named.get(key, at)), key, value))
            if not isinstance(value, dict) or _holds(value):
                firsts.append(at)
        members.sort(key=lambda item: item[0])
        tree = {key: value for _, key, value in members}
        attributes = self._attributes(group, name)
        return min(firsts, default=address), {**({ATTRIBUTES: attributes} if attributes else {}), **tree}

    def _met(self, item: Any, name: str, depth: int) -> int:
        import h5py

        address = int(h5py.h5o.get_info(item.id).addr)
        if address in self._seen or depth > MAX_DEPTH:
            raise RefusedError(
                "An HDF5 file holds something twice, or too much.",
                place=f"{name} in {self._place}",
                expected=f"a tree of at most {MAX_DEPTH} levels",
            )
        place = f"byte {address} of {self._place}"
        self._source.account.step(_MEMBER_STEPS, "An HDF5 file", place)
        self._source.account.nodes(_MEMBER_NODES, "An HDF5 file", place)
        self._seen.add(address)
        return address

    def _attributes(self, item: Any, name: str) -> dict[str, Any]:
        attributes, place = item.attrs, f"{name} in {self._place}"
        if not (count := len(attributes)):
            return {}
        self._source.account.step(count * _ATTRIBUTE_STEPS, "An HDF5 file", place)
        self._source.account.nodes(count, "An HDF5 file", place)
        return {
            str(key): self._plain(attributes, key, f"{name}@{key} in {self._place}") for key in attributes
        }

    def _plain(self, attributes: Any, key: str, place: str) -> Any:
        """Returns an attribute as plain data."""
        import h5py

        stored, account = attributes.get_id(key), self._source.account
        count, size = math.prod(stored.shape or (0,)), stored.get_storage_size()
        kind = stored.dtype.base
        is_text = h5py.check_string_dtype(kind) is not None
        if kind.kind not in "biufSU" and not is_text:  # libhdf5 can crash at sequences that are damaged texts
            raise FormatError("An attribute isn't plain data.", place=place, found=kind)
        account.nodes(count, "An attribute", place)
        account.hold(size, "An attribute", place)
        with self._watched.giving(count if stored.dtype.kind == "O" else 0):
            value = attributes[key]
        if isinstance(value, (str, bytes)):
            account.hold(len(value), "An attribute", place)
            return value
        if isinstance(value, np.generic | np.ndarray):
            texts = value.ravel() if value.dtype.kind == "O" else ()
            account.hold(
                sum(len(one) for one in texts if isinstance(one, (str, bytes))), "An attribute", place
            )
            return value.tolist()
        raise FormatError("An attribute isn't plain data.", place=place, found=type(value).__name__)

    def _tensor(self, dataset: Any, name: str) -> Stored:
        place = f"{name} in {self._place}"
        kind = dataset.dtype
        wide = kind.newbyteorder("=") if kind.kind != "V" else kind
        if kind.kind == "V" and kind.itemsize == 2 and _says_bfloat16(dataset):
            wide = DTYPES["bfloat16"]
        elif kind.name not in DTYPES:
            raise FormatError("A dataset has a dtype that statekit doesn't carry.", place=place, found=kind)
        if dataset.shape is None or len(dataset.shape) > 32:
            raise FormatError("A dataset has no usable shape.", place=place, found=dataset.shape)
        shape = tuple(map(int, dataset.shape))
        chunk, checksum, chunks = self._layout(dataset, shape, wide, place)
        start = self._start(dataset)
        if start is not None:
            size = math.prod(shape) * wide.itemsize
            return dense(name, self._place, wide, shape, size, Part(self._source, start, size).read)
        fetch = _Fetch(dataset, wide, place, chunks).read
        return Stored(shape, wide, fetch, name, self._place, chunk, checksum=checksum)

    def _start(self, dataset: Any) -> int | None:
        """Returns where values begin that lie in one run as NumPy has them, so that the library needn't read them."""
        as_here = dataset.dtype.kind == "V" or (dataset.dtype.isnative and _stored_as(dataset))
        start = None if dataset.chunks or self._file.userblock_size else dataset.id.get_offset()
        return None if start is None or not as_here else int(start)

    def _layout(
        self, dataset: Any, shape: Shape, dtype: DType, place: str
    ) -> tuple[Shape | None, str, Chunks | None]:
        """Checks where a dataset's values are; returns shape and checksum of its chunks, and them if filtered."""
        plan = dataset.id.get_create_plist()
        size, stored = math.prod(shape) * dtype.itemsize, int(dataset.id.get_storage_size())
        if plan.get_external_count() or plan.get_layout() == _VIRTUAL:
            raise RefusedError("A dataset wants its values from other files.", place=place)
        pipeline = [plan.get_filter(i) for i in range(plan.get_nfilters())]
        filters = [code for code, *_ in pipeline]
        if any(code not in _FILTERS for code in filters):
            raise RefusedError(
                "A dataset went through a filter that isn't read.",
                place=place,
                expected=", ".join(_FILTERS.values()),
                found=f"filter {next(code for code in filters if code not in _FILTERS)}",
                remedy="write it again without filters",
            )
        ratio = MOST_OF_ONE[ZLIB] if DEFLATE in filters else 1
        if size > stored * ratio:
            raise CorruptError(
                "A dataset holds fewer values than it says.",
                place=place,
                expected=f"{size} bytes for {dtype} {shape}",
                found=f"{stored} bytes",
            )
        end = dataset.id.get_offset()
        if end is not None and end + stored > self._file.id.get_filesize():
            raise CorruptError("A dataset lies beyond the end of the file.", place=place)
        checksum = next((OF_FILTERS[code] for code in reversed(filters) if code in OF_FILTERS), "")
        if not dataset.chunks or not filters:
            return tuple(dataset.chunks) if dataset.chunks else None, checksum, None
        if dataset.dtype.kind in "iuf" and not _stored_as(dataset):
            raise FormatError("A dataset has a dtype that statekit doesn't carry.", place=place, found="bits")
        cut = tuple(map(int, dataset.chunks))
        steps = tuple((code, int(parameters[0]) if parameters else 1) for code, _, parameters, _ in pipeline)
        chunks = Chunks(self._source, dataset.id.chunk_iter, shape, cut, dataset.dtype, steps, place)
        return cut, checksum, chunks


@dataclass(frozen=True)
class _Fetch:
    """Reads blocks of one dataset."""

    dataset: Any
    dtype: DType
    place: str
    chunks: Chunks | None

    def read(self, index: Index) -> Array:
        with parsing(self.place):
            if self.chunks:
                block = self.chunks.read(index)
            else:
                block = np.asarray(self.dataset[index] if index else self.dataset[()])
            if block.dtype.kind == "b":
                return np.not_equal(block.view(np.uint8), 0)
            if block.dtype.kind == "V":
                return np.ascontiguousarray(block).view(self.dtype).reshape(block.shape)
            return block.astype(self.dtype, copy=False)


def _holds(tree: Mapping[str, Any]) -> bool:
    return any(
        _holds(value) if isinstance(value, dict) else key != ATTRIBUTES
        for key, value in tree.items()
        if key != ATTRIBUTES
    )


def _stored_as(dataset: Any) -> bool:
    """Tells whether values lie in the file as NumPy has them, so that the library needn't convert them."""
    import h5py

    return bool(dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)))


def _says_bfloat16(dataset: Any) -> bool:
    return "dtype" in dataset.attrs and dataset.attrs["dtype"] == "bfloat16"
