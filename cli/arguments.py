"""Arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path

import click

from statekit.format import Hints


def _hints(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Hints:
    if not values:
        return Hints()
    from statekit.converters.hparams import parse_hparams

    return Hints(parse_hparams(values))


hints_option = click.option(
    "--hparams",
    multiple=True,
    metavar="FILE|KEY=VALUE",
    callback=_hints,
    help="Hyperparameters that the checkpoint doesn't hold, by the original's names; may be repeated.",
)
"""The `--hparams` option; the command gets `Hints`."""


def source_path(argument: str) -> Path:
    """Returns the path of a source.

    Raises:
        UsageError: It is the address of a remote folder, which statekit doesn't read.
    """
    return Path(argument)
