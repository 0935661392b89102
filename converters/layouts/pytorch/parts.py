"""The parts of a PyTorch checkpoint: a model's state, an optimizer's in one of three forms, and everything else.

    index   {"state": {0: {slot: tensor}}, "param_groups": [{option: value, "params": [0]}]}
    name    the same with the parameters' names in place of their indices
    flat    {"state.<name>.<slot>": tensor, "param_groups.<name>.<option>": value}

Model and optimizer lie wherever a trainer puts them. torch.distributed.checkpoint.state_dict gathers an optimizer by
name, and flat with `flatten_optimizer_state_dict`. Groups are lost in the flat form: parameters with equal options are
taken as one. Both names and slots may have dots, so that only the model tells where a name ends.
Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`; torch/distributed/checkpoint/state_dict.py,
`_flatten_optim_state_dict`; Lightning-AI/pytorch-lightning,
src/lightning/pytorch/trainer/connectors/checkpoint_connector.py, `dump_checkpoint`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from statekit.conversion.contracts import Encoded, dropped_from
from statekit.converters.layouts.pytorch.networks import paired, unpaired_network
from statekit.errors import UsageError, printable
from statekit.files.checkpoint import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from statekit.state.run import BESIDE, PARTS
from statekit.tensors.tensor import TIES, Tensor, scalar, ties_of
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
from statekit.tensors.typed import Name, fits

Form: TypeAlias = Literal["index", "name", "flat"]

OPTIMIZERS: tuple[Path, ...] = (
    ("optimizer",),
    ("optimizer_state_dict",),
    ("optimizer_states", 0),
    ("optim",),
)
MODELS: tuple[Path, ...] = (
    ("model",),
    ("current_model_state",),
    ("state_dict",),
    ("model_state_dict",),
    ("module",),
)
"""Paths at which others keep an optimizer's state, and a model's; the first of each is ours.

Where Lightning averages weights, the average stands at state_dict, and what the optimizer moves beside it.
Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/callbacks/weight_averaging.py, `on_save_checkpoint`.
"""
_SWAPPED: Path = ("ema_state_dict",)
"""Where mmengine keeps the run's weights, if it averages them."""
_AVERAGE = re.compile(
    r"(?i)(.*[_.-])?(n?ema\d*|emamodel|swa|avg|averaged?|shadow|teacher|polyak|smooth(ed)?)([_.-].*)?"
)
"""What keys are called that hold an average of the weights: no optimizer moves that."""
_AVERAGES_COUNT = frozenset({"n_averaged", "initted"})
"""What an average counts, beside its weights.

Source: pytorch/pytorch torch/optim/swa_utils.py, `AveragedModel`; lucidrains/ema-pytorch, ema_pytorch.py, `EMA`.
"""
DEEPEST, MOST_PARTS = 4, 100
"""How deep below the top other places are looked for, and the longest list that is looked through."""
MASTER_PARAM = "master_param"
"""What FusedAdam calls a parameter's master. Source: NVIDIA/apex, apex/optimizers/fused_adam.py, `master_weights`."""
_MASTERS = ("fp32_from_fp16", "fp32_from_fp16_params")
_SCALING = ("loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step", "grad_scaler")
"""What a wrapper for mixed precision keeps around its optimizer: a master of each parameter, and a loss scaler.

Source: NVIDIA/apex, apex/fp16_utils/fp16_optimizer.py, `FP16_Optimizer.state_dict`; NVIDIA/Megatron-LM,
megatron/core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params.state_dict`.
"""
_SETTINGS = "base_param_settings"
"""The options that MMEngine keeps beside a wrapped optimizer's, for its log: no update takes them.

Source: open-mmlab/mmengine mmengine/optim/optimizer/optimizer_wrapper.py, `OptimWrapper.state_dict`.
"""
BUFFERS, GROUPS = "buffers", "param_groups"
"""Parts of `extra` that lie elsewhere in the file: in `model`, and in the groups; as `BESIDE` does at the top."""
PLACES = PARTS
"""Key in `extra`: where model and optimizer lie in the file."""
NAMES = "torch_names"
"""Key in `extra`: name by path, of parameters whose names have slashes, which paths have in the place of dots."""
_ANOTHER = "another_network"
"""Key of what stood where a network goes that a key told among several."""
_FLAT_STATE, _FLAT_GROUPS = "state.", "param_groups."


class ParamGroup(TypedDict):
    """A group of an optimizer, by index or by name; options are held to the optimizer's schema."""

    params: Sequence[int | Name]
    param_names: NotRequired[Sequence[Name]]


class StateDict(TypedDict):
    """An optimizer by index or by name."""

    state: dict[int | Name, dict[Name, Any]]
    param_groups: Sequence[ParamGroup]


_BRANCHES = (dict, list, tuple, Mapping)
_PLAIN = (bool, int, float, str, bytes, type(None), Tensor)


def optimizer_place(tree: Tree, key: str | None = None) -> Path | None:
    """Returns the path of an optimizer's state: at `key`, at a usual place, or of the only optimizer.

    Keys of a path are joined by `/` in `key`; the path of one that stands alone is empty.

    Raises:
        UsageError: There is none at the key.
    """
    if key is None and _is_optimizer(tree):
        return ()
    return part_place(
        OPTIMIZERS, {path: node for path, node in nodes(tree, None) if _is_optimizer(node)}, key
    )


def model_place(tree: Tree, key: str | None = None, optimizer: Path | None = None) -> Path | None:
    """Returns the path of a model's state, as `optimizer_place`; it has what `optimizer` moves.

    The path of a model whose tensors stand at the top, as torchtitan keeps them, is empty: see `loose`.

    Raises:
        UsageError: There is none at the key.
    """
    models = _models(tree, optimizer)
    if key is None and _SWAPPED in models and _is_swapped(tree):
        return _SWAPPED
    place = part_place(MODELS, models, key)
    if place is None and key is None and isinstance(tree, Mapping) and is_model(loose(tree)):
        return ()
    return place


def _is_swapped(tree: Tree) -> bool:
    """Tells whether mmengine's hook put the average where the model goes, and the run's weights where that was.

    Source: open-mmlab/mmengine mmengine/hooks/ema_hook.py, `EMAHook.before_save_checkpoint`.
    """
    meta = at(tree, ("meta",))
    return isinstance(meta, Mapping) and "mmengine_version" in meta and is_model(at(tree, ("state_dict",)))


def averaged_models(tree: Tree) -> list[str]:
    """Returns the keys of all parts that have what an optimizer moves and are called as averages, for `--model-key`."""
    models = _models(tree, optimizer_place(tree))
    return ["/".join(map(str, path)) for path in models if path not in _moved(models)]


def possible_models(tree: Tree) -> list[str]:
    """Returns the keys of all parts that may be the model of a checkpoint's optimizer, for `--model-key`."""
    models, optimizers = _moved(_models(tree, optimizer_place(tree))), optimizers_in(tree)
    return ["/".join(map(str, path)) for path in models if not _is_within(path, optimizers)]


def too_small_models(tree: Tree) -> dict[str, int]:
    """Returns the parts at a model's usual places that hold fewer tensors than an optimizer moves, with how many."""
    nodes_there = {path: at(tree, path) for path in MODELS}
    counts = {
        "/".join(map(str, path)): sum(isinstance(part, Tensor) for part in node.values())
        for path, node in nodes_there.items()
        if isinstance(node, Mapping)
    }
    return {place: count for place, count in counts.items() if count}


def is_average(key: str) -> bool:
    """Tells whether a key is called as an average of the weights is."""
    return _AVERAGE.fullmatch(key) is not None


def _moved(models: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the parts that may be what an optimizer moves: no averages."""
    return {
        path: node
        for path, node in models.items()
        if not any(isinstance(key, str) and is_average(key) for key in path)
        and not _AVERAGES_COUNT & {str(key) for key in node}
    }


def _models(tree: Tree, optimizer: Path | None) -> dict[Path, Any]:
    """Returns every part that may be a model, and that of an optimizer if its path is given."""
    models = {path: node for path, node in nodes(tree, optimizer) if path and is_model(node)}
    if optimizer is None:
        return models
    moved = at(tree, optimizer)
    return {path: node for path, node in models.items() if _may_be_of(moved, node)}


def _may_be_of(optimizer: Mapping[str, Any], model: Mapping[str, Tensor]) -> bool:
    """Tells whether a model has the names that an optimizer moves, or, of numbers, enough tensors."""
    if is_flat(optimizer):
        return nested_form(optimizer, model) is not None
    params = [param for group in optimizer["param_groups"] for param in group["params"]]
    return len(model) >= len(params) and all(param in model for param in params if isinstance(param, str))


def part_place(usual: Sequence[Path], models: Mapping[Path, Any], key: str | None) -> Path | None:
    """Returns the path of a part: at `key`, at a usual place, or of the only part.

    Raises:
        UsageError: There is none at the key.
    """
    if key is None:
        models = _moved(models)
        place = next((path for path in usual if path in models), None)
        return next(iter(models)) if place is None and len(models) == 1 else place
    names = {"/".join(map(str, path)): path for path in models}
    if key not in names:
        raise UsageError(
            "The checkpoint has no such part at this key.",
            expected=", ".join(names) or "there is none",
            found=key,
        )
    return names[key]


def nodes(tree: Tree, other: Path | None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields what lies near the top of a tree, with paths; nothing at or below another part."""
    if path == other:
        return
    yield path, tree
    if len(path) < DEEPEST:
        keys: Iterable[Any] = tree if isinstance(tree, Mapping) else ()
        keys = range(len(tree)) if isinstance(tree, (list, tuple)) and len(tree) < MOST_PARTS else keys
        for key in keys:
            if isinstance(part := tree[key], _BRANCHES):
                yield from nodes(part, other, (*path, key))


def model_in(tree: Tree) -> Tree:
    """Returns a model's state in a tree; the tree itself where it is nothing else."""
    return next((at(tree, path) for path in MODELS if is_model(at(tree, path))), tree)


def _is_optimizer(node: Any) -> bool:
    return is_flat(node) or is_nested(node)


def is_model(node: Any) -> bool:
    """Tells whether a part of a tree may be a model: tensors by name, and nothing else."""
    return bool(node) and fits(node, dict[Name, Tensor])


@dataclass(frozen=True)
class Parts:
    """The parts of a checkpoint.

    Attributes:
        places: Path of the model's state in the tree, and of the optimizer's.
        model: Every tensor of the model by name, parameters and buffers.
        groups: The optimizer's groups.
        state: The optimizer's state by index, or by name.
        form: How it lies in the file.
        rest: The tree without model and optimizer.
        common: What the optimizer's state holds of no parameter, by name.
    """

    places: tuple[Path, Path]
    model: Mapping[str, Tensor]
    groups: Sequence[Mapping[str, Any]]
    state: Mapping[Any, Mapping[str, Any]]
    form: Form
    rest: Tree
    common: Mapping[str, Any] = field(default_factory=dict)


def find_parts(checkpoint: Checkpoint, own_model: Mapping[str, Tensor] | None = None) -> Parts | None:
    """Returns the parts of a checkpoint; None if it hasn't them.

    Args:
        checkpoint: The checkpoint.
        own_model: What stands for the model where the checkpoint has none.

    Raises:
        UsageError: The user named a key at which there is no such part.
    """
    tree = checkpoint.tree
    places = _places(tree, checkpoint.meta.get(MODEL_KEY), checkpoint.meta.get(OPTIMIZER_KEY))
    if places is None:
        return None
    model_at, optimizer_at = places
    if model_at is None:
        if own_model is None:
            return None
        model, rest = own_model, without(tree, optimizer_at) if optimizer_at else {}
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
    common = of_no_parameter(parts["state"])
    records = {index: record for index, record in parts["state"].items() if index not in common}
    state, wrapper = _with_masters(records, parts["param_groups"], _wrapper_of(tree, optimizer_at))
    return Parts(placed, dict(model), parts["param_groups"], state, form, rest, {**wrapper, **common})


def _places(tree: Tree, model_key: str | None, optimizer_key: str | None) -> tuple[Path | None, Path] | None:
    """Returns the paths of the model, None if there is none, and of its optimizer; None without an optimizer."""
    if network := _network(tree, model_key, optimizer_key):
        return network
    optimizer_at = optimizer_place(tree, optimizer_key)
    if optimizer_at is None and model_key is not None and len(optimizers := optimizers_in(tree)) > 1:
        raise unpaired_network(model_key, optimizers)
    if optimizer_at is None:
        return None
    return model_place(tree, model_key, optimizer_at) if optimizer_at else None, optimizer_at


def networks(tree: Tree) -> dict[Path, Path]:
    """Returns the path of the optimizer of each network, where a file has several optimizers and names pair them."""
    optimizers = optimizers_in(tree)
    if len(optimizers) < 2:
        return {}
    models = _moved({path: node for path, node in nodes(tree, None) if path and is_model(node)})
    models = {path: node for path, node in models.items() if not _is_within(path, optimizers)}
    pairs = paired(models, optimizers)
    return {path: at_ for path, at_ in pairs.items() if _may_be_of(optimizers[at_], models[path])}


def optimizers_in(tree: Tree) -> dict[Path, Any]:
    """Returns every optimizer of a tree by its path."""
    return {path: node for path, node in nodes(tree, None) if path and _is_optimizer(node)}


def _is_within(path: Path, places: Iterable[Path]) -> bool:
    return any(path[: len(place)] == place for place in places)


def _network(tree: Tree, model_key: str | None, optimizer_key: str | None) -> tuple[Path, Path] | None:
    """Returns the paths of a network and its optimizer, if one of the two keys is given and names pair them."""
    if (model_key is None) == (optimizer_key is None):
        return None
    pairs = networks(tree).items()
    return next(
        (
            pair
            for pair in pairs
            if (model_key or optimizer_key) in ["/".join(map(str, path)) for path in pair]
        ),
        None,
    )


def _wrapper_of(tree: Tree, optimizer_at: Path) -> Mapping[str, Any]:
    """Returns the tensors and options that a wrapper around an optimizer keeps; empty without a wrapper.

    A wrapper has the wrapped one's state_dict under a key, in the place of an optimizer; or it adds tensors to that.
    """
    inner = at(tree, optimizer_at)
    further = {} if is_flat(inner) else without(without(inner, ("state",)), ("param_groups",))
    added = {
        key: part
        for key, part in further.items()
        if key != _SETTINGS and any(isinstance(leaf, Tensor) for _, leaf in walk(part))
    }
    if len(optimizer_at) < 2 or optimizer_at[:1] not in OPTIMIZERS:
        return added
    outer = at(tree, optimizer_at[:-1])
    around = without(outer, optimizer_at[-1:]) if isinstance(outer, Mapping) else {}
    return {**around, **added}


def _with_masters(
    state: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], wrapper: Mapping[str, Any]
) -> tuple[Mapping[Any, Mapping[str, Any]], Mapping[str, Any]]:
    """Returns records with the masters that a wrapper for mixed precision keeps, and what else it keeps.

    Args:
        state: A record for each parameter, by its number.
        groups: The optimizer's groups.
        wrapper: What the wrapper keeps. A wrapper whose lists leave parameters out stays as it is.
    """
    copies: list[Any] = next((wrapper[key] for key in _MASTERS if isinstance(wrapper.get(key), list)), [])
    numbers = [group["params"] for group in groups]
    if not copies or [len(part) if isinstance(part, list) else -1 for part in copies] != [*map(len, numbers)]:
        return state, wrapper
    masters = {
        i: {MASTER_PARAM: master}
        for of_group, part in zip(numbers, copies, strict=True)
        for i, master in zip(of_group, part, strict=True)
    }
    rest = {key: part for key, part in wrapper.items() if key not in (*_MASTERS, *_SCALING)}
    return {**state, **{i: {**state.get(i, {}), **master} for i, master in masters.items()}}, rest


def _ties_and_rest(parts: Parts, moved: Sequence[str]) -> tuple[dict[str, str], Tree]:
    """Returns the other names of moved parameters, by shared memory and as the file states them, and the rest of it."""
    taken = set(moved)
    ties = {name: param for name, param in ties_of(parts.model, moved).items() if name not in taken}
    if isinstance(parts.rest, Mapping) and are_ties(parts.rest.get(TIES), parts.model):
        return {**parts.rest[TIES], **ties}, without(parts.rest, (TIES,))
    return ties, parts.rest


def extra_of(parts: Parts, params: Iterable[str], options: Iterable[str]) -> dict[str, Tree]:
    """Returns what a checkpoint holds beside parameters, slots and hyperparameters.

    Args:
        parts: The checkpoint.
        params: Names of the parameters: what else the model has are buffers, or frozen.
        options: Keys of the groups that became hyperparameters.
    """
    taken, read = set(params), {*options, "params", "param_names"}
    moved = [name for name in parts.model if name in taken]
    ties, rest = _ties_and_rest(parts, moved)
    extra: dict[str, Any] = {
        BUFFERS: {name: leaf for name, leaf in parts.model.items() if name not in taken and name not in ties},
        TIES: {path_of(name): path_of(tie) for name, tie in ties.items()},
        NAMES: stated_names([*moved, *ties]),
        GROUPS: [
            {key: value for key, value in group.items() if key not in read or isinstance(value, Tensor)}
            for group in parts.groups
        ],
        BESIDE: rest if isinstance(rest, Mapping) else _by_position(rest),
        PLACES: [list(place) for place in parts.places],
    }
    return {key: part for key, part in extra.items() if part}


def _by_position(rest: Sequence[Tree]) -> dict[str, Tree]:
    """Returns what a saved list or tuple holds beside model and optimizer, by its position."""
    return {
        f"{i}": part
        for i, part in enumerate(rest)
        if part is not None and (part or not isinstance(part, dict | list))
    }


def path_of(name: str) -> str:
    """Returns the path of a parameter's name."""
    return name.replace(".", "/")


def stated_names(names: Iterable[str]) -> dict[str, str]:
    """Returns name by path, of those names that their paths don't tell."""
    return {path_of(name): name for name in names if "/" in name}


def shared_paths(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the names whose path an earlier one has: `a/b` beside `a.b`."""
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(path_of(name), name)) != name:
            yield f"has the path {path_of(name)}, as has {other}", name


def names_of(extra: Mapping[str, Tree], paths: Iterable[str]) -> dict[str, str]:
    """Returns the names that parameters have in torch, by path: those that they had there, else with dots for slashes.

    Args:
        extra: The state's.
        paths: The parameters.
    """
    stated: Any = extra.get(NAMES)
    names: Mapping[str, str] = stated if fits(stated, dict[Name, Name]) else {}
    return {path: names.get(path, path.replace("/", ".")) for path in paths}


def join_parts(
    extra: Mapping[str, Tree],
    step: int,
    params: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    state: Mapping[Any, Any],
    placed: Sequence[str] = (),
    form: Form = "index",
) -> Encoded:
    """Returns a checkpoint's tree, with what had to be left out of it; undoes `find_parts` and `extra_of`.

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
    if any(isinstance(place[0], int) for place in (model_at, optimizer_at) if place):
        # The source was a list or a tuple as a whole; what is written is a dict.
        model_at, optimizer_at = MODELS[0], OPTIMIZERS[0]
    extra, unnamed = nameable(extra) if form == "flat" else (extra, {})
    full = with_others(extra, groups)
    kept, model, dropped = beside_optimizers(extra, params, placed)
    dropped |= unnamed
    optimizer = {"state": dict(state), "param_groups": full} if form != "flat" else flat_form(state, full)
    model_at, optimizer_at = tuple(model_at), tuple(optimizer_at)
    tree = _put_parts(kept, model, optimizer, model_at, optimizer_at)
    if not _are_found(tree, model_at, optimizer_at):  # a key told them, which the target doesn't know
        kept = _another_aside(kept)
        model_at = next(place for place in MODELS if place[0] not in kept)
        optimizer_at = next(place for place in OPTIMIZERS if place[0] not in kept)
        tree = _put_parts(kept, model, optimizer, model_at, optimizer_at)
    parts = {"model": model_at, "optimizer": optimizer_at}
    return with_names(Encoded(tree, step, dropped=dropped, parts=parts))


def _another_aside(kept: Mapping[Any, Tree]) -> dict[Any, Tree]:
    """Returns what a file has beside a network, with another that stands where this one goes under a key of its own."""
    usual = {place[0] for place in (*MODELS, *OPTIMIZERS)}
    another = {
        key: part for key, part in kept.items() if key in usual and (is_model(part) or _is_optimizer(part))
    }
    rest = {key: part for key, part in kept.items() if key not in another}
    return {**rest, **({_ANOTHER: another} if another else {})}


def nameable(extra: Mapping[str, Tree]) -> tuple[Mapping[str, Tree], dict[str, str]]:
    """Returns an extra whose groups hold only what can be named by text, and name -> reason of what had to go.

    The flat form and Megatron-Core make names of a group's keys, which are Unicode; a pickle's keys may be anything.
    """
    others, dropped = [dict(group) for group in extra.get(GROUPS) or []], dict[str, str]()
    for i, group in enumerate(others):
        for key in [key for key in group if not fits(key, Name)]:
            del group[key]
            dropped[f"extra/{GROUPS}/{i}/{printable(key)}"] = "its key isn't Unicode text, and names are"
    return ({**extra, GROUPS: others}, dropped) if dropped else (extra, dropped)


def with_others(extra: Mapping[str, Tree], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns an optimizer's groups with what the extra holds for each."""
    others = [*(extra.get(GROUPS) or ()), *({} for _ in groups)]
    return [
        {**rest, **group, **_tensors_of(rest, group)} for rest, group in zip(others, groups, strict=False)
    ]


def _tensors_of(others: Mapping[str, Tree], group: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns the options that the file stores as tensors of one number, unless they were changed."""
    return {
        key: value
        for key, value in others.items()
        if isinstance(value, Tensor) and key in group and scalar(value) == group[key]
    }


def beside_optimizers(
    extra: Mapping[str, Tree], params: Mapping[str, Tensor], placed: Sequence[str]
) -> tuple[dict[Any, Tree], dict[str, Tensor], dict[str, str]]:
    """Returns what a file has beside its optimizers, and the model, and what had to be left out.

    Args:
        extra: What `extra_of` returned, or another layout of PyTorch left.
        params: Parameters by name.
        placed: Further keys of the extra that the layout has a place for.
    """
    extra_parts = extra.get(BESIDE) or {}
    kept = {key: part for key, part in extra_parts.items() if is_plain(part)}
    dropped = not_plain(extra_parts, f"extra/{BESIDE}")
    model = {**params, **tied(extra, params), **(extra.get(BUFFERS) or {})}
    used = (BUFFERS, GROUPS, BESIDE, PLACES, TIES, NAMES, *placed)
    return kept, model, dropped | dropped_from(extra, used, "the file")


def _put_parts(rest: Tree, model: Tree, optimizer: Tree, model_at: Path, optimizer_at: Path) -> Tree:
    tree = put(rest, model_at, model) if model_at else {**model, **rest}
    return put(tree, optimizer_at, optimizer)


def _are_found(tree: Tree, model_at: Path, optimizer_at: Path) -> bool:
    """Tells whether parts of a tree would be found where they are."""
    usual = model_at in (*MODELS, ()) and optimizer_at in OPTIMIZERS
    return usual or (
        optimizer_place(tree) == optimizer_at and model_place(tree, None, optimizer_at) == model_at
    )


def are_ties(part: Any, model: Mapping[str, Tensor]) -> bool:
    """Tells whether a part of a tree names further names of a model's tensors, which the model itself hasn't."""
    return isinstance(part, Mapping) and all(
        isinstance(name, str) and isinstance(item, str) and name not in model and item in model
        for name, item in part.items()
    )


def tied(extra: Mapping[str, Tree], params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the parameters again that a model has under further names, by these; each the very same tensor.

    Args:
        extra: The state's.
        params: By the names that they have in torch.
    """
    ties = {str(further): str(path) for further, path in (extra.get(TIES) or {}).items()}
    names = names_of(extra, [*ties, *ties.values()])
    return {names[further]: params[names[path]] for further, path in ties.items() if names[path] in params}


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
            content = f"an object of {objects[0]}" if objects else "what isn't plain data"
            reason = f"{key} holds {content}, and a torch file that loads with weights_only can't hold it"
            dropped |= {f"{under}/{name}": reason for name in leaf_names({key: part})}
    return dropped


def is_plain(part: Tree) -> bool:
    """Tells whether a file that loads with weights_only can hold a part."""
    return not holds_records(part) and all(
        isinstance(leaf, _PLAIN) or leaf in ({}, [], ()) for _, leaf in walk(part)
    )


def is_flat(node: Any) -> bool:
    """Tells whether a part of a tree is an optimizer in the flat form; options may be missing."""
    return (
        isinstance(node, Mapping)
        and bool(node)
        and all(isinstance(key, str) and key.startswith((_FLAT_STATE, _FLAT_GROUPS)) for key in node)
        and fits(node, dict[Name, Any])
    )


def is_nested(node: Any) -> bool:
    """Tells whether a part of a tree is an optimizer by index or by name."""
    if not looks_nested(node) or not isinstance(node["state"], Mapping):
        return False
    common = of_no_parameter(node["state"])
    records = {index: record for index, record in node["state"].items() if index not in common}
    return fits({**node, "state": records}, StateDict)


def of_no_parameter(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns what an optimizer's state holds of no parameter, under a name of its own: a count of all, mostly.

    A table under a name is a parameter's record, unless parameters have numbers.

    Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`, which packs every key that is no tensor
    as it is; facebookresearch/madgrad madgrad/madgrad.py, `state['k']`; kozistr/pytorch_optimizer
    pytorch_optimizer/optimizer/emonavi.py, `state['ema']`.
    """
    are_numbered = any(isinstance(index, int) for index in state)
    return {
        index: entry
        for index, entry in state.items()
        if isinstance(index, str) and (are_numbered or not isinstance(entry, Mapping))
    }


def looks_nested(node: Any) -> bool:
    """Tells whether a part of a tree has the parts of an optimizer by index or by name, whatever they hold."""
    return isinstance(node, Mapping) and {"state", "param_groups"} <= node.keys()


def nested_form(optimizer: Mapping[str, Any], names: Iterable[str]) -> tuple[Mapping[str, Any], Form] | None:
    """Returns an optimizer with `state` and `param_groups`, and the form that it was in.

    Args:
        optimizer: In any of the forms; indices may have become text, as paths of a distributed checkpoint are.
        names: The model's.

    Returns:
        None if a flat key begins with no name of the model.
    """
    if is_flat(optimizer):
        nested = _nested(optimizer, set(names))
        return None if nested is None else (nested, "flat")
    groups, state = optimizer["param_groups"], optimizer["state"]
    params = [param for group in groups for param in group["params"]]
    if any(isinstance(param, str) for param in params):
        return optimizer, "name"
    numbered = {
        int(i) if isinstance(i, str) and i.isdecimal() and len(i) < 10 else i: record
        for i, record in state.items()
    }
    return {**optimizer, "state": numbered}, "index"


def by_name(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Any, str]] | None:
    """Returns an optimizer under the names that its groups give its indices, and name by index; None if they don't."""
    names: dict[Any, str] = {}
    for group in optimizer["param_groups"]:
        param_names = group.get("param_names")
        if not isinstance(param_names, list) or len(param_names) != len(group["params"]):
            return None
        names |= zip(group["params"], param_names, strict=True)
    if not all(isinstance(i, int) for i in names) or not optimizer["state"].keys() <= names.keys():
        return None
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in optimizer["param_groups"]]
    return {
        **optimizer,
        "state": {names[i]: record for i, record in optimizer["state"].items()},
        "param_groups": groups,
    }, names


def with_names(encoded: Encoded) -> Encoded:
    """Returns an encoded state with the one whose optimizers are by name beside it, if their groups know the names."""
    tree, renamed = dict(encoded.tree), dict[str, str]()
    for place, part in encoded.tree.items():
        named = by_name(part) if is_nested(part) else None
        if named:
            tree[place], names = named
            renamed |= {f"{place}/state/{i}/": f"{place}/state/{name}/" for i, name in names.items()}
    if not renamed:
        return encoded
    exactness = {_renamed(name, renamed): why for name, why in encoded.exactness.items()}
    return replace(encoded, by_name=replace(encoded, tree=tree, exactness=exactness))


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    head, slash, slot = name.rpartition("/")
    return renamed.get(f"{head}{slash}", f"{head}{slash}") + slot


def by_index(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an optimizer under the indices of its parameters over all groups; undoes `by_name`."""
    lists = [group["params"] for group in optimizer["param_groups"]]
    if not all(isinstance(members, Sequence) for members in lists):
        return optimizer
    params = [param for members in lists for param in members]
    if not params or not all(isinstance(param, str) for param in params):
        return optimizer
    index = {name: i for i, name in enumerate(params)}
    groups = [
        {**group, "params": [index[name] for name in group["params"]]} for group in optimizer["param_groups"]
    ]
    state = {index.get(name, name): record for name, record in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def flat_form(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Tree]:
    """Returns the flat form of an optimizer that is by name."""
    flat = {
        key: leaf for name, record in state.items() for key, leaf in _flat(f"{_FLAT_STATE}{name}", record)
    }
    for group in groups:
        flat |= {
            f"{_FLAT_GROUPS}{name}.{option}": value
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }
    return flat


def _flat(prefix: str, record: Mapping[Any, Any]) -> Iterable[tuple[str, Tree]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", value


def _nested(flat: Mapping[str, Any], names: set[str]) -> dict[str, Any] | None:
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        inner, rest = (
            (state, key.removeprefix(_FLAT_STATE))
            if key.startswith(_FLAT_STATE)
            else (options, key.removeprefix(_FLAT_GROUPS))
        )
        name = _owner(rest, names)
        if name is None:
            return None
        inner.setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Any]] = []
    for name, param_options in options.items():
        same = next(
            (group for group in groups if _equal({**param_options, "params": group["params"]}, group)), None
        )
        if same is None:
            groups.append({**param_options, "params": [name]})
        else:
            same["params"].append(name)
    bare = [name for name in state if name not in options]
    return {"state": state, "param_groups": [*groups, *([{"params": bare}] if bare else [])]}


def _owner(rest: str, names: set[str]) -> str | None:
    """Returns the longest name that a key begins with."""
    name = rest
    while "." in name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Tells whether two groups have the same options; tensors are equal only to themselves."""
    if left.keys() != right.keys():
        return False
    return all(
        left[key] is right[key]
        if isinstance(left[key], Tensor) or isinstance(right[key], Tensor)
        else type(left[key]) is type(right[key]) and left[key] == right[key]
        for key in left
    )
