"""Small files that ask for much: each is made when a test needs it, by a function that writes it into a folder.

`BOMBS` has them by name. A bomb returns the path that is opened. `verb` says how: `inspect` reads headers, `stats` all
values. `reads` is True for one that isn't refused, but has to be read within the budget all the same.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Make: TypeAlias = Callable[[Path], Path]


@dataclass(frozen=True)
class Bomb:
    """A file that asks for much.

    Attributes:
        make: Writes it into a folder; returns the path that is opened.
        verb: How it is opened.
        reads: Whether it is read rather than refused.
        quick: Whether it is among the sample that continuous integration opens.
    """

    make: Make
    verb: Literal["inspect", "stats"] = "inspect"
    reads: bool = False
    quick: bool = False


BOMBS: dict[str, Bomb] = {}


def bomb(
    name: str, verb: Literal["inspect", "stats"] = "inspect", *, reads: bool = False, quick: bool = False
) -> Callable[[Make], Make]:
    """Puts a bomb among the others under a name."""

    def put(make: Make) -> Make:
        assert name not in BOMBS
        BOMBS[name] = Bomb(make, verb, reads, quick)
        return make

    return put


# Pickles: of torch.save, of MXNet, of torch.distributed.checkpoint.


def torch_zip(path: Path, pickled: bytes) -> Path:
    """Writes a torch file of this pickle, stored."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (("data.pkl", pickled), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return path


def states(path: Path, pickled: bytes) -> Path:
    """Writes a file of MXNet's states: a pickle that names MXNet."""
    path.write_bytes(b"\x80\x04cmxnet\nA\n0" + pickled)
    return path


def number(value: int) -> bytes:
    """An integer of at most 64 bits."""
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def text(value: str) -> bytes:
    """A text of up to 2^32 bytes."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


@bomb("pickle: 24 M empty dicts in a list", quick=True)
def _dicts(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x02](" + b"}" * 24_000_000 + b"e.")


@bomb("pickle: 6 M memo entries", quick=True)
def _memo(folder: Path) -> Path:
    return torch_zip(folder / "a.pt", b"\x80\x04N" + b"\x94" * 6_000_000 + b".")


@bomb("pickle: 6 M memo entries in .states")
def _memo_states(folder: Path) -> Path:
    return states(folder / "a.states", b"N" + b"\x94" * 6_000_000 + b".")


@bomb("pickle: a tuple of 900 parts as a key 200 000 times", quick=True)
def _wide_key(folder: Path) -> Path:
    key = b"(" + b"K\x01" * 900 + b"tq\x000"
    return torch_zip(folder / "a.pt", b"\x80\x02" + key + b"}" + b"h\x00Ns" * 200_000 + b".")


def colliding(count: int) -> list[tuple[int, int]]:
    """Returns pairs of numbers that have one hash in CPython.

    Source: CPython Objects/tupleobject.c, `tuplehash`: xxHash of the parts' hashes, which are the numbers themselves.
    """
    mask, first, second, third = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(second, -1, 2**64)
    pairs: list[tuple[int, int]] = []
    left = 1
    while len(pairs) < count:
        left += 1
        lane = (third + left * second) & mask
        lane = ((lane << 31 | lane >> 33) & mask) * first & mask
        right = (12345 - lane) * inverse & mask
        right -= 2**64 if right >= 2**63 else 0
        if abs(right) < 2**61 - 2 and right != -1:
            pairs.append((left, right))
    return pairs


@bomb("pickle: 20 000 keys that collide", quick=True)
def _colliding(folder: Path) -> Path:
    pairs = colliding(20_000)
    keys = b"".join(number(left) + number(right) + b"\x86N" for left, right in pairs)
    return torch_zip(folder / "a.pt", b"\x80\x02}(" + keys + b"u.")


@bomb("pickle: a dict of 100 000 entries copied 100 000 times", quick=True)
def _copies(folder: Path) -> Path:
    entries = b"".join(text(str(i)) + b"N" for i in range(100_000))
    copy = b"h\x01h\x00\x85R0"
    pickled = b"}(" + entries + b"uq\x000ccollections\nOrderedDict\nq\x010" + copy * 100_000 + b"N."
    return torch_zip(folder / "a.pt", b"\x80\x02" + pickled)
