"""The lines that go on from a checkpoint of Optax which statekit didn't write run as they are, and go on as it does."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_driving import ALL, SAVED, Run, flat, saved

from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, resume_lines
from statekit.tensors.tree import to_json

pytestmark = pytest.mark.jax
SHAPES = {"a": (4, 3), "b": (3,), "still": (2,)}
DONE = 3


def lines_of(path: Path) -> str:
    with open_state(path) as opened:
        assert opened.checkpoint.manifest is None
        return "\n".join(resume_lines(of_checkpoint(opened), to_json(opened.state.to_json())))


def gone_on(lines: str, params: Any, **scope: Any) -> dict[str, Any]:
    """Runs the lines on blank parameters, and returns what these define."""
    import jax

    scope["params"] = jax.tree.map(lambda leaf: 0 * leaf, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Orbax says that shardings aren't given
        exec(compile(lines, "to go on", "exec"), scope)
    return scope


def made(kind: str) -> Any:
    """Returns an optimizer of Optax."""
    import jax
    import optax

    schedule = optax.linear_schedule(0.1, 0.0, 20)
    still = {name: name != "still" for name in SHAPES}

    def frozen(rule: Any) -> Any:
        masked = optax.masked(rule, still)

        def update(grads: Any, state: Any, params: Any = None) -> Any:
            kept = jax.tree.map(lambda grad, moved: grad if moved else 0 * grad, grads, still)
            return masked.update(kept, state, params)

        return optax.GradientTransformation(masked.init, update)

    static = ("dtype_momentum", "min_dim_size_to_factor", "decay_offset")
    optimizers: dict[str, Any] = {
        "constant": lambda: optax.adamw(0.1),
        "scheduled": lambda: optax.adamw(schedule),
        "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.1),
        "injected, scheduled": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
        "injected adafactor": lambda: optax.inject_hyperparams(optax.adafactor, static)(learning_rate=0.1),
        "accumulated": lambda: optax.MultiSteps(optax.adamw(schedule), 1),
        "frozen": lambda: frozen(optax.adamw(0.1)),
    }
    return optimizers[kind]()


def updated(optimizer: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    import optax

    for i in range(first, last):
        random = np.random.default_rng(i)
        grads = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("container", ["orbax", "flax"])
@pytest.mark.parametrize(
    "kind",
    [
        "constant",
        "scheduled",
        "injected",
        "injected, scheduled",
        "injected adafactor",
        "accumulated",
        "frozen",
    ],
)
def test_an_original_goes_on_by_the_lines_alone(kind: str, container: str, tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = made(kind)
    start = {
        name: jnp.asarray(np.random.default_rng(9).normal(size=shape), jnp.float32)
        for name, shape in SHAPES.items()
    }
    params, state = updated(optimizer, start, optimizer.init(start), 0, DONE)
    lines = lines_of(saved(tmp_path / "run", container, params, state))
    # What no file says is the program's: a rate that is none of the state's, how many updates make one.
    lines = lines.replace("learning_rate=...", "learning_rate=0.1").replace(
        "every_k_schedule=...", "every_k_schedule=1"
    )
    scope = gone_on(lines, params, schedule=optax.linear_schedule(0.1, 0.0, 20))
    restored = scope["state"]
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(state)
    for ours, theirs in zip(
        jax.tree.leaves(restored), jax.tree.leaves({"params": params, "opt_state": state}), strict=True
    ):
        assert np.array_equal(ours, theirs)
    due, _ = updated(optimizer, params, state, DONE, 2 * DONE)
    moved, _ = updated(scope["optimizer"], restored["params"], restored["opt_state"], DONE, 2 * DONE)
    for name in SHAPES:
        assert np.array_equal(moved[name], due[name]), name


@pytest.mark.parametrize("container", ["orbax", "flax"])
@pytest.mark.parametrize("wrapper", ["bare", "chain", "accumulated", "injected"])
def test_an_original_partition_goes_on_by_the_lines_alone(
    wrapper: str, container: str, tmp_path: Path
) -> None:
    run = Run(wrapper)
    lines = lines_of(run.save(tmp_path / "run", container))
    # What no file says is the program's.
    lines = lines.replace("momentum=...", "momentum=0.9").replace(
        "every_k_schedule=...", "every_k_schedule=2"
    )
    rates = {True: "learning_rate=1e-2", False: "learning_rate=1e-3, weight_decay=0.1"}
    for unknown, value in (
        ("parameter_scale", True),
        ("clipping_threshold", 1.0),
        ("weight_decay_rate", None),
    ):
        lines = lines.replace(f"{unknown}=...", f"{unknown}={value}")
    # A chain around it leaves the decay of optax.adamw unknown.
    lines = lines.replace("weight_decay=..., ", "")
    each = [one.replace("learning_rate=...", rates["optax.adafactor" in one]) for one in lines.splitlines()]
    lines = "\n".join(each).replace("chain(...,", "chain(optax.clip_by_global_norm(10.0),")
    assert "statekit.json" not in lines and "import statekit" in lines
    scope = gone_on(lines, run.saved[0])
    optimizer = scope["optimizer"]
    if wrapper == "accumulated":
        optimizer = optimizer.gradient_transformation()
    moved, _ = run.gone(scope["state"]["params"], scope["state"]["opt_state"], SAVED, ALL, optimizer)
    for path, leaf in flat(run.ended[0]).items():
        assert np.array_equal(flat(moved)[path], leaf), path


def test_what_lies_around_it_otherwise_is_said(tmp_path: Path) -> None:
    """A chain by names says what its links are called, and not what they are."""
    import optax

    run = Run()
    run.optimizer = optax.named_chain(("clip", optax.clip(9.0)), ("rule", run.optimizer))
    lines = lines_of(run.save(tmp_path / "run", "orbax"))
    assert "# the state lies in opt_state/rule there: put the optimizer where the run had it" in lines
