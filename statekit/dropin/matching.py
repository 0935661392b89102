"""Whether the state of a checkpoint fits the parameters that go on with it, in any framework.

Goes in: a state, and the caller's parameters by path. Comes out: nothing, or an error that lists every fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from statekit.errors import StateError, UsageError
from statekit.optim.run import stepped_variants
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Shape


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


def require_resumable(state: TrainState, place: object, home: str, makers: Mapping[str, str]) -> None:
    """Checks that an optimizer of ours goes on with a state.

    Args:
        state: The state.
        place: Where it is from.
        home: The module whose optimizers are asked.
        makers: Name of the class or function there, by schema.

    Raises:
        UsageError: The state can't tell its variant.
        StateError: No optimizer follows the variant's rule, or the state has no slots.
    """
    schema, variant = state.optimizer.schema, state.optimizer.variant
    candidates = stepped_variants(schema)
    if variant is None and candidates:
        raise UsageError(
            f"The checkpoint can't tell which {schema} it is of, and they go on in other ways.",
            place=place,
            expected=f"variant= one of {', '.join(candidates)}",
            remedy=f'load_optimizer(..., variant="{candidates[0]}"), or the one that the run used',
        )
    if variant not in candidates or schema not in makers:
        known = {name: ", ".join(stepped_variants(name)) for name in makers}
        raise StateError(
            f"{home} has no optimizer that goes on with this state.",
            place=place,
            expected="; ".join(f"{name}, variant {variants}" for name, variants in known.items()),
            found=f"{schema}, variant {variant or 'unknown'}",
        )
    if not state.slots:
        raise StateError(
            "The checkpoint holds parameters, but no optimizer state.",
            place=place,
            remedy=f"load_params reads it; begin with a new {home}.{makers[schema]}",
        )


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
    for path, own in given.items():
        if path not in stored:
            if own.needed:
                yield "isn't in the checkpoint", own.name
        elif stored[path] != own.shape:
            yield f"has shape {own.shape}, in the checkpoint {stored[path]}", own.name
