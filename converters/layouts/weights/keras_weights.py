"""The layout `keras-weights`: a model's variables in Keras' files, without an optimizer's.

In goes what `model.save_weights`, or `model.save` of a model that wasn't compiled, wrote; out comes a state of its
variables by their paths, in the places of the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.keras.home import OPTIMIZER, config_of, home_in, home_of
from statekit.converters.layouts.keras.layout import (
    file_tree,
    left_out,
    model_tree,
    optimizer_variables,
    saved_names,
)
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.state import HOME
from statekit.converters.layouts.keras.variables import Variable, is_group, variables
from statekit.converters.layouts.weights.lines import keras_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState


@dataclass(frozen=True)
class KerasWeights:
    """A model's variables."""

    name: str = "keras-weights"
    title: str = "weights alone: a Keras model's variables"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("keras-h5", "keras")

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for variables of layers, and that an optimizer has none."""
        if checkpoint.container not in self.containers or not is_group(checkpoint.tree):
            return None
        if optimizer_variables(checkpoint.tree) or not variables(checkpoint.tree, config_of(checkpoint.tree)):
            return None
        return Evidence(5, "variables of layers, and no optimizer")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state.

        Raises:
            StateError: There are no variables, or an optimizer has some.
            UsageError: Something is said of an optimizer.
        """
        if self.detect(checkpoint) is None:
            raise not_weights(checkpoint)
        tree = file_tree(checkpoint)
        placed = _placed(tree)
        home = home_of(tree, placed)
        home["tree"].pop(OPTIMIZER, None)
        params = {path: variable.tensor for path, variable in placed.items()}
        return weights_state(params, {HOME: home}, checkpoint, hints)

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        """Returns the state as a file of the same model lays it out."""
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree.

        Raises:
            InexactError: The state has an optimizer.
        """
        require_weights(state, self.name)
        tree = model_tree(state, home_in(state), {})
        tree.pop(OPTIMIZER, None)
        return Encoded(tree, state.counts.updates, dropped=left_out(state))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        """Returns the lines that go on from the weights in Keras."""
        return keras_lines(state, saved)


def _placed(tree: Mapping[str, Any]) -> dict[str, Variable]:
    """Returns variables by path: numbers that a model learns or keeps, and what statekit named; not seeds."""
    named = {tuple(place): name for place, name, _ in saved_names(tree)}
    placed: dict[str, Variable] = {}
    for variable in variables(tree, config_of(tree)):
        if variable.place in named or variable.tensor.dtype.kind in "fV":
            path = named.get(variable.place, variable.name)
            placed["/".join(variable.place) if path in placed else path] = variable
    return placed


LAYOUT = KerasWeights()
