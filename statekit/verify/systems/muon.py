"""Recordings of Muon, and of what moves the parameters that aren't Muon's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.verify.contract import Phase
from statekit.verify.systems import optax


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
    """Returns the canonical state of one step."""
    if phase.hyperparameters.get("keras"):
        native = _renamed_slots(phase.hyperparameters)
        # The count and the rate stand beside them: the number of the step and the description say both.
        slots = {name: value for name, value in tensors.items() if not name.startswith("global/muon/")}
        tensors = {native.get(name, name): value for name, value in slots.items()}
    return optax.decode(tensors, step, phase)


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, without the step."""
    keras = {native: name for name, native in _renamed_slots(phase.hyperparameters).items()}
    return {keras.get(name, name): value for name, value in optax.encode(state, phase).items()}


_SLOTS_OF_ADAM = {"momentums": "momentum", "adam_velocities": "velocity"}
"""What Keras' Muon calls the slots of its Adam, and what Keras' Adam calls them."""


def _renamed_slots(spec: Mapping[str, Any]) -> dict[str, str]:
    """Returns the names of the slots of Keras' Muon that its Adam has, and what Keras' Adam calls them."""
    paths = [path for group in spec["groups"] if group["schema"] == "adamw" for path in group["params"]]
    slots = _SLOTS_OF_ADAM.items() if spec.get("keras") else ()
    return {f"slot/{path}/{name}": f"slot/{path}/{native}" for path in paths for name, native in slots}
