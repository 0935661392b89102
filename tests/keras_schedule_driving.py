"""Goes on in Keras from a run of PyTorch with a schedule, by the printed lines, and through Keras' next save.

    python keras_schedule_driving.py FOLDER

Writes `FOLDER/results.json`: for each target and schedule "as it should", or what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.plan import Plan
from statekit.conversion.resume import of_plan, resume_lines

SHAPES = {"a.kernel": (4, 3), "a.bias": (3,), "b.kernel": (3, 2), "b.bias": (2,)}
DONE, MORE = 3, 6
WELL = "as it should"


class TorchRun:
    """torch's AdamW with a schedule of its own, saved after three updates."""

    def __init__(self, folder: Path, make: Callable[[Any], Any]) -> None:
        import torch

        random = np.random.default_rng(0)
        self.params = {
            name: torch.nn.Parameter(torch.from_numpy(random.normal(size=shape).astype(np.float32)))
            for name, shape in SHAPES.items()
        }
        # Keras puts epsilon elsewhere: one that vanishes beside the root makes the same updates there.
        self.optimizer = torch.optim.AdamW([*self.params.items()], lr=0.05, weight_decay=0.1, eps=1e-12)
        self.scheduler = make(self.optimizer)
        self.rates: list[float] = []
        for i in range(DONE):
            self.step(i)
        parts = {
            "model": {name: value.data for name, value in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        self.file = folder / "run.pt"
        torch.save(parts, self.file)

    def step(self, i: int) -> None:
        import torch

        for (name, value), grad in zip(self.params.items(), gradients(i), strict=True):
            assert value.shape == grad.shape, name
            value.grad = torch.from_numpy(grad)
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.scheduler.step()


def planned_for(run: TorchRun, target: Path, to: str, layout: str, like: Path | None) -> Plan:
    return plan(run.file, target, to=to, layout=layout, like=like, require=Exactness.STATISTICS)


def gradients(i: int) -> list[Any]:
    random = np.random.default_rng(i + 1)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES.values()]


def bound(rates: list[float], largest: float) -> float:
    """Returns how far two correct AdamWs are apart after updates at these rates, in float32.

    In each, Keras takes 1 - 0.999^n from a power that is rounded, whose error the difference makes larger; an update,
    which is 3 times the rate at most, and the weight are rounded a few times.
    """
    power = [2**-23 / (1 - 0.999 ** (DONE + i + 1)) for i in range(len(rates))]
    return sum(
        3 * rate * (one + 2**-20) + 4 * 2**-24 * largest for rate, one in zip(rates, power, strict=True)
    )


def model() -> Any:
    import keras

    inputs = keras.Input((4,), name="inputs")
    x = keras.layers.Dense(3, name="a")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="b")(x), name="net")


def cosine(optimizer: Any) -> Any:
    from torch.optim import lr_scheduler

    warm = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [4])


def steps(optimizer: Any) -> Any:
    from torch.optim import lr_scheduler

    return lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.3)


TARGETS = {
    "keras-h5": ("out.weights.h5", "keras"),
    "keras": ("out.keras", "keras"),
    "tf-bundle": ("out", "tf2-keras"),
    "statekit-keras": ("out.weights.h5", "statekit-keras"),
}


KINDS: dict[str, Callable[[Any], Any]] = {"a class of ours": cosine, "Keras' own": steps}


def go_on(run: TorchRun, optimizer: Any, net: Any, done: int) -> None:
    """Makes the same updates in both, and holds rates and weights to PyTorch's."""
    import tensorflow as tf

    for i in range(done, done + MORE):
        assert int(optimizer.iterations) == i, (int(optimizer.iterations), i)
        run.step(i)
        np.testing.assert_allclose(float(optimizer.learning_rate), run.rates[-1], rtol=2e-6)
        optimizer.apply([tf.constant(grad) for grad in gradients(i)], net.trainable_variables)
    for ours, theirs in zip(net.trainable_variables, run.params.values(), strict=True):
        due = theirs.detach().numpy()
        np.testing.assert_allclose(
            ours.numpy(), due, rtol=0, atol=bound(run.rates[DONE:], float(abs(due).max()))
        )


def driven(target: str, kind: str, folder: Path) -> None:
    """Goes on in one target."""
    import keras

    folder.mkdir()
    run = TorchRun(folder, KINDS[kind])
    like = folder / ("like.keras" if target == "keras" else "like.weights.h5")
    (model().save if target == "keras" else model().save_weights)(like)
    name, layout = TARGETS[target]
    to = "keras-h5" if target == "statekit-keras" else target
    planned = planned_for(run, folder / name, to, layout, None if target == "statekit-keras" else like)
    report = convert(planned)
    lines = resume_lines(of_plan(planned, report.files), planned.state)
    scope: dict[str, Any] = {"model": model(), "loss": "mse"}
    exec(compile("\n".join(lines), "to go on", "exec"), scope)
    net = scope["model"]
    go_on(run, scope.get("optimizer") or net.optimizer, net, DONE)
    if target == "keras":  # which has the optimizer with its schedule in it
        net.save(folder / "again.keras")
        net = keras.saving.load_model(folder / "again.keras")
        go_on(run, net.optimizer, net, DONE + MORE)


def main(folder: Path) -> None:
    """Goes on in every target, at every kind of schedule."""
    results = {}
    for target in TARGETS:
        for kind in KINDS:
            try:
                driven(target, kind, folder / f"{target} {kind}")
                results[f"{target}, {kind}"] = WELL
            except Exception:
                results[f"{target}, {kind}"] = traceback.format_exc()
    (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
