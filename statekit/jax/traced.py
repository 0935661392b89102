"""Hyperparameters that are arrays, as `optax.inject_hyperparams` hands them over: their values aren't known yet."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import add, mul, neg, pow, sub, truediv
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from statekit.arrays.backend import Value
from statekit.arrays.jax_backend import JaxBackend
from statekit.errors import UsageError


class Traced:
    """A number that is an array, with the arithmetic of numbers.

    It counts as given, hence as on: where 0 means off, only a number can say so. Two are equal if they are the same
    expression, so that parameters with equal settings are still recognised, and updated together.
    """

    def __init__(self, expression: Hashable, value: jax.Array) -> None:
        self._expression, self._value = expression, jnp.asarray(value).astype(jnp.float32)

    def __jax_array__(self) -> jax.Array:
        return self._value

    def __hash__(self) -> int:
        return hash(self._expression)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Traced) and other._expression == self._expression

    def __bool__(self) -> bool:
        return True

    def __neg__(self) -> Traced:
        return Traced((neg, self._expression), -self._value)

    def __add__(self, other: Any) -> Any:
        return self._with(add, self, other)

    def __radd__(self, other: Any) -> Any:
        return self._with(add, other, self)

    def __sub__(self, other: Any) -> Any:
        return self._with(sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(sub, other, self)

    def __mul__(self, other: Any) -> Any:
        return self._with(mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with(mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._with(truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(truediv, other, self)

    def __pow__(self, other: Any) -> Any:
        return self._with(pow, self, other)

    @staticmethod
    def _with(operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        value = operation(*(side._value if isinstance(side, Traced) else side for side in (left, right)))
        if all(isinstance(side, (Traced, int, float)) for side in (left, right)):
            keys = [side._expression if isinstance(side, Traced) else side for side in (left, right)]
            return Traced((operation, *keys), value)
        return value

    def _refused(self, *_: Any) -> NoReturn:
        raise UsageError(
            "The rule branches on a hyperparameter, which therefore can't be an array.",
            place=str(self._expression),
            expected="a number",
            remedy=static_remedy(str(self._expression)),
        )

    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _refused


def static_remedy(name: str) -> str:
    """Returns what a user does so that a hyperparameter stays a number."""
    return f'keep it a number: inject_hyperparams(..., static_args=("{name}",))'


class TracedBackend(JaxBackend):
    """JAX, where numbers of a rule may be `Traced`."""

    def widen(self, value: Value) -> Value:
        return super().widen(value.__jax_array__() if isinstance(value, Traced) else value)

    def constant(self, value: Any, dtype: str = "float32") -> Any:
        if isinstance(value, (int, float)):
            return super().constant(value, dtype)
        return self.rounded(self.widen(value), dtype)

    def number(self, value: Value) -> Value:
        return self.widen(value) if isinstance(value, Traced) else super().number(value)

    def power(self, value: Value, exponent: Any) -> Value:
        return super().power(value, self.widen(exponent) if isinstance(exponent, Traced) else exponent)

    def one_minus_power(self, base: Any, exponent: Value) -> Value:
        if isinstance(base, (int, float)):
            return super().one_minus_power(base, exponent)
        return -jnp.expm1(self.widen(exponent) * jnp.log(self.widen(base)))
