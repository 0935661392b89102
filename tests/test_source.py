"""The one way to read bytes: regular files only, at any place, by any thread, within sizes and the job's budget."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from statekit.budget import Budget, Limits
from statekit.converters.containers.torch_file import CONTAINER as TORCH
from statekit.converters.formats.pytorch.writer import write_archive
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, UsageError
from statekit.files import source as source_module
from statekit.files.source import (
    Files,
    Held,
    Part,
    Source,
    as_file,
    bytes_at,
    first_bytes,
    last_bytes,
    opening,
    read_small,
    record,
    source_digest,
)
from statekit.tensors.digest import bytes_digest

ROOT = Path(__file__).parents[1]
DATA = bytes(range(256)) * 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a").write_bytes(DATA)
    return tmp_path / "a"


@pytest.fixture
def files() -> Iterator[Files]:
    with Files() as opened:
        yield opened


SOURCES: dict[str, Callable[[Files, Path], Source]] = {
    "file": lambda files, path: files.source(path),
    "part": lambda files, path: Part(Part(Held(b"__" + DATA + b"__", "x"), 1, len(DATA) + 2), 1, len(DATA)),
    "held": lambda files, path: Held(DATA, "x"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_reads_at_any_place(kind: str, files: Files, path: Path) -> None:
    source = SOURCES[kind](files, path)
    assert source.size == len(DATA)
    for start, count in ((0, 0), (0, len(DATA)), (100, 7), (len(DATA) - 1, 1), (len(DATA), 0)):
        assert bytes_at(source, start, count) == DATA[start : start + count]
    into = bytearray(5)
    source.read_into(3, memoryview(into))
    assert into == DATA[3:8]
    assert source_digest(source) == bytes_digest(DATA)
    with as_file(source) as file:
        file.seek(-4, os.SEEK_END)
        assert file.read() == DATA[-4:] and file.read(1) == b""


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("start", "count"), [(0, len(DATA) + 1), (len(DATA) + 1, 0), (-1, 1), (0, 2**62)])
def test_what_lies_outside_is_refused_before_it_is_allocated(
    kind: str, start: int, count: int, files: Files, path: Path
) -> None:
    source = SOURCES[kind](files, path)
    with pytest.raises(CorruptError, match="ends before the data it declares"):
        source.read(start, count)


def test_the_error_says_which_byte_of_which_file(files: Files, path: Path) -> None:
    with pytest.raises(CorruptError) as caught:
        Part(files.source(path), 1000, 10).read(8, 4)
    shown = str(caught.value)
    assert f"byte 1008 of {path}" in shown and "expected: 4 bytes" in shown and "found: 2 bytes" in shown


def test_a_file_that_shrinks_is_an_error_and_not_a_signal(files: Files, path: Path) -> None:
    file = files.source(path)
    file.read(0, 10)
    os.truncate(path, 100)
    assert bytes_at(file, 0, 100) == DATA[:100]
    with pytest.raises(CorruptError, match="ends before") as caught:
        file.read(90, 20)
    assert f"byte 100 of {path}" in str(caught.value)


@pytest.mark.parametrize("kind", ["fifo", "socket", "device", "folder"])
def test_only_regular_files_are_opened_and_no_fifo_is_waited_for(
    kind: str, tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    place, listener = Path("x"), None
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(place))
    elif kind == "device":
        place = Path("/dev/null")
    else:
        place.mkdir()
    for opened in (files.source, lambda path: first_bytes(path, 4), read_small):
        with pytest.raises(RefusedError, match="regular file"):
            opened(place)
    if listener is not None:
        listener.close()


def test_a_fifo_that_takes_a_files_place_is_refused_too(files: Files, path: Path) -> None:
    file = files.source(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RefusedError, match="regular file"):
        file.read(0, 1)


def test_a_file_that_takes_another_ones_place_is_not_taken_for_it(
    tmp_path: Path, files: Files, path: Path
) -> None:
    file = files.source(path)
    (tmp_path / "b").write_bytes(DATA)
    (tmp_path / "b").rename(path)
    with pytest.raises(CorruptError, match="replaced while"):
        file.read(0, 1)


def test_missing_and_unreadable_files_are_told_apart(tmp_path: Path, files: Files, path: Path) -> None:
    for gone in (tmp_path / "none", path / "below"):
        with pytest.raises(NotFoundError, match="is missing"):
            files.source(gone)
    with pytest.raises(FormatError, match="can't be read"):
        files.source(tmp_path / ("x" * 300))


def test_threads_read_one_file_side_by_side_though_few_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MOST_OPEN", 2)
    rng = np.random.default_rng(0)
    contents = [rng.bytes(50_000) for _ in range(8)]
    with Files() as files:
        sources = []
        for i, content in enumerate(contents):
            (tmp_path / f"{i}").write_bytes(content)
            sources.append(files.source(tmp_path / f"{i}"))

        def check(seed: int) -> bool:
            random = np.random.default_rng(seed)
            for _ in range(300):
                which, start = int(random.integers(8)), int(random.integers(49_000))
                if bytes_at(sources[which], start, 1000) != contents[which][start : start + 1000]:
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(check, range(8)))
        assert _open_below(tmp_path) <= 2
    assert _open_below(tmp_path) == 0


def test_a_file_is_opened_once(path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    real = os.open

    def counted(name: object, flags: int) -> int:
        opened.append(name)
        return real(str(name), flags)

    monkeypatch.setattr(os, "open", counted)
    file = files.source(path)
    assert opened == []
    for start in range(100):
        file.read(start, 1)
    assert opened == [path]


def test_reading_after_closing_says_so(path: Path) -> None:
    with opening() as files:
        file = files.source(path)
        file.read(0, 1)
    assert bytes_at(file, 0, 1) == DATA[:1]
    files.close()
    with pytest.raises(UsageError, match="closed"):
        file.read(0, 1)


def test_files_are_closed_where_opening_a_checkpoint_fails(path: Path) -> None:
    budget, seen = Budget(), []
    with pytest.raises(FormatError, match="odd"), opening(budget=budget) as files:
        files.on_close(lambda: seen.append("library"))
        record(files.source(path), 0, 10, 100, "A header")
        assert budget.held == 10
        raise FormatError("odd")
    assert (budget.held, seen) == (0, ["library"])


def test_ends_of_files(path: Path) -> None:
    assert (first_bytes(path, 3), last_bytes(path, 3)) == (DATA[:3], DATA[-3:])
    assert first_bytes(path, 10**6) == last_bytes(path, 10**6) == DATA


def test_a_record_beyond_its_limit_says_which_and_where(path: Path, files: Files) -> None:
    with pytest.raises(RefusedError, match="The header of a thing is too large") as caught:
        record(files.source(path), 16, 101, 100, "The header of a thing")
    shown = str(caught.value)
    assert f"byte 16 of {path}" in shown and "at most 100 bytes" in shown and "found: 101 bytes" in shown


def test_the_files_of_a_job_share_one_budget(path: Path) -> None:
    budget = Budget(Limits(held=1000))
    with Files(budget) as one, Files(budget) as other:
        record(one.source(path), 0, 600, 4096, "A header")
        assert budget.held == 600
        with pytest.raises(RefusedError, match="than this job may hold") as caught:
            record(other.source(path), 24, 600, 4096, "The index of a thing")
        shown = str(caught.value)
        assert f"byte 24 of {path}" in shown and "at most 1000 bytes" in shown and "`held`" in shown
        one.close()
        record(other.source(path), 24, 600, 4096, "The index of a thing")
    assert budget.held == 0


def test_a_container_draws_on_the_budget_it_is_given(tmp_path: Path) -> None:
    with (tmp_path / "a.pt").open("wb") as file:
        write_archive({"step": 1, "text": "x" * 5000}, file, lambda name, tensor: ())
    budget = Budget()
    with TORCH.open(tmp_path / "a.pt", budget=budget):
        assert 5000 < budget.held < 20_000
    assert budget.held == 0
    with pytest.raises(RefusedError, match="The pickle of a torch file is more than this job may hold"):
        TORCH.open(tmp_path / "a.pt", budget=Budget(Limits(held=3000)))


def _open_below(folder: Path) -> int:
    open_files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdigit()
            and os.path.islink(f"/proc/self/fd/{n}")]  # fmt: skip
    return sum(name.startswith(f"{folder}/") for name in open_files)


OPENERS = {"open", "read_bytes", "read_text", "memmap", "mmap", "fromfile", "safe_open", "pread", "preadv"}
ALLOWED: dict[str, tuple[str, set[str]]] = {
    "cli/maps_command.py": ("the map that a user asks for", {"statekit.open", "file.open"}),
    "statekit/files/source.py": ("the one place", {"os.open", "os.preadv"}),
    "statekit/files/durable.py": (
        "makes the target's new files, opens folders to sync them; its own temporary folders' notes, and /proc",
        {"os.open", "Path(path).read_text"}
    ),
    "statekit/scale/disk_site.py": ("what a task has written and proven", {"path.open"}),
    "statekit/testing/works.py": ("targets that a law has made", {"path.read_bytes"}),
    "statekit/verify/recorder.py": ("a spool that it made, and what it writes", {"os.pread", "unfinished.open"}),
    "statekit/verify/natives/jax_classes.py": (
        "gives Flax what statekit has just written", {"_file(written(state, 'flax', 'optax', folder)).read_bytes"}
    ),
    "statekit/files/safetensors.py": ("the library that proves a header takes a path only", {"safe_open"}),
    "converters/formats/zarr/stores.py": ("tensorstore reads databases, and takes a path only", {"ts.KvStore.open"}),
    "converters/containers/orbax/writer.py": ("tensorstore makes the target's database", {"ts.KvStore.open"}),
    "converters/containers/keras_zip.py": ("members of an archive, which reads the source", {"archive.open"}),
    "statekit/files/checksums.py": ("members of an archive, which reads the source", {"archive.open"}),
    "statekit/files/store_home.py": (
        "sends what was laid out on this machine first", {"(folder / file).open", "path.open"}
    ),
    "statekit/files/manifest.py": ("fills the digest into the target that was written", {"path.open"}),
    "statekit/testing/containers.py": (
        "compares and damages files, as anybody would",
        {"file.read_bytes", "(first / name).read_bytes", "(second / name).read_bytes", "manifest.read_bytes",
         "others[0].read_bytes", "Path('/proc/self/io').read_text"},
    ),
    "converters/layouts/pytorch/architecture.py": (
        "what it remembers of a config, in the user's own cache", {"remembered.read_text"}
    ),
    "statekit/testing/damage.py": ("/proc", {"Path('/proc/self/status').read_text"}),
    "cli/arguments.py": ("the first line of what a report shall replace", {"path.open"}),
    "statekit/service/database.py": (
        "the service's own lock, and a backup that it has written", {"open", "os.open", "os.pread"}
    ),
    "statekit/service/tasks/processes.py": (
        "/proc",
        {"Path('/proc/sys/kernel/random/boot_id').read_text", "Path(f'/proc/{pid or os.getpid()}/stat').read_text"},
    ),
    "statekit/service/roots.py": ("folders, on the way to what lies beneath one", {"os.open"}),
    "statekit/service/web/keys.py": ("the service's own token, and who signed out", {"os.open", "file.read_text"}),
    "statekit/service/web/screens.py": ("scripts and styles of the package", {"path.read_bytes"}),
    "statekit/service/tasks/confinement.py": ("folders that a task may reach, not what is in them", {"os.open"}),
    "statekit/service/scanning.py": ("folders, to list them without following a link", {"os.open"}),
    "statekit/client.py": ("a service's token, which the user names", {"path.read_text"}),
    "statekit/testing/stores.py": ("copies files of this machine into a store in memory", {"file.read_bytes"}),
    "cli/main.py": ("/dev/null in the place of a closed stdout", {"os.open"}),
}  # fmt: skip
"""Modules in which a call bears the name of one that opens files: why that may be, and which calls."""
OURS = {"container", "chosen", "named", "TORCH", "arrays", "written", "self", "making", "trial"}
"""What has an `open` that isn't a file's: containers, and arrays of a tree."""


def opening_calls(text: str) -> list[str]:
    """Returns the calls in a module that open files by themselves."""
    calls = []
    has_one = any(f"{opener}(" in text for opener in OPENERS)  # most have none, and walking takes its time
    for node in ast.walk(ast.parse(text)) if has_one else ():
        if not isinstance(node, ast.Call):
            continue
        call = node.func
        if isinstance(call, ast.Name) and call.id in OPENERS - {"read_text"}:
            calls.append(call.id)
        elif isinstance(call, ast.Attribute) and call.attr in OPENERS:
            owner = ast.unparse(call.value)
            containers = call.attr == "open" and {*owner.replace("(", ".").split(".")} & OURS
            if not containers and not owner.startswith("resources.files("):  # files of the package
                calls.append(ast.unparse(call))
    return calls


def test_no_module_opens_files_by_itself() -> None:
    tops = [ROOT / top for top in ("statekit", "converters", "cli")]
    modules = [path for top in tops for path in sorted(top.rglob("*.py"))]
    calls_by_module = {
        str(m.relative_to(ROOT)): {*opening_calls(m.read_text(encoding="utf-8"))} for m in modules
    }
    assert {name: calls for name, calls in calls_by_module.items() if calls} == {
        name: calls for name, (_, calls) in ALLOWED.items()
    }


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open('rb')",
        "os.open(path, 0)",
        "path.read_bytes()",
        "np.memmap(path)",
        "mmap.mmap(f, 0)",
    ],
)
def test_a_module_that_opens_files_is_noticed(line: str) -> None:
    assert opening_calls(f"import os\n\ndef f(path):\n    return {line}\n")


def test_containers_are_opened_and_that_is_no_file() -> None:
    assert (
        opening_calls("def f(path):\n    return container('t5x').open(path), self.container.open(path)\n")
        == []
    )


def test_nothing_heavy_is_imported_to_read() -> None:
    code = (
        "import sys, statekit.files.source\n"
        "assert not {'h5py', 'tensorstore', 'zstandard', 'torch', 'jax', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_no_process_looks_for_modules_in_its_working_directory() -> None:
    """It may be a checkpoint's folder, with a json.py in it: `-P` keeps it off the path."""
    started = [
        line.strip()
        for path in (ROOT / "statekit").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "sys.executable, " in line and "testing" not in path.parts
    ]
    assert len(started) >= 6
    safe = ('sys.executable, "-P"', 'sys.executable, "-I"')
    assert [line for line in started if not any(words in line for words in safe)] == []
