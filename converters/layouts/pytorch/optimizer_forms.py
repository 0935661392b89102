"""The three forms of an optimizer's state in PyTorch: by index, by name, and flat.

    index   {"state": {0: {slot: tensor}}, "param_groups": [{option: value, "params": [0]}]}
    name    the same with the parameters' names in place of their indices
    flat    {"state.<name>.<slot>": tensor, "param_groups.<name>.<option>": value}

torch.distributed.checkpoint.state_dict gathers the second, and the third with `flatten_optimizer_state_dict`. Groups
are lost in the flat form: parameters with equal options are taken as one. Both names and slots may have dots, so that
only the model tells where a name ends.
Source: pytorch/pytorch torch/distributed/checkpoint/state_dict.py, `_flatten_optim_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from statekit.conversion.contracts import Encoded
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

Form: TypeAlias = Literal["index", "name", "flat"]

_STATE, _GROUPS = "state.", "param_groups."


def is_flat(node: Any) -> bool:
    """Tells whether a part of a tree is an optimizer in the flat form; options may be missing."""
    return (
        isinstance(node, Mapping)
        and bool(node)
        and all(isinstance(key, str) and key.startswith((_STATE, _GROUPS)) for key in node)
    )


def is_nested(node: Any) -> bool:
    """Tells whether a part of a tree is an optimizer by index or by name."""
    if not isinstance(node, Mapping) or not {"state", "param_groups"} <= node.keys():
        return False
    groups, state = node["param_groups"], node["state"]
    return (
        isinstance(groups, list | tuple)
        and all(isinstance(one, Mapping) and isinstance(one.get("params"), list | tuple) for one in groups)
        and isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
    )


def nested_form(optimizer: Mapping[str, Any], names: Iterable[str]) -> tuple[Mapping[str, Any], Form] | None:
    """Returns an optimizer with `state` and `param_groups`, and the form that it was in.

    Args:
        optimizer: In any of the forms; indices may have become text, as paths of a distributed checkpoint are.
        names: The model's.

    Returns:
        None if a flat key begins with no name of the model.
    """
    if is_flat(optimizer):
        found = _nested(optimizer, set(names))
        return None if found is None else (found, "flat")
    groups, state = optimizer["param_groups"], optimizer["state"]
    params = [param for group in groups for param in group["params"]]
    if any(isinstance(param, str) for param in params):
        return optimizer, "name"
    numbered = {
        int(i) if isinstance(i, str) and i.isdecimal() and len(i) < 10 else i: own for i, own in state.items()
    }
    return {**optimizer, "state": numbered}, "index"


def by_name(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], dict[Any, str]] | None:
    """Returns an optimizer under the names that its groups give its indices, and name by index; None if they don't."""
    names: dict[Any, str] = {}
    for group in optimizer["param_groups"]:
        own = group.get("param_names")
        if not isinstance(own, list) or len(own) != len(group["params"]):
            return None
        names |= zip(group["params"], own, strict=True)
    if not all(isinstance(i, int) for i in names) or not optimizer["state"].keys() <= names.keys():
        return None
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in optimizer["param_groups"]]
    return {
        **optimizer,
        "state": {names[i]: own for i, own in optimizer["state"].items()},
        "param_groups": groups,
    }, names


def with_names(encoded: Encoded) -> Encoded:
    """Returns an encoded state with the one whose optimizers are by name beside it, if their groups know the names."""
    tree, renamed = dict(encoded.tree), dict[str, str]()
    for place, part in encoded.tree.items():
        found = by_name(part) if is_nested(part) else None
        if found:
            tree[place], names = found
            renamed |= {f"{place}/state/{i}/": f"{place}/state/{name}/" for i, name in names.items()}
    if not renamed:
        return encoded
    exactness = {_renamed(name, renamed): why for name, why in encoded.exactness.items()}
    return replace(encoded, by_name=replace(encoded, tree=tree, exactness=exactness))


def _renamed(name: str, renamed: Mapping[str, str]) -> str:
    head, slash, slot = name.rpartition("/")
    return renamed.get(f"{head}{slash}", f"{head}{slash}") + slot


def by_index(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns an optimizer under the indices of its parameters over all groups; undoes `by_name`."""
    params = [param for group in optimizer["param_groups"] for param in group["params"]]
    if not params or not all(isinstance(param, str) for param in params):
        return optimizer
    index = {name: i for i, name in enumerate(params)}
    groups = [
        {**group, "params": [index[name] for name in group["params"]]} for group in optimizer["param_groups"]
    ]
    state = {index.get(name, name): own for name, own in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def flat_form(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Tree]:
    """Returns the flat form of an optimizer that is by name."""
    flat = {key: leaf for name, own in state.items() for key, leaf in _flat(f"{_STATE}{name}", own)}
    for group in groups:
        flat |= {
            f"{_GROUPS}{name}.{option}": value
            for name in group["params"]
            for option, value in group.items()
            if option != "params"
        }
    return flat


def _flat(prefix: str, own: Mapping[Any, Any]) -> Iterable[tuple[str, Tree]]:
    for key, value in own.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", value


def _nested(flat: Mapping[str, Any], names: set[str]) -> dict[str, Any] | None:
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        there, rest = (
            (state, key.removeprefix(_STATE))
            if key.startswith(_STATE)
            else (options, key.removeprefix(_GROUPS))
        )
        name = _owner(rest, names)
        if name is None:
            return None
        there.setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Any]] = []
    for name, own in options.items():
        same = next((group for group in groups if _equal({**own, "params": group["params"]}, group)), None)
        if same is None:
            groups.append({**own, "params": [name]})
        else:
            same["params"].append(name)
    bare = [name for name in state if name not in options]
    return {"state": state, "param_groups": [*groups, *([{"params": bare}] if bare else [])]}


def _owner(rest: str, names: set[str]) -> str | None:
    """Returns the longest name that a key begins with."""
    name = rest
    while "." in name:
        name = name.rpartition(".")[0]
        if name in names:
            return name
    return None


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Tells whether two groups have the same options; tensors are equal only to themselves."""
    if left.keys() != right.keys():
        return False
    return all(
        left[key] is right[key]
        if isinstance(left[key], Tensor) or isinstance(right[key], Tensor)
        else type(left[key]) is type(right[key]) and left[key] == right[key]
        for key in left
    )
