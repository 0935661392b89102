"""Checksums that formats carry, whether or not their own readers look: the one list of which format has which.

A tensor says which of these covers its values (`Stored.checksum`), as the format that made it knows; reading it
compares them. What has none is proven by a manifest alone. The first or last bytes show a file of records.

Safetensors, msgpack (Flax, T5X' index), pickles, MXNet's lists, JSON, plain chunks of zarr and those of zstd have none,
nor have values in Orbax' database (OCDBT), whose nodes have; PyTorch's own reader passes over those of zip archives.
Source: APPNOTE.TXT (zip); RFC 1952 (gzip), RFC 1950 (zlib); tensorflow, core/util/tensor_bundle/tensor_bundle.cc and
core/lib/io/table_builder.cc; HDF5 File Format Specification, IV.A.2.l (filters); google/tensorstore,
kvstore/ocdbt/format.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import IO, Any, cast

from statekit.files.source import File, as_file, bytes_at
from statekit.tensors.tensor import BLOCK_BYTES, Stored, Tensor

ZIP = "CRC-32 of a zip archive"
BUNDLE = "CRC-32C of TensorFlow"
GZIP = "CRC-32 of gzip"
ZLIB = "Adler-32 of zlib"
FLETCHER32 = "Fletcher-32 of HDF5"
OF_COMPRESSORS = {"gzip": GZIP, "zlib": ZLIB}
"""Compressor of chunks -> the checksum in what it makes."""
OF_FILTERS = {1: ZLIB, 3: FLETCHER32}
"""Number of a filter of HDF5 -> its checksum."""
HEADERS = (".zarray", "zarr.json")
"""Files that stand among an array's chunks and have no checksum, whatever the chunks have."""
_BEGIN = {b"PK\x03\x04": ZIP, b"\x1f\x8b": GZIP}
_END = {bytes.fromhex("57fb808b247547db"): BUNDLE}
"""The last bytes of a table of TensorFlow, each of whose blocks has a checksum."""


def of_file(source: File) -> str:
    """Returns the checksum that covers a file's records, told by its first or last bytes; "" if none does.

    Raises:
        FormatError: It can't be read.
    """
    size = source.size
    head, tail = bytes_at(source, 0, min(4, size)), bytes_at(source, max(0, size - 8), min(8, size))
    of_head = next((name for mark, name in _BEGIN.items() if head.startswith(mark)), "")
    return of_head or next((name for mark, name in _END.items() if tail.endswith(mark)), "")


def zip_fault(source: File) -> str:
    """Compares the checksums of a zip archive's members with their data, of those that are stored as they are.

    Returns:
        What is wrong; "" if nothing. A checksum of 0 wasn't computed (torch.serialization.config.save.compute_crc32).
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], as_file(source))) as archive:
            members = archive.infolist()
            if min((member.header_offset for member in members), default=0):
                return ""  # several archives, one after the other: each is opened by itself
            for entry in members:
                if entry.CRC and entry.compress_type == zipfile.ZIP_STORED:
                    with archive.open(entry) as member:
                        while member.read(BLOCK_BYTES):
                            pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
        return f"the checksum of stored data disagrees with the data: {error}"[:300]
    return ""


def stored_in(tensor: Tensor) -> Iterator[Stored]:
    """Yields the stored tensors that a tensor is made of: itself, or all below it."""
    if isinstance(tensor, Stored):
        yield tensor
    elif is_dataclass(tensor):
        for field in fields(tensor):
            yield from _stored(getattr(tensor, field.name))


def _stored(part: Any) -> Iterator[Stored]:
    for item in part if isinstance(part, (list, tuple)) else (part,):
        if is_dataclass(item):
            yield from stored_in(item)  # type: ignore[arg-type]  # a segment holds a tensor
        elif isinstance(item, (list, tuple)):
            yield from _stored(item)


def of_tensor(tensor: Tensor) -> str:
    """Returns the checksum that covers all of a tensor's values; "" if none does."""
    names = {stored.checksum for stored in stored_in(tensor)}
    return " and ".join(sorted(names)) if names and "" not in names else ""
