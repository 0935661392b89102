"""A recording's own checkpoint as our side's start, completed by what the recording says beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState, open_state
from statekit.errors import StateError
from statekit.state.stored_params import MASTER, as_params
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Cast, Tensor, widens


@contextmanager
def native_state(path: Path, stated: TrainState, hints: CheckpointRef | None = None) -> Iterator[TrainState]:
    """Opens a checkpoint and yields its state, moved as a recorded state says.

    Names may have a prefix in the file, such as the attribute that a Lightning module holds its network in; parameters
    are taken in the dtypes that the run went on with, and so are masters where they are what was recorded.

    Args:
        path: The checkpoint.
        stated: A recorded state of the run: its groups, hyperparameters, rules and names count.
        hints: What reading it may do; what is usual if None.

    Raises:
        StateError: The file makes no state, even with the names of its parameters.
    """
    with _opened(path, stated, hints or CheckpointRef()) as opened:
        state = _moved(_renamed(opened.state, stated), stated)
        moved = set(state.optimizer.paths)
        params = {
            name: _widened(tensor, stated.params.get(name))
            for name, tensor in state.params.items()
            if name in stated.params or name in moved  # a recording has no parameters that nothing moves
        }
        yield with_stated(replace(state, params=params), stated)


def with_stated(state: TrainState, stated: TrainState) -> TrainState:
    """Returns a state with another state's optimizer and rules; the slots of its groups stay."""
    groups = stated.optimizer.groups
    if any(group.slots for group in state.optimizer.groups):
        groups = tuple(
            replace(other, slots=group.slots)
            for other, group in zip(groups, state.optimizer.groups, strict=True)
        )
    return replace(state, optimizer=replace(stated.optimizer, groups=groups), rules=stated.rules)


def _opened(path: Path, stated: TrainState, hints: CheckpointRef) -> OpenState:
    names = tuple(name for group in stated.optimizer.groups for name in group.paths)
    try:
        opened = open_state(path, hints=hints)
    except StateError:  # it may only number its parameters
        return open_state(path, hints=replace(hints, param_names=names))
    if {*names} <= _renamed(opened.state, stated).params.keys():
        return opened
    opened.checkpoint.close()  # it may number those of some layers
    return open_state(path, hints=replace(hints, param_names=names))


def _renamed(state: TrainState, stated: TrainState) -> TrainState:
    """Returns a state without the prefix that all its paths have before the recording's."""
    first = next(iter(stated.params), "")
    prefixes = [path.removesuffix(first) for path in state.params if path.endswith(f"/{first}")]
    prefix = next(
        (prefix for prefix in prefixes if all(prefix + path in state.params for path in stated.params)), ""
    )
    if first in state.params or not prefix:
        return state

    return state.renamed(lambda path: path.removeprefix(prefix))


def _moved(state: TrainState, stated: TrainState) -> TrainState:
    """Returns a state with masters in the place of parameters, if the recorded parameters are of their dtype."""
    recorded = [
        stated.params[path].dtype == slots[MASTER].dtype
        for path, slots in state.slots.items()
        if MASTER in slots and path in stated.params
    ]
    return as_params(state)[0] if recorded and all(recorded) else state


def _widened(tensor: Tensor, live: Tensor | None) -> Tensor:
    if live is None or live.dtype == tensor.dtype or not widens(tensor.dtype, live.dtype):
        return tensor
    return Cast(tensor, live.dtype)
