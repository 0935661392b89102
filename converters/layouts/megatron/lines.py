"""The lines by which Megatron-LM and Megatron-Core go on from a checkpoint.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py, `_add_checkpointing_args`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from statekit.lines.printing import RATE, SavedRun, State, quoted
from statekit.state.rates import Piece, Rates
from statekit.state.run import MEGATRON


def megatron_lines(state: State, saved: SavedRun, flags: str) -> list[str]:
    """Returns Megatron-LM's options, or Megatron-Core's calls where Megatron-LM can't have the run's schedule.

    Args:
        state: The state.
        saved: Its checkpoint.
        flags: The options that a run of the layout has.
    """
    path = saved.step_path("iter_{step:07d}")
    schedule = " --use-checkpoint-opt_param-scheduler" if saved.is_converted else ""
    if not saved.is_converted or _has_schedule(state, saved):
        legacy = any(name.startswith("mp_rank_") for name in saved.files)
        form = "torch" if legacy else "torch_dist"
        options = f"--load {shlex.quote(str(path.parent))} --ckpt-format {form}{flags}{schedule}"
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


def _scheduler(state: State, saved: SavedRun) -> list[str]:
    """Returns Megatron-Core's scheduler with the run's schedule; nothing where it can't be that one.

    It counts what its caller adds: updates here. Megatron-LM adds samples.
    Source: megatron-core 0.16.1, core/optimizer_param_scheduler.py, `OptimizerParamScheduler`.
    """
    rates = [saved.rates(state).of(number) for number, group in enumerate(state["groups"]) if group["paths"]]
    decays = {group["hyperparameters"].get("weight_decay_rate") for group in state["groups"]} - {0, None}
    first = rates[0] if rates else ""
    shape = _shape(first.pieces) if isinstance(first, Rates) and rates.count(first) == len(rates) else None
    if shape is None or len(decays) > 1:
        return []
    decay = next(iter(decays), 0.0)
    at = state["counts"]["schedule"]
    return [
        "from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler",
        "# it counts updates: scheduler.step(1) after each; Megatron-LM's own loop adds samples to it",
        f"scheduler = OptimizerParamScheduler(optimizer, {shape}, start_wd={decay!r}, end_wd={decay!r}, "
        "wd_incr_steps=0, wd_incr_style='constant')",
        f"scheduler.step({at})",
    ]


def _shape(pieces: Sequence[Piece]) -> str | None:
    """Returns the arguments of Megatron's scheduler for a warmup from 0 and a decay to a rate that stays, or None."""
    *before, decay = pieces[:-1] if len(pieces) > 1 and pieces[-1].kind == "constant" else pieces
    warmup = before[0].numbers if before else {"start": 0.0, "steps": 0}
    if len(before) > 1 or (before and before[0].kind != "linear") or decay.kind not in ("cosine", "linear"):
        return None
    steps, numbers = warmup["steps"], decay.numbers
    ends = pieces[-1].numbers.get("rate", numbers["end"]) == numbers["end"]
    if not ends or decay.origin != steps or (before and warmup["end"] != numbers["start"]):
        return None
    return (
        f"init_lr={warmup['start']!r}, max_lr={numbers['start']!r}, min_lr={numbers['end']!r}, "
        f"lr_warmup_steps={round(steps)}, lr_decay_steps={round(steps + numbers['steps'])}, "
        f"lr_decay_style={decay.kind!r}"
    )


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
    options = [group["hyperparameters"] for group in state["groups"]]
    rates = [values.get(RATE) for values in options]
    decays = [values["weight_decay_rate"] for values in options if values.get("weight_decay_rate")]
    are_plain = all(type(value) in (int, float) for value in [*rates, *decays])
    return not saved.run.schedules and are_plain and len({*rates}) <= 1 and len({*decays}) <= 1
