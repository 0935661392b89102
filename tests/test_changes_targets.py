"""What becomes of changed counts and frozen parameters in every target: done, or refused in the plan, never later."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import state_writer, target_name

import statekit
from goldens import COMPACT
from statekit.conversion import registry
from statekit.conversion.changing.changes import Changes
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.errors import InexactError, UsageError
from statekit.state.schema import WEIGHTS
from statekit.state.train_state import Axis, TrainState
from statekit.testing.step_cases import Table, case

R, C, N = Axis.ROW, Axis.COLUMN, Axis.NONE
PLACES = {
    "statekit": "apart", "statekit-torch": "apart", "statekit-jax": "linked", "optax": "linked",
    "t5x": "state/step", "keras": "iterations", "statekit-keras": "iterations", "tf2-keras": "iterations",
    "tf2-statekit": "iterations", "mesh-tf": "global_step", "mesh-tf-adam": "global_step", "t2t": "global_step",
    "tf-adam": "global_step", "tf2-t2t": "global_step", "tf2-adam": "global_step", "mxnet-adam": "num_update",
    "mxnet-lamb": "num_update", "mxnet-lans": "num_update", "icefall": "", "torch-optim": "", "torch-fqn": "",
    "torch-fqn-flat": "", "megatron": "", "megatron-distributed": "", "megatron-float16": "",
    "deepspeed": "", "maxtext": "linked",
}  # fmt: skip
"""Where each layout's files say that a schedule stands: apart, where a link counts for it, in a number that counts
updates too, or nowhere."""
MAKERS = {
    "adafactor": "t5x",
    "adamw": "torch",
    "lamb": "optax",
    "lans": "mxnet_fused",
    "scaled_adam": "gptsovits",
}
TABLE: Table = {
    "a/kernel": ((4, 6), (R, C)), "a/bias": ((6,), (N,)), "b/kernel": ((5, 6), (R, C)), "b/bias": ((5,), (N,)),
}  # fmt: skip
FEW_BITS = ("bitsandbytes-32bit", "bitsandbytes-8bit", "torchao-4bit", "torchao-8bit", "torchao-fp8")
ONLY_READ = ("keras-model-h5", "mxnet-native", "optax-native", "tf2-keras2", *FEW_BITS)
"""Layouts that write no state from elsewhere, or only what is rounded to few bits."""
ALONE = {("torch-optim", "torch"), ("torch-fqn", "torch")}
"""Layouts with containers that hold the state of an optimizer without its parameters."""
TRAINER = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint"


def layouts() -> list[str]:
    cards = map(registry.layout_card, registry.layout_names())
    return [card.name for card in cards if WEIGHTS not in card.variants or len(card.variants) > 1]


def run_for(layout: str) -> TrainState:
    """Returns a run that a layout holds, of an optimizer that it holds most usually."""
    schema = next(iter(registry.layout_card(layout).variants))
    known: dict[str, Any] = {"learning_rate": 0.01}
    if schema == "adafactor":
        known |= {"min_dim_size_to_factor": 4}
    return case(schema, MAKERS[schema], table=TABLE, **known).before(4)


def test_every_layout_says_where_a_schedule_stands() -> None:
    cards = {name: registry.layout_card(name).schedule_in for name in layouts() if name not in ONLY_READ}
    expected = {name: {"": None, "linked": "apart"}.get(place, place) for name, place in PLACES.items()}
    assert cards == expected
    assert registry.container_card("hf-trainer").schedule_in == "global_step"


def test_maxtext_refuses_a_run_of_no_update(tmp_path: Path) -> None:
    source = state_writer("statekit", "statekit", lambda: run_for("maxtext"))(tmp_path)
    target: dict[str, Any] = {
        "target": tmp_path / "items",
        "to": "orbax",
        "layout": "maxtext",
        "require": Exactness.ESTIMATE,
    }
    with pytest.raises(InexactError, match="names a folder by the last one"):
        plan(source, changes=Changes(slot_policy={"count": "reset"}), **target)
    with pytest.raises(InexactError, match="cannot store a schedule's step"):
        plan(source, changes=Changes(schedule_step=3), **target)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", [name for name in PLACES if name != "maxtext"])
def test_counts_and_frozen_parameters_are_done_or_refused_in_the_plan(layout: str, tmp_path: Path) -> None:
    home, place = registry.layout_card(layout).containers[0], PLACES[layout]
    source = state_writer("statekit", "statekit", lambda: run_for(layout))(tmp_path)

    def written(name: str, **changes: Any) -> tuple[Any, Any]:
        target = tmp_path / f"{name}-{target_name(home)}"
        planned = plan(
            source, target, to=home, layout=layout, require=Exactness.ESTIMATE, changes=Changes(**changes)
        )
        convert(planned)
        with statekit.open(target) as opened:
            return planned, replace(opened.state)

    if place == "apart":
        _, state = written("moved", schedule_step=3)
        assert (state.counts.updates, state.counts.schedule) == (4, 3)
        _, state = written("counted", slot_policy={"count": "reset"})
        assert (state.counts.updates, state.counts.schedule) == (0, 4)
    else:
        words = f"{place} is both" if place not in ("", "linked") else "cannot store a schedule's step"
        with pytest.raises(InexactError, match=words):
            written("moved", schedule_step=3)
        if place in ("", "linked"):
            planned, state = written("counted", slot_policy={"count": "reset"})
            assert state.counts.updates == 0 and planned.dropped["counts/schedule"]
        else:
            with pytest.raises(InexactError, match=words):
                written("counted", slot_policy={"count": "reset"})
    if layout == "icefall":  # whose file of a run that has made no update has nothing that tells it
        target = tmp_path / "anew.pt"
        asked = Changes(slot_policy={"count": "reset"}, schedule_step=0)
        assert any(
            "before the first" in said
            for said in plan(source, target, layout=layout, changes=asked).assumptions
        )
    else:
        _, state = written("anew", slot_policy={"count": "reset"}, schedule_step=0)
        assert (state.counts.updates, state.counts.schedule) == (0, 0)
    _, state = written("frozen", drop_slots_of=("a/bias",))
    moved = {path for group in state.optimizer.groups for path in group.paths}
    assert len(moved) == 3 and "a/bias" not in moved


@pytest.mark.parametrize("layout", PLACES)
def test_a_state_without_its_parameters_is_refused_with_a_reason_where_nobody_could_load_it(
    layout: str, tmp_path: Path
) -> None:
    source = state_writer("statekit", "statekit", lambda: run_for(layout))(tmp_path)
    for home in registry.layout_card(layout).containers:
        # Keras' .keras wants a model's config first, and one safetensors file holds no optimizer anyway.
        if (layout, home) in ALONE or home in ("fsdp1-ranks", "keras", "safetensors"):
            continue
        with pytest.raises(UsageError, match="no form of an optimizer's state") as caught:
            statekit.plan(
                source, tmp_path / "out", to=home, layout=layout, require="estimate", state_only=True
            )
        reason = str(caught.value.found).partition(": ")[2]
        assert reason and reason != "its files are loaded with them"


def test_a_schedule_of_optax_that_counts_by_itself_is_moved(tmp_path: Path) -> None:
    run = case("adamw", "optax", table=TABLE).before(4)  # without a number for its rate: a schedule gives it
    source = state_writer("flax", "optax", lambda: run)(tmp_path)
    statekit.convert(source, tmp_path / "moved", to="flax", schedule_step=2)
    with statekit.open(tmp_path / "moved") as opened:
        assert (opened.counts.updates, opened.counts.schedule) == (4, 2)


def test_accelerates_folder_is_of_the_step_of_its_optimizer(tmp_path: Path) -> None:
    """The Trainer's own count, which it keeps for the way back, made a damaged folder of it."""
    statekit.convert(TRAINER, tmp_path / "out", to="accelerate", slot_policy="reset:count")
    with statekit.open(tmp_path / "out") as opened:
        assert opened.counts.updates == 0


@pytest.mark.parametrize("slots", ["delta", "exp_avg_sq"])
def test_icefalls_slots_stay_where_updates_are_counted_anew(slots: str, tmp_path: Path) -> None:
    (run,) = (COMPACT / "scaled_adam" / "gptsovits_basic").rglob("*.pt")
    ways: dict[str, dict[str, Any]] = {
        "anew": {"slot_policy": "reset:count"},
        "frozen": {"drop_slots_of": "dec/zero"},
    }
    for name, asked in ways.items():
        statekit.convert(run, tmp_path / f"{name}.pt", **asked)
        with statekit.open(run) as before, statekit.open(tmp_path / f"{name}.pt") as after:
            assert after.layout == "icefall"
            for path, kept in after.slots.items():
                assert (kept[slots].read() == before.slots[path][slots].read()).all()
        assert len(after.slots) == len(before.slots) - (name == "frozen")


@pytest.mark.parametrize("layout", ["t2t", "tf-adam"])
def test_a_slot_has_its_variable_s_dtype_where_tensorflow_s_saver_wants_it(
    layout: str, tmp_path: Path
) -> None:
    schema, names = ("adafactor", "m") if layout == "t2t" else ("adamw", "mv")
    run = case(schema, MAKERS[schema], table=TABLE, learning_rate=0.01, beta1=0.9).before(4)
    source = state_writer("statekit", "statekit", lambda: run)(tmp_path)

    def planned(**changes: Any) -> Any:
        asked = Changes(param_dtype="bfloat16", **changes)
        ref = CheckpointRef(source, assume_defaults=True)
        return plan(
            ref, tmp_path / "made", layout=layout, to="tf-bundle", require=Exactness.LOSSY, changes=asked
        )

    with pytest.raises(InexactError, match=f"slot {names[-1]} is float32 beside a variable of bfloat16"):
        planned()
    entries = planned(slot_dtype=dict.fromkeys(names, "bfloat16")).entries
    assert not any(entry.dtype == "float32" and entry.shape == (4, 6) for entry in entries)
