"""Modules, optimizers and schedulers that were pickled whole, as what their state_dict() returns; nothing of them runs.

    torch.save(model, ...)                                      a Record with _parameters, _buffers, _modules
    torch.save({"model": model, "optimizer": optimizer}, ...)   a Record with state and param_groups, by parameter

An optimizer refers to the parameters themselves. Where the file has them under names too, in a module or in a
state_dict, the groups get these names; otherwise the parameters stand in a list beside their optimizer.
Source: pytorch/pytorch torch/nn/modules/module.py, `Module.state_dict`; torch/optim/optimizer.py,
`Optimizer.state_dict`; torch/optim/lr_scheduler.py, `LRScheduler.state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from statekit.errors import FormatError
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import MAX_DEPTH, MAX_NAME_BYTES, Record, Tree

_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"
_LEFT_OUT = "_non_persistent_buffers_set"
_OPTIMIZER, _LAMBDAS = "optimizer", "lr_lambdas"
_SCHEDULER = frozenset({_OPTIMIZER, "base_lrs", "last_epoch"})
_DEEPEST = 2
"""How deep below the top objects are looked for: what lies deeper are arguments of a program."""
_ARGUMENTS = frozenset({"hyper_parameters", "hparams", "config", "cfg", "args"})
PARAMS = "{}_params"
"""Key of the parameters of an optimizer that the file has under no names."""


@dataclass
class WholeObjects:
    """A tree of which whole objects became their state_dicts.

    Attributes:
        tree: The tree.
        classes: Name of the class of each object, by the place at which it stood, keys joined by `/`.
    """

    tree: Tree
    classes: dict[str, str] = field(default_factory=dict)


def as_state_dicts(tree: Tree, place: str) -> WholeObjects:
    """Returns a saved object with state_dicts in the place of modules, optimizers and schedulers near its top.

    Args:
        tree: As it was unpickled; its tensors have no names yet, so that equal ones are the same values of the file.
        place: The file, for messages.

    Raises:
        FormatError: A module is deeper than a tree may be, or a name is longer than one may be.
    """
    whole = WholeObjects(tree)
    if any(True for _ in _objects(tree)):
        whole.tree = _with_modules(tree, (), whole.classes, place)
        whole.tree = _with_optimizers(whole.tree, (), _names(whole.tree), whole.classes)
    return whole


def _objects(node: Tree, depth: int = 0) -> Iterator[Record]:
    """Yields the objects near the top of a tree that have a state_dict()."""
    if _is_module(node) or _is_optimizer(node) or _is_scheduler(node):
        yield node
    elif depth < _DEEPEST:
        for _, part in _parts(node):
            yield from _objects(part, depth + 1)


def _parts(node: Tree) -> Iterator[tuple[Any, Tree]]:
    if isinstance(node, dict):
        yield from ((key, part) for key, part in node.items() if key not in _ARGUMENTS)
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)


def _has(node: Tree, keys: frozenset[str]) -> bool:
    return isinstance(node, Record) and isinstance(node.state, Mapping) and keys <= node.state.keys()


def _is_module(node: Tree) -> bool:
    return _has(node, frozenset({_PARAMETERS, _BUFFERS, _MODULES}))


def _is_optimizer(node: Tree) -> bool:
    return (
        _has(node, frozenset({"state", "param_groups"}))
        and isinstance(node.state["state"], Mapping)
        and _are_groups(node.state["param_groups"])
    )


def _are_groups(groups: Tree) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, Mapping)
        and isinstance(group.get("params"), (list, tuple))
        and all(isinstance(param, Tensor) and _is_hashable(param) for param in group["params"])
        for group in groups
    )


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_scheduler(node: Tree) -> bool:
    return _has(node, _SCHEDULER)


def _changed(node: Tree, changes: Mapping[Any, Tree]) -> Tree:
    """Returns a map or a sequence with some of its parts changed."""
    if isinstance(node, dict):
        return {**node, **changes}
    items = [changes.get(i, item) for i, item in enumerate(node)]
    return items if isinstance(node, list) else tuple(items)


def _with_modules(node: Tree, path: tuple[Any, ...], classes: dict[str, str], place: str) -> Tree:
    """Returns a tree with the state_dicts of modules and schedulers, which need nothing but themselves."""
    if _is_module(node):
        classes["/".join(map(str, path))] = node.name
        return dict(_state_dict(node, "", place))
    if _is_scheduler(node):
        classes["/".join(map(str, path))] = node.name
        return _scheduler(node.state)
    if len(path) >= _DEEPEST:
        return node
    changes = {key: _with_modules(part, (*path, key), classes, place) for key, part in _parts(node)}
    return _changed(node, changes) if changes else node


def _scheduler(state: Mapping[str, Tree]) -> dict[str, Tree]:
    """Returns the state_dict of a scheduler, which has no functions, and of other callables what they keep."""
    kept = {key: part for key, part in state.items() if key != _OPTIMIZER}
    if isinstance(functions := kept.get(_LAMBDAS), list):
        kept[_LAMBDAS] = [one.state if isinstance(one, Record) else None for one in functions]
    return kept


def _state_dict(module: Record, prefix: str, place: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and the persistent buffers of a module and of those inside, by name."""
    if depth > MAX_DEPTH or len(prefix) > MAX_NAME_BYTES:
        raise FormatError("A pickled module is too deep to be one.", place=place, found=prefix[:200])
    left_out = module.state.get(_LEFT_OUT)
    members = left_out.args[0] if isinstance(left_out, Record) and left_out.args else ()
    names = members if isinstance(members, (list, tuple)) else ()
    for part, skipped in ((_PARAMETERS, ()), (_BUFFERS, names)):
        tensors = module.state[part] if isinstance(module.state[part], Mapping) else {}
        yield from (
            (f"{prefix}{name}", tensor)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and name not in skipped
        )
    modules = module.state[_MODULES] if isinstance(module.state[_MODULES], Mapping) else {}
    for name, inner in modules.items():
        if _is_module(inner):
            yield from _state_dict(inner, f"{prefix}{name}.", place, depth + 1)


def _names(node: Tree, depth: int = 0) -> dict[Tensor, str]:
    """Returns the names of tensors near the top of a tree; tensors are equal that are the same values of the file."""
    names: dict[Tensor, str] = {}
    for key, part in _parts(node):
        if isinstance(part, Tensor) and isinstance(key, str) and _is_hashable(part):
            names.setdefault(part, key)
        elif depth < _DEEPEST:
            names = {**_names(part, depth + 1), **names}
    return names


def _with_optimizers(
    node: Tree, path: tuple[Any, ...], names: Mapping[Tensor, str], classes: dict[str, str]
) -> Tree:
    """Returns a tree with the state_dicts of optimizers, whose groups name the parameters that have names."""
    if _is_optimizer(node):  # the whole file
        return _with_optimizers({"optimizer": node}, (), names, classes)
    if len(path) >= _DEEPEST:
        return node
    changes: dict[Any, Tree] = {}
    for key, part in _parts(node):
        if not _is_optimizer(part):
            changes[key] = _with_optimizers(part, (*path, key), names, classes)
            continue
        classes["/".join(map(str, (*path, key)))] = part.name
        changes[key], unnamed = _optimizer(part.state, names)
        if unnamed and isinstance(node, dict):
            changes.setdefault(PARAMS.format(key), unnamed)
    return _changed(node, changes) if changes else node


def _optimizer(state: Mapping[str, Any], names: Mapping[Tensor, str]) -> tuple[dict[str, Tree], list[Tensor]]:
    """Returns the state_dict of an optimizer, and its parameters where they have no names."""
    groups = state["param_groups"]
    params = list(dict.fromkeys(param for group in groups for param in group["params"]))
    index = {param: i for i, param in enumerate(params)}
    is_named = all(param in names for param in params)
    by_index = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [index[param] for param in group["params"]],
            **({"param_names": [names[param] for param in group["params"]]} if is_named else {}),
        }
        for group in groups
    ]
    records = {index.get(param, param): record for param, record in state["state"].items()}
    return {"state": records, "param_groups": by_index}, [] if is_named else params
