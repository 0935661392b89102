"""Every request, seen from outside: counted, logged without secrets, and answered even where we failed."""

from __future__ import annotations

import secrets
import time
from typing import Any

import structlog
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.errors import printable
from statekit.service.web.drawing import answered
from statekit.service.web.metrics import Metrics
from statekit.service.web.problems import unexpected
from statekit.service.web.security import dressed

_LOG = structlog.get_logger("statekit.service")


class Requests:
    """Counts and logs what the application answers, and answers for it where it raises what nobody foresaw."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        status: int | None = None
        began = started

        async def send_seen(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = int(message["status"]), time.perf_counter()
            await send(message)

        self.metrics.running.inc()
        try:
            await self.app(scope, receive, send_seen)
        except Exception:  # nobody foresaw it: the client gets a number to look for, the log all of it
            incident = secrets.token_hex(8)
            _LOG.exception("failed", incident=incident, **_said(scope))
            if status is not None:
                raise
            await answered(unexpected(incident), Request(scope))(scope, receive, dressed(send_seen))
        finally:
            self.metrics.running.dec()
            route = getattr(
                scope.get("route"), "path", "none"
            )  # not the path asked for: figures must stay few
            self.metrics.requests.labels(_method(scope), route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(began - started)
            _LOG.info(
                "answered", status=status, milliseconds=round(1e3 * (began - started), 1), **_said(scope)
            )


def _said(scope: Scope) -> dict[str, Any]:
    """Returns what is logged of a request: not its query, headers or body, which may hold a code or a token."""
    client = scope.get("client")
    return {
        "method": _method(scope),
        "path": printable(scope["path"][:500]),
        "client": client[0] if client else None,
    }


def _method(scope: Scope) -> str:
    methods = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE")
    return scope["method"] if scope["method"] in methods else "other"
