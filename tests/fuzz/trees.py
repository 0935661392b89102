"""Layouts as readers: of trees that a container has made, changed in what they hold."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from samples import ROWS

from fuzz.changing import changed_tree
from fuzz.reader import Reader, used_tensor
from statekit.conversion import registry
from statekit.conversion.contracts import Exactness
from statekit.conversion.plan import Request, Side, build_plan
from statekit.errors import StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.tree import tensor_names


@cache
def folder() -> Path:
    """Returns a folder for samples, which is removed in the end; in memory where that is possible."""
    memory = Path("/dev/shm")
    made = tempfile.mkdtemp(prefix="statekit-fuzz-", dir=memory if memory.is_dir() else None)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


@cache
def sample(number: int) -> Checkpoint:
    """Returns the open checkpoint of a row."""
    place = folder() / f"{number}"
    shutil.rmtree(place, ignore_errors=True)  # of a process that ended
    place.mkdir()
    written = ROWS[number].sample_in(place)
    checkpoint = registry.container(written.container).open(written.path)
    atexit.register(checkpoint.close)  # HDF5 doesn't outlive Python
    return checkpoint


def _read(number: int, tree: Any) -> object:
    """Detects a tree's layout, decodes it, plans to write it again; tells nothing of what can't be written."""
    row, checkpoint = ROWS[number], replace(sample(number), tree=tree, manifest=None, findings=())
    layout = registry.layout(row.layout)
    for name in registry.layout_names():
        registry.layout(name).detect(checkpoint)
    state = registry.decoded(layout, checkpoint, row.hints)
    try:
        encoded = layout.encode(state)
    except StatekitError:
        return state
    for tensor in tensor_names(encoded.tree).values():
        used_tensor(tensor)
    side = Side(checkpoint.container, row.layout, encoded.step)
    request = Request(Path("source"), Path("target"), hints=row.hints, require=Exactness.REFUSED)
    return build_plan(checkpoint, row.layout, state, encoded, side, {}, request).digest


def _reader(number: int) -> Reader:
    row = ROWS[number]
    name = f"layout {row.layout} of {row.sample.container}: {row.name}"
    return Reader(name, lambda: (sample(number).tree,), partial(_read, number), (changed_tree,))


READERS = tuple(map(_reader, range(len(ROWS))))
