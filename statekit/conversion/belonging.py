"""What belongs to one checkpoint: whether its files are of one step, and whether all parts of the run are read.

Input: an opened checkpoint and the state that it decodes to. Output: findings, a sentence on each, and the words for a
state without an optimizer.

A reader takes the names that it knows. A half under another name (an optimizer, an average, a schedule, a loss scaler)
would be left behind without a word, and weights would pass for all that was saved. So this looks at what lies inside
and beside a checkpoint of any container, by name and by structure, and names what nobody has read.

A file of another step fits in shape, and nothing in the bytes of weights tells whose they are. But most files that
stand beside weights count: a trainer's record its steps, an optimizer its updates, a schedule where it stands, and a
step's folder is called by its number. Where these disagree, files may be mixed. A run may also have skipped updates or
begun its optimizer anew, so it is said and not refused. Files that don't count are named (`uncounted`): nothing in them
tells, unless a manifest does.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from itertools import islice
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, TypeAlias

from statekit.budget import Budget
from statekit.conversion import registry
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.errors import StatekitError, plural, some
from statekit.files.checkpoint import REPLICAS, STEPS, Checkpoint, Finding, may_be_of_rank
from statekit.files.source import listing, walked
from statekit.files.tree import Place, below, size_of, spelled
from statekit.state.evidence import Fact
from statekit.state.options import stored_rate
from statekit.state.run import RunState, Schedule, run_of
from statekit.state.schema import NO_OPTIMIZER, WEIGHTS
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import at, shipped_json, walk

Half: TypeAlias = Literal["optimizer", "average", "schedule", "scaler"]

UNREAD = "companion-unread"
"""Kind of a finding, and name of the fault: what looks like a part of the run isn't read."""
LOST = ": "
"""Stands in a finding between what a companion is and what isn't done with it."""
_WORDS: Mapping[str, Half] = {
    **dict.fromkeys(("optimizer", "optimizers", "optimiser", "optim", "optims", "optstate"), "optimizer"),
    **dict.fromkeys(("ema", "emas", "swa", "averaged", "average", "averages", "polyak"), "average"),
    **dict.fromkeys(("scheduler", "schedulers", "sched", "lrscheduler", "annealing"), "schedule"),
    **dict.fromkeys(("scaler", "scalers", "gradscaler"), "scaler"),
}
"""Word of a name -> what it stands for."""
_SEVERAL_WORDS: Mapping[str, Half] = {
    "opt_state": "optimizer",
    "opt_states": "optimizer",
    "model_avg": "average",
    "recipe_state": "optimizer",
    "training_state": "optimizer",
}
"""The same of words that tell nothing by themselves."""
_WHOLE: Mapping[str, Half] = {"opt": "optimizer", "avg": "average"}
"""The same of words that tell only if they are the whole name: a model may be called so too."""
_SUFFIXES = ("_opt", "_modelopt")
"""Ends of names that are an optimizer's: SpeechBrain's recipes save wav2vec_opt.ckpt and modelopt.ckpt."""
_STATES = re.compile(r"\.states(\.|$)")
"""Gluon's file of a trainer. Source: apache/mxnet python/mxnet/gluon/trainer.py, `save_states`."""
_TEXT = re.compile(
    r"\.(py|pyc|pyi|ipynb|md|rst|txt|log|out|err|html?|jsonl?|ya?ml|toml|cfg|ini|gin|csv|tsv|sh|c|cc|cpp|cu|h|js)"
    r"|\.(png|jpe?g|gif|svg|pdf)"
)
"""Suffixes of files that hold no tensors."""
_CASES = re.compile(r"(?<=[a-z])(?=[A-Z])")
_RATE = re.compile(r"(?<!\d)0\.\d+")
"""An average's rate, which is no step."""
_MOST = 10_000
"""Entries of a folder that are looked at."""
_LONGEST = 255
"""Characters of a name that may tell: a file's at most. Source: Linux, limits.h, `NAME_MAX`."""
CARRIED = "files"
"""Key in a tree of the files that are carried as bytes."""
_MODEL_FOLDERS = frozenset({"model", "models", "module", "net", "network", "weights"})
_SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "v_row", "v_col"})
"""Last names of slots, which no model's parameter has."""
_TWINS = {"mu": "nu", "nu": "mu", "exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}
"""Names of the two averages of one gradient, by each other: they stand in each other's place.

Source: google-deepmind/optax optax/_src/transform.py, `ScaleByAdamState`; pytorch/pytorch torch/optim/adam.py."""
_SEGMENTS = re.compile(r"[^/.\[\]'\"]+")
"""Matches the keys in a flat name, whatever joins them."""
AS_SUCH = "nothing reads it as such"
_OTHER_RANK, _OTHER_RANKS = "looks like another rank's file", "look like other ranks' files"
_LEVELS = 6
"""Levels of a state's extra that are looked at."""
_OPENED, _OPENED_BESIDE = 16, 4
"""How many files of unknown names are opened at most: in a folder of weights, and beside a single file."""
_RECORD = frozenset({"state", "param_groups"})
"""Keys of an optimizer's state_dict. Source: pytorch/pytorch torch/optim/optimizer.py, `Optimizer.state_dict`."""


@lru_cache
def half_of(name: str) -> Half | None:
    """Returns what a file, a folder or a key is by its name; None if its name tells nothing.

    Example:
        >>> half_of("opt000500.pt"), half_of("model_ema.pt"), half_of("opt-125m.bin")
        ('optimizer', 'average', None)
    """
    if len(name) > _LONGEST:
        return None
    words = _words(name)
    stem = "_".join(word for word in _words(name.partition(".")[0]) if not word.isdecimal())
    by_word = next((_WORDS[word] for word in words if word in _WORDS), None)
    joined = f"_{'_'.join(words)}_"
    is_suffix = f"_{stem}".endswith(_SUFFIXES)
    by_words = next((half for several, half in _SEVERAL_WORDS.items() if f"_{several}_" in joined), None)
    return by_word or by_words or _WHOLE.get(stem) or ("optimizer" if is_suffix else None)


def unread(
    checkpoint: Checkpoint, state: TrainState | None, ref: CheckpointRef, budget: Budget
) -> tuple[Finding, ...]:
    """Returns what looks like a part of a checkpoint's run and isn't read.

    Args:
        checkpoint: The checkpoint.
        state: The state that it decodes to; None where no layout makes one of it.
        ref: What the user says. Who names one optimizer of several by its key leaves the others on purpose.
        budget: The job's, which knows the files that were read.
    """
    run = run_of(state.extra) if state is not None else RunState()
    is_read = _is_read(checkpoint, budget)
    halves = dict(_near(checkpoint, state, run, is_read))
    findings = [*_of_other_ranks(checkpoint, is_read)]
    if state is None or state.optimizer.schema == WEIGHTS:
        further, unopened = _further_checkpoints(checkpoint.path, ref, is_read)
        halves |= {str(file): "optimizer" for file in further}
        if unopened:
            left = f"{plural(len(unopened), 'smaller file')} beside it were not opened, as {unopened[0].name}"
            findings.append(Finding(f"{left}: nothing tells whether an optimizer is there", f"{unopened[0]}"))
    for half in dict.fromkeys(halves.values()):
        places = [place for place, kind in halves.items() if kind == half]
        looks = f"{some([PurePath(place).name for place in places])} {_looks_like(half, len(places))}"
        findings.append(Finding(f"{looks}{LOST}nothing reads it", places[0], kind=UNREAD))
    is_picked = ref.optimizer_key is not None or ref.model_key is not None
    inside = () if state is None else _inside(state, run, is_picked)
    return (*findings, *(Finding(sentence, f"{checkpoint.path}", kind=UNREAD) for sentence in inside))


def _of_other_ranks(checkpoint: Checkpoint, is_read: Callable[[Place], bool]) -> Iterator[Finding]:
    """Yields what names the files of other ranks, unless they hold the same values."""
    if not may_be_of_rank(checkpoint.path):
        return
    from statekit.files.ranks import other_ranks  # entered where a name has a word for ranks

    same = checkpoint.meta.get(REPLICAS, ())
    others = [place for place in other_ranks(checkpoint.path) if not is_read(place)]
    unread_ranks = [place for place in others if place.name not in same]
    if unread_ranks:
        top = checkpoint.path.parent
        names = some(
            [below(f"{place}", top) if place.parent == top else f"{place}" for place in unread_ranks]
        )
        looks = _OTHER_RANK if len(unread_ranks) == 1 else _OTHER_RANKS
        yield Finding(f"{names} {looks}{LOST}nothing reads it", f"{unread_ranks[0]}", kind=UNREAD)


def is_spare(finding: Finding, state: TrainState) -> bool:
    """Tells whether an unread companion is nothing that a run with an optimizer goes on with by itself.

    NeMo saves `run-last-EMA.ckpt` beside `run-last.ckpt`, and a run that goes on from the latter is right. So is a rank
    that goes on from its own file.

    Source: NVIDIA/NeMo, nemo/collections/common/callbacks/ema.py, `EMA.on_save_checkpoint`.
    """
    looks = finding.what.partition(LOST)[0]
    is_of_run = state.optimizer.schema != WEIGHTS
    spare = (_looks_like("average"), _looks_like("average", 2), _OTHER_RANK, _OTHER_RANKS)
    return is_of_run and looks.endswith(spare)


def contents_without_optimizer(findings: Iterable[Finding], run: RunState) -> str:
    """Returns what a state without an optimizer is called: weights alone, unless something of a run is there.

    Args:
        findings: Those of the checkpoint.
        run: What its records say of the run.
    """
    contents = [finding.what.partition(LOST)[0] for finding in findings if finding.kind == UNREAD]
    averages = [part.place for part in run.parts if part.what == "averages"]
    if not contents and not averages:
        return NO_OPTIMIZER
    contents += [f"an average ({some(averages)})"] if averages else []
    return f"weights, and no optimizer's state that is read; {'; '.join(contents)}"


def _looks_like(half: Half, count: int = 1) -> str:
    article = {"schedule": "a schedule", "scaler": "a loss scaler"}.get(half, f"an {half}")
    return f"looks like {article}" if count == 1 else f"look like parts of {article}"


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+|(?<=[a-z])(?=\d)", _CASES.sub("_", name).lower()) if word]


def _is_read(checkpoint: Checkpoint, budget: Budget) -> Callable[[Place], bool]:
    """Returns what tells whether a file, or something in a folder, has been read; carried bytes aren't."""
    carried = at(checkpoint.tree, (CARRIED,)) if isinstance(checkpoint.tree, Mapping) else None
    as_bytes = {checkpoint.path / str(name) for name in carried} if isinstance(carried, Mapping) else set()
    places = {tensor.place for tensor in checkpoint.tensors.values() if isinstance(tensor, Stored)}
    read = {spelled(place) for place in (*budget.sources, *places, *checkpoint.parts)}
    read -= set(map(spelled, as_bytes))

    def is_read(path: Place) -> bool:
        place = spelled(path)
        return place in read or any(file.startswith(f"{place}{os.sep}") for file in read)

    return is_read


def _near(
    checkpoint: Checkpoint, state: TrainState | None, run: RunState, is_read: Callable[[Place], bool]
) -> Iterator[tuple[str, Half]]:
    """Yields the path of each companion in the files, and what it is."""
    top = checkpoint.path
    is_bare = state is None or state.optimizer.schema == WEIGHTS
    has = _halves_of(run) | (set() if is_bare else {"optimizer"})

    def half_at(entry: Place) -> Half | None:
        # Beside an optimizer, another file of Gluon's states is another process'.
        half = half_of(entry.name) or ("optimizer" if is_bare and _STATES.search(entry.name) else None)
        return half if half and not is_read(entry) and _holds_data(entry) else None

    # Where several steps lie in one folder, a file of another step's number is that step's.
    step = f"{checkpoint.step}" if checkpoint.meta.get(STEPS) and top.is_dir() else ""
    near = [entry for entry in _entries_in(top, deeper=is_bare) if _may_belong(entry.name, step)]
    if is_bare or top.is_file():
        # Beside a whole run in one file: what has its name too, or a bare name of a half that the file lacks.
        near += [
            entry
            for entry in itertools.chain(_entries_in(top.parent), _beside_folder(top))
            if _may_belong(entry.name, top.name)
            and (is_bare or _belongs(entry.name, top.name, half_of(entry.name) in has))
        ]
    yield from ((str(entry), half) for entry in near if (half := half_at(entry)))


def _further_checkpoints(
    top: Place, ref: CheckpointRef, is_read: Callable[[Place], bool]
) -> tuple[list[Place], list[Place]]:
    """Returns the files with an optimizer that their names don't tell: in a folder of weights, or beside a single file.

    An export lies beside the checkpoint of its run, as `model.safetensors` beside `last.pt`; or a program saves two
    files by hand, as `weights.pt` and `state.pt`. A whole checkpoint beside a single file is a run of its own. Of many
    files the largest are opened, as an optimizer's state is seldom smaller than what it moves; the others are returned,
    too.
    """
    is_folder, suffixes = top.is_dir(), registry.checkpoint_suffixes()
    folder = top if is_folder else top.parent
    files = [
        entry
        for entry in _entries_in(folder)
        if entry.name.endswith(suffixes) and half_of(entry.name) is None and not is_read(entry)
    ]
    if not is_folder:
        files = [file for file in files if _may_belong(file.name, top.name)]
        files = files if len(files) <= _OPENED_BESIDE else []
    files.sort(key=size_of, reverse=True)
    opened, unopened = files[:_OPENED], files[_OPENED:]
    return [file for file in opened if _holds_optimizer(file, ref, alone=not is_folder)], unopened


def _holds_optimizer(file: Place, ref: CheckpointRef, *, alone: bool) -> bool:
    """Tells whether a file has an optimizer's records, and no weights if `alone`; of an unreadable file nobody can."""
    try:
        container, _ = registry.detect_container(file)
        limited = CheckpointRef(budget=ref.budget, follow_links=ref.follow_links)
        with registry.opened(container, file, None, limited) as checkpoint:
            records = [
                name.removeprefix("extra/")
                for name, node in _nodes({"": checkpoint.tree})
                if isinstance(node, Mapping) and node.keys() >= _RECORD
            ]
            others = [
                tensor
                for name, tensor in checkpoint.tensors.items()
                if not f"/{name}".startswith(tuple(f"{record}/" for record in records))
            ]
    except StatekitError:
        return False
    return bool(records) and not (alone and any(t.shape and t.dtype.kind not in "iub" for t in others))


def _halves_of(run: RunState) -> set[Half]:
    """Returns the halves that a state has in its records."""
    parts = {part.what for part in run.parts}
    names: dict[str, Half] = {"scaler": "scaler", "averages": "average"}
    return {half for key, half in names.items() if key in parts} | ({"schedule"} if run.schedules else set())


def _beside_folder(top: Place) -> Iterator[Place]:
    """Yields what lies beside the folder of a model's file, where the folder is called so: its halves have their own.

    Source: hpcaitech/ColossalAI, applications/Colossal-LLaMA/colossal_llama/utils/ckpt_io.py, `save_checkpoint`.
    """
    if top.is_file() and top.parent.name in _MODEL_FOLDERS:
        yield from _entries_in(top.parent.parent)


def _entries_in(folder: Place, *, deeper: bool = False) -> Iterator[Place]:
    """Yields what is in a folder; with `deeper`, also what is in its folders that no step's number names."""
    try:
        entries = listing(folder)[:_MOST]
        yield from entries
        for entry in entries if deeper else ():
            if entry.is_dir() and not re.search(r"\d", entry.name) and half_of(entry.name) is None:
                yield from listing(entry)[:_MOST]
    except StatekitError:  # what may not be listed isn't known
        return


def _may_belong(name: str, top: str) -> bool:
    """Tells whether two names may be of one step: they share a number, or one has none."""
    whole = (_RATE.sub("", stem) for stem in (name, top))
    numbers = [{int(digits) for digits in re.findall(r"\d{1,18}", stem)} for stem in whole]
    return not all(numbers) or bool(numbers[0] & numbers[1])


def _belongs(name: str, top: str, is_there: bool) -> bool:
    """Tells whether a file beside a whole run is that run's, by its name."""
    weight_shapes, state_shapes = (
        {w for w in _words(name_of_file.partition(".")[0]) if w not in _WORDS} for name_of_file in (top, name)
    )
    return (bool(state_shapes) and weight_shapes == state_shapes) or (not state_shapes and not is_there)


def _holds_data(path: Place) -> bool:
    """Tells whether a file, or one in a folder, may hold tensors, by its name."""
    if path.is_file():
        return not _TEXT.fullmatch(path.suffix.lower())
    if not path.is_dir():
        return False
    try:
        names = (name for _, _, files in walked(path) for name in files)
        return not all(_TEXT.fullmatch(os.path.splitext(name)[1].lower()) for name in islice(names, _MOST))
    except StatekitError:
        return True


def _inside(state: TrainState, run: RunState, is_picked: bool) -> Iterator[str]:
    """Yields the traces of another optimizer, or of a lost one, in a state's own records."""
    for name, node in () if is_picked else _nodes(state.extra):
        if isinstance(node, Mapping) and node.keys() >= _RECORD:
            yield f"{name} looks like an optimizer{LOST}nothing reads it"
    if state.optimizer.schema != WEIGHTS:
        return
    for schedule in run.schedules:
        yield f"{schedule.place} is a schedule{LOST}the optimizer that it moves isn't there"
    for part in run.parts:
        if part.what == "scaler":
            yield f"{part.place} is a loss scaler{LOST}the optimizer beside it isn't there"
    if slots := [*_slots_among(state)]:
        yield f"{some(slots)} {_looks_like('optimizer', len(slots))}{LOST}{AS_SUCH}"


def _slots_among(state: TrainState) -> Iterator[str]:
    """Yields the names of weights, and of what lies beside them, that an optimizer's slots have."""
    segments = {path: tuple(_SEGMENTS.findall(path)) for path in state.params}
    all_names = {*segments.values()}
    for path, names in segments.items():
        first = path.partition("/")[0]
        if (
            half_of(first) == "optimizer"
            or first == "slots"
            or _SLOTS & {*names}
            or _has_twin(names, all_names)
        ):
            yield path
    for keys, leaf in walk(dict(state.extra)):
        places = [str(key) for key in keys]
        is_slot = _SLOTS & {*places} or any(half_of(name) == "optimizer" for name in places)
        if isinstance(leaf, Tensor) and is_slot and CARRIED not in places:
            yield "/".join(places)


def _has_twin(names: tuple[str, ...], there: Collection[tuple[str, ...]]) -> bool:
    """Tells whether a tensor is an average of a gradient: the other average stands where it stands."""
    twins = ((*names[:i], _TWINS[name], *names[i + 1 :]) for i, name in enumerate(names) if name in _TWINS)
    return any(twin in there for twin in twins)


def open_parts(findings: Iterable[Finding]) -> tuple[Fact, ...]:
    """Returns what a verdict on weights leaves open: whether some of them are an optimizer's."""
    return tuple(
        Fact(f"whether {_as_question(finding.what.partition(LOST)[0])}", because=AS_SUCH)
        for finding in findings
        if finding.kind == UNREAD and finding.what.endswith(AS_SUCH)
    )


def _as_question(looks: str) -> str:
    return looks.replace(" look like ", " are ").replace(" looks like ", " is ")


def _nodes(extra: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields what stands up to `_LEVELS` levels deep in a state's extra, by its name."""
    level: list[tuple[str, Any]] = [("extra", extra)]
    for _ in range(_LEVELS):
        level = [(f"{name}/{key}", child) for name, node in level for key, child in _children(node)]
        yield from level


def _children(node: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


_COUNTS = frozenset({"step", "count"})
"""Names of counts among tensors: PyTorch's of each parameter, Optax' and T5X' of a run."""
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
_NOT_BY_UPDATES = frozenset({"ReduceLROnPlateau"})
"""Schedules that make a step for each evaluation."""


def _steps_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns what says which step a checkpoint of this container is of: `converters/steps.json` explains each key."""
    return _containers().get(checkpoint.container, {})


@cache
def _containers() -> Mapping[str, Mapping[str, Any]]:
    return dict(shipped_json("statekit.converters", "steps.json")["containers"])


def _why(counting: str = "") -> str:
    """Returns what a disagreement may come from; `counting` may go by something else than updates, as epochs."""
    skipped, anew = "updates were skipped", "the optimizer was begun anew"
    unless = f"{skipped}, {anew}, or {counting} counts something else" if counting else f"{skipped} or {anew}"
    return f"files of another step may be among them, unless {unless}"


class Said(NamedTuple):
    """A step, and what says it."""

    step: int
    place: str


def disagreements(checkpoint: Checkpoint, state: TrainState) -> tuple[Finding, ...]:
    """Returns what speaks against a checkpoint's files being of one step.

    Args:
        checkpoint: The checkpoint.
        state: The state that it decodes to.
    """
    return tuple(
        Finding(sentence, f"{checkpoint.path}", kind="" if sentence.endswith(_BY_EPOCH) else "mixed")
        for sentence in (*_of_records(checkpoint), *_of_counts(checkpoint, state))
    )


def uncounted(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the files that nothing shows to be of a checkpoint's step: they don't count, and no manifest names them.

    Those of another step would go through: names below the checkpoint, sorted; none of one that is a single file.
    """
    patterns = _steps_of(checkpoint).get("silent", ())
    if not patterns or checkpoint.proof is not None:
        return ()
    top = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent

    def fits(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    places = {f"{file}": False for file in checkpoint.parts or listing(top) if fits(file.name)}
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, Stored):
            is_count = name.rpartition("/")[2].rpartition(".")[2] in _COUNTS
            places[tensor.place] = places.get(tensor.place, False) or is_count
    names = {_named_in(top, place): is_counted for place, is_counted in places.items()}
    silent = sorted(name for name, is_counted in names.items() if not is_counted and fits(name))
    return tuple(silent) if len(names) > 1 else ()


def _named_in(folder: Place, place: str) -> str:
    """Returns the name in a folder of a file, or of a folder, with a slash."""
    name = below(place, folder)
    return f"{name}/" if (folder / name).is_dir() else name


def on_trust(names: Sequence[str]) -> str:
    """Returns a note on files without a step of their own; "" if there are none."""
    files = [name for name in names if not name.endswith("/")]
    arrays = len(names) - len(files)  # whose names are long, and which are alike
    shown = ", ".join([*([plural(arrays, "array")] if arrays else []), *([some(files)] if files else [])])
    sealing = "`statekit seal` right after saving makes it so"
    return f"not provable to be of this step: {shown}; {sealing}" if names else ""


def said_steps(checkpoint: Checkpoint, state: TrainState) -> Iterator[Said]:
    """Yields every step that is said beside the optimizer's own count: by a name, a trainer's record, a schedule."""
    yield from (remark for remark in (_named(checkpoint), _recorded(checkpoint)) if remark is not None)
    for schedule in run_of(state.extra).schedules:
        if schedule.at is not None:
            yield Said(schedule.at, schedule.place)


def _of_records(checkpoint: Checkpoint) -> Iterator[str]:
    name, record = _named(checkpoint), _recorded(checkpoint)
    if name and record and name.step != record.step:
        yield f"{name.place} says step {name.step}, {record.place} says {record.step}: {_why()}"


def _count_at(checkpoint: Checkpoint, key: str) -> int:
    """Returns the count that stands where the container keeps one of this kind; 0 if none does."""
    path = _steps_of(checkpoint).get(key)
    count = at(checkpoint.tree, tuple(path)) if path else 0
    return count if type(count) is int else 0


def _of_ranks(checkpoint: Checkpoint, state: TrainState) -> Iterator[str]:
    """Yields that parameters have done unlike many updates, where each rank writes those of its own."""
    if _steps_of(checkpoint).get("by_rank") and state.counts.behind:
        counts = sorted({state.counts.updates, *state.counts.behind.values()})
        yield f"parameters have done {', '.join(map(str, counts))} updates: {_why()}"


def _made_by_all(state: TrainState, optimizers: Sequence[int]) -> int:
    """Returns the updates of all optimizers together, as Lightning counts the steps of several.

    Source: Lightning-AI/pytorch-lightning, src/lightning/pytorch/loops/training_epoch_loop.py, `global_step`.
    """
    left = iter(state.optimizer.groups)
    paths = [
        [path for group in itertools.islice(left, count) for path in group.paths] for count in optimizers
    ]
    behind, updates = state.counts.behind, state.counts.updates
    return sum(max((behind.get(path, updates) for path in of_one), default=0) for of_one in paths)


def _of_counts(checkpoint: Checkpoint, state: TrainState) -> Iterator[str]:
    if state.optimizer.schema == WEIGHTS or state.optimizer.several:
        return
    if not state.counts.says_updates:
        return
    updates, run = state.counts.updates, run_of(state.extra)
    name, record = _named(checkpoint), _recorded(checkpoint)
    may_skip = any(part.what in ("scaler", "accumulation") for part in run.parts)
    if record is not None:
        expected = record.step - _count_at(checkpoint, "skipped") + _count_at(checkpoint, "ahead")
        totals = {updates, _made_by_all(state, run.optimizers)}
        if expected not in totals and not (may_skip and updates < expected):
            yield f"{record.place} says step {expected}, the optimizer has done {updates} updates: {_why()}"
    elif name is not None and not may_skip and _is_of_another_step(name.step, state):
        yield f"{name.place} says step {name.step}, the optimizer has done {updates} updates: {_why('the name')}"
    around = _recorded_around(checkpoint)
    yield from _of_both(around, record)
    is_apart = _steps_of(checkpoint).get("apart", around is not None)
    steps = {updates, updates * _processes(checkpoint), state.counts.schedule}
    steps |= {record.step} if record and may_skip else set()
    says_steps = (record, around) != (None, None)  # a trainer that does makes its schedule's steps too
    yield from _of_schedules(run.schedules if is_apart else (), steps, state, says_steps)
    yield from _of_ranks(checkpoint, state)


def _recorded_around(checkpoint: Checkpoint) -> tuple[str, Any] | None:
    """Returns the place of a trainer's own step, and the step, where a trainer runs the engine; else None."""
    path = tuple(_steps_of(checkpoint).get("records_too", ()))
    step = at(checkpoint.tree, path) if path else None
    return None if step is None else ("/".join(path), step)


def _of_both(around: tuple[str, Any] | None, record: Said | None) -> Iterator[str]:
    """Yields that a trainer and the engine inside it are of different steps."""
    if around is not None and record is not None and around[1] != record.step:
        yield f"{around[0]} says step {around[1]!r:.40}, {record.place} {record.step}: {_why()}"


_BY_EPOCH = "its rates are the optimizer's, so it may be stepped once an epoch"
"""Why a schedule's step is odd, and may be right."""


def _gave_rates(schedule: Schedule, state: TrainState) -> bool:
    """Tells whether the rates that a schedule gave last are those of the optimizer's groups."""
    groups = enumerate(state.optimizer.groups)
    rates = [(schedule.last_of(number), stored_rate(group.hyperparameters)) for number, group in groups]
    return all(last is not None and last == rate for last, rate in rates)


def _of_schedules(
    schedules: Iterable[Schedule], steps: Container[int], state: TrainState, says_steps: bool
) -> Iterator[str]:
    """Yields each schedule that counts updates and stands at none of the steps where it may.

    Args:
        schedules: Those that lie in files of their own.
        steps: Where one of updates may stand.
        state: The state.
        says_steps: Whether a trainer says its steps, which are its schedule's too.
    """
    for schedule in schedules:
        if schedule.kind in _NOT_BY_UPDATES or schedule.at is None or schedule.at in steps:
            continue
        done = f"the optimizer has done {state.counts.updates} updates"
        is_paced = not says_steps and schedule.at < state.counts.updates and _gave_rates(schedule, state)
        why = _BY_EPOCH if is_paced else _why("the schedule")
        yield f"the schedule stands at step {schedule.at}, {done}: {why}"


def _is_of_another_step(step: int, state: TrainState) -> bool:
    """Tells whether a name is of another step than a state: a program may call it by the one before."""
    return abs(state.counts.updates - step) > 1 and step not in _skipping(state)


def _skipping(state: TrainState) -> Iterator[int]:
    """Yields the counts of wrappers that leave updates out, and count these too.

    Source: AI-Hypercomputer/maxtext optimizers.py, `skip_step_on_spikes`.
    """
    leaves = {path: leaf for path, leaf in walk(dict(state.extra)) if isinstance(leaf, Tensor)}
    for path, leaf in leaves.items():
        if path[-1] == "count" and (*path[:-1], "is_skipped") in leaves and leaf.shape == ():
            yield int(leaf.read())


def _named(checkpoint: Checkpoint) -> Said | None:
    """Returns the step in the name of a checkpoint's folder or file, if its library puts it there."""
    if any(
        at(checkpoint.tree, tuple(path)) is not None for path in _steps_of(checkpoint).get("by_epoch", ())
    ):
        return None
    pattern = _steps_of(checkpoint).get("name")
    name = checkpoint.path.name
    match = re.fullmatch(pattern, name, re.DOTALL) if pattern else None
    return Said(int(match[1]), name) if match and len(match[1]) < 20 else None


def _recorded(checkpoint: Checkpoint) -> Said | None:
    """Returns the step that a trainer's record says."""
    steps = _steps_of(checkpoint)
    path, neighbour = tuple(steps.get("record", ())), steps.get("record_beside")
    if not path or (neighbour is not None and neighbour not in checkpoint.tree):
        return None
    step = at(checkpoint.tree, path)
    return Said(step, "/".join(map(str, path))) if type(step) is int else None


def _processes(checkpoint: Checkpoint) -> int:
    """Returns how many processes wrote a folder of Accelerate, whose schedule makes a step for each.

    Source: huggingface/accelerate, scheduler.py, `AcceleratedScheduler.step`.
    """
    files = at(checkpoint.tree, ("files",))
    names = files if isinstance(files, Mapping) else ()
    return max(1, sum(bool(_RANDOM_STATES.fullmatch(str(name))) for name in names))
