"""The layout `keras-weights`: a model's variables in Keras' files, without an optimizer's.

Input: what `model.save_weights`, or `model.save` of a model that wasn't compiled, wrote; output: a state of its
variables by their paths, in the places of the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Contents, Encoded, Evidence
from statekit.converters.layouts.keras.home import OPTIMIZER, config_of, home_in, home_of
from statekit.converters.layouts.keras.layout import (
    attribute,
    file_tree,
    left_out,
    model_tree,
    optimizer_variables,
    saved_names,
)
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.listed import is_listed, listed_config, listed_rows, listed_variables
from statekit.converters.layouts.keras.state import HOME, called
from statekit.converters.layouts.keras.variables import Variable, is_group, variables
from statekit.converters.layouts.weights.lines import keras_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.typed import Name, fits


@dataclass(frozen=True)
class KerasWeights:
    """A model's variables."""

    name: str = "keras-weights"
    title: str = "weights: a Keras model's variables"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("keras-h5", "keras")

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for variables of layers, and that an optimizer has none."""
        if checkpoint.container not in self.containers or not is_group(checkpoint.tree):
            return None
        tree = checkpoint.tree
        if optimizer_variables(tree) or listed_rows(tree) or not _variables(tree):
            return None
        return Evidence(5, _because(tree))

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Says which optimizer a file of Keras has that statekit does not decode."""
        tree = checkpoint.tree
        if checkpoint.container not in self.containers or not is_group(tree):
            return None
        params = {path: variable.tensor for path, variable in _placed(tree).items()}
        if not params:
            return None
        used = {id(tensor) for tensor in params.values()}
        others = {name: tensor for name, tensor in checkpoint.tensors.items() if id(tensor) not in used}
        return Contents(f"a model of Keras, with {optimizer_name(tree)}", params, {}, others)

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        if self.detect(checkpoint) is None:
            raise not_weights(checkpoint)
        tree = file_tree(checkpoint)
        placed = _placed(tree)
        home = home_of(tree, placed)
        home["tree"].pop(OPTIMIZER, None)
        params = {path: variable.tensor for path, variable in placed.items()}
        return weights_state(params, {HOME: home}, checkpoint, hints)

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        require_weights(state, self.name)
        tree = model_tree(state, home_in(state), {})
        tree.pop(OPTIMIZER, None)
        return Encoded(tree, state.counts.updates, dropped=left_out(state, "tree", "places"))

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return keras_lines(state, saved)


def optimizer_name(tree: Mapping[str, Any]) -> str:
    """Returns the optimizer of a file in words, by name if the file has one."""
    config = config_of(tree) or listed_config(tree) or {}
    record = (config.get("compile_config") or {}).get("optimizer")
    name = called(record)[0] if isinstance(record, Mapping) else attribute(tree, OPTIMIZER, "name")
    return f"the optimizer {name}" if fits(name, Name) else "an optimizer that it does not name"


def _variables(tree: Mapping[str, Any]) -> list[Variable]:
    return listed_variables(tree) if is_listed(tree) else variables(tree, config_of(tree))


def _because(tree: Mapping[str, Any]) -> str:
    """Says what was found, and of a file that once had an optimizer why none is there."""
    config = config_of(tree) or listed_config(tree) or {}
    module = ((config.get("compile_config") or {}).get("optimizer") or {}).get("module")
    if isinstance(module, str) and module.endswith(".legacy"):
        return "variables of layers; Keras 2 does not save the variables of a legacy optimizer in this format"
    return "variables of layers, and no optimizer"


def _placed(tree: Mapping[str, Any]) -> dict[str, Variable]:
    """Returns variables by path: numbers that a model learns or keeps, and what statekit named; not seeds."""
    named = {tuple(place): name for place, name, _ in saved_names(tree)}
    placed: dict[str, Variable] = {}
    for variable in _variables(tree):
        if variable.place in named or variable.tensor.dtype.kind in "fV":
            path = named.get(variable.place, variable.name)
            placed["/".join(variable.place) if path in placed else path] = variable
    return placed


LAYOUT = KerasWeights()
