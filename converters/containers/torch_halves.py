"""A model's torch file and its optimizer's that lie in one folder: the halves of one checkpoint.

    model.pt, optim.pt, train.pt, config.yaml      OLMo's unsharded folder
    model.ckpt, optimizer.ckpt                     SpeechBrain's
    model000500.pt, opt000500.pt                   guided-diffusion's, a pair for each step, and ema_0.9999_000500.pt

Source: allenai/OLMo, olmo/checkpoint.py, `FullCheckpointer.save_checkpoint`; speechbrain/speechbrain,
utils/checkpoints.py, `Checkpointer.save_checkpoint`; openai/guided-diffusion, train_util.py, `TrainLoop.save`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from statekit.errors import NotFoundError
from statekit.files.source import listing
from statekit.files.tree import Place

_HALF = re.compile(r"(model|net|optim(?:izer)?|opt)[-_.]?(\d{1,18})?\.(?:pt|pth|ckpt|th)")
_AVERAGE = re.compile(r"(ema(?:_[0-9.]+)?)_(\d{1,18})\.(?:pt|pth|ckpt|th)")
_MODELS = ("model", "net")
BESIDE = (
    "train.pt",
    "scheduler.pt",
    "scaler.pt",
    "scheduler.pth",
    "scaler.pth",
    "scheduler.ckpt",
    "scaler.ckpt",
)
"""Files that may stand beside the halves; the part of the tree is called by the name before the suffix."""


@dataclass(frozen=True)
class Halves:
    """The files of one step.

    Attributes:
        parts: Name of the file of `model`, of `optimizer`, and of averages.
        step: The number in their names; None where they have none.
        steps: All steps that lie in the folder.
    """

    parts: Mapping[str, str]
    step: int | None = None
    steps: tuple[int, ...] = ()


def find_halves(folder: Place, step: int | None = None) -> Halves | None:
    """Returns the halves of a folder's newest step, or of the given one; None where a half is missing or not alone.

    Raises:
        NotFoundError: The folder has other steps.
    """
    whole = _whole(folder)
    steps = tuple(sorted(number for number in whole if number is not None))
    if step is None and None not in whole:
        step = max(steps, default=None)
    elif step is not None and step not in whole:
        raise NotFoundError(
            "There is no such step.", place=folder, expected=step, found=", ".join(map(str, steps)) or "none"
        )
    return Halves({**whole[step], **_averages(folder, step)}, step, steps) if step in whole else None


def _whole(folder: Place) -> dict[int | None, dict[str, str]]:
    """Returns the two files of each step that has both."""
    files: dict[int | None, list[re.Match[str]]] = {}
    for entry in listing(folder):
        if (match := _HALF.fullmatch(entry.name)) and entry.is_file():
            files.setdefault(int(match[2]) if match[2] else None, []).append(match)
    pairs = {
        step: {"model" if match[1] in _MODELS else "optimizer": match[0] for match in matches}
        for step, matches in files.items()
        if len(matches) == 2
    }
    return {step: parts for step, parts in pairs.items() if len(parts) == 2}


def _averages(folder: Place, step: int | None) -> dict[str, str]:
    """Returns the files of a step's averages by their names without the step."""
    matches = [match for entry in listing(folder) if (match := _AVERAGE.fullmatch(entry.name))]
    return {match[1]: match[0] for match in matches if int(match[2]) == step}
