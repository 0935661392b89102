"""MXNet's checkpoints: decoded as they were recorded, replayed from, written back byte for byte."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import mxnet_files
import numpy as np
import pytest
from mxnet_files import array_list, attributes, states

from goldens import COMPACT, GOLDEN, bundles
from replaying import BACKENDS, everywhere, marks, present
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.cli.main import main
from statekit.conversion import registry
from statekit.conversion.contracts import Encoded, Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.inspection import inspect
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_checkpoint, resume_lines
from statekit.converters.containers.mxnet import CONTAINER
from statekit.converters.layouts.mxnet.layout import MXNetOptim
from statekit.converters.layouts.mxnet.mxnet_lans import LAYOUT as LANS
from statekit.converters.layouts.mxnet.order import numbered
from statekit.errors import (
    InexactError,
    NotFoundError,
    StateError,
    StatekitError,
    UnknownFormatError,
    UsageError,
)
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged
from statekit.optim.run import load, store
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, in_memory, same_values
from statekit.tensors.tree import Record, to_json
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

ALL = [f"mxnet_lans/{path.name}" for path in bundles("mxnet_lans")]
BOUNDS, UPDATER = "mxnet_lans/fused_bounds_clip_rescale", "mxnet_lans/updater_unfused_fp16_legacy"
TWO, SCHEDULED = "mxnet_lans/fused_two_devices", "mxnet_lans/trainer_scheduler_unfused"
LANS_CLASS = "mxnet.optimizer.lans.LANS"


def recorded(case: str) -> TrainState:
    with open_recording(GOLDEN / case) as recording:
        step = recording.checkpoint_step
        assert step is not None
        state, xp = recording.state(step, recording.trajectories[0], step + 1), NumpyBackend()
        return store(xp, load(xp, state), state)  # the file is closed from here on


def differences(ours: TrainState, theirs: TrainState) -> list[str]:
    """What differs in parameters and slots, dtypes included."""
    left = dict(ours.params) | {
        f"{p} {n}": t for p, tensors in ours.slots.items() for n, t in tensors.items()
    }
    right = dict(theirs.params) | {
        f"{p} {n}": t for p, tensors in theirs.slots.items() for n, t in tensors.items()
    }
    assert left.keys() == right.keys()
    return [n for n in left if left[n].dtype != right[n].dtype or not same_values(left[n], right[n])]


def write(encoded: Encoded, target: Path) -> Path:
    with staged(target, "folder") as stage:
        CONTAINER.write(encoded, stage)
        stage.commit(CONTAINER.open)
    return target


def changed(written: Path, original: Path) -> list[str]:
    """The files that aren't byte for byte those of the original."""
    files = [f.name for f in written.iterdir() if f.name != "statekit.json"]
    assert files
    return [name for name in files if (written / name).read_bytes() != (original / name).read_bytes()]


@pytest.mark.parametrize("case", ALL)
def test_a_checkpoint_is_decoded_as_it_was_recorded_and_written_back_byte_for_byte(
    case: str, tmp_path: Path
) -> None:
    source, theirs = GOLDEN / case / "checkpoint", recorded(case)
    with open_state(source) as opened:
        ours = opened.state
        assert differences(ours, theirs) == []
        assert ours.counts == theirs.counts
        assert ours.optimizer.variant == theirs.optimizer.variant
        for name, value in theirs.optimizer.groups[0].hyperparameters.items():
            if ours.optimizer.groups[0].known_from.get(name) != "file":
                assert name in ("lr_mult", "wd_mult", "learning_rate")
                continue
            said = {path: n for path, n in value.items() if n != 1} if name.endswith("_mult") else value
            assert ours.optimizer.groups[0].hyperparameters[name] == said, name
        encoded = LANS.encode(ours)
        assert encoded.dropped == {}
        written, again = write(encoded, tmp_path / "one"), write(encoded, tmp_path / "two")
    assert changed(written, source) == [] and changed(again, written) == []
    with open_state(written) as opened:
        assert differences(opened.state, theirs) == []


@pytest.mark.parametrize("case", present(UPDATER, TWO, SCHEDULED))
def test_the_way_through_statekits_own_folder_loses_nothing(case: str, tmp_path: Path) -> None:
    source = GOLDEN / case / "checkpoint"
    convert(plan(source, tmp_path / "between", to="statekit"))
    back = plan(tmp_path / "between", tmp_path / "back", to="mxnet")
    assert back.exactness == 0 and back.dropped == {}
    convert(back)
    assert changed(tmp_path / "back", source) == []


@pytest.mark.parametrize(("name", "case"), everywhere(ALL, (UPDATER,), present(UPDATER)))
def test_training_goes_on_from_the_native_checkpoint(name: str, case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        subject = Subject(recording)
        assert subject.obstacle() == ""
        result = replay(subject, backend(name))
    assert result.start == "checkpoint" and result.decoded == () and result.passed


IN_FILES = COMPACT / "mxnet_folders" / "npy_beside_params"
"""A run whose parameters are a folder of `.npy` files, beside the `.params` of another run."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in BACKENDS])
def test_training_goes_on_from_parameters_in_a_folder_beside_those_of_another_run(name: str) -> None:
    with open_recording(IN_FILES) as recording:
        result = replay(Subject(recording), backend(name))
    assert result.start == "checkpoint" and result.decoded == () and result.passed
    assert result.steps == (recording.checkpoint_step, recording.last) and not result.judged[0].outside


def test_parameters_in_a_folder_are_named_and_written_back_byte_for_byte(tmp_path: Path) -> None:
    source = IN_FILES / "checkpoint"
    for path in (source, source / "trainer.states", source / "net"):
        with open_state(path) as opened:
            lines = "\n".join(resume_lines(of_checkpoint(opened), to_json(opened.state.to_json())))
        assert f'"{source}/net/"' in lines and f'"{source}/trainer.states"' in lines
    seen = CONTAINER.detect(source)
    assert seen is not None and "not teacher.params" in seen.because
    convert(plan(source, tmp_path / "run.pt"))
    convert(plan(tmp_path / "run.pt", tmp_path / "back", to="mxnet"))
    written = [file.relative_to(tmp_path / "back") for file in (tmp_path / "back").rglob("*.*")]
    assert len(written) == 8
    for file in written:
        same = file.name == "statekit.json" or (source / file).read_bytes()
        assert same in (True, (tmp_path / "back" / file).read_bytes()), file


def in_folder(tmp_path: Path, **params: dict[str, Array]) -> Path:
    """A Trainer's states, and beside them folders of arrays, or `.params` by names with `_file`."""
    data = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD)))
    (tmp_path / "trainer.states").write_bytes(data)
    for name, arrays in params.items():
        if name.endswith("_file"):
            (tmp_path / f"{name.removesuffix('_file')}.params").write_bytes(array_list(arrays))
            continue
        (tmp_path / name).mkdir()
        for key, array in arrays.items():
            np.save(tmp_path / name / f"{key}.npy", array)
    return tmp_path


def other(**arrays: tuple[int, ...]) -> dict[str, Array]:
    return {name: np.zeros(shape, np.float32) for name, shape in arrays.items()}


def test_of_several_parameters_those_with_the_shapes_of_the_states_are_taken(tmp_path: Path) -> None:
    more = {**PARAMS, **other(d=(9,))}
    folder = in_folder(tmp_path, net=PARAMS, teacher_file=other(w=(2, 3)), whole=more, data=other(x=(7,)))
    with open_state(folder) as opened:
        assert first(opened.state, "b/weight") == 1 and "d" not in opened.state.params
        assert "net" in opened.evidence[0].because and "teacher.params" in opened.evidence[0].because
    shutil.rmtree(folder / "net")
    with open_state(folder) as opened:
        assert "d" in opened.state.params


def test_where_no_parameters_fit_or_several_do_the_error_names_each(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    folder = in_folder(tmp_path / "none", net=other(w=(2, 3), v=(2, 3)), teacher_file=other(w=(4,)))
    for path in (folder, folder / "trainer.states"):
        with pytest.raises(NotFoundError, match=r"(?s)\(2, 3\) @ teacher\.params.*\(4,\) @ net"):
            open_state(path)
    (tmp_path / "both").mkdir()
    folder = in_folder(tmp_path / "both", net=PARAMS, teacher_file=PARAMS)
    for path in (folder, folder / "trainer.states"):
        with pytest.raises(NotFoundError, match=r"nothing tells which(?s:.*)teacher\.params, net") as caught:
            open_state(path)
        assert f"as {folder / 'teacher.params'}, which is then read with trainer.states" in str(caught.value)
    for name in ("net", "teacher.params"):  # naming it tells
        with open_state(folder / name) as opened:
            assert opened.state.counts.updates == 4
    (folder / "net" / "c.bias.npy").write_bytes(b"\x93NUMPY no more")
    with pytest.raises(StatekitError, match=r"c\.bias"):
        open_state(folder / "net")


def test_any_of_the_files_and_their_folder_mean_one_checkpoint() -> None:
    folder = GOLDEN / BOUNDS / "checkpoint"
    theirs = recorded(BOUNDS)
    for path in (folder, folder / "trainer.states", folder / "net.params"):
        with open_state(path) as opened:
            assert differences(opened.state, theirs) == []
            assert (
                "net.params" in opened.evidence[0].because or "trainer.states" in opened.evidence[0].because
            )


def test_of_several_files_the_telling_one_is_taken_and_the_others_are_named() -> None:
    folder = GOLDEN / UPDATER / "checkpoint"
    because = CONTAINER.detect(folder)
    assert because is not None
    assert "updater_with_optimizer.states" in because.because and "not module_style.params" in because.because
    with CONTAINER.open(folder / "module_style.params") as opened:
        assert all(name.startswith("arg:") for name in opened.tree["params"])
        state = LANS.decode(opened, Hints())
    assert set(state.params) == set(recorded(UPDATER).params)


def test_names_of_a_module_are_written_back(tmp_path: Path) -> None:
    folder = GOLDEN / UPDATER / "checkpoint"
    with open_state(folder / "module_style.params") as opened:
        written = write(LANS.encode(opened.state), tmp_path / "out")
    assert changed(written, folder) == []
    assert {f.name for f in written.glob("*.params")} == {"module_style.params"}


@pytest.mark.parametrize("count", ["x", -1, 2.5, None, True])
def test_a_count_that_cant_be_is_refused_where_states_alone_have_none(count: Any) -> None:
    source = GOLDEN / UPDATER / "checkpoint" / "updater_states_only.states"
    hints = Hints({"begin_num_update": count})
    with pytest.raises(UsageError, match="begin_num_update"):
        open_state(source, layout="mxnet-lans", hints=hints)


def test_states_alone_are_anybodys(tmp_path: Path) -> None:
    """Without an optimizer in the file the user names whose states they are, and how many updates there were."""
    source = GOLDEN / UPDATER / "checkpoint" / "updater_states_only.states"
    with pytest.raises(UnknownFormatError, match=r"mxnet-adam.*mxnet-lamb.*mxnet-lans"):
        open_state(source)
    with open_state(source, layout="mxnet-lans", hints=Hints({"begin_num_update": 3})) as opened:
        state = opened.state
        assert differences(state, recorded(UPDATER)) == []
        assert state.counts == recorded(UPDATER).counts and state.optimizer.variant is None
        assert any("mxnet_fused, mxnet_unfused, mxnet_gpu" in note for note in state.assumptions)
        assert not any("counts" in note for note in state.assumptions)
        written = write(LANS.encode(state), tmp_path / "out")
    assert changed(written, source.parent) == []
    with open_state(source, layout="mxnet-lans") as opened:
        assert opened.state.counts.updates == 0
        assert any("no counts" in note for note in opened.state.assumptions)


@pytest.mark.parametrize("case", present(SCHEDULED))
def test_a_schedule_is_kept_and_its_rate_is_not_taken_for_a_constant(case: str) -> None:
    with open_state(GOLDEN / case / "checkpoint") as opened:
        state = opened.state
    schedule = state.extra["mxnet"]["attributes"]["lr_scheduler"]
    assert isinstance(schedule, Record) and schedule.name == "mxnet.lr_scheduler.FactorScheduler"
    assert schedule.state["count"] > 0
    assert "learning_rate" not in state.optimizer.groups[0].hyperparameters
    assert any("schedule" in note for note in state.assumptions)


def test_inspect_says_what_is_assumed() -> None:
    seen = inspect(GOLDEN / BOUNDS / "checkpoint")
    assert seen.layout is not None and seen.layout.name == "mxnet-lans"
    assert any("sorted by name" in note for note in seen.assumptions)
    assert any("Multipliers" in note for note in seen.assumptions)


PARAMS = {
    "b.weight": np.full((2, 3), 1.5, np.float32),
    "a.weight": np.full((2, 3), 2.5, np.float32),
    "c.bias": np.full(4, 3.5, np.float32),
}


def moments(*shapes: tuple[int, ...]) -> dict[int, tuple[Array, ...]]:
    return {
        i: (np.full(shape, i, np.float32), np.full(shape, i + 10, np.float32))
        for i, shape in enumerate(shapes)
    }


def put(folder: Path, slots: bytes, params: bytes | None = None, name: str = "x") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.states").write_bytes(slots)
    (folder / f"{name}.params").write_bytes(array_list(PARAMS) if params is None else params)
    return folder


HELD = {0: 4, 1: 4, 2: 4}
SHAPES = ((2, 3), (2, 3), (4,))


def first(state: TrainState, path: str) -> float:
    return float(state.slots[path]["m"].read().flat[0])


def test_indices_count_sorted_names_in_mxnet_2_and_the_files_order_in_mxnet_1(tmp_path: Path) -> None:
    new = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD)))
    with open_state(put(tmp_path / "new", new)) as opened:
        assert first(opened.state, "a/weight") == 0 and first(opened.state, "b/weight") == 1
        assert any("sorted by name" in note for note in opened.state.assumptions)
    old = states(moments(*SHAPES), ("mxnet.optimizer.optimizer.LAMB", attributes(HELD)), 3, 2)
    with open_state(put(tmp_path / "old", old)) as opened:
        assert opened.layout == "mxnet-lamb"
        assert first(opened.state, "b/weight") == 0 and first(opened.state, "a/weight") == 1
        assert any("order of the .params file" in note for note in opened.state.assumptions)


def test_names_in_the_optimizer_or_given_outweigh_any_order(tmp_path: Path) -> None:
    names = {0: "b.weight", 1: "a.weight", 2: "c.bias"}
    named = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD, idx2name=names)))
    with open_state(put(tmp_path / "told", named)) as opened:
        assert first(opened.state, "b/weight") == 0
        assert not any("order" in note or "sorted" in note for note in opened.state.assumptions)
    plain = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD)))
    folder = put(tmp_path / "plain", plain)
    with open_state(folder, hints=Hints(param_names=("b/weight", "a.weight", "c/bias"))) as opened:
        assert first(opened.state, "b/weight") == 0
        (tmp_path / "out").mkdir()
        written = write(LANS.encode(opened.state), tmp_path / "out" / "x")
    assert (written / "x.states").read_bytes() == plain


def test_where_no_order_fits_names_are_asked_for(tmp_path: Path) -> None:
    slots = states(moments((4,), (2, 3)), (LANS_CLASS, attributes({0: 4, 1: 4})))
    folder = put(tmp_path / "part", slots)
    with pytest.raises(StateError, match="--param-names"):
        open_state(folder)
    with open_state(folder, hints=Hints(param_names=("c.bias", "b.weight"))) as opened:
        assert first(opened.state, "c/bias") == 0 and opened.state.group_of("a/weight") is None
    for wrong in (("c.bias",), ("c.bias", "nobody"), ("b.weight", "c.bias")):
        with pytest.raises(StateError, match="fit"):
            open_state(folder, hints=Hints(param_names=wrong))


def test_counts_of_devices_and_parameters_that_fell_behind_are_kept(tmp_path: Path) -> None:
    slots = moments(*SHAPES)
    attrs = attributes({0: 7, 1: 5, 2: 7}, begin_num_update=2, num_update=9)
    attrs["_all_index_update_counts"] = {0: {}, 3: attrs["_all_index_update_counts"][0]}
    attrs["lr_mult"] = {1: 0.5}
    data = states(slots, (LANS_CLASS, attrs))
    with open_state(put(tmp_path / "behind", data)) as opened:
        counts = opened.state.counts
        assert (counts.updates, counts.schedule, counts.behind) == (5, 9, {"b/weight": 3})
        assert opened.state.optimizer.groups[0].hyperparameters["lr_mult"] == {"b/weight": 0.5}
        written = write(LANS.encode(opened.state), tmp_path / "out")
    assert (written / "x.states").read_bytes() == data


def test_counts_and_names_that_would_lose_a_state_are_refused(tmp_path: Path) -> None:
    early = states(moments(*SHAPES), (LANS_CLASS, attributes({0: 7, 1: 5, 2: 7}, begin_num_update=6)))
    with pytest.raises(StateError, match="a count of 5, and begin_num_update is 6 @ index 1"):
        open_state(put(tmp_path / "early", early))
    plain = put(tmp_path / "twice", states(moments(*SHAPES), (LANS_CLASS, attributes(HELD))))
    with pytest.raises(StateError, match=r"is a\.weight, as is index 0 @ index 1"):
        open_state(plain, hints=Hints(param_names=("a.weight", "a.weight", "c.bias")))


@pytest.mark.parametrize(("device", "variant"), [((1, 0), "mxnet_fused"), ((2, 1), "mxnet_gpu")])
def test_arrays_say_which_kernels_ran(tmp_path: Path, device: tuple[int, int], variant: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mxnet_files.record, "__defaults__", (3, device))
        data = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD)))
    with open_state(put(tmp_path / "x", data)) as opened:
        assert opened.state.optimizer.variant == variant
        written = write(LANS.encode(opened.state), tmp_path / "out")
    assert (written / "x.states").read_bytes() == data


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_every_protocol_of_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    slots = moments((2, 3), (2, 3), (400,))
    params = array_list({**PARAMS, "c.bias": np.zeros(400, np.float32)})
    data = states(slots, (LANS_CLASS, attributes(HELD)), protocol)
    with open_state(put(tmp_path / "x", data, params)) as opened:
        for i, path in enumerate(("a/weight", "b/weight", "c/bias")):
            np.testing.assert_array_equal(opened.state.slots[path]["m"].read(), slots[i][0])
            np.testing.assert_array_equal(opened.state.slots[path]["v"].read(), slots[i][1])


def test_steps_of_a_folder_are_found_by_the_numbers_of_their_names(tmp_path: Path) -> None:
    for step in (8, 12, 100):
        counts_at = dict.fromkeys(HELD, step)
        put(
            tmp_path / "run",
            states(moments(*SHAPES), (LANS_CLASS, attributes(counts_at))),
            name=f"net-{step:04d}",
        )
    with CONTAINER.open(tmp_path / "run") as opened:
        assert opened.step == 100 and opened.meta["steps"] == [8, 12, 100]
    with open_state(tmp_path / "run", step=12) as state:
        assert state.state.counts.updates == 12
    with pytest.raises(NotFoundError, match="8, 12, 100"):
        CONTAINER.open(tmp_path / "run", 9)
    with pytest.raises(NotFoundError, match="another step"):
        CONTAINER.open(tmp_path / "run" / "net-0012.states", 8)
    shutil.copy(tmp_path / "run" / "net-0008.params", tmp_path / "one.params")
    shutil.copy(tmp_path / "run" / "net-0012.params", tmp_path / "two.params")
    shutil.copy(tmp_path / "run" / "net-0012.states", tmp_path / "net.states")
    with pytest.raises(NotFoundError, match=r"one\.params, two\.params"):
        CONTAINER.open(tmp_path / "net.states")


def test_states_without_parameters_are_listed_but_make_no_state(tmp_path: Path) -> None:
    (tmp_path / "x.states").write_bytes(states(moments(*SHAPES), (LANS_CLASS, attributes(HELD))))
    with CONTAINER.open(tmp_path / "x.states") as opened:
        assert set(opened.tensors) == {f"states/{i}/{j}" for i in range(3) for j in range(2)}
        with pytest.raises(StateError, match=r"\.params"):
            LANS.decode(opened, Hints())
    seen = inspect(tmp_path / "x.states")
    assert seen.layout is None and len(seen.others) == 6


@pytest.mark.parametrize("name", ["mxnet-lans", "mxnet-lamb", "mxnet-adam"])
def test_what_mxnet_cannot_hold_is_refused_with_every_reason(name: str, tmp_path: Path) -> None:
    layout = registry.layout(name)
    slots = moments(*SHAPES)
    attrs = attributes(HELD)
    last = {"mxnet-lans": "lans.LANS", "mxnet-lamb": "lamb.LAMB", "mxnet-adam": "adam.Adam"}[name]
    with open_state(put(tmp_path / "x", states(slots, (f"mxnet.optimizer.{last}", attrs)))) as opened:
        assert opened.layout == name
        state = opened.state
        less = {path: {n: t for n, t in tensors.items() if n != "m"} for path, tensors in state.slots.items()}
        with pytest.raises(InexactError, match="expected m, v"):
            layout.encode(dataclasses.replace(state, slots=less))
        other = registry.layout("mxnet-lans" if name != "mxnet-lans" else "mxnet-adam")
        with pytest.raises(InexactError, match="only"):
            other.encode(state)


def test_a_state_of_another_system_becomes_a_trainers_files(tmp_path: Path) -> None:
    """Without MXNet's own extra: numbered by sorted names, in numpy mode, and no learning rate but a given one."""
    with open_state(GOLDEN / BOUNDS / "checkpoint") as opened:
        state = dataclasses.replace(opened.state, extra={"rng": {"seed": 1}})
        bare = {k: v for k, v in state.optimizer.groups[0].hyperparameters.items() if k != "learning_rate"}
        group = dataclasses.replace(state.optimizer.groups[0], hyperparameters=bare)
        state = dataclasses.replace(state, optimizer=dataclasses.replace(state.optimizer, groups=(group,)))
        encoded = LANS.encode(state)
        assert list(encoded.dropped) == ["extra/rng/seed"]
        assert encoded.tree["optimizer"].state["lr"] is None
        written = write(encoded, tmp_path / "out")
    with CONTAINER.open(written) as again:
        assert isinstance(again, Checkpoint)
        assert again.tree["files"]["params"]["form"] == "npz"
        assert differences(LANS.decode(again, Hints()), recorded(BOUNDS)) == []


ADAM_CLASS = "mxnet.optimizer.adam.Adam"


def adam(**changes: Any) -> dict[str, Any]:
    """All attributes of an Adam, in its order."""
    names = ("lower_bound", "upper_bound", "beta1", "beta2", "epsilon")
    base = {k: v for k, v in attributes(HELD).items() if k not in names}
    moments = {"lazy_update": False, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-08}
    return {**base, **moments, "aggregate_num": 1, **changes}


def rates(state: TrainState) -> dict[str, tuple[float, float]]:
    return {
        path: (g.hyperparameters["learning_rate"], g.hyperparameters["weight_decay_rate"])
        for g in state.optimizer.groups
        for path in g.paths
    }


def test_masters_and_the_unfused_path_come_back_from_a_system_that_has_no_place_for_them(
    tmp_path: Path,
) -> None:
    kernel = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    slots = {name: in_memory(kernel**2, name) for name in ("m", "v")}
    group = Group(("w",), {"learning_rate": 0.01, "weight_decay_rate": 0.1})
    run = TrainState(
        {"w": in_memory(kernel.astype(np.float16), "w")},
        {"w": {"master": in_memory(kernel, "w"), **slots}},
        Optimizer("adamw", "mxnet_unfused", (group,)),
        Counts(5, 5),
    )
    layout = registry.layout("mxnet-adam")
    source = write(layout.encode(run), tmp_path / "source")
    asked: dict[str, Any] = {"require": Exactness.STATISTICS}
    convert(plan(source, tmp_path / "run.pt", layout="statekit-torch", **asked))
    convert(plan(tmp_path / "run.pt", tmp_path / "again", to="mxnet", layout="mxnet-adam", **asked))
    with open_state(tmp_path / "again") as opened:
        assert opened.state.optimizer.variant == "mxnet_unfused"
        assert np.array_equal(opened.state.slots["w"]["master"].read(), kernel)
        assert opened.params["w"].dtype == np.float16
        assert opened.checkpoint.tree["optimizer"].state["multi_precision"]


def test_multipliers_become_groups_where_the_schema_has_none(tmp_path: Path) -> None:
    """A Module decays only names that end in weight, or gamma."""
    name = "".join(["c.", "bias"])  # another object than the key, as in the recordings
    attrs = adam(lr=0.1, wd=0.01, lr_mult={0: 3.0}, wd_mult={"c.bias": 0.0}, idx2name={2: name})
    data = states(moments(*SHAPES), (ADAM_CLASS, attrs))
    with open_state(put(tmp_path / "x", data)) as opened:
        assert opened.layout == "mxnet-adam"
        expected = {"a/weight": (0.1 * 3.0, 0.01), "b/weight": (0.1, 0.01), "c/bias": (0.1, 0.0)}
        assert rates(opened.state) == expected
        written = write(opened_layout("mxnet-adam").encode(opened.state), tmp_path / "out")
    assert (written / "x.states").read_bytes() == data


def test_groups_become_multipliers_where_these_are_exact(tmp_path: Path) -> None:
    data = states(moments(*SHAPES), (ADAM_CLASS, adam(wd=0.01)))
    layout = opened_layout("mxnet-adam")
    with open_state(put(tmp_path / "x", data)) as opened:
        state = opened.state
        (whole,) = state.optimizer.groups

        def grouped(*decays: float | None, **other: Any) -> TrainState:
            changes = [{"weight_decay_rate": decay} for decay in decays]
            groups = tuple(
                dataclasses.replace(
                    whole, paths=(path,), hyperparameters={**whole.hyperparameters, **change, **other}
                )
                for path, change in zip(whole.paths, changes, strict=True)
            )
            return dataclasses.replace(state, optimizer=dataclasses.replace(state.optimizer, groups=groups))

        again = layout.encode(grouped(0.0, 0.03, 0.03)).tree["optimizer"].state
        assert again["wd"] == 0.03 and again["wd_mult"] == {0: 0.0}
        written = write(layout.encode(grouped(0.02, 0.0, 0.01)), tmp_path / "out")
        with open_state(written) as read:
            assert [decay for _, decay in rates(read.state).values()] == [0.02, 0.0, 0.01]
        with pytest.raises(InexactError, match="weight_decay_rate"):
            layout.encode(grouped(None, 0.03, 0.03))
        one = grouped(0.0, 0.0, 0.0).optimizer.groups
        other = dataclasses.replace(one[0], hyperparameters={**one[0].hyperparameters, "beta1": 0.5})
        mixed = dataclasses.replace(state.optimizer, groups=(other, *one[1:]))
        with pytest.raises(InexactError, match="one set"):
            layout.encode(dataclasses.replace(state, optimizer=mixed))


def opened_layout(name: str) -> MXNetOptim:
    layout = registry.layout(name)
    assert isinstance(layout, MXNetOptim)
    return layout


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr_mult", [1]),
        ("wd_mult", {0: "much"}),
        ("begin_num_update", -1),
        ("num_update", 2.5),
        ("idx2name", None),
        ("beta1", "0.9"),
        ("clip_gradient", {}),
        ("_all_index_update_counts", {0: [1]}),
        ("_index_update_count", {0: "four"}),
    ],
)
def test_attributes_that_no_optimizer_has_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    data = states(moments(*SHAPES), (LANS_CLASS, attributes(HELD, **{name: value})))
    with pytest.raises(StateError, match=name if not name.endswith("count") else "counts"):
        open_state(put(tmp_path / "x", data))


def test_states_without_a_number_go_with_the_latest_of_numbered_parameters(tmp_path: Path) -> None:
    """A loop saves `net-0001.params`, `net-0002.params` and so on, and `trainer.states` over itself."""
    states = GOLDEN / BOUNDS / "checkpoint/trainer.states"
    params = states.with_name("net.params")
    shutil.copy(states, tmp_path / "trainer.states")
    for number in (1, 2, 10):
        shutil.copy(params, tmp_path / f"net-{number:04}.params")
    for path in (tmp_path / "trainer.states", tmp_path):
        with CONTAINER.open(path) as checkpoint:
            assert {part.name for part in checkpoint.parts} == {"trainer.states", "net-0010.params"}
            [finding] = checkpoint.findings
            assert "net-0010.params, which has the greatest number" in finding.what
            assert "not net-0001.params, net-0002.params" in finding.what
    with CONTAINER.open(tmp_path / "net-0002.params") as checkpoint:
        assert {part.name for part in checkpoint.parts} == {"trainer.states", "net-0002.params"}
    shutil.copy(params, tmp_path / "other.params")
    with pytest.raises(NotFoundError, match="nothing tells which is meant"):
        CONTAINER.open(tmp_path / "trainer.states")


def test_an_order_that_neither_names_nor_shapes_prove_is_a_fact() -> None:
    params = {"b": (2,), "a": (2,)}
    taken = numbered({0: (2,), 1: (2,)}, params, {}, None, is_first_release=False)
    assert [fact.value for fact in taken.facts] == ["the order of their names"] and taken.names[0] == "a"
    proven = numbered({0: (3,), 1: (2,)}, {"b": (2,), "a": (3,)}, {}, None, is_first_release=False)
    assert not proven.facts and not numbered({0: (2,), 1: (2,)}, params, {}, ["b", "a"], False).facts


def test_a_count_that_states_alone_lack_is_unknown_in_every_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: no headline named it, and targets that count updates began again at 0."""
    source = str(GOLDEN / UPDATER / "checkpoint" / "updater_states_only.states")
    raw = [source, "--from", "mxnet-lans-mxnet", "--variant", "mxnet_unfused"]
    neutral = str(tmp_path / "neutral")

    def shown(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        out = capsys.readouterr()
        return out.out + out.err

    report = json.loads(shown("convert", *raw[:1], neutral, *raw[1:], "--to", "statekit", "--json"))
    assert "unknown: count," in report["plan"]["headline"] and report["plan"]["target"]["step"] is None
    (fact,) = [fact for fact in report["plan"]["facts"] if fact["name"] == "count"]
    assert fact["source"] == "unknown" and "count updates" in fact["because"]
    page = tmp_path / "page.html"
    certificate = json.loads(
        shown("verify", *raw[:1], neutral, *raw[1:], "--steps", "0", "--json", "--report", str(page))
    )
    assert "unknown: count" in certificate["verdict"]["headline"] and "unknown: count" in page.read_text()
    assert '{"begin_num_update": ...}' in shown("resume", *raw)
    assert main(["convert", *raw[:1], str(tmp_path / "again"), *raw[1:], "--to", "mxnet"]) == 0
    for given in (raw, [neutral]):
        asked = shown("convert", given[0], str(tmp_path / "x.pt"), *given[1:], code=3)
        assert "--hparams count=..." in asked and not (tmp_path / "x.pt").exists()
    counted = shown("convert", neutral, str(tmp_path / "x.pt"), "--hparams", "count=3")
    assert "unknown: count" not in counted
    with open_state(tmp_path / "x.pt") as opened:
        assert opened.counts.updates == 3
    assert '{"begin_num_update": 3}' in shown("resume", *raw, "--hparams", "count=3")
