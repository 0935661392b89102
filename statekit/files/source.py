"""Reads the files of a checkpoint: the one place that opens them, drawing on the job's budget.

A file is a regular one or refused, without waiting for a FIFO's writer; it is opened when it is first read, read at any
place by any thread, and never mapped: a file that shrinks is an error and not a signal. What lies outside of it is
refused before anything is allocated, and so is what a link out of the checkpoint leads to. Input: the paths or
addresses that a user names, and names that a container finds there; output: bytes, or an error that says which file and
byte.

Two libraries read files by themselves, after what they will meet has been checked here: tensorstore reads OCDBT
databases (formats/zarr/stores.py), and the safetensors library proves headers (files/safetensors.py). h5py, zipfile
and zstandard read through `as_file`.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
from blake3 import blake3

from statekit.budget import Account, Budget
from statekit.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    RefusedError,
    StatekitError,
    UsageError,
    nearest,
)
from statekit.files.ahead import ReadAhead, joined
from statekit.files.tree import (
    STORES,
    AnyPlace,
    Facts,
    Place,
    StoredPlace,
    absolute,
    copying,
    local_path,
    not_written,
    shown_address,
)
from statekit.pipeline import empty, working
from statekit.tensors.tensor import Array
from statekit.tensors.tree import going_over

MOST_OPEN = 64
"""Files of one checkpoint that are open at once: a run of a thousand ranks writes thousands."""
_DIGESTED_AT_ONCE = 2**20
_READ_AT_ONCE = 2**23
_FEW_RUNS = 3
"""Requests for the counts of one file that are few: with those that open it they stay within `2 + 4 x files`."""
_FEW, _BROUGHT = 2**16, 2**26
"""Bytes that a first read of a store brings anyway, and that are brought at once of what is held."""


class Source(Protocol):
    """Bytes that can be read at any place by any thread: a file, a part of one, or a value in a store."""

    @property
    def place(self) -> str:
        """Where they are, for messages."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Fills a byte buffer from byte `start` on.

        Raises:
            CorruptError: There are fewer.
            UsageError: The file has been closed.
        """

    def read(self, start: int, count: int) -> Array:
        """Reads `count` bytes from byte `start` on: (count,) uint8, writable.

        Raises:
            CorruptError: There are fewer.
            UsageError: The file has been closed.
        """

    @property
    def account(self) -> Account:
        """What reading it draws on."""


def hold(source: Source, start: int, count: int, what: str) -> None:
    """Takes the bytes at `start` from the job's budget, to hold them.

    Raises:
        BudgetError: That is more than the job may hold.
    """
    source.account.hold(count, what, byte_of(source, start))


def byte_of(source: Source, start: int) -> str:
    """Says which byte of which file something is, for messages."""
    if isinstance(source, Part):
        return byte_of(source.whole, source.start + start)
    return f"byte {start} of {source.place}"


def short(source: Source, start: int, count: int, found: str = "") -> CorruptError:
    """Makes the error for bytes that a source doesn't have, by its size or as it was `found`."""
    return CorruptError(
        "A file ends before the data it declares.",
        place=byte_of(source, start),
        expected=f"{count} bytes",
        found=found or f"{max(0, source.size - start)} bytes, {source.size} in all",
        remedy="the file is cut off, or changed while it was read: copy it again",
    )


def require(source: Source, start: int, count: int) -> None:
    """Compares a run of bytes with a source's size.

    Raises:
        CorruptError: It doesn't lie within.
    """
    if start < 0 or count < 0 or start + count > source.size:
        raise short(source, start, count)


def record(source: Source, start: int, count: int, limit: int | None, what: str) -> bytes:
    """Reads a header, an index or a document that is held: bytes that the job's budget is asked for.

    Args:
        source: Where it lies.
        start: Its first byte.
        count: Its size in bytes.
        limit: The most that its format allows; None if only the budget limits it.
        what: What it is, as an error begins: `The directory of a zip archive`.

    Raises:
        CorruptError: The source ends before.
        RefusedError: It is larger than `limit`, or (BudgetError) more than the job may hold.
    """
    require(source, start, count)
    if limit is not None:
        check_size(source, start, count, limit, what)
    hold(source, start, count, what)
    if count <= _READ_AT_ONCE:
        bring(source, [(start, count)] if count > _FEW else [])
        return bytes_at(source, start, count)
    whole = io.BytesIO()  # which gives its bytes away without a copy
    for at in range(0, count, _READ_AT_ONCE):
        if (
            at % _BROUGHT == 0
        ):  # these bytes and no others, however much a reader who goes on like this would get
            bring(source, [(start + at, min(_BROUGHT, count - at))])
        whole.write(source.read(start + at, min(_READ_AT_ONCE, count - at)).data)
    return whole.getvalue()


def check_size(source: Source, start: int, count: int, limit: int, what: str) -> None:
    """Compares the size of something at a place in a source with the most that it may have.

    Raises:
        RefusedError: It is larger.
    """
    if count > limit:
        raise RefusedError(
            f"{what} is too large.",
            place=byte_of(source, start),
            expected=f"at most {limit} bytes",
            found=f"{count} bytes",
        )


def is_stored(source: Source) -> bool:
    """Tells whether bytes lie in a store, where each read takes a request."""
    while isinstance(source, Part):
        source = source.whole
    return isinstance(source, File) and isinstance(source.path, StoredPlace)


def bring(source: Source, runs: Iterable[tuple[int, int]]) -> None:
    """Brings runs of bytes that will be read, first byte and count of each, from a store at once; no others."""
    while isinstance(source, Part):
        start = source.start
        source, runs = source.whole, [(start + at, count) for at, count in runs]
    if isinstance(source, File) and isinstance(source.path, StoredPlace):
        tree = source.path.tree
        if isinstance(tree, ReadAhead):
            tree.bring(cast(Facts, source.identity), runs)


@contextmanager
def expecting(place: Place, count: int | None) -> Iterator[None]:
    """Says how many bytes a block reads of a checkpoint, of which a store is asked for no more; None: any number."""
    tree = place.tree if isinstance(place, StoredPlace) else None
    if isinstance(tree, ReadAhead):
        tree.expect(count)
    try:
        yield
    finally:
        if isinstance(tree, ReadAhead):
            tree.expect(None)


class Counts:
    """Small values of a file, as optimizers' counts are, which lie between its tensors: who reads one reads the others.

    A job that is content with few of them leaves them where they are if each takes a request of its own.

    Args:
        source: The file.
        runs: First byte and count of each.
    """

    def __init__(self, source: Source, runs: Iterable[tuple[int, int]]) -> None:
        self._source, self._runs = source, list(runs) if is_stored(source) else []
        budget = source.account.budget
        if budget.few_counts and len(joined(self._runs, source.size)) > _FEW_RUNS:
            budget.counts_apart, self._runs = True, []

    def bring(self) -> None:
        """Brings them, once."""
        runs, self._runs = self._runs, []
        if runs:
            bring(self._source, runs)


def bring_scattered(source: Source) -> None:
    """Brings a file whose headers lie among its values; of a larger one than is kept, what lies near together."""
    if source.size <= _BROUGHT:
        bring(source, [(0, source.size)])
        return
    while isinstance(source, Part):
        source = source.whole
    if isinstance(source, File) and isinstance(source.path, StoredPlace):
        tree = source.path.tree
        if isinstance(tree, ReadAhead):
            tree.expect_scattered(cast(Facts, source.identity))


def bytes_at(source: Source, start: int, count: int) -> bytes:
    """Reads a few bytes.

    Raises:
        CorruptError: There are fewer.
    """
    return source.read(start, count).tobytes()


def first_bytes(path: Place, count: int, files: Files | None = None) -> bytes:
    """Reads the first bytes of a file, fewer where it has fewer; for telling formats apart.

    Args:
        path: The file.
        count: How many bytes.
        files: Those of the checkpoint that it belongs to, if it is being opened.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It can't be read, or is no regular file.
    """
    with Files() as opened:
        source = (files or opened).source(path)
        return bytes_at(source, 0, min(count, source.size))


def last_bytes(path: Place, count: int) -> bytes:
    """Reads the last bytes of a file, fewer where it has fewer; for telling formats apart.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It can't be read, or is no regular file.
    """
    with Files() as files:
        source = files.source(path)
        return bytes_at(source, max(0, source.size - count), min(count, source.size))


def read_small(path: Place, files: Files | None = None) -> bytes:
    """Reads a small file as a whole.

    Args:
        path: The file.
        files: The job's files, whose budget holds the bytes.

    Raises:
        NotFoundError: No such file.
        FormatError: It can't be read.
        RefusedError: Not a regular file, or (BudgetError) more than the job may hold.
    """
    with Files() as opened:
        source = (files or opened).source(path)
        return record(source, 0, source.size, None, "A file")


@contextmanager
def reading(place: object) -> Iterator[None]:
    """Turns an OSError into an error that says where and why.

    Raises:
        NotFoundError: There is no such file.
        FormatError: It can't be read.
    """
    try:
        yield
    except StatekitError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError("A file is missing.", place=place) from None
    except ValueError:  # a NUL in it, or half a character
        raise NotFoundError("No file can have such a name.", place=place) from None
    except OSError as error:
        raise FormatError(
            f"A file of the checkpoint can't be read: {error.strerror or error}.",
            place=place,
            found=errno.errorcode.get(error.errno or 0, type(error).__name__),
            remedy="check its permissions and its disk",
        ) from error


@contextmanager
def looking(place: Place) -> Iterator[None]:
    """Turns whatever the system refuses to a container into an error of ours: a look at a name, a list of names.

    Python 3.14's `Path.is_file` takes what may not be looked at for absent; so a folder is entered first.

    Raises:
        NotFoundError, FormatError: As `reading`, of what was looked at.
    """
    try:
        if isinstance(place, Path) and os.path.isdir(place):
            os.stat(os.path.join(place, os.curdir))
        with going_over(place):
            yield
    except StatekitError:
        raise
    except OSError as error:
        with reading(error.filename or place):
            raise


def listing(folder: AnyPlace, ends: str = "") -> list[AnyPlace]:
    """Returns what is in a folder under a name with such an end, sorted; nothing of what is no folder.

    `Path.glob` passes over what it can't list.

    Raises:
        FormatError: It can't be listed.
    """
    if isinstance(folder, StoredPlace):
        return [entry for entry in cast(list[AnyPlace], folder.entries()) if entry.name.endswith(ends)]
    with reading(folder):
        try:
            return sorted(folder / name for name in os.listdir(folder) if name.endswith(ends))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return []


def not_there(path: Place) -> NotFoundError:
    """Returns the error that says that nothing is at a path, with the name beside it that was probably meant."""
    missing = next((top for top in reversed(path.parents) if not top.exists()), path)
    try:
        siblings = {entry.name: entry for entry in listing(missing.parent)}
    except StatekitError:  # it may not be listed
        siblings = {}
    near = nearest(missing.name, siblings)
    return NotFoundError(
        "There is no such file or folder.",
        place=path,
        found=None if missing == path else f"there is no {missing}",
        remedy=f"did you mean {siblings[near]}?" if near else "check the path",
    )


def walked(
    folder: AnyPlace, *, bottom_up: bool = False, links: bool = False
) -> Iterator[tuple[AnyPlace, list[str], list[str]]]:
    """Walks a folder as `os.walk` does, which passes over what it can't list.

    Args:
        folder: The folder.
        bottom_up: Whether what is in a folder comes before it.
        links: Whether links to folders are followed.

    Raises:
        FormatError: A folder can't be listed.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # gone meanwhile, so that nothing is in it
            with reading(error.filename):
                raise error

    if isinstance(folder, StoredPlace):
        yield from cast(Iterator[tuple[AnyPlace, list[str], list[str]]], folder.walked())
        return
    for top, folders, names in os.walk(folder, topdown=not bottom_up, onerror=fail, followlinks=links):
        yield cast(AnyPlace, Path(top)), folders, names


@dataclass(frozen=True)
class Links:
    """The links of one checkpoint, and the one rule, for all formats, of which are followed.

    A symbolic link may lead from one place of a checkpoint to another. Out of it, it may lead within one repository of
    Hugging Face's cache, whose snapshots are made of links, or where the user said so; no other is followed. The path
    that the user gives may itself be a link, or lie below one: as `latest` does, it says which checkpoint is meant.

    Attributes:
        checkpoint: What is opened: a folder, or a file, whose folder its other files lie in. None for a file that is
            read by itself, as one that the user names.
        follow: Whether the user has said that all are followed.
    """

    checkpoint: Place | None = None
    follow: bool = False
    _inside: set[Path] = field(default_factory=set, repr=False, compare=False)

    def check(self, path: Place) -> None:
        """Refuses a path that leads out of the checkpoint.

        A file in a folder above the checkpoint, where some formats keep what belongs to a run, stays in that folder.

        Raises:
            RefusedError: It does, by a link that isn't followed.
        """
        if not isinstance(path, Path) or not isinstance(self.checkpoint, Path):  # a store has no links
            return
        if self.follow or path == self.checkpoint:
            return
        if path.parent in self._inside and not path.is_symlink():
            return
        root = os.path.realpath(self._folder if _below(path, self._folder) else path.parent)
        real = os.path.realpath(path)
        if _within(real, root):
            if _within(os.path.realpath(path.parent), root):
                self._inside.add(path.parent)
        elif not _of_one_repository(path, real):
            raise RefusedError(
                "A link leads out of the checkpoint.",
                place=_leading_out(path, root),
                expected=f"a file below {root}",
                found=real,
                remedy="if you trust it, --follow-links (in Python follow_links=True) reads what it leads to",
            )

    @cached_property
    def _folder(self) -> Path:
        assert isinstance(self.checkpoint, Path)
        return self.checkpoint if self.checkpoint.is_dir() else self.checkpoint.parent


def _below(path: Path, folder: Path) -> bool:
    """Tells whether a path is written as one below a folder, where either may be relative."""
    return path.is_relative_to(folder) or Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))


def _within(real: str, root: str) -> bool:
    return os.path.commonpath((root, real)) == root


def _of_one_repository(path: Path, real: str) -> bool:
    """Tells whether a path in a snapshot of Hugging Face's cache leads to a blob of the same repository.

    Source: huggingface_hub, "Understand caching": `models--<name>/snapshots/<revision>/<file>` is a link to
    `models--<name>/blobs/<digest>`.
    """
    folder = Path(os.path.realpath(path.parent))
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return False
    return Path(real).parent == snapshots.parent / "blobs"


def _leading_out(path: Path, root: str) -> Path:
    """Returns the link on the way to a path at which the way leaves a folder."""

    def leaves(at: Path) -> bool:
        inside = _within(os.path.realpath(at.parent), root)
        return inside and at.is_symlink() and not _within(os.path.realpath(at), root)

    return next(filter(leaves, (*reversed(path.parents), path)), path)


def _stored_bytes(links: Links, checkpoint: Place) -> tuple[int, int]:
    """Returns how many bytes of a disk the files at a path take, and how many they are, each once.

    What may not be read counts as nothing.
    """
    if isinstance(checkpoint, StoredPlace):
        sizes = [file.size for file in checkpoint.files()]
        return sum(sizes), len(sizes)
    total, count, seen, waiting = 0, 0, set[tuple[int, int]](), [Path(checkpoint)]
    while waiting:
        path = waiting.pop()
        try:
            links.check(path)
            facts = path.stat()
            if (facts.st_dev, facts.st_ino) in seen:
                continue
            seen.add((facts.st_dev, facts.st_ino))
            if stat.S_ISDIR(facts.st_mode):
                waiting += listing(path)
        except (OSError, StatekitError):  # reading it says what is wrong
            continue
        if stat.S_ISREG(facts.st_mode):
            count += 1
            total += min(facts.st_size, 512 * facts.st_blocks)  # the holes of a sparse file explain nothing
    return total, count


class _Descriptor:
    """An open file's number, closed when nobody reads through it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Files:
    """The files of one opened checkpoint, drawing on the budget of its job.

    Each is opened when it is first read, and stays open; of more than `MOST_OPEN` the one that was read least lately
    is closed, and opened again when it is needed, if it is still the same file.

    Args:
        budget: The job's; a new one if this checkpoint is the whole job.
        checkpoint: What is opened, which links may not lead out of; None for a file that is read by itself.
    """

    def __init__(self, budget: Budget | None = None, checkpoint: Place | None = None) -> None:
        self.account = Account(budget)
        self.links = Links(checkpoint, self.account.budget.follow_links)
        if checkpoint is not None:
            measure = functools.partial(_stored_bytes, self.links, checkpoint)
            self.account.budget.stored(f"{absolute(checkpoint)}", measure)
        self._open: OrderedDict[Place, _Descriptor] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False
        self._callbacks: list[Callable[[], None]] = []

    def source(self, path: Place) -> File:
        """Returns a regular file to be read.

        Raises:
            NotFoundError: There is no such file.
            FormatError: It can't be looked at.
            RefusedError: It is a folder, a device, a FIFO or a socket, or lies behind a link out of the checkpoint.
        """
        if isinstance(path, StoredPlace):
            place = _known_file(path)
            self.account.budget.sources.add(str(path))
            return File(path, place.size, place, self)
        local = Path(path)
        with reading(local):
            self.links.check(local)
            facts = local.stat()
        _check_regular(local, facts)
        self.account.budget.sources.add(str(path))
        return File(local, facts.st_size, (facts.st_dev, facts.st_ino), self)

    def fill(self, file: File, start: int, into: memoryview) -> None:
        """Fills a byte buffer from byte `start` of a file on, which has as many bytes."""
        if isinstance(file.path, StoredPlace):
            self._check_open(file)
            with working("read"):
                file.path.tree.read_into(cast(Facts, file.identity), start, into)
            return
        descriptor, done = self.descriptor(file), 0
        while done < len(into):
            with reading(file.path), working("read"):
                got = os.preadv(descriptor.number, [into[done:]], start + done)
            if not got:
                raise short(file, start + done, len(into) - done, f"its end; it had {file.size} bytes before")
            done += got

    def on_close(self, callback: Callable[[], None]) -> None:
        """Has something called before the files are closed: a library that reads through them is closed first."""
        self._callbacks.append(callback)

    def close(self) -> None:
        """Closes all of them for good, and gives back what they held of the budget."""
        while self._callbacks:
            self._callbacks.pop()()
        with self._lock:
            self._closed = True
            self._open.clear()
        self.account.close()

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def descriptor(self, file: File) -> _Descriptor:
        """Returns the open descriptor of a file; it stays open as long as it is referred to.

        Raises:
            UsageError: The files have been closed.
            FormatError: It can't be opened.
            CorruptError: Another file has taken its place.
        """
        with self._lock:
            self._check_open(file)
            descriptor = self._open.get(file.path)
            if descriptor is None:
                descriptor = self._open[file.path] = _opened(file)
                if len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(file.path)
        return descriptor

    def _check_open(self, file: File) -> None:
        if self._closed:
            raise UsageError("A tensor is read after its checkpoint was closed.", place=file.path)


def _known_file(place: StoredPlace) -> Facts:
    """Returns what a store knows of a file."""
    facts = place.facts
    if facts is None:
        raise NotFoundError("A file is missing.", place=place)
    if facts.kind != "file":
        raise RefusedError("This isn't a regular file.", place=place, found=f"a {facts.kind}")
    return facts


def _opened(file: File) -> _Descriptor:
    with reading(file.path):
        descriptor = _Descriptor(os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        facts = os.fstat(descriptor.number)
    _check_regular(Path(file.path), facts)
    if (facts.st_dev, facts.st_ino) != file.identity:
        raise CorruptError(
            "A file was replaced while its checkpoint was read.",
            place=file.path,
            remedy="read a checkpoint to which no program writes",
        )
    return descriptor


def _check_regular(path: Path, facts: os.stat_result) -> None:
    if not stat.S_ISREG(facts.st_mode):
        raise RefusedError("This isn't a regular file.", place=path, found=stat.filemode(facts.st_mode))


@contextmanager
def opening(checkpoint: Place | None = None, budget: Budget | None = None) -> Iterator[Files]:
    """Gives the files of a checkpoint that is being opened; closes them only if that fails.

    Args:
        checkpoint: What is opened, as the user gave it; None for a file that is read by itself.
        budget: The job's.
    """
    files = Files(budget, checkpoint)
    try:
        yield files
    except BaseException:
        files.close()
        raise


@dataclass(frozen=True)
class File:
    """A regular file, read at any place by any thread.

    Attributes:
        path: Where it is.
        size: Its size in bytes, when it was first looked at.
        identity: Which file it is, whatever its name: its device and inode, or what a store knows of it.
        files: Those that it belongs to.
    """

    path: Place
    size: int
    identity: Hashable
    files: Files

    @property
    def place(self) -> str:
        return str(self.path)

    def read_into(self, start: int, into: memoryview) -> None:
        require(self, start, len(into))
        self.files.fill(self, start, into)
        budget = self.files.account.budget
        budget.read(len(into))
        if (tell := budget.listeners.get(self.identity)) is not None:
            tell(start, into)

    def read(self, start: int, count: int) -> Array:
        return filled(self, start, count)

    @property
    def account(self) -> Account:
        return self.files.account


def filled(source: Source, start: int, count: int) -> Array:
    """Reads bytes into a new array: how a source's `read` follows from its `read_into`.

    Raises:
        CorruptError: There are fewer.
    """
    require(source, start, count)
    whole = empty((count,), np.uint8)
    source.read_into(start, whole.data)
    return whole


def source_digest(source: Source) -> str:
    """Returns the BLAKE3 digest of all bytes: 64 lowercase hexadecimal digits."""
    hasher, block = blake3(), np.empty(min(source.size, _DIGESTED_AT_ONCE), np.uint8)
    for start in range(0, source.size, _DIGESTED_AT_ONCE):
        into = block.data[: source.size - start]
        source.read_into(start, into)
        hasher.update(into)
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Part:
    """A run of bytes of a source, read as if it were a file."""

    whole: Source
    start: int
    size: int

    @property
    def place(self) -> str:
        return self.whole.place

    def read_into(self, start: int, into: memoryview) -> None:
        require(self, start, len(into))
        self.whole.read_into(self.start + start, into)

    def read(self, start: int, count: int) -> Array:
        require(self, start, count)
        return self.whole.read(self.start + start, count)

    @property
    def account(self) -> Account:
        return self.whole.account


@dataclass(frozen=True)
class Held:
    """Bytes that are in memory already, read as if they were a file's."""

    data: bytes | memoryview
    place: str
    account: Account = field(default_factory=Account, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.data)

    def read_into(self, start: int, into: memoryview) -> None:
        require(self, start, len(into))
        into[:] = memoryview(self.data)[start : start + len(into)]

    def read(self, start: int, count: int) -> Array:
        return filled(self, start, count)


class _AsFile(io.RawIOBase):
    """A source as a file that can only be read."""

    def __init__(self, source: Source) -> None:
        self._source, self._at = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}
        self._at = int(base[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._source.size - self._at))
        if count:
            self._source.read_into(self._at, view[:count])
        self._at += count
        return count


def as_file(source: Source) -> io.RawIOBase:
    """Returns a source as a file object, for libraries that read one. It has a position: one reader at a time."""
    return _AsFile(source)


def target_place(target: str | os.PathLike[str] | Place) -> Place:
    """Returns the place of a target that a user names; what may be there is its writer's to look at.

    Raises:
        UsageError: It is empty, or the address of something that isn't written.
    """
    if isinstance(target, str) and target.startswith("hf://"):
        raise not_written(shown_address(target))
    if isinstance(target, str) and target.partition("://")[0] not in STORES:
        return local_path(target)
    return checkpoint_place(target)


def checkpoint_place(source: str | os.PathLike[str] | Place) -> Place:
    """Returns the place that a user names by a path or an address, or a place itself.

    Raises:
        UsageError: It is empty, or the address of something that isn't read.
    """
    if isinstance(source, StoredPlace):
        return source
    if not isinstance(source, str):
        return Path(source)
    scheme, separator, _ = source.partition("://")
    if "/" in scheme:  # a name with :// in it
        return Path(source)
    if not separator or scheme == "file":
        return local_path(source)
    if scheme in STORES:
        from statekit.files.store import in_store

        return in_store(source)
    if scheme == "hf":
        from statekit.files.hub import in_hub

        return in_hub(source)
    raise UsageError(
        "Checkpoints aren't read from there.",
        place=shown_address(source),
        expected="a path of this machine, or s3://, gs://, az:// or hf://",
        remedy=f"copy it first: {copying(shown_address(source))}",
    )
