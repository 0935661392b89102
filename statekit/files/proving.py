"""Tensors that are proven while they are read: digested in the order of their bytes, and compared with the manifest.

Whoever uses values of a checkpoint reads them through `proving`. A tensor that is read from its first value to its
last, in blocks of any size, is digested meanwhile and not read twice; one that is read in another order, as a part of
it on each of several devices, is digested as a whole before its first value is given out. What isn't a tensor is proven
by the manifest's digest of the records, or, where that is missing or another, by those of whole files.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from statekit.budget import Budget
from statekit.errors import Faults
from statekit.files.checkpoint import Checkpoint, Finding, Proof
from statekit.files.checksums import of_tensor
from statekit.files.integrity import check_no_damage, prove_files, records_of, value_fault
from statekit.files.manifest import RECORDS
from statekit.tensors.digest import little_endian, tensor_digest
from statekit.tensors.tensor import Array, Index, Shape, Stored, Tensor, bytes_of
from statekit.tensors.tree import mapped


class ProvingReading:
    """What has been read of a tensor, and whether that is what its manifest says.

    Args:
        tensor: The tensor as its container reads it.
        name: Its native name.
        entry: Its entry in the manifest.
        blame: Gets what is wrong and where, and raises or notes it.
    """

    def __init__(
        self, tensor: Tensor, name: str, entry: Mapping[str, Any], blame: Callable[[str, str], object]
    ) -> None:
        self._tensor, self._name, self._entry, self._blame = tensor, name, entry, blame
        self._size = math.prod(tensor.shape)
        self._hasher, self._done = blake3(), 0
        self._fault: str | None = None
        self._lock = threading.Lock()

    def fetch(self, index: Index) -> Array:
        """Reads a block, and proves it with those before it, or by reading the whole tensor.

        Raises:
            CorruptError: The tensor isn't what its manifest says.
        """
        block = self._tensor.read(index)
        with self._lock:
            if self._fault is None:
                self._take(index, block)
            self._judge()
        return block

    def finish(self) -> None:
        """Proves a tensor that was read in part.

        Raises:
            CorruptError: It isn't what its manifest says.
        """
        with self._lock:
            if self._done and self._fault is None:
                self._compare(tensor_digest(self._tensor))
            self._judge()

    def _take(self, index: Index, block: Array) -> None:
        if _first(index, self._tensor.shape) != self._done:
            self._compare(tensor_digest(self._tensor))
            return
        self._hasher.update(little_endian(block))
        self._done += block.size
        if self._done == self._size:
            self._compare(self._hasher.hexdigest())

    def _compare(self, digest: str) -> None:
        self._fault = value_fault(self._tensor, self._entry, digest)

    def _judge(self) -> None:
        """Blames a tensor whenever it is read: nobody may go on with it after an error that was caught."""
        if self._fault:
            self._blame(self._fault, self._name)


def _first(index: Index, shape: Shape) -> int | None:
    """Returns which value a block begins with, counted in C order; None unless its values stand one after the other."""
    start, stride, is_run = 0, 1, True
    for cut, size in zip(reversed(index), reversed(shape), strict=True):
        count = cut.stop - cut.start
        if not is_run and count != 1:
            return None
        is_run = is_run and count == size
        start += cut.start * stride
        stride *= size
    return start


@dataclass(frozen=True)
class Proving:
    """A checkpoint whose values are proven while they are read.

    Attributes:
        checkpoint: The checkpoint, with tensors that prove themselves.
        damage: What contradicts the manifest and was accepted; grows while tensors are read.
    """

    checkpoint: Checkpoint
    damage: list[Finding]
    _readings: Sequence[ProvingReading] = ()

    def finish(self) -> None:
        """Proves the tensors that were read in part.

        Raises:
            CorruptError: One isn't what its manifest says.
        """
        for reading in self._readings:
            reading.finish()


def proving(checkpoint: Checkpoint, budget: Budget, *, accept: bool = False) -> Proving:
    """Returns an opened checkpoint that is proven as far as it is used: its records at once, its tensors when read.

    Args:
        checkpoint: The checkpoint.
        budget: The job's.
        accept: Whether damage is noted and not raised.

    Raises:
        CorruptError: It isn't what its manifest says.
    """
    damage: list[Finding] = []

    def blame(fault: str, place: str) -> None:
        if not accept:
            check_no_damage(Faults([(fault, place)]), checkpoint.path)
        finding = Finding(fault, place, True)
        if finding not in damage:
            damage.append(finding)

    proof = checkpoint.proof
    if proof is None:
        return Proving(checkpoint, damage)
    faults = Faults() if _are_proven_by_values(checkpoint, proof) else prove_files(checkpoint, budget)
    if not accept:
        check_no_damage(faults, checkpoint.path)
    damage += [Finding(fault, place, True) for fault, place in faults]
    readings: dict[Any, ProvingReading] = {}
    names = {id(tensor): name for name, tensor in checkpoint.tensors.items()}

    def watched(leaf: Any) -> Any:
        name = names.get(id(leaf))
        if name is None or name not in proof.tensors:
            return leaf
        entry = proof.tensors[name]  # tied tensors have one digest, or the manifest contradicts the tie
        key = bytes_of(leaf), entry["blake3"]
        reading = readings.setdefault(key, ProvingReading(leaf, name, entry, blame))
        if isinstance(leaf, Stored):
            return replace(leaf, fetch=reading.fetch)
        checksum = of_tensor(leaf)
        return Stored(
            leaf.shape, leaf.dtype, reading.fetch, name, f"{checkpoint.path}", leaf.grain, "", checksum
        )

    tree = mapped(checkpoint.tree, watched)
    return Proving(replace(checkpoint, tree=tree), damage, tuple(readings.values()))


def _are_proven_by_values(checkpoint: Checkpoint, proof: Proof) -> bool:
    """Tells whether the records are the manifest's, so that with the tensors all is proven that anybody uses."""
    stated = proof.manifest.get(RECORDS)
    is_named = proof.is_whole and checkpoint.tensors.keys() <= proof.tensors.keys()
    return is_named and stated is not None and records_of(checkpoint) == {RECORDS: stated}
