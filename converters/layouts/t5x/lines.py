"""The gin by which T5X goes on from a checkpoint.

Source: google-research/t5x t5x/utils.py, `RestoreCheckpointConfig`; t5x/adafactor.py, `Adafactor`.
"""

from __future__ import annotations

from itertools import islice

from statekit.lines.printing import RATE, UNKNOWN, SavedRun, State, has_several, native_arguments, quoted

_MOST_SHOWN = 8


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


def _is_given(state: State, name: str) -> bool:
    """Tells whether a user gave a setting to any group."""
    return any(group.get("known_from", {}).get(name) == "given" for group in state["groups"])


def _arguments(state: State, is_foreign: bool) -> dict[str, str]:
    """Returns Adafactor's arguments by name, as they are written; those that other lines give aren't among them."""
    arguments = [] if has_several(state) else native_arguments(state)[0]
    pairs = dict(argument.partition("=")[::2] for argument in arguments)
    if is_foreign:
        pairs |= _least_factored(state)
    return {name: value for name, value in pairs.items() if name not in (RATE, "step_offset", UNKNOWN)}


def _argument_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns the lines that give Adafactor what is known, and a comment on what is not."""
    # The gin of a run of T5X has all but what a user tells anew.
    is_foreign = saved.is_converted and saved.source != "t5x"
    pairs = _arguments(state, is_foreign)
    unknown = [name for name, value in pairs.items() if value == UNKNOWN]
    stated = [(name, value) for name, value in pairs.items() if value != UNKNOWN]
    if not is_foreign:
        stated = [(name, value) for name, value in stated if _is_given(state, name)]
    lines = [f"adafactor.Adafactor.{name} = {value}" for name, value in stated]
    if unknown and is_foreign:
        lines.append(f"# the run's own gin must say, as nothing here does: {', '.join(unknown)}")
    return [*lines, *(_rule_lines(state) if is_foreign else ())]


def _least_factored(state: State) -> dict[str, str]:
    """Returns `min_dim_size_to_factor` by the slots of matrices, if it was only assumed."""
    name = "min_dim_size_to_factor"
    if any(group["known_from"].get(name, "assumed") != "assumed" for group in state["groups"]):
        return {}
    matrices = [rule["axes"] for rule in state.get("rules", {}).values() if len(rule["axes"]) == 2]
    factored = [{*axes} == {"ROW", "COLUMN"} for axes in matrices]
    if not any(factored):
        return {}
    return {name: "0" if all(factored) else UNKNOWN}


def _rule_lines(state: State) -> list[str]:
    """Returns a comment on the parameters that T5X factors by explicit rules alone: those of three axes and more."""
    rules = {path: rule["axes"] for path, rule in state.get("rules", {}).items() if len(rule["axes"]) > 2}
    rules = {path: axes for path, axes in rules.items() if {*axes} - {"NONE"}}
    if not rules:
        return []
    shown = [f"{path}: {', '.join(axes)}" for path, axes in islice(rules.items(), _MOST_SHOWN)]
    more = f"; and {len(rules) - len(shown)} more" if len(rules) > len(shown) else ""
    return [f"# logical_factor_rules or factor_map must give: {'; '.join(shown)}{more}"]


def _rate_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns a comment on the run's learning rate, which T5X' own schedules may not have."""
    rates = saved.rates(state)
    code = rates.python_function()
    return (
        [f"# trainer.Trainer.learning_rate_fn is, of the updates done: {code}"] if code else rates.comment()
    )
