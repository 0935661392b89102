"""The interface for programs, what is done: jobs, their events as a stream, and what they found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from pydantic import ConfigDict, Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from statekit.service.options import MODELS, MOST_SUBJECTS
from statekit.service.records import ENDED, KINDS, Job, Kind, Page, State
from statekit.service.service import Service
from statekit.service.web.api import EVERYWHERE, PREFIX, PROBLEMS, Body, Cursor, Id, Limit, Number, data
from statekit.service.web.problems import Problem
from statekit.service.web.proxies import user_of

MOST_STREAMS = 200
"""Streams of events at a time."""
POLL_SECONDS = 0.5
PING_SECONDS = 15
SEND_SECONDS = 30
"""How long a client may take for a piece of a stream."""


_TEXT = {"type": "string"}
_EVENT = {"type": "object", "properties": {"id": _TEXT, "event": _TEXT, "data": _TEXT}}
"""An event of a stream, for the description of the interface; `data` is a record `Event` as JSON."""


def _by_kind(schema: dict[str, Any]) -> None:
    """Has the description say for each kind of job which options it takes."""
    numbers = schema["properties"]["subjects"]
    forms = []
    for kind, (least, most) in KINDS.items():
        subjects = {**numbers, "minItems": least, "maxItems": most or MOST_SUBJECTS, "uniqueItems": True}
        request = {"kind": {"const": kind}, "subjects": subjects, "options": MODELS[kind].model_json_schema()}
        needed = ["kind", "subjects", *(["options"] if "required" in request["options"] else [])]
        forms.append(
            {
                "title": kind,
                "type": "object",
                "properties": request,
                "required": needed,
                "additionalProperties": False,
            }
        )
    described = {"title": schema["title"], "description": schema["description"], "oneOf": forms}
    schema.clear()
    schema.update(described)


class JobBody(Body):
    """Work to ask for."""

    model_config = ConfigDict(json_schema_extra=_by_kind)

    kind: Kind
    subjects: Annotated[list[Number], Field(min_length=1, max_length=MOST_SUBJECTS)]
    options: Annotated[dict[str, Any], Field(default_factory=dict)]


def job_routes(service: Service) -> APIRouter:
    """Returns the routes of what is done."""
    jobs, streams = service.jobs, set[object]()
    routes = APIRouter(prefix=PREFIX, responses=PROBLEMS, dependencies=EVERYWHERE, tags=["jobs"])

    @routes.post("/jobs", status_code=HTTPStatus.CREATED)
    def ask_for_job(
        request: Request,
        body: JobBody,
        response: Response,
        idempotency_key: Annotated[
            str | None,
            Header(
                min_length=1,
                max_length=200,
                pattern=r"^[!-~]+$",
                description="Names this request: sent again with it, it is the same job.",
            ),
        ] = None,
    ) -> Job:
        """Asks for work about checkpoints; an option that there isn't is refused with those there are."""
        job = jobs.submit(
            body.kind,
            body.subjects,
            body.options,
            idempotency_key=idempotency_key,
            requested_by=user_of(request, "api"),
        )
        response.headers["Location"] = f"{PREFIX}/jobs/{job.id}"
        return job

    @routes.get("/jobs")
    def list_jobs(
        state: State | Literal["open"] | None = None,
        kind: Kind | None = None,
        subject: Number | None = None,
        cursor: Cursor = None,
        limit: Limit = 50,
    ) -> Page[Job]:
        """The jobs, the latest first; `open` are those that haven't ended."""
        return jobs.jobs(state=state, kind=kind, subject=subject, cursor=cursor, limit=limit)

    @routes.get("/jobs/{number}")
    def read_job(number: Id) -> Job:
        """One job."""
        return jobs.job(number)

    @routes.post("/jobs/{number}/cancel")
    def cancel_job(number: Id) -> Job:
        """Ends a job that waits, and asks for the end of one that runs."""
        return jobs.cancel(number)

    @routes.get("/jobs/{number}/result", response_model=Any)
    def read_result(number: Id) -> Response:
        """What came of a job that is done: the verb's own JSON."""
        return data(jobs.result(number))

    @routes.get(
        "/jobs/{number}/events",
        response_class=EventSourceResponse,
        responses={
            200: {
                "description": "Events with their numbers as ids, until the job has ended.",
                "content": {"text/event-stream": {"schema": _EVENT}},
            },
            204: {"description": "The job has ended, and there are no events after that one."},
            429: {**PROBLEMS[422], "description": "Too many streams at a time."},
        },
    )
    async def follow_job(
        number: Id,
        last_event_id: Annotated[
            int | None, Header(ge=0, le=2**53, description="The id of the last event that arrived.")
        ] = None,
    ) -> Response:
        """What befalls a job, as it happens; goes on after `Last-Event-ID`."""
        after = last_event_id or 0
        job = await run_in_threadpool(jobs.job, number)
        if job.state in ENDED and not await run_in_threadpool(jobs.events, number, after, 1):
            return Response(status_code=HTTPStatus.NO_CONTENT)  # who asks again by itself stops at this
        if len(streams) >= MOST_STREAMS:
            return Problem(
                HTTPStatus.TOO_MANY_REQUESTS,
                "Too many follow jobs now.",
                expected=f"at most {MOST_STREAMS}",
                remedy="ask for the job instead, from time to time",
            ).response()
        return EventSourceResponse(_stream(number, after), ping=PING_SECONDS, send_timeout=SEND_SECONDS)

    async def _stream(number: int, after: int) -> AsyncIterator[ServerSentEvent]:
        stream = object()
        streams.add(stream)
        try:
            while True:
                ended = (await run_in_threadpool(jobs.job, number)).state in ENDED
                events = await run_in_threadpool(jobs.events, number, after)
                for event in events:
                    after = event.number
                    yield ServerSentEvent(json.dumps(event.to_json()), event=event.kind, id=str(event.number))
                if (ended and not events) or service.draining.is_set():
                    return
                if not events:
                    await asyncio.sleep(POLL_SECONDS)
        finally:
            streams.discard(stream)

    return routes
