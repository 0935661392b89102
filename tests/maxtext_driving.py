"""Goes on with a checkpoint in MaxText itself, on recorded batches: run by a Python that has maxtext, on a CPU.

    python maxtext_driving.py RUN_FOLDER BATCHES OVERRIDES.json

RUN_FOLDER is `<base>/<run>`, with `checkpoints/<K - 1>` in it, or nothing: a run begins then. It prints
{"<update>": loss} as JSON, last.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def main(run: Path, batches: Path, overrides: Path) -> None:
    """Trains to the end of the recorded batches and prints the losses."""
    import jax
    from safetensors.numpy import load_file

    loader, logger, train = map(
        import_module,
        ("maxtext.common.data_loader", "maxtext.common.metric_logger", "maxtext.trainers.pre_train.train"),
    )

    recorded, losses = load_file(batches), dict[str, float]()
    saved = [int(folder.name) for folder in (run / "checkpoints").glob("[0-9]*")]
    begins = 1 + max(saved, default=-1)
    steps = iter(range(begins + 1, 1 + max(int(name.partition("/")[0]) for name in recorded)))

    def next_batch(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        step = next(steps)
        batch = {name.partition("/")[2]: one for name, one in recorded.items() if name.startswith(f"{step}/")}
        return dict(jax.device_put(batch, self.input_data_shardings))

    def write(self: Any, metrics: Any, step: int, *args: Any, **kwargs: Any) -> None:
        losses[str(step + 1)] = float(metrics["scalar"]["learning/loss"])

    updated = jax.config.update

    def update(name: str, value: Any) -> None:
        if name != "jax_default_prng_impl":  # the recorded runs have the keys of JAX's own default
            updated(name, value)

    jax.config.update = update
    loader.DataLoader.load_next_batch = next_batch
    logger.MetricLogger.buffer_and_write_metrics = write
    options = json.loads(overrides.read_text(encoding="utf-8"))
    options |= {"base_output_directory": str(run.parent), "run_name": run.name}
    train.main(["train.py", *(f"{name}={value}" for name, value in options.items())])
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
