"""Atomic, synced, verified writing: a target is complete and checked, or it isn't there.

    with staged(target, "folder") as stage:   # <parent>/.statekit-tmp-<uuid>/<name>
        container.write(encoded, stage)       # every file synced, every tensor digested
        stage.commit(container.open)          # read again, compared, renamed, synced

Leaving the block without `commit`, or with an error, removes what was written.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from blake3 import blake3

from statekit.budget import Budget
from statekit.errors import (
    CommitError,
    Faults,
    FormatError,
    InexactError,
    NotFoundError,
    StatekitError,
    TargetExistsError,
    UsageError,
    some,
)
from statekit.files.checkpoint import Checkpoint
from statekit.files.durable import (
    beside,
    exchange,
    new_file,
    rename_new,
    rename_over_empty,
    set_mode,
    sweep,
    sync_folder,
    writing,
)
from statekit.files.file_changes import SMALL_BYTES, Change, file_faults
from statekit.files.integrity import records_of, top_of
from statekit.files.manifest import (
    CHECKPOINT,
    FILE,
    REST,
    SEALED,
    file_entry,
    files_below,
    inside,
    parse,
    sealed,
    tensor_entry,
    tensor_faults,
    to_text,
    unnamed_files,
)
from statekit.files.source import Files, read_small, walked
from statekit.files.tree import Place
from statekit.files.whole_file import (
    Around,
    FindChecked,
    Passing,
    Unfinished,
    nothing_checked,
    unfinished,
    unknown_rest,
    whole_file_fault,
)
from statekit.pipeline import each, give_back, lane, working
from statekit.tensors.digest import tensor_bytes, tensor_digests
from statekit.tensors.tensor import Tensor, begin
from statekit.tensors.typed import is_unicode

TargetKind: TypeAlias = Literal["file", "folder"]


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
Entries: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Name -> entry, as a manifest has them for its tensors and files."""
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
    """Where a container writes: a file or folder beside the target that takes its name when all is checked.

    Attributes:
        path: The file (kind `file`, not there yet) or existing empty folder (kind `folder`) to write. Its last part
            is the target's, so that a container that reads meaning in a name sees the final one.
        target: The final path.
        kind: What is written.
        tensors: Name -> manifest entry of every tensor streamed so far.
    """

    path: Path
    target: Path
    kind: TargetKind
    _replace: bool = False
    _mode: int = 0o666
    _total: int = 0
    _fields: Fields = unknown_fields
    _on_progress: OnProgress = silent
    _budget: Budget | None = None
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict)
    _done: int = 0
    _following: Mapping[str, tuple[str, Tensor]] = field(default_factory=dict)
    _begun: str | None = None
    _streamed: object = None
    _around: Around = field(default_factory=Around)
    _unfinished: Unfinished | None = None
    _rest: dict[str, Any] | None = None

    @contextmanager
    def file(self, relative: str = "", synced: bool = True) -> Iterator[BinaryIO]:
        """Opens one new file for writing (seekable, exclusive, below `path`; `path` itself for `""`).

        Leaving the context syncs it, unless `complete` will, and closes it. Writes go straight to the system: hand over
        large blocks.

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
        taken = None if synced else self._take
        with new_file(self.path / relative if relative else self.path, synced, taken) as output:
            yield output

    def _take(self, start: int, data: memoryview) -> None:
        if data.obj is not self._streamed:  # the values of tensors have digests of their own
            self._around.take(start, data)

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
            self._streamed = block.obj
            yield block
            self._streamed = None
            digested()
            self._done += len(block)
            self._on_progress(Progress("write", name, self._done, self._total))
        self.tensors[name] = tensor_entry(tensor, hasher.hexdigest())

    def expect(self, tensors: Mapping[str, Tensor]) -> None:
        """Says in which order tensors will be streamed, so that the next is decoded ahead; another is but slower."""
        self._following = dict(zip(tensors, [*tensors.items()][1:], strict=False))

    def keep(self, key: str, value: Any) -> None:
        """Adds a field of the container's own, plain JSON, to the manifest."""
        self._kept[key] = value

    def manifest(self, apart: int = 0) -> dict[str, Any]:
        """Returns the manifest of what was streamed so far, for containers that keep it inside their file.

        Args:
            apart: Where `complete` will be called: how many runs of bytes the file's digest leaves out, the manifest
                itself and each checksum that depends on it; 0 if it won't.
        """
        return sealed({**self._manifest_fields({}), **({REST: unknown_rest(apart)} if apart else {})})

    def complete(
        self,
        manifest: Mapping[str, Any],
        encode: Callable[[Mapping[str, Any]], bytes],
        checked: FindChecked = nothing_checked,
    ) -> None:
        """Has the whole file's digest filled into the manifest in it, which `manifest` made; as `whole_file` has it.

        It is filled in when the file has been read again; at once where the file is so small that opening digests it.
        """
        with writing(self.target):
            self._unfinished = unfinished(self.path, manifest, encode, checked, self._around)
            if self.path.stat().st_size <= SMALL_BYTES:
                self._rest, self._unfinished = self._unfinished.finish(Passing()), None

    def commit(self, reopen: Callable[[Path], Checkpoint]) -> Entries:
        """Proves what was written, gives it the target's name, and syncs.

        Args:
            reopen: Opens the written checkpoint; every tensor is read again and compared with what was streamed.

        Returns:
            Size and digest of every file written.

        Raises:
            CommitError: What was written can't be read, isn't what was meant, or can't be synced or renamed.
            TargetExistsError: The target came into being meanwhile.
        """
        give_back()  # reading begins anew, on other threads
        with writing(self.target):
            if (
                self.kind == "folder"
            ):  # what can be said only of the opened checkpoint is added once it is proven, as are large files' digests
                names = files_below(self.path)
                self._write_manifest({name: _outline(self.path / name) for name in names}, {})
                facts, files = self._verify(reopen, {name: self.path / name for name in names})
                (self.path / FILE).unlink()
                files[FILE] = self._write_manifest(files, facts)
                for folder, _, _ in walked(self.path, bottom_up=True):
                    sync_folder(Path(folder))
            else:
                _, files = self._verify(reopen, {self.path.name: self.path})
            self._narrow()
            self._take_name()
        return files

    def _manifest_fields(self, files: Entries) -> dict[str, Any]:
        return {**self._fields(self.tensors), **self._kept, "tensors": self.tensors, "files": files}

    def _write_manifest(self, files: Entries, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the manifest and reads it again; returns its file's entry."""
        manifest, place = sealed({**self._manifest_fields(files), **facts}), self.path / FILE
        with new_file(place) as output:
            output.write(to_text(manifest).encode("ascii"))
        try:
            again = parse(read_small(place), place)
        except StatekitError as error:
            raise CommitError(
                "The manifest can't be read again.", place=self.target, found=error.line, remedy=_REPORT
            ) from error
        if again["digest"] != manifest["digest"]:
            raise CommitError("The manifest isn't what was meant.", place=self.target, remedy=_REPORT)
        return file_entry(place)

    def _verify(
        self, reopen: Callable[[Path], Checkpoint], paths: Mapping[str, Path]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Compares what was written with what was meant; files are digested as far as they are read for that.

        Args:
            reopen: As in `commit`.
            paths: The files by name.

        Returns:
            What the manifest says of the opened checkpoint, and the entries of its files.
        """
        try:
            with Files(self._budget) as files, ExitStack() as stack:
                spans = self._unfinished.spans if self._unfinished else ()
                read = {name: (files.source(path), Passing(spans)) for name, path in paths.items()}
                for file, passing in read.values():
                    stack.enter_context(passing.read(file))
                with reopen(self.path) as written:
                    facts = {
                        CHECKPOINT: top_of(written).relative_to(self.path).as_posix(),
                        **records_of(written),
                    }
                    faults = Faults(tensor_faults({"tensors": self.tensors}, written.tensors))
                    faults += self._value_faults(written.tensors) if not faults else []
                    if self._rest is not None:
                        faults += [
                            (what, name)
                            for name, (file, passing) in read.items()
                            if (what := whole_file_fault(file, self._rest, passing))
                        ]
                if self._unfinished is not None and not faults:
                    ((_, passing),) = read.values()
                    with writing(self.target):
                        self._unfinished.finish(passing)
                digests = (each if len(read) > 1 else map)(lambda one: one[1].digest(one[0]), read.values())
                entries = {
                    name: {"bytes": file.size, "blake3": digest}
                    for (name, (file, _)), digest in zip(read.items(), digests, strict=True)
                }
        except (
            CommitError,
            InexactError,
        ):  # or what was written is as meant, but the format can't hold what was asked for
            raise
        except (StatekitError, OSError) as error:
            reason = error.line if isinstance(error, StatekitError) else error
            raise CommitError(
                "What was written can't be read again.", place=self.target, found=reason, remedy=_REPORT
            ) from error
        faults.check(CommitError, "What was written isn't what was meant", place=self.target, remedy=_REPORT)
        return facts, entries

    def _value_faults(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
        done = 0

        def tell(name: str, size: int) -> None:
            nonlocal done
            done += size
            self._on_progress(Progress("verify", name, done, self._done))

        for name, digest in tensor_digests(tensors, tell):
            if digest != self.tensors[name]["blake3"]:
                yield "reads back with other values than were written", name

    def _narrow(self) -> None:
        """Takes from what was written the permissions that the source, or what is replaced, doesn't give."""
        old = self.target if self._replace and os.path.exists(self.target) else None
        limit = self._mode & (permissions(all_of(old)) if old is not None else 0o666)
        for path in all_of(self.path):
            allowed = with_search(limit) if path.is_dir() else limit
            set_mode(path, stat.S_IMODE(path.stat().st_mode) & allowed)

    def _take_name(self) -> None:
        was_empty = self.kind == "folder" and _is_empty_folder(self.target)
        replaced = self._replace and not was_empty and os.path.lexists(self.target)
        mode = 0
        if replaced:
            old = exchange(self.path, self.target)
        else:
            try:
                if was_empty:
                    mode = stat.S_IMODE(self.target.stat().st_mode)
                    set_mode(self.path, mode & with_search(self._mode))
                    rename_over_empty(self.path, self.target)
                else:
                    rename_new(self.path, self.target)
            except FileExistsError:
                raise _exists(self.target) from None
        try:
            sync_folder(self.target.parent)
        except OSError:  # not durable, so not done: the name goes back to what had it
            if replaced:
                _remove(exchange(old, self.target))
            else:
                rename_new(self.target, self.path)
            if was_empty:
                self.target.mkdir()
                set_mode(self.target, mode)
            raise
        if replaced:
            _remove(old)


def _outline(path: Path) -> dict[str, Any]:
    """Returns a file's entry as far as opening a checkpoint looks at it: a large one without its digest."""
    size = path.stat().st_size
    return file_entry(path) if size <= SMALL_BYTES else {"bytes": size, "blake3": ""}


def _digest(hasher: blake3, block: memoryview) -> None:
    with working("digest"):
        hasher.update(block)


_REPORT = "nothing was left at the target; if the disk is sound, please report this as a defect of statekit"


@contextmanager
def staged(
    target: Path,
    kind: TargetKind,
    *,
    replace: bool = False,
    foreign: bool = False,
    mode: int = 0o666,
    on_progress: OnProgress | None = None,
    fields: Fields = unknown_fields,
    total: int = 0,
    budget: Budget | None = None,
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

    Raises:
        TargetExistsError: The target exists and mustn't be replaced.
        NotFoundError: The target's parent isn't there.
        UsageError: The target's name isn't usable.
        CommitError: The disk lacks space, or the temporary folder can't be made.
    """
    target = Path(os.path.abspath(target))
    check_target(target, kind, replace=replace, foreign=foreign)
    sweep(target.parent)
    _check_space(target, total)
    with beside(target) as temporary:
        path = temporary / target.name
        if kind == "folder":
            with writing(target):
                path.mkdir()  # ordinary permissions: the folder around it lets nobody in until the rename
        yield Stage(path, target, kind, replace, mode, total, fields, on_progress or silent, budget)


def check_target(target: Path, kind: TargetKind, *, replace: bool, foreign: bool = False) -> None:
    """Refuses a target that can't be written, before any work. Raises as `staged` does."""
    if target.name.startswith(".statekit-") or not target.name:
        raise UsageError("A target can't have this name.", place=target, expected="another than .statekit-*")
    if not target.parent.is_dir():
        raise NotFoundError(
            "The target's folder isn't there.", place=target.parent, remedy=f"mkdir -p {target.parent}"
        )
    if kind == "folder" and _is_empty_folder(target):
        return
    if os.path.lexists(target):
        if not replace:
            raise _exists(target)
        _check_kind(target)
        if not foreign:
            _check_ours(target)


def _check_space(target: Path, total: int) -> None:
    disk = os.statvfs(target.parent)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < total:  # some network file systems report nothing at all
        raise CommitError(
            "The target's disk lacks space.",
            place=target,
            expected=f"{total} bytes free",
            found=f"{free} bytes free",
            remedy="free some space, or choose a target on another disk",
        )


def _check_ours(target: Path) -> None:
    """Refuses to replace a folder with anything in it that statekit didn't write there, or that changed since.

    `convert` looks into files: it knows the containers that keep a manifest inside.
    """
    if target.is_symlink() or not target.is_dir() or not files_below(target):
        return
    try:
        manifest = parse(read_small(target / FILE), target / FILE)
        foreign = [*unnamed_files(target, manifest), *manifest.get(SEALED, ()), *_changed(target, manifest)]
    except StatekitError:
        foreign = files_below(target)
    if foreign:
        raise TargetExistsError(
            "The target is a folder with files that statekit didn't write, or that were changed since; "
            "replacing it would delete them.",
            place=target,
            found=some(foreign),
            remedy="choose another name, or move the folder away; --replace-foreign deletes them",
        )


def _changed(target: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files of a folder that are there and aren't what its manifest says, by size and small digests."""
    entries = {target / name: entry for name, entry in manifest["files"].items()}
    with Files() as files:
        faults = file_faults(entries, target / FILE, files)
    return [fault.path.relative_to(target).as_posix() for fault in faults if fault.change is not Change.LOST]


def _check_kind(target: Path) -> None:
    """Refuses to put a checkpoint in the place of a device, a FIFO or a socket."""
    mode = target.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise TargetExistsError(
            "The target is neither a file nor a folder.",
            place=target,
            found=stat.filemode(mode),
            remedy="choose another name",
        )


def permissions(paths: Iterable[Place]) -> int:
    """Returns what all of some files and folders let read and write: what their conversion may let at most.

    A folder that only its owner may read counts as its files: what lies in it is for nobody else.
    """
    limit = 0o666
    for path in paths:
        if not isinstance(path, Path):  # a store has none
            continue
        with suppress(OSError):  # a link that leads nowhere
            limit &= stat.S_IMODE(path.stat().st_mode)
    return limit


def all_of(path: Path) -> Iterator[Path]:
    """Yields a file, or a folder with all that lies in it."""
    yield path
    if path.is_dir():
        for top, folders, files in walked(path):
            yield from (Path(top, name) for name in (*folders, *files))


def with_search(mode: int) -> int:
    """Returns the permissions of a folder whose files have these: who may read may enter."""
    return mode | (mode & 0o444) >> 2


def _is_empty_folder(path: Path) -> bool:
    """Tells whether a path is a folder itself, no link to one, with nothing in it; not of one that can't be read."""
    try:
        return not path.is_symlink() and path.is_dir() and not any(path.iterdir())
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Removes a file, a link or a folder as far as it may; the target is done, so this can't fail any more."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _exists(target: Path) -> TargetExistsError:
    return TargetExistsError(
        "The target exists.", place=target, remedy="choose another name, or pass --replace"
    )
