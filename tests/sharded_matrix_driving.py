"""Right and wrong resumes of a run of two processes under FSDP, each held against a folder as Trainer leaves it.

    python sharded_matrix_driving.py FOLDER

`FOLDER/cases.json` lists cases of a form (`full`, `sharded`) and a schedule. What the callback found of each way to go
on goes to `FOLDER/result.json`. Trainer itself starts FSDP on accelerators alone: torch's `fully_shard` and the calls
by which Accelerate saves stand in its place, with the callback and the schedules of Transformers.

Source: huggingface/accelerate, utils/fsdp_utils.py, `save_fsdp_model`, `save_fsdp_optimizer`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from trainer_matrix_driving import SPECIAL, WRONG

import statekit.hf
from statekit.errors import StateError

RANKS, STEPS, SAVED = 2, 5, 3
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Run:
    """A model of a few layers, with its optimizer and its schedule, on one of two processes."""

    def __init__(self, schedule: str) -> None:
        torch.manual_seed(0)
        sizes = ((8, 12), (12, 12), (12, 4))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
        for layer in self.model:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
        fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = transformers.get_scheduler(
            schedule, self.optimizer, 1, STEPS, scheduler_specific_kwargs=SPECIAL.get(schedule)
        )

    def train(self, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self, folder: Path, form: str) -> None:
        options = FULL if form == "full" else None
        model = get_model_state_dict(self.model, options=options)
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        is_first = dist.get_rank() == 0
        if is_first:
            folder.mkdir(parents=True)
            torch.save(self.scheduler.state_dict(), folder / "scheduler.pt")
            state = {"global_step": SAVED, "epoch": 1.0, "max_steps": STEPS, "log_history": []}
            (folder / "trainer_state.json").write_text(json.dumps(state))
        dist.barrier()
        if form == "sharded":
            state_dict_saver.save({"model": model}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"))
            state_dict_saver.save({"optimizer": optimizer}, checkpoint_id=str(folder / "optimizer_0"))
        elif is_first:
            torch.save(model, folder / "pytorch_model_fsdp.bin")
            torch.save(optimizer, folder / "optimizer.bin")
        dist.barrier()

    def load(self, folder: Path, form: str) -> None:
        if form == "full":
            model = torch.load(folder / "pytorch_model_fsdp.bin", weights_only=True)
            optimizer = torch.load(folder / "optimizer.bin", weights_only=True)
        else:
            model = get_model_state_dict(self.model)
            optimizer = get_optimizer_state_dict(self.model, self.optimizer)
            state_dict_loader.load({"model": model}, checkpoint_id=str(folder / "pytorch_model_fsdp_0"))
            state_dict_loader.load({"optimizer": optimizer}, checkpoint_id=str(folder / "optimizer_0"))
        options = FULL if form == "full" else None
        set_model_state_dict(self.model, model, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)
        self.scheduler.load_state_dict(torch.load(folder / "scheduler.pt", weights_only=True))

    def findings(self, folder: Path) -> list[str]:
        """Returns what the callback finds before the first update."""
        callback = statekit.hf.AttestCallback(folder)
        args, state = transformers.TrainingArguments(use_cpu=True), transformers.TrainerState()
        given = {"model": self.model, "optimizer": self.optimizer, "lr_scheduler": self.scheduler}
        try:
            callback.on_train_begin(args, state, None, **given)
            callback.on_step_begin(args, state, None, **given)
        except StateError as error:
            names = [finding.name for finding in callback.result.findings] if callback.result else []
            return names or [error.subject]
        return []


def found(case: dict[str, str], folder: Path) -> dict[str, list[str]]:
    """Returns what each way to go on from a case's folder gives."""
    first = Run(case["schedule"])
    first.train(SAVED)
    first.save(folder, case["form"])
    ways: dict[str, Any] = {"right": lambda optimizer: None, **WRONG}
    results = {}
    for way, change in ways.items():
        again = Run(case["schedule"])
        again.load(folder, case["form"])
        change(again.optimizer)
        results[way] = again.findings(folder)
    return results


def work(rank: int, folder: Path, port: int) -> None:
    """Goes through all cases, in one of the processes."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    cases = json.loads((folder / "cases.json").read_text())
    results = [found(case, folder / f"run{i}" / f"checkpoint-{SAVED}") for i, case in enumerate(cases)]
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    spawn: Any = import_module("torch.multiprocessing").spawn
    spawn(work, (Path(sys.argv[1]), chosen), RANKS)
