"""The container `hf-trainer`: the folders of Transformers' Trainer.

It reads and writes what Trainer resumes from. In goes a step's folder, or a run's:

    <run>/checkpoint-<step>/   model, optimizer.pt, scheduler.pt, trainer_state.json, rng_state.pth, ...

Out comes the tree {model, optimizer, scheduler, scaler, trainer_state, files}.
Source: huggingface/transformers, trainer.py, `_save_checkpoint`, `_load_optimizer_and_scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from statekit.conversion.contracts import Encoded
from statekit.converters.containers.huggingface.folder import PARTS, TRAINER_STATE, HuggingFaceFolder
from statekit.converters.containers.huggingface.model import find_model
from statekit.tensors.tree import Tree, at

DEEPSPEED_TAG = "latest"
"""The file in folders of Trainer with DeepSpeed, whose optimizer lies in DeepSpeed's own."""


def _trainer(folder: Path) -> str:
    if not (folder / TRAINER_STATE).is_file() or (folder / DEEPSPEED_TAG).exists():
        return ""
    beside = find_model(folder) or next((n for n in PARTS["optimizer"] if (folder / n).is_file()), "")
    return f"{TRAINER_STATE} beside {beside}" if beside else ""


def _for_trainer(encoded: Encoded) -> Mapping[str, Tree]:
    """Returns what Trainer must find to load an optimizer.

    Without a scheduler's file Trainer passes over the optimizer's in silence; without a state it doesn't know the step.
    Source: transformers, trainer.py, `_load_optimizer_and_scheduler`; torch/optim/lr_scheduler.py, `load_state_dict`.
    """
    groups = at(encoded.tree, ("optimizer", "param_groups")) or ()
    lambdas = [None] * len(groups)
    scheduler = {"last_epoch": encoded.step, "_step_count": encoded.step + 1, "lr_lambdas": lambdas}
    # Nobody knows the batch size: without a number Trainer fails, and those of 4.x would train with the one they find;
    # 0 makes these stop, and newer ones warn.
    state = {"epoch": 0.0, "global_step": encoded.step, "log_history": [], "train_batch_size": 0}
    return {"scheduler": scheduler, "trainer_state": state}


CONTAINER = HuggingFaceFolder(
    "hf-trainer",
    "Hugging Face Trainer's folder: checkpoint-<step> with model, optimizer.pt and trainer_state.json",
    {key: names[0] for key, names in PARTS.items()},
    _trainer,
    _for_trainer,
    step_folder="checkpoint-{step}",
)
