"""The complexity of every function of the package.

    python tests/complexity.py [LIMIT]     # the functions above the limit, worst first

A function's complexity is 1, plus one for each if, for, while, except, with, assert, case, conditional expression,
comprehension, `if` in a comprehension, `and` and `or`. A function inside of another is counted by itself.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from import_graph import HOMES

ROOT = Path(__file__).parents[1]
LIMIT = 15

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)
BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.With, ast.AsyncWith, ast.Assert, ast.match_case,
    ast.IfExp, ast.comprehension,
)  # fmt: skip

Figures = Mapping[tuple[str, str], int]
"""The complexity of functions, each by its file and its name within it."""


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the complexity of one function, without the functions and classes inside it."""
    total, nodes = 1, list[ast.AST](function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, SCOPES):
            continue
        total += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            total += len(node.ifs)
        if isinstance(node, ast.BoolOp):
            total += len(node.values) - 1
        nodes.extend(ast.iter_child_nodes(node))
    return total


def functions(text: str) -> dict[str, int]:
    """Returns the complexity of every function of a module by its qualified name, the highest where two share one."""
    figures: dict[str, int] = {}
    for name, function in _named(ast.parse(text), ""):
        figures[name] = max(complexity(function), figures.get(name, 0))
    return figures


def _named(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield from _named(child, scope)
            continue
        name = f"{scope}{child.name}"
        if isinstance(child, FUNCTIONS):
            yield name, child
        yield from _named(child, f"{name}.")


def above(limit: int) -> Figures:
    """Returns the functions of the package above a limit, worst first."""
    figures = {
        (f"{path.relative_to(ROOT)}", name): figure
        for home in HOMES
        for path in sorted((ROOT / home).rglob("*.py"))
        if not any(folder.is_symlink() for folder in path.parents)
        for name, figure in functions(path.read_text(encoding="utf-8")).items()
        if figure > limit
    }
    return dict(sorted(figures.items(), key=lambda item: (-item[1], item[0])))


def main() -> None:
    """Prints the functions above a limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("limit", nargs="?", type=int, default=LIMIT)
    for (file, name), figure in above(parser.parse_args().limit).items():
        print(f"{figure:4d}  {file}  {name}")


if __name__ == "__main__":
    main()
