"""Compiles kernels for an NVIDIA GPU that needn't be there; raises what Triton's compiler raises.

    python kernels_compiled.py [OPTIMIZER ...]    # all of them, unless some are named

`test_torch_kernels.py` runs it in a process of its own, with Triton and without TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import statekit.torch
from statekit.torch.fast import dispatch
from statekit.torch.kernels import grouped, source

TARGET = GPUTarget("cuda", 90, 32)
SHAPES = ((), (77,), (5, 7), (128, 128))
"""A block of one element, one with a rest, and full ones."""
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "LAMB": {},
    "Adafactor": {},
    "LANS": {"multi_precision": True},
    "ScaledAdam": {},
}
ARGUMENTS = {"pointers": "*i64", "scalars": "*fp32", "work": "*fp32", "sizes": "*i64"}


def compile_stages(launches: grouped.Launches, *update: Any) -> None:
    """Compiles the stages that `Launches.launch` would launch."""
    constants = {
        "SCALED": False, "ALIGNED": launches.aligned, "FILLED": launches.filled, "SPLIT": False,
        "BR": launches.tile[0], "BC": launches.tile[1], "BV": grouped.SIDE_BLOCK,
        "TILES": grouped.TILES_OF_BLOCK if launches.program.matrix else 1, "AHEAD": grouped.AHEAD,
    }  # fmt: skip
    for stage in launches.stages:
        kinds = {name: ARGUMENTS.get(name, "i32") for name in stage.arg_names}
        kinds |= dict.fromkeys(constants, "constexpr")
        places = {(stage.arg_names.index(name),): value for name, value in constants.items()}
        options = {"num_warps": grouped.WARPS, "enable_fp_fusion": False}
        triton.compile(ASTSource(stage, kinds, places), target=TARGET, options=options)


def compile_update(kind: str, options: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Compiles what an update of bfloat16 parameters launches."""
    params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
    named = [(f"p{number}", param) for number, param in enumerate(params)]
    optimizer = getattr(statekit.torch, kind)(named, lr=1e-3, foreach=True, **options)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def patches() -> Iterator[Any]:
    """Yields what lets a process without a GPU take the way of one that has it, and compile where that one launches."""
    yield patch.object(dispatch, "runs_on", lambda device: True)
    yield patch.object(grouped.Launches, "launch", compile_stages)
    yield patch.object(source, "_rounding", lambda: source.PACKED)


if __name__ == "__main__":
    with ExitStack() as stack:
        for patched in patches():
            stack.enter_context(patched)
        for kind in sys.argv[1:] or OPTIMIZERS:
            compile_update(kind, OPTIMIZERS[kind], SHAPES)
            print(kind)
