"""Torch files for tests: written by statekit, and made by hand opcode by opcode."""

from __future__ import annotations

import pickle
import struct
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.contracts import Encoded
from statekit.converters.containers.torch_file import CONTAINER
from statekit.converters.formats.pytorch.reader import LEGACY_MAGIC
from statekit.files.stage import staged
from statekit.tensors.tree import Record, Tree


def save(path: Path, tree: Tree) -> Path:
    with staged(path, "file") as stage:
        CONTAINER.write(Encoded(tree, 0), stage)
        stage.commit(CONTAINER.open)
    return path


def read_all(path: Path) -> dict[str, bytes]:
    with CONTAINER.open(path) as checkpoint:
        return {name: tensor.read().tobytes() for name, tensor in checkpoint.tensors.items()}


class _Stub:
    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle._Unpickler):
    """Python's own, for recordings that are trusted, with stand-ins for classes that aren't installed here."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in (
            "torch",
            "collections",
            "numpy",
            "_codecs",
            "pathlib",
            "builtins",
            "__builtin__",
        ):
            return super().find_class(module, name)
        return type(name, (_Stub,), {"name": f"{module}.{name}"})


def torch_load(path: Path) -> Any:
    import torch

    module = types.SimpleNamespace(
        Unpickler=_Unpickler, load=lambda f, **options: _Unpickler(f, **options).load(), __name__="pickle"
    )
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=module)


def assert_same(ours: Any, theirs: Any, path: str) -> int:
    """Compares a tree with what PyTorch loaded; returns how many tensors it met."""
    import torch

    if isinstance(theirs, (torch.Tensor, np.ndarray)):
        whole = torch.from_numpy(theirs) if isinstance(theirs, np.ndarray) else theirs.detach()
        assert tuple(ours.shape) == tuple(whole.shape), path
        assert f"torch.{ours.dtype.name}" == str(whole.dtype), path
        plain = whole.resolve_conj().resolve_neg().contiguous().reshape(-1)
        assert ours.read().tobytes() == plain.view(torch.uint8).numpy().tobytes(), path
        return 1
    if isinstance(theirs, _Stub):
        assert isinstance(ours, Record), path
        assert ours.name == theirs.name, path  # type: ignore[attr-defined]  # told by isinstance of the other
        return assert_same(ours.state, getattr(theirs, "state", None), f"{path}.state")
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        return sum(assert_same(ours[key], theirs[key], f"{path}/{key}") for key in theirs)
    if isinstance(theirs, (list, tuple)):
        assert type(ours) is (list if isinstance(theirs, list) else tuple), path
        assert len(ours) == len(theirs), path
        return sum(assert_same(*pair, f"{path}/{i}") for i, pair in enumerate(zip(ours, theirs, strict=True)))
    if not isinstance(ours, Record):  # such as a path or a device
        assert repr(ours) == repr(theirs), path  # NaN too
        assert type(ours) is type(theirs), path
    return 0


STORAGE = b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu%stQ"


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def tensor(
    count: int = 4, offset: int = 0, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,)
) -> bytes:
    sizes = b"(" + b"".join(map(number, size)) + b"t(" + b"".join(map(number, stride)) + b"t"
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n" + STORAGE % number(count) + number(offset) + sizes + b"\x89}tR"
    )


def torch_zip(path: Path, pickled: bytes, data: bytes = bytes(16), **extra: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", data)
        archive.writestr("a/version", "3")
        for name, more in extra.items():
            archive.writestr(f"a/{name}", more)
    return path


def legacy_bytes(keys: list[str], counts: list[int], data: bytes = bytes(16), pickled: bytes = b"") -> bytes:
    first = [pickle.dumps(x, 2) for x in (LEGACY_MAGIC, 1001, {"little_endian": True})]
    saved = pickled or tensor().replace(b"tQ", b"NtQ") + b"."
    body = b"".join(struct.pack("<q", count) + data for count in counts)
    return b"".join([*first, b"\x80\x02" + saved, pickle.dumps(keys, 2), body])
