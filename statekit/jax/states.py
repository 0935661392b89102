"""The states of the transformations: NamedTuples whose fields are canonical slots.

    AdafactorState(
        count=int32[],                        updates done
        v_row={"dense": {"kernel": float32[512], "bias": MaskedNode()}},
        v_col={"dense": {"kernel": float32[64], "bias": MaskedNode()}},
        v={"dense": {"kernel": MaskedNode(), "bias": float32[64]}},
        m=..., average=...,                   MaskedNode() everywhere while nothing keeps them
    )

`count` is a 0-d int32 array: the updates done. Each field beside it that belongs to parameters is a tree like `params`,
with the slot of each parameter in its place. Where a parameter has no such slot stands `optax.MaskedNode()`, a node
without leaves: Optax' own word for it. What is there depends on hyperparameters, names and shapes only, so the tree is
the same before and after every update. ScaledAdam's last three fields belong to the group as a whole: arrays, or
`MaskedNode()` without clipping.

Dtypes are those of `schemas/*.json`; without `jax_enable_x64`, float64 is held as float32 and int64 as int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

Slot: TypeAlias = Any
"""A tree like params: an array, or MaskedNode() where a parameter has no such slot."""


class AdafactorState(NamedTuple):
    """Adafactor: second moments in rows and columns or in full, momentum, and Keras' average of the parameters."""

    count: jax.Array
    v_row: Slot
    v_col: Slot
    v: Slot
    m: Slot
    average: Slot


class ScaledAdamState(NamedTuple):
    """ScaledAdam: momentum, second moment, what learns the size of a parameter; and the group's clipping.

    `model_norms` is float32[clipping_update_period], `model_norm_threshold` and `num_clipped` are 0-d.
    """

    count: jax.Array
    delta: Slot
    exp_avg_sq: Slot
    param_rms: Slot
    scale_exp_avg_sq: Slot
    scale_grads: Slot
    model_norms: Any
    model_norm_threshold: Any
    num_clipped: Any


class LansState(NamedTuple):
    """LANS: both moments, and the float32 master of a float16 parameter."""

    count: jax.Array
    m: Slot
    v: Slot
    master: Slot


class LambState(NamedTuple):
    """LAMB: both moments, and Keras' average of the parameters."""

    count: jax.Array
    m: Slot
    v: Slot
    average: Slot


class AdamWState(NamedTuple):
    """AdamW: both moments, amsgrad's largest second moment, and Keras' average of the parameters."""

    count: jax.Array
    m: Slot
    v: Slot
    v_max: Slot
    average: Slot


class MuonState(NamedTuple):
    """Muon: the momentum buffer, and Keras' average of the parameters."""

    count: jax.Array
    m: Slot
    average: Slot


State: TypeAlias = AdafactorState | ScaledAdamState | LansState | LambState | AdamWState | MuonState

STATES: Mapping[str, type[State]] = {
    "adafactor": AdafactorState,
    "scaled_adam": ScaledAdamState,
    "lans": LansState,
    "lamb": LambState,
    "adamw": AdamWState,
    "muon": MuonState,
}
"""By schema."""
