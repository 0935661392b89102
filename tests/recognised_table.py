"""Writes docs/recognised.md: by what each optimizer is told, and what statekit does with its state.

python tests/recognised_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from statekit.converters.layouts.keras.muon import CLASS as MUON_OF_KERAS
from statekit.converters.layouts.keras.native import kinds as kinds_of_keras
from statekit.converters.layouts.keras.native import signature_of
from statekit.converters.layouts.keras.state import SCHEMAS as SCHEMAS_OF_KERAS
from statekit.converters.layouts.optax.kinds import NEIGHBOURS, STRANGERS, WRAPPERS
from statekit.converters.layouts.optax.recognition import ALIASES
from statekit.converters.layouts.pytorch.contents import Signature, signatures
from statekit.state.schema import load_schema

PAGE = Path(__file__).parents[1] / "docs" / "recognised.md"
HEAD = """# Which optimizers are recognised

An optimizer is recognised by its exact structure: every slot, no other slot, and the options of its groups.
A state that fits none is shown as it is, and never called by another's name. Where several fit, all are named, and
`--optimizer NAME` says which it is.

"""
TORCH = """## PyTorch

| optimizer | slots | statekit |
|---|---|---|
"""
OPTAX = """
## Optax

Optax keeps the fields of its states, and no names. One structure may be of several optimizers.

| optimizer | fields | statekit |
|---|---|---|
"""
KERAS = """
## Keras 3

| optimizer | slots | statekit |
|---|---|---|
"""
CARRIED = "is carried bit for bit under its own names; refused by this name where the target needs its rule"
LIKE_ADAM = "`count`, `mu`, `nu`"


def text() -> str:
    """Returns the page."""
    torch = (f"| {signature.name} | {_slots(signature)} | {_done(signature)} |" for signature in signatures())
    return "".join([HEAD, TORCH, _table(torch), OPTAX, _table(_of_optax()), KERAS, _table(_of_keras())])


def _table(rows: Iterator[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _of_optax() -> Iterator[str]:
    """Yields rows: what has a schema, what looks like Adam, what is carried, and what stands around or beside."""
    look_alikes = load_schema("adamw").data["look_alikes"]
    of_one = {"adafactor": "`v_row`, `v_col`", "muon": "`ns_coeffs`", "amsgrad": "`nu_max`"}
    for name, alias in ALIASES.items():
        done = (
            f"is read as {alias.schema}" if alias.schema else f"is refused by this name: {look_alikes[name]}"
        )
        yield f"| {name} | {of_one.get(name, LIKE_ADAM)} | {done} |"
    for fields, stranger in STRANGERS.items():
        yield f"| {stranger.name} | {_names(fields)} | {CARRIED} |"
    for fields, wrapper in WRAPPERS.items():
        done = (
            "changes the updates of what it stands around: refused by this name"
            if wrapper.changes
            else ("what it stands around is read")
        )
        yield f"| {wrapper.name}, a wrapper | {_names(fields)} | {done} |"
    for fields, name in NEIGHBOURS.items():
        yield f"| {name}, a link | {_names(fields)} | is named where it changes the updates |"


def _of_keras() -> Iterator[str]:
    for name, schema in SCHEMAS_OF_KERAS.items():
        yield f"| {name} | those of {schema} | is read as {schema} |"
    for name in kinds_of_keras():
        rounds = signature_of(name).slots or ()
        slots = [f"`{slot}`{'?' if option else ''}" for names, option in rounds for slot in names]
        by_schemas = "is read as muon, and as adamw where there is a velocity"
        yield f"| {name} | {', '.join(slots)} | {by_schemas if name == MUON_OF_KERAS else CARRIED} |"
    yield "| MultiOptimizer | those of each | is refused by this name |"


def _names(fields: frozenset[str]) -> str:
    return ", ".join(f"`{field}`" for field in sorted(fields))


def _slots(signature: Signature) -> str:
    names = [
        *(f"`{slot}`" for slot in signature.slots),
        *(f"`{slot}`?" for slot in signature.more if slot != "*"),
    ]
    return ", ".join([*names, *(["others"] if "*" in signature.more else [])]) or "none"


def _done(signature: Signature) -> str:
    return "; ".join(_sentences(signature))


def _sentences(signature: Signature) -> Iterator[str]:
    if signature.schema is None:
        yield "is shown, compared and refused by this name"
        return
    yield f"is read as {signature.schema}" + (f", variant {signature.variant}" if signature.variant else "")
    for name, (value, whose) in signature.assumed.items():
        yield f"assumes {name}={value} ({whose})"
    if signature.several:
        yield f"may be {', '.join(signature.several)}: asks across frameworks"
    if signature.beyond:
        yield f"no other system goes on with it: {signature.beyond}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
