"""A run in motion: the arrays of a train state in a backend, and the step that moves them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from statekit.arrays.backend import Backend, Batching, Value
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.arrays.promotion import LOW
from statekit.errors import StateError
from statekit.optim import adafactor, adamw, lamb, lans, muon, scaled_adam
from statekit.optim.gradient_clipping import LIMIT_OF_ALL
from statekit.optim.keras_averages import follow_average
from statekit.optim.steps import Arrays, Execution, Scene, Slots, Steps, sum_of
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Group, Rule, TrainState
from statekit.tensors.tensor import Tensor, in_memory

Rates: TypeAlias = Value | tuple[Value, ...]
"""A learning rate, or one for each parameter group; a number stays one, as precise as it is."""
Move: TypeAlias = Callable[["Live", Arrays, Rates], "Live"]


@dataclass(frozen=True)
class Live:
    """A run's arrays in a backend.

    Attributes:
        params: Parameter by path.
        slots: Slots by path and name.
        shared: Slots of each group as a whole.
        updates: Updates done.
        behind: Updates done by path, of parameters that have a count of their own and missed some.
    """

    params: Arrays
    slots: Slots
    shared: tuple[Arrays, ...]
    updates: int
    behind: Mapping[str, int] = field(default_factory=dict)


def load(xp: Backend, state: TrainState) -> Live:
    """Reads a state into a backend."""
    return Live(
        _read(xp, state.params),
        {path: _read(xp, slots) for path, slots in state.slots.items()},
        tuple(_read(xp, group.slots) for group in state.optimizer.groups),
        state.counts.updates,
        state.counts.behind,
    )


def store(xp: Backend, live: Live, state: TrainState) -> TrainState:
    """Returns `state` with the arrays and the count of a run."""
    groups = tuple(
        replace(group, slots=_written(xp, shared, f"groups/{i}/"))
        for i, (group, shared) in enumerate(zip(state.optimizer.groups, live.shared, strict=True))
    )
    return replace(
        state,
        params=_written(xp, live.params, ""),
        slots={path: _written(xp, slots, f"{path}/") for path, slots in live.slots.items()},
        optimizer=replace(state.optimizer, groups=groups),
        counts=replace(
            state.counts,
            updates=live.updates,
            schedule=state.counts.schedule + live.updates - state.counts.updates,
            behind=live.behind,
        ),
    )


def initial(state: TrainState) -> TrainState:
    """Returns `state` with the slots that its optimizer begins with."""
    xp = NumpyBackend()
    slots: dict[str, Arrays] = {}
    shared = []
    for group in state.optimizer.groups:
        steps, variant = _steps_of_group(state, group)
        params = _read(xp, {path: state.params[path] for path in group.paths})
        for path, config in settled_group(steps, group, state.rules, variant).items():
            slots[path] = steps.init(xp, params[path], config, variant)
        shared.append(steps.begin(xp, params, group, variant))
    return store(xp, Live(_read(xp, state.params), slots, tuple(shared), state.counts.updates), state)


def mover(xp: Backend, state: TrainState, execution: Execution | None = None) -> Move:
    """Returns the step of a state's optimizers: (live, gradients, learning rates) -> live.

    Args:
        xp: The array namespace.
        state: Whose optimizer.
        execution: Which roundings of low precision the original makes; None: as it usually runs.

    Raises:
        StateError: statekit has no step for the optimizer.
        UnknownRuleError: A factor rule or a hyperparameter is unknown.
    """
    groups = state.optimizer.groups
    for part in state.parts():
        steps = steps_of(part)
        for group in part.optimizer.groups:
            steps.check(part, group)
    rules = [_steps_of_group(state, group) for group in groups]
    configs_by_group = [
        settled_group(steps, group, state.rules, variant)
        for group, (steps, variant) in zip(groups, rules, strict=True)
    ]

    def step(
        live: dict[str, Any], grads: dict[str, Value], rates: Rates, count: Value, counts: dict[str, Value]
    ) -> dict[str, Any]:
        params, slots, shared = dict(live["params"]), dict(live["slots"]), []
        limits = {group.hyperparameters.get(LIMIT_OF_ALL) for group in groups}
        together = grads if len(groups) > 1 and len(limits) == 1 else None
        by_group = rates if isinstance(rates, tuple) else (rates,) * len(groups)
        parts_of_groups = zip(groups, rules, configs_by_group, live["shared"], by_group, strict=True)
        for group, (steps, variant), configs, whole, rate in parts_of_groups:
            new_params, new_slots, new_whole = move_group(
                steps,
                Scene(xp, variant, rate, count, execution, together),
                group,
                configs,
                {path: params[path] for path in group.paths},
                {path: grads[path] for path in group.paths if path in grads},
                {path: slots[path] for path in group.paths},
                whole,
                counts=counts,
            )
            params.update(new_params)
            slots.update(new_slots)
            shared.append(new_whole)
        return {"params": params, "slots": slots, "shared": tuple(shared)}

    kinds = [(schema, str(variant)) for schema, variant in state.optimizer.kinds]
    literal = any(variant_constants(*kind).get("compute_dtype") == "promoted" for kind in kinds)
    if literal and any(dtype in LOW for dtype in _dtypes(state)):
        compiled = _by_literal_rates(xp, step)
    else:
        compiled = xp.compile(step)
    apart = [
        path
        for part, kind in zip(state.parts(), kinds, strict=True)
        for group in part.optimizer.groups
        for path in group.paths
        if counts_apart(*kind)
    ]

    def move(live: Live, grads: Arrays, rates: Rates) -> Live:
        before = {"params": live.params, "slots": live.slots, "shared": live.shared}
        after = compiled(before, dict(grads), rates, live.updates, dict(live.behind))
        missed = [path for path in apart if path not in grads]
        behind = behind_after(live.behind, missed, live.updates)
        return Live(after["params"], after["slots"], after["shared"], live.updates + 1, behind)

    return move


def _by_literal_rates(xp: Backend, step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that is compiled for each learning rate as a constant, which is rounded where it meets arrays."""
    by_rates: dict[Any, Callable[..., Any]] = {}

    def run(before: Any, grads: Any, rates: Any, updates: Any, behind: Any) -> Any:
        if rates not in by_rates:
            by_rates[rates] = xp.compile(
                lambda before, grads, updates, behind: step(before, grads, rates, updates, behind)
            )
        return by_rates[rates](before, grads, updates, behind)

    return run


def _dtypes(state: TrainState) -> set[str]:
    """Returns the names of the dtypes of parameters and slots."""
    slots = [slot for tensors in state.slots.values() for slot in tensors.values()]
    return {tensor.dtype.name for tensor in (*state.params.values(), *slots)}


def settled_group(steps: Steps, group: Group, rules: Mapping[str, Rule], variant: str) -> dict[str, Hashable]:
    """Returns what the update of each parameter depends on beside arrays, by path; errors are those of `settle`."""
    return {path: steps.settle(group, path, rules.get(path), variant) for path in group.paths}


def move_group(
    steps: Steps,
    scene: Scene,
    group: Group,
    configs: Mapping[str, Hashable],
    params: Arrays,
    grads: Arrays,
    slots: Slots,
    shared: Arrays,
    *,
    counts: Mapping[str, Value] | None = None,
    batching: Batching | None = None,
) -> tuple[dict[str, Value], dict[str, dict[str, Value]], Arrays]:
    """Returns a group's parameters, slots and own slots after one update; one without a gradient stays.

    Args:
        steps: The optimizer's step.
        scene: The update.
        group: Paths and hyperparameters.
        configs: What `settled_group` returned.
        params: The group's parameters.
        grads: Gradients by path, of the parameters' shapes.
        slots: Slots by path and name.
        shared: Slots of the group as a whole.
        counts: Updates done by path, where a parameter has a count of its own that isn't the scene's.
        batching: Stacks parameters of equal settings, shapes and dtypes, which are then updated together; sums may
            run in another order. Each by itself if None.
    """
    reached, shared, common = steps.prepare(scene, group, params, grads, slots, shared)
    new_params, new_slots = dict(params), {path: dict(arrays) for path, arrays in slots.items()}
    for path, param, moved in moves(
        steps, scene, configs, params, reached, slots, common, counts=counts, batching=batching
    ):
        new_params[path], new_slots[path] = param, {**new_slots[path], **moved}
    for path, arrays in new_slots.items():
        if "average" in arrays:
            new_params[path], new_slots[path] = follow_average(
                scene.xp, new_params[path], arrays, group, scene.step
            )
    return new_params, new_slots, shared


def moves(
    steps: Steps,
    scene: Scene,
    configs: Mapping[str, Hashable],
    params: Arrays,
    grads: Arrays,
    slots: Slots,
    common: Value,
    *,
    counts: Mapping[str, Value] | None = None,
    batching: Batching | None = None,
) -> Iterator[tuple[str, Value, dict[str, Value]]]:
    """Yields path, parameter and slots after the update of each parameter that has a gradient, batch after batch.

    Arguments are those of `move_group`, gradients and `common` as `prepare` returned them.
    """
    for count, paths in _batches(scene.xp, configs, params, grads, slots, counts or {}, batching is not None):
        own_scene = scene if count is None else replace(scene, step=count)
        yield from _moved(steps, own_scene, configs, paths, params, grads, slots, common, batching)


def _batches(
    xp: Backend,
    configs: Mapping[str, Hashable],
    params: Arrays,
    grads: Arrays,
    slots: Slots,
    counts: Mapping[str, Value],
    batched: bool,
) -> list[tuple[Value | None, list[str]]]:
    """Returns which parameters are updated together, with their own count."""
    batches: dict[Hashable, tuple[Value | None, list[str]]] = {}
    for path, grad in grads.items():
        count = counts.get(path)
        arrays = [params[path], sum_of(grad), *slots[path].values()]
        kind = (configs[path], tuple(slots[path]), tuple((xp.shape(a), xp.dtype(a)) for a in arrays))
        key = (kind, count if isinstance(count, int) else id(count)) if batched else path
        batches.setdefault(key, (count, []))[1].append(path)
    return list(batches.values())


def _moved(
    steps: Steps,
    scene: Scene,
    configs: Mapping[str, Hashable],
    paths: Sequence[str],
    params: Arrays,
    grads: Arrays,
    slots: Slots,
    common: Value,
    batching: Batching | None,
) -> Iterator[tuple[str, Value, dict[str, Value]]]:
    """Yields the parameters of one batch, each with its slots, after their update."""
    config = configs[paths[0]]

    def update(param: Value, grad: Value, arrays: Arrays) -> tuple[Value, dict[str, Value]]:
        return steps.update(scene, param, grad, arrays, config, common)

    if batching is None or len(paths) == 1:
        for path in paths:
            yield path, *update(params[path], grads[path], slots[path])
        return
    stacked = {name: batching.stack([slots[path][name] for path in paths]) for name in slots[paths[0]]}
    after, moved = batching.batched(update)(
        batching.stack([params[path] for path in paths]),
        batching.stack([grads[path] for path in paths]),
        stacked,
    )
    split = {name: batching.unstack(value) for name, value in moved.items()}
    for i, (path, param) in enumerate(zip(paths, batching.unstack(after), strict=True)):
        yield path, param, {name: values[i] for name, values in split.items()}


def behind_after(behind: Mapping[str, int], missed: Iterable[str], updates: int) -> dict[str, int]:
    """Returns the own counts of parameters after an update that some of them missed.

    Args:
        behind: Own counts before it, of those that missed some.
        missed: Those that had no gradient.
        updates: Updates done before it.
    """
    return {path: count + 1 for path, count in behind.items()} | {
        path: behind.get(path, updates) for path in missed
    }


def counts_apart(schema: str, variant: str) -> bool:
    """Tells whether a variant counts the updates of each parameter by itself: one without a gradient falls behind."""
    return variant_constants(schema, variant)["step_scope"] in OWN_COUNTS


def kernels_contract(state: TrainState) -> bool:
    """Tells whether single operations of a state's original contract products and sums: PyTorch's kernels do.

    Of several originals, whether those of one do: a bound that takes them for contracted holds for the others.
    """
    kinds = [(schema, str(variant)) for schema, variant in state.optimizer.kinds]
    return any(variant_constants(*kind).get("compute_dtype") == "each_operation" for kind in kinds)


OWN_COUNTS = ("per_parameter", "per_index_and_device")
"""Values of `step_scope` with a count for each parameter."""


def steps_of(state: TrainState) -> Steps:
    """Returns the module that steps a state's optimizer; errors are those of `steps_for`."""
    return steps_for(state.optimizer.schema, state.optimizer.variant)


def _steps_of_group(state: TrainState, group: Group) -> tuple[Steps, str]:
    """Returns the module that steps one group, and its variant; errors are those of `steps_for`."""
    schema, variant = state.optimizer.kind(group)
    return steps_for(schema, variant), str(variant)


def steps_for(schema: str, variant: str | None) -> Steps:
    """Returns the module that steps a variant of a schema.

    Raises:
        NotFoundError: There is no such schema.
        StateError: Its schema says that the variant is described only.
    """
    stepped = load_schema(schema).stepped
    if variant not in stepped:
        raise StateError(
            "statekit can't step this optimizer.",
            expected=f"variant {', '.join(stepped)}",
            found=f"{schema}, variant {variant or 'unknown'}",
            remedy="name the variant" if variant is None else "",
        )
    return STEPPED[schema]


STEPPED: Mapping[str, Steps] = {
    "adafactor": adafactor,
    "adamw": adamw,
    "lamb": lamb,
    "lans": lans,
    "muon": muon,
    "scaled_adam": scaled_adam,
}
"""The module of steps of each schema; which variants it moves, the schema says."""


def _read(xp: Backend, tensors: Mapping[str, Tensor]) -> dict[str, Value]:
    return {name: xp.asarray(tensor.read()) for name, tensor in tensors.items()}


def _written(xp: Backend, values: Arrays, prefix: str) -> dict[str, Tensor]:
    return {name: in_memory(xp.numpy(value), f"{prefix}{name}") for name, value in values.items()}
