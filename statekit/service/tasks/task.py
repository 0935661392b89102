"""Tasks, the processes in which checkpoints are opened, and what forks them: `python -m statekit.service.tasks.task`.

Importing takes far longer than most tasks: so it is done once, by a process of one thread that opens nothing, and
each task is a fork of it, with limits and confined. Requests come to a task as lines of JSON, one after the other; out
go lines with `type`: `progress`, `log`, and last either `result` or `problem`, which has the parts of an error.
Whatever a checkpoint does to this process, the service only sees it end; and it ends with the service.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from statekit.conversion import registry
from statekit.errors import StatekitError
from statekit.files.homes import all_of, permissions, with_search
from statekit.service import looking, work
from statekit.service.tasks.confinement import Reach, confine
from statekit.service.tasks.failures import problem_of
from statekit.service.tasks.listener import Listener
from statekit.service.tasks.processes import end_with, is_alive

NICE = 5
"""By how much tasks stand behind what answers requests, in Unix' levels."""
_WAIT_SECONDS = 0.002
_SCRATCH = "statekit-task-"
"""How the names of tasks' temporary folders begin; the number of their parent follows."""


KINDS: Mapping[str, Callable[[Mapping[str, Any], Listener], Any]] = {**looking.KINDS, **work.KINDS}


def limit(limits: Mapping[str, int]) -> None:
    """Sets what this process may take: `memory`, `files` and `written` in bytes and numbers, `cpu` from now on."""
    kinds = {"memory": resource.RLIMIT_AS, "files": resource.RLIMIT_NOFILE, "written": resource.RLIMIT_FSIZE}
    wanted = [(kinds[name], value) for name, value in limits.items() if name in kinds]
    if "cpu" in limits:
        used = resource.getrusage(resource.RUSAGE_SELF)
        wanted.append((resource.RLIMIT_CPU, round(used.ru_utime + used.ru_stime) + limits["cpu"]))
    wanted.append((resource.RLIMIT_CORE, 0))
    for kind, value in wanted:
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def answer(request: Mapping[str, Any], listener: Listener) -> None:
    """Does what a request says, and says what came of it."""
    try:
        result = KINDS[request["kind"]](request, listener)
        listener.say("result", result)
    except (Exception, KeyboardInterrupt) as error:
        listener.say("problem", problem_of(error))


def _work(files: Sequence[int], scratch: Path, parent: int) -> None:
    """Answers requests until there are no more, confined and with limits by the first; ends with its parent."""
    read, written, errors = files
    os.dup2(read, 0)  # it was the way to the parent
    os.dup2(errors, 1)  # what a library prints is no answer
    os.dup2(errors, 2)
    listener = Listener(os.fdopen(os.dup(written), "w", encoding="ascii", errors="strict"))
    for file in files:
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
    is_confined = False
    for line in sys.stdin:
        request = json.loads(line)
        try:
            limit(request.get("limits", {}))
            if not is_confined and "reach" in request:
                _make_files_as_narrow(request)
                confine(Reach(**request["reach"]), scratch)
                end_with(parent)  # to be another user takes this back
                is_confined = True
        except (StatekitError, OSError) as error:
            listener.say("problem", problem_of(error))
        else:
            answer(request, listener)


def _make_files_as_narrow(request: Mapping[str, Any]) -> None:
    """Has new files let others do no more than the files do that a task reads or replaces: it can't change that later.

    A folder in which others may write counts for its files, as `permissions` has it.
    """
    places = [Path(path) for path in (*request.get("paths", ()), request.get("target")) if path is not None]
    if request["reach"].get("writes"):
        limit = permissions(file for place in places if os.path.exists(place) for file in all_of(place))
        os.umask(os.umask(0o077) | 0o077 & ~with_search(limit))


class Forks:
    """The tasks that were forked here and whose end nobody has asked for, each with its temporary folder.

    Args:
        temporary: Where these lie; in the system's folder if None.
    """

    def __init__(self, temporary: Path | None) -> None:
        self._temporary = temporary
        self._scratches: dict[int, Path] = {}
        self._sweep()

    def fork(self, files: Sequence[int]) -> int:
        """Forks a task, and returns its number."""
        if self._temporary is not None:
            self._temporary.mkdir(exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-", dir=self._temporary))
        parent = os.getpid()
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            self._scratches[pid] = scratch
            return pid
        code = 1
        try:
            os.setpgid(0, 0)
            end_with(parent)
            _work(files, scratch, parent)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)  # what it would do at an end is the parent's

    def _sweep(self) -> None:
        """Removes the folders of tasks whose parent was killed before it could."""
        for folder in [] if self._temporary is None else self._temporary.glob(f"{_SCRATCH}*"):
            owner = folder.name.removeprefix(_SCRATCH).partition("-")[0]
            if owner.isdecimal() and not is_alive(int(owner)):
                shutil.rmtree(folder, ignore_errors=True)

    def ended(self, pid: int, seconds: float) -> tuple[int, bool]:
        """Waits for a task's end; returns its code, negative of a signal, and whether it was ended for being late."""
        until, is_late = time.monotonic() + seconds, False
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if not is_late and time.monotonic() > until:
                is_late = True
                os.kill(pid, signal.SIGKILL)
            time.sleep(_WAIT_SECONDS)
        with suppress(OSError):
            os.killpg(pid, signal.SIGKILL)  # what it has started goes with it; its number is still taken
        _, status = os.waitpid(pid, 0)
        shutil.rmtree(self._scratches.pop(pid), ignore_errors=True)
        return os.waitstatus_to_exitcode(status), is_late


def main() -> NoReturn:
    """Forks a task whenever it is asked to over its input, a socket, until nobody can ask any more."""
    if parent := int(sys.argv[1]):
        end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a supervisor may ignore it
    _give_way()
    _warm()
    forks = Forks(Path(sys.argv[2]) if sys.argv[2] else None)
    control = socket.socket(fileno=0)
    gc.collect()
    gc.freeze()
    while True:
        try:
            message, files, _, _ = socket.recv_fds(control, 64, 3, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
            if message == b"fork":
                control.sendall(str(forks.fork(files)).encode())
            elif message:
                pid, seconds = message.split()[1:]
                code, is_late = forks.ended(int(pid), float(seconds))
                control.sendall(f"{code}{' late' * is_late}".encode())
        except (BrokenPipeError, ConnectionError):
            message = b""
        if not message:
            os._exit(0)  # nobody is there who asks; its tasks end with it


def _warm() -> None:
    """Imports what most tasks would import each for itself, and no framework."""
    for name in registry.container_names():
        registry.container(name)
    for name in registry.layout_names():
        registry.layout(name)
    import statekit.verify.verification  # noqa: F401  # only that it is there


def _give_way() -> None:
    """Lets whoever reads the catalogue go first: also where the system shares by sessions rather than by processes."""
    os.nice(NICE)
    if sys.platform == "linux":
        # It doesn't interrupt others by waking up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")  # Source: sched(7).


if __name__ == "__main__":
    main()
