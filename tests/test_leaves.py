"""Manifests of version 2: the digests of a large file's tensors are leaves of its own, and prove as much as before."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from limit import LAYOUTS, made_state
from synthetic import write_neutral
from test_commit import reopen

import statekit
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import Report, convert, plan
from statekit.errors import CorruptError, FormatError, StatekitError
from statekit.files import manifest
from statekit.files.manifest import FILE, REST, Leaf, Passing, Written, digest_by, leaf_faults
from statekit.files.source import Files
from statekit.files.stage import staged
from statekit.scale.parts import read_part
from statekit.scale.work import split
from statekit.tensors.digest import canonical_json, json_digest
from statekit.tensors.tensor import in_memory

SIDE = 600
"""Of a matrix that is a leaf."""
PLAIN = [
    "torch", "safetensors", "hf-trainer", "accelerate", "dcp", "dcp-safetensors", "megatron", "flax", "mxnet",
    "keras-h5", "tf-bundle", "statekit",
]  # fmt: skip
"""Containers that keep the values of a tensor as they are, in one run."""
SHAPES = ["torch", "statekit", "dcp"]
"""A file with its manifest inside, files of many tensors, and of an archive for each."""


@pytest.fixture
def with_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has files get leaves that are small enough for a test."""
    monkeypatch.setattr(manifest, "WORTH_BYTES", manifest.LEAF_BYTES)


def converted(source: Path, target: Path, container: str) -> Report:
    return convert(plan(source, target, to=container, layout=LAYOUTS[container]))


def made(folder: Path, container: str) -> Path:
    """Returns a small run in a container."""
    write_neutral(folder / "neutral", made_state((container, "statekit"), 0, SIDE))
    converted(folder / "neutral", folder / "source", container)
    return folder / "source"


def manifest_of(place: Path) -> dict[str, Any]:
    with registry.opened(registry.detect_container(place)[0], place, None, CheckpointRef()) as checkpoint:
        assert checkpoint.proof is not None
        return dict(checkpoint.proof.manifest)


def leaves_of(document: dict[str, Any]) -> list[list[Any]]:
    entries = [*document["files"].values(), *([document[REST]] if REST in document else [])]
    return [leaf for entry in entries for leaf in entry.get("leaves", ())]


def digested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the bytes of large blocks that are digested from now on."""
    sizes: list[int] = []

    class Counted:
        def __init__(self, data: bytes = b"", hasher: Any = None) -> None:
            self._hasher = hasher or blake3(data)

        def update(self, data: memoryview) -> None:
            sizes.append(len(data) if len(data) >= manifest.LEAF_BYTES else 0)
            self._hasher.update(data)

        def copy(self) -> Counted:
            return Counted(hasher=self._hasher.copy())

        def digest(self) -> bytes:
            return bytes(self._hasher.digest())

        def hexdigest(self) -> str:
            return str(self._hasher.hexdigest())

    for module in ("files.manifest", "files.stage", "files.source", "tensors.digest"):
        monkeypatch.setattr(f"statekit.{module}.blake3", Counted)
    return sizes


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
@pytest.mark.parametrize("container", PLAIN)
def test_each_byte_of_a_leaf_is_digested_once_on_either_side(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(tmp_path, container)
    document = manifest_of(source)
    assert document["version"] == 2 and len(leaves_of(document)) == 3
    sizes = digested(monkeypatch)
    converted(source, tmp_path / "target", container)
    assert sum(sizes) == 2 * sum(size for _, size, _ in leaves_of(document))


@pytest.mark.torch
@pytest.mark.parametrize("container", PLAIN)
def test_both_versions_say_the_same_of_tensors_there_and_back(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(tmp_path, container)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "WORTH_BYTES", manifest.LEAF_BYTES)
        there = converted(first, tmp_path / "second", container)
    back = converted(tmp_path / "second", tmp_path / "third", container)
    documents = [manifest_of(tmp_path / name) for name in ("source", "second", "third")]
    assert [document["version"] for document in documents] == [1, 2, 1]
    assert documents[0]["tensors"] == documents[1]["tensors"] == documents[2]["tensors"]
    assert there.source_digest == back.source_digest
    assert there.source_proven == back.source_proven == len(documents[0]["tensors"])
    for name in ("source", "second", "third"):
        assert statekit.check(tmp_path / name).passed
        assert [one.done for one in statekit.seal(tmp_path / name).checkpoints] == ["proven"]


def files_at(place: Path) -> list[Path]:
    return [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]


def leaf_in(place: Path) -> tuple[Path, Leaf, Leaf]:
    """Returns a file and two of its leaves."""
    document = manifest_of(place)
    for name, entry in document["files"].items():
        if len(leaves := entry.get("leaves", ())) > 1:
            return place / name, Leaf(*leaves[0]), Leaf(*leaves[1])
    first, second = document[REST]["leaves"][:2]
    return place, Leaf(*first), Leaf(*second)


def in_a_tensor(data: bytearray, first: Leaf, second: Leaf) -> None:
    data[first.start + first.bytes // 2] ^= 1


def at_its_end(data: bytearray, first: Leaf, second: Leaf) -> None:
    data[first.stop - 1] ^= 1


def exchanged(data: bytearray, first: Leaf, second: Leaf) -> None:
    one, other = data[first.start : first.stop], data[second.start : second.stop]
    data[first.start : first.stop], data[second.start : second.stop] = other, one


TAMPERED = [in_a_tensor, at_its_end, exchanged]


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
@pytest.mark.parametrize("container", SHAPES)
@pytest.mark.parametrize("change", TAMPERED)
def test_changed_leaves_are_found_and_refused(
    change: Callable[[bytearray, Leaf, Leaf], None], container: str, tmp_path: Path
) -> None:
    source = made(tmp_path, container)
    file, first, second = leaf_in(source)
    data = bytearray(file.read_bytes())
    change(data, first, second)
    file.write_bytes(data)
    assert not statekit.check(source).passed
    with pytest.raises(CorruptError):
        converted(source, tmp_path / "target", container)
    assert not (tmp_path / "target").exists()


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
@pytest.mark.parametrize("container", SHAPES)
def test_a_changed_byte_of_the_frame_is_found_and_refused(container: str, tmp_path: Path) -> None:
    source = made(tmp_path, container)
    file, first, _ = leaf_in(source)
    data = bytearray(file.read_bytes())
    # Padding or a header, which no value depends on: what lies right before a leaf.
    place = first.start - 1
    data[place] = data[place] ^ 0x20 if container == "statekit" else data[place] ^ 1
    file.write_bytes(data)
    assert not statekit.check(source).passed
    with pytest.raises(StatekitError):
        converted(source, tmp_path / "target", container)
    assert not (tmp_path / "target").exists()


def resealed(path: Path, change: Callable[[list[list[Any]]], object], version: int = 2) -> None:
    """Forges the leaves of a manifest, and all digests of the manifest itself."""
    document = json.loads(path.read_text())
    for entry in document["files"].values():
        if "leaves" in entry:
            change(entry["leaves"])
    del document["digest"]
    document["version"] = version
    document["digest"] = json_digest(document)
    path.write_text(manifest.to_text(document))


FORGED: dict[str, Callable[[list[list[Any]]], object]] = {
    "overlap": lambda leaves: leaves[1].__setitem__(0, leaves[0][0] + leaves[0][1] - 1),
    "out of order": lambda leaves: leaves.reverse(),
    "twice": lambda leaves: leaves.append(leaves[-1]),
    "beyond the end": lambda leaves: leaves[-1].__setitem__(1, 2**40),
    "empty": lambda leaves: leaves[0].__setitem__(1, 0),
    "before the file": lambda leaves: leaves[0].__setitem__(0, -1),
    "no leaf": lambda leaves: leaves.append([]),
    "no name": lambda leaves: leaves[0].pop(),
}


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
@pytest.mark.parametrize("case", FORGED)
def test_forged_leaves_are_refused(case: str, tmp_path: Path) -> None:
    source = made(tmp_path, "statekit")
    resealed(source / FILE, FORGED[case])
    with pytest.raises(FormatError, match="The manifest doesn't follow its format"):
        converted(source, tmp_path / "target", "statekit")
    assert not statekit.check(source).passed


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
def test_a_manifest_of_version_1_has_no_leaves(tmp_path: Path) -> None:
    source = made(tmp_path, "statekit")
    resealed(source / FILE, lambda leaves: None, version=1)
    with pytest.raises(FormatError, match="has leaves, which version 1 lacks"):
        converted(source, tmp_path / "target", "statekit")


MOVED: dict[str, Callable[[list[list[Any]]], object]] = {
    "a border": lambda leaves: leaves[0].__setitem__(1, leaves[0][1] - 1),
    "left out": lambda leaves: leaves.pop(),
    "another file's": lambda leaves: leaves[0].__setitem__(0, leaves[0][0] - 1),
}


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
@pytest.mark.parametrize("case", MOVED)
def test_a_files_digest_is_that_of_its_own_leaves(case: str, tmp_path: Path) -> None:
    """Whatever a forger says of leaves, the digest is computed from the file's bytes."""
    source = made(tmp_path, "statekit")
    resealed(source / FILE, MOVED[case])
    assert not statekit.check(source).passed
    with pytest.raises(CorruptError, match=r"was changed since it was written|is damaged"):
        converted(source, tmp_path / "target", "statekit")


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
def test_forged_names_of_leaves_blame_no_sound_file(tmp_path: Path) -> None:
    """Where what others digested doesn't fit, the file's own bytes decide."""
    source = made(tmp_path, "statekit")

    def exchange(leaves: list[list[Any]]) -> None:
        leaves[0][2], leaves[1][2] = leaves[1][2], leaves[0][2]

    resealed(source / FILE, exchange)
    assert statekit.check(source).passed
    report = converted(source, tmp_path / "target", "statekit")
    assert report.source_proven == len(report.plan.entries)


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
def test_a_stored_bool_of_another_bit_is_found(tmp_path: Path) -> None:
    """Its value says less than its byte: a bool is no leaf."""
    values = np.ones((1200, 1024), np.bool_)
    with staged(tmp_path / "target", "file") as stage:
        registry.container("torch").write(_encoded({"mask": in_memory(values)}), stage)
        stage.commit(registry.container("torch").open)
    assert manifest_of(tmp_path / "target")["version"] == 1
    data = bytearray((tmp_path / "target").read_bytes())
    data[data.index(bytes([1]) * 64)] = 2
    (tmp_path / "target").write_bytes(data)
    assert not statekit.check(tmp_path / "target").passed


def _encoded(tree: Any) -> Any:
    from statekit.conversion.contracts import Encoded

    return Encoded(tree, 0)


@pytest.mark.usefixtures("with_leaves")
def test_what_was_not_written_as_it_is_is_no_leaf(tmp_path: Path) -> None:
    tensor = in_memory(np.arange(2**18, dtype=np.float32))

    def leaves(write: Callable[[Any, memoryview], object]) -> tuple[Leaf, ...]:
        name = f"{len([*tmp_path.iterdir()])}"
        with staged(tmp_path / name, "file") as stage:
            with stage.file() as output:
                for block in stage.stream("a", tensor):
                    write(output, block)
            return stage._leaves("")

    assert leaves(lambda output, block: output.write(block)) == (Leaf(0, 2**20, "a"),)
    assert leaves(lambda output, block: output.write(bytes(block))) == ()
    assert leaves(lambda output, block: output.write(block[: 2**19])) == ()
    assert leaves(lambda output, block: [output.write(block[: 2**19]), output.write(b"-")]) == ()

    def halves(output: Any, block: Any) -> None:
        output.write(block[: 2**19])
        output.write(block[2**19 :])

    assert leaves(halves) == (Leaf(0, 2**20, "a"),)


@pytest.mark.usefixtures("with_leaves")
def test_a_leaf_that_nobody_read_again_has_the_digest_of_its_bytes_on_the_disk(tmp_path: Path) -> None:
    """Whatever tensor of its name was read meanwhile, from elsewhere."""
    tensor = in_memory(np.arange(2**18, dtype=np.float32))
    with staged(tmp_path / "target", "file") as stage:
        with stage.file() as output:
            for block in stage.stream("a", tensor):
                output.write(block)
        data = bytearray(Path(stage.path).read_bytes())
        data[7] ^= 1
        Path(stage.path).write_bytes(data)
        files = stage.commit(reopen(("a", tensor)))  # which doesn't read the file at all
    runs = [[0, 2**20, blake3(data).hexdigest()]]
    stated = {"format": "statekit-file", "bytes": 2**20, "around": blake3().hexdigest(), "leaves": runs}
    assert files["target"]["blake3"] == blake3(canonical_json(stated)).hexdigest()


def plainly(data: bytes, leaves: list[Leaf]) -> str:
    """Returns the digest of a file as docs/format.md defines it."""
    around, end, runs = b"", 0, []
    for start, size, _ in leaves:
        around += data[end:start]
        runs.append([start, size, blake3(data[start : start + size]).hexdigest()])
        end = start + size
    around += data[end:]
    stated = {
        "format": "statekit-file",
        "bytes": len(data),
        "around": blake3(around).hexdigest(),
        "leaves": runs,
    }
    return blake3(canonical_json(stated)).hexdigest() if leaves else blake3(data).hexdigest()


def cut(rng: random.Random, size: int) -> Iterator[Leaf]:
    at = rng.choice((0, rng.randrange(size)))
    while at < size:
        count = rng.randint(1, size - at)
        yield Leaf(at, count, f"t{at}")
        at += count + rng.choice((0, 0, rng.randrange(size)))


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_reading_gives_the_digest_of_the_standard(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.randint(1, 400))
    leaves = [*cut(rng, len(data))]
    assert not [*leaf_faults(len(data), leaves)]
    (tmp_path / "file").write_bytes(data)
    with Files() as files:
        file = files.source(tmp_path / "file")
        passing = Passing((), leaves)
        with passing.read(file):
            for _ in range(rng.randrange(30)):
                start = rng.randrange(len(data))
                file.read(start, rng.randint(1, len(data) - start))
            for leaf in rng.sample(leaves, rng.randint(0, len(leaves))):
                file.read(leaf.start, leaf.bytes)
                passing.tensors[leaf.name] = blake3(data[leaf.start : leaf.stop]).hexdigest()
            assert passing.digest(file) == plainly(data, leaves)
        entry = {"blake3": plainly(data, leaves), "leaves": [list(leaf) for leaf in leaves]}
        assert digest_by(None, file, entry) == entry["blake3"]


class NotCopied(tuple[Leaf, ...]):
    """Leaves of which nobody may take a part: it would be copied with each that is read."""

    def __getitem__(self, number: Any) -> Any:
        assert not isinstance(number, slice)
        return super().__getitem__(number)


def test_as_many_leaves_as_there_are_bytes_are_read_in_a_time_that_grows_as_they_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data := bytes(range(200)))
    leaves = NotCopied(Leaf(place, 1, "a") for place in range(200))
    with Files() as files:
        file, passing = files.source(tmp_path / "file"), Passing((), leaves)
        passing.leaves = leaves
        assert passing.digest(file) == plainly(data, [*leaves])


def test_a_leaf_that_was_read_in_part_is_digested_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data := bytes(range(200)))
    leaves = [Leaf(10, 100, "a")]
    with Files() as files:
        file, passing = files.source(tmp_path / "file"), Passing((), leaves)
        with passing.read(file):
            file.read(10, 50), file.read(61, 49)  # all but one byte
            passing.tensors["a"] = "0" * 64
            assert passing.digest(file) == plainly(data, leaves)
            file.read(60, 50)
            assert passing.digest(file) != plainly(data, leaves)
            entry = {"blake3": plainly(data, leaves), "leaves": [[10, 100, "a"]]}
            assert digest_by(passing, file, entry) == entry["blake3"]


def test_only_large_tensors_of_large_files_are_leaves() -> None:
    def leaves(*sizes: int) -> list[int]:
        written, at, entries = Written(), 0, {}
        for i, size in enumerate(sizes):
            written.take(at, size, f"{i}")
            entries[f"{i}"] = {"shape": [size], "dtype": "uint8", "blake3": ""}
            at += size
        return [leaf.bytes for leaf in written.leaves(entries)]

    large, small = manifest.WORTH_BYTES, manifest.LEAF_BYTES - 1
    assert leaves(large) == [large]
    assert leaves(large - 1) == leaves(*[small] * 65) == []
    assert leaves(large, small, 0) == [large]


@pytest.mark.torch
@pytest.mark.parametrize("to", ["statekit", "dcp", "safetensors"])
@pytest.mark.usefixtures("with_leaves")
def test_any_number_of_workers_gives_the_digests_of_one_process(to: str, tmp_path: Path) -> None:
    source = made(tmp_path, to)
    cut_at = 2**21
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    convert(plan(source, tmp_path / "one" / "there", to=to, layout=LAYOUTS[to]), task_bytes=cut_at)
    with split(
        plan(source, tmp_path / "many" / "there", to=to, layout=LAYOUTS[to]), tmp_path / "work", cut_at
    ) as work:
        for number in reversed(work.missing()):
            work.run(number)
        parts = [work.part(task.number) for task in work.tasks]
        assert any("leaves" in entry for part in parts if part for entry in part.files.values())
        work.finish()
    one, many = (manifest_of(tmp_path / name / "there") for name in ("one", "many"))
    assert one["version"] == 2 and one["files"] == many["files"] and one["digest"] == many["digest"]
    assert statekit.check(tmp_path / "many" / "there").passed


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
def test_forged_leaves_of_a_part_are_refused(tmp_path: Path) -> None:
    source = made(tmp_path, "statekit")
    (tmp_path / "many").mkdir()
    with split(plan(source, tmp_path / "many" / "there", to="statekit"), tmp_path / "work", 2**21) as work:
        number = work.missing()[0]
        work.run(number)
        place = next((tmp_path / "work").rglob(f"{number:05}.json"))
        document = json.loads(place.read_text())
        for entry in document["files"].values():
            entry["leaves"] = [*entry["leaves"], *entry["leaves"]]
        del document["digest"]
        place.write_text(json.dumps({**document, "digest": json_digest(document)}))
        with pytest.raises(CorruptError, match="doesn't lie behind"):
            read_part(place.read_bytes(), place)
        assert number in work.missing()


@pytest.mark.torch
@pytest.mark.usefixtures("with_leaves")
def test_the_example_of_the_standard_proves_leaves(tmp_path: Path) -> None:
    source = made(tmp_path, "statekit")
    text = (Path(__file__).parents[1] / "docs/format.md").read_text()
    example = re.search(r"```python\n(# Proves .*?)```", text, re.DOTALL)
    assert example is not None
    exec(example[1], {"folder": str(source)})
    file, first, second = leaf_in(source)
    data = bytearray(file.read_bytes())
    exchanged(data, first, second)
    file.write_bytes(data)
    with pytest.raises(AssertionError):
        exec(example[1], {"folder": str(source)})
