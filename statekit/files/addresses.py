"""How a user names what is on this machine or in a store: paths and addresses, read before anything is asked."""

from __future__ import annotations

from pathlib import Path

from statekit.errors import UsageError

STORES = ("s3", "gs", "az")
"""The schemes of object stores that are read."""
_COPIES = {
    "s3": "aws s3 cp --recursive {} LOCAL_FOLDER/",
    "gs": "gcloud storage cp -r {} LOCAL_FOLDER/",
    "az": "azcopy copy {} LOCAL_FOLDER/ --recursive",
    "hf": "hf download REPOSITORY --local-dir LOCAL_FOLDER",
}


def address_of(text: str) -> tuple[str, str, str]:
    """Returns the scheme of an address, its bucket, and the name there, without slashes around it.

    Raises:
        UsageError: It names no bucket, or has a password, a query or a name that leads elsewhere. None of it is shown.
    """
    scheme, _, rest = text.partition("://")
    bucket, _, name = rest.partition("/")
    name = name.strip("/")
    if "@" in bucket or ":" in bucket or "?" in text:
        raise UsageError(
            "An address has no password and no query.",
            place=f"{scheme}://",
            expected=f"{scheme}://BUCKET/NAME",
            remedy="leave them out: credentials are taken from the environment",
        )
    if not bucket or any(part in ("", ".", "..") for part in name.split("/")[: None if name else 0]):
        raise UsageError("This address names nothing.", place=text, expected=f"{scheme}://BUCKET/NAME")
    return scheme, bucket, name


def local_path(source: str) -> Path:
    """Returns the path of this machine that a user names.

    Raises:
        UsageError: It is empty, or the address of something that isn't on this machine.
    """
    if not source:
        raise UsageError(
            "A path is empty, as that of a variable without a value is.",
            expected="a file or folder; . is the one where you are",
        )
    scheme, separator, rest = source.partition("://")
    if separator and scheme != "file":
        raise UsageError(
            "This must be a path of this machine.",
            place=source,
            remedy=f"use a local folder, and copy from or to it: {copying(source)}",
        )
    return Path(rest if separator else source)


def copying(address: str) -> str:
    """Returns the command that copies what is at an address to this machine, as far as one is known."""
    return _COPIES.get(address.partition("://")[0].lower(), "to a local folder").format(address)
