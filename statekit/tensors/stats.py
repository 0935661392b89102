"""Statistics of tensors, streamed block by block into float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from statekit.tensors.tensor import Array, Tensor, chunks

BINS = 32
"""Bins of a histogram of magnitudes, at most."""
BLOCK_BYTES = 4 * 2**20
"""Bytes of a tensor held at once, small because a block widens up to eightfold (float8 to float64)."""


@dataclass(frozen=True)
class Stats:
    """What the values of one or more tensors are like. Complex values count by their magnitude.

    Attributes:
        finite: Number of finite values; all that follows but `nans` and `infs` is about these.
        squares: Sum of their squares, in float64.
        minimum: The smallest, or None if there is none.
        maximum: The largest, or None if there is none.
        zeros: How many are zero.
        nans: Number of NaNs.
        infs: Number of infinities, of either sign.
        octaves: How many that aren't zero have a magnitude from `2**n` to below `2**(n + 1)`, by n, where there are
            any, ascending. Below float64's least normal number all count as of `2**-1023`.
    """

    finite: int = 0
    squares: float = 0.0
    minimum: float | None = None
    maximum: float | None = None
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    octaves: tuple[tuple[int, int], ...] = ()

    @property
    def norm(self) -> float:
        """The Euclidean norm."""
        return math.sqrt(self.squares)

    @property
    def rms(self) -> float | None:
        """The root of the mean square, or None without values."""
        return math.sqrt(self.squares / self.finite) if self.finite else None

    def __add__(self, other: Stats) -> Stats:
        return Stats(
            self.finite + other.finite,
            self.squares + other.squares,
            min((x for x in (self.minimum, other.minimum) if x is not None), default=None),
            max((x for x in (self.maximum, other.maximum) if x is not None), default=None),
            self.zeros + other.zeros,
            self.nans + other.nans,
            self.infs + other.infs,
            _together(self.octaves, other.octaves),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the statistics as plain data."""
        return {
            "norm": self.norm,
            "rms": self.rms,
            "min": self.minimum,
            "max": self.maximum,
            "zeros": self.zeros,
            "nan": self.nans,
            "inf": self.infs,
            "magnitudes": self.magnitudes(),
        }

    def magnitudes(self) -> dict[str, Any] | None:
        """Returns the histogram of the magnitudes that aren't zero, in at most 32 bins of equally many octaves.

        `counts[i]` is of those from `2**(from + i * octaves)` to below `2**(from + (i + 1) * octaves)`. None if all
        values are zero.
        """
        if not self.octaves:
            return None
        first, last = self.octaves[0][0], self.octaves[-1][0]
        wide = -(-(last - first + 1) // BINS)
        counts = [0] * ((last - first) // wide + 1)
        for exponent, count in self.octaves:
            counts[(exponent - first) // wide] += count
        return {"from": first, "octaves": wide, "counts": counts}


def total(parts: Iterable[Stats]) -> Stats:
    """Returns the statistics of all values together."""
    return reduce(Stats.__add__, parts, Stats())


def measure(tensor: Tensor, on_read: Callable[[int], object] = lambda nbytes: None) -> Stats:
    """Reads a tensor once, block by block, and returns its statistics.

    Args:
        tensor: What to read.
        on_read: Gets the number of bytes of each block that was read.
    """
    stats = Stats()
    for block in chunks(tensor, BLOCK_BYTES):
        stats += _of_block(block)
        on_read(block.nbytes)
    return stats


def _of_block(block: Array) -> Stats:
    values = np.abs(block).astype(np.float64) if block.dtype.kind == "c" else block.astype(np.float64)
    good = np.isfinite(values)
    finite = int(np.count_nonzero(good))
    nans = int(np.count_nonzero(np.isnan(values)))
    kept = values[good] if finite < values.size else values.ravel()
    with np.errstate(over="ignore"):  # a norm that float64 doesn't have is infinite
        squares = float(np.sum(kept * kept))
    return Stats(
        finite,
        squares,
        float(kept.min()) if finite else None,
        float(kept.max()) if finite else None,
        finite - int(np.count_nonzero(kept)),
        nans,
        values.size - finite - nans,
        _octaves(kept),
    )


def _octaves(values: Array) -> tuple[tuple[int, int], ...]:
    """Counts finite float64 values by the exponents of their bits."""
    counts = np.bincount((values.view(np.uint64) >> _FRACTION_BITS).astype(np.intp) & _EXPONENTS, minlength=1)
    counts[0] -= values.size - int(np.count_nonzero(values))
    (used,) = np.nonzero(counts)
    return tuple((int(n) - _BIAS, int(counts[n])) for n in used)


def _together(
    some: tuple[tuple[int, int], ...], others: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    if not some or not others:
        return some or others
    counts = dict(some)
    for exponent, count in others:
        counts[exponent] = counts.get(exponent, 0) + count
    return tuple(sorted(counts.items()))


_FRACTION_BITS, _EXPONENTS, _BIAS = np.uint64(52), 0x7FF, 1023
"""How float64 lies in its 64 bits. Source: IEEE 754-2019, table 3.5."""
