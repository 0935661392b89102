"""Recordings of the original systems, whose own `meta.json` is brought into the form of `recording.json`.

The recorders in shared/ wrote `meta.json` before there was a form of our own. One module for each system translates.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from descriptions import hf, keras, mesh_tf, muon, mxnet, optax, scaled_adam, t2t, t5x, torch_optim
from statekit.errors import NotFoundError
from statekit.files.safetensors import open_safetensors
from statekit.verify import recording
from statekit.verify.contract import DESCRIPTION, GRADS, TRAJECTORY
from statekit.verify.recording import Recording, from_json

FOREIGN = "meta.json"
"""The description that recorders of a system wrote."""
SYSTEMS: Mapping[str, Callable[[Path, Mapping[str, Any]], dict[str, Any]]] = {
    "hf_adafactor": hf.describe,
    "keras": keras.describe,
    "mesh_tf": mesh_tf.describe,
    "muon": muon.describe,
    "mxnet_lans": mxnet.describe,
    "optax_adafactor": optax.describe,
    "scaled_adam": scaled_adam.describe,
    "t2t": t2t.describe,
    "t5x": t5x.describe,
    "torch_adafactor": torch_optim.describe,
    "torch_formats": torch_optim.describe,
}


def open_recording(folder: Path) -> Recording:
    """Opens a recording, whoever described it.

    Raises:
        NotFoundError: No step can follow it, or it isn't one.
    """
    is_foreign = (folder / FOREIGN).is_file() and not (folder / DESCRIPTION).is_file()
    if not (is_foreign and (folder / GRADS).is_file() and (folder / TRAJECTORY).is_file()):
        return recording.open_recording(folder)
    return from_json(folder, description(folder))


def description(folder: Path) -> dict[str, Any]:
    """Returns the content of `recording.json` for a folder with a `meta.json`.

    Raises:
        NotFoundError: The states don't follow one another, or no step can follow the run.
    """
    with closing(open_safetensors(folder / TRAJECTORY)) as opened:
        steps = sorted({int(name.partition("/")[0]) for name in opened.tensors if name[0].isdigit()})
    if not steps or steps != list(range(steps[0], steps[-1] + 1)):
        raise NotFoundError("The states don't follow one another.", place=folder, found=steps)
    meta = json.loads((folder / FOREIGN).read_text(encoding="utf-8"))
    return SYSTEMS[meta["system"]](folder, meta)


@cache
def described(folder: Path) -> Path:
    """Returns a folder of the same name that shares the files of a recording and has a `recording.json`.

    A folder of which there can't be one comes back as it is.
    """
    try:
        content = recording.to_json(open_recording(folder))
    except NotFoundError:
        return folder
    shared = Path(tempfile.mkdtemp(dir=_folders().name), *folder.resolve().parts[-2:])
    shared.mkdir(parents=True)
    for entry in folder.iterdir():
        if entry.name != DESCRIPTION:
            (shared / entry.name).symlink_to(entry.resolve())
    (shared / DESCRIPTION).write_text(json.dumps(content))
    return shared


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="statekit-described-")
