"""A registry of chosen formats and small states, for tests of writing and converting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from statekit import registry
from statekit.commit import staged, unknown_fields
from statekit.converters.containers.statekit_dir import CONTAINER
from statekit.converters.layouts.canonical import LAYOUT
from statekit.format import Container, Layout
from statekit.state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensor import Array, Tensor, in_memory
from statekit.tree import to_json

FACTORED = Rule((Axis.ROW, Axis.COLUMN), "file")


@dataclass(frozen=True)
class Point:
    """An entry point of something that is loaded already."""

    thing: object

    def load(self) -> object:
        return self.thing


def register(monkeypatch: pytest.MonkeyPatch, *things: Container | Layout) -> None:
    """Makes the canonical container and layout, and these besides, the only ones that the registry knows."""
    containers: dict[str, Point] = {"statekit": Point(CONTAINER)}
    layouts: dict[str, Point] = {"statekit": Point(LAYOUT)}
    for thing in things:
        (layouts if hasattr(thing, "encode") else containers)[thing.name] = Point(thing)
    groups = {registry.CONTAINERS: containers, registry.LAYOUTS: layouts}
    monkeypatch.setattr(registry, "_points", groups.__getitem__)


def arrays(seed: int = 0) -> dict[str, Array]:
    """Returns small arrays of many kinds: matrix, bfloat16 vector, scalar, empty, not aligned, bool."""
    random = np.random.default_rng(seed)
    return {
        "dense/kernel": random.normal(size=(8, 4)).astype(np.float32),
        "dense/bias": random.normal(size=3).astype(ml_dtypes.bfloat16),
        "dense.kernel": np.array(random.normal(), np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "mask": np.array([True, False, True]),
    }


def small_state(seed: int = 0, updates: int = 7, **hyperparameters: Any) -> TrainState:
    """Returns an Adafactor state with names that collide in other systems, and an extra of every kind."""
    params: Mapping[str, Tensor] = {path: in_memory(array) for path, array in arrays(seed).items()}
    random = np.random.default_rng(seed + 1)
    slots = {
        "dense/kernel": {
            "v_row": in_memory(random.random(8).astype(np.float32)),
            "v_col": in_memory(random.random(4).astype(np.float32)),
        },
        "dense/bias": {"v": in_memory(random.random(3).astype(np.float32))},
    }
    group = Group(
        ("dense/kernel", "dense/bias"), {"decay_rate": 0.8, **hyperparameters}, {"decay_rate": "file"}
    )
    extra = {
        "rng": in_memory(np.arange(2, dtype=np.uint32)),
        "sampler": {3: (1, b"\0x", float("inf")), "$float": [None]},
    }
    return TrainState(
        params=params,
        slots=slots,
        optimizer=Optimizer("adafactor", "t5x", (group,)),
        counts=Counts(updates, updates),
        rules={"dense/kernel": FACTORED},
        extra=extra,
        assumptions=("decay_rate is T5X's default",),
    )


def save(state: TrainState, target: Path) -> Path:
    """Writes a state as a `statekit` folder and returns it."""
    side = {"container": "statekit", "layout": "statekit", "step": state.counts.updates}
    fields = {**unknown_fields({}), "target": side, "state": to_json(state.to_json())}
    with staged(target, "folder", fields=lambda tensors: fields) as stage:
        CONTAINER.write(LAYOUT.encode(state), stage)
        stage.commit(CONTAINER.open)
    return target


def values(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Returns dtype, shape and bytes of tensors, for exact comparison."""
    return {name: (t.dtype.name, t.shape, t.read().tobytes()) for name, t in tensors.items()}


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Returns everything below a folder, by relative name: a file's bytes, None for a folder."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")
    }
