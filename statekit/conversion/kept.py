"""What a target has no place for, leaf by leaf."""

from __future__ import annotations

from collections.abc import Mapping

from statekit.tensors.tree import Tree, leaf_names

EXTRA = "extra"


def by_leaf(dropped: Mapping[str, str], extra: Mapping[str, Tree]) -> dict[str, str]:
    """Returns what is dropped with each leaf of the extra by its own name, where a layout names what holds it.

    Args:
        dropped: Canonical name -> reason.
        extra: The state's.

    Example:
        >>> by_leaf({"extra/run": "no place"}, {"run": {"epoch": 2, "seed": 5}})
        {'extra/run/epoch': 'no place', 'extra/run/seed': 'no place'}
    """
    names = leaf_names({EXTRA: dict(extra)})
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split("/")
        for i in range(1, len(parts) + 1):
            if (above := "/".join(parts[:i])) in dropped:
                below.setdefault(above, []).append(name)
    return {leaf: reason for name, reason in dropped.items() for leaf in below.get(name, [name])}
