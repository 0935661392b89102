"""Figures of a parameter equal those of plain NumPy over the whole array, in float64, whatever the blocks are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from goldens import COMPACT
from statekit.conversion.closer import difference, over_steps, parameter, region
from statekit.errors import NotFoundError
from statekit.pages import parameter as pages
from statekit.pages.environment import environment
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Counts, Group, Optimizer, Rule, TrainState
from statekit.statistics import pictures
from statekit.statistics.change import change
from statekit.statistics.parameter import QUANTILES, parameter_statistics
from statekit.statistics.pictures import BINS, Grid, picture
from statekit.tensors import stats
from statekit.tensors.tensor import Array, in_memory

RTOL = 1e-12
"""Of float64 figures: sums of at most 2000 values and a few operations, each within 2^-53 of its result."""
UNIT = 2.0**-24
"""Half a unit in the last place of float32, relative: what each of its operations is off by at most."""
OPERATIONS = 16
"""Operations of float32 in a row, at most, from a slot to the update: those of the longest rule here."""
MEMORY = 2**30
UPDATES = 7
SHAPE = (12, 20)


def normal(seed: int, shape: tuple[int, ...] = SHAPE, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def state_of(
    schema: str, variant: str, slots: dict[str, Array], param: Array, rule: Rule | None = None, **said: Any
) -> TrainState:
    defaults = {**load_schema(schema).variant(variant)["defaults"], **said}
    group = Group(("w",), defaults, dict.fromkeys(defaults, "given"))
    return TrainState(
        {"w": in_memory(param)},
        {"w": {name: in_memory(value) for name, value in slots.items()}},
        Optimizer(schema, variant, (group,)),
        Counts(UPDATES, UPDATES),
        {"w": rule} if rule else {},
    )


def figures(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    record = parameter_statistics(state, "w", MEMORY)
    json.dumps(record, allow_nan=False)
    return {one["name"]: one for one in record["figures"]}, record


def quantiles(values: Array) -> Array:
    return np.quantile(values, QUANTILES)


def read(figure: dict[str, Any]) -> Array:
    return np.array([value for _, value in figure["values"]])


def wide(array: Array) -> Array:
    return array.astype(np.float64)


def check_update(figure: dict[str, Any], u: Array, p: Array) -> None:
    """Holds an update that was made in float32 against one in float64."""
    off = UNIT * (np.abs(p) + OPERATIONS * np.abs(u))
    assert figure["values"]["rms(u)"] == pytest.approx(np.sqrt(np.mean(u**2)), abs=float(np.max(off)))
    assert figure["values"]["max |u|"] == pytest.approx(np.max(np.abs(u)), abs=float(np.max(off)))


@pytest.mark.parametrize(
    "shape", [(0,), (), (1,), (7,), (2000,), (3, 5), (300, 7), (5, 400), (4, 9, 130), (0, 4)]
)
@pytest.mark.parametrize("block", [64, 4 * 2**20], ids=["blocks", "whole"])
def test_a_picture_is_that_of_the_whole_array(
    shape: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stats, pictures):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    array = normal(len(shape), shape)
    flat = array.reshape(-1)
    flat[1::9] = np.nan
    seen, good = picture(in_memory(array)), wide(array[np.isfinite(array)])
    if not good.size:
        assert seen["linear"] is None
    else:
        counts, _ = np.histogram(good, BINS, (good.min(), good.max()))
        assert sum(seen["linear"]["counts"]) == good.size
        # An element within rounding of an edge may count in either bin: np.histogram corrects by its own edges.
        edges = np.linspace(good.min(), good.max(), BINS + 1)
        near = np.min(np.abs(good[:, None] - edges), axis=1) < 1e-12 * np.abs(edges).max()
        assert np.abs(np.cumsum(seen["linear"]["counts"]) - np.cumsum(counts)).max() <= near.sum()
    if len(shape) < 2:
        each, values = seen["bars"]["each"], seen["bars"]["values"]
        groups = [flat[i : i + each] for i in range(0, flat.size, each)]
        expected = [np.mean(wide(g[np.isfinite(g)])) if np.isfinite(g).any() else None for g in groups]
    else:
        matrix = array.reshape(-1, shape[-1])
        (tall, across), cells = seen["tiles"]["each"], seen["tiles"]["cells"]
        values = [cell for row in cells for cell in row]
        tiles = [
            matrix[i : i + tall, k : k + across]
            for i in range(0, matrix.shape[0], tall)
            for k in range(0, matrix.shape[1], across)
        ]
        expected = [np.mean(np.abs(wide(t[np.isfinite(t)]))) if np.isfinite(t).any() else None for t in tiles]
    assert len(values) == len(expected)
    for value, right in zip(values, expected, strict=True):
        assert (value is None) == (right is None)
        assert value is None or value == pytest.approx(right, rel=RTOL, abs=1e-15)


def test_a_picture_of_one_value_and_of_the_widest_span() -> None:
    assert picture(in_memory(np.full(5, 2.5)))["linear"]["counts"][0] == 5
    far = picture(in_memory(np.array([-1.7e308, 0.0, 1.7e308])))["linear"]["counts"]
    assert (far[0], far[BINS // 2], far[-1]) == (1, 1, 1)


def test_values_at_the_end_of_their_dtype_are_counted() -> None:
    half = np.array([65504, -65504, 65472, np.inf], np.float16)
    assert picture(in_memory(half))["saturated"] == 2
    brain = np.array([3.3895313892515355e38, 1.0], ml_dtypes.bfloat16)
    assert picture(in_memory(brain))["saturated"] == 1
    assert picture(in_memory(np.array([2**31 - 1], np.int32)))["saturated"] == 0


def test_adamw_in_the_form_of_pytorch() -> None:
    p, m, v = normal(1), normal(2, scale=0.1), normal(3, scale=0.1) ** 2
    a, wd, eps = 0.01, 0.1, 1e-8
    state = state_of("adamw", "torch", {"m": m, "v": v}, p, learning_rate=a, weight_decay_rate=wd)
    seen, record = figures(state)
    c1, c2 = 1 - 0.9**UPDATES, 1 - 0.999**UPDATES
    vh, mh = wide(v) / c2, wide(m) / c1
    assert record["rate"] == a and record["unsaid"] == []
    np.testing.assert_allclose(read(seen["effective_rate"]), quantiles(a / (np.sqrt(vh) + eps)), RTOL)
    np.testing.assert_allclose(read(seen["snr"]), quantiles(np.abs(mh) / np.sqrt(vh)), RTOL)
    assert seen["corrections"]["values"] == pytest.approx({"m": c1, "v": c2}, rel=RTOL)
    size = seen["second_moment_size"]["values"]["rms(sqrt(v̂))"]
    assert size == pytest.approx(np.sqrt(np.mean(vh)), rel=RTOL)
    for name, g in (("update_at_zero", np.zeros(SHAPE)), ("update_at_scale", np.sqrt(vh))):
        new = (0.9 * wide(m) + 0.1 * g) / (1 - 0.9 ** (UPDATES + 1))
        root = np.sqrt((0.999 * wide(v) + 0.001 * g**2) / (1 - 0.999 ** (UPDATES + 1)))
        check_update(seen[name], a * wd * wide(p) + a * new / (root + eps), wide(p))


def test_adam_in_the_form_of_keras_has_epsilon_beside_the_uncorrected_root() -> None:
    p, m, v = normal(1), normal(2, scale=0.1), normal(3, scale=1e-4) ** 2
    seen, _ = figures(
        state_of("adamw", "keras", {"m": m, "v": v}, p, learning_rate=0.01, use_ema=False, amsgrad=False)
    )
    root = (np.sqrt(wide(v)) + 1e-7) / np.sqrt(1 - 0.999**UPDATES)
    np.testing.assert_allclose(read(seen["effective_rate"]), quantiles(0.01 / root), RTOL)
    assert "+ epsilon) / sqrt" in seen["effective_rate"]["formula"]


def test_what_mesh_tensorflow_does_not_correct_is_not_corrected() -> None:
    p, m, v = normal(1), normal(2, scale=0.1), normal(3, scale=0.1) ** 2
    seen, _ = figures(state_of("adamw", "mesh_tf", {"m": m, "v": v}, p, learning_rate=0.01))
    np.testing.assert_allclose(read(seen["snr"]), quantiles(np.abs(wide(m)) / np.sqrt(wide(v))), RTOL)
    assert "corrections" not in seen


@pytest.mark.parametrize(("schema", "variant"), [("lamb", "optax"), ("lans", "mxnet_fused")])
def test_trust_ratios(schema: str, variant: str) -> None:
    p, m, v = normal(1), normal(2, scale=0.1), normal(3, scale=0.1) ** 2
    said: dict[str, Any] = (
        {"weight_decay_rate": 0.02} if schema == "lamb" else {"wd": 0.02, "lower_bound": 1e3}
    )
    state = state_of(schema, variant, {"m": m, "v": v}, p, learning_rate=0.01, **said)
    seen, _ = figures(state)
    hyper = state.optimizer.groups[0].hyperparameters
    c1, c2 = (1 - hyper[beta] ** UPDATES for beta in ("beta1", "beta2"))
    x = wide(m) / c1 / (np.sqrt(wide(v) / c2) + hyper["epsilon"]) + 0.02 * wide(p)
    top = np.linalg.norm(wide(p)) if schema == "lamb" else 1e3
    ratio = seen["trust_ratio"]["values"]["trust ratio"]
    assert ratio == pytest.approx(top / np.linalg.norm(x), rel=RTOL)


MATRIX = Rule((Axis.ROW, Axis.COLUMN), "given")
BATCHED = Rule((Axis.COLUMN, Axis.BATCH, Axis.ROW), "given")


@pytest.mark.parametrize("rule", [MATRIX, BATCHED], ids=["matrix", "batched"])
@pytest.mark.parametrize("variant", ["t5x", "torch"])
def test_a_factored_second_moment_is_put_together_again(rule: Rule, variant: str) -> None:
    shape = SHAPE if rule is MATRIX else (6, 3, 8)
    p = normal(1, shape)
    g = wide(normal(2, shape, 0.1)) ** 2
    rows, columns = rule.dims(Axis.ROW), rule.dims(Axis.COLUMN)
    slots = {"v_row": g.mean(columns).astype(np.float32), "v_col": g.mean(rows).astype(np.float32)}
    beta: dict[str, Any] = {"beta1": None} if variant == "t5x" else {}
    seen, record = figures(state_of("adafactor", variant, slots, p, rule, learning_rate=0.01, **beta))
    row, col = np.expand_dims(wide(slots["v_row"]), columns), np.expand_dims(wide(slots["v_col"]), rows)
    v = row * col / row.mean(rows, keepdims=True)
    np.testing.assert_allclose(
        np.array(seen["second_moment"]["tiles"]["cells"]), v.reshape(-1, shape[-1]), RTOL
    )
    size = seen["second_moment_size"]["values"]["rms(sqrt(v̂))"]
    assert size == pytest.approx(np.sqrt(np.mean(v)), rel=RTOL)
    assert record["unsaid"] == []


def test_adafactors_effective_rate_has_the_parameters_scale() -> None:
    p, v = normal(1), normal(3, scale=0.1) ** 2
    rule = Rule((Axis.NONE, Axis.NONE), "given")
    seen, _ = figures(state_of("adafactor", "t5x", {"v": v}, p, rule, learning_rate=0.5, beta1=None))
    scale = np.sqrt(np.mean(wide(p) ** 2))
    # The scale is made in float32, by the rule's own text: a sum of 240 squares in pairs, and a root.
    np.testing.assert_allclose(
        read(seen["effective_rate"]), quantiles(0.5 * scale / np.sqrt(wide(v))), OPERATIONS * UNIT
    )


def test_the_size_of_a_parameter_of_scaled_adam() -> None:
    p, v, delta = normal(1), normal(2, scale=0.1) ** 2, normal(3, scale=1e-3)
    one = np.full((1, 1), 0.5, np.float32)
    slots = {
        "delta": delta, "exp_avg_sq": v, "param_rms": one, "scale_exp_avg_sq": one * 4,
        "scale_grads": np.zeros((4, 1, 1), np.float32),
    }  # fmt: skip
    state = state_of("scaled_adam", "zip2025", slots, p, lr=0.01, clipping_scale=2.0)
    seen, _ = figures(state)
    assert seen["size"]["values"]["rms(p) now"] == pytest.approx(np.sqrt(np.mean(wide(p) ** 2)), rel=RTOL)
    assert seen["size"]["values"]["sqrt(scale_exp_avg_sq)"] == pytest.approx(np.sqrt(2.0), rel=RTOL)
    beta2 = state.optimizer.groups[0].hyperparameters["betas"][1]
    root = np.sqrt(wide(v) / (1 - beta2**UPDATES)) + state.optimizer.groups[0].hyperparameters["eps"]
    np.testing.assert_allclose(read(seen["effective_rate"]), quantiles(0.01 * 0.5 / root), RTOL)
    assert "without clipping_scale" in seen["update_at_scale"]["formula"]


def test_rows_and_columns_without_a_gradient_are_dead() -> None:
    p, m, v = normal(1), normal(2), normal(3) ** 2
    m[3], v[3], m[:, 5], v[:, 5], v[7] = 0, 0, 0, 0, 0  # row 7 still has momentum
    seen, _ = figures(state_of("adamw", "torch", {"m": m, "v": v}, p, learning_rate=0.01))
    assert seen["dead"]["rows"] == {"of": 12, "count": 1, "first": [3]}
    assert seen["dead"]["columns"] == {"of": 20, "count": 1, "first": [5]}


def test_without_a_learning_rate_figures_are_per_unit_of_it_and_say_so() -> None:
    seen, record = figures(state_of("adamw", "mesh_tf", {"m": normal(2), "v": normal(3) ** 2}, normal(1)))
    assert record["rate"] is None
    assert "per unit of learning rate" in seen["effective_rate"]["title"]
    assert "per unit of learning rate" in seen["update_at_scale"]["formula"]


def test_what_is_not_computed_is_said() -> None:
    slots = {"m": normal(2), "v": normal(3) ** 2}
    state = state_of("adamw", "torch", slots, normal(1), learning_rate=0.01)
    small = parameter_statistics(state, "w", 100)
    assert small["figures"] == [] and "--budget" in small["unsaid"][0]
    (assumed,) = figures(
        state_of(
            "adafactor", "t5x", {"v": normal(2, (2, 3, 4)) ** 2}, normal(1, (2, 3, 4)),
            Rule((Axis.NONE,) * 3, "assumed"), beta1=None,
        )
    )[1]["unsaid"]  # fmt: skip
    assert "factor_map" in assumed
    for shape in ((0,), (5, 0), (0, 4)):
        empty = {name: np.zeros(shape, np.float32) for name in ("m", "v")}
        without, record = figures(state_of("adamw", "torch", empty, empty["m"], learning_rate=0.01))
        assert not without and "no elements" in record["unsaid"][0]
    with pytest.raises(NotFoundError, match="no such parameter"):
        parameter_statistics(state, "x", MEMORY)


def test_of_a_checkpoint_over_its_run_and_of_another(tmp_path: Path) -> None:
    file = COMPACT / "keras" / "adamw_ema_schedule_clip" / "checkpoint" / "model.keras"
    record = json.loads(json.dumps(parameter(file, "a/kernel"), allow_nan=False))
    assert set(record["tensors"]) == {"values", "average", "m", "v", "v_max"}
    source = '{% import "parameter.html" as p %}{{ p.content(r) }}{{ p.run(s) }}{{ p.difference(d) }}'
    run = over_steps(file, name="a/kernel")
    assert run["updates"] == [4] and run["curves"]["rms(m)"] == [record["tensors"]["m"]["stats"]["rms"]]
    same = difference(file, file, "a/kernel", "v")
    assert same["stats"]["norm"] == 0 and same["stats"]["zeros"] == 54
    part = region(file, "a/kernel", "v", (0, 2, 1, 3))
    assert part["shape"] == [6, 9] and np.shape(part["tiles"]["cells"]) == (2, 2)
    with pytest.raises(NotFoundError, match="no such columns"):
        region(file, "a/kernel", None, (0, 6, 0, 10))
    source += "{{ p.region(g, '<a>') }}"
    page = environment().from_string(source).render(r=record, s=run, d=same, g=part)
    assert page.count("<figure") == page.count("</figure>") > 12
    for figure in record["figures"]:
        plot = pages.of_figure(figure)
        assert (plot is None) == (figure["kind"] in ("numbers", "dead"))


def test_a_cell_that_is_put_in_the_wrong_row_is_noticed() -> None:
    array = normal(1, (300, 7))
    right, wrong = Grid(array.shape), Grid(array.shape)
    right.take(wide(array))
    wrong.take(wide(array[:100]))
    wrong.take(wide(array[:100]))
    wrong.take(wide(array[200:]))
    assert right.done() != wrong.done()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("shape", "within"),
    [
        ((40, 30), (3, 37, 5, 30)),
        ((3, 4, 5), (2, 11, 1, 4)),
        ((2, 3, 4, 300), (5, 23, 0, 300)),
        ((700,), (0, 1, 9, 640)),
    ],
    ids=["matrix", "three axes", "four axes", "vector"],
)
def test_a_region_is_what_numpy_cuts_out(
    dtype: str, shape: tuple[int, ...], within: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "BLOCK_BYTES", 100)
    array = normal(1, shape).astype(dtype)
    top, bottom, left, right = within
    matrix = wide(array).reshape(-1, shape[-1])[top:bottom, left:right]
    seen = pictures.region(in_memory(array), (top, bottom), (left, right))
    whole = pictures.of_array(matrix if len(shape) > 1 else matrix[0])
    assert seen["stats"]["norm"] == pytest.approx(float(np.linalg.norm(matrix)), rel=RTOL)
    for name in ("tiles", "bars"):
        assert (name in seen) == (name in whole)
    if "bars" in seen:
        assert seen["bars"] == whole["bars"]
    else:
        np.testing.assert_allclose(seen["tiles"]["cells"], whole["tiles"]["cells"], rtol=RTOL)


def test_a_change_is_what_numpy_says_and_nan_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = normal(1), normal(2)
    after[3] = before[3]
    after[0, 0] = before[0, 0] = np.nan
    after[5, 5] = np.inf
    x, y = wide(after), wide(before)
    good = np.isfinite(x) & np.isfinite(y)
    figures = change(in_memory(before), in_memory(after))
    a, b = x[good], y[good]
    assert figures["relative"] == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b), rel=RTOL)
    assert figures["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=RTOL)
    assert figures["moved"] == (x.size - SHAPE[1] - 1) / x.size
    zeros = in_memory(np.zeros(3, np.float32))
    assert change(zeros, zeros) == {"relative": None, "cosine": None, "moved": 0.0}
