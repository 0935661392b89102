"""The parts of a running service, as whoever answers requests needs them."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from statekit.errors import StatekitError
from statekit.service.catalogue import Catalogue
from statekit.service.database import Database
from statekit.service.jobs import Jobs
from statekit.service.lineage import Spare, lineage_of, spare_by
from statekit.service.records import Job, Lineage
from statekit.service.standing import Rule

FREE_BYTES = 2**18
"""How much room a job needs to be written down, with its events."""
MOST_LOOKS = 50
"""Looks into a checkpoint that are asked for what is in it, the last ones."""


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        database: Where all is written down.
        catalogue: The checkpoints.
        jobs: The work.
        draining: Set once the service was asked to end: nothing new is begun.
    """

    database: Database
    catalogue: Catalogue
    jobs: Jobs
    draining: threading.Event = field(default_factory=threading.Event)

    @property
    def data(self) -> Path:
        """The data folder."""
        return self.database.folder

    def lineage(self, checkpoint: int) -> Lineage:
        """Returns what a checkpoint was made of, and what was made of it.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        return lineage_of(self.database, checkpoint)

    def spare(self, run: int, rule: Rule) -> list[Spare]:
        """Returns the steps of a run that a rule doesn't keep, the oldest first, each with why it can't be thinned."""
        return spare_by(self.database, run, rule)

    def figures(self) -> dict[str, dict[str, int]]:
        """Returns how many jobs and checkpoints there are, and of how many bytes (`web.metrics.FAMILIES`)."""
        return {"jobs": self.jobs.counts(), **self.catalogue.figures()}

    def last_look(self, checkpoint: int) -> Job | None:
        """Returns the job that has looked into a whole checkpoint last, one with statistics before one without."""
        looks = self.jobs.jobs(subject=checkpoint, kind="inspect", state="done", limit=MOST_LOOKS).items
        whole = [job for job in looks if not job.options.get("filter")]
        return next((job for job in whole if job.options.get("stats")), next(iter(whole), None))

    def ready(self) -> str | None:
        """Returns why the service can't work now; None if it can."""
        if self.draining.is_set():
            return "it is ending"
        try:
            self.database.check()
            disk = os.statvfs(self.data)
        except StatekitError as error:
            return error.line
        except OSError as error:
            return f"the data folder can't be looked at: {error.strerror}"
        if disk.f_flag & os.ST_RDONLY or disk.f_bavail * disk.f_frsize < FREE_BYTES:
            return "the data folder's disk is full, or can't be written to"
        return None
