"""Modules whose parameters are named by the paths of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from statekit.arrays.backend import backend
from statekit.tensors.tensor import Tensor


def module_of(params: Mapping[str, torch.Tensor], order: Iterable[str]) -> torch.nn.Module:
    """Builds nested modules that hold parameters under the paths' names, registered in the order given."""
    root = torch.nn.Module()
    for path in order:
        *folders, last = path.split("/")
        node = root
        for folder in folders:
            if folder not in dict(node.named_children()):
                node.add_module(folder, torch.nn.Module())
            node = node.get_submodule(folder)
        node.register_parameter(last, torch.nn.Parameter(params[path].clone()))
    return root


def blank_model(params: Mapping[str, Tensor]) -> torch.nn.Module:
    """Builds a module for a checkpoint's parameters: other values, and another order than the checkpoint's."""
    values = {
        path: torch.full(t.shape, 7.0, dtype=getattr(torch, t.dtype.name)) for path, t in params.items()
    }
    return module_of(values, sorted(params, key=lambda path: path[::-1]))


def set_grads(model: torch.nn.Module, grads: Mapping[str, Tensor]) -> None:
    """Gives each parameter its gradient, by path; None where there is none."""
    for name, param in model.named_parameters():
        grad = grads.get(name.replace(".", "/"))
        param.grad = None if grad is None else backend("torch").asarray(grad.read())
