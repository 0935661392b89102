"""Pages from templates; and what went wrong, as whoever asked can read it: a page for people, data for programs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from statekit.pages.environment import environment
from statekit.service.records import ENDED
from statekit.service.web import wording
from statekit.service.web.problems import Problem

_TEMPLATES = Path(__file__).parent / "templates"
_HEADERS = {"referrer-policy": "same-origin"}
"""Under no-referrer a browser says no origin of a form that it posts, and the guard refuses that."""
_FOR_PROGRAMS = "/api/"
"""Where errors are data, whoever asks."""


@cache
def _pages() -> Environment:
    pages = environment(_TEMPLATES, shared={"is_ended": lambda job: job.state in ENDED})
    pages.filters.update(age=wording.age, duration=wording.duration, count=wording.count)
    return pages


def drawn(request: Request, name: str, said: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    """Returns a page.

    Args:
        request: Who asks, and in which colours.
        name: The template.
        said: What it shows.
        status: With which status.
    """
    theme = request.cookies.get("theme")
    shared = {"theme": theme if theme in {"light", "dark"} else None, "here": request.scope["path"]}
    return HTMLResponse(_pages().get_template(name).render({**shared, **said}), status, _HEADERS)


def answered(problem: Problem, request: Request) -> Response:
    """Returns a problem: a page for who asks for one, or for a part of one; else, and in what is for programs, data."""
    asks = "text/html" in request.headers.get("accept", "") or "hx-request" in request.headers
    if not asks or request.scope["path"].startswith(_FOR_PROGRAMS):
        return problem.response()
    page = drawn(request, "problem.html", {"problem": problem}, problem.status)
    page.headers.update(problem.headers)
    return page
