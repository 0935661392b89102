"""Atomic, synced, verified writing: a target is complete and checked, or it isn't there.

    with staged(target, "folder") as stage:   # <parent>/.statekit-tmp-<uuid>/<name>
        container.write(encoded, stage)       # every file synced, every tensor digested
        stage.commit(container.open)          # read again, compared, renamed, synced

Leaving the block without `commit`, or with an error, removes what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from blake3 import blake3

from statekit.budget import Budget
from statekit.errors import CommitError, Faults, FormatError, InexactError, StatekitError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.files.durable import writing
from statekit.files.file_changes import SMALL_BYTES
from statekit.files.homes import Entries, Home, TargetKind, local_home
from statekit.files.integrity import records_of, top_of
from statekit.files.manifest import (
    CHECKPOINT,
    FILE,
    REST,
    Around,
    FindChecked,
    Leaf,
    Passing,
    Unfinished,
    Written,
    digest_by,
    field_of,
    file_entry,
    inside,
    nothing_checked,
    sealed,
    tensor_entry,
    tensor_faults,
    to_text,
    unknown_rest,
    whole_file_fault,
)
from statekit.files.source import File, Files, read_small
from statekit.files.tree import Place, StoredPlace, size_of
from statekit.pipeline import give_back, in_turn, lane, working
from statekit.tensors.digest import tensor_bytes, tensor_digests
from statekit.tensors.tensor import BLOCK_BYTES, Tensor, begin
from statekit.tensors.typed import is_unicode


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes:
        phase: `check` (source tensors read only to prove them), `write`, or `verify` (read again and compared).
        name: The tensor at hand.
        done: Bytes of tensors done in this phase.
        total: Bytes of tensors in this phase; 0 if unknown.
    """

    phase: Literal["check", "write", "verify"]
    name: str
    done: int
    total: int


OnProgress: TypeAlias = Callable[[Progress], object]
Fields: TypeAlias = Callable[[Entries], Mapping[str, Any]]
"""Gives the caller's fields of the manifest, from the entries of the tensors streamed so far."""


def silent(progress: Progress) -> None:
    """Tells nobody about progress."""


def unknown_fields(tensors: Entries) -> Mapping[str, Any]:
    """Gives the fields of a manifest about whose origin nothing is known."""
    nothing = {"container": None, "layout": None, "step": None}
    return {
        "target": nothing,
        "source": {**nothing, "digest": None},
        "plan": None,
        "options": {},
        "state": {},
    }


@dataclass
class Stage:
    """Where a container writes: a target that is found by nobody before all of it is checked.

    Attributes:
        home: Where its bytes lie until then.
        tensors: Name -> manifest entry of every tensor streamed so far.
    """

    home: Home
    _total: int = 0
    _fields: Fields = unknown_fields
    _on_progress: OnProgress = silent
    _budget: Budget = field(default_factory=Budget)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)
    _done: int = 0
    _following: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)
    _begun: str | None = None
    _streamed: tuple[str, object] = "", None
    _around: Around = field(default_factory=Around)
    _written: dict[str, Written] = field(default_factory=dict)
    _unfinished: Unfinished | None = None
    _rest: dict[str, Any] | None = None
    _adopted: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _proven: set[str] = field(default_factory=set)

    @property
    def path(self) -> Place:
        """What was written so far, to be read; its last part is the target's, in which a container may read meaning."""
        return self.home.path

    @property
    def target(self) -> Place:
        return self.home.target

    @property
    def kind(self) -> TargetKind:
        return self.home.kind

    @property
    def attempt(self) -> str:
        """What ends the names of files that another attempt would write with other bytes; "" where none may meet."""
        return self.home.attempt

    @contextmanager
    def file(self, relative: str = "", synced: bool = True, seeks: bool = False) -> Iterator[BinaryIO]:
        """Opens one new file of a folder for writing, or, with `""`, the target itself.

        Leaving the context syncs it, unless `complete` will, and closes it. Writes go straight to the system: hand over
        large blocks.

        Args:
            relative: Its name below the folder.
            synced: False where `complete` follows.
            seeks: Whether it is written in another order than that of its bytes; `complete` follows, then.

        Raises:
            UsageError: The name leaves the folder, or is the manifest's.
            CommitError: Making, writing, syncing or closing the file failed.
        """
        if (
            (self.kind == "file") != (relative == "")
            or relative == FILE
            or (relative and not inside(relative))
        ):
            raise UsageError(
                "A file of a target has an unusable name.",
                place=self.target,
                expected="a relative name below the folder" if self.kind == "folder" else "no name",
                found=repr(relative),
            )
        written = self._written[relative] = Written()

        def take(start: int, data: memoryview) -> None:
            name, streamed = self._streamed
            if data.obj is streamed:  # the values of tensors have digests of their own
                written.take(start, len(data), name)
            elif not synced:
                self._around.take(start, data)

        with self.home.file(relative, synced, take, seeks) as output:
            yield output

    @contextmanager
    def folder(self, relative: str) -> Iterator[Path]:
        """Gives a new folder of this machine for a library that makes files itself; they are the target's afterwards.

        Raises:
            CommitError: Making it, or storing what is in it, failed.
        """
        with self.home.folder(relative) as path:
            yield path

    def copy(self, name: str, to: str) -> None:
        """Writes a file that was written, as it is read again, under another name too."""
        with Files() as files, self.file(to) as output:
            source = files.source(self.path / name)
            for start in range(0, source.size, BLOCK_BYTES):
                output.write(source.read(start, min(BLOCK_BYTES, source.size - start)).data)

    def stream(self, name: str, tensor: Tensor) -> Iterator[memoryview]:
        """Yields the bytes of a tensor in C order, little-endian, block by block, and digests them under its name.

        Raises:
            UsageError: A tensor of this name was streamed already.
            FormatError: It has half of a character in its name, which no manifest can hold.
        """
        if not is_unicode(name):
            raise FormatError(
                "A tensor's name isn't Unicode.", place=name, remedy="rename the parameter (--rename, --map)"
            )
        if name in self.tensors:
            raise UsageError("A tensor is written twice.", place=name)
        hasher = blake3()
        if name in self._following and self._begun in (None, name):
            self._begun, following = self._following[name]
            begin(following)  # while this one is streamed
        for block in tensor_bytes(tensor):
            digested = lane("digest", _digest, hasher, block)  # while it is written
            self._streamed = name, block.obj
            yield block
            self._streamed = "", None
            digested()
            self._done += len(block)
            self._on_progress(Progress("write", name, self._done, self._total))
        self.tensors[name] = tensor_entry(tensor, hasher.hexdigest())

    def expect(self, tensors: Mapping[str, Tensor]) -> None:
        """Says in which order tensors will be streamed, so that the next is decoded ahead; another is but slower."""
        self._following = dict(zip(tensors, [*tensors.items()][1:], strict=False))

    def adopt(self, tensors: Entries, files: Entries) -> None:
        """Takes what other processes wrote below `path` and proved there: it is not read again."""
        self.tensors.update((name, dict(entry)) for name, entry in tensors.items())
        self._proven.update(tensors)
        self._adopted.update(files)

    def forget(self) -> None:
        """Has all that was adopted read again nevertheless."""
        self._proven.clear()
        self._adopted.clear()

    def keep(self, key: str, value: Any) -> None:
        """Adds a field of the container's own, plain JSON, to the manifest."""
        self._kept[key] = value

    def manifest(self, apart: int = 0) -> dict[str, Any]:
        """Returns the manifest of what was streamed so far, for containers that keep it inside their file.

        Args:
            apart: Where `complete` will be called: how many runs of bytes the file's digest leaves out, the manifest
                itself and each checksum that depends on it; 0 if it won't.
        """
        if apart:
            self.home.hold()
        rest = {REST: unknown_rest(apart, self._leaves(""))} if apart else {}
        return sealed({**self._manifest_fields({}), **rest})

    def complete(
        self,
        manifest: Mapping[str, Any],
        encode: Callable[[Mapping[str, Any]], bytes],
        checked: FindChecked = nothing_checked,
    ) -> None:
        """Fills the whole file's digest into the manifest inside it, which `manifest` made; see `unfinished`.

        It is filled in when the file has been read again; at once where the file is so small that opening digests it.
        """
        with writing(self.target):
            self._rest, self._unfinished = self.home.complete(manifest, encode, checked, self._around)

    def commit(self, reopen: Callable[[Place], Checkpoint]) -> Entries:
        """Proves what was written, gives it the target's name, and syncs.

        Args:
            reopen: Opens the written checkpoint; every tensor is read again and compared with what was streamed.

        Returns:
            Size and digest of every file written.

        Raises:
            CommitError: The written target cannot be read, differs from the data, or cannot be synced or renamed.
            TargetExistsError: The target came into being meanwhile.
        """
        give_back()  # reading begins anew, on other threads
        with writing(self.target):
            names = self.home.names()
            if self.kind == "folder":
                # What only the opened checkpoint can say is added once it is proven, as are large files' digests.
                place = self.path
                outlines = {name: self._adopted.get(name) or self._outline(place, name) for name in names}
                self._write_manifest(outlines, {})
                place = self.path
                unread = [name for name in names if name not in self._adopted]
                facts, read = self._verify(reopen, place, {name: place / name for name in unread})
                files = {name: dict(self._adopted.get(name) or read[name]) for name in names}
                files[FILE] = self._write_manifest(files, facts)
            else:
                place = self.path
                _, files = self._verify(reopen, place, {place.name: place})
            self.home.publish(files)
        return files

    def prove(self, reopen: Callable[[Place], Checkpoint]) -> Entries:
        """Reads what was written again and compares it with what was streamed; returns the entries of its files.

        Raises:
            CommitError: It cannot be read, or differs from the data.
        """
        give_back()  # reading begins anew, on other threads
        with writing(self.target):
            place = self.path
            return self._verify(reopen, place, {name: place / name for name in self.home.names()})[1]

    def _outline(self, place: Place, name: str) -> dict[str, Any]:
        """Returns a file's entry as far as opening a checkpoint looks at it: a large one without its digest."""
        entry = {"bytes": size_of(place / name), "blake3": "", **field_of(self._leaves(name))}
        if entry["bytes"] > SMALL_BYTES:
            return entry
        with Files() as files:
            return {**entry, "blake3": digest_by(None, files.source(place / name), entry)}

    def _leaves(self, relative: str) -> tuple[Leaf, ...]:
        """Returns the leaves of a file that was written, by its name below the folder; "" is the target itself."""
        return self._written[relative].leaves(self.tensors) if relative in self._written else ()

    def _manifest_fields(self, files: Entries) -> dict[str, Any]:
        return {**self._fields(self.tensors), **self._kept, "tensors": self.tensors, "files": files}

    def _write_manifest(self, files: Entries, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the manifest and reads it again; returns its file's entry."""
        text = to_text(sealed({**self._manifest_fields(files), **facts})).encode("ascii")
        self.home.write_manifest(text)
        place = self.path / FILE
        if read_small(place) != text:
            raise CommitError(
                "The written manifest differs from the data.", place=self.target, remedy=_REPORT
            )
        return file_entry(place)

    def _whole_file_faults(self, read: Mapping[str, tuple[File, Passing]]) -> list[tuple[str, str]]:
        """Returns what a file whose manifest is inside has beside what was meant, with its name."""
        if self._rest is None:
            return []
        whole = {name: whole_file_fault(file, self._rest, passing) for name, (file, passing) in read.items()}
        return [(fault, name) for name, fault in whole.items() if fault]

    def _verify(
        self, reopen: Callable[[Place], Checkpoint], place: Place, paths: Mapping[str, Place]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Compares the written tensors with the intended ones, and digests the files' bytes that this reads.

        Returns:
            What the manifest says of the opened checkpoint, and the entries of its files.
        """
        try:
            with self._budget.reading_again(), Files(self._budget) as files, ExitStack() as stack:
                read = {name: (files.source(path), self._passing(name)) for name, path in paths.items()}
                for file, passing in read.values():
                    stack.enter_context(passing.read(file))
                with reopen(place) as written:
                    facts = {CHECKPOINT: top_of(written).relative_to(place).as_posix(), **records_of(written)}
                    faults = Faults(tensor_faults({"tensors": self.tensors}, written.tensors))
                    faults += self._value_faults(written.tensors) if not faults else []
                    for _, passing in read.values():  # where a tensor has another digest, that is a fault
                        passing.tensors.update(
                            (name, self.tensors[name]["blake3"]) for name in self._unread()
                        )
                    faults += self._whole_file_faults(read)
                if self._unfinished is not None and not faults:
                    ((_, passing),) = read.values()
                    with writing(self.target):
                        self._unfinished.finish(passing)
                entries = digested(read)
        except (
            CommitError,
            InexactError,
        ):  # or what was written is as meant, but the format can't hold what was asked for
            raise
        except (StatekitError, OSError) as error:
            reason = error.line if isinstance(error, StatekitError) else error
            raise CommitError(
                "The written target cannot be read again.", place=self.target, found=reason, remedy=_REPORT
            ) from error
        faults.check(
            CommitError, "The written target differs from the data", place=self.target, remedy=_REPORT
        )
        return facts, entries

    def _passing(self, name: str) -> Passing:
        """Returns the object that digests a written file while it is read again."""
        spans = self._unfinished.spans if self._unfinished else ()
        return Passing(spans, self._leaves(name if self.kind == "folder" else ""))

    def _unread(self) -> list[str]:
        """Returns the names of the tensors that nobody has read again yet."""
        return [name for name in self.tensors if name not in self._proven]

    def _value_faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        done = 0

        def tell(name: str, size: int) -> None:
            nonlocal done
            done += size
            self._on_progress(Progress("verify", name, done, self._done))

        for name, digest in tensor_digests({name: tensors[name] for name in self._unread()}, tell):
            if digest != self.tensors[name]["blake3"]:
                yield "reads back with other values than were written", name


def digested(read: Mapping[str, tuple[File, Passing]]) -> dict[str, dict[str, Any]]:
    """Returns the entries of files by name; only what hasn't passed in the file's order is read for that."""
    digests = (in_turn if len(read) > 1 else map)(lambda pair: pair[1].digest(pair[0]), read.values())
    return {
        name: {"bytes": file.size, "blake3": digest, **field_of(passing.leaves)}
        for (name, (file, passing)), digest in zip(read.items(), digests, strict=True)
    }


def _digest(hasher: blake3, block: memoryview) -> None:
    with working("digest"):
        hasher.update(block)


_REPORT = "nothing was left at the target; if the disk is sound, please report this as a defect of statekit"


@contextmanager
def staged(
    target: Place,
    kind: TargetKind,
    *,
    replace: bool = False,
    foreign: bool = False,
    mode: int = 0o666,
    on_progress: OnProgress | None = None,
    fields: Fields = unknown_fields,
    total: int = 0,
    budget: Budget | None = None,
    entries: Sequence[str] = (),
) -> Iterator[Stage]:
    """Prepares to write a target; what is written gets the target's name only through `Stage.commit`.

    Args:
        target: Where the checkpoint shall be; its parent must exist. A folder may take the place of an empty one.
        kind: Whether a file or a folder is written.
        replace: Whether an existing target may be replaced; it stays until the new one is proven and synced.
        foreign: Whether a folder may be replaced that holds files which statekit didn't write there.
        mode: Permissions that its files may have at most, as their source has; less where what is replaced has less.
        on_progress: Told about every block.
        fields: Gives the manifest's fields that the stage can't know.
        total: Bytes of all tensors that will be written; 0 if unknown.
        budget: The job's, which opening the target again draws on.
        entries: Names or patterns of the files by which the format's readers find a checkpoint; in a store they are
            written last, in this order.

    Raises:
        TargetExistsError: The target exists and mustn't be replaced.
        NotFoundError: The target's parent isn't there.
        UsageError: The target's name isn't usable.
        CommitError: The disk lacks space, or the temporary folder can't be made.
    """
    if isinstance(target, StoredPlace):
        from statekit.files.store_home import store_home  # not entered for a target on this machine

        where: AbstractContextManager[Home] = store_home(target, kind, replace or foreign, entries, total)
    else:
        where = local_home(Path(target), kind, replace, foreign, mode, total)
    with where as home:
        yield Stage(home, total, fields, on_progress or silent, budget or Budget())
