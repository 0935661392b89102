"""What Keras 3 saves of mixed precision, and by its callback for Orbax: read as the model itself had it.

The files are Keras 3.15.1's own: see tests/cases/keras3_loss_scale/make_loss_scale.py.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from statekit.cli.main import main
from statekit.conversion.open_state import open_state
from statekit.state.train_state import TrainState

CASE = Path(__file__).parent / "cases" / "keras3_loss_scale"
FORMS = ["model.keras", "model.weights.h5", "model.h5", "tf/ckpt-1", "orbax"]


def assert_as_saved(state: TrainState) -> None:
    """Compares weights and moments of all matrices, two of which have one shape."""
    expected = np.load(CASE / "expected.npz")
    kernels = [path for path in state.params if path.endswith("kernel")]
    assert len(kernels) == 3
    for path in kernels:
        layer = path.split("/")[-2]
        assert np.array_equal(state.params[path].read(), expected[f"{layer}|kernel"])
        for slot, name in (("m", "momentum"), ("v", "velocity")):
            [key] = [key for key in expected if key.endswith(f"sequential_{layer}_kernel_{name}")]
            assert np.array_equal(state.slots[path][slot].read(), expected[key])


@pytest.mark.parametrize("form", FORMS)
def test_the_optimizer_inside_a_loss_scale_is_read_with_its_own_count(form: str) -> None:
    with open_state(CASE / form) as opened:
        state = opened.state
        assert state.counts.updates == 6
        hyperparameters = state.optimizer.groups[0].hyperparameters
        assert hyperparameters["learning_rate"] == np.float32(0.01)
        if form in ("model.keras", "model.h5", "orbax"):  # which have the config
            assert (hyperparameters["weight_decay_rate"], hyperparameters["beta1"]) == (0.02, 0.8)
        assert_as_saved(state)


def of_optimizer(path: Path) -> tuple[dict[str, bytes], Any]:
    """Returns the values that a file has of its optimizer, and the optimizer's record in the config."""
    content, record = path.read_bytes(), None
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            content = archive.read("model.weights.h5")
            record = json.loads(archive.read("config.json"))["compile_config"]["optimizer"]
    values = dict[str, bytes]()

    def take(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and name.startswith("optimizer"):
            values[name] = node[()].tobytes()

    with h5py.File(io.BytesIO(content), "r") as file:
        file.visititems(take)
    return values, record


@pytest.mark.parametrize("file", ["model.keras", "model.weights.h5", "adafactor.keras"])
def test_a_loss_scale_stays_around_its_optimizer(file: str, tmp_path: Path) -> None:
    """Seen red: it was gone, and Keras, whose model of mixed precision has one, passed over all variables."""
    target = tmp_path / file
    assert main(["convert", str(CASE / file), str(target)]) == 0
    (values, record), (expected, before) = of_optimizer(target), of_optimizer(CASE / file)
    assert values == expected and any("inner_optimizer" in name for name in values)
    assert (record or {}).get("class_name") == (before or {}).get("class_name")
    if file.startswith("model"):
        with open_state(target) as opened:
            assert_as_saved(opened.state)


def test_the_lines_of_weights_put_the_loss_scale_around_the_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["resume", str(CASE / "model.weights.h5")]) == 0
    assert "keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["model.weights.h5", "model.keras"])
def test_printed_lines_keep_a_rate_that_was_given(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(CASE / file), "--hparams", "learning_rate=0.5"]) == 0
    assert "model.optimizer.inner_optimizer.learning_rate = 0.5" in capsys.readouterr().out


def test_epochs_in_the_names_of_orbax_folders_are_no_steps(tmp_path: Path) -> None:
    assert main(["doctor", str(CASE / "orbax")]) == 0
    assert main(["convert", str(CASE / "orbax"), str(tmp_path / "again.weights.h5")]) == 0
    with open_state(tmp_path / "again.weights.h5") as opened:
        assert_as_saved(opened.state)


def test_the_callbacks_own_form_is_read_only_and_the_remedy_names_what_keras_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras assigns by name and skips a name that doesn't fit. Seen red: "can't hold this value, found: bool"."""
    target = tmp_path / "again"
    assert main(["convert", str(CASE / "orbax"), str(target), "--to", "orbax", "--layout", "keras"]) == 2
    refusal = capsys.readouterr().err
    assert "OrbaxCheckpoint writes is read only" in refusal and "write .keras or .weights.h5" in refusal
    assert not target.exists()
