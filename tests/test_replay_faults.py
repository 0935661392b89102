"""Replay must say so when something is broken on purpose. Each fault here passes unnoticed in a plain load.

That every backend notices every kind of fault is in test_seeded_faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from goldens import GOLDEN
from statekit.arrays.backend import backend
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import container, layout
from statekit.files.stage import staged
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import Tensor
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

BACKENDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch)]
CASE = GOLDEN / "t5x" / "momentum_f32"
SQUARE = "encoder/layers_0/attention/query/kernel"


def rewritten(tmp_path: Path, change: Callable[[TrainState], TrainState], to: str = "t5x") -> Path:
    """Writes the recorded checkpoint again after a change, and returns where."""
    recording = open_recording(CASE)
    target = tmp_path / ("changed" if to == "t5x" else "changed.pt")
    with open_state(CASE / recording.checkpoint, hints=recording.hints(5)) as opened:
        changed = change(opened.state)
        kind = container(to).target_kind
        assert kind is not None
        encoded = layout("t5x" if to == "t5x" else "statekit-torch").encode(changed)
        with staged(target, kind) as stage:
            container(to).write(encoded, stage)
            stage.commit(container(to).open)
    return target


def with_slots(state: TrainState, path: str, slots: Mapping[str, Tensor]) -> TrainState:
    return dataclasses.replace(state, slots={**state.slots, path: {**state.slots[path], **slots}})


def swapped_square(state: TrainState) -> TrainState:
    slots = state.slots[SQUARE]
    return with_slots(state, SQUARE, {"v_row": slots["v_col"], "v_col": slots["v_row"]})


def permuted(state: TrainState) -> TrainState:
    """Exchanges the second moments of two parameters whose slots have the same shapes, as a load by position does."""
    one, other = ("encoder/layers_0/mlp/wi_0/kernel", "encoder/layers_0/mlp/wo/kernel")
    first, second = ({name: state.slots[path][name] for name in ("v_row", "v_col")} for path in (one, other))
    assert all(first[name].shape == second[name].shape for name in first)
    return with_slots(with_slots(state, one, second), other, first)


def one_step_late(state: TrainState) -> TrainState:
    return dataclasses.replace(state, counts=Counts(state.counts.updates + 1, state.counts.schedule + 1))


def same(state: TrainState) -> TrainState:
    return state


FAULTS = {"row and column swapped": swapped_square, "slots permuted": permuted, "step one off": one_step_late}


@pytest.mark.parametrize("to", ["t5x", "torch"])
@pytest.mark.parametrize("name", BACKENDS)
def test_an_unbroken_copy_passes(tmp_path: Path, name: str, to: str) -> None:
    copy = rewritten(tmp_path, same, to)
    with open_recording(CASE) as recording:
        assert replay(Subject(recording, checkpoint=copy), backend(name)).passed


@pytest.mark.parametrize("to", ["t5x", "torch"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_broken_checkpoint_is_noticed_at_once_and_in_the_next_update(
    tmp_path: Path, name: str, fault: str, to: str
) -> None:
    broken = rewritten(tmp_path, FAULTS[fault], to)
    with open_recording(CASE) as recording:
        result = replay(Subject(recording, checkpoint=broken), backend(name))
    assert not result.passed
    assert result.decoded
    outside = [row for row in result.judged[0].rows if row.outside]
    assert outside and outside[0].step == 5


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "epsilon1 of Keras' size": ("default_heuristics", {"epsilon1": 1e-8}),
    "epsilon1 gone": ("skip_nan", {"epsilon1": 0.0}),
    "epsilon2 moved": ("small_factor_shapes", {"epsilon2": 1e-1}),
    "decay exponent": ("momentum_f32", {"decay_rate": 0.75}),
    "offset one off": ("finetune_step_offset", {"step_offset": 3}),
    "offset forgotten": ("finetune_step_offset", {"step_offset": 0}),
    "momentum": ("momentum_f32", {"beta1": 0.8}),
    "clipping": ("small_factor_shapes", {"clipping_threshold": 0.5}),
    "no clipping": ("small_factor_shapes", {"clipping_threshold": None}),
    "no parameter scale": ("small_factor_shapes", {"multiply_by_parameter_scale": False}),
    "no global norm": ("scale_map_maxscale_gnorm", {"global_norm_clip_threshold": None}),
    "no largest scale": ("scale_map_maxscale_gnorm", {"max_parameter_scale": None}),
    "weight decay": ("noscale_wd_noclip", {"weight_decay_rate": None}),
    "exponent of the decay": ("scale_map_maxscale_gnorm", {"weight_decay_rate_lr_exponent": None}),
    "NaNs kept": ("skip_nan", {"skip_nan_updates": False}),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("fault", CHANGES)
def test_a_moved_hyperparameter_leaves_the_bound(fault: str) -> None:
    case, changes = CHANGES[fault]
    with open_recording(GOLDEN / "t5x" / case) as recording:
        assert replay(Subject(recording, "init"), backend("numpy")).passed
        assert not replay(Subject(recording, "init", changes=changes), backend("numpy")).passed
