"""The server: one process that answers, with workers beside it, a thread that looks after them and one that scans.

The first signal ends it in an orderly way: what runs may go on for a few seconds, and waits for the next start if that
isn't enough. The second ends it at once; nothing is lost by that either.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TypeVar

import structlog
import uvicorn

from statekit.errors import StatekitError, UsageError
from statekit.service.catalogue import Catalogue
from statekit.service.database import Database, Ownership
from statekit.service.examining import examine_next
from statekit.service.jobs import Jobs
from statekit.service.service import Service
from statekit.service.tasks import confinement
from statekit.service.web.api import catalogue_routes
from statekit.service.web.app import create_app
from statekit.service.web.connections import uvicorn_settings
from statekit.service.web.contents_api import contents_routes
from statekit.service.web.job_api import job_routes
from statekit.service.web.keys import Keys, read_token
from statekit.service.web.proxies import DIRECT, PublicAddress, public_address, user_header
from statekit.service.web.security import Hosts, remote_hosts
from statekit.service.web.views import screens

DRAIN_SECONDS = 9.0
"""How long workers may take to end, all in all."""
SCAN_SECONDS = 30.0
"""How long the roots are left alone between two scans, at least."""
SCAN_SHARE = 20
"""How many times as long as a scan took they are left alone."""
KEEP_DAYS = 90
_PRUNE_SECONDS = 3600.0
_LOOK_SECONDS = 0.5
_REAP_SECONDS = 2.0
_FASTEST_RESTART = 1.0
_FORGET_SECONDS = 60.0
"""After how long without a problem the log names it again."""
_PROBLEMS: dict[str, float] = {}
"""What the log has named, with when it was met last."""
T = TypeVar("T")
_LOG = structlog.get_logger("statekit.service")


@dataclass(frozen=True)
class Settings:
    """What a user says of a service.

    Attributes:
        roots: The folders that it shows.
        data: Where its database, token and lock are.
        host: At which address it listens.
        port: At which port; 0 takes a free one.
        workers: How many jobs run at a time.
        allow_remote: Whether others may reach it over a network.
        names: Under which names, beside the machine's own.
        public_url: Under which address browsers see it, where a proxy stands before it.
        keep_days: After how many days jobs that have ended are pruned.
        user_header: Which header names whoever asks, where a proxy has signed people in.
        proxies: The addresses of the proxies whose header is believed.
        doctor_bytes: How many bytes of new steps doctor reads a day by itself; 0 leaves doctor to people.
    """

    roots: Sequence[Path]
    data: Path
    host: str = "127.0.0.1"
    port: int = 8642
    workers: int = 2
    allow_remote: bool = False
    names: Sequence[str] = ()
    public_url: str = ""
    keep_days: int = KEEP_DAYS
    doctor_bytes: int = 0
    user_header: str = ""
    proxies: Sequence[str] = ()


def serve(settings: Settings, announce: Callable[[str, Settings], object]) -> int:
    """Serves until a signal ends it.

    Args:
        settings: What the user says.
        announce: Told the link that signs in once, when the service can be reached.

    Returns:
        The exit code.

    Raises:
        UsageError: Another server has the data folder, the address can't be taken, or others could reach it unasked.
        NotFoundError: A root isn't there.
        StatekitError: The data folder can't be written to.
    """
    _configure_logging()
    _allow_files()
    with _listening(settings) as listening, Ownership(settings.data), opened(settings) as service:
        keys = Keys(read_token(settings.data), settings.data)
        public = public_address(settings.public_url) if settings.public_url else DIRECT
        users = user_header(settings.user_header, settings.proxies)
        hosts = remote_hosts(settings.names) if settings.allow_remote else Hosts()
        if public.host:
            hosts = replace(hosts, names={*hosts.names, public.host})
        routers = (
            catalogue_routes(service.catalogue),
            contents_routes(service),
            job_routes(service),
            screens(service),
        )
        app = create_app(
            keys, hosts, service.ready, service.figures, routers, service.database.change, public, users
        )
        server = _Server(
            uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5, **uvicorn_settings(keys))
        )
        server.asked = service.draining.set
        with _signals(server.handle_exit):
            workers = threading.Thread(target=_look_after_workers, args=(service, settings), name="workers")
            scans = threading.Thread(
                target=_scan, args=(service, settings.doctor_bytes), name="scans", daemon=True
            )
            if not confinement.version():
                _LOG.warning(
                    "this kernel has no Landlock: tasks have limits, but nothing keeps them to the roots"
                )
            workers.start()
            scans.start()
            try:
                announce(_link(settings, listening, keys.new_code(), public), settings)
                server.run(sockets=[listening])
            finally:
                service.draining.set()
                workers.join()  # it ends those who take too long, and none is left
    _LOG.info("ended")
    return 0


@contextmanager
def opened(settings: Settings) -> Iterator[Service]:
    """Opens a service's database and roots; the data folder is the caller's."""
    database = Database(settings.data, migrate=True)
    shutil.rmtree(database.temporary, ignore_errors=True)
    try:
        service = Service(database, Catalogue(database, list(settings.roots)), Jobs(database))
        service.jobs.reap()
        yield service
    finally:
        database.close()


class _Server(uvicorn.Server):
    """What answers; signals are the caller's."""

    asked: Callable[[], object]

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # they are caught already
        return nullcontext()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # workers and their tasks end with this process
        self.asked()
        super().handle_exit(sig, frame)


@contextmanager
def _signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """Takes the address."""
    loopback = settings.host in ("127.0.0.1", "::1", "localhost")
    if not loopback and not settings.allow_remote:
        raise UsageError(
            "Others could reach the service at this address.",
            place="--host",
            expected="127.0.0.1",
            found=settings.host,
            remedy="leave it out and use an SSH tunnel; --allow-remote lets everybody in who has the token",
        )
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=512)
    except OSError as error:
        raise UsageError(
            "The address can't be taken.",
            place=f"{settings.host}:{settings.port}",
            found=error.strerror,
            remedy="choose another port: --port N, 0 for any that is free",
        ) from error
    with listening:
        yield listening


def _link(settings: Settings, listening: socket.socket, code: str, public: PublicAddress) -> str:
    if public.origin:
        return f"{public.origin}{public.prefix}/sign-in?code={code}"
    host = settings.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/sign-in?code={code}"


def _allow_files() -> None:
    """Lets this process have as many connections as the system allows it, beside its files."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _start_worker(service: Service) -> subprocess.Popen[bytes]:
    roots = [root.id for root in service.catalogue.roots()]
    request = {"parent": os.getpid(), "data": str(service.data), "roots": roots}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "statekit.service.tasks.worker", json.dumps(request)],
        stdin=subprocess.DEVNULL,
    )


def _look_after_workers(service: Service, settings: Settings) -> None:
    """Keeps as many workers as were asked for, and takes back what dead ones had; ends when they have."""
    workers: list[subprocess.Popen[bytes]] = []
    started = reaped = 0.0
    pruned: float | None = None
    while not service.draining.is_set():
        alive = [worker for worker in workers if worker.poll() is None]
        now = time.monotonic()
        died = len(alive) < len(workers)
        workers = alive
        if died or now - reaped > _REAP_SECONDS:
            reaped = now
            _tried("reap", service.jobs.reap)
        if pruned is None or now - pruned > _PRUNE_SECONDS:
            pruned = now
            if gone := _tried("prune", lambda: service.jobs.prune(settings.keep_days)):
                _LOG.info("pruned", jobs=gone)
        if died:
            _LOG.warning("a worker has died", alive=len(workers))
        if len(workers) < settings.workers and (now - started > _FASTEST_RESTART or not died):
            started = now
            missing = range(settings.workers - len(workers))
            workers += filter(
                None, [_tried("start a worker", lambda: _start_worker(service)) for _ in missing]
            )
        service.draining.wait(_LOOK_SECONDS)
    _end(workers)
    _tried("reap", service.jobs.reap)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks workers to end, and ends those that go on for too long."""
    for worker in workers:
        worker.terminate()
    until = time.monotonic() + DRAIN_SECONDS
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(max(until - time.monotonic(), 0.01))
        worker.kill()
        worker.wait()


def _scan(service: Service, doctor_bytes: int = 0) -> None:
    """Scans the roots: at once, from time to time, and after jobs that have written; asks doctor about new steps."""
    due, before = 0.0, (0, 0)
    while not service.draining.is_set():
        written = _tried("look for what was written", service.jobs.written) or before
        if time.monotonic() >= due or written != before:
            before, clock = written, time.monotonic()
            scanned = _tried("scan", service.catalogue.scan)
            if scanned is not None and (scanned.new or scanned.changed or scanned.gone):
                _LOG.info("scanned", **scanned.to_json())
            due = time.monotonic() + max(SCAN_SECONDS, SCAN_SHARE * (time.monotonic() - clock))
        _tried("examine a new step", lambda: examine_next(service, doctor_bytes))
        service.draining.wait(_LOOK_SECONDS)


def _tried(task: str, do: Callable[[], T]) -> T | None:
    """Does something that may fail without ending the service, as where the disk is full; says it in the log once."""
    try:
        return do()
    except (StatekitError, OSError) as error:
        problem = error.line if isinstance(error, StatekitError) else str(error)
        if _is_news(problem):
            _LOG.error("failed", what=task, problem=problem)
    except Exception as error:  # nobody foresaw it: what is done again and again must go on all the same
        if _is_news(repr(error)):
            _LOG.exception("failed", what=task)
    return None


def _is_news(problem: str) -> bool:
    """Tells whether a problem is new, or comes again after some time without it."""
    now = time.monotonic()
    for before in [before for before, seen in _PROBLEMS.items() if now - seen > _FORGET_SECONDS]:
        del _PROBLEMS[before]
    is_new = problem not in _PROBLEMS
    _PROBLEMS[problem] = now
    return is_new


def _configure_logging() -> None:
    """Has the service say what it does on stderr: a line of JSON each, or for people at a terminal."""
    people = sys.stderr.isatty()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if people else [structlog.processors.format_exc_info]),
            # Plain tracebacks: those with locals may show secrets, and take seconds to lay out.
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
            if people
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING if people else logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
