"""Key-value stores that zarr arrays lie in: a folder, or an OCDBT database in a folder.

A store knows keys and bytes only. Whatever a checkpoint says about where its arrays lie, a store reads below its own
folder and nowhere else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, UsageError

_PROBE = 8 * 2**20
"""An OCDBT value up to this size is read at once; a larger one in spans. In bytes."""

HEADER_BYTES = 2**16
"""The largest array header that is read, in bytes."""

_CACHE = 64 * 2**20
"""How many bytes of an OCDBT database's inner nodes are kept."""

_URL_COPIES = {"gs": "gcloud storage cp -r {} .", "s3": "aws s3 cp --recursive {} checkpoint"}


@dataclass(frozen=True)
class Value:
    """Stored bytes that haven't been read yet.

    Attributes:
        size: Their number.
        read_at: Reads `count` bytes at an offset; what lies outside is a CorruptError.
        place: Where they are, for messages.
    """

    size: int
    read_at: Callable[[int, int], bytes]
    place: str


class Store(Protocol):
    """Bytes by key. Keys are relative, `/`-joined."""

    @property
    def place(self) -> str:
        """Where the store is, for messages."""

    def value(self, key: str) -> Value | None:
        """Returns the value of a key, or None if there is none."""

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads many small values at once; None where there is none.

        Raises:
            RefusedError: One is larger than `HEADER_BYTES`.
        """


def local_path(source: str) -> Path:
    """Returns the path of a checkpoint named on the command line.

    Raises:
        UsageError: It is the address of something that isn't on this machine.
    """
    scheme, separator, _ = source.partition("://")
    if not separator:
        return Path(source)
    if scheme == "file":
        return Path(source.removeprefix("file://"))
    copy = _URL_COPIES.get(scheme.lower())
    raise UsageError(
        "Checkpoints are read from this machine's files.",
        place=source,
        remedy=f"copy it first: {copy.format(source)}" if copy else "copy it to a local folder first",
    )


def read_whole(value: Value, limit: int = HEADER_BYTES) -> bytes:
    """Reads a small value.

    Raises:
        RefusedError: It is larger than `limit` bytes.
    """
    _check_small(value.size, limit, value.place)
    return value.read_at(0, value.size)


def _check_small(size: int, limit: int, place: str) -> None:
    if size > limit:
        raise RefusedError(
            "A header is too large to be one.",
            place=place,
            expected=f"at most {limit} bytes",
            found=f"{size} bytes",
        )


def joined(values: Sequence[Value], place: str) -> Value:
    """Returns several values, one after the other, as one."""
    if len(values) == 1:
        return values[0]

    def read_at(offset: int, count: int) -> bytes:
        parts, start = [], 0
        for value in values:
            low, high = max(offset, start), min(offset + count, start + value.size)
            if low < high:
                parts.append(value.read_at(low - start, high - low))
            start += value.size
        return b"".join(parts)

    return Value(sum(value.size for value in values), read_at, place)


def part(value: Value, start: int, size: int) -> Value:
    """Returns `size` bytes of a value as a value of their own."""
    return Value(size, lambda offset, count: value.read_at(start + offset, count), value.place)


def checked_key(key: str, place: str) -> list[str]:
    """Returns the parts of a relative key.

    Raises:
        RefusedError: It is absolute, empty, a URL, or leads out of its folder.
    """
    parts = key.split("/")
    if "\0" in key or any(p in ("", ".", "..") for p in parts) or len(key) > 4096 or "\\" in key:
        raise RefusedError(
            "A checkpoint names a file outside its own folder.",
            place=place,
            expected="a relative path below the checkpoint",
            found=repr(key[:200]),
            remedy="don't use this checkpoint unless you know who made it",
        )
    return parts


@dataclass(frozen=True)
class FolderStore:
    """Files below a folder. A symbolic link that leads out of it is refused."""

    root: str

    @staticmethod
    def of(folder: Path) -> FolderStore:
        """Returns the store of a folder, which may itself be reached through links."""
        return FolderStore(os.path.realpath(folder))

    @property
    def place(self) -> str:
        return self.root

    def value(self, key: str) -> Value | None:
        path = self._inside(key)
        try:
            facts = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise FormatError(
                "A file of the checkpoint can't be read.", place=path, found=str(error)
            ) from error
        if not stat.S_ISREG(facts.st_mode):
            raise _irregular(path)
        return Value(facts.st_size, lambda offset, count: _pread(path, offset, count), path)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        values = map(self.value, keys)
        return [None if value is None else read_whole(value) for value in values]

    def _inside(self, key: str) -> str:
        path = self.root
        for name in checked_key(key, self.root):
            path = f"{path}/{name}"
            if os.path.islink(path):
                _check_link(self.root, f"{self.root}/{key}")
                return f"{self.root}/{key}"
        return path


def _check_link(root: str, path: str) -> None:
    real = os.path.realpath(path)
    if os.path.commonpath((root, real)) != root:
        raise RefusedError(
            "A symbolic link leads out of the checkpoint.",
            place=path,
            expected=f"a file below {root}",
            found=real,
            remedy="if you trust it, copy the checkpoint with its links resolved: cp -rL",
        )


def _pread(path: str, offset: int, count: int) -> bytes:
    """Opens, reads and closes: no file stays open behind a tensor."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            data = os.pread(file, count, offset)
            while len(data) < count and (more := os.pread(file, count - len(data), offset + len(data))):
                data += more
        finally:
            os.close(file)
    except OSError as error:
        raise FormatError("A file of the checkpoint can't be read.", place=path, found=str(error)) from error
    if len(data) != count:
        raise CorruptError(
            "A file ends too early.",
            place=path,
            expected=f"{count} bytes at {offset}",
            found=f"{len(data)} bytes",
            remedy="the file is cut off, or changed while it was read; copy it again",
        )
    return data


@dataclass(frozen=True)
class OcdbtStore:
    """An OCDBT database, read through tensorstore."""

    place: str
    database: Any

    @staticmethod
    def of(folder: Path) -> OcdbtStore:
        """Opens the database whose `manifest.ocdbt` lies in a folder.

        Raises:
            RefusedError: A link in it leads out of the folder, or a file is none that can be read like one.
            CorruptError: tensorstore can't open it.
        """
        import tensorstore as ts

        root = os.path.realpath(folder)
        _check_files(root)
        context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE}})
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
        try:
            return OcdbtStore(root, ts.KvStore.open(spec, context=context).result())
        except (ValueError, OSError) as error:
            raise _damaged(root, error) from error

    def value(self, key: str) -> Value | None:
        checked_key(key, self.place)
        place = f"{key} in {self.place}"
        try:
            if self._has_byte(key, _PROBE):
                size = self._size(key)
                return Value(size, lambda offset, count: self._span(key, offset, count), place)
            found = self.database.read(key).result()
            data = bytes(found.value)
            if found.state != "missing" and not data:  # so reads a value whose data file is gone
                raise ValueError("The value is empty, or the file it lies in is missing.")
        except (ValueError, OSError) as error:
            raise _damaged(place, error) from error
        return None if not data else Value(len(data), lambda o, n: data[o : o + n], place)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        for key in keys:
            checked_key(key, self.place)
        try:
            reads = [self.database.read(key) for key in keys]  # all under way at once
            found = [read.result() for read in reads]
        except (ValueError, OSError) as error:
            raise _damaged(self.place, error) from error
        data = [None if read.state == "missing" else bytes(read.value) for read in found]
        for key, header in zip(keys, data, strict=True):
            if header is not None:
                _check_small(len(header), HEADER_BYTES, f"{key} in {self.place}")
        return data

    def keys(self) -> list[str]:
        """Returns all keys."""
        try:
            return sorted(key.decode("utf-8", "surrogateescape") for key in self.database.list().result())
        except (ValueError, OSError) as error:
            raise _damaged(self.place, error) from error

    def _has_byte(self, key: str, offset: int) -> bool:
        try:
            return bool(self.database.read(key, byte_range=slice(offset, offset + 1)).result().value)
        except ValueError as error:
            if "OUT_OF_RANGE" in str(error):
                return False
            raise

    def _size(self, key: str) -> int:
        """Finds the size of a large value, which tensorstore doesn't tell, by asking for single bytes."""
        low, high = _PROBE, 2 * _PROBE
        while self._has_byte(key, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has_byte(key, middle) else (low, middle)
        return high

    def _span(self, key: str, offset: int, count: int) -> bytes:
        try:
            data = bytes(self.database.read(key, byte_range=slice(offset, offset + count)).result().value)
            if len(data) != count:
                raise ValueError(f"{len(data)} of {count} bytes at {offset}")
            return data
        except (ValueError, OSError) as error:
            raise _damaged(f"{key} in {self.place}", error) from error


def _check_files(root: str) -> None:
    """Checks what tensorstore, which reads whatever is there, will find below a folder."""
    for folder, folders, files in os.walk(root):
        for path in (f"{folder}/{name}" for name in (*folders, *files)):
            if os.path.islink(path):
                _check_link(root, path)
            elif not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe would be waited for
                raise _irregular(path)


def _irregular(path: str) -> RefusedError:
    return RefusedError("A checkpoint's file is no regular file.", place=path)


def _damaged(place: str, error: Exception) -> CorruptError:
    return CorruptError(
        "The OCDBT database can't be read.",
        place=place,
        found=str(error).splitlines()[0][:400],
        remedy="the checkpoint is incomplete or damaged; ocdbt.process_* folders belong to it and must be copied too",
    )


def open_store(folder: Path) -> FolderStore | OcdbtStore:
    """Opens the store of an Orbax item: the OCDBT database where there is one, else the folder itself.

    Raises:
        NotFoundError: There is no such folder.
    """
    if not folder.is_dir():
        raise NotFoundError("There is no such folder.", place=folder)
    return OcdbtStore.of(folder) if (folder / "manifest.ocdbt").exists() else FolderStore.of(folder)
