"""Folders of torch.distributed.checkpoint: as recorded, joined from ranks, written so that PyTorch restores them."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dcp_files import DCP, MEGATRON, bundle, bytes_of, folder, plain, save, torch_read

from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.budget import Account, Budget, Limits
from statekit.conversion.contracts import Encoded
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import detect_container
from statekit.converters.containers.dcp import CONTAINER
from statekit.converters.formats.dcp import writer
from statekit.converters.formats.dcp.metadata import read_metadata
from statekit.converters.layouts.pytorch.parts import with_names
from statekit.errors import NotFoundError, RefusedError, UsageError
from statekit.files import source
from statekit.files.checksums import ZIP, of_tensor
from statekit.state.train_state import TrainState
from statekit.tensors.boxes import Box, tiling_fault
from statekit.tensors.tensor import BLOCK_BYTES, Filled, chunks, in_memory, same_values
from statekit.verify.recording import open_recording
from statekit.verify.replay import Subject, replay

LAYOUTS = {"adamw_dcp_single_flattened": "torch-fqn-flat", MEGATRON: "megatron"}
CASES = [*DCP, MEGATRON]


@contextmanager
def recorded(name: str) -> Iterator[TrainState]:
    with open_recording(bundle(name)) as recording:
        step = recording.checkpoint_step
        assert step is not None
        yield recording.state(step, recording.trajectories[0], step + 1)


def assert_same(ours: TrainState, expected: TrainState) -> None:
    assert ours.params.keys() == expected.params.keys() and ours.counts == expected.counts
    for path, tensors in expected.slots.items():
        assert same_values(ours.params[path], expected.params[path]), path
        assert ours.slots[path].keys() == tensors.keys(), path
        assert all(same_values(ours.slots[path][slot], tensors[slot]) for slot in tensors), path


def test_a_recording_of_each_sort_is_here() -> None:
    assert "adafactor_dcp_single" in DCP and bundle(MEGATRON).is_dir()


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_state_is_decoded(name: str) -> None:
    with recorded(name) as expected, open_state(folder(name)) as opened:
        assert opened.checkpoint.container == ("megatron" if name == MEGATRON else "dcp")
        assert opened.layout == LAYOUTS.get(name, "torch-fqn")
        assert_same(opened.state, expected)
        for group, meant in zip(opened.state.optimizer.groups, expected.optimizer.groups, strict=True):
            assert group.paths == meant.paths
            hyperparameters = {k: v for k, v in meant.hyperparameters.items() if k != "learning_rate"}
            assert hyperparameters.items() <= group.hyperparameters.items()


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(n, c, id=f"{n}-{c}", marks=marks(n, n != "numpy")) for n in BACKENDS for c in CASES],
)
def test_training_goes_on_from_the_folder(name: str, case: str) -> None:
    with open_recording(bundle(case)) as recording:
        result = replay(Subject(recording), backend(name))
        assert result.start == "checkpoint" and result.passed


def test_a_permuted_slot_is_noticed(tmp_path: Path) -> None:
    with CONTAINER.open(folder(DCP[0])) as checkpoint:
        slots = checkpoint.tree["optim"]["state"]["conv.weight"]
        slots["variance"] = (
            in_memory(np.flip(slots["variance"].read()).copy()) if "variance" in slots else None
        )
        row = "row_var" if "row_var" in slots else "exp_avg_sq"
        slots[row] = in_memory(np.flip(slots[row].read()).copy())
        place = save(tmp_path / "turned.dcp", {**checkpoint.tree, "optim": {
            **checkpoint.tree["optim"], "state": {**checkpoint.tree["optim"]["state"], "conv.weight": {
                k: v for k, v in slots.items() if v is not None}}}})  # fmt: skip
    with open_recording(bundle(DCP[0])) as recording:
        result = replay(Subject(replace(recording, checkpoint=str(place))), backend("numpy"))
        assert not result.passed and result.decoded


@pytest.mark.torch
@pytest.mark.parametrize("name", DCP)
def test_what_is_written_is_what_pytorch_wrote(name: str, tmp_path: Path) -> None:
    there = tmp_path / "there"
    convert(plan(folder(name), there, to="dcp"))
    with open_state(folder(name)) as before, open_state(there) as after, recorded(name) as expected:
        assert before.layout == after.layout
        assert plain(before.checkpoint.tree) == plain(after.checkpoint.tree)
        assert_same(after.state, expected)
        assert after.checkpoint.manifest is not None and after.checkpoint.findings == ()
    assert _same(torch_read(folder(name)), torch_read(there))


def _same(left: Any, right: Any) -> bool:
    import torch

    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right)


def network() -> Any:
    """The recorded network."""
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import torch

            self.wi, self.sq = nn.Linear(8, 3, bias=False), nn.Linear(4, 4, bias=False)
            self.bias = nn.Parameter(torch.zeros(5))

    model = nn.Module()
    model.embed, model.enc = nn.Embedding(6, 4), Encoder()
    model.conv = nn.Conv1d(2, 4, 3, bias=False)
    return model


def optimizer_of(name: str, model: Any) -> Any:
    import torch

    named = dict(model.named_parameters())
    decayed = [p for path, p in named.items() if path != "enc.bias"]
    kind = torch.optim.Adafactor if "adafactor" in name else torch.optim.AdamW
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": [named["enc.bias"]], "weight_decay": 0.0}]
    return kind(groups, lr=0.5)


@pytest.mark.torch
@pytest.mark.parametrize("name", DCP)
def test_pytorch_restores_a_run_from_it(name: str, tmp_path: Path) -> None:
    """set_state_dict after dcp.load into what get_state_dict gives: the strict way, which asks for every option."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    convert(plan(folder(name), tmp_path / "there", to="dcp"))
    model = network()
    optimizer = optimizer_of(name, model)
    options = StateDictOptions(flatten_optimizer_state_dict=LAYOUTS.get(name) == "torch-fqn-flat")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_part, optimizer_part = get_state_dict(model, optimizer, options=options)
        parts: dict[str, Any] = {"model": model_part, "optim": optimizer_part}
        load(parts, checkpoint_id=tmp_path / "there", no_dist=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optim"],
            options=options,
        )
    with recorded(name) as expected, open_state(folder(name)) as opened:
        kept = {path: tensor.read() for path, tensor in expected.params.items()}
        stored = opened.checkpoint.tree["optim"]
        for fqn, parameter in model.named_parameters():
            assert np.array_equal(parameter.detach().numpy(), kept[fqn.replace(".", "/")])
            for slot, value in optimizer.state[parameter].items():
                stored_slot = (
                    stored["state"][fqn][slot] if "state" in stored else stored[f"state.{fqn}.{slot}"]
                )
                assert np.array_equal(value.numpy(), stored_slot.read()), (fqn, slot)
        assert [g["weight_decay"] for g in optimizer.param_groups] == [
            g.hyperparameters["weight_decay_rate"] for g in opened.state.optimizer.groups
        ]


@pytest.mark.parametrize("name", [DCP[0], MEGATRON])
def test_it_becomes_the_neutral_folder_and_comes_back(name: str, tmp_path: Path) -> None:
    with open_state(folder(name)) as opened:
        container, layout = opened.checkpoint.container, opened.layout
        convert(plan(folder(name), tmp_path / "a.statekit"))
        convert(plan(tmp_path / "a.statekit", tmp_path / "back", to=container, layout=layout))
        with open_state(tmp_path / "back") as back:
            assert back.layout == layout
            assert_same(back.state, opened.state)
            assert plain(back.checkpoint.tree) == plain(opened.checkpoint.tree)


def test_two_writes_give_equal_bytes(tmp_path: Path) -> None:
    with CONTAINER.open(folder(DCP[0])) as checkpoint:
        one, two = (bytes_of(save(tmp_path / n, checkpoint.tree)) for n in ("one", "two"))
    assert one == two and b"tmp" not in one[".metadata"]


@pytest.mark.torch
def test_pieces_go_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 4000)
    monkeypatch.setattr(source, "MOST_OPEN", 2)
    with CONTAINER.open(folder(DCP[0])) as checkpoint:
        there = save(tmp_path / "there", checkpoint.tree)
        assert len(list(there.glob("*.distcp"))) > 5
        with CONTAINER.open(there) as again:
            assert plain(again.tree) == plain(checkpoint.tree)
    assert _same(torch_read(folder(DCP[0])), torch_read(there))


@pytest.mark.torch
@pytest.mark.parametrize("computed", [True, False])
def test_values_that_were_saved_without_checksums_are_not_said_to_have_some(
    computed: bool, tmp_path: Path
) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    torch.serialization.set_crc32_options(computed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            odd = OrderedDict(a=1)
            odd.version = 2  # type: ignore[attr-defined]
            saved = {"w": torch.ones(3), "epoch": 3, "odd": (odd,)}
            dcp_save(saved, checkpoint_id=tmp_path / "it", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    with CONTAINER.open(tmp_path / "it") as checkpoint:
        assert of_tensor(checkpoint.tensors["w"]) == (ZIP if computed else "")
        notes = [finding.what for finding in checkpoint.findings]
    assert (
        "attribute version of a dict has no place in the tree" in notes
    )  # what else an object says is said too
    assert any("carry no checksum" in note for note in notes) != computed


@pytest.mark.torch
@pytest.mark.parametrize("form", ["index", "top", "flat file"])
def test_other_ways_to_save_a_run(form: str, tmp_path: Path) -> None:
    """By index, as state_dict() is; the model at the top beside a flat optimizer, as torchtitan keeps it."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    torch.manual_seed(0)
    model = network()
    optimizer = optimizer_of("adamw", model)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    gathered, flattened = get_state_dict(model, optimizer, options=flat)
    saved: dict[str, Any] = {
        "index": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
        "top": {**gathered, "optimizer": flattened, "train_state": {"step": torch.tensor(2)}},
        "flat file": {"model": gathered, "optimizer": flattened},
    }[form]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(saved, checkpoint_id=tmp_path / "it", no_dist=True)
    with open_state(tmp_path / "it") as opened:
        state = opened.state
        assert state.counts.updates == 2 and len(state.optimizer.groups) == 2
        for name, parameter in model.named_parameters():
            path, slots = name.replace(".", "/"), optimizer.state[parameter]
            assert np.array_equal(state.params[path].read(), parameter.detach().numpy())
            assert np.array_equal(state.slots[path]["v"].read(), slots["exp_avg_sq"].numpy())
    convert(plan(tmp_path / "it", tmp_path / "again", to="dcp"))
    with open_state(tmp_path / "again") as again, open_state(tmp_path / "it") as before:
        assert_same(again.state, before.state)


@pytest.mark.torch
@pytest.mark.parametrize(("kind", "options"), [("AdamW", {}), ("Adafactor", {"factored": False})])
def test_our_own_optimizers_go_through_it(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    import statekit.torch

    model = network()
    optimizer = getattr(statekit.torch, kind)(model.named_parameters(), lr=0.01, **options)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_part, optimizer_part = get_state_dict(model, optimizer)
        parts: dict[str, Any] = {"model": model_part, "optimizer": optimizer_part}
        dcp_save(parts, checkpoint_id=tmp_path / "theirs", no_dist=True)
        convert(plan(tmp_path / "theirs", tmp_path / "ours", to="dcp"))
        kept = {p: {k: t.clone() for k, t in slots.items()} for p, slots in optimizer.state.items()}
        for slots in parts["optimizer"]["state"].values():
            for slot in slots.values():
                slot.zero_()
        load(parts, checkpoint_id=tmp_path / "ours", no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    with open_state(tmp_path / "ours") as opened:
        assert opened.layout == "statekit-torch" and opened.state.counts.updates == 2
    assert all(
        torch.equal(optimizer.state[p][k], t) for p, tensors in kept.items() for k, t in tensors.items()
    )


def test_a_run_of_several_steps(tmp_path: Path) -> None:
    for step in (5, 20):
        save(tmp_path / f"step-{step}", {"model": {"w": Filled((2,), np.dtype("float32"), step)}}, step=step)
    assert detect_container(tmp_path)[0].name == "dcp"
    with CONTAINER.open(tmp_path) as newest, CONTAINER.open(tmp_path, 5) as first:
        assert (newest.step, newest.meta["steps"]) == (20, [5, 20])
        assert first.tree["model"]["w"].read().tolist() == [5, 5]
    with pytest.raises(NotFoundError, match=r"no such step(.|\n)*5, 20"):
        CONTAINER.open(tmp_path, 6)


def test_trees_keep_their_form(tmp_path: Path) -> None:
    tensor = Filled((2, 3), np.dtype("float32"), 1.5)
    tree: dict[str, Any] = {
        "empty": {}, "none": None, "list": [1, "a", {"b": tensor}], "plain": [1, [2, 3]], "pair": (1, tensor),
        "scalar": Filled((), np.dtype("int64"), 7), "nothing": Filled((0, 4), np.dtype("float32")), "": b"raw",
    }  # fmt: skip
    with CONTAINER.open(save(tmp_path / "it", tree)) as checkpoint:
        assert plain(checkpoint.tree) == plain(tree)
        assert set(checkpoint.tensors) == {"list/2/b", "pair/1", "scalar", "nothing"}
    with pytest.raises(UsageError, match=r"has the flat name a\.b, as has a\.b"):
        save(tmp_path / "clash", {"a.b": 1, "a": {"b": 2}})
    with pytest.raises(UsageError, match="holds a dict"):
        save(tmp_path / "list", [1])


def test_a_large_tensor_is_read_in_blocks(tmp_path: Path) -> None:
    size = 6 * BLOCK_BYTES // 4
    there = save(tmp_path / "it", {"model": {"w": Filled((size // 1024, 1024), np.dtype("float32"), 2.0)}})
    with CONTAINER.open(there) as checkpoint:
        tensor = checkpoint.tensors["model/w"]
        tracemalloc.start()
        try:
            assert all(float(block.min()) == float(block.max()) == 2.0 for block in chunks(tensor))
            assert tracemalloc.get_traced_memory()[1] < 4 * BLOCK_BYTES
        finally:
            tracemalloc.stop()
        assert tensor.read((slice(5, 6), slice(3, 4))).tolist() == [[2.0]]


def test_opening_reads_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the headers of tensors: a piece is met when its first value is asked for."""
    place = folder(DCP[0])
    entries = read_metadata((place / ".metadata").read_bytes(), "").tensors.values()
    pieces = [chunk.piece for entry in entries for chunk in entry.chunks]
    seen: list[int] = []
    real = source.File.read

    def counting(self: Any, start: int, count: int) -> Any:
        seen.extend(i for i, p in enumerate(pieces) if start < p.start + p.size and p.start < start + count)
        return real(self, start, count)

    monkeypatch.setattr(source.File, "read", counting)
    with CONTAINER.open(place) as checkpoint:
        assert not seen
        checkpoint.tensors["model/embed.weight"].read()
        assert len({*seen}) == 1


def test_inspecting_imports_no_framework() -> None:
    code = (
        "import sys; from pathlib import Path; from statekit.conversion.open_state import open_state\n"
        f"open_state(Path({str(folder(DCP[0]))!r})).checkpoint.close()\n"
        "assert not {'torch', 'jax', 'tensorflow'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def cuts(rng: np.random.Generator, low: tuple[int, ...], high: tuple[int, ...], depth: int) -> Iterator[Box]:
    """A tensor cut in two again and again."""
    axes = [i for i, (a, b) in enumerate(zip(low, high, strict=True)) if b - a > 1]
    if not axes or not depth:
        yield low, tuple(b - a for a, b in zip(low, high, strict=True))
        return
    axis = int(rng.choice(axes))
    at = int(rng.integers(low[axis] + 1, high[axis]))
    yield from cuts(rng, low, (*high[:axis], at, *high[axis + 1 :]), depth - 1)
    yield from cuts(rng, (*low[:axis], at, *low[axis + 1 :]), high, depth - 1)


@pytest.mark.parametrize("seed", range(20))
def test_any_cut_tiles_and_any_change_is_noticed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(2, 9, rng.integers(1, 4)))
    boxes = list(cuts(rng, (0,) * len(shape), shape, 4))
    assert sum(math.prod(sizes) for _, sizes in boxes) == math.prod(shape)
    assert tiling_fault(shape, boxes) == "" == tiling_fault(shape, boxes[::-1])
    gone = int(rng.integers(len(boxes)))
    assert "values" in tiling_fault(shape, boxes[:gone] + boxes[gone + 1 :])
    assert "overlap" in tiling_fault(shape, [*boxes, boxes[gone]])
    (offsets, sizes), axis = boxes[gone], int(rng.integers(len(shape)))
    longer = (*sizes[:axis], sizes[axis] + 1, *sizes[axis + 1 :])
    assert tiling_fault(shape, [*boxes[:gone], (offsets, longer), *boxes[gone + 1 :]]) != ""
    assert "axes" in tiling_fault(shape, [((0,), (1,) * (len(shape) + 1))])


def test_a_million_comparisons_are_not_made() -> None:
    account = Account(Budget(Limits(100 * 512)))
    with pytest.raises(RefusedError, match="too many parts"):
        tiling_fault((100, 100), [((i, i), (100 - i, 1)) for i in range(100)], "here", account)


def test_an_optimizer_by_index_is_written_by_name() -> None:
    group = {"lr": 0.1, "params": [0, 1], "param_names": ["a", "b.c"]}
    encoded = Encoded(
        {"optimizer": {"state": {1: {"m": Filled((), np.dtype("float32"))}}, "param_groups": [group]}}, 1
    )
    optimizer = CONTAINER.fitted(with_names(encoded)).tree["optimizer"]
    assert list(optimizer["state"]) == ["b.c"] and optimizer["param_groups"][0]["params"] == ["a", "b.c"]
    nameless = Encoded({"optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, 1)
    assert CONTAINER.fitted(with_names(nameless)).tree == nameless.tree
