"""Under tf.distribute every replica makes the update of the whole gradient, and slots stay equal on all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow
DRIVER = Path(__file__).with_name("replica_driving.py")
NAMES = ("AdamW", "Adafactor", "LAMB", "LANS", "ScaledAdam")
RATE, UPDATES = 0.01, 3
PART = 1e-3
"""How much of what the updates move two orders of a sum in float32 may make of them."""


def driven(folder: Path, replicas: int, *arguments: str) -> dict[str, dict[str, Any]]:
    """Runs the driver in a process of its own; returns what each run came to."""
    done = drivers.run(DRIVER, folder, replicas, *arguments, imports=["tensorflow"], CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    return read(folder)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


def off(run: Mapping[str, Any], single: Mapping[str, Any]) -> float:
    """Returns the largest difference from a run of one replica: weights by what they move, slots by their size."""
    assert run.keys() == single.keys()
    return max(
        float(np.abs(run[key] - value).max(initial=0))
        / (max(float(np.abs(value).max(initial=0)), 1e-12) if key.startswith("slot/") else RATE * UPDATES)
        for key, value in single.items()
        if key != "apart"
    )


def test_two_replicas_make_the_update_of_the_whole_gradient(tmp_path: Path) -> None:
    runs = driven(tmp_path, 2, "AdamW", "short")
    assert runs["AdamW_loop_2"]["apart"] == 0 and off(runs["AdamW_loop_2"], runs["AdamW_loop_1"]) < PART


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["unreduced", "averaged"])
def test_a_wrong_reduction_is_noticed(wrong: str, tmp_path: Path) -> None:
    runs = driven(tmp_path, 2, ",".join(NAMES), wrong)
    for name in NAMES:
        run = runs[f"{name}_loop_2"]
        shows = wrong == "unreduced" or name != "LANS"  # which divides each gradient by its norm
        assert (off(run, runs[f"{name}_loop_1"]) > 10 * PART) == shows, name
        assert (run["apart"] > 0) == (wrong == "unreduced"), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_moves_as_one_replica_and_is_saved_and_loaded_with_another_number(
    name: str, tmp_path: Path
) -> None:
    for replicas in (4, 2):
        runs = driven(tmp_path, replicas, name)
    due = {way: runs[f"{name}_{way}"] for way in ("fit_1", "loop_1", "again_1_2")}
    ways = {"fit_2", "fit_4", "loop_2", "loop_4", "again_1_4", "again_4_2"}
    assert {key.partition("_")[2] for key in runs} == {*due, *ways}
    for way in ways:
        single = due["again_1_2" if way.startswith("again") else f"{way[:-1]}1"]
        assert runs[f"{name}_{way}"]["apart"] == 0 and off(runs[f"{name}_{way}"], single) < PART, way
    assert due["again_1_2"]["apart"] == 0
