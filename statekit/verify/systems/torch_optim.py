"""Recordings of `torch.optim`, alone or under Trainer, Lightning, FSDP, DeepSpeed and Megatron-Core.

DeepSpeed's own copies of the slots, flat and cut over ranks, stand in `global/rank<r>.group<g>.<slot>`; a phase names
them in `partitions`: {"ranks": n, "by": "group" or "parameter"}.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from statekit.errors import FormatError
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Array, Tensor, in_memory
from statekit.verify.contract import Phase
from statekit.verify.systems import schema_named


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
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


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, without the step."""
    return schema_named.encode(state, phase) | dict(_partitions(state, phase))


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
    """Returns one slot of a group as ranks hold it: (ranks, elements of each)."""
    parts = [state.slots[path][slot].read().reshape(-1) for path in group.paths]
    if by_group:
        return _padded(np.concatenate(parts), 2 * ranks).reshape(ranks, -1)
    return np.concatenate([_padded(part, ranks).reshape(ranks, -1) for part in parts], axis=1)


def _padded(flat: Array, multiple: int) -> Array:
    return np.concatenate([flat, np.zeros(-flat.size % multiple, flat.dtype)])
