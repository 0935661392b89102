"""PyTorch's own optimizers and ScaledAdam in torch files: names found, batches split, and everything written back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from samples import state_writer
from torch_files import save

from goldens import bundles
from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.cli.main import main
from statekit.cli.param_names import read_param_names
from statekit.conversion.contracts import Hints, Layout
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import detect_layout
from statekit.converters.containers.torch_file import CONTAINER
from statekit.converters.layouts.icefall import LAYOUT as ICEFALL
from statekit.converters.layouts.pytorch.param_order import named_order, shaped_order
from statekit.converters.layouts.pytorch.parts import is_plain
from statekit.converters.layouts.pytorch.torch_optim import LAYOUT as TORCH_OPTIM
from statekit.errors import FormatError, InexactError, NotFoundError, RefusedError, StateError, UsageError
from statekit.files.checkpoint import SORTED, Checkpoint
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, Tensor, in_memory, same_values
from statekit.tensors.tree import walk
from statekit.tensors.views import Slice, Squeezed, Stack
from statekit.testing.layouts import made_state
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Subject, replay
from statekit.verify.start_state import native_state

SYSTEMS: dict[str, Layout] = {
    "scaled_adam": ICEFALL, "torch_adafactor": TORCH_OPTIM, "torch_formats": TORCH_OPTIM,
}  # fmt: skip


def _files() -> list[Path]:
    """Bundles that can be replayed, whose checkpoint is a torch file with model and optimizer."""
    files = []
    for folder in (one for system in SYSTEMS for one in bundles(system)):
        try:
            with open_recording(folder) as recording:
                path = folder / recording.checkpoint
                if CONTAINER.detect(path) is None:
                    continue
                with CONTAINER.open(path) as checkpoint:
                    if SYSTEMS[recording.system].detect(checkpoint) is not None:
                        files.append(folder)
        except (NotFoundError, RefusedError):  # pieces of FSDP1's ranks, which have a container of their own
            continue
    return files


FILES = _files()
NEED_NAMES = ("pt7_two_groups_eden", "zipformer2025_groups_clipping")
"""Equal shapes stand in both groups."""


def named(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def said(recording: Recording) -> TrainState:
    step = recording.checkpoint_step
    assert step is not None
    return recording.state(step, recording.trajectories[0], step + 1)


def plain(tree: Any, *, without: str = "param_names") -> dict[Any, Any]:
    """Returns every leaf by its path, but names that we add to groups without, and what weights_only refuses."""
    return {
        path: (leaf.dtype.name, leaf.shape, leaf.read().tobytes()) if isinstance(leaf, Tensor) else repr(leaf)
        for path, leaf in walk({key: part for key, part in tree.items() if is_plain(part)})
        if without not in path
    }


def test_there_are_recordings() -> None:
    assert {folder.parent.name for folder in FILES} == SYSTEMS.keys()


@pytest.mark.parametrize("folder", FILES, ids=named)
def test_a_recorded_state_is_found_by_shape_and_written_again(folder: Path) -> None:
    with open_recording(folder) as recording, CONTAINER.open(folder / recording.checkpoint) as checkpoint:
        layout, expected = SYSTEMS[recording.system], said(recording)
        assert detect_layout(checkpoint)[0].name == layout.name
        names = tuple(path for group in expected.optimizer.groups for path in group.paths)
        if folder.name in NEED_NAMES:
            with pytest.raises(StateError, match=r"stands in the groups 0 and 1(.|\n)*--param-names"):
                layout.decode(checkpoint, Hints())
        hints = Hints(param_names=names if folder.name in NEED_NAMES else None)
        state = layout.decode(checkpoint, hints)
        with native_state(folder / recording.checkpoint, expected) as ours:
            assert ours.counts == expected.counts
            assert ours.params.keys() == expected.params.keys()
            for path, tensors in expected.slots.items():
                assert same_values(ours.params[path], expected.params[path]), path
                assert ours.slots[path].keys() == tensors.keys(), path
                assert all(same_values(ours.slots[path][slot], tensors[slot]) for slot in tensors), path
            for group, recorded in zip(ours.optimizer.groups, expected.optimizer.groups, strict=True):
                assert group.paths == recorded.paths
                assert all(same_values(group.slots[n], recorded.slots[n]) for n in recorded.slots)
        assert plain(layout.encode(state).tree) == plain(checkpoint.tree)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    ("name", "folder"),
    [pytest.param(n, f, id=f"{n}-{named(f)}", marks=marks(n, n != "numpy")) for n in BACKENDS for f in FILES],
)
def test_training_goes_on_from_the_file(name: str, folder: Path) -> None:
    with open_recording(folder) as recording:
        result = replay(Subject(recording), backend(name))
        assert result.start == "checkpoint" and result.passed


@pytest.mark.sampled(6)
@pytest.mark.parametrize("folder", FILES, ids=named)
def test_a_permuted_slot_is_noticed(folder: Path, tmp_path: Path) -> None:
    """A slot turned round in the file: the start isn't the recorded state."""
    with open_recording(folder) as recording:
        with CONTAINER.open(folder / recording.checkpoint) as checkpoint:
            layout = SYSTEMS[recording.system]
            names = tuple(path for group in said(recording).optimizer.groups for path in group.paths)
            hints = Hints(param_names=names if folder.name in NEED_NAMES else None)
            state = layout.decode(checkpoint, hints)
            slots = {path: dict(tensors) for path, tensors in state.slots.items()}
            path, slot = next(
                (path, slot)
                for path, tensors in slots.items()
                for slot, tensor in tensors.items()
                if len(np.unique(tensor.read().astype(np.float64))) > 1
            )
            slots[path][slot] = in_memory(np.flip(slots[path][slot].read()).copy())
            spoilt = save(tmp_path / "spoilt.pt", layout.encode(replace(state, slots=slots)).tree)
        result = replay(Subject(replace(recording, checkpoint=str(spoilt))), backend("numpy"))
        assert not result.passed and result.decoded


def test_converting_goes_both_ways(tmp_path: Path) -> None:
    for folder in (
        one for one in FILES if one.name in ("zipformer2025_basic", "adafactor_bf16", "adamw_legacy")
    ):
        with open_recording(folder) as recording:
            source = folder / recording.checkpoint
        middle, back = tmp_path / f"{folder.name}.statekit", tmp_path / f"{folder.name}.pt"
        convert(plan(source, middle))
        convert(plan(middle, back, layout=SYSTEMS[folder.parent.name].name))
        with open_state(source) as before, open_state(back) as after:
            assert before.layout == after.layout
            assert plain(before.checkpoint.tree) == plain(after.checkpoint.tree)


def model(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return dict(shapes)


def test_shapes_decide_where_they_can() -> None:
    one = shaped_order([[(3,), (4, 2)]], model(a=(4, 2), b=(3,)))
    assert one.groups == (("b", "a"),) and not one.notes
    equal = shaped_order([[(3,), (3,)], [(2,)]], model(a=(3,), c=(2,), b=(3,)))
    assert equal.groups == (("a", "b"), ("c",)) and "2 of equal shapes" in equal.notes[0]
    lazy = shaped_order([[None, (3,), None]], model(a=(2,), b=(3,), c=(3,)))
    assert lazy.groups == (("a", "b", "c"),) and lazy.notes


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ([[(3,)], [(3,)]], "stands in groups"),
        ([[(3,)]], "1 in the optimizer, 2 in the model"),
        ([[(5,), (3,)]], "0 in the model"),
        ([[None, (3,)], [(3,)]], "have no slots"),
        ([[(3,), None]], "don't stand in the order"),
    ],
)
def test_shapes_that_decide_nothing_are_refused(groups: list[list[Any]], match: str) -> None:
    known = model(a=(2,), b=(3,)) if match.startswith("don't") else model(a=(3,), b=(3,))
    with pytest.raises(StateError, match=rf"{match}(.|\n)*--param-names"):
        shaped_order(groups, known)


def test_given_names_count_and_are_counted() -> None:
    groups = [{"params": [0, 1]}, {"params": [2]}]
    known = dict.fromkeys(("x.a", "x.b", "c"))
    order = named_order(groups, known, ("c", "x/a", "x.b"))
    assert order is not None and order.groups == (("c", "x.a"), ("x.b",))
    for names, match in ((("c", "x.a"), "expected: 3"), (("c", "x.a", "d"), "isn't in the model part @ d")):
        with pytest.raises(StateError, match=match):
            named_order(groups, known, names)


def test_the_order_of_batches_is_the_models_where_the_file_sorts_its_names() -> None:
    folder = next(f for f in FILES if f.parent.name == "scaled_adam" and f.name not in NEED_NAMES)
    with open_recording(folder) as recording, CONTAINER.open(folder / recording.checkpoint) as checkpoint:
        meant = ICEFALL.decode(checkpoint, Hints())
        weights = dict(checkpoint.tree["model"])
        tree = {**checkpoint.tree, "model": dict(sorted(weights.items(), reverse=True))}
        left = replace(checkpoint, tree=tree, meta={**checkpoint.meta, SORTED: True})
        with pytest.raises(StateError, match="sorts them by name"):
            ICEFALL.decode(left, Hints())
        moved = [path.replace("/", ".") for group in meant.optimizer.groups for path in group.paths]
        state = ICEFALL.decode(left, Hints(model={name: weights[name] for name in moved}))
        assert state.optimizer.groups[0].paths == meant.optimizer.groups[0].paths
        for path, tensors in meant.slots.items():
            assert all(same_values(state.slots[path][slot], tensor) for slot, tensor in tensors.items())


def test_parameters_without_slots_are_refused_where_equal_shapes_lie_together() -> None:
    folder = next(f for f in FILES if f.parent.name == "scaled_adam" and f.name not in NEED_NAMES)
    with open_recording(folder) as recording, CONTAINER.open(folder / recording.checkpoint) as checkpoint:
        state = ICEFALL.decode(checkpoint, Hints())
        first = next(iter(state.slots))
        with pytest.raises(InexactError, match="no slots"):
            ICEFALL.encode(
                replace(state, slots={path: slots for path, slots in state.slots.items() if path != first})
            )


def test_slots_without_a_count_or_a_batch_are_refused() -> None:
    folder = next(f for f in FILES if f.parent.name == "scaled_adam" and f.name not in NEED_NAMES)
    with open_recording(folder) as recording, CONTAINER.open(folder / recording.checkpoint) as checkpoint:
        part = checkpoint.tree["optimizer"]
        first = next(i for i, record in part["state"].items() if "delta" in record)
        records = {i: {k: v for k, v in one.items() if k != "step"} for i, one in part["state"].items()}
        for state, match in (
            (records, "has slots and no step"),
            ({**part["state"], 999: part["state"][first]}, "no batch's first parameter @ state/999"),
        ):
            tree = {**checkpoint.tree, "optimizer": {**part, "state": state}}
            with pytest.raises(StateError, match=match):
                ICEFALL.decode(replace(checkpoint, tree=tree), Hints())


def test_names_are_read_from_lines_json_and_state_dicts(tmp_path: Path) -> None:
    (tmp_path / "n.txt").write_text("a.b\n\n c \n")
    (tmp_path / "n.json").write_text('[["a.b"], ["c"]]')
    assert read_param_names(tmp_path / "n.txt") == read_param_names(tmp_path / "n.json") == ("a.b", "c")
    (tmp_path / "bad.json").write_text('{"a": 1}')
    with pytest.raises(FormatError, match="list of them"):
        read_param_names(tmp_path / "bad.json")
    folder = next(folder for folder in FILES if folder.name in NEED_NAMES)
    with open_recording(folder) as recording:
        names = [path for group in said(recording).optimizer.groups for path in group.paths]
        source = str(folder / recording.checkpoint)
    (tmp_path / "names.txt").write_text("\n".join(names))
    target = str(tmp_path / "out.statekit")
    assert main(["convert", source, target]) == 3
    options = ["--param-names", str(tmp_path / "names.txt"), "--variant", "pt7"]
    assert main(["convert", source, target, *options]) == 0
    with open_state(Path(target)) as opened:
        assert opened.state.optimizer.variant == "pt7"
        assert [path for group in opened.state.optimizer.groups for path in group.paths] == names


def tree_of(slots: Mapping[Any, Any], **options: Any) -> Checkpoint:
    group = {
        "betas": (0.9, 0.99),
        "amsgrad": False,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "maximize": False,
        **options,
    }
    weights = {"w": in_memory(np.ones((2, 3), np.float32))}
    return Checkpoint(
        "torch", Path("x"), {"model": weights, "optimizer": {"state": slots, "param_groups": [group]}}
    )


def adam(step: Any, shape: tuple[int, ...] = (2, 3)) -> dict[str, Any]:
    moment = in_memory(np.ones(shape, np.float32))
    return {"step": step, "exp_avg": moment, "exp_avg_sq": moment}


def test_states_that_make_no_sense_are_refused() -> None:
    good = TORCH_OPTIM.decode(tree_of({0: adam(in_memory(np.float32(3) * np.ones(())))}, params=[0]), Hints())
    assert good.counts.updates == 3
    for slots, match in (
        ({0: adam(1.5)}, "updates"),
        ({0: adam(None)}, "no step"),
        ({0: adam(3, (3, 2))}, "0 in the model"),
        ({0: adam(3), 7: adam(3)}, "stands in no group @ state/7"),
    ):
        with pytest.raises(StateError, match=match):
            TORCH_OPTIM.decode(tree_of(slots, params=[0]), Hints())
        TORCH_OPTIM.describe(tree_of(slots, params=[0]))
    strange = {"step": in_memory(np.float32(3) * np.ones(())), "exp_inf": in_memory(np.ones((2, 3)))}
    unknown = TORCH_OPTIM.decode(tree_of({0: strange}, params=[0]), Hints())
    assert unknown.optimizer.schema == "torch_native" and [*unknown.slots["w"]] == ["exp_inf"]
    with pytest.raises(InexactError, match="variant optax"):
        TORCH_OPTIM.encode(replace(good, optimizer=replace(good.optimizer, variant="optax")))
    with pytest.raises(InexactError, match="scaled_adam"):
        ICEFALL.encode(good)


@pytest.mark.parametrize(("to", "kept"), [("dcp-safetensors", False), ("megatron", False), ("dcp", True)])
def test_keys_of_groups_that_no_name_can_hold_are_named_as_left_out(
    to: str, kept: bool, tmp_path: Path
) -> None:
    """A pickle's text may have half a surrogate pair; the conversion failed, and the disk was blamed."""
    state = made_state("adamw", "torch")
    groups = [{"no\ud800te": 1, "note": "a\ud800"} for _ in state.optimizer.groups]
    source = state_writer("torch", "torch-fqn", lambda: replace(state, extra={"param_groups": groups}))(
        tmp_path
    )
    work = plan(source, tmp_path / "target", to=to)
    assert any("isn't Unicode" in note for note in work.dropped.values()) is not kept
    convert(work)


def test_a_parameter_that_missed_updates_keeps_its_count() -> None:
    weights = {name: in_memory(np.ones(n, np.float32)) for name, n in (("a", 2), ("b", 3))}
    state = {0: adam(5, (2,)), 1: adam(3, (3,))}
    group = {**tree_of({}, params=[0, 1]).tree["optimizer"]["param_groups"][0]}
    tree = {"model": weights, "optimizer": {"state": state, "param_groups": [group]}}
    decoded = TORCH_OPTIM.decode(Checkpoint("torch", Path("x"), tree), Hints())
    assert decoded.counts.updates == 5 and decoded.counts.behind == {"b": 3}
    written = TORCH_OPTIM.encode(decoded).tree["optimizer"]["state"]
    assert [float(slots["step"].read()) for slots in written.values()] == [5.0, 3.0]


def blocks(tensor: Tensor, whole: Array) -> None:
    """Holds every block of a tensor to the whole array."""
    random = np.random.default_rng(0)
    assert tensor.shape == whole.shape and np.array_equal(tensor.read(), whole)
    for _ in range(50):
        edges = [np.sort(random.integers(0, n + 1, 2)) for n in whole.shape]
        index = tuple(slice(int(a), int(b)) for a, b in edges)
        part = tensor.read(index)
        assert (
            np.array_equal(part, whole[index])
            and part.shape == whole[index].shape
            and part.flags.c_contiguous
        )


def test_transforms_read_any_block() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 1, 6)
    blocks(Squeezed(in_memory(array), (4, 6, 1)), array.reshape(4, 6, 1))
    blocks(Squeezed(in_memory(array.reshape(4, 6)), (1, 4, 6)), array.reshape(1, 4, 6))
    blocks(Squeezed(in_memory(array[:1, :, :1].copy()), ()), array[0, 0, 0])
    for axis in range(3):
        parts = [Slice(in_memory(array), axis, i) for i in range(array.shape[axis])]
        blocks(parts[-1], np.take(array, array.shape[axis] - 1, axis))
        blocks(Stack(parts, axis), array)
    with pytest.raises(UsageError, match="axes of length 1"):
        Squeezed(in_memory(array), (6, 4))


def test_shapes_that_contradict_the_models_order_are_no_order() -> None:
    """minGPT sorts names, so that its layers stand 0, 1, 10, 2; whoever reverses them is asked."""
    layers = {f"h.{i}.w": (3,) for i in range(11)}
    known = model(**{"wte": (5,), **layers, "z": (2,)})
    by_name = shaped_order([[*[(3,)] * 11, (5,), (2,)]], known)
    assert by_name.groups[0][:4] == ("h.0.w", "h.1.w", "h.10.w", "h.2.w") and "alphabet" in by_name.notes[0]
    in_order = shaped_order([[(5,), *[(3,)] * 11, (2,)]], known)
    assert in_order.groups[0][1:4] == ("h.0.w", "h.1.w", "h.2.w")
    with pytest.raises(StateError, match=r"don't stand in the order(.|\n)*--param-names"):
        shaped_order([[(2,), *[(3,)] * 11, (5,)]], known)


def test_a_group_for_each_parameter_is_taken_in_the_models_order() -> None:
    known = model(a=(2,), b=(3,), c=(3,))
    each = shaped_order([[(2,)], [(3,)], [(3,)]], known)
    assert each.groups == (("a",), ("b",), ("c",)) and "a group of its own" in each.notes[0]
    with pytest.raises(StateError, match="stands in groups"):
        shaped_order([[(3,)], [(2,)], [(3,)]], known)
