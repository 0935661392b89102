"""One process that has imported what a service's tasks need, from which the zygotes of many tests are forked.

    python -P zygotes.py

As started by `shared`, it takes over its input, a socket, what a zygote is started with and the zygote's own socket,
and answers the zygote's number. tests/test_service_confinement.py starts its zygotes as the service does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from statekit.service.tasks import child, task

ASKED_BYTES = 1 << 17


class Forked:
    """A zygote that isn't this process's own child, as `subprocess.Popen` shows one that is."""

    def __init__(self, pid: int) -> None:
        self.pid, self._file = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        return 0 if select.select([self._file], [], [], 0)[0] else None

    def wait(self) -> int:
        select.select([self._file], [], [])
        return 0

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._file, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._file)


@contextmanager
def shared() -> Iterator[None]:
    """Has zygotes forked from one process meanwhile, with this one's environment and folder."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        mother = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
        )

        def begun(parent: int, temporary: Path | None, control: socket.socket) -> Forked:
            variables = {**child.environment(os.environ), "OPENBLAS_NUM_THREADS": "1"}
            asked = {"temporary": str(temporary or ""), "variables": variables, "folder": os.getcwd()}
            socket.send_fds(ours, [json.dumps(asked).encode()], [control.fileno()])
            return Forked(int(ours.recv(64)))

        try:
            with patch.object(child, "_begun", begun):
                yield
        finally:
            mother.kill()
            mother.wait()


def zygote(asked: dict[str, Any], control: int) -> NoReturn:
    """Becomes a zygote, whose end is that of whoever has the other end of its socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(control, 0)
    os.close(control)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv = [task.__file__, "0", asked["temporary"]]
    task.main()


def main() -> None:
    """Forks a zygote whenever it is asked to, until nobody can ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    task._warm()
    control = socket.socket(fileno=0)
    while True:
        message, files, _, _ = socket.recv_fds(control, ASKED_BYTES, 1)
        if not message:
            break
        pid = os.fork()
        if not pid:
            control.detach()
            zygote(json.loads(message), files[0])
        os.close(files[0])
        control.sendall(str(pid).encode())


if __name__ == "__main__":
    main()
