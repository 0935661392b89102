"""Whose a variable of an optimizer is, by the name that Keras gave it.

    Adam/m/hidden/kernel:0                    Keras 2; `m/hidden/kernel:0` below a loss scale
    Adam/hidden/kernel/m:0                    a legacy optimizer of Keras 2
    adam/sequential_dense_kernel_momentum     Keras 3, which writes `_` for the slashes of a path

Source: keras-team/keras v2.15.0, keras/optimizers/optimizer.py, `add_variable_from_reference`;
keras/optimizers/legacy/optimizer_v2.py, `add_slot`; v3, keras/src/optimizers/base_optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from statekit.tensors.tensor import Shape


def plain_name(name: str) -> str:
    """Returns a variable's name without the number of an output of TensorFlow's operation."""
    return name.removesuffix(":0")


def owners(rows: Sequence[tuple[str, Shape]], params: Mapping[str, Shape]) -> list[str] | None:
    """Returns the parameter that each variable is the `v` of; None where names and shapes do not tell all of them.

    Args:
        rows: Name and shape of the `v` of each parameter, in the optimizer's order.
        params: Shape of each variable of the model, by its name.
    """
    names = [_owner(plain_name(name), shape, params) for name, shape in rows]
    owned = [name for name in names if name is not None]
    return owned if len({*owned}) == len(rows) else None


def _owner(row: str, shape: Shape, params: Mapping[str, Shape]) -> str | None:
    """Returns the parameter that a row is the `v` of: of several that end alike, the longest."""
    fitting = [name for name, size in params.items() if size == shape and _is_v_of(row, name)]
    return max(fitting, key=len, default=None)


def _is_v_of(row: str, name: str) -> bool:
    flat = name.replace("/", "_")
    return row == f"v/{name}" or row.endswith((f"/v/{name}", f"/{name}/v", f"/{flat}_velocity"))


def slot_of(name: str, params: Sequence[str]) -> tuple[str | None, str]:
    """Returns the parameter and the slot of a variable, by its name; None and the name's end where it is of none.

    Example:
        >>> slot_of("SGD/m/hidden/kernel:0", ["hidden/kernel"])
        ('hidden/kernel', 'm')
        >>> slot_of("SGD/hidden/kernel/momentum:0", ["hidden/kernel"])
        ('hidden/kernel', 'momentum')
        >>> slot_of("sgd/sequential_hidden_kernel_momentum", ["hidden/kernel"])
        ('hidden/kernel', 'momentum')
    """
    row = plain_name(name)
    matches = [(param, match) for param in params if (match := _form(param).fullmatch(row)) is not None]
    if not matches:
        return None, row.rpartition("/")[2]
    param, match = max(matches, key=lambda pair: len(pair[0]))  # of several that end alike
    return param, next(slot for slot in match.groups() if slot is not None)


def _form(param: str) -> re.Pattern[str]:
    """Returns the form of the names of a parameter's slots, of new and legacy optimizers and of Keras 3."""
    name, flat = re.escape(param), re.escape(param.replace("/", "_"))
    return re.compile(
        rf"(?:[^/]+/)?([^/]+)/{name}|(?:.+/)?{name}/([^/]+)|(?:[^/]+/)?(?:[^/]+_)?{flat}_([^/]+)"
    )
