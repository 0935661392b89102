"""The budget of a job: what is kept makes room, what decompresses is explained, and every verb passes it on."""

from __future__ import annotations

import ast
import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from bomb_files import orbax_database, orbax_tensors, zarr_of, zstd_zeros
from safetensors.numpy import save_file
from zarr_files import write_array

import statekit
from goldens import GOLDEN, bundles
from statekit.budget import DEFAULT, Account, Budget, Limits, collecting_rarely
from statekit.cli import main
from statekit.conversion import registry
from statekit.conversion.contracts import NO_HINTS
from statekit.conversion.inspection import Request, inspect
from statekit.converters.formats.zarr.array import open_array
from statekit.converters.formats.zarr.headers import parse_zarray
from statekit.converters.formats.zarr.stores import FolderStore
from statekit.errors import BudgetError, FormatError, StatekitError
from statekit.files.source import Files


def test_what_saves_work_makes_room_for_what_is_needed() -> None:
    budget = Budget(Limits(100))
    one, other = Account(budget), Account(budget)
    one.hold(60, "A", "a")
    one.keep("a", "value", 60)
    assert one.kept("b") is None
    assert one.kept("a") == "value"
    one.keep("a", "value", 60)
    other.hold(90, "B", "b")
    assert one.kept("a") is None
    assert budget.held == 90
    with pytest.raises(BudgetError):
        one.hold(11, "A", "a")
    other.keep("b", "value", 90)
    other.close()
    assert budget.held == 0


def test_what_comes_out_of_compression_is_explained_by_what_was_read() -> None:
    budget = Budget(Limits(2**20))
    most = budget.limits.decoded(0)
    budget.decode(most, "A chunk", "a")
    with pytest.raises(BudgetError, match="becomes more than its bytes explain"):
        budget.decode(1, "A chunk", "a")
    budget.read(1)
    budget.decode(math.floor(most / 2**20), "A chunk", "a")


def load(framework: str, path: Path, **options: Any) -> object:
    """Loads a checkpoint's parameters into nothing, or its optimizer's state."""
    if framework == "torch":
        import torch

        import statekit.torch as torch_loading

        model = torch.nn.Linear(1, 1)
        if options.pop("optimizer", False):
            return torch_loading.load_optimizer(path, model.named_parameters(), **options)
        torch_loading.load_params(path, model, **options)
        return model
    import statekit.jax as jax_loading

    verb = jax_loading.load_optimizer if options.pop("optimizer", False) else jax_loading.load_params
    return verb(path, {}, **options)


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_loading_takes_a_budget(framework: str, optimizer: bool) -> None:
    path = next(case / "checkpoint" for case in bundles("keras")) / "model.weights.h5"
    with pytest.raises(BudgetError):
        load(framework, path, optimizer=optimizer, budget=100)
    with pytest.raises(StatekitError) as caught:  # a linear layer isn't that model
        load(framework, path, optimizer=optimizer, budget=2**30)
    assert not isinstance(caught.value, BudgetError)


@pytest.mark.jax
def test_honest_checkpoints_of_many_arrays_and_chunks_take_a_part_of_the_default(tmp_path: Path) -> None:
    """A 200th of it is enough for 400 arrays of Orbax' database, and for 1 500 chunks of gzip as T5X writes them."""
    limits = Limits(DEFAULT // 200)
    folder = orbax_tensors(tmp_path, 400)
    with registry.container("orbax").open(folder, budget=Budget(limits)) as opened:
        assert sum(tensor.read().nbytes for tensor in opened.tensors.values()) == 400 * 4
    array = np.arange(1500 * 256, dtype=np.float32).reshape(1500, 256)
    write_array(tmp_path / "array", array, (1, 256))
    with Files(Budget(limits), tmp_path) as files:
        stated = parse_zarray((tmp_path / "array" / ".zarray").read_bytes(), "array")
        tensor = open_array(FolderStore(tmp_path, files), "array", stated, "array")
        assert np.array_equal(tensor.read(), array)


@pytest.mark.jax
def test_of_an_array_of_orbax_an_open_checkpoint_holds_no_document(tmp_path: Path) -> None:
    """With it, 55 000 arrays were more than a conversion may hold."""
    budget, folder = Budget(), orbax_tensors(tmp_path, 400)
    with registry.opened(registry.container("orbax"), folder, None, NO_HINTS, budget):
        assert budget.held < 400 * 2500
    assert budget.held == 0


SMALL = np.random.default_rng(0).standard_normal(1000, np.float32)
"""Stored in chunks of one value each."""


def chunks_of_hdf5(folder: Path) -> Path:
    path = folder / "a.weights.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("layers/dense/vars/0", data=SMALL, chunks=(1,), compression="gzip")
    return path


def chunks_of_orbax(folder: Path) -> Path:
    values: dict[str, bytes] = {f"params.w/{i}": one.tobytes() for i, one in enumerate(SMALL)}
    header: dict[str, object] = {
        "zarr_format": 2,
        "shape": [1000],
        "chunks": [1],
        "dtype": "<f4",
        "order": "C",
    }
    header |= {"compressor": None, "fill_value": None, "filters": None, "dimension_separator": "."}
    values["params.w/.zarray"] = json.dumps(header).encode()
    key = [{"key": "params", "key_type": 2}, {"key": "w", "key_type": 2}]
    leaf = {"value_type": "jax.Array", "skip_deserialize": False}
    return orbax_database(folder, values, {"('params', 'w')": {"key_metadata": key, "value_metadata": leaf}})


@pytest.mark.jax
@pytest.mark.parametrize("make", [chunks_of_hdf5, chunks_of_orbax])
def test_many_small_chunks_are_read_in_proportion_to_what_is_stored(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = make(tmp_path)
    container = "orbax" if path.is_dir() else "keras-h5"
    with registry.container(container).open(path, budget=Budget(Limits(2**22))) as opened:
        (tensor,) = opened.tensors.values()
        assert np.array_equal(tensor.read(), SMALL)
        assert np.array_equal(tensor.read(), SMALL)  # what was explained once may be read again
    with registry.container(container).open(path, budget=Budget(Limits(2**20))) as opened:
        (tensor,) = opened.tensors.values()
        with pytest.raises(BudgetError, match="takes more work than its bytes explain"):
            tensor.read()


def test_small_chunks_explain_the_work_of_reading_each_as_a_whole(tmp_path: Path) -> None:
    """One file after the other is as much work as was stored; a part of every chunk, or none, is more."""
    array = np.arange(2 * 600, dtype=np.float32).reshape(2, 600)
    write_array(tmp_path / "array", array, (2, 1), None)
    with Files(Budget(Limits(2**18)), tmp_path) as files:
        stated = parse_zarray((tmp_path / "array" / ".zarray").read_bytes(), "array")
        store = FolderStore(tmp_path, files)
        tensor = open_array(store, "array", stated, "array")
        assert np.array_equal(tensor.read(), array)
        with pytest.raises(BudgetError, match="in chunks takes more work"):
            tensor.read((slice(0, 1), slice(0, 600)))
        absent = open_array(store, "nowhere", replace(stated, fill=0.0), "array")
        with pytest.raises(BudgetError, match="in chunks takes more work"):
            absent.read()


def test_files_explain_what_their_tensors_show_also_in_a_folder_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": np.zeros(20_000, np.float32)}, tmp_path / "a.safetensors")
    container, hints = registry.container("safetensors"), NO_HINTS

    def refuse(folder: Path, ends: str = "") -> list[Path]:
        raise FormatError("It may not be listed.", place=folder)

    monkeypatch.setattr(registry, "listing", refuse)
    with registry.opened(container, tmp_path / "a.safetensors", None, hints, Budget(Limits(2**14))) as opened:
        assert [tensor.read().size for tensor in opened.tensors.values()] == [20_000]


def test_chunks_are_looked_for_a_few_at_once_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_array(tmp_path / "array", np.arange(900, dtype=np.float32), (1,), None)
    asked = list[int]()

    def values(self: FolderStore, keys: Sequence[str]) -> Iterator[Any]:
        asked.append(len(keys))
        return map(self.value, keys)

    monkeypatch.setattr(FolderStore, "values", values)
    with Files(Budget(), tmp_path) as files:
        stated = parse_zarray((tmp_path / "array" / ".zarray").read_bytes(), "array")
        open_array(FolderStore(tmp_path, files), "array", stated, "array").read()
    assert asked == [256, 256, 256, 132]


def test_what_is_stored_once_explains_one_name_of_it(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.float32)
    write_array(tmp_path / "array", array, (1,), None)
    with Files(Budget(Limits(2**18)), tmp_path) as files:
        stated = parse_zarray((tmp_path / "array" / ".zarray").read_bytes(), "array")
        store = FolderStore(tmp_path, files)
        with pytest.raises(BudgetError, match="in chunks takes more work"):
            for i in range(9):
                assert np.array_equal(open_array(store, "array", stated, f"name {i}").read(), array)
        assert i == 1


@pytest.mark.parametrize(
    ("option", "name", "text"),
    [
        ("--hparams", "said.json", f'{{"decay_rate": 0.8}}{" " * 2**17}'),
        ("--hparams", "said.gin", "Adafactor.decay_rate = 0.8\n" * 2**12),
        ("--schedule", "said.gin", "Adafactor.decay_rate = 0.8\n" * 2**12),
        ("--param-names", "names.txt", "weight\n" * 2**15),
        ("--param-names", "names.json", json.dumps(["weight"] * 2**12)),
        ("--config", "config.json", f'{{"num_heads": 12}}{" " * 2**17}'),
        ("--map", "map.json", f"{{}}{' ' * 2**17}"),
    ],
)
def test_files_that_options_name_draw_on_the_jobs_budget(
    option: str, name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They had a budget of 512 MiB of their own, whatever `--budget` said."""
    file = tmp_path / name
    file.write_text(text)
    source = f"{bundles('t5x')[0] / 'checkpoint'}"
    map_name = ["--map", "t5x-t5:hf-t5"] if option == "--config" else []
    arguments = [
        "convert",
        source,
        f"{tmp_path / 'out.pt'}",
        "--dry-run",
        "--json",
        option,
        f"{file}",
        *map_name,
    ]
    assert main.main([*arguments, "--budget", "64KiB"]) == main.FAILED
    error = json.loads(capsys.readouterr().out)
    assert error["kind"] == "BudgetError" and name in error["place"], error


@pytest.mark.parametrize("verb", ["diff", "verify", "replay"])
def test_other_verbs_read_the_files_of_options_within_the_budget(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = bundles("t5x")[0]
    checkpoint, file = f"{recording / 'checkpoint'}", tmp_path / "said.json"
    file.write_text(f"{{}}{' ' * 2**23}")
    words = [f"{recording}", "--hparams"] if verb == "replay" else [checkpoint, checkpoint, "--map"]
    assert main.main([verb, *words, f"{file}", "--json", "--budget", "8MiB"]) == main.FAILED
    error = json.loads(capsys.readouterr().out)
    assert error["kind"] == "BudgetError" and file.name in error["place"], error


def test_replaying_takes_a_budget() -> None:
    recording = bundles("t5x")[0]
    with pytest.raises(BudgetError):
        statekit.replay(recording, budget=10)
    assert statekit.replay(recording, budget=2**30).passed


def test_what_a_budget_keeps_from_being_read_is_not_called_damage(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        statekit.check(
            next(case / "checkpoint" for case in bundles("keras")) / "model.weights.h5", budget=100
        )
    window = zarr_of(tmp_path, (2**15, 2**13), (2**15, 2**13), zstd_zeros(2**30, 30), dtype="float32")
    with pytest.raises(BudgetError):
        statekit.check(window)


READERS = [
    path
    for room in ("statekit/files", "statekit/tensors", "converters/formats", "converters/containers")
    for path in (Path(__file__).parents[1] / room).rglob("*.py")
]
OF_VALUES = {
    "MAX_DEPTH", "MAX_ELEMENTS", "MAX_INT_KEY", "MAX_KEY_DEPTH", "MAX_KEY_NODES", "MAX_LINE", "MAX_LONG_BYTES",
    "MAX_RECORD", "MAX_TEXT_NUMBER", "_MAX_MACROS",
    "MAX_ATTRIBUTES", "MAX_NOTES",
}  # fmt: skip
"""What one value of a checkpoint may be, and how much is told of what is left out: neither says how much is read."""


def own_limits(text: str) -> list[str]:
    """Returns limits of memory or work that a reader's module sets itself, without the format that sets it."""
    tree = ast.parse(text)
    body, limits = tree.body, []
    for node, after in zip(body, [*body[1:], None], strict=True):
        named = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id
        said = (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and str(after.value.value)
        )
        if (
            named
            and re.match("_?MAX_|.*_LIMIT$", named)
            and named not in OF_VALUES
            and "Source:" not in (said or "")
        ):
            limits.append(named)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        limit = call.args[3:4] if getattr(call.func, "id", "") in ("record", "check_size") else []
        limits += [
            ast.unparse(one) for one in limit if not re.fullmatch("limit|None|.*MAX_.*", ast.unparse(one))
        ]
    return limits


def test_no_reader_has_a_limit_of_its_own() -> None:
    assert len(READERS) > 80
    assert {path.name: limits for path in READERS if (limits := own_limits(path.read_text()))} == {}
    seeds = ("MAX_HEAP = 64\n", 'MAX_HEAP = 64\n"""The largest."""', "record(s, 0, n, 2**16, 'A header')")
    assert all(map(own_limits, seeds)) and not own_limits('MAX_RANK = 64\n"""Axes. Source: NumPy."""')


@pytest.mark.parametrize(("usual", "while_open"), [(700, 10**6), (0, 0), (2 * 10**6, 2 * 10**6)])
def test_a_caller_keeps_how_often_he_looks_for_cycles(usual: int, while_open: int) -> None:
    """Opening makes objects by the hundred thousand, and none of them is a part of a cycle."""
    before, seen = gc.get_threshold(), set[int]()
    path = GOLDEN / "torch_adafactor" / "adafactor_bf16" / "checkpoint" / "checkpoint.pt"
    gc.set_threshold(usual, *before[1:])
    try:
        inspect(path, Request(stats=True), lambda done, size: seen.add(gc.get_threshold()[0]))
        assert seen == {while_open} and gc.get_threshold() == (usual, *before[1:])
        with pytest.raises(StatekitError):
            inspect(Path("there is no such file"))
        assert gc.get_threshold() == (usual, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_threads_that_open_at_once_leave_the_search_for_cycles_as_it_was() -> None:
    usual = gc.get_threshold()
    first, second = collecting_rarely(), collecting_rarely()
    with first:
        second.__enter__()
    second.__exit__(None, None, None)
    assert gc.get_threshold() == usual
