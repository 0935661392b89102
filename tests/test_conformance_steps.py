"""Every step obeys the laws of `statekit.testing.steps` in every backend, and each law notices who breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replaying import BACKENDS, COMPILING, marks
from statekit.arrays.backend import backend
from statekit.arrays.intervals import IntervalBackend
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.optim import adamw, run
from statekit.optim.run import STEPPED
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis
from statekit.testing.step_cases import TABLE, Case, Table, case
from statekit.testing.steps import COSTLY, LAWS, Law, Trial, require_refusal

EVERY = {**LAWS, **COSTLY}
VARIANTS = [(schema, variant) for schema in STEPPED for variant in load_schema(schema).stepped]
SAMPLE = {
    "jax": (
        ("adafactor", "t5x"), ("adafactor", "optax"), ("adamw", "optax"), ("lamb", "optax"),
        ("lans", "mxnet_fused"), ("scaled_adam", "zip2025"),
    ),
    "tensorflow": (
        ("adafactor", "t2t_late"), ("adafactor", "keras"), ("adamw", "keras"), ("lamb", "keras"),
        ("lans", "mxnet_unfused"), ("scaled_adam", "gptsovits"),
    ),
}  # fmt: skip
"""What backends that compile see in `make test`, with everything switched on; `make test-all` has the others too."""
COSTLY_SAMPLE = {
    "jax": (("adamw", "optax"),),
    "tensorflow": (("adamw", "keras"),),
}
LOW = ("bfloat16", "float16")
ADAFACTORS = {("adafactor", v) for v in ("t5x", "t2t_early", "t2t_late", "mesh_tf", "hf", "fairseq", "torch")}
SCALED_ADAMS = {(schema, variant) for schema, variant in VARIANTS if schema == "scaled_adam"}
MXNETS = {("lans", variant) for variant in ("mxnet_fused", "mxnet_unfused", "mxnet_gpu")}
# Their epsilon is 0 in float16: without a slope they divide 0 by 0, as the originals do (tests/living).
ADAMS = {
    ("adamw", "torch"),
    ("adamw", "optax"),
    ("adamw", "maxtext"),
    ("adamw", "keras"),
    ("adamw", "keller"),
    ("adamw", "moonlight"),
    ("lamb", "optax"),
    ("adafactor", "optax"),
}
MUONS = {("muon", variant) for variant in ("torch", "keller", "moonlight", "emerging")}
FOLLOWED = {
    "bfloat16": ADAFACTORS | SCALED_ADAMS | ADAMS | MXNETS | MUONS,
    "float16": ADAFACTORS | SCALED_ADAMS | ADAMS | MXNETS,
}
"""Who steps parameters of low precision; everybody else refuses them."""
ALONE = {("adamw", "keras")}
"""Who does so without clipping and averages, beside which they refuse it by name."""
LOW_SAMPLE = {
    ("adafactor", "t5x"),
    ("adafactor", "torch"),
    ("lans", "mxnet_fused"),
    ("scaled_adam", "zip2025"),
}
"""Of these, whom `make test` shows to PyTorch too."""


@cache
def shared(schema: str, variant: str, full: bool, dtype: str = "float32") -> Case:
    """Returns a case that several tests look at: its states and bounds are computed once."""
    return case(schema, variant, full=full, dtype=dtype)


def obey(trial: Trial, laws: Mapping[str, Law]) -> None:
    """Holds a trial to some laws, and says of all that it breaks."""
    broken = {}
    for name, law in laws.items():
        try:
            law(trial)
        except AssertionError as error:
            broken[name] = str(error)
    assert not broken


def trials(sample: Mapping[str, Any]) -> Iterator[Any]:
    for name in BACKENDS:
        for schema, variant in VARIANTS:
            for full in (True, False):
                sampled = name not in COMPILING or (schema, variant) in sample[name]
                slow = name != "numpy" and not (full and sampled)
                label = f"{name}-{schema}-{variant}-{'full' if full else 'defaults'}"
                yield pytest.param(name, schema, variant, full, id=label, marks=marks(name, slow))


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "schema", "variant", "full"), [*trials(SAMPLE)])
def test_every_step_obeys_the_laws(name: str, schema: str, variant: str, full: bool) -> None:
    obey(Trial(shared(schema, variant, full), backend(name)), LAWS)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "schema", "variant", "full"), [*trials(COSTLY_SAMPLE)])
def test_every_step_obeys_the_laws_of_company(name: str, schema: str, variant: str, full: bool) -> None:
    obey(Trial(shared(schema, variant, full), backend(name)), COSTLY)


def low_precision() -> Iterator[Any]:
    for name in BACKENDS:
        for schema, variant in VARIANTS:
            for dtype in LOW:
                sampled = name == "torch" and (schema, variant) in LOW_SAMPLE
                slow = name != "numpy" and not sampled and (schema, variant) in FOLLOWED[dtype]
                yield pytest.param(
                    name, schema, variant, dtype,
                    id=f"{name}-{schema}-{variant}-{dtype}", marks=marks(name, slow),
                )  # fmt: skip


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("name", "schema", "variant", "dtype"), [*low_precision()])
def test_low_precision_is_followed_or_refused(name: str, schema: str, variant: str, dtype: str) -> None:
    alone = (schema, variant) in ALONE
    trial = Trial(shared(schema, variant, not alone, dtype), backend(name))
    if (schema, variant) not in FOLLOWED[dtype]:
        require_refusal(trial)
    else:
        laws = LAWS if name in COMPILING else EVERY
        vanishes = dtype == "float16" and (schema, variant) in ADAMS
        obey(trial, {law: laws[law] for law in laws if not (vanishes and law == "goes_on_without_slope")})


def test_the_table_has_every_kind_of_rule() -> None:
    axes = {axes for _, axes in TABLE.values()}
    assert {len(labels) for labels in axes} == {0, 1, 2, 3, 4}
    assert {axis for labels in axes for axis in labels} == set(Axis)
    assert any(
        shape == other and a == b[::-1] != b for shape, a in TABLE.values() for other, b in TABLE.values()
    )


sizes = st.integers(0, 6)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """A few parameters of any small shape, factored in any way that has both a row and a column, or none."""
    table = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(sizes, max_size=4)))
        labels = tuple(draw(st.sampled_from(Axis)) for _ in shape)
        factored = Axis.ROW in labels and Axis.COLUMN in labels
        table[f"p{number}"] = (shape, labels if factored else (Axis.NONE,) * len(shape))
    return table


ANY_SHAPE = {
    name: LAWS[name] for name in ("keeps_shapes_and_dtypes", "resumes_bit_for_bit", "stays_within_the_bound")
}


def any_case(table: Table, which: int, full: bool, seed: int) -> Case:
    schema, variant = VARIANTS[which]
    return case(schema, variant, full=full, table=table, updates=3, seed=seed)


drawn = given(tables(), st.integers(0, len(VARIANTS) - 1), st.booleans(), st.integers(0, 2**32))


@drawn
@settings(max_examples=40, derandomize=True)
def test_any_shapes_and_numbers_obey_the_laws(table: Table, which: int, full: bool, seed: int) -> None:
    obey(Trial(any_case(table, which, full, seed), NumpyBackend()), ANY_SHAPE)


@pytest.mark.slow
@pytest.mark.torch
@drawn
@settings(max_examples=600)
def test_many_shapes_and_numbers_obey_the_laws(table: Table, which: int, full: bool, seed: int) -> None:
    made = any_case(table, which, full, seed)
    for name in ("numpy", "torch"):
        obey(Trial(made, backend(name)), ANY_SHAPE)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def after(change: Callable[..., Any]) -> Wrapper:
    """Changes what an update returns, but not in the bound's."""

    def wrapper(right: Callable[..., Any]) -> Callable[..., Any]:
        def update(scene: Any, param: Any, grad: Any, slots: Any, config: Any, common: Any) -> Any:
            param_after, new = right(scene, param, grad, slots, config, common)
            if isinstance(scene.xp, IntervalBackend):
                return param_after, new
            return change(param, grad, param_after, new)

        return update

    return wrapper


def widened(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return p, {**new, "m": new["m"].astype(np.float64)}


def in_place(param: Any, grad: Any, p: Any, new: Any) -> Any:
    if param.flags.writeable:
        param += 1
    return p, new


def off(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return p + p * np.float32(1e-5), new


def rank_zero_apart(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return (np.nextafter(p, np.float32(9)) if p.shape == () else p), new


def drifting(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return p + np.float32(1e-3), new


def nan_stopped(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return np.where(np.isnan(p), param, p), new


def infinity_everywhere(param: Any, grad: Any, p: Any, new: Any) -> Any:
    return (np.full_like(p, np.nan) if np.isinf(grad).any() else p), new


def counting(right: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def update(scene: Any, *arguments: Any) -> Any:
        calls[0] += 1
        p, new = right(scene, *arguments)
        return p + np.float32(calls[0]), new

    return update


def first_halved(right: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(scene: Any, group: Any, params: Any, grads: Any, slots: Any, shared: Any) -> Any:
        first = group.paths[0]
        return right(scene, group, params, {**grads, first: grads[first] * np.float32(0.5)}, slots, shared)

    return prepare


def shared_out(right: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(scene: Any, group: Any, params: Any, grads: Any, slots: Any, shared: Any) -> Any:
        mean = {path: grad / np.float32(len(grads)) for path, grad in grads.items()}
        return right(scene, group, params, mean, slots, shared)

    return prepare


def zeros_for_missing(right: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(scene: Any, group: Any, params: Any, grads: Any, slots: Any, shared: Any) -> Any:
        full = {path: grads.get(path, np.zeros_like(p)) for path, p in params.items()}
        return right(scene, group, params, full, slots, shared)

    return prepare


BROKEN: dict[str, tuple[str, Wrapper]] = {
    "keeps_shapes_and_dtypes": ("update", after(widened)),
    "leaves_its_arguments_alone": ("update", after(in_place)),
    "resumes_bit_for_bit": ("update", counting),
    "stays_within_the_bound": ("update", after(off)),
    "treats_one_element_as_a_scalar": ("update", after(rank_zero_apart)),
    "goes_on_without_slope": ("update", after(drifting)),
    "spreads_nan_as_declared": ("update", after(nan_stopped)),
    "keeps_infinity_where_nan_would_go": ("update", after(infinity_everywhere)),
    "equals_itself_uncompiled": ("update", after(off)),
    "ignores_the_order_of_parameters": ("prepare", first_halved),
    "ignores_empty_parameters": ("prepare", shared_out),
    "passes_over_missing_gradients": ("prepare", zeros_for_missing),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_law_notices_a_step_that_breaks_it(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrapper = BROKEN[law]
    made = case("adamw", "optax", weight_decay_rate=0.0)
    EVERY[law](Trial(made, NumpyBackend()))
    monkeypatch.setattr(adamw, attribute, wrapper(getattr(adamw, attribute)))
    with pytest.raises(AssertionError):
        EVERY[law](Trial(replace(made, _kept={}), NumpyBackend()))


@pytest.mark.torch
def test_a_law_notices_batches_that_are_taken_apart_in_another_order() -> None:
    from statekit.arrays.torch_backend import TorchBackend

    class Reversed(TorchBackend):
        def unstack(self, value: Any) -> Any:
            return tuple(reversed(value.unbind()))

    made, law = case("adamw", "optax"), COSTLY["equals_itself_batched"]
    law(Trial(made, TorchBackend()))
    with pytest.raises(AssertionError):
        law(Trial(made, Reversed()))


def test_every_law_is_shown_to_notice_something() -> None:
    assert {*BROKEN, "equals_itself_batched"} == set(EVERY)


def test_a_step_that_follows_what_it_should_refuse_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(case("adamw", "mesh_tf", dtype="float16"), NumpyBackend())
    require_refusal(trial)
    monkeypatch.setattr(adamw, "check", lambda state, group: None)
    with pytest.raises(AssertionError, match="steps a case that it declares as unsupported"):
        require_refusal(trial)


def test_the_count_of_a_parameter_is_its_own_where_the_schema_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, law = case("adamw", "torch"), COSTLY["passes_over_missing_gradients"]
    law(Trial(made, NumpyBackend()))
    monkeypatch.setattr(run, "counts_apart", lambda schema, variant: False)
    with pytest.raises(AssertionError, match="behind"):
        law(Trial(made, NumpyBackend()))
