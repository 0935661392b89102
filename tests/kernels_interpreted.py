"""Generated kernels on a CPU, through Triton's interpreter; test_torch_kernels.py runs this in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gpu_checks
import numpy as np
import pytest
import torch
from kernel_judging import NeverWaits, judged, outside
from test_torch_fast import NAMES, RATE, SETTINGS, about_as_large, poisoned, tried

import statekit.torch
from statekit.errors import UsageError
from statekit.torch.kernels import grouped
from statekit.torch.kernels.grouped import GroupedMove

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what a GPU does in silence
SHAPES = ((30, 20), (30, 20), (17, 13), (128, 129), (77,), ())
LOW = [
    ("AdamW", torch.bfloat16),
    ("LAMB", torch.bfloat16),
    ("Adafactor", torch.bfloat16),
    ("ScaledAdam", torch.bfloat16),
    ("LANS", torch.bfloat16),
    ("LANS", torch.float16),
]
FULL = [(kind, torch.float32) for kind in gpu_checks.CLASSES]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_checks, "SHAPES", SHAPES)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("schema", "variant", "changes"), SETTINGS, ids=NAMES)
def test_every_element_is_within_the_bound_of_the_text(
    schema: str, variant: str, changes: Mapping[str, Any]
) -> None:
    count, left = judged(schema, variant, changes)
    assert count > 0
    assert left == []


@pytest.mark.parametrize(
    ("schema", "variant", "changes"),
    [
        ("adamw", "torch", {"amsgrad": True, "weight_decay_rate": 0.4}),
        *(
            pytest.param(*setting, marks=pytest.mark.slow)
            for setting in (
                ("adamw", "torch", {"amsgrad": True, "maximize": True}),
                ("adamw", "keras", {"amsgrad": True}),
                ("adamw", "optax", {"nesterov": True}),
                ("adafactor", "torch", {}),
                ("adafactor", "t2t_late", {"beta1": 0.9}),
                ("lans", "apex_fused", {}),
            )
        ),
    ],
)
def test_options_and_variants_that_fast_paths_of_a_cpu_are_not_tried_with(
    schema: str, variant: str, changes: Mapping[str, Any]
) -> None:
    count, left = judged(schema, variant, changes)
    assert count > 0
    assert left == []


@pytest.mark.parametrize("schema", ["adafactor", "adamw", "lamb", "lans", "scaled_adam"])
def test_what_overflows_or_is_no_number_goes_where_the_text_has_it(schema: str) -> None:
    variant, changes = next((variant, changes) for name, variant, changes in SETTINGS if name == schema)
    for change in ((about_as_large, 3e19), (poisoned, np.nan), (poisoned, -np.inf)):
        assert judged(schema, variant, changes, *change)[1] == []


@pytest.mark.parametrize("schema", ["adafactor", "adamw", "lamb", "lans", "scaled_adam"])
def test_a_rate_that_is_off_by_a_thousandth_is_noticed(schema: str) -> None:
    variant, changes = next((variant, changes) for name, variant, changes in SETTINGS if name == schema)
    assert outside(tried(schema, variant, changes), rate=RATE * 1.001)[1]


@pytest.mark.parametrize(
    ("variant", "changes"),
    [(variant, changes) for name, variant, changes in SETTINGS if name == "adafactor"][:3],
)
def test_a_block_takes_several_tiles(
    variant: str, changes: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "MANY_BLOCKS", 0)
    monkeypatch.setattr(grouped, "TILES", {2: (16, 32), 4: (16, 32)})
    monkeypatch.setattr(grouped, "TILES_OF_BLOCK", 2)
    count, left = judged("adafactor", variant, changes)
    assert count > 0
    assert left == []


def test_tiles_are_joined_as_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "SHAPES", ((128, 129),))
    gpu_checks.many_tiles(torch.bfloat16)


@pytest.mark.parametrize(("kind", "dtype"), LOW)
def test_low_precision_has_the_digits_of_the_text(kind: str, dtype: torch.dtype) -> None:
    gpu_checks.like_the_text(kind, dtype)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_a_gradient_scaler_leaves_scaling_and_skipping_to_the_kernels(kind: str) -> None:
    gpu_checks.scaled(kind, torch.float32)


@pytest.mark.parametrize("kind", ["Adafactor", "LANS"])
def test_two_runs_have_the_same_bits(kind: str) -> None:
    gpu_checks.same_bits(kind, torch.float32)


@pytest.mark.parametrize(("kind", "dtype"), FULL)
def test_an_update_reads_nothing_back(kind: str, dtype: torch.dtype) -> None:
    made = gpu_checks.optimizer(kind, dtype, "cpu")
    for step in range(2):
        gpu_checks.give(made, step)
        with NeverWaits():  # type: ignore[no-untyped-call]  # its base is untyped
            made.step()
    assert made._direct


def test_the_device_is_told_anew_only_where_memory_has_moved() -> None:
    made = gpu_checks.optimizer("LAMB", torch.float32, "cpu")
    for step in range(4):
        gpu_checks.give(made, step)
        made.step()
    launches = [batch.launches for batch in made._direct[0].batches]
    built = [one.built for one in launches]
    for param in gpu_checks.params_of(made):
        param.grad = None if param.grad is None else param.grad.clone()
    made.step()
    made.step()
    assert [one.built for one in launches] == [count + 1 for count in built]


def test_no_block_has_a_single_element() -> None:
    made = gpu_checks.optimizer("ScaledAdam", torch.bfloat16, "cpu")  # NVIDIA rounds to bfloat16 two by two
    for step in range(2):
        gpu_checks.give(made, step)
        made.step()
    assert min(batch.launches.tile[-1] for batch in made._direct[0].batches) == 2


def test_a_slot_or_a_shape_that_changes_is_noticed() -> None:
    ours, text = (gpu_checks.optimizer("AdamW", torch.float32, "cpu", foreach=way) for way in (True, False))
    for step in range(4):
        for made in (ours, text):
            gpu_checks.give(made, step)
            if step == 2:
                first = gpu_checks.params_of(made)[0]
                made.state[first]["m"] = made.state[first]["m"] * 2.0
            if step == 3:
                gpu_checks.params_of(made)[1].grad = None
                made.param_groups[0]["weight_decay"] = made.param_groups[0]["weight_decay_rate"] = 0.3
            made.step()
    assert gpu_checks.gap(ours, text) < 1e-6


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_gradients_of_another_dtype_are_read_as_they_are(kind: str) -> None:
    ours, text = (gpu_checks.optimizer(kind, torch.bfloat16, "cpu", foreach=way) for way in (True, False))
    for step in range(2):
        for made in (ours, text):
            gpu_checks.give(made, step)
            for param in gpu_checks.params_of(made):
                grad, param.grad, param.grad_dtype = param.grad, None, torch.float32
                assert grad is not None
                param.grad = grad.float() + 1e-4
            made.step()
    assert gpu_checks.gap(ours, text) < 1e-6
    assert ours._direct


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
def test_a_gradient_that_is_transposed_where_it_lies_is_noticed(kind: str) -> None:
    moved = []
    for way in (True, False):
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
        param.grad = torch.randn(8, 8, generator=generator)
        made = getattr(statekit.torch, kind)([("p", param)], lr=1e-2, foreach=way)
        for _ in range(2):
            made.step()
        param.grad = param.grad.t()
        made.step()
        moved.append(param.detach())
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_becomes_sparse_is_refused_by_name() -> None:
    table = torch.nn.Embedding(4, 2)
    made = statekit.torch.AdamW([("w", table.weight)], lr=1e-2)
    for step in range(3):
        table.sparse = step == 2
        table.weight.grad = None
        table(torch.tensor([1])).sum().backward()
        if table.sparse:
            with pytest.raises(UsageError, match="sparse"):
                made.step()
        else:
            made.step()


def test_vectors_of_any_length_go_together() -> None:
    ours, text = (gpu_checks.optimizer("LAMB", torch.float32, "cpu", foreach=way) for way in (True, False))
    for made in (ours, text):
        gpu_checks.give(made, 0)
        made.step()
    assert gpu_checks.gap(ours, text) < 1e-6
    lengths = [batch.launches.contiguous for batch in ours._direct[0].batches]
    assert {77, 221, 600} in lengths


@pytest.mark.parametrize("replace", ["slot", "dict", "memory"])
def test_slots_that_are_replaced_are_read_anew(replace: str) -> None:
    ours, text = (gpu_checks.optimizer("AdamW", torch.float32, "cpu", foreach=way) for way in (True, False))
    for step in range(3):
        for made in (ours, text):
            gpu_checks.give(made, step)
            slots = made.state[gpu_checks.params_of(made)[0]]
            if step == 2 and replace == "dict":
                made.state[gpu_checks.params_of(made)[0]] = {name: slot * 2.0 for name, slot in slots.items()}
            elif step == 2 and replace == "slot":
                slots.update({name: slot * 2.0 for name, slot in slots.items()})
            elif step == 2:
                for param in gpu_checks.params_of(made):
                    for slot in made.state[param].values():
                        slot.data = slot.data * 2.0
            made.step()
    assert gpu_checks.gap(ours, text) < 1e-6


def test_all_of_a_usual_model_goes_by_kernels() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(9, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    for kind in gpu_checks.CLASSES:
        made = getattr(statekit.torch, kind)(model.named_parameters(), lr=1e-3)
        model(torch.ones(3, 9)).sum().backward()
        made.step()
        assert all(isinstance(batch.fast, GroupedMove) for batch in made._plans[0].batches)
