"""What a state's extra says of the run is found and named alike, whatever system wrote it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.cli.main import main
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state
from statekit.state.run import RunState, run_of

TRAINER = GOLDEN / "torch_formats/adamw_trainer/checkpoint/checkpoint-4"
LIGHTNING = GOLDEN / "torch_formats/adafactor_lightning/checkpoint/epoch=0-step=4.ckpt"
LEGACY = GOLDEN / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt"
MXNET = GOLDEN / "mxnet_lans/trainer_scheduler_unfused/checkpoint"
ICEFALL = GOLDEN / "scaled_adam/zipformer2025_bf16/checkpoint/checkpoint-4.pt"
OPTAX = GOLDEN / "optax_adafactor/adamw_bf16mu_manager_multiitem/checkpoint/run"


def run(path: Path) -> RunState:
    with open_state(path) as opened:
        return run_of(opened.state.extra)


def present(*paths: Path) -> list[Any]:
    """Returns parameters of a test for the recordings that are at hand."""
    return [path for path in paths if path.exists()]


@pytest.mark.parametrize("path", present(TRAINER, LIGHTNING, LEGACY))
def test_a_schedule_of_torch_is_known_by_its_state(path: Path) -> None:
    (schedule,) = run(path).schedules
    assert (schedule.kind, schedule.at) == ("LambdaLR", 4)
    assert schedule.parameters.keys() == {"base_lrs", "lr_lambdas"}


@pytest.mark.skipif(not MXNET.exists(), reason="the compact recordings have no schedule of MXNet")
def test_a_schedule_of_mxnet_is_an_inert_record() -> None:
    (schedule,) = run(MXNET).schedules
    assert (schedule.kind, schedule.at, schedule.parameters["factor"]) == ("FactorScheduler", None, 0.7)


@pytest.mark.skipif(not MXNET.exists(), reason="the compact recordings have no schedule of MXNet")
def test_a_schedule_of_mxnet_goes_on_at_the_updates_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: "goes on at step 2", the boundary that it passed last, after 4 updates."""
    convert = ["convert", str(MXNET), str(tmp_path / "run"), "--to", "statekit"]
    for verb in (["inspect", str(MXNET)], ["resume", str(MXNET)], convert):
        assert main(verb) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert re.findall(r"goes on at (?:its )?step (\d+)", shown) == ["4"], verb
    assert main([*convert[:2], str(tmp_path / "anew"), *convert[3:], "--schedule-step", "0"]) != 0
    assert "the schedule's own record" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        (TRAINER, {"trainer": 1, "epoch": 1, "random": 1, "schedule": 1}),
        (LIGHTNING, {"trainer": 1, "epoch": 1, "schedule": 1}),
        (ICEFALL, {"scaler": 1, "data": 1, "epoch": 1}),
        (OPTAX, {"data": 1}),
    ],
)
def test_the_parts_of_a_run_are_found_by_name(path: Path, counts: dict[str, int]) -> None:
    if not path.exists():
        pytest.skip("not among the compact recordings")
    document = run(path).to_json()
    assert {what: len(parts) for what, parts in document.items()} == counts


def test_a_trainer_is_said_by_its_plain_values() -> None:
    parts = {part.what: part for part in run(TRAINER).parts}
    assert parts["epoch"].value == 0.5 and parts["epoch"].place == "extra/torch/trainer_state/epoch"
    assert parts["trainer"].value["global_step"] == 4 and "log_history" not in parts["trainer"].value
    assert parts["random"].value is None


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"step_size": 3, "gamma": 0.1}, "StepLR"),
        ({"milestones": {2: 1}, "gamma": 0.1}, "MultiStepLR"),
        ({"gamma": 0.1}, "ExponentialLR"),
        ({"T_max": 9, "eta_min": 0.0}, "CosineAnnealingLR"),
        ({"factor": 0.3, "total_iters": 4}, "ConstantLR"),
        ({"unheard": 1}, None),
    ],
)
def test_kinds_are_told_apart(arguments: dict[str, Any], kind: str | None) -> None:
    record = {**arguments, "base_lrs": [0.1], "last_epoch": 7, "_step_count": 8, "_last_lr": [0.05]}
    (schedule,) = run_of({"torch": {"scheduler": record}}).schedules
    assert (schedule.kind, schedule.at, schedule.parameters) == (kind, 7, {**arguments, "base_lrs": [0.1]})


@pytest.mark.parametrize("parts", [5, "ab", [5], [{"gamma": 0.1}, 5], {"gamma": 0.1}])
@pytest.mark.parametrize("bounds", [None, [2], ["ab"], 3])
def test_a_row_of_schedules_may_hold_anything(parts: Any, bounds: Any) -> None:
    record = {"_schedulers": parts, "_milestones": bounds, "last_epoch": 7, "_last_lr": [0.05]}
    for bases in ({}, {"base_lrs": [0.1]}):
        (schedule,) = run_of({"torch": {"scheduler": {**record, **bases}}}).schedules
        assert schedule.kind == "SequentialLR" and all(isinstance(rates, str) for rates in schedule.rates)


def test_a_schedule_that_trainer_and_deepspeed_both_save_is_one() -> None:
    """Seen red: attest called the second one a schedule of the checkpoint that the live run lacks."""
    state = {"base_lrs": [0.1], "lr_lambdas": [None], "last_epoch": 3, "_last_lr": [0.05]}
    assert len(run_of({"torch": {"scheduler": state, "lr_scheduler": dict(state)}}).schedules) == 1
    later = {**state, "last_epoch": 4}
    assert len(run_of({"torch": {"scheduler": state, "lr_scheduler": later}}).schedules) == 2
    assert len(run_of({"torch": {"lr_schedulers": [state, dict(state)]}}).schedules) == 2


def test_eden_and_accumulation_are_found() -> None:
    extra = {
        "torch": {
            "scheduler": {"lr_batches": 7500.0, "lr_epochs": 3.5, "batch": 12, "epoch": 1, "base_lrs": [0.1]}
        },
        "optax": {"tree": {"opt_state": {"mini_step": 1, "inner": [None]}}},
        "ties": {"head/weight": "emb/weight"},
    }
    run = run_of(extra)
    assert (run.schedules[0].kind, run.schedules[0].at) == ("Eden", 12)
    assert [(part.what, part.value) for part in run.parts] == [("accumulation", 1)]
    assert run.to_json()["ties"] == {"head/weight": "emb/weight"}


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("StepLR", {"step_size": 3}),
        ("MultiStepLR", {"milestones": [2]}),
        ("ExponentialLR", {"gamma": 0.5}),
        ("CosineAnnealingLR", {"T_max": 9}),
        ("LinearLR", {}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9}),
    ],
)
def test_kinds_are_those_of_torch_itself(kind: str, arguments: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    made = getattr(torch.optim.lr_scheduler, kind)(optimizer, **arguments)
    for _ in range(3):
        optimizer.step()
        made.step()
    record = {key: value for key, value in made.state_dict().items() if key != "anneal_func"}
    (schedule,) = run_of({"torch": {"scheduler": record}}).schedules
    assert (schedule.kind, schedule.at) == (kind, 3)


def test_plans_and_inspections_say_it_and_a_target_of_another_system_still_knows(tmp_path: Path) -> None:
    work = plan(TRAINER, tmp_path / "there", to="orbax")
    meant = run(TRAINER).to_json()
    assert work.to_json()["run"] == meant and inspect(TRAINER).to_json()["run"] == meant
    convert(work)
    assert inspect(tmp_path / "there").to_json()["run"] == meant
