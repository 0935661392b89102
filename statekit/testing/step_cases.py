"""What the laws of steps are checked on: generated parameters, gradients and settings, the same in every run."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from statekit.arrays.backend import Backend
from statekit.arrays.intervals import Interval, IntervalBackend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.optim.run import counts_apart, initial, load, mover, store
from statekit.optim.steps import Execution
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.tensors.tensor import DTYPES, Array, Shape, in_memory
from statekit.verify.stepping import named

R, C, B, N = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE
Table: TypeAlias = Mapping[str, tuple[Shape, tuple[Axis, ...]]]
"""Path -> shape and, where the optimizer factors, the label of each axis."""

TABLE: Table = MappingProxyType(
    {
        "scalar": ((), ()),
        "one": ((1,), (N,)),
        "none": ((0, 3), (N, N)),
        "none_factored": ((0, 3), (R, C)),
        "vector": ((7,), (N,)),
        "vector_twin": ((7,), (N,)),
        "whole": ((3, 5), (N, N)),
        "matrix": ((6, 4), (R, C)),
        "matrix_twin": ((6, 4), (R, C)),
        "swapped": ((6, 4), (C, R)),
        "square": ((5, 5), (R, C)),
        "square_swapped": ((5, 5), (C, R)),
        "stacked": ((2, 3, 4), (B, R, C)),
        "stacked_whole": ((2, 6), (B, N)),
        "kept": ((3, 2, 4), (R, N, C)),
        "heads": ((2, 4, 2, 3), (B, R, C, C)),
    }
)
"""Every kind of rule: none, matrices both ways, a stack, an axis kept, two axes that count as one; and no elements."""
PLAIN = ("scalar", "one", "none", "vector", "vector_twin", "matrix", "matrix_twin", "stacked")
"""Those that an optimizer without rules tells apart."""
EMPTY = ("none", "none_factored")
"""Those without elements."""
MATRICES = ("matrix", "matrix_twin", "square")
"""Those of two axes, which is all that some optimizers move."""


def plain_paths(schema: str) -> tuple[str, ...]:
    """Returns the parameters of `TABLE` that an optimizer without rules moves."""
    return MATRICES if schema == "muon" else PLAIN


FULL: Mapping[str, Mapping[str, Any]] = {
    "adafactor": {
        "beta1": 0.9, "weight_decay_rate": 0.02, "global_norm_clip_threshold": 0.5, "max_parameter_scale": 0.6,
        "epsilon2": 1e-2, "step_offset": 0, "use_ema": True, "ema_overwrite_frequency": 2, "maximize": True,
    },
    "adamw": {
        "weight_decay_rate": 0.02, "amsgrad": True, "nesterov": True, "global_norm_clip_threshold": 0.5,
        "use_ema": True, "ema_overwrite_frequency": 2, "maximize": True,
    },
    "lamb": {
        "weight_decay_rate": 0.02, "global_norm_clip_threshold": 0.5, "use_ema": True, "ema_overwrite_frequency": 2,
    },
    "lans": {
        "wd": 0.02, "lower_bound": 0.1, "upper_bound": 5.0, "clip_gradient": 0.5, "rescale_grad": 0.5,
        "begin_num_update": 3, "lr_mult": {"matrix": 0.5}, "wd_mult": {"vector": 0.0},
    },
    "muon": {
        "weight_decay_rate": 0.02, "global_norm_clip_threshold": 0.5, "use_ema": True, "ema_overwrite_frequency": 2,
    },
    "scaled_adam": {"clipping_scale": 1.5, "clipping_update_period": 2, "size_update_period": 2},
}  # fmt: skip
"""What is switched on beside a variant's defaults, where it offers it."""
UNSAID: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("lans", "paper"): {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "wd": 0.0}
}
"""Hyperparameters that a variant needs and has no default for."""
RATE = 0.01


@dataclass(frozen=True)
class Case:
    """A run that no original made: a fresh state, and the gradients of its updates.

    Attributes:
        state: Parameters and fresh slots, one group.
        grads: For each update, gradients by path, in the parameters' dtypes.
    """

    state: TrainState
    grads: tuple[Mapping[str, Array], ...]
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def schema(self) -> str:
        """Name of the schema."""
        return self.state.optimizer.schema

    @property
    def variant(self) -> str:
        """Name of the variant."""
        return str(self.state.optimizer.variant)

    @property
    def constants(self) -> Mapping[str, Any]:
        """The variant's constants: difference -> name of its form."""
        return variant_constants(self.schema, self.variant)

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """The group's hyperparameters."""
        return self.state.optimizer.groups[0].hyperparameters

    @property
    def counts_apart(self) -> bool:
        """Whether each parameter's updates are counted by themselves."""
        return counts_apart(self.schema, self.variant)

    @property
    def single(self) -> bool:
        """Whether everything is float32."""
        tensors = [
            *self.state.params.values(),
            *(s for slots in self.state.slots.values() for s in slots.values()),
        ]
        return all(tensor.dtype.name == "float32" for tensor in tensors)

    def before(self, update: int) -> TrainState:
        """Returns the state before an update (0 is the first), as NumPy reaches it."""
        if ("before", update) not in self._kept:
            state = (
                self.state if not update else run(NumpyBackend(), self, self.before(update - 1), update - 1)
            )
            self._kept["before", update] = state
        kept: TrainState = self._kept["before", update]
        return kept

    def bound(
        self, update: int, execution: Execution, contracted: bool, sqrt_units: float
    ) -> dict[tuple[str, str], Interval]:
        """Returns what an update of `before(update)` may give in some arithmetic: an interval for every element."""
        key = ("bound", update, execution, contracted, sqrt_units)
        if key not in self._kept:
            xp, state = IntervalBackend(contracted, sqrt_units=sqrt_units), self.before(update)
            live = mover(xp, state, execution)(load(xp, state), _held(xp, self.grads[update]), RATE)
            self._kept[key] = named(live.params, live.slots, live.shared)
        kept: dict[tuple[str, str], Interval] = self._kept[key]
        return kept


def run(xp: Backend, case: Case, state: TrainState, update: int) -> TrainState:
    """Returns a state after one update of a case, compiled or not as the backend likes."""
    return store(xp, mover(xp, state)(load(xp, state), _held(xp, case.grads[update]), RATE), state)


def _held(xp: Backend, grads: Mapping[str, Array]) -> dict[str, Any]:
    return {path: xp.asarray(grad) for path, grad in grads.items()}


def case(
    schema: str,
    variant: str,
    *,
    full: bool = False,
    dtype: str = "float32",
    table: Table | None = None,
    updates: int = 4,
    seed: int = 0,
    **changes: Any,
) -> Case:
    """Makes a case.

    Args:
        schema: Name of the schema.
        variant: Name of the variant in it.
        full: Whether `FULL` is switched on, or only the defaults.
        dtype: Dtype of parameters and gradients, and of the momentum where one can choose.
        table: Parameters; by default TABLE, or PLAIN of it.
        updates: Updates to make gradients for.
        seed: Of the values.
        changes: Hyperparameters that are set beside.

    Raises:
        StateError: statekit has no step for the variant.
        UnknownRuleError: The step needs a hyperparameter that has no default.
    """
    table = table or (TABLE if schema == "adafactor" else {path: TABLE[path] for path in plain_paths(schema)})
    paths, rules = tuple(table), {}
    params = {
        path: in_memory(_values(seed, path, "param", 0, shape, dtype), path)
        for path, (shape, _) in table.items()
    }
    if schema == "adafactor":
        rules = {path: Rule(axes, "given") for path, (_, axes) in table.items()}
    settings = {**_settings(schema, variant, full, dtype), **changes}
    optimizer = Optimizer(schema, variant, (Group(paths, settings, dict.fromkeys(settings, "given")),))
    bare = TrainState(params, {path: {} for path in paths}, optimizer, Counts(0, 0), rules)
    grads = tuple(
        {path: _values(seed, path, "grad", update, shape, dtype) for path, (shape, _) in table.items()}
        for update in range(updates)
    )
    return Case(initial(bare), grads)


def _settings(schema: str, variant: str, full: bool, dtype: str) -> dict[str, Any]:
    defaults = load_schema(schema).variant(variant)["defaults"]
    settings = {**defaults, **UNSAID.get((schema, variant), {})}
    if full:
        settings |= {name: value for name, value in FULL[schema].items() if name in defaults}
    if dtype != "float32":
        settings |= {name: dtype for name in ("dtype_momentum",) if name in defaults}
        settings |= {name: True for name in ("multi_precision",) if name in defaults}
    return settings


def _values(seed: int, path: str, kind: str, update: int, shape: Shape, dtype: str) -> Array:
    """Returns numbers of many sizes; `one` has those of `scalar`."""
    name = "scalar" if path == "one" else path
    random = np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(kind.encode()), update])
    size = 10.0 ** random.uniform(-3, 1) if kind == "grad" else 10.0 ** random.uniform(-1, 0)
    return np.asarray(size * random.standard_normal(shape)).astype(DTYPES[dtype])
