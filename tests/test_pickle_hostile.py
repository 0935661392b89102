"""Nothing that a pickle asks to be run is, and absurd pickles end early."""

from __future__ import annotations

import os
import pathlib
import pickle
import random
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.converters.formats.pickle.reader import TruncatedPickle, read_pickle
from statekit.errors import FormatError, RefusedError
from statekit.tensors.tree import Record, tensor_names, walk


def read(data: bytes) -> Any:
    return read_pickle(data, "test").value


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def attacks(canary: Path) -> Iterator[tuple[str, bytes]]:
    command = f"touch {canary}"
    arg = text(command)
    yield "global", b"\x80\x02cos\nsystem\n" + arg + b"\x85R."
    yield "posix", b"cposix\nsystem\n" + arg + b"\x85R."
    yield "stack global", b"\x80\x04" + text("os") + text("system") + b"\x93" + arg + b"\x85R."
    memo = text("os") + b"\x940" + text("system") + b"\x940"
    yield "names from the memo", b"\x80\x04" + memo + b"h\x00h\x01\x93" + arg + b"\x85R."
    yield "inst", b"(" + arg + b"ios\nsystem\n."
    yield "obj", b"(cos\nsystem\n" + arg + b"o."
    yield "eval", b"c__builtin__\neval\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R."
    yield "exec", b"cbuiltins\nexec\n" + text(f"open({str(canary)!r}, 'w')") + b"\x85R."
    yield "popen", b"csubprocess\nPopen\n(" + text("touch") + text(str(canary)) + b"l\x85R."
    yield "getattr", b"cbuiltins\ngetattr\ncos\nsystem\n" + text("__call__") + b"\x86R" + arg + b"\x85R."
    yield "third party", b"cnumpy.testing._private.utils\nrunstring\n" + arg + b"}\x86R."
    yield "nested name", b"\x80\x04" + text("pathlib") + text("os.system") + b"\x93" + arg + b"\x85R."
    yield "under a container", b"(lp0\n(dp1\n" + text("a") + b"cos\nsystem\n" + arg + b"\x85Rsa."
    yield "calls a call", b"cfunctools\npartial\ncos\nsystem\n" + arg + b"\x86R)R."
    yield "newobj_ex of copyreg", b"ccopyreg\n__newobj__\n(cos\nsystem\n" + arg + b"tR)R."
    yield "reduce of a list", b"](" + arg + b"tR."
    yield "unpickles", b"cpickle\nloads\n" + b"B" + struct.pack("<I", 3) + b"cos\x85R."
    yield "imports", b"c__builtin__\n__import__\n" + text("os") + b"\x85R."
    yield "code object", b"ctypes\nCodeType\n)R."
    yield "marshal", b"cmarshal\nloads\n" + arg + b"\x85R."
    for code in (b"\x82\x01", b"\x83\x01\x00", b"\x84\x01\x00\x00\x00"):
        yield f"extension {code[0]:#x}", b"\x80\x02" + code + arg + b"\x85R."
    yield "persistent id as text", b"P" + command.encode() + b"\n."
    yield "persistent id", arg + b"Q."
    yield "out-of-band buffer", b"\x80\x05\x97."


def test_nothing_runs(canary: Path) -> None:
    for name, data in attacks(canary):
        with pytest.raises(FormatError) as caught:
            read(data)
        assert not canary.exists(), name
        assert "byte " in str(caught.value.place), name
    assert isinstance(caught.value, RefusedError)


def test_the_attacks_are_live(canary: Path) -> None:
    """The control: Python itself runs the first of them."""
    name, data = next(attacks(canary))
    assert name == "global"
    pickle.loads(data)
    assert canary.exists()


def test_a_refusal_names_the_function_and_its_place() -> None:
    with pytest.raises(RefusedError) as caught:
        read(b"\x80\x02cos\nsystem\nX\x01\x00\x00\x00a\x85R.")
    assert "os.system" in str(caught.value)
    assert "byte 20" in str(caught.value)


def test_text_of_the_file_is_shown_without_control_characters() -> None:
    with pytest.raises(RefusedError) as caught:
        read(b"\x80\x04" + text("os\x1b[31m") + text("system\r") + b"\x93)R.")
    assert "\x1b" not in str(caught.value)


def test_names_alone_are_data(canary: Path) -> None:
    assert read(b"cos\nsystem\n.") == Record("os.system")
    made = b"cos\nsystem\n" + text(f"touch {canary}") + b"\x85\x81."  # made, not called
    assert read(made).name == "os.system"
    assert not canary.exists()


DEEP_KEY = b"}" + b")" + b"\x85" * 100_000 + b"K\x01s."
BOMBS = {
    "huge LONG4": b"\x80\x02\x8b" + struct.pack("<i", 2_000_000) + b"\x01" * 2_000_000 + b".",
    "negative LONG4": b"\x80\x02\x8b" + struct.pack("<i", -5) + b".",
    "long text number": b"L" + b"9" * 1_000_000 + b"L\n.",
    "long text int": b"I" + b"9" * 1_000_000 + b"\n.",
    "too many opcodes": b"N0" * 2_000_000 + b"N.",
    "marks": b"(" * 900_000 + b".",
    "huge key": b"}" + b"\x8a\x09" + b"\xff" * 8 + b"\x01" + b"Ns.",
    "deep key": DEEP_KEY,
    "wide key": b"}(" + b"N" * 5000 + b"tNs.",
    "second state": b"cm\nC\n)\x81}b}b.",
    "items of a number": b"K\x01(K\x02e.",
    "entries of a list": b"](K\x01K\x02u.",
    "key without value": b"}(K\x01u.",
    "state of a list": b"]}b.",
    "unknown opcode": b"\xff.",
    "protocol 9": b"\x80\x09N.",
    "empty": b"\x80\x02.",
    "underflow": b"0.",
    "tuple2 of one": b"K\x01\x86.",
    "no mark": b"K\x01t.",
    "memo miss": b"h\x05.",
    "negative memo": b"Np-1\n.",
    "name of a number": b"K\x01K\x02\x93.",
    "class of a number": b"K\x01)\x81.",
    "arguments in a list": b"ccollections\nOrderedDict\n]R.",
    "arguments that don't fit": b"ccollections\nOrderedDict\n(K\x01tR.",
    "array larger than its bytes": pickle.dumps(np.zeros(3), 2).replace(b"K\x03\x85", b"K\x04\x85"),
    "bad codec": b"c_codecs\nencode\n(" + text("a") + text("rot13") + b"tR.",
    "bad utf-8": b"X\x01\x00\x00\x00\xff.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_absurd_pickles_end_early(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(FormatError):
        read(BOMBS[name])
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_lengths_beyond_the_file_allocate_nothing() -> None:
    for code, layout in ((b"X", "<I"), (b"B", "<I"), (b"\x8d", "<Q"), (b"\x8e", "<Q"), (b"\x96", "<Q")):
        huge = 2 ** (8 * struct.calcsize(layout)) - 1
        with pytest.raises(TruncatedPickle):
            read(b"\x80\x05" + code + struct.pack(layout, huge) + b"abc.")


def test_sharing_that_expands_is_refused() -> None:
    doubled = b"".join(
        b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)
    )  # each list holds the last one twice
    start = time.process_time()
    with pytest.raises(RefusedError, match="too large"):
        read(b"\x80\x02]q\x00" + doubled + b".")
    assert time.process_time() - start < 1


def test_sharing_as_such_is_kept() -> None:
    doubled = b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(10))
    assert len(list(walk(read(b"\x80\x02]q\x00" + doubled + b".")))) == 2**10


@pytest.mark.parametrize(
    "cycle",
    [b"]q\x00h\x00a.", b"}q\x00K\x01h\x00s.", b"]q\x00(h\x00ta.", b"]q\x00cm\nC\n)\x81h\x00ba."],
    ids=["list", "dict", "through a tuple", "through an object"],
)
def test_cycles_are_refused(cycle: bytes) -> None:
    with pytest.raises(RefusedError, match="holds itself"):
        read(cycle)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RefusedError, match="levels"):
        read(b")" + b"\x85" * 200_000 + b".")
    assert tensor_names(read(b"K\x01" + b"\x85" * 500 + b".")) == {}


def rich() -> bytes:
    value = {
        "a": [1, 2.5, None, True, "text", 2**70, (1, 2, 3)],
        "o": pathlib.PurePosixPath("a/b"),
        "n": np.arange(3.0),
        "s": {1},
    }
    return pickle.dumps([value, value], 2) + pickle.dumps(value, 4)


def test_every_prefix_is_truncated() -> None:
    value = pickle.dumps(
        {"a": [1, 300, 70_000, 2.5, "text", b"b", 2**70, (1, 2)], "o": pathlib.PurePosixPath("a/b")}, 4
    )
    for protocol_data in (value, pickle.dumps([1.5, "x", 2**40, {"k": ()}], 0)):
        for end in range(len(protocol_data)):
            with pytest.raises(TruncatedPickle):
                read(protocol_data[:end])


def test_damaged_pickles_give_values_or_format_errors() -> None:
    data = rich()
    chance = random.Random(1)
    refused = 0
    for _ in range(4000):
        broken = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            broken[chance.randrange(len(broken))] = chance.randrange(256)
        try:
            read(bytes(broken))
        except FormatError:
            refused += 1
    assert refused > 1000


def test_the_process_is_as_before() -> None:
    """A name in a pickle imports nothing."""
    import sys

    before = set(sys.modules)
    read(b"cantigravity\nAnything\n)\x81.")
    read(b"cthis\nZen\n.")
    assert set(sys.modules) == before
    assert os.getcwd() == str(Path.cwd())
