"""The interface for programs, what a checkpoint holds: as a job found it, since only jobs open checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from statekit.errors import NotFoundError
from statekit.service.catalogue import MOST_ITEMS
from statekit.service.records import Lineage
from statekit.service.service import Service
from statekit.service.web.api import EVERYWHERE, PREFIX, PROBLEMS, After, Id, Text, data


class Going(BaseModel):
    """Where a run goes on, as a job `inspect` found it.

    Attributes:
        job: The job.
        resumes: For each layout that holds its optimizer: how exactly it goes on there, and what that lacks.
        resume_code: The lines that go on from it, by framework; "" is its own system.
    """

    job: int
    resumes: list[dict[str, Any]]
    resume_code: dict[str, list[str]]


class Parameters(BaseModel):
    """A part of a checkpoint's parameters, as a job `inspect` found them.

    Attributes:
        job: The job; one with `stats` brings norms.
        items: Parameters with their slots: shapes, dtypes, bytes and, where they were measured, statistics.
        next_after: What to ask with for those behind them; None at the end.
        total: How many there are below that module.
    """

    job: int
    items: list[dict[str, Any]]
    next_after: int | None
    total: int


def contents_routes(service: Service) -> APIRouter:
    """Returns the routes of what checkpoints hold, where they resume and where they come from."""
    jobs = service.jobs
    routes = APIRouter(prefix=PREFIX, responses=PROBLEMS, dependencies=EVERYWHERE, tags=["contents"])

    @routes.get("/lineage/{number}", response_model=Lineage)
    def read_lineage(number: Id) -> Response:
        """What a checkpoint was made of, and what was made of it."""
        return data(service.lineage(number).to_json())

    @lru_cache(maxsize=8)  # what a job that is done found stays as it is, and is large
    def result_of(job: int) -> Mapping[str, Any]:
        result: Mapping[str, Any] = jobs.result(job)
        return result

    def looked(number: int) -> tuple[int, Mapping[str, Any]]:
        """Returns the latest job that has looked into a checkpoint, and what it found."""
        service.catalogue.checkpoint(number)
        chosen = service.last_look(number)
        if chosen is None:
            raise NotFoundError(
                "Nobody has looked into the checkpoint yet.",
                place=f"checkpoint {number}",
                remedy="ask for a job of the kind inspect",
            )
        return chosen.id, result_of(chosen.id)

    @routes.get("/checkpoints/{number}/resumes-in", response_model=Going)
    def read_destinations(number: Id) -> Response:
        """Where the run goes on from a checkpoint, how exactly, and by which lines."""
        job, result = looked(number)
        going = Going(job=job, resumes=result.get("resumes", []), resume_code=result.get("resume_code", {}))
        return data(vars(going))

    @routes.get("/checkpoints/{number}/parameters", response_model=Parameters)
    def list_parameters(
        number: Id,
        under: Annotated[Text, Query(description="A module: the beginning of a parameter's path.")] = "",
        after: After = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ITEMS)] = 100,
    ) -> Response:
        """The parameters of a checkpoint with their slots, all or those below a module."""
        job, result = looked(number)
        inside = [parameter for parameter in result["parameters"] if _is_under(parameter["path"], under)]
        further = after + limit if after + limit < len(inside) else None
        shown = inside[after : after + limit]
        return data(vars(Parameters(job=job, items=shown, next_after=further, total=len(inside))))

    return routes


def _is_under(path: str, module: str) -> bool:
    """Tells whether a parameter is a module's; parts are parted by slashes, or by points as PyTorch has them.

    Example:
        >>> [_is_under(path, "encoder/a") for path in ("encoder/a/w", "encoder/ab/w", "encoder/a")]
        [True, False, True]
    """
    return not module or path == module or path.startswith((f"{module}/", f"{module}."))
