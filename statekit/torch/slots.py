"""The slots that parameters and groups have by the reference text: at the start, and as a state must hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from statekit.arrays.backend import backend
from statekit.optim.run import steps_for
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, Rule
from statekit.tensors.tensor import DTYPES, DType, Tensor
from statekit.torch.groups import ParamGroup, canonical, rules_of

Slots: TypeAlias = dict[str, torch.Tensor]
Source: TypeAlias = torch.Tensor | Tensor
"""Where values come from: memory, or a file that is read block by block."""


def first_slots(group: ParamGroup) -> Iterator[Slots]:
    """Yields the slots of each of a group's parameters before its first update, where the parameter lives."""
    whole, rules = _completed(group, {}), rules_of(group)
    for path, param in zip(whole.paths, group["params"], strict=True):
        yield _init(group, whole, path, rules.get(path), param.detach())


def first_group_slots(group: ParamGroup, stored: Mapping[str, Source] | None = None) -> Slots:
    """Returns the slots of a group as a whole before its first update.

    Args:
        group: The group.
        stored: Slots in a state: they tell what hyperparameters that nobody knows must have been.
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
        stored: Its slots in a state: they tell what hyperparameters that nobody knows must have been.
    """
    shape = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return _init(group, _completed(group, stored), path, rule, shape)


def _init(group: ParamGroup, whole: Group, path: str, rule: Rule | None, param: torch.Tensor) -> Slots:
    steps, variant = steps_for(group["schema"], group["variant"]), group["variant"]
    return steps.init(backend("torch"), param, steps.settle(whole, path, rule, variant), variant)


def _completed(group: ParamGroup, stored: Mapping[str, Source]) -> Group:
    """Returns a group in which no hyperparameter is unknown, good for shapes and dtypes only."""
    schema, known = load_schema(group["schema"]), canonical(group)
    implied = {name: of(stored) for name, of in IMPLIED.items() if name in schema.hyperparameters}
    values = {**schema.settings(group["variant"]), **implied, **known.hyperparameters}
    filled = {
        name: schema.hyperparameters[name].get("default") if value is None else value
        for name, value in values.items()
    }
    return replace(known, hyperparameters=filled)


def _length(stored: Mapping[str, Source], slot: str) -> int:
    return int(stored[slot].shape[0]) if slot in stored and len(stored[slot].shape) else 1


IMPLIED: Mapping[str, Callable[[Mapping[str, Source]], Any]] = {
    "beta1": lambda stored: 0.5 if "m" in stored else None,
    "dtype_momentum": lambda stored: dtype_of(stored["m"]).name if "m" in stored else "float32",
    "amsgrad": lambda stored: "v_max" in stored,
    "use_ema": lambda stored: "average" in stored,
    "multi_precision": lambda stored: "master" in stored,
    "size_update_period": lambda stored: _length(stored, "scale_grads"),
    "clipping_scale": lambda stored: 1.0 if "model_norms" in stored else None,
    "clipping_update_period": lambda stored: _length(stored, "model_norms"),
}
"""What slots tell of the hyperparameters that decide which slots there are."""


def dtype_of(source: Source) -> DType:
    """Returns the dtype in NumPy's terms."""
    if isinstance(source, torch.Tensor):
        return DTYPES[backend("torch").dtype(source)]
    return source.dtype
