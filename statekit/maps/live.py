"""Maps on live arrays: the parameters of a model in memory, or their gradients, under another model's names and axes.

Input: a `state_dict` of PyTorch, or a tree of JAX's or NumPy's arrays. Output: arrays of the same kind, views where
the framework makes views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from statekit.errors import StateError, UsageError
from statekit.maps.along_axis import Concatenate, Reorder, Split
from statekit.maps.links import Link
from statekit.maps.operations import Merge, Operation, Part, Permute, Stack, Unstack
from statekit.maps.scale import Scale
from statekit.maps.sizes import Factor, KeepFirst, Recast, Replicate, Resize
from statekit.tensors.tensor import DTYPES

Tree = Mapping[str, Any]


def flat(tree: Tree) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Returns a tree's arrays by path, and what gives others the names that it has: nested, with dots or with slashes.

    Raises:
        UsageError: Two arrays have one path, or something in the tree is no array.
    """
    is_nested = any(isinstance(part, Mapping) for part in tree.values())
    has_dots = not is_nested and not any("/" in str(name) for name in tree)
    arrays: dict[str, Any] = {}
    for path, array in _leaves(tree, ()):
        name = "/".join(path)
        name = name if is_nested else name.replace(".", "/")
        if name in arrays or not hasattr(array, "shape"):
            fault = "stands there twice" if name in arrays else "is no array"
            raise UsageError(f"A tree can't be mapped: {name} {fault}.", found=type(array).__name__)
        arrays[name] = _unwrapped(array)

    def named(others: Mapping[str, Any]) -> dict[str, Any]:
        if not is_nested:
            return {path.replace("/", ".") if has_dots else path: other for path, other in others.items()}
        root: dict[str, Any] = {}
        for path, other in others.items():
            *outer, last = path.split("/")
            node = root
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = other
        return root

    return arrays, named


def _unwrapped(array: Any) -> Any:
    """Returns the array itself of what holds one as its value: a variable of Flax' nnx."""
    is_variable = any(cls.__module__.startswith("flax.nnx.") for cls in type(array).__mro__)
    if not is_variable:
        return array
    return array.get_value() if hasattr(array, "get_value") else array.value


def _leaves(tree: Tree, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Any]]:
    for key, part in tree.items():
        if isinstance(part, Mapping):
            yield from _leaves(part, (*path, str(key)))
        else:
            yield (*path, str(key)), part


def apart(arrays: Mapping[str, Any], ties: Mapping[str, str]) -> dict[str, Any]:
    """Returns arrays without the further names of tied ones: those that are the same array, or share its memory."""
    tied = {
        name
        for name, tie in ties.items()
        if name in arrays and tie in arrays and _same(arrays[name], arrays[tie])
    }
    return {name: array for name, array in arrays.items() if name not in tied}


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if left.shape != right.shape or not hasattr(left, "data_ptr"):
        return False
    return bool(left.data_ptr() == right.data_ptr() and left.stride() == right.stride())


def made(arrays: Mapping[str, Any], links: Iterable[Link]) -> dict[str, Any]:
    """Returns what links make of arrays.

    Raises:
        StateError: An array hasn't the axes for it.
    """
    return {link.target: _of(link, [arrays[path] for path in link.sources]) for link in links}


def _of(link: Link, arrays: Sequence[Any]) -> Any:
    for operation in link.operations:
        try:
            if isinstance(operation, KeepFirst) and operation.axis is None:
                arrays = arrays[:: operation.count]
            elif isinstance(operation, Stack | Concatenate):
                count = operation.count or len(arrays)
                arrays = [_one(operation, arrays[i : i + count]) for i in range(0, len(arrays), count)]
            else:
                arrays = [_moved(operation, array) for array in arrays]
        except (IndexError, ValueError, RuntimeError, TypeError) as error:
            shapes = ", ".join(str(tuple(array.shape)) for array in arrays)
            raise StateError(
                f"An array can't be mapped: {operation}.", place=", ".join(link.sources), found=shapes
            ) from error
    return arrays[0]


def _one(operation: Stack | Concatenate, arrays: Sequence[Any]) -> Any:
    xp, axis = _namespace(arrays[0]), operation.axis
    if isinstance(operation, Stack):
        return xp.stack(list(arrays), axis)
    shapes = [tuple(array.shape) for array in arrays]
    of_parts = operation.runs([shape[axis] for shape in shapes])
    if of_parts is None:
        raise ValueError(f"{operation} of {shapes}")
    turns = shapes[0][axis] // of_parts[0]
    parts = [
        array.reshape((*shape[:axis], turns, run, *shape[axis + 1 :]))
        for array, shape, run in zip(arrays, shapes, of_parts, strict=True)
    ]
    return _joined(parts, axis + 1).reshape((*shapes[0][:axis], -1, *shapes[0][axis + 1 :]))


def _joined(arrays: Sequence[Any], axis: int) -> Any:
    xp = _namespace(arrays[0])
    return xp.concatenate(arrays, axis) if hasattr(xp, "concatenate") else xp.concat(arrays, axis)


def _moved(operation: Operation, array: Any) -> Any:
    shape = tuple(array.shape)
    match operation:
        case Permute(order):
            xp = _namespace(array)
            return xp.permute(array, order) if hasattr(xp, "permute") else xp.permute_dims(array, order)
        case Merge(axis, outer):
            if outer not in (None, shape[axis]):
                raise ValueError(f"{shape[axis]} along axis {axis}, not {outer}")
            return array.reshape((*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]))
        case Part(axis, outer):
            return array.reshape((*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :]))
        case Unstack(axis, place):
            return array[(slice(None),) * axis + (place,)]
        case Reorder(axis, _, order):
            apart = array.reshape((*shape[:axis], *operation.made_up(shape[axis]), *shape[axis + 1 :]))
            after = axis + len(order)
            axes = (*range(axis), *(axis + i for i in order), *range(after, len(apart.shape)))
            return _moved(Permute(axes), apart).reshape(shape)
        case Split(axis, _, place):
            of_parts = operation.runs(shape[axis])
            period, start = sum(of_parts), sum(of_parts[:place])
            apart = array.reshape((*shape[:axis], shape[axis] // period, period, *shape[axis + 1 :]))
            part = apart[(slice(None),) * (axis + 1) + (slice(start, start + of_parts[place]),)]
            return part.reshape((*shape[:axis], -1, *shape[axis + 1 :]))
    return _sized(operation, array)


def _sized(operation: Operation, array: Any) -> Any:
    shape = tuple(array.shape)
    match operation:
        case Scale():
            return array * operation.number(shape)
        case Factor():
            return array  # of the optimizer's slots alone
        case Replicate(count, axis):
            return array if axis is None else _namespace(array).stack([array] * count, axis)
        case KeepFirst(count, int(axis)):
            if shape[axis] != count:
                raise ValueError(f"{shape[axis]} along axis {axis}, not {count}")
            return array[(slice(None),) * axis + (0,)]
        case Resize(axis, before, after, new):
            if shape[axis] != before:
                raise ValueError(f"{shape[axis]} along axis {axis}, not {before}")
            if after <= before:
                return array[(slice(None),) * axis + (slice(0, after),)]
            mean = array.mean(axis, keepdims=True)
            part = mean if new == "mean" else _namespace(array).zeros_like(mean)
            return _joined([array, *[part] * (after - before)], axis)
        case Recast(_, after):
            xp = _namespace(array)
            return array.to(getattr(xp, after)) if hasattr(array, "to") else array.astype(DTYPES[after])
    raise TypeError(f"nothing is known of {operation} for live arrays")


def _namespace(array: Any) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    import torch

    return torch
