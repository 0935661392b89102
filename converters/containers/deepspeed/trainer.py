"""What Transformers' Trainer writes beside a checkpoint of DeepSpeed: its schedule, and where the run stands.

Source: huggingface/transformers, trainer.py, `_save_optimizer_and_scheduler`, `_save_checkpoint`.
"""

from __future__ import annotations

from statekit.converters.containers.deepspeed.files import open_file
from statekit.errors import FormatError
from statekit.files.source import Files, read_small
from statekit.files.tree import Place
from statekit.tensors.tree import Tree, holds_records, loose_json

_SCHEDULER, _STATE = "scheduler.pt", "trainer_state.json"


def beside_tag(folder: Place, files: Files) -> dict[str, Tree]:
    """Returns the parts by key, as a folder of Trainer has them; none where Trainer wrote nothing.

    Args:
        folder: The folder around the tag's.
        files: The checkpoint's open files.

    Raises:
        FormatError: A part can't be trusted.
    """
    if not (folder / _STATE).is_file():
        return {}
    state = loose_json(read_small(folder / _STATE, files), folder / _STATE, files.account)
    if not isinstance(state, dict):
        raise FormatError("A state isn't a JSON object.", place=folder / _STATE, found=type(state).__name__)
    parts: dict[str, Tree] = {"trainer_state": state}
    if (folder / _SCHEDULER).is_file():
        scheduler = open_file(folder / _SCHEDULER, files, [])
        parts |= {} if holds_records(scheduler) else {"scheduler": scheduler}
    return parts
