"""Axes along which tensor-parallel ranks cut the parameters of Megatron-Core's GPTModel; the others are replicated.

Input: pieces of all ranks, or a whole parameter. Output: the other. A gated linear_fc1 is a gate and an up on each
rank, and `linear_qkv` has whole groups of heads.
Source: NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py; core/transformer/mlp.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from statekit.errors import CorruptError, RefusedError
from statekit.tensors.boxes import Agreed, Cut, Joined
from statekit.tensors.tensor import Tensor

_FIRST = re.compile(
    r"(^|\.)((embedding\.word_embeddings|output_layer|linear_qkv|linear_fc1)\.weight|(linear_qkv|linear_fc1|output_layer)\.bias)$"
)
"""Parameters that ranks cut along the first axis."""
_SECOND = re.compile(r"(^|\.)(linear_proj|linear_fc2)\.weight$")
_WHOLE = re.compile(r"(norm_?\w*|linear_proj|linear_fc2|position_embeddings)[._](weight|bias)$")
"""Parameters that each rank has whole."""
_HALVES = re.compile(r"(^|\.)linear_fc1\.(weight|bias)$")
_LOCAL = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_IN_LAYER = re.compile(rf"(decoder\.layers\.(?:\d+\.)?)({'|'.join(map(re.escape, _LOCAL))})")
"""Norms of a local spec's modules, and what Megatron-Core calls them in torch_dist.

Source: megatron-core 0.16.1, core/models/gpt/gpt_layer_specs.py, `sharded_state_dict_keys_map`.
"""
_DRIFTED = (
    "resume the run once in Megatron-LM, which sums these gradients over ranks, or save it with torch_dist"
)


def key_of(name: str) -> str:
    """Returns the key of torch_dist for a tensor, or for a slot of one, whatever spec its module is of."""
    return _IN_LAYER.sub(lambda match: match[1] + _LOCAL[match[2]], name)


def is_gated(model: Mapping[str, Tensor]) -> bool:
    """Tells whether linear_fc1 has a gate: twice the rows that linear_fc2 has columns."""
    return any(
        (second := model.get(name.replace("linear_fc1", "linear_fc2"))) is not None
        and tensor.shape[:1] == tuple(2 * columns for columns in second.shape[-1:])
        for name, tensor in model.items()
        if name.endswith("linear_fc1.weight")
    )


def joined(key: str, name: str, pieces: Sequence[Tensor], gated: bool, place: object) -> Tensor:
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
    raise _not_told(name, place)


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


def piece_of(name: str, whole: Tensor, rank: int, count: int, gated: bool) -> Tensor:
    """Returns a rank's piece of a parameter; undoes `joined`.

    Args:
        name: The parameter's name.
        whole: The parameter, or a slot of one.
        rank: The rank's number.
        count: How many ranks there are.
        gated: Whether linear_fc1 has a gate.

    Raises:
        RefusedError: Nothing says how ranks cut it, or they can't cut it evenly.
    """
    axis = 1 if _SECOND.search(name) else 0 if _FIRST.search(name) else None
    if count == 1 or (axis is None and _WHOLE.search(name)):
        return whole
    halves = gated and bool(_HALVES.search(name))
    parts = 2 * count if halves else count
    if axis is None or whole.shape[axis] % parts:
        raise _not_told(name, None)
    size = whole.shape[axis] // parts
    starts = [rank * size, (count + rank) * size] if halves else [rank * size]
    cuts = [
        Cut(
            whole,
            tuple(slice(at, at + size) if i == axis else slice(0, n) for i, n in enumerate(whole.shape)),
        )
        for at in starts
    ]
    return _along(0, cuts) if halves else cuts[0]


def _not_told(name: str, place: object) -> RefusedError:
    return RefusedError(
        "Nothing says how ranks cut a parameter.",
        place=place,
        expected="parameters of Megatron-Core's GPTModel",
        found=name,
        remedy="load the run with Megatron-LM and save it with --ckpt-format torch_dist",
    )
