"""Whether the files of a checkpoint are of one step: what its names, records, counts and schedules say of that.

A file of another step fits in shape, and nothing in the bytes of weights tells whose they are. But most files that
stand beside weights count: a trainer's record its steps, an optimizer its updates, a schedule where it stands, and a
step's folder is called by its number. Where these disagree, files may be mixed. A run may also have skipped updates or
begun its optimizer anew, so it is said and not refused. Files that don't count are named (`uncounted`): nothing in them
tells, unless a manifest does.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from statekit.errors import plural, some
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.source import listing
from statekit.files.tree import Place, below
from statekit.state.run import Schedule, run_of
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import Path, at, walk

NAMES = {
    "hf-trainer": r"checkpoint-(\d+)",
    "deepspeed": r"global_step(\d+)(?:_universal)?",
    "megatron": r"iter_(\d+)",
    "t5x": r"checkpoint_(\d+)",
    "orbax": r"(?:checkpoint_)?(\d+)",
    "flax": r"checkpoint_(\d+)",
    "torch": r".*step=(\d+)(?:-v\d+)?\.ckpt",
}
"""Container -> how its library names the folder or file of a step. TensorFlow 2 counts saves there.

Orbax and Flax take a prefix of the program's own too: a number after such a one may be a date, and says nothing.

Source: transformers trainer_utils.py, `PREFIX_CHECKPOINT_DIR`; deepspeed/runtime/engine.py, `save_checkpoint`;
megatron/training/checkpointing.py, `get_checkpoint_name`; t5x/checkpoints.py, `get_checkpoint_dir`; orbax
checkpoint/path/step.py; flax/training/checkpoints.py, `_checkpoint_path`; lightning
pytorch/callbacks/model_checkpoint.py, `format_checkpoint_name`.
"""
RECORDS: Mapping[str, Path] = {
    "hf-trainer": ("trainer_state", "global_step"),
    "deepspeed": ("deepspeed", "global_steps"),
    "megatron": ("common", "iteration"),
    "torch": ("global_step",),
}
"""Container -> where the record stands that says the step, beside the optimizer's own."""
_BY_EPOCH: Mapping[str, tuple[Path, ...]] = {
    "orbax": (("pytree", "optimizer_variables"), ("optimizer_variables",)),
}
"""Container -> what stands in trees whose names may count epochs, as Keras' OrbaxCheckpoint does."""
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
UNCOUNTED: Mapping[str, tuple[str, ...]] = {
    "hf-trainer": (*_WEIGHTS, "rng_state*.pth", "scaler.pt"),
    "accelerate": (*_WEIGHTS, "random_states_*.pkl", "custom_checkpoint_*.pkl", "scaler.pt"),
    "dcp": ("*.distcp",),
    "dcp-safetensors": ("*.safetensors",),
    "megatron": ("*.distcp",),
    "mxnet": ("*.params", "*.states", "*.npy"),
    "orbax": ("*/",),
    "t5x": ("*/",),
}
"""Container -> which files hold parts of a step and don't say which, unless a count is among their tensors.

Names below the checkpoint; a folder's, as that of an array of zarr, ends in `/`.
"""
_COUNTS = frozenset({"step", "count"})
"""Names of counts among tensors: PyTorch's of each parameter, Optax' and T5X' of a run."""
_SKIPPED = ("deepspeed", "skipped_steps")
FIRST_STEPS = ("deepspeed", "first_steps")
"""Where DeepSpeed's container says how many steps a wrapper has made before the run's first."""
_LIGHTNING = "pytorch-lightning_version"
_BY_RANK = frozenset({"dcp", "dcp-safetensors", "deepspeed", "megatron", "fsdp1-ranks"})
"""Containers of which each rank writes a file."""
_SEVERAL_FILES = frozenset({"hf-trainer", "accelerate"})
"""Containers in which optimizer and schedule lie in files of their own."""
_RANDOM_STATES = re.compile(r"random_states_\d+\.pkl")
_NOT_BY_UPDATES = frozenset({"ReduceLROnPlateau"})
"""Schedules that make a step for each evaluation."""


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
        Finding(what, f"{checkpoint.path}", kind="mixed")
        for what in (*_of_records(checkpoint), *_of_counts(checkpoint, state))
    )


def uncounted(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Returns the files that nothing shows to be of a checkpoint's step: they don't count, and no manifest names them.

    Those of another step would go through: names below the checkpoint, sorted; none of one that is a single file.
    """
    patterns = UNCOUNTED.get(checkpoint.container, ())
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
    """Says of files that don't count what that means; "" of none."""
    files = [name for name in names if not name.endswith("/")]
    arrays = len(names) - len(files)  # whose names are long, and which are alike
    shown = ", ".join([*([plural(arrays, "array")] if arrays else []), *([some(files)] if files else [])])
    sealing = "`statekit seal` right after saving makes it so"
    return f"not provable to be of this step: {shown}; {sealing}" if names else ""


def said_steps(checkpoint: Checkpoint, state: TrainState) -> Iterator[Said]:
    """Yields every step that is said beside the optimizer's own count: by a name, a trainer's record, a schedule."""
    yield from (said for said in (_named(checkpoint), _recorded(checkpoint)) if said is not None)
    for schedule in run_of(state.extra).schedules:
        if schedule.at is not None:
            yield Said(schedule.at, schedule.place)


def _of_records(checkpoint: Checkpoint) -> Iterator[str]:
    name, record = _named(checkpoint), _recorded(checkpoint)
    if name and record and name.step != record.step:
        yield f"{name.place} says step {name.step}, {record.place} says {record.step}: {_why()}"


def _count_at(checkpoint: Checkpoint, path: Path) -> int:
    """Returns the count that stands at a path; 0 if none does."""
    count = at(checkpoint.tree, path)
    return count if type(count) is int else 0


def _of_counts(checkpoint: Checkpoint, state: TrainState) -> Iterator[str]:
    if state.optimizer.schema == WEIGHTS or state.optimizer.several:
        return
    updates, run = state.counts.updates, run_of(state.extra)
    name, record = _named(checkpoint), _recorded(checkpoint)
    may_skip = any(part.what in ("scaler", "accumulation") for part in run.parts)
    if record is not None:
        expected = record.step - _count_at(checkpoint, _SKIPPED) + _count_at(checkpoint, FIRST_STEPS)
        if updates != expected and not (may_skip and updates < expected):
            yield f"{record.place} says step {expected}, the optimizer has done {updates} updates: {_why()}"
    elif name is not None and not may_skip and _is_of_another_step(name.step, state):
        yield f"{name.place} says step {name.step}, the optimizer has done {updates} updates: {_why('the name')}"
    if checkpoint.container in _SEVERAL_FILES:
        steps = {updates, updates * _processes(checkpoint), *([record.step] if record and may_skip else [])}
        yield from _of_schedules(run.schedules, steps, updates)
    if checkpoint.container in _BY_RANK and state.counts.behind:
        counts = sorted({updates, *state.counts.behind.values()})
        yield f"parameters have done {', '.join(map(str, counts))} updates: {_why()}"


def _of_schedules(schedules: Iterable[Schedule], steps: Container[int], updates: int) -> Iterator[str]:
    """Yields each schedule that counts updates and stands at none of the steps where it may."""
    for schedule in schedules:
        if schedule.kind in _NOT_BY_UPDATES or schedule.at is None or schedule.at in steps:
            continue
        done = f"the optimizer has done {updates} updates"
        yield f"the schedule stands at step {schedule.at}, {done}: {_why('the schedule')}"


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
    if any(at(checkpoint.tree, path) is not None for path in _BY_EPOCH.get(checkpoint.container, ())):
        return None
    pattern = NAMES.get(checkpoint.container)
    name = checkpoint.path.name
    match = re.fullmatch(pattern, name, re.DOTALL) if pattern else None
    return Said(int(match[1]), name) if match and len(match[1]) < 20 else None


def _recorded(checkpoint: Checkpoint) -> Said | None:
    """Returns the step that a trainer's record says."""
    path = RECORDS.get(checkpoint.container)
    if path is None or (checkpoint.container == "torch" and _LIGHTNING not in checkpoint.tree):
        return None
    step = at(checkpoint.tree, path)
    return Said(step, "/".join(map(str, path))) if type(step) is int else None


def _processes(checkpoint: Checkpoint) -> int:
    """Returns how many processes wrote a folder of Accelerate, whose schedule makes a step for each.

    Source: huggingface/accelerate, scheduler.py, `AcceleratedScheduler.step`.
    """
    files = checkpoint.tree.get("files") or {}
    return max(1, sum(bool(_RANDOM_STATES.fullmatch(str(name))) for name in files))
