"""No function of the package is too complex to be understood at once."""

from __future__ import annotations

from complexity import LIMIT, above, functions


def test_no_function_is_too_complex_and_one_above_the_limit_is_noticed() -> None:
    figures = above(1)
    assert ("statekit/conversion/convert.py", "convert") in figures
    assert {place: figure for place, figure in figures.items() if figure > LIMIT} == {}, (
        "split these into named steps"
    )


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
