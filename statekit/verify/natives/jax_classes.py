"""Optax' transformations, which take what Flax reads of a file that was just written; and statekit's own."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

import statekit.jax
from statekit.errors import UsageError
from statekit.jax.live import live_state
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tree import nested
from statekit.verify.natives import Native, Rates, Updates, one_rate, written

_ELSEWHERE = ("learning_rate", "exclude_from_weight_decay", "clipvalue", "global_norm_clip_threshold")
"""What other links of a chain do."""


def runner(name: str, variant: str) -> Native:
    """Returns what makes updates with a transformation; it is compiled once, for states of one form."""
    make = _own if name == "statekit.jax" else _of_optax
    steps: list[Callable[..., Any]] = []

    def run(state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        with tempfile.TemporaryDirectory() as folder:
            transformation, params, opt_state = make(state, one_rate(name, rates), variant, Path(folder))
        if not steps:

            def step(params: Any, opt_state: Any, grads: Any) -> Any:
                changes, after = transformation.update(grads, opt_state, params)
                return optax.apply_updates(params, changes), after

            steps.append(jax.jit(step))
        for grads in updates:
            given = nested({tuple(path.split("/")): jnp.asarray(grad) for path, grad in grads.items()})
            params, opt_state = steps[0](params, opt_state, given)
        return live_state(params, opt_state)

    return run


def _params(state: TrainState) -> Any:
    return nested({tuple(path.split("/")): jnp.asarray(param.read()) for path, param in state.params.items()})


def _arguments(state: TrainState, options: Mapping[str, Any], constructor: Any) -> dict[str, Any]:
    """Returns the arguments of a constructor of Optax, but for the learning rate."""
    if elsewhere := [name for name in _ELSEWHERE[1:] if options.get(name)]:
        raise UsageError(
            f"optax.{constructor.__name__} alone has no such arguments.", found=", ".join(elsewhere)
        )
    parameters = inspect.signature(constructor).parameters
    taken = {n: v for n, v in options.items() if n in parameters and n not in _ELSEWHERE}
    factored = [np.sort(state.params[path].shape)[-2] for path, rule in state.rules.items() if rule.factored]
    if factored:  # a window of a parameter is factored as the parameter is
        taken["min_dim_size_to_factor"] = min(int(taken["min_dim_size_to_factor"]), int(min(factored)))
    return taken


def _of_optax(state: TrainState, rate: float, variant: str, folder: Path) -> tuple[Any, Any, Any]:
    schema = load_schema(state.optimizer.schema)
    if len(state.optimizer.groups) != 1:
        raise UsageError(f"optax.{schema.name} alone has one group.", found=len(state.optimizer.groups))
    (group,) = state.optimizer.groups
    constructor = getattr(optax, schema.name)
    taken = _arguments(state, schema.native("optax", group.hyperparameters), constructor)
    params = _params(state)
    stored = serialization.msgpack_restore(_file(written(state, "flax", "optax", folder)).read_bytes())
    faults = []
    for given in (optax.constant_schedule(rate), rate):  # a schedule has a count of its own
        transformation = constructor(given, **taken)
        template = {"params": params, "opt_state": transformation.init(params)}
        try:
            read = serialization.from_state_dict(template, {name: stored[name] for name in template})
        except ValueError as error:
            faults.append(str(error))
            continue
        restored = jax.tree.map(jnp.asarray, read)
        shapes = [
            jax.tree.map(lambda x: (x.shape, x.dtype), tree["opt_state"]) for tree in (template, restored)
        ]
        if shapes[0] == shapes[1]:
            return transformation, restored["params"], restored["opt_state"]
        faults.append("its state has other shapes or dtypes")
    raise UsageError(f"optax.{schema.name} doesn't restore the state.", found="; ".join(faults))


def _own(state: TrainState, rate: float, variant: str, folder: Path) -> tuple[Any, Any, Any]:
    params = _params(state)
    path = written(state, "flax", "statekit-jax", folder)
    transformation, opt_state = statekit.jax.load_optimizer(path, params, learning_rate=rate, variant=variant)
    return transformation, params, opt_state


def _file(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("checkpoint_*"))
