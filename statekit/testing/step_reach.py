"""How far a NaN in one element of a gradient spreads in the first update: what each optimizer does by law.

- Adafactor: v in that element; v_row and v_col where they average it. A factored parameter, and its m, in all that
  shares a normaliser, i.e. along ROW and COLUMN; an unfactored one in the element. Clipping of the update takes it over
  all that the clipping averages, unless a norm that isn't a number counts as the limit.
- AdamW: slots and parameter in that element.
- LAMB: slots in that element; the parameter as a whole, or in that element where the trust ratio has a fallback for a
  norm that isn't a number.
- LANS: slots and parameter as a whole, because a gradient is divided by its norm; where the GPU's clipping by element
  turns NaN into its limit, nowhere.
- Muon: the buffer in that element; the parameter as a whole, which is orthogonalized.
- ScaledAdam: slots and parameter in that element, and the entry of this update in scale_grads; clipping's factor is 1.

A norm over all gradients takes NaN to everything; skip_nan_updates keeps what would become NaN as it was. An infinity
leaves nothing unbounded or undefined outside of the same reach.

Source: the constants of `schemas/*.json`; recorded in T5X's `skip_nan` and MXNet's `zero_grad_nan`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from statekit.state.constants import variant_constants
from statekit.state.train_state import Axis, TrainState
from statekit.tensors.tensor import Array, Shape
from statekit.verify.stepping import named

Index: TypeAlias = tuple[int, ...]
Region: TypeAlias = tuple[Any, ...]
Regions: TypeAlias = Mapping[str, Region | None]
"""`param` or a slot's name -> the part of it; None: nothing."""


def reach(
    state: TrainState, path: str, index: Index, *, infinite: bool = False
) -> dict[tuple[str, str], Array]:
    """Returns where a NaN goes, as a mask over every tensor of a state.

    Args:
        state: The state before its first update.
        path: The parameter in whose gradient it is.
        index: The element.
        infinite: Whether it is an infinity, which skip_nan_updates doesn't stop.
    """
    schema, hyper = state.optimizer.schema, state.optimizer.groups[0].hyperparameters
    tensors = named(state.params, state.slots, [group.slots for group in state.optimizer.groups])
    masks = {key: np.zeros(tensor.shape, bool) for key, tensor in tensors.items()}
    if hyper.get("skip_nan_updates") and not infinite:
        return masks
    if hyper.get("global_norm_clip_threshold"):
        return {key: ~mask for key, mask in masks.items()}
    for name, region in REACH[schema](state, path, index).items():
        if region is not None and (path, name) in masks:
            masks[path, name][region] = True
    return masks


def _form(state: TrainState) -> Mapping[str, Any]:
    return variant_constants(state.optimizer.schema, str(state.optimizer.variant))


def _freed(index: Index, axes: tuple[int, ...]) -> Region:
    return tuple(slice(None) if axis in axes else place for axis, place in enumerate(index))


def _without(index: Index, axes: tuple[int, ...]) -> Index:
    return tuple(place for axis, place in enumerate(index) if axis not in axes)


def _adafactor(state: TrainState, path: str, index: Index) -> Regions:
    form, rule = _form(state), state.rules[path]
    if form["xla_perturbation"]:
        return dict.fromkeys(("param", "m", "v", "v_row", "v_col"), (...,))
    rows, columns, batch = (rule.dims(axis) for axis in (Axis.ROW, Axis.COLUMN, Axis.BATCH))
    free: tuple[int, ...] = (*rows, *columns)
    clips = state.optimizer.groups[0].hyperparameters["clipping_threshold"] is not None
    if clips and form["nan_norm"] == "spreads":
        fixed = batch if form["clipping_over"] == "non_batch" else ()
        free = tuple(axis for axis in range(len(index)) if axis not in fixed)
    moved = _freed(index, free)
    slots = {"v": index, "v_row": _without(index, columns), "v_col": _without(index, rows)}
    return {**slots, **dict.fromkeys(("param", "m", "average"), moved)}


def _adamw(state: TrainState, path: str, index: Index) -> Regions:
    return dict.fromkeys(("param", "m", "v", "v_max", "average"), index)


def _lamb(state: TrainState, path: str, index: Index) -> Regions:
    moved = (...,) if _form(state)["trust_ratio_fallback"] in ("zero_norm", "undefined") else index
    return {"m": index, "v": index, "param": moved, "average": moved}


def _lans(state: TrainState, path: str, index: Index) -> Regions:
    clipped = state.optimizer.groups[0].hyperparameters.get("clip_gradient") is not None
    stopped = clipped and _form(state)["zero_gradient"] == "nan_unless_clipped"
    return dict.fromkeys(("param", "m", "v", "master"), None if stopped else (...,))


def _muon(state: TrainState, path: str, index: Index) -> Regions:
    return {"m": index, "param": (...,), "average": (...,)}


def _scaled_adam(state: TrainState, path: str, index: Index) -> Regions:
    return {**dict.fromkeys(("param", "delta", "exp_avg_sq"), index), "scale_grads": (0, ...)}


REACH: Mapping[str, Callable[[TrainState, str, Index], Regions]] = {
    "adafactor": _adafactor,
    "adamw": _adamw,
    "lamb": _lamb,
    "lans": _lans,
    "muon": _muon,
    "scaled_adam": _scaled_adam,
}
"""By schema."""


def first_index(shape: Shape) -> Index:
    """Returns the index of an element in the middle of an array that has some."""
    return tuple(size // 2 for size in shape)
