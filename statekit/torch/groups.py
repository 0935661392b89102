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
    scaled                                  by what a map multiplied the parameters; missing where it is 1
    foreach                                 whether equal parameters are moved together
    beta1, decay_rate, step_offset, ...     canonical hyperparameters; one that is missing is unknown
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from statekit.dropin.by_name import by_name, factor_rules, path_of, refuse_by_name
from statekit.dropin.options import refuse_options
from statekit.errors import Faults, UsageError
from statekit.state.options import (
    FACTOR_MAP,
    RATE,
    RATE_NAMES,
    by_other_names,
    is_rate,
    native_options,
    read_options,
)
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import BY_NAME, Group, Rule

ParamGroup: TypeAlias = dict[str, Any]

_OURS = ("params", "param_names", "lr", "schema", "variant", "step", "behind", "rules", "slots", "foreach")


def _named_pairs(group: ParamGroup) -> list[tuple[str, Any]]:
    """Returns the parameters of a new group with their names, and makes a list of them in the group."""
    params = group["params"]
    group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    names = group.setdefault("param_names", []) if not group["params"] else group.get("param_names")
    if names is not None and len(names) == len(group["params"]):
        return list(zip(names, group["params"], strict=True))
    if not all(_is_named(item) for item in group["params"]):
        raise UsageError(
            "The optimizer needs its parameters' names: its state is kept and loaded by name.",
            expected="model.named_parameters(), or groups of (name, parameter)",
            found="parameters without names",
            remedy="pass model.named_parameters() instead of model.parameters()",
        )
    return list(group["params"])


def check_named(group: ParamGroup, others: Sequence[ParamGroup]) -> None:
    """Checks the parameters of a new group, before PyTorch takes them apart.

    Raises:
        UsageError: A parameter has no name, or one that is taken, or can't be optimized; lists every one.
    """
    pairs = _named_pairs(group)
    taken = {path_of(name): name for other in others for name in other["param_names"]}
    ids = {id(param) for other in others for param in other["params"]}
    faults = Faults()
    for name, param in pairs:
        if path_of(name) in taken:
            faults.add(f"has the name of another parameter, {taken[path_of(name)]}", name)
        elif id(param) in ids:
            faults.add("is another name of a parameter that is there already", name)
        if not param.is_floating_point():
            faults.add(f"is {param.dtype}; only real floating-point parameters can be stepped", name)
        elif param.layout != torch.strided:
            faults.add(f"is {param.layout}; only dense parameters can be stepped", name)
        taken[path_of(name)] = name
        ids.add(id(param))
    faults.check(UsageError, "Parameters can't be optimized")


def _is_named(item: Any) -> bool:
    return (
        isinstance(item, tuple)
        and len(item) == 2
        and isinstance(item[0], str)
        and isinstance(item[1], torch.Tensor)
    )


def read_group(group: ParamGroup, schema: OptimizerSchema, variant: str) -> None:
    """Puts the options of a new group under their canonical names, before the optimizer's defaults join them.

    Keys that mean nothing here stay: schedulers and users keep their own there.

    Raises:
        UsageError: A value can't be, is said twice, or has another optimizer's name; lists every one.
    """
    natives = native_options(schema.name, variant)
    names = {*schema.hyperparameters, *natives, *RATE_NAMES} - {"lr"}
    stated = {key: value for key, value in group.items() if key in names}
    options = read_options(schema.name, variant, stated, rate="lr")
    faults = [*options.faults, *_group_faults(group, schema, variant)]
    refuse_options(faults, options.remedy)
    for key in stated:
        del group[key]
    group.update(options.values)


def _group_faults(group: ParamGroup, schema: OptimizerSchema, variant: str) -> Iterator[tuple[str, str]]:
    if fault := rate_fault(group.get("lr")):
        yield fault, "lr"
    step = group.get("step", 0)
    if not isinstance(step, int) or step < 0:
        yield f"is {step!r}, expected the number of updates done", "step"
    rule = group.get("schema", schema.name), group.get("variant", variant)
    if rule != (schema.name, variant):
        yield f"is {rule[1]!r}, expected {variant} in all groups of an optimizer", "variant"
    names = {*schema.hyperparameters, *native_options(schema.name, variant), *_OURS}
    for canonical in schema.hyperparameters:
        natives = {schema.spelling(other, canonical).argument for other in schema.variants}
        for native in sorted(natives - names):
            if native in group:  # it would be ignored: nobody knows the name
                yield f"is another optimizer's name for {canonical}", native


def rate_fault(lr: Any) -> str:
    """Returns why a value can't be a group's learning rate; "" if it can."""
    if isinstance(lr, torch.Tensor):
        fits = lr.dim() == 0 and (lr.device.type != "cpu" or is_rate(lr.item()))
    else:
        fits = lr is None or is_rate(lr)
    return "" if fits else f"is {lr!r}, expected {RATE}, a 0-d tensor or None"


def settle_group(group: ParamGroup, schema: OptimizerSchema, variant: str) -> None:
    """Settles what a new group says by name.

    Args:
        group: The group, with the optimizer's defaults.
        schema: The optimizer's schema.
        variant: The optimizer's variant.

    Raises:
        UsageError: A parameter has no factor rule, or an option leaves it open; lists every one.
    """
    names: list[str] = group["param_names"]
    faults = Faults()
    shapes = {name: tuple(param.shape) for name, param in zip(names, group["params"], strict=True)}
    if "rules" not in group:
        rules = factor_rules(schema, variant, group, shapes, faults)
        group["rules"] = {name: rule.to_json() for name, rule in rules.items()}
    group.pop(FACTOR_MAP, None)
    stated = {option: group[option] for option in BY_NAME if option in group}
    group.update(by_name(schema, variant, stated, names, faults))
    refuse_by_name(schema, faults)


def canonical(group: ParamGroup) -> Group:
    """Returns a group's paths and hyperparameters as the step takes them: by path."""
    hyperparameters = {
        name: group[name]
        for name in load_schema(group["schema"]).hyperparameters
        if name in group and name not in RATE_NAMES
    }
    paths = {name: path_of(name) for name in group["param_names"]}
    return Group(tuple(paths.values()), by_other_names(hyperparameters, paths))


def rules_of(group: ParamGroup) -> dict[str, Rule]:
    """Returns a group's factor rules, by path."""
    return {path_of(name): Rule.from_json(rule) for name, rule in group["rules"].items()}
