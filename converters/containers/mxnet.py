"""The container `mxnet`: the `.params` and `.states` of MXNet 1 and 2, read and written without MXNet.

It joins the two files of one training run into one checkpoint. Input: either file or their folder; files of one name
belong together (`0100.params`, `0100.states`, or GluonNLP's `0100.states.00`), otherwise the only other one beside
does; of several, the parameters whose shapes are those of the states, under the names of Gluon, without a Module's
`arg:`, and the states that hold their optimizer. Parameters may be a folder of `.npy` files, one for each. Output:
the tree

    params      name -> array
    states      index -> (mean, var), or (weight32, (mean, var)); whatever the optimizer keeps
    optimizer   its Record, where the file of the states holds it
    files       how both are written: names, form, generation of the records, device

Source: apache/mxnet, python/mxnet/gluon/trainer.py, `Trainer.save_states`; python/mxnet/gluon/block.py,
`Block.save_parameters`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from statekit.budget import Budget
from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.step_folders import check_step
from statekit.converters.formats.mxnet.params import (
    FOLDER,
    LIST,
    NPZ,
    Params,
    form_of,
    npy_files,
    read_npy_folder,
    read_params,
    write_list,
    write_npy_folder,
    write_npz,
)
from statekit.converters.formats.mxnet.records import CPU
from statekit.converters.formats.mxnet.states import read_states, write_states
from statekit.converters.formats.npy import SUFFIX
from statekit.errors import Faults, FormatError, NotFoundError, StatekitError
from statekit.files.checkpoint import STEPS, Checkpoint, Finding
from statekit.files.source import Files, first_bytes, last_bytes, listing, opening
from statekit.files.stage import Stage
from statekit.files.tree import Place
from statekit.tensors.tensor import Shape, Tensor

PARAMS, STATES = ".params", ".states"
MODULE_PREFIXES = ("arg:", "aux:")
"""What a Module's files put before names. Source: apache/mxnet, python/mxnet/model.py, `save_checkpoint`."""
HEAD = 2**12
"""Bytes that a file is judged by, from either end."""
_NUMBER = re.compile(r"(\d{1,18})$")
_RANK = re.compile(r"\.\d{1,4}")


@dataclass(frozen=True)
class Pair:
    """The files of one checkpoint.

    Attributes:
        states: The updater's states, if there are any.
        params: The parameters, if there are any: a file, or a folder of `.npy` files.
        because: How they were found.
        step: The number at the end of their common name.
        steps: Those of all checkpoints in the folder.
    """

    states: Place | None
    params: Place | None
    because: str
    step: int | None = None
    steps: tuple[int, ...] = ()

    @property
    def files(self) -> tuple[Place, ...]:
        """Those that there are."""
        params = npy_files(self.params) if self.params and self.params.is_dir() else [self.params]
        return tuple(file for file in (self.states, *params) if file is not None)


def find_pair(path: Place, step: int | None = None) -> Pair:
    """Finds the files that a path means: one of them, or their folder.

    Args:
        path: A `.states`, a `.params`, a folder of `.npy` files beside a `.states`, or the folder of both.
        step: The number at the end of their name, where a folder has several.

    Raises:
        NotFoundError: There are none, or several and no telling which.
    """
    if path.is_dir() and not (is_params_folder(path) and _found(path.parent, STATES, is_states_file)):
        return _in_folder(path, step)
    number = step_of(_without_rank(path))
    check_step(step, number, path)
    if not path.is_file() and not path.is_dir():
        raise NotFoundError("There is no such file.", place=path, expected=f"a {STATES} or {PARAMS}")
    is_states = path.is_file() and path.suffix != PARAMS and is_states_file(path)
    partner, how = _partner(path, PARAMS if is_states else STATES)
    states, params = (path, partner) if is_states else (partner, path)
    return Pair(states, params, how, number)


def is_states_file(path: Place) -> bool:
    """Tells whether a file is a pickle that names MXNet."""
    head = first_bytes(path, HEAD)
    return head[:1] in (b"\x80", b"(", b"}", b"c") and (
        b"mxnet" in head or b"mxnet" in last_bytes(path, HEAD)
    )


def is_params_file(path: Place) -> bool:
    """Tells whether a file is a list of NDArrays, or an npz named `.params`."""
    form = form_of(first_bytes(path, HEAD))
    return form is not None and (form != NPZ or path.suffix == PARAMS)


def is_params_folder(folder: Place) -> bool:
    """Tells whether a folder holds `.npy` files."""
    return bool(listing(folder, SUFFIX))


def step_of(path: Place) -> int | None:
    """Returns the number at the end of a file's name, before the suffix."""
    match = _NUMBER.search(path.stem)
    return int(match[1]) if match else None


def _is_there(path: Place) -> bool:
    return path.exists()


def _of_step(numbered: Mapping[int, Place], step: int, folder: Place) -> Pair:
    """Returns the files of one step."""
    if step not in numbered:
        raise NotFoundError(
            "There is no such step in the folder.",
            place=folder,
            expected=f"<name>{step}{STATES} beside {PARAMS}",
            found=", ".join(map(str, sorted(numbered))) or "none",
        )
    states = numbered[step]
    params = _without_rank(states).with_suffix(PARAMS)
    return Pair(states, params, _same_name(states), step, tuple(sorted(numbered)))


def _in_folder(folder: Place, step: int | None) -> Pair:
    states, params = _found(folder, STATES, is_states_file), _found(folder, PARAMS, is_params_file)
    if params and not states:  # one that is damaged is an error, not absent
        states = _found(folder, STATES, _is_there)
    states = [*states, *_of_first_ranks(folder)]
    stems = {p.stem for p in params}
    pairs = [state for state in states if _without_rank(state).stem in stems]
    numbered = {number: pair for pair in pairs if (number := step_of(_without_rank(pair))) is not None}
    if step is not None or (numbered and len(numbered) == len(pairs)):
        return _of_step(numbered, max(numbered) if step is None else step, folder)
    return _without_numbers(folder, states, params, pairs)


def _without_numbers(
    folder: Place, states: Sequence[Place], params: Sequence[Place], pairs: Sequence[Place]
) -> Pair:
    """Returns the pair of a folder whose names don't tell steps."""
    if not states and not params:
        raise NotFoundError("The folder has no files of MXNet.", place=folder, expected=f"*{STATES}")
    if not states:
        return Pair(None, _only(params, folder, PARAMS, _is_gluon), f"{PARAMS} in the folder")
    chosen = pairs[0] if len(pairs) == 1 else _only(states, folder, STATES, _holds_optimizer)
    partner, how = _partner(chosen, PARAMS)
    return Pair(chosen, partner, f"{chosen.name} in the folder, {how}")


def _partner(path: Place, suffix: str) -> tuple[Place | None, str]:
    """Returns the file that belongs to another one, and how it was found."""
    twin = _without_rank(path).with_suffix(suffix)
    if twin.is_file():
        return twin, _same_name(path)
    first = next((file for file in _of_first_ranks(path.parent) if _without_rank(file) == twin), None)
    if first is not None:
        return first, _same_name(first)
    if suffix == PARAMS:
        return _params_beside(path)
    candidates = [
        p for p in _found(path.parent, STATES, is_states_file) if not p.with_suffix(PARAMS).is_file()
    ]
    if not candidates:
        return None, f"no {STATES} beside it"
    chosen = _only(candidates, path.parent, STATES, _holds_optimizer)
    return chosen, _beside(chosen, candidates, "with its optimizer")


def _params_beside(states: Place) -> tuple[Place | None, str]:
    """Returns the parameters that belong to a file of states of another name, and how they were found."""
    folder = states.parent
    every = [p for p in _found(folder, PARAMS, _is_there) if not p.with_suffix(STATES).is_file()]
    folders = [
        candidate
        for candidate in (folder, *listing(folder))
        if candidate.is_dir() and is_params_folder(candidate)
    ]
    # One that is damaged is an error, not absent.
    candidates = [*(p for p in every if is_params_file(p)), *folders] or every
    if not candidates:
        return None, f"no {PARAMS} beside it"
    if len(candidates) == 1:
        return candidates[0], _beside(candidates[0], [*every, *folders], "")
    fitting = _fitting(states, candidates)
    if (latest := _latest(fitting)) is not None:
        return latest, _beside(latest, [*every, *folders], LATEST)
    chosen = _only(fitting, folder, PARAMS, _is_gluon, states)
    return chosen, _beside(chosen, [*every, *folders], "of Gluon" if chosen.is_file() else "by its shapes")


LATEST = "which has the greatest number"
"""Why one of several files of parameters is taken: states without a number are those of the last that was saved."""


def _latest(candidates: Sequence[Place]) -> Place | None:
    """Returns the file with the greatest number, where several have one name and a number; None otherwise."""
    numbers = {step_of(path): path for path in candidates if path.is_file()}
    names = {_NUMBER.sub("", path.stem) for path in candidates}
    if len(candidates) < 2 or len(numbers) != len(candidates) or len(names) != 1 or None in numbers:
        return None
    return numbers[max(number for number in numbers if number is not None)]


def _beside(chosen: Place, every: Iterable[Place], why: str) -> str:
    """Says how one of several files was found."""
    passed = ", ".join(p.name for p in every if p != chosen)
    if not passed:
        return f"{chosen.name}, the only {chosen.suffix or 'parameters'} beside it"
    return f"{', '.join(filter(None, (chosen.name, why)))}, beside it; not {passed}"


def _fitting(states: Place, candidates: Iterable[Place]) -> list[Place]:
    """Returns the parameters that have just the shapes of the states, or, if none has, those that have more."""
    with Files() as files:
        moved = Counter(map(_shape, read_states(files.source(states)).states.values()))
    del moved[None]
    kept: dict[Place, Counter[Shape | None]] = {}
    faults = Faults()
    for path in candidates:
        try:
            with Files() as files:
                kept[path] = Counter(array.shape for array in _params(path, files).arrays.values())
        except StatekitError as error:
            faults.add(error.subject, path.name)
            continue
        if not moved <= kept[path]:
            faults.add(f"lacks {', '.join(map(str, moved - kept[path]))}", path.name)
    fitting = [path for path, shapes in kept.items() if moved <= shapes]
    if not fitting:
        faults.check(
            NotFoundError,
            f"None of the parameters beside {states} has the shapes of its states",
            remedy="name the file of the parameters, or move the others away",
        )
    return [path for path in fitting if kept[path] == moved] or fitting


def _shape(entry: Any) -> Shape | None:
    """Returns the shape of the first array of an index' state; None if there is none."""
    if isinstance(entry, (list, tuple)):
        return next((shape for shape in map(_shape, entry) if shape is not None), None)
    return entry.shape if isinstance(entry, Tensor) else None


def _params(path: Place, files: Files) -> Params:
    return read_npy_folder(path, files) if path.is_dir() else read_params(files.source(path))


def _same_name(path: Place) -> str:
    whole = _without_rank(path)
    states = path.name if path != whole else f"{path.stem}{STATES}"
    return f"{whole.stem}{PARAMS} and {states} have one name"


def _without_rank(path: Place) -> Place:
    """Returns the name of a file of states without the local rank that GluonNLP puts behind it.

    Source: dmlc/gluon-nlp, scripts/pretraining/bert/run_pretraining.py, which saves `0002999.states.00`.
    """
    is_rank = _RANK.fullmatch(path.suffix) and path.with_suffix("").suffix == STATES
    return path.with_suffix("") if is_rank else path


def _of_first_ranks(folder: Place) -> list[Place]:
    """Returns the first local rank's states of each checkpoint of GluonNLP in a folder: all ranks have the same."""
    first: dict[Place, Place] = {}
    for file in listing(folder):
        if _without_rank(file) != file and file.is_file():
            first.setdefault(_without_rank(file), file)
    return [file for file in first.values() if is_states_file(file)]


def _files_in(folder: Place) -> bool:
    """Tells whether a folder holds files of MXNet, or is one of arrays beside its states."""
    if _found(folder, STATES, is_states_file) or _found(folder, PARAMS, is_params_file):
        return True
    if _of_first_ranks(folder):
        return True
    return is_params_folder(folder) and bool(_found(folder.parent, STATES, is_states_file))


def _are_many(folder: Place) -> bool:
    """Tells whether a folder holds parameters of several checkpoints, without states: none is meant before others."""
    params = _found(folder, PARAMS, is_params_file)
    if _found(folder, STATES, _is_there) or _of_first_ranks(folder):
        return False
    return len(params) > 1 and sum(map(_is_gluon, params)) != 1


def _found(folder: Place, suffix: str, fits: Callable[[Place], bool]) -> list[Place]:
    return [p for p in listing(folder, suffix) if p.is_file() and fits(p)]


def _only(
    candidates: Iterable[Place],
    folder: Place,
    suffix: str,
    better: Callable[[Place], bool],
    partner: Place | None = None,
) -> Place:
    """Returns the only file, or the only one of those that are better than the others."""
    every = list(candidates)
    best = every if len(every) == 1 else [p for p in every if better(p)]
    if len(best) != 1:
        raise NotFoundError(
            f"Several {suffix} files lie in the folder, and nothing tells which is meant.",
            place=folder,
            found=", ".join(p.name for p in every),
            remedy=f"name the one that is meant, as {every[0]}"
            f"{f', which is then read with {partner.name}' if partner else ''}",
        )
    return best[0]


def _is_gluon(path: Place) -> bool:
    """Tells whether parameters have no names of a Module: these stand at the end of a list, and never in an npz."""
    if path.is_dir():
        return True
    tail = last_bytes(path, HEAD)
    return not any(prefix.encode() in tail for prefix in MODULE_PREFIXES)


def _holds_optimizer(path: Place) -> bool:
    return b"mxnet.optimizer" in last_bytes(path, HEAD)


NUMPY_MODE: Mapping[str, Any] = {
    "params": {"name": f"net{PARAMS}", "form": NPZ, "generation": 3, "device": list(CPU)},
    "states": {"name": f"trainer{STATES}", "generation": 3, "device": list(CPU)},
}
"""How files are written unless the tree says otherwise: as MXNet 2 reads them in numpy mode."""


@dataclass(frozen=True)
class MXNet:
    """The container of `.params` and `.states`."""

    name: str = "mxnet"
    title: str = "MXNet (.params and .states of a Trainer or an Updater)"
    suffixes: tuple[str, ...] = ()
    target_kind: Literal["file", "folder"] | None = "folder"

    def detect(self, path: Place) -> Evidence | None:
        """Looks at names, and at the first and last bytes."""
        try:
            if path.is_dir() and _are_many(path):
                return None
            is_ours = _files_in(path) if path.is_dir() else is_states_file(path) or is_params_file(path)
            return Evidence(20, find_pair(path).because) if is_ours else None
        except NotFoundError as error:  # opening says the rest
            return Evidence(20, error.subject) if path.is_file() or path.is_dir() else None
        except (OSError, StatekitError):
            return None

    def open(self, path: Place, step: int | None = None, budget: Budget | None = None) -> Checkpoint:
        """Reads the pickle and the headers; values are read when asked for."""
        pair = find_pair(path, step)
        with opening(path, budget) as files:
            tree, notes = _tree(pair, files)
        notes += (f"its parameters are taken from {pair.because}",) if LATEST in pair.because else ()
        findings = tuple(Finding(note, f"{pair.states}") for note in notes)
        meta = {STEPS: list(pair.steps)} if pair.steps else {}
        return Checkpoint(
            self.name,
            path,
            tree,
            meta,
            pair.step,
            findings,
            files.close,
            pair.files,
            is_numbered=False,  # it is an epoch as often as a step
        )

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes both files, the states as MXNet does under Python 3.8 and newer."""
        tree = encoded.tree
        forms = {part: {**usual, **tree.get("files", {}).get(part, {})} for part, usual in NUMPY_MODE.items()}
        arrays, form = tree.get("params", {}), forms["params"]
        if arrays and form["form"] == FOLDER:
            write_npy_folder(arrays, form["name"], "params", stage)
        elif arrays:
            with stage.file(form["name"]) as file:
                if form["form"] == LIST:
                    write_list(arrays, form["generation"], tuple(form["device"]), "params", file, stage)
                else:
                    write_npz(arrays, "params", file, stage)
        if "states" in tree:
            form, optimizer = forms["states"], tree.get("optimizer")
            with stage.file(form["name"]) as file:
                write_states(
                    tree["states"], optimizer, form["generation"], tuple(form["device"]), file, stage
                )


def _written_as(pair: Pair) -> str:
    """Returns the name of the parameters; "" where they lie in the folder of the states."""
    assert pair.params is not None
    return "" if pair.states and pair.states.parent == pair.params else pair.params.name


def _tree(pair: Pair, files: Files) -> tuple[dict[str, Any], tuple[str, ...]]:
    tree: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if pair.params is not None:
        params = _params(pair.params, files)
        tree["params"] = {n: replace(array, name=f"params/{n}") for n, array in params.arrays.items()}
        form = {"form": params.form, "generation": params.generation, "device": list(params.device)}
        forms["params"] = {"name": _written_as(pair), **form}
    if pair.states is not None:
        states = read_states(files.source(pair.states))
        tree["states"] = dict(states.states)
        if states.optimizer is not None:
            tree["optimizer"] = states.optimizer
        form = {"generation": states.generation, "device": list(states.device)}
        forms["states"] = {"name": pair.states.name, **form}
        notes = states.notes
    if not tree:
        raise FormatError("There is neither a file of states nor one of parameters.", place=pair.because)
    return {**tree, "files": forms}, notes


CONTAINER = MXNet()
