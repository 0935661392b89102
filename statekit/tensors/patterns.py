"""Regular expressions that a checkpoint names: a match of them takes bounded time, or is refused.

Those of a manifest may be any that a user wrote: a process with limits of its own changes names by them.
A repeat tries each length of what it repeats, `?` and `|` each try two ways. All of them one within the other multiply.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Sequence
from functools import lru_cache

from statekit.errors import StateError

LONGEST = 256
"""Characters of a pattern at most."""
MOST = 10**6
"""Places that a match may try at most, unless a budget says it."""
_MOST_REPEATS = 3
BOUNDED = f"a regex of at most {LONGEST} characters, at most {_MOST_REPEATS} repeats, few choices, no repeat of a group"
"""What such a pattern is, in words."""
_ENDLESS = re.compile(r"\)[*+{]|\\[1-9]")
"""What can make a match take time without end: a repeated group, a reference back."""
_SPECIAL, _LOOKING = re.compile(r"\(\?[^:]"), re.compile(r"\(\?[^:=!i]")
_REPEATS, _CHOICES = re.compile(r"[*+}]"), re.compile(r"(?<!(?<!\\)\()\?|\|")


@lru_cache(1024)
def bounded(pattern: str, looks_ahead: bool = False) -> re.Pattern[str] | None:
    """Returns a pattern that matches in bounded time; None of any other.

    Args:
        pattern: The pattern.
        looks_ahead: Whether it may look ahead, or take letters of both cases for one.

    Example:
        >>> bounded("(^|/)bias$") is None, bounded("(a+)+$") is None
        (False, True)
    """
    special = _LOOKING if looks_ahead else _SPECIAL
    if len(pattern) > LONGEST or len(_REPEATS.findall(pattern)) > _MOST_REPEATS:
        return None
    if _ENDLESS.search(pattern) or special.search(pattern):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what later versions of Python read otherwise
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning):
        return None


def places(pattern: str, name: str) -> int:
    """Returns how many places a match with a name tries from its begin, at most.

    Example:
        >>> places("a.*b?", "x" * 10), places("bias|scale|norm.*", "x" * 10)
        (20, 12)
    """
    is_flat = not {*"([\\"} & {*pattern}
    return sum(
        len(name) ** len(_REPEATS.findall(way)) * 2 ** len(_CHOICES.findall(way))
        for way in (pattern.split("|") if is_flat else [pattern])
    )


_SECONDS = 20
"""Seconds of the processor, and of the clock, that the renaming of a manifest may take."""
_APART = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
except ImportError:
    pass
pairs, names = json.load(sys.stdin)
for pattern, replacement in pairs:
    names = [re.sub(pattern, replacement, name) for name in names]
    if max(map(len, names), default=0) > 65536:
        sys.exit(1)
json.dump(names, sys.stdout)
"""


def renamed_apart(pairs: Sequence[tuple[str, str]], names: Sequence[str], place: str) -> list[str]:
    r"""Returns names after all replacements, as `re.sub` makes them; a process with limits of its own makes them.

    So a stranger's pattern may be any that a user may write, and takes neither time nor memory without end.

    Args:
        pairs: Each a pattern and its replacement, one after the other.
        names: The names.
        place: Where the patterns stand, for errors.

    Raises:
        StateError: They take too long, take too much memory or can't be read.

    Example:
        >>> renamed_apart([("^(?P<module>[^/]*)/w$", r"\g<module>/kernel")], ["a/w", "b"], "here")
        ['a/kernel', 'b']
    """
    import subprocess  # which only this needs

    request = json.dumps([list(pairs), list(names)]).encode("ascii")
    command = [sys.executable, "-I", "-S", "-c", _APART]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=_SECONDS, check=False)
        after: list[str] = json.loads(done.stdout) if done.returncode == 0 else []
        failed = f"the process ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        after, failed = [], f"not done after {_SECONDS} s"
    if len(after) != len(names):
        raise StateError(
            "Names cannot be changed by these patterns.",
            place=place,
            expected=f"patterns and replacements that take less than {_SECONDS} s and 1 GiB",
            found=f"{pairs[0][0]!r:.80}, {failed}" if pairs else failed,
            remedy="convert again with simpler patterns",
        )
    return after


def is_found(pattern: str, name: str, place: str) -> bool:
    """Tells whether a pattern is found anywhere in a name, as `re.search` does.

    Raises:
        StateError: It is none, or one that may take too long.
    """
    compiled = bounded(pattern, looks_ahead=True) if isinstance(pattern, str) else None
    if compiled is None or places(pattern, name) > MOST:
        raise StateError(
            "A pattern cannot be matched safely.",
            place=place,
            expected=BOUNDED,
            found=f"{pattern!r:.80}",
            remedy="write a simpler pattern, or several of them",
        )
    return compiled.search(name) is not None
