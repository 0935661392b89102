"""The manifest: what a checkpoint holds, digest by digest, and when a reader may trust it.

A folder holds it as `statekit.json`; a file that statekit writes keeps the same document inside, and one that it seals
has it beside, as `statekit.<name>.json`. docs/format.md defines every field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, NotRequired, TypedDict

from statekit.budget import Account
from statekit.errors import CorruptError, Faults, FormatError, RefusedError
from statekit.files.source import Files, read_small, source_digest, walked
from statekit.files.tree import AnyPlace, Place
from statekit.tensors.digest import json_digest
from statekit.tensors.tensor import Tensor, dtype_name
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, Natural, typed

FILE = "statekit.json"
_BESIDE = "statekit.{}.json"
CHECKPOINT = "checkpoint"
"""Field: which checkpoint it is about, its folder or the file that stands for it, relative to the manifest's folder."""
SEALED = "sealed"
"""Field: the files that somebody else wrote, where the manifest was made later, of a checkpoint as it was."""
RECORDS = "records"
"""Field: the digest of what the checkpoint holds besides the values of tensors, as its reader had it."""
REST = "rest"
"""Field of a manifest inside a file: the digest of all other bytes of the file (statekit/files/whole_file.py)."""
FORMAT = "statekit-manifest"
VERSION = 1


class Side(TypedDict):
    """What was written, or what it was made from."""

    container: NotRequired[Name | None]
    layout: NotRequired[Name | None]
    step: NotRequired[Natural | None]


class FileEntry(TypedDict):
    """A file."""

    bytes: Natural
    blake3: str


class TensorEntry(TypedDict):
    """A tensor."""

    shape: list[Natural]
    dtype: str
    blake3: str


class Rest(TypedDict):
    """All bytes of a file but those of the manifest in it; numbers are text, as wide as the widest."""

    bytes: str
    blake3: str
    apart: list[str]


class Document(TypedDict):
    """The fields of a manifest that are read; what `state` and `kept` hold is checked where that is read."""

    target: Side
    source: Side
    state: dict[str, Any]
    options: dict[str, Any]
    files: dict[Name, FileEntry]
    tensors: dict[Name, TensorEntry]
    headers: NotRequired[dict[str, str]]
    kept: NotRequired[dict[str, Any]]
    checkpoint: NotRequired[Name]
    sealed: NotRequired[list[str]]
    records: NotRequired[str]
    rest: NotRequired[Rest]


def sealed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest with its heading and, last, the digest of its own canonical JSON."""
    document = {"format": FORMAT, "version": VERSION, "tool": f"statekit {version('statekit')}", **fields}
    return {**document, "digest": json_digest(document)}


def to_text(manifest: Mapping[str, Any]) -> str:
    """Returns a manifest as the text of `statekit.json`: JSON in ASCII, one top-level field a line."""
    rows = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in manifest.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def beside(file: AnyPlace) -> AnyPlace:
    """Returns where the manifest of a checkpoint that is a file lies.

    The name begins with none that a trainer's steps begin with, so that nobody takes it for one.
    """
    return file.with_name(_BESIDE.format(file.name))


def is_manifest(name: str) -> bool:
    """Tells whether a file's name is that of a manifest, of a folder or of a file."""
    start, _, end = _BESIDE.partition("{}")
    return name == FILE or (name.startswith(start) and name.endswith(end) and len(name) > len(start + end))


def parse(text: bytes | str, place: object, account: Account | None = None) -> dict[str, Any]:
    """Parses a manifest and proves that it says what its writer wrote.

    Args:
        text: The manifest.
        place: Where it stands.
        account: What it draws on, which holds it until it is closed.

    Raises:
        FormatError: Not a manifest of this format, or of a newer version.
        BudgetError: It is more than the job may hold.
        CorruptError: The manifest was changed after it was written.
    """
    document, faults = parse_damaged(text, place, account)
    faults.check(
        CorruptError,
        "The manifest isn't what was written",
        place=place,
        remedy="restore the checkpoint from a copy",
    )
    return document


def parse_damaged(
    text: bytes | str, place: object, account: Account | None = None
) -> tuple[dict[str, Any], Faults]:
    """Parses a manifest; returns it with what speaks against it, which is its own digest.

    Args:
        text: The manifest.
        place: Where it stands.
        account: As in `parse`.

    Raises:
        FormatError: Not a manifest of this format, or of a newer version.
        BudgetError: It is more than the job may hold.
    """
    account = account or Account()
    document = strict_json(text, place, account)
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
    with account.passing() as taken:
        # Its pieces stand beside each other before they are one text.
        taken.hold(8 * len(text), "A manifest in canonical form", f"{place}")
        digest = json_digest({key: value for key, value in document.items() if key != "digest"})
    faults = Faults()
    if document.get("digest") != digest:
        faults.add("was changed after it was written: its digest doesn't fit", f"{place}")
    typed(document, Document, place, "The manifest doesn't follow its format")
    return document, faults


def require_manifest(folder: Place, files: Files | None = None) -> dict[str, Any]:
    """Reads the manifest of a folder that must have one.

    Args:
        folder: The folder.
        files: The checkpoint's open files, whose budget holds the manifest.

    Raises:
        NotFoundError: No manifest.
        FormatError: Not a manifest, or one that names files outside the folder.
        CorruptError: It was changed after it was written.
    """
    path = folder / FILE
    manifest = parse(read_small(path, files), path, files.account if files else None)
    check_inside(folder, manifest)
    return manifest


def tensor_faults(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Compares names, shapes and dtypes with a manifest, without reading; returns what differs, as what and where."""
    stated = manifest["tensors"]
    faults = [("the manifest doesn't name this tensor", name) for name in tensors if name not in stated]
    faults += [
        ("the manifest names a tensor that isn't there", name) for name in stated if name not in tensors
    ]
    for name, tensor in tensors.items():
        entry = stated.get(name, {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)})
        if entry["shape"] != list(tensor.shape) or entry["dtype"] != dtype_name(tensor.dtype):
            stands = f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
            faults.append((f"is {stands}, in the manifest {entry['dtype']} {entry['shape']}", name))
    return faults


def tensor_entry(tensor: Tensor, digest: str) -> dict[str, Any]:
    """Returns a tensor's entry in a manifest."""
    return {"shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype), "blake3": digest}


def file_entry(path: Place, files: Files | None = None) -> dict[str, Any]:
    """Returns a file's entry in a manifest.

    Args:
        path: The file.
        files: Those of the checkpoint that it belongs to, by whose links it may be reached; None if it is ours.
    """
    with Files() as opened:
        source = (files or opened).source(path)
        return {"bytes": source.size, "blake3": source_digest(source)}


def unnamed_files(folder: Place, manifest: Mapping[str, Any]) -> list[str]:
    """Returns the files below a folder, by relative name, that its manifest doesn't name."""
    names = files_below(folder)
    return [
        name for name in names if name not in manifest["files"] and not is_manifest(name.rpartition("/")[2])
    ]


def files_below(folder: Place) -> list[str]:
    """Returns the relative names of everything below a folder that isn't itself a folder, sorted.

    Raises:
        FormatError: A folder can't be listed.
    """
    return sorted(
        (top / name).relative_to(folder).as_posix()
        for top, folders, files in walked(folder)
        for name in [*files, *(f for f in folders if (top / f).is_symlink())]
    )


def inside(relative: str) -> bool:
    """Tells whether a relative name stays below its folder, on every system."""
    parts = relative.split("/")
    return not any(part in ("", ".", "..") for part in parts) and not any(c in relative for c in "\\\0:")


def check_inside(folder: Place, manifest: Mapping[str, Any]) -> None:
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
