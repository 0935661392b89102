"""Makes the place that a user names: on this machine, in an object store or on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from statekit.errors import UsageError
from statekit.files.addresses import STORES, copying, local_path
from statekit.files.tree import Place, StoredPlace


def target_place(target: str | os.PathLike[str] | Place) -> Place:
    """Returns the place of a target that a user names; what may be there is its writer's to look at.

    Raises:
        UsageError: It is empty, or the address of something that isn't written.
    """
    if isinstance(target, str) and target.partition("://")[0] not in STORES:
        return local_path(target)
    return checkpoint_place(target)


def checkpoint_place(source: str | os.PathLike[str] | Place) -> Place:
    """Returns the place that a user names by a path or an address, or a place itself.

    Raises:
        UsageError: It is empty, or the address of something that isn't read.
    """
    if isinstance(source, StoredPlace):
        return source
    if not isinstance(source, str):
        return Path(source)
    scheme, separator, _ = source.partition("://")
    if "/" in scheme:  # a name with :// in it
        return Path(source)
    if not separator or scheme == "file":
        return local_path(source)
    if scheme in STORES:
        from statekit.files.store import in_store

        return in_store(source)
    if scheme == "hf":
        from statekit.files.hub import in_hub

        return in_hub(source)
    raise UsageError(
        "Checkpoints aren't read from there.",
        place=source,
        expected="a path of this machine, or s3://, gs://, az:// or hf://",
        remedy=f"copy it first: {copying(source)}",
    )
