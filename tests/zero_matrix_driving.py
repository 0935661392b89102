"""Right and wrong resumes of two processes under DeepSpeed's ZeRO, each held against a folder of Trainer's form.

    python zero_matrix_driving.py FOLDER

`FOLDER/cases.json` lists cases of a `stage` and a `schedule`, of a `dtype` below float32, of `ranks` other than 2.
What the callback found of each way to go on goes to `FOLDER/result.json`. Needs DeepSpeed, which runs on CPUs here.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from trainer_matrix_driving import SPECIAL

import statekit.hf
from statekit.errors import StateError

RANKS, STEPS, SAVED = 2, 5, 3


def moved_by(run: Any) -> Any:
    """Returns the optimizer that makes the update, inside of DeepSpeed's."""
    return getattr(run.optimizer, "optimizer", run.optimizer)


def zeroed(run: Any) -> None:
    for slots in moved_by(run).state.values():
        for name in slots.keys() - {"step"}:
            slots[name].zero_()


def counted_on(run: Any) -> None:
    for slots in moved_by(run).state.values():
        slots["step"] = slots["step"] + 1


def swapped(run: Any) -> None:
    """Lets two parameters of one shape have each other's slots, as another order of parameters does."""
    first, other = run.module[1].weight, run.module[2].weight
    if not hasattr(first, "ds_id") and not hasattr(first, "_hp_mapping"):
        params, state = moved_by(run).param_groups[0]["params"], moved_by(run).state
        state[params[2]], state[params[4]] = state[params[4]], state[params[2]]
        return
    if hasattr(run.optimizer, "_lazy_init_hp_params_optimizer_state"):
        run.optimizer._lazy_init_hp_params_optimizer_state()
    deepspeed: Any = import_module("deepspeed.utils")
    for slot in ("exp_avg", "exp_avg_sq"):
        ours, theirs = (
            deepspeed.safe_get_full_optimizer_state(param, slot).clone() for param in (first, other)
        )
        deepspeed.safe_set_full_optimizer_state(first, theirs, slot)
        deepspeed.safe_set_full_optimizer_state(other, ours, slot)


def weighed(run: Any) -> None:
    """Gives the model another weight than its master, as a load of weights behind the optimizer's back does."""
    param = run.module[1].weight
    if not hasattr(param, "ds_id"):
        param.data.mul_(1.5)
        return
    with import_module("deepspeed.runtime.zero").GatheredParameters([param], modifier_rank=0):
        param.data.mul_(1.5)


def times(name: str, factor: float) -> Callable[[Any], None]:
    """Returns what multiplies an option of the first group."""

    def change(run: Any) -> None:
        moved_by(run).param_groups[0][name] *= factor

    return change


WAYS: dict[str, Callable[[Any], None]] = {
    "right": lambda run: None,
    "rate": times("lr", 10.0),
    "moments": zeroed,
    "decay": times("weight_decay", 0.5),
    "count": counted_on,
    "swapped": swapped,
    "weights": weighed,
}


def engine(case: dict[str, Any]) -> Any:
    """Returns DeepSpeed's engine around a small model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.Linear(12, 12), torch.nn.Linear(12, 12))
    model[0].requires_grad_(not case.get("frozen"))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
    kind = case["schedule"]
    scheduler = transformers.get_scheduler(
        kind, optimizer, 1, STEPS, scheduler_specific_kwargs=SPECIAL.get(kind)
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({case["dtype"]: {"enabled": True}} if "dtype" in case else {}),
        **({"data_types": {"grad_accum_dtype": case["summed"]}} if "summed" in case else {}),
    }
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "config": config}
    return import_module("deepspeed").initialize(**given, dist_init_required=False)[0]


def save(case: dict[str, Any], folder: Path) -> None:
    """Trains up to the step that is saved, and saves it as Trainer does."""
    run = engine(case)
    for step in range(SAVED):
        torch.manual_seed(step)
        rows = torch.randn(2, 8, dtype=next(run.module.parameters()).dtype)
        run.backward(run(rows).square().mean())
        run.step()
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    run.save_checkpoint(str(folder), tag=f"global_step{SAVED}")
    if dist.get_rank() == 0:
        state = {"global_step": SAVED, "epoch": 1.0, "max_steps": STEPS}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        torch.save(run.lr_scheduler.state_dict(), folder / "scheduler.pt")
    dist.barrier()


def findings(case: dict[str, Any], folder: Path, change: Callable[[Any], None]) -> list[str]:
    """Returns what the callback finds of a way to go on."""
    run = engine(case)
    run.load_checkpoint(str(folder), tag=f"global_step{SAVED}")
    change(run)
    callback = statekit.hf.AttestCallback(folder)
    args, state = transformers.TrainingArguments(use_cpu=True), transformers.TrainerState()
    given = {"model": run, "optimizer": run.optimizer, "lr_scheduler": run.lr_scheduler}
    try:
        callback.on_step_begin(args, state, None, **given)
    except StateError as error:
        return [finding.name for finding in callback.result.findings] if callback.result else [error.subject]
    return []


def ranks_of(folder: Path) -> int:
    """Returns how many processes the cases run in."""
    cases = json.loads((folder / "cases.json").read_text())
    return int(cases[0].get("ranks", RANKS))


def work(rank: int, folder: Path, port: int) -> None:
    """Goes through all cases, in one of the processes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    cases = json.loads((folder / "cases.json").read_text())
    ranks = str(ranks_of(folder))
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": ranks, **place}
    deepspeed: Any = import_module("deepspeed")
    import_module("deepspeed.accelerator").get_accelerator().is_fp16_supported = lambda: (
        True
    )  # torch computes it
    # Its own collectives in shared memory would be compiled first.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo")
    results = []
    for i, case in enumerate(cases):
        run = folder / f"run{i}" / f"checkpoint-{SAVED}"
        save(case, run)
        results.append({way: findings(case, run, change) for way, change in WAYS.items()})
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = free.getsockname()[1]
    spawn: Any = import_module("torch.multiprocessing").spawn
    spawn(work, (Path(sys.argv[1]), chosen), ranks_of(Path(sys.argv[1])))
