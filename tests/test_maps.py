"""Maps: every operation does to each slot what a run under the other names would have kept, and says what it can't."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import statekit
from formats import values
from goldens import GOLDEN
from statekit.cli.main import DONE, USAGE, main
from statekit.errors import FormatError, InexactError, StateError, UsageError
from statekit.maps import json_schema
from statekit.maps.along_axis import REST, Reorder
from statekit.maps.links import Link, carried, carried_through
from statekit.maps.model_map import Renaming, load, map_names, maps_of
from statekit.maps.operations import Merge, Operation, Part, Permute, Piece, Stack, Unstack
from statekit.maps.pretrained import Model, Pretrained
from statekit.maps.sizes import Replicate, Resize
from statekit.state.exactness import Exactness
from statekit.state.run import BUFFERS
from statekit.state.train_state import Axis, Counts, Group, KnownFrom, Optimizer, Rule, TrainState
from statekit.tensors.tensor import TIES, Array, Index, Tensor, blocks, in_memory

MODELS = resources.files("statekit.converters").joinpath("models")
ROW, COLUMN, BATCH, NONE = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE


def statistics(squares: Array, rule: Rule) -> dict[str, Array]:
    """Returns what a rule keeps of squared gradients, computed from all of them."""
    if not rule.factored:
        return {"v": squares, "m": -squares}
    return {
        "v_row": squares.mean(axis=rule.dims(COLUMN)),
        "v_col": squares.mean(axis=rule.dims(ROW)),
        "m": -squares,
    }


def piece_of(squares: Array, rule: Rule) -> Piece:
    slots = {name: in_memory(slot) for name, slot in statistics(squares, rule).items()}
    return Piece("adafactor", in_memory(squares), slots, rule)


def labels_of(rank: int, draw: Callable[..., Any]) -> tuple[Axis, ...]:
    factored = draw(st.booleans()) and rank > 1
    if not factored:
        return tuple(draw(st.sampled_from((BATCH, NONE))) for _ in range(rank))
    axes = [draw(st.sampled_from((ROW, COLUMN, BATCH))) for _ in range(rank)]
    first, second = draw(st.permutations(range(rank)))[:2]
    axes[first], axes[second] = ROW, COLUMN
    return tuple(axes)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Array, Rule]:
    """Draws squared gradients and a rule; small integers and powers of two, so that every mean is exact."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 4)), min_size=1, max_size=4)))
    seed = draw(st.integers(0, 2**16))
    squares = np.random.default_rng(seed).integers(0, 64, shape).astype(np.float64)
    return squares, Rule(labels_of(len(shape), draw), "given")


Step = tuple[Operation, Operation, Callable[[Array], Array]]
"""An operation, what undoes it, and what NumPy does to an array of the parameter's shape."""


@st.composite
def step(draw: st.DrawFn, shape: tuple[int, ...], rule: Rule) -> Step:
    """Draws an operation on each piece that the rule allows, and that can be undone by another such."""
    rank = len(shape)
    alike = [i for i, (one, next_one) in enumerate(pairwise(rule.axes)) if one is next_one]
    even = [i for i, n in enumerate(shape) if n % 2 == 0]
    kinds = "permute", "part", *(("merge",) if alike else ()), *(("reorder",) if even else ())
    kind = draw(st.sampled_from(kinds))
    if kind == "reorder":
        axis = draw(st.sampled_from(even))
        sizes = (*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
        turned = Reorder(axis, (2, REST), (1, 0)), Reorder(axis, (REST, 2), (1, 0))
        return *turned, lambda a: a.reshape(sizes).swapaxes(axis, axis + 1).reshape(a.shape)
    if kind == "merge":
        axis = draw(st.sampled_from(alike))
        sizes = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
        return Merge(axis), Part(axis, shape[axis]), lambda a: a.reshape(sizes)
    if kind == "part":
        axis = draw(st.integers(0, rank - 1))
        outer = draw(st.sampled_from([n for n in (1, 2, 4) if shape[axis] % n == 0]))
        sizes = (*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :])
        return Part(axis, outer), Merge(axis, outer), lambda a: a.reshape(sizes)
    order = tuple(draw(st.permutations(range(rank))))
    return Permute(order), Permute(tuple(np.argsort(order).tolist())), lambda a: a.transpose(order)


def same(left: Piece, squares: Array, slots: Mapping[str, Array]) -> None:
    np.testing.assert_array_equal(left.param.read(), squares)
    assert left.slots.keys() == slots.keys()
    for name, slot in slots.items():
        np.testing.assert_array_equal(left.slots[name].read(), slot, err_msg=name)


@settings(max_examples=150)
@given(parameters(), st.data())
def test_a_chain_gives_what_the_target_would_have_kept_and_its_inverse_the_same_bits(
    drawn: tuple[Array, Rule], data: st.DataObject
) -> None:
    squares, rule = drawn
    first = piece = piece_of(squares, rule)
    after = squares
    undone: list[Operation] = []
    for _ in range(data.draw(st.integers(1, 4))):
        assert piece.rule is not None
        operation, undo, of_array = data.draw(step(after.shape, piece.rule))
        (piece,) = operation.of([piece])
        after, undone = of_array(after), [undo, *undone]
        assert piece.rule is not None
        same(piece, after, statistics(after, piece.rule))
        assert piece.exactness is Exactness.BITWISE
    for undo in undone:
        (piece,) = undo.of([piece])
    assert piece.rule == rule
    same(piece, squares, {name: slot.read() for name, slot in first.slots.items()})


@settings(max_examples=100)
@given(parameters(), st.integers(0, 4), st.sampled_from((1, 2, 4)))
def test_stacked_parameters_keep_what_each_kept_and_come_apart_to_the_bit(
    drawn: tuple[Array, Rule], axis: int, count: int
) -> None:
    squares, rule = drawn
    axis = min(axis, squares.ndim)
    each = [squares + i for i in range(count)]
    (stack,) = Stack(axis).of([piece_of(one, rule) for one in each])
    together = np.stack(each, axis)
    assert stack.rule is not None and stack.rule.axes[axis] is BATCH
    same(stack, together, statistics(together, stack.rule))
    for place, one in enumerate(each):
        (apart,) = Unstack(axis, place).of([stack])
        assert apart.rule == rule
        assert apart.exactness is Exactness.BITWISE
        same(apart, one, statistics(one, rule))


VIEWS: tuple[tuple[Operation, Callable[[Array], Array]], ...] = (
    (Permute((2, 0, 1)), lambda a: a.transpose(2, 0, 1)),
    (Merge(0), lambda a: a.reshape(12, 5)),
    (Merge(1), lambda a: a.reshape(3, 20)),
    (Part(1, 2), lambda a: a.reshape(3, 2, 2, 5)),
)


@pytest.mark.parametrize(("operation", "of_array"), VIEWS, ids=lambda one: str(one)[:24])
def test_any_block_of_a_view_is_read_by_itself(operation: Operation, of_array: Any) -> None:
    array = np.arange(60.0).reshape(3, 4, 5)
    (piece,) = operation.of([Piece("adafactor", in_memory(array), {})])
    whole, tensor = of_array(array), piece.param
    assert tensor.shape == whole.shape
    for index in every_block(whole.shape):
        np.testing.assert_array_equal(tensor.read(index), whole[index])
    streamed = [tensor.read(index).ravel() for index in blocks(tensor, 56)]
    np.testing.assert_array_equal(np.concatenate(streamed), whole.ravel())


def every_block(shape: tuple[int, ...]) -> list[Index]:
    blocks: list[Index] = [()]
    for n in shape:
        blocks = [(*head, slice(a, b)) for head in blocks for a in range(n + 1) for b in range(a, n + 1)]
    return blocks


# What can't be done, or not exactly, is said.


def test_what_was_averaged_away_cannot_be_unstacked() -> None:
    piece = piece_of(np.ones((2, 4)), Rule((ROW, COLUMN), "given"))
    with pytest.raises(InexactError, match="COLUMN axis 1, which v_row has averaged away"):
        Unstack(1, 0).of([piece])


def test_axes_that_the_rule_treats_unlike_cannot_be_one() -> None:
    piece = piece_of(np.ones((2, 4)), Rule((ROW, COLUMN), "given"))
    with pytest.raises(InexactError, match="a ROW and a COLUMN axis"):
        Merge(0).of([piece])


def test_unstacking_along_an_axis_that_was_no_batch_is_labelled() -> None:
    (apart,) = Unstack(0, 1).of([piece_of(np.ones((2, 4)), Rule((NONE, NONE), "given"))])
    assert apart.exactness is Exactness.STATISTICS
    assert "over the stack" in apart.reason


@pytest.mark.parametrize(
    "operation",
    [
        Permute((2, 0, 1)),
        Merge(0),
        Part(0, 2),
        Reorder(0, (2, 2), (1, 0)),
        Resize(0, 4, 6, "zeros", "zeros"),
        Replicate(2, 0),
    ],
    ids=str,
)
def test_axes_of_one_length_leave_a_guessed_rule_open(operation: Operation) -> None:
    """With (ROW, COLUMN, BATCH) the slots would have the same shapes, and other values."""
    labels = (ROW, ROW, COLUMN) if operation == Merge(0) else (BATCH, ROW, COLUMN)
    with pytest.raises(InexactError, match="leave open which of them v_row has kept"):
        operation.of([piece_of(np.ones((4, 4, 4)), Rule(labels, "assumed"))])
    assert operation.of([piece_of(np.ones((4, 4, 4)), Rule(labels, "given"))])
    assert operation.of([piece_of(np.ones((4, 3, 2)), Rule(labels, "assumed"))])


def test_an_assumed_rule_is_asked_for_before_a_stack_comes_apart() -> None:
    piece = piece_of(np.ones((2, 4)), Rule((BATCH, NONE), "assumed"))
    with pytest.raises(InexactError, match="logical_factor_rules"):
        Unstack(0, 1).of([piece])


# Maps as data.


@pytest.mark.parametrize("file", sorted(file.name for file in MODELS.iterdir()))
def test_maps_follow_their_schema(file: str) -> None:
    schema = json.loads(resources.files("statekit.schemas").joinpath("statekit-map.schema.json").read_text())
    data = json.loads(MODELS.joinpath(file).read_text())
    jsonschema.Draft202012Validator(schema).validate(data)
    for name in map_names():
        one = load(name)
        for entry in one.entries:
            counted = {*entry.apart, *entry.joined}
            assert set(entry.source.fields) ^ set(entry.target.fields) == counted
            assert all(alternative in one.choices[choice] for choice, alternative in entry.when.items())


def t5(layers: int = 2, gated: bool = True, tied: bool = False, known: KnownFrom = "file") -> TrainState:
    """Returns the state of a little T5 of T5X, every matrix factored but the tables of relative positions."""
    shapes: dict[str, tuple[int, ...]] = {"token_embedder/embedding": (12, 4)}
    if not tied:
        shapes["decoder/logits_dense/kernel"] = (4, 12)
    for side, parts in (
        ("encoder", {"attention": "pre_attention"}),
        (
            "decoder",
            {"self_attention": "pre_self_attention", "encoder_decoder_attention": "pre_cross_attention"},
        ),
    ):
        shapes |= {f"{side}/relpos_bias/rel_embedding": (2, 3), f"{side}/{side}_norm/scale": (4,)}
        for i in range(layers):
            at = f"{side}/layers_{i}"
            for part, norm in parts.items():
                shapes[f"{at}/{norm}_layer_norm/scale"] = (4,)
                shapes |= {f"{at}/{part}/{name}/kernel": (4, 6) for name in ("query", "key", "value")}
                shapes[f"{at}/{part}/out/kernel"] = (6, 4)
            shapes[f"{at}/pre_mlp_layer_norm/scale"] = (4,)
            shapes |= {f"{at}/mlp/{name}/kernel": (4, 8) for name in (("wi_0", "wi_1") if gated else ("wi",))}
            shapes[f"{at}/mlp/wo/kernel"] = (8, 4)
    rng = np.random.default_rng(3)
    params: dict[str, Tensor] = {}
    slots: dict[str, Mapping[str, Tensor]] = {}
    rules = {}
    for path, shape in shapes.items():
        axes = (NONE,) * len(shape)
        if len(shape) == 2 and "relpos" not in path:
            axes = (ROW, COLUMN) if shape[0] <= shape[1] else (COLUMN, ROW)
        rules[path] = Rule(axes, known)
        piece = piece_of(rng.random(shape), rules[path])
        params[path], slots[path] = piece.param, piece.slots
    group = Group(
        tuple(shapes), {"multiply_by_parameter_scale": {path: "norm" not in path for path in shapes}}
    )
    return TrainState(params, slots, Optimizer("adafactor", "t5x", (group,)), Counts(8, 8), rules)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_t5_goes_to_hugging_face_and_back_with_every_bit_and_name(gated: bool, tied: bool) -> None:
    state = t5(gated=gated, tied=tied)
    there = load("t5x-t5:hf-t5").apply(state)
    heads = {"encoder/embed_tokens/weight", "decoder/embed_tokens/weight"} | (
        {"lm_head/weight"} if tied else set()
    )
    assert there.state.extra[TIES] == dict.fromkeys(heads, "shared/weight")
    accounted = [(path, slot) for one in there.mapped for path in one.sources for slot in one.slots]
    assert sorted(accounted) == sorted((path, slot) for path, slots in state.slots.items() for slot in slots)
    query = "encoder/block/1/layer/0/SelfAttention/q/weight"
    np.testing.assert_array_equal(
        there.state.params[query].read(), state.params["encoder/layers_1/attention/query/kernel"].read().T
    )
    assert there.state.rules[query].axes == (COLUMN, ROW)
    scaled = there.state.optimizer.groups[0].hyperparameters["multiply_by_parameter_scale"]
    assert scaled[query] is True and scaled["encoder/final_layer_norm/weight"] is False
    back = load("hf-t5:t5x-t5").apply(there.state).state
    assert (list(back.params), back.rules, back.optimizer) == (
        list(state.params),
        state.rules,
        state.optimizer,
    )
    assert TIES not in back.extra
    for path, slots in state.slots.items():
        for name, slot in {"": state.params[path], **slots}.items():
            other = back.slots[path][name] if name else back.params[path]
            assert other.read().tobytes() == slot.read().tobytes()


def config_of(state: TrainState, **said: Any) -> dict[str, Any]:
    made = load("t5x-t5:hf-t5", said).apply(state).state
    files: dict[str, dict[str, Any]] = made.extra["torch"]["pretrained"]
    assert files["generation_config.json"].items() <= files["config.json"].items()
    return files["config.json"]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_models_configuration_is_made_of_what_the_checkpoint_proves(gated: bool, tied: bool) -> None:
    config = config_of(t5(layers=3, gated=gated, tied=tied), num_heads=2)
    proven = {
        "vocab_size": 12, "d_model": 4, "d_ff": 8, "d_kv": 3, "num_heads": 2, "num_layers": 3,
        "num_decoder_layers": 3, "relative_attention_num_buckets": 3, "tie_word_embeddings": tied,
        "feed_forward_proj": "gated-gelu" if gated else "relu", "architectures": ["T5ForConditionalGeneration"],
    }  # fmt: skip
    assert proven.items() <= config.items()


def test_what_no_checkpoint_says_of_the_model_is_told_or_taken_as_was_said() -> None:
    sentence = load("t5x-t5:hf-t5").apply(t5()).state.assumptions[-1]
    for taken in ("dropout_rate=0.0", "eos_token_id=1", "feed_forward_proj=gated-gelu"):
        assert taken in sentence
    said = {"dropout_rate": 0.1, "eos_token_id": 3, "feed_forward_proj": "gated-silu", "n_positions": 512}
    state = load("t5x-t5:hf-t5", said).apply(t5()).state
    assert said.items() <= state.extra["torch"]["pretrained"]["config.json"].items()
    assert state.assumptions == (
        "config.json has what --config says and neither map nor checkpoint knows: n_positions=512.",
    )


def test_what_was_said_of_the_model_and_isnt_so_is_refused_by_name() -> None:
    said = {"num_heads": 3, "d_model": 8, "feed_forward_proj": "relu", "tie_word_embeddings": True}
    with pytest.raises(StateError) as error:
        config_of(t5(), **said)
    assert {*said, "d_kv"} == {place for _, place in error.value.faults} | {"d_kv"}
    uneven = Pretrained("T", {"config.json": {"num_heads": {"length": "a", "axis": 0}}})
    with pytest.raises(StateError, match="can't be told: the parameters have"):
        replace(uneven, files={"config.json": {"num_heads": {"length": "?", "axis": 0}}}).made(
            Model({"a": (2,), "b": (3,)}), {}, "m"
        )
    with pytest.raises(UsageError, match="num_heads"):
        uneven.made(Model({"b": (3,)}), {}, "m")


def without(state: TrainState, *paths: str) -> TrainState:
    groups = tuple(
        replace(g, paths=tuple(p for p in g.paths if p not in paths), hyperparameters={})
        for g in state.optimizer.groups
    )
    return replace(
        state,
        params={p: t for p, t in state.params.items() if p not in paths},
        slots={p: t for p, t in state.slots.items() if p not in paths},
        rules={p: t for p, t in state.rules.items() if p not in paths},
        optimizer=replace(state.optimizer, groups=groups),
    )


def with_param(state: TrainState, path: str) -> TrainState:
    return replace(state, params={**state.params, path: in_memory(np.ones((2, 3)))})


def test_every_name_that_is_missing_or_unknown_is_listed() -> None:
    lost = "encoder/layers_0/attention/query/kernel", "decoder/relpos_bias/rel_embedding"
    state = with_param(with_param(without(t5(), *lost), "adapter/kernel"), "encoder/layers_01/mlp/wo/kernel")
    with pytest.raises(StateError) as error:
        load("t5x-t5:hf-t5").apply(state)
    places = {place: what for what, place in error.value.faults}
    assert places.keys() == {*lost, "adapter/kernel", "encoder/layers_01/mlp/wo/kernel"}
    assert "encoder/block/0/layer/0/SelfAttention/q/weight" in places[lost[0]]


def test_a_number_in_a_name_is_not_taken_for_as_many_layers() -> None:
    with pytest.raises(StateError) as error:
        load("t5x-t5:hf-t5").apply(with_param(t5(), "encoder/layers_300000/attention/query/kernel"))
    assert any("has number 300000" in what for what, _ in error.value.faults)
    assert len(error.value.faults) < 10


def test_a_model_of_both_kinds_is_refused() -> None:
    with pytest.raises(StateError, match="model with mlp"):
        load("t5x-t5:hf-t5").apply(with_param(t5(), "encoder/layers_0/mlp/wi/kernel"))


def test_tables_of_relative_positions_for_every_layer_are_refused_for_t5_by_name() -> None:
    state = with_param(t5(), "encoder/encoder/relpos_bias/rel_embedding")
    with pytest.raises(StateError, match="table of relative positions of its own") as error:
        load("t5x-t5:hf-t5").apply(state)
    assert [place for _, place in error.value.faults] == ["encoder/encoder/relpos_bias/rel_embedding"]


def test_a_further_name_that_the_map_doesnt_know_is_refused() -> None:
    there = load("t5x-t5:hf-t5").apply(t5()).state
    odd = replace(there, extra={TIES: {**there.extra[TIES], "encoder/again": "shared/weight"}})
    with pytest.raises(StateError, match="further name of shared/weight"):
        load("hf-t5:t5x-t5").apply(odd)


def test_names_change_by_regular_expressions() -> None:
    state = t5(layers=1)
    after = Renaming((("^encoder/", "enc/"), (r"layers_(\d+)", r"layer/\1"))).apply(state)
    assert "enc/layer/0/mlp/wo/kernel" in after.state.params
    assert len(after.state.slots) == len(state.slots)
    with pytest.raises(UsageError, match="fits no name"):
        Renaming((("^nothing", "x"),)).apply(state)
    with pytest.raises(StateError, match="two parameters"):
        Renaming((("wi_1", "wi_0"),)).apply(state)


def test_buffers_statistics_and_further_names_change_with_the_others() -> None:
    state, one = t5(layers=1), in_memory(np.ones(2))
    extra = {
        BUFFERS: {"encoder.norm.running_mean": one, "decoder.positions": one},
        TIES: {"encoder/again": "encoder/encoder_norm/scale"},
        "optax": {"tree": {"batch_stats": {"encoder": {"norm": {"mean": one}}}, "step": one}},
    }
    state = replace(state, extra=extra)
    after = Renaming((("^encoder/", "enc/"),)).apply(state).state.extra
    assert after[TIES] == {"enc/again": "enc/encoder_norm/scale"}
    assert [*after[BUFFERS]] == ["enc.norm.running_mean", "decoder.positions"]
    assert after["optax"]["tree"] == {"batch_stats": {"enc": {"norm": {"mean": one}}}, "step": one}
    assert TIES not in Renaming((("^encoder/encoder_norm/scale$", "encoder/again"),)).apply(state).state.extra
    for taken in ("encoder/encoder_norm/scale", "encoder/again"):
        with pytest.raises(StateError, match="two parameters"):
            Renaming((("^decoder/positions$", taken),)).apply(state)


def test_a_frozen_parameter_goes_along_and_decides_what_kind_of_model_it_is() -> None:
    state = load("t5x-t5:hf-t5").apply(t5(layers=1)).state
    frozen = "lm_head/weight"
    (group,) = state.optimizer.groups
    moved = replace(group, paths=tuple(path for path in group.paths if path != frozen))
    state = replace(
        state,
        params={path: param for path, param in state.params.items() if path != frozen},
        slots={path: slots for path, slots in state.slots.items() if path != frozen},
        rules={path: rule for path, rule in state.rules.items() if path != frozen},
        optimizer=replace(state.optimizer, groups=(moved,)),
        extra={**state.extra, BUFFERS: {"lm_head.weight": state.params[frozen]}},
    )
    back = load("hf-t5:t5x-t5").apply(state).state
    assert "decoder/logits_dense/kernel" in back.params
    assert back.group_of("decoder/logits_dense/kernel") is None


def test_what_is_said_of_names_that_fit_a_pattern_doesnt_pass_a_map() -> None:
    state = t5(layers=1).with_hyperparameters(exclude_from_weight_decay=["norm"])
    with pytest.raises(StateError, match="names that fit a pattern"):
        Renaming((("^encoder/", "enc/"),)).apply(state)


def test_parameters_of_several_groups_make_no_stack() -> None:
    state = t5(layers=1)
    paths = tuple(path for path in state.params if path.endswith("layer_norm/scale"))
    groups = Group(paths[:1]), Group(tuple(path for path in state.params if path != paths[0]))
    apart = replace(state, optimizer=Optimizer("adafactor", "t5x", groups))
    links = [Link(paths, "norms", (Stack(1),)), *(Link((p,), p) for p in state.params if p not in paths)]
    assert carried(state.with_hyperparameters(multiply_by_parameter_scale=True), links).state.rules[
        "norms"
    ].axes == (NONE, BATCH)
    with pytest.raises(StateError, match="several groups"):
        carried(apart, links)


def test_a_map_that_isnt_there_and_a_configuration_without_a_map_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean t5x-t5:hf-t5"):
        load("t5x-t5:hf_t5")
    with pytest.raises(UsageError, match="No map"):
        maps_of(None, {"num_heads": 4})


def test_a_conversion_shows_what_became_of_every_parameter(tmp_path: Path) -> None:
    source = Path(__file__).parent / "golden" / "t5x" / "momentum_f32" / "checkpoint"
    planned = statekit.plan(
        source, tmp_path / "run.pt", rename={"^token_embedder/embedding$": "shared/weight"}
    )
    mapped = {tuple(one["sources"]): one["target"] for one in planned.to_json()["mapped"]}
    assert mapped["token_embedder/embedding",] == "shared/weight"
    assert "model/shared.weight" in {entry.name for entry in planned.entries}
    assert planned.options["maps"] == [{"rename": [["^token_embedder/embedding$", "shared/weight"]]}]
    report = statekit.convert(planned)
    with statekit.open(report.target) as state:
        assert len(mapped) == len(state.params)


# Files that T5X wrote.

MAPS = {"unscanned": ("t5x-t5", "hf-t5"), "scanned": ("t5x-t5-scanned", "hf-umt5")}
WRITTEN = [
    path for network in MAPS for path in sorted((GOLDEN / "t5x_checkpoints" / network).glob("*/checkpoint_*"))
]


def said_of(path: Path) -> dict[str, Any]:
    """Returns what the run was told of its factor rules, and no checkpoint says."""
    meta = json.loads((path.parents[1] / "meta.json").read_text())
    return {
        "logical_factor_rules": "standard_logical_factor_rules",
        "logical_axes": meta["logical_axes"],
        "min_dim_size_to_factor": 32,
    }


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_what_t5x_wrote_goes_to_hugging_face_and_back_with_every_array_equal(
    path: Path, tmp_path: Path
) -> None:
    source, target = MAPS[path.parts[-3]]
    there = statekit.convert(path, tmp_path / "hf.pt", map=f"{source}:{target}", hparams=said_of(path))
    assert there.plan.exactness is Exactness.BITWISE
    back = tmp_path / "checkpoint_1000"
    statekit.convert(
        tmp_path / "hf.pt", back, to="t5x", map=f"{target}:{source}", config={"num_heads": 4, "d_model": 64}
    )
    with statekit.open(path, hparams=said_of(path)) as first, statekit.open(back) as second:
        assert values(second.checkpoint.tensors) == values(first.checkpoint.tensors)
        assert second.state.rules == first.state.rules
        assert second.state.counts == first.state.counts


def scanned() -> Path:
    return next(path for path in WRITTEN if path.parts[-3] == "scanned")


def unscanned() -> Path:
    return next(path for path in WRITTEN if path.parts[-3] == "unscanned")


def test_a_folder_of_trainer_has_the_model_at_its_top_too(tmp_path: Path) -> None:
    report = statekit.convert(
        unscanned(), tmp_path / "hf", to="hf-trainer", map="t5x-t5:hf-t5", hparams=said_of(unscanned())
    )
    assert report.plan.target.layout == "statekit-torch"
    assert "v of 2 parameters" in report.plan.options["passed_over"]["torch-optim"]
    [step] = (tmp_path / "hf").glob("checkpoint-*")
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (step / name).read_bytes()
    assert {*report.files} > {"config.json", f"{step.name}/config.json"}
    assert any("optimizer.pt has none" in one for one in report.plan.assumptions)
    again = statekit.convert(tmp_path / "hf", tmp_path / step.name, to="hf-trainer")
    assert again.plan.exactness is Exactness.BITWISE
    assert (tmp_path / step.name / "config.json").read_bytes() == (step / "config.json").read_bytes()
    with statekit.open(tmp_path / "hf") as state:
        assert state.checkpoint.path == step


def test_a_layout_that_was_asked_for_isnt_passed_over(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match="averaged into v_row and v_col"):
        statekit.plan(
            unscanned(), tmp_path / "hf", to="hf-trainer", layout="torch-optim", map="t5x-t5:hf-t5",
            hparams={**said_of(unscanned()), "learning_rate": 1.0},
        )  # fmt: skip


def test_heads_of_joined_kernels_are_asked_for_by_name(tmp_path: Path) -> None:
    statekit.convert(scanned(), tmp_path / "hf.pt", map="t5x-t5-scanned:hf-umt5", hparams=said_of(scanned()))
    with (
        statekit.open(tmp_path / "hf.pt") as opened,  # its weights alone; its config.json says them
        pytest.raises(UsageError, match="needs to know num_heads"),
    ):
        load("hf-umt5:t5x-t5-scanned").apply(opened.state)
    with pytest.raises(UsageError, match="expected a number"):
        load("hf-umt5:t5x-t5-scanned", {"num_heads": "four"})


def test_heads_that_contradict_the_kernels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="length 4 along axis 1, not 8"):
        statekit.plan(
            scanned(), tmp_path / "hf.pt", map="t5x-t5-scanned:hf-umt5", config={"num_heads": 8},
            hparams=said_of(scanned()),
        )  # fmt: skip


def test_how_a_scanned_run_was_factored_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        InexactError, match="nothing tells whether that is a BATCH axis; give the run's factor rules"
    ):
        statekit.plan(scanned(), tmp_path / "hf.pt", map="t5x-t5-scanned:hf-umt5")


def test_a_scanned_t5_is_refused_for_t5_by_the_names_of_its_tables(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="UMT5 holds it") as error:
        statekit.plan(scanned(), tmp_path / "hf.pt", map="t5x-t5:hf-t5", hparams=said_of(scanned()))
    places = [place for _, place in error.value.faults]
    assert places == [f"{side}/{side}/relpos_bias/rel_embedding" for side in ("decoder", "encoder")]


# Maps of the user's own, and what is shown of all.

SCHEMA = json.loads(resources.files("statekit.schemas").joinpath("statekit-map.schema.json").read_text())
TRANSPOSED = {"op": "permute", "order": [1, 0]}
USERS: dict[str, Any] = {
    "title": "Mine and theirs", "facts": ["my code"], "source": {"title": "mine"}, "target": {"title": "theirs"},
    "choices": {"head": ["tied", "untied"]}, "config": {"heads": "the number of heads"},
    "parameters": [
        {"source": "layer_{n}/kernel", "target": "layers/{n}/weight", "operations": [TRANSPOSED]},
        {"source": "head/kernel", "target": "head/weight", "when": {"head": "untied"}},
    ],
}  # fmt: skip


def of_line(**said: Any) -> dict[str, Any]:
    return {"parameters": [{"source": "a", "target": "b", **said}]}


def of_key(key: str = "k", **rule: Any) -> dict[str, Any]:
    return {"target": {"title": "theirs", "pretrained": {"class": "T", "files": {"a.json": {key: rule}}}}}


def of_user(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**USERS, **changes}))
    return path


def test_a_map_of_ones_own_goes_both_ways(tmp_path: Path) -> None:
    shapes = {"layer_0/kernel": (2, 3), "layer_1/kernel": (2, 3), "head/kernel": (3, 4)}
    params = {
        path: in_memory(np.arange(float(np.prod(shape))).reshape(shape)) for path, shape in shapes.items()
    }
    state = TrainState(params, {}, Optimizer("weights", None, (Group(tuple(params)),)), Counts(1, 1))
    path = of_user(tmp_path)
    there = load(str(path)).apply(state).state
    assert list(there.params) == ["layers/0/weight", "layers/1/weight", "head/weight"]
    assert there.params["layers/1/weight"].shape == (3, 2)
    back = load(f"{path}:back").apply(there).state
    assert list(back.params) == list(shapes)
    with pytest.raises(StateError) as error:
        load(str(path)).apply(with_param(without(state, "layer_0/kernel"), "adapter"))
    assert {place for _, place in error.value.faults} == {"layer_0/kernel", "adapter"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"operation": []}, "isn't known here @ operation"),
        ({"parameters": [{"source": "a"}]}, "is missing @ parameters/0/target"),
        ({"parameters": [{"source": "a{n}", "target": "b"}]}, "fields that the other side hasn't"),
        (of_line(when={"mlp": "x"}), "isn't among the choices"),
        (of_line(operations=[{"op": "permute", "order": ["0"]}]), "integer"),
        (of_line(operations=[{"op": "permute", "order": [2, 0]}]), "order [2, 0]"),
        (of_line(operations=[{"op": "merge", "axis": 0, "outer": "x"}]), "merges by x"),
        (of_line(operations=[TRANSPOSED, {"op": "unstack", "axis": 0, "over": "n"}]), "behind another"),
        (of_key(choice="mlp", of={}), "by mlp, which isn't among the choices @ target/pretrained/files/a.json/k"),
        (of_key(choice="head", of={"tied": 1}), "no value for head untied"),
        (of_key(count="m"), "counts m, which"),
        (of_key(same="k"), "the key k, which doesn't stand before it"),
        (of_key(length="head/weight", axis=0, per="x"), "the key x, which"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_map_is_refused_with_every_fault(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match="its schema gives it") as error:
        load(str(of_user(tmp_path, **changes)))
    assert said in str(error.value)


def test_an_axis_that_a_parameter_hasnt_is_refused_by_name() -> None:
    one = Pretrained("T", {"config.json": {"d_model": {"length": "a", "axis": 2}}})
    with pytest.raises(StateError, match=r"no axis 2 of a \[2, 3\]") as error:
        one.made(Model({"a": (2, 3)}), {}, "m")
    assert [place for _, place in error.value.faults] == ["d_model"]


def test_where_the_model_is_there_nothing_is_asked_for_that_only_builds_one(tmp_path: Path) -> None:
    path = str(of_user(tmp_path, config={}, **of_key("d_model", length="nothing", axis=0)))
    params = {"layer_0/kernel": in_memory(np.ones((2, 3)))}
    state = TrainState(params, {}, Optimizer("weights", None, (Group(tuple(params)),)), Counts(1, 1))
    with pytest.raises(UsageError, match="d_model"):
        carried_through(state, maps_of(path))
    assert "layers/0/weight" in carried_through(state, maps_of(path, builds=False))[0].params
    for config in ({"d_model": 3}, {"model_type": "mine", "another": 3}):
        assert maps_of(path, config, builds=False)
    with pytest.raises(UsageError, match="doesn't take what was said") as error:
        maps_of(path, {"d_model": 3, "foo": 3}, builds=False)
    assert [place for _, place in error.value.faults] == ["foo"]
    with pytest.raises(UsageError, match="foo"):
        maps_of("t5x-t5-scanned:t5x-t5-unscanned", {"foo": 3})


@st.composite
def spoiled(draw: st.DrawFn) -> Any:
    """Draws a map's file with one place in it changed."""
    data = json.loads(json.dumps(draw(st.sampled_from([USERS, json.loads(SHIPPED[0].read_text())]))))
    node, within = data, data
    for _ in range(draw(st.integers(1, 6))):
        if not isinstance(node, (dict, list)) or not node:
            break
        within, key = node, draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        node = node[key]
    value = draw(st.sampled_from([None, 3, -1, "", "{", "a{b}", [], {}, [0, 0], {"op": "merge"}, {"is": 3}]))
    if isinstance(within, list) or draw(st.booleans()):
        within[key] = value
    elif draw(st.booleans()):
        del within[key]
    else:
        within["another"] = value
    return data


SHIPPED = sorted(MODELS.iterdir(), key=str)


@settings(max_examples=300)
@given(spoiled())
def test_files_are_held_to_the_published_schema(data: Any) -> None:
    ours = not list(json_schema.faults(data, SCHEMA))
    assert ours is jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def test_every_map_is_listed_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["maps"]) == DONE
    listed = capsys.readouterr().out
    assert all(name in listed for name in map_names())
    for name in [*map_names(), str(of_user(tmp_path))]:
        assert main(["maps", name]) == DONE
        shown = capsys.readouterr().out
        assert all(entry.target.text in shown for entry in load(name).entries)
        assert main(["maps", name, "--json"]) == DONE
        printed = json.loads(capsys.readouterr().out)
        assert printed["name"] == load(name).name
        assert len(printed["file"].get("parameters", ())) == len(load(name).entries)
    assert main(["maps", "mesh-tf-t5:t5x-t5:hf-t5"]) == DONE
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("mesh-tf-t5:t5x-t5", "t5x-t5:hf-t5"))
    assert main(["maps", "mesh-tf-t5:t5x-t5:hf-t5", "--json"]) == DONE
    printed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in printed["maps"]] == ["mesh-tf-t5:t5x-t5", "t5x-t5:hf-t5"]
    assert main(["maps", "t5x-t5:hf_t5"]) == USAGE
    assert "did you mean t5x-t5:hf-t5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", [p for p in WRITTEN if p.parts[-3] == "scanned"], ids=lambda path: str(path.parts[-2])
)
def test_scanned_layers_come_apart_in_t5x_and_are_stacked_again_with_every_array_equal(
    path: Path, tmp_path: Path
) -> None:
    there = statekit.convert(
        path,
        tmp_path / "checkpoint_1000",
        to="t5x",
        map="t5x-t5-scanned:t5x-t5-unscanned",
        hparams=said_of(path),
    )
    assert there.plan.exactness is Exactness.BITWISE
    with statekit.open(tmp_path / "checkpoint_1000") as apart:
        assert apart.state.params["encoder/layers_1/attention/query/kernel"].shape == (64, 4, 16)
    back = tmp_path / "back"
    statekit.convert(there.target, back, to="t5x", map="t5x-t5-unscanned:t5x-t5-scanned")
    with statekit.open(path, hparams=said_of(path)) as first, statekit.open(back) as second:
        assert values(second.checkpoint.tensors) == values(first.checkpoint.tensors)


@pytest.mark.parametrize("gated", [True, False])
def test_mesh_tensorflows_t5_goes_to_t5x_and_on_to_hugging_face(gated: bool) -> None:
    state = t5(layers=11, gated=gated)
    mesh = load("t5x-t5:mesh-tf-t5").apply(state).state
    for name in (
        "encoder/block_010/layer_000/SelfAttention/q",
        "decoder/block_000/layer_001/EncDecAttention/o",
    ):
        assert name in mesh.params
    assert "decoder/block_000/layer_000/SelfAttention/relative_attention_bias" in mesh.params
    back = load("mesh-tf-t5:t5x-t5").apply(mesh).state
    assert (list(back.params), back.rules) == (list(state.params), state.rules)
    straight = load("t5x-t5:hf-t5").apply(state).state
    through, mapped = carried_through(mesh, maps_of("mesh-tf-t5:t5x-t5:hf-t5", {"num_heads": 2}))
    assert through.rules == straight.rules
    assert {one.sources[0]: one.target for one in mapped}["shared/embedding"] == "shared/weight"
    for path, slots in straight.slots.items():
        for name, slot in slots.items():
            np.testing.assert_array_equal(through.slots[path][name].read(), slot.read())
    with pytest.raises(StateError, match="block_010"):
        load("mesh-tf-t5:t5x-t5").apply(without(mesh, "encoder/block_010/layer_000/SelfAttention/q"))
    with pytest.raises(UsageError, match="no map of that name"):
        maps_of("mesh-tf-t5:hf-t5:t5x-t5")


def test_norms_of_mesh_tensorflow_have_either_name_and_the_way_back_takes_the_one_that_is_said() -> None:
    state = t5()
    first = load("t5x-t5:mesh-tf-t5").apply(state).state
    assert "decoder/final_layer_norm/scale" in first.params
    assert [one for one in first.assumptions if "decoder_norms" in one]
    said = {"encoder_norms": "layer_norm", "decoder_norms": "rms_norm"}
    mesh = load("t5x-t5:mesh-tf-t5", said).apply(state).state
    assert {"encoder/final_layer_norm/scale", "decoder/rms_norm/scale"} <= mesh.params.keys()
    assert mesh.assumptions == ()
    back = load("mesh-tf-t5:t5x-t5").apply(mesh).state
    assert (list(back.params), back.rules) == (list(state.params), state.rules)
    with pytest.raises(StateError, match="is said to be 'batch_norm'"):
        load("t5x-t5:mesh-tf-t5", {"decoder_norms": "batch_norm"}).apply(state)
    with pytest.raises(StateError, match="is said to be 'layer_norm'"):
        load("mesh-tf-t5:t5x-t5", {"decoder_norms": "layer_norm"}).apply(mesh)


IMPORTED = GOLDEN / "t5x_checkpoints" / "mtf_import_tiny"


@pytest.mark.skipif(not IMPORTED.is_dir(), reason="the recording is not in the compact set")
def test_a_checkpoint_of_mesh_tensorflow_gives_what_t5xs_importer_gives_and_keeps_its_axes_apart() -> None:
    imported = load_file(IMPORTED / "imported_by_t5x.safetensors")
    with statekit.open(IMPORTED, hparams={"min_dim_size_to_factor": 8}) as opened:
        (state, mapped) = carried_through(opened.state, maps_of("mesh-tf-t5:t5x-t5"))
        slots = {(path, slot) for one in mapped for path in one.sources for slot in one.slots}
        assert slots == {(path, slot) for path, kept in opened.state.slots.items() for slot in kept}
        for path, param in state.params.items():
            np.testing.assert_array_equal(param.read(), imported[f"target/{path}"])
            for name, slot in state.slots[path].items():
                np.testing.assert_array_equal(slot.read(), imported[f"state/param_states/{path}/{name}"])
    # T5X goes on as if `v_row` of a square matrix had averaged axis 1; Mesh TensorFlow averaged axis 0.
    assert state.rules["encoder/layers_0/attention/query/kernel"].axes == (COLUMN, ROW)
