"""A registry of chosen formats and small states, for tests of writing and converting."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Container, Encoded, Evidence, Exactness, Layout
from statekit.converters.containers.statekit_dir import CONTAINER
from statekit.converters.layouts.own.statekit_canonical import LAYOUT
from statekit.errors import FormatError, StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.integrity import proof_inside
from statekit.files.stage import Stage, staged, unknown_fields
from statekit.files.tree import Place
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, Tensor, dtype_named, in_memory
from statekit.tensors.tree import from_json, tensor_names, to_json
from statekit.testing.container_trials import open_proven

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


def plain_state(seed: int = 0, updates: int = 7) -> TrainState:
    """Returns an Adafactor state that every system can hold, factored as T5X does: v_row averages the longer axis."""
    state = small_state(seed, updates)
    params = {path: tensor for path, tensor in state.params.items() if path != "dense.kernel"}
    old = state.slots["dense/kernel"]
    slots = {**state.slots, "dense/kernel": {"v_row": old["v_col"], "v_col": old["v_row"]}}
    rules = {"dense/kernel": Rule((Axis.COLUMN, Axis.ROW), "file")}
    return replace(state, params=params, slots=slots, rules=rules, extra={})


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


@dataclass(frozen=True)
class Packed:
    """A container of one file: values, then a record of names and the manifest. `spoil` changes the bytes it writes."""

    name: str = "packed"
    suffixes: tuple[str, ...] = (".packed",)
    target_kind: Literal["file", "folder"] | None = "file"
    title: str = "one file, for tests"
    spoil: Callable[[str, bytes], bytes] = field(default=lambda name, block: block)
    skip: tuple[str, ...] = ()

    def detect(self, path: Place) -> Evidence | None:
        return (
            Evidence(20, "its last bytes")
            if path.is_file() and Path(path).read_bytes()[-8:] == b"packed\r\n"
            else None
        )

    def write(self, encoded: Encoded, stage: Stage) -> None:
        spans, position = {}, 0
        with stage.file() as output:
            for name, tensor in tensor_names(encoded.tree).items():
                start = position
                for block in stage.stream(name, tensor) if name not in self.skip else ():
                    position += output.write(self.spoil(name, bytes(block)))
                spans[name] = [start, position]
            view = to_json(encoded.tree)
            record = json.dumps({"tree": view, "spans": spans, "manifest": stage.manifest()}).encode()
            output.write(record + struct.pack("<Q", len(record)) + b"packed\r\n")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        data = Path(path).read_bytes()
        size = struct.unpack("<Q", data[-16:-8])[0]
        record = json.loads(data[-16 - size : -16])

        def tensor(described: Any) -> Tensor:
            start, stop = record["spans"][described["name"]]
            dtype = dtype_named(described["dtype"])
            if stop - start != dtype.itemsize * math.prod(described["shape"]):
                raise FormatError("A tensor has too few bytes.", place=path)
            array = np.frombuffer(data[start:stop], dtype).reshape(described["shape"])
            return in_memory(array, described["name"], str(path))

        proof, findings = proof_inside(json.dumps(record["manifest"]), path)
        tree = from_json(record["tree"], tensor)
        return Checkpoint(self.name, path, tree, step=step, findings=findings, proof=proof)


@dataclass(frozen=True)
class Renamed:
    """A layout with names of its own; `change` is applied to each of its tensors by name."""

    name: str = "renamed"
    containers: tuple[str, ...] = ("packed",)
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"adafactor": ("t5x",)})
    title: str = "other names, for tests"
    change: Callable[[str, Tensor], Tensor] = field(default=lambda name, tensor: tensor)
    exactness: Mapping[str, tuple[Exactness, str]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    lost_steps: int = 0

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        return Evidence(20, "its names") if "model" in checkpoint.tree else None

    def encode(self, state: TrainState) -> Encoded:
        tree = LAYOUT.encode(state).tree
        model = {path: self.change(path, tensor) for path, tensor in tree.pop("params").items()}
        return Encoded({"model": model, **tree}, state.counts.updates, self.exactness, self.dropped)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree = dict(checkpoint.tree)
        state = LAYOUT.decode(replace(checkpoint, tree={"params": tree.pop("model"), **tree}), hints)
        return replace(state, counts=replace(state.counts, updates=state.counts.updates - self.lost_steps))


# What every container owes, whatever it stores. A test calls these with a container and a checkpoint of it.


def damaged_copies(source: Path, folder: Path, every: int = 1) -> Iterator[tuple[str, Path, Path]]:
    """Yields what was done, the copy, and the file it was done to: truncated, emptied, flipped, missing.

    A copy is gone when the next one is asked for.
    """
    files = [p for p in sorted(source.rglob("*")) if p.is_file()] if source.is_dir() else [source]
    for i, file in enumerate(files):
        data, changes = file.read_bytes(), {}
        if i % every == 0:
            changes = {"missing": None, "empty": b"", "cut": data[: len(data) // 2]}
            for where in (0, len(data) // 3, 2 * len(data) // 3, len(data) - 1) if data else ():
                changes[f"flipped at {where}"] = data[:where] + bytes([data[where] ^ 16]) + data[where + 1 :]
        for what, changed in changes.items():
            copy = folder / "damaged" / source.name
            shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
            victim = copy / file.relative_to(source) if source.is_dir() else copy
            victim.unlink()
            if changed is not None:
                victim.write_bytes(changed)
            yield f"{file.relative_to(source.parent)} {what}", copy, victim
            shutil.rmtree(folder / "damaged")


def read_all(container: Container, path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """Returns everything a checkpoint holds, or None if that is refused with a typed error."""
    try:
        with open_proven(container, path) as opened:
            return values(opened.tensors)
    except StatekitError:
        return None


def check_conformance(container: Container, encoded: Encoded, target: Path) -> Checkpoint:
    """Writes a tree, and checks that it is recognised, complete, and the same when read. Returns it opened."""
    with staged(target, "folder" if container.target_kind == "folder" else "file") as stage:
        container.write(encoded, stage)
        stage.commit(container.open)
    assert container.detect(target) is not None
    opened = open_proven(container, target)
    assert opened.tensors.keys() == tensor_names(encoded.tree).keys()
    assert values(opened.tensors) == values(tensor_names(encoded.tree))
    assert opened.manifest is not None
    assert opened.findings == ()
    return opened
