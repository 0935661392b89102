"""`make bench`: conversions beside the least that any must do: copy, sync, and digest both sides, on two threads.

    python tests/benchmarks/limit.py [--gigabytes 1] [--pairs torch:torch,torch:orbax] [--rounds 5] [--page]

In each round one copies a checkpoint (`cp -r`, and `sync` of what came), then takes the BLAKE3 of both with a thread
for each; then, in a process of its own, the same checkpoint is converted. Figures are medians of the rounds; imports
aren't counted, as those of the peer aren't. Both begin with memory that was free a moment before: what a virtual
machine has free for two seconds goes back to its host, and a file written after that takes up to five times as long.
`--transposed` converts through a map that transposes every matrix.
`--page` writes the table into docs/performance.md. No pair is begun after `--minutes` are over, which is said.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from blake3 import blake3
from page import fill
from rich.console import Console
from synthetic import KERNEL, moments, state, write_neutral

from statekit.conversion import registry
from statekit.state.train_state import TrainState

GB, MIB = 1e9, 2**20
BLOCK = 8 * MIB
SIDE = 4096

LAYOUTS = {
    "torch": "torch-optim",
    "safetensors": "torch-optim",
    "hf-trainer": "torch-optim",
    "accelerate": "torch-optim",
    "dcp": "torch-fqn",
    "dcp-safetensors": "torch-fqn-flat",
    "megatron": "megatron",
    "flax": "optax",
    "orbax": "optax",
    "mxnet": "mxnet-adam",
    "keras-h5": "keras",
    "tf-bundle": "tf-adam",
    "statekit": "statekit",
    "t5x": "t5x",
}
"""Containers, each with a layout that is at home in it."""
DROP_INS = {
    **dict.fromkeys(("torch", "safetensors", "hf-trainer", "accelerate", "dcp"), "statekit-torch"),
    **dict.fromkeys(("flax", "orbax"), "statekit-jax"),
    "keras-h5": "statekit-keras",
    "tf-bundle": "tf2-statekit",
}
"""Containers that hold our optimizers' state, whose rules are any system's, with the layout of that."""
TRANSPOSED = {
    "title": "Matrices and the same, transposed",
    "facts": ["this benchmark's parameters"],
    "source": {"title": "matrices"},
    "target": {"title": "matrices, transposed"},
    "parameters": [{"source": KERNEL, "target": KERNEL, "operations": [{"op": "permute", "order": [1, 0]}]}],
}
MAIN = "torch:torch,safetensors:torch,torch:statekit,statekit:torch,torch:orbax,orbax:torch,statekit:t5x,t5x:statekit"

WARMING = """
import os, sys
folder, size = sys.argv[-2:]
with open(os.path.join(folder, "warm"), "xb", buffering=0) as file:
    for _ in range(int(size) >> 23):
        file.write(bytes(2**23))
os.remove(os.path.join(folder, "warm"))
"""
"""Writes a file and removes it, so that as much memory is at hand."""
CONVERSION = f"""
import json, pathlib, re, resource, sys, time
from statekit.conversion.convert import convert, plan
import statekit.cli.convert_command, msgpack, safetensors, zstandard, concurrent.futures, h5py, tensorstore
source, target, container, layout, map, folder, size = sys.argv[1:]
from statekit.conversion import registry
from statekit.maps.model_map import maps_of
registry.container(container), registry.layout(layout)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
{WARMING}
before, start = peak(), time.perf_counter()
cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
maps = maps_of(map or None)
report = convert(plan(pathlib.Path(source), pathlib.Path(target), to=container, layout=layout, maps=maps))
seconds = time.perf_counter() - start
cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
taken = dict(seconds=seconds, cpu=cpu, peak=peak() - before)
print(json.dumps(dict(taken, stages=report.times.worked, bytes=report.plan.bytes)))
"""


class Taken(NamedTuple):
    """What one run took: seconds of the clock, seconds of processor time, MiB at most above what was imported."""

    seconds: float
    cpu: float
    peak: float = 0.0
    stages: Mapping[str, float] = MappingProxyType({})
    bytes: int = 0


def files_of(path: Path) -> list[Path]:
    """Returns a file, or the files below a folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def size_of(path: Path) -> int:
    """Returns how many bytes the files at a path have."""
    return sum(file.stat().st_size for file in files_of(path))


def digest(path: Path) -> None:
    """Takes the BLAKE3 of all files at a path."""
    buffer = memoryview(bytearray(BLOCK))
    for file in files_of(path):
        hasher = blake3()
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(buffer):
                hasher.update(buffer[:count])


def copied(source: Path, target: Path) -> Taken:
    """Copies, syncs and digests both."""
    subprocess.run([sys.executable, "-c", WARMING, str(target.parent), str(size_of(source))], check=True)
    start, began = time.perf_counter(), _processor()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, files_of(target))], check=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(digest, (source, target)))
    return Taken(time.perf_counter() - start, _processor() - began)


def _processor() -> float:
    import resource

    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def converted(source: Path, target: Path, container: str, layout: str, transposed: bool = False) -> Taken:
    """Converts in a process of its own; through a map that transposes every matrix, if asked for."""
    given = [str(source), str(target), container, layout, ""]
    if transposed:
        map_file = target.parent / "transposed.json"
        map_file.write_text(json.dumps(TRANSPOSED), encoding="utf-8")
        given[-1] = str(map_file)
    command = [sys.executable, "-c", CONVERSION, *given, str(target.parent), str(size_of(source))]
    made = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Taken(**json.loads(made.stdout))


def removed(path: Path) -> None:
    """Removes a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def neutral(work: Path, pair: Sequence[str], gigabytes: float, side: int) -> Path:
    """Returns a state that both containers of a pair can hold, as statekit's own folder, made once."""
    made = made_state(pair, gigabytes, side)
    folder = work / f"{made.optimizer.schema}-{made.optimizer.variant}"
    if not folder.exists():
        write_neutral(folder, made)
    return folder


def made_state(pair: Sequence[str], gigabytes: float, side: int = SIDE) -> TrainState:
    """Returns a state that both containers of a pair can hold, of square matrices."""
    if "t5x" in pair:
        return state(max(1, round(gigabytes * GB / (2 * 4 * side * side))), side, side)
    count = max(1, round(gigabytes * GB / (3 * 4 * side * side)))
    variant = registry.layout(LAYOUTS[pair[0 if pair[0] != "statekit" else 1]]).variants["adamw"][0]
    return moments("adamw", variant, count, side)


def layout_of(container: str, pair: Sequence[str]) -> str:
    """Returns the layout for a container, where T5X' state is on the other side a drop-in's."""
    if "t5x" in pair:
        return "t5x" if container == "orbax" else DROP_INS.get(container, LAYOUTS[container])
    return LAYOUTS[container]


def measured(
    work: Path, pair: tuple[str, str], gigabytes: float, rounds: int, side: int, transposed: bool = False
) -> list[tuple[Taken, Taken]]:
    """Returns what the peer and the conversion took, in turn."""
    made = source = neutral(work, pair, gigabytes, side)
    if pair[0] != "statekit":
        source = work / pair[0]
        converted(made, source, pair[0], layout_of(pair[0], pair))
    taken = []
    for _ in range(rounds):
        peer = copied(source, work / "copy")
        removed(work / "copy")
        layout = layout_of(pair[1], pair)
        ours = converted(source, work / f"target-{pair[1]}", pair[1], layout, transposed)
        removed(work / f"target-{pair[1]}")
        taken.append((peer, ours))
    if source != made:
        removed(source)
    return taken


HEAD = """
| from, to | GB | limit, GB/s | statekit, GB/s | share of it | limit, cores' s/GB | statekit's | MiB | work by stage |
|---|---|---|---|---|---|---|---|---|
"""


def row(pair: tuple[str, str], taken: Sequence[tuple[Taken, Taken]]) -> str:
    """Returns a row of the table."""
    size, peers, ours = taken[0][1].bytes / GB, [peer for peer, _ in taken], [one for _, one in taken]
    speeds = [size / statistics.median(one.seconds for one in side) for side in (peers, ours)]
    shares = sorted(peer.seconds / one.seconds for peer, one in taken)
    processor = [statistics.median(one.cpu for one in side) / size for side in (peers, ours)]
    stages = min(ours, key=lambda one: one.seconds).stages
    longest = sorted(stages.items(), key=lambda item: -item[1])
    cells = (
        f"{pair[0]} to {pair[1]}",
        f"{size:.2f}",
        *(f"{speed:.2f}" for speed in speeds),
        f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
        *(f"{one:.2f}" for one in processor),
        f"{max(one.peak for one in ours):.0f}",
        ", ".join(f"{name} {spent / sum(stages.values()):.0%}" for name, spent in longest),
    )
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Measures, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", default=MAIN, help="SOURCE:TARGET,...; 'all' for each container to itself")
    parser.add_argument("--side", type=int, default=SIDE, help="of each matrix; 32768 makes one of 4.3 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--transposed", action="store_true", help="through a map that transposes every matrix"
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--folder", help="where to put the files (default: a temporary folder)")
    parser.add_argument("--page", action="store_true", help="write the table into docs/performance.md")
    arguments = parser.parse_args()
    out, table, began = Console(width=200), HEAD, time.monotonic()
    texts = [f"{name}:{name}" for name in LAYOUTS] if arguments.pairs == "all" else arguments.pairs.split(",")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for text in texts:
            if time.monotonic() - began > 60 * arguments.minutes:
                out.print(
                    f"{text} and what follows is left out: {arguments.minutes:g} minutes are over",
                    markup=False,
                )
                break
            source, _, target = text.partition(":")
            taken = measured(
                Path(folder),
                (source, target),
                arguments.gigabytes,
                arguments.rounds,
                arguments.side,
                arguments.transposed,
            )
            table += (line := row((source, target), taken))
            out.print(line, markup=False, end="")
    if arguments.page:
        fill("limit", table)


if __name__ == "__main__":
    main()
