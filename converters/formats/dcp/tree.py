"""Between a tree and the flat keys that PyTorch's planner makes of it: paths joined with dots.

Source: pytorch/pytorch torch/distributed/checkpoint/_traverse.py, `traverse_state_dict`, `set_element`: mappings are
entered, and lists that hold a tensor or a mapping at any depth; what else there is is saved as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from statekit.budget import Account
from statekit.errors import CorruptError, Faults, FormatError, RefusedError, UsageError
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import MAX_DEPTH, Path, Tree


def tree_of(
    paths: Mapping[str, Path], values: Mapping[str, Tree], place: str, account: Account | None = None
) -> dict[Any, Tree]:
    """Returns the tree that holds the values at their paths: an index belongs to a list, a name to a dict.

    Args:
        paths: By flat key.
        values: By flat key.
        place: What errors call it.
        account: What places of lists draw on that nothing was saved for, such as an empty dict.

    Raises:
        FormatError: A path leads through a value, through a list by name or a dict by index, or is taken.
        RefusedError: A list has too many places, or the tree too many levels.
        CorruptError: A key isn't its path, joined.
    """
    root: dict[Any, Any] = {}
    for key, path in paths.items():
        if len(path) > MAX_DEPTH:
            raise RefusedError("A tree is too deep.", place=place, expected=MAX_DEPTH, found=len(path))
        node = root
        for part in path[:-1]:
            below = node.setdefault(part, {})
            if type(below) is not dict:
                raise _clash(key, place)
            node = below
        if path[-1] in node:
            raise _clash(key, place)
        node[path[-1]] = _Leaf(values[key])
    account = account or Account()
    tree = {key: _plain(node, place, account) for key, node in root.items()}
    moved = Faults((f"stands at {path}", key) for key, path in paths.items() if key != flat_key(path))
    moved.check(
        CorruptError,
        "The keys of values aren't their places in the tree",
        place=place,
        remedy="copy the checkpoint again; PyTorch itself loads by the keys",
    )
    return tree


def flat_key(path: Path) -> str:
    """Returns the key under which PyTorch's planner keeps what stands at a path."""
    return ".".join(map(str, path))


class _Leaf:
    """A value, which may itself be a dict."""

    __slots__ = ("value",)

    def __init__(self, value: Tree) -> None:
        self.value = value


def _plain(node: Any, place: str, account: Account) -> Tree:
    if isinstance(node, _Leaf):
        return node.value
    indices = [key for key in node if type(key) is int]
    if not indices:
        return {key: _plain(below, place, account) for key, below in node.items()}
    if len(indices) < len(node):
        raise FormatError(
            "A part of the tree is a list and a dict.", place=place, found=f"index {indices[0]} beside names"
        )
    if min(indices) < 0:
        raise RefusedError("A list has impossible places.", place=place, found=f"index {min(indices)}")
    account.nodes(max(indices) + 1 - len(indices), "A list with impossible places", place)
    listed: list[Tree] = [None] * (max(indices) + 1)
    for index, below in node.items():
        listed[index] = _plain(below, place, account)
    return listed


def _clash(key: str, place: str) -> FormatError:
    return FormatError(
        "Two entries of the metadata can't both be in one tree.", place=place, found=repr(key)[:200]
    )


def flat_paths(tree: Tree) -> dict[str, tuple[Path, Tree]]:
    """Returns path and value of every flat key of a tree, in order.

    Raises:
        UsageError: The tree is no dict, or two paths give the same key; lists every such.
    """
    if not isinstance(tree, Mapping):
        raise UsageError("A distributed checkpoint holds a dict.", found=type(tree).__name__)
    flat: dict[str, tuple[Path, Tree]] = {}
    faults = Faults()
    for path, value in _leaves((), tree):
        key = flat_key(path)
        if key in flat:
            faults.add(f"has the flat name {key}, as has {_shown(flat[key][0])}", _shown(path))
        flat[key] = (path, value)
    faults.check(
        UsageError, "Entries have the name of another once they are flat", remedy="rename one of each pair"
    )
    return flat


def _leaves(path: Path, node: Tree) -> Iterator[tuple[Path, Tree]]:
    # An empty dict is saved as a value, where PyTorch saves nothing and loses it.
    if isinstance(node, Mapping) and node:
        for key, below in node.items():
            yield from _leaves((*path, str(key)), below)
    elif isinstance(node, list) and _is_entered(node):
        for i, below in enumerate(node):
            yield from _leaves((*path, i), below)
    else:
        yield path, node


def _is_entered(node: list[Any]) -> bool:
    return any(
        isinstance(item, Mapping | Tensor) or (isinstance(item, list) and _is_entered(item)) for item in node
    )


def _shown(path: Path) -> str:
    return "/".join(map(str, path))
