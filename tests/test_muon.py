"""Muon's step against recordings of the originals, each of them with what moves the rest of the model."""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import statekit
import statekit.errors
from statekit.arrays.backend import backend
from statekit.cli.main import main
from statekit.conversion.open_state import open_state
from statekit.conversion.rule_change import change_rule
from statekit.converters.layouts.keras import muon as keras_muon
from statekit.state.exactness import Exactness
from statekit.state.schema import load_schema
from statekit.testing.step_cases import case
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Subject, replay

RECORDINGS = Path(__file__).parent / "cases" / "muon_recordings"
NAMES = sorted(folder.name for folder in RECORDINGS.iterdir())


def replayed(name: str, framework: str = "numpy", changes: Mapping[str, Any] | None = None) -> Replay:
    with open_recording(RECORDINGS / name) as recording:
        return replay(Subject(recording, "init", changes=changes), backend(framework))


@pytest.mark.parametrize("name", [name for name in NAMES if "bf16" not in name])
def test_every_update_is_the_originals(name: str) -> None:
    result = replayed(name)
    assert result.passed
    assert any(row.tensor == "m" for judged in result.judged for row in judged.rows)
    rows = [row for judged in result.judged for row in judged.rows if row.tensor == "param"]
    beyond = [row for row in rows if row.relative > 1e-5 and row.ulps > 4]
    assert len(beyond) < len(rows) / 10  # of the update; a sum beside a rounding's edge moves more


def test_a_model_of_low_precision_takes_the_originals_steps() -> None:
    """Momenta of bfloat16 may round either way, in some elements twice: the bound tries all of them."""
    assert replayed("keller_aux_adam_bf16").passed


@pytest.mark.torch
def test_pytorch_takes_the_same_steps() -> None:
    assert replayed("torch_list", "torch").passed


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax", "tensorflow"])
@pytest.mark.parametrize("name", [name for name in NAMES if "bf16" not in name])
def test_every_framework_takes_the_same_steps(name: str, framework: str) -> None:
    assert replayed(name, framework).passed


@pytest.mark.parametrize(
    ("source", "target", "factor"),
    [("moonlight", "torch", 0.05), ("torch", "keras", 20.0), ("torch", "keller", None)],
)
def test_a_buffer_that_is_a_sum_becomes_the_mean_that_the_target_keeps(
    source: str, target: str, factor: float | None
) -> None:
    state = case("muon", source).before(2)
    changed = change_rule(state, source, target)
    for path, slots in changed.state.slots.items():
        old = state.slots[path]["m"].read()
        np.testing.assert_allclose(
            slots["m"].read(), old if factor is None else old * np.float32(factor), rtol=1e-6
        )
    kinds = {one.what: one.exactness for one in changed.differences}
    assert kinds.get("momentum_buffer") == (None if factor is None else Exactness.ROUNDING)


def test_a_scale_by_shape_needs_outputs_where_the_target_looks_for_them() -> None:
    state = replace(case("muon", "torch").before(2), rules={})
    changed = change_rule(state, "torch", "optax")
    assert any(
        one.what.startswith("orientation of") and one.exactness > Exactness.ROUNDING
        for one in changed.differences
    )
    either_way = change_rule(state.with_hyperparameters(shape_scale="match_rms"), "torch", "optax")
    assert not any(one.what.startswith("orientation") for one in either_way.differences)


def test_a_coarse_rounding_says_how_large_it_was() -> None:
    differences = change_rule(case("muon", "torch").state, "torch", "keller").differences
    assert any("2.9e-2 to 3.5e-2 of the movement" in str(one) for one in differences)


@pytest.mark.parametrize(
    "wrong", [{"nesterov": False}, {"ns_steps": 4}, {"shape_scale": "match_rms"}, {"momentum": 0.9}]
)
def test_another_rule_is_noticed(wrong: dict[str, Any]) -> None:
    with open_recording(RECORDINGS / "torch_list") as recording:
        subject = Subject(recording, "init", changes={f"muon/{key}": value for key, value in wrong.items()})
        passed = replay(subject, backend("numpy")).passed
    assert not passed


def test_one_argument_says_what_two_hyperparameters_are() -> None:
    schema = load_schema("muon")
    both = {"shape_scale": "match_rms", "scale_factor": 0.2}
    assert schema.canonical("torch", {"adjust_lr_fn": "match_rms_adamw"}) == both
    assert schema.native("torch", both) == {"adjust_lr_fn": "match_rms_adamw"}
    assert schema.native("optax", both) == {"consistent_rms": 0.2}
    assert schema.canonical("keras", {"rms_rate": None}) == {"shape_scale": "none", "scale_factor": 1.0}


SHAPES = (
    "torch_list",
    "torch_groups_flatkeys",
    "torch_dcp",
    "torch_dcp_flattened",
    "keller_aux_adam",
    "moonlight",
)


def checkpoint_of(name: str) -> Path:
    folder = RECORDINGS / name / "checkpoint"
    names = ("dcp", "checkpoint.pt", "ckpt", "run", "model.keras", "state")
    return next((folder / name for name in names if (folder / name).exists()), folder)


@pytest.mark.parametrize("name", [name for name in NAMES if name in SHAPES])
def test_a_file_there_and_back_holds_the_same_run(name: str, tmp_path: Path) -> None:
    source = checkpoint_of(name)
    statekit.convert(source, tmp_path / "there.pt")
    with open_state(source) as left, open_state(tmp_path / "there.pt") as right:
        assert right.layout == ("torch-fqn-flat" if name.endswith("flattened") else "torch-optim")
        assert right.state.optimizer.kinds == left.state.optimizer.kinds
        assert [g.hyperparameters for g in right.state.optimizer.groups] == [
            g.hyperparameters for g in left.state.optimizer.groups
        ]
        assert right.state.slots.keys() == left.state.slots.keys()
        for path, slots in left.state.slots.items():
            assert {slot: t.read().tobytes() for slot, t in slots.items()} == {
                slot: t.read().tobytes() for slot, t in right.state.slots[path].items()
            }


@pytest.mark.parametrize("name", ["keller_aux_adam", "moonlight"])
@pytest.mark.torch
def test_a_class_of_two_rules_is_saved_as_it_was(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    statekit.convert(checkpoint_of(name), tmp_path / "there.pt")
    old, new = (
        torch.load(file, weights_only=True)["optimizer"]
        for file in (checkpoint_of(name), tmp_path / "there.pt")
    )
    for group in new["param_groups"]:
        del group["param_names"]
    assert new["param_groups"] == old["param_groups"]
    assert list(new["state"]) == list(old["state"])
    for index, record in old["state"].items():
        written = new["state"][index]
        assert written.keys() == record.keys()
        for key, value in record.items():
            same = torch.equal(written[key], value) if torch.is_tensor(value) else written[key] == value
            assert same and type(written[key]) is type(value)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["torch-fqn", "torch-fqn-flat"])
def test_pytorch_loads_both_gathered_by_name(layout: str, tmp_path: Path) -> None:
    """Through torch.distributed.checkpoint, into a model and two optimizers that have made other steps."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import state_dict as gathering

    source = checkpoint_of("torch_dcp" if layout == "torch-fqn" else "torch_dcp_flattened")
    statekit.convert(source, tmp_path / "there", to="dcp", layout=layout)
    meta = json.loads((source.parents[1] / "meta.json").read_text())

    model = torch.nn.Module()
    for path, spec in meta["params"].items():
        *above, name = meta["extra"]["fqn"][path].split(".")
        module = model
        for part in above:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(name, torch.nn.Parameter(torch.zeros(spec["shape"])))
    params = dict(model.named_parameters())
    optimizers = [
        kind([params[name] for name in entry["param_groups"][0]["params"]])
        for kind, entry in zip(
            (torch.optim.Muon, torch.optim.AdamW), meta["extra"]["optimizers"], strict=True
        )
    ]
    options = gathering.StateDictOptions(flatten_optimizer_state_dict=layout == "torch-fqn-flat")
    weights, state = gathering.get_state_dict(model, optimizers, options=options)
    target = {"model": weights, "optim" if layout == "torch-fqn" else "optimizer": state}
    torch.distributed.checkpoint.load(target, checkpoint_id=tmp_path / "there")
    gathering.set_state_dict(
        model, optimizers, model_state_dict=weights, optim_state_dict=state, options=options
    )
    states = load_file(source.parents[1] / "trajectory.safetensors")
    kept = {id(param): record for optimizer in optimizers for param, record in optimizer.state.items()}
    for path, name in meta["extra"]["fqn"].items():
        assert np.array_equal(
            params[name].detach().numpy(), states[f"{meta['checkpoint_step']}/param/{path}"]
        )
        for slot, value in (
            optimizers[0].state.get(params[name], optimizers[1].state.get(params[name], {})).items()
        ):
            recorded = states[f"{meta['checkpoint_step']}/slot/{path}/{slot}"]
            assert np.array_equal(np.asarray(value), recorded)
    assert (
        kept
        and optimizers[0].param_groups[0]["lr"] == meta["extra"]["optimizers"][0]["param_groups"][0]["lr"]
    )


@pytest.mark.slow
def test_optax_goes_on_from_pytorchs_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without nesterov and with a scale that both sides of a matrix share, only bfloat16 parts the two."""
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    folder = RECORDINGS / "torch_dict_rms"
    meta = json.loads((folder / "meta.json").read_text())
    statekit.convert(folder / "checkpoint" / "checkpoint.pt", tmp_path / "run", to="orbax", layout="optax")
    assert main(["resume", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out.partition("\n\n")[0]
    rates = {i: np.asarray([row[i] for row in meta["learning_rate"]], np.float32) for i in (0, 1)}
    with open_state(tmp_path / "run") as opened:
        params: dict[str, Any] = {}
        for path, tensor in opened.state.params.items():
            node = params
            for key in path.split("/")[:-1]:
                node = node.setdefault(key, {})
            node[path.split("/")[-1]] = jax.numpy.asarray(tensor.read())
    scope: dict[str, Any] = {"params": params}
    for name, i in (("schedule_muon", 0), ("schedule_adam", 1)):
        scope[name] = lambda count, i=i: jax.numpy.asarray(rates[i])[count]
    exec(printed, scope)  # the lines that statekit prints of its own target
    params, state, optimizer = scope["state"]["params"], scope["state"]["opt_state"], scope["optimizer"]
    grads = load_file(folder / "grads.safetensors")
    for step in range(meta["checkpoint_step"] + 1, meta["steps"] + 1):
        given = jax.tree_util.tree_map_with_path(
            lambda keys, _, step=step: grads[
                f"{step}/" + jax.tree_util.keystr(keys, simple=True, separator="/")
            ],
            params,
        )
        updates, state = optimizer.update(given, state, params)
        params = optax.apply_updates(params, updates)
    states = load_file(folder / "trajectory.safetensors")
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        first, last = (states[f"{step}/param/{path}"] for step in (meta["checkpoint_step"], meta["steps"]))
        moved = np.abs(last - first).max()
        assert (
            np.abs(np.asarray(leaf) - last).max()
            < (0.05 if path in meta["extra"]["muon_params"] else 1e-3) * moved
        )


def test_a_run_of_optax_is_written_as_it_was(tmp_path: Path) -> None:
    for name in ("optax_default_standard", "optax_dims_schedule_manager"):
        statekit.convert(checkpoint_of(name), tmp_path / name, to="orbax", layout="optax")
        assert not statekit.diff(checkpoint_of(name), tmp_path / name).differences
        with open_state(tmp_path / name) as opened:
            assert set(opened.state.optimizer.kinds) == {("muon", "optax"), ("adamw", "optax")}


@pytest.mark.torch
def test_the_original_goes_on_from_what_was_written_as_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    statekit.convert(checkpoint_of("torch_list"), tmp_path / "there.pt")
    file = torch.load(tmp_path / "there.pt", weights_only=True)
    meta = json.loads((RECORDINGS / "torch_list" / "meta.json").read_text())
    grads = load_file(RECORDINGS / "torch_list" / "grads.safetensors")
    states = load_file(RECORDINGS / "torch_list" / "trajectory.safetensors")
    params = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in file["model"].items()}
    optimizers = []
    for kind, entry, saved in zip(
        (torch.optim.Muon, torch.optim.AdamW), meta["extra"]["optimizers"], file["optimizers"], strict=True
    ):
        optimizers.append(kind([params[name] for name in entry["param_groups"][0]["params"]]))
        optimizers[-1].load_state_dict(saved)
    for step in range(meta["checkpoint_step"] + 1, meta["steps"] + 1):
        for path, name in meta["extra"]["fqn"].items():
            params[name].grad = torch.from_numpy(grads[f"{step}/{path}"].copy())
        for optimizer in optimizers:
            optimizer.step()
    for path, name in meta["extra"]["fqn"].items():
        assert np.array_equal(params[name].detach().numpy(), states[f"{meta['steps']}/param/{path}"])


def test_the_printed_lines_make_both_optimizers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(checkpoint_of("torch_list"))]) == 0
    printed = capsys.readouterr().out
    assert "torch.optim.Muon([groups[0]], lr=0.02)" in printed
    assert "torch.optim.AdamW([groups[1]]" in printed


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("adam_weight_decay", [1]),
        ("adam_weight_decay", 10**400),
        ("adam_lr_ratio", 1e-320),
        ("muon_b", "x"),
        ("ns_steps", 2**63),
    ],
    ids=["list", "huge", "tiny ratio", "text", "endless steps"],
)
def test_an_odd_argument_of_keras_muon_is_no_crash(
    argument: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(RECORDINGS / "keras_muon_default/checkpoint/model.keras") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(members["config.json"])
    config["compile_config"]["optimizer"]["config"][argument] = value
    members["config.json"] = json.dumps(config).encode()
    with zipfile.ZipFile(tmp_path / "model.keras", "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    for verb in ("inspect", "resume", "cold-start"):
        main([verb, str(tmp_path / "model.keras")])
        assert "itself has failed" not in capsys.readouterr().err


def test_layers_of_keras_muon_are_named_in_time_that_grows_with_their_number() -> None:
    paths = [[f"net/l{i}/{part}/kernel" for i in range(20_000)] for part in ("matrix", "rest")]
    began = time.process_time()
    named = keras_muon.arguments([(keras_muon.MATRICES, {}, paths[0]), (keras_muon.REST, {}, paths[1])])
    assert named["exclude_layers"][7] == "(^|/)rest/kernel$"
    assert time.process_time() - began < 10  # 90 seconds where each was held against each
