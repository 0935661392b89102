"""What is left between PyTorch's AdamW and Optax' after a conversion is their own arithmetic, and it is foreseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.arrays.intervals import IntervalBackend
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.optim.run import load, mover
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, in_memory

pytestmark = [pytest.mark.torch, pytest.mark.jax]
BEFORE, MORE = 6, 20
RATE, DECAY = 0.05, 0.1
BETAS = (0.9, 0.999)
ROWS = {"dense/kernel": (8, 16), "norm/scale": (16,), "dense/bias": (16,)}
Arrays = Mapping[str, Array]
Corrections = Callable[[int], tuple[float, float]]


def gradients() -> list[dict[str, Array]]:
    rng = np.random.default_rng(5)
    sizes = {"dense/kernel": 0.1, "norm/scale": 1.0, "dense/bias": 10.0}
    return [
        {p: (sizes[p] * rng.standard_normal(shape)).astype(np.float32) for p, shape in ROWS.items()}
        for _ in range(BEFORE + MORE)
    ]


def torch_run(grads: list[dict[str, Array]], file: Path) -> dict[str, Array]:
    """Saves a run of two groups after `BEFORE` updates; returns the weights at its end."""
    import torch

    rng = np.random.default_rng(4)
    start = {p: 0.02 * rng.standard_normal(shape) + (p == "norm/scale") for p, shape in ROWS.items()}
    params = {p: torch.nn.Parameter(torch.tensor(a, dtype=torch.float32)) for p, a in start.items()}
    named = [(p.replace("/", "."), t) for p, t in params.items()]
    groups = [{"params": named[:1], "weight_decay": DECAY}, {"params": named[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    for update, grad in enumerate(grads):
        if update == BEFORE:
            torch.save({"model": dict(named), "optimizer": optimizer.state_dict()}, file)
        for path, tensor in params.items():
            tensor.grad = torch.from_numpy(grad[path])
        optimizer.step()
    return {path: tensor.detach().numpy() for path, tensor in params.items()}


class OptaxRun:
    """Optax, as the printed lines restore it."""

    def __init__(self, source: Path, target: Path) -> None:
        import jax.numpy as jnp

        planned = plan(source, target, to="flax", layout="optax", hints=Hints())
        convert(planned)
        params: dict[str, dict[str, Any]] = {}
        for path, shape in ROWS.items():
            module, name = path.split("/")
            params.setdefault(module, {})[name] = jnp.zeros(shape)
        scope: dict[str, Any] = {"params": params}
        exec("\n".join(resume_lines(of_plan(planned), planned.state)), scope)
        self._update = scope["optimizer"].update
        self._params, self._state = scope["state"]["params"], scope["state"]["opt_state"]

    def update(self, grads: Arrays) -> None:
        import jax.numpy as jnp
        import optax

        tree: dict[str, dict[str, Any]] = {}
        for path, grad in grads.items():
            module, name = path.split("/")
            tree.setdefault(module, {})[name] = jnp.asarray(grad)
        updates, self._state = self._update(tree, self._state, self._params)
        self._params = optax.apply_updates(self._params, updates)

    def arrays(self) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
        """Returns weights, and slots by path."""
        adam = self._state[0]

        def at(tree: Any, path: str) -> Array:
            module, name = path.split("/")
            return np.asarray(tree[module][name])

        slots = {path: {"m": at(adam.mu, path), "v": at(adam.nu, path)} for path in ROWS}
        return {path: at(self._params, path) for path in ROWS}, slots


def in_float32(update: int) -> tuple[float, float]:
    """Optax' 1 - beta^t."""
    import jax
    import jax.numpy as jnp

    correction = jax.jit(lambda beta, count: 1 - beta**count)
    first, second = (float(correction(beta, jnp.asarray(update, jnp.int32))) for beta in BETAS)
    return first, second


def in_float64(update: int) -> tuple[float, float]:
    """PyTorch's 1 - beta^t."""
    return 1 - BETAS[0] ** update, 1 - BETAS[1] ** update


def by_torchs_rule(
    params: Arrays,
    slots: Mapping[str, Arrays],
    grads: Arrays,
    update: int,
    corrections: Corrections,
    single: bool = False,
) -> tuple[dict[str, Array], dict[str, dict[str, Array]]]:
    """Returns weights and slots after an update of PyTorch's AdamW in float64, `single`: of float32's constants.

    Source: torch/optim/adamw.py, _single_tensor_adam.
    """
    first, second = corrections(update)
    (b1, b2), (new1, new2), rate, decay = BETAS, (1 - BETAS[0], 1 - BETAS[1]), RATE, DECAY
    if single:
        b1, b2, new1, new2, rate, decay = (float(np.float32(x)) for x in (b1, b2, new1, new2, rate, decay))
    after, moments = {}, {}
    for path, p in params.items():
        wide, g = p.astype(np.float64), grads[path].astype(np.float64)
        m = b1 * slots[path]["m"].astype(np.float64) + new1 * g
        v = b2 * slots[path]["v"].astype(np.float64) + new2 * g * g
        decayed = wide * (1 - rate * decay) if path == "dense/kernel" else wide
        after[path] = decayed - rate / first * m / (np.sqrt(v) / np.sqrt(second) + 1e-8)
        moments[path] = {"m": m, "v": v}
    return after, moments


def intervals(state: TrainState, grads: Arrays) -> Mapping[str, Any]:
    """Returns the interval of each weight that holds every rounding of Optax' rule from a state."""
    xp = IntervalBackend(sqrt_units=2.0)
    given = {path: xp.asarray(grad) for path, grad in grads.items()}
    bounds: Mapping[str, Any] = mover(xp, state, "op_by_op")(load(xp, state), given, RATE).params
    return bounds


def outside(bounds: Mapping[str, Any], after: Arrays) -> int:
    """Returns how many weights lie outside their intervals when they are rounded to float32."""
    singles = {path: value.astype(np.float32) for path, value in after.items()}
    return sum(int(((x < bounds[p].low) | (x > bounds[p].high)).sum()) for p, x in singles.items())


def test_from_pytorch_to_optax_the_state_is_exact_and_what_is_left_is_the_bias_correction(
    tmp_path: Path,
) -> None:
    grads = gradients()
    end = torch_run(grads, tmp_path / "run.pt")
    optax_run = OptaxRun(tmp_path / "run.pt", tmp_path / "checkpoint")
    excluded = {path: path != "dense/kernel" for path in ROWS}
    said = {"learning_rate": RATE, "weight_decay": DECAY, "exclude_from_weight_decay": excluded}
    params, slots = optax_run.arrays()
    with statekit.open(tmp_path / "run.pt") as source:
        for path in ROWS:
            np.testing.assert_array_equal(params[path], source.state.params[path].read())
            for name, array in slots[path].items():
                np.testing.assert_array_equal(array, source.state.slots[path][name].read())
    with statekit.open(tmp_path / "checkpoint", hparams=said) as opened:
        state = opened.state
        assert state.counts.updates == BEFORE
    exact, bent = (params, slots), (params, slots)
    by_own_corrections, rounding = 0, dict.fromkeys(ROWS, 0.0)
    for update in range(BEFORE, BEFORE + MORE):
        state = replace(
            state,
            params={p: in_memory(a, p) for p, a in params.items()},
            slots={p: {n: in_memory(a, n) for n, a in of.items()} for p, of in slots.items()},
            counts=replace(state.counts, updates=update),
        )
        now = grads[update]
        bounds = intervals(state, now)
        foreseen, _ = by_torchs_rule(params, slots, now, update + 1, in_float32, True)
        theirs, _ = by_torchs_rule(params, slots, now, update + 1, in_float64, True)
        exact = by_torchs_rule(*exact, now, update + 1, in_float64)
        bent = by_torchs_rule(*bent, now, update + 1, in_float32, True)
        optax_run.update(now)
        was, (params, slots) = params, optax_run.arrays()
        assert outside(bounds, params) == 0, "our rule of Optax isn't Optax'"
        assert outside(bounds, foreseen) == 0, "PyTorch's rule with Optax' corrections isn't Optax'"
        by_own_corrections += outside(bounds, theirs)
        for path, after in params.items():
            # Either library rounds a weight twice, and what it makes of slots by less than eight units.
            rounding[path] += 2 * float(np.spacing(np.abs(after).max()))
            rounding[path] += 8 * 2.0**-24 * float(np.abs(after - was[path]).max())
    assert by_own_corrections > MORE, "PyTorch's corrections make no difference"
    for path in ROWS:
        apart = params[path].astype(np.float64) - end[path]
        due = bent[0][path] - exact[0][path]
        assert np.abs(apart).max() > 2 * np.abs(apart - due).max()
        assert np.abs(apart - due).max() <= rounding[path]
