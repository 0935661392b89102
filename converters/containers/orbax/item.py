"""One item of an Orbax checkpoint: a tree of arrays, or a JSON document.

    _METADATA            the tree, as JSON
    _strings.json        leaves that are strings
    checkpoint           2022 to 2024: the tree as msgpack, arrays in it or PLACEHOLDER://name
    <dotted name>/       a zarr folder per array, or
    manifest.ocdbt, d/   all of them in one OCDBT database
    metadata             of an item that is a JSON document: that

Source: google/orbax orbax/checkpoint/_src/handlers/pytree_checkpoint_handler.py, json_checkpoint_handler.py;
_src/serialization/type_handlers.py, `StringHandler`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statekit.converters.containers.orbax.metadata import STRING, Entry, TreeMetadata, parse, tree_of
from statekit.converters.containers.steps.find import INDEX, JSON_ITEM, METADATA
from statekit.converters.containers.steps.leaves import ArrayPlace, Arrays
from statekit.converters.formats.msgpack.reader import parse as parse_msgpack
from statekit.converters.formats.zarr.stores import FolderStore, open_store, read_whole
from statekit.errors import CorruptError, FormatError, fault_list
from statekit.files.checkpoint import Finding
from statekit.files.manifest import strict_json
from statekit.tensors.tree import Tree

STRINGS = "_strings.json"
_MAX_METADATA = 100_000_000
_MAX_JSON = 16 * 2**20
_NAMED = 20


@dataclass(frozen=True)
class Item:
    """What an item holds.

    Attributes:
        tree: Its tree.
        findings: What was odd.
        names: The names of its files and folders that belong to its arrays.
        custom: What the user kept with its metadata.
    """

    tree: Tree
    findings: tuple[Finding, ...] = ()
    names: frozenset[str] = frozenset()
    custom: Tree = None


def open_item(folder: Path) -> Item:
    """Parses the tree of an item and the headers of its arrays.

    Raises:
        FormatError: They don't follow the format or can't be trusted.
    """
    files = FolderStore.of(folder)
    index, stated, document = files.value(INDEX), files.value(METADATA), files.value(JSON_ITEM)
    if index is stated is None and document is not None:
        return Item(
            strict_json(read_whole(document, _MAX_JSON), document.place), names=frozenset({JSON_ITEM})
        )
    metadata = None if stated is None else parse(read_whole(stated, _MAX_METADATA), stated.place)
    arrays = _arrays(folder, metadata)
    if index is not None:  # it holds the tree in full; _METADATA repeats it
        parsed = parse_msgpack(index)
        if not isinstance(parsed, dict):
            raise FormatError("The index of an Orbax item isn't a map.", place=index.place)
        tree, findings, prefixes = arrays.with_tensors(_unwrapped(parsed))
        return Item(tree, findings, _tops(prefixes))
    if metadata is None:
        raise FormatError(
            "An Orbax item doesn't say what its arrays are.",
            place=folder,
            expected=f"{METADATA}, or {INDEX}",
            remedy="the checkpoint is incomplete; copy it again",
        )
    entries = metadata.entries()
    held = {i: entry for i, entry in enumerate(entries) if entry.is_array}
    names = ["/".join(map(str, entry.path)) for entry in held.values()]
    places = [ArrayPlace(n, e.array, shape=e.shape) for n, e in zip(names, held.values(), strict=True)]
    tensors, findings = arrays.open(places)
    leaves: dict[int, Any] = dict(zip(held, tensors, strict=True))
    leaves |= _strings(files, entries)
    tree = tree_of(entries, leaves, metadata.place)
    return Item(tree, findings, _tops({p.prefix for p in places}), metadata.custom)


def _arrays(folder: Path, metadata: TreeMetadata | None) -> Arrays:
    store = open_store(folder)
    return Arrays(store) if metadata is None else Arrays(store, metadata.zarr_format, metadata.complete)


def _tops(prefixes: set[str]) -> frozenset[str]:
    return frozenset(prefix.partition("/")[0] for prefix in prefixes)


def _strings(files: FolderStore, entries: tuple[Entry, ...]) -> dict[int, str]:
    wanted = {i: entry.array for i, entry in enumerate(entries) if entry.kind == STRING}
    if not wanted:
        return {}
    value = files.value(STRINGS)
    stored = {} if value is None else strict_json(read_whole(value, _MAX_JSON), value.place)
    found: Mapping[str, Any] = stored if isinstance(stored, dict) else {}
    lost = [(f"isn't in {STRINGS}", name) for name in wanted.values() if not isinstance(found.get(name), str)]
    if lost:
        raise CorruptError(
            "Strings of an Orbax item are missing.", place=files.place, found=fault_list(lost[:_NAMED])
        )
    return {i: str(found[name]) for i, name in wanted.items()}


def _unwrapped(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Returns target and state of the first Orbax checkpoints of T5X, which kept a whole train state."""
    inner = tree.get("_optimizer")
    if not isinstance(inner, dict):
        return tree
    return {
        **inner,
        **{key: value for key, value in tree.items() if key != "_optimizer" and value not in (None, {})},
    }
