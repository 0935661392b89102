"""Container `dcp-safetensors`: what torch.distributed.checkpoint's HuggingFaceStorageWriter makes of a whole state.

It reads and writes safetensors shards in which model and optimizer lie together. Input: their folder; the optimizer's
tensors have flat names that begin with `optim.`, and its options, which are no tensors and which the writer doesn't
save, lie in `optimizer_hyperparameters.json` beside the shards, {"param_groups.<parameter>.<option>": value}. Output:
{model, optimizer}, the optimizer under its flat names, without options where that file is missing.

Source: pytorch/pytorch torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.huggingface.model import (
    SHARD_BYTES,
    find_model,
    model_sections,
    open_model,
    save_index,
)
from statekit.converters.containers.part_places import moved_to
from statekit.converters.containers.step_folders import files_beside
from statekit.converters.formats.pytorch.reader import named
from statekit.errors import FormatError, NotFoundError, StatekitError, UsageError
from statekit.files.checkpoint import FILES_BESIDE, SORTED, Checkpoint
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files, first_bytes, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor, in_memory, scalar
from statekit.tensors.tree import Tree, strict_json

OPTIONS = "optimizer_hyperparameters.json"
PREFIX = "optim."
KEYS = ("model", "optimizer")
_STATE, _GROUPS = "state.", "param_groups."
_MARK = f'"{PREFIX}{_STATE}'.encode()
_HEAD = 2**24


@dataclass(frozen=True)
class DcpSafetensors:
    """safetensors shards with model and optimizer."""

    name: str = "dcp-safetensors"
    title: str = (
        "torch.distributed.checkpoint's Hugging Face storage: model and optimizer in safetensors shards"
    )
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = (OPTIONS, "*.index.json")

    def detect(self, path: Place) -> Evidence | None:
        """Looks for the names of slots in the index or in the header of the only file, or for the options beside it."""
        try:
            name = find_model(path) if path.is_dir() else None
            if name is None or ".safetensors" not in name:
                return None
            is_marked = _MARK in _names_in(path / name)
        except (OSError, StatekitError):
            return None
        if is_marked:
            return Evidence(20, f"{path / name} names {PREFIX}{_STATE}*")
        # An optimizer without slots leaves its options alone.
        return Evidence(20, f"{OPTIONS} beside {name}") if (path / OPTIONS).is_file() else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads headers, index and options."""
        name = find_model(path) if path.is_dir() else None
        if name is None or step is not None:
            asked = f"step {step}" if step is not None else None
            raise NotFoundError("There is no such checkpoint.", place=path, found=asked)
        with opening(path, budget) as files:
            whole = open_model(path, name, files)
            model = {key: tensor for key, tensor in whole.tensors.items() if not key.startswith(PREFIX)}
            slots = {
                key.removeprefix(PREFIX): tensor for key, tensor in whole.tensors.items() if key not in model
            }
            tree = named({"model": model, "optimizer": {**_options(path, files), **slots}})
            other_files = files_beside(path, {OPTIONS, *whole.files}, files)
        meta = {SORTED: whole.is_sorted, FILES_BESIDE: other_files}
        return Checkpoint(self.name, path, tree, meta, findings=whole.findings, on_close=files.close)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state of tensors alone, with options that JSON can hold; all else has no place here."""
        encoded = moved_to(encoded, {key: key for key in KEYS})
        optimizer = encoded.tree.get("optimizer")
        if not _is_flat(optimizer) or "model" not in encoded.tree:
            raise UsageError(
                f"The container {self.name} holds a model and an optimizer under flat names.",
                place="--layout",
                expected="torch-fqn-flat",
            )
        flat = {key: _fitted(key, value) for key, value in optimizer.items()}
        reason = "safetensors shards have no place for it"
        dropped = {f"extra/torch/{key}": reason for key in encoded.tree if key not in KEYS}
        tree = {"model": encoded.tree["model"], "optimizer": flat}
        return replace(encoded, tree=tree, dropped={**encoded.dropped, **dropped})

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes shards that HuggingFaceStorageReader reads, their index, and the options as JSON."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the shards."""
        tensors, slots = _laid(encoded)

        def named_in_target(name: str) -> str:
            return f"optimizer/{name.removeprefix(PREFIX)}" if name in slots else f"model/{name}"

        return model_sections(tensors, "model", cut.limit(SHARD_BYTES), named_in_target)

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the index, and the options as JSON."""
        save_index(_laid(encoded)[0], "model", cut.limit(SHARD_BYTES), stage)
        optimizer = encoded.tree["optimizer"]
        options = {key: value for key, value in optimizer.items() if not isinstance(value, Tensor)}
        with stage.file(OPTIONS) as output:
            try:
                output.write((json.dumps(options, indent=2, allow_nan=False) + "\n").encode("ascii"))
            except (TypeError, ValueError) as error:
                raise UsageError("Options can't be written as JSON.", place=OPTIONS, found=error) from None


def _laid(encoded: Encoded) -> tuple[dict[str, Tensor], Collection[str]]:
    """Returns the tensors by their names in the shards, and the names of the optimizer's."""
    model, optimizer = encoded.tree["model"], encoded.tree["optimizer"]
    slots = {f"{PREFIX}{key}": slot for key, slot in optimizer.items() if isinstance(slot, Tensor)}
    clash = next((name for name in model if name.startswith(PREFIX)), None)
    if clash is not None:
        raise FormatError(f"A parameter's name begins with {PREFIX}", place=clash)
    return {**model, **slots}, slots


def _names_in(file: Place) -> bytes:
    """Returns the text of an index, or of a safetensors file's header and no more."""
    if file.suffix != ".safetensors":
        return first_bytes(file, _HEAD)
    length = int.from_bytes(first_bytes(file, 8), "little")
    return first_bytes(file, min(8 + length, _HEAD))


def _is_flat(part: Tree) -> bool:
    """Tells whether a part of a tree has the flat names under which the shards hold an optimizer."""
    return (
        isinstance(part, Mapping)
        and bool(part)
        and all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in part)
    )


def _options(folder: Place, files: Files) -> dict[str, Tree]:
    path = folder / OPTIONS
    if not path.is_file():
        return {}
    options = strict_json(read_small(path, files), path, files.account)
    if not isinstance(options, dict) or not all(key.startswith(_GROUPS) for key in options):
        raise FormatError("Options aren't a JSON object by parameter.", place=path, expected=f"{_GROUPS}*")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}


def _fitted(key: str, value: Tree) -> Tree:
    """Returns a count that is a number as a tensor, as only these are saved; an option that is a tensor as a number."""
    if key.startswith(_STATE):
        return in_memory(np.asarray(value, np.int64), "step") if type(value) is int else value
    return scalar(value)


CONTAINER = DcpSafetensors()
