"""The object graph of TensorFlow 2's checkpoints: objects, their attributes, and the keys of variables.

A checkpoint of `tf.train.Checkpoint` has keys that end in `/.ATTRIBUTES/VARIABLE_VALUE`, and one graph: nodes with
named children, values and, of TensorFlow 1's optimizers, slots. Objects have no names of their own; a variable's is
kept as `full_name`. Here is what a graph means; how its bytes are made up is the file format's business.

Source: tensorflow/tensorflow, core/protobuf/trackable_object_graph.proto; python/checkpoint/util.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.tensors.tree import Record

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of the graph, in a checkpoint's tree as it is stored, in its `meta` as a record."""
CLASS = "tensorflow.TrackableObjectGraph"
"""Name of the record."""
VALUE = "VARIABLE_VALUE"
SUFFIX = f"/.ATTRIBUTES/{VALUE}"
SLOT = ".OPTIMIZER_SLOT"
SAVE_COUNTER = "save_counter"
METRICS = "/keras_api/"
"""In keys of a SavedModel, what Keras keeps of a model besides its variables: the metrics."""


@dataclass(frozen=True)
class Value:
    """What a node keeps in the checkpoint.

    Attributes:
        name: What it is of the node; `VARIABLE_VALUE` of a variable.
        full_name: The variable's name.
        key: Where it lies.
    """

    name: str
    full_name: str
    key: str


@dataclass(frozen=True)
class Slot:
    """A slot of an optimizer: numbers of the nodes of variable and slot, and the slot's name."""

    variable: int
    name: str
    node: int


@dataclass(frozen=True)
class Node:
    """One object: what it holds by name, its values, and an optimizer's slots."""

    children: Mapping[str, int] = field(default_factory=dict)
    values: tuple[Value, ...] = ()
    slots: tuple[Slot, ...] = ()

    @property
    def variable(self) -> Value | None:
        """The value of a variable."""
        return next((value for value in self.values if value.name == VALUE), None)


def _unescaped(name: str) -> str:
    """Returns a child's name as it stands in a key. Source: python/checkpoint/trackable_view.py."""
    return name if name == SLOT else name.replace(".S", "/").replace("..", ".")


@dataclass(frozen=True)
class Graph:
    """All objects; the first is the checkpoint itself."""

    nodes: tuple[Node, ...]
    _sorted: dict[int, list[int]] = field(default_factory=dict, repr=False, compare=False)

    def child(self, node: int, *names: str) -> int | None:
        """Returns the node that names lead to from a node; None if there is none."""
        for name in names:
            if name not in self.nodes[node].children:
                return None
            node = self.nodes[node].children[name]
        return node

    def items(self, node: int | None) -> Sequence[int]:
        """Returns what a list holds, in its order; sorted once, as any number of objects may hold one list."""
        if node is None:
            return ()
        if node not in self._sorted:
            children = self.nodes[node].children
            names = sorted((name for name in children if name.isdecimal()), key=int)
            self._sorted[node] = [children[name] for name in names]
        return self._sorted[node]

    def misplaced(self) -> Iterator[str]:
        """Yields the keys of variables that don't lead to their objects: each is a way through the graph.

        Two objects with one key, and a key that belongs to another object, are such.
        """
        slots = {(i, s.variable, s.name): s.node for i, node in enumerate(self.nodes) for s in node.slots}
        for i, node in enumerate(self.nodes):
            value = node.variable
            if value is None or not value.key.endswith(SUFFIX):
                continue
            names = [_unescaped(name) for name in value.key.removesuffix(SUFFIX).split("/")]
            end = self.child(0, *names)
            if SLOT in names:
                at = names.index(SLOT)
                ends = self.child(0, *names[:at]), self.child(0, *names[at + 1 : -1])
                end = None if None in ends else slots.get((ends[1] or 0, ends[0] or 0, names[-1]))
            if end != i:
                yield value.key

    def to_record(self) -> Record:
        """Returns the graph as plain data, as it stands in a tree or in a checkpoint's `meta`."""
        rows = [
            [
                dict(node.children),
                [[value.name, value.full_name, value.key] for value in node.values],
                [[slot.variable, slot.name, slot.node] for slot in node.slots],
            ]
            for node in self.nodes
        ]
        return Record(CLASS, (), rows)

    @classmethod
    def from_record(cls, record: Any) -> Graph | None:
        """Returns the graph of such plain data; None of anything else."""
        if not isinstance(record, Record) or record.name != CLASS:
            return None
        return cls(
            tuple(
                Node(
                    dict(children),
                    tuple(Value(*value) for value in values),
                    tuple(Slot(*slot) for slot in slots),
                )
                for children, values, slots in record.state
            )
        )


class Builder:
    """Makes a graph object by object."""

    def __init__(self) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._values: list[tuple[Value, ...]] = [()]
        self._slots: dict[int, list[Slot]] = {}

    def add(self, above: int, name: str, node: int | None = None, value: Value | None = None) -> int:
        """Puts a node below another node, a new one if `node` is None; returns its number."""
        if node is None:
            node = len(self._children)
            self._children.append({})
            self._values.append((value,) if value else ())
        self._children[above][name] = node
        return node

    def at(self, path: Sequence[str]) -> int:
        """Returns the object at a path from the checkpoint itself; makes what isn't there."""
        node = 0
        for name in path:
            node = self._children[node].get(name) or self.add(node, name)
        return node

    def slot(self, optimizer: int, slot: Slot) -> None:
        """Gives an optimizer a slot."""
        self._slots.setdefault(optimizer, []).append(slot)

    def variable(self, above: int, name: str, full_name: str, key: str) -> int:
        """Puts a variable below an object; returns its number."""
        return self.add(above, name, value=Value(VALUE, full_name, key + SUFFIX))

    def free(self, full_name: str, key: str) -> int:
        """Makes a variable that no object holds by a name; returns its number."""
        self._children.append({})
        self._values.append((Value(VALUE, full_name, key + SUFFIX),))
        return len(self._children) - 1

    def done(self) -> Graph:
        """Returns the graph."""
        nodes = zip(self._children, self._values, strict=True)
        return Graph(
            tuple(
                Node(dict(children), values, tuple(self._slots.get(i, ())))
                for i, (children, values) in enumerate(nodes)
            )
        )
