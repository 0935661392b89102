"""Every recorded training of a decoder converts with its optimizer's state, there and back, and goes on in torch.

The runs of maxtext 0.2.5, megatron-core 0.16.1 and Transformers' Trainer lie in recordings/train of the shared set; a
compact copy of two lies in tests/cases/train. A run goes on as the lines say that the conversion prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import statekit
import statekit.torch
from statekit.conversion.registry import container
from statekit.state.exactness import Exactness
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import walk

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
RUNS = Path(__file__).parents[2] / "shared/recordings/train"
needs_all = pytest.mark.skipif(not RUNS.is_dir(), reason="the whole set of recordings isn't here")
LOSS = 4e-6
"""Largest difference of the originals' losses from those of a conversion by hand, in float32."""
MOMENTUM = 2e-4
"""The same where the original rounds its first moment to bfloat16 at each update."""
NORMS = {"llama": 1e-5, "qwen2": 1e-6, "qwen3": 1e-6}
THETA = {"maxtext_llama31": 5e5, "maxtext_llama": 1e4, "megatron_llama": 1e4}


class Run:
    """A recorded run of MaxText or Megatron-Core, and what a conversion of it is told."""

    def __init__(self, name: str, model: str, place: str = "checkpoint/3", **options: Any) -> None:
        self.name, self.model, self.path, self.options = name, model, RUNS / name / place, options

    @property
    def meta(self) -> dict[str, Any]:
        return dict(json.loads((RUNS / self.name / "meta.json").read_text(encoding="utf-8")))

    @property
    def map(self) -> str:
        return f"{self.name.partition('_')[0]}-{self.model}:hf-{self.model}"

    def to_torch(self, target: Path, **options: Any) -> Any:
        """Converts the run to a folder of Trainer."""
        theta = next((one for name, one in THETA.items() if self.name.startswith(name)), 1e6)
        config = {"rms_norm_eps": NORMS[self.model], "rope_theta": theta, "max_position_embeddings": 16}
        if self.name.startswith("megatron"):
            config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        config |= self.options.get("config", {})
        more = {key: one for key, one in self.options.items() if key != "config"}
        return statekit.convert(
            self.path,
            target,
            to="hf-trainer",
            map=self.map,
            config=config,
            assume_defaults=True,
            **more,
            **options,
        )


RATE: dict[str, Any] = {"hparams": {"learning_rate": 1.0}}
MAXTEXT = [
    Run("maxtext_llama_scanned", "llama", config={"rope_type": "default"}, **RATE),
    Run("maxtext_llama31_unscanned_adam_pax", "llama", config={"rope_type": "llama3.1"}, variant="maxtext_pax", **RATE),
    Run("maxtext_llama31_scanned_mu_bf16", "llama", config={"rope_type": "llama3.1"},
        hparams={"learning_rate": 1.0, "gradient_clipping_threshold": 0.5}),
    Run("maxtext_qwen3_scanned", "qwen3", **RATE),
    Run("maxtext_qwen2_scanned", "qwen2", config={"rope_type": "default"}, **RATE),
]  # fmt: skip
MEGATRON = [
    Run(name, model, f"checkpoint/{form}")
    for name, model in [
        ("megatron_llama", "llama"),
        ("megatron_llama_tp2", "llama"),
        ("megatron_qwen3", "qwen3"),
    ]
    for form in ("torch_dist",)
]
BFLOAT16 = [
    Run("megatron_llama_distopt_bf16", "llama", "checkpoint/torch_dist"),
    Run("megatron_qwen3_bf16", "qwen3", "checkpoint/torch_dist"),
]


def ids(runs: list[Run]) -> list[str]:
    return [f"{run.name}-{run.path.name}" for run in runs]


class Loop:
    """The loop of PyTorch that goes on from a folder; the gradients of a group count `scales` times in the norm."""

    def __init__(self, model: Any, optimizer: Any, scales: list[float]) -> None:
        self.model, self.optimizer, self.scales = model, optimizer, scales
        self.bases = [group["lr"] for group in optimizer.param_groups]
        self.named, self.late, self.all_tokens = dict(model.named_parameters()), 0, False

    def slots(self, name: str) -> dict[str, torch.Tensor]:
        return {key: one for key, one in self.optimizer.state[self.named[name]].items() if key != "step"}

    def losses(self, run: Run, clips: float = 1.0) -> list[float]:
        """Returns the losses of updates 5 to 8 on the recorded batches, less the recorded ones."""
        batches, recorded = (
            load_file(RUNS / run.name / f"{part}.safetensors") for part in ("batches", "losses")
        )
        mine = ("tokens", "labels", "loss_mask"), ("inputs", "targets", "targets_segmentation")
        fields = mine["5/tokens" not in batches]
        rates = [rate[0] if isinstance(rate, list) else rate for rate in run.meta["learning_rate"]]
        base = 1.0 if run.name.startswith("maxtext") else rates[4]
        apart = []
        for step in range(5, 9):
            tokens, targets, mask = (torch.from_numpy(batches[f"{step}/{name}"]).long() for name in fields)
            mask = mask != 0
            logits = self.model(tokens).logits.transpose(1, 2)
            each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            loss = (each * mask).sum() / (mask.numel() if self.all_tokens else mask.sum())
            apart.append(abs(float(loss.detach()) - float(recorded[str(step)])))
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            pairs = list(zip(self.optimizer.param_groups, self.scales, self.bases, strict=True))
            grads = [param.grad * c for group, c, _ in pairs for param in group["params"]]
            norm = torch.nn.utils.get_total_norm(grads)
            torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), clips, norm)
            for group, _, base_rate in pairs:
                group["lr"] = rates[step - 1 - self.late] * base_rate / base
            self.optimizer.step()
        return apart


def loop(run: Run, folder: Path) -> Loop:
    """Converts a run and returns its loop; every parameter and slot stands in the plan."""
    plan = run.to_torch(folder).plan
    made = {one.target for one in plan.mapped}
    assert {path for group in plan.state["groups"] for path in group["paths"]} == made
    assert all({*one.slots} >= {"m", "v"} for one in plan.mapped)
    facts = [
        (plan.state["groups"][fact.groups[0]]["paths"], fact.value)
        for fact in plan.facts
        if fact.name == "scaled"
    ]
    return in_adamw(
        folder / "checkpoint-4", {path.replace("/", "."): value for paths, value in facts for path in paths}
    )


def in_adamw(folder: Path, scales: Mapping[str, float]) -> Loop:
    """Returns the loop of torch's AdamW, as the folder's groups have it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    named = dict(model.named_parameters())
    manifest = json.loads((folder.parent / "statekit.json").read_text(encoding="utf-8"))
    names = [[path.replace("/", ".") for path in group["paths"]] for group in manifest["state"]["groups"]]
    optimizer = torch.optim.AdamW([{"params": [named[name] for name in part]} for part in names])
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    return Loop(model, optimizer, [scales.get(part[0], 1.0) for part in names])


def bound(run: Run) -> float:
    return MOMENTUM if "mu_bf16" in run.name else LOSS


def clipping(run: Run) -> float:
    return float(run.options.get("hparams", {}).get("gradient_clipping_threshold", 1.0))


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize("run", [*MAXTEXT, *MEGATRON], ids=ids([*MAXTEXT, *MEGATRON]))
def test_a_recorded_run_goes_on_in_torch_with_the_recorded_losses(run: Run, tmp_path: Path) -> None:
    losses = loop(run, tmp_path / "hf").losses(run, clipping(run))
    assert max(losses) <= bound(run), losses


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize("run", [*MAXTEXT, *MEGATRON], ids=ids([*MAXTEXT, *MEGATRON]))
def test_a_recorded_run_comes_back_from_hugging_face_with_every_array_equal(run: Run, tmp_path: Path) -> None:
    run.to_torch(tmp_path / "hf")
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, **run.options.get("config", {})}
    source, target = run.map.split(":")
    if source.startswith("maxtext"):
        config["layers"] = "unscanned" if "unscanned" in run.name else "scanned"
        config.setdefault("rope_type", "default")
    layout = "maxtext-orbax" if source.startswith("maxtext") else "megatron"
    chain = f"{target}:{source}"
    report = statekit.convert(
        tmp_path / "hf", tmp_path / "back", to=layout, map=chain, config=config, require="rounding"
    )
    assert {one.exactness for one in report.plan.mapped} == {Exactness.BITWISE}
    before, after = (
        arrays(place, "orbax" if "maxtext" in layout else "megatron")
        for place in (run.path, tmp_path / "back")
    )
    random = {name for name in before if "nnx_aux" in name or "_extra_state" in name or "rng_state" in name}
    wide = "mu_bf16" in run.name or "adam_pax" in run.name  # their moments went through another form
    compared = {name for name in before.keys() - random if not (wide and "opt_state" in name)}
    assert {
        name for name in compared if name not in after or not np.array_equal(before[name], after[name])
    } == set()


def arrays(path: Path, name: str) -> dict[str, Any]:
    with container(name).open(path) as checkpoint:
        return {
            "/".join(map(str, keys)): leaf.read()
            for keys, leaf in walk(checkpoint.tree)
            if isinstance(leaf, Tensor)
        }


Mistake = Callable[[Loop], None]


def queries(loop: Loop) -> list[str]:
    return [name for name in loop.named if name.endswith("q_proj.weight")]


def query_not_scaled(loop: Loop) -> None:
    for name in queries(loop):
        loop.named[name].data /= 4


def query_moments_not_scaled(loop: Loop) -> None:
    for name in queries(loop):
        slots = loop.slots(name)
        slots["exp_avg"].mul_(4), slots["exp_avg_sq"].mul_(16)


def query_by_the_others_rule(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group |= {"weight_decay": 0.1, "eps": 1e-8}
    loop.bases = [1.0] * len(loop.bases)
    for group in loop.optimizer.param_groups:
        group["lr"] = 1.0


def plain_norm(loop: Loop) -> None:
    loop.scales = [1.0] * len(loop.scales)


def fresh_moments(loop: Loop) -> None:
    for name in loop.named:
        slots = loop.slots(name)
        slots["exp_avg"].zero_(), slots["exp_avg_sq"].zero_()


def moments_not_transposed(loop: Loop) -> None:
    for name in (name for name in loop.named if name.endswith("down_proj.weight")):
        for slot in loop.slots(name).values():
            slot.copy_(slot.T.contiguous().reshape(slot.shape))


def halves_exchanged(loop: Loop) -> None:
    for name in (name for name in loop.named if name.endswith("gate_proj.weight")):
        for slot, other in zip(
            loop.slots(name).values(), loop.slots(name.replace("gate", "up")).values(), strict=True
        ):
            kept = slot.clone()
            slot.copy_(other), other.copy_(kept)


def rope_of_moments_not_permuted(loop: Loop) -> None:
    for name in (name for name in loop.named if name.endswith(("q_proj.weight", "k_proj.weight"))):
        for slot in loop.slots(name).values():
            slot.copy_(slot.reshape(-1, 2, 8, slot.shape[1]).transpose(1, 2).reshape(slot.shape))


def norms_less_one(loop: Loop) -> None:
    for name in (name for name in loop.named if "norm" in name):
        loop.named[name].data -= 1


def corrected_moments_as_averages(loop: Loop) -> None:
    for name in loop.named:
        slots = loop.slots(name)
        slots["exp_avg"].div_(1 - 0.9**4), slots["exp_avg_sq"].div_(1 - 0.95**4)


def norms_decay(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["weight_decay"] = 0.1


def mean_over_all_tokens(loop: Loop) -> None:
    loop.all_tokens = True


def rate_one_late(loop: Loop) -> None:
    loop.late = 1


LLAMA, PAX, QWEN3 = MAXTEXT[0], MAXTEXT[1], MEGATRON[-1]
IN_THE_STATE: list[tuple[Run, Mistake]] = [
    *((LLAMA, one) for one in (query_not_scaled, query_moments_not_scaled, query_by_the_others_rule)),
    *((LLAMA, one) for one in (fresh_moments, moments_not_transposed, norms_less_one)),
    (PAX, corrected_moments_as_averages), (PAX, rope_of_moments_not_permuted),
    (QWEN3, halves_exchanged), (QWEN3, norms_decay), (QWEN3, fresh_moments),
]  # fmt: skip
IN_THE_LOOP: list[tuple[Run, Mistake]] = [
    (LLAMA, plain_norm), (LLAMA, rate_one_late), (LLAMA, mean_over_all_tokens), (QWEN3, mean_over_all_tokens),
]  # fmt: skip


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize(("run", "mistake"), [*IN_THE_STATE, *IN_THE_LOOP])
def test_a_recorded_mistake_exceeds_the_tolerance_and_attest_finds_it_in_the_state(
    run: Run, mistake: Mistake, tmp_path: Path
) -> None:
    going = loop(run, tmp_path / "hf")

    def findings() -> int:
        said = statekit.torch.attest(going.optimizer, going.model, tmp_path / "hf/checkpoint-4")
        return len(said.findings)

    assert findings() == 0
    mistake(going)
    assert (findings() > 0) is ((run, mistake) in IN_THE_STATE)
    assert max(going.losses(run, clipping(run))) > 10 * LOSS


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize("run", BFLOAT16, ids=ids(BFLOAT16))
def test_a_run_in_bfloat16_brings_its_masters(run: Run, tmp_path: Path) -> None:
    """Losses of two forward passes in bfloat16 differ; the masters and moments are the recorded ones to the bit."""
    plan = run.to_torch(tmp_path / "hf").plan
    assert all({*one.slots} >= {"m", "v"} for one in plan.mapped)
    assert {one.exactness for one in plan.mapped} == {Exactness.BITWISE}


@needs_all
@pytest.mark.slow
@pytest.mark.parametrize(("name", "allowed"), [("hf_qwen3", "rounding"), ("hf_llama", "statistics")])
def test_a_run_of_trainer_becomes_the_checkpoint_that_maxtext_wrote(
    name: str, allowed: str, tmp_path: Path
) -> None:
    """Its own, of the same values converted by hand; MaxText makes random streams anew where they are missing."""
    model, rope = name.partition("_")[2], "default" if name == "hf_qwen3" else "llama3.1"
    report = statekit.convert(
        RUNS / name / "checkpoint/checkpoint-4", tmp_path / "run", to="maxtext-orbax", require=allowed,
        map=f"hf-{model}:maxtext-{model}", config={"layers": "scanned", "rope_type": rope},
    )  # fmt: skip
    original = arrays(RUNS / name / "maxtext_checkpoint/3", "orbax")
    ours = arrays(tmp_path / "run/3", "orbax")
    assert ours.keys() == {one for one in original if not one.startswith("nnx_aux")}
    assert all(np.array_equal(array, original[one]) for one, array in ours.items())
    assert {one: array.dtype for one, array in ours.items()} == {one: original[one].dtype for one in ours}
    step = json.loads((tmp_path / "run/3/_CHECKPOINT_METADATA").read_text(encoding="utf-8"))
    assert step["item_handlers"].keys() == {"items"} and step["custom_metadata"] == {"scan_layers": True}
    if name == "hf_llama":
        assert report.plan.headline.startswith("STATISTICS")
        assert "MaxText has no learning rate by parameter" in report.plan.headline


@needs_all
@pytest.mark.slow
def test_maxtexts_muon_goes_on_in_torch_with_the_recorded_losses(tmp_path: Path) -> None:
    """Its kernels have an axis of layers and one or two of heads: which are inputs and outputs follows their names."""
    transformers = pytest.importorskip("transformers")
    run = Run("maxtext_llama_scanned_muon", "llama", config={"rope_type": "default"},
              hparams={"learning_rate": 1.0, "gradient_clipping_threshold": 0})  # fmt: skip
    run.to_torch(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf/checkpoint-4").train()
    rates = {"adamw": 1.0, "muon": 1.0}
    optimizer = statekit.torch.load_optimizer(tmp_path / "hf", model.named_parameters(), lr=rates)
    going = Loop(model, optimizer, [group["lr"] for group in optimizer.param_groups])
    assert sorted(going.scales) == [1.0, 1.0, 4.0]
    assert max(going.losses(run)) <= LOSS
    config = {"rope_type": "default", "layers": "scanned"}
    report = statekit.convert(
        tmp_path / "hf", tmp_path / "back", to="maxtext-orbax", map="hf-llama:maxtext-llama", config=config
    )
    assert report.plan.exactness is Exactness.BITWISE
    before, after = (arrays(place, "orbax") for place in (run.path, tmp_path / "back"))
    kept = {name for name in before if "nnx_aux" not in name}
    assert {
        name for name in kept if name not in after or not np.array_equal(before[name], after[name])
    } == set()
