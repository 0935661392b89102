"""T5X's schedule is known from a run's gin file, and goes on elsewhere at its own rates."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import statekit
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.converters.formats.hparams import read_gin_call
from statekit.lines.rate_code import optax_code, python_code
from statekit.state.rates import Rates, Told
from statekit.state.schedules.called import called_rates

RUN = GOLDEN / "t5x/momentum_f32/checkpoint"
TABLE = json.loads((Path(__file__).parent / "t5x_rates.json").read_text())
"""What the original gives; recorded there."""
PRETRAIN = """
from t5x import trainer
from t5x import utils
WARMUP = 10000
trainer.Trainer:
  num_microbatches = None
  learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler:
  factors = 'constant * rsqrt_decay'
  base_learning_rate = 1.0
  warmup_steps = %WARMUP  # as T5's
"""


def t5x_rates(arguments: dict[str, Any], whole: bool = True) -> Told:
    function = "create_learning_rate_scheduler"
    return called_rates({"function": function, "arguments": arguments, "whole": whole})


def bound(arguments: dict[str, Any], updates: int, due: float) -> float:
    """Returns how far float32 is off: a few roundings, and in a cosine that of how many cycles it has made."""
    cycles = updates / arguments.get("steps_per_cycle", math.inf)
    turned = arguments.get("base_learning_rate", 0.5) * math.pi / 2 * cycles * 2**-23
    return float(2e-6 * abs(due) + turned)


@pytest.mark.jax
@pytest.mark.parametrize(
    "row", TABLE["schedules"], ids=lambda row: row["arguments"].get("factors", "its defaults")
)
def test_every_factor_gives_the_originals_rates_as_a_form_and_as_code(row: dict[str, Any]) -> None:
    import jax
    import optax

    rates = t5x_rates(row["arguments"])
    assert isinstance(rates, Rates), rates
    function = eval(python_code(rates), {"math": math})
    schedule = jax.jit(eval(optax_code(rates), {"optax": optax, "jax": jax}))
    for updates, due in zip(TABLE["updates"], row["rates"], strict=True):
        off = bound(row["arguments"], updates, due)
        assert rates.rate(updates) == pytest.approx(due, rel=0, abs=off)
        assert function(updates) == pytest.approx(rates.rate(updates), rel=1e-12)
        # Optax computes a line as a difference of its ends: it is off by their rounding.
        assert float(schedule(updates)) == pytest.approx(due, rel=0, abs=2 * off + 1e-6 * max(row["rates"]))
    assert json.loads(json.dumps(rates.to_json()))[0]["begins"] == 0


@pytest.mark.parametrize(
    ("arguments", "whole", "why"),
    [
        ({"factors": "constant * exponential_decay"}, True, "'exponential_decay' isn't one of T5X's"),
        ({"factors": "constant", "peak": 3}, True, "no argument peak"),
        (
            {"factors": "constant", "base_learning_rate": "%LEARNING_RATE"},
            True,
            "base_learning_rate is '%LEARN",
        ),
        ({"base_learning_rate": 0.1}, False, "missing factors"),
        (
            {"factors": "constant * rsqrt_decay", "base_learning_rate": 1.0},
            False,
            "missing warmup_steps, step_offset",
        ),
        (
            {"factors": "rsqrt_decay", "warmup_steps": 0},
            True,
            "rsqrt_decay divides by warmup_steps, which is 0",
        ),
        ({"factors": "constant", "base_learning_rate": math.nan}, True, "base_learning_rate is nan"),
        ({"factors": "linear_decay", "min_learning_rate": -1.0}, True, "falls below 0"),
        ({"factors": 3}, True, "factors is 3"),
    ],
)
def test_what_is_not_known_is_named_and_not_guessed(arguments: dict[str, Any], whole: bool, why: str) -> None:
    said = t5x_rates(arguments, whole)
    assert isinstance(said, str) and why in said


def test_a_rate_that_grows_beyond_all_numbers_is_one() -> None:
    rates = t5x_rates({"factors": "constant * decay_every", "decay_factor": 2.0, "steps_per_decay": 1})
    assert isinstance(rates, Rates) and rates.rate(10) == 512.0 and math.isinf(rates.rate(10_000))


def call(text: str) -> Any:
    return read_gin_call(text, "x", "learning_rate_fn", "create_learning_rate_scheduler")


def test_a_gin_file_says_the_call_and_its_arguments() -> None:
    arguments = {"factors": "constant * rsqrt_decay", "base_learning_rate": 1.0, "warmup_steps": 10000}
    schedule_call = call(PRETRAIN)
    assert (schedule_call.function, schedule_call.arguments, schedule_call.whole) == (
        "create_learning_rate_scheduler",
        arguments,
        True,
    )
    assert call("trainer.Trainer.num_microbatches = 2\n") is None
    # One that includes another, or doesn't say who is called, may not be all.
    assert not call("include 'other.gin'\n" + PRETRAIN).whole
    alone = call("utils.create_learning_rate_scheduler.base_learning_rate = %RATE\n")
    assert (alone.arguments, alone.whole) == ({"base_learning_rate": "%RATE"}, False)
    assert call("Trainer.learning_rate_fn = @own.schedule()\n").function == "schedule"
    assert call("Trainer.learning_rate_fn = @own.schedule\n").function == "@own.schedule"
    assert call("MINE = @own.schedule()\nTrainer.learning_rate_fn = %MINE\n").function == "schedule"
    two = call("a/T.learning_rate_fn = @f()\nb/T.learning_rate_fn = @g()\n")
    assert (two.function, two.whole) == ("@f() or @g()", False)


def test_a_call_in_a_scope_gets_that_scopes_arguments() -> None:
    text = "T.learning_rate_fn = @tune/f()\nf.a = 1\nf.b = 1\ntune/f.b = 2\nother/f.b = 3\nother/f.c = 3\n"
    assert call(text).arguments == {"a": 1, "b": 2}
    assert call(text.replace("@tune/f", "@f")).arguments == {"a": 1, "b": 1}


def with_gin(folder: Path, text: str) -> Path:
    shutil.copytree(RUN, folder)
    (folder / "config.gin").write_text(text)
    return folder


@pytest.mark.jax
@pytest.mark.torch
def test_a_run_with_a_gin_file_prints_its_schedule_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_gin(tmp_path / "run", PRETRAIN)
    [schedule] = statekit.inspect(source).run.schedules
    rates = schedule.of_group(0)
    assert isinstance(rates, Rates) and rates.rate(4) == 0.01
    assert main(["inspect", str(source)]) == 0
    assert "over the updates done: constant, rsqrt from 10000" in capsys.readouterr().out
    for framework, expected in (
        ("torch", "LambdaLR(optimizer, lambda step: 0.01 if"),
        ("jax", "learning_rate=schedule"),
    ):
        assert main(["resume", str(source), "--framework", framework]) == 0
        assert expected in capsys.readouterr().out
    for target, to in (("there.pt", "torch"), ("there", "statekit-jax-orbax"), ("neutral", "statekit")):
        statekit.convert(source, tmp_path / target, to=to)
        assert statekit.inspect(tmp_path / target).run.schedules == (schedule,)
    statekit.convert(tmp_path / "there.pt", tmp_path / "t5x-ckpt")
    assert statekit.inspect(tmp_path / "t5x-ckpt").run.schedules == (schedule,)


def test_a_factor_that_is_not_known_is_said_where_the_schedule_would_stand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = with_gin(tmp_path / "run", PRETRAIN.replace("rsqrt_decay", "my_decay"))
    assert main(["inspect", str(source)]) == 0
    assert "the factor 'my_decay' isn't one of T5X's" in capsys.readouterr().out
