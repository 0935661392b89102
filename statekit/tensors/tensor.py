"""A tensor that is described before it is read.

Every node knows shape, dtype and where it comes from without reading a value, and can read any block by itself,
through any chain of operations, so that a tensor larger than memory streams.
"""

from __future__ import annotations

import math
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, runtime_checkable

import ml_dtypes
import numpy as np
import numpy.typing as npt

from statekit.errors import FormatError, UsageError
from statekit.pipeline import empty

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]
Index: TypeAlias = tuple[slice, ...]
Shape: TypeAlias = tuple[int, ...]

BLOCK_BYTES = 8 * 2**20
"""How much of a tensor is held at once when it streams, in bytes.

From 32 MiB on, the C library maps each block anew, and filling fresh pages takes longer than reading the file.
"""
SLAB_BYTES = 64 * 2**20
"""How much is held of one whose axes run in another order: each block of it has a few bytes of each row of the file."""

TIES = "ties"
"""Key, in a state's extra and in trees of PyTorch's libraries, of tied parameters, one tensor under several names as a
head that shares its weight with an embedding: further name -> the name that it stands under."""

_EXTENSION = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
}
_NATIVE = {
    name: np.dtype(name)
    for name in (
        "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
}  # fmt: skip
DTYPES: dict[str, DType] = {**_NATIVE, **_EXTENSION}
"""Every dtype statekit carries, by its name."""


def dtype_named(name: str, place: object = None) -> DType:
    """Returns the dtype of a name such as `float32` or `bfloat16`.

    Raises:
        FormatError: No such dtype.
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise FormatError(
            "A tensor has a dtype that statekit doesn't carry.",
            place=place,
            expected=f"one of {', '.join(DTYPES)}",
            found=repr(name),
        ) from None


@cache
def dtype_name(dtype: DType) -> str:
    """Returns a dtype's name, which NumPy makes anew whenever it is asked for it."""
    return dtype.name


if TYPE_CHECKING:
    _ProtocolClass = ABCMeta
else:
    _ProtocolClass = type(Protocol)


class _AskedByClass(_ProtocolClass):
    """Lets `isinstance(value, Tensor)` ask each class once; typing's own asks every value for every member again."""

    def __instancecheck__(cls, value: object) -> bool:
        kind = type(value)
        is_tensor = _TENSOR_CLASSES.get(kind)
        if is_tensor is None:
            is_tensor = all(callable(getattr(kind, name, None)) for name in ("read", "to_json"))
            if is_tensor and not all(hasattr(value, name) for name in ("shape", "dtype", "grain")):
                return False  # these may be this value's alone
            _TENSOR_CLASSES[kind] = is_tensor
        return is_tensor


_TENSOR_CLASSES: dict[type, bool] = {}
"""Whether the instances of a class are tensors, of every class that was asked for."""


@runtime_checkable
class Tensor(Protocol, metaclass=_AskedByClass):
    """What a tensor can be asked. Implementations are frozen and final."""

    @property
    def shape(self) -> Shape:
        """The shape."""

    @property
    def dtype(self) -> DType:
        """The dtype of the values that `read` returns."""

    @property
    def grain(self) -> Shape:
        """The block shape (same rank) that is cheapest to read: a chunk where the file has chunks."""

    def read(self, index: Index | None = None) -> Array:
        """Reads a block: one slice per axis, without steps; the whole tensor if None. Native byte order, C order."""

    def to_json(self) -> dict[str, Any]:
        """Describes the tensor as an expression over stored tensors, without reading it."""


def parts_of(tensor: Tensor) -> tuple[Index, ...] | None:
    """Returns the blocks of a tensor, apart from each other, that this process has; None if it has everything."""
    parts: tuple[Index, ...] | None = getattr(tensor, "parts", None)
    return parts


def nbytes(tensor: Tensor) -> int:
    """Returns the size of the values in bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def whole(shape: Shape) -> Index:
    """Returns the index that selects everything."""
    return tuple(slice(0, n) for n in shape)


def normal_index(index: Index | None, shape: Shape) -> Index:
    """Returns `index` with explicit, checked bounds.

    Raises:
        UsageError: Not one slice per axis, a step, or bounds outside the shape.
    """
    if index is None:
        return whole(shape)
    bounds = tuple(
        slice(s.start or 0, n if s.stop is None else s.stop) for s, n in zip(index, shape, strict=False)
    )
    fits = all(0 <= b.start <= b.stop <= n for b, n in zip(bounds, shape, strict=False))
    if len(index) != len(shape) or not fits or any(s.step not in (None, 1) for s in index):
        raise UsageError("A block lies outside its tensor.", expected=f"slices inside {shape}", found=index)
    return bounds


def common(one: Index, other: Index) -> Index | None:
    """Returns the block that two normal indices have in common; None if they have none."""
    both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return both if all(cut.start < cut.stop for cut in both) else None


def within(index: Index, outer: Index) -> Index:
    """Returns the index, inside of a block, of what `index` selects of the whole."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(index, outer, strict=True))


def index_shape(index: Index) -> Shape:
    """Returns the shape of the block that a normal index selects."""
    return tuple(s.stop - s.start for s in index)


def positions(ranges: Sequence[range]) -> Iterator[tuple[int, ...]]:
    """Yields one number of each range, in every combination, the last fastest.

    Holds none of the ranges, as `itertools.product` would: a hostile header may declare 2^40 blocks.
    """
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in positions(ranges[1:]):
            yield (first, *rest)


def touched_chunks(chunks: Shape, index: Index) -> Iterator[tuple[tuple[int, ...], Index, Index]]:
    """Yields position, block within the chunk, and block within the result, of every chunk that a block touches.

    Args:
        chunks: The shape of a chunk: they lie on a regular grid.
        index: The block.
    """
    if any(cut.start == cut.stop for cut in index):
        return
    axes = list(zip(index, chunks, strict=True))
    for position in positions([range(cut.start // c, -(-cut.stop // c)) for cut, c in axes]):
        inner, outer = [], []
        for i, (cut, c) in zip(position, axes, strict=True):
            low, high = max(cut.start, i * c), min(cut.stop, (i + 1) * c)
            inner.append(slice(low - i * c, high - i * c))
            outer.append(slice(low - cut.start, high - cut.start))
        yield position, tuple(inner), tuple(outer)


def blocks(tensor: Tensor, limit: int = BLOCK_BYTES) -> Iterator[Index]:
    """Cuts a tensor into blocks of at most `limit` bytes whose values, one after the other, are the tensor in C order.

    Blocks follow the tensor's grain along the axis they cut, so that chunks are decoded once where they fit.
    A single element larger than `limit` is still a block.
    """
    shape, item = tensor.shape, tensor.dtype.itemsize
    if math.prod(shape) == 0:
        return
    if math.prod(shape) * item <= limit:
        yield whole(shape)
        return
    axis = 0  # the first axis whose single row fits
    while axis < len(shape) - 1 and math.prod(shape[axis + 1 :]) * item > limit:
        axis += 1
    rows = max(1, limit // (math.prod(shape[axis + 1 :]) * item))
    grain = max(1, tensor.grain[axis])
    # Or equal parts of a grain.
    rows = rows - rows % grain if rows > grain else -(-grain // -(-grain // rows))
    step = max(rows, grain)
    for outer in positions([range(n) for n in shape[:axis]]):
        head = tuple(slice(i, i + 1) for i in outer)
        for first in range(0, shape[axis], step):
            last = min(first + step, shape[axis])
            for start in range(first, last, rows):
                yield (*head, slice(start, min(start + rows, last)), *whole(shape[axis + 1 :]))


def chunks(tensor: Tensor, limit: int = BLOCK_BYTES) -> Iterator[Array]:
    """Reads a tensor block by block, in C order; the blocks joined are `tensor.read()` flattened.

    Of one whose axes lie in another order, what makes several blocks is read at once, in longer runs.
    """
    scattered = getattr(tensor, "scattered", None)
    if scattered is None:
        for index in blocks(tensor, limit):
            yield np.ascontiguousarray(tensor.read(index))
        return
    for slab in blocks(tensor, max(limit, SLAB_BYTES)):
        turned = in_memory(scattered(slab))
        for index in blocks(turned, limit):
            yield row_major(turned.read(index))


def begin(tensor: Tensor) -> None:
    """Has another thread decode the beginning of a tensor that will be read as a whole, if its file is compressed.

    What is wrong with it is said when it is read.
    """
    start = getattr(getattr(tensor, "fetch", None), "begin", None)
    if start is not None:
        start()


_TILE = 128
"""Elements that a tile has along each of its two axes: of 8 bytes it fits a core's own cache."""
_CACHE_LINE = 64
_FEW = 16
"""Elements along an axis below which tiles save nothing."""


def row_major(view: Array) -> Array:
    """Returns an array whose values lie in C order: the same one, or a copy made by `fill`."""
    if view.flags.c_contiguous:
        return view
    ordered: Array = empty(view.shape, view.dtype)
    fill(ordered, view)
    return ordered


def fill(out: Array, values: Array) -> None:
    """Copies values into an array of the same shape and dtype, in tiles where their axes run in another order.

    Between a matrix and its transpose NumPy goes a whole column for each row: a cache line for each element, and rows
    whose length is a power of two push each other out. A tile is read along its rows and written along its columns.
    """
    if (out.shape, out.dtype) != (values.shape, values.dtype):
        raise ValueError(f"{values.dtype} {values.shape} can't fill {out.dtype} {out.shape}")
    if out.dtype.itemsize <= 8:  # NumPy copies numbers of its own faster than ml_dtypes'
        out, values = out.view(f"u{out.dtype.itemsize}"), values.view(f"u{out.dtype.itemsize}")
    out, values = _joined(out, values)
    if not out.size or not out.ndim:
        np.copyto(out, values)
        return
    written, read = (min(range(a.ndim), key=a.strides.__getitem__) for a in (out, values))
    if written == read or min(out.shape[written], out.shape[read]) < _FEW:
        np.copyto(out, values)
        return
    rest = [axis for axis in range(out.ndim) if axis not in (written, read)]
    out, values = (a.transpose(*rest, written, read) for a in (out, values))
    # Rows of the tile are apart by no power of two either.
    tile = np.empty((_TILE, _TILE + _CACHE_LINE // out.itemsize), out.dtype)
    for position in positions([range(n) for n in out.shape[:-2]]):
        into, of = out[position], values[position]
        for j in range(0, of.shape[1], _TILE):
            for i in range(0, of.shape[0], _TILE):
                part = of[i : i + _TILE, j : j + _TILE]
                dense = tile[: part.shape[0], : part.shape[1]]
                dense[...] = part
                into[i : i + _TILE, j : j + _TILE] = dense


def _joined(out: Array, values: Array) -> tuple[Array, Array]:
    """Returns two arrays of one shape without axes of length 1, and with those as one that run on in both."""
    axes: list[tuple[int, int, int]] = []
    for n, to, of in zip(out.shape, out.strides, values.strides, strict=True):
        if axes and axes[-1][1:] == (n * to, n * of):
            axes[-1] = axes[-1][0] * n, to, of
        elif n != 1:
            axes.append((n, to, of))
    shape = tuple(n for n, _, _ in axes)
    strided = np.lib.stride_tricks.as_strided
    return (
        strided(out, shape, tuple(to for _, to, _ in axes)),
        strided(values, shape, tuple(of for _, _, of in axes), writeable=False),
    )


class OfOne:
    """A tensor made of another one, in the dtype of that."""

    tensor: Tensor

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype


class OfSeveral:
    """A tensor made of several others, which have one dtype."""

    tensors: Sequence[Tensor]

    @property
    def dtype(self) -> DType:
        return self.tensors[0].dtype


@dataclass(slots=True, unsafe_hash=True)
class Stored:
    """A tensor that lies in a file. `fetch` gets a normal index and returns that block.

    `checksum` says which of the format's own covers its values, and is compared when they are read; "" if none does.
    """

    shape: Final[Shape]
    dtype: Final[DType]
    fetch: Final[Callable[[Index], Array]] = field(repr=False, compare=False)
    name: Final[str]
    place: Final[str]
    chunk: Final[Shape | None] = None
    note: Final[str] = ""
    checksum: Final[str] = ""

    @property
    def grain(self) -> Shape:
        return self.chunk or self.shape

    def read(self, index: Index | None = None) -> Array:
        bounds = normal_index(index, self.shape)
        block = self.fetch(bounds)
        if block.shape != index_shape(bounds) or block.dtype != self.dtype:
            raise FormatError(
                "A reader returned another block than it was asked for.",
                place=f"{self.name} in {self.place}",
                expected=f"{self.dtype} {index_shape(bounds)}",
                found=f"{block.dtype} {block.shape}",
            )
        return block

    def called(self, name: str) -> Stored:
        """Returns the same tensor under another name."""
        return Stored(
            self.shape, self.dtype, self.fetch, name, self.place, self.chunk, self.note, self.checksum
        )

    def to_json(self) -> dict[str, Any]:
        return {"op": "stored", "name": self.name, **_described(self)}


@dataclass(frozen=True)
class Filled:
    """A tensor that nobody stored: every value is `value`. `reason` says why it exists."""

    shape: Shape
    dtype: DType
    value: float = 0.0
    reason: str = ""

    @property
    def grain(self) -> Shape:
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        return np.full(index_shape(normal_index(index, self.shape)), self.value, self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"op": "filled", "value": self.value, "reason": self.reason, **_described(self)}


@dataclass(frozen=True)
class Cast:
    """A tensor in another dtype; rounds to nearest even where the target is narrower."""

    source: Tensor
    dtype: DType

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def grain(self) -> Shape:
        return self.source.grain

    def read(self, index: Index | None = None) -> Array:
        return rounded(self.source.read(index), self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {"op": "cast", "source": self.source.to_json(), **_described(self)}


def in_memory(array: Array, name: str = "", place: str = "memory") -> Stored:
    """Wraps an array as a Tensor; it must not be changed afterwards."""
    native = np.asarray(array)
    return Stored(native.shape, native.dtype, lambda index: np.asarray(native[index]), name, place)


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}


def rounded(values: Array, dtype: DType) -> Array:
    """Returns values in another dtype, each rounded once, to the nearest and ties to even.

    ml_dtypes goes from float64 to its small dtypes through float32, which rounds twice: 1 + 2^-8 + 2^-40 became 1 in
    bfloat16. Rounding to odd first (cut off, the last bit set where anything was lost) leaves the second one right.
    """
    if values.dtype != np.float64 or dtype_name(dtype) not in _EXTENSION:
        return np.asarray(values).astype(dtype)
    with np.errstate(over="ignore", under="ignore"):
        near = np.asarray(values).astype(np.float32)
        bits = near.view(np.uint32)
        # The magnitude's last place, whatever the sign.
        bits -= np.abs(near.astype(np.float64)) > np.abs(values)
        bits |= (near != values) & ~np.isnan(values)
        return near.astype(dtype)


def float_info(dtype: DType) -> Any:
    """Returns what NumPy's finfo says, for the low-precision dtypes too."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes' is untyped


def widens(source: DType, target: DType) -> bool:
    """Tells whether every value of `source` is a value of `target`."""
    if source == target:
        return True
    if dtype_name(source) in _EXTENSION or source.kind == "f":
        if target.kind != "f" and dtype_name(target) not in _EXTENSION:
            return False
        near, far = float_info(source), float_info(target)
        return bool(near.nmant <= far.nmant and near.maxexp <= far.maxexp and near.minexp >= far.minexp)
    return bool(np.can_cast(source, target, "safe"))


def scalar(value: Any) -> Any:
    """Returns the number in a 0-d tensor, which is read; anything else as it is."""
    return value.read().item() if isinstance(value, Tensor) and value.shape == () else value


def bytes_of(tensor: Tensor) -> Any:
    """Returns what two tensors have in common that read the same bytes."""
    return tensor.fetch if isinstance(tensor, Stored) else id(tensor), tensor.shape, tensor.dtype


def apart(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model without the further names of tied tensors: an optimizer has each once."""
    ties = ties_of(model, model)
    return {name: tensor for name, tensor in model.items() if name not in ties}


def ties_of(model: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, str]:
    """Returns the further names of a model's tensors: name -> the name that the same tensor stands under.

    Args:
        model: Tensor by name.
        names: The names whose tensors may have further ones; of two that are tied, the first stands.
    """
    first: dict[Any, str] = {}
    for name in names:
        first.setdefault(bytes_of(model[name]), name)
    ties = {name: first.get(bytes_of(tensor), name) for name, tensor in model.items()}
    firsts = set(first.values())
    return {name: tie for name, tie in ties.items() if name != tie and name not in firsts}


def same_values(left: Tensor, right: Tensor) -> bool:
    """Tells whether two tensors of one shape hold equal values (NaN equals NaN), reading both in blocks."""
    if left.shape != right.shape:
        return False
    return all(
        np.array_equal(_wide(left.read(i)), _wide(right.read(i)), equal_nan=True) for i in blocks(left)
    )


def _wide(block: Array) -> Array:
    return block.astype(np.float64) if block.dtype.kind in "fV" else block
