"""The weights of a schedule-free run as the live optimizer has them: averages, or the points where it takes gradients.

`eval()` of such an optimizer puts averages where the weights are, and `train()` puts the points back; the state says in
which mode it was saved. Input: what checkpoint and live run hold; output: the checkpoint's side in the live mode.
Source: facebookresearch/schedule_free schedulefree/adamw_schedulefree.py, `eval` and `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from statekit.conversion.contracts import Contents
from statekit.tensors.tensor import Tensor, float_info, in_memory, parts_of, whole

MODE = "train_mode"
"""The option that says whether the weights are those that gradients are taken at."""
_SLACK = 8.0
"""Rounding of one interpolation, in units in the last place of its largest term."""


def in_live_mode(right: Contents, live: Contents) -> tuple[Contents, list[str]]:
    """Returns a checkpoint's contents in the live optimizer's mode, and a note if that changed them.

    A weight that the live run has within rounding stands for the checkpoint's.
    """
    params, options = {**right.params}, {**right.options}
    for path, stored in right.options.items():
        mode = live.options.get(path, {}).get(MODE)
        point = right.slots.get(path, {}).get("z")
        decay = _decay(stored)
        if (
            mode is None
            or stored.get(MODE) in (None, mode)
            or point is None
            or not decay
            or path not in params
        ):
            continue
        options[path] = {**stored, MODE: mode}
        share = 1 - decay if mode else 1 - 1 / decay
        if path in live.params and params[path].shape == point.shape == live.params[path].shape:
            is_within = _is_between(params[path], point, share, live.params[path])
            params[path] = live.params[path] if is_within else _between(params[path], point, share)
    if options == dict(right.options):
        return right, []
    averaged = any(stored.get(MODE) is False for stored in right.options.values())
    kinds = ("averages", "points")[:: 1 if averaged else -1]
    note = f"the weights' last bits: {kinds[0]} in the checkpoint, {kinds[1]} live, which were made of them"
    return replace(right, params=params, options=options), [note]


def _decay(options: Mapping[str, Any]) -> float:
    """Returns the share of the average in the point; 0 where nothing says it."""
    betas = options.get("betas")
    decay = betas[0] if isinstance(betas, (list, tuple)) and betas else options.get("momentum")
    return float(decay) if isinstance(decay, (int, float)) else 0.0


def _is_between(first: Tensor, last: Tensor, share: float, live: Tensor) -> bool:
    """Tells whether a tensor lies between two others of its shape, up to rounding."""
    epsilon = float(float_info(live.dtype).eps)
    for index in parts_of(live) or (whole(live.shape),):
        a, b, value = (np.asarray(tensor.read(index), np.float64) for tensor in (first, last, live))
        bound = _SLACK * epsilon * (np.abs(a) + abs(share) * (np.abs(a) + np.abs(b)))
        if not (np.abs(a + share * (b - a) - value) <= bound).all():
            return False
    return True


def _between(first: Tensor, last: Tensor, share: float) -> Tensor:
    a, b = (np.asarray(tensor.read(), np.float64) for tensor in (first, last))
    return in_memory((a + share * (b - a)).astype(first.dtype))
