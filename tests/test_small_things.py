"""What people meet first when something is missing, empty, cut off or misspelled: the error says it, and what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from goldens import GOLDEN
from statekit.cli.main import main
from statekit.cli.output import from_here, shown_path

T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a T5X run, a torch file that statekit wrote, and what is broken."""
    folder = tmp_path_factory.mktemp("things")
    shutil.copytree(T5X, folder / "t5x-ckpt")
    assert main(["convert", str(folder / "t5x-ckpt"), str(folder / "run.pt")]) == 0
    (folder / "empty.pt").touch()
    (folder / "nothing").mkdir()
    (folder / "hollow").mkdir()
    (folder / "hollow" / "part.0").touch()
    (folder / "cut.pt").write_bytes((folder / "run.pt").read_bytes()[:-3000])
    (folder / "foreign.pt").write_text("mine")
    return folder


def test_no_container_looks_into_folders_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(1500):
        (tmp_path / f"checkpoint-{number}").mkdir()
    asked: list[str] = []

    def ask(*names: object) -> list[str]:
        asked.append(f"{names}")
        return []

    monkeypatch.setattr("statekit.conversion.registry._asked", ask)
    assert main(["inspect", f"{tmp_path}"]) != 0
    assert "The folder is empty." in capsys.readouterr().err and not asked


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("inspect empty.pt", ["The file is empty.", "0 bytes"]),
        ("inspect nothing", ["The folder is empty.", "no file"]),
        ("inspect hollow", ["The folder is empty.", "1 file of 0 bytes"]),
        ("inspect cut.pt", ["A zip archive is cut off", "copy or save it again"]),
        ("inspect t5x-ckt", ["did you mean t5x-ckpt?"]),
        ("inspect t5x-ckt/checkpoint_4", ["there is no t5x-ckt", "did you mean t5x-ckpt?"]),
        ("diff run.pt runn.pt", ["did you mean run.pt?"]),
        ("convert t5x-ckpt new.pt --layout adamw", ["adamw is an optimizer", "torch-optim"]),
        ("convert t5x-ckpt new.pt --layout statekit_torch", ["did you mean statekit-torch?"]),
        ("convert t5x-ckpt new --to huggingface", ["`statekit formats`"]),
        ("convert t5x-ckpt foreign.pt", ["The target exists.", "--replace-foreign"]),
        ("convert t5x-ckpt hollow --to t5x", ["The target exists.", "--replace-foreign"]),
        ("convert t5x-ckpt run.pt", ["The target exists.", "or pass --replace"]),
    ],
)
def test_an_error_says_what_is_wrong_and_what_to_do(
    folder: Path,
    line: str,
    says: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(line.split()) in (2, 3)
    error = capsys.readouterr().err
    assert [words for words in says if words not in error] == [], error
    assert "found: \n" not in error


def test_steps_come_in_the_order_of_their_numbers(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (40, 5, 100):
        shutil.copy(folder / "run.pt", tmp_path / f"step{step}.pt")
    assert main(["inspect", str(tmp_path)]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0].strip() for line in lines if ".pt: torch" in line] == [
        "step5.pt", "step40.pt", "step100.pt",
    ]  # fmt: skip


def test_both_sides_of_a_diff_are_named_from_where_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["diff", "t5x-ckpt", str(folder / "run.pt")]) == 0
    assert capsys.readouterr().out.startswith("A: t5x-ckpt/checkpoint_4\nB: run.pt\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["inspect", "t5x-ckpt", "--step", "3"], "  at: t5x-ckpt\n"),
        (["inspect", "."], "    t5x-ckpt: t5x (t5x-ckpt/checkpoint_4/checkpoint is"),
        (["inspect", "cut.pt"], "  at: cut.pt\n"),
    ],
)  # fmt: skip
def test_an_error_names_places_from_where_one_is(
    words: list[str],
    line: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(words) == 3
    assert f"\n{line}" in capsys.readouterr().err


def test_a_sealed_checkpoint_names_its_manifest_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(T5X, tmp_path / "t5x-ckpt")
    monkeypatch.chdir(tmp_path)
    assert main(["seal", "t5x-ckpt"]) == 0
    assert main(["check", "t5x-ckpt"]) == 0
    assert " the manifest t5x-ckpt/checkpoint_4/statekit.json (sealed)" in capsys.readouterr().out
    assert shown_path(tmp_path) == "."
    assert shown_path(tmp_path / "x") == "x"
    assert from_here(f"/else{tmp_path}/x") == f"/else{tmp_path}/x"


def test_a_bar_counts_what_has_no_end_and_starts_anew_with_each_phase() -> None:
    from statekit.cli.progress_bar import Amount, TimeLeft, bar

    progress = bar("bytes")
    task = progress.add_task("reading", total=None)
    progress.update(task, completed=3 * 2**20)
    amount, left = Amount("bytes"), TimeLeft()
    assert amount.render(progress.tasks[0]).plain == "3.0 MiB"
    assert left.render(progress.tasks[0]).plain == ""
    progress.update(task, completed=4, total=4)
    progress.reset(task, description="reading again")
    progress.update(task, completed=2**20, total=2**21)
    assert not progress.tasks[0].finished
    assert amount.render(progress.tasks[0]).plain == "1.0 MiB of 2.0 MiB"


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["writing", "decoder/layers_0/encoder_decoder_attention/query/kernel"])
def test_a_bar_takes_one_line_of_the_terminal_and_shows_its_figures(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from statekit.cli.progress_bar import bar

    monkeypatch.setenv("COLUMNS", str(width))
    progress = bar("bytes")
    progress.add_task(name, total=768 * 2**20, completed=128 * 2**20)
    progress.tasks[0].finished_speed = 772.6 * 2**20
    progress.console.print(progress)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "128.0 MiB of 768.0 MiB" in shown
    assert "772.6 MiB/s" in shown


KERAS = GOLDEN / "keras" / "adamw_ema_schedule_clip" / "checkpoint" / "model.weights.h5"


def test_a_target_of_another_codebase_names_the_map_to_its_modules(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(KERAS), str(tmp_path / "run.pt")]) == 0
    assert "--map keras:torch" in capsys.readouterr().out
    assert main(["convert", str(folder / "run.pt"), str(tmp_path / "again.pt")]) == 0
    assert "--map" not in capsys.readouterr().out


@pytest.mark.torch
def test_a_model_that_does_not_fit_is_told_the_map_to_its_modules() -> None:
    import torch

    import statekit.torch
    from statekit.errors import StateError

    model = torch.nn.Linear(3, 4)
    with pytest.raises(
        StateError, match=r'do: map="keras:torch" takes it to the same modules here; or: names'
    ):
        statekit.torch.load_params(KERAS, model)
    with pytest.raises(StateError, match=r'map="keras:torch"'):
        statekit.torch.load_optimizer(KERAS, model.named_parameters())
    with pytest.raises(StateError) as plain:
        statekit.torch.load_params(GOLDEN / "torch_formats" / "adamw_trainer" / "checkpoint", model)
    assert "map=" not in str(plain.value)


def test_the_image_of_a_flattened_layer_is_read_from_kerass_config() -> None:
    from statekit.maps.keras_images import flattened_images

    def layer(kind: str, name: str, *before: str, **more: object) -> dict[str, object]:
        nodes = [{"args": [{"config": {"keras_history": [one, 0, 0]}} for one in before]}] if before else []
        return {"class_name": kind, "config": {"name": name, **more}, "inbound_nodes": nodes}

    def flatten(name: str, *before: str, **more: object) -> dict[str, object]:
        return {**layer("Flatten", name, *before, **more), "build_config": {"input_shape": [None, 6, 6, 4]}}

    def model(*layers: dict[str, object]) -> dict[str, object]:
        return {"class_name": "Functional", "config": {"layers": [*layers]}}

    image = layer("InputLayer", "image")
    assert flattened_images(
        model(
            image,
            flatten("f", "image"),
            layer("Dropout", "d", "f"),
            layer("Dense", "a", "d"),
            layer("Dense", "b", "a"),
        )
    ) == {"a": [6, 6, 4]}
    assert flattened_images(model(image, layer("Dense", "a", "image"))) == {}
    for odd in (
        model(image, layer("Reshape", "r", "image"), layer("Dense", "a", "r")),
        model(image, flatten("f", "image", data_format="channels_first"), layer("Dense", "a", "f")),
        model(
            image, flatten("f", "image"), layer("Concatenate", "c", "f", "image"), layer("Dense", "a", "c")
        ),
        model(image, flatten("f", "image"), layer("BatchNormalization", "n", "f"), layer("Dense", "a", "n")),
        model(image, layer("Dense", "a", "nowhere")),
        {"class_name": "Net", "config": {}},
    ):
        assert flattened_images(odd) is None
