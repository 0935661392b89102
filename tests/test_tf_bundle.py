"""TensorFlow's checkpoints: read as it wrote them, written as it writes them, and what damage does."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_files import save

from goldens import GOLDEN
from statekit.conversion.registry import detect_container
from statekit.converters.containers.tf_bundle import CONTAINER
from statekit.converters.formats.crc import crc32c
from statekit.converters.formats.tensor_bundle import entries as tf_entries
from statekit.converters.formats.tensor_bundle import table as tf_table
from statekit.converters.formats.tensor_bundle.entries import BundleEntry, entry_bytes, header
from statekit.converters.formats.tensor_bundle.table import MAGIC, masked, read_table, to_varint, write_table
from statekit.errors import BudgetError, CorruptError, FormatError, NotFoundError, RefusedError
from statekit.files.source import File
from statekit.tensors.digest import tensor_bytes
from statekit.tensors.tensor import DTYPES, in_memory

PREFIXES = sorted(
    path.with_suffix("")
    for system in ("t2t", "mesh_tf", "keras", "t5x_checkpoints")
    for path in (GOLDEN / system).glob("**/*.index")
)


def named(prefix: Path) -> str:
    return prefix.relative_to(GOLDEN).as_posix()


def small() -> dict[str, Any]:
    """A tree with every dtype, empty and scalar arrays, slices and strings."""
    tree: dict[str, Any] = {
        name: in_memory(np.arange(6).reshape(2, 3).astype(dtype)) for name, dtype in DTYPES.items()
        if tf_entries.code_of(dtype) is not None
    }  # fmt: skip
    whole = np.arange(60, dtype=np.float32).reshape(10, 6)
    tree["parted"] = {"10 6 0,4:0,6": in_memory(whole[:4]), "10 6 4,6:0,6": in_memory(whole[4:])}
    tree["scope/step"] = in_memory(np.asarray(7, np.int64))
    tree["scope/empty"] = in_memory(np.zeros((0, 3), np.float32))
    tree["graph"], tree["words"] = b"\0proto\xff", [b"", b"two"]
    return tree


@pytest.mark.parametrize("prefix", PREFIXES, ids=named)
def test_what_tensorflow_wrote_is_written_again_byte_for_byte(prefix: Path, tmp_path: Path) -> None:
    with CONTAINER.open(prefix) as opened:
        again = save(opened.tree, tmp_path / "again", opened.step or 0)
        with CONTAINER.open(again) as written:
            assert written.tensors.keys() == opened.tensors.keys()
            for name, tensor in opened.tensors.items():
                assert written.tensors[name].read().tobytes() == tensor.read().tobytes()
        names_saved = (
            "_CHECKPOINTABLE_OBJECT_GRAPH" not in opened.tree
        )  # tf.train.Checkpoint has an order of its own
        if names_saved and opened.meta["shards"] == 1:
            for part in (".index", ".data-00000-of-00001"):
                old, new = (p.with_name(p.name + part).read_bytes() for p in (prefix, again))
                assert old == new
        elif names_saved:
            tables = [read_table(p.with_name(f"{p.name}.index").read_bytes(), p) for p in (prefix, again)]
            assert tables[0].keys() == tables[1].keys()


def test_there_are_recordings_of_tensorflow() -> None:
    assert PREFIXES


@pytest.mark.tensorflow
def test_tensorflow_reads_what_we_write(tmp_path: Path) -> None:
    import tensorflow as tf

    tree = small()
    reader = tf.train.load_checkpoint(str(save(tree, tmp_path / "run")))
    assert tf.train.latest_checkpoint(str(tmp_path / "run")) == str(tmp_path / "run" / "model.ckpt-3")
    assert set(reader.get_variable_to_shape_map()) == set(tree)
    for name, value in tree.items():
        if name == "parted":
            assert np.array_equal(reader.get_tensor(name), np.arange(60, dtype=np.float32).reshape(10, 6))
        elif isinstance(value, bytes):
            assert reader.get_tensor(name) == value
        elif isinstance(value, list):
            assert list(reader.get_tensor(name)) == value
        else:
            theirs = np.asarray(reader.get_tensor(name))
            assert theirs.dtype.name == value.dtype.name and theirs.tobytes() == value.read().tobytes()


@pytest.mark.tensorflow
def test_large_indexes_are_tensorflows_too(tmp_path: Path) -> None:
    """Several blocks in the index: names of 2 to 300 bytes."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    names = sorted(f"{i % 7}/{random.bytes(int(random.integers(1, 150))).hex()}" for i in range(8000))
    values = [np.float32(i) for i in range(len(names))]
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "theirs"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=values,
    )
    tree = {name: in_memory(np.asarray(value)) for name, value in zip(names, values, strict=True)}
    ours = save(tree, tmp_path / "ours").with_name("model.ckpt-3.index").read_bytes()
    assert ours == (tmp_path / "theirs.index").read_bytes() and len(ours) > 2 * 256 * 2**10


def test_every_value_comes_back_and_blocks_are_read_alone(tmp_path: Path) -> None:
    tree = small()
    with CONTAINER.open(save(tree, tmp_path / "run")) as opened:
        assert list(opened.tree) == sorted(tree)
        assert (
            opened.step == 3
            and opened.tree["words"] == tree["words"]
            and opened.tree["graph"] == tree["graph"]
        )
        part = opened.tree["parted"]["10 6 4,6:0,6"]
        assert np.array_equal(part.read((slice(1, 3), slice(2, 4))), [[32, 33], [38, 39]])
        assert opened.tree["scope/empty"].shape == (0, 3)


def step_of(path: Path, step: int | None = None) -> int | None:
    with CONTAINER.open(path, step) as opened:
        return opened.step


def test_a_folder_means_the_checkpoint_that_its_text_file_names(tmp_path: Path) -> None:
    run = save({"a": in_memory(np.ones(2, np.float32))}, tmp_path / "run", 9).parent
    for name in (".index", ".data-00000-of-00001"):
        (run / f"model.ckpt-10{name}").write_bytes((run / f"model.ckpt-9{name}").read_bytes())
    assert step_of(run) == 9 and step_of(run, 10) == 10
    (run / "checkpoint").write_text('model_checkpoint_path: "/gone/model.ckpt-10"\n')
    assert step_of(run) == 10
    (run / "checkpoint").unlink()
    assert step_of(run) == 10
    assert step_of(run / "model.ckpt-9.index") == 9
    for path in (
        run,
        run / "model.ckpt-9",
        run / "model.ckpt-9.index",
        run / "model.ckpt-9.data-00000-of-00001",
    ):
        assert detect_container(path)[0].name == "tf-bundle"
    with pytest.raises(NotFoundError, match=r"model\.ckpt-9, model\.ckpt-10|model\.ckpt-10, model\.ckpt-9"):
        CONTAINER.open(run, 4)
    with pytest.raises(NotFoundError):
        CONTAINER.open(run / "model.ckpt-4")


def test_damage_is_an_error_before_a_value_is_trusted(tmp_path: Path) -> None:
    prefix = save(
        {"a": in_memory(np.arange(8, dtype=np.float32)), "b": in_memory(np.ones(8, np.float32))},
        tmp_path / "r",
    )
    data, index = (prefix.with_name(prefix.name + part) for part in (".data-00000-of-00001", ".index"))
    right, table = data.read_bytes(), index.read_bytes()
    for at in (0, 31):
        data.write_bytes(right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :])
        with CONTAINER.open(prefix) as opened:
            with pytest.raises(CorruptError, match="checksum"):
                opened.tree["a"].read((slice(7, 8),))
            assert opened.tree["b"].read().sum() == 8
    for spoilt in (right[:-1], b""):
        data.write_bytes(spoilt)
        with pytest.raises(CorruptError, match="beyond the end"):
            CONTAINER.open(prefix)
    data.unlink()
    with pytest.raises(CorruptError, match="is missing"):
        CONTAINER.open(prefix)
    data.write_bytes(right)
    for at in range(len(table)):
        index.write_bytes(table[:at] + bytes([table[at] ^ 0x10]) + table[at + 1 :])
        try:  # the footer has a few bytes that say nothing
            with CONTAINER.open(prefix) as opened:
                assert opened.tree["a"].read().tolist() == list(range(8)) and len(table) - at < 48
        except (CorruptError, FormatError, RefusedError):
            pass
    for cut in range(len(table)):
        index.write_bytes(table[:cut])
        with pytest.raises((CorruptError, FormatError)):
            CONTAINER.open(prefix)


def test_a_large_tensor_is_read_once_with_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.arange(2**22 + 2**20, dtype=np.float32)
    prefix = save({"a": in_memory(values)}, tmp_path / "r")
    counts, whole = list[int](), File.read_into

    def read_into(file: File, start: int, into: memoryview) -> None:
        counts.append(len(into))
        whole(file, start, into)

    monkeypatch.setattr(File, "read_into", read_into)
    with CONTAINER.open(prefix) as opened:
        counts.clear()
        assert b"".join(tensor_bytes(opened.tree["a"])) == values.tobytes()
        assert sum(counts) == values.nbytes
    for at in (0, values.nbytes - 1):
        with prefix.with_name(f"{prefix.name}.data-00000-of-00001").open("r+b") as file:
            file.seek(at)
            file.write(b"\x01")
        with CONTAINER.open(prefix) as opened, pytest.raises(CorruptError, match="checksum"):
            for _ in tensor_bytes(opened.tree["a"]):
                pass


def crafted(folder: Path, entries: Mapping[bytes, bytes], data: bytes = bytes(32)) -> Path:
    """Writes a checkpoint whose checksums are right and whose index says anything."""
    (folder / "x.index").write_bytes(write_table(entries))
    (folder / "x.data-00000-of-00001").write_bytes(data)
    return folder / "x"


GOOD = entry_bytes(BundleEntry(1, (8,), 0, 0, 32, masked(crc32c(bytes(32)))))
LIES: dict[str, Mapping[bytes, bytes]] = {
    "no header": {b"w": GOOD},
    "no shards": {b"": b"\x08\x00", b"w": GOOD},
    "absurd shards": {b"": b"\x08" + tf_table.to_varint(2**40), b"w": GOOD},
    "big-endian": {b"": b"\x08\x01\x10\x01", b"w": GOOD},
    "another shard": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (8,), 1, 0, 32))},
    "a size beyond the file": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (2**40,), 0, 0, 2**42))},
    "an offset beyond the file": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (8,), 0, 2**62, 32))},
    "a shape that isn't its size": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (9,), 0, 0, 32))},
    "an absurd shape": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (2**40, 2**40), 0, 0, 32))},
    "too many axes": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (1,) * 65, 0, 0, 4))},
    "an unknown dtype": {b"": header(1), b"w": entry_bytes(BundleEntry(20, (8,), 0, 0, 32))},
    "a cut entry": {b"": header(1), b"w": GOOD[:-1]},
    "a name that isn't text": {b"": header(1), b"\xff": GOOD},
    "a slice without an entry": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (8,), slices=(((0, 8),),)))},
    "a slice that leaves its tensor": {b"": header(1), b"w": entry_bytes(BundleEntry(1, (8,), slices=(((4, 8),),)))},
    "a slice of another rank": {
        b"": header(1), b"w": b"\x08\x01\x12\x04\x12\x02\x08\x08\x3a\x00"
    },
    "an entry of no tensor": {b"": header(1), b"\0x": GOOD},
    "strings that lie": {b"": header(1), b"w": entry_bytes(BundleEntry(7, (2**50,), 0, 0, 32))},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_an_index_that_lies_is_refused(lie: Mapping[bytes, bytes], tmp_path: Path) -> None:
    with CONTAINER.open(crafted(tmp_path, {b"": header(1), b"w": GOOD})) as opened:
        assert opened.tree["w"].read().tolist() == [0] * 8
    with pytest.raises((CorruptError, FormatError, RefusedError)):
        CONTAINER.open(crafted(tmp_path, lie))


def test_each_of_two_entries_that_begin_at_one_byte_is_held_to_its_own_checksum(tmp_path: Path) -> None:
    wrong = entry_bytes(BundleEntry(1, (4,), 0, 0, 16, masked(crc32c(bytes(32)))))
    with CONTAINER.open(crafted(tmp_path, {b"": header(1), b"a": GOOD, b"b": wrong})) as opened:
        assert opened.tree["a"].read().tolist() == [0] * 8
        with pytest.raises(CorruptError, match="checksum"):
            opened.tree["b"].read()


BLOCKS: dict[str, Callable[[bytes], bytes]] = {
    "compressed": lambda block: block + b"\x01",
    "restarts beyond the block": lambda block: block[:-4] + struct.pack("<I", 2**30) + b"\0",
    "a key that shares more than there is": lambda block: b"\x05" + block[1:] + b"\0",
    "a key beyond the block": lambda block: block[:1] + b"\x7f" + block[2:] + b"\0",
}


@pytest.mark.parametrize("spoil", BLOCKS.values(), ids=BLOCKS)
def test_a_block_that_breaks_the_format_is_refused(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    table = write_table({b"w": GOOD})
    length = table.index(
        b"\0" + struct.pack("<I", masked(crc32c(table[: table.index(GOOD) + len(GOOD) + 9])))
    )
    body = spoil(table[:length])
    rest = table[length + 5 :]
    assert len(body) == length + 1  # the other blocks stay where they are
    with pytest.raises((FormatError, RefusedError)):
        read_table(body + struct.pack("<I", masked(crc32c(body))) + rest, "x")


def test_names_and_dtypes_that_tensorflow_lacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="float8_e4m3fnuz"):
        save({"a": in_memory(np.ones(2, DTYPES["float8_e4m3fnuz"]))}, tmp_path / "a")
    with pytest.raises(FormatError, match="slice"):
        save({"a": {"10 6": in_memory(np.ones(2, np.float32))}}, tmp_path / "b")
    with pytest.raises(FormatError, match="name"):
        save({"": in_memory(np.ones(2, np.float32))}, tmp_path / "c")
    assert not list(tmp_path.iterdir())


def test_an_index_of_long_shared_keys_takes_no_more_work_than_its_bytes_explain() -> None:
    """4 MB of an index took more than a minute: a few bytes copied a key of 2 MB."""

    def block(body: bytes) -> bytes:
        whole = body + struct.pack("<II", 0, 1) + b"\0"
        return whole + struct.pack("<I", masked(crc32c(whole)))

    def handle(start: int, size: int) -> bytes:
        return to_varint(start) + to_varint(size)

    empty = block(b"")
    where = handle(0, len(empty) - 5)
    first = to_varint(0) + to_varint(20_000) + to_varint(len(where)) + b"a" * 20_000 + where
    following = to_varint(19_999) + to_varint(1) + to_varint(len(where)) + b"a" + where
    index = block(first + following * 10_000)
    footer = where + handle(len(empty), len(index) - 5)
    table = empty + index + footer.ljust(40, b"\0") + struct.pack("<Q", MAGIC)
    with pytest.raises(BudgetError, match="An index takes more work than its bytes explain"):
        read_table(table, "here")
