"""The classes that go on with a checkpoint in its own framework, where they are installed.

A state, or the part of it that is stepped, is written in the checkpoint's own layout, and the real class loads that
file by its own means and makes the updates: torch.optim's, Transformers', Optax', Keras', or statekit's drop-ins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from statekit.conversion import registry
from statekit.errors import UsageError
from statekit.files.stage import staged, unknown_fields
from statekit.state.constants import execution, of_xla
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.tensors.tree import to_json

Rates: TypeAlias = tuple[float | None, ...]
Updates: TypeAlias = Sequence[Mapping[str, Array]]


class Native(Protocol):
    """A class that makes updates."""

    def __call__(self, state: TrainState, updates: Updates, rates: Rates) -> TrainState:
        """Returns the live state after updates, one for each gradients by path; the next call may change it.

        Args:
            state: The state before, in memory.
            updates: Gradients by path, of each update.
            rates: Learning rate of each group; None where the rule has its own.

        Raises:
            StatekitError: The class doesn't take the state.
        """


@dataclass(frozen=True)
class Class:
    """Where a class is, and what runs it.

    Attributes:
        name: The class, as it is imported.
        packages: What it needs.
        module: The module of ours that runs it.
        sqrt_units: How far its square roots may be from the exact ones, in units of 2^-24.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    sqrt_units: float = 2.0

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that aren't installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    @property
    def title(self) -> str:
        """Its name with the versions of its packages, and its execution if it runs on another device than a CPU."""
        packages = ", ".join(f"{name} {installed(name)}" for name in self.packages)
        where = f", as {self.execution}: {execution(self.execution).title}" if self.execution else ""
        return f"{self.name} ({packages}{where})"

    @property
    def execution(self) -> str | None:
        """The execution that it runs as, if that isn't its rule's usual one: JAX takes a GPU that it finds."""
        if self.module != "jax_classes":
            return None
        platform: str = import_module("jax").default_backend()
        return None if platform == "cpu" else of_xla(platform)

    def runner(self, schema: str, variant: str) -> Native:
        """Returns what runs it on states of a variant."""
        make: Callable[[str, str], Any] = import_module(f"statekit.verify.natives.{self.module}").runner
        runs: Native = make(self.name, variant)
        return runs


_TORCH = (
    "torch-optim", "torch-fqn", "torch-fqn-flat", "deepspeed", "megatron", "megatron-float16",
    "megatron-distributed",
)  # fmt: skip
_KERAS = ("keras", "tf2-keras")
_OF_KERAS = ("keras", "tensorflow", "h5py")
_OF_OPTAX = ("optax", "jax", "flax")
CLASSES: Mapping[tuple[str, str, str], Class] = {
    **{
        (layout, "adamw", "torch"): Class("torch.optim.AdamW", ("torch",), "torch_classes")
        for layout in _TORCH
    },
    **{
        (layout, "adafactor", "torch"): Class("torch.optim.Adafactor", ("torch",), "torch_classes")
        for layout in _TORCH
    },
    **{
        (layout, "adafactor", "hf"): Class(
            "transformers.optimization.Adafactor", ("transformers", "torch"), "torch_classes"
        )
        for layout in _TORCH
    },
    **{
        ("optax", name, "optax"): Class(f"optax.{name}", _OF_OPTAX, "jax_classes")
        for name in ("adamw", "adafactor", "lamb")
    },
    **{
        (layout, name, "keras"): Class(f"keras.optimizers.{kind}", _OF_KERAS, "keras_classes", 8.0)
        for layout in _KERAS
        for name, kind in (("adamw", "AdamW"), ("adafactor", "Adafactor"), ("lamb", "Lamb"))
    },
}
"""By layout, schema and variant, the class that goes on with such a file."""
DROP_INS: Mapping[str, Class] = {
    "statekit-torch": Class("statekit.torch", ("torch",), "torch_classes"),
    "statekit-jax": Class("statekit.jax", _OF_OPTAX, "jax_classes"),
    "statekit-keras": Class("statekit.tensorflow", _OF_KERAS, "keras_classes", 8.0),
    "tf2-statekit": Class("statekit.tensorflow", _OF_KERAS, "keras_classes", 8.0),
}
"""By layout, statekit's own classes, which follow any variant that is stepped."""


def class_of(layout: str, schema: str, variant: str) -> Class | None:
    """Returns the class that goes on with files of a layout; None if there is none that statekit runs."""
    return CLASSES.get((layout, schema, variant)) or DROP_INS.get(layout)


def installed(package: str) -> str:
    """Returns the version of a package; tensorflow-cpu counts as TensorFlow."""
    for name in (package, f"{package}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


NAMES = {"keras-h5": "part.weights.h5", "torch": "part.pt"}


def written(state: TrainState, container: str, layout: str, folder: Path) -> Path:
    """Writes a state into a folder, and returns where."""
    path, home = folder / NAMES.get(container, "part"), registry.container(container)
    assert home.target_kind is not None  # those that classes load are written
    record = to_json(state.to_json())
    with staged(
        path, home.target_kind, fields=lambda there: {**unknown_fields(there), "state": record}
    ) as stage:
        home.write(registry.layout(layout).encode(state), stage)
        stage.commit(home.open)
    return path


def one_rate(name: str, rates: Rates) -> float:
    """Returns the learning rate of a class that has one.

    Raises:
        UsageError: There are several, or none.
    """
    rate = rates[0] if rates else None
    if len({*rates}) != 1 or rate is None:
        raise UsageError(f"{name} is run with one learning rate.", found=rates)
    return rate
