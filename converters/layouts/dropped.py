"""What a target has no place for, each leaf by its own name, so that a plan can say so."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from statekit.files.checkpoint import FILES_BESIDE
from statekit.tensors.tree import Tree, leaf_names


def dropped_from(extra: Mapping[str, Tree], placed: Collection[str], system: str) -> dict[str, str]:
    """Returns canonical name -> reason of everything in `extra` that isn't placed, tensor or not.

    Args:
        extra: The state's.
        placed: Its keys that the target holds.
        system: What the target is called.
    """
    others = {key: part for key, part in extra.items() if key not in (*placed, FILES_BESIDE)}
    dropped = {f"extra/{name}": f"{system} has no place for it" for name in leaf_names(others)}
    for name in extra.get(FILES_BESIDE, ()):
        dropped[f"extra/{FILES_BESIDE}/{name}"] = (
            "a file beside the arrays; copy it yourself if the run shall go on with it"
        )
    return dropped
