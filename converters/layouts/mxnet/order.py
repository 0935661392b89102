"""Which parameter an index of MXNet's optimizer means: by names in the file or given, else by a Trainer's order.

A Trainer numbers what it is given: of a dict, as `collect_params` returns it, the sorted names in MXNet 2, and the
dict's own order in MXNet 1.
Source: apache/mxnet, python/mxnet/gluon/trainer.py, `Trainer.__init__`, of 2.0 and of 1.9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from statekit.converters.layouts.pytorch.param_order import REMEDY
from statekit.errors import Faults, StateError
from statekit.state.evidence import Fact, ordered
from statekit.tensors.tensor import Shape

_BY_NAME = "sorted by name", "the order of their names"
_IN_FILE = "in the order of the .params file", "the order of the .params file"
"""How parameters may be taken, and whose order that is."""


@dataclass(frozen=True)
class Numbered:
    """The parameters of an optimizer.

    Attributes:
        names: Index -> name, of every index that is known.
        note: What was assumed, a sentence; "" if nothing was.
        assumed: The order in which parameters were taken; "" where names or shapes prove it.
    """

    names: Mapping[Any, str]
    note: str = ""
    assumed: str = ""

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What the names of the parameters rest on, where nothing proves them."""
        return (ordered(self.assumed),) if self.assumed else ()


def numbered(
    shapes: Mapping[Any, Shape | None],
    params: Mapping[str, Shape],
    by_optimizer: Mapping[Any, str],
    given: Sequence[str] | None,
    is_first_release: bool,
) -> Numbered:
    """Returns which parameters the indices mean.

    Args:
        shapes: Index -> shape of its slots, as far as they show one. An index that is text is a name.
        params: Name -> shape, in the order of the file.
        by_optimizer: Index -> name, as the optimizer holds it.
        given: Names by index, from the user.
        is_first_release: Whether MXNet 1 wrote the file.

    Raises:
        StateError: No order fits the shapes, or names are unknown.
    """
    if given is not None:
        return _checked(dict(enumerate(given)), shapes, params)
    named = {i: i for i in shapes if isinstance(i, str)} | dict(by_optimizer)
    if all(i in named for i in shapes):
        return _checked(named, shapes, params)
    orders = [list(params), sorted(params)] if is_first_release else [sorted(params), list(params)]
    fitting = [
        dict(enumerate(order)) for order in orders if not _faults(dict(enumerate(order)), shapes, params)
    ]
    if not fitting:
        return _checked(dict(enumerate(orders[0])), shapes, params)
    return _taken(fitting[0], shapes, sorted(params))


def _taken(names: Mapping[Any, str], shapes: Mapping[Any, Shape | None], by_name: Sequence[str]) -> Numbered:
    """Returns names that were taken in some order, and in which, unless shapes prove it."""
    is_sorted = [*names.values()] == by_name
    how, whose = _BY_NAME if is_sorted else _IN_FILE
    note = f"The optimizer names no parameters; they are taken {how}, as a Trainer of all parameters numbers them."
    known_shapes = [shape for shape in shapes.values() if shape is not None]
    is_proven = len({*known_shapes}) == len(shapes)
    return Numbered(names, note, "" if is_proven else whose)


def _checked(
    names: Mapping[Any, str], shapes: Mapping[Any, Shape | None], params: Mapping[str, Shape]
) -> Numbered:
    faults = Faults(_faults(names, shapes, params))
    faults.check(
        StateError,
        "The optimizer's indices don't fit the parameters, and nothing tells which they mean",
        remedy=REMEDY,
    )
    return Numbered(names)


def _faults(
    names: Mapping[Any, str], shapes: Mapping[Any, Shape | None], params: Mapping[str, Shape]
) -> list[tuple[str, str]]:
    faults = []
    first: dict[str, Any] = {}
    for index, shape in shapes.items():
        name = names.get(index)
        if name is None:
            faults.append(("has no parameter", f"index {index}"))
        elif name not in params:
            faults.append((f"is {name}, which the .params file hasn't", f"index {index}"))
        elif shape not in (None, params[name]):
            faults.append((f"has slots of shape {shape}; {name} has {params[name]}", f"index {index}"))
        elif (other := first.setdefault(name, index)) != index:
            faults.append((f"is {name}, as is index {other}", f"index {index}"))
    return faults
