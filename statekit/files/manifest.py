"""The manifest: what a checkpoint holds, digest by digest, and when a reader may trust it.

A folder holds it as `statekit.json`; a file that statekit writes keeps the same document inside, and one that it seals
has it beside, as `statekit.<name>.json`. docs/format.md defines every field.

A manifest inside a file holds the digest of all other bytes of that file:

    "rest": {"bytes": "...", "blake3": "...", "apart": ["<start>+<count>", ...], "leaves": [...]}

What is apart are the manifest's own text, which holds the digest, and checksums of the format that depend on it; both
are proven by themselves. For the digest their bytes count as zeros. The numbers are as wide as the widest, so that a
file is written with a manifest that knows none of them, and then gets them in their places.

A large file has leaves, runs of bytes that are the values of one tensor. Its digest is of the digests of these and of
the bytes around them. So whoever has digested the tensor has digested the leaf, and each byte is digested once.
"""

from __future__ import annotations

import json
import math
import threading
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NotRequired, TypeAlias, TypedDict, cast

from blake3 import blake3

from statekit.budget import Account
from statekit.errors import CommitError, CorruptError, Faults, FormatError, RefusedError
from statekit.files.durable import sync
from statekit.files.source import File, Files, read_small, source_digest, walked
from statekit.files.tree import AnyPlace, Place
from statekit.pipeline import ahead, working
from statekit.tensors.digest import json_digest
from statekit.tensors.tensor import BLOCK_BYTES, DTYPES, Tensor, dtype_name
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
"""Field of a manifest inside a file: the digest of all other bytes of the file."""
FORMAT = "statekit-manifest"
_BROKEN = "The manifest doesn't follow its format"
VERSIONS = 1, 2
"""Versions that are read; the second is that of a manifest with a file that has leaves, whose digest is another."""


LEAVES = "leaves"
"""Field of a file's entry: its leaves, each as first byte, size in bytes, and the tensor's name."""
LEAF_BYTES = 2**20
"""Bytes of a tensor from which on it is a leaf: digesting less costs no more than naming it."""
WORTH_BYTES = 2**26
"""Bytes of leaves from which on a file has such: below, older readers are worth more than a hundredth of a second."""
_WITHOUT_LEAVES = ("bool",)
"""Dtypes whose values don't say every bit that is stored."""
_GAP = 2**16
"""Bytes that nobody has read, up to which they are read in between."""
_KEPT = 4
Spans: TypeAlias = Sequence[tuple[int, int]]
LeafRow: TypeAlias = tuple[Natural, Natural, Name]


class Side(TypedDict):
    """What was written, or what it was made from."""

    container: NotRequired[Name | None]
    layout: NotRequired[Name | None]
    step: NotRequired[Natural | None]


class FileEntry(TypedDict):
    """A file."""

    bytes: Natural
    blake3: str
    leaves: NotRequired[list[LeafRow]]


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
    leaves: NotRequired[list[LeafRow]]


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
    number = VERSIONS[any(LEAVES in entry for entry in _entries(fields))]
    document = {"format": FORMAT, "version": number, "tool": f"statekit {version('statekit')}", **fields}
    return {**document, "digest": json_digest(document)}


def _entries(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a manifest's entries of files: of those that it names, and of the file that holds it."""
    return [*fields.get("files", {}).values(), *([fields[REST]] if REST in fields else [])]


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
    if document.get("version") is True or document.get("version") not in VERSIONS:
        raise FormatError(
            "The manifest has another version than this statekit reads.",
            place=place,
            expected=f"version {' or '.join(map(str, VERSIONS))}",
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
    typed(document, Document, place, _BROKEN)
    Faults(_faults_of_leaves(document)).check(FormatError, _BROKEN, place=place)
    return document, faults


def _faults_of_leaves(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the faults of a manifest's leaves, with the file of each. Where the file ends is checked with the file."""
    if document["version"] == VERSIONS[0] and any(LEAVES in entry for entry in _entries(document)):
        yield f"has leaves, which version {VERSIONS[0]} lacks", FILE
    for name, entry in document["files"].items():
        yield from ((fault, name) for fault in leaf_faults(entry["bytes"], leaves_in(entry)))
    yield from ((fault, REST) for fault in leaf_faults(2**63, leaves_in(document.get(REST, {}))))


def require_manifest(folder: Place) -> dict[str, Any]:
    """Reads the manifest of a folder that must have one.

    Raises:
        NotFoundError: No manifest.
        FormatError: Not a manifest, or one that names files outside the folder.
        CorruptError: It was changed after it was written.
    """
    path = folder / FILE
    manifest = parse(read_small(path), path)
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


def file_entry(path: Place) -> dict[str, Any]:
    """Returns the entry of a file of ours in a manifest, by the digest of all its bytes."""
    with Files() as files:
        source = files.source(path)
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


_WIDTH = 20
_BLOCK = 2**20
MOST_APART = 16
"""Runs of bytes that a digest leaves out at most, as each block that is read is compared with all; we write three."""


class Around:
    """What is written to a file around the values of tensors: runs of bytes, digested in the order of their writing.

    Tensors have digests of their own; with these, every byte that was written is compared when it is read again.
    """

    def __init__(self) -> None:
        self._hasher = blake3()
        self._runs: list[tuple[int, int]] = []

    def take(self, start: int, data: memoryview) -> None:
        """Takes bytes that are written, and where."""
        self._hasher.update(data)
        first, size = self._runs[-1] if self._runs else (0, -1)
        if first + size == start:
            self._runs[-1] = first, size + len(data)
        else:
            self._runs.append((start, len(data)))

    def fault(self, file: File) -> str:
        """Reads them again; returns what is wrong, "" if they are what was written."""
        hasher = blake3()
        for start, size in self._runs:
            for at in range(start, start + size, BLOCK_BYTES):
                hasher.update(file.read(at, min(BLOCK_BYTES, start + size - at)).data)
        same = hasher.digest() == self._hasher.digest()
        return "" if same else "has other bytes around its tensors than were written"


class Leaf(NamedTuple):
    """A run of a file's bytes that are the values of a tensor, little-endian and in C order.

    Attributes:
        start: The first byte.
        bytes: How many.
        name: The tensor's name.
    """

    start: int
    bytes: int
    name: str

    @property
    def stop(self) -> int:
        """The byte behind the last."""
        return self.start + self.bytes


def leaves_in(entry: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """Returns the leaves of a file by its entry in a manifest."""
    return tuple(Leaf(*row) for row in entry.get(LEAVES, ()))


def field_of(leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Returns the field of a file's entry; none if it has no leaves."""
    return {LEAVES: [list(leaf) for leaf in leaves]} if leaves else {}


def leaf_faults(size: int, leaves: Sequence[Leaf], apart: Spans = ()) -> Iterator[str]:
    """Yields why runs can't be the leaves of a file: together with the bytes around them they are all of it, once.

    Args:
        size: Bytes of the file.
        leaves: The runs.
        apart: Runs of bytes that its digest leaves out.
    """
    for leaf in leaves:
        if not 0 <= leaf.start < leaf.stop <= size:
            yield f"the leaf {leaf.start}+{leaf.bytes} isn't within {size} bytes"
        if any(leaf.start < start + count and start < leaf.stop for start, count in apart):
            yield f"the leaf {leaf.start}+{leaf.bytes} holds bytes that the digest leaves out"
    for before, leaf in pairwise(leaves):
        if leaf.start < before.stop:
            yield f"the leaf {leaf.start}+{leaf.bytes} doesn't lie behind {before.start}+{before.bytes}"


class Written:
    """Where in a file the values of tensors were written."""

    def __init__(self) -> None:
        self._runs: list[Leaf] = []

    def take(self, start: int, size: int, name: str) -> None:
        """Takes that bytes of a tensor were written, and where; of each tensor in the order of its bytes."""
        last = self._runs[-1] if self._runs else None
        if last is not None and (last.name, last.stop) == (name, start):
            self._runs[-1] = Leaf(last.start, last.bytes + size, name)
        else:
            self._runs.append(Leaf(start, size, name))

    def leaves(self, tensors: Mapping[str, Mapping[str, Any]]) -> tuple[Leaf, ...]:
        """Returns the file's leaves, in its order."""
        leaves = sorted(run for run in self._runs if run.name in tensors and _is_leaf(run, tensors[run.name]))
        return tuple(leaves) if sum(leaf.bytes for leaf in leaves) >= WORTH_BYTES else ()


def _is_leaf(run: Leaf, entry: Mapping[str, Any]) -> bool:
    """Tells whether a run that was written is a whole tensor, and worth to be a leaf."""
    size = math.prod(entry["shape"]) * DTYPES[entry["dtype"]].itemsize
    return run.bytes == size >= LEAF_BYTES and entry["dtype"] not in _WITHOUT_LEAVES


class Passing:
    """The digest of a file, taken from its bytes as they are read, in order.

    What passes in another order is read once more at the end. A leaf isn't digested if all of it passes, and whoever
    reads it says in `tensors` what the digest of its tensor is.

    Args:
        spans: Runs of bytes that count as zeros; none lies in a leaf.
        leaves: The file's leaves.
        at: How many bytes have passed already.
        hasher: What took them.

    Attributes:
        leaves: The file's leaves.
        tensors: Name -> digest, of tensors whose values were digested while they passed.
    """

    def __init__(
        self, spans: Spans = (), leaves: Sequence[Leaf] = (), at: int = 0, hasher: blake3 | None = None
    ) -> None:
        self.leaves, self.tensors = tuple(leaves), dict[str, str]()
        self._spans = frozenset(spans)
        self._starts = [leaf.start for leaf in self.leaves]
        self._passed = self._starts.copy()
        self._hasher, self._at = hasher or blake3(), at
        self._before: deque[tuple[int, blake3]] = deque(maxlen=_KEPT)
        self._lock = threading.RLock()
        self._file: File | None = None

    def take(self, start: int, data: memoryview) -> None:
        """Takes bytes that pass by, and where they stand."""
        stop = start + len(data)
        with self._lock:
            self._note(start, stop)
            if self._file is not None and self._at < start <= self._at + _GAP:
                self._file.read(self._at, start - self._at)  # which tells of these bytes
            if not start <= self._at < stop:
                return
            if self._spans:  # of a folder's thousands of files, copies would be most of what is held
                self._before.append((self._at, self._hasher.copy()))
            for first, last in self._around(self._at, stop):
                with working("digest"):
                    self._hasher.update(_blanked(data[first - start : last - start], first, self._spans))
            self._at = self._behind(stop)

    def _note(self, start: int, stop: int) -> None:
        """Notes how far leaves have passed."""
        number = max(bisect_right(self._starts, start) - 1, 0)
        while number < len(self.leaves) and self._starts[number] < stop:
            if start <= self._passed[number] < stop:
                self._passed[number] = min(stop, self.leaves[number].stop)
            number += 1

    def _around(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the runs of bytes between two places that aren't in a leaf, as first byte and byte behind the last."""
        at = start
        first = max(bisect_right(self._starts, start) - 1, 0)
        for number in range(
            first, bisect_left(self._starts, stop)
        ):  # a slice would copy the rest at each read
            leaf = self.leaves[number]
            if at < leaf.start:
                yield at, leaf.start
            at = max(at, leaf.stop)
        if at < stop:
            yield at, stop

    def _behind(self, at: int) -> int:
        """Returns the end of the leaf that a place lies in, or the place itself if it lies in none."""
        number = bisect_right(self._starts, at) - 1
        return max(at, self.leaves[number].stop) if number >= 0 else at

    @contextmanager
    def read(self, file: File) -> Iterator[None]:
        """Takes what is read of a file in a context, by all that draw on the budget of this one."""
        listeners = file.account.budget.listeners
        self._file, listeners[file.identity] = file, self.take
        try:
            yield
        finally:
            del listeners[file.identity]
            self._file = None

    def digest(self, file: File, spans: Spans = ()) -> str:
        """Returns the digest of a file, reading what hasn't passed; the bytes of some runs count as zeros."""
        first = min((start for start, _ in self._spans.symmetric_difference(spans)), default=file.size)
        with self._lock:
            states = [(0, blake3()), *self._before, (self._at, self._hasher)]
        at, hasher = next((at, state.copy()) for at, state in reversed(states) if at <= first)
        digests = list[str]()
        for number, leaf in enumerate(self.leaves):  # in the file's order, as a store likes to be read
            self._update(hasher, file, at, leaf.start, spans)
            at = max(at, leaf.stop)
            digests.append(self._leaf_digest(file, number))
        self._update(hasher, file, at, file.size, spans)
        if not self.leaves:
            return str(hasher.hexdigest())
        return digest_of_leaves(file.size, hasher.hexdigest(), self.leaves, digests)

    def _leaf_digest(self, file: File, number: int) -> str:
        leaf = self.leaves[number]
        digest = self.tensors.get(leaf.name)
        if digest is not None and self._passed[number] == leaf.stop:
            return digest
        hasher = blake3()
        self._update(hasher, file, leaf.start, leaf.stop, ())
        return str(hasher.hexdigest())

    def _update(self, hasher: blake3, file: File, start: int, stop: int, spans: Spans) -> None:
        """Has a run of a file's bytes digested."""
        blocks = _blocks(file, start, stop, spans)
        for block in ahead(blocks) if stop - start > BLOCK_BYTES else blocks:
            with working("digest"):
                hasher.update(block)


def digest_of_leaves(size: int, around: str, leaves: Sequence[Leaf], digests: Sequence[str]) -> str:
    """Returns the digest of a file with leaves, which is that of a canonical JSON of its parts.

    Args:
        size: Bytes of the file.
        around: Digest of all bytes that are in no leaf, one after the other.
        leaves: The leaves, in the file's order.
        digests: Their digests.
    """
    runs = [[leaf.start, leaf.bytes, digest] for leaf, digest in zip(leaves, digests, strict=True)]
    return json_digest({"format": "statekit-file", "bytes": size, "around": around, LEAVES: runs})


def digest_by(passing: Passing | None, file: File, entry: Mapping[str, Any], spans: Spans = ()) -> str:
    """Returns a file's digest in the form that its entry in a manifest has.

    Args:
        passing: What took the file's bytes as they were read. Where it has another digest than the entry by what
            others digested, the file's own bytes decide.
        file: The file.
        entry: Its entry.
        spans: Runs of bytes that count as zeros.
    """
    leaves = leaves_in(entry)
    if passing is not None and passing.leaves == leaves:
        digest = passing.digest(file, spans)
        if not leaves or digest == entry["blake3"]:
            return digest
    return Passing(spans, leaves).digest(file, spans) if leaves or spans else source_digest(file)


def _blocks(file: File, start: int, stop: int, spans: Spans) -> Iterator[memoryview]:
    for at in range(start, stop, BLOCK_BYTES):
        block = file.read(at, min(BLOCK_BYTES, stop - at))
        yield _blanked(block.data, at, spans)


def _blanked(data: memoryview, at: int, spans: Iterable[tuple[int, int]]) -> memoryview:
    """Returns bytes of a file, of which the first is its byte `at`, with zeros for those of some runs."""
    is_copied = False
    for begin, count in spans:
        low, high = max(begin - at, 0), min(begin + count - at, len(data))
        if low < high:
            data, is_copied = data if is_copied else memoryview(bytearray(data)), True
            data[low:high] = bytes(high - low)
    return data


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


def unknown_rest(apart: int, leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Returns the field of a manifest whose file isn't written yet.

    Args:
        apart: How many runs of bytes it will have apart.
        leaves: Its leaves, which are all written.
    """
    return _field("0" * 64, 0, [(0, 0)] * apart, leaves)


def _field(digest: str, size: int, spans: Spans, leaves: Sequence[Leaf]) -> dict[str, Any]:
    wide = [f"{start:0{_WIDTH}}+{count:0{_WIDTH}}" for start, count in spans]
    return {"bytes": f"{size:0{_WIDTH}}", "blake3": digest, "apart": wide, **field_of(leaves)}


@dataclass(frozen=True)
class Unfinished:
    """A file that was written with a manifest in it which lacks the file's digest.

    Attributes:
        path: The file.
        manifest: The manifest in it.
        encode: Gives a manifest's bytes as they stand in the file.
        around: What was written around tensors.
        at: Where the manifest stands.
        run: The bytes whose CRC-32 depends on it, if there are such.
    """

    path: Path
    manifest: Mapping[str, Any]
    encode: Callable[[Mapping[str, Any]], bytes]
    around: Around
    at: int
    run: Checked | None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The runs of bytes that the digest leaves out."""
        fields = self.run.fields if self.run else ()
        return [(self.at, len(self.encode(self.manifest))), *((field, 4) for field in fields)]

    def passing(self) -> Passing:
        """Returns what takes the file's digest as it is read again."""
        return Passing(self.spans, leaves_in(self.manifest[REST]))

    def finish(self, passing: Passing) -> dict[str, Any]:
        """Fills in the digest, syncs the file, and reads that again; returns what the manifest now says of the file.

        Args:
            passing: What took the file's bytes as they were read again.

        Raises:
            CommitError: What was written isn't there.
        """
        spans, path = self.spans, self.path
        with Files() as files:
            file = files.source(path)
            if fault := self.around.fault(file):
                raise CommitError(f"The written file differs from the data: it {fault}.", place=path)
            rest = _field(passing.digest(file, spans), file.size, spans, passing.leaves)
        new = self.encode(sealed({**{k: v for k, v in self.manifest.items() if k != "digest"}, REST: rest}))
        if len(new) != spans[0][1]:
            raise CommitError("A manifest doesn't fit its place.", place=path)
        with path.open("r+b", buffering=0) as raw:
            output, put = cast(BinaryIO, raw), {self.at: new}
            _put(output, put)
            if self.run is not None:
                crc = _crc(output, self.run).to_bytes(4, "little")
                put |= dict.fromkeys(self.run.fields, crc)
                _put(output, put)
            sync(output.fileno())
            for start, data in put.items():
                output.seek(start)
                if output.read(len(data)) != data:
                    raise CommitError("The written file differs from the data: its manifest.", place=path)
        return rest


def unfinished(
    path: Path,
    manifest: Mapping[str, Any],
    encode: Callable[[Mapping[str, Any]], bytes],
    checked: FindChecked,
    around: Around,
) -> Unfinished:
    """Finds the bytes of a manifest in a written file, and the checksums that depend on it.

    Args:
        path: The file.
        manifest: The manifest in it.
        encode: Gives a manifest's bytes as they stand in the file.
        checked: Finds the CRC-32 that depends on the manifest.
        around: What was written around tensors.

    Raises:
        CommitError: The manifest isn't in the file.
    """
    with Files() as files:
        file = files.source(path)
        at = _only(file, encode(manifest))
        return Unfinished(path, manifest, encode, around, at, checked(file, at))


def _put(output: BinaryIO, put: Mapping[int, bytes]) -> None:
    """Writes bytes to their places."""
    for start, data in put.items():
        output.seek(start)
        output.write(data)


def stated_spans(rest: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Returns the runs of bytes that a manifest inside says are apart.

    Raises:
        ValueError: It doesn't say any, or more than anybody writes.
    """
    if len(rest["apart"]) > MOST_APART:
        raise ValueError(f"{len(rest['apart'])} runs of bytes are apart")
    pairs = [pair.split("+") for pair in rest["apart"]]
    return sorted((int(start), int(count)) for start, count in pairs)


def size_fault(file: File, rest: Mapping[str, Any]) -> str:
    """Compares a file's size with what the manifest inside says of it, without reading; "" if it fits."""
    try:
        size, _ = int(rest["bytes"]), stated_spans(rest)
    except ValueError:
        return "the manifest inside has no digest of its file"
    is_unknown = size == 0  # it is being written, or its digest is of no file
    return "" if is_unknown or size == file.size else f"has {file.size} bytes, expected {size}"


def whole_file_fault(file: File, rest: Mapping[str, Any], passing: Passing | None = None) -> str:
    """Reads a whole file and compares it with what the manifest inside says of it; "" if it fits.

    Args:
        file: The file.
        rest: The manifest's field.
        passing: What took its bytes as they were read, so that they needn't be again.
    """
    if fault := size_fault(file, rest):
        return fault
    size, spans, leaves = file.size, stated_spans(rest), leaves_in(rest)
    fits = all(0 <= start <= start + count <= size for start, count in spans)
    fits = fits and not any(leaf_faults(size, leaves, spans))
    if fits and digest_by(passing, file, rest, spans) == rest["blake3"]:
        return ""
    return "isn't the file that was written: bytes were changed since, or are damaged"


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
