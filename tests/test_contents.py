"""Files of PyTorch that no layout decodes are said for what they are, optimizers by their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import statekit
from statekit.cli.main import main
from statekit.converters.layouts.pytorch.contents import signatures
from statekit.errors import StateError, UsageError
from statekit.state.schema import schema_names

pytestmark = pytest.mark.torch

Made = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "torch SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "torch SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "torch RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "torch Adagrad": torch.optim.Adagrad,
    "torch Adadelta": torch.optim.Adadelta,
    "torch Adamax": torch.optim.Adamax,
    "torch NAdam": torch.optim.NAdam,
    "torch RAdam": torch.optim.RAdam,
    "torch Rprop": torch.optim.Rprop,
    "torch ASGD": torch.optim.ASGD,
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False))


def moved(model: torch.nn.Module, make: Made) -> torch.optim.Optimizer:
    optimizer = make(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    return optimizer


def saved(path: Path, tree: object) -> Path:
    torch.save(tree, path)
    return path


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_a_schema_is_named_with_its_slots(name: str, tmp_path: Path) -> None:
    model = net()
    optimizer = moved(model, OPTIMIZERS[name])
    state = optimizer.state_dict()
    path = saved(tmp_path / "run.pt", {"model": model.state_dict(), "optimizer": state})
    inspection = statekit.inspect(path)
    assert inspection.optimizer is not None and inspection.optimizer.kinds == (("torch_native", name),)
    assert [p.tensor.name for p in inspection.parameters] == ["0/weight", "1/weight"]
    tensors = {slot for slot, value in state["state"].get(0, {}).items() if isinstance(value, torch.Tensor)}
    assert {slot.name for slot in inspection.parameters[0].slots} == tensors - {"step"}
    assert inspection.totals()["elements"] == 18
    plan = statekit.plan(path, tmp_path / "out.statekit", to="statekit")
    assert plan.headline == f"BITWISE; unknown: the rule of {name}"


def test_optimizers_of_others_are_told_by_what_they_keep(tmp_path: Path) -> None:
    weight = torch.zeros(4, 3)
    lion = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}
    eight = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": [0]}
    parts = {key: torch.zeros(256) for key in ("qmap1", "qmap2", "absmax1", "absmax2")}
    bytes_ = {key: torch.zeros(4, 3, dtype=torch.uint8) for key in ("state1", "state2")}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "Lion": (lion, {"exp_avg": weight}),
        "8-bit Adam": (eight, {"step": 1, **bytes_, **parts}),
    }
    for name, (group, slots) in cases.items():
        optimizer = {"state": {0: slots}, "param_groups": [group]}
        path = saved(tmp_path / f"{name}.pt", {"model": {"w": weight}, "optimizer": optimizer})
        inspection = statekit.inspect(path)
        assert inspection.optimizer is not None and str(inspection.optimizer.variant).startswith(name)
        names = {slot for slot, value in slots.items() if isinstance(value, torch.Tensor)}
        assert {slot.name for slot in inspection.parameters[0].slots} == names


def test_an_optimizer_that_nobody_knows_shows_its_slots(tmp_path: Path) -> None:
    slots = {"surprise": torch.zeros(4, 3)}
    optimizer = {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    inspection = statekit.inspect(
        saved(tmp_path / "x.pt", {"model": {"w": torch.zeros(4, 3)}, "optimizer": optimizer})
    )
    assert inspection.optimizer is not None and inspection.optimizer.kinds == (("torch_native", None),)
    assert [slot.name for slot in inspection.parameters[0].slots] == ["surprise"]


@pytest.mark.parametrize("key", ["", "model", "net", "state_dict"])
def test_weights_alone_are_weights(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = net().state_dict()
    path = saved(tmp_path / "weights.pt", {key: weights, "epoch": 3} if key else weights)
    inspection = statekit.inspect(path)
    assert inspection.contents is not None and inspection.contents.startswith("weights alone")
    assert [p.tensor.name for p in inspection.parameters] == ["0/weight", "1/weight"]
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "weights alone" in shown and "18 parameter values" in shown and "No layout fits" not in shown


def test_an_optimizer_alone_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    for make, name in ((torch.optim.AdamW, "torch Adam or AdamW"), (torch.optim.RMSprop, "torch RMSprop")):
        path = saved(tmp_path / "optimizer.pt", moved(model, make).state_dict())
        inspection = statekit.inspect(path)
        assert inspection.contents is not None and inspection.contents.startswith(
            f"{name}, alone: the state of 2"
        )
        assert {tensor.name for tensor in inspection.others} >= {"state/0/step"}
        assert main(["inspect", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["contents"] == inspection.contents
        assert main(["inspect", str(path)]) == 0
        assert "0 parameter values" not in capsys.readouterr().out


def test_a_file_of_other_tensors_counts_no_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "x.pt", {"a": {"b": {"c": [torch.ones(3)]}}})
    assert main(["inspect", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1 other tensor" in shown and "0 parameter values" not in shown


def test_parts_are_found_under_other_keys_where_they_are_unique(tmp_path: Path) -> None:
    model = net()
    optimizer = moved(model, torch.optim.AdamW)
    tree = {"net": model.state_dict(), "train": {"opt": optimizer.state_dict()}, "epoch": 3}
    path = saved(tmp_path / "run.pt", tree)
    statekit.convert(path, tmp_path / "back.pt", layout="torch-optim")
    with statekit.open(path) as state:
        assert state.counts.updates == 1 and list(state.params) == ["0/weight", "1/weight"]
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back["epoch"] == 3 and back["net"].keys() == tree["net"].keys()  # type: ignore[attr-defined]  # a field of this kind alone
    assert back["train"]["opt"]["state"].keys() == {0, 1}


def ambiguous(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Saves weights and their average, and the optimizer, each under a key of its own."""
    model = net()
    optimizer = moved(model, torch.optim.AdamW)
    average = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    tree = {"net": model.state_dict(), "other": average, "opt": optimizer.state_dict(), "model": "mlp"}
    return saved(folder / "run.pt", tree), tree


def test_keys_tell_the_parts_where_several_may_be_meant(tmp_path: Path) -> None:
    path, tree = ambiguous(tmp_path)
    with pytest.raises(StateError, match=r"found: net, other(.|\n)*model_key='net'"):
        statekit.open(path)
    contents = statekit.inspect(path).contents
    assert contents is not None and "weights at net or other" in contents
    for key in ("net", "other"):
        target = tmp_path / f"{key}.pt"
        statekit.convert(path, target, layout="torch-optim", model_key=key, optimizer_key="opt")
        with statekit.open(path, model_key=key) as before, statekit.open(target) as after:
            for state in (before, after):
                assert (state.params["0/weight"].read() == tree[key]["0.weight"].numpy()).all()
        assert torch.load(target, weights_only=True)["model"] == "mlp"
    assert main(["inspect", str(path), "--model-key", "net"]) == 0
    assert (
        main(["convert", str(path), str(tmp_path / "neutral"), "--to", "statekit", "--model-key", "net"]) == 0
    )


@pytest.mark.parametrize("keys", [{"model_key": "nets"}, {"optimizer_key": "net"}])
def test_a_key_without_such_a_part_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    path, _ = ambiguous(tmp_path)
    with pytest.raises(UsageError, match=r"net(.|\n)*other|expected: opt"):
        statekit.open(path, **keys)


def test_signatures_name_schemas_that_exist() -> None:
    assert {one.schema for one in signatures() if one.schema} <= set(schema_names())
    assert len({one.name for one in signatures()}) == len(signatures())
