"""Decoders that MaxText and Megatron-Core trained go on in Hugging Face's class with their optimizer state.

`tests/cases/train` has runs of maxtext 0.2.5 and megatron-core 0.16.1 with batches and losses of all eight updates.
The checkpoint is that of the fourth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import statekit
import statekit.torch
from statekit.errors import InexactError, UsageError
from statekit.maps.links import carried_through
from statekit.maps.model_map import maps_of
from statekit.maps.operations import Piece
from statekit.maps.scale import Scale
from statekit.state.exactness import Exactness
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import in_memory

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
RUNS = Path(__file__).parent / "cases" / "train"
LOSS = 4e-6
"""Seen between the originals' losses and those of a conversion by hand, in float32."""
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}  # fmt: skip


def mapped(path: Path, name: str, said: Mapping[str, Any], hparams: Mapping[str, Any]) -> TrainState:
    with statekit.open(path, hparams=hparams or None) as opened:
        state, _ = carried_through(opened.state, maps_of(name, said, builds=False))
        params = {path: in_memory(param.read()) for path, param in state.params.items()}
        slots = {
            path: {name: in_memory(slot.read()) for name, slot in of_path.items()}
            for path, of_path in state.slots.items()
        }
        return replace(state, params=params, slots=slots)


def maxtext() -> TrainState:
    hparams = {"learning_rate": 1.0, "beta2": 0.95, "weight_decay_rate": 0.1}
    return mapped(RUNS / "maxtext_llama_scanned/3", "maxtext-llama:hf-llama", {"rope": "halves"}, hparams)


def megatron() -> TrainState:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return mapped(RUNS / "megatron_qwen3/torch_dist", "megatron-qwen3:hf-qwen3", heads, {})


def optimizer_of(model: Any, state: TrainState, base: float) -> Any:
    """Returns torch's AdamW with a state's groups and slots; a group's rate is relative to `base`."""
    named = {name.replace(".", "/"): param for name, param in model.named_parameters()}
    with torch.no_grad():
        for path, param in named.items():
            param.copy_(torch.from_numpy(state.params[path].read()))
    groups = [
        {"params": [named[path] for path in group.paths], "ratio": group.hyperparameters["learning_rate"] / base,
         "betas": (0.9, 0.95), "eps": group.hyperparameters["epsilon"],
         "weight_decay": group.hyperparameters["weight_decay_rate"]}
        for group in state.optimizer.groups
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.0)
    for path, slots in state.slots.items():
        optimizer.state[named[path]] = {
            "step": torch.tensor(float(state.counts.updates)),
            "exp_avg": torch.from_numpy(slots["m"].read().copy()),
            "exp_avg_sq": torch.from_numpy(slots["v"].read().copy()),
        }
    return optimizer


def losses(model: Any, optimizer: Any, run: Path, rates: list[float]) -> float:
    """Trains updates 5 to 8 on the recorded batches; returns the largest difference from the recorded losses."""
    batches, recorded = load_file(run / "batches.safetensors"), load_file(run / "losses.safetensors")
    fields = (
        ("tokens", "labels", "loss_mask")
        if "5/tokens" in batches
        else ("inputs", "targets", "targets_segmentation")
    )
    worst = 0.0
    for step, rate in enumerate(rates, 5):
        tokens, targets, mask = (torch.from_numpy(batches[f"{step}/{name}"]).long() for name in fields)
        mask = mask != 0
        logits = model(tokens).logits
        each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        loss = (each * mask).sum() / mask.sum()
        worst = max(worst, abs(float(loss.detach()) - float(recorded[str(step)])))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        ratios = {param: group["ratio"] for group in optimizer.param_groups for param in group["params"]}
        norm = sum(float((param.grad * ratios[param]).double().pow(2).sum()) for param in ratios) ** 0.5
        for param in ratios:
            param.grad *= min(1.0, 1.0 / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["ratio"]
        optimizer.step()
    return worst


def plain_rate(state: TrainState, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group |= {"ratio": 1.0, "weight_decay": 0.1, "eps": 1e-8}


def plain_moments(state: TrainState, optimizer: Any) -> None:
    """Takes the moments of the query as MaxText has them."""
    for group in optimizer.param_groups:
        for param in group["params"] if group["ratio"] != 1 else ():
            optimizer.state[param]["exp_avg"] *= 4
            optimizer.state[param]["exp_avg_sq"] *= 16


def right(state: TrainState, optimizer: Any) -> None:
    pass


MAXTEXT_RATES = [0.008305704221129417, 0.006501344032585621, 0.004498655442148447, 0.0026942959520965815]


@pytest.mark.parametrize(("change", "goes_on"), [(right, True), (plain_rate, False), (plain_moments, False)])
def test_maxtexts_llama_goes_on_with_the_recorded_losses_and_each_mistake_shows(
    change: Callable[[TrainState, Any], None], goes_on: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **SIZES,
    )
    model, state = transformers.LlamaForCausalLM(config), maxtext()
    optimizer = optimizer_of(model, state, 1.0)
    assert {group["ratio"] for group in optimizer.param_groups} == {1.0, 4.0}
    change(state, optimizer)
    worst = losses(model, optimizer, RUNS / "maxtext_llama_scanned", MAXTEXT_RATES)
    assert (worst <= LOSS) is goes_on, worst


def halves_exchanged(state: TrainState, optimizer: Any) -> None:
    """Takes the moments of gates for those of ups."""
    named = {id(param): path for path, param in zip(
        [path for group in state.optimizer.groups for path in group.paths],
        [param for group in optimizer.param_groups for param in group["params"]], strict=True)}  # fmt: skip
    of = {path: optimizer.state[param] for param in optimizer.state if (path := named[id(param)])}
    for i in range(2):
        gate, up = (of[f"model/layers/{i}/mlp/{name}_proj/weight"] for name in ("gate", "up"))
        for slot in ("exp_avg", "exp_avg_sq"):
            gate[slot], up[slot] = up[slot], gate[slot]


MEGATRON_RATES = [0.008681980515339464, 0.007222075445642905, 0.0055000000000000005, 0.0037779245543570965]


@pytest.mark.parametrize(("change", "goes_on"), [(right, True), (halves_exchanged, False)])
def test_megatrons_qwen_goes_on_with_the_recorded_losses_and_a_mistake_shows(
    change: Callable[[TrainState, Any], None], goes_on: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        **SIZES,
    )
    model, state = transformers.Qwen3ForCausalLM(config), megatron()
    optimizer = optimizer_of(model, state, MEGATRON_RATES[0])
    change(state, optimizer)
    worst = losses(model, optimizer, RUNS / "megatron_qwen3", MEGATRON_RATES)
    assert (worst <= LOSS) is goes_on, worst


def bits(state: TrainState) -> dict[str, bytes]:
    named = dict(state.params)
    named |= {f"{path} {slot}": t for path, slots in state.slots.items() for slot, t in slots.items()}
    return {name: tensor.read().tobytes() for name, tensor in named.items()}


@pytest.mark.parametrize(
    ("state", "chain", "said"),
    [
        (maxtext, "hf-llama:maxtext-llama:hf-llama", {"rope": "pairs"}),
        (megatron, "hf-qwen3:maxtext-qwen3:hf-qwen3:megatron-qwen3:hf-qwen3", {}),
    ],
)
def test_there_and_back_every_array_is_equal(
    state: Callable[[], TrainState], chain: str, said: Mapping[str, Any]
) -> None:
    before = state()
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    after, mapped = carried_through(before, maps_of(chain, {**heads, **said}, builds=False))
    assert {one.exactness for one in mapped} == {Exactness.BITWISE}
    assert bits(after) == bits(before)
    assert after.optimizer.groups[0].hyperparameters == before.optimizer.groups[0].hyperparameters


def test_a_llama_cannot_go_on_exactly_where_all_parameters_have_one_rate() -> None:
    """Recorded: from the second update on, MaxText's losses are 0.011 and 0.020 off."""
    state = maxtext()
    whole = replace(state.optimizer.groups[0], paths=tuple(state.params))
    plain = replace(state, optimizer=replace(state.optimizer, groups=(whole,)))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope": "pairs"}
    _, mapped = carried_through(plain, maps_of("hf-llama:maxtext-llama", heads))
    worse = {one.target: one.reason for one in mapped if one.exactness is Exactness.STATISTICS}
    assert list(worse) == ["params/decoder/layers/self_attention/query/kernel"]
    assert "MaxText has no learning rate by parameter" in worse[next(iter(worse))]


def test_what_no_file_says_of_maxtexts_model_is_asked_for_by_name() -> None:
    with pytest.raises(UsageError, match="rope_type"):
        mapped(RUNS / "maxtext_llama_scanned/3", "maxtext-llama:hf-llama", {}, {})


@pytest.mark.parametrize("factor", [4.0, 11.3137])
def test_a_scaled_parameter_has_the_moments_of_its_own_gradients(factor: float) -> None:
    rng = np.random.default_rng(0)
    param, gradients = rng.normal(size=(3, 4)), rng.normal(size=(5, 3, 4))

    def piece(param: Any, gradients: Any) -> Piece:
        m, v = np.zeros((3, 4)), np.zeros((3, 4))
        for g in gradients:
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        return Piece(
            "adamw", in_memory(param), {"m": in_memory(m), "v": in_memory(v), "master": in_memory(param)}
        )

    (scaled,) = Scale(factor).of([piece(param, gradients)])
    meant = piece(param * factor, gradients / factor)
    assert np.allclose(scaled.param.read(), meant.param.read(), rtol=1e-15)
    for slot, tensor in meant.slots.items():
        assert np.allclose(scaled.slots[slot].read(), tensor.read(), rtol=1e-13), slot
    assert scaled.exactness is (Exactness.BITWISE if factor == 4 else Exactness.ROUNDING)
    (back,) = Scale(factor, divides=True).of([scaled])
    assert back.scale == 1 or factor != 4
    assert factor != 4 or back.param.read().tobytes() == param.tobytes()


def test_a_slot_that_no_rule_scales_is_refused_by_name() -> None:
    slots = {"m": in_memory(np.ones(3)), "v": in_memory(np.ones(3))}
    with pytest.raises(InexactError, match="m, v of lamb"):
        Scale(2.0).of([Piece("lamb", in_memory(np.ones(3)), slots)])


SAID = {"rope": "halves"}


def rates(path: Path, **options: Any) -> list[tuple[Any, ...]]:
    """Returns rate, epsilon and weight decay of the query's group and of the others', as torch has them loaded."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=97, **SIZES))
    loaded = statekit.torch.load_optimizer(path, model.named_parameters(), **options)
    groups = sorted(loaded.param_groups, key=lambda group: len(group["params"]))
    return [tuple(group[name] for name in ("lr", "epsilon", "weight_decay_rate")) for group in groups]


FOLLOWED = [(0.04, 2.5e-7, 0.05), (0.01, 1e-6, 0.2)]


def test_a_rate_that_is_given_while_loading_follows_what_a_map_scaled() -> None:
    """The group of the query keeps four times the rate, a quarter of epsilon and of weight decay."""
    given: dict[str, Any] = {"lr": 0.01, "weight_decay_rate": 0.2, "hparams": {"b2": 0.95}, "epsilon": 1e-6}
    assert (
        rates(RUNS / "maxtext_llama_scanned/3", map="maxtext-llama:hf-llama", config=SAID, **given)
        == FOLLOWED
    )


@pytest.mark.parametrize("layout", ["statekit-torch", "torch-optim"])
def test_a_rate_that_is_given_later_follows_what_the_conversion_scaled(layout: str, tmp_path: Path) -> None:
    """Whoever converts first, and says rates when the converted file is loaded, has the same groups."""
    sizes = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 16}
    settings = {"learning_rate": 0.3, "b2": 0.95, "weight_decay": 0.1}
    report = statekit.convert(
        RUNS / "maxtext_llama_scanned/3", tmp_path / "run.pt", layout=layout, map="maxtext-llama:hf-llama",
        config={**SAID, **sizes}, hparams=settings, assume_defaults=True,
    )  # fmt: skip
    line = report.plan.headline
    assert line.partition(", if ")[2].startswith(
        "model/layers/0/self_attn/q_proj/weight and 1 more has a group of its own"
    )
    assert "clipping by a global norm takes its gradients times 4" in line
    given = {"learning_rate": 0.01, "weight_decay_rate": 0.2, "epsilon": 1e-6}
    assert rates(tmp_path / "run.pt", lr=0.01, weight_decay_rate=0.2, epsilon=1e-6) == FOLLOWED
    assert rates(tmp_path / "run.pt", hparams=given) == FOLLOWED
    if layout == "statekit-torch":
        saved = torch.load(tmp_path / "run.pt")
        torch.save({"model": saved["model"], "optimizer": saved["optimizer"]}, tmp_path / "later.pt")
        assert rates(tmp_path / "later.pt", hparams=given) == FOLLOWED
    back = statekit.convert(
        tmp_path / "run.pt", tmp_path / "back", to="orbax", map="hf-llama:maxtext-llama", hparams=given,
        config={"rope": "halves", "layers": "scanned"}, require="rounding", optimizer="adamw",
    )  # fmt: skip
    with statekit.open(tmp_path / "back") as opened:
        (group,) = opened.state.optimizer.groups
        assert group.hyperparameters.items() >= given.items()
    assert "scaled" not in {fact.name for fact in back.plan.facts}
