"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, orthogonalized.

One matrix p of A outputs and B inputs with gradient g, learning rate a, momentum b and weight decay w:

    p = p (1 - a w)                                       (Optax: w p joins the direction)
    m = b m + (1 - b) g                                   (Moonlight, Keras: m = b m + g)
    u = g + b (m - g)                                     (with nesterov; else u = m)
    p = p - a s O(u)                                      (O: Newton-Schulz; s from the shape: sqrt(max(1, A/B)), ...)

What moves the parameters that aren't Muon's is another optimizer with groups of its own, `adamw` mostly, also where the
original has both in one class.

Source: Jordan et al. 2024; the forms are those of `schemas/muon.json`, which names each original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.errors import UnknownRuleError
from statekit.optim import adam_family
from statekit.optim.adam_family import MomentSetting
from statekit.optim.adam_moments import FIRST, decay, slots_like
from statekit.optim.adamw import DECAYED_FIRST
from statekit.optim.gradient_clipping import clipped
from statekit.optim.newton_schulz import WITHIN, NewtonSchulz, rows_of
from statekit.optim.steps import Arrays, Scene, Slots, no_group_slots, promoting, stored, sum_of
from statekit.state.constants import MuonConstants, variant_constants
from statekit.state.factoring import matrix_rule
from statekit.state.hyperparameters import (
    Exclusion,
    require_float32,
    require_slots,
    require_whole_updates,
    settled,
)
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import Shape


@dataclass(frozen=True)
class MuonHyperparameters:
    """What a group's update needs, in canonical names. `schemas/muon.json` explains each."""

    momentum: float
    nesterov: bool
    ns_coefficients: Any
    ns_steps: int
    ns_precision: str
    epsilon: float
    shape_scale: str
    scale_factor: float
    weight_decay_rate: float | None
    weight_decay_method: str
    exclude_from_weight_decay: Exclusion
    dtype_momentum: str | None
    adaptive: bool
    preconditioning: str
    use_ema: bool
    ema_momentum: float | None
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None


@dataclass(frozen=True)
class MuonConfig:
    """The configuration of a parameter's update: hyperparameters, and its axes if its shape doesn't tell them."""

    hyper: MuonHyperparameters
    axes: tuple[Axis, ...] | None = None


Setting: TypeAlias = MomentSetting[MuonConstants, MuonHyperparameters]


@dataclass(frozen=True)
class Sides:
    """The axes of a parameter: outputs and inputs of its matrices, and the axes of a batch of them."""

    batch: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """Returns A and B: how many outputs and inputs a matrix has."""
        return math.prod(shape[i] for i in self.outputs), math.prod(shape[i] for i in self.inputs)

    def matrices(self, xp: Backend, value: Value, orientation: str) -> Value:
        """Returns a value as matrices (batch, A, B), or (batch, B, A) where outputs are second."""
        shape, (first, second) = xp.shape(value), self._ordered(orientation)
        sizes = [math.prod(shape[i] for i in axes) for axes in (self.batch, first, second)]
        return xp.reshaped(xp.permuted(value, (*self.batch, *first, *second)), tuple(sizes))

    def restored(self, xp: Backend, matrices: Value, shape: Shape, orientation: str) -> Value:
        """Returns a value of a parameter's shape from its matrices."""
        first, second = self._ordered(orientation)
        order = (*self.batch, *first, *second)
        back = tuple(order.index(i) for i in range(len(order)))
        return xp.permuted(xp.reshaped(matrices, tuple(shape[i] for i in order)), back)

    def _ordered(self, orientation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.outputs, self.inputs) if orientation == "first" else (self.inputs, self.outputs)


def sides_of(form: MuonConstants, rank: int, axes: tuple[Axis, ...] | None = None) -> Sides:
    """Returns which axes of a parameter make the matrix that Muon sees.

    Args:
        form: The variant's constants.
        rank: How many axes the parameter has, at least two.
        axes: What each is, where somebody knows: ROW of outputs, COLUMN of inputs, BATCH.
    """
    usual = matrix_rule(form, rank)
    if axes is None and usual is not None:
        axes = usual.axes
    of = {label: tuple(i for i, axis in enumerate(axes or ()) if axis is label) for label in Axis}
    return Sides(of[Axis.BATCH], of[Axis.ROW], of[Axis.COLUMN])


SHAPE_SCALES: Mapping[str, Callable[[int, int], float]] = {
    "original": lambda a, b: math.sqrt(max(1.0, a / b)),
    "match_rms": lambda a, b: math.sqrt(max(a, b)),
    "unit_rms": lambda a, b: math.sqrt(a / b),
    "none": lambda a, b: 1.0,
}
"""From outputs and inputs, by `shape_scale`."""


def shape_scale(
    form: MuonConstants, hyper: MuonHyperparameters, shape: Shape, sides: Sides
) -> tuple[float, float]:
    """Returns what the update of a parameter is scaled by: from its shape, and as an option says."""
    is_filter = form["scale_axes"] == "last_two" and len(shape) == 4
    sizes = shape[-2:] if is_filter else sides.sizes(shape)
    return SHAPE_SCALES[hyper.shape_scale](*sizes), hyper.scale_factor


def newton_schulz(form: MuonConstants, hyper: MuonHyperparameters, dtype: str) -> NewtonSchulz:
    """Returns how a variant orthogonalizes a matrix of a parameter's dtype."""
    runs_in = {"parameter": dtype, "option": hyper.ns_precision}.get(
        str(form["ns_dtype"]), str(form["ns_dtype"])
    )
    rows = rows_of(hyper.ns_coefficients, hyper.ns_steps, form["coefficient_table"])
    fused, added = form["ns_rounding"] == "addmm", form["norm_epsilon"] == "added"
    return NewtonSchulz(rows, hyper.epsilon, runs_in, fused, added, form["ns_cast"] == "after_norm")


def _decayed_sum(s: Setting, m: Value, g: Value) -> Value:
    return s.returned(s.returned(m * s.xp.constant(s.hyper.momentum)) + g)


def _difference_sum(s: Setting, m: Value, g: Value) -> Value:
    return m + (g + m * s.xp.constant(s.hyper.momentum - 1.0))


def _blended(kind: str, s: Setting, m: Value, g: Value) -> Value:
    return s.returned(FIRST[kind](s.xp, m, g, decay(s.xp, s.hyper.momentum)))


MOMENTUM: Mapping[str, Callable[[Setting, Value, Value], Value]] = {
    "lerp": partial(_blended, "lerp"),
    "weighted_sum": partial(_blended, "weighted_sum"),
    "decayed_sum": _decayed_sum,
    "difference_sum": _difference_sum,
}
"""The buffer after an update with gradient g."""


def _ahead(s: Setting, m: Value, g: Value) -> Value:
    b = s.hyper.momentum
    later, now = s.corrected(m, s.correction(b, 2)), s.corrected(g, s.correction(b))
    return s.xp.constant(b) * later + s.xp.constant(1.0 - b) * now


NESTEROV: Mapping[str, Callable[[Setting, Value, Value], Value]] = {
    "lerp": lambda s, m, g: s.returned(s.xp.lerp(g, m, s.xp.widen(s.xp.constant(s.hyper.momentum)))),
    "sum": lambda s, m, g: s.returned(g + s.xp.constant(s.hyper.momentum) * m),
    "weighted_sum": _ahead,
}
"""What is orthogonalized, with nesterov."""


def _on_rate(s: Setting, p: Value, o: Value, scale: tuple[float, float], w: float | None) -> Value:
    return s.stepped(p, s.rate * (scale[1] * scale[0]), o)


def _on_low_update(s: Setting, p: Value, o: Value, scale: tuple[float, float], w: float | None) -> Value:
    return s.stepped(p, s.rate, s.xp.rounded(o * s.xp.constant(scale[0]), "bfloat16"))


def _on_update(s: Setting, p: Value, o: Value, scale: tuple[float, float], w: float | None) -> Value:
    direction = s.xp.constant(scale[1]) * (s.xp.constant(scale[0]) * o)
    if w is not None and s.form["weight_decay_expression"] == "in_update":
        direction = direction + s.xp.constant(w) * p
    return s.stepped(p, s.xp.cast(s.rate, s.xp.dtype(direction)), direction)


def _on_step(s: Setting, p: Value, o: Value, scale: tuple[float, float], w: float | None) -> Value:
    return p - ((s.rate * o) * s.xp.constant(scale[0])) * s.xp.constant(scale[1])


MOVED: Mapping[str, Callable[[Setting, Value, Value, tuple[float, float], float | None], Value]] = {
    "rate": _on_rate,
    "low_update": _on_low_update,
    "update": _on_update,
    "step": _on_step,
}
"""The parameter after an update, by where the shape scale acts."""


def slot_names(hyper: MuonHyperparameters) -> tuple[str, ...]:
    """Returns the slots that a parameter has."""
    return ("m", "average") if hyper.use_ema else ("m",)


def settle(group: Group, path: str, rule: Rule | None, variant: str) -> MuonConfig:
    """Returns the configuration of a parameter's update; its weight decay is None if the parameter is excluded."""
    hyper = adam_family.settle("muon", MuonHyperparameters, group, path, variant)
    hashable = tuple(tuple(row) if isinstance(row, list | tuple) else row for row in hyper.ns_coefficients)
    return MuonConfig(replace(hyper, ns_coefficients=hashable), None if rule is None else rule.axes)


def init(xp: Backend, param: Value, config: MuonConfig, variant: str) -> dict[str, Value]:
    """Returns the slots of a parameter before its first update: zeros."""
    dtype, by_option = xp.dtype(param), variant_constants("muon", variant)["first_moment_dtype"]
    first = config.hyper.dtype_momentum if by_option == "dtype_momentum" else None
    dtypes = {"m": first or dtype, "average": dtype}
    return slots_like(xp, param, {name: dtypes[name] for name in slot_names(config.hyper)})


begin = no_group_slots


def prepare(
    scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Returns the gradients, clipped by what limits those of a group together."""
    return clipped("muon", scene, group, grads), shared, None


def update(
    scene: Scene, param: Value, grad: Value, slots: Arrays, config: MuonConfig, common: None
) -> tuple[Value, dict[str, Value]]:
    """Returns a parameter and its slots after one update, as `statekit.optim.steps.Steps.update`."""
    constants = variant_constants("muon", scene.variant, scene.execution)
    grad = sum_of(grad)
    scene = promoting(scene, constants["compute_dtype"], [param, grad, *slots.values()])
    s: Setting = MomentSetting.of(scene, constants, config.hyper, scene.xp.dtype(param))
    xp, hyper, shape = s.xp, s.hyper, scene.xp.shape(param)
    p, g = xp.widen(param), xp.widen(grad)
    w = hyper.weight_decay_rate
    if w is not None:
        p = DECAYED_FIRST[s.form["weight_decay_expression"]](s, p, w)
    m = MOMENTUM[s.form["momentum_update"]](s, xp.widen(slots["m"]), g)
    u = NESTEROV[s.form["nesterov_form"]](s, m, g) if hyper.nesterov else m
    sides = sides_of(constants, len(shape), config.axes)
    orthogonal = newton_schulz(constants, hyper, xp.dtype(param))
    turned = constants["orientation"]

    def orthogonalized(within: Backend, matrix: Value) -> Value:
        return sides.restored(
            within, orthogonal(within, sides.matrices(within, matrix, turned)), shape, turned
        )

    o = xp.emulated(orthogonalized, u, WITHIN.get(orthogonal.dtype, WITHIN["float32"]))
    if hyper.adaptive:
        o = xp.sum(u * o) * o
    p = MOVED[s.form["scale_place"]](s, p, o, shape_scale(constants, hyper, shape, sides), w)
    return xp.narrow(p, xp.dtype(param)), stored(xp, {"m": m}, slots)


def check(state: TrainState, group: Group) -> None:
    """Raises UnknownRuleError where the step can't go on as the original would."""
    variant = str(state.optimizer.variant)
    form, hyper = variant_constants("muon", variant), settled(MuonHyperparameters, "muon", variant, group)
    for path in group.paths:
        low = form["compute_dtype"] == "each_operation" and state.params[path].dtype.name == "bfloat16"
        if not low or (variant_constants("muon", variant)["ns_cast"] == "before_norm" and not hyper.nesterov):
            # Without nesterov PyTorch's text divides a bfloat16 buffer itself by its norm.
            require_float32(state, path)
        require_slots(state, path, slot_names(hyper))
        _require_matrix(state, path, form)
    other = {
        "weight_decay_method": (hyper.weight_decay_method, "decoupled"),
        "preconditioning": (hyper.preconditioning, "frobenius"),
    }
    for name, (value, followed) in other.items():
        if value != followed:
            raise UnknownRuleError(
                "The step doesn't follow this option of Muon.", expected=f"{name} {followed}", found=value
            )
    require_whole_updates(hyper.gradient_accumulation_steps)


def _require_matrix(state: TrainState, path: str, form: MuonConstants) -> None:
    """Raises UnknownRuleError if a parameter is no matrix for a variant, or nobody knows which axes make one."""
    rank, rule = len(state.params[path].shape), state.rules.get(path)
    ranks = {"filters": (2, 3, 4), "by_rule": (2,)}.get(form["rank_above_two"], (2,))
    sides = None if rule is None else [set(rule.dims(side)) for side in (Axis.ROW, Axis.COLUMN, Axis.NONE)]
    no_matrix = rank not in ranks if sides is None else not (sides[0] and sides[1]) or bool(sides[2])
    if no_matrix:
        by_rule = form["rank_above_two"] == "by_rule" and rank > 2
        raise UnknownRuleError(
            "Nothing tells which axes of a parameter are Muon's matrix."
            if by_rule
            else "A parameter is no matrix.",
            place=path,
            expected=f"{' or '.join(map(str, ranks))} axes",
            found=rank,
            remedy="name them: ROW of outputs, COLUMN of inputs, BATCH: --factor-map" if by_rule else "",
        )
