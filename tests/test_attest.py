"""Attesting a live run in PyTorch: honest resumes pass, and each fault that people met is found by its name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attest_runs import Run, attested, loaded, made, network, saved, trained

import statekit.torch
from statekit.attestation.attest import _by_path
from statekit.errors import StateError, UsageError
from statekit.state.comparison import compare_states
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import in_memory
from statekit.torch.live import LiveSlice
from statekit.torch.sharding import FlatPart

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = trained(made())
    run.scaler.load_state_dict({**run.scaler.state_dict(), "scale": 256.0, "_growth_tracker": 3})
    return saved(run, tmp_path_factory.mktemp("run") / "run.pt")


@pytest.mark.parametrize("kind", ["adamw", "adam", "adafactor", "hf", "statekit"])
def test_an_honest_resume_passes_and_so_does_a_checkpoint_of_the_start(kind: str, tmp_path: Path) -> None:
    for updates in (0, 3):
        path = saved(trained(made(kind), updates), tmp_path / f"{updates}.pt")
        result = attested(loaded(path, made(kind)), path, strict=True)
        assert (result.passed, result.updates) == (True, updates), str(result)
        slots = 0 if not updates and kind != "statekit" else 6
        assert result.tensors >= 6 + slots, str(result)
    begun = attested(trained(loaded(path, made(kind)), 1), path)
    assert {"parameter-differs", "step", "slot-differs"} <= {one.name for one in begun.findings}, str(begun)


def state(run: Run, i: int) -> Any:
    return run.optimizer.state[list(run.model.parameters())[i]]


def moments_skipped(path: Path) -> Run:
    stored, run = torch.load(path), made()
    run.model.load_state_dict(stored["model"])
    there = run.optimizer.state_dict()  # a new optimizer has no slots: what fills them has nothing to fill
    kept = {"state": {i: stored["optimizer"]["state"][i] for i in there["state"]}}
    run.optimizer.load_state_dict({**stored["optimizer"], **kept})
    run.scheduler.load_state_dict(stored["scheduler"])
    run.scaler.load_state_dict(stored["scaler"])
    return run


def weights_only(path: Path) -> Run:
    run = made()
    run.model.load_state_dict(torch.load(path)["model"])
    return run


def optimizer_only(path: Path) -> Run:
    run, other = made(), network()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    loaded(path, run).model.load_state_dict(other.state_dict())
    return run


def rate_rewritten(path: Path) -> Run:
    run = loaded(path, made())
    run.scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.5, 1.0, 10)
    run.scheduler.load_state_dict(torch.load(path)["scheduler"])
    return run


def another_driven(path: Path) -> Run:
    run = loaded(path, made())
    run.scheduler = loaded(path, made()).scheduler
    return run


def rate_of_the_constructor(path: Path) -> Run:
    run = loaded(path, made())
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1
    return run


def decay_of_the_constructor(path: Path) -> Run:
    run = loaded(path, made())
    run.optimizer.param_groups[0]["weight_decay"] = 0.01
    return run


def groups_exchanged(path: Path) -> Run:
    run = loaded(path, made())
    first, second = run.optimizer.param_groups
    first["weight_decay"], second["weight_decay"] = second["weight_decay"], first["weight_decay"]
    return run


def rounded_moments(path: Path) -> Run:
    run = loaded(path, made())
    for slots in run.optimizer.state.values():
        slots.update({name: slots[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    return run


def rounded_model(path: Path) -> Run:
    run = made(model=network().bfloat16())
    return loaded(path, run)  # torch casts what it loads to the parameter's dtype


def step_reset(path: Path) -> Run:
    run = loaded(path, made())
    for slots in run.optimizer.state.values():
        slots["step"].fill_(1)
    return run


def one_state_missing(path: Path) -> Run:
    run = loaded(path, made())
    del run.optimizer.state[next(run.model.parameters())]
    return run


def another_parameters_state(path: Path) -> Run:
    run = loaded(path, made())
    first, second = (state(run, i) for i in (0, 2))
    for name in ("exp_avg", "exp_avg_sq"):
        first[name], second[name] = second[name], first[name]
    return run


def moments_zeroed(path: Path) -> Run:
    run = loaded(path, made())
    for slots in run.optimizer.state.values():
        slots["exp_avg"].zero_()
    return run


def half_overwritten(path: Path) -> Run:
    run = loaded(path, made())
    for slots in run.optimizer.state.values():
        half = slots["exp_avg"].flatten()
        half[: len(half) // 2] = half[len(half) // 2 :].clone()
        slots["exp_avg"] = half.reshape(slots["exp_avg"].shape)
    return run


def dummy_step(path: Path) -> Run:
    run = loaded(path, made())
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    for param in run.model.parameters():
        param.grad = torch.zeros_like(param)
    run.optimizer.step()
    run.scheduler.load_state_dict(torch.load(path)["scheduler"])
    return run


def scaler_new(path: Path) -> Run:
    run = loaded(path, made())
    run.scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    return run


def optimizer_of_a_copy(path: Path) -> Run:
    run = loaded(path, made())
    run.model = loaded(path, made()).model
    return run


def scheduler_behind(path: Path) -> Run:
    run = loaded(path, made())
    run.scheduler.last_epoch -= 1
    return run


FAULTS: dict[Callable[[Path], Run], set[str]] = {
    moments_skipped: {"optimizer-empty"},
    weights_only: {"optimizer-empty", "learning-rate", "schedule", "scaler"},
    optimizer_only: {"parameter-differs"},
    rate_rewritten: {"learning-rate"},
    another_driven: {"schedule-elsewhere"},
    rate_of_the_constructor: {"learning-rate"},
    decay_of_the_constructor: {"hyperparameter"},
    groups_exchanged: {"groups-exchanged"},
    rounded_moments: {"slot-rounded"},
    rounded_model: {"slot-rounded", "parameter-rounded"},
    step_reset: {"step"},
    one_state_missing: {"slot-missing", "step"},
    another_parameters_state: {"slot-of-another-parameter"},
    moments_zeroed: {"slot-zero"},
    half_overwritten: {"slot-differs"},
    dummy_step: {"learning-rate", "step", "slot-differs"},
    scaler_new: {"scaler"},
    optimizer_of_a_copy: {"optimizer-elsewhere"},
    scheduler_behind: {"schedule"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_by_its_name(fault: Callable[[Path], Run], checkpoint: Path) -> None:
    assert attested(loaded(checkpoint, made()), checkpoint).passed
    result = attested(fault(checkpoint), checkpoint)
    names = [one.name for one in result.findings]
    assert {*names} == FAULTS[fault] or fault is optimizer_of_a_copy, str(result)
    assert {names[0]} <= FAULTS[fault], str(result)


def test_what_is_found_is_said_as_text_as_json_and_as_an_error(checkpoint: Path) -> None:
    run = rounded_moments(checkpoint)
    result = attested(run, checkpoint)
    assert "expected: float32" in str(result)
    assert "found: bfloat16" in str(result)
    [finding] = json.loads(result.json())["findings"]
    assert finding["name"] == "slot-rounded"
    assert "slots/0/weight/m" in finding["where"]
    with pytest.raises(
        StateError, match=r"slot-rounded: .* @ slots/0/weight/m, .*expected float32, found bfloat16"
    ):
        attested(run, checkpoint, strict=True)


def test_a_scaler_that_the_checkpoint_lost_is_found_and_one_that_is_not_given_is_said(tmp_path: Path) -> None:
    run = trained(made())
    lost = saved(run, tmp_path / "lost.pt", scaler=None)
    assert [one.name for one in attested(run, lost).findings] == ["scaler"]
    path = saved(run, tmp_path / "run.pt")
    run.scaler = run.scheduler = None
    result = attested(run, path)
    assert result.passed
    assert [*result.unchecked] == [
        "the schedule: the checkpoint has it, and none was given",
        "the scaler: the checkpoint has it, and none was given",
    ]


def test_a_sample_compares_some_parameters_by_value_and_says_so(checkpoint: Path) -> None:
    run = loaded(checkpoint, made())
    whole, part = attested(run, checkpoint), attested(run, checkpoint, sample=2, seed=4)
    assert (whole.tensors, part.tensors) == (18, 6)
    assert "values of 4 of 6 parameters (sample=2)" in part.unchecked
    assert part == attested(run, checkpoint, sample=2, seed=4)
    assert "step" in {one.name for one in attested(step_reset(checkpoint), checkpoint, sample=1).findings}


def test_names_that_differ_are_given(checkpoint: Path) -> None:
    run = loaded(checkpoint, made())
    around = [(f"net.{name}", param) for name, param in run.model.named_parameters()]
    assert statekit.torch.attest(run.optimizer, around, checkpoint).passed
    pairs = [(f"{name}_of_net", param) for name, param in run.model.named_parameters()]
    result = statekit.torch.attest(run.optimizer, pairs, checkpoint)
    assert {"parameter-missing", "parameter-extra"} <= {one.name for one in result.findings}
    names = {name: name.removesuffix("_of_net") for name, _ in pairs}
    assert statekit.torch.attest(run.optimizer, pairs, checkpoint, names=names).passed


@pytest.mark.parametrize("around", ["module.", "_orig_mod.", "module._orig_mod.", "base_model.model."])
def test_what_wrappers_put_before_names_tells_no_parameters_apart(around: str, checkpoint: Path) -> None:
    run = loaded(checkpoint, made())
    pairs = [(f"{around}{name}", param) for name, param in run.model.named_parameters()]
    assert statekit.torch.attest(run.optimizer, pairs, checkpoint).passed


def test_masters_that_went_stale_are_found(tmp_path: Path) -> None:
    def begun() -> Run:
        run = made(model=network().half())
        pairs = run.model.named_parameters()
        run.optimizer = statekit.torch.LANS(pairs, lr=0.01, variant="mxnet_unfused", multi_precision=True)
        run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
        return run

    run, new = begun(), network()
    for _ in range(2):
        for param in run.model.parameters():
            param.grad = torch.full_like(param, 0.1)
        run.optimizer.step()
    path = saved(run, tmp_path / "run.pt")
    run = loaded(path, begun())
    assert attested(run, path).passed
    with torch.no_grad():  # each second parameter as it was before loading
        for param, old in [*zip(run.model.parameters(), new.parameters(), strict=True)][::2]:
            param.copy_(old)
    assert [one.name for one in attested(run, path).findings] == ["parameter-differs", "master-stale"]
    run = loaded(path, begun())
    for slots in run.optimizer.state.values():
        slots["master"].mul_(1.5)
    assert [one.name for one in attested(run, path).findings] == ["slot-differs", "master-stale"]


def test_runs_of_trainer_accelerate_and_lightning_are_attested(tmp_path: Path) -> None:
    script = Path(__file__).with_name("attest_driving.py")
    done = drivers.run(script, tmp_path, imports=["transformers.trainer", "lightning", "statekit.torch"])
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    for kind in ("gpt2", "t5"):
        assert result[kind] == {
            "honest": [],
            "forgets": ["optimizer-empty"],
            "rewrites": ["learning-rate"],
        }, kind
    assert result["accelerate"]["honest"] == []
    assert {"optimizer-empty", "parameter-differs"} <= {*result["accelerate"]["new"]}
    assert (result["accelerate"]["drawn"], result["accelerate"]["unsaid"]) == (["random"], [])
    assert result["lightning"] == {
        "honest": [],
        "zeroed": ["slot-zero"],
        "raised": ["The live run isn't the checkpoint's."],
    }


@pytest.mark.parametrize("sample", [None, 6])
def test_frozen_parameters_are_compared_too(sample: int | None, tmp_path: Path) -> None:
    model = network()
    model[1].requires_grad_(False)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
    run = trained(Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), None))
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    def names_and_places() -> list[tuple[str, tuple[str, ...]]]:
        pairs = run.model.named_parameters()
        result = statekit.torch.attest(optimizer, pairs, path, param_names=names, sample=sample)
        return [(one.name, one.where) for one in result.findings]

    assert names_and_places() == []
    with torch.no_grad():
        model[1].weight.add_(1)  # as if the base model weren't loaded
    assert names_and_places() == [("parameter-differs", ("buffers/1.weight",))]


@pytest.mark.parametrize("alone", [False, True], ids=["a run", "weights alone"])
def test_batch_statistics_are_compared_where_the_model_is_given(alone: bool, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 4)).sum().backward()
    if not alone:
        optimizer.step()
    path = tmp_path / "run.pt"
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run["model"] if alone else run, path)
    assert statekit.torch.attest(optimizer, model, path).findings == ()
    unsaid = statekit.torch.attest(optimizer, model.named_parameters(), path, strict=True).unchecked
    assert any("none was given" in one for one in unsaid)
    model[1].running_mean.add_(1)
    (finding,) = statekit.torch.attest(optimizer, model, path).findings
    assert (finding.name, [one.rpartition("/")[0] for one in finding.where]) == (
        "parameter-differs",
        ["params/1"] if alone else ["buffers"],
    )


def test_buffers_of_any_kind_are_compared_or_said_not_to_be(tmp_path: Path) -> None:
    model = network()
    names = ("complex64", "bool", "uint8", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    for name in names:
        model.register_buffer(f"of_{name}", torch.ones(3).to(getattr(torch, name)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    model.append(torch.nn.LazyBatchNorm1d(affine=False))
    result = statekit.torch.attest(optimizer, model, path, strict=True)
    assert {"the buffer sparse: its values can't be read"} <= {*result.unchecked}
    assert [one for one in result.unchecked if "3.running_mean" in one]
    for name in names:
        setattr(model, f"of_{name}", torch.zeros(3).to(getattr(torch, name)))
    (finding,) = statekit.torch.attest(optimizer, model, path).findings
    assert {*finding.where} == {f"buffers/of_{name}" for name in names}


def side_by_side() -> tuple[Any, list[Any], list[Any]]:
    """A model whose matrices and vectors have optimizers of their own, each with its schedule."""
    model = network()
    params = [[p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)]
    optimizers = [torch.optim.AdamW(params[0], lr=0.1), torch.optim.Adam(params[1], lr=0.01)]
    schedules = [torch.optim.lr_scheduler.LinearLR(one, 0.5, 1.0, 10) for one in optimizers]
    return model, optimizers, schedules


def test_optimizers_side_by_side_are_attested_together(tmp_path: Path) -> None:
    model, optimizers, schedules = side_by_side()
    for _ in range(3):
        (model(torch.randn(5, 4)) ** 2).sum().backward()
        for one in (*optimizers, *schedules):
            one.step()
    path = tmp_path / "run.pt"
    parts = {"optimizers": optimizers, "schedulers": schedules}
    states = {name: [one.state_dict() for one in each] for name, each in parts.items()}
    torch.save({"model": model.state_dict(), **states}, path)

    def names_of() -> set[str]:
        result = statekit.torch.attest(optimizers, model, path, scheduler=schedules)
        return {one.name for one in result.findings}

    assert names_of() == set()
    optimizers[1].state.clear()
    assert names_of() == {"slot-missing", "step"}
    optimizers[1].load_state_dict(states["optimizers"][1])
    schedules[1].step()
    assert {"learning-rate", "schedule"} <= names_of()
    schedules[1] = side_by_side()[2][1]
    assert "schedule-elsewhere" in names_of()
    several: Any = optimizers
    with pytest.raises(UsageError, match="one optimizer"), statekit.torch.attested_step(several, model, path):
        pass


def test_a_schedule_in_another_form_is_held_to_what_it_does(tmp_path: Path) -> None:
    path = saved(trained(made()), tmp_path / "run.pt")

    def findings(function: Any, updates: int = 3) -> list[tuple[str, str]]:
        run = loaded(path, made())
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * function(3)
        kept = {**run.scheduler.state_dict(), "lr_lambdas": [None, None], "last_epoch": updates}
        run.scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, function)
        run.scheduler.load_state_dict(kept)
        for group in run.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * function(3)
        return [(one.name, one.found) for one in attested(run, path).findings]

    assert findings(lambda n: 0.5 + 0.05 * min(n, 10)) == []
    assert findings(lambda n: 1 - 0.5 * max(10 - n, 0) / 10) == []  # another rounding of the same
    assert findings(lambda n: 0.5 + 0.05 * min(n, 20)) == [
        ("schedule", "rate after 20 updates 0.15000000000000002")
    ]
    assert findings(lambda n: 0.5 + 0.05 * min(n, 10), 4) == [("schedule", "at 4")]
    assert findings(lambda n: 0.5 + 0.05 * min(n, 10) + 1e-12)[0][0] == "learning-rate"
    (unknown,) = findings(lambda n: [0.5, 0.55, 0.6, 0.65][n])[-1:]  # it can't be asked of later updates
    assert unknown[0] == "schedule"


def test_a_turn_of_a_schedule_is_held_wherever_it_is_and_a_function_to_the_rate_that_is(
    tmp_path: Path,
) -> None:
    schedules = torch.optim.lr_scheduler

    def findings(saved_by: Callable[[Any], Any], live: Callable[[Any], Any]) -> list[tuple[str, str]]:
        run = made()
        run.scheduler = saved_by(run.optimizer)
        path = saved(trained(run), tmp_path / "run.pt")
        stored = torch.load(path)
        run.scheduler = live(run.optimizer)
        run.scheduler.__dict__.update(
            {key: stored["scheduler"][key] for key in ("last_epoch", "base_lrs", "_last_lr")}
        )
        run.optimizer.load_state_dict(stored["optimizer"])
        return [(one.name, one.found) for one in attested(run, path).findings]

    def at_once(turn: int) -> Callable[[Any], Any]:
        return lambda optimizer: schedules.LambdaLR(optimizer, lambda n: 1.0 if n < turn else 0.5)

    def until(end: int) -> Callable[[Any], Any]:
        return lambda optimizer: schedules.LambdaLR(optimizer, lambda n: 1 - n / end)

    def by_torch(optimizer: Any) -> Any:
        return schedules.MultiStepLR(optimizer, [30_000], 0.5)

    assert findings(by_torch, at_once(30_000)) == []
    assert findings(by_torch, at_once(60_000)) == [("schedule", "rate after 30000 updates 0.1")]
    assert [name for name, _ in findings(by_torch, at_once(29_999))] == ["schedule"]
    assert findings(until(10), until(10)) == []
    assert findings(until(10), until(20)) == [("schedule", "rate after 3 updates 0.085")]


def test_random_generators_are_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    run = trained(made())
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": [torch.get_rng_state()]}
    path = saved(run, tmp_path / "run.pt", rng=states)
    assert [one for one in attested(run, path).unchecked if one.startswith("random:")] != []
    asked = attested(run, path, generators=True)
    assert asked.passed and not [one for one in asked.unchecked if "random" in one or "rng" in one]
    for name, draw in (
        ("python", random.random),
        ("numpy", np.random.random),
        ("torch/0", lambda: torch.rand(1)),
    ):
        draw()
        (one,) = attested(run, path, generators=True).findings
        assert (one.name, one.where) == ("random", (f"extra/torch/rng/{name}",))
        random.setstate(states["python"])  # type: ignore[arg-type]
        np.random.set_state(states["numpy"])  # type: ignore[arg-type]
        torch.set_rng_state(states["torch"][0])  # type: ignore[index]
    path = saved(run, tmp_path / "run.pt", rng={"cuda": torch.zeros(16, dtype=torch.uint8), "other": 3})
    unsaid = attested(run, path, generators=True).unchecked
    assert ("random: extra/torch/rng/cuda: there is no live generator of CUDA" in unsaid) is (
        not torch.cuda.is_available()
    )
    unsaid = attested(run, saved(run, tmp_path / "run.pt"), generators=True).unchecked
    assert "random: the checkpoint has no generator's state" in unsaid


def test_options_that_an_earlier_release_had_not_are_said_and_no_finding(tmp_path: Path) -> None:
    def built() -> Run:
        model = network()
        optimizer = torch.optim.NAdam(model.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
        return Run(model, optimizer, scheduler, torch.amp.GradScaler("cpu"))

    run = trained(built())
    older = run.optimizer.state_dict()
    for group in older["param_groups"]:
        del group["decoupled_weight_decay"]
    path = saved(run, tmp_path / "run.pt", optimizer=older)
    result = attested(loaded(path, built()), path, strict=True)
    assert "decoupled_weight_decay: the checkpoint doesn't say it" in result.unchecked


class Signed(torch.optim.Optimizer):  # type: ignore[misc,name-defined]  # torch is Any here
    """An optimizer that nobody knows: a momentum, and a count that is no tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": 0.9})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                slots = self.state[param]
                slots["sum"] = slots.get("sum", 0) * group["momentum"] + param.grad
                slots["step"] = slots.get("step", 0) + 1
                param.data -= group["lr"] * slots["sum"].sign()


@pytest.mark.parametrize(
    "kind", [lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), Signed], ids=["SGD", "unknown"]
)
def test_an_optimizer_without_a_schema_is_attested_by_names(kind: Any, tmp_path: Path) -> None:
    def built() -> Run:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
        optimizer = kind(model.parameters())
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10)
        return Run(model, optimizer, scheduler, torch.amp.GradScaler("cpu"))

    path = saved(trained(built()), tmp_path / "run.pt")
    slot = "momentum_buffer" if kind is not Signed else "sum"

    def findings(change: Callable[[Run], object], **options: Any) -> list[str]:
        run = loaded(path, built())
        change(run)
        result = attested(run, path, **options)
        assert any("no schema has the optimizer" in one for one in result.unchecked)
        assert result.updates is None and "after" not in str(result).partition(".")[0]
        return [one.name for one in result.findings]

    def slots_of(run: Run) -> list[Any]:
        return [run.optimizer.state[param] for param in run.model.parameters()]

    def exchange(run: Run) -> None:
        first, *_, last = [slots for slots in slots_of(run) if slots[slot].shape == (4, 4)]
        first[slot], last[slot] = last[slot], first[slot]

    assert findings(lambda run: None) == [] == findings(lambda run: None, sample=1)
    assert findings(lambda run: run.optimizer.state.clear()) == [
        "slot-missing",
        *(["step"] if kind is Signed else []),
    ]
    assert findings(lambda run: slots_of(run)[0][slot].zero_()) == ["slot-zero"]
    assert findings(exchange) == ["slot-differs"]
    assert findings(lambda run: slots_of(run)[0].update({slot: slots_of(run)[0][slot].bfloat16()})) == [
        "slot-rounded"
    ]
    assert findings(lambda run: run.model[0].weight.data.add_(1)) == ["parameter-differs"]
    assert findings(lambda run: run.optimizer.param_groups[0].update(lr=1.0)) == ["learning-rate"]
    assert findings(lambda run: run.optimizer.param_groups[0].update(momentum=0.8)) == ["hyperparameter"]
    assert findings(lambda run: vars(run.scheduler).update(last_epoch=1)) == ["schedule"]
    if kind is Signed:
        assert findings(lambda run: slots_of(run)[1].update(step=1)) == ["step"]
    run = loaded(path, built())
    with statekit.torch.attested_step(run.optimizer, run.model, path, scheduler=run.scheduler) as step:
        (run.model(torch.ones(2, 4)) ** 2).sum().backward()
        run.optimizer.step()
    assert step.result is not None and step.result.passed and step.result.stepped == 0


def test_weights_alone_prove_no_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    run = made()
    run.model[1].requires_grad_(False)
    run.optimizer = torch.optim.AdamW([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
    torch.save(run.model.state_dict(), path)
    result = statekit.torch.attest(run.optimizer, run.model, path)
    assert result.passed and "the optimizer: the checkpoint has weights alone" in result.unchecked
    (run.model(torch.ones(1, 4)) ** 2).sum().backward()
    run.optimizer.step()
    names = [one.name for one in statekit.torch.attest(run.optimizer, run.model, path).findings]
    assert names == ["optimizer-unknown", "parameter-differs"]


def test_what_is_said_of_parameters_by_name_follows_their_names() -> None:
    def excluding(path: str) -> TrainState:
        param = in_memory(np.ones(4, np.float32))
        group = Group((path,), {"exclude_from_weight_decay": {path: True}})
        return TrainState({path: param}, {path: {}}, Optimizer("lamb", "optax", (group,)), Counts(0, 0))

    for right, live in (("a/w", "a.w"), ("a.w", "a/w")):
        pair = _by_path(excluding(right)), _by_path(excluding(live))
        assert compare_states(*pair).differences == ()


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (3, 1, 2)])
def test_a_flat_slice_is_read_as_the_blocks_that_it_is(shape: tuple[int, ...]) -> None:
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            part = FlatPart(shape, start, stop - start)
            live = LiveSlice(torch.from_numpy(whole.reshape(-1)[start:stop].copy()), part, "w")
            values = [live.read(block) for block in live.parts]
            assert all(np.array_equal(v, whole[b]) for v, b in zip(values, live.parts, strict=True))
            assert np.array_equal(
                np.concatenate([np.zeros(0), *(v.ravel() for v in values)]), range(start, stop)
            )


def test_numbers_of_numpy_are_compared_and_not_left_out(tmp_path: Path) -> None:
    run = trained(made())
    path = saved(run, tmp_path / "run.pt")
    for group in run.optimizer.param_groups:
        group["weight_decay"] = np.float32(0.3)
    assert "hyperparameter" in {one.name for one in attested(run, path).findings}


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.Adafactor])
def test_a_class_into_which_another_classes_groups_were_loaded_is_found(kind: Any, tmp_path: Path) -> None:
    """RAdam goes on with AdamW's groups and slots without an error. Seen red: it passed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    state = torch.load(tmp_path / "run.pt", weights_only=True)["optimizer"]
    for each, wrong in ((kind, ["rule"]), (torch.optim.AdamW, [])):
        live = each(model.parameters())
        live.load_state_dict(state)
        result = statekit.torch.attest(live, model, tmp_path / "run.pt")
        assert [finding.name for finding in result.findings][:1] == wrong


@pytest.mark.parametrize("form", ["FP16_UnfusedOptimizer", "FP16_Optimizer"])
def test_without_zero_deepspeed_moves_masters_of_what_is_below_float32(form: str, tmp_path: Path) -> None:
    """Its wrappers keep them one by one or behind one another; seen red: every right resume was stopped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(torch.bfloat16)
    params = list(model.parameters())
    masters = [torch.nn.Parameter(param.detach().float()) for param in params]
    by_param = torch.optim.AdamW(masters, lr=0.1)
    for master in masters:
        master.grad = torch.randn_like(master)
    by_param.step()
    for param, master in zip(params, masters, strict=True):
        param.data.copy_(master)
    whole = dict(zip(dict(model.named_parameters()), masters, strict=True))
    torch.save({"model": whole, "optimizer": by_param.state_dict()}, tmp_path / "run.pt")
    flat = torch.nn.Parameter(torch.cat([master.detach().flatten() for master in masters]))
    joined = torch.optim.AdamW([flat], lr=0.1)
    rows = [by_param.state[master] for master in masters]
    joined.state[flat] = {
        "step": rows[0]["step"],
        **{key: torch.cat([row[key].flatten() for row in rows]) for key in ("exp_avg", "exp_avg_sq")},
    }
    parts = {
        "FP16_UnfusedOptimizer": {"optimizer": by_param, "fp32_groups": [masters]},
        "FP16_Optimizer": {"optimizer": joined, "fp32_groups_flat": [flat]},
    }
    wrapper = type(form, (), {"fp16_groups": [params], **parts[form]})()

    def findings() -> list[str]:
        result = statekit.torch.attest(wrapper, model, tmp_path / "run.pt", strict=False)
        return [finding.name for finding in result.findings]

    assert findings() == []
    params[2].data.mul_(1.5)  # the model's weight isn't its master's any more
    assert findings() == ["parameter-differs"]
    params[2].data.copy_(masters[2])
    for slots in parts[form]["optimizer"].state.values():
        slots["exp_avg"].zero_()
    assert findings() == ["slot-zero"]


def test_a_parameter_that_stands_twice_is_found(checkpoint: Path) -> None:
    """Seen red: the run passed, though PyTorch updates such a parameter twice."""
    run = loaded(checkpoint, made())
    params = run.optimizer.param_groups[0]["params"]
    params.append(params[0])
    assert "moved-twice" in {one.name for one in attested(run, checkpoint).findings}


@pytest.mark.parametrize("form", ["sparse", "meta", "no state", "lazy"])
def test_a_live_run_of_an_odd_form_is_an_error_or_a_finding(form: str, checkpoint: Path) -> None:
    """Seen red: NotImplementedError, KeyError and RuntimeError of PyTorch's."""
    run = loaded(checkpoint, made())
    slots = state(run, 0)
    if form == "sparse":
        slots["exp_avg"] = slots["exp_avg"].to_sparse()
    elif form == "meta":
        slots["exp_avg"] = torch.empty_like(slots["exp_avg"], device="meta")
    elif form == "no state":
        run.optimizer.param_groups[0]["params"].clear()
    else:
        run.model.add_module("late", torch.nn.LazyLinear(2))
        with pytest.raises(UsageError, match="no values yet"):
            statekit.torch.load_params(checkpoint, run.model)
    with pytest.raises((StateError, UsageError)):
        attested(run, checkpoint, strict=True)
