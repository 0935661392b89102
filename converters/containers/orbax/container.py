"""Container `orbax`: checkpoints of Orbax, in every form that Orbax and T5X with it have written.

It reads the items of a step and writes them as Orbax does today. Input: a step's folder, a run's folder, or an item:

    <run>/<step>/_CHECKPOINT_METADATA, <item>/...    CheckpointManager; T5X: <run>/checkpoint_<step>/state/
    <anything>/_CHECKPOINT_METADATA, _METADATA, ...  StandardCheckpointer, PyTreeCheckpointer: the item itself

Output: the item's tree, or with several a tree of items. An item is a tree of arrays or a JSON document:

    _METADATA            the tree, as JSON
    _strings.json        leaves that are strings
    checkpoint           2022 to 2024: the tree as msgpack, arrays in it or PLACEHOLDER://name
    <dotted name>/       a zarr folder per array, or
    manifest.ocdbt, d/   all of them in one OCDBT database
    metadata             of an item that is a JSON document: that

Source: google/orbax orbax/checkpoint/checkpoint_manager.py, path/step.py; T5X t5x/checkpoints.py,
`OrbaxCheckpointManagerInterface`; orbax/checkpoint/_src/handlers/pytree_checkpoint_handler.py,
json_checkpoint_handler.py; _src/serialization/type_handlers.py, `StringHandler`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.orbax.metadata import (
    STRING,
    STRINGS,
    LeafMetadata,
    TreeMetadata,
    parse,
    tree_of,
)
from statekit.converters.containers.orbax.writer import COMMIT, VALUE, ItemWriter, step_metadata, write_commit
from statekit.converters.containers.step_folders import (
    DATABASE,
    INDEX,
    JSON_ITEM,
    STEP_METADATA,
    TREE_METADATA,
    find_step,
    is_item,
    items,
    says_t5x,
    sighted,
    step_checkpoint,
    step_prefix,
)
from statekit.converters.formats.msgpack.reader import parse as parse_msgpack
from statekit.converters.formats.zarr.headers import ArrayPlace, Arrays
from statekit.converters.formats.zarr.stores import FolderStore, open_store, read_whole
from statekit.errors import CorruptError, Faults, FormatError, RefusedError
from statekit.files.checkpoint import VARIABLES, Checkpoint, Finding
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files, Source, listing, opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tree import Tree, strict_json


@dataclass(frozen=True)
class Item:
    """What an item holds.

    Attributes:
        tree: Its tree.
        findings: What was odd.
        names: The names of its files and folders that belong to its arrays.
        custom: What the user kept with its metadata.
        variables: The parts in which every array lay under `value`, as flax.nnx.State has its variables: `""` is the
            whole tree, else keys at its top.
    """

    tree: Tree
    findings: tuple[Finding, ...] = ()
    names: frozenset[str] = frozenset()
    custom: Tree = None
    variables: tuple[str, ...] = ()


def open_item(folder: Place, opened: Files) -> Item:
    """Parses the tree of an item and the headers of its arrays.

    Raises:
        FormatError: They don't follow the format or can't be trusted.
    """
    files = FolderStore(folder, opened)
    index, stated, document = files.value(INDEX), files.value(TREE_METADATA), files.value(JSON_ITEM)
    if index is stated is None and document is not None:
        return Item(
            strict_json(read_whole(document), document.place, opened.account), names=frozenset({JSON_ITEM})
        )
    with opened.account.passing() as taken:  # of the document nothing stays but what is made of it
        metadata = None if stated is None else parse(read_whole(stated), stated.place, taken)
        item = _item(files, index, metadata, opened)
    if metadata is None or item.custom is None:
        return item
    return replace(item, custom=strict_json(json.dumps(item.custom), metadata.place, opened.account))


_OF_ORBAX = re.compile(
    r"_sharding|array_metadatas|ocdbt\.process_.*|commit_success\.txt|_CHECKPOINT_METADATA"
)
"""Names of what Orbax writes beside an item's database.

Source: google/orbax checkpoint/orbax/checkpoint/_src, serialization/type_handlers.py,
metadata/array_metadata_store.py.
"""


def _unsaid(folder: Place) -> FormatError:
    """Returns the error about a database without a tree: Orbax' own is incomplete, another program's has none."""
    subject, expected = "An Orbax item doesn't say what its arrays are.", f"{TREE_METADATA}, or {INDEX}"
    is_of_step = (folder.parent / STEP_METADATA).is_file()
    if is_of_step or any(_OF_ORBAX.fullmatch(entry.name) for entry in listing(folder)):
        remedy = "the checkpoint is incomplete; copy it again"
        return FormatError(subject, place=folder, expected=expected, remedy=remedy)
    return RefusedError(
        "A database of TensorStore (OCDBT) alone doesn't say what its arrays are.",
        place=folder,
        expected=f"the records that Orbax writes beside it: {expected}",
        found=f"{DATABASE}, and nothing of Orbax",
        remedy="open it in the program that wrote it and save the tree with Orbax; if Orbax wrote it, copy it again",
    )


def _item(files: FolderStore, index: Source | None, metadata: TreeMetadata | None, opened: Files) -> Item:
    folder = files.folder
    arrays = _arrays(folder, metadata, opened)
    if index is not None:  # it holds the tree in full; _METADATA repeats it
        parsed = parse_msgpack(index)
        if not isinstance(parsed, dict):
            raise FormatError("The index of an Orbax item isn't a map.", place=index.place)
        tree, findings, prefixes = arrays.with_tensors(_unwrapped(parsed))
        return Item(tree, findings, _tops(prefixes))
    if metadata is None:
        raise _unsaid(folder)
    entries = metadata.entries()
    values = sum(1 + len(entry.path) for entry in entries)
    opened.account.nodes(values, "The tree of an Orbax item", metadata.place)
    array_entries = {i: entry for i, entry in enumerate(entries) if entry.is_array}
    names = ["/".join(map(str, entry.path)) for entry in array_entries.values()]
    places = [
        ArrayPlace(n, e.array, written=e.written) for n, e in zip(names, array_entries.values(), strict=True)
    ]
    tensors, findings = arrays.open(places)
    leaves: dict[int, Any] = dict(zip(array_entries, tensors, strict=True))
    leaves |= _strings(files, entries)
    variables = _variables(entries)
    if variables:
        entries = tuple(_without_value(entry, variables) for entry in entries)
        where = "" if variables == ("",) else f" of {', '.join(variables)}"
        note = f"flax.nnx.State keeps every array{where} under {VALUE!r}; names leave that out"
        findings = (*findings, Finding(note, metadata.place))
    tree = tree_of(entries, leaves, metadata.place)
    return Item(tree, findings, _tops({p.prefix for p in places}), metadata.custom, variables)


def _variables(entries: Sequence[LeafMetadata]) -> tuple[str, ...]:
    """Returns the parts of a tree that are states of nnx: `""` for the whole, or the keys at its top."""
    if _are_variables(entries):
        return ("",)
    parts: dict[tuple[Any, ...], list[LeafMetadata]] = {}
    for entry in entries:
        parts.setdefault(entry.path[:1], []).append(entry)
    return tuple(
        str(key[0])
        for key, below in parts.items()
        if all(len(entry.path) > 2 for entry in below) and _are_variables(below)
    )


def _without_value(entry: LeafMetadata, variables: Sequence[str]) -> LeafMetadata:
    is_variable = entry.is_array and (variables == ("",) or str(entry.path[0]) in variables)
    return replace(entry, path=entry.path[:-1]) if is_variable else entry


def _are_variables(entries: Sequence[LeafMetadata]) -> bool:
    """Tells whether every array is the value of a variable of Flax' nnx, and nothing else lies beside it."""
    arrays = [entry.path for entry in entries if entry.is_array]
    around = {entry.path[:i] for entry in entries for i in range(len(entry.path) - 1)}
    return bool(arrays) and all(
        len(path) > 1 and path[-1] == VALUE and path[:-1] not in around for path in arrays
    )


def _arrays(folder: Place, metadata: TreeMetadata | None, opened: Files) -> Arrays:
    store = open_store(folder, opened)
    return Arrays(store) if metadata is None else Arrays(store, metadata.zarr_format, metadata.complete)


def _tops(prefixes: set[str]) -> frozenset[str]:
    return frozenset(prefix.partition("/")[0] for prefix in prefixes)


def _strings(files: FolderStore, entries: tuple[LeafMetadata, ...]) -> dict[int, str]:
    wanted = {i: entry.array for i, entry in enumerate(entries) if entry.kind == STRING}
    if not wanted:
        return {}
    value = files.value(STRINGS)
    stored = {} if value is None else strict_json(read_whole(value), value.place, files.files.account)
    strings: Mapping[str, Any] = stored if isinstance(stored, dict) else {}
    lost = Faults(
        (f"isn't in {STRINGS}", name) for name in wanted.values() if not isinstance(strings.get(name), str)
    )
    lost.check(CorruptError, "Strings of an Orbax item are missing", place=files.place)
    return {i: str(strings[name]) for i, name in wanted.items()}


def _unwrapped(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Returns target and state of the first Orbax checkpoints of T5X, which kept a whole train state."""
    inner = tree.get("_optimizer")
    if not isinstance(inner, dict):
        return tree
    return {
        **inner,
        **{key: value for key, value in tree.items() if key != "_optimizer" and value not in (None, {})},
    }


_DEFAULT = "{step}/default"
"""Where CheckpointManager keeps the only item of a step."""

_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "JsonCheckpointHandler", "PyTreeHandler")
"""Those whose items are trees of arrays, or JSON."""

_OWN_FILES = {
    TREE_METADATA, STEP_METADATA, INDEX, STRINGS, "_sharding", COMMIT, "orbax.checkpoint", "manifest.ocdbt", "d",
    "array_metadatas",
}  # fmt: skip


@dataclass(frozen=True)
class OrbaxFolder:
    """Orbax checkpoints with zarr arrays of format 2 or 3, in folders or in an OCDBT database."""

    name: str = "orbax"
    title: str = "Orbax checkpoint folders: one or several items, zarr 2 or 3, OCDBT or not, msgpack"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = (TREE_METADATA, STEP_METADATA, COMMIT)

    def detect(self, path: Place) -> Evidence | None:
        if (step_folder := sighted(path, "orbax")) is None:
            return None
        for item in _items(step_folder.path):
            if says_t5x(item):
                return Evidence(20, f"{item} is an Orbax item that holds a T5X train state")
        return Evidence(10, f"{step_folder.path} has the files of an Orbax checkpoint")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses the trees and the arrays' headers."""
        step_folder = find_step(path, step, "orbax")
        folders = _items(step_folder.path)
        if not folders:
            raise FormatError(
                "An Orbax checkpoint holds no tree of arrays.",
                place=step_folder.path,
                expected=f"an item with {TREE_METADATA}",
            )
        with opening(path, budget) as files:
            opened = {folder: open_item(folder, files) for folder in folders}
            _require_all(step_folder.path, {folder.name for folder in folders}, files)
            trees: dict[str, Tree] = {folder.name: item.tree for folder, item in opened.items()}
            tree = trees[folders[0].name] if len(folders) == 1 else trees
            read = set(_OWN_FILES) | {
                e.name for e in listing(step_folder.path) if e.name.startswith("ocdbt.process_")
            }
            for folder, item in opened.items():
                read |= item.names if folder == step_folder.path else {folder.name}
            meta = _meta(opened)
            findings = tuple(finding for item in opened.values() for finding in item.findings)
            return step_checkpoint(self.name, step_folder, tree, meta, read, findings, files)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes the items of a step as Orbax does today: each an OCDBT database with its tree as JSON."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the databases of the items."""
        _, writers = _writers(encoded, target)
        return [section for writer in writers.values() for section in writer.image(cut)]

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Joins the databases of each item, and writes what describes the step."""
        begun = time.time_ns()
        prefix, writers = _writers(encoded, stage.target)
        handlers = {item: writer.join(stage, cut, records) for item, writer in writers.items()}
        with stage.file(f"{prefix}{STEP_METADATA}") as output:
            output.write(step_metadata(handlers, begun, encoded.custom))
        for whole in (*(f"{prefix}{name}/" for name in handlers), prefix):
            write_commit(stage, whole)


def _writers(encoded: Encoded, target: Place) -> tuple[str, dict[str, ItemWriter]]:
    """Returns the folder of a step below its target, with its `/`, and what writes each item."""
    folder, _, item = (encoded.place or _DEFAULT).partition("/")
    prefix = step_prefix(target, encoded.step, folder)
    if item != "{item}":
        return prefix, {item: ItemWriter(f"{prefix}{item}", encoded.tree, boxed=encoded.variables)}
    return prefix, {
        name: ItemWriter(f"{prefix}{name}", tree, f"{name}/", _boxed(encoded.variables, name))
        for name, tree in encoded.tree.items()
    }


def _boxed(variables: Sequence[str], item: str) -> tuple[str, ...]:
    """Returns the parts of an item that are states of nnx; `""` is the whole item."""
    paths = (path.partition("/") for path in variables)
    return tuple(below for name, _, below in paths if name == item)


def _meta(opened: Mapping[Place, Item]) -> dict[str, Any]:
    names = [(folder.name if len(opened) > 1 else "", item.variables) for folder, item in opened.items()]
    variables = ["/".join(filter(None, (name, key))) for name, keys in names for key in keys]
    customs = {folder.name: item.custom for folder, item in opened.items() if item.custom is not None}
    meta = {"generation": "orbax", "items": [folder.name for folder in opened], "custom_metadata": customs}
    return {**meta, VARIABLES: variables} if variables else meta


def _require_all(step: Place, item_names: set[str], files: Files) -> None:
    """Raises FormatError if a step says that it has an item which isn't there."""
    stated = FolderStore(step, files).value(STEP_METADATA)
    document = None if stated is None else strict_json(read_whole(stated), stated.place, files.account)
    handlers = document.get("item_handlers") if isinstance(document, dict) else None
    if isinstance(handlers, dict):
        stated_items = {name for name, kind in handlers.items() if str(kind).endswith(_HANDLERS)}
        if missing := sorted(stated_items - item_names):
            raise FormatError(
                "An Orbax checkpoint lacks items that it says it has.",
                place=step,
                expected=", ".join(missing),
                found=", ".join(sorted(item_names)),
                remedy=f"copy the step again; delete entries that were removed on purpose from {STEP_METADATA} too",
            )


def _items(step: Place) -> list[Place]:
    return [step] if is_item(step) else items(step)


CONTAINER = OrbaxFolder()
