"""TensorFlow 1's Adam: its powers of beta, and what its Saver makes of partitioned variables below a scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_files import save

from statekit.conversion.changing.changed import changed
from statekit.conversion.changing.changes import Changes
from statekit.conversion.contracts import Hints
from statekit.converters.containers.tf_bundle import CONTAINER
from statekit.converters.layouts.tensorflow.powers import beta_of, power_after
from statekit.converters.layouts.tensorflow.t2t import LAYOUT as T2T
from statekit.converters.layouts.tensorflow.tf2_adam import LAYOUT as TF_ADAM_GRAPH
from statekit.converters.layouts.tensorflow.tf_adam import LAYOUT as TF_ADAM
from statekit.errors import InexactError, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, in_memory

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def opened(tree: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint("tf-bundle", Path("x"), tree)


def adam_tree(updates: int, **powers: Any) -> dict[str, Any]:
    arrays = {"w": WEIGHTS, "w/Adam": WEIGHTS / 8, "w/Adam_1": WEIGHTS**2, "global_step": np.int64(updates)}
    arrays |= {name: np.float32(power) for name, power in powers.items()}
    return {name: in_memory(np.asarray(array)) for name, array in arrays.items()}


def adam_state(updates: int = 4, **hyperparameters: Any) -> TrainState:
    slots = {"w": {"m": in_memory(WEIGHTS / 8), "v": in_memory(WEIGHTS**2)}}
    optimizer = Optimizer("adamw", "torch", (Group(("w",), hyperparameters),))
    return TrainState({"w": in_memory(WEIGHTS)}, slots, optimizer, Counts(updates, updates))


# Powers


def test_powers_are_products_in_float32() -> None:
    product = np.float32(0.9)
    for _ in range(4):
        product *= np.float32(0.9)
    tree = TF_ADAM.encode(adam_state(4, beta1=0.9, beta2=0.95)).tree
    assert tree["beta1_power"].read() == product and tree["beta1_power"].shape == ()
    assert tree["beta2_power"].read() == power_after(0.95, 4) != np.float32(0.95**5)
    assert power_after(0.9, 0) == np.float32(0.9) and power_after(0.0, 3) == 0
    assert power_after(0.9, 10**12) == 0 and power_after(1.0, 10**12) == 1


@pytest.mark.parametrize("scope", ["", "training/"])
def test_a_count_that_begins_anew_begins_the_powers_anew(scope: str) -> None:
    """They are TensorFlow's only count: bias corrections would go on from where they stood."""
    powers = {
        f"{scope}{name}": power_after(beta, 4) for name, beta in (("beta1_power", 0.9), ("beta2_power", 0.95))
    }
    state = TF_ADAM.decode(opened(adam_tree(4, **powers)), Hints())
    kept = TF_ADAM.encode(state).tree
    assert {name: kept[name].read() for name in powers} == powers
    anew, _ = changed(state, Changes(slot_policy={"m": "reset", "v": "reset", "count": "reset"}), ("tf1",))
    tree = TF_ADAM.encode(anew).tree
    assert tree["global_step"].read() == 0 and tree.keys() == kept.keys()
    assert [float(tree[name].read()) for name in powers] == [np.float32(0.9), np.float32(0.95)]


@pytest.mark.parametrize("betas", [{}, {"beta1": 0.9}])
def test_powers_of_unknown_betas_are_refused(betas: dict[str, Any]) -> None:
    with pytest.raises(InexactError, match=r"beta2 isn't known, of which beta2_power is made"):
        TF_ADAM.encode(adam_state(**betas))


def test_groups_with_other_betas_are_refused() -> None:
    state = adam_state(beta1=0.9, beta2=0.95)
    (group,) = state.optimizer.groups
    other = Group((), {**group.hyperparameters, "beta2": 0.99})
    state = replace(state, optimizer=replace(state.optimizer, groups=(group, other)))
    with pytest.raises(InexactError, match=r"beta2 differs between groups"):
        TF_ADAM.encode(state)


@pytest.mark.parametrize(
    ("beta", "updates"), [(0.9, 0), (0.98, 1), (0.9, 700), (0.999, 60_000), (0.9995, 12)]
)
def test_powers_tell_betas(beta: float, updates: int) -> None:
    assert beta_of(power_after(beta, updates), updates) == beta
    assert beta_of(power_after(beta, updates), updates + 1) is None or updates == 60_000


def test_a_checkpoint_tells_its_betas() -> None:
    tree = adam_tree(1, beta1_power=power_after(0.9, 1), beta2_power=power_after(0.98, 1))
    (group,) = TF_ADAM.decode(opened(tree), Hints()).optimizer.groups
    assert (group.hyperparameters["beta1"], group.hyperparameters["beta2"]) == (0.9, 0.98)
    assert group.known_from["beta1"] == group.known_from["beta2"] == "file"


def test_powers_of_another_count_and_of_none() -> None:
    tree = adam_tree(7, beta1_power=power_after(0.9, 4), beta2_power=0)
    state = TF_ADAM.decode(opened(tree), Hints())
    assert not {"beta1", "beta2"} & state.optimizer.groups[0].hyperparameters.keys()
    assert "beta1_power is of no beta1 at update 7: name beta1." in state.assumptions
    tree = adam_tree(2000, beta1_power=0, beta2_power=power_after(0.999, 2000))
    (group,) = TF_ADAM.decode(opened(tree), Hints()).optimizer.groups
    assert group.known_from["beta1"] == "assumed" and group.known_from["beta2"] == "file"


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(StateError, match="is -1 @ global_step"):
        TF_ADAM.decode(opened(adam_tree(-1, beta1_power=0.9)), Hints())


# Partitioned variables below a scope


def parted(count: int, name: str = "net/w", scope: str = "training/") -> dict[str, Any]:
    """A variable of `count` rows, a part each, saved by Adam below a scope as TensorFlow 1.15 does."""
    tree: dict[str, Any] = {"b": in_memory(WEIGHTS[0]), "global_step": in_memory(np.asarray(3, np.int64))}
    tree |= {f"{scope}b/Adam": tree["b"], f"{scope}b/Adam_1": tree["b"]}
    tree |= {f"{scope}beta1_power": in_memory(np.asarray(power_after(0.9, 3)))}
    for i in reversed(range(count)):
        spec = f"{count} 4 {i},1:0,4"
        tree.setdefault(name, {})[spec] = in_memory(np.full((1, 4), i, np.float32))
        tree.setdefault(f"{name}/ExponentialMovingAverage", {})[spec] = tree[name][spec]
        for suffix in ("Adam", "Adam_1"):
            kept = f"{scope}{name}/part_{i}/{suffix}"[len(f"{name}/part_{i}/") :]
            tree.setdefault(f"{name}/{kept}", {})[spec] = tree[name][spec]
    return tree


@pytest.mark.parametrize("scope", ["training/", "a/", "a/scope/longer/than/the/variable/"])
def test_slots_of_parts_are_found_and_named_again(scope: str) -> None:
    tree = parted(12, scope=scope)
    state = TF_ADAM.decode(opened(tree), Hints())
    assert [path for path in state.params if path != "b"] == [f"net/w/part_{i}" for i in reversed(range(12))]
    for i in range(12):
        tensors = state.slots[f"net/w/part_{i}"]
        assert tensors.keys() == {"m", "v"} and all(np.all(slot.read() == i) for slot in tensors.values())
        assert np.all(state.extra["tf1"]["averages"][f"net/w/part_{i}"].read() == i)
    again = TF_ADAM.encode(state).tree
    assert isinstance(again, Mapping) and again.keys() == tree.keys()
    assert all([*again[name]] == [*tree[name]] for name in tree if isinstance(tree[name], Mapping))


def test_a_slot_of_no_part_is_an_orphan() -> None:
    for change in ("net/w/x/part_0/Adam", "net/w/Adam"):
        tree = parted(2)
        tree[change] = {"3 4 0,1:0,4": tree["net/w"]["2 4 0,1:0,4"]}
        with pytest.raises(StateError, match="is a slot of a variable that isn't there"):
            TF_ADAM.decode(opened(tree), Hints())


def test_slices_in_another_order_are_of_the_same_parts() -> None:
    tree = {key: value for key, value in parted(3, scope="").items() if "Average" not in key}
    tree = {key.replace("Adam", "Adafactor"): value for key, value in tree.items()}
    tree["net/w"] = dict(reversed(tree["net/w"].items()))
    state = T2T.decode(opened(tree), Hints())
    assert all(np.all(state.slots[f"net/w/part_{i}"]["v"].read() == i) for i in range(3))


# TensorFlow's own


@contextmanager
def graph() -> Iterator[tuple[Any, Any]]:
    """TensorFlow 1's interface, and a session on a new graph."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        yield v1, session


def trained(v1: Any) -> Any:
    """Returns the update of a small training: parts, a scope around it, averages."""
    import tensorflow as tf

    initial = v1.random_normal_initializer(seed=1)
    with v1.variable_scope("net"):
        parts = v1.get_variable(
            "a/kernel", [10, 6], partitioner=v1.fixed_size_partitioner(3), initializer=initial
        )
        bias = v1.get_variable("bias", [6], initializer=initial, use_resource=True)
    loss = tf.reduce_mean((tf.convert_to_tensor(parts) + bias) ** 4)
    step = v1.train.get_or_create_global_step()
    with v1.variable_scope("training"):
        update = v1.train.AdamOptimizer(0.01, beta2=0.98).minimize(loss, global_step=step)
    with v1.control_dependencies([update]):
        return v1.train.ExponentialMovingAverage(0.9).apply(v1.trainable_variables())


def values(v1: Any, session: Any) -> dict[str, Array]:
    return {variable.name: session.run(variable) for variable in v1.global_variables()}


@pytest.mark.tensorflow
def test_a_partitioned_run_below_a_scope_goes_on_in_tensorflow(tmp_path: Path) -> None:
    with graph() as (v1, session):
        train = trained(v1)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(train)
        theirs = Path(v1.train.Saver().save(session, str(tmp_path / "theirs"), 2))
        before = values(v1, session)
        session.run(train)
        after = values(v1, session)
    with CONTAINER.open(theirs) as checkpoint:
        state = TF_ADAM.decode(checkpoint, Hints())
        ours = save(TF_ADAM.encode(state).tree, tmp_path / "ours", 2)
        for path, tensors in state.slots.items():
            for slot, name in (("m", "Adam"), ("v", "Adam_1")):
                assert np.array_equal(tensors[slot].read(), before[f"training/{path}/{name}:0"])
        assert state.optimizer.groups[0].hyperparameters["beta2"] == 0.98
    assert len(state.slots) == 4
    for part in (".index", ".data-00000-of-00001"):
        assert Path(f"{ours}{part}").read_bytes() == Path(f"{theirs}{part}").read_bytes()
    with graph() as (v1, session):
        train = trained(v1)
        v1.train.Saver().restore(session, str(ours))
        assert _same(values(v1, session), before)
        session.run(train)
        assert _same(values(v1, session), after)


def _same(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.tensorflow
def test_tensorflows_adam_takes_a_state_from_elsewhere(tmp_path: Path) -> None:
    import tensorflow as tf

    tree = TF_ADAM.encode(adam_state(4, beta1=0.9, beta2=0.95)).tree
    assert isinstance(tree, Mapping)
    whole = save(tree, tmp_path / "run", 4)
    lacking = save({n: t for n, t in tree.items() if "power" not in n}, tmp_path / "lacking", 4)
    with graph() as (v1, session):
        variable = v1.get_variable("w", WEIGHTS.shape)
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.AdamOptimizer(0.01, beta2=0.95)
        optimizer.minimize(tf.reduce_sum(variable**2), global_step=step)
        saver = v1.train.Saver()
        with pytest.raises(tf.errors.NotFoundError, match="beta1_power"):
            saver.restore(session, str(lacking))
        saver.restore(session, str(whole))
        assert np.array_equal(session.run(variable), WEIGHTS) and session.run(step) == 4
        assert np.array_equal(session.run(optimizer.get_slot(variable, "v")), WEIGHTS**2)
        powers = session.run(optimizer._get_beta_accumulators())
        assert powers == (power_after(0.9, 4), power_after(0.95, 4))


@pytest.mark.tensorflow
def test_tensorflows_objects_take_a_state_from_elsewhere(tmp_path: Path) -> None:
    import tensorflow as tf

    encoded = TF_ADAM_GRAPH.encode(adam_state(4, beta1=0.9, beta2=0.95))
    prefix = save(encoded.tree, tmp_path / "run", 4)
    with graph() as (v1, session):
        model = tf.Module()
        model.w = v1.get_variable("w", WEIGHTS.shape, use_resource=True)
        step = v1.get_variable("global_step", [], tf.int64, use_resource=True, trainable=False)
        optimizer = v1.train.AdamOptimizer(0.01, beta2=0.95)
        optimizer.minimize(tf.reduce_sum(model.w**2), global_step=step)
        objects = v1.train.Checkpoint(model=model, optimizer=optimizer, step=step)
        status = objects.restore(str(prefix))
        status.assert_consumed()
        status.initialize_or_restore(session)
        assert np.array_equal(session.run(optimizer.get_slot(model.w, "m")), WEIGHTS / 8)
        assert session.run(optimizer._get_beta_accumulators()) == (power_after(0.9, 4), power_after(0.95, 4))
