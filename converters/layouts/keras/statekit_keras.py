"""The layout `statekit-keras`: optimizers of statekit.tensorflow in Keras' files.

    optimizer/vars/iteration, learning_rate, net:dense:kernel:m, groups:0:model_norms ...

Slots have names, with `:` for the slashes of a path; the model's variables are numbered as Keras does it, and found by
the names of their layers. Hyperparameters stand in the config of a `.keras` file; a `.weights.h5` file has none.

Source: statekit/tensorflow/optimizer.py, `save_own_variables`, `get_config`; statekit/tensorflow/spec.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import ManifestRecord, manifest_state, require_optimizer
from statekit.converters.layouts.keras.home import OPTIMIZER, config_of, home_in, home_of
from statekit.converters.layouts.keras.layout import (
    attribute,
    file_tree,
    frozen_of,
    left_out,
    model_tree,
    optimizer_variables,
    saved_order,
    with_config,
)
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.lines import statekit_lines
from statekit.converters.layouts.keras.state import ACCUMULATOR, HOME, ITERATION, RATE, called_by, calls_of
from statekit.converters.layouts.keras.variables import (
    VARIABLES,
    Order,
    Variable,
    by_names,
    is_group,
    snake_case,
    variables,
)
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.constants import variant_constants
from statekit.state.factoring import map_entries, shown_rule
from statekit.state.options import CLASSES, FACTOR, KERAS, LOGICAL, RATE_NAMES, offered, rule_of, stored_rate
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, KnownFrom, Optimizer, Rule, RuleRecord, TrainState
from statekit.tensors.tensor import DTYPES, Tensor, in_memory
from statekit.tensors.typed import Name, Natural, typed

MODULE = "statekit.tensorflow.optimizers"
SEPARATOR = ":"
GROUPS = "groups"
_SCHEMAS = {kind: schema for schema, kind in CLASSES.items()}


class GroupArguments(TypedDict):
    """What is said of a group of parameters; options are held to the optimizer's schema."""

    paths: Sequence[Name]
    learning_rate_factor: NotRequired[float]


class Arguments(TypedDict, total=False):
    """The arguments of an optimizer of statekit.tensorflow that are no options."""

    variant: Name | None
    names: dict[Name, Name]
    missed: dict[Name, Natural]
    rules: dict[Name, RuleRecord]
    groups: Sequence[GroupArguments] | None
    gradient_accumulation_steps: Natural | None


@dataclass(frozen=True)
class Own:
    """Which optimizer of statekit.tensorflow a file is about.

    Attributes:
        kind: Its class.
        config: Its arguments, if the file has them.
    """

    kind: str
    config: Mapping[str, Any] | None = None

    @property
    def schema(self) -> str:
        """Its schema."""
        return _SCHEMAS[self.kind]

    @property
    def usual_name(self) -> str:
        """What it is called unless it was given a name."""
        return snake_case(self.kind)

    def said(self, name: str, usual: Any = None) -> Any:
        """Returns an argument."""
        return (self.config or {}).get(name, usual)

    def variable_of(self, path: str) -> str:
        """Returns the path of the variable that goes by a canonical path."""
        names = self.said("names", {})
        return next((here for here, there in names.items() if there == path), path)


def own_by_config(config: Any) -> Own | None:
    """Returns the optimizer of a model's config; None if it isn't one of statekit.tensorflow."""
    compiled = config.get("compile_config") if isinstance(config, Mapping) else None
    optimizer = compiled.get("optimizer") if isinstance(compiled, Mapping) else None
    if not isinstance(optimizer, Mapping) or not isinstance(optimizer.get("config"), Mapping):
        return None
    package, _, kind = str(optimizer.get("registered_name")).partition(">")
    if package != "statekit" or kind not in _SCHEMAS:
        return None
    config = typed(
        optimizer["config"], Arguments, "config.json", f"These aren't the arguments of {kind}", StateError
    )
    return Own(kind, {**config})


def own_by_name(name: Any, named: Mapping[str, Mapping[str, Tensor]]) -> Own | None:
    """Returns the optimizer that goes by a name, else the only one that has such slots."""
    plain = re.sub(r"_\d+$", "", name) if isinstance(name, str) else ""
    by_name = {snake_case(kind): kind for kind in _SCHEMAS}
    if plain in by_name:
        return Own(by_name[plain])
    slots = {slot for param_slots in named.values() for slot in param_slots} - {ITERATION, RATE, ACCUMULATOR}
    fits = [kind for kind, schema in _SCHEMAS.items() if slots and slots <= load_schema(schema).slots.keys()]
    return Own(fits[0]) if len(fits) == 1 else None


def named_slots(variables: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Returns variables by what they belong to (`""` for the optimizer itself) and their names."""
    named: dict[str, dict[str, Tensor]] = {}
    for key, tensor in variables.items():
        owner, _, name = key.rpartition(SEPARATOR)
        named.setdefault(owner.replace(SEPARATOR, "/"), {})[name] = tensor
    return named


def paths_of(named: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """Returns the parameters that have slots, in the order in which they were written."""
    return [owner for owner in named if owner and not re.fullmatch(rf"{GROUPS}/\d+", owner)]


def own_state(
    optimizer: Own,
    named: Mapping[str, Mapping[str, Tensor]],
    moved: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    known: ManifestRecord | None,
    hints: CheckpointRef,
) -> TrainState:
    """Returns the canonical state.

    Args:
        optimizer: The optimizer.
        named: Its variables.
        moved: The parameters that have slots, in the model's order; slots stand in that of groups.
        frozen: Other parameters.
        extra: What the files hold besides.
        known: What a conversion's manifest says.
        hints: What the user says.

    Raises:
        StateError: It makes no state; lists every fault.
        UsageError: A hint that the schema doesn't know.
    """
    variant = hints.variant or optimizer.said("variant") or (known.variant if known else None)
    faults, subject = Faults(), f"The variables make no state of {optimizer.kind}"
    rate, iteration = (named.get("", {}).get(name) for name in (RATE, ITERATION))
    _check_scalars(rate, iteration, faults)
    faults.check(StateError, subject)
    assert iteration is not None  # it would be a fault
    groups, notes = _groups(optimizer, variant, tuple(paths_of(named)), rate, known)
    groups = tuple(
        Group(g.paths, g.hyperparameters, g.known_from, named.get(f"{GROUPS}/{i}", {}))
        for i, g in enumerate(groups)
    )
    slots, beside = _slots(optimizer.schema, {path: named[path] for path in moved})
    factors = optimizer.schema == "adafactor"
    rules = _rules(optimizer, variant, moved, slots, groups, faults) if factors else {}
    rules |= {path: Rule.from_json(rule) for path, rule in known.rules.items()} if known else {}
    faults.check(StateError, subject)
    calls = int(iteration.read())
    counts = _counts(optimizer, calls, moved, known)
    home = {
        **extra.get(HOME, {}),
        "class": optimizer.kind,
        "iteration": calls,
        "beside": beside,
    }
    home |= {"iteration_dtype": iteration.dtype.name, "schedule": rate is None}
    home |= _rate_home(_first_rate(groups), 0.0 if rate is None else float(rate.read()))
    state = TrainState(
        {**moved, **frozen},
        slots,
        Optimizer(optimizer.schema, variant, groups),
        counts,
        rules,
        {**extra, **called_by(optimizer.config), HOME: home},
        tuple(notes),
    )
    return hints.applied(state)


def _check_scalars(rate: Tensor | None, iteration: Tensor | None, faults: Faults) -> None:
    """Adds what is wrong with the two variables of the optimizer that belong to no parameter."""
    if iteration is None or iteration.shape != () or iteration.dtype.kind not in "iu":
        faults.add("isn't there, or no whole number", ITERATION)
    if rate is not None and (rate.shape != () or rate.dtype.kind not in "fV"):
        faults.add("is no number", RATE)


def _slots(
    schema: str, named: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Returns the slots of each parameter, and by its name each variable beside them that is no slot."""
    known = load_schema(schema).slots
    slots = {path: {n: t for n, t in variables.items() if n in known} for path, variables in named.items()}
    beside = {
        f"{path}{SEPARATOR}{name}": tensor
        for path, variables in named.items()
        for name, tensor in variables.items()
        if name not in known
    }
    return slots, beside


def _counts(optimizer: Own, calls: int, moved: Collection[str], known: ManifestRecord | None) -> Counts:
    """Returns the updates done, which several calls may make together, and those that parameters have missed."""
    updates = calls // (optimizer.said("gradient_accumulation_steps") or 1)
    missed = {path: int(n) for path, n in optimizer.said("missed", {}).items()}
    if known and not missed:  # files of weights alone have no config that says it
        missed = {path: updates - n for path, n in known.behind.items()}
    behind = {path: updates - n for path, n in missed.items() if path in moved}
    return Counts(updates, known.schedule if known else calls, behind)


def _rate_home(first: float | None, base: float) -> dict[str, float]:
    """Returns what `_rate` needs to find the optimizer's own rate again, where the first group's is another."""
    if not base or first == base:
        return {}
    if first:
        return {"first_factor": first / base}
    return {"base_rate": base} if first == 0 else {}


def _groups(
    optimizer: Own,
    variant: str | None,
    paths: tuple[str, ...],
    rate: Tensor | None,
    known: ManifestRecord | None,
) -> tuple[tuple[Group, ...], list[str]]:
    """Returns the groups in the order in which the optimizer has them."""
    if known is not None and known.groups and known.variant == variant:
        return tuple(group.group() for group in known.groups), list(known.assumptions)
    value = None if rate is None else float(rate.read())
    if variant is None:
        rates: Mapping[str, Any] = {} if value is None else {RATE: value}
        said = ", ".join(load_schema(optimizer.schema).stepped)
        note = f"The file doesn't say which variant ran: {said}. Name it with --variant."
        return (Group(paths, rates, dict.fromkeys(rates, "file")),), [note]
    usual, config = offered(optimizer.schema, variant), optimizer.config or {}
    has_rate = optimizer.config is None or config.get(RATE) is not None
    groups = _configured(
        optimizer, {**usual, **_common(optimizer, variant)}, paths, value if has_rate else None
    )
    assumed = ", ".join(f"{n}={v}" for n, v in usual.items())
    return groups, [] if config else [f"The file holds no config; assumed: {assumed}."]


def _configured(
    optimizer: Own, common: Mapping[str, Any], paths: tuple[str, ...], rate: float | None
) -> tuple[Group, ...]:
    """Returns the groups of the config, and that of all other parameters.

    Args:
        optimizer: The optimizer.
        common: The hyperparameters of all groups.
        paths: Its parameters.
        rate: The learning rate, which groups multiply; None where a schedule makes it.
    """
    config = optimizer.config or {}
    name = next((n for n in RATE_NAMES if n in load_schema(optimizer.schema).hyperparameters), RATE)
    origin: KnownFrom = "file" if config else "assumed"
    free, groups = dict.fromkeys(paths), list[Group]()
    for entry in [*(config.get(GROUPS) or ()), {"paths": paths}]:
        here = tuple(path for path in entry["paths"] if path in free)
        if not here:
            continue
        free = {path: None for path in free if path not in here}
        values = {**common, **{n: v for n, v in entry.items() if n not in ("paths", FACTOR)}}
        origins: dict[str, KnownFrom] = dict.fromkeys(values, origin)
        if rate is not None:
            values[name], origins[name] = rate * float(entry.get(FACTOR, 1.0)), "file"
        groups.append(Group(here, values, origins))
    return tuple(groups)


def _common(optimizer: Own, variant: str) -> dict[str, Any]:
    """Returns the hyperparameters that the config has for all groups, but the learning rate."""
    config, schema = optimizer.config or {}, load_schema(optimizer.schema)
    common = {
        name: config[name] for name in schema.hyperparameters if name in config and name not in RATE_NAMES
    }
    if _clips_in_base_class(optimizer.schema, variant) and "global_clipnorm" in config:
        common["global_norm_clip_threshold"] = config["global_clipnorm"]
    return common


def _clips_in_base_class(schema: str, variant: str) -> bool:
    return variant_constants(schema, variant).get("gradient_clipping") == "base_class"


def _rules(
    optimizer: Own,
    variant: str | None,
    moved: Mapping[str, Tensor],
    slots: Mapping[str, Mapping[str, Tensor]],
    groups: Sequence[Group],
    faults: Faults,
) -> dict[str, Rule]:
    """Returns how each parameter is factored: as the config says, as the variant does, or as the slots' shapes show."""
    said, rules = optimizer.said("rules", {}), dict[str, Rule]()
    for group in groups:
        lines = group.hyperparameters.get("factor_map")
        entries = map_entries(lines, "factor_map") if lines else ()
        for path in group.paths:
            shape, param_slots = moved[path].shape, slots[path]
            rule: Rule | None = None
            if path in said:
                rule = Rule.from_json(said[path])
            elif variant is not None and optimizer.config is not None:
                rule = rule_of(path, shape, variant, group.hyperparameters, entries)[0]
            elif {"v_row", "v_col"} & param_slots.keys() in ({"v_row", "v_col"}, set()):
                rule = shown_rule(shape, param_slots, variant)
            if rule is None:
                faults.add("has slots that follow from no rule", path)
            else:
                rules[path] = rule
    return rules


def own_variables(state: TrainState, home: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the optimizer's variables by their names in files, in the order in which it has them.

    Raises:
        InexactError: statekit.tensorflow doesn't step by the state's rule.
    """
    optimizer = state.optimizer
    steppable = load_schema(optimizer.schema).stepped
    if optimizer.schema not in CLASSES or optimizer.variant not in (*steppable, None):
        raise InexactError(
            "No optimizer of statekit.tensorflow goes on with this state.",
            expected=f"{optimizer.schema}, variant {', '.join(steppable) or 'none'}",
            found=f"{optimizer.schema}, variant {optimizer.variant}",
        )
    dtype = DTYPES[str(home.get("iteration_dtype", "int64"))]
    entries: dict[str, Tensor] = {ITERATION: in_memory(np.asarray(calls_of(state, home), dtype), ITERATION)}
    rate = _rate(state)
    if rate is not None:
        entries[RATE] = in_memory(np.asarray(rate, np.float32), RATE)
    for i, group in enumerate(optimizer.groups):
        for path in group.paths:
            for name, tensor in state.slots.get(path, {}).items():
                entries[f"{path}/{name}".replace("/", SEPARATOR)] = tensor
        for name, tensor in group.slots.items():
            entries[SEPARATOR.join((GROUPS, str(i), name))] = tensor
    if home.get("class") == CLASSES[optimizer.schema]:
        entries |= {key.replace("/", SEPARATOR): tensor for key, tensor in home.get("beside", {}).items()}
    return entries


def _rate(state: TrainState) -> float | None:
    """Returns the optimizer's learning rate, which groups multiply: the first one's without its factor in a file.

    Where that group stands still, no factor makes another's rate of its: it is what the file had, or the next one's.
    """
    groups, home = state.optimizer.groups, state.extra.get(HOME, {})
    first, same = _first_rate(groups), home.get("class") == CLASSES.get(state.optimizer.schema)
    if first is None or len(groups) == 1:
        return first
    if first:
        return first / float(home.get("first_factor", 1.0)) if same else first
    rates = [stored_rate(group.hyperparameters) for group in groups]
    moving = next((float(rate) for rate in rates if isinstance(rate, (int, float)) and rate), 0.0)
    return float(home.get("base_rate", moving)) if same and moving else moving


def _first_rate(groups: Sequence[Group]) -> float | None:
    values = groups[0].hyperparameters if groups else {}
    rate = stored_rate(values)
    return float(rate) if isinstance(rate, (int, float)) else None


def _settings_before(before: Own, rate: Any) -> dict[str, Any]:
    """Returns the name, the compilation and the rate that the file had; a known `rate` goes first."""
    config = before.config or {}
    settings = {name: before.said(name) for name in ("name", "jit_compile") if name in config}
    return {**settings, RATE: before.said(RATE) if rate is None else rate}


def arguments(state: TrainState, before: Own | None) -> dict[str, Any]:
    """Returns the arguments of the class that goes on with a state.

    Args:
        state: The state.
        before: The optimizer that the file had, if it was one of these.

    Raises:
        InexactError: The variant isn't known, so that the class's own would be taken for it.
    """
    optimizer = state.optimizer
    if optimizer.variant is None:
        raise InexactError("Nobody said which variant ran.", remedy="name it with --variant")
    kind = CLASSES[optimizer.schema]
    same = before if before is not None and before.kind == kind else None
    names = offered(optimizer.schema, optimizer.variant).keys() - {LOGICAL}  # `rules` say each parameter's
    groups = [{n: v for n, v in g.hyperparameters.items() if n in names} for g in optimizer.groups]
    first = groups[0] if groups else {}
    common = {n: v for n, v in first.items() if all(values.get(n) == v for values in groups)}
    rate = _rate(state)
    base, common = _parted(common, names, _clips_in_base_class(optimizer.schema, optimizer.variant))
    settings = {"name": Own(kind).usual_name, RATE: rate, **base, "jit_compile": False}
    if same is not None:
        settings |= _settings_before(same, rate)
    settings |= {"variant": optimizer.variant, **common}
    if len(groups) > 1:
        settings[GROUPS] = [
            _group(g, values, common, rate) for g, values in zip(optimizer.groups, groups, strict=True)
        ]
    return settings | _by_parameter(state, same)


def _parted(
    common: Mapping[str, Any], names: Collection[str], in_base_class: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of Keras' base class, and those of the variant itself.

    Args:
        common: What all groups have.
        names: What the variant offers.
        in_base_class: Whether it leaves clipping to the base class.
    """
    of_variant = {name: value for name, value in common.items() if name not in KERAS}
    base = {name: common.get(name, usual) for name, usual in KERAS.items()}
    if in_base_class:
        base["global_clipnorm"] = of_variant.pop("global_norm_clip_threshold", None)
    else:
        clips = {name: base.pop(name) for name in ("clipnorm", "global_clipnorm") if name in names}
        of_variant |= clips
        base |= {name: KERAS[name] for name in clips}
    return base, of_variant


def _by_parameter(state: TrainState, before: Own | None) -> dict[str, Any]:
    """Returns what the class keeps of single parameters: rules, other names, and updates that they have missed."""
    paths = set(state.optimizer.paths)
    names = before.said("names", {}) if before else {}
    parts = {
        "rules": {path: rule.to_json() for path, rule in state.rules.items() if state.group_of(path)},
        "names": {here: there for here, there in names.items() if there in paths},
        "missed": {p: state.counts.updates - n for p, n in state.counts.behind.items() if p in paths},
    }
    return {name: part for name, part in parts.items() if part}


def _group(
    group: Group, values: Mapping[str, Any], common: Mapping[str, Any], rate: float | None
) -> dict[str, Any]:
    different = {name: value for name, value in values.items() if name not in common and name not in KERAS}
    mine = stored_rate(group.hyperparameters)
    factor = {FACTOR: mine / rate} if rate and mine is not None and mine != rate else {}
    return {"paths": list(group.paths), **different, **factor}


@dataclass(frozen=True)
class StatekitKeras:
    """Keras' files of statekit.tensorflow's optimizers."""

    name: str = "statekit-keras"
    title: str = "a run with an optimizer of statekit.tensorflow, in Keras' files"
    containers: tuple[str, ...] = ("keras-h5", "keras")
    schedule_in: str = "iterations"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {schema: load_schema(schema).stepped for schema in CLASSES}
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for slots by name."""
        is_file = is_group(checkpoint.tree)
        first = next((key for key in optimizer_variables(checkpoint.tree) if is_file and ":" in key), None)
        return Evidence(30, f"{OPTIMIZER}/{VARIABLES} has {first}") if first else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; hints are canonical."""
        tree = file_tree(checkpoint)
        config = config_of(tree)
        named = named_slots(optimizer_variables(tree))
        optimizer = own_by_config(config) or own_by_name(attribute(tree, OPTIMIZER, "name"), named)
        if optimizer is None:
            raise StateError(
                "The file doesn't say which optimizer of statekit.tensorflow it is about.",
                place=checkpoint.path,
                expected=", ".join(CLASSES.values()),
                found=attribute(tree, OPTIMIZER, "name") or "no name",
                remedy="read the .keras file, which has the model's config",
            )
        every = variables(tree, config)
        paths = paths_of(named)
        order = saved_order(tree, every)
        if order is not None and {*paths} < {*order.moved}:  # a parameter whose slots are missing
            order = Order({path: variable for path, variable in order.moved.items() if path in named})
        if order is None or {*order.moved} != {*paths}:
            matched = by_names(every, [optimizer.variable_of(path) for path in paths])
            order = _as_in_model(dict(zip(paths, matched.moved.values(), strict=True)), every)
        frozen = frozen_of(tree, every, order)
        return own_state(
            optimizer,
            named,
            {path: variable.tensor for path, variable in order.moved.items()},
            {path: variable.tensor for path, variable in frozen.items()},
            {HOME: home_of(tree, {**order.moved, **frozen})},
            manifest_state(checkpoint, optimizer.schema),
            hints,
        )

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        require_optimizer(state, CLASSES, self.name)
        home = home_in(state)
        kind = CLASSES[state.optimizer.schema]
        entries = own_variables(state, home)
        tree = model_tree(state, home, {"class": kind})
        before = own_by_config(config_of(home.get("tree", {})))
        same = before is not None and before.kind == kind
        name = attribute(home.get("tree", {}), OPTIMIZER, "name") if same else None
        named_variables = {ATTRIBUTES: {"name": name or Own(kind).usual_name}, **entries}
        tree[OPTIMIZER] = {**tree.get(OPTIMIZER, {}), VARIABLES: named_variables}
        if config_of(tree) is not None:
            with_config(tree, MODULE, kind, f"statekit>{kind}", arguments(state, before))
        return Encoded(tree, state.counts.updates, dropped=left_out(state, "tree", "places"))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        """Returns the lines that go on with an optimizer of statekit.tensorflow."""
        return statekit_lines(state, saved)


def _as_in_model(moved: Mapping[str, Variable], every: Sequence[Variable]) -> Order:
    """Returns parameters in the model's order, where that is known; slots stand in the order of groups."""
    if not all(variable.ordered for variable in moved.values()):
        return Order(moved)
    number = {variable.place: i for i, variable in enumerate(every)}
    return Order(dict(sorted(moved.items(), key=lambda item: number[item[1].place])))


LAYOUT = StatekitKeras()
