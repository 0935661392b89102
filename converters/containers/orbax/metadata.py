"""The tree of an Orbax item as its `_METADATA` tells it: what each leaf is, and under which keys it hangs.

A NamedTuple's fields stand there as a dict's keys do, and its class isn't told; a tuple is a sequence.
Source: google/orbax orbax/checkpoint/_src/metadata/tree.py, empty_values.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statekit.budget import Account
from statekit.errors import Faults, FormatError, UsageError
from statekit.tensors.tensor import Shape, Tensor
from statekit.tensors.tree import MAX_DEPTH, Tree, strict_json, walk

_SEQUENCE, _DICT = 1, 2
_EMPTY: dict[str, Any] = {"None": None, "NamedTuple": None, "Dict": {}, "List": [], "Tuple": ()}
STRING = "string"
"""The type of a leaf that lies in the item's file of strings."""
STRINGS = "_strings.json"
"""That file."""


@dataclass(frozen=True)
class LeafMetadata:
    """A leaf of the tree.

    Attributes:
        path: Its keys; an int is an index.
        kind: A type that Orbax names, such as `jax.Array`, `scalar`, `string`, or one of the empty ones.
        written: The shape of the part that one device wrote, if it is said.

    Source: google/orbax checkpoint/_src/serialization/types.py, `ParamInfo.write_shape`.
    """

    path: tuple[str | int, ...]
    kind: str
    written: Shape | None = None

    @property
    def array(self) -> str:
        """The name of its array in the store: Orbax joins the path with `.`."""
        return ".".join(map(str, self.path))

    @property
    def is_array(self) -> bool:
        """Whether there is an array behind it."""
        return self.kind not in _EMPTY and self.kind != STRING


@dataclass(frozen=True)
class TreeMetadata:
    """What `_METADATA` says.

    Attributes:
        place: Where it is, for messages.
        tree: For each leaf, what is said of it.
        zarr_format: The format of their arrays, 2 or 3.
        complete: Whether chunks were stored even where they are all fill value, so that an absent one is damage.
        custom: What the user kept with it.
    """

    place: str
    tree: Mapping[str, Any]
    zarr_format: int
    complete: bool
    custom: Tree

    def entries(self) -> tuple[LeafMetadata, ...]:
        """Returns the leaves.

        Raises:
            FormatError: Some can't be read, or lie in the same array; lists every one.
        """
        entries, faults = list[LeafMetadata](), Faults()
        for text, stated in self.tree.items():
            entry = _entry(stated)
            if entry is None:
                faults.add(f"can't be read: {stated!r:.200}", text[:200])
            else:
                entries.append(entry)
        owners: dict[str, LeafMetadata] = {}
        faults += [
            ("lies in the same array as another leaf", entry.array[:200])
            for entry in entries
            if entry.is_array and owners.setdefault(entry.array, entry) is not entry
        ]
        faults.check(
            FormatError,
            "Leaves of an Orbax tree can't be read",
            place=self.place,
            expected="keys, and an array, a string, or nothing",
        )
        return tuple(entries)


def parse(data: bytes, place: str, account: Account | None = None) -> TreeMetadata:
    """Reads `_METADATA`.

    Raises:
        FormatError: It isn't such metadata.
    """
    document = strict_json(data, place, account)
    tree = document.get("tree_metadata") if isinstance(document, dict) else None
    if not isinstance(tree, dict):
        raise FormatError("The metadata of an Orbax item has no tree.", place=place)
    complete = document.get("store_array_data_equal_to_fill_value") is True
    zarr_format = 3 if document.get("use_zarr3") else 2
    return TreeMetadata(place, tree, zarr_format, complete, document.get("custom_metadata"))


def _entry(stated: Any) -> LeafMetadata | None:
    try:
        keys = stated["key_metadata"]
        path = tuple(int(k["key"]) if k["key_type"] == _SEQUENCE else str(k["key"]) for k in keys)
        value = stated["value_metadata"]
        kind, skipped, shape = value["value_type"], value.get("skip_deserialize"), value.get("write_shape")
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    sound = shape is None or (isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape))
    if not isinstance(kind, str) or not sound or len(path) > MAX_DEPTH or any(k == "" for k in path):
        return None
    if bool(skipped) != (kind in _EMPTY):
        return None
    return LeafMetadata(path, kind, None if shape is None else tuple(shape))


def tree_of(entries: tuple[LeafMetadata, ...], leaves: Mapping[int, Any], place: str) -> Tree:
    """Builds the tree of dicts and lists.

    Args:
        entries: Its leaves.
        leaves: By position among the entries, what stands at those that aren't empty.
        place: Where the metadata is, for messages.

    Raises:
        FormatError: A leaf has children, or occurs twice.
    """
    values = [leaves[i] if i in leaves else _EMPTY[entry.kind] for i, entry in enumerate(entries)]
    if not entries:
        return {}
    if len(entries) == 1 and entries[0].path == ():
        return values[0]
    root: dict[str | int, Any] = {}
    inner = {id(root)}
    for entry, leaf in zip(entries, values, strict=True):
        node, shown = root, "/".join(map(str, entry.path))
        for key in entry.path[:-1]:
            if key not in node:
                node[key] = {}
                inner.add(id(node[key]))
            node = node[key]
            if id(node) not in inner:
                raise FormatError("A leaf of an Orbax tree has children.", place=place, found=shown)
        if not entry.path or entry.path[-1] in node:
            raise FormatError("A leaf of an Orbax tree occurs twice.", place=place, found=shown)
        node[entry.path[-1]] = leaf
    return _with_lists(root)


def _with_lists(root: dict[str | int, Any]) -> Tree:
    """Turns dicts whose keys are the ints 0, 1, 2 ... into lists, children first."""
    top: dict[str, Any] = {"": root}
    order: list[tuple[Any, Any]] = [(top, "")]
    for holder, key in order:
        order += [(holder[key], k) for k, child in holder[key].items() if isinstance(child, dict)]
    for holder, key in reversed(order):
        node = holder[key]
        if node and all(type(k) is int for k in node) and sorted(node) == list(range(len(node))):
            holder[key] = [node[i] for i in range(len(node))]
    return top[""]


def document_of(tree: Tree) -> dict[str, Any]:
    """Returns `_METADATA` of a tree, its arrays in format 2 of zarr.

    Arrays are `np.ndarray`, so that a plain restore needs no `_sharding`.

    Raises:
        UsageError: The tree holds what Orbax can't.
        FormatError: A name has an empty part, which can't be read again.
    """
    entries = {}
    nameless = Faults(("has an empty part", "/".join(map(str, path))) for path, _ in walk(tree) if "" in path)
    nameless.check(FormatError, "Names can't be those of an Orbax tree", remedy="rename the parameters")
    for path, leaf in walk(tree):
        keys = [{"key": str(key), "key_type": _SEQUENCE if isinstance(key, int) else _DICT} for key in path]
        entries[str(tuple(map(str, path)))] = {"key_metadata": keys, "value_metadata": _value(path, leaf)}
    return {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _value(path: tuple[Any, ...], leaf: Any) -> dict[str, Any]:
    if isinstance(leaf, Tensor):
        return {"value_type": "np.ndarray", "skip_deserialize": False, "write_shape": list(leaf.shape)}
    if isinstance(leaf, str):
        return {"value_type": STRING, "skip_deserialize": False}
    for kind in ("None", "Dict", "List", "Tuple"):
        if type(leaf) is type(_EMPTY[kind]) and leaf == _EMPTY[kind]:
            return {"value_type": kind, "skip_deserialize": True}
    raise UsageError(
        "An Orbax checkpoint can't hold this value.",
        place="/".join(map(str, path)),
        expected="arrays, strings, None and empty containers",
        found=type(leaf).__name__,
    )
