"""A task's process as its parent sees it: it is asked, it answers line by line, it can be ended, and it may die."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

ANSWER_BYTES = 1 << 28
"""How long an answer may be."""
LINE_LENGTH = 4000
"""Characters of a line of the log."""
_BLOCK = 1 << 20
_LAST_BYTES = 4000
_WORD = 64
_FORK_SECONDS = 60.0
"""How long a zygote may take to import what it imports, and to fork."""
_PASSED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
)
_PASSED_FAMILIES = (
    "LC_",
    "PYTHON",
    "JAX_",
    "XLA_",
    "TF_",
    "TORCH_",
    "KERAS_",
    "CUDA_",
    "OMP_NUM_",  # and none that binds threads to processors, which a task may not
    "MKL_",
    "OPENBLAS_",
)
"""Variables that tell programs how to run, by their names and how their names begin."""
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|KEY")
_END_SECONDS = 5.0
"""How long a task that has closed its answers may take to end."""


class Answer(NamedTuple):
    """A line of a task."""

    kind: Literal["progress", "log", "result", "problem"]
    data: Any


class Died(Exception):
    """A task's process has ended without an answer; says how."""


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns what tasks get of an environment: how to run and find libraries, and nothing that may be a secret.

    Example:
        >>> environment({"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "x", "HF_TOKEN": "x", "JAX_PLATFORMS": "cpu"})
        {'PATH': '/bin', 'JAX_PLATFORMS': 'cpu'}
    """
    return {
        name: value
        for name, value in variables.items()
        if (name in _PASSED or name.startswith(_PASSED_FAMILIES)) and not _SECRET.search(name)
    }


class Zygote:
    """A process that has imported what tasks need, and forks each of them from itself; it opens no checkpoint.

    So a task begins in milliseconds, and with nothing that another has left. It is started when it is needed, ends with
    whoever has started it, and its tasks end with it.

    Args:
        temporary: The folder in which each task has one of its own; the system's if None.
    """

    def __init__(self, temporary: Path | None = None) -> None:
        self._temporary = temporary
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._end: Callable[[], object] = _nothing

    def start(self) -> None:
        """Starts the process, unless it is there."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        # It ends when nobody can ask any more; at once, where its parent is a process and not one of its threads.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        control, child_end = socket.socketpair()
        control.settimeout(_FORK_SECONDS)
        try:
            with child_end:
                process = _begun(parent, self._temporary, child_end)
        except BaseException:
            control.close()
            raise
        self._process, self._control = process, control
        self._end = weakref.finalize(self, _ended, process, control)

    def fork(self) -> Child:
        """Returns a new task, which waits to be asked.

        Raises:
            Died: It can't be begun.
        """
        try:
            return self._forked()
        except (OSError, ValueError):  # something has ended the process since
            self.close()
        try:
            return self._forked()
        except (OSError, ValueError) as error:
            self.close()
            raise Died("could not be begun: what forks tasks has ended") from error

    def _forked(self) -> Child:
        self.start()
        assert self._control is not None  # it was started
        child_pipes, pipes = list[int](), list[int]()
        try:
            for is_input in (True, False, False):
                read, written = os.pipe()
                child_pipes.append(read if is_input else written)
                pipes.append(written if is_input else read)
            socket.send_fds(self._control, [b"fork"], child_pipes)
            return Child(self, int(self._control.recv(_WORD)), pipes)
        except BaseException:
            for file in pipes:
                os.close(file)
            raise
        finally:
            for file in child_pipes:
                os.close(file)

    def ended(self, pid: int, seconds: float) -> int | None:
        """Waits for a task's end, and returns how it ended; None if it had to be ended after some seconds."""
        if self._control is None:
            return -signal.SIGKILL
        try:
            self._control.sendall(f"wait {pid} {seconds}".encode())
            code, _, was_ended = self._control.recv(_WORD).decode().partition(" ")
            return None if was_ended else int(code)
        except (OSError, ValueError):  # it went with what forked it, or what is said next may be about it
            self.close()
            return -signal.SIGKILL

    def close(self) -> None:
        """Ends the process, and its tasks with it."""
        self._end()
        self._process = self._control = None


def _begun(parent: int, temporary: Path | None, control: socket.socket) -> subprocess.Popen[bytes]:
    """Starts what forks tasks, which is asked over a socket."""
    # One thread, or what others hold while it forks is lost to the fork; frameworks make theirs after it.
    settings = {"PYTHONUNBUFFERED": "1", "MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "statekit.service.tasks.task", str(parent), str(temporary or "")],
        stdin=control.fileno(),
        stdout=subprocess.DEVNULL,
        env={**environment(os.environ), **settings},
        start_new_session=True,
    )


def _nothing() -> None:
    """Ends what was never started."""


def _ended(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    process.kill()
    process.wait()
    control.close()


class Child:
    """A process of `statekit.service.tasks.task`, forked from a zygote.

    Args:
        zygote: Where it was forked.
        pid: The number of the process.
        files: The ends of its input, its answers and its errors.
    """

    def __init__(self, zygote: Zygote, pid: int, files: Sequence[int]) -> None:
        self.pid = pid
        self._zygote, self._is_over = zygote, False
        self._input = os.fdopen(files[0], "wb")
        self._output, self._errors = FileIO(files[1]), FileIO(files[2])
        self._waiting = selectors.DefaultSelector()
        for stream in (self._output, self._errors):
            os.set_blocking(stream.fileno(), False)
            self._waiting.register(stream, selectors.EVENT_READ)
        self._part, self._searched = bytearray(), 0
        self._said = b""

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
        while (end := self._part.find(b"\n", self._searched)) >= 0:
            line = bytes(self._part[:end])
            del self._part[: end + 1]
            self._searched = 0
            try:
                read = json.loads(line)
                yield Answer(read["type"], read["data"])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self.kill()
                raise Died("said what no task says") from error
        self._searched = len(self._part)
        if self._searched > ANSWER_BYTES:
            self.kill()
            raise Died("said more than a task may")

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
        code, self._is_over = self._zygote.ended(self.pid, _END_SECONDS), True
        if code is None:
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
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process and those that it has started, at once."""
        if self._is_over:
            return
        for end in (os.killpg, os.kill):  # no other has its number before the zygote has heard of its end
            with suppress(ProcessLookupError, PermissionError):
                end(self.pid, signal.SIGKILL)
        self._zygote.ended(self.pid, _END_SECONDS)
        self._is_over = True

    def close(self) -> None:
        """Ends the process, and closes what leads to it."""
        self.kill()
        self._waiting.close()
        for stream in (self._output, self._errors, self._input):
            with suppress(OSError):  # what nobody has taken can't be written any more
                stream.close()
