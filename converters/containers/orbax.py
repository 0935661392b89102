"""Container `orbax`: checkpoints of Orbax, in the three forms that T5X's Orbax generation and Orbax itself wrote.

    <run>/checkpoint_<step>/_CHECKPOINT_METADATA
    <run>/checkpoint_<step>/state/_METADATA          the tree, as JSON
    <run>/checkpoint_<step>/state/checkpoint         2022 to 2024: the tree as msgpack, arrays in it or PLACEHOLDER://name
    <run>/checkpoint_<step>/state/<dotted name>/     until 2024: one zarr folder per array
    <run>/checkpoint_<step>/state/manifest.ocdbt, d/ since: all of them in one OCDBT database

Source: google/orbax orbax/checkpoint/_src/handlers/pytree_checkpoint_handler.py, _src/metadata/tree.py;
T5X t5x/checkpoints.py, `OrbaxCheckpointManagerInterface`.
"""

from __future__ import annotations

import errno
import io
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from statekit.checkpoint import Checkpoint, Finding
from statekit.commit import Stage
from statekit.converters.containers.kv_stores import FolderStore, open_store, read_whole
from statekit.converters.containers.msgpack_index import parse
from statekit.converters.containers.step_files import files_beside, gin_settings, trusted_manifest
from statekit.converters.containers.step_folders import (
    INDEX,
    METADATA,
    STATE,
    STEP_METADATA,
    StepFolder,
    is_item,
    items,
    locate,
    says_t5x,
)
from statekit.converters.containers.step_target import array_names, step_prefix
from statekit.converters.containers.stored_leaves import ArrayPlace, open_arrays, with_tensors
from statekit.converters.containers.zarr2_write import encoded_chunks, header_bytes, header_for
from statekit.durable import writing
from statekit.errors import FormatError, NotFoundError, UsageError
from statekit.format import Encoded, Evidence
from statekit.manifest import strict_json
from statekit.tensor import Tensor
from statekit.tree import MAX_DEPTH, MAX_NODES, Tree, tensor_names, walk

_MAX_METADATA = 100_000_000
_CHUNK_BYTES = 16 * 2**20
"""The size above which an array is cut. Orbax takes a device's shard, however large; tensorstore holds one whole."""
_COMMIT_BYTES = 32 * 2**20
_SEQUENCE, _DICT = 1, 2
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": ()}
_OWN_FILES = {
    METADATA,
    STEP_METADATA,
    INDEX,
    "_sharding",
    "commit_success.txt",
    "manifest.ocdbt",
    "d",
    "array_metadatas",
}


@dataclass(frozen=True)
class OrbaxFolder:
    """Orbax checkpoints with zarr arrays of format 2, in folders or in an OCDBT database."""

    name: str = "orbax"
    title: str = "Orbax checkpoint folders: msgpack, zarr or OCDBT, as T5X wrote them from 2022 on"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Path) -> Evidence | None:
        """Looks at file names and first bytes only."""
        try:
            found = locate(path)
        except FormatError:
            return None
        if found is None or found.kind != "orbax":
            return None
        for item in _items(found.path):
            if says_t5x(item):
                return Evidence(20, f"{item} is an Orbax item that holds a T5X train state")
        return Evidence(10, f"{found.path} has the files of an Orbax checkpoint")

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Parses the tree and the arrays' headers.

        Raises:
            NotFoundError: No checkpoint, or no such step.
            FormatError: Tree or headers don't follow the format or can't be trusted.
        """
        found = locate(path, step)
        if found is None or found.kind != "orbax":
            raise NotFoundError(
                "There is no Orbax checkpoint.",
                place=path if found is None else found.path,
                found=None if found is None else "a T5X checkpoint of the legacy generation",
                remedy="" if found is None else "read it with --from t5x",
            )
        folders = _items(found.path)
        if not folders:
            raise FormatError(
                "An Orbax checkpoint holds no tree of arrays.",
                place=found.path,
                expected=f"an item with {METADATA}",
            )
        trees: dict[str, Tree] = {}
        findings: list[Finding] = [*found.findings]
        known = set(_OWN_FILES)
        for folder in folders:
            trees[folder.name], odd, prefixes = _open_item(folder)
            findings += odd
            known |= {folder.name} if folder != found.path else prefixes
        tree = trees[folders[0].name] if len(folders) == 1 else trees
        return _checkpoint(self.name, found, tree, [folder.name for folder in folders], findings, known)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes `checkpoint_<step>/state/` as T5X does today: an OCDBT database with its tree as JSON.

        Raises:
            UsageError: The target is named for another step, or the tree holds what Orbax can't.
            FormatError: Two names give the same array.
        """
        prefix = step_prefix(stage, encoded.step)
        arrays = array_names(encoded.tree)
        begun = time.time_ns()
        metadata = _tree_metadata(encoded.tree)
        _write_database(stage, f"{prefix}{STATE}", tensor_names(encoded.tree), arrays)
        with stage.file(f"{prefix}{STATE}/{METADATA}") as output:
            output.write(json.dumps(metadata).encode())
        with stage.file(f"{prefix}{STEP_METADATA}") as output:
            output.write(json.dumps(_step_metadata(begun)).encode())


def _items(step: Path) -> list[Path]:
    return [step] if is_item(step) else items(step)


def _open_item(folder: Path) -> tuple[Tree, tuple[Finding, ...], set[str]]:
    """Returns the tree of an item, what was odd, and the names its arrays have in the store."""
    store = open_store(folder)
    index = FolderStore.of(folder).value(INDEX)
    if index is not None:  # it holds the tree in full; _METADATA repeats it
        parsed = parse(index)
        if not isinstance(parsed, dict):
            raise FormatError("The index of an Orbax item isn't a map.", place=index.place)
        tree, findings, prefixes = with_tensors(_unwrapped(parsed), store)
        return tree, findings, {prefix.partition("/")[0] for prefix in prefixes}
    metadata = FolderStore.of(folder).value(METADATA)
    if metadata is None:
        raise FormatError(
            "An Orbax item doesn't say what its arrays are.",
            place=folder,
            expected=f"{METADATA}, or {INDEX}",
            remedy="the checkpoint is incomplete; copy it again",
        )
    entries = _entries(strict_json(read_whole(metadata, _MAX_METADATA), metadata.place), metadata.place)
    places = [
        ArrayPlace("/".join(map(str, path)), ".".join(map(str, path)))
        for path, kind in entries
        if kind is None
    ]
    tensors, findings = open_arrays(places, store)
    leaves = [
        (path, tensors["/".join(map(str, path))] if kind is None else _EMPTY[kind]) for path, kind in entries
    ]
    return _nested(leaves, metadata.place), findings, {place.prefix.partition("/")[0] for place in places}


def _entries(document: Any, place: str) -> list[tuple[tuple[str | int, ...], str | None]]:
    """Returns path and kind of every leaf; the kind of an array is None."""
    tree = document.get("tree_metadata") if isinstance(document, dict) else None
    if not isinstance(tree, dict) or len(tree) > MAX_NODES:
        raise FormatError("The metadata of an Orbax item has no tree.", place=place)
    if document.get("use_zarr3"):
        raise FormatError(
            "The arrays have zarr format 3, which statekit doesn't read.",
            place=place,
            expected="use_zarr3 false",
        )
    entries = []
    for text, entry in tree.items():
        try:
            keys = entry["key_metadata"]
            path = tuple(int(k["key"]) if k["key_type"] == _SEQUENCE else str(k["key"]) for k in keys)
            value = entry["value_metadata"]
            kind = value["value_type"] if value.get("skip_deserialize") else None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                "An entry of an Orbax tree can't be read.", place=place, found=text[:200]
            ) from error
        if len(path) > MAX_DEPTH or (kind is not None and kind not in _EMPTY):
            raise FormatError(
                "A leaf of an Orbax tree can't be read.",
                place=place,
                expected="an array, or nothing",
                found=f"{kind} at {text[:200]}",
            )
        entries.append((path, kind))
    return entries


def _nested(leaves: list[tuple[tuple[str | int, ...], Any]], place: str) -> Tree:
    """Builds the tree of dicts and lists from paths; an int is an index."""
    if not leaves or leaves[0][0] == ():
        return leaves[0][1] if leaves else {}
    root: dict[str | int, Any] = {}
    for path, leaf in leaves:
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise FormatError(
                    "A leaf of an Orbax tree has children.", place=place, found="/".join(map(str, path))
                )
        if path[-1] in node:
            raise FormatError(
                "A leaf of an Orbax tree stands twice.", place=place, found="/".join(map(str, path))
            )
        node[path[-1]] = leaf
    return _with_lists(root)


def _with_lists(root: dict[str | int, Any]) -> Tree:
    """Turns dicts whose keys are 0, 1, 2 ... into lists, children first."""
    top: dict[str, Any] = {"": root}
    order: list[tuple[Any, Any]] = [(top, "")]
    for holder, key in order:
        order += [(holder[key], k) for k, child in holder[key].items() if isinstance(child, dict)]
    for holder, key in reversed(order):
        node = holder[key]
        if (
            node
            and sorted(map(str, node)) == sorted(map(str, range(len(node))))
            and all(type(k) is int for k in node)
        ):
            holder[key] = [node[i] for i in range(len(node))]
    return top[""]


def _unwrapped(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Returns target and state of the first Orbax checkpoints of T5X, which kept a whole train state."""
    inner = tree.get("_optimizer")
    if not isinstance(inner, dict):
        return tree
    return {
        **inner,
        **{key: value for key, value in tree.items() if key != "_optimizer" and value not in (None, {})},
    }


def _checkpoint(
    name: str, found: StepFolder, tree: Tree, folders: list[str], findings: list[Finding], known: set[str]
) -> Checkpoint:
    gin, gin_findings = gin_settings(found.path)
    known |= {entry.name for entry in found.path.iterdir() if entry.name.startswith("ocdbt.process_")}
    manifest, manifest_findings = trusted_manifest(found.path, found.step, tree)
    meta = {
        "generation": "orbax",
        "items": folders,
        "files_beside": files_beside(found.path, known),
        "gin": gin,
    }
    return Checkpoint(
        name, found.path, tree, meta, found.step, manifest, (*findings, *gin_findings, *manifest_findings)
    )


def _tree_metadata(tree: Tree) -> dict[str, Any]:
    """Returns `_METADATA`. Arrays are `np.ndarray`, so that a plain restore needs no `_sharding`."""
    entries = {}
    for path, leaf in walk(tree):
        if not isinstance(leaf, Tensor) and leaf is not None and leaf != {}:
            raise UsageError(
                "An Orbax checkpoint can't hold this value.",
                place="/".join(map(str, path)),
                found=type(leaf).__name__,
            )
        value: dict[str, Any] = {"value_type": "None" if leaf is None else "Dict", "skip_deserialize": True}
        if isinstance(leaf, Tensor):
            value = {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(leaf.shape)}
        keys = [{"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT} for key in path]
        entries[str(tuple(map(str, path)))] = {"key_metadata": keys, "value_metadata": value}
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _step_metadata(begun: int) -> dict[str, Any]:
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    return {
        "item_handlers": {STATE: handler},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }


def _write_database(
    stage: Stage, folder: str, tensors: Mapping[str, Tensor], arrays: Mapping[str, str]
) -> None:
    """Writes the arrays into a new OCDBT database. tensorstore writes and syncs its files itself."""
    import tensorstore as ts

    root = stage.path / folder
    with _told(root):
        root.mkdir(parents=True)
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{root}/"}}
        database = ts.KvStore.open(spec).result()
    transaction, size = ts.Transaction(), 0
    for name, tensor in tensors.items():
        for key, value in _values(stage, name, tensor, arrays[name]):
            with _told(root):
                database.with_transaction(transaction).write(key, value).result()
                size += len(value)
                if size >= _COMMIT_BYTES:  # each commit is a version of the database, and frees what it held
                    transaction.commit_sync()
                    transaction, size = ts.Transaction(), 0
    with _told(root):
        transaction.commit_sync()


@contextmanager
def _told(root: Path) -> Iterator[None]:
    """Turns what tensorstore says of a failed write, which may be a ValueError, into a CommitError."""
    with writing(root):
        try:
            yield
        except ValueError as error:
            raise OSError(errno.EIO, str(error).splitlines()[0][:400]) from error


def _values(stage: Stage, name: str, tensor: Tensor, array: str) -> Iterator[tuple[str, bytes]]:
    header = header_for(tensor, "zstd", _CHUNK_BYTES)
    yield f"{array}/.zarray", header_bytes(header)
    for key, pieces in encoded_chunks(stage, name, tensor, header):
        whole = io.BytesIO()
        whole.writelines(pieces)
        yield f"{array}/{key}", whole.getvalue()


CONTAINER = OrbaxFolder()
