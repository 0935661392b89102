"""The layout of statekit.jax's states: read, written, and restored by Orbax into the states themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_optax_layout import (
    COLUMN,
    PARAMS,
    ROW,
    adam,
    checkpoint,
    count,
    full,
    injected,
    same_tree,
    state_of,
)
from test_orbax_restored import exact, flat

from formats import plain_state, values
from goldens import GOLDEN
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.optax.layout import LAYOUT as OPTAX
from statekit.converters.layouts.optax.links import OWN_FIELDS, OWN_GROUP_FIELDS
from statekit.converters.layouts.own.statekit_jax import LAYOUT
from statekit.errors import InexactError, StateError, UsageError
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tree import Tree, nested, tensor_names

BLANK = {"dense": {"kernel": None, "bias": None}, "scale": None}
ADAFACTOR = {
    "count": count(),
    "v_row": {"dense": {"kernel": ROW, "bias": None}, "scale": None},
    "v_col": {"dense": {"kernel": COLUMN, "bias": None}, "scale": None},
    "v": {"dense": {"kernel": None, "bias": full(4)}, "scale": full()},
    "m": BLANK,
    "average": BLANK,
}


def decoded(opt_state: Tree, **hints: Any) -> TrainState:
    """Decodes a tree, and checks that it comes back."""
    tree = {"params": PARAMS, "opt_state": opt_state, "rng": full(2)}
    opened = checkpoint(tree)
    evidence = LAYOUT.detect(opened)
    assert evidence is not None and evidence.specificity == 30
    state = LAYOUT.decode(opened, Hints(hints))
    same_tree(LAYOUT.encode(state).tree, tree)
    return state


@pytest.mark.parametrize(
    "hang",
    [
        lambda state: state,
        lambda state: [None, state, {"count": count()}],
        lambda state: {"inner_state": state},
    ],
)
def test_a_state_wherever_it_hangs(hang: Any) -> None:
    state = decoded(hang(ADAFACTOR))
    assert (state.optimizer.schema, state.optimizer.variant, state.counts) == (
        "adafactor",
        None,
        Counts(5, 5),
    )
    assert state.slots["dense/kernel"].keys() == {"v_row", "v_col"}
    assert state.slots["scale"].keys() == {"v"}
    assert any("--variant" in said for said in state.assumptions)
    assert "jax/tree/rng" in tensor_names(dict(state.extra))


def test_a_variant_settles_what_its_rule_says() -> None:
    def with_variant(variant: str) -> TrainState:
        tree = {"params": PARAMS, "opt_state": ADAFACTOR}
        return LAYOUT.decode(checkpoint(tree), Hints({"decay_rate": 0.7}, variant))

    state = with_variant("optax")
    [group] = state.optimizer.groups
    assert (group.hyperparameters["decay_rate"], group.known_from["decay_rate"]) == (0.7, "given")
    assert (
        group.known_from["clipping_threshold"] == "assumed" and "learning_rate" not in group.hyperparameters
    )
    assert state.rules["dense/bias"] == Rule((Axis.NONE,), "file")
    with pytest.raises(UsageError):
        decoded(ADAFACTOR, beta9=1)


def trees(schema: str) -> dict[str, Any]:
    """Returns a state with every slot of its parameters, and its group's."""
    like = {"dense": {"kernel": full(8, 4), "bias": full(4)}, "scale": full()}
    alone = {"dense": {"kernel": full(1, 1), "bias": full(1)}, "scale": full()}
    history = {"dense": {"kernel": full(2, 1, 1), "bias": full(2, 1)}, "scale": full(2)}
    other = {"param_rms": alone, "scale_exp_avg_sq": alone, "scale_grads": history}
    together = {
        name: full(3) if name == "model_norms" else full() for name in OWN_GROUP_FIELDS.get(schema, ())
    }
    slots = {name: other.get(name, like) for name in OWN_FIELDS[schema]}
    return {"count": count(), **slots, **together}


@pytest.mark.parametrize("schema", ["lans", "lamb", "adamw", "scaled_adam"])
def test_every_optimizer(schema: str) -> None:
    state = decoded(trees(schema))
    assert state.optimizer.schema == schema
    assert state.slots["scale"].keys() == set(OWN_FIELDS[schema])
    assert state.optimizer.groups[0].slots.keys() == set(OWN_GROUP_FIELDS.get(schema, ()))
    bare = LAYOUT.encode(replace(state, extra={}))
    same_tree(bare.tree, {"params": PARAMS, "opt_state": trees(schema)})
    without = {**trees(schema), **dict.fromkeys(OWN_GROUP_FIELDS.get(schema, ()))}
    assert not decoded(without).optimizer.groups[0].slots


@pytest.mark.jax
def test_the_fields_are_those_of_the_states() -> None:
    from statekit.jax.states import STATES

    assert {name: state._fields for name, state in STATES.items()} == {
        name: ("count", *OWN_FIELDS[name], *OWN_GROUP_FIELDS.get(name, ())) for name in OWN_FIELDS
    }


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"v_col": BLANK}, "no v_col"),
        ({"v_row": {**BLANK, "dense": {"kernel": full(5), "bias": None}}}, "fit no rule"),
        ({"count": count(-2)}, "counts of updates"),
    ],
)
def test_faults_are_named(change: dict[str, Any], error: str) -> None:
    tree = {"params": PARAMS, "opt_state": {**ADAFACTOR, **change}}
    with pytest.raises(StateError, match=error):
        LAYOUT.decode(checkpoint(tree), Hints())


def test_rules_are_told_or_open() -> None:
    params = {"w": full(3, 4, 4)}
    state = {"count": count(), "v_row": {"w": full(3, 4)}, "v_col": {"w": full(3, 4)}}
    tree = {"params": params, "opt_state": {**state, **{name: {"w": None} for name in ("v", "m", "average")}}}
    open_rule = LAYOUT.decode(checkpoint(tree), Hints()).rules["w"]
    assert open_rule.known_from == "assumed"
    labels = ["BATCH", "COLUMN", "ROW"]
    given = LAYOUT.decode(checkpoint(tree), Hints({"factor_map": [["w", labels]]})).rules["w"]
    assert given == Rule(tuple(map(Axis, labels)), "given")
    by_variant = LAYOUT.decode(checkpoint(tree), Hints(variant="hf")).rules["w"]
    assert by_variant == Rule((Axis.NONE, Axis.ROW, Axis.COLUMN), "file")


def test_another_systems_state_is_written_as_it_is() -> None:
    state = plain_state()
    tree = LAYOUT.encode(state).tree
    inner = tree["opt_state"]["inner_state"]  # empty and mask are frozen
    assert inner["v_row"]["dense"]["kernel"] is state.slots["dense/kernel"]["v_row"]
    assert (inner["v_row"]["dense"]["bias"], inner["m"]["mask"]) == (None, None)
    again = LAYOUT.decode(checkpoint(tree), Hints())
    assert {p: values(tensors) for p, tensors in again.slots.items()} == {
        p: values(tensors) for p, tensors in state.slots.items()
    }


def odd(*groups: Group, **changes: Any) -> TrainState:
    """Returns a state of one matrix, changed."""
    optimizer = Optimizer("adafactor", None, groups or (Group(("w",)),))
    return replace(state_of((4, 8), "ROW COLUMN"), optimizer=optimizer, **changes)


def test_what_lies_beside_the_optimizer_goes_along() -> None:
    first = adam()
    chain = [first, None, {"count": count(3)}]
    tree = {"opt_state": injected(chain, b1=0.5), "params": PARAMS, "rng": full(2), "step": count()}
    state = OPTAX.decode(checkpoint(tree, meta={"items": ["a", "b"]}, step=9), Hints())
    encoded = LAYOUT.encode(state)
    assert encoded.tree["opt_state"].keys() == {"count", *OWN_FIELDS["adamw"]}
    same_tree({**encoded.tree, "opt_state": None}, {**tree, "opt_state": None})
    left = {"extra/optax/tree/opt_state/hyperparams/b1"}
    assert left == encoded.dropped.keys() & tensor_names({"extra": dict(state.extra)}).keys()
    form = {name for name in encoded.dropped if name.startswith("extra/optax/tree/opt_state/")}
    assert encoded.dropped.keys() - form == {"counts/schedule"}
    assert (encoded.step, encoded.place) == (9, "{step}/{item}")
    again = LAYOUT.decode(checkpoint(encoded.tree), Hints())
    back = OPTAX.encode(again).tree
    same_tree({**back, "opt_state": None}, {**tree, "opt_state": None})
    assert values(tensor_names(back["opt_state"][0]["mu"])) == values(tensor_names(first["mu"]))


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (odd(counts=Counts(2**31, 0)), "int32"),
        (odd(counts=Counts(5, 5, {"w": 4})), "counts them together"),
        (odd(slots={}), "no optimizer state"),
        (odd(Group(("w", "x")), params={"w": full(4, 8), "x": full(2)}), "has them all"),
        (odd(Group(("w",), slots={"norm": full()})), "has slot norm"),
    ],
)
def test_what_cannot_be_held(state: TrainState, error: str) -> None:
    with pytest.raises(InexactError, match=error):
        LAYOUT.encode(state)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("momentum_f32", {"beta1": 0.9}),
        ("default_heuristics", {}),
        ("factor_map_rank34", {"factor_map": True}),
    ],
)
def test_a_t5x_run_goes_on_with_statekit_jax(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    from statekit.jax import AdafactorState, adafactor

    source = GOLDEN / "t5x" / case / "checkpoint"
    report = convert(plan(source, tmp_path / "run", to="orbax", layout="statekit-jax"))
    assert report.plan.exactness is Exactness.BITWISE
    with open_state(source) as opened, open_state(tmp_path / "run") as written:
        state = opened.state
        assert written.layout == "statekit-jax"
        assert written.state.optimizer == state.optimizer and written.state.rules == state.rules
        updates = state.counts.updates
        zeros = {tuple(path.split("/")): jnp.zeros(t.shape, t.dtype) for path, t in state.params.items()}
        [group] = state.optimizer.groups
        options = {"min_dim_size_to_factor": group.hyperparameters["min_dim_size_to_factor"], **options}
        if "factor_map" in options:
            labels = {path: [axis.value for axis in rule.axes] for path, rule in state.rules.items()}
            options = {**options, "factor_map": labels}
        target = {"params": nested(zeros), "opt_state": adafactor(0.1, **options).init(nested(zeros))}
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            restored = manager.restore(updates, args=ocp.args.StandardRestore(target))
        assert jax.tree.structure(restored) == jax.tree.structure(target)
        assert isinstance(restored["opt_state"], AdafactorState)
        expected = {f"params/{path}": tensor.read() for path, tensor in state.params.items()}
        for path, tensors in state.slots.items():
            expected |= {f"opt_state/{name}/{path}": tensor.read() for name, tensor in tensors.items()}
        expected["opt_state/count"] = np.asarray(updates, np.int32)
        assert exact(flat(restored)) == exact(expected)


@pytest.mark.jax
def test_what_a_user_saves_is_recognised(tmp_path: Path) -> None:
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    from statekit.conversion.inspection import inspect
    from statekit.jax.states import STATES

    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    gone = {"kernel": optax.MaskedNode(), "bias": optax.MaskedNode()}
    with ocp.StandardCheckpointer() as saver:
        for schema, kind in STATES.items():
            fields: dict[str, Any] = dict.fromkeys(OWN_FIELDS[schema], gone)
            if schema == "adafactor":
                fields |= {"v": {**gone, "bias": jnp.ones(3)}}
                fields |= {name: {**gone, "kernel": jnp.ones(n)} for name, n in (("v_row", 3), ("v_col", 4))}
            else:
                kept = {"scaled_adam": ("delta", "exp_avg_sq"), "muon": ("m",)}.get(schema, ("m", "v"))
                fields |= dict.fromkeys(kept, params)
            together = dict.fromkeys(OWN_GROUP_FIELDS.get(schema, ()), optax.MaskedNode())
            state = kind(count=jnp.asarray(3, jnp.int32), **fields, **together)
            tree = {"params": params, "opt_state": (state, optax.EmptyState())}
            saver.save(tmp_path / schema, tree)
            saver.wait_until_finished()
            seen = inspect(tmp_path / schema)
            assert seen.layout is not None and seen.layout.name == "statekit-jax"
            assert seen.optimizer is not None and seen.optimizer.schema == schema
            convert(plan(tmp_path / schema, tmp_path / f"{schema}-again", to="orbax"))
            again = saver.restore(tmp_path / f"{schema}-again" / "3" / "default", tree)
            assert exact(flat(again)) == exact(flat(tree))


def test_groups_with_slots_of_their_own_are_parts_each_with_its_own(tmp_path: Path) -> None:
    """ScaledAdam of icefall clips the gradients of each group by norms that the group keeps."""
    source = GOLDEN / "scaled_adam/pt7_two_groups_eden/checkpoint/checkpoint-5.pt"
    names = [
        "scale",
        "pre/weight",
        "pre/bias",
        "post/kernel",
        "mid/weight",
        "mid/bias",
        "mid/alpha",
        "post/weight",
    ]
    ref = CheckpointRef(source, param_names=tuple(names), variant="pt7")
    convert(plan(ref, tmp_path / "jax", to="orbax", layout="statekit-jax"))
    for again in ("jax", "again"):  # made anew, then in the form that was read
        with open_state(ref) as before, open_state(tmp_path / again) as after:
            assert [group.paths for group in after.groups] == [tuple(names[:4]), tuple(names[4:])]
            for old, new in zip(before.groups, after.groups, strict=True):
                norms = new.slots["model_norms"].read()
                assert np.array_equal(norms, old.slots["model_norms"].read())
            assert not np.array_equal(norms, after.groups[0].slots["model_norms"].read())
        if again == "jax":
            convert(plan(tmp_path / "jax", tmp_path / "again", to="orbax", layout="statekit-jax"))
    convert(plan(tmp_path / "again", tmp_path / "icefall.pt", to="torch", layout="icefall"))
    with open_state(ref) as before, open_state(tmp_path / "icefall.pt") as back:
        assert values(before.tensors) == values(back.tensors)
