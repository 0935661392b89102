"""What many workers cost and bring: overhead of a task, the finish, two workers over one, and 64 workers simulated.

    python tests/benchmarks/workers.py [overhead | finish | two | simulated]

The simulation lets the engine's own course of a work run by a clock of its own: who gets which task, and which slow
task is begun twice. The rest is measured.
"""

from __future__ import annotations

import heapq
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import statekit
from statekit.scale import engine
from statekit.scale.engine import Outcome, _Course
from statekit.scale.work import Work, split

sys.path.insert(0, f"{Path(__file__).parents[1]}")

WORKERS, BYTES, RATE, OVERHEAD = 64, 2e12, 0.4e9, 0.15
"""Workers, bytes of the checkpoint, bytes a second of a worker, and seconds of a task beside its values."""
SLOW_WORKERS, SLOW_RATE = 2, 0.2
"""Slow workers, and their part of the usual rate."""
TASK = 4 * 2**30
CARD, LATENCY = 24e6, 0.02
"""Bytes a second that a worker of `two` gets from the store, as by a network card of its own; seconds of a request."""


def weights(folder: Path, tensors: int, elements: int) -> Path:
    """Writes a model of so many vectors."""
    folder.mkdir(parents=True)
    values = {f"layer.{i}.weight": np.full(elements, i, np.float32) for i in range(tensors)}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    return folder


def works(folder: Path, parts: int, tensors: int) -> tuple[Work, float]:
    """Carries out all tasks of a work in this process; returns it, and the seconds of a task."""
    source = weights(folder / "source", tensors, 8)
    planned = statekit.plan(source, folder / "target", to="safetensors", require="lossy")
    work = split(planned, folder / "work", 32 * tensors // parts)
    began = time.process_time()
    for number in work.missing():
        work.run(number)
    return work, (time.process_time() - began) / len(work.tasks)


def overhead(folder: Path) -> str:
    work, seconds = works(folder, 200, 4000)
    work.close()
    return f"{seconds * 1000:.0f} ms of a core for a task of 20 small tensors"


def finish(folder: Path) -> str:
    work, _ = works(folder, 1000, 100_000)
    began, clock = time.process_time(), time.monotonic()
    work.finish()
    taken, elapsed = time.process_time() - began, time.monotonic() - clock
    work.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return f"1 000 parts, 100 000 tensors: {taken:.1f} s of a core, {elapsed:.1f} s by the clock, {peak} MiB"


def two(folder: Path) -> str:
    """Converts out of a store that gives each worker what its card takes, by one worker and by two."""
    import os

    from store_serving import _S3, serving

    source = weights(folder / "source", 24, 75 * 10**5)
    data = (source / "model.safetensors").read_bytes()
    whole: Callable[..., None] = _S3.file

    free: dict[str, float] = {}
    """When the card of each worker has brought what was asked for so far, by the key that it signs with."""

    def throttled(self: Any, name: str, **headers: str) -> None:
        start, _, last = self.headers.get("Range", "bytes=0-0").removeprefix("bytes=").partition("-")
        worker = self.headers["Authorization"].partition("/")[0]
        with self.served.lock:
            now = time.monotonic()
            free[worker] = max(now, free.get(worker, now)) + (int(last or start) - int(start)) / CARD
        time.sleep(free[worker] - now + LATENCY)
        whole(self, name, **headers)

    _S3.file = throttled  # type: ignore[method-assign]  # a server as slow as a connection
    with serving("s3", {"run/model.safetensors": data}) as (address, served):
        served.etag = lambda name: '"1"'  # type: ignore[method-assign]  # a digest for each request takes its time
        named = {
            "ACCESS_KEY_ID": "split",
            "SECRET_ACCESS_KEY": "b",
            "REGION": "us-east-1",
            "ENDPOINT_URL": address,
        }
        environment = {**os.environ, **{f"AWS_{name}": value for name, value in named.items()}}

        def seconds(count: int) -> float:
            """Returns how long so many workers take, each with one thread, as on a machine of its own."""
            program, place = [sys.executable, "-m", "statekit", "work"], folder / f"to-{count}"
            options = ["--to", "safetensors", "--task-bytes", "360MB"]
            split_ = [*program, "split", "s3://bucket/run", f"{place}", *options]
            subprocess.run(split_, env=environment, check=True, stdout=subprocess.DEVNULL)
            run = [*program, "run", f"{place}.work", "--threads", "1", "--shard"]
            began = time.monotonic()
            shares = [[*run, f"{number}/{count}"] for number in range(count)]
            workers = [
                subprocess.Popen(
                    share,
                    env={**environment, "AWS_ACCESS_KEY_ID": f"worker{count}{number}"},
                    stdout=subprocess.DEVNULL,
                )
                for number, share in enumerate(shares)
            ]
            if sum(abs(worker.wait()) for worker in workers):
                raise RuntimeError("a worker failed")
            return time.monotonic() - began

        one, both = seconds(1), seconds(2)
    return f"{one:.0f} s by one worker, {both:.0f} s by two: {one / both:.2f} times"


def course_of(rates: list[float], sizes: list[float]) -> float:
    """Returns the seconds that a work takes by the engine's own course; nothing is read or written."""
    now = 0.0
    setattr(engine, "time", SimpleNamespace(monotonic=lambda: now))  # noqa: B010  # mypy knows of no such name
    course = _Course(deque(range(len(sizes))))
    free, running = [*range(len(rates))], list[tuple[float, int, int]]()
    while course.goes_on:
        while free and (task := course.next()) is not None:
            worker = free.pop()
            course.begin(task)
            heapq.heappush(running, (now + OVERHEAD + sizes[task] / rates[worker], task, worker))
        if running[0][0] > now + 1:  # as `carry_out` looks once a second
            now += 1
            continue
        now, task, worker = heapq.heappop(running)
        free.append(worker)
        course.end(Outcome(task))
    return now


def simulated(_: Path) -> str:
    draw = random.Random(0)
    sizes = [TASK * draw.uniform(0.5, 1) for _ in range(int(BYTES / TASK / 0.75))]
    sizes = [size * BYTES / sum(sizes) for size in sizes]
    sizes[draw.randrange(len(sizes))] = 5e9  # the largest tensor, a task by itself
    least = sum(sizes) / (WORKERS * RATE)
    said = []
    for slow in (0, SLOW_WORKERS):
        rates = [RATE * (SLOW_RATE if worker < slow else 1) for worker in range(WORKERS)]
        taken = course_of(rates, sizes)
        said.append(f"{slow} slow workers {taken:.0f} s, efficiency {least / taken:.2f}")
    return f"{len(sizes)} tasks, at best {least:.0f} s: {'; '.join(said)}"


ROWS: dict[str, Callable[[Path], str]] = {
    "overhead": overhead,
    "finish": finish,
    "two": two,
    "simulated": simulated,
}


def main() -> None:
    """Prints a row for each."""
    table = Table("what", "cost")
    for name in sys.argv[1:] or ROWS:
        with tempfile.TemporaryDirectory() as folder:
            table.add_row(name, ROWS[name](Path(folder)))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
