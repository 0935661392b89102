"""A run's learning rate is one function of the updates done, and the code for it gives the original's own rates."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules

import statekit
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.lines.rate_code import optax_code, python_code
from statekit.state.rates import Rates
from statekit.state.run import TRAINER_ARGUMENTS, run_of
from statekit.state.schedules.call_text import parse_call
from statekit.state.schedules.called import called_rates
from statekit.state.schedules.pytorch import torch_rates
from statekit.tensors.tree import Record

pytestmark = [pytest.mark.torch, pytest.mark.jax]
DONE, MORE = 7, 50
TRAINER = GOLDEN / "torch_formats/adamw_trainer/checkpoint/checkpoint-4"
MXNET = GOLDEN / "mxnet_lans/trainer_scheduler_unfused/checkpoint"
Made = Callable[[torch.optim.Optimizer], Any]

TORCH: dict[str, Made] = {
    "constant": lambda o: torch_schedules.ConstantLR(o, 0.3, 20),
    "linear": lambda o: torch_schedules.LinearLR(o, 0.1, 0.7, 30),
    "polynomial": lambda o: torch_schedules.PolynomialLR(o, 40, 1.7),
    "cosine, on beyond its end": lambda o: torch_schedules.CosineAnnealingLR(o, 23, 0.001),
    "exponential": lambda o: torch_schedules.ExponentialLR(o, 0.93),
    "step": lambda o: torch_schedules.StepLR(o, 9, 0.5),
    "multistep": lambda o: torch_schedules.MultiStepLR(o, [5, 20, 20, 31], 0.3),
    "warm-up and cosine": lambda o: torch_schedules.SequentialLR(
        o, [torch_schedules.LinearLR(o, 0.01, 1.0, 12), torch_schedules.CosineAnnealingLR(o, 60, 0.0)], [12]
    ),
    "a sequence that cuts a schedule short": lambda o: torch_schedules.SequentialLR(
        o, [torch_schedules.ConstantLR(o, 0.5, 40), torch_schedules.StepLR(o, 11, 0.5)], [10]
    ),
    "constant, of no updates": lambda o: torch_schedules.ConstantLR(o, 0.3, 0),
    "linear, of no updates": lambda o: torch_schedules.LinearLR(o, 0.1, 0.7, 0),
    "polynomial, of no updates": lambda o: torch_schedules.PolynomialLR(o, 0),
    "step, to nothing": lambda o: torch_schedules.StepLR(o, 9, 0.0),
}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "linear": {"warmup_steps": 10, "max_steps": 70},
    "cosine": {"warmup_steps": 10, "max_steps": 50},
    "constant": {"max_steps": 50},
    "constant_with_warmup": {"warmup_steps": 12, "max_steps": 50},
    "polynomial": {"warmup_steps": 3, "max_steps": 40, "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}},
    "inverse_sqrt": {"warmup_steps": 9, "max_steps": 50},
    "cosine_with_min_lr": {"warmup_steps": 9, "max_steps": 50, "lr_scheduler_kwargs": {"min_lr": 0.03}},
    "cosine_with_min_lr, a share": {"max_steps": 50, "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "cosine_warmup_with_min_lr": {
        "warmup_steps": 25,
        "max_steps": 50,
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.05},
    },
    "cosine_warmup_with_min_lr, the usual first rate": {
        "warmup_steps": 25,
        "max_steps": 50,
        "lr_scheduler_kwargs": {"min_lr": 0.01},
    },
    "cosine_with_restarts": {"warmup_steps": 5, "max_steps": 50, "lr_scheduler_kwargs": {"num_cycles": 3}},
    "warmup_stable_decay": {
        "warmup_steps": 25,
        "max_steps": 50,
        "lr_scheduler_kwargs": {"num_decay_steps": 15, "min_lr_ratio": 0.1, "decay_type": "linear"},
    },
    "warmup_stable_decay, cosines": {
        "warmup_steps": 25,
        "max_steps": 50,
        "lr_scheduler_kwargs": {"num_decay_steps": 15, "warmup_type": "cosine"},
    },
}


def optimizer() -> torch.optim.Optimizer:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.1)


def stepped(schedule: Any, times: int) -> list[list[float]]:
    """Returns the rates of updates, before each of which the schedule stood."""
    rates = []
    for _ in range(times):
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return rates


def state_of(schedule: Any) -> dict[str, Any]:
    """Returns its state as a file has it."""
    state = dict(schedule.state_dict())
    if "_schedulers" in state:
        state["_schedulers"] = [dict(one) for one in state["_schedulers"]]
    return state


def check(rates: Rates, due: list[float]) -> None:
    """Holds the canonical form, Optax' schedule and PyTorch's LambdaLR to the rates that are due."""
    import jax
    import optax

    names: dict[str, Any] = {"optax": optax, "jax": jax, "math": math}
    ours = [rates.rate(DONE + i) for i in range(len(due))]
    assert ours == pytest.approx(due, rel=1e-9, abs=1e-15)
    schedule = eval(optax_code(rates), names)
    # Optax counts and computes in float32: a rate of a difference is off by its terms' rounding.
    scale = max(map(abs, due))
    assert [float(schedule(DONE + i)) for i in range(len(due))] == pytest.approx(
        due, rel=1e-6, abs=1e-6 * scale
    )
    going_on = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    going_on.param_groups[0]["initial_lr"] = 1.0
    function = eval(python_code(rates), names)
    again = torch_schedules.LambdaLR(going_on, function, last_epoch=DONE - 1)
    assert [rate for (rate,) in stepped(again, len(due))] == pytest.approx(due, rel=1e-9, abs=1e-15)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own use of it
@pytest.mark.parametrize("name", TORCH)
def test_pytorchs_schedules_go_on_elsewhere_at_their_own_rates(name: str) -> None:
    schedule = TORCH[name](optimizer())
    stepped(schedule, DONE)
    [run_schedule] = run_of({"torch": {"scheduler": state_of(schedule)}}).schedules
    assert len(run_schedule.rates) == 2
    due = stepped(schedule, MORE)
    for group in range(2):
        rates = run_schedule.of_group(group)
        assert isinstance(rates, Rates), rates
        check(rates, [one[group] for one in due])


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_trainers_arguments_tell_its_schedule(name: str) -> None:
    from transformers.optimization import get_scheduler

    kind, arguments_of = name.partition(",")[0], TRANSFORMERS[name]
    special = {"scheduler_specific_kwargs": arguments_of.get("lr_scheduler_kwargs")}
    schedule = get_scheduler(
        kind, optimizer(), arguments_of.get("warmup_steps", 0), arguments_of["max_steps"], **special
    )
    stepped(schedule, DONE)
    arguments = {"lr_scheduler_type": kind, "learning_rate": 0.1, **arguments_of}
    extra = {"torch": {"scheduler": state_of(schedule), TRAINER_ARGUMENTS: arguments}}
    [run_schedule] = run_of(extra).schedules
    due = stepped(schedule, MORE)
    for group in range(2):
        rates = run_schedule.of_group(group)
        assert isinstance(rates, Rates), rates
        check(rates, [one[group] for one in due])


def test_trainers_arguments_without_a_kind_tell_no_schedule() -> None:
    """Seen red: KeyError, of a manifest or a file that lost `lr_scheduler_type`."""
    arguments = {"learning_rate": 0.1, "max_steps": 50}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer(), lambda step: 1.0)
    [read] = run_of({"torch": {"scheduler": state_of(schedule), TRAINER_ARGUMENTS: arguments}}).schedules
    assert isinstance(read.of_group(0), str)


def mxnet_due(kind: str, state: dict[str, Any], number: int) -> float:
    """Returns what MXNet's object gives for an update's number; its source is quoted in `mxnet_rates`."""
    if number < state["warmup_steps"]:
        part = number / state["warmup_steps"]
        return float(state["warmup_begin_lr"] + (state["warmup_final_lr"] - state["warmup_begin_lr"]) * part)
    if kind == "FactorScheduler":
        while number > state["count"] + state["step"]:
            state["count"] += state["step"]
            state["base_lr"] = max(state["base_lr"] * state["factor"], state["stop_factor_lr"])
        return float(state["base_lr"])
    if kind == "MultiFactorScheduler":
        while state["cur_step_ind"] < len(state["step"]) and number > state["step"][state["cur_step_ind"]]:
            state["cur_step_ind"] += 1
            state["base_lr"] *= state["factor"]
        return float(state["base_lr"])
    if number <= state["max_update"]:
        part = (number - state["warmup_steps"]) / state["max_steps"]
        shape = (
            (1 - part) ** state.get("power", 0)
            if kind == "PolyScheduler"
            else (1 + math.cos(math.pi * part)) / 2
        )
        state["base_lr"] = state["final_lr"] + (state["base_lr_orig"] - state["final_lr"]) * shape
    return float(state["base_lr"])


@pytest.mark.parametrize("warmup", [0, 1, 12])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("FactorScheduler", {"step": 4, "factor": 0.7, "stop_factor_lr": 1e-3, "count": 0}),
        # a factor of 1 is MXNet's default
        ("FactorScheduler", {"step": 4, "factor": 1.0, "stop_factor_lr": 1e-8, "count": 0}),
        ("MultiFactorScheduler", {"step": [6, 21, 33], "factor": 0.3, "cur_step_ind": 0, "count": 0}),
        ("PolyScheduler", {"power": 2, "max_update": 40, "final_lr": 0.001, "base_lr_orig": 0.04}),
        ("CosineScheduler", {"max_update": 40, "final_lr": 0.001, "base_lr_orig": 0.04}),
    ],
)
def test_mxnets_schedules_go_on_elsewhere_at_their_own_rates(
    kind: str, settings: dict[str, Any], warmup: int
) -> None:
    state = {
        "base_lr": 0.04,
        "warmup_steps": warmup,
        "warmup_begin_lr": 0.01,
        "warmup_final_lr": 0.04,
        **settings,
    }
    state |= {"warmup_mode": "linear", "max_steps": settings.get("max_update", 0) - warmup}
    for number in range(1, DONE + 1):
        mxnet_due(kind, state, number)
    record = Record(f"mxnet.lr_scheduler.{kind}", (), dict(state))
    [run_schedule] = run_of({"mxnet": {"attributes": {"lr_scheduler": record}}}).schedules
    rates = run_schedule.of_group(0)
    assert isinstance(rates, Rates), rates
    check(rates, [mxnet_due(kind, state, DONE + 1 + i) for i in range(MORE)])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (torch_schedules.ReduceLROnPlateau, "ReduceLROnPlateau"),
        (lambda o: torch_schedules.CosineAnnealingWarmRestarts(o, 5), "CosineAnnealingWarmRestarts"),
        (lambda o: torch_schedules.LambdaLR(o, lambda step: 0.5**step), "function is in no file"),
    ],
)
def test_what_is_no_such_function_is_named(
    make: Made, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = torch.nn.Linear(3, 2)
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = make(adamw)
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    adamw.step()
    schedule.step(*([1.0] if "Plateau" in why else []))
    state = {"model": net.state_dict(), "optimizer": adamw.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(state, tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / "out"), "--to", "orbax"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    if "Plateau" not in why:  # whose state has no base rates
        assert why in said and "next update's is" in said
    else:
        assert "learning rate as a function of the updates done" in said


def test_rates_beyond_all_numbers_stand_in_a_plan() -> None:
    rates = torch_rates("ConstantLR", {"factor": 1e10, "total_iters": 3}, 1e300, None)
    assert isinstance(rates, Rates)
    assert "inf" in json.dumps(rates.to_json(), allow_nan=False)


def test_a_schedule_that_counts_epochs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = torch.nn.Linear(3, 2)
    adamw = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch_schedules.StepLR(adamw, 3)
    for _ in range(5):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        adamw.step()
    schedule.step()
    state = {"model": net.state_dict(), "optimizer": adamw.state_dict(), "scheduler": schedule.state_dict()}
    torch.save(state, tmp_path / "run.pt")
    assert main(["convert", str(tmp_path / "run.pt"), str(tmp_path / "out"), "--to", "orbax"]) == 0
    assert "StepLR stands at 1 after 5 updates" in " ".join(capsys.readouterr().out.split())


def test_a_trainers_folder_prints_its_schedule_and_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [schedule] = statekit.inspect(TRAINER).run.schedules
    rates = schedule.of_group(0)
    assert isinstance(rates, Rates)
    recorded = torch.load(TRAINER / "scheduler.pt", weights_only=True)["_last_lr"][0]
    assert rates.rate(4) == pytest.approx(recorded, rel=1e-12)
    for target, options in (("there", ["--to", "orbax"]), ("there.pt", [])):
        assert main(["convert", str(TRAINER), str(tmp_path / target), *options]) == 0
        shown = capsys.readouterr().out
        expected = (
            f"schedule = {optax_code(rates)}" if target == "there" else "LambdaLR(optimizer, lambda step:"
        )
        assert expected in shown
        assert statekit.inspect(tmp_path / target).run.schedules[0].rates == schedule.rates
    statekit.convert(tmp_path / "there", tmp_path / "back", to="hf-trainer")
    [back] = (tmp_path / "back").glob("checkpoint-*")
    assert statekit.inspect(back).run.schedules[0].rates == schedule.rates
    assert not (back / "statekit.pt").exists() or TRAINER_ARGUMENTS not in torch.load(back / "statekit.pt")


def test_mxnets_run_goes_on_by_the_printed_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    if not MXNET.exists():
        pytest.skip("the compact recordings have no schedule of MXNet")
    due = json.loads((MXNET.parent / "meta.json").read_text())["learning_rate"]
    [schedule] = statekit.inspect(MXNET).run.schedules
    rates = schedule.of_group(0)
    assert isinstance(rates, Rates)
    assert [rates.rate(i) for i in range(4, len(due))] == pytest.approx(due[4:], rel=1e-12)
    for framework, expected in (("torch", "last_epoch=3)"), ("jax", "learning_rate=schedule)")):
        assert main(["resume", str(MXNET), "--framework", framework]) == 0
        assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    "call",
    [
        "ExponentialDecay(1, 10, 0.5)",
        "InverseTimeDecay(1, 10, 0.5)",
        "PolynomialDecay(1, 10)",
        "CosineDecay(1, 10)",
    ],
)
def test_a_keras_schedule_of_a_whole_rate_is_none_that_others_have(call: str) -> None:
    """Keras casts all its numbers to the rate's dtype: ExponentialDecay(1, 10, 0.5) is 0 from the first step on."""
    answer = called_rates(parse_call(call))
    assert isinstance(answer, str) and "whole" in answer
    assert isinstance(called_rates(parse_call(call.replace("(1,", "(1.0,"))), Rates)


@pytest.mark.parametrize("scheduled", [("g", "d"), ("d",)])
def test_a_schedule_is_shown_of_its_own_optimizer_alone(scheduled: tuple[str, ...], tmp_path: Path) -> None:
    """Two networks in one file: PyTorch writes the rate from which a schedule sets out into its optimizer's groups."""
    rates, parts = {"g": 0.001, "d": 0.05}, dict[str, Any]()
    for name, rate in rates.items():
        model = torch.nn.Linear(3, len(parts) + 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedulers = [torch_schedules.CosineAnnealingLR(optimizer, 10)] if name in scheduled else []
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        parts |= {f"net_{name}": model.state_dict(), f"opt_{name}": optimizer.state_dict()}
        parts |= {f"sched_{name}": scheduler.state_dict() for scheduler in schedulers}
    parts["scheduler"] = {"base_lrs": [[0.05]], "last_epoch": 0, "_step_count": 1}  # by no rule of PyTorch
    torch.save(parts, tmp_path / "gan.pt")
    for name, rate in rates.items():
        run = statekit.inspect(tmp_path / "gan.pt", model_key=f"net_{name}", optimizer_key=f"opt_{name}").run
        expected = [*([(rate,)] if name in scheduled else []), ([0.05],)]
        assert [schedule.bases for schedule in run.schedules] == expected


@pytest.mark.parametrize(
    "keys",
    [
        (("netG", "optimG", "schedG"), ("netD", "optimD", "schedD")),
        (("model", "optimizer", "scheduler"), ("model_1", "optimizer_1", "scheduler_1")),
    ],
    ids=["words", "numbers"],
)
def test_of_equal_rates_a_schedule_is_shown_of_its_own_network_alone(
    keys: tuple[tuple[str, str, str], ...], tmp_path: Path
) -> None:
    """Seen red: both schedules were shown of each network."""
    parts = dict[str, Any]()
    for number, (net, opt, sched) in enumerate(keys):
        model = torch.nn.Linear(3, number + 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        scheduler = torch_schedules.StepLR(optimizer, 5 + number)
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        parts |= {net: model.state_dict(), opt: optimizer.state_dict(), sched: scheduler.state_dict()}
    torch.save(parts, tmp_path / "gan.pt")
    for number, (net, opt, sched) in enumerate(keys):
        run = statekit.inspect(tmp_path / "gan.pt", model_key=net, optimizer_key=opt).run
        (schedule,) = run.schedules
        assert schedule.place.endswith(f"/{sched}") and schedule.parameters["step_size"] == 5 + number


def test_a_schedule_of_mmengine_is_named_though_its_rates_are_not_read() -> None:
    record = {"param_name": "lr", "base_values": [0.01], "_global_step": 4, "last_step": 3, "total_iters": 5}
    [schedule] = run_of({"torch": {"param_schedulers": [record, record]}}).schedules
    assert schedule.kind is None and "MMEngine" in str(schedule.of_group(0))


def of_epochs(name: str, optimizer: torch.optim.Optimizer) -> list[tuple[Any, int]]:
    """Returns schedules, and how many updates each of their steps has."""
    by_epoch = torch_schedules.StepLR(optimizer, 2)
    if name == "one":
        return [(by_epoch, 3)]
    other = torch_schedules.LinearLR(optimizer)
    if name == "chained":
        return [(torch_schedules.ChainedScheduler([other, by_epoch]), 3)]
    return [(by_epoch, 3), (other, 1)]


@pytest.mark.parametrize(
    ("name", "expected"), [("one", ["2"]), ("chained", ["2"]), ("beside one of updates", ["2", "6"])]
)
def test_a_schedule_of_epochs_goes_on_where_it_stands(
    name: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: "goes on at step 6", the optimizer's count, though it had made 2 steps."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedulers = of_epochs(name, optimizer)
    for update in range(6):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        for scheduler, length in schedulers:
            if (update + 1) % length == 0:
                scheduler.step()
    states = [scheduler.state_dict() for scheduler, _ in schedulers]
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**parts, "lr_schedulers": states}, tmp_path / "run.pt")
    for verb in (
        ["convert", str(tmp_path / "run.pt"), str(tmp_path / "next.pt")],
        ["inspect", str(tmp_path / "run.pt")],
        ["resume", str(tmp_path / "run.pt")],
    ):
        assert main(verb) == 0
        shown = " ".join(capsys.readouterr().out.split())
        phrases = re.findall(r"goe?s? on at (?:its |their )?steps? ([0-9, ]+)", shown)
        assert re.findall(r"[0-9]+", " ".join(phrases)) == expected, verb
