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

from statekit.converters.layouts.own.statekit_torch import by_other_names
from statekit.dropin.by_name import EXCLUDED, MULTIPLIERS, SCALE, Faults, by_name, factor_rules, path_of
from statekit.errors import UsageError, fault_list
from statekit.state.constants import variant_constants
from statekit.state.options import RATE_NAMES, option_faults
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Group, Rule
from statekit.tensors.tensor import DTYPES

ParamGroup: TypeAlias = dict[str, Any]

_SHOWN = 40
_RULES_REMEDY = (
    'give factor_map=[(regex, ["ROW", "COLUMN", "BATCH" or "NONE" for each axis]), ...] as in the run whose rule '
    "it is, or factored=False"
)
_OURS = ("params", "param_names", "lr", "schema", "variant", "step", "behind", "rules", "slots", "foreach")


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
    names: list[str] = group["param_names"]
    faults: Faults = []
    shapes = {name: tuple(param.shape) for name, param in zip(names, group["params"], strict=True)}
    if "rules" not in group:
        rules = factor_rules(schema, variant, group, shapes, faults)
        group["rules"] = {name: rule.to_json() for name, rule in rules.items()}
    group.pop("factor_map", None)
    flags = {option: group[option] for option in (SCALE, EXCLUDED) if option in group}
    own_names = {path_of(name): name for name in names}
    group.update(by_other_names(by_name(schema, variant, flags, names, faults), own_names))
    faults += [
        (f"isn't a parameter of the group; {key} belongs into the group that has it", name)
        for key in MULTIPLIERS
        for name in group.get(key) or ()
        if path_of(name) not in own_names
    ]
    if faults:
        raise UsageError(
            f"What the options say by name doesn't fit the parameters: {len(faults)} faults.",
            found=fault_list(faults[:_SHOWN]),
            remedy=_RULES_REMEDY if "v_row" in schema.slots else "",
        )


def _option_faults(group: ParamGroup, schema: OptimizerSchema, variant: str) -> Iterator[tuple[str, str]]:
    options = {name: group[name] for name in schema.hyperparameters if name in group and name != "lr"}
    yield from option_faults(schema.name, variant, options)
    by_mask = variant_constants(schema.name, variant).get("decay_exclusions") == "mask"
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
