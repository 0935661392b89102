"""What stands at the edge in another form than it should: an error of ours that says where, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from formats import plain_state, save
from statekit.cli.main import DONE, FAILED, VERBS, WANTING, main
from statekit.conversion.registry import detect_container
from statekit.converters.containers.huggingface.safetensors import CONTAINER as SAFETENSORS
from statekit.errors import FormatError, StatekitError, UnknownFormatError

ROOT = Path(__file__).parents[1]


def sharded(folder: Path, **index: Any) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({"w": np.zeros(2, np.float32)}, folder / "a.safetensors")
    document = {"weight_map": {"w": "a.safetensors"}, **index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


@pytest.mark.parametrize(
    "index",
    [
        {"metadata": 5},
        {"metadata": [["a", "b"]]},
        {"weight_map": 5},
        {"weight_map": {"w": 5}},
        {"weight_map": {"w": "\ud800.safetensors"}},
        {"weight_map": {"\ud800": "a.safetensors"}},
    ],
)
def test_an_index_of_shards_of_another_form_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    with pytest.raises(FormatError) as refusal:
        SAFETENSORS.open(sharded(tmp_path / "model", **index))
    assert "model.safetensors.index.json" in str(refusal.value.place)


@pytest.mark.parametrize("name", ["\ud800", "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StatekitError):
        detect_container(tmp_path / name)


@pytest.mark.parametrize("document", ["config.json", "metadata.json"])
def test_a_document_of_keras_that_is_no_object_is_refused(tmp_path: Path, document: str) -> None:
    import h5py

    from statekit.converters.containers.keras_zip import CONTAINER as KERAS

    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.create_group("vars")
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        for name in ("config.json", "metadata.json"):
            archive.writestr(name, "[5]" if name == document else "{}")
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    with pytest.raises(FormatError, match=document):
        KERAS.open(tmp_path / "m.keras")


def test_a_folder_that_cannot_be_listed_is_said_to_be_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save(plain_state(), tmp_path / "run.statekit")
    real_open = os.open

    def forbidden(path: Any, *rest: Any, **options: Any) -> int:
        if str(path).startswith(str(target)):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *rest, **options)

    monkeypatch.setattr(os, "open", forbidden)
    assert main(["inspect", str(target)]) == FAILED
    said = capsys.readouterr().err
    assert "ermission denied" in said
    assert str(target) in said


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_closed_stdout_is_no_traceback(tmp_path: Path) -> None:
    ended = run(f"{sys.executable} -m statekit formats >&-", tmp_path)
    assert "Traceback" not in ended.stderr
    assert "itself has failed" not in ended.stderr


def test_a_working_directory_that_is_gone_is_no_traceback(tmp_path: Path) -> None:
    target = save(plain_state(), tmp_path / "run.statekit")
    (tmp_path / "gone").mkdir()
    ended = run(f"rmdir ../gone; {sys.executable} -m statekit inspect {target}", tmp_path / "gone")
    assert "Traceback" not in ended.stderr
    assert ended.returncode == 0, ended.stderr
    relative = run(f"rmdir ../gone2; {sys.executable} -m statekit inspect run", _made(tmp_path / "gone2"))
    assert "itself has failed" not in relative.stderr
    assert relative.returncode == FAILED


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


IN_A_CHILD = """
import os, sys, tempfile
gone = tempfile.mkdtemp(dir=sys.argv[1])
os.chdir(gone)
os.rmdir(gone)
from statekit.cli.main import VERBS, main, statekit

def ended(stdout, line):
    child = os.fork()
    if not child:
        if stdout == "closed":
            os.close(1)
            sys.stdout = None  # as Python starts
        else:
            read, write = os.pipe()
            os.close(read)
            os.dup2(os.open("/dev/full", os.O_WRONLY) if stdout == "full" else write, 1)
        sys.exit(main(line))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for verb in VERBS:
    statekit.get_command(None, verb)
for text in sys.argv[2:]:
    stdout, *line = text.split("|")
    print(text, ended(stdout, line), file=sys.stderr, flush=True)
"""
STDOUTS = ("closed", "full", "nobody reads")


@pytest.mark.parametrize("stdouts", ["in turn", pytest.param("each", marks=pytest.mark.slow)])
def test_no_verb_fails_untyped_without_stdout_or_working_directory(stdouts: str, tmp_path: Path) -> None:
    checkpoint, other = (str(save(plain_state(), tmp_path / f"{name}.statekit")) for name in "ab")
    lines = [
        ["check", checkpoint], ["cold-start", checkpoint], ["convert", checkpoint, "out.flax", "--to", "flax"],
        ["diff", checkpoint, other], ["doctor", checkpoint], ["formats", "--matrix"], ["inspect", checkpoint],
        ["ls", str(tmp_path)], ["ls"], ["maps"], ["replay", "recordings"], ["resume", checkpoint], ["schemas"],
        ["seal", checkpoint], ["sweep", str(tmp_path)], ["verify", checkpoint, other],
        ["work", "status", checkpoint],
    ]  # fmt: skip
    assert {line[0] for line in lines} == set(VERBS) - {"demo", "serve"}
    ways = ("closed", "nobody reads")
    runs = [
        "|".join((stdout, *line))
        for number, line in enumerate(lines)
        for stdout in (ways if stdouts == "each" else ways[number % 2 :][:1])
    ]
    runs += [f"{stdout}|{verb}|gone|gone|--json" for verb in ("check", "verify") for stdout in STDOUTS]
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_CHILD, str(tmp_path), *runs],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for wrong in ("Traceback", "itself has failed", "Exception ignored"):
        assert wrong not in ended.stderr, ended.stderr
    codes = dict(line.rsplit(" ", 1) for line in ended.stderr.splitlines() if line.startswith(STDOUTS))
    assert set(codes) == set(runs)
    assert set(codes.values()) <= {f"{code}" for code in (DONE, WANTING, FAILED)}, ended.stderr
    assert all(codes[run] == f"{FAILED}" for run in runs if run.endswith("--json")), ended.stderr


def weights(path: Path, *names: str) -> str:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({name: np.full(2, np.nan, np.float32) for name in names}, path)
    return f"{path}"


@pytest.mark.parametrize("target", ["flax", "keras-h5", "orbax"])
def test_a_name_of_more_levels_than_a_tree_may_have_is_refused(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = weights(tmp_path / "a.safetensors", ".".join("b" * 2045), "w")
    assert main(["convert", source, f"{tmp_path / 'target'}", "--to", target]) == FAILED
    assert "too deep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [["inspect"], ["inspect", "--stats"], ["convert", "target.pt", "--dry-run"], ["doctor"]],
    ids="-".join,
)
def test_the_longest_name_is_printed_whole_on_lines_of_a_screen(
    line: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "".join(f"{i:05d}" for i in range(818))  # with `model/` the longest that a tensor may have
    source = weights(tmp_path / "a.safetensors", name, "w")
    assert main([line[0], source, *line[1:]]) in (DONE, WANTING)
    said = capsys.readouterr().out
    assert name in said.replace("\n", "").replace(" ", "")
    assert max(map(len, said.splitlines())) <= 240


def test_doctor_says_once_why_there_is_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = weights(tmp_path / "a.safetensors", "w" * 4095)
    assert main(["doctor", source, "--json"]) == WANTING
    [one] = json.loads(capsys.readouterr().out)["checkpoints"]
    [finding] = one["findings"]
    assert finding["found"] == "The name of a tensor is not usable. 4101 characters"


SIGNALLED = """
import os, signal, sys
_, module, number, *line = sys.argv
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
class Meanwhile:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), getattr(signal, number))
sys.meta_path.insert(0, Meanwhile())
from statekit.__main__ import main
sys.argv[1:] = line
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "number", "said"),
    [("numpy._core.numerictypes", "SIGTERM", "Stopped by SIGTERM.\n"), ("click", "SIGINT", "")],
)
def test_a_signal_amid_an_import_is_told_in_one_line_at_most(
    module: str, number: str, said: str, tmp_path: Path
) -> None:
    checkpoint = save(plain_state(), tmp_path / "a.statekit")
    line = [sys.executable, "-c", SIGNALLED, module, number, "inspect", "--stats", f"{checkpoint}"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == (143 if said else -2) and ended.stderr == said


def test_arrays_without_their_tree_are_refused_by_what_they_are(tmp_path: Path) -> None:
    """Levanter and Equinox keep the tree in the program; no reader was named for either."""
    import numpy as np

    array = tmp_path / "step-3" / "model" / "embed"
    array.mkdir(parents=True)
    (array / "zarr.json").write_text('{"zarr_format": 3}')
    (tmp_path / "step-3" / "metadata.json").write_text('{"step": 3}')
    with (tmp_path / "model.eqx").open("wb") as file:
        np.save(file, np.ones(3))
    for name, program in (("step-3", "Levanter"), ("model.eqx", "Equinox")):
        with pytest.raises(UnknownFormatError, match=program):
            detect_container(tmp_path / name)


@pytest.mark.parametrize("verb", ["inspect", "diff"])
def test_verbs_do_the_same_where_nobody_takes_errors(verb: str, tmp_path: Path) -> None:
    """Seen red: an error ended as an exit code that says that something was found wanting."""
    checkpoint = str(save(plain_state(), tmp_path / "a.statekit"))
    for path, expected in ((checkpoint, DONE), (str(tmp_path / "gone"), FAILED)):
        paths = [path] * (1 + (verb == "diff"))
        line = ["sh", "-c", 'exec "$0" -m statekit "$@" 2>&-', sys.executable, verb, *paths]
        ended = subprocess.run(line, stdout=subprocess.PIPE, check=False, timeout=60, cwd=ROOT)
        assert ended.returncode == expected


@pytest.mark.tensorflow
def test_tensorflow_tells_nothing_of_itself_on_stderr() -> None:
    code = (
        "import os, sys\n"
        "from statekit.cli.main import main\n"
        "assert main(['formats']) == 0\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('tensorflow') is not None\n"
        "import tensorflow as tf\n"
        "print(tf.constant(1.0).numpy())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout.endswith("1.0\n") and ended.stderr == ""
