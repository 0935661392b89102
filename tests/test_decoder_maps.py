"""Maps of decoder-only models: torchtitan's Llama and Qwen, nanoGPT's GPT-2, and Hugging Face's classes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from store_serving import serving

import statekit
import statekit.maps
from statekit.errors import StateError, UsageError
from statekit.maps.links import carried_through
from statekit.maps.model_map import load, maps_of
from statekit.state.exactness import Exactness

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
HEADS, PAIRS, WIDTH, WORDS, LAYERS, HALF = 4, 2, 32, 40, 2, 4
"""Heads of queries and of keys, the model's width, its vocabulary, its layers, and RoPE's pairs in a head."""
SAID = {"num_attention_heads": HEADS, "num_key_value_heads": PAIRS}
LOGITS = 1e-5
"""Of float32 logits, per the largest; T5's conversions are held to the same."""
TOKENS = torch.arange(24).reshape(2, 12) * 7 % WORDS


def titan(seed: int = 0, norms: bool = False) -> dict[str, torch.Tensor]:
    """Returns random weights under torchtitan's names."""
    torch.manual_seed(seed)
    size = 2 * HALF
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (WORDS, WIDTH)}
    for i in range(LAYERS):
        at = f"layers.{i}"
        for name, heads in (("wq", HEADS), ("wk", PAIRS), ("wv", PAIRS)):
            shapes[f"{at}.attention.qkv_linear.{name}.weight"] = (heads * size, WIDTH)
        if norms:
            shapes |= {f"{at}.attention.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
        shapes[f"{at}.attention.wo.weight"] = (WIDTH, HEADS * size)
        shapes |= {f"{at}.feed_forward.{name}.weight": (48, WIDTH) for name in ("w1", "w3")}
        shapes[f"{at}.feed_forward.w2.weight"] = (WIDTH, 48)
        shapes |= {f"{at}.{name}.weight": (WIDTH,) for name in ("attention_norm", "ffn_norm")}
    shapes |= {"norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}
    return {
        name: 0.3 * torch.randn(shape) if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
    }


def titan_logits(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns logits as torchtitan's Llama 3 computes them: RoPE turns neighbouring pairs, as complex numbers."""

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[f"{name}.weight"]

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        each = x @ weights[f"{name}.weight"].T
        return each.reshape(*each.shape[:-1], -1, 2 * HALF).transpose(1, 2)

    length = TOKENS.shape[1]
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(HALF) / HALF)
    turns = torch.polar(torch.ones_like(angles), angles)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], HALF, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    h = weights["tok_embeddings.weight"][TOKENS]
    for i in range(LAYERS):
        at = f"layers.{i}.attention"
        x = normed(h, f"layers.{i}.attention_norm")
        query, key, value = (heads(x, f"{at}.qkv_linear.{name}") for name in ("wq", "wk", "wv"))
        key, value = (one.repeat_interleave(HEADS // PAIRS, 1) for one in (turned(key), value))
        mixed = torch.nn.functional.scaled_dot_product_attention(turned(query), key, value, is_causal=True)
        h = h + mixed.transpose(1, 2).flatten(2) @ weights[f"{at}.wo.weight"].T
        x, ffn = normed(h, f"layers.{i}.ffn_norm"), f"layers.{i}.feed_forward"
        gate = torch.nn.functional.silu(x @ weights[f"{ffn}.w1.weight"].T)
        h = h + (gate * (x @ weights[f"{ffn}.w3.weight"].T)) @ weights[f"{ffn}.w2.weight"].T
    return normed(h, "norm") @ weights["lm_head.weight"].T


def hf_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS, rms_norm_eps=1e-5,
        num_attention_heads=HEADS, num_key_value_heads=PAIRS, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def trained(weights: Mapping[str, torch.Tensor], path: Path) -> dict[str, torch.nn.Parameter]:
    """Moves weights twice by AdamW, and saves both."""
    params = {name: torch.nn.Parameter(one.clone()) for name, one in weights.items()}
    optimizer = torch.optim.AdamW(params.items(), lr=1e-2)
    for seed in range(2):
        torch.manual_seed(seed)
        for param in params.values():
            param.grad = torch.randn_like(param)
        optimizer.step()
    torch.save({"model": dict(params), "optimizer": optimizer.state_dict()}, path)
    return params


def test_llama_gives_the_same_logits_and_only_with_its_heads_in_the_other_order() -> None:
    weights, model = titan(), hf_llama()
    expected = titan_logits(weights)
    model.load_state_dict(load("torchtitan-llama:hf-llama", SAID).apply(weights))
    with torch.no_grad():
        assert apart(model(TOKENS).logits, expected) <= LOGITS
        model.load_state_dict(load("torchtitan-qwen3:hf-qwen3").apply(with_norms(weights)), strict=False)
        assert apart(model(TOKENS).logits, expected) > 1e3 * LOGITS  # the seed: Qwen's map leaves the order


def with_norms(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    norms = {
        f"layers.{i}.attention.{n}_norm.weight": torch.ones(2 * HALF) for i in range(LAYERS) for n in "qk"
    }
    return {**weights, **norms}


def tensors_of(path: Path) -> Iterator[tuple[str, bytes]]:
    with statekit.open(path) as opened:
        for name, param in opened.state.params.items():
            for slot, tensor in {"": param, **opened.state.slots[name]}.items():
                yield f"{name} {slot}", tensor.read().tobytes()


CHAINS = [
    ("torchtitan-llama:hf-llama", SAID, False),
    ("torchtitan-llama:torchtitan-llama-fused", SAID, False),
    ("torchtitan-qwen3:hf-qwen3", {}, True),
]


@pytest.mark.parametrize(("name", "said", "norms"), CHAINS)
def test_adamws_moments_go_there_and_back_to_the_bit(
    name: str, said: dict[str, Any], norms: bool, tmp_path: Path
) -> None:
    trained(titan(norms=norms), tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        there, mapped = carried_through(opened.state, maps_of(name, said, builds=False))
        a, b = name.split(":")
        back, _ = carried_through(there, maps_of(f"{b}:{a}", said, builds=False))
        assert {one.exactness for one in mapped} == {Exactness.BITWISE}
        accounted = {path for one in mapped for path in one.sources}
        assert accounted == set(opened.state.params) == set(back.params)
        for path, slots in opened.state.slots.items():
            assert set(back.slots[path]) == set(slots)
            for slot, tensor in {"": opened.state.params[path], **slots}.items():
                other = back.slots[path][slot] if slot else back.params[path]
                assert other.read().tobytes() == tensor.read().tobytes(), (path, slot)


def test_fused_attention_has_for_each_head_of_keys_its_queries_itself_and_its_values() -> None:
    weights = titan()
    fused = load("torchtitan-llama:torchtitan-llama-fused", SAID).apply(weights)
    at = "layers.1.attention.qkv_linear"
    query, key, value = (weights[f"{at}.{n}.weight"].reshape(PAIRS, -1, WIDTH) for n in ("wq", "wk", "wv"))
    assert torch.equal(fused[f"{at}.wqkv.weight"], torch.cat([query, key, value], 1).flatten(0, 1))
    model = hf_llama()
    for name in ("torchtitan-llama-fused:torchtitan-llama", "torchtitan-llama:hf-llama"):
        fused = load(name, SAID).apply(fused)
    model.load_state_dict(fused)
    with torch.no_grad():
        assert apart(model(TOKENS).logits, titan_logits(weights)) <= LOGITS


def test_a_run_of_torchtitan_goes_on_in_hugging_face_with_the_same_losses(tmp_path: Path) -> None:
    params = trained(titan(), tmp_path / "run.pt")
    model = hf_llama()
    options: dict[str, Any] = {"map": "torchtitan-llama:hf-llama", "config": SAID}
    import statekit.torch

    statekit.torch.load_params(tmp_path / "run.pt", model, **options)
    ours = statekit.torch.load_optimizer(tmp_path / "run.pt", model.named_parameters(), **options)
    theirs = torch.optim.AdamW(params.items(), lr=1e-2)
    theirs.load_state_dict(torch.load(tmp_path / "run.pt")["optimizer"])
    aims = torch.roll(TOKENS, -1, 1)
    for _ in range(10):
        losses = []
        for optimizer, logits in (
            (ours, lambda: model(TOKENS).logits),
            (theirs, lambda: titan_logits(params)),
        ):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(logits().flatten(0, 1), aims.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        assert abs(losses[0] / losses[1] - 1) <= 1e-5


def test_what_no_checkpoint_says_of_llama_is_asked_for_by_name(tmp_path: Path) -> None:
    trained(titan(), tmp_path / "run.pt")
    with pytest.raises(UsageError, match="num_attention_heads"):
        load("torchtitan-llama:hf-llama").apply(titan())
    options: dict[str, Any] = {"map": "torchtitan-llama:hf-llama", "to": "hf-trainer"}
    with pytest.raises(UsageError, match="rms_norm_eps") as error:
        statekit.convert(tmp_path / "run.pt", tmp_path / "hf", config=SAID, **options)
    assert {"rope_parameters", "bos_token_id"} <= {place for _, place in error.value.faults}
    wrong = {**SAID, "num_key_value_heads": 3}
    with pytest.raises(StateError, match="can't be mapped"):
        load("torchtitan-llama:hf-llama", wrong).apply(titan())


def test_a_folder_of_llama_loads_by_itself(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    params = trained(titan(), tmp_path / "run.pt")
    said = {
        **SAID, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    statekit.convert(
        tmp_path / "run.pt", tmp_path / "hf", to="hf-trainer", map="torchtitan-llama:hf-llama", config=said
    )
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert apart(model(TOKENS).logits, titan_logits(params)) <= LOGITS


LOADED_FROM_THE_HUB = """
import sys, numpy, torch, transformers
model = transformers.LlamaForCausalLM.from_pretrained("owner/name", revision=sys.argv[1]).eval()
with torch.no_grad():
    numpy.save(sys.argv[3], model(torch.from_numpy(numpy.load(sys.argv[2]))).logits.numpy())
"""


@pytest.mark.slow
def test_a_folder_of_llama_loads_from_the_hub(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    trained(titan(), tmp_path / "run.pt")
    said = {
        **SAID, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder = tmp_path / "hf"
    statekit.convert(
        tmp_path / "run.pt", folder, to="hf-trainer", map="torchtitan-llama:hf-llama", config=said
    )
    np.save(tmp_path / "tokens.npy", TOKENS.numpy())
    files = {file.name: file.read_bytes() for file in (folder / "checkpoint-2").iterdir()}
    with serving("hub", files) as (address, served):
        home = {"HF_HOME": f"{tmp_path}", "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}
        home["HF_HUB_OFFLINE"] = "0"  # whatever the machine says
        command = [sys.executable, "-c", LOADED_FROM_THE_HUB, f"{served.commit}", "tokens.npy", "logits.npy"]
        subprocess.run(command, cwd=tmp_path, env={**os.environ, **home}, check=True)
        assert any("model" in request and "/resolve/" in request for request in served.requests)
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "checkpoint-2").eval()
    with torch.no_grad():
        assert np.array_equal(np.load(tmp_path / "logits.npy"), model(TOKENS).logits.numpy())


def test_gpt2_keeps_its_weights_the_other_way_round_with_their_moments(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=16,
        activation_function="gelu", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    weights = {name: one.detach() for name, one in model.named_parameters()}
    trained(weights, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        there, mapped = carried_through(opened.state, maps_of("hf-gpt2:nanogpt"))
        assert {one.exactness for one in mapped} == {Exactness.BITWISE}
        for path, slots in opened.state.slots.items():
            is_turned = path.endswith("weight") and any(n in path for n in ("c_attn", "c_proj", "c_fc"))
            for slot, tensor in {"": opened.state.params[path], **slots}.items():
                other = (there.slots[path][slot] if slot else there.params[path]).read()
                assert ((other.T if is_turned else other) == tensor.read()).all(), (path, slot)
    live = load("hf-gpt2:nanogpt").apply(model.state_dict())
    x = torch.randn(3, WIDTH)
    block = "transformer.h.0.attn.c_proj"
    linear = torch.nn.functional.linear(x, live[f"{block}.weight"], live[f"{block}.bias"])
    with torch.no_grad():
        assert torch.allclose(linear, model.transformer.h[0].attn.c_proj(x), atol=1e-6)
    assert torch.equal(live["lm_head.weight"], live["transformer.wte.weight"])


SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": PAIRS, "head_dim": 2 * HALF, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN = {**SIZES, "moe_intermediate_size": 16, "num_experts": 4, "norm_topk_prob": True, "rms_norm_eps": 1e-6}
GPT_OSS = {
    **SIZES, "intermediate_size": 16, "num_local_experts": 4, "sliding_window": 8, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPERTS = "moe.routed_experts.inner_experts"


def of_qwen(weights: Mapping[str, torch.Tensor], x: torch.Tensor, expert: int) -> torch.Tensor:
    """Returns what an expert of the first layer makes, as torchtitan has it."""
    gate, up, down = (weights[f"layers.0.{EXPERTS}.{n}"][expert] for n in ("w1_EFD", "w3_EFD", "w2_EDF"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def of_gpt_oss(weights: Mapping[str, torch.Tensor], x: torch.Tensor, expert: int) -> torch.Tensor:
    """Returns what an expert of the first layer makes, as torchtitan has it: gates and ups in turns."""
    names = ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED")
    first, bias, second, last = (weights[f"layers.0.{EXPERTS}.{n}"][expert] for n in names)
    both = x @ first.T + bias
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ second.T + last


@pytest.mark.parametrize(
    ("cls", "name", "said", "of_expert"),
    [
        ("Qwen3Moe", "torchtitan-qwen3-moe:hf-qwen3-moe", QWEN, of_qwen),
        ("GptOss", "torchtitan-gpt-oss:hf-gpt-oss", GPT_OSS, of_gpt_oss),
    ],
)
def test_experts_of_torchtitan_go_on_in_hugging_face_with_their_moments(
    cls: str, name: str, said: dict[str, Any], of_expert: Any, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = getattr(transformers, f"{cls}ForCausalLM")(getattr(transformers, f"{cls}Config")(**said)).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.2)
    theirs, ours = name.split(":")
    weights = load(f"{ours}:{theirs}").apply(dict(model.named_parameters()))
    weights.pop("lm_head.weight", None) if model.config.tie_word_embeddings else None
    x, every = torch.randn(5, WIDTH), torch.ones(5, 1)
    with torch.no_grad():
        made = model.model.layers[0].mlp.experts(x, torch.full((5, 1), 3), every)
        assert apart(made, of_expert(weights, x, 3)) <= LOGITS
    params = trained(weights, tmp_path / "run.pt")
    with pytest.raises(UsageError) as error:
        statekit.convert(tmp_path / "run.pt", tmp_path / "hf", to="hf-trainer", map=name)
    asked = {place for _, place in error.value.faults}
    assert asked and all(key in str(error.value) for key in asked)  # each by its name
    report = statekit.convert(
        tmp_path / "run.pt",
        tmp_path / "hf",
        to="hf-trainer",
        map=name,
        config={key: said[key] for key in asked},
    )
    assert {one.exactness for one in report.plan.mapped} == {Exactness.BITWISE}
    loaded = type(model).from_pretrained(tmp_path / "hf").eval()
    model.load_state_dict(load(name).apply(params), strict=False)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    bias = {f"layers.{i}.moe.expert_bias": torch.zeros(4) for i in range(LAYERS)}
    with pytest.raises(StateError, match="without a loss"):
        load(name).apply({**params, **bias})
    older = {
        key.replace(EXPERTS, "moe.experts").removesuffix("_EFD").removesuffix("_EDF"): one
        for key, one in params.items()
    }
    older = {
        key.removesuffix("_EGD").removesuffix("_EG").removesuffix("_ED"): one for key, one in older.items()
    }
    assert load(name).apply(older).keys() == load(name).apply(params).keys()


def test_every_name_that_a_map_doesnt_know_is_said_in_the_error_itself() -> None:
    """A model with biases in its attention, as Qwen2 has them, is none that torchtitan has."""
    biases = {
        f"layers.{i}.attention.qkv_linear.{n}.bias": torch.zeros(8)
        for i in range(LAYERS)
        for n in ("wq", "wk", "wv")
    }
    with pytest.raises(StateError) as error:
        load("torchtitan-llama:hf-llama", SAID).apply({**titan(), **biases})
    assert all(name.replace(".", "/") in str(error.value) for name in biases)


def test_buffers_are_left_behind_by_name_or_refused_with_the_reason(tmp_path: Path) -> None:
    trained(titan(norms=True), tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt")
    saved["model"]["freqs_cis"] = torch.ones(3)
    torch.save(saved, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened:
        there, _ = carried_through(opened.state, maps_of("torchtitan-qwen3:hf-qwen3", builds=False))
    assert "buffers" not in there.extra
    assert "freqs_cis" in there.assumptions[-1]
    saved["model"]["layers.0.moe.expert_bias"] = torch.ones(4)
    torch.save(saved, tmp_path / "run.pt")
    with statekit.open(tmp_path / "run.pt") as opened, pytest.raises(StateError, match="without a loss"):
        load("torchtitan-qwen3-moe:hf-qwen3-moe").apply(opened.state)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layers.1.feed_forward.w2.weight", "intermediate_size"),
        ("layers.0.attention.qkv_linear.wv.weight", "num_key_value_heads"),
        ("tok_embeddings.weight", "hidden_size"),
        ("lm_head.weight", "vocab_size"),
    ],
)
def test_a_transposed_weight_contradicts_the_others_by_name(name: str, key: str, tmp_path: Path) -> None:
    weights = titan()
    weights[name] = weights[name].T.contiguous()
    with pytest.raises(StateError) as error:
        load("torchtitan-llama:hf-llama", SAID).apply(weights)
    assert key in {place for _, place in error.value.faults}
    trained(weights, tmp_path / "run.pt")
    with pytest.raises(StateError, match="along axis"):
        statekit.plan(
            tmp_path / "run.pt",
            tmp_path / "hf",
            map="torchtitan-llama:hf-llama",
            config=SAID,
            to="hf-trainer",
        )
