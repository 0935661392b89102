"""The `optimizer` part of the layout `statekit-torch`: parameter groups, and slots by index.

`params` numbers the parameters over all groups, in order; `state` has the slots under these numbers.
Source: PyTorch torch/optim/optimizer.py, `Optimizer.state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from statekit.errors import InexactError
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, KnownFrom, Rule, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

Names: TypeAlias = Mapping[str, str]
Faults: TypeAlias = list[tuple[str, str]]

FROZEN = "frozen"
"""Key of the first group: names of the parameters that no group moves. A file without them takes them for buffers."""
SCALE = "multiply_by_parameter_scale"
BY_NAME = (SCALE, "exclude_from_weight_decay", "lr_mult", "wd_mult")
"""Hyperparameters that may have a value for each parameter: {path: value}, in PyTorch {name: value}."""
RATE_NAMES = ("learning_rate", "lr")
"""What schemas call the learning rate; a group's key is `lr`."""
_OURS = ("params", "param_names", "rules", "step")
_NOT_VALUES = (*_OURS, "lr", "schema", "variant", "behind", "slots", "known_from", FROZEN)
_KNOWN_FROM = ("file", "given", "assumed")


@dataclass(frozen=True)
class Found:
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


def by_other_names(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns hyperparameters with each map by parameter under other names; a parameter without one is left out."""
    return {
        key: {names[own]: one for own, one in value.items() if own in names}
        if key in BY_NAME and isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }


def encode_groups(state: TrainState, names: Names, others: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Returns `state` and `param_groups`.

    Raises:
        InexactError: A group as a whole has slots that its schema doesn't know.
    """
    optimizer, known = state.optimizer, load_schema(state.optimizer.schema).slots
    moved = {path for group in optimizer.groups for path in group.paths}
    frozen = [names[path] for path in state.params if path not in moved]
    index = {path: i for i, path in enumerate(p for group in optimizer.groups for p in group.paths)}
    groups = []
    for i, group in enumerate(optimizer.groups):
        if strange := [name for name in group.slots if name not in known]:
            raise InexactError(
                "A group has slots of its own that its optimizer doesn't know.",
                expected=optimizer.schema,
                found=", ".join(strange),
            )
        groups.append(
            {
                **(others[i] if i < len(others) else {}),
                "schema": optimizer.schema,
                "variant": optimizer.variant,
                **_values(group, names),
                **_counts(state, group, names),
                **({"slots": dict(group.slots)} if group.slots else {}),
                "rules": {names[p]: state.rules[p].to_json() for p in group.paths if p in state.rules},
                "known_from": dict(group.known_from),
                **({FROZEN: frozen} if frozen and i == 0 else {}),
                "param_names": [names[path] for path in group.paths],
                "params": [index[path] for path in group.paths],
            }
        )
    slots = {i: dict(state.slots[path]) for path, i in index.items() if path in state.slots}
    return {"state": slots, "param_groups": groups}


def _values(group: Group, names: Names) -> dict[str, Any]:
    values = by_other_names(group.hyperparameters, names)
    rates = [values.pop(name) for name in RATE_NAMES if name in values]
    return {"lr": rates[0] if rates else None, **values}


def _counts(state: TrainState, group: Group, names: Names) -> dict[str, Any]:
    """Returns what a group counts: a count that all its parameters share is the group's own."""
    behind = {path: state.counts.behind[path] for path in group.paths if path in state.counts.behind}
    if behind and len(behind) == len(group.paths) and len({*behind.values()}) == 1:
        return {"step": next(iter(behind.values()))}
    own = {"behind": {names[path]: count for path, count in behind.items()}} if behind else {}
    return {"step": state.counts.updates, **own}


def decode_groups(optimizer: Mapping[str, Any], kind: Kind, paths: Names, faults: Faults) -> Found:
    """Returns what the optimizer part says; adds to `faults` what doesn't fit.

    Args:
        optimizer: `state` and `param_groups`, with the keys that mark ours.
        kind: Whose groups they are.
        paths: Path of each name that `model` has.
        faults: Where faults are added.
    """
    parts = [
        _Part(f"optimizer/param_groups/{i}", kind, group) for i, group in enumerate(optimizer["param_groups"])
    ]
    for part in parts:
        part.check(paths, faults)
    if faults:
        return Found()
    slots = _slots(optimizer.get("state"), parts, paths, faults)
    rules = {path: rule for part in parts for path, rule in part.rules(paths, faults)}
    updates = max(part.step for part in parts)
    offset = kind.counts_offset
    notes = [
        f"Parameter group {i} has made {part.step} of {updates} updates; its step_offset is counted from there."
        for i, part in enumerate(parts)
        if part.step != updates and offset
    ]
    return Found(
        tuple(part.decoded(paths, updates, faults) for part in parts),
        slots,
        rules,
        updates,
        {path: count for part in parts for path, count in part.behind(paths, updates, faults)},
        tuple(part.others() for part in parts) if any(part.others() for part in parts) else (),
        tuple(notes),
    )


@dataclass(frozen=True)
class Kind:
    """Whose groups a file holds."""

    schema: str
    variant: str | None

    @property
    def counts_offset(self) -> bool:
        """Whether a group that began later is told by its `step_offset`; else by its parameters' counts."""
        known = load_schema(self.schema)
        return self.variant is not None and "step_offset" in known.variant(self.variant)["defaults"]


@dataclass(frozen=True)
class _Part:
    """One parameter group of the file."""

    place: str
    kind: Kind
    values: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.values["param_names"])

    @property
    def step(self) -> int:
        return integer(self.values["step"]) or 0

    def check(self, paths: Names, faults: Faults) -> None:
        names, params = self.values["param_names"], self.values["params"]
        if not isinstance(names, list) or not isinstance(params, list) or len(names) != len(params):
            faults.append(("params and param_names aren't lists of one length", self.place))
            return
        if not all(isinstance(name, str) for name in names) or not all(isinstance(i, int) for i in params):
            faults.append(("params and param_names aren't numbers and names", self.place))
            return
        faults += [("isn't in model", f"{self.place}/{name}") for name in names if name not in paths]
        count = integer(self.values["step"])
        if count is None or count < 0:
            faults.append((f"step is {self.values['step']!r:.80}", self.place))
        faults += [
            (f"{key} isn't a map", self.place)
            for key in ("rules", "known_from", "behind", "slots")
            if not isinstance(self.values.get(key, {}), Mapping)
        ]
        own = self.values.get("schema", self.kind.schema), self.values.get("variant", self.kind.variant)
        if own != (self.kind.schema, self.kind.variant):
            faults.append((f"is of {own[0]}, variant {own[1]}, unlike the file", self.place))

    def rules(self, paths: Names, faults: Faults) -> Iterator[tuple[str, Rule]]:
        for name in self.names:
            if name not in self.values.get("rules", {}):
                continue
            try:
                rule = Rule.from_json(self.values["rules"][name])
            except (LookupError, TypeError, ValueError) as error:
                faults.append((f"has no readable rule: {error}", f"{self.place}/rules/{name}"))
                continue
            if rule.known_from not in _KNOWN_FROM:
                faults.append((f"known_from is {rule.known_from!r:.80}", f"{self.place}/rules/{name}"))
            yield paths[name], rule

    def behind(self, paths: Names, updates: int, faults: Faults) -> Iterator[tuple[str, int]]:
        """Yields the updates done by parameters that missed some."""
        own = self.values.get("behind", {})
        late = self.step != updates and not self.kind.counts_offset
        for name in self.names:
            if name not in own and not late:
                continue
            count = integer(own.get(name, self.step))
            if count is None or count < 0:
                faults.append((f"is {own[name]!r:.80}, expected a count", f"{self.place}/behind/{name}"))
            else:
                yield paths[name], count

    def decoded(self, paths: Names, updates: int, faults: Faults) -> Group:
        schema = load_schema(self.kind.schema)
        known = self.values.get("known_from", {})
        values = {
            name: _scalar(self.values[name])
            for name in schema.hyperparameters
            if name in self.values and name not in RATE_NAMES
        }
        own_rate = next(name for name in RATE_NAMES if name in schema.hyperparameters)
        rate = _scalar(self.values.get("lr"))
        if rate is not None or own_rate in known:
            values[own_rate] = rate
        faults += [
            (f"is {value!r:.80}, {fault}", f"{self.place}/{name}")
            for name, value in values.items()
            if not (name == SCALE and isinstance(value, Mapping)) and (fault := schema.fault(name, value))
        ]
        faults += self._map_faults(values, paths)
        values = by_other_names(values, paths)
        offset = values.get("step_offset")
        if self.step != updates and self.kind.counts_offset and isinstance(offset, int):
            values["step_offset"] = offset + updates - self.step
        sources: dict[str, KnownFrom] = {name: known.get(name, "file") for name in values}
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
        return Group(tuple(paths[name] for name in self.names), values, sources, slots)

    def _map_faults(self, values: Mapping[str, Any], paths: Names) -> Faults:
        return [
            (f"is {one!r:.80}, expected {expected} for a parameter of model", f"{self.place}/{key}/{name}")
            for key in BY_NAME
            if isinstance(values.get(key), Mapping)
            for kinds, expected in [((bool,), "boolean") if key in BY_NAME[:2] else ((int, float), "number")]
            for name, one in values[key].items()
            if name not in paths or not isinstance(one, kinds)
        ]

    def others(self) -> dict[str, Tree]:
        known = load_schema(self.kind.schema).hyperparameters
        return {k: v for k, v in self.values.items() if k not in _NOT_VALUES and k not in known}


def _slots(
    state: Any, parts: Sequence[_Part], paths: Names, faults: Faults
) -> dict[str, Mapping[str, Tensor]]:
    if not isinstance(state, Mapping):
        faults.append(("isn't a map", "optimizer/state"))
        return {}
    pairs = [(i, paths[n]) for part in parts for i, n in zip(part.values["params"], part.names, strict=True)]
    index = dict(pairs)
    if len(index) != len(pairs):
        faults.append(("have numbers that aren't their own", "optimizer/param_groups"))
    found: dict[str, Mapping[str, Tensor]] = {}
    for i, slots in state.items():
        if i not in index:
            faults.append(("belongs to no parameter", f"optimizer/state/{i}"))
        elif not isinstance(slots, Mapping):
            faults.append(("isn't a map of slots", f"optimizer/state/{i}"))
        else:
            wrong = [name for name, slot in slots.items() if not isinstance(slot, Tensor)]
            faults += [(f"slot {name} of {index[i]} is no tensor", f"optimizer/state/{i}") for name in wrong]
            found[index[i]] = slots
    return found
