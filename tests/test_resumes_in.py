"""Where a checkpoint can resume: the same answer as a plan's, for every layout of a golden checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import statekit
from goldens import COMPACT
from statekit.conversion.contracts import Exactness
from statekit.conversion.resumes_in import resume_code, resumes_in
from statekit.errors import InexactError, UnknownRuleError

T5X = COMPACT / "t5x" / "momentum_f32" / "checkpoint" / "checkpoint_4"
TRAINER = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4"


def test_its_own_layout_comes_first_and_is_exact() -> None:
    with statekit.open(T5X) as opened:
        ways = resumes_in(opened)
    assert (ways[0].layout, ways[0].exactness, ways[0].here) == ("t5x", Exactness.BITWISE, True)
    taken = [way.exactness for way in ways if way.refusal is None]
    assert taken == sorted(taken)
    assert all(bool(way.reasons) == (way.exactness > Exactness.ROUNDING) for way in ways)


@pytest.mark.parametrize("path", [T5X, TRAINER], ids=["t5x", "trainer"])
def test_a_plan_to_each_layout_says_the_same(path: Path, tmp_path: Path) -> None:
    with statekit.open(path) as opened:
        ways = resumes_in(opened)
    planned = 0
    for way in ways:
        if way.here or way.layout not in {"optax", "statekit-torch", "statekit-jax", "torch-optim"}:
            continue
        if way.exactness > Exactness.ROUNDING:
            with pytest.raises(InexactError):
                statekit.plan(path, tmp_path / "target", to=way.containers[0], layout=way.layout)
        else:
            plan = statekit.plan(path, tmp_path / "target", to=way.containers[0], layout=way.layout)
            assert (plan.rule_change.exactness if plan.rule_change else Exactness.BITWISE) == way.exactness
        planned += 1
    assert planned >= 2


def test_as_data_it_is_what_json_gives_back() -> None:
    with statekit.open(T5X) as opened:
        plain = [way.to_json() for way in resumes_in(opened)]
    assert json.loads(json.dumps(plain)) == plain
    assert any(one["reasons"] for one in plain)


def test_hyperparameters_of_the_checkpoint_count() -> None:
    with statekit.open(T5X) as opened:
        plain = {way.layout: way.exactness for way in resumes_in(opened)}
    with statekit.open(T5X, hparams={"step_offset": 100, "multiply_by_parameter_scale": False}) as opened:
        told_apart = {way.layout: way.exactness for way in resumes_in(opened)}
    assert plain != told_apart


def test_the_code_is_that_of_resume() -> None:
    with statekit.open(TRAINER) as opened:
        code = resume_code(opened)
    assert code[""] == (f'trainer.train(resume_from_checkpoint="{TRAINER}")',)
    assert {"torch", "jax", "tensorflow"} >= set(code) - {""} >= {"torch", "jax"}


def test_a_layout_that_cant_take_the_run_as_it_is_says_what_it_lacks_in_the_words_of_a_plan(
    tmp_path: Path,
) -> None:
    with statekit.open(T5X) as opened:
        ways = {way.layout: way for way in resumes_in(opened)}
    with pytest.raises(UnknownRuleError) as caught:
        statekit.plan(T5X, tmp_path / "target.pt", to="torch", layout="torch-optim", require="estimate")
    assert ways["torch-optim"].refusal == str(caught.value)
    assert "beta1" in str(caught.value)
    assert "beta1" in ways["torch-optim"].asks
    assert ways["optax"].refusal is None


@pytest.mark.torch
def test_a_home_of_few_bits_is_not_called_exact(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    network = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(64)).sum().backward()
    optimizer.step()
    torch.save({"model": network.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        exactness = {resumption.layout: resumption.exactness for resumption in resumes_in(opened)}
    assert exactness["bitsandbytes-32bit"] is exactness["torch-fqn"] is Exactness.BITWISE
    for layout in ("bitsandbytes-8bit", "torchao-8bit", "torchao-4bit", "torchao-fp8"):
        assert exactness[layout] is Exactness.LOSSY, layout
