"""Names of one parameter in a model and in its checkpoint, where a wrapper or an adapter changes them.

Input: the names of both sides. Output: pairs: names that are equal but for what wrappers put around a module, for what
PEFT leaves out of an adapter's file, and for one module around the whole, as Lightning's has one for its network. A
pair is taken only where it is the only one.

Source: pytorch/pytorch torch/_dynamo/eval_frame.py, `OptimizedModule`; torch/nn/parallel/distributed.py;
torch/distributed/fsdp/_common_utils.py, `FSDP_WRAPPED_MODULE`;
torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py; huggingface/peft, utils/save_and_load.py,
`get_peft_model_state_dict`, and peft_model.py, `PeftModel.save_pretrained`; huggingface/diffusers,
utils/state_dict_utils.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

NAMES_FILE = "parameter_names.json"
"""The file beside a checkpoint in which `statekit.hf.NamesCallback` keeps the order of an optimizer's parameters."""
_AROUND = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_dp_module"}
)
"""Modules that hold a wrapped one, wherever they stand in a name."""
_FIRST = ("module", "base_model")
"""Those that count only in front of a name, where a model of one's own may call a part so."""
WRAPPERS = _AROUND | {"module"}
"""Modules that hold a whole model, at the front of its names."""
_ADAPTED = re.compile(
    r"lora_[A-Za-z_]+|ia3_[A-Za-z]+|vera_[A-Za-z_]+|hada_[A-Za-z0-9_]+|oft_[A-Za-z]+"
    r"|trainable_tokens_[A-Za-z]+"
)
_OF_DIFFUSERS = (
    (re.compile(r"\.self_attn\.to_([qkv]|out)_lora\.(down|up)(?=\.weight$)"), r".self_attn.\1_proj.\2"),
    (re.compile(r"\.(?:lora|lora_linear_layer)\.(down|up)(?=\.weight$)"), r".\1"),
    (re.compile(r"(?:^|\.)processor\.(to_[qkv])_lora\.(down|up)(?=\.weight$)"), r".\1.\2"),
    (re.compile(r"(?:^|\.)processor\.(to_out)_lora\.(down|up)(?=\.weight$)"), r".\1.0.\2"),
)
"""What diffusers' files call PEFT's two matrices, and what stands around their names: before PEFT, and of today."""
_MATRICES = {"down": "lora_A", "up": "lora_B"}
_BARE = "lora_magnitude_vector"
"""DoRA's parameter, whose own `weight` PEFT's file leaves out with the adapter's name."""
_SAVED, _USUAL = "modules_to_save", "default"
_LEAVES = ("weight", "bias")


def is_adapted(name: str) -> bool:
    """Tells whether a parameter is one that PEFT adds to a model."""
    return any(_ADAPTED.fullmatch(key) for key in name.replace("/", ".").split("."))


def is_trained_with_adapter(name: str) -> bool:
    """Tells whether a parameter is an adapter's, or of a module that PEFT trains and saves beside it.

    Example:
        >>> is_trained_with_adapter("model.lm_head.modules_to_save.default.weight")
        True
    """
    return is_adapted(name) or _SAVED in name.replace("/", ".").split(".")


def inner_name(name: str) -> str:
    """Returns a parameter's name without wrappers and without the name of its adapter.

    Example:
        >>> inner_name("_orig_mod.h.0.weight"), inner_name("base_model.model.q.lora_A.default.weight")
        ('h.0.weight', 'q.lora_A.weight')
        >>> inner_name("attn1.to_q.lora.down.weight"), inner_name("attn1.processor.to_out_lora.up.weight")
        ('attn1.to_q.lora_A.weight', 'attn1.to_out.0.lora_B.weight')
        >>> inner_name("layers.0.self_attn.to_out_lora.up.weight")
        'layers.0.self_attn.out_proj.lora_B.weight'
    """
    keys = [key for key in _as_peft(name.replace("/", ".")).split(".") if key not in _AROUND]
    while len(keys) > 1 and keys[0] in _FIRST:
        keys = keys[2:] if keys[:2] == ["base_model", "model"] and len(keys) > 2 else keys[1:]
    inner: list[str] = []
    skips = False
    for i, key in enumerate(keys):
        is_adapter = skips and (key not in _LEAVES or i + 1 < len(keys))
        skips = key == _SAVED or _ADAPTED.fullmatch(key) is not None
        if not is_adapter and key != _SAVED:
            inner.append(key)
    if inner[-2:] == [_BARE, "weight"]:
        inner.pop()
    return ".".join(inner)


def _as_peft(name: str) -> str:
    """Returns PEFT's name for a name of diffusers' LoRA files; other names stay.

    Source: huggingface/diffusers, src/diffusers/utils/state_dict_utils.py, `PEFT_TO_DIFFUSERS` and
    `DIFFUSERS_OLD_TO_PEFT`.
    """
    for pattern, around in _OF_DIFFUSERS:
        if pattern.search(name):
            head, _, _ = pattern.sub(around, name).lstrip(".").rpartition(".")
            head, _, matrix = head.rpartition(".")
            return f"{head}.{_MATRICES[matrix]}.weight"
    return name


def wrapped_names(ours: Iterable[str], theirs: Collection[str]) -> dict[str, str]:
    """Returns the checkpoint's name by ours, of those that differ and have one partner alone.

    Example:
        >>> wrapped_names(["h.w", "h.b"], ["module.h.w", "module.h.b"])
        {'h.w': 'module.h.w', 'h.b': 'module.h.b'}
        >>> wrapped_names(["h.w", "h.b"], ["net._orig_mod.h.w", "net._orig_mod.h.b", "loss.w"])
        {'h.w': 'net._orig_mod.h.w', 'h.b': 'net._orig_mod.h.b'}
    """
    names = list(ours)
    both = {*names} & {*theirs}
    inner_names = _by_inner(name for name in theirs if name not in both)
    own_inner = _by_inner(name for name in names if name not in both)
    pairs: dict[str, str] = {}
    for inner, wrapped in own_inner.items():
        partners = inner_names.get(inner, [])
        usual = [name for name in wrapped if f".{_USUAL}." in f"{name.replace('/', '.')}."] or wrapped
        if len(partners) == 1 and len(usual) == 1:
            pairs[usual[0]] = partners[0]
    if not both and len(pairs) < len(own_inner):
        pairs |= _below_one_module(own_inner, inner_names)
    return {name: pairs[name] for name in names if name in pairs}


def _below_one_module(here: Mapping[str, list[str]], there: Mapping[str, list[str]]) -> dict[str, str]:
    """Returns pairs where one side has all its names below a module of its own, or of the other's.

    Nothing is paired where several modules would do.
    """
    if any(len(names) > 1 for names in (*here.values(), *there.values())) or not here or not there:
        return {}
    outer = _modules_around(here, there)
    inner = [{name: other for other, name in pairs.items()} for pairs in _modules_around(there, here)]
    ways = [*outer, *inner]
    return {here[name][0]: there[other][0] for name, other in ways[0].items()} if len(ways) == 1 else {}


def _modules_around(names: Collection[str], others: Collection[str]) -> list[dict[str, str]]:
    """Returns for each module around names, among others, the pairs that it makes; all of one side are in them."""
    ends = {*names}
    modules = {
        other[: i + 1]
        for other in others
        for i, key in enumerate(other)
        if key == "." and other[i + 1 :] in ends
    }
    ways = [
        {other.removeprefix(module): other for other in others if other.startswith(module)}
        for module in modules
    ]
    pairs = [{name: other for name, other in way.items() if name in ends} for way in ways]
    return [way for way in pairs if len(way) in (len(names), len(others))]


def saved_names(model: Any) -> dict[str, str]:
    """Returns the names under which transformers saves a live model's parameters, by the model's, where they differ.

    Of what it saves in other pieces than it has, nothing is told.

    Source: huggingface/transformers, core_model_loading.py, `revert_weight_conversion`.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None or all(kind.__name__ != "PreTrainedModel" for kind in type(model).__mro__):
        return {}
    tensors = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    saved: dict[int, str] = {}
    with suppress(Exception):  # whatever a model's own conversion raises: then its names are what they are
        saved = {id(tensor): name for name, tensor in revert(model, dict(tensors)).items()}
    pairs = {name: saved.get(id(tensor), name) for name, tensor in tensors.items()}
    return {name: other for name, other in pairs.items() if other != name}


def saved_pieces(model: Any) -> dict[str, list[list[str]]]:
    """Returns the pieces in which transformers saves parameters that hold a layer's experts, by the model's names.

    The first list is of the first expert; its pieces follow one another along the next axis. A parameter that is cut
    in another way isn't there.

    Args:
        model: On any device; its values aren't read.

    Source: huggingface/transformers, core_model_loading.py, `revert_weight_conversion`, `MergeModulelist`.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    revert: Any = getattr(loading, "revert_weight_conversion", None)
    torch: Any = sys.modules.get("torch")
    pieces: dict[str, list[list[str]]] = {}
    for name, param in model.named_parameters() if revert is not None else ():
        if param.ndim != 3:
            continue
        # The rule cuts by proportion, so that a small tensor whose values are its own places tells it.
        base = torch.arange(param.shape[0] * _ROWS * 3).reshape(param.shape[0], _ROWS, 3)
        with suppress(Exception):  # whatever a conversion raises: then nothing is told of this parameter
            if by_expert := _pieces_of(base.numpy(), revert(model, {name: base})):
                pieces[name] = by_expert
    return pieces


_ROWS = 12
"""Rows of the small tensor that tells how a parameter is cut: a multiple of any usual number of pieces."""


def _pieces_of(base: Any, saved: Mapping[str, Any]) -> list[list[str]]:
    """Returns the names of the pieces of each expert, in their order along the second axis; none if they are no blocks.

    Args:
        base: Integers that count from 0, of shape (experts, rows, columns).
        saved: Blocks of it by name.
    """
    experts, rows, columns = base.shape
    begins: dict[tuple[int, int], str] = {}
    for name, piece in saved.items():
        values = piece.numpy()
        if values.ndim != 2 or values.shape[1] != columns or rows % values.shape[0]:
            return []
        expert, row = divmod(int(values[0, 0]) // columns, rows)
        if not (values == base[expert, row : row + values.shape[0]]).all():
            return []
        begins[expert, row] = name
    by_expert = [[begins[place] for place in sorted(begins) if place[0] == i] for i in range(experts)]
    return by_expert if len({*map(len, by_expert)}) == 1 and by_expert[0] else []


def as_named(names: Iterable[str], theirs: Mapping[str, object]) -> list[str]:
    """Returns names as a checkpoint has them: with its dots, and with its wrappers where that is the only pair."""
    dotted = [name if name in theirs else name.replace("/", ".") for name in names]
    pairs = wrapped_names(dotted, theirs)
    return [pairs.get(name, name) for name in dotted]


def _by_inner(names: Iterable[str]) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = {}
    for name in names:
        by_name.setdefault(inner_name(name), []).append(name)
    return by_name
