"""What a fuzzer knows of one reader, and what is done with what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

from fuzz.changing import changed_bytes
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import tensor_names, to_json

PLACE = "sample"
SMALL = 2**20
"""Bytes of a tensor that is read."""

Change: TypeAlias = Callable[[Any, Random], Any]


@dataclass(frozen=True)
class Reader:
    """One of our readers.

    Attributes:
        name: Its name.
        samples: Makes what it reads without complaint.
        read: Reads one, whole.
        changes: Ways to change a sample; one is drawn for each case.
    """

    name: str
    samples: Callable[[], Sequence[Any]]
    read: Callable[[Any], object]
    changes: Sequence[Change] = (changed_bytes,)

    def case(self, random: Random) -> Any:
        """Draws a changed sample."""
        return random.choice(self.changes)(random.choice(self.samples()), random)


def used(tree: Any) -> object:
    """Uses a tree as the program does: names its tensors, reads small ones, shows it as JSON."""
    for tensor in tensor_names(tree).values():
        used_tensor(tensor)
    return json.dumps(to_json(tree), allow_nan=False)


def used_tensor(tensor: Tensor) -> None:
    """Describes a tensor, and reads it if it is small."""
    json.dumps(tensor.to_json())
    if nbytes(tensor) <= SMALL:
        tensor.read()
