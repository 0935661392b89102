"""Distributed checkpoints for tests: written by statekit, read whole, restored by PyTorch, and spoilt on purpose."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goldens import GOLDEN
from replaying import present
from statekit.conversion.contracts import Container, Encoded
from statekit.converters.containers.dcp import CONTAINER
from statekit.files.stage import staged
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, walk

DCP = [
    case.rpartition("/")[2]
    for case in present(
        "torch_formats/adafactor_dcp_single", "torch_formats/adamw_dcp_single",
        "torch_formats/adamw_dcp_single_flattened", "torch_formats/adamw_fsdp1_sharded_dcp",
        "torch_formats/adamw_fsdp2_dcp",
    )
]  # fmt: skip
"""Recordings whose checkpoint is a folder of torch.distributed.checkpoint."""
MEGATRON = "adamw_megatron_core"


def bundle(name: str) -> Path:
    return GOLDEN / "torch_formats" / name


def folder(name: str) -> Path:
    below = "iter_0000004" if name == MEGATRON else "dcp"
    return bundle(name) / "checkpoint" / below


def save(path: Path, tree: Tree, container: Container = CONTAINER, step: int = 4) -> Path:
    with staged(path, "folder") as stage:
        container.write(Encoded(tree, step), stage)
        stage.commit(container.open)
    return path


def plain(tree: Tree) -> dict[Any, Any]:
    """Every leaf by its path."""
    return {
        path: (leaf.dtype.name, leaf.shape, leaf.read().tobytes()) if isinstance(leaf, Tensor) else repr(leaf)
        for path, leaf in walk(tree)
    }


def bytes_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def torch_read(path: Path) -> dict[str, Any]:
    """Everything in a folder, as torch.distributed.checkpoint reads it without being told what is there."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    tensors: dict[str, Any] = {}
    planner: Any = _EmptyStateDictLoadPlanner
    _load_state_dict(tensors, storage_reader=FileSystemReader(path), planner=planner(), no_dist=True)
    return tensors


def spoilt(tmp_path: Path, change: Callable[[Any], None], source: Path | None = None) -> Path:
    """A copy of a folder whose metadata, a recording's and so trusted, was changed."""
    copy = tmp_path / "spoilt"
    shutil.copytree(source or folder(DCP[0]), copy)
    copy.chmod(0o755)
    place = copy / ".metadata"
    place.chmod(0o644)
    metadata = pickle.loads(place.read_bytes())
    change(metadata)
    place.write_bytes(pickle.dumps(metadata))
    return copy
