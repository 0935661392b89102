"""What statekit writes, Orbax restores: bare, into Optax' own states, and through its CheckpointManager."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_orbax_read import IDS, RECORDED, native_names

from formats import check_conformance, damaged_copies, read_all
from goldens import GOLDEN
from statekit.conversion.contracts import Encoded, Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.tensors.tensor import Array, in_memory
from statekit.tensors.tree import nested
from statekit.testing.container_trials import open_proven

pytestmark = pytest.mark.jax


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Array]:
    """Returns the arrays of a restored tree by name; NamedTuples by their fields."""
    if hasattr(tree, "_asdict"):
        tree = tree._asdict()
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        items = enumerate(tree)
    else:
        return {} if tree is None else {"/".join(path): np.asarray(tree)}
    return {name: leaf for key, node in items for name, leaf in flat(node, (*path, str(key))).items()}


def exact(arrays: Mapping[str, Array]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in arrays.items()}


@pytest.mark.parametrize(("bundle", "step"), RECORDED, ids=IDS)
def test_a_recording_is_written_back(bundle: Path, step: Path, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    report = convert(plan(step, tmp_path / "run", to="orbax"))
    assert report.plan.exactness is Exactness.BITWISE and not report.plan.dropped
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        number = manager.latest_step()
    [written] = (tmp_path / "run").glob("[0-9]*")
    assert written.name == str(number)
    if "multiitem" in bundle.name:
        names = ("params", "opt_state", "data_iter")
        arguments = [ocp.args.StandardRestore(), ocp.args.StandardRestore(), ocp.args.JsonRestore()]
        with ocp.CheckpointManager(tmp_path / "run", item_names=names) as manager:
            composite = ocp.args.Composite(**dict(zip(names, arguments, strict=True)))
            restored = dict(manager.restore(number, args=composite).items())
        assert restored.pop("data_iter") == {"epoch": 1, "offset": 12}
    else:
        restored = ocp.PyTreeCheckpointer().restore(written / "default")
    assert exact(flat(restored)) == exact(native_names(bundle))


@pytest.mark.parametrize("case", ["momentum_f32", "default_heuristics"])
def test_a_t5x_run_goes_on_with_optax(case: str, tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    source = GOLDEN / "t5x" / case / "checkpoint"
    report = convert(plan(source, tmp_path / "run", to="orbax", layout="optax"))
    assert {entry.exactness for entry in report.plan.entries} == {Exactness.BITWISE}
    assert report.plan.exactness is Exactness.ROUNDING  # Optax' rule is another implementation of T5X's
    with open_state(source) as opened:
        state = opened.state
        hyper = state.optimizer.groups[0].hyperparameters
        momentum = 0.9 if any("m" in tensors for tensors in state.slots.values()) else None
        zeros = {tuple(path.split("/")): jnp.zeros(t.shape, t.dtype) for path, t in state.params.items()}
        optimizer = optax.adafactor(
            optax.constant_schedule(0.1),
            min_dim_size_to_factor=hyper["min_dim_size_to_factor"],
            momentum=momentum,
            weight_decay_rate=hyper["weight_decay_rate"],
        )
        target = {"params": nested(zeros), "opt_state": optimizer.init(nested(zeros))}
        updates = state.counts.updates
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            restored = manager.restore(updates, args=ocp.args.StandardRestore(target))
        assert jax.tree.structure(restored) == jax.tree.structure(target)
        for path, tensors in state.slots.items():
            for name, tensor in tensors.items():
                link, field = (4, "ema") if name == "m" else (0, name)
                array = flat(getattr(restored["opt_state"][link], field))[path]
                assert array.tobytes() == tensor.read().tobytes(), (path, name)
        assert restored["opt_state"][0].count == restored["opt_state"][2].count == updates
    by_path = ocp.StandardCheckpointer().restore(tmp_path / "run" / str(updates) / "default", target)
    assert exact(flat(by_path)) == exact(flat(restored))


def chains() -> dict[str, Any]:
    """Returns optimizers whose states hang in every wrapper."""
    import optax

    decayed = {"dense": {"kernel": True, "bias": False}, "scale": False}
    labels = {"dense": {"kernel": "a", "bias": "b"}, "scale": "none"}
    return {
        "adam": optax.adam(1e-3),
        "adamw_mask": optax.adamw(optax.constant_schedule(0.1), mask=decayed),
        "amsgrad": optax.amsgrad(1e-3),
        "nadamw_bf16": optax.nadamw(1e-3, mu_dtype="bfloat16"),
        "lamb": optax.chain(optax.clip_by_global_norm(1.0), optax.lamb(1e-3)),
        "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=0.01),
        "plain_adafactor": optax.adafactor(None, clipping_threshold=None, multiply_by_parameter_scale=False),
        "masked": optax.masked(optax.adamw(1e-3), decayed),
        "labels": optax.multi_transform(
            {"a": optax.adamw(1e-3), "b": optax.adamw(1e-2), "none": optax.set_to_zero()}, labels
        ),
        "accumulated": optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(learning_rate=0.1), 3),
        "finite": optax.apply_if_finite(optax.adamw(1e-3), 3),
        "averaged": optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    }


def test_states_in_every_wrapper_come_back_into_themselves(tmp_path: Path) -> None:
    """One test, because Orbax and JAX take their time to start."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    random = np.random.default_rng(0)
    params = {"dense": {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros(4)}, "scale": jnp.zeros(())}

    def some(leaf: Any) -> Any:
        """Returns other values of the same kind, every count 2: taking real steps costs half a minute."""
        if leaf.shape == (1,):  # what Adafactor keeps in the place of a slot that it doesn't use
            return np.zeros_like(leaf)
        if leaf.dtype == np.int32:
            return np.asarray(2, np.int32)
        return random.random(leaf.shape).astype(leaf.dtype)

    with ocp.StandardCheckpointer() as saver:
        for name, optimizer in chains().items():
            tree = jax.tree.map(
                some, {"step": jnp.int32(0), "params": params, "opt_state": optimizer.init(params)}
            )
            saver.save(tmp_path / "saved" / name, tree)
            saver.wait_until_finished()
            with open_state(tmp_path / "saved" / name) as opened:
                assert opened.layout == "optax", name
                assert opened.state.counts.updates == 2
            convert(plan(tmp_path / "saved" / name, tmp_path / name, to="orbax"))
            blank = jax.tree.map(np.zeros_like, tree)
            restored = saver.restore(tmp_path / name / "2" / "default", blank)
            assert jax.tree.structure(restored) == jax.tree.structure(tree), name
            assert exact(flat(restored)) == exact(flat(tree)), name


@pytest.mark.parametrize("zarr3", [True, False])
@pytest.mark.parametrize("ocdbt", [True, False])
def test_what_orbax_writes_today(zarr3: bool, ocdbt: bool, tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    tree = {
        "params": {"kernel": jnp.arange(48.0).reshape(6, 8), "bias": jnp.ones(3, jnp.bfloat16)},
        "rows": (jnp.zeros(2), 5, None),
        "scalars": [3, 2.5, True, np.float32(1.5)],
        "text": "hello",
        "empty": {"none": None, "dict": {}, "list": [], "tuple": ()},
        "key": jax.random.key(3),
        "wide": jnp.asarray(np.random.default_rng(0).normal(size=(64, 96)), jnp.float32),
    }
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    arguments = jax.tree.map(lambda leaf: ocp.SaveArgs(chunk_byte_size=4096), tree)
    with ocp.Checkpointer(handler) as saver:
        saver.save(tmp_path / "ckpt", args=ocp.args.PyTreeSave(tree, save_args=arguments))
    opened = ORBAX.open(tmp_path / "ckpt")
    assert opened.findings == () and opened.meta["files_beside"] == []
    assert (opened.tree["text"], opened.tree["rows"][2]) == ("hello", None)
    assert opened.tree["empty"] == {"none": None, "dict": {}, "list": [], "tuple": ()}
    assert opened.tensors["wide"].grain != (64, 96)
    expected = flat({**tree, "key": jax.random.key_data(tree["key"])})
    del expected["text"]
    arrays = {name: tensor.read() for name, tensor in opened.tensors.items()}
    assert {n: (a.shape, a.tobytes()) for n, a in arrays.items()} == {
        n: (a.shape, a.tobytes()) for n, a in expected.items()
    }


def test_whatever_a_tree_holds_is_restored(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    tree = {
        "a": {"b": in_memory(np.arange(6.0).reshape(2, 3)), "none": None},
        "rows": [in_memory(np.asarray(3, np.int32)), {}, (), [], "text"],
        "text": "é",
    }
    written = check_conformance(ORBAX, Encoded(tree, 7), tmp_path / "run")
    assert written.step == 7
    restored = ocp.PyTreeCheckpointer().restore(written.path / "default")
    assert restored["rows"][1:] == [{}, (), [], "text"] and restored["text"] == "é"
    assert restored["a"]["none"] is None and restored["a"]["b"].tobytes() == np.arange(6.0).tobytes()
    assert read_all(ORBAX, tmp_path / "run") == read_all(ORBAX, tmp_path / "run" / "7" / "default")


def test_items_are_written_each_by_itself(tmp_path: Path) -> None:
    array = in_memory(np.ones(3))
    tree = {"params": {"a": array}, "state": {"data": {"epoch": 1}}}
    encoded = Encoded(tree, 7, place="{step}/{item}")
    written = check_conformance(ORBAX, encoded, tmp_path / "7")
    assert written.tree["state"] == {"data": {"epoch": 1}}
    assert {p.name for p in (tmp_path / "7").iterdir() if p.is_dir()} == {"params", "state"}


def test_a_source_keeps_its_layout_where_that_is_at_home(tmp_path: Path) -> None:
    source = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    assert plan(source, tmp_path / "run", to="orbax").target.layout == "t5x"
    convert(plan(source, tmp_path / "state.pt"))
    assert plan(tmp_path / "state.pt", tmp_path / "run", to="orbax").target.layout == "optax"


def test_inspecting_imports_no_framework() -> None:
    from test_import_is_free import cli

    assert cli("inspect", "--stats", RECORDED[0][1]) == set()


def test_the_lines_to_go_on_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax.numpy as jnp
    import optax

    from statekit.conversion.resume import of_plan, resume_lines

    source = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    with open_state(source) as opened:
        zeros = {
            tuple(path.split("/")): jnp.zeros(t.shape, t.dtype) for path, t in opened.state.params.items()
        }
        momentum = {f"m/{path}": tensors["m"].read() for path, tensors in opened.state.slots.items()}
    adafactor = optax.adafactor(optax.constant_schedule(0.1), min_dim_size_to_factor=10, momentum=0.9)
    for layout, optimizer in (("optax", adafactor), ("statekit-jax", None)):
        planned = plan(source, tmp_path / layout, to="orbax", layout=layout)
        convert(planned)
        lines = (
            "\n".join(resume_lines(of_plan(planned), planned.state))
            .replace("learning_rate=...", "0.1")
            .replace("beta1=...", "beta1=0.9")
            .replace("momentum=...", "momentum=0.9")
        )
        names: dict[str, Any] = {"params": nested(zeros), "schedule": optax.constant_schedule(0.1)}
        exec(compile(lines, "to go on", "exec"), names)
        state = names["state"]["opt_state"]
        slots = {"m": state[4].ema if optimizer else state.m}
        assert exact(flat(slots)) == exact(momentum)


def test_damage_to_what_was_written_is_noticed(tmp_path: Path) -> None:
    """Where values differ, their manifest isn't trusted any more, and the reader says so."""
    source = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    convert(plan(source, tmp_path / "run", to="orbax", layout="statekit-jax"))
    expected = read_all(ORBAX, tmp_path / "run")
    refused = noticed = 0
    for what, copy, _ in damaged_copies(tmp_path / "run", tmp_path / "copies"):
        values = read_all(ORBAX, copy)
        refused += values is None
        if values not in (None, expected):
            opened = open_proven(ORBAX, copy)
            assert opened.manifest is None and opened.findings[0].damage, what
            noticed += 1
    assert refused > 5 and noticed
