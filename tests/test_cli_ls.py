"""`statekit ls`: the runs below a folder, as the service's catalogue has them, without a service."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.cli.main import DONE, FAILED, USAGE, main

ORBAX = GOLDEN / "optax_adafactor" / "adafactor_standard_ocdbt" / "checkpoint" / "ckpt"
T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint" / "checkpoint_4"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a run of two steps, a file that is cut off, and weights alone, sealed."""
    lab = tmp_path_factory.mktemp("lab")
    assert main(["convert", str(T5X), str(lab / "weights.pt"), "--params-only"]) == DONE
    shutil.copytree(T5X, lab / "deep" / "down" / "t5x" / "checkpoint_4")
    shutil.copytree(T5X, lab / "deep" / "down" / "t5x" / "checkpoint_12")
    cut = lab / "cut" / "last.pt"
    cut.parent.mkdir()
    cut.write_bytes((lab / "weights.pt").read_bytes()[:-2000])
    return lab


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert main(["ls", str(folder), "--json"]) == DONE
    return json.loads(capsys.readouterr().out)


def test_each_run_has_its_steps_and_says_which_can_go_on(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = listed(lab, capsys)
    runs = {run["path"]: run for run in data["runs"]}
    assert data["format"] == "statekit.ls/1"
    assert data["size"] == sum(run["size"] for run in runs.values())
    assert runs["cut/last.pt"]["newest_resumable"] is None
    (cut,) = runs["cut/last.pt"]["checkpoints"]
    assert not cut["resumable"] and cut["why"].startswith("A zip archive is cut off")
    (weights,) = runs["weights.pt"]["checkpoints"]
    assert (weights["resumable"], weights["seal"]) == (False, "sealed")
    assert weights["why"] == "weights alone: no optimizer's state"
    run = runs["deep/down/t5x"]
    assert [step["step"] for step in run["checkpoints"]] == [4, 12]
    assert all(step["resumable"] and step["optimizer"] == "adafactor/t5x" for step in run["checkpoints"])
    assert (run["newest"], run["newest_resumable"]) == (12, 12)


def test_the_table_names_the_newest_step_and_why_nobody_can_go_on(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(lab)]) == DONE
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "adafactor/t5x" in rows["deep/down/t5x"] and " yes " in rows["deep/down/t5x"]
    assert " no " in rows["weights.pt"] and rows["weights.pt"].endswith("weights alone: no optimizer's state")
    assert "in all." in shown


@pytest.mark.slow
def test_the_catalogue_of_a_service_says_the_same(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sqlalchemy")
    from statekit.service.catalogue import Catalogue
    from statekit.service.database import Database, Ownership

    with Ownership(tmp_path / "data") as owner:
        database = Database(owner.path.parent, migrate=True)
        catalogue = Catalogue(database, [lab])
        catalogue.scan()
        theirs = {
            checkpoint.path: (checkpoint.step, checkpoint.optimizer, checkpoint.resumable, checkpoint.size)
            for checkpoint in catalogue.checkpoints().items
        }
        database.close()
    ours = {
        step["path"]: (step["step"], step["optimizer"], step["resumable"], step["size"])
        for run in listed(lab, capsys)["runs"]
        for step in run["checkpoints"]
    }
    assert ours == theirs


def test_what_is_no_folder_or_holds_nothing_is_said(
    lab: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(lab / "nosuch")]) == FAILED
    assert main(["ls", str(lab / "weights.pt")]) == USAGE
    assert "statekit inspect" in capsys.readouterr().err
    assert main(["ls", str(tmp_path)]) == DONE
    assert "No checkpoint lies below" in capsys.readouterr().out


def test_inspect_of_a_folder_of_checkpoints_points_there(
    lab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(lab)]) == FAILED
    assert f"`statekit ls {lab}`" in capsys.readouterr().err


@pytest.mark.torch
def test_a_file_that_no_layout_decodes_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save({"model": {"a": torch.zeros(3)}, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    torch.save({"epoch": 3}, tmp_path / "b.pt")
    alike = {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2), "c": torch.zeros(2)}
    torch.save({"model": alike, "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    why = {run["path"]: run["checkpoints"][0]["why"] for run in runs}
    resumable = {run["path"]: run["checkpoints"][0]["resumable"] for run in runs}
    assert resumable == {"a.pt": False, "b.pt": False, "c.pt": True}  # torch itself goes on by numbers
    assert "lacks weights of parameters" in why["a.pt"] and "holds no tensor" in why["b.pt"]
    assert (
        "don't tell which parameters" in why["c.pt"]
        and "1 in the optimizer, 2 in the model" in why["c.pt"]
        and "\\n" not in why["c.pt"]
    )


@pytest.mark.torch
def test_runs_of_one_model_beside_each_other_are_no_steps_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: the older of two runs was an older step of one, and spare."""
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("warmup.pt", "no-warmup.pt", "last.pt", "epoch=2-val_loss=0.3.pt"):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / name)
    steps = {
        run["path"]: [step["step"] for step in run["checkpoints"]] for run in listed(tmp_path, capsys)["runs"]
    }
    assert steps == {".": [3, 4], "no-warmup.pt": [2], "warmup.pt": [1]}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("folders", "runs"),
    [
        (["run/checkpoint-10", "run/checkpoint-9", "run/checkpoint-8"], {"run": [1, 2, 3]}),
        (["a/step_2", "a/step_1", "b/step_3"], {"a": [1, 2], "b/step_3/state.pt": [3]}),
        (["global_step10", "global_step9"], {".": [1, 2]}),
        (["1", "2", "7"], {".": [1, 2], "7/state.pt": [3]}),
        (["run_1", "run_2"], {"run_1/state.pt": [1], "run_2/state.pt": [2]}),
    ],
    ids=["checkpoints", "two runs", "words", "numbers", "runs"],
)
def test_folders_that_are_called_as_steps_are_one_run(
    folders: list[str], runs: dict[str, list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: each was a run of its own."""
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    for name in folders:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        (tmp_path / name).mkdir(parents=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, tmp_path / name / "state.pt")
    assert {
        run["path"]: [step["step"] for step in run["checkpoints"]] for run in listed(tmp_path, capsys)["runs"]
    } == runs


def test_checkpoints_of_orbax_beside_each_other_are_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a folder of them was one checkpoint of several items, which nothing could decode."""
    for name in ("large", "small"):
        shutil.copytree(ORBAX, tmp_path / name)
    assert [run["path"] for run in listed(tmp_path, capsys)["runs"]] == ["large", "small"]
