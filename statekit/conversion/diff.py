"""diff: in what two checkpoints differ, or where two runs part, whatever systems they are of.

Both are decoded to canonical form and compared there (statekit/state/comparison.py), tensor by tensor, block by block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from typing import Any

from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef, ref_of
from statekit.conversion.checkpoints_at import CheckpointAt, checkpoints_at
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.model_settings import with_beside
from statekit.conversion.open_state import OpenState, chosen_container, open_state
from statekit.errors import StateError, UnknownFormatError, UsageError, printable
from statekit.files.checkpoint import STEPS, Checkpoint
from statekit.files.tree import Place
from statekit.maps.links import carried_through
from statekit.maps.model_map import maps_of
from statekit.state.comparison import Difference, compare_states
from statekit.state.schema import WEIGHTS
from statekit.state.stored_params import as_params
from statekit.state.train_state import Counts, Optimizer, TrainState

OnTensor = Callable[[str, int], object]
_OWN_NAMES = (
    "what only a state tells: no layout makes one of both, and tensors are compared by their own names"
)


@dataclass(frozen=True, repr=False)
class Diff:
    """In what two checkpoints differ.

    Attributes:
        left: The first.
        right: The second.
        step: The step at which they were compared, of a run's folder; None of single checkpoints.
        compared: Steps that were compared before, of two runs: they are equal.
        differences: In what the second isn't the first, in the first one's order.
        tensors: How many tensors were compared by value.
        bytes_read: Bytes of values that were read of the first.
        unsaid: What couldn't be compared, a sentence each.
        normalised: What is written otherwise and means the same, a sentence each.
    """

    left: Place
    right: Place
    step: int | None
    compared: tuple[int, ...]
    differences: tuple[Difference, ...]
    tensors: int
    bytes_read: int
    unsaid: tuple[str, ...]
    normalised: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether they are equal in all that was compared."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first tensor that differs."""
        kinds = ("missing", "extra", "shape", "dtype", "values")
        return next((difference for difference in self.differences if difference.what in kinds), None)

    def __repr__(self) -> str:
        return printable(f"<Diff of {self.left} and {self.right}: {len(self.differences)} differences>")

    def to_json(self) -> dict[str, Any]:
        return {
            "left": str(self.left),
            "right": str(self.right),
            "equal": self.equal,
            "step": self.step,
            "equal_steps": list(self.compared),
            "tensors": self.tensors,
            "bytes_read": self.bytes_read,
            "first": self.first and self.first.place,
            "differences": [difference.to_json() for difference in self.differences],
            "not_compared": list(self.unsaid),
            "normalised": list(self.normalised),
        }


def diff(
    left: CheckpointRef | str | PathLike[str],
    right: CheckpointRef | str | PathLike[str],
    *,
    step: int | None = None,
    map: str | None = None,
    config: Mapping[str, Any] | None = None,
    hints: CheckpointRef | tuple[CheckpointRef, CheckpointRef] = NO_HINTS,
    on_tensor: OnTensor = lambda name, size: None,
) -> Diff:
    """Compares two checkpoints of any systems; of two runs' folders step by step, up to the first that differs.

    Args:
        left: A checkpoint or a run's folder, taken for the right one; a ref says what its files don't.
        right: Another.
        step: A step of the folders; of two runs all that both have, if None.
        map: From the first one's model to that of the second's codebase, e.g. `t5x-t5:hf-t5`.
        config: What the map needs to know of the model.
        hints: What both checkpoints don't say, or of each what it doesn't.
        on_tensor: Told the name and the size in bytes of each tensor before it is compared.

    Raises:
        NotFoundError: Nothing is there, or no such step.
        FormatError, StateError: One of them can't be read, or has no canonical form.
        UsageError: Two runs have no step in common.
    """
    hints_of_sides = (hints, hints) if isinstance(hints, CheckpointRef) else hints
    refs = ref_of(left, hints_of_sides[0], step=step), ref_of(right, hints_of_sides[1], step=step)
    places = [_steps(ref) for ref in refs]
    if all(len(steps) > 1 for steps in places):
        common = [number for number in places[0] if number in places[1]]
        if not common:
            raise UsageError(
                "The runs have no step in common.",
                expected=", ".join(str(number) for number in places[0]),
                found=", ".join(str(number) for number in places[1]),
                remedy="name one checkpoint of each",
            )
    else:
        return _compared(refs, (map, config), on_tensor, ())
    for i, number in enumerate(common):
        both = refs[0].at(refs[0].place, step=number), refs[1].at(refs[1].place, step=number)
        comparison = _compared(both, (map, config), on_tensor, tuple(common[:i]))
        if not comparison.equal:
            break
    return comparison


def _steps(ref: CheckpointRef) -> dict[int, CheckpointAt]:
    """Returns the steps of a run's folder; none of a single checkpoint, or where one is named."""
    if ref.step is not None or not ref.place.is_dir():
        return {}
    return {place.step: place for place in checkpoints_at(ref) if place.step is not None}


def _compared(
    refs: tuple[CheckpointRef, CheckpointRef],
    mapped: tuple[str | None, Mapping[str, Any] | None],
    on_tensor: OnTensor,
    done: tuple[int, ...],
) -> Diff:
    (name, config), step = mapped, refs[0].step
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(open_state(ref, builds=True)) for ref in refs]
        except (UnknownFormatError, StateError):
            if name is not None or config:
                raise
            return _by_own_names(refs, on_tensor, done)
        first, second = (as_params(side.state)[0] for side in opened)
        if name is not None or config:
            first = carried_through(
                first, with_beside(maps_of(name, config, budget=refs[0].job_budget()), opened[0])
            )[0]
        compared = compare_states(first, second, on_tensor=on_tensor)
        same = [side.checkpoint.path for side in opened]
        has_steps = any(side.checkpoint.meta.get(STEPS) for side in opened)
    return Diff(
        left=same[0],
        right=same[1],
        step=step if step is not None else _number(opened) if has_steps else None,
        compared=done,
        differences=compared.differences,
        tensors=compared.tensors,
        bytes_read=compared.bytes_read,
        unsaid=compared.unsaid,
        normalised=compared.normalised,
    )


def _by_own_names(refs: Sequence[CheckpointRef], on_tensor: OnTensor, done: tuple[int, ...]) -> Diff:
    """Compares two checkpoints of which one makes no state, by the names that their tensors have in the files."""
    with ExitStack() as stack:
        opened: list[Checkpoint] = []
        for ref in refs:
            container = chosen_container(ref)[1]
            opened.append(stack.enter_context(registry.opened(container, ref.place, ref.step, ref)))
        first, second = opened
        if first.container != second.container:
            raise UnknownFormatError(
                "No layout makes a state of both checkpoints, and their containers name tensors in other ways.",
                place=refs[0].place,
                expected="one container",
                found=f"{first.container} and {second.container}",
                remedy="`statekit inspect` lists their tensors",
            )
        states = [
            TrainState(
                dict(side.tensors), {}, Optimizer(WEIGHTS, None, ()), Counts(0, 0, says_schedule=False)
            )
            for side in opened
        ]
        compared = compare_states(*states, on_tensor=on_tensor)
    unsaid = (_OWN_NAMES, *compared.unsaid)
    return Diff(
        left=first.path,
        right=second.path,
        step=refs[0].step,
        compared=done,
        differences=compared.differences,
        tensors=compared.tensors,
        bytes_read=compared.bytes_read,
        unsaid=unsaid,
        normalised=compared.normalised,
    )


def _number(opened: list[OpenState]) -> int | None:
    numbers = {side.checkpoint.step for side in opened}
    return numbers.pop() if len(numbers) == 1 else None
