"""The state of a run of which only the weights were saved."""

from __future__ import annotations

from collections.abc import Mapping

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.errors import InexactError, StateError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

VARIANTS: Mapping[str, tuple[str, ...]] = {WEIGHTS: ()}
"""What these layouts hold."""


def weights_state(
    params: Mapping[str, Tensor], extra: Mapping[str, Tree], checkpoint: Checkpoint, hints: CheckpointRef
) -> TrainState:
    """Returns the state of weights alone.

    Args:
        params: By path.
        extra: What else the checkpoint holds.
        checkpoint: It, whose step counts; else the one that its manifest has, where the system has no place for it
            or a name alone has it.
        hints: What the user says; there is no optimizer that anything could be said of.

    Raises:
        UsageError: The user says something of an optimizer.
    """
    stated = {
        "--hparams": hints.hyperparameters,
        "--variant": hints.variant,
        "--param-names": hints.param_names,
    }
    if asked := [option for option, value in stated.items() if value]:
        raise UsageError(
            "The checkpoint is read as weights: it has no optimizer for this option.",
            place=", ".join(asked),
            remedy="leave it out, or name the file that holds the optimizer too",
        )
    manifest = manifest_state(checkpoint, WEIGHTS)
    # A number at the end of a name may count something else: what the manifest says comes first.
    numbered = checkpoint.step if checkpoint.is_numbered or manifest is None else None
    done = numbered or (manifest.schedule if manifest else 0)
    return TrainState(
        params, {}, Optimizer(WEIGHTS, None, ()), Counts(done, done, says_schedule=False), {}, extra
    )


def not_weights(checkpoint: Checkpoint) -> StateError:
    """Returns the refusal of a checkpoint that has something else than weights, or none."""
    return StateError("The checkpoint doesn't hold weights alone.", place=checkpoint.path)


def require_weights(state: TrainState, layout: str) -> None:
    """Refuses a state with an optimizer, which would be left behind.

    Raises:
        InexactError: It has one.
    """
    if state.optimizer.schema != WEIGHTS:
        raise InexactError(
            f"The layout {layout} holds weights alone, and the state has an optimizer.",
            expected=WEIGHTS,
            found=state.optimizer.schema,
        )
