"""Where the parts of a PyTorch checkpoint lie in its tree: a model's state and an optimizer's.

Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`; Lightning-AI/pytorch-lightning,
src/lightning/pytorch/trainer/connectors/checkpoint_connector.py, `dump_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.converters.layouts.optimizer_forms import is_flat, is_nested
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import Path, Tree, at, loose

OPTIMIZERS: tuple[Path, ...] = (
    ("optimizer",),
    ("optimizer_state_dict",),
    ("optimizer_states", 0),
    ("optim",),
)
MODELS: tuple[Path, ...] = (("model",), ("state_dict",), ("model_state_dict",), ("module",))
"""Paths at which others keep an optimizer's state, and a model's; the first of each is ours."""


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


def _is_optimizer(node: Any) -> bool:
    return is_flat(node) or is_nested(node)


def _is_model(node: Any) -> bool:
    return (
        isinstance(node, Mapping) and bool(node) and all(isinstance(leaf, Tensor) for leaf in node.values())
    )
