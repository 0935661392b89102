"""Fusing, splitting and reordering along an axis: each slot against brute force over all squared gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_maps import every_block, labels_of, piece_of, same, statistics

import statekit
import statekit.maps
from goldens import COMPACT
from statekit.errors import FormatError, InexactError, StateError, UsageError
from statekit.maps import along_axis
from statekit.maps.along_axis import REST, Concatenate, Reorder, Split
from statekit.maps.operations import Operation, Piece
from statekit.state.exactness import Exactness
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Rule
from statekit.tensors.places import Combined, Picked
from statekit.tensors.tensor import Array, Tensor, blocks, in_memory

ROW, COLUMN, BATCH, NONE = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE


def of_axis(array: Array, axis: int, change: Callable[[Array], Array]) -> Array:
    """Returns an array with something done to it along an axis, as NumPy does it along the first."""
    return np.moveaxis(change(np.moveaxis(array, axis, 0)), 0, axis)


def reordered(sizes: tuple[int, ...], order: tuple[int, ...]) -> Callable[[Array], Array]:
    count = len(order)

    def change(first: Array) -> Array:
        rest = first.shape[1:]
        apart = first.reshape((*sizes, *rest))
        return apart.transpose((*order, *range(count, apart.ndim))).reshape((-1, *rest))

    return change


def in_turns(parts: list[Array], turns: int) -> Array:
    """Returns arrays joined along their first axis, in turns."""
    each = [part.reshape((turns, -1, *part.shape[1:])) for part in parts]
    return np.concatenate(each, 1).reshape((-1, *parts[0].shape[1:]))


def second_moment(slots: Mapping[str, Array], rule: Rule) -> Array:
    """Returns the second moment that slots stand for: their product over its mean, as every Adafactor has it."""
    if "v" in slots:
        return slots["v"]
    row, column = (
        np.expand_dims(slots[name].astype(np.float64), rule.dims(gone))
        for name, gone in (("v_row", COLUMN), ("v_col", ROW))
    )
    return np.asarray(row * column / row.mean(axis=rule.dims(ROW), keepdims=True))


def read(piece: Piece) -> dict[str, Array]:
    return {name: slot.read() for name, slot in piece.slots.items()}


@st.composite
def fused(draw: st.DrawFn) -> tuple[list[Array], Rule, int, tuple[int, ...], int]:
    """Draws parts' squared gradients, their rule, the axis, their shares and turns; every sum is exact."""
    rank = draw(st.integers(1, 4))
    shape = [draw(st.sampled_from((1, 2, 4))) for _ in range(rank)]
    axis, turns = draw(st.integers(0, rank - 1)), draw(st.sampled_from((1, 2)))
    shares = draw(st.sampled_from(((1, 1), (2, 1, 1), (1, 3), (4, 2, 2))))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    sizes = [(*shape[:axis], share * turns, *shape[axis + 1 :]) for share in shares]
    parts = [rng.integers(1, 64, size).astype(np.float64) for size in sizes]
    return parts, Rule(labels_of(rank, draw), "given"), axis, shares, turns


@settings(max_examples=80)
@given(fused())
def test_fused_parts_keep_what_a_fused_run_would_and_come_apart_with_the_same_second_moment(
    drawn: tuple[list[Array], Rule, int, tuple[int, ...], int],
) -> None:
    parts, rule, axis, shares, turns = drawn
    (whole,) = Concatenate(axis, len(parts), shares, turns).of([piece_of(one, rule) for one in parts])
    together = np.moveaxis(in_turns([np.moveaxis(one, axis, 0) for one in parts], turns), 0, axis)
    assert whole.rule == rule
    same(whole, together, statistics(together, rule))
    by_itself = rule.axes[axis] is BATCH
    assert whole.exactness is (Exactness.BITWISE if by_itself else Exactness.STATISTICS)
    averaged = rule.axes[axis] in (ROW, COLUMN)
    moment = np.moveaxis(second_moment(read(whole), rule), axis, 0)
    for place, one in enumerate(parts):
        (apart,) = Split(axis, shares, place, turns).of([whole])
        assert apart.exactness is (Exactness.ESTIMATE if averaged else whole.exactness)
        assert apart.rule == rule
        np.testing.assert_array_equal(apart.param.read(), one)
        np.testing.assert_array_equal(apart.slots["m"].read(), -one)
        if not averaged:
            same(apart, one, statistics(one, rule))
            continue
        runs = [one.shape[axis] // turns for one in parts]
        begin = sum(runs[:place])
        kept = moment.reshape((turns, sum(runs), *moment.shape[1:]))[:, begin : begin + runs[place]]
        kept = np.moveaxis(kept.reshape((-1, *moment.shape[1:])), 0, axis)
        np.testing.assert_allclose(second_moment(read(apart), rule), kept, rtol=1e-13)
    again = [Split(axis, shares, place, turns).of([whole])[0] for place in range(len(parts))]
    (back,) = Concatenate(axis, len(parts), shares, turns).of(again)
    for name, slot in read(whole).items():
        if averaged:
            np.testing.assert_allclose(read(back)[name], slot, rtol=1e-13, err_msg=name)
        else:
            np.testing.assert_array_equal(read(back)[name], slot, err_msg=name)


SEEDS: dict[str, tuple[str, Any]] = {
    "a mean without weights": ("Combined", lambda parts, lengths: Combined(parts, (1,) * len(lengths))),
    "a slot that isn't rescaled": ("rescaled", lambda piece, part, name: piece.slots[name]),
    "the other slot's mean": ("_OTHER", {"v_row": "v_row", "v_col": "v_col"}),
    "parts that don't take turns": (
        "Picked",
        lambda t, axis, start, run, period: Picked(t, axis, 0, run, period),
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_formula_is_noticed(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, rng = ((4, 2), (2, 2), (2, 2)), np.random.default_rng(1)
    parts = [rng.integers(1, 64, shape).astype(np.float64) for shape in shapes]
    check: Any = test_fused_parts_keep_what_a_fused_run_would_and_come_apart_with_the_same_second_moment
    drawn = parts, Rule((ROW, COLUMN), "given"), 0, (2, 1, 1), 2
    check.hypothesis.inner_test(drawn)
    monkeypatch.setattr(along_axis, *SEEDS[seed])
    with pytest.raises((AssertionError, ValueError, IndexError, UsageError)):
        check.hypothesis.inner_test(drawn)


@settings(max_examples=60)
@given(st.data())
def test_an_order_along_an_axis_is_that_of_every_slot_and_comes_back_to_the_bit(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    axis, sizes = (
        data.draw(st.integers(0, rank - 1)),
        data.draw(st.sampled_from(((2, 2), (4, 2, 1), (2, 4, 2)))),
    )
    shape = [data.draw(st.sampled_from((1, 2, 4))) for _ in range(rank)]
    shape[axis] = int(np.prod(sizes))
    order = tuple(data.draw(st.permutations(range(len(sizes)))))
    rule = Rule(labels_of(rank, data.draw), "given")
    squares = np.random.default_rng(3).integers(0, 64, shape).astype(np.float64)
    first = piece_of(squares, rule)
    said = (REST, *sizes[1:]) if data.draw(st.booleans()) else sizes
    (piece,) = Reorder(axis, said, order).of([first])
    after = of_axis(squares, axis, reordered(sizes, order))
    assert (piece.rule, piece.exactness) == (rule, Exactness.BITWISE)
    same(piece, after, statistics(after, rule))
    undo = Reorder(axis, tuple(sizes[i] for i in order), tuple(np.argsort(order).tolist()))
    (back,) = undo.of([piece])
    same(back, squares, read(first))


VIEWS: tuple[tuple[Operation, Callable[[Array], Array]], ...] = (
    (Reorder(0, (2, 3), (1, 0)), reordered((2, 3), (1, 0))),
    (Reorder(1, (1, 2, 2), (2, 0, 1)), lambda a: of_axis(a, 1, reordered((1, 2, 2), (2, 0, 1)))),
    (Split(0, (2, 1), 1), lambda a: a[4:]),
    (Split(0, (2, 1), 0, 2), lambda a: a[[0, 1, 3, 4]]),
    (Split(2, (1, 2, 2), 1), lambda a: a[:, :, 1:3]),
    (Split(0, (1, 1), 1, REST), lambda a: a[1::2]),
)


@pytest.mark.parametrize(
    ("operation", "of_array"), VIEWS, ids=lambda one: str(one)[:40] if isinstance(one, Operation) else ""
)
def test_any_block_is_read_by_itself(operation: Operation, of_array: Callable[[Array], Array]) -> None:
    array = np.arange(120.0).reshape(6, 4, 5)
    (piece,) = operation.of([Piece("adafactor", in_memory(array), {})])
    check_blocks(piece.param, of_array(array))


def test_any_block_of_fused_parts_is_read_by_itself() -> None:
    parts = [np.arange(n * 5.0).reshape(n, 5) + n for n in (4, 2, 2)]
    for turns in (1, 2):
        (piece,) = Concatenate(0, 3, None, turns).of([Piece("adamw", in_memory(one), {}) for one in parts])
        check_blocks(piece.param, in_turns(parts, turns))


def check_blocks(tensor: Tensor, whole: Array) -> None:
    assert tensor.shape == whole.shape
    for index in every_block(whole.shape):
        np.testing.assert_array_equal(tensor.read(index), whole[index])
    streamed = [tensor.read(index).ravel() for index in blocks(tensor, 56)]
    np.testing.assert_array_equal(np.concatenate(streamed), whole.ravel())


# What an update computes over a whole tensor is said.


def adam(schema: str, **settings: Any) -> Piece:
    slots = {name: in_memory(np.ones((4, 2))) for name in ("m", "v")}
    reference = load_schema(schema).data["reference"]
    over = load_schema(schema).over_tensor(reference, {**load_schema(schema).settings(reference), **settings})
    return Piece(schema, in_memory(np.ones((4, 2))), slots, over=over)


@pytest.mark.parametrize(
    ("piece", "exactness", "said"),
    [
        (adam("adamw"), Exactness.BITWISE, ""),
        (adam("adamw", clipnorm=1.0), Exactness.ESTIMATE, "the norm that clipnorm bounds, in v"),
        (adam("lamb"), Exactness.STATISTICS, "the trust ratio: so far over the parts together"),
        (adam("lans"), Exactness.ESTIMATE, "the norm that gradients are divided by, in m"),
    ],
    ids=["adamw", "adamw with clipnorm", "lamb", "lans"],
)
def test_an_optimizer_without_factors_says_what_a_split_changes(
    piece: Piece, exactness: Exactness, said: str
) -> None:
    (part,) = Split(0, (1, 1), 0).of([piece])
    assert part.exactness is exactness
    assert said in part.reason
    (whole,) = Concatenate(0, 2).of([piece, piece])
    assert whole.exactness is exactness


def test_both_what_is_estimated_and_what_the_update_sees_is_said() -> None:
    piece = piece_of(np.ones((4, 2)), Rule((ROW, COLUMN), "given"))
    (part,) = Split(0, (1, 1), 1).of([piece])
    assert "v_col has averaged axis 0 over all parts" in part.reason
    assert "the parameter scale" in part.reason and "clipping_threshold" in part.reason


def test_a_second_moment_of_zeros_stays_zeros() -> None:
    piece = piece_of(np.zeros((4, 2)), Rule((ROW, COLUMN), "given"))
    (part,) = Split(0, (1, 1), 1).of([piece])
    np.testing.assert_array_equal(part.slots["v_col"].read(), np.zeros(2))


def test_what_doesnt_fit_is_refused_by_its_shape() -> None:
    piece = piece_of(np.ones((4, 2)), Rule((ROW, COLUMN), "given"))
    with pytest.raises(StateError, match="length 4 along axis 0, but shall become part 0"):
        Split(0, (2, 1), 0).of([piece])
    with pytest.raises(StateError, match="has shape"):
        Split(2, (1, 1), 0).of([piece])
    with pytest.raises(StateError, match="shall have axis 0 taken for"):
        Reorder(0, (3, REST), (1, 0)).of([piece])
    with pytest.raises(StateError, match="unlike parts"):
        Concatenate(0, 2).of([piece, piece_of(np.ones((4, 2)), Rule((COLUMN, ROW), "given"))])
    with pytest.raises(StateError, match=r"lengths \[4, 4\] along axis 0"):
        Concatenate(0, 2, (2, 1)).of([piece, piece])
    assumed = piece_of(np.ones((4, 2, 2)), Rule((ROW, COLUMN, BATCH), "assumed"))
    for operation in (Split(2, (1, 1), 0), Concatenate(2, 1)):
        with pytest.raises(InexactError, match="its factoring is not given"):
            operation.of([assumed])


# As data.

FUSED: dict[str, Any] = {
    "title": "Apart and fused", "facts": ["made up"], "source": {"title": "apart"}, "target": {"title": "fused"},
    "words": {"part": {"q": "q", "k": "k", "v": "v"}, "way": {"gate": "gate", "up": "up"}},
    "config": {"heads": "the number of query heads", "kv_heads": "the number of key and value heads"},
    "parameters": [
        {"source": "layers/{layer}/attention/{part}/weight", "target": "h/{layer}/qkv/weight", "operations": [
            {"op": "concatenate", "axis": 0, "over": "part", "shares": ["heads", "kv_heads", "kv_heads"],
             "turns": "kv_heads"}]},
        {"source": "layers/{layer}/{way}/weight", "target": "h/gate_up", "operations": [
            {"op": "permute", "order": [1, 0]},
            {"op": "concatenate", "axis": 1, "over": "way", "turns": "all"},
            {"op": "stack", "axis": 0, "over": "layer"}]},
        {"source": "layers/{layer}/rotated", "target": "h/{layer}/rotated", "operations": [
            {"op": "reorder", "axis": 0, "sizes": ["heads", 2, "rest"], "order": [0, 2, 1]}]},
    ],
}  # fmt: skip
CONFIG = {"heads": 4, "kv_heads": 2}


def live() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    shapes = {"attention/q/weight": (8, 3), "attention/k/weight": (4, 3), "attention/v/weight": (4, 3),
              "gate/weight": (5, 3), "up/weight": (5, 3), "rotated": (16, 3)}  # fmt: skip
    return {f"layers/{i}/{name}": rng.random(shape) for i in range(2) for name, shape in shapes.items()}


def map_file(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**FUSED, **changes}))
    return str(path)


def test_a_map_fuses_and_reorders_live_parameters_and_takes_them_apart_again(tmp_path: Path) -> None:
    params = live()
    name = map_file(tmp_path)
    made = statekit.maps.load(name, CONFIG).apply(params)
    q, k, v = (params[f"layers/1/attention/{one}/weight"] for one in "qkv")
    np.testing.assert_array_equal(
        made["h/1/qkv/weight"], np.concatenate([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]])
    )
    gates = made["h/gate_up"]
    assert gates.shape == (2, 3, 10)
    np.testing.assert_array_equal(gates[1, :, ::2], params["layers/1/gate/weight"].T)
    np.testing.assert_array_equal(gates[1, :, 1::2], params["layers/1/up/weight"].T)
    rotated = params["layers/0/rotated"]
    np.testing.assert_array_equal(made["h/0/rotated"][:4], rotated[[0, 2, 1, 3]])
    back = statekit.maps.load(f"{name}:back", CONFIG).apply(made)
    assert back.keys() == params.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(back[path], array)
    with pytest.raises(UsageError, match="needs to know kv_heads"):
        statekit.maps.load(f"{name}:back", {"heads": 4}).apply(made)
    with pytest.raises(StateError, match="layers/1/up/weight"):
        statekit.maps.load(name, CONFIG).apply(
            {p: one for p, one in params.items() if p != "layers/1/up/weight"}
        )


@pytest.mark.parametrize(
    ("operation", "said"),
    [
        ({"op": "concatenate", "axis": 0, "over": "part", "shares": ["heads", 1]}, "hasn't a word for each share"),
        ({"op": "concatenate", "axis": 0, "over": "part", "turns": "groups"}, "concatenates by groups"),
        ({"op": "split", "axis": 0, "over": "part"}, "fields that the other side hasn't"),
        ({"op": "concatenate", "axis": 0, "over": "part", "shares": [0, 1, 1]}, "expected 1 or more"),
    ],
)  # fmt: skip
def test_rules_that_cant_be_carried_out_are_refused_where_they_stand(
    operation: dict[str, Any], said: str, tmp_path: Path
) -> None:
    line = {**FUSED["parameters"][0], "operations": [operation]}
    with pytest.raises(FormatError) as error:
        statekit.maps.load(map_file(tmp_path, parameters=[line]))
    assert said in str(error.value)


# Files that the original systems wrote.

T5X = next((COMPACT / "t5x_checkpoints" / "unscanned").glob("*/checkpoint_*"))
T5X_SAID = {"min_dim_size_to_factor": 32}
ADAMW = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4"


def fusing_t5x(tmp_path: Path) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Writes a map that fuses T5X's kernels, as PyTorch has them; returns its path and the target's shapes."""
    with statekit.open(T5X, hparams=T5X_SAID) as opened:
        shapes = {path: param.shape for path, param in opened.state.params.items()}
    lines, after = list[dict[str, Any]](), dict[str, tuple[int, ...]]()
    transposed = {"op": "permute", "order": [1, 0]}
    fused = {"attention": ("projection", ("query", "key", "value")), "mlp": ("gate", ("wi_0", "wi_1"))}
    for path, shape in shapes.items():
        *outer, module, kernel, leaf = ("", "", *path.split("/"))
        parts = fused.get(module.replace("self_", ""), ("", ()))
        if kernel not in parts[1]:
            lines.append({"source": path, "target": path})
            after[path] = shape
            continue
        target = "/".join([*outer[2:], module, "fused", leaf])
        if target not in after:
            after[target] = (shape[1] * len(parts[1]), shape[0])
            source = path.replace(f"/{kernel}/", f"/{{{parts[0]}}}/")
            join = {"op": "concatenate", "axis": 0, "over": parts[0]}
            lines.append({"source": source, "target": target, "operations": [transposed, join]})
    words = {name: {one: one for one in of_name} for name, of_name in fused.values()}
    return map_file(tmp_path, parameters=lines, words=words, config={}), after


def test_adafactors_run_of_t5x_is_fused_and_says_what_that_changes(tmp_path: Path) -> None:
    name, shapes = fusing_t5x(tmp_path)
    with pytest.raises(InexactError, match="the mean of the parts', by their lengths"):
        statekit.plan(T5X, tmp_path / "run.pt", map=name, hparams=T5X_SAID)
    made = statekit.convert(T5X, tmp_path / "run.pt", map=name, hparams=T5X_SAID, require="statistics")
    assert made.plan.exactness is Exactness.STATISTICS
    one = next(one for one in made.plan.mapped if one.target.endswith("self_attention/fused/kernel"))
    assert "the parameter scale, the root mean square that clipping_threshold bounds" in one.reason
    with statekit.open(T5X, hparams=T5X_SAID) as before, statekit.open(made.target) as after:
        assert {path: param.shape for path, param in after.state.params.items()} == shapes
        for path in (one.target, "encoder/layers_1/mlp/fused/kernel"):
            sources = next(m.sources for m in made.plan.mapped if m.target == path)
            slots = [before.state.slots[source] for source in sources]
            rule = after.state.rules[path]
            by_gone = {rule.dims(COLUMN): "v_row", rule.dims(ROW): "v_col"}
            ours = {gone: after.state.slots[path][slot].read() for gone, slot in by_gone.items()}
            columns = [each["v_col"].read() for each in slots]
            np.testing.assert_array_equal(ours[1,], np.concatenate(columns))  # each mean over the input
            rows = np.mean([each["v_row"].read() for each in slots], axis=0, dtype=np.float64)
            np.testing.assert_array_equal(ours[0,], rows.astype(np.float32))


@pytest.mark.torch
def test_torch_loads_fused_as_the_converted_file_does_once_that_is_asked_for(tmp_path: Path) -> None:
    import torch

    import statekit.torch

    name, shapes = fusing_t5x(tmp_path)
    converted = statekit.convert(T5X, tmp_path / "run.pt", map=name, hparams=T5X_SAID, require="statistics")

    def model() -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (path.replace("/", "."), torch.nn.Parameter(torch.zeros(shape))) for path, shape in shapes.items()
        ]

    with pytest.raises(InexactError, match="require='statistics'"):
        statekit.torch.load_optimizer(T5X, model(), map=name, hparams=T5X_SAID, lr=0.01)
    straight = statekit.torch.load_optimizer(
        T5X, model(), map=name, hparams=T5X_SAID, lr=0.01, require="statistics"
    )
    by_file = statekit.torch.load_optimizer(converted.target, model(), lr=0.01)
    for one, other in zip(straight.state.values(), by_file.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.jax
def test_jax_loads_fused_once_that_is_asked_for(tmp_path: Path) -> None:
    import jax

    import statekit.jax

    name, shapes = fusing_t5x(tmp_path)
    tree = {path: jax.ShapeDtypeStruct(shape, np.float32) for path, shape in shapes.items()}
    params = statekit.jax.load_params(T5X, tree, map=name, hparams=T5X_SAID)
    with pytest.raises(InexactError, match="statistics"):
        statekit.jax.load_optimizer(T5X, params, map=name, hparams=T5X_SAID, learning_rate=0.01)
    with pytest.raises(UsageError, match="level"):
        statekit.jax.load_params(T5X, tree, map=name, hparams=T5X_SAID, require="exact")  # type: ignore[arg-type]
    _, state = statekit.jax.load_optimizer(
        T5X, params, map=name, hparams=T5X_SAID, learning_rate=0.01, require="statistics"
    )
    path = "encoder/layers_0/attention/fused/kernel"
    assert params[path].shape == (192, 64)
    assert {state.v_row[path].shape, state.v_col[path].shape} == {(192,), (64,)}


KEPT = ("attn/qkv", "conv/weight", "enc/bias", "enc/sq/weight", "gate")
SPLIT_ADAMW: list[dict[str, Any]] = [
    *({"source": path, "target": path} for path in KEPT),
    {"source": "enc/wi/weight", "target": "enc/{part}", "operations": [
        {"op": "split", "axis": 1, "over": "part", "turns": "all"}]},
    {"source": "embed/weight", "target": "embed/weight", "operations": [
        {"op": "reorder", "axis": 1, "sizes": [2, "rest"], "order": [1, 0]}]},
]  # fmt: skip


@pytest.mark.torch
def test_adamws_run_is_split_to_the_bit_goes_on_as_before_and_is_fused_again(tmp_path: Path) -> None:
    import torch

    import statekit.torch

    name = map_file(tmp_path, parameters=SPLIT_ADAMW)
    there = statekit.convert(ADAMW, tmp_path / "run.pt", map=name)
    assert there.plan.exactness is Exactness.BITWISE
    back = statekit.convert(tmp_path / "run.pt", tmp_path / "back.pt", map=f"{name}:back")
    with statekit.open(ADAMW) as first, statekit.open(back.target) as last:
        assert {p: t.read().tobytes() for p, t in first.state.params.items()} == {
            p: t.read().tobytes() for p, t in last.state.params.items()
        }
        for path, slots in first.state.slots.items():
            for slot, tensor in slots.items():
                assert last.state.slots[path][slot].read().tobytes() == tensor.read().tobytes()
        params = {p: torch.from_numpy(t.read().copy()) for p, t in first.state.params.items()}
    fused = {path.replace("/", "."): torch.nn.Parameter(one) for path, one in params.items()}
    apart = {
        path: torch.nn.Parameter(one.detach().clone())
        for path, one in statekit.maps.load(name).apply(dict(fused)).items()
    }
    ours = statekit.torch.load_optimizer(ADAMW, list(fused.items()))
    theirs = statekit.torch.load_optimizer(ADAMW, list(apart.items()), map=name)
    torch.manual_seed(0)
    for _ in range(3):
        grads = {path: torch.randn(one.shape) for path, one in fused.items()}
        for path, grad in statekit.maps.load(name).apply(dict(grads)).items():
            apart[path].grad = grad.contiguous()
        for path, grad in grads.items():
            fused[path].grad = grad
        ours.step()
        theirs.step()
    for path, after in statekit.maps.load(name).apply(dict(fused)).items():
        # PyTorch rounds what is left of a vector otherwise: by half a unit of step and sum at each of three updates.
        torch.testing.assert_close(apart[path], after, rtol=6 * 2**-24, atol=0)
