"""Whether every leaf counts: each record of a tree is changed in turn, to see whether anybody notices.

No layout keeps books for this: if a change of a leaf leaves everything as it was, nobody read it, or nobody wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from statekit.conversion.contracts import Encoded
from statekit.errors import StateError, StatekitError
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Record, Tree, tensor_names, to_json, walk

UNREAD: Mapping[str, str] = {
    "optimizer/state/_index_update_count/*": "MXNet's counts of the device used last; all devices' are read",
    "optimizer/param_groups/0/rules": "an optimizer that doesn't factor has none",
    "variant": "statekit.torch's groups hold it each; at the top it stands for people",
    "@/statekit_keras/*": "a note beside what Keras itself says of the optimizer, which is read",
}
"""Records of a checkpoint that decoding needn't read: pattern of their names -> why."""
IMPLIED: Mapping[str, str] = {
    "extra/torch_by_name": "a layout by name is by name whatever the source was",
    "extra/megatron_mixed_precision": "a layout of one of Megatron-Core's optimizers is, whatever the source was",
    "extra/megatron_master": "the same",
    "extra/megatron_common/optimizer/param_state_sharding_type": "the same",
    "extra/megatron_common/content_metadata/distrib_optim_sharding_type": "the same",
    "extra/files_beside/*": "dropped by the files' names, which are the values",
    "extra/tf1/updates": "says of which count TensorFlow's powers are, which are written: anew if it isn't the state's",
    "extra/mxnet/variant": "follows from the state's optimizer",
    "extra/keras/class": "follows from the state's optimizer",
    "extra/keras/iteration": "follows from the state's counts, and outweighs them only where they don't tell",
    "extra/keras/schedule": "whether the state knows a learning rate says as much",
    "extra/keras/tree/@/config.json/compile_config/optimizer/*": "written anew from the state's hyperparameters",
    "extra/keras/tree/optimizer/vars/@/name": "follows from the class of the optimizer, unless that is the same",
}
"""Records of a state's extra that encoding needn't write nor name: pattern of their names -> why."""
SHOWN: Mapping[str, str] = {
    "factored": "by which slots there are",
    "dtype_momentum": "by the dtype of m",
    "beta1": "by whether there is an m, or by TensorFlow's power of it, whose exponent is the count",
    "beta2": "by TensorFlow's power of it, whose exponent is the count",
    "amsgrad": "by whether there is a v_max",
    "use_ema": "by whether there are averages",
    "parameter_encoding": "by the dtype of the parameters",
    "use_fused_step": "by the variant, which is the state's",
}
"""Hyperparameters that a file shows by its tensors and needn't name: canonical name -> how. A manifest has them all."""
_REFUSED = (StatekitError, AttributeError, LookupError, TypeError, ValueError)
"""What a nonsensical value may raise: who raises has noticed."""


def other_than(leaf: Any) -> Any:
    """Returns another value of a leaf's own type; of an empty dict, list or tuple, one that holds something."""
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return leaf + 1
    if isinstance(leaf, float):
        return leaf / 2 if leaf and leaf - leaf == 0 else 0.5
    if isinstance(leaf, str):
        return f"{leaf}x"
    if isinstance(leaf, bytes):
        return leaf + b"x"
    if isinstance(leaf, Record):
        return replace(leaf, name=f"{leaf.name}x")
    fuller: Mapping[type, Any] = {dict: {"x": 1}, list: [1], tuple: (1,)}
    return fuller.get(type(leaf), 1)


def records(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """Yields the leaves of a tree that aren't tensors, the first of each kind: places in a list are of one kind."""
    seen = set[tuple[Any, ...]]()
    for path, leaf in walk(tree):
        kind = (*("*" if isinstance(key, int) else key for key in path), type(leaf))
        if path and not isinstance(leaf, Tensor) and kind not in seen:
            seen.add(kind)
            yield path, leaf


def unread(tree: Tree, decode: Callable[[Tree], TrainState]) -> list[str]:
    """Returns the records of a checkpoint's tree whose change no state shows, and no refusal."""
    meant = _described(decode(tree))
    return [
        "/".join(map(str, path))
        for path, _ in records(tree)
        if not _matches("/".join(map(str, path)), UNREAD)
        and _is_silent(meant, lambda changed: _described(decode(changed)), changed_at(tree, path, other_than))
    ]


def unwritten(
    state: TrainState, encode: Callable[[TrainState], Encoded], dropped: Collection[str], is_own: bool
) -> list[str]:
    """Returns what a state holds beside tensors and is neither in what it encodes to nor said to be dropped.

    Args:
        state: The state.
        encode: Gives the native form.
        dropped: Names of what is said to be dropped.
        is_own: Whether the layout is that of the file: then what the file tells of hyperparameters counts, too.
    """
    meant = _written(encode(state))
    changes = [*_of_extra(state), *(_of_hyperparameters(state) if is_own else ())]
    return [
        name
        for name, other in changes
        if name not in dropped and _is_silent(meant, lambda tree: _written(encode(tree)), other)
    ]


def _of_extra(state: TrainState) -> Iterator[tuple[str, TrainState]]:
    """Yields the state with one record of its extra changed in turn, and the record's name."""
    extra = dict(state.extra)
    for path, leaf in records(extra):
        name = f"extra/{'/'.join(map(str, path))}"
        if not _matches(name, IMPLIED) and not (len(path) == 1 and leaf in ({}, [], ())):
            yield name, replace(state, extra=changed_at(extra, path, other_than))


def _of_hyperparameters(state: TrainState) -> Iterator[tuple[str, TrainState]]:
    """Yields the state with one hyperparameter of its first group changed in turn, of those that the file told."""
    groups = state.optimizer.groups
    first = groups[0] if groups else None
    for path, _ in records(dict(first.hyperparameters)) if first else ():
        if first and first.known_from.get(str(path[0])) == "file" and path[0] not in SHOWN:
            changed = replace(
                first, hyperparameters=changed_at(dict(first.hyperparameters), path, other_than)
            )
            optimizer = replace(state.optimizer, groups=(changed, *groups[1:]))
            with suppress(StateError):  # a value that no run has
                yield f"hyperparameters/{'/'.join(map(str, path))}", replace(state, optimizer=optimizer)


def _described(state: TrainState) -> Any:
    """Returns all of a state but the values of tensors that have more than one element."""
    groups = [dict(group.slots) for group in state.optimizer.groups]
    parts = {
        "params": dict(state.params),
        "slots": dict(state.slots),
        "groups": groups,
        "extra": dict(state.extra),
    }
    return to_json(state.to_json()), to_json(parts), _scalars(parts)


def _written(encoded: Encoded) -> Any:
    return to_json(encoded.tree), _scalars(encoded.tree), encoded.step, encoded.place


def _scalars(tree: Tree) -> dict[str, bytes]:
    named = tensor_names(tree).items()
    return {name: tensor.read().tobytes() for name, tensor in named if all(n == 1 for n in tensor.shape)}


def _matches(name: str, patterns: Mapping[str, str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_silent(meant: Any, look: Callable[[Any], Any], changed: Any) -> bool:
    try:
        return bool(look(changed) == meant)
    except _REFUSED:
        return False


def changed_at(tree: Tree, path: Path, change: Callable[[Any], Any]) -> Tree:
    """Returns a tree with the leaf at a path changed, where `path` is one that `walk` yields; the rest is shared."""
    if not path:
        return change(tree)
    key, rest = path[0], path[1:]
    if isinstance(tree, Record):
        return replace(tree, **{key: changed_at(getattr(tree, key), rest, change)})
    if isinstance(tree, Mapping):
        return {k: changed_at(part, rest, change) if k == key else part for k, part in tree.items()}
    return type(tree)(changed_at(part, rest, change) if i == key else part for i, part in enumerate(tree))
