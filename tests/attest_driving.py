"""Runs of Transformers' Trainer, Accelerate and Lightning that are attested; run by itself, since they load slowly.

    python attest_driving.py FOLDER

writes to `FOLDER/result.json` what was found of honest resumes and of two faults in each.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import accelerate
import lightning
import torch
import transformers

import statekit.accelerate
import statekit.hf
import statekit.lightning
from statekit.errors import StateError


def pretrained(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
    if kind == "t5":
        config = transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes)
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.GPT2Config(vocab_size=32, n_layer=1, n_embd=16, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


class ForgetsMoments(transformers.Trainer):  # type: ignore[misc]  # its base is untyped
    """Loads an optimizer that has no slots to fill yet."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        self.optimizer.state.clear()


class RewritesRate(transformers.Trainer):  # type: ignore[misc]  # its base is untyped
    """Builds its scheduler after the optimizer is loaded."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        made: Any = self
        state = made.lr_scheduler.state_dict()
        inner = getattr(made.optimizer, "optimizer", made.optimizer)
        for group in inner.param_groups:
            group["initial_lr"] = group["lr"]
        made.lr_scheduler = transformers.get_linear_schedule_with_warmup(inner, 2, made.args.max_steps)
        made.lr_scheduler.load_state_dict(state)


def names_of(result: Any) -> list[str]:
    return [one.name for one in result.findings]


def of_trainer(kind: str, out: Path) -> dict[str, list[str]]:
    rows = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(1))
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2, "learning_rate": 0.01, "warmup_steps": 2, "weight_decay": 0.1,
        "report_to": "none", "use_cpu": True, "disable_tqdm": True, "output_dir": str(out), "save_steps": 3,
        "optim": "adafactor" if kind == "t5" else "adamw_torch",
    }  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]

    def run(trainer: Any, updates: int, checkpoint: Path | None = None, strict: bool = False) -> list[str]:
        args = transformers.TrainingArguments(**usual, max_steps=updates)
        made = trainer(pretrained(kind), args, train_dataset=data)
        if checkpoint is None:
            made.train()
            return []
        callback = statekit.hf.AttestCallback(
            checkpoint, strict=strict, generators=trainer is transformers.Trainer
        )
        made.add_callback(callback)
        made.train(resume_from_checkpoint=str(checkpoint))
        return names_of(callback.result)

    run(transformers.Trainer, 5)
    saved = out / "checkpoint-3"
    return {
        "honest": run(transformers.Trainer, 5, saved, strict=True),
        "forgets": run(ForgetsMoments, 5, saved),
        "rewrites": run(RewritesRate, 5, saved),
    }


def of_accelerate(out: Path) -> dict[str, list[str]]:
    def prepared() -> Any:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
        accelerator = accelerate.Accelerator(cpu=True)
        return accelerator, accelerator.prepare(model, optimizer, scheduler)

    accelerator, (model, optimizer, scheduler) = prepared()
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward((model(torch.ones(3, 4)) ** 2).sum())
        optimizer.step()
        scheduler.step()
    accelerator.save_state(str(out))
    accelerator, _ = prepared()
    new = names_of(statekit.accelerate.attest(accelerator, out, strict=False))
    accelerator.load_state(str(out))
    honest = statekit.accelerate.attest(accelerator, out, generators=True)
    unsaid = [one for one in honest.unchecked if "random" in one]
    torch.rand(1)
    random.random()
    drawn = statekit.accelerate.attest(accelerator, out, generators=True, strict=False)
    return {"honest": names_of(honest), "new": new, "drawn": names_of(drawn), "unsaid": unsaid}


class Fitted(lightning.LightningModule):  # type: ignore[misc]  # its base is untyped
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, index: int) -> Any:
        return (self.layer(batch) ** 2).sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class ZeroesMoments(lightning.pytorch.callbacks.Callback):  # type: ignore[misc]  # as above
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for slots in trainer.optimizers[0].state.values():
            slots["exp_avg"].zero_()


def of_lightning(out: Path) -> dict[str, list[str]]:
    rows: Any = [torch.ones(4)] * 6
    data = torch.utils.data.DataLoader(rows, batch_size=2)

    def trainer(updates: int, *callbacks: Any) -> Any:
        return lightning.Trainer(
            max_epochs=updates, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[*callbacks],
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip

    first = trainer(1)
    first.fit(Fitted(), data)
    path = out / "last.ckpt"
    first.save_checkpoint(path)
    honest, zeroed = (statekit.lightning.AttestCallback(path, strict=strict) for strict in (True, False))
    trainer(2, honest).fit(Fitted(), data, ckpt_path=path)
    trainer(2, ZeroesMoments(), zeroed).fit(Fitted(), data, ckpt_path=path)
    strict = statekit.lightning.AttestCallback(path)
    raised = ""
    try:
        trainer(2, ZeroesMoments(), strict).fit(Fitted(), data, ckpt_path=path)
    except StateError as error:
        raised = error.subject
    return {"honest": names_of(honest.result), "zeroed": names_of(zeroed.result), "raised": [raised]}


def main(work: Path) -> None:
    """Runs all."""
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()):
        result = {
            "gpt2": of_trainer("gpt2", work / "gpt2"),
            "t5": of_trainer("t5", work / "t5"),
            "accelerate": of_accelerate(work / "accelerate"),
            "lightning": of_lightning(work),
        }
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
