"""The law of halves: whatever part of a checkpoint is hidden, what is left never passes for weights alone.

    from statekit.testing.companions import hidden_halves, silent

    def test_no_half_is_lost_in_silence(tmp_path: Path) -> None:
        trial = Trial(MyContainer(), Sample("mine", Path("checkpoint.xyz")), tmp_path)
        assert not [hiding for hiding in hidden_halves(trial) if silent(hiding)]

Input: a trial whose sample has an optimizer. Each file, each folder and each key at the top is removed, renamed and
moved aside in turn. Output: the ways in which what is left says nothing of it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from statekit.conversion.belonging import UNREAD, half_of
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state, state_to_load
from statekit.errors import StatekitError
from statekit.state.run import run_of
from statekit.state.schema import NO_OPTIMIZER, WEIGHTS
from statekit.testing.container_trials import Trial, open_proven

Move = Callable[[Path], object]
_WAYS: Mapping[str, Move] = {
    "is removed": lambda path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
    "has a word before its name": lambda path: path.rename(path.with_name(f"old_{path.name}")),
    "has a suffix behind its name": lambda path: path.rename(path.with_name(f"{path.name}.bak")),
    "lies in a folder": lambda path: _moved_into(path, path.parent / "backup"),
    "lies beside": lambda path: path.rename(path.parent.parent / f"old_{path.name}"),
}


@dataclass(frozen=True)
class Hiding:
    """A checkpoint of which a part is hidden.

    Attributes:
        what: Which part, and how it is hidden.
        path: What is left.
        ref: What the sample has to be told.
        is_gone: Whether the part is removed, so that nothing may be left that tells of it.
    """

    what: str
    path: Path
    ref: CheckpointRef
    is_gone: bool


def hidden_halves(trial: Trial, ref: CheckpointRef = NO_HINTS) -> Iterator[Hiding]:
    """Yields the sample with each of its parts hidden in each way; every one is a copy of its own.

    Args:
        trial: A container and a sample with an optimizer.
        ref: What the sample has to be told.
    """
    top = trial.path if trial.path.is_dir() else trial.path.parent
    names = (
        sorted(entry.name for entry in top.iterdir() if entry != trial.path) if trial.root.is_dir() else []
    )
    for name in names:
        for way, move in _WAYS.items():
            copy = trial.work / "hidden" / f"{len(list((trial.work / 'hidden').glob('*')))}" / trial.root.name
            shutil.copytree(trial.root, copy)
            left = copy / trial.path.relative_to(trial.root)
            move((copy / top.relative_to(trial.root)) / name)
            yield Hiding(f"{name} {way}", left, ref, way == "is removed")
    if trial.writes:
        yield from _hidden_keys(trial, ref)


def _hidden_keys(trial: Trial, ref: CheckpointRef) -> Iterator[Hiding]:
    """Yields the sample's tree with each key at its top left out and renamed."""
    with open_proven(trial.container, trial.path) as checkpoint:
        tree: Mapping[Any, Any] = checkpoint.tree if isinstance(checkpoint.tree, Mapping) else {}
        for number, key in enumerate(tree):
            rest = {name: part for name, part in tree.items() if name != key}
            for way, changed in (("is left out", rest), ("is renamed", {**rest, f"old_{key}": tree[key]})):
                try:
                    path = trial.write(changed, checkpoint.step, f"key{number}{way[-2:]}")
                except (StatekitError, LookupError):  # it isn't a checkpoint without that key
                    continue
                yield Hiding(f"the key {key} {way}", path, ref, not _has_key(trial, path, f"old_{key}"))


def _has_key(trial: Trial, path: Path, key: str) -> bool:
    """Tells whether a container has written a key that its system doesn't know."""
    try:
        with open_proven(trial.container, path) as checkpoint:
            return any(name.startswith(key) for name in checkpoint.tensors)
    except StatekitError:
        return False


def _moved_into(path: Path, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    path.rename(folder / path.name)


def silent(hiding: Hiding) -> str:
    """Returns what is left when it passes for weights alone although the hidden part can be seen; "" if it doesn't.

    An error of a known type says enough. So does a finding. Of a part that is gone, only what is left of the run can
    tell: a record of its schedule, its scaler or its average, or another of its files.
    """
    ref = replace(hiding.ref, path=hiding.path)
    try:
        with open_state(ref) as opened:
            state, findings = opened.state, opened.checkpoint.findings
        shown, is_warned = inspect(ref).contents, _warns(ref)
    except StatekitError:
        return ""
    if state.optimizer.schema != WEIGHTS:
        return ""
    run = run_of(state.extra)
    tells = bool(run.schedules) or any(part.what in ("scaler", "averages") for part in run.parts)
    folder = hiding.path if hiding.path.is_dir() else hiding.path.parent
    tells |= any(half_of(entry.name) == "optimizer" for entry in folder.iterdir())
    if hiding.is_gone and not tells:
        return ""
    is_named = any(finding.kind == UNREAD for finding in findings) and shown != NO_OPTIMIZER
    return "" if is_named and is_warned else f"{hiding.what}: {shown}"


def _warns(ref: CheckpointRef) -> bool:
    """Tells whether the loaders of the frameworks warn of a checkpoint."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with state_to_load(ref):
            return bool(caught)
