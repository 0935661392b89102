"""Torch files are read as PyTorch reads them, without PyTorch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import textwrap
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import calls
from torch_files import assert_same, save, tensor, torch_load, torch_zip

from goldens import GOLDEN
from statekit.converters.containers.torch_file import CONTAINER
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.tensor import DTYPES, Cast, Filled, Stored, Tensor, in_memory
from statekit.tensors.tree import Record

SYSTEMS = ("torch_formats", "torch_adafactor", "hf_adafactor", "scaled_adam")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def recordings() -> list[Path]:
    files = (p for system in SYSTEMS for p in (GOLDEN / system).rglob("*") if p.suffix in SUFFIXES)
    return sorted(files)


@pytest.mark.torch
def test_recordings_are_read_as_torch_reads_them() -> None:
    tensors = 0
    for path in recordings():
        assert CONTAINER.detect(path) is not None, path
        with CONTAINER.open(path) as checkpoint:
            count = assert_same(checkpoint.tree, torch_load(path), path.name)
            assert count == len(checkpoint.tensors)
            tensors += count
    assert len(recordings()) >= 20
    assert tensors > 100


@pytest.mark.torch
def test_comparison_notices_a_changed_value(tmp_path: Path) -> None:
    import torch

    torch.save({"a": torch.arange(3.0)}, tmp_path / "a.pt")
    torch.save({"a": torch.tensor([0.0, 1.0, 2.5])}, tmp_path / "b.pt")
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint, pytest.raises(AssertionError):
        assert_same(checkpoint.tree, torch_load(tmp_path / "b.pt"), "b")


def torch_tree() -> Any:
    import torch

    base = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)
    state = torch.nn.Linear(3, 2).state_dict()
    every = {str(t): torch.arange(6).reshape(2, 3).to(t) for t in (getattr(torch, name) for name in DTYPES)}
    return {
        "model": state,
        "types": every,
        "views": [
            base,
            base[1],
            base.permute(2, 0, 1),
            base[:, ::2, 1:4],
            base[:, :, 2],
            base.expand(2, 3, 4, 5),
        ],
        "shapes": (torch.tensor(2.5), torch.zeros(0, 4), torch.zeros(3, 0, 2), torch.ones(1, 1)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "flipped": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "plain": [1, 2**80, -(2**40), 0.1, None, True, "text", (1, (2,)), {3: "int key"}, torch.Size([2, 3])],
    }


@pytest.mark.torch
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_everything_torch_saves(tmp_path: Path, new: bool, protocol: int) -> None:
    import torch

    path, tree = tmp_path / "a.pt", torch_tree()
    torch.save(tree, path, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
    with CONTAINER.open(path) as checkpoint:
        assert assert_same(checkpoint.tree, tree, "") == 2 + len(DTYPES) + 6 + 4 + 3
        assert checkpoint.meta["generation"] == ("zip" if new else "legacy")
        assert checkpoint.findings == ()


@pytest.mark.torch
def test_blocks_of_strided_tensors(tmp_path: Path) -> None:
    import torch

    base = torch.randn(40, 30, 20, generator=torch.Generator().manual_seed(0))
    views = {
        "t": base.permute(2, 1, 0),
        "s": base[::3, :, ::7],
        "e": base[:, :1].expand(40, 9, 20),
        "c": base[:, 3, 5],
    }
    torch.save(views, tmp_path / "a.pt")
    rng = np.random.default_rng(0)
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint:
        for name, view in views.items():
            for _ in range(40):
                cuts = [sorted(rng.integers(0, n + 1, 2)) for n in view.shape]
                index = tuple(slice(int(a), int(b)) for a, b in cuts)
                assert np.array_equal(checkpoint.tensors[name].read(index), view[index].numpy())


@pytest.mark.torch
def test_unknown_types_keep_their_bytes(tmp_path: Path) -> None:
    import torch

    scales = torch.tensor([3, 4], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    sparse, storage = torch.eye(2).to_sparse(), torch.arange(3.0).untyped_storage()
    torch.save({"a": torch.ones(2), "b": scales, "sparse": sparse, "storage": storage}, tmp_path / "a.pt")
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.tensors["b/args/0"].read().tolist() == [3, 4]
        assert checkpoint.tree["b"].args[6] == Record("torch.float8_e8m0fnu")
        assert checkpoint.tree["sparse"].name == "torch._utils._rebuild_sparse_tensor"
        assert checkpoint.tensors["storage"].read().view(np.float32).tolist() == [0, 1, 2]
        assert checkpoint.tensors["a"].read().tolist() == [1, 1]


@pytest.mark.torch
def test_attributes_of_tensors_are_noted(tmp_path: Path) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    weight.axes = "embed"  # type: ignore[attr-defined]  # an attribute of a user's
    torch.save({"w": weight}, tmp_path / "a.pt")
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint:
        assert "attribute axes of a tensor" in checkpoint.findings[0].what
        assert checkpoint.tensors["w"].read().tolist() == [1, 1]


@pytest.mark.torch
def test_a_file_without_checksums_is_read_and_said_to_be(tmp_path: Path) -> None:
    import torch
    from torch.utils.serialization import config

    config.save.compute_crc32 = False
    try:
        torch.save({"a": torch.arange(3.0)}, tmp_path / "a.pt")
    finally:
        config.save.compute_crc32 = True
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint:
        assert "no checksum" in checkpoint.findings[0].what
        assert checkpoint.tensors["a"].read().tolist() == [0, 1, 2]


def test_a_tensor_from_numpy_in_another_type(tmp_path: Path) -> None:
    array = pickle.dumps(np.arange(4, dtype=np.float32), 2)[2:-1]
    call = b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n("
    path = torch_zip(tmp_path / "a.pt", call + array + b"ctorch\nbfloat16\nU\x03xla\x89tR.")
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.dtype == DTYPES["bfloat16"]
        assert checkpoint.tree.read().tolist() == [0, 1, 2, 3]
    path = torch_zip(tmp_path / "b.pt", call + array + b"ctorch\nbits8\nU\x03xla\x89tR.")
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tensors["args/0"].read().tolist() == [0, 1, 2, 3]


def test_a_wrapper_around_a_tensor_keeps_what_it_wraps(tmp_path: Path) -> None:
    function = b"ctorch._utils\n_rebuild_wrapper_subclass\n"
    wrapper = b"ctorch._tensor\n_rebuild_from_type_v2\n(" + function + b"cpack.age\nDTensor\n)"
    path = torch_zip(tmp_path / "a.pt", wrapper + b"}U\x05local" + tensor() + b"stR.", bytes(16))
    with CONTAINER.open(path) as checkpoint:
        assert checkpoint.tree.name == "pack.age.DTensor"
        assert checkpoint.tensors["state/local"].read().tolist() == [0, 0, 0, 0]


def test_a_subclass_of_tensor_is_read_and_noted(tmp_path: Path) -> None:
    args = tensor().removeprefix(b"ctorch._utils\n_rebuild_tensor_v2\n").removesuffix(b"R")
    kind = b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\ncpack\nSub\n"
    with CONTAINER.open(torch_zip(tmp_path / "a.pt", kind + args + b"}tR.")) as checkpoint:
        assert checkpoint.tree.shape == (4,)
        assert "subclass pack.Sub" in checkpoint.findings[0].what


@pytest.mark.torch
@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_whole_modules_and_optimizers_are_data(tmp_path: Path, new: bool) -> None:
    import torch

    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save([module, optimizer], tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    with CONTAINER.open(tmp_path / "a.pt") as checkpoint:
        weight = checkpoint.tree[0]["weight"]
        assert np.array_equal(weight.read(), module.weight.detach().numpy())
        assert checkpoint.tree[1]["param_groups"][0]["lr"] == 0.1
        assert len(checkpoint.tensors) == 4


def test_detection_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    others = [
        b"",
        b"PK",
        b"PK\x03\x04",
        b"PK\x03\x04" + bytes(100),
        b"\x80\x02}.",
        bytes(1000),
        b"PK\x05\x06" + bytes(18),
    ]
    for data in others:
        path.write_bytes(data)
        assert CONTAINER.detect(path) is None, data
        with pytest.raises(FormatError):
            CONTAINER.open(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("word/document.xml", "x")
    assert CONTAINER.detect(path) is None
    assert CONTAINER.detect(tmp_path) is None
    assert CONTAINER.detect(tmp_path / "missing") is None
    for missing in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotFoundError):
            CONTAINER.open(missing)


def test_detection_of_damaged_files_still_says_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": in_memory(np.arange(1000.0))})
    path.write_bytes(path.read_bytes()[:4000])
    assert CONTAINER.detect(path) is not None
    with pytest.raises(CorruptError, match="cut off"):
        CONTAINER.open(path)


def test_programs_and_the_oldest_format_are_refused_in_a_sentence(tmp_path: Path) -> None:
    program = torch_zip(tmp_path / "a.pt", tensor() + b".", **{"constants.pkl": b"", "code/x.py": b""})
    with pytest.raises(RefusedError, match="TorchScript"):
        CONTAINER.open(program)
    import io
    import tarfile

    old = tmp_path / "old.pt"
    with tarfile.open(old, "w") as archive:
        for name in ("sys_info", "pickle", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert CONTAINER.detect(old) is not None
    with pytest.raises(RefusedError, match="tar archive"):
        CONTAINER.open(old)


def test_a_file_has_no_steps(tmp_path: Path) -> None:
    path = torch_zip(tmp_path / "a.pt", tensor() + b".")
    with pytest.raises(NotFoundError, match="step"):
        CONTAINER.open(path, step=3)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"w": in_memory(np.arange(3.0)), "lr": 0.1})
    code = f"""
        import sys
        from pathlib import Path
        from statekit.converters.containers.torch_file import CONTAINER
        with CONTAINER.open(Path({str(path)!r})) as checkpoint:
            for tensor in checkpoint.tensors.values():
                tensor.read()
        assert not {{"torch", "jax", "tensorflow", "tensorstore"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_opening_grows_with_the_number_of_tensors_only(tmp_path: Path) -> None:
    one = in_memory(np.zeros((2, 2), np.float32))

    def opening(tensors: int) -> int:
        cast = Cast(one, one.dtype)
        fresh = {"state": {i: {"exp_avg": cast, "step": cast} for i in range(tensors // 2)}}
        path = save(tmp_path / f"{tensors}.pt", fresh)

        def opened() -> None:
            with CONTAINER.open(path) as checkpoint:
                assert len(checkpoint.tensors) == tensors

        return calls(opened)

    thousand = opening(1_000)
    assert thousand < 1_000 * 500
    assert opening(4_000) < 4.4 * thousand


def test_the_headers_of_small_tensors_are_read_many_at_once_and_those_of_large_ones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = save(tmp_path / "small.pt", {f"{i}": Filled((2,), np.dtype("f4")) for i in range(1000)})
    large = save(tmp_path / "large.pt", {f"{i}": Filled((2**16,), np.dtype("f4")) for i in range(20)})
    reads: list[int] = []
    preadv = os.preadv

    def counted(number: int, into: list[memoryview], at: int) -> int:
        reads.append(preadv(number, into, at))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    with CONTAINER.open(small):
        assert len(reads) < 20
    reads.clear()
    with CONTAINER.open(large):
        assert sum(reads) < 2**14


def test_opening_reads_no_values(tmp_path: Path) -> None:
    path = save(tmp_path / "a.pt", {"big": Filled((2**22,), np.dtype(np.float32), 1.0)})
    checkpoint: Checkpoint = CONTAINER.open(path)
    with checkpoint:
        tensor: Tensor = checkpoint.tensors["big"]
        assert isinstance(tensor, Stored)
        assert tensor.name == "big"
        assert tensor.place == str(path)
        tracemalloc.start()
        CONTAINER.open(path).close()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**20
