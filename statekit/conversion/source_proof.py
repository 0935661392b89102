"""The proof of a conversion's source: the digests of its tensors, and what contradicts its manifest.

Most tensors are digested while they are written; the others are read by themselves. Together they are the digest of
the source, which the target's manifest keeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from statekit.errors import Faults
from statekit.files.checkpoint import Checkpoint
from statekit.files.homes import Entries
from statekit.files.integrity import value_fault
from statekit.files.manifest import tensor_entry
from statekit.files.stage import OnProgress, Progress
from statekit.files.tree import below
from statekit.tensors.digest import json_digest, tensor_digests
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Tree, tensor_names


def damage_at_opening(checkpoint: Checkpoint) -> Faults:
    """Returns the damage that the reading of a checkpoint's structure showed."""
    return Faults((finding.what, finding.place) for finding in checkpoint.findings if finding.damage)


def taken(checkpoint: Checkpoint, damage: Faults, changed: Faults) -> dict[str, Any]:
    """Returns the manifest's field for a damaged source that was accepted: what contradicted its manifest, and where.

    Files are named as in the source's folder: a manifest says nothing of this machine.
    """
    folder = checkpoint.path.parent if checkpoint.proof is None else checkpoint.proof.place.parent
    named = [
        (what, below(place, folder) if os.path.isabs(place) or "://" in place else place)
        for what, place in damage
    ]
    lines = [f"{what} @ {place}" for what, place in (*named, *changed)]
    return {"damage": lines} if lines else {}


def passed_through(checkpoint: Checkpoint, tree: Tree) -> dict[str, str]:
    """Returns name in the target -> name in the source, for tensors that are written as they are."""
    sources = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {name: sources[id(tensor)] for name, tensor in tensor_names(tree).items() if id(tensor) in sources}


def rest_of(checkpoint: Checkpoint, passed: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns the tensors of the source that aren't written as they are; the others are digested meanwhile."""
    streamed = set(passed.values())
    return {name: tensor for name, tensor in checkpoint.tensors.items() if name not in streamed}


def digests_of(rest: Mapping[str, Tensor], tell: OnProgress) -> dict[str, str]:
    """Reads tensors of the source by themselves, and returns their digests."""
    total, done = sum(map(nbytes, rest.values())), 0

    def count(name: str, size: int) -> None:
        nonlocal done
        done += size
        tell(Progress("check", name, done, total))

    return dict(tensor_digests(rest, count))


def source_digests(rest: Mapping[str, str], passed: Mapping[str, str], streamed: Entries) -> dict[str, str]:
    """Joins the digests of the tensors read by themselves with those of the tensors streamed so far."""
    return {**rest, **{passed[name]: entry["blake3"] for name, entry in streamed.items() if name in passed}}


def stated(checkpoint: Checkpoint) -> Entries:
    """Returns what the source's manifest says of its tensors; not of those whose shape or dtype is another."""
    entries = checkpoint.proof.tensors if checkpoint.proof else {}
    named = ((name, entries[name], tensor) for name, tensor in checkpoint.tensors.items() if name in entries)
    return {name: entry for name, entry, tensor in named if entry == tensor_entry(tensor, entry["blake3"])}


def changed(checkpoint: Checkpoint, digests: Mapping[str, str]) -> Faults:
    """Compares digests with those of the source's manifest."""
    entries = checkpoint.proof.tensors if checkpoint.proof else {}
    faults = (
        (value_fault(checkpoint.tensors[name], entries.get(name), digest), name)
        for name, digest in digests.items()
    )
    return Faults((what, name) for what, name in faults if what)


def content_digest(checkpoint: Checkpoint, digests: Mapping[str, str]) -> str | None:
    """Returns the digest of a checkpoint's content: of names, shapes, dtypes and values, wherever they lie in files.

    It is the digest of the canonical JSON of name -> manifest entry, over all tensors; None while one is missing.
    """
    if digests.keys() != checkpoint.tensors.keys():
        return None
    return json_digest(
        {name: tensor_entry(tensor, digests[name]) for name, tensor in checkpoint.tensors.items()}
    )
