"""Kernels over DTensors, through Triton's interpreter: what processes do together is the rule of the whole tensor.

`test_torch_kernels.py` runs it in processes of its own: python tests/kernels_sharded.py WORLD [VARIANT ...].
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch_sharding import CASES, judged_sharded, run_sharded

from statekit.testing.step_cases import case
from statekit.torch.kernels import grouped, joining
from statekit.torch.kernels.sharded import ShardedMove

LEAST = {"adafactor": 6, "adamw": 6, "lamb": 6, "lans": 6, "scaled_adam": 6}
"""Schema -> how many parameters of a case kernels move at least; those with BATCH axes that are cut go by the text."""
PASSES = {"mxnet_unfused": 6}
"""Variant -> passes of a launch of many tensors whose sums processes join, at most; else 3.

A pass exchanges its sums once, and its maxima once. MXNet's norms that scale on the way take the largest first, then
the sum: of gradient and parameter together, of the first half of the update, of the second.
"""


def placed(mesh: Any, axis: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns what cuts a tensor along an axis, or along the first if it has no other."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def place(value: torch.Tensor) -> torch.Tensor:
        where = Shard(min(axis, value.dim() - 1)) if value.dim() else Replicate()
        return distribute_tensor(value, mesh, [*[Replicate()] * (mesh.ndim - 1), where])

    return place


def updates_by_kernels(mesh: Any, rank: int, folder: Path, variants: Sequence[str]) -> None:
    """Holds an update of every case to the derived bound, and counts who moved what."""
    faults: list[str] = []
    counts: Counter[str] = Counter()
    call, join, exchange = ShardedMove.__call__, joining.join, joining._exchange

    def moves(self: ShardedMove, scene: Any, params: Any, *others: Any) -> None:
        counts["moves"] += 1
        counts["params"] += len(params)
        call(self, scene, params, *others)

    def joins(*arguments: Any) -> None:
        counts["joins"] += 1
        join(*arguments)

    def exchanges(*arguments: Any) -> None:
        counts["exchanges"] += 1
        exchange(*arguments)

    for schema, variant, changes in CASES:
        for axis in (0, 1) if not variants or variant in variants else ():
            counts.clear()
            with (
                patch.object(ShardedMove, "__call__", moves),
                patch.object(grouped, "join", joins),
                patch.object(joining, "_exchange", exchanges),
            ):
                rows = judged_sharded(case(schema, variant, full=True, **changes), 1, placed(mesh, axis))
            faults += [f"{schema} {variant} cut along {axis}: {row}" for row in rows]
            few = (
                counts["joins"] <= PASSES.get(variant, 3) * counts["moves"]
                and counts["exchanges"] <= 2 * counts["joins"]
            )
            if counts["params"] < LEAST[schema] or not few:
                faults.append(f"{schema} {variant} cut along {axis}: {dict(counts)}")
            if rank == 0:
                print(schema, variant, axis, dict(counts), flush=True)
    if faults:
        raise AssertionError("\n".join(faults))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        run_sharded(updates_by_kernels, Path(scratch), sys.argv[2:], world=int(sys.argv[1]))
