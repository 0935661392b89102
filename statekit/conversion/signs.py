"""Which formats may fit, by what is cheap to see: so that detection loads no other.

Goes in: a path, or an opened checkpoint; comes out: a test of a format's name. The signs themselves are data,
`converters/signs.json`. They leave out, they don't decide: a format without signs may always fit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from statekit.errors import StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.source import first_bytes

MayFit: TypeAlias = Callable[[str], bool]
"""Tells of a format's name whether its signs are there, or it has none."""

_HEAD = 64
"""Bytes of a file that signs are looked for in."""
_NUMBERED = re.compile(r"(\d{1,18})/$")


def containers_for(path: Path) -> MayFit:
    """Returns which containers may fit a path: a file, a folder, or a prefix of file names."""
    if path.is_file():
        seen = {"name": path.name, "begins": _head(path)}
    elif path.is_dir():
        seen = {"holds": _entries(path)}
    else:
        seen = {"holds": _entries(path.parent, path.name)}
    return lambda name: _shows(_signs("containers").get(name), seen)


def layouts_for(checkpoint: Checkpoint) -> MayFit:
    """Returns which layouts may fit the names of a checkpoint's tensors."""
    seen = {"names": "\n".join(checkpoint.tensors)}
    return lambda name: _shows(_signs("layouts").get(name), seen)


def _shows(signs: Mapping[str, str] | None, seen: Mapping[str, str]) -> bool:
    if signs is None:
        return True
    return any(key in seen and re.search(sign, seen[key], _FLAGS[key]) for key, sign in signs.items())


_FLAGS = {"name": re.DOTALL, "begins": re.DOTALL, "holds": re.MULTILINE, "names": re.MULTILINE}


def _head(path: Path) -> str:
    """Returns a file's first bytes, a character a byte; none of one that can't be read."""
    try:
        return first_bytes(path, _HEAD).decode("latin-1")
    except StatekitError:
        return ""


def _entries(folder: Path, start: str = "") -> str:
    """Returns the names in a folder that start so, folders with a slash, then those in its newest numbered folder."""
    names = _names(folder, start)
    numbered = {int(found[1]): name for name in names if (found := _NUMBERED.search(name))}
    newest = _names(folder / numbered[max(numbered)], "") if numbered and not start else []
    return "\n".join([*names, *newest])


def _names(folder: Path, start: str) -> list[str]:
    """Returns the names in a folder that start so; none of one that can't be read."""
    try:
        with os.scandir(folder) as entries:
            return [f"{e.name}/" if e.is_dir() else e.name for e in entries if e.name.startswith(start)]
    except OSError:
        return []


@cache
def _signs(kind: str) -> Mapping[str, Mapping[str, str]]:
    text = resources.files("statekit.converters").joinpath("signs.json").read_text(encoding="utf-8")
    signs: Mapping[str, Any] = json.loads(text)
    return dict(signs[kind])
