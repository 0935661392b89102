"""AdamW and LAMB beside the originals that are installed, and at the edges where rules are decided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replaying import everywhere, judged, marks
from statekit.arrays.backend import BACKEND_NAMES, Backend, backend
from statekit.errors import StateError, UnknownRuleError
from statekit.optim import adamw, lamb
from statekit.optim.gradient_clipping import CLIP, Limits
from statekit.optim.run import initial, load, mover, store
from statekit.optim.steps import Execution
from statekit.state.hyperparameters import IS_EXCLUDED
from statekit.state.schema import load_schema
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import DTYPES, Array, in_memory
from statekit.verify.recorder import Recorder
from statekit.verify.recording import open_recording

SHAPES: dict[str, tuple[int, ...]] = {"dense/kernel": (3, 4), "dense/bias": (4,), "gate": (), "none": (0, 2)}
Arrays = dict[str, Array]


@pytest.fixture(
    params=[pytest.param(name, marks=marks(name, name == "tensorflow")) for name in BACKEND_NAMES]
)
def xp(request: pytest.FixtureRequest) -> Backend:
    return backend(request.param)


def drawn(seed: int, *leave_out: str) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        path: np.asarray(rng.normal(size=shape), np.float32)
        for path, shape in SHAPES.items()
        if path not in leave_out
    }


def gradients(updates: int) -> list[Arrays]:
    """One gradient for each update; the bias gets none but zeros in the first."""
    grads = [drawn(100 + i) for i in range(updates)]
    grads[0]["dense/bias"] = np.zeros(4, np.float32)
    return grads


# The originals, live. ------------------------------------------------------------------------------------------------


def record_torch(folder: Path, **options: Any) -> None:
    import torch

    params = {path: torch.nn.Parameter(torch.from_numpy(array)) for path, array in drawn(1).items()}
    optimizer = torch.optim.AdamW(list(params.values()), lr=0.02, **options)
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    hyperparameters = {
        "schema": "adamw",
        "variant": "torch",
        "groups": [{**group, "params": list(params)}],
        "counts": {"slots": ["step"], "dtype": "float32"},
    }

    def params_now() -> Arrays:
        return {path: p.detach().numpy().copy() for path, p in params.items()}

    def slots() -> dict[str, Arrays]:
        return {
            path: {name: t.numpy().copy() for name, t in optimizer.state[p].items()}
            for path, p in params.items()
        }

    recorder = Recorder(folder, system="torch_adafactor", hyperparameters=hyperparameters)
    recorder.start(params_now(), {})
    for update, grads in enumerate(gradients(4)):
        rate = optimizer.param_groups[0]["lr"] = 0.02 / (1 + update)
        for path, grad in grads.items():
            params[path].grad = torch.from_numpy(grad)
        optimizer.step()
        recorder.update(grads, params_now(), slots(), rate)
    recorder.close()


TORCH: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.0},
    "for-loop": {"foreach": False, "betas": (0.7, 0.95)},
    "foreach": {"foreach": True, "eps": 1e-3},
    "fused": {"fused": True, "betas": (0.4, 0.99)},
    "amsgrad": {"amsgrad": True, "betas": (0.9, 0.5)},
    "maximize": {"maximize": True, "weight_decay": 0.3},
    "no memory": {"betas": (0.0, 0.0)},
}


@pytest.mark.torch
@pytest.mark.parametrize("case", TORCH)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_adamw_is_pytorchs(case: str, name: str, tmp_path: Path) -> None:
    record_torch(tmp_path / "run", **TORCH[case])
    with open_recording(tmp_path / "run") as recording:
        assert judged(recording, backend(name)).passed


def record_optax(
    folder: Path,
    schema: str,
    chain: Callable[[Any], Any],
    hyperparameters: Mapping[str, Any],
    jit: bool = True,
) -> None:
    """Records a chain in which exactly one link has mu and nu; `gate` starts at zero."""
    import jax
    import jax.numpy as jnp
    import optax

    rate = 0.05
    start = drawn(2, "none") | {"gate": np.zeros((), np.float32)}
    params = {path: jnp.asarray(array) for path, array in start.items()}
    tx = chain(rate)
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update

    def slots() -> dict[str, Arrays]:
        link = next(
            part for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(part, "nu")
        )
        names = [name for name in ("mu", "nu", "nu_max") if hasattr(link, name)]
        return {path: {name: np.asarray(getattr(link, name)[path]) for name in names} for path in start}

    arguments = {"schema": schema, "variant": "optax", "groups": [{**hyperparameters, "params": list(start)}]}
    execution: Execution = "compiled" if jit else "op_by_op"
    recorder = Recorder(folder, system="optax_adafactor", hyperparameters=arguments, execution=execution)
    recorder.start(start, slots())
    for grads in gradients(4):
        del grads["none"]
        updates, state = update({path: jnp.asarray(g) for path, g in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
        recorder.update(grads, {path: np.asarray(p) for path, p in params.items()}, slots(), rate)
    recorder.close()


def optax_defaults(schema: str, **changes: Any) -> dict[str, Any]:
    return {**load_schema(schema).variant("optax")["defaults"], **changes}


def mask(params: Mapping[str, Any]) -> dict[str, bool]:
    return {path: value.ndim > 1 for path, value in params.items()}


def _optax_cases() -> dict[str, tuple[str, Callable[[Any], Any], dict[str, Any]]]:
    import jax.numpy as jnp
    import optax

    spared = {path: len(shape) < 2 for path, shape in SHAPES.items()}
    return {
        "plain": ("adamw", optax.adamw, {}),
        "masked": (
            "adamw",
            lambda rate: optax.adamw(rate, weight_decay=0.3, mask=mask),
            {"weight_decay_rate": 0.3, "exclude_from_weight_decay": spared},
        ),
        "nesterov": (
            "adamw",
            lambda rate: optax.adamw(rate, nesterov=True, b1=0.7),
            {"nesterov": True, "beta1": 0.7},
        ),
        "epsilons": (
            "adamw",
            lambda rate: optax.adamw(rate, eps=1e-2, eps_root=1e-3),
            {"epsilon": 1e-2, "epsilon_root": 1e-3},
        ),
        "amsgrad": (
            "adamw",
            lambda rate: optax.chain(
                optax.scale_by_amsgrad(), optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(rate)
            ),
            {"amsgrad": True},
        ),
        "bfloat16 momentum": (
            "adamw",
            lambda rate: optax.adamw(rate, mu_dtype=jnp.bfloat16),
            {"dtype_momentum": "bfloat16"},
        ),
        "clipped by norm": (
            "adamw",
            lambda rate: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate)),
            {"global_norm_clip_threshold": 0.5},
        ),
        "not clipped by norm": (
            "adamw",
            lambda rate: optax.chain(optax.clip_by_global_norm(1e3), optax.adamw(rate)),
            {"global_norm_clip_threshold": 1e3},
        ),
        "lamb": ("lamb", optax.lamb, {}),
        "lamb with decay": (
            "lamb",
            lambda rate: optax.lamb(rate, weight_decay=0.3, eps_root=1e-3, mask=mask),
            {"weight_decay_rate": 0.3, "epsilon_root": 1e-3, "exclude_from_weight_decay": spared},
        ),
    }


OPTAX = (
    "plain", "masked", "nesterov", "epsilons", "amsgrad", "bfloat16 momentum", "clipped by norm",
    "not clipped by norm", "lamb", "lamb with decay",
)  # fmt: skip


@pytest.mark.jax
@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", OPTAX)
def test_adamw_and_lamb_are_optaxs(case: str, tmp_path: Path) -> None:
    schema, chain, hyperparameters = _optax_cases()[case]
    record_optax(tmp_path / "run", schema, chain, optax_defaults(schema, **hyperparameters))
    for name in ("numpy", "jax"):
        with open_recording(tmp_path / "run") as recording:
            assert judged(recording, backend(name)).passed, name


@pytest.mark.jax
def test_a_bfloat16_momentum_is_rounded_twice_where_nothing_is_compiled(tmp_path: Path) -> None:
    schema, chain, hyperparameters = _optax_cases()["bfloat16 momentum"]
    record_optax(tmp_path / "run", schema, chain, optax_defaults(schema, **hyperparameters), jit=False)
    with open_recording(tmp_path / "run") as recording:
        assert judged(recording, backend("numpy")).passed


def record_keras(folder: Path, kind: str, excluded: list[str] | None, **options: Any) -> None:
    import keras

    start = drawn(3, "none")
    variables = [keras.Variable(array, name=path.rpartition("/")[2]) for path, array in start.items()]
    optimizer = getattr(keras.optimizers, kind)(learning_rate=0.04, **options)
    if excluded:
        optimizer.exclude_from_weight_decay(var_names=excluded)
    optimizer.build(variables)
    slots = {"momentum": optimizer._momentums, "velocity": optimizer._velocities}
    slots |= {"velocity_hat": optimizer._velocity_hats} if options.get("amsgrad") else {}
    slots |= {"average": optimizer._model_variables_moving_average} if options.get("use_ema") else {}

    def values_now() -> tuple[Arrays, dict[str, Arrays]]:
        values = {path: v.numpy().copy() for path, v in zip(start, variables, strict=True)}
        arrays = {path: {n: of[i].numpy().copy() for n, of in slots.items()} for i, path in enumerate(start)}
        return values, arrays

    schema = "lamb" if kind == "Lamb" else "adamw"
    arguments = {**optimizer.get_config(), "exclude_from_weight_decay": excluded, "params": list(start)}
    hyperparameters = {"schema": schema, "variant": "keras", "groups": [arguments]}
    recorder = Recorder(folder, system="keras", hyperparameters=hyperparameters, execution="op_by_op")
    recorder.start(*values_now())
    for grads in gradients(4):
        optimizer.apply([grads[path] for path in start])
        recorder.update({path: grads[path] for path in start}, *values_now(), float(optimizer.learning_rate))
    recorder.close()


KERAS: dict[str, tuple[str, list[str] | None, dict[str, Any]]] = {
    "plain": ("AdamW", None, {}),
    "excluded": ("AdamW", ["bias", "gate"], {"weight_decay": 0.3, "epsilon": 1e-3}),
    "averages": ("AdamW", None, {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2}),
    "clipped": ("AdamW", None, {"clipnorm": 0.3}),
    "clipped values": ("AdamW", None, {"clipvalue": 0.2, "amsgrad": True}),
    "clipped together": ("AdamW", None, {"global_clipnorm": 0.5, "loss_scale_factor": 8.0}),
    "lamb": ("Lamb", ["bias"], {"weight_decay": 0.2}),
    "lamb averages": ("Lamb", None, {"use_ema": True, "global_clipnorm": 0.5}),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize("case", KERAS)
def test_adamw_and_lamb_are_keras_own(case: str, tmp_path: Path) -> None:
    kind, excluded, options = KERAS[case]
    record_keras(tmp_path / "run", kind, excluded, **options)
    with open_recording(tmp_path / "run") as recording:
        assert judged(recording, backend("numpy")).passed


# Edges. --------------------------------------------------------------------------------------------------------------


def state_of(schema: str, variant: str, params: Arrays, **changes: Any) -> TrainState:
    given = {**load_schema(schema).variant(variant)["defaults"], **changes}
    group = Group(tuple(params), given)
    tensors = {path: in_memory(np.asarray(array), path) for path, array in params.items()}
    return initial(TrainState(tensors, {}, Optimizer(schema, variant, (group,)), Counts(0, 0)))


def run(xp: Backend, state: TrainState, *grads: Arrays, lr: float = 0.1) -> TrainState:
    move, live = mover(xp, state), load(xp, state)
    for grad in grads:
        live = move(live, {path: xp.asarray(np.asarray(g)) for path, g in grad.items()}, lr)
    return store(xp, live, state)


def values(state: TrainState) -> dict[str, Array]:
    slots = {
        f"{path}/{name}": t.read() for path, tensors in state.slots.items() for name, t in tensors.items()
    }
    return {path: tensor.read() for path, tensor in state.params.items()} | slots


def same(left: TrainState, right: TrainState, digits: float = 0.0) -> None:
    ours, theirs = values(left), values(right)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert (array.dtype, array.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert np.allclose(array, theirs[name], rtol=digits, atol=digits, equal_nan=True), name


RULES = [
    *(f"adamw {variant}" for variant in load_schema("adamw").stepped),
    *(f"lamb {variant}" for variant in load_schema("lamb").stepped),
]


@pytest.mark.parametrize(("name", "rule"), everywhere(RULES, ("adamw keras", "lamb optax")))
def test_shapes_and_dtypes_stay_and_a_run_may_pause(name: str, rule: str) -> None:
    (schema, variant), xp = rule.split(), backend(name)
    state, grads = state_of(schema, variant, drawn(4)), gradients(4)
    through = run(xp, state, *grads)
    paused = run(xp, run(xp, state, *grads[:2]), *grads[2:])
    same(through, paused)
    assert through.counts == Counts(4, 4)
    for slot, array in values(state).items():
        assert (values(through)[slot].shape, values(through)[slot].dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_parameters_changes_nothing(rule: str) -> None:
    schema, variant = rule.split()
    params, grads, numpy = drawn(5), gradients(2), backend("numpy")
    turned = dict(reversed(params.items()))
    there = run(numpy, state_of(schema, variant, params), *grads)
    back = run(numpy, state_of(schema, variant, turned), *grads)
    same(there, back)


@pytest.mark.parametrize(("name", "rule"), everywhere(RULES, ("adamw torch", "lamb keras")))
def test_a_nan_stays_where_it_is_unless_a_norm_spreads_it(name: str, rule: str) -> None:
    (schema, variant), xp = rule.split(), backend(name)
    params, grads = drawn(6, "none"), drawn(7, "none")
    grads["dense/kernel"][1, 2] = np.nan
    after = run(xp, state_of(schema, variant, params), grads)
    nan = np.isnan(after.params["dense/kernel"].read())
    spread = (schema, variant) == ("lamb", "optax")  # Keras takes 1 for a ratio that isn't above 0
    assert nan.all() if spread else nan.sum() == 1
    assert np.isnan(after.slots["dense/kernel"]["m"].read()).sum() == 1
    assert not np.isnan(after.params["dense/bias"].read()).any()


@pytest.mark.parametrize("variant", load_schema("lamb").stepped)
def test_the_ratio_is_1_where_a_norm_is_0(variant: str, xp: Backend) -> None:
    zero = {"a": np.zeros(3, np.float32)}
    grads = {"a": np.asarray([1.0, -2.0, 0.5], np.float32)}
    after = run(xp, state_of("lamb", variant, zero, epsilon=0.0), grads)
    assert np.allclose(after.params["a"].read(), -0.1 * np.sign(grads["a"]), rtol=1e-3)
    still = run(xp, state_of("lamb", variant, {"a": np.ones(3, np.float32)}), zero)
    assert np.array_equal(still.params["a"].read(), np.ones(3))


def test_amsgrad_never_forgets_the_largest_moment(xp: Backend) -> None:
    params = {"a": np.ones(2, np.float32)}
    large, small = ({"a": np.full(2, size, np.float32)} for size in (10.0, 0.01))
    for variant in ("torch", "optax", "keras"):
        state = run(xp, state_of("adamw", variant, params, amsgrad=True, beta2=0.5), large, *[small] * 4)
        v, v_max = (state.slots["a"][name].read() for name in ("v", "v_max"))
        assert np.all(v < 5) and np.all(v_max >= 49)


def test_averages_follow_parameters_without_a_gradient(xp: Backend) -> None:
    params = {"a": np.ones(2, np.float32), "b": np.full(2, 3.0, np.float32)}
    state = state_of("adamw", "keras", params, use_ema=True, ema_momentum=0.5)
    after = run(xp, state, {"a": np.ones(2, np.float32)})
    assert np.array_equal(after.params["b"].read(), params["b"])
    assert np.array_equal(after.slots["b"]["m"].read(), np.zeros(2))
    assert np.array_equal(after.slots["b"]["average"].read(), params["b"])


def test_a_parameter_without_a_gradient_falls_behind_where_each_counts(xp: Backend) -> None:
    ones = np.ones(2, np.float32)
    pair = run(xp, state_of("adamw", "torch", {"a": ones, "b": ones}), {"a": ones}, {"a": ones, "b": ones})
    alone = run(xp, state_of("adamw", "torch", {"b": ones}), {"b": ones})
    assert pair.counts.behind == {"b": 1}
    assert np.array_equal(pair.params["b"].read(), alone.params["b"].read())
    shared = run(xp, state_of("adamw", "keras", {"a": ones, "b": ones}), {"a": ones}, {"a": ones, "b": ones})
    assert not shared.counts.behind


@pytest.mark.parametrize(
    ("form", "excluded", "spared"),
    [
        ("name_regex", ["norm", "bias"], {"enc/norm/kernel", "enc/dense/bias", "compute_output_bias/w"}),
        ("last_name_regex", ["norm", "bias"], {"enc/dense/bias"}),
        ("groups", ["bias"], set()),
        ("name_regex", None, set()),
    ],
)
def test_exclusion_by_name_is_each_systems_own(
    form: str, excluded: list[str] | None, spared: set[str]
) -> None:
    paths = ["enc/norm/kernel", "enc/dense/bias", "enc/dense/kernel", "compute_output_bias/w"]
    assert {path for path in paths if IS_EXCLUDED[form](path, excluded)} == spared


def test_exclusion_by_mask() -> None:
    assert IS_EXCLUDED["mask"]("a", {"a": True, "b": False}) and not IS_EXCLUDED["mask"](
        "b", {"a": True, "b": False}
    )
    assert not IS_EXCLUDED["mask"]("a", None)
    assert IS_EXCLUDED["mask"]("dense/bias", ["bias"]) and not IS_EXCLUDED["mask"]("dense/kernel", ["bias"])
    with pytest.raises(UnknownRuleError, match="true or false for c"):
        IS_EXCLUDED["mask"]("c", {"a": True, "b": False})


OFF = Limits(None, None, None, None)


@pytest.mark.parametrize("form", ["base_class", "chain", "global_norm"])
def test_an_infinite_norm_does_what_each_system_does(form: str, xp: Backend) -> None:
    limits = replace(OFF, global_norm_clip_threshold=1.0)
    grads = {"a": xp.asarray(np.asarray([np.inf, 1.0], np.float32)), "b": xp.asarray(np.ones(1, np.float32))}
    clip = xp.compile(lambda given: CLIP[form](xp, given, limits))
    clipped = {path: xp.numpy(g) for path, g in clip(grads).items()}
    assert np.isnan(clipped["a"][0])  # Keras makes everything NaN, the others 0 and inf * 0
    assert np.isnan(clipped["b"]).all() if form == "base_class" else np.array_equal(clipped["b"], [0.0])


def test_two_links_of_clipping_are_refused() -> None:
    limits = replace(OFF, global_norm_clip_threshold=1.0, clipvalue=1.0)
    with pytest.raises(UnknownRuleError, match="order of two"):
        CLIP["chain"](backend("numpy"), {}, limits)


REFUSED = [
    ("adamw", "torch", {}, "float64", "float32"),
    ("adamw", "keras", {}, "float64", "float32"),
    ("lamb", "keras", {}, "float16", "float32"),
    ("adamw", "mesh_tf", {}, "bfloat16", "float32"),
    ("lamb", "keras", {}, "float64", "float32"),
    ("adamw", "keras", {"gradient_accumulation_steps": 4}, "float32", "accumulate"),
    ("lamb", "keras", {"gradient_accumulation_steps": 4}, "float32", "accumulate"),
    ("adamw", "torch", {"decoupled_weight_decay": False}, "float32", "isn't AdamW"),
]


@pytest.mark.parametrize(("schema", "variant", "changes", "dtype", "reason"), REFUSED)
def test_what_isnt_reproduced_is_refused(
    schema: str, variant: str, changes: dict[str, Any], dtype: str, reason: str
) -> None:
    state = state_of(schema, variant, {"a": np.ones(2, DTYPES[dtype])}, **changes)
    with pytest.raises(UnknownRuleError, match=reason):
        mover(backend("numpy"), state)


@pytest.mark.parametrize(("schema", "variant"), [("adamw", "torch"), ("lamb", "optax"), ("lans", "paper")])
def test_a_missing_slot_is_named(schema: str, variant: str) -> None:
    betas = {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-6, "wd": 0.0} if schema == "lans" else {}
    state = state_of(schema, variant, {"a": np.ones(2, np.float32)}, **betas)
    bare = TrainState(state.params, {"a": {"m": state.slots["a"]["m"]}}, state.optimizer, state.counts)
    with pytest.raises(StateError, match=r"lacks slots(.|\n)*at: a(.|\n)*expected: v"):
        mover(backend("numpy"), bare)


def test_every_unknown_hyperparameter_is_named() -> None:
    group = Group(("a",), {"beta1": 0.9, "epsilon": 1e-8})
    with pytest.raises(UnknownRuleError, match=r"beta2.*weight_decay_rate.*amsgrad.*maximize"):
        adamw.settle(group, "a", None, "torch")
    with pytest.raises(UnknownRuleError, match="beta1"):
        lamb.settle(Group(("a",), {**optax_defaults("lamb"), "beta1": None}), "a", None, "optax")


def test_arguments_become_canonical_by_the_schema() -> None:
    adafactor = load_schema("adafactor")
    assert adafactor.canonical("hf", {"decay_rate": -0.8, "lr": None, "unknown": 1}) == {
        "learning_rate": None,
        "decay_rate": 0.8,
    }
    arguments = {"beta_1": 0.5, "global_clipnorm": 1.0, "weight_decay": 0.1}
    keras = load_schema("adamw").canonical("keras", arguments)
    assert keras == {"beta1": 0.5, "weight_decay_rate": 0.1, "global_norm_clip_threshold": 1.0}
