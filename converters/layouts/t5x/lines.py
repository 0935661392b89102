"""The gin by which T5X goes on from a checkpoint.

Source: google-research/t5x t5x/utils.py, `RestoreCheckpointConfig`; t5x/adafactor.py, `Adafactor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.lines.printing import RATE, SavedRun, State, has_several, native_arguments, quoted

_NEVER_STORED = ("multiply_by_parameter_scale", "decay_rate", "clipping_threshold", "epsilon1")


def gin_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines of gin."""
    path = saved.step_path("checkpoint_{step}").absolute()
    groups = state["groups"]
    offsets = {group["hyperparameters"].get("step_offset") or 0 for group in groups}
    known = any(map(_says_arguments, groups))
    return [
        f"utils.RestoreCheckpointConfig.path = {quoted(path)}",
        'utils.RestoreCheckpointConfig.mode = "specific"',
        *(_arguments(state) if known else []),
        *(
            [f"adafactor.Adafactor.step_offset = {max(offsets)}"]
            if len(offsets) == 1 and max(offsets)
            else []
        ),
    ]


def _says_arguments(group: Mapping[str, Any]) -> bool:
    """Tells whether anybody said what T5X' own files never say; where nobody did, the run's own gin has it."""
    return any(group["known_from"].get(name) in ("file", "given") for name in _NEVER_STORED)


def _arguments(state: State) -> list[str]:
    """Returns the lines that give Adafactor its arguments; its rate comes with each update."""
    arguments = [] if has_several(state) else native_arguments(state)[0]
    pairs = (argument.partition("=") for argument in arguments)
    return [
        f"adafactor.Adafactor.{name} = {value}"
        for name, _, value in pairs
        if name not in (RATE, "step_offset")
    ]
