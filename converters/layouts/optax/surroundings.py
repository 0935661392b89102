"""What stands around the link that an optimizer is known by: its chain, the chains around that, and wrappers.

Input: a tree with its links. Output, for each core link, what stands before and behind it, and what it lies in.

    [clip, [ScaleByAdamState, decay, rate]]   before: one stateless; behind: two of its own chain
    {1: {0: ScaleByAdamState, 2: {count}}}    the same as nnx writes it, which leaves empty states out

A chain whose stored indices have gaps has a stateless link in each gap. How many stand behind its last index nobody
can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from statekit.converters.layouts.optax.kinds import IDLE, NEIGHBOURS, PLATEAU, SCHEDULE, WRAPPERS, Wrapper
from statekit.converters.layouts.optax.links import (
    CORE_LINKS,
    LABELLED,
    SLOT_TREES,
    Link,
    chain_items,
    children,
    counts,
    is_number,
    is_tensor,
    leaves,
    under,
)
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import Path, Tree

Kind: TypeAlias = Literal["stateless", "masked", "schedule", "plateau", "idle", "ema", "other"]
_SUMMED, _INJECTED = "acc_grads", "hyperparams"
"""The fields of MultiSteps and inject_hyperparams that are no statistics of a link's own."""


@dataclass(frozen=True)
class Neighbour:
    """A link that stands in a chain with a core link, or in a chain around it.

    Attributes:
        kind: `stateless`; `masked`, a stateless one behind a mask; `schedule`, which has a count alone; `plateau`,
            reduce_on_plateau; `idle`, which leaves updates as they are; `ema`; or `other`.
        path: Its keys in the tree.
        what: Its name, or its fields.
        state: Its fields; nothing of a stateless link.
    """

    kind: Kind
    path: Path
    what: str = ""
    state: Tree = None


@dataclass(frozen=True)
class CoreLink:
    """A link that an optimizer is known by, and what is around it.

    Attributes:
        link: The link.
        before: The links before it, in its own chain and in those around it.
        behind: Those behind it in its own chain; None if it isn't in one.
        after: Those behind its chain in the chains around it.
        gaps: Whether the chains around it leave stateless links out.
        wrappers: What it lies in, from the inside.
        unknown: The fields of what it lies in that nobody knows.
        momentum: The link of Adafactor's momentum behind it.
        injected: Values of inject_hyperparams around it, by Optax' names.
        injected_schedules: By Optax' name of a hyperparameter, the count of its schedule in inject_hyperparams.
        others: What else keeps something like its parameters around it, and belongs to no optimizer known here.
        label: Its label in the innermost partition around it.
    """

    link: Link
    before: tuple[Neighbour, ...] = ()
    behind: tuple[Neighbour, ...] | None = None
    after: tuple[Neighbour, ...] = ()
    gaps: bool = False
    wrappers: tuple[Wrapper, ...] = ()
    unknown: tuple[str, ...] = ()
    momentum: Link | None = None
    injected: Mapping[str, Tensor] = field(default_factory=dict)
    injected_schedules: Mapping[str, Link] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    label: str | None = None

    @property
    def links(self) -> tuple[Link, ...]:
        """Its own link and its momentum's."""
        return (self.link, *((self.momentum,) if self.momentum else ()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Their paths."""
        return tuple(link.path for link in self.links)

    @property
    def kinds_behind(self) -> tuple[str, ...]:
        """The kinds of the links behind it in its own chain, without those that do nothing."""
        return tuple(link.kind for link in self.behind or () if link.kind not in ("idle", "plateau"))

    @property
    def masked(self) -> bool:
        """Whether a masked link without slots stands behind it: weight decay with a mask."""
        return "masked" in self.kinds_behind

    def named(self, kind: Kind) -> list[Neighbour]:
        """Returns the links around it of one kind, from the left."""
        return [link for link in (*self.before, *(self.behind or ()), *self.after) if link.kind == kind]


def core_link(
    link: Link,
    all_links: Sequence[Link],
    tree: Tree,
    params: Path,
    strangers: Sequence[Link] = (),
    left_out: bool = False,
) -> CoreLink:
    """Returns a core link with what is around it.

    Args:
        link: Its link.
        all_links: All links of the tree.
        tree: The tree.
        params: Where the parameters are.
        strangers: The links of optimizers without a schema.
        left_out: Whether the program that wrote the tree leaves states out that hold nothing.
    """
    moved = _paths(link)
    elsewhere = [child.path for child in strangers if _paths(child).isdisjoint(moved)]
    walk = _Walk(link, all_links, tree, elsewhere, left_out)
    top = link.path
    for depth in reversed(range(len(link.path))):
        if params[:depth] == link.path[:depth]:
            break
        top = link.path[:depth]
        walk.step(top, link.path[depth])
    momentum = walk.momentum()
    doubled = [
        other.kind
        for other in all_links
        if other.kind in ("ema", *CORE_LINKS)
        and other not in (link, momentum)
        and other.path[: len(top)] == top
        and not _paths(other).isdisjoint(moved)
    ]
    core_paths = [child.path for child in all_links if child.kind in SLOT_TREES]
    strange = _strange(under(tree, top), top, core_paths, under(tree, params), moved)
    return CoreLink(
        link=link,
        before=tuple(walk.before),
        behind=None if walk.behind is None else tuple(walk.behind),
        after=tuple(walk.after),
        gaps=walk.gaps,
        wrappers=tuple(walk.wrappers),
        unknown=tuple(walk.unknown),
        momentum=momentum,
        injected=walk.injected,
        injected_schedules=walk.schedules,
        others=(*doubled, *strange),
        label=walk.label,
    )


class _Walk:
    """The way from a core link to the top of its optimizer's state, node by node."""

    def __init__(
        self, link: Link, all_links: Sequence[Link], tree: Tree, elsewhere: Sequence[Path], left_out: bool
    ) -> None:
        self.link, self.tree = link, tree
        self.cores = [child.path for child in all_links if child.kind in SLOT_TREES and child.kind != "ema"]
        self.cores += elsewhere
        self.links_at = {child.path: child for child in all_links}
        self.before: list[Neighbour] = []
        self.behind: list[Neighbour] | None = None
        self.after: list[Neighbour] = []
        self.gaps = left_out
        self.wrappers: list[Wrapper] = []
        self.unknown: list[str] = []
        self.injected: dict[str, Tensor] = {}
        self.schedules: dict[str, Link] = {}
        self.label: str | None = None

    def step(self, outer: Path, key: Any) -> None:
        """Takes in the node at `outer`, of which the way so far lies under `key`."""
        node = under(self.tree, outer)
        if outer[-1:] == (LABELLED,):
            self.label = self.label if self.label is not None else str(key)
            return
        if (items := chain_items(node)) is not None:
            self._chain(items, outer, int(key))
            return
        wrapper = WRAPPERS.get(frozenset(map(str, node)))
        if wrapper is not None and wrapper.inner == key:
            self.wrappers.append(wrapper)
        elif key in _INNER_FIELDS:
            self.unknown.append(", ".join(map(str, node)))
        self.injected = {**_injected(node), **self.injected}
        self._injected_schedules(node, outer)

    def _chain(self, items: Mapping[int, Tree], outer: Path, position: int) -> None:
        direct = outer == self.link.path[:-1]
        node = under(self.tree, outer)
        self.gaps |= isinstance(node, Mapping)  # a complete chain is a list
        keys = {int(key): key for key, _ in children(node)}
        links: dict[bool, list[Neighbour]] = {False: [], True: []}
        for index in range(max(items) + 1):
            if index != position:
                place = (*outer, keys.get(index, index))
                links[index > position] += _neighbours(items.get(index), place, self.cores)
        self.before = [*links[False], *self.before]
        if direct:
            self.behind = links[True]
        else:
            self.after += links[True]

    def _injected_schedules(self, node: Tree, outer: Path) -> None:
        states = node.get(_SCHEDULES) if isinstance(node, Mapping) else None
        for name, _ in children(states):
            link = self.links_at.get((*outer, _SCHEDULES, name))
            if link is not None:
                self.schedules.setdefault(str(name), link)

    def momentum(self) -> Link | None:
        """Returns the link of Adafactor's momentum."""
        emas = [link for link in self.behind or () if link.kind == "ema"]
        if self.link.kind != "adafactor" or not emas:
            return None
        return self.links_at[emas[0].path]


_SCHEDULES = "hyperparams_states"
_INNER_FIELDS = {"inner_state", "inner_opt_state", "base_optimizer_state", "fast_state"}


def wrapped(tree: Tree, core_links: Sequence[Link]) -> Iterator[tuple[Wrapper, Path, Mapping[str, Any]]]:
    """Yields the wrappers around core links, each once: its kind, its path and its fields."""
    places = {link.path[:depth] for link in core_links for depth in range(len(link.path))}
    for path in sorted(places, key=len):
        node = under(tree, path)
        wrapper = WRAPPERS.get(frozenset(map(str, node))) if isinstance(node, Mapping) else None
        if wrapper is not None:
            yield wrapper, path, node


def _neighbours(node: Tree, path: Path, cores: Sequence[Path]) -> Iterator[Neighbour]:
    """Yields the links in one place of a chain, which may be a chain itself; none of another optimizer's."""
    if any(core[: len(path)] == path for core in cores):
        return
    if (items := chain_items(node)) is not None:
        for index in range(max(items) + 1):
            yield from _neighbours(items.get(index), (*path, index), cores)
        return
    record = node if isinstance(node, Mapping) else {}
    fields, inner = frozenset(map(str, record)), record.get("inner_state")
    if fields in IDLE:
        yield Neighbour("idle", path, ", ".join(map(str, record)), record)
    elif not any(is_tensor(leaf) for _, leaf in leaves(inner if fields & _INNER_FIELDS else node)):
        # settings of inject_hyperparams around a stateless link are no state of its own
        yield Neighbour("masked" if fields == {"inner_state"} else "stateless", path)
    elif fields == {"inner_state"}:
        yield from _neighbours(inner, (*path, "inner_state"), cores)
    else:
        yield _with_tensors(node, path, fields)


def _with_tensors(node: Any, path: Path, fields: frozenset[str]) -> Neighbour:
    """Returns a link that holds tensors, by its fields: a known one, or another."""
    name = NEIGHBOURS.get(fields) if fields and _is_sound(node) else None
    kinds: dict[str | None, Kind] = {SCHEDULE: "schedule", PLATEAU: "plateau"}
    kind = "ema" if name and fields == {"count", "ema"} else kinds.get(name, "other")
    shown = ", ".join(map(str, node)) if fields else "no fields"
    return Neighbour(kind, path, name or f"a link with {shown}", node)


def _is_sound(node: Mapping[str, Any]) -> bool:
    """Tells whether what a link counts or scales by is a number."""
    return counts(node) and ("scale" not in node or is_number(node["scale"]))


def _strange(
    node: Tree, top: Path, core_paths: Sequence[Path], params: Tree, moved: set[Path]
) -> Iterator[str]:
    """Yields the fields around a core link, apart from those of known links, that hold tensors like its parameters.

    Gradients that MultiSteps sums up are none: they become the updates of the same rule.
    """
    shapes = {keys: under(params, keys).shape for keys in moved}
    fields: dict[Path, None] = {}
    for below, leaf in leaves(node):
        keys = (*top, *below)
        at = next((i for i in range(len(top), len(keys)) if keys[i:] in shapes), None)
        if at is None or not _is_like(leaf, shapes[keys[at:]]):
            continue
        if keys[at - 1] not in (_SUMMED, _INJECTED) and not any(
            keys[: len(core_path)] == core_path for core_path in core_paths
        ):
            fields[keys[:at]] = None
    yield from (str(place[-1]) for place in fields)


def _is_like(leaf: Any, shape: Shape) -> bool:
    return is_tensor(leaf) and leaf.dtype.kind in "fV" and leaf.shape == shape


def _paths(link: Link) -> set[Path]:
    """Returns the parameters that a link has slots for."""
    return {keys for _, own_tree in link.trees() for keys, leaf in leaves(own_tree) if is_tensor(leaf)}


def _injected(node: Tree) -> dict[str, Tensor]:
    """Returns the values of inject_hyperparams but those that a schedule makes: they are the last update's."""
    states = node.get(_SCHEDULES) if isinstance(node, Mapping) else None
    scheduled = [name for name, state in states.items() if state] if isinstance(states, Mapping) else []
    record = node.get(_INJECTED) if isinstance(node, Mapping) else None
    scalars = record.items() if isinstance(record, Mapping) else ()
    return {
        str(name): value
        for name, value in scalars
        if is_tensor(value) and value.shape == () and value.dtype.kind in "fiubV" and name not in scheduled
    }
