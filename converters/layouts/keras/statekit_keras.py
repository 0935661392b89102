"""The layout `statekit-keras`: optimizers of statekit.tensorflow in Keras' files.

    optimizer/vars/iteration, learning_rate, net:dense:kernel:m, groups:0:model_norms ...

Slots have names, with `:` for the slashes of a path; the model's variables are numbered as Keras does it, and found by
the names of their layers. Hyperparameters stand in the config of a `.keras` file; a `.weights.h5` file has none.

Source: statekit/tensorflow/optimizer.py, `save_own_variables`, `get_config`; statekit/tensorflow/spec.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

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
from statekit.state.run import RATE_FACTORS, rate_factors
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Kind, KnownFrom, Optimizer, Rule, RuleRecord, TrainState
from statekit.tensors.tensor import DTYPES, Tensor, in_memory
from statekit.tensors.typed import Name, Natural, typed

MODULE = "statekit.tensorflow.optimizers"
SEPARATOR = ":"
GROUPS = "groups"
_SCHEMAS = {kind: schema for schema, kind in CLASSES.items()}
Owned: TypeAlias = tuple[Group, Kind]
"""A group, and whose rule moves it."""


class GroupArguments(TypedDict):
    """What is said of a group of parameters; options are held to the schema of the optimizer that moves it."""

    paths: Sequence[Name]
    schema: NotRequired[Name]
    variant: NotRequired[Name]
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

    @property
    def schemas(self) -> tuple[str, ...]:
        """Its schema, and those of the optimizers that move some of its groups."""
        groups = (self.config or {}).get(GROUPS) or ()
        return tuple(dict.fromkeys((self.schema, *(g["schema"] for g in groups if "schema" in g))))

    def argument(self, name: str, usual: Any = None) -> Any:
        """Returns an argument."""
        return (self.config or {}).get(name, usual)

    def variable_of(self, path: str) -> str:
        """Returns the path of the variable that goes by a canonical path."""
        names = self.argument("names", {})
        return next((here for here, stored in names.items() if stored == path), path)


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


def own_manifest(checkpoint: Checkpoint, optimizer: Own) -> ManifestRecord | None:
    """Returns what a conversion's manifest says of the optimizer, and of those that move other groups."""
    record = (checkpoint.manifest or {}).get("state")
    stated = str(record.get("schema")).split("+") if isinstance(record, Mapping) else []
    return manifest_state(checkpoint, *(stated if optimizer.schema in stated else optimizer.schemas))


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
    record: ManifestRecord | None,
    hints: CheckpointRef,
) -> TrainState:
    """Returns the canonical state.

    Args:
        optimizer: The optimizer.
        named: Its variables.
        moved: The parameters that have slots, in the model's order; slots stand in that of groups.
        frozen: Other parameters.
        extra: What the files hold besides.
        record: What a conversion's manifest says.
        hints: What the user says.

    Raises:
        StateError: It makes no state; lists every fault.
        UsageError: A hint that the schema doesn't know.
    """
    schemas = _shown_schemas(optimizer, named)
    variant = optimizer.argument("variant") or (record.variant if record else None)
    by_user = {schema: hint.variant for schema, hint in hints.of({*schemas.values()}).items()}
    variants = {
        schema: by_user[schema] or (variant if schema == optimizer.schema else None) for schema in by_user
    }
    faults, subject = Faults(), f"The variables make no state of {optimizer.kind}"
    rate, iteration = (named.get("", {}).get(name) for name in (RATE, ITERATION))
    _check_scalars(rate, iteration, faults)
    faults.check(StateError, subject)
    assert iteration is not None  # it would be a fault
    groups, notes = _groups(optimizer, variants, schemas, rate, record)
    owned = [(replace(g, slots=named.get(f"{GROUPS}/{i}", {})), kind) for i, (g, kind) in enumerate(groups)]
    mover = Optimizer.of(*zip(*owned, strict=True)) if owned else Optimizer(optimizer.schema, variant, ())
    slots, other_slots = _slots(owned, {path: named[path] for path in moved})
    rules = _rules(optimizer, moved, slots, owned, faults)
    rules |= {path: Rule.from_json(rule) for path, rule in record.rules.items()} if record else {}
    faults.check(StateError, subject)
    calls = int(iteration.read())
    counts = _counts(optimizer, calls, moved, record)
    home = {**extra.get(HOME, {}), "class": optimizer.kind, "iteration": calls, "beside": other_slots}
    home |= {"iteration_dtype": iteration.dtype.name, "schedule": rate is None}
    home |= _rate_home(_first_rate(mover.groups), 0.0 if rate is None else float(rate.read()))
    home |= _factors_home(optimizer, mover.groups, rate)
    state = TrainState(
        {**moved, **frozen},
        slots,
        mover,
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
    owned: Sequence[Owned], named: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Returns the slots of each parameter, and by its name each variable beside them that is no slot."""
    named_slots = {path: load_schema(kind[0]).slots for group, kind in owned for path in group.paths}
    outside = Faults(("stands in no group", path) for path in named if path not in named_slots)
    outside.check(StateError, "The variables make no state of their optimizer")
    slots = {path: {n: t for n, t in kept.items() if n in named_slots[path]} for path, kept in named.items()}
    other_slots = {
        f"{path}{SEPARATOR}{name}": tensor
        for path, kept in named.items()
        for name, tensor in kept.items()
        if name not in named_slots[path]
    }
    return slots, other_slots


def _counts(optimizer: Own, calls: int, moved: Collection[str], record: ManifestRecord | None) -> Counts:
    """Returns the updates done, which several calls may make together, and those that parameters have missed."""
    updates = calls // (optimizer.argument("gradient_accumulation_steps") or 1)
    missed = {path: int(n) for path, n in optimizer.argument("missed", {}).items()}
    if record and not missed:  # files of weights alone have no config that says it
        missed = {path: updates - n for path, n in record.behind.items()}
    behind = {path: updates - n for path, n in missed.items() if path in moved}
    return Counts(updates, record.schedule if record else calls, behind)


def _rate_home(first: float | None, base: float) -> dict[str, float]:
    """Returns what `_rate` needs to find the optimizer's own rate again, where the first group's is another."""
    if not base or first == base:
        return {}
    if first:
        return {"first_factor": first / base}
    return {"base_rate": base} if first == 0 else {}


def _factors_home(optimizer: Own, groups: Sequence[Group], rate: Tensor | None) -> dict[str, list[float]]:
    """Returns what each group multiplies a schedule's rate by; without a schedule the rate of each group says it."""
    entries = (optimizer.argument(GROUPS) or ()) if rate is None else ()
    by_path = {path: float(entry.get(FACTOR, 1.0)) for entry in reversed(entries) for path in entry["paths"]}
    factors = [by_path.get(path, 1.0) for path in (group.paths[0] for group in groups)]
    return {RATE_FACTORS: factors} if {*factors} - {1.0} else {}


def _shown_schemas(optimizer: Own, named: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Returns the schema of each parameter: its optimizer's, but where a file without config shows another."""
    slots = {path: named[path].keys() - {ACCUMULATOR} for path in paths_of(named)}
    if optimizer.config is not None:
        return dict.fromkeys(slots, optimizer.schema)
    always = {
        schema: {n for n, slot in load_schema(schema).data["slots"].items() if slot["exists"] == "always"}
        for schema in CLASSES
    }
    usual, faults, schemas = load_schema(optimizer.schema).slots.keys(), Faults(), dict[str, str]()
    for path, kept in slots.items():
        others = [schema for schema, needed in always.items() if needed == kept]
        is_own = always[optimizer.schema] <= kept <= usual or not others
        schemas[path] = optimizer.schema if is_own else others[0]
        if not is_own and len(others) > 1:
            faults.add(f"has the slots of {', '.join(others)}", path)
    faults.check(
        StateError,
        "The file doesn't say which optimizer moves some variables",
        remedy="read the .keras file, which has the optimizer's config",
    )
    return schemas


def _groups(
    optimizer: Own,
    variants: Mapping[str, str | None],
    schemas: Mapping[str, str],
    rate: Tensor | None,
    record: ManifestRecord | None,
) -> tuple[list[Owned], list[str]]:
    """Returns the groups in the order in which the optimizer has them, each with whose rule moves it."""
    variant, value = variants.get(optimizer.schema), None if rate is None else float(rate.read())
    if record is not None and record.groups and (record.variant == variant or len({*record.kinds}) > 1):
        recorded = [group.group() for group in record.groups]
        return list(zip(recorded, record.kinds, strict=True)), list(record.assumptions)
    if optimizer.config is not None and variant is not None:
        return _configured(
            optimizer, variant, tuple(schemas), value if optimizer.argument(RATE) is not None else None
        ), []
    pairs = [
        _assumed(schema, variants.get(schema), tuple(p for p in schemas if schemas[p] == schema), value)
        for schema in dict.fromkeys(schemas.values())
    ]
    return [owned for owned, _ in pairs], [note for _, note in pairs]


def _assumed(
    schema: str, variant: str | None, paths: tuple[str, ...], rate: float | None
) -> tuple[Owned, str]:
    """Returns the group of one optimizer where no config says its hyperparameters, and what was assumed."""
    usual = {} if variant is None else offered(schema, variant)
    origins: dict[str, KnownFrom] = dict.fromkeys(usual, "assumed")
    assumed = ", ".join(f"{n}={v}" for n, v in usual.items())
    if rate is not None:
        usual, origins = {**usual, _rate_name(schema): rate}, {**origins, _rate_name(schema): "file"}
    variants = ", ".join(load_schema(schema).stepped)
    if variant is None:
        note = f"The file doesn't say which variant ran: {variants}. Name it with --variant."
    else:
        note = f"The file holds no config; assumed: {assumed}."
    return (Group(paths, usual, origins), (schema, variant)), note


def _configured(optimizer: Own, variant: str, paths: tuple[str, ...], rate: float | None) -> list[Owned]:
    """Returns the groups of the config, and that of all other parameters, each with whose rule moves it."""
    config = optimizer.config or {}
    origin: KnownFrom = "file" if config else "assumed"
    free, groups = dict.fromkeys(paths), list[Owned]()
    for entry in [*(config.get(GROUPS) or ()), {"paths": paths}]:
        here = tuple(path for path in entry["paths"] if path in free)
        if not here:
            continue
        free = {path: None for path in free if path not in here}
        kind = (str(entry.get("schema", optimizer.schema)), str(entry.get("variant", variant)))
        options = {n: v for n, v in entry.items() if n not in ("paths", "schema", "variant", FACTOR)}
        values = {
            **offered(*kind),
            **_common(optimizer, kind, kind == (optimizer.schema, variant)),
            **options,
        }
        origins: dict[str, KnownFrom] = dict.fromkeys(values, origin)
        if rate is not None:
            name = _rate_name(kind[0])
            values[name], origins[name] = rate * float(entry.get(FACTOR, 1.0)), "file"
        groups.append((Group(here, values, origins), kind))
    return groups


def _rate_name(schema: str) -> str:
    return next((name for name in RATE_NAMES if name in load_schema(schema).hyperparameters), RATE)


def _common(optimizer: Own, kind: tuple[str, str], is_own: bool) -> dict[str, Any]:
    """Returns the hyperparameters that the config has for all groups of a kind, but the learning rate.

    Of those that another optimizer moves, that is what Keras itself does for all variables.
    """
    config, schema = optimizer.config or {}, load_schema(kind[0])
    common = {
        name: config[name]
        for name in schema.hyperparameters
        if name in config and name not in RATE_NAMES and (is_own or name in KERAS)
    }
    if _clips_in_base_class(*kind) and "global_clipnorm" in config:
        common["global_norm_clip_threshold"] = config["global_clipnorm"]
    return common


def _clips_in_base_class(schema: str, variant: str) -> bool:
    return variant_constants(schema, variant).get("gradient_clipping") == "base_class"


def _rules(
    optimizer: Own,
    moved: Mapping[str, Tensor],
    slots: Mapping[str, Mapping[str, Tensor]],
    groups: Sequence[Owned],
    faults: Faults,
) -> dict[str, Rule]:
    """Returns how each parameter is factored: as the config says, as the variant does, or as the slots' shapes show."""
    recorded = optimizer.argument("rules", {})
    rules = {path: Rule.from_json(recorded[path]) for path in moved if path in recorded}
    for group, (schema, variant) in groups:
        if schema != "adafactor":
            continue
        lines = group.hyperparameters.get("factor_map")
        entries = map_entries(lines, "factor_map") if lines else ()
        for path in group.paths:
            if path in rules:
                continue
            shape, param_slots = moved[path].shape, slots[path]
            rule: Rule | None = None
            if variant is not None and optimizer.config is not None:
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
    for schema, variant in optimizer.kinds:
        steppable = load_schema(schema).stepped
        if schema not in CLASSES or variant not in (*steppable, None):
            raise InexactError(
                "No optimizer of statekit.tensorflow continues from this state.",
                expected=f"{schema}, variant {', '.join(steppable) or 'none'}",
                found=f"{schema}, variant {variant}",
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
    if home.get("class") == class_of(state, home):
        entries |= {key.replace("/", SEPARATOR): tensor for key, tensor in home.get("beside", {}).items()}
    return entries


def class_of(state: TrainState, home: Mapping[str, Any]) -> str:
    """Returns the class that goes on with a state: of several optimizers the one that the file had, or the first."""
    classes = [CLASSES.get(schema, "") for schema in state.optimizer.schemas]
    before = str(home.get("class"))
    return before if before in classes else classes[0]


def _rate(state: TrainState) -> float | None:
    """Returns the optimizer's learning rate, which groups multiply: the first one's without its factor in a file.

    Where that group stands still, no factor makes another's rate of its: it is what the file had, or the next one's.
    """
    groups, home = state.optimizer.groups, state.extra.get(HOME, {})
    first, same = _first_rate(groups), home.get("class") == class_of(state, home)
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
    settings = {name: before.argument(name) for name in ("name", "jit_compile") if name in config}
    return {**settings, RATE: before.argument(RATE) if rate is None else rate}


def arguments(state: TrainState, before: Own | None) -> dict[str, Any]:
    """Returns the arguments of the class that goes on with a state.

    Args:
        state: The state.
        before: The optimizer that the file had, if it was one of these.

    Raises:
        InexactError: The variant isn't known, so that the class's own would be taken for it.
    """
    kinds = _kinds_of(state)
    kind = class_of(state, home_in(state))
    main = next(whose for whose in kinds if CLASSES[whose[0]] == kind)
    same = before if before is not None and before.kind == kind else None
    # `rules` say what is logical of each parameter.
    offers = {whose: offered(*whose).keys() - {LOGICAL} for whose in kinds}
    groups = [
        {name: value for name, value in g.hyperparameters.items() if name in offers[whose]}
        for g, whose in zip(state.optimizer.groups, kinds, strict=False)
    ]
    rate = _rate(state)
    base, common = _parted(_common_of(groups, kinds, main), offers[main], _clips_in_base_class(*main))
    settings = {"name": Own(kind).usual_name, RATE: rate, **base, "jit_compile": False}
    if same is not None:
        settings |= _settings_before(same, rate)
    settings |= {"variant": main[1], **common}
    if len(groups) > 1:
        trios = zip(state.optimizer.groups, groups, kinds, strict=True)
        settings[GROUPS] = [
            _group(g, values, common, rate, _clips_in_base_class(*whose))
            if whose == main
            else {
                "schema": whose[0],
                "variant": whose[1],
                **_group(g, values, {}, rate, _clips_in_base_class(*whose)),
            }
            for g, values, whose in trios
        ]
        settings[GROUPS] = _multiplied(settings[GROUPS], rate_factors(state.extra) if rate is None else ())
    return settings | _by_parameter(state, same)


def _multiplied(groups: list[dict[str, Any]], factors: Sequence[float]) -> list[dict[str, Any]]:
    """Returns groups with what each multiplies a schedule's rate by."""
    if len(factors) != len(groups):
        return groups
    return [g if f == 1.0 else {**g, FACTOR: f} for g, f in zip(groups, factors, strict=True)]


def _kinds_of(state: TrainState) -> list[tuple[str, str]]:
    """Returns whose rule moves each group; of a state without groups, whose it is."""
    optimizer = state.optimizer
    kinds = [optimizer.kind(group) for group in optimizer.groups] or [*optimizer.kinds]
    if any(variant is None for _, variant in kinds):
        raise InexactError("The variant of the run is not given.", remedy="name it with --variant")
    return [(schema, str(variant)) for schema, variant in kinds]


def _common_of(
    groups: Sequence[Mapping[str, Any]], kinds: Sequence[tuple[str, str]], main: tuple[str, str]
) -> dict[str, Any]:
    """Returns the hyperparameters that all groups of the class itself have."""
    alike = [values for values, whose in zip(groups, kinds, strict=False) if whose == main]
    first = alike[0] if alike else {}
    return {n: v for n, v in first.items() if all(n in values and values[n] == v for values in alike)}


def _parted(
    common: Mapping[str, Any], names: Collection[str], in_base_class: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of Keras' base class, and those of the variant itself."""
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
    names = before.argument("names", {}) if before else {}
    parts = {
        "rules": {path: rule.to_json() for path, rule in state.rules.items() if state.group_of(path)},
        "names": {here: stored for here, stored in names.items() if stored in paths},
        "missed": {p: state.counts.updates - n for p, n in state.counts.behind.items() if p in paths},
    }
    return {name: part for name, part in parts.items() if part}


def _group(
    group: Group,
    values: Mapping[str, Any],
    common: Mapping[str, Any],
    rate: float | None,
    in_base_class: bool,
) -> dict[str, Any]:
    """Returns what a group says for itself; Keras' base class does some things for all of them together."""
    together = {*common, *KERAS, *(("global_norm_clip_threshold",) if in_base_class else ())}
    different = {name: value for name, value in values.items() if name not in together}
    stored = stored_rate(group.hyperparameters)
    factor = {FACTOR: stored / rate} if rate and stored is not None and stored != rate else {}
    return {"paths": list(group.paths), **different, **factor}


@dataclass(frozen=True)
class StatekitKeras:
    """Keras' files of statekit.tensorflow's optimizers."""

    name: str = "statekit-keras"
    title: str = "a run with an optimizer of statekit.tensorflow, in Keras' files"
    containers: tuple[str, ...] = ("keras-h5", "keras")
    schedule_in: str = "iterations"
    holds_several: bool = True
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
            own_manifest(checkpoint, optimizer),
            hints,
        )

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        require_optimizer(state, CLASSES, self.name)
        home = home_in(state)
        kind = class_of(state, home)
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
        return statekit_lines(state, saved)


def _as_in_model(moved: Mapping[str, Variable], every: Sequence[Variable]) -> Order:
    """Returns parameters in the model's order, where that is known; slots stand in the order of groups."""
    if not all(variable.ordered for variable in moved.values()):
        return Order(moved)
    number = {variable.place: i for i, variable in enumerate(every)}
    return Order(dict(sorted(moved.items(), key=lambda item: number[item[1].place])))


LAYOUT = StatekitKeras()
