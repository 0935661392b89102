"""States of Optax: recordings are decoded to the recorded state, and every tree comes back as it was."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_orbax_read import IDS, RECORDED

from formats import plain_state, values
from statekit.conversion.changing.changed import changed
from statekit.conversion.changing.changes import Changes
from statekit.conversion.contracts import Exactness, Hints
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.layouts.optax.layout import LAYOUT
from statekit.converters.layouts.optax.links import chain_items
from statekit.errors import InexactError, StateError, UsageError
from statekit.files.checkpoint import SEQUENCES_AS_MAPS, Checkpoint
from statekit.maps.links import carried_through
from statekit.maps.model_map import maps_of
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import Tree, tensor_names, to_json
from statekit.verify.recording import open_recording


def checkpoint(tree: Tree, **facts: Any) -> Checkpoint:
    return Checkpoint("orbax", Path("here"), tree, **facts)


def same_tree(left: Tree, right: Tree) -> None:
    assert json.dumps(to_json(left)) == json.dumps(to_json(right))
    assert values(tensor_names(left)) == values(tensor_names(right))


@pytest.mark.parametrize(("bundle", "step"), RECORDED, ids=IDS)
def test_a_recorded_state_is_decoded_exactly(bundle: Path, step: Path) -> None:
    with open_recording(bundle) as recording, ORBAX.open(step) as opened:
        assert LAYOUT.detect(opened) is not None
        state = LAYOUT.decode(opened, Hints())
        update = recording.checkpoint_step
        assert update is not None
        recorded = recording.state(update, recording.trajectories[0], update + 1)
        assert state.counts.updates == recorded.counts.updates
        assert values(state.params) == values(recorded.params)
        assert {path: values(tensors) for path, tensors in state.slots.items()} == {
            path: values(tensors) for path, tensors in recorded.slots.items()
        }
        assert state.optimizer.schema == recorded.optimizer.schema
        for path, rule in state.rules.items():
            assert (rule.axes == recorded.rules[path].axes) or rule.known_from == "assumed", path


@pytest.mark.parametrize(("bundle", "step"), RECORDED, ids=IDS)
def test_a_recorded_tree_comes_back(bundle: Path, step: Path) -> None:
    with ORBAX.open(step) as opened:
        encoded = LAYOUT.encode(LAYOUT.decode(opened, Hints()))
        same_tree(encoded.tree, opened.tree)
        assert not encoded.dropped and not encoded.exactness
        assert encoded.place == ("{step}/{item}" if "multiitem" in bundle.name else "")


# Trees as Optax' links make them.


def full(*shape: int, dtype: Any = np.float32) -> Tensor:
    return in_memory(np.random.default_rng(sum(shape)).random(shape).astype(dtype))


def count(value: int = 5) -> Tensor:
    return in_memory(np.asarray(value, np.int32))


def like(params: Any, **gone: Any) -> Any:
    """Returns a tree like the parameters', with some leaves replaced by name."""
    return {
        k: like(v, **gone) if isinstance(v, dict) and v else gone[k] if k in gone else v and full(*v.shape)
        for k, v in params.items()
    }


PARAMS = {"dense": {"kernel": full(8, 4), "bias": full(4)}, "scale": full()}
ROW, COLUMN, ONE = full(4), full(8), in_memory(np.zeros(1, np.float32))


def factored(params: Any = PARAMS) -> dict[str, Any]:
    return {
        "count": count(),
        "v_row": {"dense": {"kernel": ROW, "bias": ONE}, "scale": ONE},
        "v_col": {"dense": {"kernel": COLUMN, "bias": ONE}, "scale": ONE},
        "v": {"dense": {"kernel": ONE, "bias": full(4)}, "scale": full()},
    }


def adam(params: Any = PARAMS, **gone: Any) -> dict[str, Any]:
    return {"count": count(), "mu": like(params, **gone), "nu": like(params, **gone)}


def decoded(tree: Tree, **hints: Any) -> TrainState:
    """Decodes a tree, and checks that it comes back."""
    opened = checkpoint(tree)
    assert LAYOUT.detect(opened) is not None
    state = LAYOUT.decode(opened, Hints(hints))
    if not hints:
        same_tree(LAYOUT.encode(state).tree, tree)
    return state


@pytest.mark.parametrize(
    ("chain", "schema"),
    [
        ([adam(), None], "adamw"),
        ([adam(), None, None], "adamw"),
        ([adam(), {"inner_state": None}, {"count": count()}], "adamw"),
        ([adam(), None, None, {"count": count()}], "lamb"),
        ([None, [adam(), None, None]], "adamw"),
        ([[[adam(), None, None]]], "adamw"),
        ({"0": adam(), "1": {}, "2": {}}, "adamw"),
        ({"inner_state": [adam(), None, None]}, "adamw"),
        (adam(), "adamw"),
        ([{**adam(), "nu_max": like(PARAMS)}, None], "adamw"),
        ([factored(), None, None, None, None], "adafactor"),
        (
            [factored(), None, {"count": count()}, None, {"count": count(), "ema": like(PARAMS)}, None],
            "adafactor",
        ),
        ([None, factored(), None], "adafactor"),
    ],
)
def test_chains(chain: Tree, schema: str) -> None:
    state = decoded({"params": PARAMS, "opt_state": chain})
    assert (state.optimizer.schema, state.counts) == (schema, Counts(5, 5))
    assert state.slots.keys() == state.params.keys() == {"dense/kernel", "dense/bias", "scale"}


def test_a_train_state_and_what_it_holds_besides() -> None:
    tree = {
        "step": count(),
        "params": {**PARAMS, "empty": {}},
        "opt_state": [adam({**PARAMS, "empty": {}}), None, {"count": count(3)}],
        "batch_stats": {"mean": full(4)},
        "ema_params": like(PARAMS),
        "rng": in_memory(np.arange(2, dtype=np.uint32)),
        "name": "run",
    }
    state = decoded(tree)
    assert state.counts == Counts(5, 3)
    assert {"optax/tree/batch_stats/mean", "optax/tree/rng"} <= tensor_names(dict(state.extra)).keys()


def test_parameters_under_other_names() -> None:
    state = decoded({"step": count(9), "model": PARAMS, "tx": [adam(), None, None]})
    assert "dense/kernel" in state.params
    state = decoded({"params": {"params": PARAMS}, "opt_state": [adam(), None, None]})
    assert "dense/kernel" in state.params
    wrapped = {"params": PARAMS}
    state = decoded({"params": wrapped, "opt_state": [adam(wrapped), None, None]})
    assert "params/dense/kernel" in state.params


AVERAGE = like(PARAMS)


@pytest.mark.parametrize(
    "tree",
    [
        {"a_ema": {"params": AVERAGE}, "state": {"params": PARAMS, "opt_state": [adam(), None, None]}},
        {"a": {"params": AVERAGE}, "opt_state": [adam(), None, None], "params": PARAMS},
        {"ema": AVERAGE, "opt_state": [adam(), None, None], "params": PARAMS},
        {"ema": AVERAGE, "state": {"weights": PARAMS, "opt_state": [adam(), None, None]}, "params": PARAMS},
    ],
)
def test_an_average_is_not_taken_for_the_parameters(tree: Tree) -> None:
    assert values(decoded(tree).params) == values(tensor_names(PARAMS))


@pytest.mark.parametrize(
    ("tree", "key", "other"),
    [
        ({"ema": AVERAGE, "opt_state": [adam()], "weights": PARAMS}, "weights", "ema"),
        (
            {"ema": {"params": AVERAGE}, "model": {"params": PARAMS}, "opt_state": [adam()]},
            "model/params",
            "ema/params",
        ),
        (
            {"ema": {"params": AVERAGE}, "run": {"at": {"params": PARAMS, "opt_state": [adam()]}}},
            "run/at/params",
            "ema/params",
        ),
    ],
)
def test_parameters_that_nothing_tells_from_an_average_are_asked_for(
    tree: Tree, key: str, other: str
) -> None:
    opened = checkpoint(tree)
    assert LAYOUT.detect(opened) is not None
    with pytest.raises(StateError, match="may be the parameters") as error:
        LAYOUT.decode(opened, Hints())
    assert {*str(error.value.found).split(", ")} == {key, other}
    state = LAYOUT.decode(Hints(model_key=key).keyed(opened), Hints())
    assert values(state.params) == values(tensor_names(PARAMS))
    with pytest.raises(InexactError, match="may be the parameters"):  # nobody says it to a reader
        LAYOUT.encode(state)
    with pytest.raises(UsageError, match="no parameters at this key") as refused:
        LAYOUT.decode(Hints(model_key="opt_state").keyed(opened), Hints())
    assert {*str(refused.value.expected).split(", ")} == {key, other}


def test_names_with_slashes_keep_their_form() -> None:
    params = {"mlp/~/linear": {"w": full(3, 2)}, "list": [full(2), full(3)]}
    slots = {"mlp/~/linear": {"w": full(3, 2)}, "list": [full(2), full(3)]}
    state = decoded(
        {"params": params, "opt_state": [{"count": count(), "mu": slots, "nu": slots}, None, None]}
    )
    assert state.params.keys() == {"mlp/~/linear/w", "list/0", "list/1"}


@pytest.mark.parametrize("blank", [None, {}])
def test_masked_parameters_are_frozen(blank: Any) -> None:
    inner = [adam(bias=blank, scale=blank), None, None]
    state = decoded({"params": PARAMS, "opt_state": {"inner_state": inner}})
    assert state.slots.keys() == {"dense/kernel"}
    assert state.group_of("dense/bias") is None
    inner = [
        {"count": count(), "mu": {"dense": blank, "scale": full()}, "nu": {"dense": blank, "scale": full()}}
    ]
    assert decoded({"params": PARAMS, "opt_state": {"inner_state": inner}}).slots.keys() == {"scale"}


def test_labels_are_groups() -> None:
    inner = {
        "fast": {"inner_state": [adam(kernel=None), None, None]},
        "slow": {"inner_state": [adam(bias=None, scale=None), None, None]},
        "zero": {"inner_state": None},
    }
    state = decoded({"params": PARAMS, "opt_state": {"inner_states": inner}})
    assert [group.paths for group in state.optimizer.groups] == [("dense/bias", "scale"), ("dense/kernel",)]


def injected(inner: Tree, **hyperparameters: Any) -> Tree:
    scalars = {name: in_memory(np.asarray(value, np.float32)) for name, value in hyperparameters.items()}
    return {"count": count(), "hyperparams": scalars, "hyperparams_states": {}, "inner_state": inner}


def test_injected_hyperparameters_are_read_and_changed() -> None:
    tree = {"params": PARAMS, "opt_state": injected([adam(), None, None], b1=0.5, learning_rate=0.25, odd=7)}
    [group] = decoded(tree).optimizer.groups
    assert group.hyperparameters["beta1"] == 0.5 and group.known_from["beta1"] == "file"
    assert group.hyperparameters["learning_rate"] == 0.25
    changed = LAYOUT.encode(decoded(tree, learning_rate=0.125)).tree["opt_state"]["hyperparams"]
    assert changed["learning_rate"].read() == 0.125
    assert (changed["b1"].read(), changed["learning_rate"].dtype) == (0.5, np.float32)


def test_an_unfinished_accumulation_is_kept() -> None:
    state = decoded(
        {
            "params": PARAMS,
            "opt_state": {
                "mini_step": count(1),
                "gradient_step": count(5),
                "inner_opt_state": [adam(), None, None],
                "acc_grads": like(PARAMS),
                "skip_state": (),
            },
        }
    )
    assert state.counts.updates == 5
    assert "optax/tree/opt_state/acc_grads/scale" in tensor_names(dict(state.extra))
    assert any("acc_grads" in said for said in state.assumptions)


def test_gradients_that_wait_follow_the_scale_of_the_loss_and_no_map() -> None:
    whole = {
        "mini_step": count(1),
        "gradient_step": count(5),
        "inner_opt_state": [adam(), None, None],
        "acc_grads": like(PARAMS),
    }
    state = decoded({"params": PARAMS, "opt_state": whole})
    scaled, done = changed(state, Changes(loss_scale=0.5), ())
    tree = LAYOUT.encode(scaled).tree["opt_state"]
    for name, before in tensor_names({"": like(PARAMS)}).items():
        after = tensor_names({"": tree["acc_grads"]})[name]
        np.testing.assert_array_equal(after.read(), before.read() * np.float32(0.5))
    assert any(one.said.startswith("acc_grads times 0.5") for one in done)
    renamed, _ = carried_through(state, maps_of(None, {}, {"scale": "weight"}))
    with pytest.raises(
        InexactError, match=r"don't follow.*(?s:.*)is of no parameter @ opt_state/acc_grads/scale"
    ):
        LAYOUT.encode(renamed)


def test_what_is_known_and_from_where() -> None:
    state = decoded({"params": PARAMS, "opt_state": [adam(), None, None]})
    [group] = state.optimizer.groups
    assert group.known_from["beta1"] == "assumed" and "learning_rate" not in group.hyperparameters
    assert any("taken for adamw" in said for said in state.assumptions)
    state = decoded({"params": PARAMS, "opt_state": [adam(), None, None]}, b2=0.98, optimizer="lamb")
    [group] = state.optimizer.groups
    assert (state.optimizer.schema, group.hyperparameters["beta2"], group.known_from["beta2"]) == (
        "lamb",
        0.98,
        "given",
    )
    masked = decoded({"params": PARAMS, "opt_state": [adam(), {"inner_state": None}, None]})
    assert "weight_decay_rate" not in masked.optimizer.groups[0].hyperparameters
    clipped = decoded({"params": PARAMS, "opt_state": [None, adam(), None, None]})
    assert "clipvalue" not in clipped.optimizer.groups[0].hyperparameters
    halves = {k: in_memory(t.read().astype("bfloat16")) for k, t in {"w": full(8, 4)}.items()}
    link = {"count": count(), "mu": halves, "nu": {"w": full(8, 4)}}
    [group] = decoded({"params": {"w": full(8, 4)}, "opt_state": [link, None, None]}).optimizer.groups
    assert group.hyperparameters["dtype_momentum"] == "bfloat16"


def test_what_adafactors_links_tell() -> None:
    [group] = decoded({"params": PARAMS, "opt_state": [factored(), None, None, None, None]}).optimizer.groups
    assert (group.hyperparameters["min_dim_size_to_factor"], group.hyperparameters["beta1"]) == (4, None)
    assert group.hyperparameters["clipping_threshold"] == 1.0
    state = decoded(
        {"params": PARAMS, "opt_state": [factored(), None, {"count": count(), "ema": like(PARAMS)}, None]}
    )
    assert "beta1" not in state.optimizer.groups[0].hyperparameters
    assert "clipping_threshold" not in state.optimizer.groups[0].hyperparameters
    assert state.slots["scale"].keys() == {"v", "m"}


def test_other_statistics_leave_the_variant_open() -> None:
    state = decoded({"params": PARAMS, "opt_state": [adam(), {"count": count(), "ema": like(PARAMS)}, None]})
    assert state.optimizer.variant is None
    free = {"b1": full(), "z": like(PARAMS), "base_optimizer_state": [adam(), None, None]}
    for around in ([adam(), {"trace": like(PARAMS)}, None], free, [None, free, {"inner_state": None}]):
        state = decoded({"params": PARAMS, "opt_state": around})
        assert state.optimizer.variant is None
        assert any("statistics of their own" in note for note in state.assumptions)


def test_sums_and_injected_numbers_are_no_statistics() -> None:
    counts, inner = {"mini_step": count(1), "gradient_step": count()}, [adam(), None, None]
    summed = {**counts, "inner_opt_state": inner, "acc_grads": like(PARAMS)}
    for around in (summed, injected(inner, scale=0.5, learning_rate=0.1)):
        assert decoded({"params": PARAMS, "opt_state": around}).optimizer.variant == "optax"


def test_links_behind_the_optimizer_are_said_to_be_open() -> None:
    """As `chain(adamw(...), masked(set_to_zero(), still))`, whose mask no file has."""
    notes = decoded(
        {"params": PARAMS, "opt_state": [[adam(), None, None], {"inner_state": None}]}
    ).assumptions
    assert any("behind its chain" in note for note in notes)
    notes = decoded({"params": PARAMS, "opt_state": [None, [adam(), None, None]]}).assumptions
    assert not any("behind its chain" in note for note in notes)


@pytest.mark.parametrize(
    ("shape", "row", "column", "axes", "known"),
    [
        ((6, 6), (6,), (6,), "ROW COLUMN", "file"),
        ((3, 5, 7), (3, 5), (3, 7), "NONE ROW COLUMN", "file"),
        ((4, 9, 9), (4, 9), (4, 9), "NONE ROW COLUMN", "file"),
        ((9, 4, 9), (9, 4), (4, 9), "ROW NONE COLUMN", "file"),
        ((2, 8, 3, 5), (2, 3, 5), (2, 8, 3), "NONE COLUMN NONE ROW", "file"),
        ((5, 5, 3, 3), (5, 3, 3), (5, 3, 3), None, "assumed"),
    ],
)
def test_how_a_parameter_is_factored(
    shape: tuple[int, ...], row: tuple[int, ...], column: tuple[int, ...], axes: str | None, known: str
) -> None:
    link = {"count": count(), "v_row": {"w": full(*row)}, "v_col": {"w": full(*column)}, "v": {"w": ONE}}
    tree = {"params": {"w": full(*shape)}, "opt_state": [link, None, None, None, None]}
    rule = decoded(tree).rules["w"]
    assert rule.known_from == known
    if axes is not None:
        assert [axis.value for axis in rule.axes] == axes.split()
        return
    labels = ["COLUMN", "ROW", "NONE", "NONE"]
    given = decoded(tree, factor_map=[["w", labels]])
    assert given.rules["w"] == Rule(tuple(map(Axis, labels)), "given")
    assert any("numpy" in said for said in decoded(tree).assumptions)
    assert not any("numpy" in said for said in given.assumptions)
    with pytest.raises(StateError, match="another way"):
        decoded(tree, factor_map=[["w", ["ROW", "NONE", "COLUMN", "NONE"]]])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda s: s["v"].update(scale=full(2)), "don't fit shape"),
        (lambda s: s["v_row"]["dense"].update(kernel=full(5)), "aren't the means"),
        (lambda s: s["v_row"]["dense"].update(bias=full(4)), "don't fit shape"),
        (lambda s: s["v_row"]["dense"].pop("kernel"), "has no v_row"),
        (lambda s: s.update(count=count(-1)), "counts of updates"),
    ],
)
def test_faults_are_named(change: Any, error: str) -> None:
    link = factored()
    change(link)
    params = {"params": PARAMS, "opt_state": [link, None, None, None, None]}
    with pytest.raises(StateError, match=error):
        LAYOUT.decode(checkpoint(params), Hints())


def test_two_optimizers_of_one_run() -> None:
    part = {"a": {"inner_state": [adam(kernel=None)]}, "b": {"inner_state": [factored()]}}
    with pytest.raises(StateError, match="has slots in two optimizers @ dense/bias"):
        LAYOUT.decode(checkpoint({"params": PARAMS, "opt_state": {"inner_states": part}}), Hints())
    twice = {"a": {"inner_state": [adam()]}, "b": {"inner_state": [adam()]}}
    with pytest.raises(StateError, match="two optimizers"):
        LAYOUT.decode(checkpoint({"params": PARAMS, "opt_state": {"inner_states": twice}}), Hints())
    second = {**adam(bias=None, scale=None), "count": count(6)}
    late = {"a": {"inner_state": [adam(kernel=None)]}, "b": {"inner_state": [second]}}
    with pytest.raises(StateError, match="5, 6"):
        LAYOUT.decode(checkpoint({"params": PARAMS, "opt_state": {"inner_states": late}}), Hints())


@pytest.mark.parametrize(
    "tree",
    [
        {"params": PARAMS},
        {"params": PARAMS, "opt_state": [None, None]},
        {"params": {"other": full(3)}, "opt_state": [adam(), None]},
        {"params": PARAMS, "opt_state": [adam({**PARAMS, "more": full(2)}), None]},
        {"params": PARAMS, "opt_state": [{"trace": like(PARAMS)}, None]},
        {"opt_state": [adam(), None]},
        {"params": PARAMS, "opt_state": [{"count": 5, "mu": {}, "nu": {}}]},
        None,
        [],
    ],
)
def test_what_is_no_state_of_optax(tree: Tree) -> None:
    assert LAYOUT.detect(checkpoint(tree)) is None


@pytest.mark.parametrize(
    "hints",
    [
        {"beta9": 1},
        {"b1": "x"},
        {"b2": 2.0},
        {"b1": 0.9, "beta1": 0.8},
        {"clip_by_global_norm": 1.0, "global_norm_clip_threshold": 2.0},
        {"optimizer": "sgd"},
        {"optimizer": "adafactor"},
    ],
)
def test_hints_that_cannot_be(hints: Mapping[str, Any]) -> None:
    with pytest.raises(UsageError):
        decoded({"params": PARAMS, "opt_state": [adam(), None, None]}, **hints)


# States that come from elsewhere.


def test_another_systems_adafactor_becomes_a_chain() -> None:
    tree = LAYOUT.encode(plain_state()).tree
    first, *others = tree["opt_state"]["inner_state"]  # empty and mask are frozen
    assert others == [None, {"count": others[1]["count"]}, None, None]
    assert first["v_row"]["dense"]["kernel"].shape == (4,)
    assert first["v"]["dense"]["kernel"].shape == (1,)
    assert (first["v_row"]["mask"], first["v_row"]["dense"]["bias"].dtype.name) == (None, "bfloat16")
    again = LAYOUT.decode(checkpoint(tree), Hints())
    assert {path: values(tensors) for path, tensors in again.slots.items()} == {
        path: values(tensors) for path, tensors in plain_state().slots.items()
    }


def state_of(shape: tuple[int, ...], axes: str, **hyperparameters: Any) -> TrainState:
    rule = Rule(tuple(map(Axis, axes.split())), "file")
    slots = {name: full(*rule.slot_shape(name, shape)) for name in ("v_row", "v_col")}
    group = Group(("w",), hyperparameters, dict.fromkeys(hyperparameters, "file"))
    return TrainState(
        {"w": full(*shape)}, {"w": slots}, Optimizer("adafactor", "hf", (group,)), Counts(5, 5), {"w": rule}
    )


def test_row_and_column_change_places_where_optax_has_them_so() -> None:
    """HF's row averages the last axis, Optax' the largest: in a tall matrix each is the other's column."""
    state = state_of((8, 4), "ROW COLUMN")
    link = LAYOUT.encode(state).tree["opt_state"][0]
    assert link["v_row"]["w"] is state.slots["w"]["v_col"]
    assert link["v_col"]["w"] is state.slots["w"]["v_row"]
    square = state_of((6, 6), "COLUMN ROW")  # as Mesh TensorFlow has it
    assert LAYOUT.encode(square).tree["opt_state"][0]["v_row"]["w"] is square.slots["w"]["v_col"]


def test_links_follow_the_hyperparameters() -> None:
    for hyperparameters, behind in (
        ({"learning_rate": 0.1}, [None, None, None, None]),
        ({"learning_rate": 0.1, "clipping_threshold": None}, [None, None, None]),
        ({"learning_rate": 0.1, "multiply_by_parameter_scale": False}, [None, None, None]),
        ({"learning_rate": 0.1, "weight_decay_rate": 0.01}, [None, None, None, None, None]),
    ):
        assert (
            LAYOUT.encode(state_of((4, 8), "ROW COLUMN", **hyperparameters)).tree["opt_state"][1:] == behind
        )


def test_stacked_parameters_go_on_by_another_rule() -> None:
    encoded = LAYOUT.encode(state_of((3, 5, 7), "BATCH ROW COLUMN"))
    assert encoded.exactness["opt_state/0/v_row/w"][0] is Exactness.STATISTICS


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (state_of((3, 5, 7), "ROW COLUMN COLUMN"), "two largest axes"),
        (state_of((3, 5, 7), "ROW NONE COLUMN"), "two largest axes"),
        (state_of((4, 8), "ROW COLUMN", max_parameter_scale=1.0), "max_parameter_scale is 1.0"),
        (state_of((4, 8), "ROW COLUMN", multiply_by_parameter_scale={"w": True, "x": False}), "differs"),
        (replace(state_of((4, 8), "ROW COLUMN"), counts=Counts(2**31, 0)), "int32"),
        (replace(state_of((4, 8), "ROW COLUMN"), counts=Counts(5, 5, {"w": 4})), "counts them together"),
        (replace(state_of((4, 8), "ROW COLUMN"), slots={}), "no optimizer state"),
        (replace(state_of((4, 8), "ROW COLUMN"), optimizer=Optimizer("lans", None, ()), slots={}), "lans"),
    ],
)
def test_what_optax_cannot_hold(state: TrainState, error: str) -> None:
    with pytest.raises(InexactError, match=error):
        LAYOUT.encode(state)


def test_no_minimum_factors_the_smaller_and_not_the_larger() -> None:
    small = state_of((4, 8), "ROW COLUMN")
    state = replace(
        small,
        params={**small.params, "x": full(16, 16)},
        slots={**small.slots, "x": {"v": full(16, 16)}},
        optimizer=Optimizer("adafactor", "t5x", (Group(("w", "x")),)),
    )
    with pytest.raises(InexactError, match="min_dim_size_to_factor"):
        LAYOUT.encode(state)


@pytest.mark.parametrize(
    "frame",
    [("slot", "none"), ("bogus",), ("params", {"x": ("y",)}), ("slot",), ("slot", "mu", {"x": ("y",)})],
)
def test_a_form_that_is_not_of_these_parameters(frame: Any) -> None:
    state = decoded({"params": PARAMS, "opt_state": [adam(), None, None]})
    odd = replace(state, extra={"optax": {"tree": {"opt_state": frame}}})
    with pytest.raises(StateError, match="form"):
        LAYOUT.encode(odd)


# Groups.


def grouped(*settings: Mapping[str, Any], extra: Any = None, frozen: bool = False) -> TrainState:
    """Returns the state of an AdamW of PyTorch whose groups have a matrix and a vector each."""
    params = {f"{name}{i}": full(*shape) for i in range(len(settings)) for name, shape in SHAPES.items()}
    groups = tuple(
        Group((f"w{i}", f"b{i}"), dict(one), dict.fromkeys(one, "file")) for i, one in enumerate(settings)
    )
    slots = {path: {"m": tensor, "v": tensor} for path, tensor in params.items()}
    params |= {"still": full(2)} if frozen else {}
    return TrainState(
        params, slots, Optimizer("adamw", "optax", groups), Counts(5, 5), {}, {} if extra is None else extra
    )


SHAPES = {"w": (3, 4), "b": (4,)}
DECAYED, PLAIN = (
    {"learning_rate": 0.1, "weight_decay_rate": 0.01},
    {"learning_rate": 0.1, "weight_decay_rate": 0.0},
)


def test_groups_that_differ_in_weight_decay_alone_are_one_optimizer_with_a_mask() -> None:
    """At b103f67 they were one chain without a mask: `optax.adamw` decays biases from there."""
    for none in (PLAIN, {"learning_rate": 0.1, "weight_decay_rate": None}, {"learning_rate": 0.1}):
        for order in ((DECAYED, none), (none, DECAYED)):
            first, *behind = LAYOUT.encode(grouped(*order)).tree["opt_state"]
            assert behind == [{"inner_state": None}, None]
            assert first["mu"].keys() == {"w0", "b0", "w1", "b1"} and None not in first["mu"].values()
    assert LAYOUT.encode(grouped(DECAYED, DECAYED)).tree["opt_state"][1:] == [None, None]
    assert LAYOUT.encode(grouped(PLAIN, {"learning_rate": 0.1})).tree["opt_state"][1:] == [None, None]


@pytest.mark.parametrize(
    ("settings", "frozen"),
    [
        ((DECAYED, {**DECAYED, "learning_rate": 0.2}), False),
        ((DECAYED, {**DECAYED, "weight_decay_rate": 0.02}), False),
        ((DECAYED, {**PLAIN, "beta1": 0.8}), False),
        ((DECAYED, PLAIN), True),
    ],
)
def test_other_groups_are_parts(settings: tuple[Mapping[str, Any], ...], frozen: bool) -> None:
    tree = LAYOUT.encode(grouped(*settings, frozen=frozen)).tree
    parts = tree["opt_state"]["inner_states"]
    assert parts.keys() == {"0", "1", *(("frozen",) if frozen else ())}
    assert parts.get("frozen", {"inner_state": None}) == {"inner_state": None}
    for label, other in (("0", "1"), ("1", "0")):
        mu = parts[label]["inner_state"][0]["mu"]
        assert {path for path, leaf in mu.items() if leaf is None} == {f"w{other}", f"b{other}"} | (
            {"still"} if frozen else set()
        )
    again = LAYOUT.decode(checkpoint(tree), Hints())
    assert [{*group.paths} for group in again.optimizer.groups] == [{"w0", "b0"}, {"w1", "b1"}]


@pytest.mark.parametrize(
    "extra",
    [
        {"torch": {"scheduler": {"last_epoch": 5}}},
        {"torch": {"lr_schedulers": [{"last_epoch": 5}]}},
        {"param_groups": [{"initial_lr": 0.2}]},
    ],
)
def test_the_rate_of_a_run_with_a_scheduler_counts(extra: Any) -> None:
    """At b103f67 it was a number: `optax.adamw(schedule)` couldn't restore it."""
    chain = LAYOUT.encode(grouped(PLAIN, extra=extra)).tree["opt_state"]
    assert chain[2]["count"].read() == 5
    for nothing in ({"torch": {"scheduler": None}}, {"torch": {"epoch": 3}}):
        assert LAYOUT.encode(grouped(PLAIN, extra=nothing)).tree["opt_state"][2] is None


def test_parts_of_several_optimizers_are_a_state() -> None:
    """At b103f67: KeyError 'v_row', where Adafactor's part came first."""
    params = {"a": full(8, 4), "b": full(3)}
    one: dict[str, Any] = {
        "count": count(),
        "v_row": {"a": ROW, "b": None},
        "v_col": {"a": COLUMN, "b": None},
        "v": {"a": ONE, "b": None},
    }
    other = {"count": count(), "mu": {"a": None, "b": full(3)}, "nu": {"a": None, "b": full(3)}}
    parts = {
        "big": {"inner_state": [one, None, None, None, None]},
        "small": {"inner_state": [other, None, None]},
    }
    state = decoded({"params": params, "opt_state": {"inner_states": parts}})
    assert state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))
    assert {path: {*tensors} for path, tensors in state.slots.items()} == {
        "a": {"v_row", "v_col"},
        "b": {"m", "v"},
    }
    alone = {"count": count(), **{name: {"a": one[name]["a"]} for name in ("v_row", "v_col", "v")}}
    chain = [alone, None, None, None, None]
    assert (
        decoded({"params": {"a": params["a"]}, "opt_state": chain}).optimizer.schema == "adafactor"
    )  # as it says


@pytest.mark.parametrize("keys", [("999999999",), ("0", "00"), ("0", "\u0660"), ("9" * 30, "0"), (0, "0")])
def test_a_chain_whose_keys_are_no_indices_is_no_chain(keys: tuple[Any, ...]) -> None:
    weights = {"w": in_memory(np.ones(3, np.float32))}
    state = {"mu": weights, "nu": weights, "count": in_memory(np.asarray(1, np.int32))}
    chain = {key: state if at == 0 else {} for at, key in enumerate(keys)}
    assert chain_items(chain) is None
    meta = {SEQUENCES_AS_MAPS: True}
    with contextlib.suppress(StateError):
        LAYOUT.decode(checkpoint({"params": weights, "opt_state": chain}, meta=meta), Hints())


def test_a_chain_with_many_holes_is_none() -> None:
    """Each became a node: two thousand chains with one link, the last of a thousand, took minutes."""
    assert chain_items({"0": {}, "20": {}}) is not None
    assert chain_items({"0": {}, "999": {}}) is None
