"""Writes docs/recognised.md: by what each optimizer of PyTorch is told, and what statekit does with its state.

python tests/recognised_table.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from statekit.converters.layouts.pytorch.contents import Signature, signatures

PAGE = Path(__file__).parents[1] / "docs" / "recognised.md"
HEAD = """# Which optimizers of PyTorch are recognised

An optimizer is recognised by its exact structure: every slot, no other slot, and the options of its groups.
A state that fits none is shown as it is, and never called by another's name. Where several fit, all are named, and
`--optimizer NAME` says which it is.

| optimizer | slots | statekit |
|---|---|---|
"""


def text() -> str:
    """Returns the page."""
    rows = (f"| {signature.name} | {_slots(signature)} | {_done(signature)} |" for signature in signatures())
    return HEAD + "\n".join(rows) + "\n"


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
