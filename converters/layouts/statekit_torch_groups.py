"""The `optimizer` part of the layout `statekit-torch`: parameter groups, and slots by index.

`params` numbers the parameters over all groups, in order; `state` has the slots under these numbers.
Source: PyTorch torch/optim/optimizer.py, `Optimizer.state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from statekit.errors import InexactError
from statekit.schema import load_schema
from statekit.state import Group, KnownFrom, Rule, TrainState
from statekit.tensor import Tensor
from statekit.tree import Tree

Names: TypeAlias = Mapping[str, str]
Faults: TypeAlias = list[tuple[str, str]]

FROZEN = "frozen"
"""Key of the first group: names of the parameters that no group moves. A file without them takes them for buffers."""
_SCALE = "multiply_by_parameter_scale"
_OURS = ("params", "param_names", "rules", "step")
_NOT_VALUES = (*_OURS, "lr", "known_from", FROZEN)
_KNOWN_FROM = ("file", "given", "assumed")


@dataclass(frozen=True)
class Found:
    """What the optimizer part says. `others` are keys of each group that mean nothing here, such as `initial_lr`."""

    groups: tuple[Group, ...]
    slots: Mapping[str, Mapping[str, Tensor]]
    rules: Mapping[str, Rule]
    updates: int
    others: tuple[Mapping[str, Tree], ...]
    notes: tuple[str, ...]


def looks_ours(optimizer: Any) -> bool:
    """Tells whether every parameter group has the keys that mark ours."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return (
        isinstance(groups, list)
        and bool(groups)
        and all(isinstance(group, Mapping) and group.keys() >= {*_OURS} for group in groups)
    )


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


def encode_groups(state: TrainState, names: Names, others: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Returns `state` and `param_groups`.

    Raises:
        InexactError: A group has slots as a whole, which Adafactor has no use for.
    """
    moved = {path for group in state.optimizer.groups for path in group.paths}
    frozen = [names[path] for path in state.params if path not in moved]
    index = {path: i for i, path in enumerate(p for group in state.optimizer.groups for p in group.paths)}
    groups = []
    for i, group in enumerate(state.optimizer.groups):
        if group.slots:
            raise InexactError("Adafactor's groups have no slots of their own.", found=", ".join(group.slots))
        groups.append(
            {
                **(others[i] if i < len(others) else {}),
                **_values(group, names),
                "step": state.counts.updates,
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
    values = {"lr": None, **group.hyperparameters}
    values["lr"] = values.pop("learning_rate", None)
    if isinstance(scale := values.get(_SCALE), Mapping):
        values[_SCALE] = {names[path]: flag for path, flag in scale.items()}
    return values


def decode_groups(optimizer: Mapping[str, Any], paths: Names, faults: Faults) -> Found:
    """Returns what the optimizer part says; adds to `faults` what doesn't fit.

    Args:
        optimizer: `state` and `param_groups`, with the keys that mark ours.
        paths: Path of each name that `model` has.
        faults: Where faults are added.
    """
    parts = [_Part(f"optimizer/param_groups/{i}", group) for i, group in enumerate(optimizer["param_groups"])]
    for part in parts:
        part.check(paths, faults)
    if faults:
        return Found((), {}, {}, 0, (), ())
    slots = _slots(optimizer.get("state"), parts, paths, faults)
    rules = {path: rule for part in parts for path, rule in part.rules(paths, faults)}
    updates = max(part.step for part in parts)
    notes = [
        f"Parameter group {i} has made {part.step} of {updates} updates; its step_offset is counted from there."
        for i, part in enumerate(parts)
        if part.step != updates
    ]
    groups = tuple(part.decoded(paths, updates, faults) for part in parts)
    others = tuple(part.others() for part in parts)
    return Found(groups, slots, rules, updates, others if any(others) else (), tuple(notes))


@dataclass(frozen=True)
class _Part:
    """One parameter group of the file."""

    place: str
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
            for key in ("rules", "known_from")
            if not isinstance(self.values.get(key, {}), Mapping)
        ]

    def rules(self, paths: Names, faults: Faults) -> Iterator[tuple[str, Rule]]:
        for name in self.names:
            if name not in self.values["rules"]:
                continue
            try:
                rule = Rule.from_json(self.values["rules"][name])
            except (LookupError, TypeError, ValueError) as error:
                faults.append((f"has no readable rule: {error}", f"{self.place}/rules/{name}"))
                continue
            if rule.known_from not in _KNOWN_FROM:
                faults.append((f"known_from is {rule.known_from!r:.80}", f"{self.place}/rules/{name}"))
            yield paths[name], rule

    def decoded(self, paths: Names, updates: int, faults: Faults) -> Group:
        schema = load_schema("adafactor")
        known = self.values.get("known_from", {})
        values = {name: _scalar(self.values[name]) for name in schema.hyperparameters if name in self.values}
        rate = _scalar(self.values.get("lr"))
        if rate is not None or "learning_rate" in known:
            values["learning_rate"] = rate
        faults += [
            (f"is {value!r:.80}, {fault}", f"{self.place}/{name}")
            for name, value in values.items()
            if not (name == _SCALE and isinstance(value, Mapping)) and (fault := schema.fault(name, value))
        ]
        if isinstance(scale := values.get(_SCALE), Mapping):
            faults += [
                (
                    f"is {flag!r:.80}, expected boolean for a parameter of model",
                    f"{self.place}/{_SCALE}/{name}",
                )
                for name, flag in scale.items()
                if name not in paths or not isinstance(flag, bool)
            ]
            values[_SCALE] = {paths[name]: flag for name, flag in scale.items() if name in paths}
        if self.step != updates and isinstance(offset := values.get("step_offset"), int):
            values["step_offset"] = offset + updates - self.step
        sources: dict[str, KnownFrom] = {name: known.get(name, "file") for name in values}
        faults += [
            (f"known_from is {source!r:.80}", f"{self.place}/known_from/{name}")
            for name, source in sources.items()
            if source not in _KNOWN_FROM
        ]
        return Group(tuple(paths[name] for name in self.names), values, sources)

    def others(self) -> dict[str, Tree]:
        known = load_schema("adafactor").hyperparameters
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
