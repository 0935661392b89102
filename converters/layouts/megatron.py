"""Layout `megatron`: Adam of Megatron-Core, alone or distributed, with or without float32 masters.

    sharded  <name>                            a parameter of the model, or a buffer
             optimizer.state.<slot>.<name>     exp_avg, exp_avg_sq; the float32 master: fp32_param, or param
    common   optimizer/param_groups            options without parameters; under `optimizer` again beside a scaler
             optimizer/state/common_step       the count of updates, or `step` of every group

Which parameters a group moves isn't said: Megatron-Core finds a group again by its multipliers. By its standard rule
those whose name ends with .bias and those of one axis have no weight decay. Layers of one kind may be stacked along
a first axis, which doesn't count.
Source: NVIDIA/Megatron-LM megatron/core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params`, `FP32Optimizer`;
distrib_optimizer.py, `sharded_param_state_fully_reshardable`; __init__.py, `get_standard_config_overrides`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.dropped import dropped_from
from statekit.converters.layouts.pytorch.parts import BESIDE, PLACES, is_plain, not_plain
from statekit.converters.layouts.pytorch.torch_fqn import LAYOUT as BY_NAME
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.stored_params import MASTER
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree

COMMON, SHARDED = "common", "sharded"
_STATE = "optimizer.state."
_SLOTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": MASTER, "param": MASTER}
"""Slot in a key -> slot of torch.optim, or the master."""
_MASTER_KEY = "fp32_param"
_COMMON, _OBJECTS = "megatron_common", "megatron_objects"
"""Keys in `extra`: what lies in common.pt beside the optimizer; what is cut and no tensor."""
_IN_SCALER, _MASTER_NAME = "megatron_mixed_precision", "megatron_master"
"""Keys in `extra`: whether the optimizer lies beside a scaler; what masters are called."""
_MULTIPLIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
_STACKED = re.compile(r"(^|\.)layers\.(?!\d)")
_RULE = (
    "The file doesn't say which parameters its groups move; by Megatron-Core's standard rule those named *.bias and "
    "those of one axis are the group without weight decay."
)
_FUSED = "The optimizer is FusedAdam, which equals torch's AdamW up to rounding."
_SHOWN = 20


@dataclass(frozen=True)
class _Parts:
    """What the keys mean: tensors of the model, slots by name and native slot, other optimizer keys, the rest."""

    model: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Tensor]]
    unknown: Sequence[str]
    objects: Mapping[str, Tree]


@dataclass(frozen=True)
class MegatronAdam:
    """Adam of Megatron-Core."""

    name: str = "megatron"
    title: str = "Adam of Megatron-Core, with float32 masters where the model has less"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adamw": ("torch",)})
    containers: tuple[str, ...] = ("megatron",)
    keeps_masters: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the keys of what is cut."""
        tree = checkpoint.tree
        if not isinstance(tree, Mapping) or not all(
            isinstance(tree.get(k), Mapping) for k in (COMMON, SHARDED)
        ):
            return None
        if _inner(tree[COMMON]) is None:
            return None
        return Evidence(20, f"{COMMON}/optimizer/param_groups beside keys of {SHARDED}")

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Raises:
            StateError: The keys are of another form, or parts don't fit; lists every fault.
            UsageError: A hint that the schema doesn't know.
        """
        common, parts = checkpoint.tree[COMMON], _parts(checkpoint.tree[SHARDED])
        optimizer = _inner(common)
        if optimizer is None or parts.unknown:
            raise _unknown(checkpoint, parts.unknown)
        moved = [name for name in parts.model if name in parts.state] or list(parts.model)
        shapes = {name: parts.model[name].shape for name in moved}
        groups, notes = _grouped(optimizer["param_groups"], shapes, checkpoint)
        step = _step(optimizer)
        state = {
            name: {"step": step, **{_SLOTS[slot]: t for slot, t in record.items() if _SLOTS[slot] != MASTER}}
            for name, record in parts.state.items()
        }
        tree = {
            "model": dict(parts.model),
            "optimizer": {"state": state, "param_groups": groups},
        }
        decoded = BY_NAME.decode(replace(checkpoint, tree=tree), hints)
        masters = {
            name.replace(".", "/"): {MASTER: tensor}
            for name, record in parts.state.items()
            for slot, tensor in record.items()
            if _SLOTS[slot] == MASTER
        }
        called = next(
            (slot for record in parts.state.values() for slot in record if _SLOTS[slot] == MASTER), None
        )
        extra = {
            _COMMON: _without_optimizer(common),
            _OBJECTS: parts.objects,
            _IN_SCALER: "param_groups" not in common["optimizer"],
            _MASTER_NAME: called,
        }
        return replace(
            decoded,
            slots={
                path: {**param_slots, **masters.get(path, {})} for path, param_slots in decoded.slots.items()
            },
            extra={**decoded.extra, **{key: part for key, part in extra.items() if part}},
            assumptions=(*decoded.assumptions, *notes),
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns the parts of the files.

        Raises:
            InexactError: Counts differ, slots have no place, or groups couldn't be told apart again.
        """
        if state.counts.behind:
            raise InexactError(
                "Megatron-Core keeps one count for all parameters.",
                expected=state.counts.updates,
                found=", ".join(f"{path}: {n}" for path, n in list(state.counts.behind.items())[:_SHOWN]),
            )
        bare = {path: {k: t for k, t in slots.items() if k != MASTER} for path, slots in state.slots.items()}
        stored_here = (_COMMON, _OBJECTS, _IN_SCALER, _MASTER_NAME, PLACES)
        extra = {key: part for key, part in state.extra.items() if key not in stored_here}
        encoded = BY_NAME.encode(replace(state, slots=bare, extra=extra))
        model, optimizer = encoded.tree.pop("model"), encoded.tree.pop("optimizer")
        groups = [_with_multipliers(group, state.counts.updates) for group in optimizer["param_groups"]]
        _check_groups(groups, {name: tensor.shape for name, tensor in model.items()})
        steps = [record.pop("step") for record in optimizer["state"].values()]
        if foreign := {slot for record in optimizer["state"].values() for slot in record} - _SLOTS.keys():
            raise InexactError(
                "Megatron-Core's Adam has no such slots.",
                expected=", ".join(_SLOTS),
                found=", ".join(foreign),
            )
        sharded: dict[str, Tree] = dict(model)
        for name, record in optimizer["state"].items():
            sharded |= {f"{_STATE}{slot}.{name}": tensor for slot, tensor in record.items()}
        key = state.extra.get(_MASTER_NAME) or _MASTER_KEY
        for path, slots in state.slots.items():
            if MASTER in slots:
                sharded[f"{_STATE}{key}.{path.replace('/', '.')}"] = slots[MASTER]
        inner = {
            "state": {"common_step": steps[0]} if steps else {},
            "param_groups": [{k: v for k, v in group.items() if k != "params"} for group in groups],
        }
        kept = {k: part for k, part in state.extra.get(_COMMON, {}).items() if is_plain(part)}
        beside = kept.pop("optimizer", {})
        common = {
            "optimizer": {**beside, "optimizer": inner}
            if state.extra.get(_IN_SCALER)
            else {**beside, **inner},
            "iteration": state.counts.updates,
            "checkpoint_version": 3.0,
            **kept,
        }
        lost = not_plain(state.extra.get(_COMMON, {}), f"extra/{_COMMON}")
        beside_model = {key: part for key, part in state.extra.items() if key in (BESIDE, PLACES)}
        dropped = {**encoded.dropped, **lost, **dropped_from(beside_model, (), "Megatron-Core")}
        return replace(
            encoded,
            tree={COMMON: common, SHARDED: {**sharded, **state.extra.get(_OBJECTS, {})}},
            dropped=dropped,
        )


def _inner(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns what holds the groups."""
    node = common.get("optimizer")
    if isinstance(node, Mapping) and "param_groups" not in node:
        node = node.get("optimizer")
    groups = node.get("param_groups") if isinstance(node, Mapping) else None
    fits = isinstance(groups, list) and bool(groups) and all(isinstance(one, Mapping) for one in groups)
    return node if fits else None


def _without_optimizer(common: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what isn't the optimizer's: counts and arguments, and what lies beside it, such as a scaler."""
    node = common["optimizer"]
    known = ("param_groups", "state") if "param_groups" in node else ("optimizer",)
    beside = {key: part for key, part in node.items() if key not in known}
    kept = {key: part for key, part in common.items() if key != "optimizer"}
    return {**kept, "optimizer": beside} if beside else kept


def _parts(sharded: Mapping[str, Tree]) -> _Parts:
    model = {k: t for k, t in sharded.items() if isinstance(t, Tensor) and not _is_optimizers(k)}
    state: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for key in (k for k in sharded if _is_optimizers(k)):
        slot, _, name = key.removeprefix(_STATE).partition(".")
        if key.startswith(_STATE) and slot in _SLOTS and name in model and isinstance(sharded[key], Tensor):
            state.setdefault(name, {})[slot] = sharded[key]
        else:
            unknown.append(key)
    objects = {k: part for k, part in sharded.items() if k not in model and not _is_optimizers(k)}
    return _Parts(model, state, unknown, objects)


def _is_optimizers(key: str) -> bool:
    return key.startswith(("optimizer.", "chained_"))


def _unknown(checkpoint: Checkpoint, keys: Sequence[str]) -> StateError:
    buckets = any(key.startswith("optimizer.distributed.") for key in keys)
    faults = Faults([("another form", key) for key in keys] or [("has no groups", "optimizer")])
    return faults.error(
        StateError,
        "The optimizer's tensors are of another form than a parameter's own.",
        place=checkpoint.path,
        expected=f"keys {_STATE}<slot>.<parameter>, slots {', '.join(_SLOTS)}",
        remedy="save it with --dist-ckpt-optim-fully-reshardable, which keeps whole parameters instead of buckets"
        if buckets
        else "",
    )


def _step(optimizer: Mapping[str, Any]) -> Any:
    state = optimizer.get("state")
    if isinstance(state, Mapping) and "common_step" in state:
        return state["common_step"]
    return next((group["step"] for group in optimizer["param_groups"] if "step" in group), None)


def _grouped(
    groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape], checkpoint: Checkpoint
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Returns the groups with their parameters, and what was assumed."""
    fused = any("bias_correction" in group for group in groups)
    notes = (_FUSED,) if fused else ()
    full = [{**({"amsgrad": False, "maximize": False} if fused else {}), **group} for group in groups]
    if len(full) == 1:
        return [{**full[0], "params": list(shapes)}], notes
    without = [_is_without_decay(group) for group in full]
    if len(full) != 2 or without[0] == without[1]:
        multipliers = [
            ", ".join(f"{k} {group[k]}" for k in _MULTIPLIERS if k in group) or "no multipliers"
            for group in full
        ]
        raise StateError(
            "Nothing tells which parameters the groups move.",
            place=checkpoint.path,
            expected="one group, or one with and one without weight decay",
            found="; ".join(multipliers),
        )
    params = [
        [name for name, shape in shapes.items() if _has_no_decay(name, shape) == one] for one in without
    ]
    return [{**group, "params": names_of} for group, names_of in zip(full, params, strict=True)], (
        *notes,
        _RULE,
    )


def _is_without_decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", group.get("weight_decay")) == 0)


def _has_no_decay(name: str, shape: Shape) -> bool:
    return name.endswith(".bias") or len(shape) - bool(_STACKED.search(name)) == 1


def _with_multipliers(group: Mapping[str, Any], updates: int) -> dict[str, Any]:
    """Returns a group with what Megatron-Core finds it again by, and with its count if it has one."""
    usual = {
        "wd_mult": 0.0 if group.get("weight_decay") == 0 else 1.0,
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
    }
    return {**usual, **group, **({"step": updates} if "step" in group else {})}


def _check_groups(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> None:
    """Refuses groups that the rule wouldn't make again."""
    if len(groups) == 1:
        return
    faults = Faults(_misplaced(groups, shapes))
    if len(groups) > 2:
        faults.add(f"are {len(groups)} groups", "param_groups")
    if faults:
        raise faults.error(
            InexactError,
            "Megatron-Core's files don't say which parameters a group moves, and its rule makes other groups.",
            expected="one group, or those named *.bias and those of one axis apart, without weight decay",
            remedy="write another container, such as dcp",
        )


def _misplaced(groups: Sequence[Mapping[str, Any]], shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str]]:
    for group in groups:
        for name in group["params"]:
            if _has_no_decay(name, shapes[name]) != _is_without_decay(group):
                yield "stands with weight decay" if not _is_without_decay(group) else "stands without", name


LAYOUT = MegatronAdam()
