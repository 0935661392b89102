"""The address under which browsers see the service where a proxy stands before it: with TLS, or below a path.

No header of a proxy is believed. The user says the address once (`--public-url`), and it is what the service's pages
and cookies have. A proxy may pass paths on with the address's own path, or without.
"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.errors import UsageError

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
            "This is no address of a site.",
            place="--public-url",
            expected="https://NAME or https://NAME/PATH",
            found=url[:200],
        )
    name = f"[{host}]" if ":" in host else host
    shown = "" if port in (None, {"http": 80, "https": 443}[parts.scheme]) else f":{port}"
    return PublicAddress(f"{parts.scheme}://{name}{shown}", name, prefix)


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
