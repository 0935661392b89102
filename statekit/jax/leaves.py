"""Trees of parameters as paths and leaves, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from statekit.dropin.by_name import path_of
from statekit.errors import Faults, UsageError


@dataclass(frozen=True)
class Leaves:
    """A tree's leaves by name.

    Attributes:
        names: `/`-joined keys of each leaf, slashes for dots. A last `value`, which is how
            boxes of Flax hold their array, is left out.
        values: The leaves, in the same order.
        treedef: The tree's structure.
    """

    names: tuple[str, ...]
    values: tuple[Any, ...]
    treedef: Any

    @cached_property
    def by_name(self) -> dict[str, Any]:
        """The leaves by name."""
        return dict(zip(self.names, self.values, strict=True))

    def like(self, tree: Any) -> dict[str, Any]:
        """Returns by name what another tree has in the place of each leaf."""
        return dict(zip(self.names, self.treedef.flatten_up_to(tree), strict=True))

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Returns the tree with other leaves; a name without one gets `MaskedNode()`."""
        return self.treedef.unflatten([values.get(name, optax.MaskedNode()) for name in self.names])

    def map(self, function: Callable[[str], Any]) -> Any:
        """Returns the tree with a function of each leaf's name in the leaf's place."""
        return self.treedef.unflatten(map(function, self.names))


def leaves_of(params: Any) -> Leaves:
    """Takes a tree of parameters apart.

    Raises:
        UsageError: Two leaves have one name, or a leaf isn't real and floating; lists every one.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = tuple(_name(path) for path, _ in pairs)
    faults, seen = Faults(), set[str]()
    for name, (_, leaf) in zip(names, pairs, strict=True):
        if name in seen:
            faults.add("is the name of two parameters", name)
        seen.add(name)
        if fault := _fault(leaf):
            faults.add(fault, name)
    faults.check(UsageError, "Parameters can't be optimized", remedy=_remedy(params))
    return Leaves(names, tuple(leaf for _, leaf in pairs), treedef)


def _fault(leaf: Any) -> str:
    """Returns why a leaf can't be stepped; "" if it can."""
    try:
        dtype = jnp.result_type(leaf)
    except (TypeError, ValueError):  # of a string, of an object
        return f"is no array but {type(leaf).__name__}"
    is_floating = jnp.issubdtype(dtype, jnp.floating)
    return "" if is_floating else f"is {dtype}; only real floating-point arrays can be stepped"


def _remedy(params: Any) -> str:
    """Returns what to give instead of a tree that holds more than parameters."""
    if hasattr(params, "params") and hasattr(params, "opt_state"):
        return "give the parameters of the train state: state.params"
    is_nnx = any(cls.__module__.startswith("flax.nnx") for cls in type(params).__mro__)
    if is_nnx and not isinstance(params, Mapping):
        return "give the parameters of the module: nnx.state(model, nnx.Param)"
    return "leave them out with optax.masked or optax.partition"


def floating_leaves(params: Any) -> Leaves:
    """Returns the leaves of a tree that an optimizer may move: not the counts and keys of random streams."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(params)
    moved = [(path, leaf) for path, leaf in pairs if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return Leaves(tuple(_name(path) for path, _ in moved), tuple(leaf for _, leaf in moved), treedef)


def key_names(path: Sequence[Any]) -> list[str]:
    """Returns the keys of a leaf's path in a tree of JAX."""
    return [_key(key) for key in path]


def _name(path: Sequence[Any]) -> str:
    keys = key_names(path)
    boxed = len(path) > 1 and isinstance(path[-1], GetAttrKey) and path[-1].name == "value"
    return path_of("/".join(keys[:-1] if boxed else keys))


def _key(key: Any) -> str:
    match key:
        case DictKey(key=name) | FlattenedIndexKey(key=name):
            return str(name)
        case SequenceKey(idx=index):
            return str(index)
        case GetAttrKey(name=name):
            return str(name)
    return str(key)
