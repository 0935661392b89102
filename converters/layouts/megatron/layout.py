"""Layout `megatron`: Adam of Megatron-Core, alone or distributed, with or without float32 masters.

    sharded  <name>                            a parameter of the model, or a buffer
             optimizer.state.<slot>.<name>     exp_avg, exp_avg_sq; the float32 master: fp32_param, or param
    common   optimizer/param_groups            options without parameters; by `optimizer` again beside masters
             optimizer/state/common_step       the count of updates, or `step` of every group
             opt_param_scheduler               the schedule

FP32Optimizer has no masters. Float16OptimizerWithFloat16Params has them of what has less than float32, and the
DistributedOptimizer of everything: see `float16` and `distributed`.
Source: NVIDIA/Megatron-LM megatron/core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params`, `FP32Optimizer`;
distrib_optimizer.py, `sharded_param_state_fully_reshardable`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypedDict

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, Exactness, dropped_from
from statekit.converters.layouts.hyperparameters import require_optimizer
from statekit.converters.layouts.megatron.buckets import has_buckets, with_groups, without_buckets
from statekit.converters.layouts.megatron.groups import with_params, without_params
from statekit.converters.layouts.megatron.lines import megatron_lines
from statekit.converters.layouts.megatron.ranks import BUCKETS, RANKS, has_ranks, without_ranks
from statekit.converters.layouts.megatron.schedule import KEY, written_schedule
from statekit.converters.layouts.megatron.slices import key_of
from statekit.converters.layouts.pytorch.parts import PLACES, is_plain, nameable, names_of, not_plain, path_of
from statekit.converters.layouts.pytorch.torch_fqn import LAYOUT as BY_NAME
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.lines.printing import SavedRun, State
from statekit.lines.rates import RatesOf
from statekit.state.run import BESIDE, run_of
from statekit.state.stored_params import BEGUN_MASTER, MASTER, Proven, in_full, said_of_masters
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree
from statekit.tensors.typed import Name, fits, typed

COMMON, SHARDED = "common", "sharded"
_STATE = "optimizer.state."
_SLOTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": MASTER, "param": MASTER}
"""Slot in a key -> slot of torch.optim, or the master."""
_MASTERS = frozenset(key for key, slot in _SLOTS.items() if slot == MASTER)
_MASTER_KEY = "fp32_param"
_DEFECT = (
    "save the run again as dp_reshardable: Megatron-Core's fully_reshardable (seen in 0.16.1) mixes up the values of "
    "parameters behind a bucket whose end is padded"
)
"""Source: megatron-core 0.16.1, core/optimizer/distrib_optimizer.py, measured against its other formats."""
_COMMON, _OBJECTS = "megatron_common", "megatron_objects"
"""Keys in `extra`: what lies in common.pt beside the optimizer; what is cut and no tensor."""
_IN_SCALER, _MASTER_NAME = "megatron_mixed_precision", "megatron_master"
"""Keys in `extra`: whether the optimizer lies beside a scaler; what masters are called."""
_SHARDING, _CONTENT = "param_state_sharding_type", "content_metadata"
"""Where it is said how a distributed optimizer gathers what ranks hold: beside the groups, and for Megatron-LM."""
_AVOIDED = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""What Megatron-LM says of every checkpoint that it writes."""
_NUMBERED, _LAYER = "non_homogeneous_layers", re.compile(r"(?:^|\.)layers\.(\d+\.)?")
"""What tells Megatron-LM's loader to look for a key of each layer, not for all layers in one; how such keys look."""
_LINEAR = re.compile(
    r"(.*layers\.(\d+\.)?(?:self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12]))\.weight"
)
"""Modules of a layer with a state of their own, which only FP8 fills; the loader asks for the object even so.

Source: megatron-core 0.16.1, core/tensor_parallel/layers.py, `get_extra_state`; core/transformer/utils.py,
`make_sharded_tensors_for_checkpoint`; its loader raised "Missing key in checkpoint state_dict" without.
"""
_FUSED = "The optimizer is FusedAdam, which equals torch's AdamW up to rounding."
_UNCOUNTED = (
    "The groups have no step, so the run's {} iterations are taken for it: fewer are done where updates"
    " were skipped."
)
_SHARED = (
    "The optimizer counts {} updates, and the run has made {} iterations: Megatron-Core without Apex or"
    " TransformerEngine loads one step for all parameters, which then counts once for each of them."
)
_SHOWN = 20


class MegatronParts(TypedDict):
    """The parts that the container gives: common.pt, and what is cut by its flat keys."""

    common: dict[Name, Any]
    sharded: dict[Name, Any]


@dataclass(frozen=True)
class _Parts:
    """What the keys mean: tensors of the model, slots by name and native slot, other optimizer keys, the rest."""

    model: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Tensor]]
    unknown: Sequence[str]
    objects: Mapping[str, Tree]


@dataclass(frozen=True)
class MegatronAdam:
    """Adam of Megatron-Core.

    Attributes:
        masters: What its optimizer calls the float32 copies that it moves; None where it has them or not, as it was.
        sharding: How its optimizer gathers what ranks hold, where it says so beside the groups.
        flags: Options of Megatron-LM that its runs have.
    """

    name: str = "megatron"
    title: str = "Adam of Megatron-Core, with float32 masters where the model has less"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adamw": ("torch",)})
    containers: tuple[str, ...] = ("megatron",)
    stores_values: bool = True
    keeps_masters: bool = True
    masters: str | None = None
    sharding: str | None = None
    flags: str = ""

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks at the keys of what is cut."""
        tree = checkpoint.tree
        if not fits(tree, MegatronParts):
            return None
        common = _common(tree)
        if _inner(common) is None or self._is_other(common["optimizer"]):
            return None
        between = "" if self.masters is None else "/optimizer"
        shown = "" if self.sharding is None else f", {_SHARDING}"
        if has_ranks(tree):
            return Evidence(
                25, f"{RANKS}/mp_rank_00/optimizer{between}/param_groups beside a model, rank by rank"
            )
        return Evidence(20, f"{COMMON}/optimizer{between}/param_groups{shown} beside keys of {SHARDED}")

    def _is_other(self, optimizer: Mapping[str, Any]) -> bool:
        """Tells whether an optimizer is of one of the other forms."""
        has_masters = "param_groups" not in optimizer
        return (has_masters, _SHARDING in optimizer) != (self.masters is not None, self.sharding is not None)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        whole = typed(
            checkpoint.tree,
            MegatronParts,
            checkpoint.path,
            "The checkpoint isn't Megatron-Core's",
            StateError,
        )
        common, sharded, noted = _without_buckets(whole, checkpoint, hints)
        parts = _parts(sharded)
        optimizer = _inner(common)
        if optimizer is None or parts.unknown:
            raise _unknown(checkpoint, parts.unknown)
        moved = [name for name in parts.model if name in parts.state] or list(parts.model)
        shapes = {name: parts.model[name].shape for name in moved}
        stated, said_of_class = _as_torch(optimizer["param_groups"])
        groups, notes = with_params(stated, shapes, checkpoint)
        masters, state = _parted(parts.state, _step(optimizer, common))
        # What is of float32 itself has no second copy: what the optimizer moves is the parameter.
        moved_itself = {
            name: Proven(t, parts.model[name], path_of(name), _DEFECT)
            for name, t in masters.items()
            if parts.model[name].dtype == t.dtype
        }
        tree = {
            "model": {**parts.model, **moved_itself},
            "optimizer": {"state": state, "param_groups": groups},
        }
        decoded = BY_NAME.decode(replace(checkpoint, tree=tree), hints)
        apart = {path_of(name): {MASTER: t} for name, t in masters.items() if name not in moved_itself}
        return replace(
            decoded,
            slots={path: {**slots, **apart.get(path, {})} for path, slots in decoded.slots.items()},
            extra={**decoded.extra, **_extra(common, parts)},
            assumptions=(
                *decoded.assumptions,
                *said_of_class,
                *notes,
                *noted,
                *map(attrgetter("what"), self._odd_counts(common, optimizer, decoded)),
            ),
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns the parts of the files."""
        require_optimizer(state, self.variants, self.name)
        _refuse_counts(state)
        bare = {path: {k: t for k, t in slots.items() if k != MASTER} for path, slots in state.slots.items()}
        stored_here = (_COMMON, _OBJECTS, _IN_SCALER, _MASTER_NAME, PLACES)
        extra, unnamed = nameable({key: part for key, part in state.extra.items() if key not in stored_here})
        encoded = BY_NAME.encode(replace(state, slots=bare, extra=extra))
        model, optimizer = encoded.tree.pop("model"), encoded.tree.pop("optimizer")
        _refuse_names(model)
        shapes = {name: tensor.shape for name, tensor in model.items()}
        kept, other_parts, sharding = self._beside(state, model)
        updates = state.counts.updates
        groups, notes = without_params(optimizer["param_groups"], shapes, updates, sharding is not None)
        steps = [record.pop("step") for record in optimizer["state"].values()]
        nested = self.masters is not None or bool(state.extra.get(_IN_SCALER))
        masters, low = self._masters(state, model, optimizer["state"], nested)
        inner = _native_inner(groups, steps, is_sharded=sharding is not None)
        notes += said_of_masters([*low])
        if _COMMON not in state.extra:
            rates = RatesOf(run_of(state.extra).schedules, state.to_json())
            schedule, note = written_schedule(groups, rates, updates)
            kept |= {KEY: schedule} if schedule else {}
            notes += (note,)
        common = {
            "optimizer": {**other_parts, "optimizer": inner} if nested else {**other_parts, **inner},
            "iteration": updates,
            "checkpoint_version": 3.0,
            **kept,
        }
        lost = not_plain(state.extra.get(_COMMON, {}), f"extra/{_COMMON}")
        beside_model = {key: part for key, part in state.extra.items() if key in (BESIDE, PLACES)}
        dropped = {**encoded.dropped, **unnamed, **lost, **dropped_from(beside_model, (), "Megatron-Core")}
        objects = {**_empty_objects(shapes), **state.extra.get(_OBJECTS, {})}
        sharded = {**model, **_flat(optimizer["state"]), **masters, **objects}
        return replace(
            encoded,
            tree={COMMON: common, SHARDED: sharded},
            exactness={
                **encoded.exactness,
                **{f"{SHARDED}/{key}": (Exactness.ROUNDING, BEGUN_MASTER) for key in low.values()},
            },
            dropped=dropped,
            assumptions=(*encoded.assumptions, *notes),
        )

    def examine(self, checkpoint: Checkpoint, state: TrainState) -> Iterator[Finding]:
        """Yields counts that a restart without Apex or TransformerEngine leaves: none, or one for all parameters."""
        common = _common(checkpoint.tree)
        yield from self._odd_counts(common, _inner(common) or {}, state)

    def _odd_counts(
        self, common: Mapping[str, Any], optimizer: Mapping[str, Any], state: TrainState
    ) -> Iterator[Finding]:
        """Yields what is odd about the count of updates, beside that of the run's iterations.

        Source: megatron-core 0.16.1, core/optimizer/distrib_optimizer.py, `load_state_dict`: without Apex and
        TransformerEngine, `step` of each parameter is the same tensor; run with two gloo ranks.
        """
        iterations, updates, place = common.get("iteration"), state.counts.updates, f"{COMMON}/optimizer"
        if not _stated_steps(optimizer):
            yield Finding(_UNCOUNTED.format(updates), place, kind="step-missing")
        elif self.sharding is not None and type(iterations) is int and updates > iterations:
            yield Finding(_SHARED.format(updates, iterations), place, kind="step-shared")

    def _masters(
        self, state: TrainState, model: Mapping[str, Tensor], records: Collection[str], nested: bool
    ) -> tuple[dict[str, Tree], dict[str, str]]:
        """Returns the masters by their keys, and the key by parameter of those that begin as one of lower precision."""
        before = state.extra.get(_MASTER_NAME)
        names = names_of(state.extra, state.slots)
        masters = {names[path]: slots[MASTER] for path, slots in state.slots.items() if MASTER in slots}
        begun: list[str] = []
        if self.masters or (nested and before):
            begun = [name for name in records if name not in masters]
            masters |= {name: in_full(model[name]) for name in begun}
        key = self.masters or before or _MASTER_KEY
        low = {name: f"{_STATE}{key}.{name}" for name in begun if model[name].dtype.itemsize < 4}
        return {f"{_STATE}{key}.{name}": tensor for name, tensor in masters.items()}, low

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return megatron_lines(state, saved, self.flags)

    def _beside(
        self, state: TrainState, names: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, Any], str | None]:
        """Returns what a source of Megatron-Core had in common.pt, what beside its optimizer, and how ranks share."""
        kept = {k: part for k, part in state.extra.get(_COMMON, {}).items() if is_plain(part)}
        other_parts = dict(kept.pop("optimizer", {}))
        before = other_parts.pop(_SHARDING, None)
        sharding = self.sharding or (None if self.masters else before)
        layers = [match for name in names if (match := _LAYER.search(name))]
        form: dict[str, Any] = {_NUMBERED: any(match[1] for match in layers)} if layers else {}
        if sharding is not None:
            other_parts[_SHARDING] = sharding
            form["distrib_optim_sharding_type"] = sharding
        if form:
            content = kept.get(_CONTENT)
            stated = content if isinstance(content, Mapping) else {}
            kept[_CONTENT] = {**_AVOIDED, **stated, **form}
        return kept, other_parts, sharding


def _extra(common: Mapping[str, Any], parts: _Parts) -> dict[str, Tree]:
    """Returns what the files hold beside the model and its optimizer, as far as they do."""
    master_names = (key for record in parts.state.values() for key in record if key in _MASTERS)
    extra = {
        _COMMON: _without_optimizer(common),
        _OBJECTS: parts.objects,
        _IN_SCALER: "param_groups" not in common["optimizer"],
        _MASTER_NAME: next(master_names, None),
    }
    return {key: part for key, part in extra.items() if part}


def _native_inner(groups: list[Any], steps: Sequence[Tree], is_sharded: bool) -> dict[str, Tree]:
    """Returns an optimizer's own record; where ranks share it, its steps lie with the slots."""
    if is_sharded:
        return {"param_groups": groups}
    return {"param_groups": groups, "state": {"common_step": steps[0]} if steps else {}}


def _common(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what no rank cuts, with the optimizer's groups wherever they lie."""
    if has_ranks(tree):
        first = next(iter(tree[RANKS].values()))
        common = {**tree[COMMON], "optimizer": first["optimizer"]}
        return with_groups(common, {}) if BUCKETS in first else common
    return with_groups(tree[COMMON], tree[SHARDED]) if has_buckets(tree[SHARDED]) else tree[COMMON]


def _without_buckets(
    whole: MegatronParts, checkpoint: Checkpoint, hints: CheckpointRef
) -> tuple[Mapping[str, Any], Mapping[str, Any], tuple[str, ...]]:
    """Returns a checkpoint's parts with whole parameters, and how they were found where they lay in buckets."""
    if has_ranks(whole):
        return without_ranks(whole, checkpoint.path, hints.param_names)
    common, sharded = whole["common"], whole["sharded"]
    if not has_buckets(sharded):
        return common, sharded, ()
    cut, notes = without_buckets(sharded, checkpoint.path, hints.param_names)
    return with_groups(common, sharded), {key_of(key): part for key, part in cut.items()}, notes


def _parted(
    records: Mapping[str, Mapping[str, Tensor]], step: Any
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Returns the masters by parameter, and the other slots as torch's AdamW names them, with its count."""
    masters = dict[str, Tensor]()
    state: dict[str, dict[str, Any]] = {}
    for name, record in records.items():
        state[name] = {"step": step}
        for key, tensor in record.items():
            if key in _MASTERS:
                masters[name] = tensor
            else:
                state[name][_SLOTS[key]] = tensor
    return masters, state


def _refuse_counts(state: TrainState) -> None:
    """Refuses parameters that have missed updates."""
    if state.counts.behind:
        raise InexactError(
            "Megatron-Core keeps one count for all parameters.",
            expected=state.counts.updates,
            found=", ".join(f"{path}: {n}" for path, n in list(state.counts.behind.items())[:_SHOWN]),
        )


def _flat(records: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns slots by Megatron's flat keys."""
    if foreign := {slot for record in records.values() for slot in record} - _SLOTS.keys():
        raise InexactError(
            "Megatron-Core's Adam has no such slots.", expected=", ".join(_SLOTS), found=", ".join(foreign)
        )
    return {
        f"{_STATE}{slot}.{name}": tensor
        for name, record in records.items()
        for slot, tensor in record.items()
    }


def _refuse_names(names: Collection[str]) -> None:
    """Refuses names of a local spec's modules, under which Megatron-Core's loader looks for nothing."""
    if local := [name for name in names if key_of(name) != name]:
        raise InexactError(
            "Megatron-Core has other keys in torch_dist for the norms of a local spec.",
            expected=", ".join(key_of(name) for name in local[:3]),
            found=", ".join(local[:3]),
            remedy="let the map write them with the layer behind them (--config norms=fused), or rename them",
        )


def _empty_objects(shapes: Mapping[str, Shape]) -> dict[str, Tree]:
    """Returns the states that linear modules have without FP8, by the keys of each layer."""
    linear = [(match, shapes[name]) for name in shapes if (match := _LINEAR.fullmatch(name))]
    layers = [(match[1], 1 if match[2] else shape[0]) for match, shape in linear]
    return {
        f"{module}._extra_state/shard_{layer}_{count}": [None]
        for module, count in layers
        for layer in range(count)
    }


def _as_torch(groups: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    """Returns groups with the options of torch's AdamW, and what is said of the class that has others."""
    if not any("bias_correction" in group and "amsgrad" not in group for group in groups):
        return list(groups), ()
    return [{"amsgrad": False, "maximize": False, **group} for group in groups], (_FUSED,)


def _inner(common: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns what holds the groups."""
    node = common.get("optimizer")
    if isinstance(node, Mapping) and "param_groups" not in node:
        node = node.get("optimizer")
    groups = node.get("param_groups") if isinstance(node, Mapping) else None
    return node if groups and fits(groups, list[dict[Name, Any]]) else None


def _without_optimizer(common: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all that isn't the optimizer's: counts, arguments, and neighbours such as a scaler."""
    node = common["optimizer"]
    keys = ("param_groups", "state") if "param_groups" in node else ("optimizer",)
    other_parts = {key: part for key, part in node.items() if key not in keys}
    kept = {key: part for key, part in common.items() if key != "optimizer"}
    return {**kept, "optimizer": other_parts} if other_parts else kept


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


def _step(optimizer: Mapping[str, Any], common: Mapping[str, Any]) -> Any:
    """Returns the count of updates: the largest that stands there, or of none the run's iterations.

    torch's AdamW counts in the state, FusedAdam in the groups. A file may have both, of which a run moves its own.
    """
    iterations = common.get("iteration")
    usual = iterations if type(iterations) is int and iterations >= 0 else None
    return max(_stated_steps(optimizer), key=_count, default=usual)


def _stated_steps(optimizer: Mapping[str, Any]) -> list[Any]:
    """Returns the counts of updates that stand in a file."""
    state = optimizer.get("state")
    common = [state["common_step"]] if isinstance(state, Mapping) and "common_step" in state else []
    return [*common, *(group["step"] for group in optimizer.get("param_groups", ()) if "step" in group)]


def _count(step: Any) -> float:
    """Returns a count to compare; infinity for anything that is no number, so that it is reported."""
    value = step.read() if isinstance(step, Tensor) and step.shape == () else step
    return float(value) if isinstance(value, (int, float, np.ndarray, np.generic)) else np.inf


LAYOUT = MegatronAdam()
