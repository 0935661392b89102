"""Files of Keras 3: what Keras wrote is read to the bit and written back; what a hostile hand wrote is refused."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file
from tf_files import save

from goldens import bundles
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Encoded, Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.keras_h5 import CONTAINER as H5
from statekit.converters.containers.keras_zip import CONTAINER as ZIP
from statekit.converters.formats.hdf5.reader import open_hdf5
from statekit.converters.formats.hdf5.writer import write_hdf5
from statekit.converters.formats.tensor_bundle.graph_proto import graph_bytes, parse_graph
from statekit.converters.layouts.keras.layout import LAYOUT
from statekit.converters.layouts.keras.state import HOME, Kept, numbered, places
from statekit.converters.layouts.keras.statekit_keras import (
    Own,
    arguments,
    named_slots,
    own_state,
    own_variables,
)
from statekit.errors import (
    CorruptError,
    FormatError,
    InexactError,
    NotFoundError,
    RefusedError,
    StateError,
    StatekitError,
    UsageError,
)
from statekit.files.checkpoint import ATTRIBUTES
from statekit.files.source import Held
from statekit.files.stage import staged
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.object_graph import GRAPH, SUFFIX, Graph, Node, Slot, Value
from statekit.tensors.tensor import Array, Tensor, dtype_named, in_memory
from statekit.tensors.tree import tensor_names

FORMS = ("model.weights.h5", "model.keras", "tf_checkpoint")
CASES = bundles("keras")
SAVED = [(case, form) for case in CASES for form in FORMS if (case / "checkpoint" / form).exists()]
WHOLE = [case for case in CASES if all((case, form) in SAVED for form in FORMS)]
"""The compact copy holds one form of one case only."""


def meta_of(case: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((case / "meta.json").read_text())
    return meta


def hints_of(case: Path, form: str, named: bool = True) -> CheckpointRef:
    """Returns what the files don't say: names in a class that isn't Keras', and whether there are averages."""
    meta = meta_of(case)
    averages = {"use_ema": True} if form == FORMS[0] and meta["hyperparameters"]["use_ema"] else {}
    names = tuple(meta["extra"]["param_order"]) if named and form != FORMS[2] else None
    return Hints(averages, None, names)


def recorded(case: Path) -> tuple[dict[str, Array], dict[tuple[str, str], Array]]:
    """Returns the recorded parameters and slots at the checkpoint's step, by canonical names."""
    meta = meta_of(case)
    now = f"{meta['checkpoint_step']}/"
    arrays = {name.removeprefix(now): a for name, a in load_file(case / "trajectory.safetensors").items()}
    schema = {"Adafactor": "adafactor", "Lamb": "lamb", "AdamW": "adamw"}[
        meta["optimizer"].rpartition(".")[2]
    ]
    canonical = {s.aliases.get("keras", ""): name for name, s in load_schema(schema).slots.items()}
    params, slots = {}, {}
    for path in meta["extra"]["param_order"]:
        params[path] = arrays[f"param/{path}"]
        for name, array in arrays.items():
            owner, _, native = name.removeprefix("slot/").rpartition("/")
            factored = schema == "adafactor" and array.ndim > 1 and native == "v"
            if name.startswith("slot/") and owner == path and array.dtype.kind == "f" and not factored:
                slots[path, canonical[native]] = array
    return params, slots


def is_recorded(state: TrainState, case: Path) -> None:
    params, slots = recorded(case)
    tensors = {(path, name): t for path, tensors in state.slots.items() for name, t in tensors.items()}
    assert tensors.keys() == slots.keys()
    for path, array in params.items():
        np.testing.assert_array_equal(state.params[path].read(), array, strict=True)
    for key, array in slots.items():
        np.testing.assert_array_equal(tensors[key].read(), array, strict=True)
    assert state.counts.updates == meta_of(case)["checkpoint_step"]
    assert state.optimizer.variant == "keras"


def values(tensors: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (t.dtype.name, t.shape, t.read().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize(("case", "form"), SAVED, ids=lambda part: getattr(part, "name", part))
def test_what_keras_saved_is_what_was_recorded_and_is_written_back_to_the_bit(
    case: Path, form: str, tmp_path: Path
) -> None:
    source, hints = case / "checkpoint" / form, hints_of(case, form)
    suffix = f".{form.partition('.')[2]}" if "." in form else ".ckpt.d"
    target = tmp_path / f"written{suffix}"
    report = convert(plan(source, target, hints=hints))
    assert not report.plan.dropped and report.plan.exactness == Exactness.BITWISE
    with open_state(source, hints=hints) as theirs, open_state(target) as ours:
        is_recorded(theirs.state, case)
        is_recorded(ours.state, case)
        assert theirs.layout == ours.layout
        assert values(theirs.checkpoint.tensors) == values(ours.checkpoint.tensors)
        assert ours.checkpoint.manifest is not None and not ours.checkpoint.findings
        assert list(ours.state.params) == list(theirs.state.params)
    convert(plan(source, tmp_path / "neutral", to="statekit", hints=hints))
    convert(plan(tmp_path / "neutral", tmp_path / f"again{suffix}", layout=theirs.layout))
    with open_state(tmp_path / f"again{suffix}") as again:
        is_recorded(again.state, case)


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_all_forms_make_one_state_and_go_over_into_each_other(case: Path, tmp_path: Path) -> None:
    h5, keras, graph = (case / "checkpoint" / form for form in FORMS)
    convert(plan(keras, tmp_path / "a.ckpt.d", layout="tf2-keras", hints=hints_of(case, FORMS[1])))
    convert(plan(graph, tmp_path / "b.weights.h5"))
    for path in (tmp_path / "a.ckpt.d", tmp_path / "b.weights.h5"):
        with open_state(path) as opened:
            is_recorded(opened.state, case)
    with pytest.raises(InexactError, match=r"config"):
        plan(h5, tmp_path / "c.keras", hints=hints_of(case, FORMS[0]))


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_a_config_says_order_and_hyperparameters_and_weights_alone_say_what_is_assumed(case: Path) -> None:
    with open_state(case / "checkpoint" / FORMS[1]) as opened:
        said = meta_of(case)["hyperparameters"]
        groups = opened.state.optimizer.groups
        assert not any("order" in note for note in opened.state.assumptions)
        assert not groups[0].facts
        settings = load_schema(opened.state.optimizer.schema).native("keras", groups[0].hyperparameters)
        assert {name: said[name] for name in settings if name in said} == {
            name: value for name, value in settings.items() if name in said
        }
    with open_state(case / "checkpoint" / FORMS[0], hints=hints_of(case, FORMS[0], named=False)) as bare:
        assert any("order of writing" in note for note in bare.state.assumptions)
        assert {fact.name for fact in bare.state.optimizer.groups[0].facts} == {"order"}
        assert any("no config" in note for note in bare.state.assumptions)
        first = [variable.read() for variable in bare.state.params.values()]
    with open_state(case / "checkpoint" / FORMS[0], hints=hints_of(case, FORMS[0])) as named:
        for left, right in zip(first, named.state.params.values(), strict=True):
            np.testing.assert_array_equal(left, right.read())


def test_a_lost_exclusion_is_said_to_be_assumed() -> None:
    case = next(case for case in CASES if case.name == "adamw_ema_schedule_clip")
    with open_state(case / "checkpoint" / FORMS[1]) as opened:
        group = opened.state.optimizer.groups[0]
        assert group.known_from["exclude_from_weight_decay"] == "assumed"
        assert any("kept from weight decay" in note for note in opened.state.assumptions)


def test_averages_are_told_from_waiting_gradients_by_their_likeness_to_the_weights(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == "adamw_ema_schedule_clip")
    names = hints_of(case, FORMS[0])
    with open_state(case / "checkpoint" / FORMS[0], hints=replace(names, hparams={})) as opened:
        is_recorded(opened.state, case)
    other = tmp_path / FORMS[0]
    shutil.copy(case / "checkpoint" / FORMS[0], other)
    with h5py.File(other, "r+") as file:
        weights = len(meta_of(case)["extra"]["param_order"])
        for number in range(1, 1 + weights):
            average = file[f"optimizer/vars/{number}"]
            average[...] = np.random.RandomState(number).randn(*average.shape)
    with pytest.raises(StateError, match=r"could be several things") as caught:
        open_state(other, hints=replace(names, hparams={}))
    assert "use_ema" in caught.value.remedy


def test_whose_a_variable_is_is_never_guessed(tmp_path: Path) -> None:
    """Of two layers in a class that isn't known, Keras writes the first by name, and moves the first by its making."""
    path = tmp_path / "w.weights.h5"
    shapes = {"block/b_made_first/vars": (2, 2), "block/a_made_last/vars": (2, 2)}
    with h5py.File(path, "w") as file:
        for name, shape in shapes.items():
            group = file.create_group(name)
            group.attrs["name"] = name.split("/")[1]
            group["0"] = np.ones(shape, np.float32)
        optimizer = file.create_group("optimizer/vars")
        optimizer.attrs["name"] = "adam"
        optimizer["0"] = np.int64(1)
        optimizer["1"] = np.float32(0.1)
        for i in range(4):
            optimizer[str(2 + i)] = np.full((2, 2), i, np.float32)
    with pytest.raises(StateError, match=r"nothing tells which parameters") as caught:
        open_state(path)
    assert "--param-names" in caught.value.remedy
    names = ("block/b_made_first/kernel", "block/a_made_last/kernel")
    with open_state(path, hints=Hints(param_names=names)) as opened:
        assert list(opened.state.params) == list(names)
        assert opened.state.slots[names[1]]["m"].read()[0, 0] == 2
    with pytest.raises(StateError):
        open_state(path, hints=Hints(param_names=("x/y/kernel", "x/z/kernel")))


def foreign(shape: tuple[int, ...], axes: tuple[Axis, ...], **hyperparameters: Any) -> TrainState:
    random = np.random.default_rng(7)
    params: dict[str, Tensor] = {
        "net/dense/kernel": in_memory(random.normal(size=shape).astype(np.float32)),
        "net/dense/bias": in_memory(np.ones(3, np.float32)),
    }
    rule = Rule(axes, "file")
    grads = random.random(shape).astype(np.float32)
    row, column = (rule.dims(axis)[0] for axis in (Axis.COLUMN, Axis.ROW))
    slots: dict[str, dict[str, Tensor]] = {
        "net/dense/kernel": {
            "v_row": in_memory(grads.mean(row)),
            "v_col": in_memory(grads.mean(column)),
        },
        "net/dense/bias": {"v": in_memory(np.ones(3, np.float32))},
    }
    group = Group(tuple(params), hyperparameters, dict.fromkeys(hyperparameters, "file"))
    return TrainState(
        params,
        slots,
        Optimizer("adafactor", "keras", (group,)),
        Counts(5, 5),
        {"net/dense/kernel": rule, "net/dense/bias": Rule((Axis.NONE,), "file")},
    )


@pytest.mark.parametrize("shape", [(4, 4), (6, 2), (2, 6)], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_are_what_keras_calls_rows_whatever_they_were_called(
    shape: tuple[int, int], swapped: bool
) -> None:
    axes = (Axis.COLUMN, Axis.ROW) if swapped else (Axis.ROW, Axis.COLUMN)
    state = foreign(shape, axes, learning_rate=0.01)
    tensors = tensor_names(LAYOUT.encode(state).tree)
    grads = state.slots["net/dense/kernel"]
    last, first = ("v_col", "v_row") if swapped else ("v_row", "v_col")
    np.testing.assert_array_equal(tensors["optimizer/vars/2"].read(), grads[last].read())
    np.testing.assert_array_equal(tensors["optimizer/vars/3"].read(), grads[first].read())
    assert tensors["optimizer/vars/2"].shape == shape[:-1]
    assert tensors["optimizer/vars/4"].shape == shape


def test_a_state_from_elsewhere_is_laid_out_by_its_paths_and_no_rate_is_made_up(tmp_path: Path) -> None:
    encoded = LAYOUT.encode(foreign((4, 4), (Axis.ROW, Axis.COLUMN)))
    tensors = tensor_names(encoded.tree)
    assert list(tensors)[:2] == ["net/dense/vars/0", "net/dense/vars/1"]
    assert np.isnan(tensors["optimizer/vars/1"].read())
    assert encoded.exactness["optimizer/vars/1"][0] == Exactness.ROUNDING
    known = tensor_names(LAYOUT.encode(foreign((4, 4), (Axis.ROW, Axis.COLUMN), learning_rate=0.5)).tree)
    assert known["optimizer/vars/1"].read() == np.float32(0.5)
    target = tmp_path / "w.weights.h5"
    write(encoded, target)
    with open_state(target) as opened:
        assert "learning_rate" not in opened.state.optimizer.groups[0].hyperparameters
        assert list(opened.state.params) == ["net/dense/kernel", "net/dense/bias"]


@pytest.mark.parametrize(
    ("base", "factors"),
    [(0.5, (0.0, 2.0)), (0.5, (0.0, 0.0)), (0.5, (0.5, 0.0)), (0.5, (0.5,)), (0.0, (1.0,))],
)
def test_groups_have_their_rates_again_whatever_stands_still(base: float, factors: tuple[float, ...]) -> None:
    """The rate of a run of statekit.tensorflow is one number that groups multiply."""
    params = {f"w{i}": in_memory(np.ones(2, np.float32)) for i in range(len(factors))}
    groups = [{"paths": [f"w{i}"], "learning_rate_factor": factor} for i, factor in enumerate(factors)]
    config = {"variant": "torch", "learning_rate": base, "groups": groups}
    entries = {
        "iteration": in_memory(np.asarray(3)),
        "learning_rate": in_memory(np.asarray(base, np.float32)),
        **{f"{path}:{slot}": tensor for path, tensor in params.items() for slot in ("m", "v")},
    }

    def read(config: Any, entries: Any) -> TrainState:
        return own_state(Own("AdamW", config), named_slots(entries), params, {}, {}, None, Hints())

    def rates(state: TrainState) -> list[Any]:
        return [group.hyperparameters.get("learning_rate") for group in state.optimizer.groups]

    state = read(config, entries)
    assert rates(state) == [base * factor for factor in factors]
    elsewhere = replace(state, extra={})
    for one in (state, elsewhere):
        again = read(arguments(one, None), own_variables(one, one.extra.get(HOME, {})))
        assert rates(again) == rates(state)


def test_what_keras_has_no_place_for_is_refused() -> None:
    state = foreign((4, 4), (Axis.ROW, Axis.COLUMN))
    slots = {path: {**tensors, "m": state.params[path]} for path, tensors in state.slots.items()}
    momentum = TrainState(state.params, slots, state.optimizer, state.counts, state.rules)
    for layout in (LAYOUT, registry.layout("tf2-keras")):
        with pytest.raises(InexactError, match=r"has slot m"):
            layout.encode(momentum)
    other = Optimizer("lans", "mxnet_fused", ())
    with pytest.raises(InexactError, match=r"lans"):
        LAYOUT.encode(TrainState(state.params, {}, other, state.counts))


@pytest.mark.parametrize("schema", ["adafactor", "adamw", "lamb"])
def test_variables_are_told_apart_or_not_at_all(schema: str) -> None:
    shapes = [(3, 2), (2,), (), (2, 3, 4)]
    for kept in (
        Kept(True),
        Kept(False, True),
        Kept(True, False, True),
        Kept(True, True, True, schema == "adamw"),
    ):
        rows = list(places(schema, shapes, kept))
        whole = [
            name == "iteration" or (name in ("v_row", "v_col") and shape == ()) for _, name, shape in rows
        ]
        tensors = [
            in_memory(np.zeros(shape, np.int64 if integer else np.float32))
            for integer, (_, _, shape) in zip(whole, rows, strict=True)
        ]
        attrs = vars(kept)
        numbers = numbered(schema, tensors, attrs)
        assert numbers.kept == kept and numbers.shapes == tuple(shapes)
        with pytest.raises(StateError, match=r"aren't those"):
            numbered(schema, tensors[:-1], attrs)
        with pytest.raises(StateError):
            numbered(schema, tensors[::-1], attrs)


def write(encoded: Encoded, target: Path, container: Any = H5) -> None:
    with staged(target, "file") as stage:
        container.write(encoded, stage)
        stage.commit(container.open)


@pytest.mark.parametrize("form", FORMS[:2])
def test_two_writes_give_equal_bytes(form: str, tmp_path: Path) -> None:
    case = CASES[0]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        convert(plan(case / "checkpoint" / form, tmp_path / folder / form, hints=hints_of(case, form)))
    assert (tmp_path / "a" / form).read_bytes() == (tmp_path / "b" / form).read_bytes()


def test_every_dtype_and_block_comes_back(tmp_path: Path) -> None:
    names = ("bool", "int8", "uint32", "int64", "float16", "bfloat16", "float32", "float64")
    arrays = {name: np.arange(24).reshape(4, 6).astype(dtype_named(name)) for name in names}
    arrays |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.asarray(2.5, np.float32)}
    target = tmp_path / "t.weights.h5"
    write(Encoded({"layer": {"vars": {n: in_memory(a) for n, a in arrays.items()}}}, 0), target)
    with H5.open(target) as checkpoint:
        for name, array in arrays.items():
            tensor = checkpoint.tensors[f"layer/vars/{name}"]
            assert tensor.dtype == array.dtype and tensor.read().tobytes() == array.tobytes()
            if array.ndim and array.size:
                block = tensor.read((slice(1, 3), slice(2, 5)))
                assert block.tobytes() == array[1:3, 2:5].tobytes()


@pytest.mark.parametrize(
    "tree", [{"a/b": {}, "x": 1}, {"a": {"b": in_memory(np.zeros(2, np.complex64))}}, [1]], ids=str
)
def test_what_hdf5_cant_hold_is_refused(tree: Any, tmp_path: Path) -> None:
    with staged(tmp_path / "t.h5", "file") as stage, pytest.raises(FormatError), stage.file() as output:
        write_hdf5(tree, output, stage)


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from statekit.conversion import registry
from statekit.conversion.contracts import Encoded
from statekit.errors import CommitError
from statekit.files.durable import writing
from statekit.files.stage import staged
from statekit.tensors.tensor import in_memory

target = Path(sys.argv[1])
container = registry.container({".h5": "keras-h5", ".keras": "keras"}[target.suffix])
variables = {f"{n}": in_memory(np.ones((10, 10, n), np.float32)) for n in range(10)}
tree = {"layers": {"x": {"vars": variables}}, "@": {"config.json": {}, "metadata.json": {}}}
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
done = set()
for size in range(300, 40_000, 1500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        with staged(target, "file") as stage, writing(target):
            container.write(Encoded(tree, 0), stage)
            stage.commit(container.open)
        done.add(True)
    except CommitError as error:
        assert "EFBIG" in str(error), error
        done.add(False)
    assert target.exists() == (True in done), size
    assert [*target.parent.iterdir()] == [target] * target.exists(), size
    target.unlink(missing_ok=True)
assert done == {True, False}
"""


def run_apart(code: str, *arguments: Path) -> str:
    """Runs Python in a process of its own, so that a crash is a failure; returns what it printed."""
    line = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["t.weights.h5", "t.keras"])
def test_a_disk_that_is_full_at_any_byte_is_an_error_and_no_crash(name: str, tmp_path: Path) -> None:
    """libhdf5 is known to crash when it can't write what it holds as it closes a file."""
    run_apart(FULL, tmp_path / name)


def test_a_file_that_nobody_closes_doesnt_crash_python_as_it_ends(tmp_path: Path) -> None:
    target = tmp_path / "t.weights.h5"
    write(Encoded({"x": in_memory(np.ones(3))}, 0), target)
    code = f"from {type(H5).__module__} import CONTAINER; from pathlib import Path; import sys; "
    run_apart(code + "opened = CONTAINER.open(Path(sys.argv[1]))", target)


def linked(file: h5py.File) -> None:
    file["layers/x/vars/0"] = h5py.ExternalLink("/etc/passwd", "/a")


def soft(file: h5py.File) -> None:
    file["layers/x/vars/0"] = h5py.SoftLink("/layers")


def cyclic(file: h5py.File) -> None:
    group = file.create_group("layers")
    group["again"] = group


def external(file: h5py.File) -> None:
    file.create_dataset("layers/x", (4,), "f4", external=[("/etc/passwd", 0, 16)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "a", (4,))
    file.create_virtual_dataset("layers/x", layout)


def filtered(file: h5py.File) -> None:
    file.create_dataset("layers/x", data=np.zeros(16, np.float32), chunks=(4,), compression="lzf")


def absent(file: h5py.File) -> None:
    file.create_dataset("layers/x", (2**40,), "f4", chunks=(2**20,))


def bomb(file: h5py.File) -> None:
    file.create_dataset("layers/x", (2**50,), "f4", chunks=(2**20,), compression="gzip")
    file["layers/x"][:8] = 1


def unwritten(file: h5py.File) -> None:
    file.create_dataset("layers/x", (2**40,), "f4")


def texts(file: h5py.File) -> None:
    file["layers/x"] = np.array([b"a", b"b"], object).astype("S1")


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (linked, RefusedError), (soft, RefusedError), (cyclic, RefusedError), (external, RefusedError),
        (virtual, RefusedError), (filtered, RefusedError), (absent, CorruptError), (bomb, CorruptError),
        (unwritten, CorruptError), (texts, FormatError),
    ],
)  # fmt: skip
def test_hostile_hdf5_is_refused_before_a_value_is_read(
    make: Callable[[h5py.File], None], error: type[StatekitError], tmp_path: Path
) -> None:
    path = tmp_path / "t.weights.h5"
    with h5py.File(path, "w") as file:
        make(file)
    tracemalloc.start()
    with pytest.raises(error):
        H5.open(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()


def test_compressed_hdf5_is_read(tmp_path: Path) -> None:
    path, array = tmp_path / "t.weights.h5", np.arange(4096, dtype=np.float32).reshape(64, 64)
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "a/vars/0", data=array, chunks=(16, 16), compression="gzip", shuffle=True, fletcher32=True
        )
        file.create_dataset("a/vars/1", data=array.astype(">f4"))
    with H5.open(path) as checkpoint:
        for tensor in checkpoint.tensors.values():
            assert tensor.dtype == np.float32
            np.testing.assert_array_equal(tensor.read((slice(3, 40), slice(0, 64))), array[3:40])


def test_members_stand_in_the_order_of_writing_though_later_ones_fill_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    written = [f"a_name_that_makes_the_heap_grow_{7 * i % 60:02}" for i in range(60)]
    with h5py.File(path, "w") as file:
        group = file.create_group("vars")
        for number, name in enumerate(written):
            group.attrs[f"attribute_{number}"] = "its header goes on elsewhere"
            group[name] = np.float32(number)
        places = [h5py.h5o.get_info(group[name].id).addr for name in written]
    assert places != sorted(places)  # where they are described doesn't tell
    tree = open_hdf5(Held(path.read_bytes(), "a.h5"), "a.h5")
    assert [key for key in tree["vars"] if key != ATTRIBUTES] == written


def test_a_file_of_a_step_or_none_is_not_found(tmp_path: Path) -> None:
    for container in (H5, ZIP):
        assert container.detect(tmp_path) is None and container.detect(tmp_path / "none") is None
        with pytest.raises(NotFoundError):
            container.open(tmp_path / "none")
        with pytest.raises(NotFoundError):
            container.open(tmp_path, 3)


@pytest.mark.parametrize("form", FORMS[:2])
def test_a_cut_file_is_an_error_and_never_a_state(form: str, tmp_path: Path) -> None:
    whole = (CASES[0] / "checkpoint" / form).read_bytes()
    container = registry.container("keras" if form.endswith(".keras") else "keras-h5")
    for size in sorted({0, 7, 8, 100, len(whole) // 4, len(whole) // 2, len(whole) - 2000, len(whole) - 1}):
        path = tmp_path / form
        path.write_bytes(whole[:size])
        try:
            with container.open(path) as checkpoint:
                for tensor in checkpoint.tensors.values():
                    tensor.read()
            raise AssertionError(size)
        except StatekitError:
            pass


def test_a_flipped_bit_in_a_model_is_found_before_a_value_is_given(tmp_path: Path) -> None:
    whole = bytearray((CASES[0] / "checkpoint" / FORMS[1]).read_bytes())
    with ZIP.open(CASES[0] / "checkpoint" / FORMS[1]) as checkpoint:
        needle = checkpoint.tensors[next(iter(checkpoint.tensors))].read().tobytes()
    whole[whole.index(needle) + 3] ^= 1
    path = tmp_path / "t.keras"
    path.write_bytes(whole)
    with ZIP.open(path) as checkpoint, pytest.raises(CorruptError, match=r"checksum"):
        next(iter(checkpoint.tensors.values())).read()


def repacked(target: Path, method: int, double: str = "", size: int = 0) -> Path:
    with (
        zipfile.ZipFile(CASES[0] / "checkpoint" / FORMS[1]) as old,
        zipfile.ZipFile(target, "w", method) as new,
    ):
        for info in old.infolist():
            new.writestr(info.filename, old.read(info) + bytes(size))
        if double:
            with pytest.warns(UserWarning, match=r"Duplicate"):
                new.writestr(double, old.read(double))
    return target


def test_a_deflated_model_is_read_and_hostile_archives_are_refused(tmp_path: Path) -> None:
    deflated = repacked(tmp_path / "d.keras", zipfile.ZIP_DEFLATED)
    with ZIP.open(deflated) as ours, ZIP.open(CASES[0] / "checkpoint" / FORMS[1]) as theirs:
        assert values(ours.tensors) == values(theirs.tensors)
    with pytest.raises(RefusedError, match=r"two members"):
        ZIP.open(repacked(tmp_path / "two.keras", zipfile.ZIP_STORED, "config.json"))
    with pytest.raises(RefusedError, match=r"packed in a way"):
        ZIP.open(repacked(tmp_path / "lzma.keras", zipfile.ZIP_LZMA))
    lying = bytearray(deflated.read_bytes())
    at = lying.rindex(b"PK\x01\x02")
    lying[at + 24 : at + 28] = struct.pack("<I", 2**31)
    (tmp_path / "lying.keras").write_bytes(lying)
    with pytest.raises(RefusedError, match=r"more than its bytes"):
        ZIP.open(tmp_path / "lying.keras")
    (tmp_path / "before.keras").write_bytes(b"PK\3\4" + bytes(60) + deflated.read_bytes())
    with pytest.raises(StatekitError):
        ZIP.open(tmp_path / "before.keras")


def test_a_model_without_config_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.keras", "w") as archive:
        archive.writestr("model.weights.h5", (CASES[0] / "checkpoint" / FORMS[0]).read_bytes())
    assert ZIP.detect(tmp_path / "t.keras") is None
    with pytest.raises(FormatError, match=r"lacks a member"):
        ZIP.open(tmp_path / "t.keras")


def test_an_object_graph_says_the_same_when_it_is_written_again() -> None:
    graph = [
        Node({"a": 1, "b": 1}),
        Node({}, slots=(Slot(0, "m", 1),)),
    ]
    parsed = parse_graph(graph_bytes(graph), "here")
    assert parsed.nodes == tuple(graph)
    for case in CASES:
        with registry.container("tf-bundle").open(case / "checkpoint" / FORMS[2]) as checkpoint:
            data = checkpoint.tree[GRAPH]
            assert graph_bytes(parse_graph(data, "here").nodes) is not None
            assert (
                parse_graph(graph_bytes(parse_graph(data, "here").nodes), "").nodes
                == parse_graph(data, "").nodes
            )


@pytest.mark.parametrize(
    "data",
    [b"", b"\x0a\x04\x0a\x02\x08\x07", b"\x0a\xff\x01", b"\x0a\x06\x12\x04\x0a\x02\xff\xfe", b"\x08\x01", 7],
    ids=repr,
)
def test_a_broken_object_graph_is_refused(data: Any) -> None:
    with pytest.raises(FormatError):
        parse_graph(data, "here")


def spoilt_graph(folder: Path, change: Callable[[list[Node]], None]) -> Path:
    """Writes a recorded checkpoint with another object graph."""
    case = next(case for case in CASES if case.name == "adamw_ema_schedule_clip")
    with registry.container("tf-bundle").open(case / "checkpoint" / FORMS[2]) as checkpoint:
        graph = Graph.from_record(checkpoint.meta[GRAPH])
        assert graph is not None
        nodes = [*graph.nodes]
        change(nodes)
        return save({**checkpoint.tree, GRAPH: Graph(tuple(nodes)).to_record()}, folder)


def named_node(nodes: list[Node], name: str) -> int:
    return next(i for i, node in enumerate(nodes) if node.variable and node.variable.full_name == name)


def listed(nodes: list[Node], name: str) -> int:
    return next(node.children[name] for node in nodes if {"_iterations", name} <= node.children.keys())


def one_key_twice(nodes: list[Node]) -> None:
    of, to = (named_node(nodes, f"adam_w/a_kernel_{slot}") for slot in ("momentum", "velocity"))
    nodes[to] = replace(nodes[to], values=(replace(nodes[to].values[0], key=nodes[of].values[0].key),))


def exchanged_objects(nodes: list[Node]) -> None:
    of, to = (named_node(nodes, f"adam_w/a_kernel_{slot}") for slot in ("momentum", "velocity"))
    nodes[of], nodes[to] = nodes[to], nodes[of]


def a_gap(nodes: list[Node]) -> None:
    number = listed(nodes, "_trainable_variables")
    children = {name: child for name, child in nodes[number].children.items() if name != "1"}
    gone = nodes[number].children["1"]
    nodes[number] = replace(nodes[number], children=children)
    nodes[gone] = replace(nodes[gone], values=())


def exchanged_names(nodes: list[Node]) -> None:
    of, to = (named_node(nodes, f"adam_w/a_{weight}_momentum") for weight in ("kernel", "bias"))
    names = nodes[of].values[0].full_name, nodes[to].values[0].full_name
    for i, name in ((of, names[1]), (to, names[0])):
        nodes[i] = replace(nodes[i], values=(replace(nodes[i].values[0], full_name=name),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (one_key_twice, "contradicts the checkpoint's keys"),
        (exchanged_objects, "contradicts the checkpoint's keys"),
        (a_gap, "has gaps"),
        (exchanged_names, "stands where a slot of a/kernel belongs"),
    ],
)
def test_a_graph_that_contradicts_itself_is_refused(
    change: Callable[[list[Node]], None], words: str, tmp_path: Path
) -> None:
    """Each was converted as bitwise, with the values of another variable or without some."""
    with pytest.raises(StatekitError, match=words), open_state(spoilt_graph(tmp_path / "a", change)):
        pass


def test_objects_that_hold_one_list_take_no_more_than_the_list(tmp_path: Path) -> None:
    """Each of a thousand objects was made with its own thousand variables: 0.5 MB of a graph took 700 MB."""
    names = dict.fromkeys(("_variables", "_iterations", "_momentums", "_velocities"), 1002)
    ways = [f"o/_variables/{i}{SUFFIX}" for i in range(1000)]
    nodes = [Node({"o": 1}), *[Node(names)] * 1001, Node({f"{i}": 1003 + i for i in range(1000)})]
    nodes += [Node({}, (Value("VARIABLE_VALUE", f"v{i}", way),)) for i, way in enumerate(ways)]
    tree = {GRAPH: Graph(tuple(nodes)).to_record(), "w": in_memory(np.ones(1, np.float32))}
    path = save(tree, tmp_path / "a")
    with registry.container("tf-bundle").open(path) as checkpoint:
        tracemalloc.start()
        with pytest.raises(StateError, match="several optimizers"):
            registry.layout("tf2-keras2").detect(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        tracemalloc.stop()
        graph = Graph.from_record(checkpoint.meta[GRAPH])
    assert graph is not None and graph.items(1002) is graph.items(1002)


def test_frozen_variables_of_one_name_are_called_by_their_places(tmp_path: Path) -> None:
    """Layers of two models may have one name; one of their weights was no parameter any more."""

    def one_name(nodes: list[Node]) -> None:
        at = named_node(nodes, "bn/moving_mean")
        value = replace(nodes[at].values[0], full_name="bn/moving_variance")
        nodes[at] = replace(nodes[at], values=(value,))

    with open_state(spoilt_graph(tmp_path / "a", one_name)) as opened:
        places = sorted(path for path in opened.state.params if "moving" in path)
    assert [path.rpartition("/")[2] for path in places] == ["moving_mean", "moving_variance"]


def test_hints_are_canonical_or_keras_own(tmp_path: Path) -> None:
    case = CASES[0]
    path = case / "checkpoint" / FORMS[1]
    with open_state(path, hints=Hints({"weight_decay": 0.25})) as opened:
        assert opened.state.optimizer.groups[0].hyperparameters["weight_decay_rate"] == 0.25
    with pytest.raises(UsageError, match=r"isn't a hyperparameter of \w+ @ warp"):
        open_state(path, hints=Hints({"warp": 9}))
    with pytest.raises(UsageError, match="is said twice"):
        open_state(path, hints=Hints({"weight_decay": 0.25, "weight_decay_rate": 0.5}))
