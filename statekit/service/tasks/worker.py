"""A worker: `python -m statekit.service.tasks.worker`. It leases jobs, gives each to a process of its own, and reports.

It ends with the server that has started it. Asked to end, it lets its job go on for a while; then the job waits again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from statekit.errors import NotFoundError, StatekitError
from statekit.service.catalogue import Catalogue, checkpoint_of
from statekit.service.database import Database
from statekit.service.jobs import LEASE_SECONDS, MOST_LOGS, Jobs, Lease, Lost
from statekit.service.lineage import check_thinning
from statekit.service.options import FILES
from statekit.service.records import Checkpoint, Job, State
from statekit.service.tasks.child import LINE_LENGTH, Answer, Child, Died, Zygote
from statekit.service.tasks.confinement import Reach
from statekit.service.tasks.failures import crash, problem_of
from statekit.service.tasks.processes import end_with, holder_name

IDLE_SECONDS = 0.2
"""How long a worker waits before it looks for a job again."""
BEAT_SECONDS = 1.0
DRAIN_SECONDS = 6.0
"""How long a job may go on after its worker was asked to end."""
MEMORY = 4 * 2**30
"""Bytes of address space that a task has, beside what its checkpoints need."""
FRAMEWORKS = 64 * 2**30
"""What a task that may import frameworks has: they reserve far more than they use."""
WALL_SECONDS = 900
BYTES_A_SECOND = 5 * 2**20
"""How slow reading may be before a task is taken to hang."""


class Worker:
    """What one worker needs.

    Args:
        database: The service's.
        catalogue: The way from ids to paths.
        jobs: Where work is leased.
    """

    def __init__(self, database: Database, catalogue: Catalogue, jobs: Jobs) -> None:
        self._database, self._catalogue, self._jobs = database, catalogue, jobs
        self._holder = holder_name()
        self._zygote = Zygote(database.temporary)
        self._stopped_at: float | None = None
        self._stopping = ""
        self._lines: list[str] = []

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Asks the worker to end: after its job, or without it once that takes too long."""
        self._stopped_at = self._stopped_at or time.monotonic()

    def work(self) -> None:
        """Does jobs until it is asked to end."""
        problem = ""
        while self._stopped_at is None:
            try:
                self._zygote.start()
                lease = self._jobs.lease(self._holder)
                problem = ""
                if lease is not None:
                    self._do(lease)
                    continue
            except (
                StatekitError,
                OSError,
            ) as error:  # the database can't be written just now, or no process begun
                before, problem = problem, error.line if isinstance(error, StatekitError) else str(error)
                if problem != before:  # it is met again and again
                    print(problem, file=sys.stderr)
            time.sleep(IDLE_SECONDS)
        self.close()

    def close(self) -> None:
        """Ends what tasks are forked from."""
        self._zygote.close()

    def _do(self, lease: Lease) -> None:
        self._stopping, self._lines = "", []
        try:
            request = self._request(lease)
        except (StatekitError, OSError) as error:
            self._finish(lease, "failed", problem=problem_of(error))
            return
        try:
            child = self._zygote.fork()
        except Died as end:
            self._finish(lease, "crashed", problem=crash(f"it {end}"))
            return
        try:
            self._follow(lease, child, request)
        except Lost:
            pass  # whoever has the job now ends it; what this one has written there is whole or not there
        except Died as end:
            if self._stopping:  # it has ended as it was asked to, and had no time to say so
                self._give_up(lease, self._stopping)
            elif self._jobs.job(lease.job.id).cancelling:
                self._finish(lease, "cancelled")
            else:
                self._finish(lease, "crashed", problem=crash(f"it {end}"))
        finally:
            child.close()

    def _follow(self, lease: Lease, child: Child, request: Mapping[str, Any]) -> None:
        """Passes on what a task says, until it has ended or is ended."""
        child.ask(request)
        until = time.monotonic() + request["seconds"]
        fraction: float | None = None
        text, stopping, cancelling = "", "", False
        while True:
            for answer in child.answers(BEAT_SECONDS):
                if answer.kind in ("result", "problem"):
                    self._end(lease, answer, stopping)
                    return
                if answer.kind == "log":
                    if len(self._lines) < MOST_LOGS:
                        self._lines.append(answer.data["line"][:LINE_LENGTH])
                else:
                    fraction, text = answer.data["fraction"], answer.data["text"]
            try:
                cancelling = self._jobs.heartbeat(lease, fraction, text, self._lines)
                self._lines = []
            except StatekitError as error:  # it may be written again before the lease is over
                print(error.line, file=sys.stderr)
            now = time.monotonic()
            if stopping:
                child.kill()
                self._give_up(lease, stopping)
                return
            if cancelling:
                stopping = "cancelled"
            elif self._stopped_at is not None and now - self._stopped_at > DRAIN_SECONDS:
                stopping = "drained"
            elif now > until:
                stopping = "late"
            if stopping:
                self._stopping = stopping
                child.stop()

    def _end(self, lease: Lease, answer: Answer, stopping: str) -> None:
        if answer.kind == "result":
            self._finish(lease, "done", result=answer.data)
        elif stopping:  # it says that it was interrupted
            self._give_up(lease, stopping)
        else:
            self._finish(lease, "failed", problem=answer.data)

    def _finish(self, lease: Lease, state: State, **fields: Any) -> None:
        """Ends a job; where that can't be written down just now, tries as long as the lease lasts."""
        until = time.monotonic() + LEASE_SECONDS
        while True:
            try:
                self._jobs.finish(lease, state, lines=self._lines, **fields)
                return
            except StatekitError as error:
                print(error.line, file=sys.stderr)
                if time.monotonic() > until:
                    return
                time.sleep(IDLE_SECONDS)

    def _give_up(self, lease: Lease, stopping: str) -> None:
        if stopping == "cancelled":
            self._finish(lease, "cancelled")
        elif stopping == "drained":
            self._jobs.release(lease, self._lines)
        else:
            self._finish(
                lease, "crashed", problem=crash("it took longer than its files explain, and was ended")
            )

    def _subjects(self, job: Job) -> list[Checkpoint]:
        """Returns the checkpoints that a job is about; one that is thinned for the first time must be fit for it."""
        with self._database.reading() as connection:
            subjects = [checkpoint_of(connection, number) for number in job.subjects]
            if job.kind == "thin" and job.attempts == 1:
                check_thinning(connection, job.subjects[0], job.id)
        return subjects

    def _written_beside(self, kind: str, paths: Sequence[Path]) -> list[tuple[str, str]]:
        """Returns the folders in which a job about these checkpoints writes beside them."""
        if kind == "thin":
            return [self._catalogue.folder_of(path) for path in paths]
        return [self._beside(path) for path in paths] if kind == "seal" else []

    def _request(self, lease: Lease) -> dict[str, Any]:
        """Returns what the task is asked."""
        job = lease.job
        options = {name: value for name, value in job.options.items() if name not in ("target", *FILES)}
        subjects = self._subjects(job)
        paths = [self._path(subject, job.kind == "thin" and job.attempts > 1) for subject in subjects]
        files = {
            name: str(self._catalogue.path_of(job.options[name])) for name in FILES if name in job.options
        }
        size = sum(subject.size for subject in subjects)
        request: dict[str, Any] = {
            "kind": job.kind,
            "paths": [str(path) for path in paths],
            "container": subjects[0].container if len(subjects) == 1 else None,
            "options": options,
            "files": files,
            "attempt": job.attempts,
            "bytes": size,
            "seconds": WALL_SECONDS + size / BYTES_A_SECOND,
            "limits": _limits(job.kind, size, options.get("budget", 0), options.get("verify", False)),
        }
        writes = self._written_beside(job.kind, paths)
        if job.kind in ("convert", "thin"):
            place = job.options.get("target")
            target = (
                self._catalogue.target(place["root"], place["path"]) if place else beside_source(paths[0])
            )
            request["target"] = str(target)
            writes.append(self._catalogue.folder_of(target))
        reads = sorted(
            {str(self._catalogue.root_above(path)) for path in (*paths, *map(Path, files.values()))}
        )
        hidden = os.path.realpath(self._database.folder)
        request["reach"] = Reach(tuple(reads), tuple(writes), hidden)._asdict()
        return request

    def _beside(self, path: Path) -> tuple[str, str]:
        """Returns where the manifest of a checkpoint lies: beside it, or in it."""
        root = self._catalogue.root_above(path)
        return (str(root), "") if path == root else self._catalogue.folder_of(path)

    def _path(self, checkpoint: Checkpoint, may_be_gone: bool) -> Path:
        try:
            return self._catalogue.path_of(checkpoint.id)
        except NotFoundError:
            if may_be_gone:
                return self._catalogue.place_of(checkpoint.id)
            raise


def beside_source(path: Path) -> Path:
    """Returns where the weights of a checkpoint are put unless it is said.

    Example:
        >>> beside_source(Path("run/step-4.pt")).name, beside_source(Path("run/checkpoint_4")).name
        ('step-4-weights.pt', 'checkpoint_4-weights')
    """
    return path.with_name(f"{path.stem}-weights{path.suffix}")


def _limits(kind: str, size: int, budget: int, proves: bool) -> dict[str, int]:
    """Returns what a task may take, by what it works on; sizes are in bytes, time is in seconds of work."""
    memory = MEMORY + 3 * size + 2 * budget
    written = (
        2 * size + 2**30 if kind in ("convert", "thin") else size // 4 + 2**28 if kind == "seal" else 2**24
    )
    return {
        "memory": memory + (FRAMEWORKS if kind == "verify" or proves else 0),
        "files": 4096,
        "written": written,
        "cpu": round(WALL_SECONDS + size / BYTES_A_SECOND),
    }


def main() -> int:
    """Works for a server: its number, the data folder and the numbers of the roots are said as JSON."""
    request = json.loads(sys.argv[1])
    end_with(request["parent"])
    database = Database(Path(request["data"]))
    worker = Worker(database, Catalogue(database, request["roots"]), Jobs(database))
    signal.signal(signal.SIGTERM, worker.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the server says what follows
    if os.getppid() != request["parent"]:
        return 1
    worker.work()
    database.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
