"""thin: keeps the weights of a checkpoint, in another one beside it, and removes it with its optimizer's slots.

Nothing is removed before the weights are written, read again and compared, and every byte of the checkpoint has been
held against its manifest. The checkpoint first moves into a folder beside it, where it must be what was proven: a half
checkpoint never stands under its own name. An attempt that was ended before that is undone, and all is proven again.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NotRequired, TypeAlias, TypedDict

from statekit.conversion import registry
from statekit.conversion.changing.changes import Changes
from statekit.conversion.check import check
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.plan import Plan
from statekit.errors import CorruptError, Faults, RefusedError, StatekitError, UsageError, some
from statekit.files.durable import beside as temporary_beside
from statekit.files.durable import new_file, rename_new, sync_folder, writing
from statekit.files.integrity import files_of
from statekit.files.manifest import beside, files_below, inside
from statekit.files.source import read_small
from statekit.files.stage import Progress
from statekit.service.tasks.listener import Listener
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, typed

_REMOVED = ".statekit-thinned-"
_LIST = "removed.json"


class _Said(TypedDict):
    """What is said of a thinning, as `thin` returns it."""

    target: Name
    removed: list[Name]
    freed: int


class _Removing(TypedDict):
    """What is written down to go: the names beside the list, what is said of it, and whether all of it is moved."""

    tops: list[Name]
    said: _Said
    moved: NotRequired[bool]


_Facts: TypeAlias = Mapping[str, tuple[int, int, int]]
"""Size, time of the last change and number of each file, by its name in the folder above the checkpoint."""


NEUTRAL = "statekit"
"""The container that takes any weights."""


def thin(
    ref: CheckpointRef, target: Path, *, to: str | None, dry_run: bool, listener: Listener
) -> dict[str, Any]:
    """Replaces a checkpoint by its weights.

    Args:
        ref: The checkpoint, which is sealed, with its container and what its files don't say.
        target: Where its weights shall be.
        to: The target's; the source's, or statekit's own where that has no place for weights alone, if None.
        dry_run: Whether it is only said what would be done: the weights are written, measured and removed.
        listener: Told how far it is.

    Returns:
        `freed`: bytes of the disk that are free now, or would be; `bytes_before` and `bytes_after` that are taken;
        `removed`: names of files; `target` with its container.

    Raises:
        RefusedError: The source has no manifest of its own, or holds files that it doesn't name; or an earlier job has
            begun to remove it, and something else is asked now.
        CorruptError: It isn't what its manifest says, or it was written to meanwhile.
        CommitError: The weights can't be written, or it can't be removed.
    """
    source, container = Path(ref.place), str(ref.container)
    trash = source.with_name(f"{_REMOVED}{source.name}")
    record = _listed(trash)
    if record is not None and _is_begun(record, source, target, dry_run):
        return _go_on(trash, record, listener)
    if record is not None and (os.path.lexists(source) or not record.get("moved", False)):
        _take_back(trash, record)
    tops, files = _sealed(ref)
    planned = _planned(ref, target, to)
    going = [*tops, *(manifest for manifest in map(beside, tops) if manifest.is_file())]
    before = _allocated(going)
    asked = {
        "target": str(target),
        "container": planned.target.container,
        "bytes_before": before,
        "removed": [os.path.relpath(file, source.parent) for file in files],
        "exactness": planned.exactness.name.lower(),
    }
    if dry_run:
        after = _measured(ref, target, to, listener)
        return {**asked, "dry_run": True, "bytes_after": after, "freed": before - after}
    facts = _facts(going)
    listener.progress(None, "checking every byte of the checkpoint")
    report = check(
        source, container=container, on_progress=lambda progress: _tell(listener, progress, 0.0, 0.4)
    )
    _refuse_damage(report.to_json()["checkpoints"], source)
    if not is_of_plan(target, planned):
        convert(planned, on_progress=lambda progress: _tell(listener, progress, 0.4, 0.8))
    written = check(target, on_progress=lambda progress: _tell(listener, progress, 0.8, 1.0))
    _refuse_damage(written.to_json()["checkpoints"], target)
    after = _allocated([target, beside(target)])
    record = _listed_to_go(trash, going, {**asked, "bytes_after": after, "freed": before - after})
    return _go_on(trash, record, listener, facts)


def _sealed(ref: CheckpointRef) -> tuple[list[Path], list[Path]]:
    """Returns what a checkpoint lies in, and all of its files; refuses what its manifest doesn't prove."""
    source = Path(ref.place)
    with registry.opened(registry.container(str(ref.container)), source, None, ref) as checkpoint:
        proof, files = checkpoint.proof, [*map(Path, files_of(checkpoint))]
        tops = [*map(Path, checkpoint.parts)]
    if proof is None or not proof.is_whole:
        raise RefusedError(
            "The checkpoint is not sealed: nothing proves its weights.",
            place=source,
            remedy="seal it, when you are sure of it",
        )
    if not proof.is_inside and (unnamed := [file for file in files if file not in proof.files]):
        raise RefusedError(
            "There are files that the manifest doesn't name: they would go with the checkpoint.",
            place=source,
            found=some([os.path.relpath(file, source.parent) for file in unnamed]),
            remedy="move them elsewhere, or seal the checkpoint with them",
        )
    return tops or [source], files


def _measured(ref: CheckpointRef, target: Path, to: str | None, listener: Listener) -> int:
    """Writes a checkpoint's weights and removes them again; returns the bytes that they take."""
    listener.progress(None, "writing the weights, to see what they take")
    with temporary_beside(target) as folder:
        place = folder / target.name
        convert(_planned(ref, place, to), on_progress=lambda progress: _tell(listener, progress, 0.0, 1.0))
        return _allocated([place, beside(place)])


def _planned(ref: CheckpointRef, target: Path, to: str | None) -> Plan:
    def to_container(name: str) -> Plan:
        changes = Changes.of({"params_only": True})
        return plan(ref, target, to=name, require=Exactness.ROUNDING, changes=changes)

    if to is not None:
        return to_container(to)
    try:
        return to_container(str(ref.container))
    except UsageError:  # a container of runs, or one that is only read
        return to_container(NEUTRAL)


def is_of_plan(target: Path, planned: Plan) -> bool:
    """Tells whether what lies at a target was written by this very plan, in an attempt that was ended."""
    if not os.path.lexists(target):
        return False
    try:
        container, _ = registry.detect_container(target)
        with registry.opened(container, target, None, CheckpointRef()) as written:
            return written.manifest is not None and written.manifest.get("plan") == planned.digest
    except StatekitError:
        return False


def _refuse_damage(checkpoints: Sequence[Mapping[str, Any]], place: Path) -> None:
    faults = Faults(
        (fault["what"], fault["place"]) for checkpoint in checkpoints for fault in checkpoint["faults"]
    )
    faults.check(
        CorruptError,
        "The checkpoint isn't what was written",
        place=place,
        remedy="nothing was removed; find out why",
    )


def _tell(listener: Listener, progress: Progress, begin: float, end: float) -> None:
    done = progress.done / progress.total if progress.total else 0.0
    listener.progress(begin + (end - begin) * min(done, 1.0), f"{progress.phase}: {progress.name}")


def _facts(tops: Sequence[Path]) -> _Facts:
    """Returns what is seen of all files of files and folders that lie in one folder."""
    files = [
        (top.name, *([name] if name else []))
        for top in tops
        for name in (files_below(top) if stat.S_ISDIR(top.lstat().st_mode) else [""])
    ]
    facts = {"/".join(parts): tops[0].parent.joinpath(*parts).lstat() for parts in files}
    return {name: (fact.st_size, fact.st_mtime_ns, fact.st_ino) for name, fact in facts.items()}


def _allocated(places: Sequence[Path]) -> int:
    """Returns how many bytes of the disk files and folders take; what has another name too isn't theirs to give."""
    files = [file for place in places for file in (place, *(place.rglob("*") if place.is_dir() else ()))]
    facts = [file.lstat() for file in files if file.is_file()]
    return sum(fact.st_blocks * 512 for fact in facts if fact.st_nlink == 1)


def _listed_to_go(trash: Path, tops: Sequence[Path], outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Writes down what shall go, and returns that."""
    record = {"tops": [top.name for top in tops], "said": dict(outcome)}
    with writing(trash):
        if trash.is_symlink():
            raise RefusedError("What goes first to a folder would go through a link.", place=trash)
        trash.mkdir(exist_ok=True)
        _write(trash, record)
    return record


def _write(trash: Path, record: Mapping[str, Any]) -> None:
    draft = trash / f"{_LIST}.new"
    with new_file(draft) as output:
        output.write(json.dumps(record).encode("ascii"))
    os.replace(draft, trash / _LIST)
    sync_folder(trash)
    sync_folder(trash.parent)


def _listed(trash: Path) -> dict[str, Any] | None:
    """Returns what is written down to go; None if nothing is."""
    if not (trash / _LIST).is_file():
        return None
    # Whoever may write into the folder could leave a list there too.
    if trash.lstat().st_uid != os.geteuid() or trash.is_symlink():
        raise RefusedError("This list of what shall go was written by somebody else.", place=trash)
    place = trash / _LIST
    record: dict[str, Any] = strict_json(read_small(place), place)
    typed(record, _Removing, place, "This is no list of what shall go", RefusedError)
    if any(not inside(name) or "/" in name for name in record["tops"]):
        raise RefusedError("The files to remove do not lie beside the list.", place=trash)
    return record


def _is_begun(record: Mapping[str, Any], source: Path, target: Path, dry_run: bool) -> bool:
    """Tells whether an earlier attempt at the same has moved the checkpoint: nothing is left but to remove it."""
    weights = record["said"]["target"]
    if not os.path.lexists(weights):
        return False
    if dry_run or str(target) != weights:
        raise RefusedError(
            "An earlier job has begun to remove the checkpoint.",
            place=source,
            found=f"its weights are in {weights}",
            remedy="thin it to that target, which continues this; or remove the target, if the checkpoint is whole",
        )
    # A checkpoint that has the name by now is another one.
    return bool(record.get("moved", False)) and not os.path.lexists(source)


def _go_on(
    trash: Path, record: Mapping[str, Any], listener: Listener, facts: _Facts | None = None
) -> dict[str, Any]:
    """Removes what is written down to go, from wherever an earlier attempt has come to."""
    outcome: dict[str, Any] = record["said"]
    if facts is not None:
        _move(trash, record, facts)
    with writing(trash):
        _remove_listed(trash, record)
    listener.log(
        f"removed {some(outcome['removed'])}; {outcome['freed']} bytes are free now; the weights are in "
        f"{Path(outcome['target']).name}"
    )
    return {**outcome, "dry_run": False}


def _move(trash: Path, record: Mapping[str, Any], facts: _Facts) -> None:
    """Moves a checkpoint to where it goes first, and takes it back unless it is what was proven."""
    with writing(trash):
        for name in record["tops"]:
            rename_new(trash.parent / name, trash / name)
        # Under its own name anybody may have added to it until now.
        if _facts([trash / name for name in record["tops"]]) == facts:
            _write(trash, {**record, "moved": True})
            return
    _take_back(trash, record)
    raise CorruptError(
        "The checkpoint was written to while it was thinned; it is still there.",
        place=trash.with_name(record["tops"][0]),
        remedy="thin it when no program writes to it",
    )


def _take_back(trash: Path, record: Mapping[str, Any]) -> None:
    """Gives what an attempt has moved its own name again, and forgets the list, which nobody has proven.

    Where all was moved its parts may be removed already: they go.
    """
    with writing(trash):
        for name in record["tops"] if not record.get("moved", False) else ():
            if os.path.lexists(trash / name):
                rename_new(trash / name, trash.parent / name)
        _remove_listed(trash, record)


def _remove_listed(trash: Path, record: Mapping[str, Any]) -> None:
    """Removes what a list names of its folder, then the list, which whoever is ended meanwhile is followed by.

    What nobody has listed is somebody's, and stays there, in the folder.
    """
    for name in record["tops"]:
        gone = trash / name
        if gone.is_dir() and not gone.is_symlink():
            shutil.rmtree(gone)
        else:
            gone.unlink(missing_ok=True)
    for name in (f"{_LIST}.new", _LIST):
        (trash / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else lies in it
        trash.rmdir()
    sync_folder(trash.parent)
