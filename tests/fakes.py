"""A checkpoint in memory, for tests of what stands above the converters; counts what is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Evidence
from statekit.errors import StateError, UnknownFormatError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.state.train_state import Counts, Group, KnownFrom, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, Index, Stored, Tensor


@dataclass(frozen=True)
class Fake:
    """A container and a layout in one: `param/<path>` and `slot/<path>/<slot>` are what they say.

    Attributes:
        arrays: Native name -> values.
        frozen: Parameters in no group.
        rules: Factor rules by path.
        broken: Makes `decode` fail.
        unknown: Makes the detection of the layout fail.
    """

    arrays: Mapping[str, Array]
    frozen: frozenset[str] = frozenset()
    rules: Mapping[str, Rule] = field(default_factory=dict)
    updates: int = 3
    broken: bool = False
    unknown: bool = False
    findings: tuple[Finding, ...] = ()
    reads: list[str] = field(default_factory=list)
    name: str = "fake"
    suffixes: tuple[str, ...] = ()
    target_kind: str | None = None
    title: str = "a checkpoint in memory"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adafactor": ("t5x",)})

    def tensor(self, name: str) -> Tensor:
        array = self.arrays[name]

        def fetch(index: Index) -> Array:
            self.reads.append(name)
            block: Array = array[index]
            return block

        return Stored(array.shape, array.dtype, fetch, name, "memory")

    def open(self, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        tree = {name: self.tensor(name) for name in self.arrays}
        return Checkpoint("fake", path, tree, {"version": 1}, step, findings=self.findings)

    def detect_layout(self, checkpoint: Checkpoint) -> tuple[Fake, Evidence]:
        if self.unknown:
            raise UnknownFormatError("No layout fits.", place=checkpoint.path)
        return self, Evidence(20, "its names say so")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        if self.broken:
            raise StateError("The names break the layout.")
        params = {
            n.removeprefix("param/"): t for n, t in checkpoint.tensors.items() if n.startswith("param/")
        }
        slots: dict[str, dict[str, Tensor]] = {path: {} for path in params}
        for name, tensor in checkpoint.tensors.items():
            if name.startswith("slot/"):
                path, _, slot = name.removeprefix("slot/").rpartition("/")
                slots[path][slot] = tensor
        extra = {n: t for n, t in checkpoint.tensors.items() if not n.startswith(("param/", "slot/"))}
        given: Mapping[str, KnownFrom] = dict.fromkeys(hints.hyperparameters, "given")
        values: dict[str, Any] = {"decay_rate": 0.8, **hints.hyperparameters}
        moved = tuple(path for path in params if path not in self.frozen)
        group = Group(moved, values, {"decay_rate": "assumed", **given})
        optimizer = Optimizer("adafactor", "t5x", (group,))
        counts = Counts(self.updates, self.updates)
        return TrainState(
            params, slots, optimizer, counts, self.rules, extra, ("decay_rate is T5X's default",)
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Fake:
        """Makes this the checkpoint that is found at every path."""
        monkeypatch.setattr(
            registry, "detect_container", lambda path: (self, Evidence(20, "a test put it there"))
        )
        monkeypatch.setattr(registry, "detect_layout", self.detect_layout)
        monkeypatch.setattr(registry, "container_names", lambda: ["fake"])
        monkeypatch.setattr(registry, "container", lambda name: self)
        monkeypatch.setattr(registry, "layout", lambda name: self)
        return self

    def but(self, **changes: Any) -> Fake:
        """Returns a fake that differs."""
        return replace(self, reads=[], **changes)
