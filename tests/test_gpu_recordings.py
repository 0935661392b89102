"""Recordings of originals on a GPU: each lies within the bound of how it ran there, and outside that of a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from statekit.arrays.backend import backend
from statekit.errors import NotFoundError
from statekit.state.constants import execution, executions, of_torch, of_xla, variant_constants
from statekit.verify.natives import CLASSES
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Subject, replay

RECORDINGS = Path(__file__).parent / "cases" / "gpu_recordings"
"""Made on an NVIDIA H200: torch 2.11.0+cu130, and Optax 0.2.8 with JAX 0.11.2, under jit."""
RAN = {
    "optax_adafactor/gpu_adafactor_bf16_momentum": ("gpu", "compiled"),
    "optax_adafactor/gpu_adamw_bf16mu": ("gpu", "compiled"),
    "torch_adafactor/cuda_adafactor_bf16": ("cuda", "op_by_op"),
    "torch_adafactor/cuda_adamw_capturable": ("cuda_capturable", "op_by_op"),
    "torch_adafactor/cuda_adamw_fused": ("cuda_fused", "compiled"),
    "torch_adafactor/cuda_adamw_fused_bf16": ("cuda_fused", "compiled"),
}
"""Recording -> how it ran, and how its like runs on a CPU."""


def replayed(name: str, xp: str, ran: str | None = None) -> Replay:
    with open_recording(RECORDINGS / name) as recording:
        trajectories = tuple(replace(one, execution=ran or one.execution) for one in recording.trajectories)
        return replay(Subject(replace(recording, trajectories=trajectories)), backend(xp))


@pytest.mark.sampled
@pytest.mark.parametrize("xp", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("name", RAN)
def test_what_ran_on_a_gpu_is_within_its_bound(name: str, xp: str) -> None:
    result = replayed(name, xp)
    assert result.passed
    assert [judged.trajectory.execution for judged in result.judged] == [RAN[name][0]]


@pytest.mark.jax
@pytest.mark.parametrize("name", [name for name in RAN if name.startswith("optax")])
def test_jax_follows_what_xla_compiles_for_a_gpu(name: str) -> None:
    assert replayed(name, "jax").passed


@pytest.mark.parametrize("name", RAN)
def test_the_bound_of_a_cpu_is_another(name: str) -> None:
    assert not replayed(name, "numpy", RAN[name][1]).passed


def test_device_and_kernel_choose_the_execution() -> None:
    assert of_torch("cpu") == "op_by_op"
    assert of_torch("cpu", fused=True) == "compiled"
    assert of_torch("cuda") == "cuda"
    assert of_torch("cuda", fused=True, capturable=True) == "cuda_fused"
    assert of_torch("cuda", capturable=True) == "cuda_capturable"
    assert [of_xla("cpu"), of_xla("gpu"), of_xla("gpu", is_compiled=False)] == ["compiled", "gpu", "op_by_op"]


def test_an_execution_changes_forms_of_its_own_variants_alone() -> None:
    usual, fused = (dict(variant_constants("adamw", "torch", ran)) for ran in (None, "cuda_fused"))
    changed = {name for name in usual if usual[name] != fused[name]}
    assert changed == {"first_moment_update", "second_moment_update"}
    assert variant_constants("adamw", "keras", "cuda_fused") == variant_constants("adamw", "keras")
    assert {ran.rounds for ran in executions().values()} == {"op_by_op", "compiled"}


@pytest.mark.jax
def test_verify_takes_and_names_the_execution_of_the_device_that_jax_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    optax, torch = CLASSES["optax", "adamw", "optax"], CLASSES["torch-optim", "adamw", "torch"]
    assert [made.execution for made in (optax, torch)] == [None, None]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert [made.execution for made in (optax, torch)] == ["gpu", None]
    assert "as gpu: compiled by XLA for a GPU" in optax.title


def test_an_unknown_execution_is_refused_by_name() -> None:
    with pytest.raises(NotFoundError, match="cuda_fused"):
        execution("cuda_fast")
