"""Clipping in ScaledAdam: a group's gradients against a multiple of the median of their own norms.

At count k > 0, with every gradient scaled by the stored param_rms of its parameter:

    n = sqrt(sum (g r)^2),  N[k mod P] = n
    theta = clipping_scale * median(N) where k mod P = 0 (and, in later generations, doubled at k = 10, 20, 40)
    f = min(1, theta / (n + 1e-20))

No threshold yet is held as infinity, which clips nothing. The median is the entry min(n - 1, 2 (n // 4)) of n sorted
norms.

Source: k2-fsa/icefall, egs/librispeech/ASR/zipformer/optim.py, `ScaledAdam._get_clipping_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

from statekit.arrays.backend import Backend, Value
from statekit.optim.scaled_adam_forms import ScaledAdamHyperparameters, ScaledAdamSetting

JOINT = "unused_size_slots"
"""In a state's extra: what the seed generation keeps for a batch of one-element parameters and never uses, by the
batch's first member."""
EARLY: Mapping[str, tuple[int, ...]] = {"none": (), "at_10_20_40": (10, 20, 40)}


def batches(members: Mapping[str, tuple[Hashable, ...]]) -> tuple[tuple[str, ...], ...]:
    """Returns which parameters the originals stack into one tensor, in the order of their batches.

    Args:
        members: Path -> dtype's name and shape, (dtype, *shape), in the order of the group.

    Source: k2-fsa/icefall, zipformer/optim.py, `BatchedOptimizer.batched_params`: keys in the order of Python's tuples.
    """
    paths_of: dict[tuple[Hashable, ...], list[str]] = {}
    for path, key in members.items():
        paths_of.setdefault(key, []).append(path)
    return tuple(tuple(paths_of[key]) for key in sorted(paths_of))


def init(xp: Backend, like: Value, hyper: ScaledAdamHyperparameters) -> dict[str, Value]:
    """Returns the slots of a group as a whole before its first update; none without clipping."""
    if hyper.clipping_scale is None:
        return {}
    return {
        "model_norms": xp.zeros(like, (hyper.clipping_update_period,), "float32"),
        "model_norm_threshold": xp.narrow(xp.zeros(like, (), "float32") + math.inf, "float64"),
        "num_clipped": xp.zeros(like, (), "int64"),
    }


def clip(
    s: ScaledAdamSetting,
    params: Mapping[str, Value],
    grads: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
    shared: Mapping[str, Value],
) -> tuple[dict[str, Value], Value]:
    """Returns the group's slots after one update, and the factor that its gradients are multiplied with.

    Args:
        s: Where the update runs.
        params: The group's parameters, in its order.
        grads: A gradient for each of them.
        slots: Their slots before the update.
        shared: The slots that `init` names.
    """
    xp, step, period = s.xp, s.step, s.hyper.clipping_update_period
    norm = xp.sqrt(_square(s, params, grads, slots))
    old = shared["model_norms"]
    norms = xp.where(step > 0, xp.set_row(old, step % period, xp.narrow(norm, xp.dtype(old))), old)
    due, threshold = _threshold(s, norms, shared["model_norm_threshold"])
    # PyTorch divides a number by a tensor as a product with the tensor's reciprocal.
    ratio = xp.widen(threshold) * (1.0 / (norm + 1e-20))
    factor = xp.if_greater(-ratio, -1.0, ratio, 1.0)  # Python's min(1.0, ratio): 1 for NaN
    if s.form["threshold_used"] == "from_period":
        factor = xp.where(step >= period, factor, xp.widen(1.0))
    clips = xp.if_greater(-factor, -1.0, xp.widen(1.0), 0.0)
    count = xp.where(due, xp.widen(0.0), xp.widen(shared["num_clipped"])) + clips
    after = {"model_norms": norms, "model_norm_threshold": threshold, "num_clipped": count}
    return {name: xp.narrow(value, xp.dtype(shared[name])) for name, value in after.items()}, factor


def reached(s: ScaledAdamSetting, grad: Value, factor: Value) -> Value:
    """Returns what clipping makes of a gradient, widened. A factor of 0 stands for an infinite norm."""
    scaled = s.kept(s.xp.widen(grad) * factor, s.xp.dtype(grad))
    return scaled if s.form["infinite_gradient"] == "spreads" else s.xp.if_greater(factor, 0.0, scaled, 0.0)


def _square(
    s: ScaledAdamSetting,
    params: Mapping[str, Value],
    grads: Mapping[str, Value],
    slots: Mapping[str, Mapping[str, Value]],
) -> Value:
    xp, total = s.xp, None
    for batch in batches({path: (xp.dtype(p), *xp.shape(p)) for path, p in params.items()}):
        g_dtype = xp.dtype(grads[batch[0]])
        if "param_rms" in slots[batch[0]]:
            dtypes = g_dtype, xp.dtype(slots[batch[0]]["param_rms"])
            scaled = [s.kept(xp.widen(grads[p]) * xp.widen(slots[p]["param_rms"]), *dtypes) for p in batch]
            square = s.kept(xp.sum(*(s.kept(x * x, *dtypes) for x in scaled)), *dtypes)
        else:
            alone = [xp.widen(grads[p]) for p in batch]
            square = s.kept(xp.sum(*(s.kept(g * g, g_dtype) for g in alone)), g_dtype)
            if s.form["scalar_norm"] == "scaled":
                square = s.kept(square * s.hyper.scalar_lr_scale**2, g_dtype)
        total = square if total is None else total + square
    return total


def _threshold(s: ScaledAdamSetting, norms: Value, old: Value) -> tuple[Value, Value]:
    """Returns whether the threshold is estimated in this update, and the threshold in its own dtype."""
    xp, step, period = s.xp, s.step, s.hyper.clipping_update_period
    assert s.hyper.clipping_scale is not None
    scale = xp.number(s.hyper.clipping_scale)

    def held(place: int) -> Value:
        return xp.narrow(xp.order_statistic(norms, place), xp.dtype(old))

    due = (step % period == 0) & (step > 0)
    threshold = xp.where(due, scale * held(_median(period)), old)
    for early in EARLY[s.form["early_estimates"]]:
        if early < period:  # over the `early` largest entries: the others are still zero
            estimate = scale * held(period - early + _median(early))
            threshold = xp.where(step == early, estimate * s.form["early_estimate_factor"], threshold)
            due = due | (step == early)
    return due, threshold


def _median(count: int) -> int:
    return min(count - 1, count // 4 * 2)
