"""The runs below a folder, as the catalogue has them, without a service: each with its steps, oldest first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from statekit.errors import StatekitError
from statekit.service.looking import KINDS
from statekit.service.scanning import Scanner, Seen, run_key
from statekit.service.tasks.listener import Listener

COLUMNS = ("step", "container", "layout", "optimizer", "resumable", "seal")


@dataclass(frozen=True)
class StepAt:
    """One checkpoint below a folder.

    Attributes:
        path: Where it is, from the folder.
        size: Bytes of its files.
        modified: Time of the youngest of them, in seconds since 1970.
        columns: What is known of it, by `COLUMNS`.
        why: Why nobody can go on from it; empty if somebody can.
    """

    path: str
    size: int
    modified: float
    columns: Mapping[str, Any]
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path, **self.columns, "why": self.why, "size": self.size, "modified": self.modified
        }  # fmt: skip


@dataclass(frozen=True)
class RunAt:
    """A run below a folder, or a checkpoint that is no part of one.

    Attributes:
        path: Where it is, from the folder.
        steps: Its checkpoints, the oldest step first.
    """

    path: str
    steps: tuple[StepAt, ...]

    @property
    def newest(self) -> StepAt:
        """The newest step."""
        return self.steps[-1]

    @property
    def newest_resumable(self) -> StepAt | None:
        """The newest step from which one can go on."""
        return next((step for step in reversed(self.steps) if step.columns["resumable"]), None)

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(step.size for step in self.steps)

    def to_json(self) -> dict[str, Any]:
        resumable = self.newest_resumable
        return {
            "path": self.path,
            "newest": self.newest.columns["step"],
            "newest_resumable": None if resumable is None else resumable.columns["step"],
            "size": self.size,
            "checkpoints": [step.to_json() for step in self.steps],
        }


def runs_below(folder: Path, on_checkpoint: Callable[[str], None] = lambda path: None) -> list[RunAt]:
    """Returns the runs below a folder, by their paths; only headers are read.

    Args:
        folder: The folder. Links in it are passed over.
        on_checkpoint: Told the path of each checkpoint that was found.

    Raises:
        StatekitError: The folder isn't there, or can't be listed.
    """
    runs: dict[tuple[Any, ...], list[StepAt]] = {}
    for number, seen in enumerate(Scanner(Path(os.path.realpath(folder)), ask=_ask).scan()):
        step = _step_at(seen)
        on_checkpoint(step.path)
        key = run_key(seen.place, seen.columns) if step.columns["step"] is not None else None
        runs.setdefault(key or (number,), []).append(step)
    listed = []
    for steps in runs.values():
        ordered = tuple(sorted(steps, key=lambda step: (step.columns["step"] or 0, step.path)))
        if len({step.columns["step"] for step in ordered}) > 1:
            listed.append(RunAt(_path_of(ordered), ordered))
        else:
            listed.extend(RunAt(step.path, (step,)) for step in ordered)
    return sorted(listed, key=lambda run: run.path)


def _path_of(steps: Sequence[StepAt]) -> str:
    """Returns the path of a run: what all steps lie in, or the folder that they share as files of several steps."""
    paths = {step.path for step in steps}
    folders = {os.path.dirname(path) for path in paths}
    return paths.pop() if len(paths) == 1 else os.path.commonpath(folders) or "."


def _ask(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Looks into a file or folder in this process."""
    try:
        answer: Mapping[str, Any] = KINDS[request["kind"]](request, Listener(StringIO()))
    except StatekitError as error:
        return {"unreadable": error.subject}
    return answer


def _step_at(seen: Seen) -> StepAt:
    columns = {name: seen.columns.get(name) for name in COLUMNS}
    path = os.fsdecode(seen.place) or "."
    return StepAt(path, seen.size, seen.modified, columns, _why_not(seen.columns))


def _why_not(columns: Mapping[str, Any]) -> str:
    """Returns why nobody can go on from a checkpoint; empty if somebody can."""
    if columns.get("unreadable"):
        return str(columns["unreadable"])
    if columns["resumable"]:
        numbered = columns.get("undecoded")
        if numbered:
            return f"its own system goes on; others need names, or the model's config: {numbered}"
        return ""
    if columns.get("undecoded"):
        is_listed = columns.get("layout") is None
        return f"{columns['undecoded']}{' `statekit inspect` lists its tensors' if is_listed else ''}"
    if columns.get("optimizer") is None:
        return "weights alone: no optimizer's state"
    return "the optimizer's state holds no slot"
