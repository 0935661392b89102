"""The loops of `statekit.torch.fast.numba_runner`, compiled by Numba for float32.

Each moves items from `start` up to `stop`. It gets an item's shape, the addresses of all items of each kind, other
arrays with a row for each item, and numbers. Sums may be taken in any order and products in them stay unrounded, as
the bounds allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from statekit.tensors.tensor import Array

_Function = TypeVar("_Function", bound=Callable[..., Any])
Float: TypeAlias = np.float32
F0, F1, INF = np.float32(0.0), np.float32(1.0), np.float32(np.inf)


def _compiled(*freedoms: str) -> Callable[[_Function], _Function]:
    """Compiles a function. `reassoc` lets LLVM sum and multiply in any order, `contract` leave products unrounded."""

    def made(function: _Function, cache: bool = True) -> _Function:
        try:
            compiled: _Function = njit(nogil=True, error_model="numpy", fastmath={*freedoms}, cache=cache)(
                function
            )
            return compiled
        except RuntimeError:  # neither the package's folder nor the user's can be written to
            if not cache:
                raise
            return made(function, cache=False)

    return made


_loop, _formula = _compiled("reassoc", "contract"), _compiled("contract")
"""Loops sum in any order, and call formulas where the order of a product decides what overflows."""


@intrinsic  # type: ignore[untyped-decorator]  # Numba has no types
def _pointer(context: Any, address: Any) -> Any:
    """Returns an address as a pointer."""

    def generated(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generated


@_loop
def _at(address: int, shape: tuple[int, ...]) -> Array:
    array: Array = carray(_pointer(address), shape, np.float32)
    return array


@_loop
def _within(value: Float, least: Float, most: Float) -> Float:
    """Returns a value within limits; NaN stays what it is."""
    if value < least:
        return least
    return most if value > most else value


@_formula
def _moment(v: Float, x: Float, old: Float, new: Float) -> Float:
    """Returns a second moment, moved by x; the weight goes first into the product."""
    return old * v + new * x * x


@_loop
def adafactor_matrices(
    start: int, stop: int, shape: tuple[int, int], ps: Array, gs: Array, left: Array, right: Array,
    rows_are_left: bool, old: Float, new: Float, epsilon: Float,
    scales: bool, clips: bool, rate: Float, least: Float, most: Float, threshold: Float,
) -> None:  # fmt: skip
    """Moves factored parameters p by gradients g, and the slots `left`, along rows, and `right`, along columns.

    Three passes: the means of g^2; the root mean square of the direction; the update.
    """
    height, width = shape
    columns, a, b = np.empty(width, np.float32), np.empty(height, np.float32), np.empty(width, np.float32)
    for item in range(start, stop):
        p, g, along_rows, along_columns = _at(ps[item], shape), _at(gs[item], shape), left[item], right[item]
        columns[:] = F0
        scale = F0
        for i in range(height):
            row, squares = F0, F0
            for j in range(width):
                square = g[i, j] * g[i, j]
                row += square
                columns[j] += square
                squares += p[i, j] * p[i, j]
            scale += squares
            along_rows[i] = old * along_rows[i] + new * (row / np.float32(width) + epsilon)
        for j in range(width):
            along_columns[j] = old * along_columns[j] + new * (columns[j] / np.float32(height) + epsilon)
        mean = _mean(along_rows) if rows_are_left else _mean(along_columns)
        for i in range(height):
            a[i] = F1 / np.sqrt(along_rows[i] / mean if rows_are_left else along_rows[i])
        for j in range(width):
            b[j] = F1 / np.sqrt(along_columns[j] if rows_are_left else along_columns[j] / mean)
        total = F0
        for i in range(height):
            row = F0
            for j in range(width):
                scaled = g[i, j] * b[j]
                row += scaled * scaled
            norm = np.sqrt(row) * a[i]
            total += norm * norm
        size = _size(np.float32(height * width), scale, total, scales, clips, rate, least, most, threshold)
        for i in range(height):
            factor = a[i] * size
            for j in range(width):
                p[i, j] -= g[i, j] * b[j] * factor


@_loop
def adafactor_vectors(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, vs: Array,
    old: Float, new: Float, epsilon: Float,
    scales: bool, clips: bool, rate: Float, least: Float, most: Float, threshold: Float,
) -> None:  # fmt: skip
    """Moves parameters p that aren't factored by gradients g, and their slots v, in two passes."""
    for item in range(start, stop):
        p, g, v = _at(ps[item], shape), _at(gs[item], shape), _at(vs[item], shape)
        total, scale = F0, F0
        for i in range(len(g)):
            v[i] = old * v[i] + new * (g[i] * g[i] + epsilon)
            direction = g[i] * (F1 / np.sqrt(v[i]))
            total += direction * direction
            scale += p[i] * p[i]
        size = _size(np.float32(len(g)), scale, total, scales, clips, rate, least, most, threshold)
        for i in range(len(g)):
            p[i] -= g[i] * (F1 / np.sqrt(v[i])) * size


@_loop
def _mean(values: Array) -> Float:
    total = F0
    for value in values:
        total += value
    return total / np.float32(len(values))


@_loop
def _size(
    count: Float, scale: Float, total: Float,
    scales: bool, clips: bool, rate: Float, least: Float, most: Float, threshold: Float,
) -> Float:  # fmt: skip
    """Returns what a direction with the sum of squares `total` is multiplied with; `scale` is the parameter's."""
    if scales:
        rate = rate * _within(np.sqrt(scale / count), least, most)
    return rate / _within(np.sqrt(total / count) / threshold, F1, INF) if clips else rate


@_loop
def lans_squares(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, ms: Array, vs: Array,
    squares: Array, rescale: Float,
) -> None:  # fmt: skip
    """Sums the squares of gradients g, (item,)."""
    for item in range(start, stop):
        g, total = _at(gs[item], shape), F0
        for i in range(len(g)):
            total += (rescale * g[i]) * (rescale * g[i])
        squares[item] = total


@_loop
def lans_moments(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, ms: Array, vs: Array,
    by_norms: Array, sums: Array, rescale: Float, wd: Float,
    old1: Float, new1: Float, old2: Float, new2: Float, by1: Float, by2: Float, epsilon: Float,
) -> None:  # fmt: skip
    """Moves the slots m and v by gradients g, which are multiplied with (item,).

    Sums p^2, a^2 and b^2, (item, 0) to (item, 2), of both halves of the update.
    """
    for item in range(start, stop):
        p, g, m, v = _at(ps[item], shape), _at(gs[item], shape), _at(ms[item], shape), _at(vs[item], shape)
        by_norm, weight, first, second = by_norms[item], F0, F0, F0
        for i in range(len(g)):
            x = rescale * g[i] * by_norm
            m[i] = old1 * m[i] + new1 * x
            v[i] = _moment(v[i], x, old2, new2)
            by_root = F1 / (np.sqrt(v[i] * by2) + epsilon)
            a, b = m[i] * by1 * by_root + wd * p[i], x * by_root + wd * p[i]
            weight += p[i] * p[i]
            first += a * a
            second += b * b
        sums[item, 0], sums[item, 1], sums[item, 2] = weight, first, second


@_loop
def lans_params(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, ms: Array, vs: Array,
    by_norms: Array, sizes: Array, rescale: Float, wd: Float, by1: Float, by2: Float, epsilon: Float,
) -> None:  # fmt: skip
    """Takes both halves of the update off parameters p, each times its size, (item, 0) and (item, 1)."""
    for item in range(start, stop):
        p, g, m, v = _at(ps[item], shape), _at(gs[item], shape), _at(ms[item], shape), _at(vs[item], shape)
        by_norm, first, second = by_norms[item], sizes[item, 0], sizes[item, 1]
        for i in range(len(g)):
            by_root = F1 / (np.sqrt(v[i] * by2) + epsilon)
            a, b = m[i] * by1 * by_root + wd * p[i], rescale * g[i] * by_norm * by_root + wd * p[i]
            p[i] -= first * a + second * b


@_loop
def lamb_moments(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, ms: Array, vs: Array,
    sums: Array, w: Float,
    old1: Float, new1: Float, old2: Float, new2: Float, by1: Float, by2: Float, epsilon: Float,
) -> None:  # fmt: skip
    """Moves the slots m and v by gradients g; sums p^2 and x^2, (item, 0) and (item, 1), of the direction x."""
    for item in range(start, stop):
        p, g, m, v = _at(ps[item], shape), _at(gs[item], shape), _at(ms[item], shape), _at(vs[item], shape)
        weight, total = F0, F0
        for i in range(len(g)):
            m[i] = old1 * m[i] + new1 * g[i]
            v[i] = old2 * v[i] + new2 * (g[i] * g[i])
            x = m[i] * by1 / (np.sqrt(v[i] * by2) + epsilon) + w * p[i]
            weight += p[i] * p[i]
            total += x * x
        sums[item, 0], sums[item, 1] = weight, total


@_loop
def lamb_params(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, ms: Array, vs: Array,
    sizes: Array, w: Float, by1: Float, by2: Float, epsilon: Float,
) -> None:  # fmt: skip
    """Takes the direction off parameters p, times the size, (item,)."""
    for item in range(start, stop):
        p, m, v, size = _at(ps[item], shape), _at(ms[item], shape), _at(vs[item], shape), sizes[item]
        for i in range(len(p)):
            p[i] -= size * (m[i] * by1 / (np.sqrt(v[i] * by2) + epsilon) + w * p[i])


@_loop
def scaled_adam_sums(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, deltas: Array, vs: Array,
    sums: Array, clip: Float,
) -> None:  # fmt: skip
    """Sums the products of p and the clipped gradient g, and p^2, (item, 0) and (item, 1)."""
    for item in range(start, stop):
        p, g, product, square = _at(ps[item], shape), _at(gs[item], shape), F0, F0
        for i in range(len(g)):
            product += p[i] * (clip * g[i])
            square += p[i] * p[i]
        sums[item, 0], sums[item, 1] = product, square


@_loop
def scaled_adam_params(
    start: int, stop: int, shape: tuple[int], ps: Array, gs: Array, deltas: Array, vs: Array,
    sizes: Array, growths: Array, grows: bool, clip: Float,
    beta1: Float, old: Float, new: Float, by2: Float, epsilon: Float,
) -> None:  # fmt: skip
    """Moves parameters p and their slots by the clipped gradient g, times the size, and by the growth, both (item,)."""
    for item in range(start, stop):
        p = _at(ps[item], shape)
        g = _at(gs[item], shape)
        delta = _at(deltas[item], shape)
        v = _at(vs[item], shape)
        size, growth = sizes[item], growths[item]
        for i in range(len(g)):
            x = clip * g[i]
            v[i] = _moment(v[i], x, old, new)
            moved = beta1 * delta[i] + size * (x / (np.sqrt(v[i] * by2) + epsilon))
            delta[i] = moved + growth * p[i] if grows else moved
            p[i] += delta[i]
