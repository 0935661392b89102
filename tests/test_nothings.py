"""A checkpoint of many nothings: what another one costs doesn't grow with how many there are.

Calls are counted, of Python and of C: they are the same on every machine, and under any load.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import h5py
import msgpack
import numpy as np
import pytest
import torch

from statekit.conversion.inspection import inspect

COUNTS = (30, 60, 120)
Make = Callable[[Path, int], Path]


def calls(path: Path) -> int:
    """Counts the calls that it takes to inspect a checkpoint."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        inspect(path)
    finally:
        sys.setprofile(before)
    return count


def archive(folder: Path, count: int) -> Path:
    """Writes an npz of scalars."""
    file = io.BytesIO()
    np.save(file, np.float32(0))
    with zipfile.ZipFile(folder / f"{count}.npz", "w") as archive:
        for i in range(count):
            archive.writestr(f"w{i}.npy", file.getvalue())
    return folder / f"{count}.npz"


def groups(form: Literal["earliest", "latest"], folder: Path, count: int) -> Path:
    """Writes empty groups of HDF5."""
    with h5py.File(folder / f"{form}{count}.h5", "w", libver=form) as file:
        for i in range(count):
            file.create_group(f"g{i}")
    return folder / f"{form}{count}.h5"


def chains(folder: Path, count: int, depth: int) -> Path:
    """Writes chains of empty groups of HDF5."""
    with h5py.File(folder / f"{count}x{depth}.h5", "w") as file:
        for i in range(count):
            file.create_group("/".join([f"g{i}", *("x" * (depth - 1))]))
    return folder / f"{count}x{depth}.h5"


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def pickled(folder: Path, count: int) -> Path:
    """Writes a pickle of empty states."""
    return written(folder, f"{count}.pkl", pickle.dumps(({"w": np.ones(3, np.float32)}, [{}] + [{}] * count)))


def flax(folder: Path, count: int) -> Path:
    """Writes empty layers and states of Flax."""
    layers = {str(i): dict[str, Any]() for i in range(count)}
    return written(folder, f"checkpoint_{count}", msgpack.packb({"params": layers, "opt_state": layers}))


def stream(folder: Path, count: int) -> Path:
    """Writes a stream of EasyLM, of scalars."""
    leaf = msgpack.packb(msgpack.ExtType(1, msgpack.packb(((), "int32", bytes(4)))))
    entries = (msgpack.packb([["params", f"w{i}"], leaf]) for i in range(count))
    return written(folder, f"streaming_train_state_{count}", b"".join(entries))


def tensors(folder: Path, count: int) -> Path:
    """Writes tensors of safetensors without values."""
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    head = json.dumps({f"w{i}": empty for i in range(count)}).encode()
    return written(folder, f"{count}.safetensors", struct.pack("<Q", len(head)) + head)


def params(folder: Path, count: int) -> Path:
    """Writes parameters of PyTorch without values, in a group each."""
    options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    groups = [{**options, "params": [i]} for i in range(count)]
    model = {f"w{i}": torch.zeros(0) for i in range(count)}
    tree = {"model": model, "optimizer": {"state": {}, "param_groups": groups}}
    torch.save(tree, folder / f"{count}.pt")
    return folder / f"{count}.pt"


NOTHINGS: dict[str, Make] = {
    "npz": archive,
    "hdf5, old": lambda folder, count: groups("earliest", folder, count),
    "hdf5, latest": lambda folder, count: groups("latest", folder, count),
    "pickle": pickled,
    "flax": flax,
    "easylm": stream,
    "safetensors": tensors,
    "torch": params,
}


@pytest.mark.parametrize("make", NOTHINGS.values(), ids=NOTHINGS)
def test_another_nothing_costs_what_the_one_before_cost(make: Make, tmp_path: Path) -> None:
    paths = [make(tmp_path, count) for count in COUNTS]
    inspect(paths[0])  # what is imported isn't counted
    few, some, many = map(calls, paths)
    assert (many - some) / (COUNTS[2] - COUNTS[1]) < 1.1 * (some - few) / (COUNTS[1] - COUNTS[0])


def test_groups_in_groups_cost_as_much_as_groups_in_a_row(tmp_path: Path) -> None:
    short, long = chains(tmp_path, 4, 30), chains(tmp_path, 2, 60)
    inspect(short)
    assert calls(long) < 1.1 * calls(short)
