"""What is changed of a run that is loaded straight into a model, and parameters that the checkpoint lacks."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from goldens import COMPACT
from statekit.conversion.changing.at_loading import changed_at_loading
from statekit.conversion.prepared import carried_out
from statekit.errors import CorruptError, StateError, StatekitError, UsageError
from statekit.tensors.tensor import DTYPES, in_memory
from statekit.testing.step_cases import case

RUN = COMPACT / "t5x" / "momentum_f32" / "checkpoint"
TOLD = {"beta1": 0.9, "min_dim_size_to_factor": 8}
F32 = DTYPES["float32"]


def parameters(**more: tuple[int, ...]) -> list[tuple[str, Any]]:
    import torch

    with statekit.open(RUN) as opened:
        shapes = {path.replace("/", "."): param.shape for path, param in opened.params.items()}
    return [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in {**shapes, **more}.items()]


def loaded(named: list[tuple[str, Any]], **changes: Any) -> Any:
    import statekit.torch

    return statekit.torch.load_optimizer(RUN, named, lr=0.01, hparams=TOLD, **changes)


@pytest.mark.torch
def test_slots_begin_anew_and_are_rescaled_as_in_a_conversion(tmp_path: Path) -> None:
    named = parameters()
    usual, changed = loaded(named), loaded(named, slot_policy="reset:m", loss_scale=0.5)
    for _, param in named:
        before, after = usual.state[param], changed.state[param]
        assert not after["m"].any()
        for name in before.keys() & {"v", "v_row", "v_col"}:
            np.testing.assert_array_equal(after[name], before[name] * 0.25)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["slot_policy", "drop_slots_of", "init_missing"])
def test_what_is_no_text_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        UsageError, match=f"is 5, expected text, or a list of it @ --{name.replace('_', '-')}"
    ):
        loaded(parameters(), **{name: 5})


@pytest.mark.torch
def test_frozen_parameters_are_left_out(tmp_path: Path) -> None:
    named = parameters()
    optimizer = loaded(named, drop_slots_of="token_embedder.*")
    moved = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert [name for name, param in named if id(param) not in moved] == ["token_embedder.embedding"]


@pytest.mark.torch
def test_parameters_that_are_new_or_resized_begin_anew_where_they_are_named() -> None:
    import torch

    grown = {"head.kernel": (16, 12), "token_embedder.embedding": (14, 20)}
    named = parameters(**grown)
    with pytest.raises(StateError, match="head"):
        loaded(named)
    with pytest.warns(
        UserWarning, match="slots begin anew, at a count of 4 updates: head.kernel, token_embedder"
    ):
        optimizer = loaded(named, init_missing=["head.*", "token_embedder.embedding"])
    by_name = dict(named)
    for name, (rows, columns) in grown.items():
        slots = optimizer.state[by_name[name]]
        assert (slots["v_row"].shape, slots["v_col"].shape) in (
            ((rows,), (columns,)),
            ((columns,), (rows,)),
        )
        assert not any(slots[one].any() for one in ("v_row", "v_col", "m"))
    for _, param in named:
        param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.torch
def test_what_is_not_missing_is_not_begun_anew() -> None:
    with pytest.raises(UsageError, match="nothing: all are there"):
        loaded(parameters(), init_missing="*")


def test_where_updates_are_counted_apart_a_new_parameter_has_made_none() -> None:
    state = case("adamw", "torch").before(3)
    model = {path: (param.shape, param.dtype) for path, param in state.params.items()}
    with pytest.warns(UserWarning, match="slots begin anew: head"):
        after, rest = changed_at_loading(
            state, {"init_missing": "head", "lr": 1}, {**model, "head": ((3, 2), F32)}
        )
    assert rest == {"lr": 1} and after.counts.behind == {"head": 0}
    assert {name: slot.shape for name, slot in after.slots["head"].items()} == {"m": (3, 2), "v": (3, 2)}
    assert after.optimizer.groups[0].paths[-1] == "head"


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("system", ["keras", "optax"])
def test_gradients_that_wait_for_an_update_are_not_left_behind_in_silence(system: str, waits: bool) -> None:
    state = case("adamw", system).before(3)
    calls = 7 if waits else 6
    if system == "keras":
        state = state.with_hyperparameters(gradient_accumulation_steps=2)
        extra: dict[str, Any] = {"keras": {"iteration": calls}}
    else:
        step = in_memory(np.array(calls % 2, np.int32), "mini_step")
        extra = {"optax": {"links": [{"state": {"mini_step": step}}]}}
    state = replace(state, extra={**state.extra, **extra})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        changed_at_loading(state, {}, {})
    assert ["gradients that wait" in str(one.message) for one in said] == [True] * waits


def test_a_slot_that_begins_with_its_parameters_size_is_asked_for() -> None:
    state = case("scaled_adam", "zip2025").before(3)
    with pytest.raises(UsageError, match=r"begins with rms\(p\)"):
        changed_at_loading(state, {"init_missing": "head"}, {"head": ((3, 2), F32)})


@pytest.mark.jax
def test_jax_takes_the_same() -> None:
    import jax.numpy as jnp

    import statekit.jax

    with statekit.open(RUN) as opened:
        params = {path: jnp.ones(param.shape) for path, param in opened.params.items()}
    _, state = statekit.jax.load_optimizer(
        RUN, params, learning_rate=0.01, hparams=TOLD, slot_policy="reset:m"
    )
    assert all(not np.asarray(one).any() for one in state.m.values())


@pytest.mark.torch
def test_what_had_no_update_yet_begins_in_jax(tmp_path: Path) -> None:
    import jax.numpy as jnp
    import optax
    import torch

    import statekit.jax

    net = torch.nn.ParameterDict({name: torch.ones(3) for name in ("idle", "used")})
    original = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    net["used"].grad = torch.full((3,), 0.5)
    original.step()
    torch.save({"model": net.state_dict(), "optimizer": original.state_dict()}, tmp_path / "run.pt")
    params = {name: jnp.asarray(param.detach().numpy()) for name, param in net.items()}
    optimizer, state = statekit.jax.load_optimizer(tmp_path / "run.pt", params)
    for update in (1.0, 2.0):
        for param in net.values():
            param.grad = torch.full((3,), update)
        original.step()
        grads = {name: jnp.full(3, update) for name in params}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for name, param in net.items():
        np.testing.assert_allclose(params[name], param.detach().numpy(), rtol=1e-6)


@pytest.mark.torch
def test_an_optimizers_state_alone_loads_beside_a_model_that_has_its_weights(tmp_path: Path) -> None:
    import torch

    import statekit.torch

    source = COMPACT / "torch_adafactor" / "adafactor_foreach_eps" / "checkpoint" / "checkpoint.pt"
    report = statekit.convert(source, tmp_path / "alone.pt", state_only=True)
    assert "7 parameters are left behind" in str(report.plan.changed[0])
    assert not [name for name in torch.load(tmp_path / "alone.pt") if name == "model"]
    with statekit.open(source) as opened:
        shapes = {path.replace("/", "."): param.shape for path, param in opened.params.items()}
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()]
    whole = statekit.torch.load_optimizer(source, named)
    alone = statekit.torch.load_optimizer(tmp_path / "alone.pt", named)
    for _, param in named:
        for name, slot in whole.state[param].items():
            assert torch.equal(torch.as_tensor(slot), torch.as_tensor(alone.state[param][name]))


def test_a_target_without_such_a_form_refuses_a_state_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no form of an optimizer's state without"):
        statekit.convert(RUN, tmp_path / "out.pt", state_only=True)
    with pytest.raises(UsageError, match="Without its slots"):
        statekit.convert(RUN, tmp_path / "out.pt", state_only=True, params_only=True)


@pytest.mark.torch
def test_what_the_targets_model_has_besides_comes_from_its_file(tmp_path: Path) -> None:
    import torch

    named = parameters(**{"head.kernel": (16, 12), "token_embedder.embedding": (14, 20)})
    torch.save({name: param.detach() * 3 for name, param in named}, tmp_path / "model.pt")
    report = statekit.convert(RUN, tmp_path / "out.pt", hparams=TOLD, init_missing=tmp_path / "model.pt")
    assert str(report.plan.changed[0]) == (
        "--init-missing: 2 parameters are the model's own, and their slots begin anew, at a count of 4 updates "
        "(token_embedder/embedding, head/kernel)"
    )
    assert report.plan.to_json()["options"]["changes"] == {"init_missing": "model.pt"}
    with statekit.open(tmp_path / "out.pt") as opened:
        assert (opened.params["head/kernel"].read() == 3).all()
        assert opened.params["token_embedder/embedding"].shape == (14, 20)
        assert not any(opened.slots["head/kernel"][name].read().any() for name in ("v_row", "v_col", "m"))
        assert opened.slots["encoder/encoder_norm/scale"]["v"].read().any()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("width", "more", "words"),
    [
        (5, [], ""),
        (6, [], "buffer of shape .6,., in the run .5,. @ .*1/running_mean"),
        (5, [3], "int64: a buffer"),
    ],
)
def test_buffers_of_the_targets_model_are_no_parameters(
    tmp_path: Path, width: int, more: list[int], words: str
) -> None:
    """A state_dict has both: those of the run stay, those that it lacks are refused by name."""
    import torch
    from torch.nn import BatchNorm1d, Linear, Sequential

    model = Sequential(Linear(4, 5), BatchNorm1d(5), Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.arange(32.0).reshape(8, 4).sin()).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    head = [Linear(2, 3), *map(BatchNorm1d, more)]
    new = Sequential(Linear(4, width), BatchNorm1d(width), Linear(width, 2), *head)
    torch.save(new.state_dict(), tmp_path / "model.pt")
    names = [name for name, _ in model.named_parameters()]

    def converted() -> Any:
        beside = tmp_path / "model.pt"
        return statekit.convert(
            tmp_path / "run.pt", tmp_path / "out.pt", init_missing=beside, param_names=names
        )

    if words:
        with pytest.raises(UsageError, match=f"(?s)Buffers can't begin anew.*{words}"):
            converted()
        return
    assert "2 parameters are the model's own" in str(converted().plan.changed[0])
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    torch.optim.AdamW(new.parameters()).load_state_dict(out["optimizer"])
    new.load_state_dict(out["model"])
    assert torch.equal(new.state_dict()["1.running_mean"], model.state_dict()["1.running_mean"])


def with_head(tmp_path: Path) -> Path:
    """Saves a model that has one parameter more than the run, with a manifest beside it."""
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({name: param.detach() * 3 for name, param in parameters(**{"head.kernel": (16, 12)})}, path)
    statekit.seal(path)
    return path


@pytest.mark.torch
def test_the_file_of_the_targets_model_is_proven_and_stands_in_the_lineage(tmp_path: Path) -> None:
    model = with_head(tmp_path)
    statekit.convert(RUN, tmp_path / "out.pt", hparams=TOLD, init_missing=model)
    alone = statekit.convert(model, tmp_path / "alone.pt")
    with statekit.open(tmp_path / "out.pt") as opened:
        manifest = opened.checkpoint.manifest
        assert manifest is not None
        (entry,) = manifest["beside"]
        assert entry == {
            "name": "model.safetensors",
            "container": "safetensors",
            "layout": "torch-weights",
            "step": None,
            "digest": alone.source_digest,
        }
    data = bytearray(model.read_bytes())
    at = data.index(np.float32(3).tobytes() * 16)
    data[at] ^= 1
    model.write_bytes(data)
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        statekit.convert(RUN, tmp_path / "other.pt", hparams=TOLD, init_missing=model)
    assert not (tmp_path / "other.pt").exists()
    statekit.convert(RUN, tmp_path / "other.pt", hparams=TOLD, init_missing=model, accept_damaged=True)
    with statekit.open(tmp_path / "other.pt") as opened:
        assert opened.checkpoint.manifest is not None and opened.checkpoint.manifest["damage"]


@pytest.mark.torch
def test_the_file_of_the_targets_model_is_part_of_the_job_and_told_what_it_needs(tmp_path: Path) -> None:
    import torch

    model = with_head(tmp_path)
    planned = statekit.plan(RUN, tmp_path / "out.pt", hparams=TOLD, init_missing=model)
    with carried_out(planned) as prepared:
        (beside,) = prepared.beside
        assert beside.budget is prepared.opened.budget and model in prepared.files
    two = tmp_path / "two.pt"
    weights = {name: param.detach() for name, param in parameters(**{"head.kernel": (16, 12)})}
    torch.save({"ours": {"net": weights}, "theirs": {"net": weights}}, two)
    with pytest.raises(StatekitError, match="ours/net or theirs/net: --model-key says which"):
        statekit.plan(RUN, tmp_path / "out.pt", hparams=TOLD, init_missing=two)
    asked: dict[str, Any] = {"init_missing": two, "model_key": "ours/net"}
    assert statekit.plan(RUN, tmp_path / "out.pt", hparams=TOLD, **asked).changed
