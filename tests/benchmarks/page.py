"""The tables of docs/performance.md that benchmarks write: each between two marks with its name."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def fill(name: str, table: str) -> None:
    """Writes a table in Markdown between the marks of its name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    if end not in rest:
        raise SystemExit(f"{PAGE} has no marks {begin.strip()} and {end.strip()}")
    PAGE.write_text(f"{before}{begin}\n{table.strip()}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
