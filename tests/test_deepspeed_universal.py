"""Universal checkpoints of DeepSpeed that are written: as its own converter makes them, from whatever system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_files import Made, some_groups, write

import statekit
from formats import values
from goldens import COMPACT, GOLDEN
from statekit.budget import Account
from statekit.conversion.convert import convert as carry_out
from statekit.conversion.convert import plan
from statekit.conversion.open_state import open_state
from statekit.conversion.plan import Plan
from statekit.converters.containers.deepspeed.joins import Joins
from statekit.converters.formats.pytorch.reader import read_object
from statekit.errors import InexactError, UsageError
from statekit.files.source import Files
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree

pytestmark = pytest.mark.torch

SLICED = Path(__file__).parent / "cases" / "deepspeed_tp2" / "checkpoint"
RECORDED = {
    "zero1 in bfloat16": (GOLDEN / "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint", "global_step4"),
    "zero1 of two tensor-parallel ranks": (SLICED, "global_step3"),
}


def convert(source: Path, target: Path, to: str | None = None) -> Plan:
    """Converts, and returns the plan that was carried out."""
    made = plan(source, target, to=to)
    carry_out(made)
    return made


def loaded(path: Path) -> Tree:
    """Returns what a file holds, tensors as bytes."""
    with Files() as files:
        return as_bytes(read_object(files.source(path)).tree)


def as_bytes(node: Any) -> Any:
    if isinstance(node, Tensor):
        return node.dtype.name, node.shape, node.read().tobytes()
    if isinstance(node, dict):
        return {key: as_bytes(child) for key, child in node.items()}
    return [as_bytes(child) for child in node] if isinstance(node, list | tuple) else node


@pytest.mark.parametrize("case", RECORDED)
def test_each_parameters_files_are_those_of_deepspeeds_own_converter(case: str, tmp_path: Path) -> None:
    run, tag = RECORDED[case]
    convert(run / tag, tmp_path / "run", to="deepspeed-universal")
    assert (tmp_path / "run" / "latest_universal").read_text() == f"{tag}_universal"
    made, original = (place / f"{tag}_universal" / "zero" for place in (tmp_path / "run", run))
    files = sorted(file.relative_to(original) for file in original.glob("*/*.pt"))
    assert files == sorted(file.relative_to(made) for file in made.glob("*/*.pt")) and files
    for file in files:
        assert loaded(made / file) == loaded(original / file), file


def test_the_loss_scaler_and_the_groups_are_deepspeeds_own(tmp_path: Path) -> None:
    run, tag = RECORDED["zero1 in bfloat16"]
    convert(run / tag, tmp_path / "run", to="deepspeed-universal")
    made, original = (
        loaded(place / f"{tag}_universal" / "zero" / "optimizer_state.pt")
        for place in (tmp_path / "run", run)
    )
    for key in ("loss_scaler", "overflow", "clip_grad", "ds_version", "param_groups"):
        assert made[key] == original[key], key
    step = made["optimizer_state_dict"]["state"][0]["step"]  # which ZeRO 3 takes for all parameters
    assert step == ("float32", (), np.float32(4).tobytes())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_comes_back_as_it_was(stage: int, tmp_path: Path) -> None:
    made = Made(
        some_groups([(3, 2), (5,)], [(7,)]), 2, stage, frozen={"frozen.w": np.ones((2, 3), np.float32)}
    )
    source = write(made, tmp_path / "run")
    convert(source, tmp_path / "one", to="deepspeed-universal")
    convert(tmp_path / "one", tmp_path / "two", to="deepspeed")
    with open_state(source) as before:
        expected = values(before.state.params), [values(t) for t in before.state.slots.values()]
        buffers = values(before.state.extra["buffers"])
    for folder in ("one", "two"):
        with open_state(tmp_path / folder) as after:
            state = after.state
            assert (values(state.params), [values(t) for t in state.slots.values()]) == expected
            assert values(state.extra["buffers"]) == buffers
            assert after.checkpoint.path.name == "global_step7_universal" and not after.checkpoint.findings


def test_a_target_named_for_its_step_is_the_tag_itself(tmp_path: Path) -> None:
    run, tag = RECORDED["zero1 in bfloat16"]
    convert(run / tag, tmp_path / "global_step4_universal", to="deepspeed-universal")
    assert (tmp_path / "global_step4_universal" / "zero").is_dir()
    assert not (tmp_path / "global_step4_universal" / "latest_universal").exists()
    with pytest.raises(UsageError, match="another step"):
        convert(run / tag, tmp_path / "global_step5_universal", to="deepspeed-universal")


def trained(path: Path, *, skips: bool = False) -> torch.nn.Module:
    """Saves a run of three updates; with `skips` one parameter has missed them all."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        if skips:
            model[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return model


def test_a_run_of_torch_becomes_one_of_deepspeed(tmp_path: Path) -> None:
    model = trained(tmp_path / "run.pt")
    made = convert(tmp_path / "run.pt", tmp_path / "run_deepspeed-universal")
    folder = tmp_path / "run_deepspeed-universal" / "global_step3_universal"
    saved = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)
    assert all(torch.equal(saved["module"][name], tensor) for name, tensor in model.state_dict().items())
    assert saved["global_steps"] == 3 and saved["lr_scheduler"] is None
    assert {"1.running_mean", "1.num_batches_tracked"} <= saved["module"].keys()
    assert not (folder / "zero" / "1.running_mean").exists()
    assert any("isn't a run of DeepSpeed" in note for note in made.assumptions)
    with open_state(tmp_path / "run.pt") as before, open_state(folder) as after:
        assert values(before.state.params) == values(after.state.params)
        groups = [[group.hyperparameters for group in one.state.optimizer.groups] for one in (before, after)]
        assert groups[0] == groups[1]


def test_a_parameter_that_missed_updates_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path / "run.pt", skips=True)
    with pytest.raises(InexactError, match=r"one count for all parameters.*\n.*\n.*2/bias"):
        convert(tmp_path / "run.pt", tmp_path / "out", to="deepspeed-universal")


@pytest.mark.skipif(GOLDEN == COMPACT, reason="in the whole set only")
def test_adafactor_under_zero_is_only_read(tmp_path: Path) -> None:
    source = GOLDEN / "torch_formats/adafactor_deepspeed_zero1/checkpoint"
    with pytest.raises(UsageError, match="No layout of the container deepspeed"):
        convert(source, tmp_path / "out", to="deepspeed-universal")


def test_the_engine_counts_as_the_optimizer_does(tmp_path: Path) -> None:
    """A count that was reset, with the engine's own beside it, made a damaged folder."""
    client = {"global_steps": 9, "skipped_steps": 2}
    source = write(Made(some_groups([(3,)]), 1, client=client), tmp_path / "run")
    statekit.convert(source, tmp_path / "whole", to="deepspeed")
    with open_state(tmp_path / "whole") as opened:
        assert (opened.state.counts.updates, opened.checkpoint.step) == (7, 9)
        assert opened.checkpoint.tree["deepspeed"]["skipped_steps"] == 2
    statekit.convert(source, tmp_path / "anew", to="deepspeed", slot_policy="reset:count")
    with open_state(tmp_path / "anew") as opened:
        assert (opened.state.counts.updates, opened.checkpoint.step) == (0, 0)


def test_a_fused_parameter_is_described_for_ranks_that_cut_it_again() -> None:
    """As `merge_tp_slices` of DeepSpeed 0.19.8 describes it: a count of equal parts becomes their sizes."""
    entry = {"patterns": ["^qkv$"], "shape": [3, 4], "partition_dim": 0}
    joins = Joins({"parameter_with_sub_params": [entry]}, "here", Account())
    described = joins.record("qkv", (12, 4))["sub_param_shape"]
    assert described.state == {"patterns": ["^qkv$"], "shape": ((4, 4, 4), 4), "partition_dim": 0}
    assert joins.record("other", (12, 4)) == {"cat_dim": 0}
