"""Writes docs/conversions.md: how exactly a run of each variant goes on in each layout (`make tables`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from statekit.cli.formats_command import layouts, rows
from statekit.conversion.matrix import Cell, cells

TARGET = Path(__file__).parents[1] / "docs" / "conversions.md"
TEXT = """# Conversions

A row is the variant that a run followed, a column the layout that it is written in. Slots and parameters are the same
bits everywhere; what differs is the rule that moves them from then on:

- `=` the target follows the variant's own rule;
- `~` another implementation's, equal in real arithmetic: the run goes on, but for rounding;
- `s` (`statistics`) the slots mean the same, yet the target makes another update of them;
- `e` (`estimate`) the slots, too, evolve otherwise from then on.

`statekit convert` does the first two. It refuses the others, names every difference and the layouts that go on, and
does them with `--require statistics` or `--require estimate`. Hyperparameters are taken as each variant has them unless
told otherwise; those of a checkpoint may make a difference vanish (no weight decay, no clipping) or appear, and its
shapes may: where one side factors a matrix that the other keeps whole, the averages are made and the plan says
`statistics`. What hyperparameters make up for is listed below the table, and set in the target where it has a place for
it.

The table is made from schemas/ (`statekit formats --matrix`, `make tables`); tests/test_rule_change.py holds every pair
of rules against each other in real arithmetic, tests/test_conversions.py converts a sample of every format into every
layout.
"""


def page() -> str:
    """Returns the whole page."""
    parts = [TEXT]
    for schema, some in groupby(cells(), key=lambda cell: cell.schema):
        parts.append(_section(schema, list(some)))
    return "\n".join(parts)


def _section(schema: str, some: list[Cell]) -> str:
    names = layouts(some)
    lines = [f"## {schema}", "", f"| variant | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| {variant} | {' | '.join(marks)} |" for variant, *marks in rows(some)]
    for title, said in (("Differences", _reasons(some)), ("Made up for", _made_up(some))):
        texts = list(dict.fromkeys(said))
        lines += ["", f"{title}:", "", *texts] if texts else []
    return "\n".join([*lines, ""])


def _reasons(some: list[Cell]) -> Iterator[str]:
    for cell in some:
        yield from (f"- {_way(cell)}: {reason}" for reason in cell.reasons)


def _made_up(some: list[Cell]) -> Iterator[str]:
    for cell in some:
        yield from (
            f"- {_way(cell)}: {one}" for one in (cell.rule_change.compensated_by if cell.rule_change else ())
        )


def _way(cell: Cell) -> str:
    return f"{cell.variant} to {cell.rule_change.target if cell.rule_change else cell.variant}"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
