"""Trees of inert records: everything a checkpoint holds, as plain data with tensors at the leaves.

A tree is made of dicts (with str, int, bool or tuple keys), lists, tuples, `Record`s, None, bool, int, float, str,
bytes and Tensors. Nothing in a tree runs: an object of a foreign class is a `Record` of its name and parts.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from statekit.errors import FormatError
from statekit.tensor import Tensor

Tree: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]

MAX_DEPTH = 512
MAX_NODES = 2_000_000
MAX_NAME_BYTES = 4096


@dataclass(frozen=True)
class Record:
    """An object of a class that statekit doesn't know, kept as data: its dotted name, arguments and state."""

    name: str
    args: tuple[Tree, ...] = ()
    state: Tree = None


def walk(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """Yields every leaf with its path of keys, in order; an empty dict, list or tuple is a leaf.

    Raises:
        FormatError: The tree is cyclic, deeper than 512 levels, or expands to more than 2 000 000 nodes.
    """
    count = 0
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        count += 1
        if count > MAX_NODES or len(path) > MAX_DEPTH:
            raise FormatError(
                "A checkpoint's tree is too large to be one.",
                place="/".join(map(str, path[:8])),
                expected=f"at most {MAX_NODES} nodes, {MAX_DEPTH} levels, no cycles",
                found=f"node {count} at level {len(path)}",
            )
        children = _children(node)
        if children is None:
            yield path, node
        else:
            stack.extend(((*path, key), child) for key, child in reversed(children))


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(node, Mapping) and node:
        return list(node.items())
    if isinstance(node, (list, tuple)) and node:
        return list(enumerate(node))
    if isinstance(node, Record) and (node.args or node.state is not None):
        parts = [("args", node.args)] if node.args else []
        return [*parts, ("state", node.state)] if node.state is not None else parts
    return None


def tensor_names(tree: Tree) -> dict[str, Tensor]:
    """Returns every tensor of a tree by its native name: the keys of its path, joined with `/`.

    Raises:
        FormatError: Two paths give the same name, or a name is longer than 4096 bytes.
    """
    named: dict[str, Tensor] = {}
    for path, leaf in walk(tree):
        if not isinstance(leaf, Tensor):
            continue
        name = "/".join(map(str, path))
        if name in named or len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise FormatError(
                "The name of a tensor is not usable.",
                place=name[:200],
                expected=f"names that differ, of at most {MAX_NAME_BYTES} bytes",
                found="two tensors of this name" if name in named else f"{len(name)} characters",
            )
        named[name] = leaf
    return named


def to_json(tree: Tree) -> Any:
    """Returns a JSON view of a tree: readable, with tensors described and what JSON lacks tagged by a `$` key."""
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) for key in tree):
            return {key: to_json(value) for key, value in tree.items()}
        return {"$dict": [[to_json(key), to_json(value)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {"$tuple": [to_json(item) for item in tree]}
    if isinstance(tree, list):
        return [to_json(item) for item in tree]
    if isinstance(tree, Record):
        return {"$record": tree.name, "args": to_json(list(tree.args)), "state": to_json(tree.state)}
    if isinstance(tree, bytes):
        return {"$bytes": base64.b64encode(tree).decode("ascii")}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"$float": repr(tree)}
    if isinstance(tree, Tensor):
        return {"$tensor": {"shape": list(tree.shape), "dtype": tree.dtype.name}}
    return tree


def from_json(view: Any) -> Tree:
    """Returns the tree of a JSON view. Tensors can't be restored from a view; they stay descriptions."""
    if isinstance(view, list):
        return [from_json(item) for item in view]
    if not isinstance(view, dict):
        return view
    if "$dict" in view:
        return {_hashable(from_json(key)): from_json(value) for key, value in view["$dict"]}
    if "$tuple" in view:
        return tuple(from_json(item) for item in view["$tuple"])
    if "$record" in view:
        return Record(view["$record"], tuple(from_json(view["args"])), from_json(view["state"]))
    if "$bytes" in view:
        return base64.b64decode(view["$bytes"])
    if "$float" in view:
        return float(view["$float"])
    return {key: from_json(value) for key, value in view.items()}


def _hashable(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key
