"""The `statekit` command: a group of verbs, each loaded when it is called."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, cast

import click

from statekit.errors import StatekitError, UsageError, printable

DONE, WANTING, USAGE, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: done; checked and found wanting; a call that makes no sense; could not do it; stopped by Ctrl-C."""


class Verb(NamedTuple):
    """Where a verb's click command lives (`module:command`), and the first line of its help."""

    module: str
    summary: str


VERBS = {
    "inspect": Verb("statekit.cli.inspect_command", "Shows what a checkpoint holds."),
    "convert": Verb("statekit.cli.convert_command", "Converts a checkpoint to another system."),
    "replay": Verb(
        "statekit.cli.replay_command", "Replays recordings of an original optimizer with our steps."
    ),
    "formats": Verb("statekit.cli.formats_command", "Lists the containers and layouts that statekit knows."),
    "schemas": Verb(
        "statekit.cli.schemas_command", "Shows what each optimizer keeps, in every implementation."
    ),
    "demo": Verb("statekit.cli.demo_command", "Goes on in PyTorch from a checkpoint that T5X wrote."),
}


class Verbs(click.Group):
    """A group that knows its verbs by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return cast(click.Command, import_module(VERBS[cmd_name].module).command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="statekit", message="statekit %(version)s")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def statekit(debug: bool) -> None:
    """Moves the optimizer state of a training run between frameworks.

    Exit codes: 0 done, 1 checked and found wanting, 2 wrong usage, 3 could not do it.
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    debug = False
    try:
        with statekit.make_context(
            "statekit", list(sys.argv[1:] if arguments is None else arguments)
        ) as context:
            debug = context.params["debug"]
            code = statekit.invoke(context)
            sys.stdout.flush()
            return code if isinstance(code, int) else DONE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, click.Abort):
        _say("Stopped.")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if debug:
            raise
        return _explain(error)


def _explain(error: Exception) -> int:
    if isinstance(error, StatekitError):
        _say(f"Error: {error}")
        return USAGE if isinstance(error, UsageError) else FAILED
    if isinstance(error, (OSError, MemoryError)):
        _say(f"Error: {error or 'there is not enough memory'}")
        return FAILED
    _say(
        f"Error: statekit itself has failed: {type(error).__name__}: {error}\n"
        "  do: report this, with what `statekit --debug ...` prints"
    )
    return FAILED


def _say(message: str) -> None:
    click.echo(printable(message, keep="\n"), err=True)
