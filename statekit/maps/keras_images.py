"""Which dense layers of a Keras model read a flattened image, as the model's own config tells.

Keras flattens an image with its channels last, PyTorch with them first: a map between both has to know the image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PASSING = frozenset({
    "Activation", "AlphaDropout", "Dropout", "ELU", "GaussianDropout", "GaussianNoise", "LeakyReLU", "ReLU",
    "Softmax",
})  # fmt: skip
"""Layers that leave the order of values as it is and have no parameters."""
WITHOUT = frozenset(
    {f"{kind}{rank}D" for kind in ("Conv", "GlobalAveragePooling", "GlobalMaxPooling") for rank in (1, 2, 3)}
    | {f"{kind}{rank}D" for kind in ("AveragePooling", "MaxPooling") for rank in (1, 2, 3)}
    | {"Dense", "Embedding", "InputLayer"}
)
"""Layers whose values stand as they are, so that a dense layer behind them reads no flattened image."""


def flattened_images(config: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """Returns the image that each dense layer reads behind a `Flatten`, channels last; None where that isn't certain.

    Args:
        config: The content of config.json in a .keras file.

    Source: keras 3, `saving/serialization_lib.serialize_keras_object` and `layers/reshaping/flatten.py`.

    Example:
        >>> layers = [
        ...     {"class_name": "Flatten", "config": {"name": "f"}, "build_config": {"input_shape": [None, 6, 6, 4]}},
        ...     {"class_name": "Dense", "config": {"name": "head"}},
        ... ]
        >>> flattened_images({"class_name": "Sequential", "config": {"layers": layers}})
        {'head': [6, 6, 4]}
    """
    layers = _layers(config)
    if layers is None:
        return None
    images: dict[str, list[int]] = {}
    for name, (layer, _) in layers.items():
        if layer.get("class_name") == "Dense":
            image = _image_behind(name, layers)
            if image is None:
                return None
            if image:
                images[name] = image
    return images


def _layers(config: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], str | None]] | None:
    """Returns each layer by its name, with the one layer that it reads; None of models of other forms."""
    inner = config.get("config")
    listed = inner.get("layers") if isinstance(inner, Mapping) else None
    kind = config.get("class_name")
    if kind not in ("Sequential", "Functional") or not isinstance(listed, Sequence):
        return None
    layers: dict[str, tuple[Mapping[str, Any], str | None]] = {}
    before: str | None = None
    for layer in listed:
        name = _name(layer)
        if name is None:
            return None
        layers[name] = layer, before if kind == "Sequential" else _read_by(layer)
        before = name
    return layers


def _name(layer: object) -> str | None:
    config = layer.get("config") if isinstance(layer, Mapping) else None
    name = config.get("name") if isinstance(config, Mapping) else None
    return name if isinstance(name, str) else None


def _read_by(layer: Mapping[str, Any]) -> str | None:
    """Returns the one layer whose output a layer of a Functional model reads; None of several, or of none."""
    match layer.get("inbound_nodes"):
        case [{"args": [{"config": {"keras_history": [str(name), *_]}}]}]:
            return name
    return None


def _image_behind(name: str, layers: Mapping[str, tuple[Mapping[str, Any], str | None]]) -> list[int] | None:
    """Returns the image that a dense layer reads; an empty one if it reads none, None if that isn't certain."""
    at, steps = layers[name][1], len(layers)
    while at is not None and at in layers and steps:
        layer, at_before = layers[at]
        kind = layer.get("class_name")
        if kind == "Flatten":
            return _image(layer)
        if kind in WITHOUT:
            return []
        if kind not in PASSING:
            return None
        at, steps = at_before, steps - 1
    return [] if at is None and layers[name][0].get("inbound_nodes") is None else None


def _image(flatten: Mapping[str, Any]) -> list[int] | None:
    """Returns the shape that a `Flatten` takes, without the batch; empty of one that has no axes beside channels."""
    built, config = flatten.get("build_config"), flatten["config"]
    shape = built.get("input_shape") if isinstance(built, Mapping) else None
    if not isinstance(shape, Sequence) or config.get("data_format", "channels_last") != "channels_last":
        return None
    lengths = list(shape[1:])
    if not all(type(length) is int and length > 0 for length in lengths):
        return None
    return lengths if len(lengths) > 1 else []
