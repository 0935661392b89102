"""Folders of Megatron-LM's format `torch`: ranks are joined, numbers get names, and the schedule is one of updates."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import statekit
from statekit.converters.layouts.megatron.slices import is_gated
from statekit.errors import CorruptError, InexactError, NotFoundError, RefusedError, StateError, StatekitError
from statekit.maps.links import carried_through
from statekit.maps.model_map import maps_of
from statekit.state.rates import Rates
from statekit.state.run import run_of
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import in_memory

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
WHOLE = Path(__file__).parent / "cases/train/megatron_qwen3/torch_dist"
RECORDED = Path(__file__).parents[2] / "shared/recordings/train"
SECOND = ("linear_proj.weight", "linear_fc2.weight")
FIRST = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_fc1.weight")
MAP = "megatron-qwen3:hf-qwen3"
LOCAL = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def values(state: TrainState) -> dict[str, Any]:
    """Returns a state's tensors under Hugging Face's names."""
    state, _ = carried_through(state, maps_of(MAP, HEADS, builds=False))
    named = {(path, ""): param for path, param in state.params.items()}
    named |= {(path, slot): one for path, slots in state.slots.items() for slot, one in slots.items()}
    return {" ".join(key): one.read() for key, one in named.items()}


def rank_of(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Returns what a rank has of a parameter: of a gated linear_fc1 a piece of the gate, then one of the up."""
    if name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    axis = 0 if name.endswith(FIRST) else 1 if name.endswith(SECOND) else None
    return tensor.clone() if axis is None else tensor.chunk(ranks, axis)[rank].clone()


def legacy(folder: Path, ranks: int, masters: bool = False, args: Any = None) -> Path:
    """Writes the compact case of torch_dist as Megatron-LM's format `torch` has it."""
    with statekit.open(WHOLE) as opened:
        state = opened.state
        tensors = {
            slot: {
                (path, i): torch.from_numpy(values[i] if "layers/" in path else values)
                for path, param in state.params.items()
                for values in [(state.slots[path][slot] if slot else param).read().copy()]
                for i in range(2 if "layers/" in path else 1)
            }
            for slot in ("", "m", "v")
        }
    last = ("decoder/final", "output")
    order = sorted(tensors[""], key=lambda key: (key[0].startswith(last), "layers" in key[0], key[1]))

    def name_of(key: tuple[str, int]) -> str:
        name = key[0].replace("/", ".").replace("layers.", f"layers.{key[1]}.")
        for fused, local in LOCAL.items():
            name = name.replace(fused, local)
        return name

    decays = [
        [key for key in order if tensors[""][key].ndim > 1],
        [key for key in order if tensors[""][key].ndim == 1],
    ]
    options = {"lr": 0.0086, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False,
               "decoupled_weight_decay": True, "foreach": None, "fused": None}  # fmt: skip
    numbers = {key: n for n, key in enumerate([*decays[0], *decays[1]])}
    for rank in range(ranks):

        def piece(slot: str, key: tuple[str, int]) -> torch.Tensor:
            return rank_of(name_of(key), tensors[slot][key], rank, ranks)  # noqa: B023 (called in this turn alone)

        optimizer: dict[str, Any] = {
            "state": {n: {"step": torch.tensor(4.0), "exp_avg": piece("m", key), "exp_avg_sq": piece("v", key)}
                      for key, n in numbers.items()},
            "param_groups": [
                {**options, "wd_mult": mult, "lr_mult": 1.0, "weight_decay": 0.1 * mult,
                 "params": [numbers[key] for key in keys]}
                for mult, keys in zip((1.0, 0.0), decays, strict=True)],
        }  # fmt: skip
        model: dict[str, Any] = {name_of(key): piece("", key) for key in order}
        if masters:
            copies = [[piece("", key) for key in keys] for keys in decays]
            optimizer = {"optimizer": optimizer, "fp32_from_fp16_params": copies}
            model = {name: one.bfloat16() for name, one in model.items()}
        place = folder / f"iter_0000004/mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        scheduler = {"max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 16, "lr_decay_steps": 80, "num_steps": 32,
                     "lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1}  # fmt: skip
        torch.save(
            {"args": args, "iteration": 4, "checkpoint_version": 3.0, "model": model,
             "optimizer": optimizer, "opt_param_scheduler": scheduler},
            place / "model_optim_rng.pt",
        )  # fmt: skip
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    return folder


@pytest.mark.parametrize(("ranks", "masters"), [(1, False), (2, False), (2, True)])
def test_ranks_hold_what_the_distributed_checkpoint_has_whole(
    ranks: int, masters: bool, tmp_path: Path
) -> None:
    with statekit.open(WHOLE) as opened:
        expected = values(opened.state)
    with statekit.open(legacy(tmp_path / "run", ranks, masters)) as opened:
        read = values(opened.state)
        assert [len(group.paths) for group in opened.state.optimizer.groups] == [10, 9]
    if masters:
        read = {name.replace(" master", " "): one for name, one in read.items() if not name.endswith(" ")}
    assert read.keys() == expected.keys()
    assert all(np.array_equal(read[name], expected[name]) for name in expected)


@pytest.mark.parametrize("number", [999, -1, "9", 9.0, True, [9], 8], ids=repr)
@pytest.mark.parametrize("masters", [False, True])
def test_a_number_of_no_state_in_a_group_is_refused(masters: bool, number: Any, tmp_path: Path) -> None:
    """Seen red: a parameter lost its slots, and the conversion was called bitwise."""
    run = legacy(tmp_path / "run", 1, masters)
    (file,) = run.rglob("model_optim_rng.pt")
    saved = torch.load(file, weights_only=False)
    saved["optimizer"].get("optimizer", saved["optimizer"])["param_groups"][0]["params"][9] = number
    torch.save(saved, file)
    with pytest.raises(StateError, match="numbers don't fit"):
        statekit.open(run)


def test_a_schedule_that_counts_samples_is_one_of_updates_where_the_batch_is_known(tmp_path: Path) -> None:
    """Eight samples an update: 16 of warmup are two updates, and the next rate is that of the recorded run."""
    with statekit.open(legacy(tmp_path / "run", 1)) as opened:
        (schedule,) = run_of(opened.state.extra).schedules
    (rates,) = schedule.rates
    assert isinstance(rates, Rates)
    recorded = [0.0, 0.005, 0.01, 0.009657457896300792, 0.008681980515339464, 0.007222075445642905]
    assert [rates.rate(n) for n in range(6)] == pytest.approx(recorded, rel=1e-12)
    assert rates.rate(40) == 0.001
    grows = argparse.Namespace(rampup_batch_size=["4", "4", "100"], global_batch_size=8)
    with statekit.open(legacy(tmp_path / "grows", 1, args=grows)) as opened:
        (schedule,) = run_of(opened.state.extra).schedules
    assert schedule.rates == (
        "Megatron-LM's schedule counts samples, and the run's batch grows (rampup_batch_size)",
    )


def test_arguments_in_the_file_say_what_the_map_asks_for(tmp_path: Path) -> None:
    args = argparse.Namespace(
        num_attention_heads=4, num_query_groups=2, group_query_attention=True, rotary_base=1000000, norm_epsilon=1e-6,
        max_position_embeddings=16, padded_vocab_size=128, untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    run = legacy(tmp_path / "run", 2, args=args)
    report = statekit.convert(run, tmp_path / "hf", to="hf-trainer", map=MAP)
    assert report.plan.headline.startswith("BITWISE")
    args.group_query_attention, args.num_query_groups = False, 1
    with pytest.raises(StateError, match="4 : 4 : 4, in 4 turns"):  # as many groups as heads
        statekit.convert(legacy(tmp_path / "other", 2, args=args), tmp_path / "mha", to="hf-trainer", map=MAP)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("use_rope_scaling", True, "use_rope_scaling"),
        ("rotary_percent", 0.5, "rotary_percent"),
        ("position_embedding_type", "learned_absolute", "position_embedding_type"),
        ("swiglu", False, "swiglu"),
        ("multi_latent_attention", True, "multi_latent_attention"),
    ],
)
def test_what_the_target_has_otherwise_is_refused_by_name(
    name: str, value: Any, reason: str, tmp_path: Path
) -> None:
    args = argparse.Namespace(
        num_attention_heads=4, num_query_groups=2, group_query_attention=True, rotary_base=1000000, norm_epsilon=1e-6,
        max_position_embeddings=16, padded_vocab_size=128, untie_embeddings_and_output_weights=True,
        use_rope_scaling=False, rotary_percent=1.0, position_embedding_type="rope", swiglu=True,
    )  # fmt: skip
    run = legacy(tmp_path / "run", 2, args=args)
    assert statekit.plan(run, tmp_path / "hf", to="hf-trainer", map=MAP).headline.startswith("BITWISE")
    setattr(args, name, value)
    with pytest.raises(StatekitError, match=reason):
        statekit.plan(legacy(tmp_path / "other", 2, args=args), tmp_path / "hf", to="hf-trainer", map=MAP)


def test_names_of_a_local_spec_become_the_keys_that_the_loader_of_torch_dist_looks_for(
    tmp_path: Path,
) -> None:
    """megatron-core 0.16.1 raised a KeyError for the norms, and missed the states of linear modules."""
    report = statekit.convert(legacy(tmp_path / "run", 2, masters=True), tmp_path / "new", to="megatron")
    assert any("how many tensor-parallel ranks" in note for note in report.plan.assumptions)
    with statekit.open(tmp_path / "new") as opened:
        tree, layer = opened.checkpoint.tree, "decoder.layers.1."
        assert {f"{layer}{name}" for name in LOCAL} <= tree["sharded"].keys()
        assert not any("input_layernorm" in key for key in tree["sharded"])
        assert tree["sharded"][f"{layer}mlp.linear_fc2._extra_state/shard_0_1"] == [None]
        assert tree["common"]["content_metadata"]["non_homogeneous_layers"] is True
    said: dict[str, Any] = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 16}
    statekit.convert(tmp_path / "new", tmp_path / "hf", to="hf-trainer", map=MAP, config=HEADS | said)
    with pytest.raises(InexactError, match=r"linear_qkv\.layer_norm_weight"):
        statekit.plan(
            tmp_path / "hf", tmp_path / "apart", to="megatron", map="hf-qwen3:megatron-qwen3",
            config={"norms": "apart", "layers": "numbered"},
        )  # fmt: skip


@pytest.mark.parametrize(("had", "has"), [(4, 2), (2, 1)])
def test_a_folder_that_lost_its_last_ranks_is_told_by_the_arguments(
    had: int, has: int, tmp_path: Path
) -> None:
    run = legacy(tmp_path / "run", has, args=argparse.Namespace(tensor_model_parallel_size=had))
    with pytest.raises(NotFoundError, match=f"other ranks than its run had(.|\n)*{had} of them"):
        statekit.open(run)


def _lacks_a_rank(run: Path) -> None:
    (run / "iter_0000004/mp_rank_00").rename(run / "iter_0000004/mp_rank_02")
    (run / "iter_0000004/mp_rank_01").rename(run / "iter_0000004/mp_rank_00")


def _has_a_stage(run: Path) -> None:
    (run / "iter_0000004/mp_rank_01").rename(run / "iter_0000004/mp_rank_00_001")


def _is_of_two_iterations(run: Path) -> None:
    _change(run, lambda saved: saved.update(iteration=5))


def _is_of_another_count(run: Path) -> None:
    _change(run, lambda saved: saved["optimizer"]["state"][0]["step"].fill_(900))


def _has_another_rate(run: Path) -> None:
    _change(run, lambda saved: saved["optimizer"]["param_groups"][1].update(lr=0.5))


def _has_another_schedule(run: Path) -> None:
    _change(run, lambda saved: saved["opt_param_scheduler"].update(num_steps=900))


def _lost_a_parameter(run: Path) -> None:
    _change(run, lambda saved: saved["model"].pop("decoder.layers.1.mlp.linear_fc2.weight"))


def _norms_drifted(run: Path) -> None:
    _change(run, lambda saved: saved["model"]["decoder.final_layernorm.weight"].add_(1))


def _knows_no_cut(run: Path) -> None:
    for rank in (0, 1):
        _change(
            run,
            lambda s: s["model"].update({"decoder.router.weight": s["model"].pop("output_layer.weight")}),
            rank,
        )


def _change(run: Path, change: Any, rank: int = 1) -> None:
    file = run / f"iter_0000004/mp_rank_{rank:02d}/model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    change(saved)
    torch.save(saved, file)


@pytest.mark.parametrize(
    ("damage", "error", "match"),
    [
        (_lacks_a_rank, NotFoundError, "rank's folder isn't there"),
        (_has_a_stage, RefusedError, "stages of a pipeline"),
        (_is_of_two_iterations, CorruptError, "of one step.*(.|\n)*mp_rank_01(.|\n)*iteration 4, as in"),
        (_is_of_another_count, CorruptError, "of one step(.|\n)*step 900"),
        (_has_another_rate, CorruptError, "of one step(.|\n)*param_groups/1/lr 0.5"),
        (_has_another_schedule, CorruptError, "of one step(.|\n)*opt_param_scheduler/num_steps 900"),
        (_lost_a_parameter, CorruptError, "other parameters"),
        (_norms_drifted, CorruptError, "different values"),
        (_knows_no_cut, RefusedError, "Nothing says how ranks cut"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_by_name(
    damage: Any, error: Any, match: str, tmp_path: Path
) -> None:
    run = legacy(tmp_path / "run", 2)
    damage(run)
    with pytest.raises(error, match=match), statekit.open(run) as opened:
        values(opened.state)


@pytest.mark.parametrize("name", ["linear_fc1", "linear_fc2"])
def test_a_weight_of_a_gate_that_is_a_number_is_no_crash(name: str) -> None:
    """Seen red: an IndexError of `inspect`."""
    model = {f"mlp.{other}.weight": in_memory(np.zeros((4, 2))) for other in ("linear_fc1", "linear_fc2")}
    assert is_gated(model)
    assert not is_gated({**model, f"mlp.{name}.weight": in_memory(np.zeros(()))})


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the whole set of recordings isn't here")
@pytest.mark.parametrize("name", ["megatron_qwen3", "megatron_llama_tp2", "megatron_qwen3_bf16"])
def test_a_recorded_folder_of_each_optimizer_is_read_as_its_distributed_twin(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.MAP", "megatron-llama:hf-llama" if "llama" in name else MAP)
    with statekit.open(RECORDED / name / "checkpoint/torch") as opened:
        old = values(opened.state)
    with statekit.open(RECORDED / name / "checkpoint/torch_dist") as opened:
        new = values(opened.state)
    assert old.keys() == new.keys() and all(np.array_equal(old[key], new[key]) for key in new)


@pytest.mark.parametrize("fault", ["gone", "renamed", "none"])
@pytest.mark.parametrize("rank", [0, -1])
def test_a_slot_that_one_rank_alone_has_is_refused(fault: str, rank: int, tmp_path: Path) -> None:
    """Seen red: a KeyError of ours."""
    shutil.copytree(Path(__file__).parent / "cases" / "megatron_gpt" / "legacy", tmp_path / "run")
    file = sorted((tmp_path / "run").rglob("distrib_optim.pt"))[rank]
    saved = torch.load(file, weights_only=False)
    bucket = saved[0][torch.float32, torch.float32]
    name = "param" if fault == "gone" else "exp_avg_sq"
    vector = bucket.pop(name)
    bucket |= {"renamed": {"exp_avg_sq2": vector}, "none": {name: None}}.get(fault, {})
    torch.save(saved, file)
    with pytest.raises(
        (CorruptError, StateError), match=r"none of its buckets is whole|Ranks hold different slots"
    ):
        statekit.plan(tmp_path / "run", tmp_path / "next", to="statekit")
