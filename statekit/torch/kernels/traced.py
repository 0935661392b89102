"""An array namespace that records: run over it, the text of a rule leaves the graph of its operations.

Values know the axes that they have by name, not by length, so that one graph serves tensors of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from statekit.arrays.backend import Backend, Value
from statekit.errors import StatekitError

Kind: TypeAlias = Literal["int", "bool", "float64", "float32"]
Dims: TypeAlias = tuple[str, ...]
"""An axis by name; "" for an axis of length 1."""
Leaf: TypeAlias = Literal["array", "number", "size", "input", "place"]


class CannotTraceError(StatekitError):
    """The text does what no kernel does: it looks at a value, or sorts."""


@dataclass(frozen=True, eq=False)
class Traced:
    """One value of the text.

    Attributes:
        graph: The graph that it belongs to.
        number: Its place in the graph.
        op: What makes it: `add`, `sum`, ..., or a leaf: `array`, `number`, `size`, `input`, `place`.
        args: What it is made of.
        note: What else decides it: a leaf's name, axes that go, a dtype.
        dims: Its axes.
        kind: In what it is computed. Every value of a tensor is float32 or bool.
        dtype: In what it is stored.
        shared: Whether all tensors of a group have the same: it follows from count and rate.
    """

    graph: Graph
    number: int
    op: str
    args: tuple[Traced, ...]
    note: Any
    dims: Dims
    kind: Kind
    dtype: str
    shared: bool

    __array_ufunc__ = None

    @property
    def space(self) -> frozenset[str]:
        """The axes that are longer than 1."""
        return frozenset(self.dims) - {""}

    def _with(self, op: str, other: Any, swapped: bool = False) -> Traced:
        pair = (other, self) if swapped else (self, other)
        return self.graph.operation(op, *pair)

    def __add__(self, other: Any) -> Traced:
        return self._with("add", other)

    def __radd__(self, other: Any) -> Traced:
        return self._with("add", other, swapped=True)

    def __sub__(self, other: Any) -> Traced:
        return self._with("sub", other)

    def __rsub__(self, other: Any) -> Traced:
        return self._with("sub", other, swapped=True)

    def __mul__(self, other: Any) -> Traced:
        return self._with("mul", other)

    def __rmul__(self, other: Any) -> Traced:
        return self._with("mul", other, swapped=True)

    def __truediv__(self, other: Any) -> Traced:
        return self._with("div", other)

    def __rtruediv__(self, other: Any) -> Traced:
        return self._with("div", other, swapped=True)

    def __floordiv__(self, other: Any) -> Traced:
        return self._with("floordiv", other)

    def __mod__(self, other: Any) -> Traced:
        return self._with("mod", other)

    def __pow__(self, other: Any) -> Traced:
        return self._with("pow", other)

    def __neg__(self) -> Traced:
        return self.graph.operation("neg", self)

    def __gt__(self, other: Any) -> Traced:
        return self._with("gt", other)

    def __lt__(self, other: Any) -> Traced:
        return self._with("lt", other)

    def __ge__(self, other: Any) -> Traced:
        return self._with("ge", other)

    def __le__(self, other: Any) -> Traced:
        return self._with("le", other)

    def __eq__(self, other: object) -> Any:
        return self if other is self else self._with("eq", other)

    def __and__(self, other: Any) -> Traced:
        return self._with("and", other)

    def __or__(self, other: Any) -> Traced:
        return self._with("or", other)

    def __hash__(self) -> int:
        return self.number

    def __bool__(self) -> bool:
        raise CannotTraceError("The rule decides by a value that only the device knows.", found=self.op)

    __float__ = __int__ = __index__ = __bool__


COMPARED = ("gt", "lt", "ge", "le", "eq", "isnan")


@dataclass(eq=False)
class Graph:
    """The values of a trace, each once.

    Attributes:
        lengths: How long the axes of the sample are.
        nodes: All values, each behind what it is made of.
    """

    lengths: Mapping[str, int]
    nodes: list[Traced] = field(default_factory=list)
    _by_key: dict[Any, Traced] = field(default_factory=dict)

    def node(
        self, op: str, args: tuple[Traced, ...], note: Any, dims: Dims, kind: Kind, dtype: str, shared: bool
    ) -> Traced:
        """Returns the value that this makes."""
        key = (op, tuple(arg.number for arg in args), repr(note), dims, kind, dtype, shared)
        if key not in self._by_key:
            traced = Traced(self, len(self.nodes), op, args, note, dims, kind, dtype, shared)
            self.nodes.append(traced)
            self._by_key[key] = traced
        return self._by_key[key]

    def leaf(
        self, op: Leaf, name: Any, dims: Dims = (), kind: Kind = "float32", dtype: str = "float32"
    ) -> Traced:
        """Returns a value that nothing here makes: a tensor's array or size, a number, an input of the update."""
        return self.node(op, (), name, dims, kind, dtype, op in ("number", "input"))

    def number(self, value: float, kind: Kind | None = None) -> Traced:
        """Returns a number of the text."""
        plain: Kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float64"
        return self.leaf(
            "number", float(value) if kind in ("float32", "float64") else value, kind=kind or plain
        )

    def taken(self, value: Any) -> Traced:
        """Returns a value or number of the text as one of the graph."""
        return value if isinstance(value, Traced) else self.number(value)

    def operation(self, op: str, *values: Any, note: Any = None) -> Traced:
        """Returns what an operation by element makes of values and numbers."""
        args = tuple(self.taken(value) for value in values)
        shared = all(arg.shared for arg in args)
        kind = _kind(op, args) if shared else "bool" if op in (*COMPARED, "and", "or") else "float32"
        return self.node(op, args, note, _broadcast(args), kind, "float32", shared)

    def reduction(self, op: str, value: Traced, axes: Sequence[int], keepdims: bool) -> Traced:
        """Returns the sum or the largest of a value over axes."""
        gone = tuple(value.dims[axis] for axis in axes if value.dims[axis])
        dims = tuple(
            "" if i in axes else name for i, name in enumerate(value.dims) if keepdims or i not in axes
        )
        if not gone:
            return self.node("reshape", (value,), dims, dims, "float32", "float32", value.shared)
        return self.node(op, (value,), tuple(sorted(gone)), dims, "float32", "float32", False)


def _kind(op: str, args: Sequence[Traced]) -> Kind:
    """Returns in what an operation on numbers is computed, as torch and Python do it: float32 is a tensor's."""
    if op in (*COMPARED, "and", "or"):
        return "bool"
    kinds = {arg.kind for arg in (args[1:] if op == "where" else args)}
    if "float32" in kinds:
        return "float32"
    if "float64" in kinds or op in ("div", "sqrt", "power", "exponential", "one_minus_power"):
        return "float64"
    return "int"


def _broadcast(args: Sequence[Traced]) -> Dims:
    rank = max((len(arg.dims) for arg in args), default=0)
    dims = [""] * rank
    for arg in args:
        for i, name in enumerate(arg.dims, rank - len(arg.dims)):
            if name and dims[i] not in ("", name):
                raise CannotTraceError("Axes that differ meet.", expected=dims[i], found=name)
            dims[i] = name or dims[i]
    return tuple(dims)


class TracingBackend(Backend):
    """Records what torch would do."""

    name = "torch"
    contracts = False
    sqrt_units = 0.0

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def widen(self, value: Value) -> Value:
        if not isinstance(value, Traced):
            return self.graph.number(float(value), "float32")
        if value.kind in ("int", "bool", "float64"):
            return self._by_element("float32", value)
        return value if value.dtype == "float32" else self._by_element("wide", value)

    def number(self, value: Value) -> Value:
        return value if isinstance(value, Traced) else float(value)

    def narrow(self, value: Value, dtype: str) -> Value:
        if not isinstance(value, Traced):
            value = self.widen(value)
        return self.graph.node("narrow", (value,), dtype, value.dims, "float32", dtype, value.shared)

    def rounded(self, value: Value, dtype: str) -> Value:
        value = value if isinstance(value, Traced) else self.widen(value)
        return value if dtype == "float32" else self._by_element("rounded", value, note=dtype)

    def shape(self, value: Value) -> tuple[int, ...]:
        return tuple(self.graph.lengths[name] if name else 1 for name in value.dims)

    def dtype(self, value: Value) -> str:
        return str(value.dtype)

    def sum(self, *values: Value) -> Value:
        total = None
        for value in values:
            part = self.graph.reduction("sum", value, range(len(value.dims)), keepdims=False)
            total = part if total is None else total + part
        return total

    def norm(self, value: Value) -> Value:
        peak = self.graph.reduction("max", self.absolute(value), range(len(value.dims)), keepdims=False)
        scaled = value / self.where(peak > 0, peak, 1.0)
        return self.where(peak < math.inf, peak * self.sqrt(self.sum(scaled * scaled)), peak)

    def mean(self, value: Value, axes: tuple[int, ...], keepdims: bool = False) -> Value:
        if not axes:
            return value
        gone = tuple(sorted(value.dims[axis] for axis in axes if value.dims[axis]))
        total = self.graph.reduction("sum", value, axes, keepdims)
        return total / self.graph.leaf("size", gone) if gone else total

    def expand(self, value: Value, axes: tuple[int, ...]) -> Value:
        rest = iter(value.dims)
        dims = tuple("" if i in axes else next(rest) for i in range(len(value.dims) + len(axes)))
        return self.graph.node("reshape", (value,), dims, dims, "float32", value.dtype, value.shared)

    def sqrt(self, value: Value) -> Value:
        return self._by_element("sqrt", value) if isinstance(value, Traced) else math.sqrt(value)

    def power(self, value: Value, exponent: float) -> Value:
        taken = self.graph.taken(value)
        if not taken.shared and exponent != -0.5:
            raise CannotTraceError("No kernel raises a tensor to this power.", found=exponent)
        return self._by_element("power", taken, note=float(exponent))

    def maximum(self, left: Value, right: Value) -> Value:
        return self.graph.operation("maximum", left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        return self.graph.operation("minimum", left, right)

    def keep_nan(self, new: Value, old: Value) -> Value:
        kept = self.graph.operation("where", self._by_element("isnan", new), old, new)
        return self.narrow(kept, new.dtype)

    def exponential(self, base: float, exponent: Value) -> Value:
        return self.graph.operation("exponential", float(base), exponent)

    def absolute(self, value: Value) -> Value:
        return self._by_element("abs", value)

    def sign(self, value: Value) -> Value:
        return self._by_element("sign", value)

    def floor(self, value: Value) -> Value:
        return self._by_element("floor", value)

    def if_greater(self, left: Value, right: Value, then: Value, otherwise: Value) -> Value:
        return self.graph.operation("where", self.graph.operation("gt", left, right), then, otherwise)

    def sequential_sum(self, value: Value, dtype: str) -> Value:
        if dtype != "float32":
            raise CannotTraceError("No kernel rounds a sum after each addition.", found=dtype)
        return self.sum(value)

    def one_minus_power(self, base: float, exponent: Value) -> Value:
        if not isinstance(exponent, Traced):
            return 1.0 - base**exponent
        return self.graph.operation("one_minus_power", float(base), exponent)

    def where(self, condition: Value, then: Value, otherwise: Value) -> Value:
        if isinstance(condition, bool):
            return then if condition else otherwise
        return self.graph.operation("where", condition, then, otherwise)

    def set_row(self, value: Value, row: Value, new: Value) -> Value:
        dims = (value.dims[0], *("" for _ in value.dims[1:]))
        here = self.graph.operation("eq", self.graph.leaf("place", value.dims[0], dims), row)
        return self.graph.operation("where", here, new, value)

    def about(self, value: Value, dtype: str) -> None:
        return None

    def _by_element(self, op: str, value: Traced, note: Any = None) -> Traced:
        if op in ("wide", "float32"):
            return self.graph.node(op, (value,), note, value.dims, "float32", "float32", value.shared)
        return self.graph.operation(op, value, note=note)

    def _none(self, *args: Any, **options: Any) -> Any:
        raise CannotTraceError("No kernel does an operation of the rule.")

    largest = order_statistic = zeros = asarray = numpy = compile = _none
