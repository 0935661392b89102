"""Values of hyperparameters are checked wherever they come from: files, hints, param groups, saved states."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import statekit.torch
from formats import save, small_state
from statekit.cli.main import statekit as command
from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import open_state
from statekit.errors import StateError, UsageError

pytestmark = pytest.mark.torch


def file(folder: Path, **options: Any) -> Path:
    """Writes a file of PyTorch's AdamW, whose group says something else."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= options
    path = folder / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": saved, "step": 1}, path)
    return path


def test_what_torch_itself_wrote_is_opened(tmp_path: Path) -> None:
    with open_state(file(tmp_path)) as opened:
        assert opened.state.optimizer.groups[0].hyperparameters["beta2"] == 0.999
    with open_state(file(tmp_path, lr=torch.tensor(0.25))) as opened:
        assert opened.state.optimizer.groups[0].hyperparameters["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": "x"}, "is 'x', expected number or null @ groups/0/learning_rate"),
        ({"lr": math.nan}, "is nan, expected minimum 0, a finite number @ groups/0/learning_rate"),
        ({"lr": math.inf}, "is inf, expected minimum 0, a finite number @ groups/0/learning_rate"),
        (
            {"lr": torch.tensor(math.nan)},
            "is nan, expected minimum 0, a finite number @ groups/0/learning_rate",
        ),
        ({"lr": -1e-3}, "is -0.001, expected minimum 0"),
        ({"eps": None}, "is None, expected number @ groups/0/epsilon"),
        ({"betas": ()}, r"is (), expected 2 values @ param_groups/0/betas"),
        ({"betas": 5}, "is 5, expected 2 values @ param_groups/0/betas"),
        ({"betas": (0.9, "x")}, "is 'x', expected number @ groups/0/beta2"),
        ({"betas": (0.9, 1.5)}, "is 1.5, expected minimum 0, exclusive_maximum 1 @ groups/0/beta2"),
        ({"amsgrad": 1}, "is 1, expected boolean @ groups/0/amsgrad"),
    ],
    ids=str,
)
def test_a_value_that_cant_be_in_a_file_is_an_error_that_names_group_and_value(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    source = file(tmp_path, **options)
    with pytest.raises(StateError) as caught, open_state(source):
        pass
    assert text in str(caught.value)
    done = CliRunner().invoke(command, ["convert", str(source), str(tmp_path / "target.pt")])
    assert isinstance(done.exception, StateError) and not (tmp_path / "target.pt").exists()


@pytest.mark.parametrize(
    ("hparams", "text"),
    [
        ({"decay_rate": "x"}, "is 'x', expected number @ decay_rate"),
        ({"learning_rate": math.nan}, "is nan, expected minimum 0, a finite number @ learning_rate"),
        ({"clipping_treshold": 1.0}, "did you mean clipping_threshold?"),
    ],
    ids=str,
)
def test_a_hint_that_cant_be_is_refused(tmp_path: Path, hparams: dict[str, Any], text: str) -> None:
    source = save(small_state(), tmp_path / "run")
    with pytest.raises(UsageError) as caught, open_state(source, hints=Hints(hparams)):
        pass
    assert text in str(caught.value)


def test_a_hint_may_have_the_variants_own_name(tmp_path: Path) -> None:
    hints = Hints({"betas": [0.5, 0.75], "weight_decay": 0.25})
    with open_state(file(tmp_path), hints=hints) as opened:
        known = opened.state.optimizer.groups[0]
    assert [known.hyperparameters[n] for n in ("beta1", "beta2", "weight_decay_rate")] == [0.5, 0.75, 0.25]
    assert known.known_from["beta1"] == "given"
    with (
        pytest.raises(UsageError, match="is said twice"),
        open_state(file(tmp_path), hints=Hints({"betas": [0.5, 0.75], "beta1": 0.5})),
    ):
        pass


@pytest.mark.parametrize(
    "change", [{"lr": "x"}, {"lr": math.nan}, {"epsilon": None}, {"beta1": 2.0}], ids=str
)
def test_a_saved_state_with_a_value_that_cant_be_is_not_loaded(change: dict[str, Any]) -> None:
    params = {"w": torch.nn.Parameter(torch.ones(3))}
    optimizer = statekit.torch.AdamW(params.items(), lr=0.5)
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= change
    with pytest.raises(StateError, match=f"group 0/{next(iter(change))}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
