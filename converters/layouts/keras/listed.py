"""The weights of an `.h5` file that lists them by name: `model.save("model.h5")` of every Keras, and Keras 2's weights.

    model_weights@layer_names                 the layers in the model's order; at the top where only weights were saved
    model_weights/hidden@weight_names         a layer's weights, those that are trained first
    optimizer_weights@weight_names            the optimizer's variables in their order
    @model_config, @training_config           both configs, as JSON

A list of names that is too long for one attribute stands in several, with numbers behind their name.

Source: keras-team/keras, keras/src/legacy/saving/legacy_h5_format.py, `save_model_to_hdf5`,
`save_attributes_to_hdf5_group`; the same in v2.15.0, keras/saving/legacy/hdf5_format.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from statekit.converters.layouts.keras.slot_names import plain_name
from statekit.converters.layouts.keras.variables import Place, Variable, may_move
from statekit.errors import FormatError, StateError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, fits, typed

MODEL, OPTIMIZER, TOP = "model_weights", "optimizer_weights", "top_level_model_weights"
LAYERS, WEIGHTS = "layer_names", "weight_names"


def is_listed(tree: Any) -> bool:
    """Tells whether a file lists its weights by name."""
    group = _model(tree)[1] if isinstance(tree, Mapping) else None
    return group is not None and names_in(group, LAYERS) is not None


def _model(tree: Mapping[str, Any]) -> tuple[Place, Mapping[str, Any] | None]:
    """Returns the group of the model's weights, and where it lies: at the top where only weights were saved."""
    group = tree.get(MODEL, tree)
    place = (MODEL,) if MODEL in tree else ()
    return place, group if isinstance(group, Mapping) else None


def names_in(group: Mapping[str, Any], attribute: str) -> list[str] | None:
    """Returns the names that an attribute of a group lists, or several with numbers; None if there is none."""
    attributes = group.get(ATTRIBUTES, {})
    parts = [attributes.get(attribute)]
    if parts == [None]:
        parts = []
        while (part := attributes.get(f"{attribute}{len(parts)}")) is not None:
            parts.append(part)
    texts = [_text(name) for part in parts for name in (part if isinstance(part, list) else [part])]
    return texts if parts and all(fits(text, Name) for text in texts) else None


def _text(value: Any) -> Any:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def listed_variables(tree: Mapping[str, Any]) -> list[Variable]:
    """Returns the variables of the model in its order, by their names without the model's own.

    Raises:
        StateError: A listed weight is not there.
    """
    place, group = _model(tree)
    config = listed_config(tree)
    layers = dict.fromkeys(names_in(group or {}, LAYERS) or (), True) | _trainable(config)
    weights = [
        (where, name, tensor, layers.get(layer, True))
        for layer in [*(names_in(group or {}, LAYERS) or ()), TOP]
        for where, name, tensor in _weights(group or {}, place, layer)
    ]
    names = _short([name for _, name, _, _ in weights], config)
    return [
        Variable(where, name, tensor, trained and may_move(name, tensor), True)
        for name, (where, _, tensor, trained) in zip(names, weights, strict=True)
    ]


def _weights(group: Mapping[str, Any], above: Place, layer: str) -> Iterator[tuple[Place, str, Tensor]]:
    """Yields place, name and values of each weight of a layer."""
    inside = _at(group, layer.split("/"))
    for name in names_in(inside, WEIGHTS) or () if isinstance(inside, Mapping) else ():
        keys = (*layer.split("/"), *name.split("/"))
        tensor = _at(group, keys)
        if not isinstance(tensor, Tensor):
            raise StateError("The file lists a weight that it does not hold.", place=f"{layer}/{name}")
        yield (*above, *keys), plain_name(name), tensor


def _at(group: Mapping[str, Any], keys: tuple[str, ...] | list[str]) -> Any:
    node: Any = group
    for key in keys:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _trainable(config: Mapping[str, Any] | None) -> dict[str, bool]:
    """Returns whether each layer of a model is trained, by its name."""
    inner = (config or {}).get("config")
    layers = inner.get("layers") if isinstance(inner, Mapping) else None
    configs = [
        layer["config"]
        for layer in (layers if isinstance(layers, list) else ())
        if isinstance(layer, Mapping) and isinstance(layer.get("config"), Mapping)
    ]
    return {str(layer.get("name")): layer.get("trainable") is not False for layer in configs}


def _short(names: list[str], config: Mapping[str, Any] | None) -> list[str]:
    """Returns names without the model's own where all begin with it; a name that occurs twice gets its number."""
    inner = (config or {}).get("config")
    above = f"{inner.get('name')}/" if isinstance(inner, Mapping) else "/"
    if all(name.startswith(above) for name in names):
        names = [name.removeprefix(above) for name in names]
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        number = counts[name] = counts.get(name, -1) + 1
        unique.append(f"{name}_{number}" if number else name)
    return unique


def listed_config(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the model's config with its optimizer's, as a `.keras` file has it; None if the file has none.

    Raises:
        FormatError: A config is no JSON object.
    """
    model, training = (_document(tree, name) for name in ("model_config", "training_config"))
    if model is None and training is None:
        return None
    optimizer = (training or {}).get("optimizer_config")
    record = optimizer if isinstance(optimizer, Mapping) else {}
    return {**(model or {}), "compile_config": {"optimizer": {"registered_name": None, **record}}}


def _document(tree: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    text = _text(tree.get(ATTRIBUTES, {}).get(name))
    if not isinstance(text, str):
        return None
    parsed = strict_json(text, name)
    return typed(parsed, dict[Name, Any], name, "A config of Keras is no JSON object", FormatError)


def listed_rows(tree: Mapping[str, Any]) -> list[tuple[Place, str, Tensor]]:
    """Returns place, name and values of each of the optimizer's variables, in their order; none if there are none.

    Raises:
        StateError: A listed variable is not there.
    """
    return [*_weights(tree, (), OPTIMIZER)] if isinstance(tree.get(OPTIMIZER), Mapping) else []
