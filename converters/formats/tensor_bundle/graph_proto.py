"""The bytes of the object graph in TensorFlow 2's checkpoints: one string of the bundle, a protocol buffer.

Source: tensorflow/tensorflow, core/protobuf/trackable_object_graph.proto.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from statekit.budget import Account
from statekit.converters.formats.tensor_bundle.entries import field_of, fields_of
from statekit.errors import FormatError
from statekit.tensors.object_graph import Graph, Node, Slot, Value

_NODES = 6
"""Values of a tree that an object counts for, or what it holds by name."""


def parse_graph(data: Any, place: object, account: Account | None = None) -> Graph:
    """Reads a graph.

    Args:
        data: Its bytes.
        place: Where they lie.
        account: What it draws on; one of its own if None.

    Raises:
        FormatError: It breaks the format, or speaks of nodes that there aren't.
        BudgetError: It has more of them than the job may hold.
    """
    taken = account or Account()
    nodes = [_node(body, place, taken) for number, body in fields_of(data, place) if number == 1]
    numbers = range(len(nodes))
    ends = (
        number
        for node in nodes
        for number in (*node.children.values(), *(n for s in node.slots for n in (s.variable, s.node)))
    )
    if not nodes or any(end not in numbers for end in ends):
        raise FormatError(
            "An object graph speaks of objects that there aren't.", place=place, found=len(nodes)
        )
    return Graph(tuple(nodes))


def _node(data: Any, place: object, account: Account) -> Node:
    account.nodes(_NODES, "An object graph", f"{place}")
    children: dict[str, int] = {}
    values, slots = [], []
    for number, body in fields_of(data, place):
        if number not in (1, 2, 3):
            continue
        account.nodes(_NODES, "An object graph", f"{place}")
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
        raise FormatError("An object graph holds an invalid name.", place=place) from None


def _whole(value: Any, place: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int):
        raise FormatError("An object graph holds an invalid number.", place=place)
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
    full: set[int] = set()
    left = [i for i, node in enumerate(nodes) if node.values]
    while left:
        node_id = left.pop()
        if node_id not in full:
            full.add(node_id)
            left += above.get(node_id, [])
    return full


def _string(number: int, text: str) -> bytes:
    return field_of(number, text.encode("utf-8")) if text else b""
