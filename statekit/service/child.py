"""A task's process as its parent sees it: it is asked, it answers line by line, it can be ended, and it may die."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple

_BLOCK = 1 << 20
_LAST_BYTES = 4000


class Answer(NamedTuple):
    """A line of a task."""

    kind: Literal["progress", "log", "result", "problem"]
    data: Any


class Died(Exception):
    """A task's process has ended without an answer; says how."""


class Child:
    """A process of `statekit.service.task`.

    Whoever starts it has to live as long as it shall: on Linux it ends with the thread that made it.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "statekit.service.task", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2"},
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._output, self._errors = (
            self._process.stdin,
            self._process.stdout,
            self._process.stderr,
        )
        self._waiting = selectors.DefaultSelector()
        for stream in (self._output, self._errors):
            os.set_blocking(stream.fileno(), False)
            self._waiting.register(stream, selectors.EVENT_READ)
        self._part = bytearray()
        self._said = b""

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> None:
        """Sends a request.

        Raises:
            Died: There is nobody to take it.
        """
        try:
            self._input.write(json.dumps(request).encode("ascii") + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._death() from None

    def answers(self, seconds: float) -> Iterator[Answer]:
        """Yields what the task says within some time.

        Raises:
            Died: Its process has ended, or said what no task says.
        """
        until = time.monotonic() + seconds
        while True:
            yield from self._lines()
            left = until - time.monotonic()
            if left <= 0:
                return
            for key, _ in self._waiting.select(left):
                self._read(key.fileobj)

    def result(self, request: Mapping[str, Any], seconds: float) -> Answer:
        """Asks and waits for the answer.

        Raises:
            Died: The process has ended, or was ended because it took too long.
        """
        self.ask(request)
        for answer in self.answers(seconds):
            if answer.kind in ("result", "problem"):
                return answer
        self.kill()
        raise Died(f"took longer than {seconds:.0f} s, and was ended")

    def _lines(self) -> Iterator[Answer]:
        while (end := self._part.find(b"\n")) >= 0:
            line = bytes(self._part[:end])
            del self._part[: end + 1]
            try:
                read = json.loads(line)
                yield Answer(read["type"], read["data"])
            except (ValueError, KeyError, TypeError) as error:
                self.kill()
                raise Died("said what no task says") from error

    def _read(self, stream: Any) -> None:
        block = os.read(stream.fileno(), _BLOCK)
        if stream is self._output:
            if not block:
                raise self._death()
            self._part += block
        elif block:
            self._said = (self._said + block)[-_LAST_BYTES:]
        else:
            self._waiting.unregister(stream)

    def _death(self) -> Died:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code is None:
            self.kill()
            return Died("closed its answers")
        with suppress(OSError, ValueError):
            self._said = (self._said + (self._errors.read() or b""))[-_LAST_BYTES:]
        lines = self._said.decode("utf-8", "backslashreplace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        if code >= 0:
            return Died(f"ended with code {code}{last}")
        name = signal.Signals(-code).name if -code in {*signal.Signals} else str(-code)
        return Died(f"was ended by {name}{last}")

    def stop(self) -> None:
        """Asks the process to end by itself."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Ends the process, at once."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the process, and closes what leads to it."""
        self.kill()
        self._waiting.close()
        for stream in (self._input, self._output, self._errors):
            with suppress(OSError):
                stream.close()
