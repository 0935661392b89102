"""Weights alone are converted as what they are: a state without an optimizer, and never with one that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file

import statekit
import statekit.torch
from statekit.cli.main import main
from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_plan, resume_lines
from statekit.converters.layouts.weights.jax_weights import LAYOUT as JAX_WEIGHTS
from statekit.converters.layouts.weights.tf_weights import LAYOUT as TF_WEIGHTS
from statekit.errors import FormatError, StateError, StatekitError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import in_memory
from statekit.verify.verification import verify

pytestmark = pytest.mark.torch


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


def sources(folder: Path) -> dict[str, Path]:
    weights = net().state_dict()
    torch.save(weights, folder / "bare.pt")
    torch.save({"state_dict": weights, "epoch": 3}, folder / "keyed.pt")
    save_file(weights, folder / "model.safetensors")
    return {one: folder / one for one in ("bare.pt", "keyed.pt", "model.safetensors")}


def printed(lines: list[str], names: dict[str, Any]) -> dict[str, Any]:
    exec("\n".join(lines), names)
    return names


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", ["bare.pt", "keyed.pt", "model.safetensors"])
@pytest.mark.parametrize("target", ["out.pt", "out-safetensors", "out-dcp", "out-statekit"])
def test_weights_go_where_a_model_can_lie_alone_and_its_own_calls_load_them(
    kind: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sources(tmp_path)[kind]
    assert main(["convert", str(path), str(tmp_path / target), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["state"]["schema"] == WEIGHTS and document["next_update"] == []
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    assert "load_optimizer" not in "\n".join(document["resume"])
    if "dcp" not in target:
        printed(document["resume"], {"model": model})
        assert same(model, net())
    else:
        statekit.torch.load_params(tmp_path / target, model)
        assert same(model, net())


def test_a_single_safetensors_file_is_what_its_own_reader_loads(tmp_path: Path) -> None:
    """Two names of one tensor are as `save_model` writes them; a file has no place for anything else."""
    for kind, path in sources(tmp_path).items():
        report = statekit.convert(path, tmp_path / f"{kind}-out.safetensors")
        with safe_open(tmp_path / f"{kind}-out.safetensors", "pt") as file:
            assert set(file.keys()) == set(net().state_dict())
            assert all(torch.equal(file.get_tensor(key), one) for key, one in net().state_dict().items())
        fresh = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        load_model(fresh, report.target)
        assert report.target.is_file() and same(fresh, net())
        assert ("extra/torch/epoch" in report.plan.dropped) == (kind == "keyed.pt")
    statekit.convert(tmp_path / "keyed.pt-out.safetensors", tmp_path / "again.pt")
    shared = torch.nn.Linear(3, 3, bias=False)
    torch.save({"a.weight": shared.weight.data, "b.weight": shared.weight.data}, tmp_path / "tied.pt")
    statekit.convert(tmp_path / "tied.pt", tmp_path / "tied.safetensors")
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert list(file.keys()) == ["a.weight"] and file.metadata()["b.weight"] == "a.weight"


@pytest.mark.tensorflow
def test_a_bundle_of_variables_is_what_tensorflow_loads(tmp_path: Path) -> None:
    import tensorflow as tf

    statekit.convert(sources(tmp_path)["bare.pt"], tmp_path / "there", to="tf-bundle")
    reader = tf.train.load_checkpoint(str(tmp_path / "there"))
    names = {key.replace(".", "/"): tensor for key, tensor in net().state_dict().items()}
    assert set(reader.get_variable_to_shape_map()) == set(names)
    assert all(np.array_equal(reader.get_tensor(name), tensor.numpy()) for name, tensor in names.items())
    statekit.convert(tmp_path / "there", tmp_path / "back.pt", layout="torch-weights")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True)["model"])
    assert same(model, net())


def saved(folder: Path, axis: int, optimizer: bool = False) -> dict[str, Any]:
    """Saves a network whose matrix is cut in three, as TensorFlow 1 does; returns its variables by name."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.train.get_or_create_global_step()
        with v1.variable_scope("net", use_resource=False, initializer=v1.random_normal_initializer(seed=1)):
            matrix = v1.get_variable("w", shape=(10, 6), partitioner=v1.fixed_size_partitioner(3, axis))
            bias = v1.get_variable("b", shape=(6,))
        if optimizer:
            loss = tf.reduce_sum((tf.ones((2, 10)) @ matrix + bias) ** 2)
            update = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
        session.run(v1.global_variables_initializer())
        for _ in range(3 * optimizer):
            session.run(update)
        v1.train.Saver().save(session, str(folder / "model.ckpt"), 5)
        return {"net/w": session.run(tf.convert_to_tensor(matrix)), "net/b": session.run(bias)}


@pytest.mark.tensorflow
@pytest.mark.parametrize("axis", [0, 1])
def test_a_partitioned_variable_is_whole_and_cut_again_as_it_was(axis: int, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    params = saved(tmp_path / "there", axis)
    with statekit.open(tmp_path / "there") as opened:
        assert opened.state.optimizer.schema == WEIGHTS and opened.state.params.keys() == params.keys()
        for path, value in params.items():
            tensor = opened.state.params[path]
            assert np.array_equal(tensor.read(), value)
            block = tuple(slice(1, n - 1) for n in value.shape)
            assert np.array_equal(tensor.read(block), value[block])
    statekit.convert(tmp_path / "there", tmp_path / "out.pt")
    weights = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: tuple(one.shape) for name, one in weights["model"].items()} == {
        "net.w": (10, 6),
        "net.b": (6,),
    }
    statekit.convert(tmp_path / "there", tmp_path / "neutral", to="statekit")
    statekit.convert(tmp_path / "neutral", tmp_path / "back", to="tf-bundle")
    for file in ("model.ckpt-5.index", "model.ckpt-5.data-00000-of-00001"):
        assert (tmp_path / "back" / file).read_bytes() == (tmp_path / "there" / file).read_bytes()


@pytest.mark.tensorflow
def test_slices_that_leave_a_hole_make_no_variable(tmp_path: Path) -> None:
    checkpoint = Checkpoint("tf-bundle", tmp_path, {"w": {"10 6 0,4:0,6": in_memory(np.ones((4, 6)))}})
    with pytest.raises(StateError, match=r"slices(.|\n)*24 of 60"):
        TF_WEIGHTS.decode(checkpoint, Hints())


@pytest.mark.tensorflow
def test_a_partitioned_run_keeps_its_parts_in_their_order(tmp_path: Path) -> None:
    params = saved(tmp_path, 1, optimizer=True)
    with statekit.open(tmp_path) as opened:
        parts = [opened.state.params[f"net/w/part_{i}"].read() for i in range(3)]
        moments = [opened.state.slots[f"net/w/part_{i}"]["m"].shape for i in range(3)]
    assert np.array_equal(np.concatenate(parts, 1), params["net/w"]) and moments == [(10, 2)] * 3


def objects(kind: str) -> Any:
    """Something that `tf.train.Checkpoint` keeps, with values that are drawn anew."""
    import keras
    import tensorflow as tf

    draw = tf.random.normal
    if kind == "module":
        module = tf.Module()
        module.w, module.scale = tf.Variable(draw((4, 3)), name="w"), tf.Variable(draw(()))
        module.layers = [tf.Variable(draw((3,))), tf.Variable(draw((2,)))]
        return module
    sizes = {"one": 3, "two": 2}
    layers = [keras.layers.Dense(size, name=name) for name, size in sizes.items()]
    model = keras.Sequential([keras.layers.Input((4,)), *layers], name="net")
    if kind == "compiled":
        model.compile("adam", "mse")
    return model


def variables(made: Any) -> list[Any]:
    return [variable.numpy() for variable in made.variables]


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
@pytest.mark.parametrize("kind", ["module", "keras", "compiled"])
@pytest.mark.parametrize("at", ["model", "root"])
def test_objects_of_tensorflow_2_come_and_go(kind: str, at: str, tmp_path: Path) -> None:
    import tensorflow as tf

    made = objects(kind)
    whole = tf.train.Checkpoint(made) if at == "root" else tf.train.Checkpoint(model=made)
    whole.save(str(tmp_path / "there" / "ckpt"))
    with statekit.open(tmp_path / "there") as opened:
        assert (opened.layout, opened.state.optimizer.schema) == ("tf2-weights", WEIGHTS)
        assert opened.state.counts.updates == 0, "the number counts saves"
        values = sorted(tensor.read().tobytes() for tensor in opened.state.params.values())
    weights = [one for one in variables(made) if one.dtype.kind == "f"]
    assert values == sorted(one.tobytes() for one in weights)
    statekit.convert(tmp_path / "there", tmp_path / "between.pt")
    report = statekit.convert(tmp_path / "between.pt", tmp_path / "back", to="tf2-weights-tf-bundle")
    fresh = objects(kind)
    lines = resume_lines(of_plan(report.plan, report.files), report.plan.state)
    printed(lines, {"model": fresh})
    assert all(np.array_equal(a, b) for a, b in zip(variables(fresh), variables(made), strict=True))


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_weights_from_elsewhere_are_found_by_objects_of_their_names(tmp_path: Path) -> None:
    import tensorflow as tf

    torch.save({"enc.w": torch.randn(3, 2), "b": torch.randn(4)}, tmp_path / "bare.pt")
    report = statekit.convert(tmp_path / "bare.pt", tmp_path / "there", to="tf2-weights-tf-bundle")
    model = tf.Module()
    model.enc = tf.Module()
    model.enc.w, model.b = tf.Variable(tf.zeros((3, 2))), tf.Variable(tf.zeros(4))
    printed(resume_lines(of_plan(report.plan, report.files), report.plan.state), {"model": model})
    read = torch.load(tmp_path / "bare.pt", weights_only=True)
    assert np.array_equal(model.enc.w.numpy(), read["enc.w"]) and np.array_equal(model.b.numpy(), read["b"])


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("which", ["SGD", "Adam"])
def test_objects_with_an_optimizer_that_ran_arent_weights(which: str, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    model = objects("keras")
    optimizer = getattr(keras.optimizers, which)()
    optimizer.apply([tf.ones_like(one) for one in model.trainable_variables], model.trainable_variables)
    tf.train.Checkpoint(model=model, optimizer=optimizer).save(str(tmp_path / "ckpt"))
    if which == "SGD":
        with statekit.open(tmp_path) as opened:
            assert opened.state.optimizer.kinds == (("keras_native", "SGD"),)
        return
    with statekit.open(tmp_path) as opened:
        assert opened.layout == "tf2-keras"


@pytest.mark.tensorflow
@pytest.mark.parametrize("slot", ["w/Momentum", "w/Adam", "beta1_power", "w/RMSProp_1"])
def test_variables_of_an_optimizer_arent_weights(slot: str, tmp_path: Path) -> None:
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for name in ("w", slot):
            tf.compat.v1.get_variable(name, initializer=np.ones(3, np.float32), use_resource=False)
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver().save(session, str(tmp_path / "model.ckpt"), 3)
    with pytest.raises(StatekitError):
        statekit.open(tmp_path)


def test_what_lies_beside_weights_comes_back(tmp_path: Path) -> None:
    path = sources(tmp_path)["keyed.pt"]
    statekit.convert(path, tmp_path / "there", to="statekit")
    statekit.convert(tmp_path / "there", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["epoch"] == 3 and back["state_dict"].keys() == net().state_dict().keys()


def weights_of(*names: str) -> TrainState:
    one = in_memory(np.zeros(1, np.float32))
    return TrainState(dict.fromkeys(names, one), {}, Optimizer(WEIGHTS, None, ()), Counts(0, 0), {})


def test_a_tree_takes_very_many_names_in_one_dict() -> None:
    """To copy the dict for each of them would take minutes."""
    names = [f"layer/w{i}" for i in range(100_000)]
    tree: Any = JAX_WEIGHTS.encode(weights_of(*names)).tree
    assert [f"layer/{name}" for name in tree["params"]["layer"]] == names


def test_keys_with_slashes_are_the_trees_again() -> None:
    """Haiku's are its modules' names."""
    one = in_memory(np.zeros(1, np.float32))
    tree = {"params": {"mlp/~/linear": {"w": one}, "head": {"w": one}}}
    state = JAX_WEIGHTS.decode(Checkpoint("flax", Path("x"), tree), Hints())
    assert state.params.keys() == {"mlp/~/linear/w", "head/w"}
    encoded = JAX_WEIGHTS.encode(state)
    assert encoded.tree == tree and not encoded.dropped
    with pytest.raises(StateError, match="is the path of two parameters @ a/b/c"):
        JAX_WEIGHTS.decode(Checkpoint("flax", Path("x"), {"a/b": {"c": one}, "a": {"b/c": one}}), Hints())


@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b", "a")])
def test_a_name_that_leads_through_another_is_refused_by_a_tree(names: tuple[str, str]) -> None:
    with pytest.raises(FormatError, match=r"leads through the other(.|\n)*a/b"):
        JAX_WEIGHTS.encode(weights_of(*names))


@pytest.mark.parametrize("beside", [0.5, True, torch.ones(2), "adam", [1]], ids=repr)
def test_what_is_called_optimizer_and_is_none_is_no_error_of_our_own(beside: Any, tmp_path: Path) -> None:
    torch.save({"model": net().state_dict(), "optimizer": beside}, tmp_path / "run.pt")
    assert statekit.inspect(tmp_path / "run.pt").optimizer is None


def test_it_is_said_that_there_is_no_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sources(tmp_path)["bare.pt"]
    for arguments in (["inspect", str(path)], ["convert", str(path), str(tmp_path / "out.pt")]):
        assert main(arguments) == 0
        assert "no optimizer's state to go on from" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(StateError, match=r"no optimizer state(.|\n)*load_params"):
        statekit.torch.load_optimizer(path, net().named_parameters())
    with pytest.raises(UsageError, match="no optimizer"):
        statekit.open(path, hparams={"learning_rate": 0.1})


@pytest.mark.parametrize(
    ("to", "layout"), [("hf-trainer", None), ("t5x", None), ("torch", "torch-optim"), ("deepspeed", None)]
)
def test_targets_of_runs_take_no_weights_alone(to: str, layout: str | None, tmp_path: Path) -> None:
    with pytest.raises(StatekitError, match=r"no optimizer|can't hold|only be read"):
        statekit.plan(sources(tmp_path)["bare.pt"], tmp_path / "out", to=to, layout=layout)


def test_a_run_isnt_stripped_of_its_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(UsageError, match="can't hold the state of adamw"):
        statekit.plan(tmp_path / "run.pt", tmp_path / "out.pt", layout="torch-weights")
    torch.save(
        {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters()).state_dict()},
        tmp_path / "sgd.pt",
    )
    with pytest.raises(StatekitError, match="SGD"):
        statekit.plan(tmp_path / "sgd.pt", tmp_path / "out.pt", layout="torch-weights")
    assert statekit.plan(tmp_path / "sgd.pt", tmp_path / "out.pt").target.layout == "torch-optim"


def test_ties_of_weights_stay_shared(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.nn.Linear, torch.nn.Linear]:
        first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        second.weight = first.weight
        return torch.nn.ModuleDict({"a": first, "b": second}), first, second

    model, first, _ = made()
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    with statekit.open(tmp_path / "tied.pt") as opened:
        assert list(opened.params) == ["a/weight"]
    statekit.convert(tmp_path / "tied.pt", tmp_path / "folder", to="safetensors")
    fresh, _, second = made()
    load_model(fresh, tmp_path / "folder" / "model.safetensors")
    assert torch.equal(second.weight, first.weight)


def test_several_weights_ask_for_a_key(tmp_path: Path) -> None:
    weights = net().state_dict()
    torch.save({"net": weights, "other": weights}, tmp_path / "run.pt")
    contents = statekit.inspect(tmp_path / "run.pt").contents
    assert contents is not None and "net or other" in contents and "--model-key" in contents
    with statekit.open(tmp_path / "run.pt", model_key="other") as opened:
        assert opened.state.optimizer.schema == WEIGHTS


@pytest.mark.jax
def test_trees_of_arrays_come_and_go(tmp_path: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from flax.serialization import from_bytes, to_bytes

    tree = {"dense": {"kernel": jnp.ones((4, 3)), "bias": jnp.arange(3.0)}}
    for name, whole in (("under", {"params": tree}), ("bare", tree)):
        (tmp_path / f"{name}.msgpack").write_bytes(to_bytes(whole))
        ocp.PyTreeCheckpointer().save(tmp_path / name, whole)
        for path in (tmp_path / name, tmp_path / f"{name}.msgpack"):
            report = statekit.convert(path, tmp_path / f"to-orbax-{path.name}", to="orbax")
            inspection = statekit.inspect(path)
            assert sorted(p.tensor.name for p in inspection.parameters) == ["dense/bias", "dense/kernel"]
            again = ocp.StandardCheckpointer().restore(report.target / "0" / "default", {"params": tree})
            assert np.array_equal(again["params"]["dense"]["bias"], tree["dense"]["bias"])
    statekit.convert(tmp_path / "under", tmp_path / "to.msgpack", to="flax")
    assert (
        from_bytes({"params": tree}, (tmp_path / "to.msgpack" / "checkpoint_0").read_bytes())["params"].keys()
        == tree.keys()
    )


@pytest.mark.jax
@pytest.mark.parametrize("beside", [{"velocity": {"w": 1.0}}])
def test_a_tree_with_what_may_be_an_optimizers_isnt_weights_alone(
    beside: dict[str, Any], tmp_path: Path
) -> None:
    from flax.serialization import to_bytes

    arrays = {key: {"w": {"w": np.ones(3, np.float32)}} for key in beside}
    (tmp_path / "x.msgpack").write_bytes(to_bytes({"params": {"w": np.ones(3, np.float32)}, **arrays}))
    with pytest.raises(StatekitError, match="No layout"):
        statekit.open(tmp_path / "x.msgpack")


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
def test_kerass_files_of_weights_come_and_go(tmp_path: Path) -> None:
    import keras

    keras.utils.set_random_seed(0)

    def made() -> Any:
        sizes = {"dense": 3, "dense_1": 2}  # Keras' own names count the layers of the whole process
        layers = [keras.layers.Dense(size, name=name) for name, size in sizes.items()]
        return keras.Sequential([keras.layers.Input((4,)), *layers])

    model = made()
    model.save_weights(tmp_path / "k.weights.h5")
    model.save(tmp_path / "k.keras")
    fresh = made()
    statekit.convert(tmp_path / "k.weights.h5", tmp_path / "there.weights.h5")
    fresh.load_weights(tmp_path / "there.weights.h5")
    assert all(np.array_equal(a, b) for a, b in zip(fresh.get_weights(), model.get_weights(), strict=True))
    statekit.convert(tmp_path / "k.keras", tmp_path / "there.keras")
    again = keras.saving.load_model(tmp_path / "there.keras").get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(again, model.get_weights(), strict=True))
    weights = {f"dense{'_1' * i}.{name}": torch.randn(shape) for i, shapes in enumerate(
        [{"kernel": (4, 3), "bias": (3,)}, {"kernel": (3, 2), "bias": (2,)}]
    ) for name, shape in shapes.items()}  # fmt: skip
    torch.save(weights, tmp_path / "torch.pt")
    statekit.convert(tmp_path / "torch.pt", tmp_path / "like.weights.h5", like=tmp_path / "k.weights.h5")
    fresh.load_weights(tmp_path / "like.weights.h5")
    assert all(
        np.array_equal(a, b.numpy()) for a, b in zip(fresh.get_weights(), weights.values(), strict=True)
    )


@pytest.mark.parametrize("name", ["t1", "run-2", "100", "checkpoint_7"])
def test_a_number_at_the_end_of_a_targets_name_is_no_step_of_weights(name: str, tmp_path: Path) -> None:
    """Seen red: "It decodes to another state: is 1, meant 0 @ step", as DCP takes steps from names."""
    source, target = sources(tmp_path)["bare.pt"], tmp_path / name
    statekit.convert(source, target, to="dcp")
    assert verify(source, target).passed
    with open_state(target) as opened:
        assert opened.state.counts.updates == 0


def test_mxnets_parameters_come_and_go(tmp_path: Path) -> None:
    statekit.convert(sources(tmp_path)["bare.pt"], tmp_path / "there", to="mxnet")
    statekit.convert(tmp_path / "there" / "net.params", tmp_path / "back.pt")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True)["model"])
    assert same(model, net())
