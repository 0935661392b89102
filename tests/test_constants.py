"""The constants of variants: their types say what the schemas say, and no step meets others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from statekit.errors import StateError
from statekit.optim.run import STEPPED
from statekit.state import constants
from statekit.state.constants import CONSTANTS, constant_faults, variant_constants
from statekit.state.schema import load_schema, schema_names

KINDS = {"boolean": bool, "number": float}


def _values(kind: Any) -> Iterator[Any]:
    """Yields the texts and the types that a constant may be."""
    if isinstance(kind, type):
        yield kind
    elif get_origin(kind) is Literal:
        yield from get_args(kind)
    else:
        for one in get_args(kind):
            yield from _values(one)


def test_every_schema_has_a_type() -> None:
    assert sorted(CONSTANTS) == schema_names() == sorted(STEPPED)


@pytest.mark.parametrize("schema", CONSTANTS)
def test_a_type_allows_what_its_schema_does(schema: str) -> None:
    types, data = get_type_hints(CONSTANTS[schema]), load_schema(schema).data
    assert list(types) == list(data["differences"])
    for name, spec in data["differences"].items():
        allowed = {*spec.get("values", ()), *([KINDS[spec["type"]]] if "type" in spec else [])}
        assert set(_values(types[name])) - {type(None)} == allowed, name


@pytest.mark.parametrize("schema", CONSTANTS)
def test_a_step_meets_an_unknown_constant_only_where_its_type_says_so(schema: str) -> None:
    types = get_type_hints(CONSTANTS[schema])
    optional = {name for name, kind in types.items() if type(None) in _values(kind)}
    assert optional == {
        name
        for variant in load_schema(schema).stepped
        for name, value in variant_constants(schema, variant).items()
        if value is None
    }


def test_all_constants_that_differ_from_their_type_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_schema("lamb").variant("keras")
    wrong = {**entry["constants"], "norms": "l2", "step_base": "sideways", "step_product": None}
    del wrong["moment_update"]
    monkeypatch.setitem(entry, "constants", wrong)
    monkeypatch.setattr(constants, "_checked", constants._checked.__wrapped__)
    with pytest.raises(StateError, match=r"steps are written for(.|\n)*at: keras") as caught:
        variant_constants("lamb", "keras")
    for fault in (
        "is missing @ moment_update",
        "isn't a constant @ norms",
        "is 'sideways' @ step_base",
        "is None @ step_product",
    ):
        assert fault in str(caught.value)


def test_what_a_schema_says_is_unknown_may_be_none() -> None:
    entry = load_schema("lamb").variant("apex")
    assert entry["constants"]["lr_precision"] is None
    assert not list(constant_faults("lamb", entry["constants"], entry["unknown"]))
    assert ("is None", "lr_precision") in list(constant_faults("lamb", entry["constants"], {}))
