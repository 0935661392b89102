"""The neutral container `statekit`: safetensors shards and `statekit.json`.

It keeps any tree so that it can be proven, whatever the framework. Input: the folder; output: the tree that was
written, every file and tensor held to the manifest's digests. docs/format.md defines every byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.step_folders import check_step
from statekit.errors import CorruptError, Faults, FormatError, StatekitError
from statekit.files.checkpoint import Checkpoint, Finding, Proof
from statekit.files.file_changes import file_faults
from statekit.files.manifest import FILE, check_inside, parse_damaged
from statekit.files.safetensors import open_safetensors, sharded
from statekit.files.sections import CutPoints, Section, safetensors_section
from statekit.files.source import Files, listing, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, from_json, strict_json, tensor_names, to_json
from statekit.tensors.typed import Described, typed

SHARD_BYTES = 4 * 2**30
"""How many bytes of tensors a shard holds at most; a larger tensor has a shard to itself."""
_RESTORE = "restore the checkpoint from a copy"
_SHARD = re.compile(r"tensors-\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True)
class StatekitFolder:
    """statekit's neutral folder."""

    name: str = "statekit"
    title: str = "statekit's neutral folder: safetensors shards and statekit.json"
    suffixes: tuple[str, ...] = (".statekit",)
    target_kind: Literal["folder"] = "folder"

    def detect(self, path: Place) -> Evidence | None:
        """Looks for the shards' names, else into the manifest: other containers' folders have one too."""
        if not (path / FILE).is_file():
            return None
        if any(_SHARD.fullmatch(entry.name) for entry in listing(path)):
            return Evidence(30, f"a folder with {FILE} and tensors-*.safetensors")
        return Evidence(30, f"{FILE} says so") if _claims(path / FILE) else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the manifest and the shards' headers."""
        with opening(path, budget) as files:
            manifest, damage = parse_damaged(read_small(path / FILE, files), path / FILE, files.account)
            check_inside(path, manifest)
            number = manifest["target"].get("step")
            check_step(step, number, path)
            tensors, faults = _open_shards(path, manifest, files)
            tree = _restore(manifest, tensors, path / FILE)
        findings = tuple(Finding(fault, place, True) for fault, place in (*damage, *faults))
        entries = {path / name: entry for name, entry in manifest["files"].items()}
        proof = Proof(path / FILE, manifest, entries, manifest["tensors"])
        meta = {
            "version": manifest["version"],
            "tool": manifest.get("tool"),
            "files": len(manifest["files"]) + 1,
        }
        return Checkpoint(self.name, path, tree, meta, number, findings, files.close, proof=proof)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes the shards; the rest of the tree goes into the manifest."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the shards."""
        shards = list(sharded(tensor_names(encoded.tree), cut.limit(SHARD_BYTES)))
        return [
            safetensors_section(
                f"tensors-{i:05}-of-{len(shards):05}.safetensors",
                shard,
                {"format": "statekit", "version": "1"},
            )
            for i, shard in enumerate(shards, 1)
        ]

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Puts the digests of the shards' headers, and the rest of the tree, into the manifest."""
        stage.keep("headers", dict(records))
        stage.keep("tree", _with_references(to_json(encoded.tree), stage.manifest()))


class Neutral(TypedDict):
    """What the manifest of a neutral checkpoint has besides."""

    tree: Any


_OTHER_TREE = "The manifest's tree doesn't follow its format"


def _with_references(view: Any, manifest: Mapping[str, Any]) -> Any:
    """Replaces parts of a tree's view that the manifest states already, such as `state`, by references to it."""
    if not isinstance(view, dict):
        return view
    stated = {key for key, part in view.items() if part and manifest.get(key) == part}
    return {key: {"$manifest": key} if key in stated else part for key, part in view.items()}


def _without_references(view: Any, manifest: Mapping[str, Any], place: Place) -> Any:
    if not isinstance(view, dict):
        return view
    parts = {key: part for key, part in view.items() if isinstance(part, dict)}
    references = {key: part["$manifest"] for key, part in parts.items() if "$manifest" in part}
    lost = Faults(
        ("is that of a field that isn't there", key)
        for key, field in references.items()
        if not isinstance(field, str) or field not in manifest
    )
    lost.check(FormatError, _OTHER_TREE, place=place)
    return {**view, **{key: manifest[field] for key, field in references.items()}}


def _claims(path: Place) -> bool:
    try:
        document = strict_json(read_small(path), path)
    except StatekitError:
        return False
    target = document.get("target") if isinstance(document, dict) else None
    return isinstance(target, dict) and target.get("container") == "statekit"


def _open_shards(
    path: Place, manifest: Mapping[str, Any], files: Files
) -> tuple[dict[str, Tensor], list[tuple[str, str]]]:
    """Returns the tensors of all shards, and what contradicts the manifest."""
    tensors: dict[str, Tensor] = {}
    faults, headers = list[tuple[str, str]](), manifest.get("headers", {})
    entries = {path / name: entry for name, entry in manifest["files"].items()}
    for name in (n for n in manifest["files"] if n.endswith(".safetensors")):
        try:
            shard = open_safetensors(path / name, files)
        except StatekitError as error:
            lost = Faults((fault.what, f"{fault.path}") for fault in file_faults(entries, path / FILE, files))
            lost.check(CorruptError, "The shards can't be opened", place=path, remedy=_RESTORE)
            raise error
        if headers.get(name) != shard.header_digest:
            faults.append(("its header isn't the one that was written", f"{path / name}"))
        faults += [("stands in two shards", tensor) for tensor in shard.tensors if tensor in tensors]
        tensors.update(shard.tensors)
    return tensors, faults


def _restore(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], place: Place) -> Tree:
    view = typed(manifest, Neutral, place, _OTHER_TREE)["tree"]

    def tensor(entry: Any) -> Tensor:
        return tensors[typed(entry, Described, place, _OTHER_TREE)["name"]]

    tree = from_json(_without_references(view, manifest, place), tensor, place)
    named = tensor_names(tree)
    lost = Faults(
        ("isn't at its place in the tree", name) for name in tensors if named.get(name) is not tensors[name]
    )
    lost.check(FormatError, "The manifest's tree doesn't hold the tensors", place=place)
    return tree


CONTAINER = StatekitFolder()
