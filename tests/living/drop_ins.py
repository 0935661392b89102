"""Our optimizer classes, each in the framework of an original, moved on by one update from any state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from living.originals import Arrays, Case, Sparse, slices
from statekit.arrays.backend import backend
from statekit.optim.steps import USUAL
from statekit.state.constants import variant_constants
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.verify.stepping import named

Tensors: TypeAlias = Mapping[tuple[str, str], Array]
Update: TypeAlias = Callable[[TrainState, Arrays, Sparse], Tensors]
"""One update: a state before it, gradients, and those given as rows -> all values after it."""


def follows(case: Case) -> bool:
    """Tells whether our class rounds as this original does: arrays of low precision as the original usually runs."""
    usual = USUAL.get(variant_constants(case.family, case.variant)["compute_dtype"], "compiled")
    low = case.dtype != "float32" or any("mu_dtype" in a or "dtype_momentum" in a for a, _ in case.groups)
    return not low or case.execution == usual


def drop_in(case: Case, start: TrainState, rates: Sequence[float | None]) -> Update:
    """Returns our class in the framework of a case's original, as one update."""
    groups = tuple(
        replace(group, hyperparameters={**group.hyperparameters, "learning_rate": rate})
        for group, rate in zip(start.optimizer.groups, rates, strict=True)
    )
    return DROP_INS[case.library](case, replace(start, optimizer=replace(start.optimizer, groups=groups)))


def _with_rates(state: TrainState, start: TrainState) -> TrainState:
    return replace(state, optimizer=start.optimizer)


def _torch(case: Case, start: TrainState) -> Update:
    import torch

    from statekit.torch.from_checkpoint import optimizer_for

    xp = backend("torch")

    def update(state: TrainState, grads: Arrays, rows: Sparse) -> Tensors:
        params = {p: torch.nn.Parameter(xp.asarray(t.read().copy())) for p, t in state.params.items()}
        optimizer = optimizer_for(_with_rates(state, start), params.items())
        for path, grad in grads.items():
            params[path].grad = xp.asarray(grad)
        optimizer.step()
        slots = {p: {n: xp.numpy(v) for n, v in optimizer.state[t].items()} for p, t in params.items()}
        return named({p: xp.numpy(t) for p, t in params.items()}, slots, [])

    return update


def _jax(case: Case, start: TrainState) -> Update:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from statekit.jax.from_checkpoint import _loaded, spec_of
    from statekit.jax.leaves import leaves_of
    from statekit.jax.transformation import built, slots_of

    (group,) = start.optimizer.groups
    spec = spec_of(start, group, None)
    made = built(spec)

    def moved(params: Any, state: Any, grads: Any) -> Any:
        updates, state = made.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(moved)

    def update(state: TrainState, grads: Arrays, rows: Sparse) -> Tensors:
        params = {path: jnp.asarray(tensor.read()) for path, tensor in state.params.items()}
        loaded = _loaded(spec, state, group, leaves_of(params))
        after, then = step(params, loaded, {path: jnp.asarray(grad) for path, grad in grads.items()})
        slots, _ = slots_of(spec.schema, leaves_of(params), then)
        read = {p: {n: np.asarray(v) for n, v in tensors.items()} for p, tensors in slots.items()}
        return named({path: np.asarray(value) for path, value in after.items()}, read, [])

    return update


def _keras(case: Case, start: TrainState) -> Update:
    import keras
    import tensorflow as tf

    from statekit.tensorflow.from_checkpoint import _copied, _targets, built

    xp = backend("tensorflow")
    variables = {
        path: keras.Variable(tensor.read(), name=path.replace("/", "_"))
        for path, tensor in start.params.items()
    }
    optimizer = built(start, variables, None, {"jit_compile": case.mode == "compiled"}, "a living original")

    def update(state: TrainState, grads: Arrays, rows: Sparse) -> Tensors:
        for path, tensor in state.params.items():
            variables[path].assign(tensor.read())
        for target, source in _targets(optimizer, state, "a living original"):
            _copied(target, source)
        optimizer.iterations.assign(state.counts.updates)
        given = {p: slices(case, p, rows[p]) if p in rows else tf.constant(g) for p, g in grads.items()}
        optimizer.apply_gradients([(grad, variables[path]) for path, grad in given.items()])
        slots = {
            path: {name: xp.numpy(tf.convert_to_tensor(v)) for name, v in tensors.items()}
            for path, tensors in optimizer.slots().items()
            if path in variables
        }
        return named({p: xp.numpy(tf.convert_to_tensor(v.value)) for p, v in variables.items()}, slots, [])

    return update


DROP_INS: Mapping[str, Callable[[Case, TrainState], Update]] = {
    "torch": _torch,
    "transformers": _torch,
    "optax": _jax,
    "keras": _keras,
}
