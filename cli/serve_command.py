"""`statekit serve`: the service, for checkpoints below some folders."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statekit.cli.arguments import local_file, local_files
from statekit.errors import MissingExtraError, NotFoundError

if TYPE_CHECKING:
    from statekit.service.server import Settings


_USUAL = 700, 10, 10
"""Python's thresholds of its search for cycles, which verbs that end soon put off: this one lives long."""


def _data_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "statekit"


@click.command("serve")
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="DIR",
    callback=local_files,
    help="A folder with checkpoints; nothing outside is read or written. May be repeated.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Where the catalogue, its jobs and the token are kept. Default: ~/.local/share/statekit",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8642, show_default=True, help="0: any that is free."
)
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Jobs at a time.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Let everybody in who has the token, over whatever network reaches --host, unencrypted.",
)
@click.option(
    "--name", "names", multiple=True, help="Another name by which browsers reach it. May be repeated."
)
@click.option(
    "--public-url",
    default="",
    metavar="URL",
    help="Under which address browsers see it through a proxy: https://NAME or https://NAME/PATH.",
)
@click.option(
    "--keep-days",
    type=click.IntRange(1, 36500),
    default=90,
    show_default=True,
    help="After how many days the logs of jobs go, and jobs whose results nothing shows any more.",
)
@click.option(
    "--user-header",
    default="",
    metavar="NAME",
    help="The header in which a proxy names whoever asks, such as X-Forwarded-User: jobs bear that name.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="The address of a proxy whose --user-header is believed. May be repeated.",
)
@click.option(
    "--doctor-gib",
    type=click.IntRange(0, 1_000_000),
    default=100,
    show_default=True,
    help="How many GiB of new steps doctor reads a day, by itself. 0: none.",
)
@click.option(
    "--backup",
    metavar="FILE",
    type=click.Path(),
    callback=local_file,
    help="Copy the catalogue to FILE and end; a server may be running.",
)
def command(
    roots: tuple[Path, ...],
    data: Path | None,
    port: int,
    workers: int,
    host: str,
    allow_remote: bool,
    names: tuple[str, ...],
    public_url: str,
    keep_days: int,
    user_header: str,
    proxies: tuple[str, ...],
    doctor_gib: int,
    backup: Path | None,
) -> int:
    """Shows the checkpoints below some folders in a browser.

    The other verbs run on them there, as jobs. Prints a link that signs in once; programs send the token of the data
    folder. Nothing is copied: the catalogue refers to what lies there. To restore a backup, put it into the place of
    catalogue.sqlite while no server runs.
    """
    try:
        from statekit.service.database import FILE, Database
        from statekit.service.server import Settings, serve
    except ImportError as error:
        raise MissingExtraError(
            "The service needs more than statekit itself.",
            found=str(error),
            remedy="pip install 'statekit[service]'",
        ) from error
    folder = data or _data_folder()
    if backup is not None:
        if not (folder / FILE).is_file():  # opening it would make an empty one
            raise NotFoundError(
                "There is no catalogue.",
                place=folder / FILE,
                remedy="name the folder that has one: --data DIR",
            )
        database = Database(folder)
        database.backup(backup)
        database.close()
        click.echo(f"Wrote {backup}.")
        return 0
    if not roots:
        raise click.UsageError("--root is needed: a folder with checkpoints.")
    gc.set_threshold(*_USUAL)
    settings = Settings(
        roots,
        folder,
        host,
        port,
        workers,
        allow_remote,
        names,
        public_url,
        keep_days,
        doctor_gib << 30,
        user_header,
        proxies,
    )
    return serve(settings, _announce)


def _announce(link: str, settings: Settings) -> None:
    if settings.allow_remote:
        click.echo(
            "Others can reach this service. Who has the token reads and changes what lies below the roots; the network "
            "sees all of it, the token too. An SSH tunnel to 127.0.0.1 is safer.",
            err=True,
        )
    click.echo(f"statekit serves {', '.join(str(root) for root in settings.roots)}; data in {settings.data}")
    click.echo("Open this link, which signs in once:")
    click.echo(f"  {link}")
