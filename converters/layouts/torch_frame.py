"""The parts of a PyTorch checkpoint: a model's state, an optimizer's, and everything else, wherever they lie.

Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`; Lightning-AI/pytorch-lightning,
src/lightning/pytorch/trainer/connectors/checkpoint_connector.py, `dump_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.converters.layouts.statekit_torch import BESIDE, BUFFERS, GROUPS, is_plain
from statekit.converters.layouts.unplaced import unplaced
from statekit.tensor import Tensor
from statekit.tree import Path, Tree

PLACES = "torch_places"
"""Key in `extra`: where model and optimizer lie in the file."""
_OPTIMIZERS: tuple[Path, ...] = (
    ("optimizer",),
    ("optimizer_state_dict",),
    ("optimizer_states", 0),
    ("optim",),
)
_MODELS: tuple[Path, ...] = (("model",), ("state_dict",), ("model_state_dict",), ("module",))


@dataclass(frozen=True)
class Frame:
    """The parts of a checkpoint.

    Attributes:
        places: Path of the model's state in the tree, and of the optimizer's.
        model: Every tensor of the model by name, parameters and buffers.
        groups: The optimizer's groups.
        state: The optimizer's state by index, or by name.
        rest: The tree without model and optimizer.
    """

    places: tuple[Path, Path]
    model: Mapping[str, Tensor]
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[Any, Mapping[str, Any]]
    rest: Tree


def frame(tree: Tree) -> Frame | None:
    """Returns the parts of a checkpoint; None if it hasn't them."""
    optimizer_at = next((path for path in _OPTIMIZERS if _is_optimizer(_at(tree, path))), None)
    model_at = next((path for path in _MODELS if _is_model(_at(tree, path))), None)
    if optimizer_at is None or model_at is None:
        return None
    optimizer, model = _at(tree, optimizer_at), _at(tree, model_at)
    rest = _without(_without(tree, model_at), optimizer_at)
    return Frame((model_at, optimizer_at), dict(model), optimizer["param_groups"], optimizer["state"], rest)


def extra_of(parts: Frame, params: Iterable[str], options: Iterable[str]) -> dict[str, Tree]:
    """Returns what a checkpoint holds beside parameters, slots and hyperparameters.

    Args:
        parts: The checkpoint.
        params: Names of the parameters: what else the model has are buffers, or frozen.
        options: Keys of the groups that became hyperparameters.
    """
    taken, known = set(params), {*options, "params", "param_names"}
    found: dict[str, Any] = {
        BUFFERS: {name: leaf for name, leaf in parts.model.items() if name not in taken},
        GROUPS: [{key: value for key, value in group.items() if key not in known} for group in parts.groups],
        BESIDE: parts.rest,
        PLACES: [list(place) for place in parts.places],
    }
    return {key: part for key, part in found.items() if part}


def joined(
    extra: Mapping[str, Tree],
    params: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    placed: Sequence[str] = (),
) -> tuple[Tree, dict[str, str]]:
    """Returns a checkpoint's tree, and what had to be left out of it; undoes `frame` and `extra_of`.

    Args:
        extra: What `extra_of` returned, or another layout of PyTorch left.
        params: Parameters by name.
        groups: The optimizer's groups, without what the extra holds for each.
        state: The optimizer's state.
        placed: Further keys of the extra that the layout has a place for.
    """
    model_at, optimizer_at = extra.get(PLACES) or (_MODELS[0], _OPTIMIZERS[0])
    others = extra.get(GROUPS) or []
    full = [{**(others[i] if i < len(others) else {}), **group} for i, group in enumerate(groups)]
    beside = extra.get(BESIDE) or {}
    dropped = {
        f"extra/{BESIDE}/{key}": "a torch file that loads with weights_only can't hold it"
        for key, part in beside.items()
        if not is_plain(part)
    }
    kept = {key: part for key, part in beside.items() if f"extra/{BESIDE}/{key}" not in dropped}
    tree = _put(kept, model_at, {**params, **(extra.get(BUFFERS) or {})})
    used = (BUFFERS, GROUPS, BESIDE, PLACES, *placed)
    return _put(tree, optimizer_at, {"state": dict(state), "param_groups": full}), {
        **dropped,
        **unplaced(extra, used, "the file"),
    }


def _without(tree: Tree, path: Path) -> Tree:
    """Returns a dict without what lies at a path; None stays in its place where a list holds more."""
    key, node = path[0], dict(tree) if isinstance(tree, Mapping) else {}
    if len(path) > 1 and len(node[key]) > 1:
        return {**node, key: [None if i == path[1] else part for i, part in enumerate(node[key])]}
    return {name: part for name, part in node.items() if name != key}


def _put(tree: Tree, path: Sequence[Any], value: Tree) -> Tree:
    """Returns a tree with another value at a path; dicts and lists on the way are copied, or made."""
    if not path:
        return value
    key = path[0]
    if isinstance(key, int):
        held = list(tree) if isinstance(tree, list | tuple) else [None]
        return [_put(part, path[1:], value) if i == key else part for i, part in enumerate(held)]
    named = dict(tree) if isinstance(tree, Mapping) else {}
    return {**named, key: _put(named.get(key), path[1:], value)}


def _at(tree: Tree, path: Path) -> Any:
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list | tuple) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def _is_optimizer(node: Any) -> bool:
    if not isinstance(node, Mapping) or not {"state", "param_groups"} <= node.keys():
        return False
    groups, state = node["param_groups"], node["state"]
    return (
        isinstance(groups, list | tuple)
        and all(isinstance(one, Mapping) and isinstance(one.get("params"), list | tuple) for one in groups)
        and isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
    )


def _is_model(node: Any) -> bool:
    return (
        isinstance(node, Mapping) and bool(node) and all(isinstance(leaf, Tensor) for leaf in node.values())
    )
