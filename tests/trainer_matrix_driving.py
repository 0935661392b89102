"""Right and wrong resumes of Transformers' Trainer, each held against its checkpoint; run by itself.

    python trainer_matrix_driving.py FOLDER

`FOLDER/cases.json` lists cases of a model (`full`, `lora`, or `sft`: adapters under TRL's SFTTrainer), an optimizer of
Trainer and a schedule. What the callback found of each way to go on goes to `FOLDER/result.json`.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

import statekit.hf
from statekit.errors import StateError

STEPS, SAVED = 5, 3
OTHER = {"adamw_torch": "adafactor", "adafactor": "adamw_torch"}
SPECIAL: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "warmup_stable_decay": {"num_decay_steps": 2},
}
"""What some schedules of Transformers can't do without, or are dull without."""


def model_of(kind: str) -> Any:
    """Returns a small model, with adapters alone to train where that is asked for."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if kind == "full":
        return model
    peft: Any = import_module("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def tuned(usual: dict[str, Any], data: list[dict[str, Any]], callbacks: Sequence[Any]) -> Any:
    """Returns TRL's trainer of a model with adapters, on rows that are tokens already."""
    trl, datasets, tokenizers = map(import_module, ("trl", "datasets", "tokenizers"))
    # Rows need no fingerprint, and dill 0.4 can't pickle the types of pyarrow 26 that one is made of.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: "rows")
    words = {f"w{number}": number for number in range(16)}
    tokens = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    named = {"pad_token": "w0", "eos_token": "w0"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, **named)
    rows = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in data])
    beside = {"bf16": False, "gradient_checkpointing": False, "max_length": 8}
    args = trl.SFTConfig(**usual, **beside, dataset_kwargs={"skip_prepare_dataset": True})
    given = {"train_dataset": rows, "processing_class": tokenizer, "callbacks": [*callbacks]}
    return trl.SFTTrainer(model_of("lora"), args, **given)


def zeroed(optimizer: Any) -> None:
    for slots in optimizer.state.values():
        for name, value in slots.items():
            if name not in ("step", "RMS") and isinstance(value, torch.Tensor):
                value.zero_()


def swapped(optimizer: Any) -> None:
    """Lets two parameters of one shape have each other's slots, as another order of parameters does."""
    pairs = itertools.combinations(optimizer.state, 2)
    first, other = next(pair for pair in pairs if pair[0].shape == pair[1].shape)
    optimizer.state[first], optimizer.state[other] = optimizer.state[other], optimizer.state[first]


def counted_on(optimizer: Any) -> None:
    for slots in optimizer.state.values():
        slots["step"] += 1


def rewritten(name: str, factor: float) -> Callable[[Any], None]:
    """Returns what multiplies an option of the first group."""

    def change(optimizer: Any) -> None:
        optimizer.param_groups[0][name] *= factor

    return change


WRONG: dict[str, Callable[[Any], None]] = {
    "rate": rewritten("lr", 10.0),
    "moments": zeroed,
    "swapped": swapped,
    "decay": rewritten("weight_decay", 0.5),
    "count": counted_on,
}


class Spoils(transformers.TrainerCallback):  # type: ignore[misc]  # its base is untyped
    """Changes a run once, when all is loaded."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self._change: Callable[[Any], None] | None = change

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._change is not None:
            self._change(given["optimizer"])
        self._change = None


def found(case: dict[str, str], out: Path) -> dict[str, Any]:
    """Returns what each way to go on from a case's checkpoint gives: the names of findings, or of an error."""
    rows = torch.arange(8).remainder(16).repeat(8, 1)
    data = [{"input_ids": row, "labels": row} for row in rows]
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "warmup_steps": 1,
        "save_steps": SAVED, "weight_decay": 0.1, "learning_rate": 0.01, "max_steps": STEPS, "output_dir": str(out),
        "lr_scheduler_type": case["schedule"], "lr_scheduler_kwargs": SPECIAL.get(case["schedule"], {}),
    }  # fmt: skip

    def trainer(optim: str, *callbacks: Any) -> Any:
        if case["model"] == "sft":
            return tuned({**usual, "optim": optim}, data, callbacks)
        args = transformers.TrainingArguments(**usual, optim=optim)
        return transformers.Trainer(model_of(case["model"]), args, train_dataset=data, callbacks=[*callbacks])

    trainer(case["optim"]).train()
    saved = out / f"checkpoint-{SAVED}"

    def resumed(optim: str, *before: Any) -> list[str]:
        callback = statekit.hf.AttestCallback(saved)
        try:
            trainer(optim, *before, callback).train(resume_from_checkpoint=str(saved))
        except StateError:
            return [finding.name for finding in callback.result.findings] if callback.result else ["refused"]
        return []

    each = {name: resumed(case["optim"], Spoils(change)) for name, change in WRONG.items()}
    return {"right": resumed(case["optim"]), "optimizer": resumed(OTHER[case["optim"]]), **each}


def main(work: Path) -> None:
    """Goes through all cases."""
    cases = json.loads((work / "cases.json").read_text())
    results = [found(case, work / f"run{i}") for i, case in enumerate(cases)]
    (work / "result.json").write_text(json.dumps(results))


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
