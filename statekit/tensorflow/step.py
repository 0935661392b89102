"""The step of an optimizer's variables: planned when they are known, traced once, compiled once for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from statekit.arrays.backend import Backend
from statekit.errors import Faults, UnknownRuleError, UsageError
from statekit.optim.run import counts_apart, settled_group, steps_for
from statekit.optim.steps import Scene, Steps
from statekit.state.options import FACTOR, rate_needed
from statekit.tensorflow.spec import GroupSpec, OptimizerSpec

Variables: TypeAlias = Mapping[str, Any]
ALONE = 2**17
"""Elements from which on a parameter is moved by itself. Smaller ones of one kind are stacked: what TensorFlow and XLA
spend on each of thousands would be more than the update."""
STACK = 2**22
"""The most elements of one stack."""


@dataclass(frozen=True)
class GroupVariables:
    """A group's variables: parameters and slots by path, slots of the group as a whole; and what holds for it."""

    spec: GroupSpec
    configs: Mapping[str, Hashable]
    params: Variables
    slots: Mapping[str, Variables]
    shared: Variables


class GroupValues(NamedTuple):
    """The values of a group's variables: parameters and slots by path, and slots of the group as a whole."""

    params: Mapping[str, Any]
    slots: Mapping[str, Mapping[str, Any]]
    shared: Mapping[str, Any]


class _Moving(NamedTuple):
    """What moves a kind of parameters: the module of their optimizer, its variant, and what is settled for them."""

    steps: Steps
    variant: str
    config: Hashable


@dataclass(frozen=True)
class VariableStep:
    """How an optimizer moves its variables.

    Attributes:
        xp: The array namespace.
        spec: Whose rule, and what was said of it.
        groups: The variables, by groups.
        jit_compile: Whether updates are compiled by XLA.
        alike: The arithmetic that all replicas share, as `alike_on_replicas` makes it; None of a single one.
    """

    xp: Backend
    spec: OptimizerSpec
    groups: tuple[GroupVariables, ...]
    jit_compile: bool
    alike: Any = None
    _kernels: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def _needs_rate(self) -> bool:
        """Tells whether the rule of a group has no rate of its own."""
        return any(rate_needed(*group.spec.kind, group.spec.group.hyperparameters) for group in self.groups)

    def check(self, paths: Sequence[str], rate_given: bool) -> None:
        """Checks, before anything is changed, that an update with gradients for these parameters can be made.

        Raises:
            UnknownRuleError: The learning rate is needed and nobody gave it.
            UsageError: A group multiplies a rate that is the rule's own; or a gradient is missing, and the variant
                counts the updates of each parameter by itself.
        """
        if not rate_given and self._needs_rate():
            raise UnknownRuleError(
                "The optimizer has no learning rate.",
                expected="a number, a schedule or a callable",
                remedy="set optimizer.learning_rate, or give it to the constructor or load_optimizer",
            )
        factors = {path: group.spec.rate_factor for group in self.groups for path in group.params}
        if not rate_given and any(factor != 1.0 for factor in factors.values()):
            raise Faults((f"has {FACTOR} {f}", path) for path, f in factors.items() if f != 1.0).error(
                UsageError,
                "Groups multiply the learning rate, and none is given: the rule makes its own.",
                remedy=f"give a learning rate, or leave out {FACTOR}",
            )
        self._check_counts(paths)

    def _check_counts(self, paths: Sequence[str]) -> None:
        by_themselves = [group for group in self.groups if counts_apart(*group.spec.kind)]
        missing = {path for group in by_themselves for path in group.params} - set(paths)
        if missing:
            variants = ", ".join(dict.fromkeys(group.spec.kind[1] for group in by_themselves))
            raise Faults(("has no gradient", path) for path in sorted(missing)).error(
                UsageError,
                f"Variant {variants} counts the updates of each parameter by itself; here all count together.",
                remedy="set trainable = False on what stays as it is before the optimizer is built",
            )

    def run(self, paths: tuple[str, ...], grads: tuple[Any, ...], rate: Any, step: Any) -> None:
        """Makes one update, in the graph that is being traced or, if none is, in one of its own.

        Args:
            paths: Parameters that have a gradient.
            grads: Their gradients, dense, or `Repeated`.
            rate: Learning rate, 0-d float32, or None.
            step: Updates done, 0-d int32.
        """
        if tf.executing_eagerly():
            if "" not in self._kernels:
                self._kernels[""] = tf.function(self._move, autograph=False)
            self._kernels[""](paths, grads, rate, step)
        else:
            self._move(paths, grads, rate, step)

    def _move(self, paths: tuple[str, ...], grads: tuple[Any, ...], rate: Any, step: Any) -> None:
        before = tuple(
            GroupValues(
                _values(group.params),
                {path: _values(slots) for path, slots in group.slots.items()},
                _values(group.shared),
            )
            for group in self.groups
        )
        after = (self.alike or self._moved)(paths, before, grads, rate, step)
        for group, values in zip(self.groups, after, strict=True):
            for name, value in values.shared.items():
                group.shared[name].assign(value)
            for path, param in values.params.items():
                group.params[path].assign(param)
                for name, value in values.slots[path].items():
                    group.slots[path][name].assign(value)

    def alike_on_replicas(self) -> Any:
        """Returns the update's arithmetic as a function that several replicas call, each with its own values.

        TensorFlow rewrites the arithmetic of a graph: of two copies in one graph, each in another way. The last bits
        of the replicas would part.
        """
        return tf.function(self._moved, autograph=False, experimental_attributes={"_noinline": True})

    def _moved(
        self,
        paths: tuple[str, ...],
        before: Sequence[GroupValues],
        grads: Sequence[Any],
        rate: Any,
        step: Any,
    ) -> tuple[GroupValues, ...]:
        """Returns all groups' values after an update; the parameters are those that moved."""
        given, after = dict(zip(paths, grads, strict=True)), []
        for group, values in zip(self.groups, before, strict=True):
            reached = {path: given[path] for path in group.params if path in given}
            factor = group.spec.rate_factor
            schema, variant = group.spec.kind
            scene = Scene(self.xp, variant, rate if rate is None or factor == 1.0 else rate * factor, step)
            steps = steps_for(schema, variant)
            # Some rules move what has no gradient.
            after.append(self._moved_group(steps, scene, group, values, reached))
        return tuple(after)

    def _moved_group(
        self, steps: Steps, scene: Scene, group: GroupVariables, values: GroupValues, grads: Mapping[str, Any]
    ) -> GroupValues:
        params, slots = values.params, values.slots
        reached, shared, common = steps.prepare(scene, group.spec.group, params, grads, slots, values.shared)
        after, moved = dict[str, Any](), dict[str, dict[str, Any]]()
        for missing, config, paths in _batches(group.configs, values, reached, self.spec.missed):
            moment = (scene.rate, scene.step - missing, common)
            moving = _Moving(steps, scene.variant, config)
            arguments = [(params[path], reached[path], slots[path]) for path in paths]
            for path, updated in zip(paths, self._updated(moving, moment, arguments), strict=True):
                after[path], moved[path] = updated
        return GroupValues(after, moved, {name: shared[name] for name in group.shared})

    def _updated(
        self, moving: _Moving, there: tuple[Any, Any, Any], arguments: Sequence[Any]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields parameter and slots of each of a batch after its update."""
        size = math.prod(arguments[0][0].shape)
        if len(arguments) == 1 or size >= ALONE or size == 0:
            kernel = self._kernel(moving, arguments[0], together=False)
            for argument in arguments:
                yield kernel(*there, argument)
            return
        kernel = self._kernel(moving, arguments[0], together=True)
        most = max(2, STACK // size)
        for start in range(0, len(arguments), most):
            part = arguments[start : start + most]
            stacked = tf.nest.map_structure(lambda *values: tf.stack(values), *part)
            param, moved = kernel(*there, stacked)
            split = {name: tf.unstack(value) for name, value in moved.items()}
            for i, part_of_param in enumerate(tf.unstack(param)):
                yield part_of_param, {name: values[i] for name, values in split.items()}

    def _kernel(self, moving: _Moving, argument: Any, together: bool) -> Callable[..., Any]:
        """Returns the update of one kind of parameters, compiled; of a stack of them if `together`."""
        kind = tuple((value.shape, value.dtype) for value in tf.nest.flatten(argument))
        key = (moving.variant, moving.config, kind, together)
        if key not in self._kernels:
            xp = self.xp

            def update(rate: Any, step: Any, common: Any, arrays: Any) -> Any:
                scene = Scene(xp, moving.variant, rate, step)

                def updated(parameter: Any) -> Any:
                    param, grad, slots = parameter
                    return moving.steps.update(scene, param, grad, slots, moving.config, common)

                return tf.vectorized_map(updated, arrays) if together else updated(arrays)

            self._kernels[key] = tf.function(update, jit_compile=self.jit_compile or None, autograph=False)
        return self._kernels[key]  # type: ignore[no-any-return]  # TensorFlow has no types


def _batches(
    configs: Mapping[str, Hashable], values: GroupValues, grads: Mapping[str, Any], missed: Mapping[str, int]
) -> Iterator[tuple[int, Hashable, list[str]]]:
    """Yields the batches that one kernel moves: missed updates, configuration, and paths of parameters."""
    batches: dict[tuple[int, Hashable, Hashable], list[str]] = {}
    for path, grad in grads.items():
        arrays = [values.params[path], *tf.nest.flatten(grad), *values.slots[path].values()]
        kind = tuple((tuple(value.shape), value.dtype) for value in arrays)
        batches.setdefault((missed.get(path, 0), configs[path], kind), []).append(path)
    for (missing, config, _), paths in batches.items():
        yield missing, config, paths


def _values(variables: Variables) -> dict[str, Any]:
    return {name: tf.convert_to_tensor(variable) for name, variable in variables.items()}


def update_keys(group: GroupSpec) -> dict[str, Hashable]:
    """Returns what each parameter's update depends on; errors are those of the optimizer's own module."""
    return settled_group(steps_for(*group.kind), group.group, group.rules, group.kind[1])
