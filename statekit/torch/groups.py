"""Parameter groups of statekit.torch.Adafactor: named parameters, canonical hyperparameters, one rule per parameter.

A group is a plain dict, so that `state_dict` and pickling carry it:

    params, param_names                     as PyTorch has them
    lr                                      float, 0-d tensor, or None while nobody has given one
    step                                    updates done
    rules                                   {name: {"axes": [...], "known_from": ...}}
    beta1, decay_rate, step_offset, ...     canonical hyperparameters; one that is missing is unknown
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from statekit.errors import UsageError, fault_list
from statekit.optim.factoring import Entry, effective, first_entry, labels, map_entries
from statekit.schema import load_schema
from statekit.state import Group, Rule
from statekit.tensor import DTYPES

ParamGroup: TypeAlias = dict[str, Any]

SCHEMA = load_schema("adafactor")
VARIANT = "t5x"
"""The variant whose rule the optimizer follows."""
SCALE = "multiply_by_parameter_scale"
_SHOWN = 40


def path_of(name: str) -> str:
    """Returns the canonical path of a parameter's name."""
    return name.replace(".", "/")


def check_named(group: ParamGroup, others: Sequence[ParamGroup]) -> None:
    """Checks the parameters of a new group, before PyTorch takes them apart.

    Raises:
        UsageError: A parameter has no name, or one that is taken, or can't be optimized; lists every one.
    """
    params = group["params"]
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    names = group.setdefault("param_names", []) if not group["params"] else group.get("param_names")
    if names is None or len(names) != len(group["params"]):
        if not all(_is_named(item) for item in group["params"]):
            raise UsageError(
                "The optimizer needs its parameters' names: its state is kept and loaded by name.",
                expected="model.named_parameters(), or groups of (name, parameter)",
                found="parameters without names",
                remedy="pass model.named_parameters() instead of model.parameters()",
            )
        pairs = list(group["params"])
    else:
        pairs = list(zip(names, group["params"], strict=True))
    taken = {path_of(name): name for other in others for name in other["param_names"]}
    held = {id(param) for other in others for param in other["params"]}
    faults: list[tuple[str, str]] = []
    for name, param in pairs:
        if path_of(name) in taken:
            faults.append((f"has the name of another parameter, {taken[path_of(name)]}", name))
        elif id(param) in held:
            faults.append(("is another name of a parameter that is there already", name))
        if not param.is_floating_point():
            faults.append((f"is {param.dtype}; only real floating-point parameters can be stepped", name))
        elif param.layout != torch.strided:
            faults.append((f"is {param.layout}; only dense parameters can be stepped", name))
        taken[path_of(name)] = name
        held.add(id(param))
    _refuse("Parameters can't be optimized", faults)


def _is_named(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    )


def settle(group: ParamGroup) -> None:
    """Settles the rules and the parameter scale of a new group, and checks its values.

    Raises:
        UsageError: A value can't be, an option has another optimizer's name, or a parameter has no factor rule;
            lists every one.
    """
    _refuse("The optimizer's options can't be used", list(_option_faults(group)))
    factor_map = group.pop("factor_map", None)
    faults: list[tuple[str, str]] = []
    if "rules" not in group:
        entries = None if factor_map is None else map_entries(factor_map, "factor_map")
        group["rules"] = {
            name: _rule(name, tuple(param.shape), entries, group, faults)
            for name, param in zip(group["param_names"], group["params"], strict=True)
        }
    group[SCALE] = scale_of(group[SCALE], group["param_names"], faults)
    if faults:
        raise UsageError(
            f"Parameters lack a rule: {len(faults)}.",
            found=fault_list(faults[:_SHOWN]),
            remedy='give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as in the run '
            "whose rule it is, or factored=False",
        )


def _option_faults(group: ParamGroup) -> Iterator[tuple[str, str]]:
    for name in SCHEMA.hyperparameters:
        if name in group and name not in (SCALE, "factor_map") and (fault := SCHEMA.fault(name, group[name])):
            yield f"is {group[name]!r}, {fault}", name
    if group.get("dtype_momentum", "float32") not in DTYPES:
        yield f"is {group['dtype_momentum']!r}, expected a dtype", "dtype_momentum"
    if not is_rate(group["lr"]):
        yield f"is {group['lr']!r}, expected a number from 0 on, a 0-d tensor or None", "lr"
    if not isinstance(group["step"], int) or group["step"] < 0:
        yield f"is {group['step']!r}, expected the number of updates done", "step"
    for canonical, spec in SCHEMA.hyperparameters.items():
        for variant in ("torch", "hf"):  # an option in a group is ignored if nobody knows its name
            native = str(spec["native"].get(variant, {}).get("name", canonical)).partition("[")[0]
            if native in group and native not in ("lr", canonical):
                yield f"is another optimizer's name for {canonical}", native


def is_rate(lr: Any) -> bool:
    """Tells whether a value can be a group's learning rate."""
    if isinstance(lr, torch.Tensor):
        return lr.dim() == 0
    return lr is None or (isinstance(lr, (int, float)) and not isinstance(lr, bool) and 0 <= lr < math.inf)


def _rule(
    name: str,
    shape: tuple[int, ...],
    entries: tuple[Entry, ...] | None,
    group: ParamGroup,
    faults: list[tuple[str, str]],
) -> dict[str, Any]:
    """Returns one parameter's rule as it stands in a group."""
    entry = first_entry(entries or (), name, path_of(name))
    axes = effective(
        labels(entry.value) if entry else None, shape, group["factored"], group["min_dim_size_to_factor"]
    )
    if entries and entry is None and entries[0].is_regex and group["factored"]:
        faults.append(("is found by no regex of factor_map", name))
    elif axes is None:
        faults.append((f"has shape {shape} and no factor rule", name))
    elif len(axes) != len(shape):
        faults.append((f"has shape {shape}, but a factor rule for {len(axes)} axes", name))
    return Rule(axes or (), "given").to_json()


def scale_of(value: Any, names: Sequence[str], faults: list[tuple[str, str]]) -> bool | dict[str, bool]:
    """Returns a parameter scale as one bool, or one for each name; adds to `faults` the names it leaves open."""
    if isinstance(value, bool):
        return value
    entries = map_entries(value, SCALE)
    found = {}
    for name in names:
        entry = first_entry(entries, name, path_of(name))
        if entry is None or not isinstance(entry.value, bool):
            faults.append((f"{SCALE} has no true or false for it", name))
        else:
            found[name] = entry.value
    return found


def _refuse(subject: str, faults: Sequence[tuple[str, str]]) -> None:
    if faults:
        raise UsageError(f"{subject}: {len(faults)} faults.", found=fault_list(faults[:_SHOWN]))


def canonical(group: ParamGroup) -> Group:
    """Returns a group's hyperparameters as the step takes them: by path."""
    known = {name: group[name] for name in SCHEMA.hyperparameters if name in group}
    if isinstance(scale := known.get(SCALE), Mapping):
        known[SCALE] = {path_of(name): flag for name, flag in scale.items()}
    return Group(tuple(map(path_of, group["param_names"])), known)


def rules_of(group: ParamGroup) -> dict[str, Rule]:
    """Returns a group's factor rules, by path."""
    return {path_of(name): Rule.from_json(rule) for name, rule in group["rules"].items()}
