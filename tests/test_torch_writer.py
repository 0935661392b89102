"""Written torch files: plain `torch.load` reads them, they are equal when their trees are, and carry a manifest."""

from __future__ import annotations

import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_files import assert_same, save

from statekit.conversion.contracts import Encoded
from statekit.converters.containers.torch_file import CONTAINER
from statekit.converters.formats import zip_archive
from statekit.converters.formats.zip_archive import LOCAL
from statekit.errors import CommitError, UsageError
from statekit.files.stage import staged
from statekit.tensors.tensor import BLOCK_BYTES, DTYPES, Filled, chunks, in_memory
from statekit.tensors.tree import Record
from statekit.testing.container_trials import open_proven


def tree(kind: type[dict[Any, Any]] = dict) -> dict[Any, Any]:
    rng = np.random.default_rng(0)
    every = {
        f"t_{name}": in_memory(np.arange(6).reshape(2, 3).astype(dtype)) for name, dtype in DTYPES.items()
    }
    return {
        "model": kind(w=in_memory(rng.standard_normal((7, 5)).astype(np.float32)), **every),
        "optimizer": {
            "state": {0: {"v_row": in_memory(rng.standard_normal(7)), "step": in_memory(np.array(4, np.float32))}},
            "param_groups": [{"lr": np.float32(0.1), "betas": (0.9, np.float64(0.95)), "params": [0], "eps": None}],
        },
        "shapes": [in_memory(np.zeros((0, 4))), in_memory(np.ones((2, 0), np.int8)), in_memory(np.array(True))],
        "step": np.int64(4),
        "plain": [2**80, -(2**31), 255, 256, 65536, -1, float("inf"), True, np.bool_(False), "é", b"\0\xff", (), (1,)],
        "empty": {"dict": {}, "list": [], (1, "key"): "tuple key"},
    }  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("calculated", [False, True])
def test_plain_torch_load_reads_what_is_written(
    tmp_path: Path, mmap: bool, calculated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.utils.serialization import config

    path = save(tmp_path / "a.pt", tree(OrderedDict))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # compares calculated offsets with true ones
    with config.patch({"load.calculate_storage_offsets": calculated}):  # type: ignore[attr-defined]  # made at run time
        loaded = torch.load(path, weights_only=True, mmap=mmap)
    assert isinstance(loaded.pop("statekit"), str)
    assert type(loaded["model"]) is OrderedDict
    assert type(loaded["optimizer"]["param_groups"][0]["lr"]) is float
    assert type(loaded["optimizer"]["param_groups"][0]["betas"][1]) is float
    assert type(loaded["step"]) is int
    with open_proven(CONTAINER, path) as checkpoint:
        assert assert_same(checkpoint.tree, loaded, "") == 1 + len(DTYPES) + 2 + 3
        assert checkpoint.findings == ()


@pytest.mark.torch
def test_written_files_suit_an_optimizer(tmp_path: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.AdamW([weight])
    state = {"step": in_memory(np.array(9, np.float32)), "exp_avg": in_memory(np.ones((2, 3), np.float32)),
             "exp_avg_sq": in_memory(np.full((2, 3), 4, np.float32))}  # fmt: skip
    groups = [{**optimizer.state_dict()["param_groups"][0], "lr": np.float64(0.5)}]
    path = save(tmp_path / "o.pt", {"state": {0: state}, "param_groups": groups})
    loaded = torch.load(path, weights_only=True)
    optimizer.load_state_dict({key: loaded[key] for key in ("state", "param_groups")})
    assert optimizer.state[weight]["exp_avg_sq"].mean() == 4
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_round_trip_keeps_bytes_tree_and_manifest(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", tree())
    with open_proven(CONTAINER, path) as checkpoint:
        assert checkpoint.manifest is not None
        assert checkpoint.manifest["tensors"]["model/w"]["shape"] == [7, 5]
        assert "statekit" not in checkpoint.tree
        assert checkpoint.tree["plain"] == tree()["plain"]
        assert checkpoint.tree["empty"] == tree()["empty"]
        # Tensors of a container have names; the Protocol doesn't say so.
        names = [name for name, tensor in checkpoint.tensors.items() if tensor.name != name]  # type: ignore[attr-defined]  # a field of this kind alone
        assert names == []
        again = save(tmp_path / "b.pt", checkpoint.tree)
    assert again.read_bytes() == path.read_bytes()


def test_two_writes_give_equal_bytes(tmp_path: Path) -> None:
    first, second = (save(tmp_path / name, tree()).read_bytes() for name in ("a.pt", "b.pt"))
    assert first.replace(b"a.pt", b"b.pt") == second.replace(b"a.pt", b"b.pt")


def test_other_zip_readers_agree_and_storages_are_aligned(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", tree())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        raw = path.read_bytes()
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", raw, info.header_offset + 26)
            assert (info.header_offset + LOCAL.size + name + extra) % 64 == 0
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/byteorder") == b"little"
        assert archive.infolist()[-1].filename == "archive/data.pkl"


@pytest.mark.torch
def test_tensors_that_share_bytes_share_them_in_the_file(tmp_path: Path) -> None:
    import torch

    weight = torch.arange(1000.0)
    torch.save({"tied": weight, "also": weight.clone(), "embed": weight}, tmp_path / "a.pt")
    with open_proven(CONTAINER, tmp_path / "a.pt") as checkpoint:
        path = save(tmp_path / "b.pt", checkpoint.tree)
    loaded = torch.load(path, weights_only=True)
    assert loaded["tied"].data_ptr() == loaded["embed"].data_ptr() != loaded["also"].data_ptr()
    assert path.stat().st_size < 12_000


def test_a_bare_tensor_and_a_list(tmp_path: Path) -> None:
    with open_proven(CONTAINER, save(tmp_path / "t.pt", in_memory(np.arange(3.0)))) as checkpoint:
        assert checkpoint.manifest is None
        assert checkpoint.tensors[""].read().tolist() == [0, 1, 2]
    with open_proven(CONTAINER, save(tmp_path / "l.pt", [in_memory(np.arange(2.0)), 5])) as checkpoint:
        assert list(checkpoint.tensors) == ["0"]


def test_what_weights_only_refuses_is_named_at_once(tmp_path: Path) -> None:
    bad = {
        "a": Record("argparse.Namespace", (), {"x": 1}),
        "b": [1, {2}],
        "c": 2**5000,
        "d": np.zeros(2),
        "e": 1j,
    }
    with pytest.raises(UsageError) as caught, staged(tmp_path / "a.pt", "file") as stage:
        CONTAINER.write(Encoded(bad, 0), stage)
    for part in ("argparse.Namespace @ a", "set @ b/1", "5001 bits @ c", "ndarray @ d", "complex @ e"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_gives_other_bytes_than_it_says_is_an_error(tmp_path: Path) -> None:
    whole = in_memory(np.zeros(4, np.float32))
    with pytest.raises(CommitError, match="other bytes"), staged(tmp_path / "a.pt", "file") as stage:
        stage.stream = lambda name, tensor: iter([memoryview(bytes(12))])  # type: ignore[method-assign]  # the fault
        CONTAINER.write(Encoded({"w": whole}, 0), stage)
    assert list(tmp_path.iterdir()) == []


def test_the_manifests_name_is_reserved(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="taken"), staged(tmp_path / "a.pt", "file") as stage:
        CONTAINER.write(Encoded({"statekit": 1}, 0), stage)


def test_large_offsets_are_written_in_64_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = save(tmp_path / "a.pt", tree()).read_bytes()
    assert b"PK\x06\x06" not in small
    monkeypatch.setattr(zip_archive, "WIDE_FROM", 1000)  # as if 4 GB were 1000 bytes
    monkeypatch.setattr(zip_archive, "_narrow", lambda n: 0xFFFFFFFF if n >= 1000 else n)
    path = save(
        tmp_path / "w.pt", {"model": {"w": in_memory(np.arange(500.0))}, "rest": in_memory(np.arange(3))}
    )
    assert b"PK\x06\x06" in path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    with open_proven(CONTAINER, path) as checkpoint:
        assert checkpoint.tensors["model/w"].read().sum() == 124_750
        assert checkpoint.tensors["rest"].read().tolist() == [0, 1, 2]


@pytest.mark.torch
def test_torch_reads_64_bit_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(zip_archive, "WIDE_FROM", 1000)
    path = save(tmp_path / "w.pt", {"w": in_memory(np.arange(500.0)), "rest": in_memory(np.arange(3))})
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["w"].sum() == 124_750
    assert loaded["rest"].tolist() == [0, 1, 2]


def test_writing_and_reading_hold_a_few_blocks(tmp_path: Path) -> None:
    big = Filled((6, 2**23), np.dtype(np.float32), 1.5)  # 192 MiB
    tracemalloc.start()
    try:
        path = save(tmp_path / "a.pt", {"big": big, "after": in_memory(np.arange(3))})
        with open_proven(CONTAINER, path) as checkpoint:
            assert all(block.flat[0] == 1.5 for block in chunks(checkpoint.tensors["big"]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * BLOCK_BYTES


@pytest.mark.torch
def test_a_transposed_tensor_streams_in_little_memory(tmp_path: Path) -> None:
    import torch

    torch.save({"t": torch.arange(2**24, dtype=torch.int32).reshape(2**11, 2**13).T}, tmp_path / "a.pt")
    with open_proven(CONTAINER, tmp_path / "a.pt") as checkpoint:
        tensor = checkpoint.tensors["t"]
        tensor.read((slice(0, 1), slice(0, 1)))  # the checksum's pass
        tracemalloc.start()
        try:
            block = tensor.read((slice(100, 200), slice(0, 2**11)))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert block[5, 7] == 7 * 2**13 + 105
    assert peak < 3 * 2**20  # the tensor has 64


def rewritten(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Changes the pickle of a file and repairs what a thoughtful attacker would: sizes and checksums."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    target = path.with_name("changed.pt")
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("/data.pkl") else data)
    return target


def test_a_manifest_that_does_not_fit_is_not_trusted(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": in_memory(np.arange(4.0))})
    for old, new in (
        (b'"shape": [4]', b'"shape": [5]'),
        (b'{"digest"', b'["digest"'),
        (b'"w": {', b'"x": {'),
    ):
        # mypy can't infer a lambda whose defaults bind what the loop changes.
        changed = rewritten(path, lambda data, old=old, new=new: data.replace(old, new))  # type: ignore[misc]  # bound by defaults
        with open_proven(CONTAINER, changed) as checkpoint:
            assert checkpoint.manifest is None
            assert checkpoint.findings[0].damage
            assert "statekit" not in checkpoint.tree
            assert checkpoint.tensors["w"].read().tolist() == [0, 1, 2, 3]


@pytest.mark.torch
def test_a_manifest_for_other_tensors_is_not_trusted(tmp_path: Path) -> None:
    import torch

    loaded = torch.load(save(tmp_path / "a.pt", {"w": in_memory(np.arange(4.0))}), weights_only=True)
    torch.save(
        {**loaded, "more": torch.ones(1)}, tmp_path / "b.pt"
    )  # resumed, trained on and saved with the old text
    with open_proven(CONTAINER, tmp_path / "b.pt") as checkpoint:
        assert checkpoint.manifest is None
        assert checkpoint.findings[0].damage and checkpoint.findings[0].place == "more"


@pytest.mark.torch
def test_a_module_called_statekit_is_no_manifest(tmp_path: Path) -> None:
    import torch

    torch.save({"statekit": {"w": torch.ones(1)}}, tmp_path / "a.pt")
    with open_proven(CONTAINER, tmp_path / "a.pt") as checkpoint:
        assert list(checkpoint.tensors) == ["statekit/w"]
