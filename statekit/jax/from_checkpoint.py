"""Resuming in JAX from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import open_state
from statekit.dropin.by_name import LOGICAL, path_of
from statekit.errors import StateError, UsageError, fault_list
from statekit.jax.leaves import Leaves, leaves_of
from statekit.jax.sharding import slot_sharding
from statekit.jax.states import State
from statekit.jax.transformation import Rate, Told, built, check_options, state_of
from statekit.state.masters import as_params
from statekit.state.options import RATE_NAMES
from statekit.state.schema import load_schema
from statekit.state.step_offset import with_offset
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import Tensor, widens

_SHOWN = 40
_FIXED = ("factored", "min_dim_size_to_factor", "factor_map", "beta1", "dtype_momentum", "amsgrad", "use_ema",
          "multi_precision", "size_update_period", "clipping_update_period")  # fmt: skip
"""Hyperparameters that decide which slots there are."""


def load_optimizer(
    path: str | PathLike[str],
    params: Any,
    *,
    learning_rate: Rate = None,
    variant: str | None = None,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> tuple[optax.GradientTransformation, Any]:
    """Builds the optimizer that a checkpoint records, and loads its state by parameter name.

    A leaf's name is its keys joined by `/`; it fits a path of the checkpoint as it is, or with dots for slashes. Slots
    are read tensor by tensor, each process what its devices hold, and lie as their parameter does. Where the run had
    several groups, or parameters that it kept frozen, the transformation is an `optax.partition` of one for each.

    Args:
        path: Anything statekit reads: a T5X run or step folder, an Orbax or torch checkpoint, a statekit folder.
        params: The parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        learning_rate: A number, a 0-d array or a schedule of the updates done; if None, as the checkpoint has it. Most
            systems store none; then every update raises.
        variant: Whose rule, where the checkpoint can't tell.
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names, as in its configuration.
        **overrides: Canonical hyperparameters for every group, e.g. `clipping_threshold=None`; `step_offset="reset"`
            lets the second moment's decay start anew, as finetuning does.

    Returns:
        The transformation, and its state.

    Raises:
        StateError: Parameters are missing, unknown, or of other shapes; or the checkpoint has no optimizer that can be
            stepped; lists every fault.
        UsageError: An override that doesn't exist or can't be made.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    with open_state(Path(path), step=step, hints=Hints(dict(hparams or {}), variant=variant)) as opened:
        state = _overridden(as_params(opened.state)[0], overrides)
        if not state.slots:
            raise StateError(
                "The checkpoint holds parameters, but no optimizer state.",
                place=path,
                remedy="load_params reads it; begin with a new transformation of statekit.jax",
            )
        leaves = leaves_of(params)
        _refuse("The checkpoint doesn't fit the parameters", _shape_faults(state.params, leaves), path)
        groups = [group for group in state.optimizer.groups if group.paths]
        tolds = [told_of(state, group, learning_rate) for group in groups]
        if len(groups) == 1 and len(groups[0].paths) == len(leaves.names):
            return built(tolds[0]), _loaded(tolds[0], state, groups[0], leaves)
        return _partition(tolds, groups, state, leaves)


def _partition(
    tolds: Sequence[Told], groups: Sequence[Group], state: TrainState, leaves: Leaves
) -> tuple[optax.GradientTransformation, Any]:
    label = {path_of(path): str(i) for i, group in enumerate(groups) for path in group.paths}
    labels = leaves.map(lambda name: label.get(path_of(name), "frozen"))
    rules = {str(i): built(told) for i, told in enumerate(tolds)} | {"frozen": optax.set_to_zero()}

    def inner(i: str) -> Any:
        if i == "frozen":
            return optax.MaskedState(optax.EmptyState())
        kept = leaves.map(lambda n: leaves.by_name[n] if label.get(path_of(n)) == i else optax.MaskedNode())
        return optax.MaskedState(_loaded(tolds[int(i)], state, groups[int(i)], leaves_of(kept)))

    return optax.partition(rules, labels), optax.transforms.PartitionState({i: inner(i) for i in rules})


def told_of(state: TrainState, group: Group, rate: Rate) -> Told:
    """Returns what a state says of one of its groups' optimizer; `rate` if given, else as the state has it.

    Raises:
        StateError: The state can't tell the variant, or nobody can step it.
        UsageError: A hyperparameter can't be what it is.
    """
    schema, variant = state.optimizer.schema, state.optimizer.variant
    if variant is None:
        raise StateError(
            "The checkpoint can't tell whose rule made its state.",
            expected=f"variant: one of {', '.join(load_schema(schema).variants)}",
            remedy="give variant=...",
        )
    offered = set(load_schema(schema).variant(variant)["defaults"]) - {*RATE_NAMES, LOGICAL, "factor_map"}
    known = group.hyperparameters
    if rate is None:
        rate = next((known[name] for name in RATE_NAMES if known.get(name) is not None), None)
    told = Told(
        schema,
        variant,
        rate,
        {name: value for name, value in known.items() if name in offered},
        {path_of(path): rule for path, rule in state.rules.items()},
        {path_of(path): state.counts.updates - count for path, count in state.counts.behind.items()},
        tuple(sorted(offered - known.keys())),
    )
    check_options(told)
    return told


def _loaded(told: Told, state: TrainState, group: Group, leaves: Leaves) -> State:
    """Returns the state of one group, on the devices of its parameters."""
    stored = {path_of(path): path for path in group.paths}
    slots = {}
    for name, leaf in leaves.by_name.items():
        path = stored[path_of(name)]
        param, rule = getattr(leaf, "sharding", None), state.rules.get(path)
        slots[name] = {
            slot: _placed(tensor, slot_sharding(param, rule, told.known, slot))
            for slot, tensor in state.slots.get(path, {}).items()
        }
    whole = {slot: _placed(tensor, None) for slot, tensor in group.slots.items()}
    return state_of(told.schema, leaves, jnp.int32(state.counts.updates), slots, whole)


def _placed(tensor: Tensor, sharding: jax.sharding.Sharding | None, dtype: Any = None) -> jax.Array:
    """Returns a tensor on its devices; each part is read by itself."""
    held = jax.dtypes.canonicalize_dtype(dtype or tensor.dtype)

    def read(index: tuple[slice, ...] | None) -> Any:
        return np.asarray(tensor.read(index)).astype(held)

    if sharding is None:
        return jnp.asarray(read(None))
    return jax.make_array_from_callback(tensor.shape, sharding, read)


def load_params(
    path: str | PathLike[str],
    params: Any,
    *,
    step: int | None = None,
    hparams: Mapping[str, Any] | None = None,
) -> Any:
    """Returns a checkpoint's parameters in the place of others, by name, laid out over devices as they are.

    Values are widened where a leaf's dtype is wider, never narrowed.

    Args:
        path: Anything statekit reads.
        params: Arrays, or `jax.ShapeDtypeStruct`s; a leaf's name is its keys joined by `/`, dots count as slashes.
        step: Which step of a run's folder; the newest if None.
        hparams: What the checkpoint doesn't say, in the original system's names.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    with open_state(Path(path), step=step, hints=Hints(dict(hparams or {}))) as opened:
        leaves = leaves_of(params)
        stored = as_params(opened.state)[0].params
        sources = {path_of(name): tensor for name, tensor in stored.items()}
        faults = _shape_faults(stored, leaves)
        faults += [
            (f"is {sources[path_of(name)].dtype} and would be narrowed to {leaf.dtype}", name)
            for name, leaf in leaves.by_name.items()
            if path_of(name) in sources and not widens(sources[path_of(name)].dtype, leaf.dtype)
        ]
        _refuse("The checkpoint's parameters don't fit", faults, path)
        found = {
            name: _placed(sources[path_of(name)], getattr(leaf, "sharding", None), leaf.dtype)
            for name, leaf in leaves.by_name.items()
        }
        return leaves.tree(found)


def _shape_faults(stored: Mapping[str, Tensor], leaves: Leaves) -> list[tuple[str, str]]:
    theirs = {path_of(name): tensor.shape for name, tensor in stored.items()}
    ours = {path_of(name): (name, tuple(leaf.shape)) for name, leaf in leaves.by_name.items()}
    faults = [("is in the checkpoint, but not among the parameters", p) for p in theirs.keys() - ours.keys()]
    faults += [("isn't in the checkpoint", ours[path][0]) for path in ours.keys() - theirs.keys()]
    faults += [
        (f"has shape {ours[path][1]}, in the checkpoint {shape}", ours[path][0])
        for path, shape in theirs.items()
        if path in ours and ours[path][1] != shape
    ]
    return sorted(faults, key=lambda fault: fault[1])


def _refuse(subject: str, faults: Sequence[tuple[str, str]], place: object) -> None:
    if faults:
        more = f"\n    and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise StateError(
            f"{subject}: {len(faults)} faults.",
            place=place,
            found=fault_list(faults[:_SHOWN]) + more,
            remedy="names must be those of the checkpoint, with dots or slashes",
        )


def _overridden(state: TrainState, overrides: Mapping[str, Any]) -> TrainState:
    """Returns a state with hyperparameters as asked for."""
    fixed = [(name, "would change which slots there are") for name in overrides if name in _FIXED]
    if fixed:
        raise UsageError(
            f"Overrides can't be made: {len(fixed)}.",
            found=fault_list([(why, name) for name, why in fixed]),
            remedy=f"leave them as the run had them, or begin anew: statekit.jax.{state.optimizer.schema}(...)"
            ".init(params)",
        )
    changes = dict(overrides)
    offset = changes.pop("step_offset", "keep")
    return with_offset(state.with_hyperparameters(**changes), offset)[0]
