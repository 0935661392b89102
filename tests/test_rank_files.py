"""Files that each rank of a run saves for itself: parts of tensors are joined as their pickles say where they lie."""

from __future__ import annotations

import itertools
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_saving import NAMES, Net

import statekit
from statekit.cli.main import main
from statekit.conversion.convert import plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.converters.containers.torch_halves import find_ranks
from statekit.converters.formats.pytorch.dtensors import joined
from statekit.errors import (
    CorruptError,
    FormatError,
    InexactError,
    NotFoundError,
    RefusedError,
    StatekitError,
)
from statekit.tensors.tensor import in_memory
from statekit.tensors.tree import Record
from statekit.torch import attest, load_optimizer
from statekit.verify.verification import verify

pytestmark = pytest.mark.torch
HERE = Path(__file__).parent
CASE = HERE / "cases" / "verl_two_ranks"
"""What verl's manager saves, made by PyTorch 2.13 with FSDP2 and FSDP1 on two gloo ranks (rank_saving.py)."""
SHARDED = HERE / "cases" / "fsdp1_two_ranks"
"""FSDP1's ShardedTensors in a file of each rank, made by PyTorch 2.13 on two gloo ranks (rank_saving.py)."""


def told(arguments: list[Any], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main([*map(str, arguments)]) == code
    shown = capsys.readouterr()
    return " ".join((shown.out + shown.err).split())


def assert_whole(folder: Path, whole: Any) -> None:
    """Holds weights and both moments against what full_tensor() gave on the ranks."""
    with statekit.open(folder) as opened:
        for i, name in enumerate(NAMES):
            path, record = name.replace(".", "/"), whole["optim"][i]
            assert np.array_equal(np.asarray(opened.params[path].read()), whole["model"][name].detach())
            for slot, key in (("m", "exp_avg"), ("v", "exp_avg_sq")):
                assert np.array_equal(np.asarray(opened.slots[path][slot].read()), record[key])


def test_the_files_of_two_ranks_are_one_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: the folder wasn't a checkpoint, and a rank's optimizer passed for the whole."""
    whole = torch.load(CASE / "whole.pt")
    assert_whole(CASE / "fsdp2", whole)
    model = Net()
    model.load_state_dict(whole["model"])
    live = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    live.load_state_dict({**live.state_dict(), "state": whole["optim"]})
    assert attest(live, model, CASE / "fsdp2").passed
    fresh = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    assert not attest(fresh, model, CASE / "fsdp2").passed
    loaded: Any = load_optimizer(CASE / "fsdp2", model.named_parameters())
    assert [group["step"] for group in loaded.param_groups] == [4]
    assert "nothing found" in told(["doctor", CASE / "fsdp2"], 0, capsys)
    assert "BITWISE" in told(["convert", CASE / "fsdp2", tmp_path / "run.pt"], 0, capsys)


def test_the_printed_lines_load_each_ranks_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(["resume", CASE / "fsdp2"], 0, capsys)
    assert "rank = torch.distributed.get_rank()" in lines
    assert "optim_world_size_2_rank_{rank}.pt" in lines and "extra_state_world_size_2_rank_{rank}.pt" in lines
    assert "weights_only=False" in lines and "code of torch.distributed.device_mesh.DeviceMesh" in lines


def test_one_ranks_file_is_refused_by_what_it_is() -> None:
    for name in ("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_1.pt"):
        with pytest.raises(RefusedError, match=r"one rank's parts of tensors[\s\S]*name the folder"):
            statekit.open(CASE / "fsdp2" / name)


def test_the_flat_optimizer_of_fsdp1_is_refused_and_its_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"FSDP1 is flat[\s\S]*optim_state_dict"):
        statekit.open(CASE / "fsdp1")
    for file in (CASE / "fsdp1").glob("model*"):
        shutil.copy(file, tmp_path)
    with statekit.open(tmp_path) as opened:
        assert opened.params["emb/weight"].shape == (11, 6)


def test_files_of_ranks_that_are_missing_or_of_another_step_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(CASE / "fsdp2", folder)
    other = folder / "optim_world_size_2_rank_1.pt"
    other.unlink()
    with pytest.raises(NotFoundError, match="the file optim of rank 1"):
        statekit.open(folder)
    shutil.copy(folder / "optim_world_size_2_rank_0.pt", other)
    with pytest.raises(CorruptError, match="contradict each other"):
        statekit.open(folder)
    shutil.copy(CASE / "fsdp2" / other.name, folder / "optim_world_size_3_rank_1.pt")
    with pytest.raises(NotFoundError, match="one number of ranks"):
        statekit.open(folder)


def test_what_each_rank_has_whole_is_compared_when_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    saved_on(folder, [{"bias": torch.tensor([float(rank)])} for rank in range(2)])
    assert "Ranks hold different values" in told(["convert", folder, tmp_path / "x.pt"], 3, capsys)


def saved_on(folder: Path, trees: Sequence[Any]) -> None:
    for rank, tree in enumerate(trees):
        torch.save({"model": tree, "epoch": 3}, folder / f"last_rank_{rank}.pt")


@pytest.mark.filterwarnings("ignore")
def test_parts_lie_where_pytorch_says(tmp_path: Path) -> None:
    """On a mesh of 2 by 2 and of 3 ranks: cuts of either dimension, both, one twice, and copies; uneven and empty."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.testing._internal.distributed.fake_pg import FakeStore

    shapes = [(10, 7), (1, 3), (5,), ()]
    for sizes in ((2, 2), (3,)):
        kinds = [Replicate(), Shard(0), Shard(1)]
        wholes, trees = {}, []
        for rank in range(int(np.prod(sizes))):
            dist.init_process_group("fake", rank=rank, world_size=int(np.prod(sizes)), store=FakeStore())
            mesh, tree = init_device_mesh("cpu", sizes), dict[str, Any]()
            for i, shape in enumerate(shapes):
                whole = torch.arange(float(np.prod(shape))).reshape(shape) + i
                for j, cuts in enumerate(itertools.product(kinds[: len(shape) + 1], repeat=len(sizes))):
                    name = f"layers.{i}.{j}"
                    local, first = compute_local_shape_and_global_offset(whole.shape, mesh, cuts)
                    part = whole[tuple(slice(at, at + n) for at, n in zip(first, local, strict=True))].clone()
                    wholes[name] = whole
                    tree[name] = DTensor.from_local(
                        part, mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride()
                    )
            trees.append(tree)
            dist.destroy_process_group()
        folder = tmp_path / f"{len(sizes)}"
        folder.mkdir()
        saved_on(folder, trees)
        with statekit.open(folder) as opened:
            for name, whole in wholes.items():
                assert np.array_equal(np.asarray(opened.params[name.replace(".", "/")].read()), whole), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"placement_types\nShard\n", b"placement_types\nPartial\n"),
        (b"_coordinate_on_dim", b"_coordinate_on_dum"),
        (b"placements", b"placement_"),
        (b"_local_tensor", b"_local_tensar"),
    ],
)
def test_parts_that_are_described_otherwise_are_refused(old: bytes, new: bytes, tmp_path: Path) -> None:
    for file in (CASE / "fsdp2").glob("model*"):
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(tmp_path / file.name, "w") as target:
            for name in source.namelist():
                data = source.read(name)
                if name.endswith("data.pkl"):
                    assert old in data
                    data = data.replace(old, new)
                target.writestr(name, data)
    with pytest.raises(FormatError):
        statekit.open(tmp_path)
    with pytest.raises(StatekitError):
        statekit.open(tmp_path / "model_world_size_2_rank_0.pt")


def test_folders_of_other_systems_hold_no_files_of_ranks(tmp_path: Path) -> None:
    names = [
        "mp_rank_00_model_states.pt",
        "rng_state_0.pth",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ]
    for name in (*names, "random_states_0.pkl", "extra_state_world_size_1_rank_0.pt"):
        (tmp_path / name).touch()
    assert find_ranks(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("fsdp2", 3), ("hybrid", 4), ("tensor_parallel", 4)])
def test_what_fsdp2_and_tensor_parallelism_save_is_joined(kind: str, ranks: int, tmp_path: Path) -> None:
    """Real gloo ranks: uneven parts, copies over a mesh of two axes, and strided parts."""
    command = [sys.executable, "-W", "ignore", HERE / "rank_saving.py", kind, f"{ranks}", tmp_path / "run"]
    subprocess.run([*map(str, command)], check=True, timeout=120)
    assert_whole(tmp_path / "run", torch.load(tmp_path / "whole.pt"))


@pytest.mark.parametrize(
    "others", [{"0": 1}, {0: 2}, 5], ids=["another kind of key", "another value", "no map"]
)
def test_what_ranks_hold_otherwise_is_a_contradiction(others: Any) -> None:
    with pytest.raises(CorruptError):
        joined([{0: 1}, others], Path("ranks"), ())


def part_at(*place: int) -> Record:
    """Returns how a rank at a place in its mesh pickles a DTensor that each rank has whole."""
    mesh = Record("torch.distributed.device_mesh.DeviceMesh", (), {"_coordinate_on_dim": list(place)})
    copies = tuple(Record("torch.distributed.tensor.placement_types.Replicate") for _ in place)
    spec = Record(
        "torch.distributed.tensor._dtensor_spec.DTensorSpec", (), {"mesh": mesh, "placements": copies}
    )
    state = {"_local_tensor": in_memory(np.zeros(2, np.float32)), "_spec": spec}
    return Record("torch.distributed.tensor.DTensor", (None, None, None, (2,)), state)


def test_ranks_of_meshes_with_other_axes_are_a_contradiction() -> None:
    """Seen red: a ValueError of `zip`."""
    whole = joined([part_at(0, 0), part_at(0, 1)], Path("ranks"), ())
    assert whole.shape == (2,)
    with pytest.raises(CorruptError, match=r"\[0, 0\] in the mesh[\s\S]*on rank 1: \[1\] in the mesh"):
        joined([part_at(0, 0), part_at(1)], Path("ranks"), ())


@pytest.mark.parametrize("key", ["step", "lr"])
def test_a_rank_of_another_step_is_refused(key: str, tmp_path: Path) -> None:
    """Counts are tensors, which are compared when they are read; options are compared at once."""
    folder = tmp_path / "run"
    shutil.copytree(CASE / "fsdp2", folder)
    file = folder / "optim_world_size_2_rank_1.pt"
    old, new = {
        "step": (struct.pack("<f", 4), struct.pack("<f", 900)),
        "lr": (b"G" + struct.pack(">d", 0.01), b"G" + struct.pack(">d", 0.5)),
    }[key]
    with zipfile.ZipFile(CASE / "fsdp2" / file.name) as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            is_pickle = name.endswith("data.pkl")
            target.writestr(name, data.replace(old, new) if is_pickle or data == old else data)
    with pytest.raises(CorruptError, match=r"contradict each other|Ranks hold different values"):
        statekit.open(folder)


def saved_on_ranks(kind: str, ranks: int, folder: Path) -> None:
    command = [sys.executable, "-W", "ignore", HERE / "rank_saving.py", kind, f"{ranks}", folder / "run"]
    subprocess.run([*map(str, command)], check=True, timeout=120)


def test_the_sharded_tensors_of_fsdp1_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen red: refused as a call of getattr."""
    assert_whole(SHARDED / "run", torch.load(SHARDED / "whole.pt"))
    assert "nothing found" in told(["doctor", SHARDED / "run"], 0, capsys)
    assert "BITWISE" in told(["convert", SHARDED / "run", tmp_path / "run.pt"], 0, capsys)
    with statekit.open(SHARDED / "run") as opened:  # each rank's generator is its own
        assert {"rng/rank_0", "rng/rank_1"} <= opened.checkpoint.tensors.keys()
    for file in sorted((SHARDED / "run").iterdir()):
        with pytest.raises(RefusedError, match=r"one rank's parts[\s\S]*a ShardedTensor"):
            statekit.open(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"shard_offsets", b"shard_offsats"),
        (b"shards_metadata", b"shards_metadate"),
        (b"X\x06\x00\x00\x00tensor", b"X\x06\x00\x00\x00tensar"),
        (b"ProcessGroupState", b"process_groupstat"),
        (b"torch.distributed._shard.sharded_tensor.api\nShardedTensor", b"os\nsystem"),
    ],
)
def test_sharded_tensors_that_are_described_otherwise_are_refused(
    old: bytes, new: bytes, tmp_path: Path
) -> None:
    for file in (SHARDED / "run").iterdir():
        changed(file, tmp_path / file.name, lambda data: data.replace(old, new))
    with pytest.raises(FormatError):
        statekit.open(tmp_path)


def test_pieces_that_are_missing_are_named(tmp_path: Path) -> None:
    for name in ("ckpt_rank0.pt", "ckpt_rank1.pt"):
        shutil.copy(SHARDED / "run" / "ckpt_rank0.pt", tmp_path / name)
    with pytest.raises(CorruptError, match=r"pieces don't make up[\s\S]*no piece at \[6, 0\]"):
        statekit.open(tmp_path)


def changed(file: Path, to: Path, change: Callable[[bytes], bytes]) -> None:
    """Writes a torch file with another pickle."""
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(to, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, change(data) if name.endswith("data.pkl") else data)


@pytest.mark.slow
def test_what_fsdp1_saves_goes_on_by_its_printed_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_on_ranks("fsdp1_sharded", 3, tmp_path)
    whole = torch.load(tmp_path / "whole.pt")
    assert_whole(tmp_path / "run", whole)
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0]
    (tmp_path / "lines.py").write_text(lines)
    saved_on_ranks("lines", 3, tmp_path)
    assert_equal(torch.load(tmp_path / "next.pt"), whole["next"])


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
def test_the_local_weights_of_fsdp1_are_refused(tmp_path: Path) -> None:
    saved_on_ranks("fsdp1_local", 2, tmp_path)
    for place in (tmp_path / "run", tmp_path / "run" / "ckpt_rank1.pt"):
        with pytest.raises(RefusedError, match=r"weights of FSDP1 are flat[\s\S]*LOCAL_STATE_DICT"):
            statekit.open(place)


NAMED = [
    ("model_rank0.pt", "model_rank1.pt"),
    ("rank_0.pt", "rank_1.pt"),
    ("rank0.pt", "rank1.pt"),
    ("epoch1_rank00.pth", "epoch1_rank01.pth"),
    ("rank0_epoch1.pt", "rank1_epoch1.pt"),
    ("pytorch_model.rank0.bin", "pytorch_model.rank1.bin"),
]
"""Names of a folder's files that are one save."""
APART = [
    ("gpu0.pt", "gpu1.pt"),
    ("ckpt_1_of_2.pt", "ckpt_2_of_2.pt"),
    ("checkpoint_last-shard0.pt", "checkpoint_last-shard1.pt"),
    ("consolidated.00.pth", "consolidated.01.pth"),
    ("rank0/ckpt.pt", "rank1/ckpt.pt"),
]
"""Names of files of ranks that no folder is opened by."""


def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved_by_ranks(
    folder: Path, names: Sequence[str], seeds: Sequence[int], *, weights: bool = False
) -> None:
    for rank, (name, seed) in enumerate(zip(names, seeds, strict=True)):
        model, optimizer = trained(seed)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        run = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rank": rank}
        torch.save(model.state_dict() if weights else run, folder / name)


@pytest.mark.parametrize("names", [*NAMED, *APART], ids=lambda names: names[0])
def test_a_ranks_file_names_the_others(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: nothing named the other rank, and weights were called weights alone."""
    saved_by_ranks(tmp_path, names, [0, 1])
    file = tmp_path / names[0]
    other = Path(names[1]).name
    for verb, code in (("inspect", 0), ("doctor", 1)):
        assert f"{other} looks like another rank's file" in told([verb, file], code, capsys)
    model, optimizer = trained(0)
    result = attest(optimizer, model, file)  # a rank that goes on from its own file isn't stopped
    assert result.passed and "another rank's file" in str(result)
    with pytest.warns(UserWarning, match="another rank's file"):
        load_optimizer(file, model.named_parameters())
    saved_by_ranks(tmp_path, names, [0, 1], weights=True)
    shown = told(["inspect", file], 0, capsys)
    assert "weights alone" not in shown and f"{other} looks like another rank's file" in shown


@pytest.mark.parametrize("names", NAMED, ids=lambda names: names[0])
def test_ranks_that_differ_without_a_word_are_refused(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen red: inspect and ls showed the first rank's as the run."""
    saved_by_ranks(tmp_path, names, [0, 1])
    for verb in ("inspect", "doctor", "resume"):
        assert "Ranks hold different values of a tensor" in told([verb, tmp_path], 3, capsys)


@pytest.mark.parametrize("names", [*NAMED, *APART], ids=lambda names: names[0])
def test_replicas_are_one_run(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under DDP each rank may save the same; its number is its own."""
    saved_by_ranks(tmp_path, names, [0, 0])
    for file in [tmp_path / names[0], *([tmp_path] if names in NAMED else [])]:
        assert "nothing found" in told(["doctor", file], 0, capsys)


def test_several_saves_of_ranks_are_told_apart(tmp_path: Path) -> None:
    """Seen red: one of them won in silence."""
    for epoch in (1, 2):
        saved_by_ranks(tmp_path, [f"epoch{epoch}_rank{rank}.pt" for rank in range(2)], [epoch, epoch])
    for step, number in ((None, 2), (1, 1), (2, 2)):
        with statekit.open(tmp_path, step=step) as opened:
            assert opened.checkpoint.step == number and opened.checkpoint.meta["steps"] == [1, 2]
            weight = trained(number)[0].state_dict()["weight"]
            assert np.array_equal(np.asarray(opened.params["weight"].read()), weight)
    with pytest.raises(NotFoundError, match="no such step"):
        statekit.open(tmp_path, step=3)
    for name in ("best", "last"):
        saved_by_ranks(tmp_path, [f"{name}_rank{rank}.pt" for rank in range(2)], [0, 0])
    with pytest.raises(NotFoundError, match="files of one save: best, last"):
        statekit.open(tmp_path)


def test_numbers_that_count_no_ranks_name_nothing(tmp_path: Path) -> None:
    """The ranks of adapters, parts of a data set, and files of several steps."""
    for name in ("lora_rank8.pt", "lora_rank16.pt", "model_1.pt", "model_2.pt"):
        torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / name)
    for name in ("lora_rank8.pt", "model_1.pt"):
        with statekit.open(tmp_path / name) as opened:
            assert "weights alone" in repr(opened)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_matrix_with_a_whole_second_moment_is_named_in_the_headline(tmp_path: Path) -> None:
    """FSDP1 and ZeRO hand torch's Adafactor flat pieces. Seen red: "BITWISE", "The same run", and lines whose optimizer
    asserts at its first step that row_var and col_var are defined."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model = torch.nn.Linear(5, 4)
    optimizer: Any = torch.optim.Adafactor(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    tree = optimizer.state_dict()
    tree["state"] = dict(zip(("weight", "bias"), tree["state"].values(), strict=True))
    tree["param_groups"][0]["params"] = ["weight", "bias"]
    record = tree["state"]["weight"]
    record["variance"] = record.pop("row_var") * record.pop("col_var")
    save({"model": model.state_dict(), "optimizer": tree}, checkpoint_id=tmp_path / "run.dcp")
    planned = plan(tmp_path / "run.dcp", tmp_path / "run.pt")
    condition = "if the optimizer goes on with flat pieces of weight, as FSDP1 and ZeRO cut it"
    assert planned.headline == f"BITWISE, {condition}"
    statekit.convert(tmp_path / "run.dcp", tmp_path / "run.pt")
    verified = verify(tmp_path / "run.dcp", tmp_path / "run.pt")
    assert verified.data["verdict"]["headline"] == f"NOT COMPARABLE, {condition}"
    assert any(
        line.startswith("optimizer = ...  # the run's own")
        for line in resume_lines(of_plan(planned), planned.state)
    )
    with pytest.raises(InexactError, match="saw flat pieces"):
        plan(tmp_path / "run.dcp", tmp_path / "jax", to="orbax")
