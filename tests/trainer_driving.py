"""Runs of Transformers' Trainer on a small model; run by itself, since Trainer takes its time to load.

    python trainer_driving.py FOLDER

`FOLDER/case.json` names a checkpoint that became a folder of Trainer; the result goes to `FOLDER/result.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers.trainer_callback import ExportableState

DATA = [{"x": torch.tensor(float(i % 3))} for i in range(64)]
"""What the model is trained on, the same for each run, in this order."""

USUAL: dict[str, Any] = {
    "per_device_train_batch_size": 1, "report_to": "none", "lr_scheduler_type": "constant", "learning_rate": 0.1,
    "max_grad_norm": 0.0, "use_cpu": True, "logging_steps": 1, "disable_tqdm": True,
}  # fmt: skip
"""Trainer's arguments."""


class Named(torch.nn.Module):
    """Parameters with any names, drawn to a point that moves with the data."""

    def __init__(self, values: Mapping[str, torch.Tensor]):
        super().__init__()
        for name, value in sorted(values.items()):
            *outer, last = name.split(".")
            home: torch.nn.Module = self
            for part in outer:
                if part not in home._modules:
                    home.add_module(part, torch.nn.Module())
                home = home.get_submodule(part)
            home.register_parameter(last, torch.nn.Parameter(value.clone()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        terms = [((p.float() - torch.cos(x + i)) ** 2).mean() for i, p in enumerate(self.parameters())]
        return {"loss": torch.stack(terms).sum()}


class InOrder(transformers.Trainer):  # type: ignore[misc]  # its base is untyped
    """Takes the data as they come."""

    def _get_train_sampler(self, *given: Any) -> None:
        return None


def optimizer_of(folder: Path, model: torch.nn.Module, rate: float = 0.1) -> Any:
    """Returns an optimizer whose groups are those of a folder's optimizer.pt, without their state."""
    parts = torch.load(folder / "optimizer.pt", weights_only=True)["param_groups"]
    named = dict(model.named_parameters())
    groups = [{"params": [named[name] for name in part["param_names"]]} for part in parts]
    if "scale_parameter" in parts[0]:
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=rate, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(groups, lr=rate)


def trained(folder: Path, out: Path, updates: int) -> InOrder:
    """Goes on from a folder up to a number of updates; Trainer saves at the end."""
    model = Named(load_file(folder / "model.safetensors"))
    trainer = InOrder(
        model,
        transformers.TrainingArguments(**USUAL, output_dir=str(out), max_steps=updates),
        train_dataset=DATA,
        optimizers=(optimizer_of(folder, model), None),
    )
    trainer.train(resume_from_checkpoint=str(folder))
    return trainer


def weights(model: torch.nn.Module) -> dict[str, list[float]]:
    """Returns all values, for JSON."""
    return {name: value.detach().double().flatten().tolist() for name, value in model.named_parameters()}


def uninterrupted(folder: Path, updates: int, rate: float) -> dict[str, list[float]]:
    """Returns the weights where PyTorch alone goes on from a folder."""
    model = Named(load_file(folder / "model.safetensors"))
    optimizer = optimizer_of(folder, model)
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    first = int(folder.name.rpartition("-")[2])
    for i in range(first, updates):
        for group in optimizer.param_groups:
            group.setdefault("lr", rate)
        optimizer.zero_grad()
        model(DATA[i]["x"])["loss"].backward()
        optimizer.step()
    return weights(model)


def two_saves(folder: Path, out: Path) -> dict[str, Any]:
    """Goes on for three updates, saves, loads that, goes on for three more."""
    first = int(folder.name.rpartition("-")[2])
    before = trained(folder, out, first + 3)
    after = trained(out / f"checkpoint-{first + 3}", out, first + 6)
    return {
        "saved": sorted(path.name for path in out.iterdir()),
        "steps": [before.state.global_step, after.state.global_step],
        "control": after.state.stateful_callbacks["TrainerControl"],
        "weights": weights(after.model),
        "expected": uninterrupted(folder, first + 6, 0.1),
    }


class Counts(transformers.TrainerCallback, ExportableState):  # type: ignore[misc]  # its base is untyped
    """Keeps a state, as EarlyStoppingCallback does."""

    seen = 0

    def on_step_end(self, *given: Any, **others: Any) -> None:
        self.seen += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"seen": self.seen}}


def documented_blocks() -> list[str]:
    """Returns what docs/huggingface.md says in Python."""
    text = (Path(__file__).parents[1] / "docs" / "huggingface.md").read_text()
    return [block.partition("```")[0] for block in text.split("```python\n")[1:]]


def documented_callback(trainer: Any) -> Any:
    """Returns the callback that brings intervals of one's own."""
    scope: dict[str, Any] = {"trainer": trainer}
    exec(documented_blocks()[0].partition("trainer.add_callback")[0], scope)
    return scope["OwnIntervals"]()


def documented(folder: Path, out: Path) -> dict[str, Any]:
    """Goes on from a folder as docs/huggingface.md says: with its groups, and with intervals of one's own."""
    callback, groups = (block.replace("run/checkpoint-500", str(folder)) for block in documented_blocks()[:2])
    first = int(folder.name.rpartition("-")[2])
    args = transformers.TrainingArguments(
        **USUAL, output_dir=str(out), max_steps=first + 5, save_steps=2, save_total_limit=9
    )
    names: dict[str, Any] = {"torch": torch, "Trainer": InOrder, "args": args, "data": DATA}
    names["model"] = Named(load_file(folder / "model.safetensors"))
    exec(compile(groups, "the groups", "exec"), names)
    names["trainer"].add_callback(Counts())
    exec(compile(callback, "the callback", "exec"), names)
    state = json.loads((out / f"checkpoint-{first + 5}" / "trainer_state.json").read_text())
    return {
        "saved": sorted(int(path.name.rpartition("-")[2]) - first for path in out.iterdir()),
        "logged": [entry["step"] - first for entry in state["log_history"] if "loss" in entry],
        "seen": state["stateful_callbacks"]["Counts"]["attributes"]["seen"],
    }


def printed(lines: list[str], folder: Path, out: Path) -> list[int]:
    """Goes on by the lines that a conversion prints; returns after how many updates it saved."""
    first = int(folder.name.rpartition("-")[2])
    args = transformers.TrainingArguments(**USUAL, output_dir=str(out), max_steps=first + 3, save_steps=2)
    model = Named(load_file(folder / "model.safetensors"))
    exec(compile("\n".join(lines), "to go on", "exec"), {"model": model, "args": args, "dataset": DATA})
    return sorted(int(path.name.rpartition("-")[2]) - first for path in out.iterdir())


def main(work: Path) -> None:
    """Runs the case of a folder."""
    transformers.utils.logging.set_verbosity_error()
    case = json.loads((work / "case.json").read_text())
    lines = case.pop("lines", None)
    result: dict[str, Any] = {
        name: two_saves(Path(folder), work / "out" / name) for name, folder in case.items()
    }
    if "torch" in case:
        result["documented"] = documented(Path(case["torch"]), work / "out" / "documented")
    if lines:
        result["printed"] = printed(lines, Path(case["torch"]), work / "out" / "printed")
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
