"""The lines by which Megatron-LM and Megatron-Core go on from a checkpoint.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py, `_add_checkpointing_args`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from statekit.converters.layouts.megatron.schedule import batch_of, needed_flags, own_schedule
from statekit.lines.printing import RATE, SavedRun, State, quoted
from statekit.state.run import MEGATRON


def megatron_lines(state: State, saved: SavedRun, flags: str) -> list[str]:
    """Returns Megatron-LM's options, or Megatron-Core's calls where Megatron-LM can't have the run's schedule.

    Args:
        state: The state.
        saved: Its checkpoint.
        flags: The options that a run of the layout has.
    """
    path = saved.step_path("iter_{step:07d}")
    schedule = "".join(f" {flag}" for flag in _schedule_flags(state, saved)) if saved.is_converted else ""
    if not saved.is_converted or _has_schedule(state, saved):
        legacy = any(name.startswith("mp_rank_") for name in saved.files)
        form = "torch" if legacy else "torch_dist"
        options = f"--load {shlex.quote(str(path.parent))} --ckpt-format {form}{flags}{schedule}"
        number = path.name.removeprefix("iter_")  # Megatron-LM takes the one of the run's tracker without it
        options += f" --ckpt-step {int(number)}" if number.isdecimal() else ""
        return [options, *_comments(saved)]
    is_numbered = any("layers/0/" in path for group in state["groups"] for path in group["paths"])
    layers = ', "non_homogeneous_layers": True' if is_numbered else ""
    return [
        "from megatron.core import dist_checkpointing",
        f'metadata = {{"distrib_optim_sharding_type": "fully_reshardable"{layers}}}',
        "sharded = model.sharded_state_dict(metadata=metadata)",
        "moved = optimizer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)",
        f'state = dist_checkpointing.load({{"model": sharded, "optimizer": moved}}, {quoted(path)})',
        'model.load_state_dict(state["model"])',
        'optimizer.load_state_dict(state["optimizer"])',
        *(
            _scheduler(state, saved)
            or ["# the schedule is the program's: Megatron-Core's own can't be this one"]
        ),
        *_comments(saved),
    ]


def _schedule_flags(state: State, saved: SavedRun) -> list[str]:
    """Returns Megatron-LM's options by which it goes on with the schedule that a conversion wrote."""
    flags = ["--use-checkpoint-opt_param-scheduler"]
    schedule, batch = own_schedule(saved.rates(state)), batch_of(state)
    if isinstance(schedule, str) or batch is None:
        return flags
    return [*flags, f"--global-batch-size {batch}", *needed_flags(schedule, state["counts"]["updates"])]


def _scheduler(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines of Megatron-Core's scheduler with the run's schedule; none if it can't follow that.

    It counts what its caller adds: updates here. Megatron-LM adds samples.
    Source: megatron-core 0.16.1, core/optimizer_param_scheduler.py, `OptimizerParamScheduler`.
    """
    decays = {group["hyperparameters"].get("weight_decay_rate") for group in state["groups"]} - {0, None}
    schedule = own_schedule(saved.rates(state))
    if isinstance(schedule, str) or len(decays) > 1:
        return []
    shape = ", ".join(f"{name}={value!r}" for name, value in schedule.items())
    decay = next(iter(decays), 0.0)
    at = state["counts"]["schedule"]
    return [
        "from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler",
        "# it counts updates: scheduler.step(1) after each; Megatron-LM's own loop adds samples to it",
        f"scheduler = OptimizerParamScheduler(optimizer, {shape}, start_wd={decay!r}, end_wd={decay!r}, "
        "wd_incr_steps=0, wd_incr_style='constant')",
        f"scheduler.step({at})",
    ]


def _comments(saved: SavedRun) -> Iterator[str]:
    """Yields what Megatron-LM does that another loop may not."""
    yield "# gradients are clipped by the norm over all parameters: --clip-grad, 1.0 unless the run had another"
    yield (
        "# the loss is the mean over loss_mask of each microbatch, and the mean of these; with "
        "--calculate-per-token-loss of all tokens"
    )
    if any(schedule.kind == MEGATRON for schedule in saved.run.schedules):
        yield (
            "# the schedule counts samples: it goes on where it stands, if --global-batch-size is the run's; "
            "a warmup's first update has rate --lr-warmup-init, 0.0"
        )


def _has_schedule(state: State, saved: SavedRun) -> bool:
    """Tells whether a converted file has a schedule of Megatron-LM: the run's own, or one constant rate."""
    if any(schedule.kind == MEGATRON for schedule in saved.run.schedules):
        return True
    if saved.run.schedules and batch_of(state) is not None:
        return bool(_scheduler(state, saved)) and state["counts"]["schedule"] == state["counts"]["updates"]
    options = [group["hyperparameters"] for group in state["groups"]]
    rates = [values.get(RATE) for values in options]
    decays = [values["weight_decay_rate"] for values in options if values.get("weight_decay_rate")]
    are_plain = all(type(value) in (int, float) for value in [*rates, *decays])
    return not saved.run.schedules and are_plain and len({*rates}) <= 1 and len({*decays}) <= 1
