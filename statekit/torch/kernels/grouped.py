"""Moves many tensors by generated kernels: one launch for a pass over all of them."""

from __future__ import annotations

import copy
import linecache
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch

from statekit.arrays.backend import Value
from statekit.arrays.torch_backend import TorchBackend
from statekit.optim.adafactor import ParamConfig
from statekit.optim.run import steps_for
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.state.train_state import Axis, Rule
from statekit.torch.fast.adafactor import item_of
from statekit.torch.fast.batching import Slots, Tensors
from statekit.torch.kernels.joining import Region, Split, join
from statekit.torch.kernels.source import Program
from statekit.torch.kernels.staging import FULL, SIDE
from statekit.torch.kernels.traced import CannotTraceError
from statekit.torch.kernels.tracing import Item, dims_of, matrix_rule, traced, vector_rule

_XP = TorchBackend()
Table: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
BLOCKS = {2: 2048, 4: 1024}
"""Elements of a block of vectors, by the bytes of a parameter's element; one pass that does all takes the fewest."""
TILES = {2: (8, 512), 4: (8, 256)}
"""Rows and columns of a tile of matrices."""
SHORTEST = 2
"""Elements that a block has along each axis at least: numbers are rounded to bfloat16 two by two."""
TILES_OF_BLOCK = 8
"""Tiles that a block of a matrix takes one after the other, where there are many: the fewer blocks, the fewer partial
sums, and a block that begins waits for addresses."""
MANY_BLOCKS = 2048
"""So many blocks keep a GPU busy."""
AHEAD = 3
"""Tiles that are on their way while another one is computed."""
SIDE_BLOCK = 64
MIXED = (4096, 65536)
"""Vectors up to these lengths go in one launch, whatever their lengths: norms and biases are many and small."""
WARPS = 4
"""Threads hold few elements: roundings by the rule, above all of quotients and roots, take registers."""


@dataclass(frozen=True)
class DeviceScene(Scene):
    """An update whose count, or whether it is made at all, only the device knows.

    Attributes:
        counted: Updates done beyond `step`, int64.
        scale: What gradients are to be divided by, float32.
        found: Whether one isn't finite, float32: then nothing moves.
    """

    counted: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    found: torch.Tensor | None = None


@dataclass(frozen=True)
class GroupedMove:
    """The update of tensors that share all that it depends on but their memory.

    Attributes:
        schema: The optimizer.
        variant: Whose rule.
        config: What `settle` returned.
        sides: The slots along a matrix's rows and columns; none for a vector.
        shape: Rows and columns of a matrix, BATCH axes aside, or the length of a vector; of MIXED vectors, which may
            have any length, the most.
        split: How processes share each tensor; None where this one has the whole.
        is_mixed: Whether vectors have lengths of their own.
        launches: What the device holds for tensors that were moved before, by kind.
    """

    schema: str
    variant: str
    config: Any
    sides: tuple[str, ...]
    shape: tuple[int, ...]
    split: Split | None = None
    is_mixed: bool = False
    launches: dict[Hashable, Launches] = field(default_factory=dict, compare=False, repr=False)

    def __call__(
        self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Value | None
    ) -> None:
        kinds: dict[Hashable, list[int]] = {}
        for i, (param, grad, arrays) in enumerate(zip(params, grads, slots, strict=True)):
            kind = (param.dtype, grad.dtype, *((name, slot.dtype) for name, slot in arrays.items()))
            kinds.setdefault(kind, []).append(i)
        for members in kinds.values():
            named = {"param": [params[i] for i in members], "grad": [grads[i].contiguous() for i in members]}
            names = [name for name in slots[members[0]] if name != "average"]
            named |= {name: [slots[i][name] for i in members] for name in names}
            self.launched(scene, named, common).run(scene, named, common)

    def launched(
        self, scene: Scene, arrays: Mapping[str, Sequence[torch.Tensor]], common: Value | None
    ) -> Launches:
        """Returns the launches for tensors of one kind."""
        rate = (
            None if scene.rate is None else "float32" if isinstance(scene.rate, torch.Tensor) else "float64"
        )
        item = self.item({name: tensors[0] for name, tensors in arrays.items()})
        key = (item, rate, common is None)
        if key not in self.launches:
            program = traced(self.schema, self.variant, self.config, item, rate, common is not None)
            self.launches[key] = Launches(program, self.shape, self.split, self.is_mixed)
        return self.launches[key]

    def item(self, arrays: Mapping[str, torch.Tensor]) -> Item:
        """Returns what is traced, of the arrays of one tensor."""
        whole = ("R", "C") if self.sides else ("N",)
        lengths = dict(zip(whole, self.split.shape if self.split else self.shape, strict=True))
        if "scale_grads" in arrays:
            lengths["H"] = arrays["scale_grads"].shape[0]
        rule = None
        if isinstance(self.config, ParamConfig):
            rule = matrix_rule(self.sides[0]) if self.sides else vector_rule()
        return Item(
            tuple(lengths.items()),
            tuple((name, _XP.dtype(array)) for name, array in arrays.items()),
            tuple(dims_of(arrays, whole, self.sides).items()),
            rule,
        )


def grouped_move(
    schema: str, variant: str, config: Any, param: torch.Tensor, split: Split | None = None
) -> GroupedMove | None:
    """Returns the grouped move of a parameter; None where kernels don't run by its rule.

    Args:
        schema: The optimizer.
        variant: Whose rule.
        config: What its `settle` returned.
        param: The parameter, or what this process has of it.
        split: How processes share it, if they do.
    """
    if not _is_dense(param, may_be_empty=split is not None):
        return None
    sides: tuple[str, ...] = ()
    shape: tuple[int, ...] = (param.numel(),)
    if isinstance(config, ParamConfig):
        kind = item_of(config.rule, tuple(param.shape))
        if kind is None or config.place is not None or not _is_apart(variant, config.rule):
            return None
        shape, sides = kind
    move = GroupedMove(schema, variant, config, sides, shape, split)
    if not _is_traceable(move, param.dtype):
        return None
    # One element is another kind of parameter to some rules.
    alone = sides or split or shape != (param.numel(),) or not 1 < shape[0] <= MIXED[-1]
    if alone or not _is_any_length(move, param.dtype):
        return move
    return replace(move, shape=(next(most for most in MIXED if shape <= (most,)),), is_mixed=True)


def _is_dense(param: torch.Tensor, may_be_empty: bool) -> bool:
    return (
        type(param) in (torch.Tensor, torch.nn.Parameter)
        and param.layout == torch.strided
        and param.is_contiguous()
        and (param.numel() > 0 or may_be_empty)
        and param.dtype in (torch.float32, torch.bfloat16, torch.float16)
    )


def _is_apart(variant: str, rule: Rule) -> bool:
    """Tells whether the entries along BATCH axes are moved each by itself."""
    form = variant_constants("adafactor", variant)
    return not rule.dims(Axis.BATCH) or "tensor" not in (form["clipping_over"], form["parameter_scale_over"])


@cache
def _is_traceable(move: GroupedMove, dtype: torch.dtype) -> bool:
    try:
        _program(move, dtype)
    except CannotTraceError:
        return False
    return True


@cache
def _is_any_length(move: GroupedMove, dtype: torch.dtype) -> bool:
    """Tells whether vectors of any length have the same update."""
    others = [replace(move, shape=(length,)) for length in (3, 5)]
    return _program(others[0], dtype) == _program(others[1], dtype)


def _program(move: GroupedMove, dtype: torch.dtype) -> Program:
    config = move.config
    if isinstance(config, ParamConfig):
        config = ParamConfig(config.hyper, matrix_rule(move.sides[0]) if move.sides else vector_rule())
    param = torch.empty(move.split.shape if move.split else move.shape, dtype=dtype, device="meta")
    slots = steps_for(move.schema, move.variant).init(_XP, param, config, move.variant)
    slots.pop("average", None)
    item = move.item({"param": param, "grad": param, **slots})
    clips = getattr(config, "clipping_scale", None) is not None
    return traced(move.schema, move.variant, move.config, item, "float64", clips)


@cache
def _compiled(text: str) -> Mapping[str, Any]:
    """Returns the functions of a source that `source.program` wrote; it holds no word or number of a user."""
    name = f"<statekit kernels {hash(text) & 0xFFFFFFFFFFFF:012x}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "statekit.torch.kernels.generated"}
    exec(compile(text, name, "exec"), namespace)
    return namespace


class Launches:
    """The launches that move tensors of one kind, and what the device keeps for them."""

    def __init__(
        self, program: Program, shape: tuple[int, ...], split: Split | None = None, is_mixed: bool = False
    ) -> None:
        self.program, self.shape, self.split, self.is_mixed = program, shape, split, is_mixed
        functions = _compiled(program.text)
        self.numbers = functions["numbers"]
        self.stages = [functions[f"stage_{i}"] for i in range(len(program.spans))]
        self.table = np.empty((0, 0), np.int64)
        """Where tensors lie, as the device knows it: array by array."""
        self.scalars: torch.Tensor
        self.pointers: torch.Tensor
        self.built = 0
        """How often the device was told where tensors lie."""
        self.is_frozen = False
        """Whether a graph reads the table of addresses, which then stays."""
        self.begun: torch.Tensor | None = None
        """What a graph copies its numbers from."""

    def run(self, scene: Scene, arrays: Mapping[str, Sequence[torch.Tensor]], common: Value | None) -> None:
        """Moves tensors; `arrays` has, by name, what `GroupedMove` traced."""
        self.place(arrays)
        self.launch(scene, common)

    def place(
        self,
        arrays: Mapping[str, Sequence[torch.Tensor]],
        addresses: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Tells the device where tensors lie, if it doesn't know.

        Args:
            arrays: As for `run`.
            addresses: Where those of some names lie, if all others lie where they did.
        """
        count = len(arrays["param"])
        if addresses is not None and self.table.shape == (len(arrays), count):
            table = self.table.copy()
            for row, name in enumerate(arrays):
                if name in addresses:
                    table[row] = addresses[name]
        else:
            whole = list(map(torch.Tensor.data_ptr, chain.from_iterable(arrays.values())))
            table = np.array(whole, np.int64).reshape(len(arrays), count)
        if not np.array_equal(table, self.table):
            self._place(arrays, table)

    def launch(self, scene: Scene, common: Value | None) -> None:
        """Moves the tensors that were placed last."""
        scaled, split = self._share(scene, common), self.split
        if split:
            self.work.zero_()
        for function, span, parts in zip(self.stages, self.program.spans, self.program.parts, strict=True):
            blocks = {FULL: self.blocks, SIDE: self.side_blocks}.get(span, 1)
            function[(blocks * self.items,)](
                self.pointers, self.scalars, self.work, self.lengths, self.items, *self.extent, self.side_blocks,
                self.width, SCALED=scaled, ALIGNED=self.aligned, FILLED=self.filled, SPLIT=split is not None,
                BR=self.tile[0], BC=self.tile[1], BV=SIDE_BLOCK, TILES=self.tiles, AHEAD=AHEAD, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            if split and span == FULL and parts:
                join(self.work.view(self.items, self.width), self._regions(parts), split.group)

    def _regions(self, parts: Sequence[tuple[int, str]]) -> Iterator[Region]:
        """Yields where in the working memory of each item the parts of sums stand."""
        lengths = [[self.counts[name] for name in room] for room in self.program.room]
        for place, op in parts:
            start = sum(map(math.prod, lengths[:place]))
            is_side = lengths[place][1:] and self.program.room[place][1] in ("R", "C")
            length = lengths[place][1] if is_side else 1
            yield Region(start, math.prod(lengths[place]) // length, length, op)

    def for_graph(self) -> Launches:
        """Returns launches with memory of their own: a graph finds in it what was there when it was captured."""
        apart = copy.copy(self)
        apart.scalars, apart.work = self.scalars.clone(), torch.empty_like(self.work)
        apart.begun, self.is_frozen = self.scalars, True
        return apart

    def _share(self, scene: Scene, common: Value | None) -> bool:
        """Computes what all tensors share; tells whether gradients are scaled."""
        counted, scale, overflow = (getattr(scene, name, None) for name in ("counted", "scale", "found"))
        rate, on_device = scene.rate, None
        if isinstance(rate, torch.Tensor):
            rate, on_device = (
                (0.0, rate) if rate.device == self.scalars.device != _CPU else (float(rate), None)
            )
        high = 0.0 if rate is None else float(np.float32(rate))
        low = 0.0 if rate is None else rate - high
        scaled = scale is not None or overflow is not None
        self.numbers[(1,)](
            self.scalars, self.constants, scene.step, _or(counted, self.scalars), high, low,
            _or(on_device, self.scalars), _or(common, self.scalars), _or(scale, self.ones), _or(overflow, self.zeros),
            COUNTED=counted is not None, RATED=on_device is not None, COMMON=common is not None, SCALED=scaled,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        return scaled

    def _place(self, arrays: Mapping[str, Sequence[torch.Tensor]], addresses: Table) -> None:
        """Tells the device where tensors lie."""
        params, shape = arrays["param"], self.split.shape if self.split else self.shape
        device, numbers = params[0].device, [param.numel() for param in params]
        count = 1 if self.split or self.is_mixed else numbers[0] // math.prod(shape)
        lengths = numbers if self.is_mixed else [self.shape[0]] * (len(params) * count)
        if not self.table.size or self.lengths_placed != lengths or self.scalars.device != device:
            self._prepare(lengths, device)
        table = addresses[:, :, None]
        if count > 1:
            strides = [tensors[0].numel() * tensors[0].itemsize // count for tensors in arrays.values()]
            table = table + np.array(strides, np.int64).reshape(-1, 1, 1) * np.arange(count, dtype=np.int64)
        self.aligned = not (table % 16).any() and not any(length % 16 for length in self.contiguous)
        staged = torch.from_numpy(np.ascontiguousarray(table.reshape(-1)))
        self.staged = staged.pin_memory() if device.type == "cuda" else staged
        if self.is_frozen:
            self.pointers, self.is_frozen = torch.empty_like(self.pointers), False
        self.pointers.copy_(self.staged, non_blocking=True)
        self.table, self.built = addresses, self.built + 1

    def _prepare(self, lengths: list[int], device: torch.device) -> None:
        """Allocates the memory that stays until the number of tensors changes."""
        program, items = self.program, len(lengths)
        self.items, self.lengths_placed = items, lengths
        counts, sizes = self._matrix_blocks() if program.matrix else self._vector_blocks(lengths)
        self.counts = counts
        self.width = sum(math.prod(counts[name] for name in room) for room in program.room)
        self.work = torch.empty(max(1, self.width * items), dtype=torch.float32, device=device)
        self.pointers = torch.empty(len(program.arrays) * items, dtype=torch.int64, device=device)
        self.lengths = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.ones, self.zeros = (torch.full((), x, dtype=torch.float32, device=device) for x in (1.0, 0.0))
        self.constants = torch.tensor(program.constants or (0.0,), dtype=torch.float64, device=device)
        scalars = [1.0, 1.0, *(0.0 if value is None else value for value in program.scalars)]
        self.scalars = torch.tensor(scalars, dtype=torch.float64, device=device).to(torch.float32)

    def _matrix_blocks(self) -> tuple[dict[str, int], list[int]]:
        """Cuts matrices into blocks; returns the counts that rooms are made of, and the sizes that kernels read."""
        shape, whole = self.shape, self.split.shape if self.split else self.shape
        rows, most = TILES[self.program.width]
        columns = min(most, max(SHORTEST, _power(shape[1])))
        self.tile = (min(rows * most // columns, max(SHORTEST, _power(shape[0]))), columns)
        down, across = (max(1, -(-n // block)) for n, block in zip(shape, self.tile, strict=True))
        is_many = self.items * down * across >= MANY_BLOCKS * TILES_OF_BLOCK
        self.tiles = TILES_OF_BLOCK if is_many else 1
        down = -(-down // self.tiles)
        rows = self.tile[0] * self.tiles
        self.filled = math.prod(shape) > 0 and not (shape[0] % rows or shape[1] % self.tile[1])
        self.blocks, self.side_blocks = down * across, -(-max(whole) // SIDE_BLOCK)
        self.extent, self.contiguous = shape, {shape[1]}
        counts = {"R": whole[0], "C": whole[1], "n_S": self.side_blocks, "n_rt": down, "n_ct": across}
        return counts, [*whole, *(self.split.first if self.split else (0, 0))]

    def _vector_blocks(self, lengths: list[int]) -> tuple[dict[str, int], list[int]]:
        """Does the same with vectors."""
        longest, only_pass = max(lengths), len(self.program.spans) == 1
        block = min(BLOCKS.values()) if only_pass else BLOCKS[self.program.width]
        self.tile, self.tiles = (1, min(block, max(SHORTEST, _power(longest)))), 1
        self.contiguous = set(lengths)
        self.filled = self.contiguous == {longest} and longest > 0 and not longest % self.tile[1]
        self.blocks, self.side_blocks = max(1, -(-longest // self.tile[1])), 1
        self.extent = (self.blocks, 1)
        return {"n_rt": self.blocks}, [
            *lengths,
            *(self.split.shape * len(lengths) if self.split else lengths),
        ]


_CPU = torch.device("cpu")


def _or(value: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if value is None else value


def _power(length: int) -> int:
    """Returns the next power of two."""
    return 1 << (length - 1).bit_length()
