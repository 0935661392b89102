"""The names of a T5X train state: `target/<path>`, `state/step`, `state/param_states/<path>/{v_row,v_col,v,m}`.

Every moved parameter has all four slots; one that isn't in use is a placeholder of shape (1,). A parameter that no
optimizer of a MultiOptimizer moves has None instead.
Source: T5X t5x/adafactor.py, `init_param_state`; t5x/optimizers.py, `MultiOptimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.errors import Faults, StateError
from statekit.files.checkpoint import FILES_BESIDE, Checkpoint
from statekit.state.stored_slots import PLACEHOLDER
from statekit.tensors.tensor import DType, Shape, Tensor
from statekit.tensors.tree import Tree, walk
from statekit.tensors.typed import Natural, fits, shown

SLOTS = ("v_row", "v_col", "v", "m")


@dataclass(frozen=True)
class NativeSlots:
    """What the slots of one parameter prove.

    Attributes:
        shape: The parameter's.
        slots: The four native slots.
        factored: Whether `v_row` and `v_col` are in use, and not `v`.
        momentum: Whether `m` is in use; None where the parameter's own shape is (1,) and `m` is zero.
    """

    shape: Shape
    slots: Mapping[str, Tensor]
    factored: bool
    momentum: bool | None

    @property
    def momentum_dtype(self) -> DType:
        """The dtype of `m`."""
        return self.slots["m"].dtype


@dataclass(frozen=True)
class Native:
    """A T5X train state, sorted.

    Attributes:
        params: Parameter by path.
        slots: Slots by path; None where no optimizer moves the parameter. Empty if the file has no optimizer state.
        step: `state/step`.
        extra: Everything else.
    """

    params: Mapping[str, Tensor]
    slots: Mapping[str, NativeSlots | None]
    step: int
    extra: Mapping[str, Tree]


def looks_native(checkpoint: Checkpoint) -> str | None:
    """Returns why a checkpoint is a T5X train state with Adafactor's slots; None if it isn't."""
    if not _is_train_state(checkpoint.tree):
        return None
    slots = [name for name in checkpoint.tensors if name.startswith("state/param_states/")]
    if not slots:
        return "it has target and state/step, and no slots"
    if all(name.rpartition("/")[2] in SLOTS for name in slots) and any(
        name.endswith("/v_row") for name in slots
    ):
        return f"it has target, state/step and {slots[0]}"
    return None


def _is_train_state(tree: Tree) -> bool:
    if not isinstance(tree, Mapping) or not isinstance(tree.get("target"), Mapping):
        return False
    state = tree.get("state")
    return isinstance(state, Mapping) and "step" in state


def read_native(checkpoint: Checkpoint) -> Native:
    """Sorts a tree into parameters, slots, step and the rest.

    Raises:
        StateError: Names or shapes aren't those of T5X's Adafactor; lists every fault.
    """
    tree = checkpoint.tree
    if not _is_train_state(tree):
        raise StateError(
            "The checkpoint isn't a train state of T5X.",
            place=checkpoint.path,
            expected="target and state/step",
        )
    state: Mapping[str, Any] = tree["state"]
    faults = Faults()
    params = {}
    for path, leaf in walk(tree["target"]):
        if isinstance(leaf, Tensor):
            params["/".join(map(str, path))] = leaf
        elif leaf not in (None, {}):
            faults.add(f"is no tensor but {type(leaf).__name__}", "/".join(map(str, ("target", *path))))
    slots = dict(_slots(state.get("param_states"), faults))
    slots_by_path: dict[str, NativeSlots | None] = {}
    for name, param_slots in slots.items():
        if name not in params:
            faults.add("has slots but no parameter", name)
        elif param_slots is None:
            slots_by_path[name] = None
        elif (described := _described(name, params[name].shape, param_slots, faults)) is not None:
            slots_by_path[name] = described
    if slots:
        faults += [("has no slots, and no None in their place", name) for name in params if name not in slots]
    step = _step(state["step"], faults, "iuf" if checkpoint.container == "orbax" else "iu")
    faults.check(
        StateError,
        "The checkpoint isn't a state of T5X's Adafactor",
        place=checkpoint.path,
        remedy="a checkpoint of another optimizer needs that optimizer's layout",
    )
    return Native(params, slots_by_path, step, _rest(tree, checkpoint.meta))


def _slots(states: Any, faults: Faults) -> Iterator[tuple[str, dict[str, Tensor] | None]]:
    by_param: dict[str, dict[str, Tensor]] = {}
    if states and not isinstance(states, Mapping):
        faults.add(f"is {shown(states)}, expected slots by parameter", "state/param_states")
        return
    for path, leaf in walk(states) if states else ():
        parent = "/".join(map(str, path[:-1]))
        if isinstance(leaf, Tensor):
            by_param.setdefault(parent, {})[str(path[-1])] = leaf
        elif leaf is None and parent not in by_param:
            yield "/".join(map(str, path)), None
        elif leaf != {}:
            faults.add(f"is no slot but {type(leaf).__name__}", "/".join(map(str, path)))
    yield from by_param.items()


def _described(path: str, shape: Shape, slots: Mapping[str, Tensor], faults: Faults) -> NativeSlots | None:
    """Sorts four slots by the parameter's shape, not by theirs: one of shape (1,) has real slots of that shape."""
    wrong = [f"has no slot {name}" for name in SLOTS if name not in slots]
    wrong += [f"has an unknown slot {name}" for name in slots if name not in SLOTS]
    if not wrong:
        v, m = slots["v"].shape, slots["m"].shape
        wrong += [
            f"slot {name} has shape {stored}, expected {shape}, or {PLACEHOLDER} if not in use"
            for name, stored in (("v", v), ("m", m))
            if stored not in (shape, PLACEHOLDER)
        ]
        if v == shape and (slots["v_row"].shape, slots["v_col"].shape) != (PLACEHOLDER, PLACEHOLDER):
            wrong.append(f"has a full v beside v_row {slots['v_row'].shape} and v_col {slots['v_col'].shape}")
    faults += [(fault, path) for fault in wrong]
    if wrong:
        return None
    momentum = m == shape
    if shape == PLACEHOLDER and not np.any(slots["m"].read()):
        return NativeSlots(shape, slots, v != shape, None)
    return NativeSlots(shape, slots, v != shape, momentum)


def _step(leaf: Any, faults: Faults, kinds: str) -> int:
    """Returns the step; Orbax may hold a float, as T5X casts it with all leaves that it restores with a dtype."""
    is_count = isinstance(leaf, Tensor) and leaf.shape == () and leaf.dtype.kind in kinds
    scalar = leaf.read().item() if is_count else leaf
    scalar = int(scalar) if isinstance(scalar, float) and is_count and scalar.is_integer() else scalar
    if not fits(scalar, Natural):
        leaf_type = f"{leaf.dtype} {leaf.shape}" if isinstance(leaf, Tensor) else type(leaf).__name__
        faults.add(f"is no integer scalar but {leaf_type}", "state/step")
        return 0
    return int(scalar)


def _rest(tree: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns what is neither parameter nor slot nor step."""
    state = {key: value for key, value in tree["state"].items() if key not in ("step", "param_states")}
    other = {key: value for key, value in tree.items() if key not in ("target", "state", "flax_mutables")}
    rest = {**other, **({"state": state} if state else {})}
    parts = {
        "flax_mutables": tree.get("flax_mutables"),
        "t5x": rest,
        FILES_BESIDE: list(meta.get(FILES_BESIDE, ())),
    }
    return {key: value for key, value in parts.items() if value}
