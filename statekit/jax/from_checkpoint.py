"""Resuming in JAX from any checkpoint that statekit reads, without a converted file in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from statekit.conversion.changing.at_loading import with_first_slots
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.by_name import path_of, renamed_path
from statekit.dropin.loading import Call, Framework, Loaded, LoadOptions, ResumeOptions, put, resumed
from statekit.dropin.matching import Given, copy_fault, match_faults
from statekit.dropin.options import refuse_options
from statekit.dropin.overrides import rate_of
from statekit.errors import Faults, StateError
from statekit.jax.leaves import Leaves, leaves_of
from statekit.jax.sharding import slot_sharding
from statekit.jax.states import STATES, State
from statekit.jax.transformation import OptimizerSpec, Rate, built, rate_faults, state_of
from statekit.maps.links import StateMap
from statekit.maps.model_map import maps_of
from statekit.maps.modules import TargetModel
from statekit.optim.run import steps_for
from statekit.state.options import FACTOR_MAP, RATE_NAMES, known_options, read_options, taken
from statekit.state.stored_params import as_variable
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import DType, Shape, Tensor, dtype_named

HOME = "statekit.jax"
MAKERS = {schema: schema for schema in STATES}
"""Schema -> the function that makes its optimizer."""
_REMEDY = "names must be those of the checkpoint, with dots or slashes, or given: names={name: the checkpoint's, ...}"


def load_optimizer(
    path: CheckpointRef | str | PathLike[str],
    params: Any,
    *,
    learning_rate: Rate | Mapping[str, Rate] = None,
    **options: Unpack[ResumeOptions],
) -> tuple[optax.GradientTransformation, Any]:
    """Builds the optimizer that a checkpoint records, and loads its state by parameter name.

    A leaf's name is its keys joined by `/`; it fits a path of the checkpoint as it is, or with dots for slashes. Slots
    are read tensor by tensor, each process what its devices hold, and lie as their parameter does. Where the run had
    several groups, of one optimizer or of several, or parameters that it kept frozen, the transformation is an
    `optax.partition` of one for each.

    Args:
        path: Anything statekit reads: a T5X run or step folder, an Orbax or torch checkpoint, a statekit folder; or a
            `CheckpointRef`.
        params: The parameters: arrays, or `jax.ShapeDtypeStruct`s with shardings.
        learning_rate: A number, a 0-d array or a schedule of the updates done; if None, as the checkpoint has it. Most
            systems store none; then every update raises. Where the run had several optimizers, one for all, or one for
            each: `{"adafactor": 1e-2, "adamw": schedule}`.
        **options: What the files don't say, as in `statekit.open`. Beside it:
            names: Names in the checkpoint by the leaves', or by modules around them, where they differ.
            map: From the checkpoint's model to that of another codebase, e.g. `t5x-t5:hf-t5`, or from the modules of
                one framework to another's: `torch:flax`; `names` are of its names then.
            config: What the map needs to know of the model and no checkpoint says, e.g. `{"num_heads": 12}`.
            require: The least exactness that a map may have for slots, as in `statekit.convert`.
            Any other name is a hyperparameter for every group, e.g. `clipping_threshold=None`; `step_offset="reset"`
            lets the second moment's decay start anew, as finetuning does. What can be overridden is the law that
            `statekit.dropin.overrides.overridden` states. `slot_policy`, `drop_slots_of` and `loss_scale` are as in
            `statekit.convert`, and `init_missing=["head.*"]` names parameters that begin anew, as the checkpoint lacks
            them or has them in another shape.

    Returns:
        The transformation, and its state.

    Raises:
        StateError: Parameters are missing, unknown, or of other shapes; or the checkpoint has no optimizer that can be
            stepped; lists every fault.
        UsageError: An override that doesn't exist or can't be made.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    return resumed(FRAMEWORK, path, leaves_of(params), learning_rate, options)


def _built(
    loaded: Loaded, leaves: Leaves, learning_rate: Rate | Mapping[str, Rate]
) -> tuple[optax.GradientTransformation, Any]:
    state = with_first_slots(loaded.state)
    groups = [group for group in state.optimizer.groups if group.paths]
    moved = [path_of(path) for group in groups for path in group.paths]
    faults = _shape_faults(state.params, moved, leaves)
    faults += [
        ("has no slots in the checkpoint", path)
        for group in groups
        for path in group.paths
        if not state.slots.get(path)
    ]
    Faults(faults).check(
        StateError, "The checkpoint doesn't fit the parameters", place=loaded.place, remedy=_REMEDY
    )
    specs = [spec_of(state, group, learning_rate) for group in groups]
    if len(groups) == 1 and len(groups[0].paths) == len(leaves.names):
        return built(specs[0]), _loaded(specs[0], state, groups[0], leaves)
    return _partition(specs, groups, state, leaves)


def _partition(
    specs: Sequence[OptimizerSpec], groups: Sequence[Group], state: TrainState, leaves: Leaves
) -> tuple[optax.GradientTransformation, Any]:
    label = {path_of(path): str(i) for i, group in enumerate(groups) for path in group.paths}
    labels = leaves.map(lambda name: label.get(path_of(name), "frozen"))
    rules = {str(i): built(spec) for i, spec in enumerate(specs)} | {"frozen": optax.set_to_zero()}

    def inner(i: str) -> Any:
        if i == "frozen":
            return optax.MaskedState(optax.EmptyState())
        kept = leaves.map(lambda n: leaves.by_name[n] if label.get(path_of(n)) == i else optax.MaskedNode())
        return optax.MaskedState(_loaded(specs[int(i)], state, groups[int(i)], leaves_of(kept)))

    return optax.partition(rules, labels), optax.transforms.PartitionState({i: inner(i) for i in rules})


def spec_of(state: TrainState, group: Group, rate: Rate | Mapping[str, Rate]) -> OptimizerSpec:
    """Returns the optimizer of one of a state's groups; with `rate` if given, else as the state has it.

    Raises:
        StateError: The variant can't be stepped.
        UsageError: A hyperparameter can't be what it is.
    """
    schema, stored = state.optimizer.kind(group)
    variant = str(stored)
    steps_for(schema, stored)
    rate = rate_of(rate, group, state, "learning_rate")
    hyperparameters, names = group.hyperparameters, {*taken(schema, variant)} - {FACTOR_MAP}
    if rate is None:
        rate = next(
            (hyperparameters[name] for name in RATE_NAMES if hyperparameters.get(name) is not None), None
        )
    options = known_options(schema, variant, hyperparameters)
    read = read_options(schema, variant, options)
    refuse_options([*read.faults, *rate_faults(rate)], read.remedy)
    return OptimizerSpec(
        schema,
        variant,
        rate,
        options,
        {path_of(path): rule for path, rule in state.rules.items()},
        {path_of(path): state.counts.updates - count for path, count in state.counts.behind.items()},
        tuple(sorted(names - options.keys())),
    )


def _loaded(spec: OptimizerSpec, state: TrainState, group: Group, leaves: Leaves) -> State:
    """Returns the state of one group, on the devices of its parameters."""
    stored = {path_of(path): path for path in group.paths}
    slots = {}
    for name, leaf in leaves.by_name.items():
        path = stored[path_of(name)]
        param, rule = getattr(leaf, "sharding", None), state.rules.get(path)
        slots[name] = {
            slot: _placed(tensor, slot_sharding(param, rule, spec.definition, slot))
            for slot, tensor in state.slots.get(path, {}).items()
        }
    whole = {slot: _placed(tensor, None) for slot, tensor in group.slots.items()}
    return state_of(spec.schema, leaves, jnp.int32(state.counts.updates), slots, whole)


def _placed(tensor: Tensor, sharding: jax.sharding.Sharding | None, dtype: Any = None) -> jax.Array:
    """Returns a tensor on its devices; each part is read by itself."""
    canonical = jax.dtypes.canonicalize_dtype(dtype or tensor.dtype)

    def read(index: tuple[slice, ...] | None) -> Any:
        return np.asarray(tensor.read(index)).astype(canonical)

    if sharding is None:
        return jnp.asarray(read(None))
    return jax.make_array_from_callback(tensor.shape, sharding, read)


def load_params(
    path: CheckpointRef | str | PathLike[str], params: Any, **options: Unpack[LoadOptions]
) -> Any:
    """Returns a checkpoint's parameters in the place of others, by name, laid out over devices as they are.

    Values are widened where a leaf's dtype is wider, never narrowed.

    Args:
        path: Anything statekit reads, or a `CheckpointRef`.
        params: Arrays, or `jax.ShapeDtypeStruct`s; a leaf's name is its keys joined by `/`, dots count as slashes.
        **options: As in `load_optimizer`, without hyperparameters; `require` is for parameters alone.

    Raises:
        StateError: Parameters are missing on either side, or of other shapes or narrower dtypes; lists every one.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        CorruptError: What is read isn't what its manifest or a checksum says.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    return put(FRAMEWORK, path, leaves_of(params), options, _with_values)


def _with_values(loaded: Loaded, leaves: Leaves) -> Any:
    state = loaded.state
    stored, dtypes = state.params, {path_of(name): leaf.dtype for name, leaf in leaves.by_name.items()}
    sources = {
        path_of(name): as_variable(state, name, dtypes.get(path_of(name), tensor.dtype), loaded.opened.makers)
        for name, tensor in stored.items()
    }
    faults = _shape_faults(stored, [path_of(name) for name in stored], leaves)
    faults += [
        (fault, name)
        for name, leaf in leaves.by_name.items()
        if (source := sources.get(path_of(name))) is not None
        and (fault := copy_fault(source, source.shape, leaf.dtype))
    ]
    Faults(faults).check(
        StateError, "The checkpoint's parameters don't fit", place=loaded.place, remedy=_REMEDY
    )
    placed = {
        name: _placed(sources[path_of(name)], getattr(leaf, "sharding", None), leaf.dtype)
        for name, leaf in leaves.by_name.items()
    }
    return leaves.tree(placed)


def model_of(leaves: Leaves, names: Mapping[str, str] | None) -> TargetModel:
    """Returns the model that leaves are of, by their paths in the checkpoint."""
    native_paths = {path_of(own_name): path_of(name) for own_name, name in (names or {}).items()}
    return TargetModel(frozenset(renamed_path(path_of(name), native_paths) for name in leaves.by_name))


def _shape_faults(
    stored: Mapping[str, Tensor], moved: Iterable[str], leaves: Leaves
) -> list[tuple[str, str]]:
    shapes = {path_of(path): tensor.shape for path, tensor in stored.items()}
    given = {path_of(name): Given(name, tuple(leaf.shape)) for name, leaf in leaves.by_name.items()}
    return list(match_faults(shapes, moved, given, "parameters"))


def maps_to(call: Call, leaves: Leaves) -> tuple[StateMap, ...]:
    """Returns the maps to a model that is there."""
    return maps_of(call.map, call.config, builds=False, model=model_of(leaves, call.names))


def _shapes(leaves: Leaves, names: Mapping[str, str]) -> dict[str, tuple[Shape, DType]]:
    return {name: (tuple(leaf.shape), dtype_named(str(leaf.dtype))) for name, leaf in leaves.by_name.items()}


FRAMEWORK = Framework(
    HOME,
    MAKERS,
    "learning_rate",
    "flax",
    hints=lambda call, leaves: call.ref,
    maps=maps_to,
    names=lambda opened, call, leaves: (call.names, leaves.by_name),
    shapes=_shapes,
    build=_built,
    anew="(...).init(params)",
)
