"""The layout `mxnet-weights`: a `.params` file without the `.states` of a trainer.

Input: what `Block.save_parameters` wrote; output: a state of all its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence, dropped_from
from statekit.converters.layouts.mxnet.lines import network_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import Name, fits

PARAMS, FILES = "params", "files"
HOME = "mxnet_weights"
"""Key in `extra`: how the file is written."""


class Arrays(TypedDict):
    """What a file of parameters holds."""

    params: dict[Name, Tensor]
    files: dict[Name, Any]


@dataclass(frozen=True)
class MXNetWeights:
    """A list of arrays by name."""

    name: str = "mxnet-weights"
    title: str = "weights: MXNet's .params"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("mxnet",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for parameters, and that there are no states."""
        if checkpoint.container not in self.containers or not _is_model(checkpoint.tree):
            return None
        return Evidence(5, "arrays by name, and no states of a trainer")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        tree = checkpoint.tree
        if not _is_model(tree):
            raise not_weights(checkpoint)
        params = {name.replace(".", "/"): tensor for name, tensor in tree[PARAMS].items()}
        return weights_state(params, {HOME: tree.get(FILES, {})}, checkpoint, hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the file's tree, names with dots, as Gluon has them."""
        require_weights(state, self.name)
        files = state.extra.get(HOME)
        params = {path.replace("/", "."): tensor for path, tensor in state.params.items()}
        dropped = dropped_from(state.extra, (HOME,), "the file")
        return Encoded(
            {PARAMS: params, **({FILES: files} if files else {})}, state.counts.updates, dropped=dropped
        )

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return network_lines(saved)


def _is_model(tree: Any) -> bool:
    return fits(tree, Arrays) and tree.keys() == Arrays.__annotations__.keys()


LAYOUT = MXNetWeights()
