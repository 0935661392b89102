"""Muon's step against recordings of the originals, each of them with what moves the rest of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import statekit
import statekit.errors
from statekit.arrays.backend import backend
from statekit.cli.main import main
from statekit.conversion.open_state import open_state
from statekit.state.schema import load_schema
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Subject, replay

RECORDINGS = Path(__file__).parent / "cases" / "muon_recordings"
OF_TORCH = ("torch_", "keller_", "moonlight", "emerging_")
NAMES = sorted(folder.name for folder in RECORDINGS.iterdir() if folder.name.startswith(OF_TORCH))


def replayed(name: str, framework: str = "numpy", changes: Mapping[str, Any] | None = None) -> Replay:
    with open_recording(RECORDINGS / name) as recording:
        return replay(Subject(recording, "init", changes=changes), backend(framework))


@pytest.mark.parametrize("name", [name for name in NAMES if "bf16" not in name])
def test_every_update_is_the_originals(name: str) -> None:
    result = replayed(name)
    assert result.passed
    rows = [row for judged in result.judged for row in judged.rows if row.tensor == "param"]
    beyond = [row for row in rows if row.relative > 1e-5 and row.ulps > 4]
    assert len(beyond) < len(rows) / 10  # of the update; a sum beside a rounding's edge moves more


@pytest.mark.torch
def test_pytorch_takes_the_same_steps() -> None:
    assert replayed("torch_list", "torch").passed


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("name", NAMES)
def test_every_framework_takes_the_same_steps(name: str, framework: str) -> None:
    if "bf16" not in name:
        assert replayed(name, framework).passed


@pytest.mark.parametrize(
    "wrong", [{"nesterov": False}, {"ns_steps": 4}, {"shape_scale": "match_rms"}, {"momentum": 0.9}]
)
def test_another_rule_is_noticed(wrong: dict[str, Any]) -> None:
    with open_recording(RECORDINGS / "torch_list") as recording:
        subject = Subject(recording, "init", changes={f"muon/{key}": value for key, value in wrong.items()})
        passed = replay(subject, backend("numpy")).passed
    assert not passed


def test_one_argument_says_what_two_hyperparameters_are() -> None:
    schema = load_schema("muon")
    both = {"shape_scale": "match_rms", "scale_factor": 0.2}
    assert schema.canonical("torch", {"adjust_lr_fn": "match_rms_adamw"}) == both
    assert schema.native("torch", both) == {"adjust_lr_fn": "match_rms_adamw"}
    assert schema.native("optax", both) == {"consistent_rms": 0.2}
    assert schema.canonical("keras", {"rms_rate": None}) == {"shape_scale": "none", "scale_factor": 1.0}


SHAPES = ("torch_list",)


def checkpoint_of(name: str) -> Path:
    folder = RECORDINGS / name / "checkpoint"
    return next((path for path in (folder / "dcp", folder / "checkpoint.pt") if path.exists()), folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name in SHAPES])
def test_a_file_there_and_back_holds_the_same_run(name: str, tmp_path: Path) -> None:
    source = checkpoint_of(name)
    statekit.convert(source, tmp_path / "there.pt")
    with open_state(source) as left, open_state(tmp_path / "there.pt") as right:
        assert right.layout == "torch-optim"
        assert right.state.optimizer.kinds == left.state.optimizer.kinds
        assert [g.hyperparameters for g in right.state.optimizer.groups] == [
            g.hyperparameters for g in left.state.optimizer.groups
        ]
        assert right.state.slots.keys() == left.state.slots.keys()
        for path, slots in left.state.slots.items():
            assert {slot: t.read().tobytes() for slot, t in slots.items()} == {
                slot: t.read().tobytes() for slot, t in right.state.slots[path].items()
            }


@pytest.mark.torch
def test_the_original_goes_on_from_what_was_written_as_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    statekit.convert(checkpoint_of("torch_list"), tmp_path / "there.pt")
    file = torch.load(tmp_path / "there.pt", weights_only=True)
    meta = json.loads((RECORDINGS / "torch_list" / "meta.json").read_text())
    grads = load_file(RECORDINGS / "torch_list" / "grads.safetensors")
    states = load_file(RECORDINGS / "torch_list" / "trajectory.safetensors")
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in file["model"].items()}
    optimizers = []
    for kind, entry, saved in zip(
        (torch.optim.Muon, torch.optim.AdamW), meta["extra"]["optimizers"], file["optimizers"], strict=True
    ):
        optimizers.append(kind([params[name] for name in entry["param_groups"][0]["params"]]))
        optimizers[-1].load_state_dict(saved)
    for step in range(meta["checkpoint_step"] + 1, meta["steps"] + 1):
        for path, name in meta["extra"]["fqn"].items():
            params[name].grad = torch.from_numpy(grads[f"{step}/{path}"].copy())
        for optimizer in optimizers:
            optimizer.step()
    for path, name in meta["extra"]["fqn"].items():
        assert np.array_equal(params[name].detach().numpy(), states[f"{meta['steps']}/param/{path}"])


def test_the_printed_lines_make_both_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(checkpoint_of("torch_list"))]) == 0
    printed = capsys.readouterr().out
    assert "torch.optim.Muon([groups[0]], lr=0.02)" in printed
    assert "torch.optim.AdamW([groups[1]]" in printed
