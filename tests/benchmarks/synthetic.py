"""Checkpoints of any size, made of noise that needs no memory: for benchmarks only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.registry import container, layout
from statekit.files.stage import staged
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, DType, Index, Shape, Tensor, index_shape, normal_index

KERNEL = "encoder/layers_{n}/mlp/wi/kernel"
"""The name of parameter n."""
MATRIX = Rule((Axis.ROW, Axis.COLUMN), "given")


@dataclass(frozen=True)
class Noise:
    """A float32 tensor of normal noise; each block is made when it is read, from the seed and its place."""

    shape: Shape
    seed: int

    @property
    def dtype(self) -> DType:
        return np.dtype(np.float32)

    @property
    def grain(self) -> Shape:
        return self.shape

    def read(self, index: Index | None = None) -> Array:
        bounds = normal_index(index, self.shape)
        rows = bounds[0] if bounds else slice(0, 1)
        width = math.prod(self.shape[1:])
        block = np.empty((rows.stop - rows.start, width), np.float32)
        for i, row in enumerate(range(rows.start, rows.stop)):
            np.random.Generator(np.random.SFC64([self.seed, row])).standard_normal(
                out=block[i], dtype=np.float32
            )
        whole = block.reshape((rows.stop - rows.start, *self.shape[1:]))
        rest = tuple(slice(s.start, s.stop) for s in bounds[1:])
        return np.ascontiguousarray(whole[(slice(None), *rest)]).reshape(index_shape(bounds))

    def to_json(self) -> dict[str, Any]:
        return {"op": "noise", "seed": self.seed, "shape": list(self.shape)}


def state(matrices: int, rows: int, columns: int) -> TrainState:
    """Returns an Adafactor state with momentum: `matrices` factored parameters of rows x columns."""
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    for i in range(matrices):
        path = KERNEL.format(n=i)
        params[path] = Noise((rows, columns), 4 * i)
        small, large = sorted((rows, columns))
        slots[path] = {
            "v_row": Noise((small,), 4 * i + 1),
            "v_col": Noise((large,), 4 * i + 2),
            "m": Noise((rows, columns), 4 * i + 3),
        }
    rule = MATRIX if rows <= columns else Rule((Axis.COLUMN, Axis.ROW), "given")
    values = {"beta1": 0.9, "dtype_momentum": "float32", "min_dim_size_to_factor": 1}
    group = Group(tuple(params), values, dict.fromkeys(values, "given"))
    return TrainState(
        params,
        slots,
        Optimizer("adafactor", "t5x", (group,)),
        Counts(1000, 1000),
        dict.fromkeys(params, rule),
    )


def moments(schema: str, variant: str, matrices: int, side: int) -> TrainState:
    """Returns a state of an optimizer that keeps `m` and `v`, of square matrices, with a variant's own settings."""
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    for i in range(matrices):
        path = KERNEL.format(n=i)
        params[path] = Noise((side, side), 3 * i)
        slots[path] = {"m": Noise((side, side), 3 * i + 1), "v": Noise((side, side), 3 * i + 2)}
    values = {**load_schema(schema).variant(variant)["defaults"], "learning_rate": 1e-3}
    group = Group(tuple(params), values, dict.fromkeys(values, "given"))
    return TrainState(params, slots, Optimizer(schema, variant, (group,)), Counts(1000, 1000))


def write_neutral(target: Path, made: TrainState) -> None:
    """Writes a state as statekit's own folder."""
    neutral = container("statekit")
    with staged(target, "folder") as stage:
        neutral.write(layout("statekit").encode(made), stage)
        stage.commit(neutral.open)


def write_t5x(target: Path, made: TrainState) -> None:
    """Writes a state as a T5X checkpoint of the legacy generation."""
    t5x = container("t5x")
    with staged(target, "folder") as stage:
        t5x.write(layout("t5x").encode(made), stage)
        stage.commit(t5x.open)
