"""The neutral folder: gives back what it was given, and notices whatever happened to it since."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from safetensors import safe_open

from formats import FACTORED, save, small_state, snapshot, values
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS, Encoded, Hints
from statekit.converters.containers import statekit_dir
from statekit.converters.containers.statekit_dir import CONTAINER
from statekit.converters.layouts.own.statekit_canonical import LAYOUT
from statekit.errors import (
    CorruptError,
    FormatError,
    NotFoundError,
    RefusedError,
    StateError,
    StatekitError,
    UsageError,
)
from statekit.files import file_changes, manifest
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged
from statekit.state.train_state import Axis, Rule, TrainState
from statekit.tensors.digest import tensor_digest
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import Record, tensor_names

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(small_state(), tmp_path / "ckpt")


def opened(folder: Path, step: int | None = None) -> Checkpoint:
    return registry.opened(CONTAINER, folder, step, NO_HINTS)


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest the way an attacker would: with a digest that fits."""
    path = folder / manifest.FILE
    document = json.loads(path.read_text())
    change(document)
    heading = {"format", "version", "tool", "digest"}
    fresh = manifest.sealed({key: value for key, value in document.items() if key not in heading})
    path.write_text(manifest.to_text(fresh))


def test_a_state_comes_back_as_it_was(folder: Path) -> None:
    state = small_state()
    with opened(folder) as checkpoint:
        assert LAYOUT.detect(checkpoint) is not None
        back = LAYOUT.decode(checkpoint, Hints())
        assert list(back.params) == list(state.params)
        assert values(back.params) == values(state.params)
        assert {path: values(slots) for path, slots in back.slots.items()} == {
            path: values(slots) for path, slots in state.slots.items()
        }
        assert values({"rng": back.extra["rng"]}) == values({"rng": state.extra["rng"]})
        assert back.extra["sampler"] == state.extra["sampler"]
        assert (back.optimizer, back.counts, back.rules) == (state.optimizer, state.counts, state.rules)
        assert back.assumptions == state.assumptions and back.to_json() == state.to_json()
        assert checkpoint.findings == () and checkpoint.step == 7


def test_state_of_groups_comes_back(tmp_path: Path) -> None:
    state = small_state()
    group = replace(state.optimizer.groups[0], slots={"model_norms": in_memory(np.arange(3.0))})
    state = replace(state, optimizer=replace(state.optimizer, groups=(group,)))
    with opened(save(state, tmp_path / "ckpt")) as checkpoint:
        assert "groups/0/model_norms" in checkpoint.tensors
        back = LAYOUT.decode(checkpoint, Hints())
        assert values(back.optimizer.groups[0].slots) == values(group.slots)


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    tensor = in_memory(np.arange(3))
    tree = {
        "ints": {1: "a", -2: {"x": tensor}, False: 0, (1, "b"): tensor, "$tensor": {"name": "ints"}},
        "tuple": (1, [2, (3,)], ()),
        "record": Record("numpy.random.Generator", (tensor, b"\0\xff"), {"state": [tensor]}),
        "floats": [float("inf"), -float("inf"), -0.0, 5e-324, 0.1],
        "text": "\u202e\udc80\0",
        "big": 2**200,
        "none": None,
        "empty": [{}, [], (), b""],
        "$dict": {"$manifest": "state"},
        "": {"": 1},
    }
    with staged(tmp_path / "ckpt", "folder") as stage:
        CONTAINER.write(Encoded(tree, 0), stage)
        stage.commit(CONTAINER.open)
    with opened(tmp_path / "ckpt") as checkpoint:
        back = checkpoint.tree
        assert values(checkpoint.tensors) == values(tensor_names(tree))
        assert back["ints"].keys() == tree["ints"].keys()  # type: ignore[attr-defined]  # a tree of anything
        assert back["ints"]["$tensor"] == {"name": "ints"}
        assert isinstance(back["record"], Record) and back["record"].args[1] == b"\0\xff"
        assert math.copysign(1, back["floats"][2]) == -1
        for key in ("tuple", "floats", "text", "big", "none", "empty", "$dict", ""):
            assert back[key] == tree[key] and type(back[key]) is type(tree[key])


def test_not_a_number_comes_back(tmp_path: Path) -> None:
    state = small_state(clipping_threshold=float("inf"))
    state = replace(state, extra={**state.extra, "loss": {"last": float("nan")}})
    with opened(save(state, tmp_path / "ckpt")) as checkpoint:
        back = LAYOUT.decode(checkpoint, Hints())
    assert math.isinf(back.optimizer.groups[0].hyperparameters["clipping_threshold"])
    assert math.isnan(back.extra["loss"]["last"])


def test_the_manifest_follows_its_schema(folder: Path) -> None:
    schema = json.loads((ROOT / "schemas/statekit-manifest.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    document = json.loads((folder / manifest.FILE).read_text())
    validator.validate(document)
    for broken in (
        {**document, "version": 3},
        {**document, "version": True},
        {**document, "files": {"x": {"bytes": 1, "blake3": "0" * 64, "leaves": [[0, 0, "a"]]}}},
        {**document, "digest": "sha256"},
        {key: value for key, value in document.items() if key != "tensors"},
        {**document, "files": {"../x": {"bytes": 1, "blake3": "0" * 64}}},
        {**document, "tensors": {"x": {"shape": [-1], "dtype": "float32", "blake3": "0" * 64}}},
        {**document, "tensors": {"x": {"shape": [1], "dtype": "float31", "blake3": "0" * 64}}},
    ):
        assert not validator.is_valid(broken)


def test_the_example_in_the_standard_reads_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs/format.md").read_text()
    example = re.search(r"```python\n(# Reads .*?)```", text, re.DOTALL)
    assert example is not None
    scope: dict[str, Any] = {"folder": str(folder)}
    exec(example[1], scope)
    tensors = scope["tensors"]
    with opened(folder) as checkpoint:
        assert {name: array.tobytes() for name, array in tensors.items()} == {
            name: tensor.read().tobytes() for name, tensor in checkpoint.tensors.items()
        }
    assert scope["step"] == 7 and scope["decay_rate"] == 0.8


def test_the_digests_of_the_standard_are_those_of_the_code(folder: Path) -> None:
    text = (ROOT / "docs/format.md").read_text()
    example = re.search(r"```python\n(# Proves .*?)```", text, re.DOTALL)
    assert example is not None
    exec(example[1], {"folder": str(folder)})
    path = folder / manifest.FILE
    path.write_text(path.read_text().replace('"updates": 7', '"updates": 8'))
    with pytest.raises(AssertionError):
        exec(example[1], {"folder": str(folder)})


def test_large_states_are_cut_into_shards_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statekit_dir, "SHARD_BYTES", 40)
    tree = {
        name: in_memory(np.full(n, n, np.uint8))
        for name, n in zip("abcde", (30, 10, 1, 100, 40), strict=True)
    }
    with staged(tmp_path / "ckpt", "folder") as stage:
        CONTAINER.write(Encoded(tree, 0), stage)
        stage.commit(CONTAINER.open)
    shards = {}
    for path in sorted((tmp_path / "ckpt").glob("*.safetensors")):
        with safe_open(path, framework="np") as shard:
            shards[path.name] = "".join(sorted(shard.keys()))
    names = [f"tensors-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert shards == dict(zip(names, ["ab", "c", "d", "e"], strict=True))
    with opened(tmp_path / "ckpt") as checkpoint:
        assert values(checkpoint.tensors) == values(tree)


def test_a_tree_without_tensors_has_no_shard(tmp_path: Path) -> None:
    with staged(tmp_path / "ckpt", "folder") as stage:
        CONTAINER.write(Encoded({"note": 1}, 0), stage)
        stage.commit(CONTAINER.open)
    assert os.listdir(tmp_path / "ckpt") == [manifest.FILE]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = (snapshot(save(small_state(), tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert snapshot(save(small_state(seed=1), tmp_path / "c")) != first


def test_names_that_collide_elsewhere_are_fine_here(folder: Path) -> None:
    with opened(folder) as checkpoint:
        assert {"params/dense/kernel", "params/dense.kernel"} <= checkpoint.tensors.keys()


def test_names_that_collide_here_are_refused(tmp_path: Path) -> None:
    tree = {"a/b": in_memory(np.zeros(1)), "a": {"b": in_memory(np.ones(1))}}
    with pytest.raises(FormatError, match="a/b"), staged(tmp_path / "ckpt", "folder") as stage:
        CONTAINER.write(Encoded(tree, 0), stage)


def test_detection_tells_our_folder_from_another_with_a_manifest(folder: Path, tmp_path: Path) -> None:
    assert CONTAINER.detect(folder) is not None
    other = tmp_path / "other"
    with staged(other, "folder") as stage:
        with stage.file("data") as output:
            output.write(b"".join(stage.stream("a", in_memory(np.zeros(1)))))
        stage.commit(lambda path: Checkpoint("other", path, {"a": in_memory(np.zeros(1))}))
    assert CONTAINER.detect(other) is None
    assert CONTAINER.detect(tmp_path) is None and CONTAINER.detect(other / "data") is None


def test_another_step_isnt_there(folder: Path) -> None:
    with opened(folder, 7):
        pass
    with pytest.raises(NotFoundError, match="expected: 8"):
        opened(folder, 8)


# What may have happened to a folder since


SHARD = "tensors-00001-of-00001.safetensors"


def damaged(folder: Path, how: str) -> None:
    shard, path = folder / SHARD, folder / manifest.FILE
    if how == "missing shard":
        shard.unlink()
    elif how == "truncated shard":
        os.truncate(shard, shard.stat().st_size - 1)
    elif how == "longer shard":
        shard.write_bytes(shard.read_bytes() + b"\0")
    elif how == "changed byte":
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    elif how == "shard is a folder":
        shard.unlink()
        shard.mkdir()
    elif how == "changed step":
        path.write_text(path.read_text().replace('"updates": 7', '"updates": 8'))
    elif how == "truncated manifest":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "foreign manifest":
        path.write_text('{"format": "another"}')


@pytest.mark.parametrize(
    ("how", "error", "what"),
    [
        ("missing shard", CorruptError, "is missing"),
        ("truncated shard", CorruptError, "bytes, expected"),
        ("longer shard", CorruptError, "bytes, expected"),
        ("changed byte", CorruptError, "was changed"),
        ("shard is a folder", CorruptError, "regular file"),
        ("changed step", CorruptError, "changed after it was written"),
        ("truncated manifest", FormatError, "valid JSON"),
        ("foreign manifest", FormatError, "isn't a statekit manifest"),
    ],
)
def test_damage_is_a_typed_error(folder: Path, how: str, error: type[StatekitError], what: str) -> None:
    damaged(folder, how)
    assert CONTAINER.detect(folder) is not None
    with pytest.raises(error, match=what) as caught:
        opened(folder)
    assert str(folder) in str(caught.value)


def test_a_missing_manifest_is_a_typed_error(folder: Path) -> None:
    (folder / manifest.FILE).unlink()
    with pytest.raises(NotFoundError, match=re.escape(manifest.FILE)):
        opened(folder)


def test_damage_in_a_large_shard_is_found_in_its_header_at_once_and_in_its_data_when_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(small_state(), tmp_path / "ckpt")
    monkeypatch.setattr(file_changes, "SMALL_BYTES", 0)  # as if the shard were large
    shard = folder / SHARD
    good = shard.read_bytes()
    shard.write_bytes(good.replace(b'"statekit"', b'"stateKit"'))
    with pytest.raises(CorruptError, match="its header isn't the one"):
        opened(folder)
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with opened(folder) as checkpoint:
        stated = manifest.require_manifest(folder)["tensors"]
        wrong = [n for n, t in checkpoint.tensors.items() if stated[n]["blake3"] != _digest_or_none(t)]
    assert len(wrong) == 1


def _digest_or_none(tensor: Any) -> str | None:
    try:
        return tensor_digest(tensor)
    except CorruptError:  # a bool may notice by itself
        return None


def test_no_flipped_bit_goes_unseen(folder: Path) -> None:
    chance = random.Random(0)
    files = {name: data for name, data in snapshot(folder).items() if data is not None}
    for _ in range(300):
        name = chance.choice(sorted(files))
        bit = chance.randrange(len(files[name]) * 8)
        data = bytearray(files[name])
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        if name == manifest.FILE and not _changes_json(files[name], bytes(data)):
            continue
        with pytest.raises(StatekitError):
            opened(folder)
        (folder / name).write_bytes(files[name])


def _changes_json(before: bytes, after: bytes) -> bool:
    try:
        return bool(json.loads(after) != json.loads(before))
    except ValueError:
        return True


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "a\\..\\x", "c:x", "", "."])
def test_foreign_file_names_are_refused(folder: Path, name: str) -> None:
    reseal(folder, lambda m: m["files"].update({name: {"bytes": 1, "blake3": "0" * 64}}))
    with pytest.raises(RefusedError, match="outside its folder"):
        opened(folder)


def test_a_fifo_or_an_endless_manifest_is_refused(folder: Path) -> None:
    path = folder / manifest.FILE
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RefusedError, match="regular file"):
        opened(folder)
    path.unlink()
    path.touch()
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(RefusedError, match="at most"):
        opened(folder)


def test_files_that_the_manifest_doesnt_name_are_reported(folder: Path) -> None:
    (folder / "README").write_text("mine")
    with opened(folder) as checkpoint:
        (finding,) = checkpoint.findings
    assert finding.place == str(folder / "README")


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no tree": lambda m: m.pop("tree"),
    "tree is a list": lambda m: m.update(tree=[]),
    "tensor that isn't there": lambda m: m["tree"].update(x={"$tensor": {"name": "nope"}}),
    "tensor without a name": lambda m: m["tree"].update(x={"$tensor": 3}),
    "tensor at another place": lambda m: m["tree"]["params"].update(x=m["tree"]["params"].pop("empty")),
    "tensor left out": lambda m: m["tree"]["params"].pop("empty"),
    "bad bytes": lambda m: m["tree"].update(x={"$bytes": "%%%"}),
    "bad float": lambda m: m["tree"].update(x={"$float": "x"}),
    "bad dict": lambda m: m["tree"].update(x={"$dict": [1]}),
    "unhashable key": lambda m: m["tree"].update(x={"$dict": [[[], 1]]}),
    "bad record": lambda m: m["tree"].update(x={"$record": "os.system"}),
    "bad reference": lambda m: m["tree"].update(state={"$manifest": "nope"}),
    "tensors without digest": lambda m: m["tensors"]["params/empty"].pop("blake3"),
    "files without size": lambda m: m["files"][SHARD].pop("bytes"),
    "size is a bool": lambda m: m["files"][SHARD].update(bytes=True),
    "target is text": lambda m: m.update(target="statekit"),
    "no headers": lambda m: m.pop("headers"),
    "another shape": lambda m: m["tensors"]["params/empty"].update(shape=[3, 0]),
    "another dtype": lambda m: m["tensors"]["params/empty"].update(dtype="int32"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_a_typed_error(folder: Path, case: str) -> None:
    reseal(folder, HOSTILE[case])
    with pytest.raises(FormatError):
        opened(folder)


def test_deep_trees_are_a_typed_error(folder: Path) -> None:
    path = folder / manifest.FILE
    path.write_text('{"tree": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(FormatError):
        opened(folder)
    deep: Any = 0
    for _ in range(480):
        deep = [deep]
    reseal(save(small_state(), folder.parent / "deep"), lambda m: m["tree"]["extra"].update(x=deep))
    with suppress(FormatError):  # it may be beyond what this interpreter nests, but says so
        opened(folder.parent / "deep").close()


def test_newer_manifests_are_refused_with_a_remedy(folder: Path) -> None:
    path = folder / manifest.FILE
    path.write_text(path.read_text().replace('"version": 1', '"version": 3'))
    with pytest.raises(FormatError, match="newer"):
        opened(folder)


# The layout


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema": lambda s: s.update(schema="nope"),
    "counts": lambda s: s.update(counts={"updates": "many"}),
    "groups": lambda s: s.update(groups=[{}]),
    "two groups": lambda s: s.update(groups=s["groups"] * 2),
    "axes": lambda s: s.update(rules={"dense/kernel": {"axes": ["UP"], "known_from": "file"}}),
    "paths": lambda s: s["groups"][0].update(paths=["nope"]),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_isnt_a_state_is_a_typed_error(folder: Path, case: str) -> None:
    reseal(folder, lambda m: RECORDS[case](m["state"]))
    with opened(folder) as checkpoint, pytest.raises((StateError, NotFoundError)):
        LAYOUT.decode(checkpoint, Hints())


def test_params_that_arent_tensors_are_a_typed_error(folder: Path) -> None:
    reseal(folder, lambda m: m["tree"]["params"].update(x=5))
    with opened(folder) as checkpoint, pytest.raises(StateError, match="expected a tensor @ params/x"):
        LAYOUT.decode(checkpoint, Hints())


def test_hints_override_and_are_known_as_given(folder: Path) -> None:
    with opened(folder) as checkpoint:
        state = LAYOUT.decode(checkpoint, Hints({"decay_rate": 0.9}, variant="hf"))
        assert state.optimizer.variant == "hf"
        assert state.optimizer.groups[0].hyperparameters["decay_rate"] == 0.9
        assert state.optimizer.groups[0].known_from["decay_rate"] == "given"
        with pytest.raises(UsageError, match="decay_rte"):
            LAYOUT.decode(checkpoint, Hints({"decay_rte": 0.9}))


def test_swapped_rows_and_columns_are_refused(tmp_path: Path) -> None:
    state = small_state()
    swapped = Rule((Axis.COLUMN, Axis.ROW), "file")
    assert state.rules["dense/kernel"] == FACTORED
    folder = save(state, tmp_path / "ckpt")
    reseal(folder, lambda m: m["state"]["rules"].update({"dense/kernel": swapped.to_json()}))
    with opened(folder) as checkpoint, pytest.raises(StateError, match="v_row"):
        LAYOUT.decode(checkpoint, Hints())


def test_a_copy_elsewhere_is_the_same_checkpoint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    with opened(tmp_path / "copy") as checkpoint:
        state: TrainState = LAYOUT.decode(checkpoint, Hints())
        assert state.counts.updates == 7
