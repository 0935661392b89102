"""The lines by which Megatron-LM and Megatron-Core go on from a checkpoint.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py, `_add_checkpointing_args`.
"""

from __future__ import annotations

import shlex

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
    schedule = " --use-checkpoint-opt_param-scheduler" if saved.is_converted else ""
    if not saved.is_converted or _has_schedule(state, saved):
        return [f"--load {shlex.quote(str(path.parent))} --ckpt-format torch_dist{flags}{schedule}"]
    return [
        "from megatron.core import dist_checkpointing",
        "sharded = model.sharded_state_dict()",
        'metadata = {"distrib_optim_sharding_type": "fully_reshardable"}',
        "moved = optimizer.sharded_state_dict(sharded, is_loading=True, metadata=metadata)",
        f'state = dist_checkpointing.load({{"model": sharded, "optimizer": moved}}, {quoted(path)})',
        'model.load_state_dict(state["model"])',
        'optimizer.load_state_dict(state["optimizer"])',
        "# the schedule is the program's: Megatron-LM's own can't be this one",
    ]


def _has_schedule(state: State, saved: SavedRun) -> bool:
    """Tells whether a converted file has a schedule of Megatron-LM: the run's own, or one constant rate."""
    if any(schedule.kind == MEGATRON for schedule in saved.run.schedules):
        return True
    known = [group["hyperparameters"] for group in state["groups"]]
    rates = [values.get(RATE) for values in known]
    decays = [values["weight_decay_rate"] for values in known if values.get("weight_decay_rate")]
    are_plain = all(type(value) in (int, float) for value in [*rates, *decays])
    return not saved.run.schedules and are_plain and len({*rates}) <= 1 and len({*decays}) <= 1
