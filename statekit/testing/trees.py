"""Trees with other leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from statekit.tensors.tree import Path, Record, Tree


def changed_at(tree: Tree, path: Path, change: Callable[[Any], Any]) -> Tree:
    """Returns a tree with the leaf at a path changed, where `path` is one that `walk` yields; the rest is shared."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if isinstance(tree, Record):
        return replace(tree, **{key: changed_at(getattr(tree, key), rest, change)})
    if isinstance(tree, Mapping):
        return {k: changed_at(part, rest, change) if k == key else part for k, part in tree.items()}
    return type(tree)(changed_at(part, rest, change) if i == key else part for i, part in enumerate(tree))
