"""Container `dcp-safetensors`: what torch.distributed.checkpoint's HuggingFaceStorageWriter makes of a whole state.

Model and optimizer lie in the same shards, the optimizer's tensors under flat names that begin with `optim.`; its
options are no tensors and so aren't saved by the writer. `optimizer_hyperparameters.json` beside the shards has them,
{"param_groups.<parameter>.<option>": value}; without that file they are unknown.

Source: pytorch/pytorch torch/distributed/checkpoint/hf_storage.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from statekit.checkpoint import Checkpoint
from statekit.commit import Stage
from statekit.converters.containers.hf_model import SHARD_BYTES, find_model, open_model, save_model
from statekit.converters.containers.hf_place import moved_to
from statekit.converters.containers.step_files import files_beside, trusted_manifest
from statekit.converters.containers.torch_names import named
from statekit.converters.torch_flat import GROUPS, STATE, flattened, unflattened
from statekit.converters.torch_parts import SORTED, at
from statekit.errors import FormatError, NotFoundError, UsageError, fault_list
from statekit.format import Encoded, Evidence
from statekit.manifest import read_small, strict_json
from statekit.tensor import Tensor, in_memory
from statekit.tree import Tree

OPTIONS = "optimizer_hyperparameters.json"
PREFIX = "optim."
_MARK = f'"{PREFIX}{STATE}.'.encode()
_HEAD = 2**20
_SHOWN = 20


@dataclass(frozen=True)
class DcpSafetensors:
    """safetensors shards with model and optimizer."""

    name: str = "dcp-safetensors"
    title: str = (
        "torch.distributed.checkpoint's Hugging Face storage: model and optimizer in safetensors shards"
    )
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Path) -> Evidence | None:
        """Looks for the names of slots in the index, or in the header of the only file."""
        try:
            name = find_model(path) if path.is_dir() else None
            if name is None or ".safetensors" not in name:
                return None
            with (path / name).open("rb") as file:
                found = _MARK in file.read(_HEAD)
        except OSError:
            return None
        return Evidence(20, f"{path / name} names {PREFIX}{STATE}.*") if found else None

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Reads headers, index and options.

        Raises:
            NotFoundError: It isn't such a folder, or a step is asked of it.
            FormatError: Index and shards don't fit, or slots belong to no parameter.
        """
        name = find_model(path) if path.is_dir() else None
        if name is None or step is not None:
            raise NotFoundError(
                "There is no such checkpoint.", place=path, found=f"step {step}" if step else ""
            )
        with ExitStack() as opened:
            model = open_model(path, name, opened)
            flat = {
                key.removeprefix(PREFIX): tensor
                for key, tensor in model.tensors.items()
                if key.startswith(PREFIX)
            }
            params = {key: one for key, one in model.tensors.items() if not key.startswith(PREFIX)}
            optimizer = unflattened({**_options(path), **flat}, params.keys(), path)
            tree = named({"model": params, "optimizer": optimizer})
            manifest, findings = trusted_manifest(path, None, tree)
            meta = {
                SORTED: model.is_sorted, "files_beside": files_beside(path, {OPTIONS, *model.files}),
            }  # fmt: skip
            close = opened.pop_all().close
        return Checkpoint(self.name, path, tree, meta, None, manifest, findings, close)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state whose slots lie under names; all else has no place here."""
        encoded = moved_to(encoded, {"model", "optimizer"})
        optimizer = at(encoded.tree, ("optimizer",))
        if not isinstance(optimizer, Mapping) or not {STATE, GROUPS} <= optimizer.keys():
            return encoded
        indices = {index: name for group in optimizer[GROUPS] for index, name in _names(group)}
        state = {
            indices.get(index, index): {slot: _tensor(value) for slot, value in own.items()}
            for index, own in optimizer[STATE].items()
        }
        groups = [{**group, "params": [name for _, name in _names(group)]} for group in optimizer[GROUPS]]
        kept = {"model": encoded.tree["model"], "optimizer": {STATE: state, GROUPS: groups}}
        old = {f"optimizer/{STATE}/{index}/": f"optimizer/{STATE}/{name}/" for index, name in indices.items()}
        dropped = {key: "safetensors shards have no place for it" for key in encoded.tree if key not in kept}
        return replace(
            encoded,
            tree=kept,
            exactness={_renamed(name, old): value for name, value in encoded.exactness.items()},
            dropped={**encoded.dropped, **{f"extra/torch/{key}": why for key, why in dropped.items()}},
        )

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes shards that HuggingFaceStorageReader reads, their index, and the options as JSON.

        Raises:
            UsageError: The tree isn't a model with an optimizer whose parameters have names, or options are no JSON.
            FormatError: A name or dtype that safetensors can't hold.
        """
        if "model" not in encoded.tree or "optimizer" not in encoded.tree:
            raise UsageError(
                f"The container {self.name} holds a model with its optimizer, as PyTorch's layouts write them.",
                place="--layout",
                found=", ".join(map(str, encoded.tree)),
            )
        flat = flattened(encoded.tree["optimizer"])
        slots = {key: value for key, value in flat.items() if key.startswith(f"{STATE}.")}
        options = {key: value for key, value in flat.items() if key not in slots}
        _check(options)
        whole = {**encoded.tree["model"], **{f"{PREFIX}{key}": value for key, value in slots.items()}}
        if len(whole) < len(encoded.tree["model"]) + len(slots):
            raise FormatError("A parameter has the name of a slot.", place=stage.target)
        places = dict(_places(encoded.tree))
        save_model(whole, "model", SHARD_BYTES, stage, lambda key, one: stage.stream(places[key], one))
        with stage.file(OPTIONS) as output:
            output.write((json.dumps(options, indent=2) + "\n").encode("ascii"))


def _options(folder: Path) -> dict[str, Tree]:
    path = folder / OPTIONS
    if not path.is_file():
        return {}
    options = strict_json(read_small(path), path)
    if not isinstance(options, dict) or not all(key.startswith(f"{GROUPS}.") for key in options):
        raise FormatError("Options aren't a JSON object by parameter.", place=path, expected=f"{GROUPS}.*")
    return options


def _names(group: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    return zip(group["params"], group.get("param_names", group["params"]), strict=True)


def _tensor(value: Tree) -> Tree:
    """Returns a count that is a number as a tensor: only these are saved."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return in_memory(np.asarray(value, np.int64), "step") if is_count else value


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    parts = name.split("/", 3)
    old = "/".join(parts[:3]) + "/"
    return prefixes.get(old, old) + parts[3] if len(parts) == 4 else name


def _places(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yields the name in the files, and the name in the tree, of every tensor."""
    for name in tree["model"]:
        yield name, f"model/{name}"
    for name, own in tree["optimizer"][STATE].items():
        for slot in own:
            yield f"{PREFIX}{STATE}.{name}.{slot}", f"optimizer/{STATE}/{name}/{slot}"


def _check(options: Mapping[str, Tree]) -> None:
    faults = [("is a tensor", key) for key, value in options.items() if isinstance(value, Tensor)]
    if faults:
        raise UsageError("Options can't be written as JSON.", found=fault_list(faults[:_SHOWN]))


CONTAINER = DcpSafetensors()
