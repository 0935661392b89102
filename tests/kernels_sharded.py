"""Kernels over DTensors, through Triton's interpreter: what processes do together is what the rule of the whole says.

`test_torch_kernels.py` runs it in processes of its own: python tests/kernels_sharded.py WORLD [all].
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch_driving import XP, resume
from torch_sharding import CASES, _judged, run_sharded

from statekit.testing.step_cases import case
from statekit.torch.kernels import joining
from statekit.torch.kernels.sharded import ShardedMove

BY_TEXT: dict[tuple[str, str], str] = {}
