"""Small parameters of one kind in one computation, in a form that XLA compiles in the time of one; large ones in turn.

XLA fuses a stack into whatever reads it, and compiles a kernel for each offset that it takes a part from: for hundreds
of parameters that takes minutes. So the stack is walked by a loop, which nothing is fused into, and the offsets are
made numbers that the compiler can't know: then one kernel takes out any part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from statekit.optim.steps import Arrays

STACK = 2**16
"""The most elements of a parameter that is stacked with others of its kind.

A stack is copied together and apart again, which is traffic that a large parameter needn't have; below this size, what
many small computations cost to compile and to launch weighs more.
"""
CHUNK = 2**18
"""The most elements that one round of the loop moves: 1 MiB of float32, what a core's cache holds."""


PARTS = 128
"""The most parameters in a stack: what XLA needs to compile one grows faster than they do."""


def parts(grads: Arrays, stacks: Stacks, in_turn: bool) -> Iterator[tuple[Arrays, Stacks | None]]:
    """Yields gradients by path that are moved in one go, and how they are stacked if they are.

    Args:
        grads: Gradients by path.
        stacks: How small ones are stacked.
        in_turn: Whether each of the others is moved by itself.
    """
    large = {path: grad for path, grad in grads.items() if not 0 < grad.size <= STACK}
    yield from (({path: grad}, None) for path, grad in large.items()) if in_turn else ((large, None),)
    kinds: dict[tuple[Any, ...], list[str]] = {}
    for path, grad in grads.items():
        if 0 < grad.size <= STACK:
            kinds.setdefault((grad.shape, str(grad.dtype)), []).append(path)
    for paths in kinds.values():
        for start in range(0, len(paths), PARTS):
            yield {path: grads[path] for path in paths[start : start + PARTS]}, stacks


def awaiting(array: Any, last: Any, count: jax.Array) -> Any:
    """Returns an array unchanged, but a computation on a CPU waits for another array before it uses it.

    XLA begins all parameters at once there, and keeps what each needs until its norms are known: memory that the
    system gives anew in every update, at a cost above the update's. The array is multiplied with 1, which the
    compiler can't know.

    Args:
        array: The array; what isn't a single one stays as it is.
        last: The other array.
        count: The count of updates: an array of which only we know that it isn't negative.
    """
    if not isinstance(array, jax.Array):
        return array
    unit = jnp.ones((), array.dtype)
    return array * jax.lax.platform_dependent(
        cpu=lambda: jnp.where(count < 0, jnp.max(last).astype(array.dtype), unit), default=lambda: unit
    )


class Stacks:
    """Stacks for `statekit.optim.run.moves`."""

    def __init__(self, count: jax.Array) -> None:
        """Takes the count of updates: an array of which only we know that it isn't negative."""
        self._count = count
        self._places: dict[int, tuple[jax.Array, ...]] = {}
        self._last: jax.Array | None = None

    def stack(self, values: Sequence[jax.Array]) -> jax.Array:
        """Returns arrays of one shape and dtype along a new first axis, after the stack before has been taken apart."""
        first, *others = values
        return jnp.stack([first if self._last is None else awaiting(first, self._last, self._count), *others])

    def unstack(self, value: jax.Array) -> Sequence[jax.Array]:
        """Returns the parts along the first axis."""
        parts, shape = len(value), value.shape[1:]
        if parts not in self._places:
            places, nowhere = tuple(map(jnp.int32, range(parts))), (jnp.int32(0),) * parts
            self._places[parts] = jax.lax.cond(self._count >= 0, lambda: places, lambda: nowhere)
        rest = (jnp.int32(0),) * len(shape)

        def part(at: jax.Array) -> jax.Array:
            start = (at, *rest)
            return jax.lax.dynamic_slice(value, start, (1, *shape), allow_negative_indices=False).reshape(
                shape
            )

        values = list(map(part, self._places[parts]))
        self._last = values[-1] if isinstance(self._count, jax.core.Tracer) else None
        return values

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that takes all its arrays, and returns all of its own, with one more first axis."""

        def run(*stacks: Any) -> Any:
            return jax.lax.map(lambda member: function(*member), stacks, batch_size=_round(stacks))

        return run


def _round(stacks: Any) -> int:
    """Returns how many parts a round of the loop moves: a divisor of all, so that no other round is left over."""
    leaves = jax.tree.leaves(stacks)
    parts = len(leaves[0])
    largest = max(leaf.size // parts for leaf in leaves)
    most = max(1, min(parts // 2, CHUNK // max(1, largest)))
    return next(size for size in range(most, 0, -1) if parts % size == 0)
