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
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion import resume
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan

STEPS = ("loads", "goes_on", "saves", "loads_again")
RATE, DECAY = 0.01, 0.1
UPDATES = 3
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
TORCH = [
    "torch/torch-optim/module", "torch/torch-fqn/module", "torch/statekit-torch/module",
    "dcp/torch-fqn/module", "dcp/statekit-torch/module", "safetensors/statekit-torch/module",
]  # fmt: skip
JAX = ["orbax/optax/tree", "flax/optax/tree", "orbax/statekit-jax/tree", "flax/statekit-jax/tree"]
CELLS = [*KERAS, *TORCH, *JAX]
LIBRARIES = {
    "keras": ("keras", "tensorflow"), "keras-h5": ("keras", "tensorflow"), "tf-bundle": ("keras", "tensorflow"),
    "torch": ("torch",), "dcp": ("torch",), "safetensors": ("torch", "safetensors"),
    "orbax": ("orbax-checkpoint", "optax", "jax"), "flax": ("flax", "optax", "jax"),
}  # fmt: skip

Values = list[Any]


class Run:
    """A model with its optimizer in some library, and how that saves and loads them."""

    def __init__(self, container: str, layout: str, model: str) -> None:
        self.container, self.layout, self.kind = container, layout, model
        self.scope: dict[str, Any] = {}

    def gradients(self, number: int, shapes: list[tuple[int, ...]]) -> Values:
        """Returns what an update's gradients are, in every run."""
        random = np.random.default_rng(number)
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]


class KerasRun(Run):
    """Keras on TensorFlow: AdamW, dense layers and batch statistics, one layer inside another model."""

    def begin(self) -> None:
        import keras

        keras.utils.set_random_seed(1)
        layers = keras.layers
        body = [
            layers.Dense(4, name="fc1"),
            layers.BatchNormalization(name="norm"),
            layers.Dense(4, name="fc2"),
        ]
        if self.kind == "sequential":
            end = layers.Dense(2, use_bias=False, name="out")
            self.model = keras.Sequential([keras.Input((4,)), *body, end], name="net")
        else:
            inputs = keras.Input((4,), name="inputs")
            inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="inner")], name="enc")
            x = inner(inputs)
            for layer in body:
                x = layer(x)
            x = layers.Dropout(0.1, name="drop", seed=3)(x)
            self.model = keras.Model(inputs, layers.Dense(2, use_bias=False, name="out")(x), name="net")
        self.scope = {"model": self.model, "loss": "mse"}

    def fresh_optimizer(self, own: bool = False) -> Any:
        import keras

        import statekit.tensorflow

        if own:
            return statekit.tensorflow.AdamW(RATE, variant="keras", weight_decay_rate=DECAY)
        return keras.optimizers.AdamW(RATE, weight_decay=DECAY)

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        import tensorflow as tf

        self.begin()
        for variable in self.model.non_trainable_variables:
            if variable.dtype == "float32":
                variable.assign(variable + 0.25)
        self.scope["optimizer"] = self.fresh_optimizer()
        self.model.compile(self.scope["optimizer"], "mse")
        self.optimizer.build(self.model.trainable_variables)
        self.update(0)
        like: dict[str, Any] = {"hints": Hints({"weight_decay": DECAY})}  # these files don't say it
        if "by path" not in self.kind:
            other = KerasRun(self.container, self.layout, self.kind)
            other.begin()
            h5 = self.container == "keras-h5"
            like["like"] = folder / ("like.weights.h5" if h5 else "like.keras")
            (other.model.save_weights if h5 else other.model.save)(like["like"])
        if self.container == "tf-bundle":
            self.model.save_weights(folder / "source.weights.h5")
            return folder / "source.weights.h5", like
        tf.train.Checkpoint(model=self.model, optimizer=self.optimizer).save(str(folder / "source" / "ckpt"))
        return folder / "source", like

    @property
    def optimizer(self) -> Any:
        return self.scope.get("optimizer") or self.scope["model"].optimizer

    def update(self, done: int) -> None:
        import tensorflow as tf

        moved = self.scope["model"].trainable_variables
        for number in range(done, done + UPDATES):
            assert int(self.optimizer.iterations) == number
            grads = self.gradients(number, [tuple(v.shape) for v in moved])
            self.optimizer.apply([tf.constant(grad) for grad in grads], moved)

    def values(self) -> Values:
        return [v.numpy() for v in self.scope["model"].variables if v.dtype == "float32"]

    def save(self, folder: Path) -> None:
        import tensorflow as tf

        model = self.scope["model"]
        if self.container == "keras-h5":
            model.save_weights(folder / "again.weights.h5")
        elif self.container == "keras":
            model.save(folder / "again.keras")
        else:
            tf.train.Checkpoint(model=model, optimizer=self.optimizer).save(str(folder / "again" / "ckpt"))

    def load(self, folder: Path) -> None:
        import keras
        import tensorflow as tf

        if self.container == "keras":
            self.scope = {"model": keras.models.load_model(folder / "again.keras")}
            return
        self.begin()
        own = "statekit" in self.layout or "by path" in self.kind
        self.scope["optimizer"] = self.fresh_optimizer(own)
        self.model.compile(self.optimizer, "mse")
        self.optimizer.build(self.model.trainable_variables)
        if self.container == "keras-h5":
            self.model.load_weights(folder / "again.weights.h5")
        else:
            prefix = tf.train.latest_checkpoint(folder / "again")
            checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.optimizer)
            checkpoint.restore(prefix).assert_existing_objects_matched()


class TorchRun(Run):
    """PyTorch: AdamW on two linear layers."""

    def begin(self) -> None:
        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        self.scope = {"model": model}

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        import torch

        self.begin()
        model = self.scope["model"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.8, 0.9))
        self.scope["optimizer"] = optimizer
        self.update(0)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "source.pt")
        return folder / "source.pt", {
            "hints": Hints(param_names=tuple(n for n, _ in model.named_parameters()))
        }

    def update(self, done: int) -> None:
        import torch

        params = list(self.scope["model"].parameters())
        for number in range(done, done + UPDATES):
            for param, grad in zip(
                params, self.gradients(number, [tuple(p.shape) for p in params]), strict=True
            ):
                param.grad = torch.from_numpy(grad)
            self.scope["optimizer"].step()

    def values(self) -> Values:
        return [param.detach().numpy().copy() for param in self.scope["model"].parameters()]

    def save(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_model
        from torch.distributed.checkpoint import state_dict_saver
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = self.scope["model"], self.scope["optimizer"]
        if self.container == "dcp":
            weights, slots = get_state_dict(model, optimizer)
            parts: dict[str, Any] = {"model": weights, "optimizer": slots}
            state_dict_saver.save(parts, checkpoint_id=folder / "again", no_dist=True)
            return
        if self.container == "safetensors":
            save_model(model, str(folder / "again.safetensors"))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "again.pt")

    def load(self, folder: Path) -> None:
        import torch
        from safetensors.torch import load_model
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        import statekit.torch

        self.begin()
        model = self.scope["model"]
        if self.layout == "statekit-torch":
            optimizer: Any = statekit.torch.AdamW(model.named_parameters(), lr=0.5)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        self.scope["optimizer"] = optimizer
        if self.container == "dcp":
            weights, slots = get_state_dict(model, optimizer)
            parts: dict[str, Any] = {"model": weights, "optimizer": slots}
            state_dict_loader.load(parts, checkpoint_id=folder / "again", no_dist=True)
            set_state_dict(
                model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
            )
            return
        held = torch.load(folder / "again.pt", weights_only=True)
        if self.container == "safetensors":
            load_model(model, str(folder / "again.safetensors"))
        else:
            model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])


class JaxRun(Run):
    """Optax: AdamW on a tree of two layers."""

    def begin(self) -> None:
        import jax.numpy as jnp

        random = np.random.default_rng(99)
        shapes = {"kernel": (4, 3), "bias": (3,)}
        self.scope = {
            "params": {
                layer: {
                    name: jnp.asarray(random.normal(size=shape), jnp.float32)
                    for name, shape in shapes.items()
                }
                for layer in ("first", "second")
            }
        }

    def source(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        import optax
        import orbax.checkpoint as ocp

        self.begin()
        optimizer = optax.adamw(RATE, b1=0.8)
        params = self.scope["params"]
        self.scope |= {
            "optimizer": optimizer,
            "state": {"params": params, "opt_state": optimizer.init(params)},
        }
        self.update(0)
        with ocp.StandardCheckpointer() as saver:
            saver.save(folder.absolute() / "source" / "3" / "default", self.scope["state"])
        return folder / "source", {"hints": Hints({"learning_rate": RATE, "b1": 0.8, "weight_decay": 1e-4})}

    def update(self, done: int) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        optimizer, state = self.scope["optimizer"], self.scope["state"]
        params, slots = state["params"], state["opt_state"]
        leaves, tree = jax.tree.flatten(params)
        for number in range(done, done + UPDATES):
            grads = [jnp.asarray(grad) for grad in self.gradients(number, [leaf.shape for leaf in leaves])]
            updates, slots = optimizer.update(jax.tree.unflatten(tree, grads), slots, params)
            params = optax.apply_updates(params, updates)
        self.scope["state"] = {"params": params, "opt_state": slots}

    def values(self) -> Values:
        import jax

        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.scope["state"]["params"])]

    def save(self, folder: Path) -> None:
        import orbax.checkpoint as ocp
        from flax.training import checkpoints

        if self.container == "flax":
            checkpoints.save_checkpoint(folder.absolute() / "again", self.scope["state"], 6)
            return
        with ocp.StandardCheckpointer() as saver:
            saver.save(folder.absolute() / "again", self.scope["state"])

    def load(self, folder: Path) -> None:
        import orbax.checkpoint as ocp
        from flax.training import checkpoints

        optimizer = self.scope["optimizer"]
        self.begin()
        params = self.scope["params"]
        target = {"params": params, "opt_state": optimizer.init(params)}
        if self.container == "flax":
            state = checkpoints.restore_checkpoint(folder.absolute() / "again", target)
        else:
            state = ocp.StandardCheckpointer().restore(folder.absolute() / "again", target)
        self.scope |= {"optimizer": optimizer, "state": state}


NAMES = {"keras-h5": "out.weights.h5", "keras": "out.keras", "torch": "out.pt"}


def run_cell(cell: str, folder: Path) -> dict[str, Any]:
    """Runs a cell as far as it goes; returns what came of it."""
    folder.mkdir(parents=True)
    container, layout, model = cell.split("/")
    kind = KerasRun if cell in KERAS else TorchRun if cell in TORCH else JaxRun
    source, mine = kind(container, layout, model), kind(container, layout, model)
    found: dict[str, Any] = {
        "container": container, "layout": layout, "model": model, **dict.fromkeys(STEPS, False),
        "libraries": {name: _version(name) for name in LIBRARIES[container]},
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
        found["lines"] = [line.replace(str(target), "PATH") for line in lines]
        mine.begin()
        exec(compile("\n".join(lines), "to go on", "exec"), mine.scope)
        _check_started(source, mine)
        found["loads"] = True
        source.update(UPDATES)
        mine.update(UPDATES)
        found["difference_going_on"] = distance()
        found["goes_on"] = found["difference_going_on"] <= BOUND
        mine.save(folder)
        found["saves"] = True
        mine.load(folder)
        source.update(2 * UPDATES)
        mine.update(2 * UPDATES)
        found["difference_in_the_end"] = distance()
        found["loads_again"] = found["difference_in_the_end"] <= BOUND
    except Exception:
        found["error"] = _last_words(traceback.format_exc())
    return found


def _check_started(source: Run, mine: Run) -> None:
    """Checks that what was loaded is, bit for bit, what was saved."""
    if isinstance(mine, JaxRun) and "state" not in mine.scope:
        raise AssertionError("the lines give no state")
    for theirs, own in zip(source.values(), mine.values(), strict=True):  # type: ignore[attr-defined]
        np.testing.assert_array_equal(theirs, own)


def _last_words(text: str) -> str:
    """Returns what an error says, without where in files it arose."""
    lines = text.splitlines()
    said = next((i for i, line in enumerate(lines) if line and line[0] not in " T"), 0)
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
