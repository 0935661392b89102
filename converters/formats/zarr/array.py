"""Arrays in chunks: what a header says, and blocks that touch only the chunks they need.

Both formats of zarr cut an array on a regular grid and compress each chunk by itself. Format 3 may keep many chunks
in one value, a shard, whose index says where each lies: two uint64 for each chunk of the shard, in C order, offset and
size, both 2^64-1 for a chunk that is absent; then follows the index's crc32c.

A large stored chunk is decoded as a stream, so that a block costs its own size and not the chunk's: chunks of real
checkpoints reach gigabytes (one device's shard of an array), and a stream keeps a few MiB of one. Blocks that follow
one another find streams and small chunks where the last one left them, while the job's budget has room for them.
Source: zarr-specs, codec `sharding_indexed` version 1.0.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import numpy as np

from statekit.budget import CHUNK_STEPS, TINY
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.storage import (
    MOST_OF_ONE,
    PIECE,
    checked_shape,
    decompress_into,
    decompressed,
    stream_bytes,
)
from statekit.converters.formats.zarr.stores import Store
from statekit.errors import CorruptError, FormatError, RefusedError, StatekitError
from statekit.files.checksums import OF_COMPRESSORS
from statekit.files.source import Held, Part, Source, bytes_at, hold
from statekit.pipeline import can_share, empty, in_turn, passage, shared
from statekit.tensors.tensor import (
    Array,
    DType,
    Index,
    Shape,
    Stored,
    index_shape,
    positions,
    touched_chunks,
    whole,
)

SLAB = 8 * 2**20
"""How much of a chunk is held to cut a block out of it, in bytes. A chunk up to this size is always read to its end."""

AHEAD = 32 * 2**20
"""Bytes of the next chunk that are decoded while one is read: half a chunk of T5X, so that two threads are as busy."""

LITTLE = 2**16
"""Bytes of a chunk up to which another thread isn't asked to decode it: asking takes as long."""


class Stream(Protocol):
    """The values of one array or chunk, read forwards. Positions and sizes in bytes."""

    @property
    def position(self) -> int:
        """Where the next read begins."""

    def seek(self, position: int) -> None:
        """Moves forwards to a position."""

    def read_into(self, target: memoryview) -> None:
        """Fills a byte buffer."""


class RawStream:
    """Bytes that are stored as they are."""

    def __init__(self, value: Source) -> None:
        self._value = value
        self.position = 0

    def seek(self, position: int) -> None:
        """Moves to a position."""
        self.position = position

    def read_into(self, target: memoryview) -> None:
        for start in range(0, len(target), PIECE):
            count = min(PIECE, len(target) - start)
            self._value.read_into(self.position, target[start : start + count])
            self.position += count


class DecodedStream:
    """A compressed chunk of `size` bytes when decoded.

    Attributes:
        position: Where the next read begins.
        needs: How many bytes it takes of the budget.
    """

    def __init__(self, value: Source, compressor: str, size: int) -> None:
        self.needs = stream_bytes(value, compressor, size)
        hold(value, 0, self.needs, "A chunk that is decoded")
        self._pieces = decompressed(value, compressor, "A chunk")
        self._held = memoryview(b"")
        self._early: Callable[[], deque[bytes]] | None = None
        self._ready = deque[bytes]()
        self._value, self._place = value, value.place
        self._size = size
        self.position = 0

    def start(self) -> None:
        """Has another thread decode the beginning."""
        ahead = min(AHEAD, self._size)
        self._value.account.hold(ahead, "A chunk that is decoded ahead", self._place)
        self.needs += ahead
        self._early = shared(self._decode, ahead)

    def _decode(self, count: int) -> deque[bytes]:
        pieces = deque[bytes]()
        while count > 0 and (piece := next(self._pieces, b"")):
            pieces.append(piece)
            count -= len(piece)
        return pieces

    def _next(self) -> bytes:
        if self._early is not None:
            self._ready, self._early = self._early(), None
        return self._ready.popleft() if self._ready else next(self._pieces, b"")

    def seek(self, position: int) -> None:
        while self.position < position:
            skipped = self._more()[: position - self.position]
            self._used(len(skipped))

    def read_into(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            decoded = self._more()[: len(target) - filled]
            target[filled : filled + len(decoded)] = decoded
            filled += len(decoded)
            self._used(len(decoded))

    def finish(self) -> None:
        """Reads to the end, so that the chunk's length and its checksum are checked.

        Raises:
            CorruptError: There is more or less than declared, or the checksum disagrees.
        """
        self.seek(self._size)
        if len(self._held) or self._next():
            raise CorruptError(
                "A chunk is longer than declared.", place=self._place, expected=f"{self._size} bytes"
            )

    def _used(self, count: int) -> None:
        self._held = self._held[count:]
        self.position += count

    def _more(self) -> memoryview:
        if not len(self._held):
            self._held = memoryview(self._next())
            if not len(self._held):
                raise _shorter(self._place, self._size, self.position)
        return self._held


def _shorter(place: str, size: int, count: int) -> CorruptError:
    return CorruptError(
        "A chunk is shorter than declared.", place=place, expected=f"{size} bytes", found=f"{count} bytes"
    )


def check_stored(value: Source, compressor: str | None, size: int) -> None:
    """Compares a chunk's declared size with its stored one, before anything is allocated for it.

    Raises:
        CorruptError: An uncompressed chunk has another size.
        RefusedError: No data of this compression expands that far.
    """
    if compressor is None:
        if value.size != size:
            raise CorruptError(
                "A chunk has the wrong size.",
                place=value.place,
                expected=f"{size} bytes",
                found=f"{value.size} bytes",
            )
    elif size > value.size * MOST_OF_ONE[compressor]:
        raise RefusedError(
            "A chunk declares more values than its bytes can hold.",
            place=value.place,
            expected=f"at most {value.size * MOST_OF_ONE[compressor]} bytes from {value.size} bytes of {compressor}",
            found=f"{size} bytes",
            remedy="the chunk is cut off, or the header lies",
        )


def open_stream(value: Source, compressor: str, size: int) -> DecodedStream:
    """Opens the stream of a compressed chunk of `size` decoded bytes."""
    return DecodedStream(value, compressor, size)


def copy_block(stream: Stream, shape: Shape, index: Index, out: Array, start: int = 0) -> None:
    """Copies the block `index` of a C-order array of `shape`, which begins at byte `start` of a stream, to `out`.

    Reads forwards only and holds at most `SLAB` bytes besides, or the block where `out` isn't contiguous.
    """
    if out.size == 0:
        return
    row = math.prod(shape[1:]) * out.dtype.itemsize
    if index[1:] == whole(shape[1:]):
        stream.seek(start + (index[0].start * row if shape else 0))
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        stream.read_into(_bytes_of(target))
        if target is not out:
            out[...] = target
    elif row > SLAB:
        for i, n in enumerate(range(index[0].start, index[0].stop)):
            copy_block(stream, shape[1:], index[1:], out[i], start + n * row)
    else:
        for first in range(index[0].start, index[0].stop, max(1, SLAB // row)):
            last = min(first + max(1, SLAB // row), index[0].stop)
            slab = np.empty((last - first, *shape[1:]), out.dtype)
            stream.seek(start + first * row)
            stream.read_into(_bytes_of(slab))
            out[first - index[0].start : last - index[0].start] = slab[(slice(None), *index[1:])]


def first_byte(shape: Shape, index: Index, itemsize: int) -> int:
    """Returns where `copy_block` begins to read."""
    if not shape:
        return 0
    row = math.prod(shape[1:]) * itemsize
    inner = first_byte(shape[1:], index[1:], itemsize) if row > SLAB else 0
    return int(index[0].start) * row + inner


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


_ABSENT = 2**64 - 1


@dataclass(frozen=True)
class Shards:
    """How chunks lie in shards.

    Attributes:
        shape: The shape of a shard in elements; a multiple of the chunks' shape.
        at_end: Whether the index lies at the end of the shard, and not at its start.
        checked: Whether the index has a checksum.
    """

    shape: Shape
    at_end: bool = True
    checked: bool = True

    def grid(self, chunks: Shape) -> Shape:
        """Returns how many chunks of a shape a shard has along each axis."""
        return tuple(n // c for n, c in zip(self.shape, chunks, strict=True))

    def index_bytes(self, chunks: Shape) -> int:
        """Returns the size of a shard's index."""
        return 16 * math.prod(self.grid(chunks)) + (4 if self.checked else 0)

    def read_index(self, shard: Source, chunks: Shape) -> Array:
        """Reads the index of a shard: offset and size for every chunk, of shape (*grid, 2).

        Raises:
            BudgetError: It is more than the job may hold.
            CorruptError: The shard is too small for it, its checksum disagrees, or a chunk lies outside the shard.
        """
        size = self.index_bytes(chunks)
        if shard.size < size:
            raise CorruptError(
                "A shard is smaller than its index.",
                place=shard.place,
                expected=f"at least {size} bytes",
                found=f"{shard.size} bytes",
            )
        start = shard.size - size if self.at_end else 0
        hold(shard, start, size, "The index of a shard")
        data = bytes_at(shard, start, size)
        if self.checked and crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise CorruptError("The checksum of a shard's index disagrees.", place=shard.place)
        index = np.frombuffer(data, "<u8", count=2 * (size // 16)).reshape(-1, 2)
        present = index[(index != _ABSENT).any(axis=1)]
        if present.size and bool(
            np.any((present[:, 1] > shard.size) | (present[:, 0] > shard.size - present[:, 1]))
        ):
            raise CorruptError(
                "A chunk lies outside its shard.", place=shard.place, expected=f"within {shard.size} bytes"
            )
        return index.reshape(*self.grid(chunks), 2)

    def chunk(self, shard: Source, index: Array, position: tuple[int, ...]) -> Source | None:
        """Returns the stored bytes of the chunk at a position within its shard, or None if it is absent."""
        offset, size = (int(n) for n in index[position])
        return None if offset == size == _ABSENT else Part(shard, offset, size)


@dataclass(frozen=True)
class Header:
    """What its header says of an array.

    Attributes:
        shape: Its shape.
        chunks: The shape of each chunk; a chunk at the edge is stored in full.
        dtype: The dtype of its values.
        compressor: `gzip`, `zlib`, `zstd` or None.
        level: The compressor's level, for writing.
        fill: The value of chunks that are absent; None if none may be.
        separator: What joins the parts of a chunk's key: `.` or `/`.
        keys: What every chunk's key begins with: nothing, or the `c` of format 3.
        shards: How chunks lie together in shards; None where each is a value of its own.
    """

    shape: Shape
    chunks: Shape
    dtype: DType
    compressor: str | None = None
    level: int = 1
    fill: float | None = None
    separator: str = "."
    keys: str = ""
    shards: Shards | None = None

    def chunk_bytes(self) -> int:
        """Returns the size of a decoded chunk."""
        return math.prod(self.chunks) * self.dtype.itemsize

    def grid(self) -> Shape:
        """Returns how many chunks there are along each axis."""
        return _cut(self.shape, self.chunks)

    def values_grid(self) -> Shape:
        """Returns how many values there are along each axis: shards, or else chunks."""
        return _cut(self.shape, self.shards.shape if self.shards else self.chunks)

    def value_key(self, position: tuple[int, ...]) -> str:
        """Returns the key of a shard or chunk; that of an array of rank 0 is `0` or `c`."""
        parts = [self.keys, *map(str, position)] if self.keys else [*map(str, position)]
        return self.separator.join(parts) or "0"

    def split(self, position: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the position of a chunk's value, and of the chunk within it."""
        if self.shards is None:
            return position, ()
        pairs = [divmod(i, n) for i, n in zip(position, self.shards.grid(self.chunks), strict=True)]
        return tuple(outer for outer, _ in pairs), tuple(inner for _, inner in pairs)


def _cut(shape: Shape, part: Shape) -> Shape:
    return tuple(-(-n // c) for n, c in zip(shape, part, strict=True))


def checked_header(
    shape: object,
    chunks: object,
    dtype: DType,
    place: str,
    compressor: str | None,
    level: int = 1,
    fill: float | None = None,
    separator: str = ".",
    keys: str = "",
    shards: Shards | None = None,
) -> Header:
    """Returns a header whose shape and chunks fit each other.

    Raises:
        FormatError: They don't.
    """
    sizes, cuts = checked_shape(shape, place), checked_shape(chunks, place, 1)
    if fill is not None and not _holds(dtype, fill):
        raise FormatError(
            "A fill value is not of the array's dtype.", place=place, expected=dtype, found=fill
        )
    if len(sizes) != len(cuts):
        raise FormatError(
            "An array's chunks have another rank than the array.",
            place=place,
            expected=f"{len(sizes)} axes",
            found=f"chunks of shape {cuts}",
        )
    return Header(sizes, cuts, dtype, compressor, level, fill, separator, keys, shards)


def _holds(dtype: DType, value: float) -> bool:
    """Tells whether a dtype has a value for a number; a float is rounded to it."""
    try:
        with np.errstate(all="raise", under="ignore"):
            stored = np.asarray(value).astype(dtype)
    except (FloatingPointError, OverflowError, ValueError):
        return False
    return dtype.kind not in "biu" or bool(stored == value)


def open_array(store: Store, prefix: str, header: Header, name: str) -> Stored:
    """Returns the tensor of an array.

    Args:
        store: Where it lies.
        prefix: The start of its keys, without the last `/`.
        header: Its header.
        name: Its native name.
    """
    return Stored(
        header.shape,
        header.dtype,
        _Reader(store, prefix, header, name),
        name,
        f"{store.place}/{prefix}",
        header.chunks,
        checksum=OF_COMPRESSORS.get(header.compressor or "", ""),
    )


def absent_chunks(store: Store, prefix: str, header: Header) -> list[str]:
    """Returns the keys of shards or chunks that are absent and read as fill value.

    Raises:
        BudgetError: There are too many chunks to look for, or absent ones declare more than their bytes explain.
    """
    if header.fill is None:
        return []
    place = f"{store.place}/{prefix}"
    grid = header.values_grid()
    account, absent = store.account, list[str]()
    for position in positions([range(n) for n in grid]):
        for inside in _absent(header, store.value(f"{prefix}/{header.value_key(position)}")):
            account.step(CHUNK_STEPS, "An array that isn't stored", place)
            account.nodes(1, "The list of chunks that are absent", place)
            absent.append(f"{header.value_key(position)}{inside}")
    account.explain(len(absent) * header.chunk_bytes(), "An array that isn't stored", place)
    return absent


def _absent(header: Header, value: Source | None) -> Iterator[str]:
    """Yields for each absent chunk of a value what its key has in addition: nothing, or its place in the shard."""
    if header.shards is None:
        if value is None:
            yield ""
        return
    grid = header.shards.grid(header.chunks)
    if value is None:
        for position in positions([range(n) for n in grid]):
            yield _inside(position)
        return
    index = header.shards.read_index(value, header.chunks)
    for number in np.flatnonzero((index == _ABSENT).all(axis=-1)):  # there may be millions that are not
        yield _inside(np.unravel_index(number, grid))
    value.account.free(index.nbytes)


def _inside(position: Sequence[SupportsIndex]) -> str:
    return f"[{','.join(map(str, position))}]"


def _view(array: Array, index: Index) -> Array:
    where: tuple[Any, ...] = (*index, ...)  # the ellipsis keeps rank 0 a view
    view: Array = array[where]
    return view


_AT_ONCE = 256
"""Chunks of a block that are looked for before they are decoded, unless they are large."""
_LEAST_AT_ONCE = 4


class _Reader:
    """Reads blocks of one array.

    What a block took a part of is kept for the next, where it ended: streaming an array decodes each chunk once.
    """

    def __init__(self, store: Store, prefix: str, header: Header, name: str) -> None:
        self._store, self._prefix, self._header, self._name = store, prefix, header, name

    def __call__(self, index: Index) -> Array:
        out: Array | None = None
        values: dict[tuple[int, ...], Source | None] = {}
        place, subject = f"{self._store.place}/{self._prefix}", "Reading an array in chunks"
        touched = touched_chunks(self._header.chunks, index)
        count = min(_AT_ONCE, max(_LEAST_AT_ONCE, AHEAD // self._header.chunk_bytes()))
        while parts := list(itertools.islice(touched, count)):
            taken = self._look_for([position for position, _, _ in parts], values)
            stored = [self._value(position, values) for position, _, _ in parts]
            values.clear()
            if out is None:  # not before the first chunks were seen to hold what is declared
                out = empty(index_shape(index), self._header.dtype)
            else:
                tiny = [
                    value is not None and index_shape(inner) == self._present(position)
                    for (position, inner, _), value in zip(parts, stored, strict=True)
                    if math.prod(index_shape(inner)) < TINY
                ]
                if any(tiny):  # what is stored once may have several names
                    named = f"{self._name} in {place}"
                    self._store.account.chunks(math.prod(self._header.grid()), subject, named)
                self._store.account.step(CHUNK_STEPS * tiny.count(False), subject, place)
            jobs = [
                (position, inner, _view(out, outer), value)
                for (position, inner, outer), value in zip(parts, stored, strict=True)
            ]
            is_little = len(jobs) == 1 or self._header.chunk_bytes() <= LITTLE
            for _ in map(self._copy, jobs) if is_little else in_turn(self._copy, jobs):
                pass
            self._store.account.free(taken)
        return np.empty(index_shape(index), self._header.dtype) if out is None else out

    def _look_for(
        self, positions: Sequence[tuple[int, ...]], values: dict[tuple[int, ...], Source | None]
    ) -> int:
        """Notes what is stored at positions; returns the bytes of it that are held meanwhile."""
        wanted = list(dict.fromkeys(self._header.split(position)[0] for position in positions))
        keys = [f"{self._prefix}/{self._header.value_key(outer)}" for outer in wanted]
        taken = 0
        for outer, value in zip(wanted, self._store.values(keys), strict=True):
            values[outer] = value
            if isinstance(value, Held):
                self._check_worth(value)
                hold(value, 0, value.size, "A chunk")
                taken += value.size
        return taken

    def _check_worth(self, value: Source) -> None:
        """Refuses a shard or chunk that is stored in far more bytes than its values have: no compressor needs twice."""
        header = self._header
        values = math.prod(header.shards.shape if header.shards else header.chunks) * header.dtype.itemsize
        index = header.shards.index_bytes(header.chunks) if header.shards else 0
        if value.size > 2 * values + index + LITTLE:
            raise CorruptError(
                "A chunk is stored in more bytes than its values can need.",
                place=value.place,
                expected=f"about {values + index} bytes",
                found=f"{value.size} bytes",
            )

    def _present(self, position: tuple[int, ...]) -> Shape:
        """Returns the shape of what the array has of a chunk; one at the edge has more."""
        sizes = zip(position, self._header.chunks, self._header.shape, strict=True)
        return tuple(min(c, n - i * c) for i, c, n in sizes)

    def _value(
        self, position: tuple[int, ...], values: dict[tuple[int, ...], Source | None]
    ) -> Source | None:
        """Returns the stored bytes of a chunk; `values` has what was touched last, which may be shards."""
        header = self._header
        outer, inner = header.split(position)
        place = f"{self._prefix}/{header.value_key(outer)}"
        if outer not in values:
            values[outer] = self._store.value(place)
        value = values[outer]
        if value is not None and header.shards is not None:
            key = (self, "index", outer)
            index = self._store.account.kept(key)
            if index is None:
                index = header.shards.read_index(value, header.chunks)
            self._store.account.keep(key, index, header.shards.index_bytes(header.chunks))
            value = header.shards.chunk(value, index, inner)
        if value is not None:
            check_stored(value, header.compressor, header.chunk_bytes())
        elif header.fill is None:
            raise CorruptError(
                "A chunk is absent.",
                place=f"{self._store.place}/{place}",
                expected=f"a chunk of shape {header.chunks}",
                remedy="the checkpoint is incomplete; copy it again, and don't leave out files",
            )
        return value

    def _copy(self, job: tuple[tuple[int, ...], Index, Array, Source | None]) -> None:
        position, index, out, value = job
        header, account = self._header, self._store.account
        size = header.chunk_bytes()
        if value is None:
            account.decode(out.nbytes, "A chunk that isn't stored", f"{self._store.place}/{self._prefix}")
            out[...] = header.fill
        elif header.compressor is None:
            copy_block(RawStream(value), header.chunks, index, out)
        elif size <= SLAB:
            self._cut(position, index, out, value, header.compressor)
        else:
            self._stream(position, index, out, value, header.compressor)

    def _cut(
        self, position: tuple[int, ...], index: Index, out: Array, value: Source, compressor: str
    ) -> None:
        """Copies a part of a small chunk, or all of one, which is decoded whole."""
        header, account = self._header, self._store.account
        chunk = account.kept((self, position))
        if chunk is None:
            size = header.chunk_bytes()
            needs = stream_bytes(value, compressor, size)
            hold(value, 0, size + needs, "A chunk")
            chunk = out if out.shape == header.chunks and out.flags.c_contiguous else self._empty()
            count = decompress_into(chunk.reshape(-1).view(np.uint8), value, compressor, "A chunk")
            if count < size:
                raise _shorter(value.place, size, count)
            account.free(needs)
        if chunk is not out:
            out[...] = _view(chunk, index)
        if self._ends(position, index):
            account.free(header.chunk_bytes())
        else:
            account.keep((self, position), chunk, header.chunk_bytes())

    def _stream(
        self, position: tuple[int, ...], index: Index, out: Array, value: Source, compressor: str
    ) -> None:
        """Copies a part of a large chunk, going on where the last block ended."""
        header, account = self._header, self._store.account
        size = header.chunk_bytes()
        stream = account.kept((self, position))
        if stream is not None and stream.position > first_byte(header.chunks, index, header.dtype.itemsize):
            account.free(stream.needs)
            stream = None
        if stream is None:
            stream = open_stream(value, compressor, size)
        self._begin_next(position, compressor)
        copy_block(stream, header.chunks, index, out)
        is_last = self._ends(position, index)
        if is_last or stream.position == size:  # one at the edge goes on behind the array's last value
            stream.finish()
        if is_last:
            account.free(stream.needs)
        else:
            account.keep((self, position), stream, stream.needs)

    def begin(self) -> None:
        """Has the first chunk decoded by another thread, if it is large, of an array that is read as a whole next."""
        header = self._header
        if can_share() and header.compressor and header.chunk_bytes() > SLAB and 0 not in header.shape:
            self._start((0,) * len(header.shape), header.compressor)

    def _begin_next(self, position: tuple[int, ...], compressor: str) -> None:
        """Has the next chunk decoded by another thread, if the array is read to its end one after the other."""
        header = self._header
        cut = [axis for axis, count in enumerate(header.grid()) if count > 1]
        if passage() is None or not can_share() or len(cut) != 1 or header.shards is not None:
            return
        following = tuple(n + (axis == cut[0]) for axis, n in enumerate(position))
        if following[cut[0]] < header.grid()[cut[0]]:
            self._start(following, compressor)

    def _start(self, position: tuple[int, ...], compressor: str) -> None:
        account = self._store.account
        stream = account.kept((self, position))
        try:
            if stream is None and (value := self._value(position, {})) is not None:
                stream = open_stream(value, compressor, self._header.chunk_bytes())
                stream.start()
        except StatekitError:  # said when its turn comes
            if stream is not None:
                account.free(stream.needs)
            return
        if stream is not None:
            account.keep((self, position), stream, stream.needs)

    def _empty(self) -> Array:
        return np.empty(self._header.chunks, self._header.dtype)

    def _ends(self, position: tuple[int, ...], index: Index) -> bool:
        """Tells whether a block of a chunk has the last value of it that the array has: no later block touches it."""
        return tuple(cut.stop for cut in index) == self._present(position)
