"""Both sides of a conversion stepped on the same gradients, and held against the bound of their arithmetic.

Source and target start from one state: the source's, under its own rule, and what the target's file holds, under the
target's. Each runs where its own class is installed, else by our step. An interval runs beside each of them through all
updates (docs/bounds.md), so that whatever lies within is rounding; and the source's rule in float64 must lie in the
interval of the target's: there two rules part, not two roundings. For that both have their hyperparameters in float32,
which whoever keeps them in float64 has as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from statekit.arrays.backend import Backend
from statekit.arrays.intervals import Interval, IntervalBackend
from statekit.arrays.numpy_backend import ORACLE
from statekit.optim.run import Live, load, mover, store
from statekit.optim.steps import Execution
from statekit.state.options import rate_needed, stored_rate
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Array, Tensor
from statekit.verify.natives import Native, Rates, Updates

Key: TypeAlias = tuple[str, str]
Arrays: TypeAlias = Mapping[Key, Array]
RATE = float(np.float32(0.01))
"""The learning rate of a group that nobody says one of: the same on both sides, and stated."""
EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0, 256.0, 65536.0)
"""Upper ends of the classes of a histogram of ULP; the last class has what lies beyond."""


@dataclass(frozen=True)
class Side:
    """One side of a conversion in motion.

    Attributes:
        state: What it starts from: the part that is stepped, in memory.
        title: What makes its updates.
        native: The class that makes them; our step if None.
        sqrt_units: How far its square roots may be from the exact ones.
        changed: Tensors that its class has otherwise than its file once it has loaded it, and how.
        execution: As which execution its class runs; None: as its rule usually does.
    """

    state: TrainState
    title: str
    native: Native | None = None
    sqrt_units: float = 0.0
    changed: Mapping[Key, str] = field(default_factory=dict)
    execution: Execution | None = None

    def after(self, xp: Backend, updates: Updates, rates: Rates) -> Arrays:
        """Returns every tensor after updates."""
        if self.native is not None:
            return arrays(self.native(self.state, updates, rates))
        live = run(xp, self.state, updates, rates)
        return arrays(store(xp, live, self.state))


@dataclass(frozen=True)
class Bounds:
    """What arithmetic can make of a state by a rule, after the updates of a probe.

    Where an interval is NaN, as infinity may have met zero on the way, and float64 gives a number, nothing is decided.
    """

    intervals: Mapping[Key, Interval]
    exact: Arrays

    def beyond(self, key: Key, values: Array) -> Array:
        """Tells of each element of a tensor whether it leaves the bound."""
        with np.errstate(all="ignore"):
            leaves: Array = ~self.intervals[key].encloses(values.astype(np.float64)) & ~self.undecided(key)
            return leaves

    def undecided(self, key: Key) -> Array:
        """Tells of each element whether its interval says nothing."""
        bound = self.intervals[key]
        unknown = np.isnan(bound.low) | np.isnan(bound.high)
        decided: Array = unknown & ~np.isnan(self.exact[key].astype(np.float64))
        return decided

    def outside(self, values: Arrays) -> dict[Key, int]:
        """Returns how many elements of each tensor leave the bound; all of one that isn't there."""
        counts = {}
        for key, bound in self.intervals.items():
            value = values.get(key)
            alike = value is not None and value.shape == bound.low.shape
            counts[key] = (
                int(np.sum(self.beyond(key, value))) if value is not None and alike else bound.low.size
            )
        return counts


@dataclass(frozen=True)
class Rules:
    """What two rules make of a probe when both have the same hyperparameters to the last bit.

    PyTorch keeps 0.999 in float64, Optax in float32, where its thousandth power is another by a part in 10^5. A number
    that float32 has is the same for both, so what parts two rules there is no rounding of numbers.

    Attributes:
        source: Every tensor by the source's rule in float64, by its names.
        target: The bound of the target's.
    """

    source: Arrays
    target: Bounds


def rates_of(state: TrainState) -> tuple[Rates, tuple[str, ...]]:
    """Returns the learning rate of each group for the steps, and what is said of those that are made up."""
    rates, notes = list[float | None](), list[str]()
    for i, group in enumerate(state.optimizer.groups):
        rate = stored_rate(group.hyperparameters)
        if isinstance(rate, (int, float)) and not isinstance(rate, bool) and rate > 0 and np.isfinite(rate):
            rates.append(float(np.float32(rate)))
        elif group.hyperparameters.get("relative_step") and not _needs_rate(state, group):
            rates.append(None)
        else:
            rates.append(RATE)
            notes.append(
                f"group {i} is stepped with a learning rate of 0.01, as neither side says one to go on with"
            )
    return tuple(rates), tuple(notes)


def at_rates(state: TrainState, rates: Rates) -> tuple[TrainState, tuple[str, ...]]:
    """Returns a source's state with the rates that its target is stepped with, and what is said of that.

    Where a rule makes its rate itself and the target's takes one, a rule change says which rate to give. So both sides
    have the same one, whatever it is.
    """
    if len(rates) != len(state.optimizer.groups):
        return state, ()
    groups, notes = list[Group](), list[str]()
    for i, (group, rate) in enumerate(zip(state.optimizer.groups, rates, strict=True)):
        is_own = rate is not None and group.hyperparameters.get("relative_step")
        if not is_own or _needs_rate(state, group):
            groups.append(group)
            continue
        given = {"relative_step": False, "warmup_init": False, "learning_rate": rate}
        names = {*load_schema(state.optimizer.kind(group)[0]).hyperparameters}
        values = {name: value for name, value in given.items() if name in names}
        groups.append(replace(group, hyperparameters={**group.hyperparameters, **values}))
        notes.append(f"group {i} of the source makes its rate itself; here both sides are given the target's")
    return replace(state, optimizer=replace(state.optimizer, groups=tuple(groups))), tuple(notes)


def _needs_rate(state: TrainState, group: Group) -> bool:
    schema, variant = state.optimizer.kind(group)
    return rate_needed(schema, str(variant), group.hyperparameters)  # Keras' relative step only caps one


def run(
    xp: Backend, state: TrainState, updates: Updates, rates: Rates, execution: Execution | None = None
) -> Live:
    """Returns a state's arrays after updates by our step, as an execution rounds; None: as its rule usually does.

    Raises:
        UnknownRuleError: A factor rule or a hyperparameter is unknown.
        StateError: There is no step of it.
    """
    move, live = mover(xp, state, execution), load(xp, state)
    with np.errstate(all="ignore"):
        for grads in updates:
            live = move(live, {path: xp.asarray(grad) for path, grad in grads.items()}, rates)
    return live


def bounds(
    state: TrainState, updates: Updates, rates: Rates, sqrt_units: float, execution: Execution | None = None
) -> Bounds:
    """Returns the interval of every element after updates, as compiled or fused arithmetic may have it."""
    live = run(IntervalBackend(True, sqrt_units=sqrt_units), state, updates, rates, execution)
    return Bounds(named(live.params, live.slots, live.shared), in_float64(state, updates, rates))


def rules(
    before: TrainState,
    right: TrainState,
    updates: Updates,
    rates: Rates,
    sqrt_units: float,
    execution: Execution | None = None,
) -> Rules:
    """Returns what a source's and a target's rule make of one state; arguments are those of `bounds`."""
    left, other = _with_numbers_of_float32(before), _with_numbers_of_float32(right)
    return Rules(in_float64(left, updates, rates), bounds(other, updates, rates, sqrt_units, execution))


def _with_numbers_of_float32(state: TrainState) -> TrainState:
    """Returns a state whose hyperparameters are rounded to float32."""
    groups = tuple(
        replace(
            group, hyperparameters={name: _single(value) for name, value in group.hyperparameters.items()}
        )
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _single(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_single(item) for item in value)
    return float(np.float32(value)) if isinstance(value, float) else value


def arrays(state: TrainState) -> Arrays:
    """Returns the values of every tensor of a state."""
    return {key: tensor.read() for key, tensor in tensors_of(state).items()}


def in_float64(state: TrainState, updates: Updates, rates: Rates) -> Arrays:
    """Returns every tensor after updates in float64; what is stored is rounded to its dtype."""
    live = run(ORACLE, state, updates, rates)
    return {key: np.asarray(value) for key, value in named(live.params, live.slots, live.shared).items()}


def tensors_of(state: TrainState) -> dict[tuple[str, str], Tensor]:
    """Returns every tensor of a state, under the names of `named`."""
    return named(state.params, state.slots, [group.slots for group in state.optimizer.groups])


def named(
    params: Mapping[str, Any], slots: Mapping[str, Mapping[str, Any]], shared: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, str], Any]:
    """Returns parameters and slots under (path or `groups/<i>`, `param` or the slot's name)."""
    moved = {(path, "param"): value for path, value in params.items()}
    owners = [*slots.items(), *((f"groups/{i}", arrays) for i, arrays in enumerate(shared))]
    return moved | {(owner, name): value for owner, arrays in owners for name, value in arrays.items()}
