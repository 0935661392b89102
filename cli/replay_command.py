"""`statekit replay`: an original's recorded run, continued by our steps and judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from statekit.arrays.backend import BACKEND_NAMES, Backend, backend
from statekit.cli.arguments import local_files, ref_option, ref_options, said_hparams, source_place
from statekit.cli.output import Table, print_json, progress, screen
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import NotFoundError, StatekitError, UsageError, listed, plural, printable, some
from statekit.files.source import Files, not_there
from statekit.files.tree import Place
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Start, Subject
from statekit.verify.replay import replay as replayed
from statekit.verify.verdict import worst

DONE, WANTING, COULD_NOT = 0, 1, 3
"""Exit codes."""
ERROR, BOUND = "error/update", "error/bound"
LEGEND = (
    "error: the largest difference of any element from the original's, after one update from the same state. "
    "error/update: over the largest change in that update. error/bound: over what rounding of this arithmetic can "
    "make of it (docs/bounds.md); equivalent means that none exceeds 1."
)


@click.command("replay")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), callback=local_files)
@click.option(
    "--backend",
    "names",
    multiple=True,
    type=click.Choice(BACKEND_NAMES),
    help="Default: numpy. May be repeated.",
)
@click.option(
    "--device", help="The device of --backend torch, by torch's name: cuda, cuda:1, xpu. Default: cpu."
)
@click.option(
    "--start",
    type=click.Choice(["checkpoint", "init"]),
    help="The start of statekit's side: the native checkpoint, or fresh slots. Default: the checkpoint, "
    "where statekit can read it.",
)
@click.option(
    "--checkpoint",
    type=click.Path(),
    callback=source_place,
    help="Start from this checkpoint instead of the recorded one.",
)
@ref_option("hparams", help="Canonical hyperparameters for statekit's side.")
@ref_options("checkpoint", without=("hparams",))
@click.option(
    "--trajectory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each free run to DIR/<system>__<case>.safetensors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every compared tensor as JSON.")
def command(
    bundles: tuple[Path, ...],
    names: tuple[str, ...],
    device: str | None,
    start: Start | None,
    ref: CheckpointRef,
    hparams: tuple[str, ...],
    trajectory: Path | None,
    as_json: bool,
) -> int:
    """Replays an original optimizer's recordings with our steps.

    replay opens each BUNDLE, starts from its native checkpoint or from fresh slots, and takes the recorded gradients
    and rates. It compares every element of every step with the original's, by the bound that float32 arithmetic of
    the declared kind can reach (docs/bounds.md). It lists the recordings that it cannot replay, with the reason. The
    exit code is 1 if an element lies outside the bound, and 3 if one of several recordings is unreadable.
    """
    _check_paths(bundles, start, ref)
    backends = [backend(name, device) for name in names or ("numpy",)]
    failed: dict[str, str] = {}
    rest = failed if len(bundles) > 1 else None
    with Files(ref.job_budget()) as files:
        changes = said_hparams(hparams, files)
    subjects, skipped, fresh = _subjects(bundles, start, ref, changes, rest)
    results = _replays(subjects, backends, trajectory, rest)
    if not results:
        raise NotFoundError(
            "None of the paths is a recording that statekit can replay.",
            found=listed(f"{name}: {why}" for name, why in {**skipped, **failed}.items()),
        )
    passed = all(result.passed for result in results)
    if as_json:
        data = {
            "results": [r.to_json() for r in results],
            "skipped": skipped,
            "fresh": fresh,
            "failed": failed,
            "passed": passed and not failed,
        }
        print_json("replay", data)
    else:
        _show(results, skipped, fresh, failed)
    if not passed:
        return WANTING
    return COULD_NOT if failed else DONE


def _replays(
    subjects: Sequence[Subject],
    backends: Sequence[Backend],
    trajectory: Path | None,
    failed: dict[str, str] | None,
) -> list[Replay]:
    """Returns the replay of every recording in every backend."""
    if trajectory:
        _check_apart(subjects, [xp.name for xp in backends])
        trajectory.mkdir(parents=True, exist_ok=True)
    results = list[Replay]()
    with progress("updates") as bar:
        for subject in subjects:
            with kept_apart(subject.recording.name, failed), subject.recording:
                results += [_replay(subject, xp, trajectory, bar) for xp in backends]
    return results


def _check_paths(bundles: Sequence[Path], start: Start | None, ref: CheckpointRef) -> None:
    """Refuses paths that are not there, and a checkpoint that no recording starts from."""
    if ref.path is not None and len(bundles) > 1:
        raise UsageError(
            "--checkpoint is the start of one recording.", expected="one BUNDLE", found=len(bundles)
        )
    if ref.path is not None and start == "init":
        raise UsageError("--checkpoint is what the replay starts from, and --start init is another start.")
    paths: tuple[Place, ...] = (*bundles, *(() if ref.path is None else (ref.place,)))
    if missing := [path for path in paths if not path.exists()]:
        raise not_there(missing[0])


def _check_apart(subjects: Sequence[Subject], names: Sequence[str]) -> None:
    """Refuses free runs that would be written to one file."""
    count = Counter(subject.recording.name for subject in subjects)
    same = [f"{plural(n, 'recording')} {name}" for name, n in count.items() if n > 1]
    if len(set(names)) > 1 or same:
        raise UsageError(
            "Free runs would take each other's place in one file.",
            place="--trajectory",
            expected="one --backend, and recordings of different names",
            found="; ".join([*([", ".join(names)] if len(set(names)) > 1 else []), *same]),
            remedy="call it once for each, with a folder each",
        )


@contextmanager
def kept_apart(name: str, failed: dict[str, str] | None) -> Iterator[None]:
    """Notes in `failed` why a recording can't be replayed; raises the error if `failed` is None."""
    try:
        yield
    except (StatekitError, OSError) as error:
        if failed is None:
            raise
        failed[name] = " ".join(line.strip() for line in str(error).splitlines())


def _subjects(
    bundles: Sequence[Path],
    start: Start | None,
    ref: CheckpointRef,
    changes: Mapping[str, Any],
    failed: dict[str, str] | None,
) -> tuple[list[Subject], dict[str, str], dict[str, str]]:
    """Returns what can be replayed; what can't, and what has to start from fresh slots, each with the reason."""
    subjects: list[Subject] = []
    skipped: dict[str, str] = {}
    fresh: dict[str, str] = {}
    for path in bundles:
        name = "/".join(path.resolve().parts[-2:])
        with kept_apart(name, failed):
            try:
                recording = open_recording(path)
            except NotFoundError as error:
                skipped[name] = f"{error.subject} ({error.found})"
                continue
            subject = Subject(recording, start or "checkpoint", ref, changes)
            why = subject.obstacle() if subject.start == "checkpoint" and ref.path is None else ""
            if why and start is None:
                fresh[recording.name] = why
                subject = replace(subject, start="init")
            if why and start is not None:
                skipped[recording.name] = why
            else:
                subjects.append(subject)
    return subjects, skipped, fresh


def _replay(subject: Subject, xp: Backend, trajectory: Path | None, bar: Any) -> Replay:
    recording = subject.recording
    total = (recording.last - subject.first) * len(recording.trajectories)
    task = bar.add_task(f"{printable(recording.name)} {xp.name}", total=total)
    file = trajectory / f"{recording.name.replace('/', '__')}.safetensors" if trajectory else None
    return replayed(subject, xp, file, lambda step: bar.advance(task))


def _show(
    results: Sequence[Replay], skipped: Mapping[str, str], fresh: Mapping[str, str], failed: Mapping[str, str]
) -> None:
    out = screen()
    for line in _headlines(results):
        out.say(line)
    out.say()
    grid = Table(
        ("recording", "backend", "start", "judged by", "updates", "tensors", ERROR, BOUND, "verdict"),
        right=("updates", "tensors", ERROR, BOUND),
        drop=("tensors", "start", "judged by", ERROR),
    )
    for result in results:
        for judged in result.judged:
            rows = judged.rows
            grid.add_row(
                result.recording,
                result.backend,
                result.start,
                f"{judged.trajectory.file.removesuffix('.safetensors')} ({judged.trajectory.execution})",
                str(result.steps[1] - result.steps[0]),
                str(len(rows)),
                f"{max((r.relative for r in rows), default=0):.1e}",
                f"{max((r.ratio for r in rows), default=0):.2f}",
                "equivalent" if not judged.outside and not result.decoded else "DIFFERENT",
            )
    out.show(grid)
    out.say()
    out.say(LEGEND)
    for line in _faults(results):
        out.say(line)
    for name, why in fresh.items():
        out.say(f"from fresh slots {name}: {why}")
    for name, why in skipped.items():
        out.say(f"skipped {name}: {why}")
    for name, why in failed.items():
        out.say(f"FAILED {name}: {why}")


def _headlines(results: Sequence[Replay]) -> Iterator[str]:
    """Yields the verdicts with their weakest facts, with the recordings of each where they differ."""
    names: dict[str, list[str]] = {}
    for result in results:
        names.setdefault(result.headline, []).append(result.recording)
    for line, recordings in names.items():
        yield f"{line}: {some([*dict.fromkeys(recordings)])}" if len(names) > 1 else line


def _faults(results: Sequence[Replay]) -> Iterator[str]:
    for result in results:
        for fault in result.decoded:
            yield f"{result.recording} {result.backend}: the start isn't the recorded state: {fault}"
        for judged in result.judged:
            row = worst(judged.rows)
            if row is not None and row.outside:
                yield (
                    f"{result.recording} {result.backend}: {judged.outside} elements outside the bound, "
                    f"first at update {row.step}, {row.path} {row.tensor} {row.example}"
                )
