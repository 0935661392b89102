"""The laws that every step obeys in every backend; whoever writes a step or a backend inherits them.

    from statekit.testing.step_cases import case
    from statekit.testing.steps import COSTLY, LAWS, Trial

    @pytest.mark.parametrize("law", [*LAWS, *COSTLY])
    def test_my_backend_obeys(law: str) -> None:
        trial = Trial(case("adafactor", "t5x", full=True), MyBackend())
        {**LAWS, **COSTLY}[law](trial)

A law is a function of a trial, i.e. of a case in a backend, and raises AssertionError with what was found. `LAWS` share
the trial's one compiled step; each of `COSTLY` compiles another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, cast

import numpy as np

from statekit.arrays.backend import Backend, Batching
from statekit.arrays.numpy_backend import ORACLE
from statekit.errors import StatekitError
from statekit.optim.run import Live, Move, load, move_group, mover, settled_group, steps_of, store
from statekit.optim.steps import Execution, Scene
from statekit.state.schema import load_schema
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array
from statekit.testing.step_cases import EMPTY, RATE, Case
from statekit.testing.step_reach import first_index, reach
from statekit.verify.stepping import named, tensors_of
from statekit.verify.verdict import compare

Grads: TypeAlias = Mapping[str, Array]


@dataclass(frozen=True)
class Trial:
    """A case in a backend."""

    case: Case
    xp: Backend

    @property
    def execution(self) -> Execution:
        """The roundings of the original that the backend is asked for: those of its own kind."""
        return "compiled" if self.xp.contracts else "op_by_op"

    @cached_property
    def move(self) -> Move:
        """The step of the case's optimizer, compiled once."""
        return mover(self.xp, self.case.state, self.execution)

    def step(self, state: TrainState, grads: Grads, move: Move | None = None) -> TrainState:
        """Returns a state after one update."""
        return store(self.xp, (move or self.move)(load(self.xp, state), self.held(grads), RATE), state)

    def held(self, grads: Grads) -> dict[str, Any]:
        """Returns gradients in the backend."""
        return {path: self.xp.asarray(grad) for path, grad in grads.items()}


Law: TypeAlias = Callable[[Trial], None]


def require_refusal(trial: Trial) -> None:
    """Requires that a step which can't follow its original says so before anything moves.

    Raises:
        AssertionError: It doesn't, or with an error that isn't ours.
    """
    try:
        _ = trial.move
    except StatekitError as error:
        assert error.place is not None and error.expected is not None, f"says too little: {error}"
        return
    raise AssertionError(
        f"{trial.case.schema} {trial.case.variant} steps a case that it declares as unsupported"
    )


def keeps_shapes_and_dtypes(trial: Trial) -> None:
    """Fresh slots have the shapes that the schema says, and an update keeps every shape and dtype."""
    case, xp = trial.case, trial.xp
    slots = load_schema(case.schema).slots
    for path, fresh in case.state.slots.items():
        shape = case.state.params[path].shape
        alone = (1,) * len(shape)
        for name, tensor in fresh.items():
            kind = slots[name].shape
            shape_due = {"parameter": shape, "scalar_per_parameter": alone}.get(kind, tensor.shape)
            shape_due = (tensor.shape[0], *alone) if kind == "scale_history" else shape_due
            assert tensor.shape == shape_due, (
                f"{path} {name} begins with shape {tensor.shape}, expected {shape_due}"
            )
    live = load(xp, case.state)
    after = trial.move(live, trial.held(case.grads[0]), RATE)
    old, new = (named(x.params, x.slots, x.shared) for x in (live, after))
    assert new.keys() == old.keys(), f"slots come or go: {sorted(new.keys() ^ old.keys())}"
    forms = {key: (xp.shape(value), xp.dtype(value)) for key, value in new.items()}
    wrong = {
        key: forms[key] for key, value in old.items() if forms[key] != (xp.shape(value), xp.dtype(value))
    }
    assert not wrong, f"shape or dtype changes: {wrong}"
    assert after.updates == live.updates + 1, f"counts {after.updates} after {live.updates}"


def leaves_its_arguments_alone(trial: Trial) -> None:
    """An update writes into none of the arrays it is given."""
    live, grads = load(trial.xp, trial.case.before(1)), trial.held(trial.case.grads[1])
    arguments = {
        **named(live.params, live.slots, live.shared),
        **{(path, "grad"): g for path, g in grads.items()},
    }
    old = {key: trial.xp.numpy(value).tobytes() for key, value in arguments.items()}
    trial.move(live, grads, RATE)
    changed = [key for key, value in arguments.items() if trial.xp.numpy(value).tobytes() != old[key]]
    assert not changed, f"writes into its arguments: {changed}"


def resumes_bit_for_bit(trial: Trial) -> None:
    """N updates are K updates, stored, loaded and continued for N - K: nothing lives outside of the state."""
    case, middle = trial.case, len(trial.case.grads) // 2
    states = [case.state]
    live = load(trial.xp, case.state)
    for grads in case.grads:
        live = trial.move(live, trial.held(grads), RATE)
        states.append(store(trial.xp, live, case.state))
    again = states[middle]
    for grads in case.grads[middle:]:
        again = trial.step(again, grads)
    _require_same(again, states[-1], "after a resume")


def stays_within_the_bound(trial: Trial) -> None:
    """Every element of an update lies in the interval of its arithmetic, and so does the float64 oracle's."""
    for update in (0, len(trial.case.grads) - 1):
        before = trial.case.before(update)
        _require_within(trial, trial.step(before, trial.case.grads[update]), update)
        if trial.case.single:
            oracle = Trial(trial.case, ORACLE)
            _require_within(oracle, oracle.step(before, trial.case.grads[update]), update, contracted=True)


def treats_one_element_as_a_scalar(trial: Trial) -> None:
    """A parameter of shape (1,) moves as a scalar with the same numbers, on backends that don't contract operations."""
    after = tensors_of(trial.step(trial.case.before(1), trial.case.grads[1]))
    for (path, name), tensor in after.items():
        if path == "scalar" and not trial.xp.contracts:
            other = after["one", name].read()
            assert tensor.read().tobytes() == other.tobytes(), f"{name}: {tensor.read()} and {other}"


def _divides_by_nothing(form: str, hyper: Mapping[str, Any]) -> bool:
    """Tells whether a gradient of zeros leaves NaN in a variant of this form."""
    return form in ("nan", "undefined") or (form == "nan_unless_clipped" and hyper["clip_gradient"] is None)


def goes_on_without_slope(trial: Trial) -> None:
    """An all-zero first gradient leaves parameters as they are, but for weight decay, and everything finite.

    Not so for LANS, whose variants say what 0 / 0 becomes, and for ScaledAdam where epsilon is 0 in the slots' dtype.
    """
    case = trial.case
    after = tensors_of(trial.step(case.state, {path: np.zeros_like(g) for path, g in case.grads[0].items()}))
    form, hyper = case.constants.get("zero_gradient", "skipped"), case.hyperparameters
    absent = _divides_by_nothing(form, hyper)
    still = case.single and form == "skipped" and not hyper.get("weight_decay_rate") and not hyper.get("wd")
    for (path, name), tensor in after.items():
        value = tensor.read().astype(np.float64)
        if path in EMPTY or path.startswith("groups/"):
            continue
        lost = absent or (name in ("param", "delta") and _epsilon_vanishes(case))
        assert np.isnan(value).all() if lost else np.isfinite(value).all(), f"{path} {name} becomes {value}"
        if still and name == "param":
            assert np.array_equal(value, case.state.params[path].read()), f"{path} moves without a gradient"


def spreads_nan_as_declared(trial: Trial) -> None:
    """A NaN in one element of a gradient goes exactly where `statekit.testing.step_reach` says."""
    for key, mask, now, undisturbed, where in _disturbed(trial, np.nan):
        absent, already = np.isnan(now), np.isnan(undisturbed)
        assert np.array_equal(absent, mask | already), f"a NaN in {where} goes to {key} {np.argwhere(absent)}"


def keeps_infinity_where_nan_would_go(trial: Trial) -> None:
    """An infinity in one element of a gradient makes nothing infinite or NaN that a NaN wouldn't reach."""
    for key, mask, now, undisturbed, where in _disturbed(trial, np.inf):
        lost = np.isfinite(undisturbed) & ~np.isfinite(now) & ~mask
        assert not lost.any(), f"an infinity in {where} goes to {key} {np.argwhere(lost)}"


def equals_itself_uncompiled(trial: Trial) -> None:
    """An uncompiled update lies within the compiled one's bound, and equals it if the bound is one value."""
    move = mover(cast(Backend, Uncompiled(trial.xp)), trial.case.state, trial.execution)
    for update in (0, 1):
        with np.errstate(all="ignore"):
            after = trial.step(trial.case.before(update), trial.case.grads[update], move)
        _require_within(trial, after, update)


def ignores_the_order_of_parameters(trial: Trial) -> None:
    """Another order changes no bit, or stays within the bound where a sum runs over parameters in their order."""
    _require_indifferent(trial, tuple(reversed(tuple(trial.case.state.params))), 1)


def ignores_empty_parameters(trial: Trial) -> None:
    """Parameters without elements change nothing for the others."""
    _require_indifferent(trial, tuple(path for path in trial.case.state.params if path not in EMPTY), 1)


def equals_itself_batched(trial: Trial) -> None:
    """Parameters of one kind that are stacked and updated together stay within the bound, if the backend can."""
    xp, case = trial.xp, trial.case
    if not hasattr(xp, "batched"):
        return
    steps, group = steps_of(case.state), case.state.optimizer.groups[0]
    configs = settled_group(steps, group, case.state.rules, case.variant)

    def batched(live: dict[str, Any], grads: dict[str, Any], count: Any) -> Any:
        scene = Scene(xp, case.variant, RATE, count, trial.execution)
        batching = cast(Batching, xp)
        return move_group(steps, scene, group, configs, **live, grads=grads, batching=batching)

    before = case.before(1)
    live = load(xp, before)
    arguments = {"params": live.params, "slots": live.slots, "shared": live.shared[0]}
    params, slots, shared = xp.compile(batched)(arguments, trial.held(case.grads[1]), live.updates)
    after = store(xp, Live(params, slots, (shared,), live.updates + 1), before)
    _require_within(trial, after, 1, contracted=True)


def passes_over_missing_gradients(trial: Trial) -> None:
    """A parameter without a gradient stays, and falls behind where its variant counts updates by parameter.

    ScaledAdam counts a missing gradient as zeros; averages follow their parameter all the same.
    """
    case, path = trial.case, "matrix"
    rest = {other: grad for other, grad in case.grads[1].items() if other != path}
    before = case.before(1)
    after = trial.step(before, rest)
    behind = {path: before.counts.updates} if case.counts_apart else {}
    assert dict(after.counts.behind) == behind, f"behind: {dict(after.counts.behind)}, expected {behind}"
    old, new = tensors_of(before), tensors_of(after)
    if case.schema == "scaled_adam":
        zeros = {**rest, path: np.zeros_like(case.grads[1][path])}
        _require_within(Trial(Case(before, (zeros,)), trial.xp), after, 0)
        if not trial.xp.contracts:  # another program, whose products may be rounded elsewhere
            _require_same(after, trial.step(before, zeros), "with zeros for a missing gradient")
        return
    averaged = case.hyperparameters.get("use_ema")
    for (owner, name), tensor in old.items():
        if owner == path and not (averaged and name in ("average", "param")):
            assert tensor.read().tobytes() == new[owner, name].read().tobytes(), f"{owner} {name} moves"


LAWS: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        keeps_shapes_and_dtypes,
        leaves_its_arguments_alone,
        resumes_bit_for_bit,
        stays_within_the_bound,
        treats_one_element_as_a_scalar,
        goes_on_without_slope,
        spreads_nan_as_declared,
        keeps_infinity_where_nan_would_go,
    )
}
"""Laws that share a trial's compiled step."""

COSTLY: Mapping[str, Law] = {
    law.__name__: law
    for law in (
        equals_itself_uncompiled,
        ignores_the_order_of_parameters,
        ignores_empty_parameters,
        equals_itself_batched,
        passes_over_missing_gradients,
    )
}
"""Laws that compile a step of their own."""


class Uncompiled:
    """A backend that runs every operation by itself; in all else another one."""

    def __init__(self, xp: Backend) -> None:
        self._xp = xp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._xp, name)

    def compile(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step as it is."""
        return step


def _require_same(ours: TrainState, theirs: TrainState, when: str) -> None:
    right, other = tensors_of(ours), tensors_of(theirs)
    unequal = [key for key, tensor in right.items() if tensor.read().tobytes() != other[key].read().tobytes()]
    assert not unequal, f"other bits {when}: {unequal}"
    assert ours.counts == theirs.counts, f"other counts {when}: {ours.counts}, {theirs.counts}"


def _require_within(trial: Trial, after: TrainState, update: int, *, contracted: bool = False) -> None:
    case = trial.case
    arithmetic = contracted or trial.xp.contracts, trial.xp.sqrt_units
    bound, old = case.bound(update, trial.execution, *arithmetic), tensors_of(case.before(update))
    for key, tensor in tensors_of(after).items():
        value = tensor.read()
        row = compare(update + 1, *key, value, value, old[key].read(), bound[key])
        assert not row.outside, f"{key} leaves the bound of update {update}: {row.example}"


def _require_indifferent(trial: Trial, paths: tuple[str, ...], update: int) -> None:
    """Requires that an update of some parameters, in this order, gives them what the update of all gives."""
    case = trial.case
    before = case.before(update)
    some = _in_order(before.only(paths), paths)
    grads = {path: case.grads[update][path] for path in paths}
    after = trial.step(some, grads, mover(trial.xp, some, trial.execution))
    _require_within(trial, after, update)
    if not _sums_in_order(case):
        whole = tensors_of(trial.step(before, case.grads[update]))
        unequal = [
            key
            for key, tensor in tensors_of(after).items()
            if tensor.read().tobytes() != whole[key].read().tobytes()
        ]
        assert not unequal, f"depends on other parameters: {unequal}"


def _in_order(state: TrainState, paths: tuple[str, ...]) -> TrainState:
    """Returns a state whose groups have their parameters in this order."""
    groups = tuple(
        replace(group, paths=tuple(path for path in paths if path in group.paths))
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _sums_in_order(case: Case) -> bool:
    """Tells whether a case takes a norm over parameters in the order of their group: T5X's is sorted by path."""
    sorted_by_path = case.schema == "adafactor" and case.constants["gradient_clipping"] == "global_norm"
    by_norm = case.hyperparameters.get("global_norm_clip_threshold") and not sorted_by_path
    return bool(by_norm or case.hyperparameters.get("clipping_scale"))


def _epsilon_vanishes(case: Case) -> bool:
    """Tells whether ScaledAdam's epsilon is 0 where it is added, in float16: a zero gradient makes 0 / 0 of it."""
    dtypes = {slots["delta"].dtype for slots in case.state.slots.values() if "delta" in slots}
    return any(np.asarray(case.hyperparameters["eps"]).astype(dtype) == 0 for dtype in dtypes)


def _disturbed(trial: Trial, value: float) -> Iterator[tuple[tuple[str, str], Array, Array, Array, str]]:
    """Puts a value into one element of one gradient of the first update, for some parameters.

    Yields:
        For each tensor: its name, where the value may go, the tensor with it and without it, and where it was put.
    """
    case, grads = trial.case, trial.case.grads[0]
    undisturbed = tensors_of(trial.step(case.state, grads))
    for path in ("vector", "matrix", "stacked", "kept", "scalar"):
        if path not in grads:
            continue
        changed, index = grads[path].copy(), first_index(grads[path].shape)
        changed[index] = value
        after = tensors_of(trial.step(case.state, {**grads, path: changed}))
        for key, mask in reach(case.state, path, index, infinite=np.isinf(value)).items():
            if key[0] not in EMPTY:
                now, then = (x[key].read().astype(np.float64) for x in (after, undisturbed))
                yield key, mask, now, then, f"{path} {list(index)}"
