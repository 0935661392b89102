"""Draws the losses of README: T5X's recorded ones, and those of PyTorch from the converted checkpoint.

python tests/demo_plot.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import statekit
from goldens import COMPACT
from statekit.cli.demo.demo_command import t5_picture
from statekit.cli.demo.t5 import MAP, Run, go_on

TARGET = Path(__file__).parents[1] / "docs" / "t5_losses.svg"
BUNDLE = COMPACT / "t5x_train" / "t5_11_unscanned"


def main() -> None:
    """Converts the recording's checkpoint, goes on, and draws."""
    run = Run(BUNDLE)
    known = {"min_dim_size_to_factor": run.meta["hyperparameters"]["min_dim_size_to_factor"]}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "hf-t5"
        statekit.convert(run.checkpoint, target, to="hf-trainer", map=MAP, hparams=known)
        TARGET.write_text(t5_picture(run, dict(go_on(run, target))), encoding="utf-8")


if __name__ == "__main__":
    main()
