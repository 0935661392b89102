"""The two verbs of the library: `plan` describes a conversion, and `convert` carries it out.

planned = plan(Path("t5x-ckpt"), Path("torch-ckpt"))
print(planned.exactness, planned.bytes)
report = convert(planned)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_in
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.contracts import NO_HINTS, Exactness, HasEntries, write_cut
from statekit.conversion.kept import FIELD, by_leaf, kept_of, to_field
from statekit.conversion.open_state import OpenState
from statekit.conversion.plan import QUANTIZED, Plan, Request, Side
from statekit.conversion.prepared import Prepared, carried_out, prepare
from statekit.conversion.resume import in_manifest, next_update, of_plan, resume_lines
from statekit.conversion.seal import NEUTRAL
from statekit.conversion.target import written_as
from statekit.errors import CommitError, Faults, StatekitError, TargetExistsError, printable
from statekit.files.checkpoint import Checkpoint
from statekit.files.durable import writing
from statekit.files.homes import Entries, check_target, permissions
from statekit.files.integrity import ProveFiles, check_no_damage, prove_files, proving_files, value_fault
from statekit.files.manifest import tensor_entry
from statekit.files.sections import CutPoints
from statekit.files.source import target_place
from statekit.files.stage import OnProgress, Progress, Stage, silent, staged
from statekit.files.tree import Place, StoredPlace, below
from statekit.maps.links import StateMap
from statekit.pipeline import Times, job
from statekit.state.stored_params import MASTER, check_masters
from statekit.state.train_state import StepOffset
from statekit.tensors.digest import json_digest, tensor_digests
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Tree, tensor_names

if TYPE_CHECKING:  # entered only where something is asked for
    from statekit.conversion.changing.changes import Changes
    from statekit.conversion.rounded import Measured


@dataclass(frozen=True, repr=False)
class Report:
    """What a conversion did.

    Attributes:
        target: Where the result is.
        plan: What was carried out.
        files: Name -> size and digest of every file written.
        bytes: Size of all files written.
        seconds: How long it took.
        verified: How many tensors were read again from the target and found as meant: all of them.
        source_digest: Digest of the source's tensors.
        source_proven: How many tensors of the source had a digest in its manifest, and fit it.
        measured: How far what was rounded, because it was asked for, is from what it was made of.
        times: How long each stage worked.
    """

    target: Place
    plan: Plan
    files: Entries
    bytes: int
    seconds: float
    verified: int
    source_digest: str
    source_proven: int
    measured: tuple[Measured, ...] = ()
    times: Times | None = None

    def __repr__(self) -> str:
        return printable(f"<Report {self.target}: {self.bytes} bytes, {self.verified} tensors verified>")

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain JSON."""
        return {
            "target": str(self.target),
            "plan": self.plan.digest,
            "files": {
                name: {key: entry[key] for key in ("bytes", "blake3")} for name, entry in self.files.items()
            },
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "verified": self.verified,
            "source_digest": self.source_digest,
            "source_proven": self.source_proven,
            **({"uncounted": list(self.plan.uncounted)} if self.plan.uncounted else {}),
            **({"measured": [vars(measure) for measure in self.measured]} if self.measured else {}),
        }


def plan(
    source: CheckpointRef | Place,
    target: Place,
    *,
    from_: str | None = None,
    to: str | None = None,
    layout: str | None = None,
    step: int | None = None,
    hints: CheckpointRef = NO_HINTS,
    step_offset: StepOffset = "keep",
    require: Exactness = Exactness.ROUNDING,
    like: Place | None = None,
    maps: tuple[StateMap, ...] = (),
    changes: Changes | None = None,
    map_options: Mapping[str, Any] = {},
) -> Plan:
    """Plans a conversion without reading a value.

    `statekit.plan` explains the arguments. Here `hints` has what the source does not say, and `require` is a level of
    exactness. `statekit.maps.model_map.maps_of` makes `maps` of the options `map`, `config` and `rename`, and
    `map_options` has these three as the user gave them, so that other processes can make the plan too.
    `statekit.conversion.changing.changes.Changes.of` makes `changes` of all other options.

    Raises:
        As `statekit.plan`.
    """
    ref = ref_of(source, hints, container=from_, step=step)
    return prepare(
        Request(
            ref=ref,
            target=target_place(target),
            to=to,
            layout=layout,
            step_offset=step_offset,
            require=require,
            like=like,
            maps=maps,
            changes=changes,
            map_options=map_options,
        )
    )


def convert(
    plan: Plan,
    *,
    replace: bool = False,
    replace_foreign: bool = False,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
    task_bytes: int | None = None,
) -> Report:
    """Carries out a plan: writes beside the target, proves what was written, gives it the target's name.

    Args:
        plan: What to do.
        replace: Whether an existing target may be replaced that statekit wrote; it stays until the new one is proven
            and synced.
        replace_foreign: Whether any other file or folder may be replaced, too.
        threads: How many threads work on it; as many as there are cores for this process if None. The result is the
            same with any number.
        on_progress: Told about every block.
        task_bytes: Bytes of tensors in a file of the target at most; as the container does it by itself if None.

    Raises:
        TargetExistsError: The target exists, other than as an empty folder, and mustn't be replaced.
        UsageError: The source isn't what it was when the plan was made, or `threads` is no number of them.
        CorruptError: The source isn't what its manifest says.
        CommitError: Writing failed, or the written target differs from the data; nothing was left at the target.
    """
    with job(threads) as times:
        cut = CutPoints(task_bytes)
        report = _converted(plan, replace, replace_foreign, on_progress or silent, cut)
        return replace_in(report, times=times)


def outcome(plan: Plan, report: Report | None) -> dict[str, Any]:
    """Returns a plan, what its execution reports, and how to go on from it, as plain data.

    Args:
        plan: The plan.
        report: None where it wasn't carried out.
    """
    return {
        "plan": plan.to_json(),
        "plan_digest": plan.digest,
        "findings": [vars(finding) for finding in plan.findings],
        "report": report.to_json() if report else None,
        "next_update": [*plan.next_update] or next_update(plan.state, plan.run.schedules),
        "resume": resume_lines(of_plan(plan, report.files if report else ()), plan.state),
    }


def check_place(plan: Plan, replace: bool, replace_foreign: bool) -> None:
    """Refuses a target that can't be written, or mustn't be replaced, before any work.

    Raises:
        TargetExistsError: The target exists, other than as an empty folder, and mustn't be replaced.
        NotFoundError: The target's parent isn't there.
        UsageError: The target's name isn't usable.
    """
    target = plan.request.target
    if isinstance(target, StoredPlace):
        from statekit.files.store_home import check_stored_target  # entered for such a target only

        check_stored_target(target, replace or replace_foreign)
        return
    assert isinstance(target, Path)
    kind = written_as(registry.container(plan.target.container), target).target_kind or "file"
    try:
        check_target(target, kind, replace=True, foreign=replace_foreign)
        if not replace_foreign:
            _check_ours(target)
    except TargetExistsError as foreign:
        if replace or replace_foreign:
            raise
        raise TargetExistsError(
            "The target exists.", place=target, found=foreign.subject, remedy=foreign.remedy
        ) from None
    check_target(target, kind, replace=replace or replace_foreign, foreign=True)


class _SourceProof:
    """What a conversion proves of its source while it reads it: the digests of tensors, and the damage of files.

    Attributes:
        beside: The manifest's entries of the files beside the source from which values are taken.
    """

    def __init__(self, plan: Plan, prepared: Prepared, file_faults: ProveFiles) -> None:
        self.beside: list[dict[str, Any]] = []
        self._neighbours = prepared.beside
        self._accepts_damage = plan.request.ref.accept_damaged
        self._checkpoint = prepared.opened.checkpoint
        self._copied = copied_names(self._checkpoint, prepared.encoded.tree)
        self._read: dict[str, str] = {}
        self._found = damage_at_opening(self._checkpoint)
        self._file_faults = file_faults
        self._damage: Faults | None = None

    def read_others(self, tell: OnProgress) -> None:
        """Reads what no tensor of the target copies: files beside the source, and the source's other tensors."""
        for neighbour in self._neighbours:
            faults, entry = proven_beside(neighbour, tell)
            self.beside.append(entry)
            self.check(faults, neighbour.checkpoint)
            self._found += faults
        self._read = digests_of(other_tensors(self._checkpoint, self._copied), tell)
        self.check(value_faults(self._checkpoint, self._read))

    def digests(self, written: Entries) -> dict[str, str]:
        """Returns the digests of the source's tensors; those of copied tensors are the target's."""
        return source_digests(self._read, self._copied, written)

    def value_faults(self, written: Entries) -> Faults:
        """Returns the tensors that aren't what the source's manifest says."""
        return value_faults(self._checkpoint, self.digests(written))

    def damage(self, written: Entries) -> Faults:
        """Returns the damage of files; what no tensor was read of is read once, by the first call."""
        if self._damage is None:
            self._damage = Faults([*self._found, *self._file_faults(self.digests(written))])
        return self._damage

    def check(self, faults: Faults, checkpoint: Checkpoint | None = None) -> None:
        """Refuses a source, or a file beside it, that has faults, unless the user accepts them."""
        if not self._accepts_damage:
            check_no_damage(faults, (checkpoint or self._checkpoint).path)


@contextmanager
def _proving(plan: Plan, prepared: Prepared, tell: OnProgress) -> Iterator[_SourceProof]:
    """Proves a source by what is read of it in a context."""

    def count(name: str, done: int, total: int) -> None:
        tell(Progress("check", name, done, total))

    with proving_files(prepared.opened.checkpoint, prepared.opened.budget, count) as file_faults:
        yield _SourceProof(plan, prepared, file_faults)


def _converted(plan: Plan, replace: bool, replace_foreign: bool, tell: OnProgress, cut: CutPoints) -> Report:
    began = time.monotonic()
    check_place(plan, replace, replace_foreign)
    with carried_out(plan) as prepared, _proving(plan, prepared, tell) as source:
        checkpoint, tree = prepared.opened.checkpoint, prepared.encoded.tree
        records = kept_fields(plan, prepared)

        def fields(written: Entries) -> Mapping[str, Any]:
            names = stage.home.names() if stage.kind == "folder" else ()
            return {
                **manifest_fields(plan, content_digest(checkpoint, source.digests(written)), names),
                **({"beside": source.beside} if source.beside else {}),
                **records,
                **damage_field(checkpoint, source.damage(written), source.value_faults(written)),
            }

        with staged(
            plan.request.target,
            prepared.kind,
            replace=replace or replace_foreign,
            foreign=replace_foreign,
            mode=permissions(prepared.places),
            on_progress=tell,
            fields=fields,
            total=plan.bytes,
            budget=prepared.opened.budget,
            entries=prepared.container.entries if isinstance(prepared.container, HasEntries) else (),
        ) as stage:
            # Again: the stage remembers what lies there from now on.
            check_place(plan, replace, replace_foreign)
            try:
                source.read_others(tell)
                if goes_on_with_masters(plan, prepared) and not plan.request.ref.accept_damaged:
                    check_masters(prepared.opened.state, checkpoint.path)
                stage.expect(tensor_names(tree))
                # A container may make files by other means than the stage's.
                with writing(stage.target), prepared.joining():
                    _write(prepared, stage, cut)
            except CommitError:
                raise
            except StatekitError:  # which a damaged file explains
                source.check(source.damage(stage.tensors))
                raise
            source.check(source.damage(stage.tensors))
            check_streamed(plan, stage)
            source.check(source.value_faults(stage.tensors))
            digests = source.digests(stage.tensors)
            files = stage.commit(prepared.reopen)
        proven = manifest_entries(checkpoint).keys() & digests.keys()
        return Report(
            target=stage.target,
            plan=plan,
            files=files,
            bytes=sum(int(entry["bytes"]) for entry in files.values()),
            seconds=time.monotonic() - began,
            verified=len(stage.tensors),
            source_digest=content_digest(checkpoint, digests) or "",
            source_proven=len(proven) - len(value_faults(checkpoint, digests)),
            measured=measured_of(plan, tensor_names(tree).values()),
        )


def _write(prepared: Prepared, stage: Stage, cut: CutPoints) -> None:
    """Has the container write the target, cut where that is asked for."""
    if cut.bytes is None:
        prepared.container.write(prepared.encoded, stage)
    else:
        write_cut(prepared.cuttable(), prepared.encoded, stage, cut)


def kept_fields(plan: Plan, prepared: Prepared) -> dict[str, Any]:
    """Returns the manifest's field for what the target has no place for and its manifest keeps."""
    if not plan.kept:
        return {}
    kept = kept_of(prepared.state.extra, by_leaf(prepared.encoded.dropped, prepared.state.extra))
    return {FIELD: to_field(kept.extra)}


def goes_on_with_masters(plan: Plan, prepared: Prepared) -> bool:
    """Tells whether a program will go on with both the parameters and their masters.

    The neutral folder carries both as they are, for doctor to examine.
    """
    return plan.target.container != NEUTRAL and any(
        MASTER in slots for slots in prepared.state.slots.values()
    )


def proven_beside(opened: OpenState, tell: OnProgress) -> tuple[Faults, dict[str, Any]]:
    """Reads the whole of a file that values are taken from beside the source: what contradicts it, and its entry."""
    checkpoint = opened.checkpoint
    wrong = damage_at_opening(checkpoint)
    wrong += prove_files(checkpoint, opened.budget)
    digests = digests_of(checkpoint.tensors, tell)
    wrong += value_faults(checkpoint, digests)
    side = Side(checkpoint.container, opened.layout, checkpoint.step)
    return wrong, {
        "name": checkpoint.path.name,
        **side.to_json(),
        "digest": content_digest(checkpoint, digests),
    }


def measured_of(plan: Plan, tensors: Iterable[Tensor]) -> tuple[Measured, ...]:
    """Returns how far what a plan rounds is from what it is made of, in some of its target's tensors."""
    if not plan.changed and all(entry.reason != QUANTIZED for entry in plan.entries):
        return ()
    from statekit.conversion.rounded import measured_in

    return measured_in(tensors)


def _link_target(link: Path) -> str:
    """Returns where a link leads, for a message."""
    try:
        return os.readlink(link)
    except OSError:  # somebody put something else in its place meanwhile
        return "what isn't there any more"


def _check_ours(target: Path) -> None:
    """Refuses to replace what statekit didn't write: a link, or a file without a manifest inside.

    The new target's kind doesn't matter: a folder in a file's place loses the file, too.
    """
    if target.is_symlink():
        raise TargetExistsError(
            "The target is a link, which statekit didn't make.",
            place=target,
            found=f"a link to {_link_target(target)}",
            remedy="name the link's target, or choose another name; --replace-foreign replaces the link",
        )
    if not target.is_file():
        return
    try:
        with registry.opened(registry.detect_container(target)[0], target, None, NO_HINTS) as old:
            if old.manifest is not None and old.proof is not None and old.proof.is_inside:
                return
    except StatekitError:
        pass
    raise TargetExistsError(
        "The target is a file that statekit didn't write, or that was changed since.",
        place=target,
        remedy="choose another name, or move it away; --replace-foreign puts the result in its place",
    )


def check_streamed(plan: Plan, stage: Stage) -> None:
    """Refuses a target whose tensors aren't those of the plan.

    Raises:
        CommitError: Lists every one.
    """
    planned = {entry.name: (list(entry.shape), entry.dtype) for entry in plan.entries}
    written = {name: (entry["shape"], entry["dtype"]) for name, entry in stage.tensors.items()}
    faults = Faults(
        (f"is {written.get(name, 'not written')}, planned {planned.get(name, 'not at all')}", name)
        for name in {**planned, **written}
        if written.get(name) != planned.get(name)
    )
    faults.check(CommitError, "What was written isn't what was planned", place=stage.target)


def manifest_fields(plan: Plan, digest: str | None, files: Iterable[str]) -> Mapping[str, Any]:
    """Returns what a manifest says of a conversion.

    Args:
        plan: What was carried out.
        digest: The digest of the source's tensors; None while one is missing.
        files: Names of the target's files.
    """
    return {
        "target": plan.target.to_json(),
        "source": {**plan.source.to_json(), "digest": digest},
        "plan": plan.digest,
        "options": dict(plan.options),
        "state": dict(plan.state),
        "resume": resume_lines(in_manifest(plan, files), plan.state),
        "dropped": dict(plan.dropped),
        "inexact": {
            name: {"exactness": exactness.name.lower(), "reason": reason}
            for name, exactness, reason in (
                *((mapping.target, mapping.exactness, mapping.reason) for mapping in plan.mapped),
                *((entry.name, entry.exactness, entry.reason) for entry in plan.entries),
            )
            if exactness > Exactness.BITWISE
        },
    }


def damage_at_opening(checkpoint: Checkpoint) -> Faults:
    """Returns the damage that the reading of a checkpoint's structure showed."""
    return Faults((finding.what, finding.place) for finding in checkpoint.findings if finding.damage)


def damage_field(checkpoint: Checkpoint, damage: Faults, changed: Faults) -> dict[str, Any]:
    """Returns the manifest's field for a damaged source that was accepted: what contradicted its manifest, and where.

    Files are named as in the source's folder: a manifest says nothing of this machine.
    """
    folder = checkpoint.path.parent if checkpoint.proof is None else checkpoint.proof.place.parent
    named = [
        (fault, below(place, folder) if os.path.isabs(place) or "://" in place else place)
        for fault, place in damage
    ]
    lines = [f"{fault} @ {place}" for fault, place in (*named, *changed)]
    return {"damage": lines} if lines else {}


def copied_names(checkpoint: Checkpoint, tree: Tree) -> dict[str, str]:
    """Returns name in the target -> name in the source, for tensors that are written as they are."""
    sources = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {name: sources[id(tensor)] for name, tensor in tensor_names(tree).items() if id(tensor) in sources}


def other_tensors(checkpoint: Checkpoint, copied: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the tensors of the source that no tensor of the target copies; writing digests the copied ones."""
    names = set(copied.values())
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in names}


def digests_of(tensors: Mapping[str, Tensor], tell: OnProgress) -> dict[str, str]:
    """Reads tensors of the source, and returns their digests."""
    total, done = sum(map(nbytes, tensors.values())), 0

    def count(name: str, size: int) -> None:
        nonlocal done
        done += size
        tell(Progress("check", name, done, total))

    return dict(tensor_digests(tensors, count))


def source_digests(read: Mapping[str, str], copied: Mapping[str, str], written: Entries) -> dict[str, str]:
    """Joins the digests of the tensors that were only read with those of the tensors that were copied so far."""
    return {**read, **{copied[name]: entry["blake3"] for name, entry in written.items() if name in copied}}


def manifest_entries(checkpoint: Checkpoint) -> Entries:
    """Returns what the source's manifest says of its tensors; not of those whose shape or dtype is another."""
    entries = checkpoint.proof.tensors if checkpoint.proof else {}
    named = ((name, entries[name], tensor) for name, tensor in checkpoint.tensors.items() if name in entries)
    return {name: entry for name, entry, tensor in named if entry == tensor_entry(tensor, entry["blake3"])}


def value_faults(checkpoint: Checkpoint, digests: Mapping[str, str]) -> Faults:
    """Compares digests with those of the source's manifest."""
    entries = checkpoint.proof.tensors if checkpoint.proof else {}
    faults = (
        (value_fault(checkpoint.tensors[name], entries.get(name), digest), name)
        for name, digest in digests.items()
    )
    return Faults((fault, name) for fault, name in faults if fault)


def content_digest(checkpoint: Checkpoint, digests: Mapping[str, str]) -> str | None:
    """Returns the digest of a checkpoint's content: of names, shapes, dtypes and values, wherever they lie in files.

    It is the digest of the canonical JSON of name -> manifest entry, over all tensors; None while one is missing.
    """
    if digests.keys() != checkpoint.tensors.keys():
        return None
    return json_digest(
        {name: tensor_entry(tensor, digests[name]) for name, tensor in checkpoint.tensors.items()}
    )
