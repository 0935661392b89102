"""The container `accelerate`: the folders of Accelerate's `save_state`.

It reads and writes what `load_state` takes. Input: the folder:

    <anything>/    model, optimizer.bin, scheduler.bin, scaler.pt, random_states_0.pkl, ...
    <anything>/    unet/, unet_ema/, optimizer.bin, ...         as Diffusers' training scripts save it

Output: the tree {model, optimizer, scheduler, scaler, files}, and an average under its folder's name.
Source: huggingface/accelerate, checkpointing.py, `save_accelerator_state`; huggingface/diffusers,
examples/text_to_image/train_text_to_image.py, `save_model_hook`.
"""

from __future__ import annotations

from statekit.converters.containers.huggingface.folder import TRAINER_STATE, HuggingFaceFolder
from statekit.converters.containers.huggingface.model import (
    SHARDED_OPTIMIZER,
    find_model,
    model_below,
    sharded_part,
)
from statekit.files.source import listing
from statekit.files.tree import Place


def _accelerate(folder: Place) -> str:
    model = find_model(folder) or model_below(folder)
    if not model or (folder / TRAINER_STATE).is_file():
        return ""
    others = [
        "optimizer.bin",
        *(entry.name for entry in listing(folder, ".pkl") if entry.name.startswith("random_states_")),
    ]
    part = next((name for name in others if (folder / name).is_file()), "")
    part = part or sharded_part(folder, SHARDED_OPTIMIZER)
    return f"{part} beside {model}" if part else ""


CONTAINER = HuggingFaceFolder(
    "accelerate",
    "Accelerate's folder (save_state): model, optimizer.bin, scheduler.bin and random states",
    {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt"},
    _accelerate,
    shard_bytes=None,
    numbers=True,
    companions={
        "optimizer.bin": "load_state finds no optimizer",
        "random_states_*.pkl": "load_state leaves random generators as they are",
    },
)
