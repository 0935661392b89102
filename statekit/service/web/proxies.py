"""The address under which browsers see the service where a proxy stands before it: with TLS, or below a path.

No header of a proxy decides who is let in. The user gives the address once (`--public-url`), and it is what the
service's pages and cookies have. A proxy may pass paths on with the address's own path, or without. Where the user
names a header and the proxy's address (`--user-header`, `--proxy`), jobs bear the name that this proxy sends.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.errors import UsageError, printable

_LOG = structlog.get_logger("statekit.service")
_USER = "statekit.user"
_HEADER = re.compile(r"[a-z0-9-]{1,64}")
MOST_NAME = 100
"""Characters of a user's name that are kept."""

_LINK = re.compile(rb'(?<=[\s"])(href|src|action|hx-get|hx-post|data-events|data-then)="/(?!/)')
"""An attribute of a page that leads to one of ours; names of users have no quotes in pages, so none looks like it."""
_ADDRESSES = ("location", "hx-replace-url", "hx-push-url", "hx-redirect")
"""Headers of answers that are addresses of ours, where they begin with a slash."""
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*")


class PublicAddress(NamedTuple):
    """What browsers call the service.

    Attributes:
        origin: Scheme, name and port, as browsers say them: `https://lab.example`.
        host: The name alone, in small letters.
        prefix: The path below which all lies, without a slash at its end; "" of none.
    """

    origin: str = ""
    host: str = ""
    prefix: str = ""

    @property
    def is_secure(self) -> bool:
        """Whether browsers come over TLS."""
        return self.origin.startswith("https:")


DIRECT = PublicAddress()
"""Nothing stands before the service."""


def public_address(url: str) -> PublicAddress:
    """Returns the parts of the address that a user says.

    Raises:
        UsageError: It is no address of a site.

    Example:
        >>> public_address("https://Lab.example:443/statekit/")
        PublicAddress(origin='https://lab.example', host='lab.example', prefix='/statekit')
    """
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        parts, port, host = urlsplit(""), None, ""
    prefix = parts.path.rstrip("/")
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in ("http", "https") or not host or not is_plain or not _PREFIX.fullmatch(prefix):
        raise UsageError(
            "The address of the site is malformed.",
            place="--public-url",
            expected="https://NAME or https://NAME/PATH",
            found=url[:200],
        )
    name = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, {"http": 80, "https": 443}[parts.scheme]) else f":{port}"
    return PublicAddress(f"{parts.scheme}://{name}{shown}", name, prefix)


class UserHeader(NamedTuple):
    """Where the name of whoever asks stands.

    Attributes:
        name: The header, in small letters; "" where nobody is named.
        proxies: The addresses of those who are believed.
    """

    name: str = ""
    proxies: Collection[str] = ()


NAMELESS = UserHeader()
"""Nobody is named."""


def user_header(name: str, proxies: Sequence[str]) -> UserHeader:
    """Returns the header that a user of the service says, with the proxies that may send it.

    Raises:
        UsageError: One is given without the other, or is none.

    Example:
        >>> user_header("X-Forwarded-User", ["10.0.0.1"])
        UserHeader(name='x-forwarded-user', proxies=frozenset({'10.0.0.1'}))
    """
    if bool(name) != bool(proxies):
        raise UsageError(
            "A header that names users is believed from a proxy's address alone.",
            place="--user-header and --proxy",
            expected="both, or neither",
            found=name or ", ".join(proxies),
        )
    if name and not _HEADER.fullmatch(name.lower()):
        raise UsageError("The name of the header is malformed.", place="--user-header", found=name[:100])
    try:
        addresses = frozenset(str(ipaddress.ip_address(proxy)) for proxy in proxies)
    except ValueError as error:
        raise UsageError(
            "The address of the proxy is malformed.", place="--proxy", expected="10.0.0.1", found=str(error)
        ) from None
    return UserHeader(name.lower(), addresses)


class Named:
    """Notes who asks, where a proxy of ours says it; the header from anywhere else is ignored, and logged."""

    def __init__(self, app: ASGIApp, users: UserHeader) -> None:
        self.app, self.users = app, users

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = Headers(scope=scope).getlist(self.users.name) if scope["type"] == "http" else []
        if names:
            address = scope["client"][0] if scope.get("client") else ""
            if address in self.users.proxies and len(names) == 1:
                scope = {**scope, _USER: printable(names[0].strip())[:MOST_NAME]}
            else:
                _LOG.warning("ignored a header that names a user", header=self.users.name, client=address)
        await self.app(scope, receive, send)


def user_of(request: Request, otherwise: str) -> str:
    """Returns the name of whoever asks; `otherwise` where nobody is named."""
    return request.scope.get(_USER) or otherwise


class Behind:
    """Takes an address's own path from requests, and puts it before the addresses in answers.

    Args:
        app: What answers, and knows its own addresses alone.
        prefix: The path below which browsers see it.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if path == self.prefix or path.startswith(f"{self.prefix}/"):
            inner = path[len(self.prefix) :] or "/"
            scope = {**scope, "path": inner, "raw_path": inner.encode("utf-8", "surrogateescape")}
        await self.app(scope, receive, _Shown(send, self.prefix))


class _Shown:
    """A way to send answers as browsers below a path need them; pages are held until they are whole."""

    def __init__(self, send: Send, prefix: str) -> None:
        self._send, self._prefix = send, prefix
        self._head: Message | None = None
        self._page = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name in _ADDRESSES:
                if headers.get(name, "").startswith("/"):
                    headers[name] = f"{self._prefix}{headers[name]}"
            if headers.get("content-type", "").startswith("text/html"):
                self._head = message
                return
        elif self._head is not None:
            self._page += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = {**message, "body": self._whole()}
            MutableHeaders(scope=self._head)["content-length"] = str(len(message["body"]))
            head, self._head = self._head, None
            await self._send(head)
        await self._send(message)

    def _whole(self) -> bytes:
        return _LINK.sub(rb'\1="' + self._prefix.encode() + b"/", bytes(self._page))
