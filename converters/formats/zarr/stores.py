"""Key-value stores that zarr arrays lie in: a folder, or an OCDBT database in a folder.

A store knows keys and bytes only. Whatever a checkpoint says about where its arrays lie, a store reads below its own
folder and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from statekit.budget import Account
from statekit.errors import CorruptError, NotFoundError, RefusedError
from statekit.files.source import Files, Held, Source, filled, hold, record, require, walked
from statekit.files.tree import Place, StoredPlace, address_of, checked_key
from statekit.pipeline import threads
from statekit.tensors.tensor import Array

_PROBE = 8 * 2**20
"""An OCDBT value up to this size is read at once; a larger one in spans. In bytes."""

_SMALL = 2**16
"""Values of OCDBT up to this size are read many at once: that takes a fifth of the time of one after the other."""

_AT_ONCE = 256
"""Headers that are looked for at once."""

_JOINED: Mapping[str, Any] = {
    "experimental_read_coalescing_threshold_bytes": 2**16,
    "experimental_read_coalescing_merged_bytes": 2**22,
    "experimental_read_coalescing_interval": "2ms",
}
"""Values of a database in a store that lie side by side come in one request, which waits a little for the next.

The header of each array is a value of its own. Source: tensorstore 0.1.86, driver `ocdbt`.
"""
_CACHED_PART = 8
"""The part of the bytes that a job may hold which an OCDBT database's inner nodes are kept in: 64 MiB by default."""
_MANIFEST = "manifest.ocdbt"
_DRIVERS = {"s3": "s3", "gs": "gcs"}
"""The drivers of tensorstore, by the scheme of an address."""


class Store(Protocol):
    """Bytes by key. Keys are relative, `/`-joined."""

    @property
    def place(self) -> str:
        """Where the store is, for messages."""

    @property
    def account(self) -> Account:
        """What reading it draws on."""

    def value(self, key: str) -> Source | None:
        """Returns the value of a key, or None if there is none."""

    def values(self, keys: Sequence[str]) -> Iterator[Source | None]:
        """Yields the values of many keys in their order; small ones are looked for at once."""

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads many small values at once; None where there is none.

        Raises:
            BudgetError: They are more than the job may hold.
        """


def read_whole(value: Source) -> bytes:
    """Reads a header or a document as a whole.

    Raises:
        BudgetError: It is more than the job may hold.
    """
    return record(value, 0, value.size, None, "A header")


def _checked_name(key: str, place: str) -> None:
    """Refuses a key of a database that is no relative key, or no text."""
    checked_key(key, place)
    if not key.isascii() and any("\ud800" <= letter <= "\udfff" for letter in key):
        raise RefusedError(
            "A checkpoint names what no database can hold.", place=place, found=repr(key[:200])
        )


@dataclass(frozen=True)
class FolderStore:
    """Files below a folder."""

    folder: Place
    files: Files = field(repr=False, compare=False)

    @property
    def place(self) -> str:
        return str(self.folder)

    @property
    def account(self) -> Account:
        return self.files.account

    def value(self, key: str) -> Source | None:
        try:
            return self.files.source(self.folder / "/".join(checked_key(key, self.place)))
        except NotFoundError:
            return None

    def values(self, keys: Sequence[str]) -> Iterator[Source | None]:
        return map(self.value, keys)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        values = map(self.value, keys)
        return [None if value is None else read_whole(value) for value in values]


@dataclass(frozen=True)
class OcdbtStore:
    """An OCDBT database, read through tensorstore.

    Its reads of a store take no condition. The file that names all others is the only one that is ever written anew,
    so that it is compared with the listing after each read.
    """

    place: str
    database: Any
    files: Files = field(repr=False, compare=False)
    manifest: Place | None = field(default=None, repr=False, compare=False)
    _sizes: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def account(self) -> Account:
        return self.files.account

    @staticmethod
    def of(folder: Place, files: Files) -> OcdbtStore:
        """Opens the database whose `manifest.ocdbt` lies in a folder; `files` has the job's budget.

        Raises:
            RefusedError: A link in it leads out of the folder, or a file is none that can be read like one.
            CorruptError: tensorstore can't open it.
        """
        import tensorstore as ts

        from statekit.converters.formats.zarr.ocdbt import check_database

        base, joined = _driver_of(folder), _JOINED
        if base is None:
            _check_files(folder, files)
            base, joined = {"driver": "file", "path": f"{os.path.realpath(folder)}/"}, {}
        cached, limit = files.account.budget.limits.held // _CACHED_PART, {"limit": threads()}
        context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": cached},
                "file_io_concurrency": limit,
                "data_copy_concurrency": limit,
            }
        )
        spec = {"driver": "ocdbt", "base": base, **joined}
        check_database(folder, files)
        try:
            database = ts.KvStore.open(spec, context=context).result()
            return OcdbtStore(str(folder), database, files, folder / _MANIFEST)
        except (ValueError, OSError) as error:
            raise _damaged(str(folder), error) from error

    def _recheck(self) -> None:
        """Makes sure that a database in a store is the one that was listed."""
        if isinstance(self.manifest, StoredPlace) and self.manifest.facts is not None:
            # Only a tree that keeps the bytes it has read can compare them again.
            recheck = getattr(self.manifest.tree, "recheck", None)
            if recheck is not None:
                recheck(self.manifest.facts)

    def value(self, key: str) -> Source | None:
        _checked_name(key, self.place)
        value = self._value(key)
        self._recheck()
        return value

    def _failed(self, key: str, error: Exception) -> CorruptError:
        """Returns the error of a value that can't be read; raises another if the database was changed."""
        self._recheck()
        return _damaged(self._place(key), error)

    def _value(self, key: str) -> Source | None:
        try:
            if key in self._sizes or self._has_byte(key, _PROBE):
                if key not in self._sizes:
                    self._sizes[key] = self._size(key)
                return _Spans(self, key, self._sizes[key])
            return self._held(key, self.database.read(key).result())
        except (ValueError, OSError) as error:
            raise self._failed(key, error) from error

    def values(self, keys: Sequence[str]) -> Iterator[Source | None]:
        for key in keys:
            _checked_name(key, self.place)
        if len(keys) < 2:
            yield from map(self.value, keys)
            return
        byte = slice(_SMALL, _SMALL + 1)
        probes = [self.database.read(key, byte_range=byte) for key in keys]  # all under way at once
        reads = list[Any]()
        for key, probe in zip(keys, probes, strict=True):
            try:
                reads.append(None if _is_there(probe) else self.database.read(key))
            except (ValueError, OSError) as error:
                raise self._failed(key, error) from error
        for key, read in zip(keys, reads, strict=True):
            if read is None:
                yield self.value(key)
                continue
            try:
                value = self._held(key, read.result())
            except (ValueError, OSError) as error:
                raise self._failed(key, error) from error
            if key == keys[-1]:
                self._recheck()
            yield value

    def _place(self, key: str) -> str:
        return f"{key} in {self.place}"

    def _held(self, key: str, result: Any) -> Held | None:
        """Returns a value that was read; raises ValueError if it is empty, as one reads whose data file is gone."""
        data = bytes(result.value)
        if result.state != "missing" and not data:
            raise ValueError("The value is empty, or the file it lies in is missing.")
        self.files.account.read(len(data))
        return None if not data else Held(data, self._place(key), self.files.account)

    def headers(self, keys: Sequence[str]) -> list[bytes | None]:
        headers = list[bytes | None]()
        for start in range(0, len(keys), _AT_ONCE):  # as many keys as one likes may have the same large value
            for value in self.values(keys[start : start + _AT_ONCE]):
                if isinstance(value, Held):
                    hold(value, 0, value.size, "A header")
                    headers.append(bytes(value.data))
                else:
                    headers.append(None if value is None else read_whole(value))
        return headers

    def _has_byte(self, key: str, offset: int) -> bool:
        return _is_there(self.database.read(key, byte_range=slice(offset, offset + 1)))

    def _size(self, key: str) -> int:
        """Finds the size of a large value, which tensorstore doesn't tell, by asking for single bytes."""
        low, high = _PROBE, 2 * _PROBE
        while self._has_byte(key, high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._has_byte(key, middle) else (low, middle)
        return high

    def span(self, key: str, offset: int, count: int) -> bytes:
        """Reads a part of a value.

        Raises:
            CorruptError: tensorstore can't, or gives less.
        """
        try:
            data = bytes(self.database.read(key, byte_range=slice(offset, offset + count)).result().value)
            if len(data) != count:
                raise ValueError(f"{len(data)} of {count} bytes at {offset}")
            self.account.read(count)
        except (ValueError, OSError) as error:
            raise self._failed(key, error) from error
        self._recheck()
        return data


def _is_there(byte: Any) -> bool:
    """Tells whether a byte of a value that is being read is there; raises what tensorstore raises."""
    try:
        return bool(byte.result().value)
    except ValueError as error:
        if "OUT_OF_RANGE" in str(error):
            return False
        raise


@dataclass(frozen=True)
class _Spans:
    """A large value of a database, read in spans."""

    store: OcdbtStore
    key: str
    size: int

    @property
    def place(self) -> str:
        return f"{self.key} in {self.store.place}"

    def read_into(self, start: int, into: memoryview) -> None:
        require(self, start, len(into))
        into[:] = self.store.span(self.key, start, len(into))

    def read(self, start: int, count: int) -> Array:
        return filled(self, start, count)

    @property
    def account(self) -> Account:
        return self.store.files.account


def _driver_of(place: Place) -> dict[str, str] | None:
    """Returns what tensorstore reads a folder in a store by; None of one on this machine.

    Source: tensorstore 0.1.86, documentation of the key-value stores `s3` and `gcs`.
    """
    if not isinstance(place, StoredPlace):
        return None
    scheme, bucket, name = address_of(f"{place}")
    if scheme not in _DRIVERS:
        os.fspath(place)  # which says why
    spec = {"driver": _DRIVERS[scheme], "bucket": bucket, "path": f"{name}/"}
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    return {**spec, "endpoint": endpoint} if endpoint and scheme == "s3" else spec


def _check_files(root: Place, files: Files) -> None:
    """Checks what tensorstore, which reads whatever is there, will find below a folder."""
    seen: set[str] = set()
    for folder, folders, names in walked(root, links=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add(real)
        for name in folders:
            files.links.check(folder / name)
        for name in names:
            path = folder / name
            files.links.check(path)
            if not path.is_file():  # a pipe would be waited for
                raise RefusedError("This isn't a regular file.", place=path)


def _damaged(place: str, error: Exception) -> CorruptError:
    return CorruptError(
        "The OCDBT database can't be read.",
        place=place,
        found=str(error).splitlines()[0][:400],
        remedy="the checkpoint is incomplete or damaged; ocdbt.process_* folders belong to it and must be copied too",
    )


def open_store(folder: Place, files: Files) -> FolderStore | OcdbtStore:
    """Opens the store of an Orbax item: the OCDBT database where there is one, else the folder itself.

    Raises:
        NotFoundError: There is no such folder.
    """
    if not folder.is_dir():
        raise NotFoundError("There is no such folder.", place=folder)
    if (folder / _MANIFEST).exists():
        return OcdbtStore.of(folder, files)
    return FolderStore(folder, files)
