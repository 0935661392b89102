"""Parameters as a tree of modules, cut into rows for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from statekit.conversion.inspection import ParameterSummary


@dataclass
class Module:
    """A module: its parameters with their last names, and its submodules, in the checkpoint's order."""

    children: dict[str, Module] = field(default_factory=dict)
    parameters: list[tuple[str, ParameterSummary]] = field(default_factory=list)

    def everything(self) -> Iterator[ParameterSummary]:
        """Yields every parameter in and below the module."""
        yield from (parameter for _, parameter in self.parameters)
        for child in self.children.values():
            yield from child.everything()


@dataclass(frozen=True)
class Row:
    """One line: a module with all it holds or, if `module` is false, one parameter."""

    depth: int
    label: str
    parameters: tuple[ParameterSummary, ...]
    module: bool


def module_tree(parameters: Iterable[ParameterSummary]) -> Module:
    """Arranges parameters by the parts of their paths; `.` separates too, as in PyTorch's names."""
    root = Module()
    for parameter in parameters:
        *parts, leaf = re.split(r"[/.]", parameter.tensor.name)
        node = root
        for part in parts:
            node = node.children.setdefault(part, Module())
        node.parameters.append((leaf, parameter))
    return root


def rows(root: Module, limit: int) -> tuple[list[Row], bool]:
    """Returns the rows to print, and whether parameters were left out to stay below `limit` rows.

    All parameters are listed if they fit; otherwise only modules, as deep as they fit, at least one level.
    """
    full = list(_rows(root, 0))
    if len(full) <= limit:
        return full, False
    modules = [row for row in full if row.module]
    deepest = max((row.depth for row in modules), default=0)
    fitting = (d for d in range(deepest, 0, -1) if sum(row.depth <= d for row in modules) <= limit)
    depth = next(fitting, 0)
    return [row for row in modules if row.depth <= depth], True


def _rows(node: Module, depth: int) -> Iterator[Row]:
    for leaf, parameter in node.parameters:
        yield Row(depth, leaf, (parameter,), module=False)
    for name, child in node.children.items():
        label, inner = _unchained(name, child)
        if not inner.children and len(inner.parameters) == 1:
            leaf, parameter = inner.parameters[0]
            yield Row(depth, f"{label}/{leaf}", (parameter,), module=False)
        else:
            yield Row(depth, label, tuple(inner.everything()), module=True)
            yield from _rows(inner, depth + 1)


def _unchained(label: str, node: Module) -> tuple[str, Module]:
    """Follows modules that hold nothing but one module, so that the chain takes one row."""
    while len(node.children) == 1 and not node.parameters:
        name, node = next(iter(node.children.items()))
        label = f"{label}/{name}"
    return label, node
