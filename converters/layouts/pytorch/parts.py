"""The parts of a PyTorch checkpoint: a model's state, an optimizer's, and everything else, wherever they lie.

Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`; Lightning-AI/pytorch-lightning,
src/lightning/pytorch/trainer/connectors/checkpoint_connector.py, `dump_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.conversion.contracts import NO_HINTS, Encoded, Hints
from statekit.converters.layouts.dropped import dropped_from
from statekit.converters.layouts.pytorch.optimizer_forms import (
    Form,
    flat_form,
    is_flat,
    is_nested,
    nested_form,
    with_names,
)
from statekit.tensors.tensor import Tensor
from statekit.tensors.ties import TIES, ties_of
from statekit.tensors.tree import (
    Path,
    Tree,
    at,
    holds_records,
    leaf_names,
    loose,
    put,
    record_names,
    walk,
    without,
)

OPTIMIZERS: tuple[Path, ...] = (
    ("optimizer",),
    ("optimizer_state_dict",),
    ("optimizer_states", 0),
    ("optim",),
)
MODELS: tuple[Path, ...] = (("model",), ("state_dict",), ("model_state_dict",), ("module",))
"""Paths at which others keep an optimizer's state, and a model's; the first of each is ours."""
DEEPEST, MOST_PARTS = 2, 100
"""How deep below the top other places are looked for, and the longest list that is looked through."""
BUFFERS, GROUPS, BESIDE = "buffers", "param_groups", "torch"
"""Parts of `extra` that lie elsewhere in the file: in `model`, in the groups, and at the top."""
PLACES = "torch_places"
"""Key in `extra`: where model and optimizer lie in the file."""
_PLAIN = (bool, int, float, str, bytes, type(None), Tensor)


def optimizer_place(tree: Tree, key: str | None = None) -> Path | None:
    """Returns the path of an optimizer's state: at `key`, or where others keep it, or the only one that there is.

    Keys of a path are joined by `/` in `key`; the path of one that stands alone is empty.
    """
    return () if key is None and _is_optimizer(tree) else _place(tree, OPTIMIZERS, key, _is_optimizer, None)


def model_place(tree: Tree, key: str | None = None, optimizer: Path | None = None) -> Path | None:
    """Returns the path of a model's state, as `optimizer_place`; nothing below `optimizer` is one.

    The path of a model whose tensors stand at the top, as torchtitan keeps them, is empty: see `loose`.
    """
    found = _place(tree, MODELS, key, _is_model, optimizer)
    if found is None and key is None and isinstance(tree, Mapping) and loose(tree):
        return ()
    return found


def _place(
    tree: Tree, usual: Sequence[Path], key: str | None, fits: Callable[[Any], bool], other: Path | None
) -> Path | None:
    nodes = dict(_nodes(tree, other))
    if key is not None:
        return next(
            (path for path, node in nodes.items() if "/".join(map(str, path)) == key and fits(node)), None
        )
    known = next((path for path in usual if fits(at(tree, path))), None)
    found = [path for path, node in nodes.items() if path and fits(node)] if known is None else [known]
    return found[0] if len(found) == 1 else None


def _nodes(tree: Tree, other: Path | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields what lies near the top of a tree, with paths; nothing at or below another part."""
    if path == other:
        return
    yield path, tree
    if len(path) < DEEPEST:
        keys: Iterable[Any] = tree if isinstance(tree, Mapping) else ()
        keys = range(len(tree)) if isinstance(tree, list | tuple) and len(tree) < MOST_PARTS else keys
        for key in keys:
            if isinstance(part := tree[key], Mapping | list | tuple):
                yield from _nodes(part, other, (*path, key))


def model_in(tree: Tree) -> Tree:
    """Returns a model's state in a tree; the tree itself where it is nothing else."""
    return next((at(tree, path) for path in MODELS if _is_model(at(tree, path))), tree)


def _is_optimizer(node: Any) -> bool:
    return is_flat(node) or is_nested(node)


def _is_model(node: Any) -> bool:
    return (
        isinstance(node, Mapping) and bool(node) and all(isinstance(leaf, Tensor) for leaf in node.values())
    )


@dataclass(frozen=True)
class Frame:
    """The parts of a checkpoint.

    Attributes:
        places: Path of the model's state in the tree, and of the optimizer's.
        model: Every tensor of the model by name, parameters and buffers.
        groups: The optimizer's groups.
        state: The optimizer's state by index, or by name.
        form: How it lies in the file.
        rest: The tree without model and optimizer.
    """

    places: tuple[Path, Path]
    model: Mapping[str, Tensor]
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[Any, Mapping[str, Any]]
    form: Form
    rest: Tree


def frame(tree: Tree, hints: Hints = NO_HINTS) -> Frame | None:
    """Returns the parts of a checkpoint; None if it hasn't them.

    Args:
        tree: The checkpoint's.
        hints: Where the parts lie, and the model where the checkpoint has none.
    """
    optimizer_at = optimizer_place(tree, hints.optimizer_key)
    if optimizer_at is None:
        return None
    model_at = model_place(tree, hints.model_key, optimizer_at) if optimizer_at else None
    if model_at is None:
        if hints.model is None:
            return None
        model, rest = hints.model, without(tree, optimizer_at) if optimizer_at else {}
    else:
        model = at(tree, model_at) if model_at else loose(tree)
        rest = without(tree, optimizer_at)
        rest = (
            without(rest, model_at)
            if model_at
            else {key: part for key, part in rest.items() if key not in model}
        )
    optimizer = nested_form(at(tree, optimizer_at), model)
    if optimizer is None:
        return None
    (parts, form) = optimizer
    placed = (MODELS[0] if model_at is None else model_at, optimizer_at)
    return Frame(placed, dict(model), parts["param_groups"], parts["state"], form, rest)


def extra_of(parts: Frame, params: Iterable[str], options: Iterable[str]) -> dict[str, Tree]:
    """Returns what a checkpoint holds beside parameters, slots and hyperparameters.

    Args:
        parts: The checkpoint.
        params: Names of the parameters: what else the model has are buffers, or frozen.
        options: Keys of the groups that became hyperparameters.
    """
    taken, known = set(params), {*options, "params", "param_names"}
    rest, moved = parts.rest, [name for name in parts.model if name in taken]
    ties = {name: one for name, one in ties_of(parts.model, moved).items() if name not in taken}
    if isinstance(rest, Mapping) and are_ties(rest.get(TIES), parts.model):
        ties, rest = {**rest[TIES], **ties}, without(rest, (TIES,))
    found: dict[str, Any] = {
        BUFFERS: {name: leaf for name, leaf in parts.model.items() if name not in taken and name not in ties},
        TIES: {name.replace(".", "/"): one.replace(".", "/") for name, one in ties.items()},
        GROUPS: [{key: value for key, value in group.items() if key not in known} for group in parts.groups],
        BESIDE: rest,
        PLACES: [list(place) for place in parts.places],
    }
    return {key: part for key, part in found.items() if part}


def joined(
    extra: Mapping[str, Tree],
    step: int,
    params: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    placed: Sequence[str] = (),
    form: Form = "index",
) -> Encoded:
    """Returns a checkpoint's tree, with what had to be left out of it; undoes `frame` and `extra_of`.

    Args:
        extra: What `extra_of` returned, or another layout of PyTorch left.
        step: The updates done.
        params: Parameters by name.
        groups: The optimizer's groups, without what the extra holds for each.
        state: The optimizer's state.
        placed: Further keys of the extra that the layout has a place for.
        form: How the optimizer shall lie in the file; groups and state are by name if it isn't by index.
    """
    model_at, optimizer_at = extra.get(PLACES) or (MODELS[0], OPTIMIZERS[0])
    others = extra.get(GROUPS) or []
    full = [{**(others[i] if i < len(others) else {}), **group} for i, group in enumerate(groups)]
    beside = extra.get(BESIDE) or {}
    kept = {key: part for key, part in beside.items() if is_plain(part)}
    dropped = not_plain(beside, f"extra/{BESIDE}")
    model = {**params, **tied(extra, params), **(extra.get(BUFFERS) or {})}
    tree = put(kept, model_at, model) if model_at else {**model, **kept}
    optimizer = {"state": dict(state), "param_groups": full} if form != "flat" else flat_form(state, full)
    used = (BUFFERS, GROUPS, BESIDE, PLACES, TIES, *placed)
    dropped |= dropped_from(extra, used, "the file")
    parts = {"model": tuple(model_at), "optimizer": tuple(optimizer_at)}
    return with_names(Encoded(put(tree, optimizer_at, optimizer), step, dropped=dropped, parts=parts))


def are_ties(part: Any, model: Mapping[str, Tensor]) -> bool:
    """Tells whether a part of a tree names further names of a model's tensors, which the model itself hasn't."""
    return isinstance(part, Mapping) and all(
        isinstance(name, str) and name not in model and one in model for name, one in part.items()
    )


def tied(extra: Mapping[str, Tree], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters again that a model has under further names, by these; each the very same tensor.

    Args:
        extra: The state's.
        params: By the names that they have in torch.
    """
    named = {str(name): str(path).replace("/", ".") for name, path in (extra.get(TIES) or {}).items()}
    return {name.replace("/", "."): params[one] for name, one in named.items() if one in params}


def not_plain(parts: Mapping[Any, Tree], under: str) -> dict[str, str]:
    """Returns name -> reason of every leaf of the parts that aren't plain, which go as a whole: half of one misleads.

    Args:
        parts: By key.
        under: Where they stand in the state.
    """
    dropped: dict[str, str] = {}
    for key, part in parts.items():
        if not is_plain(part):
            objects = list(dict.fromkeys(record_names(part)))
            what = f"an object of {objects[0]}" if objects else "what isn't plain data"
            reason = f"{key} holds {what}, and a torch file that loads with weights_only can't hold it"
            dropped |= {f"{under}/{name}": reason for name in leaf_names({key: part})}
    return dropped


def is_plain(part: Tree) -> bool:
    """Tells whether a file that loads with weights_only can hold a part."""
    return not holds_records(part) and all(
        isinstance(leaf, _PLAIN) or leaf in ({}, [], ()) for _, leaf in walk(part)
    )
