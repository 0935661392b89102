"""Connections: those that never finish what they ask are closed, so that none can keep others out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""How long a client may take for the head of a request, from the first moment that it could send one."""


class PunctualProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a deadline for the head of each request; uvicorn itself waits for ever."""

    head_seconds = HEAD_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's is narrower
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Sets the deadline while a head is awaited, and takes it away while a request is answered."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_seconds, self._close)

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
    "limit_concurrency": 1000,
    "timeout_keep_alive": 15,
    "proxy_headers": False,
    "server_header": False,
    "access_log": False,
}
"""How uvicorn is set up for the service: whose limits these are, and that it believes no proxy."""
