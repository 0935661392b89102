"""The states of Optax' links in a tree without class names: a NamedTuple shows by its fields, a chain is a sequence.

    {count, v_row, v_col, v}                     FactoredState, of scale_by_factored_rms
    {count, mu, nu}, {count, mu, nu, nu_max}     ScaleByAdamState, ScaleByAmsgradState
    {count, mu, ns_coeffs}                       MuonState
    {count, ema}                                 EmaState: Adafactor's momentum
    {count}                                      ScaleByScheduleState
    {count, hyperparams, inner_state, ...}       inject_hyperparams
    {mini_step, gradient_step, inner_opt_state, acc_grads, ...}   MultiSteps
    {inner_state}, {inner_states: {label: ...}}  masked, multi_transform
    {count, v_row, v_col, v, m, average}, ...    the states of statekit.jax, whose fields are canonical slots
    None, {}                                     EmptyState, and MaskedNode in the place of a parameter's slot

Orbax keeps a sequence as one; Flax' msgpack makes it a dict with the keys "0", "1", ...
Source: google-deepmind/optax optax/_src/factorized.py, transform.py, combine.py, wrappers.py, schedules/_inject.py,
transforms/_accumulation.py, _accumulating.py, _masking.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from statekit.converters.layouts.optax.kinds import GALORE, INNER, NOVOGRAD, SM3, STRANGERS, Stranger
from statekit.errors import StateError
from statekit.state.schema import load_schema
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import Path, Tree

_SCHEMAS = [load_schema(name) for name in ("adafactor", "scaled_adam", "lans", "lamb", "adamw", "muon")]
OWN_FIELDS: dict[str, tuple[str, ...]] = {schema.name: schema.kept(*schema.stepped) for schema in _SCHEMAS}
"""By schema, the fields of the states of statekit.jax that are trees like the parameters', beside `count`."""
OWN_GROUP_FIELDS: dict[str, tuple[str, ...]] = {
    schema.name: names for schema in _SCHEMAS if (names := schema.kept_by_groups(*schema.stepped))
}
"""By schema, the fields that belong to all parameters together."""

KINDS: dict[frozenset[str], str] = {
    **{
        frozenset(("count", *fields, *OWN_GROUP_FIELDS.get(schema, ()))): f"statekit.{schema}"
        for schema, fields in OWN_FIELDS.items()
    },
    frozenset({"count", "v_row", "v_col", "v"}): "adafactor",
    frozenset({"count", "mu", "nu"}): "adam",
    frozenset({"count", "mu", "nu", "nu_max"}): "adam",
    frozenset({"count", "mu", "ns_coeffs"}): "muon",
    frozenset({"count", "ema"}): "ema",
    frozenset({"count"}): "schedule",
    frozenset({"count", "hyperparams", "inner_state"}): "inject",
    frozenset({"count", "hyperparams", "hyperparams_states", "inner_state"}): "inject",
    frozenset({"mini_step", "gradient_step", "inner_opt_state", "acc_grads"}): "accumulate",
    frozenset({"mini_step", "gradient_step", "inner_opt_state", "acc_grads", "skip_state"}): "accumulate",
}
"""What the state of a link is called here, by its fields."""
_MOST_FIELDS = max(map(len, {**KINDS, **STRANGERS}))
SLOT_TREES: dict[str, tuple[str, ...]] = {
    **{f"statekit.{schema}": fields for schema, fields in OWN_FIELDS.items()},
    "adafactor": ("v_row", "v_col", "v"),
    "adam": ("mu", "nu", "nu_max"),
    "muon": ("mu",),
    "ema": ("ema",),
    "stranger": tuple(dict.fromkeys(name for link in (*STRANGERS.values(), NOVOGRAD) for name in link.trees)),
}
"""The fields of a link's state that are trees like the parameters'."""
_SLOTS = {name for names in SLOT_TREES.values() for name in names}
CHAIN_INDEX = re.compile(r"0|[1-9][0-9]{0,2}")
"""What is a link's index: no chain has a thousand."""
_MOST_EMPTY = 32
"""Links of a chain at most that have no state: each becomes a node."""
LABELLED = "inner_states"
"""The field of `optax.partition`: the state of each part under its label."""
STRANGER = "stranger"
"""The kind of the links of optimizers that have no schema."""
CORE_LINKS = ("adafactor", "adam", "muon")
"""The links that an optimizer of Optax is known by."""
OWN_CORE_LINKS = tuple(f"statekit.{schema}" for schema in OWN_FIELDS)
"""Those of statekit.jax."""


@dataclass(frozen=True)
class Link:
    """The state of one link.

    Attributes:
        kind: As `KINDS` has it.
        path: Its keys in the tree.
        state: Its fields.
    """

    kind: str
    path: Path
    state: Mapping[str, Any]

    def trees(self) -> Iterator[tuple[str, Tree]]:
        """Yields the fields that are trees like the parameters', by name."""
        stranger = stranger_of(self.state) if self.kind == STRANGER else None
        names = stranger.trees if stranger is not None else SLOT_TREES.get(self.kind, ())
        yield from ((name, self.state[name]) for name in names if name in self.state)


def links(tree: Tree) -> list[Link]:
    """Returns the states of all links, from the top and from the left."""
    all_links: list[Link] = []
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        few = isinstance(node, Mapping) and len(node) <= _MOST_FIELDS
        kind = KINDS.get(frozenset(node)) if few else None
        if (few and frozenset(node) == GALORE) or (kind == "adam" and _is_novograd(node)):
            continue
        if kind is not None and counts(node):
            all_links.append(Link(kind, path, node))
        if kind not in SLOT_TREES:
            inner = [
                ((*path, key), child) for key, child in children(node) if isinstance(child, (dict, list))
            ]
            stack += reversed(inner)
    return all_links


def strangers(tree: Tree) -> list[Link]:
    """Returns the states of links of optimizers that have no schema.

    Parameters may have such names too: a state's fields are trees.
    """
    places: list[Link] = []
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        if stranger_of(node) is not None:
            link = Link(STRANGER, path, node)
            if any(children(own_tree) for _, own_tree in link.trees()):
                places.append(link)
                continue
        stack += reversed([((*path, key), child) for key, child in children(node)])
    return places


def stranger_of(node: Tree) -> Stranger | None:
    """Returns which optimizer without a schema a link's state is of; None if it is of none."""
    if not isinstance(node, Mapping) or len(node) > _MOST_FIELDS or not counts(node):
        return None
    if KINDS.get(frozenset(node)) == "adam":
        return NOVOGRAD if _is_novograd(node) else None
    if frozenset(node) == _CENTERED and not _are_alike(node["mu"], node["nu"]):
        return SM3
    return STRANGERS.get(frozenset(node))


_CENTERED = frozenset({"mu", "nu"})


def _are_alike(tree: Tree, other: Tree) -> bool:
    """Tells whether two trees have leaves in the same places."""
    return [path for path, _ in leaves(tree)] == [path for path, _ in leaves(other)]


def _is_novograd(node: Mapping[str, Any]) -> bool:
    """Tells whether a state of Adam's fields has one number of each parameter as its second moment."""
    shaped = (path for path, leaf in leaves(node["mu"]) if is_tensor(leaf) and leaf.shape)
    path = next(shaped, None)
    second = None if path is None else at(node["nu"], path)
    return isinstance(second, Tensor) and second.shape == ()


def counts(node: Mapping[str, Any]) -> bool:
    """Tells whether what should count is a number: an integer, or one that was narrowed with the weights."""
    counters = [node[name] for name in ("count", "mini_step", "gradient_step", "t") if name in node]
    return all(is_number(leaf) for leaf in counters)


def is_number(leaf: Any) -> bool:
    """Tells whether a leaf is one number; "V" is the kind of bfloat16."""
    return is_tensor(leaf) and leaf.shape == () and leaf.dtype.kind in "iufV"


def integer(leaf: Any, path: Path) -> int:
    """Returns the integer that a leaf holds.

    Raises:
        StateError: It holds none.
    """
    try:
        if is_number(leaf):
            return int(leaf.read())
    except (ValueError, OverflowError, TypeError):  # of NaN, of Inf, of bytes without a type
        pass
    raise StateError("A count is not an integer.", place="/".join(map(str, path)), expected="one integer")


def children(node: Any) -> list[tuple[Any, Any]]:
    """Returns keys and nodes below a node; none of a leaf."""
    if isinstance(node, (dict, Mapping)):
        return list(node.items())
    return list(enumerate(node)) if isinstance(node, list) else []


def chain_items(node: Tree) -> dict[int, Tree] | None:
    """Returns the links of a chain by their indices, of which some may be missing; None if a node is no chain.

    nnx and EasyLM leave the states out that hold nothing.
    """
    if isinstance(node, list) and node:
        return dict(enumerate(node))
    if isinstance(node, Mapping) and node and all(CHAIN_INDEX.fullmatch(str(key)) for key in node):
        items = {int(key): node[key] for key in sorted(node, key=int)}
        return items if len(items) == len(node) and max(items) < len(items) + _MOST_EMPTY else None
    return None


def with_sequences(tree: Tree) -> Tree:
    """Returns a tree whose chains are lists, and None where a NamedTuple is empty, as Orbax has them.

    Maps with the keys "0", "1", ... are sequences only where they lead to a link's state: parameters may be named so.
    An index that is missing becomes None: some programs leave the states out that hold nothing.
    """
    all_links = links(tree)
    above = {link.path[:i] for link in all_links for i in range(len(link.path) + 1)}
    chains: dict[Path, Tree] = {}
    for path in sorted(above, key=len):
        # What lies in a chain is replaced with it.
        if all(path[:i] not in chains for i in range(len(path))) and _is_state(node := under(tree, path)):
            chains[path] = _chain(node)
    return replaced(tree, chains)


def _is_state(node: Any) -> bool:
    return chain_items(node) is not None or bool(INNER & node.keys()) or frozenset(node) in KINDS


def _chain(node: Any) -> Tree:
    if node == {}:
        return None
    if (items := chain_items(node)) is not None:
        return [_chain(items.get(index)) for index in range(max(items) + 1)]
    if not isinstance(node, Mapping):
        return node
    parts: dict[str, Tree] = {}
    for name, child in node.items():
        if name == LABELLED and isinstance(child, Mapping):
            parts[name] = {label: _chain(state) for label, state in child.items()}
        elif name in _SLOTS:
            parts[name] = replaced(child, {keys: None for keys, leaf in leaves(child) if leaf == {}})
        else:
            parts[name] = _chain(child) if name in INNER else child
    return parts


def under(tree: Tree, path: Path) -> Tree:
    """Returns the node under a path."""
    for key in path:
        tree = tree[key]
    return tree


def leaves(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """Yields the path and value of every leaf, as `statekit.tensors.tree.walk` does, without its budget."""
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        below = () if isinstance(node, Stored) else children(node)  # tensors are the many
        if below:
            stack += reversed([((*path, key), child) for key, child in below])
        else:
            yield path, node


def replaced(tree: Tree, parts: Mapping[Path, Tree], path: Path = ()) -> Tree:
    """Returns a tree with some of its nodes replaced."""
    if path in parts:
        return parts[path]
    if isinstance(tree, Stored):
        return tree
    below = {}
    for key, child in children(
        tree
    ):  # a loop, because a comprehension costs a second stack frame for each level
        below[key] = replaced(child, parts, (*path, key))
    if not below:
        return tree
    return below if isinstance(tree, Mapping) else list(below.values())


def at(node: Any, path: Path) -> Any:
    """Returns the node under a path; None if there is none."""
    for key in path:
        if isinstance(node, Mapping):
            node = node.get(key)
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        else:
            return None
    return node


def is_tensor(leaf: Any) -> bool:
    """Tells whether a leaf is a tensor; the concrete class first: a protocol is slow to check."""
    return isinstance(leaf, Tensor)
