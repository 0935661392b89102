"""`statekit inspect`: what people and programs see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from counting import calls

from fakes import Fake
from goldens import GOLDEN, bundles
from statekit.cli.main import DONE, FAILED, USAGE, main
from statekit.conversion.inspection import ParameterSummary, TensorSummary
from statekit.files.checkpoint import Finding
from statekit.pages.module_tree import Module, module_tree, rows

T5X = bundles("t5x")


def summaries(*paths: str) -> list[ParameterSummary]:
    return [ParameterSummary(TensorSummary(path, (2,), "float32", 8), (), 0, None) for path in paths]


def tree(parameters: list[ParameterSummary]) -> Module[ParameterSummary]:
    return module_tree((parameter.tensor.name, parameter) for parameter in parameters)


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments)]) == DONE
    return capsys.readouterr().out


def test_parameters_stand_below_their_modules() -> None:
    parameters = summaries(
        "enc/l0/wi/kernel", "enc/l0/wo/kernel", "enc/norm", "dec.l0.weight", "dec.l0.bias", "top"
    )
    lines, folded = rows(tree(parameters), 100)
    assert [(row.depth, row.label, len(row.items), row.module) for row in lines] == [
        (0, "top", 1, False),
        (0, "enc", 3, True),
        (1, "norm", 1, False),
        (1, "l0", 2, True),
        (2, "wi/kernel", 1, False),
        (2, "wo/kernel", 1, False),
        (0, "dec/l0", 2, True),
        (1, "weight", 1, False),
        (1, "bias", 1, False),
    ]
    assert not folded


def test_names_that_coincide_stay_two() -> None:
    lines, _ = rows(tree(summaries("a/b", "a.b")), 100)
    assert sum(not row.module for row in lines) == 2


def test_what_is_too_long_is_folded_into_modules() -> None:
    parameters = summaries(*(f"stack/layer_{i}/m{j}/kernel" for i in range(10) for j in range(10)))
    lines, folded = rows(tree(parameters), 50)
    assert folded
    assert [(row.depth, row.label) for row in lines] == [
        (0, "stack"),
        *((1, f"layer_{i}") for i in range(10)),
    ]
    assert [row.depth for row in rows(tree(parameters), 5)[0]] == [0]


def test_thousands_without_a_module_are_folded_too() -> None:
    assert rows(tree(summaries(*map(str, range(1000)))), 100) == ([], True)


@pytest.mark.parametrize("case", T5X, ids=lambda path: path.name)
@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint_orbax"])
def test_every_recorded_checkpoint_is_described(
    case: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = json.loads((case / "meta.json").read_text(encoding="utf-8"))
    data = json.loads(inspected(capsys, case / folder, "--json"))
    assert data["format"] == "statekit.inspect/1"
    assert data["container"]["name"] == ("t5x" if folder == "checkpoint" else "orbax")
    assert (data["layout"]["name"], data["optimizer"]["schema"]) == ("t5x", "adafactor")
    assert data["optimizer"]["updates"] == meta["checkpoint_step"]
    shapes = {parameter["path"]: parameter["shape"] for parameter in data["parameters"]}
    assert shapes == {path: entry["shape"] for path, entry in meta["params"].items()}


def test_a_table_shows_parameters_with_their_slots(capsys: pytest.CaptureFixture[str]) -> None:
    shown = inspected(capsys, GOLDEN / "t5x" / "momentum_f32" / "checkpoint")
    lines = {line.split()[0]: " ".join(line.split()) for line in shown.splitlines() if line.strip()}
    assert lines["checkpoint"].endswith("t5x/momentum_f32/checkpoint/checkpoint_4")
    assert lines["step"] == "step 4 updates done; a learning-rate schedule goes on at its step 4"
    assert lines["optimizer"] == "optimizer adafactor, variant t5x"
    assert lines["wi_0/kernel"] == (
        "wi_0/kernel [10, 24] float32 960 B 1.1 KiB v_row [10], v_col [24], m [10, 24]"
    )
    assert lines["mlp/"] == "mlp/ 2 parameters 1.9 KiB 2.1 KiB 2 v_row, 2 v_col, 2 m"
    assert "Assumed, because the checkpoint doesn't say:" in shown


def test_slots_get_rows_and_statistics_columns(capsys: pytest.CaptureFixture[str]) -> None:
    path = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    plain = inspected(capsys, path, "--slots", "--filter", "*token_embedder*")
    rows = [line.split()[0] for line in plain.splitlines() if " float32  " in line]
    assert rows == ["token_embedder/embedding", "v_row", "v_col", "m"]
    measured = inspected(capsys, path, "--stats")
    header = next(line for line in measured.splitlines() if line.startswith("parameter"))
    assert header.split()[4:] == ["norm", "rms", "min", "max", "zeros", "NaN", "Inf"]


def test_given_hyperparameters_are_told_from_assumed_ones(capsys: pytest.CaptureFixture[str]) -> None:
    path = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    data = json.loads(inspected(capsys, path, "--json", "--hparams", "decay_rate=0.7"))
    group = data["optimizer"]["groups"][0]
    assert (group["hyperparameters"]["decay_rate"], group["known_from"]["decay_rate"]) == (0.7, "given")
    assert "assumed" in group["known_from"].values()


@pytest.mark.parametrize(("pattern", "remedy"), [("nosuch", "leave it out"), ("mlp", "try *mlp*")])
def test_a_filter_that_matches_nothing_is_an_error(
    pattern: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
    assert main(["inspect", str(path), "--filter", pattern]) == FAILED
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Nothing matches the filter" in shown.err
    assert remedy in shown.err


def test_without_a_layout_tensors_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fake({"w\x1b[2J": np.ones(3, np.float32)}, unknown=True).install(monkeypatch)
    shown = inspected(capsys, "somewhere")
    assert "none fits" in shown
    assert "w\\x1b[2J" in shown
    assert "\x1b" not in shown


def test_many_findings_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = tuple(Finding("is absent, read as fill", f"chunk {i}") for i in range(100))
    Fake({"param/a": np.ones(1, np.float32)}, updates=0, findings=findings).install(monkeypatch)
    shown = inspected(capsys, "somewhere")
    assert shown.count("is absent") == 20
    assert "and 80 more" in shown


def test_showing_grows_with_the_number_of_tensors_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.ones((4, 4), np.float32)

    def showing(params: int) -> int:
        arrays = {f"param/l_{i // 10}/m{i % 10}/kernel": array for i in range(params)}
        Fake({**arrays, **{f"slot/{n[6:]}/v": array for n in arrays}}).install(monkeypatch)

        def shown() -> None:
            text = inspected(capsys, "somewhere")
            assert f"{params} parameters, folded into modules" in text
            assert len(text.splitlines()) < 600

        return calls(shown)

    showing(500)  # what is imported or made once isn't counted
    assert showing(5000) < 11 * showing(500)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nosuchpath"], FAILED, "There is no such file or folder."),
        (["t5x/momentum_f32"], FAILED, "\n    checkpoint: t5x ("),
        (["t5x/momentum_f32"], FAILED, "\n    checkpoint_orbax: orbax ("),
        (["t5x/momentum_f32/checkpoint", "--step", "99"], FAILED, "step"),
        (["t5x/momentum_f32/checkpoint", "--from", "nosuch"], USAGE, "No container has that name"),
        (["gs://bucket/run"], USAGE, "gcloud storage cp"),
        (["t5x/momentum_f32/checkpoint", "--layout", "nosuch"], USAGE, "no layout of that name"),
        (["t5x/momentum_f32/checkpoint", "--hparams", "nonsense"], USAGE, "KEY=VALUE"),
    ],
)
def test_errors_say_what_is_wrong(
    arguments: list[str],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)  # without it nothing reads stores
    place = arguments[0] if "://" in arguments[0] else str(GOLDEN / arguments[0])
    assert main(["inspect", place, *arguments[1:]]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
