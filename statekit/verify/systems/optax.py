"""Recordings of Optax: slots and counts under the path of their link in the chain, as `1.0.mu`; jitted.

They are decoded through Optax' layout, as a checkpoint is: which links there are, what each counts and what injected
hyperparameters it holds is told by no description. Where a recording names no links, slots have the schema's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from statekit.conversion.contracts import Hints
from statekit.conversion.registry import layout
from statekit.errors import StateError
from statekit.files.checkpoint import Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, nested, walk
from statekit.verify.contract import Phase
from statekit.verify.systems import schema_named

PARAMS, STATE = "params", "opt_state"
READ = "optax"
"""In a state's extra: the form of the tree that Optax' layout read it from."""


def decode(tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
    """Returns the canonical state of one step, through Optax' layout.

    Raises:
        StateError: It lies between two updates, its links don't fit the parameters, or its tensors contradict the
            description.
    """
    spec = phase.hyperparameters
    if not _names_links(tensors):
        return schema_named.decode(tensors, step, phase)
    begun = next((name for name, tensor in tensors.items() if _begins(name) and tensor.read()), None)
    if begun is not None:
        raise StateError(
            "A recorded state lies between two updates and has only some of the gradients.", place=begun
        )
    checkpoint = Checkpoint("orbax", Path(f"step {step}"), _tree(tensors), step=step)
    schemas = {schema for schema, _ in schema_named.kinds_of(spec)}
    hints = Hints({"optimizer": next(iter(schemas))}) if len(schemas) == 1 else Hints()
    state = layout("optax").decode(checkpoint, hints)
    if state.counts.updates != step:
        raise StateError(
            "A recorded state has made another number of updates than its name says.",
            place=checkpoint.path,
            expected=step,
            found=state.counts.updates,
        )
    return schema_named.as_described(state, spec)


def encode(state: TrainState, phase: Phase) -> dict[str, Tensor]:
    """Returns the tensors of a state under the trajectory's names, through Optax' layout where they name links."""
    if READ not in state.extra:
        return schema_named.encode(state, phase)
    tree: Any = layout("optax").encode(state).tree
    named = {f"param/{path}": tensor for path, tensor in state.params.items()}
    leaves = ((tuple(map(str, keys)), leaf) for keys, leaf in walk(tree[STATE]))
    return named | {_name(keys, state.params): leaf for keys, leaf in leaves if isinstance(leaf, Tensor)}


def _names_links(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("slot/") and "." in name.rpartition("/")[2] for name in tensors)


def _begins(name: str) -> bool:
    """Tells whether a tensor counts the gradients that MultiSteps has for the update to come."""
    return name.rpartition("/")[2].rpartition(".")[2] == "mini_step"


def _tree(tensors: Mapping[str, Tensor]) -> Tree:
    """Returns the parameters, and the states of links, as a checkpoint of Optax has them."""
    params: dict[Keys, Tensor] = {}
    fields: dict[Keys, Any] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        path, _, field = rest.rpartition("/")
        if kind == "param":
            params[tuple(rest.split("/"))] = tensor
        elif kind == "slot":
            fields.setdefault(tuple(field.split(".")), {})[tuple(path.split("/"))] = tensor
        else:
            fields[tuple(rest.split("."))] = tensor
    links = {keys: nested(field) if isinstance(field, dict) else field for keys, field in fields.items()}
    return {PARAMS: nested(params), STATE: _chain(links)}


def _chain(fields: Mapping[Keys, Tree]) -> Tree:
    """Returns the links that have these fields; one of which nothing was recorded is empty."""
    if () in fields:
        return fields[()]
    below: dict[str, dict[Keys, Tree]] = {}
    for keys, field in fields.items():
        below.setdefault(keys[0], {})[keys[1:]] = field
    parts = {key: _chain(rest) for key, rest in below.items()}
    if not all(key.isdecimal() and len(key) < 3 for key in parts):
        return parts
    return [parts.get(str(i)) for i in range(1 + max(map(int, parts)))]


def _name(keys: Keys, params: Mapping[str, Tensor]) -> str:
    """Returns the name of a tensor of the links: a slot's field is a tree like the parameters."""
    for i in range(1, len(keys)):
        if (path := "/".join(keys[i:])) in params:
            return f"slot/{path}/{'.'.join(keys[:i])}"
    return f"global/{'.'.join(keys)}"
