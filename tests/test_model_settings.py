"""What a map needs to know of a model is read where its codebase says it; what nobody says is named, never silent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from test_decoder_maps import HEADS, PAIRS, SAID, titan, trained, with_norms
from test_maps import said_of, scanned, t5

import statekit
from goldens import COMPACT
from statekit.cli.main import main
from statekit.errors import StateError, StatekitError, UsageError
from statekit.maps.model_map import load, settings_in

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
GIN = """
from __gin__ import dynamic_registration
from t5x.examples.t5 import network
DROPOUT_RATE = 0.1
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 256
  dtype = 'bfloat16'
  emb_dim = 64
  num_heads = 4
  mlp_activations = ('gelu', 'linear')
  dropout_rate = %DROPOUT_RATE
  logits_via_embedding = False
"""
MESH_GIN = """
encoder/DenseReluDense.activation = 'relu'
decoder/DenseReluDense.activation = 'relu'
encoder/DenseReluDense.dropout_rate = %dropout_rate
decoder/DenseReluDense.dropout_rate = %dropout_rate
SelfAttention.dropout_rate = %dropout_rate
SelfAttention.num_heads = 2
dropout_rate = 0.05
"""
ASSUMED = ("dropout_rate=0.0", "eos_token_id=1", "feed_forward_proj")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(COMPACT / "t5x_train" / "t5_11_unscanned" / "checkpoint", tmp_path / "run"))


def to_hf(run: Path, **options: Any) -> Any:
    return statekit.convert(run, run.parent / "hf-t5", to="hf-trainer", map="t5x-t5:hf-t5", **options)


def config_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_what_nobody_says_of_a_model_is_named_in_plan_report_manifest_json_and_resume_lines(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, options = str(run.parent / "hf-t5"), ["--map", "t5x-t5:hf-t5", "--config", "num_heads=4"]
    assert main(["convert", str(run), target, *options, "--to", "hf-trainer", "--explain"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    listed, lines = printed.split("To go on from here:")
    assert main(["convert", str(run), f"{target}-2", *options, "--to", "hf-trainer", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    manifest = json.loads((run.parent / "hf-t5" / "statekit.json").read_text())
    assert main(["resume", target]) == 0
    resumed = capsys.readouterr().out
    for one in ASSUMED:
        assert one in listed and one in lines and one in resumed
        assert any(one in said for said in data["plan"]["assumptions"])
        assert any(one in line for line in data["resume"])
        assert any(one in said for said in manifest["state"]["assumptions"])


def test_the_gin_file_beside_a_run_says_what_its_checkpoint_doesnt(run: Path) -> None:
    (run / "config.gin").write_text(GIN)
    report = to_hf(run)
    assert config_in(run.parent / "hf-t5")["dropout_rate"] == 0.1
    beside = report.plan.options["maps"][0]["beside"]["config.gin"]
    assert beside.items() >= {"dropout_rate": 0.1, "feed_forward_proj": "gated-gelu", "d_model": 64}.items()
    [assumed] = [one for one in report.plan.assumptions if one.startswith("Nothing says these of the model")]
    assert "eos_token_id" in assumed and "dropout_rate" not in assumed


def test_what_is_said_goes_before_the_gin_file(run: Path) -> None:
    (run / "config.gin").write_text(GIN)
    to_hf(run, config={"dropout_rate": 0.2})
    assert config_in(run.parent / "hf-t5")["dropout_rate"] == 0.2


def test_a_gin_file_of_another_model_is_refused_by_name(run: Path) -> None:
    (run / "config.gin").write_text(GIN.replace("emb_dim = 64", "emb_dim = 512"))
    with pytest.raises(StateError, match="is 512, and the checkpoint has 64") as error:
        to_hf(run)
    assert "config.gin" in str(error.value) and "d_model" in str(error.value)


def test_a_word_that_the_map_doesnt_know_is_asked_for_in_its_own(run: Path) -> None:
    (run / "config.gin").write_text(GIN.replace("'gelu'", "'quick'"))
    with pytest.raises(UsageError, match="say feed_forward_proj"):
        to_hf(run)
    to_hf(run, config={"feed_forward_proj": "gated-quick_gelu"})
    assert config_in(run.parent / "hf-t5")["feed_forward_proj"] == "gated-quick_gelu"


def test_a_gated_layer_isnt_said_of_weights_that_have_none() -> None:
    plain = t5(gated=False)
    with pytest.raises(StateError, match="gated-silu"):
        load("t5x-t5:hf-t5", {"feed_forward_proj": "gated-silu"}).apply(plain)
    with pytest.raises(StateError, match="'silu'"):
        load("t5x-t5:hf-t5", {"feed_forward_proj": "silu"}).apply(t5(gated=True))
    load("t5x-t5:hf-t5", {"feed_forward_proj": "silu"}).apply(plain)


def test_a_gin_file_is_taken_from_the_command_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.gin"
    mine.write_text(GIN)
    words = ["convert", str(run), str(tmp_path / "hf-t5"), "--map", "t5x-t5:hf-t5", "--to", "hf-trainer"]
    assert main([*words, "--config", str(mine), "--config", "eos_token_id=3"]) == 0
    assert "Nothing says these of the model" not in capsys.readouterr().out
    assert config_in(tmp_path / "hf-t5").items() >= {"dropout_rate": 0.1, "eos_token_id": 3}.items()
    for text, said in (
        ("x.Adafactor.decay_rate = 0.8", "binds nothing"),
        (f"{GIN}\n  head_dim = @f()", "no plain"),
    ):
        mine.write_text(text)
        assert main([*words, "--config", str(mine), "--dry-run"]) != 0
        assert said in capsys.readouterr().err


def test_a_folder_of_hugging_face_says_its_heads_itself(tmp_path: Path) -> None:
    source = scanned()
    there: dict[str, Any] = {
        "map": "t5x-t5-scanned:hf-umt5",
        "config": {"num_heads": 4},
        "hparams": said_of(source),
    }
    statekit.convert(source, tmp_path / "hf", to="hf-trainer", **there)
    statekit.convert(source, tmp_path / "run.pt", **there)
    for one in (tmp_path / "hf", tmp_path / "run.pt"):
        plan = statekit.plan(
            one, tmp_path / "t5x", to="t5x", map="hf-umt5:t5x-t5-scanned", require="statistics"
        )
        assert plan.options["maps"][0]["beside"] == {"config.json": {"num_heads": 4}}
    (tmp_path / "hf" / "statekit.json").unlink()
    hostile = {
        '{"num_heads": "four"}': "expected a number", '{"num_heads": 0}': "expected a number", "[4]": "needs to know",
        "{}": "needs to know", '{"num_': "JSON",
    }  # fmt: skip
    for text, why in hostile.items():
        (tmp_path / "hf" / "checkpoint-1000" / "config.json").write_text(text)
        with pytest.raises(StatekitError, match=why):
            statekit.plan(tmp_path / "hf", tmp_path / "t5x", to="t5x", map="hf-umt5:t5x-t5-scanned")


def test_a_head_that_umt5_would_scale_is_told_of_a_file_and_of_what_is_made_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, config = scanned(), {"num_heads": 4}
    report = statekit.convert(
        source, tmp_path / "run.pt", map="t5x-t5-scanned:hf-umt5", config=config, hparams=said_of(source)
    )
    statekit.convert(tmp_path / "run.pt", tmp_path / "hf", to="hf-trainer")
    assert "lm_head/weight" in {one.target for one in report.plan.mapped}
    for path in ("run.pt", "hf"):
        assert main(["resume", str(tmp_path / path)]) == 0
        lines = capsys.readouterr().out
        assert "model.config.tie_word_embeddings = False" in lines, path
    assert "UMT5ForConditionalGeneration.from_pretrained" in lines


TITAN: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": HEADS, "n_kv_heads": PAIRS, "vocab_size": 40, "multiple_of": 16,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "max_seq_len": 64, "depth_init": True,
}  # fmt: skip
HF: dict[str, Any] = {
    **SAID, "model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "bos_token_id": 1,
    "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "pretraining_tp": 1,
}  # fmt: skip
OPEN = ("rope_parameters", "bos_token_id", "eos_token_id")
"""What torchtitan's configuration doesn't say in plain words."""
CODEBASES: list[tuple[str, bool, dict[str, Any], str]] = [
    ("torchtitan-llama:hf-llama", False, TITAN, "hf-trainer"),
    ("torchtitan-llama:hf-llama", False, HF, "hf-trainer"),
    (
        "torchtitan-qwen3:hf-qwen3",
        True,
        {**TITAN, "head_dim": 8, "hidden_dim": 48, "qk_norm": True},
        "hf-trainer",
    ),
    ("torchtitan-qwen3:hf-qwen3", True, {**HF, "model_type": "qwen3"}, "hf-trainer"),
    ("torchtitan-llama:torchtitan-llama-fused", False, TITAN, "torch"),
    ("torchtitan-llama:torchtitan-llama-fused", False, HF, "torch"),
]


@pytest.mark.parametrize(("name", "norms", "said", "to"), CODEBASES)
def test_a_decoders_configuration_is_taken_from_either_codebases_own(
    name: str, norms: bool, said: dict[str, Any], to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(with_norms(titan()) if norms else titan(), tmp_path / "run.pt")
    (tmp_path / "model.json").write_text(json.dumps(said))
    words = ["convert", str(tmp_path / "run.pt"), str(tmp_path / "out"), "--to", to, "--map", name]
    words += ["--config", str(tmp_path / "model.json")]
    if said.keys() & TITAN.keys() and to == "hf-trainer":
        assert main(words) != 0
        asked = capsys.readouterr().err
        assert [one for one in OPEN if one not in asked] == []
        assert "rms_norm_eps" not in asked
        words += [word for key in OPEN for word in ("--config", f"{key}={json.dumps(HF[key])}")]
    assert main(words) == 0
    if to == "hf-trainer":
        config = config_in(tmp_path / "out")
        assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, PAIRS)
        assert (config["rms_norm_eps"], config["max_position_embeddings"]) == (1e-5, 64)
        assert not config.keys() & {"dim", "n_heads", "multiple_of"}


def test_nanogpts_files_say_their_heads_and_dropout_themselves(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    weights = load("hf-gpt2:nanogpt").apply(dict(model.named_parameters()))
    del weights["lm_head.weight"]  # one tensor with the embedding
    trained(weights, tmp_path / "ckpt.pt")
    saved = torch.load(tmp_path / "ckpt.pt")
    said = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "bias": True, "vocab_size": 40}
    torch.save({**saved, "model_args": {**said, "dropout": 0.1}, "iter_num": 2}, tmp_path / "ckpt.pt")
    options: dict[str, Any] = {"map": "nanogpt:hf-gpt2", "to": "hf-trainer"}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    statekit.convert(tmp_path / "ckpt.pt", tmp_path / "hf", config=tokens, **options)
    made = config_in(tmp_path / "hf")
    assert (made["n_head"], made["resid_pdrop"], made["attn_pdrop"]) == (4, 0.1, 0.1)


def test_mesh_tensorflows_gin_file_is_understood_through_two_maps(tmp_path: Path) -> None:
    from statekit.converters.formats.hparams import read_gin
    from statekit.errors import Faults

    settings, faults = settings_in("mesh-tf-t5:t5x-t5:hf-t5"), Faults()
    bound = {name: vars(read_gin(MESH_GIN, "x.gin", name)) for name in settings.gin}
    values, _ = settings.of_gin(bound, faults)
    assert values == {"feed_forward_proj": "relu", "dropout_rate": 0.05, "num_heads": 2}
    config = (
        load("t5x-t5:hf-t5", values).apply(t5(gated=False)).state.extra["torch"]["pretrained"]["config.json"]
    )
    assert config.items() >= values.items()
    bound["SelfAttention"]["values"]["dropout_rate"] = 0.1
    settings.of_gin(bound, faults)
    assert bool(faults)
