"""The tree that T5X's Adafactor restores from a canonical state.

Source: T5X t5x/adafactor.py, `init_param_state`; t5x/train_state.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from statekit.conversion.contracts import Encoded, dropped_from
from statekit.errors import Faults, InexactError
from statekit.state.factoring import by_size, with_placeholders
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Shape, Tensor, in_memory
from statekit.tensors.tree import nested

SLOTS = ("v_row", "v_col", "v", "m")
_EXTRA = ("flax_mutables", "t5x")
_PLACE = "checkpoint_{step}/state"


def encoded(state: TrainState) -> Encoded:
    """Returns T5X's tree.

    Raises:
        InexactError: T5X has no place for the optimizer, or for a slot; lists every one.
    """
    if state.optimizer.schema != "adafactor":
        raise InexactError(
            "The layout t5x holds Adafactor's state only.", expected="adafactor", found=state.optimizer.schema
        )
    faults = Faults()
    moved = set(state.optimizer.paths)
    states: dict[tuple[str, ...], Any] = {}
    for path, param in state.params.items() if state.slots else ():
        slots = state.slots.get(path, {})
        node = (
            None
            if not slots and path not in moved
            else _placed(path, param, slots, state.rules.get(path), faults)
        )
        states[tuple(path.split("/"))] = node
    if not 0 <= state.counts.updates < 2**31:
        faults.add(f"{state.counts.updates} updates don't fit int32", "state/step")
    faults.check(InexactError, "T5X can't hold the state")
    extra = {name: state.extra[name] for name in _EXTRA if name in state.extra}
    beyond = extra.pop("t5x", {})
    tree = {
        "state": {
            "param_states": nested(states),
            "step": in_memory(np.asarray(state.counts.updates, np.int32), "state/step"),
            **beyond.get("state", {}),
        },
        "target": nested({tuple(path.split("/")): param for path, param in state.params.items()}),
        **extra,
        **{key: value for key, value in beyond.items() if key != "state"},
    }
    return Encoded(tree, state.counts.updates, dropped=_dropped(state), place=_PLACE)


def as_t5x(rule: Rule, shape: Shape) -> Rule:
    """Returns a rule with T5X's labels: it reads a matrix by its size, whatever another system called row."""
    other_way = rule.factored and len(rule.axes) == 2 and rule.axes == by_size(shape)[::-1]
    return Rule(by_size(shape), rule.known_from) if other_way else rule


def _placed(
    path: str, param: Tensor, slots: Mapping[str, Tensor], rule: Rule | None, faults: Faults
) -> dict[str, Tensor]:
    """Returns the four slots of a parameter; placeholders where one isn't in use."""
    if not ({"v"} <= slots.keys() or {"v_row", "v_col"} <= slots.keys()):
        faults.add("has no second moment", path)
    faults += [(f"has slot {name}, for which T5X has no place", path) for name in slots if name not in SLOTS]
    if rule is not None and rule.factored and len(rule.axes) == 2 and Axis.BATCH not in rule.axes:
        if as_t5x(rule, param.shape) != rule:
            slots = {**slots, "v_row": slots["v_col"], "v_col": slots["v_row"]}
        elif rule.axes != by_size(param.shape):
            faults.add("is a matrix that is factored along one axis only", path)
    filled = with_placeholders("t5x", slots, SLOTS, DTYPES["float32"])
    return {name: filled[name] for name in sorted(SLOTS)}


def _dropped(state: TrainState) -> dict[str, str]:
    dropped = dropped_from(state.extra, _EXTRA, "T5X")
    if state.counts.schedule != state.counts.updates:
        dropped["counts/schedule"] = "T5X has one step for both, and the optimizer's is kept"
    return dropped
