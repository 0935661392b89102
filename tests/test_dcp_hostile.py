"""Distributed checkpoints that lie, run code, or are damaged: refused by a typed error, and nothing is run."""

from __future__ import annotations

import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dcp_files import DCP, MEGATRON, folder, save, spoilt

from statekit.conversion.contracts import Container
from statekit.conversion.open_state import open_state
from statekit.converters.containers.dcp import CONTAINER
from statekit.converters.containers.megatron import CONTAINER as MEGATRON_CONTAINER
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError, StatekitError
from statekit.tensors.tensor import Filled

MODEL = "model.embed.weight"


class Canary:
    """Unpickled by Python, it makes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.place)!r}, 'w').close()",)


def info(metadata: Any, key: str = MODEL) -> Any:
    return next(value for index, value in metadata.storage_data.items() if index.fqn == key)


def entry(metadata: Any) -> Any:
    return metadata.state_dict_metadata[MODEL]


def set_path(name: str) -> Callable[[Any], None]:
    return lambda metadata: setattr(info(metadata), "relative_path", name)


def set_place(**numbers: int) -> Callable[[Any], None]:
    return lambda metadata: vars(info(metadata)).update(numbers)


def set_size(*size: int) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        import torch

        entry(metadata).size = torch.Size(size)

    return change


def set_chunk(sizes: tuple[int, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        import torch

        entry(metadata).chunks[0].sizes = torch.Size(sizes)

    return change


def again(metadata: Any) -> None:
    """A second part over the same values, lying elsewhere."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    chunk = entry(metadata).chunks[0]
    import torch

    offsets = torch.Size([1, 0])
    entry(metadata).chunks.append(ChunkStorageMetadata(offsets, torch.Size([5, 4])))
    other = info(metadata, "model.enc.wi.weight")
    assert chunk.sizes == (6, 4)
    metadata.storage_data[MetadataIndex(MODEL, offsets)] = other


def without_place(metadata: Any) -> None:
    metadata.storage_data = {i: v for i, v in metadata.storage_data.items() if i.fqn != MODEL}


def through_extension(metadata: Any) -> None:
    info(metadata).transform_descriptors = ["stream.zstd"]


def set_paths(**paths: tuple[Any, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        keys = {"embed": MODEL, "bias": "model.enc.bias", "step": "step"}
        metadata.planner_data |= {keys[name]: path for name, path in paths.items()}

    return change


def without_entry(metadata: Any) -> None:
    del metadata.state_dict_metadata[MODEL]
    del metadata.planner_data[MODEL]


def exchanged_paths(metadata: Any) -> None:
    """PyTorch loads by the keys, and its converter by the paths."""
    paths, other = metadata.planner_data, "model.enc.wi.weight"
    paths[MODEL], paths[other] = paths[other], paths[MODEL]


def without_path(metadata: Any) -> None:
    del metadata.planner_data[MODEL]


LIES: dict[str, tuple[Callable[[Any], None], type[StatekitError], str]] = {
    "above": (set_path("../secret"), RefusedError, "outside the checkpoint"),
    "absolute": (set_path("/etc/passwd"), RefusedError, "outside the checkpoint"),
    "below": (set_path("a/b"), RefusedError, "outside the checkpoint"),
    "nameless": (set_path(""), RefusedError, "outside the checkpoint"),
    "itself": (set_path("."), RefusedError, "outside the checkpoint"),
    "missing file": (set_path("__9_9.distcp"), NotFoundError, "missing"),
    "beyond the end": (set_place(offset=2**40), CorruptError, "shorter than the metadata says"),
    "negative": (set_place(offset=-1), FormatError, "is -1, expected a whole number from 0 on"),
    "too long": (set_place(length=2**50), CorruptError, "overlaps|shorter"),
    "too short": (set_place(length=95), CorruptError, "needs more bytes"),
    "shared bytes": (set_place(offset=0), CorruptError, "overlaps"),
    "too large": (set_size(2**31, 4), CorruptError, r"has 24 of \d+ values"),
    "absurd": (set_size(2**61, 2**61), CorruptError, "values"),
    "smaller": (set_size(5, 4), CorruptError, "reaches beyond"),
    "another rank": (set_size(6, 4, 1), CorruptError, "2 axes, expected 3"),
    "a hole": (set_chunk((5, 4)), CorruptError, "has 20 of 24 values"),
    "an overlap": (again, CorruptError, "overlap"),
    "nowhere": (without_place, CorruptError, "nowhere|lies"),
    "compressed": (through_extension, RefusedError, "extension"),
    "a taken path": (set_paths(embed=("model", "enc.bias")), FormatError, "can't both be in one tree"),
    "through a value": (set_paths(embed=("step", "x")), FormatError, "can't both be in one tree"),
    "a huge index": (set_paths(step=("list", 2**40)), RefusedError, "impossible places"),
    "a list and a dict": (set_paths(step=("model", 0)), FormatError, "a list and a dict"),
    "no path": (set_paths(step=()), FormatError, "not possible"),
    "a strange path": (set_paths(step=("a", None)), FormatError, "not possible"),
    "an entry is gone": (without_entry, CorruptError, "belong to no entry"),
    "exchanged paths": (exchanged_paths, CorruptError, "aren't their places"),
    "no path of one": (without_path, CorruptError, "no place in the tree"),
    "too deep": (set_paths(step=("a",) * 600), RefusedError, "too deep"),
}


@pytest.mark.torch
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_when_it_is_opened(lie: str, tmp_path: Path) -> None:
    change, error, words = LIES[lie]
    (tmp_path / "secret").write_text("secret")
    place = spoilt(tmp_path, change)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words):
            CONTAINER.open(place)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.torch
def test_a_part_that_is_another_is_refused_when_it_is_read(tmp_path: Path) -> None:
    def turned(metadata: Any) -> None:
        set_size(4, 6)(metadata)
        set_chunk((4, 6))(metadata)

    def bits(metadata: Any) -> None:
        import torch

        entry(metadata).properties.dtype = torch.int32

    for name, change in (("turned", turned), ("bits", bits)):
        with CONTAINER.open(spoilt(tmp_path / name, change)) as checkpoint:
            with pytest.raises(CorruptError, match="isn't what the metadata says"):
                checkpoint.tensors["model/embed.weight"].read()
            checkpoint.tensors["model/enc.bias"].read()


def test_code_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    program = pickle.dumps({"state_dict_metadata": Canary(canary)})
    copy = tmp_path / "it"
    shutil.copytree(folder(DCP[0]), copy)
    copy.chmod(0o755)
    (copy / ".metadata").chmod(0o644)
    (copy / ".metadata").write_bytes(program)
    with pytest.raises(RefusedError, match=r"nothing was run(.|\n)*exec"):
        CONTAINER.open(copy)
    with pytest.raises(StatekitError):
        open_state(copy)
    assert not canary.exists()
    pickle.loads(program)
    assert canary.exists()  # it would have sung


@pytest.mark.torch
@pytest.mark.parametrize("part", ["object", "tensor", "common"])
def test_code_in_a_piece_is_not_run(part: str, tmp_path: Path) -> None:
    """PyTorch reads objects with pickle.load, and would have run it."""
    import torch

    canary, tree = tmp_path / "canary", {"model": {"w": Filled((2,), np.dtype("float32"))}, "note": "n" * 500}
    container: Container = CONTAINER
    if part == "common":
        container, tree = MEGATRON_CONTAINER, {"common": {"a": 1}, "sharded": {"w": tree["model"]["w"]}}  # type: ignore[index]  # a tree
    place = save(tmp_path / "iter_0000004", tree, container)
    torch.save(Canary(canary), tmp_path / "song.pt")
    song = (tmp_path / "song.pt").read_bytes()
    if part == "common":
        (place / "common.pt").write_bytes(song)
    else:
        _replace_piece(place, "note" if part == "object" else "model.w", song)
    with pytest.raises(RefusedError, match="nothing was run"), container.open(place) as checkpoint:
        checkpoint.tensors["model/w"].read()
    assert not canary.exists()
    torch.load(tmp_path / "song.pt", weights_only=False)
    assert canary.exists()


def _replace_piece(place: Path, key: str, raw: bytes) -> None:
    """Puts a piece behind the others, and the metadata's word for it."""
    metadata = pickle.loads((place / ".metadata").read_bytes())
    with (place / "__0_0.distcp").open("ab") as file:
        start = file.tell()
        file.write(raw)
    piece = info(metadata, key)
    piece.offset, piece.length = start, len(raw)
    (place / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", [DCP[0], MEGATRON])
def test_damage_is_noticed(name: str, tmp_path: Path) -> None:
    """Cut off or changed anywhere: a typed error, or, in bytes that nothing depends on, the same values."""
    container: Container = MEGATRON_CONTAINER if name == MEGATRON else CONTAINER
    source = folder(name)
    with container.open(source) as checkpoint:
        meant = {key: tensor.read().tobytes() for key, tensor in checkpoint.tensors.items()}
    rng = np.random.default_rng(7)
    for file in sorted(p.name for p in source.iterdir()):
        raw = (source / file).read_bytes()
        copy = tmp_path / file.strip(".")
        shutil.copytree(source, copy)
        copy.chmod(0o755)
        (copy / file).chmod(0o644)
        for cut in [0, 1, len(raw) - 1, *rng.integers(2, max(len(raw) - 1, 3), 3)]:
            (copy / file).write_bytes(raw[: int(cut)])
            assert _read(container, copy) is None, (file, cut)
        for at in rng.integers(0, len(raw), 12):
            turned = bytearray(raw)
            turned[at] ^= 1 << int(rng.integers(8))
            (copy / file).write_bytes(turned)
            values = _read(container, copy)
            # The metadata has no checksum: names may differ, but never a value under its name.
            assert values is None or all(meant.get(key, value) == value for key, value in values.items()), (
                file,
                at,
            )
        (copy / file).unlink()
        assert _read(container, copy) is None, file


def _read(container: Container, place: Path) -> dict[str, bytes] | None:
    try:
        with container.open(place) as checkpoint:
            return {key: tensor.read().tobytes() for key, tensor in checkpoint.tensors.items()}
    except StatekitError:
        return None


@pytest.mark.torch
@pytest.mark.parametrize("flattened", [False, True])
def test_the_metadata_of_older_megatron(flattened: bool, tmp_path: Path) -> None:
    """The same, but for tensors that were flattened first."""
    place = spoilt(tmp_path, lambda metadata: None)
    raw = (place / ".metadata").read_bytes()
    home, name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"MCoreMetadata"
    metadata = pickle.loads(raw)
    metadata.mcore_data = {MODEL: {"nd_reformulated_orig_global_shape": (6, 4)} if flattened else {}}
    old = pickle.dumps(metadata, 2)
    assert home in old
    there = b"cmegatron.core.dist_checkpointing.strategies.torch\n" + name + b"\n"
    (place / ".metadata").write_bytes(old.replace(home, there))
    if flattened:
        with pytest.raises(RefusedError, match=r"flattened before(.|\n)*model\.embed\.weight"):
            CONTAINER.open(place)
    else:
        with CONTAINER.open(place) as checkpoint:
            assert checkpoint.tensors["model/embed.weight"].shape == (6, 4)
