"""Writes one item of an Orbax checkpoint: an OCDBT database with its tree as JSON."""

from __future__ import annotations

import errno
import json
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statekit.converters.containers.orbax.metadata import STRINGS, document_of
from statekit.converters.containers.step_folders import JSON_ITEM, TREE_METADATA, array_names
from statekit.converters.formats.zarr.array import Header, open_array
from statekit.converters.formats.zarr.ocdbt import copy_structure
from statekit.converters.formats.zarr.stores import OcdbtStore
from statekit.converters.formats.zarr.writer import encoded_chunks, header_bytes, header_for, run_shape
from statekit.errors import CorruptError
from statekit.files.durable import writing
from statekit.files.safetensors import sharded
from statekit.files.sections import CutPoints, Section
from statekit.files.source import Files
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.pipeline import working
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, tensor_names, walk

_HANDLERS = "orbax.checkpoint._src.handlers."
_TREE = f"{_HANDLERS}pytree_checkpoint_handler.PyTreeCheckpointHandler"
_JSON = f"{_HANDLERS}json_checkpoint_handler.JsonCheckpointHandler"
VALUE = "value"
"""Source: google/flax flax/nnx/variablelib.py, the only child that a Variable has as a node of a JAX tree."""
COMMIT = "commit_success.txt"
"""The file without which Orbax takes a step or an item for unfinished, where renaming isn't atomic."""
PROCESS = "ocdbt.process_"
"""What the folder of a part's database begins with. Source: orbax-checkpoint, `PROCESS_SUBDIR_PREFIX`."""
_COMMIT_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ItemWriter:
    """An item of a step.

    Attributes:
        folder: Its folder below the target.
        tree: What it holds.
        name: What the names of its tensors begin with in the whole tree, with its `/`.
        boxed: The keys at its top below which each array goes under `value`, as flax.nnx.State has its variables; `""`
            is the whole tree.
    """

    folder: str
    tree: Tree
    name: str = ""
    boxed: Collection[str] = ()

    def image(self, cut: CutPoints) -> list[Section]:
        """Returns its databases: one, or where it is cut one for each part, as each process of Orbax' writes one."""
        if self._is_document:
            return []
        arrays = self._arrays()
        return [self._section(folder, part, arrays) for folder, part in self._databases(cut).items()]

    def join(self, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> str:
        """Joins the databases, and writes what stands beside them; returns the name of the handler that reads it."""
        if self._is_document:
            with stage.file(f"{self.folder}/{JSON_ITEM}") as output:
                output.write(json.dumps(self.tree).encode())
            return _JSON
        document = document_of(self._shown())
        if cut.bytes is not None:
            _merge(
                stage, self.folder, [_database(folder, records[folder]) for folder in self._databases(cut)]
            )
        strings = {".".join(map(str, path)): leaf for path, leaf in walk(self.tree) if isinstance(leaf, str)}
        if strings:
            with stage.file(f"{self.folder}/{STRINGS}") as output:
                output.write(json.dumps(strings).encode())
        with stage.file(f"{self.folder}/{TREE_METADATA}") as output:
            output.write(json.dumps(document).encode())
        return _TREE

    @property
    def _is_document(self) -> bool:
        return not tensor_names(self.tree) and _is_json(self.tree)

    def _shown(self) -> Tree:
        return _boxed(self.tree, self.boxed)

    def _arrays(self) -> dict[str, str]:
        """Returns the name of each tensor's array in the database."""
        arrays = array_names(self._shown())
        return {leaf: arrays.get(leaf) or arrays[f"{leaf}/{VALUE}"] for leaf in tensor_names(self.tree)}

    def _databases(self, cut: CutPoints) -> dict[str, dict[str, Tensor]]:
        """Returns the folders of the databases, with the tensors of each."""
        tensors = tensor_names(self.tree)
        if cut.bytes is None:
            return {self.folder: tensors}
        parts = enumerate(sharded(tensors, cut.bytes))
        return {f"{self.folder}/{PROCESS}{number}": part for number, part in parts}

    def _section(self, folder: str, part: Mapping[str, Tensor], arrays: Mapping[str, str]) -> Section:
        def write(stage: Stage) -> str:
            _write_database(stage, _database(folder, stage.attempt), self.name, part, arrays)
            return stage.attempt

        def read(path: Place, files: Files, record: Any) -> dict[str, Tensor]:
            store = OcdbtStore.of(path / _database(folder, record), files)
            return {
                f"{self.name}{leaf}": open_array(store, arrays[leaf], _header(tensor), f"{self.name}{leaf}")
                for leaf, tensor in part.items()
            }

        return Section(
            folder,
            {f"{self.name}{leaf}": leaf_tensor for leaf, leaf_tensor in part.items()},
            write,
            read,
            repeats=False,
            record=str,
        )


def _database(folder: str, attempt: str) -> str:
    """Returns the folder of a part's database that an attempt wrote.

    Raises:
        CorruptError: The attempt, which another process tells, is none.
    """
    if not re.fullmatch("(-[0-9a-f]{32})?", attempt):
        raise CorruptError("A part record names no attempt.", place=folder, found=repr(attempt[:80]))
    return f"{folder}{attempt}"


def _merge(stage: Stage, folder: str, parts: Sequence[str]) -> None:
    """Makes one database of several in its folder; it refers to their files, and no value is copied.

    Source: orbax-checkpoint 0.12.8, `merge_ocdbt_per_process_files`: one context, one atomic transaction.
    """
    import tensorstore as ts

    with ExitStack() as stack:
        children = [stage.path / part for part in parts]
        if isinstance(stage.path, Path):
            root = stage.path / folder
        else:
            root = stack.enter_context(stage.folder(folder))
            copies = [root / child.name for child in children]
            for child, copy in zip(children, copies, strict=True):
                copy_structure(child, copy)
                stack.callback(shutil.rmtree, copy)
            children = [*copies]
        with _told(root):
            root.mkdir(parents=True, exist_ok=True)
            context = ts.Context()
            database = ts.KvStore.open(_ocdbt(root), context=context).result()
            transaction = ts.Transaction(atomic=True)
            for child in children:
                part = ts.KvStore.open(_ocdbt(Path(child)), context=context).result()
                part.experimental_copy_range_to(database.with_transaction(transaction)).result()
            transaction.commit_sync()


def _ocdbt(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def _header(tensor: Tensor) -> Header:
    # Orbax takes a device's shard for a chunk, however large; tensorstore holds one whole.
    return header_for(tensor, "zstd", run_shape(tensor.shape, tensor.dtype.itemsize))


def _boxed(tree: Tree, parts: Collection[str]) -> Tree:
    """Returns a tree of which some parts are states of nnx."""
    if "" in parts or not isinstance(tree, dict):
        return _as_variables(tree) if parts else tree
    return {key: _as_variables(part) if str(key) in parts else part for key, part in tree.items()}


def _as_variables(tree: Tree) -> Tree:
    """Returns a tree in which each tensor lies under `value`."""
    if isinstance(tree, dict):
        return {key: _as_variables(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_as_variables(child) for child in tree]
    return {VALUE: tree} if isinstance(tree, Tensor) else tree


def write_commit(stage: Stage, folder: str) -> None:
    """Writes what says that a folder below the stage is whole, after everything else in it.

    Without it Orbax takes a folder in a bucket for one that is still being written.
    Source: orbax-checkpoint 0.12.8, `AtomicRenameTemporaryPath.finalize`; it names the whole path there.
    """
    with stage.file(f"{folder}{COMMIT}") as output:
        output.write(f"Checkpoint commit was successful to {folder.rstrip('/') or '.'}".encode())


def step_metadata(handlers: Mapping[str, str], begun: int, custom: Mapping[str, Any]) -> bytes:
    """Returns `_CHECKPOINT_METADATA`.

    Args:
        handlers: For each item, the name of its handler.
        begun: When writing began, in nanoseconds since 1970.
        custom: What the system keeps with a step beside its trees.
    """
    document = {
        "item_handlers": dict(handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": begun,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": dict(custom),
    }
    return json.dumps(document).encode()


def _is_json(tree: Tree) -> bool:
    """Tells whether JSON holds a tree as it is: a document, and not the empty nodes of a tree of arrays."""
    if not isinstance(tree, (dict, list)) or not tree:
        return False
    nodes: list[Any] = [tree]
    for node in nodes:
        if isinstance(node, dict) and all(isinstance(key, str) for key in node):
            nodes += node.values()
        elif isinstance(node, list):
            nodes += node
        elif type(node) not in (str, int, float, bool, type(None)):
            return False
    return any(type(node) in (str, int, float, bool) for node in nodes)


def _write_database(
    stage: Stage, folder: str, name: str, tensors: Mapping[str, Tensor], arrays: Mapping[str, str]
) -> None:
    """Writes the arrays into a new OCDBT database. tensorstore writes and syncs its files itself."""
    import tensorstore as ts

    with stage.folder(folder) as root:
        with _told(root):
            database = ts.KvStore.open(_ocdbt(root)).result()
        _fill(database, root, stage, name, tensors, arrays)


def _fill(
    database: Any,
    root: Path,
    stage: Stage,
    name: str,
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, str],
) -> None:
    """Writes the arrays into a database, some at a time: what is written in a transaction is held until its end."""
    import tensorstore as ts

    transaction, size = ts.Transaction(), 0
    commits: list[Any] = []
    try:
        for leaf, tensor in tensors.items():
            for key, value in _values(stage, f"{name}{leaf}", tensor, arrays[leaf]):
                with _told(root):
                    database.with_transaction(transaction).write(key, value).result()
                    size += len(value)
                    if (
                        size >= _COMMIT_BYTES
                    ):  # each commit is a version of the database, and frees what it held
                        _wait(commits)
                        commits.append(transaction.commit_async())  # while the next is compressed
                        transaction, size = ts.Transaction(), 0
        with _told(root):
            _wait(commits)
            transaction.commit_sync()
    except BaseException:
        with suppress(Exception):  # nothing may be written any more when the folder is removed
            _wait(commits)
        raise


def _wait(commits: list[Any]) -> None:
    """Waits for a commit, if one is under way."""
    while commits:
        with working("write"):
            commits.pop().result()


@contextmanager
def _told(root: Path) -> Iterator[None]:
    """Turns what tensorstore says of a failed write, which may be a ValueError, into a CommitError."""
    with writing(root):
        try:
            yield
        except ValueError as error:
            raise OSError(errno.EIO, str(error).splitlines()[0]) from error


def _values(stage: Stage, name: str, tensor: Tensor, array: str) -> Iterator[tuple[str, bytes]]:
    header = _header(tensor)
    yield f"{array}/.zarray", header_bytes(header)
    for key, pieces in encoded_chunks(stage, name, tensor, header):
        yield f"{array}/{key}", b"".join(pieces)
