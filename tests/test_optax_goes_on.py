"""A run of PyTorch with groups goes on in Optax by the printed lines, restored by Orbax and by Flax."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_optax_layout import grouped

from formats import save
from statekit.conversion.convert import convert, plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.tensors.tensor import Array, in_memory
from statekit.tensors.tree import nested

pytestmark = [pytest.mark.torch, pytest.mark.jax]
SHAPES = {"a.w": (4, 3), "a.b": (3,), "c.w": (3, 3), "c.b": (3,)}
MATRICES, VECTORS = ["a.w", "c.w"], ["a.b", "c.b"]
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "alike": ({}, {}, False),
    "mask": ({"weight_decay": 0.1}, {"weight_decay": 0.0}, False),
    "mask, scheduled": ({"weight_decay": 0.0}, {"weight_decay": 0.1}, True),
    "rates": ({"lr": 0.02}, {"lr": 0.003}, False),
    "rates, scheduled": ({"lr": 0.02, "betas": (0.8, 0.9)}, {"lr": 0.003, "eps": 1e-4}, True),
}
SAMPLE = [
    ("mask", "optax", "orbax"),
    ("rates, scheduled", "optax", "orbax"),
    ("rates", "statekit-jax", "orbax"),
]
ALL = [
    (case, layout, home)
    for case in CASES
    for layout in ("optax", "statekit-jax")
    for home in ("orbax", "flax")
]
TAKEN = [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.slow) for one in ALL if one not in SAMPLE)]


class Run:
    """Three updates of torch's AdamW, saved, and what comes after."""

    def __init__(self, folder: Path, settings: tuple[dict[str, Any], dict[str, Any]], scheduled: bool):
        import torch

        random = np.random.default_rng(0)
        self.grads = [
            {n: random.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(6)
        ]
        self.params = {n: torch.nn.Parameter(torch.from_numpy(g * 2)) for n, g in self.grads[0].items()}
        groups = [
            {"params": [(name, self.params[name]) for name in names], **setting}
            for names, setting in zip((MATRICES, VECTORS), settings, strict=True)
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.rates: list[list[float]] = []
        self.scheduler = (
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step) if scheduled else None
        )
        for i in range(3):
            self.step(i)
        parts: dict[str, Any] = {"model": dict(self.params), "optimizer": self.optimizer.state_dict()}
        parts["model"] = {name: value.data for name, value in self.params.items()}
        if self.scheduler is not None:
            parts["scheduler"] = self.scheduler.state_dict()
        self.file = folder / "run.pt"
        torch.save(parts, self.file)

    def step(self, i: int) -> None:
        import torch

        for name, value in self.params.items():
            value.grad = torch.from_numpy(self.grads[i][name])
        self.rates.append([group["lr"] for group in self.optimizer.param_groups])
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def values(self) -> dict[str, Array]:
        return {name: value.detach().numpy().copy() for name, value in self.params.items()}


def tree(values: Mapping[str, Array]) -> Any:
    import jax.numpy as jnp

    return nested({tuple(name.split(".")): jnp.asarray(value) for name, value in values.items()})


def gone_on(
    source: Path, target: Path, container: str, layout: str, params: Any, rates: list[float]
) -> dict[str, Any]:
    """Converts a run, runs the printed lines on blank parameters, and returns what these define."""
    import jax

    planned = plan(source, target, to=container, layout=layout)
    convert(planned)
    lines = "\n".join(resume_lines(of_plan(planned), planned.state))
    names: dict[str, Any] = {"params": jax.tree.map(lambda leaf: 0 * leaf, params)}
    for label, rate in zip(("schedule", "schedule_0", "schedule_1"), (rates[0], *rates), strict=False):
        names[label] = lambda count, base=rate: base * 0.9**count
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Orbax says that shardings aren't given
        exec(compile(lines, "to go on", "exec"), names)
    return names


@pytest.mark.parametrize(("case", "layout", "container"), TAKEN)
def test_the_printed_lines_go_on(case: str, layout: str, container: str, tmp_path: Path) -> None:
    import jax
    import optax

    *settings, scheduled = CASES[case]
    run = Run(tmp_path, (settings[0], settings[1]), scheduled)
    params = tree(run.values())
    names = gone_on(run.file, tmp_path / "out", container, layout, params, run.rates[0])
    state, optimizer = names["state"], names["optimizer"]
    assert jax.tree.structure(state) == jax.tree.structure(names["target"])
    for stored, param in zip(jax.tree.leaves(state["params"]), jax.tree.leaves(params), strict=True):
        assert np.array_equal(stored, param)
    if layout == "statekit-jax" and scheduled:
        return  # statekit.jax counts no schedule of its own: the rate of a moment stands in the lines
    moved, kept = state["params"], state["opt_state"]
    for i in range(3, 6):
        updates, kept = optimizer.update(tree(run.grads[i]), kept, moved)
        moved = optax.apply_updates(moved, updates)
        run.step(i)
    for ours, theirs in zip(jax.tree.leaves(moved), jax.tree.leaves(tree(run.values())), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-7 * max(1, float(abs(theirs).max())))


@pytest.mark.parametrize("layout", ["optax", "statekit-jax"])
@pytest.mark.parametrize("alike", [True, False])
def test_parameters_that_nothing_moved_stay_where_they_are(alike: bool, layout: str, tmp_path: Path) -> None:
    import jax
    import optax

    variant = {"optax": "optax", "statekit-jax": "torch"}[layout]
    settings = ({"weight_decay_rate": 0.1}, {"weight_decay_rate": 0.1 if alike else 0.0})
    state = grouped(*({"learning_rate": 0.1, **one} for one in settings), frozen=True)
    state = replace(state, optimizer=replace(state.optimizer, variant=variant))
    state = replace(
        state,
        slots={
            p: {n: in_memory(abs(t.read())) for n, t in tensors.items()} for p, tensors in state.slots.items()
        },
    )
    values = {path.replace("/", "."): tensor.read() for path, tensor in state.params.items()}
    names = gone_on(save(state, tmp_path / "neutral"), tmp_path / "out", "orbax", layout, tree(values), [0.1])
    restored, grads = names["state"], jax.tree.map(lambda leaf: 0 * leaf + 1, names["params"])
    updates, _ = names["optimizer"].update(grads, restored["opt_state"], restored["params"])
    moved = optax.apply_updates(restored["params"], updates)
    same = {path for path, value in values.items() if np.array_equal(moved[path], value)}
    assert same == {"still"}
