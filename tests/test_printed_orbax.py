"""Every shape in which Orbax keeps a run of Optax is restored by the printed lines, goes on, and is saved again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, of_plan, resume_lines
from statekit.conversion.seal import seal
from statekit.tensors.tree import to_json

pytestmark = pytest.mark.jax
UPDATES = 3
SHAPES = {"dense": {"kernel": (8, 6), "bias": (6,)}, "out": {"kernel": (6, 4)}}
LABELS = {"dense": {"kernel": "a", "bias": "a"}, "out": {"kernel": "b"}}


def tree_of(number: int) -> Any:
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(number)
    is_shape = {"is_leaf": lambda node: isinstance(node, tuple)}
    return jax.tree.map(lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32), SHAPES, **is_shape)


def rule_of(kind: str) -> Any:
    import optax

    clip, adam = optax.clip_by_global_norm(1.0), optax.adamw(0.01)
    schedule = optax.linear_schedule(0.1, 0.0, 20)
    rules: Mapping[str, Callable[[], Any]] = {
        "partition": lambda: optax.partition({"a": adam, "b": optax.adamw(0.003)}, LABELS),
        "apply_if_finite": lambda: optax.apply_if_finite(adam, 5),
        "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=0.01),
        "MultiSteps": lambda: optax.MultiSteps(adam, 2).gradient_transformation(),
        "chain": lambda: optax.chain(clip, adam),
        "chain in apply_if_finite": lambda: optax.apply_if_finite(optax.chain(clip, adam), 5),
        "chain in MultiSteps": lambda: optax.MultiSteps(optax.chain(clip, adam), 2).gradient_transformation(),
        "scheduled": lambda: optax.adamw(schedule),
        "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    }
    return rules.get(kind, lambda: adam)()


def told(lines: str) -> str:
    """Returns the lines with what no file says, as the program knows it."""
    for unknown, value in (
        ('rules["b"] = optax.adamw(learning_rate=...', 'rules["b"] = optax.adamw(learning_rate=0.003'),
        ("learning_rate=...", "learning_rate=0.01"),
        ("every_k_schedule=...", "every_k_schedule=2"),
        ("max_consecutive_errors=...", "max_consecutive_errors=5"),
        ("optax.chain(...,", "optax.chain(optax.clip_by_global_norm(1.0),"),
        ("weight_decay=...", "weight_decay=1e-4"),
    ):
        lines = lines.replace(unknown, value)
    return lines


def saved(how: str, path: Path, tree: dict[str, Any]) -> Path:
    """Saves a run by Orbax' own means; of a train state everything that it has."""
    import orbax.checkpoint as ocp

    run = {"params": tree["params"], "opt_state": tree["opt_state"]}
    if how == "bare":
        with ocp.StandardCheckpointer() as saver:
            saver.save(path, run)
        return path
    if how in ("legacy", "legacy train state"):
        ocp.PyTreeCheckpointer().save(path, run if how == "legacy" else tree)
        return path
    args = {
        "items": lambda: ocp.args.Composite(**{k: ocp.args.StandardSave(v) for k, v in run.items()}),
        "named item": lambda: ocp.args.Composite(
            state=ocp.args.StandardSave(tree), notes=ocp.args.JsonSave({"a": 1})
        ),
    }.get(how, lambda: ocp.args.StandardSave(tree))()
    with ocp.CheckpointManager(path) as manager:
        manager.save(UPDATES, args=args)
        manager.wait_until_finished()
    return path


def updated(rule: Any, params: Any, state: Any, first: int) -> tuple[Any, Any]:
    import optax

    for number in range(first, first + UPDATES):
        updates, state = rule.update(tree_of(number), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


BARE = ("bare", "legacy", "legacy train state", "manager", "items", "named item", "average", "statistics")
WRAPPED = (
    "partition", "apply_if_finite", "inject_hyperparams", "MultiSteps", "chain", "chain in apply_if_finite",
    "chain in MultiSteps", "scheduled", "adafactor",
)  # fmt: skip
SAMPLE = ("items", "named item", "average", "statistics", "partition", "chain in apply_if_finite")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.slow) for k in (*BARE, *WRAPPED)]
)
def test_the_printed_block_goes_on_and_saves(kind: str, tmp_path: Path) -> None:
    rule, params = rule_of(kind), tree_of(99)
    params, state = updated(rule, params, rule.init(params), 0)
    tree = {"step": UPDATES, "params": params, "opt_state": state}
    if kind == "average":
        tree["ema_params"] = tree_of(98)
    if kind == "statistics":
        tree["batch_stats"] = {"norm": {"mean": np.ones(3, np.float32)}}
    path = saved(kind, tmp_path / "run", tree)
    if kind in ("named item", "MultiSteps"):
        seal(path)
    with open_state(path) as opened:
        lines = resume_lines(of_checkpoint(opened), to_json(opened.state.to_json()))
    goes_on(told("\n".join(lines)), rule, params, state, tmp_path / "next")


def test_what_was_given_outweighs_what_inject_hyperparams_restores(tmp_path: Path) -> None:
    rule, params = rule_of("inject_hyperparams"), tree_of(99)
    params, state = updated(rule, params, rule.init(params), 0)
    path = saved("bare", tmp_path / "run", {"params": params, "opt_state": state})
    with open_state(path, hints=Hints({"beta1": 0.8, "learning_rate": 0.5})) as opened:
        lines = resume_lines(of_checkpoint(opened), to_json(opened.state.to_json()))
    scope: dict[str, Any] = {"params": params}
    exec("\n".join(lines), scope)
    _, restored = updated(scope["optimizer"], params, scope["state"]["opt_state"], 0)
    values = restored.hyperparams
    assert float(values["b1"]) == pytest.approx(0.8)
    assert float(values["learning_rate"]) == 0.5


@pytest.mark.parametrize("container", ["orbax", "flax"])
def test_a_train_state_that_was_converted_goes_on(container: str, tmp_path: Path) -> None:
    """Orbax refused it: 'step: Source: MISSING'."""
    rule, params = rule_of(""), tree_of(99)
    params, state = updated(rule, params, rule.init(params), 0)
    path = saved("manager", tmp_path / "run", {"step": UPDATES, "params": params, "opt_state": state})
    planned = plan(path, tmp_path / "out", to=container, layout="optax")
    report = convert(planned)
    lines = resume_lines(of_plan(planned, report.files), planned.state)
    goes_on(told("\n".join(lines)), rule, params, state, tmp_path / "next")


def goes_on(lines: str, rule: Any, params: Any, state: Any, folder: Path) -> None:
    """Runs lines on blank parameters, and holds three updates, and three after the next save, to the original's."""
    import jax
    import optax
    import orbax.checkpoint as ocp

    schedule = optax.linear_schedule(0.1, 0.0, 20)
    scope = {"params": jax.tree.map(lambda leaf: 0 * leaf, params), "schedule": schedule}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax says that shardings aren't given
        exec(compile(lines, "to go on", "exec"), scope)
    optimizer, restored = scope["optimizer"], scope["state"]
    optimizer = getattr(optimizer, "gradient_transformation", lambda: optimizer)()
    assert jax.tree.structure(restored["opt_state"]) == jax.tree.structure(state)
    mine = updated(optimizer, restored["params"], restored["opt_state"], UPDATES)
    due = updated(rule, params, state, UPDATES)
    assert all(map(np.array_equal, jax.tree.leaves(mine), jax.tree.leaves(due)))
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder, {"params": mine[0], "opt_state": mine[1]})
    blank = {"params": scope["params"], "opt_state": optimizer.init(scope["params"])}
    again = ocp.StandardCheckpointer().restore(folder, blank)
    after = updated(optimizer, again["params"], again["opt_state"], 2 * UPDATES)
    due = updated(rule, *due, 2 * UPDATES)
    assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(due)))
