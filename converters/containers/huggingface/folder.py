"""Folders of Hugging Face's libraries, and what stands beside a model in them; what they share, whoever wrote them.

All of them give the tree {model, optimizer, scheduler, scaler, trainer_state, files} that PyTorch's layouts read. What
has a meaning to an optimizer's run is read: torch files, and Trainer's JSON. Every other file (RNG states, training
arguments, samplers, configurations, tokenizers) is carried byte for byte, as a tensor of bytes; pickles among them are
read inertly first, and one that would run code isn't carried.

Source: huggingface/transformers, trainer.py, `_save_checkpoint`; huggingface/accelerate, checkpointing.py,
`save_accelerator_state`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence, write_cut
from statekit.converters.containers.huggingface.model import (
    ADAPTER_CONFIG,
    SHARD_BYTES,
    SHARDED_OPTIMIZER,
    Apart,
    Model,
    adapted_name,
    find_model,
    metadata_of,
    model_apart,
    model_below,
    model_sections,
    open_adapters,
    open_alone,
    open_averages,
    open_model,
    open_optimizer_apart,
    open_sharded,
    optimizer_apart,
    save_index,
    sharded_part,
    ties_in,
)
from statekit.converters.containers.part_places import listed, moved_to
from statekit.converters.containers.step_folders import check_step, step_prefix
from statekit.converters.containers.torch_file import CONTAINER as TORCH
from statekit.converters.containers.torch_file import open_torch
from statekit.converters.formats.flat_names import run_of_jax
from statekit.converters.formats.pickle.reader import read_pickle
from statekit.converters.formats.pytorch.reader import generation, named
from statekit.converters.formats.pytorch.writer import write_archive
from statekit.converters.formats.zip_archive import Archive
from statekit.errors import (
    BudgetError,
    CorruptError,
    FormatError,
    NotFoundError,
    RefusedError,
    StatekitError,
    UsageError,
    printable,
    some,
)
from statekit.files.checkpoint import (
    CLASSES,
    EMPTY_LEFT_OUT,
    HALVES,
    PRETRAINED,
    SEQUENCES_AS_MAPS,
    SORTED,
    STEPS,
    Checkpoint,
    Finding,
)
from statekit.files.checksums import ZIP
from statekit.files.manifest import inside, is_manifest
from statekit.files.safetensors import save_safetensors
from statekit.files.sections import CutPoints, Section
from statekit.files.source import File, Files, first_bytes, listing, opening, read_small
from statekit.files.stage import Stage
from statekit.files.tree import Place, size_of, spelled
from statekit.tensors.tensor import TIES, Stored, Tensor, in_memory, index_shape, ties_of
from statekit.tensors.tree import Record, Tree, at, holds_records, loose_json, put, record_names, tensor_names

OPTIMIZER = "optimizer"
"""Key of the optimizer's state."""
FILES = "files"
"""Key of the files that are carried as bytes, by name."""
TRAINER_ARGUMENTS = "trainer_arguments"
"""Key of those of Trainer's arguments that make its schedule."""
TRAINING_ARGS = "training_args.bin"
"""Trainer's arguments, a pickle; it is read inertly."""
REST = "statekit.pt"
"""The file for what a conversion brings and these libraries have no file for."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("optimizer.pt", "optimizer.bin"),
    "scheduler": ("scheduler.pt", "scheduler.bin", "lr_scheduler"),
    "scaler": ("scaler.pt",),
    "trainer_state": ("trainer_state.json",),
}
"""Key -> the files that may hold it: Trainer's name, then Accelerate's, then ColossalAI's.

Source: huggingface/transformers, trainer.py; huggingface/accelerate, utils/constants.py.
"""
_PICKLES = (".bin", ".pkl", ".pt", ".pth", ".ckpt")
_BESIDE = "extra/torch"
"""Canonical name of what lay beside a model in a file of PyTorch."""
_JSON, _SAFETENSORS = ".json", ".safetensors"
_MODEL = re.compile(r"(pytorch_model|adapter_model|model).*\.(bin|safetensors)(\.index\.json)?")


@dataclass(frozen=True)
class Beside:
    """What stands beside a model.

    Attributes:
        tree: Parts by key, and carried files under `files`.
        findings: What wasn't carried, and why; and what was odd about the rest.
    """

    tree: dict[str, Tree]
    findings: tuple[Finding, ...]


def open_beside(folder: Place, taken: Collection[str], files: Files) -> Beside:
    """Opens what stands beside a model; reads no tensor.

    Args:
        folder: Where it lies.
        taken: Names of the model's own files.
        files: The checkpoint's open files.

    Raises:
        FormatError: The optimizer's state, or another part, can't be trusted.
    """
    tree: dict[str, Tree] = {}
    read, passed, odd = {*taken}, set[str](), list[Finding]()
    for key, names in PARTS.items():
        name, part, notes = _open_named(folder, key, names, files)
        if name is not None:
            several = _further(folder, name)
            parts = [part, *(_open_part(folder / further, files)[0] for further in several)]
            tree |= {f"{key}s": parts} if several else {key: part}
            odd += notes
            read |= {name, *several}
            passed |= {*names} - {name}
    if not {"optimizer", "optimizers"} & {*tree}:
        elsewhere = _optimizer_elsewhere(folder, files)
        tree |= elsewhere.parts
        odd += elsewhere.findings
        read |= {*elsewhere.read}
    if (folder / REST).is_file():
        rest, notes = _open_rest(folder, files)
        tree = {**rest, **tree}
        odd += notes
        read.add(REST)
    carried, findings = _carried(folder, read, passed, files)
    if TRAINING_ARGS in carried and TRAINER_ARGUMENTS not in tree:
        tree |= _trainer_arguments(folder, tree, files)
    return Beside({**tree, **({FILES: carried} if carried else {})}, (*odd, *findings))


def _open_named(
    folder: Place, key: str, names: Sequence[str], files: Files
) -> tuple[str | None, Tree, Sequence[Finding]]:
    """Opens the first file there is of a part; no name if there is none, or if torch wouldn't load it."""
    name = next((name for name in names if (folder / name).is_file()), None)
    if name is None:
        return None, None, ()
    part, notes = _open_part(folder / name, files)
    # What `torch.load(weights_only=True)` would refuse is carried as it is.
    return (name, part, notes) if key == "optimizer" or not holds_records(part) else (None, None, ())


def _named_files(tree: Tree) -> dict[str, tuple[str, Tree]]:
    """Returns the files of optimizers that lie in a table by names, each with its key; none if they don't."""
    table = tree.get(f"{OPTIMIZER}s") if isinstance(tree, Mapping) else None
    parts = table if isinstance(table, Mapping) else {}
    files = {f"{OPTIMIZER}_{name}.pt": (f"{OPTIMIZER}s/{name}", part) for name, part in parts.items()}
    return files if len(files) > 1 and all(map(_APART.fullmatch, files)) else {}


def _optimizers_apart(folder: Place) -> dict[str, Place]:
    """Returns the files of several optimizers by their number."""
    matches = ((entry, _APART.fullmatch(entry.name)) for entry in listing(folder))
    return {match[1]: entry for entry, match in matches if match and entry.is_file()}


def _optimizer_elsewhere(folder: Place, files: Files) -> Apart:
    """Opens optimizers in files of their names, or one in shards, or one in a folder beside the model's."""
    apart = _optimizers_apart(folder)
    if len(apart) > 1:
        parts = {name: _open_part(file, files)[0] for name, file in sorted(apart.items())}
        return Apart({"optimizers": parts}, tuple(file.name for file in apart.values()))
    if shards := sharded_part(folder, SHARDED_OPTIMIZER):
        part, notes = open_sharded(folder / shards, "optimizer", files)
        return Apart({"optimizer": part}, (shards,), notes)
    return open_optimizer_apart(folder, files)


def _open_rest(folder: Place, files: Files) -> tuple[Mapping[str, Any], Sequence[Finding]]:
    """Opens the parts that these libraries have no file for."""
    rest, notes = _open_part(folder / REST, files)
    if not isinstance(rest, Mapping):
        raise FormatError("This isn't what statekit writes.", place=folder / REST, expected="a dict")
    return rest, notes


def _trainer_arguments(folder: Place, tree: Mapping[str, Tree], files: Files) -> dict[str, Tree]:
    """Returns the arguments that Trainer's updates depend on, under their key; nothing if there are none."""
    arguments = _schedule_arguments(open_torch(folder / TRAINING_ARGS, files).tree, tree.get("trainer_state"))
    return {TRAINER_ARGUMENTS: arguments} if arguments else {}


_OF_SCHEDULES = (
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "max_steps", "learning_rate",
)  # fmt: skip
_OF_GRADIENTS: Mapping[str, Any] = {
    "max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "label_smoothing_factor": 0.0, "neftune_noise_alpha": None,
    "average_tokens_across_devices": True,
}  # fmt: skip
"""Those that change the gradients, which an optimizer's file doesn't show -> the value that leaves them as they are."""


def _schedule_arguments(arguments: Tree, trainer_state: Tree) -> dict[str, Any]:
    """Returns those of Trainer's arguments that its updates depend on, as plain data; of steps those that it came to.

    They are those that make the schedule, and those that change the gradients.

    Source: huggingface/transformers, training_args.py, `TrainingArguments`; optimization.py, `get_scheduler`.
    """
    fields = arguments.state if isinstance(arguments, Record) else None
    if not isinstance(fields, Mapping):
        return {}
    settings = {key: fields[key] for key in _OF_SCHEDULES if fields.get(key) is not None}
    settings |= {key: fields[key] for key, off in _OF_GRADIENTS.items() if fields.get(key) not in (None, off)}
    settings |= {"optim": fields["optim"]} if fields.get("optim") is not None else {}
    settings |= _values_of_enums(settings)
    counted = trainer_state.get("max_steps") if isinstance(trainer_state, Mapping) else None
    if type(counted) is int and counted > 0:
        settings["max_steps"] = counted
    return settings if not holds_records(settings) and "lr_scheduler_type" in settings else {}


def _values_of_enums(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the settings that are members of enums."""
    enums = {key: item for key, item in settings.items() if isinstance(item, Record) and len(item.args) == 1}
    return {key: item.args[0] for key, item in enums.items()}


def write_part(stage: Stage, file: str, key: str, part: Tree) -> None:
    """Writes one part as its file's suffix says; tensors are streamed under `<key>/...`.

    Raises:
        UsageError: The part holds what the file can't.
    """
    with stage.file(file) as output:
        if not file.endswith(_JSON):
            under = f"{key}/" if key else ""
            write_archive(part, output, lambda name, tensor: stage.stream(f"{under}{name}", tensor))
            return
        try:
            text = json.dumps(part, indent=2, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise UsageError("A part can't be written as JSON.", place=key, found=error) from None
        output.write(f"{text}\n".encode("ascii"))


def write_files(stage: Stage, prefix: str, files: Mapping[str, Tensor]) -> None:
    """Writes carried files as they were.

    Raises:
        RefusedError: One is a pickle that wouldn't have been carried out of a folder, as it would run code there.
    """
    for name, tensor in files.items():
        with stage.file(f"{prefix}{name}") as output:
            for block in stage.stream(f"{FILES}/{name}", tensor):
                output.write(block)
        with Files() as written:
            why = _uncarried(stage.path / f"{prefix}{name}", written)
        if why:
            raise RefusedError(
                "A file that lay beside a model can't be trusted.",
                place=f"{FILES}/{name}",
                found=why,
                remedy="convert the run's own checkpoint again, or leave the file out of it",
            )


def are_files(part: Any) -> bool:
    """Tells whether a part of a tree is files that were carried: bytes by plain names."""
    return isinstance(part, Mapping) and all(
        isinstance(name, str)
        and inside(name)
        and "/" not in name
        and isinstance(content, Tensor)
        and (content.dtype.name, len(content.shape)) == ("uint8", 1)
        for name, content in part.items()
    )


def _open_part(path: Place, files: Files) -> tuple[Tree, tuple[Finding, ...]]:
    """Returns what a file holds, and what was odd about it."""
    if not path.name.endswith(_JSON):
        opened = open_torch(path, files)
        return opened.tree, opened.findings
    # Trainer writes a loss that is NaN as NaN.
    part = loose_json(read_small(path, files), path, files.account)
    if not isinstance(part, dict):
        raise FormatError("A state isn't a JSON object.", place=path, found=type(part).__name__)
    return part, ()


def _carried(
    folder: Place, read: Collection[str], passed: Collection[str], files: Files
) -> tuple[dict[str, Tensor], tuple[Finding, ...]]:
    carried: dict[str, Tensor] = {}
    findings = []
    for entry in listing(folder):
        if entry.name in read or is_manifest(entry.name):
            continue
        other = entry.name in passed or _MODEL.fullmatch(entry.name)
        try:
            why = "another file is taken for what it holds" if other else _uncarried(entry, files)
        except CorruptError as error:
            findings.append(Finding(f"is damaged: {error.line}", str(entry), True))
            continue
        if why:
            findings.append(Finding(f"isn't carried: {why}", str(entry)))
        else:
            carried[entry.name] = _bytes_of(files.source(entry))
    return carried, tuple(findings)


def _bytes_of(source: File) -> Tensor:
    """Returns a file as a tensor of its bytes, given once the checksums of a torch file among them were compared."""
    archive = Archive(source) if generation(source) == "zip" else None

    def fetch(index: tuple[slice, ...]) -> Any:
        if archive is not None:
            for name in archive.members:
                archive.check(name)
        return source.read(index[0].start, index_shape(index)[0])

    checksum = "" if archive is None else ZIP
    return Stored(
        (source.size,), np.dtype(np.uint8), fetch, source.path.name, source.place, checksum=checksum
    )


def _uncarried(path: Place, files: Files) -> str:
    """Says why a file isn't carried; "" if it is."""
    is_torch = False
    try:
        if files.source(path).size > (most := files.account.budget.limits.carried):
            return f"it has more than {most} bytes (an eighth of --budget)"
        if not path.name.endswith(_PICKLES):
            return ""
        with Files(files.account.budget) as opened:
            is_torch = TORCH.detect(path) is not None
            if is_torch:
                open_torch(path, opened)
            else:
                data = read_small(path, opened)
                read_pickle(data, str(path), account=opened.account)
    except BudgetError:
        raise
    except StatekitError as error:
        if is_torch and isinstance(error, CorruptError):
            raise
        return error.subject.rstrip(".").lower()
    return ""


def _paced(encoded: Encoded) -> Encoded:
    """Returns a state in whose groups the learning rate is the next update's, where another's schedule says it."""
    place = ("optimizer", "param_groups")
    groups = at(encoded.tree, place)
    rates = encoded.paced.rates if encoded.paced and "scheduler" not in encoded.tree else ()
    if not isinstance(groups, list) or len(groups) != len(rates):
        return encoded
    pairs = list(zip(groups, rates, strict=True))
    paced = [group if rate is None else {**group, "lr": rate} for group, rate in pairs]
    changed = [str(rate) for group, rate in pairs if rate is not None and group.get("lr") != rate]
    if not changed:
        return encoded
    sentence = f"The learning rate in optimizer.pt is the next update's, by the run's schedule: {', '.join(changed)}."
    return replace(
        encoded, tree=put(encoded.tree, place, paced), assumptions=(*encoded.assumptions, sentence)
    )


TRAINER_STATE = "trainer_state.json"
_STEP = re.compile(r"checkpoint[-_](\d{1,18})")
_APART = re.compile(r"optimizer_([A-Za-z]\w*)\.(?:pt|bin)")
"""Files of several optimizers of one model, each called by its name."""
_HEAD_BYTES = 9


@dataclass(frozen=True)
class Made:
    """A part that a library can't do without and a source hasn't.

    Attributes:
        part: What is written.
        said: What in it nobody knows, in a sentence.
    """

    part: Tree
    said: str


@dataclass(frozen=True)
class HuggingFaceFolder:
    """One kind of folder.

    Attributes:
        name: The container's name.
        title: One line for people.
        parts: Key of the tree -> name of its file; other keys go into one file of statekit's.
        fits: Says why a folder is one of this kind; "" if it isn't.
        needed: Gives what the library can't do without.
        specificity: Of its evidence.
        opens_files: Whether a single file of the model is one too.
        shard_bytes: Bytes of tensors in a file of the model at most; None where the library reads a single file only.
        step_folder: The name of a step's folder, with `{step}`; "" where folders have no such names.
        companions: Pattern of a file's name that the library always writes beside a model -> what is lost without it.
        schedule_in: The number in which the library counts updates and the schedule's steps; None if it has none.
        paced: Whether the library's next update takes the learning rate that the optimizer's file has.
        builds_optimizer: Whether the library builds the usual optimizer itself.
        numbers: Whether a part may have several files, with numbers: optimizer.bin, optimizer_1.bin.
        names: Whether several optimizers may have files of their names: optimizer_muon.pt, optimizer_adamw.pt.
    """

    name: str
    title: str
    parts: Mapping[str, str]
    fits: Callable[[Place], str]
    needed: Callable[[Encoded], Mapping[str, Made]] = lambda encoded: {}
    specificity: int = 20
    opens_files: bool = False
    shard_bytes: int | None = SHARD_BYTES
    step_folder: str = ""
    companions: Mapping[str, str] = field(default_factory=dict)
    schedule_in: str | None = None
    paced: bool = False
    builds_optimizer: bool = False
    numbers: bool = False
    names: bool = False
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"
    entries: tuple[str, ...] = ("*.index.json", "config.json", "adapter_config.json", "trainer_state.json")

    def for_target(self, target: Place) -> HuggingFaceFolder:
        """Returns the container that writes a `.safetensors` as a single file: a model alone."""
        alone = self.opens_files and target.name.endswith(_SAFETENSORS)
        return replace(self, target_kind="file", shard_bytes=None) if alone else self

    def detect(self, path: Place) -> Evidence | None:
        """Looks at file names, and at the first bytes of a single file."""
        try:
            if path.is_file():
                single = self.opens_files and _is_safetensors(path)
                return Evidence(10, "the header of a safetensors file") if single else None
            folder = self._locate(path, None)
        except (OSError, StatekitError):
            return None
        if folder is None:
            return None
        return Evidence(self.specificity, f"{folder.path} has {self.fits(folder.path)}")

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Parses headers and pickles; of a run's folder, the newest step's or the given one's."""
        alone = self.opens_files and path.is_file()
        folder = _Folder(path) if alone else self._locate(path, step)
        if folder is None:
            raise NotFoundError(f"There is no folder of {self.name}.", place=path, remedy="check the path")
        with opening(path, budget) as files:
            tree, meta, findings = _opened(folder.path, files)
            number = _global_step(tree) if self.step_folder else None
            check_step(step, _named(folder.path) if number is None else number, folder.path)
        meta = {**meta, STEPS: list(folder.steps)}
        missing = () if alone else tuple(self._missing(folder.path))
        findings = (*folder.findings, *findings, *missing)
        return Checkpoint(self.name, folder.path, tree, meta, number, findings, files.close)

    def _missing(self, folder: Place) -> Iterator[Finding]:
        """Yields the files that the library always writes and that aren't there."""
        entries = [entry.name for entry in listing(folder)]
        for pattern, lost in self.companions.items():
            if any(fnmatchcase(name, pattern) for name in entries):
                continue
            stem = pattern.partition(".")[0]
            if stem == SHARDED_OPTIMIZER and sharded_part(folder, SHARDED_OPTIMIZER):
                continue
            cut = sharded_part(folder, stem, whole=False)
            instead = f"FSDP's {cut} stands in its place, without the index of its shards" if cut else lost
            yield Finding(f"{pattern} isn't there: {instead}", f"{folder}")

    def fitted(self, encoded: Encoded) -> Encoded:
        """Returns a state with its parts where the folder keeps them, and what the library can't do without.

        Raises:
            UsageError: The target is a single file, and the state has an optimizer.
        """
        encoded = moved_to(
            self._apart(encoded), {"model": "model", **dict(zip(self.parts, self.parts, strict=True))}
        )
        if self.target_kind == "file":
            encoded = _model_alone(encoded)
        if self.paced:
            encoded = _paced(encoded)
        carried = encoded.tree.get(FILES) or {}
        supplied = {
            key: need
            for key, need in self.needed(encoded).items()
            if key not in encoded.tree and self.parts[key] not in carried
        }
        tree = {**{key: need.part for key, need in supplied.items()}, **encoded.tree}
        pretrained = _pretrained(tree)
        again = [name for name in pretrained if name in carried]
        if pretrained:
            tree[FILES] = {**carried, **{name: _json_bytes(part) for name, part in pretrained.items()}}
        tree |= _untied(tree.get("model"))
        notes = [*encoded.assumptions, *(need.said for need in supplied.values())]
        notes += [f"{name} is the one that the map made; another lay beside the source." for name in again]
        return replace(encoded, tree=tree, assumptions=tuple(notes))

    def _apart(self, encoded: Encoded) -> Encoded:
        """Returns a state with several optimizers in a list, or in a table where their files may have its names."""
        if not self.numbers:
            return encoded
        encoded = encoded.side_by_side or encoded
        in_table = self.names and _named_files(encoded.tree)
        return encoded if in_table else listed(encoded, f"{OPTIMIZER}s")

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes a folder that the library loads: the model as safetensors, all else as torch files and JSON."""
        if self.target_kind == "folder":
            write_cut(self, encoded, stage)
            return
        laid = self._laid(encoded, stage.target)
        with stage.file() as output:
            save_safetensors(
                laid.model,
                output,
                lambda name, tensor: stage.stream(_in_model(name), tensor),
                metadata_of(laid.ties),
            )

    def image(self, encoded: Encoded, target: Place, cut: CutPoints) -> list[Section]:
        """Returns the model's files, and the optimizer's."""
        laid = self._laid(encoded, target)
        sections = model_sections(laid.model, laid.stem, self._limit(cut), _in_model, laid.prefix, laid.ties)
        return [
            *sections,
            *(
                _part_section(f"{laid.prefix}{file}", key, part)
                for file, (key, part) in laid.parts.items()
                if key.startswith(OPTIMIZER)
            ),
        ]

    def join(self, encoded: Encoded, stage: Stage, cut: CutPoints, records: Mapping[str, Any]) -> None:
        """Writes the model's index, the small parts, and the files that are carried."""
        laid = self._laid(encoded, stage.target)
        written = save_index(laid.model, laid.stem, self._limit(cut), stage, laid.prefix)
        for file, (key, part) in laid.parts.items():
            if not key.startswith(OPTIMIZER):
                write_part(stage, f"{laid.prefix}{file}", key, part)
        write_files(stage, laid.prefix, laid.files)
        if laid.pretrained and laid.prefix:  # from_pretrained takes the run's folder too, as after save_model
            for name in (*written, *laid.pretrained):
                stage.copy(f"{laid.prefix}{name}", name)
        if laid.rest:
            write_part(stage, f"{laid.prefix}{REST}", "", laid.rest)

    def _limit(self, cut: CutPoints) -> int | None:
        return None if self.shard_bytes is None else cut.limit(self.shard_bytes)

    def _laid(self, encoded: Encoded, target: Place) -> _Laid:
        """Returns where the parts of a state lie in a target."""
        tree = dict(encoded.tree)
        if "model" not in tree:
            raise UsageError(
                f"The container {self.name} holds a model with its optimizer, as PyTorch's layouts write them.",
                place="--layout",
                found=", ".join(map(str, tree)),
            )
        prefix = ""
        if self.step_folder:
            prefix = step_prefix(target, _global_step(tree) or encoded.step, self.step_folder)
        files = tree.pop(FILES) if are_files(tree.get(FILES)) else {}
        if TRAINING_ARGS in files:  # which says them
            tree.pop(TRAINER_ARGUMENTS, None)
        pretrained = _pretrained(tree)
        if pretrained:
            del tree[PRETRAINED]  # they are among the files
        stem = "adapter_model" if ADAPTER_CONFIG in files else "model"
        model, ties = tree.pop("model"), tree.pop(TIES, {})
        return _Laid(prefix, stem, model, ties, self._taken(tree), files, tuple(pretrained), tree)

    def _taken(self, tree: dict[str, Tree]) -> dict[str, tuple[str, Tree]]:
        """Takes what has files of its own out of a tree, and returns it by file, each with its key."""
        parts = {self.parts[key]: (key, tree.pop(key)) for key in self.parts if key in tree}
        for key, file in self.parts.items() if self.numbers else ():
            several = tree.pop(f"{key}s") if isinstance(tree.get(f"{key}s"), list) else []
            parts |= {_numbered(file, i): (f"{key}s/{i}", part) for i, part in enumerate(several)}
        if self.names and (by_file := _named_files(tree)):
            parts |= by_file
            del tree[f"{OPTIMIZER}s"]
        return parts

    def _locate(self, path: Place, step: int | None) -> _Folder | None:
        """Finds the folder: itself, or of a run's folder the newest step's or the given one's."""
        if not path.is_dir():
            return None
        if self.fits(path):
            return _Folder(path)
        entries = [(n, entry) for entry in listing(path) if (n := _named(entry)) is not None]
        steps = {number: entry for number, entry in sorted(entries) if entry.is_dir() and self.fits(entry)}
        if not steps:
            return None
        if step is not None and step not in steps:
            raise NotFoundError(
                "There is no such step.", place=path, expected=step, found=", ".join(map(str, steps))
            )
        newest = max(steps)
        passed = [
            Finding("holds no checkpoint, passed over", str(entry))
            for number, entry in entries
            if number > newest
        ]
        return _Folder(steps[newest if step is None else step], tuple(steps), tuple(passed))


@dataclass(frozen=True)
class _Laid:
    """Where the parts of a state lie in a target.

    Attributes:
        prefix: The step's folder below the target, with its `/`; "" if it is the target.
        stem: What the model's files are called.
        model: The model's tensors by name.
        ties: Further name of a tensor of the model -> its name.
        parts: What has a file of its own, by the file's name: its key and it.
        files: Files that are carried, by name.
        pretrained: Names of those that the model's library builds it from.
        rest: What the library has no file for.
    """

    prefix: str
    stem: str
    model: Mapping[str, Tensor]
    ties: Mapping[str, str]
    parts: Mapping[str, tuple[str, Tree]]
    files: Mapping[str, Tensor]
    pretrained: tuple[str, ...]
    rest: Mapping[str, Tree]


def _in_model(name: str) -> str:
    """Returns the name in the target of a model's tensor."""
    return f"model/{name}"


def _part_section(file: str, key: str, part: Tree) -> Section:
    """Returns a section that is the torch file of a part; `join` needs nothing of it."""

    def named_in(tree: Tree) -> dict[str, Tensor]:
        return {f"{key}/{name}": tensor for name, tensor in tensor_names(tree).items()}

    def write(stage: Stage) -> None:
        write_part(stage, file, key, part)

    def read(path: Place, files: Files, record: Any) -> dict[str, Tensor]:
        return named_in(_open_part(path / file, files)[0])

    return Section(file, named_in(part), write, read)


def _pretrained(tree: Tree) -> Mapping[str, Any]:
    """Returns the files that a model's library builds it from; none if they aren't plain JSON under plain names."""
    part = tree.get(PRETRAINED) if isinstance(tree, Mapping) else None
    named = isinstance(part, Mapping) and all(
        isinstance(name, str)
        and re.fullmatch(r"\w+\.json", name)
        and isinstance(content, Mapping)
        and name != TRAINER_STATE
        and not is_manifest(name)
        for name, content in part.items()
    )
    return part if isinstance(part, Mapping) and named else {}


def _json_bytes(part: Mapping[str, Any]) -> Tensor:
    text = json.dumps(part, indent=2, sort_keys=True) + "\n"
    return in_memory(np.frombuffer(text.encode("ascii"), np.uint8), "the map")


def _untied(model: Any) -> dict[str, Any]:
    """Returns a model with each tensor under one name, and the other names; safetensors has no shared tensors."""
    ties = ties_of(model, model) if isinstance(model, Mapping) else {}
    if not ties:
        return {}
    return {"model": {name: tensor for name, tensor in model.items() if name not in ties}, TIES: ties}


def _several(
    models: Sequence[Mapping[str, Tensor]], neighbours: Mapping[str, Tree], path: Place
) -> dict[str, Tree]:
    """Returns the models of a folder as their optimizers move them: each its own, or one all of them."""
    optimizers = neighbours.get("optimizers", [])
    if _moves_more(neighbours.get("optimizer"), models[0]):
        return {"model": _of_one_optimizer(models)}
    if len(optimizers) != len(models):
        raise FormatError(
            "A folder holds several models, and not an optimizer of each.",
            place=path,
            expected=f"{len(models)} optimizers",
            found=f"{len(optimizers) or int('optimizer' in neighbours)}",
            remedy="put the files of one into a folder of its own, as model.safetensors and optimizer.bin",
        )
    return {"models": [*models]}


def _of_one_optimizer(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of several models that one optimizer moves, each under its file's name: model_1.weight."""
    return {
        f"model_{number}.{name}" if number else f"model.{name}": tensor
        for number, model in enumerate(models)
        for name, tensor in model.items()
    }


def _model_alone(encoded: Encoded) -> Encoded:
    """Returns a state of weights as a single file holds it: tensors, and further names of some."""
    if {OPTIMIZER, f"{OPTIMIZER}s"} & encoded.tree.keys():
        raise UsageError(
            "A single safetensors file has no place for an optimizer's state.",
            place="the target",
            remedy="give the folder that shall hold it another name, with --to safetensors",
        )
    kept = {key: part for key, part in encoded.tree.items() if key in ("model", TIES)}
    why = "a single safetensors file holds tensors alone"
    lost = {f"{_BESIDE}/{key}": why for key in encoded.tree if key not in kept}
    if encoded.step:
        lost["counts/updates"] = f"{why}, and no step"
    return replace(encoded, tree=kept, dropped={**encoded.dropped, **lost})


@dataclass(frozen=True)
class _Folder:
    """A checkpoint's folder, and the steps beside it."""

    path: Place
    steps: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()


def _opened(path: Place, files: Files) -> tuple[Tree, dict[str, Any], tuple[Finding, ...]]:
    """Returns the tree of a folder, or of a single file, what is known of it, and what was odd."""
    if path.is_file():
        return (*_opened_alone(path, files), ())
    tree: dict[str, Tree] = {}
    meta: dict[str, Any] = {}
    taken: tuple[str, ...] = ()
    odd: tuple[Finding, ...] = ()
    if name := find_model(path):
        model = open_model(path, name, files)
        further = _further(path, name)
        tree, taken, odd = _tree_of(model), (*model.files, *further), model.findings
        if further:
            opened = [open_model(path, file, files) for file in further]
            tree["models"] = [tree.pop("model"), *(dict(file.tensors) for file in opened)]
        meta = _meta_of(model)
    elif name := model_below(path) or model_apart(path):
        place, averages = path / name, open_averages(path, files)
        model = open_model(place.parent, place.name, files)
        tree, taken, odd = {**averages, **_tree_of(model)}, (place.parent.name, *averages), model.findings
        meta = _meta_of(model)
        meta |= (
            {HALVES: {"model": name, "optimizer": optimizer}} if (optimizer := optimizer_apart(path)) else {}
        )
    neighbour = open_beside(path, taken, files)
    meta |= _classes_in(neighbour.tree.get("optimizer"))
    if "models" in tree:
        tree |= _several(tree.pop("models"), neighbour.tree, path)
    moves_more = _moves_more(neighbour.tree.get("optimizer"), tree.get("model", {}))
    if adapters := open_adapters(path, files) if moves_more else {}:
        usual = {adapted_name(name, "default"): tensor for name, tensor in tree.get("model", {}).items()}
        tree["model"], meta[SORTED] = {**usual, **adapters}, True
    return named({**tree, **neighbour.tree}), meta, (*odd, *neighbour.findings)


def _classes_in(optimizer: Tree) -> dict[str, str]:
    """Returns the classes of other packages than PyTorch that an optimizer's state has objects of."""
    names = [name for name in dict.fromkeys(record_names(optimizer)) if not name.startswith("torch.")]
    return {CLASSES: some([printable(name) for name in names])} if names else {}


def _opened_alone(path: Place, files: Files) -> tuple[Tree, dict[str, Any]]:
    """Returns the tree of a single file, and what is known of it: a model's, or a run's whose names are JAX's."""
    alone = open_alone(path, files)
    if (flat := run_of_jax(alone.tensors, spelled(path))) is not None:
        return flat, {SEQUENCES_AS_MAPS: True, EMPTY_LEFT_OUT: True}
    return named(_tree_of(alone)), _meta_of(alone)


def _tree_of(model: Model) -> dict[str, Tree]:
    ties = ties_in(model)
    return {"model": dict(model.tensors), **({TIES: ties} if ties else {})}


def _meta_of(model: Model) -> dict[str, Any]:
    return {"model": list(model.files), SORTED: model.is_sorted, "metadata": dict(model.metadata)}


def _named(folder: Place) -> int | None:
    """Returns the step in a folder's name; None if it has none there."""
    match = _STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def _global_step(tree: Tree) -> int | None:
    state = tree.get("trainer_state")
    number = state.get("global_step") if isinstance(state, Mapping) else None
    return number if type(number) is int and number >= 0 else None


def _moves_more(optimizer: Tree, model: Tree) -> bool:
    """Tells whether an optimizer moves more parameters than a folder's model has."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    lists = (
        [group.get("params") for group in groups if isinstance(group, Mapping)]
        if isinstance(groups, list)
        else []
    )
    return sum(len(params) for params in lists if isinstance(params, list)) > len(model)


def _further(folder: Place, name: str) -> list[str]:
    """Returns the names of the second file of a kind and those after it, as Accelerate numbers them.

    Source: huggingface/accelerate, checkpointing.py, `save_accelerator_state`.
    """
    names: list[str] = []
    while (folder / (further := _numbered(name, len(names) + 1))).is_file():
        names.append(further)
    return names


def _numbered(name: str, number: int) -> str:
    """Returns the name of one of several files of a kind; the first has no number."""
    stem, dot, suffix = name.partition(".")
    return f"{stem}_{number}{dot}{suffix}" if number else name


def _is_safetensors(path: Place) -> bool:
    head = first_bytes(path, _HEAD_BYTES)
    length = int.from_bytes(head[:8], "little")
    return len(head) == _HEAD_BYTES and head[8:] == b"{" and 2 <= length <= size_of(path) - 8
