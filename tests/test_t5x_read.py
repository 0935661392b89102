from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from t5x_files import CONTAINERS, Recorded, packed_array, recorded, spec, tiny, write_index
from zarr_files import write_array

from goldens import GOLDEN
from statekit.conversion import registry
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.errors import CorruptError, FormatError, NotFoundError, RefusedError
from statekit.files.checkpoint import Checkpoint
from statekit.tensors.tensor import Array

RECORDED = recorded()
KERNEL = np.arange(12, dtype=np.float32).reshape(4, 3)


def wide(array: Array) -> Array:
    """Widens exactly, so that a parameter that was saved upcast equals its recording."""
    return array.astype(np.float64)


def test_there_are_recordings_of_every_layout() -> None:
    assert len(RECORDED) >= 34
    assert {r.container for r in RECORDED} == {"t5x", "orbax"}


@pytest.mark.parametrize("checkpoint", RECORDED, ids=str)
def test_every_tensor_of_every_recorded_checkpoint(checkpoint: Recorded) -> None:
    with checkpoint.open() as opened:
        expected = checkpoint.expected()
        assert opened.tensors.keys() == expected.keys() | {"state/step"}
        for name, array in expected.items():
            values = opened.tensors[name].read()
            assert values.shape == array.shape, name
            assert np.array_equal(wide(values), wide(array), equal_nan=True), name
            if name.startswith("state/"):
                assert values.tobytes() == array.tobytes(), name
        step = opened.tensors["state/step"]
        assert (step.dtype.name, step.shape, int(step.read())) == ("int32", (), checkpoint.step)
        assert opened.step == checkpoint.step
        assert opened.findings == ()


@pytest.mark.parametrize("checkpoint", RECORDED, ids=str)
def test_every_recorded_checkpoint_is_recognised(checkpoint: Recorded) -> None:
    for path in (checkpoint.run, checkpoint.run / f"checkpoint_{checkpoint.step}"):
        fits = {name: container.detect(path) for name, container in CONTAINERS.items()}
        evidence = fits.pop(checkpoint.container)
        assert evidence is not None
        assert evidence.specificity == 20
        assert list(fits.values()) == [None]
    assert registry.detect_container(checkpoint.run)[0].name == checkpoint.container


@pytest.mark.parametrize("checkpoint", [r for r in RECORDED if r.container == "orbax"], ids=str)
def test_an_item_is_read_by_itself(checkpoint: Recorded) -> None:
    with ORBAX.open(checkpoint.run / f"checkpoint_{checkpoint.step}" / "state") as opened:
        assert opened.tensors.keys() == checkpoint.expected().keys() | {"state/step"}


def test_a_parameter_that_nothing_moves_is_none() -> None:
    for folder in ("checkpoint", "checkpoint_orbax"):
        [run] = [r for r in RECORDED if r.run == GOLDEN / "t5x" / "multi_optimizer" / folder]
        assert run.open().tree["state"]["param_states"]["frozen"]["table"] is None


# One small checkpoint in the forms T5X's generations gave it.


def same_kernel(opened: Checkpoint) -> bool:
    return opened.tensors["target/kernel"].read().tobytes() == KERNEL.tobytes()


GCS = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}


@pytest.mark.parametrize(
    "leaf",
    [
        spec("target.kernel/", (4, 3), (2, 3)),
        spec("target.kernel", (4, 3), (2, 3)),
        spec("target.kernel", (4, 3), (2, 3), kvstore={"driver": "gfile", "path": "target.kernel/"}),
        spec("", (4, 3), (2, 3), kvstore=GCS | {"path": "target.kernel/"}),
        spec("", (4, 3), (2, 3), kvstore=GCS, path="target.kernel"),
        spec("target.kernel", (4, 3), (4, 3), transform={"input_rank": 2}),
        spec("target.kernel", (4, 3), metadata={"shape": [4, 3], "dtype": "<f4"}),
        {"driver": "zarr", "kvstore": {"driver": "file", "path": "target.kernel"}, "metadata": {}},
        packed_array(KERNEL),
    ],
)
def test_every_form_of_a_spec(tmp_path: Path, leaf: Any) -> None:
    assert same_kernel(T5X.open(tiny(tmp_path / "checkpoint_5", leaf)))


@pytest.mark.parametrize(
    "changes",
    [
        {"driver": "n5"},
        {"driver": "http", "kvstore": {"driver": "http", "base_url": "http://example.org", "path": "a"}},
        {"kvstore": {"driver": "http", "base_url": "http://example.org", "path": "target.kernel"}},
        {"kvstore": {"driver": "s3", "bucket": "b", "path": "target.kernel"}},
        {"kvstore": {"driver": "ocdbt", "base": "file:///", "path": "target.kernel"}},
        {"kvstore": {"driver": "file", "path": "/etc/passwd"}},
        {"kvstore": {"driver": "file", "path": "../checkpoint_4/target.kernel"}},
        {"kvstore": {"driver": "file", "path": "a/../../b"}},
        {"kvstore": {"driver": "file", "path": "file:///etc/passwd"}},
        {"kvstore": {"driver": "file", "path": ""}},
        {"kvstore": {"driver": "file", "path": "."}},
        {"path": "/etc/passwd"},
        {"path": "../target.kernel"},
    ],
)
def test_a_spec_that_leads_elsewhere_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    tiny(tmp_path / "checkpoint_4")
    with pytest.raises(RefusedError):
        T5X.open(tiny(tmp_path / "checkpoint_5", spec("target.kernel", (4, 3), **changes)))


def test_a_spec_whose_path_is_no_text_is_refused(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"kvstore": {"driver": "file", "path": 5}}
    with pytest.raises(FormatError, match="is 5, expected text"):
        T5X.open(tiny(tmp_path / "checkpoint_5", spec("target.kernel", (4, 3), **changes)))


def test_a_link_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    shutil.move(folder / "target.kernel", tmp_path / "elsewhere")
    (folder / "target.kernel").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(RefusedError, match="leads out"):
        T5X.open(folder)


def test_a_lost_header_is_rebuilt_and_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    (folder / "target.kernel" / ".zarray").unlink()
    opened = T5X.open(folder)
    assert same_kernel(opened)
    assert [finding.place for finding in opened.findings] == [f"{folder}/target.kernel"]
    assert "missing" in opened.findings[0].what


@pytest.mark.parametrize("missing", ["shape", "chunks", "compressor"])
def test_a_lost_header_without_a_full_spec(tmp_path: Path, missing: str) -> None:
    leaf = spec("target.kernel", (4, 3), (2, 3))
    del leaf["metadata"][missing]
    folder = tiny(tmp_path / "checkpoint_5", leaf)
    (folder / "target.kernel" / ".zarray").unlink()
    with pytest.raises(CorruptError, match="dotfiles"):
        T5X.open(folder)


def test_index_and_header_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match=r"has shape \(4, 3\), in the index \(3, 4\)"):
        T5X.open(tiny(tmp_path / "checkpoint_5", spec("target.kernel", (3, 4))))


def test_arrays_that_lie_in_one_place_are_refused(tmp_path: Path) -> None:
    """A moment in the weight's folder was converted as bitwise, and doctor found nothing."""
    folder = tiny(tmp_path / "checkpoint_5")
    leaf = spec("target.kernel/", (4, 3), (2, 3))
    slots = {"param_states": {"kernel": {"m": leaf}}, "step": 5}
    write_index(folder, {"state": slots, "target": {"kernel": leaf}}, 3)
    with pytest.raises(CorruptError, match=r"is the place of 2 arrays: state/.*/m, target/kernel"):
        T5X.open(folder)


def test_an_absent_chunk_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    (folder / "target.kernel" / "1.0").unlink()
    with pytest.raises(CorruptError, match="absent"):
        T5X.open(folder).tensors["target/kernel"].read()


def test_an_absent_chunk_that_reads_as_fill_is_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    header = folder / "target.kernel" / ".zarray"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"fill_value": 0}))
    (folder / "target.kernel" / "1.0").unlink()
    opened = T5X.open(folder)
    assert [finding.what for finding in opened.findings] == ["absent, read as fill"]
    assert np.array_equal(opened.tensors["target/kernel"].read()[2:], np.zeros((2, 3)))


def test_uint16_of_version_2_is_bfloat16(tmp_path: Path) -> None:
    values = (KERNEL / 7).astype(ml_dtypes.bfloat16)
    for version, dtype in ((2, "bfloat16"), (3, "uint16")):
        folder = tmp_path / str(version) / "checkpoint_5"
        write_array(folder / "target.kernel", values.view(np.uint16), (4, 3), dtype="<u2")
        leaves = {"kernel": spec("target.kernel", (4, 3)), "bias": packed_array(values.view(np.uint16))}
        write_index(folder, {"state": {"step": 5}, "target": leaves}, version)
        for name in ("target/kernel", "target/bias"):
            tensor = T5X.open(folder).tensors[name]
            assert (tensor.dtype.name, tensor.read().tobytes()) == (dtype, values.tobytes())


@pytest.mark.parametrize("version", [-1, 0, 1, 4, "3", None])
def test_versions_that_no_t5x_reads(tmp_path: Path, version: Any) -> None:
    with pytest.raises(FormatError):
        T5X.open(tiny(tmp_path / "checkpoint_5", version=version))


def test_the_very_old_single_file(tmp_path: Path) -> None:
    file = tmp_path / "test_t5_tiny.checkpoint_7"
    tiny(tmp_path / "checkpoint_5", packed_array(KERNEL))
    (tmp_path / "checkpoint_5" / "checkpoint").rename(file)
    assert T5X.detect(file) is not None
    opened = T5X.open(file)
    assert same_kernel(opened)
    assert opened.step == 7


def test_files_beside_are_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    (folder / "train_ds-000-of-001.index").write_bytes(b"x")
    (folder / "PINNED").write_bytes(b"1")
    (folder / "dataset").mkdir()
    (folder / "dataset" / "part").write_bytes(b"x")
    opened = T5X.open(folder)
    assert opened.meta["files_beside"] == ["PINNED", "dataset/part", "train_ds-000-of-001.index"]


def test_what_else_the_index_holds_is_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    index = msgpack.unpackb((folder / "checkpoint").read_bytes())
    (folder / "checkpoint").write_bytes(msgpack.packb(index | {"more": 1}))
    assert [finding.what for finding in T5X.open(folder).findings] == [
        "the index also holds 'more', which isn't read"
    ]


# Steps of a run.


def test_the_newest_finished_step_is_taken(tmp_path: Path) -> None:
    for step in (9, 10, 200):
        tiny(tmp_path / f"checkpoint_{step}")
    tiny(tmp_path / "checkpoint_300.tmp-1700000000")
    tiny(tmp_path / "checkpoint_400.orbax-checkpoint-tmp-5")
    (tmp_path / "checkpoint_500").mkdir()
    opened = T5X.open(tmp_path)
    assert (opened.step, opened.path) == (200, tmp_path / "checkpoint_200")
    assert [finding.place for finding in opened.findings] == [str(tmp_path / "checkpoint_500")]
    assert T5X.open(tmp_path, 9).step == 9
    assert T5X.detect(tmp_path) is not None


@pytest.mark.parametrize("step", [8, 500, -1])
def test_a_step_that_is_not_there(tmp_path: Path, step: int) -> None:
    tiny(tmp_path / "checkpoint_9")
    (tmp_path / "checkpoint_500").mkdir()
    with pytest.raises(NotFoundError, match="found: 9"):
        T5X.open(tmp_path, step)
    with pytest.raises(NotFoundError):
        T5X.open(tmp_path / "checkpoint_9", step)


@pytest.mark.parametrize("name", ["checkpoint_5.tmp-1700000000", "checkpoint_5.orbax-checkpoint-tmp"])
def test_an_unfinished_step_is_refused(tmp_path: Path, name: str) -> None:
    folder = tiny(tmp_path / name)
    assert T5X.detect(folder) is None
    with pytest.raises(FormatError, match="wasn't finished"):
        T5X.open(folder)


def test_a_run_of_both_generations(tmp_path: Path) -> None:
    tiny(tmp_path / "checkpoint_2")
    shutil.copytree(
        GOLDEN / "t5x" / "momentum_f32" / "checkpoint_orbax" / "checkpoint_4", tmp_path / "checkpoint_4"
    )
    assert registry.detect_container(tmp_path)[0].name == "orbax"
    assert (ORBAX.open(tmp_path).step, T5X.open(tmp_path, 2).step) == (4, 2)
    with pytest.raises(NotFoundError, match="--from orbax"):
        T5X.open(tmp_path)
    with pytest.raises(NotFoundError, match="--from t5x"):
        ORBAX.open(tmp_path, 2)


@pytest.mark.parametrize(
    "data", [b"", b'model_checkpoint_path: "model.ckpt-5"\n', b"\x80", b"\x81\xa1a\x01", b"{}"]
)
def test_other_files_of_that_name_are_not_taken(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "checkpoint_5").mkdir()
    (tmp_path / "checkpoint_5" / "checkpoint").write_bytes(data)
    for container in CONTAINERS.values():
        assert container.detect(tmp_path) is None
        assert container.detect(tmp_path / "checkpoint_5") is None
        with pytest.raises(NotFoundError):
            container.open(tmp_path)


def test_a_damaged_index(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    data = (folder / "checkpoint").read_bytes()
    (folder / "checkpoint").write_bytes(data[:-3])
    with pytest.raises(CorruptError):
        T5X.open(folder)


# Orbax.


def orbax_copy(tmp_path: Path, run: str) -> Path:
    source = GOLDEN / run
    target = tmp_path / source.name
    shutil.copytree(source, target)
    return target


OCDBT = "t5x/momentum_f32/checkpoint_orbax/checkpoint_4"
MSGPACK = "t5x_checkpoints/older_t5x/2024-06/momentum_f32/orbax/checkpoint_4"


def edited(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    folder = orbax_copy(tmp_path, OCDBT)
    path = folder / "state" / "_METADATA"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    return folder


def drop_ocdbt_key(document: dict[str, Any]) -> None:
    del document["use_ocdbt"]


def test_a_database_is_known_by_its_file(tmp_path: Path) -> None:
    assert len(ORBAX.open(edited(tmp_path, drop_ocdbt_key)).tensors) == 31


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(use_zarr3=True),
        lambda d: d.update(tree_metadata=[]),
        lambda d: d["tree_metadata"].update(x={}),
        lambda d: d["tree_metadata"].update(x={"key_metadata": [], "value_metadata": 1}),
        lambda d: next(iter(d["tree_metadata"].values()))["value_metadata"].update(skip_deserialize=True),
        lambda d: next(iter(d["tree_metadata"].values()))["key_metadata"].append(
            {"key": "more", "key_type": 2}
        ),
        lambda d: next(iter(d["tree_metadata"].values()))["key_metadata"][0].update(key="../../x"),
        lambda d: d["tree_metadata"].update(x=next(iter(d["tree_metadata"].values()))),
    ],
)
def test_a_tree_that_lies(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(FormatError):
        ORBAX.open(edited(tmp_path, edit))


def test_lists_and_empty_nodes_of_a_tree(tmp_path: Path) -> None:
    def edit(document: dict[str, Any]) -> None:
        entries = document["tree_metadata"]
        for i, entry in enumerate([*entries.values()][:2]):
            entry["key_metadata"] = [{"key": "rows", "key_type": 2}, {"key": str(i), "key_type": 1}]
            entry["value_metadata"] = {"value_type": ["Dict", "List"][i], "skip_deserialize": True}

    assert ORBAX.open(edited(tmp_path, edit)).tree["rows"] == [{}, []]


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b'{"tree_metadata": {}, "tree_metadata": {}}'])
def test_metadata_that_is_no_json(tmp_path: Path, text: bytes) -> None:
    folder = orbax_copy(tmp_path, OCDBT)
    (folder / "state" / "_METADATA").write_bytes(text)
    with pytest.raises(FormatError):
        ORBAX.open(folder)


def test_an_item_that_does_not_say_what_it_holds(tmp_path: Path) -> None:
    folder = orbax_copy(tmp_path, OCDBT)
    (folder / "state" / "_METADATA").unlink()
    with pytest.raises(FormatError, match="_METADATA"):
        ORBAX.open(folder)


def test_a_database_without_its_parts(tmp_path: Path) -> None:
    folder = orbax_copy(
        tmp_path, "t5x/default_heuristics/checkpoint_orbax/checkpoint_3"
    )  # one is too large to be inline
    shutil.rmtree(folder / "state" / "ocdbt.process_0")
    tensor = ORBAX.open(folder).tensors["target/encoder/layers_0/mlp/wi_0/kernel"]
    with pytest.raises(CorruptError, match=r"ocdbt.process_\*"):
        tensor.read()


def test_a_folder_without_a_tree(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_5").mkdir()
    (tmp_path / "checkpoint_5" / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(FormatError, match="holds no tree"):
        ORBAX.open(tmp_path)
    evidence = ORBAX.detect(tmp_path)
    assert evidence is not None
    assert evidence.specificity == 10


def test_missing_headers_of_placeholders_are_all_named(tmp_path: Path) -> None:
    folder = orbax_copy(tmp_path, MSGPACK)
    gone = sorted(folder.glob("state/target.*/.zarray"))
    for path in gone:
        path.unlink()
    with pytest.raises(CorruptError) as raised:
        ORBAX.open(folder)
    places = [place for _, place in raised.value.faults]
    assert all(any(path.parent.name in place for place in places) for path in gone)
    assert f"@ {len(gone)} places: " in str(raised.value)


@pytest.mark.parametrize(
    "name", ["PLACEHOLDER://../x", "PLACEHOLDER:///etc/passwd", "PLACEHOLDER://", "AGGREGATED://.."]
)
def test_placeholders_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    folder = orbax_copy(tmp_path, MSGPACK)
    tree = {"state": {"step": name}, "target": {"a": "PLACEHOLDER://target.a"}}
    (folder / "state" / "checkpoint").write_bytes(msgpack.packb(tree))
    with pytest.raises(RefusedError):
        ORBAX.open(folder)


def first_orbax(folder: Path, mark: str = "PLACEHOLDER") -> Path:
    """Writes what T5X wrote in late 2022: a whole train state, arrays beside it, no metadata."""
    write_array(folder / "state" / "_optimizer.target.kernel", KERNEL, (4, 3), "zstd")
    tree = {
        "_optimizer": {
            "state": {"step": packed_array(np.asarray(1, np.int32)), "param_states": {}},
            "target": {"kernel": f"{mark}://_optimizer.target.kernel"},
        },
        "flax_mutables": {},
        "params_axes": None,
    }
    (folder / "state" / "checkpoint").write_bytes(msgpack.packb(tree))
    return folder


@pytest.mark.parametrize("mark", ["PLACEHOLDER", "AGGREGATED"])
def test_the_first_orbax_layout(tmp_path: Path, mark: str) -> None:
    folder = first_orbax(tmp_path / "1", mark)
    evidence = ORBAX.detect(folder)
    assert evidence is not None
    assert evidence.specificity == 20
    opened = ORBAX.open(tmp_path)
    assert same_kernel(opened)
    assert opened.tree.keys() == {"state", "target"}
    assert opened.step == 1


def test_specs_inside_an_orbax_index(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_5"
    write_array(folder / "state" / "target.kernel", KERNEL, (4, 3))
    tree = {"state": {"step": 5, "param_states": None}, "target": {"kernel": spec("target.kernel", (4, 3))}}
    (folder / "state" / "checkpoint").write_bytes(msgpack.packb(tree))
    assert same_kernel(ORBAX.open(folder))


def test_several_items_are_a_tree_of_items(tmp_path: Path) -> None:
    folder = tmp_path / "5"
    for item in ("params", "opt_state"):
        write_array(folder / item / "a", KERNEL, (4, 3))
        (folder / item / "checkpoint").write_bytes(msgpack.packb({"a": "PLACEHOLDER://a"}))
    opened = ORBAX.open(tmp_path)
    assert opened.tensors.keys() == {"params/a", "opt_state/a"}
    evidence = ORBAX.detect(tmp_path)
    assert evidence is not None
    assert evidence.specificity == 10
