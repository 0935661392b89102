"""Trees of inert records: everything a checkpoint holds, as plain data with tensors at the leaves.

A tree is made of dicts (with str, int, bool or tuple keys), lists, tuples, `Record`s, None, bool, int, float, str,
bytes and Tensors. Nothing in a tree runs: an object of a foreign class is a `Record` of its name and parts. JSON that
nobody vouches for becomes a tree within the job's budget, and as deep as in every Python.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import resources
from typing import Any, TypeAlias

import numpy as np

from statekit.budget import NODE_BYTES, Account
from statekit.errors import FormatError
from statekit.tensors.tensor import Tensor, dtype_name, scalar

Tree: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]

MAX_DEPTH = 512
"""Levels of a tree at most; none of a checkpoint has a tenth of them."""
MAX_NAME_BYTES = 4096
"""Bytes of a tensor's name at most, joined: a path's on a disk. Source: Linux, limits.h, `PATH_MAX`."""
_PART = 1 << 20
"""Bytes of a text that are looked at at a time."""


@dataclass(frozen=True, slots=True)
class Record:
    """An object of a class that statekit doesn't know, kept as data: its dotted name, arguments and state."""

    name: str
    args: tuple[Tree, ...] = ()
    state: Tree = None


def walk(tree: Tree) -> Iterator[tuple[Path, Any]]:
    """Yields every leaf with its path of keys, in order; an empty dict, list or tuple is a leaf.

    What parts share comes once for each of them: readers have counted that (statekit/budget.py).

    Raises:
        FormatError: The tree is cyclic, or too deep (`MAX_DEPTH`).
    """
    inside: list[tuple[Path, Iterator[tuple[Any, Any]]]] = []
    path, node = (), tree
    while True:
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        children = _children(node)
        if children is None:
            yield path, node
        else:
            inside.append((path, children))
        child = None
        while inside and (child := next(inside[-1][1], None)) is None:
            inside.pop()
        if child is None:
            return
        path, node = (*inside[-1][0], child[0]), child[1]


def _too_deep(path: Sequence[Any]) -> FormatError:
    return FormatError(
        "A checkpoint's tree is too deep to be one.",
        place="/".join(map(str, path[:8])),
        expected=f"at most {MAX_DEPTH} levels, no cycles",
    )


@contextmanager
def going_over(place: object) -> Iterator[None]:
    """Turns the end of Python's stack into an error of ours: what goes over a tree calls itself for each level.

    Raises:
        FormatError: A tree in it is deeper than that.
    """
    try:
        yield
    except RecursionError:
        raise FormatError("A checkpoint's tree is too deep to be one.", place=place) from None


def holds_records(tree: Tree) -> bool:
    """Tells whether there is an object of an unknown class anywhere in a tree."""
    return next(record_names(tree), None) is not None


def record_names(tree: Tree) -> Iterator[str]:
    """Yields the names of the classes whose objects a tree holds; not of those inside another object."""
    if isinstance(tree, Record):
        yield tree.name
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    for part in parts:
        yield from record_names(part)


def _children(node: Any) -> Iterator[tuple[Any, Any]] | None:
    if isinstance(node, Mapping) and node:
        return iter(node.items())
    if isinstance(node, (list, tuple)) and node:
        return iter(enumerate(node))
    if isinstance(node, Record) and (node.args or node.state is not None):
        parts = [("args", node.args)] if node.args else []
        return iter([*parts, ("state", node.state)] if node.state is not None else parts)
    return None


def nested(leaves: Mapping[Path, Any]) -> dict[Any, Tree]:
    """Returns the dicts of dicts that have these leaves under these paths, in order.

    Raises:
        FormatError: A leaf's path leads through another leaf, or is longer than `MAX_DEPTH`.

    Example:
        >>> nested({("a", "b"): 1, ("a", "c"): 2})
        {'a': {'b': 1, 'c': 2}}
    """
    root: dict[Any, Tree] = {}
    for path, leaf in leaves.items():
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        if above := next((path[:i] for i in range(len(path)) if path[:i] in leaves), None):
            raise FormatError(
                "Two names can't both be in one tree: one leads through the other.",
                place="/".join(map(str, path)),
                found="/".join(map(str, above)),
                remedy="rename one of the two",
            )
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return root


def leaf_names(tree: Tree) -> list[str]:
    """Returns the name of every leaf, tensor or not: the keys of its path, joined with `/`. An empty tree has none.

    Example:
        >>> leaf_names({"scheduler": {"last_epoch": 4, "base_lrs": [0.1, 0.2]}})
        ['scheduler/last_epoch', 'scheduler/base_lrs/0', 'scheduler/base_lrs/1']
    """
    return ["/".join(map(str, path)) for path, _ in walk(tree) if path]


def empty_names(tree: Tree) -> list[str]:
    """Returns the name of every leaf that holds nothing: None, or an empty map or sequence.

    Example:
        >>> empty_names({"chain": [{"count": 4}, None], "rest": {}})
        ['chain/1', 'rest']
    """
    nothing = [
        path
        for path, leaf in walk(tree)
        if leaf is None or (isinstance(leaf, (Mapping, list, tuple)) and not leaf)
    ]
    return ["/".join(map(str, path)) for path in nothing]


def tensor_names(tree: Tree) -> dict[str, Tensor]:
    """Returns every tensor of a tree by its native name: the keys of its path, joined with `/`.

    Raises:
        FormatError: Two paths give the same name, or a name is longer than 4096 bytes.
    """
    named: dict[str, Tensor] = {}
    for path, leaf in walk(tree):
        if not isinstance(leaf, Tensor):
            continue
        name = "/".join(map(str, path))
        if name in named or len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
            raise FormatError(
                "The name of a tensor is not usable.",
                place=name[:200],
                expected=f"names that differ, of at most {MAX_NAME_BYTES} bytes",
                found="two tensors of this name" if name in named else f"{len(name)} characters",
            )
        named[name] = leaf
    return named


def mapped(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    """Returns a tree with every leaf changed; what holds the leaves is made anew."""
    if isinstance(tree, Mapping):
        named = {}
        for key, part in tree.items():  # a loop: a comprehension costs a second stack frame for each level
            named[key] = mapped(part, change)
        return named
    if isinstance(tree, (list, tuple)):
        parts = []
        for part in tree:
            parts.append(mapped(part, change))
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, Record):
        return replace(tree, args=mapped(tree.args, change), state=mapped(tree.state, change))
    return change(tree)


def with_leaves(tree: Tree, leaves: Mapping[Path, Any]) -> Tree:
    """Returns a tree with other leaves under some of its paths, as `walk` has them."""
    below: dict[Any, dict[Path, Any]] = {}
    for path, leaf in leaves.items():
        if not path:
            return leaf
        below.setdefault(path[0], {})[path[1:]] = leaf
    if isinstance(tree, Record):
        parts: dict[str, Any] = {key: with_leaves(getattr(tree, key), inner) for key, inner in below.items()}
        return replace(tree, **parts)
    if isinstance(tree, Mapping):
        return {**tree, **{key: with_leaves(tree[key], inner) for key, inner in below.items()}}
    if isinstance(tree, (list, tuple)):
        items = [with_leaves(part, below[i]) if i in below else part for i, part in enumerate(tree)]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def _mapping_json(tree: Mapping[Any, Tree], path: Path) -> Any:
    if all(isinstance(key, str) and not key.startswith("$") for key in tree):
        return {key: to_json(value, (*path, key)) for key, value in tree.items()}
    return {"$dict": [[to_json(key), to_json(value, (*path, key))] for key, value in tree.items()]}


def to_json(tree: Tree, path: Path = ()) -> Any:
    """Returns a JSON view of a tree: readable, with what JSON lacks tagged by a key that begins with `$`.

    A tensor is described and named by its path, as `tensor_names` does.
    """
    if isinstance(tree, (str, int)):  # most are, and whether one is a mapping takes longer to say
        return tree
    if isinstance(tree, Mapping):
        return _mapping_json(tree, path)
    if isinstance(tree, tuple):
        return {"$tuple": [to_json(item, (*path, i)) for i, item in enumerate(tree)]}
    if isinstance(tree, list):
        return [to_json(item, (*path, i)) for i, item in enumerate(tree)]
    if isinstance(tree, Record):
        args, state = to_json(list(tree.args), (*path, "args")), to_json(tree.state, (*path, "state"))
        return {"$record": tree.name, "args": args, "state": state}
    if isinstance(tree, bytes):
        return {"$bytes": base64.b64encode(tree).decode("ascii")}
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"$float": repr(tree)}
    if isinstance(tree, Tensor):
        name = "/".join(map(str, path))
        return {"$tensor": {"name": name, "shape": list(tree.shape), "dtype": dtype_name(tree.dtype)}}
    return tree


def plain(value: Any) -> Any:
    """Returns a value of an option or a rule as JSON: as `to_json` does, a tuple as a list, a 0-d tensor as its number.

    Example:
        >>> plain((0.9, float("inf")))
        [0.9, {'$float': 'inf'}]
    """
    value = scalar(value)
    return to_json(list(value) if isinstance(value, tuple) else value)


def report_json(value: Any) -> Any:
    """Returns a value of a report as JSON: records by their `to_json`, times in ISO 8601, tuples as lists.

    A number that is not finite becomes a string, and so does what JSON has no form for. `to_json` is for what is read
    back as a tree.

    Example:
        >>> report_json({"error": (float("inf"), np.float32(0.5))})
        {'error': ['inf', 0.5]}
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): report_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [report_json(part) for part in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value.to_json() if hasattr(value, "to_json") else str(value)


def from_json(view: Any, tensor: Callable[[Any], Tensor] | None = None, place: object = None) -> Tree:
    """Returns the tree of a JSON view.

    Args:
        view: What `to_json` returned, or something that shall be one.
        tensor: Gives the tensor of a description; without it, tensors stay descriptions.
        place: Where the view stands, for messages.

    Raises:
        FormatError: It isn't the view of a tree.
    """
    try:
        return _from_json(view, tensor)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        fault = f"{type(error).__name__}: {error}"[:300]
        raise FormatError("This isn't the JSON view of a tree.", place=place, found=fault) from None


def _record_from_json(view: Mapping[str, Any], tensor: Callable[[Any], Tensor] | None) -> Record:
    name, args = view["$record"], _from_json(view["args"], tensor)
    if not isinstance(name, str) or not isinstance(args, list):
        raise TypeError("an object has no name, or no list of arguments")
    return Record(name, tuple(args), _from_json(view["state"], tensor))


def _from_json(view: Any, tensor: Callable[[Any], Tensor] | None) -> Tree:
    if isinstance(view, list):
        return [_from_json(item, tensor) for item in view]
    if not isinstance(view, dict):
        return view
    if "$dict" in view:
        return {_from_json(key, None): _from_json(value, tensor) for key, value in view["$dict"]}
    if "$tuple" in view:
        return tuple(_from_json(item, tensor) for item in view["$tuple"])
    if "$record" in view:
        return _record_from_json(view, tensor)
    if "$bytes" in view:
        return base64.b64decode(view["$bytes"], validate=True)
    if "$float" in view:
        return float(view["$float"])
    if "$tensor" in view and tensor is not None:
        return tensor(view["$tensor"])
    return {key: _from_json(value, tensor) for key, value in view.items()}


def strict_json(text: bytes | str, place: object, account: Account | None = None) -> Any:
    """Parses JSON; refuses duplicate keys, NaN and infinities, numbers that overflow, and absurd nesting.

    Args:
        text: The text.
        place: Where it stands.
        account: What it draws on, which holds the values until it is closed; one of its own if None.

    Raises:
        FormatError: The text isn't JSON of that kind.
        BudgetError: What it says is more than the job may hold.
    """
    rules = {"object_pairs_hook": _unique, "parse_constant": _no_constant, "parse_float": _finite}
    return _parsed(text, place, account or Account(), rules)


def loose_json(text: bytes | str, place: object, account: Account | None = None) -> Any:
    """Parses JSON as Python's own programs write and read it, with NaN and infinities; refuses absurd nesting.

    Args:
        text: The text.
        place: Where it stands.
        account: As in `strict_json`.

    Raises:
        FormatError: The text isn't JSON of that kind.
        BudgetError: What it says is more than the job may hold.
    """
    return _parsed(text, place, account or Account(), {})


def _parsed(text: bytes | str, place: object, account: Account, rules: dict[str, Any]) -> Any:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    size = len(raw) if raw.isascii() else 4 * len(raw)  # one character may make four bytes of each
    account.hold(size, "A JSON document", f"{place}")  # the strings in it, once they are values
    with account.passing() as taken:
        taken.hold(size, "A JSON document", f"{place}")
        few = account.budget.limits.held // 8
        account.nodes(_most_values(raw, few), "A JSON document", f"{place}")
        try:
            value = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text, **rules)
            too_deep = _deeper(value, MAX_DEPTH)
        except RecursionError:  # how deep Python's parser itself can go differs between its versions
            too_deep = True
        except ValueError as error:
            raise FormatError("This isn't valid JSON.", place=place, found=error) from None
    if too_deep:
        raise FormatError(
            "This isn't valid JSON of a reasonable depth.",
            place=place,
            expected=f"at most {MAX_DEPTH} levels",
            found="more",
        )
    return value


def _most_values(text: bytes, few: int) -> int:
    """Returns how many values a text of JSON has at most: each but the first follows a mark; keys count as values.

    Where they would need more than `few` bytes, marks inside of strings aren't counted.
    """
    values = 1 + _marks(text)
    if values * NODE_BYTES <= few:
        return values
    return 1 + _marks_outside_strings(text)


def _marks_outside_strings(text: bytes) -> int:
    """Counts the marks between strings, up to the first place that breaks the format."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    count = is_inside = 0
    for start in range(0, len(plain), _PART):
        pieces = plain[start : start + _PART].split(b'"')
        count += _marks(b"".join(pieces[is_inside::2]))
        is_inside = (is_inside + len(pieces) - 1) % 2
    return count


def _marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{") + text.count(b":")


def _deeper(value: Any, levels: int) -> bool:
    """Tells whether lists and objects stand in one another more than so many times."""
    nodes = [value]
    for _ in range(levels + 1):
        nodes = [n for n in nodes if isinstance(n, (dict, list))]
        if not nodes:
            return False
        nodes = [child for n in nodes for child in (n.values() if isinstance(n, dict) else n)]
    return True


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} occurs twice")
    return record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} isn't JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:40]} overflows")
    return value


def loose(tree: Mapping[Any, Tree]) -> dict[Any, Tensor]:
    """Returns the tensors that stand at the top of a tree."""
    return {name: part for name, part in tree.items() if isinstance(part, Tensor)}


def without(tree: Tree, path: Path) -> Tree:
    """Returns a tree without what lies at a path, nor what is empty then; None stays where a list holds more.

    Example:
        >>> without({"a": {"b": 1, "c": 2}, "d": [3, 4]}, ("a", "b")), without({"d": [3, 4]}, ("d", 0))
        ({'a': {'c': 2}, 'd': [3, 4]}, {'d': [None, 4]})
    """
    key, rest = path[0], path[1:]
    if isinstance(tree, list | tuple):
        parts = [(without(part, rest) if rest else None) if i == key else part for i, part in enumerate(tree)]
        return parts if len(parts) > 1 else parts[0] or []
    node = dict(tree) if isinstance(tree, Mapping) else {}
    left = without(node[key], rest) if rest and key in node else None
    return {name: left if name == key else part for name, part in node.items() if name != key or left}


def put(tree: Tree, path: Sequence[Any], value: Tree) -> Tree:
    """Returns a tree with another value at a path; dicts and lists on the way are copied, or made.

    Raises:
        FormatError: The path is longer than `MAX_DEPTH`.
    """
    if not path:
        return value
    if len(path) > MAX_DEPTH:
        raise _too_deep(path)
    key = path[0]
    if isinstance(key, int):
        parts = list(tree) if isinstance(tree, list | tuple) else [None]
        return [put(part, path[1:], value) if i == key else part for i, part in enumerate(parts)]
    named = dict(tree) if isinstance(tree, Mapping) else {}
    return {**named, key: put(named.get(key), path[1:], value)}


def at(tree: Tree, path: Path) -> Any:
    """Returns what lies at a path; None if nothing does."""
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list | tuple) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return None
    return tree


def shipped_json(package: str, *names: str) -> Any:
    """Returns the content of a JSON file that ships with a package."""
    return json.loads(resources.files(package).joinpath(*names).read_text(encoding="utf-8"))
