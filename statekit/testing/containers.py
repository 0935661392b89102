"""The laws that every container obeys; whoever writes a container inherits them.

    from statekit.testing.container_trials import Sample, Trial
    from statekit.testing.containers import LAWS

    @pytest.mark.parametrize("law", LAWS)
    def test_my_container_obeys(law: str, tmp_path: Path) -> None:
        sample = Sample("mine", Path("checkpoint-of-the-original.xyz"))
        LAWS[law](Trial(MyContainer(), sample, tmp_path))

A law is a function of a trial, i.e. of a container and a checkpoint that the original system wrote, and raises
AssertionError with what was found. It works on a copy of the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

import numpy as np

from statekit.budget import Budget
from statekit.conversion.check import check
from statekit.conversion.contracts import NO_HINTS, Container
from statekit.conversion.registry import detect_container, opened
from statekit.conversion.seal import seal
from statekit.errors import NotFoundError, StatekitError
from statekit.files.checkpoint import Checkpoint
from statekit.files.manifest import is_manifest
from statekit.tensors.tensor import DTYPES, Index, Tensor, chunks, in_memory, nbytes, whole
from statekit.tensors.tree import Tree, mapped, to_json, walk
from statekit.testing.container_trials import FILES, Trial, WrittenContents, open_proven
from statekit.testing.damage import Damage, as_link, damages, files_of, poisons, restored, within_budget

LEAST = 16
"""Bytes of a tensor that is looked for in files: fewer are found by chance."""
LARGE = 16 * 2**20
"""Bytes of a tensor that opening must not read."""
LITTLE = 4 * 2**20
"""Bytes that opening may read, however large the tensors are."""
THOROUGH = 24
"""At how many places a file is damaged when no effort is spared."""
SMALL_BLOCK = 64
"""Bytes of the blocks in which tensors are read, to see that blocks are parts of a whole."""
ABSENT = 987_654_321
"""A step that no sample has."""


Law: TypeAlias = Callable[[Trial], None]


def is_told_from_others(trial: Trial) -> None:
    """Its checkpoint is detected, with a reason, and no other container is as sure of it."""
    evidence = trial.container.detect(trial.path)
    assert evidence is not None, "doesn't detect its own checkpoint"
    assert evidence.specificity > 0 and evidence.because, f"detects it without a reason: {evidence}"
    for peer in trial.peers:
        other = peer.detect(trial.path) if peer.name != trial.container.name else None
        surer = other is not None and other.specificity >= evidence.specificity
        assert not surer, f"{peer.name} is as sure: {other}, and {trial.container.name}: {evidence}"


def passes_over_what_is_not_its(trial: Trial) -> None:
    """Whatever else a path may be: nothing is detected, and opening it is a typed error."""
    places = trial.work / "foreign"
    places.mkdir()
    (places / "folder").mkdir()
    (places / "folder" / "notes.txt").write_text("nothing of interest\n")
    (places / "empty").mkdir()
    suffix = next(iter(trial.container.suffixes), "")
    (places / f"empty{suffix or '.bin'}").write_bytes(b"")
    (places / f"text{suffix}").write_text("nothing of interest\n" * 100)
    (places / f"noise{suffix}").write_bytes(np.random.default_rng(0).bytes(5000))
    (places / "dangling").symlink_to(places / "nothing")
    os.mkfifo(places / f"pipe{suffix}")
    for path in [*sorted(places.iterdir()), places / "missing", places / "missing" / "deeper"]:
        with within_budget():
            evidence = trial.container.detect(path)
        assert evidence is None, f"takes {path.name} for its own: {evidence}"
        outcome = _outcome(trial.container, path)
        assert isinstance(outcome, StatekitError), f"opens {path.name}: {outcome!r}"


def describes_what_it_holds(trial: Trial) -> None:
    """Names, shapes and dtypes are known before reading and are those of the values; the rest can be shown as JSON."""
    with open_proven(trial.container, trial.path) as opened:
        assert opened.container == trial.container.name, f"says it is a {opened.container}"
        assert opened.tensors, "holds no tensors"
        json.dumps([to_json(opened.tree), to_json(dict(opened.meta))], allow_nan=False)
        for name, tensor in opened.tensors.items():
            value = tensor.read()
            assert tensor.dtype.name in DTYPES, f"{name} has a dtype of its own: {tensor.dtype}"
            described = (tensor.shape, tensor.dtype)
            assert (value.shape, value.dtype) == described, (
                f"{name} is {value.shape} {value.dtype}, told {described}"
            )
            assert value.dtype.isnative, f"{name} has the byte order of another machine"
            assert len(tensor.grain) == len(tensor.shape), f"{name} has a grain of another rank"
            json.dumps(tensor.to_json(), allow_nan=False)
    assert trial.read() == trial.contents, "holds something else when it is opened again"


def refuses_a_step_that_is_not_there(trial: Trial) -> None:
    """Neither the newest step nor the only one stands for a step that was asked for."""
    try:
        with trial.container.open(trial.path, ABSENT) as opened:
            took = opened.path.name
    except NotFoundError:
        return
    raise AssertionError(f"takes {took} for step {ABSENT}")


def blocks_are_parts_of_the_whole(trial: Trial) -> None:
    """Whatever block is asked for: it is what the whole tensor has there."""
    with open_proven(trial.container, trial.path) as opened:
        for name, tensor in opened.tensors.items():
            value = tensor.read()
            for index in _blocks(tensor):
                block = tensor.read(index)
                assert block.tobytes() == value[index].tobytes(), f"{name}{list(index)} isn't in the whole"
            joined = b"".join(
                block.tobytes() for block in chunks(tensor, max(SMALL_BLOCK, nbytes(tensor) // 10))
            )
            assert joined == value.tobytes(), f"{name} isn't its blocks"


def _blocks(tensor: Tensor) -> Iterator[Index]:
    shape = tensor.shape
    yield whole(shape)
    yield tuple(slice(0, 0) for _ in shape)
    yield tuple(slice(n // 2, n) for n in shape)
    yield tuple(slice(n // 3, n - n // 3) for n in shape)
    yield tuple(slice(max(n - 1, 0), n) for n in shape)


def opens_without_values(trial: Trial) -> None:
    """Other bytes where the values lie change nothing that opening tells; reading notices them, or reads them.

    Opening may notice them too where values lie among what it reads: in small files that a manifest proves.
    """
    spans_by_file = _spans(trial)
    assert spans_by_file or not trial.sample.plain, "no tensor's values lie in the files as they are"
    for file, spans in spans_by_file.items():
        before = file.read_bytes()
        with restored(file, before):
            file.write_bytes(_inverted(before, spans))
            _require_noise(trial, file, spans)


def _spans(trial: Trial) -> dict[Path, dict[str, tuple[int, int]]]:
    """Returns, by file and tensor, where values lie that are there once only."""
    files = {file: file.read_bytes() for file in files_of(trial.root)}
    spans: dict[Path, dict[str, tuple[int, int]]] = {}
    for name, (_, _, data) in trial.contents.values.items():
        holders = [file for file, content in files.items() for _ in range(content.count(data))]
        if len(data) >= LEAST and len(holders) == 1:
            start = files[holders[0]].index(data)
            spans.setdefault(holders[0], {})[name] = (start, start + len(data))
    return spans


def _inverted(data: bytes, spans: Mapping[str, tuple[int, int]]) -> bytes:
    mask = np.zeros(len(data), np.uint8)  # tensors may share their bytes
    for start, stop in spans.values():
        mask[start:stop] = 0xFF
    return (np.frombuffer(data, np.uint8) ^ mask).tobytes()


def _require_noise(trial: Trial, file: Path, spans: Mapping[str, tuple[int, int]]) -> None:
    where = trial.name_of(file)
    try:
        opened = open_proven(trial.container, trial.path)
    except StatekitError as error:
        assert not trial.sample.plain, f"opening reads the values in {where}: {error}"
        return
    with opened:
        if {finding.what for finding in opened.findings} - trial.contents.findings:
            return
        assert to_json(opened.tree) == trial.contents.view, f"tells something else by the values in {where}"
        for name in spans:
            try:
                value = opened.tensors[name].read().tobytes()
            except StatekitError:
                continue
            if value == trial.contents.values[name][2] and not trial.sample.plain:
                continue  # a database keeps what it no longer reads
            assert value != trial.contents.values[name][2], f"{name} isn't read from {where}"
            assert _may_change(trial, file), f"{name} is read from {where} without a look at its checksum"


def opens_large_in_little(trial: Trial) -> None:
    """Opening reads a little, however large a tensor is, if the container can write one."""
    if not trial.writes or trial.sample.joint:
        return
    with open_proven(trial.container, trial.path) as opened:
        target = trial.write(*_enlarged(opened), "large")
    before = _bytes_read()
    with open_proven(trial.container, target) as again:
        read = _bytes_read() - before
        assert any(nbytes(tensor) >= LARGE for tensor in again.tensors.values()), "isn't large"
    assert read <= LITTLE, f"opening reads {read} bytes"


def _enlarged(opened: Checkpoint) -> tuple[Tree, int | None]:
    """Returns a checkpoint's tree in which one tensor has become large: a parameter rather than part of something."""
    leaves = [(path, leaf) for path, leaf in walk(opened.tree) if isinstance(leaf, Tensor) and nbytes(leaf)]
    _, small = min(leaves, key=lambda leaf: (leaf[1].dtype.kind not in "fV", len(leaf[0]), -nbytes(leaf[1])))
    rest = nbytes(small) // (small.shape or (1,))[0]
    random = np.random.default_rng(0).bytes(-(-LARGE // rest) * rest)
    large = in_memory(np.frombuffer(random, small.dtype).reshape(-1, *small.shape[1:]))
    return mapped(opened.tree, lambda leaf: large if leaf is small else leaf), opened.step


def _bytes_read() -> int:
    """Returns how many bytes this process has read from files, by whatever call."""
    return int(Path("/proc/self/io").read_text().split()[1])


def comes_back_as_written(trial: Trial) -> None:
    """What it wrote it detects, and reads with the same tree and the same bits."""
    if not trial.writes:
        return
    with open_proven(trial.container, trial.path) as opened:
        tree, step = opened.tree, opened.step
        target = trial.write(tree, step, "once")
        assert trial.container.detect(target), "doesn't detect what it wrote"
        with open_proven(trial.container, target) as again:
            contents = WrittenContents.of(again)
    assert contents.values == trial.contents.values, f"other tensors: {_unlike(contents, trial.contents)}"
    assert contents.view == trial.contents.view, "the tree is another one"
    odd = contents.findings - trial.contents.findings  # which its original already had
    assert not odd, f"is odd: {set(odd)}"


def writes_the_same_twice(trial: Trial) -> None:
    """Two writes give equal files, where statekit writes the bytes itself."""
    if not trial.writes or trial.sample.writes == "anew":
        return
    with open_proven(trial.container, trial.path) as opened:
        first, second = (trial.write(opened.tree, opened.step, folder) for folder in ("one", "two"))
    names = [[file.relative_to(target) for file in files_of(target)] for target in (first, second)]
    assert names[0] == names[1], f"other files: {set(names[0]) ^ set(names[1])}"
    unlike = [f"{name}" for name in names[0] if (first / name).read_bytes() != (second / name).read_bytes()]
    assert not unlike, f"other bytes the second time: {unlike}"


def notices_damage(trial: Trial) -> None:
    """Whatever befalls a file: a typed error, or the same contents, or a finding; in time, in little memory.

    A flipped bit may change what the format has no checksum for, and a file may be missing that needn't be there.
    """
    sound, broken = trial.contents, []
    for file in trial.victims:
        data = file.read_bytes()
        for damage in damages(data, trial.effort or THOROUGH):
            with restored(file, data):
                damage.apply(file)
                outcome = _outcome(trial.container, trial.path)
            if not _noticed(trial, file, damage, outcome, sound):
                broken.append(f"{trial.name_of(file)} {damage.what}: {_told(outcome, sound)}")
    assert not broken, f"{len(broken)} damages:\n" + "\n".join(broken[:20])


def _noticed(
    trial: Trial, file: Path, damage: Damage, outcome: WrittenContents | BaseException, sound: WrittenContents
) -> bool:
    if isinstance(outcome, BaseException):
        return isinstance(outcome, StatekitError)
    if outcome.findings - sound.findings or (outcome.values, outcome.view) == (sound.values, sound.view):
        return True
    if damage.flips:
        return _may_change(trial, file)
    less = outcome.values.items() <= sound.values.items()
    return damage.loses and less and _matches(trial.name_of(file), trial.sample.optional)


def stays_inside(trial: Trial) -> None:
    """A link out of the checkpoint is refused by its name, unless links shall be followed; a device is, even then.

    What a checkpoint can do without may be passed over, and its own path may be a link.
    """
    sound, broken = trial.contents, []
    for number, file in enumerate(file for file in trial.victims if file != trial.path):
        data, elsewhere = file.read_bytes(), trial.work / f"elsewhere {number}"
        elsewhere.write_bytes(data)
        with restored(file, data):
            file.unlink()
            missing = _outcome(trial.container, trial.path)
            file.symlink_to(elsewhere)
            outcome = _outcome(trial.container, trial.path)
            if not (_says_link(outcome, file) or _same(outcome, missing)):
                broken.append(f"a link as {trial.name_of(file)}: {_told(outcome, sound)}")
            outcome = _outcome(trial.container, trial.path, Budget(follow_links=True))
            if not _same(outcome, sound):
                broken.append(f"followed as {trial.name_of(file)}: {_told(outcome, sound)}")
            as_link(file, Path("/dev/zero"))
            outcome = _outcome(trial.container, trial.path, Budget(follow_links=True))
            if not (isinstance(outcome, StatekitError) or _same(outcome, missing)):
                broken.append(f"a device as {trial.name_of(file)}: {_told(outcome, sound)}")
    assert not broken, f"{len(broken)} links:\n" + "\n".join(broken[:20])


def _says_link(outcome: WrittenContents | BaseException, file: Path) -> bool:
    if isinstance(outcome, StatekitError):
        return "leads out" in str(outcome) and str(file) in str(outcome)
    return isinstance(outcome, WrittenContents) and any(
        "leads out" in finding for finding in outcome.findings
    )


def _same(outcome: WrittenContents | BaseException, other: WrittenContents | BaseException) -> bool:
    if not (isinstance(outcome, WrittenContents) and isinstance(other, WrittenContents)):
        return False
    return (outcome.values, outcome.view) == (other.values, other.view)


def is_read_in_hugging_faces_cache(trial: Trial) -> None:
    """In a snapshot of Hugging Face's cache every file is a link to a blob, and is read."""
    repository = trial.work / "models--owner--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123456789abcdef"
    for number, file in enumerate(files_of(trial.root)):
        blob, link = repository / "blobs" / f"{number:040}", snapshot / file.relative_to(trial.root.parent)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    outcome = _outcome(trial.container, snapshot / trial.path.relative_to(trial.root.parent))
    assert _same(outcome, trial.contents), _told(outcome, trial.contents)


def every_sealed_file_counts(trial: Trial) -> None:
    """Once it is sealed, no file of it may be lost, emptied, another or another's, whoever reads it.

    `check` finds it wanting, and it opens under no name: neither by its own container nor by what is detected.
    """
    manifests = {checkpoint.manifest for checkpoint in seal(trial.path).checkpoints}
    stated = [
        manifest.parent / name
        for manifest in manifests
        if manifest is not None and is_manifest(manifest.name)  # one inside its file has a law of its own
        for name in json.loads(manifest.read_bytes())["files"]
    ]
    few = stated[:: max(1, len(stated) // (FILES * trial.effort))] if trial.effort else stated
    broken = [failure for file in few for failure in _unnoticed(trial, file, stated)]
    assert not broken, f"{len(broken)} pass:\n" + "\n".join(broken[:20])


def _unnoticed(trial: Trial, file: Path, stated: list[Path]) -> Iterator[str]:
    """Yields each damage of a sealed file with each verb that passes over it."""
    data = file.read_bytes()
    for damage in _exchanges(data, [other for other in stated if other != file]):
        with restored(file, data):
            damage.apply(file)
            if file.is_file() and file.read_bytes() == data:
                continue
            yield from [f"{trial.name_of(file)} {damage.what}: {verb}" for verb in _passing(trial)]


def _exchanges(data: bytes, others: list[Path]) -> Iterator[Damage]:
    yield Damage("is missing", Path.unlink, loses=True)
    if data:
        yield Damage("is empty", lambda path: path.write_bytes(b""))
    if others:
        content = others[0].read_bytes()
        yield Damage(f"is {others[0].name}", lambda path: path.write_bytes(content))


def _passing(trial: Trial) -> Iterator[str]:
    """Yields the verbs that pass over what is wrong with a sealed checkpoint."""
    with suppress(StatekitError):
        if check(trial.path).passed:
            yield "check passes"
    with suppress(StatekitError), opened(trial.container, trial.path, None, NO_HINTS):
        yield "its container opens it"
    with suppress(StatekitError), opened(detect_container(trial.path)[0], trial.path, None, NO_HINTS):
        yield "what is detected opens it"


def runs_no_code(trial: Trial) -> None:
    """A pickle that calls for code, in place of a file or inside of it, calls nothing."""
    canary, broken = trial.work / "canary", []
    for file in trial.victims:
        data = file.read_bytes()
        for poison in poisons(data, canary):
            with restored(file, data):
                poison.apply(file)
                outcome = _outcome(trial.container, trial.path)
            if canary.exists():
                canary.unlink()
                broken.append(f"{trial.name_of(file)} {poison.what}, which runs")
            if isinstance(outcome, BaseException) and not isinstance(outcome, StatekitError):
                broken.append(f"{trial.name_of(file)} {poison.what}: {outcome!r}")
    assert not broken, "\n".join(broken[:20])


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        is_told_from_others,
        passes_over_what_is_not_its,
        describes_what_it_holds,
        refuses_a_step_that_is_not_there,
        blocks_are_parts_of_the_whole,
        opens_without_values,
        opens_large_in_little,
        comes_back_as_written,
        writes_the_same_twice,
        notices_damage,
        stays_inside,
        is_read_in_hugging_faces_cache,
        runs_no_code,
    )
}
OF_REGISTERED: Mapping[str, Law] = {"every_sealed_file_counts": every_sealed_file_counts}
"""Laws of containers that are registered: whoever detects what is left of a checkpoint goes by all of them."""


def _outcome(
    container: Container, path: Path, budget: Budget | None = None
) -> WrittenContents | BaseException:
    """Detects, opens and reads a checkpoint; returns what it holds, or the error that says why not."""
    try:
        with within_budget():
            container.detect(path)
            with open_proven(container, path, budget) as opened:
                return WrittenContents.of(opened)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error


def _may_change(trial: Trial, file: Path) -> bool:
    return _matches(trial.name_of(file), trial.sample.unchecked)


def _matches(name: str, globs: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _told(outcome: WrittenContents | BaseException, sound: WrittenContents) -> str:
    return f"{outcome!r}" if isinstance(outcome, BaseException) else _unlike(outcome, sound)


def _unlike(contents: WrittenContents, sound: WrittenContents) -> str:
    names = [n for n in {**sound.values, **contents.values} if contents.values.get(n) != sound.values.get(n)]
    if not names:
        return "another tree"
    return f"{len(names)} other tensors: " + ", ".join(
        f"{n} {(sound.values.get(n) or ('absent',))[:2]} -> {(contents.values.get(n) or ('absent',))[:2]}"
        for n in names[:2]
    )
