"""Carries a plan out on an engine, and shows how far the work is."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from statekit.cli import output
from statekit.cli.output import Screen, Table
from statekit.conversion.convert import Report
from statekit.conversion.plan import Plan
from statekit.engines.ray import Ray
from statekit.engines.slurm import Slurm
from statekit.errors import UsageError, plural, size
from statekit.files.tree import Place
from statekit.scale.engine import Engine, Processes, convert_on
from statekit.scale.progress import Running, Status
from statekit.scale.work import TASK_BYTES, Work, split

SLURM = "slurm"
_MOST_SHOWN = 8


def engine_of(text: str) -> Engine:
    """Returns the engine that `--on` names; SLURM is none, as it goes on without this process.

    Raises:
        UsageError: No engine has that name.
    """
    name, _, rest = text.partition(":")
    if name == "processes" and rest.isdecimal() and 0 < int(rest) <= 256:
        return Processes(int(rest))
    if text == "ray":
        return Ray()
    if name == "ray" and rest.startswith("//") and rest[2:]:
        return Ray(rest[2:])
    raise UsageError(
        "No engine has that name.",
        place="--on",
        expected="processes:N with N from 1 to 256, ray (on this machine), ray://HOST:PORT, or slurm",
        found=text,
    )


def place_of_work(target: Place, place: Place | None) -> Place:
    """Returns a work's folder: as named, else beside the target."""
    return target.with_name(f"{target.name}.work") if place is None else place


def carried_out_on(
    planned: Plan, on: str, place: Place | None, task_bytes: int | None, quiet: bool
) -> Report | None:
    """Splits a plan, has its tasks done, and finishes it; returns None where it was submitted and goes on by itself.

    Args:
        planned: The plan.
        on: The engine.
        place: The work's folder; beside the target if None.
        task_bytes: Bytes of a task at most.
        quiet: Whether to show nothing.

    Raises:
        CommitError: Tasks failed; what is done stays done.
    """
    engine = None if on == SLURM else engine_of(on)
    folder = place_of_work(planned.request.target, place)
    if engine is None:
        with split(planned, folder, TASK_BYTES if task_bytes is None else task_bytes) as work:
            submit(work, quiet)
        return None
    with showing(quiet) as tell:
        return convert_on(planned, engine, folder, task_bytes, tell)


def submit(work: Work, quiet: bool = False) -> None:
    """Submits the missing tasks of a work to SLURM, and says so."""
    missing = work.missing()
    jobs = Slurm(work.place, missing)
    array, finish = jobs.submit()
    if quiet:
        return
    stdout = output.screen()
    if array:
        stdout.say(f"Submitted {plural(len(missing), 'task')} as job {array}.")
    stdout.say(f"Job {finish} finishes the work when they have ended.")
    stdout.say(
        f"statekit work status {work.place} says how far it is; the same command submits what is missing then."
    )


@contextmanager
def showing(quiet: bool) -> Iterator[Callable[[Status], None]]:
    """Shows on stderr how far a work is: one bar over all bytes. Gives what is told a status."""
    with output.progress(needed=not quiet) as bar:
        task = bar.add_task("planning", total=None)

        def tell(status: Status) -> None:
            bar.update(task, description=in_few_words(status), completed=status.moved, total=status.bytes)

        yield tell


def in_few_words(status: Status) -> str:
    """Returns how far a work is, in one line."""
    words = [f"{len(status.done)} of {plural(status.tasks, 'task')} done"]
    words += [f"{len(status.running)} running"] if status.running else []
    words += [f"{len(status.failed)} failed"] if status.failed else []
    words += [f"{status.attempts} attempts lost"] if status.attempts else []
    if len(status.running) > 1:
        slowest = status.running[0]
        words.append(f"slowest {_named(slowest)}, {slowest.seconds:.0f} s")
    return ", ".join(words)


def _named(attempt: Running) -> str:
    return f"{attempt.host}/{attempt.pid}"


def show_status(stdout: Screen, work: Work, status: Status) -> None:
    """Prints how far a work is."""
    stdout.say(f"{work.place} -> {work.target}", bold=True)
    share = f" ({100 * status.moved // status.bytes} %)" if status.bytes else ""
    stdout.say(f"{in_few_words(status)}; {size(status.moved)} of {size(status.bytes)}{share}.")
    table = Table(("task", "worker", "phase", "done", "for"), right=("task", "done", "for"))
    for attempt in (*status.running, *status.silent)[:_MOST_SHOWN]:
        silent = f"silent for {attempt.silent:.0f} s" if attempt in status.silent else attempt.phase
        table.add_row(
            f"{attempt.task}", _named(attempt), silent, size(attempt.done), f"{attempt.seconds:.0f} s"
        )
    if table.rows:
        stdout.say()
        stdout.show(table)
    stdout.show_list("Failed:", [f"task {task}: {error}" for task, error in status.failed.items()])
    if status.finished:
        stdout.say("The target is there.")
    elif not status.missing:
        stdout.say(f"All tasks are done: statekit work finish {work.place}")


def show_split(stdout: Screen, work: Work) -> None:
    """Prints a work, and how to go on with it."""
    stdout.say(f"{work.place}", bold=True)
    stdout.say(f"{plural(len(work.tasks), 'task')}, {size(sum(task.bytes for task in work.tasks))}.")
    stdout.title("On any number of machines that see this folder:")
    stdout.say(f"statekit work run {work.place} --shard I/N", indent=2, fold=False)
    stdout.title("On SLURM:")
    try:
        line = shlex.join(Slurm(work.place, work.missing()).array())
    except UsageError as error:  # for whoever uses another scheduler, or shares
        line = f"{error.subject} {error.remedy}"
    stdout.say(line, indent=2, fold=False)
    stdout.title("When all tasks are done:")
    stdout.say(f"statekit work finish {work.place}", indent=2, fold=False)
