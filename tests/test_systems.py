"""Linux has every call that is used; macOS lacks some, and has others; Windows is refused."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from formats import plain_state, save, values
from goldens import COMPACT
from statekit.cli.main import DONE, FAILED, main
from statekit.conversion.open_state import open_state
from statekit.files import durable

WINDOWS = """
import ctypes, click, numpy, rich, shutil, sys, tempfile
sys.platform = "win32"
"""
COMMAND = "from statekit.cli.main import main\nsys.exit(main(['inspect', 'nosuch']))"
LIBRARY = "import statekit\nstatekit.open('nosuch')"


def on_windows(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WINDOWS + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_windows_is_refused_in_one_sentence() -> None:
    done = on_windows(COMMAND)
    assert (done.returncode, done.stdout) == (FAILED, "")
    assert done.stderr.startswith(
        "Error: statekit doesn't run on Windows, which can't rename a folder safely."
    )
    assert "Subsystem for Linux" in done.stderr
    assert "Traceback" not in done.stderr


def test_windows_is_refused_in_python_too() -> None:
    done = on_windows(LIBRARY)
    assert "UnsupportedSystemError: statekit doesn't run on Windows" in done.stderr


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes this system one like macOS: no renameat2, no /proc, a sync of its own. Returns what was synced by that."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: SimpleNamespace())
    monkeypatch.setattr(durable, "_line", lambda path: "")
    monkeypatch.setattr(durable, "_link", lambda path: "")
    descriptors: list[int] = []

    def full_sync(descriptor: int, command: int) -> None:
        assert command == 51
        descriptors.append(descriptor)
        os.fsync(descriptor)

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    return descriptors


def test_macos_converts_and_replaces(tmp_path: Path, synced: list[int]) -> None:
    source = COMPACT / "t5x" / "momentum_f32" / "checkpoint"
    for name in ("state.pt", "state.statekit"):
        target = tmp_path / name
        assert main(["convert", str(source), str(target)]) == DONE
        assert main(["convert", str(source), str(target)]) == FAILED
        assert main(["convert", str(source), str(target), "--replace"]) == DONE
        with open_state(target) as written, open_state(source) as meant:
            assert values(written.state.params) == values(meant.state.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.pt", "state.statekit"]
    assert len(synced) > 4


def test_macos_syncs_as_usual_where_a_file_system_cannot_do_more(
    tmp_path: Path, synced: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    usual: list[int] = []
    monkeypatch.setattr(os, "fsync", usual.append)
    save(plain_state(), tmp_path / "state.statekit")
    assert usual


def test_macos_leaves_temporary_folders_whose_owner_it_cannot_prove_dead(
    tmp_path: Path, synced: list[int]
) -> None:
    code = (
        "import sys; from pathlib import Path; from statekit.files import durable;"
        "durable.make_temporary(Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert durable.sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 1
