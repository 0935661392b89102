"""Resuming in Keras from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, TypeAlias, TypeVar, Unpack

import keras
import tensorflow as tf

from statekit.arrays.backend import backend
from statekit.conversion.changing.at_loading import with_first_slots
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState, changing
from statekit.conversion.registry import detect_container
from statekit.dropin.by_name import renamed_path
from statekit.dropin.loading import Call, Framework, Loaded, LoadOptions, ResumeOptions, put, resumed
from statekit.dropin.matching import Given, copy_fault, match_faults
from statekit.dropin.overrides import rate_factor, rate_of
from statekit.errors import Faults, StateError, UnknownRuleError, UsageError
from statekit.files.tree import Place
from statekit.maps.links import StateMap
from statekit.maps.model_map import maps_of
from statekit.maps.modules import TargetModel
from statekit.state.options import FACTOR, FACTOR_MAP, KERAS, is_rate, known_options, stored_rate, taken
from statekit.state.stored_params import as_variable
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensorflow.naming import names_in, normal, partners, path_of, twice, variables_of
from statekit.tensorflow.optimizer import Rate, SchemaOptimizer
from statekit.tensorflow.optimizers import LAMB, LANS, Adafactor, AdamW, Muon, ScaledAdam
from statekit.tensorflow.spec import by_keras
from statekit.tensors.tensor import DTYPES, DType, Shape, Tensor, blocks

Variables: TypeAlias = Iterable[Any] | Mapping[str, Any] | keras.Model | tf.Module
Options = TypeVar("Options", ResumeOptions, LoadOptions)
Fault: TypeAlias = tuple[str, str]

OPTIMIZERS: Mapping[str, Callable[..., SchemaOptimizer]] = {
    kind.SCHEMA: kind for kind in (Adafactor, ScaledAdam, LANS, LAMB, AdamW, Muon)
}
"""Schema -> the class that goes on with it."""
HOME = "statekit.tensorflow"
MAKERS = {schema: kind.__name__ for schema, kind in OPTIMIZERS.items()}
KERAS_FILES = ("keras", "keras-h5")
"""Containers that number a model's variables."""
KERAS_LAYOUTS = ("keras", "keras-model-h5", "statekit-keras", "tf2-keras", "tf2-keras2", "tf2-statekit")
"""Layouts whose names are paths of Keras' variables."""
_ARGUMENTS = ("jit_compile", "name", *KERAS)
"""Arguments of the optimizers that are no hyperparameters; those of Keras' base class unless the variant has them."""
_REMEDY = "names must be those of the checkpoint, or given: names={variable.path: name, ...}"


def load_optimizer(
    path: CheckpointRef | str | PathLike[str],
    variables: Variables,
    learning_rate: Rate = None,
    **options: Unpack[ResumeOptions],
) -> SchemaOptimizer:
    """Builds the optimizer that a checkpoint records, and loads its state by the variables' names.

    Args:
        path: Anything statekit reads: a T5X run or step folder, a TensorFlow or PyTorch file, a statekit folder; or a
            `CheckpointRef`. Of a model and a file of Keras, the model knows `param_names`.
        variables: `model.trainable_variables`, or the model; their order doesn't matter. Variables may be TensorFlow's
            own, and in dicts: their keys are names in the checkpoint then.
        learning_rate: A number, a schedule (of `iterations`) or a callable; as the checkpoint has it if None. A step
            raises until there is one. Where the run had several optimizers, one for all, or a number for each:
            `{"muon": 0.02, "adamw": 3e-4}`.
        **options: What the files don't say, as in `statekit.open`. Beside it:
            names: Names in the checkpoint by the variables' paths, or by those of layers, where they differ.
            map: From the checkpoint's model to that of another codebase, e.g. `t5x-t5:hf-t5`, or from the modules of
                one framework to another's: `torch:keras`; `names` are of its names then.
            config: What the map needs to know of the model and no checkpoint says, e.g. `{"num_heads": 12}`.
            require: The least exactness that a map may have for slots, as in `statekit.convert`.
            Any other name is an argument of the optimizer, or a hyperparameter for all parameters;
            `step_offset="reset"` lets the second moment's decay start anew, as finetuning does. What can be overridden
            is the law that
            `statekit.dropin.overrides.overridden` states. `slot_policy`, `drop_slots_of` and `loss_scale` are as in
            `statekit.convert`, and `init_missing=["head.*"]` names parameters that begin anew, as the checkpoint lacks
            them or has them in another shape.

    Returns:
        The optimizer, built for the variables.

    Raises:
        StateError: Variables are missing, unknown, or of other shapes; or no optimizer here follows the recorded
            rule; lists every fault.
        UnknownRuleError: The checkpoint doesn't say what a step needs to know.
        UsageError: An option that doesn't exist or can't be.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    return resumed(FRAMEWORK, path, variables_of(variables), learning_rate, _with_names(variables, options))


def _with_names(variables: Variables, options: Options) -> Options:
    """Returns options with the keys of variables as their names, unless the caller gives names."""
    names = names_in(variables)
    return {**options, "names": names} if names and not options.get("names") else options


def _optimizer(loaded: Loaded, variables: Variables, learning_rate: Rate) -> SchemaOptimizer:
    state = with_first_slots(loaded.state)
    pairs = _moved(state, variables, loaded.names, loaded.place)
    optimizer = built(state, pairs, learning_rate, loaded.arguments, loaded.place)
    for target, source in _targets(optimizer, state, loaded.place):
        _copied(target, source)
    periods = optimizer.gradient_accumulation_steps or 1
    optimizer._iterations.assign(state.counts.updates * periods)
    return optimizer


def order_of(path: Place, variables: Variables, given: Sequence[str] | None) -> Sequence[str] | None:
    """Returns the names given, or those of a model's trainable variables if a file of Keras numbers them."""
    if given is not None:
        return given
    if not isinstance(variables, keras.Model) or detect_container(path)[0].name not in KERAS_FILES:
        return None
    return tuple(map(path_of, variables.trainable_variables))


def renumbered(opened: OpenState, variables: Sequence[Any]) -> dict[str, str]:
    """Returns names in one of Keras' own files by the variables' paths, where Keras has numbered layers anew since."""
    variable_paths, stored_paths = [path_of(variable) for variable in variables], list(opened.state.params)
    if opened.layout not in KERAS_LAYOUTS or {*variable_paths} <= {*stored_paths}:
        return {}
    pairs = partners(variable_paths, stored_paths)
    return {path: name for path, name in pairs.items() if path != name}


def _check_settings(
    kinds: Sequence[tuple[str, str]], settings: Sequence[Mapping[str, Any]], place: object
) -> None:
    """Refuses groups that lack a hyperparameter which the steps need."""
    pairs = zip(kinds, settings, strict=True)
    missing = sorted({n for kind, options in pairs for n in taken(*kind) if n not in (FACTOR_MAP, *options)})
    if missing:
        raise UnknownRuleError(
            "The checkpoint doesn't say what the steps need to know.",
            place=place,
            expected=", ".join(missing),
            remedy=f"give load_optimizer what the run was configured with: {missing[0]}=..., or hparams={{...}}",
        )


def _common(
    kinds: Sequence[tuple[str, str]], settings: Sequence[Mapping[str, Any]], place: object
) -> dict[str, Any]:
    """Returns what all groups of the first one's optimizer have, and what Keras does for all groups together."""
    pairs = list(zip(kinds, settings, strict=True))
    alike = [options for kind, options in pairs if kind == kinds[0]]
    common = {n: v for n, v in alike[0].items() if all(n in other and other[n] == v for other in alike)}
    faults = Faults()
    for kind, options in pairs:
        for name in by_keras(*kind).keys() & options.keys():
            if common.setdefault(name, options[name]) != options[name]:
                faults.add(f"is {common[name]!r} in one group and {options[name]!r} in another", name)
    faults.check(StateError, "Keras does this for all variables of an optimizer alike", place=place)
    return common


def _own(
    kind: tuple[str, str], first: tuple[str, str], options: Mapping[str, Any], common: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what a group says for itself: of another optimizer than the first group's, all but Keras' part."""
    if kind == first:
        return {name: value for name, value in options.items() if name not in common}
    arguments = {name: value for name, value in options.items() if name not in by_keras(*kind)}
    return {"schema": kind[0], "variant": kind[1], **arguments}


def _by_variable(state: TrainState, pairs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the arguments of an optimizer that say something of single variables: rules, names, missed updates."""
    behind = state.counts.behind
    factored = {
        path for g in state.optimizer.groups if state.optimizer.kind(g)[0] == "adafactor" for path in g.paths
    }
    ruled = [path for path in pairs if path in factored or path in state.rules]
    return {
        "rules": {path: _rule(state, path).to_json() for path in ruled},
        "names": {path_of(v): path for path, v in pairs.items() if path_of(v) != path},
        "missed": {path: state.counts.updates - done for path, done in behind.items() if path in pairs},
    }


def built(
    state: TrainState,
    pairs: Mapping[str, Any],
    learning_rate: Rate,
    arguments: Mapping[str, Any],
    place: object,
) -> SchemaOptimizer:
    """Returns an optimizer with the state's hyperparameters, rules and groups.

    Args:
        state: The state.
        pairs: Its variables by path.
        learning_rate: As the state has it if None.
        arguments: Other arguments of the constructor.
        place: Where the state is from, for errors.
    """
    groups = [group for group in state.optimizer.groups if any(path in pairs for path in group.paths)]
    kinds = [(schema, str(variant)) for schema, variant in map(state.optimizer.kind, groups)]
    settings = [
        known_options(*kind, group.hyperparameters) for kind, group in zip(kinds, groups, strict=True)
    ]
    _check_settings(kinds, settings, place)
    common = _common(kinds, settings, place)
    different = [
        {"paths": [path for path in group.paths if path in pairs], **_own(kind, kinds[0], options, common)}
        for kind, group, options in zip(kinds, groups, settings, strict=True)
    ]
    options: dict[str, Any] = {
        **common,
        "groups": different if len(groups) > 1 else (),
        **_by_variable(state, pairs),
    }
    learning_rate, factors = _rates(state, groups, learning_rate, place)
    options["groups"] = _with_factors(options["groups"], different, factors)
    schema, variant = kinds[0]
    optimizer = OPTIMIZERS[schema](learning_rate, variant=variant, **{**options, **arguments})
    if learning_rate is None:  # the run had a rate, and the variant's usual one isn't it: a step asks for it
        optimizer.learning_rate = None
    optimizer.build(list(pairs.values()))
    return optimizer


def _with_factors(
    groups: Sequence[Any], different: Sequence[Mapping[str, Any]], factors: Sequence[float]
) -> Sequence[Any]:
    """Returns the groups of an optimizer, each with what it multiplies the learning rate by, where these differ."""
    if {*factors} == {1.0}:
        return groups
    return [{**group, FACTOR: factor} for group, factor in zip(different, factors, strict=True)]


def _rates(state: TrainState, groups: Sequence[Group], given: Rate, place: object) -> tuple[Any, list[float]]:
    """Returns the learning rate of an optimizer, and what each of its groups multiplies it by."""
    if isinstance(given, Mapping):
        stored = [rate_of(given, group, state, "learning_rate") for group in groups]
        if strange := [rate for rate in stored if rate is not None and not is_rate(rate)]:
            raise UsageError(
                "An optimizer of Keras has one learning rate, which its groups multiply by numbers.",
                place="learning_rate",
                expected="a number for each optimizer",
                found=f"{strange[0]!r:.80}",
            )
    elif given is not None:
        return given, [rate_factor(state, group) for group in groups]
    else:
        stored = [stored_rate(group.hyperparameters) for group in groups]
    if len({*stored}) == 1:
        return stored[0], [1.0] * len(stored)
    if None in stored:
        raise UnknownRuleError(
            "Some groups of the checkpoint have a learning rate and others none, and an optimizer of Keras has one.",
            place=place,
            expected="a rate for all groups",
            found=", ".join(map(str, stored)),
            remedy="give load_optimizer learning_rate=...",
        )
    base = next(rate for rate in stored if rate)  # of rates that differ one isn't 0
    return base, [rate / base for rate in stored]


def _rule(state: TrainState, path: str) -> Rule:
    """Returns a parameter's rule; one that nobody knows is assumed to be NONE, as its slots are."""
    return state.rules.get(path) or Rule((Axis.NONE,) * len(state.params[path].shape), "assumed")


def _stray_names(names: Iterable[str], paths: Collection[str]) -> list[tuple[str, str]]:
    """Returns the names that are given to no variable and to no layer above one."""
    return [
        ("is no variable, but has a name", name)
        for name in names
        if not any(f"{path}/".startswith(f"{name}/") for path in paths)
    ]


def _moved(
    state: TrainState, variables: Variables, names: Mapping[str, str], place: object
) -> dict[str, Any]:
    """Returns the variable of each parameter that the recorded run moved."""
    given = _trainable(variables)
    stored = {normal(path): path for path in state.params}
    shapes = {normal(path): tensor.shape for path, tensor in state.params.items()}
    moved = {normal(path): path for path in state.optimizer.paths}
    wanted = {path_of(v): normal(renamed_path(path_of(v), names)) for v in given}
    variable_of = {wanted[path_of(v)]: v for v in given}
    several = "stands twice among the variables: give each a name of its own"
    faults = [(several, path) for path in twice(map(path_of, given))]
    faults += match_faults(
        shapes, moved, {key: Given(path_of(v), tuple(v.shape)) for key, v in variable_of.items()}, "variables"
    )
    faults += _stray_names(names, wanted)
    faults += [
        ("was frozen in the recorded run: set trainable = False, or leave it out", stored[key])
        for key in variable_of
        if key in stored and key not in moved
    ]
    Faults(faults).check(StateError, "The checkpoint doesn't fit the variables", place=place, remedy=_REMEDY)
    return {path: variable_of[key] for key, path in moved.items()}


def model_of(variables: Iterable[Any], names: Mapping[str, str] | None) -> TargetModel:
    """Returns the model that variables are of, by their paths in the checkpoint."""
    return TargetModel(frozenset(normal(renamed_path(path_of(v), names or {})) for v in variables))


def _trainable(variables: Variables) -> list[Any]:
    if isinstance(variables, keras.Model):
        return list(variables.trainable_variables)
    return [v for v in variables_of(variables) if v.trainable]


def _stored_slots(state: TrainState, paths: Container[str]) -> dict[tuple[str, str], Tensor]:
    """Returns a state's slots of these parameters, and of their groups as wholes, by path and name."""
    stored = {
        (path, name): tensor
        for path, tensors in state.slots.items()
        for name, tensor in tensors.items()
        if path in paths
    }
    groups = [group for group in state.optimizer.groups if any(path in paths for path in group.paths)]
    for number, group in enumerate(groups):
        stored |= {(f"groups/{number}", name): tensor for name, tensor in group.slots.items()}
    return stored


def _targets(optimizer: SchemaOptimizer, state: TrainState, place: object) -> list[tuple[Any, Tensor]]:
    """Returns each variable of an optimizer with what is copied into it."""
    kept = (*optimizer.slots().items(), *optimizer.averages().items())
    slot_variables = {(path, name): v for path, arrays in kept for name, v in arrays.items()}
    stored = _stored_slots(state, optimizer.slots())
    faults = [("isn't in the checkpoint", " ".join(key)) for key in slot_variables if key not in stored]
    faults += [
        ("is in the checkpoint, but the optimizer has no use for it", " ".join(k))
        for k in stored
        if k not in slot_variables
    ]
    pairs = [(slot_variables[key], stored[key], " ".join(key)) for key in slot_variables if key in stored]
    Faults([*faults, *_misfits(pairs, "the optimizer")]).check(
        StateError, "The checkpoint's slots don't fit the optimizer", place=place, remedy=_REMEDY
    )
    return [(target, source) for target, source, _ in pairs]


def load_params(
    path: CheckpointRef | str | PathLike[str], variables: Variables, **options: Unpack[LoadOptions]
) -> None:
    """Copies a checkpoint's parameters into variables, by name, in place; nothing is copied unless all fit.

    Values are widened where the variable's dtype is wider, never narrowed.

    Args:
        path: Anything statekit reads, or a `CheckpointRef`. Of a model and a file of Keras, the model knows
            `param_names`.
        variables: A model, whose trainable variables must all be in the checkpoint; or the variables that must be.
        **options: As in `load_optimizer`, without hyperparameters; `require` is for parameters alone.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says. Of large files that may be noticed when
            other values were copied already; then the error says so.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    put(
        replace(FRAMEWORK, names=partial(_names, _all), maps=partial(maps_to, _all)),
        path,
        variables_of(variables),
        _with_names(variables, options),
        _put,
    )


def _all(variables: Variables) -> list[Any]:
    return list(variables.variables if isinstance(variables, keras.Model) else variables)


def _put(loaded: Loaded, variables: Variables) -> None:
    state, wanted, model = loaded.state, _all(variables), isinstance(variables, keras.Model)
    sources = {normal(p): p for p in state.params}
    targets = {normal(renamed_path(path_of(v), loaded.names)): v for v in wanted}
    faults = [
        ("is in the checkpoint, but no variable", p) for key, p in sources.items() if key not in targets
    ]
    faults += [
        ("isn't in the checkpoint", path_of(v))
        for key, v in targets.items()
        if key not in sources and (v.trainable or not model)
    ]
    pairs = [
        (v, as_variable(state, sources[key], _dtype_of(v), loaded.opened.makers), path_of(v))
        for key, v in targets.items()
        if key in sources
    ]
    Faults([*faults, *_misfits(pairs, "the model")]).check(
        StateError, "The checkpoint's parameters don't fit the variables", place=loaded.place, remedy=_REMEDY
    )
    with changing("the variables"):
        for target, source, _ in pairs:
            _copied(target, source)


def _dtype_of(variable: Any) -> DType:
    return DTYPES[keras.backend.standardize_dtype(variable.dtype)]


def _misfits(pairs: Sequence[tuple[Any, Tensor, str]], whose: str) -> Iterator[Fault]:
    for target, source, name in pairs:
        if fault := copy_fault(source, tuple(target.shape), _dtype_of(target), whose):
            yield fault, name


def _copied(target: Any, source: Tensor) -> None:
    """Copies a tensor into a variable, block by block."""
    xp, variable = backend("tensorflow"), getattr(target, "value", target)
    variable = target.value if isinstance(target, keras.Variable) else target
    for index in blocks(source):
        block = source.read(index).astype(DTYPES[variable.dtype.name])
        if block.shape == source.shape:
            variable.assign(xp.asarray(block))
        else:
            variable[index].assign(xp.asarray(block))


def hints_of(call: Call, variables: Variables) -> CheckpointRef:
    """Returns the ref, with the order of a model's trainable variables where a file of Keras numbers them."""
    return replace(call.ref, param_names=order_of(call.path, variables, call.ref.param_names))


def maps_to(
    of: Callable[[Variables], Sequence[Any]], call: Call, variables: Variables
) -> tuple[StateMap, ...]:
    """Returns the maps to a model that is there; `of` gives the variables that count."""
    return maps_of(call.map, call.config, builds=False, model=model_of(of(variables), call.names))


def _names(
    of: Callable[[Variables], Sequence[Any]], opened: OpenState, call: Call, variables: Variables
) -> tuple[Mapping[str, str], Iterable[str]]:
    return call.names or ({} if call.map else renumbered(opened, of(variables))), ()


def _shapes(variables: Variables, names: Mapping[str, str]) -> dict[str, tuple[Shape, DType]]:
    return {renamed_path(path_of(v), names): (tuple(v.shape), _dtype_of(v)) for v in _trainable(variables)}


def _arguments(state: TrainState) -> frozenset[str]:
    names = (name for schema, variant in state.optimizer.kinds for name in taken(schema, str(variant)))
    return frozenset(_ARGUMENTS) - frozenset(names)


FRAMEWORK = Framework(
    HOME,
    MAKERS,
    "learning_rate",
    "keras",
    hints=hints_of,
    maps=partial(maps_to, _trainable),
    names=partial(_names, _trainable),
    shapes=_shapes,
    build=_optimizer,
    arguments=_arguments,
    renames=False,
)
