"""How torchao writes the state of its AdamW and Adam: moments are tensor subclasses, `lr` a tensor.

A subclass is pickled as a call of `_rebuild_from_type_v2`, which the reader keeps as an inert record: its class, the
arguments of an empty tensor that looks like the parameter, and its parts. It is never built here.

Source: pytorch/ao torchao/optim/adam.py, `_AdamBase`, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py;
pytorch/pytorch torch/_tensor.py, `Tensor._reduce_ex_internal`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from statekit.converters.layouts.pytorch.low_bit import MOMENTS, Optimizer, Precision, without_off
from statekit.errors import Faults, StateError
from statekit.tensors.quantized import Quantized
from statekit.tensors.tensor import DType, Shape, Tensor, dtype_name, in_memory
from statekit.tensors.tree import Record
from statekit.tensors.typed import Finite, fits

PRECISIONS = {
    "torchao.optim.subclass_8bit.OptimState8bit": Precision(8, 256, any_block=True),
    "torchao.optim.subclass_4bit.OptimState4bit": Precision(4, 128, any_block=True),
    "torchao.optim.subclass_fp8.OptimStateFp8": Precision(8, 256, is_float8=True, any_block=True),
}
"""By class, with torchao's own block; Trainer makes 4 bits in blocks of 256."""
_CLASSES = {(precision.bits, precision.is_float8): name for name, precision in PRECISIONS.items()}
_EMPTY = "torch._utils._rebuild_wrapper_subclass"
_DEVICE = re.compile(r"(cpu|cuda|xpu|hpu|npu|mps|meta|privateuseone)(:\d{1,4})?")


@dataclass(frozen=True)
class Torchao:
    """The form of torchao."""

    keeps_decoupled: bool = False

    def precision_of(self, optimizer: Optimizer) -> Precision | str | None:
        """Returns the precision of a state_dict(): that of its first moment in few bits."""
        records = [record for record in optimizer["state"].values() if isinstance(record, Mapping)]
        moments = [moment for record in records for moment in record.values() if isinstance(moment, Record)]
        return next((PRECISIONS[moment.name] for moment in moments if moment.name in PRECISIONS), None)

    def is_old(self, optimizer: Optimizer) -> bool:
        """Tells whether a state_dict() is in an earlier form: there is none."""
        return False

    def plain(self, optimizer: Optimizer, place: object) -> Optimizer:
        """Returns a state_dict() with quantized tensors in the place of subclasses."""
        faults = Faults()
        state = {
            key: {
                name: _plain_moment(name, part, f"state/{key}/{name}", faults)
                for name, part in record.items()
            }
            if isinstance(record, Mapping)
            else record
            for key, record in optimizer["state"].items()
        }
        faults.check(StateError, "Moments in few bits can't be read", place=place)
        return {**optimizer, "state": state}

    def native(self, optimizer: Optimizer, dtypes: Mapping[Any, DType], is_old: bool) -> Optimizer:
        """Returns a state_dict() as torchao loads it."""
        state = {
            key: {
                name: _record_of(part, name, dtypes[key], "cpu") if isinstance(part, Quantized) else part
                for name, part in record.items()
            }
            for key, record in optimizer["state"].items()
        }
        groups = [_native_group(group) for group in optimizer["param_groups"]]
        return {**optimizer, "state": state, "param_groups": groups}


def _native_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group whose rate is a float32 tensor, which torchao asks for."""
    rate = group.get("lr")
    tensor = {"lr": in_memory(np.asarray(rate, np.float32), "lr")} if fits(rate, Finite) else {}
    return {**without_off(group), "amsgrad": False, **tensor}


def _plain_moment(name: str, part: Any, place: str, faults: Faults) -> Any:
    """Returns a moment of few bits as a quantized tensor; any other as it is."""
    if not isinstance(part, Record) or part.name not in PRECISIONS or name not in MOMENTS.values():
        return part
    parts = part.state if isinstance(part.state, Mapping) else {}
    codes, scale, levels = (parts.get(key) for key in ("codes", "scale", "qmap"))
    try:
        shape, dtype, device = _looks(part)
        if not isinstance(codes, Tensor) or not isinstance(scale, Tensor):
            raise StateError("It has no codes, or no scale.")
        block = parts.get("block_size")
        if type(block) is not int:
            raise StateError("It has no block size.")
        moment = Quantized(codes, scale, levels if isinstance(levels, Tensor) else None, shape, block)
        if math.prod(shape) % block:  # torchao keeps what a block does not divide in float32
            raise StateError(
                "Its blocks do not divide it.", found=f"{math.prod(shape)} values in blocks of {block}"
            )
        again = _record_of(moment, name, dtype, device)
        if again != part:
            raise StateError("It isn't described as torchao describes its own.", found=part.name)
    except StateError as error:
        faults.add(error.line, place)
        return part
    return moment


def _looks(part: Record) -> tuple[Shape, str, str]:
    """Returns the shape, the dtype and the device of the tensor that a subclass looks like."""
    if len(part.args) == 9:
        _, _, dtype, shape, _, _, _, device, _ = part.args
        named = isinstance(dtype, Record) and isinstance(device, Record) and len(device.args) == 1
        if named and isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape):
            where = device.args[0]
            if isinstance(where, str) and _DEVICE.fullmatch(where):
                return shape, dtype.name.removeprefix("torch."), where
    raise StateError("It isn't described as a tensor's subclass is.", found=part.name)


def _record_of(moment: Quantized, name: str, dtype: DType | str, device: str) -> Record:
    """Returns a moment as torchao pickles it."""
    precision = moment.bits, moment.levels is None
    if precision not in _CLASSES:
        raise StateError("torchao has no such precision.", found=moment.kind)
    kind, shape = _CLASSES[precision], moment.shape
    is_signed = name == MOMENTS["m"]
    state: dict[str, Any] = {"codes": moment.codes, "scale": moment.scale}
    if moment.levels is not None:
        state |= {"qmap": moment.levels, "signed": is_signed}
    if moment.bits == 4:
        state["_shape"] = shape
    state["block_size"] = moment.block
    looks = dtype if isinstance(dtype, str) else dtype_name(dtype)
    args = (
        Record(_EMPTY),
        Record(kind),
        Record(f"torch.{looks}"),
        shape,
        _strides(shape),
        0,
        Record("torch.serialization._get_layout", ("torch.strided",)),
        Record("torch.device", (device,)),
        False,
    )
    return Record(kind, args, state)


def _strides(shape: Shape) -> Shape:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
