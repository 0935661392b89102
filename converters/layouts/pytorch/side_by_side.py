"""Several optimizers of one model, saved side by side: each numbers its parameters by itself.

    optimizers         [state_dict, state_dict], or by names of the run's own
    optimizer_states   the same, as Lightning has it
    optimizer_<name>   each under a key of its own, where none is called as a single one would be

They become the groups of one: in the order in which they lie, numbered through. Which parameters are meant is told as
for one optimizer, over all of them together: by their names, by shapes that only fit once, or by the user.
Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/trainer/connectors/checkpoint_connector.py,
`dump_checkpoint`; pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from statekit.conversion.contracts import Encoded
from statekit.converters.layouts.pytorch.networks import unpaired_network
from statekit.converters.layouts.pytorch.parts import (
    MODELS,
    OPTIMIZERS,
    PLACES,
    Parts,
    beside_optimizers,
    is_model,
    is_nested,
    networks,
    nodes,
    of_no_parameter,
    part_place,
)
from statekit.files.checkpoint import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from statekit.state.run import BESIDE
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Tree, at, loose, put, without

USUAL = "optimizers"
"""Key of the list of optimizers where a file from elsewhere has none."""


@dataclass(frozen=True)
class SideBySide:
    """Optimizers of one model.

    Attributes:
        places: Path of each in the tree.
        each: The parts of a checkpoint that had this one alone.
        joint: The parts with the groups of all.
    """

    places: tuple[Path, ...]
    each: tuple[Parts, ...]
    joint: Parts


def side_by_side(checkpoint: Checkpoint, own_model: Mapping[str, Tensor] | None = None) -> SideBySide | None:
    """Returns the optimizers that lie side by side in a checkpoint; None if there is one, or none.

    Args:
        checkpoint: The checkpoint.
        own_model: What stands for the model where the checkpoint has none.

    Raises:
        UsageError: The user named a key of the model at which there is none.
    """
    tree, model_key = checkpoint.tree, checkpoint.meta.get(MODEL_KEY)
    places = [] if is_told(checkpoint) else optimizer_places(tree)
    if not places:
        return None
    model_at = _model_place(tree, places, model_key)
    if model_at is None and own_model is None:
        return None
    model, rest = _model_and_rest(tree, model_at, _rest(tree, places), own_model or {})
    whole = Parts(
        (MODELS[0] if model_at is None else model_at, OPTIMIZERS[0]), dict(model), [], {}, "index", rest
    )
    parts, first = list[Parts](), 0
    for place in places:
        optimizer = at(tree, place)
        parts.append(_renumbered(whole, optimizer, first))
        first += max((i for i in _params(optimizer) if isinstance(i, int)), default=-1) + 1
    groups = [group for part in parts for group in part.groups]
    state = {i: record for part in parts for i, record in part.state.items()}
    return SideBySide(
        tuple(places), tuple(parts), replace(whole, groups=groups, state=state, form=parts[0].form)
    )


def _model_and_rest(
    tree: Mapping[str, Any], model_at: Path | None, rest: Mapping[str, Any], own_model: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Returns the model, and the rest of a tree without it; `own_model` where the tree has none."""
    if model_at is None:
        return own_model, rest
    if model_at:
        return at(tree, model_at), without(rest, model_at)
    model = loose(tree)
    return model, {key: part for key, part in rest.items() if key not in model}


def _renumbered(whole: Parts, optimizer: Mapping[str, Any], first: int) -> Parts:
    """Returns one optimizer beside the model, its parameters numbered from `first` on, where it numbers them."""
    numbers = {i: first + i if isinstance(i, int) else i for i in _params(optimizer)}
    return replace(
        whole,
        groups=[
            {**group, "params": [numbers[i] for i in group["params"]]} for group in optimizer["param_groups"]
        ],
        state={numbers[i]: record for i, record in optimizer["state"].items() if i in numbers},
        form="name" if any(isinstance(i, str) for i in numbers) else "index",
        common=of_no_parameter(optimizer["state"]),
    )


def is_told(checkpoint: Checkpoint) -> bool:
    """Tells whether each of several optimizers moves a network of its own, or a key names one of them."""
    model_key = checkpoint.meta.get(MODEL_KEY)
    pairs = ["/".join(map(str, model)) for model in networks(checkpoint.tree)]
    is_network = len(pairs) > 1 if model_key is None else model_key in pairs
    return is_network or checkpoint.meta.get(OPTIMIZER_KEY) is not None


def optimizer_places(tree: Tree) -> list[Path]:
    """Returns the paths of optimizers that lie side by side, at least two; none if there is a single one."""
    places = [path for path, node in nodes(tree, None) if path and is_nested(node)]
    above = {path[:-1] for path in places}
    alone = any(path in OPTIMIZERS and len(path) == 1 for path in places)
    return places if len(places) > 1 and len(above) == 1 and not alone else []


def join_side_by_side(
    extra: Mapping[str, Tree],
    step: int,
    params: Mapping[str, Tensor],
    optimizers: Sequence[Mapping[str, Any]],
    places: Sequence[Path],
    placed: Sequence[str],
) -> Encoded:
    """Returns a checkpoint's tree with several optimizers; undoes `side_by_side`.

    Args:
        extra: What `extra_of` returned, or another layout of PyTorch left.
        step: The updates done.
        params: Parameters by name.
        optimizers: Their states.
        places: Path of each in the tree.
        placed: Further keys of the extra that the layout has a place for.
    """
    kept, model, dropped = beside_optimizers(extra, params, placed)
    model_at = tuple((extra.get(PLACES) or (MODELS[0],))[0])
    tree: Tree = put(kept, model_at, model) if model_at else {**model, **kept}
    above, last = places[0][:-1], [place[-1] for place in places]
    for place in places:
        if at(tree, place) is not None:
            dropped[f"extra/{BESIDE}/{'/'.join(map(str, place))}"] = "an optimizer stands in its place"
    if all(isinstance(key, int) for key in last):  # what isn't an optimizer keeps its place among them
        siblings = at(tree, above)
        siblings = list(siblings) if isinstance(siblings, list | tuple) else []
        tree = put(tree, above, siblings + [None] * (max(last) + 1 - len(siblings)))
    for place, optimizer in zip(places, optimizers, strict=True):
        tree = put(tree, place, optimizer)
    of_each = {f"{USUAL}/{i}": place for i, place in enumerate(places)}
    return Encoded(tree, step, dropped=dropped, parts={"model": model_at, **of_each})


def _params(optimizer: Mapping[str, Any]) -> list[Any]:
    return [i for group in optimizer["param_groups"] for i in group["params"]]


def _model_place(tree: Tree, optimizers: Sequence[Path], key: str | None) -> Path | None:
    """Returns the path of the model that has the parameters of all optimizers; None if there is none."""
    most = sum(len(_params(at(tree, place))) for place in optimizers)
    models = {
        path: node
        for path, node in nodes(tree, None)
        if path
        and is_model(node)
        and len(node) >= most
        and not any(path[: len(place)] == place for place in optimizers)
    }
    if key is not None and key not in ["/".join(map(str, path)) for path in models]:
        raise unpaired_network(key, optimizers)
    place = part_place(MODELS, models, key)
    return () if place is None and key is None and is_model(loose(tree)) else place


def _rest(tree: Tree, places: Sequence[Path]) -> Tree:
    """Returns a tree without the optimizers, and without what held nothing else; None is in their place in a list."""
    last, above = {place[-1] for place in places}, places[0][:-1]
    holder = at(tree, above)
    rest: Tree = (
        {key: part for key, part in holder.items() if key not in last}
        if isinstance(holder, Mapping)
        else [None if i in last else part for i, part in enumerate(holder)]
    )
    if not above:
        return rest
    empty = all(part is None for part in rest) if isinstance(rest, list) else not rest
    return without(tree, above) if empty else put(tree, above, rest)
