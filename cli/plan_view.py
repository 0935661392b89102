"""Prints what a conversion will do, or has done: its sides, how exact it is and why, and what stays behind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from posixpath import commonpath
from typing import Any

from statekit.cli.output import Screen, Table
from statekit.conversion.belonging import contents_without_optimizer, on_trust
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import Report
from statekit.conversion.plan import Plan, PlannedTensor, Side
from statekit.conversion.resume import next_update, schedule_steps
from statekit.conversion.rule_change import Difference
from statekit.errors import plural, size, some
from statekit.state.run import Schedule
from statekit.state.schema import WEIGHTS

FOLDED_AT = 3
"""Names are told apart by this many of their parts, as `extra/torch/scheduler`; what lies below is counted."""
MAX_NAMED = 5
"""So many of a kind are named where what was done is told in short."""
MAX_ROWS = 150
"""More tensors than this aren't listed one by one."""


def show_plan(stdout: Screen, plan: Plan, tensors: bool) -> None:
    """Prints what a conversion does; with `tensors`, one row for each tensor of the target too."""
    stdout.say(plan.headline, bold=True)
    head = Table(("what", "value"), titled=False)
    for side, name, path in (
        (plan.source, "from", plan.request.ref.place),
        (plan.target, "to", plan.request.target),
    ):
        head.add_row(name, str(path))
        head.add_row("", f"container {side.container}, layout {side.layout}, {_step_of(side)}")
        if side is plan.source and plan.uncounted:
            head.add_row("", on_trust(plan.uncounted))
    head.add_row("tensors", f"{len(plan.entries)}, {size(plan.bytes)}")
    if plan.state["schema"] == WEIGHTS:
        head.add_row("holds", contents_without_optimizer(plan.findings, plan.run))
    head.add_row("exactness", "; ".join(_counts(plan)))
    if plan.rule_change is not None:
        rule = f"{plan.rule_change.source} to {plan.rule_change.target}: {plan.rule_change.exactness.name.lower()}"
        head.add_row("rule", rule)
    for option, value in _options(plan):
        head.add_row(option, value)
    stdout.show(head)
    if tensors and len(plan.entries) <= MAX_ROWS:
        stdout.say()
        stdout.show(_tensors(plan))
    elif tensors:
        stdout.say(f"More than {MAX_ROWS} tensors: --json lists them.")
    for title, lines in (
        ("Changed, as asked:", map(str, plan.changed)),
        ("Mapped:", _mapped(plan, tensors)),
        ("Not bitwise:", _inexact(plan)),
        ("Different in the target's rule:", _differences(plan)),
        ("Made up for by hyperparameters:", plan.rule_change.compensated_by if plan.rule_change else ()),
        ("Made without a source:", _synthesised(plan)),
        ("Kept in the manifest, for the way back:", folded(dict.fromkeys(plan.kept, ""))),
        ("Left behind:", folded(plan.dropped)),
        ("Assumed, because the source doesn't say:", plan.assumptions),
        ("Odd about the source:", (f"{finding.what} @ {finding.place}" for finding in plan.findings)),
    ):
        stdout.show_list(title, lines)


def show_brief(stdout: Screen, plan: Plan, report: Report) -> None:
    """Prints the verdict of a finished conversion, its losses, and a line with its assumptions."""
    stdout.say(plan.headline, bold=True)
    for word, side, path in (
        ("from", plan.source, plan.request.ref.place),
        ("to", plan.target, plan.request.target),
    ):
        kinds = f"container {side.container}, layout {side.layout}, {_step_of(side)}"
        stdout.say(f"{word:<6}{path}: {kinds}")
    tensors = plural(report.verified, "tensor")
    stdout.say(f"{tensors}, {size(report.bytes)}, read again and found as meant.")
    if plan.state["schema"] == WEIGHTS:
        stdout.say(f"It holds {contents_without_optimizer(plan.findings, plan.run)}.")
    for title, lines in (
        ("Changed, as asked", map(str, plan.changed)),
        ("Not bitwise", _inexact(plan)),
        ("Another update by the target's rule", map(str, _worse(plan))),
        ("Left behind", folded(plan.dropped)),
        ("In the manifest alone, for the way back", folded(dict.fromkeys(plan.kept, ""))),
        ("Odd about the source", (finding.what for finding in plan.findings)),
        ("Measured", map(str, report.measured)),
        ("Assumed", map(_first_clause, plan.assumptions)),
    ):
        if listed := [*lines]:
            more = f"; and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
            stdout.say(f"{title}: {'; '.join(listed[:MAX_NAMED])}{more}.")
    if plan.next_update or plan.state["schema"] != WEIGHTS:
        updates = [*_measured_lines(plan.next_update)] or [*_next_lines(plan.state, plan.run.schedules)]
        others = f"; and {plural(len(updates) - 1, 'more group')}" if len(updates) > 1 else ""
        stdout.say(f"Next: {updates[0]}{others}.")
    stdout.say("--explain prints all of it, each with its reason.")


def _step_of(side: Side) -> str:
    return "a step that no file tells" if side.step is None else f"step {side.step}"


def _first_clause(sentence: str) -> str:
    """Returns what a sentence says first.

    Example:
        >>> _first_clause("beta1 isn't stored: m is in use, so momentum was on; a step needs its value.")
        "beta1 isn't stored: m is in use, so momentum was on"
        >>> _first_clause("DeepSpeed loads it; so does the run.")
        'DeepSpeed loads it'
    """
    first = re.split(r";\s| \(|\.$", sentence, maxsplit=1)[0]
    is_name = not first.partition(" ")[0][1:].islower() and first[1:2] != " "
    return first if is_name else first[:1].lower() + first[1:]


def _worse(plan: Plan) -> list[Difference]:
    """Returns the differences between the two rules by which the target's updates aren't the run's."""
    differences = plan.rule_change.differences if plan.rule_change else ()
    return [difference for difference in differences if difference.exactness > Exactness.ROUNDING]


def _counts(plan: Plan) -> Iterator[str]:
    for exactness in Exactness:
        count = sum(entry.exactness == exactness for entry in plan.entries)
        if count:
            yield f"{count} {exactness.name.lower()}"


def _options(plan: Plan) -> Iterator[tuple[str, str]]:
    for record in plan.options.get("maps", ()):
        settings = [f"{key}={value}" for key, value in record.get("config", {}).items()]
        for file, values in record.get("beside", {}).items():
            settings.append(
                f"and from {file} " + ", ".join(f"{key}={value}" for key, value in values.items())
            )
        renamed = [f"{pattern}={replacement}" for pattern, replacement in record.get("rename", ())]
        yield (
            ("map", ", ".join([record["name"], *settings]))
            if "name" in record
            else ("renamed", ", ".join(renamed))
        )
    for layout, why in plan.options.get("passed_over", {}).items():
        yield "layout", f"{plan.target.layout}, as {layout} doesn't go on exactly: {why}"
    asked = plan.options.get("step_offset", {})
    if asked.get("value") is not None:
        yield "step_offset", f"{asked['value']} (asked for: {asked['asked']})"


def folded(reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each name and its reason; names below one parent with one reason share a line.

    Example:
        >>> lost = {"extra/torch/scheduler/a": "no place", "extra/torch/scheduler/b/0": "no place"}
        >>> list(folded({**lost, "extra/ema": "too large"}))
        ['extra/torch/scheduler: no place (2 of its leaves)', 'extra/ema: too large']
    """
    parts: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        parts.setdefault(("/".join(name.split("/")[:FOLDED_AT]), reason), []).append(name)
    for (_, reason), names in parts.items():
        common = commonpath(names)
        count = f" ({len(names)} of its leaves)" if len(names) > 1 else ""
        yield f"{common}{f': {reason}' if reason else ''}{count}"


def _mapped(plan: Plan, per_tensor: bool) -> Iterator[str]:
    """Yields what became of the source's parameters: in all, or of each with its slots."""
    if per_tensor and len(plan.mapped) <= MAX_ROWS:
        for entry in plan.mapped:
            how = ", ".join((*entry.operations, *entry.slots))
            yield f"{', '.join(entry.sources)} -> {entry.target}" + (f" ({how})" if how else "")
    elif plan.mapped:
        sources = {path for mapping in plan.mapped for path in mapping.sources}
        slots = sum(len(mapping.slots) for mapping in plan.mapped)
        yield f"all {len(sources)} parameters, to {len(plan.mapped)} with {slots} slots; --dry-run --json lists them"


def _inexact(plan: Plan) -> Iterator[str]:
    kinds: dict[tuple[Exactness, str], list[str]] = {}
    parts = [(parameter.target, parameter) for parameter in plan.mapped] + [
        (entry.name, entry) for entry in plan.entries
    ]
    for name, part in parts:
        if part.exactness > Exactness.BITWISE:
            kinds.setdefault((part.exactness, part.reason), []).append(name)
    for (exactness, reason), names in kinds.items():
        yield f"{exactness.name.lower()}: {reason} ({some(names)})"


def _differences(plan: Plan) -> Iterator[str]:
    """Yields what is less exact than rounding one by one, and the rest in a line."""
    yield from (f"{difference.exactness.name.lower()}: {difference}" for difference in _worse(plan))
    differences = plan.rule_change.differences if plan.rule_change else ()
    rounding = [difference.what for difference in differences if difference.exactness == Exactness.ROUNDING]
    if rounding:
        yield f"rounding: {', '.join(rounding)}"


def _synthesised(plan: Plan) -> Iterator[str]:
    kinds: dict[str, list[str]] = {}
    for entry in plan.entries:
        if entry.origin == "synthesised":
            kinds.setdefault(source_text(entry.expression), []).append(entry.name)
    for expression, names in kinds.items():
        yield f"{expression} ({some(names)})"


def _tensors(plan: Plan) -> Table:
    grid = Table(
        ("tensor", "made of", "shape", "dtype", "bytes", "exactness"),
        right=("bytes",),
        drop=("dtype", "bytes", "shape"),
    )
    for entry in plan.entries:
        grid.add_row(*_row(entry))
    return grid


def _row(entry: PlannedTensor) -> tuple[str, ...]:
    made_of = "the same" if entry.expression.get("name") == entry.name else source_text(entry.expression)
    return (
        entry.name,
        made_of,
        str(list(entry.shape)),
        entry.dtype,
        size(entry.bytes),
        entry.exactness.name.lower(),
    )


def source_text(expression: Mapping[str, Any]) -> str:
    """Returns a tensor's expression for people.

    Example:
        >>> source_text({"op": "cast", "source": {"op": "stored", "name": "a"}, "shape": [2], "dtype": "float32"})
        'cast(a)'
    """
    if expression["op"] == "stored":
        return str(expression["name"])
    if expression["op"] == "filled":
        reason = f": {expression['reason']}" if expression.get("reason") else ""
        return f"filled with {expression['value']:g}{reason}"
    return f"{expression['op']}({', '.join(map(source_text, _sources(expression)))})"


def _sources(expression: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for part in expression.values():
        parts = part if isinstance(part, (list, tuple)) else [part]
        yield from (p for p in parts if isinstance(p, Mapping) and "op" in p)


def _schedule_of(number: int, row: Mapping[str, Any], schedules: Sequence[Schedule]) -> str:
    """Says which schedules go on in a group, by its number, and at which steps."""
    if (at := row["schedule"]) is None:
        return "where a schedule of it goes on, the program must say"
    if not schedules:
        return f"a schedule of it, if the run has one, goes on at step {at}"
    steps = schedule_steps(number, row, schedules)
    moving = " or ".join(dict.fromkeys(kind for kind, _ in steps))
    if len({step for _, step in steps}) > 1:
        return " and ".join(f"{kind} goes on at step {step}" for kind, step in steps)
    return f"{moving} goes on at step {at}" if moving else "no schedule moves it"


def show_measured(stdout: Screen, rows: Sequence[Mapping[str, Any]], schedules: Sequence[Schedule]) -> None:
    """Prints what the next update of each group will use, as `changing.next_update.measured` has it."""
    grid = Table(
        (
            "group",
            "parameters",
            "update",
            "learning rate",
            "schedule at",
            "second-moment decay",
            "effective count",
            "offset",
            "loaded second moment",
        ),
        right=("parameters", "update", "effective count", "offset"),
        drop=("parameters", "schedule at"),
    )
    for i, row in enumerate(rows):
        rate, decay = row["learning_rate"], row["decay"]
        grid.add_row(
            f"{i} {row.get('schema', '')}".rstrip(),
            str(row["parameters"]),
            _counted(row["update"], 1),
            f"{rate:g}" if isinstance(rate, float) else "the one you give",
            _schedule_at(i, row, schedules),
            "not known" if row["unknown"] else "none" if decay is None else f"{decay:.6g}",
            _counted(row["counted"]),
            str(row.get("step_offset") or 0),
            _loaded(row),
        )
    stdout.title("The next update:")
    stdout.show(grid)
    notes = dict.fromkeys(note for row in rows for note in row["notes"])
    unknown = dict.fromkeys(f"the decay isn't known: {row['unknown']}" for row in rows if row["unknown"])
    stdout.show_list("What follows:", (*notes, *unknown))


def _measured_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields what the next update of each group will use after changes, a sentence each."""
    for row in rows:
        parts = [f"update {row['update'] + 1}"]
        if isinstance(row["learning_rate"], float):
            parts.append(f"learning rate {row['learning_rate']:g}")
        if row["decay"] is not None and not row["unknown"]:
            parts.append(
                f"second-moment decay {row['decay']:.6g} (step_offset {row.get('step_offset') or 0})"
            )
        if loaded := _loaded(row):
            parts.append(f"the loaded second moment {loaded}")
        yield "; ".join([*parts, *row["notes"]])


def _loaded(row: Mapping[str, Any]) -> str:
    if row["begun_anew"]:
        return "begins anew"
    return "" if row["discarded"] is None else "is discarded" if row["discarded"] else "goes on"


def _counted(number: int | None, ahead: int = 0) -> str:
    return "not counted" if number is None else str(number + ahead)


def _schedule_at(number: int, row: Mapping[str, Any], schedules: Sequence[Schedule]) -> str:
    steps = dict.fromkeys(f"{step}" for _, step in schedule_steps(number, row, schedules))
    return " and ".join(steps) or ("-" if schedules else f"{row['schedule']}")


def show_next(stdout: Screen, state: Mapping[str, Any], schedules: Sequence[Schedule]) -> None:
    """Prints what the next update of each group will use; `schedules` are the run's."""
    if state["schema"] == WEIGHTS:
        stdout.title("The next update will use:")
        stdout.say("a new optimizer: nothing here says which", indent=2)
        return
    stdout.title("The next update will use:")
    for line in _next_lines(state, schedules):
        stdout.say(line, indent=2)


def _next_lines(state: Mapping[str, Any], schedules: Sequence[Schedule]) -> Iterator[str]:
    """Yields what the next update of each group will use."""
    groups = next_update(state, schedules)
    for i, group in enumerate(groups):
        rate = group["learning_rate"]
        parts = [
            "nothing counts the updates done"
            if group["update"] is None
            else f"update {group['update'] + 1} ({group['update']} done)",
            f"learning rate {rate:g}" if isinstance(rate, float) else "the learning rate you give",
            _schedule_of(i, group, schedules),
        ]
        if group.get("decay") is not None:
            parts.append(f"second-moment decay {group['decay']:.6g} (step_offset {group['step_offset']})")
        whose = f" of {group['schema']}" if "schema" in group else ""
        label = f"group {i}, {plural(group['parameters'], 'parameter')}{whose}: " if len(groups) > 1 else ""
        yield f"{label}{'; '.join(parts)}"
