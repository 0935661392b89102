"""An optimizer's state under flat names, as distributed checkpoints keep it: no index, a parameter's name in each key.

    state.<parameter>.<slot>              its slots
    param_groups.<parameter>.<option>     the options of its group, once for each parameter

Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_flatten_optim_state_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from statekit.errors import FormatError, fault_list
from statekit.tensor import Tensor
from statekit.tree import Tree

STATE, GROUPS = "state", "param_groups"
_SHOWN = 20


def unflattened(flat: Mapping[str, Tree], names: Collection[str], place: object) -> dict[str, Tree]:
    """Returns the state with its groups: parameters of equal options make one, in the order of the keys.

    Args:
        flat: Value by key.
        names: The parameters that there may be; names contain dots, so only they tell where a key is to be cut.
        place: Where the keys stand, for errors.

    Raises:
        FormatError: Keys that belong to no parameter; lists them.
    """
    parts: dict[str, dict[str, dict[str, Tree]]] = {STATE: {}, GROUPS: {}}
    faults = []
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        name = _longest(rest, names) if kind in parts else None
        if name is None:
            faults.append(("belongs to no parameter of the model", key))
        else:
            parts[kind].setdefault(name, {})[rest[len(name) + 1 :]] = value
    if faults:
        raise FormatError(
            f"{len(faults)} keys of an optimizer's state can't be placed.",
            place=place,
            found=fault_list(faults[:_SHOWN]),
        )
    groups: dict[str, dict[str, Tree]] = {}
    for name in {**parts[GROUPS], **parts[STATE]}:
        options = {key: _plain(value) for key, value in parts[GROUPS].get(name, {}).items()}
        group = groups.setdefault(repr(sorted(options.items())), {**options, "params": []})
        group["params"].append(name)
    return {STATE: parts[STATE], GROUPS: list(groups.values())}


def flattened(optimizer: Mapping[str, Any]) -> dict[str, Tree]:
    """Returns value by flat key of a state whose parameters have names, in `params` or `param_names`; undoes the above.

    Raises:
        FormatError: Parameters without names.
    """
    named: dict[Any, str] = {}
    flat: dict[str, Tree] = {}
    for group in optimizer[GROUPS]:
        names = group.get("param_names", group["params"])
        if len(names) != len(group["params"]) or not all(isinstance(name, str) for name in names):
            raise FormatError("An optimizer's parameters have no names, by which alone they could be saved.")
        named |= dict(zip(group["params"], names, strict=True))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        flat |= {f"{GROUPS}.{name}.{key}": _plain(value) for name in names for key, value in options.items()}
    for index, own in optimizer[STATE].items():
        flat |= {f"{STATE}.{named.get(index, index)}.{slot}": value for slot, value in own.items()}
    return flat


def _longest(key: str, names: Collection[str]) -> str | None:
    at = key.rfind(".")
    while at > 0:
        if key[:at] in names:
            return key[:at]
        at = key.rfind(".", 0, at)
    return None


def _plain(value: Tree) -> Tree:
    """Returns an option as a number where it is a tensor of one, and as a tuple where JSON made a list of it."""
    if isinstance(value, Tensor) and value.shape == ():
        return value.read().item()
    return tuple(value) if isinstance(value, list) else value
