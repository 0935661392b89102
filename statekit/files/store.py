"""Reads checkpoints in object stores, `s3://`, `gs://` and `az://`, through the obstore library.

Credentials are those that the library finds itself, in the environment or the machine's own; nothing of them is kept
or shown. What a store says in an error may repeat a signature or a key, so that only its status is passed on.

Source: obstore 0.12, `obstore.store` and `obstore.get`; RFC 9110, section 13.1.1 (`If-Match`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

from statekit.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    StatekitError,
    UsageError,
    extra,
    printable,
)
from statekit.files.ahead import ReadAhead, check_not_forked
from statekit.files.tree import WORK, Facts, StoredPlace, address_of, copying, fill

_MOST_PAGES, _PAGE = 20, 1000
"""Pages of names that one listing of all below a folder may have; of more, each folder is listed when it is asked."""
_LISTING_SECONDS = 120.0
"""How long the listing of one folder may take, and the next thousand names of all below one. A store that always
announces another page would never end it."""
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_REGION, or AWS_SKIP_SIGNATURE=true of a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}
_STATUS = re.compile(r"\b[45]\d\d [A-Z][A-Za-z ]{2,30}")
_ETAG = re.compile(r'(?:W/)?("?)[\x21\x23-\x7e]+\1')
"""An identity that can go into `If-Match`. obstore panics at a line break there. Source: RFC 9110, section 8.8.3."""
_ASKED: list[int] = []
"""The process that has asked a store, if one did."""
_RUST = ("pyo3_runtime", "pyo3_async_runtimes")
"""Modules of the exceptions that obstore's panics become; one of them is no `Exception`."""


def in_store(text: str) -> StoredPlace:
    """Returns the place at an address such as `s3://bucket/run`, in a tree of its own.

    Raises:
        UsageError: The address has a password or a query, or obstore isn't installed.
    """
    scheme, bucket, name = address_of(text)
    tree = ReadAhead(ListedTree(opened_store(scheme, bucket, text), f"{scheme}://{bucket}", name))
    return StoredPlace(tree, PurePosixPath(name))


def opened_store(scheme: str, bucket: str, text: str) -> Any:
    """Returns obstore's object of a bucket.

    Args:
        scheme: `s3`, `gs` or `az`.
        bucket: The bucket, or Azure's container.
        text: The address, for messages.

    Raises:
        UsageError: obstore isn't installed, or can't go by the settings of the environment.
    """
    try:
        from obstore import store
    except ModuleNotFoundError:
        raise UsageError(
            "Object stores need the library obstore.",
            place=text,
            remedy=f"{extra('remote')}, or copy it first: {copying(text)}",
        ) from None
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS.get(scheme, ()))), "")
    options: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=60), "allow_http": endpoint.startswith("http://")},
        "retry_config": {
            "max_retries": 10,
            "retry_timeout": timedelta(minutes=5),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=15),
                "base": 2,
            },
        },
    }
    if scheme == "gs" and endpoint:  # an emulator asks for no account
        account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        options["service_account_key"] = json.dumps(
            {**account, "gcs_base_url": endpoint, "disable_oauth": True}
        )
    kind = {"s3": store.S3Store, "gs": store.GCSStore, "az": store.AzureStore}[scheme]
    try:
        return kind(bucket, **options)
    except Exception as error:  # each library has its own, and its text may hold a setting
        raise UsageError(
            "The store can't be opened with the settings of the environment.",
            place=text,
            found=type(error).__name__,
            remedy=f"check {_VARIABLES[scheme]}",
        ) from None


class _Denied(FormatError):
    """The store knows the user, and doesn't let this be read."""


class ListedTree:
    """A bucket, of which folders are listed when they are first asked for, and never again.

    All below the place that a user names is listed at once, where it has no more than some pages of names.

    Args:
        store: An object of `obstore.store`.
        place: Where the tree begins: `s3://bucket`.
        top: The name that a user asks for.
    """

    def __init__(self, store: Any, place: str, top: str) -> None:
        self._store, self.place, self._top = store, place, top
        self._folders: dict[str, dict[str, Facts]] = {}

    def facts(self, name: str) -> Facts | None:
        if not name:
            return Facts("", "folder")
        folder, _, last = name.rpartition("/")
        inner = self._in(folder)
        if f"{WORK}{last}" not in inner:
            return inner.get(last)
        if f"{self._top}/".startswith(f"{name}/"):
            raise FormatError(
                "This is being written, or was left unfinished.",
                place=f"{self.place}/{name}",
                remedy=f"wait for it; if its writer was killed: statekit sweep {self.place}/{folder}",
            )
        return None

    def names(self, folder: str) -> Sequence[str]:
        """Returns the names in a folder, without what is being written."""
        inner = self._in(folder)
        return sorted(name for name in inner if not name.startswith(WORK) and f"{WORK}{name}" not in inner)

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        from obstore import get

        options: Any = {"range": (start, start + len(into)), "if_match": facts.identity}
        with asking(self.place, facts.name):
            answer = get(self._store, facts.name, options=options)
            if state_of(answer.meta["e_tag"]) != state_of(
                facts.identity
            ):  # not all stores know the condition
                raise _of_another_state(f"{self.place}/{facts.name}")
            data = first_of(answer, len(into))
        fill(into, memoryview(data), start, f"{self.place}/{facts.name}")

    def _in(self, folder: str) -> dict[str, Facts]:
        """Returns what is directly in a folder, by name."""
        if folder in self._folders:
            return self._folders[folder]
        above = self._folders.get(folder.rpartition("/")[0]) if folder else None
        if (above is not None and (facts := above.get(folder.rpartition("/")[2])) is None) or (
            above is not None and facts is not None and facts.kind == "file"
        ):
            return {}
        if folder == self._top and self._list_all():
            return self._folders.get(folder, {})
        self._folders[folder] = self._listed(folder)
        return self._folders[folder]

    def _list_all(self) -> bool:
        """Lists all below the top; tells whether that was not too much."""
        pages = pages_below(self._store, self.place, self._top, _MOST_PAGES)
        if len(pages) > _MOST_PAGES:
            return False
        for entry in (entry for page in pages for entry in page):
            self._note(entry)
        return True

    def _note(self, entry: Any) -> None:
        """Notes a file, and the folders between the top and it."""
        facts = facts_of_entry(entry, self.place)
        if not facts.name.startswith(f"{self._top}/" if self._top else ""):
            return  # an object that stands for the top, as consoles of stores make them; or what nobody asked for
        folder, _, last = facts.name.rpartition("/")
        self._folders.setdefault(folder, {})[last] = facts
        while folder != self._top:
            above, _, last = folder.rpartition("/")
            self._folders.setdefault(above, {})[last] = Facts(folder, "folder")
            folder = above

    def _listed(self, folder: str) -> dict[str, Facts]:
        """Lists one folder. One above the top that may not be listed has nothing but the way to the top."""
        start = f"{folder}/" if folder else ""
        try:
            with asking(self.place, folder):
                answer = self._answered(folder)
        except _Denied:
            if not self._top.startswith(start) or folder == self._top:
                raise
            return self._way_to_top(folder)
        files = [facts_of_entry(entry, self.place) for entry in answer["objects"]]
        folders = [Facts(prefix.rstrip("/"), "folder") for prefix in answer["common_prefixes"]]
        # An empty object with a folder's name stands for the folder, as consoles of stores make them.
        facts = [*(file for file in files if file.size or file.name != folder), *folders]
        return {fact.name.removeprefix(start): fact for fact in facts if fact.name.startswith(start)}

    def _answered(self, folder: str) -> Any:
        """Returns obstore's listing of a folder."""
        import obstore

        async def listed() -> Any:
            listing = obstore.list_with_delimiter_async(self._store, folder or None)
            return await asyncio.wait_for(listing, _LISTING_SECONDS)

        return _waited(f"{self.place}/{folder}", listed)

    def _way_to_top(self, folder: str) -> dict[str, Facts]:
        import obstore

        below = self._top[len(folder) :].lstrip("/")
        first, _, rest = below.partition("/")
        if rest:
            name = f"{folder}/{first}" if folder else first
            return {first: Facts(name, "folder")}
        try:
            with asking(self.place, self._top):
                return {first: facts_of_entry(obstore.head(self._store, self._top), self.place)}
        except NotFoundError:
            return {first: Facts(self._top, "folder")}


def pages_below(store: Any, place: str, name: str, most: int) -> list[Any]:
    """Returns pages of the listing of all below a name, of a thousand entries each; one above a limit if they are more.

    Raises:
        FormatError: A page takes too long, or the store can't be read.
        NotFoundError: There is no such bucket.
    """
    import obstore

    async def listed() -> list[Any]:
        pages: list[Any] = []
        listing = obstore.list(store, name or None, chunk_size=_PAGE)
        with suppress(StopAsyncIteration):
            while len(pages) <= most:
                pages.append(await asyncio.wait_for(listing.__anext__(), _LISTING_SECONDS))
        return pages

    with asking(place, name):
        return list(_waited(f"{place}/{name}", listed))


def _waited(place: str, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Returns what is waited for, by a loop of its own: the caller's thread may have one."""
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(ask())).result()
    except TimeoutError:
        raise FormatError(
            "The listing of a folder in a store doesn't end.",
            place=place,
            expected=f"at most {_LISTING_SECONDS:.0f} seconds",
            remedy=f"name the checkpoint's own folder, or copy it first: {copying(place)}",
        ) from None


def facts_of_entry(entry: Any, place: str) -> Facts:
    """Returns what a store's listing says of an object.

    Raises:
        FormatError: It doesn't say which state of it, or not in a way that a request can repeat.
    """
    identity = entry.get("e_tag")
    if not identity or identity == "*" or not _ETAG.fullmatch(identity):  # * would pin nothing
        raise FormatError(
            "The store doesn't say which state of a file it has.",
            place=f"{place}/{entry['path']}",
            expected="an ETag of visible ASCII",
            found=printable(identity)[:80] if identity else None,
            remedy=f"copy it first: {copying(place)}",
        )
    changed = int(entry["last_modified"].timestamp() * 1e9)
    return Facts(entry["path"], "file", entry["size"], identity, changed)


def first_of(answer: Any, most: int) -> bytes:
    """Returns an answer's bytes; of more than a number, no more than tell that they are."""
    return bytes(next(iter(answer.stream(min_chunk_size=most + 1)), b""))


def state_of(identity: str | None) -> str:
    """Returns what an ETag names: listings of Azure have no quotes around it, and proxies call it weak."""
    return (identity or "").removeprefix("W/").strip('"')


def _of_another_state(place: str) -> CorruptError:
    """Returns the error of a file that isn't the one that was listed any more."""
    return CorruptError(
        "A file was changed while it was read.",
        place=place,
        remedy="read a checkpoint to which no program writes",
    )


def _denied(place: str) -> _Denied:
    return _Denied(
        "The store doesn't let this be read.",
        place=place,
        remedy=f"check the credentials in the environment: {_VARIABLES[place.partition(':')[0]]}",
    )


@contextmanager
def asking(root: str, name: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turns what obstore raises into an error of ours, of which no credential is a part."""
    from obstore import exceptions as of

    place = f"{root}/{name}".rstrip("/")
    _ASKED[:] = _ASKED or [os.getpid()]
    check_not_forked(_ASKED[0], place)
    try:
        yield
    except passing:
        raise
    except StatekitError:
        raise
    except of.PreconditionError:
        raise _of_another_state(place) from None
    except (of.NotFoundError, FileNotFoundError):
        raise NotFoundError("There is no such file or bucket.", place=place) from None
    except (of.PermissionDeniedError, of.UnauthenticatedError):
        raise _denied(place) from None
    except BaseException as error:
        # The other two are of a listing's moments that Python's dates don't have.
        of_obstore = isinstance(error, of.BaseError | OSError | ValueError | OverflowError)
        if not of_obstore and type(error).__module__ not in _RUST:
            raise
        status = _STATUS.search(f"{error}")
        if status and status[0][:3] in ("401", "403"):  # of a listing, which has no error of its own
            raise _denied(place) from None
        if status and status[0].startswith("404"):
            raise NotFoundError("There is no such file or bucket.", place=place) from None
        raise FormatError(
            "The store can't be read.",
            place=place,
            found=status[0] if status else type(error).__name__,
            remedy="check the network, the endpoint and the credentials of the environment",
        ) from None
