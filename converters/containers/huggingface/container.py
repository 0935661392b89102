"""Folders of Hugging Face's libraries: `hf-trainer`, `accelerate`, and `safetensors` for those of neither.

All three give the tree {model, optimizer, scheduler, scaler, trainer_state, files} that PyTorch's layouts read; what
differs is how a folder is recognised, and under which names a new one is written.

    <run>/checkpoint-<step>/   Trainer: model, optimizer.pt, scheduler.pt, trainer_state.json, rng_state.pth, ...
    <anything>/                Accelerator.save_state: model, optimizer.bin, scheduler.bin, random_states_0.pkl, ...
    <anything>/                a model alone, or with optimizer.pt

Source: huggingface/transformers, trainer.py, `_save_checkpoint`; huggingface/accelerate, checkpointing.py,
`save_accelerator_state`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.huggingface.files import (
    FILES,
    PARTS,
    REST,
    are_files,
    open_beside,
    write_files,
    write_part,
)
from statekit.converters.containers.huggingface.model import (
    ADAPTER_CONFIG,
    SHARD_BYTES,
    find_model,
    open_model,
    save_model,
)
from statekit.converters.containers.huggingface.place import moved_to
from statekit.converters.containers.steps.beside import trusted_manifest
from statekit.converters.containers.steps.names import step_prefix
from statekit.converters.formats.pytorch.names import named
from statekit.converters.layouts.torch_parts import SORTED, at
from statekit.errors import FormatError, NotFoundError, UsageError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.stage import Stage
from statekit.tensors.tree import Tree

TRAINER_STATE, DEEPSPEED_TAG = "trainer_state.json", "latest"
_STEP = re.compile(r"checkpoint[-_](\d{1,18})")
_SEVERAL = re.compile(r"(model|pytorch_model|optimizer)_[1-9]\d*\.(safetensors|bin)")
_HEAD_BYTES = 9


@dataclass(frozen=True)
class HuggingFaceFolder:
    """One kind of folder.

    Attributes:
        name: The container's name.
        title: One line for people.
        parts: Key of the tree -> name of its file; other keys go into one file of statekit's.
        fits: Says why a folder is one of this kind; "" if it isn't.
        needed: Gives what the library can't do without.
        specificity: Of its evidence.
        opens_files: Whether a single file of the model is one too.
        shard_bytes: Bytes of tensors in a file of the model at most; None where the library reads a single file only.
        step_folder: The name of a step's folder, with `{step}`; "" where folders have no such names.
    """

    name: str
    title: str
    parts: Mapping[str, str]
    fits: Callable[[Path], str]
    needed: Callable[[Encoded], Mapping[str, Tree]] = lambda encoded: {}
    specificity: int = 20
    opens_files: bool = False
    shard_bytes: int | None = SHARD_BYTES
    step_folder: str = ""
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Path) -> Evidence | None:
        """Looks at file names, and at the first bytes of a single file."""
        try:
            if path.is_file():
                single = self.opens_files and _is_safetensors(path)
                return Evidence(10, "the header of a safetensors file") if single else None
            found = self._locate(path, None)
        except OSError:
            return None
        return (
            None if found is None else Evidence(self.specificity, f"{found.path} has {self.fits(found.path)}")
        )

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Parses headers and pickles; of a run's folder, the newest step's or the given one's.

        Raises:
            NotFoundError: No such folder, or no such step.
            FormatError: A file can't be trusted, or there are several models or optimizers.
        """
        alone = self.opens_files and path.is_file()
        found = _Found(path) if alone else self._locate(path, step)
        if found is None:
            raise NotFoundError(f"There is no folder of {self.name}.", place=path, remedy="check the path")
        with ExitStack() as opened:
            tree, meta, findings = _opened(found.path, opened)
            number = _global_step(tree)
            if step is not None and number is not None and step != number:
                raise NotFoundError(
                    "This is the checkpoint of one step, and of another.",
                    place=found.path,
                    expected=step,
                    found=number,
                )
            manifest, odd = trusted_manifest(found.path, number, tree)
            close = opened.pop_all().close
        meta = {**meta, "steps": list(found.steps)}
        findings = (*found.findings, *findings, *odd)
        return Checkpoint(self.name, found.path, tree, meta, number, manifest, findings, close)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state with its parts where the folder keeps them, and what the library can't do without."""
        encoded = moved_to(encoded, {"model", *self.parts})
        carried = encoded.tree.get(FILES) or {}
        needed = {key: part for key, part in self.needed(encoded).items() if self.parts[key] not in carried}
        return replace(encoded, tree={**needed, **encoded.tree})

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a folder that the library loads: the model as safetensors, all else as torch files and JSON.

        Raises:
            UsageError: The tree has no model, or holds what `torch.load(weights_only=True)` refuses.
            FormatError: A name or dtype that safetensors can't hold.
        """
        tree = dict(encoded.tree)
        if stage.target.name.endswith(".safetensors"):
            raise UsageError(
                "A single safetensors file has no place for an optimizer's state.",
                place=stage.target,
                remedy="give the folder that shall hold it another name",
            )
        if "model" not in tree:
            raise UsageError(
                f"The container {self.name} holds a model with its optimizer, as PyTorch's layouts write them.",
                place="--layout",
                found=", ".join(map(str, tree)),
            )
        number = _global_step(tree) or encoded.step
        prefix = step_prefix(stage, number, self.step_folder) if self.step_folder else ""
        files = tree.pop(FILES) if are_files(tree.get(FILES)) else {}
        stem = "adapter_model" if ADAPTER_CONFIG in files else "model"
        model = tree.pop("model")
        save_model(
            model, stem, self.shard_bytes, stage, lambda name, one: stage.stream(f"model/{name}", one), prefix
        )
        for key in [one for one in self.parts if one in tree]:
            write_part(stage, f"{prefix}{self.parts[key]}", key, tree.pop(key))
        write_files(stage, prefix, files)
        if tree:
            write_part(stage, f"{prefix}{REST}", "", tree)

    def _locate(self, path: Path, step: int | None) -> _Found | None:
        """Finds the folder: itself, or of a run's folder the newest step's or the given one's."""
        if not path.is_dir():
            return None
        if self.fits(path):
            return _Found(path)
        entries = [(int(m[1]), entry) for entry in path.iterdir() if (m := _STEP.fullmatch(entry.name))]
        steps = {number: entry for number, entry in sorted(entries) if entry.is_dir() and self.fits(entry)}
        if not steps:
            return None
        if step is not None and step not in steps:
            raise NotFoundError(
                "There is no such step.", place=path, expected=step, found=", ".join(map(str, steps))
            )
        newest = max(steps)
        passed = [
            Finding("holds no checkpoint, passed over", str(entry))
            for number, entry in entries
            if number > newest
        ]
        return _Found(steps[newest if step is None else step], tuple(steps), tuple(passed))


@dataclass(frozen=True)
class _Found:
    """A checkpoint's folder, and the steps beside it."""

    path: Path
    steps: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()


def _opened(path: Path, opened: ExitStack) -> tuple[Tree, dict[str, Any], tuple[Finding, ...]]:
    """Returns the tree of a folder, or of a single file, what is known of it, and what was odd."""
    alone = path.is_file()
    folder = path.parent if alone else path
    name = path.name if alone else find_model(folder)
    tree: dict[str, Tree] = {}
    meta: dict[str, Any] = {}
    taken: tuple[str, ...] = ()
    if name is not None:
        model = open_model(folder, name, opened)
        tree["model"], taken = dict(model.tensors), model.files
        meta = {"model": list(taken), SORTED: model.is_sorted, "metadata": dict(model.metadata)}
    if alone:
        return named(tree), meta, ()
    _check_single(folder)
    beside = open_beside(folder, taken, opened)
    return named({**tree, **beside.tree}), meta, beside.findings


def _global_step(tree: Tree) -> int | None:
    state = tree.get("trainer_state")
    number = state.get("global_step") if isinstance(state, Mapping) else None
    return number if type(number) is int and number >= 0 else None


def _for_trainer(encoded: Encoded) -> Mapping[str, Tree]:
    """Returns what Trainer must find to load an optimizer.

    Without a scheduler's file Trainer passes over the optimizer's in silence; without a state it doesn't know the step.
    Source: transformers, trainer.py, `_load_optimizer_and_scheduler`; torch/optim/lr_scheduler.py, `load_state_dict`.
    """
    groups = at(encoded.tree, ("optimizer", "param_groups")) or ()
    lambdas = [None] * len(groups)
    scheduler = {"last_epoch": encoded.step, "_step_count": encoded.step + 1, "lr_lambdas": lambdas}
    # Nobody knows the batch size: without a number Trainer fails, and those of 4.x would train with the one they find;
    # 0 makes these stop, and newer ones warn.
    state = {"epoch": 0.0, "global_step": encoded.step, "log_history": [], "train_batch_size": 0}
    return {"scheduler": scheduler, "trainer_state": state}


def _check_single(folder: Path) -> None:
    several = sorted(entry.name for entry in folder.iterdir() if _SEVERAL.fullmatch(entry.name))
    if several:
        raise FormatError(
            "A folder holds several models or optimizers; statekit converts one of each.",
            place=folder,
            found=f"besides the first: {', '.join(several)}",
            remedy="put the files of one into a folder of its own, as model.safetensors and optimizer.bin",
        )


def _is_safetensors(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    length = int.from_bytes(head[:8], "little")
    return len(head) == _HEAD_BYTES and head[8:] == b"{" and 2 <= length <= path.stat().st_size - 8


def _trainer(folder: Path) -> str:
    if not (folder / TRAINER_STATE).is_file() or (folder / DEEPSPEED_TAG).exists():
        return ""
    beside = find_model(folder) or next((n for n in PARTS["optimizer"] if (folder / n).is_file()), "")
    return f"{TRAINER_STATE} beside {beside}" if beside else ""


def _accelerate(folder: Path) -> str:
    model = find_model(folder)
    if model is None or (folder / TRAINER_STATE).is_file():
        return ""
    others = ["optimizer.bin", *sorted(entry.name for entry in folder.glob("random_states_*.pkl"))]
    beside = next((name for name in others if (folder / name).is_file()), "")
    return f"{beside} beside {model}" if beside else ""


def _plain(folder: Path) -> str:
    model = find_model(folder) or ""
    return model if ".safetensors" in model else ""


TRAINER = HuggingFaceFolder(
    "hf-trainer",
    "Hugging Face Trainer's folder: checkpoint-<step> with model, optimizer.pt and trainer_state.json",
    {key: names[0] for key, names in PARTS.items()},
    _trainer,
    _for_trainer,
    step_folder="checkpoint-{step}",
)
ACCELERATE = HuggingFaceFolder(
    "accelerate",
    "Accelerate's folder (save_state): model, optimizer.bin, scheduler.bin and random states",
    {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt"},
    _accelerate,
    shard_bytes=None,
)
SAFETENSORS = HuggingFaceFolder(
    "safetensors",
    "safetensors: a model in one file, or in shards with an index, and optimizer.pt beside it",
    {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "scaler": "scaler.pt"},
    _plain,
    specificity=10,
    opens_files=True,
)
