"""Recordings of `torch.optim`, alone or under Trainer, Lightning, FSDP, DeepSpeed and Megatron-Core.

What counts in `meta.json`, in this order: `extra.param_groups`, the groups in the checkpoint itself (DeepSpeed), then
`hyperparameters`; `learning_rate` per step and group. PyTorch ran operation by operation, unless its kernel was fused.

DeepSpeed's own copies of the slots, flat and cut over ranks, stand in `global/rank<r>.group<g>.<slot>`; a phase names
them in `partitions`: {"ranks": n, "by": "group" or "parameter"}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.registry import container
from statekit.errors import FormatError, NotFoundError
from statekit.state.constants import of_torch
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Array, Tensor, in_memory
from statekit.verify.contract import Phase
from statekit.verify.systems import schema_named
from statekit.verify.systems.schema_named import checkpoint_of, described, kind

KINDS = {"AdamW": ("adamw", "torch"), "Adafactor": ("adafactor", "torch"), "Muon": ("muon", "torch")}
BY_RANK = ("DeepSpeed", "FSDP1")
"""Wrappers under which an optimizer sees flat pieces of the parameters: only elementwise rules don't notice."""


class TorchOptim:
    """Reads recordings of `torch.optim`."""

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for a `meta.json` of PyTorch."""
        by_rank = next((name for name in BY_RANK if name in meta["optimizer"]), None)
        if by_rank and "Adafactor" in meta["optimizer"]:
            raise NotFoundError(
                "Adafactor acted on the pieces that ranks hold, which no step on whole parameters can follow.",
                expected="Adafactor on whole parameters",
                found=by_rank,
            )
        groups = [_of_its_optimizer(group) for group in recorded_groups(folder, meta)]
        has_schemas = all("schema" in group for group in groups)
        spec: dict[str, Any] = {
            **({} if has_schemas else dict(zip(("schema", "variant"), kind(meta, KINDS), strict=True))),
            "groups": groups,
            "counts": {"slots": ["step"], "dtype": "float32"},
        }
        config = meta["extra"].get("ds_config")
        if config is not None:
            stage = config["zero_optimization"]["stage"]
            spec["partitions"] = {
                "ranks": meta["extra"]["world_size"],
                "by": "parameter" if stage == 3 else "group",
            }
        path = checkpoint_of(meta["checkpoint"]["files"])
        # A fused kernel keeps everything float32 until it stores; else each operation rounds what it returns.
        fused, capturable = (all(group.get(key) for group in groups) for key in ("fused", "capturable"))
        ran = of_torch(
            "cuda" if "cuda" in meta.get("versions", {}) else "cpu", fused=fused, capturable=capturable
        )
        return described(meta, [(1, int(meta["steps"]), spec)], path, ran)

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step; flat copies over ranks must hold the same values.

        Raises:
            FormatError: A rank's copy disagrees with the slots of the parameters.
        """
        cut = "global/rank" if "partitions" in phase.hyperparameters else None
        whole = {name: tensor for name, tensor in tensors.items() if not cut or not name.startswith(cut)}
        state = schema_named.decode(whole, step, phase)
        for name, copy in _partitions(state, phase):
            if name in tensors and not np.array_equal(tensors[name].read(), copy.read(), equal_nan=True):
                raise FormatError("A rank's copy of a slot isn't what the parameters have.", place=name)
        return state

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, without the step."""
        return schema_named.encode(state, phase) | dict(_partitions(state, phase))


def recorded_groups(folder: Path, meta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments of each parameter group, and its paths as `params`."""
    extra = meta["extra"]
    path_of = {name: path for path, name in extra["fqn"].items()}
    if extra.get("param_groups"):
        for group in extra["param_groups"]:
            paths = [path_of.get(name, name.replace(".", "/")) for name in group["params"]]
            yield {**group, "params": paths}
    elif "groups" in extra:
        stored = _stored_groups(folder, meta)
        for arguments, names in zip(stored, extra["groups"], strict=True):
            yield {**arguments, "params": [path_of[name] for name in names]}
    else:
        yield {**meta["hyperparameters"], "params": list(extra["fqn"])}


def _of_its_optimizer(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's arguments; if it names one of several optimizers, with schema and variant."""
    if "optimizer" not in group:
        return dict(group)
    schema, variant = kind(group, KINDS)
    rest = {name: value for name, value in group.items() if name != "optimizer"}
    return {**rest, "schema": schema, "variant": variant}


def _stored_groups(folder: Path, meta: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the groups that a DeepSpeed checkpoint holds: `meta.json` names their parameters only."""
    with container("deepspeed").open(folder / checkpoint_of(meta["checkpoint"]["files"])) as opened:
        return [
            {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
            for group in opened.tree["optimizer"]["param_groups"]
        ]


def _partitions(state: TrainState, phase: Phase) -> Iterator[tuple[str, Tensor]]:
    """Yields the flat copies of all slots, by rank and group.

    Source: DeepSpeed, runtime/zero/stage_1_and_2.py (a group's parameters one after the other, padded at the end to a
    multiple of twice the ranks) and stage3.py (every parameter padded to a multiple of the ranks and cut by itself).
    """
    partitions = phase.hyperparameters.get("partitions")
    if partitions is None or state.counts.updates == 0:
        return
    ranks, by_group = partitions["ranks"], partitions["by"] == "group"
    native = load_schema(state.optimizer.schema).slot_names(str(state.optimizer.variant))
    count = in_memory(np.asarray(state.counts.updates, np.float32), "step")
    for number, group in enumerate(state.optimizer.groups):
        slots = state.slots[group.paths[0]] if group.paths else {}
        for slot in slots:
            flat = _flat(state, group, slot, ranks, by_group)
            for rank in range(ranks):
                yield f"global/rank{rank}.group{number}.{native[slot]}", in_memory(flat[rank], slot)
        for rank in range(ranks):
            yield f"global/rank{rank}.group{number}.step", count


def _flat(state: TrainState, group: Group, slot: str, ranks: int, by_group: bool) -> Array:
    """Returns one slot of a group as its ranks hold it, of shape (ranks, elements per rank)."""
    parts = [state.slots[path][slot].read().reshape(-1) for path in group.paths]
    if by_group:
        return _padded(np.concatenate(parts), 2 * ranks).reshape(ranks, -1)
    return np.concatenate([_padded(part, ranks).reshape(ranks, -1) for part in parts], axis=1)


def _padded(flat: Array, multiple: int) -> Array:
    return np.concatenate([flat, np.zeros(-flat.size % multiple, flat.dtype)])
