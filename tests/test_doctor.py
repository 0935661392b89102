"""doctor: each silent fault of a file is found by its name, and nothing in what the originals wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
import samples
import torch
from samples import Row
from test_diff import T5X, altered

import statekit
from goldens import COMPACT, GOLDEN
from statekit.attestation.doctor import Examination, doctor
from statekit.attestation.reading import readings
from statekit.attestation.two_steps import Step, between_steps
from statekit.cli.main import DONE, WANTING, main
from statekit.conversion import registry
from statekit.conversion.contracts import Hints
from statekit.conversion.open_state import open_state
from statekit.errors import NotFoundError, StateError, StatekitError, UnknownFormatError
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Stored, Tensor, bytes_of, in_memory
from statekit.tensors.tree import mapped

Change = Callable[[Any, Any, Any], None]


def of_slot(name: str, change: Callable[[Any], Any]) -> Change:
    def changed(model: Any, slots: Any, group: Any) -> None:
        slots[name] = in_memory(np.asarray(change(slots[name].read().copy())))

    return changed


def negated(values: Any) -> Any:
    values.flat[0] = -values.flat[0]
    return values


def spoilt(values: Any) -> Any:
    values.flat[3] = np.nan
    return values


def late(model: Any, slots: Any, group: Any) -> None:
    group["step_offset"] = 1000


FAULTS: dict[str, Change] = {
    "second-moment-negative": of_slot("v_row", negated),
    "not-finite": of_slot("m", spoilt),
    "slots-narrow": of_slot("v_row", lambda values: values.astype(DTYPES["bfloat16"])),
    "step-offset": late,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_parameter_is_found(name: str, tmp_path: Path) -> None:
    [one] = doctor(altered(tmp_path / "run.pt", FAULTS[name]))
    assert [finding.name for finding in one.findings] == [name], one.findings


def changed_all(path: Path, change: Callable[[dict[int, Any], Any], None]) -> Path:
    from torch_files import save

    from statekit.conversion.open_state import open_state
    from statekit.conversion.registry import layout

    with open_state(T5X) as opened:
        tree: Any = layout("statekit-torch").encode(opened.state).tree
        change(tree["optimizer"]["state"], tree)
        return save(path, tree)


def zeroed(state: dict[int, Any], tree: Any) -> None:
    for slots in state.values():
        slots["m"] = in_memory(np.zeros(slots["m"].shape, np.float32))


def copied(state: dict[int, Any], tree: Any) -> None:
    group = tree["optimizer"]["param_groups"][0]
    first, second = group["param_names"][:2]
    numbers = dict(zip(group["param_names"], group["params"], strict=True))
    tree["model"][second] = in_memory(tree["model"][first].read() + 1)
    state[numbers[second]] = dict(state[numbers[first]])
    group["rules"][second] = group["rules"][first]


def test_moments_that_are_zero_or_copies_everywhere_are_found(tmp_path: Path) -> None:
    [one] = doctor(changed_all(tmp_path / "zero.pt", zeroed))
    assert [finding.name for finding in one.findings] == ["moments-zero"]
    [one] = doctor(changed_all(tmp_path / "copied.pt", copied))
    assert [finding.name for finding in one.findings] == ["slots-duplicated"]


def test_moments_that_a_later_step_repeats_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (4, 8):
        shutil.copytree(T5X / "checkpoint_4", tmp_path / f"checkpoint_{step}")
    one, two = doctor(tmp_path)
    assert one.passed
    assert {finding.name for finding in two.findings} == {"files"}  # it is called 8, and says 4
    statekit.convert(T5X, tmp_path / "run", to="t5x", param_dtype="bfloat16")
    shutil.rmtree(tmp_path / "checkpoint_8")
    shutil.copytree(tmp_path / "run" / "checkpoint_4", tmp_path / "checkpoint_8")
    (tmp_path / "checkpoint_8" / "statekit.json").unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "run")
    assert "moments-stale" in {finding.name for finding in doctor(tmp_path)[1].findings}
    assert main(["doctor", str(tmp_path), "--json"]) == WANTING
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["passed"]) == ("statekit.doctor/1", False)
    assert main(["doctor", str(tmp_path), "--step", "4"]) == DONE


@pytest.mark.parametrize(
    ("is_turned", "form"), [(False, "step-{}.pt"), (True, "step-{}.pt"), (True, "{}/run.pt")]
)
def test_stale_moments_are_found_however_the_steps_are_named(
    is_turned: bool, form: str, tmp_path: Path
) -> None:
    """A saver of stale values keeps the count of updates too; the numbers of the names tell the order."""
    moments = {name: torch.linspace(0.1, 1, 99) for name in ("exp_avg", "exp_avg_sq")}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(99))], lr=0.01).state_dict()
    optimizer["state"] = {0: {"step": torch.tensor(5.0), **moments}}
    for step in (25, 30):
        weights = {"w": torch.linspace(-1, 1, 99) * step}
        (tmp_path / form.format(step)).parent.mkdir(exist_ok=True)
        torch.save({"model": weights, "optimizer": optimizer}, tmp_path / form.format(step))
    paths = [tmp_path / form.format(step) for step in (25, 30)]
    for named in ([tmp_path], paths[::-1] if is_turned else paths):
        earlier, later = doctor(*named)
        assert [earlier.path, later.path] == paths
        assert found([later]) == {"moments-stale"}


def test_files_whose_numbers_are_seeds_are_no_steps(tmp_path: Path) -> None:
    for seed in (1, 2):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(99))], lr=0.01).state_dict()
        moments = {name: torch.linspace(0.1, seed, 99) for name in ("exp_avg", "exp_avg_sq")}
        optimizer["state"] = {0: {"step": torch.tensor(5.0), **moments}}
        torch.save(
            {"model": {"w": torch.linspace(-1, seed, 99)}, "optimizer": optimizer},
            tmp_path / f"run-{seed}.pt",
        )
    assert not found(doctor(tmp_path))


def found(each: Iterable[Examination]) -> set[str]:
    return {finding.name for one in each for finding in one.findings}


def examined(row: Row, *paths: Path) -> tuple[Examination, ...]:
    return doctor(*paths, container=row.sample.container, hints=row.hints)


ROWS = faulty.rows()
FEW = ("safetensors", "t5x")
"""Containers in whose files faults between steps are looked for in every run of the tests."""


def is_found(row: Row, name: str, folder: Path) -> bool:
    """Makes a fault in a file of a family; tells whether it could be made, and asserts that it is found then."""
    path = faulty.faulty(row, folder, faulty.CHANGES[name])
    if path is None:
        return False
    try:
        each = examined(row, path)
    except UnknownFormatError:  # refused before anything is looked at
        return False
    names = found(each)
    assert {name, "undecodable"} & names or not faulty.arrived(name, row, path), (row.sample.container, names)
    assert all(one.why and one.remedy and one.where for each_one in each for one in each_one.findings)
    return name in names


@pytest.mark.parametrize("name", faulty.CHANGES)
def test_a_fault_is_found_in_files_of_a_family(name: str, tmp_path: Path) -> None:
    rows = [row for row in ROWS if row.layout in ("statekit", "statekit-torch", "torch-optim")]
    made = (is_found(row, name, tmp_path / str(i)) for i, row in enumerate(rows))
    assert any(made) or name == "master-stale"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sample.container}-{row.layout}-{row.name[:12]}")
def test_every_fault_is_found_in_files_of_every_family(row: Row, tmp_path: Path) -> None:
    assert sum(is_found(row, name, tmp_path / name) for name in faulty.CHANGES) >= 3


def between(row: Row, folder: Path, names: Iterable[str]) -> set[str]:
    """Makes faults between two steps of a family, asserts that they are found, and returns which could be made."""
    first = faulty.faulty(row, folder / "first", lambda state: state)
    later = faulty.faulty(row, folder / "later", faulty.evolved)
    assert first is not None and later is not None
    honest = found(examined(row, first, later))
    # A record of a trainer and powers of betas aren't made to go on with the state here.
    assert honest <= {"files", "powers-disagree"}, honest
    made = set()
    for name in names:

        def changed(state: TrainState, change: Any = faulty.BETWEEN[name]) -> TrainState | None:
            later: TrainState | None = change(state, faulty.evolved(state))
            return later

        path = faulty.faulty(row, folder / name, changed)
        names_found = set[str]() if path is None else found(examined(row, first, path))
        if path is not None and ("undecodable" in names_found or faulty.is_kept(name, row, path)):
            assert {name, "undecodable", "parts-missing"} & names_found, (
                row.sample.container,
                name,
                names_found,
            )
            made |= {name} & names_found
    return made


def test_a_count_that_stood_while_moments_moved_is_found() -> None:
    with open_state(T5X / "checkpoint_4") as opened:
        later = faulty.evolved(opened.state)
        stale = replace(later, counts=opened.state.counts)
        steps = [Step(state, readings(state)) for state in (opened.state, later, stale)]
        names = [{one.name for one in between_steps(steps[0], step)} for step in steps[1:]]
    assert names == [set(), {"count-stale"}]


def test_a_fault_between_two_steps_is_found(tmp_path: Path) -> None:
    made = set[str]()
    for container in FEW:
        row = next(row for row in ROWS if row.sample.container == container)
        made |= between(row, tmp_path / container, faulty.BETWEEN.keys() - made)
    assert made == faulty.BETWEEN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.sample.container}-{row.layout}-{row.name[:12]}")
def test_every_fault_between_two_steps_of_every_family_is_found(row: Row, tmp_path: Path) -> None:
    assert len(between(row, tmp_path, faulty.BETWEEN)) >= 2


HONEST_FAULTS = {"zero_grad_nan": {"not-finite"}}
"""What a recording has of purpose: MXNet's LANS makes NaN of a gradient that is zero."""


def assert_honest(path: Path, name: str, **said: Any) -> None:
    try:
        each = doctor(path, **said)
    except StateError as error:
        assert "--" in error.remedy, name  # what only the user knows
        return
    assert found(each) == HONEST_FAULTS.get(name, set()), [one.to_json() for one in each]


def recordings() -> list[Path]:
    """Returns every checkpoint of an original, and those of T5X in Orbax too."""
    folders = sorted({GOLDEN, COMPACT})
    each = [meta.parent / "checkpoint" for root in folders for meta in sorted(root.glob("*/*/meta.json"))]
    each += [path for root in folders for path in sorted(root.glob("t5x/*/checkpoint_orbax"))]
    return [path for path in each if path.is_dir()]


@pytest.mark.parametrize("path", recordings()[::9], ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_nothing_is_found_in_what_an_original_wrote(path: Path) -> None:
    assert_honest(path, path.parent.name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", recordings(), ids=lambda path: f"{path.parts[-4]}-{path.parts[-3]}-{path.parts[-2]}"
)
def test_nothing_is_found_in_anything_that_the_originals_wrote(path: Path) -> None:
    assert_honest(path, path.parent.name)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (i % 5 > 0)) for i, row in enumerate(samples.ROWS)]
)
def test_nothing_is_found_in_the_samples_of_formats(row: Row, tmp_path: Path) -> None:
    sample = row.sample_in(tmp_path)
    assert_honest(sample.path, row.name, container=sample.container, hints=row.hints)


def conversions(row: Row, folder: Path, targets: Iterable[str]) -> int:
    """Converts a sample to every target that takes it, and asserts that nothing is found in what was written."""
    sample, done = row.sample_in(folder), 0
    for target in targets:
        path = folder / "to" / target / samples.target_name(target)
        path.parent.mkdir(parents=True)
        try:
            statekit.convert(sample.path, path, to=target, from_=sample.container, variant=row.hints.variant)
        except (StatekitError, KeyError):
            continue
        assert_honest(path, row.name)
        done += 1
    return done


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", samples.ROWS, ids=lambda row: f"{row.sample.container}-{row.layout}-{row.name[:12]}"
)
def test_nothing_is_found_in_any_valid_conversion(row: Row, tmp_path: Path) -> None:
    assert conversions(row, tmp_path, samples.writable())


@pytest.mark.torch
def test_two_biases_that_are_added_have_the_same_moments_honestly(tmp_path: Path) -> None:
    import torch

    model = torch.nn.LSTM(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 1, 4))[0].sum().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    [one] = doctor(tmp_path / "run.pt")
    assert "slots-duplicated" not in [finding.name for finding in one.findings]


@pytest.mark.torch
def test_biases_of_a_shortcut_and_a_cycled_momentum_are_no_findings(tmp_path: Path) -> None:
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.skip = torch.nn.Linear(4, 8), torch.nn.Linear(4, 8)

        def forward(self, x: Any) -> Any:
            return self.main(torch.tanh(x)) + self.skip(x)

    model = Block()
    optimizer = torch.optim.AdamW(model.named_parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20)
    paths = [tmp_path / f"{i}.pt" for i in range(2)]
    for path in paths:
        optimizer.zero_grad()
        (model(torch.randn(3, 4)) ** 2).sum().backward()
        optimizer.step()
        scheduler.step()
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, path)
    for one in doctor(*paths):
        assert one.findings == ()
        (said,) = [note for note in one.notes if "the same bits" in note]
        assert "slots/main/bias/m, slots/skip/bias/m" in said
    saved = torch.load(paths[1])
    saved["optimizer"]["state"][0]["exp_avg"] = saved["optimizer"]["state"][2]["exp_avg"]
    saved["optimizer"]["param_groups"][0]["weight_decay"] = 0.5
    torch.save(saved, paths[1])
    assert found(doctor(*paths)) == {"slots-duplicated", "hyperparameter-changed"}


def base(tensor: Any) -> Any:
    while hasattr(tensor, "source"):
        tensor = tensor.source
    return tensor


def native(row: Row, folder: Path, change: Callable[[Any, Tensor], Tensor | None]) -> Path:
    """Writes a sample with tensors changed as they lie in its file."""
    folder.mkdir(parents=True, exist_ok=True)
    sample = row.sample_in(folder)
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=row.hints) as opened:
        encoded = registry.layout(row.layout).encode(opened.state)

        def changed(leaf: Any) -> Any:
            made = change(opened.state, base(leaf)) if isinstance(leaf, Tensor) else None
            return leaf if made is None else made

        return faulty.put(row, folder / "native", replace(encoded, tree=mapped(encoded.tree, changed)))


def row_of(container: str, layout: str) -> Row:
    return next(row for row in ROWS if (row.sample.container, row.layout) == (container, layout))


def small_count(state: Any, leaf: Tensor) -> Tensor | None:
    slots = [slot for slots in state.slots.values() for slot in slots.values()]
    if (
        bytes_of(leaf) in {bytes_of(base(one)) for one in (*state.params.values(), *slots)}
        or np.prod(leaf.shape) != 1
    ):
        return None
    is_count = float(leaf.read().reshape(-1)[0]) == state.counts.updates
    return in_memory(leaf.read().astype(DTYPES["bfloat16"])) if is_count else None


def broadcast(state: Any, leaf: Tensor) -> Tensor | None:
    for path, slots in state.slots.items():
        names = [name for name in ("v", "exp_avg_sq", "v_row", "v_col") if name in slots]
        if names and len(state.params[path].shape) > 0 and np.prod(state.params[path].shape) > 3:
            is_one = bytes_of(leaf) in [bytes_of(base(slots[name])) for name in names]
            return in_memory(np.zeros(1, leaf.dtype)) if is_one else None
    return None


@pytest.mark.parametrize(
    ("container", "layout"),
    [
        ("accelerate", "torch-optim"),
        ("t5x", "t5x"),
        ("flax", "optax"),
        ("megatron", "megatron"),
        ("dcp", "torch-fqn"),
    ],
)
def test_a_count_in_bfloat16_is_found(container: str, layout: str, tmp_path: Path) -> None:
    row = row_of(container, layout)
    assert "count-narrow" in found(examined(row, native(row, tmp_path, small_count)))


@pytest.mark.parametrize(
    ("container", "layout"),
    [
        ("statekit", "statekit"),
        ("t5x", "t5x"),
        ("orbax", "optax"),
        ("tf-bundle", "mesh-tf"),
        ("hf-trainer", "torch-optim"),
    ],
)
def test_placeholders_that_stand_for_data_are_found(container: str, layout: str, tmp_path: Path) -> None:
    row = row_of(container, layout)
    assert found(examined(row, native(row, tmp_path, broadcast))) == {"placeholders"}


@pytest.mark.parametrize("name", ["t2t", "mesh-tf", "statekit-jax", "optax", "keras", "t5x"])
def test_row_and_column_in_each_others_place_are_found_where_shapes_tell(name: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.layout == name)
    path = None

    def swapped(state: Any, leaf: Tensor) -> Tensor | None:
        pairs = [slots for slots in state.slots.values() if "v_row" in slots]
        slots = next((one for one in pairs if one["v_row"].shape != one["v_col"].shape), None)
        if slots is None:
            pytest.skip("the compact recordings have no such run of it")
        both = [base(slots[one]) for one in ("v_row", "v_col")]
        places = [i for i, one in enumerate(both) if bytes_of(one) == bytes_of(leaf)]
        return both[1 - places[0]] if places else None

    path = native(row, tmp_path, swapped)
    assert found(examined(row, path)) <= {"undecodable", "factors-exchanged"} != set()
    assert not examined(row, path)[0].passed


def test_a_square_row_and_column_can_not_be_told_apart_and_that_is_said() -> None:
    [one] = doctor(GOLDEN / "t5x" / "momentum_f32" / "checkpoint")
    assert one.passed
    assert any("whether they are exchanged can't be told from one step" in note for note in one.notes)


def test_powers_of_other_betas_are_found(tmp_path: Path) -> None:
    for layout in ("tf-adam", "tf2-adam"):
        row = row_of("tf-bundle", layout)

        def other(state: Any, leaf: Tensor) -> Tensor | None:
            is_power = leaf.shape == () and leaf.dtype == np.float32 and 0 < float(leaf.read()) < 1
            known = {bytes_of(base(param)) for param in state.params.values()}
            return (
                in_memory(np.asarray(np.float32(0.5))) if is_power and bytes_of(leaf) not in known else None
            )

        assert "powers-disagree" in found(examined(row, native(row, tmp_path / layout, other)))
        honest = native(row, tmp_path / "honest" / layout, lambda state, leaf: None)
        assert found(examined(row, honest)) == set()
        hints = Hints({"beta2": 0.5}, "tf1")
        assert found(doctor(honest, container="tf-bundle", hints=hints)) == {"powers-disagree"}


def test_a_count_that_was_rounded_is_found(tmp_path: Path) -> None:
    import torch_files

    place = tmp_path / "checkpoint-1001"
    shutil.copytree(COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4", place)
    with open_state(place) as opened:
        tree: Any = dict(opened.checkpoint.tree)["optimizer"]
        state = {
            n: {**one, "step": in_memory(np.asarray(1000, np.float32))} for n, one in tree["state"].items()
        }
        (place / "optimizer.pt").unlink()
        torch_files.save(place / "optimizer.pt", {**tree, "state": state})
    record = json.loads((place / "trainer_state.json").read_text())
    (place / "trainer_state.json").write_text(json.dumps({**record, "global_step": 1001}))
    findings = {one.name: one for one in doctor(place)[0].findings}
    assert findings["count-rounded"].found == "1000"
    assert "1001" in findings["count-rounded"].expected


def test_what_is_missing_is_found_and_the_rest_of_the_run_is_looked_at(tmp_path: Path) -> None:
    for step in (4, 8):
        shutil.copytree(T5X / "checkpoint_4", tmp_path / "t5x" / f"checkpoint_{step}")
    next((tmp_path / "t5x" / "checkpoint_4").rglob("0.0")).unlink()
    one, two = doctor(tmp_path / "t5x")
    assert found([one]) == {"damaged"}
    assert found([two]) == {"files"}
    for header in (tmp_path / "t5x" / "checkpoint_4").rglob(".zarray"):
        header.write_text(header.read_text().replace('"fill_value":null', '"fill_value":0'))
    assert found(doctor(tmp_path / "t5x", step=4)) == {"values-absent"}
    with pytest.raises(NotFoundError):
        doctor(tmp_path / "t5x", step=5)
    ranks = tmp_path / "ranks"
    shutil.copytree(COMPACT / "torch_formats" / "adamw_megatron_core" / "checkpoint", ranks)
    next(iter(sorted(ranks.rglob("*.distcp")))).unlink()
    assert found(doctor(ranks)) == {"parts-missing"}


@pytest.mark.parametrize("part", [0, 1, 2])
@pytest.mark.parametrize("lost", ["variable", "slots", "both"])
def test_a_partitioned_variable_without_one_of_its_parts_is_found(
    part: int, lost: str, tmp_path: Path
) -> None:
    row = next((row for row in samples.ROWS if "partitioned" in row.name), None)
    if row is None:
        pytest.skip("the compact recordings lack it")
    sample = row.sample
    with open_state(sample.path, container=sample.container, layout=row.layout, hints=row.hints) as opened:
        encoded = registry.layout(row.layout).encode(opened.state)
        tree: dict[str, Any] = dict(encoded.tree)
        for name, parts in tree.items():
            if (
                isinstance(parts, dict)
                and len(parts) == 3
                and lost in ("both", ("variable", "slots")["Ada" in name])
            ):
                tree[name] = {spec: one for i, (spec, one) in enumerate(parts.items()) if i != part}
        path = faulty.put(row, tmp_path, replace(encoded, tree=tree))
    assert found(doctor(path)) in ({"undecodable"}, {"parts-missing"}, {"slot-missing"}), doctor(path)


def test_every_value_is_read_once_even_beside_its_master_and_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = COMPACT / "torch_formats" / "adamw_deepspeed_bf16_zero1" / "checkpoint" / "global_step4"
    statekit.convert(zero, tmp_path / "run.statekit", to="statekit")
    reads: list[Any] = []
    read = Stored.read

    def counted(self: Stored, index: Any = None) -> Any:
        if np.prod(self.shape) > 1:
            reads.append((self.name, self.place, str(index)))
        return read(self, index)

    monkeypatch.setattr(Stored, "read", counted)
    [one] = doctor(tmp_path / "run.statekit")
    assert one.passed
    assert reads
    assert len(reads) == len({*reads})
    with open_state(tmp_path / "run.statekit") as opened:
        assert any("master" in slots for slots in opened.state.slots.values())


def test_masters_that_do_not_round_to_their_parameters_are_found(tmp_path: Path) -> None:
    zero = COMPACT / "torch_formats" / "adamw_deepspeed_bf16_zero1" / "checkpoint" / "global_step4"
    row = row_of("statekit", "statekit")
    with open_state(zero) as opened:
        state = faulty.overtaken(opened.state)
        assert state is not None
        path = faulty.put(row, tmp_path, registry.layout("statekit").encode(state))
    assert found(doctor(path)) == {"master-stale"}


def test_a_finding_that_is_meant_to_be_is_ignored_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(altered(tmp_path / "run.pt", FAULTS["not-finite"]))
    assert main(["doctor", path]) == WANTING
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("not-finite", "why it matters", "what to do", "NaN or Inf"))
    assert main(["doctor", path, "--ignore", "not-finite"]) == DONE
    assert "ignored: not-finite" in capsys.readouterr().out
    assert main(["doctor", path, "--ignore", "not-finit"]) not in (DONE, WANTING)


def test_one_fault_has_one_name_for_attest_and_doctor_and_the_former_name_is_ignored_too(
    tmp_path: Path,
) -> None:
    row = row_of("statekit", "statekit")
    with open_state(GOLDEN / "t5x" / "momentum_f32" / "checkpoint") as opened:
        state = faulty.bare(opened.state)
        assert state is not None
        path = faulty.put(row, tmp_path, registry.layout("statekit").encode(state))
    assert found(doctor(path)) == {"slot-missing"}
    for name in ("slot-missing", "slots-missing"):
        assert main(["doctor", str(path), "--ignore", name]) == DONE


def forgotten(earlier: TrainState, later: TrainState) -> TrainState:
    """Drops the first moment of every parameter, as a saver does that doesn't know its name."""
    slots = {path: {n: slot for n, slot in each.items() if n != "m"} for path, each in later.slots.items()}
    return replace(later, slots=slots)


def reordered(state: TrainState) -> TrainState | None:
    """Gives two parameters of one shape each other's state, as a loader by position does."""
    first, second = next(
        (one, other)
        for one in state.slots
        for other in state.slots
        if one != other
        and state.params[one].shape == state.params[other].shape
        and np.prod(state.params[one].shape) > 8
    )
    louder = in_memory(state.params[second].read() * np.asarray(64, state.params[second].dtype))
    slots = {**state.slots, first: state.slots[second], second: state.slots[first]}
    return replace(state, params={**state.params, second: louder}, slots=slots)


BUGS: dict[str, tuple[str, str, faulty.Change, str]] = {
    "unsloth-zoo#1150": ("accelerate", "torch-optim", faulty.bare, "slot-missing"),
    "unsloth-zoo#964": ("hf-trainer", "torch-optim", faulty.zeroed, "moments-zero"),
    "keras#13027": ("keras", "keras", faulty.uncounted, "moments-of-no-update"),
    "pytorch#43706": ("accelerate", "torch-optim", faulty.narrowed, "slots-narrow"),
    "asi#2714": ("flax", "optax", faulty.narrowed, "slots-narrow"),
    "pytorch#1489": ("torch", "icefall", reordered, "scale-statistics"),
}
"""Public bug whose run was saved again -> container and layout, what it does to the state, and what is found."""
BUGS_BETWEEN: dict[str, tuple[str, Callable[[TrainState, TrainState], TrainState | None], str]] = {
    "RL#3312": ("safetensors", faulty.stale_moments, "moments-stale"),
    "DeepSpeed#8608": ("accelerate", forgotten, "slot-missing"),
    "Automodel#3882": ("accelerate", faulty.redecayed, "hyperparameter-changed"),
    "Megatron-LM#6920": ("accelerate", faulty.stale_tensors, "tensors-stale"),
}
"""The same between two steps."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_public_bug_is_found_in_files(bug: str, tmp_path: Path) -> None:
    container, layout, change, name = BUGS[bug]
    row = row_of(container, layout)
    path = faulty.faulty(row, tmp_path, change)
    assert path is not None
    assert name in found(examined(row, path))
    assert f"{bug}]" in (Path(__file__).parents[1] / "docs" / "resume_bugs.md").read_text()


@pytest.mark.parametrize("bug", BUGS_BETWEEN)
def test_a_public_bug_is_found_between_two_steps(bug: str, tmp_path: Path) -> None:
    container, change, name = BUGS_BETWEEN[bug]
    row = next(row for row in ROWS if row.sample.container == container)
    first = faulty.faulty(row, tmp_path / "first", lambda state: state)
    path = faulty.faulty(row, tmp_path / "later", lambda state: change(state, faulty.evolved(state)))
    assert first is not None and path is not None
    assert {name, "undecodable"} & found(examined(row, first, path))
    assert f"{bug}]" in (Path(__file__).parents[1] / "docs" / "resume_bugs.md").read_text()


def test_a_name_or_a_record_of_another_step_is_found_unless_it_may_be_meant(tmp_path: Path) -> None:
    """A program that counts from 0 calls the checkpoint after 101 updates 100; a trainer's record doesn't."""
    shutil.copytree(T5X / "checkpoint_4", tmp_path / "checkpoint_3")
    assert found(doctor(tmp_path / "checkpoint_3")) == set()
    place = tmp_path / "checkpoint-3"
    shutil.copytree(COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint" / "checkpoint-4", place)
    record = json.loads((place / "trainer_state.json").read_text())
    (place / "trainer_state.json").write_text(json.dumps({**record, "global_step": 3}))
    assert found(doctor(place)) == {"files"}


def test_counts_that_differ_between_ranks_are_found(tmp_path: Path) -> None:
    row = row_of("dcp", "torch-fqn")

    def late(state: TrainState) -> TrainState:
        return replace(state, counts=replace(state.counts, behind={next(iter(state.params)): 2}))

    path = faulty.faulty(row, tmp_path, late)
    assert path is not None
    assert found(examined(row, path)) == {"files"}


def test_moments_of_few_bits_that_a_conversion_kept_are_said_and_are_no_finding(tmp_path: Path) -> None:
    path = faulty.faulty(row_of("flax", "optax"), tmp_path / "source", faulty.narrowed)
    assert path is not None
    assert found(doctor(path)) == {"slots-narrow"}
    statekit.convert(path, tmp_path / "run.statekit", to="statekit")
    [one] = doctor(tmp_path / "run.statekit")
    assert one.passed
    assert any("as the source had them" in note for note in one.notes)


@pytest.mark.torch
def test_a_schedule_at_an_endless_step_is_no_crash(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler = {"last_epoch": 10**400, "_step_count": 10**400, "base_lrs": [0.1]}
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler}
    torch.save(run, tmp_path / "run.pt")
    assert len(doctor(tmp_path / "run.pt")) == 1


def test_an_array_of_text_in_an_npz_is_a_remark(tmp_path: Path) -> None:
    """Seen red: a KeyError of the fault's name."""
    moments = {f"opt_state/0/{slot}/w": np.ones((4, 3), np.float32) for slot in ("mu", "nu")}
    params = {"params/w": np.ones((4, 3), np.float32), "opt_state/0/count": np.asarray(5, np.int32)}
    np.savez(tmp_path / "run.npz", **moments, **params, note=np.asarray("text"))  # type: ignore[arg-type]  # of savez' own stub
    assert doctor(tmp_path / "run.npz", hints=Hints(optimizer="adamw"))


def adam_of(path: Path, moments: Callable[[Any], Any], **options: Any) -> list[str]:
    """Saves an Adam of four matrices, of one of which the state is changed; returns the findings of doctor."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.Linear(4, 3, bias=False) for _ in range(4))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    moments(optimizer.state[next(model.parameters())])
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    (examined,) = doctor(path)
    return [finding.name for finding in examined.findings]


@pytest.mark.parametrize("slot", ["exp_avg_sq", "max_exp_avg_sq"])
def test_a_second_moment_of_zeros_beside_a_first_moment_is_found(slot: str, tmp_path: Path) -> None:
    """It divides the next update by epsilon. Seen red: nothing found."""
    assert adam_of(tmp_path / "a.pt", lambda state: state[slot].zero_(), amsgrad=True) == [
        "second-moment-zero"
    ]


def both(state: Any) -> None:
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()


def tiny(state: Any) -> None:
    state["exp_avg"].mul_(1e-22)
    state["exp_avg_sq"].zero_()


HONEST: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "without gradients": (both, {}),
    "gradients whose squares no float32 has": (tiny, {}),
    "a first moment of the last gradient": (lambda state: state["exp_avg"].zero_(), {"betas": (0.0, 0.999)}),
    "a first moment that outlives the second": (
        lambda state: state["exp_avg_sq"].zero_(),
        {"betas": (0.99, 0.9)},
    ),
    "rows without gradients": (
        lambda state: [state[name][1:].zero_() for name in ("exp_avg", "exp_avg_sq")],
        {},
    ),
}


@pytest.mark.parametrize("kind", HONEST)
def test_moments_that_a_run_may_leave_so_are_no_fault(kind: str, tmp_path: Path) -> None:
    change, options = HONEST[kind]
    assert adam_of(tmp_path / "a.pt", change, **options) == []


def test_weights_of_whole_numbers_are_named(tmp_path: Path) -> None:
    """Seen red: ValueError, "data type int32 not inexact", of their factored moments."""
    run = GOLDEN / "t5x_checkpoints/sharded_2x2/legacy/checkpoint_4"
    shutil.copytree(run, tmp_path / "checkpoint_4")
    header = tmp_path / "checkpoint_4/target.encoder.layers_0.mlp.wi_0.kernel/.zarray"
    header.write_text(header.read_text().replace('"<f4"', '"<i4"'))
    (examined,) = doctor(tmp_path / "checkpoint_4")
    assert "undecodable" in [finding.name for finding in examined.findings]
