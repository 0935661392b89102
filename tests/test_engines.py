"""Engines on this machine carry a work out, through kills: Ray, SLURM on one node, torchrun. `make test-engines`.

Source, work and target lie on a disk, and in a store (moto).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from test_store_servers import moto  # noqa: F401  # a fixture
from test_work import CUT, SOURCE, files

import statekit
from goldens import COMPACT
from statekit.conversion.convert import convert
from statekit.conversion.plan import Plan
from statekit.engines.slurm import Slurm
from statekit.files.source import checkpoint_place
from statekit.scale.folder import site_of
from statekit.scale.work import Work, split

pytestmark = pytest.mark.slow

T5 = COMPACT / "t5x_train" / "t5_11_unscanned" / "checkpoint" / "checkpoint_8"
"""A source of hundreds of tasks: its workers live long enough to be killed."""

CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Ground:
    """Where a test's source, work and target lie: on a disk, or in a store (moto).

    Args:
        top: What their names begin with.
    """

    def __init__(self, top: str) -> None:
        self.target, self.work, self._top = f"{top}/there", f"{top}/there.work", top

    def source(self, path: Path) -> str:
        """Returns the name of a checkpoint that workers read."""
        return f"{path}"

    def files(self) -> dict[str, bytes]:
        """Returns the files of the target."""
        return files(Path(self.target))

    def names(self, folder: str) -> list[str]:
        """Returns the names of the work's records in a folder."""
        place = checkpoint_place(self.work)
        return site_of(place, place).names(folder)

    def record(self, name: str) -> bytes:
        """Returns a record of the work."""
        place = checkpoint_place(self.work)
        return site_of(place, place).read(name)


class Bucket(Ground):
    """A store."""

    @cached_property
    def _store(self) -> Any:
        from obstore.store import S3Store

        return S3Store("bucket", client_options={"allow_http": True})

    def source(self, path: Path) -> str:
        for file in (path, *path.rglob("*")):
            if file.is_file():
                self._store.put(file.relative_to(path.parent).as_posix(), file.read_bytes())
        return f"s3://bucket/{path.name}"

    def files(self) -> dict[str, bytes]:
        top = f"{self._top.removeprefix('s3://bucket/')}/there/"
        names = [entry["path"] for page in self._store.list(top) for entry in page]
        return {name.removeprefix(top): bytes(self._store.get(name).bytes()) for name in names}


@pytest.fixture(params=["disk", "store"])
def ground(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    """Gives where a work lies, with its source and its target."""
    if request.param == "disk":
        return Ground(f"{tmp_path}")
    settings = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "REGION": "us-east-1"}
    for name, value in {**settings, "ENDPOINT_URL": request.getfixturevalue("moto")}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return Bucket(f"s3://bucket/{tmp_path.name}")


def planned(source: str, target: str) -> Plan:
    return statekit.plan(source, target, to="statekit", require="lossy")


def expected(source: str, tmp_path: Path) -> dict[str, bytes]:
    """Returns what one process writes, cut alike."""
    (tmp_path / "one").mkdir()
    convert(planned(source, f"{tmp_path / 'one' / 'there'}"), task_bytes=CUT)
    return files(tmp_path / "one" / "there")


def until(holds: Callable[[], object], seconds: float = 180) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Returns ports on which nothing listens."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [bound.getsockname()[1] for bound in sockets]
    for bound in sockets:
        bound.close()
    return ports


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A SLURM of this machine alone."""
    if os.getuid() or any(shutil.which(name) is None for name in ("munged", "slurmctld", "slurmd", "sbatch")):
        pytest.skip("needs root and Debian's slurm-wlm and munge")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            ports=free_ports(2),
            folder=folder,
            cpus=os.cpu_count(),
        )
    )
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    munged = ["munged", "-F", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
    commands = [munged, ["slurmctld", "-D"], ["slurmd", "-D"]]
    daemons = []
    try:
        for command in commands:
            daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(1)
        until(
            lambda: (
                "idle" in subprocess.run(["sinfo", "-h"], capture_output=True, text=True, check=False).stdout
            )
        )
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def test_slurm_does_what_is_missing_after_tasks_were_killed(
    tmp_path: Path, ground: Ground, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def queue() -> str:
        return subprocess.run(["squeue", "-h"], capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.chdir(tmp_path)  # where the jobs of a work in a store write their logs
    source = ground.source(SOURCE)
    split(planned(source, ground.target), ground.work, CUT).close()
    with Work(ground.work) as work:
        array, _finish = Slurm(work.place, work.missing(), cpus=1, memory="100M").submit()
        until(lambda: len(work.missing()) < len(work.tasks))
        subprocess.run(["scancel", "--signal=KILL", array], check=True)
        until(lambda: not queue())
        assert work.missing() and not work.status().finished
        Slurm(work.place, work.missing(), cpus=1, memory="100M").submit()
        until(lambda: not queue())
    assert ground.files() == expected(source, tmp_path)


def test_torchrun_carries_a_work_out(tmp_path: Path, ground: Ground) -> None:
    source = ground.source(SOURCE)
    split(planned(source, ground.target), ground.work, CUT).close()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "--no-python",
    ]
    statekit_run = [sys.executable, "-m", "statekit", "work", "run", ground.work]
    subprocess.run([*command, *statekit_run], check=True, timeout=300)
    with Work(ground.work) as work:
        assert work.missing() == []
        work.finish()
    assert ground.files() == expected(source, tmp_path)


def test_ray_goes_on_after_kills_of_workers_and_of_the_driver(tmp_path: Path, ground: Ground) -> None:
    pytest.importorskip("ray")
    source = ground.source(T5)
    command = [
        sys.executable, "-m", "statekit", "convert", source, ground.target, "--to", "statekit",
        "--on", "ray", "--task-bytes", "4000", "--quiet",
    ]  # fmt: skip
    driver = subprocess.Popen(command)
    deadline = time.monotonic() + 240
    while not ground.names("parts") and time.monotonic() < deadline:
        time.sleep(0.2)
    driver.kill()
    driver.wait()
    with Work(ground.work) as work:
        assert len(work.missing()) < len(work.document["tasks"]) and not work.status().finished
    driver = subprocess.Popen(command)
    kills, chance = 0, random.Random(0)
    while driver.poll() is None and time.monotonic() < deadline:
        for note in ground.names("attempts"):
            if kills < 20 and chance.random() < 0.3:
                try:
                    os.kill(json.loads(ground.record(f"attempts/{note}"))["pid"], signal.SIGKILL)
                    kills += 1
                except (OSError, ValueError):
                    continue
        time.sleep(0.02)
    assert driver.wait(5) == 0 and kills
    convert(statekit.plan(source, tmp_path / "one", to="statekit"), task_bytes=4000)
    assert ground.files() == files(tmp_path / "one")
