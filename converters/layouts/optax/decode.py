"""Reads optimizer states that are trees like the parameters, as those of Optax and statekit.jax are.

Input: a checkpoint's tree. Output: its links, where its parameters are, slots by parameter, counts, and what has no
meaning to an optimizer, kept so that the tree can be rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

from statekit.conversion.contracts import Contents
from statekit.converters.layouts.hyperparameters import Hyperparameters, ManifestRecord, manifest_state
from statekit.converters.layouts.optax.links import (
    KINDS,
    LABELLED,
    SLOT_TREES,
    STRANGER,
    Link,
    children,
    integer,
    is_tensor,
    leaves,
    links,
    stranger_of,
    strangers,
    under,
    with_sequences,
)
from statekit.converters.layouts.optax.places import find_network, find_params, has_network
from statekit.converters.layouts.optax.replicated import as_one, note_of
from statekit.converters.layouts.optax.skeleton import as_buffers, frame_of
from statekit.errors import Faults
from statekit.files.checkpoint import (
    EMPTY_LEFT_OUT,
    FILES_BESIDE,
    MODEL_KEY,
    OPTIMIZER_KEY,
    SEQUENCES_AS_MAPS,
    VARIABLES,
    Checkpoint,
)
from statekit.state.factoring import PathPattern, first_entry, labels, map_entries
from statekit.state.train_state import Group, Rule
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Tree

Slots: TypeAlias = Mapping[str, Mapping[str, Tensor]]

FACTOR_MAP = "factor_map"
_BUFFERS = {"mean": "var", "var": "mean", "count": "key", "key": "count"}
"""Names of the buffers of Flax' nnx, each with that of the one beside it: those of BatchNorm and of RngStream.

Source: google/flax flax/nnx/nn/normalization.py, flax/nnx/rnglib.py.
"""


@dataclass(frozen=True)
class Opened:
    """A tree with links.

    Attributes:
        checkpoint: The checkpoint.
        all_links: All its links.
        where: Where its parameters are.
        params: They, by path.
        left_out: Whether states that hold nothing were left out by the program that wrote it.
        schedules: The links that count for the schedule of the rate.
        assumed: How its optimizer was told from those of other networks, in a sentence; "" if nothing was assumed.
        copies: How many copies of each leaf are read as one, in a sentence; "" of one.
    """

    checkpoint: Checkpoint
    all_links: list[Link]
    where: Path
    params: Mapping[str, Tensor]
    left_out: bool = False
    schedules: tuple[Link, ...] = ()
    assumed: str = ""
    copies: str = ""

    @cached_property
    def strangers(self) -> list[Link]:
        """The links of optimizers without a schema."""
        return strangers(self.checkpoint.tree)

    @property
    def notes(self) -> list[str]:
        """What was assumed of where its parts lie."""
        return [note for note in (self.assumed, self.copies) if note]

    @property
    def has_schedule(self) -> bool:
        """Whether a link counts for the schedule of the rate."""
        return bool(self.schedules)

    def schedule(self, updates: int) -> int:
        """Returns the count of the schedule; that of updates where no link counts for one."""
        return next(map(count_of, self.schedules), updates)

    def split(self, slots: Sequence[Slots]) -> tuple[dict[str, Tensor], dict[str, Tree]]:
        """Returns the parameters without buffers, and the buffers as `extra` has them.

        A tree of nnx holds both: means and variances of batches, counters and keys of random streams. No optimizer has
        slots for them.
        """
        moved = {path for part in slots for path in part}
        buffers = {path: tensor for path, tensor in self.params.items() if self._is_buffer(path, moved)}
        return {p: t for p, t in self.params.items() if p not in buffers}, as_buffers(buffers)

    def _is_buffer(self, path: str, moved: Collection[str]) -> bool:
        above, _, name = path.rpartition("/")
        if path in moved or name not in _BUFFERS:
            return False
        other, unsigned = _BUFFERS[name], self.params[path].dtype.name in ("uint32", "uint64")
        sibling = f"{above}/{other}" if above else other
        return sibling in self.params and sibling not in moved and unsigned == (name in ("count", "key"))

    def extra(
        self, key: str, kept: Collection[Path], updates: int, groups: Collection[str] = ()
    ) -> dict[str, Tree]:
        """Returns the form of the tree, and where and beside what it lay, for `extra`.

        Args:
            key: The key that the form gets.
            kept: The paths of the links whose slots are canonical.
            updates: The count of updates.
            groups: Fields of a link that belong to all parameters together.
        """
        counts = updates, self.schedule(updates)
        schedules = {link.path for link in self.schedules}
        tree, where = self.checkpoint.tree, self.where
        frame = frame_of(tree, where, self.all_links, kept, *counts, groups, schedules)
        return self.with_frame(key, frame, updates)

    def with_frame(self, key: str, frame: Tree, updates: int) -> dict[str, Tree]:
        """Returns a frame of the tree, and where and beside what that lay, for `extra`."""
        meta, step = self.checkpoint.meta, self.checkpoint.step
        form: dict[str, Tree] = {"tree": frame}
        if len(meta.get("items", ())) > 1:
            form["items"] = True
        if step not in (None, updates):
            form["step"] = step
        if meta.get(VARIABLES):
            form[VARIABLES] = list(meta[VARIABLES])
        files = list(meta.get(FILES_BESIDE, ()))
        return {key: form, **({FILES_BESIDE: files} if files else {})}


def opened(checkpoint: Checkpoint, kinds: Collection[str], faults: Faults) -> Opened:
    """Finds links and parameters.

    Args:
        checkpoint: The checkpoint.
        kinds: The kinds of links whose slots are those of the parameters.
        faults: What is wrong with the parameters; added to.

    Raises:
        StateError: There are none, or several trees may be they.
        UsageError: The user named a key at which there are none.
    """
    left_out = bool(checkpoint.meta.get(EMPTY_LEFT_OUT))
    stored, checkpoint = checkpoint.tree, replace(checkpoint, tree=tree_of(checkpoint))
    keys = (checkpoint.meta.get(MODEL_KEY), checkpoint.meta.get(OPTIMIZER_KEY))
    network = find_network(checkpoint.tree, links(checkpoint.tree), kinds, *keys, checkpoint.path)
    where, all_links = network.where, network.links
    params = dict(params_of(checkpoint.tree, where, faults))
    counting = tuple(link for link in all_links if link.kind == "schedule")
    return Opened(checkpoint, all_links, where, params, left_out, counting, network.assumed, note_of(stored))


def tree_of(checkpoint: Checkpoint) -> Tree:
    """Returns a checkpoint's tree with its chains as sequences, and of copies of each leaf one."""
    tree = as_one(checkpoint.tree)
    return with_sequences(tree) if checkpoint.meta.get(SEQUENCES_AS_MAPS) else tree


def params_of(tree: Tree, where: Path, faults: Faults) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a tree by path."""
    seen: set[str] = set()
    for keys, leaf in leaves(under(tree, where)):
        path = "/".join(map(str, keys))
        if is_tensor(leaf):
            if path in seen:
                faults.add("is the path of two parameters", path)
            seen.add(path)
            yield path, leaf
        elif leaf not in (None, {}, [], ()):
            faults.add(f"is no tensor but {type(leaf).__name__}", path)


@dataclass(frozen=True)
class Foreign:
    """A part of `optax.partition` that no link known here moves.

    Attributes:
        name: The optimizer, as its state's fields tell.
        place: Its state's path.
        slots: For each parameter, its slots by their own names.
    """

    name: str
    place: str
    slots: Slots


def foreign(tree: Opened, stepped: Sequence[Slots]) -> list[Foreign]:
    """Returns the parts of partitions that hold slots for parameters without any in the links known here.

    A parameter that such a part moves isn't frozen.
    """
    moved = {path for part in stepped for path in part}
    unmoved = {tuple(path.split("/")): path for path in tree.params if path not in moved}
    inners = _partition_labels(tree.checkpoint.tree)
    parts = [part for keys, inner in inners if (part := _foreign_part(keys, inner, unmoved)).slots]
    left = {*unmoved.values()} - {path for part in parts for path in part.slots}
    for link in tree.strangers:
        others = {path: tensors for path, tensors in slots_of([link]).items() if path in left}
        if others:
            parts.append(Foreign(named(link.state), "/".join(map(str, link.path)), others))
    return parts


def move_more(tree: Tree, core_links: Sequence[Link]) -> bool:
    """Tells whether optimizers without a schema move parameters that no core link moves."""
    unknown = strangers(tree)
    moved = slots_of(core_links) if unknown else {}
    return any(path not in moved for path in slots_of(unknown))


def _foreign_part(keys: Path, inner: Tree, unmoved: Mapping[tuple[str, ...], str]) -> Foreign:
    """Returns what a part of a partition holds for parameters that no link known here moves."""
    slots: dict[str, dict[str, Tensor]] = {}
    fields: dict[str, None] = {}
    for below, leaf in leaves(inner):
        names = tuple(map(str, below))
        start = next((i for i in range(1, len(names)) if names[i:] in unmoved), None)
        if start is None or not is_tensor(leaf):
            continue
        slots.setdefault(unmoved[names[start:]], {})[names[start - 1]] = leaf
        fields[named(under(inner, below[: start - 1]))] = None
    return Foreign(" and ".join(fields), "/".join(map(str, keys)), slots)


def _partition_labels(tree: Tree) -> Iterator[tuple[Path, Tree]]:
    stack: list[tuple[Path, Any]] = [((), tree)]
    while stack:
        path, node = stack.pop()
        below = children(node)
        if path and path[-1] == LABELLED:
            yield from (((*path, label), state) for label, state in below)
        stack += [((*path, key), child) for key, child in below]


def named(state: Tree) -> str:
    """Returns what optimizer a link's state is of, by its fields."""
    if (stranger := stranger_of(state)) is not None:
        return f"{stranger.name}, which has no schema yet"
    fields = tuple(map(str, state)) if isinstance(state, Mapping) else ()
    if frozenset(fields) in KINDS:
        return f"{KINDS[frozenset(fields)]}, of another library than the others"
    return f"a link with {', '.join(fields)}, which has no schema yet"


def called(link: Link) -> str:
    """Returns what optimizer a link is of, with or without a schema."""
    stranger = stranger_of(link.state) if link.kind == STRANGER else None
    return _KNOWN.get(link.kind, link.kind) if stranger is None else stranger.name


_KNOWN = {"adam": "AdamW or its like", "adafactor": "Adafactor", "ema": "momentum"}
"""What links are that have a schema."""


def described(checkpoint: Checkpoint) -> Contents | None:
    """Returns what a checkpoint holds in which an optimizer without a schema has a part; None if none has."""
    tree = tree_of(checkpoint)
    unknown = strangers(tree)
    cores = [link for link in links(tree) if link.kind in SLOT_TREES]
    key = checkpoint.meta.get(MODEL_KEY)
    places = find_params(tree, [*cores, *unknown], (*SLOT_TREES,), key) if unknown else []
    if not places:
        return None if unknown else _without_params(checkpoint, cores)
    params = dict(params_of(tree, places[0], Faults()))
    slots: dict[str, dict[str, Tensor]] = {}
    parts: dict[str, set[str]] = {}
    for link in (*unknown, *cores):
        name = named(link.state) if link.kind == STRANGER else _KNOWN.get(link.kind, link.kind)
        for path, tensors in slots_of([link]).items():
            slots.setdefault(path, {}).update(tensors)
            parts.setdefault(name, set()).add(path)
    sentence = "; ".join(f"{name}: {len(paths)} of {len(params)} parameters" for name, paths in parts.items())
    used = {id(tensor) for tensor in params.values()}
    used |= {id(tensor) for tensors in slots.values() for tensor in tensors.values()}
    others = {name: tensor for name, tensor in checkpoint.tensors.items() if id(tensor) not in used}
    return Contents(f"a run of Optax, {sentence}", params, slots, others)


_ALONE = "without its parameters, which have to be saved beside it"


def _of_vectors(cores: Sequence[Link]) -> str:
    """Describes slots that are one vector of all parameters; "" if each parameter has its own.

    Source: google-deepmind/optax, optax/transforms/_layouts.py, `flatten`.
    """
    slots = [leaf for link in cores for _, tree in link.trees() for keys, leaf in leaves(tree) if not keys]
    is_flat = any(is_tensor(leaf) and len(leaf.shape) == 1 for leaf in slots)
    return (
        "whose slots are one vector of all parameters, as optax.flatten makes them: no layout cuts it"
        * is_flat
    )


def _without_params(checkpoint: Checkpoint, cores: Sequence[Link]) -> Contents | None:
    """Describes a checkpoint of an optimizer without parameters, as `nnx.state(optimizer)` saves it."""
    if not cores or has_network(tree_of(checkpoint), list(cores), SLOT_TREES):
        return None
    places = ", ".join(dict.fromkeys("/".join(map(str, link.path)) or "the top" for link in cores))
    sentence = f"an optimizer of Optax ({places}) {_of_vectors(cores) or _ALONE}"
    return Contents(sentence, {}, {}, checkpoint.tensors)


def slots_of(slot_links: Sequence[Link]) -> dict[str, dict[str, Tensor]]:
    """Returns the slots that links hold: path -> name of the field -> tensor."""
    slots: dict[str, dict[str, Tensor]] = {}
    for name, tree in (pair for link in slot_links for pair in link.trees()):
        for keys, leaf in leaves(tree):
            if is_tensor(leaf):
                slots.setdefault("/".join(map(str, keys)), {})[name] = leaf
    return slots


def count_of(link: Link) -> int:
    """Returns a link's count.

    Raises:
        StateError: It has none.
    """
    return integer(link.state.get("count"), (*link.path, "count"))


def updates_of(core_links: Sequence[Link], slots: Sequence[Slots], faults: Faults) -> int:
    """Returns the count of updates of all optimizers; it is a fault if they differ, or share a parameter."""
    counts = sorted({count_of(link) for link in core_links})
    if len(counts) > 1 or counts[0] < 0:
        faults.add(f"are the counts of updates: {', '.join(map(str, counts))}", "opt_state")
    seen: set[str] = set()
    for part in slots:
        faults += [("has slots in two optimizers", path) for path in part if path in seen]
        seen |= part.keys()
    return counts[-1]


def stated(checkpoint: Checkpoint, schemas: Sequence[str], slots: Sequence[Slots]) -> ManifestRecord | None:
    """Returns what a conversion's manifest says of the state, if it is about these parameters.

    Args:
        checkpoint: The checkpoint.
        schemas: The schema of each part.
        slots: The slots of each part.
    """
    manifest = manifest_state(checkpoint, *schemas)
    if manifest is None:
        return None
    moved = {path: schema for schema, part in zip(schemas, slots, strict=True) for path in part}
    pairs = zip(manifest.groups, manifest.kinds, strict=True)
    schema_of = {path: schema for group, (schema, _) in pairs for path in group.paths}
    return manifest if schema_of == moved else None


def groups_of(manifest: ManifestRecord, specified: Mapping[str, Mapping[str, Any]]) -> list[Group]:
    """Returns the groups of a manifest, with what else is told, by schema."""
    return [
        replace(
            group_of(member.paths, member.hyperparameters.over(specified.get(schema, {}), "given")),
            facts=member.facts,
        )
        for member, (schema, _) in zip(manifest.groups, manifest.kinds, strict=True)
    ]


def group_of(paths: Sequence[str], hyperparameters: Hyperparameters) -> Group:
    """Returns a group with its hyperparameters; factor rules aren't among them."""
    kept = hyperparameters.without(FACTOR_MAP)
    return Group(tuple(paths), dict(kept.values), dict(kept.known_from))


def entries_of(specified: Mapping[str, Any]) -> tuple[PathPattern, ...]:
    """Returns the lines of a factor map that was told, if one was."""
    return () if specified.get(FACTOR_MAP) is None else map_entries(specified[FACTOR_MAP], FACTOR_MAP)


def given_rule(
    entries: Sequence[PathPattern],
    path: str,
    shape: tuple[int, ...],
    slots: Mapping[str, Tensor],
    faults: Faults,
) -> Rule | None:
    """Returns the rule that is told about a factored parameter; a fault if its slots have other shapes."""
    entry = first_entry(entries, path)
    axes = None if entry is None else labels(entry.value)
    if axes is None:
        return None
    rule = Rule(axes, "given")
    fits = len(axes) == len(shape) and rule.factored
    if not fits or any(rule.slot_shape(name, shape) != slots[name].shape for name in ("v_row", "v_col")):
        faults.add(f"is factored in another way than {FACTOR_MAP} says", path)
    return rule


def rules_of(manifest: ManifestRecord, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Returns the rules of a manifest, outweighed by those that were given."""
    given = {path: rule for path, rule in rules.items() if rule.known_from == "given"}
    return {**{path: Rule.from_json(rule) for path, rule in manifest.rules.items()}, **given}
