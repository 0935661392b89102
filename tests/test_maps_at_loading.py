"""Maps in the drop-ins: a foreign checkpoint loads straight into another model's names, as its converted file does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
import statekit.maps
from goldens import COMPACT
from statekit.errors import StateError, UsageError
from statekit.maps.links import carried_through
from statekit.maps.model_map import load
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array

SOURCE = COMPACT / "t5x_checkpoints" / "unscanned"
CHECKPOINT = next(SOURCE.glob("*/checkpoint_*"))
SAID = {"min_dim_size_to_factor": 32}
MAP = "t5x-t5:hf-t5"


@pytest.fixture(scope="module")
def mapped() -> Iterator[TrainState]:
    with statekit.open(CHECKPOINT, hparams=SAID) as opened:
        yield carried_through(opened.state, [load(MAP)])[0]


def slots_of(state: TrainState) -> dict[str, Mapping[str, Array]]:
    return {path: {n: slot.read() for n, slot in slots.items()} for path, slots in state.slots.items()}


@pytest.mark.jax
def test_jax_takes_a_map(mapped: TrainState) -> None:
    import jax

    import statekit.jax

    shapes = {path: jax.ShapeDtypeStruct(t.shape, np.float32) for path, t in mapped.params.items()}
    params = statekit.jax.load_params(CHECKPOINT, shapes, map=MAP, hparams=SAID)
    optimizer, state = statekit.jax.load_optimizer(
        CHECKPOINT, params, map=MAP, hparams=SAID, learning_rate=0.01
    )
    for path, tensor in mapped.params.items():
        np.testing.assert_array_equal(params[path], tensor.read())
    for path, slots in slots_of(mapped).items():
        for name, array in slots.items():
            np.testing.assert_array_equal(getattr(state, name)[path], array, err_msg=f"{path} {name}")
    updates, _ = optimizer.update(params, state, params)
    assert all(np.isfinite(one).all() for one in updates.values())
    with pytest.raises(UsageError, match="doesn't take what was said") as error:
        statekit.jax.load_params(CHECKPOINT, shapes, map=MAP, hparams=SAID, config={"foo": 3})
    assert [place for _, place in error.value.faults] == ["foo"]
    with pytest.raises(StateError, match="lm_head"):
        less = {path: one for path, one in shapes.items() if not path.startswith("lm_head")}
        statekit.jax.load_optimizer(CHECKPOINT, less, map=MAP, hparams=SAID)


@pytest.mark.tensorflow
def test_tensorflow_takes_a_map(mapped: TrainState) -> None:
    import keras

    import statekit.tensorflow

    variables = [
        keras.Variable(np.zeros(t.shape, np.float32), name=path.replace("/", "_"))
        for path, t in mapped.params.items()
    ]
    names = {v.path: path for v, path in zip(variables, mapped.params, strict=True)}
    statekit.tensorflow.load_params(CHECKPOINT, variables, names=names, map=MAP, hparams=SAID)
    optimizer = statekit.tensorflow.load_optimizer(
        CHECKPOINT, variables, 0.01, names=names, map=MAP, hparams=SAID
    )
    for variable, tensor in zip(variables, mapped.params.values(), strict=True):
        np.testing.assert_array_equal(variable, tensor.read())
    ours: Any = optimizer.slots()
    for path, slots in slots_of(mapped).items():
        for name, array in slots.items():
            np.testing.assert_array_equal(ours[path][name], array, err_msg=f"{path} {name}")


@pytest.mark.torch
def test_torch_takes_a_map_of_the_users_own(tmp_path: Path) -> None:
    import torch

    import statekit.torch

    with statekit.open(CHECKPOINT, hparams=SAID) as opened:
        lines = [{"source": path, "target": f"mine/{path}"} for path in opened.state.params]
        shapes = {path: t.shape for path, t in opened.state.params.items()}
    path = tmp_path / "mine.json"
    sides = {"source": {"title": "T5X"}, "target": {"title": "mine"}}
    path.write_text(json.dumps({"title": "mine", "facts": ["mine"], **sides, "parameters": lines}))
    named = [
        (f"mine.{name.replace('/', '.')}", torch.nn.Parameter(torch.zeros(s))) for name, s in shapes.items()
    ]
    optimizer = statekit.torch.load_optimizer(CHECKPOINT, named, map=str(path), hparams=SAID, lr=0.01)
    assert len(optimizer.state) == len(shapes)


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_live_parameters_of_pytorch_go_there_and_back(tied: bool, mapped: TrainState) -> None:
    import torch

    path_of = {
        path.replace("/", "."): path for path in mapped.params if not (tied and path.startswith("lm_head"))
    }
    model = {name: torch.from_numpy(mapped.params[path].read().copy()) for name, path in path_of.items()}
    further = dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), model["shared.weight"]
    )
    further |= {"lm_head.weight": model["shared.weight"]} if tied else {}
    there = statekit.maps.load("hf-t5:t5x-t5").apply({**model, **further})
    assert "decoder.layers_1.mlp.wo.kernel" in there
    assert ("decoder.logits_dense.kernel" in there) is not tied
    back = statekit.maps.load(MAP).apply(there)
    assert back.keys() == {**model, **further}.keys()
    for name, tensor in {**model, **further}.items():
        assert torch.equal(back[name], tensor)
    with pytest.raises(StateError, match="is missing in the checkpoint"):
        statekit.maps.load("hf-t5:t5x-t5").apply({n: t for n, t in model.items() if "final" not in n})


@pytest.mark.jax
def test_live_trees_of_jax_come_apart_and_are_stacked() -> None:
    import jax
    import jax.numpy as jnp

    scanned = next((COMPACT / "t5x_checkpoints" / "scanned").glob("*/checkpoint_*"))
    with statekit.open(scanned) as opened:
        arrays = {path: jnp.asarray(t.read()) for path, t in opened.state.params.items()}
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        *outer, last = path.split("/")
        node = tree
        for key in outer:
            node = node.setdefault(key, {})
        node[last] = array
    there = statekit.maps.load("t5x-t5-scanned:hf-umt5", {"num_heads": 4}).apply(tree)
    query = there["encoder"]["block"]["1"]["layer"]["0"]["SelfAttention"]["q"]["weight"]
    kernel = arrays["encoder/encoder/attention/query/kernel"]
    np.testing.assert_array_equal(query, kernel[:, 1].reshape(kernel.shape[0], -1).T)
    back = statekit.maps.load("hf-umt5:t5x-t5-scanned", {"num_heads": 4}).apply(there)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tree, back))
    with pytest.raises(StateError, match="can't be mapped: axes 1 and 2 merged"):
        statekit.maps.load("t5x-t5-scanned:hf-umt5", {"num_heads": 8}).apply(tree)
