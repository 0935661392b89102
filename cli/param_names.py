"""Reads names of parameters in an optimizer's order, as people keep them: lines, JSON, or a model's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from statekit.budget import Account
from statekit.conversion.registry import container
from statekit.converters.formats.hparams import read_text
from statekit.converters.layouts.pytorch.parts import model_in
from statekit.errors import FormatError
from statekit.files.source import Files
from statekit.tensors.tensor import apart
from statekit.tensors.tree import strict_json, tensor_names


def read_param_names(path: Path, files: Files | None = None) -> tuple[str, ...]:
    """Returns the names that a file gives.

    Args:
        path: A name per line; or a JSON list, or list of lists, one for each group; or a torch file with a state_dict,
            bare or in a checkpoint, whose order counts; of tied tensors the first.
        files: Those that the user named for a job, whose budget it draws on; one of its own if None.

    Raises:
        NotFoundError: No such file.
        FormatError: It is none of these, or (BudgetError) more than may be held.
    """
    account = files.account if files else None
    if container("torch").detect(path) is not None:
        with container("torch").open(path, budget=account.budget if account else None) as opened:
            return tuple(apart(tensor_names(model_in(opened.tree))))
    if container("safetensors").detect(path) is not None:
        raise FormatError(
            "A safetensors file doesn't tell the order of parameters: it sorts their names.",
            place=path,
            expected="a name per line, JSON, or a state_dict in a torch file",
        )
    text = read_text(path, files)
    if path.suffix != ".json":
        return tuple(line.strip() for line in text.splitlines() if line.strip())
    return names_of(text, path, account)


def names_of(text: str, place: object = "--param-names", account: Account | None = None) -> tuple[str, ...]:
    """Returns the names of a JSON list, or of a list of lists, one for each group.

    Raises:
        FormatError: It is no such list.
    """
    listed = strict_json(text, place, account)
    nested = isinstance(listed, list) and all(isinstance(group, list) for group in listed)
    names: Any = [name for group in listed for name in group] if nested else listed
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError("A file of names isn't a list of them, or one for each group.", place=place)
    return tuple(names)
