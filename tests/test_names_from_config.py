"""Names of a Trainer's numbered parameters, taken from the config.json beside its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import statekit
import statekit.jax
from goldens import GOLDEN
from statekit.cli.main import main
from statekit.converters.layouts.pytorch.architecture import architecture
from statekit.errors import FormatError, MissingExtraError, StateError, UsageError
from statekit.state.param_names import NAMES_FILE, saved_names
from statekit.torch import attest, load_optimizer, load_params

pytestmark = [pytest.mark.torch, pytest.mark.jax]
KINDS = ("gpt2", "t5")
Truth = dict[str, list[list[str]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    folder = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("trained_folders.py")
    done = drivers.run(script, folder, imports=["transformers.trainer"])
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads((folder / "names.json").read_text())


def step_of(folder: Path, kind: str) -> Path:
    return folder / kind / "checkpoint-3"


@pytest.mark.parametrize("kind", KINDS)
def test_config_tells_what_trainers_optimizer_numbers(
    kind: str, runs: tuple[Path, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, truth = step_of(runs[0], kind), runs[1][kind]
    assert main(["convert", str(step), str(tmp_path / "run.pt"), "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "of transformers" in shown
    assert "names_from=config, as nothing else" in shown
    state = torch.load(step / "optimizer.pt", weights_only=True)["state"]
    flat = [name for group in truth for name in group]
    with statekit.open(tmp_path / "run.pt") as opened:
        assert [[path.replace("/", ".") for path in group.paths] for group in opened.groups] == truth
        for index, name in enumerate(flat):
            slots = opened.slots[name.replace(".", "/")]
            for slot, native in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                if native in state[index]:
                    assert np.array_equal(slots[slot].read(), state[index][native].numpy())


def test_looking_never_builds_a_model_and_shows_what_needs_no_names(
    runs: tuple[Path, Truth],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where nothing is remembered

    def refused(*given: Any, **others: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.run", refused)
    step = step_of(runs[0], "gpt2")
    assert main(["inspect", str(step), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["layout"]["name"] == "torch-optim"
    optimizer = seen["optimizer"]
    assert (optimizer["schema"], optimizer["updates"]) == ("adamw", 3)
    decays = [group["hyperparameters"]["weight_decay_rate"] for group in optimizer["groups"]]
    assert decays == [0.1, 0.0]
    assert [group["parameters"] for group in optimizer["groups"]] == [len(one) for one in runs[1]["gpt2"]]
    assert "LambdaLR" in json.dumps(seen["run"])
    assert any("--names-from config" in finding["what"] for finding in seen["findings"])
    assert main(["doctor", str(step)]) == 0
    assert "--names-from config" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(AssertionError, match="a process"):
        statekit.open(step)


def test_what_was_built_is_remembered_by_the_digest_of_the_configuration(
    runs: tuple[Path, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = {"params": [["a"]], "decayed": ["a"], "made_by": "nobody"}
    calls: list[str] = []

    def answered(config: str) -> str:
        calls.append(config)
        return json.dumps(record)

    monkeypatch.setattr("statekit.converters.layouts.pytorch.architecture._answer", answered)
    for layers in (2, 2, 3):
        architecture(json.dumps({"model_type": "gpt2", "n_layer": layers}), "here", 99)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_names_that_a_run_writes_at_its_save_are_read(
    kind: str, runs: tuple[Path, Truth], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(step_of(runs[0], kind), folder)
    shutil.copy(runs[0] / kind / NAMES_FILE, folder)
    (folder / "config.json").unlink()
    with statekit.open(folder) as opened:
        assert [[path.replace("/", ".") for path in group.paths] for group in opened.groups] == runs[1][kind]
    stated = json.loads((folder / NAMES_FILE).read_text())
    stated["param_groups"][0].pop()
    (folder / NAMES_FILE).write_text(json.dumps(stated))
    with pytest.raises(StateError, match=NAMES_FILE):
        statekit.open(folder)


def test_drop_ins_take_names_from_config(runs: tuple[Path, Truth]) -> None:
    step, truth = step_of(runs[0], "gpt2"), runs[1]["gpt2"]
    state = torch.load(step / "optimizer.pt", weights_only=True)["state"]
    weights = load_file(step / "model.safetensors")
    params = {name: torch.nn.Parameter(weights[name]) for group in truth for name in group}
    resumed = load_optimizer(step, params.items(), names_from="config")
    arrays = {name: param.detach().numpy() for name, param in params.items()}
    transformation, mine = statekit.jax.load_optimizer(step, arrays, names_from="config")
    assert transformation is not None and mine is not None
    loaded = statekit.jax.load_params(step, arrays, names_from="config")
    for index, name in enumerate(name for group in truth for name in group):
        assert torch.equal(resumed.state[params[name]]["m"], state[index]["exp_avg"])
        assert np.array_equal(loaded[name], arrays[name])


@pytest.mark.tensorflow
def test_keras_takes_names_from_config_and_names_in_order(runs: tuple[Path, Truth]) -> None:
    import keras

    import statekit.tensorflow

    step, truth = step_of(runs[0], "gpt2"), runs[1]["gpt2"]
    state = torch.load(step / "optimizer.pt", weights_only=True)["state"]
    weights = load_file(step / "model.safetensors")
    flat = [name for group in truth for name in group]
    variables = [keras.Variable(weights[name].numpy(), name=name.replace(".", "_")) for name in flat]
    names = {variable.path: name for variable, name in zip(variables, flat, strict=True)}
    for how in ({"names_from": "config"}, {"param_names": flat}):
        options: dict[str, Any] = {"names": names, **how}
        statekit.tensorflow.load_params(step, variables, **options)
        optimizer = statekit.tensorflow.load_optimizer(step, variables, **options)
        slots = {path.replace("/", "."): tensors for path, tensors in optimizer.slots().items()}
        for index, name in enumerate(flat):
            assert np.array_equal(slots[name]["m"].numpy(), state[index]["exp_avg"].numpy()), name


def changed(runs: tuple[Path, Truth], to: Path, **changes: Any) -> Path:
    shutil.copytree(step_of(runs[0], "gpt2"), to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"auto_map": {"AutoModel": "evil.py--Model"}}, "code of its own"),
        ({"n_layer": 10**9}, "more layers"),
        ({"architectures": ["Trainer"]}, "no architecture 'Trainer'"),
        ({"architectures": ["BertModel"]}, "isn't a model of type 'gpt2'"),
    ],
)
def test_a_configuration_that_cannot_be_trusted_is_refused(
    changes: dict[str, Any], match: str, runs: tuple[Path, Truth], tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match=match):
        statekit.open(changed(runs, tmp_path / "checkpoint-3", **changes), names_from="config")


def test_kernels_that_a_configuration_names_are_left_out(runs: tuple[Path, Truth], tmp_path: Path) -> None:
    there = {
        "attn_implementation": "kernels-evil/attention",
        "_attn_implementation": "kernels-evil/attention",
    }
    folder = changed(runs, tmp_path / "checkpoint-3", **there)
    with statekit.open(folder, names_from="config") as opened:
        assert [len(group.paths) for group in opened.groups] == [len(group) for group in runs[1]["gpt2"]]


def test_groups_that_arent_trainers_are_refused(runs: tuple[Path, Truth], tmp_path: Path) -> None:
    folder = changed(runs, tmp_path / "checkpoint-3")
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    optimizer["param_groups"][0]["params"].pop()
    torch.save(optimizer, folder / "optimizer.pt")
    with pytest.raises(StateError, match=r"\[9, 18\](.|\n)*frozen(.|\n)*--param-names"):
        statekit.open(folder, names_from="config")


def test_without_a_configuration_or_transformers_it_says_so(
    runs: tuple[Path, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = changed(runs, tmp_path / "checkpoint-3")
    monkeypatch.setattr("statekit.converters.layouts.pytorch.architecture.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"\.\[hf\]"):
        statekit.open(folder, names_from="config")
    (folder / "config.json").unlink()
    with pytest.raises(StateError, match=r"config\.json"):
        statekit.open(folder, names_from="config")


def test_systems_that_name_their_parameters_take_none_from_there() -> None:
    with pytest.raises(UsageError, match="names-from"):
        statekit.open(GOLDEN / "t5x" / "momentum_f32" / "checkpoint", names_from="config")


@pytest.mark.slow
def test_names_by_config_are_asked_of_the_side_that_numbers_its_parameters(
    runs: tuple[Path, Truth], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trainer clips by a norm of 1 before an optimizer that knows of none; Optax' chain clips itself."""
    step, target = str(step_of(runs[0], "gpt2")), str(tmp_path / "out")
    words = [
        "convert",
        step,
        target,
        "--to",
        "orbax",
        "--layout",
        "optax",
        "--names-from",
        "config",
        "--verify",
    ]
    assert main(words) == 0, capsys.readouterr().out
    assert "clips gradients by their norm, 1.0" in capsys.readouterr().out
    for hints in ([], ["--left-names-from", "config"]):
        assert main(["diff", step, target, *hints]) == 1  # the rule's variant
        assert "1 difference in" in capsys.readouterr().out
    assert main(["diff", step, target, "--names-from", "config"]) == 2
    assert "--left-names-from config" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_transformers_saves_under_other_names_goes_on(tmp_path: Path) -> None:
    """Release 5 calls ViT's parameters otherwise than its files do. Seen red: no verb could read such a folder."""
    transformers = pytest.importorskip("transformers", minversion="5")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **sizes, image_size=8, patch_size=4, architectures=["ViTForImageClassification"]
        )
    )
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        save_steps=2,
        report_to="none",
        use_cpu=True,
        weight_decay=0.1,
        disable_tqdm=True,
    )
    rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(i % 2)} for i in range(16)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    step = tmp_path / "checkpoint-2"
    live = dict(model.named_parameters())
    saved = {name: name for name in live} | saved_names(model)
    assert {*saved.values()} == {*load_file(step / "model.safetensors")}
    assert {*saved.values()} != {*live}
    optimizer = trainer.optimizer.optimizer
    with statekit.open(step) as opened:
        for name, param in live.items():
            moment = opened.slots[saved[name].replace(".", "/")]["m"].read()
            assert np.array_equal(moment, optimizer.state[param]["exp_avg"].numpy())
    loaded = load_optimizer(step, live.items())
    for param in live.values():
        assert torch.equal(loaded.state[param]["m"], optimizer.state[param]["exp_avg"])
    order: dict[int, str] = {id(param): name for name, param in live.items()}
    names = [order[id(param)] for group in optimizer.param_groups for param in group["params"]]
    assert attest(optimizer, model, step).passed
    assert attest(optimizer, model, step, param_names=names).passed
    with torch.no_grad():
        live["vit.layers.0.attention.q_proj.weight"].zero_()
    assert not attest(optimizer, model, step).passed
    load_params(step, model)
    assert attest(optimizer, model, step).passed
