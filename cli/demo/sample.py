"""Small checkpoints to try the verbs on: a T5 in T5X's own files, and the same run as a Trainer's folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from statekit.cli.demo.t5 import MAP, Run
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.errors import NotFoundError, TargetExistsError
from statekit.maps.model_map import maps_of

T5X, TRAINER = "t5x-ckpt", "trainer-run"
_HEADS = 4


def write_sample(recording: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Writes both checkpoints into a folder.

    Args:
        recording: The recording whose checkpoint is copied.
        folder: Where they shall be.

    Yields:
        Each of them, with what it is.

    Raises:
        NotFoundError: The folder isn't there.
        TargetExistsError: Something of the name of one is there.
    """
    if not folder.is_dir():
        raise NotFoundError("The folder isn't there.", place=folder, remedy=f"mkdir -p {folder}")
    for path in (folder / T5X, folder / TRAINER):
        if os.path.lexists(path):
            raise TargetExistsError("The target exists.", place=path, remedy="choose another folder")
    run = Run(recording)
    shutil.copytree(run.checkpoint, folder / T5X / run.checkpoint.name)
    yield folder / T5X, "a T5 that T5X trained for 8 updates with Adafactor"
    rate = float(run.losses["learning_rate"][run.meta["checkpoint_step"]])
    hparams = {"min_dim_size_to_factor": run.meta["hyperparameters"]["min_dim_size_to_factor"]}
    converted = plan(
        CheckpointRef(folder / T5X, hparams={**hparams, "learning_rate": rate}),
        folder / TRAINER,
        to="hf-trainer",
        maps=maps_of(MAP, {"num_heads": _HEADS}, {}),
    )
    convert(converted)
    yield folder / TRAINER, "the same run as a folder of Transformers' Trainer"
