"""DeepSpeed's checkpoints: what ranks hold is put together as it was recorded, and runs go on, masters first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from deepspeed_files import TAG, Made, some_groups, write
from safetensors.numpy import load_file
from torch_files import torch_zip
from torch_models import blank_model

import statekit.torch
from formats import values
from goldens import GOLDEN, bundles
from replaying import BACKENDS, COMPILING, marks
from statekit.arrays.backend import backend
from statekit.attestation.doctor import doctor
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import detect_container
from statekit.converters.containers.deepspeed.container import CONTAINER as DEEPSPEED
from statekit.errors import (
    CorruptError,
    FormatError,
    InexactError,
    NotFoundError,
    RefusedError,
)
from statekit.optim.run import load, mover, store
from statekit.state.stored_params import MASTER, Proven, as_params
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import in_memory
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay
from statekit.verify.start_state import native_state

pytestmark = pytest.mark.torch

RECORDED = [bundle for bundle in bundles("torch_formats") if "deepspeed" in bundle.name]
ADAMW = [bundle for bundle in RECORDED if bundle.name.startswith("adamw")]
BF16 = [bundle for bundle in ADAMW if "bf16" in bundle.name]
TAGS = [
    (bundle, folder)
    for bundle in RECORDED
    for folder in sorted((bundle / "checkpoint").iterdir())
    if folder.is_dir()
]


def ids(case: tuple[Path, Path]) -> str:
    return f"{case[0].name}-{case[1].name}"


def slots_of(state: TrainState) -> dict[str, Any]:
    return {path: values(tensors) for path, tensors in state.slots.items()}


def recorded(bundle: Path, step: int = 4) -> dict[str, Any]:
    """Returns the recorded tensors of a step by kind and name."""
    stored = load_file(bundle / "trajectory.safetensors")
    return {name.partition("/")[2]: array for name, array in stored.items() if name.startswith(f"{step}/")}


@pytest.mark.parametrize("case", TAGS, ids=ids)
def test_a_recorded_state_is_put_together_exactly(case: tuple[Path, Path]) -> None:
    bundle, folder = case
    expected = recorded(bundle)
    with open_state(folder) as opened:
        state = opened.state
        assert (opened.checkpoint.container, opened.layout, opened.checkpoint.step) == (
            "deepspeed",
            "deepspeed",
            4,
        )
        assert opened.checkpoint.tree["tokens_seen"] == 1234 and state.counts.updates == 4
        whole = as_params(state)[0]
        for path, tensor in whole.params.items():
            assert np.array_equal(tensor.read(), expected[f"param/{path}"]), path
        for path, tensors in whole.slots.items() if "adamw" in bundle.name else ():
            assert np.array_equal(tensors["m"].read(), expected[f"slot/{path}/exp_avg"]), path
            assert np.array_equal(tensors["v"].read(), expected[f"slot/{path}/exp_avg_sq"]), path
        low = {path: tensor.dtype.name for path, tensor in state.params.items()}
        assert set(low.values()) == ({"bfloat16"} if "bf16" in bundle.name else {"float32"})
        assert all((MASTER in tensors) == ("bf16" in bundle.name) for tensors in state.slots.values())


@pytest.mark.parametrize("bundle", [b for b in RECORDED if b not in ADAMW], ids=lambda b: b.name)
def test_adafactor_saw_the_pieces_of_ranks(bundle: Path) -> None:
    expected = recorded(bundle)
    flat = np.concatenate([expected[f"global/rank{rank}.group0.variance"] for rank in (0, 1)])
    with open_state(bundle / "checkpoint") as opened:
        state = opened.state
        assert (state.optimizer.schema, state.optimizer.variant) == ("adafactor", None)
        first = [state.slots[path]["v"].read().ravel() for path in state.optimizer.groups[0].paths]
        assert np.array_equal(np.concatenate(first), flat)
        assert not any(rule.factored for rule in state.rules.values())
        assert any("pieces that ranks hold" in note for note in state.assumptions)
    with pytest.raises(NotFoundError, match="pieces that ranks hold"):
        open_recording(bundle)


@pytest.mark.parametrize("bundle", ADAMW, ids=lambda b: b.name)
def test_the_universal_copy_holds_the_same(bundle: Path) -> None:
    states = []
    for folder in ("global_step4", "global_step4_universal"):
        with open_state(bundle / "checkpoint" / folder) as opened:
            states.append((values(opened.state.params), slots_of(opened.state), opened.state.to_json()))
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("name", "bundle"),
    [
        pytest.param(
            n, b, id=f"{n}-{b.name}", marks=marks(n, n == "tensorflow" or (n in COMPILING and b not in BF16))
        )
        for n in BACKENDS
        for b in ADAMW
    ],
)
def test_a_run_goes_on_from_its_checkpoint(name: str, bundle: Path) -> None:
    with open_recording(bundle) as recording:
        result = replay(Subject(recording), backend(name))
    assert (result.decoded, result.start) == ((), "checkpoint")
    assert result.passed


def stepped(
    params: dict[str, Any], optimizer: torch.optim.Optimizer, grads: dict[str, Any]
) -> dict[str, bytes]:
    """Makes updates 5 to 8 and returns the parameters' bytes."""
    for step in range(5, 9):
        for name, param in params.items():
            param.grad = torch.tensor(grads[f"{step}/{name.replace('.', '/')}"])
        optimizer.step()
    return {name: param.detach().numpy().tobytes() for name, param in params.items()}


@pytest.mark.parametrize("bundle", ADAMW, ids=lambda b: b.name)
def test_torch_goes_on_with_the_converted_file(bundle: Path, tmp_path: Path) -> None:
    """As it does from the recorded state itself, put into torch.optim's AdamW by hand."""
    planned = plan(bundle / "checkpoint", tmp_path / "state.pt", layout="torch-optim")
    assert planned.exactness is Exactness.BITWISE
    assert len(planned.dropped) == (5 if bundle in BF16 else 0)
    convert(planned)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert saved["tokens_seen"] == 1234 and saved["deepspeed"]["global_samples"] == 8
    grads, said = load_file(bundle / "grads.safetensors"), recorded(bundle)
    ends = []
    for source in ("file", "recording"):
        weights = {name: torch.tensor(said[f"param/{name.replace('.', '/')}"]) for name in saved["model"]}
        weights = saved["model"] if source == "file" else weights
        params = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
        groups = saved["optimizer"]["param_groups"]
        named = [{**g, "params": [params[name] for name in g["param_names"]]} for g in groups]
        optimizer = torch.optim.AdamW(named)
        if source == "file":
            optimizer.load_state_dict(saved["optimizer"])
        for name, param in params.items() if source == "recording" else ():
            path = name.replace(".", "/")
            slots = {
                slot: torch.tensor(said[f"slot/{path}/{slot}"]) for slot in ("step", "exp_avg", "exp_avg_sq")
            }
            optimizer.state[param] = slots
        ends.append(stepped(params, optimizer, grads))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("bundle", BF16, ids=lambda b: b.name)
def test_both_are_kept_where_both_have_a_place(bundle: Path, tmp_path: Path) -> None:
    convert(plan(bundle / "checkpoint", tmp_path / "neutral", to="statekit"))
    with open_state(bundle / "checkpoint") as source, open_state(tmp_path / "neutral") as neutral:
        assert values(neutral.state.params) == values(source.state.params)
        assert slots_of(neutral.state) == slots_of(source.state)
    convert(plan(tmp_path / "neutral", tmp_path / "state.pt", layout="torch-optim"))
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert {tensor.dtype for tensor in saved["model"].values()} == {torch.float32}


@pytest.mark.parametrize("bundle", BF16, ids=lambda b: b.name)
def test_a_master_moves_and_its_parameter_follows(bundle: Path) -> None:
    """Stepping both is stepping the master alone."""
    xp = backend("numpy")
    with open_state(bundle / "checkpoint") as opened, open_recording(bundle) as recording:
        states = [opened.state, as_params(opened.state)[0]]
        grads = {path: tensor.read() for path, tensor in recording.gradients(5).items()}
        moved = [store(xp, mover(xp, state)(load(xp, state), grads, 0.01), state) for state in states]
        assert values({p: tensors[MASTER] for p, tensors in moved[0].slots.items()}) == values(
            moved[1].params
        )
        for path, tensor in moved[1].params.items():
            low = tensor.read().astype(ml_dtypes.bfloat16)
            assert moved[0].params[path].read().tobytes() == low.tobytes()


@pytest.mark.parametrize("bundle", BF16, ids=lambda b: b.name)
def test_statekit_torch_goes_on_with_the_masters(bundle: Path) -> None:
    with open_state(bundle / "checkpoint") as opened:
        whole = as_params(opened.state)[0]
        model = blank_model(whole.params)
        statekit.torch.load_params(bundle / "checkpoint", model)
        optimizer = statekit.torch.load_optimizer(bundle / "checkpoint", model.named_parameters())
        assert isinstance(optimizer, statekit.torch.AdamW)
        for name, param in model.named_parameters():
            path = name.replace(".", "/")
            assert np.array_equal(param.detach().numpy(), whole.params[path].read())
            assert np.array_equal(optimizer.state[param]["m"].numpy(), whole.slots[path]["m"].read())


@pytest.mark.parametrize("bundle", BF16, ids=lambda b: b.name)
def test_a_parameter_that_is_not_its_masters_rounding_is_noticed(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(bundle / "checkpoint", copy)
    model = copy / "global_step4" / "mp_rank_00_model_states.pt"
    saved = torch.load(model, weights_only=True)
    saved["module"]["enc.bias"][2] += 1
    torch.save(saved, model)
    planned = plan(copy, tmp_path / "state.pt", layout="torch-optim")
    with pytest.raises(InexactError, match=r"enc/bias(.|\n)*1 others among 5(.|\n)*--to statekit"):
        convert(planned)
    assert not (tmp_path / "state.pt").exists()
    convert(plan(copy, tmp_path / "neutral", to="statekit"))
    with pytest.raises(CorruptError, match=r"rounding of their masters(.|\n)*enc/bias"):
        convert(plan(copy, tmp_path / "megatron", to="megatron", layout="megatron-float16"))


@pytest.mark.skipif(ADAMW == BF16, reason="the compact recordings have no float32 run under DeepSpeed")
def test_a_float32_weight_that_is_not_the_optimizers_is_noticed(tmp_path: Path) -> None:
    """In float32 both are one weight, so that every target is refused it."""
    copy = tmp_path / "run"
    shutil.copytree(next(bundle for bundle in ADAMW if bundle not in BF16) / "checkpoint", copy)
    model = copy / "global_step4" / "mp_rank_00_model_states.pt"
    saved = torch.load(model, weights_only=True)
    saved["module"]["enc.bias"][2] += 1
    torch.save(saved, model)
    for to in ("statekit", "torch"):
        with pytest.raises(CorruptError, match="enc/bias"):
            convert(plan(copy, tmp_path / "target", to=to))
    (examination,) = doctor(copy)
    assert "enc/bias" in str(examination.findings)


@pytest.mark.skipif(RECORDED == ADAMW, reason="the compact recordings have no Adafactor under DeepSpeed")
def test_masters_of_a_variant_that_keeps_them_stay() -> None:
    with open_state(RECORDED[0] / "checkpoint") as opened:
        state = opened.state
        assert as_params(state) == (state, {})


def test_a_master_of_another_shape_is_no_master() -> None:
    master, param = (in_memory(np.zeros(shape, np.float32)) for shape in ((6, 4), (6,)))
    with pytest.raises(CorruptError, match="another shape"):
        Proven(master, param, "w")


def test_infinite_and_nan_parameters_follow_their_masters() -> None:
    master = np.asarray([1e30, -1e30, np.nan, 1e-30], np.float32)
    with np.errstate(over="ignore"):
        low = master.astype(np.float16)
    with open_state(ADAMW[0] / "checkpoint") as opened:
        slots = {"m": in_memory(master), "v": in_memory(master), MASTER: in_memory(master)}
        group = replace(opened.state.optimizer.groups[0], paths=("a",))
        state = replace(
            opened.state,
            params={"a": in_memory(low)},
            slots={"a": slots},
            optimizer=replace(opened.state.optimizer, groups=(group,)),
        )
    param = as_params(state)[0].params["a"]
    assert param.read().tobytes() == master.tobytes()


# Cut in other ways than the recordings.

SHAPES: tuple[list[tuple[int, ...]], ...] = ([(5, 3), (7,), (), (2, 3, 4)], [(11,), (1, 1), (3, 5)])
MADE = {
    **{
        f"{ranks} ranks of {stage}": Made(some_groups(*SHAPES), ranks, stage)
        for ranks in (1, 2, 3, 7)
        for stage in (1, 3)
    },
    "early": Made(some_groups(*SHAPES), 3, 2, said=False),
    "float32": Made(some_groups(*SHAPES), 2, 2, "float32"),
    "float32 of 3": Made(some_groups(*SHAPES), 2, 3, "float32"),
    "sub-groups": Made(some_groups(*SHAPES), 2, 3, "float16", sub_groups=2),
    "frozen": Made(some_groups(*SHAPES), 3, 3, frozen={"head.w": np.arange(10, dtype=np.float32).reshape(5, 2)}),
    "frozen without elements": Made(some_groups(*SHAPES), 3, 3, frozen={"head.w": np.zeros((0, 2), np.float32)}),
    "many small": Made(some_groups([(1,)] * 40), 7, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_whatever_ranks_hold_is_put_together(name: str, tmp_path: Path) -> None:
    made = MADE[name]
    run = write(made, tmp_path / "run")
    with open_state(run) as opened:
        state = opened.state
        assert opened.checkpoint.findings == () and state.counts.updates == 7
        assert [len(group.paths) for group in state.optimizer.groups] == [len(group) for group in made.groups]
        by_name = {name: each for group in made.groups for name, each in group.items()}
        whole = as_params(state)[0]
        for path, tensor in whole.params.items():
            arrays = by_name[path.replace("/", ".")]
            assert tensor.read().tobytes() == arrays["fp32"].tobytes(), path
            assert whole.slots[path]["m"].read().tobytes() == arrays["exp_avg"].tobytes(), path
            assert whole.slots[path]["v"].read().tobytes() == arrays["exp_avg_sq"].tobytes(), path
            low = torch.tensor(arrays["fp32"]).to(getattr(torch, made.dtype)).float().numpy()
            assert np.array_equal(state.params[path].read().astype(np.float32), low), path
        assert state.extra["buffers"].keys() == {"mean", *made.frozen}
        for name_, value in made.frozen.items():
            assert np.array_equal(state.extra["buffers"][name_].read().astype(np.float32), value)


def test_what_ranks_say_each_for_itself_is_kept(tmp_path: Path) -> None:
    run = write(Made(some_groups([(4,)]), 3, 3, client={"seed": "rank", "epoch": 2}), tmp_path / "run")
    tree = DEEPSPEED.open(run).tree
    assert (tree["seed"], tree["epoch"]) == (0, 2)
    assert tree["deepspeed"]["ranks"] == {1: {"seed": 1}, 2: {"seed": 2}}


def test_a_run_of_the_trainer_without_deepspeed_is_none_of_ours(tmp_path: Path) -> None:
    for step in (8, 16, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert DEEPSPEED.detect(tmp_path) is None


def test_steps_of_a_run(tmp_path: Path) -> None:
    run = write(Made(some_groups([(4,)])), tmp_path / "run")
    shutil.copytree(run / TAG, run / "global_step20")
    (run / "global_step30").mkdir()
    assert DEEPSPEED.open(run).path == run / TAG  # as `latest` says
    assert DEEPSPEED.open(run).meta["steps"] == [7, 20, 30]
    assert DEEPSPEED.open(run, 20).path == run / "global_step20"
    (run / "latest").unlink()
    assert DEEPSPEED.open(run).path == run / "global_step20"
    for step in (3, 30):
        with pytest.raises(NotFoundError, match="no such step"):
            DEEPSPEED.open(run, step)
    with pytest.raises(NotFoundError, match="of another step than was asked for"):
        DEEPSPEED.open(run / TAG, 8)


# Damage and malice.


def rewritten(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(run: Path) -> None:
        for path in sorted((run / TAG).glob(file)):
            saved = torch.load(path, weights_only=True)
            change(saved)
            torch.save(saved, path)

    return edit


def removed(file: str) -> Callable[[Path], None]:
    return lambda run: next(iter(sorted((run / TAG).glob(file)))).unlink()


def without_optimizers(run: Path) -> None:
    for path in (run / TAG).glob("*optim*"):
        path.unlink()


def span(document: dict[str, Any]) -> dict[str, int]:
    spans: dict[str, int] = next(iter(document["optimizer_state_dict"]["param_slice_mappings"][0].values()))
    return spans


def short(document: dict[str, Any]) -> None:
    state = document["optimizer_state_dict"]["base_optimizer_state"]["state"]
    state[0]["exp_avg"] = state[0]["exp_avg"][:3].clone()


FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception]]] = {
    "a rank's optimizer is missing": (removed("*_0_*optim*"), CorruptError),
    "the last rank's is missing": (removed("*_1_*optim*"), CorruptError),
    "all optimizers are missing": (without_optimizers, FormatError),
    "a rank too many": (lambda run: shutil.copy(
        run / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        run / TAG / "zero_pp_rank_2_mp_rank_00_optim_states.pt"), CorruptError),
    "the model is missing": (removed("mp_rank_00*"), NotFoundError),
    "a slice of a model": (lambda run: shutil.copy(
        run / TAG / "mp_rank_00_model_states.pt", run / TAG / "mp_rank_01_model_states.pt"), RefusedError),
    "an expert of an early DeepSpeed": (
        lambda run: (run / TAG / "expert_1_mp_rank_00_model_states.pt").touch(), RefusedError),
    "an empty file of an expert": (
        lambda run: (run / TAG / "layer_0_expert_1_mp_rank_00_model_states.pt").touch(), FormatError),
    "latest leads out": (lambda run: (run / "latest").write_text("../elsewhere"), RefusedError),
    "latest is absolute": (lambda run: (run / "latest").write_text("/etc"), RefusedError),
    "a span too long": (rewritten("*optim*", lambda document: span(document).update(numel=10**12)), CorruptError),
    "a span too short": (rewritten("*optim*", lambda document: span(document).update(numel=1)), CorruptError),
    "a span elsewhere": (rewritten("*optim*", lambda document: span(document).update(start=10**6)), CorruptError),
    "a negative span": (rewritten("*optim*", lambda document: span(document).update(start=-1)), FormatError),
    "a shape of other size": (rewritten("mp_rank*", lambda document: document["param_shapes"][0].update(
        {next(iter(document["param_shapes"][0])): torch.Size((10**6, 10**6))})), CorruptError),
    "a shape that is none": (rewritten("mp_rank*", lambda document: document["param_shapes"][0].update(
        {next(iter(document["param_shapes"][0])): "shape"})), FormatError),
    "a parameter that the model hasn't": (rewritten("mp_rank*", lambda document: document["module"].pop("layer.0.w")),
        CorruptError),
    "no shapes": (rewritten("mp_rank*", lambda document: document.pop("param_shapes")), FormatError),
    "a group too few": (rewritten("mp_rank*", lambda document: document["param_shapes"].pop()), CorruptError),
    "a slot too short": (rewritten("*_0_*optim*", short), CorruptError),
    "no state": (rewritten("*optim*", lambda document: document.clear()), FormatError),
    "an elastic state": (rewritten("*optim*", lambda document: document["optimizer_state_dict"].update(
        base_optimizer_state=[])), FormatError),
    "a weight that isn't flat": (rewritten("*optim*", lambda document: document["optimizer_state_dict"].update(
        single_partition_of_fp32_groups=[torch.zeros(2, 2), torch.zeros(2, 2)])), FormatError),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused(fault: str, tmp_path: Path) -> None:
    damage, error = FAULTS[fault]
    run = write(Made(some_groups(*SHAPES)), tmp_path / "run")
    damage(run)
    with pytest.raises(error):
        DEEPSPEED.open(run)


def without_last(document: dict[str, Any]) -> None:
    document["param_shapes"][0].popitem()


UNNAMED: dict[str, tuple[Made, Callable[[dict[str, Any]], object]]] = {
    "the last of a group": (Made(some_groups(*SHAPES)), without_last),
    "all of a group": (Made(some_groups(*SHAPES)), lambda document: document["param_shapes"][1].clear()),
    "where ranks don't say what they hold": (Made(some_groups(*SHAPES), 3, 2, said=False), without_last),
    "a single value": (Made(some_groups([(8,), ()], [(4,)]), 2, 1), without_last),
    "under ZeRO 3": (Made(some_groups(SHAPES[0]), 2, 3), without_last),
    "a frozen one under ZeRO 3": (
        Made(some_groups(*SHAPES), 2, 3, frozen={"head.w": np.ones((5, 2), np.float32)}),
        lambda document: document.update(frozen_param_shapes={}, frozen_param_fragments={}),
    ),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_what_ranks_hold_of_a_parameter_without_a_shape_is_not_lost(name: str, tmp_path: Path) -> None:
    """Seen red: its master and moments were never read, and the rest was called bitwise."""
    made, change = UNNAMED[name]
    run = write(made, tmp_path / "run")
    rewritten("*model*", change)(run)
    with pytest.raises(CorruptError, match=r"doesn't name|Nothing says"):
        DEEPSPEED.open(run)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_modules_keep_beside_is_no_parameter(stage: int, tmp_path: Path) -> None:
    """Seen red: Transformer Engine's empty states were parameters that ZeRO 3 had cut, and refused."""
    run = write(Made(some_groups(*SHAPES), 2, stage), tmp_path / "run")
    empty = {f"{place}_extra_state": torch.empty(0, dtype=torch.uint8) for place in ("", "encoder.")}
    rewritten("*model*", lambda document: document["module"].update(empty))(run)
    with open_state(run) as opened:
        assert len(opened.state.optimizer.group_of) == sum(map(len, SHAPES))
        assert not opened.checkpoint.findings


def test_a_universal_parameter_without_a_shape_is_not_lost(tmp_path: Path) -> None:
    """Seen red: its folder was odd, and passed over."""
    run = GOLDEN / "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint"
    shutil.copytree(run / "global_step4_universal", tmp_path / TAG)
    rewritten("mp_rank*", without_last)(tmp_path)
    with pytest.raises(CorruptError, match="doesn't name"):
        DEEPSPEED.open(tmp_path / TAG)


def test_why_a_folder_of_slices_is_refused_is_said(tmp_path: Path) -> None:
    run = write(Made(some_groups([(4,)])), tmp_path / "run")
    shutil.copy(run / TAG / "mp_rank_00_model_states.pt", run / TAG / "mp_rank_01_model_states.pt")
    with pytest.raises(RefusedError, match=r"slices of the model(.|\n)*ds_to_universal"):
        open_state(run)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "latest").write_text("../of/another/system")
    assert DEEPSPEED.detect(tmp_path / "other") is None


def test_code_in_any_file_does_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    command = f"touch {canary}".encode()
    payload = b"}X\x01\x00\x00\x00wcos\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85Rs."
    bundle = BF16[0] if BF16 else RECORDED[0]
    for tag in ("global_step4", "global_step4_universal"):
        files = sorted(path.relative_to(bundle) for path in (bundle / "checkpoint" / tag).rglob("*.pt"))
        for file in files[:6]:
            copy = tmp_path / "copy"
            shutil.copytree(bundle, copy)
            (copy / file).unlink()
            torch_zip(copy / file, payload)
            with pytest.raises(RefusedError, match=r"os\.system"):
                DEEPSPEED.open(copy / "checkpoint" / tag)
            shutil.rmtree(copy)
    assert not canary.exists()


@pytest.mark.parametrize("bundle", RECORDED, ids=lambda b: b.name)
def test_it_is_told_from_other_folders(bundle: Path) -> None:
    container, evidence = detect_container(bundle / "checkpoint")
    assert (container.name, evidence.specificity) == ("deepspeed", 20)
    with open_recording(bundle) if bundle in ADAMW else open_state(bundle / "checkpoint"):
        pass


@pytest.mark.parametrize("bundle", BF16, ids=lambda b: b.name)
def test_the_low_precision_copy_is_not_taken_for_the_recorded_weight(bundle: Path) -> None:
    with open_recording(bundle) as recording:
        said = recording.state(4, recording.trajectories[0], 5)
        with native_state(bundle / recording.checkpoint, said) as ours:
            assert {tensor.dtype.name for tensor in ours.params.values()} == {"float32"}
            assert not any(MASTER in tensors for tensors in ours.slots.values())


def test_inspecting_imports_no_framework() -> None:
    from test_import_is_free import cli

    assert cli("inspect", "--stats", RECORDED[0] / "checkpoint") == set()
