"""What a task can reach: its roots, and nothing outside, however fast links are put into the places of folders."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.errors import NotFoundError, RefusedError
from statekit.service import roots
from statekit.service.database import Ownership
from statekit.service.scanning import Folder, listed
from statekit.service.server import Settings, opened
from statekit.service.tasks import confinement, seccomp
from statekit.service.tasks.child import Died, Zygote
from statekit.service.tasks.confinement import Reach
from statekit.service.tasks.worker import Worker

TORCH = GOLDEN / "torch_formats" / "adamw_legacy" / "checkpoint" / "checkpoint.pt"
CONFINED = pytest.mark.skipif(not confinement.version(), reason="this kernel has no Landlock")
PROBE = """
import ctypes, fcntl, json, os, platform, resource, socket, struct, subprocess, sys, threading
from pathlib import Path
from statekit.service.tasks.confinement import Reach, confine
said = json.loads(sys.argv[1])
libc, other = ctypes.CDLL(None, use_errno=True), said["other"]
numbers = {"x86_64": {"ioprio_set": 251, "clone": 56}, "aarch64": {"ioprio_set": 30, "clone": 220}}[platform.machine()]
def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def flags():
    file = os.open(said["root"] + "/inside", os.O_RDONLY)
    fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x80))
def threads():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
def spaces():
    if called(libc.syscall(numbers["clone"], 0x10000000 | 17, 0, 0, 0, 0)) == 0:
        os._exit(0)
def session():
    if os.fork() == 0:
        try:
            os.setsid()
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.wait()[1]):
        raise PermissionError
assert confine(Reach(*said["reach"]), Path(said["scratch"]))
tried = {
    "read": lambda: open(said["root"] + "/inside").read(),
    "write": lambda: open(said["root"] + "/writable/new", "w").close(),
    "scratch": lambda: open(said["scratch"] + "/new", "w").close(),
    "library": lambda: __import__("statekit.verify.replay"),
    "write beside": lambda: open(said["root"] + "/new", "w").close(),
    "read outside": lambda: open(said["outside"]).read(),
    "read over a link": lambda: open(said["root"] + "/link").read(),
    "list outside": lambda: os.listdir(os.path.dirname(said["outside"])),
    "write outside": lambda: open(said["outside"], "a").close(),
    "read the data": lambda: open(said["root"] + "/data/token").read(),
    "signal": lambda: os.kill(os.getppid(), 0),
    "connect": lambda: socket.create_connection(("127.0.0.1", said["port"]), 5).close(),
    "pair": lambda: [end.close() for end in socket.socketpair()],
    "program": lambda: subprocess.run(["/bin/true"], check=True),
    "datagram": lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", said["port"])),
    "pair of datagrams": lambda: socket.socketpair(type=socket.SOCK_DGRAM),
    "socket of a path": lambda: socket.socket(socket.AF_UNIX).connect(said["unix"]),
    "permissions": lambda: os.chmod(said["outside"], 0o777),
    "permissions of what it reads": lambda: os.fchmod(os.open(said["root"] + "/inside", os.O_RDONLY), 0o777),
    "owner": lambda: os.chown(said["root"] + "/inside", os.getuid(), os.getgid()),
    "times": lambda: os.utime(said["outside"], (0, 0)),
    "attributes": lambda: os.setxattr(said["root"] + "/inside", "user.x", b"x"),
    "environment of another": lambda: open(f"/proc/{os.getppid()}/environ", "rb").read(),
    "memory of another": lambda: open(f"/proc/{os.getppid()}/mem", "rb").close(),
    "own limits": lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    "own priority": lambda: os.nice(1),
    "own processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "threads": threads,
    "limits of another": lambda: resource.prlimit(other, resource.RLIMIT_NOFILE, (3, 3)),
    "priority of another": lambda: os.setpriority(os.PRIO_PROCESS, other, 19),
    "priority of a user's": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "processors of another": lambda: os.sched_setaffinity(other, {min(os.sched_getaffinity(0))}),
    "schedule of another": lambda: os.sched_setscheduler(other, os.SCHED_IDLE, os.sched_param(0)),
    "parameters of another": lambda: os.sched_setparam(other, os.sched_param(0)),
    "disk priority of another": lambda: called(libc.syscall(numbers["ioprio_set"], 1, other, 3 << 13)),
    "shared memory": lambda: called(libc.shmget(0, 4096, 0o1600)),
    "semaphores": lambda: called(libc.semget(0, 1, 0o1600)),
    "queue": lambda: called(libc.msgget(0, 0o1600)),
    "named queue": lambda: called(libc.mq_open(b"/statekit-probe", os.O_CREAT | os.O_RDWR, 0o600, None)),
    "flags of what it reads": flags,
    "lease": lambda: fcntl.fcntl(os.open(said["root"] + "/inside", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK),
    "users of its own": spaces,
    "session": session,
    "group": lambda: os.setpgid(0, 0),
}
for name, do in tried.items():
    try:
        do()
        print(name)
    except PermissionError:
        pass
"""


class Attack:
    """A root in which a folder is now itself, now a link to one outside with a checkpoint of the same name."""

    def __init__(self, folder: Path) -> None:
        self.root, self.secret = folder / "root", folder / "secret"
        self.run, self.link = self.root / "run", folder / "link"
        self.run.mkdir(parents=True)
        self.secret.mkdir()
        shutil.copy(TORCH, self.run / "a.pt")
        shutil.copy(GOLDEN / "torch_adafactor/adafactor_bf16/checkpoint/checkpoint.pt", self.secret / "a.pt")
        (self.secret / "swordfish.pt").write_bytes(b"")
        self.link.symlink_to(self.secret)


@pytest.fixture
def attack(tmp_path: Path) -> Attack:
    return Attack(tmp_path)


@CONFINED
def test_a_confined_process_reaches_its_roots_and_the_system_alone(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for folder in ("root/writable", "root/data", "scratch"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("root/inside", "root/data/token", "outside"):
        (tmp_path / file).write_text("swordfish")
    (root / "link").symlink_to(tmp_path / "outside")
    reach = Reach((str(root),), ((str(root), "writable"),), str(root / "data"))
    path = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.socket(socket.AF_UNIX) as named,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        named.bind(path)
        named.listen()
        before = os.stat(tmp_path / "outside")
        said = {
            "root": str(root), "outside": str(tmp_path / "outside"), "scratch": str(tmp_path / "scratch"),
            "port": listening.getsockname()[1], "reach": reach, "unix": path,
            "other": other.pid,
        }  # fmt: skip
        line = [sys.executable, "-P", "-c", PROBE, json.dumps(said)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        other.kill()
    assert done.returncode == 0, done.stderr
    newer = {"signal"} if confinement.version() < 6 else set()
    known = {"read", "write", "scratch", "library", "pair", "program", "threads"}
    known |= {"own limits", "own priority", "own processors"}
    assert set(done.stdout.splitlines()) == known | newer
    assert os.stat(tmp_path / "outside") == before


def _answered(calls: seccomp.Calls, number: int, arguments: Sequence[int]) -> int:
    """Returns what the kernel answers by the filter, whose instructions it runs one by one."""
    data = struct.pack("=IIQ6Q", number, calls.audit, 0, *(*arguments, *[0] * 6)[:6])
    code, at, word = seccomp.program(calls), 0, 0
    while True:
        kind, holds, fails, value = code[at]
        at += 1
        if kind == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif kind == 0x54:
            word &= value
        elif kind == 0x06:
            return value
        else:
            at += holds if (word == value if kind == 0x15 else word >= value) else fails


@pytest.mark.parametrize("machine", seccomp.CALLS)
def test_a_call_is_allowed_within_its_bounds_alone(machine: str) -> None:
    """For both architectures, wherever the test runs."""
    calls = seccomp.CALLS[machine]
    assert calls.bounded.keys() == seccomp.BOUNDS.keys()
    assert len({*calls.bounded.values(), *calls.refused.values()}) == len(calls.bounded) + len(calls.refused)
    one = 1 << 32
    tried: dict[str, tuple[list[list[int]], list[list[int]]]] = {
        "socketpair": ([[1, 1], [1, 0o2000001]], [[1, 2], [1, 5]]),
        "sendto": ([[3, 4, 5]], [[3, 4, 5, 0, 1], [3, 4, 5, 0, one]]),
        "clone": ([[0x3D0F00], [17]], [[0x10000000 | 17], [0x40000000], [0x20000]]),
        "ioctl": ([[0, 0x5401], [0, 0x5421]], [[0, 0x40086602], [0, 0x401C5820], [0, 0x40087602], [0, 0x5000940F]]),
        "fcntl": ([[0, 1030], [0, 6]], [[0, 1024]]),
        "setpriority": ([[0, 0, 5]], [[0, 9, 5], [1, 0, 5], [2, 0, 5]]),
        "ioprio_set": ([[1, 0, 5]], [[1, 9, 5], [2, 0, 5], [3, 0, 5]]),
    }  # fmt: skip
    for name, number in calls.bounded.items():
        allowed, refused = tried.get(name, ([[0, 9]], [[9, 9], [0xFFFFFFFF]]))
        assert {_answered(calls, number, words) for words in allowed} == {0x7FFF0000}, name
        assert {_answered(calls, number, words) for words in refused} == {0x00050000 | errno.EPERM}, name
    assert {_answered(calls, number, []) for number in calls.refused.values()} == {0x00050000 | errno.EPERM}
    assert _answered(calls, 435, []) == 0x00050000 | errno.ENOSYS  # so that libraries take `clone`
    assert _answered(calls, 0, [9, 9]) == _answered(calls, 63, [9, 9]) == 0x7FFF0000


def test_a_task_gets_no_secrets_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "swordfish")
    monkeypatch.setenv("HF_TOKEN", "swordfish")
    made = Zygote()
    child = made.fork()
    assert b"swordfish" not in Path(f"/proc/{child.pid}/environ").read_bytes()
    child.close()
    made.close()


@CONFINED
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another")
def test_where_root_has_started_it_a_task_is_nobody_or_the_owner_of_what_it_writes_to(
    attack: Attack, zygote: Zygote
) -> None:
    attack.root.chmod(0o700)  # no other may read it
    request = {
        "kind": "describe", "container": "torch", "path": str(attack.run / "a.pt"), "step": None,
        "reach": Reach((str(attack.root),))._asdict(),
    }  # fmt: skip
    child = zygote.fork()
    assert child.result(request, 60).kind == "result"
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert "Uid:\t65534\t65534" in status and "CapEff:\t0000000000000004" in status
    child.close()
    os.chown(attack.run, 12345, 12345)
    writing: dict[str, Any] = {
        "kind": "convert", "paths": [str(attack.run / "a.pt")], "container": "torch",
        "options": {"to": "statekit"}, "target": str(attack.run / "made"),
        "reach": Reach((str(attack.root),), ((str(attack.root), "run"),))._asdict(),
    }  # fmt: skip
    child = zygote.fork()
    answer = child.result(writing, 60)
    child.close()
    assert answer.kind == "result", answer.data
    assert {file.stat().st_uid for file in (attack.run / "made").iterdir()} == {12345}


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o600, 0o600), (0o640, 0o640), (0o644, 0o644), (0o444, 0o644)]
)
def test_what_a_task_writes_lets_others_do_no_more_than_its_source(
    mode: int, expected: int, attack: Attack, zygote: Zygote
) -> None:
    source = attack.root / "source.pt"
    shutil.copy(TORCH, source)
    source.chmod(mode)
    request = {
        "kind": "convert", "paths": [str(source)], "container": "torch",
        "options": {"to": "torch"}, "target": str(attack.run / "made.pt"),
        "reach": Reach((str(attack.root),), ((str(attack.root), "run"),))._asdict(),
    }  # fmt: skip
    child = zygote.fork()
    answer = child.result(request, 60)
    child.close()
    assert answer.kind == "result", answer.data
    assert stat.S_IMODE((attack.run / "made.pt").stat().st_mode) == expected


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


def test_tasks_are_forked_from_one_thread_without_frameworks_and_open_nothing_of_it(zygote: Zygote) -> None:
    child = zygote.fork()
    assert zygote._process is not None
    parent, task = Path(f"/proc/{zygote._process.pid}"), Path(f"/proc/{child.pid}")
    try:
        assert child.result({"kind": "places", "path": str(TORCH)}, 60).kind == "result"
        assert len(list((parent / "task").iterdir())) == 1
        loaded = (parent / "maps").read_text()
        assert not [one for one in ("libtorch", "jaxlib", "tensorflow", "tensorstore") if one in loaded]
        assert sorted(int(one.name) for one in (task / "fd").iterdir())[:3] == [0, 1, 2]
        assert not [one for one in (task / "fd").iterdir() if "socket" in os.readlink(one)]
        nice = (task / "stat").read_text().rpartition(")")[2].split()[16]
        assert int(nice) > os.nice(0)
    finally:
        child.close()
    assert not task.exists()


def test_no_module_is_taken_from_the_folder_in_which_a_service_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('code of a checkpoint was run')")
    monkeypatch.chdir(tmp_path)
    made = Zygote()
    child = made.fork()
    child.close()
    made.close()


def test_after_what_forks_tasks_has_died_another_is_started() -> None:
    made = Zygote()
    made.fork().close()
    assert made._process is not None
    made._process.kill()
    made._process.wait()
    child = made.fork()
    assert child.result({"kind": "places", "path": str(TORCH)}, 60).kind == "result"
    child.close()
    made.close()


def test_what_killed_tasks_leave_goes_when_the_next_server_starts(tmp_path: Path) -> None:
    settings = Settings([tmp_path], tmp_path / "data")
    with Ownership(settings.data), opened(settings) as service:
        worker = Worker(service.database, service.catalogue, service.jobs)
        (scanner,) = service.catalogue._scanners.values()
        assert scanner.zygote._temporary == worker._zygote._temporary == tmp_path / "data" / "tmp"
        child = worker._zygote.fork()
        assert worker._zygote._process is not None
        worker._zygote._process.kill()
        assert len(list((tmp_path / "data" / "tmp").iterdir())) == 1
    with Ownership(settings.data), opened(settings):
        assert not (tmp_path / "data" / "tmp").exists()
    child.close()
    worker.close()


def test_what_forks_tasks_is_not_asked_again_once_it_did_not_answer() -> None:
    """Its late answer would be taken for that to the next question: the number of a process, say 0."""
    made = Zygote()
    made.start()
    assert made._process is not None and made._control is not None
    os.kill(made._process.pid, signal.SIGSTOP)
    made._control.settimeout(0.01)
    assert made.ended(1, 0.0) == -signal.SIGKILL
    assert made._process is None and made._control is None


EXCHANGE = """
import ctypes, os, sys
libc, (one, other), i = ctypes.CDLL(None, use_errno=True), map(os.fsencode, sys.argv[1:]), 0
while True:
    assert libc.renameat2(-100, one, -100, other, 2) == 0, os.strerror(ctypes.get_errno())
    if not i:
        print("begun", flush=True)
    i += 1
"""


def test_where_no_process_can_be_started_that_is_said_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*said: Any, **named: Any) -> Any:
        raise BlockingIOError("too many processes")

    made = Zygote()
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(Died, match="could not be begun"):
            made.fork()
    made.fork().close()
    made.close()


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Has another process exchange two names meanwhile, as fast as it goes."""
    line = [sys.executable, "-S", "-c", EXCHANGE, str(one), str(other)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        try:
            yield
            assert process.poll() is None
        finally:
            process.kill()


ROUNDS = [20, pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_scan_lists_nothing_outside_while_a_folder_is_exchanged_for_a_link(
    attack: Attack, rounds: int
) -> None:
    def names(node: Folder) -> set[str]:
        inside = node.inside or {}
        return {*inside}.union(*(names(one) for one in inside.values()))

    with exchanging(attack.run, attack.link):
        seen = set().union(*(names(listed(attack.root)) for _ in range(10 * rounds)))
    assert "swordfish.pt" not in seen


@pytest.mark.parametrize("way", ["openat2", "step by step"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_name_leads_outside_while_a_folder_is_exchanged_for_a_link(
    attack: Attack, rounds: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "step by step":
        monkeypatch.setattr(roots, "_has_openat2", lambda: False)
    outside = os.stat(attack.secret / "a.pt").st_ino
    ways = set[str]()
    with exchanging(attack.run, attack.link):
        for i in count():
            if i > rounds and len(ways) > 1:
                break
            try:
                opened = roots.opened_beneath(attack.root, b"run/a.pt")
            except (RefusedError, NotFoundError) as error:
                ways.add(type(error).__name__)
                continue
            assert os.fstat(opened).st_ino != outside
            os.close(opened)
            ways.add("opened")


@CONFINED
@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_task_reads_outside_while_a_folder_is_exchanged_for_a_link(
    attack: Attack, rounds: int, zygote: Zygote
) -> None:
    request = {
        "kind": "describe", "container": "torch", "path": str(attack.run / "a.pt"), "step": None,
        "reach": Reach((str(attack.root),))._asdict(),
    }  # fmt: skip
    seen: list[Any] = []
    with exchanging(attack.run, attack.link):
        for _ in range(rounds):
            child = zygote.fork()
            seen.append(child.result(request, 60).data)
            child.close()
    assert {one.get("optimizer") for one in seen} <= {"adamw/torch", None}


@CONFINED
@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_task_writes_outside_while_a_folder_is_exchanged_for_a_link(
    attack: Attack, rounds: int, zygote: Zygote
) -> None:
    shutil.copy(TORCH, attack.root / "source.pt")
    before = {file.name: file.read_bytes() for file in attack.secret.iterdir()}
    written = 0
    with exchanging(attack.run, attack.link):
        for i in range(rounds):
            child = zygote.fork()
            request = {
                "kind": "convert", "paths": [str(attack.root / "source.pt")], "container": "torch",
                "options": {"to": "statekit"}, "target": str(attack.run / f"made-{i}"),
                "reach": Reach((str(attack.root),), ((str(attack.root), "run"),))._asdict(),
            }  # fmt: skip
            written += child.result(request, 60).kind == "result"
            child.close()
    assert {file.name: file.read_bytes() for file in attack.secret.iterdir()} == before
    assert written <= rounds
