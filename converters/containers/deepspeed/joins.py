"""How the pieces of a parameter that tensor-parallel ranks hold join: only `universal_checkpoint_info` says it.

Its patterns name parameters: those that every rank has whole, those that are cut along the second axis, fused ones of
which each rank has a piece of every part, and the vocabulary, whose padding is left out. What no pattern names is cut
along the first axis. `affine_map` says of every element where it lies. Input: the pieces of a parameter, in the order
of ranks. Output: the parameter, which is read piece by piece.

Source: deepspeedai/DeepSpeed deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`; checkpoint/affine.py,
`ParamAffineMap.rebuild`; checkpoint/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from statekit.budget import Account
from statekit.converters.containers.deepspeed.files import require
from statekit.errors import CorruptError, FormatError, RefusedError, StatekitError
from statekit.tensors.boxes import Agreed, Cut, Joined, tiling_fault
from statekit.tensors.patterns import BOUNDED, LONGEST, bounded, places
from statekit.tensors.tensor import Index, Shape, Tensor, index_shape
from statekit.tensors.tree import Record
from statekit.tensors.typed import Natural, typed
from statekit.tensors.views import Mean, Stack

INFO = "universal_checkpoint_info"
"""The key of a model's file, which the user's program saves, or AutoTP."""
SUB_PARAMS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
"""The class of what a universal checkpoint says of a fused parameter."""
_VOCABULARY = "vocabulary_parameter_patterns"
_REPLICATED, _AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
_SECOND_AXIS, _HALVES = "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0"
_FUSED, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_UNSUPPORTED, _AFFINE = "autotp_unsupported_parameter_patterns", "affine_map"
_STAGES = "pipeline_replicated_parameter_patterns"
_VERSION, _WITH_WIDTHS, _AFFINE_VERSION = "universal_checkpoint_version", 0.4, 1
_STEP = 1000
"""Places that a match tries in one step of the budget."""
_COMPILING = 32
"""Steps of the budget that compiling takes for each character of a pattern."""
Widths: TypeAlias = Sequence[Sequence[int]]
"""For each part of a fused parameter, how much of it each rank has along the axis that is cut."""


@dataclass(frozen=True)
class Joins:
    """How pieces join, by a checkpoint's `universal_checkpoint_info`.

    Attributes:
        info: It; empty if there is none.
        place: The checkpoint, for messages.
        account: What matching its patterns draws on.
    """

    info: Mapping[str, Any]
    place: str
    account: Account
    _compiled: set[str] = field(default_factory=set, compare=False, repr=False)

    def whole(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        """Returns a parameter, or a slot of one, of the pieces that ranks hold.

        Raises:
            CorruptError: The pieces have other shapes than the information says.
            RefusedError: Nothing says how they join.
        """
        if len({piece.dtype for piece in pieces}) != 1:
            raise CorruptError(
                "Ranks hold pieces of several dtypes.",
                place=self._at(name),
                found=", ".join(f"{piece.dtype}" for piece in pieces[:4]),
            )
        with self._reading():
            whole = pieces[0] if len(pieces) == 1 else self._joined(name, pieces)
        rows = self.info.get("original_vocab_size")
        if not self._names(_VOCABULARY, name) or not whole.shape or rows is None:
            return whole
        if type(rows) is not int or rows < 1:
            raise FormatError("A vocabulary's size is invalid.", place=self.place, found=str(rows)[:80])
        kept = slice(0, min(rows, whole.shape[0]))
        return Cut(whole, (kept, *(slice(0, n) for n in whole.shape[1:]))) if rows < whole.shape[0] else whole

    def record(self, name: str, shape: Shape) -> dict[str, Any]:
        """Returns what a universal checkpoint says of a whole parameter, for DeepSpeed to cut it again.

        Raises:
            FormatError: The information isn't made as DeepSpeed makes it.
        """
        with self._reading():
            padded = {"vocab_tensor": True} if self._names(_VOCABULARY, name) else {}
            is_whole = any(self._names(key, name) for key in (_REPLICATED, _AVERAGED))
            if is_whole or self._affine(name) is not None:
                return padded
            if self._names(_HALVES, name):
                return {"cat_dim": 0, "param_n_sub_params": 2, **padded}
            entry, _ = self._fused_entry(name)
            if entry is None:
                return {"cat_dim": int(self._names(_SECOND_AXIS, name)), **padded}
            axis, sizes = entry["partition_dim"], [*entry["shape"]]
            if not isinstance(sizes[axis], (tuple, list)):
                sizes[axis] = self._equal(name, shape[axis : axis + 1], sizes[axis])
            sizes[axis] = tuple(sizes[axis])
            fields = {"patterns": [*entry["patterns"]], "shape": tuple(sizes), "partition_dim": axis}
            return {"sub_param_shape": Record(SUB_PARAMS, (), fields), **padded}

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raises a FormatError where the information has another form than DeepSpeed gives it."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, StatekitError):
                raise
            raise FormatError(
                "The record of joining has another form than DeepSpeed's.",
                place=f"{INFO} in {self.place}",
                found=f"{type(error).__name__}: {error}"[:200],
            ) from None

    def check(self) -> None:
        """Refuses pieces if nothing says how they join.

        Raises:
            RefusedError: There is no information.
        """
        if not self.info:
            raise RefusedError(
                "Ranks hold slices of the model, and nothing says how they join.",
                place=self.place,
                expected=f"{INFO} in the model's file",
                found="none",
                remedy=f"save it as client state ({INFO}), or make a universal checkpoint: ds_to_universal.py",
            )

    def is_of_stages(self, name: str) -> bool:
        """Tells whether each stage of a pipeline has a parameter whole."""
        return self._names(_STAGES, name)

    def is_averaged(self, name: str) -> bool:
        """Tells whether a parameter is the mean of what ranks hold."""
        return self._names(_AVERAGED, name)

    def _joined(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        self.check()
        self._refuse_unsupported(name)
        if (entry := self._affine(name)) is not None:
            return self._placed(name, pieces, entry)
        if self._names(_REPLICATED, name):
            return Agreed(tuple(self._alike(name, pieces)), self._at(name))
        if self._names(_AVERAGED, name):
            return Mean(Stack(tuple(self._alike(name, pieces)), 0), 0)
        if self._names(_HALVES, name):
            sizes = [piece.shape[0] if piece.shape else 0 for piece in pieces]
            return self._cut(name, pieces, 0, [[-(-n // 2) for n in sizes], [n // 2 for n in sizes]])
        if (fused := self._fused(name, pieces)) is not None:
            return self._cut(name, pieces, *fused)
        axis = int(self._names(_SECOND_AXIS, name))
        return self._cut(name, pieces, axis, [[n for piece in pieces for n in piece.shape[axis : axis + 1]]])

    def _cut(self, name: str, pieces: Sequence[Tensor], axis: int, widths: Widths) -> Tensor:
        """Returns what was cut along an axis: of each part, the pieces of all ranks one after the other."""
        self._check_widths(name, pieces, axis, widths)
        parts: dict[tuple[int, ...], Tensor] = {}
        starts, at = [0] * len(pieces), 0
        for rank, width in ((rank, w) for of_part in widths for rank, w in enumerate(of_part)):
            whole = pieces[rank].shape
            box = [slice(0, n) for n in whole]
            box[axis] = slice(starts[rank], starts[rank] + width)
            if math.prod(index_shape(tuple(box))):
                origin = tuple(at if i == axis else 0 for i in range(len(box)))
                parts[origin] = pieces[rank] if width == whole[axis] else Cut(pieces[rank], tuple(box))
            starts[rank], at = starts[rank] + width, at + width
        first = pieces[0].shape
        return Joined(parts, (*first[:axis], at, *first[axis + 1 :])) if parts else pieces[0]

    def _check_widths(self, name: str, pieces: Sequence[Tensor], axis: int, widths: Widths) -> None:
        shapes = [piece.shape for piece in pieces]
        around = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        sizes = [sum(of_rank) for of_rank in zip(*widths, strict=True)]
        sizes_there = [n for shape in shapes for n in shape[axis : axis + 1]]
        if len(around) != 1 or sizes != sizes_there or not sizes_there:
            raise CorruptError(
                "The pieces of ranks don't fit each other.",
                place=self._at(name),
                expected=f"pieces cut along axis {axis}, of sizes {sizes}",
                found=", ".join(map(str, shapes[:4])),
            )

    def _fused(self, name: str, pieces: Sequence[Tensor]) -> tuple[int, Widths] | None:
        """Returns the axis along which a fused parameter is cut, and its parts' widths; None if it isn't fused."""
        entry, pattern = self._fused_entry(name)
        if entry is None:
            return None
        axis, shape = entry["partition_dim"], entry["shape"]
        if len(shape) != len(pieces[0].shape) or axis not in range(len(shape)):
            raise RefusedError(
                "A fused parameter is described in other axes than it has.",
                place=self._at(name),
                expected=pieces[0].shape,
                found=str(shape),
            )
        sizes = shape[axis] if isinstance(shape[axis], (tuple, list)) else None
        if self.info.get(_VERSION, 0) >= _WITH_WIDTHS:
            widths = require(self.info.get(_WIDTHS), Mapping, _WIDTHS, self.place).get(pattern)
            return axis, typed(widths, list[list[Natural]], f"{_WIDTHS} in {self.place}")
        sizes = (
            self._equal(name, [piece.shape[axis] for piece in pieces], shape[axis])
            if sizes is None
            else sizes
        )
        if uneven := [size for size in sizes if size % len(pieces)]:
            raise RefusedError(
                "Parts of a fused parameter were cut unevenly, and nothing says how.",
                place=self._at(name),
                expected=f"{_WIDTHS}, or sizes that {len(pieces)} divides",
                found=uneven,
            )
        return axis, [[size // len(pieces)] * len(pieces) for size in sizes]

    def _fused_entry(self, name: str) -> tuple[Mapping[str, Any] | None, str]:
        """Returns what is said of a fused parameter, and by which pattern."""
        patterns = ((entry, pattern) for entry in self._list(_FUSED) for pattern in entry["patterns"])
        return next((pair for pair in patterns if self._matches(pair[1], name)), (None, ""))

    def _equal(self, name: str, lengths: Sequence[int], count: int) -> list[int]:
        """Returns the sizes of equal parts, which metadata before version 0.4 counts."""
        total = sum(lengths)
        if not 0 < count <= total:
            raise FormatError("A fused parameter has no parts.", place=self._at(name), found=count)
        self.account.nodes(count * len(lengths), "A fused parameter", self._at(name))
        return [total // count] * count

    def _affine(self, name: str) -> Mapping[str, Any] | None:
        """Returns what an affine map says of a parameter, by its first pattern that names it."""
        node = self.info.get(_AFFINE)
        if not node:
            return None
        if (
            require(node, Mapping, "an affine map", self.place).get("version", _AFFINE_VERSION)
            != _AFFINE_VERSION
        ):
            raise RefusedError(
                "An affine map is of a version that isn't read.",
                place=self.place,
                expected=_AFFINE_VERSION,
                found=str(node["version"])[:80],
            )
        entries = node.get("params") or {}
        return next((entry for pattern, entry in entries.items() if self._matches(pattern, name)), None)

    def _placed(self, name: str, pieces: Sequence[Tensor], entry: Mapping[str, Any]) -> Tensor:
        """Joins the blocks of an affine map; each block lies in the pieces of one or several ranks."""
        whole, blocks = tuple(entry["logical_shape"]), dict[tuple[int, ...], list[Tensor]]()
        by_rank = {int(rank): node for rank, node in entry["ranks"].items()}
        for rank, piece in enumerate(pieces):
            node = by_rank.get(rank, {"pieces": [], "shard_shape": piece.shape})
            if tuple(node["shard_shape"]) != piece.shape:
                raise CorruptError(
                    "A rank's piece has another shape than the affine map says.",
                    place=self._at(name),
                    expected=tuple(node["shard_shape"]),
                    found=piece.shape,
                )
            for block in node["pieces"]:
                at, box = self._block(name, block, whole, piece.shape)
                if math.prod(index_shape(box)):
                    blocks.setdefault(at, []).append(Cut(piece, box))
        parts = {
            at: of_ranks[0] if len(of_ranks) == 1 else Agreed(tuple(of_ranks), self._at(name))
            for at, of_ranks in blocks.items()
        }
        if fault := tiling_fault(whole, [(at, part.shape) for at, part in parts.items()], name, self.account):
            raise CorruptError(
                "An affine map doesn't make up its parameter.", place=self._at(name), found=fault
            )
        return Joined(parts, whole)

    def _block(
        self, name: str, block: Mapping[str, Any], whole: Shape, piece: Shape
    ) -> tuple[tuple[int, ...], Index]:
        """Returns where a block lies in the parameter, and its box in a rank's piece."""
        shape = tuple(typed(block["shape"], list[Natural], f"{_AFFINE} in {self.place}"))
        if block.get("scale", 1.0) != 1.0 or len(shape) != len(whole):
            raise RefusedError(
                "An affine map scales a parameter, which DeepSpeed refuses for an optimizer's state, or reshapes it.",
                place=self._at(name),
                found=f"scale {block.get('scale', 1.0)}, a block of shape {shape}",
            )
        (from_, strides), (to, steps) = block["source"], block["dest"]
        at, start = _origin(from_, strides, shape, whole), _origin(to, steps, shape, piece)
        if at is None or start is None:
            raise RefusedError(
                "An affine map's block isn't a box of its parameter.",
                place=self._at(name),
                found=str(block)[:200],
            )
        return at, tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))

    def _alike(self, name: str, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns pieces that are each the whole."""
        if len({piece.shape for piece in pieces}) != 1:
            raise CorruptError(
                "A tensor that every rank holds whole has several shapes.",
                place=self._at(name),
                found=", ".join(str(piece.shape) for piece in pieces[:4]),
            )
        return pieces

    def _refuse_unsupported(self, name: str) -> None:
        reasons = self.info.get(_UNSUPPORTED) or {}
        for pattern, reason in require(reasons, Mapping, "reasons by pattern", self.place).items():
            if self._matches(pattern, name):
                raise RefusedError(
                    "AutoTP says that it can't describe how a parameter is cut.",
                    place=self._at(name),
                    found=str(reason)[:200],
                )

    def _names(self, key: str, name: str) -> bool:
        """Tells whether one of a list's patterns names a parameter."""
        return any(self._matches(pattern, name) for pattern in self._list(key))

    def _list(self, key: str) -> Sequence[Any]:
        patterns: Sequence[Any] = require(self.info.get(key) or [], (list, tuple), key, self.place)
        return patterns

    def _matches(self, pattern: Any, name: str) -> bool:
        """Tells whether a pattern names a parameter, as `re.match` does; refuses one that may take time without end."""
        text = require(pattern, str, "a pattern", self.place)
        if text not in self._compiled:
            self.account.step(_COMPILING * len(text), "The patterns of a checkpoint", self.place)
            self._compiled.add(text)
        compiled = bounded(text)
        if compiled is None or len(name) > LONGEST:
            raise RefusedError(
                "A pattern is none that can be matched safely.",
                place=f"{INFO} in {self.place}",
                expected=BOUNDED,
                found=text[:80],
            )
        self.account.step(1 + places(text, name) // _STEP, "The patterns of a checkpoint", self.place)
        return compiled.match(name) is not None

    def _at(self, name: str) -> str:
        return f"{name} in {self.place}"


def _origin(offset: int, strides: Sequence[int], shape: Shape, around: Shape) -> tuple[int, ...] | None:
    """Returns the first index of a block in a tensor in C order; None if it isn't a box of that."""
    steps = [math.prod(around[i + 1 :]) for i in range(len(around))]
    if any(n > 1 and stride != step for n, stride, step in zip(shape, strides, steps, strict=True)):
        return None
    if not 0 <= offset < max(math.prod(around), 1):
        return None
    at = tuple(int(i) for i in np.unravel_index(offset, around)) if math.prod(around) else (0,) * len(around)
    fits = all(a + n <= whole for a, n, whole in zip(at, shape, around, strict=True))
    return at if fits or not math.prod(shape) else None
