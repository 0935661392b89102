"""A run of Optax with a schedule never goes on at a constant rate without a word: a state has only its count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import statekit
from statekit.cli.main import main
from statekit.state.rates import Rates

pytestmark = [pytest.mark.torch, pytest.mark.jax]
CALL = "optax.warmup_cosine_decay_schedule(0.0, 1e-3, 3, 20, 1e-5)"
DONE = 5


def saved(folder: Path, kind: str) -> Path:
    """Saves a run of Optax' AdamW by Orbax."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    schedule = eval(CALL, {"optax": optax})
    optimizer: Any = {
        "scheduled": lambda: optax.adamw(schedule),
        "constant": lambda: optax.adamw(1e-3),
        "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule),
        "injected constant": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        "injected other": lambda: optax.inject_hyperparams(optax.adamw)(
            learning_rate=1e-3, b1=optax.linear_schedule(0.9, 0.8, 10)
        ),
    }[kind]()
    params = {"a": jnp.ones((4, 3)), "b": jnp.zeros((3,))}
    state = optimizer.init(params)
    for _ in range(DONE):
        updates, state = optimizer.update(jax.tree.map(lambda leaf: leaf * 0.1 + 0.01, params), state, params)
        params = optax.apply_updates(params, updates)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save((folder / "run").absolute(), {"params": params, "opt_state": state})
    checkpointer.wait_until_finished()
    return folder / "run"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["scheduled", "injected"])
def test_a_count_without_a_function_is_said_wherever_the_run_goes(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, kind)
    assert "its function is in no file, and --schedule tells it" in said(capsys, "inspect", str(run))
    for framework in ("torch", "jax"):
        out = said(capsys, "resume", str(run), "--framework", framework)
        assert "# the run's learning rate follows a schedule that is not made here" in out
        assert "=..." in out  # and the rate is asked for
    out = said(capsys, "convert", str(run), str(tmp_path / "out.pt"))
    assert "follows a schedule that is not made here" in out
    group = statekit.inspect(run).optimizer
    assert group is not None and "learning_rate" not in group.groups[0].hyperparameters
    # A rate that the user gives is that of a moment, and this is said.
    given = said(
        capsys,
        "convert",
        str(run),
        str(tmp_path / "given.pt"),
        "--hparams",
        "learning_rate=0.001",
        "--explain",
    )
    assert "0.001 is taken for the next update's, and what goes on without a schedule keeps it" in given
    assert "follows a schedule that is not made here" in given


@pytest.mark.parametrize("kind", ["scheduled", "injected"])
def test_a_function_that_is_told_goes_along(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import optax

    run = saved(tmp_path, kind)
    due = float(eval(CALL, {"optax": optax})(DONE))
    for target, to in (("out.pt", "torch"), ("own", "statekit"), ("jax", "statekit-jax-orbax")):
        out = said(capsys, "convert", str(run), str(tmp_path / target), "--to", to, "--schedule", CALL)
        assert f"learning rate {due:g}" in out and "not made here" not in out
        [schedule] = statekit.inspect(tmp_path / target).run.schedules
        rates = schedule.of_group(0)
        assert isinstance(rates, Rates) and rates.rate(DONE) == pytest.approx(due, rel=1e-6)
    assert "learning_rate=schedule" in said(capsys, "resume", str(tmp_path / "own"), "--framework", "jax")
    assert "LambdaLR(optimizer, lambda step" in said(
        capsys, "resume", str(tmp_path / "own"), "--framework", "torch"
    )


@pytest.mark.parametrize("kind", ["constant", "injected constant", "injected other"])
def test_a_rate_without_a_schedule_is_no_schedule(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, kind)
    assert statekit.inspect(run).run.schedules == ()
    out = said(capsys, "resume", str(run), "--framework", "torch", "--hparams", "learning_rate=0.001")
    assert "schedule that" not in out
