"""`make bench`: time and memory of `statekit verify` and `attest` for a run of many parameters, each in its process.

    python tests/benchmarks/verify.py [--layers 21]

A T5 of 1024 dimensions with AdamW's moments is written as a PyTorch file and converted to Orbax of Optax; 21 layers are
300 million parameters, 3.6 GB on each side. Memory is the resident set of the whole process at its highest (VmHWM), of
attest the live run's 3.6 GB among it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from convert import GB, measured, statekit
from synthetic import Noise

from statekit.conversion.registry import container, layout
from statekit.files.stage import staged
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import Array, Index, Shape, Tensor

VOCABULARY, WIDTH, HIDDEN = 32128, 1024, 2816


ATTEST = """
import time, torch, statekit.torch
path, out = arguments
stored = torch.load(path, weights_only=True)
pairs = [(name, torch.nn.Parameter(tensor)) for name, tensor in stored["model"].items()]
optimizer = torch.optim.AdamW(pairs, lr=1e-3)
optimizer.load_state_dict(stored["optimizer"])
del stored
began = time.perf_counter()
result = statekit.torch.attest(optimizer, pairs, path, strict=True)
pathlib.Path(out).write_text(f"{time.perf_counter() - began} {result.bytes_read}")
"""


@dataclass(frozen=True)
class Squares(Noise):
    """What a second moment may hold: squares of noise."""

    def read(self, index: Index | None = None) -> Array:
        return np.square(super().read(index) * np.float32(1e-2))


@dataclass(frozen=True)
class Small(Noise):
    """What a first moment may hold."""

    def read(self, index: Index | None = None) -> Array:
        return super().read(index) * np.float32(1e-3)


def shapes(layers: int) -> dict[str, Shape]:
    """Returns the parameters of the model."""
    each: dict[str, Shape] = {
        **{f"attention.{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "o")},
        "mlp.wi_0.weight": (HIDDEN, WIDTH), "mlp.wi_1.weight": (HIDDEN, WIDTH), "mlp.wo.weight": (WIDTH, HIDDEN),
        "norm.weight": (WIDTH,),
    }  # fmt: skip
    made: dict[str, Shape] = {"embedding.weight": (VOCABULARY, WIDTH)}
    return made | {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in each.items()}


def state(layers: int) -> TrainState:
    """Returns a run in the middle of its training."""
    params: dict[str, Tensor] = {}
    slots: dict[str, dict[str, Tensor]] = {}
    for i, (name, shape) in enumerate(shapes(layers).items()):
        path = name.replace(".", "/")
        params[path] = Noise(shape, 3 * i)
        slots[path] = {"m": Small(shape, 3 * i + 1), "v": Squares(shape, 3 * i + 2)}
    values = {**load_schema("adamw").variant("torch")["defaults"], "learning_rate": 1e-3}
    group = Group(tuple(params), values, dict.fromkeys(values, "given"))
    return TrainState(params, slots, Optimizer("adamw", "torch", (group,)), Counts(1000, 1000))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--attest", action="store_true", help="this alone")
    asked = parser.parse_args()
    made = state(asked.layers)
    count = sum(math.prod(tensor.shape) for tensor in made.params.values())
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        source, target = Path(folder) / "run.pt", Path(folder) / "optax-ckpt"
        home = container("torch")
        with staged(source, "file") as stage:
            home.write(layout("torch-optim").encode(made), stage)
            stage.commit(home.open)
        report = Path(folder) / "attest.txt"
        _, peak = measured(ATTEST, str(source), str(report))
        seconds, read = map(float, report.read_text().split())
        print(f"{count / 1e6:.0f} M parameters")
        size = read / GB
        print(
            f"attest: {seconds:.0f} s, {seconds / size:.2f} s/GB of the {size:.1f} that it reads, {peak:.0f} MiB"
        )
        if asked.attest:
            return
        began = time.perf_counter()
        statekit("convert", str(source), str(target), "--to", "orbax", "--layout", "optax")
        converted = time.perf_counter() - began
        seconds, peak = statekit("verify", str(source), str(target))
        gigabytes = 2 * 12 * count / GB
        print(f"{gigabytes:.1f} GB on both sides")
        print(f"convert: {converted:.0f} s")
        print(
            f"verify: {seconds:.0f} s, {seconds / gigabytes:.2f} s/GB, {peak:.0f} MiB resident at its highest"
        )


if __name__ == "__main__":
    main()
