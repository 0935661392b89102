"""Errors as the service answers them: problem+json with the four parts of an error, and a status that says whose fault.

Source: RFC 9457, https://www.rfc-editor.org/rfc/rfc9457.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from statekit.errors import (
    CommitError,
    FormatError,
    InexactError,
    MissingExtraError,
    NotFoundError,
    StateError,
    StatekitError,
    TargetExistsError,
    UnknownRuleError,
    UnsupportedSystemError,
    UsageError,
    printable,
)
from statekit.service.database import DamagedCatalogueError

MEDIA_TYPE = "application/problem+json"
_STATUS: Mapping[type[StatekitError], HTTPStatus] = {
    UsageError: HTTPStatus.UNPROCESSABLE_ENTITY,
    NotFoundError: HTTPStatus.NOT_FOUND,
    DamagedCatalogueError: HTTPStatus.SERVICE_UNAVAILABLE,
    FormatError: HTTPStatus.UNPROCESSABLE_ENTITY,
    StateError: HTTPStatus.UNPROCESSABLE_ENTITY,
    InexactError: HTTPStatus.UNPROCESSABLE_ENTITY,
    UnknownRuleError: HTTPStatus.UNPROCESSABLE_ENTITY,
    TargetExistsError: HTTPStatus.CONFLICT,
    CommitError: HTTPStatus.INSUFFICIENT_STORAGE,
    MissingExtraError: HTTPStatus.NOT_IMPLEMENTED,
    UnsupportedSystemError: HTTPStatus.NOT_IMPLEMENTED,
    StatekitError: HTTPStatus.INTERNAL_SERVER_ERROR,
}


@dataclass(frozen=True)
class Problem:
    """What is wrong with a request, or with what it asked for.

    Attributes:
        status: The status of HTTP.
        subject: What is wrong, one sentence.
        place: Where.
        expected: What should have been there.
        found: What is there instead.
        remedy: What the user can do about it.
        kind: The error's class, in words: `not-found`.
        headers: What the answer needs besides.
    """

    status: int
    subject: str
    place: str | None = None
    expected: str | None = None
    found: str | None = None
    remedy: str | None = None
    kind: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the problem as RFC 9457 has it, with the parts of our errors beside; those unknown are null."""
        title = HTTPStatus(self.status).phrase
        kind = self.kind or title.lower().replace(" ", "-")
        return {
            "type": f"urn:statekit:problem:{kind}",
            "title": title,
            "status": self.status,
            "detail": self.subject,
            "place": self.place,
            "expected": self.expected,
            "found": self.found,
            "remedy": self.remedy,
        }

    def response(self) -> JSONResponse:
        """Returns the problem as an answer."""
        return JSONResponse(self.to_json(), self.status, dict(self.headers), MEDIA_TYPE)


def problem_of(error: StatekitError) -> Problem:
    """Returns an error of the library as a problem.

    Example:
        >>> problem = problem_of(NotFoundError("There is no job 7.", place="/jobs/7"))
        >>> int(problem.status), problem.kind, problem.place
        (404, 'not-found', '/jobs/7')
    """
    status = next(_STATUS[base] for base in type(error).__mro__ if base in _STATUS)
    return Problem(
        status,
        _text(error.subject) or "",
        _text(error.place),
        _text(error.expected),
        _text(error.found),
        _text(error.remedy or None),
        _kind(error),
    )


def problem_of_input(faults: Sequence[Mapping[str, Any]]) -> Problem:
    """Returns what pydantic found wrong with a request as one problem.

    Args:
        faults: Its `errors()`: `loc` and `msg` of each.
    """
    lines = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults]
    shown = [*lines[:40], *([f"and {len(lines) - 40} more"] if len(lines) > 40 else [])]
    return Problem(
        HTTPStatus.UNPROCESSABLE_ENTITY,
        "The request isn't what the interface asks for.",
        place=_text(", ".join(dict.fromkeys(str(fault["loc"][0]) for fault in faults if fault["loc"]))),
        found=_text("\n".join(shown)),
        remedy="see /api/v1/openapi.json",
        kind="usage",
    )


def unexpected(incident: str) -> Problem:
    """Returns what a client sees of an error that nobody foresaw: nothing but the number to look for in the log."""
    return Problem(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "The service failed at this request; nothing that it had to do is done by halves.",
        place=f"incident {incident}",
        remedy="look for the incident in the service's log, and report it",
        kind="unexpected",
    )


def _text(value: object) -> str | None:
    return None if value is None else printable(str(value), keep="\n").strip("\n")


def _kind(error: StatekitError) -> str:
    name = error.kind.removesuffix("Error")
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
