"""`statekit serve`: the service, for checkpoints below some folders."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from statekit.cli.arguments import local_file, local_files
from statekit.errors import MissingExtraError, NotFoundError, extra

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
    help="A folder with checkpoints. The service reads and writes nothing outside. May be repeated.",
)
@click.option(
    "--data",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder of the catalogue, its jobs and the token. Default: ~/.local/share/statekit",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8642,
    show_default=True,
    help="The port. 0: any free port.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=2,
    show_default=True,
    help="The number of jobs that run at the same time.",
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="The address on which the service listens."
)
@click.option(
    "--allow-remote",
    is_flag=True,
    help="Accept everybody who has the token, unencrypted, over every network that reaches --host.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    help="Another host name by which browsers reach the service. May be repeated.",
)
@click.option(
    "--public-url",
    default="",
    metavar="URL",
    help="The address that browsers use through a proxy: https://NAME or https://NAME/PATH.",
)
@click.option(
    "--keep-days",
    type=click.IntRange(1, 36500),
    default=90,
    show_default=True,
    help="Delete logs of jobs, and jobs whose results no page shows, after so many days.",
)
@click.option(
    "--user-header",
    default="",
    metavar="NAME",
    help="The header in which a proxy names the user, such as X-Forwarded-User. Jobs carry that name.",
)
@click.option(
    "--proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="The address of a proxy whose --user-header the service trusts. May be repeated.",
)
@click.option(
    "--doctor-gib",
    type=click.IntRange(0, 1_000_000),
    default=100,
    show_default=True,
    help="The GiB of new steps that doctor reads by itself each day. 0: none.",
)
@click.option(
    "--backup",
    metavar="FILE",
    type=click.Path(),
    callback=local_file,
    help="Copy the catalogue to FILE and exit. A server may be running.",
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

    The other verbs run there as jobs. serve prints a link that signs in once; programs send the token of the data
    folder. It copies no checkpoint: the catalogue refers to the files. To restore a backup, stop the server and put the
    backup into the place of catalogue.sqlite.
    """
    try:
        from statekit.service.database import FILE, Database
        from statekit.service.server import Settings, serve
    except ImportError as error:
        raise MissingExtraError(
            "The service needs more than statekit itself.", found=str(error), remedy=extra("service")
        ) from error
    folder = data or _data_folder()
    if backup is not None:
        if not (folder / FILE).is_file():  # opening it would make an empty one
            raise NotFoundError(
                "The data folder has no catalogue.",
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
