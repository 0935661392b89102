"""What may be replaced, who may read it then, and what a signal leaves: a target is never more open than its source."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign_targets import FOREIGN, facts, put
from samples import state_writer, target_name, writable

from goldens import GOLDEN
from statekit.cli.main import FAILED, STOPPED, STOPPING, Stopped, main, stoppable
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import _check_ours, convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.plan import Plan
from statekit.errors import CommitError, FormatError, InexactError, RefusedError, TargetExistsError
from statekit.files.manifest import FILE
from statekit.files.stage import Stage, staged
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Counts, Optimizer, TrainState
from statekit.tensors.tensor import in_memory
from statekit.testing.layouts import made_state

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


@pytest.mark.parametrize("to", ["torch", "statekit", "dcp"])
@pytest.mark.parametrize("what", FOREIGN)
def test_replace_alone_destroys_nothing_that_isnt_ours(
    what: str, to: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "train.py"
    try:
        put(what, source, target)
    except PermissionError:
        pytest.skip("only root makes devices")
    before = facts(target)
    with pytest.raises(TargetExistsError):
        convert(plan(source, target, to=to), replace=True)
    assert facts(target) == before
    assert (tmp_path / "precious" / "train.py").read_text() == "precious"


@pytest.mark.parametrize("to", ["torch", "statekit", "dcp"])
@pytest.mark.parametrize("what", ["our file", "our folder"])
def test_replace_takes_the_place_of_ours_of_either_kind(
    what: str, to: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "train.py"
    put(what, source, target)
    convert(plan(source, target, to=to), replace=True)
    with open_state(target) as opened:
        assert opened.checkpoint.container == to


@pytest.mark.parametrize("what", FOREIGN)
def test_a_seal_a_report_and_a_certificate_destroy_nothing(what: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    convert(plan(source, folder, to="dcp"))
    (folder / FILE).unlink()
    for target, words in (
        (folder / FILE, ["seal", folder]),
        (tmp_path / "report.html", ["inspect", source, "--report", tmp_path / "report.html"]),
        (tmp_path / "made.json", ["verify", source, source, "--certificate", tmp_path / "made.json"]),
    ):
        try:
            put(what, source, target)
        except PermissionError:
            pytest.skip("only root makes devices")
        before = facts(target)
        assert main([str(word) for word in words]) != 0
        assert facts(target) == before
        shutil.rmtree(target.with_name("precious"))


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


def test_a_second_signal_waits_until_the_handlers_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: it was raised among them, which left some, and Python printed a traceback of what it passed over."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    put = signal.signal

    def after_another(number: int, handler: Any) -> Any:
        os.kill(os.getpid(), STOPPING[-1])
        return put(number, handler)

    try:
        with pytest.raises(Stopped) as caught, stoppable():
            monkeypatch.setattr(signal, "signal", after_another)
            os.kill(os.getpid(), STOPPING[0])
        monkeypatch.undo()
        assert caught.value.number == STOPPING[0]
        assert {signal.getsignal(number) for number in STOPPING} == {signal.SIG_DFL}
    finally:
        monkeypatch.undo()
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("works_on", [True, False])
def test_a_signal_inside_a_garbage_collection_stops_all_the_same(works_on: bool) -> None:
    """Seen red: Python passes over what a callback of the collection raises, and the conversion was completed."""

    def arrive(phase: str, facts: object) -> None:
        if phase == "start":
            gc.callbacks.remove(arrive)
            os.kill(os.getpid(), signal.SIGTERM)

    before, hook = signal.signal(signal.SIGTERM, signal.SIG_DFL), sys.unraisablehook
    until = time.monotonic() + 10
    try:
        with pytest.raises(Stopped) as caught, stoppable():
            gc.callbacks.append(arrive)
            gc.collect()
            while works_on and time.monotonic() < until:
                pass
        assert caught.value.number == signal.SIGTERM and time.monotonic() < until
        assert sys.unraisablehook is hook
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_link_that_is_exchanged_meanwhile_is_no_crash(
    source: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Seen red: an OSError of `readlink`, where a target was exchanged for a link and back all the time."""
    target = tmp_path / "target"
    target.symlink_to("elsewhere")

    def exchanged(path: object) -> str:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    monkeypatch.setattr(os, "readlink", exchanged)
    with pytest.raises(TargetExistsError, match="isn't there any more"):
        _check_ours(target)
    with pytest.raises(CommitError, match="Invalid argument"):
        convert(plan(source, target, to="statekit"), replace=True)


def test_a_signal_that_is_ignored_stays_ignored(source: Path, tmp_path: Path) -> None:
    """As nohup asks for: only what nobody has decided about ends the verb."""
    waiting = HELD.replace("time.sleep(60)", "sys.stdin.read()")
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + waiting
    line = [sys.executable, "-c", code, str(source), str(tmp_path / "target"), "--to", "statekit"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "writing\n"
        job.send_signal(signal.SIGHUP)
        job.communicate(timeout=120)  # closes its input: it goes on
    assert job.returncode == 0 and (tmp_path / "target").is_dir()


@pytest.mark.parametrize("careless", [(), ("careless", "torch")], ids=["careful", "careless"])
def test_temporary_data_lies_beside_the_target(careless: tuple[str, ...], tmp_path: Path) -> None:
    """Nowhere else is anything made, and where Python would make temporary files nothing needs to be."""
    script = Path(__file__).with_name("writing_places.py")
    line = [sys.executable, str(script), str(tmp_path), *careless]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "nowhere")}
    done = subprocess.run(line, capture_output=True, text=True, check=True, env=environment)
    elsewhere = json.loads(done.stdout)
    assert len(elsewhere) >= 15 or careless
    assert any(elsewhere.values()) == bool(careless), elsewhere


WRITABLE = writable()


def planned(to: str, folder: Path) -> Plan:
    """Plans the conversion of a sample to its own container."""
    row, target = WRITABLE[to], folder / target_name(to)
    (folder / "source").mkdir()
    source = row.sample_in(folder / "source").path
    return plan(source, target, to=to, layout=row.layout, hints=row.hints, require=Exactness.LOSSY)


def said(caught: pytest.ExceptionInfo[CommitError], target: Path) -> str:
    """Returns an error's text, which names the target and no temporary folder, of which nothing is left."""
    text = str(caught.value)
    assert str(target) in text and ".statekit-" not in text, text
    assert {path.name for path in target.parent.iterdir()} == {"source"}
    return text


@pytest.mark.parametrize("to", WRITABLE)
def test_what_cant_be_read_again_is_said_of_the_target(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(stage: Stage, *arguments: Any) -> Any:
        written = [path for path in Path(stage.path).rglob("*") if path.is_file()] or [Path(stage.path)]
        largest = max(written, key=lambda path: (path.name != FILE, path.stat().st_size))
        os.truncate(largest, largest.stat().st_size // 2)
        return verify(stage, *arguments)

    verify, work = Stage._verify, planned(to, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(CommitError) as caught:
        patch.setattr(Stage, "_verify", cut)
        convert(work)
    said(caught, tmp_path / target_name(to))


@pytest.mark.parametrize("to", WRITABLE)
def test_a_disk_that_fails_is_said_of_the_target(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    @contextmanager
    def failing_from_now_on(*arguments: Any, **options: Any) -> Iterator[Stage]:
        with staged(*arguments, **options) as stage:
            for call in ("write", "fsync"):
                monkeypatch.setattr(os, call, fail)
            yield stage

    work = planned(to, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(CommitError, match="Input/output error") as caught:
        patch.setattr("statekit.conversion.convert.staged", failing_from_now_on)
        convert(work)
    monkeypatch.undo()
    said(caught, tmp_path / target_name(to))


def test_what_a_library_says_of_its_files_is_said_of_the_target(tmp_path: Path) -> None:
    """Of tensorstore's messages, too, which name the files that it makes by itself."""
    (tmp_path / "source").mkdir()
    source = WRITABLE["orbax"].sample_in(tmp_path / "source").path
    lines = "import resource, signal, sys; from statekit.cli.main import main;"
    lines += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500));"
    lines += "sys.exit(main(sys.argv[1:]))"
    target = tmp_path / "target"
    line = [sys.executable, "-c", lines, "convert", str(source), str(target), "--to", "orbax"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == FAILED and "OCDBT" in done.stderr
    assert str(target) in done.stderr and ".statekit-" not in done.stderr


@pytest.mark.parametrize("name", ["statekit.json", "statekit.c.pt.json", ".statekit-tmp-x"])
@pytest.mark.parametrize(
    "line",
    ["convert SOURCE {} --to torch", "inspect SOURCE --report {}", "verify SOURCE SOURCE --certificate {}"],
)
def test_nothing_is_written_under_the_name_of_a_manifest(
    line: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint beside it would be refused: it would have a manifest that is none."""
    source = WRITABLE["torch"].sample_in(tmp_path).path
    before = sorted(tmp_path.rglob("*"))
    words = line.replace("SOURCE", f"{source}").split()
    assert main([word.format(tmp_path / name) for word in words]) == 2
    assert "can't have this name" in capsys.readouterr().err and sorted(tmp_path.rglob("*")) == before


def test_a_name_that_no_manifest_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="isn't Unicode"):
        state_writer("torch", "torch-weights", lambda: named("half\udcff"))(tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["", "a//b", "b/"])
def test_a_name_with_an_empty_part_is_refused_before_orbax_writes_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="empty part"):
        state_writer("orbax", "jax-weights", lambda: named(name))(tmp_path)


def named(name: str) -> TrainState:
    """Returns a state of one parameter, of a name."""
    params = {name: in_memory(np.ones(3, np.float32))}
    return TrainState(params, {}, Optimizer(WEIGHTS, None, ()), Counts(0, 0))


@pytest.mark.parametrize(
    ("layout", "to"),
    [
        ("mxnet-adam", "megatron"),
        ("mxnet-adam", "statekit"),
        ("mxnet-adam", "t5x"),
        ("mxnet-adam", "tf-bundle"),
        ("optax", "mxnet"),
        ("statekit-torch", "flax"),
        ("torch-optim", "flax"),
    ],
)
def test_a_layout_that_cannot_be_told_again_in_a_container_is_refused(
    layout: str, to: str, source: Path, tmp_path: Path
) -> None:
    """These failed by statekit's own error; MXNet's in statekit's files was written, and then no layout fitted."""
    with pytest.raises(InexactError, match=f"{layout} doesn't go into the container {to}") as caught:
        convert(plan(source, tmp_path / "target", to=to, layout=layout, require=Exactness.LOSSY))
    assert f"{caught.value.expected}".startswith("a container in which it is at home")
    assert [one.name for one in tmp_path.iterdir()] == ["source.pt"]


def test_a_layout_whose_names_are_told_to_be_another_s_is_written(source: Path, tmp_path: Path) -> None:
    convert(plan(source, tmp_path / "named.pt", layout="torch-fqn"))
    with open_state(tmp_path / "named.pt") as opened:
        assert opened.layout == "torch-optim"


def missed(schema: str, variant: str, folder: Path) -> tuple[Path, str]:
    """Writes a state in which one parameter has missed an update; returns where, and which."""
    state = made_state(schema, variant)
    path = next(iter(state.slots))
    state = replace(state, counts=replace(state.counts, behind={path: state.counts.updates - 1}))
    return state_writer("statekit", "statekit", lambda: state)(folder), path


@pytest.mark.parametrize(
    ("schema", "variant", "layout", "to"),
    [
        ("adafactor", "t2t_late", "t2t", "tf-bundle"),
        ("adafactor", "t5x", "t5x", "t5x"),
        ("adamw", "keras", "keras", "keras-h5"),
        ("scaled_adam", "gptsovits", "icefall", "torch"),
    ],
)
def test_an_update_that_a_parameter_missed_is_not_lost_unsaid(
    schema: str, variant: str, layout: str, to: str, tmp_path: Path
) -> None:
    """It was, and called bitwise: the parameter's second moment went on as if it had made all updates."""
    source, path = missed(schema, variant, tmp_path)
    with pytest.raises(InexactError, match=f"(?s)missed updates.*{path}: 1"):
        convert(plan(source, tmp_path / "target", to=to, layout=layout, require=Exactness.LOSSY))
    assert [one.name for one in tmp_path.iterdir()] == [source.name]


def test_a_manifest_says_what_a_file_of_keras_weights_cannot(tmp_path: Path) -> None:
    source, path = missed("adamw", "torch", tmp_path)
    convert(plan(source, tmp_path / "target.weights.h5", layout="statekit-keras"))
    with open_state(tmp_path / "target.weights.h5") as opened:
        assert opened.counts.behind == {path: opened.counts.updates - 1}


CAME = [*FOREIGN, "our file", "our folder"]
"""What may come to the place of a target while it is written: another conversion's result isn't ours to replace."""


@pytest.mark.parametrize("what", CAME)
@pytest.mark.parametrize(
    ("before", "to"), [("nothing", "torch"), ("our file", "statekit"), ("our folder", "statekit")]
)
def test_what_comes_to_the_place_of_a_target_meanwhile_stays(
    before: str, what: str, to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, commit = tmp_path / "target", Stage.commit
    if before != "nothing":
        put(before, source, target)
        (tmp_path / "precious").rename(tmp_path / "earlier")

    def after_others(stage: Stage, *arguments: Any) -> Any:
        monkeypatch.setattr(Stage, "commit", commit)
        if before != "nothing":
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        put(what, source, target)
        monkeypatch.setattr(Stage, "commit", after_others)
        there.append(facts(target))
        return commit(stage, *arguments)

    there: list[Any] = []
    monkeypatch.setattr(Stage, "commit", after_others)
    try:
        with pytest.raises(TargetExistsError, match=r"changed while the conversion ran|exists"):
            convert(plan(source, target, to=to), replace=True)
    except PermissionError:
        pytest.skip("only root makes devices")
    assert [facts(target)] == there
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".statekit-tmp")]


@pytest.mark.parametrize("exchanges", [True, False], ids=["at once", "by two renames"])
def test_a_file_that_a_run_adds_to_a_folder_meanwhile_stays(
    exchanges: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, commit = tmp_path / "target", Stage.commit
    convert(plan(source, target, to="statekit"))
    if not exchanges:
        monkeypatch.setattr("statekit.files.durable._renameat2", lambda *arguments: False)

    def after_others(stage: Stage, *arguments: Any) -> Any:
        target.chmod(0o755)
        (target / "thesis.txt").write_text("precious")
        return commit(stage, *arguments)

    monkeypatch.setattr(Stage, "commit", after_others)
    with pytest.raises(TargetExistsError, match="changed while the conversion ran"):
        convert(plan(source, target, to="statekit"), replace=True)
    assert (target / "thesis.txt").read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"source.pt", "target"}
