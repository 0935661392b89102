"""Leaves that a program kept once for each of its devices.

    opt_state/0/count of shape (8,)     eight copies, as jax.pmap keeps them

Source: google/flax flax/jax_utils.py, `replicate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from statekit.converters.layouts.optax.kinds import STRANGERS
from statekit.converters.layouts.optax.links import KINDS, is_tensor, leaves
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree
from statekit.tensors.views import Copies

_COUNT, _STEP = "count", "step"
_LINKS = frozenset({*KINDS, *STRANGERS})


def as_one(tree: Tree) -> Tree:
    """Returns a tree whose leaves have no axis of devices: the copies of each are one tensor, which compares them."""
    devices = copies_of(tree)
    return tree if devices is None else _as_one(tree, devices, ())


def note_of(tree: Tree) -> str:
    """Returns that leaves have copies, in a sentence; "" where they have none."""
    copies = copies_of(tree)
    if copies:
        return f"Every leaf has {copies} copies, one for each device of a jax.pmap: they are read as one."
    return ""


def copies_of(tree: Tree) -> int | None:
    """Returns how many copies a tree has of every leaf, along a first axis; None if there is no such axis."""
    sizes = {shape[0] for shape in _counters(tree) if len(shape) == 1}
    if len(sizes) != 1:
        return None
    (devices,) = sizes
    shapes = [leaf.shape for _, leaf in leaves(tree) if is_tensor(leaf)]
    return devices if all(not shape or shape[0] == devices for shape in shapes) else None


def _counters(tree: Tree) -> Iterator[Shape]:
    """Yields the shapes of the counts in the states of links, and of a program's own at the top."""
    step = tree.get(_STEP) if isinstance(tree, Mapping) else None
    if isinstance(step, Tensor):
        yield step.shape
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            count = node.get(_COUNT)
            if frozenset(node) in _LINKS and isinstance(count, Tensor):
                yield count.shape
            stack += [child for child in node.values() if isinstance(child, (Mapping, list))]
        elif isinstance(node, list):
            stack += [child for child in node if isinstance(child, (Mapping, list))]


def _as_one(node: Tree, devices: int, path: tuple[str, ...]) -> Tree:
    if isinstance(node, Tensor):
        return Copies(node, 0, "/".join(path)) if node.shape else node
    if isinstance(node, Mapping):
        below = {}
        for key, child in node.items():
            below[key] = _as_one(child, devices, (*path, str(key)))
        return below
    if isinstance(node, list):
        return [_as_one(child, devices, (*path, str(i))) for i, child in enumerate(node)]
    return node
