"""The manifest: what a target holds, digest by digest, and when a reader may trust it.

A folder holds it as `statekit.json`; a file keeps the same document inside. docs/format.md defines every field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from statekit.errors import CorruptError, Faults, FormatError, NotFoundError, RefusedError
from statekit.files.source import SMALL_FILE, Files, read_small, source_digest
from statekit.tensors.digest import json_digest
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import strict_json

FILE = "statekit.json"
FORMAT = "statekit-manifest"
VERSION = 1
MAX_BYTES = SMALL_FILE
"""The largest manifest that is read, in bytes."""
SMALL_BYTES = 2**20
"""Files up to this size, in bytes, are digested when a checkpoint is opened; the digests of tensors cover the rest."""


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest with its heading and, last, the digest of its own canonical JSON."""
    document = {"format": FORMAT, "version": VERSION, "tool": f"statekit {version('statekit')}", **fields}
    return {**document, "digest": json_digest(document)}


def to_text(manifest: Mapping[str, Any]) -> str:
    """Returns a manifest as the text of `statekit.json`: JSON in ASCII, one top-level field a line."""
    rows = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in manifest.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def parse(text: bytes | str, place: object) -> dict[str, Any]:
    """Parses a manifest and proves that it says what its writer wrote.

    Raises:
        FormatError: Not a manifest of this format, or of a newer version.
        CorruptError: The manifest was changed after it was written.
    """
    document = strict_json(text, place)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FormatError("This isn't a statekit manifest.", place=place, expected=f'"format": "{FORMAT}"')
    if document.get("version") != VERSION:
        raise FormatError(
            "The manifest has another version than this statekit reads.",
            place=place,
            expected=f"version {VERSION}",
            found=repr(document.get("version")),
            remedy="read it with the statekit that wrote it, or a newer one",
        )
    digest = json_digest({key: value for key, value in document.items() if key != "digest"})
    if document.get("digest") != digest:
        raise CorruptError(
            "The manifest was changed after it was written.",
            place=place,
            expected=f"digest {digest}",
            found=repr(document.get("digest")),
            remedy="restore the checkpoint from a copy",
        )
    faults = Faults(_shape_faults(document))
    faults.check(FormatError, "The manifest doesn't follow its format", place=place)
    return document


def _shape_faults(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    faults = [("isn't an object", key) for key in _OBJECTS if not isinstance(document.get(key), dict)]
    faults += [("isn't an object", key) for key in _OPTIONAL if not isinstance(document.get(key, {}), dict)]
    for key, fields in (("files", _FILE_FIELDS), ("tensors", _TENSOR_FIELDS)):
        entries = document.get(key)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if not isinstance(entry, dict) or any(
                type(entry.get(f)) is not kind for f, kind in fields.items()
            ):
                faults.append((f"doesn't have {', '.join(fields)}", f"{key}/{name}"))
    return faults


_OBJECTS = ("target", "source", "state", "options", "files", "tensors")
_OPTIONAL = ("kept",)
_FILE_FIELDS = {"bytes": int, "blake3": str}
_TENSOR_FIELDS = {"shape": list, "dtype": str, "blake3": str}


def require_manifest(
    folder: Path, files: Files | None = None, within: Collection[str] | None = None
) -> dict[str, Any]:
    """Reads the manifest of a folder that must have one, and checks the folder's files against it.

    Args:
        folder: The folder.
        files: The checkpoint's open files, whose budget holds the manifest.
        within: The files and folders in it that are the checkpoint, by name; None if all are.

    Raises:
        NotFoundError: No manifest.
        FormatError: Not a manifest, or one that names files outside the folder.
        CorruptError: A file is missing, has another size, or (up to 1 MiB) another digest.
    """
    path = folder / FILE
    manifest = parse(read_small(path, files), path)
    check_inside(folder, manifest)
    faults = Faults(file_faults(folder, manifest["files"], files))
    faults.check(
        CorruptError,
        "The files of a checkpoint aren't those that were written",
        place=folder,
        remedy="restore the checkpoint from a copy",
    )
    return manifest


def tensor_faults(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Compares names, shapes and dtypes with a manifest, without reading; returns what differs, as what and where."""
    stated = manifest["tensors"]
    faults = [("the manifest doesn't name this tensor", name) for name in tensors if name not in stated]
    faults += [
        ("the manifest names a tensor that isn't there", name) for name in stated if name not in tensors
    ]
    for name, tensor in tensors.items():
        entry = stated.get(name, {"shape": list(tensor.shape), "dtype": tensor.dtype.name})
        if entry["shape"] != list(tensor.shape) or entry["dtype"] != tensor.dtype.name:
            stands = f"{tensor.dtype.name} {list(tensor.shape)}"
            faults.append((f"is {stands}, in the manifest {entry['dtype']} {entry['shape']}", name))
    return faults


def tensor_entry(tensor: Tensor, digest: str) -> dict[str, Any]:
    """Returns a tensor's entry in a manifest."""
    return {"shape": list(tensor.shape), "dtype": tensor.dtype.name, "blake3": digest}


def file_entry(path: Path) -> dict[str, Any]:
    """Returns a file's entry in a manifest."""
    with Files() as files:
        source = files.source(path)
        return {"bytes": source.size, "blake3": source_digest(source)}


def unnamed_files(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files below a folder, by relative name, that its manifest doesn't name."""
    names = files_below(folder)
    return [name for name in names if name not in manifest["files"] and name != FILE]


def files_below(folder: Path) -> list[str]:
    """Returns the relative names of everything below a folder that isn't itself a folder, sorted."""
    return sorted(
        (Path(top) / name).relative_to(folder).as_posix()
        for top, folders, files in os.walk(folder)
        for name in [*files, *(f for f in folders if (Path(top) / f).is_symlink())]
    )


def inside(relative: str) -> bool:
    """Tells whether a relative name stays below its folder, on every system."""
    parts = relative.split("/")
    return not any(part in ("", ".", "..") for part in parts) and not any(c in relative for c in "\\\0:")


def check_inside(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a manifest that names files outside its folder.

    Raises:
        RefusedError: It does.
    """
    foreign = [name for name in manifest["files"] if not inside(name)]
    if foreign:
        raise RefusedError(
            "A manifest names files outside its folder.",
            place=folder / FILE,
            found=", ".join(map(repr, foreign)),
        )


def file_faults(
    folder: Path,
    entries: Mapping[str, Mapping[str, Any]],
    files: Files | None = None,
    *,
    whole: bool = False,
) -> list[tuple[str, str]]:
    """Compares files with their entries in a manifest; returns what differs, as what and the file's name.

    Args:
        folder: Where the files lie.
        entries: The entries by name.
        files: Those of the checkpoint that is opened, by whose links they may be reached.
        whole: Whether large files are digested too, and not only compared in size.

    Raises:
        RefusedError: A file lies behind a link out of the checkpoint.
    """
    with Files() as opened:
        by = files or opened
        faults = [(_file_fault(folder / name, entry, by, whole), name) for name, entry in entries.items()]
    return [(fault, name) for fault, name in faults if fault]


def _file_fault(path: Path, entry: Mapping[str, Any], files: Files, whole: bool) -> str:
    files.links.check(path)  # no fault of the file, and said with its own remedy
    try:
        source = files.source(path)
        if source.size != entry["bytes"]:
            return f"has {source.size} bytes, expected {entry['bytes']}"
        if (whole or source.size <= SMALL_BYTES) and source_digest(source) != entry["blake3"]:
            return f"was changed: it isn't the file with BLAKE3 {entry['blake3'][:16]}..."
    except (NotFoundError, FormatError) as error:
        return error.subject
    return ""
