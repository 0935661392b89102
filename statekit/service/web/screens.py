"""What all screens need: the service's records, and what jobs have found of checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.datastructures import FormData
from starlette.responses import RedirectResponse, Response

from statekit.errors import NotFoundError
from statekit.pages.environment import script, stylesheet
from statekit.pages.listing import listing
from statekit.service.records import Checkpoint, Job, Query
from statekit.service.service import Service
from statekit.service.web.addresses import record_number
from statekit.service.web.branches import tree_of
from statekit.service.web.forms import options

MOST_RECENT = 50
"""Jobs about a checkpoint that its page looks at."""
MOST_STEPS = 50
"""Steps of a run that a parameter is followed over."""
_HERE = Path(__file__).parent
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}


class ScreenContents:
    """What looking into a checkpoint came to: its parameters as a tree, and where it resumes.

    Args:
        result: What the job `inspect` came to.
    """

    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = result
        self.tree = tree_of(result["parameters"])
        self.axes = listing(result["parameters"]).axes
        self.measured = any("stats" in parameter for parameter in result["parameters"])


class Screens:
    """What all screens need: the service, the templates, and what is looked up for several of them."""

    def __init__(self, service: Service) -> None:
        self.service, self.catalogue, self.jobs = service, service.catalogue, service.jobs
        self.static = {
            path.name: (path.read_bytes(), _TYPES[path.suffix])
            for path in sorted((_HERE / "static").iterdir())
        }
        self.static["statekit.css"] = (stylesheet().encode(), _TYPES[".css"])
        self.static["statekit.js"] = (script().encode(), _TYPES[".js"])
        # A job that has ended stays as it is, and the tree of a large checkpoint takes a while.
        self._read = lru_cache(maxsize=4)(lambda job: ScreenContents(self.jobs.result(job)))

    def chosen(self, text: str) -> Checkpoint | None:
        """Returns the checkpoint that a text names: `12`, `12: run/step.pt`, or words that fit one alone; else None.

        Raises:
            NotFoundError: There is no checkpoint of that number.
        """
        number = record_number(text.partition(":")[0])
        if number is not None:
            return self.catalogue.checkpoint(number)
        fitting = self.catalogue.checkpoints(Query(text=text, readable=True), None, 2).items if text else ()
        return fitting[0] if len(fitting) == 1 else None

    def latest(self, number: int) -> dict[str, Job]:
        """Returns the youngest job of each kind about a checkpoint; doctor's with its earlier step, if there is one."""
        recent = self.jobs.jobs(subject=number, limit=MOST_RECENT).items
        begins = [
            job for job in recent if job.kind == "doctor" and job.subjects[0] == number != job.subjects[-1]
        ]
        others = [job for job in recent if job not in begins]
        return {job.kind: job for job in reversed([*others, *begins])}

    def examined(self, job: Job | None, number: int) -> dict[str, Any] | None:
        """Returns what doctor found in a checkpoint, of all that a job has read."""
        result = self.result_of(job)
        if job is None or result is None:
            return None
        checkpoints = result["by_subject"][job.subjects.index(number)]["checkpoints"]
        places = [result["checkpoints"][i] for i in checkpoints]
        return {
            name: [remark for place in places for remark in place[name]] for name in ("findings", "notes")
        }

    def result_of(self, job: Job | None) -> Mapping[str, Any] | None:
        """Returns what came of a job, if anything did that pages can show: not what lacks what they ask by now."""
        if job is None or not job.has_result:
            return None
        result: Mapping[str, Any] = self.jobs.result(job.id)
        is_whole = job.kind != "parameter" or len(job.subjects) == 1 or "changes" in result
        return result if is_whole else None

    def contents_of(self, number: int) -> ScreenContents | None:
        """Returns what the last look into a checkpoint came to."""
        chosen = self.service.last_look(number)
        return None if chosen is None else self._read(chosen.id)

    def submit(self, form: FormData, subjects: tuple[int, ...], user: str) -> Job:
        """Asks for the job that a form describes, in a user's name."""
        kind = form.get("kind")
        named = kind if isinstance(kind, str) else ""
        return self.jobs.submit(named, subjects, options(form), requested_by=user)

    def about(self, number: int) -> dict[str, Any]:
        """Returns what every part of a checkpoint's page knows."""
        checkpoint = self.catalogue.checkpoint(number)
        address = f"/checkpoints/{number}"
        return {"checkpoint": checkpoint, "is_present": checkpoint.status == "present", "here_url": address}

    def steps(self, run: int | None) -> tuple[int, ...]:
        """Returns the numbers of the resumable steps of a run, the youngest `MOST_STEPS`, in order."""
        if run is None:
            return ()
        page = self.catalogue.checkpoints(Query(run=run, readable=True, sort="-step"), None, MOST_STEPS)
        return tuple(item.id for item in reversed(page.items) if item.resumable)

    def about_parameter(self, subjects: tuple[int, ...], path: str, **more: Any) -> Job | None:
        """Returns the job that has looked at a parameter, or the last that was asked to."""
        if not subjects:
            return None
        options = {"path": path, **more}
        result = self.jobs.earlier("parameter", subjects, options)
        if result is not None:
            return result
        recent = self.jobs.jobs(subject=subjects[0], kind="parameter", limit=MOST_RECENT).items
        return next((job for job in recent if job.subjects == subjects and job.options == options), None)

    def compared(self, subjects: tuple[int, int], tensor: tuple[str, str]) -> Job | None:
        """Returns the youngest job that compares two checkpoints, as a whole or in one tensor."""
        recent = self.jobs.jobs(subject=subjects[0], kind="diff", limit=MOST_RECENT).items
        alike = (job for job in recent if job.subjects == subjects)
        return next((job for job in alike if tensor_of(job) == tensor), None)

    def parameters(self, number: int, index: int) -> list[dict[str, Any]]:
        """Returns the parameters of a checkpoint, one of which has this index."""
        contents = self.contents_of(number)
        parameters: list[dict[str, Any]] = contents.result["parameters"] if contents else []
        if not 0 <= index < len(parameters):
            raise NotFoundError(
                "There is no such parameter.", place=f"checkpoint {number}", found=str(index)[:30]
            )
        return parameters

    def followed(self, checkpoint: Checkpoint, over: str) -> tuple[int, ...]:
        """Returns the checkpoints in which a parameter is shown: this, or with `over=run` the steps of its run."""
        steps = self.steps(checkpoint.run) if over == "run" else ()
        return steps if len(steps) > 1 else (checkpoint.id,)

    def named(self, some: Iterable[Job]) -> dict[int, Checkpoint]:
        """Returns the checkpoints that jobs are about, by their numbers."""
        numbers = {number for job in some for number in job.subjects}
        return {number: self.catalogue.checkpoint(number) for number in numbers}


def tensor_of(job: Job) -> tuple[str, str]:
    """Returns the parameter and the slot that a comparison is of; empty of one of whole checkpoints."""
    return str(job.options.get("path", "")), str(job.options.get("slot", ""))


def as_data(address: str, place: str, query: str) -> Response:
    """Returns the way to the same as data."""
    if address.partition("/")[0] not in {"checkpoints", "jobs", "lineage", "runs"}:
        raise NotFoundError("There is nothing at this address.", place=place[:500])
    return RedirectResponse(f"/api/v1/{address}{f'?{query}' if query else ''}", HTTPStatus.TEMPORARY_REDIRECT)


def result_as_data(job: Job | None, place: str, kind: str) -> Response:
    """Returns the way to what a job found; `place` and `kind` say what to ask for where there is no job."""
    if job is None or not job.has_result:
        raise NotFoundError(
            "Nobody has looked at it yet.", place=place, remedy=f"ask for a job of the kind {kind}"
        )
    return as_data(f"jobs/{job.id}/result", place, "")
