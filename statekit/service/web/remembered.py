"""Answers about the catalogue that are still so: sent again without asking for them, until anybody changes it."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.service.web.api import PREFIX

MOST_ANSWERS = 256
MOST_BYTES = 2**17
"""How long an answer may be to be remembered."""
_PAUSES = (0.002, 0.005, 0.01, 0.02, 0.02)
"""Seconds after which it is asked again whether somebody still writes."""
_ABOUT = re.compile(rf"{PREFIX}/(checkpoints(/\d+)?|facets|runs(/\d+)?)")
"""What depends on the catalogue alone."""


@dataclass(frozen=True)
class _Answer:
    change: int
    route: Any
    messages: tuple[Message, ...]


class Remembered:
    """Answers what was asked before, if the catalogue hasn't changed since; has the application answer the rest.

    Args:
        app: The application; who isn't let in doesn't come here.
        change: Returns the number of the catalogue's last change, whoever made it; None while somebody writes.
    """

    def __init__(self, app: ASGIApp, change: Callable[[], int | None]) -> None:
        self.app, self.change = app, change
        self._answers: OrderedDict[tuple[str, bytes], _Answer] = OrderedDict()
        self._asked: dict[tuple[str, bytes], asyncio.Future[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET" or not _ABOUT.fullmatch(scope["path"]):
            await self.app(scope, receive, send)
            return
        key = (scope["path"], scope["query_string"])
        while True:
            change = await self._change()
            before = self._answers.get(key)
            if before is not None and before.change == change:
                self._answers.move_to_end(key)
                scope["route"] = before.route
                for message in before.messages:
                    await send(_copied(message))
                return
            asked = self._asked.get(key)
            if change is None or asked is None:
                break
            # Somebody asks for the same: then it is known, unless it has changed since.
            await asyncio.wait([asked])
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(key, future)
        try:
            await self._answer(scope, receive, send, change, lambda: self._over(key, future))
        finally:
            self._over(key, future)

    def _over(self, key: tuple[str, bytes], asked: asyncio.Future[None]) -> None:
        if self._asked.get(key) is asked:
            del self._asked[key]
        if not asked.done():
            asked.set_result(None)

    async def _change(self) -> int | None:
        """Returns the number of the last change; while somebody writes, waits a little rather than queue up behind."""
        for seconds in _PAUSES:
            change = self.change()
            if change is not None:
                return change
            await asyncio.sleep(seconds)
        return self.change()

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, change: int | None, over: Callable[[], object]
    ) -> None:
        """Has the application answer, and remembers it; says when it is, before it has gone to whoever reads it."""
        sent: list[Message] = []

        async def send_kept(message: Message) -> None:
            sent.append(_copied(message))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._keep(scope, change, tuple(sent))
                over()
            await send(message)

        await self.app(scope, receive, send_kept)

    def _keep(self, scope: Scope, change: int | None, messages: tuple[Message, ...]) -> None:
        size = sum(len(message.get("body", b"")) for message in messages)
        if change is None or messages[0].get("status") != HTTPStatus.OK or size > MOST_BYTES:
            return
        self._answers[scope["path"], scope["query_string"]] = _Answer(change, scope.get("route"), messages)
        while len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)


def _copied(message: Message) -> Message:
    """Returns a message whose headers can be added to."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else message
