"""How values lie in a file: a flat run of them, of which tensors are strided windows, and runs that are compressed.

What is compressed is a stream of pieces: of zip archives, zarr's chunks and HDF5's filters, drawing on the budget. A
stream keeps a few MiB, however much comes out of it. What came out is counted for the whole job, so that no number of
small files becomes more than their bytes explain.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any, Final, cast

import numpy as np

from statekit.budget import Account
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.source import Source, as_file, byte_of, bytes_at
from statekit.pipeline import empty, working
from statekit.tensors.tensor import BLOCK_BYTES, Array, DType, Index, Shape, Stored, Tensor, fill, index_shape

MAX_RANK = 64
"""Axes of an array at most. Source: NumPy 2, `NPY_MAXDIMS`; PyTorch's and TensorFlow's arrays go through it."""
MAX_ELEMENTS = 2**60
"""Elements of an array at most, so that their bytes are a number of 64 bits."""
_HUGE = 2**62
SMALL_READ = 64 * 2**10
"""Bytes that cost about as much to read as none."""
_EXPANDED = "A tensor that shows few stored values many times"
SPARSE = 8
"""How many times more bytes than wanted may be read to read them at once."""


@dataclass(slots=True, unsafe_hash=True)
class Storage:
    """A flat run of values in a file, which tensors are windows of.

    Attributes:
        name: Name in the file, such as `data/3`.
        place: The file.
        dtype: Type of the values.
        nbytes: Size in bytes.
        fetch: Reads bytes: (first byte, count) -> (count,) uint8.
        swapped: Whether the bytes are in the other order than this machine's.
        checksum: The checksum that reading compares (statekit/files/checksums.py); "" if there is none.
        account: What a tensor draws on that shows the same values again and again; None where there is none such.
        crc: The checksum's value, where the file's directory has it.

    The tensors made of it are kept: what reads the same bytes is one tensor, so that sharing is seen. Most have one,
    which needs no key.
    """

    name: Final[str]
    place: Final[str]
    dtype: Final[DType]
    nbytes: Final[int]
    fetch: Final[Callable[[int, int], Array]] = field(repr=False, compare=False)
    swapped: Final[bool] = False
    checksum: Final[str] = ""
    account: Final[Account | None] = field(default=None, repr=False, compare=False)
    crc: Final[int | None] = field(default=None, repr=False, compare=False)
    _first: Stored | None = field(default=None, init=False, repr=False, compare=False)
    _windows: dict[str, Stored] | None = field(default=None, init=False, repr=False, compare=False)

    def whole(self) -> Stored:
        """Returns all of it as a tensor of rank 1."""
        return window(self, 0, (self.nbytes // self.dtype.itemsize,), (1,), self.dtype)

    def tensor(self, part: _Window, shape: Shape) -> Stored:
        """Returns the tensor that is such a part.

        Raises:
            BudgetError: It shows the same stored values so often that they are more than the job may hold.
        """
        tensor = Stored(shape, part.dtype, part, self.name, self.place, None, "", self.checksum)
        if self._first is None:
            self._first = tensor
        else:
            self._windows = self._windows or {_key(self._first): self._first}
            first_window = self._windows.setdefault(_key(tensor), tensor)
            if first_window is not tensor:
                return first_window
        more = math.prod(shape) * part.dtype.itemsize - self.nbytes
        if more > 0 and self.account:
            self.account.hold(more, _EXPANDED, f"{self.name} in {self.place}")
        return tensor


@dataclass(slots=True, eq=False)
class _Window:
    """What a tensor is of its storage: offset and strides, in elements of `dtype`. Called, it reads a block."""

    storage: Final[Storage]
    dtype: Final[DType]
    offset: Final[int]
    stride: Final[Shape]
    conjugate: Final[bool]
    negative: Final[bool]

    def __call__(self, index: Index) -> Array:
        shape = index_shape(index)
        if 0 in shape:
            return np.empty(shape, self.dtype)
        first = self.offset + sum(s.start * step for s, step in zip(index, self.stride, strict=True))
        if _dense(shape, self.stride):
            block = self._run(first, math.prod(shape)).reshape(shape)
        else:
            block = empty(shape, self.dtype)
            self._gather(block, first)
        if self.conjugate:
            block = block.conj()
        return -block if self.negative else block

    def _gather(self, out: Array, first: int) -> None:
        """Fills a block by runs: whole where the wanted values lie close together, by halves where they don't."""
        extents = [(n - 1) * step for n, step in zip(out.shape, self.stride, strict=True)]
        span = sum(extents) + 1
        item = self.dtype.itemsize
        if span * item <= SMALL_READ or (span <= SPARSE * out.size and span * item <= BLOCK_BYTES):
            run = self._run(first, span)
            steps = tuple(step * item for step in self.stride)
            fill(out, np.lib.stride_tricks.as_strided(run, out.shape, steps, writeable=False))
            return
        axis = max(range(out.ndim), key=extents.__getitem__)
        half = out.shape[axis] // 2
        low, high = np.split(out, [half], axis)
        self._gather(low, first)
        self._gather(high, first + half * self.stride[axis])

    def _run(self, first: int, count: int) -> Array:
        item = self.dtype.itemsize
        raw = self.storage.fetch(first * item, count * item)
        if self.storage.swapped:
            part = item // 2 if self.dtype.kind == "c" else item
            raw = raw.view(f"u{part}").byteswap().view(np.uint8)
        # A byte that is neither 0 nor 1 is no value of NumPy's bool.
        return raw != 0 if self.dtype.kind == "b" else raw.view(self.dtype)


def stored_crc(tensor: Tensor) -> int | None:
    """Returns the checksum of a tensor that is a whole storage, as its file has it; None where nothing says it."""
    part = tensor.fetch if isinstance(tensor, Stored) else None
    if not isinstance(part, _Window) or part.conjugate or part.negative:
        return None
    is_whole = math.prod(tensor.shape) * part.dtype.itemsize == part.storage.nbytes
    return part.storage.crc if is_whole and _dense(tensor.shape, part.stride) else None


def _dense(shape: Shape, stride: Shape) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


def window(
    storage: Storage,
    offset: int,
    shape: Shape,
    stride: Shape,
    dtype: DType,
    conjugate: bool = False,
    negative: bool = False,
) -> Stored:
    """Returns a tensor over a storage, after checking that the storage holds every element of it.

    Args:
        storage: Where the values are.
        offset: First element, counted in elements of `dtype`.
        shape: Shape of the tensor.
        stride: Elements from one index to the next, per axis.
        dtype: Type of the values.
        conjugate: Whether the tensor is the complex conjugate of what is stored.
        negative: Whether the tensor is the negative of what is stored.

    Raises:
        FormatError: Offset, shape or strides aren't those of a tensor.
        CorruptError: An element lies outside the storage.
        BudgetError: It shows the same stored values so often that they are more than the job may hold.
    """
    plain = len(shape) == len(stride) <= MAX_RANK and type(offset) is int and 0 <= offset < _HUGE
    size, last = 1, offset
    for n, step in zip(shape, stride, strict=False):
        if type(n) is not int or type(step) is not int or not (0 <= n < _HUGE and 0 <= step < _HUGE):
            plain = False
            break
        size *= n
        last += (n - 1) * step
    if not plain:
        raise FormatError(
            "Offset, shape or strides of a tensor are not possible.",
            place=f"{storage.name} in {storage.place}",
            expected=f"non-negative integers for at most {MAX_RANK} axes",
            found=f"{len(shape)} axes, {len(stride)} strides",
        )
    if not size:
        last = offset - 1
    stored = storage.nbytes // dtype.itemsize
    if last >= stored:
        raise CorruptError(
            "A tensor reaches beyond its storage.",
            place=f"{storage.name} in {storage.place}",
            expected=f"an offset of at most {stored} elements, all elements within them",
            found=f"offset {offset}, last element {last}",
        )
    return storage.tensor(_Window(storage, dtype, offset, stride, conjugate, negative), shape)


def _key(tensor: Stored) -> str:
    """Returns what a window is, as text, which is hashed with a secret: tuples of numbers can be chosen to collide."""
    part = cast(_Window, tensor.fetch)
    dtype = f"{part.dtype.byteorder}{part.dtype.num}"
    return f"{part.offset} {tensor.shape} {part.stride} {dtype} {part.conjugate} {part.negative}"


def dense(
    name: str,
    place: str,
    dtype: DType,
    shape: Shape,
    size: int,
    fetch: Callable[[int, int], Array],
    fortran: bool = False,
    checksum: str = "",
) -> Stored:
    """Returns a dense little-endian tensor over bytes.

    Args:
        name: Its name.
        place: Its file.
        dtype: Type of its values.
        shape: Its shape.
        size: Bytes that there are.
        fetch: Reads of these: (first byte, count) -> (count,) uint8.
        fortran: Whether the first axis is the fastest.
        checksum: The checksum that reading compares.
    """
    storage = Storage(name, place, dtype, size, fetch, checksum=checksum)
    order = shape if fortran else shape[::-1]
    steps = [*itertools.accumulate((max(n, 1) for n in order[:-1]), operator.mul, initial=1)][: len(shape)]
    return window(storage, 0, shape, tuple(steps if fortran else steps[::-1]), dtype)


def checked_shape(value: object, place: str, least: int = 0) -> Shape:
    """Returns a shape that a file declares.

    Raises:
        FormatError: It isn't a list of integers, each at least `least`.
        RefusedError: No array can be that large.
    """
    if (
        not isinstance(value, list)
        or len(value) > MAX_RANK
        or not all(type(n) is int and n >= least for n in value)
    ):
        raise FormatError(
            "A shape is invalid.",
            place=place,
            expected=f"at most {MAX_RANK} integers, each at least {least}",
            found=repr(value)[:200],
        )
    if math.prod(n for n in value if n) > MAX_ELEMENTS:
        raise RefusedError("An array declares an absurd size.", place=place, found=f"shape {value}")
    return tuple(value)


_checked: Any
try:
    from isal import isal_zlib as _checked
except ImportError:
    _checked = zlib

PIECE = 2**20
"""How much is read from a file, and decompressed, at a time. In bytes."""
DEFLATE, GZIP, ZLIB, ZSTD = "deflate", "gzip", "zlib", "zstd"
_WBITS = {DEFLATE: -15, GZIP: 31, ZLIB: 15}
MOST_OF_ONE = {DEFLATE: 1032, GZIP: 1032, ZLIB: 1032, ZSTD: 2**15}
"""The most bytes that one stored byte can stand for.

Source: deflate, 258 bytes for two bits (zlib.net/zlib_tech.html); zstd, 128 KiB for 4 bytes (RFC 8878, 3.1.1.2).
"""
_DEFLATE_WINDOW = 2**15
_GZIP_FLAGS, _GZIP_RESERVED = 3, 0xE0
"""Where flags stand in gzip's header, and which are reserved."""
_ZLIB_WINDOW = 7
"""The most that a header may say of the window: the logarithm of its bytes, less 8."""
_ZSTD_HEADER = 18
"""The longest header of a frame, in bytes. Source: RFC 8878, 3.1.1.1."""
_BLOCK_HEADER = 3
_BLOCKS_AT_ONCE = 4096
"""Bytes that are read where a block's header is, and blocks whose work is counted together."""


def decompressed(value: Source, compressor: str, what: str) -> Iterator[bytes]:
    """Yields what a compressed run of bytes stands for, in pieces of at most `PIECE` bytes.

    Args:
        value: The compressed bytes; all of them.
        compressor: `deflate`, `gzip`, `zlib` or `zstd`.
        what: What it is, as an error begins: `A chunk`.

    Raises:
        CorruptError: They are damaged, or something stands behind them.
        BudgetError: They become more than the bytes explain that are stored.
    """
    pieces = _unzstd(value, what) if compressor == ZSTD else _inflated(value, compressor, what)
    while piece := _decoded(pieces):
        value.account.decode(len(piece), what, byte_of(value, 0))
        yield piece


def _decoded(pieces: Iterator[bytes]) -> bytes:
    with working("decompress"):
        return next(pieces, b"")


def stream_bytes(value: Source, compressor: str, size: int) -> int:
    """Returns how many bytes a stream needs in memory that `size` bytes come out of.

    Raises:
        CorruptError: What is compressed has no header.
    """
    window = _zstd_window(value) if compressor == ZSTD else _DEFLATE_WINDOW
    return min(PIECE, value.size) + min(PIECE, size) + min(window, size)


def decompress_into(out: Array, value: Source, compressor: str, what: str) -> int:
    """Fills an array of bytes with what a compressed run of bytes stands for; returns how many that are.

    Raises:
        CorruptError: They are damaged, or more than the array holds.
        BudgetError: As `decompressed` raises it.
    """
    filled, target = 0, out.data
    if compressor == ZSTD:
        return _unzstd_into(target, value, what)
    for piece in decompressed(value, compressor, what):
        if filled + len(piece) > len(target):
            raise _longer(value, len(target), what)
        target[filled : filled + len(piece)] = piece
        filled += len(piece)
    return filled


def _inflated(value: Source, compressor: str, what: str) -> Iterator[bytes]:
    """Yields what deflate's bytes stand for; by isal, where it is installed and a checksum stands behind the data."""
    if fault := _header_fault(value, compressor):
        raise _damaged(value, what, fault)
    library = zlib if compressor == DEFLATE else _checked
    decoder, offset = library.decompressobj(_WBITS[compressor]), 0
    try:
        while offset < value.size and not decoder.eof:
            data = bytes_at(value, offset, min(PIECE, value.size - offset))
            offset += len(data)
            while piece := decoder.decompress(data, PIECE):
                yield piece
                data = decoder.unconsumed_tail
    except (zlib.error, _checked.error) as error:
        raise _damaged(value, what, str(error)) from error
    if not decoder.eof or decoder.unused_data or offset < value.size:
        fault = "bytes after the end of the data" if decoder.eof else "the data ends too early"
        raise _damaged(value, what, fault)


def _header_fault(value: Source, compressor: str) -> str:
    """Returns what is wrong with a stream's header that isal passes over; "" if nothing is.

    Source: RFC 1952, 2.3.1.2: reserved flags of a header must be zero, and RFC 1950, 2.2: CINFO above 7 isn't allowed;
    isal compares neither. In 19 000 streams with one flipped bit it differs from zlib in nothing else.
    """
    if compressor == GZIP and value.size > _GZIP_FLAGS and value.read(_GZIP_FLAGS, 1)[0] & _GZIP_RESERVED:
        return "unknown header flags set"
    if compressor == ZLIB and value.size and value.read(0, 1)[0] >> 4 > _ZLIB_WINDOW:
        return "invalid window size"
    return ""


def _zstd_window(value: Source) -> int:
    import zstandard

    try:
        header = bytes_at(value, 0, min(_ZSTD_HEADER, value.size))
        return int(zstandard.get_frame_parameters(header).window_size)
    except zstandard.ZstdError as error:
        raise _damaged(value, "Compressed data", str(error)) from error


def _unzstd(value: Source, what: str) -> Iterator[bytes]:
    with _zstd_reader(value, what) as reader:
        while piece := reader.read(PIECE):
            yield piece
    _check_one_frame(value, what)


def _unzstd_into(target: memoryview, value: Source, what: str) -> int:
    """Fills a target without a copy between; returns how many bytes there are."""
    filled = 0
    with _zstd_reader(value, what) as reader, working("decompress"):
        while filled < len(target) and (count := reader.readinto(target[filled : filled + PIECE])):
            value.account.decode(count, what, byte_of(value, 0))
            filled += count
        if reader.read(1):
            raise _longer(value, len(target), what)
    _check_one_frame(value, what)
    return filled


@contextmanager
def _zstd_reader(value: Source, what: str) -> Iterator[Any]:
    import zstandard

    window = max(_zstd_window(value), 2**10)
    if window > 2**zstandard.WINDOWLOG_MAX:
        raise _damaged(value, what, f"a window of {window} bytes, which zstd's library can't have")
    decompressor = zstandard.ZstdDecompressor(max_window_size=window)
    try:
        yield decompressor.stream_reader(cast(IO[bytes], as_file(value)), read_size=PIECE)
    except zstandard.ZstdError as error:
        raise _damaged(value, what, str(error)) from error


def _check_one_frame(value: Source, what: str) -> None:
    """Compares the end of a frame with that of the bytes, which the library's reader doesn't.

    Source: RFC 8878, 3.1.1: a header, blocks each behind 3 bytes (of which one bit says that it is the last, two what
    it is, 1 being a byte that is repeated, and the rest its size), and 4 bytes of checksum where the header says so.
    """
    import zstandard

    header = bytes_at(value, 0, min(_ZSTD_HEADER, value.size))
    at, is_last, count = zstandard.frame_header_size(header), False, 0
    with io.BufferedReader(as_file(value), _BLOCKS_AT_ONCE) as file:
        while not is_last and at + _BLOCK_HEADER <= value.size:
            file.seek(at)
            block = int.from_bytes(file.read(_BLOCK_HEADER), "little")
            is_last, size = bool(block & 1), 1 if block >> 1 & 3 == 1 else block >> 3
            at, count = at + _BLOCK_HEADER + size, count + 1
            if count % _BLOCKS_AT_ONCE == 0:
                value.account.step(_BLOCKS_AT_ONCE, what, byte_of(value, at))
    at += 4 * zstandard.get_frame_parameters(header).has_checksum
    if not is_last or at > value.size:
        raise _damaged(value, what, "the data ends too early")
    if at < value.size:
        raise _damaged(value, what, "bytes after the end of the data")


def _longer(value: Source, size: int, what: str) -> CorruptError:
    return CorruptError(f"{what} is longer than declared.", place=byte_of(value, 0), expected=f"{size} bytes")


def _damaged(value: Source, what: str, fault: str) -> CorruptError:
    return CorruptError(f"{what} is damaged.", place=byte_of(value, 0), found=fault)
