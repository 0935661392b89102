"""Goes on in each target's own system by the lines that a conversion prints, and through its next save.

    python resuming.py FOLDER CELL ...

A cell is `<container>/<layout>/<model>`, one of `CELLS`. For each: a run of three updates is saved by its own library
and converted; a fresh model goes on by the very lines for three updates; its own library saves it, loads that
into another fresh one, and takes three more. What came of it goes to `FOLDER/results.json`: which of the four steps
worked, and how far it was in the end from the source that went on without a break.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
from resuming_run import UPDATES, Run

from statekit.conversion import resume
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan

STEPS = ("loads", "goes_on", "saves", "loads_again")
BOUND = 1e-5
"""The largest difference, over how far a tensor has moved at most, at which a run counts as the same."""
KERAS = [
    f"{container}/{layout}/{model}"
    for container, layout in (
        ("keras-h5", "keras"), ("keras", "keras"), ("tf-bundle", "tf2-keras"),
        ("keras-h5", "statekit-keras"), ("keras", "statekit-keras"), ("tf-bundle", "tf2-statekit"),
    )
    for model in ("functional", "sequential")
] + ["keras-h5/keras/functional by path"]  # fmt: skip
KERAS += [
    f"{target}/functional, {schedule}"
    for target in ("keras-h5/keras", "tf-bundle/tf2-keras", "keras-h5/statekit-keras")
    for schedule in ("PolynomialDecay", "its own schedule")
]
_TORCH_TARGETS = [
    *(f"torch/{layout}" for layout in ("torch-optim", "torch-fqn", "torch-fqn-flat", "statekit-torch")),
    *(f"dcp/{layout}" for layout in ("torch-optim", "torch-fqn", "torch-fqn-flat", "statekit-torch")),
    "dcp-safetensors/torch-fqn-flat", "safetensors/torch-optim", "safetensors/statekit-torch",
    "accelerate/torch-optim", "accelerate/statekit-torch", "hf-trainer/torch-optim", "hf-trainer/statekit-torch",
]  # fmt: skip
_TORCH_MODELS = (
    "module", "groups, LinearLR", "groups, LambdaLR", "tied and frozen", "adafactor", "hf adafactor",
    "hf adafactor, momentum, LinearLR", "hf adafactor, its own rate",
)  # fmt: skip
TORCH = [f"{target}/{model}" for target in _TORCH_TARGETS for model in _TORCH_MODELS]
TORCH += [f"torch/torch-optim/lightning: {model}" for model in _TORCH_MODELS]
_PAIRS = (
    "two optimizers", "two optimizers, two schedules", "two optimizers, one schedule",
    "two of AdamW, two schedules",
)  # fmt: skip
TORCH += [
    f"{target}/{model}"
    for target in ("torch/torch-optim", *(one for one in _TORCH_TARGETS if one.endswith("/statekit-torch")))
    for model in _PAIRS
]
TORCH += [f"torch/torch-optim/lightning: {model}" for model in _PAIRS]
_JAX_TARGETS = ("orbax/optax", "flax/optax", "orbax/statekit-jax", "flax/statekit-jax")
JAX = [
    f"{target}/{model}" for model in ("tree", "adafactor", "adafactor, momentum") for target in _JAX_TARGETS
]
CELLS = [*KERAS, *TORCH, *JAX]
LIBRARIES = {
    "keras": ("keras", "tensorflow"), "keras-h5": ("keras", "tensorflow"), "tf-bundle": ("keras", "tensorflow"),
    "torch": ("torch",), "dcp": ("torch",), "dcp-safetensors": ("torch", "safetensors"),
    "safetensors": ("torch", "safetensors"), "accelerate": ("accelerate", "torch"),
    "hf-trainer": ("transformers", "accelerate", "torch"),
    "orbax": ("orbax-checkpoint", "optax", "jax"), "flax": ("flax", "optax", "jax"),
}  # fmt: skip

NAMES = {"keras-h5": "out.weights.h5", "keras": "out.keras", "torch": "out.pt"}


def run_of(cell: str) -> Callable[[], Run]:
    """Returns what makes a run of a cell."""
    container, layout, model = cell.split("/")
    kind: type[Run]
    if cell in KERAS:
        from resuming_keras import KerasRun as kind
    elif cell in JAX:
        from resuming_jax import JaxRun as kind
    elif "lightning" in model:
        from resuming_trainers import LightningRun as kind
    elif container == "hf-trainer":
        from resuming_trainers import TrainerRun as kind
    elif container == "accelerate":
        from resuming_trainers import AccelerateRun as kind
    elif (container, layout) == ("safetensors", "torch-optim"):
        from resuming_trainers import PretrainedRun as kind
    else:
        from resuming_torch import TorchRun as kind
    return lambda: kind(container, layout, model)


def libraries_of(cell: str) -> tuple[str, ...]:
    """Returns the libraries that a cell runs."""
    container, _, model = cell.split("/")
    usual = ("lightning", "torch") if "lightning" in model else LIBRARIES[container]
    return (*usual, "transformers") if "hf" in model and "transformers" not in usual else usual


def run_cell(cell: str, folder: Path) -> dict[str, Any]:
    """Runs a cell as far as it goes; returns what came of it."""
    folder.mkdir(parents=True)
    container, layout, model = cell.split("/")
    made = run_of(cell)
    source, mine = made(), made()
    result: dict[str, Any] = {
        "container": container, "layout": layout, "model": model, **dict.fromkeys(STEPS, False),
        "libraries": {name: _version(name) for name in libraries_of(cell)}, "attested": {},
    }  # fmt: skip
    path, options = source.source(folder)
    target = folder / NAMES.get(container, "out")
    before = [np.array(value) for value in source.values()]

    def distance() -> float:
        """Returns the largest difference, relative to how far a tensor has moved at most."""
        rows = list(zip(source.values(), mine.values(), before, strict=True))
        return max(float(np.abs(s - m).max() / (np.abs(s - b).max() or 1.0)) for s, m, b in rows)

    try:
        planned = plan(path, target, to=container, layout=layout, **options)
        report = convert(planned)
        lines = resume.resume_lines(resume.of_plan(planned, report.files), planned.state)
        result["lines"] = [line.replace(str(target), "PATH") for line in lines]
        mine.prepare(target, folder)
        exec(compile("\n".join(lines), "to go on", "exec"), mine.scope)
        for theirs, ours in zip(source.values(), mine.loaded(), strict=True):
            np.testing.assert_array_equal(theirs, ours)
        result["loads"] = True
        result["attested"] |= {
            "source": findings(mine, path, options.get("hints")),
            "target": findings(mine, target),
        }
        source.update(UPDATES)
        mine.update(UPDATES)
        result["difference_going_on"] = distance()
        result["goes_on"] = result["difference_going_on"] <= BOUND
        mine.save(folder)
        result["saves"] = True
        if (saved := mine.saved(folder)) is not None:
            result["attested"]["next"] = findings(mine, saved)
        mine.load(folder)
        source.update(2 * UPDATES)
        mine.update(2 * UPDATES)
        result["difference_in_the_end"] = distance()
        result["loads_again"] = result["difference_in_the_end"] <= BOUND
    except KeyboardInterrupt:
        raise
    except BaseException:  # as torch.distributed's own CheckpointException is
        result["error"] = _last_words(traceback.format_exc())
    return result


def findings(run: Run, path: Path, hints: CheckpointRef | None = None) -> list[str]:
    """Returns what `attest` finds in a run that has been loaded rightly, by name: an alarm is false."""
    result = run.attested(path, hints or Hints())
    return [] if result is None else [str(one) for one in result.findings]


def _last_words(text: str) -> str:
    """Returns what an error says, without where in files it arose."""
    lines = text.splitlines()
    said = next((i for i, line in enumerate(lines) if line and not line.startswith((" ", "Traceback"))), 0)
    return " ".join(" ".join(lines[said:]).split())


def _version(library: str) -> str:
    """Returns the version of a library, whose package may be called otherwise (`tensorflow-cpu`)."""
    return version(packages_distributions().get(library, [library])[0])


def main(folder: Path, cells: list[str]) -> None:
    """Runs cells and writes what came of them."""
    results = [run_cell(cell, folder / cell.replace("/", " ")) for cell in cells]
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or CELLS)
