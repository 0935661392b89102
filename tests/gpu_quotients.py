"""All quotients and roots of bfloat16 numbers on a GPU: kernels take the short form of those that they round."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _is_nan(x):
    return x != x  # noqa: PLR0124


@triton.jit
def _quotients(numbers, left, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    a = tl.load(numbers + i).to(tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, SIDE, BLOCK):
        b = tl.load(numbers + start + tl.arange(0, BLOCK)).to(tl.float32)
        exact = tl.div_rn(a, b).to(tl.bfloat16).to(tl.float32)
        short = (a / b).to(tl.bfloat16).to(tl.float32)
        both = ~(_is_nan(exact) & _is_nan(short))
        wrong += ((exact != short) & both & (tl.abs(exact) >= 1.1754944e-38)).to(tl.int32)
    tl.store(left + i, tl.sum(wrong, 0))


@triton.jit
def _roots(numbers, left, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(numbers + at).to(tl.float32)
    exact = tl.sqrt_rn(a).to(tl.bfloat16).to(tl.float32)
    small = a < 1e-30
    root = tl.sqrt(tl.where(small, a * 16777216.0, a)) * tl.where(small, 0.000244140625, 1.0)
    short = root.to(tl.bfloat16).to(tl.float32)
    both = ~(_is_nan(exact) & _is_nan(short))
    tl.store(left + at, ((exact != short) & both).to(tl.int32))


def differing() -> tuple[int, int]:
    """Returns how many of 2**32 quotients, and of 2**16 roots, differ where a quotient isn't subnormal."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    numbers = bits.view(torch.bfloat16)
    left = torch.zeros(2**16, dtype=torch.int32, device="cuda")
    _quotients[(2**16,)](numbers, left, SIDE=2**16, BLOCK=1024)
    quotients = int(left.sum())
    _roots[(2**6,)](numbers, left, BLOCK=1024)
    return quotients, int(left.sum())
