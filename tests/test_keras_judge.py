"""Keras itself loads what statekit wrote and goes on bit for bit; statekit.tensorflow goes on from Keras' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.tensors.tensor import Array

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]

RATE = 0.01


def model() -> Any:
    """Returns a small model with a square, layers of equal shapes, and statistics that no optimizer moves."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), name="inputs")
    x = keras.layers.Dense(4, name="second_by_name")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dense(4, name="first_by_name")(x)
    return keras.Model(inputs, keras.layers.Dense(2, use_bias=False, name="out")(x), name="net")


def optimizer(kind: str) -> Any:
    import keras

    import statekit.tensorflow

    schedule = keras.optimizers.schedules.CosineDecay(RATE, 10)
    made: dict[str, Callable[[], Any]] = {
        "adafactor": lambda: keras.optimizers.Adafactor(RATE),
        "lamb": lambda: keras.optimizers.Lamb(RATE, use_ema=True),
        "adamw": lambda: keras.optimizers.AdamW(schedule, amsgrad=True, clipnorm=1.0),
        "statekit": lambda: statekit.tensorflow.Adafactor(RATE, beta1=0.9, min_dim_size_to_factor=4),
    }
    return made[kind]()


def move(net: Any, optimizer: Any, updates: int) -> None:
    """Makes updates with gradients that follow from the number of the update."""
    import tensorflow as tf

    for _ in range(updates):
        random = np.random.default_rng(int(optimizer.iterations))
        grads = [random.normal(size=v.shape).astype(np.float32) for v in net.trainable_variables]
        optimizer.apply([tf.constant(grad) for grad in grads], net.trainable_variables)


def values(net: Any, optimizer: Any) -> list[Array]:
    return [variable.numpy() for variable in (*net.variables, *optimizer.variables)]


def same(left: list[Array], right: list[Array]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@pytest.mark.parametrize("kind", ["adafactor", "lamb", "adamw", "statekit"])
def test_keras_goes_on_from_what_statekit_wrote(kind: str, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    net, keras_optimizer = model(), optimizer(kind)
    net.compile(keras_optimizer, "mse", run_eagerly=True)
    move(net, keras_optimizer, 3)
    net.save(tmp_path / "a.keras")
    net.save_weights(tmp_path / "a.weights.h5")
    tf.train.Checkpoint(model=net, optimizer=keras_optimizer).save(str(tmp_path / "a" / "ckpt"))
    start = values(net, keras_optimizer)
    move(net, keras_optimizer, 2)
    after = values(net, keras_optimizer)
    said = {"use_ema": True} if kind == "lamb" else {}

    def goes_on(loaded: Any, theirs: Any) -> None:
        assert same(values(loaded, theirs), start)
        move(loaded, theirs, 2)
        assert same(values(loaded, theirs), after)

    def fresh() -> tuple[Any, Any]:
        loaded, theirs = model(), optimizer(kind)
        loaded.compile(theirs, "mse", run_eagerly=True)
        theirs.build(loaded.trainable_variables)
        return loaded, theirs

    def restored(folder: Path) -> tuple[Any, Any]:
        loaded, theirs = fresh()
        prefix = str(next(folder.glob("*.index")).with_suffix(""))
        tf.train.Checkpoint(model=loaded, optimizer=theirs).restore(prefix).assert_existing_objects_matched()
        return loaded, theirs

    convert(plan(tmp_path / "a.keras", tmp_path / "b.keras"))
    loaded = keras.models.load_model(tmp_path / "b.keras")
    goes_on(loaded, loaded.optimizer)

    convert(plan(tmp_path / "a.weights.h5", tmp_path / "b.weights.h5", hints=Hints(said)))
    loaded, theirs = fresh()
    loaded.load_weights(tmp_path / "b.weights.h5")
    goes_on(loaded, theirs)

    convert(plan(tmp_path / "a", tmp_path / "b.ckpt.d"))
    goes_on(*restored(tmp_path / "b.ckpt.d"))

    layout = "tf2-statekit" if kind == "statekit" else "tf2-keras"
    convert(plan(tmp_path / "a.keras", tmp_path / "c.ckpt.d", layout=layout))
    goes_on(*restored(tmp_path / "c.ckpt.d"))


@pytest.mark.parametrize(
    ("kind", "form"), [("lamb", "a.keras"), ("statekit", "a.weights.h5"), ("lamb", "a")], ids=str
)
def test_statekit_goes_on_from_what_keras_wrote(kind: str, form: str, tmp_path: Path) -> None:
    import tensorflow as tf

    import statekit.tensorflow

    net, keras_optimizer = model(), optimizer(kind)
    net.compile(keras_optimizer, "mse", run_eagerly=True)
    move(net, keras_optimizer, 2)
    if form == "a":
        tf.train.Checkpoint(model=net, optimizer=keras_optimizer).save(str(tmp_path / "a" / "ckpt"))
    elif form == "a.keras":
        net.save(tmp_path / form)
    else:
        net.save_weights(tmp_path / form)
    loaded = model()
    for variable in loaded.variables:
        variable.assign(variable + 1.0)
    said = {"use_ema": True} if kind == "lamb" and form == "a.weights.h5" else None
    silent = kind == "statekit" and form != "a.keras"
    more: dict[str, Any] = {"variant": "t5x", "beta1": 0.9, "min_dim_size_to_factor": 4} if silent else {}
    statekit.tensorflow.load_params(tmp_path / form, loaded, hparams=said)
    resumed = statekit.tensorflow.load_optimizer(tmp_path / form, loaded, hparams=said, **more)
    assert int(resumed.iterations) == 2
    for left, right in zip(net.variables, loaded.variables, strict=True):
        assert np.array_equal(left, right)
    if kind == "statekit":
        assert same(
            [v.numpy() for part in keras_optimizer.slots().values() for v in part.values()],
            [v.numpy() for part in resumed.slots().values() for v in part.values()],
        )
    else:
        for path, part in resumed.averages().items():
            number = [variable.path for variable in net.trainable_variables].index(path)
            assert np.array_equal(part["average"], keras_optimizer._model_variables_moving_average[number])


def test_groups_that_arent_in_the_models_order_are_restored_by_tensorflow(tmp_path: Path) -> None:
    import tensorflow as tf

    import statekit.tensorflow

    groups = [{"paths": ["first_by_name/kernel", "norm/gamma"], "learning_rate_factor": 0.3}]

    def fresh() -> tuple[Any, Any]:
        net = model()
        drop_in = statekit.tensorflow.Adafactor(RATE, beta1=0.9, min_dim_size_to_factor=4, groups=groups)
        drop_in.build(net.trainable_variables)
        net.compile(drop_in, "mse")
        return net, drop_in

    net, drop_in = fresh()
    move(net, drop_in, 2)
    net.save(tmp_path / "a.keras")
    tf.train.Checkpoint(model=net, optimizer=drop_in).save(str(tmp_path / "a" / "ckpt"))
    for form in ("a.keras", "a"):
        written = tmp_path / f"{form}.ckpt.d"
        convert(plan(tmp_path / form, written, layout="tf2-statekit"))
        loaded, theirs = fresh()
        prefix = str(next(written.glob("*.index")).with_suffix(""))
        tf.train.Checkpoint(model=loaded, optimizer=theirs).restore(prefix).assert_existing_objects_matched()
        assert same(values(loaded, theirs), values(net, drop_in)), form


def test_the_layers_variables_are_called_as_keras_calls_them() -> None:
    import keras

    from statekit.converters.layouts.keras.variables import snake_case

    text = (
        resources.files("statekit.converters.layouts.keras")
        .joinpath("layers.json")
        .read_text(encoding="utf-8")
    )
    known = json.loads(text)
    layers = keras.layers
    made = [
        layers.Dense(2), layers.EinsumDense("ab,bc->ac", 2, bias_axes="c"), layers.Embedding(3, 2), layers.PReLU(),
        layers.Conv1D(2, 1), layers.Conv2D(2, 1), layers.Conv3D(2, 1), layers.DepthwiseConv1D(1),
        layers.Conv1DTranspose(2, 1), layers.Conv2DTranspose(2, 1), layers.Conv3DTranspose(2, 1),
        layers.DepthwiseConv2D(1), layers.SeparableConv1D(2, 1), layers.SeparableConv2D(2, 1),
        layers.BatchNormalization(), layers.LayerNormalization(), layers.GroupNormalization(1),
        layers.RMSNormalization(),
    ]  # fmt: skip
    seen = set()
    for layer in made:
        kind = snake_case(type(layer).__name__)
        rank = next((int(c) for c in kind if c.isdigit()), 0) + 2
        layer.build((None, *([4] * (rank - 1))))
        names = [v.name for v in (*layer._trainable_variables, *layer._non_trainable_variables)]
        assert names == known["variables"][kind][0], kind
        still = [v.name for v in layer._non_trainable_variables]
        assert not still or still == known["not_trained"]
        seen.add(kind)
    attention = layers.MultiHeadAttention(2, 4)
    attention.build((None, 4, 4), (None, 4, 4))
    order = [layer.name for layer in attention._flatten_layers(include_self=False) if layer.variables]
    assert order == ["query", "key", "value", "attention_output"]
    assert [name.removesuffix("_dense") for name in known["children"]["multi_head_attention"]] == [
        "query", "key", "value", "output",
    ]  # fmt: skip
    both = layers.Bidirectional(layers.LSTM(2))
    both.build((None, 4, 4))
    variable_names = [v.path.split("/")[-1] for v in both.forward_layer.weights]
    assert variable_names == known["variables"]["cell"][0]
    assert known["variables"].keys() - seen == {
        "cell",
        "query_dense",
        "key_dense",
        "value_dense",
        "output_dense",
    }


def test_a_model_whose_attributes_are_a_foreign_states_paths_loads_it(tmp_path: Path) -> None:
    import keras
    from test_keras_files import foreign, write

    from statekit.converters.layouts.keras.layout import LAYOUT
    from statekit.state.train_state import Axis

    @keras.saving.register_keras_serializable()
    class Outer(keras.Model):  # type: ignore[misc]  # its base is untyped
        def __init__(self) -> None:
            super().__init__()
            self.net = Inner()

        def call(self, inputs: Any) -> Any:
            return self.net(inputs)

    class Inner(keras.layers.Layer):  # type: ignore[misc]  # its base is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

    state = foreign((4, 3), (Axis.ROW, Axis.COLUMN), learning_rate=RATE)
    write(LAYOUT.encode(state), tmp_path / "f.weights.h5")
    outer = Outer()
    outer(np.zeros((1, 4), np.float32))
    keras_optimizer = keras.optimizers.Adafactor(0.5)
    outer.compile(keras_optimizer)
    keras_optimizer.build(outer.trainable_variables)
    outer.load_weights(tmp_path / "f.weights.h5")
    for variable, tensor in zip(outer.trainable_variables, state.params.values(), strict=True):
        assert np.array_equal(variable, tensor.read())
    assert int(keras_optimizer.iterations) == 5 and float(keras_optimizer.learning_rate) == np.float32(RATE)
    slots = state.slots["net/dense/kernel"]
    assert np.array_equal(keras_optimizer._r[0], slots["v_row"].read()) and np.array_equal(
        keras_optimizer._c[0], slots["v_col"].read()
    )
    with open_state(tmp_path / "f.weights.h5") as opened:
        assert list(opened.state.params) == list(state.params)


def test_a_file_of_the_model_says_where_its_parameters_lie_or_what_doesnt_fit(tmp_path: Path) -> None:
    """Without it, what came from elsewhere lay by its paths, where a Functional model finds nothing."""
    import keras
    import tensorflow as tf

    from statekit.errors import StateError, UsageError

    net, keras_optimizer = model(), optimizer("adafactor")
    net.compile(keras_optimizer, "mse")
    move(net, keras_optimizer, 2)
    tf.train.Checkpoint(model=net, optimizer=keras_optimizer).save(str(tmp_path / "a" / "ckpt"))
    fresh, theirs = model(), optimizer("adafactor")
    fresh.save(tmp_path / "fresh.keras")
    fresh.compile(theirs, "mse")
    theirs.build(fresh.trainable_variables)
    source, like = tmp_path / "a", tmp_path / "fresh.keras"
    planned = plan(source, tmp_path / "b.weights.h5")
    assert not any(entry.name.startswith("layers/") for entry in planned.entries)
    convert(planned)
    with pytest.warns(UserWarning, match="Skipping"), pytest.raises(ValueError, match="could not be loaded"):
        fresh.load_weights(tmp_path / "b.weights.h5")
    convert(plan(source, tmp_path / "c.weights.h5", like=like))
    fresh.load_weights(tmp_path / "c.weights.h5")
    assert same(values(fresh, theirs), values(net, keras_optimizer))
    again = plan(tmp_path / "c.weights.h5", tmp_path / "d.keras", like=like)
    assert again.options["like"] == "fresh.keras"

    inputs = keras.Input((4,))
    other = keras.Model(inputs, keras.layers.Dense(3, name="out")(inputs))
    other.save(tmp_path / "other.keras")
    with pytest.raises(StateError) as refused:
        plan(source, tmp_path / "e.keras", like=tmp_path / "other.keras")
    assert {place.rpartition("norm/")[2] for _, place in refused.value.faults} >= {"gamma", "moving_mean"}
    still = model()
    still.get_layer("out").trainable = False
    still.save(tmp_path / "still.keras")
    with pytest.raises(StateError, match="doesn't train it @ out/kernel"):
        plan(source, tmp_path / "e.keras", like=tmp_path / "still.keras")
    with pytest.raises(UsageError, match="needs no file of the model"):
        plan(source, tmp_path / "e.safetensors", like=like)
