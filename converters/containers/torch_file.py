"""The container `torch`: the files of `torch.save`, read without PyTorch and without running what they hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from statekit.checkpoint import Checkpoint, Finding
from statekit.commit import Stage
from statekit.converters.containers.torch_legacy import MAGIC_BYTES, read_legacy
from statekit.converters.containers.torch_names import named, storage_id, torch_calls
from statekit.converters.containers.torch_storage import SourceFile, Storage
from statekit.converters.containers.torch_writer import MANIFEST_KEY, write_torch
from statekit.converters.containers.torch_zip import Archive, directory_bytes
from statekit.converters.pickle_reader import read_pickle
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, StatekitError, fault_list
from statekit.format import Encoded, Evidence
from statekit.manifest import parse, tensor_faults
from statekit.tree import Tree, tensor_names

MAX_PICKLE = 1 << 30
MAX_FAULTS = 5
"""Faults of a manifest that are named."""
MAX_RECORD = 64
"""Bytes of the small members, such as `byteorder`."""
_ROOT_MEMBER = re.compile(
    rb"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment)"
)
_TAR_MEMBERS = (b"sys_info\0", b"pickle\0", b"storages\0", b"tensors\0")


@dataclass(frozen=True)
class _Opened:
    tree: Tree
    meta: Mapping[str, Any]
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class TorchFile:
    """The container of `.pt`, `.pth`, `.bin` and `.ckpt` files, zip and legacy."""

    name: str = "torch"
    title: str = "PyTorch file (torch.save), zip or legacy"
    suffixes: tuple[str, ...] = (".pt", ".pth", ".bin", ".ckpt")
    target_kind: Literal["file", "folder"] | None = "file"

    def detect(self, path: Path) -> Evidence | None:
        """Looks at the first bytes, and at the directory at the end of a zip archive."""
        try:
            generation = _generation(path)
        except (OSError, StatekitError):
            return None
        return Evidence(10, _BECAUSE[generation]) if generation else None

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Reads the pickle and the headers; values are read when asked for.

        Raises:
            NotFoundError: No such file, or a step is asked of it.
            RefusedError: The file calls for code, or asks for absurd memory.
            CorruptError: Sizes or checksums disagree with the data.
            FormatError: It isn't a torch file.
        """
        if step is not None:
            raise NotFoundError(
                "A torch file holds one state and isn't chosen by its step.",
                place=path,
                found=f"step {step}",
                remedy="name the file of that step",
            )
        if path.exists() and not path.is_file():
            raise NotFoundError("A torch file is a regular file.", place=path, found="a folder or a device")
        source = SourceFile(path)
        try:
            return self._open(path, source)
        except BaseException:
            source.close()
            raise

    def _open(self, path: Path, source: SourceFile) -> Checkpoint:
        generation = _generation(path)
        if generation not in ("zip", "legacy"):
            raise _unreadable(path, generation)
        opened = _open_zip(source) if generation == "zip" else _open_legacy(source)
        tree = named(opened.tree)
        manifest: Mapping[str, Any] | None = None
        more: tuple[Finding, ...] = ()
        if isinstance(tree, dict) and isinstance(tree.get(MANIFEST_KEY), str):
            manifest, more = _manifest(tree.pop(MANIFEST_KEY), tree, path)
        return Checkpoint(
            container=self.name,
            path=path,
            tree=tree,
            meta=opened.meta,
            manifest=manifest,
            findings=(*opened.findings, *more),
            on_close=source.close,
        )

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a zip file that `torch.load(path, weights_only=True, mmap=True)` reads.

        Raises:
            UsageError: The tree holds what `weights_only` refuses; lists every such place.
        """
        write_torch(encoded.tree, stage)


_BECAUSE = {
    "zip": "a zip archive with a data.pkl",
    "legacy": "the magic number of torch's legacy format",
    "tar": "a tar archive of torch's first format",
}


def _generation(path: Path) -> str | None:
    if not path.is_file():
        return None
    source = SourceFile(path)
    try:
        head = source.read(0, min(512, source.size)).tobytes()
        if head.startswith(b"PK\3\4"):
            first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
            return "zip" if _ROOT_MEMBER.fullmatch(first) or b"/data.pkl" in directory_bytes(source) else None
        if MAGIC_BYTES in head[:64]:
            return "legacy"
        return "tar" if head[257:262] == b"ustar" and head.startswith(_TAR_MEMBERS) else None
    finally:
        source.close()


def _unreadable(path: Path, generation: str | None) -> FormatError:
    if generation == "tar":
        return RefusedError(
            "This is a tar archive of torch's first file format, which statekit doesn't read.",
            place=path,
            expected="a file of PyTorch 0.1.10 or newer",
            remedy="load it with the PyTorch that wrote it and save it again",
        )
    return FormatError(
        "This isn't a torch file.",
        place=path,
        expected="a zip archive with a data.pkl, or the magic number of the legacy format",
    )


def _open_legacy(source: SourceFile) -> _Opened:
    found = read_legacy(source)
    findings = [Finding(note, f"{source.path}") for note in found.notes]
    if found.rest:
        findings.append(Finding(f"{found.rest} bytes stand behind the last storage", f"{source.path}"))
    meta = {"generation": "legacy", "byteorder": "little", "version": "1001", "storages": found.storages}
    return _Opened(found.tree, meta, tuple(findings))


def _open_zip(source: SourceFile) -> _Opened:
    archive = Archive(source)
    root = _root(archive, source.path)
    order = _record(archive, f"{root}/byteorder", "little")
    if order not in ("little", "big"):
        raise FormatError("The byte order of a torch file is unknown.", place=source.path, found=order)
    pickled = f"{root}/data.pkl"
    size = archive.members[pickled].size
    if size > MAX_PICKLE:
        raise RefusedError(
            "The pickle of a torch file is too large.",
            place=source.path,
            expected=f"at most {MAX_PICKLE} bytes",
            found=f"{size} bytes",
        )
    storages: dict[str, Storage] = {}
    found = read_pickle(
        archive.read(pickled, 0, size).tobytes(),
        f"{pickled} in {source.path}",
        calls=torch_calls,
        persistent=partial(_storage, archive, root, order != sys.byteorder, storages),
    )
    findings = [Finding(note, f"{source.path}") for note in found.notes]
    bare = sum(1 for member in archive.members.values() if member.size and not member.crc)
    if bare:
        findings.append(
            Finding(f"{bare} members carry no checksum; their values can't be checked", f"{source.path}")
        )
    meta = {
        "generation": "zip",
        "byteorder": order,
        "version": _record(archive, f"{root}/version", ""),
        "storages": len(storages),
    }
    return _Opened(found.value, meta, tuple(findings))


def _root(archive: Archive, path: Path) -> str:
    roots = {name.partition("/")[0] for name in archive.members}
    root = next(iter(roots), "")
    if len(roots) != 1 or f"{root}/data.pkl" not in archive.members:
        raise FormatError(
            "A zip archive isn't laid out as torch files are.",
            place=path,
            expected="one top folder with a data.pkl",
            found=f"{len(roots)} top folders",
        )
    if f"{root}/constants.pkl" in archive.members:
        raise RefusedError(
            "This is a TorchScript program, not a checkpoint.",
            place=path,
            remedy="load it with torch.jit.load and save its state_dict()",
        )
    return root


def _record(archive: Archive, name: str, missing: str) -> str:
    if name not in archive.members:
        return missing
    size = archive.members[name].size
    raw = archive.read(name, 0, min(size, MAX_RECORD)).tobytes()
    return raw.decode("ascii", "replace").strip()


def _storage(archive: Archive, root: str, swapped: bool, known: dict[str, Storage], saved: Any) -> Storage:
    path = archive.source.path
    dtype, key, count, _ = storage_id(saved, f"{path}")
    name = f"{root}/data/{key}"
    if name not in archive.members:
        raise CorruptError("A torch file lacks the data of a tensor.", place=path, expected=name)
    size = archive.members[name].size
    if count != size // dtype.itemsize:
        raise CorruptError(
            "The size of a storage isn't the declared one.",
            place=f"{name} in {path}",
            expected=f"{count} elements of {dtype}",
            found=f"{size} bytes",
        )
    storage = Storage(f"data/{key}", f"{path}", dtype, size, partial(archive.read, name), swapped)
    if known.setdefault(key, storage) != storage:
        raise FormatError("A storage is described in two ways.", place=f"{name} in {path}")
    return known[key]


def _manifest(text: str, tree: Tree, path: Path) -> tuple[Mapping[str, Any] | None, tuple[Finding, ...]]:
    """Returns the manifest if its inventory is that of the file's tensors; their digests are compared when read."""
    try:
        manifest = parse(text, path)
        faults = tensor_faults(manifest, tensor_names(tree))
        why = "" if not faults else f"{len(faults)} tensors differ: {fault_list(faults[:MAX_FAULTS])}"
    except FormatError as error:
        why = str(error)
    if why:
        return None, (Finding(f"the manifest inside isn't trusted: {' '.join(why.split())}", f"{path}"),)
    return manifest, ()


CONTAINER = TorchFile()
