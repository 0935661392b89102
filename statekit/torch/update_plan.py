"""The plan of a group's updates: made at its first step, and again whenever the group changes."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any, TypeAlias

import torch

from statekit.arrays.backend import backend
from statekit.errors import StateError, UnknownRuleError
from statekit.optim.run import steps_for
from statekit.optim.steps import Steps
from statekit.state.options import RATE_NAMES, rate_needed
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Filled
from statekit.torch.fast.dispatch import FastMove, fast_path, is_mixed
from statekit.torch.groups import ParamGroup, canonical, rules_of
from statekit.torch.sharding import is_sharded
from statekit.torch.slots import Slots

STACK = 2**22
"""The most elements that the reference text updates in one stack."""
_OTHERS = ("param_names", "schema", "variant", "rules", "foreach")
"""Keys of a group that decide its plan, beside its hyperparameters."""
_OF_ALL = ("global_norm_clip_threshold", "clipnorm", "clipvalue", "loss_scale_factor", "clipping_scale")
"""Options with which the gradients of a group are changed together, before tensors are moved."""
_MISSING = object()


@dataclass(frozen=True)
class Batch:
    """Parameters that are moved together, by a fast path or by the reference text."""

    fast: FastMove | None
    paths: tuple[str, ...]


@dataclass(frozen=True)
class GroupPlan:
    """How a group is moved.

    Attributes:
        params: Its parameters.
        kinds: Their shapes, dtypes and devices, and whether they are contiguous.
        options: The keys of the group that decide the plan, copied.
        by_name: The keys with an entry for each parameter: the group's own objects.
        group: Paths and canonical hyperparameters.
        configs: The settled configuration of each parameter that can be stepped, by path.
        faults: Why the others can't be stepped, by path.
        batches: The parameters that are moved together.
        rate_needed: Whether the learning rate has to be given.
        sharded: Whether processes hold parts of it.
    """

    params: tuple[torch.Tensor, ...]
    kinds: tuple[Kind, ...]
    options: Mapping[str, Any]
    by_name: Mapping[str, Any]
    group: Group
    configs: Mapping[str, Hashable]
    faults: Mapping[str, str]
    batches: tuple[Batch, ...]
    rate_needed: bool
    sharded: bool

    @property
    def acts_on_all(self) -> bool:
        """Whether gradients of the group are changed together before tensors are moved."""
        hyper = self.group.hyperparameters
        return any(hyper.get(name) is not None for name in _OF_ALL)

    @property
    def reads_sharded(self) -> bool:
        """Whether the reference text reads tensors of which processes hold parts."""
        return self.sharded and (self.acts_on_all or any(batch.fast is None for batch in self.batches))

    def holds(self, group: ParamGroup) -> bool:
        """Tells whether the group is still as it was."""
        params = group["params"]
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(map(_same_kind, params, self.kinds))
            and _deciding(group) == self.options
        )

    def is_same_rule(self, group: ParamGroup) -> bool:
        """Tells whether the group still has the same parameters and options; what they hold may have changed.

        Names and factor rules count as the same while they are the same objects: there is one for each parameter.
        """
        params = group["params"]
        return (
            len(params) == len(self.params)
            and all(map(is_, params, self.params))
            and all(group.get(key) is by_name for key, by_name in self.by_name.items())
            and all(
                group.get(key, _MISSING) == self.options.get(key, _MISSING)
                for key in _deciding_keys(group["schema"])
                if key not in self.by_name
            )
        )


Kind: TypeAlias = tuple[torch.Size, torch.dtype, torch.device, bool]


def _kind_of(param: torch.Tensor) -> Kind:
    # `module.to` and whoever sets `param.data` leave the same parameter with other memory.
    return param.shape, param.dtype, param.device, param.is_contiguous()


def _same_kind(param: torch.Tensor, kind: Kind) -> bool:
    return _kind_of(param) == kind


def _deciding(group: ParamGroup) -> dict[str, Any]:
    return {key: group[key] for key in _deciding_keys(group["schema"]) if key in group}


@cache
def _deciding_keys(schema: str) -> tuple[str, ...]:
    return (*_OTHERS, *(name for name in load_schema(schema).hyperparameters if name not in RATE_NAMES))


def plan_group(group: ParamGroup, slots: Mapping[torch.Tensor, Slots]) -> GroupPlan:
    """Plans how a group is moved."""
    steps, variant = steps_for(group["schema"], group["variant"]), group["variant"]
    canonical_group, rules = canonical(group), rules_of(group)
    params = dict(zip(canonical_group.paths, group["params"], strict=True))
    configs, faults = {}, {}
    checked: dict[Hashable, str] = {}
    for path, param in params.items():
        kind = _kind(path, param, rules.get(path), slots[param], canonical_group)
        if kind not in checked:
            checked[kind] = _fault(steps, group, canonical_group, path, param, rules.get(path), slots[param])
        if checked[kind]:
            faults[path] = checked[kind]
        else:
            configs[path] = steps.settle(canonical_group, path, rules.get(path), variant)
    return GroupPlan(
        params=tuple(params.values()),
        kinds=tuple(map(_kind_of, params.values())),
        options=copy.deepcopy(_deciding(group)),
        by_name={key: group.get(key) for key in ("param_names", "rules")},
        group=canonical_group,
        configs=configs,
        faults=faults,
        batches=tuple(_batches(group, params, configs, slots)),
        rate_needed=rate_needed(group["schema"], variant, group),
        sharded=any(map(is_sharded, params.values())),
    )


def _kind(path: str, param: torch.Tensor, rule: Rule | None, slots: Slots, group: Group) -> Hashable:
    """Returns the key of what a check of a parameter depends on: equal ones are checked once."""
    kind = (rule, tuple(param.shape), param.dtype, tuple((name, slot.dtype) for name, slot in slots.items()))
    named = any(isinstance(value, Mapping) for value in group.hyperparameters.values())
    return (path, *kind) if named else kind


def _fault(
    steps: Steps,
    group: ParamGroup,
    whole: Group,
    path: str,
    param: torch.Tensor,
    rule: Rule | None,
    slots: Slots,
) -> str:
    """Returns why the reference text can't step a parameter; "" if it can."""
    alone = Group((path,), whole.hyperparameters)
    state = TrainState(
        {path: _described(param)},
        {path: {name: _described(slot) for name, slot in slots.items()}},
        Optimizer(group["schema"], group["variant"], (alone,)),
        Counts(0, 0),
        {} if rule is None else {path: rule},
    )
    try:
        steps.check(state, alone)
        steps.settle(whole, path, rule, group["variant"])
    except (UnknownRuleError, StateError) as error:
        return f"unknown: {error.expected}" if error.found is None else f"{error.found}: {error.subject}"
    except KeyError:
        return "unknown: what holds for it, of the hyperparameters by name"
    return ""


def _described(value: torch.Tensor) -> Filled:
    return Filled(tuple(value.shape), DTYPES[backend("torch").dtype(value)])


def _batches(
    group: ParamGroup,
    params: Mapping[str, torch.Tensor],
    configs: Mapping[str, Hashable],
    slots: Mapping[torch.Tensor, Slots],
) -> Iterator[Batch]:
    batches: dict[Hashable, tuple[FastMove | None, int, list[str]]] = {}
    for path, config in configs.items():
        param = params[path]
        fast = None
        if group["foreach"]:
            fast = fast_path(group["schema"], group["variant"], config, param, slots[param])
        usual = type(param) in (torch.Tensor, torch.nn.Parameter) and param.numel() > 0
        together = group["foreach"] and (usual or fast is not None)
        shape = None if is_mixed(fast) else param.shape
        kind = (fast or config, shape, param.dtype, param.device) if together else path
        most = 1 if not together else len(params) if fast else max(1, STACK // param.numel())
        batches.setdefault(kind, (fast, most, []))[2].append(path)
    for fast, most, paths in batches.values():
        for start in range(0, len(paths), most):
            yield Batch(fast, tuple(paths[start : start + most]))
