"""Parameter groups of the optimizers: named parameters, canonical hyperparameters, one factor rule per parameter.

A group is a plain dict, so that `state_dict` and pickling carry it:

    params, param_names                     as PyTorch has them
    lr                                      float, 0-d tensor, or None while nobody has given one
    schema, variant                         whose rule moves it
    step                                    updates done
    behind                                  {name: updates done} of parameters that missed some, where the variant
                                            counts them apart; missing while none did
    rules                                   {name: {"axes": [...], "known_from": ...}}; empty where nothing is factored
    slots                                   {slot: tensor} of the group as a whole; missing where there are none
    foreach                                 whether equal parameters are moved together
    beta1, decay_rate, step_offset, ...     canonical hyperparameters; one that is missing is unknown
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from statekit.converters.layouts.statekit_torch_groups import RATE_NAMES, SCALE, by_other_names
from statekit.errors import UsageError, fault_list
from statekit.optim.factoring import Entry, by_shape, effective, first_entry, labels, map_entries
from statekit.optim.settings import form
from statekit.schema import OptimizerSchema, load_schema
from statekit.state import Axis, Group, Rule
from statekit.tensor import DTYPES

ParamGroup: TypeAlias = dict[str, Any]

EXCLUDED = "exclude_from_weight_decay"
_SHOWN = 40
_RULES_REMEDY = (
    'give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as in the run whose rule '
    "it is, or factored=False"
)
_OURS = ("params", "param_names", "lr", "schema", "variant", "step", "behind", "rules", "slots", "foreach")


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


def settle(group: ParamGroup, schema: OptimizerSchema, variant: str) -> None:
    """Settles what a new group says by name, and checks its values.

    Args:
        group: The group, with the optimizer's defaults.
        schema: The optimizer's schema.
        variant: The optimizer's variant.

    Raises:
        UsageError: A value can't be, an option has another optimizer's name, or a parameter has no factor rule;
            lists every one.
    """
    _refuse("The optimizer's options can't be used", list(_option_faults(group, schema, variant)))
    factor_map = group.pop("factor_map", None)
    faults: list[tuple[str, str]] = []
    if "rules" not in group:
        group["rules"] = {}
        if "v_row" in schema.slots:
            entries = None if factor_map is None else map_entries(factor_map, "factor_map")
            group["rules"] = {
                name: _rule(name, tuple(param.shape), entries, group, faults)
                for name, param in zip(group["param_names"], group["params"], strict=True)
            }
    if SCALE in group:
        group[SCALE] = flags_of(SCALE, group[SCALE], group["param_names"], faults)
    if group.get(EXCLUDED) is not None and form(schema.name, variant)["decay_exclusions"] == "mask":
        group[EXCLUDED] = _mask(group[EXCLUDED], group["param_names"], faults)
    faults += [
        (f"isn't a parameter of the group; {key} belongs into the group that has it", name)
        for key in ("lr_mult", "wd_mult")
        for name in group.get(key) or ()
        if path_of(name) not in map(path_of, group["param_names"])
    ]
    if faults:
        raise UsageError(
            f"What the options say by name doesn't fit the parameters: {len(faults)} faults.",
            found=fault_list(faults[:_SHOWN]),
            remedy=_RULES_REMEDY if "v_row" in schema.slots else "",
        )


def _option_faults(group: ParamGroup, schema: OptimizerSchema, variant: str) -> Iterator[tuple[str, str]]:
    offered = (*schema.variant(variant)["defaults"], "factor_map")
    for name in schema.hyperparameters:
        if name not in group or name == "lr":
            continue
        if name not in offered or name in RATE_NAMES:
            yield f"isn't an option of variant {variant}", name
        elif name not in (SCALE, "factor_map") and (fault := schema.fault(name, group[name])):
            yield f"is {group[name]!r}, {fault}", name
    by_mask = form(schema.name, variant).get("decay_exclusions") == "mask"
    if isinstance(group.get(EXCLUDED), Mapping) and not by_mask:
        yield "is a map, expected a list of regexes", EXCLUDED
    if (group.get("dtype_momentum") or "float32") not in DTYPES:
        yield f"is {group['dtype_momentum']!r}, expected a dtype", "dtype_momentum"
    if not is_rate(group["lr"]):
        yield f"is {group['lr']!r}, expected a number from 0 on, a 0-d tensor or None", "lr"
    if not isinstance(group["step"], int) or group["step"] < 0:
        yield f"is {group['step']!r}, expected the number of updates done", "step"
    if (group["schema"], group["variant"]) != (schema.name, variant):
        yield f"is {group['variant']!r}, expected {variant} in all groups of an optimizer", "variant"
    for canonical, spec in schema.hyperparameters.items():
        natives = {str(native.get("name", canonical)).partition("[")[0] for native in spec["native"].values()}
        for native in sorted(natives - {*schema.hyperparameters, *_OURS}):
            if native in group:  # it would be ignored: nobody knows the name
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
    settings = {**load_schema(group["schema"]).settings(group["variant"]), **group}
    factored, minimum = settings["factored"], settings["min_dim_size_to_factor"]
    entry = first_entry(entries or (), name, path_of(name))
    given = labels(entry.value) if entry else None
    axes: tuple[Axis, ...] | None
    if form(group["schema"], group["variant"])["factored_rank"] == "two_or_rule":
        axes = effective(given, shape, factored, minimum)
    else:
        axes = given or by_shape(form(group["schema"], group["variant"]), shape, factored, minimum)
    if entries and entry is None and entries[0].is_regex and factored:
        faults.append(("is found by no regex of factor_map", name))
    elif axes is None:
        faults.append((f"has shape {shape} and no factor rule", name))
    elif len(axes) != len(shape):
        faults.append((f"has shape {shape}, but a factor rule for {len(axes)} axes", name))
    return Rule(axes or (), "given").to_json()


def flags_of(
    option: str, value: Any, names: Sequence[str], faults: list[tuple[str, str]]
) -> bool | dict[str, bool]:
    """Returns an option as one bool, or one for each name; adds to `faults` the names it leaves open.

    Args:
        option: What it is called, for errors.
        value: A bool, {name: bool}, or [(regex, bool), ...].
        names: Names of the parameters.
        faults: Where faults are added.
    """
    if isinstance(value, bool):
        return value
    entries = map_entries(value, option)
    found = {}
    for name in names:
        entry = first_entry(entries, name, path_of(name))
        if entry is None or not isinstance(entry.value, bool):
            faults.append((f"{option} has no true or false for it", name))
        else:
            found[name] = entry.value
    return found


def _mask(value: Any, names: Sequence[str], faults: list[tuple[str, str]]) -> Any:
    """Returns which parameters are kept from weight decay, by name; regexes are searched in name and path."""
    if isinstance(value, Mapping):
        return flags_of(EXCLUDED, value, names, faults)
    entries = map_entries([(pattern, True) for pattern in value], EXCLUDED)
    return {name: first_entry(entries, name, path_of(name)) is not None for name in names}


def _refuse(subject: str, faults: Sequence[tuple[str, str]]) -> None:
    if faults:
        raise UsageError(f"{subject}: {len(faults)} faults.", found=fault_list(faults[:_SHOWN]))


def canonical(group: ParamGroup) -> Group:
    """Returns a group's paths and hyperparameters as the step takes them: by path."""
    known = {
        name: group[name]
        for name in load_schema(group["schema"]).hyperparameters
        if name in group and name not in RATE_NAMES
    }
    paths = {name: path_of(name) for name in group["param_names"]}
    return Group(tuple(paths.values()), by_other_names(known, paths))


def rules_of(group: ParamGroup) -> dict[str, Rule]:
    """Returns a group's factor rules, by path."""
    return {path_of(name): Rule.from_json(rule) for name, rule in group["rules"].items()}
