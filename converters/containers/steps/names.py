"""Where a step is written below a target, and under which array names."""

from __future__ import annotations

from statekit.errors import FormatError, UsageError, fault_list
from statekit.files.stage import Stage
from statekit.tensors.tensor import Stored, Tensor
from statekit.tensors.tree import Tree, walk

_MAX_FILE_NAME = 255


FOLDER = "checkpoint_{step}"
"""The name of a step's folder as T5X has it."""


def step_prefix(stage: Stage, step: int, folder: str) -> str:
    """Returns the folder of a step below the target, with its `/`; empty if the target is itself named for a step.

    Args:
        stage: Where is written.
        step: The state's.
        folder: The name of a step's folder, with `{step}` for the number.

    Raises:
        UsageError: The target is named for another step.
    """
    name, start = stage.target.name, folder.partition("{step}")[0]
    if not (name.startswith(start) and name[len(start) :].isdecimal()):
        return f"{folder.format(step=step)}/"
    if int(name[len(start) :]) != step:
        expected = folder.format(step=step)
        raise UsageError(
            "The target is named for another step than the state has.",
            place=stage.target,
            expected=expected,
            remedy=f"name it {expected}, or name the folder that shall hold it",
        )
    return ""


def array_names(tree: Tree) -> dict[str, str]:
    """Returns for each tensor the name of its array in the store: its path joined with `.`, as T5X and Orbax do.

    Raises:
        FormatError: Names coincide, or can't be those of folders; lists every one.
    """
    arrays: dict[str, str] = {}
    owners: dict[str, str] = {}
    faults = []
    for path in (path for path, leaf in walk(tree) if isinstance(leaf, (Stored, Tensor))):
        name, array = "/".join(map(str, path)), ".".join(map(str, path))
        if array in owners:
            faults.append((f"would lie in the same folder as {owners[array]}", name))
        if not array.strip(".") or any(c in array for c in "/\\\0") or len(array.encode()) > _MAX_FILE_NAME:
            faults.append(("has a name that no folder can have", name))
        arrays[name] = array
        owners[array] = name
    if faults:
        raise FormatError(
            f"{len(faults)} tensors can't be written under their names.",
            found=fault_list(faults),
            remedy="rename the parameters; T5X and Orbax join a path with '.', and nothing tells a.b from a/b then",
        )
    return arrays
