"""Experts and stages that ranks of DeepSpeed hold apart: joined as the engine itself kept them, or refused by name.

The runs are DeepSpeed's own: see tests/cases/deepspeed_ranks/make_ranks.py.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_files import TAG, Made, some_groups, write
from safetensors.numpy import load_file

from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS, Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.converters.containers.deepspeed.container import CONTAINER as DEEPSPEED
from statekit.converters.containers.deepspeed.experts import spread
from statekit.converters.containers.deepspeed.zero import part_of
from statekit.errors import CorruptError, FormatError, NamesError, RefusedError, StatekitError, UsageError
from statekit.state.schema import is_native
from statekit.tensors.tensor import in_memory

pytestmark = pytest.mark.torch

RECORDED = Path(__file__).parent / "cases" / "deepspeed_ranks"
EXPERTS = {"experts_zero1_bf16": 16, "experts_zero0": 16}
PIPELINES = {"pipeline_zero1_bf16": 7, "pipeline_zero0": 9}
ORDERS = {"round_robin_zero2_bf16": 7, "sub_groups_zero3": 7}
"""How many parameters each run has."""
GROUPS = ("groups_zero0", "groups_zero0_bf16")
NAMES = ["a.bias", "norm.weight", "norm.bias", "head.bias", "head.weight", "b.weight", "a.weight"]
"""Runs whose groups have another order than the model, and that order."""


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a recorded run."""
    shutil.copytree(RECORDED / getattr(request, "param", "experts_zero1_bf16"), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(("name", "count"), {**EXPERTS, **PIPELINES, **ORDERS}.items())
def test_a_recorded_run_is_what_the_engine_kept(name: str, count: int) -> None:
    engine = load_file(RECORDED / name / "engine.safetensors")
    with open_state(RECORDED / name) as opened:
        state = opened.state
        assert 3 * len(state.params) == len(engine) == 3 * count
        assert state.counts.updates == 3
        for path, param in state.params.items():
            slots = state.slots[path]
            arrays = {"fp32": slots.get("master", param), "exp_avg": slots["m"], "exp_avg_sq": slots["v"]}
            for key, tensor in arrays.items():
                expected = engine[f"{path.replace('/', '.')}|{key}"]
                assert tensor.read().tobytes() == expected.tobytes(), f"{path}: {key}"


def test_numbers_in_an_order_of_their_own_ask_for_names() -> None:
    for name in GROUPS:
        with pytest.raises(NamesError, match="several have one shape") as caught:
            open_state(RECORDED / name)
        assert "--param-names" in f"{caught.value}"


@pytest.mark.parametrize("name", GROUPS)
def test_names_go_by_the_groups_of_a_run_without_zero(name: str, tmp_path: Path) -> None:
    """Seen red: the folder was refused, with names and without. What is written names its parameters."""
    convert(plan(RECORDED / name, tmp_path / "out", to="deepspeed", hints=Hints(param_names=NAMES)))
    assert plan(tmp_path / "out", tmp_path / "x.pt", to="torch").headline == "BITWISE"
    engine = load_file(RECORDED / name / "engine.safetensors")
    with open_state(tmp_path / "out") as opened:
        state = opened.state
        assert [len(group.paths) for group in state.optimizer.groups] == [4, 3]
        assert [group.hyperparameters["weight_decay_rate"] for group in state.optimizer.groups] == [0.0, 0.1]
        for path, slots in state.slots.items():
            arrays = {
                "fp32": slots.get("master", state.params[path]),
                "exp_avg": slots["m"],
                "exp_avg_sq": slots["v"],
            }
            for key, tensor in arrays.items():
                expected = engine[f"{path.replace('/', '.')}|{key}"]
                assert tensor.read().tobytes() == expected.tobytes(), f"{path}: {key}"


def test_names_of_other_weights_are_found_by_the_masters(tmp_path: Path) -> None:
    wrong = [NAMES[2], NAMES[1], NAMES[0], *NAMES[3:]]
    with pytest.raises(CorruptError, match="aren't the rounding of their masters"):
        convert(
            plan(
                RECORDED / "groups_zero0_bf16",
                tmp_path / "out",
                to="deepspeed",
                hints=Hints(param_names=wrong),
            )
        )


def test_an_order_that_was_taken_stands_in_the_verdict(tmp_path: Path) -> None:
    """Seen red: "BITWISE" alone."""
    assert "in the model's order" in plan(RECORDED / "experts_zero0", tmp_path / "x.pt", to="torch").headline


def test_groups_that_each_keep_the_models_order_need_no_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    groups = [{"params": [p for p in model.parameters() if p.ndim == ndim]} for ndim in (2, 1)]
    optimizer = torch.optim.AdamW(groups)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    file = tmp_path / "global_step1/mp_rank_00_model_states.pt"
    file.parent.mkdir()
    buffers = [name for name, _ in model.named_buffers()]
    saved = {
        "module": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "buffer_names": buffers,
        "global_steps": 1,
    }
    torch.save(saved, file)
    with open_state(file.parent) as opened:
        assert [group.paths for group in opened.state.optimizer.groups] == [
            ("0/weight", "2/weight"),
            ("0/bias", "1/weight", "1/bias", "2/bias"),
        ]
        orders = [
            fact for group in opened.state.optimizer.groups for fact in group.facts if fact.name == "order"
        ]
        assert orders and {fact.source for fact in orders} == {"assumed"}


@pytest.mark.parametrize("name", ORDERS)
def test_groups_keep_their_parameters(name: str) -> None:
    with open_state(RECORDED / name) as opened:
        groups = [
            (len(g.paths), g.hyperparameters["weight_decay_rate"]) for g in opened.state.optimizer.groups
        ]
    assert groups == [(4, 0.0), (3, 0.1)]


def test_experts_stand_layer_by_layer_in_their_order() -> None:
    with open_state(RECORDED / "experts_zero1_bf16") as opened:
        names = [path for path in opened.state.optimizer.paths if "/deepspeed_experts/" in path]
    first = "moe/deepspeed_moe/experts/deepspeed_experts"
    assert names[:8] == [f"{first}/{i}/{leaf}" for i in range(4) for leaf in ("weight", "bias")]
    assert names[8:] == [f"moe2/deepspeed_moe/experts/deepspeed_experts/{i}/weight" for i in range(2)]


@pytest.mark.parametrize("run", EXPERTS, indirect=True)
@pytest.mark.parametrize(
    "pattern",
    ["layer_0_expert_1_*", "layer_1_expert_1_*", "*rank_0*optim_states.pt", "*rank_1*optim_states.pt"],
)
def test_a_missing_file_is_noticed(run: Path, pattern: str) -> None:
    files = [*run.glob(f"global_step3/{pattern}")]
    assert files
    for file in files:
        file.unlink()
    with pytest.raises((CorruptError, FormatError)):
        open_state(run)


def number(before: float, after: float) -> tuple[bytes, bytes]:
    """Returns how a pickle has a number, and another one in its place."""
    return b"()" + re.escape(b"G" + struct.pack(">d", before)), b"G" + struct.pack(">d", after)


PATCHES: dict[str, tuple[bytes, bytes]] = {
    "step": (b"()^" + re.escape(struct.pack("<f", 3)) + b"$", struct.pack("<f", 900)),
    "lr": number(1e-2, 0.5),
    "betas": number(0.98, 0.97),
    "eps": number(1e-8, 1e-6),
    "weight_decay": number(0.1, 0.2),
    "global_steps": (rb"(global_stepsq.K)\x03", b"\x09"),
    "skipped_steps": (rb"(skipped_stepsq.K)\x00", b"\x09"),
}
"""What a file of another step has otherwise -> a pattern of it in these runs' files, and other bytes."""
OTHERS = {
    "experts_zero1_bf16": ("*rank_3_mp_rank_00_optim_states.pt", "step lr betas eps"),
    "experts_zero0": ("expp_rank_1_*", "step lr betas eps"),
    "pipeline_zero1_bf16": ("*_1_mp_rank_01_optim_states.pt", "step lr betas eps"),
    "pipeline_zero0": ("mp_rank_01_model_states.pt", "global_steps skipped_steps lr betas eps"),
    "round_robin_zero2_bf16": ("*_rank_1_*optim_states.pt", "step lr betas eps weight_decay"),
    "sub_groups_zero3": ("*_rank_1_*optim_states.pt", "step lr betas eps weight_decay"),
}
"""A rank's file of each run, and what is made another step's in it."""
OF_ANOTHER_STEP = [(name, pattern, key) for name, (pattern, keys) in OTHERS.items() for key in keys.split()]
OF_ANOTHER_STEP += [
    ("sub_groups_zero3", "*_rank_1_*model_states.pt", key) for key in ("global_steps", "skipped_steps")
]


def patched(file: Path, pattern: bytes, new: bytes) -> None:
    """Puts other bytes into the members of a torch file, behind what the pattern keeps."""
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    assert any(re.search(pattern, data, re.DOTALL) for data in members.values())
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, re.sub(pattern, lambda m: m[1] + new, data, flags=re.DOTALL))


@pytest.mark.parametrize(
    ("run", "pattern", "key"), OF_ANOTHER_STEP, indirect=["run"], ids=map(" ".join, OF_ANOTHER_STEP)
)
def test_a_rank_of_another_step_is_refused(run: Path, pattern: str, key: str) -> None:
    """Seen red: such folders were converted as bitwise."""
    (file,) = run.glob(f"global_step3/{pattern}")
    patched(file, *PATCHES[key])
    with pytest.raises((CorruptError, RefusedError), match=key) as caught:
        open_state(run)
    if caught.type is CorruptError:
        for text in (
            file.name,
            "of one step of one run",
            "expected: ",
            "found: ",
            "do: put the files of one save",
        ):
            assert text in f"{caught.value}"


@pytest.mark.parametrize("run", ["sub_groups_zero3"], indirect=True)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("key", ["param_shapes", "buffer_names", "shared_params"])
def test_a_rank_with_another_model_is_refused(run: Path, rank: int, key: str) -> None:
    """Seen red: padding was taken for an element of a parameter, and the conversion was called bitwise.

    What is shared the first rank says alone, which was seen red with Trainer and ZeRO 3: its runs were refused.
    """
    (file,) = run.glob(f"global_step3/*_rank_{rank}_*model_states.pt")
    saved = torch.load(file, weights_only=False)
    if key == "param_shapes":
        saved[key][0]["a.bias"] = torch.Size([8])
    else:
        saved[key] = {"tied.bias": "a.bias"} if key == "shared_params" else ["a.bias"]
    torch.save(saved, file)
    if (rank, key) == (0, "shared_params"):
        open_state(run).close()
        return
    with pytest.raises(CorruptError, match="aren't of one step of one run"):
        open_state(run)


def test_what_an_optimizer_measures_of_a_piece_is_each_ranks_own(tmp_path: Path) -> None:
    """Adafactor of Transformers keeps the root mean square of a rank's vector, and makes it anew in each step."""
    run = write(Made(some_groups([(3, 4), (5,)])), tmp_path / "run")
    for rank in (0, 1):
        file = run / TAG / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        saved = torch.load(file)
        saved["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["RMS"] = 0.5 + rank
        torch.save(saved, file)
    with DEEPSPEED.open(run) as opened:
        assert [finding.what for finding in opened.findings if "RMS isn't the same" in finding.what]


@pytest.mark.parametrize("run", EXPERTS, indirect=True)
def test_an_expert_in_the_file_of_another_is_refused(run: Path) -> None:
    first, third = (run / f"global_step3/layer_0_expert_{i}_mp_rank_00_model_states.pt" for i in (0, 2))
    shutil.copyfile(first, third)
    with pytest.raises(CorruptError, match="another's weights"):
        open_state(run)


@pytest.mark.parametrize("run", PIPELINES, indirect=True)
@pytest.mark.parametrize("pattern", ["layer_00-*", "layer_01-*", "layer_04-*", "*mp_rank_01_*"])
def test_a_missing_file_of_a_stage_is_noticed(run: Path, pattern: str) -> None:
    for file in run.glob(f"global_step3/{pattern}"):
        file.unlink()
    with pytest.raises((CorruptError, FormatError)):
        open_state(run)


def test_a_universal_checkpoint_of_a_pipeline_counts_one_slice(tmp_path: Path) -> None:
    """DeepSpeed refuses another number than there are files of the model."""
    convert(plan(RECORDED / "pipeline_zero1_bf16", tmp_path / "out", to="deepspeed"))
    (file,) = tmp_path.glob("out/*/mp_rank_00_model_states.pt")
    assert torch.load(file, weights_only=False)["mp_world_size"] == 1


def steps_of(name: str, folder: Path, run: dict[str, Any], first: str, behind: str) -> dict[str, Any]:
    """Runs printed lines from the last that begins so, up to another, and returns their variables."""
    if not (folder / name).exists():
        convert(plan(RECORDED / name, folder / name, to="deepspeed"))
    lines = json.loads((folder / name / "statekit.json").read_text())["resume"]
    begins = max(i for i, line in enumerate(lines) if line.startswith(first))
    ends = next((i for i, line in enumerate(lines) if behind and line.startswith(behind)), len(lines))
    code = "\n".join(["import json, pathlib, torch", *lines[begins:ends]])
    exec(code.replace("/path/to/checkpoint", str(folder / name)), run)
    return run


def test_printed_lines_take_what_a_stage_of_a_pipeline_has(tmp_path: Path) -> None:
    """DeepSpeed 0.19.8 went on by them on one stage and on two. Seen red: each needed the other stage's layers."""
    stage = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
    assert steps_of("pipeline_zero0", tmp_path, {"model": stage}, "weights = ", "optimizer = ")["groups"] == [
        {"params": [stage[0].weight]}
    ]
    with open_state(RECORDED / "pipeline_zero0") as opened:
        assert (
            stage[0].state_dict()["weight"].numpy().tobytes()
            == opened.state.params["0/weight"].read().tobytes()
        )


@pytest.mark.parametrize("name", EXPERTS)
def test_printed_lines_mark_groups_of_experts(name: str, tmp_path: Path) -> None:
    """Seen red: DeepSpeed 0.19.8 refused the optimizer. test_codebases runs all of the lines in it."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    vars(params[1])["group_name"] = "ep_size_1"
    run: dict[str, Any] = {"groups": [{"params": [param]} for param in params], "torch": torch}
    run = steps_of(name, tmp_path, run, "experts = ", "# without")
    groups = run["optimizer"].param_groups
    assert [(group.get("moe"), group.get("name")) for group in groups] == [(None, None), (True, "ep_size_1")]
    groups[1]["name"] = "ep_size_2"
    steps_of(name, tmp_path, run, "for i, name", "")
    assert groups[1]["name"] == "ep_size_1"


def test_experts_beside_others_in_a_group_are_not_written(tmp_path: Path) -> None:
    """DeepSpeed would begin the second of its groups anew, of which the file has none."""
    names = ["a.weight", "moe.deepspeed_moe.experts.deepspeed_experts.0.weight"]
    params = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in names}
    optimizer = torch.optim.AdamW(params.values())
    for param in params.values():
        param.grad = torch.ones(2, 2)
    optimizer.step()
    torch.save({"model": params, "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="experts beside others"):
        convert(plan(tmp_path / "x.pt", tmp_path / "out", to="deepspeed"))


@pytest.mark.parametrize(
    ("run", "file", "twin"),
    [
        ("pipeline_zero0", "layer_03-model_states.pt", "layer_3-model_states.pt"),
        (
            "experts_zero1_bf16",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        ),
        (
            "experts_zero0",
            "layer_0_expert_1_mp_rank_00_model_states.pt",
            "layer_0_expert_01_mp_rank_00_model_states.pt",
        ),
    ],
    indirect=["run"],
)
def test_two_files_of_one_part_are_refused(run: Path, file: str, twin: str) -> None:
    shutil.copyfile(run / "global_step3" / file, run / "global_step3" / twin)
    with pytest.raises(CorruptError, match="same part"):
        open_state(run)


def test_positions_of_vectors_are_integers() -> None:
    vector = in_memory(np.zeros(3, np.float32))
    optimizer = {"state": {}, "param_groups": [{"params": [0.0]}]}
    with pytest.raises(FormatError, match="another vector"):
        part_of(
            {"optimizer_state_dict": {"fp32_flat_groups": [vector], "optimizer_state_dict": optimizer}}, "x"
        )


def test_buffers_of_a_stage_stay_with_the_model() -> None:
    with open_state(RECORDED / "pipeline_zero0") as opened:
        names = {path for path in opened.checkpoint.tree["model"] if path.startswith("4.")}
    buffers = {"4.running_mean", "4.running_var", "4.num_batches_tracked"}
    assert names == {"4.weight", "4.bias", *buffers}


def test_ranks_in_another_order_do_not_fit_their_weights(run: Path, tmp_path: Path) -> None:
    """The weights that the optimizer moves are those of other experts: masters tell."""
    first, second = (run / f"global_step3/bf16_zero_pp_rank_{i}_mp_rank_00_optim_states.pt" for i in (0, 1))
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)
    with pytest.raises(StatekitError):
        convert(plan(run, tmp_path / "x.pt", to="torch"))


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("ds_autoep_layers", [{"name": "moe"}], RefusedError),
        ("num_experts", [8, 2], CorruptError),
        ("num_experts", [2**62, 2], CorruptError),
        ("dp_world_size", 2**62, CorruptError),
    ],
)
def test_experts_of_another_form_are_refused(run: Path, key: str, value: object, error: type) -> None:
    file = run / "global_step3" / "mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=False)
    torch.save({**saved, key: value}, file)
    with pytest.raises(error):
        open_state(run)


def test_experts_of_a_slice_of_the_model_are_refused(run: Path) -> None:
    file = run / "global_step3" / "layer_0_expert_0_mp_rank_00_model_states.pt"
    shutil.copyfile(file, file.with_name("layer_0_expert_0_mp_rank_01_model_states.pt"))
    with pytest.raises(RefusedError, match="names that statekit doesn't know"):
        open_state(run)


@pytest.mark.parametrize("counts", [None, [4], [4, 3], [4, 0], [4, True], [4, 8]])
def test_groups_are_cut_over_a_divisor_of_the_ranks(counts: object) -> None:
    with pytest.raises(FormatError, match="doesn't divide"):
        spread([{}, {}], counts, 4, {}, "here")


def test_the_configuration_tells_which_ranks_share_experts() -> None:
    assert spread([{}], [2], 4, {}, "here").holders == [[[0, 2], [1, 3]]]
    data_first = {"use_data_before_expert_parallelism": True}
    assert spread([{}], [2], 4, data_first, "here").holders == [[[0, 1], [2, 3]]]


def test_a_universal_checkpoint_of_experts_says_how_deepspeed_loads_it(tmp_path: Path) -> None:
    planned = plan(RECORDED / "experts_zero0", tmp_path / "out", to="deepspeed")
    assert any("ep_size 1" in assumption for assumption in planned.assumptions)


@pytest.mark.parametrize("name", ["a/b", "", "second"])
def test_a_slot_that_no_rule_has_ends_in_no_crash(name: str) -> None:
    """A record with `exp_avg_sq` alone was taken for a flat Adafactor's. Seen red: KeyError: 'a/b'."""
    with DEEPSPEED.open(RECORDED / "sub_groups_zero3") as checkpoint:
        tree: Any = checkpoint.tree
        optimizer = tree["optimizer"]
        first, *others = optimizer["state"]
        record = {name if key == "exp_avg" else key: part for key, part in optimizer["state"][first].items()}
        state = {first: record, **{other: optimizer["state"][other] for other in others}}
        changed = replace(checkpoint, tree={**tree, "optimizer": {**optimizer, "state": state}})
        read = registry.decoded(registry.layout("deepspeed"), changed, NO_HINTS)
        assert any(map(is_native, read.optimizer.schemas))
