"""doctor: each silent fault of a file is found by its name, and nothing in what the originals wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_diff import T5X, altered

import statekit
from goldens import GOLDEN
from statekit.attestation.doctor import doctor
from statekit.cli.main import DONE, WANTING, main
from statekit.tensors.tensor import DTYPES, in_memory

Change = Callable[[Any, Any, Any], None]


def of_slot(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(model: Any, slots: Any, group: Any) -> None:
        slots[name] = in_memory(np.asarray(change(slots[name].read().copy())))

    return changed


def negated(values: Any) -> Any:
    values.flat[0] = -values.flat[0]
    return values


def spoilt(values: Any) -> Any:
    values.flat[3] = np.nan
    return values


def late(model: Any, slots: Any, group: Any) -> None:
    group["step_offset"] = 1000


FAULTS: dict[str, Change] = {
    "second-moment-negative": of_slot("v_row", negated),
    "not-finite": of_slot("m", spoilt),
    "slots-narrow": of_slot("v_row", lambda values: values.astype(DTYPES["bfloat16"])),
    "step-offset": late,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_parameter_is_found(name: str, tmp_path: Path) -> None:
    [one] = doctor(altered(tmp_path / "run.pt", FAULTS[name]))
    assert [finding.name for finding in one.findings] == [name], one.findings


def changed_all(path: Path, change: Callable[[dict[int, Any], Any], None]) -> Path:
    from torch_files import save

    from statekit.conversion.open_state import open_state
    from statekit.conversion.registry import layout

    with open_state(T5X) as opened:
        tree: Any = layout("statekit-torch").encode(opened.state).tree
        change(tree["optimizer"]["state"], tree)
        return save(path, tree)


def zeroed(state: dict[int, Any], tree: Any) -> None:
    for slots in state.values():
        slots["m"] = in_memory(np.zeros(slots["m"].shape, np.float32))


def copied(state: dict[int, Any], tree: Any) -> None:
    group = tree["optimizer"]["param_groups"][0]
    first, second = group["param_names"][:2]
    numbers = dict(zip(group["param_names"], group["params"], strict=True))
    tree["model"][second] = in_memory(tree["model"][first].read() + 1)
    state[numbers[second]] = dict(state[numbers[first]])
    group["rules"][second] = group["rules"][first]


def test_moments_that_are_zero_or_copies_everywhere_are_found(tmp_path: Path) -> None:
    [one] = doctor(changed_all(tmp_path / "zero.pt", zeroed))
    assert [finding.name for finding in one.findings] == ["moments-zero"]
    [one] = doctor(changed_all(tmp_path / "copied.pt", copied))
    assert [finding.name for finding in one.findings] == ["slots-duplicated"]


def test_moments_that_a_later_step_repeats_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (4, 8):
        shutil.copytree(T5X / "checkpoint_4", tmp_path / f"checkpoint_{step}")
    one, two = doctor(tmp_path)
    assert one.passed
    assert {finding.name for finding in two.findings} == {"files"}  # it is called 8, and says 4
    statekit.convert(T5X, tmp_path / "run", to="t5x", param_dtype="bfloat16")
    shutil.rmtree(tmp_path / "checkpoint_8")
    shutil.copytree(tmp_path / "run" / "checkpoint_4", tmp_path / "checkpoint_8")
    (tmp_path / "checkpoint_8" / "statekit.json").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "run")
    assert "moments-stale" in {finding.name for finding in doctor(tmp_path)[1].findings}
    assert main(["doctor", str(tmp_path), "--json"]) == WANTING
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["passed"]) == ("statekit.doctor/1", False)
    assert main(["doctor", str(tmp_path), "--step", "4"]) == DONE


@pytest.mark.parametrize(
    "system", ["t5x", "torch_adafactor", "hf_adafactor", "optax_adafactor", "t2t", "mesh_tf"]
)
def test_nothing_is_found_in_what_the_originals_wrote(system: str) -> None:
    for folder in sorted((GOLDEN / system).iterdir())[:2]:
        if (folder / "checkpoint").is_dir():
            for one in doctor(folder / "checkpoint"):
                assert one.passed, (folder.name, [finding.to_json() for finding in one.findings])


@pytest.mark.torch
def test_two_biases_that_are_added_have_the_same_moments_honestly(tmp_path: Path) -> None:
    import torch

    model = torch.nn.LSTM(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 1, 4))[0].sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    [one] = doctor(tmp_path / "run.pt")
    assert "slots-duplicated" not in [finding.name for finding in one.findings]
