"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path

import click

from statekit.cli.output import printable
from statekit.format import Hints


def _hints(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Hints:
    if not values:
        return Hints()
    from statekit.converters.hparams import read_hparams

    settings = read_hparams(values)
    for note in settings.left_out:
        click.echo(f"Note: {printable(note)}", err=True)
    return Hints(settings.values)


hints_option = click.option(
    "--hparams",
    "hints",
    multiple=True,
    metavar="FILE|KEY=VALUE",
    callback=_hints,
    help="What the checkpoint doesn't say, by the original's own names: decay_rate=0.8, or a .gin or .json file. "
    "May be repeated.",
)
"""The `--hparams` option; the command gets `hints`."""


def local_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Turns an argument into a path of this machine; a callback for click.

    Raises:
        UsageError: It is an address such as gs://bucket/run; says what to do instead.
    """
    if value is None:
        return None
    from statekit.converters.containers.kv_stores import local_path

    return local_path(value)
