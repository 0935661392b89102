"""Flax' msgpack files: what Flax wrote is read and written back byte for byte, and Flax restores what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from test_optax_layout import PARAMS, adam, factored
from test_orbax_restored import chains, exact, flat

from formats import check_conformance, damaged_copies, read_all, values
from goldens import GOLDEN, bundles
from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.conversion import registry
from statekit.conversion.contracts import Encoded, Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.flax_msgpack import CONTAINER as FLAX
from statekit.converters.formats.msgpack import writer
from statekit.errors import FormatError, NotFoundError, RefusedError, StatekitError, UsageError
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import nested
from statekit.testing.container_trials import open_proven
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

T5X = GOLDEN / "t5x" / "momentum_f32" / "checkpoint"


def recorded() -> list[Path]:
    """Returns the recordings of Optax whose checkpoint is a file of Flax."""
    metas = {bundle: json.loads((bundle / "meta.json").read_text()) for bundle in bundles("optax_adafactor")}
    return [bundle for bundle, meta in metas.items() if "flax" in meta["checkpoint"]["format"]]


RECORDED = recorded()
each = pytest.mark.parametrize("bundle", RECORDED, ids=lambda bundle: bundle.name)


def file_of(bundle: Path) -> Path:
    return bundle / "checkpoint" / "checkpoint_4"


@each
def test_a_recorded_state_is_decoded_exactly(bundle: Path) -> None:
    with open_recording(bundle) as recording, open_state(bundle / "checkpoint") as opened:
        assert (opened.checkpoint.container, opened.layout, opened.checkpoint.step) == ("flax", "optax", 4)
        said = recording.state(4, recording.trajectories[0], 5)
        assert opened.state.counts == said.counts
        assert values(opened.state.params) == values(said.params)
        slots = {path: values(tensors) for path, tensors in opened.state.slots.items()}
        assert slots == {path: values(tensors) for path, tensors in said.slots.items()}


@each
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name, name == "tensorflow")) for name in BACKENDS]
)
def test_a_run_goes_on_from_its_checkpoint(name: str, bundle: Path) -> None:
    with open_recording(bundle) as recording:
        result = replay(Subject(recording), backend(name))
    assert (result.decoded, result.start) == ((), "checkpoint")
    assert result.passed


@each
def test_a_recording_is_written_back_byte_for_byte(bundle: Path, tmp_path: Path) -> None:
    report = convert(plan(file_of(bundle), tmp_path / "run", to="flax"))
    assert report.plan.exactness is Exactness.BITWISE and not report.plan.dropped
    assert (tmp_path / "run" / "checkpoint_4").read_bytes() == file_of(bundle).read_bytes()
    convert(plan(tmp_path / "run", tmp_path / "again", to="flax"))
    assert (tmp_path / "again" / "checkpoint_4").read_bytes() == file_of(bundle).read_bytes()


@each
def test_a_state_goes_to_every_folder_and_back(bundle: Path, tmp_path: Path) -> None:
    with open_state(file_of(bundle)) as opened:
        expected = (
            values(opened.state.params),
            {p: values(tensors) for p, tensors in opened.state.slots.items()},
        )
    for name, layout in (("statekit", None), ("orbax", None), ("orbax", "statekit-jax")):
        there, back = tmp_path / f"{name}{layout}", tmp_path / f"back{name}{layout}"
        convert(plan(file_of(bundle), there, to=name, layout=layout))
        convert(plan(there, back, to="flax", layout="optax"))
        with open_state(back) as opened:
            state = opened.state
            assert (
                values(state.params),
                {p: values(tensors) for p, tensors in state.slots.items()},
            ) == expected


def everything() -> dict[str, Any]:
    """Returns a tree with all that msgpack of Flax holds, in every length of a head."""
    random = np.random.default_rng(0)
    sizes = (0, 1, 2, 4, 8, 16, 200, 250, 300, 65_500, 65_536, 70_000)
    return {
        "bytes": {str(n): random.integers(0, 255, n, np.uint8) for n in sizes},
        "half": random.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
        "pair": np.asarray([1 + 2j], np.complex64),
        "scalar": {"int": np.int32(7), "float": np.float32(0.5), "complex": 1.5 - 2j},
        "number": {"int": 2**40, "big": 2**64 - 1, "negative": -3, "float": 0.1, "yes": True, "no": False},
        "text": "é" * 40,
        "raw": b"\0\1",
        "empty": {},
        "many": {str(i): np.float64(i) for i in range(70)},
        "huge": random.normal(size=(7, 301)).astype(np.float32),
    }


@pytest.mark.jax
@pytest.mark.parametrize("chunk", [2**30, 1000, 8000])
def test_everything_is_written_as_flax_writes_it(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", chunk)
    monkeypatch.setattr(writer, "MAX_CHUNK", chunk)
    tree = everything()
    (tmp_path / "a.msgpack").write_bytes(serialization.to_bytes(tree))
    with FLAX.open(tmp_path / "a.msgpack") as opened:
        assert opened.tensors["number/big"].read() == 2**64 - 1
        assert opened.tensors["half"].dtype == ml_dtypes.bfloat16
        assert opened.tensors["huge"].read().tobytes() == tree["huge"].tobytes()
        check_conformance(FLAX, Encoded(opened.tree, 5), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoint_5").read_bytes() == (tmp_path / "a.msgpack").read_bytes()


@pytest.mark.jax
def test_states_in_every_wrapper_come_back_into_themselves(tmp_path: Path) -> None:
    """Also by way of Orbax, which tells a tuple from a map."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from flax import serialization
    from flax.training import checkpoints

    params = {"dense": {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros(4)}, "0": jnp.zeros(())}
    random = np.random.default_rng(0)

    def some(leaf: Any) -> Any:
        if leaf.shape == (1,):  # what Adafactor keeps in the place of a slot that it doesn't use
            return np.zeros_like(leaf)
        return np.asarray(2, np.int32) if leaf.dtype == np.int32 else random.random(leaf.shape, np.float32)

    for name, optimizer in chains().items():
        if name in ("adamw_mask", "masked", "labels", "nadamw_bf16"):  # masks are of other parameters
            continue
        state = {"step": jnp.int32(0), "params": params, "opt_state": optimizer.init(params)}
        tree = jax.tree.map(some, state)
        source = tmp_path / f"{name}.msgpack"
        source.write_bytes(serialization.to_bytes(tree))
        convert(plan(source, tmp_path / name, to="flax"))
        assert (tmp_path / name / "checkpoint_2").read_bytes() == source.read_bytes(), name
        if name not in ("adam", "adafactor", "accumulated"):
            continue
        convert(plan(source, tmp_path / f"{name}-orbax", to="orbax"))
        convert(plan(tmp_path / f"{name}-orbax", tmp_path / f"{name}-back", to="flax"))
        with ocp.StandardCheckpointer() as saver:
            restored = [
                checkpoints.restore_checkpoint(tmp_path / f"{name}-back", state),
                saver.restore(tmp_path / f"{name}-orbax" / "2" / "default", tree),
            ]
        for again in restored:
            assert jax.tree.structure(again) == jax.tree.structure(tree), name
            assert exact(flat(again)) == exact(flat(tree)), name


@pytest.mark.jax
def test_a_t5x_run_goes_on_in_flax(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp
    import optax

    from statekit.conversion.resume import of_plan, resume_lines

    with open_state(T5X) as opened:
        state = opened.state
        zeros = nested({tuple(p.split("/")): jnp.zeros(t.shape, t.dtype) for p, t in state.params.items()})
        momentum = {path: tensors["m"].read().tobytes() for path, tensors in state.slots.items()}
    adafactor = optax.adafactor(optax.constant_schedule(0.1), min_dim_size_to_factor=10, momentum=0.9)
    for layout, optimizer in (("optax", adafactor), ("statekit-jax", None)):
        planned = plan(T5X, tmp_path / layout, to="flax", layout=layout)
        convert(planned)
        lines = "\n".join(resume_lines(of_plan(planned), planned.state))
        lines = lines.replace("learning_rate=...", "0.1").replace("beta1=...", "beta1=0.9")
        lines = lines.replace("momentum=...", "momentum=0.9")
        names: dict[str, Any] = {"params": zeros, "schedule": optax.constant_schedule(0.1)}
        exec(compile(lines, "to go on", "exec"), names)
        restored = names["state"]
        assert jax.tree.structure(restored) == jax.tree.structure(names["target"])
        opt_state = restored["opt_state"]
        restored_momentum = flat(opt_state[4].ema if optimizer is adafactor else opt_state.m)
        assert {path: array.tobytes() for path, array in restored_momentum.items()} == momentum


def packed(tree: Any) -> bytes:
    """Returns a tree of arrays as Flax packs it."""

    def extension(leaf: Any) -> msgpack.ExtType:
        array = leaf.read()
        return msgpack.ExtType(1, msgpack.packb([list(array.shape), array.dtype.name, array.tobytes()]))

    return bytes(msgpack.packb(tree, default=extension))


@pytest.mark.parametrize(("state", "schema"), [(adam(), "adamw"), (factored(), "adafactor")])
def test_chains_are_known_without_their_tuples(state: Any, schema: str, tmp_path: Path) -> None:
    tree = {"params": PARAMS, "opt_state": {"0": state, "1": {}, "2": {"inner_state": {}}}}
    (tmp_path / "state.msgpack").write_bytes(packed(tree))
    with open_state(tmp_path / "state.msgpack") as opened:
        assert opened.state.optimizer.schema == schema
        frame = opened.state.extra["optax"]["tree"]["opt_state"]
        assert [frame[1], frame[2]] == [None, {"inner_state": None}]
    convert(plan(tmp_path / "state.msgpack", tmp_path / "run", to="flax"))
    assert (tmp_path / "run" / "checkpoint_5").read_bytes() == (tmp_path / "state.msgpack").read_bytes()


def test_the_newest_step_of_a_run_or_the_given_one(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        tree = {"step": step, "params": PARAMS, "opt_state": {"0": adam(), "1": {}}}
        (tmp_path / f"checkpoint_{step}").write_bytes(packed(tree))
    (tmp_path / "checkpoint_tmp").write_bytes(b"half of it")
    (tmp_path / "log_11").write_text("nothing of the kind")
    opened = FLAX.open(tmp_path)
    assert (opened.step, opened.path.name, opened.meta["steps"]) == (10, "checkpoint_10", [2, 9, 10, 11])
    assert [finding.place for finding in opened.findings] == [str(tmp_path / "log_11")]
    assert FLAX.open(tmp_path, 9).tensors["step"].read() == 9
    with pytest.raises(NotFoundError, match="no such step"):
        FLAX.open(tmp_path, 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x89HDF\r\n\x1a\n",
        b"\x89PNG\r\n",
        b"\x80\x04\x95",
        b"PK\3\4",
        b"\x81\xa3\0\1\2",
        b"model",
    ],
)
def test_other_files_are_not_taken_for_flax(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file_7").write_bytes(data)
    assert FLAX.detect(tmp_path / "file_7") is None
    assert FLAX.detect(tmp_path) is None


def test_t5x_stays_t5x() -> None:
    index = next(T5X.rglob("checkpoint"))
    assert FLAX.detect(index.parent) is None and FLAX.detect(index) is None
    assert registry.detect_container(index)[0].name == "t5x"
    with pytest.raises(NotFoundError, match="--from t5x"):
        FLAX.open(index)


def test_arrays_of_other_processes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_1").write_bytes(packed({"params": {"a": "//GDAPlaceholder:params/a"}}))
    with pytest.raises(RefusedError, match="several processes"):
        FLAX.open(tmp_path)


def test_what_flax_cannot_hold_is_said(tmp_path: Path) -> None:
    with pytest.raises(StatekitError, match="a/b"):
        check_conformance(FLAX, Encoded({"a": {"b": {1, 2}}}, 1), tmp_path / "run")


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """Wrong sizes, cut and deep files; `test_t5x_msgpack` has every way to lie, for the same parser."""
    array = msgpack.ExtType(1, msgpack.packb([[2, 3], "float32", b"\0" * 20]))
    files = {
        "size": msgpack.packb({"a": array}),
        "object": msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb([[1], "object", b"\0" * 8]))}),
        "foreign": msgpack.packb({"a": msgpack.ExtType(42, b"pickle")}),
        "deep": b"\x81\xa1a" * 5000 + b"\xc0",
        "long": packed({"params": PARAMS}) + b"\0",
        "list": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(FormatError):
            FLAX.open(tmp_path / name)


def test_damage_is_noticed(tmp_path: Path) -> None:
    tree = {"params": PARAMS, "opt_state": {"0": adam(), "1": {}}}
    (tmp_path / "state.msgpack").write_bytes(packed(tree))
    convert(plan(tmp_path / "state.msgpack", tmp_path / "run", to="flax"))
    sound = read_all(FLAX, tmp_path / "run")
    noticed = 0
    for _, copy, _ in damaged_copies(tmp_path / "run", tmp_path / "copies"):
        values = read_all(FLAX, copy)
        if values not in (None, sound):
            assert open_proven(FLAX, copy).manifest is None
        noticed += values != sound
    assert sound is not None and noticed > 5


def test_numbers_of_other_systems_come_back_as_numbers(tmp_path: Path) -> None:
    """As where a run's data stands, which Orbax keeps as JSON: the manifest names what is read."""
    tree = {"epoch": 1, "rate": 0.5, "done": False, "name": "run"}
    check_conformance(FLAX, FLAX.fitted(Encoded(tree, 3)), tmp_path / "run")
    assert msgpack.unpackb((tmp_path / "run" / "checkpoint_3").read_bytes()) == tree
    with pytest.raises(UsageError, match="can't hold this value"):
        check_conformance(FLAX, FLAX.fitted(Encoded({"epoch": 2**64}, 3)), tmp_path / "huge")


def test_two_writes_are_equal(tmp_path: Path) -> None:
    tree = {"a": [in_memory(np.arange(5.0)), None, ()], "b": "text"}
    for name in ("one", "two"):
        check_conformance(FLAX, Encoded(tree, 3), tmp_path / name)
    one, two = (tmp_path / name / "checkpoint_3" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert FLAX.open(one).tree["a"].keys() == {"0", "1", "2"}


def test_inspecting_imports_no_framework(tmp_path: Path) -> None:
    from test_import_is_free import cli

    (tmp_path / "checkpoint_5").write_bytes(packed({"params": PARAMS, "opt_state": adam()}))
    assert cli("inspect", "--stats", tmp_path) == set()
