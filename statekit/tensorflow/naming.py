"""Names of variables: what tells them apart in an optimizer, a checkpoint and a saved file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

SEPARATOR = ":"
"""Stands for the slashes of a path in the names of a saved file, where slashes would be folders."""


def path_of(variable: Any) -> str:
    """Returns the canonical path of a variable: Keras' path, or TensorFlow's name without its output's number."""
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def normal(name: str) -> str:
    """Returns a name with what writings of it differ in made equal."""
    return name.removesuffix(":0").replace(".", "/")


def twice(names: Iterable[str]) -> list[str]:
    """Returns the names that occur more than once."""
    seen: dict[str, int] = {}
    for name in names:
        seen[name] = seen.get(name, 0) + 1
    return [name for name, count in seen.items() if count > 1]


@contextmanager
def scopes(caller: Any, name: str, path: str) -> Iterator[None]:
    """Opens Keras' name scopes for variables below a path of an optimizer."""
    with ExitStack() as stack:
        stack.enter_context(keras.name_scope(name, caller=caller))
        for part in path.split("/"):
            stack.enter_context(keras.name_scope(part))
        yield


def partners(mine: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Returns which saved name belongs to each of ours.

    Equal names belong together. Where Keras has numbered layers anew (dense, dense_1 become dense_2, dense_3), names
    that are equal but for these numbers belong together in the order of the numbers, if there are as many of them.

    Example:
        >>> partners(["dense_2:kernel", "dense_3:kernel"], ["dense:kernel", "dense_1:kernel"])
        {'dense_2:kernel': 'dense:kernel', 'dense_3:kernel': 'dense_1:kernel'}
    """
    if set(mine) == set(theirs):
        return {name: name for name in mine}
    found: dict[str, str] = {}
    saved = _alike(theirs)
    for kind, names in _alike(mine).items():
        if len(saved.get(kind, [])) == len(names):
            found |= dict(zip(names, saved[kind], strict=True))
    return found


def _alike(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups names by what they are without their numbers, each group in the order of the numbers."""
    found: dict[str, list[str]] = {}
    for name in sorted(names, key=_numbers):
        found.setdefault(_NUMBER.sub("", name), []).append(name)
    return found


def _numbers(name: str) -> list[int]:
    return [int(match[1] or 0) for match in _PART.finditer(name)]


_NUMBER = re.compile(rf"_\d+(?=$|{SEPARATOR})")
_PART = re.compile(rf"[^{SEPARATOR}]+?(?:_(\d+))?(?=$|{SEPARATOR})")
