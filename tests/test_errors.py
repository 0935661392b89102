"""The errors' texts: what is said of a wrong name, of many names, of many faults."""

from __future__ import annotations

import pytest

from statekit.conversion import registry
from statekit.errors import Faults, StateError, StatekitError, meant
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


def test_many_places_of_one_fault_are_one_line_and_others_stay_apart() -> None:
    faults = Faults(("has no slots", f"layers_{i}") for i in range(52))
    faults.add("has shape (2,), expected (3,)", "encoder/b")
    with pytest.raises(StateError) as caught:
        faults.check(StateError, "The slots don't fit", place="run/checkpoint_7", remedy="look")
    assert str(caught.value).splitlines() == [
        "The slots don't fit: 53 faults.",
        "  at: run/checkpoint_7",
        "  found:",
        "    has no slots @ 52 places: layers_0, layers_1, layers_2 and 49 more",
        "    has shape (2,), expected (3,) @ encoder/b",
        "  do: look",
    ]


def test_faults_that_all_differ_are_cut_and_the_cut_is_said() -> None:
    lines = str(Faults((f"is {i}", "x") for i in range(45)).error(StatekitError, "Wrong.").found).splitlines()
    assert len(lines) == 1 + 40 + 1
    assert lines[-1] == "    and 5 more lines like these"


def test_nothing_is_raised_where_nothing_is_wrong() -> None:
    Faults().check(StateError, "The slots don't fit")
    with pytest.raises(StateError, match=r"^The slots don't fit: 1 fault\."):
        Faults([("has no slots", "w")]).check(StateError, "The slots don't fit")
