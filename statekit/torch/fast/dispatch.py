"""Fast paths: hand-written updates of many parameters at once, in place, beside the reference text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from statekit.optim.steps import Scene
from statekit.torch.fast.adafactor import fast_adafactor
from statekit.torch.fast.adamw import fast_adamw
from statekit.torch.fast.batching import Slots, Tensors
from statekit.torch.fast.lamb import fast_lamb
from statekit.torch.fast.lans import fast_lans
from statekit.torch.fast.scaled_adam import fast_scaled_adam
from statekit.torch.kernels.grouped import GroupedMove, grouped_move
from statekit.torch.kernels.sharded import ShardedMove, sharded_move
from statekit.torch.kernels.source import is_interpreted
from statekit.torch.sharding import is_sharded


class FastMove(Protocol):
    """One update of a batch of parameters, in place; held to the reference text by tests within the derived bound."""

    def __call__(self, scene: Scene, params: Tensors, grads: Tensors, slots: Slots, common: Any) -> None:
        """Moves parameters and slots. Runs under `torch.no_grad()`, without waiting for the device.

        Args:
            scene: The update. `step` counts the updates that all of the batch have had before, as an int.
            params: Parameters, each once, for which `fast_path` returned this very move; of one shape, unless it
                `is_mixed`, dtype, device.
            grads: Their gradients as `prepare` returned them, dense, and of the parameters' dtype unless it
                `takes_any_gradient`; they are read only.
            slots: Their slots by canonical name, as `init` makes them: contiguous, on the parameters' device. Written
                in place, all but an `average`.
            common: What `prepare` returned for all.
        """


def fast_path(
    schema: str,
    variant: str,
    config: Hashable,
    param: torch.Tensor,
    slots: Mapping[str, torch.Tensor] | None = None,
) -> FastMove | None:
    """Returns the fast path of one parameter, or None where the reference text has to be run.

    Cheap enough to be asked when parameters are added, not in every update. Parameters for which the same move is
    returned and whose dtypes and devices are equal may be moved by one call, if their shapes are too or `is_mixed`.

    Args:
        schema: The optimizer: `adafactor`, ...
        variant: Whose rule.
        config: What the optimizer's `settle` returned for the parameter.
        param: The parameter; other subclasses than DTensor and other layouts than strided have no fast path.
        slots: Its slots, which decide where it is a DTensor.
    """
    if schema not in FAST or param.numel() == 0:
        return None
    has_kernels = runs_on(param.device)
    if is_sharded(param):
        return sharded_move(schema, variant, config, param, slots or {}) if has_kernels else None
    move = grouped_move(schema, variant, config, param) if has_kernels else None
    return move or FAST[schema](variant, config, param)


def runs_on(device: torch.device) -> bool:
    """Tells whether kernels run on a device: a GPU that torch has Triton for, or Triton's interpreter on a CPU."""
    return _has_triton() and (is_interpreted() if device.type == "cpu" else device.type in ("cuda", "xpu"))


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def takes_any_gradient(move: FastMove) -> bool:
    """Tells whether a fast path takes gradients of another dtype than the parameter's."""
    return isinstance(move, (GroupedMove, ShardedMove))


def is_mixed(move: FastMove | None) -> bool:
    """Tells whether a fast path moves parameters of different shapes together."""
    return isinstance(move, GroupedMove) and move.is_mixed


FAST: Mapping[str, Callable[[str, Any, torch.Tensor], FastMove | None]] = {
    "adafactor": fast_adafactor,
    "adamw": fast_adamw,
    "lamb": fast_lamb,
    "lans": fast_lans,
    "scaled_adam": fast_scaled_adam,
}
"""By schema: (variant, own, param) -> the parameter's fast path."""
