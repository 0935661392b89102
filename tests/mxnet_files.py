"""Files of MXNet for tests: pickled by Python's own pickle over stand-ins with MXNet's names, and NDArray records."""

from __future__ import annotations

import contextlib
import pickle
import struct
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from statekit.tensors.tensor import Array

CODES = {"float32": 0, "float64": 1, "float16": 2, "int64": 6}
MAGIC = {1: 0xF993FAC8, 2: 0xF993FAC9, 3: 0xF993FACA}


def record(array: Array, generation: int = 3, device: tuple[int, int] = (1, 0)) -> bytes:
    """One NDArray as MXNet writes it; generation 0 is older than its magic numbers."""
    code = "I" if generation == 0 else "q"
    head = struct.pack("<I", MAGIC[generation]) if generation else b""
    head += struct.pack("<i", 0) if generation >= 2 else b""
    shape = struct.pack(f"<I{array.ndim}{code}", array.ndim, *array.shape)
    return head + shape + struct.pack("<3i", *device, CODES[array.dtype.name]) + array.tobytes()


def array_list(arrays: Mapping[str, Array], generation: int = 2) -> bytes:
    """A `.params` of MXNet's legacy mode."""
    names = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays)
    records = b"".join(record(array, generation) for array in arrays.values())
    return struct.pack("<QQQ", 0x112, 0, len(arrays)) + records + struct.pack("<Q", len(arrays)) + names


class Array_:
    """Stands for NDArray."""

    def __init__(self, raw: bytes | None) -> None:
        self.raw = raw

    def __reduce__(self) -> tuple[Any, ...]:
        raw = None if self.raw is None else bytearray(self.raw)
        return type(self), (None,), {"handle": raw}


class Plain:
    """Stands for an optimizer or a schedule."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


@contextlib.contextmanager
def mxnet(*names: str) -> Iterator[dict[str, type[Any]]]:
    """Makes classes of MXNet importable by their dotted names, as long as the block lasts."""
    made: dict[str, type[Any]] = {}
    modules: dict[str, types.ModuleType] = {}
    for name in ("mxnet.ndarray.ndarray.NDArray", *names):
        module, _, last = name.rpartition(".")
        base = Array_ if last == "NDArray" else Plain
        made[last] = type(last, (base,), {"__module__": module})
        parts = module.split(".")
        for i in range(len(parts)):
            parent = ".".join(parts[: i + 1])
            modules.setdefault(parent, types.ModuleType(parent))
        setattr(modules[module], last, made[last])
    sys.modules.update(modules)
    try:
        yield made
    finally:
        for name in modules:
            del sys.modules[name]


def counts(updates: Mapping[int, int], devices: int = 1) -> dict[str, Any]:
    """The counts that an optimizer holds, with the current device's dict in two places."""
    every = {device: dict(updates) for device in range(devices)}
    return {"_all_index_update_counts": every, "_index_update_count": every[devices - 1]}


def attributes(updates: Mapping[int, int], **changes: Any) -> dict[str, Any]:
    """All attributes of a LANS, in its order."""
    values: dict[str, Any] = {
        "rescale_grad": 1.0, "lr_scheduler": None, "lr": 0.01, "wd": 0.0, "lr_mult": {}, "wd_mult": {},
        "begin_num_update": 0, "num_update": max(updates.values(), default=0), **counts(updates), "clip_gradient": None,
        "multi_precision": False, "aggregate_num": 4, "idx2name": {}, "sym_info": (), "allow_np_array": True,
        "use_fused_step": True, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-06, "lower_bound": None,
        "upper_bound": None,
    }  # fmt: skip
    return {**values, **changes}


def states(
    slots: Mapping[Any, tuple[Any, ...]],
    optimizer: tuple[str, Mapping[str, Any]] | None = None,
    protocol: int = 4,
    generation: int = 3,
) -> bytes:
    """A `.states` as CPython pickles it: arrays, or tuples of them, by index; the optimizer by class and attributes."""
    with mxnet(*((optimizer[0],) if optimizer else ())) as classes:
        made = classes["NDArray"]

        def wrapped(part: Any) -> Any:
            if isinstance(part, tuple):
                return tuple(map(wrapped, part))
            return made(record(part, generation)) if isinstance(part, np.ndarray) else made(part)

        content: Any = {index: wrapped(tensors) for index, tensors in slots.items()}
        if optimizer is not None:
            name, attrs = optimizer
            whole = classes[name.rpartition(".")[2]]()
            whole.__dict__.update(attrs)
            content = (content, whole)
        return pickle.dumps(content, protocol=protocol)
