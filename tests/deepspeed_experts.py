"""Runs the lines that go on with a universal checkpoint of experts, in DeepSpeed itself: on a CPU, with gloo.

    python deepspeed_experts.py LINES ENGINE.safetensors STAGE RANKS SAVED

ENGINE has what the engine of the run held. Makes one more update and saves at SAVED. Prints the largest difference from
ENGINE after loading, as JSON, last.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SLOTS = {"fp32": None, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


class Experts(torch.nn.Module):
    """As in cases/deepspeed_ranks/make_ranks.py, with all experts on each rank."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.inp = torch.nn.Linear(4, 8)
        self.moe = experts(8, expert=torch.nn.Linear(8, 8), num_experts=4, k=1)
        self.moe2 = experts(8, expert=torch.nn.Linear(8, 8, bias=False), num_experts=2, k=1)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns a loss."""
        hidden, *_ = self.moe(self.inp(inputs))
        hidden, *_ = self.moe2(hidden)
        loss: torch.Tensor = self.head(hidden).float().square().mean()
        return loss


def work(rank: int, lines: str, engine_file: str, stage: int, ranks: int, saved: str, port: int) -> None:
    """Does the work of a rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}  # fmt: skip
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    deepspeed = import_module("deepspeed")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(7)
    low = "bf16" in engine_file
    config = {
        "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": stage}, "bf16": {"enabled": low},
    }  # fmt: skip
    run: dict[str, Any] = {"model": Experts(import_module("deepspeed.moe.layer").MoE), "config": config}
    exec(Path(lines).read_text(encoding="utf-8"), run)
    utils, recorded, differences = deepspeed.utils, load_file(engine_file), []
    for name, param in run["model"].named_parameters():
        for key, slot in SLOTS.items():
            of_engine = utils.safe_get_full_optimizer_state(param, slot) if slot else None
            ours = utils.safe_get_full_fp32_param(param) if of_engine is None else of_engine
            differences.append(float((ours - recorded[f"{name}|{key}"]).abs().max()))
    inputs = torch.randn(8, 4, dtype=torch.bfloat16 if low else torch.float32)
    run["engine"].backward(run["engine"](inputs))
    run["engine"].step()
    run["engine"].save_checkpoint(saved)
    if rank == 0:
        print(json.dumps([len(differences), max(differences)]), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    of_lines, engine, of_stage, count, target = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    said = (of_lines, engine, int(of_stage), int(count), target, number)
    import_module("torch.multiprocessing").spawn(work, said, nprocs=int(count))
