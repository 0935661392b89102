"""An optimizer without a step is one signature: it gives the name, and nothing else needs to know the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from goldens import COMPACT
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import decoded
from statekit.converters.layouts.keras import native as keras_native
from statekit.converters.layouts.keras.layout import LAYOUT as KERAS
from statekit.converters.layouts.optax.kinds import STRANGERS, Stranger
from statekit.converters.layouts.optax.optax_native import LAYOUT as OPTAX
from statekit.converters.layouts.pytorch import contents
from statekit.converters.layouts.pytorch.contents import Signature, signature_of
from statekit.converters.layouts.pytorch.parts import Parts
from statekit.converters.layouts.pytorch.torch_optim import LAYOUT as TORCH
from statekit.errors import UsageError
from statekit.files.checkpoint import ATTRIBUTES, Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Tensor, in_memory

CASES = Path(__file__).parent / "cases" / "foreign"


def tensor(*shape: int) -> Tensor:
    return in_memory(np.ones(shape, np.float32))


def whole(number: int) -> Tensor:
    return in_memory(np.asarray(number, np.int64))


def of_torch() -> TrainState:
    groups = [{"tempo": 0.5, "params": [0]}]
    tree = {
        "model": {"w": tensor(2, 3)},
        "optimizer": {"state": {0: {"tide": tensor(2, 3)}}, "param_groups": groups},
    }
    return decoded(TORCH, Checkpoint("torch", Path("run.pt"), tree), CheckpointRef())


def of_optax() -> TrainState:
    tree = {"params": {"w": tensor(2, 3)}, "opt_state": [{"count": whole(3), "tide": {"w": tensor(2, 3)}}]}
    return decoded(OPTAX, Checkpoint("orbax", Path("run"), tree), CheckpointRef())


def of_keras() -> TrainState:
    rows = {"0": whole(3), "1": in_memory(np.asarray(0.5, np.float32)), "2": tensor(2, 3), "3": tensor(2, 3)}
    variables: dict[str, Any] = {ATTRIBUTES: {"name": "moon"}, **rows}
    tree = {"w": {"vars": {"0": tensor(2, 3)}}, "optimizer": {"vars": variables}}
    return decoded(
        KERAS, Checkpoint("keras-h5", Path("run.weights.h5"), tree), CheckpointRef(optimizer="Moon")
    )


def test_a_signature_names_an_optimizer_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_torch().optimizer.kinds == (("torch_native", None),)
    known = (*contents.signatures(), Signature("Moon", slots=("tide",), options=("tempo",)))
    monkeypatch.setattr(contents, "signatures", lambda: known)
    assert of_torch().optimizer.kinds == (("torch_native", "Moon"),)


def test_a_signature_names_an_optimizer_of_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    state = of_optax()
    assert state.optimizer.kinds == (("optax_native", None),) and [*state.slots["w"]] == ["tide"]
    monkeypatch.setitem(STRANGERS, frozenset({"count", "tide"}), Stranger("Moon", ("tide",)))
    assert of_optax().optimizer.kinds == (("optax_native", "Moon"),)


def test_a_signature_names_an_optimizer_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"Moon": {"name": "moon", "slots": [{"names": ["tide", "ebb"]}], "lists": {"tide": "_tides"}}}
    monkeypatch.setattr(keras_native, "_known", lambda: known)
    state = of_keras()
    assert state.optimizer.kinds == (("keras_native", "Moon"),)
    assert {path: [*slots] for path, slots in state.slots.items()} == {"w/0": ["tide", "ebb"]}


def test_a_user_gives_a_name_that_the_structure_may_have() -> None:
    source = CASES / "lion_pytorch" / "checkpoint.pt"
    with open_state(source, hints=CheckpointRef(optimizer="lion")) as opened:
        assert opened.groups[0].facts[-1].value == "lion"
    with pytest.raises(UsageError, match="radam"):
        open_state(source, hints=CheckpointRef(optimizer="radam"))
    tree = {"params": {"w": tensor(2, 3)}, "opt_state": [{"tide": {"w": tensor(2, 3)}}]}
    nameless = Checkpoint("orbax", Path("run"), tree)
    named = decoded(OPTAX, nameless, CheckpointRef(optimizer="moon"))
    assert named.optimizer.kinds == (("optax_native", "moon"),)
    with pytest.raises(UsageError, match="an optimizer that has no schema"):
        decoded(OPTAX, nameless, CheckpointRef(optimizer="adamw"))


OF_TIMM = {
    "Lookahead of timm around another optimizer": (
        "exp_avg exp_avg_sq",
        "betas eps amsgrad maximize fused decoupled_weight_decay lookahead_alpha lookahead_k lookahead_step",
    ),
    "Adafactor of timm": (
        "RMS exp_avg_sq",
        "eps eps_scale clip_threshold decay_rate beta1 scale_parameter relative_step warmup_init caution",
    ),
    "AdafactorBigVision of timm": (
        "exp_avg exp_avg_sq",
        "min_dim_size_to_factor decay_rate decay_offset beta2_cap momentum momentum_dtype eps unscaled_wd caution",
    ),
    "LARS or LARC of timm": (
        "momentum_buffer",
        "momentum dampening nesterov trust_coeff eps trust_clip always_adapt",
    ),
    "LAMB of timm": (
        "exp_avg exp_avg_sq",
        "bias_correction betas eps grad_averaging max_grad_norm trust_clip always_adapt caution foreach step",
    ),
    "NovoGrad of timm": ("exp_avg exp_avg_sq", "betas eps grad_averaging amsgrad decoupled_decay"),
    "AdamP of timm": ("exp_avg exp_avg_sq", "betas eps delta wd_ratio nesterov caution"),
    "ADOPT of timm": ("exp_avg exp_avg_sq", "betas eps clip_exp decoupled caution corrected_weight_decay"),
    "NAdamW of timm": ("exp_avg exp_avg_sq", "betas eps caution clipping_threshold corrected_weight_decay"),
    "AdamW of timm": ("exp_avg exp_avg_sq", "betas eps amsgrad caution clipping_threshold maximize foreach"),
    "SGDW of timm": ("momentum_buffer", "momentum dampening nesterov caution corrected_weight_decay"),
    "Lion": ("exp_avg", "betas caution corrected_weight_decay"),
    "torch Adam or AdamW": (
        "exp_avg exp_avg_sq",
        "betas eps amsgrad maximize lr_scale initial_lr group_name",
    ),
}
"""Name -> slots, and options of its groups beside lr and weight_decay: those of timm 1.0.31, made with the library."""


@pytest.mark.parametrize("name", OF_TIMM)
def test_options_that_change_an_update_are_no_other_optimizers(name: str) -> None:
    """Seen red: Lookahead's AdamW was AdamW, timm's LARS torch's SGD, its LAMB Fira, its Adafactor Hugging Face's."""
    slots, options = (text.split() for text in OF_TIMM[name])
    group = {"params": [0], **dict.fromkeys([*options, "lr", "weight_decay"], 0.0)}
    record = {slot: tensor(2, 3) for slot in slots}
    parts = Parts(
        model={"w": tensor(2, 3)}, groups=[group], state={0: record}, form="index", places=((), ()), rest={}
    )
    signature = signature_of(parts)
    assert signature is not None and signature.name == name
    assert (signature.schema is None) == (name != "torch Adam or AdamW")


def test_options_of_nobody_are_no_adam_although_its_slots_are() -> None:
    """Seen red: without `betas` a state of Adam's slots was Adam's, whose decay and epsilon were unknown."""
    group = {"tempo": 0.5, "beta1": 0.9, "lr": 0.1, "params": [0]}
    tree = {
        "model": {"w": tensor(2, 3)},
        "optimizer": {
            "state": {0: {"exp_avg": tensor(2, 3), "exp_avg_sq": tensor(2, 3)}},
            "param_groups": [group],
        },
    }
    state = decoded(TORCH, Checkpoint("torch", Path("run.pt"), tree), CheckpointRef())
    assert state.optimizer.kinds == (("torch_native", None),)


@pytest.mark.parametrize(("option", "name"), [("zeta", None), ("lr_scale", "torch Adamax")])
def test_before_its_first_update_an_optimizer_is_told_by_all_of_its_options(
    option: str, name: str | None
) -> None:
    """Seen red: without slots, whatever had `betas` was called torch's Adamax."""
    group = {"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, option: 0.5}
    model = {"w": tensor(2, 3)}
    parts = Parts(model=model, groups=[group], state={}, form="index", places=((), ()), rest={})
    signature = signature_of(parts)
    assert (signature.name if signature else None) == name


def test_scaled_adam_is_told_before_its_first_update(tmp_path: Path) -> None:
    """Seen red: a run of icefall that had made no update was called torch's Adamax."""
    checkpoint = torch.load(
        COMPACT / "scaled_adam/zipformer2025_bf16/checkpoint/checkpoint-4.pt", weights_only=False
    )
    optimizer = checkpoint["optimizer"]
    group = {**optimizer["param_groups"][0], "params": [*range(len(checkpoint["model"]))]}
    torch.save(
        {"model": checkpoint["model"], "optimizer": {"state": {}, "param_groups": [group]}},
        tmp_path / "run.pt",
    )
    with open_state(tmp_path / "run.pt") as opened:
        state = opened.state
    assert (state.optimizer.schema, state.counts.updates) == ("scaled_adam", 0)
    assert list(state.params) == [name.replace(".", "/") for name in checkpoint["model"]]
    assert not any(state.slots.values())


@pytest.mark.parametrize(
    ("chain", "name"),
    [
        ([None, None], "SGD without momentum, or sign SGD"),
        ([None, None, None], "Fromage, or another chain of three links without slots"),
        ([None, {"count": 3}, {"count": 3}], "Fromage, or another chain with two schedules"),
        ([[None, None], None], "Polyak SGD, or another chain without slots"),
        ([None, [None, None]], None),
    ],
)
def test_a_chain_without_slots_is_named_by_those_that_make_it(chain: list[Any], name: str | None) -> None:
    """Seen red: Fromage was an optimizer of Optax without a name."""
    counts = [{"count": whole(link["count"])} if isinstance(link, dict) else link for link in chain]
    tree = {"params": {"w": tensor(2, 3)}, "opt_state": counts}
    state = decoded(OPTAX, Checkpoint("orbax", Path("run"), tree), CheckpointRef())
    assert state.optimizer.variant == name
