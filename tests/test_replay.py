"""Our steps against T5X's own: every recording, every backend, from the native checkpoint and from init."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from goldens import COMPACT, GOLDEN, bundles
from replaying import marks
from statekit.arrays.backend import Backend, backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import FormatError, NotFoundError, UsageError
from statekit.files.safetensors import open_safetensors
from statekit.state.evidence import Fact
from statekit.state.train_state import Optimizer, TrainState
from statekit.verify.recorder import Recorder
from statekit.verify.recording import Recording, from_json, open_recording, to_json
from statekit.verify.replay import Start, Subject, replay

T5X = [pytest.param(path, id=path.name) for path in bundles("t5x")]
BACKENDS = [
    "numpy",
    pytest.param("torch", marks=pytest.mark.torch),
]


def test_there_are_recordings() -> None:
    assert len(T5X) >= (13 if GOLDEN == COMPACT else 14)


SAMPLE = ("momentum_f32", "bf16_params", "factor_map_rank34", "finetune_step_offset")
"""What backends that compile for seconds replay in CI; the rest is slow."""


def compiled(framework: str, start: Start) -> Iterator[Any]:
    for path in bundles("t5x"):
        sampled = path.name in SAMPLE and (start == "checkpoint") == (framework == "jax")
        yield pytest.param(
            path,
            start,
            framework,
            id=f"{framework}-{start}-{path.name}",
            marks=marks(framework, slow=not sampled),
        )


@pytest.mark.sampled
@pytest.mark.parametrize("path", T5X)
@pytest.mark.parametrize("start", ["checkpoint", "init"])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_element_of_every_step_lies_in_the_bound(path: Path, start: Start, name: str) -> None:
    assert_within(path, start, backend(name))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("path", "start", "name"),
    [*compiled("jax", "checkpoint"), *compiled("jax", "init"), *compiled("tensorflow", "init")],
)
def test_every_element_lies_in_the_bound_where_steps_are_compiled(
    path: Path, start: Start, name: str
) -> None:
    assert_within(path, start, backend(name))


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", ["bf16_params", "momentum_f32"])
def test_tensorflow_goes_on_from_a_checkpoint(case: str) -> None:
    """Two are enough: reading is the same in every backend, and XLA compiles each run anew."""
    assert_within(GOLDEN / "t5x" / case, "checkpoint", backend("tensorflow"))


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", ["bf16_params", "momentum_bf16_wd", "skip_nan"])
def test_tensorflow_run_eagerly_lies_in_the_bound_of_uncompiled_arithmetic(case: str) -> None:
    from statekit.arrays.tensorflow_backend import TensorFlowBackend

    class Eager(TensorFlowBackend):
        contracts = False

        def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
            return step

    assert_within(GOLDEN / "t5x" / case, "init", Eager())


def assert_within(path: Path, start: Start, xp: Backend) -> None:
    with open_recording(path) as recording:
        result = replay(Subject(recording, start), xp)
    assert not result.decoded
    assert [row for judged in result.judged for row in judged.rows if row.outside] == []
    assert result.passed
    first = recording.checkpoint_step if start == "checkpoint" else 0
    assert result.steps == (first, recording.last)
    rows = result.judged[0].rows
    assert {row.step for row in rows} == set(range(result.steps[0] + 1, recording.last + 1))
    assert sum(row.size for row in rows) > 1000


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", T5X)
def test_the_orbax_generation_starts_the_same_run(path: Path) -> None:
    with open_recording(path) as recording:
        orbax = path / "checkpoint_orbax" / f"checkpoint_{recording.checkpoint_step}"
        assert replay(Subject(recording, checkpoint=orbax), backend("numpy")).passed


def test_a_compiled_trajectory_is_judged_as_compiled() -> None:
    recording = open_recording(GOLDEN / "t5x" / "momentum_bf16_wd")
    assert [t.execution for t in recording.trajectories] == ["op_by_op", "compiled"]


@pytest.mark.parametrize(
    "case", ["default_heuristics", "factor_map_rank34", "momentum_f32", "small_factor_shapes"]
)
def test_the_float64_oracle_lies_in_the_bound_of_compiled_float32(case: str) -> None:
    """The interval must enclose exact arithmetic too, or it isn't centred on the rule."""
    recording = open_recording(GOLDEN / "t5x" / case)
    data = to_json(recording)
    data["trajectories"] = [{"file": "trajectory.safetensors", "execution": "compiled"}]
    with from_json(recording.folder, data) as compiled:
        assert replay(Subject(compiled, "init"), ORACLE).passed


def test_rounding_op_by_op_is_told_from_compiled() -> None:
    recording = open_recording(GOLDEN / "t5x" / "bf16_params")
    data = to_json(recording)
    data["trajectories"] = [{"file": "trajectory_jit.safetensors", "execution": "op_by_op"}]
    with from_json(recording.folder, data) as mistaken:
        assert not replay(Subject(mistaken, "init"), backend("numpy")).passed


def test_the_free_run_is_written_under_the_recordings_own_names(tmp_path: Path) -> None:
    file = tmp_path / "free.safetensors"
    with open_recording(GOLDEN / "t5x" / "finetune_step_offset") as recording:
        replay(Subject(recording), backend("numpy"), file)
        written = open_safetensors(file)
        theirs = recording.states(recording.trajectories[0])
        assert recording.checkpoint_step == 4
        assert set(written.tensors) == {name for name in theirs if int(name.split("/")[0]) >= 4}
        for name, tensor in written.tensors.items():
            recorded = theirs[name].read()
            assert (tensor.shape, tensor.dtype) == (recorded.shape, recorded.dtype)
            scale = float(np.max(np.abs(recorded))) or 1.0
            assert float(np.max(np.abs(tensor.read() - recorded))) <= 1e-5 * scale
        written.close()


def test_a_recorded_run_of_ones_own_is_judged(tmp_path: Path) -> None:
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as original:
        record_again(original, tmp_path / "mine")
    with open_recording(tmp_path / "mine") as copy:
        assert replay(Subject(copy, "init"), backend("numpy")).passed
        with pytest.raises(NotFoundError, match="no checkpoint"):
            replay(Subject(copy), backend("numpy"))


def record_again(original: Recording, folder: Path) -> None:
    """Records a run from what another recording holds, through the public recorder."""
    states = original.states(original.trajectories[0])

    def at(step: int) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
        params: dict[str, object] = {}
        slots: dict[str, dict[str, object]] = {}
        for name, tensor in states.items():
            number, kind, path = name.split("/", 2)
            if int(number) == step and kind == "param":
                params[path] = tensor.read()
            elif int(number) == step:
                parent, _, slot = path.rpartition("/")
                slots.setdefault(parent, {})[slot] = tensor.read()
        return params, slots

    phase = original.phases[0]
    recorder = Recorder(folder, system="t5x", hyperparameters=phase.hyperparameters, execution="op_by_op")
    recorder.start(*at(0))  # type: ignore[arg-type]  # pairs of any length
    for update in range(1, original.last + 1):
        grads = {path: tensor.read() for path, tensor in original.gradients(update).items()}
        recorder.update(grads, *at(update), original.rate(update))  # type: ignore[arg-type]  # pairs of any length
    recorder.close()


def test_what_is_no_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"isn't a recording(.|\n)*grads.safetensors"):
        open_recording(tmp_path)
    (tmp_path / "recording.json").write_text('{"format": "statekit-recording", "version": 2}')
    for name in ("grads.safetensors", "trajectory.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FormatError, match="breaks the form"):
        open_recording(tmp_path)
    (tmp_path / "recording.json").write_text("[")
    with pytest.raises(FormatError, match="isn't JSON"):
        open_recording(tmp_path)


def test_what_is_of_no_parameter_is_not_recorded_without_a_word(tmp_path: Path) -> None:
    """Slots under other names than the parameters' were left out, and a replay began without them."""
    recorder = Recorder(tmp_path / "run", system="t5x", hyperparameters={})
    params, slots = {"a/w": np.ones(2, np.float32)}, {"v": np.ones(2, np.float32)}
    with pytest.raises(UsageError, match=r"slots of no parameter @ a\.w"):
        recorder.start(params, {"a.w": slots})
    recorder.start(params, {"a/w": slots})
    with pytest.raises(UsageError, match=r"gradient of no parameter @ a\.w"):
        recorder.update({"a.w": params["a/w"]}, params, {"a/w": slots}, None)
    recorder.update(params, params, {"a/w": slots}, 0.1)
    recorder.close()
    with open_recording(tmp_path / "run") as recording:
        assert recording.last == 1


def test_a_replay_starts_from_a_ref_with_what_it_says_of_its_checkpoint(tmp_path: Path) -> None:
    recording = GOLDEN / "t5x" / "momentum_f32"
    names = tmp_path / "named"
    statekit.convert(recording / "checkpoint", names, to="orbax", layout="optax", hparams={"beta1": 0.9})
    assert statekit.replay(recording, checkpoint=CheckpointRef(names, layout="optax")).passed
    with pytest.raises(UsageError, match="no layout of that name"):
        statekit.replay(recording, checkpoint=CheckpointRef(names, layout="nosuch"))
    with pytest.raises(UsageError, match="no layout of that name"):
        statekit.replay(recording, checkpoint=CheckpointRef(layout="nosuch"))


class Assuming(Subject):
    """A recording of which a value was assumed."""

    def state(self) -> TrainState:
        state = super().state()
        fact = Fact("decoupled_weight_decay", True, "assumed", "FusedAdam's default")
        groups = [replace(group, facts=(fact,)) for group in state.optimizer.groups]
        return replace(state, optimizer=Optimizer.of(groups, state.optimizer.kinds))


def test_a_verdict_of_replay_names_its_weakest_fact() -> None:
    """Seen red: `equivalent` was all that was said."""
    with open_recording(COMPACT / "low_precision" / "torch_adamw_float16_eager") as recording:
        plain = replay(Subject(recording, "init"), backend("numpy"))
        assuming = replay(Assuming(recording, "init"), backend("numpy"))
    assert plain.headline == "EQUIVALENT"
    assert assuming.headline.startswith("EQUIVALENT, if decoupled_weight_decay=True (FusedAdam's default")
    assert assuming.to_json()["facts"][0]["name"] == "decoupled_weight_decay"
