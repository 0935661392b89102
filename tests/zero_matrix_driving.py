"""Right and wrong resumes of two processes under DeepSpeed's ZeRO, each held against a folder of Trainer's form.

    python zero_matrix_driving.py FOLDER

`FOLDER/cases.json` lists cases of a `stage` and a `schedule`, of a `dtype` below float32, of `ranks` other than 2; with
an `optim`, Trainer drives DeepSpeed itself. What the callback found of each way to go on goes to `FOLDER/result.json`.
Needs DeepSpeed, which runs on CPUs with gloo here.
"""

from __future__ import annotations

import itertools
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
from trainer_matrix_driving import SPECIAL, Spoils, model_of

import statekit.hf
from statekit.errors import StateError

RANKS, STEPS, SAVED = 2, 5, 3


def moved_by(run: Any) -> Any:
    """Returns the optimizer that makes the update, inside of DeepSpeed's."""
    return getattr(run.optimizer, "optimizer", run.optimizer)


def zeroed(run: Any) -> None:
    for slots in moved_by(run).state.values():
        for name in slots.keys() - {"step", "RMS"}:
            slots[name].zero_()


def counted_on(run: Any) -> None:
    for slots in moved_by(run).state.values():
        slots["step"] = slots["step"] + 1


def alike(run: Any) -> tuple[Any, Any]:
    """Returns two parameters of one shape that are trained."""
    trained = [param for param in run.module.parameters() if param.requires_grad]
    pairs = itertools.combinations(trained, 2)
    return next(
        pair for pair in pairs if len({getattr(param, "ds_shape", param.shape) for param in pair}) == 1
    )


def swapped(run: Any) -> None:
    """Lets two parameters of one shape have each other's slots, as another order of parameters does."""
    first, other = alike(run)
    if not hasattr(first, "ds_id") and not hasattr(first, "_hp_mapping"):
        state = moved_by(run).state
        pairs = itertools.combinations(state, 2)
        first, other = next(pair for pair in pairs if pair[0].shape == pair[1].shape)
        state[first], state[other] = state[other], state[first]
        return
    if hasattr(run.optimizer, "_lazy_init_hp_params_optimizer_state"):
        run.optimizer._lazy_init_hp_params_optimizer_state()
    deepspeed: Any = import_module("deepspeed.utils")
    record = next(iter(moved_by(run).state.values()))
    for slot in [name for name, value in record.items() if isinstance(value, torch.Tensor) and value.dim()]:
        ours, theirs = (
            deepspeed.safe_get_full_optimizer_state(param, slot).clone() for param in (first, other)
        )
        deepspeed.safe_set_full_optimizer_state(first, theirs, slot)
        deepspeed.safe_set_full_optimizer_state(other, ours, slot)


def weighed(run: Any) -> None:
    """Gives the model another weight than its master, as a load of weights behind the optimizer's back does."""
    param = alike(run)[0]
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


def trainer(case: dict[str, Any], folder: Path, *callbacks: Any) -> Any:
    """Returns Trainer that drives DeepSpeed itself, by a configuration among its arguments."""
    vars(transformers.training_args)["is_torch_bf16_gpu_available"] = lambda: (
        True
    )  # torch computes it, without one
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": case["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "auto"},
    }
    args = transformers.TrainingArguments(
        output_dir=str(folder.parent), optim=case["optim"], bf16="dtype" in case, deepspeed=config,
        per_device_train_batch_size=2, max_steps=STEPS, save_steps=SAVED, warmup_steps=1, learning_rate=0.01,
        weight_decay=0.1, lr_scheduler_type=case["schedule"], report_to="none", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(8).repeat(16, 1)]
    return transformers.Trainer(model_of("full"), args, train_dataset=rows, callbacks=[*callbacks])


def trainer_findings(case: dict[str, Any], folder: Path, change: Callable[[Any], None]) -> list[str]:
    """Returns what the callback finds of a way to go on in Trainer."""
    callback = statekit.hf.AttestCallback(folder)
    run = trainer(case, folder)
    spoils = Spoils(lambda optimizer: change(run.model_wrapped))
    for each in (spoils, callback):
        run.add_callback(each)
    try:
        run.train(resume_from_checkpoint=str(folder))
    except StateError as error:
        return [finding.name for finding in callback.result.findings] if callback.result else [error.subject]
    return []


def save(case: dict[str, Any], folder: Path) -> None:
    """Trains up to the step that is saved, and saves it as Trainer does."""
    if "optim" in case:
        trainer(case, folder).train()
        return
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
        find = trainer_findings if "optim" in case else findings
        results.append({way: find(case, run, change) for way, change in WAYS.items()})
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
