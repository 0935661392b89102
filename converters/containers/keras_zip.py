"""The container `keras`: a model of Keras 3, a zip archive of config.json, metadata.json and model.weights.h5.

It reads and writes the archive, without Keras. In goes a `.keras` file; out comes the tree of its weights, with both
documents as attributes. The weights are read in place where the archive stores them as they are, as Keras does; their
CRC-32 is compared before the first value is read. Where they are deflated, they are inflated once, when the file is
opened, into an unnamed temporary file of the size that the archive declares, and never into memory.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `_save_model_to_fileobj`; APPNOTE.TXT (the zip format).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, cast

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.keras_h5 import CONFIG, METADATA, documents, refuse_step
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.writer import write_hdf5
from statekit.errors import CorruptError, FormatError, InexactError, RefusedError, StatekitError
from statekit.files.budget import Budget
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint, Finding
from statekit.files.source import File, Files, Part, as_file, bytes_at, hold, opening, require
from statekit.files.stage import Stage
from statekit.tensors.tensor import BLOCK_BYTES, Array, Index, Stored
from statekit.tensors.tree import Tree, strict_json

WEIGHTS = "model.weights.h5"
MAX_DOCUMENT = 64 * 2**20
"""The longest config.json, in bytes."""
MAX_RATIO = 1032
"""How many bytes deflate makes of one, at most."""
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_ENCRYPTED = 1
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class KerasZip:
    """The container of `.keras` files."""

    name: str = "keras"
    title: str = "Keras 3 model (.keras, zip of config and weights)"
    suffixes: tuple[str, ...] = (".keras",)
    target_kind: Literal["file", "folder"] | None = "file"
    keeps_manifest: bool = True

    def detect(self, path: Path) -> Evidence | None:
        """Looks at the names of an archive's members."""
        try:
            with Files() as files:
                file = files.source(path)
                fits = bytes_at(file, 0, 4) == b"PK\3\4" and {WEIGHTS, CONFIG} <= {*_members(file)}
        except (OSError, StatekitError):
            return None
        return Evidence(20, f"a zip archive with {CONFIG} and {WEIGHTS}") if fits else None

    def open(self, path: Path, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses documents and headers; values are read when asked for.

        Raises:
            NotFoundError: No such file, or a step is asked of it.
            CorruptError: Checksums, sizes or headers disagree.
            RefusedError: Members are of one name, encrypted, or inflate to absurd sizes.
            FormatError: A member is missing, or no JSON.
        """
        refuse_step(path, step)
        with opening(path, budget) as files:
            file = files.source(path)
            members = _members(file)
            missing = [name for name in (CONFIG, WEIGHTS) if name not in members]
            if missing:
                raise FormatError("A .keras file lacks a member.", place=path, expected=", ".join(missing))
            documents_read = {
                name: strict_json(_document(file, members[name]), f"{name} in {path}")
                for name in (CONFIG, METADATA)
                if name in members
            }
            weights = _Weights(file, members[WEIGHTS])
            opened = open_hdf5(weights.stream, f"{path}:{WEIGHTS}")
            files.on_close(opened.close)
            proof, findings = documents(opened.tree, path)
            tree = {ATTRIBUTES: {**opened.tree.pop(ATTRIBUTES, {}), **documents_read}, **opened.tree}
            others = sorted(members.keys() - {CONFIG, METADATA, WEIGHTS})
            beside = (Finding("a member that isn't read", f"{name} in {path}") for name in others)
            findings = (*findings, *beside)
            tree = _checked(tree, weights)
        meta = {"keras_version": documents_read.get(METADATA, {}).get("keras_version"), "not_read": others}
        return Checkpoint(self.name, path, tree, meta, None, findings, files.close, proof=proof)

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns the state as it is, if the model's config is there.

        Raises:
            InexactError: It isn't: Keras couldn't load the file.
        """
        tree = encoded.tree
        attributes = tree.get(ATTRIBUTES, {}) if isinstance(tree, Mapping) else {}
        if CONFIG not in attributes:
            raise InexactError(
                "A .keras file needs the model's config, which only files from .keras files have.",
                expected=CONFIG,
                remedy="write the container keras-h5 (.weights.h5), and load it into the model",
            )
        return encoded

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes the archive; the weights go through an unnamed temporary file beside it.

        Raises:
            InexactError: The model's config isn't known.
            FormatError: The format can't hold something.
        """
        tree = self.fitted(encoded).tree
        attributes = tree[ATTRIBUTES]
        documents_written = {METADATA: attributes.get(METADATA, {}), CONFIG: attributes[CONFIG]}
        rest = {name: value for name, value in attributes.items() if name not in documents_written}
        with tempfile.TemporaryFile(dir=stage.path.parent) as weights, stage.file() as output:
            write_hdf5({**tree, ATTRIBUTES: rest}, weights, stage)
            size = weights.seek(0, os.SEEK_END)
            weights.seek(0)
            with zipfile.ZipFile(output, "w") as archive:
                for name, document in documents_written.items():
                    archive.writestr(zipfile.ZipInfo(name, _DATE), json.dumps(document))
                info = zipfile.ZipInfo(WEIGHTS, _DATE)
                info.file_size = size
                with archive.open(info, "w") as member:
                    shutil.copyfileobj(weights, member, BLOCK_BYTES)


def _members(file: File) -> dict[str, zipfile.ZipInfo]:
    """Reads an archive's directory; it has one reading or none."""
    path = file.path
    with _zip_errors(path), _archive(file) as archive:
        infos = archive.infolist()
    if min((info.header_offset for info in infos), default=0):
        raise RefusedError("Something stands before the first member of a zip archive.", place=path)
    members: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        place = f"{info.filename} in {path}"
        if info.filename in members:
            raise RefusedError(
                "A zip archive has two members of one name; which one counts depends on the reader.",
                place=place,
            )
        if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
            raise RefusedError(
                "A member of a zip archive is encrypted or packed in a way that isn't read.",
                place=place,
                expected="stored or deflated",
                found=f"method {info.compress_type}, flags {info.flag_bits:#06x}",
            )
        if not 0 <= info.header_offset <= info.header_offset + info.compress_size <= file.size:
            raise CorruptError("A member of a zip archive lies beyond its end.", place=place)
        if info.file_size > info.compress_size * (MAX_RATIO if info.compress_type else 1):
            raise RefusedError(
                "A member of a zip archive declares more than its bytes can hold.",
                place=place,
                expected=f"at most {info.compress_size * MAX_RATIO} bytes",
                found=info.file_size,
            )
        members[info.filename] = info
    return members


def _archive(file: File) -> zipfile.ZipFile:
    return zipfile.ZipFile(cast(IO[bytes], as_file(file)))


@contextmanager
def _zip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, ValueError) as error:
        raise CorruptError("A zip archive can't be read.", place=path, found=f"{error}"[:200]) from error


def _document(file: File, info: zipfile.ZipInfo) -> bytes:
    path = file.path
    if info.file_size > MAX_DOCUMENT:
        raise RefusedError(
            "A document is too long.", place=f"{info.filename} in {path}", expected=MAX_DOCUMENT
        )
    hold(file, info.header_offset, info.file_size, f"The document {info.filename}")
    with _zip_errors(path), _archive(file) as archive, archive.open(info) as member:
        data = member.read(MAX_DOCUMENT + 1)
    if len(data) != info.file_size:
        raise CorruptError("A member has another size than it says.", place=f"{info.filename} in {path}")
    return data


class _Weights:
    """The weights inside an archive, as a file of their own."""

    def __init__(self, file: File, info: zipfile.ZipInfo) -> None:
        self._info, path = info, file.path
        self._path, self.checked = path, False
        self.stream: Any = None
        if info.compress_type == zipfile.ZIP_STORED:
            self._part = Part(file, _start(file, info), info.file_size)
            self.stream = as_file(self._part)
            return
        self.stream = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the checkpoint's files
        file.files.on_close(self.stream.close)
        with _zip_errors(path), _archive(file) as archive, archive.open(info) as member:
            shutil.copyfileobj(member, self.stream, BLOCK_BYTES)  # zipfile stops at the declared size
        if self.stream.tell() != info.file_size:
            raise CorruptError("A member has another size than it says.", place=f"{WEIGHTS} in {path}")
        self.checked = True

    def check(self) -> None:
        """Compares the checksum, once, before a value is given to anybody."""
        if self.checked:
            return
        crc = 0  # not through the stream, whose position is HDF5's
        for start in range(0, self._part.size, BLOCK_BYTES):
            block = self._part.read(start, min(BLOCK_BYTES, self._part.size - start))
            crc = zlib.crc32(block.data, crc)
        if crc != self._info.CRC:
            raise CorruptError(
                "The checksum of stored data disagrees with the data.",
                place=f"{WEIGHTS} in {self._path}",
                expected=f"CRC-32 {self._info.CRC:08x}",
                found=f"{crc:08x}",
                remedy="the file is damaged: fetch it again",
            )
        self.checked = True


def _start(file: File, info: zipfile.ZipInfo) -> int:
    """Returns where a stored member's bytes begin."""
    at = info.header_offset
    magic, _, flags, method, *_, name, extra = _LOCAL.unpack(bytes_at(file, at, _LOCAL.size))
    stored_name = info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437")
    same = bytes_at(file, at + _LOCAL.size, name) == stored_name
    if magic != 0x04034B50 or method != info.compress_type or not same:
        raise CorruptError(
            "The two headers of a zip member contradict each other.", place=f"{info.filename} in {file.path}"
        )
    start = int(at + _LOCAL.size + name + extra)
    require(file, start, info.file_size)
    return start


def _checked(tree: Tree, weights: _Weights) -> Any:
    """Returns the tree with tensors that compare the archive's checksum before they are read."""
    if isinstance(tree, dict):
        return {key: value if key == ATTRIBUTES else _checked(value, weights) for key, value in tree.items()}
    if not isinstance(tree, Stored):
        return tree
    inner = tree.fetch

    def fetch(index: Index) -> Array:
        weights.check()
        return inner(index)

    return replace(tree, fetch=fetch)


CONTAINER = KerasZip()
