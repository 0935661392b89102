"""`make bench`: how fast optimizers step, ours and their peers, interleaved in the same process.

    python tests/benchmarks/steps.py [--framework torch] [--updates 9] [--only 48] [--processor] [--page]

Each framework runs in a process of its own. Speed is the median over updates, the first two left out, in million
parameters per second; a ratio is that of the medians, with the least and the most of single rounds. Parameters,
gradients and slots are float32. `of the copy` is a share of the machine's own copy of as many tensors, in the same run
on as many threads: the bytes that the rule must read and write in its passes (traffic.py), a second, over those that
the copy reads and writes.

`--processor` takes seconds of the processor, of all threads together: for a machine that others use too, where threads
of torch should be one (OMP_NUM_THREADS=1), which otherwise wait by spinning. `--page` writes the tables into
docs/performance.md.
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
from operator import truediv
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from page import fill
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


def speeds(
    entrants: Entrants, size: Size, updates: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Returns the speeds of each, update after update, in million parameters per second."""
    fitting = {name: entrant for name, entrant in entrants.items() if size.count <= entrant.most}
    steps = {name: entrant.make(size.count, size.side) for name, entrant in fitting.items()}
    steps[COPY] = _copy(size.count, size.side)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM + updates):
        for name, step in steps.items():
            start = clock()
            step()
            seconds[name].append(clock() - start)
    return {name: [size.millions / each for each in taken[WARM:]] for name, taken in seconds.items()}


def rows(measured: list[dict[str, list[float]]], entrants: Entrants) -> Iterator[tuple[str, ...]]:
    """Yields the lines of a table: name, and for each size the speed, and its share of the roof's and the copy's."""
    roof, median = next(iter(entrants)), statistics.median
    for name, entrant in entrants.items():
        traffic, cells = TRAFFIC[entrant.rule], list[str]()
        for by_name in measured:
            if name not in by_name:
                cells += ["-"] * 3
                continue
            speed, ratios = median(by_name[name]), list(map(truediv, by_name[name], by_name[roof]))
            spread = "" if name == roof else f" ({min(ratios):.2f} to {max(ratios):.2f})"
            share = speed * traffic.passes / (median(by_name[COPY]) * _COPIED)
            cells += [f"{speed:.0f}", f"{speed / median(by_name[roof]):.2f}{spread}", f"{share:.2f}"]
        yield (
            f"statekit {name}" if entrant.ours else name,
            f"{traffic.passes} ({traffic.least})",
            *cells,
        )
    yield COPY, f"{_COPIED}", *(cell for one in measured for cell in (f"{median(one[COPY]):.0f}", "", "1"))


def report(framework: str, arguments: argparse.Namespace) -> None:
    """Prints one framework's table, and writes it into the page if that is asked for."""
    entrants: Entrants = importlib.import_module(f"steps_{framework}").ENTRANTS
    sizes = [size for size in SIZES if arguments.only in (None, size.count)]
    clock = time.process_time if arguments.processor else time.perf_counter
    measured = [speeds(entrants, size, arguments.updates, clock) for size in sizes]
    heads = [head for size in sizes for head in (f"{size.title}, M/s", "of the first", "of the copy")]
    timed = "the processor's time" if arguments.processor else "by the clock"
    lines = [(f"{framework}, {timed}", "bytes in passes (at once)", *heads), ("---",) * (2 + len(heads))]
    table = "".join(f"| {' | '.join(line)} |\n" for line in (*lines, *rows(measured, entrants)))
    print(table)
    if arguments.page:
        fill(f"steps-{framework}", table)


def main() -> None:
    """Measures one framework, or each that is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS)
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--only", type=int, choices=[size.count for size in SIZES], help="one size")
    parser.add_argument("--processor", action="store_true", help="seconds of the processor, not of the clock")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/performance.md")
    arguments = parser.parse_args()
    if arguments.framework:
        report(arguments.framework, arguments)
        return
    for framework in FRAMEWORKS:
        if importlib.util.find_spec(framework) and importlib.util.find_spec(f"steps_{framework}"):
            subprocess.run([sys.executable, *sys.argv, "--framework", framework], check=True)


if __name__ == "__main__":
    main()
