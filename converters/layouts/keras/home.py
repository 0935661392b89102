"""What a file of Keras holds besides parameters and the optimizer's variables, kept so that it can be written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.converters.layouts.keras.state import AROUND, HOME
from statekit.converters.layouts.keras.variables import CONFIG, VARIABLES, VERSIONS, Variable, without
from statekit.errors import StateError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import at
from statekit.tensors.typed import Name, fits

OPTIMIZER = "optimizer"
INNER = "inner_optimizer"
"""Where the variables of an optimizer lie around which is a loss scale; in Keras 2 they stand above it too."""
LOSS_SCALE = "keras_loss_scale"
"""Key in `extra`: what Keras' LossScaleOptimizer keeps of its own, which no update of the optimizer inside reads."""
_SCALE_NUMBERS = {"2": "step_counter", "3": "dynamic_scale"}
"""Number of a variable of Keras 3's LossScaleOptimizer -> what it is.

Source: keras-team/keras, keras/src/optimizers/loss_scale_optimizer.py, `LossScaleOptimizer.build`.
"""
_BEFORE = 4
"""How many variables a loss scale has first: its own count and rate, and the two numbers of the scale."""
SAYINGS = "statekit_keras"
"""Attribute of a whole file in which statekit says what Keras doesn't: the names of all variables."""


def config_of(tree: Mapping[str, Any]) -> Any:
    """Returns the model's config; None if the file has none."""
    return tree.get(ATTRIBUTES, {}).get(CONFIG)


def is_keras2(tree: Mapping[str, Any]) -> bool:
    """Tells whether Keras 2 wrote a file, by the version that it has there."""
    attributes = tree.get(ATTRIBUTES, {})
    version = at(attributes, (VERSIONS, "keras_version") if VERSIONS in attributes else ("keras_version",))
    return fits(version, Name) and version.startswith("2.")


def without_loss_scale(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a file's tree with the optimizer that a loss scale of Keras 3 is around in its place, and the scale.

    The optimizer inside counts the updates; the one around it counts nothing, and its slots are the same ones. The
    scale is its numbers, and what `with_loss_scale` puts around the optimizer again.
    """
    optimizer = tree.get(OPTIMIZER)
    inner = optimizer.get(INNER) if isinstance(optimizer, Mapping) else None
    if is_keras2(tree) or not isinstance(inner, Mapping) or not isinstance(inner.get(VARIABLES), Mapping):
        return {**tree}, {}
    node = optimizer.get(VARIABLES) if isinstance(optimizer, Mapping) else None
    around: Mapping[str, Any] = node if isinstance(node, Mapping) else {}
    numbers = {name: around[key] for key, name in _SCALE_NUMBERS.items() if key in around}
    attributes, config = tree.get(ATTRIBUTES, {}), config_of(tree)
    before = [around.get(str(number)) for number in range(_BEFORE)]
    outside = {ATTRIBUTES: around.get(ATTRIBUTES, {}), VARIABLES: before, "record": None}
    if isinstance(config, Mapping) and (record := _inner_record(config)) is not None:
        outside["record"] = config["compile_config"][OPTIMIZER]
        compiled = {**config["compile_config"], OPTIMIZER: record}
        attributes = {**attributes, CONFIG: {**config, "compile_config": compiled}}
    is_whole = all(isinstance(number, Tensor) and number.shape == () for number in before)
    scale = {"scaler": numbers, **({AROUND: outside} if is_whole else {})}
    return {**tree, ATTRIBUTES: attributes, OPTIMIZER: inner}, scale


def with_loss_scale(tree: dict[str, Any], home: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a file's tree with the loss scale around the optimizer that was there when it was read."""
    around = home.get(AROUND)
    if not isinstance(around, Mapping):
        return tree
    inner = tree[OPTIMIZER][VARIABLES]
    rows = [*around[VARIABLES], *(row for key, row in inner.items() if key != ATTRIBUTES)]
    entries = {ATTRIBUTES: around[ATTRIBUTES], **{str(i): row for i, row in enumerate(rows)}}
    scaled = {**tree, OPTIMIZER: {**tree[OPTIMIZER], VARIABLES: entries, INNER: {VARIABLES: inner}}}
    config, record = config_of(tree), around["record"]
    if record is not None and isinstance(config, Mapping):
        inside = {**record["config"], INNER: config["compile_config"][OPTIMIZER]}
        compiled = {**config["compile_config"], OPTIMIZER: {**record, "config": inside}}
        scaled[ATTRIBUTES] = {**tree[ATTRIBUTES], CONFIG: {**config, "compile_config": compiled}}
    return scaled


def _inner_record(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the record of the optimizer that a loss scale is around in a model's config; None if there is none."""
    node: Any = config
    for key in ("compile_config", OPTIMIZER, "config", INNER):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node if isinstance(node, Mapping) else None


def home_of(tree: Mapping[str, Any], placed: Mapping[str, Variable]) -> dict[str, Any]:
    """Returns what a file holds besides parameters and the optimizer's variables, and where those lie.

    Raises:
        StateError: Where the optimizer's variables lie stands an array.
    """
    left = without(tree, [variable.place for variable in placed.values()])
    node = left.get(OPTIMIZER, {})
    node = node.get(VARIABLES, {}) if isinstance(node, Mapping) else node
    if not isinstance(node, Mapping):
        raise StateError(
            "A file of Keras has values where its optimizer's variables lie.",
            place=f"{OPTIMIZER}/{VARIABLES}",
            expected="a group of variables",
            found="an array",
        )
    kept = {key: part for key, part in node.items() if key == ATTRIBUTES}
    left[OPTIMIZER] = {**left.get(OPTIMIZER, {}), VARIABLES: kept}
    if is_keras2(tree) and INNER in left[OPTIMIZER]:
        left[OPTIMIZER][INNER] = {VARIABLES: {}}
    left[ATTRIBUTES] = {key: part for key, part in left.get(ATTRIBUTES, {}).items() if key != SAYINGS}
    return {"tree": left, "places": {path: list(variable.place) for path, variable in placed.items()}}


def home_in(state: TrainState) -> Mapping[str, Any]:
    """Returns what the state has from a file of Keras."""
    home = state.extra.get(HOME)
    return home if isinstance(home, Mapping) else {}
