"""The command group: verbs, help, errors and exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest

from fakes import Fake
from statekit.cli import inspect_command, main
from statekit.cli.output import size
from statekit.errors import NotFoundError, StatekitError, UsageError, printable

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
