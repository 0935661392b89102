"""Which tensor of a source became which of its target: digests of both sides, and the map between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from statekit.conversion.plan import Plan, nodes
from statekit.files.checkpoint import Checkpoint
from statekit.files.manifest import tensor_entry
from statekit.state.exactness import Exactness
from statekit.state.train_state import TrainState
from statekit.tensors.digest import json_digest, tensor_digest
from statekit.tensors.distance import Distance, distance
from statekit.tensors.tensor import Tensor, dtype_name, nbytes
from statekit.verify.stepping import named

Verdict: TypeAlias = Literal[
    "bit-exact", "within the rounding bound", "semantic difference", "not comparable", "refuted"
]
"""What is said of a tensor, or of the whole; from the best to the worst."""
VERDICTS: tuple[Verdict, ...] = (
    "bit-exact", "within the rounding bound", "semantic difference", "not comparable", "refuted"
)  # fmt: skip
OnRead: TypeAlias = Callable[[str, int], object]
_OF_EXACTNESS: Mapping[Exactness, Verdict] = {
    Exactness.BITWISE: "bit-exact",
    Exactness.ROUNDING: "within the rounding bound",
}


@dataclass(frozen=True)
class Digests:
    """The content of a checkpoint.

    Attributes:
        entries: Shape, dtype and digest of each tensor, by native name.
        bytes: Of all of them.
    """

    entries: Mapping[str, Mapping[str, Any]]
    bytes: int

    @property
    def root(self) -> str:
        """The digest over all of them."""
        return json_digest({name: dict(entry) for name, entry in self.entries.items()})


@dataclass(frozen=True)
class Row:
    """One tensor of the canonical state, from its place in the source to that in the target.

    Attributes:
        name: Canonical name in the target.
        sources: Native names of what it is made of.
        operations: What is done to it on the way in, from the inside.
        targets: Native names of where the target has it.
        stored_by: What is done to that when the target is read.
        exactness: How exact the target is by the plan.
        reason: Why it isn't bitwise.
        verdict: What its values say.
        distance: How far they are from what they should be, if they differ.
    """

    name: str
    sources: tuple[str, ...]
    operations: tuple[str, ...]
    targets: tuple[str, ...]
    stored_by: tuple[str, ...]
    exactness: Exactness
    reason: str
    verdict: Verdict
    distance: Distance | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the row as plain data; what is empty is left out."""
        data = {**vars(self), "exactness": self.exactness.name.lower(), "distance": None}
        if self.distance is not None:
            data["distance"] = self.distance.to_json()
        kept = {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}
        return {name: value for name, value in kept.items() if value not in (None, "", [])}


@dataclass(frozen=True)
class Bijection:
    """Whether every element of the source's state is in the target once.

    Attributes:
        elements: Of the state in the target.
        unused: Native names of the source that no tensor of the state is made of: records, counts, what was dropped.
        unmade: The same of the target.
        faults: What contradicts it, a sentence each.
    """

    elements: int
    unused: tuple[str, ...]
    unmade: tuple[str, ...]
    faults: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }


@dataclass(frozen=True)
class Reader:
    """Digests of tensors, each stored one read once.

    Attributes:
        on_read: Told of each tensor before it is read.
    """

    on_read: OnRead
    _known: dict[int, str] = field(default_factory=dict)
    _kept: list[Tensor] = field(default_factory=list)

    def digest(self, tensor: Tensor, name: str) -> str:
        """Returns the digest of a tensor's values."""
        if id(tensor) not in self._known:
            self.on_read(name, nbytes(tensor))
            self._kept.append(tensor)  # so that no other gets its number
            self._known[id(tensor)] = tensor_digest(tensor)
        return self._known[id(tensor)]

    def digests(self, checkpoint: Checkpoint) -> Digests:
        """Returns the content of a checkpoint."""
        entries = {
            name: tensor_entry(tensor, self.digest(tensor, name))
            for name, tensor in checkpoint.tensors.items()
        }
        return Digests(entries, sum(map(nbytes, checkpoint.tensors.values())))


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Returns every tensor of a state's parameters and optimizer by canonical name."""
    groups = [group.slots for group in state.optimizer.groups]
    return {_canonical(*key): tensor for key, tensor in named(state.params, state.slots, groups).items()}


def _canonical(path: str, name: str) -> str:
    if name == "param":
        return f"params/{path}"
    return f"{path}/{name}" if path.startswith("groups/") else f"slots/{path}/{name}"


def _is_of(name: str, path: str) -> bool:
    """Tells whether a tensor's name is that of a parameter or of one of its slots."""
    return name == f"params/{path}" or name.startswith(f"slots/{path}/")


def compared(expected: TrainState, actual: TrainState, plan: Plan, reader: Reader) -> list[Row]:
    """Compares every tensor that a target should hold with what it holds, bit for bit."""
    right, other = tensors_of(expected), tensors_of(actual)
    exactness = {entry.name: (entry.exactness, entry.reason) for entry in plan.entries}
    by_map = {mapping.target: (mapping.exactness, mapping.reason) for mapping in plan.mapped}
    rows = []
    for name in dict.fromkeys([*right, *other]):
        expected_tensor, target_tensor = right.get(name), other.get(name)
        sources, operations = _origin(expected_tensor)
        targets, stored_by = _origin(target_tensor)
        levels = [exactness[target] for target in targets if target in exactness]
        levels += [by_map[path] for path in by_map if _is_of(name, path)]
        level, reason = max(levels, default=(Exactness.BITWISE, ""), key=lambda pair: pair[0])
        row = Row(name, sources, operations, targets, stored_by, level, reason, "refuted")
        if expected_tensor is None or target_tensor is None:
            rows.append(
                replace(
                    row, reason="only the target has it" if expected_tensor is None else "the target lacks it"
                )
            )
        elif expected_tensor.shape != target_tensor.shape or expected_tensor.dtype != target_tensor.dtype:
            forms = [
                f"{dtype_name(side.dtype)} {list(side.shape)}" for side in (expected_tensor, target_tensor)
            ]
            rows.append(replace(row, reason=f"is {forms[1]}, should be {forms[0]}"))
        elif reader.digest(expected_tensor, name) == reader.digest(target_tensor, name):
            rows.append(replace(row, verdict=_OF_EXACTNESS.get(level, "semantic difference")))
        else:
            apart = distance(expected_tensor, target_tensor)
            rows.append(replace(row, reason=f"other values than the source: {apart}", distance=apart))
    return rows


def bijection(rows: list[Row], expected: TrainState, source: Checkpoint, target: Checkpoint) -> Bijection:
    """Tells whether every element of what the state is made of is used once."""
    tensors = tensors_of(expected)
    used = _used(tensors.values())
    targets = {name for row in rows for name in row.targets}
    faults = [
        *_uses_not_once(used, rows, source),
        *(f"{row.name}: {row.reason}" for row in rows if _has_no_end(row)),
    ]
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    unused = tuple(name for name in source.tensors if name not in used)
    unmade = tuple(name for name in target.tensors if name not in targets)
    return Bijection(elements, unused, unmade, tuple(dict.fromkeys(faults)))


def _used(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Returns how many elements of each stored tensor some tensors are made of."""
    used: dict[str, int] = {}
    for tensor in tensors:
        expression = tensor.to_json()
        leaves = list(_leaves(expression))
        # Of copies every one is read, and held to the first.
        whole = len(leaves) > 1 or any(node.get("op") == "copies" for node in nodes(expression))
        for leaf, size in leaves:
            used[leaf] = used.get(leaf, 0) + (size if whole else math.prod(tensor.shape))
    return used


def _uses_not_once(used: Mapping[str, int], rows: Iterable[Row], source: Checkpoint) -> Iterator[str]:
    """Yields which stored tensors are used in part or several times, where rounding alone may change them."""
    changed = {name for row in rows if row.exactness > Exactness.ROUNDING for name in row.sources}
    for name, count in used.items():
        stored = source.tensors.get(name)
        if stored is not None and name not in changed and count != math.prod(stored.shape):
            yield f"{name} has {math.prod(stored.shape)} elements, {count} of them are used"


def _has_no_end(row: Row) -> bool:
    """Tells whether nothing in the target is made of a row, or a refuted one is made of nothing."""
    return not row.targets or (not row.sources and row.verdict == "refuted")


def _origin(tensor: Tensor | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the stored tensors that one is made of, and what is done to them, from the inside."""
    if tensor is None:
        return (), ()
    expression = tensor.to_json()
    names = tuple(dict.fromkeys(name for name, _ in _leaves(expression)))
    operations = [str(node["op"]) for node in nodes(expression) if node.get("op") not in (None, "stored")]
    return names, tuple(dict.fromkeys(reversed(operations)))


def _leaves(expression: Any) -> Iterator[tuple[str, int]]:
    for node in nodes(expression):
        if node.get("op") == "stored":
            yield str(node["name"]), math.prod(node["shape"])
