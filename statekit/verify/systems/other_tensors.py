"""What recordings hold beside parameters and slots: counts, and what the optimizer writes and never reads.

A phase's hyperparameters name the counts, as `statekit.verify.systems.schema_named` says; what is never read is called
`derived` among a variant's native state, in its schema.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statekit.errors import StateError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Tensor, in_memory

CARRIED = "beside"
"""Where a state's `extra` has what it needs to be written as it was read."""


def has_meaning(name: str, spec: Mapping[str, Any]) -> bool:
    """Tells whether a tensor has a meaning here."""
    if counts_updates(name, spec):
        return True
    native = load_schema(spec["schema"]).variant(spec["variant"])["native_state"]
    kind, _, rest = name.partition("/")
    return kind == "slot" and native.get(rest.rpartition("/")[2], {}).get("becomes") == "derived"


def counts_updates(name: str, spec: Mapping[str, Any]) -> bool:
    """Tells whether a tensor holds the count of updates."""
    kind, _, rest = name.partition("/")
    return kind == "slot" and rest.rpartition("/")[2] in spec.get("counts", {}).get("slots", ())


def check(tensors: Mapping[str, Tensor], spec: Mapping[str, Any], updates: int) -> None:
    """Raises StateError if not everything counts the same updates."""
    counts = {name: int(t.read()) for name, t in tensors.items() if counts_updates(name, spec)}
    other = next((name for name, count in counts.items() if count != updates), None)
    if other is not None:
        raise StateError(
            "Not everything in a recording counts the same updates; statekit steps a run with one count.",
            place=other,
            expected=updates,
            found=counts[other],
        )


def carried(tensors: Mapping[str, Tensor], spec: Mapping[str, Any], step: int) -> dict[str, Any]:
    """Returns the `extra` of a state that was read: what the rule neither moves nor counts is of this step only."""
    kept = {name: tensor for name, tensor in tensors.items() if not counts_updates(name, spec)}
    return {CARRIED: {"updates": step, "tensors": kept}} if kept else {}


def tensors(state: TrainState, spec: Mapping[str, Any], updates: int) -> dict[str, Tensor]:
    """Returns what a recording holds of a state beside parameters and slots; what nobody reads only if it was read."""
    carried_over = state.extra.get(CARRIED, {})
    kept = carried_over["tensors"] if carried_over.get("updates") == state.counts.updates else {}
    return dict(_counts(state, spec, updates)) | kept


def _counts(state: TrainState, spec: Mapping[str, Any], updates: int) -> Iterator[tuple[str, Tensor]]:
    counts = spec.get("counts")
    if counts and load_schema(spec["schema"]).variant(spec["variant"])["constants"]["step_scope"] != "absent":
        count = in_memory(np.asarray(updates, DTYPES[counts["dtype"]]), "count")
        for path in state.slots:
            yield from ((f"slot/{path}/{name}", count) for name in counts.get("slots", ()))
