"""What belongs to a checkpoint and isn't read is named: by inspect, convert, doctor and attest."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from samples import ROWS, Row

import statekit
import statekit.torch
from statekit.cli.main import main
from statekit.conversion import registry
from statekit.conversion.belonging import UNREAD, half_of
from statekit.errors import StateError
from statekit.state.schema import NO_OPTIMIZER
from statekit.testing.companions import hidden_halves, silent
from statekit.testing.container_trials import Trial

CHEAP = ("hf-trainer", "torch", "mxnet")
"""Containers of which each run of the tests tries one sample."""


def with_optimizers() -> list[Any]:
    """Returns the samples with an optimizer, those of most containers for the long tests."""
    seen, params = set[str](), []
    for row in ROWS:
        if "weights" in row.layout:
            continue
        is_first = row.sample.container in CHEAP and row.sample.container not in seen
        seen.add(row.sample.container)
        name = f"{row.sample.container}-{row.layout}-{row.name}"
        params.append(pytest.param(row, id=name, marks=[] if is_first else [pytest.mark.slow]))
    return params


def trial_of(row: Row, folder: Path) -> Trial:
    (folder / "sample").mkdir()
    sample = row.sample_in(folder / "sample")
    return Trial(registry.container(sample.container), sample, folder)


@pytest.mark.parametrize("row", with_optimizers())
def test_no_half_is_lost_in_silence(row: Row, tmp_path: Path) -> None:
    hidings = hidden_halves(trial_of(row, tmp_path), row.hints)
    assert not [left for hiding in hidings if (left := silent(hiding))]


def test_the_law_notices_who_names_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: without the search, a Trainer's folder whose optimizer has another name is weights alone."""
    row = next(row for row in ROWS if row.sample.container == "hf-trainer")
    monkeypatch.setattr("statekit.conversion.open_state.unread", lambda *all_: ())
    monkeypatch.setattr("statekit.conversion.inspection.unread", lambda *all_: ())
    hidings = hidden_halves(trial_of(row, tmp_path), row.hints)
    assert [left for hiding in hidings if (left := silent(hiding))]


def test_a_name_tells_what_a_file_is() -> None:
    names = (
        "optimizer_0",
        "optim.pt",
        "opt_state",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "OptimizerState",
    )
    assert {half_of(name) for name in names} == {"optimizer"}
    assert {half_of(name) for name in ("model_ema.pt", "ema", "swa_weights", "model_avg.pt")} == {"average"}
    assert {half_of(name) for name in ("lr_scheduler.bin", "scheduler_1.pt")} == {"schedule"}
    others = (
        "opt-125m.bin",
        "model.pt",
        "rng_state.pth",
        "training_args.bin",
        "trainer_state.json",
        "adapter_model",
    )
    assert {half_of(name) for name in others} == {None}


def saved_apart(folder: Path) -> tuple[Path, torch.nn.Linear]:
    """Saves weights in a file, and the optimizer in a folder that no reader joins to it."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    (folder / "optim").mkdir()
    save_file(model.state_dict(), folder / "weights.safetensors")
    torch.save(optimizer.state_dict(), folder / "optim" / "rank0.pt")
    return folder / "weights.safetensors", model


def test_each_verb_names_the_half_that_lies_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = saved_apart(tmp_path)
    commands = (
        ["inspect", str(path)],
        ["convert", str(path), str(tmp_path / "out.pt")],
        ["doctor", str(path)],
    )
    codes = [main(arguments) for arguments in commands]
    shown = capsys.readouterr().out
    assert codes == [0, 0, 1] and shown.count("optim looks like an optimizer") >= len(commands)
    assert "weights alone" not in shown
    assert main(["doctor", str(path), "--ignore", UNREAD]) == 0


def test_attest_does_not_pass_a_run_whose_optimizer_lies_unread(tmp_path: Path) -> None:
    path, model = saved_apart(tmp_path)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    result = statekit.torch.attest(fresh, model.named_parameters(), path)
    assert not result.passed and [finding.name for finding in result.findings] == [UNREAD]


@pytest.mark.filterwarnings("ignore:optim looks like:UserWarning")
@pytest.mark.parametrize(
    "framework", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "tensorflow"))]
)
def test_each_loader_names_the_half_that_lies_beside(framework: str, tmp_path: Path) -> None:
    path, model = saved_apart(tmp_path)
    home = importlib.import_module(f"statekit.{framework}")
    weights = {name: param.detach().numpy() for name, param in model.named_parameters()}
    targets: dict[str, Any] = {"torch": model, "jax": weights}
    if framework == "tensorflow":
        import tensorflow as tf

        targets[framework] = [tf.Variable(value, name=name) for name, value in weights.items()]
    target = targets[framework]
    with pytest.warns(UserWarning, match="optim looks like an optimizer: nothing reads it"):
        home.load_params(path, target)
    named = model.named_parameters() if framework == "torch" else target
    with pytest.raises(StateError, match="optim looks like an optimizer: nothing reads it"):
        home.load_optimizer(path, named)


def test_an_attested_step_does_not_pass_a_run_whose_optimizer_lies_unread(tmp_path: Path) -> None:
    path, model = saved_apart(tmp_path)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
    with (
        pytest.raises(StateError, match=UNREAD),
        statekit.torch.attested_step(fresh, model, path, strict=True),
    ):
        model(torch.ones(2, 4)).sum().backward()
        fresh.step()


def test_a_loader_names_an_average_beside_a_whole_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run, tmp_path / "run.pt")
    torch.save(model.state_dict(), tmp_path / "run_ema.pt")
    with pytest.warns(UserWarning, match="run_ema.pt looks like an average: nothing reads it"):
        statekit.torch.load_optimizer(tmp_path / "run.pt", model.named_parameters())
    result = statekit.torch.attest(optimizer, model, tmp_path / "run.pt")
    assert result.passed and "run_ema.pt looks like an average: nothing reads it" in str(result)
    assert main(["doctor", str(tmp_path / "run.pt")]) == 1


def test_weights_stand_alone_beside_what_is_no_half_of_a_run(tmp_path: Path) -> None:
    """A pipeline's scheduler of noise, a program's code, another step's optimizer and a later run's folder."""
    save_file(torch.nn.Linear(2, 2).state_dict(), tmp_path / "model_10.safetensors")
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text("{}")
    (tmp_path / "optimizer.py").write_text("")
    (tmp_path / "optimizer_20.pt").write_bytes(b"another step's")
    with statekit.open(tmp_path / "model_10.safetensors") as opened:
        assert "weights alone" in repr(opened) and not opened.checkpoint.findings


def test_a_half_in_a_folder_beside_the_models_is_named(tmp_path: Path) -> None:
    """ColossalAI's epoch0-step5/{model,optimizer}/. Seen red: the model's folder was weights alone."""
    path, _ = saved_apart(tmp_path)
    (tmp_path / "model").mkdir()
    path.rename(tmp_path / "model" / path.name)
    for opened_path in (tmp_path / "model", tmp_path / "model" / path.name):
        with statekit.open(opened_path) as opened:
            assert "optim looks like an optimizer" in repr(opened)


def test_loaders_of_one_checkpoint_warn_once(tmp_path: Path) -> None:
    """Printed lines call two loaders, and each found the same."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run, tmp_path / "run.pt")
    torch.save(model.state_dict(), tmp_path / "run_ema.pt")
    with pytest.warns(UserWarning, match="looks like an average") as warned:
        statekit.torch.load_params(tmp_path / "run.pt", model)
        statekit.torch.load_optimizer(tmp_path / "run.pt", model.named_parameters())
    assert len(warned) == 1 and warned[0].filename == __file__


def with_optimizer(path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


@pytest.mark.parametrize("name", ["model.safetensors", "export.safetensors"])
def test_a_whole_checkpoint_beside_exported_weights_is_named_whatever_it_is_called(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run := tmp_path / "runs" / "run").mkdir(parents=True)
    save_file({"weight": torch.ones(2, 3)}, run / name)
    torch.save({"weight": torch.ones(2, 3)}, run / "backup.pt")
    assert not [finding for finding in statekit.inspect(run).findings if finding.kind == UNREAD]
    with_optimizer(run / "last.pt")
    findings = statekit.inspect(run).findings
    assert [finding.place for finding in findings if finding.kind == UNREAD] == [f"{run / 'last.pt'}"]
    assert main(["doctor", f"{run}"]) == 1
    assert "last.pt looks like an optimizer" in capsys.readouterr().out
    assert main(["ls", f"{run}"]) == 0
    assert "last.pt looks like an optimizer" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("content", [b"", b"\0" * 300], ids=["empty", "of zeros"])
def test_a_file_that_a_save_left_broken_is_named_beside_a_whole_one(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_optimizer(tmp_path / "s1.pt")
    (tmp_path / "notes.bin").write_bytes(content)  # of another kind: it says nothing of checkpoints
    assert main(["inspect", f"{tmp_path}"]) == 0
    (tmp_path / "s2.pt").write_bytes(content)
    capsys.readouterr()
    for verb in ("inspect", "check", "doctor"):
        assert main([verb, f"{tmp_path}"]) == 3
        assert "s2.pt" in capsys.readouterr().err
    assert main(["ls", f"{tmp_path}", "--json"]) == 0
    whys = {
        Path(step["path"]).name: step["why"]
        for run in json.loads(capsys.readouterr().out)["runs"]
        for step in run["checkpoints"]
    }
    assert whys["s1.pt"] == ""
    assert whys["s2.pt"] == ("No container fits." if content else "The file is empty.")


def test_an_optimizer_in_a_file_of_any_name_beside_weights_is_named(tmp_path: Path) -> None:
    with_optimizer(tmp_path / "whole.pt")
    torch.save({"weight": torch.ones(2, 3)}, tmp_path / "best.pt")
    assert statekit.inspect(tmp_path / "best.pt").contents == NO_OPTIMIZER  # the other is a run of its own
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    torch.save({"o": whole["optimizer"], "seed": torch.arange(3)}, tmp_path / "rest.pt")
    seen = statekit.inspect(tmp_path / "best.pt")
    assert seen.contents is not None and "rest.pt looks like an optimizer" in seen.contents


@pytest.mark.parametrize("way", ["model", "state_dict", "a number"])
def test_attest_and_doctor_find_a_weight_that_the_checkpoint_lacks(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: all weights of the run were wrong, and it passed, as a checkpoint without weights does."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights: dict[str, Any] = dict(model.state_dict())
    weights["1.bias"] = 3.0
    if way != "a number":
        del weights["1.bias"]
    key = "state_dict" if way == "state_dict" else "model"
    saved = (
        {key: weights, "optimizer_states": [optimizer.state_dict()]}
        if way == "state_dict"
        else {key: weights, "optimizer": optimizer.state_dict()}
    )
    torch.save({**saved, "epoch": 1}, tmp_path / "run.pt")
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    result = statekit.torch.attest(optimizer, model.named_parameters(), tmp_path / "run.pt")
    assert [(finding.name, finding.where) for finding in result.findings] == [("parts-missing", ("1/bias",))]
    assert main(["doctor", f"{tmp_path / 'run.pt'}"]) == 1
    assert "lacks weights of parameters that its optimizer moves" in " ".join(capsys.readouterr().out.split())
