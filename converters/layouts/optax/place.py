"""Puts an optimizer's state in its place: in the form it was read in, in another layout's, or beside the parameters.

A form is what `optax_frame` keeps of a tree, in `extra` under the layout's own key; what a tree holds beside parameters
and optimizer (batch statistics, keys, a step) goes along from one layout to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statekit.conversion.contracts import Encoded, Exactness
from statekit.converters.layouts.dropped import unplaced
from statekit.converters.layouts.optax.links import is_tensor, leaves
from statekit.converters.layouts.optax.skeleton import SLOT, Contents, rebuilt, usual_tree
from statekit.state.train_state import TrainState
from statekit.tensors.tree import Tree

FORMS = {"optax": "Optax", "jax": "statekit.jax"}
"""Key in `extra` -> the system whose form it is."""
_ITEMS = "{step}/{item}"


def own_form(state: TrainState, key: str) -> Tree:
    """Returns the form that a layout kept, or None."""
    form = state.extra.get(key)
    return form["tree"] if isinstance(form, Mapping) and "tree" in form else None


def in_own_form(state: TrainState, key: str, form: Tree, contents: Contents) -> Encoded:
    """Returns the tree that a state was read from, with what it holds now.

    Args:
        state: The state.
        key: The layout's key.
        form: The form that it kept.
        contents: What goes into it.

    Raises:
        StateError: The form isn't one of these parameters.
    """
    step, place = _where(state, key)
    return Encoded(
        rebuilt(form, contents), step, dropped=unplaced(state.extra, (key,), FORMS[key]), place=place
    )


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
            f"extra/{other}/tree/{'/'.join(map(str, (part, *keys)))}": f"{system} has no place for it"
            for keys, leaf in leaves(form[part])
            if is_tensor(leaf)
        }
        dropped = {**unplaced(state.extra, (key, other), system), **gone}
        return Encoded({**tree, part: opt_state}, step, _below(part, exactness), dropped, place)
    tree = {"params": usual_tree(state.params), "opt_state": opt_state}
    dropped = unplaced(state.extra, (key,), system)
    return Encoded(tree, state.counts.updates, _below("opt_state", exactness), dropped)


def _where(state: TrainState, key: str) -> tuple[int, str]:
    form = state.extra[key]
    return int(form.get("step", state.counts.updates)), _ITEMS if form.get("items") else ""


def _optimizer_part(form: Tree) -> Any:
    """Returns the key at a form's top under which the slots are, apart from the parameters; None if there isn't one."""
    if not isinstance(form, Mapping):
        return None
    marks = {
        key: {mark[0] for _, mark in leaves(part) if isinstance(mark, tuple) and mark}
        for key, part in form.items()
    }
    holding = [key for key, found in marks.items() if SLOT in found]
    return holding[0] if len(holding) == 1 and "params" not in marks[holding[0]] else None


def _below(
    part: str, exactness: Mapping[str, tuple[Exactness, str]] | None
) -> dict[str, tuple[Exactness, str]]:
    return {f"{part}/{name}": how for name, how in (exactness or {}).items()}
