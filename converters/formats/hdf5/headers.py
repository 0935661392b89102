"""Object headers of HDF5: the messages that describe a group or a data set, in either version.

Source: The HDF Group, HDF5 File Format Specification 3.0, IV.A.1 "Data Object Header Prefix" and IV.A.2.q "The Object
Header Continuation Message".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from statekit.converters.formats.hdf5.structure import Fields, Structure, broken

DATASPACE, LINK_INFO, DATATYPE, LINK, EXTERNAL_FILES, LAYOUT = 0x01, 0x02, 0x03, 0x06, 0x07, 0x08
FILTERS, ATTRIBUTE, CONTINUATION, SYMBOL_TABLE, ATTRIBUTE_INFO = 0x0B, 0x0C, 0x10, 0x11, 0x15
"""Numbers of messages."""
SHARED = 0x02
"""Flag of a message that lies elsewhere."""
_VERSION_1_BYTES, _OLD_HEAD, _CHECKSUM = 16, 8, 4
_TIMES, _PHASES, _ORDERED = 0x20, 0x10, 0x04


class Message(NamedTuple):
    """A message: its number, its flags, and what it says."""

    kind: int
    flags: int
    fields: Fields


@dataclass(frozen=True)
class Header:
    """What is described at an address."""

    address: int
    place: str
    messages: tuple[Message, ...]

    def all_of(self, kind: int) -> list[Message]:
        """Returns the messages of a kind."""
        return [message for message in self.messages if message.kind == kind]

    def fields(self, kind: int) -> Fields | None:
        """Returns what the one message of a kind says; None if there is none.

        Raises:
            CorruptError: There are several, or it lies elsewhere.
        """
        messages = self.all_of(kind)
        if not messages:
            return None
        if len(messages) > 1 or messages[0].flags & SHARED:
            raise broken(self.place, f"message {kind} " + ("twice" if len(messages) > 1 else "elsewhere"))
        return messages[0].fields


def read_header(file: Structure, address: int) -> Header:
    """Reads the header at an address, with all blocks in which it goes on.

    Raises:
        CorruptError: It is broken.
    """
    start = file.peek(address, 4)
    blocks = _version_2(file, address) if start.data == b"OHDR" else _version_1(file, address)
    return Header(address, start.place, tuple(blocks))


def _version_1(file: Structure, address: int) -> Iterator[Message]:
    head = file.peek(address, _VERSION_1_BYTES)
    version = head.number(2)
    head.take(6)
    size = head.number(4)
    if version != 1:
        raise broken(head.place, "no header of a group or data set")
    first = file.block(address, _VERSION_1_BYTES + size, b"", "A header")
    first.take(_VERSION_1_BYTES)
    blocks = [first]
    for block in blocks:  # grows while the header goes on elsewhere
        while block.left >= _OLD_HEAD:
            kind, length, flags = block.number(2), block.number(2), block.number(1)
            block.take(3)
            message = Message(kind, flags, block.part(length))
            if kind == CONTINUATION:
                where, count = message.fields.address(), message.fields.length()
                blocks.append(file.block(where, count, b"", "A header"))
            else:
                yield message


def _version_2(file: Structure, address: int) -> Iterator[Message]:
    head = file.peek(address, 6)
    head.take(4)
    version, flags = head.number(1), head.number(1)
    if version != 2:
        raise broken(head.place, f"a header of version {version}")
    before = 6 + (16 if flags & _TIMES else 0) + (4 if flags & _PHASES else 0)
    width = 1 << (flags & 3)
    whole = file.peek(address, before + width)
    whole.take(before)
    size = before + width + whole.number(width) + _CHECKSUM
    first = file.summed(address, size, b"OHDR", "A header")
    first.at = before + width
    blocks = [first]
    least = 6 if flags & _ORDERED else 4
    for block in blocks:  # grows while the header goes on elsewhere
        while block.left >= least:
            kind, length, marks = block.number(1), block.number(2), block.number(1)
            block.take(least - 4)
            message = Message(kind, marks, block.part(length))
            if kind == CONTINUATION:
                where, count = message.fields.address(), message.fields.length()
                blocks.append(file.summed(where, count, b"OCHK", "A header"))
            else:
                yield message
