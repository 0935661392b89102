"""ScaledAdam's steps against icefall's and GPT-SoVITS's own, and faults that replay must notice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN, bundles
from replaying import BACKENDS, marks
from statekit.arrays.backend import Backend, backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.files.safetensors import open_safetensors
from statekit.optim.scaled_adam_clip import JOINT, batches
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import Tensor, in_memory
from statekit.verify.recorder import write_trajectory
from statekit.verify.recording import Recording, from_json, open_recording, system, to_json
from statekit.verify.replay import Subject, free_run, replay

ALL = [pytest.param(path, id=path.name) for path in bundles("scaled_adam")]
AGAIN = ("gptsovits_basic", "gptsovits_lightning", "zipformer2025_bf16", "zipformer2025_groups_clipping")
"""What TensorFlow sees of in `make test` in others: each generation, clipping, groups; bfloat16 in Adafactor's."""
PLACES = [
    pytest.param(
        path, name, marks=marks(name, name == "tensorflow" and path.name in AGAIN), id=f"{name}-{path.name}"
    )
    for path in bundles("scaled_adam")
    for name in BACKENDS
]
BASIC, GROUPS, LATER = (
    GOLDEN / "scaled_adam" / case
    for case in ("gptsovits_basic", "pt7_two_groups_eden", "zipformer2025_basic")
)


def test_every_generation_that_was_recorded_is_here() -> None:
    variants = {
        json.loads((p / "meta.json").read_text())["extra"]["generation"] for p in bundles("scaled_adam")
    }
    assert variants == set(load_schema("scaled_adam").stepped) - {"zip202310"}


@pytest.mark.sampled
@pytest.mark.parametrize(("path", "name"), PLACES)
def test_every_element_of_every_step_lies_in_the_bound(path: Path, name: str) -> None:
    with open_recording(path) as recording:
        result = replay(Subject(recording, "init"), backend(name))
        steps = set(range(1, recording.last + 1))
        saved = recording.checkpoint_step
    assert not result.decoded
    assert [row for judged in result.judged for row in judged.rows if row.outside] == []
    assert result.passed
    assert {row.step for row in result.judged[0].rows} == steps
    for resumed in result.judged[1:]:
        assert {row.step for row in resumed.rows} == {
            step for step in steps if saved is not None and step > saved
        }
    rows = [
        row
        for judged in result.judged
        for row in judged.rows
        if row.tensor in ("param", "delta", "exp_avg_sq")
    ]
    assert sum(row.size for row in rows) > 3000
    assert np.median([row.width for row in rows]) < 2e-5, "a bound this wide proves nothing"


def test_the_resumed_bfloat16_run_is_judged_too() -> None:
    recording = open_recording(GOLDEN / "scaled_adam" / "zipformer2025_bf16")
    assert [t.first for t in recording.trajectories] == [0, 4]


@pytest.mark.parametrize("path", ALL)
def test_batches_split_into_members_and_stack_back_bit_for_bit(path: Path) -> None:
    form = system("scaled_adam")
    with open_recording(path) as recording:
        for trajectory in recording.trajectories:
            states = recording.states(trajectory)
            for step in range(trajectory.first, recording.last + 1):
                prefix = f"{step}/"
                native = {name[len(prefix) :]: t for name, t in states.items() if name.startswith(prefix)}
                again = form.encode(
                    recording.state(step, trajectory, max(step, 1)), recording.phase(max(step, 1))
                )
                assert set(again) == set(native)
                for name, tensor in native.items():
                    assert_same(again[name], tensor)


def assert_same(left: Tensor, right: Tensor) -> None:
    assert (left.shape, left.dtype) == (right.shape, right.dtype)
    assert left.read().tobytes() == right.read().tobytes()


@pytest.mark.parametrize("path", ALL)
def test_batches_come_in_the_originals_order(path: Path) -> None:
    meta = json.loads((path / "meta.json").read_text())
    for number, group in enumerate(meta["extra"]["param_groups"]):
        keys = {
            name: (meta["params"][name]["dtype"], *meta["params"][name]["shape"]) for name in group["params"]
        }
        recorded = [b["members"] for b in meta["extra"]["batches_in_order"] if b["group"] == number]
        assert [list(batch) for batch in batches(keys)] == recorded


@pytest.mark.parametrize("path", ALL)
def test_the_free_run_is_written_under_the_recordings_own_names(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "free.safetensors"
    with open_recording(path) as recording:
        write_trajectory(file, free_run(Subject(recording, "init"), backend("numpy")), recording)
        written, theirs = open_safetensors(file), recording.states(recording.trajectories[0])
        assert set(written.tensors) == set(theirs)
        for name, tensor in written.tensors.items():
            recorded = theirs[name].read().astype(np.float64)
            assert (tensor.shape, tensor.dtype) == (theirs[name].shape, theirs[name].dtype)
            scale = float(np.max(np.abs(recorded))) or 1.0
            assert float(np.max(np.abs(tensor.read().astype(np.float64) - recorded))) <= 1e-5 * scale
        written.close()


def test_slots_that_no_update_uses_are_kept_whole_from_the_first_step_on() -> None:
    """A batch of several one-element parameters has them in the seed generation; rank 0 has them jointly."""
    with open_recording(BASIC) as recording:
        judge = recording.trajectories[0]
        made = recording.state(0, judge, 1).extra[JOINT]
        kept = recording.state(recording.last, judge, recording.last).extra[JOINT]
        assert {holder: slots["param_rms"].shape for holder, slots in made.items()} == {
            "enc/0/scale": (1,),
            "enc/1/gate": (2, 1),
        }
        for holder, slots in made.items():
            for name, tensor in slots.items():
                assert_same(tensor, kept[holder][name])


@pytest.mark.parametrize(
    "case", ["gptsovits_basic", "pt7_two_groups_eden", "zipformer202407_clipping", "zipformer2025_basic"]
)
def test_the_float64_oracle_lies_in_the_bound(case: str) -> None:
    with open_recording(GOLDEN / "scaled_adam" / case) as recording:
        assert replay(Subject(recording, "init"), ORACLE).passed


Mistake = Callable[[TrainState], TrainState]


@dataclass(frozen=True)
class Mistaken(Subject):
    """Our side errs about every state."""

    mistake: Mistake = dataclasses.field(default=lambda state: state, kw_only=True)

    def state(self) -> TrainState:
        return self.mistake(super().state())

    def belief(self, update: int, recorded: TrainState) -> TrainState:
        return self.mistake(super().belief(update, recorded))


def outside(path: Path, xp: Backend, mistake: Mistake) -> int:
    with open_recording(path) as recording:
        result = replay(Mistaken(recording, "init", mistake=mistake), xp)
    assert result.passed == (not any(judged.outside for judged in result.judged) and not result.decoded)
    return sum(row.outside > 0 for judged in result.judged for row in judged.rows)


def with_slots(state: TrainState, slots: Mapping[str, Mapping[str, Tensor]]) -> TrainState:
    return dataclasses.replace(state, slots={**state.slots, **slots})


def rows_swapped(state: TrainState) -> TrainState:
    one, other = "enc/0/weight", "enc/1/weight"
    return with_slots(state, {one: state.slots[other], other: state.slots[one]})


def batches_reversed(state: TrainState) -> TrainState:
    members = ("enc/0/bias", "enc/1/bias", "dec/zero")
    return with_slots(state, dict(zip(members, (state.slots[p] for p in reversed(members)), strict=True)))


def one_step_late(state: TrainState) -> TrainState:
    return dataclasses.replace(state, counts=Counts(state.counts.updates + 1, state.counts.schedule + 1))


def betas_swapped(state: TrainState) -> TrainState:
    return state.with_hyperparameters(betas=(0.98, 0.9))


def rms_recomputed(state: TrainState) -> TrainState:
    slots = {}
    for path, tensors in state.slots.items():
        if "param_rms" in tensors:
            p = state.params[path].read()
            fresh = np.sqrt(np.mean(p * p, keepdims=True)).astype(tensors["param_rms"].dtype)
            slots[path] = {**tensors, "param_rms": in_memory(fresh, "param_rms")}
    return with_slots(state, slots)


def with_shared(state: TrainState, name: str, change: Callable[[Any], Any]) -> TrainState:
    groups = tuple(
        dataclasses.replace(
            g, slots={**g.slots, name: in_memory(np.asarray(change(g.slots[name].read())), name)}
        )
        for g in state.optimizer.groups
    )
    return dataclasses.replace(state, optimizer=dataclasses.replace(state.optimizer, groups=groups))


def norms_lost(state: TrainState) -> TrainState:
    return with_shared(state, "model_norms", np.zeros_like)


def threshold_lost(state: TrainState) -> TrainState:
    return with_shared(state, "model_norm_threshold", lambda array: np.full_like(array, np.inf))


def groups_rates_swapped(recording: Recording) -> Recording:
    data = to_json(recording)
    return from_json(
        recording.folder, {**data, "learning_rate": [list(reversed(r)) for r in data["learning_rate"]]}
    )


def generation(variant: str) -> Mistake:
    def mistake(state: TrainState) -> TrainState:
        return dataclasses.replace(state, optimizer=dataclasses.replace(state.optimizer, variant=variant))

    return mistake


FAULTS: dict[str, tuple[Path, Mistake]] = {
    "rows of two parameters of one shape swapped": (BASIC, rows_swapped),
    "order of a batch reversed": (BASIC, batches_reversed),
    "step one off": (GROUPS, one_step_late),
    "betas swapped": (GROUPS, betas_swapped),
    "param_rms recomputed": (GROUPS, rms_recomputed),
    "model_norms lost": (GROUPS, norms_lost),
    "threshold lost": (GROUPS, threshold_lost),
    "wrong generation": (GROUPS, generation("zip202305")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_bound(fault: str) -> None:
    path, mistake = FAULTS[fault]
    assert outside(path, backend("numpy"), mistake)


def test_the_rates_of_two_groups_are_not_exchangeable() -> None:
    with open_recording(GROUPS) as recording, groups_rates_swapped(recording) as swapped:
        assert not replay(Subject(swapped, "init"), backend("numpy")).passed


SAME_UPDATE = {frozenset({"gptsovits", "pt7"})}
"""They differ only in slots that no update uses."""


@pytest.mark.parametrize(
    "case",
    ["pt7_two_groups_eden", "zipformer202305_basic", "zipformer202407_clipping", "zipformer2025_basic"],
)
def test_each_generation_is_told_from_the_others(case: str) -> None:
    path = GOLDEN / "scaled_adam" / case
    recorded = json.loads((path / "meta.json").read_text())["extra"]["generation"]
    for variant in load_schema("scaled_adam").stepped:
        same = variant == recorded or frozenset({variant, recorded}) in SAME_UPDATE
        assert (outside(path, backend("numpy"), generation(variant)) == 0) == same, variant


MOVED: dict[str, tuple[str, dict[str, Any]]] = {
    "clipping_scale": ("pt7_two_groups_eden", {"clipping_scale": 2.5}),
    "no clipping of sizes": ("zipformer202305_basic", {"clipping_scale": 1e9}),
    "scalar_lr_scale": ("zipformer2025_basic", {"scalar_lr_scale": 0.11}),
    "eps": ("zipformer2025_basic", {"eps": 1e-6}),
    "param_min_rms": ("gptsovits_basic", {"param_min_rms": 0.006}),
    "param_max_rms": ("gptsovits_basic", {"param_max_rms": 1.0}),
    "scalar_max": ("gptsovits_basic", {"scalar_max": 0.9}),
    "beta2": ("zipformer2025_basic", {"betas": (0.9, 0.981)}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", MOVED)
def test_a_moved_hyperparameter_leaves_the_bound(fault: str) -> None:
    case, changes = MOVED[fault]
    with open_recording(GOLDEN / "scaled_adam" / case) as recording:
        assert not replay(Subject(recording, "init", changes=changes), backend("numpy")).passed


def test_a_trajectory_is_written_where_slots_are_kept_jointly(tmp_path: Path) -> None:
    with open_recording(BASIC) as recording:
        subject = Subject(recording, "checkpoint")
        assert replay(subject, backend("numpy"), trajectory=tmp_path / "ours.safetensors").passed
    assert (tmp_path / "ours.safetensors").stat().st_size
