"""Pages from templates; and what went wrong, as whoever asked can read it: a page for people, data for programs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jinja2 import Environment
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from statekit.pages.environment import environment
from statekit.service.records import ENDED
from statekit.service.web.problems import Problem

_TEMPLATES = Path(__file__).parent / "templates"
_HEADERS = {"referrer-policy": "same-origin"}
"""Under no-referrer a browser says no origin of a form that it posts, and the guard refuses that."""
_FOR_PROGRAMS = "/api/"
"""Where errors are data, whoever asks."""


@cache
def _pages() -> Environment:
    pages = environment(_TEMPLATES, shared={"is_ended": lambda job: job.state in ENDED})
    pages.filters.update(age=age, duration=duration, count=count)
    return pages


def drawn(request: Request, name: str, values: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    """Returns a page."""
    theme = request.cookies.get("theme")
    shared = {"theme": theme if theme in {"light", "dark"} else None, "here": request.scope["path"]}
    return HTMLResponse(_pages().get_template(name).render({**shared, **values}), status, _HEADERS)


def answered(problem: Problem, request: Request) -> Response:
    """Returns a problem: a page for who asks for one, or for a part of one; else, and in what is for programs, data."""
    asks = "text/html" in request.headers.get("accept", "") or "hx-request" in request.headers
    if not asks or request.scope["path"].startswith(_FOR_PROGRAMS):
        return problem.response()
    page = drawn(request, "problem.html", {"problem": problem}, problem.status)
    page.headers.update(problem.headers)
    return page


def age(moment: datetime, now: datetime | None = None) -> str:
    """Returns how long ago something was, for people.

    Example:
        >>> age(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, 1, tzinfo=UTC))
        '2 d ago'
    """
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    for length, unit in ((365.25 * 86400, "y"), (86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return "now"


def duration(seconds: float) -> str:
    """Returns a length of time for people.

    Example:
        >>> duration(0.04), duration(75), duration(7261)
        ('0.04 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min {int(seconds % 60)} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int) -> str:
    """Returns a large number for people.

    Example:
        >>> count(1_234_567), count(999)
        ('1.23 M', '999')
    """
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
