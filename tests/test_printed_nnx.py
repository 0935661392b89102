"""Every shape in which Orbax keeps a module and an optimizer of nnx is loaded by the printed lines, and goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, of_plan, resume_lines
from statekit.tensors.tree import to_json

pytestmark = pytest.mark.jax
UPDATES = 3
JOINED = ("joined", "joined pure", "joined beside a number")
FORMS = (
    "manager", "items", "pure", "parameters alone", "beside a number", "below opt_state", "tuple", "average",
    "unmoved", "converted", "converted pure", *JOINED,
)  # fmt: skip
RULES = ("partition", "MultiSteps", "lion")
NAMED: Mapping[str, Mapping[str, Any]] = {
    "partition": {"optimizer": "adamw"},  # a state shows one link: those without a state leave nothing in nnx
    "average": {"model_key": "model"},
}
"""What the user names."""
SAMPLE = ("items", "beside a number", "converted pure", "joined", "partition")


def rule_of(kind: str) -> Any:
    import optax

    schedule = optax.linear_schedule(0.1, 0.0, 20)
    adamw = optax.adamw(schedule, weight_decay=0.1)
    rules: Mapping[str, Callable[[], Any]] = {
        "partition": lambda: optax.partition({"a": adamw, "b": optax.adamw(0.003)}, labels),
        "MultiSteps": lambda: optax.MultiSteps(adamw, 2).gradient_transformation(),
        "lion": lambda: optax.lion(0.01),
    }
    return rules.get(kind, lambda: optax.chain(optax.clip_by_global_norm(1.0), adamw))()


def labels(params: Any) -> Any:
    import jax

    return jax.tree_util.tree_map_with_path(
        lambda keys, _: "b" if "out" in jax.tree_util.keystr(keys) else "a", params
    )


def told(lines: str) -> str:
    """Returns the lines with what no file says, as the program knows it."""
    for unknown, value in (
        ('rules["b"] = optax.adamw(weight_decay=..., learning_rate=...', 'rules["b"] = optax.adamw(0.003'),
        ("optimizer = ...  # the run's own optimizer: Lion", "optimizer = optax.lion(0.01)"),
        ("learning_rate=...", "learning_rate=0.01"),
        ("weight_decay=...", "weight_decay=0.1"),
        ("every_k_schedule=...", "every_k_schedule=2"),
        ("optax.chain(...,", "optax.chain(optax.clip_by_global_norm(1.0),"),
        ("wrt=...", "wrt=nnx.LoRAParam"),
    ):
        lines = lines.replace(unknown, value)
    return lines


class Run:
    """A module with buffers and random streams, and its optimizer."""

    def __init__(self, form: str, seed: int) -> None:
        from flax import nnx

        class Net(nnx.Module):  # type: ignore[misc]
            def __init__(self, rngs: Any) -> None:
                self.dense, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
                self.drop = nnx.Dropout(0.1, rngs=rngs)
                self.out = nnx.List([nnx.Linear(3, 2, rngs=rngs)])
                if form == "unmoved":
                    self.extra = nnx.LoRA(4, 2, 3, rngs=rngs)

        self.wrt = nnx.LoRAParam if form == "unmoved" else nnx.Param
        rngs: Any = nnx.Rngs
        self.model = Net(rngs(seed))
        make = nnx.ModelAndOptimizer if form in JOINED else nnx.Optimizer
        self.optimizer = make(self.model, rule_of(form), wrt=self.wrt)

    def update(self, first: int) -> None:
        import jax
        import jax.numpy as jnp
        from flax import nnx

        for number in range(first, first + UPDATES):
            random = np.random.default_rng(number)
            grads = jax.tree.map(
                lambda leaf, random=random: jnp.asarray(random.normal(size=leaf.shape), jnp.float32),
                nnx.state(self.model, self.wrt),
            )
            model = () if isinstance(self.optimizer, nnx.ModelAndOptimizer) else (self.model,)
            self.optimizer.update(*model, grads)
            self.model.drop.rngs()

    def values(self) -> list[Any]:
        import jax
        from flax import nnx

        leaves = jax.tree.leaves((nnx.state(self.model), nnx.state(self.optimizer)))
        key = jax.dtypes.prng_key
        return [
            np.asarray(jax.random.key_data(leaf) if jax.numpy.issubdtype(leaf.dtype, key) else leaf)
            for leaf in leaves
        ]


def saved(form: str, run: Run, path: Path) -> Path:
    import orbax.checkpoint as ocp
    from flax import nnx

    pure: Any = nnx.to_pure_dict
    both_of: Any = nnx.state
    model, optimizer = nnx.state(run.model), nnx.state(run.optimizer)
    both = {"model": model, "optimizer": optimizer}
    if form in ("manager", "items"):
        args = {name: ocp.args.StandardSave(part) for name, part in both.items()}
        whole = ocp.args.Composite(**args) if form == "items" else ocp.args.StandardSave(both)
        with ocp.CheckpointManager(path) as manager:
            manager.save(UPDATES, args=whole)
            manager.wait_until_finished()
        return path
    forms: Mapping[str, Callable[[], Any]] = {
        "pure": lambda: {name: pure(part) for name, part in both.items()},
        "converted pure": lambda: {name: pure(part) for name, part in both.items()},
        "parameters alone": lambda: {**both, "model": nnx.state(run.model, nnx.Param)},
        "beside a number": lambda: {"net": model, "opt": optimizer, "epoch": 3},
        "below opt_state": lambda: {"params": model, "opt_state": optimizer},
        "tuple": lambda: both_of((run.model, run.optimizer)),
        "average": lambda: {**both, "ema": nnx.state(run.model, nnx.Param)},
        "joined": lambda: optimizer,
        "joined pure": lambda: pure(optimizer),
        "joined beside a number": lambda: {"train": optimizer, "epoch": 3},
    }
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, forms[form]() if form in forms else both)
    return path


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=() if f in SAMPLE else pytest.mark.slow) for f in (*FORMS, *RULES)]
)
def test_the_printed_block_loads_what_nnx_saved_goes_on_and_saves(form: str, tmp_path: Path) -> None:
    import optax

    run = Run(form, 0)
    run.update(0)
    path = saved(form, run, tmp_path / "run")
    if form.startswith("converted"):
        planned = plan(path, tmp_path / "again", to="orbax")
        lines = resume_lines(of_plan(planned, convert(planned).files), planned.state)
    else:
        with open_state(CheckpointRef(path, **NAMED.get(form, {}))) as opened:
            lines = resume_lines(of_checkpoint(opened), to_json(opened.state.to_json()))
    blank = Run(form, 7)
    scope = {"model": blank.model, "schedule": optax.linear_schedule(0.1, 0.0, 20)}
    scope |= {"schedule_a": scope["schedule"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Orbax says that shardings aren't given
        exec(compile(told("\n".join(lines)), "to go on", "exec"), scope)
    blank.optimizer = scope["optimizer"]
    run.update(UPDATES)
    blank.update(UPDATES)
    alone = form == "parameters alone"  # its other variables are in no file
    assert_equal(blank, run, alone)
    saved(form, blank, tmp_path / "next")
    after = CheckpointRef(tmp_path / "next", **NAMED.get(form, {}))
    with open_state(after) as opened, open_state(replace(after, path=path)) as before:
        assert opened.layout == before.layout
        assert opened.counts.updates > before.counts.updates


def assert_equal(blank: Run, run: Run, alone: bool) -> None:
    from flax import nnx

    if alone:
        left, right = (nnx.to_flat_state(nnx.state(one.model, nnx.Param)) for one in (blank, run))
        pairs = zip(left, right, strict=True)
        assert all(np.array_equal(a[1][...], b[1][...]) for a, b in pairs)
        return
    assert all(map(np.array_equal, blank.values(), run.values()))
