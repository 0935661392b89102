"""Gradients that both sides of a conversion are stepped on: at several scales, adversarial, or from a file.

Each probe is a run of its own from the same state, so that what one of them ruins, as a NaN does, hides nothing else.

Only updates may be sampled; identity, map and rules are of every tensor. Of each kind of parameter (shape, dtype,
factor rule, slots, group) one is taken, drawn with a seed and stated. Of a large one a window is taken: the same rows
and columns of the parameter and of its slots, which is a smaller parameter of the same run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.errors import Faults, NotFoundError, StateError, UsageError
from statekit.files.safetensors import open_safetensors
from statekit.files.source import Files, source_digest
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Array, Index, Shape, Tensor, float_info, in_memory

Grads: TypeAlias = Mapping[str, Array]
Kind: TypeAlias = Literal["random", "adversarial"]
USUAL = "as large as the run's"
"""The probe that shows a fault best: gradients as large as those that made the second moment."""

NOT_A_NUMBER = "a NaN"
"""The probe with one NaN in each gradient: it must go exactly where a side's rule in float64 has it."""


@dataclass(frozen=True)
class Probe:
    """Gradients of a few updates.

    Attributes:
        name: What they are like.
        updates: Of each update, the gradients by path.
        is_extreme: Whether arithmetic overflows, underflows or divides zero by zero on them: there implementations of
            one rule may differ by what the schema calls exceptions.
    """

    name: str
    updates: tuple[Grads, ...]
    is_extreme: bool = False


@dataclass(frozen=True)
class _Form:
    make: Callable[[Array, float, DrawnFor], Array]
    is_extreme: bool = False


@dataclass(frozen=True)
class DrawnFor:
    """What a gradient is drawn for.

    Attributes:
        update: Its number, from 0.
        largest: Largest number of the parameter's dtype.
        smallest: Smallest.
        rng: A generator of its own.
    """

    update: int
    largest: float
    smallest: float
    rng: np.random.Generator


def _one_row(draw: Array, size: float, at: DrawnFor) -> Array:
    if draw.ndim == 0:
        return draw * size
    alone = np.zeros_like(draw)
    row = int(at.rng.integers(draw.shape[0]))
    alone[row] = draw[row] * size
    return alone


def _not_a_number(draw: Array, size: float, at: DrawnFor) -> Array:
    flat = (draw * size).reshape(-1)
    flat[int(at.rng.integers(flat.size))] = np.nan
    return flat.reshape(draw.shape)


FORMS: Mapping[Kind, Mapping[str, _Form]] = {
    "random": {
        USUAL: _Form(lambda draw, size, at: draw * size),
        "a thousandth of it": _Form(lambda draw, size, at: draw * size * 1e-3),
        "a thousand times it": _Form(lambda draw, size, at: draw * size * 1e3),
    },
    "adversarial": {
        "zeros": _Form(lambda draw, size, at: np.zeros_like(draw), True),
        "denormal": _Form(lambda draw, size, at: np.sign(draw) * at.smallest * 64, True),
        "huge": _Form(lambda draw, size, at: draw * min(1e15, at.largest**0.5 / 16), True),
        "one row, else zero": _Form(_one_row, True),
        "signs flip each update": _Form(lambda draw, size, at: np.abs(draw) * size * (-1.0) ** at.update),
        NOT_A_NUMBER: _Form(_not_a_number, True),
    },
}
"""What gradients are like, by kind: made of a normal draw and the size of the run's own gradients."""


def drawn(state: TrainState, kinds: tuple[Kind, ...], updates: int, seed: int) -> Iterator[Probe]:
    """Yields the probes of a state."""
    sizes = {path: _size(state, path) for path in state.params}
    for kind in kinds:
        for name, form in FORMS[kind].items():
            steps = tuple(
                {
                    path: _drawn(form, param, path, sizes[path], i, seed)
                    for path, param in state.params.items()
                }
                for i in range(updates)
            )
            yield Probe(name, steps, form.is_extreme)


def _drawn(form: _Form, param: Tensor, path: str, size: float, update: int, seed: int) -> Array:
    rng = np.random.default_rng([seed, update, zlib.crc32(path.encode())])
    info = float_info(param.dtype)
    draw = np.asarray(rng.standard_normal(param.shape))
    at = DrawnFor(update, float(info.max), float(info.smallest_subnormal), rng)
    with np.errstate(all="ignore"):
        return np.asarray(form.make(draw, size, at)).astype(param.dtype)


def _size(state: TrainState, path: str) -> float:
    """Returns the size of a parameter's gradients by its second moment; 1 without one."""
    group = state.group_of(path)
    if group is None:
        return 1.0
    schema = load_schema(state.optimizer.kind(group)[0])
    for name, slot in state.slots.get(path, {}).items():
        if schema.gradient_power(name, group.hyperparameters) == 2 and slot.shape != ():
            values = slot.read().astype(np.float64)
            mean = float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else 0.0
            if mean > 1e-24:
                return float(np.sqrt(mean))
    return 1.0


@dataclass(frozen=True)
class GradientsFile:
    """An opened file of gradients, whose names, shapes and dtypes fit what is stepped.

    Attributes:
        sets: Of each update, the gradients by parameter.
        is_one_for_all: Whether its one set is of no update by number, and taken for every one.
        digest: BLAKE3 of its bytes, in hexadecimal digits.
        size: Its bytes.
    """

    sets: tuple[Mapping[str, Tensor], ...]
    is_one_for_all: bool
    digest: str
    size: int

    def probe(self, sample: Sample, state: TrainState, updates: int) -> Probe:
        """Returns the gradients of what is stepped, of the first updates."""
        sets = self.sets * updates if self.is_one_for_all else self.sets[:updates]
        return Probe("from the file", tuple(_sampled(grads, sample, state) for grads in sets))

    def to_json(self) -> dict[str, Any]:
        """Returns what a certificate says of it."""
        return {"digest": self.digest, "bytes": self.size, "sets": len(self.sets)}


@contextmanager
def gradients_of(
    path: Path, state: TrainState, sample: Sample, updates: int, budget: Budget | None = None
) -> Iterator[GradientsFile]:
    """Opens a file of gradients by `<update>/<parameter>`, as recordings have it, or by `<parameter>`.

    It is one of safetensors, or of torch.save.

    Args:
        path: The file.
        state: Whose parameters it has gradients of, all of them.
        sample: Which of them move: these need one.
        updates: How many are made.
        budget: The job's; a new one if None.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It isn't one.
        StateError: It lacks a parameter's or an update's, has one too many, or one of another shape or dtype.
    """
    if not path.is_file():
        raise NotFoundError(
            "The file of gradients does not exist.",
            place=path,
            expected="all, random, adversarial or a file",
            remedy="check --gradients",
        )
    with closing(Files(budget)) as files, _tensors(path, files, budget) as tensors:
        source = files.source(path)
        is_one = {*tensors} <= {*state.params} or not any(_update_of(name) for name in tensors)
        sets: dict[str, dict[str, Tensor]] = {"": {}} if is_one else {}
        for name, tensor in tensors.items():
            number = "" if is_one else _update_of(name)
            sets.setdefault(number, {})[name.removeprefix(f"{number}/")] = tensor
        Faults(_faults(sets, state, sample)).check(
            StateError,
            "The gradients don't fit the target's parameters",
            place=path,
            expected="<parameter>, or <update>/<parameter> in every update, for each parameter that moves",
            remedy="name them as the target does: statekit inspect lists its parameters",
        )
        if not is_one and len(sets) < updates:
            raise StateError(
                "The file has gradients of fewer updates than are made.",
                place=path,
                expected=updates,
                found=len(sets),
                remedy=f"ask for --steps {len(sets)}, or name one set without numbers, to be taken for each update",
            )
        ordered = tuple(sets[number] for number in sorted(sets, key=lambda number: int(number or 0)))
        yield GradientsFile(ordered, is_one, source_digest(source), source.size)


@contextmanager
def _tensors(path: Path, files: Files, budget: Budget | None) -> Iterator[Mapping[str, Tensor]]:
    """Opens what a file has by name."""
    if path.suffix == ".safetensors":
        yield open_safetensors(path, files).tensors
        return
    with registry.opened(registry.container("torch"), path, None, NO_HINTS, budget) as checkpoint:
        yield checkpoint.tensors


def _update_of(name: str) -> str:
    """Returns the number that a gradient's name begins with; empty if it doesn't."""
    number, _, parameter = name.partition("/")
    return number if parameter and number.isascii() and number.isdecimal() else ""


def _faults(
    sets: Mapping[str, Mapping[str, Tensor]], state: TrainState, sample: Sample
) -> Iterator[tuple[str, str]]:
    """Yields what of a file doesn't fit, and the name in it."""
    for number, grads in sets.items():
        start = f"{number}/" if number else ""
        if not number and len(sets) > 1:
            yield from (("has no number of an update, as others in the file have", path) for path in grads)
            continue
        for path in (*sample.paths, *sample.stands_for):
            if path not in grads:
                yield "is missing", f"{start}{path}"
        for path, grad in grads.items():
            if path not in state.params:
                yield "is of no parameter of the target", f"{start}{path}"
            elif grad.shape != state.params[path].shape:
                yield f"has shape {grad.shape}, expected {state.params[path].shape}", f"{start}{path}"
            elif "float" not in grad.dtype.name:
                yield f"has dtype {grad.dtype.name}, expected floating point", f"{start}{path}"


def _sampled(grads: Mapping[str, Tensor], sample: Sample, state: TrainState) -> Grads:
    parts = {}
    for path in sample.paths:
        window = sample.windows.get(path)
        part = grads[path].read(None if window is None else tuple(slice(*ends) for ends in window))
        parts[path] = part.astype(DTYPES[state.params[path].dtype.name])
    return parts


WINDOW = 2**14
"""Elements of a parameter that are stepped of a large one."""


@dataclass(frozen=True)
class Sample:
    """What is stepped.

    Attributes:
        paths: The parameters, in the state's order.
        windows: Of those of which a part is stepped, which: `[(start, stop), ...]` for each axis.
        stands_for: Parameter -> the one that is stepped in its place, of the same kind.
        seed: What it was drawn with.
    """

    paths: tuple[str, ...]
    windows: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    stands_for: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def of(self, state: TrainState) -> TrainState:
        """Returns a state of what is stepped, in memory; slots of a group as a whole stay."""
        some = state.only(self.paths)
        cut = {path: tuple(slice(*ends) for ends in window) for path, window in self.windows.items()}
        groups = tuple(
            replace(group, slots={name: in_memory(slot.read(), name) for name, slot in group.slots.items()})
            for group in some.optimizer.groups
        )
        return replace(
            some,
            params={path: _part(tensor, cut.get(path)) for path, tensor in some.params.items()},
            slots={
                path: _of_one_mean(slots) if path in cut else slots
                for path, slots in _cut_slots(some, cut).items()
            },
            optimizer=replace(some.optimizer, groups=groups),
            extra={},
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the sample as plain data."""
        return {
            "seed": self.seed,
            "stepped": list(self.paths),
            "windows": {path: [list(ends) for ends in window] for path, window in self.windows.items()},
            "stands_for": dict(self.stands_for),
        }


def _cut_slots(state: TrainState, cut: Mapping[str, Index]) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of what is stepped, in memory: of some parameters a part."""
    return {
        path: {
            name: _part(slot, _index_of_slot(state, path, name, cut.get(path)))
            for name, slot in slots.items()
        }
        for path, slots in state.slots.items()
    }


def _of_one_mean(slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the slots of a part of a matrix with one mean, as rows and columns of a whole matrix have it.

    Rules divide by the mean of one or the other, which are the same number: of a part they would be two rules.
    """
    factors = {name: slots[name].read() for name in ("v_row", "v_col") if name in slots}
    means = {name: float(np.mean(values.astype(np.float64))) for name, values in factors.items()}
    both = math.sqrt(math.prod(means.values())) if min(means.values(), default=0) > 0 else 0.0
    if len(factors) < 2 or not 0 < both < math.inf or any(values.ndim != 1 for values in factors.values()):
        return dict(slots)
    scaled = {
        name: in_memory((values.astype(np.float64) * (both / means[name])).astype(values.dtype), name)
        for name, values in factors.items()
    }
    return {**slots, **scaled}


def sampled(state: TrainState, seed: int = 0, everything: bool = False) -> Sample:
    """Draws what is stepped of a state.

    Args:
        state: The state.
        seed: Of the draw.
        everything: Whether to take every element of every parameter.

    Raises:
        UsageError: The seed is below 0.
    """
    if seed < 0:
        raise UsageError("A seed is a number from 0.", place="--seed", found=seed)
    moved = state.optimizer.group_numbers
    paths = [path for path in state.params if path in moved and 0 not in state.params[path].shape]
    if everything:
        return Sample(tuple(paths), seed=seed)
    kinds: dict[Any, list[str]] = {}
    for path in paths:
        kinds.setdefault(_kind(state, path, moved[path]), []).append(path)
    rng = np.random.default_rng(seed)
    drawn = {same[int(rng.integers(len(same)))]: same for same in kinds.values()}
    order = tuple(path for path in paths if path in drawn)
    windows = {
        path: window for path in order if (window := _window(state.params[path].shape, rng)) is not None
    }
    stands = {other: path for path, same in drawn.items() for other in same if other != path}
    return Sample(order, windows, stands, seed)


def _kind(state: TrainState, path: str, group: int) -> Any:
    rule, param = state.rules.get(path), state.params[path]
    slots = tuple((name, slot.dtype.name) for name, slot in sorted(state.slots.get(path, {}).items()))
    behind = state.counts.behind.get(path)
    return param.shape, param.dtype.name, rule and rule.axes, slots, group, behind


def _window(shape: Shape, rng: np.random.Generator) -> tuple[tuple[int, int], ...] | None:
    """Returns a part of a shape that has few elements; None if it has few anyway."""
    sides = list(shape)
    while math.prod(sides) > WINDOW:
        longest = sides.index(max(sides))
        sides[longest] = 1 << (sides[longest] - 1).bit_length() - 1  # the power of two below
    if sides == list(shape):
        return None
    starts = [int(rng.integers(whole - side + 1)) for whole, side in zip(shape, sides, strict=True)]
    return tuple((start, start + side) for start, side in zip(starts, sides, strict=True))


def _index_of_slot(state: TrainState, path: str, name: str, index: Index | None) -> Index | None:
    """Returns the part of a slot that belongs to a part of its parameter; None where it is of the whole."""
    if index is None:
        return None
    group = state.group_of(path)
    assert group is not None
    kind = load_schema(state.optimizer.kind(group)[0]).slots[name].shape
    if kind == "parameter":
        return index
    if kind in ("row", "column"):
        return tuple(index[i] for i in state.rules[path].kept(name))
    return None


def _part(tensor: Tensor, index: Index | None) -> Tensor:
    return in_memory(np.array(tensor.read(index)), str(tensor.to_json().get("name", "")))
