"""Resuming in Keras from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import keras

from statekit.arrays.backend import backend
from statekit.conversion.changing.at_loading import changed_at_loading, with_first_slots
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.model_settings import with_beside
from statekit.conversion.open_state import OpenState, changing, state_to_load
from statekit.conversion.registry import detect_container
from statekit.dropin.by_name import renamed_path
from statekit.dropin.matching import Given, copy_fault, match_faults, require_resumable
from statekit.dropin.overrides import overridden
from statekit.errors import Faults, StateError, UnknownRuleError, UsageError
from statekit.maps.links import carried_to_load
from statekit.maps.model_map import maps_of
from statekit.maps.modules import TargetModel
from statekit.state.exactness import Level
from statekit.state.options import FACTOR, FACTOR_MAP, KERAS, known_options, stored_rate, taken
from statekit.state.stored_params import as_params, as_variable
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensorflow.naming import normal, partners, path_of, twice
from statekit.tensorflow.optimizer import Rate, SchemaOptimizer
from statekit.tensorflow.optimizers import LAMB, LANS, Adafactor, AdamW, ScaledAdam
from statekit.tensorflow.spec import by_keras
from statekit.tensors.tensor import DTYPES, DType, Tensor, blocks, dtype_named

Variables: TypeAlias = Iterable[Any] | keras.Model
Fault: TypeAlias = tuple[str, str]

OPTIMIZERS: Mapping[str, Callable[..., SchemaOptimizer]] = {
    kind.SCHEMA: kind for kind in (Adafactor, ScaledAdam, LANS, LAMB, AdamW)
}
"""Schema -> the class that goes on with it."""
HOME = "statekit.tensorflow"
MAKERS = {schema: kind.__name__ for schema, kind in OPTIMIZERS.items()}
KERAS_FILES = ("keras", "keras-h5")
"""Containers that number a model's variables."""
KERAS_LAYOUTS = ("keras", "statekit-keras", "tf2-keras", "tf2-statekit")
"""Layouts whose names are paths of Keras' variables."""
_ARGUMENTS = ("jit_compile", "name", *KERAS)
"""Arguments of the optimizers that are no hyperparameters; those of Keras' base class unless the variant has them."""
_REMEDY = "names must be those of the checkpoint, or given: names={variable.path: name, ...}"


def load_optimizer(
    path: str | PathLike[str],
    variables: Variables,
    learning_rate: Rate = None,
    *,
    variant: str | None = None,
    names: Mapping[str, str] | None = None,
    param_names: Sequence[str] | None = None,
    names_from: Literal["config"] | None = None,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    map: str | None = None,
    config: Mapping[str, Any] | None = None,
    require: Level = "rounding",
    accept_damaged: bool = False,
    follow_links: bool = False,
    budget: int | None = None,
    **overrides: Any,
) -> SchemaOptimizer:
    """Builds the optimizer that a checkpoint records, and loads its state by the variables' names.

    Args:
        path: Anything statekit reads: a T5X run or step folder, a TensorFlow or PyTorch file, a statekit folder, ...
        variables: `model.trainable_variables`, or the model; their order doesn't matter.
        learning_rate: A number, a schedule (of `iterations`) or a callable; as the checkpoint has it if None.
        variant: Whose rule goes on, where the file can't tell.
        names: Names in the checkpoint by the variables' paths, or by those of layers, where they differ.
        param_names: Names in the checkpoint in the order of the optimizer's parameters, where it only numbers them; of
            a model and a file of Keras, the model knows them.
        names_from: `config`: that order from the architecture that config.json beside a Trainer's weights names, built
            without weights; it needs statekit[hf].
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names, as in its configuration.
        map: From the checkpoint's model to that of another codebase, e.g. `t5x-t5-scanned:t5x-t5-unscanned`, or from
            the modules of one framework to another's: `torch:keras`; `names` are of its names then.
        config: What the map needs to know of the model and no checkpoint says, e.g. `{"num_heads": 12}`.
        require: The least exactness that a map may have for slots, as in `statekit.convert`.
        accept_damaged: Whether to go on with what its manifest contradicts, and warn of each place.
        follow_links: Whether to read what links out of the checkpoint lead to.
        budget: Bytes that may be held of headers, pickles and trees, and work in proportion; 512 MiB if None.
        **overrides: Hyperparameters for all parameters, which outweigh the checkpoint's, and arguments of the
            optimizer; `step_offset="reset"` lets the second moment's decay start anew, as finetuning does. What can be
            overridden is the law that `statekit.dropin.overrides.overridden` states. Beside them stand
            `slot_policy`, `drop_slots_of` and `loss_scale` as in `statekit.convert`, and `init_missing=["head.*"]`:
            parameters that begin anew, as the checkpoint lacks them or has them in another shape.

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
    order = order_of(Path(path), variables, param_names)
    hints = CheckpointRef(
        hparams=hparams or {},
        variant=variant,
        param_names=order,
        names_from=names_from,
        accept_damaged=accept_damaged,
        follow_links=follow_links,
        budget=budget,
    )
    with state_to_load(Path(path), step=step, hints=hints) as opened:
        maps = maps_of(map, config, builds=False, model=model_of(_trainable(variables), names))
        state = carried_to_load(as_params(opened.state)[0], with_beside(maps, opened), require)
        require_resumable(state, path, HOME, MAKERS, "Keras moves the variables of a model by one")
        names = names or ({} if map else renumbered(opened, _trainable(variables)))
        model_has = {
            renamed_path(path_of(v), names): (tuple(v.shape), dtype_named(str(v.dtype)))
            for v in _trainable(variables)
        }
        state, overrides = changed_at_loading(state, overrides, model_has, opened.makers)
        schema, variant = state.optimizer.schema, str(state.optimizer.variant)
        arguments = {
            k: v for k, v in overrides.items() if k in _ARGUMENTS and k not in taken(schema, variant)
        }
        said = {k: v for k, v in overrides.items() if k not in arguments}
        state = overridden(state, said, "learning_rate", lambda schema: f"{HOME}.{MAKERS[schema]}(...)")
        state = with_first_slots(state)
        pairs = _moved(state, variables, names or {}, path)
        optimizer = built(state, pairs, learning_rate, arguments, path)
        targets = _targets(optimizer, state, path)
        for target, source in targets:
            _copied(target, source)
        periods = optimizer.gradient_accumulation_steps or 1
        optimizer._iterations.assign(state.counts.updates * periods)
    return optimizer


def order_of(path: Path, variables: Variables, given: Sequence[str] | None) -> Sequence[str] | None:
    """Returns the names given, or those of a model's trainable variables if a file of Keras numbers them."""
    if given is not None:
        return given
    if not isinstance(variables, keras.Model) or detect_container(path)[0].name not in KERAS_FILES:
        return None
    return tuple(map(path_of, variables.trainable_variables))


def renumbered(opened: OpenState, variables: Sequence[Any]) -> dict[str, str]:
    """Returns names in one of Keras' own files by the variables' paths, where Keras has numbered layers anew since."""
    mine, theirs = [path_of(variable) for variable in variables], list(opened.state.params)
    if opened.layout not in KERAS_LAYOUTS or {*mine} <= {*theirs}:
        return {}
    pairs = partners(mine, theirs)
    return {path: name for path, name in pairs.items() if path != name}


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
    schema, variant = state.optimizer.schema, str(state.optimizer.variant)
    groups = [group for group in state.optimizer.groups if any(path in pairs for path in group.paths)]
    said = [known_options(schema, variant, group.hyperparameters) for group in groups]
    names = {*taken(schema, variant)} - {FACTOR_MAP}
    missing = sorted({name for one in said for name in names if name not in one})
    if missing:
        raise UnknownRuleError(
            "The checkpoint doesn't say what the steps need to know.",
            place=place,
            expected=", ".join(missing),
            remedy=f"give load_optimizer what the run was configured with: {missing[0]}=..., or hparams={{...}}",
        )
    common = {n: v for n, v in said[0].items() if all(n in one and one[n] == v for one in said)}
    apart = by_keras(schema, variant).keys() | common.keys()
    different = [
        {"paths": [p for p in g.paths if p in pairs], **{n: v for n, v in one.items() if n not in apart}}
        for g, one in zip(groups, said, strict=True)
    ]
    options: dict[str, Any] = {
        **common,
        "groups": different if len(groups) > 1 else (),
        "rules": {path: _rule(state, path).to_json() for path in pairs if schema == "adafactor"},
        "names": {path_of(v): path for path, v in pairs.items() if path_of(v) != path},
        "missed": {p: state.counts.updates - n for p, n in state.counts.behind.items() if p in pairs},
    }
    if learning_rate is None:
        learning_rate, factors = _rates([stored_rate(group.hyperparameters) for group in groups], place)
        if {*factors} != {1.0}:
            options["groups"] = [
                {**group, FACTOR: factor} for group, factor in zip(different, factors, strict=True)
            ]
    optimizer = OPTIMIZERS[schema](learning_rate, variant=variant, **{**options, **arguments})
    optimizer.build(list(pairs.values()))
    return optimizer


def _rates(stored: Sequence[Any], place: object) -> tuple[Any, list[float]]:
    """Returns the learning rate of an optimizer, and what each of its groups multiplies it by.

    Raises:
        UnknownRuleError: Some groups have a rate, and others have none.
    """
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


def _moved(
    state: TrainState, variables: Variables, names: Mapping[str, str], place: object
) -> dict[str, Any]:
    """Returns the variable of each parameter that the recorded run moved."""
    given = _trainable(variables)
    stored = {normal(path): path for path in state.params}
    shapes = {normal(path): tensor.shape for path, tensor in state.params.items()}
    moved = {normal(path): path for group in state.optimizer.groups for path in group.paths}
    wanted = {path_of(v): normal(renamed_path(path_of(v), names)) for v in given}
    mine = {wanted[path_of(v)]: v for v in given}
    faults = [("stands twice among the variables", path) for path in twice(map(path_of, given))]
    faults += match_faults(
        shapes, moved, {key: Given(path_of(v), tuple(v.shape)) for key, v in mine.items()}, "variables"
    )
    faults += [
        ("is no variable, but has a name", path)
        for path in names
        if not any(f"{one}/".startswith(f"{path}/") for one in wanted)
    ]
    faults += [
        ("was frozen in the recorded run: set trainable = False, or leave it out", stored[key])
        for key in mine
        if key in stored and key not in moved
    ]
    Faults(faults).check(StateError, "The checkpoint doesn't fit the variables", place=place, remedy=_REMEDY)
    return {path: mine[key] for key, path in moved.items()}


def model_of(variables: Iterable[Any], names: Mapping[str, str] | None) -> TargetModel:
    """Returns the model that variables are of, by their paths in the checkpoint."""
    return TargetModel(frozenset(normal(renamed_path(path_of(v), names or {})) for v in variables))


def _trainable(variables: Variables) -> list[Any]:
    if isinstance(variables, keras.Model):
        return list(variables.trainable_variables)
    given = list(variables)
    if not all(hasattr(v, "assign") and hasattr(v, "name") for v in given):
        raise UsageError("load_optimizer needs variables.", expected="model.trainable_variables")
    return [v for v in given if v.trainable]


def _targets(optimizer: SchemaOptimizer, state: TrainState, place: object) -> list[tuple[Any, Tensor]]:
    """Returns each variable of an optimizer with what is copied into it."""
    kept = (*optimizer.slots().items(), *optimizer.averages().items())
    mine = {(path, name): v for path, arrays in kept for name, v in arrays.items()}
    groups = [group for group in state.optimizer.groups if any((p in optimizer.slots()) for p in group.paths)]
    theirs = {
        (path, name): t
        for path, arrays in state.slots.items()
        for name, t in arrays.items()
        if path in optimizer.slots()
    }
    for i, group in enumerate(groups):
        theirs |= {(f"groups/{i}", name): tensor for name, tensor in group.slots.items()}
    faults = [("isn't in the checkpoint", " ".join(key)) for key in mine if key not in theirs]
    faults += [
        ("is in the checkpoint, but the optimizer has no use for it", " ".join(k))
        for k in theirs
        if k not in mine
    ]
    pairs = [(mine[key], theirs[key], " ".join(key)) for key in mine if key in theirs]
    Faults([*faults, *_misfits(pairs, "the optimizer")]).check(
        StateError, "The checkpoint's slots don't fit the optimizer", place=place, remedy=_REMEDY
    )
    return [(target, source) for target, source, _ in pairs]


def load_params(
    path: str | PathLike[str],
    variables: Variables,
    *,
    names: Mapping[str, str] | None = None,
    param_names: Sequence[str] | None = None,
    names_from: Literal["config"] | None = None,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    map: str | None = None,
    config: Mapping[str, Any] | None = None,
    require: Level = "rounding",
    accept_damaged: bool = False,
    follow_links: bool = False,
    budget: int | None = None,
) -> None:
    """Copies a checkpoint's parameters into variables, by name, in place; nothing is copied unless all fit.

    Values are widened where the variable's dtype is wider, never narrowed.

    Args:
        path: Anything statekit reads.
        variables: A model, whose trainable variables must all be in the checkpoint; or the variables that must be.
        names: Names in the checkpoint by the variables' paths, or by those of layers, where they differ.
        param_names: Names in the checkpoint in the order of the optimizer's parameters, where it only numbers them; of
            a model and a file of Keras, the model knows them.
        names_from: `config`: that order from the architecture that config.json beside a Trainer's weights names, built
            without weights; it needs statekit[hf].
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names.
        map: As in `load_optimizer`.
        config: As in `load_optimizer`.
        require: As in `load_optimizer`; for parameters alone.
        accept_damaged: As in `load_optimizer`.
        follow_links: As in `load_optimizer`.
        budget: As in `load_optimizer`.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says. Of large files that may be noticed when
            other values were copied already; then the error says so.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    model = isinstance(variables, keras.Model)
    wanted = list(variables.variables if isinstance(variables, keras.Model) else variables)
    order = order_of(Path(path), variables, param_names)
    hints = CheckpointRef(
        hparams=hparams or {},
        variant=None,
        param_names=order,
        names_from=names_from,
        accept_damaged=accept_damaged,
        follow_links=follow_links,
        budget=budget,
    )
    with state_to_load(Path(path), step=step, hints=hints) as opened:
        names = names or ({} if map else renumbered(opened, wanted))
        maps = maps_of(map, config, builds=False, model=model_of(wanted, names))
        state = carried_to_load(as_params(opened.state)[0], with_beside(maps, opened), require, slots=False)
        sources = {normal(p): p for p in state.params}
        targets = {normal(renamed_path(path_of(v), names or {})): v for v in wanted}
        faults = [
            ("is in the checkpoint, but no variable", p) for key, p in sources.items() if key not in targets
        ]
        faults += [
            ("isn't in the checkpoint", path_of(v))
            for key, v in targets.items()
            if key not in sources and (v.trainable or not model)
        ]
        pairs = [
            (v, as_variable(state, sources[key], _dtype_of(v), opened.makers), path_of(v))
            for key, v in targets.items()
            if key in sources
        ]
        Faults([*faults, *_misfits(pairs, "the model")]).check(
            StateError, "The checkpoint's parameters don't fit the variables", place=path, remedy=_REMEDY
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
