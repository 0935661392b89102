"""`make bench`: how fast optimizers step, ours and their peers, interleaved in the same process.

    python tests/benchmarks/steps.py [--framework torch] [--updates 9]

Each framework runs in a process of its own. Speed is the median over updates, the first two left out, in million
parameters per second; a ratio is that of the medians. Parameters, gradients and slots are float32. `of the copy` is a
share of the machine's own copy of as many tensors, in the same run on as many threads: the bytes that the rule must
read and write in its passes (traffic.py), a second, over those that the copy reads and writes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from rich.console import Console
from rich.table import Table
from traffic import TRAFFIC

FRAMEWORKS = ("torch", "jax", "tensorflow")
WARM = 2
"""Updates that aren't counted: compilation, first pages."""


@dataclass(frozen=True)
class Size:
    """A model of equal matrices."""

    count: int
    side: int

    @property
    def title(self) -> str:
        """What stands above a column."""
        return f"{self.count} of {self.side}x{self.side}"

    @property
    def millions(self) -> float:
        """Parameters, in millions."""
        return self.count * self.side**2 / 1e6


SIZES = (Size(48, 1024), Size(2000, 64))


@dataclass(frozen=True)
class Entrant:
    """One optimizer in the table.

    Attributes:
        rule: Its schema, by which its traffic is known.
        make: Given a number of square matrices and their side, returns what makes one update, and waits for it.
        ours: Whether it is statekit's.
        most: The most matrices that it is measured with, where more take minutes to compile.
    """

    rule: str
    make: Callable[[int, int], Callable[[], object]]
    ours: bool = False
    most: int = 10_000


Entrants: TypeAlias = Mapping[str, Entrant]
"""By name; the first is the roof that ratios refer to. Each `steps_<framework>.py` offers `ENTRANTS`."""


COPY = "the machine's copy"
_COPIED = 8
"""Bytes that a copy reads and writes of each float32."""


def _copy(count: int, side: int) -> Callable[[], object]:
    """Returns what copies as many matrices, on as many threads as there are cores."""
    pairs = [(np.empty((side, side), np.float32), np.ones((side, side), np.float32)) for _ in range(count)]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
    shares = [pairs[i :: pool._max_workers] for i in range(pool._max_workers)]

    def share(mine: list[tuple[np.ndarray, np.ndarray]]) -> None:
        for to, of in mine:
            np.copyto(to, of)

    return lambda: [*pool.map(share, shares)]


def speeds(entrants: Entrants, size: Size, updates: int) -> dict[str, float]:
    """Returns the median speed of each, in million parameters per second."""
    fitting = {name: entrant for name, entrant in entrants.items() if size.count <= entrant.most}
    steps = {name: entrant.make(size.count, size.side) for name, entrant in fitting.items()}
    steps[COPY] = _copy(size.count, size.side)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM + updates):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: size.millions / statistics.median(taken[WARM:]) for name, taken in seconds.items()}


def rows(entrants: Entrants, updates: int) -> Iterator[tuple[str, ...]]:
    """Yields the lines of a table: name, and for each size the speed, and its share of the roof's."""
    measured = [speeds(entrants, size, updates) for size in SIZES]
    roof = next(iter(entrants))
    for name, entrant in entrants.items():
        traffic, cells = TRAFFIC[entrant.rule], list[str]()
        for by_name in measured:
            speed = by_name.get(name)
            if speed is None:
                cells += ["-"] * 3
            else:
                share = speed * traffic.passes / (by_name[COPY] * _COPIED)
                cells += [f"{speed:.0f}", f"{speed / by_name[roof]:.2f}", f"{share:.2f}"]
        yield (
            f"statekit {name}" if entrant.ours else name,
            f"{traffic.passes} ({traffic.least})",
            *cells,
        )
    yield COPY, f"{_COPIED}", *(cell for one in measured for cell in (f"{one[COPY]:.0f}", "", "1"))


def report(framework: str, updates: int) -> None:
    """Prints one framework's table."""
    entrants: Entrants = importlib.import_module(f"steps_{framework}").ENTRANTS
    heads = [head for size in SIZES for head in (f"{size.title}, M/s", "of the first", "of the copy")]
    table = Table(f"updates in {framework}", "bytes in passes (at once)", *heads)
    for row in rows(entrants, updates):
        table.add_row(*row)
    Console(width=160).print(table)


def main() -> None:
    """Measures one framework, or each that is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS)
    parser.add_argument("--updates", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.framework:
        report(arguments.framework, arguments.updates)
        return
    for framework in FRAMEWORKS:
        if importlib.util.find_spec(framework) and importlib.util.find_spec(f"steps_{framework}"):
            command = (
                sys.executable,
                __file__,
                "--framework",
                framework,
                "--updates",
                str(arguments.updates),
            )
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
