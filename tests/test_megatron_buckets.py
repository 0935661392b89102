"""Buckets of Megatron-Core's distributed optimizer: whole parameters are found in them by content."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from statekit.attestation.doctor import doctor
from statekit.cli.main import main
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.megatron.buckets import with_groups, without_buckets
from statekit.errors import NotFoundError, StateError, StatekitError
from statekit.state.stored_params import as_params
from statekit.tensors.tensor import Array, Index, Stored, in_memory

pytestmark = pytest.mark.torch

RECORDED = sorted((Path(__file__).parent / "cases" / "megatron_buckets").glob("*/*/iter_*"))
GPT = Path(__file__).parent / "cases" / "megatron_gpt"
LEGACY = next(folder for folder in RECORDED if folder.parts[-3:-1] == ("distributed_bf16", "legacy"))
KEY = "optimizer.distributed.dp_group_idx_0"


def name_of(folder: Path) -> str:
    return f"{folder.parent.parent.name}-{folder.parent.name}"


def check(folder: Path, bundle: Path) -> None:
    """Compares a checkpoint with the recorded state of update 3."""
    expected = load_file(bundle / "trajectory.safetensors")
    with open_state(folder) as opened:
        whole = as_params(opened.state)[0]
        assert whole.counts.updates == 3 and len(whole.params) == 5
        for path, param in whole.params.items():
            assert param.read().tobytes() == expected[f"3/slot/{path}/fp32_param"].tobytes(), path
            for slot, recorded in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                assert (
                    whole.slots[path][slot].read().tobytes()
                    == expected[f"3/slot/{path}/{recorded}"].tobytes()
                )


@pytest.mark.parametrize("folder", RECORDED, ids=name_of)
def test_recorded_buckets_are_read_exactly(folder: Path) -> None:
    check(folder, folder.parents[1])
    check(folder.parent, folder.parents[1])


@pytest.mark.parametrize("folder", RECORDED, ids=name_of)
def test_buckets_are_written_with_whole_parameters(folder: Path, tmp_path: Path) -> None:
    convert(plan(folder, tmp_path / "run", to="megatron", layout="megatron-distributed"))
    check(tmp_path / "run", folder.parents[1])
    with open_state(tmp_path / "run") as opened:
        common = opened.checkpoint.tree["common"]
        assert common["optimizer"]["param_state_sharding_type"] == "fully_reshardable"
        assert not any(key.startswith("optimizer.distributed") for key in opened.checkpoint.tree["sharded"])


def test_a_weight_that_is_not_its_masters_rounding_is_noticed(tmp_path: Path) -> None:
    source = next(folder for folder in RECORDED if folder.parent.name == "legacy") / "mp_rank_00"
    target = tmp_path / "iter_0000003" / "mp_rank_00"
    target.mkdir(parents=True)
    (target / "distrib_optim.pt").write_bytes((source / "distrib_optim.pt").read_bytes())
    saved = torch.load(source / "model_optim_rng.pt", weights_only=True)
    saved["model"]["embedding.weight"][0, 0] += 1
    torch.save(saved, target / "model_optim_rng.pt")
    with pytest.raises(StateError, match="No parameter's values"):
        open_state(tmp_path / "iter_0000003")


def test_a_rank_without_its_gathered_values_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        saved = {"model": {"w": torch.ones(3)}, "optimizer": {"optimizer": {"param_groups": []}}}
        torch.save(saved, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    with pytest.raises(NotFoundError, match="mp_rank_00"):
        open_state(tmp_path)


def slots_of(folder: Path) -> dict[str, bytes]:
    """Returns parameters and slots of a checkpoint, layer by layer."""
    with open_state(next(folder.glob("iter_*"))) as opened:
        state = as_params(opened.state)[0]
        tensors = {path: param.read() for path, param in state.params.items()}
        tensors |= {
            f"{path}/{slot}": t.read() for path, slots in state.slots.items() for slot, t in slots.items()
        }
    each = dict[str, Array]()
    for path, values in tensors.items():
        if "/layers/" in path and not path.partition("/layers/")[2][0].isdigit():
            each |= {path.replace("/layers/", f"/layers/{n}/"): part for n, part in enumerate(values)}
        else:
            each[path] = values
    return {path: values.tobytes() for path, values in each.items()}


@pytest.mark.parametrize("form", ["dp_reshardable", "legacy"])
def test_tensor_parallel_ranks_and_stacked_layers_are_what_megatron_gathered_itself(form: str) -> None:
    """A GPTModel of two layers, on 2 tensor-parallel and 2 data-parallel ranks of megatron-core 0.16.1.

    The keys of torch_dist hold all layers, and buckets each layer's own parameters; Megatron-Core saved the same state
    as fully_reshardable.
    """
    expected = slots_of(GPT / "fully_reshardable")
    assert len(expected) == 3 * (1 + 2 * 6 + 2)
    assert slots_of(GPT / form) == expected


def buckets(weights: dict[str, Array], order: list[str], slot: int = 1) -> dict[str, Any]:
    """Returns keys of a checkpoint with one bucket, whose padding is garbage."""
    vector = np.full(0, np.nan, np.float32)
    for name in order:
        padding = np.full(-len(vector) % 64, np.nan, np.float32)
        vector = np.concatenate([vector, padding, weights[name].ravel()])
    key = f"{KEY}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0"
    slots = {
        f"{key}.{name}": in_memory(vector * n) for n, name in enumerate(("param", "exp_avg", "exp_avg_sq"), 1)
    }
    return {**{name: in_memory(value) for name, value in weights.items()}, **slots}


def test_any_order_is_found_by_content() -> None:
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=n).astype(np.float32) for name, n in (("a", 70), ("b", 64), ("c", 3))}
    whole, _ = without_buckets(buckets(weights, ["b", "a", "c"]), "here")
    for name, value in weights.items():
        assert whole[f"optimizer.state.exp_avg.{name}"].read().tobytes() == (value * 2).tobytes()


def test_equal_parameters_are_asked_for_unless_their_sizes_decide() -> None:
    equal = {"a": np.ones(5, np.float32), "b": np.ones(5, np.float32)}
    with pytest.raises(StateError, match="--param-names"):
        without_buckets(buckets(equal, ["b", "a"]), "here")
    whole, _ = without_buckets(buckets(equal, ["b", "a"]), "here", ["a", "b"])
    assert whole["optimizer.state.param.a"].read().tolist() == [1.0] * 5
    sizes = {"a": np.ones(5, np.float32), "b": np.ones(7, np.float32)}
    whole, _ = without_buckets(buckets(sizes, ["b", "a"]), "here")
    assert np.array_equal(whole["optimizer.state.exp_avg.b"].read(), np.full(7, 2.0, np.float32))


def test_ranks_whose_pieces_nothing_tells_are_refused() -> None:
    weights = {"a": np.ones(5, np.float32), "b": np.arange(3, dtype=np.float32)}
    first = buckets(weights, ["a"])
    second = {
        key.replace("group_idx_0", "group_idx_1"): part for key, part in buckets(weights, ["b"]).items()
    }
    whole, _ = without_buckets({**first, **second}, "here")  # two stages of a pipeline
    assert whole["optimizer.state.exp_avg.b"].read().tolist() == [0, 2, 4]
    broken = {
        key: in_memory(part.read() + 1) if "group_idx_1" in key else part for key, part in second.items()
    }
    with pytest.raises(StateError, match="No parameter's values"):
        without_buckets({**first, **broken}, "here")


@pytest.mark.parametrize("kind", ["sharded", "gathered"])
def test_vectors_of_a_bucket_that_have_several_lengths_are_refused(kind: str) -> None:
    sharded = buckets({"a": np.ones(70, np.float32)}, ["a"])
    vectors = {key.rpartition(".")[2]: part for key, part in sharded.items() if ".bucket_idx_" in key}
    vectors["exp_avg"] = in_memory(np.ones(3, np.float32))
    if kind == "sharded":
        sharded = {**sharded, next(key for key in sharded if key.endswith(".exp_avg")): vectors["exp_avg"]}
    else:
        state = {0: {("torch.float32", "torch.float32"): vectors}, "buckets_coalesced": True}
        sharded = {"a": sharded["a"], f"{KEY}.param_state/shard_0_1": [state]}
    with pytest.raises(StateError, match="several lengths"):
        without_buckets(sharded, "here")


@pytest.mark.parametrize("buffer", [5, [5], {"param": 5}, {"param": [5], "exp_avg": [None]}, {"param": None}])
def test_a_gathered_state_of_another_form_is_refused(buffer: object) -> None:
    state = {0: {("torch.float32", "torch.float32"): buffer}, 1: None}
    with pytest.raises(StateError, match="none of its buckets is whole"):
        without_buckets({"a": in_memory(np.ones(3)), f"{KEY}.param_state/shard_0_1": [state]}, "here")


@pytest.mark.parametrize("key", ["optimizer", "content_metadata"])
def test_a_common_file_of_another_form_is_no_crash(key: str) -> None:
    common = {"optimizer": {"optimizer": {"param_groups": []}}, key: 5}
    assert with_groups(common, {f"{KEY}.optimizer/shard_0_1": [{}]}) == common


def test_parameters_are_looked_for_in_time_that_grows_with_their_number() -> None:
    count = 2000
    weights = {f"w{number}": np.full(64, number, np.float32) for number in range(count)}
    sharded = buckets(weights, list(weights)[::-1])
    key = next(key for key in sharded if key.endswith(".param"))
    vector, reads = sharded[key], list[Any]()
    assert isinstance(vector, Stored)

    def fetch(index: Index) -> Array:
        reads.append(index)
        return vector.fetch(index)

    sharded[key] = replace(vector, fetch=fetch)
    whole, _ = without_buckets(sharded, "here")
    assert len(whole) == 4 * count and len(reads) <= 2 * count


@pytest.mark.parametrize("count", [1, 2])
def test_ranks_whose_buckets_hold_nothing_are_no_run_without_slots(count: int, tmp_path: Path) -> None:
    groups = [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    for rank in range(count):
        folder = tmp_path / "iter_0000003" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        saved = {"model": {"output_layer.weight": torch.ones(3, 2)}, "optimizer": {"param_groups": groups}}
        torch.save({**saved, "iteration": 3}, folder / "model_optim_rng.pt")
        torch.save({0: {("torch.float32", "torch.float32"): {"param": None}}}, folder / "distrib_optim.pt")
    with pytest.raises(StateError, match="none of its buckets is whole"):
        open_state(tmp_path)


@pytest.mark.parametrize("form", ["dp_reshardable", "legacy"])
def test_how_parameters_were_found_in_buckets_is_said(form: str) -> None:
    with open_state(next((GPT / form).glob("iter_*"))) as opened:
        assert any("found by their first values" in note for note in opened.state.assumptions)


def test_a_legacy_folder_without_gathered_values_says_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    groups = [{"params": [0], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}]
    saved = {"model": {"w": torch.ones(3)}, "optimizer": {"state": {}, "param_groups": groups}}
    torch.save(saved, folder / "model_optim_rng.pt")
    with pytest.raises(StatekitError, match="aren't there") as refused:
        open_state(tmp_path)
    assert "model_optim_rng.pt" in refused.value.remedy


def with_steps(folder: Path, steps: list[float | None]) -> Path:
    """Copies a run of the format `torch`, with these counts in its groups; None is no count."""
    shutil.copytree(LEGACY.parent, folder)
    file = folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    for group, step in zip(saved["optimizer"]["optimizer"]["param_groups"], steps, strict=True):
        group["step"] = step
        if step is None:
            del group["step"]
    torch.save(saved, file)
    return folder


@pytest.mark.parametrize(
    ("steps", "kind", "updates", "said"),
    [
        ([3.0, 3.0], None, 3, ""),
        ([15.0, 15.0], "step-shared", 15, "counts 15 updates, and the run has made 3 iterations"),
        ([3.0, 15.0], "step-shared", 15, "counts once for each"),
        ([None, None], "step-missing", 3, "the run's 3 iterations are taken"),
    ],
)
def test_a_step_that_all_parameters_shared_or_that_is_missing_is_a_finding(
    steps: list[float | None], kind: str | None, updates: int, said: str, tmp_path: Path
) -> None:
    """Megatron-Core 0.16.1 without Apex leaves such counts behind; convert says it, and doctor finds it."""
    run = with_steps(tmp_path / "run", steps)
    kinds = {finding.name for finding in doctor(run)[0].findings} - {"files"}
    assert kinds == ({kind} if kind else set())
    planned = plan(run, tmp_path / "out", to="statekit")
    assert planned.target.step == updates
    assert any("iterations" in note for note in planned.assumptions) == bool(kind)
    assert all(said in note for note in planned.assumptions if "iterations" in note)


@pytest.mark.parametrize("form", ["legacy", "dp_reshardable"])
def test_the_iteration_that_the_tracker_names_is_opened(form: str, tmp_path: Path) -> None:
    """Megatron-LM opens no other: after a roll-back, or where a save was cut off before the tracker was written."""
    run = tmp_path / "run"
    shutil.copytree(LEGACY.parents[1] / form, run)
    shutil.copytree(run / "iter_0000003", run / "iter_0000009")
    for text, step in (("3\n", 3), ("9", 9), ("7", 9), ("release", 9), ("", 9)):
        (run / "latest_checkpointed_iteration.txt").write_text(text)
        with open_state(run, step=None) as opened:
            assert opened.checkpoint.step == step
            odd = ["Megatron opens nothing" in remark.what for remark in opened.checkpoint.findings]
            assert sum(odd) == (text.strip() not in ("3", "9"))


@pytest.mark.parametrize("form", ["legacy", "dp_reshardable"])
def test_the_printed_line_loads_the_iteration_that_was_asked_for(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: Megatron-LM loaded the iteration that the run's tracker names, without a word."""
    run = tmp_path / "run"
    shutil.copytree(LEGACY.parents[1] / form, run)
    shutil.copytree(run / "iter_0000003", run / "iter_0000009")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    for argv, step in (([], 3), (["--step", "9"], 9)):
        assert main(["resume", str(run), *argv]) == 0
        assert f" --ckpt-step {step}\n" in capsys.readouterr().out
    assert main(["resume", str(run / "iter_0000009")]) == 0
    assert " --ckpt-step 9\n" in capsys.readouterr().out
