"""DeepSpeed's universal checkpoints: a folder for each parameter, a file for each of its tensors.

    zero/<parameter>/fp32.pt, exp_avg.pt, ...   {param: tensor, cat_dim} (ZeRO 1 and 2), or a flat tensor (ZeRO 3)
    zero/<parameter>/step.pt                    ZeRO 1 and 2
    zero/optimizer_state.pt                     the groups, and the state of rank 0 without its parts; ZeRO 3 with them

Source: deepspeedai/DeepSpeed deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`, `_save_optimizer_state`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from statekit.converters.containers.deepspeed.files import MASTER, UNIVERSAL, open_file, require
from statekit.converters.containers.deepspeed.zero import Shapes
from statekit.errors import CorruptError, FormatError, some
from statekit.files.checkpoint import Finding
from statekit.files.source import Files, listing
from statekit.files.tree import Place
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Record, Tree
from statekit.tensors.views import Concatenated, Segment

_STATE = "optimizer_state.pt"
_STEP = "step"
_OF_RANK = {
    "optimizer_state_dict", "base_optimizer_state", "fp32_flat_groups", "single_partition_of_fp32_groups",
}  # fmt: skip


def universal_state(
    tag: Place, shapes: Shapes, sliced: bool, files: Files, findings: list[Finding]
) -> tuple[dict[str, dict[str, Any]], list[Mapping[str, Any]], dict[str, Tree]]:
    """Returns the optimizer's state by name, its groups, and what the engine keeps beside.

    Args:
        tag: The checkpoint's folder.
        shapes: The parameters, as a rank has them.
        sliced: Whether ranks had slices of them; the files alone know the whole then.
        files: The checkpoint's open files.
        findings: Where what is odd is noted.

    Raises:
        CorruptError: A parameter's files are missing, or hold another number of values.
        FormatError: A file has another form than DeepSpeed gives it.
    """
    folder = tag / UNIVERSAL
    if not (folder / _STATE).is_file():
        raise CorruptError("A universal checkpoint has no groups.", place=folder / _STATE)
    record = require(
        open_file(folder / _STATE, files, findings), dict, "a dict with param_groups", folder / _STATE
    )
    groups = require(record.get("param_groups"), list, "groups", folder / _STATE)
    wanted = {name: shape for group in shapes for name, shape in group.items()}
    _check_folders(folder, wanted, findings)
    step = _step_of(record)
    state = {
        name: _parameter(folder / name, shape, sliced, step, files, findings)
        for name, shape in wanted.items()
    }
    _check_slots(folder, state)
    engine = {key: value for key, value in record.items() if key not in _OF_RANK and key != "param_groups"}
    return state, [require(group, dict, "a group", folder / _STATE) for group in groups], engine


def _check_folders(folder: Place, wanted: Mapping[str, Shape], findings: list[Finding]) -> None:
    names = {entry.name for entry in listing(folder) if entry.is_dir()}
    if missing := [name for name in wanted if name not in names]:
        raise CorruptError(
            "A universal checkpoint lacks the folders of parameters.",
            place=folder,
            found=", ".join(missing[:5]),
        )
    others = sorted(names - wanted.keys())
    if unnamed := [name for name in others if (folder / name / f"{MASTER}.pt").is_file()]:
        raise CorruptError(
            "A universal checkpoint holds parameters that the model's file doesn't name.",
            place=folder,
            found=some(unnamed),
            remedy="make it again of the run's checkpoint: ds_to_universal.py",
        )
    findings += [Finding("belongs to no parameter, passed over", str(folder / name)) for name in others]


def _check_slots(folder: Place, state: Mapping[str, Mapping[str, Any]]) -> None:
    every = dict.fromkeys(key for slots in state.values() for key in slots)
    if gone := [f"{name}/{key}.pt" for name, slots in state.items() for key in every if key not in slots]:
        raise CorruptError(
            "A universal checkpoint lacks files that its other parameters have.",
            place=folder,
            found=", ".join(gone[:5]),
        )


def _parameter(
    folder: Place, shape: Shape, sliced: bool, step: Any, files: Files, findings: list[Finding]
) -> dict[str, Any]:
    entries = [entry for entry in listing(folder) if entry.suffix == ".pt"]
    slots: dict[str, Any] = {} if step is None else {_STEP: step}
    for file in entries:
        node = open_file(file, files, findings)
        slots[file.stem] = node if file.stem == _STEP else _shaped(node, shape, sliced, file)
    if MASTER not in slots:
        raise CorruptError(
            "A parameter of a universal checkpoint has no weight.", place=folder / f"{MASTER}.pt"
        )
    return slots


def _shaped(node: Any, shape: Shape, sliced: bool, file: Place) -> Tensor:
    tensor = node.get("param") if isinstance(node, Mapping) else node
    if not isinstance(tensor, Tensor):
        raise FormatError("A file of a universal checkpoint holds no tensor.", place=file)
    if tensor.shape == shape or (isinstance(node, Mapping) and _is_whole(node, tensor.shape, shape, sliced)):
        return tensor
    if tensor.shape != (math.prod(shape),):
        raise CorruptError(
            "A parameter has another shape than it had.", place=file, expected=shape, found=tensor.shape
        )
    return Concatenated((Segment(tensor, 0, math.prod(shape)),), shape)


def _is_whole(record: Mapping[str, Any], whole: Shape, piece: Shape, sliced: bool) -> bool:
    """Tells whether a rank's piece may belong to a file's whole tensor; a vocabulary loses its padding."""
    if len(whole) != len(piece):
        return False
    rows, *others = zip(whole, piece, strict=True)
    is_wider = sliced and all(n >= part for n, part in others)
    is_cut = bool(record.get("vocab_tensor")) and rows[0] <= rows[1] and all(n == part for n, part in others)
    return is_cut or (is_wider and (rows[0] >= rows[1] or bool(record.get("vocab_tensor"))))


def _step_of(record: Mapping[str, Any]) -> Any:
    """Returns the count of updates that stands with rank 0's state, as under ZeRO 3."""
    base = record.get("optimizer_state_dict")
    state = base.get("state") if isinstance(base, Mapping) else None
    first = next(iter(state.values()), None) if isinstance(state, Mapping) else None
    return first.get(_STEP) if isinstance(first, Mapping) and not isinstance(first, Record) else None
