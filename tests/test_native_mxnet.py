"""Optimizers of MXNet that no schema describes: MXNet's own files come back to the bit, and are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import statekit
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.open_state import open_state
from statekit.errors import StateError, StatekitError

CASES = Path(__file__).parent / "cases" / "foreign"
CASE = CASES / "mxnet_nadam"
"""Nadam of MXNet 2.0.0b1 after four updates of two dense layers; MXNet goes on from what is written, to the bit."""
BERT = CASES / "gluonnlp_bertadam"
"""BERTAdam of GluonNLP 0.10.0 in MXNet 1.9.1 after three updates, in files named as its scripts name them."""


@pytest.mark.parametrize("by_way_of", [None, "statekit"])
def test_mxnet_gets_its_own_files_back(by_way_of: str | None, tmp_path: Path) -> None:
    source = CASE
    if by_way_of is not None:
        source = tmp_path / "state"
        statekit.convert(CASE, source, to=by_way_of)
    made = statekit.convert(source, tmp_path / "made", to="mxnet", layout="mxnet-native")
    assert "unknown: the rule of Nadam" in made.plan.headline
    for name in ("net.params", "net.states"):
        assert (tmp_path / "made" / name).read_bytes() == (CASE / name).read_bytes()


def test_its_class_its_slots_and_its_count_are_named() -> None:
    with open_state(CASE) as opened:
        assert opened.state.optimizer.kinds == (("mxnet_native", "Nadam"),)
        assert {*opened.slots["0/weight"]} == {"m", "v"} and opened.counts.done == 4


def test_another_system_refuses_it_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(StatekitError, match="state of Nadam"):
        statekit.convert(CASE, tmp_path / "made.pt")
    statekit.convert(CASE, tmp_path / "made.safetensors", params_only=True)


def test_a_class_of_another_package_and_names_of_gluonnlp_come_back(tmp_path: Path) -> None:
    with open_state(BERT) as opened:
        assert opened.state.optimizer.kinds == (("mxnet_native", "BERTAdam"),) and opened.counts.done == 3
        assert {name for named in opened.slots.values() for name in named} == {"m", "v"}
    statekit.convert(BERT, tmp_path / "made", to="mxnet")
    for file in BERT.iterdir():
        assert (tmp_path / "made" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("odd", [b"beta1", 7, 1.5, None, ()])
def test_attributes_that_have_no_names_are_refused(odd: Any) -> None:
    """A pickle's dict may have any keys. Seen red: TypeError, startswith first arg must be bytes."""
    with registry.container("mxnet").open(CASE) as checkpoint:
        tree: Any = checkpoint.tree
        optimizer = tree["optimizer"]
        named = replace(optimizer, state={**optimizer.state, odd: 0.5})
        changed = replace(checkpoint, tree={**tree, "optimizer": named})
        with pytest.raises(StateError, match="no attributes by name"):
            registry.decoded(registry.layout("mxnet-native"), changed, NO_HINTS)
