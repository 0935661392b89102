"""Every recording of every system: described in the documented form, and written as it was read, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from goldens import GOLDEN
from statekit.errors import NotFoundError
from statekit.verify.recording import from_json, open_recording, system, to_json
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
