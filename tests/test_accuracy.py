"""docs/accuracy.md has a line for every rule in every backend, and a sample of them still holds."""

from __future__ import annotations

import re

import accuracy_table
import pytest
from accuracy_table import Line, Rule

from goldens import COMPACT, GOLDEN
from replaying import BACKENDS, marks

PAGE = accuracy_table.TARGET.read_text(encoding="utf-8")
SAID = {
    (Rule(cells[0], cells[1]), cells[3]): cells
    for row in PAGE.split(accuracy_table.HEAD)[1].splitlines()[2:]
    for cells in [[cell.strip() for cell in row.strip("|").split("|")]]
}
SAMPLE = (
    Rule("adafactor hf", "hf_adafactor"), Rule("adamw gpt_neo", "mesh_tf"), Rule("lamb keras", "keras"),
    Rule("lans mxnet_unfused", "mxnet_lans"), Rule("scaled_adam pt7", "scaled_adam"),
)  # fmt: skip
whole = pytest.mark.skipif(
    GOLDEN == COMPACT, reason="the table is made of all recordings, not of the choice here"
)


def faults(said: list[str], line: Line) -> list[str]:
    """Names the cells that don't hold: what depends on the recordings alone must be equal, the rest alike."""
    cells = [cell.strip() for cell in line.text().strip("|").split("|")]
    wrong = [name for name, at in (("recordings", 2), ("elements", 4)) if said[at] != cells[at]]
    if abs(float(said[5].split()[0]) / 100 - line.equal) > 0.1:
        wrong.append("equal")
    if not 0 <= max(line.largest) <= 1 or line.outside:
        wrong.append("largest")
    if not 0.5 < (float(said[8]) or 1.0) / (line.grain or 1.0) < 2:
        wrong.append("grain")
    return wrong


@whole
def test_every_recording_stands_in_the_table_or_beside_it() -> None:
    for folder in accuracy_table.bundles():
        rule = accuracy_table.rule_of(folder)
        if rule is None:
            assert f"`{'/'.join(folder.parts[-2:])}`" in PAGE
        else:
            assert {(rule, name) for name in BACKENDS} <= set(SAID), rule


def test_no_element_lies_outside() -> None:
    assert "Elements outside of their interval: 0." in PAGE
    assert all(float(ratio) <= 1 for cells in SAID.values() for ratio in cells[6].split(", "))
    assert PAGE.startswith(accuracy_table.TEXT)


@whole
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        pytest.param(rule, name, id=f"{name}-{rule.optimizer}", marks=marks(name))
        for name in ("numpy", "torch")
        for rule in SAMPLE
    ],
)
def test_a_sample_still_holds(rule: Rule, name: str) -> None:
    folders = [folder for folder in accuracy_table.bundles() if accuracy_table.rule_of(folder) == rule]
    line = accuracy_table.line(rule, accuracy_table.replayed(folders, [name])["results"])
    assert not faults(SAID[rule, name], line)


@whole
@pytest.mark.parametrize("rule", SAMPLE[1:3])
def test_figures_that_do_not_hold_are_noticed(rule: Rule) -> None:
    folders = [folder for folder in accuracy_table.bundles() if accuracy_table.rule_of(folder) == rule]
    line = accuracy_table.line(rule, accuracy_table.replayed(folders, ["numpy"])["results"])
    said = SAID[rule, "numpy"]
    changed = [
        *said[:2], "17", said[3], re.sub(r"\d$", "x", said[4]), "3.0 %", said[6], said[7], f"{float(said[8]) * 5}"
    ]  # fmt: skip
    assert faults(changed, line) == ["recordings", "elements", "equal", "grain"]
