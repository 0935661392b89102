"""Where the parts of a PyTorch run lie in a tree, and how they come to lie where a container has its files for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from statekit.conversion.contracts import Encoded
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, at, loose, put, without

_SCHEDULERS: tuple[Keys, ...] = (
    ("scheduler",),
    ("lr_scheduler",),
    ("scheduler_state_dict",),
    ("lr_scheduler_state_dict",),
    ("lr_schedulers", 0),
)
"""Paths at which others keep a scheduler's state."""


def moved_to(encoded: Encoded, keys: Mapping[str, str]) -> Encoded:
    """Returns a state whose model, optimizer and only scheduler lie under the target's keys.

    Args:
        encoded: As a layout made it: where the source had its parts.
        keys: Of `model`, `optimizer` and `scheduler` those that the target has, with the key of each.
    """
    places = dict(encoded.parts)
    scheduler = next((path for path in _SCHEDULERS if _is_only(encoded.tree, path)), None)
    places |= {"scheduler": scheduler} if scheduler else {}
    tree, exactness = encoded.tree, dict(encoded.exactness)
    for part_name, path in places.items():
        key = keys.get(part_name)
        if key is None or path == (key,) or key in tree:
            continue
        if path:
            old, part, tree = "/".join(map(str, path)), at(tree, path), without(tree, path)
            names = {
                name: f"{key}{name.removeprefix(old)}" for name in exactness if name.startswith(f"{old}/")
            }
        else:
            part = loose(tree)
            tree = {name: other for name, other in tree.items() if name not in part}
            names = {name: f"{key}/{name}" for name in part}
        tree = put(tree, (key,), part)
        exactness = {names.get(name, name): value for name, value in exactness.items()}
    return replace(encoded, tree=tree, exactness=exactness)


def listed(encoded: Encoded, key: str) -> Encoded:
    """Returns a state whose several parts of a kind lie in one list under a key, wherever the source had them."""
    places = [path for name, path in encoded.parts.items() if name.startswith(f"{key}/")]
    if not places or places == [(key, i) for i in range(len(places))]:
        return encoded
    parts, tree = [at(encoded.tree, path) for path in places], encoded.tree
    for path in places:
        tree = without(tree, path)
    above = places[0][:-1]
    if above and not any(at(tree, above) or ()):
        tree = without(tree, above)
    lost = {f"extra/torch/{key}": "optimizers stand in its place"} if at(tree, (key,)) else {}
    return replace(encoded, tree=put(tree, (key,), parts), dropped={**encoded.dropped, **lost})


def _is_only(tree: Tree, path: Keys) -> bool:
    part = at(tree, path)
    return isinstance(part, dict) and (len(path) == 1 or len(at(tree, path[:1])) == 1)
