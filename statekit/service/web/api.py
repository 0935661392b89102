"""The interface for programs: `/api/v1`, typed by the service's records, paged, with problems for answers that fail."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Depends, Path, Query, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.security import HTTPBearer
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from statekit.errors import Faults, UsageError, meant
from statekit.service.catalogue import MOST_ITEMS, NOTE_LENGTH, TAG_LENGTH, Catalogue
from statekit.service.records import SORTS, Checkpoint, Page, Root, Run, Scanning
from statekit.service.records import Query as Wanted
from statekit.service.web.problems import MEDIA_TYPE
from statekit.service.web.proxies import user_of

PREFIX = "/api/v1"
MOST_NUMBER = 2**63 - 1
MOST_PLACE = 2**31
"""How far a place in a list may be from its beginning."""
MOST_CURSOR = 1024
MOST_TEXT = 500
MOST_NAMES = 20
"""Names that a body may have before it is looked at; none needs as many."""


def data(value: Any) -> Response:
    """Returns what checkpoints say as JSON in ASCII: their names may have halves of characters, which UTF-8 hasn't."""
    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), media_type="application/json")


class ProblemModel(BaseModel):
    """What is wrong, as RFC 9457 has it, with the parts of statekit's errors."""

    type: str
    title: str
    status: int
    detail: str
    place: str | None
    expected: str | None
    found: str | None
    remedy: str | None


_SAID = {
    HTTPStatus.BAD_REQUEST: "The request isn't one, or calls the service by another name.",
    HTTPStatus.UNAUTHORIZED: "No token, or a wrong one.",
    HTTPStatus.FORBIDDEN: "The request comes from another site.",
    HTTPStatus.NOT_FOUND: "There is no such thing, or no more.",
    HTTPStatus.CONFLICT: "It is there already.",
    HTTPStatus.REQUEST_TIMEOUT: "The body didn't come.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body is too large.",
    HTTPStatus.REQUEST_URI_TOO_LONG: "The address is too long.",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The headers are too large.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request makes no sense here.",
    HTTPStatus.INSUFFICIENT_STORAGE: "The service's disk is full.",
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    int(status): {
        "description": sentence,
        "content": {MEDIA_TYPE: {"schema": ProblemModel.model_json_schema()}},
    }
    for status, sentence in _SAID.items()
}
"""How a request may fail, for the description of the interface."""


def plain_text(text: str) -> str:
    """Returns text that can be searched for and written down."""
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("has NUL characters or halves of characters")
    return text


_SORT = f"^-?({'|'.join(SORTS)})$"


async def _said_once(request: Request) -> None:
    """Refuses parameters that there aren't, and those said twice: a misspelt filter would choose everything."""
    parameters = _parameters(request.scope["route"].dependant)
    faults = Faults()
    for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in parameters:
            faults.add(" ".join(["is no parameter of this", meant(name, parameters)]).strip(), name[:100])
        elif count > 1:
            faults.add("is said more than once", name)
    faults.check(
        UsageError,
        "The parameters can't be taken",
        place="query",
        expected=", ".join(parameters) or "no parameters",
    )


def _parameters(dependant: Dependant) -> list[str]:
    """Returns the names of the query's parameters that a route, or what it depends on, takes."""
    below = [name for dependency in dependant.dependencies for name in _parameters(dependency)]
    return [*(param.alias for param in dependant.query_params), *below]


EVERYWHERE = [
    Security(HTTPBearer(auto_error=False, description="The token of the service's data folder.")),
    Depends(_said_once),
]
"""What holds of every request; the guard has looked at the token before."""
Text: TypeAlias = Annotated[str, Field(max_length=MOST_TEXT), AfterValidator(plain_text)]
Number: TypeAlias = Annotated[int, Field(ge=1, le=MOST_NUMBER)]
Id: TypeAlias = Annotated[int, Path(ge=1, le=MOST_NUMBER, description="The number of the record.")]
After: TypeAlias = Annotated[int, Query(ge=0, le=MOST_PLACE, description="How many to leave out.")]
Place: TypeAlias = Annotated[int, Path(ge=0, le=MOST_PLACE, description="A place in a list, from 0 on.")]
Cursor: TypeAlias = Annotated[
    str | None,
    Query(
        max_length=MOST_CURSOR,
        pattern="^[A-Za-z0-9_=-]*$",
        description="`next_cursor` of the page before; none for the first.",
    ),
]
Limit: TypeAlias = Annotated[int, Query(ge=1, le=MOST_ITEMS, description="Items of a page.")]


class Body(BaseModel):
    """The body of a request: what isn't known is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_names(cls, body: Any) -> Any:
        if isinstance(body, Mapping) and len(body) > MOST_NAMES:  # pydantic makes a fault of each
            raise ValueError(f"has {len(body)} names, and {MOST_NAMES} are the most")
        return body


class TagBody(Body):
    """A tag to give."""

    tag: Annotated[str, Field(min_length=1, max_length=TAG_LENGTH), AfterValidator(plain_text)]


class NoteBody(Body):
    """What to write of a checkpoint."""

    note: Annotated[str, Field(max_length=NOTE_LENGTH), AfterValidator(plain_text)]


async def _wanted(
    text: Annotated[Text, Query(description="Words of the path, the note or a tag.")] = "",
    root: Number | None = None,
    run: Number | None = None,
    container: Text | None = None,
    layout: Text | None = None,
    optimizer: Text | None = None,
    tag: Text | None = None,
    seal: Literal["sealed", "unsealed", "changed", "damaged", "unknown"] | None = None,
    verdict: Literal["clean", "findings", "none"] | None = None,
    status: Literal["present", "changed", "gone", "any"] = "present",
    readable: bool | None = None,
    sort: Annotated[str, Query(pattern=_SORT, description="A column; `-` in front reverses.")] = "-modified",
) -> Wanted:
    return Wanted(text, root, run, container, layout, optimizer, tag, seal, verdict, status, readable, sort)


Which: TypeAlias = Annotated[Wanted, Depends(_wanted)]


def catalogue_routes(catalogue: Catalogue) -> APIRouter:
    """Returns the routes of what there is."""
    routes = APIRouter(prefix=PREFIX, responses=PROBLEMS, dependencies=EVERYWHERE, tags=["catalogue"])

    @routes.get("/roots")
    def list_roots() -> list[Root]:
        """The folders that are scanned."""
        return list(catalogue.roots())

    @routes.post("/scan", status_code=HTTPStatus.ACCEPTED)
    async def begin_scan() -> Scanning:
        """Has all roots looked through for checkpoints, from now on; it is over when `done` has reached `number`."""
        return catalogue.rescan()

    @routes.get("/scan")
    async def read_scan() -> Scanning:
        """How far the scan is that runs, or what the last one came to: what was new, changed or gone."""
        return catalogue.scanning()

    @routes.get("/checkpoints")
    def list_checkpoints(wanted: Which, cursor: Cursor = None, limit: Limit = 50) -> Page[Checkpoint]:
        """The checkpoints that are asked for; those that can't be read say why."""
        return catalogue.checkpoints(wanted, cursor, limit)

    @routes.get("/facets")
    def list_facets(wanted: Which) -> dict[str, dict[str, int]]:
        """The values of each filter, with how many of the checkpoints that are asked for have it."""
        return catalogue.facets(wanted)

    @routes.get("/checkpoints/{number}")
    def read_checkpoint(number: Id) -> Checkpoint:
        """One checkpoint."""
        return catalogue.checkpoint(number)

    @routes.post("/checkpoints/{number}/tags")
    def give_tag(number: Id, body: TagBody) -> Checkpoint:
        """Gives a checkpoint a tag, if it doesn't have it."""
        return catalogue.tag(number, body.tag)

    @routes.delete("/checkpoints/{number}/tags")
    def take_tag(number: Id, tag: Annotated[Text, Query(min_length=1)]) -> Checkpoint:
        """Takes a tag from a checkpoint, if it has it."""
        return catalogue.untag(number, tag)

    @routes.put("/checkpoints/{number}/note")
    def write_note(request: Request, number: Id, body: NoteBody) -> Checkpoint:
        """Writes down what somebody says of a checkpoint, and who, in the place of what was there before."""
        return catalogue.note(number, body.note, user_of(request, ""))

    @routes.get("/runs")
    def list_runs(cursor: Cursor = None, limit: Limit = 50) -> Page[Run]:
        """The runs, folders of steps, the youngest first."""
        return catalogue.runs(cursor, limit)

    @routes.get("/runs/{number}")
    def read_run(number: Id) -> Run:
        """One run; its steps are the checkpoints with `run` set to its number."""
        return catalogue.run(number)

    return routes
