"""Newton-Schulz iterations: what Muon makes of its momentum, with every rounding of each original.

    X = u / (norm of u),  and n times: G = X X^T,  X = a X + (b G + c G G) X

X is taken wide: a tall matrix is transposed first, and back at the end. PyTorch runs it in bfloat16 and rounds each of
the three results once; Keller Jordan's text rounds every operator; Optax and Keras stay in float32.

Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; the forms are those of `schemas/muon.json`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from statekit.arrays.backend import Backend, Value

Coefficients = tuple[float, float, float]
WITHIN = {"bfloat16": 5e-3, "float16": 5e-3, "float32": 5e-5}
"""How far two executions of it may be apart, of the largest entry, by dtype: measured, see docs/bounds.md."""


@dataclass(frozen=True)
class NewtonSchulz:
    """How an original orthogonalizes.

    Attributes:
        rows: The coefficients of each iteration.
        epsilon: What keeps the norm from zero.
        dtype: What its operations round to.
        fused: Whether a sum and its products are rounded once.
        added: Whether epsilon is added to the norm; else it is the least norm.
        late: Whether the matrix is cast after it was divided by its norm.
    """

    rows: tuple[Coefficients, ...]
    epsilon: float
    dtype: str
    fused: bool
    added: bool
    late: bool

    def __call__(self, xp: Backend, matrices: Value) -> Value:
        """Returns matrices orthogonalized, each by itself.

        Args:
            xp: Where they live.
            matrices: (..., A, B), in the compute dtype.
        """
        *_, rows, columns = xp.shape(matrices)
        if not rows * columns:
            return matrices
        x = xp.transposed(matrices) if rows > columns else matrices
        x = self._divided(xp, x if self.late else xp.rounded(x, self.dtype))
        for coefficients in self.rows:
            x = self._iterated(xp, x, coefficients)
        return xp.transposed(x) if rows > columns else x

    def _divided(self, xp: Backend, x: Value) -> Value:
        def rounded(value: Value) -> Value:
            return value if self.late else xp.rounded(value, self.dtype)

        axes = (len(xp.shape(x)) - 2, len(xp.shape(x)) - 1)
        size = float(math.prod(xp.shape(x)[axis] for axis in axes))
        norm = rounded(xp.sqrt(xp.mean(x * x, axes, keepdims=True) * size))
        epsilon = xp.constant(self.epsilon)
        divisor = rounded(norm + epsilon) if self.added else xp.maximum(norm, epsilon)
        return xp.rounded(x / divisor, self.dtype)

    def _iterated(self, xp: Backend, x: Value, coefficients: Coefficients) -> Value:
        def rounded(value: Value) -> Value:
            return xp.rounded(value, self.dtype)

        a, b, c = map(xp.constant, coefficients)
        gram = rounded(xp.matmul(x, xp.transposed(x)))
        if self.fused:
            polynomial = rounded(b * gram + c * xp.matmul(gram, gram))
            return rounded(a * x + xp.matmul(polynomial, x))
        square = rounded(xp.matmul(rounded(c * gram), gram))
        polynomial = rounded(rounded(b * gram) + square)
        return rounded(rounded(a * x) + rounded(xp.matmul(polynomial, x)))


def rows_of(coefficients: Sequence[Any], steps: int, use: str) -> tuple[Coefficients, ...]:
    """Returns the coefficients of each iteration.

    Args:
        coefficients: a, b, c, or a table of them.
        steps: Iterations.
        use: How a table of another length is used: `coefficient_table` of the schema.

    Example:
        >>> rows_of([[1, 2, 3], [4, 5, 6]], 3, "cycled")
        ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (1.0, 2.0, 3.0))
    """
    table = coefficients if isinstance(coefficients[0], Sequence) else [coefficients]
    rows = [(float(a), float(b), float(c)) for a, b, c in table]
    count = len(rows) if use == "whole" and len(rows) > 1 else steps
    return tuple(rows[i % len(rows)] for i in range(count))
