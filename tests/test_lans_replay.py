"""LANS against MXNet's own, fused and not, float32 and float16 with masters; and faults that replay must notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from goldens import GOLDEN, bundles
from replaying import everywhere, judged, mistaken, outside, present, shortened
from statekit.arrays.backend import backend
from statekit.arrays.numpy_backend import ORACLE
from statekit.optim import lans
from statekit.state.schema import load_schema
from statekit.verify.recorder import write_trajectory
from statekit.verify.recording import from_json, open_recording, to_json
from statekit.verify.replay import Subject, free_run

ALL = [f"mxnet_lans/{path.name}" for path in bundles("mxnet_lans")]
BOUNDS, TWO = "mxnet_lans/fused_bounds_clip_rescale", "mxnet_lans/fused_two_devices"
MIXED, UPDATER = "mxnet_lans/fused_fp16_multi_precision", "mxnet_lans/updater_unfused_fp16_legacy"
FUSED, UNFUSED, ZERO = (
    f"mxnet_lans/{case}" for case in ("fused_trainer", "unfused_trainer", "zero_grad_nan")
)
SCHEDULED = "mxnet_lans/trainer_scheduler_unfused"


def test_both_paths_were_recorded() -> None:
    variants = {open_recording(GOLDEN / case).phases[0].hyperparameters["variant"] for case in ALL}
    assert variants == {"mxnet_fused", "mxnet_unfused"}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "case"), everywhere(ALL, (BOUNDS, UPDATER)))
def test_every_element_of_every_step_lies_in_the_bound(name: str, case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        result = judged(recording, backend(name))
        last = recording.last
    assert not result.decoded
    assert [row for each in result.judged for row in each.rows if row.outside] == []
    assert result.passed
    rows = result.judged[0].rows
    assert {row.step for row in rows} == set(range(1, last + 1))
    assert sum(row.size for row in rows) > 900
    assert ("master" in {row.tensor for row in rows}) == (case in (MIXED, UPDATER))
    assert np.median([row.width for row in rows]) < 2e-4, "a bound this wide proves nothing"


@pytest.mark.parametrize("case", ALL)
def test_the_free_run_is_written_under_the_recordings_own_names(case: str, tmp_path: Path) -> None:
    with open_recording(GOLDEN / case) as recording:
        file = tmp_path / "free.safetensors"
        write_trajectory(file, free_run(Subject(recording, "init"), backend("numpy")), recording)
        theirs = {name: t.read() for name, t in recording.states(recording.trajectories[0]).items()}
        free = {"file": file.name, "execution": "op_by_op"}
        with from_json(tmp_path, {**to_json(recording), "trajectories": [free]}) as written:
            ours = {name: t.read() for name, t in written.states(written.trajectories[0]).items()}
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        assert (array.shape, array.dtype) == (theirs[name].shape, theirs[name].dtype)
        digits = 2e-3 if array.dtype == np.float16 else 2e-5
        norm = float(np.nanmax(np.abs(theirs[name].astype(np.float64)), initial=0.0))
        assert np.allclose(array, theirs[name], rtol=0.0, atol=digits * norm, equal_nan=True), name


@pytest.mark.parametrize("case", present(BOUNDS, FUSED, UNFUSED, SCHEDULED))
def test_the_float64_oracle_lies_in_the_bound_of_compiled_float32(case: str) -> None:
    recording = open_recording(GOLDEN / case)
    data = to_json(recording)
    data["trajectories"] = [{**data["trajectories"][0], "execution": "compiled"}]
    with from_json(recording.folder, data) as compiled:
        assert judged(compiled, ORACLE).passed


@pytest.mark.parametrize("case", present(ZERO))
def test_an_all_zero_gradient_leaves_nan_for_good(case: str) -> None:
    with open_recording(GOLDEN / case) as recording:
        states = list(free_run(Subject(recording, "init"), backend("numpy")))
    assert all(not np.isnan(state.params["head/bias"].read()).any() for state in states[:3])
    assert all(np.isnan(state.params["head/bias"].read()).all() for state in states[3:])
    assert not np.isnan(states[-1].params["head/weight"].read()).any()


def other_path(case: str) -> str:
    """The path that the recording did not take."""
    return "mxnet_fused" if "unfused" in case else "mxnet_unfused"


SWAPPED = present(BOUNDS, UPDATER, FUSED, TWO, UNFUSED, SCHEDULED, MIXED)


@pytest.mark.parametrize("case", SWAPPED)
def test_the_other_path_leaves_the_bound(case: str) -> None:
    xp = backend("numpy")
    with shortened(GOLDEN / case) as recording, mistaken(lans, xp, variant=other_path(case)):
        result = judged(recording, xp)
    assert outside(result, "v") and not result.passed


HALF = present(BOUNDS, SCHEDULED, UNFUSED, TWO)


@pytest.mark.parametrize("case", HALF)
def test_the_weight_that_the_second_half_decays_shows_by_itself(case: str) -> None:
    xp, weight = backend("numpy"), "old" if "unfused" in case else "moved"
    with open_recording(GOLDEN / case) as recording, mistaken(lans, xp, {"second_half_weight": weight}):
        result = judged(recording, xp)
    assert outside(result, "param") and not outside(result, "v")


RULES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "betas swapped": (BOUNDS, {}, {"beta1": 0.97, "beta2": 0.88}, 0),
    "step one off": (BOUNDS, {}, {}, 1),
    "step one off, unfused": (UPDATER, {}, {}, 1),
    "first count forgotten": (UPDATER, {}, {"begin_num_update": 1}, 0),
    "no bias correction": (BOUNDS, {}, {"bias_correction": False}, 0),
    "epsilon moved": (BOUNDS, {}, {"epsilon": 1e-4}, 0),
    "epsilon in the gradient's norm": (BOUNDS, {"gradient_normalisation": "norm_plus_epsilon"}, {}, 0),
    "no weight decay": (BOUNDS, {}, {"wd": 0.0}, 0),
    "decay of everything alike": (BOUNDS, {}, {"wd_mult": {}}, 0),
    "one rate for all": (BOUNDS, {}, {"lr_mult": {}}, 0),
    "no lower bound": (BOUNDS, {}, {"lower_bound": None}, 0),
    "no upper bound": (BOUNDS, {}, {"upper_bound": None}, 0),
    "no clipping": (BOUNDS, {}, {"clip_gradient": None}, 0),
    "gradient not normalised": (BOUNDS, {}, {"normalize_grad": False}, 0),
    "decay in the gradient": (BOUNDS, {}, {"adam_w_mode": False}, 0),
    "norm of the master": (MIXED, {"weight_norm_of": "master"}, {}, 0),
    "norm of the stored weight": (UPDATER, {"weight_norm_of": "stored"}, {}, 0),
    "1 - beta in float64": (BOUNDS, {"constants_precision": "float64_rounded"}, {}, 0),
    "1 - beta in float32": (UPDATER, {"constants_precision": "float32"}, {}, 0),
}
FAULTS = [what for what, fault in RULES.items() if present(fault[0])]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_another_rule_leaves_the_bound(fault: str) -> None:
    case, constants, changes, late = RULES[fault]
    xp = backend("numpy")
    with shortened(GOLDEN / case, 7) as recording, mistaken(lans, xp, constants, late=late):
        assert not judged(recording, xp, **changes).passed


@pytest.mark.parametrize("case", present(BOUNDS))
def test_the_scale_of_a_gradient_is_no_part_of_the_rule(case: str) -> None:
    """LANS divides by the norm: what rescale_grad changes is rounding alone, and the bound says so."""
    with open_recording(GOLDEN / case) as recording:
        assert judged(recording, backend("numpy"), rescale_grad=0.75).passed


def test_every_difference_between_mxnets_paths_is_read_or_harmless() -> None:
    variants = load_schema("lans").variants
    fused, unfused = variants["mxnet_fused"]["constants"], variants["mxnet_unfused"]["constants"]
    differ = {name for name in fused if fused[name] != unfused[name]}
    assert differ == {
        "norm_accumulation", "constants_precision", "weight_norm_of", "trust_ratio_fallback", "false_bounds",
        "second_half_weight", "application", "second_half_factor", "gradient_buffer", "rate_product",
        "second_moment_update",
    }  # fmt: skip
