"""Pickles from inert trees, and pickles taken apart into opcodes, for changing either."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from fuzz.changing import NAMES, NUMBERS
from statekit.converters.formats.pickle.names import CALLS
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Record

PERSISTENT = "persistent id"
"""Name of a Record that stands for one."""
PAIRS = "pairs"
"""Name of a Record that stands for a dict, by its pairs: keys may be what Python can't hash."""


def pickled(tree: Any) -> bytes:
    """Returns a pickle of protocol 2 that our reader reads as this tree."""
    out = bytearray(b"\x80\x02")
    _put(out, tree)
    return bytes(out) + b"."


def _put(out: bytearray, node: Any) -> None:
    if node is None or isinstance(node, bool):
        out += {None: b"N", True: b"\x88", False: b"\x89"}[node]
    elif isinstance(node, int):
        raw = node.to_bytes(node.bit_length() // 8 + 1, "little", signed=True)
        out += b"\x8b" + struct.pack("<i", len(raw)) + raw
    elif isinstance(node, float):
        out += b"G" + struct.pack(">d", node)
    elif isinstance(node, str):
        raw = node.encode("utf-8", "surrogatepass")
        out += b"X" + struct.pack("<I", len(raw)) + raw
    elif isinstance(node, bytes):
        out += b"B" + struct.pack("<I", len(node)) + node
    elif isinstance(node, dict):
        out += b"}("
        for key, value in node.items():
            _put(out, key)
            _put(out, value)
        out += b"u"
    elif isinstance(node, (list, tuple)):
        out += b"](" if isinstance(node, list) else b"("
        for item in node:
            _put(out, item)
        out += b"e" if isinstance(node, list) else b"t"
    elif isinstance(node, Record):
        _put_record(out, node)
    elif isinstance(node, Tensor):
        _put_record(out, _array(node))
    else:
        raise TypeError(f"no pickle of {type(node).__name__}")


def _array(tensor: Tensor) -> Record:
    values = tensor.read()
    code = (
        Record("numpy.dtype", (values.dtype.str.lstrip("<>|="), False, True))
        if values.dtype.kind != "V"
        else None
    )
    state = (1, tensor.shape, code, False, values.tobytes())
    return Record("numpy.ndarray", (Record("numpy.ndarray"), (0,), b"b"), state)


def _put_record(out: bytearray, node: Record) -> None:
    if node.name == PERSISTENT:
        _put(out, node.args[0] if node.args else None)
        out += b"Q"
        return
    if node.name == PAIRS:
        out += b"}("
        for pair in node.args:
            for part in pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None):
                _put(out, part)
        out += b"u"
        return
    module, _, name = node.name.rpartition(".")
    called = (
        ("numpy._core.multiarray", "_reconstruct")
        if node.name == "numpy.ndarray" and node.args
        else (module, name)
    )
    _put(out, called[0])
    _put(out, called[1])
    out += b"\x93"
    if node.args or node.state is not None:
        _put(out, node.args)
        out += b"R" if node.name in CALLS or called[1][:1].islower() or called[1][:1] == "_" else b"\x81"
    if node.state is not None:
        _put(out, node.state)
        out += b"b"


Opcodes = tuple[bytes, ...]


def opcodes(data: bytes) -> Opcodes:
    """Returns the opcodes of one pickle or several, one after the other, each with its argument."""
    pieces: list[bytes] = []
    start = 0
    while start < len(data) and data[start : start + 1] in b"\x80(}]c":
        ends = [int(str(position)) for _, _, position in pickletools.genops(data[start:])]
        stop = start + ends[-1] + 1
        pieces += [data[start + a : start + b] for a, b in zip(ends, [*ends[1:], ends[-1] + 1], strict=True)]
        start = stop
    return (*pieces, data[start:]) if start < len(data) else tuple(pieces)


def _odd_opcodes() -> list[bytes]:
    plain = [
        bytes([code])
        for code in b"Nt\x85\x86\x87()]}lde0s12aub.QRo\x81\x92\x93\x94\x8f\x90\x91\x88\x89\x97\x98"
    ]
    texts = [
        b"X" + struct.pack("<I", len(raw)) + raw
        for raw in (n.encode("utf-8", "surrogatepass") for n in NAMES)
    ]
    numbers = [b"J" + struct.pack("<i", n) for n in NUMBERS if isinstance(n, int) and -(2**31) <= n < 2**31]
    numbers += [b"G" + struct.pack(">d", n) for n in NUMBERS if isinstance(n, float)]
    wide = [n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True) for n in NUMBERS if isinstance(n, int)]
    numbers += [b"\x8b" + struct.pack("<i", len(raw)) + raw for raw in wide]
    names = [
        *CALLS, "numpy.ndarray", "numpy.dtype", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch.Size", "torch.device",
        "torch._tensor._rebuild_from_type_v2", "torch.FloatStorage", "torch.float32", "datetime.datetime",
        "os.system",
        "other.Thing", "torch.distributed.checkpoint.metadata.MetadataIndex", "mxnet.ndarray.ndarray.NDArray",
        "torch._utils._rebuild_device_tensor_from_numpy", "torch._utils._rebuild_qtensor",
    ]  # fmt: skip
    globals_ = [b"c%s\n%s\n" % (n.rpartition(".")[0].encode(), n.rpartition(".")[2].encode()) for n in names]
    memos = [
        b"q\0",
        b"h\0",
        b"h\1",
        b"h\2",
        b"r\xff\xff\xff\xff",
        b"j\xff\xff\xff\xff",
        b"g-1\n",
        b"p-1\n",
        b"g0\n",
    ]
    lines = [
        b"I01\n",
        b"I00\n",
        b"Ix\n",
        b"L5L\n",
        b"Fnan\n",
        b"F1e999\n",
        b"S'a'\n",
        b"S'\\x'\n",
        b"Va\\ud800\n",
        b"V\\U1\n",
    ]
    sized = [
        b"C\x01a",
        b"B\xff\xff\xff\xff",
        b"\x8e" + b"\xff" * 8,
        b"T\xff\xff\xff\xff",
        b"U\x01\xff",
        b"\x8a\x00",
        b"\x96" + bytes(8),
    ]
    return [
        *plain,
        *texts,
        *numbers,
        *globals_,
        *memos,
        *lines,
        *sized,
        b"\x95" + bytes(8),
        b"\x80\x06",
        b"Px\n",
        b"ios\nx\n",
    ]


ODD_OPCODES = _odd_opcodes()


def changed_opcodes(pieces: Sequence[bytes], random: Random) -> bytes:
    """Returns a pickle with one to three of its opcodes left out, doubled, exchanged or replaced."""
    changed = list(pieces)
    for _ in range(random.choice((1, 1, 2, 3))):
        at, change = random.randrange(len(changed)), random.randrange(6)
        if change == 0 and len(changed) > 1:
            del changed[at]
        elif change == 1:
            changed.insert(at, changed[at])
        elif change == 2:
            other = random.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
        elif change == 3:
            changed.insert(at, random.choice(ODD_OPCODES))
        elif change == 4:
            changed[at] = random.choice(changed)
        else:
            changed[at] = random.choice(ODD_OPCODES)
    return b"".join(changed)


def samples() -> list[bytes]:
    """Returns small pickles of every protocol and of much that checkpoints hold."""
    import collections
    import pickle

    tree: dict[Any, Any] = {
        "step": 4, "lr": 1e-3, "betas": (0.9, 0.999), "names": ["a", "b"], "raw": b"\0\1", "none": None,
        "set": {1, 2},
        "flags": [True, False], "big": 2**70, "ordered": collections.OrderedDict(a=1),
        3: {"count": collections.Counter("ab")},
        "weights": np.arange(6, dtype=np.float32).reshape(2, 3), "scalar": np.float64(0.5), "complex": 1j,
    }  # fmt: skip
    tree["shared"] = tree["names"]
    made = [pickle.dumps(tree, protocol) for protocol in (0, 1, 2, 4, 5)]
    return [
        *made,
        pickled({"a": Record("other.Thing", (1,), {"x": [1, 2]}), "b": (1, Record("torch.float32"))}),
    ]
