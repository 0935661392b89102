"""Every recording of every system: described in the documented form, and written as it was read, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from goldens import GOLDEN
from statekit.arrays.backend import backend
from statekit.errors import NotFoundError, StatekitError
from statekit.verify.recorder import Spool
from statekit.verify.recording import from_json, open_recording, system, to_json
from statekit.verify.replay import Subject, replay
from statekit.verify.systems import SYSTEMS

FORM = json.loads((Path(__file__).parents[1] / "schemas/statekit-recording.schema.json").read_text())


def _opens(path: Path) -> bool:
    try:
        open_recording(path)
    except NotFoundError:  # tests/test_cli_replay.py: listed with the reason
        return False
    return True


FOLDERS = [meta.parent for meta in sorted(GOLDEN.glob("*/*/meta.json")) if _opens(meta.parent)]
ALL = [pytest.param(folder, id=f"{folder.parent.name}/{folder.name}") for folder in FOLDERS]


def test_every_system_has_recordings_that_open() -> None:
    recorded = {json.loads((folder / "meta.json").read_text())["system"] for folder in FOLDERS}
    assert recorded == {name for name in SYSTEMS if (GOLDEN / name).is_dir()}


VALUES: tuple[Any, ...] = (None, {}, [], -1, 0, 1.5, "x", "", True, [[]], [0], {"a": 1}, 10**30, 1e308)
"""What is put in the place of a value of a description."""


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the ways to all values of a document; of a list to the first of its kind."""
    if at:
        yield at
    for key in node if isinstance(node, dict) else range(min(len(node), 1)) if isinstance(node, list) else ():
        yield from places(node[key], (*at, key))


def changed(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Returns a document with another value in one place."""
    if not at:
        return value
    copied = document.copy()
    copied[at[0]] = changed(copied[at[0]], at[1:], value)
    return copied


def replayed(folder: Path, document: Any) -> None:
    (folder / "meta.json").write_text(json.dumps(document))
    try:
        with open_recording(folder) as recording:
            replay(Subject(recording), backend("numpy"))
    except StatekitError:
        return


@pytest.mark.parametrize(
    "case",
    [
        "mxnet_lans/updater_unfused_fp16_legacy",
        *(pytest.param(f"{one.parent.name}/{one.name}", marks=pytest.mark.slow) for one in FOLDERS[::6]),
    ],
)
def test_a_description_with_a_value_of_another_type_is_refused_or_read(
    case: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "recording"
    shutil.copytree(GOLDEN / case, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    document = json.loads((GOLDEN / case / "meta.json").read_text())
    draw, ways = random.Random(case), [*places(document)]
    known: list[tuple[tuple[Any, ...], Any]] = [
        (("checkpoint", "files", 0), {}), (("checkpoint", "files", 0), True),
        (("extra", "lr_mult", "a/weight"), None), (("hyperparameters", "begin_num_update"), {}),
    ]  # fmt: skip
    is_sweep = "slow" in {mark.name for mark in request.node.iter_markers()}
    drawn = [(at, value) for at in ways for value in VALUES] if is_sweep else []
    for at, value in drawn or [*known, *((draw.choice(ways), draw.choice(VALUES)) for _ in range(12))]:
        replayed(folder, changed(document, at, value))


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("trajectories",), {}), (("trajectories",), []),
        (("phases", 0, "hyperparameters", "logical_axes", "first"), [[]]),
        (("phases", 0, "hyperparameters", "logical_axes", "first"), 1),
    ],
)  # fmt: skip
def test_a_recording_of_ours_with_a_value_of_another_type_is_refused(
    keys: tuple[Any, ...], value: Any, tmp_path: Path
) -> None:
    """Seen red: IndexError and TypeError."""
    folder = tmp_path / "recording"
    shutil.copytree(GOLDEN / "t5x/scanned_logical_rules", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    with open_recording(folder) as recording:
        document = json.loads(json.dumps(to_json(recording)))
    axes = document["phases"][0]["hyperparameters"].get("logical_axes") or {}
    keys = (*keys[:-1], next(iter(axes))) if "logical_axes" in keys else keys
    (folder / "recording.json").write_text(json.dumps(changed(document, keys, value)))
    with pytest.raises(StatekitError), open_recording(folder) as recording:
        replay(Subject(recording), backend("numpy"))


def test_what_is_spooled_leaves_no_hidden_file_where_it_fails(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.add("a", np.zeros(3, np.float32))
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        spool.write(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("folder", ALL)
def test_it_is_described_in_the_documented_form(folder: Path) -> None:
    recording = open_recording(folder)
    described = to_json(recording)
    jsonschema.Draft202012Validator(FORM).validate(described)
    assert from_json(folder, json.loads(json.dumps(described))) == recording


@pytest.mark.parametrize("folder", ALL)
def test_its_states_are_encoded_as_they_were_recorded(folder: Path) -> None:
    with open_recording(folder) as recording:
        form, trajectory = system(recording.system), recording.trajectories[0]
        states = recording.states(trajectory)
        for step in range(recording.first, recording.last + 1):
            prefix, update = f"{recording.number(step)}/", max(step, recording.first + 1)
            native = {name[len(prefix) :]: t for name, t in states.items() if name.startswith(prefix)}
            again = form.encode(recording.state(step, trajectory, update), recording.phase(update))
            assert again.keys() == native.keys()
            for name, tensor in native.items():
                assert (again[name].shape, again[name].dtype) == (tensor.shape, tensor.dtype), name
                assert again[name].read().tobytes() == tensor.read().tobytes(), name
