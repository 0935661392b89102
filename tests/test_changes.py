"""What is changed of a run as it goes on: each change does what it says, and is said by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from samples import ROWS, Row

import statekit
from goldens import COMPACT
from statekit.arrays.numpy_backend import NumpyBackend
from statekit.cli.main import DONE, FAILED, USAGE, main
from statekit.conversion.changing.changed import changed
from statekit.conversion.changing.changes import Changes
from statekit.conversion.changing.next_update import measured
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.rounded import measured_in
from statekit.errors import InexactError, StatekitError, UsageError
from statekit.optim.run import load, mover
from statekit.state.schema import WEIGHTS, load_schema, schema_names
from statekit.state.stored_params import decoded
from statekit.state.train_state import Counts, Group, Optimizer, TrainState
from statekit.tensors.tensor import DTYPES, in_memory
from statekit.tensors.tree import to_json
from statekit.testing.step_cases import RATE, case

RECORDING = COMPACT / "t5x" / "momentum_f32"
RUN = RECORDING / "checkpoint"
TOLD = {"beta1": 0.9, "min_dim_size_to_factor": 8}
KERNEL = "encoder/layers_0/mlp/wi_0/kernel"


def converted(tmp_path: Path, name: str = "out.pt", **options: Any) -> Any:
    return statekit.convert(RUN, tmp_path / name, **{"hparams": TOLD, **options})


def said(report: Any) -> str:
    return "\n".join(map(str, report.plan.changed))


# Slots, counts and parameters


@pytest.mark.torch
@pytest.mark.parametrize("level", ["semantic", "refused"])
def test_only_what_may_be_required_is_taken(level: str, tmp_path: Path) -> None:
    """`refused` let everything through, and an unknown word ended in a KeyError."""
    with pytest.raises(UsageError) as caught:
        statekit.convert(RUN, tmp_path / "out.pt", hparams=TOLD, require=level)
    assert level in str(caught.value) and "rounding" in str(caught.value)


def test_parameters_alone_come_without_a_slot_and_load(tmp_path: Path) -> None:
    import torch

    import statekit.torch

    report = converted(tmp_path, params_only=True)
    assert "16 slots" in said(report) and report.plan.target.layout == "torch-weights"
    with statekit.open(tmp_path / "out.pt") as opened, statekit.open(RUN) as source:
        assert not opened.slots and not opened.groups
        params = {path: param.read() for path, param in source.params.items()}
    model = torch.nn.Module()
    for path, value in params.items():
        model.register_parameter(path.replace("/", "_"), torch.nn.Parameter(torch.zeros(value.shape)))
    names = {path.replace("/", "_"): path for path in params}
    statekit.torch.load_params(tmp_path / "out.pt", model, names=names)
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(param.detach().numpy(), params[names[name]])


def test_one_file_of_safetensors_takes_parameters_of_a_later_step_and_says_that_it_has_none(
    tmp_path: Path,
) -> None:
    report = statekit.convert(RUN, tmp_path / "out.safetensors", params_only=True)
    assert "no step" in report.plan.dropped["counts/updates"]
    with statekit.open(tmp_path / "out.safetensors") as opened, statekit.open(RUN) as source:
        assert opened.params.keys() == source.params.keys()


def test_a_schedule_begins_anew_where_the_target_counts_it_by_itself(tmp_path: Path) -> None:
    report = converted(tmp_path, schedule_step="reset")
    assert "stands at 0 instead of 4" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened:
        assert (opened.counts.updates, opened.counts.schedule) == (4, 0)


def test_a_target_with_one_count_refuses_to_set_the_schedule_apart(tmp_path: Path) -> None:
    with pytest.raises(InexactError, match="one number"):
        converted(tmp_path, "t5x-out", schedule_step="reset")
    with pytest.raises(InexactError, match="one number"):
        converted(tmp_path, "t5x-out", slot_policy="reset:count")
    with pytest.raises(InexactError, match="cannot store a schedule's step"):
        given: dict[str, Any] = {"hparams": {**TOLD, "learning_rate": 0.01}, "assume_defaults": True}
        converted(tmp_path, schedule_step=2, require="estimate", layout="torch-optim", **given)
    assert not [*tmp_path.iterdir()]


@pytest.mark.torch
def test_a_schedule_without_a_place_is_refused_in_the_plan(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(run, tmp_path / "run.pt")
    with pytest.raises(InexactError, match="cannot store a schedule's step"):
        statekit.plan(tmp_path / "run.pt", tmp_path / "out", to="orbax", layout="optax", schedule_step=5)
    assert not (tmp_path / "out").exists()


def test_a_schedule_whose_record_is_in_the_file_is_not_moved_behind_its_back(tmp_path: Path) -> None:
    trainer = next((COMPACT / "torch_formats" / "adamw_trainer").rglob("optimizer.pt")).parent
    with pytest.raises(UsageError, match="the schedule's own record"):
        statekit.convert(trainer, tmp_path / "out.pt", schedule_step="reset")


def test_slots_begin_anew_by_pattern_and_others_stay(tmp_path: Path) -> None:
    report = converted(tmp_path, slot_policy="reset:v*")
    assert "v_row begins anew with 0" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened, statekit.open(RUN) as source:
        for path, slots in opened.slots.items():
            for name, slot in slots.items():
                before = source.slots[path][name].read()
                assert before.any()
                assert np.array_equal(slot.read(), before if name == "m" else np.zeros_like(before))


def test_where_only_one_form_of_a_slot_begins_anew_the_others_are_named(tmp_path: Path) -> None:
    assert "v_row, v_col stay" in said(converted(tmp_path, slot_policy={"v": "reset"}))


def test_a_slot_is_dropped_with_what_switches_it_off(tmp_path: Path) -> None:
    report = converted(tmp_path, slot_policy="drop:m")
    assert "beta1=None" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened:
        assert opened.hyperparameters[0]["beta1"].value is None
        assert not any("m" in slots for slots in opened.slots.values())


def test_a_slot_that_the_rule_needs_is_not_dropped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't go on without it @ v_row"):
        converted(tmp_path, slot_policy="drop:v_row")


def test_the_updates_done_begin_anew_and_the_offset_with_them(tmp_path: Path) -> None:
    report = converted(tmp_path, slot_policy="reset:v*,reset:m,reset:count", step_offset=3)
    assert "the updates done are 0 instead of 4, and step_offset with it" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened:
        assert (opened.counts.updates, opened.counts.schedule) == (0, 4)
        assert opened.hyperparameters[0]["step_offset"].value == 0


def test_frozen_parameters_keep_their_values_and_lose_their_slots(tmp_path: Path) -> None:
    report = converted(tmp_path, drop_slots_of=["token_embedder/*"])
    assert "1 of 6 parameters" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened, statekit.open(RUN) as source:
        frozen = set(opened.params) - {path for group in opened.groups for path in group.paths}
        assert frozen == {"token_embedder/embedding"} and frozen.isdisjoint(opened.slots)
        np.testing.assert_array_equal(
            opened.params["token_embedder/embedding"].read(),
            source.params["token_embedder/embedding"].read(),
        )


@pytest.mark.torch
def test_where_files_do_not_tell_a_frozen_parameter_from_a_buffer_it_is_one(tmp_path: Path) -> None:
    run = COMPACT / "torch_adafactor" / "adafactor_bf16" / "checkpoint" / "checkpoint.pt"
    report = statekit.convert(run, tmp_path / "out.pt", drop_slots_of="embed/weight")
    assert "1 of" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened, statekit.open(run) as source:
        assert not any("embed/weight" in group.paths for group in opened.groups)
        frozen = opened.state.extra["buffers"]["embed.weight"].read()
        assert frozen.tobytes() == source.params["embed/weight"].read().tobytes()


def test_trainers_own_count_is_not_set_apart_from_its_optimizers(tmp_path: Path) -> None:
    run = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint"
    with pytest.raises(InexactError, match="global_step is both"):
        statekit.convert(run, tmp_path / "out", to="hf-trainer", slot_policy="reset:count")


def test_momentum_in_another_dtype_is_told_to_the_rule(tmp_path: Path) -> None:
    report = converted(tmp_path, slot_dtype={"m": "bfloat16"})
    assert "off by up to 0.00390625" in said(report)
    with statekit.open(tmp_path / "out.pt") as opened:
        assert {slots["m"].dtype.name for slots in opened.slots.values()} == {"bfloat16"}
        assert opened.hyperparameters[0]["dtype_momentum"].value == "bfloat16"


def test_parameters_in_another_dtype_are_labelled_and_pass_as_they_were_asked_for(tmp_path: Path) -> None:
    report = converted(tmp_path, param_dtype="bfloat16")
    assert report.plan.exactness.name == "LOSSY"
    with statekit.open(tmp_path / "out.pt") as opened:
        assert {param.dtype.name for param in opened.params.values()} == {"bfloat16"}


def test_what_was_rounded_is_measured_in_the_report(tmp_path: Path) -> None:
    (narrowed,) = converted(tmp_path, "a.pt", param_dtype="bfloat16").measured
    assert narrowed.values == 1219 and narrowed.rounded > 1000 and 0.003 < narrowed.largest <= 2**-8
    (shifted,) = converted(tmp_path, "b.pt", loss_scale=2.0**-70).measured
    assert shifted.lost > 0, "a power of two that leaves float32's range isn't bitwise, and is said"
    assert converted(tmp_path, "c.pt", loss_scale=0.25).measured[0].rounded == 0


@pytest.mark.torch
def test_moments_that_the_rule_keeps_as_its_parameters_are_asked_for_with_them(tmp_path: Path) -> None:
    """torch's load_state_dict casts a float32 moment of a bfloat16 parameter, without a word."""
    run = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint"
    to: dict[str, Any] = {"to": "torch", "layout": "torch-optim"}
    with pytest.raises(UsageError, match="beside these parameters"):
        statekit.convert(run, tmp_path / "out.pt", param_dtype="bfloat16", **to)
    statekit.convert(run, tmp_path / "out.pt", param_dtype="bfloat16", slot_dtype="bfloat16", **to)


def test_a_dtype_that_the_rule_does_not_keep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="t5x keeps it in float32, not in bfloat16 @ v_row"):
        converted(tmp_path, slot_dtype="bfloat16")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"slot_policy": "reset:nope"}, "no slot of that name"),
        ({"slot_policy": "drop:count"}, "without a count"),
        ({"slot_policy": "soon"}, "expected keep, drop:SLOT or reset:SLOT"),
        ({"drop_slots_of": "nope*"}, "No parameter that is moved"),
        ({"drop_slots_of": "*"}, "No parameter would be left"),
        ({"params_only": True, "loss_scale": 2.0}, "Without its slots"),
        ({"params_only": 1}, "expected true or false"),
        ({"schedule_step": -1}, "expected keep, reset, or a number"),
        ({"schedule_step": True}, "expected keep, reset, or a number"),
        ({"loss_scale": 0}, "a number above 0"),
        ({"loss_scale": float("nan")}, "a number above 0"),
        ({"param_dtype": "int8"}, "expected float32"),
        ({"slot_dtype": "q=float32"}, "no slot of the state"),
        ({"slot_policy": 5}, "is 5, expected text, or a list"),
        ({"drop_slots_of": 5}, "is 5, expected text, or a list"),
        ({"slot_dtype": 5}, "is 5, expected text, or a list"),
        ({"init_missing": 5}, "is 5, expected the path of a file"),
        ({"loss_scale": 10**400}, "a number above 0"),
        ({"loss_scale": 1e200}, "times inf, and its float32 takes factors from"),
        ({"loss_scale": 2.0**70}, "would be times 1.3938e.42"),
        ({"loss_scale": 2.0**-600}, "would be times 0, and"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    tmp_path: Path, option: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(StatekitError, match=words):
        converted(tmp_path, **option)
    assert list(tmp_path.iterdir()) == []


def test_a_count_is_never_rounded_to_a_slots_dtype(tmp_path: Path) -> None:
    run = next((COMPACT / "scaled_adam" / "zipformer202407_clipping").rglob("*.pt"))
    with statekit.open(run, variant="zip202407") as opened:
        state = opened.state
    with pytest.raises(UsageError, match="a count isn't rounded"):
        changed(state, Changes(slot_dtype={"num_clipped": "bfloat16"}), ())
    after, _ = changed(state, Changes(slot_dtype={"*": "bfloat16"}), ())
    assert [group.slots["num_clipped"].dtype.name for group in after.optimizer.groups] == ["int64"]
    assert {slots["exp_avg_sq"].dtype.name for slots in after.slots.values()} == {"bfloat16"}


@pytest.mark.parametrize("slot", ["v", "v_row"])
def test_a_dtype_is_held_against_every_form_of_slots(tmp_path: Path, slot: str) -> None:
    with pytest.raises(UsageError, match=f"t5x keeps it in float32, not in bfloat16 @ {slot}\n"):
        converted(tmp_path, slot_dtype={slot: "bfloat16"})


def mixed(*dtypes: str) -> TrainState:
    """Returns a run whose parameters have the given dtypes, their slots the same, and float32 masters."""
    params = {f"p{i}": in_memory(np.full(4, 0.3, DTYPES[dtype])) for i, dtype in enumerate(dtypes)}
    master = in_memory(np.full(4, 0.3, np.float32))
    slots = {path: {"m": param, "v": param, "master": master} for path, param in params.items()}
    group = Group(tuple(params), {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8})
    return TrainState(params, slots, Optimizer("adamw", "torch", (group,)), Counts(3, 3), {}, {})


@pytest.mark.parametrize("dtypes", [("float64", "bfloat16", "float32"), ("bfloat16", "float32", "float64")])
def test_where_dtypes_are_mixed_each_is_labelled_by_itself(dtypes: tuple[str, ...]) -> None:
    rounds = {f"p{i}" for i, dtype in enumerate(dtypes) if dtype == "float64"}
    for asked, name in (({"slot_dtype": {"m": "float32"}}, "/m"), ({"param_dtype": "float32"}, "")):
        _, done = changed(mixed(*dtypes), Changes(**asked), ())
        levels = {named: one.exactness.name for one in done for named in one.names}
        expected = {f"p{i}": "BITWISE" for i, dtype in enumerate(dtypes) if dtype == "bfloat16"}
        expected |= dict.fromkeys(rounds, "LOSSY")
        assert levels == {f"{path}{name}": level for path, level in expected.items()}


@pytest.mark.parametrize("pattern", ["master", "mast*"])
def test_a_dtype_that_nothing_can_take_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(UsageError, match="a master isn't rounded to bfloat16 @ master"):
        changed(mixed("float32"), Changes(slot_dtype={pattern: "bfloat16"}), ())
    after, _ = changed(mixed("float32"), Changes(slot_dtype={"m*": "bfloat16"}), ())
    assert {name: slot.dtype.name for name, slot in after.slots["p0"].items()} == {
        "m": "bfloat16",
        "v": "float32",
        "master": "float32",
    }


def test_a_groups_slot_keeps_its_dtype_and_says_so() -> None:
    run = next((COMPACT / "scaled_adam" / "zipformer202407_clipping").rglob("*.pt"))
    with statekit.open(run, variant="zip202407") as opened:
        state = opened.state
    names = {n for group in state.optimizer.groups for n, slot in group.slots.items()}
    floats = sorted(names - {"num_clipped"})
    assert floats
    for name in floats:
        with pytest.raises(UsageError, match=f"whole group.* isn't rounded to bfloat16 @ {name}"):
            changed(state, Changes(slot_dtype={name: "bfloat16"}), ())


def test_a_scale_is_held_against_the_dtype_of_each_slot_that_grows() -> None:
    _, done = changed(mixed("float64"), Changes(loss_scale=1e100), ())
    assert any("times 1e+200" in str(one) for one in done)
    with pytest.raises(UsageError, match=r"its float16 takes factors from 5.96e-08 to 6.55e"):
        changed(mixed("float64", "float16"), Changes(loss_scale=1e100), ())


def test_a_power_of_two_that_leaves_the_dtypes_range_is_measured() -> None:
    """0.3 is 2**-140 times as small in float32 with a few digits: the label speaks of the range, the measure tells."""
    after, done = changed(mixed("float32"), Changes(loss_scale=2.0**-70), ())
    assert any("inside the dtype's range" in str(one) for one in done)
    (measured_v,) = measured_in([after.slots["p0"]["v"]])
    assert (measured_v.rounded, measured_v.lost) == (4, 0) and measured_v.largest > 1e-4
    (measured_m,) = measured_in([after.slots["p0"]["m"]])
    assert measured_m.rounded == 0


def test_the_command_line_says_what_was_changed_in_text_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [
        "convert",
        str(RUN),
        str(tmp_path / "out.pt"),
        "--slot-policy",
        "reset:v*",
        "--loss-scale",
        "0.25",
    ]
    assert main([*line, "--dry-run"]) == DONE
    assert "Changed, as asked:" in capsys.readouterr().out
    assert main([*line, "--json"]) == DONE
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["options"]["changes"] == {"slot_policy": {"v*": "reset"}, "loss_scale": 0.25}
    assert {one["asked"] for one in plan["changed"]} == {"--slot-policy", "--loss-scale"}
    assert main(["convert", str(RUN), str(tmp_path / "b.pt"), "--drop-slots-of", "nope"]) == USAGE
    for nought, wanted in (("--schedule-step", DONE), ("--loss-scale", USAGE)):
        assert main(["convert", str(RUN), str(tmp_path / "c.pt"), nought, "0", "--dry-run"]) == wanted
    assert "stands at 0 instead of 4" in capsys.readouterr().out
    assert main(["convert", str(RUN), str(tmp_path / "t5x-b"), "--schedule-step", "reset"]) == FAILED


# The scale of the loss


FIXED_EPSILON = ("muon", "keras")
"""It adds an epsilon to the norm that no option turns off: beside the norms here that is less than half a bit."""
LARGE = np.float32(2.0**10)
"""What its gradients are multiplied by, so that the epsilon is less than half a bit of the norm."""


def stepped() -> Iterator[tuple[str, str]]:
    for schema in schema_names():
        yield from ((schema, variant) for variant in load_schema(schema).stepped)


def without_what_stands_beside(state: TrainState) -> TrainState:
    """Returns a state whose rule compares gradients with nothing: then updates scale with them exactly."""
    schema = load_schema(state.optimizer.schema)
    offered = schema.variant(str(state.optimizer.variant))["defaults"]
    beside = [name for name, spec in schema.hyperparameters.items() if spec.get("beside_gradients")]
    off = {
        name: None if "null" in schema.hyperparameters[name]["type"] and "clip" in name else 0.0
        for name in beside
        if name in offered
    }
    return state.with_hyperparameters(**off)


def after(state: TrainState, grads: Mapping[str, Any]) -> dict[str, Any]:
    xp = NumpyBackend()
    live = mover(xp, state)(load(xp, state), {path: xp.asarray(g) for path, g in grads.items()}, RATE)
    slots = {f"{path}/{name}": slot for path, t in live.slots.items() for name, slot in t.items()}
    slots |= {f"groups/{i}/{name}": slot for i, t in enumerate(live.shared) for name, slot in t.items()}
    return {**live.params, **slots}


@pytest.mark.parametrize(("schema", "variant"), [*stepped()])
def test_a_rescaled_run_is_the_run_of_rescaled_gradients(schema: str, variant: str) -> None:
    """What the schema says of powers is what each variant does, to the last bit for a power of two."""
    paths = ("vector", "matrix", "stacked")
    table = {path: shape for path, shape in case(schema, variant).state.params.items() if path in paths}
    made = case(schema, variant, full=True, updates=4)
    state = without_what_stands_beside(made.before(2))
    scaled, _ = changed(state, Changes(loss_scale=0.25), ())
    wrong, _ = changed(state, Changes(loss_scale=0.5), ())
    factor = LARGE if (schema, variant) == FIXED_EPSILON else np.float32(1)
    grads = {path: grad * factor for path, grad in made.grads[2].items() if path in table}
    smaller = {path: grad * np.float32(0.25) for path, grad in grads.items()}
    with np.errstate(all="ignore"):
        one, same, other = after(state, grads), after(scaled, smaller), after(wrong, smaller)
    rules = load_schema(schema)
    known = {**rules.settings(variant), **state.optimizer.groups[0].hyperparameters}
    for key, value in one.items():
        slot = key.rpartition("/")[2]
        power = rules.gradient_power(slot, known) if slot in rules.slots else 0
        np.testing.assert_array_equal(value * np.float32(0.25) ** power, same[key], err_msg=key)
    moments = any(rules.gradient_power(name, known) for name in state.slots["matrix"])
    if moments:
        assert any(not np.array_equal(one[path], other[path]) for path in table)


@pytest.mark.torch
def test_a_run_of_summed_losses_goes_on_with_their_mean(tmp_path: Path) -> None:
    """T5X's recorded run goes on under an eighth of its loss; under a wrong scale it goes elsewhere."""
    grads = load_file(RECORDING / "grads.safetensors")

    def gone_on(scale: float | None) -> dict[str, Any]:
        name = f"{scale}.pt"
        converted(tmp_path, name, loss_scale=scale)
        xp = NumpyBackend()
        with statekit.open(tmp_path / name, hparams=TOLD) as opened:
            state = opened.state
            live, move = load(xp, state), mover(xp, state)
        for update in range(5, 9):
            factor = np.float32(1 if scale is None else 1 / 8)
            live = move(live, {p: grads[f"{update}/{p}"] * factor for p in state.params}, 0.01)
        return dict(live.params)

    summed, mean, forgotten = gone_on(None), gone_on(1 / 8), gone_on(1.0)
    assert all(np.array_equal(summed[path], mean[path]) for path in summed)
    with statekit.open(RUN) as source:
        moved = np.abs(summed[KERNEL] - source.params[KERNEL].read()).max()
    assert np.abs(summed[KERNEL] - forgotten[KERNEL]).max() > 0.1 * moved


def test_a_scale_that_is_no_power_of_two_is_labelled_and_rounds_once(tmp_path: Path) -> None:
    report = converted(tmp_path, loss_scale=0.3)
    entries = {entry.name: entry.exactness.name for entry in report.plan.entries}
    assert {level for name, level in entries.items() if "/v" in name} == {"ROUNDING"}
    assert {level for name, level in entries.items() if name.endswith("/m")} == {"BITWISE"}
    with statekit.open(tmp_path / "out.pt") as opened, statekit.open(RUN) as source:
        before = source.slots[KERNEL]["v_row"].read().astype(np.float64)
        expected = (before * 0.3**2).astype(np.float32)
        np.testing.assert_array_equal(opened.slots[KERNEL]["v_row"].read(), expected)


def test_what_stands_beside_gradients_is_named() -> None:
    state = case("adamw", "torch").before(2)
    _, done = changed(
        replace(state, params={p: in_memory(t.read()) for p, t in state.params.items()}),
        Changes(loss_scale=2.0),
        (),
    )
    assert any("epsilon=1e-08" in str(one) for one in done)


def waiting(*, position: int = 2) -> TrainState:
    """Returns a run of Keras between two updates, with gradients that wait and an average of its parameters."""
    state = case("adamw", "keras").before(2)
    summed = {path: in_memory(np.full(one.shape, 3, np.float32)) for path, one in state.params.items()}
    home = {"iteration": 2 * 3 + position, "gradient_accumulators": summed, "derived_v": summed}
    buffers = {"mean": in_memory(np.full(4, 3, np.float32))}
    extra = {"keras": home, "buffers": buffers, "torch": {"ema": dict(summed), "sums": dict(summed)}}
    return replace(state, extra=extra).with_hyperparameters(gradient_accumulation_steps=3)


def test_gradients_that_wait_for_their_update_follow_the_scale_and_what_is_unknown_is_named() -> None:
    state = waiting()
    after, done = changed(state, Changes(loss_scale=0.25), ())
    path = next(iter(state.params))
    home, beside = after.extra["keras"], after.extra["torch"]
    assert float(home["gradient_accumulators"][path].read().flat[0]) == 3 * 0.25
    assert float(home["derived_v"][path].read().flat[0]) == 3 * 0.25**2
    assert home["iteration"] == 8
    for kept in (after.extra["buffers"]["mean"], beside["ema"][path], beside["sums"][path]):
        assert float(kept.read().flat[0]) == 3
    (strange,) = [one for one in done if "nothing tells" in one.said]
    assert strange.names == tuple(f"extra/torch/sums/{p}" for p, one in state.params.items() if one.shape)


@pytest.mark.parametrize("position", [0, 2])
def test_keras_refuses_to_count_anew_between_two_updates(position: int) -> None:
    """Its one number says how many gradients wait too: they would go into the first update beside all of its own."""
    from statekit.converters.layouts.keras.state import calls_of

    state, _ = changed(waiting(position=position), Changes(slot_policy={"count": "reset"}), ())
    home = state.extra["keras"]
    if position:
        with pytest.raises(InexactError, match="between two of them"):
            calls_of(state, home)
    else:
        assert calls_of(state, home) == 0


# The next update


def rows(
    capsys: pytest.CaptureFixture[str], source: Path, target: Path, *options: str
) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["convert", str(source), str(target), "--dry-run", "--json", *options]) == DONE
    made: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["next_update"]
    return made


GIN = ("--hparams", "beta1=0.9", "--hparams", "min_dim_size_to_factor=8")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("step_offset", "3"), ("schedule_step", "2"), ("slot_policy", "reset:v*"), ("state_only", None),
        ("drop_slots_of", "token_embedder/*"), ("param_dtype", "float64"), ("slot_dtype", "m=bfloat16"),
        ("loss_scale", "0.5"), ("init_missing", "model.safetensors"), ("params_only", None),
    ],
)  # fmt: skip
def test_each_option_says_what_the_next_update_will_use(
    option: str, value: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, said = RUN, dict[str, Any](hparams=TOLD)
    if option == "state_only":
        source, said = COMPACT / "torch_formats" / "adamw_trainer" / "checkpoint", {"layout": "torch-optim"}
    if option == "init_missing":
        save_file({"head": np.ones((9, 8), np.float32)}, tmp_path / "model.safetensors")
        value = str(tmp_path / "model.safetensors")
    line = ["convert", str(source), str(tmp_path / "out.pt"), "--dry-run", f"--{option.replace('_', '-')}"]
    line += [] if value is None else [value]
    line += GIN if source == RUN else ("--layout", "torch-optim")
    assert main(line) == DONE
    text = capsys.readouterr().out
    assert main([*line, "--json"]) == DONE
    shown = json.loads(capsys.readouterr().out)["next_update"]
    asked: Any = {"step_offset": 3, "schedule_step": 2, "loss_scale": 0.5}.get(option, value or True)
    planned = statekit.plan(source, tmp_path / "out.pt", **said, **{option: asked})
    if option == "params_only":
        assert "a new optimizer" in text and not shown and not planned.next_update
        return
    assert "The next update:" in text and "effective count" in text and "loaded second moment" in text
    assert json.loads(json.dumps(planned.next_update)) == shown
    for row in shown:
        assert {"learning_rate", "schedule", "decay", "counted", "discarded", "begun_anew"} <= row.keys()
        assert row["discarded"] is not None or row["unknown"]


def test_after_a_reset_the_first_update_discards_the_loaded_second_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = rows(capsys, RUN, tmp_path / "a.pt", *GIN, "--step-offset", "reset")
    assert (row["decay"], row["discarded"], row["counted"], row["step_offset"]) == (0.0, True, 1, 4)
    (row,) = rows(capsys, RUN, tmp_path / "a.pt", *GIN, "--step-offset", "3")
    assert row["decay"] == pytest.approx(1 - 2**-0.8) and not row["discarded"]


def test_how_a_reset_is_said_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = COMPACT / "t5x" / "default_heuristics" / "checkpoint"
    (row,) = rows(capsys, run, tmp_path / "o", "--to", "optax-orbax", "--step-offset", "reset")
    assert row["notes"] == ["optax says it as decay_offset=3, exactly"] and row["discarded"]
    hf = COMPACT / "hf_adafactor" / "fixedlr_scale_beta1_wd" / "checkpoint"
    for row in rows(capsys, hf, tmp_path / "h.pt", "--step-offset", "reset"):
        assert row["notes"] == ["hf has no step_offset: its count of updates begins there instead, exactly"]
        assert (row["update"], row["schedule"], row["discarded"]) == (0, 4, True)


def test_an_offset_is_taken_off_the_count_of_the_files_too(tmp_path: Path) -> None:
    """Hugging Face's Adafactor has no step_offset: nothing changed in the files that it goes on from."""
    hf = COMPACT / "hf_adafactor" / "fixedlr_scale_beta1_wd" / "checkpoint"
    report = statekit.convert(hf, tmp_path / "h.pt", step_offset="reset")
    assert report.plan.source.step == 4
    with statekit.open(tmp_path / "h.pt") as opened:
        assert opened.counts.updates == 0


def test_where_one_count_drives_the_schedule_too_an_offset_is_not_taken_off_it(tmp_path: Path) -> None:
    run = COMPACT / "t5x" / "default_heuristics" / "checkpoint"
    with pytest.raises(InexactError, match="step_offset"):
        statekit.convert(run, tmp_path / "k.weights.h5", layout="keras", step_offset="reset")


@pytest.mark.parametrize(
    ("kind", "policy", "times"),
    [
        (("adamw", "torch"), "reset:v", "31."),
        (("adamw", "torch"), "reset:m", "0.10"),
        (("adamw", "optax"), "reset:m,reset:v", "3.16"),
        (("adafactor", "t5x"), "reset:v*", "251"),
        (("lans", "mxnet_fused"), "reset:m,reset:v", None),
    ],
)
def test_what_begins_anew_at_a_large_count_is_measured_on_the_rules_own_step(
    kind: tuple[str, str], policy: str, times: str | None
) -> None:
    """1 / sqrt(1 - beta2) for Adam's v; for T5X's at a million 1 / sqrt(1.585e-5), which clipping hides.

    Source: what T5X does after zeroing slots alone, google-research/t5x issue 569.
    """
    state = case(*kind).before(1)
    state = replace(state, counts=replace(state.counts, updates=1_000_000))
    (row,) = measured(to_json(state.to_json()), (), Changes.of({"slot_policy": policy}))
    if times is None:
        assert row["notes"] == []
    else:
        assert f"first update is {times}" in row["notes"][0] and "counts anew" in row["notes"][-1]


def test_an_update_that_vanishes_is_compared_with_nothing() -> None:
    state = case("adamw", "torch").before(1)
    (group,) = state.optimizer.groups
    large = replace(
        group, hyperparameters={**group.hyperparameters, "epsilon": 1e30, "weight_decay_rate": 0.0}
    )
    state = replace(state, optimizer=replace(state.optimizer, groups=(large,)))
    (row,) = measured(to_json(state.to_json()), (), Changes.of({"slot_policy": "reset:m"}))
    assert "vanishes" in row["unknown"]


def test_what_nobody_said_and_what_does_not_matter_are_told_apart() -> None:
    state = case("adafactor", "t5x").before(1)
    (group,) = state.optimizer.groups
    for missing, known in (("epsilon2", True), ("decay_rate", False)):
        less = {name: value for name, value in group.hyperparameters.items() if name != missing}
        some = replace(
            state, optimizer=replace(state.optimizer, groups=(replace(group, hyperparameters=less),))
        )
        (row,) = measured(to_json(some.to_json()))
        assert (row["decay"] is not None) == known
        assert known or "decay_rate" in row["unknown"]


def test_the_lines_say_which_loss_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["convert", str(RUN), str(tmp_path / "out.pt"), "--loss-scale", "0.25", "--json"]
    assert main(line) == DONE
    said = "# the loss is 0.25 times the source's from here on, as its moments are"
    assert json.loads(capsys.readouterr().out)["resume"][-1] == said
    assert main(["resume", str(tmp_path / "out.pt")]) == DONE
    assert said in capsys.readouterr().out


@pytest.mark.sampled(25)
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.layout}:{row.name}" for row in ROWS])
def test_of_every_sample_parameters_alone_come_without_a_slot(row: Row, tmp_path: Path) -> None:
    """Whatever its container and layout: each parameter is there, equal, and nothing of the optimizer."""
    sample, hints = row.sample_in(tmp_path), row.hints
    if "bf16_encoded" in row.name:
        hints = Hints(variant="t2t_late")  # or else nobody knows what the numbers are, which is refused
        with pytest.raises(InexactError, match="encoded"):
            plan(sample.path, tmp_path / "out.pt", changes=Changes(params_only=True))
    planned = plan(sample.path, tmp_path / "out.pt", hints=hints, changes=Changes(params_only=True))
    convert(planned)
    with open_state(sample.path, hints=hints) as source, statekit.open(tmp_path / "out.pt") as opened:
        assert opened.state.optimizer.schema == WEIGHTS and not opened.slots and not opened.groups
        for path, param in decoded(source.state).params.items():
            value = opened.params[path.replace(".", "/")]
            assert value.dtype == param.dtype
            np.testing.assert_array_equal(value.read(), param.read(), err_msg=path)
