"""Trees of HDF5: the records of a tree of version 1 or 2, node by node, each once.

Source: The HDF Group, HDF5 File Format Specification 3.0, III.A.1 "Version 1 B-trees", III.A.2 "Version 2 B-trees".
"""

from __future__ import annotations

from collections.abc import Iterator

from statekit.converters.formats.hdf5.structure import Fields, Structure, broken

GROUP_NODES, CHUNK_NODES = 0, 1
"""Kinds of trees of version 1."""
_LEVELS = 32
"""Most levels of a tree: more than any file of 64 bits has."""
_HEAD, _CHECKSUM = 6, 4


def old_tree(file: Structure, address: int | None, kind: int, key: int) -> Iterator[tuple[Fields, int]]:
    """Yields the key and the address of each child of the lowest nodes of a tree of version 1.

    Args:
        file: The file.
        address: The root.
        kind: GROUP_NODES or CHUNK_NODES.
        key: Bytes of a key.

    Raises:
        CorruptError: The tree is broken.
    """
    head = 8 + 2 * file.widths[0]
    todo: list[tuple[int | None, int | None]] = [(address, None)]
    while todo:
        at, expected = todo.pop()
        start = file.peek(at, head)
        start.take(6)
        count = start.number(2)
        size = head + key + count * (key + file.widths[0])
        node = file.block(at, size, b"TREE", "A tree")
        this, level = node.number(1), node.number(1)
        node.take(head - 6)
        if this != kind or level > _LEVELS or expected not in (None, level):
            raise broken(node.place, f"a node of kind {this} at level {level}")
        children = [(node.part(key), node.address()) for _ in range(count)]
        if level or kind == GROUP_NODES:  # else they are values
            file.bring(child for _, child in children)
        for fields, child in children:
            if level:
                continue
            if child is None:
                raise broken(node.place, "a child that is nowhere")
            yield fields, child
        todo += [(child, level - 1) for _, child in reversed(children)] if level else []


def tree(file: Structure, address: int | None, kind: int) -> Iterator[Fields]:
    """Yields the records of a tree of version 2; those of an upper node come before those below it.

    Args:
        file: The file.
        address: The tree's header.
        kind: Number of the records' type.

    Raises:
        CorruptError: The tree is broken.
    """
    offset, length = file.widths
    head = file.summed(address, 22 + offset + length, b"BTHD", "A tree")
    version, this, size, record, depth = (head.number(n) for n in (1, 1, 4, 2, 2))
    head.take(2)
    root, count = head.address(), head.number(2)
    total = head.length()
    if (version, this) != (0, kind) or not record or depth > _LEVELS or size < _HEAD + _CHECKSUM + record:
        raise broken(head.place, f"a tree of kind {this}, version {version}, depth {depth}")
    if root is None:
        return
    widths = _pointer_widths(size, record, depth, offset)
    todo, seen = [(root, count, depth)], 0
    while todo:
        at, records, level = todo.pop()
        pointers = (records + 1) * sum(widths[level]) if level else 0
        used = _HEAD + records * record + pointers + _CHECKSUM
        node = file.summed(at, used, b"BTIN" if level else b"BTLF", "A tree")
        if (node.number(1), node.number(1)) != (0, kind):
            raise broken(node.place, "a node of another tree")
        seen += records
        for _ in range(records):
            yield node.part(record)
        todo += _children(node, records, level, widths)
    if seen != total:
        raise broken(head.place, f"a tree of {total} records with {seen}")


def _children(
    node: Fields, records: int, level: int, widths: list[tuple[int, int, int]]
) -> list[tuple[int, int, int]]:
    """Returns the address, the number of records and the level of each child of a node; none of a lowest node."""
    children: list[tuple[int, int, int]] = []
    for _ in range(records + 1 if level else 0):
        _, narrow, wide = widths[level]
        child, below = node.address(), node.number(narrow)
        node.number(wide)
        if child is None:
            raise broken(node.place, "a child that is nowhere")
        children.append((child, below, level - 1))
    return children


def _pointer_widths(size: int, record: int, depth: int, offset: int) -> list[tuple[int, int, int]]:
    """Returns, by level, the bytes of a child's address, of the number of its records, and of those below it."""
    most = (size - _HEAD - _CHECKSUM) // record
    narrow = _bytes_for(most)
    below, wide = most, 0
    widths = [(0, 0, 0)]
    for _ in range(depth):
        pointer = offset + narrow + wide
        here = max(0, size - _HEAD - _CHECKSUM - pointer) // (record + pointer)
        widths.append((offset, narrow, wide))
        below = (here + 1) * below + here
        wide = _bytes_for(below)
    return widths


def _bytes_for(number: int) -> int:
    """Returns how many bytes a number up to this one takes."""
    return max(1, (number.bit_length() + 7) // 8)
