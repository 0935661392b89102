"""The container `tf-bundle`: checkpoints of TensorFlow 1 and 2, read and written without TensorFlow.

It reads any bundle and writes one as TensorFlow 1's Saver does. Input: a prefix, one of its files, or a folder, of
which the text file `checkpoint` names the newest: `<prefix>.index` is a table of what there is, and
`<prefix>.data-<i>-of-<n>` the bytes. Output: a flat dict by name; a partitioned variable is a dict of its slices,
named as TensorFlow's Saver names them: `10 6 0,4:0,6`, the full shape, then start and length along each axis. Each
tensor has a CRC-32C, which the first read of any of its values enforces.

Source: tensorflow/tensorflow, core/util/tensor_bundle/tensor_bundle.cc; core/framework/variable.proto,
`SaveSliceInfoDef`; python/checkpoint/checkpoint_management.py.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.storage import dense
from statekit.converters.formats.tensor_bundle.entries import (
    STRING,
    BundleEntry,
    parse_entry,
    parse_header,
    parse_strings,
    slice_key,
)
from statekit.converters.formats.tensor_bundle.graph_proto import graph_bytes, parse_graph
from statekit.converters.formats.tensor_bundle.table import FOOTER_BYTES, MAGIC, masked, read_table
from statekit.converters.formats.tensor_bundle.writer import STATE_FILE, Bundle
from statekit.errors import CorruptError, Faults, FormatError, NotFoundError, StatekitError
from statekit.files.checkpoint import STEPS, Checkpoint
from statekit.files.checksums import BUNDLE
from statekit.files.sections import CutPoints, Section
from statekit.files.source import File, Files, last_bytes, listing, opening, read_small, record
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.pipeline import RunningChecks
from statekit.tensors.object_graph import GRAPH, Graph
from statekit.tensors.slices import Extent, bounds
from statekit.tensors.tensor import BLOCK_BYTES, Array, Shape, Tensor, index_shape

_NUMBERED = re.compile(r"(.+)-(\d+)", re.DOTALL)
_NEWEST = re.compile(rb'^model_checkpoint_path:\s*"((?:[^"\\]++|\\.)*+)"', re.MULTILINE)
"""Possessive, as each place to go back to would take 130 bytes for a byte of the file."""


@dataclass(frozen=True)
class TFBundle:
    """The container of `model.ckpt-<step>.index` and its data files."""

    name: str = "tf-bundle"
    title: str = "TensorFlow checkpoint (V2 bundle: .index and .data-*)"
    suffixes: tuple[str, ...] = (".ckpt.d",)
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = ("*.index", STATE_FILE)

    def detect(self, path: Place) -> Evidence | None:
        """Looks for an index with the table's magic number."""
        try:
            prefix = _prefix(path, None)
            is_index = _is_table(prefix)
        except (OSError, StatekitError):
            return None
        return Evidence(10, f"{prefix.name}.index is a table of TensorFlow") if is_index else None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the index and the strings; arrays are read when asked for.

        Args:
            path: A prefix, an index, or a folder: of several checkpoints in it, the one that `checkpoint` names.
            step: The number at the end of the prefix.
            budget: The job's.

        Raises:
            NotFoundError: No index, or no such step.
            CorruptError: The index doesn't fit its checksums, or data files are missing or too short.
            FormatError: It breaks the format.
        """
        with opening(path, budget) as files:
            prefix = _prefix(path, step, files)
            index = _index(prefix, files)
            shards = _Shards(prefix, parse_header(index.pop(b"", b""), f"{prefix}.index"), files)
            tree = _tree(index, shards, prefix)
            number = _number(prefix)
            place = prefix.with_name(f"{prefix.name}.index")
            data = sorted(
                file for file in listing(prefix.parent) if file.name.startswith(f"{prefix.name}.data-")
            )
            meta: dict[str, Any] = {"prefix": prefix.name, "shards": shards.count, STEPS: _steps(path)}
            if isinstance(tree.get(GRAPH), bytes):
                meta[GRAPH] = _graph(tree[GRAPH], f"{GRAPH} in {prefix}", files).to_record()
        return Checkpoint(self.name, prefix, tree, meta, number, (), files.close, (place, *data))

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes `model.ckpt-<step>` and the text file that names it, in one shard, byte for byte as it does."""
        write_cut(self, encoded, stage)

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the data files."""
        return _bundle(encoded).image(cut)

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the index, and the text file that names it."""
        _bundle(encoded).join(stage, cut, records)


def _graph(data: bytes, place: str, files: Files) -> Graph:
    """Returns the object graph, whose variables lie under the keys that lead to them."""
    graph = parse_graph(data, place, files.account)
    faults = Faults(("doesn't lead to its variable", key) for key in graph.misplaced())
    faults.check(CorruptError, "The object graph contradicts the checkpoint's keys", place=place)
    return graph


def _bundle(encoded: Encoded) -> Bundle:
    graph = Graph.from_record(encoded.tree.get(GRAPH))
    new = {} if graph is None else {GRAPH: graph_bytes(graph.nodes)}
    return Bundle({**encoded.tree, **new}, encoded.step, _opened)


def _opened(
    path: Place, prefix: str, count: int, entries: Mapping[str, BundleEntry], files: Files
) -> Mapping[str, Tensor]:
    """Opens tensors of a checkpoint by their entries, without its index."""
    shards = _Shards(path / prefix, count, files)
    return {name: _value(entry, name, shards) for name, entry in entries.items()}


class _Shards:
    """The data files of a checkpoint, opened when first needed."""

    def __init__(self, prefix: Place, count: int, files: Files) -> None:
        self.count, self._prefix, self._files = count, prefix, files
        self.account = files.account
        self._found: dict[int, File] = {}
        self._checks = RunningChecks(crc32c)

    def path(self, shard: int) -> Place:
        return self._prefix.with_name(f"{self._prefix.name}.data-{shard:05d}-of-{self.count:05d}")

    def file(self, shard: int) -> File:
        """Returns a data file."""
        if shard >= self.count:
            raise CorruptError(
                "An index speaks of a data file that there isn't.", place=self._prefix, found=shard
            )
        if shard not in self._found:
            try:
                self._found[shard] = self._files.source(self.path(shard))
            except NotFoundError:
                raise CorruptError(
                    "A data file of the checkpoint is missing.",
                    place=self.path(shard),
                    remedy="copy the checkpoint again, with all its .data files",
                ) from None
        return self._found[shard]

    def read(self, entry: BundleEntry, place: str, start: int, count: int) -> Array:
        """Reads bytes of an entry; all are checked, before any is given out or, in a passage, at its end."""
        piece = self.file(entry.shard).read(entry.offset + start, count)
        self._checks.take(_key(entry), start, piece.data, entry.size, partial(self._check, entry, place))
        return piece

    def _check(self, entry: BundleEntry, place: str) -> None:
        file, key = self.file(entry.shard), _key(entry)
        if key in self._checks:
            return
        done, crc = self._checks.begun(key)
        for at in range(done, entry.size, BLOCK_BYTES):
            crc = crc32c(file.read(entry.offset + at, min(BLOCK_BYTES, entry.size - at)).data, crc)
        if masked(crc) != entry.crc:
            raise CorruptError(
                "A tensor's bytes don't fit their checksum.",
                place=f"{place} in {file.path}",
                expected=f"masked CRC-32C {entry.crc:08x}",
                found=f"{masked(crc):08x}",
                remedy="copy the checkpoint again; this part is lost otherwise",
            )
        self._checks.add(key)


def _key(entry: BundleEntry) -> tuple[int, int, int, int]:
    """Returns what tells one checksum from another: two names may have the same bytes, and one two entries."""
    return entry.shard, entry.offset, entry.size, entry.crc


def _prefix(path: Place, step: int | None, files: Files | None = None) -> Place:
    """Finds the prefix that a path means."""
    if path.is_dir():
        return _in_folder(path, step, files)
    if path.name.endswith(".index"):
        path = path.with_name(path.name[: -len(".index")])
    elif shard := re.fullmatch(r"(.+)\.data-\d{5}-of-\d{5}", path.name, re.DOTALL):
        path = path.with_name(shard[1])
    if not path.with_name(f"{path.name}.index").is_file():
        raise NotFoundError("There is no such checkpoint.", place=path, expected=f"{path.name}.index")
    check_step(step, _number(path), path)
    return path


def _in_folder(folder: Place, step: int | None, files: Files | None) -> Place:
    prefixes = {p.name[: -len(".index")]: _number(p.with_suffix("")) for p in listing(folder, ".index")}
    if step is not None:
        names = [name for name, number in prefixes.items() if number == step]
    else:
        newest = _newest(folder, files)
        names = [newest] if newest in prefixes else list(prefixes)
        if len(names) > 1:
            names.sort(key=lambda name: (prefixes[name] is None, prefixes[name]))
            names = names[-1:]
    if len(names) != 1:
        raise NotFoundError(
            "There is no such checkpoint in the folder."
            if not names
            else "Several checkpoints have this step.",
            place=folder,
            expected="an .index" if step is None else f"<name>-{step}.index",
            found=", ".join(prefixes) or "none",
        )
    return folder / names[0]


def _steps(path: Place) -> list[int]:
    """Returns the steps of a run's folder, by the numbers at the end of its prefixes."""
    return sorted(
        number for file in listing(path, ".index") if (number := _number(file.with_suffix(""))) is not None
    )


def _newest(folder: Place, files: Files | None) -> str | None:
    """Returns what the text file `checkpoint` names, by its last part: the folder may have moved."""
    path = folder / STATE_FILE
    if files is not None:
        files.links.check(path)
    try:
        match = _NEWEST.search(read_small(path, files))
    except StatekitError:
        return None
    return match[1].decode("utf-8", "replace").rpartition("/")[2] if match else None


def _number(prefix: Place) -> int | None:
    match = _NUMBERED.fullmatch(prefix.name)
    return int(match[2]) if match and len(match[2]) < 19 else None


def _is_table(prefix: Place) -> bool:
    end = last_bytes(prefix.with_name(f"{prefix.name}.index"), FOOTER_BYTES)
    return len(end) == FOOTER_BYTES and end.endswith(struct.pack("<Q", MAGIC))


def _index(prefix: Place, files: Files) -> dict[bytes, bytes]:
    path = prefix.with_name(f"{prefix.name}.index")
    return read_table(read_small(path, files), path, files.account)


def _tree(index: Mapping[bytes, bytes], shards: _Shards, prefix: Place) -> dict[str, Any]:
    place, tree, faults = f"{prefix}.index", dict[str, Any](), Faults()
    parts: set[bytes] = set()
    for key, value in index.items():
        if key.startswith(b"\0"):
            continue
        entry, name = parse_entry(value, place), _name(key, place)
        if not entry.slices:
            tree[name] = _value(entry, name, shards)
            faults += _bounds_faults(entry, name, shards)
            continue
        tree[name] = {}
        for extent in entry.slices:
            spec, part = _spec(entry.shape, extent), slice_key(key, extent)
            if part not in index:
                faults.add("a slice has no entry", f"{name} {spec}")
                continue
            shards.account.step(1 + (len(part) + len(index[part])) // 4, "An index", place)
            slice_entry, shape = parse_entry(index[part], place), index_shape(bounds(extent, entry.shape))
            if slice_entry.shape != shape or slice_entry.code != entry.code:
                faults.add(f"a slice has shape {slice_entry.shape}, expected {shape}", f"{name} {spec}")
                continue
            parts.add(part)
            faults += _bounds_faults(slice_entry, f"{name} {spec}", shards)
            tree[name][spec] = _value(slice_entry, f"{name}/{spec}", shards)
    faults += [
        ("belongs to no tensor", repr(key)) for key in index if key.startswith(b"\0") and key not in parts
    ]
    faults.check(
        CorruptError,
        "The checkpoint's index can't be trusted",
        place=place,
        remedy="copy the checkpoint again, with all its .data files",
    )
    return tree


def _bounds_faults(entry: BundleEntry, name: str, shards: _Shards) -> Iterator[tuple[str, str]]:
    size = shards.file(entry.shard).size
    if entry.offset + entry.size > size:
        yield f"lies beyond the end of {shards.path(entry.shard).name}, which has {size} bytes", name


def _name(key: bytes, place: str) -> str:
    try:
        return key.decode("utf-8")
    except UnicodeDecodeError:
        raise FormatError("A tensor's name isn't UTF-8.", place=place, found=key) from None


def _value(entry: BundleEntry, name: str, shards: _Shards) -> Any:
    place = f"{shards.path(entry.shard)}"
    if entry.code == STRING:
        data = record(shards.file(entry.shard), entry.offset, entry.size, None, f"The string tensor {name}")
        return parse_strings(data, entry, f"{name} in {place}", shards.account)
    if entry.dtype is None:
        raise FormatError("A tensor has a dtype that statekit doesn't carry.", place=name, found=entry.code)
    fetch = partial(shards.read, entry, name)
    return dense(name, place, entry.dtype, entry.shape, entry.size, fetch, checksum=BUNDLE)


def _spec(shape: Shape, extent: Extent) -> str:
    parts = [
        "-" if part == slice(0, size) and length < 0 else f"{part.start},{part.stop - part.start}"
        for part, (_, length), size in zip(bounds(extent, shape), extent, shape, strict=True)
    ]
    return " ".join(map(str, shape)) + " " + ":".join(parts)


CONTAINER = TFBundle()
