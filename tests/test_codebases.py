"""MaxText, Megatron-Core and DeepSpeed go on from what is written for them: `make test-codebases`.

Each test drives the original, with its own loader, in a process of its own, on recorded batches or gradients.
STATEKIT_MEGATRON names a folder with megatron-core 0.16.1, STATEKIT_DEEPSPEED one with DeepSpeed 0.19, and
STATEKIT_MAXTEXT a Python with MaxText 0.2.5; a test whose original is missing is skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import statekit
from goldens import GOLDEN

HERE = Path(__file__).parent
RUNS = HERE.parents[1] / "shared/recordings/train"
LOSS = 4e-6
"""Largest difference of the originals' losses from those of a conversion by hand, in float32."""
OF_RANKS = 1e-6
"""Largest difference of parameters of about 1 whose gradients are means over other ranks: four of their roundings."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RUNS.is_dir(), reason="the whole set of recordings isn't here"),
]
in_megatron = pytest.mark.skipif(
    "STATEKIT_MEGATRON" not in os.environ, reason="STATEKIT_MEGATRON names no folder with Megatron-Core"
)
in_maxtext = pytest.mark.skipif(
    "STATEKIT_MAXTEXT" not in os.environ, reason="STATEKIT_MAXTEXT names no Python with MaxText"
)
in_deepspeed = pytest.mark.skipif(
    "STATEKIT_DEEPSPEED" not in os.environ, reason="STATEKIT_DEEPSPEED names no folder with DeepSpeed"
)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
IN_LLAMA = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 16}
IN_QWEN3 = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 16}


def meta_of(name: str) -> dict[str, Any]:
    return dict(json.loads((RUNS / name / "meta.json").read_text(encoding="utf-8")))


def driven(python: str, script: str, *words: str, **environment: str) -> Any:
    """Returns what an original prints as its last line: losses by update, or differences."""
    called = subprocess.run(
        [python, str(HERE / script), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert called.returncode == 0, called.stderr[-2000:]
    return json.loads(called.stdout.splitlines()[-1])


def apart(losses: dict[str, float], name: str) -> float:
    """Returns how far losses are from those that the run of a recording had at the same updates."""
    recorded = load_file(RUNS / name / "losses.safetensors")
    assert losses.keys() == {"5", "6", "7", "8"}
    return max(abs(loss - float(recorded[step])) for step, loss in losses.items())


def megatrons(run: Path, name: str, **changed: Any) -> dict[str, float]:
    """Returns the losses of updates 5 to 8 in Megatron-Core, which saves again; that is read, too."""
    meta = meta_of(name)
    arguments = {**meta["arguments"], **changed}
    rows = -(-arguments["vocab"] // arguments["pad"]) * arguments["pad"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rates = [rate[0] if isinstance(rate, list) else rate for rate in meta["learning_rate"]]
    options = {**arguments, "rows": rows, "rates": rates, "port": port}
    (run / "options.json").write_text(json.dumps(options))
    words = (run / "iter_0000004", RUNS / name / "batches.safetensors", run / "options.json", run / "saved")
    folder = os.environ["STATEKIT_MEGATRON"]
    losses: dict[str, float] = driven(
        sys.executable, "megatron_driving.py", *map(str, words), PYTHONPATH=folder
    )
    with statekit.open(run / "saved") as opened:
        assert opened.state.counts.updates == 8
    return losses


@in_megatron
@pytest.mark.parametrize(
    "name",
    [
        "megatron_llama",
        "megatron_llama_tp2",
        "megatron_qwen3",
        "megatron_qwen3_bf16",
        "megatron_llama_distopt_bf16",
    ],
)
@pytest.mark.parametrize("form", ["torch", "torch_dist"])
def test_megatron_core_goes_on_from_its_runs_as_they_are_written_again(
    name: str, form: str, tmp_path: Path
) -> None:
    """Of each optimizer and both formats; the format `torch` has names of a local spec and pieces of ranks."""
    to: dict[str, Any] = {"layout": "megatron-distributed"} if "distopt" in name else {}
    statekit.convert(RUNS / name / "checkpoint" / form, tmp_path / "run", to="megatron", **to)
    assert apart(megatrons(tmp_path / "run", name), name) <= (LOSS if "tp2" in name else 0.0)


@in_megatron
@pytest.mark.parametrize(
    ("name", "model", "config"),
    [("megatron_llama", "llama", IN_LLAMA), ("megatron_qwen3", "qwen3", IN_QWEN3)],
)
def test_megatron_core_goes_on_from_its_run_on_the_way_back_from_hugging_face(
    name: str, model: str, config: dict[str, Any], tmp_path: Path
) -> None:
    there, back = f"megatron-{model}:hf-{model}", f"hf-{model}:megatron-{model}"
    statekit.convert(
        RUNS / name / "checkpoint/torch_dist",
        tmp_path / "hf",
        to="hf-trainer",
        map=there,
        config=HEADS | config,
    )
    (
        tmp_path / "hf/statekit.json"
    ).unlink()  # so that nothing of Megatron-Core comes back but what a map makes
    statekit.convert(
        tmp_path / "hf/checkpoint-4", tmp_path / "run", to="megatron", map=back, assume_defaults=True
    )
    assert apart(megatrons(tmp_path / "run", name), name) <= LOSS


@in_megatron
@pytest.mark.parametrize("layers", ["stacked", "numbered"])
def test_megatron_core_goes_on_with_a_run_of_trainer(layers: str, tmp_path: Path) -> None:
    statekit.convert(
        RUNS / "hf_qwen3/checkpoint/checkpoint-4", tmp_path / "run", to="megatron", map="hf-qwen3:megatron-qwen3",
        config={"layers": layers},
    )  # fmt: skip
    asked = {"groups": 2, "qk_norm": 1, "rms_eps": 1e-6, "rope_base": 1000000, "pad": 1, "bf16": 0, "dist_opt": 0,
             "tied": 0, "nonhom": 0, "bias": 0, "kv": 16}  # fmt: skip
    assert apart(megatrons(tmp_path / "run", "hf_qwen3", **asked), "hf_qwen3") <= LOSS


def maxtexts(run: Path, name: str, **changed: Any) -> dict[str, float]:
    """Returns the losses of updates 5 to 8 in MaxText, or of all from 1 on where there is no checkpoint."""
    (run / "overrides.json").write_text(json.dumps(meta_of(name)["overrides"] | changed))
    words = (run, RUNS / name / "batches.safetensors", run / "overrides.json")
    python = os.environ["STATEKIT_MAXTEXT"]
    losses: dict[str, float] = driven(python, "maxtext_driving.py", *map(str, words), JAX_PLATFORMS="cpu")
    return losses


@in_maxtext
@pytest.mark.parametrize(
    "name",
    [
        "maxtext_llama_scanned", "maxtext_llama31_unscanned_adam_pax", "maxtext_llama31_scanned_mu_bf16",
        "maxtext_qwen2_scanned", "maxtext_qwen3_scanned", "maxtext_llama_scanned_muon",
    ],
)  # fmt: skip
def test_maxtext_goes_on_from_its_runs_as_they_are_written_again(name: str, tmp_path: Path) -> None:
    """Of adamw, adam_pax, muon, and with a momentum in bfloat16; MaxText makes its random streams anew."""
    (tmp_path / "run").mkdir()
    variant: dict[str, Any] = {"variant": "maxtext_pax"} if "pax" in name else {}
    statekit.convert(
        RUNS / name / "checkpoint/3",
        tmp_path / "run/checkpoints",
        to="maxtext-orbax",
        assume_defaults=True,
        **variant,
    )
    assert apart(maxtexts(tmp_path / "run", name), name) <= LOSS


@in_maxtext
@pytest.mark.parametrize(
    "options",
    [
        {"adamw_mask": "['scale']"},
        {"per_device_batch_size": 2, "gradient_accumulation_steps": 2},
        {"skip_step_on_spikes": True, "skip_step_interval": 4},
    ],
    ids=lambda options: next(reversed(options)),
)
def test_maxtext_goes_on_from_a_run_with_options_of_its_own(options: dict[str, Any], tmp_path: Path) -> None:
    """Seen red: a run that had skipped a step lay in the folder before."""
    name = "maxtext_qwen3_scanned"
    for run in ("whole", "again"):
        (tmp_path / run).mkdir()
    maxtexts(tmp_path / "whole", name, **options, steps=4)
    checkpoints = tmp_path / "again/checkpoints"
    statekit.convert(tmp_path / "whole/checkpoints/3", checkpoints, to="maxtext-orbax", assume_defaults=True)
    again = maxtexts(tmp_path / "again", name, **options)
    assert again.keys() == {"5", "6", "7", "8"} and again == maxtexts(tmp_path / "whole", name, **options)


@in_deepspeed
@pytest.mark.parametrize(
    ("case", "stage", "ranks"), [("zero1", 1, 3), ("zero2", 3, 2), ("zero3", 2, 1), ("bf16_zero1", 3, 4)]
)
def test_deepspeed_goes_on_under_another_stage_and_another_number_of_ranks(
    case: str, stage: int, ranks: int, tmp_path: Path
) -> None:
    """The recorded runs had two ranks. It saves again, which is read."""
    bundle = GOLDEN / f"torch_formats/adamw_deepspeed_{case}"
    statekit.convert(bundle / "checkpoint", tmp_path / "run", to="deepspeed-universal")
    with statekit.open(tmp_path / "run") as opened:
        decays = [
            (group.paths, group.hyperparameters["weight_decay_rate"])
            for group in opened.state.optimizer.groups
        ]
    groups = [{"paths": paths, "weight_decay": decay} for paths, decay in decays]
    (tmp_path / "groups.json").write_text(json.dumps(groups))
    words = (tmp_path / "run", bundle, tmp_path / "groups.json", stage, ranks, tmp_path / "saved")
    folder = os.environ["STATEKIT_DEEPSPEED"]
    apart = driven(sys.executable, "deepspeed_driving.py", *map(str, words), PYTHONPATH=folder)
    assert apart[0] == 0.0 and len(apart) == 5 and max(apart) <= OF_RANKS, apart
    with statekit.open(tmp_path / "saved") as opened:
        assert opened.state.counts.updates == 8


@in_deepspeed
@pytest.mark.parametrize(("name", "stage", "ranks"), [("experts_zero0", 1, 2), ("experts_zero1_bf16", 2, 1)])
def test_deepspeed_runs_the_lines_of_experts(name: str, stage: int, ranks: int, tmp_path: Path) -> None:
    """The recorded runs had ep_size 2. Seen red: no group was marked as of experts."""
    recorded = HERE / "cases/deepspeed_ranks" / name
    statekit.convert(recorded, tmp_path / "run", to="deepspeed-universal")
    manifest = json.loads((tmp_path / "run/statekit.json").read_text())
    text = "\n".join(manifest["resume"]).replace("/path/to/checkpoint", str(tmp_path / "run"))
    (tmp_path / "lines.py").write_text(text)
    words = (tmp_path / "lines.py", recorded / "engine.safetensors", stage, ranks, tmp_path / "saved")
    folder = os.environ["STATEKIT_DEEPSPEED"]
    assert driven(sys.executable, "deepspeed_experts.py", *map(str, words), PYTHONPATH=folder) == [48, 0.0]
    with statekit.open(tmp_path / "saved") as opened:
        assert opened.state.counts.updates == 4
