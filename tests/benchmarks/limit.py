"""`make bench`: conversions beside the least that any must do: copy, sync, and digest both sides, on two threads.

    python tests/benchmarks/limit.py [--gigabytes 1] [--pairs torch:torch,torch:orbax] [--rounds 5] [--page]

In each round one copies a checkpoint (`cp -r`, and `sync` of what came), then takes the BLAKE3 of both with a thread
for each; then, in a process of its own, the same checkpoint is converted. Figures are medians of the rounds; imports
aren't counted, as those of the peer aren't. `--page` writes the table into docs/performance.md. No pair is begun after
`--minutes` are over, which is said.
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
from rich.console import Console
from synthetic import moments, state, write_neutral

from statekit.conversion import registry
from statekit.state.train_state import TrainState

GB, MIB = 1e9, 2**20
BLOCK = 8 * MIB
SIDE = 4096
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- limit -->\n", "<!-- /limit -->\n"

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
MAIN = "torch:torch,safetensors:torch,torch:statekit,statekit:torch,torch:orbax,orbax:torch,statekit:t5x,t5x:statekit"

CONVERSION = """
import json, pathlib, re, resource, sys, time
from statekit.conversion.convert import convert, plan
import statekit.cli.convert_command, msgpack, safetensors, zstandard, concurrent.futures
source, target, container, layout, hints = sys.argv[1:]
from statekit.conversion.contracts import Hints
from statekit.conversion import registry
registry.container(container), registry.layout(layout)
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024
before, start = peak(), time.perf_counter()
cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
said = Hints(**json.loads(hints))
report = convert(plan(pathlib.Path(source), pathlib.Path(target), to=container, layout=layout, hints=said))
seconds = time.perf_counter() - start
cpu = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - cpu
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak() - before, "stages": {}, "bytes": report.plan.bytes}))
"""


class Taken(NamedTuple):
    """What one run took: seconds of the clock, seconds of processor time, MiB at most above what was imported."""

    seconds: float
    cpu: float
    peak: float = 0.0
    stages: Mapping[str, tuple[float, float]] = MappingProxyType({})
    bytes: int = 0


def files_of(path: Path) -> list[Path]:
    """Returns a file, or the files below a folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


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
    start, began = time.perf_counter(), _processor()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, files_of(target))], check=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(digest, (source, target)))
    return Taken(time.perf_counter() - start, _processor() - began)


def _processor() -> float:
    import resource

    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def converted(source: Path, target: Path, container: str, layout: str, hints: dict[str, str]) -> Taken:
    """Converts in a process of its own."""
    arguments = [str(source), str(target), container, layout, json.dumps(hints)]
    made = subprocess.run([sys.executable, "-c", CONVERSION, *arguments], stdout=subprocess.PIPE, check=True)
    return Taken(**json.loads(made.stdout))


def removed(path: Path) -> None:
    """Removes a file or a folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def made_state(pair: Sequence[str], gigabytes: float) -> TrainState:
    """Returns a state that both containers of a pair can hold."""
    if "t5x" in pair:
        return state(max(1, round(gigabytes * GB / (2 * 4 * SIDE * SIDE))), SIDE, SIDE)
    count = max(1, round(gigabytes * GB / (3 * 4 * SIDE * SIDE)))
    variant = registry.layout(LAYOUTS[pair[0 if pair[0] != "statekit" else 1]]).variants["adamw"][0]
    return moments("adamw", variant, count, SIDE)


def layout_of(container: str, pair: Sequence[str]) -> str:
    """Returns the layout for a container, where T5X' state is on the other side a drop-in's."""
    if "t5x" in pair and container not in ("t5x", "statekit"):
        return {"orbax": "t5x"}.get(container, "statekit-torch")
    return LAYOUTS[container]


def measured(work: Path, pair: tuple[str, str], gigabytes: float, rounds: int) -> list[tuple[Taken, Taken]]:
    """Returns what the peer and the conversion took, in turn."""
    neutral, source = work / "neutral", work / pair[0]
    write_neutral(neutral, made_state(pair, gigabytes))
    if pair[0] == "statekit":
        neutral.rename(source)
    else:
        converted(neutral, source, pair[0], layout_of(pair[0], pair), {})
        removed(neutral)
    taken = []
    for _ in range(rounds):
        peer = copied(source, work / "copy")
        removed(work / "copy")
        ours = converted(source, work / f"target-{pair[1]}", pair[1], layout_of(pair[1], pair), {})
        removed(work / f"target-{pair[1]}")
        taken.append((peer, ours))
    removed(source)
    return taken


def row(pair: tuple[str, str], taken: Sequence[tuple[Taken, Taken]]) -> str:
    """Returns a row of the table."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    size = taken[0][1].bytes / GB
    ours, peer = median([b.seconds for _, b in taken]), median([a.seconds for a, _ in taken])
    shares = sorted(a.seconds / b.seconds for a, b in taken)
    cpus = median([a.cpu for a, _ in taken]) / size, median([b.cpu for _, b in taken]) / size
    peak = max(b.peak for _, b in taken)
    stages = taken[0][1].stages
    worked = ", ".join(f"{name} {spent:.2f} s" for name, (spent, _) in stages.items())
    return (
        f"| {pair[0]} to {pair[1]} | {size:.2f} | {size / peer:.2f} | {size / ours:.2f} | {median(shares):.2f} "
        f"({shares[0]:.2f} to {shares[-1]:.2f}) | {cpus[0]:.2f} | {cpus[1]:.2f} | {peak:.0f} | {worked} |"
    )


def main() -> None:
    """Measures, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pairs", default=MAIN)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    out = Console(width=200)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for text in arguments.pairs.split(","):
            source, _, target = text.partition(":")
            taken = measured(Path(folder), (source, target), arguments.gigabytes, arguments.rounds)
            out.print(row((source, target), taken), markup=False)


if __name__ == "__main__":
    main()
