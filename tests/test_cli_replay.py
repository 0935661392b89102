"""`statekit replay`: what is replayed, what begins with fresh slots, and what is listed with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from goldens import GOLDEN
from statekit.cli import replay_command
from statekit.cli.main import DONE, FAILED, USAGE, WANTING, main
from statekit.errors import NotFoundError
from statekit.verify.contract import DESCRIPTION, GRADS, TRAJECTORY
from statekit.verify.recording import open_recording, to_json
from statekit.verify.replay import Replay, Subject
from statekit.verify.systems.tensorflow1 import adafactor_arguments

CASE = GOLDEN / "t5x" / "momentum_f32"
INCOMPARABLE = {
    "t5x_train/t5_10_tied", "t5x_train/t5_11_scanned", "t5x_train/t5_11_unscanned",
    "torch_formats/adafactor_deepspeed_zero1", "torch_formats/adafactor_fsdp1_full",
}  # fmt: skip
"""States 8, 10 and 16 only; Adafactor on the pieces that ranks hold."""


def replayed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", "--json", *map(str, arguments)])
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, data


def copied(folder: Path, **changes: Any) -> Path:
    """A recording that shares the files of another and is described otherwise."""
    folder.mkdir()
    for name in (GRADS, TRAJECTORY):
        (folder / name).symlink_to(CASE.resolve() / name)
    (folder / DESCRIPTION).write_text(json.dumps({**to_json(open_recording(CASE)), **changes}))
    return folder


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    """A recording whose checkpoint no container reads."""
    folder = copied(tmp_path / "unreadable", checkpoint={"path": "state.bin", "step": 4})
    (folder / "state.bin").write_bytes(b"whatever")
    return folder


def unmoved(subject: Subject, *_: object) -> Replay:
    """Stands for a replay that takes no step."""
    return Replay(subject.recording.name, "numpy", subject.start, (0, 0), (), (), {})


@pytest.mark.parametrize("steps", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_path_is_replayed_or_listed_with_its_reason(
    steps: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not steps:
        monkeypatch.setattr(replay_command, "replayed", unmoved)
    paths = sorted(GOLDEN.glob("*/*"))
    code, data = replayed(capsys, *paths)
    assert code == DONE and data["passed"]
    shown = {result["recording"] for result in data["results"]}
    assert shown | data["skipped"].keys() == {f"{path.parent.name}/{path.name}" for path in paths}
    assert not shown & data["skipped"].keys()
    complete = {path for path in paths if (path / GRADS).is_file() and (path / TRAJECTORY).is_file()}
    assert shown == {f"{path.parent.name}/{path.name}" for path in complete} - INCOMPARABLE
    assert all(data["skipped"].values()) and all(data["fresh"].values())
    assert data["fresh"].keys() == {r["recording"] for r in data["results"] if r["start"] == "init"}


def test_where_the_checkpoint_cant_be_read_a_run_begins_with_fresh_slots(
    capsys: pytest.CaptureFixture[str], unreadable: Path
) -> None:
    code, data = replayed(capsys, unreadable, CASE)
    assert code == DONE
    assert [result["start"] for result in data["results"]] == ["init", "checkpoint"]
    (why,) = data["fresh"].values()
    assert "No container fits" in why and "state.bin" in why
    assert main(["replay", str(unreadable)]) == DONE
    assert "from fresh slots" in capsys.readouterr().out


def test_a_run_without_a_checkpoint_begins_with_fresh_slots(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, data = replayed(capsys, copied(tmp_path / "bare", checkpoint=None))
    assert code == DONE
    assert list(data["fresh"].values()) == ["The recording has no checkpoint. (none)"]


def test_a_start_that_was_asked_for_is_never_replaced(
    capsys: pytest.CaptureFixture[str], unreadable: Path
) -> None:
    code, data = replayed(capsys, "--start", "checkpoint", unreadable, CASE)
    assert code == DONE
    assert [result["start"] for result in data["results"]] == ["checkpoint"]
    assert [name.rpartition("/")[2] for name in data["skipped"]] == ["unreadable"]
    assert replayed(capsys, "--start", "checkpoint", unreadable)[0] == FAILED
    capsys.readouterr()
    assert main(["replay", "--checkpoint", str(unreadable / "state.bin"), str(CASE)]) == FAILED
    assert "No container fits" in capsys.readouterr().err


def test_states_that_dont_follow_one_another_are_no_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "gap"
    folder.mkdir()
    (folder / "meta.json").write_text('{"system": "t5x"}')
    save_file({"1/a": np.ones(1)}, folder / GRADS)
    save_file({"0/param/a": np.ones(1), "2/param/a": np.ones(1)}, folder / TRAJECTORY)
    code, data = replayed(capsys, folder, CASE)
    assert code == DONE
    assert [why for why in data["skipped"].values() if "states 0, 2" in why]


def test_a_device_is_named_with_the_verdict_and_refused_where_it_is_not_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    # PyTorch's second CPU: all of the same arithmetic, under a name of its own.
    code, data = replayed(capsys, CASE, "--backend", "torch", "--device", "cpu:0")
    assert code == DONE
    assert [result["backend"] for result in data["results"]] == ["torch on cpu:0"]
    for device, said in (
        ("cuda:7", "no such device"),
        ("meta", "no such device"),
        ("nowhere", "no such device"),
    ):
        assert main(["replay", str(CASE), "--backend", "torch", "--device", device]) == USAGE
        assert said in capsys.readouterr().err
    assert main(["replay", str(CASE), "--device", "cuda"]) == USAGE
    assert "numpy on cuda" in capsys.readouterr().err


def test_a_difference_is_found_wanting(capsys: pytest.CaptureFixture[str]) -> None:
    code, data = replayed(capsys, "--hparams", "beta1=0.8", CASE)
    assert code == WANTING and not data["passed"]


def test_a_hyperparameter_that_nobody_knows_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--hparams", "decay_rat=0.7", str(CASE)]) == USAGE
    assert "did you mean decay_rate?" in capsys.readouterr().err


def altered(folder: Path, case: str, change: Callable[[dict[str, Any]], object]) -> Path:
    """A recording that shares the files of a golden one, whose meta.json is changed."""
    source = (GOLDEN / case).resolve()
    folder.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != "meta.json":
            (folder / entry.name).symlink_to(entry)
    meta = json.loads((source / "meta.json").read_text())
    change(meta)
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


STRANGE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "a link among the arguments": (
        "optax_adafactor/adafactor_orbax_v1",
        lambda meta: meta["hyperparameters"].update(add_decayed_weights=0.01),
    ),
    "a link in the name": (
        "optax_adafactor/adafactor_orbax_v1",
        lambda meta: meta.update(optimizer="optax.chain(adafactor, add_decayed_weights)"),
    ),
    "Keras": (
        "keras/adamw_ema_schedule_clip",
        lambda meta: meta["hyperparameters"].update(add_decayed_weights=1),
    ),
    "MXNet": (
        "mxnet_lans/zero_grad_nan",
        lambda meta: meta["hyperparameters"].update(add_decayed_weights=1),
    ),
    "Tensor2Tensor": (
        "t2t/late_beta1_scaled_extlr",
        lambda meta: meta["hyperparameters"].update(add_decayed_weights=1),
    ),
    "PyTorch, in a group": (
        "torch_adafactor/adafactor_bf16",
        lambda meta: meta["extra"]["param_groups"][0].update(add_decayed_weights=1),
    ),
    "Transformers, in a group": (
        "hf_adafactor/fixedlr_scale_beta1_wd",
        lambda meta: meta["extra"]["param_groups"][0].update(add_decayed_weights=1),
    ),
    "icefall": (
        "scaled_adam/gptsovits_basic",
        lambda meta: meta["hyperparameters"].update(add_decayed_weights=1),
    ),
    "T5X": ("t5x/momentum_f32", lambda meta: meta["hyperparameters"].update(add_decayed_weights=1)),
}


@pytest.mark.parametrize("where", STRANGE)
def test_what_a_recording_says_and_nobody_knows_is_refused_by_name(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, change = STRANGE[where]
    assert main(["replay", "--start", "init", str(altered(tmp_path / "one", case, change))]) != DONE
    assert "add_decayed_weights" in capsys.readouterr().err


def test_a_bad_recording_never_hides_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = copied(tmp_path / "damaged")
    (damaged / DESCRIPTION).write_text("{")
    name, change = STRANGE["Keras"]
    strange = altered(tmp_path / "strange", name, change)
    bare = altered(tmp_path / "bare", name, lambda meta: meta.pop("extra"))
    code, data = replayed(capsys, damaged, strange, CASE, bare)
    assert code == FAILED and not data["passed"]
    assert [result["passed"] for result in data["results"]] == [True]
    assert {name.rpartition("/")[2] for name in data["failed"]} == {"damaged", "strange", "bare"}
    assert "add_decayed_weights" in next(why for name, why in data["failed"].items() if "strange" in name)
    assert main(["replay", str(damaged), str(CASE)]) == FAILED
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "adafactor_decay_rate_pow(exponent=0.7, offset=0)",
            {"decay_type": "pow", "decay_rate": 0.7, "step_offset": 0},
        ),
        ("adafactor_decay_rate_pow(0.6, 3)", {"decay_type": "pow", "decay_rate": 0.6, "step_offset": 3}),
        ("adafactor_decay_rate_pow(0.6, offset=3)", {"decay_rate": 0.6, "step_offset": 3}),
        ("adafactor_decay_rate_adam(beta2=0.97)", {"decay_type": "adam", "beta2": 0.97}),
    ],
)
def test_a_decay_in_words_is_read(said: str, expected: dict[str, Any]) -> None:
    read = adafactor_arguments({"decay_rate": said})
    assert expected.items() <= read.items()


@pytest.mark.parametrize(
    "said", ["adafactor_decay_rate_pow(power=0.7)", "adafactor_decay_rate_pow(1, 2, 3)", "my_decay(0.7)"]
)
def test_a_decay_in_unknown_words_is_refused(said: str) -> None:
    with pytest.raises(NotFoundError):
        adafactor_arguments({"decay_rate": said})


@pytest.mark.jax
@pytest.mark.parametrize("every", [2, 3])
def test_an_update_of_several_gradients_is_replayed(
    every: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax
    import optax

    options = {"learning_rate": 0.02, "min_dim_size_to_factor": 4, "multiply_by_parameter_scale": True}
    inner = optax.adafactor(**options)
    optimizer, rng = optax.MultiSteps(inner, every), np.random.default_rng(3)
    params: Any = {"w": jax.numpy.asarray(rng.normal(size=(6, 8)).astype(np.float32))}
    state, grads, ema = optimizer.init(params), {}, {}

    def hold(step: int) -> None:
        ema[f"{step}/param/w"] = np.asarray(params["w"])
        first = state.inner_opt_state[0]
        for name in ("v_row", "v_col", "v"):
            ema[f"{step}/slot/w/inner_opt_state.0.{name}"] = np.asarray(getattr(first, name)["w"])
        ema[f"{step}/slot/w/acc_grads"] = np.asarray(state.acc_grads["w"])
        ema[f"{step}/global/inner_opt_state.0.count"] = np.asarray(first.count)
        ema[f"{step}/global/mini_step"] = np.asarray(state.mini_step)
        ema[f"{step}/global/gradient_step"] = np.asarray(state.gradient_step)

    step = jax.jit(optimizer.update)
    hold(0)
    for number in range(1, 3 * every + 1):
        grads[f"{number}/w"] = rng.normal(size=(6, 8)).astype(np.float32)
        updates, state = step({"w": grads[f"{number}/w"]}, state, params)
        params = optax.apply_updates(params, updates)
        hold(number)
    meta = {
        "system": "optax_adafactor", "optimizer": f"optax.MultiSteps(adafactor, {every})",
        "hyperparameters": {
            **options, "decay_rate": 0.8, "decay_offset": 0, "clipping_threshold": 1.0, "momentum": None,
            "weight_decay_rate": None, "eps": 1e-30, "factored": True,
        },
        "steps": 3 * every, "checkpoint_step": 0, "checkpoint": {"files": ["none"]},
        "params": {"w": {"shape": [6, 8], "dtype": "float32"}}, "learning_rate": [0.02] * 3 * every, "extra": {},
    }  # fmt: skip
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    save_file(grads, tmp_path / GRADS)
    save_file(ema, tmp_path / TRAJECTORY)
    code, data = replayed(capsys, "--start", "init", tmp_path)
    assert code == DONE and data["results"][0]["steps"] == [0, 3]


def test_what_of_a_gin_file_cannot_be_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gin = tmp_path / "run.gin"
    gin.write_text("adafactor.Adafactor.decay_rate = 0.8\nadafactor.Adafactor.epsilon1 = @eps()\n")
    assert main(["replay", str(tmp_path), "--hparams", str(gin)]) == FAILED  # it is no recording
    assert "Note: Adafactor.epsilon1 is @eps() in" in capsys.readouterr().err


def test_free_runs_that_would_be_written_to_one_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last backend's, or the last recording's of a name, was left, without a word."""
    out = tmp_path / "out"
    for arguments in ([CASE, "--backend", "numpy", "--backend", "torch"], [CASE, CASE]):
        assert main(["replay", *map(str, arguments), "--trajectory", str(out)]) == USAGE
        assert "one file" in capsys.readouterr().err
    assert not out.exists()
