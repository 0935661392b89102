"""Goes on in Transformers' Trainer from a run with a schedule, by the printed lines; run by itself.

    python trainer_schedule_driving.py FOLDER ...

`case.json` in each folder has a source, the layout of the folder of Trainer, and what is told of the source. Trainer
goes on for ten updates, saves, loads that with the same optimizer and scheduler made anew, and goes on for ten more.
Which rates each update had, and the lines, go to `result.json` there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from trainer_driving import DATA, Named, weights

from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, of_plan, resume_lines
from statekit.state.schedules.call_text import parse_call
from statekit.tensors.tree import to_json

HALF = 10
RATES: list[list[float]] = []


class Watch(transformers.TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Notes the rate of each group at each update."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        RATES.append([float(group["lr"]) for group in others["optimizer"].param_groups])


def trained(lines: str, folder: Path, out: Path, last: int, **changed: Any) -> Any:
    """Runs the lines in a program whose arguments would make another schedule."""
    shapes = {
        name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()
    }
    arguments = {
        "per_device_train_batch_size": 1, "report_to": "none", "lr_scheduler_type": "cosine", "learning_rate": 0.7,
        "warmup_steps": 2, "max_grad_norm": 0.0, "use_cpu": True, "disable_tqdm": True, "save_steps": HALF, **changed,
    }  # fmt: skip
    scope: dict[str, Any] = {
        "model": Named(shapes),
        "dataset": DATA,
        "args": transformers.TrainingArguments(**arguments, output_dir=str(out), max_steps=last),
    }
    exec(compile(lines, "to go on", "exec"), scope)
    return scope["model"]


def main(work: Path) -> None:
    """Goes on from one run."""
    RATES.clear()
    case = json.loads((work / "case.json").read_text())
    hints = Hints(
        case.get("hparams", {}),
        param_names=tuple(names) if (names := case.get("names")) else None,
        schedule=parse_call(text) if (text := case.get("schedule")) else None,
        assume_defaults=True,
    )
    planned = plan(Path(case["source"]), work / "run", to="hf-trainer", layout=case["layout"], hints=hints)
    report = convert(planned)
    done = planned.target.step or 0
    folder = work / "run" / f"checkpoint-{done}"
    printed = resume_lines(of_plan(planned, report.files), planned.state)
    with open_state(folder) as opened:
        later = resume_lines(of_checkpoint(opened), to_json(opened.state.to_json()))
    lines = "\n".join(printed)
    trained(lines, folder, work / "out", done + HALF)
    saved = work / "out" / f"checkpoint-{done + HALF}"
    again = "\n".join([*printed[:-1], printed[-1].replace(str(folder), str(saved))])
    model = trained(again, saved, work / "out", done + 2 * HALF)
    result = {
        "rates": RATES, "lines": printed, "later": later, "assumed": planned.to_json()["assumptions"],
        "finite": all(abs(x) < 1e9 for values in weights(model).values() for x in values),
    }  # fmt: skip
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)
    for each in sys.argv[1:]:
        main(Path(each))
