"""What Keras' callback OrbaxCheckpoint writes, as a file of Keras numbers it.

    pytree/trainable_variables/sequential/dense/kernel
    pytree/optimizer_variables/adam_w/iteration, learning_rate, sequential_dense_kernel_momentum ...
    model_config/config                                        the model's config as JSON, with the optimizer's

Every variable has its name, and Orbax sorts names, so that the order of layers is in the config alone. Slots are told
by the parameter that their names begin with, which makes the order one of choice.

Source: keras-team/keras, keras/src/callbacks/orbax_checkpoint.py, `_save_checkpoint`; keras/src/models/model.py,
`get_state_tree`; keras/src/optimizers/base_optimizer.py, `add_variable_from_reference`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from statekit.budget import Account
from statekit.converters.layouts.keras.home import OPTIMIZER, SAYINGS
from statekit.converters.layouts.keras.variables import CONFIG, VARIABLES, Place
from statekit.files.checkpoint import ATTRIBUTES
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import strict_json, walk

_TREE, _MODEL, _TEXT = "pytree", "model_config", "config"
_TRAINED, _OTHERS, _SLOTS = "trainable_variables", "non_trainable_variables", "optimizer_variables"
_ALONE = ("iteration", "learning_rate")
_FIRST, _LAST = ("average", "gradient_accumulator"), ("velocity_hat",)
"""Slots that stand before all others, in a round of their own, and those that stand behind."""


def is_orbax_checkpoint(tree: Any) -> bool:
    """Tells whether a tree is what the callback writes, with an optimizer."""
    state = _state(tree)
    return bool(state) and isinstance(state.get(_SLOTS), Mapping) and isinstance(state.get(_TRAINED), Mapping)


def _state(tree: Any) -> Mapping[str, Any]:
    node = tree.get(_TREE, tree) if isinstance(tree, Mapping) else {}
    return node if isinstance(node, Mapping) else {}


def as_numbered(tree: Mapping[str, Any], place: object) -> dict[str, Any]:
    """Returns the tree of a file of Keras that says the names of its variables, as statekit writes it.

    Raises:
        FormatError: The config is no JSON.
    """
    state = _state(tree)
    numbered: dict[str, Any] = {}
    records: list[tuple[list[str], str, bool]] = []
    for part, moves in ((_TRAINED, True), (_OTHERS, False)):
        for name, tensor in _leaves(state.get(part, {})):
            keys = (*name.split("/"), VARIABLES, "0")
            _put(numbered, keys, tensor)
            records.append(([*keys], name, moves))
    owner, variables = _optimizer(state[_SLOTS])
    rows = _rows(variables, [name for _, name, moves in records if moves])
    optimizer = {VARIABLES: {ATTRIBUTES: {"name": owner}, **{str(i): row for i, row in enumerate(rows)}}}
    attributes = {SAYINGS: {"variables": records}, **_config(tree, place)}
    return {**numbered, OPTIMIZER: optimizer, ATTRIBUTES: attributes}


def _leaves(node: Any) -> Iterator[tuple[str, Tensor]]:
    for keys, leaf in walk(node):
        if isinstance(leaf, Tensor):
            yield "/".join(map(str, keys)), leaf


def _put(tree: dict[str, Any], keys: Place, tensor: Tensor) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = tensor


def _optimizer(slots: Mapping[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """Returns an optimizer's name, and its variables by theirs: of the one inside where a loss scale is around it."""
    scopes: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _leaves(slots):
        above, _, last = name.rpartition("/")
        scopes.setdefault(above, {})[last] = tensor
    owner = max(scopes, key=lambda name: (name.count("/"), len(scopes[name])), default="")
    inner = owner.rpartition("/")[2]
    return inner, {**scopes.get(inner, {}), **scopes.get(owner, {})}


def _rows(variables: Mapping[str, Tensor], params: Sequence[str]) -> Iterator[Tensor]:
    """Yields an optimizer's variables in the order in which Keras numbers them."""
    slots = _slots_of(variables, [name.replace("/", "_") for name in params]).values()

    def of_all(names: Sequence[str]) -> Iterator[Tensor]:
        return (kept[name] for name in names for kept in slots if name in kept)

    yield from (variables[name] for name in _ALONE if name in variables)
    yield from of_all(_FIRST)
    for kept in slots:
        yield from (tensor for slot, tensor in kept.items() if slot not in (*_FIRST, *_LAST))
    yield from of_all(_LAST)


def _slots_of(variables: Mapping[str, Tensor], params: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    """Returns the slots of each parameter by their names, which begin with the parameter's: the longest that fits."""
    slots: dict[str, dict[str, Tensor]] = {param: {} for param in params}
    longest = sorted(params, key=len, reverse=True)
    for name, tensor in variables.items():
        owner = next((param for param in longest if name.startswith(f"{param}_")), None)
        if owner is not None:
            slots[owner][name.removeprefix(f"{owner}_")] = tensor
    return slots


def _config(tree: Mapping[str, Any], place: object) -> dict[str, Any]:
    model = tree.get(_MODEL)
    text = model.get(_TEXT) if isinstance(model, Mapping) else None
    if not isinstance(text, str):
        return {}
    account = Account()
    account.read(len(text))
    return {CONFIG: strict_json(text.encode(), f"{_MODEL} of {place}", account)}
