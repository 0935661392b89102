"""What decides the bytes that a worker writes, besides the plan: the versions of the libraries that encode."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from statekit.errors import UsageError

_LIBRARIES = ("statekit", "blake3", "isal", "ml_dtypes", "numpy", "tensorstore", "zstandard")


def fingerprint() -> dict[str, str]:
    """Returns the versions of what computes and encodes values, and the kind of machine.

    isal and zlib give other gzip bytes, and machines of two kinds may give other last bits of means and powers.
    """
    versions = {name: number for name in _LIBRARIES if (number := _version(name))}
    return {**versions, "zlib": _zlib(), "machine": platform.machine()}


def check_fingerprint(expected: Mapping[str, str], place: object) -> None:
    """Refuses to work where other bytes would be written than elsewhere.

    Raises:
        UsageError: Names every library whose version is another.
    """
    here = fingerprint()
    others = [name for name in {**expected, **here} if expected.get(name) != here.get(name)]
    if others:
        raise UsageError(
            "This worker's libraries aren't those with which the work was split.",
            place=place,
            expected=", ".join(f"{name} {expected.get(name, 'not installed')}" for name in others),
            found=", ".join(f"{name} {here.get(name, 'not installed')}" for name in others),
            remedy="install the same versions on all workers, or drop the work and split it anew with these",
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _zlib() -> str:
    import zlib

    return zlib.ZLIB_RUNTIME_VERSION
