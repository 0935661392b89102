"""Whatever a framework's users call parameters is taken by the loaders, or refused by what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.errors import StatekitError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]
SHAPES = {"a": {"kernel": (4, 3), "bias": (3,)}, "b": {"kernel": (3, 2), "bias": (2,)}}


@pytest.fixture(scope="module")
def torch_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("torch") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, path)
    return model, path


IN_TORCH: Mapping[str, Callable[[Any], Any]] = {
    "named_parameters": lambda model: model.named_parameters(),
    "a list of pairs": lambda model: list(model.named_parameters()),
    "a dict": lambda model: dict(model.named_parameters()),
    "the model": lambda model: model,
    "a compiled model's names": lambda model: [(f"_orig_mod.{n}", p) for n, p in model.named_parameters()],
    "parallel": lambda model: __import__("torch").nn.DataParallel(module=model),
}
NOT_IN_TORCH: Mapping[str, Callable[[Any], Any]] = {
    "parameters": lambda model: model.parameters(),
    "groups": lambda model: [{"params": list(model.parameters())}],
    "a parameter": lambda model: model[0].weight,
    "nothing": lambda model: None,
    "a path": lambda model: "run.pt",
}


@pytest.mark.torch
@pytest.mark.parametrize("given", IN_TORCH)
def test_torch_takes_parameters_with_names(given: str, torch_file: tuple[Any, Path]) -> None:
    import statekit.torch

    model, path = torch_file
    optimizer = statekit.torch.load_optimizer(path, IN_TORCH[given](model))
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]


@pytest.mark.torch
@pytest.mark.parametrize("given", NOT_IN_TORCH)
def test_torch_refuses_parameters_without_names(given: str, torch_file: tuple[Any, Path]) -> None:
    import statekit.torch

    model, path = torch_file
    with pytest.raises(UsageError, match="named_parameters"):
        statekit.torch.load_optimizer(path, NOT_IN_TORCH[given](model))
    with pytest.raises(UsageError, match="needs the model"):
        statekit.torch.load_params(path, NOT_IN_TORCH[given](model))


@pytest.fixture(scope="module")
def jax_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    optax = pytest.importorskip("optax")
    import jax.numpy as jnp
    from flax import serialization

    params = {
        layer: {name: jnp.ones(shape) for name, shape in leaves.items()} for layer, leaves in SHAPES.items()
    }
    optimizer = optax.adamw(1e-3)
    _, state = optimizer.update(params, optimizer.init(params), params)
    path = tmp_path_factory.mktemp("jax") / "run.msgpack"
    path.write_bytes(serialization.to_bytes({"params": params, "opt_state": state, "step": 1}))
    return params, path


def module_of(params: Any) -> Any:
    from flax import nnx

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.a, self.b = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    rngs: Any = __import__("flax.nnx").nnx.Rngs
    return Net(rngs(0))


def nnx_state(params: Any) -> Any:
    from flax import nnx

    return nnx.state(module_of(params), nnx.Param)


def train_state(params: Any) -> Any:
    import optax
    from flax.training.train_state import TrainState

    return TrainState.create(apply_fn=None, params=params, tx=optax.adamw(1e-3))


IN_JAX: Mapping[str, Callable[[Any], Any]] = {
    "params": lambda params: params,
    "variables": lambda params: {"params": params},
    "frozen": lambda params: __import__("flax").core.FrozenDict(**params),
    "NumPy's": lambda params: __import__("jax").tree.map(np.asarray, params),
    "shapes": lambda params: __import__("jax").eval_shape(lambda: params),
    "a flat dict": lambda params: {
        f"{k}/{n}": leaf for k, tree in params.items() for n, leaf in tree.items()
    },
    "with dots": lambda params: {f"{k}.{n}": leaf for k, tree in params.items() for n, leaf in tree.items()},
    "nnx.state": nnx_state,
    "a pure dict": lambda params: __import__("flax.nnx").nnx.to_pure_dict(nnx_state(params)),
}
NOT_IN_JAX: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "TrainState": (train_state, "state.params"),
    "a module": (module_of, "nnx.state"),
    "a list": (
        lambda params: [*__import__("jax").tree.leaves(params)],
        "names must be those of the checkpoint",
    ),
    "nothing": (lambda params: None, "names must be those of the checkpoint"),
    "a path": (lambda params: "run", "is no array but str"),
}


@pytest.mark.jax
@pytest.mark.parametrize("given", IN_JAX)
def test_jax_takes_any_tree_of_parameters(given: str, jax_file: tuple[dict[str, Any], Path]) -> None:
    import statekit.jax

    params, path = jax_file
    _, state = statekit.jax.load_optimizer(path, IN_JAX[given](params), learning_rate=1e-3)
    assert int(state.count) == 1
    assert len(__import__("jax").tree.leaves(state.m)) == 4


@pytest.mark.jax
@pytest.mark.parametrize("given", NOT_IN_JAX)
def test_jax_says_what_to_give_instead_of_what_holds_more(
    given: str, jax_file: tuple[dict[str, Any], Path]
) -> None:
    import statekit.jax

    params, path = jax_file
    holds, expected = NOT_IN_JAX[given]
    with pytest.raises(StatekitError, match=expected):
        statekit.jax.load_optimizer(path, holds(params), learning_rate=1e-3)
    with pytest.raises(StatekitError, match=expected):
        statekit.jax.load_params(path, holds(params))


@pytest.fixture(scope="module")
def keras_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    keras = pytest.importorskip("keras")
    layers = [keras.Input((4,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    model = keras.Sequential(layers, name="sequential")
    model.compile(keras.optimizers.AdamW(1e-3), loss="mse")
    grads = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(grads, model.trainable_variables)
    path = tmp_path_factory.mktemp("keras") / "run.keras"
    model.save(path)
    return model, path


def copied(model: Any, named: bool) -> list[Any]:
    """Returns TensorFlow's own variables with a model's values."""
    tf = pytest.importorskip("tensorflow")
    return [tf.Variable(v.numpy(), name=v.path if named else None) for v in model.trainable_variables]


def module(model: Any) -> Any:
    tf = pytest.importorskip("tensorflow")
    whole = tf.Module()
    whole.variables_of_mine = copied(model, True)
    return whole


def nested(variables: list[Any]) -> dict[str, Any]:
    a, b, c, d = variables
    return {"a": {"kernel": a, "bias": b}, "b": {"kernel": c, "bias": d}}


IN_KERAS: Mapping[str, Callable[[Any], Any]] = {
    "the model": lambda model: model,
    "trainable_variables": lambda model: model.trainable_variables,
    "an iterator": lambda model: iter(model.trainable_variables),
    "a dict by path": lambda model: {v.path: v for v in model.trainable_variables},
    "a tree": lambda model: nested(model.trainable_variables),
    "TensorFlow's of Keras": lambda model: [v.value for v in model.trainable_variables],
    "TensorFlow's": lambda model: copied(model, True),
    "a tree of TensorFlow's": lambda model: nested(copied(model, True)),
    "tf.Module": module,
}
NOT_IN_KERAS: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "arrays": (lambda model: model.get_weights(), "trainable_variables"),
    "variables without names": (lambda model: nested(copied(model, False)), "give each a name of its own"),
    "nothing": (lambda model: None, "trainable_variables"),
    "a path": (lambda model: "run.keras", "trainable_variables"),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize("given", IN_KERAS)
def test_keras_takes_any_variables(given: str, keras_file: tuple[Any, Path]) -> None:
    import statekit.tensorflow

    model, path = keras_file
    optimizer = statekit.tensorflow.load_optimizer(path, IN_KERAS[given](model))
    assert int(optimizer.iterations) == 1
    moments = {
        name.removeprefix("sequential/"): kept["m"].numpy() for name, kept in optimizer.slots().items()
    }
    assert {*moments} == {"a/kernel", "a/bias", "b/kernel", "b/bias"}
    assert any(moments["a/kernel"].ravel())
    given_again = IN_KERAS[given](model)
    statekit.tensorflow.load_params(path, given_again)
    assert statekit.tensorflow.attest(optimizer, IN_KERAS[given](model), path).findings == () or (
        "TensorFlow's" in given or "tf.Module" in given  # made anew, they aren't those that it moves
    )


@pytest.mark.tensorflow
@pytest.mark.parametrize("given", NOT_IN_KERAS)
def test_keras_says_what_to_give_instead(given: str, keras_file: tuple[Any, Path]) -> None:
    import statekit.tensorflow

    model, path = keras_file
    holds, expected = NOT_IN_KERAS[given]
    with pytest.raises(StatekitError, match=expected):
        statekit.tensorflow.load_optimizer(path, holds(model))
