"""MaxText's config.yml beside a checkpoint, or named by the user, says what no checkpoint of MaxText does."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.cli.main import main
from statekit.conversion.contracts import Hints
from statekit.conversion.resume import of_plan, resume_lines
from statekit.converters.layouts.optax.maxtext import LAYOUT as MAXTEXT
from statekit.errors import UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.maps.model_map import maps_of
from statekit.tensors.tensor import in_memory

pytestmark = pytest.mark.torch
CASE = Path(__file__).parent / "cases/train/maxtext_llama_scanned/3"
MAP = "maxtext-llama:hf-llama"
CONFIG = """adam_b1: 0.9
adam_b2: 0.95
adam_eps: 1.0e-08
adam_eps_root: 0.0
adam_weight_decay: 0.1
adamw_mask:
- scale
base_emb_dim: 16
decoder_block: llama2
emb_dim: 32
gradient_clipping_threshold: 0.5  # base.yml has 1.0
learning_rate: 0.01
learning_rate_final_fraction: 0.1
learning_rate_schedule_steps: 10
logical_axis_rules:
- - activation_batch
  - - data
    - fsdp
lr_schedule_type: cosine
max_target_length: 16
model_name: MODEL
mu_dtype: ''
normalization_layer_epsilon: 1.0e-05
opt_type: adamw
rope_max_timescale: 10000
rope_type: default
rope_use_scale: true
scan_layers: true
steps: 8
vocab_size: 97
warmup_steps_fraction: 0.25
"""


def run_with(tmp_path: Path, model: str = "default", beside: bool = True) -> Path:
    """Returns a run of MaxText with its configuration, which lies beside its checkpoints or elsewhere."""
    shutil.copytree(CASE, tmp_path / "run/checkpoints/3")
    (tmp_path / ("run" if beside else ".") / "config.yml").write_text(CONFIG.replace("MODEL", model))
    return tmp_path / "run/checkpoints"


def test_a_configuration_beside_a_checkpoint_says_optimizer_schedule_and_model(tmp_path: Path) -> None:
    report = statekit.convert(run_with(tmp_path), tmp_path / "hf", to="hf-trainer", map=MAP)
    plan = report.plan
    groups = plan.state["groups"]
    settings = [group["hyperparameters"] for group in groups]
    # Norms don't decay by the mask; the query's group has four times the rate and a quarter of the rest.
    assert sorted({each["weight_decay_rate"] for each in settings}) == [0.0, 0.025, 0.1]
    assert {each["global_norm_clip_threshold"] for each in settings} == {0.5}
    assert groups[0]["known_from"]["beta2"] == "file"
    lines = "\n".join(resume_lines(of_plan(plan, ()), plan.state))
    code = lines[lines.index("[lambda step") :].partition(", last_epoch")[0]
    for factor, rate in zip([1.0, 4.0, 1.0], sorted_rates(eval(code, {"math": math}), groups), strict=True):
        # The recorded rates of maxtext_llama_scanned: its own file has no schedule's function.
        recorded = [0.0, 0.005, 0.01, 0.009554359, 0.008305704, 0.006501344, 0.0044986554, 0.002694296]
        assert [rate(n) for n in range(8)] == pytest.approx([factor * each for each in recorded], rel=1e-6)


def sorted_rates(functions: list[Any], groups: list[Any]) -> list[Any]:
    """Returns the functions of the groups that decay first, the query's second, the norms' last."""
    order = sorted(
        range(3), key=lambda n: [0.1, 0.025, 0.0].index(groups[n]["hyperparameters"]["weight_decay_rate"])
    )
    return [functions[n] for n in order]


@pytest.mark.parametrize(
    ("model", "kind"), [("default", "default"), ("llama3.1-8b", "llama3"), ("llama3-8b", "default")]
)
def test_the_name_of_the_model_decides_what_rope_turns(model: str, kind: str, tmp_path: Path) -> None:
    """MaxText asks for llama3.1 in model_name or rope_type; base.yml's rope_type stays default."""
    statekit.convert(run_with(tmp_path, model), tmp_path / "hf", to="hf-trainer", map=MAP)
    config = json.loads((tmp_path / "hf/checkpoint-4/config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == kind and config["rms_norm_eps"] == 1e-5


def test_a_configuration_is_read_by_name_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_with(tmp_path, beside=False)
    words = ["convert", str(run), str(tmp_path / "hf"), "--to", "hf-trainer", "--map", MAP]
    assert main(words) == 3
    assert "learning_rate" in capsys.readouterr().err
    config = str(tmp_path / "config.yml")
    assert main([*words, "--config", config, "--hparams", config, "--explain"]) == 0
    assert "0.04 * min(step / 2, 1)" in capsys.readouterr().out


def test_a_model_that_the_map_has_no_word_for_is_refused(tmp_path: Path) -> None:
    run = run_with(tmp_path)
    config = tmp_path / "run/config.yml"
    config.write_text(config.read_text().replace("rope_type: default", "rope_type: yarn"))
    with pytest.raises(UsageError, match="no word for"):
        statekit.convert(run, tmp_path / "hf", to="hf-trainer", map=MAP)


@pytest.mark.parametrize(
    "name", ["maxtext-gemma:hf-gemma", "hf-mixtral:megatron-mixtral", "maxtext-deepseek3:hf-llama"]
)
def test_models_without_a_map_are_refused_by_name_with_the_reason(name: str) -> None:
    with pytest.raises(UsageError, match=r"examined|none of it was run"):
        maps_of(name)


def test_a_block_without_a_map_is_no_word_that_is_missing() -> None:
    with pytest.raises(UsageError, match="experts"):
        maps_of("maxtext-llama:hf-llama", {"decoder_block": "mixtral"}, builds=False)


def test_flax_writes_a_chain_as_a_mapping_and_its_moments_are_no_parameters(tmp_path: Path) -> None:
    """Msgpack has no tuples: `opt_state` is {"0": ..., "1": ...}, which isn't an optimizer in a wrapper."""
    statekit.convert(CASE, tmp_path / "flax", to="flax")
    differences = statekit.diff(CASE, tmp_path / "flax").differences
    assert {difference.what for difference in differences} <= {"rule"}  # Optax rounds otherwise


def test_the_folder_counts_steps_that_a_watch_for_spikes_skipped(tmp_path: Path) -> None:
    """MaxText 0.2.5 went on from there with the run's own losses. Seen red: folder 2, as of three updates."""
    weights = {
        "decoder": {"norm": {"scale": in_memory(np.ones(3, np.float32))}},
        "token_embedder": {"embedding": in_memory(np.ones((5, 3), np.float32))},
    }
    count = in_memory(np.asarray(3, np.int32))
    steps, losses = in_memory(np.asarray(4, np.int32)), in_memory(np.ones(4, np.float32))
    adam = {"count": count, "mu": weights, "nu": weights}
    watch = {
        "inner_state": {"0": adam, "1": None, "2": {"count": count}},
        "losses": losses,
        "grad_norms": losses,
    }
    watch |= {"count": steps, "is_skipped": in_memory(np.asarray(False))}
    tree = {"params": {"params": weights}, "opt_state": watch, "step": steps}
    checkpoint = Checkpoint("orbax", tmp_path, tree)
    assert MAXTEXT.detect(checkpoint) is not None
    state = MAXTEXT.decode(checkpoint, Hints())
    assert (state.counts.updates, MAXTEXT.encode(state).step) == (3, 3)
