"""Writes Triton's source for the stages of an update."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from statekit.tensors.tensor import DTYPES
from statekit.torch.kernels.staging import FULL, SIDE, SINGLE, Stage, Staging, is_cut, is_rounded, span
from statekit.torch.kernels.traced import Traced

SCALARS = 2
"""Numbers before those of the rule: what gradients are divided by, and whether the update is to be made."""
HEADER = """import triton
import triton.language as tl


@triton.jit
def short_root(x):
    small = x < 1e-30
    return tl.sqrt(tl.where(small, x * 16777216.0, x)) * tl.where(small, 0.000244140625, 1.0)
"""
"""Triton's root takes subnormal numbers for 0."""
NATIVE = """
@triton.jit
def rounded_to_bfloat16(x):
    return x.to(tl.bfloat16).to(tl.float32)
"""
PACKED = """
@triton.jit
def rounded_to_bfloat16(x):
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
        "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
    )
"""
"""NVIDIA converts two at once as fast as others convert one by one slowly: a tenth of the time of NATIVE."""
BY_BITS = """
@triton.jit
def rounded_to_bfloat16(x):
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 32767 + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, bits, nearest).to(tl.float32, bitcast=True)
"""
"""Rounding to nearest even. Triton's interpreter cuts digits off where a GPU rounds; so it is told bit by bit."""
ARGUMENTS = "pointers, scalars, work, sizes, items, rows, cols, sides, width"
CONSTANTS = (
    "SCALED: tl.constexpr, ALIGNED: tl.constexpr, FILLED: tl.constexpr, SPLIT: tl.constexpr, "
    "BR: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr"
)

FORMULA: Mapping[str, Callable[..., str]] = {
    "add": lambda a, b: f"{a} + {b}",
    "sub": lambda a, b: f"{a} - {b}",
    "mul": lambda a, b: f"{a} * {b}",
    "div": lambda a, b: f"tl.div_rn({a}, {b})",
    "neg": lambda a: f"-{a}",
    "gt": lambda a, b: f"{a} > {b}",
    "lt": lambda a, b: f"{a} < {b}",
    "ge": lambda a, b: f"{a} >= {b}",
    "le": lambda a, b: f"{a} <= {b}",
    "eq": lambda a, b: f"{a} == {b}",
    "and": lambda a, b: f"{a} & {b}",
    "or": lambda a, b: f"{a} | {b}",
    "isnan": lambda a: f"{a} != {a}",
    "where": lambda a, b, c: f"tl.where({a}, {b}, {c})",
    "maximum": lambda a, b: f"tl.maximum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": lambda a, b: f"tl.minimum({a}, {b}, propagate_nan=tl.PropagateNan.ALL)",
    "sqrt": lambda a: f"tl.sqrt_rn({a})",
    "abs": lambda a: f"tl.abs({a})",
    "floor": lambda a: f"tl.floor({a})",
    "sign": lambda a: f"({a} > 0).to(tl.float32) - ({a} < 0).to(tl.float32)",
    "wide": lambda a: a,
    "reshape": lambda a: a,
}
"""An operation on float32."""

SHORT: Mapping[str, Callable[..., str]] = {
    "div": lambda a, b: f"({a} / {b})",
    "sqrt": lambda a: f"short_root({a})",
}
"""Operations that are right but for the last bits, and take half as long."""


Room: TypeAlias = tuple[str, ...]
"""Factors of a number of values: `R` and `C` rows and columns, `n_rt` and `n_ct` blocks along them, `n_S` of sides."""


@dataclass(frozen=True)
class Program:
    """An update of many tensors as source.

    Attributes:
        text: The source: a function `numbers`, and `stage_0` and on.
        spans: Over what each stage runs: FULL, SIDE or SINGLE.
        arrays: Which arrays a tensor has, in the order in which their addresses stand, with their dtypes.
        constants: The numbers of the text that `numbers` takes, float64.
        scalars: The numbers behind the first SCALARS that stages take, where the text itself has them; else None.
        room: How many numbers each tensor needs of the working memory, value by value: factors that `Sizes` has.
        parts: The sums of which each stage leaves parts: where in `room`, and whether it is a sum or a maximum.
        matrix: Whether tensors are matrices; else vectors.
    """

    text: str
    spans: tuple[int, ...]
    arrays: Mapping[str, str]
    constants: tuple[float, ...]
    scalars: tuple[float | None, ...]
    room: tuple[Room, ...]
    parts: tuple[tuple[tuple[int, str], ...], ...]
    matrix: bool

    @property
    def width(self) -> int:
        """The bytes of a parameter's element."""
        return DTYPES[self.arrays["param"]].itemsize


class _Writer:
    """Source for one update."""

    def __init__(self, staging: Staging, arrays: Mapping[str, Traced], lengths: Mapping[str, int]) -> None:
        self.staging, self.arrays = staging, dict(arrays)
        self.matrix = any(value.space == frozenset("RC") for value in arrays.values())
        self.lengths = lengths
        self.scalars: dict[Traced, int] = {}
        self.room: dict[tuple[str, int], Room] = {}

    def program(self) -> Program:
        stages = self.staging.stages
        for stage in stages:
            for part in stage.parts:
                self.room["part", part.number] = _part_room(part)
            for value in stage.kept:
                self.room["kept", value.number] = tuple(value.space) if span(value) == SIDE else ()
        bodies = [_StageWriter(self, stage).text(i) for i, stage in enumerate(stages)]
        constants: dict[float, int] = {}
        numbers = _numbers(self.scalars, constants)
        scalars = tuple(
            float(value.note) if value.op == "number" else None
            for value in sorted(self.scalars, key=self.scalars.__getitem__)
        )
        return Program(
            "\n\n".join((HEADER, _rounding(), numbers, *bodies)),
            tuple(stage.time % 3 for stage in stages),
            {name: value.dtype for name, value in self.arrays.items()}, tuple(constants), scalars,
            tuple(self.room.values()),
            tuple(
                tuple((self.place("part", part), part.op) for part in stage.parts) for stage in stages
            ),
            self.matrix,
        )  # fmt: skip

    def place(self, kind: str, value: Traced) -> int:
        """Returns where in the working memory a value stands."""
        return [*self.room].index((kind, value.number))

    def scalar(self, value: Traced) -> int:
        """Returns the place of a number that all tensors share."""
        return self.scalars.setdefault(value, SCALARS + len(self.scalars))


def _part_room(part: Traced) -> Room:
    """Returns how many parts of a sum there are for a tensor: one for each block, of each row or column that stays."""
    if part.args[0].space == frozenset("RC"):
        return {frozenset("R"): ("n_ct", "R"), frozenset("C"): ("n_rt", "C")}.get(
            part.space, ("n_rt", "n_ct")
        )
    return ("n_rt",) if part.args[0].space == frozenset("N") else ("n_S",)


def _whole(length: str) -> str:
    """Returns the name of a length, of the whole tensor where processes share it."""
    return f"W_{length}" if length in ("R", "C", "N") else length


class _StageWriter:
    """Source of one stage.

    A block of a matrix takes several tiles, one below the other: while one is computed, the next are on their way.

    Attributes:
        lines: What a block does first.
        tile: What it does with each tile; of vectors it has one, and these are the same lines.
        after: What it does with all that its tiles have left.
    """

    def __init__(self, whole: _Writer, stage: Stage) -> None:
        self.whole, self.stage = whole, stage
        self.lines: list[str] = []
        self.tile: list[str] = [] if whole.matrix else self.lines
        self.after: list[str] = []
        self.names: dict[tuple[Traced, str], str] = {}
        self.taken: set[str] = set()

    def text(self, number: int) -> str:
        kind = self.stage.time % 3
        body = {FULL: self._full, SIDE: self._side, SINGLE: self._single}[kind]
        body()
        head = [
            "@triton.jit(do_not_specialize=['items', 'rows', 'cols', 'sides', 'width'])",
            f"def stage_{number}({ARGUMENTS}, {CONSTANTS}):",
        ]
        if self.whole.matrix and self.tile:
            self._add("for tile in tl.range(0, TILES, num_stages=AHEAD):")
            self._add(*("    " + line for line in self.tile))
        return "\n".join(head + ["    " + line for line in self.lines + self.after])

    def _start(self, blocks: str) -> None:
        """Writes where a block is.

        Of a tensor that processes share, a stage over all elements sees this one's part, R x C or N. The others see
        the whole, W_R x W_C, of which `join` has summed what the processes left: one block's worth.
        """
        self._add("pid = tl.program_id(0)")
        if self.whole.matrix:
            self._add("R = rows", "C = cols", "n_rt = tl.maximum(tl.cdiv(R, BR * TILES), 1)")
            self._add("n_ct = tl.maximum(tl.cdiv(C, BC), 1)", "if ALIGNED:", "    C = C // 16 * 16")
        else:
            self._add("n_rt = rows")
        self._add("n_S = sides", f"blocks = {blocks}", "item = (pid // blocks).to(tl.int64)")
        self._add("block = pid % blocks")
        if self.whole.matrix:
            self._add("W_R = R", "W_C = C", "sum_rt = n_rt", "sum_ct = n_ct", "if SPLIT:")
            self._add(
                "    W_R = tl.load(sizes)", "    W_C = tl.load(sizes + 1)", "    sum_rt = 1", "    sum_ct = 1"
            )
        else:
            self._add("N = tl.load(sizes + item)", "W_N = N", "sum_rt = n_rt", "if ALIGNED:")
            self._add(
                "    N = N // 16 * 16",
                "if SPLIT:",
                "    W_N = tl.load(sizes + items + item)",
                "    sum_rt = 1",
            )
        self._add("one = tl.full((), 1.0, tl.float32)", "room_0 = work + item * width")
        for i, length in enumerate(list(self.whole.room.values())[:-1]):
            self._add(f"room_{i + 1} = room_{i} + {' * '.join(map(_whole, length)) or '1'}")
        self._add("alive = one", "if SCALED:", "    alive = tl.load(scalars + 1)")

    def _full(self) -> None:
        if self.whole.matrix:
            self._start("n_rt * n_ct")
            self._add("block_r = block // n_ct", "block_c = block % n_ct")
            self._add("c = (block_c * BC + tl.arange(0, BC))[None, :]", "in_c = c < C", "if FILLED:")
            self._add("    in_c = tl.full([1, BC], 1, tl.int1)", "left = c", "first_r = 0", "if SPLIT:")
            self._add("    first_r = tl.load(sizes + 2)", "    c += tl.load(sizes + 3)")
            self._add_to_tile(
                "r = ((block_r * TILES + tile) * BR + tl.arange(0, BR))[:, None]", "in_r = r < R",
                "if FILLED:", "    in_r = tl.full([BR, 1], 1, tl.int1)", "inside = in_r & in_c",
                "at = r.to(tl.int64) * C + left", "r += first_r",
            )  # fmt: skip
        else:
            self._start("n_rt")
            self._add("at = block.to(tl.int64) * BC + tl.arange(0, BC)", "inside = at < N")
            self._add("if FILLED:", "    inside = tl.full([BC], 1, tl.int1)")
        self._write("")

    def _side(self) -> None:
        self._start("n_S")
        self._add("at = block * BV + tl.arange(0, BV)")
        for side in "RC":
            self._add(f"inside_{side} = at < W_{side}")
            self._write(side)

    def _single(self) -> None:
        self._start("1")
        period = self.whole.lengths.get("H")
        if period:
            self._add(
                f"H = {period}",
                f"h = tl.arange(0, {max(2, 1 << (period - 1).bit_length())})",
                f"in_h = h < {period}",
            )
        self._write("")

    def _write(self, side: str) -> None:
        """Writes the lines of one side, or all lines if the stage has no sides."""

        def concerns(value: Traced) -> bool:
            return not side or value.space == frozenset(side)

        for part in self.stage.parts:
            if concerns(part.args[0]):
                self._leave_part(part, side)
        for value in self.stage.kept:
            if concerns(value):
                self._leave(value, side)
        for name, value in self.stage.stores.items():
            if concerns(value):
                self._store(name, value, side)

    def _leave_part(self, part: Traced, side: str) -> None:
        arg, room = part.args[0], self._room("part", part)
        x, inside = self.of(arg, side), self._inside(arg, side)
        masked, total = f"tl.where({inside}, {x}, 0.0)", f"tl.{part.op}"
        if span(arg) != FULL:
            self._add(f"tl.store({room} + block, {total}({masked}, 0))")
            return
        if part.space == frozenset("R"):
            self._add_to_tile(
                f"tl.store({room} + block_c * W_R + r, {total}({masked}, 1)[:, None], mask=in_r)"
            )
            return
        name = f"tiles_{part.number}"
        self._add(f"{name} = tl.zeros([{'BR, BC' if self.whole.matrix else 'BC'}], tl.float32)")
        self._add_to_tile(f"{name} = {_joined(part.op).format(name, masked)}")
        if part.space == frozenset("C"):
            self.after.append(f"tl.store({room} + block_r * W_C + c, {total}({name}, 0)[None, :], mask=in_c)")
        else:
            self.after.append(f"tl.store({room} + block, {total}({name}))")

    def _leave(self, value: Traced, side: str) -> None:
        x = self.of(value, side)
        x = f"{x}.to(tl.float32)" if value.kind == "bool" else x
        if span(value) == SIDE:
            self._add(f"tl.store({self._room('kept', value)} + at, {x}, mask=inside_{side})")
        else:
            self._add(f"tl.store({self._room('kept', value)}, {x})")

    def _store(self, name: str, value: Traced, side: str) -> None:
        x, array = self.of(value, side), self.whole.arrays[name]
        place, inside = self._place(array, side), self._inside(array, side)
        pointer, number = self._pointer(name, place), list(self.whole.arrays).index(name)
        if inside:
            self._add_for(value, f"moved_{number} = {inside}", "if SCALED:")
            self._add_for(value, f"    moved_{number} = tl.where({inside}, alive, 0.0) > 0.5")
            self._add_for(value, f"tl.store({pointer}, {x}.to(tl.{array.dtype}), mask=moved_{number})")
            return
        self._add(f"moved_{number} = {x}", "if SCALED:")
        self._add(f"    moved_{number} = tl.where(alive > 0.5, {x}, tl.load({pointer}).to(tl.float32))")
        self._add(f"tl.store({pointer}, moved_{number}.to(tl.{array.dtype}))")

    def of(self, value: Traced, side: str = "") -> str:
        """Returns the variable of a value; writes its line first if there is none yet."""
        key = (value, side if span(value) == SIDE else "")
        if key not in self.names:
            text = self._made(value, side)
            self.names[key] = f"x{len(self.names)}"
            self._add_for(value, f"{self.names[key]} = {text}")
        return self.names[key]

    def _made(self, value: Traced, side: str) -> str:
        staging, time = self.whole.staging, self.stage.time
        back = staging.read_back(value, time)
        if value.shared:
            text = f"tl.load(scalars + {self.whole.scalar(value)})"
            return f"{text} != 0" if value.kind == "bool" else text
        if back is not None:
            return self._loaded(back, value, side)
        if staging.is_kept(value, time):
            return self._kept(value, side)
        if is_cut(value):
            return self._total(value, side)
        if value.op == "array":
            return self._loaded(value.note, value, side)
        return self._computed(value, side)

    def _computed(self, value: Traced, side: str) -> str:
        if value.op == "size":
            return " * ".join(("one", *map(_whole, value.note)))
        if value.op == "place":
            return "h.to(tl.float32)"
        if value.op == "div" and span(value) == FULL and not value.args[1].space:
            return f"{self.of(value.args[0], side)} * {self._reciprocal(value.args[1], side)}"
        if value.op in ("narrow", "rounded"):
            return self._narrowed(value, side)
        args = [self.of(arg, side) for arg in value.args]
        if value.op in ("sum", "max"):
            return f"tl.{value.op}(tl.where(in_h, {args[0]}, 0.0), 0)"
        if value.op == "power":
            return f"tl.div_rn(one, tl.sqrt_rn({args[0]}))"
        return FORMULA[value.op](*args)

    def _narrowed(self, value: Traced, side: str) -> str:
        """Writes what is rounded to another dtype.

        Quotients and roots of bfloat16 numbers that are rounded to bfloat16 needn't be right to the last bit of
        float32: none is nearer than 2**-19 to the middle of two neighbours, and the short forms are off by 2**-22.
        """
        source = value.args[0]
        if is_rounded(source, value.note):
            return self.of(source, side)
        is_short = value.note == "bfloat16" and span(source) == FULL and source.op in SHORT
        if not is_short or not all(is_rounded(arg, "bfloat16") and arg.space for arg in source.args):
            return _rounded(self.of(source, side), value.note)
        return _rounded(SHORT[source.op](*(self.of(arg, side) for arg in source.args)), value.note)

    def _reciprocal(self, divisor: Traced, side: str) -> str:
        """Returns one over what all elements are divided by; XLA does the same. It is no norm below 1e-23 but 0."""
        name = f"{self.of(divisor, side)}_reciprocal"
        if name not in self.taken:
            self.taken.add(name)
            self._add(f"{name} = tl.div_rn(one, {self.of(divisor, side)})")
        return name

    def _loaded(self, name: str, value: Traced, side: str) -> str:
        place, inside = self._place(value, side), self._inside(value, side)
        options = f", mask={inside}, other=0.0" if inside else ""
        text = f"tl.load({self._pointer(name, place)}{options}).to(tl.float32)"
        if name != "grad":
            return text
        self._add_for(value, f"gradient = {text}", "if SCALED:")
        self._add_for(value, "    gradient = tl.div_rn(gradient, tl.load(scalars))")
        return "gradient"

    def _kept(self, value: Traced, side: str) -> str:
        room, place, inside = self._room("kept", value), self._place(value, side), self._inside(value, side)
        text = f"tl.load({room} + {place}" + (f", mask={inside}, other=0.0)" if inside else ")")
        return f"{text} != 0" if value.kind == "bool" else text

    def _total(self, part: Traced, side: str) -> str:
        """Writes the sum of what the blocks have left."""
        room, number = self._room("part", part), len(self.names)
        join = _joined(part.op)
        total = f"total_{number}"
        count = " * ".join(
            length.replace("n_rt", "sum_rt").replace("n_ct", "sum_ct") for length in _part_room(part)
        )
        if span(part) == SIDE:
            blocks = "sum_ct" if side == "R" else "sum_rt"
            part_text = (
                f"tl.{part.op}(tl.load({room} + j[:, None] * W_{side} + at[None, :], "
                f"mask=(j < {blocks})[:, None] & inside_{side}[None, :], other=0.0), 0)"
            )
            self._add(f"{total} = tl.zeros([BV], tl.float32)", f"for start in range(0, {blocks}, 32):")
            self._add("    j = start + tl.arange(0, 32)", f"    {total} = {join.format(total, part_text)}")
            return total
        self._add(
            f"{total} = tl.zeros([1024], tl.float32)",
            f"count = {count}",
            "for start in range(0, count, 1024):",
        )
        self._add("    j = start + tl.arange(0, 1024)")
        self._add(f"    {total} = " + join.format(total, f"tl.load({room} + j, mask=j < count, other=0.0)"))
        return f"tl.{part.op}({total}, 0)"

    def _place(self, value: Traced, side: str) -> str:
        if span(value) == FULL or side:
            return "at" if value.space else "0"
        return {frozenset("R"): "r", frozenset("C"): "c", frozenset("H"): "h"}.get(value.space, "0")

    def _inside(self, value: Traced, side: str) -> str:
        if span(value) == FULL:
            return "inside"
        if side:
            return f"inside_{side}" if value.space else ""
        return {frozenset("R"): "in_r", frozenset("C"): "in_c", frozenset("H"): "in_h"}.get(value.space, "")

    def _pointer(self, name: str, place: str) -> str:
        """Returns where a part of an array lies: blocks begin at multiples of 16 bytes, if ALIGNED."""
        if name not in self.taken:
            self.taken.add(name)
            number, dtype = list(self.whole.arrays).index(name), self.whole.arrays[name].dtype
            self._add(
                f"to_{name} = tl.load(pointers + {number} * items + item).to(tl.pointer_type(tl.{dtype}))"
            )
            if span(self.whole.arrays[name]) == FULL:
                hint = (
                    f"({DTYPES[self.whole.arrays[name].dtype].itemsize}, 16)" if self.whole.matrix else "16"
                )
                self._add_to_tile(f"at_{name} = to_{name} + at", "if ALIGNED:")
                self._add_to_tile(f"    at_{name} = tl.multiple_of(at_{name}, {hint})")
        return f"at_{name}" if span(self.whole.arrays[name]) == FULL else f"to_{name} + {place}"

    def _room(self, kind: str, value: Traced) -> str:
        return f"room_{self.whole.place(kind, value)}"

    def _add_for(self, value: Traced, *lines: str) -> None:
        """Adds lines of a value where tiles have different ones, or before them."""
        differs = self.stage.time % 3 == FULL and bool(value.space & frozenset("RN"))
        (self.tile if differs else self.lines).extend(lines)

    def _add(self, *lines: str) -> None:
        self.lines.extend(lines)

    def _add_to_tile(self, *lines: str) -> None:
        self.tile.extend(lines)


def _joined(op: str) -> str:
    return "{} + {}" if op == "sum" else "tl.maximum({}, {})"


NUMBERS: Mapping[str, Callable[..., str]] = {
    **FORMULA,
    "floordiv": lambda a, b: f"{a} // {b}",
    "mod": lambda a, b: f"{a} % {b}",
    "isnan": lambda a: f"{a} != {a}",
}
_TYPES = {"int": "tl.int64", "bool": "tl.int1", "float64": "tl.float64", "float32": "tl.float32"}


def _numbers(scalars: Mapping[Traced, int], constants: dict[float, int]) -> str:
    """Writes the kernel that computes what all tensors share from count and rate."""
    names: dict[Traced, str] = {}
    lines = [
        "step = tl.full((), 0, tl.int64) + updates",
        "if COUNTED:",
        "    step += tl.load(counted)",
        "rate = tl.full((), 0.0, tl.float64) + high + low",
        "if RATED:",
        "    rate = tl.load(rate_at).to(tl.float64)",
        "common = tl.full((), 1.0, tl.float32)",
        "if COMMON:",
        "    common = tl.load(common_at).to(tl.float32)",
        "if SCALED:",
        "    tl.store(scalars, tl.load(scale_at).to(tl.float32))",
        "    tl.store(scalars + 1, (tl.load(found_at) == 0).to(tl.float32))",
    ]

    def of(value: Traced) -> str:
        if value not in names:
            text = made(value)
            names[value] = f"x{len(names)}"
            lines.append(f"{names[value]} = ({text}).to({_TYPES[value.kind]})")
        return names[value]

    def made(value: Traced) -> str:
        if value.op == "input":
            return str(value.note)
        if value.op == "number":
            return f"tl.load(constants + {constants.setdefault(float(value.note), len(constants))})"
        args = [of(arg) for arg in value.args]
        wide = [f"{arg}.to(tl.float64)" for arg in args]
        if value.op == "power":
            exponent = constants.setdefault(value.note, len(constants))
            return f"tl.exp(tl.load(constants + {exponent}) * tl.log({wide[0]}))"
        if value.op in ("exponential", "one_minus_power"):
            power = f"tl.exp({wide[1]} * tl.log({wide[0]}))"
            return power if value.op == "exponential" else f"1.0 - {power}"
        return _number(value, args, wide)

    for value, place in scalars.items():
        if value.op != "number":
            lines.append(f"tl.store(scalars + {place}, {of(value)}.to(tl.float32))")
    head = (
        "@triton.jit(do_not_specialize=['updates', 'high', 'low'])\n"
        "def numbers(scalars, constants, updates, counted, high, low, rate_at, common_at, scale_at, found_at, "
        "COUNTED: tl.constexpr, RATED: tl.constexpr, COMMON: tl.constexpr, SCALED: tl.constexpr):"
    )
    return "\n".join([head, *("    " + line for line in lines)])


def _number(value: Traced, args: list[str], wide: list[str]) -> str:
    """Returns what an operation makes of numbers; `wide` are the same in float64."""
    if value.op in ("narrow", "rounded"):
        return _rounded(args[0], value.note)
    if value.op in ("div", "sqrt") and value.kind == "float64":
        return f"{wide[0]} / {wide[1]}" if value.op == "div" else f"tl.sqrt({wide[0]})"
    if value.op in ("add", "sub", "mul", "div", "maximum", "minimum"):
        args = [f"{arg}.to({_TYPES[value.kind]})" for arg in args]
    elif value.op in ("gt", "lt", "ge", "le", "eq"):
        args = wide
    elif value.op == "where":
        args = [args[0], *(f"{arg}.to({_TYPES[value.kind]})" for arg in args[1:])]
    return args[0] if value.op == "float32" else NUMBERS[value.op](*args)


def _rounded(x: str, dtype: str) -> str:
    if dtype == "float32":
        return x
    return f"rounded_to_bfloat16({x})" if dtype == "bfloat16" else f"{x}.to(tl.{dtype}).to(tl.float32)"


def is_interpreted() -> bool:
    """Tells whether Triton's interpreter runs kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _rounding() -> str:
    """Returns how numbers are rounded to bfloat16 where kernels run."""
    if is_interpreted():
        return BY_BITS
    # The instruction that converts two at once came with compute capability 8.0.
    has_pairs = bool(torch.version.cuda) and torch.cuda.get_device_capability() >= (8, 0)
    return PACKED if has_pairs else NATIVE


def program(staging: Staging, arrays: Mapping[str, Traced], lengths: Mapping[str, int]) -> Program:
    """Returns an update as source.

    Args:
        staging: Its stages.
        arrays: What a tensor has, by name: `param`, `grad` and slots.
        lengths: How long axes are; only that of H is written down.
    """
    return _Writer(staging, arrays, lengths).program()
