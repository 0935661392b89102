"""Carries out the tasks of a work on an engine: retries, and doubles of slow tasks. The engine only says where.

An engine gives attempts a place to run, and says when one has ended. Whether a task is done, the part record says.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from statekit.conversion.convert import Report
from statekit.conversion.plan import Plan
from statekit.errors import CommitError, Faults, UsageError
from statekit.files.tree import Place
from statekit.pipeline import cores
from statekit.scale.progress import Status
from statekit.scale.work import TASK_BYTES, Work, split

MOST_ATTEMPTS = 4
"""Attempts at a task that may fail before the work is given up."""
_WAIT = 1.0
"""Seconds between two looks at how far a work is."""
_SLOW, _LEAST = 2.0, 10.0
"""A task is slow when it runs for so many times the usual seconds, and for so many seconds at least."""


class Outcome(NamedTuple):
    """An attempt that ended: its task, why it failed ("" if it didn't), and whether another attempt may help."""

    task: int
    error: str = ""
    again: bool = True


class Pool(Protocol):
    """Where an engine runs attempts."""

    @property
    def slots(self) -> int:
        """How many attempts run at once."""

    def start(self, number: int) -> None:
        """Begins an attempt at a task."""

    def wait(self, seconds: float) -> list[Outcome]:
        """Returns the attempts that ended, after one has, or after so many seconds."""

    def close(self) -> None:
        """Stops what still runs."""


class Engine(Protocol):
    """What `--on` names."""

    def pool(self, work: Place, missing: int) -> Pool:
        """Returns a pool for a work in which so many tasks are missing."""


@dataclass
class _Course:
    """The course of a work on an engine."""

    queue: deque[int]
    running: Counter[int] = field(default_factory=Counter)
    begun: dict[int, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    failures: Counter[int] = field(default_factory=Counter)
    lost: dict[int, str] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def next(self) -> int | None:
        """Returns the next task: a waiting one, else a slow one for a second attempt; None if there is neither."""
        if self.queue:
            return self.queue.popleft()
        usual = statistics.median(self.seconds) if self.seconds else float("inf")
        limit, now = max(_LEAST, _SLOW * usual), time.monotonic()
        slow = [task for task, began in self.begun.items() if self.running[task] == 1 and now - began > limit]
        return min(slow, key=lambda task: self.begun[task], default=None)

    def begin(self, task: int) -> None:
        """Notes that an attempt begins."""
        self.running[task] += 1
        self.begun.setdefault(task, time.monotonic())

    def end(self, outcome: Outcome) -> None:
        """Notes that an attempt has ended."""
        task = outcome.task
        self.running[task] -= 1
        if not outcome.error:
            self.done.add(task)
            self.lost.pop(task, None)
            if (began := self.begun.pop(task, None)) is not None:
                self.seconds.append(time.monotonic() - began)
            return
        self.failures[task] += 1
        if task in self.done or self.running[task]:
            return
        self.begun.pop(task, None)
        if outcome.again and self.failures[task] < MOST_ATTEMPTS:
            self.queue.append(task)
        else:
            self.lost[task] = outcome.error

    @property
    def goes_on(self) -> bool:
        """Whether tasks wait or run that aren't done."""
        return bool(self.queue) or any(task not in self.done for task in +self.running)


def carry_out(work: Work, engine: Engine, tell: Callable[[Status], object] = lambda status: None) -> None:
    """Carries out the tasks of a work that are missing.

    Raises:
        CommitError: Tasks failed, each time; lists them. What is done stays done.
    """
    missing = work.missing()
    if not missing:
        tell(work.status())
        return
    course, looked = _Course(deque(missing)), 0.0
    pool = engine.pool(work.place, len(missing))
    try:
        while course.goes_on:
            while sum(course.running.values()) < pool.slots and (task := course.next()) is not None:
                course.begin(task)
                pool.start(task)
            for outcome in pool.wait(_WAIT):
                course.end(outcome)
            if time.monotonic() - looked > _WAIT:
                tell(work.status())
                looked = time.monotonic()
    finally:
        pool.close()
    tell(work.status())
    faults = Faults((error, f"task {task}") for task, error in sorted(course.lost.items()))
    faults.check(
        CommitError,
        "Tasks failed",
        place=work.place,
        remedy="mend what is wrong, and give the same command again: what is done stays done",
    )


def convert_on(
    plan: Plan,
    engine: Engine,
    folder: Place,
    task_bytes: int | None = None,
    tell: Callable[[Status], object] = lambda status: None,
) -> Report:
    """Splits a plan, has its tasks done on an engine, and finishes it; the same call goes on where one was ended.

    Args:
        plan: The plan.
        engine: Where.
        folder: The work's folder, which is removed at the end.
        task_bytes: Bytes of a task at most.
        tell: Told now and then how far it is.

    Raises:
        CommitError: Tasks failed; what is done stays done.
    """
    with split(plan, folder, TASK_BYTES if task_bytes is None else task_bytes) as work:
        carry_out(work, engine, tell)
        report = work.finish()
        work.drop()
    return report


@dataclass(frozen=True)
class Processes:
    """Processes of this machine, begun by exec: a fork of a process that has read from a store would hang."""

    count: int

    def pool(self, work: Place, missing: int) -> Pool:
        return _ProcessPool(work, min(self.count, missing))


class _Worker:
    """A process that does the tasks that it reads from its standard input, one after the other."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.task: int | None = None
        self._text = b""

    def begin(self, task: int) -> None:
        assert self.process.stdin is not None
        self.task = task
        with suppress(BrokenPipeError):  # it died; its standard output says so
            self.process.stdin.write(b"%d\n" % task)
            self.process.stdin.flush()

    def outcome(self) -> Outcome | None:
        """Returns what it says, after its standard output has something; None until that is a line."""
        assert self.process.stdout is not None and self.task is not None
        data = os.read(self.process.stdout.fileno(), 2**16)
        self._text += data
        task = self.task
        if b"\n" in self._text:
            line, _, self._text = self._text.partition(b"\n")
            answer: dict[str, Any] = json.loads(line)
            self.task = None
            return Outcome(task, answer["error"], answer["again"])
        if data:
            return None
        self.task = None
        code = self.process.wait()
        self.stop()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome(task, f"its worker {how}")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        if self.task is not None:
            self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _ProcessPool:
    def __init__(self, work: Place, count: int) -> None:
        threads = max(1, cores() // count)
        self.slots = count
        self._command = [
            sys.executable, "-P", "-m", "statekit", "work", "run", f"{work}", "--tasks", "-", "--threads", f"{threads}",
        ]  # fmt: skip
        self._workers: list[_Worker] = []

    def start(self, number: int) -> None:
        for dead in [worker for worker in self._workers if worker.task is None and not worker.is_alive]:
            dead.stop()
            self._workers.remove(dead)
        worker = next((worker for worker in self._workers if worker.task is None), None)
        if worker is None:
            worker = _Worker(self._command)
            self._workers.append(worker)
        worker.begin(number)

    def wait(self, seconds: float) -> list[Outcome]:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.task is not None and worker.process.stdout is not None:
                    selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            ready = [key.data for key, _ in selector.select(seconds)]
        return [outcome for worker in ready if (outcome := worker.outcome()) is not None]

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()


_SHARDS = (
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("JOB_COMPLETION_INDEX", "JOB_COMPLETIONS"),
)
"""Variables by which schedulers say which of how many a process is: SLURM's arrays and steps, torchrun, Open MPI, MPI
by PMI, Kubernetes' indexed Jobs (which say the index alone: the manifest has to set the other).
Source: sbatch(1), srun(1); torch.distributed.run; ompi docs, "Environment variables"; Kubernetes, "Indexed Job"."""


def shard(text: str) -> tuple[int, int]:
    """Returns which of how many shares a process does, from 0 on.

    Args:
        text: `I/N`; `auto/N`, where the scheduler says I; or `auto`, where it says both.

    Raises:
        UsageError: It makes no sense, or no scheduler says it.

    Example:
        >>> shard("3/8")
        (3, 8)
    """
    index, _, count = text.partition("/")
    if index == "auto":
        index, processes = _scheduled()
        count = count or processes
    is_plain = index.isdecimal() and count.isdecimal() and len(index + count) < 100
    if not (is_plain and int(index) < int(count)):
        raise UsageError(
            "The share of the tasks is malformed.",
            place="--shard",
            expected="I/N with I from 0 to N-1, auto, or auto/N where the scheduler says I alone",
            found=f"{index}/{count}",
        )
    return int(index), int(count)


def _scheduled() -> tuple[str, str]:
    """Returns which process this is, and of how many, as the scheduler says."""
    for index, count in _SHARDS:
        if index not in os.environ:
            continue
        number = os.environ[index]
        first, step = (os.environ.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("MIN", "STEP"))
        if index == "SLURM_ARRAY_TASK_ID" and number.isdecimal() and first.isdecimal():
            number = f"{(int(number) - int(first)) // int(step or 1)}"
        return number, os.environ.get(count, "")
    raise UsageError(
        "No scheduler says which share of the tasks this process does.",
        place="--shard",
        expected=f"one of the variables {', '.join(index for index, _ in _SHARDS)}",
        remedy="name it: --shard 0/8; or run all that are missing: --here",
    )
