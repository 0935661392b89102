"""The container `keras-h5`: weights of Keras 3, an HDF5 file named `.weights.h5`.

It reads and writes what `save_weights` does. Input: the file:

    layers/dense/vars/0, 1 ...      a layer's variables; the group `vars` has the layer's name as its attribute
    optimizer/vars/0, 1 ...         the optimizer's

Output: the tree of its groups, data sets as tensors. An HDF5 file of Keras has no checksums: what statekit wrote is
held to the digests of the manifest inside.
Source: keras-team/keras, keras/src/saving/saving_lib.py, `save_weights_only`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.writer import MANIFEST, manifest_bytes, write_hdf5
from statekit.errors import NotFoundError, StatekitError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint, Finding, Proof
from statekit.files.integrity import proof_inside
from statekit.files.source import Files, first_bytes, opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tree import strict_json
from statekit.tensors.typed import Name, fits, typed

MAGIC = b"\x89HDF\r\n\x1a\n"
CONFIG, VERSIONS = "config.json", "metadata.json"
"""Attributes of the whole file that are documents: a `.keras` file's, which statekit's `.weights.h5` keeps."""
SAYINGS = "statekit_keras"
"""Attribute of the whole file in which statekit says what files of Keras don't: the names of all variables."""


@dataclass(frozen=True)
class KerasH5:
    """The container of `.weights.h5` files."""

    name: str = "keras-h5"
    title: str = "Keras 3 weights (.weights.h5, HDF5)"
    suffixes: tuple[str, ...] = (".weights.h5", ".h5")
    target_kind: Literal["file", "folder"] | None = "file"
    keeps_manifest: bool = True

    def detect(self, path: Place) -> Evidence | None:
        try:
            fits = first_bytes(path, len(MAGIC)) == MAGIC
        except (OSError, StatekitError):
            return None
        return Evidence(10, "the first bytes are those of HDF5") if fits else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses headers; values are read when asked for."""
        refuse_step(path, step)
        with opening(path, budget) as files:
            tree = open_hdf5(files.source(path), f"{path}")
            proof, findings = documents(tree, path, files)
        version = tree.get(ATTRIBUTES, {}).get("keras_version")
        meta = {"keras_version": version} if fits(version, Name) else {}
        return Checkpoint(self.name, path, tree, meta, None, findings, files.close, proof=proof)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        with stage.file(synced=False, seeks=True) as output:
            manifest = write_hdf5(encoded.tree, output, stage)
        stage.complete(manifest, manifest_bytes)


def refuse_step(path: Place, step: int | None) -> None:
    """Raises NotFoundError if a step is asked of a file that holds one state."""
    if step is not None:
        raise NotFoundError(
            "A file of Keras holds one state and isn't chosen by its step.",
            place=path,
            found=f"step {step}",
            remedy="name the file of that step",
        )


def documents(tree: dict[str, Any], path: Place, files: Files) -> tuple[Proof | None, tuple[Finding, ...]]:
    """Takes the manifest out of a tree's attributes, and parses documents among them, in place."""
    attributes = tree.get(ATTRIBUTES, {})
    for name in (CONFIG, VERSIONS, SAYINGS):
        if isinstance(attributes.get(name), str):
            attributes[name] = document(attributes[name], f"{name} in {path}", files)
    text = attributes.pop(MANIFEST, None)
    if ATTRIBUTES in tree and not attributes:
        del tree[ATTRIBUTES]
    return proof_inside(text, path, files.account) if isinstance(text, str) else (None, ())


def document(text: bytes | str, place: str, files: Files) -> dict[str, Any]:
    """Parses one of the documents that stand beside weights: a JSON object.

    Raises:
        FormatError: It is none.
    """
    parsed = strict_json(text, place, files.account)
    return typed(parsed, dict[Name, Any], place, "A document of Keras isn't an object")


CONTAINER = KerasH5()
