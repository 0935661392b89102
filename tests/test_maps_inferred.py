"""A map between two versions of one's own codebase: proposed from names and shapes, asked for where they end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.cli.main import main
from statekit.errors import UsageError
from statekit.maps.inference import infer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[1] / "docs" / "refactoring.md"
OLD = {
    "enc.0.attn.w": (8, 8), "enc.0.mlp.gate": (16, 8), "enc.0.mlp.up": (16, 8), "enc.0.scale": (1, 8),
    "enc.1.attn.w": (8, 8), "enc.1.mlp.gate": (16, 8), "enc.1.mlp.up": (16, 8), "enc.1.scale": (1, 8),
    "head.w": (8, 5),
}  # fmt: skip
NEW = {
    "blocks.0.attn.w": (8, 8), "blocks.0.mlp.gate_up": (32, 8), "blocks.0.scale": (8,),
    "blocks.1.attn.w": (8, 8), "blocks.1.mlp.gate_up": (32, 8), "blocks.1.scale": (8,),
    "head.w": (8, 5),
}  # fmt: skip


def paths(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.replace(".", "/"): shape for name, shape in shapes.items()}


def saved(shapes: Mapping[str, tuple[int, ...]], path: Path, updates: int = 2) -> dict[str, Any]:
    """Saves a run of AdamW; returns its tensors by name."""
    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = torch.optim.AdamW(params.items(), lr=0.1)
    for _ in range(updates):
        for param in params.values():
            param.grad = torch.randn_like(param)
        optimizer.step()
    torch.save({"model": params, "optimizer": optimizer.state_dict()}, path)
    return {name: (param, optimizer.state[param]) for name, param in params.items()}


def test_names_and_shapes_settle_what_they_tell_and_ask_for_the_order_of_what_is_joined() -> None:
    proposal = infer(paths(OLD), paths(NEW))
    settled = {one.target: (one.sources, one.because) for one in proposal.inferred}
    assert settled["head/w"] == (("head/w",), "its name")
    assert settled["blocks/1/attn/w"][0] == ("enc/1/attn/w",)
    assert settled["blocks/0/scale"][0] == ("enc/0/scale",)
    asked = {one.target: one.fitting for one in proposal.questions}
    assert asked.keys() == {"blocks/0/mlp/gate_up", "blocks/1/mlp/gate_up"}
    assert set(asked["blocks/0/mlp/gate_up"]) == {
        "enc/0/mlp/gate+enc/0/mlp/up",
        "enc/0/mlp/up+enc/0/mlp/gate",
    }
    assert not proposal.complete


def test_two_parameters_that_may_be_each_other_are_asked_for() -> None:
    proposal = infer({"a/first": (4, 4), "a/second": (4, 4)}, {"b/one": (4, 4), "b/two": (4, 4)})
    assert [one.fitting for one in proposal.questions] == [("a/first", "a/second")] * 2
    answered = infer(
        {"a/first": (4, 4), "a/second": (4, 4)}, {"b/one": (4, 4), "b/two": (4, 4)}, ["a/second=b/one"]
    )
    assert {one.target: one.sources for one in answered.inferred} == {
        "b/one": ("a/second",),
        "b/two": ("a/first",),
    }
    with pytest.raises(UsageError, match="a/third"):
        infer({"a/first": (4, 4)}, {"b/one": (4, 4)}, ["a/third=b/one"])


def test_the_page_shows_what_the_commands_print_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    before = saved(OLD, tmp_path / "old.pt")
    saved(NEW, tmp_path / "new.pt", updates=1)
    shells = re.findall(r"```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for shell in shells for line in shell.replace("\\\n", " ").splitlines() if line.strip()]
    ends = []
    for command in commands:
        ends.append((main(command.split()[1:]), capsys.readouterr().out))
    assert [end for end, _ in ends] == [1, 0, 0], ends
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert shown.split() == ends[0][1].split()
    lines = json.loads((tmp_path / "refactored.json").read_text(encoding="utf-8"))["parameters"]
    assert len(lines) == 4  # all layers are one line
    with statekit.open(tmp_path / "run.pt") as opened:
        state = opened.state
        for i in range(2):
            for slot, name in ((None, "param"), ("m", "exp_avg"), ("v", "exp_avg_sq")):
                parts = [before[f"enc.{i}.mlp.{part}"] for part in ("gate", "up")]
                whole = [
                    param.detach().numpy() if slot is None else kept[name].numpy() for param, kept in parts
                ]
                path = f"blocks/{i}/mlp/gate_up"
                tensor = state.params[path] if slot is None else state.slots[path][slot]
                assert np.array_equal(tensor.read(), np.concatenate(whole))
            assert state.params[f"blocks/{i}/scale"].shape == (8,)
