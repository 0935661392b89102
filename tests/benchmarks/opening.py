"""`make bench`: how soon checkpoints of many tensors are opened and inspected, beside their own libraries.

    python tests/benchmarks/opening.py [--tensors 10000]

Tensors a second of processor time, each in a process that has imported what it needs; the best of some rounds.
`statekit.inspect` opens, decodes names to the canonical state and describes every tensor; the libraries open alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

OURS = "import statekit; from pathlib import Path", "statekit.inspect(Path({path!r}))"
OPENED = (
    "from pathlib import Path; from statekit.conversion.registry import container",
    "container({container!r}).open(Path({path!r})).close()",
)
TORCH = "import torch", "torch.load({path!r}, mmap=True, weights_only=True)"
SAFETENSORS = (
    "from safetensors import safe_open",
    "f = safe_open({path!r}, 'numpy'); [f.get_slice(name).get_shape() for name in f.keys()]",
)
DCP = (
    "from torch.distributed.checkpoint import FileSystemReader",
    "FileSystemReader({path!r}).read_metadata()",
)
KERAS = (
    "import h5py",
    "shapes = []; h5py.File({path!r}).visititems(lambda name, item: shapes.append(getattr(item, 'shape', ())))",
)
PEERS = {
    "torch": ("torch.load(mmap=True, weights_only=True)", TORCH),
    "safetensors": ("safe_open, every shape asked", SAFETENSORS),
    "dcp": ("its metadata alone, unpickled", DCP),
    "keras-h5": ("h5py, every item visited", KERAS),
}
TIMED = """
import time
{imports}
best = None
for _ in range(3):
    start = time.process_time()
    {work}
    taken = time.process_time() - start
    best = taken if best is None else min(best, taken)
print(best)
"""


def run(imports: str, work: str, **names: str) -> float:
    """Returns the processor time in seconds that some work takes in a process of its own, imports left out."""
    code = TIMED.format(imports=imports, work=work.format(**names))
    return float(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )


def made(folder: Path, tensors: int) -> Mapping[str, str]:
    """Writes runs of AdamW, and a model of as many tensors, each by its own library; path by container."""
    params = {
        f"layer{i // 10}.part{i % 10}": torch.nn.Parameter(torch.zeros(2, 2)) for i in range(tensors // 4)
    }
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    weights = {name: param.detach() for name, param in params.items()}
    state = optimizer.state_dict()
    torch.save({"model": weights, "optimizer": state}, folder / "run.pt")
    by_name = {
        "state": {name: state["state"][number] for number, name in enumerate(params)},
        "param_groups": [{**group, "params": [*params]} for group in state["param_groups"]],
    }
    save_dcp({"model": weights, "optimizer": by_name}, checkpoint_id=folder / "run", no_dist=True)
    many = {f"{name}.{i}": weight.clone() for i in range(4) for name, weight in weights.items()}
    save_file(many, folder / "model.safetensors")
    save_by_keras(folder / "run.weights.h5", tensors // 6)
    return {
        "torch": f"{folder / 'run.pt'}",
        "safetensors": f"{folder / 'model.safetensors'}",
        "dcp": f"{folder / 'run'}",
        "keras-h5": f"{folder / 'run.weights.h5'}",
    }


def save_by_keras(path: Path, layers: int) -> None:
    """Writes a run of AdamW over layers of a matrix and a vector, six arrays each."""
    os.environ["KERAS_BACKEND"] = "torch"  # the fastest to begin
    import keras

    class Layers(keras.Model):  # type: ignore[misc]  # Keras has no types
        def __init__(self) -> None:
            super().__init__()
            self.parts = [keras.layers.Dense(2, name=f"layer{i}") for i in range(layers)]
            for part in self.parts:
                part.build((None, 2))
            self.built = True

    model = Layers()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3))
    model.optimizer.build(model.trainable_variables)
    model.save_weights(path)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensors", type=int, default=10_000)
    tensors = parser.parse_args().tensors
    table = Table("file", "what", "seconds", "tensors a second", "of its own library's")
    with tempfile.TemporaryDirectory() as folder:
        for container, path in made(Path(folder), tensors).items():
            name, peer = PEERS[container]
            theirs = run(*peer, path=path)
            ours = {
                "opened by us": run(*OPENED, container=container, path=path),
                "inspected": run(*OURS, path=path),
            }
            for what, seconds in {name: theirs, **ours}.items():
                cells = (f"{seconds:.2f}", f"{tensors / seconds:.0f}", f"{theirs / seconds:.2f}")
                table.add_row(container, what, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
