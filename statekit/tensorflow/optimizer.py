"""What every optimizer of statekit.tensorflow is: Keras' life cycle around the one step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import keras
import tensorflow as tf

from statekit.arrays.backend import backend
from statekit.errors import Faults, StateError, UsageError
from statekit.optim.run import steps_for
from statekit.optim.steps import Repeated
from statekit.state.constants import variant_constants
from statekit.state.options import KERAS, RATE, RATE_NAMES, is_rate, taken
from statekit.state.schema import load_schema
from statekit.tensorflow.naming import SEPARATOR, partners, path_of, scopes, twice
from statekit.tensorflow.spec import GroupSpec, OptimizerSpec, by_keras, group_specs, read_spec
from statekit.tensorflow.step import GroupVariables, VariableStep, update_keys

Rate: TypeAlias = float | keras.optimizers.schedules.LearningRateSchedule | Callable[[], Any] | None


class SchemaOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """An optimizer of one schema. Its classes differ in the schema and the usual variant alone.

    Slots are variables named `<optimizer>/<path of the parameter>/<slot>`, slots of a group as a whole
    `<optimizer>/groups/<i>/<slot>`; updates are counted in `iterations`. Files hold them by these names.

    Args:
        learning_rate: A number, a Keras schedule (of `iterations`), a callable without arguments, or None: as the
            variant has it; where that has none, the first update is refused until one is given.
        variant: Whose rule, one of the schema's; None for the usual one.
        groups: Groups with hyperparameters of their own: `[{"paths": [...], name: value, ...}, ...]`, also
            `learning_rate_factor`. Others share the hyperparameters below. A group that says `schema` and `variant` is
            moved by that optimizer: `AdamW(groups=[{"paths": matrices, "schema": "muon", "variant": "keras"}])`.
        rules: How parameters are factored, by path, if it is known from elsewhere: `{path: {"axes": [...],
            "known_from": "file"}}`. Else `factor_map`, shapes and the variant decide.
        names: What a parameter is called in all options by name, by its variable's path, where they differ.
        missed: Updates that a parameter has missed, by path, where the variant counts each by itself.
        jit_compile: Whether XLA compiles the update of each kind of parameter by itself, also outside of a compiled
            train step: less work for a CPU, but one core does it.
        name: Name of the optimizer.
        options: Hyperparameters by their canonical names or the variant's own, with the variant's defaults; and
            Keras' own `clipnorm`, `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`,
            `ema_overwrite_frequency`, `loss_scale_factor` and `gradient_accumulation_steps`.

    Raises:
        UsageError: Options that can't be; lists every one.
        StateError: The variant can't be stepped.
        NotFoundError: There is no such variant.
    """

    SCHEMA: ClassVar[str]
    USUAL: ClassVar[str]

    def __init__(
        self,
        learning_rate: Rate = None,
        *,
        variant: str | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        rules: Mapping[str, Mapping[str, Any]] | None = None,
        names: Mapping[str, str] | None = None,
        missed: Mapping[str, int] | None = None,
        jit_compile: bool = False,
        name: str | None = None,
        **options: Any,
    ) -> None:
        variant = self.USUAL if variant is None else variant
        steps_for(self.SCHEMA, variant)
        arguments = {k: v for k, v in options.items() if k not in KERAS or k in taken(self.SCHEMA, variant)}
        by_path = dict(rules or {}), dict(names or {}), dict(missed or {})
        spec = OptimizerSpec(self.SCHEMA, variant, arguments, tuple(groups), *by_path)
        fault = _rate_fault(learning_rate)
        spec = read_spec(spec, [(fault, "learning_rate")] if fault else [])
        keras_names = by_keras(self.SCHEMA, variant)
        base = {k: v for k, v in options.items() if k not in arguments}
        base |= {
            keras_names[k]: spec.hyperparameters[k] for k in keras_names.keys() & spec.hyperparameters.keys()
        }
        left = {k: v for k, v in spec.hyperparameters.items() if k not in keras_names}
        if learning_rate is None:
            learning_rate = _usual_rate(self.SCHEMA, variant)
        super().__init__(learning_rate=_rate(learning_rate), name=name, **{**KERAS, **base})
        self.spec = replace(spec, hyperparameters=left)
        self.jit_compile = jit_compile
        self._rate_given = learning_rate is not None
        self._paths = _Paths(spec.names)
        self._kept: tuple[GroupVariables, ...] = ()
        self._movements: tuple[VariableStep, ...] = ()

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the slots of all variables.

        Raises:
            UsageError: Variables have one name, or lack a factor rule; lists every one.
            UnknownRuleError: A hyperparameter is unknown.
        """
        if self.built:
            return
        moved = [v for v in variables if not self._overwrite_variable_with_gradient(v)]
        self._paths = _Paths(self._named(moved))
        named = {self._canonical(variable): variable for variable in moved}
        groups = group_specs(self.spec, {path: tuple(variable.shape) for path, variable in named.items()})
        with tf.init_scope():
            super().build(list(variables))
            self._kept = tuple(self._held(i, group, named) for i, group in enumerate(groups))
        step = VariableStep(backend("tensorflow"), self.spec, self._kept, self.jit_compile)
        copies = _copies(self._distribution_strategy)
        if copies == 1:
            self._movements = (step,)
            return
        alike = step.alike_on_replicas()
        self._movements = tuple(
            replace(step, groups=tuple(_replica(g, i) for g in self._kept), alike=alike, _kernels={})
            for i in range(copies)
        )

    def _named(self, variables: Sequence[Any]) -> dict[str, str]:
        """Returns the canonical path of each variable by its own."""
        names, paths = self.spec.names, [path_of(variable) for variable in variables]
        faults = [("is the name of several variables", path) for path in twice(paths)]
        same = {path: path for path in names}
        if not names.keys() <= {*paths}:  # Keras named the variables anew since these names were saved
            same = {saved: here for here, saved in partners(paths, list(names)).items()}
            faults += [("is the name of no variable", path) for path in names if path not in same]
        canonical = {path: path for path in paths} | {same[p]: name for p, name in names.items() if p in same}
        faults += [("is the name of several variables", path) for path in twice(canonical.values())]
        Faults(faults).check(
            UsageError,
            "Variables can't be told apart",
            remedy="slots are kept and loaded by name: give names of their own",
        )
        return canonical

    def _canonical(self, variable: Any) -> str:
        return self._paths.by_name[path_of(variable)]

    def _held(self, index: int, spec: GroupSpec, named: Mapping[str, Any]) -> GroupVariables:
        xp, steps = backend("tensorflow"), steps_for(*spec.kind)
        configs, variant = update_keys(spec), spec.kind[1]
        params = {path: _native(named[path]) for path in spec.group.paths}
        slots = {}
        for path, variable in params.items():
            first = steps.init(xp, tf.convert_to_tensor(variable), configs[path], variant)
            slots[path] = self._created(path, first)
        first = steps.begin(xp, params, spec.group, variant)
        shared = self._created(f"groups/{index}", first)
        return GroupVariables(spec, configs, params, slots, shared)

    def _created(self, path: str, first: Mapping[str, Any]) -> dict[str, Any]:
        """Creates slots below a path; returns TensorFlow's variables, which Keras' hold."""
        created = {}
        with scopes(self, self.name, path):
            for name, value in first.items():
                variable = keras.Variable(value, dtype=value.dtype.name, trainable=False, name=name)
                self._track_variable(variable)
                created[name] = variable.value
        return created

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Makes one update.

        Args:
            grads: A gradient for each variable; None where there is none.
            trainable_variables: The variables; those that the optimizer was built with if None.

        Raises:
            UnknownRuleError: The learning rate, or a hyperparameter, is unknown. Nothing was changed then.
            UsageError: The update can't be made here.
        """
        if trainable_variables is not None and not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(list(trainable_variables))
        if self._movements:
            given = self._trainable_variables if trainable_variables is None else trainable_variables
            paths = [self._canonical(v) for g, v in zip(grads, given, strict=False) if g is not None]
            self._movements[0].check(paths, self._rate_given)
        super().apply(grads, trainable_variables)

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        paths = tuple(map(self._canonical, trainable_variables))
        reduced = self._all_reduce_sum_gradients(list(zip(grads, trainable_variables, strict=True)))

        def move(strategy: Any, whole: Sequence[Any], rate: Any) -> None:
            step = tf.cast(self.iterations, tf.int32)
            for replica, movement in enumerate(self._movements):
                device = strategy.extended.worker_devices[replica] if len(self._movements) > 1 else None
                with tf.device(device):
                    positions = [
                        self._dense(path, _of_replica(strategy, grad, replica))
                        for path, grad in zip(paths, whole, strict=True)
                    ]
                    given = _of_replica(strategy, rate, replica) if self._rate_given else None
                    movement.run(
                        paths, tuple(positions), None if given is None else tf.cast(given, tf.float32), step
                    )

        tf.__internal__.distribute.interim.maybe_merge_call(
            move, self._distribution_strategy, [grad for grad, _ in reduced], learning_rate
        )

    def _dense(self, path: str, grad: Any) -> Any:
        """Returns a gradient as the variant takes it: an embedding's names a row for each time it was looked up."""
        if isinstance(grad, tf.IndexedSlices):
            kind = next(group.spec.kind for group in self._kept if path in group.params)
            if variant_constants(*kind).get("repeated_rows") == "squared_apart":
                squares = tf.IndexedSlices(tf.square(grad.values), grad.indices, grad.dense_shape)
                return Repeated(tf.convert_to_tensor(grad), tf.convert_to_tensor(squares))
        return tf.convert_to_tensor(grad)

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the next update; 0 while nobody has given one."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, learning_rate: Rate) -> None:
        keras.optimizers.Optimizer.learning_rate.fset(self, _rate(learning_rate))
        self._rate_given = learning_rate is not None

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Refuses: Keras forgets such exclusions when an optimizer is saved.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            "Exclusions from weight decay are an option here, so that they are saved.",
            remedy="give the constructor exclude_from_weight_decay=[regex, ...], or groups",
        )

    def get_config(self) -> dict[str, Any]:
        """Returns all that the constructor was given."""
        config = super().get_config()
        del config["weight_decay"]
        rate = config["learning_rate"] if self._rate_given else None
        spec = replace(self.spec, names=self._paths.by_name).to_json()
        return {**config, "learning_rate": rate, "jit_compile": self.jit_compile, **spec}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> SchemaOptimizer:
        """Returns the optimizer of `get_config`; one that had no rate yet has none."""
        optimizer: SchemaOptimizer = super().from_config(config, custom_objects)
        if config.get("learning_rate", ...) is None:
            optimizer.learning_rate = None
        return optimizer

    def save_own_variables(self, store: Any) -> None:
        """Saves all variables by their names."""
        for name, variable in self._by_name().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads variables by their names. Numbers at the end of a layer's automatic name may differ.

        Raises:
            StateError: Variables are missing on either side, or have other shapes; lists every one.
        """
        if not self.built:
            warnings.warn(
                f"The saved state of {self.name} isn't loaded: the optimizer hasn't been built. "
                "Call optimizer.build(model.trainable_variables) before.",
                stacklevel=2,
            )
            return
        variables, saved = self._by_name(), list(store.keys())
        saved_keys = _keys(list(variables), saved)
        faults = Faults(("isn't in the file", name) for name in variables if name not in saved_keys)
        faults += [
            ("is in the file, but not in the optimizer", n) for n in saved if n not in saved_keys.values()
        ]
        faults += [
            (f"has shape {tuple(store[saved_keys[name]].shape)} in the file, here {tuple(v.shape)}", name)
            for name, v in variables.items()
            if name in saved_keys and tuple(store[saved_keys[name]].shape) != tuple(v.shape)
        ]
        faults.check(
            StateError,
            "The saved state doesn't fit the optimizer",
            remedy="names must be those of the run; build the optimizer with the variables of the same model",
        )
        for name, variable in variables.items():
            variable.assign(store[saved_keys[name]])

    def _by_name(self) -> dict[str, Any]:
        """Returns all variables by their names in files."""
        variables = {
            v.path.rpartition("/")[2]: v for v in (self._iterations, self._learning_rate) if _is_own(v)
        }
        slots = {path: dict(by_slot) for path, by_slot in self.slots().items()}
        kept = (self.averages(), self._kept_by_keras("gradient_accumulator", "_accumulated_gradients"))
        for path, by_slot in (item for kept_slots in kept for item in kept_slots.items()):
            slots.setdefault(path, {}).update(by_slot)
        return variables | {
            _key(path, slot): v for path, by_slot in slots.items() for slot, v in by_slot.items()
        }

    def averages(self) -> dict[str, dict[str, Any]]:
        """Returns the averages of the parameters by their paths, as `{"average": variable}`."""
        return self._kept_by_keras("average", "_model_variables_moving_average")

    def _kept_by_keras(self, name: str, attribute: str) -> dict[str, dict[str, Any]]:
        pairs = zip(self._trainable_variables, getattr(self, attribute, ()), strict=False)
        return {self._canonical(variable): {name: kept} for variable, kept in pairs if kept is not None}

    def slots(self) -> dict[str, dict[str, Any]]:
        """Returns the slots of each parameter by its path and their names; of groups as a whole by `groups/<i>`."""
        groups = self._kept
        slots = {path: dict(by_slot) for group in groups for path, by_slot in group.slots.items()}
        return slots | {f"groups/{i}": dict(group.shared) for i, group in enumerate(groups) if group.shared}


@dataclass(frozen=True)
class _Paths:
    """Canonical path by the variable's own; in a class of ours, because Keras replaces plain dicts."""

    by_name: Mapping[str, str]


def _is_own(variable: Any) -> bool:
    return isinstance(variable, keras.Variable)


def _key(path: str, slot: str) -> str:
    return f"{path}/{slot}".replace("/", SEPARATOR)


def _keys(mine: Sequence[str], saved: Sequence[str]) -> dict[str, str]:
    """Returns the name in a file of each of our names."""

    def paths(names: Sequence[str]) -> list[str]:
        owners = dict.fromkeys(name.rpartition(SEPARATOR)[0].replace(SEPARATOR, "/") for name in names)
        return [path for path in owners if path and not path.startswith("groups/")]

    same = partners(paths(mine), paths(saved))
    keys = {}
    for name in mine:
        owner, _, slot = name.rpartition(SEPARATOR)
        path = owner.replace(SEPARATOR, "/")
        key = _key(same[path], slot) if path in same else name
        if key in saved:
            keys[name] = key
    return keys


def _usual_rate(schema: str, variant: str) -> float | None:
    """Returns the learning rate that a variant has by itself; None if it has none."""
    defaults = load_schema(schema).variant(variant)["defaults"]
    return next((defaults[name] for name in RATE_NAMES if defaults.get(name) is not None), None)


def _rate_fault(rate: Any) -> str:
    """Returns why a value can't be a learning rate; "" if it can."""
    fits = rate is None or callable(rate) or is_rate(rate) or isinstance(rate, keras.Variable | tf.Tensor)
    return "" if fits else f"is {rate!r}, expected {RATE}, a schedule, a callable or None"


def _rate(rate: Rate) -> Any:
    if rate is None:
        return 0.0
    return rate if callable(rate) else float(rate)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _copies(strategy: Any) -> int:
    """Returns how many copies of a variable this process moves, each by the whole gradient.

    Where a strategy has no merge calls, as TPUStrategy, each replica runs the step, and moves the copy that it sees.
    """
    alone = tf.__internal__.distribute.strategy_supports_no_merge_call()
    return 1 if alone else len(strategy.extended.worker_devices)


def _copy(variable: Any, replica: int) -> Any:
    """Returns a replica's copy of a variable; the variable itself where it has one copy."""
    copies = getattr(variable, "values", None)
    return copies[replica] if isinstance(copies, tuple) and len(copies) > 1 else variable


def _of_replica(strategy: Any, value: Any, replica: int) -> Any:
    """Returns what a replica has of a value: all of it where the replicas have one."""
    local = strategy.experimental_local_results(value)
    return local[replica] if len(local) > 1 else value


def _replica(group: GroupVariables, replica: int) -> GroupVariables:
    """Returns a group's variables as a replica has them."""

    def copies(variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _copy(variable, replica) for name, variable in variables.items()}

    slots = {path: copies(variables) for path, variables in group.slots.items()}
    return replace(group, params=copies(group.params), slots=slots, shared=copies(group.shared))
