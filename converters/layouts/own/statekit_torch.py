"""Layout `statekit-torch`: a torch checkpoint whose optimizer part is the state of an optimizer of statekit.torch.

    model              {name: tensor}: parameters and buffers; a name is the path with dots for slashes
    optimizer          state         {index: {slot: tensor}}
                       param_groups  [{schema, variant, lr, step, behind, slots, rules, known_from, hyperparameters...,
                                      param_names, params}]
    step               updates done
    optimizer_class    statekit.torch.Adafactor, ...
    variant            whose rule it follows
    schedule           where the learning-rate schedule stands
    paths              {name: path} of every parameter
    assumptions        what a conversion assumed
    extra              what else the state holds

A file that a user writes after more training needs only `model` and `optimizer`; what else it holds is kept.
`params` numbers the parameters over all groups, in order; `state` has the slots under these numbers.
Source: PyTorch torch/optim/optimizer.py, `Optimizer.state_dict`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import require_optimizer
from statekit.converters.layouts.own import lines
from statekit.converters.layouts.pytorch.parts import (
    BUFFERS,
    GROUPS,
    NAMES,
    by_index,
    is_plain,
    names_of,
    not_plain,
    path_of,
    stated_names,
    tied,
    with_names,
)
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State, torch_lines
from statekit.state import options
from statekit.state.evidence import SCALED, scaled
from statekit.state.options import RATE_NAMES, by_other_names
from statekit.state.run import BESIDE
from statekit.state.schema import load_schema
from statekit.state.train_state import (
    BY_NAME,
    SCALE,
    Counts,
    Group,
    KnownFrom,
    Optimizer,
    Rule,
    RuleRecord,
    TrainState,
)
from statekit.tensors.tensor import TIES, Tensor, ties_of
from statekit.tensors.tree import Tree
from statekit.tensors.typed import Name, fits, misfits, typed

Names: TypeAlias = Mapping[str, str]

FROZEN = "frozen"
"""Key of the first group: names of the parameters that no group moves. A file without them takes them for buffers."""
_OURS = ("params", "param_names", "rules", "step")
_NOT_VALUES = (*_OURS, "lr", "schema", "variant", "behind", "slots", "known_from", FROZEN, SCALED)
_KNOWN_FROM = get_args(KnownFrom)


@dataclass(frozen=True)
class DecodedGroups:
    """What the optimizer part says. `others` are keys of each group that mean nothing here, such as `initial_lr`."""

    groups: tuple[Group, ...] = ()
    slots: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    rules: Mapping[str, Rule] = field(default_factory=dict)
    updates: int = 0
    behind: Mapping[str, int] = field(default_factory=dict)
    others: tuple[Mapping[str, Tree], ...] = ()
    notes: tuple[str, ...] = ()


def looks_ours(optimizer: Any) -> bool:
    """Tells whether every parameter group has the keys that mark ours.

    Rules may be lacking beside a schema: torch.distributed.checkpoint saves no empty dict.
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, Mapping) and {*_OURS} <= {*group, *_absent(group)} for group in groups)
    )


def _absent(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("rules",) if "schema" in group else ()


def moved_names(optimizer: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parameters of all groups."""
    groups = optimizer["param_groups"]
    return [
        str(n) for group in groups if isinstance(group["param_names"], Sequence) for n in group["param_names"]
    ]


def frozen_names(optimizer: Mapping[str, Any]) -> list[str]:
    """Returns the names of the parameters that no group moves, as far as the groups say."""
    return [
        str(name)
        for group in optimizer["param_groups"]
        if isinstance(group.get(FROZEN), Sequence)
        for name in group[FROZEN]
    ]


def integer(leaf: Any) -> int | None:
    """Returns an integer that is stored as such or as a scalar tensor, else None."""
    value = _scalar(leaf)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _scalar(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.shape == ():
        value = leaf.read()
        return value.astype(np.float64).item() if value.dtype.kind in "fV" else value.item()
    return leaf


def _encoded_group(state: TrainState, group: Group, names: Names, frozen: Sequence[str]) -> dict[str, Tree]:
    """Returns a group of parameters as `param_groups` has it, without their indices."""
    schema, variant = state.optimizer.kind(group)
    if strange := [name for name in group.slots if name not in load_schema(schema).slots]:
        raise InexactError(
            "A group has slots of its own that its optimizer doesn't know.",
            expected=schema,
            found=", ".join(strange),
        )
    return {
        "schema": schema,
        "variant": variant,
        **_values(group, names),
        **_counts(state, group, names),
        **({"slots": dict(group.slots)} if group.slots else {}),
        "rules": {names[path]: state.rules[path].to_json() for path in group.paths if path in state.rules},
        "known_from": dict(group.known_from),
        **({FROZEN: [*frozen]} if frozen else {}),
        "param_names": [names[path] for path in group.paths],
    }


def encode_groups(state: TrainState, names: Names, others: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Returns `state` and `param_groups`.

    Raises:
        InexactError: A group as a whole has slots that its schema doesn't know.
    """
    optimizer = state.optimizer
    moved = set(optimizer.paths)
    frozen = [names[path] for path in state.params if path not in moved]
    index = {path: i for i, path in enumerate(optimizer.paths)}
    groups = []
    for i, group in enumerate(optimizer.groups):
        record = _encoded_group(state, group, names, () if i else frozen)
        indices = [index[path] for path in group.paths]
        groups.append({**(others[i] if i < len(others) else {}), **record, "params": indices})
    slots = {i: dict(state.slots[path]) for path, i in index.items() if path in state.slots}
    return {"state": slots, "param_groups": groups}


def _values(group: Group, names: Names) -> dict[str, Any]:
    values = by_other_names(group.hyperparameters, names)
    rates = [values.pop(name) for name in RATE_NAMES if name in values]
    return {
        "lr": rates[0] if rates else None,
        **values,
        **({SCALED: group.scale} if group.scale != 1 else {}),
    }


def _counts(state: TrainState, group: Group, names: Names) -> dict[str, Any]:
    """Returns what a group counts: a count that all its parameters share is the group's own."""
    behind = {path: state.counts.behind[path] for path in group.paths if path in state.counts.behind}
    if behind and len(behind) == len(group.paths) and len({*behind.values()}) == 1:
        return {"step": next(iter(behind.values()))}
    apart = {"behind": {names[path]: count for path, count in behind.items()}} if behind else {}
    return {"step": state.counts.updates, **apart}


def decode_groups(
    optimizer: Mapping[str, Any], makers: Sequence[OptimizerVariant], paths: Names, faults: Faults
) -> DecodedGroups:
    """Returns what the optimizer part says; adds to `faults` what doesn't fit.

    Args:
        optimizer: `state` and `param_groups`, with the keys that mark ours.
        makers: Whose each group is.
        paths: Path of each name that `model` has.
        faults: Where faults are added.
    """
    parts = [
        _Part(f"optimizer/param_groups/{i}", maker, group)
        for i, (maker, group) in enumerate(zip(makers, optimizer["param_groups"], strict=True))
    ]
    for part in parts:
        part.check(paths, faults)
    if faults:
        return DecodedGroups()
    slots = _slots(optimizer.get("state"), parts, paths, faults)
    rules = {path: rule for part in parts for path, rule in part.rules(paths, faults)}
    updates = max(part.step for part in parts)
    others = tuple(part.others() for part in parts)
    return DecodedGroups(
        tuple(part.decoded(paths, updates, faults) for part in parts),
        slots,
        rules,
        updates,
        {path: count for part in parts for path, count in part.behind(paths, updates, faults)},
        others if any(others) else (),
        tuple(_offset_notes(parts, updates)),
    )


def _offset_notes(parts: Sequence[_Part], updates: int) -> Iterator[str]:
    """Says which groups began later than the run."""
    for number, part in enumerate(parts):
        if part.step != updates and part.maker.counts_offset:
            yield (
                f"Parameter group {number} has made {part.step} of {updates} updates; its step_offset is counted from "
                "there."
            )


@dataclass(frozen=True)
class OptimizerVariant:
    """Whose groups a file holds."""

    schema: str
    variant: str | None

    @property
    def counts_offset(self) -> bool:
        """Whether `step_offset` shows a group that began later; else its parameters' counts do."""
        rules = load_schema(self.schema)
        return self.variant is not None and "step_offset" in rules.variant(self.variant)["defaults"]


def _numbering_fault(params: Any, names: Any) -> str | None:
    """Returns what is wrong with the numbers and the names of a group's parameters."""
    if not isinstance(names, list) or not isinstance(params, list) or len(names) != len(params):
        return "params and param_names aren't lists of one length"
    if not all(isinstance(name, str) for name in names) or not all(isinstance(i, int) for i in params):
        return "params and param_names aren't numbers and names"
    return None


@dataclass(frozen=True)
class _Part:
    """One parameter group of the file."""

    place: str
    maker: OptimizerVariant
    values: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.values["param_names"])

    @property
    def step(self) -> int:
        return integer(self.values["step"]) or 0

    def check(self, paths: Names, faults: Faults) -> None:
        names = self.values["param_names"]
        if fault := _numbering_fault(self.values["params"], names):
            faults.add(fault, self.place)
            return
        faults += [("isn't in model", f"{self.place}/{name}") for name in names if name not in paths]
        count = integer(self.values["step"])
        if count is None or count < 0:
            faults.add(f"step is {self.values['step']!r:.80}", self.place)
        faults += [
            (f"{key} isn't a map", self.place)
            for key in ("rules", "known_from", "behind", "slots")
            if not isinstance(self.values.get(key, {}), Mapping)
        ]
        rules = self.values.get("rules", {})
        strangers = sorted({*map(str, rules)} - {*names}) if isinstance(rules, Mapping) else []
        faults += [("isn't in the group", f"{self.place}/rules/{name}") for name in strangers]

    def rules(self, paths: Names, faults: Faults) -> Iterator[tuple[str, Rule]]:
        for name in self.names:
            if name not in self.values.get("rules", {}):
                continue
            record = self.values["rules"][name]
            if wrong := list(misfits(record, RuleRecord, (self.place, "rules", name))):
                faults += wrong
            else:
                yield paths[name], Rule.from_json(record)

    def behind(self, paths: Names, updates: int, faults: Faults) -> Iterator[tuple[str, int]]:
        """Yields the updates done by parameters that missed some."""
        counts = self.values.get("behind", {})
        late = self.step != updates and not self.maker.counts_offset
        for name in self.names:
            if name not in counts and not late:
                continue
            count = integer(counts.get(name, self.step))
            if count is None or count < 0:
                faults.add(f"is {counts[name]!r:.80}, expected a count", f"{self.place}/behind/{name}")
            else:
                yield paths[name], count

    def _hyperparameters(self, paths: Names, faults: Faults) -> dict[str, Any]:
        """Returns the group's hyperparameters as the file has them, by the state's paths."""
        schema = load_schema(self.maker.schema)
        values = {
            name: _scalar(self.values[name])
            for name in schema.hyperparameters
            if name in self.values and name not in RATE_NAMES
        }
        own_rate = next(name for name in RATE_NAMES if name in schema.hyperparameters)
        rate = _scalar(self.values.get("lr"))
        if rate is not None or own_rate in self.values.get("known_from", {}):
            values[own_rate] = rate
        faults += [
            (f"is {value!r:.80}, {fault}", f"{self.place}/{name}")
            for name, value in values.items()
            if not (name == SCALE and isinstance(value, Mapping)) and (fault := schema.fault(name, value))
        ]
        faults += self._map_faults(values, paths)
        return by_other_names(values, paths)

    def decoded(self, paths: Names, updates: int, faults: Faults) -> Group:
        schema = load_schema(self.maker.schema)
        values = self._hyperparameters(paths, faults)
        offset = values.get("step_offset")
        if self.step != updates and self.maker.counts_offset and isinstance(offset, int):
            values["step_offset"] = offset + updates - self.step
        stated: Mapping[str, KnownFrom] = self.values.get("known_from", {})
        sources = {name: stated.get(name, "file") for name in values}
        faults += [
            (f"known_from is {source!r:.80}", f"{self.place}/known_from/{name}")
            for name, source in sources.items()
            if source not in _KNOWN_FROM
        ]
        slots = self.values.get("slots", {})
        faults += [
            (f"slot {name} of the group is no tensor that {schema.name} knows", self.place)
            for name, slot in slots.items()
            if not isinstance(slot, Tensor) or name not in schema.slots
        ]
        moved = tuple(paths[name] for name in self.names)
        return Group(moved, values, sources, slots, facts=scaled(moved, self._scale(faults)))

    def _scale(self, faults: Faults) -> float:
        """Returns by what a map multiplied the group's parameters."""
        number = self.values.get(SCALED, 1.0)
        if type(number) is float and math.isfinite(number) and number != 0:
            return number
        faults.add(f"is {number!r:.80}, expected the number by which a map scaled", f"{self.place}/{SCALED}")
        return 1.0

    def _map_faults(self, values: Mapping[str, Any], paths: Names) -> Iterator[tuple[str, str]]:
        yield from (
            (f"is {value!r:.80}, expected {expected} for a parameter of model", f"{self.place}/{key}/{name}")
            for key in BY_NAME
            if isinstance(values.get(key), Mapping)
            for kinds, expected in [((bool,), "boolean") if key in BY_NAME[:2] else ((int, float), "number")]
            for name, value in values[key].items()
            if name not in paths or not isinstance(value, kinds)
        )

    def others(self) -> dict[str, Tree]:
        hyperparameters = load_schema(self.maker.schema).hyperparameters
        return {k: v for k, v in self.values.items() if k not in _NOT_VALUES and k not in hyperparameters}


def _slots(
    state: Any, parts: Sequence[_Part], paths: Names, faults: Faults
) -> dict[str, Mapping[str, Tensor]]:
    if not isinstance(state, Mapping):
        faults.add("isn't a map", "optimizer/state")
        return {}
    pairs = [(i, paths[n]) for part in parts for i, n in zip(part.values["params"], part.names, strict=True)]
    index = dict(pairs)
    if len(index) != len(pairs):
        faults.add("have numbers that aren't their own", "optimizer/param_groups")
    slots_of: dict[str, Mapping[str, Tensor]] = {}
    for i, slots in state.items():
        if i not in index:
            faults.add("belongs to no parameter", f"optimizer/state/{i}")
        elif not isinstance(slots, Mapping):
            faults.add("isn't a map of slots", f"optimizer/state/{i}")
        else:
            wrong = [name for name, slot in slots.items() if not isinstance(slot, Tensor)]
            faults += [(f"slot {name} of {index[i]} is no tensor", f"optimizer/state/{i}") for name in wrong]
            slots_of[index[i]] = slots
    return slots_of


SEVERAL = "statekit.torch.Partition"
"""The class whose state the files of a run with several optimizers hold."""
CLASSES = {schema: f"statekit.torch.{name}" for schema, name in options.CLASSES.items()}
"""Schema -> the class whose state its files hold."""

_FORMS: dict[str, Any] = {
    "optimizer_class": str, "variant": str | None, "schedule": int,
    "paths": Mapping, "assumptions": list, "extra": Mapping,
}  # fmt: skip
_SHOWN = 3


@dataclass(frozen=True)
class StatekitTorch:
    """The checkpoint of a run with an optimizer of statekit.torch."""

    name: str = "statekit-torch"
    title: str = "model, optimizer and step of a run with an optimizer of statekit.torch, by parameter name"
    containers: tuple[str, ...] = ("torch", "dcp", "hf-trainer", "accelerate", "safetensors")
    schedule_in: str = "apart"
    holds_several: bool = True

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """Those that statekit steps."""
        return {schema: load_schema(schema).stepped for schema in CLASSES}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the keys of the parameter groups."""
        if not isinstance(checkpoint.tree, Mapping) or not looks_ours(checkpoint.tree.get("optimizer")):
            return None
        return Evidence(
            30, "optimizer/param_groups with param_names, rules and step, as statekit.torch has them"
        )

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; hints override hyperparameters by their canonical names."""
        faults = Faults()
        state = _decoded(checkpoint.tree, faults)
        faults.check(
            StateError,
            "The checkpoint isn't one of statekit.torch",
            place=checkpoint.path,
            remedy="save a dict with model: model.state_dict() and optimizer: optimizer.state_dict()",
        )
        assert state is not None  # without a fault there is one
        return hints.applied(state)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree; every tensor as it is."""
        optimizer = state.optimizer
        require_optimizer(state, CLASSES, self.name)
        for schema, variant in optimizer.kinds:
            steppable = load_schema(schema).stepped
            if variant not in (*steppable, None):
                raise InexactError(
                    f"{CLASSES[schema]} can't go on with this optimizer.",
                    expected=f"{schema}, variant {', '.join(steppable)}",
                    found=f"{schema}, variant {variant}",
                )
        names = _names(state)
        extra = {key: part for key, part in state.extra.items() if key != NAMES}  # `paths` says them
        buffers, others = extra.pop(BUFFERS, {}), extra.pop(BESIDE, {})
        other_parts = {key: part for key, part in others.items() if key not in ("model", "optimizer")}
        form: Any = Sequence[dict[Any, Any]]
        of_groups = typed(extra.pop(GROUPS, []), form, f"extra/{GROUPS}", error=StateError)
        dropped = not_plain(extra, "extra") | not_plain(other_parts, f"extra/{BESIDE}")
        params = {names[path]: tensor for path, tensor in state.params.items()}
        tree = {
            "model": {**params, **tied(state.extra, params), **buffers},
            "optimizer": encode_groups(state, names, of_groups),
            "step": state.counts.updates,
            "optimizer_class": SEVERAL if optimizer.several else CLASSES[optimizer.schema],
            "variant": optimizer.variant,
            "schedule": state.counts.schedule,
            "paths": {name: path for path, name in names.items()},
            "assumptions": list(state.assumptions),
            "extra": {key: part for key, part in extra.items() if is_plain(part)},
            **{key: part for key, part in other_parts.items() if is_plain(part)},
        }
        return with_names(Encoded(tree, state.counts.updates, dropped=dropped))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        match saved.container:
            case "hf-trainer":
                return lines.trainer_lines(state, saved)
            case "accelerate":
                return lines.accelerate_lines(state, saved)
        if not saved.run.schedules:
            return torch_lines(state, saved)
        return lines.torch_lines(state, saved)


def _names(state: TrainState) -> Names:
    taken: dict[str, str] = {}
    faults = Faults()
    for path, name in names_of(state.extra, state.params).items():
        if (other := taken.setdefault(name, path)) != path:
            faults.add(f"has the torch name {name}, as has {other}", path)
    faults.check(StateError, "Parameters have the same name in torch", remedy="rename one of each pair")
    return {path: name for name, path in taken.items()}


def _decoded(tree: Any, faults: Faults) -> TrainState | None:
    if not isinstance(tree, Mapping) or "optimizer" not in tree:
        faults.add("there is none", "optimizer")
        return None
    is_own = tree.get("optimizer_class") in (*CLASSES.values(), SEVERAL)
    entries = {key: tree[key] for key in _FORMS if is_own and key in tree}
    model, optimizer = tree.get("model"), by_index(tree["optimizer"])
    _check_forms(entries, faults)
    if not isinstance(model, Mapping):
        faults.add("there are no parameters", "model")
        return None
    if faults:
        return None
    paths = _paths(model, optimizer, entries.get("paths", {}))
    faults += _model_faults(model, paths)
    makers = list(_makers(optimizer["param_groups"], entries, faults))
    decoded = decode_groups(optimizer, makers, paths, faults) if not faults else DecodedGroups()
    if faults:
        return None
    parts, notes = _parts_beside(model, paths, is_own)
    parts |= {GROUPS: list(decoded.others), BESIDE: _beside(tree, entries, decoded.updates)}
    counts = Counts(
        decoded.updates, entries.get("schedule", decoded.updates), decoded.behind, "schedule" in entries
    )
    return TrainState(
        params={path: model[name] for name, path in paths.items()},
        slots=decoded.slots,
        optimizer=Optimizer.of(decoded.groups, [(maker.schema, maker.variant) for maker in makers]),
        counts=counts,
        rules=decoded.rules,
        extra={**entries.get("extra", {}), **{key: part for key, part in parts.items() if any(part)}},
        assumptions=(*entries.get("assumptions", ()), *decoded.notes, *notes),
    )


def _check_forms(entries: Mapping[str, Any], faults: Faults) -> None:
    """Adds the entries of ours that have another form than we write."""
    faults += [
        ("has another form", key) for key, part in entries.items() if not isinstance(part, _FORMS[key])
    ]
    notes = entries.get("assumptions", [])
    if isinstance(notes, list):
        faults += [
            ("is no text", f"assumptions/{i}") for i, note in enumerate(notes) if type(note) is not str
        ]


def _paths(
    model: Mapping[str, Any], optimizer: Mapping[str, Any], stated: Mapping[str, Any]
) -> dict[str, str]:
    """Returns the path of each entry of the model that the optimizer or the file knows as a parameter."""
    named = {*moved_names(optimizer), *frozen_names(optimizer), *stated}
    return {name: str(stated.get(name, path_of(name))) for name in model if name in named}


def _parts_beside(
    model: Mapping[str, Any], paths: Mapping[str, str], ours: bool
) -> tuple[dict[str, Any], list[str]]:
    """Returns the model's ties and buffers, as `extra` keeps them, and the assumptions about them."""
    ties = ties_of({name: leaf for name, leaf in model.items() if isinstance(leaf, Tensor)}, paths)
    ties = {name: tie for name, tie in ties.items() if name not in paths}
    buffers = {name: leaf for name, leaf in model.items() if name not in paths and name not in ties}
    by_path = {path_of(name): paths[tie] for name, tie in ties.items()}
    named = {path: name for name, path in paths.items() if "/" in name} | stated_names(ties)
    notes = []
    if buffers and not ours:
        shown = ", ".join(list(buffers)[:_SHOWN]) + (" ..." if len(buffers) > _SHOWN else "")
        notes.append(f"Entries of model that stand in no parameter group are taken for buffers: {shown}.")
    return {BUFFERS: buffers, TIES: by_path, NAMES: named}, notes


def _makers(
    groups: Sequence[Mapping[str, Any]], entries: Mapping[str, Any], faults: Faults
) -> Iterator[OptimizerVariant]:
    """Yields whose each group is; files from when there was only one optimizer name no schema.

    What a group doesn't say is as the first has it, and groups of one schema are of one variant.
    """
    first = groups[0]
    usual = first.get("schema", "adafactor"), first.get("variant", entries.get("variant", "t5x"))
    variants: dict[str, str | None] = {}
    for i, group in enumerate(groups):
        schema, place = group.get("schema", usual[0]), f"optimizer/param_groups/{i}"
        variant = group.get("variant", usual[1] if schema == usual[0] else None)
        if not fits(schema, Name) or not fits(variant, Name | None):
            faults.add("has no names of a schema and a variant", place)
            continue
        if schema not in CLASSES or (variant is not None and variant not in load_schema(schema).variants):
            faults.add(f"is of {schema!r:.80}, variant {variant!r:.80}", place)
            continue
        if variants.setdefault(schema, variant) != variant:
            faults.add(f"is of {schema}, variant {variant}, unlike the file", place)
        yield OptimizerVariant(schema, variant)


def _model_faults(model: Mapping[str, Any], paths: Names) -> Iterator[tuple[str, str]]:
    """Yields the parameters that are no tensors, and those that share a path."""
    yield from (("is no tensor", f"model/{name}") for name in paths if not isinstance(model[name], Tensor))
    yield from _collisions(paths)


def _collisions(paths: Mapping[str, str]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    return [
        (f"has the path {path}, as has {first[path]}", f"model/{name}")
        for name, path in paths.items()
        if first.setdefault(path, name) != name
    ]


def _beside(tree: Mapping[str, Any], entries: Mapping[str, Any], updates: int) -> dict[str, Tree]:
    """Returns the user's own entries; `step` is one if it counts something else than updates."""
    rest = {key: part for key, part in tree.items() if key not in ("model", "optimizer", *entries)}
    if integer(rest.get("step")) == updates:
        del rest["step"]
    return rest


LAYOUT = StatekitTorch()
