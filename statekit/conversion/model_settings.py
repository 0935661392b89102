"""What a map needs to know of a model, from what lies beside its checkpoint, or in it.

T5X writes its gin file beside its checkpoints; Hugging Face's folders have a config.json, and nanoGPT's files their
model_args. What the user says goes before what lies there; what neither says is asked for by the map.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from statekit.budget import Account
from statekit.conversion.open_state import OpenState
from statekit.errors import Faults, UsageError
from statekit.maps.keras_images import flattened_images
from statekit.maps.links import StateMap
from statekit.maps.model_map import ModelMap
from statekit.maps.modules import FLATTEN
from statekit.tensors.tensor import Tensor, nbytes
from statekit.tensors.tree import Record, loose_json

_KERAS = ("keras", "tree", "@", "config.json")
"""Where in a state's `extra` the config of a Keras model lies."""


def with_beside(maps: Iterable[StateMap], opened: OpenState) -> tuple[StateMap, ...]:
    """Returns maps that know what a checkpoint, or the files beside it, say of its model.

    Raises:
        UsageError: They say what the map has no word for, and the user didn't say it otherwise.
        FormatError: They can't be read.
    """
    maps = tuple(maps)
    first = next((model_map for model_map in maps if isinstance(model_map, ModelMap)), None)
    if first is None:
        return maps
    values, file = _beside(first, opened)
    return tuple(
        model_map.with_beside(values, file) if isinstance(model_map, ModelMap) else model_map
        for model_map in maps
    )


def _beside(first: ModelMap, opened: OpenState) -> tuple[dict[str, Any], str]:
    """Returns the settings that lie beside a checkpoint, by the map's names, and what has them."""
    if first.modules is not None and (config := _at(opened.state.extra, _KERAS)):
        return _of_keras(config, opened)
    settings, faults = first.settings, Faults()
    gin = opened.checkpoint.meta.get("gin") or {}
    values, _ = settings.of_gin(gin.get("model", {}), faults, first.config)
    where = Path(gin["file"]).name if values else ""
    for place in () if values else settings.places:
        keys = place.split("/")
        record = settings.holding(_record(_at(opened.state.extra, keys), place, Account(opened.budget)))
        asked = {name: setting for name, setting in record.items() if settings.key(name) not in first.config}
        values, where = settings.translated(asked, faults), keys[-1]
        if values:
            break
    if settings.beside and not values:
        values, where = _of_config(first, opened, faults)
    faults.check(
        UsageError,
        "What lies beside the checkpoint says of the model what the map has no word for",
        place=where or Path(gin.get("file", "")).name,
        remedy="say it in the map's words: --config KEY=VALUE",
    )
    return {key: value for key, value in values.items() if value is not None}, where


def _of_config(first: ModelMap, opened: OpenState, faults: Faults) -> tuple[dict[str, Any], str]:
    """Returns what the configuration of a program says, which lies beside its checkpoint, and the file's name."""
    config = opened.checkpoint.meta.get("config") or {"values": {}, "file": ""}
    settings = first.settings
    read = settings.of_config(config["values"])
    asked = {name: value for name, value in read.items() if settings.key(name) not in first.config}
    return settings.translated(asked, faults), Path(config["file"]).name


def _of_keras(config: Mapping[str, Any], opened: OpenState) -> tuple[dict[str, Any], str]:
    """Returns the images that dense layers read, where the config of a Keras model tells them and has these names."""
    images = flattened_images(config)
    named = {f"{name}/kernel" for name in images or ()} <= opened.state.params.keys()
    return ({FLATTEN: images}, _KERAS[-1]) if images is not None and named else ({}, "")


def _at(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.state if isinstance(tree, Record) else tree
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _record(part: Any, place: str, account: Account) -> Mapping[str, Any]:
    """Returns a record of settings, which may stand in a file's bytes; nothing where there is none."""
    if isinstance(part, Tensor):
        account.hold(nbytes(part), "A file of settings", place)
        part = loose_json(part.read().tobytes(), place, account)
    part = part.state if isinstance(part, Record) else part
    return part if isinstance(part, Mapping) else {}
