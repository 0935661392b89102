"""Help in groups: everyday options on one page, the rest with --help-all, and examples that run (test_readme.py)."""

from __future__ import annotations

import click
import pytest

from statekit.cli.arguments import OTHERS, Page
from statekit.cli.main import DONE, VERBS, main, statekit

GROUPED = ("convert", "verify", "inspect", "resume", "doctor")
MOST_LINES = 60


def page(name: str) -> Page:
    command = statekit.get_command(click.Context(statekit), name)
    assert isinstance(command, Page)
    return command


@pytest.mark.parametrize("name", GROUPED)
def test_everyday_help_is_short_and_the_rest_is_one_option_away(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == DONE
    short = capsys.readouterr().out
    assert len(short.splitlines()) < MOST_LINES
    assert main([name, "--help-all"]) == DONE
    whole = capsys.readouterr().out
    options = [param for param in page(name).params if isinstance(param, click.Option)]
    assert [option.opts for option in options if f"  {option.opts[0]}" not in whole] == []
    assert any(f"  {option.opts[0]} " not in short for option in options)
    assert OTHERS not in whole, "an option is in no group"
    left = sum(f"\n  {option.opts[0]}" not in short for option in options)
    assert f"--help-all shows {left} more options." in short


@pytest.mark.parametrize("name", GROUPED)
def test_every_name_in_a_group_is_an_option_and_in_one_group_alone(name: str) -> None:
    command = page(name)
    names = [
        option for groups in (command.everyday, command.more) for group in groups.values() for option in group
    ]
    params = {param.name for param in command.params} | {"help"}
    assert [option for option in names if option not in params or names.count(option) > 1] == []


@pytest.mark.parametrize("name", GROUPED)
def test_each_page_has_three_examples_of_its_verb(name: str) -> None:
    examples = page(name).examples
    assert len(examples) == 3
    assert all(line.startswith(f"statekit {name} ") for line in examples)
    assert name in VERBS
