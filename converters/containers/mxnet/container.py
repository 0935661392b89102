"""The container `mxnet`: `.params` and `.states` of MXNet 1 and 2, read and written without MXNet, as one checkpoint.

The tree:

    params      name -> array
    states      index -> (mean, var), or (weight32, (mean, var)); whatever the optimizer keeps
    optimizer   its Record, where the file of the states holds it
    files       how both are written: names, form, generation of the records, device

Source: apache/mxnet, python/mxnet/gluon/trainer.py, `Trainer.save_states`; python/mxnet/gluon/block.py,
`Block.save_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from statekit.conversion.contracts import Encoded, Evidence
from statekit.converters.containers.mxnet.files import (
    PARAMS,
    STATES,
    Files,
    find_files,
    is_params_file,
    is_states_file,
)
from statekit.converters.containers.steps.beside import trusted_manifest
from statekit.converters.formats.mxnet.params import LIST, NPZ, read_params, write_list, write_npz
from statekit.converters.formats.mxnet.records import CPU
from statekit.converters.formats.mxnet.states import read_states, write_states
from statekit.converters.formats.pytorch.storage import SourceFile
from statekit.errors import FormatError, StatekitError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.files.stage import Stage

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

    def detect(self, path: Path) -> Evidence | None:
        """Looks at names, and at the first and last bytes."""
        try:
            if path.is_file() and not is_states_file(path) and not is_params_file(path):
                return None
            found = find_files(path)
        except (OSError, StatekitError):
            return None
        return Evidence(20, found.because)

    def open(self, path: Path, step: int | None = None) -> Checkpoint:
        """Reads the pickle and the headers; values are read when asked for.

        Raises:
            NotFoundError: No such files, or several and no telling which; no such step.
            RefusedError: A pickle calls for code, or asks for absurd memory; an array is sparse.
            CorruptError: Sizes or checksums disagree with the data.
            FormatError: The files break their formats.
        """
        files = find_files(path, step)
        with ExitStack() as opened:
            tree, notes = _tree(files, opened)
            close = opened.pop_all().close
        beside = [Finding(note, f"{files.states}") for note in notes]
        place = path if path.is_dir() else path.parent
        manifest, findings = trusted_manifest(place, files.step, tree)
        meta = {"steps": list(files.steps)} if files.steps else {}
        return Checkpoint(self.name, path, tree, meta, files.step, manifest, (*findings, *beside), close)

    def write(self, encoded: Encoded, stage: Stage) -> None:
        """Writes both files, the states as MXNet does under Python 3.8 and newer.

        Raises:
            FormatError: A name or array that the files can't hold.
            UsageError: The tree holds something that isn't plain data.
        """
        tree = encoded.tree
        forms = {part: {**usual, **tree.get("files", {}).get(part, {})} for part, usual in NUMPY_MODE.items()}
        arrays, form = tree.get("params", {}), forms["params"]
        if arrays:
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


def _tree(files: Files, opened: ExitStack) -> tuple[dict[str, Any], tuple[str, ...]]:
    tree: dict[str, Any] = {}
    forms: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    if files.params is not None:
        params = read_params(_opened(files.params, opened))
        tree["params"] = {n: replace(array, name=f"params/{n}") for n, array in params.arrays.items()}
        form = {"form": params.form, "generation": params.generation, "device": list(params.device)}
        forms["params"] = {"name": files.params.name, **form}
    if files.states is not None:
        states = read_states(_opened(files.states, opened))
        tree["states"] = dict(states.states)
        if states.optimizer is not None:
            tree["optimizer"] = states.optimizer
        form = {"generation": states.generation, "device": list(states.device)}
        forms["states"] = {"name": files.states.name, **form}
        notes = states.notes
    if not tree:
        raise FormatError("There is neither a file of states nor one of parameters.", place=files.because)
    return {**tree, "files": forms}, notes


def _opened(path: Path, opened: ExitStack) -> SourceFile:
    source = SourceFile(path)
    opened.callback(source.close)
    return source


CONTAINER = MXNet()
