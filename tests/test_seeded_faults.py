"""Faults that one would make when porting an optimizer, each put into our side on purpose: every backend must notice.

The matrix is fault x backend. The recorded state before an update is moved by the wrong step and compared with the
bound of the right one, which is computed once for all faults and backends of a kind of arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from goldens import GOLDEN
from replaying import BACKENDS, COMPILING, marks, present
from statekit.arrays.backend import Backend, backend
from statekit.arrays.intervals import Interval, IntervalBackend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.optim import adafactor, adafactor_forms, adamw, lamb, lans, scaled_adam, scaled_adam_forms
from statekit.optim.run import Move, load, mover, store
from statekit.optim.scaled_adam_clip import batches
from statekit.optim.steps import Execution
from statekit.state.constants import variant_constants
from statekit.state.train_state import Counts, TrainState
from statekit.tensors.tensor import Array, Tensor
from statekit.verify.recording import Rate, open_recording
from statekit.verify.stepping import named, tensors_of
from statekit.verify.verdict import compare

Mistake = Callable[[TrainState], TrainState]
Code = tuple[Any, str, Callable[..., Any]]
"""A module or table, a name in it, and what makes the wrong function of the right one."""
MOST = 3
"""Parameters that are enough to see a fault, where they are moved one by one."""


@dataclass(frozen=True)
class Fault:
    """What our side does wrong in one recording.

    Attributes:
        case: The recording.
        state: What it takes the state for.
        variant: Which variant it takes it for.
        settings: Hyperparameters that it has wrong.
        constants: Forms of the variant that it has wrong.
        code: Functions that it has wrong.
    """

    case: str
    state: Mistake = field(default=lambda state: state)
    variant: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    code: tuple[Code, ...] = ()

    @property
    def moves_wrongly(self) -> bool:
        """Whether the step itself is wrong, not only the state that it is given."""
        return bool(self.settings or self.constants or self.code or self.variant)

    @contextmanager
    def made(self, state: TrainState, execution: Execution) -> Iterator[None]:
        """Lets our side err about the optimizer of a state, in the forms of every run and of this execution."""
        kind = (state.optimizer.schema, str(state.optimizer.variant))
        forms = [variant_constants(*kind), variant_constants(*kind, execution)]
        with pytest.MonkeyPatch.context() as patch:
            for (name, value), constants in product(self.constants.items(), forms):
                assert constants[name] != value, f"{name} is {value} by right"
                patch.setitem(constants, name, value)
            for place, name, wrong in self.code:
                if isinstance(place, Mapping):
                    patch.setitem(place, name, wrong(place[name]))
                else:
                    patch.setattr(place, name, wrong(getattr(place, name)))
            yield

    def seen(self, state: TrainState) -> TrainState:
        """Returns a state as our side takes it."""
        taken = self.state(state).with_hyperparameters(**self.settings)
        variant = self.variant or taken.optimizer.variant
        return replace(taken, optimizer=replace(taken.optimizer, variant=variant))


@dataclass(frozen=True)
class Moment:
    """One recorded update, in memory: the state before it, what moves it, and the tensors after it."""

    update: int
    before: TrainState
    grads: Mapping[str, Array]
    rate: Rate


@dataclass(frozen=True)
class Recorded:
    """The updates of a recording in the hyperparameters of its first."""

    moments: tuple[Moment, ...]
    execution: Execution
    sqrt_units: float


@cache
def recorded(case: str) -> Recorded:
    xp, moments = NumpyBackend(), []
    with open_recording(GOLDEN / case) as recording:
        judge, phase = recording.trajectories[0], recording.phases[0]
        for update in range(recording.first + 1, phase.last + 1):
            state = recording.state(update - 1, judge, update)
            some = state.only(enough(state))
            grads = {
                path: grad.read() for path, grad in recording.gradients(update).items() if path in some.params
            }
            moments.append(Moment(update, store(xp, load(xp, some), some), grads, recording.rate(update)))
        return Recorded(tuple(moments), judge.execution, judge.sqrt_units)


def enough(state: TrainState) -> list[str]:
    """Returns all parameters if something acts on them jointly, else one of each kind, square ones first."""
    hyperparameters = state.optimizer.groups[0].hyperparameters
    if hyperparameters.get("global_norm_clip_threshold") or state.optimizer.schema == "scaled_adam":
        return list(state.params)
    kinds: dict[Any, str] = {}
    for path, tensor in state.params.items():
        rule = state.rules.get(path)
        kinds.setdefault((tensor.shape, rule and rule.factored), path)
    return sorted(kinds.values(), key=lambda path: len(set(state.params[path].shape)) != 1)[:MOST]


@cache
def bounds(case: str, contracts: bool, sqrt_units: float) -> tuple[Mapping[tuple[str, str], Interval], ...]:
    recording = recorded(case)
    roots = max(recording.sqrt_units, sqrt_units)
    xp = IntervalBackend(contracts or recording.execution == "compiled", sqrt_units=roots)
    move, intervals = mover(xp, recording.moments[0].before, recording.execution), []
    for moment in recording.moments:
        live = move(load(xp, moment.before), loaded_grads(xp, moment.grads), moment.rate)
        intervals.append(named(live.params, live.slots, live.shared))
    return tuple(intervals)


def loaded_grads(xp: Backend, grads: Mapping[str, Array]) -> dict[str, Any]:
    return {path: xp.asarray(grad) for path, grad in grads.items()}


@cache
def right_move(case: str, name: str) -> Move:
    recording = recorded(case)
    return mover(backend(name), recording.moments[0].before, recording.execution)


def noticed(fault: Fault, xp: Backend) -> str:
    """Returns the first element that leaves the bound; "" if none does."""
    recording, right = recorded(fault.case), bounds(fault.case, xp.contracts, xp.sqrt_units)
    before = recording.moments[0].before
    with fault.made(before, recording.execution):
        wrong = fault.seen(before) if fault.moves_wrongly else None
        move = mover(xp, wrong, recording.execution) if wrong else right_move(fault.case, xp.name)
        for moment, bound in zip(recording.moments, right, strict=True):
            mine = fault.seen(moment.before)
            after = tensors_of(
                store(xp, move(load(xp, mine), loaded_grads(xp, moment.grads), moment.rate), mine)
            )
            for key, tensor in after.items():
                value, old = tensor.read(), tensors_of(moment.before)[key].read()
                row = compare(moment.update, *key, value, value, old, bound[key])
                if row.outside:
                    return f"update {moment.update}: {key} {row.example}"
    return ""


def swapped(state: TrainState) -> TrainState:
    """Takes rows for columns where shapes don't tell."""
    slots = {
        path: {**tensors, "v_row": tensors["v_col"], "v_col": tensors["v_row"]}
        for path, tensors in state.slots.items()
        if "v_row" in tensors and tensors["v_row"].shape == tensors["v_col"].shape
    }
    assert slots
    return replace(state, slots={**state.slots, **slots})


def late(state: TrainState) -> TrainState:
    """Counts an update too many."""
    return replace(state, counts=Counts(state.counts.updates + 1, state.counts.schedule + 1))


def reversed_batches(state: TrainState) -> TrainState:
    """Takes a batch of ScaledAdam's apart from its other end."""
    keys = {path: (tensor.dtype.name, *tensor.shape) for path, tensor in state.params.items()}
    slots: dict[str, Mapping[str, Tensor]] = {}
    for batch in batches(keys):
        slots |= {path: state.slots[other] for path, other in zip(batch, reversed(batch), strict=True)}
    return replace(state, slots=slots)


def squared_and_added(right: Callable[..., Any]) -> Callable[..., Any]:
    """LANS and LAMB: what stands below the root has the epsilon added, that of the hyperparameters being 0."""

    def corrected(s: Any, moment: Any, beta: float) -> Any:
        value = right(s, moment, beta)
        return value + 1e-5 if beta == s.hyper.beta2 else value

    return corrected


def root_of_sum(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda s, m: s.xp.sqrt(right(s, m) * right(s, m) + s.hyper.eps)


def clipped_step(right: Callable[..., Any]) -> Callable[..., Any]:
    """Adafactor: clips what the learning rate has made small, to no effect, instead of the preconditioned gradient."""
    return lambda size, y, factor: (size, y)


def clamped_first(right: Callable[..., Any]) -> Callable[..., Any]:
    """LANS: clips elements before the gradient is normalised, not after."""

    def gradient(s: Any, p: Any, g: Any) -> Any:
        edge = s.xp.constant(s.hyper.clip_gradient)
        unclipped = replace(s, hyper=replace(s.hyper, clip_gradient=None))
        return right(unclipped, p, s.xp.minimum(s.xp.maximum(g, -edge), edge))

    return gradient


def unclipped(right: Callable[..., Any]) -> Callable[..., Any]:
    """AdamW: moments of gradients as they come, clipping left to somebody behind."""
    return lambda scene, group, params, grads, slots, shared: (
        {path: scene.xp.widen(grad) for path, grad in grads.items()}, shared, None
    )  # fmt: skip


def rate_outside(right: Callable[..., Any]) -> Callable[..., Any]:
    """Momentum without the learning rate, which the step is multiplied with."""

    def update(scene: Any, param: Any, *rest: Any) -> Any:
        after, new = right(replace(scene, rate=1.0), param, *rest)
        return param - scene.xp.widen(scene.rate) * (param - after), new

    return update


def rate_inside(right: Callable[..., Any]) -> Callable[..., Any]:
    """A first moment of learning rate times gradient."""

    def update(scene: Any, param: Any, grad: Any, slots: Any, *rest: Any) -> Any:
        after, new = right(scene, param, grad, slots, *rest)
        return after, {**new, "m": slots["m"] + scene.xp.widen(scene.rate) * (new["m"] - slots["m"])}

    return update


T5X, HF, T2T = "t5x/momentum_f32", "hf_adafactor/fixedlr_scale_beta1_wd", "t2t/late_beta1_scaled_extlr"
TORCH_ADAFACTOR = "torch_adafactor/adafactor_foreach_eps"
FUSED, UNFUSED = "mxnet_lans/fused_bounds_clip_rescale", "mxnet_lans/unfused_trainer"
LEGACY = "mxnet_lans/updater_unfused_fp16_legacy"
SEED, EDEN = "scaled_adam/gptsovits_basic", "scaled_adam/pt7_two_groups_eden"
CLIPPING, NEWEST = "scaled_adam/zipformer202407_clipping", "scaled_adam/zipformer2025_basic"
ADAMW, TRAINER = "torch_adafactor/adamw_fused_named", "torch_formats/adamw_trainer"
KERAS, NEO = "keras/adamw_ema_schedule_clip", "mesh_tf/gptneo_adam_cosine_clip"
LAMB, KERAS_LAMB = "optax_adafactor/lamb_pytree_noocdbt", "keras/lamb_default"

IN_QUOTIENT = {"denominator_form": "root_of_quotient", "bias_correction_precision": "float32"}
MATRIX: Mapping[str, tuple[Fault, ...]] = {
    "rows for columns": (Fault(T5X, swapped), Fault(HF, swapped)),
    "a step too late": tuple(Fault(case, late) for case in (T5X, T2T, HF, EDEN, FUSED, LAMB, ADAMW, TRAINER, KERAS)),
    "epsilon inside the root": (
        Fault(ADAMW, settings={"epsilon": 0.0, "epsilon_root": 1e-8}, constants=IN_QUOTIENT),
        Fault(TRAINER, settings={"epsilon": 0.0, "epsilon_root": 1e-8}, constants=IN_QUOTIENT),
        Fault(KERAS, settings={"epsilon": 0.0, "epsilon_root": 1e-6}, constants=IN_QUOTIENT),
        Fault(LAMB, settings={"epsilon": 0.0, "epsilon_root": 1e-5}),
        Fault(FUSED, settings={"epsilon": 0.0}, code=((lans.LansSetting, "corrected", squared_and_added),)),
        Fault(SEED, code=((scaled_adam_forms, "root", root_of_sum),)),
        Fault(NEWEST, code=((scaled_adam_forms, "root", root_of_sum),)),
    ),
    "epsilon added to the square": (Fault(TORCH_ADAFACTOR, constants={"epsilon1_place": "added_to_square"}),),
    "clipping at another place": (
        Fault(T5X, code=((adafactor_forms.CLIP, "gradient", clipped_step),)),
        Fault(HF, code=((adafactor_forms.CLIP, "gradient", clipped_step),)),
        Fault(FUSED, code=((lans, "_gradient", clamped_first),)),
        Fault(KERAS, code=((adamw, "prepare", unclipped),)),
        Fault(NEO, code=((adamw, "prepare", unclipped),)),
        Fault(CLIPPING, constants={"clip_reaches": "scale_grads"}),
        Fault(EDEN, constants={"clip_reaches": "everything"}),
    ),
    "momentum without learning rate": (
        Fault(T5X, code=((adafactor, "update", rate_outside),)),
        Fault(HF, code=((adafactor, "update", rate_outside),)),
        Fault(NEWEST, code=((scaled_adam, "update", rate_outside),)),
    ),
    "momentum with learning rate": (
        Fault(ADAMW, code=((adamw, "update", rate_inside),)),
        Fault(KERAS, code=((adamw, "update", rate_inside),)),
        Fault(LAMB, code=((lamb, "update", rate_inside),)),
        Fault(FUSED, code=((lans, "update", rate_inside),)),
    ),
    "batches in another order": (Fault(SEED, reversed_batches), Fault(NEWEST, reversed_batches)),
    "fused for unfused": (
        Fault(FUSED, variant="mxnet_unfused"),
        Fault(UNFUSED, variant="mxnet_fused"),
        Fault(LEGACY, variant="mxnet_fused"),
    ),
    "betas swapped": (
        Fault(ADAMW, settings={"beta1": 0.95, "beta2": 0.9}),
        Fault(KERAS, settings={"beta1": 0.999, "beta2": 0.9}),
        Fault(NEO, settings={"beta1": 0.95, "beta2": 0.9}),
        Fault(LAMB, settings={"beta1": 0.97, "beta2": 0.85}),
        Fault(KERAS_LAMB, settings={"beta1": 0.999, "beta2": 0.9}),
        Fault(FUSED, settings={"beta1": 0.97, "beta2": 0.88}),
        Fault(EDEN, settings={"betas": (0.98, 0.9)}),
        Fault(T5X, settings={"beta1": 0.1}),
    ),
}  # fmt: skip


def matrix() -> list[Any]:
    """Each fault in each backend; `make test` has one of each kind where a step must be compiled, and all elsewhere."""
    return [
        pytest.param(
            name, fault, id=f"{name}-{what}-{fault.case}", marks=marks(name, name in COMPILING and number > 0)
        )
        for name in BACKENDS
        for what, faults in MATRIX.items()
        for number, fault in enumerate(fault for fault in faults if present(fault.case))
    ]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "fault"), matrix())
def test_every_backend_notices(name: str, fault: Fault) -> None:
    assert noticed(fault, backend(name))


def test_every_kind_of_fault_is_here() -> None:
    assert all(any(present(fault.case) for fault in faults) for faults in MATRIX.values())


@pytest.mark.sampled
@pytest.mark.torch
@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("case", present(*sorted({f.case for faults in MATRIX.values() for f in faults})))
def test_nothing_is_noticed_without_a_fault(case: str, name: str) -> None:
    assert noticed(Fault(case), backend(name)) == ""
