"""An optimizer that moves one vector of all parameters, one after the other: what it keeps, cut into the parameters.

    {"state": {0: {"exp_avg": (n,), "exp_avg_sq": (n,)}}, "param_groups": [{"params": [0]}]}

Source: facebookresearch/fairseq, fairseq/optim/fp16_optimizer.py, `_FP16OptimizerMixin.build_fp32_params`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from statekit.converters.layouts.pytorch.param_order import running_statistics
from statekit.converters.layouts.pytorch.parts import Parts
from statekit.state.param_names import as_named
from statekit.tensors.tensor import Shape, Tensor, apart
from statekit.tensors.views import Concatenated, Segment

_BUFFERS = ("version", "_float_tensor")
"""What fairseq's modules keep in a state_dict that is no parameter."""


def unflattened(parts: Parts, given: Sequence[str] | None) -> tuple[Parts, str]:
    """Returns the parts of a checkpoint with one record for each parameter, and a note; as they are if it isn't so.

    Args:
        parts: The checkpoint's.
        given: Names in the order of the parameters, where a user gives them.
    """
    record = _only_record(parts)
    vectors = {key: part for key, part in record.items() if isinstance(part, Tensor) and part.shape}
    shapes = {vector.shape for vector in vectors.values()}
    if len(shapes) != 1 or shapes & {tensor.shape for tensor in parts.model.values()}:
        return parts, ""
    (shape,) = shapes
    names = as_named(given, parts.model) if given else _moved(parts.model)
    sizes = [math.prod(parts.model[name].shape) for name in names if name in parts.model]
    if shape != (sum(sizes),) or len(sizes) != len(names):
        return parts, ""
    state = _cut(record, vectors, [parts.model[name].shape for name in names])
    group = {**parts.groups[0], "params": list(range(len(names))), "param_names": names}
    sentence = (
        f"The optimizer moves one vector of {shape[0]} values, as fairseq's FP16Optimizer does: the model's "
        f"{len(names)} parameters, one after the other in {'the order given' if given else 'its order'}."
    )
    return replace(parts, groups=[group], state=state), sentence


def _cut(
    record: Mapping[str, Any], vectors: Mapping[str, Tensor], shapes: Sequence[Shape]
) -> dict[int, dict[str, Any]]:
    """Returns what is kept of each parameter, by its number."""
    state: dict[int, dict[str, Any]] = {}
    start = 0
    for i, shape in enumerate(shapes):
        segments = {key: Segment(vector, start, math.prod(shape)) for key, vector in vectors.items()}
        state[i] = {**record, **{key: Concatenated((part,), shape) for key, part in segments.items()}}
        start += math.prod(shape)
    return state


def _only_record(parts: Parts) -> Mapping[str, Any]:
    """Returns what is kept of the only parameter of an optimizer; nothing where it has several."""
    indices = [index for group in parts.groups for index in group["params"]]
    is_one = len(indices) == len(parts.groups) == 1 and isinstance(indices[0], int)
    return parts.state.get(indices[0], {}) if is_one else {}


def _moved(model: Mapping[str, Tensor]) -> list[str]:
    """Returns the parameters of a model by its names: no statistics, no constants, of tied ones the first."""
    statistics = {*running_statistics(model)}
    return [
        name
        for name, tensor in apart(model).items()
        if name not in statistics and "float" in tensor.dtype.name and name.rpartition(".")[2] not in _BUFFERS
    ]
