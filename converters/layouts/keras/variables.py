"""The variables of a Keras model as its files number them: which there are, what they are called, in what order.

Files number a layer's variables, and the optimizer's, which come in the order of the model's trainable variables.
That order is not in the file. It follows from the model's config where there is one, and from names that are given;
else from the order in which layers were written, which is said. Where layers of a class that isn't known hold others,
their order isn't known, and only shapes that occur once tell.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `_save_state`; keras/src/layers/layer.py, `Layer.variables`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

from statekit.errors import Faults, StateError
from statekit.files.checkpoint import ATTRIBUTES
from statekit.state.evidence import Fact, ordered
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import shipped_json
from statekit.tensors.typed import Name, fits, misfits

T = TypeVar("T")
Place: TypeAlias = tuple[str, ...]
"""Keys of a variable in the tree."""

VARIABLES = "vars"
CONFIG = "config.json"
"""Attribute of a whole file: the model's config."""
VERSIONS = "metadata.json"
"""Attribute of a whole file: who wrote it."""
REMEDY = "name them in the order of model.trainable_variables: --param-names FILE, or read the .keras file"
_SHOWN = 20
_WRITTEN = "the order in which its layers were written"


@dataclass(frozen=True)
class Variable:
    """One variable of a layer.

    Attributes:
        place: Where it lies.
        name: Names of the layers around it and its own, or its number where its class doesn't tell, joined with `/`.
        tensor: Its values.
        trained: Whether an optimizer may move it.
        ordered: Whether its place among the trained ones is known.
    """

    place: Place
    name: str
    tensor: Tensor
    trained: bool
    ordered: bool


@dataclass(frozen=True)
class Order:
    """The variables that an optimizer moves, in its order.

    Attributes:
        moved: They, with the names that they go by.
        notes: What was assumed, a sentence each.
        assumed: Whether variables of one shape were taken in an order that nothing proves.
    """

    moved: Mapping[str, Variable]
    notes: tuple[str, ...] = ()
    assumed: bool = False

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What the names of the variables rest on, where nothing proves them."""
        return (ordered(_WRITTEN),) if self.assumed else ()


@cache
def _known() -> Any:
    return shipped_json(__package__, "layers.json")


def may_move(name: str, tensor: Tensor) -> bool:
    """Tells whether an optimizer may move a variable: it is no count, seed, or statistic of batches."""
    return name.rpartition("/")[2] not in _known()["not_trained"] and tensor.dtype.kind in "fV"


def group_faults(node: Any, place: Place = ()) -> Iterator[tuple[str, str]]:
    """Yields the nodes that are neither groups nor tensors nor attributes by name, each with its place."""
    if not fits(node, dict[Name, Any]):
        yield from misfits(node, dict[Name, Any], place)
        return
    for key, child in node.items():
        if key != ATTRIBUTES and isinstance(child, Mapping):
            yield from group_faults(child, (*place, key))
        else:
            yield from misfits(child, dict[Name, Any] if key == ATTRIBUTES else Tensor, (*place, key))


def is_group(tree: Any) -> bool:
    """Tells whether a tree is as a file of groups has it."""
    return next(group_faults(tree), None) is None


def variables(tree: Mapping[str, Any], config: Any = None) -> list[Variable]:
    """Returns the variables of all layers, in the order in which the model has them as far as that is known.

    Args:
        tree: The file's.
        config: The model's, as config.json has it; None if there is none.
    """
    filled: set[int] = set()
    _mark_filled(tree, filled)
    return list(_below(tree, (), (), config, (True, True), filled))


def _below(
    node: Mapping[str, Any],
    place: Place,
    names: tuple[str, ...],
    config: Any,
    trained_and_ordered: tuple[bool, bool],
    filled: set[int],
) -> Iterator[Variable]:
    trained, ordered = trained_and_ordered
    layer = _layer_name(node, place, config)
    if place and place[-1] != "layers":
        names = (*names, layer or place[-1])
    if isinstance(config, Mapping) and _of(config).get("trainable") is False:
        trained = False
    prefix = names or ((layer,) if layer else ())
    for key, name, tensor in _own_variables(node, place):
        moved = trained and may_move(name, tensor)
        yield Variable((*place, VARIABLES, key), "/".join((*prefix, name)), tensor, moved, ordered)
    inner, in_order = _children(node, place, filled)
    for key in inner:
        below = _layer_config(config, key)
        yield from _below(node[key], (*place, key), names, below, (trained, ordered and in_order), filled)


def _layer_name(node: Mapping[str, Any], place: Place, config: Any) -> str | None:
    """Returns a layer's name: the attribute of its variables, or of files of Keras 2 its config's."""
    group = node.get(VARIABLES)
    name = group.get(ATTRIBUTES, {}).get("name") if isinstance(group, Mapping) else None
    if not fits(name, Name) and place and isinstance(config, Mapping):
        name = _of(config).get("name")
    return str(name) if fits(name, Name) else None


def _own_variables(node: Mapping[str, Any], place: Place) -> Iterator[tuple[str, str, Tensor]]:
    """Yields key, name and values of a layer's own variables; their numbers where its class doesn't tell names."""
    group = node.get(VARIABLES)
    if isinstance(group, Mapping):
        tensors = {key: leaf for key, leaf in group.items() if isinstance(leaf, Tensor)}
    else:
        tensors = {}
    names = _called(_kind(place), len(tensors)) or list(tensors)
    for (key, tensor), name in zip(tensors.items(), names, strict=True):
        yield key, name, tensor


def _children(node: Mapping[str, Any], place: Place, filled: set[int]) -> tuple[list[str], bool]:
    """Returns the names below a layer, and whether they are in the layer's own order."""
    keys = [
        key
        for key, child in node.items()
        if key not in (VARIABLES, ATTRIBUTES, *_known()["no_layers"]) and isinstance(child, Mapping)
    ]
    full = [key for key in keys if id(node[key]) in filled]
    if place and place[-1] == "layers":
        return keys, True
    order = _known()["children"].get(_kind(place))
    if order is not None and set(full) <= set(order):
        return [key for key in order if key in keys], True
    return keys, len(full) < 2


def _layer_config(config: Any, key: str) -> Any:
    """Returns the config of what lies below a key of a layer with this config."""
    if not isinstance(config, Mapping):
        return None
    inner = _of(config)
    if key == "layers" and isinstance(inner.get("layers"), list):
        return {"keyed": keyed_layers(inner["layers"])}
    if "keyed" in config:
        return config["keyed"].get(key)
    attribute = {"forward_layer": "layer"}.get(key, key)
    return inner.get(attribute)


def _of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("config")
    return inner if isinstance(inner, Mapping) else {}


def keyed_layers(layers: Sequence[Any]) -> dict[str, Any]:
    """Returns the layers of a config by the keys that a file has for them."""
    keyed: dict[str, Any] = {}
    used: dict[str, int] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            continue
        kind = snake_case(str(layer.get("class_name")))
        number = used[kind] = used.get(kind, -1) + 1
        keyed[f"{kind}_{number}" if number else kind] = layer
    return keyed


def snake_case(name: str) -> str:
    """Returns a class's name as Keras writes it in files.

    Example:
        >>> snake_case("Conv2DTranspose"), snake_case("RMSNormalization")
        ('conv2d_transpose', 'rms_normalization')

    Source: keras-team/keras, keras/src/utils/naming.py, `to_snake_case`.
    """
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _kind(place: Place) -> str:
    key = place[-1] if place else ""
    return key if key in _known()["children"] or key in _known()["variables"] else re.sub(r"_\d+$", "", key)


def _called(kind: str, count: int) -> list[str] | None:
    return next((names for names in _known()["variables"].get(kind, ()) if len(names) == count), None)


def _mark_filled(node: Mapping[str, Any], filled: set[int]) -> bool:
    """Adds the identities of groups with a tensor at or below them; tells whether this group is one."""
    below = [
        _mark_filled(child, filled) if isinstance(child, Mapping) else isinstance(child, Tensor)
        for key, child in node.items()
        if key != ATTRIBUTES and key not in _known()["no_layers"]
    ]
    if any(below):
        filled.add(id(node))
    return any(below)


def _as_written(moved: Sequence[Variable], shapes: Sequence[Shape], by_config: bool) -> Order:
    """Returns the variables in the order in which they were written; arguments and errors are those of `in_order`."""
    if [variable.tensor.shape for variable in moved] != list(shapes):
        raise _unknown(moved, shapes)
    alike = sum(list(shapes).count(shape) > 1 for shape in shapes)
    note = f"The optimizer numbers its variables; {alike} of equal shapes are taken in the order of writing."
    notes = () if by_config or not alike else (note,)
    return Order({variable.name: variable for variable in moved}, notes, bool(notes))


def in_order(every: Sequence[Variable], shapes: Sequence[Shape], by_config: bool) -> Order:
    """Finds the variables that an optimizer's slots of these shapes belong to, where nobody names them.

    Raises:
        StateError: Shapes contradict the order of the layers, or nothing tells the order.
    """
    moved = [variable for variable in every if variable.trained]
    if all(variable.ordered for variable in moved):
        return _as_written(moved, shapes, by_config)
    by_shape: dict[Shape, list[Variable]] = {}
    for variable in moved:
        by_shape.setdefault(variable.tensor.shape, []).append(variable)
    counts = {**dict.fromkeys(by_shape, 0), **Counter(shapes)}
    decided = all(
        len(by_shape.get(shape, ())) == count and (count == 1 or all(v.ordered for v in by_shape[shape]))
        for shape, count in counts.items()
    )
    if not decided:
        raise _unknown(moved, shapes)
    left = {shape: iter(alike) for shape, alike in by_shape.items()}
    return Order({v.name: v for v in (next(left[shape]) for shape in shapes)})


def _unknown(moved: Sequence[Variable], shapes: Sequence[Shape]) -> StateError:
    return StateError(
        "The optimizer numbers its variables, and nothing tells which parameters they belong to.",
        expected=f"slots of {len(moved)} parameters: {[v.tensor.shape for v in moved][:_SHOWN]}",
        found=f"{len(shapes)}: {list(shapes)[:_SHOWN]}",
        remedy=REMEDY,
    )


def _paired(names: Sequence[str], variables: Sequence[Variable]) -> dict[str, Variable] | None:
    """Returns a layer's variables by these paths: by their own names, else in their order; None if it has too few."""
    own_names = {variable.name.rpartition("/")[2]: variable for variable in variables}
    if all(name.rpartition("/")[2] in own_names for name in names):
        return {name: own_names[name.rpartition("/")[2]] for name in names}
    if len(names) <= len(variables):  # trained ones come first, in the order in which they were made
        return dict(zip(names, variables, strict=False))
    return None


def _shape_faults(
    moved: Mapping[str, Variable], shapes: Iterable[tuple[str, Shape]]
) -> Iterator[tuple[str, str]]:
    """Yields the variables that have another shape than their slots."""
    for name, shape in shapes:
        if name in moved and moved[name].tensor.shape != shape:
            yield f"has shape {moved[name].tensor.shape}, its slots {shape}", name


def by_names(every: Sequence[Variable], names: Sequence[str], shapes: Sequence[Shape] | None = None) -> Order:
    """Finds the variables of these names: by the names of layers around them, then by their own or their order.

    Args:
        every: All variables.
        names: Paths of variables, as Keras has them.
        shapes: Theirs, in the same order, where known.

    Raises:
        StateError: A name has no variable, or one of another shape; lists every fault.
    """
    if shapes is not None and len(shapes) != len(names):
        raise StateError(
            "Names were given for another number of parameters.", expected=len(shapes), found=len(names)
        )
    floats = [variable for variable in every if variable.tensor.dtype.kind in "fV"]
    inside = _grouped(floats, lambda variable: variable.name.rpartition("/")[0])
    wanted = _grouped(names, lambda name: name.rpartition("/")[0])
    same = _scopes(list(wanted), list(inside))
    moved: dict[str, Variable] = {}
    faults = Faults()
    for scope, scope_names in wanted.items():
        if scope not in same:
            faults += [("has no layer of its name in the file", name) for name in scope_names]
            continue
        pairs = _paired(scope_names, inside[same[scope]])
        if pairs is None:
            faults += [
                ("is one of more variables than the layer has in the file", name) for name in scope_names
            ]
        else:
            moved |= pairs
    if shapes is not None:
        faults += _shape_faults(moved, zip(names, shapes, strict=True))
    if len({v.place for v in moved.values()}) != len(moved):
        faults.add("name a variable twice", "names")
    faults.check(StateError, "The names aren't those of the variables", remedy=REMEDY)
    return Order({name: moved[name] for name in names})


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _scopes(wanted: Sequence[str], inside: Sequence[str]) -> dict[str, str]:
    """Returns which layer of the file each scope is: of the same names, but for what stands before all of them."""
    scopes = {scope: scope for scope in wanted if scope in inside}
    if len(scopes) == len(wanted):
        return scopes
    for scope in wanted:
        ends = [inner for inner in inside if _ends(inner, scope) or _ends(scope, inner)]
        if scope not in scopes and len(ends) == 1:
            scopes[scope] = ends[0]
    return scopes


def _ends(scope: str, other: str) -> bool:
    return bool(other) and (scope == other or scope.endswith(f"/{other}"))


def without(tree: Mapping[str, Any], places: Iterable[Place]) -> dict[str, Any]:
    """Returns a tree without what lies at these places; groups stay."""
    gone = {*places}

    def kept(node: Any, place: Place) -> Any:
        if not isinstance(node, Mapping):
            return node
        return {
            key: child if key == ATTRIBUTES else kept(child, (*place, key))
            for key, child in node.items()
            if (*place, key) not in gone
        }

    pruned: dict[str, Any] = kept(tree, ())
    return pruned
