"""Programs that need a process of their own and large libraries: each is a fork of one that has imported these.

    python drivers.py NAME

Most drivers are done sooner than their libraries are imported. The first test of a run that needs such a process
starts it, in whichever worker the test is; it has the socket of that abstract name, and ends with its worker.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

NAME = f"statekit-drivers-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process with more threads than one can't be forked safely."""
ASKED_BYTES = 1 << 17
PATIENCE = 60.0


def run(
    script: str | Path, *arguments: object, imports: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fork of the process that has imported modules; returns what it wrote and its exit code.

    Args:
        script: The program.
        arguments: What follows it in `sys.argv`.
        imports: Modules that are imported before the fork, once in all.
        variables: Added to this process's environment.
    """
    words = [str(script), *map(str, arguments)]
    asked = {
        "words": words, "imports": [*imports], "folder": os.getcwd(), "variables": {**os.environ, **variables},
    }  # fmt: skip
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, _connected() as mother:
        socket.send_fds(mother, [json.dumps(asked).encode()], [out.fileno(), err.fileno()])
        answer = mother.recv(16)
        printed = [_text(file) for file in (out, err)]
    return subprocess.CompletedProcess(words, int(answer or -signal.SIGKILL), *printed)


def _text(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode())


def _connected() -> socket.socket:
    """Returns a connection to the process that forks; starts one where there is none."""
    until = time.monotonic() + PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(f"\0{NAME}")
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > until:
                raise
            _start()
        else:
            return connection


def _start() -> None:
    """Starts the process that forks, and waits until it has the socket, or has found that another has it."""
    mother = subprocess.Popen(
        [sys.executable, __file__, NAME],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ONE_THREAD},
    )  # fmt: skip
    atexit.register(mother.kill)
    assert mother.stdout is not None
    mother.stdout.read(1)


def main(name: str) -> None:
    """Forks a process for each connection, until the process ends that began this one."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        server.bind(f"\0{name}")
    except OSError:  # another worker was first
        return
    server.listen(64)
    os.write(1, b".")
    os.dup2(2, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    sources: list[Any] = [server, 0]
    while server in select.select(sources, [], [])[0]:
        connection, _ = server.accept()
        with connection:
            message, files, _, _ = socket.recv_fds(connection, ASKED_BYTES, 2)
            asked = json.loads(message)
            for module in asked["imports"]:
                with suppress(ImportError):  # the program says what it lacks
                    import_module(module)
            with warnings.catch_warnings(
                action="ignore"
            ):  # JAX's, of threads: it has none before its first array
                pid = os.fork()
            if not pid:
                server.close()
                _carry_out(asked, connection, files)
            for file in files:
                os.close(file)


def _carry_out(asked: dict[str, Any], connection: socket.socket, files: Sequence[int]) -> NoReturn:
    """Runs a program as its process, answers with its exit code, and ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv = asked["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    if jax := sys.modules.get("jax"):  # it asked the variables of whoever imported it
        jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR"))
    code: Any = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    connection.send(str(code if isinstance(code, int) else 1).encode())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
