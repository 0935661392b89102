"""What recordings hold beside parameters and slots: counts, constants, and what nobody reads.

A phase's hyperparameters name them, as `statekit.verify.systems.schema_named` says: `counts`, `constants`, `unread`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statekit.errors import StateError
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Filled, Tensor, in_memory

CARRIED = "beside"
"""Where a state's `extra` has what it needs to be written as it was read."""


def known(name: str, params: Mapping[str, Tensor], spec: Mapping[str, Any]) -> bool:
    """Tells whether a tensor has a meaning here."""
    unread = name.startswith("slot/") and name.rpartition("/")[2] in spec.get("unread", ())
    return unread or counts_updates(name, spec) or name in dict(_constants(params, spec))


def counts_updates(name: str, spec: Mapping[str, Any]) -> bool:
    """Tells whether a tensor holds the count of updates."""
    counts = spec.get("counts", {})
    sort, _, rest = name.partition("/")
    if sort == "global":
        return rest in counts.get("globals", ())
    return sort == "slot" and rest.rpartition("/")[2] in counts.get("slots", ())


def check(
    tensors: Mapping[str, Tensor], params: Mapping[str, Tensor], spec: Mapping[str, Any], updates: int
) -> None:
    """Raises StateError if not everything counts the same updates, or a constant has another value."""
    counts = {name: int(t.read()) for name, t in tensors.items() if counts_updates(name, spec)}
    other = next((name for name, count in counts.items() if count != updates), None)
    if other is not None:
        raise StateError(
            "Not everything in a recording counts the same updates; statekit steps a run with one count.",
            place=other,
            expected=updates,
            found=counts[other],
        )
    for name, constant in _constants(params, spec):
        if name in tensors and not np.array_equal(tensors[name].read(), constant.read()):
            raise StateError(
                "A tensor should have one value in every state.", place=name, expected=constant.value
            )


def carried(tensors: Mapping[str, Tensor], spec: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns the `extra` of a state that was read: what the rule neither moves nor counts is of this step only."""
    kept = {name: tensor for name, tensor in tensors.items() if not counts_updates(name, spec)}
    return {CARRIED: {"updates": step, "tensors": kept}} if kept else {}


def tensors(state: TrainState, spec: Mapping[str, Any], updates: int) -> dict[str, Tensor]:
    """Returns what a recording holds of a state beside parameters and slots; what nobody reads only if it was read."""
    carried_over = state.extra.get(CARRIED, {})
    kept = carried_over["tensors"] if carried_over.get("updates") == state.counts.updates else {}
    return dict(_counts(state, spec, updates)) | dict(_constants(state.params, spec)) | kept


def _counts(state: TrainState, spec: Mapping[str, Any], updates: int) -> Iterator[tuple[str, Tensor]]:
    counts = spec.get("counts")
    if counts:
        count = in_memory(np.asarray(updates, DTYPES[counts["dtype"]]), "count")
        yield from ((f"global/{name}", count) for name in counts.get("globals", ()))
        for path in state.slots:
            yield from ((f"slot/{path}/{name}", count) for name in counts.get("slots", ()))


def _constants(params: Mapping[str, Tensor], spec: Mapping[str, Any]) -> Iterator[tuple[str, Filled]]:
    constants = spec.get("constants", {})
    for name, (value, dtype) in constants.get("globals", {}).items():
        yield f"global/{name}", Filled((), DTYPES[dtype], value)
    for name, (value, dtype) in constants.get("slots", {}).items():
        for path, param in params.items():
            stored_dtype = param.dtype if dtype is None else DTYPES[dtype]
            yield f"slot/{path}/{name}", Filled(param.shape, stored_dtype, value)
