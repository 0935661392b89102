"""The digest of a whole file that stands in the file itself, in the manifest inside: of all bytes but its own.

    "rest": {"bytes": "...", "blake3": "...", "apart": ["<start>+<count>", ...]}

What is apart are the manifest's own text, which holds the digest, and checksums of the format that depend on it; both
are proven by themselves. For the digest their bytes count as zeros. The numbers are as wide as the widest, so that a
file is written with a manifest that knows none of them, and then gets them in their places.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from blake3 import blake3

from statekit.errors import CommitError
from statekit.files.durable import sync
from statekit.files.manifest import REST, sealed
from statekit.files.source import File, Files

_WIDTH = 20
_BLOCK = 2**20
Spans = Sequence[tuple[int, int]]


class Checked(NamedTuple):
    """A run of bytes with a CRC-32 (zlib's), and where that stands, little-endian, once or more often.

    Attributes:
        start: The first byte.
        size: How many.
        fields: Where the CRC-32 stands.
    """

    start: int
    size: int
    fields: tuple[int, ...]


FindChecked = Callable[[File, int], Checked | None]
"""Gives the run of bytes with a CRC-32 of its own that a place in a file lies in, if its format has such."""


def nothing_checked(file: File, at: int) -> None:
    """Finds no CRC-32: of formats that have none."""


def unknown_rest(apart: int) -> dict[str, Any]:
    """Returns the field of a manifest whose file isn't written yet.

    Args:
        apart: How many runs of bytes it will have apart.
    """
    return _field("0" * 64, 0, [(0, 0)] * apart)


def _field(digest: str, size: int, spans: Spans) -> dict[str, Any]:
    wide = [f"{start:0{_WIDTH}}+{count:0{_WIDTH}}" for start, count in spans]
    return {"bytes": f"{size:0{_WIDTH}}", "blake3": digest, "apart": wide}


def complete(
    path: Path,
    manifest: Mapping[str, Any],
    encode: Callable[[Mapping[str, Any]], bytes],
    checked: FindChecked,
) -> None:
    """Fills in the digest of a file that was written with a manifest which lacks it, and syncs the file.

    Args:
        path: The file.
        manifest: The manifest in it.
        encode: Gives a manifest's bytes as they stand in the file.
        checked: Finds the CRC-32 that depends on the manifest.

    Raises:
        CommitError: The manifest isn't in the file, or isn't alone in it.
    """
    text = encode(manifest)
    with Files() as files:
        file = files.source(path)
        at = _only(file, text)
        run = checked(file, at)
        spans = [(at, len(text)), *((field, 4) for field in (run.fields if run else ()))]
        digest = _digest(file, spans)
        fields = {key: value for key, value in manifest.items() if key != "digest"}
        new = encode(sealed({**fields, REST: _field(digest, file.size, spans)}))
    if len(new) != len(text):
        raise CommitError("A manifest doesn't fit its place.", place=path)
    with path.open("r+b", buffering=0) as raw:
        output = cast(BinaryIO, raw)
        output.seek(at)
        output.write(new)
        if run is not None:
            crc = _crc(output, run)
            for field in run.fields:
                output.seek(field)
                output.write(crc.to_bytes(4, "little"))
        sync(output.fileno())


def whole_file_fault(file: File, rest: Mapping[str, Any]) -> str:
    """Reads a whole file and compares it with what the manifest inside says of it; "" if it fits.

    Args:
        file: The file.
        rest: The manifest's field.
    """
    try:
        size = int(rest["bytes"])
        pairs = [one.split("+") for one in rest["apart"]]
        spans = sorted((int(start), int(count)) for start, count in pairs)
    except ValueError:
        return "the manifest inside has no digest of its file"
    if size != file.size:
        return f"has {file.size} bytes, expected {size}"
    fits = all(0 <= start <= start + count <= size for start, count in spans)
    if not fits or _digest(file, spans) != rest["blake3"]:
        return "isn't the file that was written: bytes were changed since, or are damaged"
    return ""


def _digest(file: File, spans: Spans) -> str:
    """Returns the BLAKE3 digest of a file in which some runs of bytes count as zeros."""
    hasher = blake3()
    for start in range(0, file.size, _BLOCK):
        block = file.read(start, min(_BLOCK, file.size - start))
        for begin, count in spans:
            block[max(begin - start, 0) : max(begin + count - start, 0)] = 0
        hasher.update(block.data)
    return hasher.hexdigest()


def _only(file: File, text: bytes) -> int:
    """Returns where a text stands in a file, looked for from the end."""
    step = max(_BLOCK, len(text))
    for stop in range(file.size, 0, -step):
        start = max(0, stop - step)
        count = min(stop + len(text), file.size) - start
        at = file.read(start, count).tobytes().rfind(text)
        if at >= 0:
            return start + at
    raise CommitError("The manifest isn't in the file that was written.", place=file.path)


def _crc(output: BinaryIO, run: Checked) -> int:
    output.seek(run.start)
    crc, left = 0, run.size
    while left and (block := output.read(min(_BLOCK, left))):
        crc, left = zlib.crc32(block, crc), left - len(block)
    return crc
