"""Resuming in Keras from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import keras

from statekit.arrays.backend import backend
from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import OpenState, open_state
from statekit.conversion.registry import detect_container
from statekit.errors import StateError, UnknownRuleError, UsageError, fault_list
from statekit.optim.run import steps_for
from statekit.state.masters import as_params
from statekit.state.options import RATE_NAMES, offered
from statekit.state.step_offset import with_offset
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensorflow.naming import normal, partners, path_of, twice
from statekit.tensorflow.optimizer import Engine, Rate
from statekit.tensorflow.optimizers import LAMB, LANS, Adafactor, AdamW, ScaledAdam
from statekit.tensorflow.settings import by_keras
from statekit.tensors.tensor import DTYPES, Tensor, blocks, widens

Variables: TypeAlias = Iterable[Any] | keras.Model
Fault: TypeAlias = tuple[str, str]

OPTIMIZERS: Mapping[str, Callable[..., Engine]] = {
    kind.SCHEMA: kind for kind in (Adafactor, ScaledAdam, LANS, LAMB, AdamW)
}
"""Schema -> the class that goes on with it."""
KERAS_FILES = ("keras", "keras-h5")
"""Containers that number a model's variables."""
KERAS_LAYOUTS = ("keras", "statekit-keras", "tf2-keras", "tf2-statekit")
"""Layouts whose names are paths of Keras' variables."""
_SHOWN = 40


def load_optimizer(
    path: str | PathLike[str],
    variables: Variables,
    learning_rate: Rate = None,
    *,
    variant: str | None = None,
    names: Mapping[str, str] | None = None,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Engine:
    """Builds the optimizer that a checkpoint records, and loads its state by the variables' names.

    Args:
        path: Anything statekit reads: a T5X run or step folder, a TensorFlow or PyTorch file, a statekit folder, ...
        variables: `model.trainable_variables`, or the model; their order doesn't matter.
        learning_rate: A number, a schedule (of `iterations`) or a callable; as the checkpoint has it if None.
        variant: Whose rule goes on, where the file can't tell.
        names: Names in the checkpoint by the variables' paths, where they differ.
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names, as in its configuration.
        **overrides: Canonical hyperparameters for all parameters, which outweigh the checkpoint's, and arguments of
            the optimizer; `step_offset="reset"` lets the second moment's decay start anew, as finetuning does.

    Returns:
        The optimizer, built for the variables.

    Raises:
        StateError: Variables are missing, unknown, or of other shapes; or no optimizer here follows the recorded
            rule; lists every fault.
        UnknownRuleError: The checkpoint doesn't say what a step needs to know.
        UsageError: An option that doesn't exist or can't be.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    hints = Hints(dict(hparams or {}), variant, _order(Path(path), variables))
    with open_state(Path(path), step=step, hints=hints) as opened:
        state = _checked(as_params(opened.state)[0], path)
        names = names or _renumbered(opened, _trainable(variables))
        offset = overrides.pop("step_offset", "keep")
        state = with_offset(state, offset)[0]
        pairs = _moved(state, variables, names or {}, path)
        optimizer = built(state, pairs, learning_rate, overrides, path)
        targets = _targets(optimizer, state, path)
        for target, source in targets:
            _copied(target, source)
        periods = optimizer.gradient_accumulation_steps or 1
        optimizer._iterations.assign(state.counts.updates * periods)
    return optimizer


def _order(path: Path, variables: Variables) -> tuple[str, ...] | None:
    """Returns the names of a model's trainable variables if a file of Keras numbers them; None for other files."""
    if not isinstance(variables, keras.Model) or detect_container(path)[0].name not in KERAS_FILES:
        return None
    return tuple(map(path_of, variables.trainable_variables))


def _renumbered(opened: OpenState, variables: Sequence[Any]) -> dict[str, str]:
    """Returns names in one of Keras' own files by the variables' paths, where Keras has numbered layers anew since."""
    mine, theirs = [path_of(variable) for variable in variables], list(opened.state.params)
    if opened.layout not in KERAS_LAYOUTS or {*mine} <= {*theirs}:
        return {}
    found = partners(mine, theirs)
    return {path: name for path, name in found.items() if path != name}


def _checked(state: TrainState, place: object) -> TrainState:
    if state.optimizer.schema not in OPTIMIZERS:
        raise StateError(
            "statekit.tensorflow has no optimizer that goes on with this state.",
            place=place,
            expected=", ".join(OPTIMIZERS),
            found=state.optimizer.schema,
        )
    steps_for(state.optimizer.schema, state.optimizer.variant)
    if not state.slots:
        raise StateError(
            "The checkpoint holds parameters, but no optimizer state.",
            place=place,
            remedy="load_params reads it; begin with a new optimizer",
        )
    return state


def built(
    state: TrainState,
    pairs: Mapping[str, Any],
    learning_rate: Rate,
    overrides: Mapping[str, Any],
    place: object,
) -> Engine:
    """Returns an optimizer with the state's hyperparameters, rules and groups."""
    schema, variant = state.optimizer.schema, str(state.optimizer.variant)
    groups = [group for group in state.optimizer.groups if any(path in pairs for path in group.paths)]
    known = offered(schema, variant)
    missing = sorted({n for g in groups for n in known if n not in g.hyperparameters and n not in overrides})
    missing = [name for name in missing if name not in ("factor_map", "logical_factor_rules")]
    if missing:
        raise UnknownRuleError(
            "The checkpoint doesn't say what the steps need to know.",
            place=place,
            expected=", ".join(missing),
            remedy=f"give load_optimizer what the run was configured with: {missing[0]}=..., or hparams={{...}}",
        )
    said = [{n: g.hyperparameters[n] for n in known if n in g.hyperparameters} for g in groups]
    for each in said:
        each.pop("factor_map", None)
        each.pop("logical_factor_rules", None)
    common = {n: v for n, v in said[0].items() if all(n in one and one[n] == v for one in said)}
    rates: list[Any] = [
        next((g.hyperparameters[n] for n in RATE_NAMES if n in g.hyperparameters), None) for g in groups
    ]
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
    given = learning_rate if learning_rate is not None else rates[0]
    if learning_rate is None and len({*rates}) > 1:
        options["groups"] = [
            {**group, "learning_rate_factor": rate / rates[0]}
            for group, rate in zip(different, rates, strict=True)
        ]
    optimizer = OPTIMIZERS[schema](given, variant=variant, **{**options, **overrides})
    optimizer.build(list(pairs.values()))
    return optimizer


def _rule(state: TrainState, path: str) -> Rule:
    """Returns a parameter's rule; one that nobody knows is assumed to be NONE, as its slots are."""
    return state.rules.get(path) or Rule((Axis.NONE,) * len(state.params[path].shape), "assumed")


def _moved(
    state: TrainState, variables: Variables, names: Mapping[str, str], place: object
) -> dict[str, Any]:
    """Returns the variable of each parameter that the recorded run moved."""
    given = _trainable(variables)
    recorded = {normal(path): path for path in state.params}
    moved = [path for group in state.optimizer.groups for path in group.paths]
    wanted = {path_of(v): normal(names.get(path_of(v), path_of(v))) for v in given}
    found = {recorded[wanted[path_of(v)]]: v for v in given if wanted[path_of(v)] in recorded}
    faults = [("stands twice among the variables", path) for path in twice(map(path_of, given))]
    faults += [
        ("is in the checkpoint, but not among the variables", path) for path in moved if path not in found
    ]
    faults += [("isn't in the checkpoint", path) for path, name in wanted.items() if name not in recorded]
    faults += [("is no variable, but has a name", path) for path in names if path not in wanted]
    faults += [
        ("was frozen in the recorded run: set trainable = False, or leave it out", path)
        for path in found
        if path not in moved
    ]
    faults += [
        (f"has shape {tuple(v.shape)}, in the checkpoint {state.params[path].shape}", path)
        for path, v in found.items()
        if tuple(v.shape) != state.params[path].shape
    ]
    _refuse("The checkpoint doesn't fit the variables", faults, place)
    return {path: found[path] for path in moved}


def _trainable(variables: Variables) -> list[Any]:
    if isinstance(variables, keras.Model):
        return list(variables.trainable_variables)
    found = list(variables)
    if not all(hasattr(v, "assign") and hasattr(v, "name") for v in found):
        raise UsageError("load_optimizer needs variables.", expected="model.trainable_variables")
    return [v for v in found if v.trainable]


def _targets(optimizer: Engine, state: TrainState, place: object) -> list[tuple[Any, Tensor]]:
    """Returns each variable of an optimizer with what is copied into it."""
    held = (*optimizer.slots().items(), *optimizer.averages().items())
    mine = {(path, name): v for path, own in held for name, v in own.items()}
    groups = [group for group in state.optimizer.groups if any((p in optimizer.slots()) for p in group.paths)]
    theirs = {
        (path, name): t
        for path, own in state.slots.items()
        for name, t in own.items()
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
    _refuse("The checkpoint's slots don't fit the optimizer", [*faults, *_misfits(pairs)], place)
    return [(target, source) for target, source, _ in pairs]


def load_params(
    path: str | PathLike[str],
    variables: Variables,
    *,
    names: Mapping[str, str] | None = None,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
) -> None:
    """Copies a checkpoint's parameters into variables, by name, in place; nothing is copied unless all fit.

    Values are widened where the variable's dtype is wider, never narrowed.

    Args:
        path: Anything statekit reads.
        variables: A model, whose trainable variables must all be in the checkpoint; or the variables that must be.
        names: Names in the checkpoint by the variables' paths, where they differ.
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    model = isinstance(variables, keras.Model)
    held = list(variables.variables if isinstance(variables, keras.Model) else variables)
    hints = Hints(dict(hparams or {}), None, _order(Path(path), variables))
    with open_state(Path(path), step=step, hints=hints) as opened:
        names = names or _renumbered(opened, held)
        sources = {normal(p): (p, t) for p, t in as_params(opened.state)[0].params.items()}
        targets = {normal((names or {}).get(path_of(v), path_of(v))): v for v in held}
        faults = [
            ("is in the checkpoint, but no variable", p)
            for key, (p, _) in sources.items()
            if key not in targets
        ]
        faults += [
            ("isn't in the checkpoint", path_of(v))
            for key, v in targets.items()
            if key not in sources and (v.trainable or not model)
        ]
        pairs = [(v, sources[key][1], path_of(v)) for key, v in targets.items() if key in sources]
        _refuse("The checkpoint's parameters don't fit the variables", [*faults, *_misfits(pairs)], path)
        for target, source, _ in pairs:
            _copied(target, source)


def _misfits(pairs: Sequence[tuple[Any, Tensor, str]]) -> Iterator[Fault]:
    for target, source, name in pairs:
        mine = DTYPES[keras.backend.standardize_dtype(target.dtype)]
        if tuple(target.shape) != source.shape:
            yield f"has shape {source.shape} in the checkpoint, expected {tuple(target.shape)}", name
        elif not widens(source.dtype, mine):
            yield f"is {source.dtype} in the checkpoint and would be narrowed to {mine}", name


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


def _refuse(subject: str, faults: Sequence[Fault], place: object) -> None:
    if faults:
        more = f"\n    and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise StateError(
            f"{subject}: {len(faults)} faults.",
            place=place,
            found=fault_list(faults[:_SHOWN]) + more,
            remedy="names must be those of the checkpoint, or given: names={variable.path: name, ...}",
        )
