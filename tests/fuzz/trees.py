"""Layouts as readers: of trees that a container has made, changed in what they hold."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import shutil
import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

from samples import ROWS

from fuzz.changing import changed_tree
from fuzz.reader import Reader, used_tensor
from statekit.cli.output import Screen
from statekit.cli.plan_view import show_plan
from statekit.conversion import registry
from statekit.conversion.contracts import Exactness, Fitting
from statekit.conversion.plan import Request, Side, build_plan
from statekit.conversion.prepared import rule_change_to
from statekit.conversion.target import layouts_for
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
    request = Request(row.hints.at(Path("source")), Path("target"), require=Exactness.REFUSED)
    return build_plan(checkpoint, row.layout, state, encoded, side, {}, request).digest


def _reader(number: int) -> Reader:
    row = ROWS[number]
    name = f"layout {row.layout} of {row.sample.container}: {row.name}"
    return Reader(name, lambda: (sample(number).tree,), partial(_read, number), (changed_tree,))


# The plan of a conversion to any layout


@cache
def _plans() -> list[tuple[int, str, Any]]:
    """Returns rows, of one sample of each optimizer, with every layout that they can be planned to, and their trees."""
    firsts = {ROWS[number].name: number for number in reversed(range(len(ROWS))) if ROWS[number].write}
    made = []
    for number in firsts.values():
        row, tree = ROWS[number], sample(number).tree
        kinds = registry.decoded(registry.layout(row.layout), sample(number), row.hints).optimizer.kinds
        made += [
            (number, target, tree)
            for target in registry.layout_names()
            if all(schema in registry.layout_card(target).variants for schema, _ in kinds)
        ]
    return [case for case in made if _is_planned(case)]


def _is_planned(case: tuple[int, str, Any]) -> bool:
    try:
        return bool(_read_plan(case))
    except StatekitError:
        return False


def _plan_changed(case: tuple[int, str, Any], random: Random) -> tuple[int, str, Any]:
    number, target, tree = case
    return number, target, changed_tree(tree, random)


_SHOWN = io.StringIO()
"""Takes what is printed, of all cases: click keeps every stream that it has printed to."""


def _read_plan(case: tuple[int, str, Any]) -> object:
    """Plans to write a tree in a layout, as a conversion does, and shows the plan."""
    number, target, tree = case
    row, checkpoint = ROWS[number], replace(sample(number), tree=tree, manifest=None, findings=())
    state = registry.decoded(registry.layout(row.layout), checkpoint, row.hints)
    layout, home = registry.layout(target), registry.container(registry.layout_card(target).containers[0])
    card = layouts_for(home, state.optimizer.kinds, target, row.layout)[0]
    rule_change = rule_change_to(card, state, row.layout)
    if rule_change is not None:
        state = rule_change.state
    encoded = layout.encode(state)
    if isinstance(home, Fitting):
        encoded = home.fitted(encoded)
    request = Request(row.hints.at(Path("source")), Path("target"), require=Exactness.REFUSED)
    side = Side(home.name, target, encoded.step)
    plan = build_plan(checkpoint, row.layout, state, encoded, side, {}, request, rule_change)
    plan.check()
    with contextlib.redirect_stdout(_SHOWN):
        show_plan(Screen(100, False), plan, True)
    _SHOWN.seek(0)
    _SHOWN.truncate()
    return plan.digest, json.dumps(plan.to_json())


PLAN = Reader("plan", _plans, _read_plan, (_plan_changed,))
READERS = tuple(map(_reader, range(len(ROWS))))
