"""Learning-rate schedules against the tables that the original systems computed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from goldens import GOLDEN, bundles
from statekit.optim import schedules

UNIT = 2.0**-24


def tables(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((GOLDEN / path).read_text())["tables"]
    assert len(found) >= 4
    return found


def eden_rate(table: dict[str, Any], base: float, row: dict[str, Any]) -> float:
    if table["class"].endswith("Eden2"):
        return schedules.eden2(base, row["batch"], **table["args"])
    return schedules.eden(base, row["batch"], row["epoch"], **table["args"])


@pytest.mark.parametrize("number", range(4))
def test_eden_is_icefalls_to_the_last_bit(number: int) -> None:
    table = tables("_tables/eden_lr.json")[number]
    for row in table["rows"]:
        assert [eden_rate(table, base, row) for base in table["base_lr"]] == row["lr"]
    assert len(table["rows"]) == 11


def test_eden_drives_the_recorded_runs() -> None:
    driven = 0
    for path in bundles("scaled_adam"):
        extra = json.loads((path / "meta.json").read_text())["extra"]
        if not extra["scheduler"] or extra["scheduler"]["class"] != "Eden":
            continue
        driven += 1
        epochs, epoch = extra["scheduler"]["epoch_set_at_step"], 0
        for update, recorded in enumerate(extra["learning_rate_per_group"], start=1):
            epoch = epochs.get(str(update), epoch)
            bases = [group["base_lr"] for group in extra["param_groups"]]
            rates = [schedules.eden(base, update, epoch, **extra["scheduler"]["args"]) for base in bases]
            assert rates == recorded
            late = [schedules.eden(base, update - 1, epoch, **extra["scheduler"]["args"]) for base in bases]
            assert late != recorded
    assert driven >= 2


def neo(table: dict[str, Any], step: int, **changes: Any) -> float:
    params = table["params"]
    arguments = {
        "base": params["lr"],
        "train_steps": params["train_steps"],
        "decay": params["lr_decay"],
        "warmup_steps": params["warmup_steps"],
        "decay_end": params.get("lr_decay_end"),
    }
    return schedules.gpt_neo(step, **{**arguments, **changes})


@pytest.mark.parametrize("number", range(8))
def test_gpt_neos_decay_and_warm_up_are_the_recorded_ones(number: int) -> None:
    """In float32 the original makes some five roundings, and its cosine errs by a unit near 1: 16 units in all."""
    table = tables("mesh_tf/lr_schedules.json")[number]
    for step, recorded in zip(table["steps"], table["lr"], strict=True):
        assert neo(table, step) == pytest.approx(recorded, rel=16 * UNIT, abs=0)


def test_the_warm_up_multiplies_the_decayed_rate() -> None:
    table = tables("mesh_tf/lr_schedules.json")[1]
    assert table["params"]["warmup_steps"] == 10
    undecayed = [neo(table, step, decay=None) for step in table["steps"][:10]]
    assert undecayed[1:] != pytest.approx(table["lr"][1:10], rel=1e-3)


def test_a_decay_that_ends_elsewhere_is_noticed() -> None:
    table = next(t for t in tables("mesh_tf/lr_schedules.json") if "lr_decay_end" in t["params"])
    wrong = [neo(table, step, decay_end=None) for step in table["steps"]]
    assert wrong != pytest.approx(table["lr"], rel=1e-3)


T5X: dict[bool, tuple[float, int, list[float]]] = {
    # golden t5x_train/t5_11_unscanned and t5_11_scanned, meta.json: base_learning_rate, warmup_steps, learning_rate
    False: (
        0.1, 4,
        [0.05000000074505806, 0.05000000074505806, 0.05000000074505806, 0.05000000074505806, 0.05000000074505806,
         0.04472136124968529, 0.040824826806783676, 0.03779644891619682, 0.0353553406894207],
    ),
    True: (
        0.3, 6,
        [9.99999993922529e-09, 0.020412415266036987, 0.040824830532073975, 0.06123724207282066, 0.08164966106414795,
         0.10206206887960434, 0.12247448414564133, 0.11338935047388077, 0.1060660257935524, 0.10000000149011612],
    ),
}  # fmt: skip


@pytest.mark.parametrize("linear", T5X)
def test_t5xs_inverse_square_root_is_the_recorded_one(linear: bool) -> None:
    base, warmup, recorded = T5X[linear]
    rates = [
        schedules.t5x_rsqrt(step, base=base, warmup_steps=warmup, linear_warmup=linear)
        for step in range(len(recorded))
    ]
    assert rates == pytest.approx(recorded, rel=4 * UNIT, abs=0)


def test_adafactors_own_rates() -> None:
    # golden t2t/late_quant8_bigstep, meta.json: from global_step 9995 on
    recorded = {
        9995: 0.009999999776482582,
        9999: 0.009999999776482582,
        10000: 0.009999500587582588,
        10002: 0.009998500347137451,
    }
    for step, rate in recorded.items():
        assert schedules.adafactor_rsqrt(step) == pytest.approx(rate, rel=4 * UNIT)
    assert schedules.adafactor_rsqrt(0, scaled=False) == pytest.approx(0.0005)
    assert schedules.adafactor_relative(9, warmup_init=True) == pytest.approx(1e-5)
    assert schedules.adafactor_relative(0) == 1e-2 and schedules.adafactor_relative(39_999) == 0.005
    assert schedules.adafactor_capped(0.5, 3) == 0.5 and schedules.adafactor_capped(0.5, 99) == 0.1
