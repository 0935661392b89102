"""What a file of Keras holds besides parameters and the optimizer's variables, kept so that it can be written back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.converters.layouts.keras.state import HOME
from statekit.converters.layouts.keras.variables import CONFIG, VARIABLES, VERSIONS, Variable, without
from statekit.errors import StateError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.state.train_state import TrainState
from statekit.tensors.typed import Name, fits

OPTIMIZER = "optimizer"
INNER = "inner_optimizer"
"""Where Keras 2 saves the variables of an optimizer once more if a loss scale is around it."""
SAYINGS = "statekit_keras"
"""Attribute of a whole file in which statekit says what Keras doesn't: the names of all variables."""


def config_of(tree: Mapping[str, Any]) -> Any:
    """Returns the model's config; None if the file has none."""
    return tree.get(ATTRIBUTES, {}).get(CONFIG)


def is_keras2(tree: Mapping[str, Any]) -> bool:
    """Tells whether Keras 2 wrote a file, by the version that it has there."""
    attributes = tree.get(ATTRIBUTES, {})
    version = attributes.get(VERSIONS, attributes).get("keras_version")
    return fits(version, Name) and version.startswith("2.")


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
