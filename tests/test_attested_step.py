"""Attesting an update in PyTorch: honest ones lie within the rule's rounding, and what only they show is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attest_runs import Run, loaded, made, network, saved, trained

import statekit.torch
from statekit.attestation.attestation import Attestation
from statekit.errors import StateError, UsageError

pytestmark = pytest.mark.torch


def stepped(
    run: Run, path: Path, update: Callable[[Run], object] | None = None, **options: Any
) -> Attestation:
    """Attests the next update of a run, made as a trainer makes it if nothing else is said."""
    pairs = run.model.named_parameters()
    with statekit.torch.attested_step(
        run.optimizer, pairs, path, scheduler=run.scheduler, scaler=run.scaler, **options
    ) as step:
        (update or plain)(run)
    assert step.result is not None
    return step.result


def backward(run: Run, scale: Callable[[Any], Any] = lambda loss: loss) -> None:
    torch.manual_seed(5)
    run.optimizer.zero_grad()
    scale((run.model(torch.randn(5, 4)) ** 2).sum()).backward()


def plain(run: Run) -> None:
    backward(run)
    run.optimizer.step()
    run.scheduler.step()


def clipped(run: Run) -> None:
    backward(run)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()


def scaled(run: Run) -> None:
    backward(run, run.scaler.scale)
    run.scaler.step(run.optimizer)
    run.scaler.update()


def closed(run: Run) -> None:
    def closure() -> Any:
        with torch.enable_grad():  # transformers' Adafactor calls it without
            run.optimizer.zero_grad()
            loss = (run.model(torch.ones(5, 4)) ** 2).sum()
            loss.backward()
        return loss

    run.optimizer.step(closure)


def partly(run: Run) -> None:
    backward(run)
    next(run.model.parameters()).grad = None
    run.optimizer.step()


def again(run: Run) -> None:
    plain(run)
    plain(run)


UPDATES = (plain, clipped, scaled, closed, partly, again)
KINDS = ("adamw", "adafactor", "hf", "statekit")


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_update_passes(kind: str, tmp_path: Path) -> None:
    for updates in (0, 3):
        path = saved(trained(made(kind), updates), tmp_path / f"{updates}.pt")
        for update in UPDATES if updates else (plain,):
            result = stepped(loaded(path, made(kind)), path, update, strict=True)
            assert (result.updates, result.stepped) == (updates, 6), (update, str(result))
            assert not [one for one in result.unchecked if "update" in one], str(result)


@pytest.mark.parametrize("option", ["foreach", "fused", "maximize", "amsgrad", "capturable"])
def test_so_does_one_by_another_implementation(option: str, tmp_path: Path) -> None:
    if option == "capturable" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def begun() -> Run:
        run = made()
        groups = [{**group, option: True} for group in run.optimizer.param_groups]
        for group in groups:
            del group["initial_lr"]
        run.optimizer = torch.optim.AdamW(groups, lr=0.1, **{option: True})
        run.scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.5, 1.0, 10)
        run.scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
        return run

    path = saved(trained(begun()), tmp_path / "run.pt")
    for update in (plain, scaled):
        result = stepped(loaded(path, begun()), path, update, strict=True)
        assert result.stepped == 6


def test_an_update_that_is_skipped_is_not_taken_for_one(tmp_path: Path) -> None:
    path = saved(trained(made()), tmp_path / "run.pt")

    def overflown(run: Run) -> None:
        backward(run, run.scaler.scale)
        next(run.model.parameters()).grad[0] = torch.inf
        run.scaler.step(run.optimizer)
        run.scaler.update()

    with pytest.raises(UsageError, match="without an update"):
        stepped(loaded(path, made()), path, overflown)
    with pytest.raises(UsageError, match="without an update"):
        stepped(loaded(path, made()), path, lambda run: None)

    def both(run: Run) -> None:
        overflown(run)
        scaled(run)

    assert stepped(loaded(path, made()), path, both, strict=True).stepped == 6


class CachesPowers(torch.optim.AdamW):  # type: ignore[misc, name-defined]  # torch may be missing
    """Takes the powers of its betas when it is made, as if it had made no update."""

    def step(self, closure: Any = None) -> None:
        done = [slots["step"].clone() for slots in self.state.values()]
        for slots in self.state.values():
            slots["step"].zero_()
        super().step()
        for slots, count in zip(self.state.values(), done, strict=True):
            slots["step"].copy_(count + 1)


class DecaysOnce(torch.optim.AdamW):  # type: ignore[misc, name-defined]  # torch may be missing
    """Makes its first update with the decay of its constructor."""

    def step(self, closure: Any = None) -> None:
        kept = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.05
        super().step()
        for group, decay in zip(self.param_groups, kept, strict=True):
            group["weight_decay"] = decay


class ClipsItself(torch.optim.AdamW):  # type: ignore[misc, name-defined]  # torch may be missing
    """Changes gradients where nobody sees it."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
        super().step()


class StateElsewhere(torch.optim.AdamW):  # type: ignore[misc, name-defined]  # torch may be missing
    """Shows the state that was loaded, and moves by one of its own, as an optimizer behind a service does."""

    def step(self, closure: Any = None) -> None:
        shown = {param: dict(slots) for param, slots in self.state.items()}
        for slots in self.state.values():
            slots.update({name: torch.zeros_like(slots[name]) for name in ("exp_avg", "exp_avg_sq")})
        super().step()
        for param, slots in shown.items():
            self.state[param].update({name: slots[name] for name in ("exp_avg", "exp_avg_sq")})


HIDDEN = (CachesPowers, DecaysOnce, ClipsItself, StateElsewhere)


@pytest.mark.parametrize("kind", HIDDEN, ids=lambda kind: kind.__name__)
def test_what_the_state_does_not_show_the_update_does(kind: Any, tmp_path: Path) -> None:
    path = saved(trained(made()), tmp_path / "run.pt")
    run = loaded(path, made())
    hidden = kind(network().parameters(), lr=0.1)
    hidden.param_groups = run.optimizer.param_groups
    hidden.state = run.optimizer.state
    run.optimizer, run.scheduler.optimizer = hidden, hidden
    result = stepped(run, path)
    assert [one.name for one in result.findings] == ["update-differs"], str(result)
    run = loaded(path, made())
    assert stepped(run, path).passed
    with pytest.raises(StateError, match="update-differs"):
        stepped(loaded(path, made()), path, moved_twice, strict=True)


def moved_twice(run: Run) -> None:
    backward(run)
    for group in run.optimizer.param_groups:
        group["lr"] *= 1.001
    run.optimizer.step()


def test_a_rule_without_a_step_is_attested_for_its_state_alone(tmp_path: Path) -> None:
    path = saved(trained(made("adam")), tmp_path / "run.pt")  # its decay goes into the gradient
    result = stepped(loaded(path, made("adam")), path, strict=True)
    assert (result.stepped, result.tensors) == (0, 18)
    assert [one for one in result.unchecked if one.startswith("the update: ") and "decay" in one]


def test_a_sample_is_stepped_and_what_has_no_step_is_said(tmp_path: Path) -> None:
    path = saved(trained(made()), tmp_path / "run.pt")
    result = stepped(loaded(path, made()), path, sample=2, seed=3)
    assert (result.stepped, result.passed) == (2, True)
    assert result.to_json()["stepped"] == 2
    assert "The next update of 2 parameters was compared." in str(result)


def test_a_parameter_that_never_had_a_gradient_leaves_the_others_to_be_judged(tmp_path: Path) -> None:
    def begun() -> Run:
        model = network()
        model.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))
        return made(model=model)

    def used(run: Run) -> None:
        backward(run)
        run.model.spare.grad = torch.ones(3)
        run.optimizer.step()

    def wrong(run: Run) -> None:
        backward(run)
        run.optimizer.param_groups[0]["betas"] = (0.5, 0.999)
        run.optimizer.step()
        run.optimizer.param_groups[0]["betas"] = (0.9, 0.999)

    path = saved(trained(begun()), tmp_path / "run.pt")
    for update in (plain, used):
        result = stepped(loaded(path, begun()), path, update, strict=True)
        assert (result.stepped, [one for one in result.unchecked if "update" in one]) == (7, [])
    assert [one.name for one in stepped(loaded(path, begun()), path, wrong).findings] == ["update-differs"]


def test_a_state_that_breaks_its_rules_is_a_finding_and_stops_no_run(tmp_path: Path) -> None:
    path = saved(trained(made()), tmp_path / "run.pt")
    run = loaded(path, made())
    run.optimizer.param_groups[0]["eps"] = -1.0
    result = stepped(run, path)
    assert [one.name for one in result.findings] == ["broken"]
    assert "the update: the live state can't be read" in result.unchecked
