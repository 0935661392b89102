"""Changes of a run that is loaded straight into a model: those of a conversion that make sense there, and new parts.

What a user says of both stands in `statekit.conversion.changing.changes`; here it is taken out of the overrides of a
`load_optimizer`. Parameters that the checkpoint lacks, or has in another shape, begin anew where they are named.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from statekit.conversion.changing.changed import changed
from statekit.conversion.changing.changes import Change, Changes, option, patterns
from statekit.conversion.changing.next_update import Trial
from statekit.errors import Faults, UsageError, some
from statekit.optim.run import counts_apart, steps_for
from statekit.state.exactness import Exactness
from statekit.state.factoring import map_entries
from statekit.state.options import FACTOR_MAP, rule_of
from statekit.state.schema import load_schema
from statekit.state.train_state import BY_NAME, Axis, Group, Kind, Rule, TrainState
from statekit.tensors.tensor import DType, Filled, Shape, Tensor
from statekit.tensors.tree import walk

AT_LOADING = ("slot_policy", "drop_slots_of", "loss_scale")
"""The fields of `Changes` that an optimizer may be loaded with."""
INIT_MISSING = "init_missing"
_PERIODS = "gradient_accumulation_steps"
Model = Mapping[str, tuple[Shape, DType]]
"""Shape and dtype of each parameter that an optimizer is asked to move, by name."""


def changed_at_loading(
    state: TrainState, overrides: Mapping[str, Any], model: Model, makers: Iterable[str] = ()
) -> tuple[TrainState, dict[str, Any]]:
    """Returns a state with the changes that stand among overrides, and the other overrides.

    Args:
        state: The state, under the model's names.
        overrides: Name -> value: `slot_policy`, `drop_slots_of` and `loss_scale` as in `statekit.convert`;
            `init_missing`, patterns of parameters that begin anew where the checkpoint lacks them or has another shape.
        model: What the model has.
        makers: The variants that may have made the state, where it doesn't say which.

    Raises:
        UsageError: One can't be made; names it.
    """
    if _gradients_wait(state):  # the optimizer that is made begins with an update of its own
        warnings.warn(
            "the run was saved between two updates: gradients that wait for the next are left behind; "
            "a checkpoint after an update has none",
            stacklevel=3,
        )
    rest = {name: value for name, value in overrides.items() if name not in (*AT_LOADING, INIT_MISSING)}
    given = {name: value for name, value in overrides.items() if name in AT_LOADING}
    if given and (asked := Changes.of(given)) is not None:
        asked = replace(asked, drop_slots_of=tuple(map(_as_path, asked.drop_slots_of)))
        state, _ = changed(state, asked, makers)
    if INIT_MISSING in overrides and (begins := patterns(INIT_MISSING, overrides[INIT_MISSING])):
        state, named = with_missing(state, model, begins)
        counted = "" if state.counts.behind else f", at a count of {state.counts.updates} updates"
        warnings.warn(f"slots begin anew{counted}: {some(named)}", stacklevel=3)
    return state, rest


def _gradients_wait(state: TrainState) -> bool:
    """Tells whether a run was saved while it accumulated gradients: by Keras' iterations, or Optax' mini_step."""
    periods = {group.hyperparameters.get(_PERIODS) for group in state.optimizer.groups} - {None}
    calls = [home.get("iteration") for home in state.extra.values() if isinstance(home, Mapping)]
    return any(
        type(call) is int and type(period) is int and period > 0 and call % period
        for call in calls
        for period in periods
    ) or any(
        path[-1:] == ("mini_step",) and isinstance(leaf, Tensor) and not leaf.shape and bool(leaf.read())
        for path, leaf in walk(state.extra)
    )


def _as_path(name: str) -> str:
    return name.replace(".", "/")


def with_missing(state: TrainState, model: Model, patterns: Iterable[str]) -> tuple[TrainState, list[str]]:
    """Returns a state in which what is missing or resized has slots as at first, and the names of these parameters.

    Args:
        state: The state; values of what begins anew are zeros in it.
        model: What the model has.
        patterns: Which of its parameters may begin anew.

    Raises:
        UsageError: A pattern fits none, or nothing says how one would be moved.
    """
    shapes = {_as_path(path): (path, param.shape) for path, param in state.params.items()}
    absent = {
        name: shapes.get(_as_path(name), (_as_path(name), None))[0]
        for name, (shape, _) in model.items()
        if shapes.get(_as_path(name), ("", None))[1] != shape
    }
    chosen: dict[str, str] = {}
    for pattern in patterns:
        fitting = [name for name in absent if fnmatchcase(_as_path(name), _as_path(pattern))]
        if not fitting:
            raise UsageError(
                "No parameter of that name is missing in the checkpoint, or has another shape there.",
                place=INIT_MISSING,
                found=pattern,
                expected=some([*absent]) if absent else "nothing: all are there",
            )
        chosen.update({name: absent[name] for name in fitting})
    moving = [group for group in state.optimizer.groups if group.paths]
    if len(moving) != 1:
        raise UsageError(
            "The run has several groups, and nothing says which is to move what begins anew.",
            place=INIT_MISSING,
            found=f"{len(moving)} groups; {some([*chosen])}",
            expected="one group",
            remedy="add a group for it to the optimizer after loading",
        )
    for name, path in chosen.items():
        state = _begun(state, moving[0], path, *model[name])
    return state, [*chosen]


def begun_from(state: TrainState, model: TrainState) -> tuple[TrainState, Change]:
    """Returns a state with what a model has beside it: its values, and slots as before a first update.

    Buffers of the run stay as they are, where the model's file doesn't tell them from parameters.

    Raises:
        UsageError: The model has nothing that is missing, or nothing says how it would be moved; or it has buffers
            that the run lacks, or has in other shapes.
    """
    buffers = {_as_path(name): leaf for name, leaf in (state.extra.get("buffers") or {}).items()}
    has, faults = dict[str, tuple[Shape, DType]](), Faults()
    for path, param in model.params.items():
        buffer = buffers.get(_as_path(path))
        if buffer is None and param.dtype.kind not in "biu":
            has[path] = param.shape, param.dtype
        elif buffer is None:
            faults.add(f"is in {param.dtype.name}: a buffer that the run lacks", path)
        elif buffer.shape != param.shape:
            faults.add(f"is a buffer of shape {param.shape}, in the run {buffer.shape}", path)
    faults.check(
        UsageError,
        "Buffers can't begin anew",
        place=option(INIT_MISSING),
        remedy="save the model's parameters alone: dict(model.named_parameters())",
    )
    state, named = with_missing(state, has, ["*"])
    paths = {_as_path(path): path for path in state.params}
    values = {paths[_as_path(name)]: model.params[name] for name in named}
    counted = "" if state.counts.behind else f", at a count of {state.counts.updates} updates"
    reason = f"{len(named)} parameters are the model's own, and their slots begin anew{counted}"
    if buffers:
        reason += f"; all {len(buffers)} buffers stay the run's"
    change = Change(option(INIT_MISSING), reason, tuple(values), Exactness.LOSSY)
    return replace(state, params={**state.params, **values}), change


def _begun(state: TrainState, old: Group, path: str, shape: Shape, dtype: DType) -> TrainState:
    """Returns a state with a parameter whose slots have the values that its rule begins with."""
    schema_name, variant = state.optimizer.kind(old)
    group = _with_path(state.optimizer.groups, old.paths[0], path)
    rule = Rule((Axis.NONE,) * len(shape), "given")
    if schema_name == "adafactor":
        factor_map = group.hyperparameters.get(FACTOR_MAP)
        entries = () if factor_map is None else map_entries(factor_map, FACTOR_MAP)
        labels, why = rule_of(path, shape, str(variant), group.hyperparameters, entries)
        if labels is None:
            raise UsageError("Nobody can say how a new parameter is factored.", place=path, found=why)
        rule = labels
    param = Filled(shape, dtype, 0.0, "the model's own")
    slots = _first_slots((schema_name, variant), group, path, param, rule, "begins anew, as asked")
    groups = tuple(
        group if other.paths[:1] == old.paths[:1] and other.paths else other
        for other in state.optimizer.groups
    )
    apart = {path: 0} if counts_apart(schema_name, str(variant)) else {}
    return replace(
        state,
        params={**state.params, path: param},
        slots={**state.slots, path: slots},
        rules={**state.rules, path: rule} if schema_name == "adafactor" else state.rules,
        optimizer=replace(state.optimizer, groups=groups),
        counts=replace(state.counts, behind={**state.counts.behind, **apart}),
    )


def _first_slots(
    kind: Kind, group: Group, path: str, param: Tensor, rule: Rule, why: str
) -> dict[str, Tensor]:
    """Returns the slots of a parameter as its rule begins with them."""
    schema, variant = load_schema(kind[0]), str(kind[1])
    alone = replace(group, paths=(path,), schema=None, variant=None)
    small = Trial(schema, variant, steps_for(*kind), alone, rule, 0, param.dtype).begun()[1][path]
    faults = Faults(
        (f"begins with {schema.slots[name].init}, which its values would have to tell", f"{path}/{name}")
        for name in small
        if not isinstance(schema.slots[name].init, (int, float))
    )
    faults.check(UsageError, f"Slots of {schema.name} can't begin anew at loading", place=INIT_MISSING)
    slots: dict[str, Tensor] = {}
    for name, begins in small.items():
        form = schema.slots[name].shape
        whole = param.shape if form == "parameter" else tuple(begins.shape)
        whole = rule.slot_shape(name, param.shape) if form in ("row", "column") else whole
        slots[name] = Filled(whole, begins.dtype, float(schema.slots[name].init or 0), why)
    return slots


def with_first_slots(state: TrainState) -> TrainState:
    """Returns a state in which a parameter that had no update yet has the slots that its rule begins with.

    Where each parameter counts for itself, the originals make slots in the first update that has a gradient for it.

    Raises:
        UsageError: Values of a parameter would tell them.
        UnknownRuleError: A hyperparameter is unknown.
    """
    first: dict[str, dict[str, Tensor]] = {}
    for group in state.optimizer.groups:
        schema, variant = state.optimizer.kind(group)
        if not counts_apart(schema, str(variant)):
            continue
        for path in group.paths:
            if not state.slots.get(path) and state.counts.behind.get(path) == 0:
                param = state.params[path]
                rule = state.rules.get(path) or Rule((Axis.NONE,) * len(param.shape), "given")
                first[path] = _first_slots(
                    (schema, variant), group, path, param, rule, "it had no update yet"
                )
    return replace(state, slots={**state.slots, **first})


def _with_path(groups: Iterable[Group], first: str, path: str) -> Group:
    """Returns a group with one more parameter, of which all is said that is the same of the others by path."""
    group = next(group for group in groups if first in group.paths)
    settings = dict(group.hyperparameters)
    for name, value in settings.items():
        if not isinstance(value, Mapping) or name not in BY_NAME or path in value:
            continue
        values = list(value.values())
        if any(value != values[0] for value in values):
            raise UsageError(
                "Each parameter has its own value of a hyperparameter, and a new parameter has none.",
                place=INIT_MISSING,
                found=f"{name}, {path}",
                remedy=f"say it of all: {name}={{...}}",
            )
        settings[name] = {**value, **({path: values[0]} if values else {})}
    paths = group.paths if path in group.paths else (*group.paths, path)
    return replace(group, paths=paths, hyperparameters=settings)
