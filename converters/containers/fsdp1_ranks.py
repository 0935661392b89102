"""Container `fsdp1-ranks`: what each rank's own optimizer.state_dict() holds under FSDP1, flat, a file for each rank.

It joins the flat pieces of all ranks to whole parameters; it only reads. Input: the folder of the ranks' files:

    rank<r>.pt     {optimizer, flat_param_shard, rank, world_size, fqns, shapes}

Output: {model, optimizer} by name. With use_orig_params=False a wrapped unit has one flat parameter: its parameters
one after the other, zeros at the end, cut into one equal piece for each rank. PyTorch keeps the names and shapes on the
module, in no file; so these files must have been given them: `fqns` and `shapes` in the order of the flat parameter,
and the rank's piece of it.
Source: pytorch/pytorch torch/distributed/fsdp/_flat_param.py, `FlatParamHandle`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.budget import Budget
from statekit.conversion.contracts import Evidence, ReadOnly
from statekit.converters.containers.step_folders import files_beside
from statekit.converters.containers.torch_file import open_torch
from statekit.converters.formats.pytorch.one_step import check_one_step
from statekit.converters.formats.pytorch.reader import named, read_object
from statekit.errors import FormatError, NotFoundError, StatekitError
from statekit.files.checkpoint import FILES_BESIDE, Checkpoint
from statekit.files.source import Files, listing, opening
from statekit.files.tree import Place
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Tree
from statekit.tensors.views import Concatenated, Segment

_RANK = re.compile(r"rank(\d{1,5})\.pt")
_FLAT = "flat_param_shard"
_KEYS = {"optimizer", "flat_param_shard", "rank", "world_size", "fqns", "shapes"}


@dataclass(frozen=True)
class FsdpRanks(ReadOnly):
    """The files of all ranks, with the layout of their flat parameter."""

    name: str = "fsdp1-ranks"
    title: str = "FSDP1's flat states, a torch file rank<r>.pt for each rank, with names and shapes in it"

    def detect(self, path: Place) -> Evidence | None:
        """Looks for the file of rank 0 with its piece of a flat parameter; without one it is any program's."""
        first = path / "rank0.pt"
        try:
            with Files() as files:
                tree = read_object(files.source(first)).tree if first.is_file() else None
        except (OSError, StatekitError):
            return None
        is_flat = isinstance(tree, Mapping) and _FLAT in tree
        return Evidence(20, f"{first} has {_FLAT}") if is_flat else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickles of all ranks, and joins their pieces."""
        if step is not None or not (path / "rank0.pt").is_file():
            asked = f"step {step}" if step is not None else None
            raise NotFoundError(
                "The folder has no files of ranks.", place=path, expected="rank0.pt ...", found=asked
            )
        entries = sorted((entry for entry in listing(path) if _RANK.fullmatch(entry.name)), key=_number)
        with opening(path, budget) as files:
            opened = [open_torch(file, files) for file in entries]
            ranks = [checkpoint.tree for checkpoint in opened]
            _check(path, [_number(file) for file in entries], ranks)
            tree = named(_joined(path, ranks))
            other_files = files_beside(path, {file.name for file in entries}, files)
        meta = {"ranks": len(ranks), FILES_BESIDE: other_files}
        findings = tuple(finding for checkpoint in opened for finding in checkpoint.findings)
        return Checkpoint(self.name, path, tree, meta, findings=findings, on_close=files.close)


def _number(file: Place) -> int:
    match = _RANK.fullmatch(file.name)
    return int(match[1]) if match else -1


def _check(path: Place, numbers: Sequence[int], ranks: Sequence[Tree]) -> None:
    for number, tree in zip(numbers, ranks, strict=False):
        lacking = _KEYS - tree.keys() if isinstance(tree, Mapping) else _KEYS
        if lacking:
            raise FormatError(
                "A rank's file lacks what tells the layout of its flat parameter.",
                place=path / f"rank{number}.pt",
                expected=", ".join(sorted(_KEYS)),
                found=f"without {', '.join(sorted(lacking))}",
            )
        same = all(tree[key] == ranks[0][key] for key in ("world_size", "fqns", "shapes"))
        if tree["rank"] != number or tree["world_size"] != len(numbers) or not same:
            raise FormatError(
                "The files of ranks contradict each other.",
                place=path / f"rank{number}.pt",
                expected=f"rank {number} of {len(numbers)}, with the names and shapes of rank 0",
                found=f"rank {tree['rank']} of {tree['world_size']}",
            )


def _cut_and_whole(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Returns the pieces of each slot that ranks share, and what every rank has whole, as the first says it."""
    cut = [slot for slot, leaf in records[0].items() if getattr(leaf, "shape", ())]
    whole = {slot: leaf for slot, leaf in records[0].items() if slot not in cut}
    return {slot: [record.get(slot) for record in records] for slot in cut}, whole


def _joined(path: Place, ranks: Sequence[Mapping[str, Any]]) -> Tree:
    fqns, shapes = ranks[0]["fqns"], ranks[0]["shapes"]
    if not _are_names(fqns) or not _are_shapes(shapes) or len(shapes) != len(fqns):
        raise FormatError("Names and shapes of a flat parameter don't fit.", place=path)
    spans = list(_spans(fqns, [tuple(shape) for shape in shapes]))
    groups = [_group(rank, path) for rank in ranks]
    slots, uncut = _cut_and_whole(records := [_record(rank, path) for rank in ranks])
    check_one_step(
        [
            (path / f"rank{number}.pt", {**group, **{slot: record.get(slot) for slot in uncut}})
            for number, (group, record) in enumerate(zip(groups, records, strict=True))
        ]
    )
    whole = [rank["flat_param_shard"] for rank in ranks]
    state = {
        name: {**uncut, **{slot: _part(pieces, at, shape, path) for slot, pieces in slots.items()}}
        for name, at, shape in spans
    }
    return {
        "model": {name: _part(whole, at, shape, path) for name, at, shape in spans},
        "optimizer": {"state": state, "param_groups": [{**groups[0], "params": list(fqns)}]},
    }


def _group(rank: Mapping[str, Any], path: Place) -> Mapping[str, Any]:
    """Returns the options of a rank's flat parameter."""
    optimizer = rank["optimizer"]
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        return groups[0]
    raise FormatError(
        "A rank's optimizer isn't that of one flat parameter.",
        place=path,
        expected="one group",
        found=f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__,
    )


def _record(rank: Mapping[str, Any], path: Place) -> Mapping[str, Any]:
    """Returns the slots of a rank's flat parameter."""
    optimizer = rank["optimizer"]
    states = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    record = states.get(0) if isinstance(states, Mapping) else None
    if isinstance(record, Mapping):
        return record
    raise FormatError("A rank's optimizer has no state of the flat parameter.", place=path)


def _are_names(fqns: Any) -> bool:
    return (
        isinstance(fqns, list) and all(isinstance(name, str) for name in fqns) and len(set(fqns)) == len(fqns)
    )


def _are_shapes(shapes: Any) -> bool:
    return isinstance(shapes, list | tuple) and all(isinstance(shape, list | tuple) for shape in shapes)


def _spans(fqns: Sequence[str], shapes: Sequence[Shape]) -> Iterator[tuple[str, int, Shape]]:
    """Yields name, first element in the flat parameter, and shape."""
    at = 0
    for name, shape in zip(fqns, shapes, strict=True):
        if not all(type(n) is int and 0 <= n < 2**48 for n in shape):
            raise FormatError("A parameter has an impossible shape.", place=name, found=str(shape)[:100])
        yield name, at, shape
        at += math.prod(shape)


def _part(pieces: Sequence[Any], start: int, shape: Shape, path: Place) -> Tensor:
    """Returns one parameter's share of a flat vector of which each rank holds a piece."""
    runs, at, stop = [], 0, start + math.prod(shape)
    for piece in pieces:
        if not isinstance(piece, Tensor) or len(piece.shape) != 1 or piece.dtype != pieces[0].dtype:
            raise FormatError("The ranks' pieces of a flat parameter don't fit each other.", place=path)
        first, last = max(start - at, 0), min(stop - at, piece.shape[0])
        if first < last:
            runs.append(Segment(piece, first, last - first))
        at += piece.shape[0]
    if at < stop:
        raise FormatError(
            "The ranks' pieces are too short for the shapes.", place=path, expected=stop, found=at
        )
    return Concatenated(tuple(runs) or (Segment(pieces[0], 0, 0),), shape)


CONTAINER = FsdpRanks()
