from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from t5x_files import Recorded, meta, open_case, recorded, tiny

from goldens import GOLDEN, bundles
from statekit.conversion import registry
from statekit.conversion.contracts import Hints
from statekit.converters.containers.t5x import CONTAINER as T5X
from statekit.converters.layouts.t5x.layout import LAYOUT, STANDARD
from statekit.errors import InexactError, StateError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.files.stage import staged, unknown_fields
from statekit.state.factoring import by_size, effective, from_slots
from statekit.state.train_state import Axis, Counts, Group, KnownFrom, Optimizer, Rule, TrainState
from statekit.tensors.tensor import Array, in_memory
from statekit.tensors.tree import tensor_names
from statekit.testing.container_trials import open_proven

CASES = [bundle.name for bundle in bundles("t5x")]
ROW, COLUMN, BATCH, NONE = Axis.ROW, Axis.COLUMN, Axis.BATCH, Axis.NONE


def recorded_hyperparameters(case: str) -> dict[str, Any]:
    """Returns everything a user of a recorded run could say about it."""
    recording = meta(case)
    hyperparameters: dict[str, Any] = recording["hyperparameters"]
    axes = {"logical_axes": recording["extra"]["logical_axes"]}
    return hyperparameters | (axes if hyperparameters.get("logical_factor_rules") else {})


def decode(checkpoint: Checkpoint, **hints: Any) -> TrainState:
    return LAYOUT.decode(checkpoint, Hints(hints))


def labels(state: TrainState, path: str) -> tuple[str, KnownFrom]:
    rule = state.rules[path]
    return " ".join(axis.value for axis in rule.axes), rule.known_from


# Every recorded run.


@pytest.mark.parametrize("source", recorded(), ids=str)
def test_a_recorded_state_is_sorted_by_its_recording(source: Recorded) -> None:
    with source.open() as checkpoint:
        state = decode(checkpoint)
        expected = source.expected()
        assert list(state.params) == [
            name.removeprefix("target/") for name in checkpoint.tensors if name[:7] == "target/"
        ]
        assert state.counts == Counts(source.step, source.step)
        assert (state.optimizer.schema, state.optimizer.variant) == ("adafactor", "t5x")
        for path in state.params:
            native = {
                slot: expected.get(f"state/param_states/{path}/{slot}")
                for slot in ("v_row", "v_col", "v", "m")
            }
            arrays = {s: array for s, array in native.items() if array is not None and array.shape != (1,)}
            if path == "encoder/gate":
                arrays = {"v": expected[f"state/param_states/{path}/v"]}
            assert state.slots.get(path, {}).keys() == arrays.keys(), path
            for slot, array in arrays.items():
                assert state.slots[path][slot].read().tobytes() == array.tobytes()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("folder", ["checkpoint", "checkpoint_orbax"])
def test_rules_are_those_t5x_resolved(case: str, folder: str) -> None:
    state = decode(open_case(case, folder), **recorded_hyperparameters(case))
    for path, resolved in meta(case)["extra"]["factorization"].items():
        if resolved is None:
            assert path not in state.rules
            assert state.group_of(path) is None
            continue
        rule = state.rules[path]
        dims = resolved["factored_dims"] or {"d1": [], "d0": []}
        assert (list(rule.dims(ROW)), list(rule.dims(COLUMN))) == (dims["d1"], dims["d0"]), path
        assert list(rule.dims(ROW, COLUMN, NONE)) == resolved["averaging_dims"], path
        assert rule.known_from == "given"
    assert not [sentence for sentence in state.assumptions if "assumed" in sentence]


@pytest.mark.parametrize("case", CASES)
def test_hyperparameters_are_those_that_were_told(case: str) -> None:
    state = decode(open_case(case), **recorded_hyperparameters(case))
    recording = meta(case)["hyperparameters"]
    groups = recording.get("traversals_and_optimizers", [{"hyperparameters": recording}])
    assert len(state.optimizer.groups) == len(groups)
    for group, expected in zip(state.optimizer.groups, groups, strict=True):
        for name, value in expected["hyperparameters"].items():
            if name in ("factor_map", "logical_factor_rules", "learning_rate"):
                assert name not in group.hyperparameters
            elif name != "multiply_by_parameter_scale" or isinstance(value, bool):
                assert group.hyperparameters[name] == value
                assert group.known_from[name] == "given"
        assert group.hyperparameters.keys() == group.known_from.keys()


@pytest.mark.parametrize("case", CASES)
def test_without_a_word_the_slots_speak(case: str) -> None:
    state = decode(open_case(case))
    recording, resolved = meta(case), meta(case)["extra"]["factorization"]
    for path, rule in state.rules.items():
        dims = resolved[path]["factored_dims"]
        assert rule.factored == (dims is not None), path
        if rule.known_from == "file":
            assert dims is None or (list(rule.dims(ROW)), list(rule.dims(COLUMN))) == (
                dims["d1"],
                dims["d0"],
            ), path
            assert list(rule.dims(ROW, COLUMN, NONE)) == resolved[path]["averaging_dims"], path
    for group in state.optimizer.groups:
        kept = group.hyperparameters
        if group.known_from["factored"] == "file":
            assert kept["factored"] is True
        true = recording["hyperparameters"]
        if "traversals_and_optimizers" in true:
            true = true["traversals_and_optimizers"][state.optimizer.groups.index(group)]["hyperparameters"]
        assert ("beta1" in kept) == (true["beta1"] is None)
        if group.known_from["dtype_momentum"] == "file":
            assert kept["dtype_momentum"] == true["dtype_momentum"]
        assert "learning_rate" not in kept
    assert any("assumed" in sentence for sentence in state.assumptions)


def test_a_network_with_logical_axes() -> None:
    for network in ("scanned", "unscanned"):
        run = next(r for r in recorded() if f"t5x_checkpoints/{network}/" in f"{r}")
        recording = json.loads((GOLDEN / "t5x_checkpoints" / network / "meta.json").read_text())
        hints = {
            "logical_factor_rules": "standard_logical_factor_rules()",
            "logical_axes": recording["logical_axes"],
            "min_dim_size_to_factor": 32,
        }
        state = decode(run.open(), **hints)
        for path, rule in recording.get("factor_rules", {}).items():
            if len(rule) > 2 or "BATCH" in rule:
                assert labels(state, path) == (" ".join(rule), "given")
        assert {rule.known_from for rule in state.rules.values()} == {"given"}


# What the slots prove.


def test_proofs_and_assumptions() -> None:
    state = decode(open_case("factor_map_rank34"))
    assert labels(state, "encoder/attention/query/kernel") == ("ROW COLUMN COLUMN", "file")
    assert labels(state, "encoder/encoder/mlp/wi_0/kernel") == ("ROW BATCH COLUMN", "assumed")
    assert labels(state, "decoder/mixed/kernel") == ("BATCH ROW COLUMN", "assumed")  # it was NONE ROW COLUMN
    assert labels(state, "decoder/conv/kernel") == ("NONE NONE NONE", "assumed")
    assert labels(state, "decoder/logits_dense/kernel") == ("ROW COLUMN", "file")
    assert any("a step needs factor_map" in sentence for sentence in state.assumptions)
    square = decode(open_case("momentum_f32"))
    assert labels(square, "encoder/layers_0/attention/query/kernel") == ("ROW COLUMN", "assumed")
    assert any("Mesh TensorFlow has the two exchanged" in sentence for sentence in square.assumptions)


def test_logical_rules_without_axes_prove_batch() -> None:
    state = decode(open_case("scanned_logical_rules"), logical_factor_rules=STANDARD)
    assert labels(state, "encoder/encoder/attention/query/kernel") == ("ROW BATCH COLUMN", "file")
    assert labels(state, "encoder/encoder/relpos_bias/rel_embedding") == ("NONE NONE NONE", "assumed")


def test_bounds_of_the_smallest_factored_axis() -> None:
    group = decode(open_case("momentum_f32")).optimizer.groups[0]  # 7x30 isn't factored, 10x24 is
    assert group.hyperparameters["min_dim_size_to_factor"] == 10
    assert group.known_from["min_dim_size_to_factor"] == "assumed"
    assert (
        decode(open_case("default_heuristics")).optimizer.groups[0].hyperparameters["min_dim_size_to_factor"]
        == 128
    )


@pytest.mark.parametrize(
    ("shape", "row", "column", "expected"),
    [
        ((10, 24), (10,), (24,), ("ROW COLUMN", "file")),
        ((24, 10), (10,), (24,), ("COLUMN ROW", "file")),
        ((16, 16), (16,), (16,), ("ROW COLUMN", "assumed")),
        ((24, 10), (24,), (10,), None),
        ((3, 8), (3, 8), (3,), ("BATCH ROW", "assumed")),
        ((4, 2, 16, 64), (2, 64), (4, 2, 16), ("COLUMN BATCH COLUMN ROW", "assumed")),
        ((12, 4, 6), (12,), (4, 6), ("ROW COLUMN COLUMN", "file")),
        ((4, 4, 4), (4,), (4, 4), ("ROW COLUMN COLUMN", "assumed")),
        ((4, 5), (5,), (5,), None),
        ((4, 5), (1,), (1,), None),
        ((2,) * 9, (2,), (2,) * 8, None),
    ],
)
def test_rules_from_slots(shape: Any, row: Any, column: Any, expected: tuple[str, str] | None) -> None:
    rule = from_slots(shape, row, column, by_logical_axes=False)
    labels = None if rule is None else (" ".join(axis.value for axis in rule.axes), rule.known_from)
    assert labels == expected


@pytest.mark.parametrize(
    ("rule", "shape", "factored", "expected"),
    [
        (None, (), True, ""),
        (None, (500,), True, "NONE"),
        (None, (200, 128), True, "COLUMN ROW"),
        (None, (128, 200), True, "ROW COLUMN"),
        (None, (128, 128), True, "ROW COLUMN"),
        (None, (127, 200), True, "NONE NONE"),
        (None, (200, 200, 200), True, None),
        (None, (200, 200, 200), False, "NONE NONE NONE"),
        ((COLUMN, ROW), (128, 200), True, "ROW COLUMN"),
        ((COLUMN, ROW), (12, 20), True, "NONE NONE"),
        ((NONE, BATCH), (500, 500), True, "NONE BATCH"),
        ((BATCH, ROW), (5, 5), True, "BATCH ROW"),
        ((BATCH,), (5,), True, "BATCH"),
        ((ROW,), (5,), True, "NONE"),
        ((ROW, BATCH, COLUMN), (2, 2, 2), True, "ROW BATCH COLUMN"),
        ((ROW, BATCH, COLUMN), (2, 2, 2), False, "NONE NONE NONE"),
    ],
)
def test_what_t5x_makes_of_a_rule(rule: Any, shape: Any, factored: bool, expected: str | None) -> None:
    axes = effective(rule, shape, factored, 128)
    assert (None if axes is None else " ".join(axis.value for axis in axes)) == expected


# What the user says.


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        ({"decayrate": 0.8}, "(?s)isn't a hyperparameter of adafactor @ decayrate.*did you mean decay_rate"),
        ({"relative_step": True}, "isn't a hyperparameter of variant t5x @ relative_step"),
        (
            {"decay_rate": "x", "factored": 1, "beta1": 1.0},
            "(?s)is 'x', .* @ decay_rate.*is 1, .* @ factored.*is 1.0, .* @ beta1",
        ),
        ({"min_dim_size_to_factor": 1.5}, "expected integer"),
        ({"dtype_momentum": "float99"}, "expected one of"),
        ({"clipping_threshold": 0}, "exclusive_minimum"),
        ({"factor_map": {"HParamMap": [["(", ["ROW"]]]}}, "regex"),
        ({"factor_map": {"HParamMap": [["a"]]}}, "pairs"),
        ({"factor_map": {"a": ["ROWS"]}}, "unknown label"),
        ({"factor_map": {"a": "ROW"}}, "isn't a list"),
        ({"factor_map": 5}, "factor_map"),
        (
            {"logical_factor_rules": {"embed": "ROW"}, "logical_axes": {"a": ["embed", "heads"]}},
            "(?s)an axis.*heads",
        ),
        ({"logical_factor_rules": "other_rules()", "logical_axes": {}}, "isn't a map"),
        (
            {"logical_factor_rules": STANDARD, "logical_axes": {"a": ["embed", "mlp", "relpos_buckets"]}},
            "together",
        ),
        ({"traversals_and_optimizers": [{"hyperparameters": {}}]}, "another form"),
        ({"traversals_and_optimizers": [{"path_regex_search": "(", "hyperparameters": {}}]}, "another form"),
        (
            {"traversals_and_optimizers": [{"path_regex_search": ".", "hyperparameters": {"x": 1}}]},
            "adafactor @ x",
        ),
        ({"traversals_and_optimizers": [{"path_regex_search": "kernel$"}]}, "has slots but isn't selected"),
        ({"traversals_and_optimizers": [{"path_regex_search": "."}] * 2}, "selected 2 times"),
    ],
)
def test_what_a_user_cannot_say(hints: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        decode(open_case("momentum_f32"), **hints)


@pytest.mark.parametrize(
    ("case", "hints", "words"),
    [
        ("momentum_f32", {"beta1": None}, "beta1 is None, but m is in use"),
        ("default_heuristics", {"beta1": 0.9}, "beta1 is 0.9, but m is a placeholder"),
        ("momentum_bf16_wd", {"dtype_momentum": "float32"}, "dtype_momentum is float32, but m is bfloat16"),
        ("momentum_f32", {"factored": False}, "but the rule .NONE, NONE. gives a full v"),
        ("unfactored_momentum", {"factor_map": None}, "no factor rule that T5X would take"),
        ("momentum_f32", {"factor_map": None, "min_dim_size_to_factor": 11}, "gives a full v"),
        ("momentum_f32", {"factor_map": None, "min_dim_size_to_factor": 7}, r"has a full v, but the rule"),
        (
            "factor_map_rank34",
            {"factor_map": {"decoder/conv/kernel": ["NONE"] * 3}},
            "no factor rule that T5X",
        ),
        (
            "factor_map_rank34",
            {"factor_map": {"HParamMap": [[".", ["ROW", "COLUMN", "BATCH"]]]}},
            "a factor rule of",
        ),
        (
            "scale_map_maxscale_gnorm",
            {"multiply_by_parameter_scale": {"HParamMap": [["x", True]]}},
            "no true or false",
        ),
    ],
)
def test_what_the_file_contradicts(case: str, hints: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        decode(open_case(case), **hints)


def test_every_contradiction_is_named() -> None:
    with pytest.raises(StateError) as raised:
        decode(open_case("momentum_f32"), beta1=None, factored=False)
    text = str(raised.value)
    for path in meta("momentum_f32")["params"]:
        assert ("beta1 is None, but m is in use", path) in raised.value.faults
    count = len(meta("momentum_f32")["params"])
    assert f"beta1 is None, but m is in use @ {count} places: " in text
    assert text.count("gives a full v") == 4


def test_hints_are_heard_over_what_is_inferred() -> None:
    group = decode(open_case("momentum_f32"), beta1=0.5, decay_rate=0.7, learning_rate=0.1).optimizer.groups[
        0
    ]
    assert (group.hyperparameters["beta1"], group.known_from["beta1"]) == (0.5, "given")
    assert (group.hyperparameters["learning_rate"], group.known_from["learning_rate"]) == (0.1, "given")
    assert group.known_from["epsilon1"] == "assumed"
    assert group.known_from["dtype_momentum"] == "file"


def test_a_map_of_scales_is_resolved_by_path() -> None:
    group = decode(
        open_case("scale_map_maxscale_gnorm"), **recorded_hyperparameters("scale_map_maxscale_gnorm")
    ).optimizer.groups[0]
    scales = group.hyperparameters["multiply_by_parameter_scale"]
    assert {path for path, flag in scales.items() if not flag} == {
        "token_embedder/embedding",
        "encoder/relpos_bias/rel_embedding",
        "encoder/encoder_norm/scale",
    }
    named = decode(open_case("momentum_f32"), multiply_by_parameter_scale=dict.fromkeys(scales, True))
    assert named.optimizer.groups[0].hyperparameters["multiply_by_parameter_scale"] == dict.fromkeys(
        scales, True
    )


def test_labels_in_every_spelling() -> None:
    for spelling in (["Row", "batch", "col"], ["FactorDim.ROW", "FactorDim.BATCH", "column"]):
        hints = {"factor_map": {"HParamMap": [["mlp/wi_0/kernel$", spelling]]}}
        with pytest.raises(StateError) as raised:  # the map has no entry for the others
            decode(open_case("factor_map_rank34"), **hints)
        assert "mlp/wi_0" not in str(raised.value)


def test_two_optimizers_without_a_word() -> None:
    state = decode(open_case("multi_optimizer"))
    first, second = state.optimizer.groups
    assert all(path.endswith("kernel") for path in first.paths)
    assert (len(first.paths), len(second.paths)) == (3, 2)
    assert "beta1" not in first.hyperparameters
    assert second.hyperparameters["beta1"] is None
    assert state.group_of("frozen/table") is None
    assert "frozen/table" not in state.slots
    assert any("two optimizers" in sentence for sentence in state.assumptions)


# A gin file and a manifest beside the checkpoint.

RUN_GIN = """
DECAY = 0.75
adafactor.Adafactor:
  decay_rate = %DECAY
  step_offset = 3
  logical_factor_rules = @adafactor.standard_logical_factor_rules()
  dtype_momentum = 'bfloat16'
  multiply_by_parameter_scale = @scales()
  nonsense = 5
"""


def with_gin(tmp_path: Path) -> Checkpoint:
    folder = tiny(tmp_path / "checkpoint_5")
    (tmp_path / "operative_config.gin").write_text(RUN_GIN)
    return T5X.open(folder)


def test_a_gin_file_is_known_from_file(tmp_path: Path) -> None:
    checkpoint = with_gin(tmp_path)
    state = decode(checkpoint, step_offset=4)
    group = state.optimizer.groups[0]
    assert (group.hyperparameters["decay_rate"], group.known_from["decay_rate"]) == (0.75, "file")
    assert (group.hyperparameters["step_offset"], group.known_from["step_offset"]) == (4, "given")
    assert group.known_from["multiply_by_parameter_scale"] == "assumed"
    assert any("nonsense=5" in sentence and "isn't used" in sentence for sentence in state.assumptions)
    assert any("@scales()" in sentence for sentence in state.assumptions)
    assert not any("standard_logical" in sentence for sentence in state.assumptions)


def test_a_gin_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "checkpoint_5")
    (folder / "config.gin").write_text("a.b = '''")
    checkpoint = T5X.open(folder)
    assert "gin file can't be read" in checkpoint.findings[0].what
    assert decode(checkpoint).counts.updates == 5


def converted(state: TrainState, target: Path) -> Checkpoint:
    """Writes a state as a conversion does, with what is known of it in the manifest."""
    side = {"container": "t5x", "layout": "t5x", "step": state.counts.updates}
    fields = {**unknown_fields({}), "target": side, "state": state.to_json()}
    with staged(target, "folder", fields=lambda tensors: fields) as stage:
        T5X.write(LAYOUT.encode(state), stage)
        stage.commit(T5X.open)
    return open_proven(T5X, target)


@pytest.mark.parametrize("case", CASES)
def test_a_manifest_carries_what_was_known(case: str, tmp_path: Path) -> None:
    original = decode(open_case(case), **recorded_hyperparameters(case)).with_hyperparameters(step_offset=2)
    original = replace(original, counts=Counts(original.counts.updates, 77), assumptions=("one",))
    again = decode(converted(original, tmp_path / "run"))
    assert again.to_json() == original.to_json()
    hinted = decode(converted(original, tmp_path / "two"), decay_rate=0.5)
    assert hinted.rules == original.rules
    assert {group.hyperparameters["decay_rate"] for group in hinted.optimizer.groups} == {0.5}
    assert {group.hyperparameters["step_offset"] for group in hinted.optimizer.groups} == {2}


def test_a_manifest_that_does_not_fit_is_not_believed(tmp_path: Path) -> None:
    original = decode(open_case("momentum_f32"), **recorded_hyperparameters("momentum_f32"))
    converted(original, tmp_path / "run")
    target = tmp_path / "run" / "checkpoint_4" / "target.encoder.encoder_norm.scale" / "0"
    target.write_bytes(target.read_bytes()[:-1] + b"\1")
    checkpoint = open_proven(T5X, tmp_path / "run")
    assert checkpoint.manifest is None
    assert [finding.place for finding in checkpoint.findings if finding.damage] == [str(target)]


@pytest.mark.parametrize("state", [{"schema": "adafactor"}, {"schema": "adafactor", "groups": [{}]}])
def test_a_manifest_with_an_incomplete_record(state: dict[str, Any]) -> None:
    checkpoint = replace(open_case("momentum_f32"), manifest={"state": state})
    with pytest.raises(StateError, match="incomplete"):
        decode(checkpoint)


def test_a_manifest_of_another_optimizer_says_nothing() -> None:
    checkpoint = replace(open_case("momentum_f32"), manifest={"state": {"schema": "adamw"}})
    assert decode(checkpoint).to_json() == decode(open_case("momentum_f32")).to_json()


# Trees that aren't what they should be.


def tampered(case: str, **changes: Any) -> Checkpoint:
    """Returns a checkpoint with leaves replaced: `path__in__tree=value`, None to remove one."""
    checkpoint = open_case(case)
    for name, value in changes.items():
        *path, last = name.split("__")
        node = checkpoint.tree
        for key in path:
            node = node[key]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return replace(checkpoint)


ZEROS = in_memory(np.zeros((2, 2), np.float32))
SLOTS = "state__param_states__encoder__layers_0__mlp__wo__kernel"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{SLOTS}__v_row": ZEROS, f"{SLOTS}__m": ZEROS}, r"slot m has shape \(2, 2\), expected \(24, 10\)"),
        ({f"{SLOTS}__v_row": ZEROS}, r"v_row \(2, 2\) and v_col \(24,\), and no factor rule"),
        ({f"{SLOTS}__v": ZEROS}, r"slot v has shape \(2, 2\)"),
        ({f"{SLOTS}__v": in_memory(np.zeros((24, 10), np.float32))}, "has a full v beside v_row"),
        ({f"{SLOTS}__m": None}, "has no slot m"),
        ({f"{SLOTS}__mu": ZEROS}, "unknown slot mu"),
        ({SLOTS: None}, "has no slots, and no None"),
        ({"target__encoder": None}, "has slots but no parameter"),
        ({"target__encoder__layers_0__mlp__wo__kernel": 5}, "is no tensor but int"),
        ({f"{SLOTS}__v_row": "x"}, "is no slot but str"),
        ({"state__step": ZEROS}, "state/step"),
        ({"state__step": "4"}, "state/step"),
        ({"state__step": in_memory(np.asarray(4, np.float32))}, "state/step"),
    ],
)
def test_faults_of_a_tree_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        decode(tampered("momentum_f32", **changes))


@pytest.mark.parametrize("step", [4.0, 4.5, float("nan")])
def test_a_step_that_t5x_cast_as_it_restored_from_orbax_is_read(step: float) -> None:
    cast = tampered("momentum_f32", state__step=in_memory(np.asarray(step, np.float32)))
    by_orbax = replace(cast, container="orbax")
    if step == 4:
        assert decode(by_orbax).counts.updates == 4
    else:
        with pytest.raises(StateError, match="state/step"):
            decode(by_orbax)


def test_slots_of_the_right_shape_are_taken_even_if_swapped() -> None:
    checkpoint = open_case("momentum_f32")
    square = checkpoint.tree["state"]["param_states"]["encoder"]["layers_0"]["attention"]["query"]["kernel"]
    square["v_row"], square["v_col"] = square["v_col"], square["v_row"]
    assert decode(checkpoint).slots.keys() == decode(open_case("momentum_f32")).slots.keys()


def test_a_parameter_of_shape_1_has_real_slots() -> None:
    state = decode(open_case("small_factor_shapes"))
    gate = state.slots["encoder/gate"]
    assert gate.keys() == {"v"}
    assert gate["v"].shape == (1,)
    assert float(gate["v"].read()[0]) > 0
    off = LAYOUT.encode(decode(open_case("small_factor_shapes"))).tree["state"]["param_states"]["encoder"][
        "gate"
    ]
    assert float(off["m"].read()[0]) == 0


def test_momentum_of_a_parameter_of_shape_1() -> None:
    real = tampered(
        "small_factor_shapes", state__param_states__encoder__gate__m=in_memory(np.ones(1, np.float32))
    )
    assert decode(real).slots["encoder/gate"].keys() == {"v", "m"}
    beside = open_case("momentum_f32")
    beside.tree["target"]["gate"] = in_memory(np.ones(1, np.float32))
    zero = {name: in_memory(np.zeros(1, np.float32)) for name in ("v_row", "v_col", "v", "m")}
    beside.tree["state"]["param_states"]["gate"] = zero
    assert decode(beside).slots["gate"].keys() == {"v", "m"}


def test_parameters_without_optimizer_state() -> None:
    checkpoint = open_case("momentum_f32")
    nothing: tuple[Any, ...] = ({}, None)
    for empty in nothing:
        checkpoint.tree["state"]["param_states"] = empty
        bare = replace(checkpoint)
        assert LAYOUT.detect(bare) is not None
        state = decode(bare)
        assert not state.slots
        assert state.assumptions == ("The checkpoint holds no optimizer state, only parameters.",)
        assert LAYOUT.encode(state).tree["state"]["param_states"] == {}


def test_what_else_the_tree_holds_comes_back() -> None:
    checkpoint = open_case("momentum_f32")
    statistics = in_memory(np.arange(3.0))
    checkpoint.tree["flax_mutables"] = {"batch_stats": {"mean": statistics}}
    checkpoint.tree["state"]["more"] = {"x": statistics}
    checkpoint.tree["other"] = None
    checkpoint.tree["more"] = {"y": 5}
    state = decode(
        replace(checkpoint, meta={**checkpoint.meta, "files_beside": ["train_ds-000-of-001.index"]})
    )
    encoded = LAYOUT.encode(state)
    assert encoded.tree["flax_mutables"] == {"batch_stats": {"mean": statistics}}
    assert encoded.tree["state"]["more"] == {"x": statistics}
    assert encoded.tree["more"] == {"y": 5}
    assert list(encoded.dropped) == ["extra/files_beside/train_ds-000-of-001.index"]
    assert tensor_names(encoded.tree).keys() == checkpoint.tensors.keys()


# What T5X can hold.


def matrix(rule: tuple[Axis, ...], shape: tuple[int, int] = (3, 5), **slots: Array) -> TrainState:
    tensors = {name: in_memory(array) for name, array in slots.items()}
    return TrainState(
        {"a/kernel": in_memory(np.ones(shape, np.float32))},
        {"a/kernel": tensors} if tensors else {},
        Optimizer("adafactor", "hf", (Group(("a/kernel",)),)),
        Counts(3, 3),
        {"a/kernel": Rule(rule, "file")},
        {"scheduler": {"last": 3}, "ema": {"a": in_memory(np.ones(3))}},
    )


def test_statistics_go_by_their_axes() -> None:
    row, column = np.arange(3, dtype=np.float32), np.arange(5, dtype=np.float32)
    for rule, v_row, v_col in (((ROW, COLUMN), row, column), ((COLUMN, ROW), column, row)):
        state = matrix(rule, v_row=v_row, v_col=v_col)
        slots = LAYOUT.encode(state).tree["state"]["param_states"]["a"]["kernel"]
        assert (slots["v_row"].read().tolist(), slots["v_col"].read().tolist()) == (
            row.tolist(),
            column.tolist(),
        )
        assert (slots["v"].shape, slots["m"].shape) == ((1,), (1,))


def test_what_has_no_place_is_dropped_by_name() -> None:
    state = replace(matrix((NONE, NONE), v=np.ones((3, 5), np.float32)), counts=Counts(3, 9))
    assert LAYOUT.encode(state).dropped.keys() == {"extra/scheduler/last", "extra/ema/a", "counts/schedule"}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (matrix((ROW, COLUMN), v_row=np.ones(3, np.float32)), "no second moment"),
        (matrix((NONE, NONE), m=np.ones((3, 5), np.float32)), "no second moment"),
        (
            matrix((NONE, COLUMN), v_row=np.ones(3, np.float32), v_col=np.ones((3, 5), np.float32)),
            "one axis only",
        ),
        (replace(matrix((NONE, NONE), v=np.ones((3, 5), np.float32)), counts=Counts(2**31, 0)), "int32"),
    ],
)
def test_what_t5x_cannot_hold(state: TrainState, words: str) -> None:
    with pytest.raises(InexactError, match=words):
        LAYOUT.encode(state)


def test_another_optimizer_is_refused() -> None:
    state = matrix((NONE, NONE), v=np.ones((3, 5), np.float32))
    other = replace(state, optimizer=replace(state.optimizer, schema="adamw"), rules={})
    with pytest.raises(InexactError, match="adamw"):
        LAYOUT.encode(other)


def test_a_square_matrix_is_row_then_column() -> None:
    assert by_size((4, 4)) == (ROW, COLUMN)
    assert by_size((5, 4)) == (COLUMN, ROW)


@pytest.mark.parametrize(
    "tree",
    [None, [], {}, {"target": {}}, {"target": {}, "state": {}}, {"params": {}, "state": {"step": 1}}],
)
def test_other_trees_are_not_recognised(tree: Any) -> None:
    assert LAYOUT.detect(Checkpoint("t5x", Path("x"), tree)) is None


def test_optax_inside_t5x_is_not_recognised() -> None:
    tensor = in_memory(np.ones(3))
    states: Mapping[str, Any] = {"0": {"count": tensor, "mu": {"a": tensor}, "nu": {"a": tensor}}}
    tree = {"target": {"a": tensor}, "state": {"step": tensor, "param_states": states}}
    assert LAYOUT.detect(Checkpoint("t5x", Path("x"), tree)) is None


def test_the_registry_finds_the_layout() -> None:
    layout, evidence = registry.detect_layout(open_case("momentum_f32"))
    assert (layout.name, evidence.specificity) == ("t5x", 20)
