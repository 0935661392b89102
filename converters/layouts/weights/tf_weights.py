"""The layout `tf-weights`: variables of TensorFlow by name, without an optimizer's.

In goes what a Saver of TensorFlow 1 wrote of a model alone, with or without a global step; out comes a state of its
variables. A checkpoint of objects (`tf.train.Checkpoint`) names other things than variables, and doesn't fit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.contracts import Encoded, Evidence, Hints
from statekit.converters.layouts.dropped import dropped_from
from statekit.converters.layouts.weights.state import VARIANTS, require_weights, weights_state
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH
from statekit.tensors.tensor import Tensor

GLOBAL_STEP = "global_step"
HOME = "tf_weights"
"""Key in `extra`: what is no parameter."""
OF_OPTIMIZERS = re.compile(
    r"(?i)(^|/)((lazy)?adam\w*|adafactor\w*|momentum|nesterov|adagrad\w*|adadelta\w*|rmsprop\w*|ftrl\w*|lamb\w*|"
    r"beta[12]_power|exponentialmovingaverage|loss_scale)(_\d+)?(/|$)|(_slot_v[rc]?|_slot_m|/adam_[mv])$"
)
"""Names of what an optimizer, an average or a loss scaler keeps.

Source: tensorflow/tensorflow v1.15, python/training, `_get_or_make_slot`; Mesh-TensorFlow, optimize.py.
"""


@dataclass(frozen=True)
class TensorFlowWeights:
    """Variables by name."""

    name: str = "tf-weights"
    title: str = "weights alone: TensorFlow's variables by name"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("tf-bundle",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for variables, and that no name may be an optimizer's."""
        if checkpoint.container not in self.containers or not _is_model(checkpoint.tree):
            return None
        return Evidence(5, "variables by name, and no optimizer's")

    def decode(self, checkpoint: Checkpoint, hints: Hints) -> TrainState:
        """Returns the canonical state.

        Raises:
            StateError: There are no variables, or some that may be an optimizer's.
            UsageError: Something is said of an optimizer.
        """
        tree = checkpoint.tree
        if not _is_model(tree):
            raise StateError("The checkpoint doesn't hold weights alone.", place=checkpoint.path)
        params = {name: tensor for name, tensor in tree.items() if name != GLOBAL_STEP}
        beside = {GLOBAL_STEP: tree[GLOBAL_STEP]} if GLOBAL_STEP in tree else {}
        return weights_state(params, {HOME: beside} if beside else {}, checkpoint.step, hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns variables by name.

        Raises:
            InexactError: The state has an optimizer.
        """
        require_weights(state, self.name)
        beside = state.extra.get(HOME) or {}
        dropped = dropped_from(state.extra, (HOME,), "TensorFlow")
        return Encoded({**state.params, **beside}, state.counts.updates, dropped=dropped)


def _is_model(tree: Any) -> bool:
    if not isinstance(tree, Mapping) or GRAPH in tree or not tree.keys() - {GLOBAL_STEP}:
        return False
    return all(isinstance(one, Tensor) and not OF_OPTIMIZERS.search(str(name)) for name, one in tree.items())


LAYOUT = TensorFlowWeights()
