"""`make bench`: copies into another order of axes, beside NumPy's and PyTorch's in the same run.

    python tests/benchmarks/transposes.py

Gigabytes of values a second of one core's processor time, the best of some rounds in turn, so that what else runs on
the machine disturbs all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from statekit.tensors.tensor import fill

ROUNDS = 3
CASES = (
    ("uint8", (4096, 4096), (1, 0)),
    ("uint16", (4096, 4096), (1, 0)),
    ("float32", (4096, 4096), (1, 0)),
    ("float64", (4096, 4096), (1, 0)),
    ("float32", (4000, 4100), (1, 0)),
    ("float32", (8, 1024, 4096), (0, 2, 1)),
    ("float32", (1024, 32, 512), (2, 1, 0)),
    ("float32", (1024, 16, 64), (1, 2, 0)),
    ("float32", (64, 32, 128, 64), (3, 1, 2, 0)),
)
"""dtype, shape, and the order of axes."""


def seconds(work: Callable[[], object]) -> float:
    """Returns the processor time that something takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    """Prints a table."""
    torch.set_num_threads(1)
    table = Table(
        "values", "order of axes", "ours, GB/s", "NumPy", "PyTorch", "ours over NumPy", "over PyTorch"
    )
    for dtype, shape, order in CASES:
        array = (np.arange(np.prod(shape)) % 251).astype(dtype).reshape(shape)
        view, tensor = array.transpose(order), torch.from_numpy(array).permute(order)
        out, target = np.zeros(view.shape, dtype), torch.zeros(tensor.shape, dtype=tensor.dtype)
        works: tuple[Callable[[], object], ...] = (
            partial(fill, out, view),
            partial(np.copyto, out, view),
            partial(target.copy_, tensor),
        )
        taken = [[seconds(work) for work in works] for _ in range(ROUNDS)]
        ours, numpys, torchs = (array.nbytes / 1e9 / min(times) for times in zip(*taken, strict=True))
        speeds = (ours, numpys, torchs, ours / numpys, ours / torchs)
        table.add_row(f"{dtype} {list(shape)}", f"{list(order)}", *(f"{speed:.2f}" for speed in speeds))
    Console().print(table)


if __name__ == "__main__":
    main()
