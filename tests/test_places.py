"""Checkpoints in stores: places, trees, what is read of them, and that conversions are those of local files."""

from __future__ import annotations

import ast
import os
import threading
import time
import zipfile
from contextlib import suppress
from pathlib import Path, PurePosixPath

import h5py
import numpy as np
import pytest
import torch

import statekit
from statekit.conversion import registry
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.errors import CorruptError, NotFoundError, RefusedError, UsageError
from statekit.files.ahead import ReadAhead
from statekit.files.source import Files, bring, checkpoint_place, expecting, listing, record, walked
from statekit.files.tree import Facts, StoredPlace, address_of, fill
from statekit.testing.stores import CountingTree, MemoryTree, stored

T5X = Path(__file__).parent / "golden" / "t5x" / "bf16_params" / "checkpoint" / "checkpoint_4"
CONTAINERS = ("torch", "safetensors", "statekit", "dcp", "flax", "tf-bundle", "keras-h5")


def place(name: str = "", **data: bytes) -> StoredPlace:
    return StoredPlace(
        MemoryTree({key.replace("__", "/"): value for key, value in data.items()}), PurePosixPath(name)
    )


def test_a_place_in_a_store_answers_as_pathlib_does(tmp_path: Path) -> None:
    data = {"run/a.pt": b"12", "run/deep/b.bin": b"3", "top": b""}
    for name, content in data.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    root = StoredPlace(MemoryTree(data), PurePosixPath())
    for name in (".", "run", "run/a.pt", "run/deep", "run/deep/b.bin", "top", "gone", "run/gone/x", "top/x"):
        theirs, ours = tmp_path / name, root / name
        for member in ("name", "stem", "suffix"):
            assert getattr(ours, member) == getattr(theirs, member) or name == "."
        for ask in ("is_file", "is_dir", "exists", "is_symlink"):
            assert getattr(ours, ask)() == getattr(theirs, ask)(), (name, ask)
        assert [entry.name for entry in listing(ours)] == [entry.name for entry in listing(theirs)]
        assert ours.is_relative_to(root / "run") == theirs.is_relative_to(tmp_path / "run")
    below = [[(f"{top.relative_to(start)}", sorted(folders), sorted(files)) for top, folders, files in walked(start)]
             for start in (root / "run", tmp_path / "run")]  # fmt: skip
    assert below[0] == below[1]
    assert (
        sorted(root.entries())[0]
        == root / "run"
        != StoredPlace(MemoryTree({}, "memory://other"), PurePosixPath("run"))
    )


@pytest.mark.parametrize("name", ["../top", "/etc/passwd", "run/../../top", "a\0b", "a\nb", "x" * 1024])
def test_a_name_that_leads_out_of_a_store_names_nothing(name: str) -> None:
    outside = place("run", run__a=b"1", top=b"2") / name
    assert not outside.exists() and listing(outside) == []
    with pytest.raises(NotFoundError), Files() as files:
        files.source(outside)


def test_what_reads_local_files_only_is_refused_with_the_copy_to_make() -> None:
    with pytest.raises(RefusedError, match="aws s3 cp"):
        os.fspath(StoredPlace(MemoryTree({}, "s3://bucket"), PurePosixPath("run")))


def test_a_file_that_changes_after_it_was_listed_is_never_mixed() -> None:
    tree = MemoryTree({"run": b"1" * 2**20})
    file = StoredPlace(ReadAhead(tree), PurePosixPath("run"))
    with Files() as files:
        source = files.source(file)
        assert source.read(0, 4).tobytes() == b"1111"
        tree.data["run"] = b"2" * 2**20
        with pytest.raises(CorruptError, match="changed while it was read"):
            source.read(2**19, 4)


@pytest.mark.parametrize("size", [0, 1, 2**16, 2**18 + 1, 3 * 2**20 + 7])
def test_reading_ahead_changes_no_byte(size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    counting = CountingTree(MemoryTree({"x": content}))
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        random = np.random.default_rng(1)
        for _ in range(30):
            start = int(random.integers(0, size + 1))
            count = int(random.integers(0, min(size - start, 2**19) + 1))
            assert source.read(start, count).tobytes() == content[start : start + count]
        with pytest.raises(CorruptError, match="ends before"):
            source.read(size, 1)


def test_reads_in_a_row_become_few_requests() -> None:
    counting = CountingTree(MemoryTree({"x": bytes(2**23)}))
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        for start in range(0, 2**23, 2**14):
            source.read(start, 2**14)
    assert len(counting.reads) <= 8 and sum(count for _, _, count in counting.reads) == 2**23


@pytest.mark.parametrize(
    "address",
    ["s3://key:secret@bucket/run", "s3://bucket/run?X-Amz-Signature=secret", "gs://bucket/run#secret"],
)
def test_an_address_with_a_password_or_a_query_is_refused_and_not_shown(address: str) -> None:
    with pytest.raises(UsageError, match="no password and no query") as caught:
        checkpoint_place(address)
    assert "secret" not in f"{caught.value}"


@pytest.mark.parametrize(
    "address",
    [
        "s3://",
        "s3:///run",
        "s3://bucket/a/../b",
        "s3://bucket/a//b",
        "ftp://host/run",
        "s3://b\x1b[31m/run",
        "az://b ucket/run",
        "s3://bucket/\x01",
        "gs://[::1]/run",
    ],
)
def test_an_address_that_names_nothing_is_refused(address: str) -> None:
    with pytest.raises(UsageError):
        checkpoint_place(address)


def test_addresses_are_taken_apart() -> None:
    assert address_of("s3://bucket/a/b/") == ("s3", "bucket", "a/b")
    assert address_of("gs://bucket") == ("gs", "bucket", "")
    assert checkpoint_place("file:///tmp/run") == Path("/tmp/run") and checkpoint_place("run") == Path("run")


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    for container in CONTAINERS:
        planned = statekit.plan(T5X, folder / container, to=container, assume_defaults=True)
        statekit.convert(planned)
    return {"t5x": T5X, **{container: folder / container for container in CONTAINERS}}


@pytest.mark.parametrize("container", ["t5x", *CONTAINERS])
def test_a_store_gives_what_local_files_give(container: str, targets: dict[str, Path]) -> None:
    local = targets[container]
    far, counting = stored(local)
    with statekit.open(local) as ours, statekit.open(far) as theirs:
        assert dict(ours.checkpoint.tensors).keys() == dict(theirs.checkpoint.tensors).keys()
        opening = len(counting.reads)
        for name, tensor in ours.checkpoint.tensors.items():
            assert np.array_equal(
                np.asarray(tensor.read()), np.asarray(theirs.checkpoint.tensors[name].read())
            )
    files = sum(1 for file in local.rglob("*") if file.is_file()) if local.is_dir() else 1
    assert opening <= 2 + 4 * files


def test_seal_of_a_store_is_refused_before_anything_is_read(targets: dict[str, Path]) -> None:
    far, counting = stored(targets["torch"])
    with pytest.raises(UsageError, match="sealed"):
        statekit.seal(far)
    assert counting.reads == []


def test_a_torch_file_in_a_store_is_opened_by_its_directory(targets: dict[str, Path], tmp_path: Path) -> None:
    content = targets["torch"].read_bytes()
    name = max(zipfile.ZipFile(targets["torch"]).infolist(), key=lambda info: info.file_size)
    changed = bytearray(content)
    changed[name.header_offset + 30] ^= (
        1  # the name in the header of a tensor, which the directory has otherwise
    )
    (tmp_path / "run.pt").write_bytes(bytes(changed))
    with pytest.raises(CorruptError, match="contradict"):
        statekit.open(tmp_path / "run.pt")
    far, _ = stored(tmp_path / "run.pt")
    with pytest.raises(CorruptError, match="contradict"), statekit.open(far) as opened:
        for tensor in opened.checkpoint.tensors.values():
            tensor.read()


def test_small_runs_of_a_file_are_brought_together() -> None:
    content = np.random.default_rng(3).bytes(2**22)
    counting = CountingTree(MemoryTree({"x": content}))
    file = StoredPlace(ReadAhead(counting), PurePosixPath("x"))
    runs = [(start, 100) for start in range(0, 2**22, 2**17)]
    with Files() as files:
        source = files.source(file)
        bring(source, [*runs, (10, 50), (2**22 - 7, 100)])
        brought = len(counting.reads)
        for start, count in runs:
            assert source.read(start, count).tobytes() == content[start : start + count]
    assert brought == len(counting.reads) <= len(runs) + 1


PARAMETERS, SIDE = 30, 200
"""So many matrices, of 160 KB each: their counts lie too far apart for one request."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of AdamW with large tensors, as torch writes it; beside it what it becomes in other containers."""
    folder = tmp_path_factory.mktemp("large")
    params = {f"layer{i}.weight": torch.nn.Parameter(torch.ones(SIDE, SIDE)) for i in range(PARAMETERS)}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save({"model": params, "optimizer": optimizer.state_dict(), "step": 1}, folder / "run.pt")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")  # which numbers its parameters
    for container in ("dcp", "dcp-safetensors", "flax", "mxnet", "keras-h5"):
        path = folder / "".join((container, *registry.container(container).suffixes[:1]))
        statekit.convert(folder / "run.pt", path, to=container, assume_defaults=True, require="lossy")
    return folder


@pytest.mark.parametrize("name", ["run.pt", "dcp-safetensors"])
def test_opening_reads_no_count_and_the_first_count_brings_all(name: str, large: Path) -> None:
    far, counting = stored(large / name)
    with registry.container(name if name != "run.pt" else "torch").open(far) as checkpoint:
        files = sum(1 for file in (large / name).rglob("*")) or 1
        assert len(counting.reads) <= 2 + 4 * files
        assert sum(count for _, _, count in counting.reads) < 2**20
        opening = len(counting.reads)
        counts = [tensor for tensor in checkpoint.tensors.values() if tensor.shape == ()]
        assert len(counts) == PARAMETERS and float(counts[0].read()) == 1
        brought = len(counting.reads)
        assert {float(count.read()) for count in counts} == {1.0}
    assert brought == len(counting.reads) <= opening + PARAMETERS + 2


@pytest.mark.parametrize("name", ["run.pt", "optimizer.pt", "dcp.dcp", "dcp-safetensors"])
def test_an_inspection_reads_two_of_the_counts_that_lie_apart(name: str, large: Path) -> None:
    far, counting = stored(large / name)
    inspection = statekit.inspect(far)
    files = sum(1 for file in (large / name).rglob("*")) or 1
    assert len(counting.reads) <= 2 + 4 * files
    assert inspection.counts == statekit.inspect(large / name).counts
    (note,) = {*inspection.assumptions} - {*statekit.inspect(large / name).assumptions}
    assert f"counts of {PARAMETERS - 2} parameters" in note
    assert note not in statekit.inspect(far, stats=True).assumptions
    assert len(counting.reads) > PARAMETERS


def test_counts_that_lie_together_are_all_read(tmp_path: Path) -> None:
    params = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(5)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.state[params[2]]["step"] = torch.tensor(1.0)
    saved = {"model": {f"p{i}": param for i, param in enumerate(params)}, "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "run.pt")
    counts = statekit.inspect(stored(tmp_path / "run.pt")[0]).counts
    assert counts is not None and (counts.updates, dict(counts.behind)) == (2, {"p2": 1})


def test_what_was_brought_is_found_behind_a_smaller_run() -> None:
    """Seen red: the run that begins last before a byte had hidden the longer one, which was brought again."""
    counting = CountingTree(MemoryTree({"x": bytes(2**20)}))
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        bring(source, [(1000, 10)])
        for start in (0, 2000, 3000, 900, 60_000):
            source.read(start, 100)
        bring(source, [(4000, 10)])
        source.read(5000, 100)
        assert [count for _, _, count in counting.reads] == [10, 2**16]


@pytest.mark.parametrize("name", ["flax", "mxnet", "keras-h5.weights.h5"])
def test_a_file_whose_headers_lie_among_its_values_is_read_once(name: str, large: Path) -> None:
    far, counting = stored(large / name)
    files = [file.stat().st_size for file in (large / name, *(large / name).rglob("*")) if file.is_file()]
    statekit.inspect(far)
    assert len(counting.reads) <= 2 + 4 * len(files)
    assert sum(count for _, _, count in counting.reads) <= sum(files) + 2**17 * len(files)


@pytest.mark.parametrize("name", ["flax", "mxnet", "keras-h5.weights.h5"])
def test_headers_among_the_values_of_a_larger_file_are_read_with_what_lies_near(
    name: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: each of 90 values took a request of its own, one after the other."""
    monkeypatch.setattr("statekit.files.source._BROUGHT", 2**20)
    far, counting = stored(large / name)
    statekit.inspect(far)
    sizes = [file.stat().st_size for file in (large / name, *(large / name).rglob("*")) if file.is_file()]
    assert len(counting.reads) <= 3 * PARAMETERS / 2
    assert sum(count for _, _, count in counting.reads) <= 2 * sum(sizes)


def test_headers_of_a_group_are_asked_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: a server that answers only when three ask got them one after the other. h5py's lie at five places."""
    monkeypatch.setattr("statekit.files.source._BROUGHT", 2**20)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(24):
            file.create_dataset(f"{number}", data=np.zeros(2**18, np.float32))
    far, counting = stored(tmp_path / "x.h5")
    together, read_into = threading.Barrier(3), counting.tree.read_into

    def wait(facts: Facts, start: int, into: memoryview) -> None:
        if start > 2**22 and not together.broken:
            with suppress(threading.BrokenBarrierError):
                together.wait(5)
        read_into(facts, start, into)

    monkeypatch.setattr(counting.tree, "read_into", wait)
    with Files() as files:
        assert len(open_hdf5(files.source(far), "x")) == 24
    assert not together.broken and len(counting.reads) == 5


def test_a_large_header_is_read_to_its_end_and_no_further() -> None:
    counting = CountingTree(MemoryTree({"x": bytes(2**25)}))
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        source.read(0, 8)
        assert len(record(source, 8, 9 * 2**20, None, "A header")) == 9 * 2**20
    assert len(counting.reads) == 4 and sum(count for _, _, count in counting.reads) == 8 + 9 * 2**20


@pytest.mark.parametrize("is_proven", [False, True])
def test_a_process_that_needs_half_of_each_tensor_gets_little_more(is_proven: bool) -> None:
    """Seen red: where each tensor is proven as a whole, five times the file was fetched."""
    counting, half = CountingTree(MemoryTree({"x": bytes(2**27)})), 2**23
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        for start in range(0, 2**26, 2 * half):
            for at in (start + half, start, start + half) if is_proven else (start + half,):
                source.read(at, half)
    fetched = sum(count for _, _, count in counting.reads)
    assert fetched <= 2 * 2**26 if is_proven else fetched == 2**25


def test_no_more_is_asked_for_ahead_than_a_block_expects_to_read() -> None:
    counting = CountingTree(MemoryTree({"x": bytes(2**27)}))
    place = StoredPlace(ReadAhead(counting), PurePosixPath("x"))

    def fetched(*, start: int) -> int:
        counting.reads.clear()
        for at in range(start, start + 2**25, 2**23):
            source.read(at, 2**23)
        return sum(count for _, _, count in counting.reads)

    with Files() as files:
        source = files.source(place)
        with expecting(place, 2**25):
            assert fetched(start=0) == 2**25
        assert fetched(start=2**26) > 2**25  # seen red: nothing was asked for ahead any more


def test_a_request_ahead_that_failed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen red: who tried again got the errors of requests that had failed before."""
    tree = MemoryTree({"x": bytes(2**27)})
    read_into, fails = tree.read_into, [False]

    def read(facts: Facts, start: int, into: memoryview) -> None:
        if fails[0]:
            raise CorruptError("The store is away.")
        read_into(facts, start, into)

    monkeypatch.setattr(tree, "read_into", read)
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(tree), PurePosixPath("x")))
        for start in range(0, 2**25, 2**23):
            source.read(start, 2**23)
        fails[0] = True
        with pytest.raises(CorruptError):
            for start in range(2**25, 2**27, 2**23):
                source.read(start, 2**23)
        time.sleep(0.05)
        fails[0] = False
        for start in range(2**25, 2**27, 2**23):
            assert not source.read(start, 2**23).any()


def test_a_page_now_and_then_is_not_taken_for_a_tensor() -> None:
    counting = CountingTree(MemoryTree({"x": bytes(2**25)}))
    with Files() as files:
        source = files.source(StoredPlace(ReadAhead(counting), PurePosixPath("x")))
        for start in range(0, 2**25, 2**21):
            for page in range(3):
                source.read(start + page * 2**16, 2**16)
    assert sum(count for _, _, count in counting.reads) <= 16 * 2**18


def test_telling_formats_apart_reads_no_tensor(targets: dict[str, Path]) -> None:
    folder = targets["safetensors"]
    far, counting = stored(folder)
    registry.detect_container(far)
    assert sum(count for _, _, count in counting.reads) <= 2**16 * (1 + len([*folder.iterdir()]))


ASKING = {
    "stat",
    "lstat",
    "realpath",
    "abspath",
    "relpath",
    "isdir",
    "isfile",
    "lexists",
    "resolve",
    "readlink",
    "samefile",
}
ALLOWED = {
    "statekit/conversion/registry.py": {"scandir"},  # a glance, which decides nothing
    "statekit/conversion/convert.py": {"readlink"},  # of a target
    "statekit/conversion/seal.py": {"abspath", "stat"},  # of files of this machine, whose manifest it writes
    "statekit/conversion/target.py": {"realpath", "samefile"},
    "converters/formats/zarr/stores.py": {"realpath"},  # what tensorstore reads by itself
}


def asked(text: str) -> set[str]:
    """Returns the calls in a module that ask the system about a path."""
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {
        call.attr for call in calls if isinstance(call, ast.Attribute) and call.attr in {*ASKING, "scandir"}
    }


def test_containers_and_conversion_ask_places_and_not_the_system() -> None:
    top = Path(statekit.__file__).parents[1]
    rooms = ("converters/containers", "converters/formats", "statekit/conversion")
    modules = [module for room in rooms for module in sorted((top / room).rglob("*.py"))]
    calls = {
        module.relative_to(top).as_posix(): asked(module.read_text(encoding="utf-8")) for module in modules
    }
    assert {module: names for module, names in calls.items() if names} == ALLOWED
    assert asked("os.path.realpath(place)") == {"realpath"}


@pytest.mark.parametrize("data", [b"1234567", b"123456789", b""], ids=["short", "long", "empty"])
def test_an_answer_of_another_length_is_an_error_that_names_the_place(data: bytes) -> None:
    buffer = memoryview(bytearray(8))
    with pytest.raises(CorruptError, match=r"(?s)number of bytes.*byte 16 of s3://bucket/run.*8 bytes"):
        fill(buffer, data, 16, "s3://bucket/run")
    fill(buffer, b"12345678", 16, "s3://bucket/run")
    assert buffer.tobytes() == b"12345678"
