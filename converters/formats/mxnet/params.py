"""The files of MXNet's `save_parameters`: a list of NDArrays, or in numpy mode an npz archive, whatever it is called.

A list is: 0x112 and 0 as u64, the number of arrays and the arrays, the number of names (0 or as many) and the names,
each behind its length. An npz is a zip archive of `<name>.npy`, stored. What is saved array by array is a folder of
such files.
Source: apache/mxnet, src/ndarray/ndarray.cc, `NDArray::Save` of a list; src/serialization/cnpy.cc, `npz::save`,
`npy::save`; NumPy, numpy/lib/format.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from statekit.converters.formats.mxnet.records import CPU, DTYPE_NAMES, read_record, record_header
from statekit.converters.formats.npy import MAGIC, SUFFIX, NpyBytes, is_npz, npz_arrays, read_npy
from statekit.converters.formats.zip_archive import ZipForm, ZipWriter
from statekit.errors import CorruptError, FormatError
from statekit.files.source import Files, Source, bring_scattered, bytes_at, listing
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import DTYPES, DType, Shape, Stored, Tensor, nbytes
from statekit.tensors.tree import MAX_NAME_BYTES, Record

LIST_MAGIC = struct.pack("<QQ", 0x112, 0)
NPZ, LIST, FOLDER = "npz", "list", "npy"
_ARRAY_NODES = 16
"""Values of a tree that an array counts for, with what says where its bytes lie."""
_NPY_SHORT = 128
"""MXNet's reader takes a header's length for a signed byte. Source: src/serialization/cnpy.cc, `npz::load`."""
_FORM = ZipForm("", 0, 0, 0)
# NumPy has no text for bfloat16; this one is MXNet's.
_DESCRIPTIONS = {"<b2" if name == "bfloat16" else DTYPES[name].str: DTYPES[name] for name in DTYPE_NAMES}
_DESCRIBED = {dtype: text for text, dtype in _DESCRIPTIONS.items()}


@dataclass(frozen=True)
class Params:
    """A file of parameters, or a folder of them.

    Attributes:
        arrays: By name, in the file's order; those of a folder by their sorted names.
        form: `npz`, `list`, or `npy` for a folder.
        generation: Of the records of a list; 3 for the others, which have none.
        device: Type and id that the arrays of a list were saved from.
    """

    arrays: Mapping[str, Stored]
    form: str
    generation: int
    device: tuple[int, int]


def form_of(head: bytes) -> str | None:
    """Returns which form a file has, by its first bytes; None if neither."""
    if head.startswith(LIST_MAGIC):
        return LIST
    return NPZ if is_npz(head) else None


def read_params(source: Source) -> Params:
    """Reads the headers of a file of parameters.

    Raises:
        CorruptError: Sizes or checksums disagree with the data.
        FormatError: It is neither a list of named arrays nor an npz, or breaks its format.
    """
    bring_scattered(source)
    form = form_of(bytes_at(source, 0, min(source.size, 512)))
    if form is None:
        raise FormatError(
            "The file does not hold MXNet's parameters.",
            place=source.place,
            expected="a list of NDArrays, or an npz archive",
        )
    return _read_npz(source) if form == NPZ else _read_list(source)


def npy_files(folder: Place) -> list[Place]:
    """Returns the `.npy` files of a folder, sorted by the names of their arrays."""
    return sorted((file for file in listing(folder, SUFFIX) if file.is_file()), key=lambda file: file.stem)


def read_npy_folder(folder: Place, files: Files) -> Params:
    """Reads the headers of a folder of arrays, each in a `.npy` file of its name.

    Raises:
        CorruptError: A file has another size than its header says.
        FormatError: A file breaks the format.
    """
    arrays = {}
    for file in npy_files(folder):
        source = files.source(file)
        leaf = read_npy(NpyBytes.of(source), file.stem, f"{file}", _DESCRIPTIONS)
        arrays[file.stem] = _sound(leaf, f"{file}")
    return Params(arrays, FOLDER, 3, CPU)


def write_npy_folder(arrays: Mapping[str, Tensor], folder: str, below: str, stage: Stage) -> None:
    """Writes arrays as `npx.save` does, each to a file of its name.

    Args:
        arrays: By name.
        folder: Where, below the target; "" for the target itself.
        below: What stands before the names in the tree.
        stage: Where tensors are streamed from.

    Raises:
        FormatError: An array that MXNet can't read back.
    """
    for name, tensor in arrays.items():
        head = _npy_header(name, tensor.shape, tensor.dtype)
        with stage.file(f"{folder}/{name}{SUFFIX}" if folder else f"{name}{SUFFIX}") as file:
            for block in _chained(head, stage, f"{below}/{name}", tensor):
                file.write(block)


def write_npz(arrays: Mapping[str, Tensor], below: str, file: BinaryIO, stage: Stage) -> None:
    """Writes an npz as MXNet's numpy mode does.

    Raises:
        FormatError: An array that MXNet can't read back.
    """
    writer = ZipWriter(file, _FORM)
    for name, tensor in arrays.items():
        head = _npy_header(name, tensor.shape, tensor.dtype)
        size = len(head) + nbytes(tensor)
        writer.add(f"{name}{SUFFIX}", size, _chained(head, stage, f"{below}/{name}", tensor))
    writer.finish()


def write_list(
    arrays: Mapping[str, Tensor],
    generation: int,
    device: tuple[int, int],
    below: str,
    file: BinaryIO,
    stage: Stage,
) -> None:
    """Writes a list of named NDArrays.

    Args:
        arrays: By name.
        generation: 2 for the legacy mode of MXNet, 3 for numpy mode.
        device: Type and id of the device that they shall come back to.
        below: What stands before the names in the tree.
        file: The new file.
        stage: Where tensors are streamed from.

    Raises:
        FormatError: An array that has no place in such a record.
    """
    file.write(LIST_MAGIC + struct.pack("<Q", len(arrays)))
    for name, tensor in arrays.items():
        head = record_header(generation, device, tensor.shape, tensor.dtype, name)
        for block in _chained(head, stage, f"{below}/{name}", tensor):
            file.write(block)
    names = [name.encode() for name in arrays]
    file.write(b"".join([struct.pack("<Q", len(names)), *(struct.pack("<Q", len(n)) + n for n in names)]))


def _chained(head: bytes, stage: Stage, name: str, tensor: Tensor) -> Any:
    yield head
    yield from stage.stream(name, tensor)


def _read_list(source: Source) -> Params:
    place = source.place
    count = _number(source, len(LIST_MAGIC))
    source.account.nodes(_ARRAY_NODES * count, "A list with too many arrays", place)
    at, records = len(LIST_MAGIC) + 8, []
    for i in range(count):
        record = read_record(source, at, f"array {i}")
        records.append(record)
        at = record.end
    names = _names(source, at, count)
    with_tensors = [
        (name, record) for name, record in zip(names, records, strict=True) if record.tensor is not None
    ]
    arrays = {name: record.tensor for name, record in with_tensors if record.tensor is not None}
    if len(arrays) != len(with_tensors):
        raise FormatError("Two arrays of a list have one name.", place=place)
    first = records[0] if records else None
    return Params(arrays, LIST, first.generation if first else 2, first.device if first else CPU)


def _names(source: Source, at: int, count: int) -> list[str]:
    place, named = source.place, _number(source, at)
    if named != count:
        raise FormatError(
            "The arrays of a list have no names.", place=place, expected=f"{count} names", found=named
        )
    at, names = at + 8, []
    for _ in range(count):
        size = _number(source, at)
        if size > MAX_NAME_BYTES:
            raise FormatError("A name is too long.", place=place, expected=MAX_NAME_BYTES, found=size)
        try:
            names.append(bytes_at(source, at + 8, size).decode())
        except UnicodeDecodeError as error:
            raise FormatError("A name isn't UTF-8.", place=place, found=error) from None
        at += 8 + size
    if at != source.size:
        raise CorruptError("Bytes follow the end of a list.", place=place, expected=at, found=source.size)
    return names


def _number(source: Source, at: int) -> int:
    return int(struct.unpack("<Q", bytes_at(source, at, 8))[0])


def _read_npz(source: Source) -> Params:
    arrays = npz_arrays(source, _DESCRIPTIONS)
    return Params(
        {name: _sound(leaf, f"{name} in {source.place}") for name, leaf in arrays.items()}, NPZ, 3, CPU
    )


def _sound(leaf: Stored | Record, place: str) -> Stored:
    """Returns an array."""
    if isinstance(leaf, Record):
        raise FormatError(
            "The header of an array breaks the format.",
            place=place,
            expected=f"descr, one of {', '.join(_DESCRIPTIONS)}",
            found=leaf.args[0],
        )
    return leaf


def _npy_header(name: str, shape: Shape, dtype: DType) -> bytes:
    if dtype not in _DESCRIBED:
        raise FormatError("A .npy file holds no such dtype.", place=name, found=dtype.name)
    text = f"{{'descr': '{_DESCRIBED[dtype]}', 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(len(text) + 11) // 64) * 64 - 10
    if length >= _NPY_SHORT:
        raise FormatError(
            "MXNet can't read back an array of so many axes.", place=name, found=f"shape {shape}"
        )
    return MAGIC + b"\1\0" + struct.pack("<H", length) + text.ljust(length - 1).encode() + b"\n"
