"""The container `hf-trainer`: the folders of Transformers' Trainer.

It reads and writes what Trainer resumes from. Input: a step's folder, or a run's:

    <run>/checkpoint-<step>/   model, optimizer.pt, scheduler.pt, trainer_state.json, rng_state.pth, ...

Output: the tree {model, optimizer, scheduler, scaler, trainer_state, files}.
Source: huggingface/transformers, trainer.py, `_save_checkpoint`, `_load_optimizer_and_scheduler`.
"""

from __future__ import annotations

from collections.abc import Mapping

from statekit.conversion.contracts import Encoded
from statekit.converters.containers.huggingface.folder import PARTS, TRAINER_STATE, HuggingFaceFolder, Made
from statekit.converters.containers.huggingface.model import find_model
from statekit.errors import Faults, UsageError
from statekit.files.tree import Place
from statekit.tensors.tree import at

DEEPSPEED_TAG = "latest"
"""The file in folders of Trainer with DeepSpeed, whose optimizer lies in DeepSpeed's own."""


def _trainer(folder: Place) -> str:
    if not (folder / TRAINER_STATE).is_file() or (folder / DEEPSPEED_TAG).exists():
        return ""
    part = find_model(folder) or next((n for n in PARTS["optimizer"] if (folder / n).is_file()), "")
    return f"{TRAINER_STATE} beside {part}" if part else ""


_INTERVAL = 500
"""How many updates lie between two logs, evaluations and saves unless Trainer's arguments say something else."""
_OWN_RATE = (
    " Nobody said that of the next: optimizer.pt has none, and the printed lines set it to what Trainer's arguments"
    " make; or say it: --hparams learning_rate=..."
)
_CONTROL = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def _for_trainer(encoded: Encoded) -> Mapping[str, Made]:
    """Returns what Trainer must find to load an optimizer, and to save again.

    Without a scheduler's file Trainer passes over the optimizer's in silence; without a state it doesn't know the step.
    Source: transformers, trainer.py, `_load_optimizer_and_scheduler`, `_save_checkpoint`; trainer_callback.py,
    `TrainerState`, `TrainerControl`; torch/optim/lr_scheduler.py, `load_state_dict`.
    """
    groups = at(encoded.tree, ("optimizer", "param_groups")) or ()
    faults = Faults(("has no lr", f"param_groups/{i}") for i, group in enumerate(groups) if "lr" not in group)
    faults.check(
        UsageError,
        "Trainer's next update reads its learning rate from optimizer.pt, and the source doesn't say it",
        remedy="name it: --hparams learning_rate=..., or the run's schedule: --schedule",
    )
    lambdas, done = [None] * len(groups), encoded.paced.at if encoded.paced else encoded.step
    scheduler = {"last_epoch": done, "_step_count": done + 1, "lr_lambdas": lambdas}
    rates = [group["lr"] for group in groups]
    if rates and all(isinstance(rate, (int, float)) for rate in rates):
        scheduler["_last_lr"] = rates  # what Trainer logs for its next update
    # Nobody knows the batch size: without a number Trainer fails, and those of 4.x would train with the one they find;
    # 0 makes these stop, and newer ones warn. Trainer counts epochs and the updates to come anew from its arguments;
    # how often it logs, evaluates and saves it takes from here alone.
    state = {
        "epoch": 0.0,
        "global_step": encoded.step,
        "log_history": [],
        "train_batch_size": 0,
        "logging_steps": _INTERVAL,
        "eval_steps": _INTERVAL,
        "save_steps": _INTERVAL,
        "stateful_callbacks": {"TrainerControl": {"args": dict.fromkeys(_CONTROL, False), "attributes": {}}},
    }
    return {
        "scheduler": Made(
            scheduler,
            f"The source has no scheduler of PyTorch: scheduler.pt says that {done} updates are done;"
            " Trainer's arguments, or a scheduler that it is given, make the rate after the next update."
            + (_OWN_RATE if None in rates else ""),
        ),
        "trainer_state": Made(
            state,
            "The source has no state of Trainer: trainer_state.json says the step, train_batch_size 0 for unknown, and"
            f" {_INTERVAL} for logging_steps, eval_steps and save_steps, which Trainer takes from there, not from its"
            " arguments; write yours into it.",
        ),
    }


CONTAINER = HuggingFaceFolder(
    "hf-trainer",
    "Hugging Face Trainer's folder: checkpoint-<step> with model, optimizer.pt and trainer_state.json",
    {key: names[0] for key, names in PARTS.items()},
    _trainer,
    _for_trainer,
    step_folder="checkpoint-{step}",
    companions={
        "optimizer.*": "Trainer begins with an optimizer of its own",
        "scheduler.*": "Trainer begins with an optimizer and a schedule of its own",
        "rng_state*.pth": "Trainer draws other random numbers than the run would have",
    },
    schedule_in="global_step",
    paced=True,
    builds_optimizer=True,
)
