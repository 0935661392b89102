"""How an original ran: which roundings its device and its kernels make of one rule.

A rule is the variant's. What runs it may round at other places, or keep a number in another precision; that is an
execution, and `schemas/executions.json` has each with its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

from statekit.errors import NotFoundError
from statekit.tensors.tree import shipped_json

Rounds: TypeAlias = Literal["op_by_op", "compiled"]
"""`op_by_op` rounds every low-precision product, `compiled` keeps products in float32."""


@dataclass(frozen=True)
class Execution:
    """How an original ran.

    Attributes:
        name: Its name.
        title: What ran where.
        rounds: Which roundings of low precision it makes.
        contracts: Whether products and sums may be contracted across operations.
        rounds_added: Whether a number that is added to arrays is rounded to their dtype first.
        forms: Schema -> variant -> constants that are others than the variant's.
    """

    name: str
    title: str
    rounds: Rounds
    contracts: bool
    rounds_added: bool
    forms: Mapping[str, Mapping[str, Mapping[str, Any]]]


@cache
def executions() -> Mapping[str, Execution]:
    """Returns all executions by name."""
    return {
        name: Execution(
            name,
            entry["title"],
            entry["rounds"],
            entry["contracts"],
            entry["added_numbers"] == "rounded",
            entry["forms"],
        )
        for name, entry in shipped_json("statekit.schemas", "executions.json").items()
    }


def execution(name: str) -> Execution:
    """Returns an execution.

    Raises:
        NotFoundError: There is none of that name.

    Example:
        >>> execution("cuda_fused").rounds
        'compiled'
    """
    forms = executions()
    if name not in forms:
        raise NotFoundError("There is no such execution.", expected=", ".join(forms), found=name)
    return forms[name]


def of_torch(device: str, *, fused: bool = False, capturable: bool = False) -> str:
    """Returns the name of the execution of an optimizer of PyTorch.

    Args:
        device: The type of its parameters' device.
        fused: Whether its fused kernel runs.
        capturable: Whether its count lives on the device.
    """
    if device == "cpu":
        return "compiled" if fused else "op_by_op"
    return "cuda_fused" if fused else "cuda_capturable" if capturable else "cuda"


def of_xla(platform: str, is_compiled: bool = True) -> str:
    """Returns the name of the execution of a function of JAX; what is known of CPUs is taken for TPUs too."""
    if not is_compiled:
        return "op_by_op"
    return "gpu" if platform in ("gpu", "cuda", "rocm") else "compiled"
