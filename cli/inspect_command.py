"""`statekit inspect`: what a checkpoint holds."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias, get_args

import click

from statekit.cli import output
from statekit.cli.arguments import (
    OUTPUT,
    Page,
    about_checkpoint,
    checkpoint_options,
    report_option,
    with_more,
    write_report,
)
from statekit.cli.output import Cell, Screen, Styled, Table, shown_path
from statekit.conversion.belonging import on_trust
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.inspection import (
    Choice,
    Inspection,
    ParameterSummary,
    Request,
    TensorSummary,
    inspect,
    unknown_hyperparameters,
)
from statekit.errors import plural, size
from statekit.files.tree import Place
from statekit.pages.module_tree import Row, module_tree, rows
from statekit.state.evidence import KnownFrom
from statekit.state.facts import assumed_values
from statekit.state.rates import Piece
from statekit.state.run import RunState, Schedule
from statekit.state.train_state import Counts, Group, Optimizer
from statekit.tensors.stats import Stats, total

MAX_ROWS = 150
"""More rows than this are folded into modules, unless --filter asks for them."""
MAX_FINDINGS = 20
MAX_STEPS = 20
STATS = ("norm", "rms", "min", "max", "zeros", "NaN", "Inf")
RIGHT = ("bytes", "slot bytes", *STATS)
DROP = ("dtype", "bytes", "slot bytes", "rms", "zeros", "shape", "min", "max")
"""What is left out where the terminal is narrow, in this order."""


_WHAT, _LIST = "What CHECKPOINT is", "What is listed"
_EVERYDAY = {
    _WHAT: ("container", "step", "hparams", "param_names"),
    _LIST: ("pattern", "with_slots", "stats"),
    OUTPUT: ("as_json", "report", "help", "help_all"),
}


@click.command(
    "inspect",
    cls=Page,
    everyday=_EVERYDAY,
    more=with_more(_EVERYDAY, about_checkpoint(_WHAT)),
    examples=(
        "statekit inspect t5x-ckpt",
        "statekit inspect t5x-ckpt --stats --filter '*mlp*'",
        "statekit inspect trainer-run --step 8 --json",
    ),
)
@checkpoint_options
@click.option(
    "--filter", "pattern", metavar="GLOB", help="List only the parameters whose path matches, each in full."
)
@click.option("--slots", "with_slots", is_flag=True, help="Show one row for each slot.")
@click.option("--stats", is_flag=True, help="Read all values and show norm, rms, min, max, zeros, NaN, Inf.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@report_option
def command(
    ref: CheckpointRef, pattern: str | None, with_slots: bool, stats: bool, as_json: bool, report: Path | None
) -> None:
    """Shows what a checkpoint holds.

    CHECKPOINT is a file or folder of any system that `statekit formats` lists, or a run's folder with several steps.
    statekit reads headers only, except with --stats. Where no layout fits, it lists the tensors by their own names.
    """
    request = Request(pattern, stats)
    with output.progress(needed=stats) as bar:
        task = bar.add_task("reading", total=None)
        inspection = inspect(ref, request, lambda done, all_: bar.update(task, completed=done, total=all_))
    write_report(report, "inspect", inspection.to_json() if report else {})
    if as_json:
        output.print_json("inspect", inspection.to_json())
        return
    stdout = output.screen()
    show = _Show(stdout, limit=MAX_ROWS if pattern is None else sys.maxsize, stats=stats)
    _summary(stdout, inspection)
    stdout.show_list("Run:", _run(inspection.run))
    if inspection.parameters:
        show.parameters(inspection.parameters, with_slots)
    if inspection.others:
        show.others(inspection.others)
    _closing(stdout, inspection)


Lines: TypeAlias = Iterator[tuple[str, str]]
"""Rows of two columns: what something is, and its value."""


def _summary(stdout: Screen, inspection: Inspection) -> None:
    head = Table(("what", "value"), titled=False)
    for key, value in _summary_lines(inspection):
        head.add_row(Styled(key, bold=True), value)
    stdout.show(head)


def _summary_lines(inspection: Inspection) -> Lines:
    yield "checkpoint", shown_path(inspection.path)
    yield from _format_lines(inspection)
    for key, value in inspection.meta.items():
        if isinstance(value, (str, int, float)):
            yield str(key), str(value)
    if inspection.optimizer and inspection.counts:
        yield from _optimizer_lines(inspection, inspection.optimizer, inspection.counts)
    elif inspection.step is not None:
        yield "step", str(inspection.step)
        yield from _other_steps(inspection)
    yield "integrity", _proven_by(inspection)
    if inspection.uncounted:
        yield "", on_trust(inspection.uncounted)


def _format_lines(inspection: Inspection) -> Lines:
    """Yields the container and the layout, and why they are taken for it."""
    for part, choice in (("container", inspection.container), ("layout", inspection.layout)):
        yield part, _titled(choice) if choice else "none fits"
        if part == "layout" and inspection.contents:
            yield "holds", inspection.contents
        if choice:
            yield "", f"because {_told(choice.because, inspection.path)}"


def _optimizer_lines(inspection: Inspection, optimizer: Optimizer, counts: Counts) -> Lines:
    """Yields which optimizers ran, where the run stands, and the hyperparameters of each group by their source."""
    kinds = [f"{schema}, variant {variant or 'unknown'}" for schema, variant in optimizer.kinds]
    yield "optimizer", " and ".join(kinds)
    if counts.done is None:
        yield "step", "unknown: neither the optimizer nor its files count updates"
    else:
        yield "step", f"{plural(counts.done, 'update')} done; {_going_on(inspection, counts)}"
    yield from _other_steps(inspection)
    for i, group in enumerate(optimizer.groups):
        schema = f", {group.schema}" if group.schema else ""
        yield f"group {i}", f"{plural(len(group.paths), 'parameter')}{schema}"
        for source in get_args(KnownFrom):
            if values := [f"{name}={group.hyperparameters[name]!r}" for name in _known(group, source)]:
                yield f"  {source}", ", ".join(values)
        if unknown := unknown_hyperparameters(optimizer, group):
            yield "  unknown", ", ".join(unknown)


def _going_on(inspection: Inspection, counts: Counts) -> str:
    """Says where the run's schedules go on: as their own states have it, unless the run's step was changed."""
    steps = {schedule.at for schedule in inspection.run.schedules if schedule.at is not None}
    steps = steps if steps and counts.schedule == counts.updates else {counts.schedule}
    if len(steps) > 1:
        return f"learning-rate schedules go on at their steps {', '.join(map(str, sorted(steps)))}"
    return f"a learning-rate schedule goes on at its step {steps.pop()}"


def _proven_by(inspection: Inspection) -> str:
    """Returns what proves the checkpoint's bytes, or how to add a manifest."""
    means = inspection.integrity
    if means.manifest is not None:
        how = "was sealed with" if means.is_sealed else "was written with"
        inside = " inside" if means.manifest == inspection.path else f" {shown_path(means.manifest)}"
        return f"{how} the manifest{inside}; `statekit check` reads every byte"
    bare, count = means.tensors.get("", 0), sum(means.tensors.values())
    names = ", ".join(name for name in means.tensors if name)
    if bare == count:
        return "no checksum in this format; `statekit seal` adds a manifest"
    if bare:
        tensors = f"{bare} of {plural(count, 'tensor')}"
        return f"no checksum for {tensors}, {names} for the others; `statekit seal` adds a manifest"
    return f"{names}, compared as values are read; `statekit seal` adds a manifest of every byte"


def _titled(choice: Choice) -> str:
    named = choice.title.startswith(f"{choice.name}:")
    return choice.title if named else f"{choice.name}: {choice.title}"


def _known(group: Group, source: str) -> list[str]:
    return [name for name in group.hyperparameters if group.known_from.get(name) == source]


def _other_steps(inspection: Inspection) -> list[tuple[str, str]]:
    """Returns the row that names the other steps of a run's folder, which --step N opens."""
    steps = inspection.meta.get("steps", ())
    others = [step for step in steps if step != inspection.step] if isinstance(steps, (list, tuple)) else []
    some = ", ".join(map(str, others[-MAX_STEPS:]))
    more = f"{len(others) - MAX_STEPS} earlier ones, " if len(others) > MAX_STEPS else ""
    return [("other steps", f"{more}{some} (--step N opens one)")] if others else []


def _told(because: str, path: Place) -> str:
    return because.replace(f"{path}/", "").replace(str(path), path.name)


@dataclass(frozen=True)
class _Show:
    stdout: Screen
    limit: int
    stats: bool

    def table(self, *columns: str) -> Table:
        return Table((*columns, *(STATS if self.stats else ())), right=RIGHT, drop=DROP)

    def parameters(self, parameters: Sequence[ParameterSummary], with_slots: bool) -> None:
        lines, folded = rows(module_tree((p.tensor.name, p) for p in parameters), self.limit)
        with_slots = (with_slots or self.stats) and not folded
        grid = self.table(
            "parameter", "shape", "dtype", "bytes", *(() if with_slots else ("slot bytes", "slots"))
        )
        for row in lines:
            if row.module:
                self.module(grid, row, with_slots)
            elif with_slots:
                self.with_slots(grid, row)
            else:
                self.parameter(grid, row)
        self.stdout.say()
        self.stdout.show(grid)
        if folded:
            self.stdout.say(f"{len(parameters)} parameters, folded into modules; --filter GLOB lists them.")

    def module(self, grid: Table, row: Row[ParameterSummary], with_slots: bool) -> None:
        inside = [p.tensor for p in row.items]
        slots = [slot for p in row.items for slot in p.slots]
        label = Styled(f"{'  ' * row.depth}{row.label}/", bold=True)
        count = plural(len(inside), "parameter")
        cells: list[Cell] = [size(_bytes(inside))]
        cells += [] if with_slots else [size(_bytes(slots)), _slot_counts(slots)]
        together = total(tensor.stats for tensor in (*inside, *slots) if tensor.stats)
        grid.add_row(label, Styled(count, dim=True), "", *cells, *self.cells(together))

    def parameter(self, grid: Table, row: Row[ParameterSummary]) -> None:
        (parameter,) = row.items
        slots = ", ".join(
            f"{s.name} {list(s.shape)}"
            + ("" if s.dtype == parameter.tensor.dtype else f" {s.dtype}")
            + (f" from {s.quantized}" if s.quantized else "")
            for s in parameter.slots
        )
        label = f"{'  ' * row.depth}{row.label}"
        grid.add_row(label, *_described(parameter.tensor), size(_bytes(parameter.slots)), slots)

    def with_slots(self, grid: Table, row: Row[ParameterSummary]) -> None:
        (parameter,) = row.items
        label = f"{'  ' * row.depth}{row.label}"
        grid.add_row(label, *_described(parameter.tensor), *self.cells(parameter.tensor.stats))
        for slot in parameter.slots:
            name = Styled(f"{'  ' * (row.depth + 1)}{slot.name}", dim=True)
            grid.add_row(name, *_described(slot), *self.cells(slot.stats))

    def others(self, others: Sequence[TensorSummary]) -> None:
        grid = self.table("tensor", "shape", "dtype", "bytes")
        for other in others[: self.limit]:
            grid.add_row(other.name, *_described(other), *self.cells(other.stats))
        self.stdout.say()
        self.stdout.show(grid)
        if len(others) > self.limit:
            self.stdout.say(f"and {len(others) - self.limit} more; --filter GLOB lists them.")

    def cells(self, stats: Stats | None) -> list[str]:
        if not self.stats or stats is None:
            return []
        numbers = (stats.norm, stats.rms, stats.minimum, stats.maximum)
        return [
            *("-" if n is None else f"{n:.4g}" for n in numbers),
            *map(str, (stats.zeros, stats.nans, stats.infs)),
        ]


def _described(tensor: TensorSummary) -> tuple[str, str, str]:
    return str(list(tensor.shape)), tensor.dtype, size(tensor.nbytes)


def _run(run: RunState) -> Iterator[str]:
    """Yields what is known of the run, a line for each thing with where it is known from."""
    if len(run.optimizers) > 1:
        ends = accumulate(run.optimizers)
        numbers = [_numbered(range(end - n, end)) for end, n in zip(ends, run.optimizers, strict=True)]
        yield f"{len(numbers)} optimizers: of {', of '.join(numbers)}"
    for schedule in run.schedules:
        at = "" if schedule.at is None else f" at step {schedule.at}"
        given = ", ".join(f"{key}={value!r:.60}" for key, value in schedule.parameters.items())
        kind = schedule.kind or "of a kind that its state doesn't tell"
        whose = f" of {_numbered(schedule.groups)}" if schedule.groups else ""
        yield f"schedule {kind}{whose}{at}{': ' * bool(given)}{given}{_as_rates(schedule)} @ {schedule.place}"
    for part in run.parts:
        content = part.value
        if isinstance(content, Mapping):
            plain = ", ".join(f"{k}={v!r:.60}" for k, v in content.items())
        else:
            plain = f"{content!r:.60}"
        yield f"{part.what}{f': {plain}' if content is not None and plain else ''} @ {part.place}"
    yield from (f"tied: {name} is {path}" for name, path in run.ties.items())


def _numbered(groups: Sequence[int]) -> str:
    """Names groups by their numbers: `group 1`, `groups 0, 2`."""
    return f"group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))}"


def _as_rates(schedule: Schedule) -> str:
    """Returns a schedule's rates in words, or why it can't be moved to another system."""
    first = schedule.rates[0] if schedule.rates else ""
    if isinstance(first, str):
        return f"; {first}" if first else ""
    pieces = [f"{_kinds(piece)}{f' from {piece.begins}' if piece.begins else ''}" for piece in first.pieces]
    return f"; over the updates done: {', '.join(pieces)}"


def _kinds(piece: Piece) -> str:
    """Says of what kind a piece of a schedule is, or its factors are."""
    return " times ".join(map(_kinds, piece.numbers["of"])) if piece.kind == "product" else piece.kind


def _bytes(tensors: Iterable[TensorSummary]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _slot_counts(slots: Iterable[TensorSummary]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(slot.name for slot in slots).items())


def _closing(stdout: Screen, inspection: Inspection) -> None:
    totals: dict[str, Any] = inspection.totals()
    kinds = ("parameter", "slot", "other")
    counted = [
        f"{plural(totals[f'{kind}s'], name)} ({size(totals[f'{kind}_bytes'])})"
        for kind, name in zip(kinds, ("parameter", "slot", "other tensor"), strict=True)
        if totals[f"{kind}s"]
    ]
    dtypes = ", ".join(f"{name} {size(count)}" for name, count in totals["bytes_by_dtype"].items())
    stdout.say()
    values = f"{totals['elements']} parameter values; " if inspection.parameters else ""
    stdout.say(f"In all: {', '.join(counted)}; {values}{dtypes}." if counted else "It holds no tensor.")
    if inspection.extra:
        stdout.say(f"Also there: {', '.join(inspection.extra)}.")
    stdout.show_list("Assumed, because the checkpoint doesn't say:", _assumptions(inspection))
    findings = [f"{finding.what} @ {finding.place}" for finding in inspection.findings[:MAX_FINDINGS]]
    more = len(inspection.findings) - len(findings)
    stdout.show_list(
        "Missing or odd:", [*findings, *([f"and {more} more; --json lists them"] if more else [])]
    )


def _assumptions(inspection: Inspection) -> Iterator[str]:
    """Yields what was assumed; of hyperparameters whose values stand with their group, only why."""
    groups = inspection.optimizer.groups if inspection.optimizer else ()
    shown = {name for group in groups for name in _known(group, "assumed")}
    for sentence in inspection.assumptions:
        reason, values = assumed_values(sentence)
        yield f"{reason}: see `assumed` above." if values and shown.issuperset(values) else sentence
