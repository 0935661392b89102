"""The container `keras`: a model of Keras 3, a zip archive of config.json, metadata.json and model.weights.h5.

The weights are read in place where the archive stores them as they are, as Keras does; their CRC-32 is compared before
the first value is read. Where they are deflated, they are inflated once, when the file is opened, into an unnamed
temporary file of the size that the archive declares, and never into memory.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `_save_model_to_fileobj`; APPNOTE.TXT (the zip format).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.keras_h5 import CONFIG, METADATA, documents, refuse_step
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.writer import write_hdf5
from statekit.errors import CorruptError, FormatError, InexactError, RefusedError, StatekitError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint, Finding
from statekit.files.manifest import strict_json
from statekit.files.reading import open_regular
from statekit.files.stage import Stage
from statekit.tensors.tensor import BLOCK_BYTES, Array, Index, Stored
from statekit.tensors.tree import Tree

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

    def detect(self, path: Path) -> Evidence | None:
        """Looks at the names of an archive's members."""
        try:
            with open_regular(path) as file:
                fits = file.read(4) == b"PK\3\4" and {WEIGHTS, CONFIG} <= {*_members(file, path)}
        except (OSError, StatekitError):
            return None
        return Evidence(20, f"a zip archive with {CONFIG} and {WEIGHTS}") if fits else None

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Parses documents and headers; values are read when asked for.

        Raises:
            NotFoundError: No such file, or a step is asked of it.
            CorruptError: Checksums, sizes or headers disagree.
            RefusedError: Members are of one name, encrypted, or inflate to absurd sizes.
            FormatError: A member is missing, or no JSON.
        """
        refuse_step(path, step)
        with ExitStack() as stack:
            file = stack.enter_context(open_regular(path))
            members = _members(file, path)
            missing = [name for name in (CONFIG, WEIGHTS) if name not in members]
            if missing:
                raise FormatError("A .keras file lacks a member.", place=path, expected=", ".join(missing))
            held = {
                name: strict_json(_document(file, members[name], path), f"{name} in {path}")
                for name in (CONFIG, METADATA)
                if name in members
            }
            weights = _Weights(file, members[WEIGHTS], path, stack)
            opened = open_hdf5(weights.stream, f"{path}:{WEIGHTS}")
            stack.callback(opened.close)
            manifest, findings = documents(opened.tree, path)
            tree = {ATTRIBUTES: {**opened.tree.pop(ATTRIBUTES, {}), **held}, **opened.tree}
            others = sorted(members.keys() - {CONFIG, METADATA, WEIGHTS})
            findings += tuple(Finding("a member that isn't read", f"{name} in {path}") for name in others)
            tree = _checked(tree, weights)
            close = stack.pop_all().close
        meta = {"keras_version": held.get(METADATA, {}).get("keras_version"), "not_read": others}
        return Checkpoint(self.name, path, tree, meta, None, manifest, findings, close)

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
        told = {METADATA: attributes.get(METADATA, {}), CONFIG: attributes[CONFIG]}
        rest = {name: value for name, value in attributes.items() if name not in told}
        with tempfile.TemporaryFile(dir=stage.path.parent) as weights, stage.file() as output:
            write_hdf5({**tree, ATTRIBUTES: rest}, weights, stage)
            size = weights.seek(0, os.SEEK_END)
            weights.seek(0)
            with zipfile.ZipFile(output, "w") as archive:
                for name, document in told.items():
                    archive.writestr(zipfile.ZipInfo(name, _DATE), json.dumps(document))
                info = zipfile.ZipInfo(WEIGHTS, _DATE)
                info.file_size = size
                with archive.open(info, "w") as member:
                    shutil.copyfileobj(weights, member, BLOCK_BYTES)


def _members(file: IO[bytes], path: Path) -> dict[str, zipfile.ZipInfo]:
    """Reads an archive's directory; it has one reading or none."""
    with _zip_errors(path), zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    if min((info.header_offset for info in infos), default=0):
        raise RefusedError("Something stands before the first member of a zip archive.", place=path)
    size = file.seek(0, os.SEEK_END)
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
        if not 0 <= info.header_offset <= info.header_offset + info.compress_size <= size:
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


@contextmanager
def _zip_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, ValueError) as error:
        raise CorruptError("A zip archive can't be read.", place=path, found=f"{error}"[:200]) from error


def _document(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> bytes:
    if info.file_size > MAX_DOCUMENT:
        raise RefusedError(
            "A document is too long.", place=f"{info.filename} in {path}", expected=MAX_DOCUMENT
        )
    with _zip_errors(path), zipfile.ZipFile(file) as archive, archive.open(info) as member:
        data = member.read(MAX_DOCUMENT + 1)
    if len(data) != info.file_size:
        raise CorruptError("A member has another size than it says.", place=f"{info.filename} in {path}")
    return data


class _Weights:
    """The weights inside an archive, as a file of their own."""

    def __init__(self, file: IO[bytes], info: zipfile.ZipInfo, path: Path, stack: ExitStack) -> None:
        self._info, self._path = info, path
        self.checked = False
        self.stream: Any = None
        if info.compress_type == zipfile.ZIP_STORED:
            self.stream = _Window(file, _start(file, info, path), info.file_size)
            return
        self.stream = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  # the stack closes it
        with _zip_errors(path), zipfile.ZipFile(file) as archive, archive.open(info) as member:
            shutil.copyfileobj(member, self.stream, BLOCK_BYTES)  # zipfile stops at the declared size
        if self.stream.tell() != info.file_size:
            raise CorruptError("A member has another size than it says.", place=f"{WEIGHTS} in {path}")
        self.checked = True

    def check(self) -> None:
        """Compares the checksum, once, before a value is given to anybody."""
        if self.checked:
            return
        crc, at = 0, self.stream.tell()
        self.stream.seek(0)
        while block := self.stream.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
        self.stream.seek(at)
        if crc != self._info.CRC:
            raise CorruptError(
                "The checksum of stored data disagrees with the data.",
                place=f"{WEIGHTS} in {self._path}",
                expected=f"CRC-32 {self._info.CRC:08x}",
                found=f"{crc:08x}",
                remedy="the file is damaged: fetch it again",
            )
        self.checked = True


def _start(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> int:
    """Returns where a stored member's bytes begin."""
    place = f"{info.filename} in {path}"
    file.seek(info.header_offset)
    raw = file.read(_LOCAL.size)
    if len(raw) < _LOCAL.size:
        raise CorruptError("A zip archive is cut off.", place=place)
    magic, _, flags, method, *_, name, extra = _LOCAL.unpack(raw)
    same = file.read(name) == info.orig_filename.encode("utf-8" if flags & 0x800 else "cp437")
    if magic != 0x04034B50 or method != info.compress_type or not same:
        raise CorruptError("The two headers of a zip member contradict each other.", place=place)
    start = int(info.header_offset + _LOCAL.size + name + extra)
    if start + info.file_size > file.seek(0, os.SEEK_END):
        raise CorruptError("A member of a zip archive lies beyond its end.", place=place)
    return start


class _Window(io.RawIOBase):
    """A part of a file, as a file that can only be read."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file, self._first, self._size = file, start, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        self._at = int(base[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        got = os.preadv(self._file.fileno(), [view[:count]], self._first + self._at) if count else 0
        self._at += got
        return got


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
