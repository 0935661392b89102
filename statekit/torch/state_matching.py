"""Loading an optimizer's state by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from statekit.arrays.backend import backend
from statekit.dropin.by_name import path_of
from statekit.errors import Faults, StateError
from statekit.optim.run import counts_apart
from statekit.state.schema import load_schema
from statekit.state.train_state import BY_NAME, Rule, RuleRecord
from statekit.tensors.tensor import Tensor, blocks, widens
from statekit.tensors.tree import mapped
from statekit.tensors.typed import fits
from statekit.torch.groups import ParamGroup, rate_fault
from statekit.torch.sharding import is_sharded, laid_out_like, own_part
from statekit.torch.slots import Slots, Source, dtype_of, expected_slots, first_group_slots

Sources: TypeAlias = Mapping[str, tuple[Source | None, torch.Tensor]]
"""Slot -> its values (None: those before the first update), and a tensor of the shape and dtype it shall have."""

_KEPT = ("params", "param_names", "schema", "variant", "slots")
"""Keys of a group that are its own, whatever a state says, or that are fitted by themselves."""
_NARROW = "wouldn't fit"
_SAME_NAMES = (
    "names and shapes must be those of the run; of a wrapped model pass the inner module's parameters"
)
_WIDEN = (
    "slots are wider than the parameters, as where a run moves float32 masters: make the optimizer of model.float(), "
    "fill that with load_params, and compute in the lower precision under torch.autocast"
)


@dataclass(frozen=True)
class Match:
    """A state that fits an optimizer.

    Attributes:
        groups: The optimizer's groups with the state's values.
        slots: For each parameter, its slots.
    """

    groups: tuple[ParamGroup, ...]
    slots: tuple[tuple[torch.Tensor, Sources], ...]


@dataclass(frozen=True)
class _Saved:
    group: int
    name: str
    slots: Any


def match(
    schemas: Collection[str], kind: str, groups: Sequence[ParamGroup], saved: Mapping[str, Any]
) -> Match:
    """Fits a state to an optimizer's groups, by name; changes neither.

    Args:
        schemas: The schemas that its groups may have.
        kind: The optimizer's class.
        groups: The optimizer's groups.
        saved: `state` and `param_groups`.

    Raises:
        StateError: It doesn't fit; lists every fault.
    """
    faults = Faults()
    saved_state = _saved(schemas, kind, saved, faults)
    name_of = {path_of(name): name for group in groups for name in group["param_names"]}
    faults += [("isn't in the state", name) for path, name in name_of.items() if path not in saved_state]
    faults += [
        ("is in the state, but not in the optimizer", entry.name)
        for path, entry in saved_state.items()
        if path not in name_of
    ]
    partners = list(_partners(groups, saved_state, faults))
    fitted: list[ParamGroup] = []
    slots: list[tuple[torch.Tensor, Sources]] = []
    for i, (group, partner) in enumerate(zip(groups, partners, strict=True)):
        if partner is None:
            fitted.append(group)
            continue
        stored = _read(saved["param_groups"][partner])
        if _schema_of(stored) != group["schema"]:
            faults.add(f"is of {_schema_of(stored)}, the optimizer of {group['schema']}", f"group {i}")
            continue
        if stored.get("variant") not in (group["variant"], None):
            faults.add(
                f"is of variant {stored['variant']}, the optimizer of {group['variant']}", f"group {i}"
            )
            continue
        faults += _value_faults(stored, group["schema"], f"group {i}")
        whole = _merged(group, stored, saved_state)
        fitted.append(_with_slots(whole, stored.get("slots", {}), f"group {i}", faults))
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if (entry := saved_state.get(path_of(name))) is not None:
                slots.append((param, _sources(name, param, entry.slots, whole, faults)))
    is_narrow = any(_NARROW in fault for fault, _ in faults)
    faults.check(
        StateError, "The state doesn't fit the optimizer", remedy=_WIDEN if is_narrow else _SAME_NAMES
    )
    return Match(tuple(fitted), tuple(slots))


def _saved(
    schemas: Collection[str], kind: str, saved: Mapping[str, Any], faults: Faults
) -> dict[str, _Saved]:
    """Returns what the state holds, by path."""
    groups, state = saved.get("param_groups"), saved.get("state")
    is_own = isinstance(groups, Sequence) and all(_is_ours(schemas, group) for group in groups)
    if not is_own or not isinstance(groups, Sequence) or not isinstance(state, Mapping):
        raise StateError(
            f"This isn't a state of statekit.torch.{kind}.",
            expected="state and param_groups, each group with params, param_names, rules and step",
            found=", ".join(map(str, saved)) or "nothing",
            remedy="open another optimizer's file with statekit.torch.load_optimizer, or convert it first",
        )
    entries: dict[str, _Saved] = {}
    for i, group in enumerate(groups):
        for name, index in zip(group["param_names"], group["params"], strict=True):
            if path_of(name) in entries:
                faults.add("stands in the state twice", name)
            entries[path_of(name)] = _Saved(i, name, state.get(index))
    return entries


def _schema_of(group: Mapping[str, Any]) -> str:
    return str(group.get("schema", "adafactor"))


def _is_ours(schemas: Collection[str], group: Any) -> bool:
    if not isinstance(group, Mapping) or not {"params", "param_names", "rules", "step"} <= group.keys():
        return False
    named = len(group["params"]) == len(group["param_names"]) and _schema_of(group) in schemas
    maps = all(isinstance(group.get(key, {}), Mapping) for key in ("rules", "slots", "behind"))
    return named and isinstance(group["step"], int) and maps


def _partners(
    groups: Sequence[ParamGroup], theirs: Mapping[str, _Saved], faults: Faults
) -> Iterator[int | None]:
    """Yields for each group the one of the state that holds the same parameters."""
    claimed: dict[int, int] = {}
    for i, group in enumerate(groups):
        holders = sorted({theirs[path_of(n)].group for n in group["param_names"] if path_of(n) in theirs})
        if len(holders) > 1:
            faults.add(f"holds parameters of the groups {holders} of the state", f"group {i}")
        elif holders and holders[0] in claimed:
            whose = f"group {claimed[holders[0]]}"
            faults.add(f"shares the state's group {holders[0]} with {whose}", f"group {i}")
        partner = holders[0] if holders else None
        if partner is not None:
            claimed.setdefault(partner, i)
        yield partner


def _value_faults(saved: Mapping[str, Any], schema: str, place: str) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with the values of a group of the state."""
    rules = load_schema(schema)
    for name in rules.hyperparameters:
        if name in saved and name != "lr" and (fault := rules.fault(name, saved[name])):
            yield f"is {saved[name]!r:.80}, {fault}", f"{place}/{name}"
    if fault := rate_fault(saved.get("lr")):
        yield fault, f"{place}/lr"


def _read(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group of a state with values of its own; slots are read when they are fitted."""
    return {key: value if key in _KEPT else mapped(value, _own) for key, value in group.items()}


def _own(value: Any) -> Any:
    """Returns a value of a group for itself: a number of a file's tensor of one, as a tensor rate's `initial_lr` is."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    array = value.read()
    return array.item() if array.size == 1 else backend("torch").asarray(array)


def _merged(group: ParamGroup, saved: Mapping[str, Any], theirs: Mapping[str, _Saved]) -> ParamGroup:
    values = {key: value for key, value in saved.items() if key not in _KEPT}
    if values.get("lr") is None:  # unknown there
        values.pop("lr", None)
    if not isinstance(values.get("foreach"), bool):  # torch.optim has other words for it
        values.pop("foreach", None)
    whole = {key: value for key, value in group.items() if key != "behind"} | values
    names = {name: theirs[path_of(name)].name for name in group["param_names"] if path_of(name) in theirs}
    for key in ("rules", "behind", *BY_NAME):
        if isinstance(by_name := values.get(key), Mapping):
            whole[key] = {name: by_name[native] for name, native in names.items() if native in by_name}
    return whole


def _with_slots(group: ParamGroup, stored: Mapping[str, Any], place: str, faults: Faults) -> ParamGroup:
    """Returns a group with new tensors for its own slots."""
    first = first_group_slots(group, stored)
    if not first or (not stored and group["step"] == 0):
        return {**group, "slots": first} if first else group
    fitted = _fitted(stored, first, place, faults)
    if faults:
        return group
    near = group["params"][0]
    return {**group, "slots": {name: _filled(source, want, near) for name, (source, want) in fitted.items()}}


def _sources(name: str, param: torch.Tensor, slots: Any, group: ParamGroup, faults: Faults) -> Sources:
    path, rule = path_of(name), None
    if "v_row" in load_schema(group["schema"]).slots:
        record: Any = group["rules"].get(name) if isinstance(group["rules"], Mapping) else None
        if not fits(record, RuleRecord):
            faults.add("has no factor rule in the state", name)
            return {}
        rule = Rule.from_json(record)
        if len(rule.axes) != param.dim():
            faults.add(f"has rank {param.dim()}, in the state {len(rule.axes)}", name)
            return {}
    if not isinstance(slots, Mapping):
        unborn = counts_apart(group["schema"], group["variant"])
        if unborn and not group.get("behind", {}).get(name, group["step"]):
            return {
                slot: (None, empty) for slot, empty in expected_slots(group, path, param, rule, {}).items()
            }
        faults.add("has no slots in the state", name)
        return {}
    return _fitted(slots, expected_slots(group, path, param, rule, slots), name, faults)


def _fitted(
    slots: Mapping[str, Any], expected: Slots, place: str, faults: Faults
) -> dict[str, tuple[Source, torch.Tensor]]:
    """Returns slots with what each shall be."""
    faults += [
        (f"has slot {slot} in the state, but no use for it", place) for slot in slots if slot not in expected
    ]
    fitted: dict[str, tuple[Source, torch.Tensor]] = {}
    for slot, want in expected.items():
        source = slots.get(slot)
        if not isinstance(source, (torch.Tensor, Tensor)):
            faults.add(f"has no slot {slot} in the state", place)
            continue
        shape, have, needed = tuple(want.shape), dtype_of(source), dtype_of(want)
        if tuple(source.shape) != shape:
            faults.add(f"slot {slot} has shape {tuple(source.shape)} in the state, expected {shape}", place)
        elif not widens(have, needed):
            faults.add(f"slot {slot} is {have} in the state and {_NARROW} {needed}", place)
        fitted[slot] = (source, want)
    return fitted


def taken_over(param: torch.Tensor, slots: Sources) -> Slots:
    """Returns new tensors with the slots' values, where a parameter lives."""
    return {slot: _filled(source, want, param) for slot, (source, want) in slots.items()}


def _filled(source: Source | None, want: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
    if source is None:
        return near.detach().new_zeros(want.shape, dtype=want.dtype)
    target = near.detach().new_empty(want.shape, dtype=want.dtype)
    copy_into(target, source)
    return target


@torch.no_grad()
def copy_into(target: torch.Tensor, source: Source) -> None:
    """Copies values into a tensor of their shape, block by block where they lie in a file.

    Of a sharded tensor each process fills its own part, and reads no more than that.
    """
    local, start = own_part(target)
    part = tuple(slice(i, i + n) for i, n in zip(start, local.shape, strict=True))
    if isinstance(source, torch.Tensor):
        local.copy_(laid_out_like(source, target) if is_sharded(source) else source[part])
        return
    xp = backend("torch")
    for block in blocks(source):
        both = [slice(max(b.start, m.start), min(b.stop, m.stop)) for b, m in zip(block, part, strict=True)]
        if all(s.start < s.stop for s in both):
            inner = tuple(slice(s.start - i, s.stop - i) for s, i in zip(both, start, strict=True))
            local[inner].copy_(xp.asarray(source.read(tuple(both))))
