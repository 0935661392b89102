"""TensorFlow 1's optimizers in `tf.train.Checkpoint`: layouts `tf2-t2t` and `tf2-adam`.

    model/net/w/.ATTRIBUTES/VARIABLE_VALUE
    model/net/w/.OPTIMIZER_SLOT/optimizer/vr/.ATTRIBUTES/VARIABLE_VALUE

The object graph keeps the name that each variable has in a checkpoint by names, so these checkpoints are read and
written as those are, under other keys. No optimizer of TensorFlow 1 keeps a step: it is what its user saved beside it,
named `global_step`.

Source: tensorflow/tensorflow, python/checkpoint/checkpoint.py; python/training/optimizer.py, `Optimizer._create_slots`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.tensorflow.layout import TensorFlow1
from statekit.converters.layouts.tensorflow.lines import object_lines
from statekit.converters.layouts.tensorflow.names import GLOBAL_STEP
from statekit.converters.layouts.tensorflow.powers import POWERS
from statekit.errors import InexactError, StateError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import TrainState
from statekit.tensors.object_graph import GRAPH, SAVE_COUNTER, SLOT, SUFFIX, Builder, Graph, Slot
from statekit.tensors.tensor import Tensor, in_memory

HOME = "tf1_graph"
"""Key in `extra` of the objects of such a checkpoint."""


@dataclass(frozen=True)
class TF1Graph:
    """One optimizer's layout.

    Attributes:
        inner: That of checkpoints by names.
        name: The name for `--layout`.
        slots: Canonical slot -> the optimizer's own name for it.
    """

    inner: TensorFlow1
    name: str
    slots: Mapping[str, str]
    containers: tuple[str, ...] = ("tf-bundle",)
    schedule_in: str = "global_step"

    @property
    def title(self) -> str:
        return f"{self.inner.title}, in tf.train.Checkpoint"

    @property
    def keeps_encoding(self) -> bool:
        """Whether checkpoints by names may store variables encoded."""
        return self.inner.keeps_encoding

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        """Those of checkpoints by names."""
        return self.inner.variants

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for slots in the object graph, and at their variables' names."""
        keys = _keys(checkpoint)
        if keys is None or self.inner.detect(replace(checkpoint, tree=_by_name(checkpoint, keys))) is None:
            return None
        slot = next((key for key in keys.values() if SLOT in key), None)
        return Evidence(30, f"an object graph with {slot}") if slot else None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state, as the layout of checkpoints by names does."""
        keys = _keys(checkpoint)
        if keys is None:
            raise StateError("The checkpoint has no object graph.", place=checkpoint.path, expected=GRAPH)
        state = self.inner.decode(replace(checkpoint, tree=_by_name(checkpoint, keys)), hints)
        taken = {*keys.values(), GRAPH}
        others = {key: value for key, value in checkpoint.tree.items() if key not in taken}
        home = {"objects": checkpoint.tree[GRAPH], "keys": keys, "others": others}
        return replace(state, extra={**state.extra, HOME: home})

    def examine(self, checkpoint: Checkpoint, state: TrainState) -> Iterator[Finding]:
        """Yields what the layout of TensorFlow 1 does."""
        return self.inner.examine(checkpoint, state)

    def encode(self, state: TrainState) -> Encoded:
        home = state.extra.get(HOME)
        home = home if isinstance(home, Mapping) and home.keys() >= {"keys", "objects", "others"} else None
        inner = self.inner.encode(
            replace(state, extra={key: part for key, part in state.extra.items() if key != HOME})
        )
        if home is not None and {*home["keys"]} == {*inner.tree}:
            tree = {home["keys"][name]: value for name, value in inner.tree.items()}
            return replace(inner, tree={**tree, **home["others"], GRAPH: home["objects"]})
        dropped = dict(inner.dropped)
        if HOME in state.extra:
            dropped[f"extra/{HOME}"] = "the objects are new ones"
        return replace(inner, tree=self._new(state, inner.tree), dropped=dropped)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return object_lines(saved)

    def _new(self, state: TrainState, named: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a tree with objects by the paths of the parameters."""
        parted = sorted(name for name, value in named.items() if isinstance(value, Mapping))
        if parted:
            raise InexactError("An object graph holds no partitioned variables.", found=", ".join(parted[:5]))
        builder, tree = Builder(), dict[str, Any]()
        scope = self.inner.scope(state)
        optimizer = builder.at(("optimizer",))
        done: set[str] = set()
        for path in state.params:
            parts = path.split("/")
            node = builder.variable(builder.at(("model", *parts[:-1])), parts[-1], path, f"model/{path}")
            tree[f"model/{path}{SUFFIX}"] = named[path]
            done.add(path)
            place = 0
            for slot in self.inner.native:
                if slot not in state.slots.get(path, {}):
                    continue
                full = f"{scope}{path}{self.inner.suffix}{self.inner.native[slot] or (f'_{place}' if place else '')}"
                place += 1
                key = f"model/{path}/{SLOT}/optimizer/{self.slots[slot]}"
                builder.slot(optimizer, Slot(node, self.slots[slot], builder.free(full, key)))
                tree[key + SUFFIX] = named[full]
                done.add(full)
        for name, value in named.items():
            if name not in done and isinstance(value, Tensor):
                *above, child = _place(name)
                key = "/".join((*above, child))
                builder.variable(builder.at(above), child, name, key)
                tree[key + SUFFIX] = value
        builder.variable(0, SAVE_COUNTER, SAVE_COUNTER, SAVE_COUNTER)
        tree[SAVE_COUNTER + SUFFIX] = in_memory(np.asarray(1, np.int64), SAVE_COUNTER)
        return {**tree, GRAPH: builder.done().to_record()}


def _place(name: str) -> tuple[str, ...]:
    """Returns where a variable that is no parameter and no slot stands among the objects."""
    last = name.rpartition("/")[2]
    if last in POWERS:
        return "optimizer", last
    return ("step" if name == GLOBAL_STEP else name.replace("/", ".S"),)


def _keys(checkpoint: Checkpoint) -> dict[str, str] | None:
    """Returns the key of each variable by its name; None if the checkpoint has no graph with slots."""
    tree = checkpoint.tree
    graph = Graph.from_record(checkpoint.meta.get(GRAPH))
    if graph is None or not isinstance(tree, Mapping) or GRAPH not in tree:
        return None
    if not any(node.slots for node in graph.nodes):
        return None
    values = (node.variable for node in graph.nodes)
    named = [(v.full_name, v.key) for v in values if v is not None and v.full_name != SAVE_COUNTER]
    keys = dict(named)
    if len(keys) != len(named) or any(key not in tree for key in keys.values()):
        raise StateError(
            "The object graph speaks of values that there aren't, or of several with one name.",
            place=checkpoint.path,
            found=next((key for key in keys.values() if key not in tree), "one name twice"),
        )
    return keys


def _by_name(checkpoint: Checkpoint, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: checkpoint.tree[key] for name, key in keys.items()}
