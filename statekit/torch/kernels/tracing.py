"""Traces the update of one kind of tensor."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from statekit.optim.run import steps_for
from statekit.optim.steps import Scene
from statekit.state.train_state import Axis, Rule
from statekit.torch.kernels.source import Program, program
from statekit.torch.kernels.staging import Staging
from statekit.torch.kernels.traced import Dims, Graph, Kind, TracingBackend


@dataclass(frozen=True)
class Item:
    """What of a tensor decides how it is moved: one matrix or vector of it, BATCH axes aside.

    Attributes:
        lengths: Axis -> length: N of a vector; R and C of a matrix; H of a slot that has entries for some updates.
        dtypes: Array -> dtype: `param`, `grad`, and slots.
        dims: Array -> its axes.
        rule: How the axes are factored, where that is part of the rule.
    """

    lengths: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    dims: tuple[tuple[str, Dims], ...]
    rule: Rule | None = None


@cache
def traced(
    schema: str, variant: str, config: Hashable, item: Item, rate: Kind | None, is_clipped: bool
) -> Program:
    """Returns the update of an item as source.

    Args:
        schema: The optimizer.
        variant: Whose rule.
        config: What its `settle` returned; where there is a factor rule, that of the item.
        item: The item.
        rate: As what the learning rate is at hand: float64 a number, float32 a tensor, None not given.
        is_clipped: Whether a factor comes from all gradients together.

    Raises:
        CannotTraceError: The rule can't be run by kernels.
    """
    graph = Graph(dict(item.lengths))
    xp, dtypes = TracingBackend(graph), dict(item.dtypes)
    arrays = {name: graph.leaf("array", name, dims, dtype=dtypes[name]) for name, dims in item.dims}
    given = None if rate is None else graph.leaf("input", "rate", kind=rate)
    scene = Scene(xp, variant, given, graph.leaf("input", "step", kind="int"))
    common = graph.leaf("input", "common") if is_clipped else None
    slots = {name: leaf for name, leaf in arrays.items() if name not in ("param", "grad")}
    after, moved = steps_for(schema, variant).update(
        scene, arrays["param"], arrays["grad"], slots, _of_item(config, item.rule), common
    )
    outputs = {"param": after, **moved}
    return program(Staging.cheapest(outputs), arrays, graph.lengths)


def _of_item(config: Any, rule: Rule | None) -> Any:
    return config if rule is None else replace(config, rule=rule)


def matrix_rule(first: str) -> Rule:
    """Returns the rule of a matrix whose first axis is ROW or COLUMN."""
    axes = (Axis.ROW, Axis.COLUMN) if first == "v_row" else (Axis.COLUMN, Axis.ROW)
    return Rule(axes, "given")


def vector_rule() -> Rule:
    """Returns the rule of what isn't factored."""
    return Rule((Axis.NONE,), "given")


def dims_of(names: Mapping[str, Any], whole: Dims, sides: tuple[str, ...]) -> dict[str, Dims]:
    """Returns the axes of a tensor's arrays.

    Args:
        names: Arrays by name.
        whole: The axes of the tensor.
        sides: The slots along a matrix's rows and columns; none for a vector.
    """
    kept: dict[str, Dims] = dict(zip(sides, (("R",), ("C",)), strict=True)) if sides else {}
    kept |= {"param_rms": ("",), "scale_exp_avg_sq": ("",), "scale_grads": ("H", "")}
    return {name: kept.get(name, whole) for name in names}
