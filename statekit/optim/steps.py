"""The contract of a step: what each module of `statekit.optim` offers for its schema, one parameter at a time."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.state.train_state import Group, Rule, TrainState

Execution: TypeAlias = Literal["op_by_op", "compiled"]
"""How the original ran: `op_by_op` rounds every low-precision product, `compiled` keeps products in float32."""
Arrays: TypeAlias = Mapping[str, Value]
Slots: TypeAlias = Mapping[str, Arrays]


@dataclass(frozen=True)
class Scene:
    """One update of a group: what its parameters share.

    Attributes:
        xp: The array namespace.
        variant: Whose rule.
        rate: Learning rate, a number or 0-d array; a number stays as precise as it is. None where the rule has its own.
        step: Updates done before this one (int, or 0-d integer array).
        execution: Which roundings of low precision the original makes.
    """

    xp: Backend
    variant: str
    rate: Value | None
    step: Value
    execution: Execution = "compiled"


class Steps(Protocol):
    """What a module of `statekit.optim` offers for its schema. All functions are pure."""

    VARIANTS: tuple[str, ...]
    """The variants that it steps."""

    def check(self, state: TrainState, group: Group) -> None:
        """Raises UnknownRuleError if a rule or a hyperparameter that the step needs is unknown."""

    def settle(self, group: Group, path: str, rule: Rule | None, variant: str) -> Hashable:
        """Returns what the update of one parameter depends on beside arrays and scene; equal ones may be batched.

        Raises:
            UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
        """

    def init(self, xp: Backend, param: Value, own: Any, variant: str) -> dict[str, Value]:
        """Returns the slots of a parameter before its first update."""

    def begin(self, xp: Backend, params: Arrays, group: Group, variant: str) -> dict[str, Value]:
        """Returns the slots of a group as a whole before the first update."""

    def prepare(
        self, scene: Scene, group: Group, params: Arrays, grads: Arrays, slots: Slots, shared: Arrays
    ) -> tuple[Arrays, Arrays, Value]:
        """Does what acts on a group as a whole.

        Returns:
            Gradients of the parameters that are to be moved; the group's own slots; and what every update gets.
        """

    def update(
        self, scene: Scene, param: Value, grad: Value, slots: Arrays, own: Any, common: Value
    ) -> tuple[Value, dict[str, Value]]:
        """Returns a parameter and its slots after one update.

        Args:
            scene: The update.
            param: The parameter; its dtype is kept.
            grad: Its gradient as `prepare` returned it, same shape.
            slots: Its slots before the update; their dtypes are kept.
            own: What `settle` returned for it.
            common: What `prepare` returned for all.
        """
