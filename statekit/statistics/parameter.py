"""One parameter with its slots: how each looks, and what the optimizer's own rule makes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.errors import NotFoundError, StatekitError, some
from statekit.optim.adafactor import COMPOUNDING
from statekit.optim.run import load, mover
from statekit.state.constants import variant_constants
from statekit.state.options import stored_rate
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.stored_params import MASTER, as_params
from statekit.state.train_state import Group, TrainState
from statekit.statistics.moments import Moments, ParameterStep, moments, own_rate
from statekit.statistics.pictures import OnRead, of_array, picture
from statekit.tensors.stats import measure
from statekit.tensors.tensor import Array, in_memory
from statekit.tensors.tree import to_json

ARRAYS = 16
"""Float64 arrays of a parameter's shape that are held at a time, at most, for what its update does."""
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
GUIDE = 1e-3
"""The update over the parameter that healthy runs have, by a rule of thumb.

Source: Karpathy, CS231n, notes on neural networks 3, "Ratio of weights:updates".
"""
MOST_LISTED = 50
"""Dead rows and columns that are named."""
_SHARED_LIMITS = ("global_norm_clip_threshold", "clipping_scale")
"""What limits a group's gradients together: one parameter's alone don't tell how far."""


def parameter_statistics(
    state: TrainState, path: str, memory: int, on_read: OnRead = lambda size: None
) -> dict[str, Any]:
    """Returns the statistics of one parameter, its slots and its update.

    Args:
        state: The state; its tensors are read.
        path: The parameter.
        memory: Bytes that the figures of its update may take; a parameter for which they don't reach has none.
        on_read: Told the bytes of each block that was read.

    Returns:
        `path`, `schema`, `variant`, `updates`, `group`, `hyperparameters`; `rate`, the learning rate of the next
        update, and `rate_of`, where it is from; `tensors`, by `values` and the slots' names, each as
        `statekit.statistics.pictures.picture`; `figures`, each with `name`, `title`, `formula` and `kind`; `unsaid`,
        which figures aren't there and why, a sentence each.

    Raises:
        NotFoundError: There is no such parameter.
    """
    if path not in state.params:
        raise NotFoundError(
            "There is no such parameter.",
            place=path,
            expected=some(list(state.params)),
            remedy="see `statekit inspect`",
        )
    stored = state
    state = as_params(state)[0]
    part = next(
        (part for part in state.parts() if any(path in g.paths for g in part.optimizer.groups)), state
    )
    group = part.group_of(path)
    slots = stored.slots.get(path, {})
    tensors = {"values": stored.params[path], **slots}
    updates = part.counts.behind.get(path, part.counts.updates)
    notes: list[str] = []
    figures: list[dict[str, Any]] = []
    of_update: dict[str, Any] = {"rate": None, "rate_of": ""}
    count = math.prod(stored.params[path].shape)
    if part.optimizer.schema == WEIGHTS or group is None:
        notes.append("It has no slots: nothing moves it.")
    elif not count:
        notes.append("It has no elements: there is nothing to derive.")
    elif count * 8 * ARRAYS > memory:
        notes.append(
            f"What its update does isn't computed: that takes {count * 8 * ARRAYS} bytes of memory, and {memory} are "
            "allowed; --budget allows more."
        )
    else:
        of_update = _of_update(part, path, group, updates, figures, notes)
    record = {
        "path": path,
        "schema": part.optimizer.schema,
        "variant": part.optimizer.variant,
        "updates": updates if part.counts.says_updates else None,
        "group": next((i for i, g in enumerate(stored.optimizer.groups) if path in g.paths), None),
        **of_update,
        "tensors": {name: picture(tensor, on_read) for name, tensor in tensors.items()},
        "figures": figures,
        "unsaid": notes,
    }
    return dict(to_json(record))


def _of_update(
    part: TrainState, path: str, group: Group, updates: int, figures: list[dict[str, Any]], notes: list[str]
) -> dict[str, Any]:
    """Adds the figures of a parameter's update, and returns its learning rate."""
    schema, variant = part.optimizer.kind(group)
    if variant not in load_schema(schema).stepped:
        notes.append(
            f"statekit knows no rule of {schema}, variant {variant or 'unknown'}: nothing is derived from its slots."
        )
        return {"rate": None, "rate_of": ""}
    rate = stored_rate(group.hyperparameters)
    usable = (
        isinstance(rate, (int, float)) and not isinstance(rate, bool) and math.isfinite(rate) and rate > 0
    )
    slots = {name: np.asarray(t.read(), np.float64) for name, t in part.slots.get(path, {}).items()}
    param = slots.get(MASTER, np.asarray(part.params[path].read(), np.float64))
    place = ParameterStep(
        path, group, part.rules.get(path), str(variant), part.params[path].dtype.name, param, slots, updates,
        float(rate) if usable else None,
    )  # fmt: skip
    rates: dict[str, Any] = {"rate": None, "rate_of": ""}
    try:
        step = own_rate(schema, place)
        rates = {
            "rate": step,
            "rate_of": "the checkpoint" if usable else "the rule" if step is not None else "",
        }
        with np.errstate(all="ignore"):
            seen = moments(schema, place)
            if seen is None:
                notes.append("Nothing is derived from a second moment: there is none, or no update was done.")
                return rates
            figures += _of_moments(place, seen, step)
            figures += _of_expected(part, place, schema, seen, step, notes)
    except StatekitError as error:
        notes.append(f"What its update does isn't known: {error.line}")
    return rates


def _of_moments(place: ParameterStep, seen: Moments, rate: float | None) -> list[dict[str, Any]]:
    figures: list[dict[str, Any]] = []
    per = "" if rate is None else f", learning rate {rate:g}"
    factor = 1.0 if rate is None else rate
    title = "Effective learning rate of its elements" + (
        ", per unit of learning rate" if rate is None else ""
    )
    if {"v_row", "v_col"} <= place.slots.keys():
        figures.append(
            _cells("second_moment", "The second moment, put together again", seen.formula, "v̂", seen.second)
        )
    figures.append(
        {
            "name": "second_moment_size", "title": "Size of past gradients", "kind": "numbers",
            "formula": f"sqrt(mean(v̂)); {seen.formula}",
            "values": {"rms(sqrt(v̂))": float(np.sqrt(np.mean(seen.second)))},
        }
    )  # fmt: skip
    figures.append(
        {
            "name": "effective_rate", "title": title, "kind": "quantiles",
            "formula": f"a / D, {seen.divisor_formula}; {seen.formula}{per}", "unit": "a / D",
            "values": _quantiles(factor / seen.divisor),
        }
    )  # fmt: skip
    if seen.corrections:
        figures.append(
            {
                "name": "corrections", "title": "Corrections for the zero start", "kind": "numbers",
                "formula": f"1 - beta^t, t = {place.updates}", "values": dict(seen.corrections),
            }
        )  # fmt: skip
    if seen.first is not None:
        snr = np.abs(seen.first) / np.sqrt(seen.second)
        figures.append(
            {
                "name": "snr", "title": "Signal over noise of the gradients", "kind": "quantiles",
                "formula": f"|m̂| / sqrt(v̂); {seen.formula}", "unit": "|m̂| / sqrt(v̂)", "values": _quantiles(snr),
            }
        )  # fmt: skip
    if seen.direction is not None:
        figures.append(_trust_ratio(place, seen, seen.direction))
    if "param_rms" in place.slots:
        figures.append(_size(place))
    if place.param.ndim > 1:
        figures.append(_dead(place, seen))
    return figures


def _trust_ratio(place: ParameterStep, seen: Moments, direction: Any) -> dict[str, Any]:
    """Returns the parameter's norm over its direction's."""
    low, high = seen.bounds
    top = bounded = float(np.sqrt(np.sum(place.param**2)))
    bounded = max(bounded, low) if low is not None else bounded
    bounded = min(bounded, high) if high is not None else bounded
    below = float(np.sqrt(np.sum(direction**2)))
    name = seen.direction_formula.partition(" ")[0]
    ratio = bounded / below if bounded > 0 and below > 0 else None
    within = "" if seen.bounds == (None, None) else ", ||p|| within its bounds"
    return {
        "name": "trust_ratio", "title": "Trust ratio", "kind": "numbers",
        "formula": f"||p|| / ||{name}||, {seen.direction_formula}{within}; as the last update left the slots",
        "values": {"||p||": top, f"||{name}||": below, "trust ratio": ratio},
    }  # fmt: skip


def _size(place: ParameterStep) -> dict[str, Any]:
    """Returns what ScaledAdam's slots say of the parameter's size, beside its size now."""
    rms = float(np.sqrt(np.mean(place.param**2)))
    sizes = {"param_rms": float(np.max(place.slots["param_rms"])), "rms(p) now": rms}
    if "scale_exp_avg_sq" in place.slots:
        sizes["sqrt(scale_exp_avg_sq)"] = float(np.sqrt(np.max(place.slots["scale_exp_avg_sq"])))
    return {
        "name": "size", "title": "What it knows of its size", "kind": "numbers",
        "formula": "param_rms: rms(p) when a period ended; scale_exp_avg_sq: mean square of sum(p g)",
        "values": sizes,
    }  # fmt: skip


def _dead(place: ParameterStep, seen: Moments) -> dict[str, Any]:
    """Returns which rows and columns have had no gradient: of a matrix whose columns are the last axis."""
    second = seen.second.reshape(-1, seen.second.shape[-1]) <= seen.floor
    formula = f"every v̂ ≤ {seen.floor:g}"
    if seen.first is not None:
        second = second & (seen.first.reshape(second.shape) == 0)
        formula += " and m = 0"
    found_in = {}
    for name, axis in (("rows", 1), ("columns", 0)):
        (dead,) = np.nonzero(np.all(second, axis=axis))
        found_in[name] = {
            "of": second.shape[1 - axis],
            "count": len(dead),
            "first": dead[:MOST_LISTED].tolist(),
        }
    return {"name": "dead", "title": "Dead rows and columns", "kind": "dead", "formula": formula, **found_in}


def _of_expected(
    part: TrainState, place: ParameterStep, schema: str, seen: Moments, rate: float | None, notes: list[str]
) -> list[dict[str, Any]]:
    """Steps the parameter once by its own rule, with a gradient of zeros and with one as large as its second moment."""
    constants = variant_constants(schema, place.variant)
    if constants.get("lr_source") == COMPOUNDING:
        notes.append(
            "Its update isn't computed: this variant's learning rate depends on the parameters before it."
        )
        return []
    off = {name: None for name in _SHARED_LIMITS if place.group.hyperparameters.get(name)}
    left_out = f", without {some(list(off))}" if off else ""
    group = replace(
        place.group, paths=(place.path,), slots={} if off else place.group.slots,
        hyperparameters={**place.group.hyperparameters, **off}, schema=None, variant=None,
    )  # fmt: skip
    alone = replace(
        part.only([place.path]),
        optimizer=replace(part.optimizer, schema=schema, variant=place.variant, groups=(group,)),
        extra={},
    )
    xp = NumpyBackend()
    move, live = mover(xp, alone), load(xp, alone)
    by_rule = place.rate is None and rate is not None
    used: Any = None if by_rule else (1.0 if rate is None else place.rate)
    per = " per unit of learning rate" if rate is None else f" with learning rate {rate:g}"
    figures = []
    size = float(np.sqrt(np.mean(place.param**2)))
    for name, text, gradient in (
        ("at_zero", "g = 0: what momentum and decay do alone", np.zeros_like(seen.second)),
        ("at_scale", "g = sqrt(v̂): as large as gradients were, all positive", np.sqrt(seen.second)),
    ):
        moved = move(live, {place.path: xp.asarray(gradient.astype(part.params[place.path].dtype))}, (used,))
        slots = moved.slots[place.path]
        after = np.asarray(slots[MASTER] if MASTER in slots else moved.params[place.path], np.float64)
        u = place.param - after
        rms = float(np.sqrt(np.mean(u**2)))
        formula = (
            f"u = p - p', p' of the {place.variant} rule's next update of {schema}{per}{left_out}; {text}"
        )
        if not math.isfinite(rms):
            notes.append(f"An update with {text.partition(':')[0]} isn't finite.")
            continue
        binned = measure(in_memory(np.abs(u / np.where(place.param == 0, np.nan, place.param)))).magnitudes()
        figures.append(
            {
                "name": f"update_{name}", "title": f"Update over parameter, {text.partition(':')[0]}",
                "kind": "magnitudes", "formula": f"|u| / |p|; {formula}", "binned": binned, "guide": GUIDE,
                "values": {
                    "rms(u)": rms, "rms(u) / rms(p)": rms / size if size else None,
                    "max |u|": float(np.max(np.abs(u))), "elements that stay": int(np.count_nonzero(u == 0)),
                },
            }
        )  # fmt: skip
    return figures


def _quantiles(values: Array) -> list[list[float | None]]:
    good = values[np.isfinite(values)]
    if not good.size:
        return []
    return [[q, float(value)] for q, value in zip(QUANTILES, np.quantile(good, QUANTILES), strict=True)]


def _cells(name: str, title: str, formula: str, unit: str, values: Array) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "kind": "cells",
        "formula": formula,
        "unit": unit,
        **of_array(values),
    }


def at_step(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a parameter that are drawn over a run's steps, as JSON has them."""
    by_name = {figure["name"]: figure for figure in record["figures"]}
    numbers: dict[str, Any] = {}
    for name in ("update_at_zero", "update_at_scale"):
        if name in by_name:
            numbers[name] = by_name[name]["values"]["rms(u) / rms(p)"]
    if "trust_ratio" in by_name:
        numbers["trust_ratio"] = by_name["trust_ratio"]["values"]["trust ratio"]
    if "second_moment_size" in by_name:
        numbers["rms(sqrt(v̂))"] = by_name["second_moment_size"]["values"]["rms(sqrt(v̂))"]
    for name, tensor in record["tensors"].items():
        numbers[f"rms({name})"] = tensor["stats"]["rms"]
    return numbers
