"""Every recording of the originals, driven by statekit.tensorflow as a user drives an optimizer; and broken ones."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN
from replaying import present, stepped
from statekit.errors import StateError, UnknownRuleError, UsageError
from statekit.state.options import offered
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import in_memory
from statekit.verify.recording import open_recording

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
]
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
pytest.importorskip("tensorflow")
# Imported only where TensorFlow is.
import keras
import tensorflow as tf
import tensorflow_driving as driving

from statekit.tensorflow import load_optimizer, load_params

QUICK = present(
    "t5x/momentum_f32",
    "scaled_adam/zipformer2025_basic",
    "mxnet_lans/fused_trainer",
    "keras/lamb_default",
    "keras/adamw_ema_schedule_clip",
)
FOLDERS = {
    f"{path.parts[-2]}/{path.name}": path
    for path in sorted(GOLDEN.glob("*/*"))
    if (path / "meta.json").is_file()
}
ALL = [
    pytest.param(path, id=name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, path in FOLDERS.items()
    if stepped(path)
]


@pytest.mark.parametrize("folder", ALL)
def test_every_update_stays_within_the_bound(folder: Path) -> None:
    with open_recording(folder) as recording:
        rows = list(driving.verdict(recording))
    assert rows
    assert [(row.step, row.path, row.tensor, row.example) for row in rows if row.outside] == []


def later(run: driving.Run) -> None:
    run.optimizer.iterations.assign_add(1)


def turned(run: driving.Run) -> None:
    slots = run.optimizer.slots()["encoder/layers_0/attention/query/kernel"]
    row, col = slots["v_row"].numpy(), slots["v_col"].numpy()
    slots["v_row"].assign(col)
    slots["v_col"].assign(row)


def exchanged(run: driving.Run) -> None:
    one, other = (run.optimizer.slots()[f"encoder/layers_0/mlp/{name}/kernel"] for name in ("wi_0", "wo"))
    for slot in ("v_row", "v_col"):
        first, second = one[slot].numpy(), other[slot].numpy()
        one[slot].assign(second)
        other[slot].assign(first)


@pytest.mark.parametrize("fault", [later, turned, exchanged])
def test_a_broken_state_is_noticed(
    fault: Callable[[driving.Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = driving.Run.place

    def wrong(run: driving.Run, tensors: driving.Tensors, updates: int) -> None:
        right(run, tensors, updates)
        fault(run)

    monkeypatch.setattr(driving.Run, "place", wrong)
    if fault is later:  # without this, only the driver's own look at the count would fail
        monkeypatch.setattr(driving, "counted", lambda run, before: None)
    with open_recording(GOLDEN / "t5x" / "momentum_f32") as recording:
        rows = list(driving.verdict(recording, last=2))
    assert not any(row.outside for row in rows if row.step == 1)
    assert any(row.outside for row in rows if row.step == 2)


CHECKPOINT = GOLDEN / "t5x" / "momentum_f32"


@pytest.fixture(scope="module")
def stored() -> Iterator[TrainState]:
    """The recorded state at the checkpoint."""
    with open_recording(CHECKPOINT) as recording:
        assert recording.checkpoint_step is not None
        update = recording.checkpoint_step + 1
        yield recording.state(update - 1, recording.trajectories[0], update)


def options() -> dict[str, Any]:
    with open_recording(CHECKPOINT) as recording:
        return dict(recording.hints(6).hyperparameters)


def fresh(state: TrainState, prefix: str = "") -> list[Any]:
    """Variables with a state's names and shapes, in another order."""
    variables = [driving.variable(prefix + p, np.zeros(t.shape, t.dtype)) for p, t in state.params.items()]
    return variables[::-1]


@pytest.fixture(scope="module")
def source() -> Path:
    with open_recording(CHECKPOINT) as recording:
        return recording.folder / recording.checkpoint


def test_a_checkpoint_is_loaded_by_name_and_goes_on(stored: TrainState, source: Path) -> None:
    variables = fresh(stored)
    load_params(source, variables)
    optimizer = load_optimizer(source, variables, 1e-3, hparams=options())
    assert int(optimizer.iterations.numpy()) == stored.counts.updates
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), stored.params[variable.path].read())
        for slot, value in optimizer.slots()[variable.path].items():
            np.testing.assert_array_equal(
                value.numpy(), stored.slots[variable.path][slot].read(), err_msg=slot
            )
    with open_recording(CHECKPOINT) as recording:
        named = {v.path: v for v in variables}
        run = driving.Run({path: named[path] for path in stored.params}, optimizer)
        trajectory = recording.trajectories[0]
        rows = list(driving._judged(recording, trajectory, run, stored, stored.counts.updates + 1))
    assert rows and not any(row.outside for row in rows)


LOADED = present(
    "torch_adafactor/adafactor_bf16",
    "torch_adafactor/adamw_fused_named",
    "scaled_adam/gptsovits_clipping",
    "scaled_adam/zipformer2025_bf16",
    "t2t/late_bf16_encoded_beta1",
    "t2t/late_partitioned_unfactored",
    "mesh_tf/adafactor_rank34_stacked_beta1",
    "mesh_tf/gptneo_adam_cosine_clip",
    "optax_adafactor/adafactor_standard_ocdbt",
    "optax_adafactor/lamb_pytree_noocdbt",
)


@pytest.mark.parametrize("case", LOADED)
def test_every_familys_own_checkpoint_is_loaded(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        assert recording.checkpoint_step is not None
        folder, step = recording.folder / recording.checkpoint, recording.checkpoint_step
        state = recording.state(step, recording.trajectories[0], step + 1)
        moved = {path for group in state.optimizer.groups for path in group.paths}
        variables = {v.path: v for v in fresh(state)}
        load_params(folder, list(variables.values()))
        mine = {path: variables[path] for path in state.params if path in moved}
        schema, variant = state.optimizer.schema, str(state.optimizer.variant)
        said = [driving.spelled(group.hyperparameters) for group in state.optimizer.groups]
        known = {n: said[0][n] for n in offered(schema, variant) if all(g.get(n) == said[0][n] for g in said)}
        optimizer = load_optimizer(folder, list(mine.values())[::-1], 1e-3, variant=variant, **known)
        assert int(optimizer.iterations.numpy()) == state.counts.updates
        want, got = driving.read(state), driving.Run(mine, optimizer).tensors()
    assert {key for key in want if key[0] in moved or key[0].startswith("groups/")} == got.keys()
    for key, value in got.items():
        np.testing.assert_array_equal(value, want[key].astype(value.dtype), err_msg=str(key))


def test_names_may_differ_if_they_are_given(stored: TrainState, source: Path) -> None:
    variables = fresh(stored, "mine/")
    names = {v.path: v.path.removeprefix("mine/") for v in variables}
    with pytest.raises(StateError, match="isn't in the checkpoint"):
        load_optimizer(source, variables, 1e-3, hparams=options())
    optimizer = load_optimizer(source, variables, 1e-3, hparams=options(), names=names)
    load_params(source, variables, names=names)
    again = type(optimizer).from_config(optimizer.get_config())
    again.build(variables)
    assert again.slots().keys() == optimizer.slots().keys() == stored.slots.keys()
    np.testing.assert_array_equal(variables[0].numpy(), stored.params[names[variables[0].path]].read())


def test_a_checkpoint_that_does_not_fit_is_refused_whole(stored: TrainState, source: Path) -> None:
    variables = fresh(stored)
    with pytest.raises(StateError, match="not among the variables"):
        load_optimizer(source, variables[1:], 1e-3, hparams=options())
    with pytest.raises(StateError, match="no variable"):
        load_params(source, variables[1:])
    wide = driving.variable(variables[0].path, np.zeros((7, 7), np.float32))
    with pytest.raises(StateError, match="has shape"):
        load_optimizer(source, [wide, *variables[1:]], 1e-3, hparams=options())
    with pytest.raises(StateError, match="has shape"):
        load_params(source, [wide, *variables[1:]])
    narrow = driving.variable(variables[0].path, np.zeros(variables[0].shape, np.float16))
    with pytest.raises(StateError, match="narrowed"):
        load_params(source, [narrow, *variables[1:]])
    with pytest.raises(UnknownRuleError, match="doesn't say"):
        load_optimizer(source, variables, 1e-3)
    with pytest.raises(UsageError):
        load_optimizer(source, variables, 1e-3, hparams=options(), colour="red")  # type: ignore[call-arg]
    assert all(not v.numpy().any() for v in variables)


def test_a_large_tensor_is_copied_block_by_block() -> None:
    from statekit.tensorflow.from_checkpoint import _copied

    reads: list[Any] = []

    def fetch(index: Any) -> Any:
        reads.append(index)
        return whole.fetch(index)

    value = np.arange(3 * 2**20, dtype=np.float32).reshape(3, 2**20)
    whole = in_memory(value)
    watched = replace(whole, fetch=fetch)
    target = tf.Variable(tf.zeros(value.shape))
    _copied(target, watched)
    assert len(reads) > 1
    np.testing.assert_array_equal(target.numpy(), value)
    kept = keras.Variable(np.zeros(value.shape, np.float32))
    _copied(kept, watched)
    np.testing.assert_array_equal(kept.numpy(), value)


class Net(keras.Model):  # type: ignore[misc]  # Keras has no types
    """A model that holds the recorded variables."""

    def __init__(self, variables: list[Any]) -> None:
        super().__init__()
        self.held = variables


def test_what_the_page_says_of_tensorflow_runs(
    stored: TrainState, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[1] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"<!-- run tensorflow -->\n```python\n(.*?)```", page, re.DOTALL)
    shutil.copytree(source, tmp_path / "t5x-ckpt" / "checkpoint_4")
    monkeypatch.chdir(tmp_path)
    model = Net(fresh(stored))
    exec(compile(text, "optimizers.md", "exec"), {"model": model})
    assert int(model.optimizer.iterations.numpy()) == stored.counts.updates
    assert len(model.optimizer.slots()) == len(stored.params)
