"""Whose a variable of an optimizer is, by the name that Keras gave it.

    Adam/m/hidden/kernel:0                    Keras 2; `m/hidden/kernel:0` below a loss scale
    Adam/hidden/kernel/m:0                    a legacy optimizer of Keras 2
    adam/sequential_dense_kernel_momentum     Keras 3, which writes `_` for the slashes of a path

Source: keras-team/keras v2.15.0, keras/optimizers/optimizer.py, `add_variable_from_reference`;
keras/optimizers/legacy/optimizer_v2.py, `add_slot`; v3, keras/src/optimizers/base_optimizer.py.
"""

from __future__ import annotations

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
