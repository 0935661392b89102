"""What checkpoints in a store cost: requests, bytes and seconds, by a store that answers as a real one does.

    python tests/benchmarks/stores.py

Each request takes 20 ms, and a connection gives 80 MB/s; the bytes come from files of this machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import statekit
from statekit.conversion import registry
from statekit.errors import StatekitError
from statekit.files.ahead import ReadAhead
from statekit.files.source import Files
from statekit.files.tree import Facts, StoredPlace
from statekit.testing.stores import CountingTree, stored

LATENCY, BYTES_A_SECOND = 0.02, 80e6
LARGE = 2**29


class SlowTree:
    """The files of a folder, as far away as those in a store."""

    place = "slow://store"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def facts(self, name: str) -> Facts | None:
        path = self._folder / name
        if path.is_dir():
            return Facts(name, "folder")
        return Facts(name, "file", path.stat().st_size, "1", 1) if path.exists() else None

    def names(self, folder: str) -> Sequence[str]:
        return sorted(path.name for path in (self._folder / folder).iterdir())

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        time.sleep(LATENCY + len(into) / BYTES_A_SECOND)
        with (self._folder / facts.name).open("rb", buffering=0) as file:
            file.seek(start)
            file.readinto(into)


class Zeros(SlowTree):
    """One file of zeros, which needs no disk."""

    def facts(self, name: str) -> Facts | None:
        return Facts(name, "file", LARGE, "1", 1)

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        time.sleep(LATENCY + len(into) / BYTES_A_SECOND)


def large_tensor(folder: Path) -> str:
    with Files() as files:
        file = files.source(StoredPlace(ReadAhead(Zeros(folder)), PurePosixPath("x")))
        block = memoryview(bytearray(2**23))
        began = time.perf_counter()
        for start in range(0, LARGE, len(block)):
            file.read_into(start, block)
        return f"{LARGE / (time.perf_counter() - began) / 1e6:.0f} MB/s"


def inspected(make: Callable[[Path], Any]) -> Callable[[Path], str]:
    """Returns what measures the inspection of a checkpoint."""

    def measured(folder: Path) -> str:
        make(folder / "run")
        counting = CountingTree(SlowTree(folder))
        began = time.perf_counter()
        statekit.inspect(StoredPlace(ReadAhead(counting), PurePosixPath("run")))
        taken, read = time.perf_counter() - began, sum(count for _, _, count in counting.reads)
        return f"{len(counting.reads)} requests, {read / 1e6:.1f} MB, {taken:.1f} s"

    return measured


def safetensors_of(bytes_: int) -> Callable[[Path], None]:
    """Returns what writes a model of zeros that takes no room on a disk that knows holes."""

    def make(path: Path) -> None:
        import json

        size = bytes_ // 100
        header = {
            f"layer{i}.weight": {
                "dtype": "F32",
                "shape": [size // 4],
                "data_offsets": [i * size, (i + 1) * size],
            }
            for i in range(100)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.mkdir()
        with (path / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + 100 * size)

    return make


def torch_run(tensors: int, side: int = 2) -> Callable[[Path], None]:
    """Returns what writes a run of AdamW with as many square matrices and counts."""

    def make(path: Path) -> None:
        params = {
            f"layer{i}.weight": torch.nn.Parameter(torch.zeros(side, side)) for i in range(tensors // 4)
        }
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
        for param in params.values():
            param.grad = torch.ones_like(param)
        optimizer.step()
        torch.save({"model": dict(params), "optimizer": optimizer.state_dict(), "step": 1}, path)

    return make


ROWS: dict[str, Callable[[Path], str]] = {
    "one large tensor": large_tensor,
    "inspect a 2 GB safetensors": inspected(safetensors_of(2 * 10**9)),
    "inspect a 100 GB safetensors": inspected(safetensors_of(100 * 10**9)),
    "inspect a torch run of 10 000 tensors": inspected(torch_run(10_000)),
    "inspect a torch run of 100 000 tensors": inspected(torch_run(100_000)),
    "inspect a torch run of 1 000 parameters of 100 x 100": inspected(torch_run(4_000, 100)),
}
CONTAINERS = (
    "torch", "safetensors", "statekit", "dcp", "dcp-safetensors", "megatron", "hf-trainer", "accelerate", "flax",
    "mxnet", "keras-h5", "tf-bundle",
)  # fmt: skip
"""All of AdamW that our own trees can hold; tensorstore reads Orbax' databases from real stores alone."""


def opened(folder: Path, tensors: int, side: int) -> Table:
    """Returns what a run of AdamW costs in each container: to inspect, beside `2 + 4 x files`, and with all counts."""
    torch_run(tensors, side)(folder / "run.pt")
    table = Table(
        "container", "files", "of at most", "requests", "MB read", "with all", "MB read", "MB in all"
    )
    for container in CONTAINERS:
        path = folder / "".join((container, *registry.container(container).suffixes[:1]))
        try:
            statekit.convert(folder / "run.pt", path, to=container, assume_defaults=True, require="lossy")
        except StatekitError as error:
            table.add_row(container, error.line)
            continue
        sizes = [file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()]
        costs: list[str] = []
        for look in (statekit.inspect, lambda place: statekit.open(place).close()):
            place, counting = stored(path)
            look(place)
            read = sum(count for _, _, count in counting.reads)
            costs += [f"{len(counting.reads)}", f"{read / 1e6:.1f}"]
        table.add_row(container, f"{len(sizes)}", f"{2 + 4 * len(sizes)}", *costs, f"{sum(sizes) / 1e6:.1f}")
    return table


def main() -> None:
    """Prints a row for each, and one for each container."""
    table = Table("what", "cost")
    for name, measure in ROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            table.add_row(name, measure(Path(folder)))
    Console(width=100).print(table)
    for side in (2, 100):
        with tempfile.TemporaryDirectory() as folder:
            Console(width=100).print(opened(Path(folder), 1200, side))


if __name__ == "__main__":
    main()
