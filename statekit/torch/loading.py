"""Loading an optimizer's state by parameter name."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from statekit.backends import backend
from statekit.errors import StateError, fault_list
from statekit.optim.adafactor import slot_shapes
from statekit.state import Rule
from statekit.tensor import DTYPES, DType, Tensor, blocks, dtype_named, widens
from statekit.torch.groups import SCALE, ParamGroup, path_of

Source: TypeAlias = torch.Tensor | Tensor
"""Where values come from: memory, or a file that is read block by block."""
Sources: TypeAlias = Mapping[str, tuple[Source, DType]]
"""Slot -> its values, and the dtype it shall have."""

_SHOWN = 40
_BY_POSITION = ("params", "param_names")


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


def match(groups: Sequence[ParamGroup], saved: Mapping[str, Any]) -> Match:
    """Fits a state to an optimizer's groups, by name; changes neither.

    Raises:
        StateError: It doesn't fit; lists every fault.
    """
    faults: list[tuple[str, str]] = []
    theirs = _saved(saved, faults)
    ours = {path_of(name): name for group in groups for name in group["param_names"]}
    faults += [("isn't in the state", name) for path, name in ours.items() if path not in theirs]
    faults += [
        ("is in the state, but not in the optimizer", own.name)
        for path, own in theirs.items()
        if path not in ours
    ]
    partners = list(_partners(groups, theirs, faults))
    fitted: list[ParamGroup] = []
    slots: list[tuple[torch.Tensor, Sources]] = []
    for group, partner in zip(groups, partners, strict=True):
        whole = group if partner is None else _merged(group, saved["param_groups"][partner], theirs)
        fitted.append(whole)
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if (own := theirs.get(path_of(name))) is not None and partner is not None:
                slots.append((param, _sources(name, param, own.slots, whole, faults)))
    if faults:
        more = f"\n    and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise StateError(
            f"The state doesn't fit the optimizer: {len(faults)} faults.",
            found=fault_list(faults[:_SHOWN]) + more,
            remedy="names and shapes must be those of the run; of a wrapped model pass the inner module's parameters",
        )
    return Match(tuple(fitted), tuple(slots))


def _saved(saved: Mapping[str, Any], faults: list[tuple[str, str]]) -> dict[str, _Saved]:
    """Returns what the state holds, by path."""
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, Sequence) or not isinstance(state, Mapping) or not all(map(_is_ours, groups)):
        raise StateError(
            "This isn't a state of statekit.torch.Adafactor.",
            expected="state and param_groups, each group with params, param_names, rules and step",
            found=", ".join(map(str, saved)) or "nothing",
            remedy="open another optimizer's file with statekit.torch.load_optimizer, or convert it first",
        )
    found: dict[str, _Saved] = {}
    for i, group in enumerate(groups):
        for name, index in zip(group["param_names"], group["params"], strict=True):
            if path_of(name) in found:
                faults.append(("stands in the state twice", name))
            found[path_of(name)] = _Saved(i, name, state.get(index))
    return found


def _is_ours(group: Any) -> bool:
    if not isinstance(group, Mapping) or not {"params", "param_names", "rules", "step"} <= group.keys():
        return False
    named = len(group["params"]) == len(group["param_names"])
    return named and isinstance(group["step"], int) and isinstance(group["rules"], Mapping)


def _partners(
    groups: Sequence[ParamGroup], theirs: Mapping[str, _Saved], faults: list[tuple[str, str]]
) -> Iterator[int | None]:
    """Yields for each group the one of the state that holds the same parameters."""
    claimed: dict[int, int] = {}
    for i, group in enumerate(groups):
        found = sorted({theirs[path_of(n)].group for n in group["param_names"] if path_of(n) in theirs})
        if len(found) > 1:
            faults.append((f"holds parameters of the groups {found} of the state", f"group {i}"))
        elif found and found[0] in claimed:
            whose = f"group {claimed[found[0]]}"
            faults.append((f"shares the state's group {found[0]} with {whose}", f"group {i}"))
        partner = found[0] if found else None
        if partner is not None:
            claimed.setdefault(partner, i)
        yield partner


def _merged(group: ParamGroup, saved: Mapping[str, Any], theirs: Mapping[str, _Saved]) -> ParamGroup:
    values = {key: copy.deepcopy(value) for key, value in saved.items() if key not in _BY_POSITION}
    if values.get("lr") is None:  # unknown there
        values.pop("lr", None)
    whole = {**group, **values}
    names = {name: theirs[path_of(name)].name for name in group["param_names"] if path_of(name) in theirs}
    for key in ("rules", SCALE):
        if isinstance(by_name := values.get(key), Mapping):
            whole[key] = {name: by_name[own] for name, own in names.items() if own in by_name}
    return whole


def _sources(
    name: str, param: torch.Tensor, slots: Any, group: ParamGroup, faults: list[tuple[str, str]]
) -> Sources:
    if not isinstance(slots, Mapping):
        faults.append(("has no slots in the state", name))
        return {}
    try:
        rule = Rule.from_json(group["rules"][name])
    except (LookupError, TypeError, ValueError):
        faults.append(("has no factor rule in the state", name))
        return {}
    if len(rule.axes) != param.dim():
        faults.append((f"has rank {param.dim()}, in the state {len(rule.axes)}", name))
        return {}
    momentum = group["beta1"] is not None if "beta1" in group else "m" in slots
    expected = slot_shapes(rule, tuple(param.shape), momentum)
    faults += [
        (f"has slot {slot} in the state, but no use for it", name) for slot in slots if slot not in expected
    ]
    found: dict[str, tuple[Source, DType]] = {}
    for slot, shape in expected.items():
        source = slots.get(slot)
        if not isinstance(source, (torch.Tensor, Tensor)):
            faults.append((f"has no slot {slot} in the state", name))
            continue
        have = dtype_of(source)
        want = dtype_named(group.get("dtype_momentum", have.name) if slot == "m" else "float32", name)
        if tuple(source.shape) != shape:
            faults.append(
                (f"slot {slot} has shape {tuple(source.shape)} in the state, expected {shape}", name)
            )
        elif not widens(have, want):
            faults.append((f"slot {slot} is {have} in the state and wouldn't fit {want}", name))
        found[slot] = (source, want)
    return found


def dtype_of(source: Source) -> DType:
    """Returns the dtype in NumPy's terms."""
    if isinstance(source, torch.Tensor):
        return DTYPES[backend("torch").dtype(source)]
    return source.dtype


def taken_over(param: torch.Tensor, slots: Sources) -> dict[str, torch.Tensor]:
    """Returns new tensors with the slots' values, where a parameter lives."""
    return {slot: _filled(source, dtype, param.device) for slot, (source, dtype) in slots.items()}


def _filled(source: Source, dtype: DType, device: torch.device) -> torch.Tensor:
    target = torch.empty(tuple(source.shape), dtype=getattr(torch, dtype.name), device=device)
    copy_into(target, source)
    return target


@torch.no_grad()
def copy_into(target: torch.Tensor, source: Source) -> None:
    """Copies values into a tensor of their shape, block by block where they lie in a file."""
    if isinstance(source, torch.Tensor):
        target.copy_(source)
        return
    xp = backend("torch")
    for index in blocks(source):
        target[index].copy_(xp.asarray(source.read(index)))
