"""A schedule that no file holds is told by the call that makes it, and held against what the files do say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import statekit
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.converters.formats.hparams import read_gin_schedule
from statekit.errors import UsageError
from statekit.lines.rate_code import optax_code, python_code
from statekit.state.rates import Rates
from statekit.state.schedules.call_text import parse_call
from statekit.state.schedules.called import FUNCTIONS, called_rates

pytestmark = [pytest.mark.torch, pytest.mark.jax]
TABLES = json.loads((GOLDEN / "_tables/eden_lr.json").read_text())["tables"]
EDEN = {
    "zipformer202407_clipping/checkpoint/checkpoint-7.pt": 4,
    "zipformer202305_basic/checkpoint/checkpoint-5.pt": 100,
    "zipformer2025_basic/checkpoint/checkpoint-6.pt": 5,
}
"""Recorded run -> the batches of an epoch there."""


def rates_of(text: str, base: float | None = None) -> Rates:
    rates = called_rates(parse_call(text), base)
    assert isinstance(rates, Rates), rates
    return rates


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["class"])
def test_eden_gives_icefalls_own_rates(table: dict[str, Any]) -> None:
    kind = table["class"].rpartition(".")[2]
    checked = 0
    for row in table["rows"]:
        batch, epoch = row["batch"], row["epoch"]
        arguments = {**table["args"]}
        if kind == "Eden":  # an epoch of so many batches that this batch is of this epoch
            arguments["batches_per_epoch"] = max(math.ceil(batch / (epoch + 1)), 1)
        for base, due in zip(table["base_lr"], row["lr"], strict=True):
            rates = called_rates({"function": kind, "arguments": arguments, "whole": True}, base)
            assert isinstance(rates, Rates), rates
            if batch:  # the first update is asked for batch 1
                assert rates.rate(batch - 1) == pytest.approx(due, rel=1e-12)
                assert eval(python_code(rates), {"math": math})(batch - 1) == pytest.approx(due, rel=1e-12)
                checked += 1
    assert checked == 2 * sum(row["batch"] > 0 for row in table["rows"]) > 10


@pytest.mark.parametrize("name", EDEN)
def test_a_recorded_run_of_eden_goes_on_at_its_own_rates(name: str) -> None:
    path = GOLDEN / "scaled_adam" / name
    meta = json.loads((path.parents[1] / "meta.json").read_text())
    arguments = {**meta["extra"]["scheduler"]["args"], "batches_per_epoch": EDEN[name]}
    said = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    [schedule] = statekit.inspect(path, schedule=f"Eden(optimizer, {said})").run.schedules
    assert (schedule.kind, schedule.at) == ("Eden", meta["checkpoint_step"])
    rates = schedule.of_group(0)
    assert isinstance(rates, Rates)
    due = meta["learning_rate"]
    assert [rates.rate(i) for i in range(len(due))] == pytest.approx(due, rel=1e-12)


def test_a_told_schedule_of_one_of_two_optimizers_is_held_against_its_own_groups(tmp_path: Path) -> None:
    first, second = (torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=lr) for lr in (0.1, 0.2))
    moved = torch.optim.lr_scheduler.LambdaLR(first, lambda done: 1.0)
    states = [first.state_dict(), second.state_dict()]
    for state, name in zip(states, "ab", strict=True):
        state["state"] = {
            0: {"step": torch.tensor(0.0), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        }
        state["param_groups"][0]["param_names"] = [name]
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    file = {"model": model, "optimizers": states, "scheduler": moved.state_dict()}
    torch.save(file, tmp_path / "two.pt")
    call = "get_constant_schedule(optimizer)"
    [schedule] = statekit.inspect(tmp_path / "two.pt", schedule=call).run.schedules
    assert schedule.groups == (0,) and not schedule.moves(1)
    with pytest.raises(UsageError, match=r"is 0\.1, and not 0\.0"):
        statekit.inspect(tmp_path / "two.pt", schedule="get_linear_schedule_with_warmup(optimizer, 2, 10)")


def icefall_file(folder: Path, **settings: Any) -> Path:
    """Writes a recorded run as train.py does, with its settings beside the state."""
    source = torch.load(
        GOLDEN / "scaled_adam/zipformer202407_clipping/checkpoint/checkpoint-7.pt", weights_only=False
    )
    torch.save({**source, **settings}, folder / "run.pt")
    return folder / "run.pt"


def test_what_eden_needs_is_taken_from_the_runs_settings_and_the_rest_asked_for_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = icefall_file(tmp_path, lr_batches=4.0, lr_epochs=2.0, base_lr=0.035)
    # Its rates are Eden's without a factor, so its warm-up is over; how long an epoch is, nothing tells.
    assert main(["resume", str(path), "--framework", "torch"]) == 0
    assert "Eden: missing batches_per_epoch; --schedule tells it" in capsys.readouterr().out
    assert main(["resume", str(path)]) == 0
    assert "Eden(optimizer, lr_batches=4.0, lr_epochs=2.0, warmup_batches=0" in capsys.readouterr().out
    [schedule] = statekit.inspect(path, schedule="Eden(batches_per_epoch=4)").run.schedules
    rates, due = schedule.of_group(0), meta_rates("zipformer202407_clipping")
    assert isinstance(rates, Rates)
    assert [rates.rate(i) for i in range(6, len(due))] == pytest.approx(due[6:], rel=1e-12)
    unknown = icefall_file(tmp_path)
    assert main(["resume", str(unknown), "--framework", "jax"]) == 0
    out = capsys.readouterr().out
    assert "missing lr_batches, lr_epochs, warmup_batches, warmup_start, batches_per_epoch" in out
    assert main(["resume", str(unknown)]) == 0
    assert (
        "Eden(optimizer, lr_batches=..., lr_epochs=..., warmup_batches=..., warmup_start=...)"
        in capsys.readouterr().out
    )


def meta_rates(name: str) -> list[float]:
    rates: list[float] = json.loads((GOLDEN / f"scaled_adam/{name}/meta.json").read_text())["learning_rate"]
    return rates


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("Eden(4.0, 2.0, warmup_batches=5.0, warmup_start=0.1, batches_per_epoch=7)", "group 0 has 0.0233"),
        ("Eden2(4.0, 5.0, 0.1)", "group 0 has 0.0233"),
        ("Eden(4.0, 2.0)", "missing batches_per_epoch"),
        ("Eden(4.0, 2.0, batches_per_epoch=0)", "must be more than 0"),
        ("Eden(4.0, 2.0, batches_per_epoch=1.5)", "batches_per_epoch is 1.5"),
        ("Eden(4.0, epochs=2.0)", "no argument epochs"),
        ("Eden(None, 4.0, lr_batches=2.0)", "gets an argument twice"),
        ("Noam(4.0)", "isn't a schedule that is known here"),
    ],
)
def test_a_schedule_that_is_not_the_runs_is_refused(call: str, why: str) -> None:
    path = GOLDEN / "scaled_adam/zipformer202407_clipping/checkpoint/checkpoint-7.pt"
    call = call if "None" in call or "Noam" in call else call.replace("(", "(optimizer, ", 1)
    with pytest.raises(UsageError) as caught:
        statekit.inspect(path, schedule=call)
    assert why in str(caught.value) and "--schedule" in str(caught.value)


OPTAX = {
    "constant_schedule(0.3)",
    "linear_schedule(0.1, 0.7, 30)",
    "linear_schedule(0.1, 0.7, 30, transition_begin=9)",
    "linear_schedule(0.2, 0.7, 0)",
    "polynomial_schedule(init_value=0.5, end_value=0.01, power=1.7, transition_steps=40, transition_begin=3)",
    "piecewise_constant_schedule(0.5, {5: 0.1, 20: 0.5})",
    "piecewise_constant_schedule(0.5)",
    "exponential_decay(0.5, 7, 0.8)",
    "exponential_decay(0.5, 7, 0.8, 4, True, 0.1)",
    "exponential_decay(0.5, 7, 1.2, staircase=True)",
    "cosine_decay_schedule(0.5, 33, alpha=0.1)",
    "warmup_constant_schedule(0.0, 0.4, 9)",
    "warmup_constant_schedule(0.1, 0.4, 0)",
    "warmup_cosine_decay_schedule(0.0, 1e-3, 3, 20, 1e-5)",
    "warmup_cosine_decay_schedule(0.0, 0.0, 3, 20)",
    "warmup_exponential_decay_schedule(0.0, 0.4, 9, 5, 0.9, end_value=0.2)",
    "join_schedules([optax.linear_schedule(0.0, 0.1, 10), optax.cosine_decay_schedule(0.1, 30)], [10])",
    "join_schedules([optax.constant_schedule(0.1), optax.join_schedules([optax.constant_schedule(0.2),"
    " optax.linear_schedule(0.2, 0.0, 9)], [5])], [12])",
}


@pytest.mark.parametrize("call", sorted(OPTAX))
def test_a_call_of_optax_is_what_optax_makes_of_it(call: str) -> None:
    import jax
    import optax

    text = f"optax.{call}"
    rates, original = rates_of(text), eval(text, {"optax": optax})
    again = eval(optax_code(rates), {"optax": optax, "jax": jax})
    due = [float(original(i)) for i in range(60)]
    for ours in ([rates.rate(i) for i in range(60)], [float(again(i)) for i in range(60)]):
        # Optax counts and computes in float32: a rate of a difference is off by its terms' rounding.
        assert ours == pytest.approx(due, rel=1e-6, abs=1e-6 * max(due))


@pytest.mark.parametrize(
    "call",
    [
        "get_constant_schedule(optimizer)",
        "get_constant_schedule_with_warmup(optimizer, 12)",
        "get_linear_schedule_with_warmup(optimizer, num_warmup_steps=10, num_training_steps=50)",
        "get_cosine_schedule_with_warmup(optimizer, 10, 50, num_cycles=0.3)",
        "get_polynomial_decay_schedule_with_warmup(optimizer, 3, 40, lr_end=1e-4, power=2.0)",
        "get_inverse_sqrt_schedule(optimizer, 9)",
        "get_scheduler('linear', optimizer, 5, 40)",
    ],
)
def test_a_call_of_transformers_is_what_transformers_makes_of_it(call: str) -> None:
    from transformers import optimization

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    schedule = eval(f"optimization.{call}", {"optimization": optimization, "optimizer": optimizer})
    rates = rates_of(call, 0.1)
    for updates in range(40):
        assert rates.rate(updates) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("optax.cosine_decay_schedule(0.1, 100, exponent=2.0)", "exponent isn't 1"),
        ("optax.cosine_decay_schedule(0.1)", "missing decay_steps"),
        ("optax.linear_schedule('a', 0.1, 3)", "init_value is 'a'"),
        ("optax.linear_schedule(0.1, 0.1, 3, -1)", "transition_begin is -1"),
        ("optax.exponential_decay(0.1, 3, 0.5, end_value='x')", "end_value is 'x'"),
        ("optax.piecewise_constant_schedule(0.1, {3: -0.1})", "boundaries_and_scales is"),
        ("optax.join_schedules([optax.constant_schedule(0.1)], [3])", "don't go together"),
        ("optax.join_schedules([optax.constant_schedule(0.1), 3], [3])", "is no call"),
        (
            "optax.join_schedules([optax.constant_schedule(0.1), optax.constant_schedule(1)], [-3])",
            "boundaries are",
        ),
        ("get_linear_schedule_with_warmup(optimizer, 10, 50)", "missing the rate"),
    ],
)
def test_what_a_call_does_not_say_or_nobody_else_has_is_named(call: str, why: str) -> None:
    rates = called_rates(parse_call(call))
    assert isinstance(rates, str) and why in rates


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.1",
        "schedule",
        "f(x)(y)",
        "f(*a)",
        "f(**a)",
        "f(1 + g)",
        "f(lambda: 1)",
        "f({1, 2})",
        "f(" * 500,
        "f(1",
        "__import__('os').system('true').x(b'')",
        "f({(1, 2): 3})",
        "f([x for x in y])",
    ],
)
def test_what_is_no_plain_call_is_refused_and_not_run(text: str) -> None:
    with pytest.raises(UsageError, match="isn't a call"):
        parse_call(text)


def test_a_gin_file_tells_it_too(tmp_path: Path) -> None:
    (tmp_path / "run.gin").write_text("T.learning_rate_fn = @create_learning_rate_scheduler()\n")
    assert read_gin_schedule(tmp_path / "run.gin").whole
    (tmp_path / "run.gin").write_text("x = 1\n")
    with pytest.raises(UsageError, match="says no schedule"):
        read_gin_schedule(tmp_path / "run.gin")


def test_every_function_says_what_it_needs() -> None:
    for name, function in FUNCTIONS.items():
        rates = called_rates({"function": name, "arguments": {}, "whole": False}, 0.1)
        assert isinstance(rates, Rates) == (name == "get_constant_schedule"), (name, rates)
        strange = called_rates(
            {"function": name, "arguments": dict.fromkeys(function.parameters, "x"), "whole": True}, 0.1
        )
        assert isinstance(strange, str) or name == "get_constant_schedule", name
