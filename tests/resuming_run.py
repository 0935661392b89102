"""A run in some library that is saved, converted, and goes on; what resuming.py does with each kind is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from statekit.attestation.attestation import Attestation
from statekit.conversion.checkpoint_ref import CheckpointRef

RATE, DECAY = 0.01, 0.1
UPDATES = 3
SAVED = ("again", "again.pt", "again.ckpt", "again.keras", "again.weights.h5")
"""What the next save may be called."""

Values = list[Any]


class Run:
    """A model with its optimizer in some library, and how that saves and loads them."""

    def __init__(self, container: str, layout: str, model: str) -> None:
        self.container, self.layout, self.kind = container, layout, model
        self.scope: dict[str, Any] = {}

    def gradients(self, number: int, shapes: list[tuple[int, ...]]) -> Values:
        """Returns what an update's gradients are, in every run."""
        random = np.random.default_rng(number)
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Makes a run of three updates and saves it; returns where, and what a conversion has to be told."""
        raise NotImplementedError

    def begin(self) -> None:
        """Makes what a program has before the printed lines, in `scope`: the model first of all."""
        raise NotImplementedError

    def prepare(self, target: Path, folder: Path) -> None:
        """Makes `scope`, once the target is written."""
        self.begin()

    def update(self, done: int) -> None:
        """Goes on for three updates after as many."""
        raise NotImplementedError

    def values(self) -> Values:
        """Returns all weights, in an order that is the same in every run."""
        raise NotImplementedError

    def loaded(self) -> Values:
        """Returns the weights as the printed lines loaded them."""
        return self.values()

    def save(self, folder: Path) -> None:
        """Saves by the library's own means."""
        raise NotImplementedError

    def saved(self, folder: Path) -> Path | None:
        """Returns what was saved so; None where it isn't all of the run."""
        return next((folder / name for name in SAVED if (folder / name).exists()), None)

    def load(self, folder: Path) -> None:
        """Loads what was saved into a fresh model, by the library's own means."""
        raise NotImplementedError

    def attested(self, path: Path, hints: CheckpointRef) -> Attestation | None:
        """Returns whether what was loaded is a checkpoint's; None where that can't be asked."""
        raise NotImplementedError
