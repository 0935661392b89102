"""What may be replaced, who may read it then, and what a signal leaves: a target is never more open than its source."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from goldens import GOLDEN
from statekit.cli.main import FAILED, STOPPED, STOPPING, Stopped, main, stoppable
from statekit.conversion.convert import convert, plan
from statekit.errors import RefusedError, TargetExistsError

ADAMW = GOLDEN / "torch_formats/adamw_legacy/checkpoint/checkpoint.pt"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.pt"
    path.write_bytes(ADAMW.read_bytes())
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("to", ["torch", "statekit"])
def test_a_device_or_fifo_is_never_replaced(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    os.mkfifo(target)
    for foreign in (False, True):
        with pytest.raises(TargetExistsError, match="neither a file nor a folder"):
            convert(plan(source, target, to=to), replace=True, replace_foreign=foreign)
    assert stat.S_ISFIFO(target.lstat().st_mode)


def test_a_file_of_somebody_else_is_replaced_only_when_that_is_said(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "thesis.pt"
    target.write_text("precious")
    with pytest.raises(TargetExistsError, match="didn't write") as caught:
        convert(plan(source, target), replace=True)
    assert target.read_text() == "precious" and "--replace-foreign" in caught.value.remedy
    convert(plan(source, target), replace_foreign=True)
    convert(plan(source, target), replace=True)  # now it is ours


def test_a_folder_of_somebody_else_is_replaced_only_when_that_is_said(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "thesis").write_text("precious")
    with pytest.raises(TargetExistsError, match="thesis"):
        convert(plan(source, target, to="statekit"), replace=True)
    assert main(["convert", str(source), str(target), "--to", "statekit", "--replace"]) == FAILED
    assert main(["convert", str(source), str(target), "--to", "statekit", "--replace-foreign"]) == 0
    assert not (target / "thesis").exists()


@pytest.mark.parametrize("to", ["torch", "statekit", "hf-trainer"])
def test_a_target_is_no_more_open_than_its_source(to: str, source: Path, tmp_path: Path) -> None:
    source.chmod(0o600)
    target = tmp_path / ("target.pt" if to == "torch" else "target")
    convert(plan(source, target, to=to))
    for path in (target, *target.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_private_folder_makes_a_private_file(source: Path, tmp_path: Path) -> None:
    convert(plan(source, tmp_path / "folder", to="statekit"))
    (tmp_path / "folder").chmod(0o700)
    convert(plan(tmp_path / "folder", tmp_path / "target.pt"))
    assert stat.S_IMODE((tmp_path / "target.pt").stat().st_mode) == 0o600


def test_a_target_is_no_more_open_than_what_it_replaces(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.pt"
    convert(plan(source, target))
    assert stat.S_IMODE(target.stat().st_mode) == 0o644 & ~umask()
    target.chmod(0o640)
    convert(plan(source, target), replace=True)
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def umask() -> int:
    value = os.umask(0o022)
    os.umask(value)
    return value


def test_a_link_is_nobodys_to_replace(source: Path, tmp_path: Path) -> None:
    for name, to in (("real.pt", None), ("real", "statekit")):
        real = tmp_path / name
        convert(plan(source, real, to=to))
        link = tmp_path / f"link-{name}"
        link.symlink_to(real.name)
        with pytest.raises(TargetExistsError, match="is a link"):
            convert(plan(source, link, to=to), replace=True)
        assert link.is_symlink()
        convert(plan(source, link, to=to), replace_foreign=True)
        assert not link.is_symlink() and real.exists()


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.pt")
    with pytest.raises(RefusedError, match="isn't a regular file"):
        plan(tmp_path / "run.pt", tmp_path / "target.pt")


HEARD = """
import signal
heard = signal.default_int_handler if {0} == signal.SIGINT else signal.SIG_DFL
signal.signal({0}, heard)
"""
HELD = """
import sys, time
from statekit.conversion import convert as module
kept = module.Stage.stream
def slow(self, name, tensor):
    print("writing", flush=True)
    time.sleep(60)
    return kept(self, name, tensor)
module.Stage.stream = slow
from statekit.cli.main import main
sys.exit(main(["convert", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT])
def test_a_signal_leaves_nothing(number: signal.Signals, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    folder.mkdir()
    code = f"{HEARD.format(int(number))}{HELD}"  # a job in the background ignores some
    line = [sys.executable, "-c", code, str(source), str(folder / "target"), "--to", "statekit"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "writing\n"
        assert any(folder.iterdir())
        time.sleep(0.1)
        job.send_signal(number)
        _, err = job.communicate(timeout=60)
    assert job.returncode == STOPPED + number and err.startswith("Stopped") and "Traceback" not in err
    assert not any(folder.iterdir())


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_whatever_a_library_makes_of_it(number: signal.Signals) -> None:
    """As Python does of one that arrives while it imports a module in C: "initialization failed"."""
    before = signal.signal(number, signal.SIG_DFL)  # a job in the background ignores some
    try:
        with pytest.raises(Stopped) as caught, stoppable():
            try:
                os.kill(os.getpid(), number)
            except KeyboardInterrupt as error:
                raise ImportError("initialization failed") from error
        assert caught.value.number == number and signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored(source: Path, tmp_path: Path) -> None:
    """As nohup asks for: only what nobody has decided about ends the verb."""
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + HELD.replace("60", "1")
    line = [sys.executable, "-c", code, str(source), str(tmp_path / "target"), "--to", "statekit"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "writing\n"
        job.send_signal(signal.SIGHUP)
        job.communicate(timeout=120)
    assert job.returncode == 0 and (tmp_path / "target").is_dir()


@pytest.mark.parametrize("careless", [False, True])
def test_temporary_data_lies_beside_the_target(careless: bool, tmp_path: Path) -> None:
    """Nowhere else is anything made, and where Python would make temporary files nothing needs to be."""
    script = Path(__file__).with_name("writing_places.py")
    line = [sys.executable, str(script), str(tmp_path), *["careless"] * careless]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "nowhere")}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    elsewhere = json.loads(done.stdout)
    assert len(elsewhere) >= 15
    assert any(elsewhere.values()) == careless, elsewhere
