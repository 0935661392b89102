"""What AdamW, LAMB and Muon have in common: hyperparameters, where an update runs, what is done for a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

from statekit.arrays.backend import Value
from statekit.arrays.promotion import LOW
from statekit.errors import UnknownRuleError
from statekit.optim.adam_moments import CORRECTION, RATE
from statekit.optim.gradient_clipping import Limits
from statekit.optim.steps import LOW_PRECISION, Scene, Setting, rounds_added, rounds_of
from statekit.state.constants import AdamWConstants, LambConstants, MuonConstants, variant_constants
from statekit.state.hyperparameters import (
    IS_EXCLUDED,
    Exclusion,
    require_float32,
    require_slots,
    require_whole_updates,
    settled,
)
from statekit.state.stored_params import MASTER
from statekit.state.train_state import Group, TrainState

Schema = Literal["adamw", "lamb", "muon"]


class Decayed(Protocol):
    """Hyperparameters of which a weight decay is kept from some parameters."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def weight_decay_rate(self) -> float | None:
        """The weight decay."""

    @property
    def exclude_from_weight_decay(self) -> Exclusion:
        """What has none."""


@dataclass(frozen=True)
class AdamHyperparameters:
    """What a group's update needs, in canonical names. `schemas/lamb.json` and `schemas/adamw.json` explain each."""

    beta1: float
    beta2: float
    epsilon: float
    epsilon_root: float
    weight_decay_rate: float | None
    exclude_from_weight_decay: Exclusion
    use_ema: bool
    ema_momentum: float | None
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None


C = TypeVar("C", AdamWConstants, LambConstants, MuonConstants)
H = TypeVar("H", bound=AdamHyperparameters)
D = TypeVar("D", bound=Decayed)
S = TypeVar("S")


@dataclass(frozen=True)
class MomentSetting(Setting[C, S], Generic[C, S]):
    """Where a group's update runs.

    Attributes:
        rate: Learning rate, as the original holds it.
        step: Updates done so far (int, or 0-d integer array).
        dtype: What every operation of the original rounds its result to.
        fused: Whether an original whose operations round by themselves was compiled.
        rounds_added: Whether a number that is added to arrays is rounded to `dtype` first.
    """

    rate: Value
    step: Value
    dtype: str
    fused: bool = False
    rounds_added: bool = True

    @classmethod
    def of(cls, scene: Scene, form: C, hyper: S, dtype: str = "float32") -> Self:
        """Returns the setting of an update of a parameter, `dtype` its own or its master's."""
        rate = RATE[form["lr_precision"]](scene.xp, scene.rate)
        if form["compute_dtype"] == "converted":
            compiled = rounds_of(scene, form["compute_dtype"]) == "compiled"
            return cls(scene.xp, form, hyper, scene.xp.cast(rate, dtype), scene.step, dtype, compiled)
        rounds_each = form["compute_dtype"] == "each_operation"
        fused = rounds_each and rounds_of(scene, form["compute_dtype"]) == "compiled"
        rounds = rounds_each and not fused
        rounded_to = dtype if rounds else "float32"
        return cls(scene.xp, form, hyper, rate, scene.step, rounded_to, fused, rounds_added(scene))

    def returned(self, value: Value) -> Value:
        """Returns what an operation of the original returns."""
        return self.xp.rounded(value, self.dtype)

    def added(self, number: float) -> float:
        """Returns a number as an operation of the original adds it to arrays."""
        return self.xp.constant(number, self.dtype if self.rounds_added else "float32")

    def times(self, value: Value, number: Value) -> Value:
        """Returns a product with a number as an operation of the original returns it."""
        exact = self.returned(value * number)
        if self.dtype == "float32":
            return exact
        # PyTorch's foreach rounds the number first, on CPUs.
        return self.xp.either(
            lambda: exact, lambda: self.returned(value * self.returned(self.xp.widen(number)))
        )

    def stepped(self, param: Value, rate: Value, direction: Value) -> Value:
        """Returns a parameter minus the product of rate and direction, as an operation of the original does it."""
        exact = self.returned(param - rate * direction)
        if self.dtype == "float32":
            return exact
        # PyTorch's CPU kernel rounds rate and product in vectors, and not in what is left over.
        low = self.returned(self.xp.widen(rate))

        def in_vectors() -> Value:
            return self.xp.either(
                lambda: self.returned(param - low * direction),
                lambda: self.returned(param - self.returned(low * direction)),
            )

        product = self.returned(rate * direction)
        return self.xp.either(
            lambda: exact, lambda: self.xp.either(lambda: self.returned(param - product), in_vectors)
        )

    def correction(self, beta: float, ahead: int = 1) -> Value:
        """Returns 1 - beta^t, t being this update's number (or one further on)."""
        t, usual = self.step + ahead, CORRECTION[self.form["bias_correction_precision"]]
        if self.form["compute_dtype"] == "converted":
            t = self.xp.cast(self.xp.widen(t), self.dtype)
            return usual(self.xp, self.xp.constant(beta, self.dtype), t)
        if not self.fused:
            return usual(self.xp, beta, t)
        # PyTorch's fused kernel takes it in float64 as well, what torch.compile makes of its text in float32.
        return self.xp.either(
            lambda: usual(self.xp, beta, t), lambda: CORRECTION["float32"](self.xp, beta, t)
        )

    def corrected(self, moment: Value, correction: Value) -> Value:
        """Returns a moment, or what takes its place, over its correction."""
        return moment / self.xp.cast(correction, self.xp.dtype(moment))


@dataclass(frozen=True)
class AdamSetting(MomentSetting[C, H], Generic[C, H]):
    """Where an update with two moments runs."""

    @cached_property
    def corrections(self) -> tuple[Value, Value]:
        """The corrections of both moments."""
        return self.correction(self.hyper.beta1), self.correction(self.hyper.beta2)


def settle(schema: Schema, kind: type[D], group: Group, path: str, variant: str) -> D:
    """Returns the configuration of a parameter's update; its weight decay is None if the parameter is excluded.

    Raises:
        UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
    """
    hyper = settled(kind, schema, variant, group)
    excluded = IS_EXCLUDED[variant_constants(schema, variant)["decay_exclusions"]]
    kept = None if excluded(path, hyper.exclude_from_weight_decay) else hyper.weight_decay_rate or None
    return replace(hyper, weight_decay_rate=kept, exclude_from_weight_decay=None)


def _require_alone(
    state: TrainState, group: Group, path: str, hyper: AdamHyperparameters, variant: str, schema: Schema
) -> None:
    """Raises UnknownRuleError for what isn't followed beside a parameter of low precision, by its name."""
    limits = vars(settled(Limits, schema, variant, group))
    others = [
        name for name, value in {**limits, "use_ema": hyper.use_ema or None}.items() if value is not None
    ]
    if others:
        raise UnknownRuleError(
            "How the original rounds this beside a parameter of low precision isn't known.",
            place=path,
            expected="float32, or an update without it",
            found=f"{', '.join(others)} beside {state.params[path].dtype.name}",
            remedy="step the float32 masters, if the run kept them",
        )


def check(
    schema: Schema,
    kind: type[H],
    slot_names: Callable[[H], tuple[str, ...]],
    state: TrainState,
    group: Group,
    *,
    masters: bool = False,
) -> H:
    """Returns the hyperparameters of a group that its optimizer's step can move.

    Args:
        schema: Name of the schema.
        kind: The record of its hyperparameters.
        slot_names: The slots that a parameter has by them.
        state: The state.
        group: The group in it.
        masters: Whether the step moves a master where there is one.

    Raises:
        UnknownRuleError: It can't go on as the original would.
        StateError: A parameter lacks slots.
    """
    variant = str(state.optimizer.variant)
    hyper = settled(kind, schema, variant, group)
    rounding = variant_constants(schema, variant)["compute_dtype"]
    for path in group.paths:
        has_master = masters and MASTER in state.slots.get(path, {})
        low = rounding in LOW_PRECISION and state.params[path].dtype.name in LOW
        if not has_master and not low:
            require_float32(state, path)
        if low and rounding == "converted":
            _require_alone(state, group, path, hyper, variant, schema)
        require_slots(state, path, slot_names(hyper))
    settled(Limits, schema, variant, group)
    require_whole_updates(hyper.gradient_accumulation_steps)
    return hyper
