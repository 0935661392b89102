"""Names of variables: what tells them apart in an optimizer, a checkpoint and a saved file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import keras

from statekit.errors import UsageError

_Kind: TypeAlias = tuple[str, ...]
"""A path without its numbers, in its parts."""
SEPARATOR = ":"
"""Stands for the slashes of a path in the names of a saved file, where slashes would be folders."""


def path_of(variable: Any) -> str:
    """Returns the canonical path of a variable: Keras' path, or TensorFlow's name without its output's number."""
    return str(getattr(variable, "path", None) or variable.name).removesuffix(":0")


def variables_of(given: Any) -> Any:
    """Returns a model as it is, and of whatever else holds variables a list of them.

    Args:
        given: A model, a layer or `tf.Module`, a variable, variables in any iterable, or a tree of dicts of them.

    Raises:
        UsageError: It holds something else.
    """
    if isinstance(given, keras.Model):
        return given
    if isinstance(given, Mapping):
        return [variable for part in given.values() for variable in variables_of(part)]
    if _is_variable(given):
        return [given]
    inside = getattr(given, "trainable_variables", given)
    if not isinstance(inside, Iterable) or isinstance(inside, str):
        raise _no_variables(given)
    variables = list(inside)
    if not all(map(_is_variable, variables)):
        raise _no_variables(given)
    return variables


def names_in(given: Any) -> dict[str, str]:
    """Returns for variables in a tree of dicts their keys, joined by `/`, by their paths, where these differ."""
    names: dict[str, str] = {}
    stack: list[tuple[str, Any]] = [("", given)] if isinstance(given, Mapping) else []
    while stack:
        above, node = stack.pop()
        if isinstance(node, Mapping):
            stack += [(f"{above}/{key}".removeprefix("/"), child) for key, child in node.items()]
        elif _is_variable(node) and path_of(node) != above:
            names[path_of(node)] = above
    return names


def _is_variable(given: Any) -> bool:
    return hasattr(given, "assign") and hasattr(given, "name") and hasattr(given, "dtype")


def _no_variables(given: Any) -> UsageError:
    return UsageError(
        "A call needs variables.",
        expected="the model, or model.trainable_variables",
        found=type(given).__name__,
    )


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
    """Returns which of their paths is which of ours; one that can't be told is missing.

    Equal paths are the same. Keras may open another scope around a whole model when it loads it, and numbers layers
    anew (dense, dense_1 become dense_2, dense_3). So what all paths of a side begin with doesn't count; and paths that
    are equal but for such numbers are the same in the order of the numbers, if there are as many on both sides. What is
    left may lack an inner model's name, as in a model that Keras itself has loaded: it is that of which it is the end.

    Example:
        >>> partners(["net/dense_2/kernel", "net/dense_3/kernel"], ["dense/kernel", "dense_1/kernel"])
        {'net/dense_2/kernel': 'dense/kernel', 'net/dense_3/kernel': 'dense_1/kernel'}
        >>> partners(["inner/kernel", "out/kernel"], ["enc/inner/kernel", "out/kernel"])
        {'out/kernel': 'out/kernel', 'inner/kernel': 'enc/inner/kernel'}
    """
    if set(mine) <= set(theirs):
        return {path: path for path in mine}
    inner_names = _inner(mine)
    saved = {inner: path for path, inner in _inner(theirs).items()}
    if set(inner_names.values()) <= saved.keys():
        return {path: saved[inner] for path, inner in inner_names.items()}
    pairs: dict[str, str] = {}
    ours_alike, alike = _alike(mine), _alike(theirs)
    for kind in [kind for kind, paths in ours_alike.items() if len(alike.get(kind, [])) == len(paths)]:
        pairs |= dict(zip(ours_alike.pop(kind), alike.pop(kind), strict=True))
    for kind, other in _same_ends(ours_alike, alike):
        if len(ours_alike[kind]) == len(alike[other]):
            pairs |= dict(zip(ours_alike[kind], alike[other], strict=True))
    return pairs


def _same_ends(ours: Collection[_Kind], theirs: Collection[_Kind]) -> list[tuple[_Kind, _Kind]]:
    """Returns the pairs of which one is the end of the other, and neither is that of a third."""
    ends = [(a, b) for a in ours for b in theirs if a[-len(b) :] == b or b[-len(a) :] == a]
    times = Counter(a for a, _ in ends), Counter(b for _, b in ends)
    return [(a, b) for a, b in ends if times[0][a] == times[1][b] == 1]


def _inner(paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the parts of each path without those that all begin with."""
    parts = {path: tuple(path.split("/")) for path in paths}
    first, last = min(parts.values(), default=()), max(parts.values(), default=())
    same = 0
    while same < min(len(first), len(last)) - 1 and first[same] == last[same]:
        same += 1
    return {path: own_parts[same:] for path, own_parts in parts.items()}


def _alike(paths: Sequence[str]) -> dict[tuple[str, ...], list[str]]:
    """Groups paths by what they are without their numbers, each group in the order of the numbers."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, inner in sorted(_inner(paths).items(), key=lambda item: [_number(part) for part in item[1]]):
        alike.setdefault(tuple(_NUMBER.sub("", part) for part in inner), []).append(path)
    return alike


def _number(part: str) -> int:
    match = _NUMBER.search(part)
    return int(match[0][1:]) if match else 0


_NUMBER = re.compile(r"_\d+$")
