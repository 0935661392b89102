"""Connections: those that ask for nothing make room for those that do, and none waits for ever.

Whoever hasn't shown a token or a session is a stranger. Strangers have a part of all connections, and each address a
part of that. The oldest that waits for its client makes room for the next, and where none waits, the oldest does: never
the newcomer, who had no time to show a token. The rest is for those who signed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import h11
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from statekit.service.web.keys import Keys

HEAD_SECONDS = 10.0
"""How long a client may take for the head of a request, from the first moment that it could send one."""
FIRST_BYTE_SECONDS = 3.0
"""How long a new connection may take for its first byte."""
MOST_CONNECTIONS = 1000
MOST_STRANGERS = 400
"""Connections of those who haven't shown who they are; what is left is for those who have."""
MOST_OF_ADDRESS = 200
"""Such connections from one address."""


class Lobby:
    """The connections of strangers, the oldest first."""

    def __init__(self, most: int = MOST_STRANGERS, most_of_address: int = MOST_OF_ADDRESS) -> None:
        self._most, self._most_of_address = most, most_of_address
        self._addresses: dict[PunctualProtocol, str] = {}

    def enter(self, connection: PunctualProtocol, address: str) -> None:
        """Takes a new connection in; where there are too many, the oldest idle one is closed, or else the oldest."""
        self._addresses[connection] = address
        neighbours = [neighbour for neighbour, its in self._addresses.items() if its == address]
        if len(neighbours) > self._most_of_address:
            self._close_one(neighbours)
        elif len(self._addresses) > self._most:
            self._close_one([*self._addresses])

    def leave(self, connection: PunctualProtocol) -> None:
        """Forgets a connection: it is closed, or no stranger's any more."""
        self._addresses.pop(connection, None)

    def _close_one(self, connections: list[PunctualProtocol]) -> None:
        *older, _ = connections  # the last is the newcomer
        closed = next((connection for connection in older if connection.is_idle), older[0])
        self.leave(closed)
        closed.transport.abort()


class PunctualProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with deadlines for what a client sends; uvicorn itself waits for ever."""

    head_seconds = HEAD_SECONDS
    first_byte_seconds = FIRST_BYTE_SECONDS
    lobby = Lobby()
    admits: Callable[[Headers], object] = staticmethod(lambda headers: None)
    _deadline: asyncio.TimerHandle | None = None
    _has_begun = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered: the head or the body of a request is awaited."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's is narrower
        super().connection_made(transport)
        self._watch(min(self.first_byte_seconds, self.head_seconds))
        self.lobby.enter(self, self.client[0] if self.client else "")

    def data_received(self, data: bytes) -> None:
        if not self._has_begun:  # from here on the whole head has its deadline, however slowly it comes
            self._has_begun = True
            self._unwatch()
        super().data_received(data)
        self._watch(self.head_seconds)
        if self.headers is not None and self.admits(Headers(raw=self.headers)):
            self.lobby.leave(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.lobby.leave(self)
        super().connection_lost(exc)

    def _watch(self, seconds: float) -> None:
        """Sets the deadline while a head is awaited, and takes it away while a request is answered."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(seconds, self._close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        self.transport.close()


UVICORN: Mapping[str, Any] = {
    "http": cast(Any, PunctualProtocol),
    "ws": "none",
    "h11_max_incomplete_event_size": 64 * 1024,
    "limit_concurrency": MOST_CONNECTIONS,
    "backlog": 256,
    "timeout_keep_alive": 15,
    "proxy_headers": False,
    "server_header": False,
    "access_log": False,
}
"""How uvicorn is set up for the service: whose limits these are, and that it believes no proxy's headers."""


def uvicorn_settings(keys: Keys) -> Mapping[str, Any]:
    """Returns how uvicorn is set up for one service."""
    shared = {"lobby": Lobby(), "admits": staticmethod(keys.admits)}
    return {**UVICORN, "http": type("ServiceProtocol", (PunctualProtocol,), shared)}
