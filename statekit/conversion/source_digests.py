"""What a conversion read: a digest of every tensor of the source, proven against the source's manifest."""

from __future__ import annotations

from collections.abc import Mapping

from statekit.errors import CorruptError, fault_list
from statekit.files.checkpoint import Checkpoint
from statekit.files.manifest import tensor_entry
from statekit.files.stage import Entries, OnProgress, Progress
from statekit.tensors.digest import json_digest, tensor_digest
from statekit.tensors.tensor import nbytes
from statekit.tensors.tree import Tree, tensor_names


def passed_through(checkpoint: Checkpoint, tree: Tree) -> dict[str, str]:
    """Returns name in the target -> name in the source, for tensors that are written as they are."""
    sources = {id(tensor): name for name, tensor in checkpoint.tensors.items()}
    return {name: sources[id(tensor)] for name, tensor in tensor_names(tree).items() if id(tensor) in sources}


def digest_rest(checkpoint: Checkpoint, passed: Mapping[str, str], tell: OnProgress) -> dict[str, str]:
    """Reads the tensors of the source that aren't written as they are, and returns their digests.

    The others are digested while they are written.
    """
    streamed = set(passed.values())
    rest = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in streamed}
    total, done = sum(map(nbytes, rest.values())), 0
    digests = {}
    for name, tensor in rest.items():

        def count(size: int, name: str = name) -> None:
            nonlocal done
            done += size
            tell(Progress("check", name, done, total))

        digests[name] = tensor_digest(tensor, count)
    return digests


def source_digests(rest: Mapping[str, str], passed: Mapping[str, str], streamed: Entries) -> dict[str, str]:
    """Joins the digests of the tensors read by themselves with those of the tensors streamed so far."""
    return {**rest, **{passed[name]: entry["blake3"] for name, entry in streamed.items() if name in passed}}


def prove(checkpoint: Checkpoint, digests: Mapping[str, str]) -> int:
    """Compares digests with those of the source's manifest, and returns how many it has.

    Raises:
        CorruptError: Lists every tensor that isn't what the manifest says.
    """
    stated = checkpoint.manifest["tensors"] if checkpoint.manifest else {}
    known = [name for name in digests if name in stated]
    changed = [name for name in known if digests[name] != stated[name]["blake3"]]
    if changed:
        raise CorruptError(
            f"{len(changed)} tensors of the source have other values than when it was written.",
            place=checkpoint.path,
            found=fault_list(("doesn't fit its digest in the manifest", name) for name in changed),
            remedy="restore the checkpoint from a copy",
        )
    return len(known)


def content_digest(checkpoint: Checkpoint, digests: Mapping[str, str]) -> str | None:
    """Returns the digest of a checkpoint's content: of names, shapes, dtypes and values, wherever they lie in files.

    It is the digest of the canonical JSON of name -> manifest entry, over all tensors; None while one is missing.
    """
    if digests.keys() != checkpoint.tensors.keys():
        return None
    return json_digest(
        {name: tensor_entry(tensor, digests[name]) for name, tensor in checkpoint.tensors.items()}
    )
