"""Layout `tf2-statekit`: optimizers of statekit.tensorflow in `tf.train.Checkpoint`.

Their slots are named by paths, `<optimizer>/<path>/<slot>`; the objects are those of Keras' own optimizers.

Source: statekit/tensorflow/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.keras.graph_optimizer import (
    BASE_LISTS,
    VARIABLES,
    GraphOptimizer,
    Row,
    encoded_graph,
    found_optimizer,
    frozen_keys,
    graph_home,
    tensors_of,
    values_of,
)
from statekit.converters.layouts.keras.home import home_in
from statekit.converters.layouts.keras.like import laid_out_like
from statekit.converters.layouts.keras.lines import statekit_lines
from statekit.converters.layouts.keras.state import ACCUMULATOR, AVERAGE, HOME, ITERATION, RATE
from statekit.converters.layouts.keras.statekit_keras import (
    SEPARATOR,
    Own,
    class_of,
    named_slots,
    own_by_name,
    own_manifest,
    own_state,
    own_variables,
    paths_of,
)
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.options import CLASSES
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor


@dataclass(frozen=True)
class StatekitGraph:
    """The optimizers of statekit.tensorflow."""

    name: str = "tf2-statekit"
    title: str = "a run with an optimizer of statekit.tensorflow in tf.train.Checkpoint"
    containers: tuple[str, ...] = ("tf-bundle",)
    schedule_in: str = "iterations"
    holds_several: bool = True
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {schema: load_schema(schema).stepped for schema in CLASSES}
    )

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for an optimizer whose slots are named by paths."""
        optimizer = found_optimizer(checkpoint)
        if optimizer is None or not optimizer.by_path:
            return None
        return Evidence(30, f"an object with {VARIABLES}, named as {optimizer.variables[-1][1]}")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; hints are canonical."""
        tree, in_graph = checkpoint.tree, found_optimizer(checkpoint)
        if in_graph is None:
            raise StateError("The checkpoint holds no optimizer of Keras.", place=checkpoint.path)
        params = dict(
            zip((name for _, name in in_graph.moved), tensors_of(tree, in_graph.moved, ""), strict=True)
        )
        named = named_slots(_by_name(tree, in_graph))
        optimizer = own_by_name(in_graph.name, named)
        if optimizer is None or len(params) != len(paths_of(named)) or len(params) != len(in_graph.moved):
            raise StateError(
                "The checkpoint doesn't say which optimizer of statekit.tensorflow it is about.",
                place=checkpoint.path,
                expected=f"{', '.join(CLASSES.values())}, with slots of {len(params)} parameters",
                found=f"{in_graph.name}, slots of {len(paths_of(named))}",
            )
        moved = params
        if {*params} != {*paths_of(named)}:
            moved = dict(zip(paths_of(named), params.values(), strict=True))
        frozen = frozen_keys(tree, in_graph)
        owners = [_owner(key) for key in _by_name(tree, in_graph)]
        placed = dict(zip(moved, (key for key, _ in in_graph.moved), strict=True)) | frozen
        home = graph_home(tree, in_graph, placed, owners, self.name)
        others = {name: tree[key] for name, key in frozen.items()}
        manifest = own_manifest(checkpoint, optimizer)
        return own_state(optimizer, named, moved, others, {HOME: home}, manifest, hints)

    def like(self, state: TrainState, model: Checkpoint) -> TrainState:
        return laid_out_like(state, model)

    def encode(self, state: TrainState) -> Encoded:
        home = home_in(state)
        variables = own_variables(state, home)
        silent = RATE not in variables and not home.get("schedule")
        name = Own(class_of(state, home)).usual_name
        before = [(ITERATION, variables.pop(ITERATION))]
        if silent or RATE in variables:
            before.append((RATE, variables.pop(RATE, before[0][1])))
        first = [
            key for slot in (AVERAGE, ACCUMULATOR) for key in variables if key.endswith(f"{SEPARATOR}{slot}")
        ]
        rows = [Row(None, key, f"{name}/{key}", tensor) for key, tensor in before]
        for key in [*first, *(key for key in variables if key not in first)]:
            owner, slot = _owner(key)
            flat = f"{str(owner).replace('/', '_')}_{slot}" if key in first else f"{owner}/{slot}"
            rows.append(Row(owner, slot, f"{name}/{flat}", variables[key]))
        return encoded_graph(state, home, name, {}, rows, silent, self.name)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return statekit_lines(state, saved)


def _owner(key: str) -> tuple[str | None, str]:
    """Returns the path that a variable of statekit.tensorflow belongs to, and what it is."""
    owner, _, slot = key.replace(SEPARATOR, "/").rpartition("/")
    return owner or None, slot


def _by_name(tree: Mapping[str, Any], optimizer: GraphOptimizer) -> dict[str, Tensor]:
    """Returns the optimizer's variables by the names that they have in Keras' files."""
    tensors = tensors_of(tree, optimizer.variables, optimizer.name)
    by_key = dict(zip((key for key, _ in optimizer.variables), tensors, strict=True))
    listed = {}
    for slot, attribute in BASE_LISTS.items():
        node = optimizer.graph.child(optimizer.node, attribute)
        values = values_of(optimizer.graph, node) if node is not None else ()
        for (key, _), (_, path) in zip(values, optimizer.moved, strict=False):
            listed[key] = f"{path}/{slot}"
    names = {
        key: listed.get(key, name.removeprefix(f"{optimizer.name}/")) for key, name in optimizer.variables
    }
    return {names[key].replace("/", SEPARATOR): tensor for key, tensor in by_key.items()}


LAYOUT = StatekitGraph()
