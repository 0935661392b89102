"""The catalogue: which checkpoints there are below the roots, by reference, and the way from an id to a path."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Float, Row, Select, and_, func, or_, select, tuple_, update
from sqlalchemy.sql import ColumnElement

from statekit.errors import NotFoundError, RefusedError, StatekitError, UsageError, printable
from statekit.service.database import Database
from statekit.service.records import SORTS, Checkpoint, Job, Page, Query, Root, Run, Scan, Scanning
from statekit.service.roots import path_beneath, shown, target_beneath
from statekit.service.scanning import Scanner, Seen, run_key
from statekit.service.standing import Rule, spare_of, standing
from statekit.service.tables import CHECKPOINTS, ROOTS, RUNS, SUBJECTS, TAGS, TEXT, bytes_of
from statekit.service.tasks.child import Zygote
from statekit.service.tasks.failures import problem_of

T = TypeVar("T")
MOST_ITEMS = 500
"""Items of a page at most."""
MOST_TAGS, TAG_LENGTH, NOTE_LENGTH = 32, 64, 4000
_ALL = Query()
_WORDS = 8
"""Words of a search that count."""
_OPEN: Mapping[str, Any] = {
    "unreadable": None, "undecoded": None, "container": None, "layout": None, "optimizer": None, "step": None,
    "tensors": None, "parameters": None, "elements": None, "resumable": False, "digest": None, "made": None,
    "source_digest": None, "seal": "unknown",
}  # fmt: skip
"""What a scan says of a checkpoint, where it doesn't say it."""


def utc(seconds: float) -> datetime:
    """Returns a time of the database as a moment in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


def utc_or_none(seconds: float | None) -> datetime | None:
    """Returns a time of the database as a moment in UTC, if there is one."""
    return None if seconds is None else utc(seconds)


def of_row(kind: type[T], row: Row[Any], **others: Any) -> T:
    """Returns a row of the database as a record, whose other fields are given."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # records are dataclasses
    return kind(**{name: row._mapping[name] for name in names - others.keys()}, **others)


class Catalogue:
    """The checkpoints below some roots.

    Args:
        database: Where they are written down.
        roots: The folders; links in their own paths are resolved once, here. Or the numbers that they have already.

    Raises:
        NotFoundError: A root isn't a folder.
    """

    def __init__(self, database: Database, roots: Sequence[Path] | Sequence[int]) -> None:
        self._database = database
        self._scanning = threading.Lock()
        self._asking = threading.Lock()
        self._asked: threading.Thread | None = None
        self._begun = self._done = self._wanted = 0
        self._problem: str | None = None
        paths = [root for root in roots if isinstance(root, Path)]
        if paths:
            self._roots = self._registered(paths)
        else:
            with database.reading() as connection:
                rows = connection.execute(select(ROOTS).where(ROOTS.c.id.in_(list(roots))))
                self._roots = {row.id: Path(os.fsdecode(row.place)) for row in rows}
        hidden = os.path.realpath(database.folder)
        self._scanners = {
            number: Scanner(path, hidden, Zygote(database.temporary)) for number, path in self._roots.items()
        }
        self.last_scan: Scan | None = None

    def _registered(self, roots: Sequence[Path]) -> dict[int, Path]:
        resolved: list[Path] = []
        for path in roots:
            if not path.is_dir():
                raise NotFoundError("The root isn't a folder.", place=path, remedy="check the path")
            resolved.append(Path(os.path.realpath(path)))
        for i, path in enumerate(resolved):
            for other in resolved[:i]:
                if path.is_relative_to(other) or other.is_relative_to(path):
                    raise UsageError(
                        "One root lies in another.",
                        place="--root",
                        found=f"{path} and {other}",
                        remedy="name the outer",
                    )
        numbers = {}
        with self._database.writing() as connection:
            for path in resolved:
                place = os.fsencode(path)
                number = connection.scalar(select(ROOTS.c.id).where(ROOTS.c.place == place))
                if number is None:
                    number = connection.execute(ROOTS.insert().values(place=place)).lastrowid
                numbers[number] = path
            elsewhere = CHECKPOINTS.c.root.not_in(numbers) & (CHECKPOINTS.c.status == "present")
            connection.execute(update(CHECKPOINTS).where(elsewhere).values(status="gone"))
        return numbers

    def roots(self) -> tuple[Root, ...]:
        """Returns the roots that are served."""
        return tuple(Root(number, printable(str(path))) for number, path in sorted(self._roots.items()))

    def scan(self) -> Scan:
        """Looks for checkpoints below all roots, and writes down what is new, changed or gone.

        One scan runs at a time: who asks for one meanwhile waits, and gets one that began later.

        Raises:
            StatekitError: A root can't be listed, or looked into: of that nothing is written down.
        """
        with self._scanning:
            self._begun += 1
            try:
                self.last_scan = self._scan()
            except Exception as error:
                self._problem = (
                    error.line if isinstance(error, StatekitError) else problem_of(error)["subject"]
                )
                raise
            else:
                self._problem = None
            finally:
                self._done = self._begun
            return self.last_scan

    def _scan(self) -> Scan:
        began = time.monotonic()
        counts, failures = Counter[str](), list[StatekitError]()
        for number, scanner in self._scanners.items():
            if not scanner.root.is_dir():  # not mounted just now: that says nothing of what lies there
                continue
            try:
                seen = list(scanner.scan())
            except StatekitError as error:
                failures.append(error)
                continue
            counts["looked"] += scanner.looked
            with self._database.writing() as connection:
                counts.update(_reconciled(connection, number, seen))
                _group_runs(connection, number)
        if failures:
            raise failures[0]
        names = ("looked", "seen", "new", "changed", "gone", "unreadable")
        return Scan(**{name: counts[name] for name in names}, seconds=round(time.monotonic() - began, 3))

    def rescan(self) -> Scanning:
        """Has the roots scanned by a thread of its own, unless that is about to begin; returns at once."""
        with self._asking:
            wanted = self._wanted = self._begun + 1
            if self._asked is None:
                self._asked = threading.Thread(target=self._scan_wanted, name="asked scans", daemon=True)
                self._asked.start()
        return replace(self.scanning(), number=wanted)

    def _scan_wanted(self) -> None:
        while True:
            with self._asking:
                if self._begun >= self._wanted:
                    self._asked = None
                    return
            try:
                self.scan()
            except StatekitError:
                pass  # `scanning` says it
            except BaseException:
                self._asked = None  # whoever asks next begins another
                raise

    def scanning(self) -> Scanning:
        """Returns how far the scan is that runs, or what the last one came to."""
        is_running = max(self._begun, self._wanted) > self._done
        scanners = self._scanners.values()
        return Scanning(
            number=self._begun,
            done=self._done,
            running=is_running,
            entries=sum(scan.entries for scan in scanners),
            looked=sum(scan.looked for scan in scanners),
            last=self.last_scan,
            problem=self._problem,
        )

    def checkpoints(
        self, query: Query = _ALL, cursor: str | None = None, limit: int = 50
    ) -> Page[Checkpoint]:
        """Returns a page of the checkpoints that are asked for.

        Args:
            query: Which, and in which order.
            cursor: Where an earlier page has ended; None for the first.
            limit: Items of a page.

        Raises:
            UsageError: The order or the cursor isn't one.
        """
        limit = min(max(limit, 1), MOST_ITEMS)
        name, falling = query.sort.removeprefix("-"), query.sort.startswith("-")
        if name not in SORTS:
            raise UsageError(
                "There is no such order.", place="sort", expected=", ".join(SORTS), found=name[:100]
            )
        is_text = name in _TEXTS
        lacking = TEXT if is_text else Float()
        column: ColumnElement[Any] = func.coalesce(CHECKPOINTS.c[name], "" if is_text else -1, type_=lacking)
        wanted = and_(*_wanted(query, self._roots))
        chosen = select(CHECKPOINTS).where(wanted)
        if cursor is not None:
            at = tuple_(column, CHECKPOINTS.c.id)
            behind = tuple_(*decoded_cursor(cursor, is_text))
            chosen = chosen.where(at < behind if falling else at > behind)
        both = (column, CHECKPOINTS.c.id)
        chosen = chosen.order_by(*((column.desc() for column in both) if falling else both)).limit(limit + 1)
        with self._database.reading() as connection:
            total = connection.scalar(select(func.count()).select_from(CHECKPOINTS).where(wanted)) or 0
            rows = connection.execute(chosen.add_columns(column.label("sorted"))).all()
            items = _records(connection, rows[:limit])
        ahead = None if len(rows) <= limit else encoded_cursor(rows[limit - 1].sorted, rows[limit - 1].id)
        return Page(items, ahead, total)

    def facets(self, query: Query = _ALL) -> dict[str, dict[str, int]]:
        """Returns the values of each filter, with how many of those asked for have it: what can be chosen further."""
        with self._database.reading() as connection:
            facets: dict[str, dict[str, int]] = {}
            for name in ("container", "layout", "optimizer", "seal", "verdict", "status"):
                column = func.coalesce(CHECKPOINTS.c[name], "none", type_=TEXT)
                others = Query(**{**vars(query), name: "any" if name == "status" else None})
                counted = (
                    select(column, func.count()).where(and_(*_wanted(others, self._roots))).group_by(column)
                )
                facets[name] = dict(connection.execute(counted.order_by(column)).all())
            joined = select(TAGS.c.tag, func.count()).join(CHECKPOINTS, CHECKPOINTS.c.id == TAGS.c.checkpoint)
            tags = joined.where(and_(*_wanted(Query(**{**vars(query), "tag": None}), self._roots)))
            facets["tag"] = dict(connection.execute(tags.group_by(TAGS.c.tag).order_by(TAGS.c.tag)).all())
            return facets

    def figures(self) -> dict[str, dict[str, int]]:
        """Returns how many checkpoints are there, by doctor's verdict, and their bytes, by seal."""
        table = CHECKPOINTS.c
        verdict = func.coalesce(table.verdict, "not asked", type_=TEXT)
        counted = {
            "checkpoints": select(verdict, func.count()).group_by(verdict),
            "checkpoint_bytes": select(table.seal, bytes_of(table.size)).group_by(table.seal),
        }
        with self._database.reading() as connection:
            return {
                name: dict(connection.execute(chosen.where(*_wanted(_ALL, self._roots))).all())
                for name, chosen in counted.items()
            }

    def checkpoint(self, number: int) -> Checkpoint:
        """Returns a checkpoint.

        Raises:
            NotFoundError: There is none of that number.
        """
        with self._database.reading() as connection:
            return checkpoint_of(connection, number)

    def runs(self, cursor: str | None = None, limit: int = 50) -> Page[Run]:
        """Returns a page of the runs that have steps, the youngest first.

        Raises:
            UsageError: The cursor isn't one.
        """
        limit = min(max(limit, 1), MOST_ITEMS)
        runs = _runs(self._roots).subquery()
        at = tuple_(runs.c.modified, runs.c.id)
        chosen = select(runs).order_by(runs.c.modified.desc(), runs.c.id.desc()).limit(limit + 1)
        if cursor is not None:
            chosen = chosen.where(at < tuple_(*decoded_cursor(cursor, False)))
        with self._database.reading() as connection:
            total = connection.scalar(select(func.count()).select_from(runs)) or 0
            rows = connection.execute(chosen).all()
            items = _with_standing(connection, rows[:limit])
        ahead = None if len(rows) <= limit else encoded_cursor(rows[limit - 1].modified, rows[limit - 1].id)
        return Page(items, ahead, total)

    def run(self, number: int) -> Run:
        """Returns a run.

        Raises:
            NotFoundError: There is none of that number, or nothing is left of it.
        """
        with self._database.reading() as connection:
            rows = connection.execute(_runs(self._roots).where(RUNS.c.id == number)).all()
            items = _with_standing(connection, rows)
        if not items:
            raise NotFoundError("There is no such run.", place=f"run {number}", remedy="list the runs")
        return items[0]

    def tag(self, number: int, tag: str) -> Checkpoint:
        """Gives a checkpoint a tag.

        Raises:
            NotFoundError: There is no such checkpoint.
            UsageError: That is no tag, or there are too many.
        """
        tag = tag.strip()
        if not tag or len(tag) > TAG_LENGTH or not tag.isprintable():
            raise UsageError(
                "The tag is invalid.", place="tag", expected=f"1 to {TAG_LENGTH} characters", found=tag[:200]
            )
        with self._database.writing() as connection:
            record = checkpoint_of(connection, number)
            if tag in record.tags:
                return record
            if len(record.tags) >= MOST_TAGS:
                raise UsageError("The checkpoint has too many tags.", expected=f"at most {MOST_TAGS}")
            connection.execute(TAGS.insert().values(checkpoint=number, tag=tag))
            return checkpoint_of(connection, number)

    def untag(self, number: int, tag: str) -> Checkpoint:
        """Takes a tag from a checkpoint, if it has it.

        Raises:
            NotFoundError: There is no such checkpoint.
        """
        with self._database.writing() as connection:
            connection.execute(TAGS.delete().where(TAGS.c.checkpoint == number, TAGS.c.tag == tag))
            return checkpoint_of(connection, number)

    def note(self, number: int, text: str, by: str = "") -> Checkpoint:
        """Writes down what somebody says of a checkpoint, and who, in the place of what was there before.

        Raises:
            NotFoundError: There is no such checkpoint.
            UsageError: The text is too long.
        """
        if len(text) > NOTE_LENGTH:
            raise UsageError(
                "The note is too long.", place="note", expected=f"at most {NOTE_LENGTH} characters"
            )
        with self._database.writing() as connection:
            connection.execute(
                update(CHECKPOINTS)
                .where(CHECKPOINTS.c.id == number)
                .values(note=printable(text, keep="\n\t"), note_by=by if text else "")
            )
            return checkpoint_of(connection, number)

    def path_of(self, number: int) -> Path:
        """Returns where a checkpoint lies, which is there now, beneath its root and behind no link.

        Raises:
            NotFoundError: There is no such checkpoint, or it isn't there any more.
            RefusedError: The way to it leads over a link by now.
        """
        with self._database.reading() as connection:
            row = connection.execute(select(CHECKPOINTS).where(CHECKPOINTS.c.id == number)).one_or_none()
        if row is None:
            raise _no_checkpoint(number)
        if row.status != "present":
            columns = (
                "It has changed since: another has its place." if row.status == "changed" else "It is gone."
            )
            where = f"checkpoint {row.replaced_by}" if row.replaced_by else None
            raise NotFoundError(columns, place=row.path, found=where)
        return path_beneath(self._root(row.root), row.place)

    def place_of(self, number: int) -> Path:
        """Returns where a checkpoint lies or lay, in a folder beneath its root that is there.

        Raises:
            NotFoundError: There is no such checkpoint, or its folder isn't there any more.
            RefusedError: The way to it leads over a link by now.
        """
        with self._database.reading() as connection:
            row = connection.execute(select(CHECKPOINTS).where(CHECKPOINTS.c.id == number)).one_or_none()
        if row is None:
            raise _no_checkpoint(number)
        folder, _, name = row.place.rpartition(b"/")
        return path_beneath(self._root(row.root), folder) / os.fsdecode(name)

    def target(self, root: int, relative: str) -> Path:
        """Returns where something shall be written, in a folder beneath a root.

        Raises:
            NotFoundError: There is no such root or folder.
            UsageError: That is no relative path.
            RefusedError: The way leads out of the root, or over a link.
        """
        return target_beneath(self._root(root), relative)

    def root_above(self, path: Path) -> Path:
        """Returns the root that something is, or lies beneath.

        Raises:
            RefusedError: It is no root's.
        """
        for root in self._roots.values():
            if path.is_relative_to(root):
                return root
        raise RefusedError("It doesn't lie beneath a root.", place=path)

    def folder_of(self, path: Path) -> tuple[str, str]:
        """Returns the folder in which something lies that is beneath a root: the root, and the place below it.

        Raises:
            RefusedError: It is no root's, or is one itself: the folder that it lies in is none of the service's.
        """
        root = self.root_above(path)
        if path == root:
            raise RefusedError(
                "Nothing is written beside a root.",
                place=path,
                remedy="name a target beneath a root, or make the folder above it the root",
            )
        place = os.path.relpath(path.parent, root)
        return str(root), "" if place == "." else place

    def _root(self, number: int) -> Path:
        if number not in self._roots:
            raise NotFoundError(
                "There is no such root.", place=f"root {number}", expected=", ".join(map(str, self._roots))
            )
        return self._roots[number]


_TEXTS = ("path", "name", "container", "optimizer")


def _no_checkpoint(number: int) -> NotFoundError:
    return NotFoundError(
        "There is no such checkpoint.", place=f"checkpoint {number}", remedy="list the catalogue"
    )


def checkpoint_of(connection: Connection, number: int) -> Checkpoint:
    """Returns a checkpoint, within a transaction.

    Raises:
        NotFoundError: There is none of that number.
    """
    rows = connection.execute(select(CHECKPOINTS).where(CHECKPOINTS.c.id == number)).all()
    if not rows:
        raise _no_checkpoint(number)
    return _records(connection, rows)[0]


def checkpoints_of(connection: Connection, wanted: ColumnElement[bool]) -> tuple[Checkpoint, ...]:
    """Returns the checkpoints that fulfil a condition, within a transaction."""
    return _records(
        connection, connection.execute(select(CHECKPOINTS).where(wanted).order_by(CHECKPOINTS.c.id)).all()
    )


def _records(connection: Connection, rows: Sequence[Row[Any]]) -> tuple[Checkpoint, ...]:
    tags: dict[int, list[str]] = {}
    numbers = [row.id for row in rows]
    if numbers:
        chosen = select(TAGS).where(TAGS.c.checkpoint.in_(numbers)).order_by(TAGS.c.tag)
        for row in connection.execute(chosen):
            tags.setdefault(row.checkpoint, []).append(row.tag)
    return tuple(
        of_row(
            Checkpoint,
            row,
            modified=utc(row.modified),
            checked=utc_or_none(row.checked),
            tags=tuple(tags.get(row.id, ())),
            first_seen=utc(row.first_seen),
            seen=utc(row.seen),
        )
        for row in rows
    )


def _wanted(query: Query, roots: Iterable[int]) -> Iterator[ColumnElement[bool]]:
    """Yields the conditions that a query sets."""
    table = CHECKPOINTS.c
    yield table.root.in_(list(roots))
    for word in query.text.split()[:_WORDS]:
        pattern = "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        tagged = select(TAGS.c.checkpoint).where(TAGS.c.tag.like(pattern, escape="\\"))
        yield or_(
            table.path.like(pattern, escape="\\"), table.note.like(pattern, escape="\\"), table.id.in_(tagged)
        )
    for name in ("container", "layout", "optimizer", "seal", "verdict"):
        value = getattr(query, name)
        if value is not None:
            yield table[name].is_(None) if value == "none" else table[name] == value
    for name in ("root", "run"):
        if getattr(query, name) is not None:
            yield table[name] == getattr(query, name)
    if query.tag is not None:
        yield table.id.in_(select(TAGS.c.checkpoint).where(TAGS.c.tag == query.tag))
    if query.status != "any":
        yield table.status == query.status
    if query.readable is not None:
        yield table.unreadable.is_(None) if query.readable else table.unreadable.is_not(None)


def encoded_cursor(value: Any, number: int) -> str:
    """Returns what names the place behind an item: by what it is sorted, and its number."""
    return base64.urlsafe_b64encode(json.dumps([value, number]).encode()).decode().rstrip("=")


def decoded_cursor(cursor: str, text: bool) -> tuple[Any, int]:
    """Returns the place that a cursor names.

    Args:
        cursor: The cursor.
        text: Whether the list is sorted by text.

    Raises:
        UsageError: It is none of this list.
    """
    try:
        value, number = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, RecursionError):
        value, number = None, None
    # Half a character is in no row, and the database takes none.
    if text:
        fits = isinstance(value, str) and value.isprintable()
    else:
        fits = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not fits
        or type(number) is not int
        or abs(number) >= 2**63
        or (type(value) is int and abs(value) >= 2**63)
    ):
        raise UsageError(
            "The cursor is not of this list.", place="cursor", found=cursor[:100], remedy="begin without one"
        )
    return value, number


def _runs(roots: Iterable[int]) -> Select[Any]:
    table = CHECKPOINTS.c
    return (
        select(
            RUNS,
            func.count().label("steps"),
            func.min(table.step).label("first_step"),
            func.max(table.step).label("last_step"),
            bytes_of(table.size).label("size"),
            func.max(table.modified).label("modified"),
        )
        .join(CHECKPOINTS, table.run == RUNS.c.id)
        .where(table.status == "present", RUNS.c.root.in_(list(roots)))
        .group_by(RUNS.c.id)
    )


def _with_standing(connection: Connection, rows: Sequence[Row[Any]]) -> tuple[Run, ...]:
    """Returns runs with where each stands."""
    steps, tagged = _steps_of(connection, [row.id for row in rows])
    return tuple(
        of_row(Run, row, modified=utc(row.modified), **vars(standing(steps[row.id], tagged))) for row in rows
    )


def spare_steps(connection: Connection, run: int, rule: Rule) -> list[int]:
    """Returns the numbers of the checkpoints of a run that a rule doesn't keep, the oldest first."""
    steps, tagged = _steps_of(connection, [run])
    return [step.id for step in spare_of(steps.get(run, ()), tagged, rule)]


def _steps_of(connection: Connection, runs: Sequence[int]) -> tuple[dict[int, list[Row[Any]]], set[int]]:
    """Returns the steps of each run that are present, the oldest first, and which of them have a tag."""
    present = (CHECKPOINTS.c.status == "present") & CHECKPOINTS.c.run.in_(runs)
    steps: dict[int, list[Row[Any]]] = {}
    for step in connection.execute(select(CHECKPOINTS).where(present).order_by(CHECKPOINTS.c.step)):
        steps.setdefault(step.run, []).append(step)
    tags = select(TAGS.c.checkpoint).join(CHECKPOINTS, CHECKPOINTS.c.id == TAGS.c.checkpoint).where(present)
    return steps, set(connection.scalars(tags))


def _reconciled(connection: Connection, root: int, seen: Sequence[Seen]) -> Counter[str]:
    """Writes down what a scan has seen of a root; returns how many are seen, new, changed, gone and unreadable."""
    counts = Counter[str]()
    now = time.time()
    rows = connection.execute(
        select(CHECKPOINTS).where(CHECKPOINTS.c.root == root).order_by(CHECKPOINTS.c.id)
    ).all()
    latest = {row.place: row for row in rows if row.status in ("present", "gone")}
    for entry in {entry.place: entry for entry in seen}.values():
        counts["seen"] += 1
        counts["unreadable"] += entry.columns.get("unreadable") is not None
        before = latest.pop(entry.place, None)
        values = {
            "size": entry.size, "modified": entry.modified, "print": entry.print, "proof": entry.proof, "seen": now,
            "status": "present", **_OPEN, **entry.columns,
        }  # fmt: skip
        same = before is not None and before.print == entry.print
        if before is not None and (same or before.unreadable is not None):
            if same:
                values = _kept(values, before)
            connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.id == before.id).values(**values))
            continue
        path = shown(entry.place)
        name = path.rpartition("/")[2]
        statement = CHECKPOINTS.insert().values(
            root=root, place=entry.place, path=path, name=name, first_seen=now, **values
        )
        number = connection.execute(statement).lastrowid
        counts["new" if before is None else "changed"] += 1
        if before is not None:
            old = update(CHECKPOINTS).where(CHECKPOINTS.c.id == before.id)
            connection.execute(old.values(status="changed", replaced_by=number))
    gone = [row.id for row in latest.values() if row.status == "present"]
    counts["gone"] += len(gone)
    for number in gone:
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.id == number).values(status="gone"))
    return counts


_JUST_SEALED = "just sealed"
"""Stands for the manifests of a checkpoint that a job has sealed since a scan last wrote it down."""


def _kept(values: dict[str, Any], before: Row[Any]) -> dict[str, Any]:
    """Returns a row's values with what jobs have found of the same files and looking at them doesn't show."""
    if values["digest"] is None:
        values = {**values, "digest": before.digest}
    if before.seal == "damaged" and values["proof"] == before.proof:
        values = {**values, "seal": "damaged"}
    if before.proof == _JUST_SEALED and values["seal"] == "unsealed":
        # Whoever looked may have begun before it was; the next look tells.
        values = {**values, "seal": "sealed"}
    return values


def _group_runs(connection: Connection, root: int) -> None:
    """Joins checkpoints of one folder into runs: those of the same parameters and optimizer, at different steps."""
    table = CHECKPOINTS.c
    rows = connection.execute(
        select(CHECKPOINTS).where(table.root == root, table.status == "present", table.step.is_not(None))
    ).all()
    groups: dict[tuple[Any, ...], list[Row[Any]]] = {}
    for row in rows:
        key = run_key(row.place, row._asdict())
        if key is not None:
            groups.setdefault(key, []).append(row)
    for key, steps in groups.items():
        if len({row.step for row in steps}) < 2:
            continue
        numbers = {row.run for row in steps if row.run is not None}
        number = min(numbers) if numbers else _new_run(connection, root, key[0])
        for row in steps:
            if row.run != number:
                connection.execute(update(CHECKPOINTS).where(table.id == row.id).values(run=number))


def _new_run(connection: Connection, root: int, place: bytes) -> int:
    path = shown(place)
    values = {"root": root, "place": place, "path": path, "name": path.rpartition("/")[2]}
    number: int = connection.execute(RUNS.insert().values(**values)).lastrowid
    return number


def subjects_of(connection: Connection, job: int) -> tuple[int, ...]:
    """Returns the numbers of the checkpoints that a job is about, in order, within a transaction."""
    chosen = select(SUBJECTS.c.checkpoint).where(SUBJECTS.c.job == job).order_by(SUBJECTS.c.position)
    return tuple(connection.execute(chosen).scalars())


def learned(connection: Connection, job: Job, result: Any) -> None:
    """Writes down what a job has found of its checkpoints, within the transaction that ends it."""

    def note(number: int, **values: Any) -> None:
        connection.execute(update(CHECKPOINTS).where(CHECKPOINTS.c.id == number).values(**values))

    if job.kind == "check":
        faults = any(checkpoint["faults"] for checkpoint in result["checkpoints"])
        sealed = all(checkpoint["manifest"] for checkpoint in result["checkpoints"])
        seal: dict[str, Any] = {"seal": "damaged"} if faults else {"seal": "sealed"} if sealed else {}
        note(job.subjects[0], checked=None if faults else time.time(), **seal)
    elif job.kind == "seal":
        note(job.subjects[0], seal="sealed", proof=_JUST_SEALED)
    elif job.kind == "doctor":
        for number, result_of_one in zip(job.subjects, result["by_subject"], strict=True):
            if result_of_one["findings"]:
                note(number, verdict="findings")
            elif number == job.subjects[0] != job.subjects[-1]:
                # Nothing stood before the first of several: what was found with its own earlier step still holds.
                unseen = and_(CHECKPOINTS.c.id == number, CHECKPOINTS.c.verdict.is_(None))
                connection.execute(update(CHECKPOINTS).where(unseen).values(verdict="clean"))
            else:
                note(number, verdict="clean")
    elif job.kind == "convert" and result.get("report") and result["report"]["source_digest"]:
        note(job.subjects[0], digest=result["report"]["source_digest"])
