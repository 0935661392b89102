"""Megatron-Core's distributed checkpoints: groups found by its rule, masters kept, other forms refused."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dcp_files import MEGATRON, folder, plain, save, torch_read

from statekit.attestation.doctor import doctor
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import detect_container
from statekit.converters.containers.dcp import CONTAINER as DCP
from statekit.converters.containers.megatron import CONTAINER
from statekit.converters.layouts.megatron.layout import LAYOUT
from statekit.converters.layouts.megatron.megatron_distributed import LAYOUT as DISTRIBUTED
from statekit.converters.layouts.megatron.megatron_float16 import LAYOUT as FLOAT16
from statekit.converters.layouts.megatron.schedule import written_schedule
from statekit.converters.layouts.pytorch.torch_fqn import LAYOUT as BY_NAME
from statekit.converters.layouts.weights.torch_weights import LAYOUT as WEIGHTS
from statekit.errors import (
    CorruptError,
    FormatError,
    InexactError,
    NotFoundError,
    RefusedError,
    StateError,
    UsageError,
)
from statekit.files.checkpoint import Checkpoint
from statekit.lines.printing import SavedRun
from statekit.lines.rates import RatesOf
from statekit.state.rates import Piece, Rates, piece
from statekit.state.run import RunState, Schedule
from statekit.state.schedules.megatron import megatron_rates
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import DTYPES, Cast, Filled, in_memory, same_values

SOURCE = folder(MEGATRON)
F32 = np.dtype("float32")
SCHEDULES = json.loads((Path(__file__).parent / "cases/megatron_schedules/schedules.json").read_text())
"""What Megatron-Core's own scheduler did; see make_schedules.py there."""


def test_the_more_specific_container_wins() -> None:
    assert DCP.detect(SOURCE) is not None
    assert detect_container(SOURCE)[0].name == detect_container(SOURCE.parent)[0].name == "megatron"
    with CONTAINER.open(SOURCE.parent) as checkpoint:
        assert (checkpoint.step, checkpoint.meta["cut"], checkpoint.meta["parts"]) == (4, 6, 21)
    with pytest.raises(NotFoundError, match="no such step"):
        CONTAINER.open(SOURCE.parent, 3)


def test_groups_are_found_by_the_rule_and_said_so() -> None:
    with open_state(SOURCE) as opened:
        decayed, plain_ones = opened.state.optimizer.groups
        assert plain_ones.paths == ("enc/bias",) and plain_ones.hyperparameters["weight_decay_rate"] == 0.0
        assert len(decayed.paths) == 4 and decayed.hyperparameters["weight_decay_rate"] == 0.1
        assert any("doesn't say which parameters" in note for note in opened.state.assumptions)


@pytest.mark.torch
def test_it_is_written_as_it_was(tmp_path: Path) -> None:
    """megatron-core 0.16.1's dist_checkpointing.load read such a folder, and found the recorded values."""
    convert(plan(SOURCE, tmp_path / "run", to="megatron"))
    there = tmp_path / "run" / "iter_0000004"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert json.loads((there / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    with open_state(SOURCE) as before, open_state(tmp_path / "run") as after:
        assert plain(before.checkpoint.tree) == plain(after.checkpoint.tree)
        assert before.state.counts == after.state.counts
    assert {k: v.tolist() for k, v in torch_read(SOURCE).items()} == {
        k: v.tolist() for k, v in torch_read(there).items()
    }
    convert(plan(SOURCE, tmp_path / "iter_0000004", to="megatron"))
    with open_state(tmp_path / "iter_0000004") as after:
        assert after.checkpoint.step == 4
    with pytest.raises(UsageError, match="named for another step"):
        convert(plan(SOURCE, tmp_path / "iter_0000005", to="megatron"))


CORRUPT = Path(__file__).parent / "cases" / "megatron_fully_reshardable"
"""Saved by megatron-core 0.16.1 with two buckets, the first padded: its own loader takes it without a word."""


@pytest.mark.parametrize("to", ["torch", "statekit"])
def test_weights_that_the_original_mixed_up_are_refused(to: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptError, match="rounding of their masters") as caught:
        convert(plan(CORRUPT, tmp_path / "target", to=to))
    assert "dp_reshardable" in caught.value.remedy and not (tmp_path / "target").exists()
    (examination,) = doctor(CORRUPT)
    assert "dp_reshardable" in f"{examination.findings}"


def mixed(state: TrainState) -> TrainState:
    """The state of a run whose parameters are bfloat16, beside float32 masters."""
    low = {path: Cast(tensor, DTYPES["bfloat16"]) for path, tensor in state.params.items()}
    slots = {path: {**tensors, "master": state.params[path]} for path, tensors in state.slots.items()}
    return replace(state, params=low, slots=slots)


@pytest.mark.parametrize("name", ["fp32_param", "param"])
def test_masters_lie_beside_their_parameters(name: str, tmp_path: Path) -> None:
    with open_state(SOURCE) as opened:
        state = mixed(opened.state)
        kept = {"megatron_master": name, "megatron_mixed_precision": True}
        encoded = LAYOUT.encode(replace(state, extra={**state.extra, **kept}))
        save(tmp_path / "iter_0000004", encoded.tree, CONTAINER)
        with open_state(tmp_path / "iter_0000004") as again:
            assert f"sharded/optimizer.state.{name}.enc.bias" in again.checkpoint.tensors
            assert "optimizer" in again.checkpoint.tree["common"]["optimizer"]
            for path, tensors in state.slots.items():
                again_state = again.state
                assert again_state.params[path].dtype == DTYPES["bfloat16"]
                assert same_values(again_state.params[path], state.params[path])
                assert again_state.slots[path].keys() == tensors.keys()
                assert all(same_values(again_state.slots[path][slot], tensors[slot]) for slot in tensors)
        convert(plan(tmp_path / "iter_0000004", tmp_path / "back", to="megatron"))
        convert(plan(tmp_path / "iter_0000004", tmp_path / "plain.dcp"))
        with open_state(tmp_path / "back") as back, open_state(tmp_path / "plain.dcp") as wide:
            assert same_values(back.state.slots["enc/bias"]["master"], state.slots["enc/bias"]["master"])
            assert same_values(wide.state.params["enc/bias"], state.slots["enc/bias"]["master"])


def opened(sharded: dict[str, Any], *groups: dict[str, Any], **common: Any) -> Checkpoint:
    optimizer = {"param_groups": list(groups), "state": {"common_step": 3}}
    return Checkpoint(
        "megatron", Path("x"), {"common": {"optimizer": optimizer, **common}, "sharded": sharded}
    )


def adam(weight_decay: float = 0.1, **more: Any) -> dict[str, Any]:
    return {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay, "amsgrad": False,
            "maximize": False, **more}  # fmt: skip


def slots(**shapes: tuple[int, ...]) -> dict[str, Any]:
    named = {name.replace("_", "."): shape for name, shape in shapes.items()}
    kept = {name: Filled(shape, F32) for name, shape in named.items()}
    return kept | {
        f"optimizer.state.{slot}.{name}": Filled(shape, F32)
        for name, shape in named.items()
        for slot in ("exp_avg", "exp_avg_sq")
    }


def of_torch(*groups: dict[str, Any], **extra: Any) -> TrainState:
    """A float32 run of torch's AdamW after three updates: a matrix, a vector and a matrix."""
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (3, 2)}
    params = [[n for n, s in shapes.items() if (len(s) == 1) == bool(i)] for i in range(2)]
    named = [list(shapes)] if len(groups) == 1 else params
    records = {
        name: {"step": 3, "exp_avg": Filled(shape, F32), "exp_avg_sq": Filled(shape, F32)}
        for name, shape in shapes.items()
    }
    tree = {
        "model": {name: Filled(shape, F32) for name, shape in shapes.items()},
        "optimizer": {
            "state": records,
            "param_groups": [{**group, "params": of} for group, of in zip(groups, named, strict=True)],
        },
        **extra,
    }
    return BY_NAME.decode(Checkpoint("dcp", Path("x"), tree), Hints())


def test_a_run_from_elsewhere_has_what_each_optimizer_of_megatron_looks_for(tmp_path: Path) -> None:
    """megatron-core 0.16.1 found no masters, no schedule, no count of FusedAdam's, and raised KeyErrors."""
    state = of_torch(adam(), adam(0.0))
    for layout in (LAYOUT, FLOAT16, DISTRIBUTED):
        save(tmp_path / layout.name, layout.encode(state).tree, CONTAINER)
        with open_state(tmp_path / layout.name) as again:
            assert again.layout == layout.name and again.state.counts.updates == 3
            tree = again.checkpoint.tree
            outer = tree["common"]["optimizer"]
            inner = outer if layout is LAYOUT else outer["optimizer"]
            assert [g["wd_mult"] for g in inner["param_groups"]] == [1.0, 0.0]
            assert all(g["step"] == 3 and g["bias_correction"] is True for g in inner["param_groups"])
            assert ("state" in inner) == (layout is not DISTRIBUTED)
            schedule = tree["common"]["opt_param_scheduler"]
            assert (schedule["max_lr"], schedule["end_wd"], schedule["num_steps"]) == (0.1, 0.1, 3)
            of_bias = {key for key in tree["sharded"] if key.endswith(".a.bias")}
            master = () if layout.masters is None else (layout.masters,)
            slots_of = {"exp_avg", "exp_avg_sq", *master}
            assert of_bias == {f"optimizer.state.{slot}.a.bias" for slot in slots_of}
    content = tree["common"]["content_metadata"]
    assert content["distrib_optim_sharding_type"] == outer["param_state_sharding_type"] == "fully_reshardable"


def test_a_run_without_weight_decay_gets_the_groups_of_the_rule() -> None:
    (first, second) = FLOAT16.encode(of_torch(adam(0.0))).tree["common"]["optimizer"]["optimizer"][
        "param_groups"
    ]
    assert (first["wd_mult"], second["wd_mult"]) == (1.0, 0.0) and first["weight_decay"] == 0.0
    encoded = LAYOUT.encode(of_torch(adam()))
    (only,) = encoded.tree["common"]["optimizer"]["param_groups"]
    assert only["wd_mult"] == 1.0 and any("config_overrides" in note for note in encoded.assumptions)
    equal = of_torch(adam(), adam(0.0, wd_mult=1.0))
    with pytest.raises(InexactError, match="same multipliers"):
        LAYOUT.encode(equal)


def test_a_schedule_that_is_not_constant_is_not_written_as_one() -> None:
    scheduler = {"last_epoch": 3, "base_lrs": [0.2], "step_size": 1, "gamma": 0.5, "_step_count": 4}
    encoded = LAYOUT.encode(of_torch(adam(), adam(0.0), scheduler=scheduler))
    assert "opt_param_scheduler" not in encoded.tree["common"]
    assert any("StepLR" in note for note in encoded.assumptions)
    encoded = LAYOUT.encode(of_torch(adam(), adam(0.0, lr=0.3)))
    assert "opt_param_scheduler" not in encoded.tree["common"]


def test_the_lines_make_megatrons_own_schedule_of_updates() -> None:
    """OptimizerParamScheduler of megatron-core 0.16.1 gave 0.0075, 0.005, 0.0025 after these lines."""
    warmup = piece("linear", start=0.0, end=0.01, steps=2)
    cosine = piece("cosine", 2, 2, start=0.01, end=0.0, steps=6)
    state = of_torch(adam(), adam(0.0)).to_json()

    def lines(*pieces: Piece) -> list[str]:
        schedule = Schedule("LambdaLR", {}, 3, "extra/torch/scheduler", (Rates(pieces),))
        return LAYOUT.lines(
            state, SavedRun("megatron", "megatron", Path("x"), 3, run=RunState((schedule,)), converted=True)
        )

    printed = lines(warmup, cosine)
    (made,) = (line for line in printed if "OptimizerParamScheduler(" in line)
    shape = (
        "init_lr=0.0, max_lr=0.01, min_lr=0.0, lr_warmup_steps=2, lr_decay_steps=8, lr_decay_style='cosine'"
    )
    assert shape in made and "scheduler.step(3)" in printed
    later = piece("cosine", 4, 4, start=0.01, end=0.0, steps=6)
    for other in ((warmup, later), (piece("rsqrt", 0, start=0.1, shift=1, floor=0.0),)):
        assert not any("OptimizerParamScheduler(" in line for line in lines(*other))


@pytest.mark.parametrize(
    "run",
    SCHEDULES,
    ids=lambda run: f"{run['state']['lr_decay_style']}-{run['state']['lr_warmup_steps']}-{run['batch']}",
)
def test_megatrons_own_schedule_is_read_and_written_again(run: dict[str, Any]) -> None:
    """Over whole runs of it. Seen red: a root without warmup is read, and any but a constant is written."""
    record, batch = run["state"], run["batch"]
    does = megatron_rates(record, 4, run["options"])
    assert isinstance(does, Rates), does
    for updates, rate in enumerate(run["rates"]):
        assert math.isclose(does.rate(updates), rate, rel_tol=1e-13), updates
    schedule = Schedule("LambdaLR", {}, 4, "extra/torch/scheduler", (does,))
    state = Hints(hparams={"global_batch_size": batch}).applied(of_torch(adam(), adam(0.0)))
    state = replace(state, counts=Counts(4, 4))
    groups = [adam(), {**adam(0.0), "wd_mult": 0.0}]
    again, note = written_schedule(groups, RatesOf([schedule], state.to_json()), 4)
    if record["lr_decay_style"] == "inverse-square-root" and not record["lr_warmup_steps"]:
        assert not again and "isn't one of" in note  # it depends on the samples, which no other system counts
        return
    open_ends = ("lr_decay_steps", "min_lr") if record["lr_decay_style"] == "constant" else ()
    assert {**again, **{key: record[key] for key in open_ends}} == record
    flags = {
        "--lr-warmup-init 0.001": batch == 1 and record["lr_warmup_steps"],
        "--lr-wsd-decay-iters 6": "WSD" in note,
    }
    assert {flag: flag in note for flag in flags} == {flag: bool(needed) for flag, needed in flags.items()}


@pytest.mark.parametrize(
    "pieces",
    [
        [piece("cosine", start=0.1, end=0.0, steps=2)],  # it rises again, and three updates are done
        [piece("cosine", start=0.1, end=0.0, steps=9.5)],
        [piece("cosine", start=0.1, end=0.0, steps=9, floor=0.01)],
        [piece("cosine", start=0.1, end=0.0, steps=9), piece("constant", 7, rate=0.0)],
        [piece("linear", start=0.0, end=0.1, steps=4), piece("cosine", 4, 2, start=0.1, end=0.0, steps=9)],
        [piece("restarts", start=0.1, end=0.0, steps=9)],
        [piece("rsqrt", start=0.1, shift=1)],
    ],
)
def test_a_schedule_that_is_none_of_megatrons_is_not_written(pieces: list[Piece]) -> None:
    """Its scheduler would give other rates."""
    state = Hints(hparams={"global_batch_size": 4}).applied(of_torch(adam(), adam(0.0)))
    schedule = Schedule("LambdaLR", {}, 3, "extra/torch/scheduler", (Rates(tuple(pieces)),))
    groups = [adam(), {**adam(0.0), "wd_mult": 0.0}]
    record, note = written_schedule(groups, RatesOf([schedule], state.to_json()), 3)
    assert not record and "finds none" in note


def test_a_schedule_needs_the_samples_of_an_update() -> None:
    scheduler = {"last_epoch": 3, "base_lrs": [0.1, 0.1], "T_max": 9, "eta_min": 0.01, "_step_count": 4}
    state = of_torch(adam(), adam(0.0), scheduler=scheduler)
    encoded = LAYOUT.encode(state)
    assert "opt_param_scheduler" not in encoded.tree["common"]
    assert any("--hparams global_batch_size=N" in note for note in encoded.assumptions)
    encoded = LAYOUT.encode(Hints(hparams={"global_batch_size": 4}).applied(state))
    record = encoded.tree["common"]["opt_param_scheduler"]
    assert (record["lr_decay_style"], record["lr_decay_steps"], record["num_steps"]) == ("cosine", 36, 12)
    for wrong in (0, "4", True, 2.5):
        with pytest.raises(UsageError, match="samples"):
            Hints(hparams={"global_batch_size": wrong}).applied(state)


@pytest.mark.torch
def test_a_run_with_a_schedule_comes_back_with_its_own(tmp_path: Path) -> None:
    """Megatron's and the manifest's are one. Seen red: the printed lines failed."""
    import torch

    scheduler = {"last_epoch": 3, "base_lrs": [0.1, 0.1], "T_max": 9, "eta_min": 0.01, "_step_count": 4}
    model = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler},
        tmp_path / "x.pt",
    )
    convert(
        plan(
            tmp_path / "x.pt", tmp_path / "run", to="megatron", hints=Hints(hparams={"global_batch_size": 4})
        )
    )
    lines = json.loads((tmp_path / "run/statekit.json").read_text())["resume"]
    assert "--use-checkpoint-opt_param-scheduler --global-batch-size 4" in lines[0]
    again = plan(tmp_path / "run", tmp_path / "y.pt", to="torch")
    assert [schedule.kind for schedule in again.run.schedules] == ["CosineAnnealingLR"]


def test_of_two_counts_the_one_that_moved_is_meant() -> None:
    """FusedAdam counts in its groups and leaves common_step where the file had it; torch's AdamW the other way."""
    for common_step, step in ((3, 9), (9, 3)):
        optimizer = {"param_groups": [adam(step=step)], "state": {"common_step": common_step}}
        tree = {"common": {"optimizer": optimizer}, "sharded": slots(w=(2, 2))}
        assert LAYOUT.decode(Checkpoint("megatron", Path("x"), tree), Hints()).counts.updates == 9


def test_arguments_of_megatron_lm_hold_a_signal(tmp_path: Path) -> None:
    """Its `exit_signal`, in 0.16.1: every folder that its trainer had written was refused."""
    import argparse
    import signal

    import torch

    there = tmp_path / "iter_0000004"
    shutil.copytree(SOURCE, there)
    (there / "common.pt").chmod(0o644)
    common = torch.load(there / "common.pt", weights_only=False)
    torch.save({**common, "args": argparse.Namespace(exit_signal=signal.SIGTERM)}, there / "common.pt")
    with open_state(there) as opened:
        assert opened.checkpoint.tree["common"]["args"].state["exit_signal"].name == "signal.Signals"


def test_stacked_layers_count_without_their_first_axis() -> None:
    fused = [
        {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": w, "bias_correction": True, "step": 3}
        for w in (0.1, 0.0)
    ]
    sharded = slots(
        decoder_layers_norm_weight=(2, 4), decoder_layers_fc_weight=(2, 4, 4), decoder_layers_0_w=(4, 4)
    )
    sharded["decoder.layers.attention._extra_state/shard_0_1"] = b"bytes"
    state = LAYOUT.decode(opened(sharded, *fused), Hints())
    assert [group.paths for group in state.optimizer.groups] == [
        ("decoder/layers/fc/weight", "decoder/layers/0/w"),
        ("decoder/layers/norm/weight",),
    ]
    assert any("FusedAdam" in note for note in state.assumptions)
    again = LAYOUT.encode(state).tree
    assert again["sharded"]["decoder.layers.attention._extra_state/shard_0_1"] == b"bytes"
    assert [group["step"] for group in again["common"]["optimizer"]["param_groups"]] == [3, 3]


def test_other_forms_are_refused_with_a_reason() -> None:
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(bf16, bf16).bucket_idx_0.exp_avg"
    with pytest.raises(StateError, match=r"bucket_idx_0(.|\n)*fully-reshardable"):
        LAYOUT.decode(opened({**slots(w=(2, 2)), bucket: Filled((4,), F32)}, adam()), Hints())
    with pytest.raises(StateError, match="another form"):
        LAYOUT.decode(
            opened({**slots(w=(2, 2)), "chained_0.optimizer.x": Filled((4,), F32)}, adam()), Hints()
        )
    with pytest.raises(StateError, match=r"Nothing tells(.|\n)*lr_mult 2"):
        LAYOUT.decode(opened(slots(w=(2, 2)), adam(), adam(), adam(lr_mult=2)), Hints())
    assert LAYOUT.detect(Checkpoint("megatron", Path("x"), {"common": {}, "sharded": {}})) is None


def test_what_the_files_cannot_say_is_not_written() -> None:
    sharded = slots(w=(2, 2), b_bias=(2,))
    state = LAYOUT.decode(opened(sharded, adam(), adam(0.0, wd_mult=0.0), args=1), Hints())
    with pytest.raises(InexactError, match="one count for all"):
        LAYOUT.encode(replace(state, counts=Counts(3, 3, {"w": 2})))
    first, second = state.optimizer.groups
    turned = (replace(first, paths=second.paths), replace(second, paths=first.paths))
    with pytest.raises(InexactError, match=r"its rule makes other groups(.|\n)*with weight decay @ b\.bias"):
        LAYOUT.encode(replace(state, optimizer=replace(state.optimizer, groups=turned)))
    encoded = LAYOUT.encode(state).tree["common"]
    assert encoded["args"] == 1 and encoded["iteration"] == 3
    assert [group["wd_mult"] for group in encoded["optimizer"]["param_groups"]] == [1.0, 0.0]
    assert all("params" not in group for group in encoded["optimizer"]["param_groups"])


def test_what_is_no_plain_data_is_named_when_it_is_left_out(tmp_path: Path) -> None:
    from statekit.tensors.tree import Record

    state = LAYOUT.decode(
        opened(slots(w=(2, 2)), adam(), args=Record("argparse.Namespace", (), {"lr": 1})), Hints()
    )
    encoded = LAYOUT.encode(state)
    assert "args" not in encoded.tree["common"] and "extra/megatron_common/args/state/lr" in encoded.dropped


def test_another_generation_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "it"
    shutil.copytree(SOURCE, copy)
    copy.chmod(0o755)
    (copy / "metadata.json").chmod(0o644)
    (copy / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(RefusedError, match=r"generation(.|\n)*zarr"):
        CONTAINER.open(copy)
    (copy / "metadata.json").write_text("{}")
    assert CONTAINER.detect(copy) is None


@pytest.mark.parametrize("damage", [(b'sharded_backend"', b'shazded_backend"'), (b'": 1,', b'": 1(')])
def test_a_damaged_configuration_is_refused_and_not_read_as_weights_of_another_library(
    damage: tuple[bytes, bytes], tmp_path: Path
) -> None:
    copy = tmp_path / "it"
    shutil.copytree(SOURCE, copy, copy_function=shutil.copyfile)
    copy.chmod(0o755)
    config = copy / "metadata.json"
    data = config.read_bytes()
    config.write_bytes(data.replace(*damage, 1))
    assert config.read_bytes() != data
    with pytest.raises(FormatError, match=r"metadata\.json"):
        open_state(copy)
    config.unlink()
    with pytest.raises(NotFoundError, match=r"metadata\.json"):
        open_state(copy)


def test_a_step_that_is_a_tensor_is_read() -> None:
    tree = opened(slots(w=(2, 2)), adam()).tree
    tree["common"]["optimizer"]["state"]["common_step"] = in_memory(np.asarray(9, F32))
    assert LAYOUT.decode(Checkpoint("megatron", Path("x"), tree), Hints()).counts.updates == 9


def test_megatron_fsdp_is_refused_by_name() -> None:
    """By its source alone: megatron/core/transformer/fsdp_dtensor_checkpoint.py."""
    name = "module.decoder.layers.0.mlp.linear_fc1.weight_w"
    moments = {slot: Filled((2, 2), F32) for slot in ("exp_avg", "exp_avg_sq")}
    meta = {"lr": 0.1, "wd_mult": 1.0, "step": 4}
    tree = {
        "model": {name: Filled((2, 2), F32)},
        "optimizer": {"state": {f"module.module.{name}": moments}, "param_to_group_meta": {name: meta}},
    }
    with pytest.raises(RefusedError, match="fsdp_dtensor"):
        WEIGHTS.decode(Checkpoint("dcp", Path("x"), tree), Hints())
