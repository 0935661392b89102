"""Modules and optimizers of Flax' nnx in a checkpoint of Orbax, and the lines that load them.

    {model: nnx.state(model), optimizer: {opt_state, step}}     nnx.Optimizer
    {model, opt_state, step}                                    nnx.ModelAndOptimizer; Optimizer before Flax 0.11

Source: google/flax 0.12.8 flax/nnx/training/optimizer.py, `Optimizer`, `ModelAndOptimizer`; flax/nnx/statelib.py,
`to_pure_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from statekit.converters.layouts.optax.links import CHAIN_INDEX
from statekit.files.tree import Place
from statekit.lines.printing import UNKNOWN, SavedRun, quoted, subscripts

_STEP, _STATE, _MODEL = "step", "opt_state", "model"
_STATES = re.compile(rf"(?<![^/]){_STATE}/")
_OF_PARAMS = re.compile(r"^(labels|mask|numbers) = ")
_BUFFERS = ("mean", "var", "count", "key")
"""Variables of a module that no optimizer moves: those of BatchNorm and of streams of random numbers."""


@dataclass(frozen=True)
class Nnx:
    """Where a module and its optimizer lie.

    Attributes:
        model: The place of the module's variables, keys joined by `/`.
        optimizer: That of the optimizer, with a slash behind it; "" at the top.
        is_joined: Whether the optimizer holds the module.
        is_pure: Whether both are dicts of arrays, as `nnx.to_pure_dict` makes them.
        wrt: Code of the filter of what the optimizer moves.
        has_more: Whether the module has variables that are no parameters.
    """

    model: str
    optimizer: str
    is_joined: bool
    is_pure: bool
    wrt: str
    has_more: bool

    def state_code(self, name: str) -> str:
        """Returns the code of what the file has of `model` or `optimizer`."""
        only = "" if self.has_more or name != _MODEL else ", nnx.Param"
        code = f"nnx.state({name}{only})"
        return f"nnx.to_pure_dict({code})" if self.is_pure else code

    @property
    def parts(self) -> dict[str, str]:
        """The name of each object by the place of its state."""
        of_optimizer = {self.optimizer.rstrip("/"): "optimizer"}
        return of_optimizer if self.is_joined else {self.model: _MODEL, **of_optimizer}


def nnx_of(saved: SavedRun, paths: Collection[str]) -> Nnx | None:
    """Returns the module and the optimizer of a checkpoint; None if its names aren't those of nnx.

    Args:
        saved: The checkpoint.
        paths: The paths of parameters that the optimizer moves.
    """
    place, keys = optimizer_place(saved.tensors)
    model = _model(saved.tensors, paths)
    is_joined = keys == {_MODEL, _STATE, _STEP} and model == f"{place}{_MODEL}"
    is_alone = keys == {_STATE, _STEP} and place != "" and model is not None
    # A program's own dict may have the three keys too.
    if is_joined and not (saved.variables or _leaves_empty_out(saved, f"{place}{_STATE}/")):
        return None
    if model is None or not (is_joined or is_alone):
        return None
    names = {name.removeprefix(f"{model}/") for name in saved.tensors if name.startswith(f"{model}/")}
    others = names - {*paths}
    still = {name for name in others if name.rpartition("/")[2] not in _BUFFERS}
    wrt = UNKNOWN if still else "nnx.Param"
    return Nnx(model, place, is_joined, not saved.variables, wrt, bool(others))


def optimizer_place(names: Sequence[str]) -> tuple[str, set[str]]:
    """Returns what stands before the only `opt_state` that has a `step` beside it, and the keys beside both."""
    above = {name[: match.start()] for name in names for match in _STATES.finditer(name)}
    places = [place for place in sorted(above) if f"{place}{_STEP}" in names]
    if len(places) != 1:
        return "", set()
    below = (name.removeprefix(places[0]) for name in names if name.startswith(places[0]))
    return places[0], {name.partition("/")[0] for name in below}


def _model(names: Sequence[str], paths: Collection[str]) -> str | None:
    """Returns the place below which some names are those of parameters, outside of an optimizer's state."""
    path = next(iter(paths), "")
    outside = (name for name in names if not _STATES.search(name))
    places = [name.removesuffix(f"/{path}") for name in outside if path and name.endswith(f"/{path}")]
    whole = [place for place in places if {f"{place}/{path}" for path in paths} <= {*names}]
    return min(whole, key=lambda place: (place.rpartition("/")[2] != _MODEL, len(place)), default=None)


def _leaves_empty_out(saved: SavedRun, state: str) -> bool:
    """Tells whether a chain lacks the index of a link without a state."""
    names = [name.removeprefix(state) for name in (*saved.tensors, *saved.empty) if name.startswith(state)]
    numbers = {int(key) for name in names if CHAIN_INDEX.fullmatch(key := name.partition("/")[0])}
    return bool(numbers) and len(numbers) <= max(numbers)


def by_function(optimizer: Iterable[str]) -> list[str]:
    """Returns lines that make an optimizer of Optax, with functions of parameters where they make trees of labels.

    nnx calls `init` with variables and `update` with arrays: no one tree has the structure of both.
    """
    keys = 'jax.tree_util.keystr(keys, simple=True, separator="/")'
    lines = (_OF_PARAMS.sub(r"\1 = lambda params: ", line) for line in optimizer)
    return [line.replace(keys, f'{keys}.removesuffix("/value")') for line in lines]


def restoring(saved: SavedRun, nnx: Nnx, items: Mapping[str, Place]) -> list[str]:
    """Returns the lines that restore a module and make its optimizer of `optimizer`, which is one of Optax.

    Args:
        saved: The checkpoint.
        nnx: Where both lie in it.
        items: The folders of its items.
    """
    name = "ModelAndOptimizer" if nnx.is_joined else "Optimizer"
    lines = [
        f"optimizer = nnx.{name}(model, optimizer, wrt={nnx.wrt})  # model: the run's nnx.Module",
        "checkpointer = ocp.StandardCheckpointer()",
    ]
    if len(items) > 1 and all(place.partition("/")[0] in items for place in nnx.parts):
        groups = {item: _within(item, nnx) for item in items}
        restored = [
            _item(items[item], parts, _tops(saved, f"{item}/"), nnx)
            for item, parts in groups.items()
            if parts
        ]
        return [*lines, *chain.from_iterable(restored)]
    item = next(iter(items.values()))
    return [*lines, *_item(item, nnx.parts, _tops(saved, ""), nnx)]


def _within(item: str, nnx: Nnx) -> dict[str, str]:
    return {
        place.removeprefix(item).lstrip("/"): name
        for place, name in nnx.parts.items()
        if place.partition("/")[0] == item
    }


def _tops(saved: SavedRun, above: str) -> dict[str, bool]:
    """Returns the keys at the top of an item, and whether each is a tensor."""
    names = [name.removeprefix(above) for name in saved.tensors if name.startswith(above)]
    return {name.partition("/")[0]: "/" not in name for name in names}


def _item(folder: Place, parts: Mapping[str, str], tops: Mapping[str, bool], nnx: Nnx) -> list[str]:
    """Returns the lines that restore one item and update the objects whose states it has."""
    if "" in parts:
        name = parts[""]
        return [f"nnx.update({name}, checkpointer.restore({quoted(folder)}, {nnx.state_code(name)}))"]
    tree: dict[str, Any] = {}
    for place, name in parts.items():
        node = tree
        *above, last = place.split("/")
        for key in above:
            node = node.setdefault(key, {})
        node[last] = nnx.state_code(name)
    numbers = {key: "0" for key, is_tensor in tops.items() if is_tensor}
    left = [key for key in tops if key not in tree and key not in numbers]
    target = _code({**tree, **numbers})
    updates = [f"nnx.update({name}, state{subscripts(place)})" for place, name in parts.items()]
    if not left:
        restore = f"state = checkpointer.restore({quoted(folder)}, target)"
        return [f"target = {target}", restore, *updates]
    return [
        f"# left in the file: {', '.join(left)}; with a value of yours in target it is restored too",
        f"target = {target}",
        "read = ocp.checkpoint_utils.construct_restore_args(target)",
        "read = ocp.args.PyTreeRestore(target, restore_args=read, partial_restore=True)",
        f"state = ocp.PyTreeCheckpointer().restore({quoted(folder)}, args=read)",
        *updates,
    ]


def _code(node: Any) -> str:
    if not isinstance(node, Mapping):
        return str(node)
    pairs = ", ".join(f"{subscripts(key)[1:-1]}: {_code(child)}" for key, child in node.items())
    return f"{{{pairs}}}"
