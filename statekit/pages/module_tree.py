"""Things with paths, as parameters have them, as a tree of modules; and that tree cut into rows for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
DEEPEST = 50
"""Levels of modules; what is named below them keeps the rest of its path as its last name."""


@dataclass
class Module(Generic[T]):
    """A module: what stands in it by its last name, and its submodules, in the given order."""

    children: dict[str, Module[T]] = field(default_factory=dict)
    leaves: list[tuple[str, T]] = field(default_factory=list)

    def everything(self) -> Iterator[T]:
        """Yields all that stands in and below the module."""
        yield from (item for _, item in self.leaves)
        for child in self.children.values():
            yield from child.everything()

    def entries(self) -> Iterator[tuple[str, T | None, Module[T] | None]]:
        """Yields what takes a line in it: a label with a thing, or with a module.

        A chain of modules that hold nothing but one takes one line, and a module with one thing is that thing.
        """
        yield from ((leaf, item, None) for leaf, item in self.leaves)
        for name, child in self.children.items():
            label, inner = _unchained(name, child)
            if not inner.children and len(inner.leaves) == 1:
                leaf, item = inner.leaves[0]
                yield f"{label}/{leaf}", item, None
            else:
                yield label, None, inner


@dataclass(frozen=True)
class Row(Generic[T]):
    """One line: a module with all it holds or, if `module` is false, one thing."""

    depth: int
    label: str
    items: tuple[T, ...]
    module: bool


def module_tree(items: Iterable[tuple[str, T]]) -> Module[T]:
    """Arranges things by the parts of their paths; `.` separates too, as in PyTorch's names."""
    root = Module[T]()
    for path, item in items:
        *parts, leaf = re.split(r"[/.]", path, maxsplit=DEEPEST)
        node = root
        for part in parts:
            node = node.children.setdefault(part, Module())
        node.leaves.append((leaf, item))
    return root


def rows(root: Module[T], limit: int) -> tuple[list[Row[T]], bool]:
    """Returns the rows to print, and whether things were left out to stay below `limit` rows.

    All are listed if they fit; otherwise only modules, as deep as they fit, at least one level.
    """
    full = list(_rows(root, 0))
    if len(full) <= limit:
        return full, False
    modules = [row for row in full if row.module]
    deepest = max((row.depth for row in modules), default=0)
    fitting = (d for d in range(deepest, 0, -1) if sum(row.depth <= d for row in modules) <= limit)
    depth = next(fitting, 0)
    return [row for row in modules if row.depth <= depth], True


def _rows(node: Module[T], depth: int) -> Iterator[Row[T]]:
    for label, item, module in node.entries():
        if module is not None:
            yield Row(depth, label, tuple(module.everything()), module=True)
            yield from _rows(module, depth + 1)
        elif item is not None:
            yield Row(depth, label, (item,), module=False)


def _unchained(label: str, node: Module[T]) -> tuple[str, Module[T]]:
    """Joins a chain of modules that each hold one module alone, so that it takes one row."""
    while len(node.children) == 1 and not node.leaves:
        name, node = next(iter(node.children.items()))
        label = f"{label}/{name}"
    return label, node
