"""The fields of NamedTuples, whose names a pickle or a flattened tree doesn't keep.

`named_tuples.json` has them by class, and by what the parts of a state are like where a file has no class.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from statekit.tensors.tree import shipped_json


@cache
def _known() -> Any:
    return shipped_json(__package__, "named_tuples.json")


def fields_of(name: str) -> list[str]:
    """Returns the fields of a class, by its name without its module; none of one that isn't known.

    Example:
        >>> len(fields_of("ScaleByScheduleState"))
        1
    """
    return str(_known()["classes"].get(name, "")).split()


def numbered_fields(trees: int, alike: bool) -> list[str]:
    """Returns the fields of a state that begins with a count; none where nothing tells them.

    Args:
        trees: How many trees, with leaves in the same places, stand behind the count.
        alike: Whether their leaves have the same shapes.
    """
    return str(_known()["numbered"].get(str(trees), {}).get("alike" if alike else "apart", "")).split()
