"""Clipping of raw gradients, as each system computes it. All take and return gradients in the compute dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.errors import UnknownRuleError
from statekit.optim.steps import LOW_PRECISION, Arrays, Scene, promoting, sum_of
from statekit.state.constants import variant_constants
from statekit.state.hyperparameters import settled
from statekit.state.train_state import Group

Grads: TypeAlias = dict[str, Value]
LIMIT_OF_ALL = "global_norm_clip_threshold"
"""The hyperparameter that is the largest norm of all gradients together."""


@dataclass(frozen=True)
class Limits:
    """What limits gradients. 0 counts as off.

    Attributes:
        global_norm_clip_threshold: Largest norm of all gradients together.
        clipnorm: Largest norm of each gradient.
        clipvalue: Largest absolute value of each element.
        loss_scale_factor: What gradients are divided by first.
    """

    global_norm_clip_threshold: float | None
    clipnorm: float | None
    clipvalue: float | None
    loss_scale_factor: float | None

    @property
    def any(self) -> bool:
        """Whether something is limited or scaled."""
        given = (self.global_norm_clip_threshold, self.clipnorm, self.clipvalue, self.loss_scale_factor)
        return any(limit is not None for limit in given)


def _none(xp: Backend, grads: Grads, limits: Limits, others: Grads | None = None) -> Grads:
    return grads


def _global_norm(xp: Backend, grads: Grads) -> Value:
    return xp.sqrt(xp.sum(*(g * g for g in grads.values())))


def _elements(xp: Backend, grads: Grads, limit: float) -> Grads:
    edge = xp.constant(limit)
    return {path: xp.minimum(xp.maximum(g, -edge), edge) for path, g in grads.items()}


def _keras(xp: Backend, grads: Grads, limits: Limits, others: Grads | None = None) -> Grads:
    """Source: keras-team/keras, keras/src/optimizers/base_optimizer.py, `_clip_gradients`, `clip_by_global_norm`."""
    if limits.loss_scale_factor is not None:
        scale = xp.constant(limits.loss_scale_factor)
        grads = {path: g / scale for path, g in grads.items()}
        others = {path: g / scale for path, g in (others or {}).items()}
    if limits.clipnorm:
        edge = xp.constant(limits.clipnorm)
        return {p: g * edge / xp.maximum(xp.sqrt(xp.sum(g * g)), edge) for p, g in grads.items()}
    if limits.global_norm_clip_threshold:
        edge = xp.constant(limits.global_norm_clip_threshold)
        norm = _global_norm(xp, {**grads, **(others or {})})
        factor = edge * xp.minimum(1.0 / norm, xp.constant(1.0 / limits.global_norm_clip_threshold))
        factor = xp.if_greater(-norm, -math.inf, factor, math.nan)
        return {path: g * factor for path, g in grads.items()}
    return _elements(xp, grads, limits.clipvalue) if limits.clipvalue else grads


def _optax(xp: Backend, grads: Grads, limits: Limits, others: Grads | None = None) -> Grads:
    """Source: google-deepmind/optax, optax/transforms/_clipping.py, `clip`, `clip_by_global_norm`."""
    if limits.clipvalue is not None and limits.global_norm_clip_threshold is not None:
        raise UnknownRuleError(
            "The order of two clipping links is unknown.", expected="clip or clip_by_global_norm"
        )
    if limits.clipvalue is not None:
        return _elements(xp, grads, limits.clipvalue)
    if limits.global_norm_clip_threshold is None:
        return grads
    edge, norm = xp.constant(limits.global_norm_clip_threshold), _global_norm(xp, {**grads, **(others or {})})
    return {
        path: xp.if_greater(-norm, -edge, g, g / xp.cast(norm, xp.dtype(g)) * edge)
        for path, g in grads.items()
    }


def _gpt_neo(xp: Backend, grads: Grads, limits: Limits, others: Grads | None = None) -> Grads:
    """Source: EleutherAI/gpt-neo, optimizers.py, `clip_by_global_norm`; Mesh-TF divides by way of a reciprocal."""
    if limits.global_norm_clip_threshold is None:
        return grads
    edge = xp.constant(limits.global_norm_clip_threshold)
    factor = edge * (1.0 / xp.maximum(_global_norm(xp, {**grads, **(others or {})}), edge))
    return {path: g * factor for path, g in grads.items()}


CLIP: Mapping[str, Callable[..., Grads]] = {
    "none": _none,
    "base_class": _keras,
    "chain": _optax,
    "global_norm": _gpt_neo,
}
"""By `gradient_clipping`."""


def clipped(
    schema: Literal["adafactor", "adamw", "lamb", "muon"], scene: Scene, group: Group, grads: Arrays
) -> Arrays:
    """Returns a group's gradients, clipped by what limits them together, and with those of other groups of the run.

    Raises:
        UnknownRuleError: A limit that the variant offers is unknown.
    """
    constants = variant_constants(schema, scene.variant)
    limits = settled(Limits, schema, scene.variant, group)
    if not limits.any or not grads:  # no norm is taken over nothing
        return grads
    grads = {path: sum_of(grad) for path, grad in grads.items()}
    xp = promoting(scene, constants["compute_dtype"], grads.values()).xp
    wide = {path: xp.widen(grad) for path, grad in grads.items()}
    others = {
        path: xp.widen(sum_of(grad)) for path, grad in (scene.together or {}).items() if path not in wide
    }
    limited = CLIP[constants["gradient_clipping"]](xp, wide, limits, others)
    if constants["compute_dtype"] not in LOW_PRECISION:
        return limited
    return {path: xp.narrow(grad, scene.xp.dtype(grads[path])) for path, grad in limited.items()}
