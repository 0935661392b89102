"""A model's tensors as Hugging Face's libraries keep them: one file, or shards with an index.

    model.safetensors                                        or pytorch_model.bin, a torch file
    model-00001-of-00002.safetensors ... and
    model.safetensors.index.json                             {"metadata": {...}, "weight_map": {name: file}}

The safetensors library sorts what it writes, by dtype and name, and Transformers sorts its index: the order of the
parameters, which an optimizer's indices need, is in neither.
FSDP with sharded states has a folder of torch.distributed.checkpoint in its place, pytorch_model_fsdp_0.
Source: huggingface/transformers, modeling_utils.py, `save_pretrained`; huggingface_hub serialization/_torch.py;
huggingface/accelerate, utils/fsdp_utils.py, `save_fsdp_model`, `save_fsdp_optimizer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from statekit.converters.containers.dcp import open_folder
from statekit.converters.containers.torch_file import open_torch
from statekit.converters.formats.dcp.metadata import METADATA
from statekit.converters.formats.dcp.tree import tree_of
from statekit.errors import CorruptError, Faults, FormatError
from statekit.files.checkpoint import Finding
from statekit.files.manifest import inside
from statekit.files.safetensors import open_safetensors, sharded
from statekit.files.sections import Section, safetensors_section
from statekit.files.source import Files, listing, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Tree, strict_json
from statekit.tensors.typed import Name, typed

SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a shard at most; a larger tensor has one to itself. Source: Transformers' usual 5 GB."""
_AVERAGE = re.compile(r"(^|_)ema(_|$)")
"""What is in the name of an average's folder."""
_OF_ADAPTER = re.compile(r"(?<=\.)(lora|ia3|vera|hada|oft|trainable_tokens)_\w+")
"""The part of a name behind which PEFT's model has the adapter's name, and its file hasn't."""
ADAPTER_CONFIG = "adapter_config.json"
RECIPE_STATE = "recipe_state/recipe_state.pt"
"""The file in which torchtune keeps an optimizer, and how far the recipe is."""
SHARDS_OF_OPTIMIZER = "optimizer/pytorch_optim.bin.index.json"
"""ColossalAI's index of an optimizer's files."""
_EPOCH = re.compile(r"epoch_(\d{1,9})")
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Files of what alone a recipe moves, where they are there."""
SHARDED_MODEL, SHARDED_OPTIMIZER = "pytorch_model_fsdp", "optimizer"
"""What the folders are called, before a number, in which FSDP keeps the shards of a part."""
_NO_MODEL = "A model's shards aren't tensors by name"
INDEX = ".index.json"
_SAFE, _BIN = ".safetensors", ".bin"
_STEMS = (("model", _SAFE), ("pytorch_model", _BIN), ("pytorch_model_fsdp", _BIN), ("adapter_model", _SAFE),
          ("adapter_model", _BIN))  # fmt: skip


class Index(TypedDict):
    """An index of shards."""

    weight_map: dict[Name, Name]
    metadata: NotRequired[dict[Name, Any]]


@dataclass(frozen=True)
class Model:
    """An opened model.

    Attributes:
        tensors: By name, in the order of the file or the index.
        files: Names of the files that it lies in.
        is_sorted: Whether the order is that of the alphabet, which says nothing about the parameters.
        metadata: What the files say of themselves.
        findings: What was odd about them.
    """

    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]
    is_sorted: bool
    metadata: Mapping[str, Any]
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Apart:
    """An optimizer that lies in a folder of its own, beside its model's.

    Attributes:
        parts: It, and what lies beside it, by key.
        read: Names of the entries that were read.
        findings: What was odd about them.
    """

    parts: Mapping[str, Tree] = field(default_factory=dict)
    read: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()


def find_model(folder: Place) -> str | None:
    """Returns the name of the file or index of a folder's model, as Transformers chooses among several.

    Any other safetensors file or index will do if it is the only one.
    """
    names = [name for stem, suffix in _STEMS for name in (f"{stem}{suffix}", f"{stem}{suffix}{INDEX}")]
    index = next((name for name in names if (folder / name).is_file()), None)
    if index is not None:
        return index
    if sharded_part(folder, SHARDED_MODEL):
        return sharded_part(folder, SHARDED_MODEL)
    for suffix in (f"{_SAFE}{INDEX}", _SAFE):
        files = [entry.name for entry in listing(folder, suffix) if entry.is_file()]
        if files:
            return files[0] if len(files) == 1 else None
    return None


def model_below(folder: Place) -> str:
    """Returns the path of the only model in the folders beside Accelerate's optimizer.bin; "" if there isn't one.

    Averages have folders of their own.
    Source: huggingface/diffusers, examples/text_to_image/train_text_to_image.py, `save_model_hook`.
    """
    if not (folder / "optimizer.bin").is_file():
        return ""
    models = [
        f"{entry.name}/{name}" for entry, name in _models_below(folder) if not _AVERAGE.search(entry.name)
    ]
    return models[0] if len(models) == 1 else ""


def model_apart(folder: Place) -> str:
    """Returns the path of a model whose optimizer lies in another folder beside its own; "" if there is none.

    Source: pytorch/torchtune, torchtune/training/checkpointing/_checkpointer.py, `save_checkpoint`: `epoch_<n>` beside
    `recipe_state`, which is the newest one's; hpcaitech/ColossalAI, colossalai/booster/booster.py, `save_optimizer`, as
    applications/Colossal-LLaMA/colossal_llama/utils/ckpt_io.py, `save_checkpoint`, calls it.
    """
    if (folder / RECIPE_STATE).is_file():
        epochs = [
            (int(match[1]), entry) for entry in listing(folder) if (match := _EPOCH.fullmatch(entry.name))
        ]
        for _, entry in sorted(epochs, reverse=True)[:1]:
            adapter = next((name for name in _ADAPTERS if (entry / name).is_file()), None)
            if name := adapter or find_model(entry):
                return f"{entry.name}/{name}"
    if (folder / SHARDS_OF_OPTIMIZER).is_file() and (name := find_model(folder / "model")):
        return f"model/{name}"
    return ""


def optimizer_apart(folder: Place) -> str:
    """Returns the path of the file, or the index, of the optimizer of `model_apart`; "" if there is none."""
    return next((name for name in (RECIPE_STATE, SHARDS_OF_OPTIMIZER) if (folder / name).is_file()), "")


def adapted_name(name: str, adapter: str) -> str:
    """Returns the name that a parameter of an adapter's file has in the model.

    Example:
        >>> adapted_name("q.lora_A.weight", "policy"), adapted_name("q.lora_magnitude_vector", "policy")
        ('q.lora_A.policy.weight', 'q.lora_magnitude_vector.policy.weight')
    """
    whole = f"{name}.weight" if name.endswith(".lora_magnitude_vector") else name
    return _OF_ADAPTER.sub(lambda match: f"{match[0]}.{adapter}", whole, count=1)


def open_adapters(folder: Place, files: Files) -> dict[str, Tensor]:
    """Returns the tensors of PEFT's adapters in folders of their names, by the names that they have in the model.

    Source: huggingface/peft, peft_model.py, `PeftModel.save_pretrained`.
    """
    adapters = [(entry, name) for entry, name in _models_below(folder) if (entry / ADAPTER_CONFIG).is_file()]
    return {
        adapted_name(param, entry.name): tensor
        for entry, name in adapters
        for param, tensor in open_model(entry, name, files).tensors.items()
    }


def open_averages(folder: Place, files: Files) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of the averages beside a model's folder, by the names of their folders."""
    averages = [(entry, name) for entry, name in _models_below(folder) if _AVERAGE.search(entry.name)]
    return {entry.name: dict(open_model(entry, name, files).tensors) for entry, name in averages}


def _models_below(folder: Place) -> Iterator[tuple[Place, str]]:
    for entry in listing(folder):
        if entry.is_dir() and not re.search(rf"^{SHARDED_OPTIMIZER}(_\d+)?$", entry.name):
            name = find_model(entry)
        else:
            name = None
        if name is not None:
            yield entry, name


def sharded_part(folder: Place, stem: str, whole: bool = True) -> str:
    """Returns the name of the folder in which FSDP keeps a part in shards; "" if there is none, or several.

    Args:
        folder: The folder of a run's step.
        stem: What the part's folders are called, without a number.
        whole: Whether only one counts that has the index of its shards.
    """
    names = [
        entry.name
        for entry in listing(folder)
        if re.fullmatch(rf"{stem}(_[0-9]+)?", entry.name)
        and entry.is_dir()
        and (not whole or (entry / METADATA).is_file())
    ]
    return names[0] if len(names) == 1 else ""


def open_sharded(folder: Place, key: str, files: Files) -> tuple[Tree, tuple[Finding, ...]]:
    """Opens a part that FSDP keeps in shards, and says what was odd about it.

    Args:
        folder: Its folder.
        key: The part's key in there.
        files: The checkpoint's open files.

    Raises:
        FormatError: The folder hasn't the part, or can't be trusted.
    """
    opened = open_folder(folder, files)
    tree = tree_of(opened.contents.paths, opened.values, f"{folder / METADATA}", files.account)
    part = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(part, Mapping):
        raise FormatError("A folder of shards doesn't hold its part.", place=folder, expected=key)
    return part, opened.findings


def open_optimizer_apart(folder: Place, files: Files) -> Apart:
    """Opens the optimizer of `model_apart`, with what its library keeps beside it; nothing where it isn't there.

    Raises:
        FormatError: A file can't be trusted, or isn't what its library writes.
    """
    name = optimizer_apart(folder)
    if not name:
        return Apart()
    place, read = folder / name, (name.partition("/")[0],)
    if name != RECIPE_STATE:
        optimizer, findings = _indexed_optimizer(place, files)
        return Apart({"optimizer": optimizer}, read, findings)
    opened = open_torch(place, files)
    state = typed(opened.tree, dict[Name, Any], place, "A recipe's state isn't a dict")
    other_parts = {key: part for key, part in state.items() if key != "optimizer"}
    return Apart({"optimizer": state.get("optimizer"), "recipe_state": other_parts}, read, opened.findings)


def _indexed_optimizer(place: Place, files: Files) -> tuple[Tree, tuple[Finding, ...]]:
    """Returns an optimizer whose index says in which files its state and its groups lie, and what was odd."""
    document = strict_json(read_small(place, files), place, files.account)
    index = typed(document, Index, place, "An index of shards has no map from numbers to files")
    of_groups = str(index.get("metadata", {}).get("param_groups"))
    names = sorted({*index["weight_map"].values(), of_groups})
    foreign = Faults(
        ("isn't a file of the folder", name) for name in names if not inside(name) or "/" in name
    )
    foreign.check(FormatError, "An index names files elsewhere", place=place)
    opened = {name: open_torch(place.parent / name, files) for name in names}
    state: dict[Any, Any] = {}
    for name in names:
        if name == of_groups:
            continue
        shard = opened[name].tree
        if not isinstance(shard, Mapping):
            raise FormatError("A shard isn't an optimizer's state.", place=place.parent / name)
        state |= shard
    findings = tuple(finding for part in opened.values() for finding in part.findings)
    return {"state": state, "param_groups": opened[of_groups].tree}, findings


def open_model(folder: Place, name: str, files: Files) -> Model:
    """Opens a model; reads headers only.

    Args:
        folder: Where it lies.
        name: Its file, or its index.
        files: The checkpoint's open files.

    Raises:
        NotFoundError: A shard is missing.
        FormatError: Index and shards don't fit each other, or one can't be trusted.
    """
    if name.endswith(_SAFE):
        return open_alone(folder / name, files)
    if (folder / name).is_dir():
        part, odd = open_sharded(folder / name, "model", files)
        return Model(typed(part, dict[Name, Tensor], folder / name, _NO_MODEL), (name,), False, {}, odd)
    if not name.endswith(INDEX):
        tensors, metadata, findings = _open_file(folder / name, files)
        return Model(tensors, (name,), False, metadata, findings)
    return _open_by_index(folder, name, files)


def _open_by_index(folder: Place, name: str, files: Files) -> Model:
    """Opens the shards that an index names; arguments and errors are those of `open_model`."""
    place = folder / name
    document = strict_json(read_small(place, files), place, files.account)
    index = typed(document, Index, place, "An index of shards has no map from names to files")
    weights = index["weight_map"]
    names = tuple(sorted(set(weights.values())))
    foreign = Faults(
        ("isn't a file of the folder", file) for file in names if not inside(file) or "/" in file
    )
    foreign.check(FormatError, "An index names files elsewhere", place=place)
    opened = {file: _open_file(folder / file, files) for file in names}
    shards = {file: tensors for file, (tensors, _, _) in opened.items()}
    faults = Faults((f"isn't in {file}", key) for key, file in weights.items() if key not in shards[file])
    faults += [
        (f"is in {file}, not by the index", tensor)
        for file, tensors in shards.items()
        for tensor in tensors
        if weights.get(tensor) != file
    ]
    faults.check(CorruptError, "Index and shards contradict each other", place=place)
    whole = {key: shards[file][key] for key, file in weights.items()}
    all_metadata: dict[str, Any] = {}
    for _, of_file, _ in opened.values():
        all_metadata |= of_file
    all_metadata |= index.get("metadata", {})
    odd = tuple(finding for _, _, findings in opened.values() for finding in findings)
    return Model(whole, (name, *names), list(whole) == sorted(whole), all_metadata, odd)


def open_alone(path: Place, files: Files) -> Model:
    """Opens a single safetensors file, whatever it is called; reads its header only.

    Raises:
        FormatError: It can't be trusted.
    """
    file = open_safetensors(path, files)
    ordered = sorted(file.tensors, key=lambda name: (-file.tensors[name].dtype.itemsize, name))
    return Model(file.tensors, (path.name,), list(file.tensors) == ordered, file.metadata)


def metadata_of(ties: Mapping[str, str]) -> dict[str, str]:
    """Returns the metadata of a model's first file, with further names of tensors as `save_model` has them.

    Source: huggingface/safetensors, bindings/python/py_src/safetensors/torch.py, `save_model`.
    """
    return {"format": "pt", **ties}


def ties_in(model: Model) -> dict[str, str]:
    """Returns the further names of tensors that a model's metadata tell: name -> the name it stands under."""
    named = {name: target for name, target in model.metadata.items() if isinstance(target, str)}
    return {
        name: target
        for name, target in named.items()
        if name not in model.tensors and target in model.tensors
    }


def model_sections(
    tensors: Mapping[str, Tensor],
    stem: str,
    limit: int | None,
    named: Callable[[str], str],
    prefix: str = "",
    ties: Mapping[str, str] | None = None,
) -> list[Section]:
    """Returns the files of a model as safetensors, in its order: they keep what the order says of the parameters.

    Args:
        tensors: By name.
        stem: What the files are called.
        limit: Bytes in a file at most; None for a single file.
        named: Gives a tensor's name in the target by its name in the model.
        prefix: The folder below the target, with its `/`.
        ties: Further name of a tensor -> its name; in the file's metadata, where safetensors.torch's `save_model` has
            them. Source: huggingface/safetensors, bindings/python/py_src/safetensors/torch.py, `save_model`.
    """
    return [
        safetensors_section(
            f"{prefix}{file}", shard, metadata_of(ties or {}) if number == 0 else {"format": "pt"}, named
        )
        for number, (file, shard) in enumerate(_shards(tensors, stem, limit).items())
    ]


def save_index(
    tensors: Mapping[str, Tensor], stem: str, limit: int | None, stage: Stage, prefix: str = ""
) -> tuple[str, ...]:
    """Writes the index of a model's files, where there are several; returns the names of index and files.

    Args:
        tensors: As in `model_sections`.
        stem: As there.
        limit: As there.
        stage: Where is written.
        prefix: As there.
    """
    shards = _shards(tensors, stem, limit)
    if len(shards) == 1:
        return tuple(shards)
    weights = {name: file for file, shard in shards.items() for name in shard}
    total = {"total_size": sum(map(nbytes, tensors.values()))}
    text = json.dumps({"metadata": total, "weight_map": weights}, indent=2) + "\n"
    with stage.file(f"{prefix}{stem}{_SAFE}{INDEX}") as output:
        output.write(text.encode("ascii"))
    return (f"{stem}{_SAFE}{INDEX}", *shards)


def _shards(tensors: Mapping[str, Tensor], stem: str, limit: int | None) -> dict[str, Mapping[str, Tensor]]:
    """Returns the tensors of each file of a model, by the file's name."""
    shards = [dict(tensors)] if limit is None else list(sharded(tensors, limit)) or [{}]
    count = len(shards)
    if count == 1:
        return {f"{stem}{_SAFE}": shards[0]}
    return {f"{stem}-{i:05}-of-{count:05}{_SAFE}": shard for i, shard in enumerate(shards, 1)}


def _open_file(
    path: Place, files: Files
) -> tuple[Mapping[str, Tensor], Mapping[str, Any], tuple[Finding, ...]]:
    """Returns a file's tensors, what it says of itself, and what was odd."""
    if path.name.endswith(_SAFE):
        file = open_safetensors(path, files)
        return file.tensors, file.metadata, ()
    opened = open_torch(path, files)
    tree = opened.tree
    if not isinstance(tree, Mapping) or not all(isinstance(leaf, Tensor) for leaf in tree.values()):
        raise FormatError("A model's file isn't a dict of tensors.", place=path, expected="a state_dict")
    return tree, {}, opened.findings
