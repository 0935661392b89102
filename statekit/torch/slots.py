"""The slots that parameters and groups have by the reference text: at the start, and as a state must hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from statekit.arrays.backend import backend
from statekit.optim.run import steps_for
from statekit.state.schema import OptimizerSchema, load_schema
from statekit.state.train_state import Group, Rule
from statekit.tensors.tensor import DTYPES, DType, Tensor
from statekit.torch.groups import ParamGroup, canonical, rules_of

Slots: TypeAlias = dict[str, torch.Tensor]
Source: TypeAlias = torch.Tensor | Tensor
"""Where values come from: memory, or a file that is read block by block."""


@dataclass
class Changes:
    """How often slots of an optimizer were replaced."""

    count: int = 0


def _counted(method: Callable[..., Any]) -> Any:
    def change(self: WatchedSlots, *args: Any, **named: Any) -> Any:
        self.changes.count += 1
        return method(self, *args, **named)

    return change


class WatchedSlots(dict[str, torch.Tensor]):
    """A parameter's slots; who replaces one is counted, so that an update need not ask every tensor who it is.

    A copy or a pickle of it is a plain dict.
    """

    __slots__ = ("changes",)

    def __init__(self, slots: Mapping[str, torch.Tensor], changes: Changes) -> None:
        super().__init__(slots)
        self.changes = changes

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    __setitem__, __delitem__ = _counted(dict.__setitem__), _counted(dict.__delitem__)
    __ior__, update, setdefault = _counted(dict.__ior__), _counted(dict.update), _counted(dict.setdefault)
    pop, popitem, clear = _counted(dict.pop), _counted(dict.popitem), _counted(dict.clear)


def first_slots(group: ParamGroup) -> Iterator[Slots]:
    """Yields the slots of each of a group's parameters before its first update, where the parameter lives."""
    whole, rules = _completed(group, {}), rules_of(group)
    for path, param in zip(whole.paths, group["params"], strict=True):
        yield _init(group, whole, path, rules.get(path), param.detach())


def first_group_slots(group: ParamGroup, stored: Mapping[str, Source] | None = None) -> Slots:
    """Returns the slots of a group as a whole before its first update.

    Args:
        group: The group.
        stored: Slots in a state: they tell what unknown hyperparameters must have been.
    """
    steps, whole = steps_for(group["schema"], group["variant"]), _completed(group, stored or {})
    params = {path: param.detach() for path, param in zip(whole.paths, group["params"], strict=True)}
    return steps.begin(backend("torch"), params, whole, group["variant"])


def expected_slots(
    group: ParamGroup, path: str, param: torch.Tensor, rule: Rule | None, stored: Mapping[str, Source]
) -> Slots:
    """Returns the slots that a parameter must have, without values: on the meta device.

    Args:
        group: Its group.
        path: Its path.
        param: The parameter.
        rule: How it is factored.
        stored: Its slots in a state: they tell what unknown hyperparameters must have been.
    """
    shape = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return _init(group, _completed(group, stored), path, rule, shape)


def _init(group: ParamGroup, whole: Group, path: str, rule: Rule | None, param: torch.Tensor) -> Slots:
    steps, variant = steps_for(group["schema"], group["variant"]), group["variant"]
    return steps.init(backend("torch"), param, steps.settle(whole, path, rule, variant), variant)


def _completed(group: ParamGroup, stored: Mapping[str, Source]) -> Group:
    """Returns a group in which no hyperparameter is unknown, good for shapes and dtypes only."""
    schema, hyperparameters = load_schema(group["schema"]), canonical(group)
    values = {
        **schema.settings(group["variant"]),
        **_implied(schema, stored),
        **hyperparameters.hyperparameters,
    }
    filled = {
        name: schema.hyperparameters[name].get("default") if value is None else value
        for name, value in values.items()
    }
    return replace(hyperparameters, hyperparameters=filled)


def _implied(schema: OptimizerSchema, stored: Mapping[str, Source]) -> dict[str, Any]:
    """Returns the hyperparameters that decide what slots there are, as those of a state show them to have been.

    How a parameter is factored stands in its rule.
    """
    shown, implied = schema.shown_by(stored), dict[str, Any]()
    for name, spec in schema.hyperparameters.items():
        decides = spec.get("decides", {})
        if "existence" in decides:
            off, on = (False, True) if "boolean" in spec["type"] else (None, _SOME)
            implied[name] = on if name in shown else off
        elif "dtype" in decides:
            (slot,) = decides["dtype"]
            implied[name] = dtype_of(stored[slot]).name if slot in stored else "float32"
        elif "length" in decides:
            (slot,) = decides["length"]
            shape = stored[slot].shape if slot in stored else ()
            implied[name] = int(shape[0]) if shape else 1
    return implied


_SOME = 0.5
"""A number for one that is on: slots exist with any."""


def dtype_of(source: Source) -> DType:
    """Returns the dtype in NumPy's terms."""
    if isinstance(source, torch.Tensor):
        return DTYPES[backend("torch").dtype(source)]
    return source.dtype
