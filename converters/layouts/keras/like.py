"""A state as a file of the same model lays it out: each parameter where Keras looks for it in that model.

A Functional or Sequential model reads `layers/<class>_<number>/vars/<n>`; which class a parameter's layer has, no state
from elsewhere says. A `.keras` or `.weights.h5` file of the model, trained or not, does.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `_walk_saveable`, `_load_container_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from statekit.converters.layouts.keras.home import config_of, home_in, home_of
from statekit.converters.layouts.keras.state import HOME, order_of
from statekit.converters.layouts.keras.variables import Variable, by_names, variables
from statekit.errors import Faults, StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory


def laid_out_like(state: TrainState, model: Checkpoint) -> TrainState:
    """Returns a state that a layout of Keras writes where the model's own file has it.

    What the file holds besides parameters (seeds of random generators, say) is taken from it, and noted.

    Args:
        state: The state. Its paths are those of the model's variables, but for names that stand before all of them.
        model: A file of the model.

    Raises:
        StateError: It is none of Keras, or its parameters aren't the state's; lists every fault.
    """
    tree = model.tree
    config = config_of(tree) if isinstance(tree, Mapping) else None
    floats = _parameters(model, config)
    moved = order_of(state)
    names = [*dict.fromkeys((*moved, *state.params))]
    shapes = [state.params[name].shape for name in names]
    placed = dict(by_names(floats, names, shapes).moved)
    by_place = {variable.place: name for name, variable in placed.items()}
    faults = Faults(
        ("isn't in the state", variable.name) for variable in floats if variable.place not in by_place
    )
    if config is not None and state.optimizer.schema != WEIGHTS:
        faults += _moved_otherwise(placed, {*moved})
    faults.check(StateError, "The parameters aren't those of the model", place=model.path)
    order = [by_place[variable.place] for variable in floats]
    home = home_of(tree, placed)
    home["tree"], begun = _in_memory(home["tree"], ())
    note = f"The model's file says where everything lies; taken from it: {', '.join(begun)}."
    return replace(
        state,
        params={path: state.params[path] for path in order},
        extra={**state.extra, HOME: {**home_in(state), **home}},
        assumptions=(*state.assumptions, *([note] if begun else ())),
    )


def _parameters(model: Checkpoint, config: Any) -> list[Variable]:
    """Returns the variables of floats that the model's file has."""
    every = variables(model.tree, config) if isinstance(model.tree, Mapping) else []
    floats = [variable for variable in every if variable.tensor.dtype.kind in "fV"]
    if not floats:
        raise StateError(
            "The file of the model has no parameters.",
            place=model.path,
            expected="a .keras or .weights.h5 file of the built model",
        )
    return floats


def _moved_otherwise(placed: Mapping[str, Variable], moved: set[str]) -> Faults:
    return Faults(
        (
            "has slots, and the model doesn't train it" if path in moved else "is trained, and has no slots",
            path,
        )
        for path, variable in placed.items()
        if variable.trained != (path in moved)
    )


def _in_memory(node: Any, place: tuple[str, ...]) -> tuple[Any, list[str]]:
    """Returns a tree with its few values read, as its file will be closed, and their names."""
    if isinstance(node, Tensor):
        name = "/".join(place)
        return in_memory(node.read(), name), [name]
    if not isinstance(node, Mapping):
        return node, []
    parts = {key: _in_memory(part, (*place, str(key))) for key, part in node.items()}
    return {key: part for key, (part, _) in parts.items()}, [n for _, names in parts.values() for n in names]
