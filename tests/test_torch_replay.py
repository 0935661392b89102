"""Every recording of the originals, driven by statekit.torch as a user drives an optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_driving import (
    Run,
    begin,
    differing,
    driven,
    recordings,
    replayed,
    verdict,
)

from goldens import COMPACT, GOLDEN
from replaying import first_state
from statekit.verify.recording import Recording, open_recording

pytestmark = pytest.mark.torch

RECORDINGS = recordings()
ALL = [pytest.param(path, id=name) for name, path in RECORDINGS.items()]


def first_of_each_system() -> list[Any]:
    """Every recording; all but the first two of each system are for `make test-all`."""
    systems = [name.partition("/")[0] for name in RECORDINGS]
    return [
        pytest.param(path, id=name, marks=() if systems[:i].count(systems[i]) < 2 else pytest.mark.slow)
        for i, (name, path) in enumerate(RECORDINGS.items())
    ]


FAMILIES = ("adafactor", "scaled_adam", "lans", "lamb", "adamw")


def test_every_family_is_among_them() -> None:
    families = set()
    for path in RECORDINGS.values():
        with open_recording(path) as recording:
            families.add(first_state(recording).optimizer.schema)
    assert families == ({*FAMILIES} - {"lamb"} if GOLDEN == COMPACT else {*FAMILIES})


@pytest.mark.parametrize("path", first_of_each_system())
def test_one_by_one_it_ends_where_replay_does_bit_for_bit(path: Any) -> None:
    with open_recording(path) as recording:
        assert differing(driven(recording, foreach=False), replayed(recording)) == []


@pytest.mark.sampled(30)
@pytest.mark.parametrize("path", ALL)
def test_moved_together_each_update_stays_within_the_bound(path: Any) -> None:
    with open_recording(path) as recording:
        rows = list(judged(recording))
    assert rows
    assert [(row.step, row.path, row.tensor, row.example) for row in rows if row.outside] == []


def judged(recording: Recording) -> Any:
    """Judges the first and the last update of a trajectory that our arithmetic can follow."""
    low = any(
        tensor.dtype.itemsize < 4
        for tensor in [
            *first_state(recording).params.values(),
            *(t for tensors in first_state(recording).slots.values() for t in tensors.values()),
        ]
    )
    # Compiled and op by op are one in float32; the resumed run of ScaledAdam has slots that no load gives.
    choice = [t for t in recording.trajectories if t.execution == "compiled" or not low][:1]
    for trajectory in choice or recording.trajectories[:1]:
        for update in sorted({trajectory.first + 1, recording.last}):
            yield from verdict(recording, trajectory, update)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "betas": ("torch_adafactor/adamw_fused_named", {"beta1": 0.999, "beta2": 0.9}),
    "decay": ("t5x/momentum_f32", {"decay_rate": 0.7}),
    "norm": ("mxnet_lans/fused_trainer", {"wd": 0.5}),
    "swapped": ("scaled_adam/zipformer2025_basic", {"betas": (0.98, 0.9)}),
    "ratio": ("optax_adafactor/lamb_pytree_noocdbt", {"epsilon": 1e-2}),
    "late": ("hf_adafactor/relstep_warmup_scale", {"step": 3}),
}


HERE = {fault: case for fault, case in WRONG.items() if case[0] in RECORDINGS}


@pytest.mark.parametrize(("name", "changes"), HERE.values(), ids=HERE)
def test_another_rule_is_noticed(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = Run.update

    def wrong(run: Run, recording: Recording, update: int) -> None:
        for group in run.optimizer.param_groups:
            group.update(changes)
        right(run, recording, update)

    monkeypatch.setattr(Run, "update", wrong)
    with open_recording(RECORDINGS[name]) as recording:
        assert any(row.outside for row in judged(recording))


def test_slots_of_the_fast_path_stay_where_they_were() -> None:
    with open_recording(RECORDINGS["t5x/momentum_f32"]) as recording:
        run = begin(first_state(recording))
        before = {
            (path, name): value.data_ptr()
            for path, param in run.params.items()
            for name, value in run.optimizer.state[param].items()
        }
        run.update(recording, recording.first + 1)
        for (path, name), address in before.items():
            assert run.optimizer.state[run.params[path]][name].data_ptr() == address
        assert all(isinstance(param, torch.nn.Parameter) for param in run.params.values())
