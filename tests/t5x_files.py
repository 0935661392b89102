"""T5X's checkpoints among the recordings, and small ones made here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from safetensors.numpy import load_file
from zarr_files import write_array

from goldens import GOLDEN, bundles
from statekit.conversion.contracts import Container
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.tensor import Array

CONTAINERS: dict[str, Container] = {"t5x": T5X, "orbax": ORBAX}


@dataclass(frozen=True)
class Recorded:
    """One checkpoint that T5X wrote, and where its values are recorded.

    Attributes:
        run: The run's folder.
        container: `t5x` or `orbax`.
        step: Its step.
        values: A trajectory, or a file with every array under its name.
        case: The bundle whose trajectory it is, for messages.
    """

    run: Path
    container: str
    step: int
    values: Path

    def __str__(self) -> str:
        return f"{self.run.relative_to(GOLDEN)}@{self.step}"

    def open(self) -> Checkpoint:
        """Opens the run at this step."""
        return CONTAINERS[self.container].open(self.run, self.step)

    def expected(self) -> dict[str, Array]:
        """Returns every array that was recorded, by native name; without the step."""
        loaded = _loaded(self.values)
        if self.values.name == "contents.safetensors":
            return {name: array for name, array in loaded.items() if name != "state/step"}
        arrays = {}
        for key, array in loaded.items():
            step, kind, rest = key.split("/", 2)
            if int(step) == self.step:
                arrays[f"target/{rest}" if kind == "param" else f"state/param_states/{rest}"] = array
        return arrays


@cache
def _loaded(path: Path) -> dict[str, Array]:
    loaded: dict[str, Array] = load_file(path)
    return loaded


def recorded() -> list[Recorded]:
    """Returns every T5X checkpoint of the recordings that are there."""
    return sorted(_recorded(), key=str)


def _recorded() -> Iterator[Recorded]:
    for system in ("t5x", "t5x_train"):
        for bundle in bundles(system):
            yield from _runs(bundle, bundle / "trajectory.safetensors")
    root = GOLDEN / "t5x_checkpoints"
    for network in ("scanned", "unscanned"):
        yield from _runs(root / network, root / network / "contents.safetensors")
    for folder, case in [(root / "sharded_2x2", "momentum_f32")] + [
        (path, path.name) for path in (root / "older_t5x").glob("*/*")
    ]:
        yield from _runs(folder, GOLDEN / "t5x" / case / "trajectory.safetensors")


def _runs(folder: Path, values: Path) -> Iterator[Recorded]:
    for step in folder.glob("*/checkpoint_*"):
        kind = "orbax" if (step / "state").is_dir() else "t5x"
        yield Recorded(step.parent, kind, int(step.name.rpartition("_")[2]), values)


def meta(case: str) -> dict[str, Any]:
    """Returns the meta.json of a bundle of T5X."""
    loaded: dict[str, Any] = json.loads((GOLDEN / "t5x" / case / "meta.json").read_text())
    return loaded


def open_case(case: str, folder: str = "checkpoint") -> Checkpoint:
    """Opens the checkpoint of a bundle of T5X."""
    container = "orbax" if "orbax" in folder else "t5x"
    return CONTAINERS[container].open(GOLDEN / "t5x" / case / folder)


def packed_array(array: Array, code: int = 1) -> msgpack.ExtType:
    """Returns an array as Flax packs it."""
    return msgpack.ExtType(code, msgpack.packb([list(array.shape), array.dtype.name, array.tobytes()]))


def spec(
    place: str, shape: tuple[int, ...], chunks: tuple[int, ...] | None = None, **changes: Any
) -> dict[str, Any]:
    """Returns a TensorStore spec as T5X puts it in its index."""
    document: dict[str, Any] = {
        "driver": "zarr",
        "dtype": "float32",
        "kvstore": {"driver": "file", "path": place},
        "metadata": {
            "chunks": list(chunks or shape),
            "compressor": {"id": "gzip", "level": 1},
            "shape": list(shape),
        },
    }
    return document | changes


def write_index(folder: Path, optimizer: Mapping[str, Any], version: int = 3) -> Path:
    """Writes the index of a legacy checkpoint and returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checkpoint").write_bytes(msgpack.packb({"version": version, "optimizer": optimizer}))
    return folder


def tiny(folder: Path, kernel: Any = None, dtype: str = "<f4", version: int = 3) -> Path:
    """Writes a legacy checkpoint with one parameter, `kernel` (4, 3), whose leaf in the index may be given."""
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_array(folder / "target.kernel", array, (2, 3), dtype=dtype)
    slots = {name: packed_array(np.zeros(1, np.float32)) for name in ("m", "v_row", "v_col")}
    state = {
        "param_states": {"kernel": {**slots, "v": packed_array(array)}},
        "step": packed_array(np.asarray(5, np.int32)),
    }
    leaf = spec("target.kernel/", (4, 3), (2, 3)) if kernel is None else kernel
    return write_index(folder, {"state": state, "target": {"kernel": leaf}}, version)
