"""A whole service under load, under kills, under signals and on a full disk: what it lost, doubled or left behind.

    python tests/service_load.py [load] [kills] [signals] [disk] [--seconds 60] [--clients 32] [--jobs 200] ...

Each part starts `statekit serve` over a root of recorded checkpoints, and is a client of its interface like any other.
What it measures goes into docs/reliability.md (`make tables`); what mustn't be ends it with an error.
`make test-service` runs all of it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from reliability_table import Row, note

from goldens import COMPACT

ENDED = ("done", "failed", "cancelled", "crashed")
LEASE_SECONDS = 15.0
SPARE_SECONDS = 5.0
SOURCES = {
    "torch/adamw.pt": "torch_formats/adamw_legacy/checkpoint/checkpoint.pt",
    "torch/adafactor.pt": "torch_adafactor/adafactor_bf16/checkpoint/checkpoint.pt",
    "icefall/checkpoint-4.pt": "scaled_adam/zipformer2025_bf16/checkpoint/checkpoint-4.pt",
    "t5x/checkpoint_4": "t5x/momentum_f32/checkpoint/checkpoint_4",
    "trainer/checkpoint-4": "torch_formats/adamw_trainer/checkpoint/checkpoint-4",
}


def root_of(folder: Path) -> Path:
    """Makes a root of recorded checkpoints."""
    for name, source in SOURCES.items():
        target = folder / "root" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (COMPACT / source).is_dir() else shutil.copy)(COMPACT / source, target)
    return folder / "root"


@dataclass
class Server:
    """A running service, as its clients see it."""

    root: Path
    data: Path
    workers: int = 4
    process: subprocess.Popen[bytes] | None = None
    port: int = 0
    token: str = ""
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.data.parent / "server.log"

    def start(self, seconds: float = 60.0) -> None:
        """Starts it, and waits until it answers."""
        line = [
            "-m",
            "statekit",
            "serve",
            "--root",
            f"{self.root}",
            "--data",
            f"{self.data}",
            "--port",
            "0",
            "--doctor-gib",
            "0",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *line, "--workers", f"{self.workers}"], stdout=subprocess.PIPE, stderr=log
            )
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if b"http://" in text:
                self.port = urlsplit(text.decode().strip()).port or 0
                self.token = (self.data / "token").read_text().strip()
                break
        else:
            raise AssertionError(f"the server didn't start: {self.log.read_text()[-2000:]}")
        self.process.stdout.close()
        until = time.monotonic() + seconds
        while not self.ask("GET", "/api/v1/checkpoints")[1].get("items"):
            assert time.monotonic() < until, "nothing is listed"
            time.sleep(0.1)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal, and waits until it has ended."""
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()

    def worker_pids(self) -> list[int]:
        """Returns the numbers of its workers."""
        assert self.process is not None
        with suppress(OSError):
            tasks = Path(f"/proc/{self.process.pid}/task")
            return [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return []

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Sends a request; returns the status and the JSON of the answer."""
        client = Client(self)
        try:
            return client.ask(method, path, body, headers)
        finally:
            client.close()

    def text(self, path: str) -> str:
        """Returns what it answers to a request, as text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self.token}"})
            return connection.getresponse().read().decode()
        finally:
            connection.close()


class Client:
    """A client that keeps its connection."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Sends a request; returns the status and the JSON of the answer."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        said = {
            "Authorization": f"Bearer {self._server.token}",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), said)
            answer = self._connection.getresponse()
            text = answer.read()
        except BaseException:
            self._connection.close()
            self._connection = None
            raise
        return answer.status, json.loads(text) if text.startswith(b"{") else {}

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()


@contextmanager
def serving(workers: int, data: Path | None = None) -> Iterator[Server]:
    """Gives a running service over a new root."""
    with tempfile.TemporaryDirectory(prefix="statekit-service-") as name:
        folder = Path(name)
        server = Server(root_of(folder), data or folder / "data", workers)
        server.log = folder / "server.log"
        server.start()
        try:
            yield server
        finally:
            if server.process is not None and server.process.poll() is None:
                server.kill()


def submit(server: Client | Server, chance: random.Random, numbers: list[int], key: str) -> int:
    """Asks for a drawn job; returns the status of the answer."""
    kind = chance.choice(("inspect", "check", "doctor", "convert", "diff"))
    subjects = [chance.choice(numbers) for _ in range(2 if kind == "diff" else 1)]
    options: dict[str, Any] = {"stats": True} if kind == "inspect" else {}
    if kind == "convert":
        options = {"target": {"root": 1, "path": f"made-{key}"}, "to": "statekit"}
    body = {"kind": kind, "subjects": subjects, "options": options}
    return server.ask("POST", "/api/v1/jobs", body, {"Idempotency-Key": key})[0]


def jobs_in(data: Path) -> list[sqlite3.Row]:
    """Returns all jobs, each with how many of its events are ends and results are there, as the database has them."""
    connection = sqlite3.connect(f"file:{data / 'catalogue.sqlite'}?mode=ro", uri=True, timeout=30)
    connection.row_factory = sqlite3.Row
    try:
        ends = "SELECT count(*) FROM events WHERE job=jobs.id AND kind='state' AND json_extract(data, '$.state') IN "
        listed = "('done', 'failed', 'cancelled', 'crashed')"
        results = "SELECT count(*) FROM results WHERE job=jobs.id"
        return connection.execute(
            f"SELECT *, ({ends} {listed}) AS ends, ({results}) AS results FROM jobs"
        ).fetchall()
    finally:
        connection.close()


def settled(data: Path, seconds: float, count: int) -> list[sqlite3.Row]:
    """Waits until all jobs have ended, and returns them."""
    until = time.monotonic() + seconds
    while True:
        rows = jobs_in(data)
        if len(rows) >= count and all(row["state"] in ENDED for row in rows):
            return rows
        assert time.monotonic() < until, Counter(row["state"] for row in rows)
        time.sleep(0.5)


def check_once(rows: list[sqlite3.Row], count: int) -> None:
    """Holds jobs to having ended once each, with one result if they are done."""
    assert len(rows) == len({row["idempotency_key"] for row in rows}) == count, (len(rows), count)
    assert all(row["ends"] == 1 for row in rows), "a job ended twice"
    assert all(row["results"] == (row["state"] == "done") for row in rows), "a result was lost or doubled"


def load(seconds: float, clients: int, jobs: int, workers: int) -> None:
    """Many clients read and ask for work at a time."""
    with serving(workers) as server:
        numbers = [one["id"] for one in server.ask("GET", "/api/v1/checkpoints")[1]["items"]]
        took: list[float] = []
        statuses = Counter[int]()
        left = list(range(jobs))
        lock, began = threading.Lock(), time.monotonic()
        faults: list[str] = []

        def read(client: Client, chance: random.Random) -> None:
            path = chance.choice(
                (
                    "/api/v1/checkpoints?sort=path&limit=50",
                    "/api/v1/checkpoints?text=torch&sort=-size",
                    "/api/v1/checkpoints?container=t5x",
                    f"/api/v1/checkpoints/{chance.choice(numbers)}",
                )
            )
            start = time.perf_counter()
            status = client.ask("GET", path)[0]
            with lock:
                took.append(time.perf_counter() - start)
                statuses[status] += 1

        def work(index: int) -> None:
            chance, client = random.Random(f"client {index}"), Client(server)
            try:
                while time.monotonic() - began < seconds:
                    with lock:
                        ahead = len(left) > jobs * (1 - (time.monotonic() - began) / (0.8 * seconds))
                        mine = left.pop() if left and ahead else None
                    if mine is not None:
                        for _ in range(
                            chance.choice((1, 2))
                        ):  # who doesn't know whether it arrived asks again
                            drawn = random.Random(f"job {mine}")
                            statuses[submit(client, drawn, numbers, f"job-{mine}")] += 1
                    read(client, chance)
                    time.sleep(chance.uniform(0.0, 0.2))
            except Exception as error:
                faults.append(f"{type(error).__name__}: {error}")
            finally:
                client.close()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading_ended = time.monotonic() - began
        metrics = server.text("/metrics")
        for mine in left:
            submit(server, random.Random(f"job {mine}"), numbers, f"job-{mine}")
        rows = settled(server.data, 300, jobs)
        whole = time.monotonic() - began
        assert not faults, faults[:3]
        assert set(statuses) <= {200, 201}, statuses
        check_once(rows, jobs)
        _check_made(server, rows)
        p50, p99 = (sorted(took)[int(len(took) * part)] for part in (0.5, 0.99))
        said = (
            f"{clients} clients for {reading_ended:.0f} s, {workers} workers: {len(took)} reads of the catalogue, "
            f"half in {1e3 * p50:.0f} ms, 99 of 100 in {1e3 * p99:.0f} ms; "
            f"all jobs ended after {whole:.0f} s; no lock failed"
        )
        said += f"; {_in_time(metrics):.1%} of them begun to be answered by the server within 200 ms"
        print(said)
        note(
            "service",
            Row("jobs under load", jobs, harmless=jobs, silent=0, untyped=0, seconds=max(took), said=said),
        )


def _check_made(server: Server, rows: list[sqlite3.Row]) -> None:
    """Holds all jobs to being done, with one target for each conversion, and no lock to have failed."""
    assert all(row["state"] == "done" for row in rows), Counter(row["state"] for row in rows)
    made = sum(row["kind"] == "convert" for row in rows)
    assert len([one for one in server.root.iterdir() if one.name.startswith("made-")]) == made
    assert "is locked" not in server.log.read_text(errors="replace")


def _in_time(metrics: str) -> float:
    """Returns the part of the catalogue's reads that a server's own figures have as answered within 200 ms."""
    counts = Counter[str]()
    figures = r'statekit_request_seconds_bucket{le="(0.2|\+Inf)",route="/api/v1/checkpoints[^"]*"} (\S+)'
    for bound, value in re.findall(figures, metrics):
        counts[bound] += round(float(value))
    return counts["0.2"] / counts["+Inf"]


def kills(count: int, waiting: int, workers: int) -> None:
    """Servers and workers are killed at random moments while jobs wait and run."""
    chance = random.Random("kills")
    asked, stuck, servers = 0, 0.0, 0
    with serving(workers) as server:
        numbers = [one["id"] for one in server.ask("GET", "/api/v1/checkpoints")[1]["items"]]
        for i in range(count):
            open_jobs = sum(row["state"] not in ENDED for row in jobs_in(server.data))
            while open_jobs < waiting:
                drawn = random.Random(f"job {asked}")
                with suppress(OSError, http.client.HTTPException):
                    if submit(server, drawn, numbers, f"job-{asked}") == 201:
                        asked += 1
                        open_jobs += 1
            time.sleep(chance.uniform(0.0, 1.0))
            pids = server.worker_pids()
            if pids and chance.random() < 0.7:
                with suppress(ProcessLookupError):
                    os.kill(chance.choice(pids), signal.SIGKILL)
            else:
                servers += 1
                server.kill()
                server.start()
            stuck = max(stuck, _overdue(server.data))
            if i % 20 == 19:
                print(f"{i + 1} kills, {asked} jobs", flush=True)
        rows = settled(server.data, 600, asked)
        stuck = max(stuck, _overdue(server.data))
    check_once(rows, asked)
    assert stuck <= SPARE_SECONDS, f"a job was stuck {stuck:.1f} s beyond its lease"
    states = Counter(row["state"] for row in rows)
    again = sum(max(row["attempts"] - 1, 0) for row in rows)
    said = (
        f"{count} kills, {servers} of them of the server, with {waiting} jobs open: {states['done']} of {asked} "
        f"jobs done, {states['crashed']} given up after three workers died; begun again {again} times; "
        f"the longest that one was stuck beyond its lease: {stuck:.1f} s"
    )
    print(said)
    assert states.keys() <= {"done", "crashed"}, states
    note("service", Row("kills of server and workers", count, harmless=count, silent=0, untyped=0, said=said))


def _overdue(data: Path) -> float:
    """Returns for how many seconds at most a lease is over that nobody has taken back."""
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return max(
        ((now - row["lease_until"]) / 1e9 for row in jobs_in(data) if row["state"] == "running"), default=0.0
    )


def signals(runs: int, jobs: int = 6) -> None:
    """The server is asked to end while jobs run: it ends in time, and nothing is lost."""
    longest = again = 0.0
    for i in range(runs):
        with serving(2) as server:
            numbers = [one["id"] for one in server.ask("GET", "/api/v1/checkpoints")[1]["items"]]
            for j in range(jobs):
                submit(server, random.Random(f"job {j}"), numbers, f"job-{j}")
            time.sleep(random.Random(f"run {i}").uniform(0.0, 2.0))
            process = server.process
            assert process is not None
            pids, start = server.worker_pids(), time.monotonic()
            process.terminate()
            if i % 2:
                time.sleep(0.1)
                begun = time.monotonic()
                process.terminate()
                process.wait(5)
                again = max(again, time.monotonic() - begun)
            else:
                code = process.wait(30)
                longest = max(longest, time.monotonic() - start)
                assert code == 0, code
                # What looks into checkpoints is killed by the kernel as the server ends, and takes a moment to die.
                until = time.monotonic() + 5
                while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
                    assert time.monotonic() < until, f"processes are left: {left}"
                    time.sleep(0.05)
            server.start()
            rows = settled(server.data, 120, jobs)
            check_once(rows, jobs)
            assert all(row["state"] == "done" for row in rows), Counter(row["state"] for row in rows)
    assert longest <= 10.0 and again <= 2.0, (longest, again)
    said = (
        f"ended after {longest:.1f} s at most, on a second signal after {again:.1f} s; all jobs were done by the next "
        f"start"
    )
    print(said)
    note(
        "service",
        Row("SIGTERM while jobs run", runs, harmless=runs, silent=0, untyped=0, seconds=longest, said=said),
    )


def disk() -> None:
    """The disk of the data folder is full, or can't be written to: that is said, and nothing is lost."""
    with tempfile.TemporaryDirectory(prefix="statekit-disk-") as name:
        data = Path(name)
        line = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", name]
        mounted = subprocess.run(line, check=False, capture_output=True)
        if mounted.returncode:
            print("not root: a full disk can't be made")
            return
        try:
            with serving(2, data / "data") as server:
                numbers = [one["id"] for one in server.ask("GET", "/api/v1/checkpoints")[1]["items"]]
                assert submit(server, random.Random("a"), numbers, "before") == 201
                settled(server.data, 60, 1)
                check = {"kind": "check", "subjects": [numbers[0]], "options": {}}
                refused = []
                with suppress(OSError), (data / "ballast").open("wb", buffering=0) as ballast:
                    while True:
                        ballast.write(bytes(4096))
                for _ in range(20):
                    status, said = server.ask("POST", "/api/v1/jobs", check)
                    refused.append((status, said))
                    if status >= 400:
                        break
                status, said = refused[-1]
                assert status in (500, 503, 507) and "room" in json.dumps(said), (status, said)
                assert server.ask("GET", "/api/v1/checkpoints")[0] == 200
                assert server.ask("GET", "/readyz")[0] == 503
                (data / "ballast").unlink()
                _until(lambda: server.ask("GET", "/readyz")[0] == 200)
                assert submit(server, random.Random("b"), numbers, "after") == 201
                settled(server.data, 60, 2)
                server.kill(signal.SIGTERM)
                subprocess.run(["mount", "-o", "remount,ro", name], check=True)
                ended = subprocess.run(
                    [sys.executable, "-m", "statekit", "serve", "--root", f"{server.root}", "--data", f"{server.data}"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                assert ended.returncode == 3 and "--data DIR" in ended.stderr, ended
                subprocess.run(["mount", "-o", "remount,rw", name], check=True)
                server.start()
                settled(server.data, 60, 2)
        finally:
            subprocess.run(["umount", name], check=False)
    what = "requests fail with what to do, reading goes on, and once there is room all goes on"
    print(what)
    note("service", Row("a full or read-only data folder", 2, caught=2, silent=0, untyped=0, said=what))


def _until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["load", "kills", "signals", "disk"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--waiting", type=int, default=20)
    parser.add_argument("--runs", type=int, default=10)
    said = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "load": lambda: load(said.seconds, said.clients, said.jobs, said.workers),
        "kills": lambda: kills(said.kills, said.waiting, said.workers),
        "signals": lambda: signals(said.runs),
        "disk": disk,
    }
    for part in said.parts:
        print(f"== {part}", flush=True)
        parts[part]()


if __name__ == "__main__":
    main()
