"""The files of a DeepSpeed checkpoint, and of its universal form: which there are, and what each holds.

    <run>/latest                                      the name of the newest tag
    <run>/<tag>/mp_rank_00_model_states.pt            the model, client state; ZeRO-3: one for each rank
    <run>/<tag>/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt    a rank's part of the optimizer
    <run>/<tag>/layer_03-model_00-model_states.pt     a layer of a pipeline, whose model isn't in the files above
    <run>/<tag>_universal/zero/<parameter>/{fp32,exp_avg,...}.pt    what ds_to_universal makes of these

`mp_rank_` numbers the slices of the model: those of tensor-parallel ranks, stage by stage.

Source: deepspeedai/DeepSpeed deepspeed/runtime/engine.py, `_get_ckpt_name`, `_get_zero_ckpt_name`;
deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.pytorch.reader import named, read_object
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError
from statekit.files.checkpoint import Finding
from statekit.files.manifest import inside
from statekit.files.source import Files, first_bytes, listing
from statekit.files.tree import Place
from statekit.tensors.tensor import Stored
from statekit.tensors.tree import Tree, mapped

LATEST = ("latest", "latest_universal")
ENGINE = {
    "buffer_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version", "data_sampler", "random_ltd",
    "sparse_tensor_module_names",
}  # fmt: skip
"""What the engine keeps in a model's file, beside the model and the client's state."""
TAKEN = {
    "module", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
}  # fmt: skip
"""What a model's file has of model and optimizer."""
SLICES = "mp_world_size"
"""What a model's file calls the number of slices."""
FIRST_STEPS = "first_steps"
"""Key of how many steps a wrapper has made before the run's first: they count in the optimizer alone."""
UNIVERSAL = "zero"
"""The folder of a universal checkpoint that holds a folder for each parameter."""
MASTER = "fp32"
"""What DeepSpeed calls a parameter's float32 copy there."""
_TAG = re.compile(r"global_step(\d{1,18})(_universal)?")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})-(?:model_(\d{1,6})-)?model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_00_model_states\.pt")
_EXPERTS_OPTIMIZER = re.compile(r"expp_rank_(\d{1,6})_mp_rank_00_optim_states\.pt")
_EXPERTS = re.compile(r"(.*expert_\d+.*|expp_rank_.*)\.pt")
_TRAINERS = re.compile(r"checkpoint-(\d{1,18})")
_MAX_TAG = 4096
"""Bytes that are read of the name of a folder. Source: Linux, limits.h, `PATH_MAX`."""


@dataclass(frozen=True)
class Slice:
    """The files of one slice of the model, which is all of it where ranks share it only among their data.

    Attributes:
        models: Files of the model, by data-parallel rank.
        optimizers: Files of the optimizer, by data-parallel rank.
    """

    models: Mapping[int, Place]
    optimizers: Mapping[int, Place]


@dataclass(frozen=True)
class ExpertFiles:
    """The files of experts that ranks hold apart.

    Attributes:
        weights: By layer of experts, and the expert's number in it.
        optimizers: Without ZeRO, by rank.
    """

    weights: Mapping[tuple[int, int], Place]
    optimizers: Mapping[int, Place]


@dataclass(frozen=True)
class Tag:
    """One step's checkpoint.

    Attributes:
        path: Its folder.
        slices: The slices of the model, in the order of their ranks.
        layers: A pipeline's files of layers, by layer and tensor-parallel rank.
        experts: Files of experts that ranks hold apart.
        universal: Whether it is in universal form.
    """

    path: Place
    slices: Sequence[Slice]
    layers: Mapping[tuple[int, int], Place]
    experts: ExpertFiles
    universal: bool


@dataclass(frozen=True)
class Located:
    """A checkpoint, and the numbers of all steps in the run's folder."""

    tag: Tag
    steps: tuple[int, ...] = ()


def tag_of(folder: Place) -> Tag | None:
    """Returns the checkpoint that a folder is, by the names of its files; None if it is none.

    Raises:
        RefusedError: Ranks hold experts in a form that isn't joined.
        CorruptError: A slice of the model is missing.
    """
    if not folder.is_dir():
        return None
    names = [entry.name for entry in listing(folder)]
    models, optimizers = _ranks(folder, names, _MODEL), _ranks(folder, names, _OPTIMIZER)
    _check_once(folder, sum(_OPTIMIZER.fullmatch(name) is not None for name in names), optimizers)
    if not models:
        return None
    universal = (folder / UNIVERSAL).is_dir() and not optimizers
    experts = _experts(folder, [] if universal else [name for name in names if _EXPERTS.fullmatch(name)])
    slices = _slices(folder, models, optimizers)
    of_layers = [match for match in map(_LAYER.fullmatch, names) if match]
    layers = {(int(match[1]), int(match[2] or 0)): folder / match[0] for match in of_layers}
    _check_once(folder, len(of_layers), layers)
    if experts.weights and len(slices) > 1:
        raise RefusedError(
            "Ranks of this run hold experts and slices of the model, which statekit doesn't join.",
            place=folder,
            expected="experts without tensor parallelism and pipelines",
            found=f"{len(slices)} slices of the model",
        )
    return Tag(folder, slices, layers, experts, universal)


def _check_once(folder: Place, count: int, files: Mapping[Any, Place]) -> None:
    """Refuses two files of the same part, such as layer_3 and layer_03: nothing tells which is the run's."""
    if count != len(files):
        raise CorruptError(
            "Two files of a DeepSpeed checkpoint hold the same part.",
            place=folder,
            expected=f"{len(files)} files",
            found=f"{count} files: some names differ in leading zeros or in bf16_ alone",
            remedy="keep the files of one run",
        )


def _experts(folder: Place, names: Sequence[str]) -> ExpertFiles:
    """Returns the files of experts."""
    weights = {(int(m[1]), int(m[2])): folder / m[0] for m in map(_EXPERT.fullmatch, names) if m}
    optimizers = {int(m[1]): folder / m[0] for m in map(_EXPERTS_OPTIMIZER.fullmatch, names) if m}
    known_names = (_EXPERT, _EXPERTS_OPTIMIZER)
    if others := [name for name in names if not any(pattern.fullmatch(name) for pattern in known_names)]:
        raise RefusedError(
            "Files of experts have names that statekit doesn't know.",
            place=folder,
            expected="layer_<l>_expert_<e>_mp_rank_00_model_states.pt, expp_rank_<r>_mp_rank_00_optim_states.pt",
            found=", ".join(others[:3]),
        )
    _check_once(folder, len(names), {**weights, **optimizers})
    return ExpertFiles(weights, optimizers)


def _slices(
    folder: Place, models: Mapping[tuple[int, int], Place], optimizers: Mapping[tuple[int, int], Place]
) -> list[Slice]:
    """Returns the slices of the model in order, by files that are named for slice and data-parallel rank."""
    numbers = sorted({number for number, _ in models})
    last = max(number for number, _ in (*models, *optimizers))
    if len(numbers) <= last:
        raise CorruptError(
            "A DeepSpeed checkpoint lacks a slice of the model.",
            place=folder,
            expected=f"files of the model of mp_rank_00 to mp_rank_{last:02d}",
            found=", ".join(f"mp_rank_{number:02d}" for number in numbers[:5]),
            remedy="copy what every machine of the run wrote into one folder",
        )
    return [Slice(_of_slice(models, number), _of_slice(optimizers, number)) for number in numbers]


def _ranks(folder: Place, names: list[str], pattern: re.Pattern[str]) -> dict[tuple[int, int], Place]:
    """Returns files by slice and data-parallel rank."""
    matches = [match for match in map(pattern.fullmatch, names) if match]
    # A universal copy for all stages has both names; this is whole.
    matches.sort(key=lambda match: match[1] is None)
    return {(int(match[2]), int(match[1] or 0)): folder / match[0] for match in matches}


def _of_slice(files: Mapping[tuple[int, int], Place], number: int) -> dict[int, Place]:
    return {rank: path for (slice_, rank), path in files.items() if slice_ == number}


def locate(path: Place, step: int | None = None, files: Files | None = None) -> Located | None:
    """Finds the checkpoint at a path: itself, or of a run's folder the one that `latest` names, or the given step's.

    Raises:
        NotFoundError: The given step isn't there.
        RefusedError: `latest` names something outside the folder, or ranks hold experts that aren't joined.
    """
    if not path.is_dir():
        return None
    here = tag_of(path)
    if here is not None:
        number = _number(path)
        if number is not None:
            check_step(step, number, path)
        return Located(here)
    return _among(path, step, files) or _of_trainer(path, step, files)


def _of_trainer(run: Place, step: int | None, files: Files | None) -> Located | None:
    """Finds the checkpoint in a run's folder of Transformers' Trainer, which has one in each step's folder."""
    matches = sorted((entry, match) for entry in listing(run) if (match := _TRAINERS.fullmatch(entry.name)))
    folders = {int(match[1]): entry for entry, match in matches if entry.is_dir()}
    folders_of_steps = {number: _among(folder, None, files) for number, folder in sorted(folders.items())}
    steps = {number: located for number, located in folders_of_steps.items() if located is not None}
    if not steps or (step is not None and step not in steps):
        return None
    return Located(steps[max(steps) if step is None else step].tag, tuple(steps))


def _numbered(run: Place) -> dict[int, Place]:
    """Returns the folder of each step; where a universal copy lies beside the ranks' own files, theirs."""
    matches = sorted((int(m[1]), bool(m[2]), e) for e in listing(run) if (m := _TAG.fullmatch(e.name)))
    folders: dict[int, Place] = {}
    for step, _, folder in matches:
        folders.setdefault(step, folder)
    return folders


def _among(run: Place, step: int | None, files: Files | None) -> Located | None:
    folders = _numbered(run)
    steps = tuple(folders)
    if step is not None:
        tag = tag_of(folders[step]) if step in folders else None
        if tag is None and steps:
            raise NotFoundError(
                "There is no such step.", place=run, expected=step, found=", ".join(map(str, steps))
            )
        return None if tag is None else Located(tag, steps)
    latest = next((name for file in LATEST if (name := _latest(run / file, bool(steps), files))), None)
    newest = [run / latest] if latest else [folders[n] for n in sorted(folders, reverse=True)]
    tag = next((tag for folder in newest if (tag := tag_of(folder)) is not None), None)
    return None if tag is None else Located(tag, steps)


def _latest(file: Place, ours: bool, files: Files | None) -> str | None:
    """Returns the name in a file; None if there is none, or one that isn't a folder's beside files that aren't ours."""
    if not file.is_file():
        return None
    name = first_bytes(file, _MAX_TAG, files).decode("utf-8", "replace").strip()
    if inside(name) and "/" not in name and name.isprintable():
        return name
    if ours:
        raise RefusedError(
            "The newest checkpoint's name leads out of its folder.",
            place=file,
            expected="the name of a folder beside it",
            found=repr(name[:80]),
        )
    return None


def _number(folder: Place) -> int | None:
    match = _TAG.fullmatch(folder.name)
    return int(match[1]) if match else None


def open_file(path: Place, files: Files, findings: list[Finding]) -> Tree:
    """Returns what a torch file holds; its tensors are named after the file.

    Raises:
        FormatError: The file can't be trusted.
    """
    opened = read_object(files.source(path))
    findings += opened.findings
    file = f"{path.parent.name}/{path.name}"
    return mapped(
        named(opened.tree),
        lambda leaf: replace(leaf, name=f"{file}:{leaf.name}") if isinstance(leaf, Stored) else leaf,
    )


def complete(files: Mapping[int, Place], ranks: int, what: str) -> list[Place]:
    """Returns the files of all ranks in order.

    Raises:
        CorruptError: Some are missing, or there are more than ranks.
    """
    missing = [*islice((rank for rank in range(ranks) if rank not in files), 5)]
    if missing or len(files) != ranks:
        raise CorruptError(
            f"A DeepSpeed checkpoint doesn't have the files of all ranks: {what}.",
            place=next(iter(files.values())).parent,
            expected=f"{ranks} ranks",
            found=f"{len(files)} files, without rank {', '.join(map(str, missing))}"
            if missing
            else len(files),
            remedy="copy what every machine of the run wrote into one folder",
        )
    return [files[rank] for rank in range(ranks)]


def require(node: Any, kind: type | tuple[type, ...], what: str, place: object) -> Any:
    """Returns a node if it is of a kind.

    Raises:
        FormatError: It isn't.
    """
    if isinstance(node, bool) or not isinstance(node, kind):
        raise FormatError(
            "A DeepSpeed checkpoint isn't made as DeepSpeed makes it.",
            place=place,
            expected=what,
            found=type(node).__name__,
        )
    return node
