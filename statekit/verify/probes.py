"""Gradients that both sides of a conversion are stepped on: at several scales, adversarial, or from a file.

Each probe is a run of its own from the same state, so that what one of them ruins, as a NaN does, hides nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from statekit.errors import NotFoundError, StateError
from statekit.files.safetensors import open_safetensors
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Array, Tensor, float_info
from statekit.verify.sampling import Sample

Grads: TypeAlias = Mapping[str, Array]
Kind: TypeAlias = Literal["random", "adversarial"]
USUAL = "as large as the run's"
"""The probe that shows a fault best: gradients as large as those that made the second moment."""


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
        "a NaN": _Form(_not_a_number, True),
    },
}
"""What gradients are like, by kind: made of a normal draw and the size of the run's own gradients."""


def drawn(state: TrainState, kinds: tuple[Kind, ...], updates: int, seed: int) -> Iterator[Probe]:
    """Yields the probes of a state; a NaN is left out where no variant's rule says what becomes of it.

    Args:
        state: What is stepped.
        kinds: Which.
        updates: How many.
        seed: Of the draws.
    """
    sizes = {path: _size(state, path) for path in state.params}
    for kind in kinds:
        for name, form in FORMS[kind].items():
            if name == "a NaN" and not _defines_nan(state):
                continue
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


def _defines_nan(state: TrainState) -> bool:
    """Tells whether a NaN is passed over by the rule, which is all that a rule says of one."""
    return any(group.hyperparameters.get("skip_nan_updates") for group in state.optimizer.groups)


def _size(state: TrainState, path: str) -> float:
    """Returns how large a parameter's gradients were, as its second moment has it; 1 where it has none."""
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


@contextmanager
def gradients_of(path: Path) -> Iterator[Mapping[int, Mapping[str, Tensor]]]:
    """Opens a file of gradients as recordings have it, `<update>/<parameter>` in safetensors.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It isn't one.
    """
    if not path.is_file():
        raise NotFoundError("There is no such file of gradients.", place=path, remedy="check --gradients")
    with closing(open_safetensors(path)) as opened:
        updates: dict[int, dict[str, Tensor]] = {}
        for name, tensor in opened.tensors.items():
            number, _, parameter = name.partition("/")
            if not number.isdigit() or not parameter:
                raise StateError(
                    "A file of gradients names them otherwise.",
                    place=path,
                    expected="<update>/<parameter>",
                    found=name,
                )
            updates.setdefault(int(number), {})[parameter] = tensor
        yield updates


def probe_of(
    updates: Mapping[int, Mapping[str, Tensor]], sample: Sample, state: TrainState, most: int
) -> Probe:
    """Returns the gradients of a file for what is stepped, of its first updates.

    Raises:
        StateError: It lacks a parameter's, or has another shape.
    """
    steps = []
    for number in sorted(updates)[:most]:
        grads = {}
        for path in sample.paths:
            given = updates[number].get(path)
            if given is None:
                continue
            window = sample.windows.get(path)
            part = given.read(None if window is None else tuple(slice(*ends) for ends in window))
            if part.shape != state.params[path].shape:
                raise StateError(
                    "A gradient has another shape than its parameter.",
                    place=f"{number}/{path}",
                    expected=state.params[path].shape,
                    found=part.shape,
                )
            grads[path] = part.astype(DTYPES[state.params[path].dtype.name])
        steps.append(grads)
    if not any(steps):
        raise StateError(
            "The file has no gradient of a parameter of the target.", expected=", ".join(sample.paths[:3])
        )
    return Probe("from the file", tuple(steps))
