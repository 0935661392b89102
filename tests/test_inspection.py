"""inspect: what a checkpoint holds, as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import Fake
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.inspection import Inspection, Request, inspect
from statekit.errors import StateError
from statekit.files.checkpoint import Finding
from statekit.state.train_state import Axis, Rule

HERE = Path("somewhere")
MATRIX = Rule((Axis.ROW, Axis.COLUMN), "assumed")
NETWORK = Fake(
    {
        "param/encoder/wi/kernel": np.ones((2, 3), np.float32),
        "param/encoder/wi/bias": np.ones(3, np.float32),
        "param/decoder/scale": np.ones(4, np.float32),
        "slot/encoder/wi/kernel/v_row": np.ones(2, np.float32),
        "slot/encoder/wi/kernel/v_col": np.ones(3, np.float32),
        "slot/encoder/wi/bias/v": np.ones(3, np.float32),
        "slot/decoder/scale/v": np.ones(4, np.float32),
        "iterator/position": np.array([7], np.int64),
    },
    rules={"encoder/wi/kernel": MATRIX},
)


def places(inspection: Inspection, word: str) -> list[str]:
    return [finding.place for finding in inspection.findings if word in finding.what]


def test_says_what_is_there_without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = NETWORK.but().install(monkeypatch)
    inspection = inspect(HERE)
    assert [p.tensor.name for p in inspection.parameters] == [
        "encoder/wi/kernel",
        "encoder/wi/bias",
        "decoder/scale",
    ]
    assert [[s.name for s in p.slots] for p in inspection.parameters] == [["v_row", "v_col"], ["v"], ["v"]]
    assert [p.rule for p in inspection.parameters] == [MATRIX, None, None]
    assert [t.name for t in inspection.others] == ["iterator/position"]
    assert inspection.totals() == {
        "parameters": 3,
        "elements": 13,
        "parameter_bytes": 52,
        "slots": 4,
        "slot_bytes": 48,
        "others": 1,
        "other_bytes": 8,
        "bytes_by_dtype": {"float32": 100, "int64": 8},
    }
    assert inspection.findings == ()
    assert fake.reads == []


def test_the_filter_takes_parameters_with_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORK.install(monkeypatch)
    inspection = inspect(HERE, Request(pattern="*/kernel"))
    assert [t.name for t in inspection.tensors] == ["encoder/wi/kernel", "v_row", "v_col"]


def test_statistics_read_each_value_once_and_only_what_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = NETWORK.but().install(monkeypatch)
    steps: list[tuple[int, int]] = []
    inspection = inspect(
        HERE, Request(pattern="encoder/*", stats=True), lambda done, all_: steps.append((done, all_))
    )
    assert sorted(fake.reads) == sorted(
        name for name in fake.arrays if name.partition("/")[2].startswith("encoder/")
    )
    assert inspection.parameters[0].tensor.stats is not None
    assert inspection.parameters[0].tensor.stats.norm == pytest.approx(6**0.5)
    assert steps[-1] == (68, 68)


def test_names_what_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        **NETWORK.arrays,
        "param/encoder/wi/bias": np.array([1, np.nan, np.inf], np.float32),
        "slot/encoder/wi/bias/v": np.zeros(3, np.float64),
        "param/new": np.zeros(1, np.float32),
    }
    fake = NETWORK.but(
        arrays=arrays, frozen=frozenset({"decoder/scale"}), findings=(Finding("is late", "x"),)
    )
    fake.install(monkeypatch)
    inspection = inspect(HERE, Request(stats=True))
    assert places(inspection, "is late") == ["x"]
    assert places(inspection, "no parameter group") == ["decoder/scale"]
    assert places(inspection, "has no slots after 3 updates") == ["new"]
    assert places(inspection, "float64, usually float32") == ["encoder/wi/bias"]
    assert places(inspection, "all zeros after 3 updates") == ["encoder/wi/bias"]
    assert places(inspection, "1 NaN and 1 infinite") == ["encoder/wi/bias"]


def test_before_the_first_update_nothing_of_this_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {
        "param/a": np.ones(1, np.float32),
        "param/b": np.ones(1, np.float32),
        "slot/a/v": np.zeros(1, np.float32),
    }
    Fake(arrays, updates=0).install(monkeypatch)
    assert inspect(HERE, Request(stats=True)).findings == ()


@pytest.mark.parametrize("fault", ["unknown", "broken"])
def test_without_a_layout_tensors_keep_their_own_names(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    NETWORK.but(**{fault: True}).install(monkeypatch)
    inspection = inspect(HERE)
    assert (inspection.layout, inspection.optimizer, inspection.parameters) == (None, None, ())
    assert [t.name for t in inspection.others] == list(NETWORK.arrays)
    assert "listed by their own names" in inspection.findings[0].what


@pytest.mark.parametrize("options", [{"layout": "fake"}, {"hparams": {"beta1": 0.9}}])
def test_what_the_user_said_must_fit(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    NETWORK.but(broken=True).install(monkeypatch)
    with pytest.raises(StateError):
        inspect(CheckpointRef(HERE, **options))


def test_json_is_plain_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORK.install(monkeypatch)
    data = json.loads(
        json.dumps(
            inspect(CheckpointRef(HERE, container="fake"), Request(stats=True)).to_json(), allow_nan=False
        )
    )
    assert list(data) == [
        "path", "container", "layout", "step", "meta", "optimizer", "parameters", "others", "extra", "run",
        "totals", "assumptions", "findings", "integrity", "contents",
    ]  # fmt: skip
    kernel = data["parameters"][0]
    assert kernel["rule"] == {"axes": ["ROW", "COLUMN"], "known_from": "assumed"}
    assert kernel["slots"]["v_row"]["shape"] == [2]
    assert set(kernel["stats"]) == {"norm", "rms", "min", "max", "zeros", "nan", "inf", "magnitudes"}
    assert data["container"] == {"name": "fake", "title": NETWORK.title, "because": "it was named"}
    group = data["optimizer"]["groups"][0]
    assert group["known_from"] == {"decay_rate": "assumed"}
    assert "learning_rate" in group["unknown"]
    assert "decay_rate" not in group["unknown"]
