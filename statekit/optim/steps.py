"""The contract of a step: what each module of `statekit.optim` offers for its schema, one parameter at a time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from statekit.arrays.backend import Backend, Value
from statekit.arrays.promotion import Promoting, any_low
from statekit.state.constants import Rounds, execution
from statekit.state.train_state import Group, Rule, TrainState

Execution: TypeAlias = str
"""How the original ran: a name of `statekit.state.constants`."""
Arrays: TypeAlias = Mapping[str, Value]
Slots: TypeAlias = Mapping[str, Arrays]
C = TypeVar("C")
"""The constants of an optimizer's variants, a type of `statekit.state.constants`."""
H = TypeVar("H")
"""The hyperparameters that an optimizer's update needs."""


@dataclass(frozen=True)
class Scene:
    """One update of a group: what its parameters share.

    Attributes:
        xp: The array namespace.
        variant: Whose rule.
        rate: Learning rate, a number or 0-d array; a number stays as precise as it is. None where the rule has its own.
        step: Updates done before this one (int, or 0-d integer array).
        execution: How the original ran; None: as it usually runs, on a CPU.
        together: The gradients of all groups, where one norm limits them; None: a group's norm is its own.
    """

    xp: Backend
    variant: str
    rate: Value | None
    step: Value
    execution: Execution | None = None
    together: Arrays | None = None


@dataclass(frozen=True)
class Setting(Generic[C, H]):
    """Where an update runs: what every optimizer's own setting begins with.

    Attributes:
        xp: The array namespace.
        form: The variant's constants: difference -> name of its form.
        hyper: Hyperparameters.
    """

    xp: Backend
    form: C
    hyper: H


class Steps(Protocol):
    """What a module of `statekit.optim` offers for its schema. All functions are pure."""

    def check(self, state: TrainState, group: Group) -> None:
        """Raises UnknownRuleError if a rule or a hyperparameter that the step needs is unknown."""

    def settle(self, group: Group, path: str, rule: Rule | None, variant: str) -> Hashable:
        """Returns what the update of one parameter depends on beside arrays and scene; equal ones may be batched.

        Raises:
            UnknownRuleError: A hyperparameter that the variant offers is unknown; lists all that are.
        """

    def init(self, xp: Backend, param: Value, config: Any, variant: str) -> dict[str, Value]:
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
        self, scene: Scene, param: Value, grad: Value, slots: Arrays, config: Any, common: Value
    ) -> tuple[Value, dict[str, Value]]:
        """Returns a parameter and its slots after one update.

        Args:
            scene: The update.
            param: The parameter; its dtype is kept.
            grad: Its gradient as `prepare` returned it, same shape; or `Repeated` where the variant's `repeated_rows`
                squares parts by themselves.
            slots: Its slots before the update; their dtypes are kept.
            config: What `settle` returned for it.
            common: What `prepare` returned for all.
        """


LOW_PRECISION = ("each_operation", "promoted", "converted")
"""Values of `compute_dtype` with which operations round to a dtype of low precision."""


def rounds_of(scene: Scene, compute_dtype: str) -> Rounds:
    """Returns the original's roundings: by the scene, or the usual ones for its `compute_dtype`."""
    return execution(scene.execution or USUAL.get(compute_dtype, "compiled")).rounds


def rounds_added(scene: Scene) -> bool:
    """Tells whether the original rounds a number that it adds to arrays of low precision to their dtype."""
    return scene.execution is None or execution(scene.execution).rounds_added


USUAL: Mapping[str, Execution] = {"each_operation": "op_by_op"}
"""How an original usually runs, by `compute_dtype`: PyTorch's optimizers eagerly, all others compiled."""


def promoting(
    scene: Scene, compute_dtype: str, arrays: Iterable[Value], loose: tuple[str, ...] = ("float16",)
) -> Scene:
    """Returns a scene whose operations round by dtypes, if the rule does so and an array has few bits.

    Operations in the parameter's dtype, to which all is converted first, are as JAX's are op by op.

    Args:
        scene: The scene.
        compute_dtype: The variant's constant.
        arrays: The parameter, then all else that the update takes.
        loose: Dtypes of a parameter whose compiled updates are followed within one rounding of each operation only.
    """
    listed = list(arrays)
    if compute_dtype not in ("promoted", "converted") or not any_low(scene.xp, listed):
        return scene
    op_by_op = compute_dtype == "converted" or rounds_of(scene, compute_dtype) == "op_by_op"
    within = () if op_by_op or scene.xp.dtype(listed[0]) not in loose else loose
    return replace(scene, xp=Promoting(scene.xp, op_by_op, within))


class Repeated(NamedTuple):
    """A gradient of parts that may meet in the same elements, for a rule that squares each part by itself.

    Attributes:
        sum: The sum of the parts, of the parameter's shape.
        squares: The sum of their squares.
    """

    sum: Value
    squares: Value


def sum_of(grad: Value) -> Value:
    """Returns a gradient without what is said of its parts."""
    return grad.sum if isinstance(grad, Repeated) else grad


def no_group_slots(xp: Backend, params: Arrays, group: Group, variant: str) -> dict[str, Value]:
    """Returns no slots: the `begin` of a rule without slots of whole groups."""
    return {}


def stored(xp: Backend, new: Arrays, slots: Arrays) -> dict[str, Value]:
    """Returns new values of slots in the dtypes in which they are kept."""
    return {name: xp.narrow(value, xp.dtype(slots[name])) for name, value in new.items()}
