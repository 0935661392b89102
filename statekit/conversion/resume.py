"""How a run goes on from a checkpoint: its layout's own lines, and what its next update will use.

A layout prints the lines of its system (`Printing`); for every other one there are those of statekit's own optimizers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState, chosen_container
from statekit.conversion.plan import Plan
from statekit.errors import printable
from statekit.files.checkpoint import CLASSES, HALVES, VARIABLES
from statekit.files.source import listing
from statekit.files.tree import StoredPlace, copying_to
from statekit.lines import printing
from statekit.lines.printing import UNKNOWN, Printing, SavedRun, State, kind_of
from statekit.lines.rates import RatesOf
from statekit.maps.model_map import map_names
from statekit.state.evidence import ORDER
from statekit.state.options import stored_rate
from statekit.state.run import Schedule, run_of
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import next_decay
from statekit.tensors.tree import empty_names, shipped_json

_ANYWHERE = Path("/path/to/checkpoint")
_IN: Mapping[str, Callable[[State, SavedRun], list[str]]] = {
    "torch": printing.torch_lines,
    "jax": printing.jax_lines,
    "tensorflow": printing.tensorflow_lines,
}


def of_plan(plan: Plan, files: Iterable[str] = ()) -> SavedRun:
    """Returns where a conversion writes."""
    target = plan.target
    return SavedRun(
        target.container,
        target.layout,
        plan.request.target,
        target.step,
        tuple(files),
        tuple(entry.name for entry in plan.entries),
        plan.empty,
        plan.run,
        variables=plan.variables,
        source=plan.source.container,
        options=plan.options,
        # A form of file that stays is written as its library laid it out.
        version=plan.version if target.layout == plan.source.layout else None,
    )


def in_manifest(plan: Plan, files: Iterable[str]) -> SavedRun:
    """Returns where a conversion's manifest says that its target lies: `/path/to/checkpoint`.

    A manifest says the same wherever its checkpoint is written and moved to; only a name that means a step stays.
    """
    saved = of_plan(plan, files)
    return replace(saved, path=_ANYWHERE, own_name=saved.path.name)


def of_checkpoint(opened: OpenState) -> SavedRun:
    """Returns where an opened checkpoint is: its path is the step's own."""
    checkpoint = opened.checkpoint
    path, parts, manifest = checkpoint.path, checkpoint.parts, checkpoint.manifest
    folder = parts[0].parent if parts else path
    files = parts or listing(path)
    # A manifest that `seal` wrote says nothing of the state: the checkpoint is as its own system made it.
    converted = bool(manifest and manifest["state"])
    return SavedRun(
        container=checkpoint.container,
        layout=opened.layout,
        path=path,
        step=None,
        files=tuple(part.relative_to(folder).as_posix() for part in files if part.is_relative_to(folder)),
        tensors=tuple(checkpoint.tensors),
        empty=tuple(empty_names(checkpoint.tree)),
        run=run_of(opened.state.extra),
        converted=converted,
        folder=folder,
        items=tuple(checkpoint.meta.get("items", ())),
        variables=tuple(checkpoint.meta.get(VARIABLES, ())),
        source=manifest["source"].get("container") if converted and manifest else None,
        options=manifest["options"] if converted and manifest else {},
        ref=opened.ref,
        version=checkpoint.meta.get("keras_version"),
        halves=checkpoint.meta.get(HALVES, {}),
        classes=checkpoint.meta.get(CLASSES, ""),
    )


def frameworks() -> list[str]:
    """Returns the names of the frameworks in which an optimizer of statekit goes on from any checkpoint."""
    return list(_IN)


def resume_lines(saved: SavedRun, state: State, framework: str | None = None) -> list[str]:
    """Returns the lines that go on from a checkpoint in its own system; none if its layout prints none.

    Args:
        saved: The checkpoint.
        state: What it holds.
        framework: Go on with an optimizer of statekit in this framework instead.
    """
    lines = _IN[framework](state, saved) if framework else _near_lines(saved, state)
    lines = [line for i, line in enumerate(lines) if not (line.startswith("import ") and line in lines[:i])]
    lines = [*_explained(lines), *(_remarks(saved, state, framework) if lines else ())]
    # Behind the end of a line in a name or a path, a comment would go on as code.
    return [printable(line) if "#" in line else line for line in lines]


def program_lines(ref: CheckpointRef) -> list[str]:
    """Returns the lines that resume a checkpoint in the program that saved it, for checkpoints that no layout decodes.

    Args:
        ref: The checkpoint.
    """
    ref, container, _ = chosen_container(ref)
    with registry.opened(container, ref.place, ref.step, ref, ref.job_budget()) as checkpoint:
        contents = registry.contents(checkpoint)
        return [*contents.program] if contents else []


def _remarks(saved: SavedRun, state: State, framework: str | None) -> Iterator[str]:
    """Yields comments on what lines that go on rest on."""
    if state["schema"] != WEIGHTS:
        yield from _loss_lines(saved)
    if framework or saved.source:
        yield from _order_lines(state)


def _order_lines(state: State) -> list[str]:
    """Returns in which order the numbers of parameters were taken, where nothing proves it.

    It bears on what goes on by name; the run's own program numbers its parameters as it did.
    """
    facts = (fact for group in state["groups"] for fact in group.get("facts", ()) if fact["name"] == ORDER)
    return list(dict.fromkeys(f"# it goes on rightly if {fact['because']}" for fact in facts))


_OPEN = re.compile(r"""["']?([\w/]+)["']?(?:=|: )\.\.\.""")
"""Matches a name that a line has no value for: `lr=...`, `"adamw": ...`."""


def _explained(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines, and before those with `...` a comment on what is missing, unless they say it themselves."""
    for line in lines:
        if UNKNOWN in line and "#" not in line and "load_optimizer(" not in line:  # whose keywords say it
            names = dict.fromkeys(_OPEN.findall(line)) or ["a value that the program has"]
            yield f"# ... stands for what nothing here says: {', '.join(names)}"
        yield line


def _near_lines(saved: SavedRun, state: State) -> list[str]:
    """Returns the lines of a checkpoint's own system; of one in a store that it can't read, of a local copy."""
    lines, address = _native_lines(saved, state), f"{saved.path}"
    if not isinstance(saved.path, StoredPlace) or all(
        "statekit." in line for line in lines if address in line
    ):
        return lines
    copy = Path(saved.path.name)
    is_file = registry.container_card(saved.container).target_kind == "file"
    first = f"# First copy it: {copying_to(address, f'{copy}', is_file)}"
    return [first, *_native_lines(replace(saved, path=copy), state)]


def _native_lines(saved: SavedRun, state: State) -> list[str]:
    if saved.state_only:
        return printing.state_lines(state, saved)
    if saved.layout not in registry.layout_names():
        return []
    layout = registry.layout(saved.layout)
    at_home = saved.container in layout.containers
    return list(layout.lines(state, saved)) if at_home and isinstance(layout, Printing) else []


def unsaid(saved: SavedRun) -> str:
    """Returns a sentence for those who ask how to go on from where no layout prints lines."""
    first, *others = frameworks()
    ref = saved.ref if isinstance(saved.ref, CheckpointRef) else CheckpointRef()
    # The path is the step's own.
    arguments = replace(ref, path=saved.path, step=None).code("--framework", first, spelling="shell")
    return (
        f"Layout {saved.layout} prints no lines that go on from container {saved.container}. "
        f"Statekit's own optimizers do, also in {' and '.join(others)}: "
        f"statekit resume {arguments}"
    )


def needs_weights(layout: str, container: str) -> str | None:
    """Returns why a target has no form of an optimizer's state without its parameters; None if it has one."""
    data = _data()
    if data["alone_in"].get(layout) == container:
        return None
    reasons: Mapping[str, str] = data["whole"]
    return reasons.get(container, reasons.get(layout, "its files are loaded with them"))


def module_map(source: tuple[str, str], target: tuple[str, str] | str) -> str | None:
    """Returns the map between two codebases' modules of the same kinds; None if both are of one, or none is there.

    Args:
        source: Container and layout of a checkpoint.
        target: The same of where it goes; or whose modules go on: `torch`, `flax` or `keras`.

    Example:
        >>> module_map(("keras", "keras"), "torch")
        'keras:torch'
        >>> module_map(("torch", "torch-optim"), ("dcp", "torch-fqn"))
    """
    modules: Mapping[str, str] = _data()["modules"]

    def whose(container: str, layout: str) -> str | None:
        return modules.get(layout, modules.get(container))

    source_modules, target_modules = whose(*source), target if isinstance(target, str) else whose(*target)
    if source_modules is None or target_modules is None or source_modules == target_modules:
        return None
    pair = f"{source_modules}:{target_modules}"
    return pair if pair in map_names() else None


@cache
def _data() -> dict[str, Any]:
    return dict(shipped_json("statekit.converters", "going_on.json"))


def _loss_lines(saved: SavedRun) -> list[str]:
    """Returns lines about the loss whose moments a target holds, where it is another than its model's usual one."""
    if saved.loss_scale is not None:
        return [f"# the loss is {saved.loss_scale!r} times the source's from here on, as its moments are"]
    names = saved.map_name.split(":")
    losses: Mapping[str, str] = _data()["losses"]
    before, after = (
        next((losses[codebase] for codebase in losses if name.startswith(f"{codebase}-")), None)
        for name in (names[0], names[-1])
    )
    if before is None or after is None or before == after:
        return []
    return [
        f"# the moments are of the source's loss, usually {before}; here it is usually {after}",
        "# train on the source's, or convert with --loss-scale where the two differ by a constant",
    ]


def next_update(state: State, schedules: Sequence[Schedule] = ()) -> list[dict[str, Any]]:
    """Returns what the next update of each group will use, as far as the state says.

    Returns:
        For each group: its parameters; `learning_rate` (None where whoever steps must give it); `update`, the number
        of updates done, and `schedule`, the argument of a learning-rate schedule (both None where nothing counts
        updates); and for Adafactor `step_offset` and `decay`, the second moment's.
    """
    counts = state["counts"]
    is_counted = counts.get("says_updates", True)
    rows = []
    for number, group in enumerate(state["groups"]):
        hyperparameters, kind = group["hyperparameters"], kind_of(state, group)
        row: dict[str, Any] = {
            **({"schema": kind["schema"]} if "schema" in group else {}),
            "parameters": len(group["paths"]),
            "learning_rate": RatesOf(schedules, state).next(number)
            if schedules
            else stored_rate(hyperparameters),
            "update": counts["updates"] if is_counted else None,
            "schedule": None,
        }
        if kind["schema"] == "adafactor":
            row["step_offset"] = hyperparameters.get("step_offset")
            row["decay"] = _decay(kind["variant"], counts["updates"], hyperparameters)
        if is_counted:
            row["schedule"] = counts["schedule"]
            steps = {step for _, step in schedule_steps(number, row, schedules)}
            row["schedule"] = steps.pop() if len(steps) == 1 else counts["schedule"]
        rows.append(row)
    return rows


def schedule_steps(
    number: int, row: Mapping[str, Any], schedules: Sequence[Schedule]
) -> dict[tuple[str, int], None]:
    """Returns where each schedule of a group goes on: as its own state has it, unless the run's step was changed.

    A schedule that is stepped once an epoch stands far behind the updates.

    Args:
        number: The group's.
        row: What its next update will use, as `next_update` has it.
        schedules: The run's.

    Returns:
        The class and the step of each that moves the group, in their order.
    """
    step, is_same = row["schedule"], row["schedule"] == row["update"]
    moving = [schedule for schedule in schedules if schedule.moves(number)]
    return dict.fromkeys(
        (schedule.kind or "its schedule", schedule.at if is_same and schedule.at is not None else step)
        for schedule in moving
    )


def _decay(variant: str | None, updates: int, hyperparameters: Mapping[str, Any]) -> float | None:
    offset, rate = hyperparameters.get("step_offset"), hyperparameters.get("decay_rate")
    if variant != "t5x" or offset is None or rate is None or updates < offset:
        return None
    return next_decay(updates, offset, rate)
