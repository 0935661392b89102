"""Maps by modules: a small network of one's own goes on in another framework, its optimizer's state with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import numpy as np
import pytest

import statekit
import statekit.maps
import statekit.torch
from statekit.cli.main import DONE, USAGE, main
from statekit.errors import FormatError, StateError, UsageError
from statekit.maps.links import carried_through
from statekit.maps.model_map import data_of, load, maps_of
from statekit.maps.modules import TargetModel
from statekit.state.exactness import Exactness
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import put

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
UPDATES = 10
IMAGE = [3, 3, 4]
"""What the convolution gives, channels last; `fc1` reads it flattened."""
SAID = {"flatten": {"fc1": IMAGE}}
LOSS = 2e-6
"""Of float32 losses, relative: two frameworks sum 36 products and fewer in other orders: 36 * 2^-24."""
rng = np.random.default_rng(5)
X = rng.normal(size=(2 * UPDATES, 8, 5, 5, 2)).astype(np.float32)
T = rng.permuted(np.tile(np.arange(48, dtype=np.int32), (2 * UPDATES, 1)), axis=1).reshape(-1, 8, 6)
"""Each word once in a batch: Keras on TensorFlow squares the parts of a row's gradient one by one."""
Y = rng.normal(size=(2 * UPDATES, 8, 3)).astype(np.float32)


class Net(torch.nn.Module):
    """Convolution, batch norm, a flattened image, an embedding, a layer norm, and a square dense layer."""

    def __init__(self, epsilon: float, batch_epsilon: float) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(2, 4, 3)
        self.bn = torch.nn.BatchNorm2d(4, eps=batch_epsilon)
        self.fc1 = torch.nn.Linear(36, 12)
        self.tok = torch.nn.Embedding(48, 8)
        self.norm = torch.nn.LayerNorm(8, eps=epsilon)
        self.fc2 = torch.nn.Linear(20, 20)
        self.head = torch.nn.Linear(20, 3)

    def forward(self, image: Any, tokens: Any) -> Any:
        image = self.bn(torch.relu(self.conv(image.permute(0, 3, 1, 2))))
        tokens = self.norm(self.tok(tokens)).mean(1)
        both = torch.cat([self.fc1(image.flatten(1)), tokens], -1)
        return self.head(torch.relu(self.fc2(both)))


pytestmark = [
    pytest.mark.torch,
    pytest.mark.jax,
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]


def torch_losses(net: Any, optimizer: Any, updates: range) -> list[float]:
    losses = []
    for i in updates:
        optimizer.zero_grad()
        loss = ((net(torch.tensor(X[i]), torch.tensor(T[i])) - torch.tensor(Y[i])) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class FlaxRun:
    """The network in Flax, trained by Optax."""

    map, epsilon, batch_epsilon = "flax:torch", 1e-6, 1e-5

    def __init__(self, kind: str) -> None:
        import flax.linen as nn
        import jax
        import optax

        class Twin(nn.Module):  # type: ignore[misc]  # its base is untyped
            @nn.compact  # type: ignore[untyped-decorator]  # flax has no types here
            def __call__(self, image: Any, tokens: Any) -> Any:
                image = nn.relu(nn.Conv(4, (3, 3), padding="VALID", name="conv")(image))
                image = nn.BatchNorm(use_running_average=False, name="bn")(image)
                image = nn.Dense(12, name="fc1")(image.reshape(image.shape[0], -1))
                tokens = nn.LayerNorm(name="norm")(nn.Embed(48, 8, name="tok")(tokens)).mean(1)
                both = nn.Dense(20, name="fc2")(jax.numpy.concatenate([image, tokens], -1))
                return nn.Dense(3, name="head")(nn.relu(both))

        self.kind, net = kind, Twin()
        rules = {
            "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
            "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
        }
        variables = jax.jit(net.init)(jax.random.key(0), X[0], T[0])
        self.params, self.stats = variables["params"], variables["batch_stats"]
        self.optimizer = rules[kind]()
        self.state = self.optimizer.init(self.params)

        def loss_of(params: Any, stats: Any, i: Any) -> Any:
            image, tokens, wanted = (jax.numpy.asarray(all_)[i] for all_ in (X, T, Y))
            out, new = net.apply(
                {"params": params, "batch_stats": stats}, image, tokens, mutable=["batch_stats"]
            )
            return ((out - wanted) ** 2).mean(), new["batch_stats"]

        def step(params: Any, stats: Any, state: Any, i: Any) -> Any:
            (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, i)
            updates, state = self.optimizer.update(grads, state, params)
            return loss, optax.apply_updates(params, updates), stats, state

        self.step: Callable[..., Any] = step
        self.jitted = jax.jit(step)

    def losses(self, updates: range) -> list[float]:
        losses = []
        for i in updates:
            loss, self.params, self.stats, self.state = self.jitted(self.params, self.stats, self.state, i)
            losses.append(float(loss))
        return losses

    def save(self, folder: Path) -> Path:
        """Saves msgpack or Orbax."""
        tree = {"params": self.params, "batch_stats": self.stats, "opt_state": self.state, "step": UPDATES}
        if self.kind == "adafactor":
            from flax import serialization

            (folder / "run.msgpack").write_bytes(serialization.to_bytes(tree))
            return folder / "run.msgpack"
        import orbax.checkpoint

        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "run", tree)
        return folder / "run"

    def statistics(self) -> Mapping[str, Any]:
        return {"running_mean": self.stats["bn"]["mean"], "running_var": self.stats["bn"]["var"]}

    def go_on(self, path: Path, updates: range) -> list[float]:
        import jax
        import jax.numpy as jnp

        import statekit.jax

        tree = {**self.params, "bn": {**self.params["bn"], **self.stats["bn"]}}
        loaded = statekit.jax.load_params(path, tree, map="torch:flax", config=SAID)
        self.stats = {"bn": {name: loaded["bn"].pop(name) for name in ("mean", "var")}}
        self.params = loaded
        rate = jnp.float32(1e-2)
        self.optimizer, self.state = statekit.jax.load_optimizer(
            path, self.params, learning_rate=rate, map="torch:flax", config=SAID
        )
        self.jitted = jax.jit(self.step)
        return self.losses(updates)


class KerasRun:
    """The network in Keras."""

    map, epsilon, batch_epsilon = "keras:torch", 1e-3, 1e-3

    def __init__(self, kind: str) -> None:
        import keras

        keras.utils.set_random_seed(1)
        keras.backend.clear_session()
        layers = keras.layers
        pixels, words = keras.Input((5, 5, 2)), keras.Input((6,), dtype="int32")
        image = layers.Conv2D(4, 3, activation="relu", name="conv")(pixels)
        image = layers.Flatten()(layers.BatchNormalization(name="bn")(image))
        image = layers.Dense(12, name="fc1")(image)
        tokens = layers.LayerNormalization(name="norm")(layers.Embedding(48, 8, name="tok")(words))
        both = layers.Concatenate()([image, layers.GlobalAveragePooling1D()(tokens)])
        both = layers.Dense(20, activation="relu", name="fc2")(both)
        self.net, self.kind = keras.Model([pixels, words], layers.Dense(3, name="head")(both)), kind
        optimizers = keras.optimizers
        self.compile(
            optimizers.AdamW(1e-2, weight_decay=0.1) if kind == "adamw" else optimizers.Adafactor(1e-2)
        )

    def compile(self, optimizer: Any) -> None:
        self.net.compile(optimizer=optimizer, loss="mse", jit_compile=False)

    def losses(self, updates: range) -> list[float]:
        losses = []
        for i in updates:
            self.net.reset_metrics()
            losses.append(float(self.net.train_on_batch([X[i], T[i]], Y[i])))
        return losses

    def save(self, folder: Path) -> Path:
        """Saves a whole model or weights."""
        path = folder / ("run.keras" if self.kind == "adamw" else "run.weights.h5")
        (self.net.save if self.kind == "adamw" else self.net.save_weights)(path)
        return path

    def statistics(self) -> Mapping[str, Any]:
        layer = self.net.get_layer("bn")
        return {"running_mean": layer.moving_mean.numpy(), "running_var": layer.moving_variance.numpy()}

    def go_on(self, path: Path, updates: range) -> list[float]:
        import statekit.tensorflow

        statekit.tensorflow.load_params(path, self.net, map="torch:keras", config=SAID)
        self.compile(statekit.tensorflow.load_optimizer(path, self.net, 1e-2, map="torch:keras", config=SAID))
        return self.losses(updates)


RUNS: Mapping[str, type[FlaxRun | KerasRun]] = {"flax": FlaxRun, "keras": KerasRun}
RULES = [
    (r"conv/weight$", ["NONE"] * 4),
    (r"(fc1|fc2|head|tok)/weight$", ["ROW", "COLUMN"]),
    (r"", ["NONE"]),
]


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


def off(losses: list[float], recorded: list[float]) -> float:
    return float(np.max(np.abs(np.array(losses) / np.array(recorded) - 1)))


@pytest.mark.parametrize(
    "name", [*map(slow, ("flax-adamw", "keras-adafactor")), "flax-adafactor", "keras-adamw"]
)
def test_a_network_of_ones_own_goes_on_in_torch_with_the_same_losses(name: str, tmp_path: Path) -> None:
    system, kind = name.split("-")
    run = RUNS[system](kind)
    run.losses(range(UPDATES))
    path, statistics = run.save(tmp_path), {n: np.array(one) for n, one in run.statistics().items()}
    recorded = run.losses(range(UPDATES, 2 * UPDATES))

    net = Net(run.epsilon, run.batch_epsilon)
    still = torch.optim.SGD(net.parameters(), lr=0.0)
    statekit.torch.load_params(path, net, map=run.map, config={"flatten": {}})
    assert off(torch_losses(net, still, range(UPDATES, UPDATES + 1)), recorded[:1]) > 1e3 * LOSS  # the seed
    statekit.torch.load_params(path, net, map=run.map, config=SAID)
    for tensor, array in statistics.items():
        np.testing.assert_array_equal(getattr(net.bn, tensor).numpy(), array)
    said: dict[str, Any] = {"weight_decay_rate": 0.1} if name == "flax-adamw" else {}  # Optax stores none
    optimizer = statekit.torch.load_optimizer(
        path, net.named_parameters(), lr=1e-2, map=run.map, config=SAID, **said
    )
    assert off(torch_losses(net, optimizer, range(UPDATES, 2 * UPDATES)), recorded) <= LOSS


@pytest.mark.parametrize(
    "name", [*map(slow, ("flax-adamw", "flax-adafactor", "keras-adafactor")), "keras-adamw"]
)
def test_a_network_of_ones_own_goes_on_from_torch_with_the_same_losses(name: str, tmp_path: Path) -> None:
    system, kind = name.split("-")
    run = RUNS[system](kind)
    torch.manual_seed(0)
    net = Net(run.epsilon, run.batch_epsilon)
    named = list(net.named_parameters())
    optimizer = (
        statekit.torch.AdamW(
            named, lr=1e-2, weight_decay_rate=0.1, variant="optax" if system == "flax" else "keras"
        )
        if kind == "adamw"
        else statekit.torch.Adafactor(named, lr=1e-2, factor_map=RULES)
    )
    torch_losses(net, optimizer, range(UPDATES))
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    recorded = torch_losses(net, optimizer, range(UPDATES, 2 * UPDATES))
    assert off(run.go_on(tmp_path / "run.pt", range(UPDATES, 2 * UPDATES)), recorded) <= LOSS


# What names and shapes leave open is told by the model that goes on, or asked for.


def state_of(shapes: Mapping[str, tuple[int, ...]], **rules: Rule) -> TrainState:
    """Returns a state of Adafactor whose every value is its place, factored by rules."""
    params, slots = {}, {}
    for i, (path, shape) in enumerate(shapes.items()):
        values = np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1000 * i
        params[path] = in_memory(values)
        rule = rules.get(path.replace("/", "_"))
        slots[path] = (
            {"v": in_memory(values)}
            if rule is None
            else {
                "v_row": in_memory(values.mean(rule.dims(Axis.COLUMN))),
                "v_col": in_memory(values.mean(rule.dims(Axis.ROW))),
            }
        )
    full = {path: Rule((Axis.NONE,) * len(shape), "given") for path, shape in shapes.items()}
    full |= {path: rules[path.replace("/", "_")] for path in shapes if path.replace("/", "_") in rules}
    return TrainState(
        params, slots, Optimizer("adafactor", "t5x", (Group(tuple(shapes)),)), Counts(1, 1), full
    )


FLAX = {
    "conv/kernel": (3, 3, 2, 4), "conv/bias": (4,), "fc/kernel": (24, 5), "fc/bias": (5,), "tok/embedding": (6, 5),
    "norm/scale": (5,), "norm/bias": (5,),
}  # fmt: skip
ROWS = Rule((Axis.ROW, Axis.COLUMN), "given")


def test_rows_of_a_flattened_image_come_in_the_other_order_with_their_factored_slots_and_back_to_the_bit() -> (
    None
):
    state = state_of(FLAX, fc_kernel=ROWS)
    said = {"flatten": {"fc": [2, 3, 4]}}
    there = load("flax:torch", said).apply(state).state
    before, after = state.params["fc/kernel"].read(), there.params["fc/weight"].read()
    moved = before.reshape(2, 3, 4, 5).transpose(2, 0, 1, 3).reshape(24, 5).T
    np.testing.assert_array_equal(after, moved)
    assert there.rules["fc/weight"].axes == (Axis.COLUMN, Axis.ROW)
    np.testing.assert_array_equal(there.slots["fc/weight"]["v_row"].read(), moved.mean(0))
    np.testing.assert_array_equal(there.slots["fc/weight"]["v_col"].read(), moved.mean(1))
    assert there.params["conv/weight"].shape == (4, 2, 3, 3)
    back = load("torch:flax", {**said, "kinds": {"tok": "embedding", "fc": "dense"}}).apply(there).state
    assert (back.rules, back.optimizer) == (state.rules, state.optimizer)
    for path, slots in state.slots.items():
        for name, slot in {"": state.params[path], **slots}.items():
            other = back.slots[path][name] if name else back.params[path]
            assert other.read().tobytes() == slot.read().tobytes()


def test_a_dense_layer_behind_convolutions_is_asked_for_its_image() -> None:
    with pytest.raises(UsageError, match="flattened image") as error:
        load("flax:torch").apply(state_of(FLAX))
    assert "flatten={" in str(error.value)
    one = load("flax:torch", {"flatten": {"fc": [2, 3, 5]}})
    with pytest.raises(StateError, match="reads 24 values"):
        one.apply(state_of(FLAX))
    with pytest.raises(StateError, match="is no dense module"):
        load("flax:torch", {"flatten": {"norm": [1, 5]}}).apply(state_of(FLAX))
    without_images = {path: shape for path, shape in FLAX.items() if "conv" not in path}
    assert load("flax:torch").apply(state_of(without_images)).state.params["fc/weight"].shape == (5, 24)
    for wrong in ({"fc": 3}, {"fc": [24]}, [1], {"fc": [True, 24]}):
        with pytest.raises(UsageError, match="flatten"):
            load("flax:torch", {"flatten": wrong})


def test_a_weight_of_rank_2_is_dense_or_an_embedding_as_the_model_has_it_or_as_was_said() -> None:
    state = (
        load("flax:torch", {"flatten": {}})
        .apply(state_of({"tok/embedding": (5, 5), "out/kernel": (5, 5)}))
        .state
    )
    one = load("torch:flax")
    with pytest.raises(UsageError, match="tok: dense or embedding; out: dense or embedding"):
        one.apply(state)
    there = TargetModel(frozenset({"tok/embedding", "out/kernel"}))
    for known in (
        replace(one, model=there),
        load("torch:flax", {"kinds": {"tok": "embedding", "*": "dense"}}),
    ):
        assert list(known.apply(state).state.params) == ["tok/embedding", "out/kernel"]
    with pytest.raises(StateError, match="expected one of dense, conv1d"):
        load("torch:flax", {"kinds": {"tok": "table", "*": "dense"}}).apply(state)
    with pytest.raises(StateError, match="no such module"):
        load("torch:flax", {"kinds": {"tik": "embedding", "*": "dense"}}).apply(state)


def test_modules_that_no_rule_knows_are_named_and_a_tensor_of_ones_own_may_stay_as_it_is() -> None:
    state = state_of(
        {"rnn/recurrent_kernel": (4, 4), "up/ConvTranspose_0/kernel": (3, 3, 4, 4), "scale": (2,)}
    )
    with pytest.raises(StateError) as error:
        load("flax:torch").apply(state)
    assert {place for _, place in error.value.faults} == {"rnn", "up/ConvTranspose_0"}
    kept = {"kinds": {"rnn": "same", "up/*": "same", "scale": "same"}}
    assert list(load("flax:torch", kept).apply(state).state.params) == list(state.params)


def test_a_transposed_convolution_of_the_model_isnt_taken_for_a_convolution() -> None:
    state = state_of({"up/kernel": (3, 3, 4, 4)})
    there = TargetModel(frozenset({"up/weight"}), {"up": "ConvTranspose2d"})
    with pytest.raises(StateError, match="is a ConvTranspose2d in the model"):
        replace(load("flax:torch"), model=there).apply(state)
    taken = load("flax:torch").apply(state)
    assert taken.state.assumptions == (
        "Names don't tell convolutions from transposed ones; taken for convolutions: up.",
    )
    assert {one.exactness for one in taken.mapped} == {Exactness.BITWISE}


def attention(query: Any, key: Any, value: Any, x: Any) -> Any:
    """Returns what torch makes of queries, keys and values by heads, joined again."""
    each = [part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (query, key, value)]
    return torch.nn.functional.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)


@pytest.mark.jax
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("of", ["linen", "nnx"])
def test_attention_of_flax_becomes_linear_layers_that_give_the_same_and_comes_back(
    of: str, biased: bool
) -> None:
    jax = pytest.importorskip("jax")
    x = np.random.default_rng(0).normal(size=(2, 3, 6)).astype(np.float32)
    if of == "linen":
        nn = pytest.importorskip("flax.linen")
        module = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, use_bias=biased)
        tree = module.init(jax.random.key(0), x)["params"]
        expected = module.apply({"params": tree}, x)
    else:
        nnx = pytest.importorskip("flax.nnx")
        module = nnx.MultiHeadAttention(
            num_heads=2, in_features=6, qkv_features=8, use_bias=biased, decode=False, rngs=nnx.Rngs(0)
        )
        expected = module(x)
        tree = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    tree = {"block": {"attn": tree}, "conv": {"kernel": np.ones((2, 4, 6), np.float32)}}
    there = load("flax:torch").apply(tree)
    assert there["conv"]["weight"].shape == (6, 4, 2)
    layers: dict[str, Any] = {}
    for name, leaves in there["block"]["attn"].items():
        weight = torch.from_numpy(np.array(leaves["weight"]))
        layers[name] = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=biased)
        layers[name].load_state_dict({one: torch.from_numpy(np.array(leaf)) for one, leaf in leaves.items()})
    out = layers.pop("out")
    made = out(attention(**layers, x=torch.from_numpy(x))).detach().numpy()
    np.testing.assert_allclose(made, expected, atol=1e-6)
    kinds = {"*/query": "to_heads", "*/key": "to_heads", "*/value": "to_heads", "*/out": "from_heads"}
    with pytest.raises(UsageError, match="num_heads"):
        load("torch:flax", {"kinds": kinds}).apply(there)
    back = load("torch:flax", {"kinds": kinds, "num_heads": 2}).apply(there)
    for path, leaf in jax.tree.leaves_with_path(tree):
        (other,) = [one for place, one in jax.tree.leaves_with_path(back) if place == path]
        np.testing.assert_array_equal(other, leaf)


def test_queries_without_biases_arent_taken_for_convolutions_and_what_shapes_leave_open_is_asked_for() -> (
    None
):
    keras = {f"mha/{n}/kernel": (8, 2, 4) for n in ("query", "key", "value")} | {
        "mha/attention_output/kernel": (2, 4, 8)
    }
    there = load("keras:torch").apply(state_of(keras)).state
    assert {param.shape for param in there.params.values()} == {(8, 8)}
    assert not there.assumptions
    grouped = keras | {f"mha/{n}/kernel": (8, 1, 4) for n in ("key", "value")}
    assert (
        "mha/attention_output/weight"
        in load("keras:torch", {"flatten": {}}).apply(state_of(keras)).state.params
    )
    there = load("keras:torch").apply(state_of(grouped)).state
    assert there.params["mha/key/weight"].shape == (4, 8)
    # Of one head's width here and another there: no attention's.
    uneven = keras | {"mha/attention_output/kernel": (2, 3, 8)}
    open_ = {"proj/kernel": (8, 2, 4)}
    for shapes, name in ((uneven, "mha/query"), (open_, "proj")):
        with pytest.raises(UsageError, match=f"{name}: conv1d or to_heads or from_heads"):
            load("keras:torch").apply(state_of(shapes))
    assert load("keras:torch", {"kinds": {"proj": "to_heads"}}).apply(state_of(open_)).state.params[
        "proj/weight"
    ].shape == (8, 8)
    model = TargetModel(frozenset({"proj/weight"}), {"proj": "Conv1d"})
    there = replace(load("keras:torch"), model=model).apply(state_of(open_)).state
    assert there.params["proj/weight"].shape == (4, 2, 8)


def test_statistics_beside_the_parameters_go_along_and_what_the_other_side_lacks_is_said() -> None:
    state = state_of({"bn/weight": (4,), "bn/bias": (4,)})
    buffers = {name: in_memory(np.ones(4)) for name in ("bn.running_mean", "bn.running_var")}
    count = {"bn.num_batches_tracked": in_memory(np.array(3))}
    result = load("torch:keras").apply(replace(state, extra={"buffers": {**buffers, **count}})).state
    assert list(result.params) == ["bn/gamma", "bn/beta", "bn/moving_mean", "bn/moving_variance"]
    assert "num_batches_tracked" in result.assumptions[0]


@pytest.mark.parametrize("place", [("optax", "tree"), ("jax_weights",)])
def test_flax_statistics_go_through_a_renaming_and_a_map(place: tuple[str, ...]) -> None:
    state = state_of({"BatchNorm_0/scale": (4,), "BatchNorm_0/bias": (4,)})
    ones = in_memory(np.ones(4))
    extra = put({}, (*place, "batch_stats"), {"BatchNorm_0": {"mean": ones, "var": ones}})
    maps = maps_of("flax:torch", rename={"^BatchNorm_0/": "bn/"})
    after, mapped = carried_through(replace(state, extra=extra), maps)
    paths = ["bn/weight", "bn/bias", "bn/running_mean", "bn/running_var"]
    assert [*after.params] == paths == [one.target for one in mapped]
    assert mapped[0].sources == ("BatchNorm_0/scale",)


def test_whatever_stays_behind_beside_the_parameters_is_said_with_each_reason() -> None:
    state = state_of({"bn/weight": (4,), "bn/bias": (4,), "bn/running_var": (4,)})
    ones, count = in_memory(np.ones(4)), in_memory(np.array(3))
    buffers = {
        "bn.running_mean": ones,
        "bn.running_var": ones,
        "bn.num_batches_tracked": count,
        "bn.kind": "sync",
    }
    result = load("torch:keras").apply(replace(state, extra={"buffers": buffers})).state
    assert [said.removeprefix("The map leaves behind ") for said in result.assumptions] == [
        "buffers/bn/running_var (a parameter has its name).",
        "buffers/bn.kind (no tensor of a module).",
        "bn/num_batches_tracked (the other side counts no batches; torch.nn.BatchNorm reads it only with "
        "momentum=None).",
    ]


def test_live_arrays_go_by_modules_too() -> None:
    tree = {"fc": {"kernel": np.arange(6.0).reshape(2, 3), "bias": np.zeros(3)}}
    there = statekit.maps.load("flax:torch").apply(tree)
    np.testing.assert_array_equal(there["fc"]["weight"], tree["fc"]["kernel"].T)
    with pytest.raises(StateError, match="no kind"):
        statekit.maps.load("flax:torch").apply({1: np.ones(3)})  # type: ignore[dict-item]


@pytest.mark.jax
def test_a_live_state_of_nnx_goes_as_its_arrays_do() -> None:
    nnx = pytest.importorskip("flax.nnx")
    jax = pytest.importorskip("jax")
    module = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.LayerNorm(4, rngs=nnx.Rngs(0)))
    state = nnx.state(module, nnx.Param)
    there = statekit.maps.load("flax:torch").apply(state)
    assert jax.tree.structure(there) == jax.tree.structure(
        statekit.maps.load("flax:torch").apply(nnx.to_pure_dict(state))
    )
    assert all(isinstance(one, jax.Array) for one in jax.tree.leaves(there))
    np.testing.assert_array_equal(there["layers"]["0"]["weight"], module.layers[0].kernel.get_value().T)


def test_modules_of_other_names_are_named_once(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = statekit.torch.AdamW(net.named_parameters(), lr=0.1)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    other = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "last": torch.nn.Linear(3, 2)})
    names = {"first": "0", "last": "1"}
    statekit.torch.load_params(tmp_path / "run.pt", other, names=names)
    assert torch.equal(other.state_dict()["last.weight"], net.state_dict()["1.weight"])
    statekit.torch.load_optimizer(tmp_path / "run.pt", other.named_parameters(), names=names)
    with pytest.raises(UsageError, match="is no parameter of the checkpoint"):
        statekit.torch.load_params(tmp_path / "run.pt", other, names={"first": "2"})


def test_the_command_line_shows_and_takes_modules(tmp_path: Path, capsys: Any) -> None:
    assert main(["maps", "keras:torch"]) == DONE
    assert "flattened image" in capsys.readouterr().out
    wrong = json.loads(json.dumps(data_of("keras:torch")[0]))
    wrong["modules"][0]["parameters"][0]["operations"] = [{"op": "permute", "order": [0, 1, 2]}]
    (tmp_path / "mine.json").write_text(json.dumps(wrong))
    with pytest.raises(FormatError, match="for rank 2"):
        load(str(tmp_path / "mine.json"))
    assert (
        main(["convert", str(tmp_path / "none"), "x.pt", "--map", "keras:torch", "--config", "fuse=1"])
        == USAGE
    )
    assert "flatten, kinds" in capsys.readouterr().err
