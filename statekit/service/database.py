"""The service's database: one SQLite file in the data folder, one server to a folder, and steps between versions.

Writing begins with `BEGIN IMMEDIATE`, one writer after the other, so that nobody fails in the middle; every commit is
on the disk before it counts. `backup` copies the database while it is used; to restore, put the copy into the place of
`catalogue.sqlite` while no server runs.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.runtime.environment import EnvironmentContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool

from statekit.errors import CommitError, CorruptError, UsageError
from statekit.files.durable import sync_folder
from statekit.service.tables import METADATA, OddValue
from statekit.service.tasks.processes import boot_id, is_alive, started_at

FILE = "catalogue.sqlite"
OWNER = "server.json"
TEMPORARY = "tmp"
_FILES = (FILE, OWNER, TEMPORARY, "token", "signed-out")
"""How the names of all that a service keeps in its folder begin."""
WAL_SOUND = (3, 51, 3)
"""From which version of SQLite on a write-ahead log can't lose what was committed.

Source: https://sqlite.org/wal.html, section on the WAL-reset bug: versions 3.7.0 to 3.51.2.
"""
BUSY_SECONDS = 30.0
"""How long a statement waits for another connection; no transaction here is longer than a fraction of a second."""
_IMMEDIATE = "statekit_immediate"


class DamagedCatalogueError(CorruptError):
    """The catalogue can't be read: it was cut, lacks tables, or another file lies in its place."""


class Database:
    """An open database of the newest version.

    Args:
        folder: The data folder.
        migrate: Whether it is made, or brought to the newest version; only who owns the folder may.

    Raises:
        UsageError: A newer statekit has made it, or it isn't of this version and mustn't be changed.
        CorruptError: The file is no database, or damaged.
        CommitError: The folder can't be written to.
    """

    def __init__(self, folder: Path, *, migrate: bool = False) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.temporary = Path(os.path.realpath(folder)) / TEMPORARY
        """Where tasks have temporary folders; what killed ones leave goes when the next server starts."""
        self._writing = threading.Lock()
        self._changes: sqlite3.Connection | None = None
        if migrate:
            _make_private(folder)
        self.engine = _engine(self.path)
        self._file = _file_of(self.path)
        try:
            with _explained(self.path):
                self._bring_to_newest(migrate)
        except BaseException:
            self.close()
            raise

    def _bring_to_newest(self, migrate: bool) -> None:
        newest = _scripts().get_current_head()
        with self.reading() as connection:
            check = connection.exec_driver_sql("PRAGMA quick_check").scalar()
            if check != "ok":
                raise _damaged(self.path, check)
            current = MigrationContext.configure(connection).get_current_revision()
        if current == newest:
            self.check()
            return
        try:
            current is None or _scripts().get_revision(current)
        except CommandError as error:
            raise UsageError(
                "A newer statekit has made this catalogue.",
                place=self.path,
                expected=f"version {newest} or older",
                found=f"version {current}",
                remedy="start the statekit that made it, or name another folder: --data DIR",
            ) from error
        if not migrate:
            raise UsageError(
                "The catalogue isn't of this statekit's version.",
                place=self.path,
                expected=f"version {newest}",
                found=f"version {current}",
                remedy="let `statekit serve` bring it up to date",
            )
        self.migrate("head")

    def check(self) -> None:
        """Looks whether the catalogue lies where it lay and has its tables; it reads no row.

        Raises:
            DamagedCatalogueError: It doesn't.
        """
        with self.reading() as connection:
            tables = connection.exec_driver_sql(
                "SELECT name FROM sqlite_schema WHERE type = 'table'"
            ).scalars()
            missing = sorted({*METADATA.tables}.difference(tables))
        if missing:
            raise _damaged(self.path, f"no table {', '.join(missing)}")
        if _file_of(self.path) != self._file:
            raise _damaged(self.path, "another file in its place, or none")

    def migrate(self, version: str) -> None:
        """Brings the database to a version, up or down, in one transaction: `head` is the newest, `base` is none."""
        config = _config()
        scripts = ScriptDirectory.from_config(config)

        def steps(current: Any, context: MigrationContext) -> Any:
            ahead = {revision.revision for revision in scripts.iterate_revisions("head", current or "base")}
            change = (
                scripts._upgrade_revs if version == "head" or version in ahead else scripts._downgrade_revs
            )
            return change(version, current)

        with self.writing() as connection, EnvironmentContext(config, scripts, fn=steps) as environment:
            environment.configure(connection=connection, target_metadata=METADATA, render_as_batch=True)
            environment.run_migrations()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Opens a transaction that sees one state of the database, and doesn't write."""
        with _explained(self.path), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Opens a transaction that may write, after whoever writes now; what it did counts when it ends.

        Raises:
            CommitError: The disk is full, or nothing can be written there; nothing was changed.
        """
        with self._writing, _explained(self.path), self.engine.connect() as plain:
            connection = plain.execution_options(**{_IMMEDIATE: True})
            with connection.begin():
                yield connection

    def backup(self, target: Path) -> None:
        """Writes a copy of the database as it is at one moment, while it may be used.

        Raises:
            UsageError: There is something at the target.
            CommitError: It can't be written.
        """
        if target.exists():
            raise UsageError(
                "There is something in the backup's place.", place=target, remedy="choose another name"
            )
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with _explained(target):
                os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(part)) as copy:
                    source.execute(f"PRAGMA busy_timeout={round(BUSY_SECONDS * 1000)}")
                    source.backup(copy)
                with open(part, "rb") as written:
                    os.fsync(written.fileno())
                os.rename(part, target)
                sync_folder(target.parent)
        finally:
            part.unlink(missing_ok=True)

    def change(self) -> int | None:
        """Returns the number of the catalogue's last change; None where somebody writes just now.

        It waits for nobody, and is called by one thread.
        """
        try:
            if self._changes is None:
                self._changes = sqlite3.connect(
                    self.path, timeout=0, isolation_level=None, check_same_thread=False
                )
            (number,) = self._changes.execute("SELECT number FROM changes").fetchone()
        except sqlite3.Error:
            return None
        return number if isinstance(number, int) else None

    def close(self) -> None:
        """Closes all connections."""
        if self._changes is not None:
            self._changes.close()
            self._changes = None
        self.engine.dispose()


def _engine(path: Path) -> Engine:
    engine = create_engine(
        "sqlite+pysqlite://",
        creator=lambda: sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        ),
        poolclass=QueuePool,
        pool_size=8,
        max_overflow=56,
        json_serializer=lambda value: json.dumps(value, allow_nan=False, separators=(",", ":")),
        json_deserializer=_stored_json,
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record: object) -> None:
        mode = "WAL" if sqlite3.sqlite_version_info >= WAL_SOUND else "TRUNCATE"
        for pragma in (f"journal_mode={mode}", "synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF"):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        immediate = connection.get_execution_options().get(_IMMEDIATE)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine


def _stored_json(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise OddValue(f"a row has {text!r:.80} where it must have JSON") from None


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    return config


def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config())


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    """Makes errors of the database ours."""
    try:
        yield
    except OddValue as error:
        raise _damaged(place, error) from None
    except OverflowError as error:
        raise UsageError("No record has a number as large as this.", expected="less than 2^63") from error
    except (DBAPIError, sqlite3.Error) as error:
        original: Any = error.orig if isinstance(error, DBAPIError) else error
        name = getattr(original, "sqlite_errorname", "") or ""
        lacks = name == "SQLITE_ERROR" and str(original).startswith(("no such ", "table "))
        is_broken = lacks or str(original).startswith("Could not decode")  # what isn't UTF-8, without a name
        if is_broken or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise _damaged(place, original) from error
        remedies = {
            "SQLITE_FULL": "make room on the disk; what was there before is there still",
            "SQLITE_BUSY": "close it in whatever other program has it open",
            "SQLITE_LOCKED": "close it in whatever other program has it open",
            "SQLITE_IOERR": "make room on the disk, or look whether it is sound; what was there before is there still",
            "SQLITE_READONLY": "let this user write to the folder, or name another: --data DIR",
            "SQLITE_CANTOPEN": "let this user write to the folder, or name another: --data DIR",
            "SQLITE_PERM": "let this user write to the folder, or name another: --data DIR",
        }
        for start, remedy in remedies.items():
            if name.startswith(start):
                raise CommitError(
                    "The catalogue can't be written.", place=place, found=original, remedy=remedy
                ) from error
        raise


def _file_of(path: Path) -> tuple[int, int] | None:
    """Returns which file lies at a path; None if none does."""
    with suppress(OSError):
        facts = path.stat()
        return facts.st_dev, facts.st_ino
    return None


def _damaged(place: Path, found: object) -> DamagedCatalogueError:
    return DamagedCatalogueError(
        "The catalogue is damaged.",
        place=place,
        found=found,
        remedy="end the service, and restore it from a backup",
    )


class Ownership:
    """That this process, and no other, serves a data folder, until it is closed or the process ends.

    The lock is the system's, which a process can't leave behind. Where the folder is shared by machines, its file says
    whose it was; an owner of another machine that didn't say goodbye may be alive, and is believed to be.

    Raises:
        UsageError: Another server has it, by its number.
        CommitError: The folder can't be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / OWNER
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _keep_others_out(folder)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _not_writable(folder, error) from error
        try:
            self._take()
        except BaseException as error:
            os.close(self._file)
            if isinstance(error, OSError):
                raise _not_writable(folder, error) from error
            raise

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._refusal(self._owner()) from error
        owner = self._owner()
        if owner and _may_live(owner):
            raise self._refusal(owner)
        self._write(
            {"host": socket.gethostname(), "boot": boot_id(), "pid": os.getpid(), "started": started_at()}
        )

    def _owner(self) -> dict[str, Any]:
        text = os.pread(self._file, 4096, 0)
        with suppress(ValueError, RecursionError):
            owner = json.loads(text)
            if isinstance(owner, dict):
                return owner
        return {}

    def _refusal(self, owner: dict[str, Any]) -> UsageError:
        elsewhere = owner.get("host") not in (None, socket.gethostname())
        return UsageError(
            "Another server has this data folder.",
            place=self.path.parent,
            found=f"process {owner.get('pid', 'unknown')} on {owner.get('host', 'this machine')}",
            remedy=f"use that one, or name another folder: --data DIR; if it has died there, remove {self.path}"
            if elsewhere
            else "use that one, or end it; or name another folder: --data DIR",
        )

    def _write(self, owner: dict[str, Any]) -> None:
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(owner).encode(), 0)
        os.fsync(self._file)

    def close(self) -> None:
        """Gives the folder up."""
        if self._file >= 0:
            with suppress(OSError):
                self._write({})
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ownership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _keep_others_out(folder: Path) -> None:
    """Makes a data folder its user's alone, where it holds nothing but the service's files."""
    facts = folder.stat()
    is_ours = facts.st_uid == os.geteuid() and all(name.startswith(_FILES) for name in os.listdir(folder))
    if is_ours and facts.st_mode & 0o077:
        folder.chmod(0o700)
        facts = folder.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise UsageError(
            "Others than its user can reach the data folder.",
            place=folder,
            expected=f"0700 of user {os.geteuid()}",
            found=f"{stat.S_IMODE(facts.st_mode):04o} of user {facts.st_uid}",
            remedy=f"chmod 700 {folder}, or name another folder: --data DIR",
        )


def _make_private(folder: Path) -> None:
    """Makes the database's files their user's alone; SQLite gives its further files the mode of the first."""
    path = folder / FILE
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for file in folder.glob(f"{FILE}*"):
            if file.stat().st_mode & 0o077:
                file.chmod(0o600)
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> CommitError:
    return CommitError(
        "The data folder can't be written to.",
        place=folder,
        found=error.strerror,
        remedy="let this user write to it, or name another: --data DIR",
    )


def _may_live(owner: dict[str, Any]) -> bool:
    """Tells whether an owner that didn't give the folder up may be alive."""
    if owner.get("host") != socket.gethostname():
        return True
    if owner.get("boot") != boot_id():
        return False
    return is_alive(owner.get("pid"), owner.get("started"))
