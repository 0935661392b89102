"""The layout `tf2-weights`: a model's variables in `tf.train.Checkpoint`, without an optimizer's.

    model/layers/0/.ATTRIBUTES/VARIABLE_VALUE

Input: what `tf.train.Checkpoint` or a SavedModel keeps of objects that no optimizer moved; output: a state of their
variables, by the names that the object graph keeps of them, or by their places where names don't tell them apart. An
optimizer that was made and never ran has no slots and no parameters yet: what it holds comes along.

Source: tensorflow/tensorflow, core/protobuf/trackable_object_graph.proto; python/checkpoint/checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Contents, Encoded, Evidence, dropped_from
from statekit.converters.layouts.tensorflow.names import OF_OPTIMIZERS
from statekit.converters.layouts.weights.lines import object_lines
from statekit.converters.layouts.weights.state import VARIANTS, not_weights, require_weights, weights_state
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH, METRICS, SAVE_COUNTER, SUFFIX, Builder, Graph, Node
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import Tree
from statekit.tensors.typed import Name, typed

HOME = "tf_objects"
"""Key in `extra`: the objects, where each parameter lies, and what is no parameter."""
_COUNTS = ({"_iterations"}, {"iter", "learning_rate"})
_MOVED, _KEPT = "_trainable_variables", "_variables"
"""What tells optimizers of Keras 3 and 2: where they count updates; the lists of what they move, and of what they keep.

Source: keras-team/keras, keras/src/optimizers/base_optimizer.py; tensorflow/tensorflow v2.15,
python/keras/optimizer_v2/optimizer_v2.py.
"""
_UNNAMED = re.compile(r"(.*/)?Variable(_\d+)?")
"""What TensorFlow calls a variable that nobody named."""


class Objects(TypedDict):
    """How a checkpoint keeps its variables."""

    objects: Tree
    keys: dict[Name, Name]
    others: dict[Name, Tree]


@dataclass(frozen=True)
class ObjectWeights:
    """Variables of objects."""

    name: str = "tf2-weights"
    title: str = "weights: a model's variables in tf.train.Checkpoint"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    containers: tuple[str, ...] = ("tf-bundle",)

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for variables in the object graph, and that no optimizer moves any."""
        keys = _keys(checkpoint)
        return Evidence(5, "variables of objects, and no optimizer that ran") if keys else None

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Says what the objects of a checkpoint hold whose optimizer statekit does not decode."""
        tree, graph = checkpoint.tree, Graph.from_record(checkpoint.meta.get(GRAPH))
        if checkpoint.container != "tf-bundle" or graph is None or not isinstance(tree, Mapping):
            return None
        optimizers = [i for i, node in enumerate(graph.nodes) if _is_optimizer(node) or node.slots]
        keys = _named(tree, graph, _of_optimizers(graph, optimizers)) if optimizers else {}
        if not keys:
            return None
        used = {*keys.values()}
        others = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in used}
        kinds = " and ".join(_kind(graph, i) for i in optimizers)
        return Contents(
            f"objects of TensorFlow, with {kinds}",
            {path: tree[key] for path, key in keys.items()},
            {},
            others,
        )

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        keys = _keys(checkpoint)
        if not keys:
            raise not_weights(checkpoint)
        tree = checkpoint.tree
        taken = {*keys.values(), GRAPH}
        others = {key: value for key, value in tree.items() if key not in taken}
        home = {"objects": tree[GRAPH], "keys": keys, "others": others}
        params = {path: tree[key] for path, key in keys.items()}
        return weights_state(params, {HOME: home}, replace(checkpoint, step=_step(checkpoint)), hints)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree of keys: with the objects that it had, else with new ones by the paths of the parameters."""
        require_weights(state, self.name)
        dropped = dropped_from(state.extra, (HOME,), "tf.train.Checkpoint")
        if HOME in state.extra:
            home = typed(state.extra[HOME], Objects, f"extra/{HOME}", "These are no objects of variables")
            if home["keys"].keys() == state.params.keys():
                tree = {home["keys"][path]: tensor for path, tensor in state.params.items()}
                return Encoded(
                    {**tree, **home["others"], GRAPH: home["objects"]}, state.counts.updates, dropped=dropped
                )
            dropped[f"extra/{HOME}"] = "the objects are new ones"
        return Encoded(_new(state.params), state.counts.updates, dropped=dropped)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return object_lines(saved)


def _keys(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the key of each variable by its path; none if there are no objects, or an optimizer moves some."""
    tree, graph = checkpoint.tree, Graph.from_record(checkpoint.meta.get(GRAPH))
    if checkpoint.container != "tf-bundle" or graph is None or not isinstance(tree, Mapping):
        return {}
    if GRAPH not in tree or any(node.slots or _has_moved(graph, i) for i, node in enumerate(graph.nodes)):
        return {}
    idle = {child for node in graph.nodes if _is_optimizer(node) for child in node.children.values()}
    keys = _named(tree, graph, idle)
    if any(map(OF_OPTIMIZERS.search, (*keys, *(key.removesuffix(SUFFIX) for key in keys.values())))):
        return {}
    return keys


def _kind(graph: Graph, node: int) -> str:
    """Returns what an optimizer calls itself in the name of its count or of a slot, and what it keeps."""
    counts = (graph.child(node, name) for name in ("_iterations", "iter"))
    names = [value.full_name for i in counts if i is not None and (value := graph.nodes[i].variable)]
    slots = [value.full_name for i in _slots(graph, node) if (value := graph.nodes[i].variable)]
    above = names[0].rpartition("/")[0] if names else ""
    above = above or (slots[0].partition("/")[0] if slots else "")
    kept = {*graph.nodes[node].children, *(slot.name for slot in graph.nodes[node].slots)}
    return f"the optimizer {above}" if above else f"an optimizer that keeps {', '.join(sorted(kept))}"


def _of_optimizers(graph: Graph, optimizers: Sequence[int]) -> set[int]:
    """Returns all that optimizers hold, but for the parameters that they move."""
    inside = {slot.node for i in optimizers for slot in graph.nodes[i].slots}
    waiting = [child for i in optimizers for name, child in graph.nodes[i].children.items() if name != _MOVED]
    while waiting:
        node = waiting.pop()
        if node not in inside:
            inside.add(node)
            waiting += graph.nodes[node].children.values()
    lists = {graph.nodes[i].children.get(_MOVED) for i in optimizers}
    moved = {item for number in lists for item in graph.items(number)}
    return inside - moved


def _named(tree: Mapping[str, Any], graph: Graph, without: Collection[int]) -> dict[str, str]:
    """Returns the key of each variable by its path, but for some nodes."""
    values = [(i, node.variable) for i, node in enumerate(graph.nodes)]
    kept = {
        value.key: value.full_name
        for i, value in values
        if value is not None
        and i not in without
        and METRICS not in f"/{value.key}"
        and isinstance(tree.get(value.key), Tensor)
        and tree[value.key].dtype.kind in "fV"
    }
    names = [*kept.values()]
    if len({*names}) < len(names) or not all(names) or any(map(_UNNAMED.fullmatch, names)):
        names = [key.removesuffix(SUFFIX) for key in kept]
    return dict(zip(names, kept, strict=True))


def _is_optimizer(node: Node) -> bool:
    return any(names <= node.children.keys() for names in _COUNTS)


def _has_moved(graph: Graph, node: int) -> bool:
    """Tells whether an object is an optimizer that knows of parameters, or keeps more than its count and its rate."""
    moved = graph.items(graph.nodes[node].children.get(_MOVED))
    return _is_optimizer(graph.nodes[node]) and bool(moved or _slots(graph, node))


def _slots(graph: Graph, node: int) -> list[int]:
    """Returns what an optimizer lists beside its count and its rate; Keras 2 lists slots, and not what they are of."""
    children = graph.nodes[node].children
    alone = {children.get(name) for name in ("_iterations", "_learning_rate")}
    return [item for item in graph.items(children.get(_KEPT)) if item not in alone]


def _step(checkpoint: Checkpoint) -> int | None:
    """Returns the number at the end of the name, unless it only counts saves.

    Source: tensorflow/tensorflow, python/checkpoint/checkpoint.py, `Checkpoint.save`.
    """
    saves = checkpoint.tree.get(f"{SAVE_COUNTER}{SUFFIX}")
    is_count = isinstance(saves, Tensor) and saves.shape == () and saves.dtype.kind in "iu"
    return None if is_count and int(saves.read()) == checkpoint.step else checkpoint.step


def _new(params: Mapping[str, Tensor]) -> dict[str, Any]:
    builder, tree = Builder(), dict[str, Any]()
    for path, tensor in params.items():
        *above, last = path.split("/")
        builder.variable(builder.at(("model", *above)), last, path, f"model/{path}")
        tree[f"model/{path}{SUFFIX}"] = tensor
    builder.variable(0, SAVE_COUNTER, SAVE_COUNTER, SAVE_COUNTER)
    tree[f"{SAVE_COUNTER}{SUFFIX}"] = in_memory(np.asarray(1, np.int64), SAVE_COUNTER)
    return {**tree, GRAPH: builder.done().to_record()}


LAYOUT = ObjectWeights()
