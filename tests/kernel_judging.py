"""Holds generated kernels to the text of the rules: every element within the derived bound of one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from test_torch_fast import RATE, _outside, tried
from torch.utils._python_dispatch import TorchDispatchMode

from statekit.arrays.backend import backend
from statekit.optim.run import load, mover, settled_group, steps_of
from statekit.optim.steps import Scene
from statekit.tensors.tensor import Array
from statekit.testing.step_cases import Case
from statekit.torch.fast.dispatch import fast_path
from statekit.torch.kernels.grouped import DeviceScene, GroupedMove
from statekit.verify.stepping import named


class NeverWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in PyTorch
    """Forbids to look at a value, and to copy one to another device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise AssertionError("the host reads a value of the device")
        kwargs = kwargs or {}
        if (
            func is torch.ops.aten._to_copy.default
            and torch.device(kwargs.get("device") or args[0].device) != args[0].device
        ):
            raise AssertionError("a value goes to another device")
        return func(*args, **kwargs)


def outside(
    made: Case, device: str = "cpu", rate: Any = RATE, **wrong: Any
) -> tuple[int, list[tuple[str, str]]]:
    """Runs one update of a case by kernels alone.

    Args:
        made: The case.
        device: Where.
        rate: The learning rate.
        wrong: What the scene is choice instead of the truth.

    Returns:
        How many arrays kernels moved, and which of them have elements that leave the bound of the text, where the text
        itself doesn't.
    """
    xp, state, group = backend("torch"), made.state, made.state.optimizer.groups[0]
    steps, live = steps_of(state), load(xp, state)
    configs = settled_group(steps, group, state.rules, made.variant)
    params = {path: p.to(device) for path, p in live.params.items()}
    slots = {path: {n: v.to(device) for n, v in arrays.items()} for path, arrays in live.slots.items()}
    grads = {path: xp.asarray(grad).to(device) for path, grad in made.grads[0].items()}
    shared = {name: value.to(device) for name, value in live.shared[0].items()}
    scene: Scene = DeviceScene(xp, made.variant, rate, state.counts.updates)
    with torch.no_grad():
        reached, _, common = steps.prepare(scene, group, params, grads, slots, shared)
        batches: dict[Any, list[str]] = {}
        for path, param in params.items():
            move = fast_path(made.schema, made.variant, configs[path], param)
            if isinstance(move, GroupedMove):
                batches.setdefault((move, param.shape), []).append(path)
        for (move, _), paths in batches.items():
            with NeverWaits():  # type: ignore[no-untyped-call]  # its base is untyped
                move(
                    replace(scene, **wrong), [params[p] for p in paths], [reached[p] for p in paths],
                    [slots[p] for p in paths], common,
                )  # fmt: skip
    moved = [path for paths in batches.values() for path in paths]
    arrays = {(path, "param"): xp.numpy(params[path]) for path in moved}
    arrays |= {(path, name): xp.numpy(value) for path in moved for name, value in slots[path].items()}
    return len(arrays), left_bound(made, arrays)


def left_bound(made: Case, arrays: Mapping[tuple[str, str], Array]) -> list[tuple[str, str]]:
    """Returns the arrays with elements that leave the bound of the text, where the text in torch doesn't."""
    xp, state = backend("torch"), made.state
    bound = made.bound(0, "compiled", contracted=True, sqrt_units=xp.sqrt_units)
    gradients = {path: xp.asarray(grad) for path, grad in made.grads[0].items()}
    text = mover(xp, state)(load(xp, state), gradients, RATE)
    theirs = named(text.params, text.slots, text.shared)
    return [
        key
        for key, value in arrays.items()
        if _outside(np.asarray(value), bound[key]) and not _outside(xp.numpy(theirs[key]), bound[key])
    ]


def judged(
    schema: str, variant: str, changes: Mapping[str, Any], *change: Any, device: str = "cpu", **choice: Any
) -> tuple[int, list[tuple[str, str]]]:
    """Returns what `outside` does, of a random case; `change` is what is made of its gradients."""
    return outside(tried(schema, variant, changes, *change, **choice), device)
