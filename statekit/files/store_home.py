"""Where a target in a store lies until it is complete: under its final names, but for the files by which it is found.

Data objects are put first and stay; the format's entry files and the manifest are held in memory, and put when all
else was read again. A killed process leaves a claim and data that no reader takes for a checkpoint.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from statekit.errors import CommitError, StatekitError, UsageError, some
from statekit.files.ahead import ReadAhead
from statekit.files.claims import Claim, check_held, claimed, exists, ranks, work_of
from statekit.files.durable import make_temporary, remove_temporary, sweep, writing
from statekit.files.homes import Encode, Entries, TargetKind, check_name, check_space
from statekit.files.manifest import FILE, Around, FindChecked, Unfinished, digest_by, files_below, unfinished
from statekit.files.objects import Objects, Upload
from statekit.files.source import Files
from statekit.files.store import ListedTree, opened_store
from statekit.files.tree import STORES, Facts, StoredPlace, address_of, not_written
from statekit.tensors.tensor import BLOCK_BYTES

_WITHOUT_DATABASES = ("az://",)
"""Stores that tensorstore has no driver for."""


class OverlayTree:
    """A target as it will be: objects of a store, pinned to what was put, and files that are still in memory.

    Args:
        tree: What reads the store.
        stored: What was put, by name in the bucket.
        in_memory: What is in memory, by name in the bucket.
    """

    def __init__(self, tree: ListedTree, stored: Mapping[str, Facts], in_memory: Mapping[str, bytes]) -> None:
        self._tree, self._held = tree, dict(in_memory)
        self._facts = {
            **stored,
            **{name: Facts(name, "file", len(data), "held") for name, data in in_memory.items()},
        }
        self._folders: dict[str, set[str]] = {}
        for name in self._facts:
            for folder in PurePosixPath(name).parents:
                above = "" if f"{folder}" == "." else f"{folder}"
                below = name[len(above) :].lstrip("/").partition("/")[0]
                self._folders.setdefault(above, set()).add(below)

    @property
    def place(self) -> str:
        return self._tree.place

    def facts(self, name: str) -> Facts | None:
        return self._facts.get(name) or (Facts(name, "folder") if name in self._folders else None)

    def names(self, folder: str) -> Sequence[str]:
        return sorted(self._folders.get(folder, ()))

    def read_into(self, facts: Facts, start: int, into: memoryview) -> None:
        if facts.name in self._held:
            into[:] = self._held[facts.name][start : start + len(into)]
        else:
            self._tree.read_into(facts, start, into)


class _Held(Upload):
    """An object whose end, or all of it, is written on this machine until its last bytes are known."""

    tail: BinaryIO | None = None
    tail_path: Path | None = None
    start = 0

    def hold(self, path: Path) -> None:
        """Has what comes written to a file of this machine, at its place in the object."""
        if self.tail is None:
            self.start, self.tail_path = self.tell(), path
            self.tail = path.open("xb")
            self.tail.truncate(self.start)
            self.tail.seek(self.start)

    def seekable(self) -> bool:
        return self.tail is not None and self.start == 0

    def write(self, data: Any, /) -> int:
        return super().write(data) if self.tail is None else self.tail.write(data)

    def tell(self) -> int:
        return super().tell() if self.tail is None else self.tail.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        assert self.tail is not None  # as seekable says
        return self.tail.seek(offset, whence)

    def truncate(self, size: int | None = None, /) -> int:
        assert self.tail is not None
        return self.tail.truncate(size)

    def end_tail(self) -> Path | None:
        """Ends what is written on this machine, and returns where that is."""
        if self.tail is not None:
            self.tail.close()
            self.tail = None
        return self.tail_path

    def send_tail(self) -> None:
        """Sends what was held back."""
        path = self.end_tail()
        if path is not None:
            with path.open("rb") as tail:
                tail.seek(self.start)
                while block := tail.read(BLOCK_BYTES):
                    self.write(block)
            path.unlink()


class StoreHome:
    """A target in a store.

    Args:
        objects: Its bucket.
        claim: The claim of who writes.
        target: The target.
        kind: What is written.
        scratch: A folder of this machine.
        total: Bytes of all tensors.
        attempt: As of `Home`.
        joins: Whether what is written joins what others wrote: all of it is held, then, until `put_held`.

    Attributes:
        stored: What was put, by name in the bucket.
        held: What is in memory, by name in the bucket.
    """

    def __init__(
        self,
        objects: Objects,
        claim: Claim,
        target: StoredPlace,
        kind: TargetKind,
        scratch: Path,
        total: int,
        attempt: str = "",
        joins: bool = False,
    ) -> None:
        self.attempt, self._joins = attempt, joins
        self._target, self._kind, self._scratch = target, kind, scratch
        self._objects, self._claim, self._total = objects, claim, total
        self._rank = ranks(claim.entries)
        self._name = "/".join(target.parts)
        self._tree = ListedTree(objects.store, objects.place, self._name)
        self.stored: dict[str, Facts] = {}
        self._digests: dict[str, str] = {}
        self.held: dict[str, bytes] = {}
        self._single: _Held | None = None

    @property
    def target(self) -> StoredPlace:
        return self._target

    @property
    def kind(self) -> TargetKind:
        return self._kind

    @property
    def scratch(self) -> Path:
        return self._scratch

    @property
    def path(self) -> StoredPlace:
        tree = OverlayTree(self._tree, self.stored, self.held)
        return StoredPlace(ReadAhead(tree), PurePosixPath(self._name))

    @contextmanager
    def file(
        self, name: str, synced: bool, taken: Callable[[int, memoryview], object] | None, seeks: bool
    ) -> Iterator[BinaryIO]:
        whole = f"{self._name}/{name}" if name else self._name
        if whole in self.stored or whole in self.held:
            raise CommitError("A file of a target is written twice.", place=f"{self._objects.place}/{whole}")
        if name and (self._joins or self._rank(name) >= 0):
            entry = io.BytesIO()
            yield entry
            self.held[whole] = entry.getvalue()
            return
        output = _Held(self._objects, whole, self._total)
        if seeks:
            check_space(self.target, self.scratch, self._total)
            output.hold(self.scratch / "whole")
        self._single = output if self.kind == "file" else None
        try:
            yield cast(BinaryIO, output)
        except BaseException as error:
            output.abandon(error)
            raise
        if synced and not seeks:  # what is laid out on this machine is completed there
            self._end(output)

    def put_held(self, files: Mapping[str, bytes]) -> None:
        """Puts what joins the files of others, but for the files by which readers find them.

        Args:
            files: What takes the place of `held`.
        """
        self._joins, self.held = False, {}
        for name, data in files.items():
            if self._rank(name) >= 0:
                self.held[name] = data
            else:
                self.stored[name] = self._objects.create(name, data)

    def take(self, facts: Facts) -> None:
        """Takes an object that another process put for a file of the target."""
        if facts.name in self.stored:
            raise CommitError("Two tasks wrote one file.", place=self.target, found=facts.name)
        self.stored[facts.name] = facts

    def wrong(self) -> list[str]:
        """Returns the names in the bucket of what the store has with other bytes than were sent."""
        wrong = []
        for name, digest in self._digests.items():
            with suppress(StatekitError), Files() as files:  # what doesn't come isn't known
                tree = OverlayTree(self._tree, {name: self._objects.facts(name)}, {})
                file = files.source(StoredPlace(ReadAhead(tree), PurePosixPath(name)))
                wrong += [name] if digest_by(None, file, {}) != digest else []
        return wrong

    def _end(self, output: _Held) -> None:
        """Has an object be there, and notes what it is."""
        output.send_tail()
        if output.is_in_parts:  # which ends under no condition of the store
            check_held(self._objects, self._claim)
            self._objects.check_ours(output.object)
        self._digests[output.object] = output.digest
        self.stored[output.object] = output.finish()

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        if f"{self.target}".startswith(_WITHOUT_DATABASES):
            raise UsageError(
                "A database of tensorstore can't be read again from this store.",
                place=self.target,
                remedy="choose another container, or write to a disk and copy from there",
            )
        check_space(self.target, self.scratch, self._total)
        folder = self.scratch / "folder" / name
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)  # an earlier one may have left the folders above it
        yield folder
        # What a library finds the others by lies at the top.
        for file in sorted(files_below(folder), key=lambda file: (-file.count("/"), file)):
            with (
                (folder / file).open("rb") as source,
                self.file(f"{name}/{file}", True, None, False) as output,
            ):
                shutil.copyfileobj(source, output, BLOCK_BYTES)
        shutil.rmtree(folder)

    def names(self) -> list[str]:
        if self.kind == "file":
            return [self.target.name]
        names = (name.removeprefix(f"{self._name}/") for name in (*self.stored, *self.held))
        return sorted(name for name in names if name != FILE)

    def hold(self) -> None:
        if self._single is not None:
            self._single.hold(self.scratch / "tail")

    def complete(
        self, manifest: Mapping[str, Any], encode: Encode, checked: FindChecked, around: Around
    ) -> tuple[dict[str, Any] | None, Unfinished | None]:
        output = self._single
        path = output.end_tail() if output else None
        assert output is not None and path is not None  # Stage.manifest had it held
        # All bytes are compared when the object is read again: nothing is left to compare around tensors.
        waiting = unfinished(path, manifest, encode, checked, Around())
        rest = waiting.finish(output.passing())
        self._end(output)
        return rest, None

    def write_manifest(self, data: bytes) -> None:
        self.held[f"{self._name}/{FILE}"] = data

    def publish(self, files: Entries) -> None:
        digests = {name.removeprefix(f"{self._name}/"): digest for name, digest in self._digests.items()}
        if self.kind == "file":
            digests = {self.target.name: self._digests[self._name]}
        wrong = [name for name, digest in digests.items() if files[name]["blake3"] != digest]
        if wrong:
            raise CommitError(
                "The written file differs from the data: it reads back with other bytes.",
                place=self.target,
                found=some(wrong),
                remedy="try again; nothing was left at the target",
            )
        check_held(self._objects, self._claim)
        for name in sorted(self.held, key=lambda name: (self._rank(name), -name.count("/"), name)):
            self._objects.create(name, self.held[name])


@contextmanager
def store_home(
    target: StoredPlace, kind: TargetKind, replace: bool, entries: Sequence[str], total: int
) -> Iterator[StoreHome]:
    """Gives the home of a target in a store; what was written of it is gone at the end if that is an error.

    Args:
        target: Where the checkpoint shall be.
        kind: What is written.
        replace: Whether an existing target shall be replaced, which is refused.
        entries: The files by which the format's readers find it, written last in this order.
        total: Bytes of all tensors.

    Raises:
        As `statekit.files.stage.staged`.
    """
    objects, name = check_stored_target(target, replace)
    with scratch_folder() as scratch, claimed(objects, name, entries) as claim:
        yield StoreHome(objects, claim, target, kind, scratch, total)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Gives a folder of this machine for a while."""
    temporary = Path(tempfile.gettempdir())
    sweep(temporary)
    with writing(temporary):
        scratch = make_temporary(temporary)
    try:
        yield scratch
    finally:
        remove_temporary(scratch)


def check_stored_target(target: StoredPlace, replace: bool) -> tuple[Objects, str]:
    """Refuses a target that can't be written, before any work; returns its bucket, and its name there.

    Raises:
        UsageError: It is to replace another, or has an unusable name.
        TargetExistsError: It exists.
    """
    if replace:
        raise UsageError(
            "A target in a store can't be replaced: a store can't exchange two of them in one step.",
            place=target,
            remedy="choose another name, and delete the old one when the new one is there",
        )
    check_name(target)
    objects, name = bucket_of(target)
    if not objects.below(work_of(name)) and objects.below(name):
        raise exists(target)
    return objects, name


def bucket_of(place: StoredPlace) -> tuple[Objects, str]:
    """Returns the bucket that a place lies in, and its name there.

    Raises:
        UsageError: Nothing is written there.
    """
    scheme, bucket, name = address_of(f"{place}")
    if scheme not in STORES:
        raise not_written(place)
    return Objects(opened_store(scheme, bucket, f"{place}"), f"{scheme}://{bucket}"), name
