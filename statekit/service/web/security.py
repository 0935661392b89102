"""Who may ask the service, and from where: hosts, origins, limits, and the headers of every answer.

A page that a user opens elsewhere can make their browser send requests here, under our name too if it controls a domain
(DNS rebinding). So every request needs a token that such a page doesn't have, a Host from a list, and, unless it only
reads, an Origin that is ours. What isn't listed as harmless is refused, not the other way round.

Source: https://words.filippo.io/csrf/ for the rule on Sec-Fetch-Site and Origin.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.errors import printable
from statekit.service.web.drawing import answered
from statekit.service.web.keys import TOKEN_FILE, Keys
from statekit.service.web.problems import Problem
from statekit.service.web.sign_in import form

HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; every other one is checked."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/sign-in"})
"""What answers without a token."""
OPEN_FOLDER = "/static/"
"""Scripts and styles, which are published with statekit."""
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})

MOST_PATH = 2048
MOST_QUERY = 8192
MOST_HEADERS = 100
MOST_HEADER_BYTES = 32 * 1024
MOST_BODY = 1024 * 1024
BODY_SECONDS = 20.0
"""How long a client may let the service wait for each piece of a body, and for all of it three times as long."""
STRANGER_BODY_SECONDS = 3.0
"""How long a stranger may take for a whole body: it is the form with the token, which a browser sends at once."""

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]{2,45}\]|[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)(?::\d{1,5})?")
_ONE_RANGE = re.compile(r"bytes=(?:\d{1,18}-\d{0,18}|-\d{1,18})")
POLICY = "; ".join((
    "default-src 'self'", "script-src 'self'", "style-src 'self'", "img-src 'self' data:", "connect-src 'self'",
    "object-src 'none'", "base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'",
))  # fmt: skip
ANSWER_HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
"""What every answer says, unless it says it otherwise itself."""


@dataclass(frozen=True)
class Hosts:
    """The names under which the service is asked.

    Attributes:
        names: Those allowed, in small letters; IPv6 addresses in brackets.
        addresses: Whether any address of digits is allowed: no page can own one as its domain.
    """

    names: Collection[str] = LOOPBACK
    addresses: bool = False

    def allow(self, host: str) -> bool:
        """Tells whether a Host is one of them, with whatever port.

        Example:
            >>> [Hosts().allow(host) for host in ("localhost:8642", "[::1]", "127.0.0.1.evil", "localhost:80@evil")]
            [True, True, False, False]
        """
        matched = _HOST.fullmatch(host.lower())
        if matched is None:
            return False
        return matched["name"] in self.names or (self.addresses and _is_address(matched["name"]))


def remote_hosts(names: Collection[str] = ()) -> Hosts:
    """Returns the names of a service that others reach over a network: this machine's, its addresses and given ones."""
    machine = {socket.gethostname().lower(), socket.getfqdn().lower()}
    return Hosts(LOOPBACK | machine | {name.lower() for name in names}, addresses=True)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def refusal(scope: Scope, keys: Keys, hosts: Hosts, origin: str = "") -> Problem | None:
    """Returns why a request isn't let in, from its head alone; None if it is.

    Args:
        scope: The request.
        keys: Who may ask.
        hosts: Under which names.
        origin: What browsers call the service, where a proxy stands before it.
    """
    headers = Headers(scope=scope)
    return (
        _too_large(scope, headers)
        or _wrong_host(headers, hosts)
        or _wrong_origin(scope, headers, origin)
        or _unknown(scope, headers, keys)
    )


def _too_large(scope: Scope, headers: Headers) -> Problem | None:
    if len(scope["path"]) > MOST_PATH or len(scope["query_string"]) > MOST_QUERY:
        return Problem(
            HTTPStatus.REQUEST_URI_TOO_LONG,
            "The address is too long.",
            expected=f"a path of {MOST_PATH} and a query of {MOST_QUERY} bytes at most",
        )
    if not scope["path"].isprintable():
        return Problem(
            HTTPStatus.BAD_REQUEST,
            "The address has control characters.",
            found=printable(scope["path"][:200]),
        )
    raw = scope["headers"]
    if len(raw) > MOST_HEADERS or sum(len(name) + len(value) for name, value in raw) > MOST_HEADER_BYTES:
        return Problem(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "The request's headers are too large.",
            expected=f"{MOST_HEADERS} of {MOST_HEADER_BYTES} bytes at most",
        )
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        return Problem(HTTPStatus.BAD_REQUEST, "The length of the body is no number.", place="Content-Length")
    return _long_body() if len(length) > 12 or int(length) > MOST_BODY else None


def _long_body() -> Problem:
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The body is too large.", expected=f"{MOST_BODY} bytes at most"
    )


def _wrong_host(headers: Headers, hosts: Hosts) -> Problem | None:
    names = headers.getlist("host")
    if len(names) == 1 and hosts.allow(names[0]):
        return None
    return Problem(
        HTTPStatus.BAD_REQUEST,
        "The service doesn't go by this name.",
        place="Host",
        expected=", ".join(sorted(hosts.names)),
        found=printable(", ".join(names)[:200]) or "no name",
        remedy="ask under one of its names, or start it with --allow-remote and --host, or --public-url",
        kind="wrong-host",
    )


def _wrong_origin(scope: Scope, headers: Headers, public: str = "") -> Problem | None:
    """Returns why a request that may change something isn't one of our own pages' or of a program's."""
    if scope["method"] in HARMLESS:
        return None
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    origin = origin and origin.lower()
    own_origin = f"{scope['scheme']}://{headers['host']}".lower()
    if public and origin == public:
        own_origin = public
    if site is not None:
        # A form of a page with Referrer-Policy no-referrer has the origin "null"; the browser vouches for it here.
        fits = site == "same-origin" and origin in (None, "null", own_origin)
    elif origin is not None:
        fits = origin == own_origin
    else:  # no browser; one that is so old that it says neither must not go by its cookie
        fits = "authorization" in headers
    if fits and len(headers.getlist("origin")) <= 1 and len(headers.getlist("sec-fetch-site")) <= 1:
        return None
    return Problem(
        HTTPStatus.FORBIDDEN,
        "The request comes from another site.",
        place="Sec-Fetch-Site and Origin",
        expected=f"same-origin, {public or own_origin}",
        found=printable(f"{site}, {origin}"[:200]),
        remedy="use the service's own pages, or send the token: Authorization: Bearer ...; behind a proxy start it "
        "with --public-url",
        kind="wrong-origin",
    )


def _unknown(scope: Scope, headers: Headers, keys: Keys) -> Problem | None:
    path = scope["path"]
    if path in OPEN_PATHS or path.startswith(OPEN_FOLDER) or keys.admits(headers) is not None:
        return None
    return Problem(
        HTTPStatus.UNAUTHORIZED,
        "The service doesn't know who asks.",
        expected="a cookie from signing in, or Authorization: Bearer with the token",
        found="a token or cookie that isn't valid" if {"authorization", "cookie"} & {*headers} else "neither",
        remedy=f"open /sign-in; the token is in the file {TOKEN_FILE} of the service's data folder",
        kind="unknown",
        headers={"WWW-Authenticate": 'Bearer realm="statekit"'},
    )


class Guard:
    """Lets in what `refusal` lets in, reads no more of it than the limits, and dresses every answer.

    Args:
        app: What answers.
        keys: Who may ask.
        hosts: Under which names.
        origin: What browsers call the service, where a proxy stands before it.
    """

    def __init__(self, app: ASGIApp, keys: Keys, hosts: Hosts, origin: str = "") -> None:
        self.app, self.keys, self.hosts, self.origin = app, keys, hosts, origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        problem = refusal(scope, self.keys, self.hosts, self.origin)
        if problem is None:
            is_stranger = self.keys.admits(Headers(scope=scope)) is None
            await self.app(_with_one_range(scope), _Body(receive, is_stranger), dressed(send))
        else:
            await answer(problem, scope, dressed(send))


async def answer(problem: Problem, scope: Scope, send: Send) -> None:
    """Sends a problem to whoever asked: a person at a browser is led to where they sign in."""
    request = Request(scope)
    wants_page = "text/html" in request.headers.get("accept", "")
    if problem.status == HTTPStatus.UNAUTHORIZED and wants_page and scope["method"] in HARMLESS:
        await form(HTTPStatus.UNAUTHORIZED)(scope, _nothing, send)
    else:
        await answered(problem, request)(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _with_one_range(scope: Scope) -> Scope:
    """Returns a request without its Range unless that is one range: whoever sends a file may ignore it."""
    ranges = Headers(scope=scope).getlist("range")
    if not ranges or (len(ranges) == 1 and _ONE_RANGE.fullmatch(ranges[0])):
        return scope
    return {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != b"range"]}


class _Body:
    """The body of a request as it comes, up to `MOST_BODY` bytes, and no slower than its sender may be.

    Args:
        receive: What it comes from.
        is_stranger: Whether it has `STRANGER_BODY_SECONDS`, and not `BODY_SECONDS` for each piece.
    """

    def __init__(self, receive: Receive, is_stranger: bool) -> None:
        self.receive, self.read, self.ended = receive, 0, False
        self.seconds = STRANGER_BODY_SECONDS if is_stranger else BODY_SECONDS
        self.longest = STRANGER_BODY_SECONDS if is_stranger else 3 * BODY_SECONDS
        self.deadline: float | None = None

    async def __call__(self) -> Message:
        if self.ended:
            return await self.receive()
        now = asyncio.get_running_loop().time()
        if self.deadline is None:
            self.deadline = now + self.longest
        try:
            message = await asyncio.wait_for(self.receive(), min(self.seconds, self.deadline - now))
        except TimeoutError as error:
            raise Refused(
                Problem(
                    HTTPStatus.REQUEST_TIMEOUT,
                    "The body didn't come.",
                    expected=f"a piece of it every {self.seconds:.0f} s, and all of it within {self.longest:.0f} s",
                    headers={"Connection": "close"},
                )
            ) from error
        self.read += len(message.get("body", b""))
        if self.read > MOST_BODY:
            raise Refused(_long_body())
        self.ended = not message.get("more_body", False)
        return message


class Refused(HTTPException):
    """A request that turned out to be refused while it was read; FastAPI lets errors of this base alone through."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.status, problem.subject)
        self.problem = problem


def dressed(send: Send) -> Send:
    """Returns a way to send answers with `ANSWER_HEADERS`."""

    async def send_dressed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in ANSWER_HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_dressed
