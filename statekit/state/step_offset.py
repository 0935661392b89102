"""Where the decay of the second moment starts: kept, reset for finetuning, or set."""

from __future__ import annotations

from typing import Literal, TypeAlias

from statekit.errors import UsageError
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState

StepOffset: TypeAlias = Literal["keep", "reset"] | int
"""`keep`; `reset`: to the number of updates done; or the step where the decay starts."""


def with_offset(state: TrainState, asked: StepOffset) -> tuple[TrainState, int | None]:
    """Returns the state with its `step_offset` as asked for, and the new value; None where it stays.

    Raises:
        UsageError: The optimizer has none, or the offset lies beyond the step.
    """
    if asked == "keep":
        return state, None
    updates = state.counts.updates
    if "step_offset" not in load_schema(state.optimizer.schema).hyperparameters:
        raise UsageError(
            f"{state.optimizer.schema} has no step_offset.", place="--step-offset", expected="keep"
        )
    value = updates if asked == "reset" else asked
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= updates:
        raise UsageError(  # (step - offset + 1) ** -decay_rate would be NaN from then on
            "The step_offset isn't usable: the decay of the second moment would be NaN.",
            place="--step-offset",
            expected=f"keep, reset, or a number from 0 to the step, {updates}",
            found=asked,
        )
    return state.with_hyperparameters(step_offset=value), value
