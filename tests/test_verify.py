"""`statekit verify`: a valid conversion passes, a wrong one is refuted with the tensor that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from goldens import COMPACT
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.errors import FormatError
from statekit.verify.certificate import Certificate, read_certificate
from statekit.verify.repetition import repeated
from statekit.verify.verification import verify

T5X = COMPACT / "t5x/momentum_f32/checkpoint/checkpoint_4"
SAID = Hints({"beta1": 0.9})
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas/statekit-certificate.schema.json").read_text())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "torch-ckpt"
    convert(plan(T5X, path, hints=SAID))
    return path


@pytest.fixture(scope="module")
def made(target: Path) -> Certificate:
    return verify(T5X, target, steps=2)


@pytest.mark.torch
def test_a_conversion_to_torch_is_the_same_run(made: Certificate) -> None:
    assert made.passed, made.data["verdict"]["because"]
    assert made.verdict == "within the rounding bound"
    assert made.data["replay"]["target"].startswith("statekit.torch ")
    assert made.data["map"]["round_trip"] == {"done": True, "tensors": 22, "differ": []}
    assert made.data["map"]["bijection"]["faults"] == []


@pytest.mark.torch
def test_every_fault_put_into_the_state_is_seen(made: Certificate) -> None:
    assert {one["name"]: one["detected"] for one in made.data["controls"]} == dict.fromkeys(
        (
            "cold start", "permuted slots", "wrong step", "row and column exchanged", "epsilon1 moved",
            "epsilon2 moved", "moments rounded to bfloat16", "second moment dropped", "momentum zeroed",
        ),
        True,
    )  # fmt: skip
    assert made.data["verdict"]["proves_nothing_about"] == []


@pytest.mark.torch
def test_a_certificate_is_what_its_schema_says(made: Certificate) -> None:
    jsonschema.validate(json.loads(made.text()), SCHEMA)


@pytest.mark.torch
def test_a_certificate_is_repeated(made: Certificate, tmp_path: Path) -> None:
    made.save(tmp_path / "cert.json")
    assert read_certificate(tmp_path / "cert.json").digest == made.digest
    again = repeated(tmp_path / "cert.json")
    assert again.same, again.differs
    assert again.again.digest == made.digest


@pytest.mark.torch
def test_a_changed_certificate_is_noticed(made: Certificate, tmp_path: Path) -> None:
    text = made.text().replace('"passed": true', '"passed": false')
    (tmp_path / "cert.json").write_text(text)
    with pytest.raises(FormatError, match="changed"):
        read_certificate(tmp_path / "cert.json")


def test_another_rule_is_named_and_not_passed_over(tmp_path: Path) -> None:
    target = tmp_path / "hf.pt"
    convert(plan(T5X, target, hints=SAID, layout="torch-optim", require=Exactness.STATISTICS))
    made = verify(T5X, target, steps=0)
    assert (made.verdict, made.passed) == ("semantic difference", False)
    assert verify(T5X, target, steps=0, require=Exactness.STATISTICS).passed
    assert made.data["verdict"]["exactness"] == "statistics"
