"""Makes the place that a user names: on this machine, in an object store or on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from statekit.errors import UsageError
from statekit.files.addresses import STORES, copying
from statekit.files.tree import Place, StoredPlace


def checkpoint_place(source: str | os.PathLike[str] | Place) -> Place:
    """Returns the place that a user names by a path or an address, or a place itself.

    Raises:
        UsageError: It is empty, or the address of something that isn't read.
    """
    if isinstance(source, StoredPlace):
        return source
    text = os.fspath(source) if isinstance(source, str) else ""
    scheme, separator, _ = text.partition("://")
    if not separator or "/" in scheme:
        return Path(source)
    if scheme == "file":
        return Path(text.removeprefix("file://"))
    if scheme in STORES:
        from statekit.files.store import in_store

        return in_store(text)
    if scheme == "hf":
        from statekit.files.hub import in_hub

        return in_hub(text)
    raise UsageError(
        "Checkpoints aren't read from there.",
        place=text,
        expected="a path of this machine, or s3://, gs://, az:// or hf://",
        remedy=f"copy it first: {copying(text)}",
    )
