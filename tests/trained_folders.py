"""Runs of Transformers' Trainer on its own architectures; run by itself, since Trainer takes its time to load.

    python trained_folders.py FOLDER

writes `FOLDER/<architecture>/checkpoint-3`, and in `FOLDER/names.json` which parameters each optimizer numbers. What
NamesCallback wrote of them lies in `FOLDER/<architecture>`, so that the checkpoint itself doesn't name them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from statekit.hf import NamesCallback
from statekit.state.param_names import NAMES_FILE

SIZES = {
    "gpt2": ("GPT2", {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "eos_token_id": 0}),
    "t5": ("T5", {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8, "decoder_start_token_id": 0}),
}  # fmt: skip
HEADS = {"gpt2": "GPT2LMHeadModel", "t5": "T5ForConditionalGeneration"}


def trained(kind: str, out: Path) -> list[list[str]]:
    """Trains for three updates, saves, and returns the names that the optimizer's numbers mean, group by group."""
    torch.manual_seed(0)
    name, sizes = SIZES[kind]
    config = getattr(transformers, f"{name}Config")(vocab_size=32, **sizes)
    model = getattr(transformers, HEADS[kind])(config)
    rows = torch.randint(0, 32, (8, 8))
    args = transformers.TrainingArguments(
        output_dir=str(out), max_steps=3, save_steps=3, per_device_train_batch_size=2, learning_rate=0.01,
        weight_decay=0.1, report_to="none", use_cpu=True, disable_tqdm=True,
        optim="adafactor" if kind == "t5" else "adamw_torch",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer: Any = transformers.Trainer(model, args, train_dataset=data)
    trainer.add_callback(NamesCallback())
    trainer.train()
    (out / "checkpoint-3" / NAMES_FILE).rename(out / NAMES_FILE)
    names = {id(param): name for name, param in model.named_parameters()}
    return [[names[id(param)] for param in group["params"]] for group in trainer.optimizer.param_groups]


def main(folder: Path) -> None:
    """Trains each."""
    transformers.utils.logging.set_verbosity_error()
    names = {kind: trained(kind, folder / kind) for kind in SIZES}
    (folder / "names.json").write_text(json.dumps(names))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
