"""Reads what `torch.save` wrote, a zip archive or a legacy stream, from a file or from a part of one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from statekit.converters.formats.pickle.reader import read_pickle
from statekit.converters.formats.pytorch.archive import Archive, directory_bytes
from statekit.converters.formats.pytorch.legacy import MAGIC_BYTES, read_legacy
from statekit.converters.formats.pytorch.names import storage_id, torch_calls
from statekit.converters.formats.pytorch.storage import Source, Storage
from statekit.errors import CorruptError, FormatError, RefusedError
from statekit.files.checkpoint import Finding
from statekit.tensors.tree import Tree

MAX_PICKLE = 1 << 30
MAX_RECORD = 64
"""Bytes of the small members, such as `byteorder`."""
_ROOT_MEMBER = re.compile(
    rb"[^/]+/(data\.pkl|data/\d+|version|byteorder|\.format_version|\.storage_alignment)"
)
_TAR_MEMBERS = (b"sys_info\0", b"pickle\0", b"storages\0", b"tensors\0")


@dataclass(frozen=True)
class Opened:
    """A saved object: its tree, whose tensors have no names yet, what is known of the file, and what was odd."""

    tree: Tree
    meta: Mapping[str, Any]
    findings: tuple[Finding, ...]


def generation(source: Source) -> str | None:
    """Returns `zip`, `legacy` or `tar` by the first bytes and the end of a file; None if it is no torch file."""
    head = source.read(0, min(512, source.size)).tobytes()
    if head.startswith(b"PK\3\4"):
        first = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return "zip" if _ROOT_MEMBER.fullmatch(first) or b"/data.pkl" in directory_bytes(source) else None
    if MAGIC_BYTES in head[:64]:
        return "legacy"
    return "tar" if head[257:262] == b"ustar" and head.startswith(_TAR_MEMBERS) else None


def read_object(source: Source) -> Opened:
    """Reads the pickle and the headers of a saved object; values are read when asked for.

    Raises:
        RefusedError: It calls for code, or asks for absurd memory.
        CorruptError: Sizes or checksums disagree with the data.
        FormatError: It isn't what torch.save writes.
    """
    kind = generation(source)
    if kind == "zip":
        return _open_zip(source)
    if kind == "legacy":
        return _open_legacy(source)
    raise _unreadable(source.path, kind)


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


def _open_legacy(source: Source) -> Opened:
    found = read_legacy(source)
    findings = [Finding(note, f"{source.path}") for note in found.notes]
    if found.rest:
        findings.append(Finding(f"{found.rest} bytes stand behind the last storage", f"{source.path}"))
    meta = {"generation": "legacy", "byteorder": "little", "version": "1001", "storages": found.storages}
    return Opened(found.tree, meta, tuple(findings))


def _open_zip(source: Source) -> Opened:
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
    return Opened(found.value, meta, tuple(findings))


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
