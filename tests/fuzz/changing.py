"""Changes a valid sample: a tree in its structure, bytes in their order, always the same for the same `Random`.

Whoever draws decides how: `random.Random(seed)` for long runs, hypothesis' `randoms()` where a finding shall shrink,
a coverage-guided fuzzer's bytes (`atheris_run`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from statekit.tensors.tensor import Stored, Tensor, in_memory
from statekit.tensors.tree import Record

Odd = Callable[[Random], Any]

NUMBERS = (
    0, 1, -1, 2, 7, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**61, 2**62,
    2**63 - 1, 2**63, 2**64,
    -(2**31), -(2**63), -(2**63) - 1, 10**30, 2**2000, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("inf"),
    float("-inf"),
    float("nan"),
)  # fmt: skip
NAMES = (
    "", " ", ".", "..", "/", "a/b", "../../etc/passwd", "/etc/passwd", "a\0b", "a\\b", "\ud800", "\udcff",
    "a\nb", "\x1b[2J",
    "\u202e", "é", "😀", "x" * 300, "x" * 5000, "0", "1", "-1", "1e5", "nan", "None", "__class__", "$dict",
    "$tensor", "@",
    "{}", "%s", "[0]", "state", "params", "step", "args", "shape", "float32", "bfloat16", "<f4", "|O",
    "http://example.org/", "C:x",
)  # fmt: skip
BYTES = (b"", b"\0", b"\xff", b"\x80\x04.", b"a" * 300, bytes(range(256)))
CLASSES = (
    "torch.Size",
    "collections.OrderedDict",
    "builtins.set",
    "numpy.ndarray",
    "other.Thing",
    "os.system",
)
DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "bool", "uint8", "complex64", "float64")
SHAPES = ((), (0,), (1,), (3,), (2, 2), (4, 0), (1, 1, 1), (2, 3), (5, 1))
DEPTHS = (3, 20, 200)


def odd(random: Random) -> Any:
    """Returns a value that few places expect."""
    kind = random.randrange(12)
    if kind < 3:
        return random.choice(NUMBERS)
    if kind < 5:
        return random.choice(NAMES)
    if kind == 5:
        return random.choice((None, True, False))
    if kind == 6:
        return random.choice(BYTES)
    if kind == 7:
        return random.choice((list, dict, tuple))()
    if kind == 8:
        return Record(
            random.choice(CLASSES), random.choice(((), (1,), ([],))), random.choice((None, {}, (1, 2)))
        )
    if kind == 9:
        return tensor(random)
    if kind == 10:
        return random.choice(
            ([1, 2], [[]], {"a": 1}, {1: 2}, (1, "a"), [None], {"": None}, [{"name": "a"}], [-1], ["a", 1])
        )
    return nested(random)


def tensor(random: Random) -> Tensor:
    """Returns a small tensor of any dtype and shape."""
    import ml_dtypes

    name = random.choice(DTYPES)
    dtype = ml_dtypes.bfloat16 if name == "bfloat16" else name
    values = np.full(random.choice(SHAPES), random.choice((0, 1, 3)), dtype)
    return in_memory(values)


def nested(random: Random) -> Any:
    """Returns a value deep inside lists or dicts."""
    value: Any = 0
    for _ in range(random.choice(DEPTHS)):
        value = [value] if random.randrange(2) else {"a": value}
    return value


def like(value: Any, random: Random) -> Any:
    """Returns a value of the same kind that is another one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        change = random.randrange(5)
        if change == 0:
            return random.choice(NUMBERS)
        if change == 1:
            return -value
        if change == 2:
            return value + random.choice((-1, 1, 2**32))
        return (
            float(value)
            if isinstance(value, int) and abs(value) < 2**1000 and change == 3
            else f"{value!r:.50}"
        )
    if isinstance(value, str):
        change = random.randrange(4)
        at = random.randrange(len(value) + 1)
        if change == 0:
            return random.choice(NAMES)
        if change == 1:
            return value[:at] + random.choice(NAMES) + value[at:]
        return value[:at] if change == 2 else value.encode("utf-8", "surrogatepass")
    if isinstance(value, bytes):
        return changed_bytes(value, random)
    if isinstance(value, Tensor):
        if isinstance(value, Stored) and random.randrange(2):
            return tensor_like(value, random)
        return tensor(random)
    return odd(random)


def tensor_like(value: Tensor, random: Random) -> Tensor:
    """Returns a tensor with another shape or dtype."""
    shape = list(value.shape)
    if shape and random.randrange(2):
        axis = random.randrange(len(shape))
        change = random.randrange(3)
        if change == 0:
            shape[axis] += 1
        elif change == 1:
            del shape[axis]
        else:
            shape.insert(axis, 1)
        shape = [min(n, 64) for n in shape]
        return in_memory(np.zeros(shape, value.dtype))
    small = [min(n, 64) for n in shape]
    return in_memory(np.zeros(small, random.choice(("float32", "float16", "int32", "bool", "float64"))))


def children(node: Any) -> Sequence[Any]:
    """Returns the keys of what lies directly in a node."""
    if node.__class__ is dict:
        return list(node)
    if node.__class__ is list or node.__class__ is tuple:
        return range(len(node))
    return ("args", "state") if node.__class__ is Record else ()


def child(node: Any, key: Any) -> Any:
    """Returns what lies at a key."""
    return getattr(node, key) if node.__class__ is Record else node[key]


def with_child(node: Any, key: Any, value: Any) -> Any:
    """Returns a node with another value at a key."""
    if node.__class__ is Record:
        args, state = (value, node.state) if key == "args" else (node.args, value)
        return Record(node.name, args if isinstance(args, tuple) else (args,), state)
    if node.__class__ is tuple:
        return (*node[:key], value, *node[key + 1 :])
    copy = node.copy()
    copy[key] = value
    return copy


def somewhere(tree: Any, random: Random) -> list[Any]:
    """Returns the path of a node, drawn on the way down, so that what is near the top comes as often as all below."""
    path: list[Any] = []
    node = tree
    while True:
        keys = children(node)
        if not keys or (path and not random.randrange(6)):
            return path
        key = random.choice(keys)
        path.append(key)
        node = child(node, key)


def at(tree: Any, path: Sequence[Any]) -> Any:
    """Returns what lies at a path."""
    for key in path:
        tree = child(tree, key)
    return tree


def leads(tree: Any, path: Sequence[Any]) -> bool:
    """Tells whether a path leads to something in a tree."""
    if not path:
        return True
    return path[0] in children(tree) and leads(child(tree, path[0]), path[1:])


def put(tree: Any, path: Sequence[Any], value: Any) -> Any:
    """Returns a tree with another value at a path."""
    if not path:
        return value
    return with_child(tree, path[0], put(child(tree, path[0]), path[1:], value) if path[1:] else value)


def changed_tree(tree: Any, random: Random) -> Any:
    """Returns a tree with one to three changes in its structure."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path = somewhere(tree, random)
        tree = put(tree, path, _changed(at(tree, path), tree, random))
    return tree


def _changed(node: Any, tree: Any, random: Random) -> Any:
    keys = children(node)
    if not keys or random.randrange(3) == 0:
        change = random.randrange(5)
        if change == 0:
            return at(tree, somewhere(tree, random))  # of somewhere else
        if change == 1:
            return random.choice(([node], {"a": node}, (node,), (node, node)))
        return odd(random) if change == 2 else like(node, random)
    if node.__class__ is dict:
        return _changed_dict(node, list(keys), random)
    if node.__class__ is Record:
        change = random.randrange(3)
        if change == 0:
            return Record(
                random.choice((*CLASSES, node.name + "x", node.name.upper())), node.args, node.state
            )
        return Record(node.name, node.args[:-1], node.state) if change == 1 else Record(node.name, node.args)
    items = list(node)
    change = random.randrange(6)
    if change == 0:
        items.append(random.choice(items))
    elif change == 1:
        del items[random.randrange(len(items))]
    elif change == 2:
        items.reverse()
    elif change == 3:
        items.insert(random.randrange(len(items) + 1), odd(random))
    elif change == 4:
        items *= random.choice((2, 3))
    else:
        return (
            dict(enumerate(items))
            if random.randrange(2)
            else (tuple(items) if node.__class__ is list else items)
        )
    return items if node.__class__ is list else tuple(items)


def _changed_dict(node: dict[Any, Any], keys: list[Any], random: Random) -> Any:
    key, change = random.choice(keys), random.randrange(6)
    copy = node.copy()
    if change == 0:
        del copy[key]
    elif change == 1:
        copy[random.choice((*NAMES, 0, 1, -1, True, b"a", (), ("a", 0)))] = copy.pop(key)
    elif change == 2:
        copy[_odd_name(key, random)] = copy[key]
    elif change == 3:
        other = random.choice(keys)
        copy[key], copy[other] = copy[other], copy[key]
    elif change == 4:
        return list(copy.values()) if random.randrange(2) else list(copy.items())
    else:
        return dict(reversed(copy.items()))
    return copy


def _odd_name(key: Any, random: Random) -> Any:
    name = random.choice(NAMES)
    return f"{key}{name}" if random.randrange(2) and isinstance(key, str) else name


WORDS = tuple(
    struct.pack(code, number)
    for code, number in (
        ("<I", 0), ("<I", 1), ("<I", 2**31 - 1), ("<I", 2**31), ("<I", 2**32 - 1), ("<Q", 2**63 - 1), ("<Q", 2**63),
        ("<Q", 2**64 - 1), ("<Q", 2**40), ("<H", 2**16 - 1), ("<d", float("nan")), ("<d", float("inf")),
        (">I", 1), (">Q", 2**62),
    )
)  # fmt: skip


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Returns bytes with one to four of them flipped, cut, doubled, taken out, or replaced by a number that is odd."""
    raw = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        if not raw:
            return bytes(raw) + random.choice(BYTES)
        at, change = random.randrange(len(raw)), random.randrange(8)
        if change < 2:
            raw[at] ^= 1 << random.randrange(8)
        elif change == 2:
            raw[at] = random.randrange(256)
        elif change == 3:
            del raw[at:]
        elif change == 4:
            del raw[at : at + random.choice((1, 2, 4, 8, 64))]
        elif change == 5:
            end = at + random.choice((1, 2, 4, 8, 64))
            raw[at:at] = raw[at:end]
        elif change == 6:
            word = random.choice(WORDS)
            raw[at : at + len(word)] = word
        else:
            raw[at:at] = random.choice((*BYTES, *WORDS))
    return bytes(raw)
