"""Answers about the catalogue that are still so: sent again without asking for them, until anybody changes it."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from statekit.service.web.api import PREFIX

MOST_ANSWERS = 256
MOST_BYTES = 2**17
"""How long an answer may be to be remembered."""
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
        change: Returns the number of the catalogue's last change, whoever made it; None where that would take a while.
    """

    def __init__(self, app: ASGIApp, change: Callable[[], int | None]) -> None:
        self.app, self.change = app, change
        self._answers: OrderedDict[tuple[str, bytes], _Answer] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_about = scope["type"] == "http" and scope["method"] == "GET" and _ABOUT.fullmatch(scope["path"])
        change = self.change() if is_about else None
        if change is None:
            await self.app(scope, receive, send)
            return
        key = (scope["path"], scope["query_string"])
        before = self._answers.get(key)
        if before is not None and before.change == change:
            self._answers.move_to_end(key)
            scope["route"] = before.route
            for message in before.messages:
                await send(_copied(message))
            return
        sent: list[Message] = []

        async def send_kept(message: Message) -> None:
            sent.append(_copied(message))
            await send(message)

        await self.app(scope, receive, send_kept)
        size = sum(len(message.get("body", b"")) for message in sent)
        if sent and sent[0].get("status") == 200 and not sent[-1].get("more_body") and size <= MOST_BYTES:
            self._answers[key] = _Answer(change, scope.get("route"), tuple(sent))
            while len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)


def _copied(message: Message) -> Message:
    """Returns a message whose headers can be added to."""
    return {**message, "headers": list(message["headers"])} if "headers" in message else message
