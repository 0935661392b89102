"""Every container and layout obeys the laws of `statekit.testing`, and each law notices who breaks it."""

from __future__ import annotations

import json
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from samples import ALL, ROWS, Row

from goldens import COMPACT, GOLDEN
from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Container, Encoded, Evidence, Exactness, GoesBack, Layout
from statekit.converters.containers.statekit_dir import CONTAINER as FOLDER
from statekit.converters.layouts.own.statekit_canonical import LAYOUT as CANONICAL
from statekit.errors import (
    CorruptError,
    InexactError,
    NotFoundError,
    RefusedError,
    StateError,
    UnknownFormatError,
)
from statekit.files import integrity
from statekit.files.checkpoint import Checkpoint
from statekit.files.source import Files, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import DTYPES, Index, Stored, Tensor, in_memory
from statekit.tensors.tree import from_json, mapped, tensor_names, to_json
from statekit.testing import containers, damage, layouts
from statekit.testing.container_trials import Sample, Trial
from statekit.testing.layouts import made_state

SAMPLED = 1
"""How hard `make test` tries to damage a checkpoint; `make test-all` damages every file."""


def rows(kind: Callable[[Row], str]) -> pytest.MarkDecorator:
    """Parametrizes by the samples; of each kind `make test` has the first."""
    seen, params = set[str](), []
    for row in ROWS:
        marks = [pytest.mark.slow] if kind(row) in seen else []
        seen.add(kind(row))
        params.append(pytest.param(row, id=f"{row.sample.container}-{row.layout}-{row.name}", marks=marks))
    return pytest.mark.parametrize("row", params)


def obey(trial: Any, laws: Mapping[str, Callable[[Any], None]]) -> None:
    """Holds a trial to laws, and says of all that it breaks."""
    broken = {}
    for name, law in laws.items():
        try:
            law(trial(name) if callable(trial) else trial)
        except AssertionError as error:
            broken[name] = str(error)
    assert not broken


def trials_of(row: Row, folder: Path, effort: int) -> Callable[[str], Trial]:
    """Returns what makes a trial of a row for a law, each in a folder of its own."""
    (folder / "found").mkdir()
    sample = row.sample_in(folder / "found")
    peers = tuple(map(registry.container, registry.container_names()))

    def trial(law: str) -> Trial:
        (folder / law).mkdir()
        container = registry.container(sample.container)
        return Trial(container, sample, folder / law, peers, effort)

    return trial


@rows(lambda row: row.sample.container)
def test_every_container_obeys_the_laws(row: Row, tmp_path: Path) -> None:
    obey(trials_of(row, tmp_path, SAMPLED), {**containers.LAWS, **containers.OF_REGISTERED})


def test_a_reader_that_passes_over_sealed_files_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a run had always written another step beside them: only the files that a container opens count."""
    row = next(row for row in ROWS if row.sample.container == "mxnet" and row.sample.root)
    monkeypatch.setattr(integrity, "_went_on", lambda *_: True)
    with pytest.raises(AssertionError, match="pass"):
        containers.every_sealed_file_counts(trials_of(row, tmp_path, 0)("sealed"))


@pytest.mark.slow
@rows(lambda row: row.name)
def test_every_container_notices_damage_anywhere(row: Row, tmp_path: Path) -> None:
    thorough = {name: containers.LAWS[name] for name in ("notices_damage", "runs_no_code")}
    obey(trials_of(row, tmp_path, 0), thorough)


@rows(lambda row: f"{row.sample.container} {row.layout}")
def test_every_layout_obeys_the_laws(row: Row, tmp_path: Path) -> None:
    sample, peers = row.sample_in(tmp_path), tuple(map(registry.layout, registry.layout_names()))
    with registry.container(sample.container).open(sample.path) as checkpoint:
        layout = registry.layout(row.layout)
        obey(layouts.Trial(layout, checkpoint, row.hints, peers, not homes(layout)), layouts.LAWS)


def test_every_container_and_layout_has_a_sample() -> None:
    assert {row.sample.container for row in ALL} == set(registry.container_names())
    assert {row.layout for row in ALL} == set(registry.layout_names())


def test_every_container_has_a_sample_in_the_compact_recordings() -> None:
    compact = {
        row.sample.container
        for row in ALL
        if row.write
        or not row.sample.path.is_relative_to(GOLDEN)
        or (COMPACT / row.sample.path.relative_to(GOLDEN)).exists()
    }
    assert compact == set(registry.container_names())


def homes(layout: Layout) -> list[Container]:
    """Returns the containers that a layout is at home in and that can be written."""
    return [home for home in map(registry.container, layout.containers) if home.target_kind]


def sampled_layouts() -> Iterator[Any]:
    """Yields every layout with every schema and variant that it says it holds, sampled by one of each schema."""
    for name in registry.layout_names():
        layout = registry.layout(name)
        kinds = [(s, v, number) for s, vs in layout.variants.items() for number, v in enumerate(vs)]
        for home, (schema, variant, number), full in product(homes(layout)[:1], kinds, (False, True)):
            marks = [pytest.mark.slow] if number or full else []
            label = f"{name}-{schema}-{variant}{'-full' if full else ''}"
            yield pytest.param(layout, home, schema, variant, full, id=label, marks=marks)


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("layout", "home", "schema", "variant", "full"), [*sampled_layouts()])
def test_every_layout_holds_what_it_says(
    layout: Layout, home: Container, schema: str, variant: str, full: bool, tmp_path: Path
) -> None:
    state = made_state(schema, variant, full=full)
    if isinstance(layout, GoesBack):  # nobody's file has this state: where it goes back is its own test's
        with pytest.raises(InexactError):
            layout.encode(state)
        return
    if full:  # more slots than a layout must have a place for, which it says
        try:
            layout.encode(state)
        except InexactError:
            return
    obey(layouts.Making(layout, home, state, tmp_path), layouts.MADE)


# The laws notice who breaks them. A container and a layout that are sound, and what may be wrong with them.


@dataclass(frozen=True)
class Toy:
    """A container of one file: a record of the tree with its checksum, then values, each with its own.

    `flaw` is what is wrong with it.
    """

    flaw: str = ""
    name: str = "toy"
    suffixes: tuple[str, ...] = (".toy",)
    target_kind: Literal["file", "folder"] | None = "file"
    title: str = "one file, for tests of tests"

    def detect(self, path: Place) -> Evidence | None:
        if self.flaw == "takes all":
            return Evidence(10, "anything will do")
        if not _is_toy(path):
            return None
        return Evidence(10, "" if self.flaw == "no reason" else "its first bytes")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        if self.flaw == "pickles":
            pickle.loads(Path(path).read_bytes())
        if not _is_toy(path):
            raise UnknownFormatError("No toy.", place=path)
        if step is not None and self.flaw != "any step":
            raise NotFoundError("A toy holds one step.", place=path)
        data = Path(path).read_bytes() if self.flaw == "reads all" else _head(path)
        size, crc = struct.unpack_from("<QI", data + bytes(12), 4)
        record = data[16 : 16 + size]
        if zlib.crc32(record) != crc:
            self._complain(path)
        document = json.loads(record)
        spans = {
            name: (16 + size + start, stop - start, crc)
            for name, (start, stop, crc) in document["spans"].items()
        }
        if self.flaw == "checks all":
            for span in spans.values():
                _value(path, *span)
        tree = from_json(document["tree"], lambda entry: self._tensor(path, entry, spans[entry["name"]]))
        note = path.with_suffix(".note")
        if note.exists():
            tree["note"] = self._note(Path(note), path, budget)
        if self.flaw == "restless":
            tree[f"opened {time.monotonic_ns()}"] = in_memory(np.zeros(1))
        return Checkpoint(self.name, path, tree)

    def _note(self, note: Path, path: Place, budget: Budget | None) -> str:
        if self.flaw == "follows links":
            return note.read_text()
        if self.flaw == "follows none" and note.is_symlink():
            raise RefusedError("A link.", place=note)
        with Files(budget, path) as files:
            text = read_small(note, files).decode("latin-1")
        if not text.endswith("\n"):
            raise CorruptError("A toy's note is cut.", place=note)
        return text

    def _complain(self, path: Place) -> None:
        if self.flaw == "untyped":
            raise KeyError("tree")
        while self.flaw == "endless":
            pass
        if self.flaw == "greedy":
            np.empty(2 * damage.MEMORY, np.uint8)
        raise CorruptError("A toy's record is damaged.", place=path)

    def _tensor(self, path: Place, entry: Mapping[str, Any], span: tuple[int, int, int]) -> Tensor:
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]

        def fetch(index: Index) -> Any:
            data = _value(path, *span[:2], None if self.flaw == "no checksum" else span[2])
            value = np.frombuffer(data, dtype).reshape(shape)
            first = tuple(slice(0, part.stop - part.start) for part in index)
            return np.ascontiguousarray(value[first if self.flaw == "first block" else index])

        return Stored(shape, dtype, fetch, entry["name"], str(path))

    def write(self, encoded: Encoded, stage: Stage) -> None:
        values, spans, position = [], {}, 0
        for name, tensor in tensor_names(encoded.tree).items():
            value = b"".join(stage.stream(name, tensor))
            spans[name] = (position, position + len(value), zlib.crc32(value))
            values.append(value)
            position += len(value)
        more = {"written": time.monotonic_ns()} if self.flaw == "dated" else {}
        tree = mapped(encoded.tree, _no_number) if self.flaw == "no numbers" else encoded.tree
        record = json.dumps({"tree": to_json(tree), "spans": spans, **more}).encode()
        with stage.file() as output:
            output.write(
                b"toy\n" + struct.pack("<QI", len(record), zlib.crc32(record)) + record + b"".join(values)
            )


def _no_number(leaf: Any) -> Any:
    return str(leaf) if isinstance(leaf, int) else leaf


def _is_toy(path: Place) -> bool:
    return path.is_file() and _bytes_at(path, 0, 4) == b"toy\n"


def _head(path: Place) -> bytes:
    head = _bytes_at(path, 0, 16)
    return head + _bytes_at(path, 16, struct.unpack_from("<Q", head + bytes(12), 4)[0] % 2**20)


def _value(path: Place, start: int, size: int, crc: int | None) -> bytes:
    value = _bytes_at(path, start, size)
    if len(value) != size or (crc is not None and zlib.crc32(value) != crc):
        raise CorruptError("A toy's value is damaged.", place=path)
    return value


def _bytes_at(path: Place, start: int, size: int) -> bytes:
    with Path(path).open("rb", buffering=0) as file:
        file.seek(start)
        return file.read(size)


FLAWS = {
    "is_told_from_others": "no reason",
    "passes_over_what_is_not_its": "takes all",
    "describes_what_it_holds": "restless",
    "refuses_a_step_that_is_not_there": "any step",
    "blocks_are_parts_of_the_whole": "first block",
    "opens_without_values": "checks all",
    "opens_large_in_little": "reads all",
    "comes_back_as_written": "no numbers",
    "writes_the_same_twice": "dated",
    "notices_damage": "no checksum",
    "stays_inside": "follows links",
    "is_read_in_hugging_faces_cache": "follows none",
    "runs_no_code": "pickles",
}


@pytest.fixture
def toy(tmp_path: Path) -> Sample:
    tree = {"a": {"b": in_memory(np.arange(6, dtype=np.float32).reshape(2, 3))}, "step": 4}
    path = Trial(Toy(), Sample("toy", tmp_path / "empty"), tmp_path).write(tree, 4, "toy")
    path.with_suffix(".note").write_text("from the run\n")
    return Sample("toy", path, path.parent, unchecked=("*.note",), optional=("*.note",))


def toy_trial(flaw: str, sample: Sample, folder: Path, *peers: Container) -> Trial:
    folder.mkdir()
    return Trial(Toy(flaw), sample, folder, peers)


@pytest.mark.parametrize("law", containers.LAWS)
def test_a_law_notices_a_container_that_breaks_it(law: str, toy: Sample, tmp_path: Path) -> None:
    containers.LAWS[law](toy_trial("", toy, tmp_path / "sound"))
    with pytest.raises(AssertionError):
        containers.LAWS[law](toy_trial(FLAWS[law], toy, tmp_path / "flawed"))


@pytest.mark.parametrize(
    ("flaw", "message"), [("untyped", "KeyError"), ("endless", "busy"), ("greedy", "MemoryError")]
)
def test_a_reader_that_is_lost_in_damage_is_noticed(
    flaw: str, message: str, toy: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage, "SECONDS", 0.1)
    with pytest.raises(AssertionError, match=message):
        containers.notices_damage(toy_trial(flaw, toy, tmp_path / "flawed"))


def test_equally_sure_containers_are_noticed(toy: Sample, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="twin is as sure"):
        containers.is_told_from_others(toy_trial("", toy, tmp_path / "one", Toy(), Toy(name="twin")))


def test_what_a_format_leaves_open_must_be_said(toy: Sample, tmp_path: Path) -> None:
    loose = replace(toy, unchecked=("*",))
    containers.notices_damage(toy_trial("no checksum", loose, tmp_path / "said"))


@dataclass(frozen=True)
class ToyLayout:
    """The canonical parts under one key. `flaw` is what is wrong with it."""

    flaw: str = ""
    name: str = "toy"
    title: str = "a part of a tree, for tests of tests"
    containers: tuple[str, ...] = ("statekit",)

    @property
    def variants(self) -> Mapping[str, tuple[str, ...]]:
        return {"lamb": ("keras",)} if self.flaw == "another optimizer" else {"adamw": ("optax",)}

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        if self.flaw == "takes all":
            return Evidence(10, "anything will do")
        if not isinstance(checkpoint.tree, Mapping) or "toy" not in checkpoint.tree:
            return None
        if self.flaw == "reads early":
            next(iter(checkpoint.tensors.values())).read()
        return Evidence(20, "a toy")

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        if not isinstance(checkpoint.tree, Mapping) or "toy" not in checkpoint.tree:
            raise StateError("No toy.")
        if self.flaw == "reads all":
            for tensor in checkpoint.tensors.values():
                tensor.read()
        state = CANONICAL.decode(replace(checkpoint, tree=checkpoint.tree["toy"]), hints)
        if self.flaw == "forgets the epoch":
            return replace(state, extra={**state.extra, "run": {"seed": 5}})
        if self.flaw == "overlooks a slot":
            return replace(state, slots={path: {} for path in state.slots})
        if self.flaw != "swaps":
            return state
        slots = {
            path: {**tensors, "m": tensors["v"], "v": tensors["m"]} for path, tensors in state.slots.items()
        }
        return replace(state, slots=slots)

    def encode(self, state: TrainState) -> Encoded:
        if state.optimizer.schema not in ("adamw",) and self.flaw != "holds all":
            raise InexactError("A toy can't hold it.")
        tree = CANONICAL.encode(state).tree
        if self.flaw in ("forgets a slot", "overlooks a slot"):
            tree["slots"] = {path: {} for path in tree["slots"]}
        if self.flaw == "names a heap":
            tree["extra"] = {key: part for key, part in tree["extra"].items() if key != "run"}
            return Encoded({"toy": tree}, state.counts.updates, dropped={"run": "no place"})
        if self.flaw == "forgets the rest":
            tree["extra"] = {key: part for key, part in tree["extra"].items() if key == "rng"}
        exactness = {"nobody": (Exactness.LOSSY, "")} if self.flaw == "vague" else {}
        return Encoded({"toy": tree}, state.counts.updates, exactness)


LAYOUT_FLAWS = {
    "is_told_from_others": "reads early",
    "passes_over_what_is_not_its": "takes all",
    "decodes_names_and_scalars": "reads all",
    "fits_its_optimizer": "another optimizer",
    "nothing_vanishes": "overlooks a slot",
    "comes_back_as_it_was": "forgets a slot",
    "exactness_is_of_its_tensors": "vague",
    "says_what_it_drops": "forgets the rest",
    "every_record_is_read": "forgets the epoch",
    "every_record_is_written_or_named": "names a heap",
    "comes_through_files": "swaps",
    "refuses_what_it_cannot_hold": "holds all",
}


@pytest.fixture
def state() -> TrainState:
    extra = {"rng": in_memory(np.arange(2, dtype=np.uint32)), "run": {"epoch": 2, "seed": 5}}
    return replace(made_state("adamw", "optax"), extra=extra)


@pytest.mark.parametrize("law", layouts.LAWS)
def test_a_law_notices_a_layout_that_breaks_it(law: str, state: TrainState) -> None:
    checkpoint = Checkpoint("toy", Path("toy"), ToyLayout().encode(state).tree)
    layouts.LAWS[law](layouts.Trial(ToyLayout(), checkpoint))
    with pytest.raises(AssertionError):
        layouts.LAWS[law](layouts.Trial(ToyLayout(LAYOUT_FLAWS[law]), checkpoint))


@pytest.mark.parametrize("law", layouts.MADE)
def test_a_law_notices_a_layout_that_does_not_hold_what_it_says(
    law: str, state: TrainState, tmp_path: Path
) -> None:
    for name in ("sound", "flawed"):
        (tmp_path / name).mkdir()
    layouts.MADE[law](layouts.Making(ToyLayout(), FOLDER, state, tmp_path / "sound"))
    with pytest.raises(AssertionError):
        layouts.MADE[law](layouts.Making(ToyLayout(LAYOUT_FLAWS[law]), FOLDER, state, tmp_path / "flawed"))


def test_every_law_is_shown_to_notice_something() -> None:
    assert FLAWS.keys() == containers.LAWS.keys()
    assert LAYOUT_FLAWS.keys() == {**layouts.LAWS, **layouts.MADE}.keys()
