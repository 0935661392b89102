"""The lines by which statekit's own optimizers go on from a checkpoint in their own layouts.

Source: statekit/torch/from_checkpoint.py, `load_optimizer`; huggingface/accelerate src/accelerate/accelerator.py,
`Accelerator.load_state`; huggingface/transformers src/transformers/trainer.py, `Trainer.train`.
"""

from __future__ import annotations

from statekit.converters.layouts.pytorch.lines import early_schedule, prepared_lines, trainer_schedule
from statekit.files.tree import Place
from statekit.lines import printing
from statekit.lines.printing import (
    RATE,
    UNKNOWN,
    SavedRun,
    State,
    after_loading,
    kind_of,
    missing_arguments,
    own_call,
    pretrained_of,
    quoted,
    subscripts,
)
from statekit.state.schema import is_native


def torch_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for an optimizer of statekit.torch, in a file, or in a folder of DCP or safetensors."""
    rates, path = saved.rates(state), quoted(saved.path)
    if rates.torch_call() is None:
        return printing.torch_lines(state, saved)
    record = subscripts(rates.torch_place)
    source = {
        "torch": [f"scheduler.load_state_dict(torch.load({path}, weights_only=True){record})"],
        "dcp": [
            "parts = {}",
            f"parts{record} = scheduler.state_dict()",
            f"dcp.load(parts, checkpoint_id={path})",
            f"scheduler.load_state_dict(parts{record})",
        ],
        "safetensors": [
            f"scheduler.load_state_dict(torch.load({quoted(saved.path / 'scheduler.pt')}, weights_only=True))"
        ],
    }
    return [
        "import torch",
        *(["import torch.distributed.checkpoint as dcp"] if saved.container == "dcp" else []),
        "import statekit.torch",
        f"statekit.torch.load_params({saved.code('model')})",
        *after_loading(state, saved),
        f"optimizer = {_load(saved, saved.path, missing_arguments(state, 'lr'))}",
        *early_schedule(rates),
        *source[saved.container],
        "for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr()):",
        '    group["lr"] = rate  # making the schedule set another',
    ]


def accelerate_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a folder of Accelerate."""
    rates = saved.rates(state)
    is_new = rates.torch_call() is None and bool(rates.torch_lines())
    return [
        *(["import torch"] if rates.torch_call() else []),
        "import statekit.torch",
        f"optimizer = {_load(saved, saved.path, missing_arguments(state, None if is_new else 'lr'))}",
        *early_schedule(rates),
        *prepared_lines(rates, saved),
    ]


def trainer_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for a folder of Transformers' Trainer."""
    rates, path, groups = saved.rates(state), saved.step_path("checkpoint-{step}"), state["groups"]
    pretrained = pretrained_of(saved)
    is_new = rates.torch_call() is None and bool(rates.torch_lines())
    missing = missing_arguments(state, None if is_new else "lr")
    missing = missing.replace(f"lr={UNKNOWN}", "lr=args.learning_rate")
    schedule, scheduler = trainer_schedule(state, saved)
    own_rate = [
        "for group in optimizer.param_groups:",
        '    group["lr"] = args.learning_rate  # for Trainer\'s schedule; relative_step passes over it',
    ]
    model, callback, remark = list[str](), list[str](), list[str]()
    if pretrained is not None:
        folder = saved.path
        if saved.step is None:
            folder = path.parent if (path.parent / pretrained.main).is_file() else path
        assumed = ", ".join(pretrained.assumed(saved.map_knows) if saved.map_name else ())
        unknown = f"# its config.json has, as nothing says yours: {assumed}; change there what is otherwise"
        model = [
            f"model = transformers.{pretrained.class_name}.from_pretrained({quoted(folder)})",
            *([unknown] if assumed else []),
            *after_loading(state, saved),
        ]
        rated = any(group["hyperparameters"].get(RATE) is not None for group in groups)
        callback = _resumed(sets_rate=not rated and not rates.torch_lines())
        remark = [f"# {pretrained.remark}"] if pretrained.remark else []
    return [
        *(["import torch"] if rates.torch_call() else []),
        "import statekit.torch",
        "import transformers",
        *model,
        f"optimizer = {_load(saved, path, missing)}",
        *(own_rate if any(group["hyperparameters"].get("relative_step") for group in groups) else []),
        *schedule,
        "trainer = transformers.Trainer(model, args, train_dataset=dataset, "
        f"optimizers=(optimizer, {scheduler}))",
        *callback,
        *remark,
        f"trainer.train(resume_from_checkpoint={quoted(path)})",
    ]


def _resumed(sets_rate: bool) -> list[str]:
    """Returns the lines of a callback for what Trainer takes from the folder, and may not.

    Args:
        sets_rate: Whether the folder has no rate, so that Trainer's own schedule gives it.
    """
    rate = [
        "        rates = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas)  # optimizer.pt says none",
        "        for group, (base, factor) in zip(optimizer.param_groups, rates):",
        '            group["lr"] = base * factor(lr_scheduler.last_epoch)',
    ]
    return [
        "class Resumed(transformers.TrainerCallback):",
        "    def on_train_begin(self, args, state, control, optimizer, lr_scheduler, **others):",
        "        state.compute_steps(args, state.max_steps)  # Trainer takes those of the folder",
        *(rate if sets_rate else []),
        "trainer.add_callback(Resumed())",
    ]


def _load(saved: SavedRun, path: Place, missing: str) -> str:
    return f"statekit.torch.load_optimizer({saved.code(f'model.named_parameters(){missing}', path=path)})"


def neutral_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines for statekit's own folder, which any framework goes on from that can step it."""
    first, *others = printing.torch_lines(state, saved)
    kinds = [kind_of(state, group) for group in state["groups"]]
    unstepped = {own_call(kind).partition(": ")[2]: None for kind in kinds if is_native(kind["schema"])}
    if unstepped:
        others = [
            others[0],
            *after_loading(state, saved),
            f"# statekit has no step of {' and '.join(unstepped)}: its own system goes on, from the conversion back",
            f"# statekit convert {quoted(saved.path)} back --to {saved.source or UNKNOWN}",
        ]
    return [f"{first}  # or statekit.jax, statekit.tensorflow", *others]
