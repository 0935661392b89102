"""What every optimizer of statekit.jax is: a rule of `statekit.optim` as a GradientTransformation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from statekit.dropin.by_name import by_name, factor_rules, refuse_by_name
from statekit.dropin.options import refuse_options
from statekit.errors import Faults, UnknownRuleError, UsageError
from statekit.jax.batches import Stacks, awaiting, parts
from statekit.jax.leaves import Leaves, leaves_of
from statekit.jax.sharding import laid_out
from statekit.jax.states import STATES, State
from statekit.jax.traced import Traced, TracedBackend, static_remedy
from statekit.optim.keras_averages import follow_average
from statekit.optim.run import moves, settled_group, steps_for
from statekit.optim.steps import Arrays, Scene, Steps
from statekit.state.constants import variant_constants
from statekit.state.options import FACTOR_MAP, LOGICAL, RATE, RATE_NAMES, is_rate, rate_needed, read_options
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Filled, Shape

Rate: TypeAlias = float | jax.Array | Callable[[jax.Array], Any] | None
"""A learning rate: a number, a 0-d array, a schedule of the updates done, or None while nobody has given one."""

_COUNTED = ("step_offset", "begin_num_update")
"""Integers that only meet the count: they may be arrays, as floats may."""


@dataclass(frozen=True)
class GroupPlan:
    """How a group is updated, as far as names, shapes and dtypes of its parameters decide."""

    group: Group
    configs: Mapping[str, Hashable]
    rules: Mapping[str, Rule]


@dataclass(frozen=True)
class OptimizerSpec:
    """What an optimizer is to be: whose rule, and what was said of it.

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
    def definition(self) -> OptimizerSchema:
        """The schema."""
        return load_schema(self.schema)

    @cached_property
    def steps(self) -> Steps:
        """The rule."""
        return steps_for(self.schema, self.variant)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All hyperparameters that the variant offers, but for the learning rate."""
        defaults = self.definition.variant(self.variant)["defaults"]
        left_out = (*RATE_NAMES, LOGICAL, *self.unknown)
        return {k: v for k, v in {**defaults, **self.options}.items() if k not in left_out}

    @cached_property
    def arrays(self) -> bool:
        """Whether a hyperparameter is an array."""
        return any(isinstance(value, Traced) for value in self.options.values())

    def plan(self, shapes: Mapping[str, Shape]) -> GroupPlan:
        """Plans the update for parameters of these names and shapes.

        Raises:
            UsageError: A parameter has no factor rule, or an option leaves it open; lists every one.
            UnknownRuleError: A hyperparameter is unknown.
        """
        faults = Faults()
        names = list(shapes)
        groups = by_name(self.definition, self.variant, self.settings, names, faults)
        if self.rules is None:
            rules = factor_rules(self.definition, self.variant, self.settings, shapes, faults)
        else:
            rules = {path: self.rules[path] for path in names if path in self.rules}
        refuse_by_name(self.definition, faults)
        group = Group(tuple(names), {name: value for name, value in groups.items() if name != FACTOR_MAP})
        return GroupPlan(group, settled_group(self.steps, group, rules, self.variant), rules)


def transformation(
    schema: str, variant: str, rate: Rate, options: Mapping[str, Any]
) -> optax.GradientTransformation:
    """Returns an optimizer as its users call for it.

    Args:
        schema: Name of the schema.
        variant: Whose rule.
        rate: The learning rate.
        options: Hyperparameters by their canonical names or the variant's own; `...` for as the variant has it.

    Raises:
        NotFoundError: There is no such variant.
        StateError: The variant can't be stepped.
        UsageError: An option can't be what it is; lists every one.
    """
    steps_for(schema, variant)
    stated = {name: value for name, value in options.items() if value is not ...}
    read = read_options(schema, variant, stated, unchecked=is_array)
    faults = [*read.faults, *array_faults(schema, read.values), *rate_faults(rate)]
    refuse_options(faults, read.remedy)
    values = {name: Traced(name, value) if is_array(value) else value for name, value in read.values.items()}
    return built(OptimizerSpec(schema, variant, rate, values))


def is_array(value: Any) -> bool:
    """Tells whether a value is an array, whose value may not be known yet."""
    return isinstance(value, (jax.Array, np.ndarray))


def array_faults(schema: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields which options can't be the arrays that they are."""
    for name, value in options.items():
        kinds = load_schema(schema).hyperparameters[name]["type"]
        if is_array(value) and "number" not in kinds and name not in _COUNTED:
            yield f"decides shapes or which rule runs, and can't be an array; {static_remedy(name)}", name


def rate_faults(rate: Rate) -> Iterator[tuple[str, str]]:
    """Yields why a value can't be a learning rate."""
    fits = rate is None or callable(rate) or (is_array(rate) and jnp.ndim(rate) == 0) or is_rate(rate)
    if not fits:
        yield f"is {rate!r}, expected {RATE}, a 0-d array, a schedule or None", "learning_rate"


def built(spec: OptimizerSpec) -> optax.GradientTransformation:
    """Returns the transformation that does what a spec says."""
    kept: dict[Hashable, GroupPlan] = {}  # planning for thousands of names takes longer than a step

    def plan_for(leaves: Leaves, *, ready: bool = False) -> GroupPlan:
        shapes = {name: tuple(leaf.shape) for name, leaf in leaves.by_name.items()}
        key = (tuple(shapes.items()), tuple(str(leaf.dtype) for leaf in leaves.values), ready)
        if spec.arrays or key not in kept:
            plan = spec.plan(shapes)
            if ready:
                _check_ready(spec, plan, leaves)
            if spec.arrays:
                return plan
            kept[key] = plan
        return kept[key]

    def init(params: Any) -> State:
        leaves = leaves_of(params)
        return initial(spec, plan_for(leaves), leaves)

    def update(updates: Any, state: State, params: Any = None) -> tuple[Any, State]:
        if params is None:
            raise UsageError(
                "The update needs the parameters.",
                expected="update(grads, state, params)",
                found="no params",
                remedy="pass params as the third argument",
            )
        leaves = leaves_of(params)
        grads = leaves.like(updates)
        Faults(_gradient_faults(leaves, grads)).check(UsageError, "Gradients don't fit the parameters")
        return _updated(spec, plan_for(leaves, ready=True), leaves, grads, state)

    return optax.GradientTransformation(init, update)


def _gradient_faults(leaves: Leaves, grads: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields which gradients aren't there, or would be broadcast."""
    for name, leaf in leaves.by_name.items():
        if (grad := grads[name]) is None:
            yield "has no gradient; give zeros, or leave it out with optax.masked or optax.partition", name
        elif jnp.shape(grad) != jnp.shape(leaf):
            yield f"has shape {jnp.shape(leaf)}, its gradient {jnp.shape(grad)}", name


def initial(spec: OptimizerSpec, plan: GroupPlan, leaves: Leaves) -> State:
    """Returns the state before the first update, laid out over devices as the parameters are."""
    xp, schema = TracedBackend(), spec.definition

    def fresh(params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return {
            name: spec.steps.init(xp, param, plan.configs[name], spec.variant)
            for name, param in params.items()
        }

    slots = laid_out(fresh, leaves.by_name, plan.rules, schema)
    like = leaves.by_name or {"": jnp.zeros(())}  # a group's own slots depend on hyperparameters alone
    whole = spec.steps.begin(xp, like, plan.group, spec.variant)
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
        return leaves.tree({name: arrays[slot] for name, arrays in slots.items() if slot in arrays})

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


def _check_ready(spec: OptimizerSpec, plan: GroupPlan, leaves: Leaves) -> None:
    """Raises UnknownRuleError if the rule can't step the parameters, e.g. in their dtype."""
    described = {
        name: Filled(tuple(leaf.shape), DTYPES[leaf.dtype.name]) for name, leaf in leaves.by_name.items()
    }
    xp = TracedBackend()
    first = jax.eval_shape(
        lambda params: {
            name: spec.steps.init(xp, params[name], config, spec.variant)
            for name, config in plan.configs.items()
        },
        leaves.by_name,
    )
    slots = {
        name: {slot: Filled(value.shape, DTYPES[value.dtype.name]) for slot, value in arrays.items()}
        for name, arrays in first.items()
    }
    numbers = {name: v for name, v in plan.group.hyperparameters.items() if not isinstance(v, Traced)}
    group = replace(plan.group, hyperparameters=numbers)  # what an array holds can't be seen
    optimizer = Optimizer(spec.schema, spec.variant, (group,))
    spec.steps.check(TrainState(described, slots, optimizer, Counts(0, 0), plan.rules), plan.group)


def _updated(
    spec: OptimizerSpec, plan: GroupPlan, leaves: Leaves, grads: Mapping[str, Any], state: State
) -> tuple[Any, State]:
    xp, group, params = TracedBackend(), plan.group, leaves.by_name
    scene = Scene(xp, spec.variant, _rate(spec, state.count), state.count)
    slots, own_slots = slots_of(spec.schema, leaves, state)
    behind = {missed: state.count - missed for missed in set(spec.missed.values())}
    counts = {path: behind[missed] for path, missed in spec.missed.items() if missed}
    reached, whole, common = spec.steps.prepare(scene, group, params, grads, slots, own_slots)
    rule, updates, last = Differences(spec.steps), {}, None
    in_turn = isinstance(state.count, jax.core.Tracer) and _keeps_directions(spec)
    for part, batching in parts(reached, Stacks(state.count), in_turn):
        alone = in_turn and batching is None
        used = (
            part
            if last is None or not alone
            else {p: awaiting(g, last, state.count) for p, g in part.items()}
        )
        moved = moves(
            rule, scene, plan.configs, params, used, slots, common, counts=counts, batching=batching
        )
        for name, change, arrays in moved:
            updates[name], slots[name] = change, {**slots[name], **arrays}
            last = params[name] + change if alone and change.size else last
    for name, arrays in slots.items():
        if "average" in arrays:
            after = optax.apply_updates(params[name], updates[name])
            after, slots[name] = follow_average(xp, after, arrays, group, state.count)
            updates[name] = difference(after, params[name])
    count = optax.safe_increment(state.count)
    return leaves.tree(updates), state_of(spec.schema, leaves, count, slots, whole)


def _keeps_directions(spec: OptimizerSpec) -> bool:
    """Tells whether the rule has a trust ratio: a whole direction is kept until its norm is known."""
    return "trust_ratio_fallback" in variant_constants(spec.schema, spec.variant)


def _rate(spec: OptimizerSpec, count: jax.Array) -> Any:
    rate = spec.rate(count) if callable(spec.rate) else spec.rate
    if rate is None and rate_needed(spec.schema, spec.variant, spec.settings):
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
        self, scene: Scene, param: jax.Array, grad: jax.Array, slots: Arrays, config: Any, common: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the difference, and the slots after the update."""
        new, after = self.steps.update(scene, param, grad, slots, config, common)
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
