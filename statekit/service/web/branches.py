"""One level of a checkpoint's tree of modules, from what `inspect` gave as plain data: asked for when it is opened."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from statekit.errors import NotFoundError
from statekit.pages.module_tree import Module, module_tree

MOST_ROWS = 200
"""Rows of one level that are shown at once."""
Parameter: TypeAlias = Mapping[str, Any]
"""A parameter as `ParameterSummary.to_json` has it."""
Tree: TypeAlias = Module[tuple[int, Parameter]]
"""Parameters with their places among all."""


@dataclass(frozen=True)
class BranchRow:
    """A module with all it holds, or one parameter.

    Attributes:
        label: The last parts of its name.
        path: All parts down to it, joined by `/`.
        count: How many parameters are in and below a module; 1 of a parameter.
        index: Of a parameter, its place among all; None of a module.
        parameter: Of a parameter, what is known of it.
        size: Bytes of its parameters and of their slots.
        norm: The Euclidean norm of its parameters together, where all of them were measured.
    """

    label: str
    path: str
    count: int
    index: int | None
    parameter: Parameter | None
    size: int
    norm: float | None


@dataclass(frozen=True)
class Branch:
    """A part of one level.

    Attributes:
        at: The module, its parts joined by `/`; "" at the top.
        rows: What stands in it, parameters first.
        further: How many rows stand before those that are left; None if none is left.
        left: How many are left.
    """

    at: str
    rows: tuple[BranchRow, ...]
    further: int | None
    left: int


def tree_of(parameters: Sequence[Parameter]) -> Tree:
    """Arranges parameters by their paths."""
    return module_tree((parameter["path"], (index, parameter)) for index, parameter in enumerate(parameters))


def branch(tree: Tree, at: str = "", after: int = 0, limit: int = MOST_ROWS) -> Branch:
    """Returns what stands directly in a module; a chain of modules of one module is one row.

    Args:
        tree: All parameters.
        at: The module, its parts joined by `/`; "" for the top.
        after: How many rows to leave out.
        limit: How many to return at most.

    Raises:
        NotFoundError: There is no such module.

    Example:
        >>> tree = tree_of([{"path": path, "bytes": 4, "slots": {}} for path in ("a.b.x", "a.b.y", "c")])
        >>> [(row.label, row.path, row.count, row.size) for row in branch(tree).rows]
        [('c', 'c', 1, 4), ('a/b', 'a/b', 2, 8)]
        >>> [row.label for row in branch(tree, "a/b").rows]
        ['x', 'y']
    """
    module = tree
    for part in at.split("/") if at else ():
        if part not in module.children:
            raise NotFoundError("There is no such module.", place="at", found=at[:500])
        module = module.children[part]
    count = len(module.leaves) + len(module.children)
    rows = tuple(_row(at, *entry) for entry in islice(module.entries(), after, after + limit))
    left = max(count - after - len(rows), 0)
    return Branch(at, rows, after + len(rows) if left else None, left)


def _row(at: str, label: str, item: tuple[int, Parameter] | None, module: Tree | None) -> BranchRow:
    members = [item] if item is not None else list(module.everything()) if module is not None else []
    parameters = [member for _, member in members]
    size = sum(
        member["bytes"] + sum(slot["bytes"] for slot in member["slots"].values()) for member in parameters
    )
    norms = [member["stats"]["norm"] for member in parameters if member.get("stats")]
    norm = math.hypot(*norms) if len(norms) == len(parameters) else None
    path = f"{at}/{label}" if at else label
    index, parameter = item if item is not None else (None, None)
    return BranchRow(label, path, len(parameters), index, parameter, size, norm)
