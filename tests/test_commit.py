"""Writing without accidents: what appears at a target's name is complete and checked, whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from statekit.conversion import registry
from statekit.conversion.contracts import Encoded
from statekit.errors import CommitError, FormatError, NotFoundError, TargetExistsError, UsageError
from statekit.files import durable, manifest
from statekit.files import homes as commit
from statekit.files.checkpoint import Checkpoint
from statekit.files.file_changes import SMALL_BYTES
from statekit.files.stage import Progress, Stage, staged
from statekit.files.tree import Place
from statekit.tensors.digest import bytes_digest
from statekit.tensors.tensor import Stored, Tensor, in_memory

VALUES = np.arange(6, dtype=np.float32)
TENSOR = in_memory(VALUES, "a")


def reopen(*tensors: tuple[str, Tensor]) -> Callable[[Place], Checkpoint]:
    return lambda path: Checkpoint("test", path, dict(tensors))


def put(stage: Stage, name: str = "a", tensor: Tensor = TENSOR, file: str = "data/a") -> None:
    with stage.file("" if stage.kind == "file" else file) as output:
        for block in stage.stream(name, tensor):
            output.write(block)


def write(
    target: Path, kind: commit.TargetKind = "folder", replace: bool = False, tensor: Tensor = TENSOR
) -> None:
    with staged(target, kind, replace=replace) as stage:
        put(stage, tensor=tensor)
        stage.commit(reopen(("a", tensor)))


def alone(folder: Path, *names: str) -> None:
    assert sorted(os.listdir(folder)) == sorted(names)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_target_appears_when_all_is_proven(tmp_path: Path, kind: commit.TargetKind) -> None:
    target = tmp_path / "target"
    with staged(target, kind) as stage:
        assert stage.target == target and stage.path.name == "target"
        assert stage.path.parent.parent == tmp_path and stage.path.parent.name.startswith(".statekit-tmp-")
        assert stat.S_IMODE(os.stat(stage.path.parent).st_mode) == 0o700
        put(stage)
        assert not target.exists()
        files = stage.commit(reopen(("a", TENSOR)))
        assert target.exists()
    alone(tmp_path, "target")
    data = target if kind == "file" else target / "data/a"
    assert data.read_bytes() == VALUES.tobytes()
    assert files["target" if kind == "file" else "data/a"] == {
        "bytes": 24,
        "blake3": bytes_digest(VALUES.tobytes()),
    }


def test_a_target_has_the_ordinary_permissions_of_a_new_file(tmp_path: Path) -> None:
    write(tmp_path / "target")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/file").touch()
    for ours, plain in (("target", "plain"), ("target/data", "plain"), ("target/data/a", "plain/file")):
        assert (tmp_path / ours).stat().st_mode == (tmp_path / plain).stat().st_mode


def test_the_manifest_states_files_and_tensors(tmp_path: Path) -> None:
    write(tmp_path / "target")
    stated = manifest.require_manifest(tmp_path / "target")
    digest = bytes_digest(VALUES.tobytes())
    assert stated["tensors"] == {"a": {"shape": [6], "dtype": "float32", "blake3": digest}}
    assert stated["files"] == {"data/a": {"bytes": 24, "blake3": digest}}


def test_a_file_target_carries_its_manifest_inside(tmp_path: Path) -> None:
    with staged(tmp_path / "target", "file") as stage:
        put(stage)
        inside = manifest.parse(json.dumps(stage.manifest()), "inside")
        assert inside["tensors"]["a"]["blake3"] == bytes_digest(VALUES.tobytes()) and inside["files"] == {}


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.int16).reshape(3, 4).T,
        np.array(1.5, ml_dtypes.bfloat16),
        np.zeros((0, 2), np.float32),
        np.array([True, False]),
    ],
    ids=["transposed", "scalar", "empty", "bool"],
)
def test_streamed_bytes_are_little_endian_in_c_order(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    with staged(tmp_path / "target", "file") as stage:
        written = b"".join(stage.stream("a", in_memory(array)))
        assert written == np.ascontiguousarray(array).tobytes()
        assert stage.tensors["a"]["blake3"] == bytes_digest(written)


def test_large_tensors_stream_in_blocks_with_progress(tmp_path: Path) -> None:
    tensor = in_memory(np.arange(20 * 2**20, dtype=np.float32).reshape(20, -1))
    seen: list[Progress] = []
    with staged(tmp_path / "target", "file", on_progress=seen.append, total=80 * 2**20) as stage:
        with stage.file() as output:
            sizes = [output.write(block) for block in stage.stream("a", tensor)]
        stage.commit(reopen(("a", tensor)))
    assert max(sizes) <= 8 * 2**20 and len(sizes) == 10
    assert [p.done for p in seen if p.phase == "write"] == list(np.cumsum(sizes))
    assert seen[-1] == Progress("verify", "a", 80 * 2**20, 80 * 2**20)


def test_without_commit_nothing_is_left(tmp_path: Path) -> None:
    with staged(tmp_path / "target", "folder") as stage:
        put(stage)
    alone(tmp_path)


def test_an_error_of_the_container_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "target", "folder") as stage:
        put(stage)
        1 / 0  # noqa: B018  # what fails between writing and committing
    alone(tmp_path)


# Names


@pytest.mark.parametrize("name", ["../x", "/x", "a/../x", "a//x", "", "a\\x", "c:x", "a\0x", "statekit.json"])
def test_files_outside_the_target_are_refused(tmp_path: Path, name: str) -> None:
    with (
        staged(tmp_path / "target", "folder") as stage,
        pytest.raises(UsageError, match="unusable name"),
        stage.file(name),
    ):
        pass


def test_a_file_is_written_once(tmp_path: Path) -> None:
    with staged(tmp_path / "target", "folder") as stage:
        put(stage)
        with pytest.raises(CommitError, match="EEXIST"), stage.file("data/a"):
            pass
        with pytest.raises(UsageError, match="twice"):
            next(stage.stream("a", TENSOR))


def test_a_target_without_a_parent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="mkdir -p"), staged(tmp_path / "no/target", "folder"):
        pass
    with pytest.raises(UsageError), staged(tmp_path / ".statekit-tmp-x", "folder"):
        pass


# Existing targets


@pytest.mark.parametrize("what", ["file", "folder", "link", "dangling"])
def test_an_existing_target_is_an_error_before_any_work(tmp_path: Path, what: str) -> None:
    target = tmp_path / "target"
    if what == "file":
        target.write_text("precious")
    elif what == "folder":
        target.mkdir()
        (target / "thesis").write_text("precious")
    elif what == "link":
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to("elsewhere")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(TargetExistsError, match="--replace"), staged(target, "folder"):
        raise AssertionError("work was done")
    alone(tmp_path, "target", *(["elsewhere"] if what == "link" else []))


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_takes_the_place_of_an_empty_one_with_its_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool, replace: bool
) -> None:
    if not supported:
        monkeypatch.setattr(durable, "_renameat2", lambda *_: False)
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    write(target, replace=replace)
    assert (target / "data/a").read_bytes() == VALUES.tobytes()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    alone(tmp_path, "target")


def test_an_empty_folder_is_no_place_for_a_file(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(TargetExistsError), staged(tmp_path / "target", "file"):
        raise AssertionError("work was done")


def test_what_came_into_an_empty_folder_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir()

    def late(source: Path, place: Path) -> None:
        (place / "thesis").write_text("precious")
        durable.rename_over_empty(source, place)

    monkeypatch.setattr(commit, "rename_over_empty", late)
    with pytest.raises(TargetExistsError):
        write(target)
    assert (target / "thesis").read_text() == "precious"
    alone(target, "thesis")
    alone(tmp_path, "target")


def test_an_empty_folder_is_there_again_where_its_place_cant_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o750)

    def failing(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        durable.sync_folder(folder)

    monkeypatch.setattr(commit, "sync_folder", failing)
    with pytest.raises(CommitError):
        write(target)
    alone(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o750


@pytest.mark.parametrize("supported", [True, False])
def test_a_target_that_comes_into_being_meanwhile_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    if not supported:
        monkeypatch.setattr(durable, "_renameat2", lambda *_: False)
    for kind in ("file", "folder"):
        target = tmp_path / kind
        with pytest.raises(TargetExistsError), staged(target, kind) as stage:
            put(stage)
            target.write_text("precious")
            stage.commit(reopen(("a", TENSOR)))
        assert target.read_text() == "precious"
    alone(tmp_path, "file", "folder")


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_replace_swaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool, kind: commit.TargetKind
) -> None:
    if not supported:
        monkeypatch.setattr(durable, "_renameat2", lambda *_: False)
    target, new = tmp_path / "target", in_memory(VALUES + 1, "a")
    write(target, kind)
    write(target, kind, replace=True, tensor=new)
    data = target if kind == "file" else target / "data/a"
    assert data.read_bytes() == (VALUES + 1).tobytes()
    alone(tmp_path, "target")


def test_replace_keeps_the_old_copy_until_the_new_one_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    write(target)
    copies: list[set[bytes]] = []

    def watching(folder: Path) -> None:
        durable.sync_folder(folder)
        copies.append({path.read_bytes() for path in tmp_path.rglob("a")})

    monkeypatch.setattr(commit, "sync_folder", watching)
    write(target, replace=True, tensor=in_memory(VALUES + 1, "a"))
    assert copies[-1] == {VALUES.tobytes(), (VALUES + 1).tobytes()}


def test_replace_deletes_no_folder_that_statekit_didnt_write(tmp_path: Path) -> None:
    target = tmp_path / "target"
    write(target)
    (target / "checkpoint_2000").write_text("a later checkpoint")
    with pytest.raises(TargetExistsError, match="checkpoint_2000"):
        write(target, replace=True)
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("precious")
    with pytest.raises(TargetExistsError, match="thesis"):
        write(home, replace=True)
    assert (home / "thesis").exists() and (target / "checkpoint_2000").exists()


def test_replace_of_a_link_leaves_what_it_points_at(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/thesis").write_text("precious")
    (tmp_path / "target").symlink_to("elsewhere")
    write(tmp_path / "target", replace=True)
    assert not (tmp_path / "target").is_symlink()
    assert (tmp_path / "elsewhere/thesis").read_text() == "precious"


# Verification


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ([("a", in_memory(VALUES + 1))], "other values"),
        ([("a", in_memory(VALUES.astype(np.float64)))], "float64"),
        ([("a", in_memory(VALUES.reshape(2, 3)))], r"\[2, 3\]"),
        ([], "isn't there"),
        ([("a", TENSOR), ("b", TENSOR)], "doesn't name"),
    ],
    ids=["values", "dtype", "shape", "missing", "more"],
)
def test_a_writer_that_writes_something_else_is_caught(
    tmp_path: Path, tensors: list[tuple[str, Tensor]], what: str
) -> None:
    with pytest.raises(CommitError, match=what), staged(tmp_path / "target", "folder") as stage:
        put(stage)
        stage.commit(reopen(*tensors))
    alone(tmp_path)


def test_a_stream_that_was_left_early_doesnt_count(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="doesn't name"), staged(tmp_path / "target", "file") as stage:
        with stage.file() as output:
            output.write(next(stage.stream("a", TENSOR)))
        stage.commit(reopen(("a", TENSOR)))
    alone(tmp_path)


def test_what_cant_be_read_again_is_an_error(tmp_path: Path) -> None:
    def fetch(index: object) -> np.ndarray[Any, Any]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    unreadable = Stored((6,), np.dtype(np.float32), fetch, "a", "disk")
    with (
        pytest.raises(CommitError, match="cannot be read again"),
        staged(tmp_path / "target", "file") as stage,
    ):
        put(stage)
        stage.commit(reopen(("a", unreadable)))
    alone(tmp_path)


# Failing disks


def failing(monkeypatch: pytest.MonkeyPatch, call: str, code: int, after: int = 0) -> None:
    real, left = getattr(os, call), [after]

    def fail(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, fail)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EIO, "check the target's disk"),
    ],
)
def test_a_full_or_broken_disk_is_named_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    with pytest.raises(CommitError) as caught, staged(tmp_path / "target", "folder") as stage:
        failing(monkeypatch, "write", code)
        put(stage)
    monkeypatch.undo()
    text = str(caught.value)
    assert os.strerror(code) in text and errno.errorcode[code] in text and remedy in text and "data/a" in text
    alone(tmp_path)


def test_a_limit_on_file_size_is_named(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with (
            pytest.raises(CommitError, match=r"(?s)EFBIG.*ulimit -f"),
            staged(tmp_path / "target", "file") as stage,
        ):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
            put(stage)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    alone(tmp_path)


def test_a_folder_that_cant_be_listed_isnt_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files would be missing from the manifest, unsynced, or deleted as nobody's."""
    (tmp_path / "target/data").mkdir(parents=True)
    (tmp_path / "target/data/a").write_bytes(b"somebody's")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if not isinstance(path, int) and Path(path).name == "data":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(FormatError, match="EIO") as caught:
        commit.check_target(tmp_path / "target", "folder", replace=True)
    assert str(tmp_path / "target/data") in str(caught.value)
    with pytest.raises(FormatError, match="EIO"):
        write(tmp_path / "new", "folder")
    monkeypatch.undo()
    alone(tmp_path, "target")


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, bytes(data)[:5]))
    with staged(tmp_path / "target", "file") as stage:
        put(stage)
        assert Path(stage.path).read_bytes() == VALUES.tobytes()


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("replace", [False, True])
def test_a_failed_sync_fails_the_conversion_wherever_it_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: commit.TargetKind, replace: bool
) -> None:
    target = tmp_path / "target"
    if replace:
        write(target, kind)
    data = target if kind == "file" else target / "data/a"
    for after in range(20):
        with monkeypatch.context() as patch:
            failing(patch, "fsync", errno.EIO, after)
            try:
                write(target, kind, replace, in_memory(VALUES + 1, "a"))
            except CommitError as error:
                assert "EIO" in str(error)
            else:
                break
        alone(tmp_path, *(["target"] if replace else []))
        assert not replace or data.read_bytes() == VALUES.tobytes()
    assert after >= 2 and data.read_bytes() == (VALUES + 1).tobytes()


def test_a_folder_that_cant_be_synced_is_tolerated_a_file_isnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refuse_files = os.fsync, False

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode) != refuse_files:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "target")
    refuse_files = True
    with pytest.raises(CommitError, match="EINVAL"):
        write(tmp_path / "other")


def test_too_little_space_is_seen_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(CommitError, match="lacks space"), staged(tmp_path / "target", "file", total=2**62):
        raise AssertionError("work was done")
    alone(tmp_path)


# Leftovers


def leave(parent: Path, *, alive: bool = False) -> Path:
    """Makes a temporary folder as a process makes it that is killed, or still runs."""
    code = (
        "import sys, pathlib; from statekit.files.durable import make_temporary;"
        "folder = make_temporary(pathlib.Path(sys.argv[1])); (folder / 'part').write_text('half');"
        "print(folder, flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None
    folder = Path(child.stdout.readline().strip())
    if alive:
        assert durable.sweep(parent) == [] and folder.exists()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    return folder


def test_a_killed_conversions_folder_is_swept_by_the_next(tmp_path: Path) -> None:
    leave(tmp_path)
    leave(tmp_path)
    write(tmp_path / "target")
    alone(tmp_path, "target")


def test_a_running_conversions_folder_is_kept(tmp_path: Path) -> None:
    folder = leave(tmp_path, alive=True)
    assert durable.sweep(tmp_path) == [folder]


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"machine": "another"},
        {"namespace": "pid:[1]"},
        {"pid": "1; rm"},
        {"pid": -1},
        {"pid": None},
        {"more": 1},
    ],
    ids=str,
)
def test_a_foreign_owners_folder_is_kept(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = leave(tmp_path)
    record = json.loads((folder / durable.OWNER_FILE).read_text())
    (folder / durable.OWNER_FILE).write_text(json.dumps({**record, **change}))
    assert durable.sweep(tmp_path) == [] and folder.exists()


def test_a_folder_from_before_a_reboot_is_swept(tmp_path: Path) -> None:
    folder = leave(tmp_path)
    record = json.loads((folder / durable.OWNER_FILE).read_text())
    assert record["host"] == socket.gethostname()
    earlier = {**record, "pid": os.getpid(), "boot": "an earlier one"}
    (folder / durable.OWNER_FILE).write_text(json.dumps(earlier))
    assert durable.sweep(tmp_path) == [folder]


def test_a_new_process_with_an_old_pid_is_another_one(tmp_path: Path) -> None:
    folder = leave(tmp_path)
    record = json.loads((folder / durable.OWNER_FILE).read_text())
    (folder / durable.OWNER_FILE).write_text(json.dumps({**record, "pid": os.getpid(), "started": "1"}))
    assert durable.sweep(tmp_path) == [folder]


def test_only_abandoned_empty_folders_go_without_an_owner(tmp_path: Path) -> None:
    young, old, full, cut, cut_later, deep = (tmp_path / f".statekit-tmp-{c * 32}" for c in "abcdef")
    for folder in (young, old, full, cut, cut_later, deep):
        folder.mkdir()
    (deep / durable.OWNER_FILE).write_bytes(b"[" * 200_000)  # deeper than JSON is read
    (full / "data").write_text("whose?")
    for folder in (cut, cut_later):  # the power went before the record was synced
        (folder / durable.OWNER_FILE).write_bytes(b"")
    (cut_later / "data").write_text("whose?")
    for folder in (old, full, cut, cut_later):
        os.utime(folder, (time.time() - 7200,) * 2)
    assert durable.sweep(tmp_path) == [old, cut]


def test_nothing_else_is_ever_swept(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    dead = leave(tmp_path / "elsewhere")
    owner = (dead / durable.OWNER_FILE).read_text()
    names = [".statekit-tmp-", ".statekit-tmp-1234", ".statekit-tmp-" + "g" * 32, "statekit-tmp-" + "a" * 32]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / durable.OWNER_FILE).write_text(owner)
    link = tmp_path / f".statekit-tmp-{'d' * 32}"
    link.symlink_to(dead)
    file = tmp_path / f".statekit-tmp-{'e' * 32}"
    file.write_text(owner)
    assert durable.sweep(tmp_path) == []
    alone(tmp_path, *names, link.name, file.name, "elsewhere")


LARGE = in_memory(np.arange(SMALL_BYTES // 3, dtype=np.float32))
PLACES = [0, 5, 30, 200, 1000, SMALL_BYTES // 2, SMALL_BYTES, -3000, -1200, -700, -300, -100, -22, -4, -1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["keras-h5", "torch"])
def test_a_byte_that_changes_before_it_is_read_again_is_seen_wherever_it_is(
    name: str, place: int, tmp_path: Path
) -> None:
    """The values of tensors are compared by their digests, all that is written around them by another."""
    container = registry.container(name)

    def damaged(path: Place) -> Checkpoint:
        data = bytearray(Path(path).read_bytes())
        data[place] ^= 16
        Path(path).write_bytes(data)
        return container.open(path)

    with pytest.raises(CommitError), staged(tmp_path / "target", "file") as stage:
        container.write(Encoded({"model": {"a": LARGE, "b": TENSOR}}, 1), stage)
        stage.commit(damaged)
    alone(tmp_path)


@pytest.mark.parametrize("name", ["keras-h5", "torch"])
def test_what_is_written_into_a_proven_file_is_read_again_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container, put_whole = registry.container(name), manifest._put

    def damaging(output: Any, put: Any) -> None:
        put_whole(output, {start: data.replace(b'"', b"'", 1) for start, data in put.items()})

    monkeypatch.setattr(manifest, "_put", damaging)
    with pytest.raises(CommitError, match="manifest"), staged(tmp_path / "target", "file") as stage:
        container.write(Encoded({"model": {"a": LARGE}}, 1), stage)
        stage.commit(container.open)
    alone(tmp_path)


def test_a_link_in_the_place_of_a_temporary_folder_loses_nothing_behind_it(tmp_path: Path) -> None:
    """Seen red: all that lay in the folder behind the link was removed."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("mine")
    with durable.beside(tmp_path / "target") as folder:
        folder.rename(tmp_path / "moved")
        folder.symlink_to(precious)
    assert (precious / "thesis.txt").read_text() == "mine"
