"""No function of the package is too complex to be understood at once."""

from __future__ import annotations

import pytest
from complexity import (
    ALLOWED,
    LIMIT,
    Figures,
    above,
    functions,
    outdated,
    read_allowed,
    shrunk,
    too_complex,
    write_allowed,
)

KEY = ("statekit/room.py", "Class.method")


@pytest.fixture(scope="module")
def measured() -> Figures:
    return above(LIMIT)


@pytest.fixture(scope="module")
def allowed() -> Figures:
    return read_allowed(ALLOWED.read_text(encoding="utf-8"))


def test_no_function_is_too_complex(allowed: Figures, measured: Figures) -> None:
    assert too_complex(allowed, measured) == []


def test_the_list_of_functions_that_were_too_complex_only_shrinks(
    allowed: Figures, measured: Figures
) -> None:
    assert outdated(allowed, measured) == []


def test_every_branch_counts() -> None:
    lines = {
        "if a: pass": 1,
        "for x in a: pass": 1,
        "while a: pass": 1,
        "with a: pass": 1,
        "assert a": 1,
        "try: pass\n except A: pass\n except B: pass": 2,
        "match a:\n  case 1: pass\n  case _: pass": 2,
        "a if b else c": 1,
        "[x for x in a if x if a]": 3,
        "{x: y for x in a for y in x}": 2,
        "a and b or c": 2,
        "lambda: a or b": 1,
    }
    text = "".join(f"def f{number}():\n {line}\n" for number, line in enumerate(lines))
    assert functions(text) == {f"f{number}": 1 + count for number, count in enumerate(lines.values())}


def test_functions_inside_of_others_count_by_themselves() -> None:
    text = "class A:\n def f(self):\n  def g():\n   return 1 if self else 2\n  return g\n"
    assert functions(text) == {"A.f": 1, "A.f.g": 2}


def test_a_function_above_the_limit_or_above_its_figure_is_noticed() -> None:
    assert too_complex({}, {KEY: 16}) == [
        "statekit/room.py: Class.method has a complexity of 16; at most 15 is allowed. Split it into named steps."
    ]
    assert len(too_complex({KEY: 20}, {KEY: 21})) == 1
    assert too_complex({KEY: 20}, {KEY: 20}) == []


def test_a_list_that_says_more_than_there_is_is_noticed() -> None:
    assert len(outdated({KEY: 20}, {KEY: 19})) == len(outdated({KEY: 20}, {})) == 1


def test_shrinking_takes_lower_figures_and_nothing_else() -> None:
    gone, new = ("statekit/gone.py", "f"), ("statekit/new.py", "f")
    assert shrunk({KEY: 20, gone: 30}, {KEY: 19, new: 40}) == {KEY: 19}
    assert shrunk({KEY: 20}, {KEY: 25}) == {KEY: 20}


def test_shrinking_settles_a_merge() -> None:
    file, name = KEY
    merged = f"<<<<<<< ours\n 30 {file} {name}\n=======\n 20 {file} {name}\n>>>>>>> theirs\n"
    assert read_allowed(merged) == read_allowed(write_allowed({KEY: 20})) == {KEY: 20}
