"""Trees with other leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from statekit.tensors.tree import Record, Tree


def mapped(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """Returns a tree with every leaf changed; what holds the leaves is made anew."""
    if isinstance(tree, Mapping):
        return {key: mapped(part, change) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(part, change) for part in tree)
    if isinstance(tree, Record):
        return replace(tree, args=mapped(tree.args, change), state=mapped(tree.state, change))
    return change(tree)
