"""Links of an HDF5 group: its members' names and addresses, in the order in which they were written.

The library lists members by name. Where they are described doesn't tell their order either: a later and smaller member
takes what a group that grew left free. But names are put into an old group's local heap one behind the other, as long
as none lies behind a free block, and new groups' links follow each other or are numbered.

Source: The HDF Group, HDF5 File Format Specification 3.0, III.B "Symbol Table Nodes", IV.A.2.c "The Link Info Message",
IV.A.2.g "The Link Message", IV.A.2.r "The Symbol Table Message".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from statekit.converters.formats.hdf5.headers import LINK, LINK_INFO, SYMBOL_TABLE, Header
from statekit.converters.formats.hdf5.heaps import local_heap, objects
from statekit.converters.formats.hdf5.structure import Fields, Structure, broken
from statekit.converters.formats.hdf5.trees import GROUP_NODES, old_tree
from statekit.errors import RefusedError

_LINK_RECORDS, _HASH_BYTES = 5, 4
_SOFT_CACHED = 2
_HARD = 0
_TRACKED, _INDEXED = 1, 2
_ORDERED, _TYPED, _ENCODED = 0x04, 0x08, 0x10


class Link(NamedTuple):
    """A member of a group.

    Attributes:
        name: Its name.
        address: Where it is described.
        order: Sorts it among its siblings: the place of its name, or its number; None where neither tells.
    """

    name: str
    address: int
    order: int | None


def links(file: Structure, header: Header, group: str) -> list[Link] | None:
    """Returns the members of a group, unsorted; None if the header is no group's.

    Raises:
        CorruptError: The group is broken, or has two members of one name.
        RefusedError: It links to something elsewhere.
    """
    table, info = header.fields(SYMBOL_TABLE), header.fields(LINK_INFO)
    if table is None and info is None:
        return None
    members = [*(_old(file, table, group) if table else _new(file, header, info, group))]
    if len({link.name for link in members}) < len(members):
        raise broken(header.place, "two members of one name")
    return members


def _old(file: Structure, table: Fields, group: str) -> Iterator[Link]:
    tree, heap = table.address(), table.address()
    names, free = local_heap(file, heap)
    offset, length = file.widths
    for _, address in old_tree(file, tree, GROUP_NODES, length):
        head = file.peek(address, 8)
        head.take(6)
        count = head.number(2)
        node = file.block(address, 8 + count * (2 * offset + 24), b"SNOD", "A table")
        node.take(4)
        for _ in range(count):
            place, member, cached = node.number(offset), node.address(), node.number(4)
            node.take(20)
            names.at = min(place, len(names.data))
            name = names.text()
            if cached == _SOFT_CACHED or member is None:
                raise _elsewhere(name, group, file)
            yield Link(_text(name), member, place if place < free else None)


def _new(file: Structure, header: Header, info: Fields | None, group: str) -> Iterator[Link]:
    for number, message in enumerate(header.all_of(LINK)):
        yield _link(file, message.fields, group, number)
    if info is None:
        return
    version, flags = info.number(1), info.number(1)
    if version:
        raise broken(info.place, f"links of version {version}")
    info.take(8 if flags & _TRACKED else 0)
    heap, index = info.address(), info.address()
    for fields in objects(file, heap, index, _LINK_RECORDS, _HASH_BYTES):
        yield _link(file, fields, group, None)


def _link(file: Structure, fields: Fields, group: str, number: int | None) -> Link:
    version, flags = fields.number(1), fields.number(1)
    kind = fields.number(1) if flags & _TYPED else _HARD
    order = fields.number(8) if flags & _ORDERED else number
    fields.take(1 if flags & _ENCODED else 0)
    name = fields.take(fields.number(1 << (flags & 3)))
    if version != 1 or not name:
        raise broken(fields.place, f"a link of version {version} named {name!r}")
    address = fields.address() if kind == _HARD else None
    if address is None:
        raise _elsewhere(name, group, file)
    return Link(_text(name), address, order)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _elsewhere(name: bytes, group: str, file: Structure) -> RefusedError:
    path = f"{group}/{_text(name)}".lstrip("/")
    return RefusedError(
        "An HDF5 file links to something elsewhere.",
        place=f"{path} in {file.place}",
        expected="values that lie where they are named",
        remedy="write it again with the library it came from",
    )
