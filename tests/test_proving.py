"""What is loaded into a run is proven byte by byte where a manifest has it, however large the files are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from test_integrity import FILES, changed_value, files_of, flip, written

import statekit.torch
from statekit.budget import Budget
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import Request, inspect
from statekit.conversion.open_state import open_state
from statekit.errors import CorruptError
from statekit.files import file_changes, integrity
from statekit.files.checkpoint import Checkpoint, Proof
from statekit.files.manifest import FILE, MOST_APART, RECORDS, sealed, tensor_entry, to_text, whole_file_fault
from statekit.files.proving import ProvingReading, proving
from statekit.files.source import File, Files
from statekit.tensors.digest import records_digest, tensor_digest
from statekit.tensors.tensor import Array, Stored, in_memory
from statekit.tensors.tree import Record

pytestmark = pytest.mark.torch

LOADED = ("statekit", "orbax", "flax", "dcp-safetensors", "hf-trainer", "safetensors")
"""Targets whose formats have no checksum of their own: the manifest alone tells."""


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every file count as too large to be digested when it is opened."""
    monkeypatch.setattr(file_changes, "SMALL_BYTES", 0)
    monkeypatch.setattr(integrity, "SMALL_BYTES", 0)


def model_of(target: Path) -> torch.nn.Module:
    """Returns a module with the parameters that a checkpoint has, all zero."""
    model = torch.nn.Module()
    with open_state(target) as opened:
        for path, param in opened.params.items():
            model.register_parameter(path, torch.nn.Parameter(torch.zeros(param.shape)))
    return model


@pytest.mark.parametrize("to", LOADED)
def test_a_changed_value_stops_a_load(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    model = model_of(target)
    statekit.torch.load_params(target, model)
    statekit.torch.load_optimizer(target, model.named_parameters())
    inspect(target, Request(stats=True))
    changed_value(target)
    with pytest.raises(CorruptError, match="other values"):
        inspect(target, Request(stats=True))
    with pytest.raises(CorruptError, match="other values") as caught:
        statekit.torch.load_params(target, model)
    assert caught.value.remedy.startswith("don't go on with the model")


@pytest.mark.parametrize("to", LOADED)
def test_a_changed_value_of_the_optimizer_stops_its_load_and_not_that_of_parameters(
    to: str, tmp_path: Path
) -> None:
    target = written(to, tmp_path / "written")
    model = model_of(target)
    with open_state(target) as opened:
        slots = [slot.read().tobytes() for named in opened.slots.values() for slot in named.values()]
    value = max(slots, key=len)
    file = next(file for file in files_of(target) if value in file.read_bytes())
    flip(file, 8 * file.read_bytes().index(value) + 3)
    with pytest.raises(CorruptError, match=r"other values|checksum"):
        statekit.torch.load_optimizer(target, model.named_parameters())
    statekit.torch.load_params(target, model)  # reads none of it


@pytest.mark.parametrize("to", [*LOADED, "statekit-keras-keras-h5"])
def test_damage_that_is_accepted_is_loaded_and_named(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    model, sound = model_of(target), model_of(target)
    statekit.torch.load_params(target, sound)
    changed_value(target)
    with pytest.warns(UserWarning, match="loaded as it is, though damaged: .+ @ .+") as caught:
        statekit.torch.load_params(target, model, accept_damaged=True)
    assert {warning.filename for warning in caught} == {__file__}
    assert not all(
        torch.equal(one, other) for one, other in zip(model.parameters(), sound.parameters(), strict=True)
    )


@pytest.mark.jax
def test_a_changed_value_stops_a_load_in_jax(tmp_path: Path) -> None:
    import jax

    import statekit.jax

    target = written("orbax", tmp_path / "written")
    with open_state(target) as opened:
        params = {path: jax.ShapeDtypeStruct(p.shape, p.dtype) for path, p in opened.params.items()}
    statekit.jax.load_params(target, params)
    statekit.jax.load_optimizer(target, params)
    changed_value(target)
    with pytest.raises(CorruptError, match="other values"):
        statekit.jax.load_params(target, params)
    with pytest.warns(UserWarning, match="other values than when it was written @ "):
        statekit.jax.load_params(target, params, accept_damaged=True)


@pytest.mark.tensorflow
def test_a_changed_value_stops_a_load_in_tensorflow(tmp_path: Path) -> None:
    import keras

    import statekit.tensorflow

    target = written("orbax", tmp_path / "written")
    with open_state(target) as opened:
        names = {path.replace("/", "_"): path for path in opened.params}
        given = [
            keras.Variable(np.zeros(opened.params[path].shape), name=name, dtype="float32")
            for name, path in names.items()
        ]
    statekit.tensorflow.load_params(target, given, names=names)
    statekit.tensorflow.load_optimizer(target, given, names=names)
    changed_value(target)
    with pytest.raises(CorruptError, match="other values") as caught:
        statekit.tensorflow.load_params(target, given, names=names)
    assert caught.value.remedy.startswith("don't go on with the variables")
    with pytest.warns(UserWarning, match="other values than when it was written @ "):
        statekit.tensorflow.load_params(target, given, names=names, accept_damaged=True)


def test_damage_in_what_is_no_tensor_stops_a_load_before_anything_is_copied(tmp_path: Path) -> None:
    target = written("hf-trainer", tmp_path / "written")
    model = model_of(target)
    file = next(target.rglob("trainer_state.json"))
    file.write_bytes(file.read_bytes().replace(b'"global_step": 4', b'"global_step": 5'))
    with pytest.raises(CorruptError):
        statekit.torch.load_params(target, model)
    assert not any(param.any() for param in model.parameters())


@pytest.mark.parametrize("to", FILES)
def test_a_changed_value_in_a_file_with_its_manifest_inside_stops_a_load(to: str, tmp_path: Path) -> None:
    target = written(to, tmp_path / "written")
    model = model_of(target)
    changed_value(target)
    with pytest.raises(CorruptError):
        statekit.torch.load_params(target, model)
    assert not any(param.any() for param in model.parameters())


def test_statistics_of_what_is_damaged_are_given_when_asked_for_and_say_so(tmp_path: Path) -> None:
    target = written("orbax", tmp_path / "written")
    changed_value(target)
    seen = inspect(CheckpointRef(target, accept_damaged=True), Request(stats=True))
    damage = [finding for finding in seen.findings if finding.damage]
    assert [finding.what for finding in damage] == ["has other values than when it was written"]


@pytest.fixture(scope="module")
def run_with_large_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    model = torch.nn.Linear(600, 600)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    file = tmp_path_factory.mktemp("run") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file, model


@pytest.mark.parametrize("to", ["statekit", "dcp", "safetensors", "flax", "hf-trainer", "megatron"])
def test_values_are_read_once(
    to: str,
    run_with_large_files: tuple[Path, torch.nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, model = run_with_large_files
    target = tmp_path / "target"
    convert(plan(source, target, to=to))
    read: list[int] = []
    original = File.read_into

    def counted(file: File, start: int, into: memoryview) -> None:
        read.append(len(into))
        original(file, start, into)

    def optimizer() -> object:
        return statekit.torch.load_optimizer(target, model.named_parameters())

    monkeypatch.setattr(File, "read_into", counted)
    with open_state(target):
        opening = sum(read)
    for load, values in ((lambda: statekit.torch.load_params(target, model), 1), (optimizer, 2)):
        read.clear()
        load()
        assert 1 <= (sum(read) - opening) / (values * 600 * 601 * 4) < 1.1


def test_a_manifest_without_a_digest_of_the_records_proves_whole_files(tmp_path: Path) -> None:
    """As earlier versions wrote it: then all is proven before anything is copied."""
    target = written("safetensors", tmp_path / "written")
    model, place = model_of(target), target / FILE
    fields = json.loads(place.read_text())
    without = {key: value for key, value in fields.items() if key not in (RECORDS, "digest")}
    assert RECORDS in fields
    place.write_text(to_text(sealed(without)))
    statekit.torch.load_params(target, model)
    changed_value(target)
    for param in model.parameters():
        param.data.zero_()
    with pytest.raises(CorruptError, match="was changed"):
        statekit.torch.load_params(target, model)
    assert not any(param.any() for param in model.parameters())


def test_a_consumers_next_step_leaves_the_digest_of_the_records(tmp_path: Path) -> None:
    run = written("hf-trainer", tmp_path / "written")
    model, step = model_of(run), next(run.glob("checkpoint-*"))
    shutil.copytree(step, run / "checkpoint-400")
    statekit.torch.load_params(step, model)
    changed_value(step)
    with pytest.raises(CorruptError, match="other values"):
        statekit.torch.load_params(step, model)


def reading(values: Array, changed: bool = False) -> tuple[ProvingReading, list[str]]:
    tensor: Stored = in_memory(values, "w")
    entry = {
        "shape": list(values.shape),
        "dtype": values.dtype.name,
        "blake3": tensor_digest(in_memory(values + 1) if changed else tensor),
    }
    blamed: list[str] = []
    return ProvingReading(tensor, "w", entry, lambda what, place: blamed.append(place)), blamed


VALUES = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
ROWS_IN_ORDER = [(slice(i, i + 1), slice(0, 2), slice(0, 3)) for i in range(4)]
PARTS: dict[str, list[Any]] = {
    "whole": [(slice(0, 4), slice(0, 2), slice(0, 3))],
    "in order": ROWS_IN_ORDER,
    "backwards": ROWS_IN_ORDER[::-1],
    "a corner": [(slice(1, 3), slice(0, 1), slice(1, 2))],
    "a part from the start": ROWS_IN_ORDER[:2],
    "twice": [*ROWS_IN_ORDER, *ROWS_IN_ORDER],
    "columns": [(slice(0, 4), slice(0, 2), slice(i, i + 1)) for i in range(3)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_tensor_is_proven_in_whatever_order_it_is_read(parts: list[Any]) -> None:
    for changed in (False, True):
        tensor, blamed = reading(VALUES, changed)
        for part in parts:
            assert np.array_equal(tensor.fetch(part), VALUES[part])
        tensor.finish()
        assert bool(blamed) == changed


def test_what_nobody_reads_is_not_read_to_be_proven() -> None:
    tensor, blamed = reading(VALUES, changed=True)
    tensor.finish()
    assert not blamed


@pytest.mark.parametrize(("apart", "fits"), [(MOST_APART, True), (MOST_APART + 1, False)])
def test_a_manifest_inside_cannot_make_each_read_take_long(apart: int, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a")
    stated = {"bytes": "1", "blake3": blake3(b"a").hexdigest(), "apart": ["1+0"] * apart}
    with Files() as files:
        assert (whole_file_fault(files.source(tmp_path / "file"), stated) == "") == fits


def test_tensors_that_read_the_same_bytes_are_each_held_to_their_own_digest(tmp_path: Path) -> None:
    first = in_memory(VALUES, "first")
    tree = {"first": first, "second": first.called("second")}
    entries = {name: tensor_entry(tensor, tensor_digest(tensor)) for name, tensor in tree.items()}
    for is_tied in (True, False):
        if not is_tied:
            entries["second"] = tensor_entry(first, tensor_digest(in_memory(VALUES + 1)))
        document = {"target": {"container": "torch", "step": None}, "tensors": entries, "files": {}}
        checkpoint = Checkpoint("torch", tmp_path, tree)
        document |= integrity.records_of(checkpoint)
        proof = Proof(tmp_path, document, {}, entries, is_inside=True)
        read = proving(replace(checkpoint, proof=proof), Budget()).checkpoint.tensors
        assert np.array_equal(read["first"].read(), VALUES)
        if is_tied:
            assert np.array_equal(read["second"].read(), VALUES)
        else:
            with pytest.raises(CorruptError, match="other values than when it was written @ second"):
                read["second"].read()


def test_other_records_have_another_digest() -> None:
    trees: list[Any] = [
        {}, [], (), None, 0, 1, True, 1.0, "1", b"1", {"a": 1}, {"a": 1.0}, {"a": {}}, {1: "a"}, ["a", 1], [["a"], 1],
        {"a": 1, "b": 2}, {"b": 2, "a": 1}, Record("a"), Record("a", (1,)), Record("a", (), 1), float("nan"),
        in_memory(VALUES), "tensor ", ["", ""], [" "],
    ]  # fmt: skip
    digests = [records_digest(tree) for tree in trees]
    assert len(set(digests)) == len(trees)
    assert records_digest(object()) is None
