"""Tensors that processes share: each moves its part by the kernels, and what they have summed is joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Split:
    """How processes share a tensor.

    Attributes:
        shape: Rows and columns of the whole matrix, or the length of the whole vector.
        first: Row and column at which this process' part of a matrix begins.
        group: The processes.
    """

    shape: tuple[int, ...]
    first: tuple[int, ...]
    group: Any


class Region(NamedTuple):
    """Where the parts of a sum stand in the working memory of an item: block by block.

    Attributes:
        start: Where the first begins.
        blocks: How many there are.
        length: How many numbers each has.
        op: `sum` or `max`.
    """

    start: int
    blocks: int
    length: int
    op: str


def join(work: torch.Tensor, regions: Iterable[Region], group: Any) -> None:
    """Leaves in the first block of each region what all blocks of all processes come to.

    One exchange serves all items and all sums of a stage, and another one all maxima.

    Args:
        work: The working memory, items x numbers, float32.
        regions: The regions of a stage.
        group: The processes.
    """
    regions = list(regions)
    for op, reduce in (("sum", torch.Tensor.sum), ("max", torch.Tensor.amax)):
        alike = [region for region in regions if region.op == op]
        if alike:
            totals = torch.cat([reduce(_blocks(work, region), 1) for region in alike], 1)
            _exchange(totals, op, group)
            start = 0
            for region in alike:
                _blocks(work, region)[:, 0] = totals[:, start : start + region.length]
                start += region.length


def _blocks(work: torch.Tensor, region: Region) -> torch.Tensor:
    part = work[:, region.start : region.start + region.blocks * region.length]
    return part.view(len(work), region.blocks, region.length)


def _exchange(totals: torch.Tensor, op: str, group: Any) -> None:
    from torch.distributed import ReduceOp, all_reduce

    all_reduce(totals, ReduceOp.SUM if op == "sum" else ReduceOp.MAX, group)
