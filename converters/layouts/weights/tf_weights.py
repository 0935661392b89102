"""The layout `tf-weights`: variables of TensorFlow by name, without an optimizer's.

Input: what a Saver of TensorFlow 1 wrote of a model alone, with or without a global step; output: a state of its
variables. A partitioned one is the variable that its slices make up, and is cut as it was when it is written again. A
checkpoint of objects (`tf.train.Checkpoint`) names other things than variables, and doesn't fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.tensorflow.names import GLOBAL_STEP, OF_OPTIMIZERS
from statekit.converters.layouts.tensorflow.slices import cut, joined
from statekit.converters.layouts.weights.lines import graph_lines
from statekit.converters.layouts.weights.state import VARIANTS, require_weights, weights_state
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import Name, fits, typed

HOME = "tf_weights"
"""Key in `extra`: what is no parameter."""


class Beside(TypedDict, total=False):
    """What is no parameter: a step, and where the slices of partitioned variables lie."""

    global_step: Tensor
    slices: dict[Name, list[Name]]


@dataclass(frozen=True)
class TensorFlowWeights:
    """Variables by name."""

    name: str = "tf-weights"
    title: str = "weights: TensorFlow's variables by name"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("tf-bundle",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for variables, and that no name may be an optimizer's."""
        if checkpoint.container not in self.containers or not _is_model(checkpoint.tree):
            return None
        return Evidence(5, "variables by name, and no optimizer's")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree = checkpoint.tree
        if not _is_model(tree):
            raise StateError("The checkpoint doesn't hold weights alone.", place=checkpoint.path)
        params = {
            name: joined(name, value, checkpoint.path) if isinstance(value, Mapping) else value
            for name, value in tree.items()
            if name != GLOBAL_STEP
        }
        slices = {name: list(value) for name, value in tree.items() if isinstance(value, Mapping)}
        extra = {GLOBAL_STEP: tree[GLOBAL_STEP]} if GLOBAL_STEP in tree else {}
        extra |= {"slices": slices} if slices else {}
        return weights_state(params, {HOME: extra} if extra else {}, checkpoint, hints)

    def encode(self, state: TrainState) -> Encoded:
        require_weights(state, self.name)
        home = typed(state.extra.get(HOME, {}), Beside, f"extra/{HOME}", "These lie beside no variables")
        slices: Mapping[str, list[str]] = home.get("slices", {})
        parts = {name: cut(state.params[name], slices[name]) for name in slices if name in state.params}
        dropped = dropped_from(state.extra, (HOME,), "TensorFlow")
        step = {GLOBAL_STEP: home["global_step"]} if "global_step" in home else {}
        tree = {**state.params, **{name: part for name, part in parts.items() if part}, **step}
        return Encoded(tree, state.counts.updates, dropped=dropped)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return graph_lines(saved)


def _is_model(tree: Any) -> bool:
    if not isinstance(tree, Mapping) or GRAPH in tree or not tree.keys() - {GLOBAL_STEP}:
        return False
    return fits(tree, dict[Name, Tensor | dict[Name, Tensor]]) and not any(map(OF_OPTIMIZERS.search, tree))


LAYOUT = TensorFlowWeights()
