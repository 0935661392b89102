"""Names of files that the ranks of one run write beside each other: `model_rank0.pt` and `model_rank1.pt`.

Input: the path of one. Output: the paths that differ from it in the number of the rank alone.
"""

from __future__ import annotations

import re

from statekit.errors import StatekitError
from statekit.files.checkpoint import RANK_WORDS
from statekit.files.source import listing
from statekit.files.tree import Place

_NUMBER = re.compile(rf"(?<![a-z])(?:{RANK_WORDS})[-_.]{{0,2}}(\d{{1,6}})(?!\d)", re.IGNORECASE)
"""A rank's number behind the word for it."""
_OF_COUNT = re.compile(r"(?<!\d)(\d{1,6})[-_.]of[-_.]\d{1,6}(?!\d)", re.IGNORECASE)
"""A rank's number before the number of ranks."""
_FOLDER = re.compile(r"(?:[a-z]{2}[-_])?[a-z]+[-_.]{0,2}#", re.IGNORECASE)
"""The name of a rank's folder, such as `rank0` and `mp_rank_00`, without the number."""
_LONGEST = 255
"""Characters of a name that may tell: a file's at most. Source: Linux, limits.h, `NAME_MAX`."""


def other_ranks(path: Place) -> list[Place]:
    """Returns the files of other ranks beside a path, whose own name or folder has a rank's number; sorted.

    Ranks are counted from 0. Numbers without a 0 among them are something else, such as the ranks of adapters; a name
    that says the number of all ranks needs none.
    """
    return _beside(path) or [
        folder / path.name for folder in _beside(path.parent) if (folder / path.name).exists()
    ]


def _beside(path: Place) -> list[Place]:
    of_all, ranks, has_count = _parted(path.name)
    is_file = path.is_file()
    # A run may be called after a rank; a folder of one is called so alone.
    if not ranks or not (is_file or _FOLDER.fullmatch(of_all)):
        return []
    try:
        entries = [entry for entry in listing(path.parent) if _parted(entry.name)[0] == of_all]
    except StatekitError:  # what may not be listed isn't known
        return []
    others = [entry for entry in entries if entry.name != path.name and entry.is_file() == is_file]
    is_counted = has_count or any(not any(_parted(entry.name)[1]) for entry in entries)
    return others if is_counted else []


def _parted(name: str) -> tuple[str, tuple[int, ...], bool]:
    """Returns a name without the numbers of the rank, these, and whether it says the number of ranks."""
    if len(name) > _LONGEST:
        return name, (), False
    count = _OF_COUNT.search(name)
    matches = [count] if count else [*_NUMBER.finditer(name)]
    spans = [match.span(1) for match in matches]
    numbers = tuple(int(name[first:stop]) for first, stop in spans)
    for first, stop in reversed(spans):
        name = f"{name[:first]}#{name[stop:]}"
    return name, numbers, count is not None
