"""Part records: what an attempt at a task wrote and proved. The first that is created counts, and none is changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NotRequired, Protocol, TypedDict

from statekit.errors import CorruptError, Faults, RefusedError
from statekit.files.manifest import FileEntry, TensorEntry, inside, leaf_faults, leaves_in
from statekit.files.tree import Place
from statekit.tensors.digest import json_digest
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Finite, Name, Natural, typed

_ATTEMPT = re.compile(r"\d{5,}-[0-9a-f]{32}")
PARTS = "parts"
FORMAT = "statekit-part"
VERSION = 3
_BROKEN = "A part record can't be trusted"


class PartFile(FileEntry):
    """A file that a task wrote: when, in nanoseconds since 1970; in a store, as which state of the object."""

    changed: NotRequired[Natural]
    identity: NotRequired[Name]


class PartMeasured(TypedDict):
    """How far what a task rounded is off, as in `statekit.conversion.rounded.Measured`."""

    asked: str
    values: Natural
    rounded: Natural
    largest: Finite
    lost: Natural


class PartDocument(TypedDict):
    """The fields of a part record."""

    format: str
    version: Natural
    work: str
    task: Natural
    attempt: Name
    files: dict[Name, PartFile]
    tensors: dict[str, TensorEntry]
    checked: dict[str, str]
    records: dict[str, Any]
    measured: list[PartMeasured]
    seconds: Finite
    digest: str


@dataclass(frozen=True)
class PartRecord:
    """What an attempt at a task wrote and proved.

    Attributes:
        work: Digest of the work's document, which has the plan's and the fingerprint of the codecs.
        task: The task's number.
        attempt: Name of the attempt, which is that of the folder with its files.
        files: Name in the target -> size, BLAKE3, and what tells a later change.
        tensors: Name in the target -> shape, dtype and BLAKE3.
        checked: Name in the source -> BLAKE3, of tensors that aren't written as they are.
        records: What the container needs of each section to join them, by the section's name.
        measured: How far what was rounded is from what it was made of.
        seconds: How long the attempt took.
    """

    work: str
    task: int
    attempt: str
    files: Mapping[str, PartFile]
    tensors: Mapping[str, Mapping[str, Any]]
    checked: Mapping[str, str]
    records: Mapping[str, Any]
    measured: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0

    def result(self, with_files: bool) -> dict[str, Any]:
        """Returns what all attempts at a task have in common; files too, where the container repeats their bytes."""
        files = {name: (entry["bytes"], entry["blake3"]) for name, entry in self.files.items()}
        values = {"tensors": dict(self.tensors), "checked": dict(self.checked)}
        return {**values, "files": files} if with_files else values

    def files_alone(self) -> dict[str, dict[str, Any]]:
        """Returns the entries of the files as a manifest has them."""
        apart = ("changed", "identity")
        return {
            name: {key: fact for key, fact in entry.items() if key not in apart}
            for name, entry in self.files.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the record with its heading and, last, its own digest."""
        document = {"format": FORMAT, "version": VERSION, **asdict(self)}
        document["measured"] = list(self.measured)
        return {**document, "digest": json_digest(document)}


def check_own_digest(
    document: Mapping[str, Any], version: tuple[str, int], place: Place, subject: str, remedy: str
) -> None:
    """Checks that a document has a format and version, and is what its own digest was made of.

    Raises:
        CorruptError: It was changed, or is torn.
    """
    digest = json_digest({key: value for key, value in document.items() if key != "digest"})
    if (document["format"], document["version"], document["digest"]) != (*version, digest):
        raise CorruptError(
            f"{subject}: its own digest doesn't fit.",
            place=place,
            expected=digest,
            found=document["digest"],
            remedy=remedy,
        )


class Records(Protocol):
    """Where part records are: a `statekit.scale.site.Site`."""

    @property
    def place(self) -> Place: ...
    def read(self, name: str) -> bytes: ...
    def create(self, name: str, data: bytes) -> bool: ...
    def set_aside(self, name: str) -> None: ...


def part_name(number: int) -> str:
    """Returns the name of a task's part record."""
    return f"{PARTS}/{number:05}.json"


def read_part(data: bytes, place: Place) -> PartRecord:
    """Reads a part record and proves that it says what its writer wrote.

    Raises:
        FormatError: It is none.
        CorruptError: It was changed, or is torn.
        RefusedError: It names files outside its attempt's folder.
    """
    document: Any = strict_json(data, place)
    fields = typed(document, PartDocument, place, _BROKEN)
    check_own_digest(document, (FORMAT, VERSION), place, _BROKEN, "run the task again")
    if not _ATTEMPT.fullmatch(fields["attempt"]) or not all(map(inside, fields["files"])):
        raise RefusedError(
            f"{_BROKEN}: it names files elsewhere.", place=place, found=repr(fields["attempt"])
        )
    Faults(
        (fault, name)
        for name, entry in fields["files"].items()
        for fault in leaf_faults(entry["bytes"], leaves_in(entry))
    ).check(CorruptError, _BROKEN, place=place, remedy="run the task again")
    names = ("work", "task", "attempt", "files", "tensors", "checked", "records")
    values: dict[str, Any] = {name: document[name] for name in names}
    return PartRecord(**values, measured=tuple(fields["measured"]), seconds=float(fields["seconds"]))


def publish(
    part: PartRecord, records: Records, counting: Callable[[], PartRecord | None], repeats: bool
) -> PartRecord:
    """Creates a part record in one step, unless there is one; returns the record that counts.

    Args:
        part: The record.
        records: Where it shall be.
        counting: Gives the record that was created before, if it can be trusted and its files are there.
        repeats: Whether another attempt writes the same files.

    Raises:
        CorruptError: Another attempt's record says that it wrote something else.
        CommitError: It can't be written.
    """
    name = part_name(part.task)
    while not records.create(name, json.dumps(part.to_json(), allow_nan=False).encode("ascii")):
        earlier = counting()
        if earlier is not None:
            _check_same(earlier, part, records.place / name, repeats)
            return earlier
        records.set_aside(name)  # torn, or of another work, or without its files: it counts for nothing
    return part


def _check_same(earlier: PartRecord, part: PartRecord, place: Place, repeats: bool) -> None:
    """Refuses two attempts at a task that wrote different bytes."""
    if earlier.result(repeats) != part.result(repeats):
        raise CorruptError(
            "Two attempts at a task wrote different bytes: the source changed, or a machine computes otherwise.",
            place=place,
            expected=f"what attempt {earlier.attempt} wrote",
            found=f"attempt {part.attempt}",
            remedy="drop the work (statekit work drop) and split it again",
        )
