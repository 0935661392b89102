"""How slots lie on devices: each as its parameter, less the axes that it has averaged away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, Sharding

from statekit.state.schema import OptimizerSchema
from statekit.state.train_state import Axis, Rule

Fresh = Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
"""Returns fresh slots, by path and name, of parameters by path."""


def laid_out(
    fresh: Fresh, params: Mapping[str, Any], rules: Mapping[str, Rule], schema: OptimizerSchema
) -> dict[str, dict[str, Any]]:
    """Returns fresh slots, each laid out as its parameter, as far as that can be seen.

    It can be seen of arrays, and of what is traced over a mesh of explicit axes; where jit traces over automatic
    axes, the compiler decides: give it `out_shardings=state_shardings(...)`.
    """
    of_params = {
        path: named for path, param in params.items() if (named := named_sharding(param)) is not None
    }
    if not of_params:
        return fresh(params)
    shapes = jax.eval_shape(fresh, params)
    shardings = {
        path: {slot: slot_sharding(of_params.get(path), rules.get(path), schema, slot) for slot in arrays}
        for path, arrays in shapes.items()
    }
    if any(isinstance(param, jax.core.Tracer) for param in params.values()):
        return {
            path: {slot: _moved(value, shardings[path][slot]) for slot, value in arrays.items()}
            for path, arrays in fresh(params).items()
        }
    slots: dict[str, dict[str, Any]] = jax.jit(fresh, out_shardings=shardings)(dict(params))
    return slots


def _moved(value: Any, to: Sharding | None) -> Any:
    return value if to is None else jax.sharding.reshard(value, to)


def named_sharding(value: Any) -> NamedSharding | None:
    """Returns over which axes of a mesh an array, or a description of one, is laid out; None if that isn't known."""
    traced = isinstance(value, jax.core.Tracer)
    sharding = jax.typeof(value).sharding if traced else getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return None if traced and AxisType.Explicit not in sharding.mesh.axis_types else sharding


def slot_sharding(
    param: Sharding | None, rule: Rule | None, schema: OptimizerSchema, slot: str
) -> Sharding | None:
    """Returns how a slot lies, given how its parameter does; whole on every device if it hasn't the parameter's axes.

    Args:
        param: The parameter's.
        rule: How it is factored.
        schema: The optimizer's schema.
        slot: Name of the slot.
    """
    if not isinstance(param, NamedSharding):
        return param
    kind = schema.slots[slot].shape
    if kind == "parameter":
        return param
    kept: tuple[Any, ...] = ()
    if kind in ("row", "column") and rule is not None:
        gone = rule.dims(Axis.COLUMN if kind == "row" else Axis.ROW)
        axes = (*param.spec, *(None,) * (len(rule.axes) - len(param.spec)))
        kept = tuple(axis for i, axis in enumerate(axes) if i not in gone)
    return NamedSharding(param.mesh, PartitionSpec(*kept), memory_kind=param.memory_kind)


def state_shardings(init: Callable[[Any], Any], params: Any) -> Any:
    """Returns how a state lies on devices if parameters lie as they do, for `jax.jit(init, out_shardings=...)`.

    Works through Optax' wrappers, because it watches what `init` makes of a parameter's axes. What has none lies whole
    on every device.

    Args:
        init: A transformation's `init`.
        params: Arrays, or `jax.ShapeDtypeStruct`s, with NamedShardings over one mesh.
    """
    shardings = [named for leaf in jax.tree.leaves(params) if (named := named_sharding(leaf)) is not None]
    mesh = shardings[0].mesh
    explicit = AbstractMesh(
        mesh.axis_sizes, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names)
    )

    def described(leaf: Any) -> jax.ShapeDtypeStruct:
        named = named_sharding(leaf)
        spec = PartitionSpec() if named is None else named.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec))

    with jax.sharding.use_abstract_mesh(explicit):
        state = jax.eval_shape(init, jax.tree.map(described, params))

    def sharding_of(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        is_named = isinstance(leaf.sharding, NamedSharding)
        return NamedSharding(mesh, leaf.sharding.spec if is_named else PartitionSpec())

    return jax.tree.map(sharding_of, state)
