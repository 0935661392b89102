"""Files of Megatron-LM's format `torch` put together: what tensor-parallel ranks hold is joined, numbers get names.

    ranks  model      <name>: a rank's piece of a parameter; a layer's names count on
           optimizer  state/<number>/{step, exp_avg, exp_avg_sq}, param_groups; below `optimizer` beside masters
                      fp32_from_fp16_params/<group>: float32 masters of what has less

In go the ranks in the order of `mp_rank_`. Out comes the form that torch_dist has, with a key for each layer: whole
tensors under flat keys, groups without parameters, and one count. Norms of a local spec have the names of torch_dist.
Which axis ranks cut is a fact of Megatron-Core's modules. A gated linear_fc1 is a gate and an up on each rank.
Source: NVIDIA/Megatron-LM megatron/training/checkpointing.py, `generate_state_dict`; megatron/core/tensor_parallel/
layers.py; core/transformer/mlp.py; core/optimizer/optimizer.py, `Float16OptimizerWithFloat16Params.state_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statekit.converters.layouts.megatron.groups import params_of_groups
from statekit.errors import CorruptError, Faults, RefusedError, StateError
from statekit.tensors.boxes import Agreed, Cut, Joined
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

RANKS, COMMON, SHARDED = "ranks", "common", "sharded"
_MASTERS = "fp32_from_fp16_params"
_FIRST = re.compile(
    r"(^|\.)((embedding\.word_embeddings|output_layer|linear_qkv|linear_fc1)\.weight|(linear_qkv|linear_fc1|output_layer)\.bias)$"
)
"""Parameters that ranks cut along the first axis."""
_SECOND = re.compile(r"(^|\.)(linear_proj|linear_fc2)\.weight$")
_WHOLE = re.compile(r"(norm_?\w*|linear_proj|linear_fc2|position_embeddings)[._](weight|bias)$")
"""Parameters that each rank has whole."""
_HALVES = re.compile(r"(^|\.)linear_fc1\.(weight|bias)$")
_COUNTED = "No file says how many tensor-parallel ranks the run had: those here are taken for all ({})."
_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_IN_LAYER = re.compile(rf"(decoder\.layers\.(?:\d+\.)?)({'|'.join(map(re.escape, _LOCAL))})")
"""Norms of a local spec's modules, and what Megatron-Core calls them in torch_dist.

Source: megatron-core 0.16.1, core/models/gpt/gpt_layer_specs.py, `sharded_state_dict_keys_map`.
"""
_RANDOM = "Random states of ranks other than the first stay behind."
_DRIFTED = (
    "resume the run once in Megatron-LM, which sums these gradients over ranks, or save it with torch_dist"
)


def has_ranks(tree: Tree) -> bool:
    """Tells whether a tree is of files of the format `torch`, rank by rank."""
    return isinstance(tree, Mapping) and isinstance(tree.get(RANKS), Mapping)


def without_ranks(
    tree: Mapping[str, Any], place: object
) -> tuple[dict[str, Any], dict[str, Tree], tuple[str, ...]]:
    """Returns what is cut by no rank, what ranks hold as one, and what stays behind.

    Raises:
        StateError: Numbers don't fit the model's parameters.
        CorruptError: Ranks are of several iterations, or their pieces don't fit.
        RefusedError: Nothing says how pieces join.
    """
    ranks = list(tree[RANKS].values())
    _check_alike(ranks, place)
    slots = [_by_name(rank, place) for rank in ranks]
    models = [_params(rank["model"]) for rank in ranks]
    gated = _is_gated(models[0])
    sharded: dict[str, Tree] = {
        key_of(name): _joined(name, name, [model[name] for model in models], gated, place)
        for name in models[0]
    }
    for key, (name, _) in slots[0].items():
        sharded[key_of(key)] = _joined(key, name, [of_rank[key][1] for of_rank in slots], gated, place)
    optimizer, outer = _inner(ranks[0]["optimizer"]), ranks[0]["optimizer"]
    whole = {
        "state": {"common_step": _step(optimizer, place)},
        "param_groups": [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]
        ],
    }
    if optimizer is not outer:
        rest = {key: part for key, part in outer.items() if key not in ("optimizer", _MASTERS)}
        whole = {**rest, "optimizer": whole}
    return {**tree[COMMON], "optimizer": whole}, sharded, _notes(tree)


def _notes(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns what stays behind, and what is assumed of the ranks: the container holds them to the arguments."""
    random = (_RANDOM,) if len(tree[RANKS]) > 1 and "rng_state" in tree[COMMON] else ()
    counted = (_COUNTED.format(", ".join(tree[RANKS])),) if tree[COMMON].get("args") is None else ()
    return (*random, *counted)


def key_of(name: str) -> str:
    """Returns the key of torch_dist for a tensor, or for a slot of one, whatever spec its module is of."""
    return _IN_LAYER.sub(lambda match: match[1] + _LOCAL[match[2]], name)


def _params(model: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: part for name, part in model.items() if isinstance(part, Tensor)}


def _inner(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what has the groups: the optimizer, or the one beside masters."""
    inner = optimizer.get("optimizer", optimizer)
    return inner if isinstance(inner, Mapping) else {}


def _check_alike(ranks: Sequence[Mapping[str, Any]], place: object) -> None:
    """Refuses ranks of several iterations, and such as hold other parameters."""
    for noun, pieces in (
        ("iterations", [rank.get("iteration") for rank in ranks]),
        ("parameters", [list(_params(rank["model"])) for rank in ranks]),
    ):
        if any(part != pieces[0] for part in pieces):
            raise CorruptError(
                f"The ranks of this run hold other {noun}.",
                place=place,
                expected=f"files of one iteration, mp_rank_00 to mp_rank_{len(ranks) - 1:02d}",
                found=", ".join(str(part)[:40] for part in pieces[:5]) if noun == "iterations" else "",
            )


def _by_name(rank: Mapping[str, Any], place: object) -> dict[str, tuple[str, Tensor]]:
    """Returns a rank's slots by the flat keys of torch_dist, each with its parameter.

    Raises:
        StateError: Groups have other numbers, or slots other shapes, than the model's parameters.
    """
    model, optimizer = _params(rank["model"]), _inner(rank["optimizer"])
    groups, state = optimizer.get("param_groups"), optimizer.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise StateError("The optimizer of a rank has no groups or no state.", place=place)
    names = params_of_groups(groups, {name: tensor.shape for name, tensor in model.items()}, place)
    faults, slots = Faults(), dict[str, tuple[str, Tensor]]()
    for group, named in zip(groups, names, strict=True):
        numbers = group.get("params", [])
        if len(numbers) != len(named):
            faults.add(
                f"moves {len(numbers)} parameters, and the model has {len(named)} of its kind", "param_groups"
            )
            continue
        for number, name in zip(numbers, named, strict=True):
            for key, tensor in _tensors(state.get(number)):
                slots[f"optimizer.state.{key}.{name}"] = name, tensor
    for name, tensor in _masters(rank["optimizer"], names, model):
        slots[f"optimizer.state.fp32_param.{name}"] = name, tensor
    faults += [
        (f"has shape {tensor.shape}, and its parameter {model[name].shape}", key)
        for key, (name, tensor) in slots.items()
        if tensor.shape != model[name].shape
    ]
    faults.check(StateError, "The optimizer's numbers don't fit the model's parameters", place=place)
    return slots


def _tensors(record: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the slots of a parameter, without its count."""
    for key, part in record.items() if isinstance(record, Mapping) else ():
        if key != "step" and isinstance(part, Tensor):
            yield key, part


def _masters(
    optimizer: Mapping[str, Any], names: Sequence[Sequence[str]], model: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the float32 copies of parameters that have less, by name; others have none."""
    kept = optimizer.get(_MASTERS, ())
    for tensors, named in zip(kept if isinstance(kept, list) else (), names, strict=False):
        low = [name for name in named if model[name].dtype.itemsize < 4]
        yield from zip(low, tensors, strict=False)


def _step(optimizer: Mapping[str, Any], place: object) -> Any:
    """Returns the count of updates that all parameters have.

    Raises:
        StateError: They have several.
    """
    records = [record for record in optimizer["state"].values() if isinstance(record, Mapping)]
    steps = [record["step"] for record in records if "step" in record]
    counts = {float(step.read()) if isinstance(step, Tensor) else float(step) for step in steps}
    if len(counts) > 1:
        raise StateError(
            "Parameters have made other numbers of updates, and Megatron-Core keeps one for all.",
            place=place,
            found=", ".join(f"{count:g}" for count in sorted(counts)[:5]),
        )
    return steps[0] if steps else next((g["step"] for g in optimizer["param_groups"] if "step" in g), None)


def _is_gated(model: Mapping[str, Tensor]) -> bool:
    """Tells whether linear_fc1 has a gate: twice the rows that linear_fc2 has columns."""
    return any(
        (second := model.get(name.replace("linear_fc1", "linear_fc2"))) is not None
        and tensor.shape[0] == 2 * second.shape[-1]
        for name, tensor in model.items()
        if name.endswith("linear_fc1.weight")
    )


def _joined(key: str, name: str, pieces: Sequence[Tensor], gated: bool, place: object) -> Tensor:
    """Returns a parameter, or a slot of one, of the pieces that ranks hold.

    Raises:
        RefusedError: Nothing says how they join.
    """
    if len(pieces) == 1:
        return pieces[0]
    if len({piece.shape for piece in pieces}) != 1:
        raise CorruptError("Ranks hold pieces of several shapes.", place=f"{key} in {place}")
    if _SECOND.search(name):
        return _along(1, pieces)
    if _FIRST.search(name):
        return _halves(pieces) if gated and _HALVES.search(name) else _along(0, pieces)
    if _WHOLE.search(name):
        return Agreed(tuple(pieces), key, _DRIFTED)
    raise RefusedError(
        "Nothing says how ranks cut a parameter.",
        place=place,
        expected="parameters of Megatron-Core's GPTModel",
        found=name,
        remedy="load the run with Megatron-LM and save it with --ckpt-format torch_dist",
    )


def _along(axis: int, pieces: Sequence[Tensor]) -> Tensor:
    """Returns pieces of one shape, one after the other along an axis."""
    shape = list(pieces[0].shape)
    boxes = {
        tuple(rank * shape[axis] if at == axis else 0 for at in range(len(shape))): piece
        for rank, piece in enumerate(pieces)
    }
    shape[axis] *= len(pieces)
    return Joined(boxes, tuple(shape))


def _halves(pieces: Sequence[Tensor]) -> Tensor:
    """Returns the first halves of all pieces, then the second ones."""
    rows, rest = pieces[0].shape[0] // 2, tuple(slice(0, n) for n in pieces[0].shape[1:])
    cuts = [Cut(piece, (slice(at, at + rows), *rest)) for at in (0, rows) for piece in pieces]
    return _along(0, cuts)
