"""Where the parts of a PyTorch checkpoint lie in its tree: a model's state and an optimizer's.

Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`; Lightning-AI/pytorch-lightning,
src/lightning/pytorch/trainer/connectors/checkpoint_connector.py, `dump_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from statekit.converters.layouts.optimizer_forms import is_flat, is_nested
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import Path, Tree

OPTIMIZERS: tuple[Path, ...] = (
    ("optimizer",),
    ("optimizer_state_dict",),
    ("optimizer_states", 0),
    ("optim",),
)
MODELS: tuple[Path, ...] = (("model",), ("state_dict",), ("model_state_dict",), ("module",))
"""Paths at which others keep an optimizer's state, and a model's; the first of each is ours."""

SORTED = "model_sorted"
"""Key in a checkpoint's `meta`: whether the model part is sorted by name, and not in the order of its parameters."""


def places(tree: Tree) -> tuple[Path, Path] | None:
    """Returns the paths of a model's state and of an optimizer's; None if one is missing.

    The path of a model whose tensors stand at the top, as torchtitan keeps them, is empty: see `loose`.
    """
    optimizer = next((path for path in OPTIMIZERS if _is_optimizer(at(tree, path))), None)
    model = next((path for path in MODELS if _is_model(at(tree, path))), None)
    if model is None and isinstance(tree, Mapping) and loose(tree):
        model = ()
    return None if optimizer is None or model is None else (model, optimizer)


def model_in(tree: Tree) -> Tree:
    """Returns a model's state in a tree; the tree itself where it is nothing else."""
    return next((at(tree, path) for path in MODELS if _is_model(at(tree, path))), tree)


def apart(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a model without the further names of tied tensors: an optimizer has each once."""
    found: dict[Any, str] = {}
    for name, tensor in model.items():
        source = (tensor.fetch if isinstance(tensor, Stored) else id(tensor), tensor.shape, tensor.dtype)
        found.setdefault(source, name)
    return {name: model[name] for name in found.values()}


def loose(tree: Mapping[Any, Tree]) -> dict[Any, Tensor]:
    """Returns the tensors that stand at the top of a tree."""
    return {name: part for name, part in tree.items() if isinstance(part, Tensor)}


def without(tree: Tree, path: Path) -> Tree:
    """Returns a dict without what lies at a path; None stays in its place where a list holds more."""
    key, node = path[0], dict(tree) if isinstance(tree, Mapping) else {}
    if len(path) > 1 and len(node[key]) > 1:
        return {**node, key: [None if i == path[1] else part for i, part in enumerate(node[key])]}
    return {name: part for name, part in node.items() if name != key}


def put(tree: Tree, path: Sequence[Any], value: Tree) -> Tree:
    """Returns a tree with another value at a path; dicts and lists on the way are copied, or made."""
    if not path:
        return value
    key = path[0]
    if isinstance(key, int):
        held = list(tree) if isinstance(tree, list | tuple) else [None]
        return [put(part, path[1:], value) if i == key else part for i, part in enumerate(held)]
    named = dict(tree) if isinstance(tree, Mapping) else {}
    return {**named, key: put(named.get(key), path[1:], value)}


def at(tree: Tree, path: Path) -> Any:
    """Returns what lies at a path; None if nothing does."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list | tuple) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def _is_optimizer(node: Any) -> bool:
    return is_flat(node) or is_nested(node)


def _is_model(node: Any) -> bool:
    return (
        isinstance(node, Mapping) and bool(node) and all(isinstance(leaf, Tensor) for leaf in node.values())
    )
