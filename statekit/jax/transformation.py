"""The engine behind every optimizer of statekit.jax: a rule of `statekit.optim` as a GradientTransformation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from statekit.dropin.by_name import LOGICAL, Faults, by_name, factor_rules
from statekit.errors import UnknownRuleError, UsageError, fault_list
from statekit.jax.batches import Stacks, parts
from statekit.jax.leaves import Leaves, leaves_of
from statekit.jax.sharding import laid_out
from statekit.jax.states import STATES, State
from statekit.jax.traced import Traced, TracedBackend, static_remedy
from statekit.optim.keras_averages import follow_average
from statekit.optim.run import moves, settled_group, steps_for
from statekit.optim.steps import Arrays, Scene, Steps
from statekit.state.options import RATE_NAMES, option_faults, rate_needed
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Filled, Shape

Rate: TypeAlias = float | jax.Array | Callable[[jax.Array], Any] | None
"""A learning rate: a number, a 0-d array, a schedule of the updates done, or None while nobody has given one."""

_SHOWN = 40
_COUNTED = ("step_offset", "begin_num_update")
"""Integers that only meet the count: they may be arrays, as floats may."""


@dataclass(frozen=True)
class Settled:
    """What of a group's update the parameters' names, shapes and dtypes decide."""

    group: Group
    owns: Mapping[str, Hashable]
    rules: Mapping[str, Rule]


@dataclass(frozen=True)
class Told:
    """What a user says of an optimizer.

    Attributes:
        schema: Name of the schema.
        variant: Whose rule.
        rate: The learning rate.
        options: Canonical hyperparameters that were given; arrays are `Traced`.
        rules: Factor rules by path that outweigh `factor_map`; None where that or the shapes decide.
        missed: By path, how many updates parameters missed before; each falls so far behind the count.
        unknown: Hyperparameters that nobody knows, which have no default then.
    """

    schema: str
    variant: str
    rate: Rate = None
    options: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Rule] | None = None
    missed: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()

    @cached_property
    def known(self) -> OptimizerSchema:
        """The schema."""
        return load_schema(self.schema)

    @cached_property
    def steps(self) -> Steps:
        """The rule."""
        return steps_for(self.schema, self.variant)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All hyperparameters that the variant offers, but for the learning rate."""
        defaults = self.known.variant(self.variant)["defaults"]
        left_out = (*RATE_NAMES, LOGICAL, *self.unknown)
        return {k: v for k, v in {**defaults, **self.options}.items() if k not in left_out}

    @cached_property
    def arrays(self) -> bool:
        """Whether a hyperparameter is an array."""
        return any(isinstance(value, Traced) for value in self.options.values())

    def settled(self, shapes: Mapping[str, Shape]) -> Settled:
        """Settles what names and shapes decide.

        Raises:
            UsageError: A parameter has no factor rule, or an option leaves it open; lists every one.
            UnknownRuleError: A hyperparameter is unknown.
        """
        faults: Faults = []
        names = list(shapes)
        known = by_name(self.known, self.variant, self.settings, names, faults)
        rules = (
            factor_rules(self.known, self.variant, self.settings, shapes, faults)
            if self.rules is None
            else {path: self.rules[path] for path in names if path in self.rules}
        )
        if faults:
            raise UsageError(
                f"Parameters lack a rule: {len(faults)}.",
                found=fault_list(faults[:_SHOWN]),
                remedy='give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as in the '
                "run whose rule it is, or factored=False",
            )
        group = Group(tuple(names), {name: value for name, value in known.items() if name != "factor_map"})
        return Settled(group, settled_group(self.steps, group, rules, self.variant), rules)


def transformation(
    schema: str, variant: str, rate: Rate, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Returns an optimizer as its users call for it.

    Args:
        schema: Name of the schema.
        variant: Whose rule.
        rate: The learning rate.
        options: Canonical hyperparameters that were given.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: An option can't be what it is; lists every one.
    """
    told = Told(schema, variant, rate, {name: _held(name, value) for name, value in options.items()})
    check_options(told)
    return built(told)


def _held(name: str, value: Any) -> Any:
    return Traced(name, value) if isinstance(value, (jax.Array, np.ndarray)) else value


def check_options(told: Told) -> None:
    """Raises UsageError if an option can't be what it is, and StateError if the variant can't be stepped."""
    rate = told.rate
    assert told.steps  # a variant without steps is an error of its own
    plain = {name: value for name, value in told.options.items() if not isinstance(value, Traced)}
    faults = list(option_faults(told.schema, told.variant, plain))
    for name in told.options.keys() - plain.keys():
        kinds = told.known.hyperparameters[name]["type"]
        if "number" not in kinds and name not in _COUNTED:
            faults.append(
                (f"decides shapes or which rule runs, and can't be an array; {static_remedy(name)}", name)
            )
    if isinstance(rate, (int, float)) and (isinstance(rate, bool) or not rate >= 0):
        faults.append(
            (f"is {rate!r}, expected a number from 0 on, a 0-d array, a schedule or None", "learning_rate")
        )
    if faults:
        raise UsageError(
            f"The optimizer's options can't be used: {len(faults)} faults.", found=fault_list(faults)
        )


def built(told: Told) -> optax.GradientTransformation:
    """Returns the transformation that does as told."""
    kept: dict[Hashable, Settled] = {}  # settling thousands of names takes longer than a step

    def settled(leaves: Leaves, *, ready: bool = False) -> Settled:
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.by_name.items()}
        key = (tuple(shapes.items()), tuple(str(leaf.dtype) for leaf in leaves.values), ready)
        if told.arrays or key not in kept:
            found = told.settled(shapes)
            if ready:
                _check_ready(told, found, leaves)
            if told.arrays:
                return found
            kept[key] = found
        return kept[key]

    def init(params: Any) -> State:
        leaves = leaves_of(params)
        return initial(told, settled(leaves), leaves)

    def update(updates: Any, state: State, params: Any = None) -> tuple[Any, State]:
        if params is None:
            raise UsageError(
                "The update needs the parameters.",
                expected="update(grads, state, params)",
                found="no params",
                remedy="pass params as the third argument",
            )
        leaves = leaves_of(params)
        return _updated(told, settled(leaves, ready=True), leaves, leaves.like(updates), state)

    return optax.GradientTransformation(init, update)


def initial(told: Told, settled: Settled, leaves: Leaves) -> State:
    """Returns the state before the first update, laid out over devices as the parameters are."""
    xp, schema = TracedBackend(), told.known

    def fresh(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {
            name: told.steps.init(xp, param, settled.owns[name], told.variant)
            for name, param in params.items()
        }

    slots = laid_out(fresh, leaves.by_name, settled.rules, schema)
    like = leaves.by_name or {"": jnp.zeros(())}  # a group's own slots depend on hyperparameters alone
    whole = told.steps.begin(xp, like, settled.group, told.variant)
    return state_of(schema.name, leaves, jnp.zeros((), jnp.int32), slots, whole)


def state_of(
    schema: str,
    leaves: Leaves,
    count: jax.Array,
    slots: Mapping[str, Mapping[str, Any]],
    whole: Mapping[str, Any],
) -> State:
    """Returns a state.

    Args:
        schema: Name of the schema.
        leaves: The parameters.
        count: Updates done, 0-d int32.
        slots: Slots by path and name.
        whole: Slots of the group as a whole.
    """
    kind, kinds = STATES[schema], load_schema(schema).slots

    def of(slot: str) -> Any:
        if kinds[slot].shape.startswith("group"):
            return whole.get(slot, optax.MaskedNode())
        return leaves.tree({name: own[slot] for name, own in slots.items() if slot in own})

    return kind(count, *(of(slot) for slot in kind._fields[1:]))


def slots_of(schema: str, leaves: Leaves, state: State) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns the slots of a state by path and name, and those of the group as a whole."""
    kinds = load_schema(schema).slots
    slots: dict[str, dict[str, Any]] = {name: {} for name in leaves.names}
    whole = {}
    for slot, tree in zip(state._fields[1:], state[1:], strict=True):
        if not kinds[slot].shape.startswith("group"):
            for name, value in leaves.like(tree).items():
                if not isinstance(value, optax.MaskedNode):
                    slots[name][slot] = value
        elif not isinstance(tree, optax.MaskedNode):
            whole[slot] = tree
    return slots, whole


def _check_ready(told: Told, settled: Settled, leaves: Leaves) -> None:
    """Raises UnknownRuleError if the rule can't step the parameters, e.g. in their dtype."""
    described = {
        name: Filled(tuple(leaf.shape), DTYPES[leaf.dtype.name]) for name, leaf in leaves.by_name.items()
    }
    xp = TracedBackend()
    held = jax.eval_shape(
        lambda params: {
            name: told.steps.init(xp, params[name], own, told.variant) for name, own in settled.owns.items()
        },
        leaves.by_name,
    )
    slots = {
        name: {slot: Filled(value.shape, DTYPES[value.dtype.name]) for slot, value in own.items()}
        for name, own in held.items()
    }
    optimizer = Optimizer(told.schema, told.variant, (settled.group,))
    told.steps.check(TrainState(described, slots, optimizer, Counts(0, 0), settled.rules), settled.group)


def _updated(
    told: Told, settled: Settled, leaves: Leaves, grads: Mapping[str, Any], state: State
) -> tuple[Any, State]:
    xp, group, params = TracedBackend(), settled.group, leaves.by_name
    scene = Scene(xp, told.variant, _rate(told, state.count), state.count)
    slots, own_slots = slots_of(told.schema, leaves, state)
    behind = {missed: state.count - missed for missed in set(told.missed.values())}
    counts = {path: behind[missed] for path, missed in told.missed.items() if missed}
    reached, whole, common = told.steps.prepare(scene, group, params, grads, slots, own_slots)
    rule, updates = Differences(told.steps), {}
    for part, batching in parts(reached, Stacks(state.count)):
        moved = moves(
            rule, scene, settled.owns, params, part, slots, common, counts=counts, batching=batching
        )
        for name, change, own in moved:
            updates[name], slots[name] = change, {**slots[name], **own}
    for name, own in slots.items():
        if "average" in own:
            after = optax.apply_updates(params[name], updates[name])
            after, slots[name] = follow_average(xp, after, own, group, state.count)
            updates[name] = difference(after, params[name])
    count = optax.safe_increment(state.count)
    return leaves.tree(updates), state_of(told.schema, leaves, count, slots, whole)


def _rate(told: Told, count: jax.Array) -> Any:
    rate = told.rate(count) if callable(told.rate) else told.rate
    if rate is None and rate_needed(told.schema, told.variant, told.settings):
        raise UnknownRuleError(
            "The optimizer has no learning rate.",
            expected="learning_rate: a number, a 0-d array, or a schedule",
            remedy="give learning_rate=..., of load_optimizer too: checkpoints of most systems hold none",
        )
    return rate


@dataclass(frozen=True)
class Differences:
    """A rule whose update returns what is to be added to a parameter."""

    steps: Steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.steps, name)

    def update(
        self, scene: Scene, param: jax.Array, grad: jax.Array, slots: Arrays, own: Any, common: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the difference, and the slots after the update."""
        new, after = self.steps.update(scene, param, grad, slots, own, common)
        return difference(new, param), after


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns what added to `old` gives `new`, in float32 or wider: a sum that rounds to `new` itself.

    The difference alone may be rounded so that the sum is a unit off; what it lacks is added to it.
    """
    dtype = jnp.promote_types(old.dtype, jnp.float32)
    end, start = new.astype(dtype), old.astype(dtype)
    first = end - start
    reached = start + first
    exact = jnp.where(reached == end, first, first + (end - reached))
    return jnp.where(end == start, jnp.zeros_like(end), exact)
