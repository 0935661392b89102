"""The variables of Keras' own optimizers, by their numbers: the step, the rate, averages, then slots.

    0 iteration   1 learning_rate (not with a schedule)   averages of all parameters   a gradient_accumulator of each
    Adam, AdamW, Lamb: m and v of each parameter; then v_max of each
    Adafactor:         r, c and v of each parameter; r and c of vectors are int32 zeros, v of matrices follows

Source: keras-team/keras, keras/src/optimizers/{base_optimizer,adam,lamb,adafactor}.py, `build`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from statekit.errors import StateError
from statekit.tensors.tensor import Shape, Tensor

ITERATION, RATE, AVERAGE, ACCUMULATOR = "iteration", "learning_rate", "average", "gradient_accumulator"
_OWN = {"adamw": ("m", "v"), "lamb": ("m", "v"), "adafactor": ("v_row", "v_col", "v")}


@dataclass(frozen=True)
class Kept:
    """What an optimizer keeps.

    Attributes:
        rate: A variable for the learning rate.
        average: Averages of the parameters.
        accumulate: Gradients of an unfinished accumulation.
        amsgrad: The maximum of v.
    """

    rate: bool
    average: bool = False
    accumulate: bool = False
    amsgrad: bool = False


@dataclass(frozen=True)
class Numbered:
    """An optimizer's variables, told apart.

    Attributes:
        kept: What it keeps.
        shapes: Shape of each parameter.
        iteration: Calls so far.
        rate: The learning rate.
        slots: For each parameter, by canonical name, `gradient_accumulator` among them.
    """

    kept: Kept
    shapes: tuple[Shape, ...]
    iteration: Tensor
    rate: Tensor | None
    slots: tuple[Mapping[str, Tensor], ...]


def places(schema: str, shapes: Sequence[Shape], kept: Kept) -> Iterator[tuple[int | None, str, Shape]]:
    """Yields, for each of an optimizer's variables, its parameter's number, what it is, and its shape."""
    yield None, ITERATION, ()
    if kept.rate:
        yield None, RATE, ()
    if kept.average:
        yield from ((i, AVERAGE, shape) for i, shape in enumerate(shapes))
    if kept.accumulate:
        yield from ((i, ACCUMULATOR, shape) for i, shape in enumerate(shapes))
    for i, shape in enumerate(shapes):
        for slot in _OWN[schema]:
            yield i, slot, slot_shape(slot, shape)
    if kept.amsgrad:
        yield from ((i, "v_max", shape) for i, shape in enumerate(shapes))


def slot_shape(slot: str, shape: Shape) -> Shape:
    """Returns the shape of a slot: Adafactor factors the last two axes of everything that has two."""
    if slot not in ("v_row", "v_col"):
        return shape
    if len(shape) < 2:
        return ()
    return shape[:-1] if slot == "v_row" else (*shape[:-2], shape[-1])


def numbered(
    schema: str, variables: Sequence[Tensor], told: Mapping[str, bool], model: Sequence[Shape] = ()
) -> Numbered:
    """Tells an optimizer's variables apart.

    Args:
        schema: The optimizer.
        variables: In their order.
        told: What is known of what it keeps: `rate`, `average`, `accumulate`, `amsgrad`.
        model: Shapes of all variables that it may move, which decide where its own leave several ways open.

    Raises:
        StateError: They aren't the variables of such an optimizer, or could be several ways.
    """
    options = ("rate", "average", "accumulate", *(("amsgrad",) if schema == "adamw" else ()))
    choices = itertools.product(*((told[o],) if o in told else (True, False) for o in options))
    found = [
        fit
        for choice in choices
        if (fit := _fit(schema, variables, Kept(**dict(zip(options, choice, strict=True))))) is not None
    ]
    if len(found) > 1:
        found = [fit for fit in found if Counter(fit.shapes) == Counter(model)] or found
    if len(found) == 1:
        return found[0]
    raise StateError(
        f"The optimizer's {len(variables)} variables "
        + ("could be several things." if found else f"aren't those of Keras' {schema}."),
        expected="iteration, learning_rate unless there is a schedule, then slots",
        found="; ".join(f"{fit.kept}" for fit in found)
        or f"shapes {[variable.shape for variable in variables][:20]}",
        remedy="give --hparams with use_ema and amsgrad, or read the .keras file" if found else "",
    )


def _fit(schema: str, variables: Sequence[Tensor], kept: Kept) -> Numbered | None:
    before = 1 + kept.rate
    each = len(_OWN[schema]) + kept.average + kept.accumulate + kept.amsgrad
    count, left = divmod(len(variables) - before, each)
    if left or count < 0 or not variables or variables[0].dtype.kind not in "iu":
        return None
    first = before if kept.average or kept.accumulate else None
    step = len(_OWN[schema])
    shapes = tuple(
        variables[before + i if first else before + (i + 1) * step - 1].shape for i in range(count)
    )
    slots: list[dict[str, Tensor]] = [{} for _ in shapes]
    for (i, name, shape), variable in zip(places(schema, shapes, kept), variables, strict=True):
        if variable.shape != shape or (name == RATE and variable.dtype.kind not in "fV"):
            return None
        if i is not None:
            placeholder = name in ("v_row", "v_col") and len(shapes[i]) < 2
            if placeholder != (variable.dtype.kind in "iu"):
                return None
            slots[i] |= {} if placeholder else {name: variable}
    return Numbered(kept, shapes, variables[0], variables[1] if kept.rate else None, tuple(slots))
