"""Checkpoints of one step each, as T5X, Orbax and Flax write them below a run's folder.

This finds a step and tells who wrote it, reads what lies beside its arrays, and says where a new one is written.
Input: the path that a user named. Output: the step's folder or file, and the checkpoint with manifest, gin file and the
names of further files.

Source: T5X t5x/checkpoints.py, `get_local_data`, `latest_step`; orbax/checkpoint/path/step.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from statekit.budget import Account
from statekit.converters.formats.flat_yaml import flat_yaml
from statekit.converters.formats.hparams import SCHEDULE_IN_GIN, read_gin, read_gin_call, read_text
from statekit.errors import BudgetError, Faults, FormatError, NotFoundError, StatekitError, UsageError
from statekit.files.checkpoint import FILES_BESIDE, STEPS, Checkpoint, Finding
from statekit.files.manifest import files_below, is_manifest
from statekit.files.source import Files, first_bytes, listing
from statekit.files.tree import Place, absolute
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Tree, walk

StepKind: TypeAlias = Literal["legacy", "orbax", "flax"]
"""Who wrote a step: T5X before Orbax (msgpack with zarr folders), Orbax, or Flax (a msgpack file)."""

INDEX = "checkpoint"
"""The msgpack file of a legacy checkpoint, and of Orbax items before OCDBT."""
TREE_METADATA = "_METADATA"
STEP_METADATA = "_CHECKPOINT_METADATA"
DATABASE = "manifest.ocdbt"
_PART = re.compile(
    r"(train_?)?states?|params|parameters|variables|weights|model|net(work)?|opt(im(izer)?)?(_?states?)?|batch_stats"
    r"|(ema|avg)(_params|_state)?|params_ema|step|rngs?|keys?|default|items?|schedulers?|extra|config|meta(data)?"
)
"""Names of the parts of a run that a program may save one by one."""
JSON_ITEM = "metadata"
"""The file of an Orbax item that is a JSON document, such as a data iterator's state."""
STATE = "state"
"""The item in which T5X keeps a train state."""

_KINDS: dict[StepKind, tuple[str, str]] = {
    "legacy": ("T5X checkpoint of the legacy generation", "t5x"),
    "orbax": ("checkpoint of Orbax", "orbax"),
    "flax": ("msgpack file of Flax", "flax"),
}
"""What each kind is called, and the container that reads it."""

_STEP = re.compile(r"(?:.*_)?(\d+)", re.DOTALL)
_UNFINISHED = re.compile(r".*\.(tmp-|orbax-checkpoint-tmp).*", re.DOTALL)
_HEAD = 2**16
_LEGACY_KEYS = (b"version", b"optimizer")
_PLACEHOLDERS = (b"PLACEHOLDER://", b"AGGREGATED://")


@dataclass(frozen=True)
class StepFolder:
    """One step's checkpoint.

    Attributes:
        path: Its folder, or the file where the checkpoint is a single one.
        kind: Who wrote it.
        step: The number in its name, if it has one.
        findings: Newer steps that were passed over.
        steps: The numbers of all steps in the run's folder, if that was looked at.
    """

    path: Place
    kind: StepKind
    step: int | None
    findings: tuple[Finding, ...] = ()
    steps: tuple[int, ...] = ()


def locate(path: Place, step: int | None = None) -> StepFolder | None:
    """Finds the checkpoint at a path: itself, or of a run's folder the newest step or the given one.

    Returns:
        None if there is nothing of the kind.

    Raises:
        NotFoundError: The given step isn't there, or isn't finished.
    """
    path = absolute(path)
    if _UNFINISHED.fullmatch(path.name):
        raise FormatError(
            "This checkpoint wasn't finished.",
            place=path,
            expected="a folder that was renamed when all was written",
            remedy="take an older step; rename it only if you know that it is complete",
        )
    kind = kind_of(path)
    if kind is not None:
        number = step_number(path)
        check_step(step, number, path)
        return StepFolder(path, kind, number)
    return _among(path, step) if path.is_dir() else None


def sighted(path: Place, kind: StepKind) -> StepFolder | None:
    """Returns the checkpoint of one generation at a path, as `locate` finds it; None where it finds no such."""
    try:
        folder = locate(path)
    except FormatError:
        return None
    return folder if folder is not None and folder.kind == kind else None


def find_step(path: Place, step: int | None, kind: StepKind) -> StepFolder:
    """Finds the checkpoint of one generation at a path, as `locate` does.

    Raises:
        NotFoundError: There is none, or it is of the other generation; or no such step.
    """
    folder = locate(path, step)
    if folder is None or folder.kind != kind:
        raise NotFoundError(
            f"There is no {_KINDS[kind][0]}.",
            place=path if folder is None else folder.path,
            found=None if folder is None else f"a {_KINDS[folder.kind][0]}",
            remedy="" if folder is None else f"read it with --from {_KINDS[folder.kind][1]}",
        )
    return folder


def _among(run: Place, step: int | None) -> StepFolder | None:
    numbered = {n: entry for entry in listing(run) if (n := step_number(entry)) is not None}
    passed: list[Finding] = []
    for number in sorted(numbered, reverse=True) if step is None else [step]:
        kind = kind_of(numbered[number]) if number in numbered else None
        if kind is not None:
            return StepFolder(numbered[number], kind, number, tuple(passed), tuple(sorted(numbered)))
        if step is not None:
            kinds = [str(n) for n in sorted(numbered) if kind_of(numbered[n]) is not None]
            raise NotFoundError(
                "There is no such step.", place=run, expected=step, found=", ".join(kinds) or "no step at all"
            )
        passed.append(Finding("holds no checkpoint, passed over", str(numbered[number])))
    return None


def step_number(path: Place) -> int | None:
    """Returns the step in a folder's name, such as 1000 of `checkpoint_1000`; None if it has none or isn't finished."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and len(match[1]) < 20 else None


def kind_of(path: Place) -> StepKind | None:
    """Looks at names and first bytes to tell who wrote a step's folder or file; None if it's none of these."""
    if path.is_file():
        head = _head(path)
        return "legacy" if _is_legacy(head) else "flax" if _is_map(head) and _begins_with_name(head) else None
    if not path.is_dir():
        return None
    if is_item(path):
        return "orbax"
    if _is_legacy(_head(path / INDEX)):
        return "legacy"
    return "orbax" if (path / STEP_METADATA).is_file() or items(path) else None


def is_item(folder: Place) -> bool:
    """Tells whether a folder is an Orbax item: a tree of arrays."""
    if any((folder / name).is_file() for name in (TREE_METADATA, DATABASE)):
        return True
    head = _head(folder / INDEX)
    return _is_map(head) and any(mark in head for mark in _PLACEHOLDERS)


def _is_apart(folder: Place) -> bool:
    """Tells whether a folder is a checkpoint of its own, and no part of one, by its record and its name."""
    return (folder / STEP_METADATA).is_file() and not _PART.fullmatch(folder.name)


def items(step: Place) -> list[Place]:
    """Returns the folders of the Orbax items in a step's folder: trees, and JSON documents beside one.

    Where a program saved the parts of a run one by one, each has a step's record too. Of another name, it is a
    checkpoint of its own.
    """
    folders = [entry for entry in listing(step) if entry.is_dir() and not _is_apart(entry)]
    named = [f for f in folders if step_number(f) is None and not _UNFINISHED.fullmatch(f.name)]
    trees = [f for f in named if is_item(f) or (f.name == STATE and _is_map(_head(f / INDEX)))]
    return [f for f in named if f in trees or (trees and (f / JSON_ITEM).is_file())]


def says_t5x(item: Place) -> bool:
    """Tells whether an Orbax item's tree is a T5X train state, by the names at its beginning."""
    return any(
        mark in _head(item / name)
        for name in (TREE_METADATA, INDEX)
        for mark in (b"param_states", b"_optimizer")
    )


def _head(path: Place) -> bytes:
    try:
        return first_bytes(path, _HEAD)
    except StatekitError:
        return b""


def _is_map(head: bytes) -> bool:
    """Tells whether bytes begin a msgpack map with entries; TensorFlow's file of the same name is text."""
    return bool(head) and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))


def _is_legacy(head: bytes) -> bool:
    return _is_map(head) and any(_first_key(head) == bytes([0xA0 + len(key)]) + key for key in _LEGACY_KEYS)


def _begins_with_name(head: bytes) -> bool:
    """Tells whether a map's first key is a short name: other files begin with the byte of a map by chance."""
    key = _first_key(head)
    return len(key) > 1 and key[1:].isascii() and key[1:].decode("ascii", "replace").isprintable()


def _first_key(head: bytes) -> bytes:
    """Returns the first key of a map with its length before it, if it's a name of up to 31 bytes; else nothing."""
    start = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    size = head[start] - 0xA0 if len(head) > start else -1
    return head[start : start + 1 + size] if 0 < size < 32 else b""


def step_checkpoint(
    container: str,
    step_folder: StepFolder,
    tree: Tree,
    meta: Mapping[str, Any],
    array_names: set[str],
    findings: tuple[Finding, ...],
    files: Files,
) -> Checkpoint:
    """Returns the checkpoint of a step, with what lies around its arrays.

    Args:
        container: Name of the container.
        step_folder: The step's folder or file.
        tree: What it holds.
        meta: What the container knows besides.
        array_names: Names of the folder's entries that belong to the arrays.
        findings: What was odd.
        files: Its open files, closed with it.
    """
    gin, gin_findings = gin_settings(step_folder.path, files)
    other_files = files_beside(step_folder.path, array_names, files) if step_folder.path.is_dir() else []
    around = {STEPS: list(step_folder.steps), FILES_BESIDE: other_files, "gin": gin}
    around |= {CONFIG: config} if (config := _yaml_beside(step_folder.path, files)) else {}
    findings = (*step_folder.findings, *findings, *gin_findings)
    meta = {**meta, **around}
    return Checkpoint(container, step_folder.path, tree, meta, step_folder.step, findings, files.close)


CONFIG = "config"
"""Key of what lies beside a checkpoint: the file of its program's configuration, and its plain settings."""


def _yaml_beside(step: Place, files: Files) -> dict[str, Any]:
    """Reads MaxText's config.yml in the folder of a step or of its run; empty if there is none.

    Source: AI-Hypercomputer/maxtext 0.2.5 utils/gcs_utils.py, `write_config_raw_keys_for_gcs`.
    """
    run = step.parent.parent if step.parent.name == "checkpoints" else step.parent
    for path in (folder / "config.yml" for folder in (step, step.parent, run)):
        if path.is_file():
            values = flat_yaml(read_text(path, files))
            if {"opt_type", "decoder_block"} <= values.keys():
                return {"file": str(path), "values": values}
            return {}
    return {}


def files_beside(folder: Place, array_names: set[str], files: Files) -> list[str]:
    """Returns the relative names of files in a step's folder that don't belong to its arrays.

    Args:
        folder: The step's folder.
        array_names: Names of its entries that do belong to them.
        files: The checkpoint's files, whose budget holds the names.
    """
    names: list[str] = []
    for entry in listing(folder):
        if entry.name in array_names or is_manifest(entry.name):
            continue
        below = [f"{entry.name}/{name}" for name in files_below(entry)] if entry.is_dir() else [entry.name]
        files.account.nodes(len(below), "The list of the files of a step", f"{entry}")
        names += below
    return names


def gin_settings(step: Place, files: Files) -> tuple[dict[str, Any], tuple[Finding, ...]]:
    """Reads the gin file in a step's folder or in its run's.

    Returns:
        File, values, references and what was left out; `model`, what it binds of the model; `schedule`, the call that
        makes the learning rate's. Empty if there is no file. What was odd.
    """
    folder = step if step.is_dir() else step.parent
    path = find_gin([folder, folder.parent])
    if path is None:
        return {}, ()
    try:
        text = read_text(path, files)
        settings = read_gin(text, path, account=files.account)
        model = _of_model(text, path, files.account)
        schedule = read_gin_call(text, path, *SCHEDULE_IN_GIN, files.account)
    except BudgetError:
        raise
    except StatekitError as error:
        return {}, (Finding(f"the gin file can't be read: {' '.join(str(error).split())}", str(path)),)
    return {
        "file": str(path),
        "values": dict(settings.values),
        "references": dict(settings.references),
        "left_out": list(settings.left_out),
        "model": model,
        **({} if schedule is None else {"schedule": vars(schedule)}),
    }, ()


def _of_model(text: str, path: Place, account: Account) -> dict[str, Any]:
    """Returns what a gin file binds of a model, by the configurables that maps know."""
    from statekit.maps.settings import gin_configurables  # entered where there is a gin file

    bound = {name: read_gin(text, path, name, account) for name in gin_configurables()}
    return {
        name: {"values": dict(bindings.values), "references": dict(bindings.references)}
        for name, bindings in bound.items()
    }


_MAX_FILE_NAME = 255
"""Bytes of a file's name at most. Source: Linux, include/uapi/linux/limits.h, `NAME_MAX`."""


FOLDER = "checkpoint_{step}"
"""The name of a step's folder as T5X has it, and of its file as Flax has."""


def step_prefix(target: Place, step: int, folder: str) -> str:
    """Returns the folder of a step below the target, with its `/`; empty if the target is itself named for a step.

    Args:
        target: What is written.
        step: The state's.
        folder: The name of a step's folder, with `{step}`, or a format of it as `{step:07d}`, for the number.

    Raises:
        UsageError: The target is named for another step.
    """
    return "" if named_for_step(target, step, folder) else f"{folder.format(step=step)}/"


def named_for_step(target: Place, step: int, folder: str) -> bool:
    """Tells whether the target is itself named for its step, as `step_prefix` has it.

    Raises:
        UsageError: It is named for another step.
    """
    before, _, after = folder.partition("{step")
    before, after = re.escape(before), re.escape(after.partition("}")[2])
    match = re.fullmatch(rf"{before}(\d+){after}", target.name)
    expected = folder.format(step=step)
    if match is None:
        return False
    if int(match[1]) != step:
        raise UsageError(
            "The target is named for another step than the state has.",
            place=target,
            expected=expected,
            remedy=f"name it {expected}, or name the folder that shall hold it",
        )
    return True


def check_step(asked: int | None, number: int | None, place: Place) -> None:
    """Refuses the one step that is at a path, where another was asked for.

    Raises:
        NotFoundError: It is another.
    """
    if asked is not None and asked != number:
        raise NotFoundError(
            "This is the checkpoint of another step than was asked for.",
            place=place,
            expected=asked,
            found=number,
        )


def array_names(tree: Tree) -> dict[str, str]:
    """Returns for each tensor the name of its array in the store: its path joined with `.`, as T5X and Orbax do.

    Raises:
        FormatError: Names coincide, or can't be those of folders; lists every one.
    """
    arrays: dict[str, str] = {}
    owners: dict[str, str] = {}
    faults = Faults()
    for path in (path for path, leaf in walk(tree) if isinstance(leaf, Tensor)):
        name, array = "/".join(map(str, path)), ".".join(map(str, path))
        if array in owners:
            faults.add(f"would lie in the same folder as {owners[array]}", name)
        if not is_file_name(array):
            faults.add("has a name that no folder can have", name)
        arrays[name] = array
        owners[array] = name
    faults.check(
        FormatError,
        "Tensors can't be written under their names",
        remedy="rename the parameters; T5X and Orbax join a path with '.', and nothing tells a.b from a/b then",
    )
    return arrays


def is_file_name(name: str) -> bool:
    """Tells whether a folder may have a name."""
    if not name.strip(".") or any(c in "/\\\0" or "\ud800" <= c <= "\udfff" for c in name):
        return False
    return len(name.encode()) <= _MAX_FILE_NAME


def find_gin(folders: Sequence[Place]) -> Place | None:
    """Returns the gin file that configured a run: an operative one first, then `config.gin`, then the only other."""
    for folder in folders:
        files = [path for path in listing(folder, ".gin") if path.is_file()]
        operative = [f for f in files if f.name.startswith("operative_config")]
        plain = [f for f in files if f.name == "config.gin"]
        for choice in (operative[-1:], plain, files if len(files) == 1 else []):
            if choice:
                return choice[0]
    return None
