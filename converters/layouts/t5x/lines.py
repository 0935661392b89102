"""The gin by which T5X goes on from a checkpoint.

Source: google-research/t5x t5x/utils.py, `RestoreCheckpointConfig`; t5x/adafactor.py, `Adafactor`.
"""

from __future__ import annotations

from statekit.lines.printing import RATE, UNKNOWN, SavedRun, State, has_several, native_arguments, quoted


def gin_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines of gin, which follow the run's own: that has what no file of T5X says."""
    path = saved.step_path("checkpoint_{step}").absolute()
    offsets = {group["hyperparameters"].get("step_offset") or 0 for group in state["groups"]}
    offset = max(offsets) if len(offsets) == 1 else 0
    return [
        f"utils.RestoreCheckpointConfig.path = {quoted(path)}",
        'utils.RestoreCheckpointConfig.mode = "specific"',
        *_argument_lines(state, saved),
        *_rate_lines(state, saved),
        *([f"adafactor.Adafactor.step_offset = {offset}"] if offset else []),
    ]


def _argument_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that give Adafactor what is known, and a comment on what is not."""
    arguments = [] if has_several(state) else native_arguments(state)[0]
    pairs = [argument.partition("=")[::2] for argument in arguments]
    pairs = [(name, value) for name, value in pairs if name not in (RATE, "step_offset", UNKNOWN)]
    unknown = [name for name, value in pairs if value == UNKNOWN]
    known = [(name, value) for name, value in pairs if value != UNKNOWN]
    if not saved.is_converted:  # T5X wrote it, and its gin has all but what a user tells anew
        sources = [group.get("known_from", {}) for group in state["groups"]]
        known = [
            (name, value) for name, value in known if "given" in [source.get(name) for source in sources]
        ]
    lines = [f"adafactor.Adafactor.{name} = {value}" for name, value in known]
    if unknown and saved.is_converted:
        lines.append(f"# the run's own gin must say, as nothing here does: {', '.join(unknown)}")
    maps = [group["hyperparameters"].get("factor_map") for group in state["groups"]]
    lines += [
        f"# adafactor.Adafactor.factor_map, which Python must make: {rules!r}" for rules in maps if rules
    ]
    return lines


def _rate_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns a comment on the run's learning rate, which T5X' own schedules may not have."""
    rates = saved.rates(state)
    code = rates.python_function()
    return (
        [f"# trainer.Trainer.learning_rate_fn is, of the updates done: {code}"] if code else rates.comment()
    )
