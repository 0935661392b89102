"""What has become of files since their manifest was written: the same, changed since, or damaged.

Bytes that aren't those that were written were changed by somebody or by an accident, and the bytes themselves don't
tell. Their times may: a file that is older than its manifest was written to by nobody since, and one that is younger
was, unless the whole folder is a copy, in which sound files are younger too. Where times say nothing, both are said.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from statekit.errors import FormatError, NotFoundError
from statekit.files.manifest import digest_by
from statekit.files.source import File, Files
from statekit.files.tree import Place, stat_of
from statekit.pipeline import in_turn

SMALL_BYTES = 2**20
"""Files up to this size, in bytes, are digested when a checkpoint is opened; digests of tensors cover larger ones."""


Digest: TypeAlias = Callable[[File, Mapping[str, Any]], str]


class Change(Enum):
    """What befell a file."""

    REWRITTEN = "was changed since it was written"
    DAMAGED = "is damaged: it isn't what was written, and by its time nobody wrote to it since"
    UNTOLD = "was changed since it was written, or is damaged"
    LOST = "isn't there"


@dataclass(frozen=True)
class FileFault:
    """A file that differs from its entry in a manifest.

    Attributes:
        path: The file.
        change: What befell it.
        what: The same in words, with sizes where they differ.
    """

    path: Place
    change: Change
    what: str


def file_faults(
    entries: Mapping[Place, Mapping[str, Any]],
    manifest: Place,
    files: Files,
    digested: Collection[Place] | None = None,
    tell: Callable[[Place], object] = lambda path: None,
    digest: Digest = lambda file, entry: digest_by(None, file, entry),
) -> list[FileFault]:
    """Compares files with their entries in a manifest: sizes, and digests.

    Args:
        entries: Size and digest by path.
        manifest: The manifest's own file, which is as old as what it says.
        files: Those of the checkpoint that is opened, by whose links they may be reached.
        digested: Those whose bytes are read; small ones if None.
        tell: Gets each file that was read.
        digest: Gives the digest of one whose bytes are read, in the form of its entry.

    Raises:
        RefusedError: A file lies behind a link out of the checkpoint.
    """
    wrong = {}

    def is_read(path: Place) -> bool:
        return entries[path]["bytes"] <= SMALL_BYTES if digested is None else path in digested

    def compare(path: Place) -> _Wrong | None:
        return _wrong(path, entries[path], files, digest if is_read(path) else None)

    several = digested is not None and len(digested) > 1  # of one, the next block is read ahead
    for path, fault in zip(entries, (in_turn if several else map)(compare, entries), strict=True):
        if fault is not None:
            wrong[path] = fault
        if is_read(path):
            tell(path)
    written = _time(manifest)
    is_copy = any(_time(path) > written for path in entries if path not in wrong)
    return [_fault(path, change, written, is_copy) for path, change in wrong.items()]


def _wrong(path: Place, entry: Mapping[str, Any], files: Files, digest: Digest | None) -> _Wrong | None:
    files.links.check(path)  # no fault of the file, and said with its own remedy
    try:
        source = files.source(path)
        if source.size != entry["bytes"]:
            return _Wrong(f"has {source.size} bytes, expected {entry['bytes']}")
        return _Wrong("") if digest and digest(source, entry) != entry["blake3"] else None
    except (NotFoundError, FormatError) as error:
        return _Wrong(error.subject, True)


class _Wrong(NamedTuple):
    what: str
    is_lost: bool = False


def _fault(path: Place, wrong: _Wrong, written: int, is_copy: bool) -> FileFault:
    if wrong.is_lost:
        return FileFault(path, Change.LOST, wrong.what)
    later = Change.UNTOLD if is_copy else Change.REWRITTEN
    change = later if _time(path) > written else Change.DAMAGED
    return FileFault(path, change, f"{change.value}; it {wrong.what}" if wrong.what else change.value)


def _time(path: Place) -> int:
    """Returns when a file was last written to, in nanoseconds; 0 if unknown."""
    facts = stat_of(path)
    return facts.changed or 0 if facts else 0
