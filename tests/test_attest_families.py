"""Every kind of fault on a live optimizer of every family: attest finds it, by a name that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attest_runs import Run, attested, loaded, made, network, saved, trained

pytestmark = pytest.mark.torch
FAMILIES = ("adam", "adamw", "adafactor", "hf", "statekit", "lamb", "lans", "scaled_adam")
QUICK = {("hf", "moments"), ("lans", "permuted"), ("scaled_adam", "rounded"), ("adafactor", "missing")}


def slots(run: Run) -> list[tuple[dict[str, Any], str]]:
    """Returns where each slot with more than one element lies."""
    each = [run.optimizer.state[param] for param in run.model.parameters()]
    return [(one, name) for one in each for name, value in one.items() if is_slot(value)]


def is_slot(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def moments(run: Run, path: Path) -> None:
    run.optimizer.state.clear()
    restart(run, path)


def restart(run: Run, path: Path, count: int = 0) -> None:
    for one in (*run.optimizer.state.values(), *run.optimizer.param_groups):
        if isinstance(one.get("step"), torch.Tensor):
            one["step"].fill_(count)
        elif "step" in one:
            one["step"] = count


def weights(run: Run, path: Path) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            param.add_(1)


def one_weight(run: Run, path: Path) -> None:
    with torch.no_grad():
        next(run.model.parameters()).view(-1)[0] += 1e-3


def rounded_weights(run: Run, path: Path) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            param.copy_(param.bfloat16().float())


def rate(run: Run, path: Path) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 2


def option(run: Run, path: Path) -> None:
    names = ("eps", "epsilon1", "epsilon", "scalar_lr_scale")
    for group in run.optimizer.param_groups:
        name = next(name for name in names if name in group)
        value = group[name]
        group[name] = (value[0], 0.5) if isinstance(value, tuple) else 0.5


def rounded(run: Run, path: Path) -> None:
    for where, name in slots(run):
        where[name] = where[name].bfloat16()


def zeroed(run: Run, path: Path) -> None:
    for where, name in slots(run):
        where[name] = torch.zeros_like(where[name])


def scaled(run: Run, path: Path) -> None:
    where, name = slots(run)[0]
    where[name] = where[name] * 1.5


def shifted(run: Run, path: Path) -> None:
    for where, name in slots(run):
        where[name] = where[name].flatten().roll(1).reshape(where[name].shape)


def permuted(run: Run, path: Path) -> None:
    first, second = (run.optimizer.state[list(run.model.parameters())[i]] for i in (0, 2))
    for name in [name for name, value in first.items() if is_slot(value)]:
        first[name], second[name] = second[name], first[name]


def missing(run: Run, path: Path) -> None:
    del run.optimizer.state[next(run.model.parameters())]


def nameless(run: Run, path: Path) -> None:
    where, name = slots(run)[-1]
    del where[name]


def not_finite(run: Run, path: Path) -> None:
    where, name = slots(run)[0]
    where[name] = torch.full_like(where[name], torch.nan)


def stepped(run: Run, path: Path) -> None:
    for param in run.model.parameters():
        param.grad = torch.zeros_like(param)
    run.optimizer.step()


def elsewhere(run: Run, path: Path) -> None:
    run.model = network()


def behind(run: Run, path: Path) -> None:
    run.scheduler.last_epoch -= 1


def another(run: Run, path: Path) -> None:
    run.scheduler = trained(made("adamw")).scheduler


def scaler(run: Run, path: Path) -> None:
    run.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


SLOT = {"slot-differs"}
FAULTS: dict[Callable[[Run, Path], object], set[str]] = {
    moments: {"optimizer-empty", "broken"},
    restart: {"step"},
    partial(restart, count=4): {"step"},
    weights: {"parameter-differs"},
    one_weight: {"parameter-differs"},
    rounded_weights: {"parameter-differs"},
    rate: {"learning-rate"},
    option: {"hyperparameter"},
    rounded: {"slot-rounded"},
    zeroed: {"slot-zero"},
    scaled: SLOT,
    shifted: SLOT,
    permuted: {"slot-of-another-parameter"},
    missing: {"slot-missing", "broken"},
    nameless: {"slot-missing", "broken"},
    not_finite: SLOT,
    stepped: {"step"},
    elsewhere: {"optimizer-elsewhere"},
    behind: {"schedule"},
    another: {"schedule-elsewhere"},
    scaler: {"scaler"},
}


def name_of(fault: Any) -> str:
    return str(getattr(fault, "__name__", "one_too_many"))


CASES = [
    pytest.param(
        family,
        fault,
        id=f"{family}-{name_of(fault)}",
        marks=() if (family, name_of(fault)) in QUICK else pytest.mark.slow,
    )
    for family in FAMILIES
    for fault in FAULTS
]


@pytest.mark.parametrize(("family", "fault"), CASES)
def test_a_fault_is_found_by_its_name(
    family: str, fault: Callable[[Run, Path], object], tmp_path: Path
) -> None:
    path = saved(trained(made(family)), tmp_path / "run.pt")
    run = loaded(path, made(family))
    honest = attested(run, path)
    assert honest.passed, str(honest)
    assert honest.tensors > 6
    fault(run, path)
    result = attested(run, path)
    assert FAULTS[fault] & {one.name for one in result.findings}, str(result)
