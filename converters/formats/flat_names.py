"""Names of a tree's leaves in a flat file, and the tree that they are of.

    params/dense/kernel            Flax, flatten_dict(sep="/"); Orbax, big_vision
    params.dense.kernel            the same with dots
    ['params']['dense']['kernel']  JAX, keystr

Source: jax-ml/jax jax/_src/tree_util.py, `keystr`; google/flax flax/traverse_util.py, `flatten_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from statekit.errors import FormatError
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, nested

Leaf = TypeVar("Leaf")
_KEY = r"\['([^'\\]*)'\]|\[(\d+)\]|\.(\w+)"
_KEYS = re.compile(f"(?:{_KEY})+")
_OPTIMIZER = "opt_state"
"""The key under which programs of JAX keep the optimizer's state."""
_DOTTED = re.compile(rf"(params|{_OPTIMIZER})\.[^/]*")


def keys_of(name: str) -> tuple[str, ...]:
    """Returns the keys of a leaf by its name.

    Example:
        >>> keys_of("params/w"), keys_of("['opt_state'][0].mu['w']"), keys_of("opt_state.0.count")
        (('params', 'w'), ('opt_state', '0', 'mu', 'w'), ('opt_state', '0', 'count'))
    """
    if _DOTTED.fullmatch(name):
        return tuple(name.split("."))
    if not _KEYS.fullmatch(name):
        return tuple(name.split("/"))
    return tuple("".join(match.groups("")) for match in re.finditer(_KEY, name))


def placed(leaves: Mapping[str, Leaf], place: str) -> dict[tuple[str, ...], Leaf]:
    """Returns leaves by their keys.

    Raises:
        FormatError: Two leaves have one place.
    """
    by_keys: dict[tuple[str, ...], Leaf] = {}
    for name, leaf in leaves.items():
        if (keys := keys_of(name)) in by_keys:
            raise FormatError("Two arrays of a file have one place.", place=place, found=name)
        by_keys[keys] = leaf
    return by_keys


def run_of_jax(leaves: Mapping[str, Tree], place: str) -> Tree | None:
    """Returns the tree of a flat file that holds a run of JAX; None if no name is of an optimizer's state.

    Raises:
        FormatError: Two leaves have one place.
    """
    if not all(isinstance(leaf, Tensor) for leaf in leaves.values()):
        return None
    named = [keys_of(name) for name in leaves if isinstance(name, str)]
    if not any(keys[0] == _OPTIMIZER and len(keys) > 1 for keys in named):
        return None
    return nested(placed(leaves, place))
