"""`statekit resume`: the code that goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import click

from statekit.cli import output
from statekit.cli.arguments import OUTPUT, Page, about_checkpoint, checkpoint_options, with_more
from statekit.cli.plan_view import show_next
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import (
    frameworks,
    next_update,
    of_checkpoint,
    program_lines,
    resume_lines,
    unsaid,
)
from statekit.errors import StateError, StatekitError, UnknownFormatError
from statekit.tensors.tree import to_json

_WHAT = "What CHECKPOINT is"
_EVERYDAY = {
    _WHAT: ("container", "step", "hparams", "param_names"),
    "How to go on": ("framework",),
    OUTPUT: ("as_json", "help", "help_all"),
}


@click.command(
    "resume",
    cls=Page,
    everyday=_EVERYDAY,
    more=with_more(_EVERYDAY, about_checkpoint(_WHAT)),
    examples=(
        "statekit resume t5x-ckpt",
        "statekit resume t5x-ckpt --framework jax",
        "statekit resume trainer-run --step 8",
    ),
)
@checkpoint_options
@click.option(
    "--framework",
    type=click.Choice(frameworks()),
    help="Print code for statekit's optimizer in this framework. Default: code for the checkpoint's own system.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(ref: CheckpointRef, framework: str | None, as_json: bool) -> None:
    """Prints the code that resumes from a checkpoint.

    CHECKPOINT is a file or folder of any system that `statekit formats` lists, or a run's folder with several steps.
    `...` stands for a value that the checkpoint does not store.
    """
    try:
        opened = open_state(ref, builds=True)
    except (StateError, UnknownFormatError) as error:
        lines = [] if framework else program_lines(ref)
        if not lines:
            raise
        _show_program(lines, error, as_json)
        return
    with opened:
        state, place = to_json(opened.state.to_json()), of_checkpoint(opened)
        lines = resume_lines(place, state, framework)
        if as_json:
            formats = {"container": opened.checkpoint.container, "layout": opened.layout}
            output.print_json(
                "resume", {**formats, "next_update": next_update(state, place.run.schedules), "lines": lines}
            )
            return
    stdout = output.screen()
    for line in lines or [unsaid(place)]:
        stdout.say(line, fold=False)
    stdout.show_list("Assumed, because the checkpoint doesn't say:", state["assumptions"])
    show_next(stdout, state, place.run.schedules)


def _show_program(lines: Sequence[str], error: StatekitError, as_json: bool) -> None:
    """Prints the lines of the program that saved a checkpoint, and why there are no others."""
    if as_json:
        output.print_json("resume", {"next_update": [], "lines": [*lines], "unknown": error.line})
        return
    stdout = output.screen()
    for line in lines:
        stdout.say(line, fold=False)
    stdout.show_list("Another program can't go on with it yet:", [error.line])
