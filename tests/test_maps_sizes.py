"""Copies, other lengths, dtypes and factors: what a map makes up goes by its rule, and is said."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_maps import labels_of, parameters, piece_of, same, statistics
from test_maps_along_axis import check_blocks, map_file, read, second_moment

import statekit
import statekit.maps
from goldens import COMPACT
from statekit.errors import FormatError, InexactError, StateError
from statekit.maps.along_axis import Concatenate, Reorder, Split
from statekit.maps.operations import Merge, Operation, Part, Permute, Piece, Stack, Unstack
from statekit.maps.scale import Scale
from statekit.maps.sizes import Factor, KeepFirst, New, Recast, Replicate, Resize, Unfactor
from statekit.state.exactness import Exactness
from statekit.state.train_state import Axis, Rule
from statekit.tensors import views
from statekit.tensors.tensor import BLOCK_BYTES, Array, Index, Stored, Tensor, blocks, in_memory, index_shape

ROW, COLUMN, BATCH, NONE = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE


@settings(max_examples=80)
@given(parameters(), st.integers(0, 4), st.sampled_from((1, 2, 4)))
def test_copies_have_the_slots_of_the_one_and_the_first_is_it(
    drawn: tuple[Array, Rule], axis: int, count: int
) -> None:
    squares, rule = drawn
    axis, one = min(axis, squares.ndim), piece_of(squares, rule)
    (stack,) = Replicate(count, axis).of([one])
    together = np.stack([squares] * count, axis)
    assert stack.rule is not None and stack.rule.axes[axis] is BATCH
    same(stack, together, statistics(together, stack.rule))
    assert stack.exactness is Exactness.ESTIMATE and "gradients of its own" in stack.reason
    (first,) = KeepFirst(count, axis).of([stack])
    assert first.exactness is Exactness.LOSSY
    assert first.rule == rule
    same(first, squares, read(one))
    (alone,) = Replicate(count).of([one])
    same(alone, squares, read(one))
    (again,) = KeepFirst(count).of([alone] * count)
    same(again, squares, read(one))


def test_of_copies_along_an_axis_that_was_averaged_away_there_is_no_first() -> None:
    with pytest.raises(InexactError, match="v_col has averaged away"):
        KeepFirst(3, 0).of([piece_of(np.ones((3, 4)), Rule((Axis.ROW, Axis.COLUMN), "given"))])


@settings(max_examples=120)
@given(st.data())
def test_new_places_are_what_the_rule_says_and_the_factors_are_those_of_the_longer_axis(
    data: st.DataObject,
) -> None:
    rank = data.draw(st.integers(1, 3))
    axis, shape = (
        data.draw(st.integers(0, rank - 1)),
        [data.draw(st.sampled_from((1, 2, 4))) for _ in range(rank)],
    )
    before, rule = shape[axis], Rule(labels_of(rank, data.draw), "given")
    new: New
    after = 2 * before
    new = data.draw(st.sampled_from(("zeros", "mean")))
    squares = np.random.default_rng(data.draw(st.integers(0, 99))).integers(1, 64, shape).astype(np.float64)
    first = piece_of(squares, rule)
    moment = second_moment(read(first), rule)
    (piece,) = Resize(axis, before, after, "zeros", new).of([first])
    assert piece.exactness is Exactness.ESTIMATE and f"{new} in slots" in piece.reason

    def longer(full: Array, how: str) -> Array:
        one = full.mean(axis=axis, keepdims=True) if how == "mean" else np.zeros_like(full).take([0], axis)
        return np.concatenate([full, *[one] * (after - before)], axis)

    np.testing.assert_array_equal(piece.param.read(), longer(squares, "zeros"))
    np.testing.assert_array_equal(piece.slots["m"].read(), longer(-squares, new))
    assert piece.rule == rule
    kept = read(piece)
    if rule.factored:  # what both factors would be of a second moment with those places
        expected = statistics(longer(moment, new), rule)
        for name in ("v_row", "v_col"):
            np.testing.assert_allclose(kept[name], expected[name], rtol=1e-13, err_msg=name)
    else:
        np.testing.assert_array_equal(kept["v"], longer(squares, new))
    (back,) = Resize(axis, after, before, "zeros", new).of([piece])
    assert back.exactness is Exactness.LOSSY and f"places {before} to {after - 1}" in back.reason
    np.testing.assert_array_equal(back.param.read(), squares)
    for name, slot in read(first).items():
        np.testing.assert_allclose(read(back)[name], slot, rtol=1e-13, err_msg=name)


@settings(max_examples=80)
@given(parameters())
def test_a_full_second_moment_is_averaged_and_factors_become_what_they_stand_for(
    drawn: tuple[Array, Rule],
) -> None:
    squares, rule = drawn
    free = Rule(tuple(BATCH if axis is BATCH else NONE for axis in rule.axes), "given")
    full = piece_of(squares + 1, free)
    (factored,) = Factor(rule.axes).of([full])
    if not rule.factored:
        return
    assert factored.exactness is Exactness.STATISTICS
    same(factored, squares + 1, statistics(squares + 1, rule))
    (again,) = Unfactor(rule.axes).of([factored])
    assert again.exactness is Exactness.ESTIMATE
    assert again.rule == free
    np.testing.assert_allclose(again.slots["v"].read(), second_moment(read(factored), rule), rtol=1e-13)
    (twice,) = Factor(rule.axes).of([again])  # the factors of what they stand for are themselves
    for name, slot in read(factored).items():
        np.testing.assert_allclose(read(twice)[name], slot, rtol=1e-12, err_msg=name)


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(2, 4)] * 3),
    st.sampled_from((ROW, COLUMN, BATCH)),
    st.booleans(),
    st.integers(0, 99),
)
def test_axes_of_which_each_slot_has_averaged_another_are_one_only_by_way_of_the_full_second_moment(
    shape: tuple[int, int, int], third: Axis, swapped: bool, seed: int
) -> None:
    """No formula gives the slots: two second moments have the same ones, and other ones once the axes are one."""
    axes = (COLUMN, ROW, third) if swapped else (ROW, COLUMN, third)
    rule, rng = Rule(axes, "given"), np.random.default_rng(seed)
    squares = rng.uniform(1, 2, shape)
    # What sums to nothing along each axis that is averaged is in no slot.
    unseen = np.einsum("i,j,k->ijk", *(np.linspace(-1, 1, n) for n in shape[:2]), np.ones(shape[2])) / 2
    twin = squares + unseen
    piece = piece_of(squares, rule)
    for name, slot in statistics(twin, rule).items():
        if name != "m":
            np.testing.assert_allclose(slot, read(piece)[name], rtol=1e-13)
    with pytest.raises(InexactError, match="which can't be one"):
        Merge(0).of([piece])
    for axis, other in ((0, "v_row" if swapped else "v_col"), (1, "v_col" if swapped else "v_row")):
        with pytest.raises(InexactError, match=f"{other} has averaged away"):
            Unstack(axis, 0).of([piece])
        assert np.abs(np.take(twin, 0, axis) - np.take(squares, 0, axis)).max() > 0.1
    whole = (shape[0] * shape[1], shape[2])
    assert np.abs(twin - squares).reshape(whole).max() > 0.1

    (full,) = Unfactor(axes).of([piece])
    (merged,) = Merge(0).of([full])
    assert merged.exactness is Exactness.ESTIMATE
    stands_for = second_moment(read(piece), rule)
    np.testing.assert_allclose(read(merged)["v"], stands_for.reshape(whole), rtol=1e-13)
    if third is BATCH:
        return  # one axis is left to the rule, which factors nothing then
    labels = Rule((ROW, COLUMN), "given")
    (factored,) = Factor(labels.axes).of([merged])
    truth = statistics(squares.reshape(whole), labels)
    np.testing.assert_allclose(read(factored)["v_col"], truth["v_col"], rtol=1e-13)  # told by the slots
    np.testing.assert_allclose(read(factored)["v_row"], stands_for.reshape(whole).mean(1), rtol=1e-13)
    assert np.abs(statistics(twin.reshape(whole), labels)["v_row"] - truth["v_row"]).max() > 0.1


def test_a_second_moment_of_zeros_stays_zeros() -> None:
    piece = piece_of(np.zeros((4, 2)), Rule((ROW, COLUMN), "given"))
    (full,) = Unfactor((ROW, COLUMN)).of([piece])
    np.testing.assert_array_equal(full.slots["v"].read(), np.zeros((4, 2)))


def test_another_dtype_is_the_parameters_alone_and_said_where_it_rounds() -> None:
    squares = np.array([1.0, 1.0 + 2**-12], np.float32)
    slots = {name: in_memory(squares) for name in ("m", "v", "master", "average")}
    piece = Piece("adamw", in_memory(squares), slots)
    (narrow,) = Recast("float32", "bfloat16").of([piece])
    assert narrow.exactness is Exactness.LOSSY and "rounded from float32 to bfloat16" in narrow.reason
    dtypes = {name: slot.dtype.name for name, slot in narrow.slots.items()}
    assert (narrow.param.dtype.name, dtypes["average"]) == ("bfloat16", "bfloat16")
    assert {dtypes[name] for name in ("m", "v", "master")} == {"float32"}
    (wide,) = Recast("bfloat16", "float32").of([replace_exactness(narrow)])
    assert wide.exactness is Exactness.ROUNDING and "from now on, so far to bfloat16" in wide.reason
    (alone,) = Recast("bfloat16", "float32").of([Piece("adamw", narrow.param, {})])
    assert alone.exactness is Exactness.BITWISE
    with pytest.raises(StateError, match="is float32, and not bfloat16"):
        Recast("bfloat16", "float32").of([piece])


def replace_exactness(piece: Piece) -> Piece:
    return Piece(piece.schema, piece.param, piece.slots)


# One number for a parameter.


def scaled_adam(param: Array, gradients: Array) -> Piece:
    """Returns a parameter of ScaledAdam whose numbers are those of some gradients, one for each update."""
    scales = np.array([(param * one).sum() for one in gradients])
    numbers = {
        "param_rms": np.sqrt(np.square(param).mean()),
        "scale_exp_avg_sq": np.square(scales).mean(),
    }
    slots = {name: in_memory(np.full((1,) * param.ndim, value)) for name, value in numbers.items()}
    history = in_memory(scales.reshape((-1, *(1,) * param.ndim)))
    return Piece(
        "scaled_adam", in_memory(param), {"delta": in_memory(param), "scale_grads": history, **slots}
    )


@pytest.mark.parametrize("operation", [Concatenate(0, 2), Stack(1)], ids=str)
def test_numbers_of_fused_parts_are_the_fused_ones_or_said_to_be_estimates(operation: Operation) -> None:
    rng = np.random.default_rng(2)
    params, gradients = rng.random((2, 4, 3)), rng.standard_normal((2, 5, 4, 3))
    joined: Callable[..., Array] = np.concatenate if isinstance(operation, Concatenate) else np.stack
    axis = 0 if isinstance(operation, Concatenate) else 1
    whole = scaled_adam(
        joined(params, axis), np.stack([joined(list(each), axis) for each in gradients.swapaxes(0, 1)])
    )
    (made,) = operation.of([scaled_adam(*one) for one in zip(params, gradients, strict=True)])
    for name in ("param_rms", "scale_grads"):
        assert made.slots[name].shape == whole.slots[name].shape
        np.testing.assert_allclose(made.slots[name].read(), whole.slots[name].read(), rtol=1e-13)
    assert made.exactness is Exactness.ESTIMATE
    assert "scale_exp_avg_sq: the sum of the parts', as if these weren't correlated" in made.reason
    assert "param_rms, by which steps are scaled" in made.reason
    apart = [
        (Split(0, (1, 1), i) if isinstance(operation, Concatenate) else Unstack(1, i)).of([made])[0]
        for i in range(2)
    ]
    assert "as if the parts were alike" in apart[0].reason
    (again,) = operation.of(apart)
    for name, slot in read(made).items():
        np.testing.assert_allclose(read(again)[name], slot, rtol=1e-13, err_msg=name)


def test_numbers_of_a_parameter_stay_when_its_axes_merge_and_part() -> None:
    piece = scaled_adam(np.ones((4, 3)), np.ones((5, 4, 3)))
    (merged,) = Merge(0).of([piece])
    assert {name: slot.shape for name, slot in merged.slots.items()} == {
        "delta": (12,), "param_rms": (1,), "scale_exp_avg_sq": (1,), "scale_grads": (5, 1)}  # fmt: skip
    (back,) = Part(0, 4).of([merged])
    for name, slot in read(piece).items():
        np.testing.assert_array_equal(read(back)[name], slot)
    assert back.exactness is Exactness.BITWISE


def test_scaled_adams_batches_follow_a_map_and_come_back_to_the_bit(tmp_path: Path) -> None:
    source = next((COMPACT / "scaled_adam" / "zipformer2025_basic" / "checkpoint").iterdir())
    with statekit.open(source) as opened:
        shapes = {path: param.shape for path, param in opened.state.params.items()}
        slots = {
            path: {name: slot.read() for name, slot in of_path.items()}
            for path, of_path in opened.state.slots.items()
        }
    batches = [
        shape for shape in shapes.values() if list(shapes.values()).count(shape) > 1 and len(shape) == 2
    ]
    assert batches
    turned = {path for path, shape in shapes.items() if shape == batches[0]}
    transposed = [{"op": "permute", "order": [1, 0]}]
    lines = [
        {"source": path, "target": f"mine/{path}", "operations": transposed if path in turned else []}
        for path in shapes
    ]
    name = map_file(tmp_path, parameters=lines, words={}, config={})
    there = statekit.convert(source, tmp_path / "there.pt", map=name)
    assert there.plan.exactness is Exactness.BITWISE
    back = statekit.convert(there.target, tmp_path / "back.pt", map=f"{name}:back")
    with statekit.open(there.target) as mapped, statekit.open(back.target) as last:
        one = next(iter(turned))
        squares = mapped.state.slots[f"mine/{one}"]["exp_avg_sq"].read()
        np.testing.assert_array_equal(squares, slots[one]["exp_avg_sq"].T)
        for path, of_path in slots.items():
            for slot, array in of_path.items():
                np.testing.assert_array_equal(
                    last.state.slots[path][slot].read(), array, err_msg=f"{path} {slot}"
                )


# As data.

LINES: list[dict[str, Any]] = [
    {"source": "embed", "target": "embed", "operations": [
        {"op": "resize", "axis": 0, "from": 6, "to": "vocabulary", "param": "mean", "slots": "zeros"}]},
    {"source": "dense/mlp", "target": "experts/{expert}/mlp", "operations": [
        {"op": "replicate", "over": "expert", "count": "experts"}]},
    {"source": "gate", "target": "gates", "operations": [{"op": "replicate", "axis": 0, "count": "experts"}]},
    {"source": "norm", "target": "norm", "operations": [{"op": "cast", "from": "float32", "to": "bfloat16"}]},
]  # fmt: skip
CONFIG = {"vocabulary": 8, "experts": 3}


def test_a_map_makes_up_what_it_says_and_leaves_it_out_on_the_way_back(tmp_path: Path) -> None:
    config = {"vocabulary": "the rows of the padded vocabulary", "experts": "the number of experts"}
    name = map_file(tmp_path, parameters=LINES, words={}, config=config)
    rng = np.random.default_rng(0)
    params = {
        path: rng.random(shape).astype(np.float32)
        for path, shape in {"embed": (6, 2), "dense/mlp": (2, 3), "gate": (4,), "norm": (2,)}.items()
    }
    made = statekit.maps.load(name, CONFIG).apply(params)
    assert [path for path in made if "experts" in path] == [f"experts/{i}/mlp" for i in range(3)]
    np.testing.assert_allclose(made["embed"][6:], np.stack([params["embed"].mean(0)] * 2), rtol=1e-6)
    assert made["gates"].shape == (3, 4)
    assert made["norm"].dtype.name == "bfloat16"
    back = statekit.maps.load(f"{name}:back", CONFIG).apply(made)
    for path in ("embed", "dense/mlp", "gate"):
        np.testing.assert_array_equal(back[path], params[path])


def test_what_new_places_are_must_stand_in_the_map(tmp_path: Path) -> None:
    silent = {key: value for key, value in LINES[0]["operations"][0].items() if key != "slots"}
    line = {"source": "a", "target": "b", "operations": [{**silent, "to": 8}]}
    with pytest.raises(FormatError, match="slots"):
        statekit.maps.load(map_file(tmp_path, parameters=[line]))


def test_a_resized_run_is_refused_until_that_is_allowed(tmp_path: Path) -> None:
    source = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4"
    with statekit.open(source) as opened:
        lines: list[dict[str, Any]] = [{"source": path, "target": path} for path in opened.state.params]
    (line,) = (one for one in lines if one["source"] == "embed/weight")
    line["operations"] = [
        {"op": "resize", "axis": 0, "from": 11, "to": 16, "param": "mean", "slots": "zeros"}
    ]
    name = map_file(tmp_path, parameters=lines, words={}, config={})
    with pytest.raises(
        InexactError, match="5 new places along axis 0: mean in the parameter, zeros in slots"
    ):
        statekit.plan(source, tmp_path / "run.pt", map=name)
    made = statekit.convert(source, tmp_path / "run.pt", map=name, require="estimate")
    with statekit.open(made.target) as state:
        assert not state.state.slots["embed/weight"]["v"].read()[11:].any()


# Whatever the map, a tensor streams.

BIG = (32 * 1024, 256)  # of float32: four blocks


class Counting:
    """A tensor that is made up as it is read, and remembers the largest block."""

    def __init__(self) -> None:
        self.largest = 0

    def tensor(self, shape: tuple[int, ...] = BIG) -> Tensor:
        def fetch(index: Index) -> Array:
            block = np.zeros(index_shape(index), np.float32)
            self.largest = max(self.largest, block.nbytes)
            return block

        return Stored(shape, np.dtype(np.float32), fetch, "big", "memory")


CHAINS: tuple[tuple[Operation, ...], ...] = (
    (Reorder(0, (16, 2, 0), (0, 2, 1)),),
    (Reorder(0, (2, 0), (1, 0)),),
    (Split(0, (2, 1, 1), 1, 1024), Permute((1, 0))),
    (Split(0, (1, 1), 1, 0),),
    (Split(1, (1, 1), 1, 0), Reorder(0, (256, 0), (1, 0))),
    (Replicate(4, 0),),
    (Resize(0, BIG[0], BIG[0] + 128, "mean", "mean"),),
    (Factor((ROW, COLUMN)), Unfactor((ROW, COLUMN))),
)


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: "; ".join(map(str, chain)))
def test_a_tensor_far_larger_than_a_block_is_mapped_in_blocks(chain: tuple[Operation, ...]) -> None:
    counting = Counting()
    pieces: tuple[Piece, ...] = (
        Piece("adafactor", counting.tensor(), {"v": counting.tensor()}, Rule((NONE, NONE), "given")),
    )
    for operation in chain:
        pieces = operation.of(pieces)
    for tensor in (pieces[0].param, *pieces[0].slots.values()):
        every = list(blocks(tensor))
        tracemalloc.start()
        try:
            for index in (every[0], every[-1]):
                tensor.read(index)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert counting.largest <= BLOCK_BYTES
        # The block, what was read of it, and its places or sums, in another order or in float64.
        assert peak < 6 * BLOCK_BYTES


def test_a_mean_that_reads_everything_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "BLOCK_BYTES", 2**40)
    with pytest.raises(AssertionError):
        test_a_tensor_far_larger_than_a_block_is_mapped_in_blocks(CHAINS[-2])


def test_fused_parts_far_larger_than_a_block_are_read_in_blocks() -> None:
    counting = Counting()
    parts = [Piece("adamw", counting.tensor((n, 256)), {}) for n in (64 * 1024, 32 * 1024)]
    (piece,) = Concatenate(0, 2, None, 1024).of(parts)
    tensor = piece.param
    for index in list(blocks(tensor))[:3]:
        tensor.read(index)
    assert counting.largest <= BLOCK_BYTES


@pytest.mark.parametrize(
    ("operation", "of_array"),
    [
        (Replicate(2, 1), lambda a: np.stack([a, a], 1)),
        (Resize(1, 5, 7, "zeros", "zeros"), lambda a: np.pad(a, [(0, 0), (0, 2)])),
        (Resize(0, 4, 3, "mean", "mean"), lambda a: a[:3]),
        (Resize(0, 4, 5, "mean", "mean"), lambda a: np.concatenate([a, a.mean(0, keepdims=True)])),
    ],
    ids=lambda one: str(one) if isinstance(one, Operation) else "",
)
def test_any_block_is_read_by_itself(operation: Operation, of_array: Callable[[Array], Array]) -> None:
    array = np.arange(20.0).reshape(4, 5)
    (piece,) = operation.of([Piece("adafactor", in_memory(array), {})])
    check_blocks(piece.param, of_array(array))


@pytest.mark.parametrize(
    ("factor", "shape"),
    [
        (0, (3,)),
        (-1.0, (3,)),
        (1e308, (3,)),
        (5e-324, (3,)),
        (10**400, (3,)),
        (float("nan"), (3,)),
        (1.0, (0,)),
    ],
)
def test_a_number_by_which_nothing_can_be_divided_again_is_refused(
    factor: float, shape: tuple[int, ...]
) -> None:
    scale = Scale.read({"factor": factor, "root_of_axis": 0})
    assert Scale(2.0, 0, True).number((4,)) == 0.25
    with pytest.raises(StateError, match="divided again"):
        scale.number(shape)
