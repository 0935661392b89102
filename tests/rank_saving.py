"""Trains a small network on gloo ranks, each of which pickles its own state as verl's checkpoint manager does.

Usage: rank_saving.py KIND RANKS FOLDER; whole.pt is written beside FOLDER. KIND is fsdp2, hybrid, tensor_parallel, or
fsdp1_sharded, fsdp1_local: then each rank saves one file, ckpt_rank<r>.pt, of FSDP1's state dicts of that name.

    rank_saving.py lines RANKS FOLDER runs the printed lines of FOLDER on ranks of FSDP1 and writes the next update's
    weights beside it: next.pt.
Source: volcengine/verl, verl/utils/checkpoint/fsdp_checkpoint_manager.py, `FSDPCheckpointManager.save_checkpoint`.
"""

from __future__ import annotations

import copy
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NAMES = (
    "emb.weight",
    "first.weight",
    "first.bias",
    "norm.weight",
    "norm.bias",
    "second.weight",
    "second.bias",
)


class Net(torch.nn.Module):
    """Layers of odd widths; under tensor parallelism of even ones."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, width)
        self.norm = torch.nn.LayerNorm(width)
        self.second = torch.nn.Linear(width, 3)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.norm(torch.tanh(self.first(self.emb(x)))))
        return y


def sharded(kind: str, ranks: int) -> torch.nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Net(6 if kind == "tensor_parallel" else 5)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
    if kind != "fsdp2":
        mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "tensor_parallel":
        parallelize_module(model.first, mesh["inner"], ColwiseParallel(output_layouts=Replicate()))
        mesh = mesh["outer"]
    for part in (model.emb, model.first, model.second, model):
        fully_shard(part, mesh=mesh)
    return model


BATCHES = 4
"""Updates before the save."""


def fsdp1() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    policy = ModuleWrapPolicy({torch.nn.Linear})
    model = FullyShardedDataParallel(Net(), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: range) -> None:
    for i in batches:
        torch.manual_seed(100 + i)
        model(torch.randint(0, 11, (8,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    config = FullStateDictConfig(rank0_only=False)
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
    weights = model.state_dict()
    optim = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    return {"model": weights, "optim": [optim[name] for name in NAMES]}


def run_fsdp1(rank: int, kind: str, ranks: int, folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    dist.init_process_group("gloo", init_method=f"file://{folder}.store{kind}", rank=rank, world_size=ranks)
    model, optimizer = fsdp1()
    if kind == "lines":
        names: dict[str, Any] = {"model": model}
        exec(compile((folder.parent / "lines.py").read_text(), "lines.py", "exec"), names)
        update(model, names["optimizer"], range(BATCHES, BATCHES + 1))
        weights = full(model, names["optimizer"])["model"]
        if rank == 0:
            torch.save(weights, folder.parent / "next.pt")
        dist.destroy_process_group()
        return
    update(model, optimizer, range(BATCHES))
    form = StateDictType.SHARDED_STATE_DICT if kind == "fsdp1_sharded" else StateDictType.LOCAL_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(model, form):
        parts = {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
        torch.save({**parts, "rank": rank, "rng": torch.get_rng_state()}, folder / f"ckpt_rank{rank}.pt")
    whole_run = {key: copy.deepcopy(part) for key, part in full(model, optimizer).items()}
    update(model, optimizer, range(BATCHES, BATCHES + 1))
    whole_run["next"] = full(model, optimizer)["model"]
    if rank == 0:
        torch.save(whole_run, folder.parent / "whole.pt")
    dist.destroy_process_group()


def whole(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: whole(part) for key, part in node.items()}
    return node.full_tensor() if hasattr(node, "full_tensor") else node


def run(rank: int, kind: str, ranks: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=ranks)
    model = sharded(kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for i in range(4):
        torch.manual_seed(100 + i)
        model(torch.randint(0, 11, (8,))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    parts = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    schedule = {"lr_scheduler": {"last_epoch": 4, "_last_lr": [0.01]}, "rng": {"cpu": torch.get_rng_state()}}
    for name, part in {**parts, "extra_state": schedule}.items():
        torch.save(part, folder / f"{name}_world_size_{ranks}_rank_{rank}.pt")
    full = {"model": whole(parts["model"]), "optim": whole(parts["optim"]["state"])}
    if rank == 0:
        torch.save(full, folder.parent / "whole.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    where = Path(sys.argv[3])
    where.mkdir(exist_ok=True)
    arguments: Any = sys.argv[1], int(sys.argv[2]), where
    saving = run_fsdp1 if sys.argv[1].startswith(("fsdp1", "lines")) else run
    processes = [
        multiprocessing.Process(target=saving, args=(rank, *arguments)) for rank in range(arguments[1])
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in processes))
