"""The form of an Optax checkpoint: what its tree is like beside parameters and slots, so that it can be rebuilt.

A frame is the tree with marks, which are tuples, in the place of what is canonical:

    ("params",)       the parameters, as nested dicts of their paths' parts
    ("params", form)  the parameters, in another form: a tree with their paths at its leaves
    ("slot", name)    a slot, in the form of the parameters; None where a parameter has none
    ("slot", name, form)  the same in a form of its own: masks that aren't one None for each parameter
    ("group", name)   a slot of all parameters together
    ("count",)        the count of updates
    ("schedule",)     the schedule's

It stands in `extra` under the layout's own key. What a tree holds beside parameters and optimizer (batch statistics,
keys, a step) goes along from one layout of JAX to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statekit.conversion.contracts import Encoded, Exactness, dropped_from
from statekit.converters.layouts.optax.links import (
    CORE_LINKS,
    OWN_CORE_LINKS,
    Link,
    is_tensor,
    leaves,
    links,
    replaced,
    under,
)
from statekit.converters.layouts.optax.places import find_params
from statekit.errors import InexactError, StateError
from statekit.files.checkpoint import VARIABLES
from statekit.state.run import BUFFERS, COUNTED
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.tensors.tree import Path, Tree, leaf_names, nested

PARAMS, SLOT, GROUP, COUNT, SCHEDULE = "params", "slot", "group", "count", COUNTED[0]


@dataclass(frozen=True)
class At:
    """A leaf of a form: the parameter that stands there, by its path. Everything else stands for itself."""

    path: str


def form_of(tree: Tree, paths: Mapping[Path, str]) -> Tree:
    """Returns the form of a tree, given the paths of its tensors by their keys."""
    return replaced(tree, {keys: At(paths[keys]) for keys, leaf in leaves(tree) if is_tensor(leaf)})


def usual_form(paths: Mapping[str, Any]) -> Tree:
    """Returns the form that parameters have unless something else is said: dicts of dicts."""
    return usual_tree({path: At(path) for path in paths})


def usual_tree(leaves_: Mapping[str, Any]) -> Tree:
    """Returns dicts of dicts with these leaves at these paths."""
    return nested({tuple(path.split("/")): leaf for path, leaf in leaves_.items()})


def filled(form: Tree, leaf: Callable[[str], Tensor | None]) -> Tree:
    """Returns a form with tensors in the place of its paths."""
    return replaced(form, {keys: leaf(mark.path) for keys, mark in leaves(form) if isinstance(mark, At)})


def frame_of(
    tree: Tree,
    at: Path,
    all_links: list[Link],
    kept: Collection[Path],
    updates: int,
    schedule: int,
    groups: Collection[str] = (),
    schedules: Collection[Path] = (),
) -> Tree:
    """Returns the frame of a tree.

    Args:
        tree: The tree.
        at: Where its parameters are.
        all_links: Its links.
        kept: The paths of those whose slots are canonical.
        updates: The count of updates.
        schedule: The schedule's.
        groups: Fields of a link that belong to all parameters together.
        schedules: The paths of the links that count for the schedule of the rate.
    """
    kept_links = [link for link in all_links if link.path in kept]
    fields = {(*link.path, name): name for link in kept_links for name, _ in link.trees()}
    parts = marks_of(tree, at, fields)
    for link in kept_links:
        parts |= _group_marks(link, groups)
    for link in all_links:
        mark, value = ((SCHEDULE,), schedule) if link.path in schedules else ((COUNT,), updates)
        parts |= _count_marks(link, mark, value)
    if isinstance(tree, Mapping) and is_count(tree.get("step"), updates):
        parts[("step",)] = (COUNT,)
    return replaced(tree, parts)


def _group_marks(link: Link, groups: Collection[str]) -> dict[Path, Tree]:
    """Returns the marks of the slots that a link keeps for all its parameters; one of these tells which link."""
    moved = (keys for _, slots in link.trees() for keys, leaf in leaves(slots) if is_tensor(leaf))
    first = "/".join(map(str, next(moved, ())))
    return {(*link.path, name): (GROUP, name, first) for name in groups if is_tensor(link.state.get(name))}


def marks_of(tree: Tree, at: Path, fields: Mapping[Path, str]) -> dict[Path, Tree]:
    """Returns the marks of a tree's parameters and slots by their keys.

    Args:
        tree: The tree.
        at: Where its parameters are.
        fields: The keys of trees like the parameters', each with the name of the slot that it holds.
    """
    node = under(tree, at)
    paths = {keys: "/".join(map(str, keys)) for keys, leaf in leaves(node) if is_tensor(leaf)}
    form = form_of(node, paths)
    usual = usual_form(dict.fromkeys(paths.values()))
    marks: dict[Path, Tree] = {at: (PARAMS,) if form == usual else (PARAMS, _packed(form))}
    return marks | _slot_marks(
        {place: (name, under(tree, place)) for place, name in fields.items()}, form, paths
    )


def _count_marks(link: Link, mark: tuple[str], value: int) -> dict[Path, Tree]:
    names = ("count", "gradient_step")
    return {(*link.path, name): mark for name in names if is_count(link.state.get(name), value)}


def _slot_marks(
    fields: Mapping[Path, tuple[str, Tree]], form: Tree, paths: Mapping[Path, str]
) -> dict[Path, Tree]:
    """Returns the marks of all slots; a form goes with one that isn't the usual of its name."""
    paths_of: dict[str, set[str]] = {}
    for name, field_tree in fields.values():
        holding = (paths[keys] for keys, leaf in leaves(field_tree) if is_tensor(leaf))
        paths_of.setdefault(name, set()).update(holding)
    plain = {
        name: replaced(form, {keys: None for keys, path in paths.items() if path not in holders})
        for name, holders in paths_of.items()
    }
    marks: dict[Path, Tree] = {}
    for place, (name, field_tree) in fields.items():
        field_form = form_of(field_tree, paths)
        marks[place] = (SLOT, name) if field_form == plain[name] else (SLOT, name, _packed(field_form))
    return marks


def slot_mark(name: str, path: str) -> Tree:
    """Returns the mark of one parameter's slot that stands by itself."""
    return (SLOT, name, (path,))


def is_count(leaf: Any, value: int) -> bool:
    """Tells whether a leaf is the int32 that is written for a count."""
    return is_tensor(leaf) and (leaf.shape, leaf.dtype.name) == ((), "int32") and int(leaf.read()) == value


def _packed(form: Tree) -> Tree:
    """Returns a form as plain data: a path becomes a tuple of one."""
    return replaced(form, {keys: (mark.path,) for keys, mark in leaves(form) if isinstance(mark, At)})


def _unpacked(form: Tree) -> Tree:
    return replaced(form, {k: At(m[0]) for k, m in leaves(form) if isinstance(m, tuple) and len(m) == 1})


@dataclass(frozen=True)
class Contents:
    """What goes into a frame.

    Attributes:
        params: Parameter by path.
        slot: Returns a parameter's slot by path and native name; None if it has none.
        updates: The count of updates.
        schedule: The schedule's.
        groups: By name, slots of all parameters of a group together, by each of their paths.
        buffers: By path, the tensors among the parameters that no optimizer is for.
    """

    params: Mapping[str, Tensor]
    slot: Callable[[str, str], Tensor | None]
    updates: int
    schedule: int
    groups: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def model(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return {**self.params, **self.buffers}


def group_slots(state: TrainState) -> dict[str, dict[str, Tensor]]:
    """Returns the slots that belong to a group's parameters together: by name, for each of the parameters."""
    slots: dict[str, dict[str, Tensor]] = {}
    for group in state.optimizer.groups:
        for name, tensor in group.slots.items():
            slots.setdefault(name, {}).update(dict.fromkeys(group.paths, tensor))
    return slots


def _of_group(by_path: Mapping[str, Tensor], path: str) -> Tensor:
    """Returns the slot of the group that moves a parameter; forms of one group name none."""
    if path in by_path:
        return by_path[path]
    tensors = {id(tensor): tensor for tensor in by_path.values()}
    if len(tensors) != 1:
        raise StateError("The state carries a form of other groups.", place=path)
    return next(iter(tensors.values()))


def buffers_of(state: TrainState) -> dict[str, Tensor]:
    """Returns a state's buffers by their paths among the parameters."""
    return {name.replace(".", "/"): buffer for name, buffer in (state.extra.get(BUFFERS) or {}).items()}


def as_buffers(tensors: Mapping[str, Tensor]) -> dict[str, Tree]:
    """Returns tensors among the parameters as `extra` has a model's buffers: none, or all under one key."""
    return {BUFFERS: {path.replace("/", "."): tensor for path, tensor in tensors.items()}} if tensors else {}


def rebuilt(frame: Tree, contents: Contents) -> Tree:
    """Returns the tree of a frame.

    Raises:
        StateError: The frame has other marks than it may, or isn't of these parameters.
    """
    try:
        usual = usual_form(contents.model)
        forms = [mark for _, mark in leaves(frame) if isinstance(mark, tuple) and mark[:1] == (PARAMS,)]
        form = _unpacked(forms[0][1]) if forms and len(forms[0]) > 1 else usual
        marks = {keys: mark for keys, mark in leaves(frame) if isinstance(mark, tuple) and mark}
        return replaced(frame, {keys: _value(mark, form, contents) for keys, mark in marks.items()})
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StateError(
            "The state carries the form of an Optax checkpoint of other parameters.",
            place="extra/optax",
            found=f"{type(error).__name__}: {error}"[:300],
        ) from error


def _value(mark: tuple[Any, ...], form: Tree, contents: Contents) -> Tree:
    kind = mark[0]
    if kind == PARAMS:
        return filled(form, contents.model.__getitem__)
    if kind == SLOT and len(mark) > 2:
        return filled(_unpacked(mark[2]), lambda path: _held(contents.slot(path, mark[1]), path))
    if kind == SLOT:
        return filled(form, lambda path: contents.slot(path, mark[1]))
    if kind == GROUP:
        return _of_group(contents.groups[mark[1]], mark[2] if len(mark) > 2 else "")
    return count({COUNT: contents.updates, SCHEDULE: contents.schedule}[kind])


def slot_paths(mark: Any, contents: Contents) -> set[str] | None:
    """Returns the parameters whose slots stand in the place of a mark; None of a leaf that is no slot's."""
    if not isinstance(mark, tuple) or mark[:1] != (SLOT,):
        return None
    if len(mark) > 2:
        return {leaf[0] for _, leaf in leaves(mark[2]) if isinstance(leaf, tuple) and len(leaf) == 1}
    return {path for path in contents.params if contents.slot(path, mark[1]) is not None}


def _held(tensor: Tensor | None, path: str) -> Tensor:
    if tensor is None:
        raise KeyError(path)
    return tensor


def count(value: int) -> Tensor:
    """Returns a count as Optax keeps it, int32."""
    return in_memory(np.asarray(value, np.int32), COUNT)


def count_faults(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with counts for which Optax has no room, and their names."""
    counts = {"updates": state.counts.updates, "schedule": state.counts.schedule}
    for name, value in counts.items():
        if not 0 <= value < 2**31:
            yield f"{value} doesn't fit int32", f"counts/{name}"


FORMS = {"optax": "Optax", "jax": "statekit.jax"}
"""Key in `extra` -> the system whose form it is."""
_ITEMS = "{step}/{item}"


def names_of_others(form: Tree, params: Collection[str]) -> bool:
    """Tells whether a form names parameters that a state doesn't have, as behind a map: masks name each."""
    for _, mark in leaves(form) if _is_whole(form) else ():
        of_its_own = mark[-1] if isinstance(mark, tuple) and mark[:1] == (SLOT,) else None
        if isinstance(of_its_own, Mapping | list):
            forms = leaves(_unpacked(of_its_own))
            if any(isinstance(leaf, At) and leaf.path not in params for _, leaf in forms):
                return True
    return False


def own_form(state: TrainState, key: str) -> Tree:
    """Returns the form that a layout kept, or None.

    A part of a form beside another layout's whole one is what that layout had no place for: None.
    """
    form = _form(state, key)
    others = [_form(state, other) for other in FORMS if other != key]
    return None if not _is_whole(form) and any(map(_is_whole, others)) else form


def _form(state: TrainState, key: str) -> Tree:
    form = state.extra.get(key)
    return form["tree"] if isinstance(form, Mapping) and "tree" in form else None


def _is_whole(form: Tree) -> bool:
    return any(isinstance(mark, tuple) and mark[:1] == (PARAMS,) for _, mark in leaves(form))


def in_own_form(state: TrainState, key: str, form: Tree, contents: Contents) -> Encoded:
    """Returns the tree that a state was read from, with what it holds now.

    Raises:
        StateError: The form isn't one of these parameters.
    """
    step, place = _where(state, key)
    tree = rebuilt(form, contents)
    kept_keys = (key, *_held_buffers(tree, contents))
    variables = tuple(state.extra[key].get(VARIABLES, ()))
    dropped = dropped_from(state.extra, kept_keys, FORMS[key])
    return Encoded(tree, step, dropped=dropped, place=place, variables=variables)


def placed(
    state: TrainState,
    key: str,
    opt_state: Tree,
    contents: Contents,
    exactness: Mapping[str, tuple[Exactness, str]] | None = None,
) -> Encoded:
    """Returns a tree with an optimizer's state that was made anew.

    Args:
        state: The state.
        key: The layout's key.
        opt_state: The state of the optimizer, in the layout's own form.
        contents: The parameters and counts.
        exactness: Of tensors below `opt_state`, by their names there.

    Raises:
        StateError: The form that another layout kept isn't one of these parameters.
    """
    system = FORMS[key]
    for other in FORMS:
        form = own_form(state, other)
        part = _optimizer_part(form)
        if part is None:
            continue
        tree = rebuilt({**form, part: None}, contents)
        step, place = _where(state, other)
        gone = {
            f"extra/{other}/{name}": f"{system} has no place for it"
            for name in leaf_names({"tree": {part: form[part]}})
        }
        kept_keys = (key, other, *_held_buffers(tree, contents))
        dropped = {**dropped_from(state.extra, kept_keys, system), **gone}
        return Encoded({**tree, part: opt_state}, step, _below(part, exactness), dropped, place)
    tree = {"params": usual_tree(state.params), "opt_state": opt_state}
    dropped = dropped_from(state.extra, (key,), system)
    return Encoded(tree, state.counts.updates, _below("opt_state", exactness), dropped)


def _held_buffers(tree: Tree, contents: Contents) -> tuple[str, ...]:
    """Returns the key of the buffers in `extra` if a tree has them all among its parameters."""
    stored = {id(leaf) for _, leaf in leaves(tree)}
    return (BUFFERS,) if {id(buffer) for buffer in contents.buffers.values()} <= stored else ()


def counted(encoded: Encoded, state: TrainState) -> Encoded:
    """Returns an encoded state that names the schedule's step as dropped, if no link counts it.

    Raises:
        InexactError: Nothing but the user's word would tell its parameters again.
    """
    all_links = links(encoded.tree)
    places = find_params(encoded.tree, all_links, (*CORE_LINKS, *OWN_CORE_LINKS))
    if len(places) > 1:
        raise InexactError(
            "Several parts of the tree that the source has may be the parameters, and nothing tells them in a file.",
            found=", ".join("/".join(map(str, place)) for place in places),
            remedy="write another layout, such as statekit or statekit-torch, or save the parameters under `params`",
        )
    if state.counts.schedule == state.counts.updates or any(link.kind == "schedule" for link in all_links):
        return encoded
    lost = {"counts/schedule": "the state counts updates only; start the schedule there yourself"}
    return replace(encoded, dropped={**encoded.dropped, **lost})


def _where(state: TrainState, key: str) -> tuple[int, str]:
    form = state.extra[key]
    return int(form.get("step", state.counts.updates)), _ITEMS if form.get("items") else ""


def _optimizer_part(form: Tree) -> Any:
    """Returns the key at a form's top under which the slots are, apart from the parameters; None if there isn't one."""
    if not isinstance(form, Mapping):
        return None
    marks = {
        key: {
            mark[0] for _, mark in leaves(part) if isinstance(mark, tuple) and mark and type(mark[0]) is str
        }
        for key, part in form.items()
    }
    holding = [key for key, roles in marks.items() if SLOT in roles]
    return holding[0] if len(holding) == 1 and "params" not in marks[holding[0]] else None


def _below(
    part: str, exactness: Mapping[str, tuple[Exactness, str]] | None
) -> dict[str, tuple[Exactness, str]]:
    return {f"{part}/{name}": how for name, how in (exactness or {}).items()}
