"""How complex every function of the package is, and the list of those that were too complex when the limit came.

    python tests/complexity.py [LIMIT]     # the functions above the limit, worst first
    python tests/complexity.py --shrink    # write tests/complexity.txt anew: lower figures, fewer functions, never more

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
ALLOWED = Path(__file__).with_suffix(".txt")
LIMIT = 15

HEADING = """\
# Functions above the limit, which may only get simpler: figure, file, function.
# `python tests/complexity.py --shrink` takes down lower figures. It also settles this file after a merge.
"""
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


def read_allowed(text: str) -> Figures:
    """Returns the list in a text; of a function that stands there twice, as after a merge, the lowest figure."""
    allowed: dict[tuple[str, str], int] = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdigit():
            key = (words[1], words[2])
            allowed[key] = min(int(words[0]), allowed.get(key, int(words[0])))
    return allowed


def write_allowed(figures: Figures) -> str:
    """Returns the text of a list, by file and function, so that two people's changes lie on different lines."""
    return HEADING + "".join(
        f"{figure:3d} {file} {name}\n" for (file, name), figure in sorted(figures.items())
    )


def shrunk(allowed: Figures, measured: Figures) -> Figures:
    """Returns a list with the lower of both figures, without the functions that are within the limit or gone."""
    return {key: min(figure, measured[key]) for key, figure in allowed.items() if key in measured}


def too_complex(allowed: Figures, measured: Figures) -> list[str]:
    """Returns what is wrong with the package: functions above the limit and above what the list allows them."""
    return [
        f"{file}: {name} has a complexity of {figure}; at most {allowed.get((file, name), LIMIT)} is allowed. "
        "Split it into named steps."
        for (file, name), figure in measured.items()
        if figure > allowed.get((file, name), LIMIT)
    ]


def outdated(allowed: Figures, measured: Figures) -> list[str]:
    """Returns what is wrong with the list: functions that are simpler than it says."""
    return [
        f"{file}: {name} is listed with {figure} and has {measured.get((file, name), f'at most {LIMIT}')}. "
        "Run: python tests/complexity.py --shrink"
        for (file, name), figure in allowed.items()
        if figure > measured.get((file, name), 0)
    ]


def main() -> None:
    """Prints the functions above a limit, or writes the list anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("limit", nargs="?", type=int, default=LIMIT)
    parser.add_argument(
        "--shrink", action="store_true", help=f"write {ALLOWED.name} anew, which only gets shorter"
    )
    options = parser.parse_args()
    if options.shrink:
        allowed = shrunk(read_allowed(ALLOWED.read_text(encoding="utf-8")), above(LIMIT))
        ALLOWED.write_text(write_allowed(allowed), encoding="utf-8")
        return
    for (file, name), figure in above(options.limit).items():
        print(f"{figure:4d}  {file}  {name}")


if __name__ == "__main__":
    main()
