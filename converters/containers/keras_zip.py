"""The container `keras`: a model of Keras 3, a zip archive of config.json, metadata.json and model.weights.h5.

It reads and writes the archive, without Keras. Input: a `.keras` file; output: the tree of its weights, with both
documents as attributes. The weights are read in place where the archive stores them as they are, as Keras does; their
CRC-32 is compared before the first value is read. Where somebody has deflated them, they are inflated into memory when
the file is opened, as far as the job's budget goes.

Source: keras-team/keras, keras/src/saving/saving_lib.py, `_save_model_to_fileobj`; APPNOTE.TXT (the zip format).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.keras_h5 import CONFIG, VERSIONS, document, documents, refuse_step
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.writer import manifest_bytes, write_hdf5
from statekit.converters.formats.zip_archive import Archive, checked_member
from statekit.errors import FormatError, InexactError, StatekitError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint, Finding
from statekit.files.checksums import ZIP
from statekit.files.source import File, Files, Held, Part, Source, bytes_at, opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import BLOCK_BYTES, Array, Index, Stored
from statekit.tensors.tree import Tree

WEIGHTS = "model.weights.h5"
_DATE = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class KerasZip:
    """The container of `.keras` files."""

    name: str = "keras"
    title: str = "Keras 3 model (.keras, zip of config and weights)"
    suffixes: tuple[str, ...] = (".keras",)
    target_kind: Literal["file", "folder"] | None = "file"
    keeps_manifest: bool = True

    def detect(self, path: Place) -> Evidence | None:
        """Looks at the names of an archive's members."""
        try:
            with Files() as files:
                file = files.source(path)
                fits = bytes_at(file, 0, 4) == b"PK\3\4" and {WEIGHTS, CONFIG} <= {*_archive(file).members}
        except (OSError, StatekitError):
            return None
        return Evidence(20, f"a zip archive with {CONFIG} and {WEIGHTS}") if fits else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses documents and headers; values are read when asked for."""
        refuse_step(path, step)
        with opening(path, budget) as files:
            file = files.source(path)
            archive = _archive(file)
            members = archive.members
            missing = [name for name in (CONFIG, WEIGHTS) if name not in members]
            if missing:
                raise FormatError("A .keras file lacks a member.", place=path, expected=", ".join(missing))
            documents_read = {
                name: document(archive.record(name, f"The document {name}"), f"{name} in {path}", files)
                for name in (CONFIG, VERSIONS)
                if name in members
            }
            weights = open_hdf5(_weights(archive), f"{path}:{WEIGHTS}")
            proof, findings = documents(weights, path, files)
            tree = {ATTRIBUTES: {**weights.pop(ATTRIBUTES, {}), **documents_read}, **weights}
            others = sorted(members.keys() - {CONFIG, VERSIONS, WEIGHTS})
            unread = (Finding("a member that isn't read", f"{name} in {path}") for name in others)
            findings = (*findings, *unread)
            tree = _checked(tree, archive)
        meta = {"keras_version": documents_read.get(VERSIONS, {}).get("keras_version"), "not_read": others}
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
        """Writes the archive; the weights go through an unnamed temporary file beside it."""
        tree = self.fitted(encoded).tree
        attributes = tree[ATTRIBUTES]
        documents_written = {VERSIONS: attributes.get(VERSIONS, {}), CONFIG: attributes[CONFIG]}
        rest = {name: value for name, value in attributes.items() if name not in documents_written}
        with tempfile.TemporaryFile(dir=stage.home.scratch) as weights, stage.file(seeks=True) as output:
            manifest = write_hdf5({**tree, ATTRIBUTES: rest}, weights, stage, apart=3)
            size = weights.seek(0, os.SEEK_END)
            weights.seek(0)
            with zipfile.ZipFile(output, "w") as archive:
                for name, document in documents_written.items():
                    archive.writestr(zipfile.ZipInfo(name, _DATE), json.dumps(document))
                info = zipfile.ZipInfo(WEIGHTS, _DATE)
                info.file_size = size
                with archive.open(info, "w") as member:
                    shutil.copyfileobj(weights, member, BLOCK_BYTES)
        stage.complete(manifest, manifest_bytes, checked_member)


def _weights(archive: Archive) -> Source:
    """Returns the weights inside an archive, as a file of their own."""
    member = archive.members[WEIGHTS]
    if member.packed is None:
        return Part(archive.source, member.start, member.size)
    return Held(archive.record(WEIGHTS, "Deflated weights"), archive.source.place, archive.source.account)


def _archive(file: File) -> Archive:
    return Archive(file, deflated=True)


def _checked(tree: Tree, archive: Archive) -> Any:
    """Returns the tree with tensors that compare the archive's checksum before they are read."""
    if isinstance(tree, dict):
        return {key: value if key == ATTRIBUTES else _checked(value, archive) for key, value in tree.items()}
    if not isinstance(tree, Stored):
        return tree
    inner = tree.fetch

    def fetch(index: Index) -> Array:
        archive.check(WEIGHTS)
        return inner(index)

    return replace(tree, fetch=fetch, checksum=ZIP)


CONTAINER = KerasZip()
