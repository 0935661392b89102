"""Doctor by itself: each new step once, with the step before it, within a day's budget."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from serving import TORCH, Served, write_step
from sqlalchemy import update

from statekit.service.examining import BY_ITSELF, examine_next
from statekit.service.records import Query
from statekit.service.tables import CHECKPOINTS

GIB = 2**30


def is_done(lab: Served, job: int) -> bool:
    return lab.service.jobs.job(job).state == "done"


def until(condition: Callable[[], bool]) -> None:
    """Waits for a job that a worker does meanwhile."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("the job has not ended")


@pytest.fixture
def lab(tmp_path: Path) -> Served:
    served = Served(tmp_path)
    for file in served.root.rglob("*"):
        os.utime(file, (1e9, 1e9))  # nobody writes to them any more
    served.service.catalogue.scan()
    return served


def test_each_step_is_examined_once_and_one_at_a_time(lab: Served) -> None:
    good = {one.id for one in lab.service.catalogue.checkpoints(Query(readable=True)).items if one.resumable}
    asked: set[int] = set()
    while (job := examine_next(lab.service, GIB)) is not None:
        assert (job.kind, job.requested_by) == ("doctor", BY_ITSELF)
        assert examine_next(lab.service, GIB) is None  # while one is open
        asked |= set(job.subjects)
        with lab.working():
            until(partial(is_done, lab, job.id))
    assert asked == good and len(good) > 1
    assert all(lab.service.catalogue.checkpoint(number).verdict for number in good)


def test_a_step_that_somebody_still_writes_waits(tmp_path: Path) -> None:
    served = Served(tmp_path)
    for file in served.root.rglob("*"):
        os.utime(file)
    served.service.catalogue.scan()
    assert examine_next(served.service, GIB) is None


def test_nothing_is_read_beyond_the_budget(lab: Served) -> None:
    smallest = min(
        one.size for one in lab.service.catalogue.checkpoints(Query(readable=True)).items if one.resumable
    )
    assert examine_next(lab.service, 0) is None
    assert examine_next(lab.service, smallest - 1) is None
    job = examine_next(lab.service, smallest)
    assert job is not None
    lab.service.jobs.cancel(job.id)
    assert examine_next(lab.service, smallest) is None  # today's is used up


def test_every_step_is_examined_with_the_one_before_it_and_with_no_other(tmp_path: Path) -> None:
    """Pairs met every second step alone, and checkpoints of no run were held against each other."""
    served = Served(tmp_path)
    for step in (9, 10, 11):
        write_step(TORCH, step, served.root / "later" / f"step-{step}.pt", "torch", "torch-optim")
    for name in ("lone", "other"):
        write_step(TORCH, 12, served.root / name / "step-12.pt", "torch", "torch-optim")
    for file in served.root.rglob("*"):
        os.utime(file, (1e9, 1e9))
    catalogue = served.service.catalogue
    catalogue.scan()
    pairs = []
    while (job := examine_next(served.service, GIB)) is not None:
        served.service.jobs.cancel(job.id)
        with served.database.writing() as connection:  # as a worker does when it ends
            examined = update(CHECKPOINTS).where(CHECKPOINTS.c.id.in_(job.subjects))
            connection.execute(examined.values(verdict="clean"))
        pairs.append([catalogue.checkpoint(number) for number in job.subjects])
    steps = {tuple(one.step for one in pair) for pair in pairs if pair[-1].path.startswith("later/")}
    assert {(9, 10), (10, 11)} <= steps
    assert all(pair[0].run == pair[-1].run is not None for pair in pairs if len(pair) == 2)
    assert len({pair[-1].id for pair in pairs}) == len(pairs)
