"""Maps: from the parameters of one codebase's model to those of another, with the optimizer's slots.

A map is a model map, which is data (`converters/models/`), or a renaming. It takes a state and returns it under the
other names; every slot follows its parameter, and an account tells the fate of each. An error lists every name of
either side that the map does not cover. A map reads no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from statekit.maps.model_map import ModelMap


def load(name: str, config: Mapping[str, Any] | None = None) -> ModelMap:
    """Returns a map by its name, such as `t5x-t5:hf-t5`, or from a JSON file of your own.

    Its `apply` takes live parameters too: `load("hf-t5:t5x-t5").apply(model.state_dict())`.

    Args:
        name: The name, as `statekit maps` lists it; or the path of a `.json` file, with `:back` for the other way.
        config: What the map needs to know of the model and no array says, such as `{"num_heads": 12}`.

    Raises:
        UsageError: There is no such map, or a value isn't one that it takes.
        FormatError: The file isn't a map; lists every fault.
    """
    from statekit.maps.model_map import load

    return load(name, config)
