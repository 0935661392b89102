"""The constants of Adafactor's variants, judged by the first update of every recording.

At the first update the decay is 0, so a slot holds exactly the mean of the squared gradient over the axis that the
variant averages away: which axis that is, how ties break, and when a parameter is factored, can be read off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from goldens import GOLDEN, bundles
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema

VARIANTS = {
    "t5x": "t5x",
    "t2t": "t2t_late",
    "mesh_tf": "mesh_tf",
    "hf_adafactor": "hf",
    "torch_adafactor": "torch",
    "optax_adafactor": "optax",
    "keras": "keras",
}
CHANGED_GRADIENTS = {
    "scale_map_maxscale_gnorm",
    "scanned_logical_rules",
    "adafactor_multisteps_manager_zarr3",
    "factored_rms_min128_noocdbt",
}
"""Recordings whose optimizer clips or averages gradients before it squares them."""


def _recordings() -> list[tuple[Path, str]]:
    recordings = []
    for bundle in (b for system in VARIANTS for b in bundles(system)):
        meta = json.loads((bundle / "meta.json").read_text(encoding="utf-8"))
        adafactor = "adafactor" in meta["optimizer"].lower() and "Multi" not in meta["optimizer"]
        if adafactor and bundle.name not in CHANGED_GRADIENTS and not meta["extra"].get("global_step_start"):
            early = bundle.name.startswith("early")
            recordings.append((bundle, "t2t_early" if early else VARIANTS[bundle.parent.name]))
    return recordings


def averaged(
    constants: Mapping[str, Any], shape: tuple[int, ...], minimum: int, stacked: set[int]
) -> tuple[int, int] | None:
    """The axes that v_row and v_col average away, as the constants have it; None for an unfactored parameter."""
    if len(shape) < 2 or (constants["factored_rank"] == "two" and len(shape) != 2):
        return None
    if constants["factored_axes"] == "last_two":
        return len(shape) - 1, len(shape) - 2
    axes = [axis for axis in range(len(shape)) if axis not in stacked]
    later_first = constants["tie_break"] in ("last", "argsort")
    axes.sort(key=lambda axis: (-shape[axis], -axis if later_first else axis))
    return (axes[0], axes[1]) if len(axes) > 1 and shape[axes[1]] >= minimum else None


def judged(
    meta: Mapping[str, Any], variant: str, constants: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """Float32 parameters whose axes follow from size and position, with the axes that the constants name."""
    native, extra = meta["hyperparameters"], meta["extra"]
    settings = load_schema("adafactor").settings(variant)
    minimum = native.get("min_dim_size_to_factor", settings["min_dim_size_to_factor"])
    for path, info in meta["params"].items():
        shape = tuple(info["shape"])
        by_rule = extra.get("factorization", {}).get(path, {}).get("rule", "HEURISTIC") != "HEURISTIC"
        unstable = constants["tie_break"] == "argsort" and len(shape) > 3 and len(set(shape)) < len(shape)
        if info["dtype"] == "float32" and not by_rule and not unstable:
            dims = extra.get("dimension_names", {}).get(path, [])
            stacked = {i for i, dim in enumerate(dims) if dim in (native.get("stacked_dim_names") or ())}
            yield path, averaged(constants, shape, minimum, stacked) if native.get("factored", True) else None


def mistakes(bundle: Path, variant: str, constants: Mapping[str, Any]) -> list[str]:
    """Slots that aren't, after the first update, what the constants say."""
    meta = json.loads((bundle / "meta.json").read_text(encoding="utf-8"))
    axes = dict(judged(meta, variant, constants))
    with safe_open(bundle / "grads.safetensors", framework="numpy") as file:
        squares = {path: file.get_tensor(f"1/{path}").astype(np.float64) ** 2 for path in axes}
    slots = load_schema("adafactor").slots
    canonical = {slots[name].aliases[variant]: name for name in ("v_row", "v_col")}
    with safe_open(bundle / "trajectory.safetensors", framework="numpy") as file:
        keys = [key for key in file.keys() if key.startswith("1/slot/")]  # noqa: SIM118 - not a dict
        parts = {key: key.removeprefix("1/slot/").rpartition("/") for key in keys}
        stored = {
            (path, canonical.get(slot.rpartition(".")[2])): key for key, (path, _, slot) in parts.items()
        }
        wrong = []
        for path, averaged_axes in axes.items():
            for i, slot in enumerate(("v_row", "v_col")):
                value = file.get_tensor(stored[path, slot]) if (path, slot) in stored else np.zeros(1)
                if averaged_axes is None:
                    right = value.size <= 1  # nothing, or a placeholder
                else:
                    mean = squares[path].mean(
                        axis=averaged_axes[i], keepdims=constants["reduced_axis"] == "kept"
                    )
                    right = value.shape == mean.shape and np.allclose(value, mean, rtol=1e-5, atol=1e-12)
                if not right:
                    wrong.append(f"{path} {slot}")
    return wrong


RECORDINGS = _recordings()


@pytest.mark.parametrize(
    ("bundle", "variant"), RECORDINGS, ids=[f"{b.parent.name}/{b.name}" for b, _ in RECORDINGS]
)
def test_first_update_averages_the_axes_that_the_constants_name(bundle: Path, variant: str) -> None:
    assert mistakes(bundle, variant, variant_constants("adafactor", variant)) == []


WRONG = {
    "t5x/momentum_f32": {"tie_break": "first"},
    "mesh_tf/adafactor_rank34_stacked_beta1": {"tie_break": "last"},
    "t2t/late_default_ref": {"factored_axes": "two_largest"},
    "t2t/early157_default_beta1": {"factored_rank": "two_or_more"},
    "hf_adafactor/relstep_warmup_scale": {"factored_rank": "two"},
    "torch_adafactor/adafactor_forloop": {"reduced_axis": "dropped"},
}


@pytest.mark.parametrize("case", [case for case in WRONG if (GOLDEN / case).is_dir()])
def test_recordings_notice_a_wrong_constant(case: str) -> None:
    bundle, variant = next(item for item in RECORDINGS if item[0] == GOLDEN / case)
    constants = {**variant_constants("adafactor", variant), **WRONG[case]}
    assert mistakes(bundle, variant, constants)
