"""What a recording says of a stretch of updates, and what a module that reads one system's recordings offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor

FORMAT = "statekit-recording"
GRADS, TRAJECTORY, DESCRIPTION = "grads.safetensors", "trajectory.safetensors", "recording.json"


class System(Protocol):
    """How one system's recordings are read. One small module each, in `statekit.verify.systems`."""

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for a folder that has the system's own `meta.json`."""

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step; names are those of the trajectory without the step."""

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, without the step; undoes `decode`."""


@dataclass(frozen=True)
class Phase:
    """Updates `first` to `last` ran with these hyperparameters, in the system's own names."""

    first: int
    last: int
    hyperparameters: Mapping[str, Any]
