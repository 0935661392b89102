"""The fast paths of torch: every element within the bound of the reference text, in stacks and alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import statekit.torch
from statekit.arrays.backend import backend
from statekit.arrays.intervals import Interval
from statekit.errors import StateError
from statekit.optim.run import load, mover, settled_group, steps_of
from statekit.optim.steps import Scene
from statekit.state.constants import variant_constants
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts
from statekit.tensors.tensor import Array
from statekit.testing.step_cases import Case, Table, case
from statekit.torch.fast import batching, numba_runner
from statekit.torch.fast.adafactor import FastAdafactor
from statekit.torch.fast.dispatch import FAST, FastMove, fast_path
from statekit.verify.stepping import named
from statekit.verify.verdict import compare

pytestmark = pytest.mark.torch

RATE = 0.01
R, C, B, N = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE
"""One shape with several members, so that stacks are filled; and one of every other kind that has a fast path."""
TABLE: Table = {
    "scalar": ((), ()),
    "vector": ((7,), (N,)),
    "whole": ((3, 5), (N, N)),
    **{f"matrix_{i}": ((6, 4), (R, C)) for i in range(5)},
    "swapped": ((40, 30), (C, R)),
    "stacked": ((2, 3, 4), (B, R, C)),
    "stacked_whole": ((2, 6), (B, N)),
    "heads": ((2, 4, 2, 3), (B, R, C, C)),
}


SETTINGS: Sequence[tuple[str, str, Mapping[str, Any]]] = (
    ("adafactor", "t5x", {}),
    ("adafactor", "t5x", {"beta1": 0.9, "weight_decay_rate": 0.4, "max_parameter_scale": 0.6}),
    ("adafactor", "t5x", {"multiply_by_parameter_scale": False, "clipping_threshold": None, "beta1": 0.5}),
    ("adafactor", "t5x", {"multiply_by_parameter_scale": False, "clipping_threshold": None}),
    ("adafactor", "t5x", {"weight_decay_rate_lr_exponent": 2.0, "global_norm_clip_threshold": 0.5}),
    ("adafactor", "t5x", {"clipping_threshold": 0.1, "epsilon1": 1e-3, "decay_rate": 0.6}),
    ("adafactor", "t5x", {"step_offset": 3}),
    ("adafactor", "t5x", {"step_offset": 3, "beta1": 0.9, "weight_decay_rate": 0.4}),
    ("adafactor", "t2t_early", {"beta1": 0.9}),
    ("adafactor", "mesh_tf", {}),
    ("adafactor", "hf", {"weight_decay_rate": 0.4, "beta1": 0.9, "relative_step": False}),
    ("adafactor", "optax", {"weight_decay_rate": 0.4, "beta1": 0.9, "learning_rate": RATE}),
    ("adafactor", "keras", {"weight_decay_rate": 0.4}),
    ("adamw", "torch", {"weight_decay_rate": 0.4, "maximize": True}),
    ("adamw", "torch", {"weight_decay_rate": 0.0}),
    ("adamw", "optax", {"weight_decay_rate": 0.4, "global_norm_clip_threshold": 0.5}),
    ("adamw", "mesh_tf", {"weight_decay_rate": 0.4}),
    ("adamw", "gpt_neo", {"weight_decay_rate": 0.4, "global_norm_clip_threshold": 0.5}),
    ("lamb", "optax", {"weight_decay_rate": 0.4}),
    ("lans", "mxnet_fused", {"wd": 0.02, "lower_bound": 0.1, "upper_bound": 1.0, "rescale_grad": 0.5}),
    ("lans", "mxnet_gpu", {"begin_num_update": 3}),
    ("lans", "paper", {"wd": 0.02}),
    ("scaled_adam", "gptsovits", {"size_update_period": 2}),
    ("scaled_adam", "pt7", {"clipping_scale": 1.5, "clipping_update_period": 2, "size_update_period": 3}),
    ("scaled_adam", "zip202305", {"size_update_period": 2, "param_max_rms": 0.3}),
    ("scaled_adam", "zip2025", {"clipping_scale": 1.5, "clipping_update_period": 2, "size_update_period": 3}),
    ("scaled_adam", "zip2025", {"size_update_period": 3}),
)
NAMES = [f"{schema}-{variant}-{'-'.join(changes) or 'defaults'}" for schema, variant, changes in SETTINGS]


LOOPED = ("adafactor", "lamb", "lans", "scaled_adam")
"""Schemas with loops for Numba."""
WAYS = [
    pytest.param(*setting, way, id=f"{name}-{way}")
    for setting, name in zip(SETTINGS, NAMES, strict=True)
    for way in (("loops", "eager") if setting[0] in LOOPED else ("eager",))
]


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Says whether loops or eager operations run."""
    chosen: str = request.param
    monkeypatch.setattr(numba_runner, "_numba_is_there", lambda: chosen == "loops")
    return chosen


by_every_way = pytest.mark.parametrize(("schema", "variant", "changes", "way"), WAYS, indirect=["way"])


@dataclass(frozen=True)
class Moved:
    """What fast paths made of a case's state.

    Attributes:
        arrays: (path, `param` or slot) -> value.
        outside: Those with elements that leave the bound of the text, where the text in torch doesn't.
    """

    arrays: Mapping[tuple[str, str], Array]
    outside: tuple[tuple[str, str], ...]


def moved(made: Case, change: Callable[[FastMove], FastMove] = lambda move: move, **wrong: Any) -> Moved:
    """Runs one update of a case by fast paths alone; parameters that haven't one stay out.

    Args:
        made: The case.
        change: What is made of a fast path before it runs.
        wrong: What the scene is told instead of the truth.
    """
    xp, state, group = backend("torch"), made.state, made.state.optimizer.groups[0]
    steps, live = steps_of(state), load(xp, state)
    configs = settled_group(steps, group, state.rules, made.variant)
    scene = Scene(xp, made.variant, RATE, state.counts.updates)
    grads = {path: xp.asarray(grad) for path, grad in made.grads[0].items()}
    reached, _, common = steps.prepare(scene, group, live.params, grads, live.slots, live.shared[0])
    batches: dict[tuple[FastMove, torch.Size], list[str]] = {}
    for path, param in live.params.items():
        move = fast_path(made.schema, made.variant, configs[path], param)
        if move is not None:
            batches.setdefault((move, param.shape), []).append(path)
    before = {path: grad.clone() for path, grad in reached.items()}
    with torch.no_grad():
        for (move, _), paths in batches.items():
            change(move)(
                replace(scene, **wrong),
                [live.params[path] for path in paths],
                [reached[path] for path in paths],
                [dict(live.slots[path]) for path in paths],
                common,
            )
    for path, grad in reached.items():
        assert torch.equal(torch.nan_to_num(grad), torch.nan_to_num(before[path])), "gradients are read only"
    arrays = {
        key: np.asarray(value.numpy())
        for paths in batches.values()
        for path in paths
        for key, value in {
            (path, "param"): live.params[path], **{(path, name): v for name, v in live.slots[path].items()}
        }.items()
    }  # fmt: skip
    bound = made.bound(0, "compiled", contracted=True, sqrt_units=xp.sqrt_units)
    gradients = {path: xp.asarray(grad) for path, grad in made.grads[0].items()}
    text = mover(xp, state)(load(xp, state), gradients, RATE)
    theirs = named(text.params, text.slots, text.shared)
    return Moved(
        arrays,
        tuple(
            key
            for key, value in arrays.items()
            if _outside(value, bound[key]) and not _outside(xp.numpy(theirs[key]), bound[key])
        ),
    )


def _outside(value: Array, bound: Interval) -> int:
    return compare(0, "", "", value, value, value, bound).outside


def variant_of(schema: str) -> str:
    """Returns the first variant of a schema that is tried here."""
    return next(variant for name, variant, _ in SETTINGS if name == schema)


def with_grads(made: Case, change: Any, update: int = 2) -> Case:
    """Returns a case of one update, begun after some others, with gradients changed: (path, gradient) -> gradient."""
    grads = {path: np.asarray(change(path, grad), np.float32) for path, grad in made.grads[update].items()}
    return Case(made.before(update), (grads,))


def random_case(schema: str, variant: str, changes: Mapping[str, Any], seed: int = 0) -> Case:
    """Returns a case over `TABLE`; one whose decay starts at an offset has done as many updates: none is before it."""
    return _random_case(schema, variant, tuple(changes.items()), seed)


@cache
def _random_case(schema: str, variant: str, changes: tuple[tuple[str, Any], ...], seed: int) -> Case:
    made = case(schema, variant, table=TABLE, seed=seed, **dict(changes))
    done = dict(changes).get("step_offset", 0)
    return replace(made, state=replace(made.state, counts=Counts(done, done)))


def as_drawn(path: str, grad: Array) -> Array:
    return grad


def of_size(size: float, path: str, grad: Array) -> Array:
    spread = np.random.default_rng(len(path)).uniform(-6, 6, grad.shape)
    with np.errstate(all="ignore"):
        return (grad * size * 10.0**spread).astype(np.float32)


def about_as_large(size: float, path: str, grad: Array) -> Array:
    return np.asarray(np.sign(grad) * (1.0 + np.abs(grad)) * size)


def poisoned(poison: float, path: str, grad: Array) -> Array:
    changed = np.array(grad)
    changed.flat[grad.size // 2] = poison
    return changed


def tried(
    schema: str, variant: str, changes: Mapping[str, Any], *gradients: Any, update: int = 2, seed: int = 0
) -> Case:
    """Returns a random case with changed gradients, made once: its bound is the same in every way.

    Args:
        schema: Its schema.
        variant: Its variant.
        changes: Hyperparameters that aren't by default.
        gradients: What is made of the gradients, with its own arguments before those; as they are drawn, if nothing.
        update: Before which update.
        seed: Of the parameters and gradients.
    """
    return _tried(schema, variant, tuple(changes.items()), gradients or (as_drawn,), update, seed)


@cache
def _tried(
    schema: str, variant: str, changes: tuple[tuple[str, Any], ...], gradients: Any, update: int, seed: int
) -> Case:
    change, *arguments = gradients
    return with_grads(_random_case(schema, variant, changes, seed), partial(change, *arguments), update)


@pytest.mark.sampled
@by_every_way
@pytest.mark.parametrize("update", [0, 2])
def test_every_element_is_within_the_bound_of_the_text(
    schema: str, variant: str, changes: Mapping[str, Any], way: str, update: int
) -> None:
    for seed in range(2):
        result = moved(tried(schema, variant, changes, update=update, seed=seed))
        assert {path for path, _ in result.arrays} >= {"whole", "vector"}
        assert not result.outside


@pytest.mark.sampled
@by_every_way
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-16, 1e8])
def test_gradients_may_have_any_size_whose_square_is_finite(
    schema: str, variant: str, changes: Mapping[str, Any], way: str, size: float
) -> None:
    assert not moved(tried(schema, variant, changes, of_size, size)).outside


@pytest.mark.sampled
@by_every_way
@pytest.mark.parametrize("size", [3e17, 3e18, 3e19, 3e20])
def test_what_overflows_in_the_text_overflows(
    schema: str, variant: str, changes: Mapping[str, Any], way: str, size: float
) -> None:
    assert not moved(tried(schema, variant, changes, about_as_large, size)).outside


@pytest.mark.parametrize(("schema", "variant"), [("adamw", "mesh_tf"), ("lamb", "optax")])
def test_the_kernel_alone_would_stay_finite(
    schema: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_runner, "_numba_is_there", lambda: False)
    monkeypatch.setattr("statekit.torch.fast.adamw.overflow", lambda *stacks: None)
    made = with_grads(random_case(schema, variant, {}), lambda path, grad: np.sign(grad) * 3e19)
    assert moved(made).outside


@pytest.mark.sampled
@by_every_way
@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_what_is_not_a_number_spreads_as_in_the_text(
    schema: str, variant: str, changes: Mapping[str, Any], way: str, poison: float
) -> None:
    assert not moved(tried(schema, variant, changes, poisoned, poison)).outside


@pytest.mark.sampled
@pytest.mark.parametrize("largest", [5, 2 * 24])
@pytest.mark.parametrize(("schema", "variant"), sorted({setting[:2] for setting in SETTINGS}))
def test_it_does_not_matter_how_many_share_a_stack(
    schema: str, variant: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_runner, "_numba_is_there", lambda: False)
    monkeypatch.setitem(batching.STACK, "cpu", largest)
    for update in (0, 1):
        assert not moved(tried(schema, variant, {}, update=update)).outside


@pytest.mark.sampled(20)
@by_every_way
def test_a_fault_of_a_thousandth_is_noticed(
    schema: str, variant: str, changes: Mapping[str, Any], way: str
) -> None:
    outside = moved(tried(schema, variant, changes), rate=RATE * 1.001).outside
    assert len({path for path, _ in outside}) > len(TABLE) // 2


@pytest.mark.parametrize("piece", [5, 2**18])
@pytest.mark.parametrize("schema", LOOPED)
def test_loops_run_and_threads_change_no_bit(
    schema: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_runner, "_PIECE", piece)
    made = with_grads(random_case(schema, variant_of(schema), {}), as_drawn)
    alone = moved(made).arrays
    used: list[int] = []

    class Watched(ThreadPoolExecutor):
        def submit(self, loop: Any, /, *arguments: Any, **named: Any) -> Any:
            used.append(arguments[1] - arguments[0])
            return super().submit(loop, *arguments, **named)

    monkeypatch.setattr(numba_runner, "_ALONE", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with Watched(3) as threads:
        monkeypatch.setattr(numba_runner, "_threads", lambda process: threads)
        shared = moved(made).arrays
    assert sum(used) > 3
    enough = [key for key in alone if key[0].startswith("matrix")]
    assert all(np.array_equal(alone[key], shared[key]) for key in enough)


@pytest.mark.parametrize("schema", ["lamb", "lans", "scaled_adam"])
def test_a_tensor_may_be_cut_for_several_threads(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_runner, "_PIECE", 5)
    cut = {size: numba_runner.pieces_of([torch.empty(size)]) for size in (1, 7, 15, 24)}
    assert cut == {1: 1, 7: 1, 15: 3, 24: 6}, "equal pieces, or one"
    assert numba_runner.in_reach([[torch.empty(2**17)]], pieces=64), "one tensor for all threads"
    made = with_grads(random_case(schema, variant_of(schema), {}), as_drawn)
    assert not moved(made).outside


def test_the_loops_of_lans_divide_by_no_infinite_reciprocal() -> None:
    after = []
    for foreach in (False, True):
        weight = torch.nn.Parameter(torch.ones(8))
        weight.grad = torch.arange(8.0) % 2
        statekit.torch.LANS([("weight", weight)], lr=RATE, epsilon=1e-40, foreach=foreach).step()
        after.append(weight.detach())
    assert torch.equal(after[0].isfinite(), after[1].isfinite()), "of 0 / 1e-40"


@pytest.mark.parametrize(
    ("schema", "variant", "changes"),
    [
        ("adafactor", "t5x", {}),
        ("adamw", "torch", {}),
        ("lamb", "optax", {"weight_decay_rate": 5.0}),
        ("lans", "mxnet_fused", {"wd": 5.0}),
        ("scaled_adam", "zip2025", {}),
    ],
)
def test_a_wrong_step_is_noticed(schema: str, variant: str, changes: Mapping[str, Any]) -> None:
    made = with_grads(random_case(schema, variant, changes), as_drawn)
    assert moved(made, step=made.state.counts.updates + 1).outside


def test_loops_reach_for_no_memory_but_what_they_know() -> None:
    good = torch.ones(3, 4)
    assert numba_runner.in_reach([[good, good], [good, good]])
    for other in (
        good.double(),
        good.bfloat16(),
        torch.ones(4, 3).t(),
        good[:2],
        torch.ones(5, 4),
        good.to("meta"),
    ):
        assert not numba_runner.in_reach([[good, good], [good, other]])
    with pytest.raises(StateError, match="fit"):
        numba_runner.Items.of([[good, good]], (3, 4)).run(lambda *arguments: None, torch.ones(1, 3))


def test_autograd_notices_that_loops_move_parameters() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = statekit.torch.LANS([("weight", weight)], lr=RATE)
    weight.grad = torch.ones(3, 3)
    loss = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, weight)


def test_rows_taken_for_columns_are_noticed_in_a_square() -> None:
    square: Table = {"square": ((5, 5), (R, C)), "vector": ((7,), (N,))}
    made = with_grads(case("adafactor", "t5x", table=square), as_drawn)

    def swapped(move: FastMove) -> FastMove:
        assert isinstance(move, FastAdafactor)
        return replace(move, sides=move.sides[::-1])

    assert not moved(made).outside
    assert ("square", "v_row") in moved(made, swapped).outside


def config_of(schema: str, variant: str) -> Any:
    """Returns what the update of a matrix depends on beside arrays."""
    made = case(schema, variant, table={"matrix": ((6, 4), (R, C))})
    return settled_group(steps_of(made.state), made.state.optimizer.groups[0], made.state.rules, variant)[
        "matrix"
    ]


def hyper_of(config: Any) -> Any:
    """Returns the hyperparameters in what an update depends on."""
    return getattr(config, "hyper", config)


@pytest.mark.parametrize("schema", FAST)
def test_a_new_option_goes_the_way_of_the_text_until_a_path_follows_it(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, param = variant_of(schema), torch.ones(6, 4)
    config = config_of(schema, variant)
    hyper = hyper_of(config)
    extended = make_dataclass(
        "Extended", [("new_option", bool)], bases=(type(hyper),), frozen=True, kw_only=True
    )
    known = {field.name: getattr(hyper, field.name) for field in fields(hyper)}

    def path(new_option: bool) -> FastMove | None:
        more = extended(**known, new_option=new_option)
        return fast_path(
            schema, variant, replace(config, hyper=more) if hasattr(config, "hyper") else more, param
        )

    assert fast_path(schema, variant, config, param) is not None
    assert path(True) is None and path(False) is None, "an option that the schema doesn't know"
    rules = load_schema(schema)
    described = {**rules.hyperparameters, "new_option": {"if_absent": False}}
    newer = replace(rules, hyperparameters=described)
    monkeypatch.setattr(batching, "load_schema", lambda name: newer)
    assert path(True) is None, "an option that does something"
    assert path(False) is not None, "an option that is off"


@pytest.mark.parametrize("schema", FAST)
@pytest.mark.parametrize(
    ("effect", "is_followed"),
    [("update", False), ("slots", False), ("exceptions", False), ("rounding", True)],
)
def test_a_new_difference_between_variants_goes_the_way_of_the_text_unless_it_only_rounds(
    schema: str, effect: str, is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant, rules = variant_of(schema), load_schema(schema)
    config, constants = (
        config_of(schema, variant),
        {**variant_constants(schema, variant), "new_form": "usual"},
    )
    data = {**rules.data, "differences": {**rules.data["differences"], "new_form": {"effect": effect}}}
    monkeypatch.setattr(batching, "variant_constants", lambda *names: constants)
    assert fast_path(schema, variant, config, torch.ones(6, 4)) is None, (
        "a form that the schema doesn't explain"
    )
    monkeypatch.setattr(batching, "load_schema", lambda name: replace(rules, data=data))
    assert (fast_path(schema, variant, config, torch.ones(6, 4)) is not None) == is_followed


@pytest.mark.parametrize("schema", FAST)
def test_a_new_slot_goes_the_way_of_the_text(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, rules = variant_of(schema), load_schema(schema)
    config, known = config_of(schema, variant), next(iter(rules.slots.values()))
    assert fast_path(schema, variant, config, torch.ones(6, 4)) is not None
    for owner, is_followed in ((variant, False), ("another", True)):
        more = {**rules.slots, "drift": replace(known, name="drift", aliases={owner: "drift"})}
        other = replace(rules, slots=more)
        monkeypatch.setattr(batching, "load_schema", lambda name, other=other: other)
        assert (fast_path(schema, variant, config, torch.ones(6, 4)) is not None) == is_followed


@pytest.mark.parametrize("schema", FAST)
def test_what_a_path_follows_is_of_its_schema(schema: str) -> None:
    listed = importlib.import_module(f"statekit.torch.fast.{schema}").FOLLOWED
    read = {field.name for field in fields(hyper_of(config_of(schema, variant_of(schema))))}
    assert listed.hyper.keys() <= read
    assert listed.forms.keys() <= variant_constants(schema, variant_of(schema)).keys()
    assert {*listed.slots} <= load_schema(schema).slots.keys()


@pytest.mark.parametrize("schema", FAST)
def test_what_they_are_not_made_for_is_left_to_the_text(schema: str) -> None:
    variant = variant_of(schema)
    config = config_of(schema, variant)

    class Subclass(torch.Tensor):
        pass

    plain = torch.ones(6, 4)
    assert fast_path(schema, variant, config, plain) == fast_path(
        schema, variant, config, torch.nn.Parameter(plain)
    )
    for other in (
        plain.bfloat16(), plain.double(), plain.t(), plain[:0], plain.as_subclass(Subclass), plain.to_sparse()
    ):  # fmt: skip
        assert fast_path(schema, variant, config, other) is None
