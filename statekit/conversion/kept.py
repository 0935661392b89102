"""What a target has no place for: each leaf by its name, and of a run's records what its manifest keeps instead.

A schedule, a trainer's record, the state of a random generator are small, and mean nothing to a target of another
system; but the run needs them when it comes back. The manifest therefore holds them as inert data, and who opens the
target with statekit finds them in the state's extra as if they had been read from the files. docs/format.md, section
3.1, defines the field.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NotRequired, TypedDict

import numpy as np

from statekit.state.evidence import BATCH, ORDER, SCALED, Fact, FactRecord
from statekit.state.train_state import Group, GroupRecord, TrainState
from statekit.tensors.tensor import Tensor, dtype_named, in_memory, nbytes
from statekit.tensors.tree import Tree, from_json, leaf_names, tensor_names, to_json, walk
from statekit.tensors.typed import Described, Name, typed

EXTRA = "extra"
FIELD = "kept"
"""The manifest's field."""
LEAF_BYTES = 2**16
"""The largest leaf that a manifest keeps, in bytes."""
ALL_BYTES = 2**23
"""What a manifest keeps at most, in bytes; a leaf that isn't text or a tensor counts as 32."""
_PLAIN_BYTES = 32
_FOLLOWING = (SCALED, ORDER, BATCH)
"""Facts of a source that a target's own files don't show."""
_NO_PART = "What the manifest keeps isn't a part of a state"
_OF_FILES = "files_beside"
"""Key of the extra that names files and doesn't hold them."""


class KeptField(TypedDict):
    """The manifest's field: a part of the extra as a JSON view, and the values of its tensors in base64."""

    extra: dict[str, Any]
    values: dict[str, str]


def by_leaf(dropped: Mapping[str, str], extra: Mapping[str, Tree]) -> dict[str, str]:
    """Returns the dropped names, with each leaf of `extra` in place of a part that holds it.

    Args:
        dropped: Canonical name -> reason.
        extra: The state's.

    Example:
        >>> by_leaf({"extra/run": "no place"}, {"run": {"epoch": 2, "seed": 5}})
        {'extra/run/epoch': 'no place', 'extra/run/seed': 'no place'}
    """
    names = leaf_names({EXTRA: dict(extra)})
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split("/")
        for i in range(1, len(parts) + 1):
            if (above := "/".join(parts[:i])) in dropped:
                below.setdefault(above, []).append(name)
    return {leaf: reason for name, reason in dropped.items() for leaf in below.get(name, [name])}


@dataclass(frozen=True)
class Kept:
    """What a manifest keeps of a state's extra.

    Attributes:
        extra: That part of the extra.
        names: Canonical names of its leaves.
        dropped: What is left behind all the same: canonical name -> reason.
    """

    extra: Mapping[str, Tree] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)


def kept_of(extra: Mapping[str, Tree], dropped: Mapping[str, str]) -> Kept:
    """Parts what a target has no place for into what its manifest keeps and what is left behind.

    Args:
        extra: The state's.
        dropped: What has no place, leaf by leaf, as `by_leaf` returns it.
    """
    left, names, size = dict(dropped), list[str](), 0
    sizes: dict[str, int] = {}
    for path, leaf in walk({EXTRA: {key: part for key, part in extra.items() if key != _OF_FILES}}):
        name = "/".join(map(str, path))
        if name in dropped:  # keys 0 and "0" give leaves of one name, which are one to a reader of the plan
            sizes[name] = sizes.get(name, 0) + _size(leaf)
    for name, leaf_size in sizes.items():
        if leaf_size > LEAF_BYTES or size + leaf_size > ALL_BYTES:
            left[name] = (
                f"{dropped[name]}, and with {leaf_size} bytes it is too large for the manifest to keep"
            )
        else:
            size += leaf_size
            names.append(name)
            del left[name]
    fitting = set(names)
    part = _part(dict(extra), (EXTRA,), lambda path: "/".join(map(str, path)) in fitting)
    parts = {} if part is _NOTHING else part
    kept = tuple(dict.fromkeys(leaf_names({EXTRA: parts}))) if parts else ()
    apart = {name: f"{dropped[name]}, nor for all of the list it stands in" for name in names}
    return Kept(parts, kept, {**left, **{name: why for name, why in apart.items() if name not in kept}})


_NOTHING = object()


def _part(tree: Tree, path: tuple[Any, ...], wanted: Callable[[tuple[Any, ...]], bool]) -> Any:
    """Returns the wanted leaves of a tree; a list, tuple or object only whole, as its places mean something."""
    if isinstance(tree, Mapping) and tree:
        parts = {key: _part(value, (*path, key), wanted) for key, value in tree.items()}
        wanted_parts = {key: value for key, value in parts.items() if value is not _NOTHING}
        return wanted_parts if wanted_parts else _NOTHING
    below = [(*path, *keys) for keys, _ in walk(tree)]
    return tree if all(map(wanted, below)) else _NOTHING


def _size(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return nbytes(leaf)
    return len(leaf) if isinstance(leaf, (str, bytes)) else _PLAIN_BYTES


def to_field(extra: Mapping[str, Tree]) -> dict[str, Any]:
    """Returns a part of an extra as it stands in a manifest; reads its tensors."""
    values = {
        name: base64.b64encode(np.ascontiguousarray(_little(tensor.read())).tobytes()).decode("ascii")
        for name, tensor in tensor_names(dict(extra)).items()
    }
    return {EXTRA: to_json(dict(extra)), "values": values}


def _little(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def with_kept(state: TrainState, manifest: Mapping[str, Any], place: object) -> TrainState:
    """Returns a state with what the manifest of its checkpoint kept; what the files themselves say outweighs it.

    Raises:
        FormatError: The field isn't one that statekit writes.
    """
    record = manifest.get(FIELD)
    if record is None:
        return state
    return replace(state, extra=_joined(_from_field(record, place), dict(state.extra)))


class _WithFacts(TypedDict):
    """A group's record, as far as all are looked at."""

    facts: NotRequired[list[FactRecord]]


def with_scales(state: TrainState, manifest: Mapping[str, Any], place: object) -> TrainState:
    """Returns a state that knows again which groups' parameters a map scaled, and how numbers were taken for names.

    What is given now follows a scale; groups that know it by themselves follow already.

    Raises:
        FormatError: The manifest's groups aren't records of groups.
    """
    record = manifest.get("state")
    groups_written = record.get("groups", []) if isinstance(record, Mapping) else []
    entries = typed(groups_written, list[_WithFacts], place, _NO_PART)
    written = [
        typed(from_json(entry, place=place), GroupRecord, place, _NO_PART)
        for entry in entries
        if any(fact["name"] in _FOLLOWING for fact in entry.get("facts", ()))
    ]
    records = {frozenset(group["paths"]): group for group in written}
    groups = (
        _known_again(state, group, records[frozenset(group.paths)])
        if frozenset(group.paths) in records
        else group
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=tuple(groups)))


def _known_again(state: TrainState, group: Group, record: GroupRecord) -> Group:
    """Returns a group with the facts that its manifest has of it, and the group itself hasn't."""
    missing = {*_FOLLOWING} - {fact.name for fact in group.facts}
    facts = tuple(Fact.from_json(fact) for fact in record.get("facts", ()) if fact["name"] in missing)
    if SCALED not in {fact.name for fact in facts}:
        return replace(group, facts=(*group.facts, *facts))
    group, old = replace(group, facts=(*group.facts, *facts)), record["hyperparameters"]
    given = {
        name: value
        for name, value in group.hyperparameters.items()
        if group.known_from.get(name) == "given" and old.get(name) != value
    }
    return replace(group, hyperparameters={**group.hyperparameters, **state.optimizer.followed(group, given)})


def _from_field(record: Any, place: object) -> dict[str, Tree]:
    field = typed(record, KeptField, place, _NO_PART)
    values, read = field["values"], 0

    def tensor(entry: Any) -> Tensor:
        nonlocal read
        described = typed(entry, Described, place, _NO_PART)
        data = base64.b64decode(values[described["name"]], validate=True)
        read += len(data)
        if len(data) > LEAF_BYTES or read > ALL_BYTES:
            raise ValueError("more than a manifest keeps")
        dtype = dtype_named(described["dtype"], place)
        array = np.frombuffer(data, dtype.newbyteorder("<")).reshape(described["shape"])
        return in_memory(array.astype(dtype, copy=False), described["name"], str(place))

    extra = typed(from_json(field["extra"], tensor, place), dict[Name, Any], place, _NO_PART)
    leaf_names(extra)
    return extra


def _joined(kept: Tree, stored: Tree) -> Tree:
    """Returns two trees in one; where both hold something, the second does."""
    if isinstance(kept, Mapping) and isinstance(stored, Mapping):
        both = {key: _joined(kept[key], part) if key in kept else part for key, part in stored.items()}
        return {**both, **{key: part for key, part in kept.items() if key not in stored}}
    same = isinstance(kept, list) and isinstance(stored, list) and len(kept) == len(stored)
    return (
        [_joined(kept_part, other) for kept_part, other in zip(kept, stored, strict=True)] if same else stored
    )
