"""An update and a map commute where the map says that training goes on exactly; else they part, and it says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from statekit.arrays.intervals import IntervalBackend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.errors import InexactError, StateError, UnknownRuleError
from statekit.maps.along_axis import REST, Concatenate, Reorder, Split
from statekit.maps.links import Carried, Link, carried
from statekit.maps.operations import Merge, Operation, Part, Permute, Piece, Stack, Unstack
from statekit.maps.scale import Scale
from statekit.maps.sizes import Recast
from statekit.optim.run import load, mover, store
from statekit.state.exactness import Exactness
from statekit.state.schema import load_schema, schema_names
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.tensor import Array, Shape, in_memory
from statekit.testing.step_cases import RATE, Case, case, run
from statekit.verify.stepping import named

R, C, B, N = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE
Parameters = Mapping[str, tuple[Shape, tuple[Axis, ...]]]
MATRIX: Parameters = {"a": ((6, 4), (R, C))}
PAIR: Parameters = {"a": ((6, 4), (R, C)), "b": ((6, 4), (R, C))}
STACK: Parameters = {"a": ((2, 3, 4), (B, R, C))}
BESIDE: Parameters = {"beside": ((7,), (N,))}
MATRIX_BESIDE: Parameters = {"beside": ((7, 2), (R, C))}
"""For optimizers that move matrices alone."""


def of_each(operation: Operation, *paths: str) -> list[Link]:
    return [Link((path,), path, (operation,)) for path in paths]


MAPS: Mapping[str, tuple[Parameters, list[Link]]] = {
    "transposed": (MATRIX, of_each(Permute((1, 0)), "a")),
    "parted": (MATRIX, of_each(Part(0, 2), "a")),
    "merged": ({"a": ((4, 2, 3), (R, C, C))}, of_each(Merge(1), "a")),
    "reordered": (MATRIX, of_each(Reorder(0, (2, REST), (1, 0)), "a")),
    "stacked": (PAIR, [Link(("a", "b"), "both", (Stack(0),))]),
    "unstacked": (STACK, [Link(("a",), f"a{i}", (Unstack(0, i),)) for i in range(2)]),
    "unstacked where all is one": (
        {"a": ((2, 6), (N, N))}, [Link(("a",), f"a{i}", (Unstack(0, i),)) for i in range(2)]
    ),
    "fused along rows": (PAIR, [Link(("a", "b"), "both", (Concatenate(0, 2),))]),
    "fused along columns": (PAIR, [Link(("a", "b"), "both", (Concatenate(1, 2),))]),
    "split along rows": (MATRIX, [Link(("a",), f"a{i}", (Split(0, (2, 1), i),)) for i in range(2)]),
    "split along columns": (MATRIX, [Link(("a",), f"a{i}", (Split(1, (1, 1), i, REST),)) for i in range(2)]),
    "split in stacks": (STACK, [Link(("a",), f"a{i}", (Split(0, (1, 1), i),)) for i in range(2)]),
}  # fmt: skip
WIDENED = of_each(Recast("bfloat16", "float32"), "a")
UPDATE = 2
"""The update that is made before the map, and after it: slots have seen two gradients by then."""


def made(schema: str, variant: str, name: str, full: bool, dtype: str = "float32") -> Case:
    table = {**MAPS[name][0], **(MATRIX_BESIDE if schema == "muon" else BESIDE)}
    run = case(schema, variant, full=full, dtype=dtype, table=table, updates=UPDATE + 1)
    if schema != "muon":
        return run
    # Which axes of a stack or of three axes make a matrix somebody has to say.
    said = {path: Rule(axes, "given") for path, (_, axes) in table.items()}
    return replace(run, state=replace(run.state, rules=said))


def mapped(state: TrainState, links: Sequence[Link]) -> Carried:
    return carried(state, [*links, Link(("beside",), "beside")])


def apart(one: Case, links: Sequence[Link]) -> tuple[Carried, list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns what a map makes of a run, and the tensors that it makes otherwise after an update than before it.

    Returns:
        The map; those that leave the bound of the update of the mapped state; and those with other bits.
    """
    xp, before = NumpyBackend(), one.before(UPDATE)
    last = mapped(run(xp, one, before, UPDATE), links)
    first = mapped(before, links).state
    grads = replace(before, params={p: in_memory(g, p) for p, g in one.grads[UPDATE].items()}, slots={})
    given = {path: grad.read() for path, grad in mapped(grads, links).state.params.items()}
    ours, theirs = values(stepped(first, given)), values(last.state)
    assert ours.keys() == theirs.keys()
    bounds = IntervalBackend(False)
    live = mover(bounds, first)(load(bounds, first), {p: bounds.asarray(g) for p, g in given.items()}, RATE)
    intervals = named(live.params, live.slots, live.shared)
    outside = [
        key for key, value in theirs.items() if not intervals[key].encloses(value.astype(np.float64)).all()
    ]
    return last, outside, [key for key, value in theirs.items() if value.tobytes() != ours[key].tobytes()]


def stepped(state: TrainState, grads: Mapping[str, Array]) -> TrainState:
    xp = NumpyBackend()
    with np.errstate(all="ignore"):
        return store(
            xp, mover(xp, state)(load(xp, state), {p: xp.asarray(g) for p, g in grads.items()}, RATE), state
        )


def values(state: TrainState) -> dict[tuple[str, str], Array]:
    shared = [group.slots for group in state.optimizer.groups]
    return {key: tensor.read() for key, tensor in named(state.params, state.slots, shared).items()}


def require(one: Case, name: str) -> Exactness | None:
    """Requires that a map is as exact as it says; None where it is refused.

    Raises:
        AssertionError: It says exact, and the update parts from it; or it says something else, and nothing does.
    """
    try:
        result, outside, differ = apart(one, MAPS[name][1])
    except (InexactError, StateError, UnknownRuleError) as error:
        assert str(error)
        return None
    worst = max(result.mapped, key=lambda each: each.exactness)
    what = f"{name}, {worst.exactness.name}: {worst.reason}"
    if worst.exactness is Exactness.BITWISE:
        assert outside == [], what
        if one.schema == "adamw" and not one.hyperparameters.get("global_norm_clip_threshold"):
            assert differ == [], what  # nothing is summed, so nothing in another order
    else:
        assert worst.reason and outside, f"{what}: and yet it commutes with the update"
    return worst.exactness


def kinds() -> Iterator[Any]:
    for schema in schema_names():
        rules = load_schema(schema)
        for variant in rules.stepped:
            for full in (False, True):
                quick = variant == rules.data["reference"] and not full
                marks = () if quick else pytest.mark.slow
                yield pytest.param(
                    schema, variant, full, id=f"{schema}-{variant}-{'full' if full else 'usual'}", marks=marks
                )


@pytest.mark.parametrize(("schema", "variant", "full"), [*kinds()])
def test_a_map_commutes_with_an_update_or_says_that_it_does_not(
    schema: str, variant: str, full: bool
) -> None:
    said = {name: require(made(schema, variant, name, full), name) for name in MAPS}
    if not full:
        axes = ("transposed", "parted", "merged", "reordered")
        assert {said[name] for name in axes} in ({Exactness.BITWISE}, {None})
    if schema == "adamw":
        assert {*said.values()} <= {Exactness.BITWISE, None}


@pytest.mark.parametrize(
    ("schema", "variant"), [("adafactor", "t5x"), ("adamw", "optax"), ("adamw", "torch")]
)
def test_a_wider_parameter_is_no_more_the_same_run_to_the_bit(schema: str, variant: str) -> None:
    result, outside, _ = apart(made(schema, variant, "transposed", False, "bfloat16"), WIDENED)
    assert ("a", "param") in outside
    assert {one.target: one.exactness for one in result.mapped} == {
        "a": Exactness.ROUNDING,
        "beside": Exactness.BITWISE,
    }


def scalable() -> list[tuple[str, str]]:
    """Returns the variants whose schema says what follows a number that a parameter is multiplied by."""
    schemas = [rules for name in schema_names() if "rescaled" in (rules := load_schema(name)).data]
    return [(rules.name, variant) for rules in schemas for variant in rules.stepped]


def unlike_after_scaling(schema: str, variant: str) -> list[tuple[str, str]]:
    """Returns what parts when a matrix times 4 is moved by gradients divided by 4, in the group that the map makes."""
    xp, begun = NumpyBackend(), made(schema, variant, "transposed", False)
    by_name = {"exclude_from_weight_decay": None} if variant == "gpt_neo" else {}  # a map changes names
    begun = replace(begun, state=begun.state.with_hyperparameters(learning_rate=RATE, **by_name))
    before, links = begun.before(UPDATE), of_each(Scale(4.0), "a")
    after = mapped(run(xp, begun, before, UPDATE), links).state
    scaled = mapped(before, links).state
    rates = tuple(group.hyperparameters["learning_rate"] for group in scaled.optimizer.groups)
    grads = {p: xp.asarray(g / np.float32(4 if p == "a" else 1)) for p, g in begun.grads[UPDATE].items()}
    with np.errstate(all="ignore"):
        ours = values(store(xp, mover(xp, scaled)(load(xp, scaled), grads, rates), scaled))
    theirs = values(after)
    assert ours.keys() == theirs.keys() and len(rates) == 2
    return [key for key, value in theirs.items() if value.tobytes() != ours[key].tobytes()]


@pytest.mark.parametrize(("schema", "variant"), [*scalable()])
def test_a_parameter_times_a_power_of_two_goes_on_to_the_bit_in_a_group_of_its_own(
    schema: str, variant: str
) -> None:
    assert unlike_after_scaling(schema, variant) == []


@pytest.mark.parametrize("schema", ["adafactor", "adamw", "muon"])
def test_a_slot_or_a_hyperparameter_that_does_not_follow_a_scale_is_noticed(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = load_schema(schema)
    rescaled = rules.data["rescaled"]
    slots = {**rescaled["slots"], "m": 0, "v_row": 0, "v": 0}
    monkeypatch.setitem(rules.data, "rescaled", {**rescaled, "slots": slots})
    assert unlike_after_scaling(schema, rules.data["reference"])


def test_a_label_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Piece, "regrouped", lambda self, *said: self)
    with pytest.raises(AssertionError, match="fused along rows, BITWISE"):
        require(made("lamb", "optax", "fused along rows", False), "fused along rows")
