"""The file that a class loads: a state, written in a layout of its own system, with its manifest."""

from __future__ import annotations

from pathlib import Path

from statekit.conversion import registry
from statekit.errors import UsageError
from statekit.files.stage import staged, unknown_fields
from statekit.state.train_state import TrainState
from statekit.tensors.tree import to_json
from statekit.verify.natives import Rates

NAMES = {"keras-h5": "part.weights.h5", "torch": "part.pt"}


def written(state: TrainState, container: str, layout: str, folder: Path) -> Path:
    """Writes a state into a folder, and returns where."""
    path, home = folder / NAMES.get(container, "part"), registry.container(container)
    assert home.target_kind is not None  # those that classes load are written
    record = to_json(state.to_json())
    with staged(
        path, home.target_kind, fields=lambda there: {**unknown_fields(there), "state": record}
    ) as stage:
        home.write(registry.layout(layout).encode(state), stage)
        stage.commit(home.open)
    return path


def one_rate(name: str, rates: Rates) -> float:
    """Returns the learning rate of a class that has one.

    Raises:
        UsageError: There are several, or none.
    """
    rate = rates[0] if rates else None
    if len({*rates}) != 1 or rate is None:
        raise UsageError(f"{name} is run with one learning rate.", found=rates)
    return rate
