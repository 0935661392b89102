"""What a target has no place for, by name, so that a plan can say so."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from statekit.tensors.tree import Tree, tensor_names


def dropped_from(extra: Mapping[str, Tree], placed: Collection[str], system: str) -> dict[str, str]:
    """Returns canonical name -> reason of everything in `extra` that isn't placed.

    Args:
        extra: The state's.
        placed: Its keys that the target holds.
        system: What the target is called.
    """
    dropped = {
        name: f"{system} has no place for it"
        for key, part in extra.items()
        if key not in (*placed, "files_beside")
        for name in (
            [f"extra/{key}/{n}" if n else f"extra/{key}" for n in tensor_names(part)] or [f"extra/{key}"]
        )
    }
    for name in extra.get("files_beside", ()):
        dropped[f"extra/files_beside/{name}"] = (
            "a file beside the arrays; copy it yourself if the run shall go on with it"
        )
    return dropped
