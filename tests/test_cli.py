"""The command group: verbs, help, errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest

from fakes import Fake
from goldens import GOLDEN
from statekit.cli import inspect_command, main
from statekit.errors import NotFoundError, StatekitError, UsageError, printable, size

RUN = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"
FAKE = Fake({"param/a": np.ones(2, np.float32), "slot/a/v": np.ones(2, np.float32)})


def fail_with(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **options: object) -> None:
        raise error

    return fail


def run_inspect(monkeypatch: pytest.MonkeyPatch, error: BaseException, *options: str) -> int:
    monkeypatch.setattr(inspect_command, "inspect", fail_with(error))
    return main.main([*options, "inspect", "somewhere"])


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--help"]) == main.DONE
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.partition("Commands:\n")[2].splitlines()] == list(main.VERBS)


@pytest.mark.parametrize("name", main.VERBS)
def test_the_summary_of_a_verb_is_the_first_line_of_its_help(name: str) -> None:
    command = main.statekit.get_command(click.Context(main.statekit), name)
    assert command is not None
    assert command.name == name
    assert (command.help or "").splitlines()[0] == main.VERBS[name].summary


@pytest.mark.parametrize("name", main.VERBS)
def test_every_verb_has_help_for_each_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([name, "--help"]) == main.DONE
    assert "Usage: statekit" in capsys.readouterr().out
    command = main.statekit.get_command(click.Context(main.statekit), name)
    assert command is not None
    options = [p for p in command.params if isinstance(p, click.Option)]
    assert [p.name for p in options if not p.help] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == main.DONE
    assert capsys.readouterr().out.startswith("statekit 0.")


@pytest.mark.parametrize(
    "arguments", [["nosuchverb"], ["--nosuchoption"], ["inspect"], ["inspect", "--step", "x", "."]]
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(arguments) == main.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Usage: statekit" in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFoundError("There is no such step.", place="/a/b", remedy="take another"), main.FAILED),
        (UsageError("These options exclude each other."), main.USAGE),
        (OSError(28, "No space left on device"), main.FAILED),
        (MemoryError(), main.FAILED),
        (ZeroDivisionError("division by zero"), main.FAILED),
        (KeyboardInterrupt(), main.INTERRUPTED),
    ],
)
def test_an_error_is_told_without_a_traceback(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_inspect(monkeypatch, error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert (
        "Stopped" in captured.err
        or f"Error: {error}"[:20] in captured.err
        or "statekit itself" in captured.err
    )


def test_debug_shows_where_an_error_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError):
        run_inspect(monkeypatch, NotFoundError("There is no such step."), "--debug")


def test_a_name_in_a_file_cannot_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_inspect(monkeypatch, StatekitError("A name is odd.", found="\x1b[2J\u202eevil")) == main.FAILED
    shown = capsys.readouterr().err
    assert "\\x1b[2J\\u202eevil" in shown
    assert printable("two\nlines", keep="\n") == "two\nlines"


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    code = "import sys; from statekit.cli.main import main; sys.exit(main(['formats', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == main.DONE


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 * 2**20, 3 * 2**40, 5000 * 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB", "5000.0 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "words"),
    [
        (["inspct", "--json"], main.USAGE, "UsageError", "did you mean inspect?"),
        (["inspect", "--json"], main.USAGE, "UsageError", "CHECKPOINT"),
        (["inspect", "nosuch", "--json"], main.FAILED, "NotFoundError", "nosuch"),
        (["convert", "nosuch", "out.pt", "--json"], main.FAILED, "NotFoundError", "nosuch"),
        (["replay", "nosuch", "--json"], main.FAILED, "NotFoundError", "nosuch"),
        (["replay", ".", "--json"], main.FAILED, "NotFoundError", "None of the paths"),
        (["schemas", "adamW", "--json"], main.USAGE, "UsageError", "did you mean adamw?"),
        (
            ["schemas", "adamw", "--variant", "tourch", "--json"],
            main.USAGE,
            "UsageError",
            "did you mean torch?",
        ),
        (["inspect", "RUN", "--layout", "torch_optim", "--json"], main.USAGE, "UsageError", "torch-optim?"),
        (["inspect", "RUN", "--from", "T5X", "--json"], main.USAGE, "UsageError", "did you mean t5x?"),
        (["inspect", "RUN", "--variant", "t5", "--json"], main.USAGE, "UsageError", "did you mean t5x?"),
        (["inspect", "RUN", "--hparams", "decay_rat=1", "--json"], main.USAGE, "UsageError", "decay_rate?"),
        (["inspect", "RUN", "--hparams", "no.json", "--json"], main.FAILED, "NotFoundError", "no.json"),
        (["inspect", "RUN", "--param-names", "no.txt", "--json"], main.FAILED, "NotFoundError", "no.txt"),
        (["inspect", "RUN", "--filter", "no", "--json"], main.FAILED, "NotFoundError", "Nothing matches"),
        (["convert", "RUN", "o.pt", "--to", "hf_trainer", "--json"], main.USAGE, "UsageError", "hf-trainer?"),
        (["convert", "RUN", "o.pt", "--layout", "nosuch", "--json"], main.USAGE, "UsageError", "no layout"),
    ],
)
def test_an_error_is_json_too_and_its_code_is_the_same_in_every_verb(
    arguments: list[str],
    code: int,
    kind: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main([str(RUN) if a == "RUN" else a for a in arguments]) == code
    captured = capsys.readouterr()
    error = json.loads(captured.out)
    assert list(error) == [
        "format", "kind", "exit_code", "subject", "place", "expected", "found", "remedy", "faults",
    ]  # fmt: skip
    assert (error["format"], error["kind"], error["exit_code"]) == ("statekit.error/1", kind, code)
    assert words in " ".join(str(part) for part in error.values())
    assert error["subject"] in captured.err


def test_what_stops_a_verb_is_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspect_command, "inspect", fail_with(KeyboardInterrupt()))
    assert main.main(["inspect", "somewhere", "--json"]) == main.INTERRUPTED
    assert json.loads(capsys.readouterr().out)["exit_code"] == 130


@pytest.mark.parametrize(
    ("line", "position", "expected"),
    [
        (
            "statekit ",
            1,
            {
                "inspect",
                "ls",
                "convert",
                "check",
                "diff",
                "doctor",
                "verify",
                "cold-start",
                "seal",
                "sweep",
                "resume",
                "replay",
                "formats",
                "schemas",
                "maps",
                "demo",
                "serve",
                "work",
            },
        ),
        ("statekit convert a b --lay", 4, {"--layout"}),
        (
            "statekit convert a b --layout torch-",
            5,
            {"torch-optim", "torch-fqn", "torch-fqn-flat", "torch-weights"},
        ),
        ("statekit convert a b --to t5x", 5, {"t5x", "t5x-orbax"}),
        ("statekit inspect a --from saf", 4, {"safetensors"}),
        ("statekit inspect a --variant mxnet_u", 4, {"mxnet_unfused"}),
        ("statekit schemas ada", 2, {"adafactor", "adamw"}),
    ],
)
def test_the_shell_completes(line: str, position: int, expected: set[str]) -> None:
    if "ada" in line:
        expected = {name for name in expected if name.startswith("ada")}
    done = completion("bash_complete", COMP_WORDS=line, COMP_CWORD=str(position))
    assert {entry.partition(",")[2] for entry in done.split()} == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["schemas", "adafactor", "--json", "--variant", "t5x"], "--variant"),
        (["replay", str(RUN.parent), "--start", "init", "--checkpoint", str(RUN)], "--checkpoint"),
        (["convert", str(RUN), "never.pt", "--params-only", "--step-offset", "reset"], "--step-offset"),
        (["convert", str(RUN), "never.pt", "--map", ""], "--map"),
        (["convert", str(RUN), "never.pt", "--layout", ""], "--layout"),
        (["convert", str(RUN), "never", "--to", "t5x-orbax", "--layout", "optax"], "--layout, --to"),
        (["inspect", str(RUN), "--from", "t5x-orbax", "--layout", "optax"], "--layout, --from"),
        (["seal", ""], "A path is empty"),
        (["cold-start", str(RUN), "--seed", "-1"], "--seed"),
        (["verify", str(RUN), str(RUN), "--seed", "-1"], "--seed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_would_be_passed_over_are_refused(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(words) == main.USAGE
    assert named in capsys.readouterr().err


def test_one_optimizer_may_be_named_as_several_are(capsys: pytest.CaptureFixture[str]) -> None:
    """T5X, icefall and TensorFlow took no such name: the variant was said to be none."""
    words = ["--variant", "adafactor/t5x", "--hparams", "adafactor/decay_rate=0.7"]
    assert main.main(["inspect", str(RUN), *words, "--json"]) == main.DONE
    (group,) = json.loads(capsys.readouterr().out)["optimizer"]["groups"]
    assert (group["hyperparameters"]["decay_rate"], group["known_from"]["decay_rate"]) == (0.7, "given")


def test_no_catalogue_is_made_by_a_backup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["serve", "--data", str(tmp_path), "--backup", str(tmp_path / "copy.sqlite")]
    assert main.main(words) == main.FAILED
    assert "The data folder has no catalogue" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_told_how_to_complete(shell: str) -> None:
    assert "_STATEKIT_COMPLETE" in completion(f"{shell}_source")


def completion(instruction: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "statekit"],
        env={**os.environ, main.COMPLETE: instruction, **environment},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
