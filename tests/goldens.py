"""Where the recordings of the original systems are: all of them if the shared set is there, else the compact copy."""

from __future__ import annotations

from pathlib import Path

COMPACT = Path(__file__).parent / "golden"
_SHARED = Path(__file__).parents[2] / "shared" / "golden"
GOLDEN = _SHARED if _SHARED.is_dir() else COMPACT


def bundles(system: str) -> list[Path]:
    """Returns the bundles of one system, sorted."""
    return sorted(meta.parent for meta in (GOLDEN / system).glob("*/meta.json"))
