"""`statekit work`: one conversion, carried out by many processes on any machines that see one folder or store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click

from statekit.cli import output
from statekit.cli.arguments import read_size, source_place
from statekit.cli.convert_command import Asked, asks_for_a_plan
from statekit.cli.main import DONE, WANTING
from statekit.cli.work.view import place_of_work, show_split, show_status, showing
from statekit.conversion.convert import outcome
from statekit.errors import StatekitError, UsageError, plural, size
from statekit.files.tree import Place
from statekit.pipeline import job
from statekit.scale.engine import shard
from statekit.scale.work import TASK_BYTES, Work, split

_WATCHED = 2.0
"""Seconds between two looks of `status --watch`."""


@click.group("work")
def command() -> None:
    """Carries out one conversion by many processes.

    `split` makes a folder that all processes see, on a disk or in a store. `run` runs tasks, on any machine and in any
    number of processes. `finish` joins the parts, proves them, and gives the target its name. A killed process loses
    only its task: repeat the command. `statekit convert --on` does all three.
    """


def _json_option(function: Any) -> Any:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


_WORK = click.argument("work", type=click.Path(), callback=source_place)


@command.command("split")
@asks_for_a_plan
@click.option(
    "--task-bytes",
    metavar="SIZE",
    callback=read_size,
    default="2GiB",
    show_default=True,
    help="The most bytes of values in a task, and in a file of TARGET.",
)
@click.option(
    "--work",
    metavar="FOLDER",
    type=click.Path(),
    callback=source_place,
    help="The folder of the work, on TARGET's disk or in its bucket. Default: TARGET.work.",
)
@_json_option
def split_command(asked: Asked, task_bytes: int, work: Place | None, as_json: bool) -> int:
    """Splits a conversion into tasks. It takes the options of convert and reads no values."""
    with split(asked.plan(), place_of_work(asked.target, work), task_bytes or TASK_BYTES) as work_plan:
        if as_json:
            tasks = [{**vars(task), "names": len(task.names)} for task in work_plan.tasks]
            output.print_json(
                "work", {"work": str(work_plan.place), "target": str(work_plan.target), "tasks": tasks}
            )
        else:
            show_split(output.screen(), work_plan)
    return DONE


@command.command("run")
@_WORK
@click.option(
    "--shard",
    "share",
    metavar="I/N",
    help="Run every N-th task: I/N. auto: the share that the scheduler's variables name.",
)
@click.option(
    "--tasks",
    metavar="LIST",
    help="Run these tasks: 3,17-40. -: the tasks that standard input lists, one per line.",
)
@click.option("--here", is_flag=True, help="Run all missing tasks.")
@click.option(
    "--threads", type=click.IntRange(1, 256), metavar="N", help="The number of threads for each task."
)
@click.option("--quiet", is_flag=True, help="Print nothing.")
def run_command(
    work: Place, share: str | None, tasks: str | None, here: bool, threads: int | None, quiet: bool
) -> int:
    """Runs tasks that are not done yet.

    Without --tasks and --here it runs the share that the scheduler's variables name: those of SLURM, torchrun, Open
    MPI, or an indexed Job of Kubernetes.
    """
    if sum((share is not None, tasks is not None, here)) > 1:
        raise click.UsageError("--shard, --tasks and --here exclude each other.")
    with Work(work) as opened, job(threads):
        if tasks == "-":
            return _serve(opened)
        count = len(opened.document["tasks"])
        numbers: Iterable[int] = range(count)
        if tasks is not None:
            numbers = _numbers(tasks, opened)
        elif not here:
            index, shares = shard(share or "auto")
            numbers = range(index, count, shares)
        failed = {number: error for number in numbers if (error := _error_of(opened, number)) is not None}
        if failed:
            raise _failed(opened, failed)
        if not quiet:
            missing = len(opened.missing())
            output.screen().say(
                f"{plural(missing, 'task')} of {count} left." if missing else _all_done(opened)
            )
    return DONE


def _all_done(work: Work) -> str:
    return f"All tasks are done: statekit work finish {work.place}"


def _error_of(work: Work, number: int) -> StatekitError | None:
    """Does a task; returns why it failed. Others go on."""
    try:
        work.run(number)
    except StatekitError as error:
        return error
    return None


def _failed(work: Work, errors: dict[int, StatekitError]) -> StatekitError:
    if len(errors) == 1:
        return next(iter(errors.values()))
    first = next(iter(errors.values()))
    return type(first)(
        f"{len(errors)} tasks failed.",
        place=work.place,
        found="; ".join(f"task {number}: {error.line}" for number, error in [*errors.items()][:5]),
        remedy=f"statekit work status {work.place} lists all",
    )


def _serve(work: Work) -> int:
    """Does the tasks that standard input names, and says of each on standard output how it ended."""
    for number in (number for line in sys.stdin for number in _numbers(line.strip(), work)):
        error: StatekitError | None
        try:
            error = _error_of(work, number)
        except MemoryError:
            error = StatekitError("There is not enough memory.")
        # A source or a library that is another stays so; a disk may be mended.
        again = error is None or isinstance(error, OSError) or type(error) is StatekitError
        click.echo(json.dumps({"task": number, "error": error.line if error else "", "again": again}))
        sys.stdout.flush()
    return DONE


def _numbers(text: str, work: Work) -> Iterator[int]:
    """Yields the numbers of `3,17-40`."""
    count = len(work.document["tasks"])
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = [end for end in (first, last if dash else first) if end.isdecimal() and len(end) < 19]
        if len(ends) < 2 or int(ends[1]) >= count:
            raise UsageError(
                "The list of tasks is invalid.",
                place="--tasks",
                expected=f"such as 3,17-40, of 0 to {count - 1}",
                found=text[:100],
            )
        yield from range(int(ends[0]), int(ends[1]) + 1)


@command.command("status")
@_WORK
@_json_option
@click.option("--watch", is_flag=True, help="Keep the status on the screen until all tasks are done.")
def status_command(work: Place, as_json: bool, watch: bool) -> int:
    """Shows how far a work is: 0 if all tasks are done, 1 if some are missing."""
    opened = Work(work)
    status = opened.status()
    if watch:
        with showing(False) as tell:
            while status.missing:
                tell(status)
                time.sleep(_WATCHED)
                status = opened.status()
    if as_json:
        place = {"work": str(opened.place), "target": str(opened.target)}
        output.print_json("work-status", {**place, **status.to_json()})
    else:
        show_status(output.screen(), opened, status)
    return WANTING if status.missing else DONE


@command.command("finish")
@_WORK
@click.option("--again", is_flag=True, help="Read all values of the target again, although the tasks did.")
@_json_option
def finish_command(work: Place, again: bool, as_json: bool) -> int:
    """Joins what the tasks wrote, proves it, and gives it the target's name; a second time, does nothing."""
    with Work(work) as opened:
        report = opened.finish(again)
    if as_json:
        output.print_json("convert", outcome(report.plan, report))
    else:
        stdout = output.screen()
        stdout.say(f"Wrote {report.target}: {size(report.bytes)} in {plural(len(report.files), 'file')}.")
        stdout.say(f"statekit work drop {work} removes the work.")
    return DONE


@command.command("drop")
@_WORK
def drop_command(work: Place) -> int:
    """Removes a work's folder with all that tasks wrote there; a finished target stays."""
    Work(work).drop()
    output.screen().say(f"Removed {work}.")
    return DONE
