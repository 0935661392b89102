"""The object graph of TensorFlow 2's checkpoints: which variable is what of which object, and under which key it lies.

A checkpoint of `tf.train.Checkpoint` is a bundle whose keys end in `/.ATTRIBUTES/VARIABLE_VALUE`, beside one string,
the graph: nodes with named children, values and, of TensorFlow 1's optimizers, slots. Objects have no names of their
own; a variable's is kept as `full_name`.

Source: tensorflow/tensorflow, core/protobuf/trackable_object_graph.proto; python/checkpoint/util.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from statekit.converters.formats.tensor_bundle.entries import field_of, fields_of
from statekit.errors import FormatError
from statekit.tensors.tree import MAX_NODES

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
"""Key of the graph."""
VALUE = "VARIABLE_VALUE"
SUFFIX = f"/.ATTRIBUTES/{VALUE}"
SLOT = ".OPTIMIZER_SLOT"
SAVE_COUNTER = "save_counter"


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


@dataclass(frozen=True)
class Graph:
    """All objects; the first is the checkpoint itself."""

    nodes: tuple[Node, ...]

    def child(self, node: int, *names: str) -> int | None:
        """Returns the node that names lead to from a node; None if there is none."""
        for name in names:
            if name not in self.nodes[node].children:
                return None
            node = self.nodes[node].children[name]
        return node

    def items(self, node: int | None) -> list[int]:
        """Returns what a list holds, in its order."""
        if node is None:
            return []
        children = self.nodes[node].children
        return [children[name] for name in sorted((n for n in children if n.isdecimal()), key=int)]


def parse_graph(data: Any, place: object) -> Graph:
    """Reads a graph.

    Raises:
        FormatError: It breaks the format, or speaks of nodes that there aren't.
    """
    nodes = [_node(body, place) for number, body in fields_of(data, place) if number == 1]
    known = range(len(nodes))
    ends = (
        number
        for node in nodes
        for number in (*node.children.values(), *(n for s in node.slots for n in (s.variable, s.node)))
    )
    if not nodes or len(nodes) > MAX_NODES or any(end not in known for end in ends):
        raise FormatError(
            "An object graph speaks of objects that there aren't.", place=place, found=len(nodes)
        )
    return Graph(tuple(nodes))


def _node(data: Any, place: object) -> Node:
    children: dict[str, int] = {}
    values, slots = [], []
    for number, body in fields_of(data, place):
        if number not in (1, 2, 3):
            continue
        parts = dict(fields_of(body, place))
        if number == 1:
            children[_text(parts.get(2), place)] = _whole(parts.get(1), place)
        elif number == 2:
            values.append(Value(*(_text(parts.get(i), place) for i in (1, 2, 3))))
        else:
            ends = _whole(parts.get(1), place), _whole(parts.get(3), place)
            slots.append(Slot(ends[0], _text(parts.get(2), place), ends[1]))
    return Node(children, tuple(values), tuple(slots))


def _text(value: Any, place: object) -> str:
    try:
        return b"".join([value or b""]).decode("utf-8")
    except (TypeError, UnicodeDecodeError):
        raise FormatError("An object graph holds a name that isn't one.", place=place) from None


def _whole(value: Any, place: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int):
        raise FormatError("An object graph holds a number that isn't one.", place=place)
    return value


def graph_bytes(nodes: Sequence[Node]) -> bytes:
    """Returns a graph as it is stored."""
    full = _full(nodes)
    return b"".join(field_of(1, _node_bytes(node, i in full)) for i, node in enumerate(nodes))


def _node_bytes(node: Node, full: bool) -> bytes:
    parts = [field_of(1, field_of(1, to) + _string(2, name)) for name, to in node.children.items()]
    parts += [
        field_of(2, _string(1, v.name) + _string(2, v.full_name) + _string(3, v.key)) for v in node.values
    ]
    parts += [
        field_of(3, field_of(1, s.variable) + _string(2, s.name) + field_of(3, s.node)) for s in node.slots
    ]
    return b"".join([*parts, field_of(5, field_of(1, int(full)))])


def _full(nodes: Sequence[Node]) -> set[int]:
    """Returns the nodes that hold values, or lead to some."""
    above: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for child in node.children.values():
            above.setdefault(child, []).append(i)
    found: set[int] = set()
    left = [i for i, node in enumerate(nodes) if node.values]
    while left:
        node_id = left.pop()
        if node_id not in found:
            found.add(node_id)
            left += above.get(node_id, [])
    return found


def _string(number: int, text: str) -> bytes:
    return field_of(number, text.encode("utf-8")) if text else b""


class Builder:
    """Makes a graph object by object."""

    def __init__(self) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._values: list[tuple[Value, ...]] = [()]
        self._slots: dict[int, list[Slot]] = {}

    def add(self, above: int, name: str, node: int | None = None, value: Value | None = None) -> int:
        """Puts a node below another one: a new one unless it is there already; returns its number."""
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

    def done(self) -> bytes:
        """Returns the graph as it is stored."""
        return graph_bytes(
            [
                Node(children, values, tuple(self._slots.get(i, ())))
                for i, (children, values) in enumerate(zip(self._children, self._values, strict=True))
            ]
        )
