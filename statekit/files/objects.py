"""Puts objects into a store and never over what somebody else put there: what a target in a store is made of.

It relies on one promise of a store, that a small object can be put under the condition that there is none of its name.
An answer that got lost is resolved by reading: an object with our bytes is ours. Each object carries the mark of who
put it, so that nothing else is ever deleted.

Source: obstore 0.12, `obstore.put` and `obstore.open_writer`; RFC 9110, section 13.1.2 (`If-None-Match`).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from blake3 import blake3

from statekit.errors import CommitError, FormatError, NotFoundError, StatekitError, TargetExistsError
from statekit.files.manifest import Passing
from statekit.files.store import asking, facts_of_entry, first_of, pages_below
from statekit.files.tree import Facts
from statekit.pipeline import in_turn, working

_MOST_PAGES = 2000
"""Pages of a listing, of a thousand names each, that are looked through."""
PART_BYTES = 2**24
"""Bytes of an object's part at least, and of an object that goes in one request at most."""
MOST_PARTS = 9000
"""Parts of an object. Source: Amazon S3 user guide, "multipart upload limits": 10 000."""
_UNDER_WAY = 2**26
"""Bytes of an object's parts that are under way at once."""
_MARK = "statekit"
"""Key of an object's metadata that says by which claim it was put."""


class Objects:
    """The objects of a bucket.

    Args:
        store: An object of `obstore.store`.
        place: Where it begins: `s3://bucket`.
        mark: What is put carries it.
    """

    def __init__(self, store: Any, place: str, mark: str = "") -> None:
        self.store, self.place, self.mark = store, place, mark

    def create(self, name: str, data: bytes | bytearray) -> Facts:
        """Puts an object, if there is none of its name, in one request.

        Raises:
            TargetExistsError: There is one, with other bytes.
            CommitError: The store doesn't take it.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._storing(name), working("write"):
                obstore.put(
                    self.store,
                    name,
                    bytes(data),
                    attributes=self.attributes,
                    mode="create",
                    use_multipart=False,
                )
        except (
            AlreadyExistsError
        ):  # perhaps by our own request, whose answer got lost, so that it was sent again
            if self.read(name, len(data)) != data:
                raise self._came_into_being(name) from None
        return self.facts(name)

    def check_ours(self, name: str) -> None:
        """Makes sure that there is no object of a name but our own.

        Raises:
            TargetExistsError: There is one.
        """
        if not self.is_of(name, (self.mark,)):
            raise self._came_into_being(name)

    def _came_into_being(self, name: str) -> TargetExistsError:
        return TargetExistsError(
            "The target came into being meanwhile.",
            place=f"{self.place}/{name}",
            remedy="choose another name",
        )

    def replace(self, name: str, data: bytes) -> None:
        """Puts a small object, over an earlier one too.

        Raises:
            CommitError: The store doesn't take it.
        """
        import obstore

        with self._storing(name):
            obstore.put(self.store, name, data, attributes=self.attributes, use_multipart=False)

    @property
    def attributes(self) -> dict[str, str]:
        """Metadata of each object that is put."""
        return {_MARK: self.mark} if self.mark else {}

    def facts(self, name: str) -> Facts:
        """Returns what the store has under a name.

        Raises:
            NotFoundError: Nothing.
        """
        import obstore

        with asking(self.place, name):
            return facts_of_entry(obstore.head(self.store, name), self.place)

    def read(self, name: str, most: int) -> bytes | None:
        """Returns the bytes of a small object; None if there is none, or it has more than `most`."""
        import obstore

        try:
            with asking(self.place, name):
                answer = obstore.get(self.store, name)
                return first_of(answer, most) if answer.meta["size"] <= most else None
        except NotFoundError:
            return None

    def below(self, name: str) -> dict[str, Facts]:
        """Returns the objects below a name, and the one of that name itself.

        Raises:
            FormatError: They are more than any target has, or the store never ends its listing.
        """
        pages = pages_below(self.store, self.place, name, _MOST_PAGES)
        if len(pages) > _MOST_PAGES:
            raise FormatError(
                "There are too many objects below this name.",
                place=f"{self.place}/{name}",
                expected=f"at most {_MOST_PAGES} pages of a listing",
                remedy="name a folder further down",
            )
        entries = [facts_of_entry(entry, self.place) for page in pages for entry in page]
        with suppress(NotFoundError):
            entries += [self.facts(name)] if name else []
        return {facts.name: facts for facts in entries}

    def delete(self, names: Iterable[str], marks: Collection[str]) -> list[str]:
        """Deletes objects, in any order, as far as they carry one of some marks; returns the names of the others."""
        import obstore

        def is_left(name: str) -> bool:
            if not self.is_of(name, marks):
                return True
            with suppress(NotFoundError), self._storing(name):  # of which only some stores tell
                obstore.delete(self.store, name)
            return False

        candidates = list(names)
        return [name for name, left in zip(candidates, in_turn(is_left, candidates), strict=True) if left]

    def is_of(self, name: str, marks: Collection[str]) -> bool:
        """Tells whether an object carries one of some marks, or is gone."""
        import obstore

        try:
            with asking(self.place, name):
                return obstore.get(self.store, name, options={"head": True}).attributes.get(_MARK) in marks
        except NotFoundError:
            return True

    @contextmanager
    def _storing(self, name: str) -> Iterator[None]:
        """Turns what obstore raises into an error of ours, but for an object that is there already."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with asking(self.place, name, passing=(AlreadyExistsError, PreconditionError)):
                yield
        except PreconditionError as error:  # what some stores say of an object that is there
            raise AlreadyExistsError(name) from error
        except NotFoundError:
            raise
        except FormatError as error:
            raise CommitError(
                error.subject.replace("be read", "be written"),
                place=error.place,
                found=error.found,
                remedy=error.remedy,
            ) from None


class Upload(io.RawIOBase):
    """A new object, written from its first byte on: one request if it is small, else in parts; there when finished.

    Args:
        objects: The bucket.
        name: Its name.
        total: Bytes that it has at most, as far as anybody knows.
    """

    def __init__(self, objects: Objects, name: str, total: int) -> None:
        super().__init__()
        self._objects, self.object = objects, name
        self._part = max(PART_BYTES, -(-total // MOST_PARTS))
        self._small, self._writer = bytearray(), ExitStack()
        self._sink: Any = None
        self._size, self._digest = 0, blake3()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    @property
    def digest(self) -> str:
        """The BLAKE3 digest of all that was written."""
        return str(self._digest.hexdigest())

    def passing(self) -> Passing:
        """Returns what has digested all that was written, to go on with what comes."""
        return Passing((), (), self._size, self._digest.copy())

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        with working("digest"):
            self._digest.update(view)
        if self._sink is None and len(self._small) + len(view) <= PART_BYTES:
            self._small += view
        else:
            self._send(view)
        self._size += len(view)
        return len(view)

    @property
    def is_in_parts(self) -> bool:
        """Whether it goes in parts: a store ends that under no condition."""
        return self._sink is not None

    def finish(self) -> Facts:
        """Makes the object what was written, and returns what the store says of it.

        Raises:
            TargetExistsError: One of its name came into being meanwhile.
            CommitError: The store doesn't take it.
        """
        if self._sink is None:
            return self._objects.create(self.object, self._small)
        try:
            with self._objects._storing(self.object), working("write"):
                self._writer.close()
        except StatekitError:  # perhaps it is there, and only the answer got lost
            if not self._is_there():
                raise
        return self._objects.facts(self.object)

    def abandon(self, error: BaseException) -> None:
        """Ends an upload of which nothing shall be there."""
        with suppress(Exception):  # the store keeps its parts until its own rule for such removes them
            self._writer.__exit__(type(error), error, error.__traceback__)

    def _send(self, view: memoryview) -> None:
        import obstore

        with self._objects._storing(self.object), working("write"):
            if self._sink is None:
                self._sink = self._writer.enter_context(
                    obstore.open_writer(
                        self._objects.store,
                        self.object,
                        attributes=self._objects.attributes,
                        buffer_size=self._part,
                        max_concurrency=max(1, _UNDER_WAY // self._part),
                    )
                )
                self._sink.write(bytes(self._small))
                self._small = bytearray()
            self._sink.write(view)

    def _is_there(self) -> bool:
        try:
            facts = self._objects.facts(self.object)
        except StatekitError:
            return False
        return facts.size == self._size and self._objects.is_of(self.object, (self._objects.mark,))
