"""`statekit replay`: an original's recorded run, continued by our steps and judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from statekit.backends import BACKEND_NAMES, backend
from statekit.cli.output import console, print_json, printable, progress, table
from statekit.converters.hparams import read_hparams
from statekit.errors import NotFoundError, UsageError
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Replay, Subject, replay
from statekit.verify.verdict import worst


@click.command("replay")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--backend",
    "names",
    multiple=True,
    type=click.Choice(BACKEND_NAMES),
    help="Default: numpy. May be repeated.",
)
@click.option(
    "--start",
    type=click.Choice(["checkpoint", "init"]),
    default="checkpoint",
    show_default=True,
    help="Where our side starts: the native checkpoint, or fresh slots.",
)
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, path_type=Path),
    help="Start from this checkpoint instead of the recorded one.",
)
@click.option(
    "--hparams",
    multiple=True,
    metavar="FILE|KEY=VALUE",
    help="Canonical hyperparameters that our side uses instead.",
)
@click.option(
    "--trajectory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write each free run to DIR/<system>__<case>.safetensors.",
)
@click.option("--json", "as_json", is_flag=True, help="Print every compared tensor as JSON.")
def command(
    bundles: tuple[Path, ...],
    names: tuple[str, ...],
    start: Literal["checkpoint", "init"],
    checkpoint: Path | None,
    hparams: tuple[str, ...],
    trajectory: Path | None,
    as_json: bool,
) -> int:
    """Replays recordings of an original optimizer with our steps.

    Opens each BUNDLE, decodes its native checkpoint, goes on with the recorded gradients and learning rates, and
    compares every element of every step with what the original did, against the bound that float32 arithmetic of the
    declared kind can reach (docs/bounds.md). Exit code 1 if one lies outside.
    """
    if checkpoint and len(bundles) > 1:
        raise UsageError(
            "--checkpoint is the start of one recording.", expected="one BUNDLE", found=len(bundles)
        )
    changes = read_hparams(hparams).values
    recordings, skipped = _open(bundles)
    if trajectory:
        trajectory.mkdir(parents=True, exist_ok=True)
    results = []
    with progress("updates") as bar:
        for recording in recordings:
            subject = Subject(recording, start, checkpoint, changes)
            with recording:
                results += [_replay(subject, name, trajectory, bar) for name in names or ("numpy",)]
    if as_json:
        data = {
            "results": [r.to_json() for r in results],
            "skipped": skipped,
            "passed": all(r.passed for r in results),
        }
        print_json("replay", data)
    else:
        _show(results, skipped)
    if not results:
        raise NotFoundError(
            "None of the paths is a recording that statekit can replay.", found=", ".join(skipped)
        )
    return 0 if all(result.passed for result in results) else 1


def _open(bundles: Sequence[Path]) -> tuple[list[Recording], dict[str, str]]:
    recordings, skipped = [], {}
    for path in bundles:
        try:
            recordings.append(open_recording(path))
        except NotFoundError as error:
            skipped["/".join(path.parts[-2:])] = f"{error.subject} ({error.found})"
    return recordings, skipped


def _replay(subject: Subject, name: str, trajectory: Path | None, bar: Any) -> Replay:
    recording = subject.recording
    total = (recording.last - subject.first) * len(recording.trajectories)
    task = bar.add_task(f"{printable(recording.name)} {name}", total=total)
    file = trajectory / f"{recording.name.replace('/', '__')}.safetensors" if trajectory else None
    return replay(subject, backend(name), file, lambda step: bar.advance(task))


def _show(results: Sequence[Replay], skipped: dict[str, str]) -> None:
    out = console()
    grid = table(
        "recording", "backend", "start", "judged by", "updates", "tensors", "ULP", "of update", "of bound", "verdict",
        right=("updates", "tensors", "ULP", "of update", "of bound"),
    )  # fmt: skip
    for result in results:
        for judged in result.judged:
            rows = judged.rows
            grid.add_row(
                printable(result.recording),
                result.backend,
                result.start,
                f"{judged.trajectory.file.removesuffix('.safetensors')} ({judged.trajectory.execution})",
                str(result.steps[1] - result.steps[0]),
                str(len(rows)),
                f"{max((r.ulps for r in rows), default=0):.3g}",
                f"{max((r.relative for r in rows), default=0):.1e}",
                f"{max((r.ratio for r in rows), default=0):.2g}",
                "equivalent" if not judged.outside and not result.decoded else "DIFFERENT",
            )
    if results:
        out.print(grid)
    for line in _faults(results):
        out.print(printable(line))
    for name, why in skipped.items():
        out.print(printable(f"skipped {name}: {why}"))


def _faults(results: Sequence[Replay]) -> Iterator[str]:
    for result in results:
        for what in result.decoded:
            yield f"{result.recording} {result.backend}: the start isn't the recorded state: {what}"
        for judged in result.judged:
            row = worst(judged.rows)
            if row is not None and row.outside:
                yield (
                    f"{result.recording} {result.backend}: {judged.outside} elements outside the bound, "
                    f"first at update {row.step}, {row.path} {row.tensor} {row.example}"
                )
