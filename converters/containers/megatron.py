"""Container `megatron`: distributed checkpoints of Megatron-Core.

It reads and writes an iteration: a folder of torch.distributed with two files beside. Input: it, or a run's folder:

    <run>/latest_checkpointed_iteration.txt    which iteration is the newest
    <run>/iter_0000004/metadata.json           {"sharded_backend": "torch_dist", ...}
                       common.pt               what no rank cuts: options of the groups, counts, arguments
                       .metadata, *.distcp     everything that is cut, as in `dcp`, under flat keys

Output: the tree {"common": ..., "sharded": {key: tensor or object}}. The folders of Megatron-LM's format `torch` are
read as well: they have `ranks`, what each rank's files hold:

    <run>/iter_0000004/mp_rank_00/model_optim_rng.pt    the model, the optimizer, counts, arguments
                                  distrib_optim.pt      a distributed optimizer's buckets, gathered by one rank
Source: NVIDIA/Megatron-LM megatron/core/dist_checkpointing/core.py, strategies/torch.py, strategies/common.py;
megatron/training/checkpointing.py, `get_checkpoint_name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.dcp import open_folder, step_folder, steps_below
from statekit.converters.containers.step_folders import step_prefix
from statekit.converters.formats.dcp.metadata import METADATA
from statekit.converters.formats.dcp.writer import DcpFolder
from statekit.converters.formats.pytorch.one_step import OfRanks, check_one_step, check_slots, options
from statekit.converters.formats.pytorch.reader import named, read_object
from statekit.converters.formats.pytorch.writer import write_archive
from statekit.errors import FormatError, NotFoundError, RefusedError, StatekitError
from statekit.files.checkpoint import STEPS, Checkpoint, Finding
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files, first_bytes, listing, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tree import Record, strict_json

COMMON, SHARDED = "common", "sharded"
"""The parts of the tree."""
_CONFIG, _COMMON_FILE = "metadata.json", "common.pt"
_MODEL, _GATHERED = "model_optim_rng.pt", "distrib_optim.pt"
_ALIKE = ("iteration", "opt_param_scheduler")
"""What Megatron-LM writes alike into every rank's file."""
_LEGACY, _RANK, _RANKS = f"mp_rank_00/{_MODEL}", re.compile(r"mp_rank_\d{2,3}"), "ranks"
_BUCKETS = "buckets"
"""Where a rank has the buckets of a distributed optimizer in the tree."""
_RANK_COUNT = "tensor_model_parallel_size"
"""The argument of Megatron-LM that says how many ranks share a layer."""
_LATEST = "latest_checkpointed_iteration.txt"
_ITERATION = "iter_{step:07d}"
_WRITTEN = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Megatron:
    """The folders of megatron.core.dist_checkpointing."""

    name: str = "megatron"
    title: str = "Megatron-Core's distributed checkpoints: common.pt beside a folder of torch.distributed"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = (METADATA, _CONFIG, _LATEST)

    def detect(self, path: Place) -> Evidence | None:
        """Looks at `metadata.json`, here or in a run's iterations, and at what stands beside it.

        A damaged one doesn't make the folder another library's: opening says what is wrong with it.
        """
        for folder in [path, *reversed(steps_below(path, _LEGACY).values())]:
            if (folder / _LEGACY).is_file():
                return Evidence(20, f"{folder / _LEGACY} is there")
        for folder in [path, *reversed(steps_below(path, _CONFIG).values())]:
            if not (folder / METADATA).is_file():
                continue
            if config := _config_if_sound(folder):
                return Evidence(20, f"{folder / _CONFIG} says {config['sharded_backend']}, beside {METADATA}")
            if (folder / _COMMON_FILE).is_file() and _may_be_damaged(folder / _CONFIG):
                return Evidence(20, f"{folder / _COMMON_FILE} beside {METADATA}")
        return None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the metadata and what is no tensor; values of tensors are read when asked for."""
        if (
            all((path / name).is_file() for name in (METADATA, _COMMON_FILE))
            and not (path / _CONFIG).exists()
        ):
            raise NotFoundError(
                "A file of the checkpoint isn't there.",
                place=path / _CONFIG,
                remedy="copy the whole folder; Megatron-Core reads it first, too",
            )
        if (path / _LEGACY).is_file() or steps_below(path, _LEGACY):
            return self._open_legacy(path, step, budget)
        wanted, remarks = _tracked(path, step, _CONFIG)
        place, number, steps = step_folder(path, wanted, _CONFIG, "checkpoint of Megatron-Core")
        with opening(path, budget) as files:
            _backend(place, files)
            common = read_object(files.source(place / _COMMON_FILE))
            folder = open_folder(place, files)
            sharded = {key: folder.values[key] for key in folder.contents.paths}
            tree, others = {COMMON: common.tree, SHARDED: sharded}, (_CONFIG, _COMMON_FILE)
            checkpoint = folder.checkpoint(self.name, tree, number, steps, others)
        return replace(checkpoint, findings=(*remarks, *common.findings, *checkpoint.findings))

    def _open_legacy(self, path: Place, step: int | None, budget: Budget | None) -> Checkpoint:
        """Opens a folder of the format `torch`, rank by rank."""
        wanted, remarks = _tracked(path, step, _LEGACY)
        place, number, steps = step_folder(path, wanted, _LEGACY, "checkpoint of Megatron-LM")
        ranks = _ranks(place)
        with opening(path, budget) as files:
            paths = [place / rank / _MODEL for rank in ranks]
            saved = [*map(read_object, map(files.source, paths))]
            models = [part.tree for part in saved]
            for file, tree in zip(paths, models, strict=True):
                if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
                    raise FormatError("A file of Megatron-LM holds no model.", place=file)
            _check_ranks(place, ranks, models[0].get("args"))
            _check_steps([*zip(paths, models, strict=True)])
            others = {key: part for key, part in models[0].items() if key not in ("model", "optimizer")}
            if not all(_inner(tree.get("optimizer")).get("state") for tree in models):
                gathered = [read_object(files.source(_gathered_file(place / rank))) for rank in ranks]
                models = [
                    {**tree, "optimizer": _nested(tree.get("optimizer")), _BUCKETS: part.tree}
                    for tree, part in zip(models, gathered, strict=True)
                ]
                saved += gathered
            findings = [*remarks, *(finding for part in saved for finding in part.findings)]
            tree = {COMMON: others, SHARDED: {}, _RANKS: dict(zip(ranks, models, strict=True))}
            return Checkpoint(
                self.name,
                place,
                named(tree),
                {STEPS: steps},
                number,
                tuple(findings),
                files.close,
                is_numbered=False,
            )

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes an iteration, or a run's folder with one, as the target is called."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the files of pieces."""
        return _pieces(encoded, target).image(cut)

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes what no rank cuts, the metadata, and which iteration is the newest."""
        pieces = _pieces(encoded, stage.target)
        prefix = pieces.below
        with stage.file(f"{prefix}{_COMMON_FILE}") as file:
            common = encoded.tree[COMMON]
            write_archive(common, file, lambda name, tensor: stage.stream(f"{COMMON}/{name}", tensor))
        pieces.join(stage, cut, records)
        with stage.file(f"{prefix}{_CONFIG}") as file:
            file.write(json.dumps(_WRITTEN).encode())
        if prefix:
            with stage.file(_LATEST) as file:
                file.write(str(encoded.step).encode())


def _tracked(run: Place, step: int | None, marker: str) -> tuple[int | None, list[Finding]]:
    """Returns which iteration of a run is opened, the one that Megatron's tracker names, and what is odd about it.

    Source: Megatron-LM, megatron/training/checkpointing.py, `read_metadata`.

    Args:
        run: The folder.
        step: The iteration that was asked for, if one was.
        marker: The file that each iteration has.
    """
    steps, tracker = steps_below(run, marker), run / _LATEST
    if step is not None or not steps or not tracker.is_file():
        return step, []
    name = first_bytes(tracker, 40).decode("utf-8", "replace").strip()
    if name.isdecimal() and int(name) in steps:
        return int(name), []
    odd = f"{_LATEST} names {name!r}, which isn't there, so that Megatron opens nothing; the newest one is taken"
    return None, [Finding(odd, f"{tracker}")]


def _pieces(encoded: Encoded, target: Place) -> DcpFolder:
    """Returns what is cut of a state, as it lies in a target."""
    prefix = step_prefix(target, encoded.step, _ITERATION)
    return DcpFolder(encoded.tree[SHARDED], below=prefix, named=f"{SHARDED}/", nested=False)


def _ranks(place: Place) -> list[str]:
    """Returns the folders of tensor-parallel ranks, in their order."""
    names = sorted(entry.name for entry in listing(place) if entry.name.startswith("mp_rank_"))
    if more := [name for name in names if not _RANK.fullmatch(name)]:
        raise RefusedError(
            "Ranks of this run hold stages of a pipeline or experts, and statekit joins tensor-parallel ranks alone.",
            place=place,
            expected="folders mp_rank_00, mp_rank_01, ...",
            found=", ".join(more[:3]),
            remedy="save it with --ckpt-format torch_dist",
        )
    expected = [f"mp_rank_{number:02d}" for number in range(len(names))]
    if names != expected:
        raise NotFoundError(
            "A rank's folder isn't there.",
            place=place,
            expected=", ".join(expected[:5]),
            found=", ".join(names[:5]),
            remedy="copy the whole folder",
        )
    return names


def _check_ranks(place: Place, ranks: list[str], arguments: Any) -> None:
    """Refuses a folder that has other ranks than the arguments of its run count."""
    stated = arguments.state if isinstance(arguments, Record) else arguments
    count = stated.get(_RANK_COUNT) if isinstance(stated, dict) else None
    if type(count) is int and count != len(ranks):
        raise NotFoundError(
            "The folder has other ranks than its run had.",
            place=place,
            expected=f"{count} of them, as {_RANK_COUNT} says in {_LEGACY}",
            found=", ".join(ranks[:5]),
            remedy="copy the whole folder",
        )


def _check_steps(of_ranks: OfRanks) -> None:
    """Refuses a rank's file of another step than the first's, or with other options: tensor-parallel ranks move as one.

    Raises:
        CorruptError: There is one.
    """
    optimizers = [_inner(tree.get("optimizer")) for _, tree in of_ranks]
    check_one_step(
        [
            (
                place,
                {**{key: tree.get(key) for key in _ALIKE}, "param_groups": [*map(options, _groups(inner))]},
            )
            for (place, tree), inner in zip(of_ranks, optimizers, strict=True)
        ]
    )
    states = [_record(inner.get("state")) for inner in optimizers]
    for number in states[0]:
        check_slots(
            [(place, _record(of.get(number))) for (place, _), of in zip(of_ranks, states, strict=True)]
        )


def _record(node: Any) -> Mapping[Any, Any]:
    return node if isinstance(node, dict) else {}


def _groups(optimizer: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    groups = optimizer.get("param_groups")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def _inner(optimizer: Any) -> Mapping[Any, Any]:
    """Returns what has groups and state: the optimizer, or the one beside masters."""
    return _record(_nested(optimizer)["optimizer"])


def _nested(optimizer: Any) -> Mapping[Any, Any]:
    """Returns an optimizer's record with its groups below `optimizer`, as beside masters."""
    parts = _record(optimizer)
    return parts if "optimizer" in parts else {"optimizer": parts}


def _gathered_file(rank: Place) -> Place:
    """Returns the file with the values of a rank's distributed optimizer."""
    values = rank / _GATHERED
    if not values.exists():
        raise _not_gathered(rank / _MODEL, values)
    return values


def _not_gathered(model: Place, values: Place) -> NotFoundError:
    """Returns what to do about a folder of the format `torch` in which no rank has gathered an optimizer's buckets."""
    return NotFoundError(
        "The values of Megatron-LM's distributed optimizer aren't there.",
        place=values,
        expected="the file that rank 0 writes beside the model's",
        remedy=f"copy the whole folder; for the weights alone, read the model's file by itself: {model}",
    )


def _config_if_sound(folder: Place) -> dict[str, Any] | None:
    try:
        return _config(folder)
    except StatekitError:
        return None


def _may_be_damaged(config: Place) -> bool:
    """Tells whether a configuration isn't there, is no JSON, or has some of its keys and not the one that counts."""
    if not config.is_file():
        return True
    try:
        kept = strict_json(read_small(config), config)
    except StatekitError:
        return True
    return isinstance(kept, dict) and bool(kept.keys() & _WRITTEN.keys())


def _config(folder: Place, files: Files | None = None) -> dict[str, Any] | None:
    place = folder / _CONFIG
    if not place.is_file():
        return None
    config = strict_json(read_small(place, files), place, files.account if files else None)
    return config if isinstance(config, dict) and isinstance(config.get("sharded_backend"), str) else None


def _backend(folder: Place, files: Files) -> None:
    """Refuses what lies otherwise than in a folder of torch.distributed."""
    config = _config(folder, files)
    if config is None:
        raise FormatError("The configuration names no backend.", place=folder / _CONFIG)
    backends = (config["sharded_backend"], config.get("common_backend", "torch"))
    if backends != ("torch_dist", "torch"):
        raise RefusedError(
            "This generation of Megatron-Core's checkpoints isn't read.",
            place=folder / _CONFIG,
            expected="sharded_backend torch_dist, common_backend torch",
            found=f"{backends[0]}, {backends[1]}",
            remedy="load it with Megatron-LM and save it with --dist-ckpt-format torch_dist",
        )


CONTAINER = Megatron()
