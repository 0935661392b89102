"""The layout `optax-native`: an optimizer of Optax that has no schema, under its own names.

    opt_state/0/mu/dense/kernel      the slot mu of dense/kernel
    opt_state/0/trace, 2/trace       two of a name: the slots 0.trace and 2.trace

A tree below the optimizer whose tensors stand where the parameters stand is a slot of theirs. Everything else (counts,
keys, numbers of all parameters together, empty states, the order of links) is the tree's form, and is kept as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.layouts.hyperparameters import manifest_state
from statekit.converters.layouts.optax.decode import Opened, called, params_of
from statekit.converters.layouts.optax.inferred_hyperparameters import VARIANT
from statekit.converters.layouts.optax.kinds import WRAPPERS
from statekit.converters.layouts.optax.lines import native_lines
from statekit.converters.layouts.optax.links import (
    CORE_LINKS,
    STRANGER,
    Link,
    chain_items,
    children,
    integer,
    is_number,
    is_tensor,
    leaves,
    links,
    replaced,
    strangers,
    under,
)
from statekit.converters.layouts.optax.places import find_network, has_network
from statekit.converters.layouts.optax.replicated import as_one, note_of
from statekit.converters.layouts.optax.skeleton import (
    COUNT,
    Contents,
    buffers_of,
    in_own_form,
    is_count,
    marks_of,
    own_form,
    slot_mark,
)
from statekit.errors import Faults, InexactError, StateError
from statekit.files.checkpoint import EMPTY_LEFT_OUT, MODEL_KEY, OPTIMIZER_KEY, SEQUENCES_AS_MAPS, Checkpoint
from statekit.lines.printing import SavedRun, State
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path, Tree

SCHEMA = "optax_native"
PARAMS = "params"
_OPTIMIZERS = ("opt_state", "optimizer", "optimizer_state", "optim", "opt", "tx")
"""Keys under which programs save the optimizer's state beside `params`."""
_COUNTS = ("gradient_step", "count", "t", "step_count", "step")
"""Fields that count updates."""
_FROM_ZERO = 2
"""How many of them surely do from 0 on; before the others goes the program's own step."""
_OF_SIGNUM, _BEHIND_TRUST = 3, 3
"""How many links Signum has, and behind how many LARS keeps its momentum."""
_RANDOM = "rng_key"
"""The field of a random state: no number, and no slot."""
_BEHIND = {"SGD with momentum": "with momentum"}
"""What a link is called behind another."""
_KINDS = (STRANGER, *CORE_LINKS, "ema")
_DEPTH = 3
"""Levels from the top at which a program may keep parameters and optimizer: a step, an item."""


@dataclass(frozen=True)
class Layers:
    """Where a tree has its parameters and its optimizer.

    Attributes:
        params: The keys of the parameters.
        optimizer: Those of the optimizer's state.
        assumed: How both were told from those of other networks, in a sentence.
    """

    params: Path
    optimizer: Path
    assumed: str = ""


_READ = ("npz", "pickle", "easylm")
"""Containers that such states are read from beside those that have them as their own."""


@dataclass(frozen=True)
class OptaxNative:
    """The state of any optimizer of Optax."""

    name: str = "optax-native"
    title: str = "optimizers of Optax without a schema, under their own names"
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {SCHEMA: ()})
    containers: tuple[str, ...] = ("orbax", "flax")
    stores_values: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for parameters, and for an optimizer's state beside them."""
        if checkpoint.container not in (*self.containers, *_READ):
            return None
        tree = as_one(checkpoint.tree)
        chain = _links(tree)
        is_strange = any(link.kind == STRANGER for link in chain) or {link.kind for link in chain} == {"ema"}
        if is_strange and has_network(tree, chain, _KINDS):
            return Evidence(15, f"{'/'.join(map(str, chain[0].path))} is a state of Optax")
        if chain or (layers := _by_name(tree)) is None:
            return None
        return Evidence(15, f"{'/'.join(map(str, layers.optimizer))} stands beside {PARAMS}")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the state, under the optimizer's own names."""
        note, checkpoint = note_of(checkpoint.tree), replace(checkpoint, tree=as_one(checkpoint.tree))
        layers = _layers(checkpoint)
        tree = checkpoint.tree
        if checkpoint.meta.get(SEQUENCES_AS_MAPS):
            tree = replaced(tree, {layers.optimizer: _with_lists(tree, layers)})
        faults = Faults()
        params = dict(params_of(tree, layers.params, faults))
        faults.check(StateError, "The parameters aren't a tree of tensors", place=checkpoint.path)
        step = _step(tree, layers) if checkpoint.step is None else checkpoint.step
        opened = Opened(
            replace(checkpoint, tree=tree, step=step),
            [],
            layers.params,
            params,
            bool(checkpoint.meta.get(EMPTY_LEFT_OUT)),
        )
        fields = _named(tree, layers)
        slots = _slots(tree, fields, params)
        manifest = manifest_state(checkpoint, SCHEMA)
        is_counted = manifest is None or manifest.says_updates
        counted = _count(tree, layers, checkpoint) if is_counted else None
        moved, buffers = opened.split([slots])
        done = counted or 0
        form = opened.with_frame(VARIANT, _frame(tree, layers, fields, params, done), done)
        group = Group(tuple(path for path in moved if path in slots or not slots), {}, {})
        return hints.applied(
            TrainState(
                moved,
                slots,
                Optimizer(SCHEMA, _name(tree), (group,)),
                Counts(done, done, says_schedule=False, says_updates=counted is not None),
                {},
                {**form, **buffers},
                tuple(filter(None, (layers.assumed, note))),
            )
        )

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree in the form in which it was read."""
        form = own_form(state, VARIANT)
        if form is None or state.optimizer.schema != SCHEMA:
            raise InexactError(
                "An optimizer without a schema goes back into the tree that it came from, and the state has none.",
                place=f"extra/{VARIANT}",
                expected="a state that was read from Orbax or Flax",
                found=state.optimizer.schema,
            )
        contents = Contents(
            state.params,
            lambda path, name: state.slots.get(path, {}).get(name),
            state.counts.updates,
            state.counts.schedule,
            buffers=buffers_of(state),
        )
        return in_own_form(state, VARIANT, form, contents)

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return native_lines(state, saved)


def _links(tree: Tree) -> list[Link]:
    """Returns the states of Optax' links that hold slots, of optimizers with and without a schema."""
    return [*strangers(tree), *(link for link in links(tree) if link.kind in _KINDS)]


def _layers(checkpoint: Checkpoint) -> Layers:
    """Returns where parameters and optimizer are."""
    tree, chain = checkpoint.tree, _links(checkpoint.tree)
    if chain:
        keys = (checkpoint.meta.get(MODEL_KEY), checkpoint.meta.get(OPTIMIZER_KEY))
        network = find_network(tree, chain, _KINDS, *keys, checkpoint.path)
        where, first = network.where, network.links[0].path
        shared = next((i for i, (a, b) in enumerate(zip(where, first, strict=False)) if a != b), len(where))
        return Layers(where, first[: shared + 1], network.assumed)
    layers = _by_name(tree)
    if layers is None:
        raise StateError(
            "There are no parameters with an optimizer beside them.",
            place=checkpoint.path,
            expected=f"{PARAMS} and {_OPTIMIZERS[0]}",
        )
    return layers


def _by_name(tree: Tree) -> Layers | None:
    """Returns where parameters and optimizer are, by the keys that programs give them."""
    level: list[tuple[Path, Tree]] = [((), tree)]
    for _ in range(_DEPTH):
        for path, node in level:
            optimizer = next((key for key in _OPTIMIZERS if isinstance(node, Mapping) and key in node), None)
            if optimizer is not None and any(is_tensor(leaf) for _, leaf in leaves(node.get(PARAMS))):
                layers = Layers((*path, PARAMS), (*path, optimizer))
                return layers if _is_state(tree, layers) else None
        level = [((*path, key), child) for path, node in level for key, child in children(node)]
    return None


def _is_state(tree: Tree, layers: Layers) -> bool:
    """Tells whether what stands beside parameters is like a state of Optax: slots, or nothing but numbers."""
    tensors = [(keys, leaf) for keys, leaf in leaves(under(tree, layers.optimizer)) if is_tensor(leaf)]
    alone = all(is_number(leaf) or keys[-1:] == (_RANDOM,) for keys, leaf in tensors)
    return alone or bool(_fields(tree, layers))


def _fields(tree: Tree, layers: Layers) -> list[Path]:
    """Returns the keys of the trees below the optimizer whose tensors stand where parameters do."""
    params = {tuple(map(str, keys)) for keys, leaf in leaves(under(tree, layers.params)) if is_tensor(leaf)}
    fields: list[Path] = []
    stack = [(layers.optimizer, under(tree, layers.optimizer))]
    while stack:
        path, node = stack.pop()
        owner: tuple[str, ...] | None = ()
        for keys, leaf in leaves(node):
            owner = _owner(keys, params) if is_tensor(leaf) else owner
            if owner is None:  # one that stands elsewhere is enough
                stack += reversed([((*path, key), child) for key, child in children(node)])
                break
        if owner:
            fields.append(path)
    return fields


def _owner(keys: Path, params: set[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Returns the parameter that a tensor of a field belongs to: the one at its keys, or at their beginning."""
    names = tuple(map(str, keys))
    longest = min(len(names), max(map(len, params), default=0))
    return next((names[:i] for i in range(longest, 0, -1) if names[:i] in params), None)


def _named(tree: Tree, layers: Layers) -> dict[Path, str]:
    """Returns fields with the names of their slots: the last key, and all where a parameter has several such."""
    fields = _fields(tree, layers)
    inside = {
        place: {keys for keys, leaf in leaves(under(tree, place)) if is_tensor(leaf)} for place in fields
    }

    def is_alone(place: Path) -> bool:
        alike = [other for other in fields if other[-1] == place[-1] and other != place]
        return all(inside[place].isdisjoint(inside[other]) for other in alike)

    whole = len(layers.optimizer)
    return {
        place: str(place[-1]) if is_alone(place) else ".".join(map(str, place[whole:])) for place in fields
    }


def _in_fields(
    tree: Tree, fields: Mapping[Path, str], params: Mapping[str, Tensor]
) -> Iterator[tuple[Path, str, str, Tensor]]:
    """Yields each slot's tensor: the keys in its field, its parameter, its name."""
    keys_of_params = {tuple(path.split("/")) for path in params}
    for place, name in fields.items():
        for keys, leaf in leaves(under(tree, place)):
            if is_tensor(leaf) and (owner := _owner(keys, keys_of_params)) is not None:
                yield (*place, *keys), "/".join(owner), ".".join((name, *map(str, keys[len(owner) :]))), leaf


def _slots(
    tree: Tree, fields: Mapping[Path, str], params: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    slots: dict[str, dict[str, Tensor]] = {}
    for _, path, name, tensor in _in_fields(tree, fields, params):
        slots.setdefault(path, {})[name] = tensor
    return slots


def _frame(
    tree: Tree, layers: Layers, fields: Mapping[Path, str], params: Mapping[str, Tensor], updates: int
) -> Tree:
    """Returns the tree with marks in the place of parameters, slots and the count."""
    several = {
        place: [
            (keys, path, slot)
            for keys, path, slot, _ in _in_fields(tree, {place: name}, params)
            if slot != name
        ]
        for place, name in fields.items()
    }
    whole = {place: name for place, name in fields.items() if not several[place]}
    marks = marks_of(tree, layers.params, whole)
    marks |= {keys: slot_mark(slot, path) for rows in several.values() for keys, path, slot in rows}
    node = under(tree, layers.optimizer)
    for keys, leaf in leaves(node):
        place = (*layers.optimizer, *keys)
        is_slot = any(place[:i] in fields for i in range(len(place) + 1))
        if keys and keys[-1] in _COUNTS and not is_slot and is_count(leaf, updates):
            marks[place] = (COUNT,)
    return replaced(tree, marks)


def _count(tree: Tree, layers: Layers, checkpoint: Checkpoint) -> int | None:
    """Returns the updates done: as a link counts them, the program, or the checkpoint's name; None of nothing."""
    counts: dict[str, list[int]] = {}
    fields = set(_fields(tree, layers))
    for keys, leaf in leaves(under(tree, layers.optimizer)):
        place = (*layers.optimizer, *keys)
        if keys and is_number(leaf) and not any(place[:i] in fields for i in range(len(place) + 1)):
            counts.setdefault(str(keys[-1]), []).append(integer(leaf, place))
    stated = [max(counts[name]) for name in _COUNTS[:_FROM_ZERO] if name in counts]
    stated += [step for step in (_step(tree, layers), checkpoint.step) if step is not None]
    stated += [max(counts[name]) for name in _COUNTS[_FROM_ZERO:] if name in counts]
    return next((count for count in stated if count >= 0), None)


def _step(tree: Tree, layers: Layers) -> int | None:
    """Returns the step that the program keeps beside its parameters; None if it keeps none."""
    above = under(tree, layers.params[:-1])
    step = above.get("step") if isinstance(above, Mapping) else None
    return integer(step, ("step",)) if is_number(step) else None


def _with_lists(tree: Tree, layers: Layers) -> Tree:
    """Returns an optimizer's state with its chains as sequences and None for empty states, as Orbax has them."""
    params = {keys for keys, leaf in leaves(under(tree, layers.params)) if is_tensor(leaf)}
    fields = set(_fields(tree, layers))

    def listed(node: Tree, path: Path) -> Tree:
        field = next((path[:i] for i in range(len(path) + 1) if path[:i] in fields), None)
        if not isinstance(node, Mapping) or (field is not None and node and path[len(field) :] not in params):
            inside = isinstance(node, Mapping)
            return {key: listed(child, (*path, key)) for key, child in node.items()} if inside else node
        parts = {key: listed(child, (*path, key)) for key, child in node.items()}
        if not parts:
            return None
        items = chain_items(parts)
        return parts if items is None else [items.get(index) for index in range(max(items) + 1)]

    return listed(under(tree, layers.optimizer), layers.optimizer)


def _name(tree: Tree) -> str | None:
    """Returns what the optimizer is, by the fields of its links; None where they tell nothing."""
    chain = _links(tree)
    first, *others = dict.fromkeys(map(called, chain)) or (None,)
    if not others and chain and {*chain[0].state} in ({"trace"}, {"count", "ema"}):
        first = _of_momentum(tree, chain[0])
    behind = [_BEHIND.get(str(name), f"and {name}") for name in others]
    name = first and " ".join((first, *behind))
    around = " around ".join(dict.fromkeys(_wrappers(tree)))
    return " around ".join(filter(None, (around, name))) or _of_fields(tree) or _of_empty(tree)


def _of_momentum(tree: Tree, link: Link) -> str:
    """Returns whose momentum is all that a chain keeps: SGD's and Signum's stand before the other links.

    Source: google-deepmind/optax optax/_src/alias.py, `sgd`, `lars`, `signum`.
    """
    items = chain_items(under(tree, link.path[:-1])) if link.path else None
    index = int(link.path[-1]) if items else 0
    if "ema" in link.state:
        return "Signum" if items and len(items) == _OF_SIGNUM and index == 0 else "an average of gradients"
    masked = [
        i for i, state in (items or {}).items() if isinstance(state, Mapping) and {*state} == {"inner_state"}
    ]
    if index == 0:
        return "SGD with momentum"
    return "LARS" if masked == [0, 1] and index == _BEHIND_TRUST else "a chain with momentum"


def _wrappers(tree: Tree) -> Iterator[str]:
    """Yields what stands around the optimizer and changes its updates, from the top."""
    level: list[Tree] = [tree]
    while level:
        wrappers = [WRAPPERS.get(frozenset(map(str, node))) for node in level if isinstance(node, Mapping)]
        yield from (wrapper.name for wrapper in wrappers if wrapper is not None and wrapper.changes)
        level = [child for node in level if not isinstance(node, Tensor) for _, child in children(node)]


def _of_fields(tree: Tree) -> str | None:
    """Returns what an optimizer without slots is, by the fields of a link."""
    names = {keys[-1]: keys[:-1] for keys, leaf in leaves(tree) if keys and is_tensor(leaf)}
    if _RANDOM not in names:
        return None
    return "noisy SGD" if names.get("count") == names[_RANDOM] else "DP-SGD"


_EMPTY = "-"
_WITHOUT_SLOTS = {
    "(- -)": "SGD without momentum, or sign SGD",
    "(- count)": "SGD without momentum, or sign SGD",
    "(- - -)": "Fromage, or another chain of three links without slots",
    "(- count count)": "Fromage, or another chain with two schedules",
    "((- -) -)": "Polyak SGD, or another chain without slots",
}
"""Links of chains without slots, each empty or with a count -> what makes such a chain.

Source: google-deepmind/optax optax/_src/alias.py, `sgd`, `sign_sgd`, `fromage`, `polyak_sgd`.
"""


def _of_empty(tree: Tree) -> str | None:
    """Returns which optimizers keep nothing, or counts alone, in a chain of such links."""
    layers = _by_name(tree)
    return None if layers is None else _WITHOUT_SLOTS.get(_form(under(tree, layers.optimizer)))


def _form(node: Tree) -> str:
    """Returns the form of a chain of links without slots, in brackets."""
    if items := chain_items(node):
        return f"({' '.join(_form(items.get(index)) for index in range(max(items) + 1))})"
    names = {*node} if isinstance(node, Mapping) else {*()}
    return _EMPTY if not names and not is_tensor(node) else " ".join(sorted(map(str, names)))


LAYOUT = OptaxNative()
