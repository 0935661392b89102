"""Doctor by itself: each new step once, with the step before it, within a day's budget."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from serving import Served

from statekit.service.examining import BY_ITSELF, examine_next
from statekit.service.records import Query

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
