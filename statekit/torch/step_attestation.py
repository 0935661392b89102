"""Whether the next update of a live run in PyTorch is the one that its rule makes of the checkpoint's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import numpy as np
import torch

from statekit.arrays.backend import backend
from statekit.attestation.next_update import NextUpdate, next_update
from statekit.attestation.update import Gradient
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.by_name import path_of
from statekit.state.constants import of_torch
from statekit.tensors.tensor import Array, Index
from statekit.torch.attestation import TorchRun, live_run, only
from statekit.torch.from_checkpoint import NamedParameters
from statekit.torch.live import LiveSlice, LiveTensor
from statekit.torch.sharding import FlatPart

SQRT_UNITS = 2.0
"""How far square roots of PyTorch may be from the exact ones, in units of 2^-24 (docs/bounds.md)."""


@contextmanager
def attested_step(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | torch.nn.Module,
    path: CheckpointRef | str | PathLike[str],
    *,
    sample: int | None = 32,
    seed: int = 0,
    strict: bool = False,
    **options: Any,
) -> Iterator[NextUpdate]:
    """Compares a live run with its checkpoint, as `attest`, and then the run's next update with that of its rule.

        with statekit.torch.attested_step(optimizer, model.named_parameters(), "ckpt") as step:
            loss.backward()
            optimizer.step()
        print(step.result)

    The gradients are those that the optimizer gets: unscaled and clipped, if that is done before. Sampled parameters
    are stepped from the checkpoint's state, with its hyperparameters; what the run has made of them must lie within
    what the rule's arithmetic can return. That shows what the state can't: powers of betas that were cached before
    the count was restored, a hyperparameter that is used once before it is restored. The first update in the block
    that isn't skipped is taken. An optimizer whose rule no schema has is attested for its state alone, which is said;
    so is what a rule takes as a whole where this process has a part.

    Args:
        optimizer: As in `attest`.
        named_parameters: As in `attest`.
        path: As in `attest`.
        sample: How many parameters are stepped, drawn with `seed`; all if None. Where a rule takes the gradients of a
            group together, those of the group are. The state is compared whole.
        seed: Of the sample.
        strict: Whether to raise what is wrong, after the block.
        **options: Other arguments of `attest`.

    Raises:
        UsageError: No update was made in the block, or there are several optimizers.
        StateError: With `strict`, the state or the update isn't the checkpoint's; others as of `attest`.
    """
    run = live_run(optimizer, named_parameters, path, **options)
    only(run.optimizers, "optimizer")
    awaited = (
        "statekit.torch.attested_step",
        "a call of optimizer.step() that isn't skipped",
        "call it in the block; a loss scaler skips updates whose gradients aren't finite: try the next",
    )
    with (
        next_update(run.run, path, sample=sample, seed=seed, strict=strict, awaited=awaited) as update,
        _Watch(run, update).watching(),
    ):
        yield update


class _Watch:
    """Looks at an optimizer's next update."""

    def __init__(self, run: TorchRun, update: NextUpdate) -> None:
        self._run, self._update = run, update
        self._optimizer = run.optimizers[0]
        self._params = {path_of(name): param for name, param in run.params.items()}
        self._grads: dict[str, Gradient] = {}
        self._moved: set[str] = set()
        self._depth = 0  # the step of a derived class calls that of its base, and both call the hooks

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Has the optimizer call before and after its updates."""
        hooks = (
            self._optimizer.register_step_pre_hook(self._before),
            self._optimizer.register_step_post_hook(self._after),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Takes the gradients, or wraps the closure that makes them, so that it takes them afterwards."""
        self._depth += 1
        if not self._update.is_awaited or self._depth > 1:
            return None
        closure = kwargs.get("closure") or next(
            (argument for argument in args[1:] if callable(argument)), None
        )
        if closure is None:
            self._take()
            return None

        def taking() -> Any:
            loss = closure()
            self._take()
            return loss

        kept = {name: value for name, value in kwargs.items() if name != "closure"}
        rest = [argument for argument in args[1:] if argument is not closure]
        return (args[0], *rest), {**kept, "closure": taking}

    def _take(self) -> None:
        # A fused kernel divides by the loss scale itself.
        scale = getattr(self._optimizer, "grad_scale", None)
        divisor = 1.0 if scale is None else float(scale)
        self._grads = {
            path: Gradient(_block_of(param.grad, self._run.flat.get(id(param)), index), divisor)
            for path, index in self._update.blocks.items()
            if (param := self._params[path]).grad is not None
        }
        self._moved = {path for path, param in self._params.items() if param.grad is not None}

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        skipped = getattr(optimizer, "found_inf", None)
        if not self._update.is_awaited or self._depth or (skipped is not None and float(skipped)):
            return
        units = max(SQRT_UNITS, backend("torch").sqrt_units)
        self._update.judge(self._grads, self._moved, units, execution=execution_of(optimizer))


def execution_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns as which execution PyTorch's own optimizer runs; None on a CPU, of other optimizers, and of several."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return None
    kinds = {
        of_torch(param.device.type, fused=bool(group.get("fused")), capturable=bool(group.get("capturable")))
        for group in optimizer.param_groups
        for param in group["params"]
        if param.device.type == "cuda"
    }
    return kinds.pop() if len(kinds) == 1 else None


def _block_of(grad: Any, part: FlatPart | None, index: Index) -> Array:
    """Returns a copy of a block of a gradient, which lies in what this process has."""
    if part is not None:
        return LiveSlice(grad, part, "gradient").read(index)
    return np.array(LiveTensor(grad.to_dense() if grad.is_sparse else grad, "gradient").read(index))
