"""The errors' texts: what is said of a wrong name, of many names, of many faults."""

from __future__ import annotations

import pytest

from statekit.conversion import registry
from statekit.errors import meant
from statekit.state.schema import load_schema, schema_names


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("clipping_treshold", ["clipping_threshold", "decay_rate"], "clipping_threshold"),
        ("hf_trainer", ["hf-trainer", "torch"], "hf-trainer"),
        ("Torch", ["torch", "torch-fqn"], "torch"),
        ("convrt", ["inspect", "convert"], "convert"),
    ],
)
def test_a_slip_is_told_from_a_name_nobody_knows(name: str, known: list[str], near: str) -> None:
    assert meant(name, known) == f"did you mean {near}?"
    assert meant("something else entirely", known) == ""
    assert meant(name, ()) == ""


def test_a_swap_of_two_letters_in_any_name_of_ours_is_told() -> None:
    schemas = [load_schema(name) for name in schema_names()]
    for known in (
        registry.container_names(),
        registry.layout_names(),
        *(list(schema.hyperparameters) for schema in schemas),
        *(list(schema.variants) for schema in schemas),
    ):
        for name in known:
            if len(name) > 4:
                assert meant(name[:-2] + name[-1] + name[-2], known).startswith("did you mean"), name
