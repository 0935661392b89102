"""Whether a transformation's updates are ones that float32 arithmetic can give: each by the bound of its own step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from statekit.arrays.intervals import IntervalBackend
from statekit.jax.leaves import leaves_of
from statekit.jax.states import STATES, State
from statekit.jax.transformation import OptimizerSpec, slots_of
from statekit.optim.run import load, mover
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.verify.stepping import named
from statekit.verify.verdict import compare

Moment = tuple[Any, Any]
"""Parameters, and the state of a transformation or of what Optax wraps it in."""


def spec_by(make: Callable[..., Any], options: Mapping[str, Any]) -> OptimizerSpec:
    """Returns what the options of a function of statekit.jax say."""
    variant = inspect.signature(make).parameters["variant"].default
    given = {name: value for name, value in options.items() if name != "variant"}
    return OptimizerSpec(make.__name__, options.get("variant", variant), None, given)


def in_float32(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options whose numbers are those that float32 arrays hold."""
    return {name: float(np.float32(v)) if isinstance(v, float) else v for name, v in options.items()}


def own_state(state: Any) -> State:
    """Returns our state out of what Optax has wrapped it in."""
    kinds = tuple(STATES.values())
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    (ours,) = (leaf for leaf in leaves if isinstance(leaf, kinds))
    state_found: State = ours
    return state_found


def faults(spec: OptimizerSpec, rate: float, trail: Sequence[Moment], grads: Sequence[Any]) -> list[str]:
    """Returns what of a run leaves the bound: each update's, from what the update before it led to.

    Args:
        spec: The optimizer.
        rate: The learning rate.
        trail: Parameters and state before the first update, and after every one.
        grads: The gradients of every update.
    """
    outside = []
    for before, after, slope in zip(trail[:-1], trail[1:], grads, strict=True):
        state = _train_state(spec, before)
        xp = IntervalBackend(contracted=True)
        arrays = {path: xp.asarray(np.asarray(grad)) for path, grad in leaves_of(slope).by_name.items()}
        live = mover(xp, state)(load(xp, state), arrays, rate)
        bound, old = named(live.params, live.slots, live.shared), _tensors(state)
        reached = _train_state(spec, after)
        if reached.counts.updates != live.updates:
            outside.append(f"counts {reached.counts.updates} updates, expected {live.updates}")
        for key, tensor in _tensors(reached).items():
            value = tensor.read()
            row = compare(live.updates, *key, value, value, old[key].read(), bound[key])
            outside += [f"update {live.updates}, {key}: {row.example}"] if row.outside else []
    return outside


def _train_state(spec: OptimizerSpec, moment: Moment) -> TrainState:
    leaves, state = leaves_of(moment[0]), own_state(moment[1])
    settled = spec.plan({name: tuple(leaf.shape) for name, leaf in leaves.by_name.items()})
    slots, whole = slots_of(spec.schema, leaves, state)
    group = Group(settled.group.paths, settled.group.hyperparameters, slots=_held(whole))
    return TrainState(
        _held(leaves.by_name),
        {path: _held(tensors) for path, tensors in slots.items()},
        Optimizer(spec.schema, spec.variant, (group,)),
        Counts(int(state.count), int(state.count)),
        settled.rules,
    )


def _held(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: in_memory(np.asarray(value), name) for name, value in values.items()}


def _tensors(state: TrainState) -> Mapping[tuple[str, str], Tensor]:
    return named(state.params, state.slots, [group.slots for group in state.optimizer.groups])
