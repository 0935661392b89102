"""What a task reports while it runs: its progress, lines for the log, and its answer."""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from statekit.errors import StatekitError
from statekit.service.tasks.child import ANSWER_BYTES, LINE_LENGTH

_PROGRESS_SECONDS = 0.25


class Listener:
    """Takes what a task reports, and writes it as lines of JSON."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._due = 0.0

    def progress(self, fraction: float | None, text: str) -> None:
        """Reports how much is done, at most every quarter of a second."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _PROGRESS_SECONDS
            self.say("progress", {"fraction": fraction, "text": text[:500]})

    def log(self, line: str) -> None:
        """Reports something that is worth keeping."""
        self.say("log", {"line": line[:LINE_LENGTH]})

    def say(self, kind: str, data: Any) -> None:
        """Writes one line.

        Raises:
            StatekitError: The line is longer than the service takes.
        """
        text = json.dumps({"type": kind, "data": data}, allow_nan=False)
        if len(text) > ANSWER_BYTES:
            raise StatekitError(
                "The answer is longer than the service takes.", expected=f"{ANSWER_BYTES} bytes"
            )
        self._output.write(text + "\n")
        self._output.flush()
