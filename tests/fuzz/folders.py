"""Containers as readers: of whole checkpoints, one of whose files is changed, gone, or another's."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random

from samples import CASES, ROWS, Row

from fuzz import pickles, trees
from fuzz.changing import changed_bytes
from fuzz.reader import Reader, used
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.inspection import inspect
from statekit.converters.formats.zip_archive import ZipForm, ZipWriter


@dataclass(frozen=True)
class Files:
    """A checkpoint's files, by their names below a folder, and what of them is opened."""

    container: str
    opened: str
    data: Mapping[str, bytes]

    def written(self, folder: Path) -> Path:
        """Writes them, and returns what is opened."""
        for name, data in self.data.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder / self.opened


def _files(container: str, path: Path, top: Path) -> Files:
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    data = {f"{file.relative_to(top)}": file.read_bytes() for file in paths if file.is_file()}
    return Files(container, f"{path.relative_to(top)}", data)


def _of_row(row: Row) -> Files:
    path = row.sample_in(trees.folder()).path
    return _files(row.sample.container, path, path.parent)


_TREES = {
    "deepspeed of slices": ("deepspeed", CASES / "deepspeed_tp2"),
    "megatron buckets": ("megatron", CASES / "megatron_buckets"),
}
"""By reader, a container and a folder below which its checkpoints lie."""
_ROWS = {
    "deepspeed universal": "global_step4_universal",
    "fsdp1 ranks": "adamw_fsdp1_rank_local_flat",
    "maxtext items": "maxtext_llama_scanned",
    "low bit of bitsandbytes": "low_bit/bnb",
    "low bit of torchao": "low_bit/ao",
}
"""By reader, what the names of its rows among the samples hold."""
_MUON = ("moonlight", "torch_groups_flatkeys", "keller_aux_adam_bf16", "torch_dcp", "optax_default_standard")


@cache
def _samples(name: str) -> tuple[Files, ...]:
    """Returns the checkpoints that a reader's cases are made of."""
    if name in _TREES:
        container, top = _TREES[name]
        opened = [path for path in sorted(top.rglob("*")) if path.is_dir() and _is_read(container, path)]
        return tuple(_files(container, path, path.parent) for path in opened[:2])
    if name == "muon":
        tops = [CASES / "muon_recordings" / case / "checkpoint" for case in _MUON]
        return tuple(_detected(next(top.iterdir())) for top in tops)
    if name in _ROWS:
        return tuple(_of_row(row) for row in ROWS if _ROWS[name] in row.name and row.here)
    return (_of_row(next(row for row in ROWS if row.sample.container == name)),)


def _is_read(container: str, path: Path) -> bool:
    return registry.container(container).detect(path) is not None


def _detected(path: Path) -> Files:
    return _files(registry.detect_container(path)[0].name, path, path.parent)


def changed(files: Files, random: Random) -> Files:
    """Changes one file, takes it away, or puts another's bytes in its place."""
    data = dict(files.data)
    name, change = random.choice(list(data)), random.randrange(8)
    if change == 0 and len(data) > 1:
        del data[name]
    elif change == 1 and len(data) > 1:
        data[name] = random.choice(list(data.values()))
    else:
        data[name] = _changed_file(data[name], random)
    return Files(files.container, files.opened, data)


def _changed_file(data: bytes, random: Random) -> bytes:
    """Changes the opcodes of a torch file, or the bytes of anything."""
    if not data.startswith(b"PK\3\4") or not random.randrange(4):
        return changed_bytes(data, random)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = [name for name in members if name.endswith("data.pkl")]
    name = pickled[0] if pickled else random.choice(list(members))
    changed_one = (
        pickles.changed_opcodes(pickles.opcodes(members[name]), random)
        if pickled
        else changed_bytes(members[name], random)
    )
    file = io.BytesIO()
    writer = ZipWriter(file, ZipForm("", 64, 0, 0))
    for other, content in {**members, name: changed_one}.items():
        writer.add(other, len(content), [content])
    writer.finish()
    return file.getvalue()


def _read(name: str, files: Files) -> object:
    """Opens a checkpoint as a user does, and uses its tree."""
    folder = trees.folder() / name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    path = files.written(folder)
    with registry.opened(registry.container(files.container), path, None, NO_HINTS) as checkpoint:
        used(checkpoint.tree)
    return inspect(path).to_json()


NAMES = (
    *("easylm", "npz", "pickle", "deepspeed", "megatron", "fsdp1 ranks", "mxnet", "muon"),
    *("deepspeed universal", "deepspeed of slices", "megatron buckets", "maxtext items"),
    *("low bit of bitsandbytes", "low bit of torchao"),
)
READERS = tuple(
    Reader(f"files of {name}", partial(_samples, name), partial(_read, name), (changed,)) for name in NAMES
)
