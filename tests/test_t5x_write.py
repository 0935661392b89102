from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from t5x_files import CONTAINERS, Recorded, recorded
from zarr_files import PlainStage, plain_stage

from goldens import GOLDEN, bundles
from statekit.conversion.contracts import Container, Encoded, Hints
from statekit.converters.containers.orbax import writer as orbax_writer
from statekit.converters.containers.orbax.container import CONTAINER as ORBAX
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.converters.formats.zarr import writer
from statekit.converters.layouts.t5x.layout import LAYOUT
from statekit.errors import CommitError, FormatError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged
from statekit.tensors.tensor import Array, in_memory
from statekit.testing.container_trials import open_proven

CASES = [bundle.name for bundle in bundles("t5x")]
CLAIM = "statekit.json"


def write(container: Container, encoded: Encoded, target: Path) -> Checkpoint:
    """Writes through the real stage, which reads everything again, and opens the result."""
    with staged(target, "folder") as stage:
        container.write(encoded, stage)
        stage.commit(container.open)
    return open_proven(container, target)


def encoded(checkpoint: Checkpoint) -> Encoded:
    return LAYOUT.encode(LAYOUT.decode(checkpoint, Hints()))


def contents(checkpoint: Checkpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.dtype.name, t.shape, t.read().tobytes()) for name, t in checkpoint.tensors.items()}


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.sampled(8)
@pytest.mark.parametrize("source", recorded(), ids=str)
def test_t5x_to_canonical_to_t5x_is_identical(source: Recorded, tmp_path: Path) -> None:
    with source.open() as original:
        expected = contents(original)
        for name, container in CONTAINERS.items():
            again = write(container, encoded(original), tmp_path / name)
            assert contents(again) == expected
            assert again.step == original.step
            assert again.findings == ()
            assert again.manifest is not None


@pytest.mark.parametrize("case", CASES)
def test_index_and_headers_are_those_t5x_wrote(case: str, tmp_path: Path) -> None:
    run = GOLDEN / "t5x" / case / "checkpoint"
    write(T5X, encoded(T5X.open(run)), tmp_path / "run")
    theirs, ours = files(run), files(tmp_path / "run")
    assert ours.keys() == theirs.keys() | {CLAIM}
    same = [name for name in theirs if name.endswith(("/checkpoint", "/.zarray"))]
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    for name, data in theirs.items():  # zlib's versions compress differently; everything else is one
        assert ours[name][:4] == data[:4]


def flat(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Array]:
    if isinstance(tree, dict):
        return {name: leaf for key, node in tree.items() for name, leaf in flat(node, (*path, key)).items()}
    return {} if tree is None else {"/".join(path): np.asarray(tree)}


@pytest.mark.jax
@pytest.mark.parametrize("case", ["momentum_f32", "multi_optimizer", "small_factor_shapes", "bf16_params"])
def test_orbax_restores_what_is_written(case: str, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with T5X.open(GOLDEN / "t5x" / case / "checkpoint") as original:
        written = write(ORBAX, encoded(original), tmp_path / "run")
        restored = flat(ocp.PyTreeCheckpointer().restore(written.path / "state"))
        expected = contents(original)
    assert {name: (a.dtype.name, a.shape, a.tobytes()) for name, a in restored.items()} == expected


@pytest.mark.jax
def test_orbax_restores_into_jax_arrays_as_t5x_does(tmp_path: Path) -> None:
    import jax
    import orbax.checkpoint as ocp

    with T5X.open(GOLDEN / "t5x" / "momentum_f32" / "checkpoint") as original:
        written = write(ORBAX, encoded(original), tmp_path / "run")
        expected = contents(original)
    item = ocp.PyTreeCheckpointer().restore(written.path / "state")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = jax.tree_util.tree_map(
        lambda leaf: ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding, global_shape=leaf.shape),
        item,
    )
    restored = ocp.PyTreeCheckpointer().restore(written.path / "state", item=item, restore_args=arguments)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(restored))
    assert {n: (a.dtype.name, a.shape, a.tobytes()) for n, a in flat(restored).items()} == expected


def test_tensorstore_opens_the_arrays_of_the_legacy_layout(tmp_path: Path) -> None:
    import tensorstore as ts

    written = write(T5X, encoded(T5X.open(GOLDEN / "t5x" / "bf16_params" / "checkpoint")), tmp_path / "run")
    arrays = sorted(path.parent for path in Path(written.path).glob("*/.zarray"))
    assert len(arrays) == 5
    for folder in arrays:
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder}/"}}
        theirs = ts.open(spec).result().read().result()
        name = folder.name.replace(".", "/")
        assert theirs.tobytes() == written.tensors[name].read().tobytes()


# Trees of one's own.


def tree(**target: Any) -> Encoded:
    leaves = {name: in_memory(np.asarray(array)) for name, array in target.items()}
    step = in_memory(np.asarray(7, np.int32))
    tree = {"state": {"step": step, "param_states": {}}, "target": leaves}
    return Encoded(tree, 7, place="checkpoint_{step}/state")


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_arrays_in_several_chunks(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape_of in (writer.chunk_shape, writer.run_shape):
        monkeypatch.setattr(shape_of, "__defaults__", (256,))
    random = np.random.default_rng(5)
    arrays = {
        "rows": random.standard_normal((40, 8)).astype(np.float32),
        "grid": random.standard_normal((12, 60)).astype(ml_dtypes.bfloat16),
        "line": random.standard_normal(301).astype(np.float64),
        "flag": random.standard_normal((3, 5)) > 0,
    }
    written = write(container, tree(**arrays), tmp_path / "run")
    assert written.tensors["target/grid"].grain not in ((12, 60), ())
    for name, array in arrays.items():
        assert written.tensors[f"target/{name}"].read().tobytes() == array.tobytes()


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (3, 0)])
def test_small_shapes(container: Container, tmp_path: Path, shape: tuple[int, ...]) -> None:
    written = write(container, tree(a=np.ones(shape, np.float32)), tmp_path / "run")
    assert written.tensors["target/a"].shape == shape
    assert written.tensors["target/a"].read().tobytes() == np.ones(shape, np.float32).tobytes()


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_where_a_step_is_written(container: Container, tmp_path: Path) -> None:
    assert write(container, tree(a=1.0), tmp_path / "run").path == tmp_path / "run" / "checkpoint_7"
    assert write(container, tree(a=1.0), tmp_path / "checkpoint_7").path == tmp_path / "checkpoint_7"
    with pytest.raises(UsageError, match="checkpoint_7"):
        write(container, tree(a=1.0), tmp_path / "checkpoint_8")
    assert not (tmp_path / "checkpoint_8").exists()


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_names_that_collide_when_they_are_joined(container: Container, tmp_path: Path) -> None:
    colliding = tree(**{"a.b": 1.0, "c": 2.0})
    colliding.tree["target"]["a"] = {"b": in_memory(np.asarray(3.0))}
    with pytest.raises(FormatError, match=r"(?s)target/a/b.*nothing tells a.b from a/b"):
        write(container, colliding, tmp_path / "run")


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("name", ["x" * 300, "nul\0", "back\\slash", "a/b", "../up", "half\ud800"])
def test_names_that_no_folder_can_have(container: Container, tmp_path: Path, name: str) -> None:
    with pytest.raises(FormatError, match="no folder can have"):
        write(container, tree(**{name: 1.0}), tmp_path / "run")


def test_a_name_with_dots_keeps_its_path(tmp_path: Path) -> None:
    for name, container in CONTAINERS.items():
        written = write(container, tree(**{"layer.0": 1.0, "..up": 2.0}), tmp_path / name)
        assert written.tree["target"].keys() == {"layer.0", "..up"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["orbax", "t5x"]


@pytest.mark.parametrize("value", [[1, 2], (1,), object()])
def test_values_that_have_no_place(tmp_path: Path, value: Any) -> None:
    for container in CONTAINERS.values():
        extra = tree(a=1.0)
        extra.tree["state"]["more"] = value
        if container is ORBAX or not isinstance(value, list):
            with pytest.raises(UsageError):
                write(container, extra, tmp_path / "run")


def test_records_beside_the_arrays(tmp_path: Path) -> None:
    extra = tree(a=1.0)
    extra.tree["flax_mutables"] = {"none": None, "empty": {}, "number": 5, "text": "é", "bits": b"\0\xff"}
    assert write(T5X, extra, tmp_path / "run").tree["flax_mutables"] == extra.tree["flax_mutables"]
    extra.tree["flax_mutables"] = {"none": None, "empty": {}}
    assert write(ORBAX, extra, tmp_path / "again").tree["flax_mutables"] == extra.tree["flax_mutables"]


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_every_tensor_is_streamed(container: Container, tmp_path: Path) -> None:
    stage: PlainStage = plain_stage(tmp_path)
    original = T5X.open(GOLDEN / "t5x" / "momentum_f32" / "checkpoint")
    container.write(encoded(original), stage)
    assert stage.streamed == {name: data for name, (_, _, data) in contents(original).items()}


def test_what_is_partitioned_is_in_zarr_and_the_rest_inline(tmp_path: Path) -> None:
    write(T5X, encoded(T5X.open(GOLDEN / "t5x" / "small_factor_shapes" / "checkpoint")), tmp_path / "run")
    folders = {path.parent.name for path in (tmp_path / "run").rglob(".zarray")}
    assert "target.encoder.temperature" in folders
    assert "state.param_states.encoder.temperature.v" in folders
    assert (
        "state.param_states.encoder.gate.v" not in folders
    )  # a real v of shape (1,) is inline, as T5X has it
    assert not any(name.endswith(("v_row", "v_col", ".m", "step")) for name in folders)


def test_a_database_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorstore as ts

    class Full:
        def with_transaction(self, transaction: object) -> Full:
            return self

        def write(self, key: str, value: bytes) -> object:
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

        def result(self) -> Full:
            return self

    class Store:
        open = staticmethod(lambda spec: Full())

    monkeypatch.setattr(ts, "KvStore", Store)
    with pytest.raises(CommitError, match="No space left"):
        write(ORBAX, tree(a=1.0), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_commit_that_fails_while_the_next_is_compressed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorstore as ts

    class Taking:
        def with_transaction(self, transaction: object) -> Taking:
            return self

        def write(self, key: str, value: bytes) -> Taking:
            return self

        def result(self) -> Taking:
            return self

    class Failing:
        def commit_async(self) -> Failing:
            return self

        def commit_sync(self) -> None:
            pass

        def result(self) -> None:
            raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    class Store:
        open = staticmethod(lambda spec: Taking())

    monkeypatch.setattr(ts, "KvStore", Store)
    monkeypatch.setattr(ts, "Transaction", Failing)
    monkeypatch.setattr(orbax_writer, "_COMMIT_BYTES", 1)
    with pytest.raises(CommitError, match="No space left"):
        write(ORBAX, tree(a=1.0), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
