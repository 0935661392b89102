"""Whether the state of a checkpoint fits the parameters that go on with it, in any framework.

Goes in: a state, and the caller's parameters by path. Comes out: nothing, or an error that lists every fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from statekit.conversion import registry
from statekit.conversion.contracts import FindsNames
from statekit.conversion.open_state import OpenState
from statekit.dropin.by_name import by_name, path_of, refuse_by_name, renamed_path
from statekit.errors import Faults, StateError, StatekitError, UsageError
from statekit.state.facts import check_decay, check_steps
from statekit.state.param_names import wrapped_names
from statekit.state.run import BUFFERS
from statekit.state.schema import WEIGHTS, load_schema
from statekit.state.train_state import Group, TrainState
from statekit.tensors.tensor import TIES, DType, Shape, Tensor, widens
from statekit.tensors.tree import Tree


@dataclass(frozen=True)
class Given:
    """A parameter that the caller has.

    Attributes:
        name: What the caller calls it.
        shape: Its shape.
        needed: Whether it is an error that the checkpoint doesn't have it.
    """

    name: str
    shape: Shape
    needed: bool = True


def require_resumable(
    state: TrainState, place: object, home: str, makers: Mapping[str, str], unread: str = ""
) -> None:
    """Checks that an optimizer of ours goes on with a state.

    Args:
        state: The state.
        place: Where it is from.
        home: The module whose optimizers are asked.
        makers: Name of the class or function there, by schema.
        unread: What of the checkpoint looks like an optimizer and isn't read; "" of nothing.

    Raises:
        UsageError: The state can't tell its variant.
        UnknownRuleError: The state may be of several optimizers.
        InexactError: The run does more than its optimizer's steps.
        StateError: No optimizer follows the variant's rule, or the state has no slots.
    """
    if state.optimizer.schema == WEIGHTS:
        raise StateError(
            "The checkpoint holds parameters, but no optimizer state.",
            place=place,
            found=unread or None,
            remedy=f"load_params reads it; begin with a new optimizer of {home}: {', '.join(makers.values())}",
        )
    check_steps(state, place)
    check_decay(state, place)
    for part in state.parts():
        _require_resumable(part, place, home, makers, f"{part.optimizer.schema}/" * state.optimizer.several)


def _require_resumable(
    state: TrainState, place: object, home: str, makers: Mapping[str, str], prefix: str
) -> None:
    schema, variant = state.optimizer.schema, state.optimizer.variant
    candidates = load_schema(schema).stepped
    if variant is None and candidates:
        raise UsageError(
            f"The checkpoint can't tell which {schema} it is of, and they go on in other ways.",
            place=place,
            expected=f"variant= one of {', '.join(candidates)}",
            remedy=f'load_optimizer(..., variant="{prefix}{candidates[0]}"), or the one that the run used',
        )
    if variant not in candidates or schema not in makers:
        stepped = {name: ", ".join(load_schema(name).stepped) for name in makers}
        raise StateError(
            f"{home} has no optimizer that continues from this state.",
            place=place,
            expected="; ".join(f"{name}, variant {variants}" for name, variants in stepped.items()),
            found=f"{schema}, variant {variant or 'unknown'}",
        )
    if not state.slots:
        raise StateError(
            "The checkpoint holds parameters, but no optimizer state.",
            place=place,
            remedy=f"load_params reads it; begin with a new {home}.{makers[schema]}",
        )


def _misnamed(names: Mapping[str, str], native: Sequence[str], mine: Mapping[str, str]) -> Faults:
    """Returns what is wrong with a caller's names.

    Args:
        names: Names in the checkpoint by the caller's.
        native: All names in the checkpoint.
        mine: The caller's names by those in the checkpoint, of those that differ.
    """
    faults = Faults(
        (f"is no parameter of the checkpoint, but the name of {key}", value)
        for key, value in names.items()
        if not any(f"{path_of(name)}/".startswith(f"{path_of(value)}/") for name in native)
    )
    after = Counter(path_of(mine.get(name, name)) for name in native)
    faults += [("would be the name of two parameters", name) for name, count in after.items() if count > 1]
    return faults


def renamed(
    state: TrainState, names: Mapping[str, str], place: object, live_names: Iterable[str] = ()
) -> TrainState:
    """Returns a state under a caller's names; what hyperparameters say by name is said of the new ones.

    Args:
        state: The state.
        names: Names in the checkpoint by the caller's, of parameters or of modules around them, where they differ; dots
            count as slashes.
        place: Where the state is from, for errors.
        live_names: All names of the caller. Where `names` is empty, those that only a wrapper or an adapter tells
            from the checkpoint's are paired with these.

    Raises:
        UsageError: The checkpoint has no such parameter, or two would have one name; lists every one.
    """
    buffers: Mapping[str, Tree] = state.extra.get(BUFFERS, {})
    native = [*state.params, *buffers]
    names = names or _wrapped(live_names, native)
    if not names:
        return state
    path_by_native = {path_of(native): path_of(name) for name, native in names.items()}
    moved = {
        name: other
        for name in native
        if (other := renamed_path(path_of(name), path_by_native)) != path_of(name)
    }
    faults = _misnamed(names, native, moved)
    faults.check(UsageError, "The names don't fit the checkpoint", place=place)

    def of(path: str) -> str:
        return path_of(moved[path]) if path in moved else path

    def spelled_out(group: Group) -> Group:
        schema, variant = state.optimizer.kind(group)
        values = by_name(load_schema(schema), str(variant), group.hyperparameters, group.paths, faults)
        return replace(group, hyperparameters=values)

    groups = tuple(map(spelled_out, state.optimizer.groups))
    refuse_by_name(load_schema(state.optimizer.kinds[0][0]), faults)
    extra = dict(state.extra)
    if buffers:
        extra[BUFFERS] = {moved.get(name, name): buffer for name, buffer in buffers.items()}
    if TIES in extra:
        extra[TIES] = {name: of(path) for name, path in extra[TIES].items()}
    after_names = replace(state, optimizer=replace(state.optimizer, groups=groups)).renamed(of)
    return replace(after_names, extra=extra)


def _wrapped(live_names: Iterable[str], native: Iterable[str]) -> dict[str, str]:
    return wrapped_names([path_of(name) for name in live_names], {path_of(name) for name in native})


def saved_under(opened: OpenState, live_names: Iterable[str]) -> dict[str, str]:
    """Returns a checkpoint's names by a model's, where the model's library saves parameters under other ones.

    Args:
        opened: The checkpoint.
        live_names: All names of the model.
    """
    native = {path_of(name) for name in (*opened.state.params, *opened.state.extra.get(BUFFERS, {}))}
    names = {path_of(name): name for name in live_names}
    layout = registry.layout(opened.layout)
    checkpoint = opened.checkpoint
    if native & names.keys() == names.keys() or not isinstance(layout, FindsNames):
        return {}
    if _wrapped(names, native) or not layout.names_are_near(checkpoint):
        return {}
    try:
        others = layout.names_in_file(checkpoint)
    except StatekitError:  # then the names don't fit, which is said where they are matched
        return {}
    pairs = {names[path_of(name)]: other for name, other in others.items() if path_of(name) in names}
    return {name: other for name, other in pairs.items() if path_of(other) in native}


def copy_fault(source: Tensor, shape: Shape, dtype: DType, whose: str = "the model") -> str:
    """Returns why a checkpoint's tensor can't be copied to where there is this shape and dtype; "" if it can.

    It may be widened, but not narrowed.

    Example:
        >>> import numpy as np
        >>> from statekit.tensors.tensor import DTYPES, in_memory
        >>> copy_fault(in_memory(np.ones((2, 3), np.float32)), (2, 3), DTYPES["bfloat16"])
        "is float32 and would be narrowed to the model's bfloat16"
    """
    if source.shape != shape:
        return f"has shape {source.shape}, in {whose} {shape}"
    if not widens(source.dtype, dtype):
        return f"is {source.dtype} and would be narrowed to {whose}'s {dtype}"
    return ""


def match_faults(
    stored: Mapping[str, Shape], moved: Iterable[str], given: Mapping[str, Given], kind: str
) -> Iterator[tuple[str, str]]:
    """Yields in what parameters differ from a checkpoint's, each with its name.

    Args:
        stored: Shape of each parameter of the checkpoint, by path.
        moved: Paths of those that the caller must have.
        given: The caller's, by path.
        kind: What the caller has: parameters or variables.
    """
    for path in moved:
        if path not in given:
            yield f"is in the checkpoint, but not among the {kind}", path
    for path, param in given.items():
        if path not in stored:
            if param.needed:
                yield "isn't in the checkpoint", param.name
        elif stored[path] != param.shape:
            yield f"has shape {param.shape}, in the checkpoint {stored[path]}", param.name
