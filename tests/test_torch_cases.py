"""Files of PyTorch of the shapes that people report: what each is, with the right values, and what is open."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import statekit
from statekit.attestation.doctor import doctor
from statekit.cli.main import main
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.pytorch import param_order
from statekit.errors import NamesError, StateError, StatekitError, UnknownFormatError
from statekit.torch import attest, load_optimizer, load_params
from statekit.verify.verification import verify

pytestmark = pytest.mark.torch
CASES = Path(__file__).parent / "cases"


def values(path: Path, **options: Any) -> tuple[dict[str, Any], int]:
    """Returns the first group's hyperparameters, and the updates done."""
    with statekit.open(path, **options) as opened:
        return dict(opened.groups[0].hyperparameters), opened.counts.updates


def stored(path: Path) -> dict[str, Any]:
    part: dict[str, Any] = torch.load(path, weights_only=False)
    return part


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 3
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["torch1_10", "torch1_11", "torch1_12", "old_keys_tensor_step"])
def test_files_of_older_torch_are_read_and_do_not_say_adam_or_adamw(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CASES / "old_torch_adamw" / f"{name}.pt"
    known, updates = values(path)
    assert updates == 6
    assert (known["amsgrad"], known["maximize"]) == (False, False)
    assert "decoupled_weight_decay" not in known
    stated, _ = values(path, hparams={"decoupled_weight_decay": True})
    assert stated["decoupled_weight_decay"] is True
    across = ["convert", str(path), str(tmp_path / "optax"), "--to", "orbax", "--layout", "optax"]
    assert "--optimizer NAME, one of adamw, adam" in refused(across, capsys)
    assert main([*across, "--hparams", "decoupled_weight_decay=true"]) == 0
    assert main(["convert", str(path), str(tmp_path / "again.pt")]) == 0
    assert "if you know which it is (adamw or adam)" in capsys.readouterr().out


def test_weight_decay_of_zero_leaves_nothing_to_ask(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["decoupled_weight_decay"]
    torch.save({"model": model.state_dict(), "optimizer": saved}, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        assert not opened.groups[0].facts


def test_fused_adam_counts_in_its_group_and_its_mode_is_assumed(tmp_path: Path) -> None:
    path = CASES / "apex_fusedadam" / "fusedadam.pt"
    native = stored(path)["optimizer"]["state"]
    with statekit.open(path) as opened:
        (group,) = opened.groups
        assert opened.counts.updates == 6
        assert group.known_from["decoupled_weight_decay"] == "assumed"
        for index, name in enumerate(group.paths):
            assert np.array_equal(opened.slots[name]["m"].read(), native[index]["exp_avg"].numpy())
    assert main(["convert", str(path), str(tmp_path / "run.pt")]) == 0
    again = stored(tmp_path / "run.pt")
    assert {float(record["step"]) for record in again["optimizer"]["state"].values()} == {6.0}
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    model.load_state_dict(again["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(again["optimizer"])
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    first: Any = model[0].weight
    assert int(optimizer.state[first]["step"]) == 7


def test_transformers_own_adamw_is_carried_and_refused_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CASES / "adam_or_adamw_old" / "hf_adamw_nobias.pt"
    known, updates = values(path)
    assert updates == 6
    assert (known["learning_rate"], known["epsilon"], known["weight_decay_rate"]) == (0.01, 1e-6, 0.1)
    across = ["convert", str(path), str(tmp_path / "optax"), "--to", "orbax", "--layout", "optax"]
    assert "transformers' own AdamW" in refused(across, capsys)
    assert main(["convert", str(path), str(tmp_path / "neutral"), "--to", "statekit"]) == 0


def test_statistics_of_batch_norms_are_known_by_name() -> None:
    path = CASES / "batchnorm" / "resnetlike.pt"
    rows = (line.split() for line in (CASES / "batchnorm" / "right.txt").read_text().splitlines())
    with statekit.open(path) as opened:
        assert opened.counts.updates == 6
        firsts = {name: float(opened.slots[name.replace(".", "/")]["m"].read().flat[0]) for name, _ in rows}
    rows = (line.split() for line in (CASES / "batchnorm" / "right.txt").read_text().splitlines())
    assert firsts == {name: float(value) for name, value in rows}


class Inner(torch.nn.Module):
    """The parameters of a file without the prefix of its wrapper."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        made: dict[int, torch.nn.Parameter] = {}
        for name, value in weights.items():
            *outer, last = name.removeprefix("_orig_mod.").split(".")
            home: torch.nn.Module = self
            for part in outer:
                if part not in home._modules:
                    home.add_module(part, torch.nn.Module())
                home = home.get_submodule(part)
            param = made.setdefault(value.data_ptr(), torch.nn.Parameter(torch.zeros_like(value)))
            home.register_parameter(last, param)


def test_a_compiled_models_file_fits_the_model_inside(tmp_path: Path) -> None:
    path = CASES / "nanogpt_compiled" / "ckpt.pt"
    file = stored(path)
    model = Inner(file["model"])
    load_params(path, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, file["model"][f"_orig_mod.{name}"])
    optimizer: Any = load_optimizer(path, model.named_parameters())
    assert [group["step"] for group in optimizer.param_groups] == [7, 7]
    params = [param for _, param in model.named_parameters()]
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    live = torch.optim.AdamW([{"params": group} for group in groups])
    live.load_state_dict(file["optimizer"])
    assert attest(live, model.named_parameters(), path).passed
    live.state[params[0]]["exp_avg"].zero_()
    assert not attest(live, model.named_parameters(), path).passed
    names = CASES / "nanogpt_compiled" / "names.txt"
    target = tmp_path / "run.pt"
    assert main(["convert", str(path), str(target), "--param-names", str(names)]) == 0


@pytest.mark.parametrize(
    ("slots", "options", "name"),
    [
        ({"exp_avg", "exp_avg_sq"}, {"weight_decouple", "ams_bound", "final_lr", "gamma"}, "AdaBound"),
        ({"exp_avg", "exp_avg_sq", "exp_avg_slow"}, {"alpha", "t_alpha_beta3"}, "AdEMAMix"),
        ({"exp_avg", "exp_avg_sq", "something"}, set(), None),
        ({"exp_avg"}, set(), "Lion"),
    ],
)
def test_no_optimizer_is_called_by_anothers_name(
    slots: set[str], options: set[str], name: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    more = {"weight_decouple": True, "fixed_decay": False, "foreach": None, "step": 3} if options else {}
    if name == "Lion":  # whose group has no eps: with one it is Adam that has lost its second moments
        del usual["eps"]
    group = {**usual, **more, **dict.fromkeys(options, 0.1), "params": [0]}
    state = {0: {slot: torch.ones(2, 3) for slot in slots}}
    path = tmp_path / "run.pt"
    torch.save(
        {"model": {"w": torch.ones(2, 3)}, "optimizer": {"state": state, "param_groups": [group]}}, path
    )
    with statekit.open(path) as opened:  # it is carried under its name, and never as another
        ((schema, variant),) = opened.state.optimizer.kinds
    assert schema == "torch_native"
    assert (variant is None) if name is None else (variant is not None and name in variant)
    assert main(["inspect", str(path)]) == 0
    assert (name or "variant unknown") in " ".join(capsys.readouterr().out.split())
    across = ["convert", str(path), str(tmp_path / "x"), "--to", "orbax", "--layout", "optax"]
    assert main(across) in (2, 3)
    assert main(["doctor", str(path)]) == 0
    assert main(["diff", str(path), str(path)]) == 0


@pytest.mark.parametrize("kind", ["sharded", "real"])
def test_fsdp_shards_of_model_and_optimizer_are_one_checkpoint(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = CASES / "fsdp_sharded_trainer" / kind
    whole = CASES / "fsdp_sharded_trainer" / "full" / "checkpoint-6"
    for path in (run, run / "checkpoint-6"):
        with statekit.open(path) as opened:
            assert opened.counts.updates == 6
            assert sum(map(len, opened.slots.values())) == 8
            assert opened.groups[0].hyperparameters["learning_rate"] == pytest.approx(0.0094)
    for source, name in ((run / "checkpoint-6", "shards.pt"), (whole, "whole.pt")):
        assert main(["convert", str(source), str(tmp_path / name)]) == 0
    shards, full = (stored(tmp_path / name) for name in ("shards.pt", "whole.pt"))
    for name, value in full["model"].items():
        assert torch.equal(shards["model"][name], value)
    capsys.readouterr()
    assert main(["diff", str(run / "checkpoint-6"), str(whole)]) == 0
    assert main(["doctor", str(run)]) == 0
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    model.load_state_dict(full["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fresh = attest(optimizer, model.named_parameters(), run / "checkpoint-6")
    assert "optimizer-empty" in [finding.name for finding in fresh.findings]
    optimizer.load_state_dict(torch.load(whole / "optimizer.bin", weights_only=True))
    assert attest(optimizer, model.named_parameters(), run / "checkpoint-6").passed


def test_trainers_folders_under_deepspeed_open_with_their_optimizer(tmp_path: Path) -> None:
    folder = CASES / "ds_zero2_lora"
    for name, updates, schedule in (("full", 4, 4), ("z0", 4, 4), ("z0bf", 5, 4)):
        for path in (folder / name, folder / name / "checkpoint-4"):
            with statekit.open(path) as opened:
                assert opened.checkpoint.container == "deepspeed"
                assert (opened.counts.updates, opened.counts.schedule) == (updates, schedule)
                assert "scheduler" in opened.state.extra["torch"]
                assert not [finding for finding in opened.checkpoint.findings if finding.kind == "mixed"]
        assert main(["doctor", str(folder / name)]) == 0
    file = stored(folder / "z0" / "checkpoint-4" / "global_step4" / "mp_rank_00_model_states.pt")
    with statekit.open(folder / "z0") as opened:
        for index, name in enumerate(file["module"]):
            first = opened.slots[name.replace(".", "/")]["m"].read()
            assert np.array_equal(first, file["optimizer"]["state"][index]["exp_avg"].numpy())
    masters = stored(folder / "z0bf" / "checkpoint-4" / "global_step4" / "mp_rank_00_model_states.pt")
    with statekit.open(folder / "z0bf") as opened:
        name = next(iter(masters["module"])).replace(".", "/")
        master = masters["optimizer"]["fp32_groups"][0][0].detach().numpy()
        assert np.array_equal(opened.slots[name]["master"].read(), master)


@pytest.mark.parametrize("name", ["full", "z0bf"])
def test_trainers_files_of_another_step_around_deepspeed_are_found(name: str, tmp_path: Path) -> None:
    """Seen red: doctor found nothing, though it finds the same in a Trainer's own folder."""
    folder = tmp_path / "checkpoint-4"
    shutil.copytree(CASES / "ds_zero2_lora" / name / "checkpoint-4", folder)
    for file, change in (("scheduler.pt", {"last_epoch": 1}), ("trainer_state.json", {"global_step": 2})):
        before = (folder / file).read_bytes()
        if file.endswith(".pt"):
            torch.save({**stored(folder / file), **change}, folder / file)
        else:
            (folder / file).write_text(json.dumps({**json.loads(before), **change}))
        (examined,) = doctor(folder)
        assert [finding.name for finding in examined.findings] == ["files"], file
        (folder / file).write_bytes(before)


def test_where_lightning_averages_the_runs_own_weights_go_on(tmp_path: Path) -> None:
    path = CASES / "lightning_ema" / "last.ckpt"
    with statekit.open(path) as opened:
        row = opened.tensors["params/a/weight"].read()[0, :3]
        average = opened.tensors["extra/torch/state_dict/a.weight"].read()[0, :3]
    assert np.allclose(row, [-0.2578, -0.0257, 0.1238], atol=1e-4)
    assert np.allclose(average, [-0.2528, -0.0666, 0.1248], atol=1e-4)


@pytest.mark.parametrize(
    ("model", "average"), [("net", "net_ema"), ("net", "shadow"), ("weights", "teacher")]
)
def test_an_average_is_never_taken_for_the_model(model: str, average: str, tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    zeros = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    parts = {average: zeros, model: net.state_dict(), "opt": optimizer.state_dict()}
    torch.save(parts, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        assert np.array_equal(opened.params["weight"].read(), net.weight.detach().numpy())


@pytest.mark.parametrize("names", ["names.txt", "names_nodefault.txt"])
def test_an_adapters_names_are_those_of_its_model_or_of_its_file(names: str, tmp_path: Path) -> None:
    path, given = CASES / "lora_trainer" / "run" / "checkpoint-6", CASES / "lora_trainer" / names
    order = given.read_text().split()
    native = stored(path / "optimizer.pt")["state"]
    assert main(["convert", str(path), str(tmp_path / "run.pt"), "--param-names", str(given)]) == 0
    with statekit.open(path, param_names=order) as opened:
        assert [len(group.paths) for group in opened.groups] == [8, 0]
        for index, name in enumerate(order):
            key = name.replace(".default", "").replace(".", "/")
            assert np.array_equal(opened.slots[key]["m"].read(), native[index]["exp_avg"].numpy())


def test_an_adapters_optimizer_goes_on_in_the_model_around_it() -> None:
    path = CASES / "lora_trainer" / "run" / "checkpoint-6"
    order = (CASES / "lora_trainer" / "names.txt").read_text().split()
    from safetensors.torch import load_file

    weights = load_file(path / "adapter_model.safetensors")
    params = {name: torch.nn.Parameter(weights[name.replace(".default", "")]) for name in order}
    resumed: Any = load_optimizer(path, params.items(), lr=1e-3)
    native = stored(path / "optimizer.pt")
    for index, param in enumerate(params.values()):
        assert torch.equal(resumed.state[param]["m"], native["state"][index]["exp_avg"])
    groups: list[dict[str, Any]] = [{"params": list(params.values())}, {"params": []}]
    live = torch.optim.AdamW(groups)
    live.load_state_dict(native)
    assert attest(live, params.items(), path).passed
    live.state[params[order[3]]]["exp_avg"].add_(1)
    assert not attest(live, params.items(), path).passed


def test_olmos_folder_is_one_checkpoint_whose_configuration_names_the_optimizer() -> None:
    with statekit.open(CASES / "olmo_unsharded" / "step6-unsharded") as opened:
        assert opened.counts.updates == 6
        assert [group.hyperparameters["weight_decay_rate"] for group in opened.groups] == [0.1, 0.0]
        for group in opened.groups:
            assert group.hyperparameters["global_norm_clip_threshold"] == 1.0
            assert group.known_from["decoupled_weight_decay"] == "inferred"
            assert not group.facts
        assert "grad_norm_exp_avg" in json.dumps(statekit.inspect(opened.checkpoint.path).to_json())


def test_optimizers_in_files_of_their_own_are_read_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    matrices = [param for param in model.parameters() if param.dim() == 2]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    each: dict[str, Any] = {"muon": torch.optim.Muon(matrices), "adamw": torch.optim.AdamW(vectors)}
    model(torch.ones(4)).sum().backward()
    for name, optimizer in each.items():
        optimizer.step()
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer_{name}.pt")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The file has 2 optimizers, optimizers/adamw and optimizers/muon" in shown
    assert "muon" in shown.partition("The file has")[0]
    assert "weights alone" not in shown


def test_the_lines_of_a_file_that_may_be_of_two_optimizers_name_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["resume", str(CASES / "adam_or_adamw_old" / "adam.pt")]) == 0
    lines = capsys.readouterr().out
    assert "torch.optim.AdamW(" in lines
    assert "torch.optim.Adam(" in lines


def saved_run(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Returns AdamW after three updates of a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return optimizer


def first_moment(path: Path, name: str, **options: Any) -> Any:
    with statekit.open(path, **options) as opened:
        assert opened.counts.updates == 3
        return opened.slots[name]["m"].read()


def moment_of(optimizer: torch.optim.Optimizer, param: Any) -> Any:
    return optimizer.state[param]["exp_avg"].numpy()


@pytest.mark.parametrize(
    ("names", "key"),
    [
        (("netG", "optimizerG", "netD", "optimizerD"), "netD"),
        (("generator", "optim_g", "discriminator", "optim_d"), "discriminator"),
        (("model", "optimizer", "critic", "critic_opt"), "critic"),
    ],
)
def test_a_network_among_several_goes_with_the_optimizer_of_its_name(
    names: tuple[str, ...], key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: no key helped, and a file that has `model` too was written so that the other network was read."""
    nets = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    optimizers = [saved_run(net, weight_decay=0.1 * number) for number, net in enumerate(nets)]
    states = [part.state_dict() for pair in zip(nets, optimizers, strict=True) for part in pair]
    path = tmp_path / "run.pt"
    torch.save(dict(zip(names, states, strict=True)), path)
    right = moment_of(optimizers[1], nets[1].weight)
    assert np.array_equal(first_moment(path, "weight", model_key=key), right)
    assert np.array_equal(first_moment(path, "weight", optimizer_key=names[3]), right)
    assert attest(optimizers[1], nets[1].named_parameters(), path, model_key=key).passed
    assert not attest(optimizers[0], nets[0].named_parameters(), path, model_key=key).passed
    assert main(["convert", str(path), str(tmp_path / "one.pt"), "--model-key", key]) == 0
    assert "as their names go together" in capsys.readouterr().out
    assert np.array_equal(first_moment(tmp_path / "one.pt", "weight"), right)
    if "model" not in names:
        assert "--model-key names one" in refused(["convert", str(path), str(tmp_path / "x.pt")], capsys)


def test_where_names_pair_nothing_the_optimizers_key_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nets = {name: torch.nn.Linear(3, 2) for name in ("actor", "critic1", "critic2")}
    both = torch.nn.ModuleList([nets["critic1"], nets["critic2"]])
    parts: dict[str, Any] = {"actor_optimizer": saved_run(nets["actor"]), "critic_optimizer": saved_run(both)}
    path = tmp_path / "td3.pt"
    torch.save({name: part.state_dict() for name, part in {**nets, **parts}.items()}, path)
    assert main(["inspect", str(path), "--model-key", "critic1"]) == 2
    assert "--optimizer-key too, one of actor_optimizer, critic_optimizer" in capsys.readouterr().err


def test_an_averaged_model_is_never_the_model_whatever_its_key(tmp_path: Path) -> None:
    """Seen red: `model` was taken, the average."""
    model = torch.nn.Linear(3, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = saved_run(model)
    parts: dict[str, Any] = {"model": average, "online": model, "optimizer": optimizer}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        assert np.array_equal(opened.params["weight"].read(), model.weight.detach().numpy())


def test_composers_optimizer_is_found_and_called_by_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a file of Composer passed for weights alone. Its own decay isn't AdamW's."""
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    optimizer.param_groups[0]["initial_lr"] = 0.01
    state = {"model": model.state_dict(), "optimizers": {"DecoupledAdamW": optimizer.state_dict()}}
    torch.save({"state": state, "rng": []}, tmp_path / "ep1.pt")
    assert np.array_equal(first_moment(tmp_path / "ep1.pt", "weight"), moment_of(optimizer, model.weight))
    across = ["convert", str(tmp_path / "ep1.pt"), str(tmp_path / "x"), "--to", "orbax", "--layout", "optax"]
    assert "Composer's DecoupledAdamW" in refused(across, capsys)


def fused_run(model: torch.nn.Module) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Returns a run of FusedAdam as its state_dict has it, and its masters."""
    saved = saved_run(model).state_dict()
    masters = [param.detach().clone() for param in model.parameters()]
    for record, master in zip(saved["state"].values(), masters, strict=True):
        del record["step"]
        record["master_param"] = master
    options = {"lr": 0.01, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    saved["param_groups"] = [{**options, "step": 3, "params": [0, 1]}]
    return saved, masters


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda master: master.T, "master_param has shape (3, 2), expected (2, 3)"),
        (lambda master: 3 * master.flatten(), "master_param has shape (6,), expected (2, 3)"),
        (lambda _: 1.0, "master_param is no tensor"),
        (lambda _: None, "isn't there @ slots/weight/master"),
    ],
)
def test_a_master_that_is_missing_or_of_another_shape_is_refused(
    wrong: Callable[[torch.Tensor], object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: it was passed over, and the run was called bitwise."""
    model = torch.nn.Linear(3, 2)
    saved, (master, _) = fused_run(model)
    saved["state"][0]["master_param"] = wrong(master)
    torch.save({"model": model.to(torch.bfloat16).state_dict(), "optimizer": saved}, tmp_path / "run.pt")
    assert words in refused(["convert", str(tmp_path / "run.pt"), str(tmp_path / "again.pt")], capsys)
    assert main(["doctor", str(tmp_path / "run.pt")]) == 1


def test_masters_of_fused_adam_are_what_goes_on(tmp_path: Path) -> None:
    """Seen red: what was written for torch couldn't be read, and verify refuted what was written for Optax."""
    model = torch.nn.Linear(3, 2)
    saved, masters = fused_run(model)
    path, optax = tmp_path / "run.pt", tmp_path / "optax"
    torch.save({"model": model.to(torch.bfloat16).state_dict(), "optimizer": saved}, path)
    assert main(["convert", str(path), str(tmp_path / "again.pt")]) == 0
    assert torch.equal(stored(tmp_path / "again.pt")["model"]["weight"], masters[0])
    low = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    load_params(path, low)  # a model of the lower precision has what the file has
    assert torch.equal(low.weight, model.weight)
    assert main(["convert", str(path), str(optax), "--to", "orbax", "--layout", "optax"]) == 0
    assert main(["verify", str(path), str(optax)]) == 0


def test_a_vector_of_all_parameters_is_cut_into_them(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    sizes = [param.numel() for param in model.parameters()]
    flat = torch.nn.Parameter(torch.zeros(sum(sizes)))  # as fairseq's FP16Optimizer has it
    optimizer = torch.optim.Adam([flat], lr=0.01)
    flat.grad = torch.randn(flat.shape)
    optimizer.step()
    history = [{"optimizer_name": "FP16Optimizer", "num_updates": 1}]
    tree = {"model": model.half().state_dict(), "optimizer_history": history}
    torch.save({**tree, "last_optimizer_state": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    moments = optimizer.state[flat]["exp_avg"].split(sizes)
    with statekit.open(tmp_path / "checkpoint.pt") as run:
        assert any("one vector of 29 values" in note for note in run.state.assumptions)
        for (name, param), moment in zip(model.named_parameters(), moments, strict=True):
            got = run.slots[name.replace(".", "/")]["m"].read()
            assert np.array_equal(got, moment.reshape(param.shape).numpy())


def test_parameters_that_an_optimizer_leaves_out_are_known_by_the_order_of_the_others(tmp_path: Path) -> None:
    """Two have one shape, and the optimizer moves one of them; it stands behind others, as in the model."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 4))
    model.append(torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for param in model[1:].parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with statekit.open(path) as run:
        assert np.array_equal(run.slots["3/weight"]["m"].read(), moment_of(optimizer, model[3].weight))
    model[1].requires_grad_(False)
    last = torch.optim.AdamW(model[3].parameters(), lr=0.01)  # the first would do as well
    for param in model[3].parameters():
        param.grad = torch.randn(param.shape)
    last.step()
    torch.save({"model": model.state_dict(), "optimizer": last.state_dict()}, path)
    with pytest.raises(StateError, match=r"Shapes don't tell"):
        statekit.open(path).close()


def test_averages_inside_a_state_dict_are_no_parameters(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = saved_run(model)
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    averages = {"model_ema." + name.replace(".", ""): one * 0.9 for name, one in model.state_dict().items()}
    tree = {"state_dict": {**weights, **averages}, "optimizer_states": [optimizer.state_dict()]}
    torch.save({**tree, "pytorch-lightning_version": "1.4.2"}, tmp_path / "last.ckpt")
    assert np.array_equal(
        first_moment(tmp_path / "last.ckpt", "model/0/weight"), moment_of(optimizer, model[0].weight)
    )


def test_a_module_around_the_network_is_no_part_of_its_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = saved_run(model)
    weights = {f"net._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}, path)
    assert attest(optimizer, model, path).passed
    loaded = load_optimizer(path, model.named_parameters())
    weight = next(model.parameters())
    assert np.array_equal(loaded.state[weight]["m"].numpy(), moment_of(optimizer, weight))
    parts = {"enc": model, "dec": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))}
    both = torch.nn.ModuleDict(parts)
    torch.save({"model": both.state_dict(), "optimizer": saved_run(both).state_dict()}, path)
    with pytest.raises(StateError, match=r"is in the checkpoint, but not among the parameters"):
        load_optimizer(path, model.named_parameters())  # which of the two is meant nothing tells


def test_halves_of_one_step_are_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: the folder was none, and the model's file passed for weights without naming the optimizer's."""
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    for step in (0, 3):
        torch.save(model.state_dict(), tmp_path / f"model{step:06}.pt")
        torch.save(
            optimizer.state_dict() if step else {"state": {}, "param_groups": []},
            tmp_path / f"opt{step:06}.pt",
        )
        torch.save(model.state_dict(), tmp_path / f"ema_0.9999_{step:06}.pt")
    assert np.array_equal(first_moment(tmp_path, "weight"), moment_of(optimizer, model.weight))
    assert attest(optimizer, model.named_parameters(), tmp_path).passed
    assert main(["inspect", str(tmp_path / "model000003.pt")]) == 0
    assert "opt000003.pt" in capsys.readouterr().out
    alone = tmp_path / "opt000003.pt"
    assert main(["doctor", str(alone)]) == 0
    assert "3 updates done" in capsys.readouterr().out
    assert attest(optimizer, model.named_parameters(), alone).passed
    optimizer.state[model.weight]["exp_avg"].zero_()
    assert not attest(optimizer, model.named_parameters(), alone).passed


def test_the_model_of_diffusers_lies_in_a_folder_beside_its_optimizer(tmp_path: Path) -> None:
    """Seen red: the folder was none, and doctor died of the random states in it."""
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    for name in ("unet", "unet_ema"):
        (tmp_path / name).mkdir()
        save_file(dict(model.state_dict()), tmp_path / name / "diffusion_pytorch_model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    torch.save({"step": 0}, tmp_path / "random_states_0.pkl")
    assert np.array_equal(first_moment(tmp_path, "weight"), moment_of(optimizer, model.weight))
    assert attest(optimizer, model.named_parameters(), tmp_path).passed
    assert main(["doctor", str(tmp_path)]) == 0


def adapter_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns an adapter's tensors as PEFT's file names them."""
    return {f"base_model.model.{name}": value for name, value in model.state_dict().items()}


class Adapted(torch.nn.Module):
    """A layer with DoRA's parameters, as PEFT's model has them for one adapter."""

    def __init__(self, adapter: str) -> None:
        super().__init__()
        shapes = {"lora_A": (2, 3), "lora_B": (4, 2), "lora_magnitude_vector": (4,)}
        for name, shape in shapes.items():
            inner = torch.nn.Module()
            inner.register_parameter("weight", torch.nn.Parameter(torch.randn(shape)))
            self.add_module(name, torch.nn.ModuleDict({adapter: inner}))


def test_adapters_in_folders_of_their_names_are_the_model(tmp_path: Path) -> None:
    """Seen red: DoRA's vector had no partner, and an adapter that isn't called default passed for none."""
    adapters = {name: Adapted(name) for name in ("default", "policy")}
    optimizer = saved_run(torch.nn.ModuleList(adapters.values()))
    names = []
    for name, model in adapters.items():
        folder = tmp_path / ("." if name == "default" else name)
        folder.mkdir(exist_ok=True)
        stored_as = {
            key.replace(f".{name}", "").replace("vector.weight", "vector"): value
            for key, value in adapter_of(model).items()
        }
        save_file(stored_as, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        names += [(f"base_model.model.{key}", param) for key, param in model.named_parameters()]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 3}')
    assert attest(optimizer, names, tmp_path).passed
    resumed: Any = load_optimizer(tmp_path, names)
    for _, param in names:
        assert torch.equal(resumed.state[param]["m"], optimizer.state[param]["exp_avg"])
    optimizer.state[names[-1][1]]["exp_avg"].zero_()
    assert not attest(optimizer, names, tmp_path).passed


def test_a_model_of_several_in_accelerates_folder_goes_with_the_optimizer_of_its_number(
    tmp_path: Path,
) -> None:
    """Seen red: such a folder was called damaged."""
    nets = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    for number, net in enumerate(nets):
        suffix = f"_{number}" * bool(number)
        optimizer = saved_run(net, weight_decay=0.1 * number)
        save_file(dict(net.state_dict()), tmp_path / f"model{suffix}.safetensors")
        torch.save(optimizer.state_dict(), tmp_path / f"optimizer{suffix}.bin")
    right = first_moment(tmp_path, "weight", model_key="models/1")
    assert np.array_equal(right, moment_of(optimizer, nets[1].weight))
    assert attest(optimizer, nets[1].named_parameters(), tmp_path, model_key="models/1").passed


def test_slots_of_bfloat16_weights_are_proven_in_the_dtype_that_the_run_has(tmp_path: Path) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    model = torch.nn.Linear(8, 6).to(torch.bfloat16)
    optimizer = optimization.Adafactor(
        model.parameters(), lr=0.01, scale_parameter=False, relative_step=False
    )
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape).to(torch.bfloat16)
        optimizer.step()
    path, target = tmp_path / "run.pt", tmp_path / "ours.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert stored(path)["optimizer"]["state"][0]["exp_avg_sq_row"].dtype == torch.float32
    assert main(["convert", str(path), str(target), "--layout", "statekit-torch"]) == 0
    assert main(["verify", str(path), str(target)]) == 0


@pytest.mark.slow  # it steps both sides
def test_a_parameter_without_slots_is_named_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for param in list(model.parameters())[:3]:  # the last is in the group, and never has a gradient
        param.grad = torch.ones_like(param)
    optimizer.step()
    path, target = tmp_path / "run.pt", tmp_path / "ours.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert main(["convert", str(path), str(target), "--layout", "statekit-torch"]) == 0
    capsys.readouterr()
    assert main(["verify", str(path), str(target), "--gradients", "random", "--steps", "1"]) == 0
    assert "1/bias: it has no slots yet" in capsys.readouterr().out


def test_options_alone_show_an_optimizer_without_slots(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    target = tmp_path / "shards"
    assert main(["convert", str(tmp_path / "run.pt"), str(target), "--to", "dcp-safetensors"]) == 0
    with statekit.open(target) as run:
        assert run.groups[0].hyperparameters["lr"] == 0.25


class Wrapped(torch.nn.Module):
    """A user's own class, with all that a state_dict leaves out or goes into."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ModuleList([torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)])
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.tied = self.inner[0]
        self.register_buffer("mask", torch.ones(2), persistent=False)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("what", ["both", "optimizer"])
def test_objects_that_were_pickled_whole_are_read_as_their_state_dicts(
    what: str, legacy: bool, tmp_path: Path
) -> None:
    model = Wrapped()
    first = [param for param in model.parameters() if param.ndim < 2]
    others = [param for param in model.parameters() if param.ndim >= 2]
    groups: Any = [{"params": others[::-1]}, {"params": first[::-1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optimizer.step()
        scheduler.step()
    path = tmp_path / "run.pt"
    whole = {
        "model": model if what == "both" else model.state_dict(),
        "optimizer": optimizer,
        "sched": scheduler,
    }
    torch.save(whole, path, _use_new_zipfile_serialization=not legacy)
    with statekit.open(path) as run:
        assert {name.replace("/", ".") for name in run.params} == {n for n, _ in model.named_parameters()}
        for name, param in model.named_parameters():
            slots = run.slots[name.replace(".", "/")]
            assert np.array_equal(slots["m"].read(), optimizer.state[param]["exp_avg"].numpy())
    assert attest(optimizer, model, path, scheduler=scheduler).passed
    written = tmp_path / "plain.pt"
    assert main(["convert", str(path), str(written), "--to", "torch"]) == 0
    plain = stored(written)
    model.load_state_dict(plain["model"])
    torch.optim.AdamW(groups).load_state_dict(plain["optimizer"])


def test_a_file_that_is_a_whole_module_or_optimizer_is_what_it_holds(tmp_path: Path) -> None:
    model = Wrapped()
    optimizer = saved_run(model)
    torch.save(torch.nn.DataParallel(model), tmp_path / "model.pt")
    with statekit.open(tmp_path / "model.pt") as run:
        assert set(run.params) == {f"module/{name.replace('.', '/')}" for name in model.state_dict()} - {
            "module/tied/weight", "module/tied/bias"
        }  # fmt: skip
    (tmp_path / "other").mkdir()
    torch.save(optimizer, tmp_path / "other" / "optimizer.pt")
    loaded = load_optimizer(tmp_path / "other" / "optimizer.pt", model.named_parameters(), lr=0.01)
    weight = model.head.weight
    assert np.array_equal(loaded.state[weight]["m"].numpy(), moment_of(optimizer, weight))


def test_another_limit_of_the_gradients_norm_is_no_resume_of_a_trainers_run() -> None:
    """Trainer clips outside of its optimizer, which doesn't show it."""
    clipping_faults = pytest.importorskip("statekit.hf").clipping_faults
    step = CASES / "lora_trainer" / "run" / "checkpoint-6"
    with statekit.open(step, param_names=(CASES / "lora_trainer" / "names.txt").read_text().split()) as run:
        saved = run.groups[0].hyperparameters["global_norm_clip_threshold"]
    assert clipping_faults(step, saved) == []
    (finding,) = clipping_faults(step, 0.25)
    assert (finding.name, finding.expected, finding.found) == ("hyperparameter", str(saved), "0.25")
    assert [one.found for one in clipping_faults(step, None)] == ["None"]
    assert (
        clipping_faults(CASES / "old_torch_adamw" / "torch1_12.pt", 1.0) == []
    )  # no Trainer's: nothing is said


def trained(model: torch.nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return optimizer


def run_lines(path: Path, capsys: pytest.CaptureFixture[str], **names: Any) -> dict[str, Any]:
    """Runs what `statekit resume` prints; returns the program's names afterwards."""
    assert main(["resume", str(path)]) == 0
    program: dict[str, Any] = {"torch": torch, **names}
    exec(capsys.readouterr().out.partition("\n\n")[0], program)
    return program


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["halves", "objects", "top", "weights"])
def test_the_lines_of_files_from_elsewhere_load_them(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = trained(model)
    path = tmp_path / "last.pt"
    match form:
        case "halves":
            path = tmp_path
            torch.save(model.state_dict(), path / "model.pt")
            torch.save(optimizer.state_dict(), path / "optim.pt")
        case "objects":  # as timm and MAE save their arguments: weights_only refuses it
            args = argparse.Namespace(lr=0.01)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": args}, path)
        case "top":  # torchtitan
            path = tmp_path / "step-1"
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            slots = get_optimizer_state_dict(model, optimizer, options=options)
            state_dict_saver.save({**model.state_dict(), "optimizer": slots}, checkpoint_id=path)
        case "weights":  # fastai
            torch.save({"model": model.state_dict(), "opt": {"state": [{"grad_avg": torch.ones(2)}]}}, path)
    fresh = torch.nn.Linear(2, 2)
    program = run_lines(path, capsys, model=fresh)
    assert torch.equal(fresh.weight, model.weight)
    if form != "weights":
        slots = program["optimizer"].state[fresh.weight]
        assert torch.equal(slots["exp_avg"], optimizer.state[model.weight]["exp_avg"])


def test_where_mmengine_averages_the_runs_own_weights_go_on(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = trained(model)
    run = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    average = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    saved = {"meta": {"mmengine_version": "0.10", "iter": 1}, "state_dict": average}
    saved |= {"ema_state_dict": {"steps": torch.tensor(1), **run}, "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "iter_1.pth")
    with statekit.open(tmp_path / "iter_1.pth") as opened:
        assert np.array_equal(opened.params["module/weight"].read(), model.weight.detach().numpy())


def test_weights_that_are_an_average_alone_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = trained(model)
    torch.save(
        {"model": None, "ema": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt"
    )
    arguments = ["convert", str(tmp_path / "last.pt"), str(tmp_path / "again.pt")]
    assert "an average of them at ema do: --model-key ema" in refused(arguments, capsys)
    assert main([*arguments, "--model-key", "ema"]) == 0


@pytest.mark.parametrize("name", ["apex_fusedadam/fusedadam.pt", "adam_or_adamw_old/hf_adamw_nobias.pt"])
def test_lines_name_no_class_that_does_not_go_on_with_the_file(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", str(CASES / name)]) == 0
    printed = capsys.readouterr().out
    assert "optimizer = ...  # the run's own: " in printed and "torch.optim.AdamW" not in printed


def test_optimizers_of_several_networks_that_no_name_pairs_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HiFi-GAN's do_ file has an optimizer of two discriminators, and the generator's, whose weights lie elsewhere."""
    nets = [torch.nn.Linear(2, 2) for _ in range(3)]
    moments = [trained(net).state_dict() for net in nets[:2]]
    networks = {"mpd": nets[1].state_dict(), "msd": nets[2].state_dict()}
    torch.save({**networks, "optim_g": moments[0], "optim_d": moments[1]}, tmp_path / "do_00000001")
    asked = refused(["doctor", str(tmp_path / "do_00000001")], capsys)
    assert "optimizers at optim_g, optim_d; weights at mpd, msd" in asked and "--model-key" in asked


def of_member(archive: Path, name: str) -> Any:
    """Returns what a member of a zip archive holds, as PyTorch loads it."""
    with zipfile.ZipFile(archive) as members:
        return torch.load(io.BytesIO(members.read(name)), weights_only=True)


def test_an_archive_of_stable_baselines3_is_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """PPO of stable-baselines3 2.9.2 saved it; its arguments were taken out. Seen red: no container fitted."""
    path = CASES / "sb3" / "ppo.zip"
    saved = of_member(path, "policy.optimizer.pth")["state"]
    with statekit.open(path) as opened:
        moments = [opened.slots[name]["m"].read() for name in opened.params]
        assert opened.counts.updates == saved[0]["step"]
    assert all(
        np.array_equal(moment, saved[i]["exp_avg"].numpy()) for i, moment in enumerate(moments)
    ) and len(moments) == len(saved)
    assert main(["resume", str(path)]) == 0
    assert f'model = Algorithm.load("{path}", env=env)' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("network", "member"),
    [("actor", "actor.optimizer"), ("critic", "critic.optimizer"), ("ent_coef", "ent_coef_optimizer")],
)
def test_each_network_of_stable_baselines3_goes_with_its_optimizer(network: str, member: str) -> None:
    """Seen red for the logarithm of SAC's entropy coefficient, which is no module."""
    path = CASES / "sb3" / "sac.zip"
    with pytest.raises(UnknownFormatError, match="3 networks"):
        statekit.open(path)
    saved = of_member(path, f"{member}.pth")["state"]
    with statekit.open(path, model_key=network) as opened:
        assert len(opened.params) == len(saved)
        assert all(name.startswith((f"{network}/", "log_ent_coef")) for name in opened.params)
        first = next(iter(opened.params))
        assert np.array_equal(opened.slots[first]["m"].read(), saved[0]["exp_avg"].numpy())


def test_the_newest_halves_of_allennlp_are_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    for epoch in (9, 10):
        kept = {"optimizer": optimizer.state_dict(), "batch_num_total": epoch}
        torch.save(model.state_dict(), tmp_path / f"model_state_e{epoch}_b0.th")
        torch.save(kept, tmp_path / f"training_state_e{epoch}_b0.th")
    assert np.array_equal(first_moment(tmp_path, "weight"), moment_of(optimizer, model.weight))
    assert main(["resume", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert 'checkpoint["training_state"]["optimizer"]' in shown and "model_state_e10_b0.th" in shown


@pytest.mark.parametrize(
    ("weights", "state", "beside"),
    [
        ("model.pt", "training_state.pt", ""),
        ("weights.pth", "trainer_state.pth", ""),
        ("network_10.ckpt", "train_state_10.ckpt", ""),
        ("model.pt", "optimizer.pt", "training_state.pt"),
        ("models/net_g_5000.pth", "training_states/5000.state", "models/net_g_latest.pth"),
    ],
)
def test_two_files_that_a_program_saves_by_hand_are_one_checkpoint(
    weights: str, state: str, beside: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: no container fitted, or weights passed for all that was saved. The last folder is as BasicSR's."""
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    for file in (weights, state):
        (tmp_path / file).parent.mkdir(exist_ok=True)
    saved: Any = optimizer.state_dict()
    saved = saved if beside == "training_state.pt" else {"optimizer": saved, "iter": 5000}
    saved = {"optimizers": [saved["optimizer"]], "iter": 5000} if state.endswith(".state") else saved
    torch.save(
        {"params": model.state_dict()} if state.endswith(".state") else model.state_dict(), tmp_path / weights
    )
    torch.save(saved, tmp_path / state)
    if beside:
        torch.save({"epoch": 3}, tmp_path / beside)
    assert np.array_equal(first_moment(tmp_path, "weight"), moment_of(optimizer, model.weight))
    assert main(["resume", str(tmp_path)]) == 0
    again = torch.nn.Linear(3, 2)
    names: dict[str, Any] = {"model": again}
    exec(capsys.readouterr().out.partition("\n\n")[0], names)
    assert torch.equal(again.weight, model.weight)
    moment = names["optimizer"].state[again.weight]["exp_avg"]
    assert np.array_equal(moment.numpy(), moment_of(optimizer, model.weight))


def test_networks_of_basicsr_and_their_optimizers_are_named(tmp_path: Path) -> None:
    nets = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)]
    moments = [saved_run(net).state_dict() for net in nets]
    for folder in ("models", "training_states"):
        (tmp_path / folder).mkdir()
    for net, name in zip(nets, ("net_g", "net_d"), strict=True):
        for step in (500, 1000):
            torch.save({"params": net.state_dict()}, tmp_path / f"models/{name}_{step}.pth")
    for step in (500, 1000):
        torch.save({"iter": step, "optimizers": moments}, tmp_path / f"training_states/{step}.state")
    with pytest.raises(
        StateError, match=r"--model-key net_g/params --optimizer-key training_state/optimizers/0"
    ):
        statekit.open(tmp_path)
    with statekit.open(
        tmp_path, model_key="net_d/params", optimizer_key="training_state/optimizers/1"
    ) as opened:
        assert np.array_equal(opened.slots["weight"]["m"].read(), moments[1]["state"][0]["exp_avg"].numpy())


def test_a_folder_with_one_checkpoint_is_opened_by_its_own_path(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = saved_run(model)
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run, tmp_path / "last.pt")
    (tmp_path / "notes.txt").write_text("a run")
    with statekit.open(tmp_path) as opened:
        assert opened.checkpoint.path == tmp_path / "last.pt"
        assert "last.pt is the only checkpoint in the folder" in opened.evidence[0].because
    torch.save(run, tmp_path / "other.pt")
    with pytest.raises(UnknownFormatError, match="there are checkpoints in it"):
        statekit.open(tmp_path)


def test_what_has_no_slots_rests_on_no_order(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    assert "in the model's order" not in plan(tmp_path / "run.pt", tmp_path / "kept", to="statekit").headline


def two_networks(folder: Path, shared: int = 8) -> tuple[Path, dict[str, torch.Tensor]]:
    """Saves a model of two networks, as Lightning has it, and returns the first moment of each parameter."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "generator": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)),
            "critic": torch.nn.Sequential(torch.nn.Linear(3, shared), torch.nn.Linear(shared, 3)),
        }
    )
    optimizers = [torch.optim.Adam(network.parameters(), lr=0.01) for network in model.values()]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn_like(param)
        optimizer.step()
    moments = {
        name.replace(".", "/"): optimizer.state[param]["exp_avg"]
        for name, param in model.named_parameters()
        for optimizer in optimizers
        if param in optimizer.state
    }
    states = [optimizer.state_dict() for optimizer in optimizers]
    run = {"pytorch-lightning_version": "2.5.0", "state_dict": model.state_dict(), "optimizer_states": states}
    torch.save({**run, "global_step": 1, "lr_schedulers": []}, folder / "run.ckpt")
    return folder / "run.ckpt", moments


def test_optimizers_of_one_model_go_with_the_modules_of_their_shapes(tmp_path: Path) -> None:
    """Seen red: a bias of one length in both networks made each of them unknown."""
    path, moments = two_networks(tmp_path)
    with statekit.open(path) as opened:
        slots = {name: np.asarray(slots["m"].read()) for name, slots in opened.slots.items()}
        assert "the shapes of one module" in " ".join(opened.state.assumptions)
        assert {fact.name for group in opened.groups for fact in group.facts} == {"order"}
    assert slots.keys() == moments.keys()
    assert all(np.array_equal(slots[name], moments[name]) for name in moments)


def test_a_group_that_fits_no_module_leaves_the_order_untold() -> None:
    """Seen red: an IndexError, where another group has the shapes of the whole model."""
    model = {"net.first": (4, 4), "net.second": (4,)}
    assert param_order._by_modules([[(4, 4), (4,)], [(9,)]], model, False) is None


def test_modules_of_deep_names_take_no_more_memory_than_the_names() -> None:
    names = [f"{i}." + "a." * 1000 + "w" for i in range(50)]
    tracemalloc.start()
    try:
        sizes = {len(module) for module in param_order._modules_in(names)}
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == {1} and peak < 20 * sum(map(len, names))


def test_optimizers_whose_shapes_fit_several_modules_are_asked_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("first", "second")})
    optimizers = [torch.optim.Adam(network.parameters(), lr=0.01) for network in model.values()]
    for optimizer, network in zip(optimizers, model.values(), strict=True):
        network(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": states}, tmp_path / "run.pt")
    with pytest.raises(NamesError, match="Shapes don't tell"), statekit.open(tmp_path / "run.pt"):
        pass


def test_an_optimizer_that_lies_deep_is_not_lost_beside_another(tmp_path: Path) -> None:
    """Seen red: one of two networks' optimizers was read, and doctor found nothing."""
    path, _ = two_networks(tmp_path)
    saved = torch.load(path, weights_only=True)
    first, second = saved["optimizer_states"]
    optimizers = {"generator": {"_model_opt": {"_opt": first}}, "critic": {"_opt": second}}
    torch.save({"agent": saved["state_dict"], "optims_state_dict": optimizers}, tmp_path / "latest.pt")
    assert main(["doctor", str(tmp_path / "latest.pt")]) == 1
    with statekit.open(tmp_path / "latest.pt") as opened:
        named = " ".join(finding.what for finding in opened.checkpoint.findings)
    assert "generator/_model_opt/_opt looks like an optimizer" in named
    assert "critic/_opt looks like an optimizer" in named


@pytest.mark.slow
def test_a_rule_that_makes_its_rate_itself_is_proven_with_the_rate_that_its_target_gets(
    tmp_path: Path,
) -> None:
    """Seen red: verify refuted it, as it gave the target another rate than the one that the plan asks for."""
    from transformers.optimization import Adafactor

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = Adafactor(model.parameters(), relative_step=True, warmup_init=True, lr=None)
    for _ in range(2):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    convert(plan(tmp_path / "run.pt", tmp_path / "run", to="orbax", layout="optax"))
    proof = verify(tmp_path / "run.pt", tmp_path / "run").data
    assert proof["verdict"]["whole"] == "within the rounding bound"
    assert any("both sides are given the target's" in note for note in proof["replay"]["notes"])


def test_the_files_of_skorch_are_one_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "params.pt")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({}, tmp_path / "criterion.pt")
    with statekit.open(tmp_path) as opened:
        assert {*opened.slots} == {"weight", "bias"} and not opened.checkpoint.findings


def stepped(names: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model of layers of different shapes and its optimizer after two updates."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(size + 2, size + 3) for size in range(names)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_sharded(model: torch.nn.Module, folder: Path, name: str) -> None:
    """Saves a model in one shard with an index."""
    folder.mkdir(parents=True)
    weights = model.state_dict()
    if name.endswith(".bin"):
        torch.save(weights, folder / f"{name[:-4]}-00001.bin")
        written = f"{name[:-4]}-00001.bin"
    else:
        written = "model-00001-of-00001.safetensors"
        save_file(weights, folder / written)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, written)}
    (folder / f"{name}.index.json").write_text(json.dumps(index))


def of_torchtune(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = stepped()
    save_sharded(model, folder / "epoch_0", "model.safetensors")
    (folder / "recipe_state").mkdir()
    recipe = {"seed": 1, "epochs_run": 1, "total_epochs": 3, "optimizer": optimizer.state_dict()}
    torch.save(recipe, folder / "recipe_state" / "recipe_state.pt")
    return model, optimizer


def of_colossalai(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Saves as its booster does with `shard=True`, the optimizer in two files."""
    model, optimizer = stepped()
    save_sharded(model, folder / "model", "pytorch_model.bin")
    (folder / "optimizer").mkdir()
    state = optimizer.state_dict()
    torch.save(state["param_groups"], folder / "optimizer" / "pytorch_optim_group.bin")
    places = {number: f"pytorch_optim-0000{1 + number % 2}.bin" for number in state["state"]}
    for name in {*places.values()}:
        part = {number: state["state"][number] for number, place in places.items() if place == name}
        torch.save(part, folder / "optimizer" / name)
    index = {"metadata": {"param_groups": "pytorch_optim_group.bin"}, "weight_map": places}
    (folder / "optimizer" / "pytorch_optim.bin.index.json").write_text(json.dumps(index))
    torch.save({"last_epoch": 2, "base_lrs": [0.01]}, folder / "lr_scheduler")
    return model, optimizer


def of_colossalai_in_files(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = stepped()
    torch.save(model.state_dict(), folder / "model")
    torch.save(optimizer.state_dict(), folder / "optimizer")
    return model, optimizer


@pytest.mark.parametrize("saved_by", [of_torchtune, of_colossalai, of_colossalai_in_files])
def test_halves_in_folders_of_their_own_are_one_checkpoint(
    saved_by: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: the model's folder was read as weights, and its optimizer was only named."""
    model, optimizer = saved_by(tmp_path)
    with statekit.open(tmp_path) as opened:
        assert not opened.checkpoint.findings
    assert attest(optimizer, model, tmp_path).passed
    assert main(["resume", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0]
    fresh, _ = stepped()
    scope: dict[str, Any] = {"model": fresh, "torch": torch}
    exec(
        lines.replace("scheduler = ...", "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)"), scope
    )
    moments = {name: scope["optimizer"].state[param] for name, param in fresh.named_parameters()}
    first = moments["0.weight"]
    assert torch.equal(
        first.get("exp_avg", first.get("m")), optimizer.state[model.get_parameter("0.weight")]["exp_avg"]
    )


def test_a_rate_that_is_a_tensor_goes_on(tmp_path: Path) -> None:
    """torch.optim takes a tensor as rate, and the scheduler's `initial_lr` is one then."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (group,) = load_optimizer(path, model.named_parameters()).param_groups
    assert (group["lr"], group["initial_lr"]) == pytest.approx((5e-4, 1e-3))
    with open_state(path) as opened:
        (stored,) = opened.state.optimizer.groups
        assert stored.hyperparameters["learning_rate"] == np.float32(5e-4)
    convert(plan(path, tmp_path / "again.pt", layout="torch-optim"))
    (back,) = torch.load(tmp_path / "again.pt")["optimizer"]["param_groups"]
    assert torch.equal(back["lr"], optimizer.param_groups[0]["lr"]) and back["lr"].shape == ()
    convert(plan(path, tmp_path / "orbax", to="orbax", layout="optax"))
    convert(plan(path, tmp_path / "universal", to="deepspeed"))
    convert(
        plan(
            path,
            tmp_path / "other.pt",
            layout="torch-optim",
            hints=CheckpointRef(hparams={"learning_rate": 0.25}),
        )
    )
    assert torch.load(tmp_path / "other.pt")["optimizer"]["param_groups"][0]["lr"] == 0.25


@pytest.mark.parametrize("key", [0, None])
def test_a_group_whose_keys_are_no_names_is_compared(key: object, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = optimizer.state_dict()
    state["param_groups"][0][key] = state["param_groups"][0].pop("maximize")
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    assert not attest(optimizer, model, tmp_path / "run.pt").findings


@pytest.mark.parametrize("option", ["eps", "weight_decay", "lr"])
def test_an_option_that_is_infinite_is_refused_by_name(option: str, tmp_path: Path) -> None:
    """Seen red: it was loaded, and all weights were infinite after an update."""
    model = torch.nn.Linear(3, 2)
    state = saved_run(model).state_dict()
    state["param_groups"][0][option] = float("inf")
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    with pytest.raises(StatekitError, match="inf"):
        statekit.torch.load_optimizer(tmp_path / "run.pt", model.named_parameters())


def test_deepspeeds_muon_is_not_kellers(tmp_path: Path) -> None:
    """Seen red: it was Keller's with every value bitwise. DeepSpeed 0.19.8's groups name their Newton-Schulz."""
    model = torch.nn.Linear(3, 2)
    moments = {0: {"momentum_buffer": torch.ones(2, 3)}}
    adam = {1: {"step": 1, "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}}
    muon = {"use_muon": True, "lr": 0.02, "momentum": 0.9, "weight_decay": 0.01, "params": [0]}
    rest = {
        "use_muon": False,
        "lr": 0.02,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
        "weight_decay": 0.0,
        "params": [1],
    }
    for more in ({}, {"ns_method": "gram"}):
        optimizer = {"state": {**moments, **adam}, "param_groups": [{**muon, **more}, rest]}
        torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "run.pt")
        with statekit.open(tmp_path / "run.pt") as opened:
            kinds = [opened.state.optimizer.kind(group) for group in opened.groups]
        assert (("muon", "keller") in kinds) == (not more)


def _without_v(optimizer: dict[str, Any]) -> None:
    del optimizer["state"][1]["exp_avg_sq"]


def _with_amsgrad(optimizer: dict[str, Any]) -> None:
    optimizer["param_groups"][0]["amsgrad"] = True


def _of_whole_numbers(optimizer: dict[str, Any]) -> None:
    optimizer["state"][1]["exp_avg_sq"] = optimizer["state"][1]["exp_avg_sq"].to(torch.int32)


@pytest.mark.parametrize(
    ("damage", "found", "fault"),
    [
        (_without_v, "isn't there @ slots/1/weight/v", "slot-missing"),
        (_with_amsgrad, "isn't there @ slots/0/weight/v_max", "slot-missing"),
        (_of_whole_numbers, "has dtype int32 @ slots/1/weight/v", "undecodable"),
    ],
)
def test_a_state_that_is_not_whole_is_refused_and_doctor_names_it(
    damage: Any, found: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch ends in a KeyError at the next step; convert called it bitwise, and doctor found nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5, bias=False), torch.nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    half = optimizer.state_dict()
    damage(half)
    path = tmp_path / "a.pt"
    torch.save({"model": model.state_dict(), "optimizer": half}, path)
    assert found in refused(["convert", f"{path}", f"{tmp_path / 'b'}", "--to", "statekit"], capsys)
    with pytest.raises(StateError, match="isn't whole"):
        load_optimizer(path, model)
    assert main(["doctor", f"{path}"]) == 1
    assert f"1 finding {fault}" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", f"{path}", f"{tmp_path / 'c'}", "--to", "statekit", "--params-only"]) == 0
    if fault == "slot-missing":  # the live run lost it too, and ends at its next step
        optimizer.load_state_dict(half)
        assert fault in [finding.name for finding in attest(optimizer, model, path).findings]


def test_complex_parameters_go_on_and_moved_whole_numbers_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {"p": torch.nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))}
    optimizer = torch.optim.AdamW([*weights.values()], lr=0.01)
    loss: Any = weights["p"].abs().sum()
    loss.backward()
    optimizer.step()
    model = {name: weight.detach() for name, weight in weights.items()}
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    assert main(["convert", f"{tmp_path / 'a.pt'}", f"{tmp_path / 'b.pt'}"]) == 0
    assert capsys.readouterr().out.startswith("BITWISE")
    halves = optimizer.state_dict()
    slots = halves["state"][0]
    halves["state"][0] = {name: slot.real if slot.is_complex() else slot for name, slot in slots.items()}
    truths = {"p": model["p"].real.bool()}
    torch.save({"model": truths, "optimizer": halves}, tmp_path / "c.pt")
    arguments = ["convert", f"{tmp_path / 'c.pt'}", f"{tmp_path / 'd.pt'}"]
    assert "has dtype bool @ params/p" in refused(arguments, capsys)


@pytest.mark.parametrize("form", ["wrapped optimizer", "wrapped model", "part", "parts"])
def test_names_that_a_wrapper_or_a_part_gave_do_not_stop_a_run(form: str, tmp_path: Path) -> None:
    """PyTorch 2.6 keeps names and loads by numbers. Seen red: "isn't in the model part", without a remedy."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    around = torch.nn.Sequential(model)
    wrapped = torch.nn.DataParallel(model)
    named: Any = list((wrapped if form == "wrapped optimizer" else model).named_parameters())
    if form == "parts":
        named = [*model[0].named_parameters(), *model[1].named_parameters("1")]
    optimizer = torch.optim.AdamW(named)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    saved = {"wrapped optimizer": model, "wrapped model": wrapped}.get(form, around)
    torch.save({"model": saved.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as run:
        for (path, slots), parameter in zip(run.state.slots.items(), model.parameters(), strict=True):
            assert path.endswith(("0/weight", "0/bias", "1/weight", "1/bias"))
            assert np.array_equal(slots["m"].read(), optimizer.state[parameter]["exp_avg"])
    saved_optimizer = optimizer.state_dict()
    saved_optimizer["param_groups"][0]["param_names"][0] = "elsewhere.gain"
    torch.save({"model": saved.state_dict(), "optimizer": saved_optimizer}, tmp_path / "run.pt")
    with pytest.raises(StateError, match="isn't in the model part"), statekit.open(tmp_path / "run.pt"):
        pass


def test_names_that_tensorflow_takes_for_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: a KeyError of ours, as what was written was read again."""
    model = torch.nn.ParameterDict({"a:0": torch.nn.Parameter(torch.ones(4, 3)), "a": torch.ones(4, 3)})
    optimizer = saved_run(model)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    target = ["--to", "tf-bundle", "--layout", "tf2-statekit"]
    assert "KeyError" not in refused(
        ["convert", str(tmp_path / "run.pt"), str(tmp_path / "next"), *target], capsys
    )


def test_names_within_parts_that_contradict_the_models_order_are_refused(tmp_path: Path) -> None:
    """Seen red: weight and bias of a norm got each other's slots."""
    first, norm, last = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)
    named = [
        *first.named_parameters(),
        ("bias", norm.bias),
        ("weight", norm.weight),
        *last.named_parameters(),
    ]
    optimizer = torch.optim.AdamW(named)
    model = torch.nn.Sequential(first, norm, last)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    with pytest.raises(StateError, match="contradict the order"), statekit.open(tmp_path / "run.pt"):
        pass
    order = [
        f"{at}.{name}"
        for at, names in enumerate(("weight bias", "bias weight", "weight bias"))
        for name in names.split()
    ]
    with statekit.open(tmp_path / "run.pt", param_names=order) as run:
        assert np.array_equal(run.state.slots["1/bias"]["m"].read(), optimizer.state[norm.bias]["exp_avg"])
