"""Kernels for a GPU, generated from the text of the rules: one launch for many tensors and each pass over memory."""

import os
from functools import cache
from importlib.util import find_spec

import torch


def runs_on(device: torch.device) -> bool:
    """Tells whether kernels run on a device: a GPU that torch has Triton for, or Triton's interpreter on a CPU."""
    runs = is_interpreted() if device.type == "cpu" else device.type in ("cuda", "xpu")
    return runs and _has_triton()


def is_interpreted() -> bool:
    """Tells whether Triton's interpreter runs kernels, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
