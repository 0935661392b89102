"""A work in a store: its records are objects beside the target, and its attempts write the target's own objects.

All processes of a work write under one claim (`statekit.files.claims`), whose mark is made of the work's digest. As
long as the claim is there, no reader takes the target for a checkpoint, and no other writer touches it. Two attempts at
a task put equal bytes under equal names. What a part record says of an object is compared with the store's facts, and
where these have changed, with the object's bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from statekit.errors import CommitError, CorruptError, NotFoundError, StatekitError, TargetExistsError
from statekit.files.claims import Claim, claim_target, claims_of, is_complete, release, taken_over
from statekit.files.homes import Entries, Home
from statekit.files.manifest import digest_by, inside
from statekit.files.objects import Objects
from statekit.files.source import Files, checkpoint_place
from statekit.files.store import state_of
from statekit.files.store_home import StoreHome, bucket_of, scratch_folder
from statekit.files.tree import Facts, Place, StoredPlace
from statekit.scale.brought import packed, unpacked
from statekit.scale.parts import PartFile, PartRecord
from statekit.scale.site import BROUGHT, DOCUMENT, FINISHED, JOINED, Site, check_files, left_behind

_OF_ATTEMPT = re.compile("-[0-9a-f]{32}(/|$)")
_MOST_BYTES = 2**30
"""Bytes of a record at most: a part record has some 200 bytes for each tensor."""


class StoreSite:
    """A work in a store.

    Args:
        place: The work's folder.
        target: The target, in the same bucket.
        digest: The digest of the work's document.
        objects: The bucket; opened anew if None.
        listing: What the store has below both, by name in the bucket; asked for each time if None.
        cache: Records that were read with a listing, and digests of files: name in the bucket -> identity and bytes.
    """

    def __init__(
        self,
        place: StoredPlace,
        target: Place,
        digest: str = "",
        objects: Objects | None = None,
        listing: Mapping[str, Facts] | None = None,
        cache: dict[str, tuple[str, bytes]] | None = None,
    ) -> None:
        self._place, self._target, self._digest, self._mark = place, target, digest, digest[:32]
        self._name, self._target_name = ("/".join(where.parts) for where in (place, target))
        self._objects = objects or bucket_of(place)[0]
        self._objects.mark = self._mark
        self._listing, self._cache = listing, {} if cache is None else cache

    @property
    def place(self) -> Place:
        return self._place

    def now(self) -> Site:
        listing = {
            **self._objects.below(self._name),
            **self._objects.below(self._target_name),
        }
        return StoreSite(self._place, self._target, self._digest, self._objects, listing, self._cache)

    def exists(self, name: str) -> bool:
        return self._facts(f"{self._name}/{name}") is not None

    def read(self, name: str) -> bytes:
        whole = f"{self._name}/{name}"
        facts = None if self._listing is None else self._facts(whole)
        identity, data = self._cache.get(whole, ("", None))
        if facts is not None and facts.identity == identity and data is not None:
            return data
        data = self._objects.read(whole, _MOST_BYTES) if self._listing is None or facts else None
        if data is None:
            raise NotFoundError("There is no such record.", place=self._place / name)
        if facts is not None:
            self._cache[whole] = facts.identity, data
        return data

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._objects.create(f"{self._name}/{name}", data)
        except TargetExistsError:
            return False
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._objects.replace(f"{self._name}/{name}", data)

    def remove(self, name: str) -> None:
        self._objects.delete([f"{self._name}/{name}"], (self._mark,))

    def set_aside(self, name: str) -> None:
        if self._objects.delete([f"{self._name}/{name}"], (self._mark,)):
            raise CommitError(
                "Somebody else put a record of this work there.",
                place=self._place / name,
                remedy="look who did, and delete it",
            )

    def names(self, folder: str) -> list[str]:
        top = f"{self._name}/{folder}/"
        names = self._objects.below(top.rstrip("/")) if self._listing is None else self._listing
        return sorted(name.removeprefix(top) for name in names if name.startswith(top))

    def begin(self, entries: Sequence[str]) -> None:
        if self._objects.below(self._name).keys() - {f"{self._name}/{BROUGHT}"}:
            raise TargetExistsError(
                "The work's folder exists, and no work is in it.",
                place=self._place,
                remedy="name another folder",
            )
        self.hold(entries)

    def hold(self, entries: Sequence[str]) -> None:
        if not self.is_over():
            claim_target(self._objects, self._target_name, entries, f"{self._place}")

    @contextmanager
    def attempted(self, attempt: str, size: int) -> Iterator[Home]:
        with self._home(size, f"-{attempt.partition('-')[2]}") as home:
            yield home

    def proven(self, home: Home, files: Entries) -> dict[str, dict[str, Any]]:
        assert isinstance(home, StoreHome)  # as `attempted` gave it
        return {
            name: {**entry, "identity": state_of(home.stored[f"{self._target_name}/{name}"].identity)}
            for name, entry in files.items()
        }

    def discard(self, attempt: str) -> None:
        """Does nothing: another attempt at the task has put equal objects under these names, or will."""

    def is_over(self) -> bool:
        return self.exists(FINISHED)

    def file_fault(self, part: PartRecord, name: str, entry: PartFile) -> str:
        facts = self._facts(f"{self._target_name}/{name}")
        if facts is None:
            return "isn't there"
        if facts.size == entry["bytes"] and state_of(facts.identity) == entry.get("identity"):
            return ""
        # Another attempt put it again, and some stores give equal bytes another identity then.
        if facts.size == entry["bytes"] and self._cache.get(facts.name, ("", b""))[0] != facts.identity:
            with Files() as files:
                digest = digest_by(None, files.source(checkpoint_place(f"{self._target}") / name), entry)
            self._cache[facts.name] = facts.identity, digest.encode("ascii")
        is_same = self._cache.get(facts.name, ("", b"")) == (facts.identity, entry["blake3"].encode("ascii"))
        return "" if is_same and facts.size == entry["bytes"] else "was changed since"

    @contextmanager
    def joined(self, parts: Sequence[PartRecord], mode: int) -> Iterator[Home]:
        with self._home(0) as home:
            names = [f"{self._target_name}/{name}" for part in parts for name in part.files]
            # Attempts that don't count have put files whose names no other attempt has.
            top = f"{self._target_name}/"
            others = [
                name
                for name in (self._listing or {}).keys() - {*names}
                if name.startswith(top) and _OF_ATTEMPT.search(name.removeprefix(top))
            ]
            self._objects.delete(others, (self._mark,))
            check_files(self, parts)
            for name in names:
                home.take(cast(Facts, self._facts(name)))
            yield home

    def settle(self, home: Home) -> None:
        assert isinstance(home, StoreHome)  # as `joined` gave it
        self.create(JOINED, packed([(name, "", 0) for name in home.held], [*home.held.values()]))
        whole = unpacked(
            self._objects.read(f"{self._name}/{JOINED}", _MOST_BYTES) or b"", self._place / JOINED
        )
        files = {name: bytes(data) for (name, _, _), data in whole}
        top = f"{self._target_name}/"
        if bool(files) != bool(home.held) or not all(
            name.startswith(top) and inside(name.removeprefix(top)) for name in files
        ):
            raise CorruptError(
                "What joins the tasks' files was changed.",
                place=self._place / JOINED,
                remedy="drop the work (statekit work drop) and split it again",
            )
        home.put_held(files)

    def end(self) -> None:
        self.create(FINISHED, b"finished")
        self._release()

    def drop(self) -> None:
        if not self.is_over() and not is_complete(self._objects, self._target_name):
            self._objects.delete([*self._objects.below(self._target_name)], (self._mark,))
        self._release()  # nobody begins a task any more
        records = self._objects.below(self._name).keys() - {f"{self._name}/{DOCUMENT}"}
        left = self._objects.delete(records, (self._mark,))
        self.remove(DOCUMENT)  # last: without it nobody could go on with this
        if left:
            raise left_behind(self._place, [name.removeprefix(f"{self._name}/") for name in left])

    def _facts(self, name: str) -> Facts | None:
        """Returns what the store has under a name in the bucket; None if there is nothing."""
        if self._listing is not None:
            return self._listing.get(name)
        try:
            return self._objects.facts(name)
        except NotFoundError:
            return None

    def _claim(self) -> Claim:
        claims = claims_of(self._objects, self._target_name)
        if not claims or claims[-1].mark != self._mark:
            raise taken_over(self._objects, self._target_name)
        return claims[-1]

    def _release(self) -> None:
        claims = claims_of(self._objects, self._target_name)
        if claims and claims[-1].mark == self._mark:
            release(self._objects, claims[-1])

    @contextmanager
    def _home(self, size: int, attempt: str = "") -> Iterator[StoreHome]:
        assert isinstance(self._target, StoredPlace)  # as `split` made sure
        with scratch_folder() as scratch:
            claim, joins = self._claim(), not attempt
            home = StoreHome(self._objects, claim, self._target, "folder", scratch, size, attempt, joins)
            try:
                yield home
                if not self.is_over():
                    self._claim()
            except StatekitError:
                self._take_back(home)  # which says first that the work was given up
                raise

    def _take_back(self, home: StoreHome) -> None:
        """Removes what was put for a work that was given up meanwhile, or what the store has with other bytes.

        Another process of the work may have put the same objects, and may have finished it: what is right stays.
        """
        try:
            self._claim()
        except CommitError:
            if not self.is_over() and not is_complete(self._objects, self._target_name):
                self._objects.delete([*home.stored, *home.held], (self._mark,))
            raise
        self._objects.delete(home.wrong(), (self._mark,))
