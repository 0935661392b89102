"""How TensorFlow 1's optimizers name slots beside their variables, and how a partitioned variable becomes its parts.

The optimizers of TensorFlow number the slots of a variable in the order in which they were made: `w/Adafactor`,
`w/Adafactor_1`, ...; a variable scope around the training goes before: `training/w/Adafactor`. Mesh-TensorFlow's say
which slot it is: `w_slot_vr`, `w/adam_m`.

A partitioned variable is saved under one name with its slices. So are its slots, but below a scope their names are cut
at the wrong place: `training/w/part_0/Adam` is saved as `w/g/w/part_0/Adam`, see `saved_name`.

Source: tensorflow/tensorflow v1.15, python/training/slot_creator.py, `create_slot`, `_create_slot_var`;
python/training/optimizer.py; tensorflow/mesh mesh_tensorflow/optimize.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

from statekit.converters.layouts.tensorflow.powers import POWERS
from statekit.converters.layouts.tensorflow.slices import joined, numbers
from statekit.errors import StateError
from statekit.tensors.tensor import Tensor
from statekit.tensors.typed import Name, typed

GLOBAL_STEP = "global_step"
AVERAGE = "/ExponentialMovingAverage"
OF_OPTIMIZERS = re.compile(
    r"(?i)(^|/)((lazy)?adam\w*|adafactor\w*|momentum|nesterov|adagrad\w*|adadelta\w*|rmsprop\w*|ftrl\w*|lamb\w*|"
    r"beta[12]_power|exponentialmovingaverage|loss_scale)(_\d+)?(/|$)|(_slot_v[rc]?|_slot_m|/adam_[mv])$"
)
"""Names of what an optimizer, an average or a loss scaler keeps.

Source: tensorflow/tensorflow v1.15, python/training, `_get_or_make_slot`; Mesh-TensorFlow, optimize.py.
"""


@dataclass(frozen=True)
class Named:
    """The tensors of a checkpoint, sorted by their names.

    Attributes:
        params: Variables, by path: those that have slots, then other floating-point arrays that have axes.
        slots: By path: what the names say of each slot (`""`, `_1`, `vr`, ...) -> the tensor.
        scope: What goes before the names of slots, with its `/`; empty in most files.
        averages: Averages of variables over time, by path.
        others: Everything else, by name; averages below a scope of their own among it.
        parts: Where a path is a part of a variable: (name, TensorFlow's text for the slice).
        orphans: Slots whose variable isn't there.
        foreign: Slots of variables that another optimizer keeps.
    """

    params: Mapping[str, Tensor]
    slots: Mapping[str, Mapping[str, Tensor]]
    scope: str = ""
    averages: Mapping[str, Tensor] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    orphans: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


Variable: TypeAlias = Tensor | bytes | list[bytes] | dict[Name, Tensor]
"""What stands under a name: an array, strings, or a partitioned variable's slices."""


def _params_among(
    left: Mapping[str, Any], params: Mapping[str, Tensor], of_variables: Sequence[str]
) -> list[str]:
    """Returns the names that are parameters among those that are no slots: variables that are kept of no other."""
    return [
        name
        for name, value in left.items()
        if name in params or (_is_variable(value) and name not in of_variables)
    ]


def _averaged(name: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns the variable that a tensor is the average of; "" if it is none's."""
    base = name.removesuffix(AVERAGE)
    return base if base != name and name in tensors and base in tensors else ""


def _of_variables(left: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the variables among other names that are kept of another variable."""
    return [name for name, value in left.items() if _is_variable(value) and _is_kept_of(name, tensors)]


def _slot_of(
    name: str, pattern: re.Pattern[str], tensors: Mapping[str, Tensor]
) -> tuple[re.Match[str] | None, str | None]:
    """Returns the match of a slot's name, and the slot's variable; None for each that there isn't."""
    match = pattern.fullmatch(name) if name in tensors else None
    return match, None if match is None else _variable(match["base"], tensors)


def sorted_names(tree: Any, pattern: re.Pattern[str], place: object) -> Named:
    """Sorts a flat checkpoint's tensors.

    Args:
        tree: Variable by name.
        pattern: Matches a slot's whole name; `base` is its variable's, perhaps below a scope, `slot` which it is.
        place: The checkpoint, for messages.

    Raises:
        StateError: It isn't variables by name.
    """
    typed(tree, dict[Name, Variable], place, "The checkpoint doesn't hold variables by name", StateError)
    flat, parts = _parted(tree, pattern, place)
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    averages: dict[str, Tensor] = {}
    scopes: set[str] = set()
    left: dict[str, Any] = {}
    orphans = []
    for name, value in flat.items():
        match, base = _slot_of(name, pattern, tensors)
        if match and base is not None:
            params[base] = tensors[base]
            slots.setdefault(base, {})[match["slot"]] = value
            scopes.add(match["base"].removesuffix(base))
        elif match:
            orphans.append(name)
        elif averaged := _averaged(name, tensors):
            averages[averaged] = value
        else:
            left[name] = value
    of_variables = _of_variables(left, tensors)
    foreign = tuple(name for name in of_variables if not name.endswith(AVERAGE))
    for name in _params_among(left, params, of_variables):
        params[name] = left.pop(name)
    ordered = {name: params[name] for name in flat if name in params}
    return Named(ordered, slots, ", ".join(sorted(scopes)), averages, left, parts, tuple(orphans), foreign)


def _is_variable(value: Any) -> bool:
    return isinstance(value, Tensor) and len(value.shape) > 0 and value.dtype.kind in "fV"


def _is_kept_of(name: str, variables: Mapping[str, Any]) -> bool:
    """Tells whether a name is that of a variable's slot or average, as any optimizer calls it, below any scope."""
    match = OF_OPTIMIZERS.search(name)
    return match is not None and _variable(name[: match.start()], variables) is not None


def _variable(base: str, names: Mapping[str, Any]) -> str | None:
    """Returns the variable that a slot's name speaks of: below any scope."""
    while base and base not in names:
        base = base.partition("/")[2]
    return base or None


def saved_name(whole: str, path: str, scope: str, suffix: str) -> str:
    """Returns the name under which a partitioned variable's slice is saved, or that of one of its slots.

    TensorFlow takes as many characters from the front of a slot's name as the part's own name has, scope or not.

    Args:
        whole: The variable's name.
        path: The part's: `<whole>/part_<i>`.
        scope: What goes before the names of slots, with its `/`.
        suffix: What goes after them, such as `/Adam`; empty for the variable itself, which has no scope.
    """
    return f"{whole}/{f'{scope}{path}{suffix}'[len(path) + 1 :]}" if scope else f"{whole}{suffix}"


def _parted(
    tree: Mapping[str, Any], pattern: re.Pattern[str], place: object
) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """Returns a tree in which each part of a partitioned variable is one by itself: `w/part_0`, `w/part_0/Adam`."""
    flat: dict[str, Any] = {}
    parts: dict[str, tuple[str, str]] = {}
    scopes = _scopes(tree, pattern)
    places = {name: numbers(value) for name, value in tree.items() if isinstance(value, Mapping)}
    for name, value in tree.items():
        if not isinstance(value, Mapping):
            flat[name] = value
            continue
        for spec, tensor in value.items():
            slot = _sliced_slot(name, spec, places, pattern, scopes)
            path = f"{name}/part_{places[name][spec]}"
            flat[slot or path] = tensor
            if slot is None:
                parts[path] = name, spec
    wholes: dict[str, dict[str, Any]] = {}
    for path, (name, spec) in parts.items():
        wholes.setdefault(name, {})[spec] = flat[path]
    for name, slices in wholes.items():  # one that isn't there has no number either
        joined(name, slices, place)
    return flat, parts


def _sliced_slot(
    name: str,
    spec: str,
    places: Mapping[str, Mapping[str, int]],
    pattern: re.Pattern[str],
    scopes: Iterable[str],
) -> str | None:
    """Returns the name that a slice has in the graph, if it is of a slot or an average; None if of a variable."""
    match = pattern.fullmatch(name)
    suffix = name[len(match["base"]) :] if match else AVERAGE if name.endswith(AVERAGE) else ""
    base = name.removesuffix(suffix)
    for whole in (base, *accumulate(base.split("/")[:-1], "{}/{}".format)) if suffix else ():
        if spec in places.get(whole, ()):
            path = f"{whole}/part_{places[whole][spec]}"
            for scope in scopes:
                if saved_name(whole, path, scope, suffix) == name:
                    return f"{scope}{path}{suffix}"
    return f"{base}/{spec}{suffix}" if match else None  # of no variable's slice, and so an orphan


def _scopes(tree: Mapping[str, Any], pattern: re.Pattern[str]) -> list[str]:
    """Returns what may go before the names of slots: what does so before those of whole variables, or of powers."""
    scopes = {""}
    for name, value in tree.items():
        match = pattern.fullmatch(name) if isinstance(value, Tensor) else None
        base = _variable(match["base"], tree) if match else None
        if match and base is not None:
            scopes.add(match["base"].removesuffix(base))
        elif (last := name.rpartition("/")[2]) in POWERS:
            scopes.add(name.removesuffix(last))
    return sorted(scopes)
