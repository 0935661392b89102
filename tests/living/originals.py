"""The originals that install beside us, each as a run that is moved on one update at a time.

A run is made from a `Case` and gives, before and after each update, the canonical state that the original holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from statekit.optim.run import initial
from statekit.optim.steps import Execution
from statekit.state.constants import variant_constants
from statekit.state.factoring import by_shape
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Array, Shape, Tensor, in_memory
from statekit.verify.systems.native_slots import canonical_slots

Arrays = Mapping[str, Array]
Sparse = Mapping[str, tuple[Array, Array]]
"""Values of rows and which they are, by path."""


@dataclass(frozen=True)
class Case:
    """A run of an original.

    Attributes:
        library: `torch`, `transformers`, `optax` or `keras`.
        family: Name of the schema.
        groups: Arguments of the original's constructor and the group's paths, for each parameter group.
        params: Shape by path.
        dtype: Of parameters and gradients.
        grads: For each update, kind of gradient by path; a path that isn't there has none.
        mode: How the original runs: `eager`, `foreach`, `fused` or `compiled`.
        seed: Of all values.
        backend: Where our step runs.
        drop_in: Whether our optimizer class in the original's framework takes each update too.
        back: Whether the original's own save goes into a statekit folder and back, and another goes on from it.
    """

    library: str
    family: str
    groups: tuple[tuple[Mapping[str, Any], tuple[str, ...]], ...]
    params: Mapping[str, Shape]
    dtype: str
    grads: tuple[Mapping[str, str], ...]
    mode: str = "eager"
    seed: int = 0
    backend: str = "numpy"
    drop_in: bool = False
    back: bool = False

    @property
    def execution(self) -> Execution:
        """How the original ran, as recordings say it."""
        if (self.library, self.family) == ("torch", "adafactor"):
            return "op_by_op"  # PyTorch keeps it from being compiled: _disable_dynamo_if_unsupported
        if self.library in ("torch", "optax"):
            return "op_by_op" if self.mode in ("eager", "foreach") else "compiled"
        return "compiled" if self.mode == "compiled" or self.library == "transformers" else "op_by_op"

    @property
    def variant(self) -> str:
        """The variant of the schema."""
        return {"transformers": "hf"}.get(self.library, self.library)

    def start(self) -> dict[str, Array]:
        """Returns the parameters before the first update."""
        return {
            path: self._drawn(
                f"param/{path}", shape, 10.0 ** np.random.default_rng([self.seed, i]).uniform(-2, 1)
            )
            for i, (path, shape) in enumerate(self.params.items())
        }

    def gradients(self, update: int) -> dict[str, Array]:
        """Returns the gradients of an update, counted from 0."""
        return {path: self._gradient(path, kind, update) for path, kind in self.grads[update].items()}

    def rows(self, update: int) -> dict[str, tuple[Array, Array]]:
        """Returns the gradients that are rows for an original that takes them so: their values, and which they are."""
        if self.library != "keras":
            return {}
        return {p: self._rows(p, update) for p, kind in self.grads[update].items() if kind == "rows"}

    def _drawn(self, what: str, shape: Shape, size: float) -> Array:
        rng = np.random.default_rng([self.seed, *what.encode()])
        return np.asarray(size * rng.standard_normal(shape)).astype(DTYPES[self.dtype])

    def _gradient(self, path: str, kind: str, update: int) -> Array:
        shape = self.params[path]
        usual = self._drawn(f"grad/{path}/{update}", shape, SIZES.get(kind, 1.0))
        if kind == "zeros":
            return np.zeros_like(usual)
        if kind == "rows":
            whole = np.zeros(shape, usual.dtype)
            values, rows = self._rows(path, update)
            np.add.at(whole, rows, values)
            return whole
        if kind in ("one_hot", "nan") and usual.size:
            place = np.random.default_rng([self.seed, update]).integers(usual.size)
            flat = np.zeros_like(usual).reshape(-1) if kind == "one_hot" else usual.reshape(-1).copy()
            flat[place] = usual.reshape(-1)[place] if kind == "one_hot" else np.nan
            return flat.reshape(shape)
        return usual

    def _rows(self, path: str, update: int) -> tuple[Array, Array]:
        shape = self.params[path]
        rng = np.random.default_rng([self.seed, update, *path.encode()])
        rows = rng.integers(shape[0], size=5).astype(np.int32)
        return rng.standard_normal((5, *shape[1:])).astype(DTYPES[self.dtype]), rows


SIZES = {"usual": 1.0, "small": 1e-3, "tiny": 1e-9, "large": 30.0, "huge": 1e4}
"""Sizes of gradients by their kind."""


class Run(Protocol):
    """An original in motion."""

    def state(self) -> TrainState:
        """Returns the canonical state that it holds."""

    def update(self, grads: Arrays, rows: Sparse = MappingProxyType({})) -> None:
        """Does one update.

        Args:
            grads: Gradients by path.
            rows: Those among them that are given as rows.
        """

    def save(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        """Saves with the original's own saving; returns where, and what `statekit.plan` needs to be told of it."""

    def load(self, path: Path) -> None:
        """Loads what `save` writes with the original's own loading, into a run that has done nothing yet."""


def canonical(
    case: Case,
    params: Arrays,
    stored: Mapping[str, Arrays],
    updates: int,
    behind: Mapping[str, int] | None = None,
) -> TrainState:
    """Returns a state from parameters and slots by path and canonical name."""
    schema = load_schema(case.family)
    groups = []
    for arguments, paths in case.groups:
        values = schema.settings(case.variant) | schema.canonical(case.variant, arguments)
        offered = {name: values[name] for name in schema.variant(case.variant)["defaults"]}
        groups.append(Group(paths, offered, dict.fromkeys(offered, "given")))
    tensors: dict[str, Tensor] = {path: in_memory(array, path) for path, array in params.items()}
    rules: dict[str, Rule] = {}
    constants = variant_constants(case.family, case.variant)
    if case.family == "adafactor":
        for group in groups:
            for path in group.paths:
                minimum = group.hyperparameters.get("min_dim_size_to_factor") or 0
                factored = group.hyperparameters.get("factored", True)
                rules[path] = Rule(by_shape(constants, case.params[path], factored, minimum), "given")
    slots: dict[str, dict[str, Tensor]] = {}
    for path, arrays in stored.items():
        named: dict[str, Tensor] = {name: in_memory(array, name) for name, array in arrays.items()}
        rule = rules.get(path)
        slots[path] = named if rule is None else canonical_slots(case.variant, rule, tensors[path], named)
    optimizer = Optimizer(case.family, case.variant, tuple(groups))
    state = TrainState(tensors, slots, optimizer, Counts(updates, updates, behind or {}), rules)
    fresh = [path for path in tensors if path not in stored]
    if not fresh:
        return state
    begun = initial(TrainState(tensors, {}, optimizer, Counts(0, 0), rules))
    full = {path: slots.get(path, begun.slots[path]) for path in tensors}
    return TrainState(tensors, full, optimizer, state.counts, rules)


def _by_alias(case: Case, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what has the alias of a slot, by the slot's canonical name."""
    slots = load_schema(case.family).slots.items()
    aliases = {slot.aliases[case.variant]: name for name, slot in slots if case.variant in slot.aliases}
    return {aliases[name]: value for name, value in arrays.items() if name in aliases}


def _torch_class(case: Case) -> Any:
    if case.library == "transformers":
        from transformers.optimization import Adafactor

        return Adafactor
    import torch

    return torch.optim.AdamW if case.family == "adamw" else torch.optim.Adafactor


def dotted(path: str) -> str:
    """Returns a path as PyTorch names it."""
    return path.replace("/", ".")


class TorchRun:
    """An optimizer of PyTorch or Transformers."""

    def __init__(self, case: Case) -> None:
        import torch

        self._torch, self._case = torch, case
        names = {np.dtype(DTYPES[n]): getattr(torch, n) for n in ("float32", "bfloat16", "float16")}
        dtype = names[np.dtype(DTYPES[case.dtype])]
        self._params = {
            path: torch.nn.Parameter(torch.from_numpy(array.astype(np.float32)).to(dtype))
            for path, array in case.start().items()
        }
        kind = _torch_class(case)
        groups = [
            {**arguments, "params": [(dotted(p), self._params[p]) for p in paths]}
            for arguments, paths in case.groups
        ]
        how = {case.mode: True} if case.mode in ("foreach", "fused") else {}
        if case.mode == "eager" and case.library == "torch":
            how = {"foreach": False}
        self._optimizer = kind(groups, **how)
        self._step = self._optimizer.step
        if case.mode == "compiled":
            torch.compiler.reset()  # after some recompilations it would run eagerly, without a word
            self._step = torch.compile(self._optimizer.step)

    def state(self) -> TrainState:
        slots, counts = {}, {}
        for path, param in self._params.items():
            param_state = self._optimizer.state.get(param)
            counts[path] = int(param_state["step"]) if param_state else 0
            if param_state:
                arrays = {
                    n: self._numpy(v) for n, v in param_state.items() if isinstance(v, self._torch.Tensor)
                }
                slots[path] = _by_alias(self._case, arrays)
        updates = max(counts.values(), default=0)
        behind = {path: count for path, count in counts.items() if count != updates}
        params = {path: self._numpy(param) for path, param in self._params.items()}
        return canonical(self._case, params, slots, updates, behind)

    def _numpy(self, tensor: Any) -> Array:
        wide = tensor.detach().to(self._torch.float32).numpy().copy()
        name = str(tensor.dtype).removeprefix("torch.")
        return np.asarray(wide).astype(DTYPES[name])

    def update(self, grads: Arrays, rows: Sparse = MappingProxyType({})) -> None:
        for path, param in self._params.items():
            grad = grads.get(path)
            param.grad = (
                None if grad is None else self._torch.from_numpy(grad.astype(np.float32)).to(param.dtype)
            )
        self._step()

    def save(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        path = folder / "own.pt"
        model = {dotted(name): param for name, param in self._params.items()}
        self._torch.save({"model": model, "optimizer": self._optimizer.state_dict()}, path)
        return path, {}

    def load(self, path: Path) -> None:
        saved = self._torch.load(path, weights_only=False)
        with self._torch.no_grad():
            for name, param in self._params.items():
                param.copy_(saved["model"][dotted(name)])
        self._optimizer.load_state_dict(saved["optimizer"])


class OptaxRun:
    """A transformation of Optax, over a flat dict of parameters."""

    def __init__(self, case: Case) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        self._jax, self._jnp, self._case = jax, jnp, case
        ((arguments, _),) = case.groups
        transformation = getattr(optax, case.family)(**arguments)
        self._params = {path: jnp.asarray(array) for path, array in case.start().items()}
        self._state = transformation.init(self._params)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self._step = jax.jit(step) if case.mode == "compiled" else step
        self._updates = 0

    def state(self) -> TrainState:
        arrays: dict[str, dict[str, Array]] = {path: {} for path in self._params}
        for part in self._jax.tree.leaves(self._state, is_leaf=lambda x: hasattr(x, "_fields")):
            for name, tree in getattr(part, "_asdict", dict)().items():
                if isinstance(tree, dict):
                    for path, array in tree.items():
                        arrays[path][name] = np.asarray(array)
        slots = {path: _by_alias(self._case, of_path) for path, of_path in arrays.items()}
        params = {path: np.asarray(array) for path, array in self._params.items()}
        return canonical(self._case, params, slots, self._updates)

    def update(self, grads: Arrays, rows: Sparse = MappingProxyType({})) -> None:
        given = {path: self._jnp.asarray(grad) for path, grad in grads.items()}
        self._params, self._state = self._step(self._params, self._state, given)
        self._updates += 1

    def save(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        from flax import serialization

        path = folder / "checkpoint_1"
        tree = {"params": self._params, "opt_state": self._state, "step": self._updates}
        path.write_bytes(serialization.to_bytes(tree))
        ((arguments, _),) = self._case.groups
        return path, {"hparams": dict(arguments)}

    def load(self, path: Path) -> None:
        from flax import serialization

        tree = {"params": self._params, "opt_state": self._state, "step": self._updates}
        file = path if path.is_file() else next(path.glob("checkpoint_*"))
        restored = self._jax.tree.map(self._jnp.asarray, serialization.from_bytes(tree, file.read_bytes()))
        self._params, self._state, self._updates = (
            restored["params"],
            restored["opt_state"],
            int(restored["step"]),
        )


class KerasRun:
    """An optimizer of Keras on TensorFlow, of a model that has the parameters as its weights."""

    def __init__(self, case: Case) -> None:
        import keras
        import tensorflow as tf

        self._tf, self._case = tf, case
        ((arguments, paths),) = case.groups
        self._paths = paths
        start = case.start()
        self._model = keras.Sequential([keras.Input((1,)), *(holder(p, start[p]) for p in paths)])
        self._params = self._model.trainable_variables
        made = dict(arguments)
        kind = {
            # Where nobody gives a decay AdamW has one of its own, and so has our variant.
            "adamw": "AdamW" if made.get("weight_decay", True) else "Adam",
            "lamb": "Lamb",
            "adafactor": "Adafactor",
        }
        self._optimizer = getattr(keras.optimizers, kind[case.family])(**made)
        self._model.compile(self._optimizer)
        self._optimizer.build(self._params)
        self._calls: dict[tuple[str, ...], Callable[..., Any]] = {}

    def state(self) -> TrainState:
        lists = {"m": "_momentums", "v": "_velocities"}
        if self._case.family == "adafactor":
            lists = {"v_row": "_r", "v_col": "_c", "v": "_v"}
        if self._case.groups[0][0].get("amsgrad"):
            lists["v_max"] = "_velocity_hats"
        slots = {
            path: {
                name: np.asarray(getattr(self._optimizer, attribute)[i]) for name, attribute in lists.items()
            }
            for i, path in enumerate(self._paths)
        }
        params = {path: np.asarray(p) for path, p in zip(self._paths, self._params, strict=True)}
        return canonical(self._case, params, slots, int(self._optimizer.iterations.numpy()))

    def update(self, grads: Arrays, rows: Sparse = MappingProxyType({})) -> None:
        present = tuple(path for path in self._paths if path in grads)
        params = [p for path, p in zip(self._paths, self._params, strict=True) if path in grads]
        values = [
            slices(self._case, p, rows[p]) if p in rows else self._tf.constant(grads[p]) for p in present
        ]
        if self._case.mode != "compiled":
            self._optimizer.apply_gradients(list(zip(values, params, strict=True)))
            return
        key = (*present, *rows)
        if key not in self._calls:
            self._calls[key] = self._tf.function(
                lambda given: self._optimizer.apply_gradients(list(zip(given, params, strict=True))),
                jit_compile=True,
            )
        self._calls[key](values)

    def save(self, folder: Path) -> tuple[Path, dict[str, Any]]:
        path = folder / "own.weights.h5"
        self._model.save_weights(path)
        ((arguments, _),) = self._case.groups
        return path, {"hparams": dict(arguments)}

    def load(self, path: Path) -> None:
        self._model.load_weights(path)


def holder(path: str, value: Array) -> Any:
    """Returns a layer of Keras that has one weight, and does nothing with it."""
    import keras

    def build(layer: Any, input_shape: Any) -> None:
        layer.add_weight(shape=value.shape, dtype=value.dtype.name, name="w").assign(value)

    kind = type("Holder", (keras.layers.Layer,), {"build": build, "call": lambda layer, x: x})
    return kind(name=path.partition("/")[0])


def slices(case: Case, path: str, rows: tuple[Array, Array]) -> Any:
    """Returns rows as TensorFlow has them."""
    import tensorflow as tf

    values, indices = map(tf.constant, rows)
    return tf.IndexedSlices(values, indices, tf.constant(case.params[path]))


RUNS: Mapping[str, Callable[[Case], Run]] = {
    "torch": TorchRun,
    "transformers": TorchRun,
    "optax": OptaxRun,
    "keras": KerasRun,
}
