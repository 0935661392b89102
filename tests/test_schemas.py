"""The schemas: valid, complete, equal in their questions, and right where recordings of the originals can judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors import safe_open

from goldens import COMPACT, GOLDEN, bundles
from statekit.cli import schemas_command
from statekit.cli.main import statekit
from statekit.errors import NotFoundError, StateError, UsageError
from statekit.state.schema import load_schema, schema_names
from statekit.tensors.tensor import in_memory

ROOT = Path(__file__).parents[1]
FILES = ROOT / "schemas"
META: dict[str, Any] = json.loads((FILES / "optimizer.schema.json").read_text(encoding="utf-8"))
DTYPES = {"float32", "float64", "int64", "parameter"}
Data = dict[str, Any]


def read(name: str) -> Data:
    data: Data = json.loads((FILES / f"{name}.json").read_text(encoding="utf-8"))
    return data


def faults(data: Data) -> list[str]:
    """Everything wrong with one file: against the JSON Schema, else between its parts."""
    violations = sorted(
        f"{e.json_path}: {e.message}" for e in jsonschema.Draft202012Validator(META).iter_errors(data)
    )
    return violations or [*_part_faults(data), *_setting_faults(data), *_constant_faults(data)]


def _part_faults(data: Data) -> Iterator[str]:
    variants, differences = set(data["variants"]), set(data["differences"])
    if data["reference"] not in variants:
        yield "reference is no variant"
    touched = {key for step in data["steps"] for key in step["differences"]}
    yield from (f"steps and differences don't agree on {key}" for key in touched ^ differences)
    for name, slot in data["slots"].items():
        if slot["dtype"] not in DTYPES | set(data["hyperparameters"]) | differences:
            yield f"slot {name} has an unknown dtype"
        for key in ("aliases", "stored_as"):
            yield from (
                f"slot {name}: {key} has unknown variant {v}" for v in set(slot.get(key, {})) - variants
            )
    for name, spec in data["hyperparameters"].items():
        yield from (f"{name}: native has unknown variant {v}" for v in set(spec["native"]) - variants)
        decided = {slot for slots in spec.get("decides", {}).values() for slot in slots}
        yield from (f"{name} decides unknown slot {slot}" for slot in decided - set(data["slots"]))
        if "at_loading" in spec and not {"existence", "dtype"} & spec["decides"].keys():
            yield f"{name} can't refit what it decides"


def _setting_faults(data: Data) -> Iterator[str]:
    hyperparameters = data["hyperparameters"]
    for name, variant in data["variants"].items():
        settings = {**variant["fixed"], **variant["defaults"]}
        yield from (
            f"{name} both offers and fixes {key}" for key in set(variant["fixed"]) & set(variant["defaults"])
        )
        yield from (
            f"{name} has unknown hyperparameter {key}" for key in set(settings) - set(hyperparameters)
        )
        for key, spec in hyperparameters.items():
            if key not in settings and "if_absent" not in spec:
                yield f"{name} doesn't say {key}"
                continue
            value = settings.get(key, spec.get("if_absent"))
            if not _fits(value, spec):
                yield f"{name}: {key} can't be {value}"
            if name == data["reference"] and value != spec["default"]:
                yield f"{key}: the default isn't that of {name}"


def _fits(value: object, spec: Mapping[str, Any]) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "number": (int, float),
        "integer": (int,),
        "boolean": (bool,),
        "string": (str,),
    }
    kinds |= {"array": (list,), "object": (dict,), "null": (type(None),)}
    if isinstance(value, bool) and "boolean" not in spec["type"]:
        return False
    if not any(isinstance(value, kinds[kind]) for kind in spec["type"]):
        return False
    limits = spec["range"]
    if isinstance(value, str):
        return value in limits.get("values", [value])
    numbers = value if isinstance(value, list) and limits else [value]
    return all(_within(n, limits) for n in numbers if isinstance(n, int | float) and not isinstance(n, bool))


def _within(n: float, limits: Mapping[str, Any]) -> bool:
    return (
        limits.get("minimum", n) <= n <= limits.get("maximum", n)
        and not n <= limits.get("exclusive_minimum", -np.inf)
        and not n >= limits.get("exclusive_maximum", np.inf)
    )


def _constant_faults(data: Data) -> Iterator[str]:
    differences = data["differences"]
    for name, variant in data["variants"].items():
        constants = variant["constants"]
        yield from (f"{name} lacks constant {key}" for key in differences.keys() - constants.keys())
        yield from (f"{name} has unknown constant {key}" for key in constants.keys() - differences.keys())
        nulls = {key for key, value in constants.items() if value is None}
        yield from (
            f"{name}: {key} is null without a reason, or has one without being null"
            for key in nulls ^ set(variant["unknown"])
        )
        for key in constants.keys() & differences.keys() - nulls:
            value, spec = constants[key], differences[key]
            kind = {bool: "boolean", float: "number", int: "number"}.get(type(value))
            if not (value in spec.get("values", {}) if kind is None else kind == spec.get("type")):
                yield f"{name}: {key} can't be {value}"


def test_six_optimizers_have_a_schema() -> None:
    assert schema_names() == ["adafactor", "adamw", "lamb", "lans", "muon", "scaled_adam"]


def test_json_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(META)
    for place, part in _objects(META, "$"):
        if "properties" in part:
            assert part["additionalProperties"] is False, place
            for key, item in part["properties"].items():
                assert "description" in item or "$ref" in item, f"{place}.{key}"


def _objects(part: Any, place: str) -> Iterator[tuple[str, Data]]:
    if isinstance(part, dict):
        yield place, part
        for key, item in part.items():
            yield from _objects(item, f"{place}.{key}")


@pytest.mark.parametrize("name", schema_names())
def test_file_is_valid_and_consistent(name: str) -> None:
    data = read(name)
    assert data["name"] == name
    assert faults(data) == []


DROP = object()
BREAKS = [
    ("slots.v.symbol", DROP, "'symbol' is a required property"),
    ("slots.v.shape", "square", "is not one of"),
    ("author", "me", "Additional properties"),
    ("variants.hf.eps", 1, "Additional properties"),
    ("hyperparameters.beta1.meaning", DROP, "'meaning' is a required property"),
    ("variants.hf.sources", [], "should be non-empty"),
    ("variants.hf.stepped", DROP, "'stepped' is a required property"),
    ("variants.hf.constants.tie_break", DROP, "hf lacks constant tie_break"),
    ("variants.hf.constants.warm", "no", "hf has unknown constant warm"),
    ("variants.hf.constants.tie_break", "maybe", "hf: tie_break can't be maybe"),
    ("variants.hf.constants.tie_break", None, "hf: tie_break is null"),
    ("variants.hf.defaults.epsilon3", 1.0, "hf has unknown hyperparameter epsilon3"),
    ("variants.hf.defaults.decay_rate", -0.8, "hf: decay_rate can't be -0.8"),
    ("variants.hf.defaults.decay_rate", DROP, "hf doesn't say decay_rate"),
    ("variants.t5x.defaults.factored", 1, "t5x: factored can't be 1"),
    ("hyperparameters.decay_rate.default", 0.7, "decay_rate: the default isn't that of t5x"),
    ("steps.4.differences", [], "steps and differences don't agree on tie_break"),
    ("slots.v.aliases.jaxopt", "v", "slot v: aliases has unknown variant jaxopt"),
    ("reference", "jaxopt", "reference is no variant"),
    ("hyperparameters.beta1.decides.existence", ["mu"], "beta1 decides unknown slot mu"),
    ("hyperparameters.factored.at_loading", "refit", "factored can't refit what it decides"),
]


@pytest.mark.parametrize(("path", "value", "fault"), BREAKS, ids=[f"{b[0]}: {b[2]}" for b in BREAKS])
def test_broken_copy_is_refused(path: str, value: object, fault: str) -> None:
    data: Any = read("adafactor")
    *parents, last = path.split(".")
    part = data
    for key in parents:
        part = part[int(key) if isinstance(part, list) else key]
    if value is DROP:
        del part[last]
    else:
        part[last] = value
    assert any(fault in one for one in faults(data)), faults(data)


def test_slots_are_those_of_the_design() -> None:
    slots = {name: list(load_schema(name).slots) for name in schema_names()}
    assert slots["adafactor"] == ["v_row", "v_col", "v", "m", "master", "average"]
    assert slots["lans"] == ["m", "v", "master"] and slots["lamb"] == ["m", "v", "master", "average"]
    assert slots["adamw"] == ["m", "v", "v_max", "master", "average"]
    groupwise = ["model_norms", "model_norm_threshold", "num_clipped"]
    assert slots["scaled_adam"] == [
        "delta",
        "exp_avg_sq",
        "param_rms",
        "scale_exp_avg_sq",
        "scale_grads",
        *groupwise,
    ]
    assert {n: s.shape for n, s in load_schema("adafactor").slots.items()} == {
        "v_row": "row", "v_col": "column", "v": "parameter", "m": "parameter",
        "master": "parameter", "average": "parameter",
    }  # fmt: skip


def test_settings_fill_in_what_a_variant_does_not_offer() -> None:
    adafactor = load_schema("adafactor")
    assert adafactor.settings("t5x").keys() == adafactor.hyperparameters.keys()
    torch = adafactor.settings("torch")
    assert torch["decay_rate"] == 0.8 and torch["beta1"] is None and torch["min_dim_size_to_factor"] == 0
    assert adafactor.settings("t2t_late")["dtype_momentum"] == "parameter"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="scaled_adam"):
        load_schema("adagrad")
    with pytest.raises(NotFoundError, match="mesh_tf"):
        load_schema("adafactor").variant("jaxopt")


def judged(bundle: Path) -> tuple[str, str]:
    """Schema and variant that a recording judges."""
    meta = json.loads((bundle / "meta.json").read_text(encoding="utf-8"))
    optimizer = meta["optimizer"].lower()
    schema = next((name for name in ("adafactor", "lamb", "lans") if name in optimizer), "adamw")
    match bundle.parent.name:
        case "t2t":
            return schema, "t2t_early" if bundle.name.startswith("early") else "t2t_late"
        case "mesh_tf":
            return schema, "gpt_neo" if "gpt-neo" in optimizer else "mesh_tf"
        case "mxnet_lans":
            return schema, "mxnet_fused" if meta["hyperparameters"]["use_fused_step"] else "mxnet_unfused"
        case "scaled_adam":
            return "scaled_adam", meta["extra"]["generation"]
        case "optax_adafactor" if "scale_by_factored_rms" in optimizer:
            return "adafactor", "optax"
        case system:
            return schema, system.removesuffix("_adafactor")


SYSTEMS = [
    "t5x",
    "t2t",
    "mesh_tf",
    "hf_adafactor",
    "torch_adafactor",
    "optax_adafactor",
    "keras",
    "scaled_adam",
    "mxnet_lans",
]
RECORDED = {
    f"{b.parent.name}/{b.name}": b
    for system in SYSTEMS
    for b in bundles(system)
    if (b / "trajectory.safetensors").is_file()
}


def native_slots(bundle: Path) -> set[str]:
    with safe_open(bundle / "trajectory.safetensors", framework="numpy") as file:
        keys = [key.split("/") for key in file.keys()]  # noqa: SIM118 - not a dict
    return {key[-1].rpartition(".")[2] for key in keys if key[1] == "slot"}


def test_recordings_are_found() -> None:
    assert {name.partition("/")[0] for name in RECORDED} >= {"t5x"}


@pytest.mark.parametrize("bundle", RECORDED.values(), ids=RECORDED.keys())
def test_every_recorded_slot_has_a_place(bundle: Path) -> None:
    name, variant = judged(bundle)
    schema = load_schema(name)
    assert schema.variant(variant)["evidence"] == "recorded"
    known = {slot.aliases[variant] for slot in schema.slots.values() if variant in slot.aliases}
    assert native_slots(bundle) <= known | set(schema.variant(variant)["native_state"])


def test_every_alias_was_recorded() -> None:
    seen: dict[tuple[str, str], set[str]] = {}
    whole = {"t5x"} if GOLDEN == COMPACT else set(SYSTEMS)  # of the others the compact copy has only some
    for bundle in RECORDED.values():
        if bundle.parent.name in whole:
            seen.setdefault(judged(bundle), set()).update(native_slots(bundle))
    assert seen
    for (name, variant), names in seen.items():
        missing = {
            s.aliases[variant] for s in load_schema(name).slots.values() if variant in s.aliases
        } - names
        # optax' AMSGrad is another link of the chain, and Lamb was recorded without averages
        assert missing <= {"nu_max", "average"}, f"{name} {variant}"


SET_BY_BUNDLE = {
    "t5x/default_heuristics": "",
    "t2t/late_default_ref": "decay_rate",  # None there, and 0.8 through adafactor_decay_rate_pow
    "t2t/early156_quant4": "decay_rate simulated_quantize_bits",
    "mesh_tf/adafactor_default_min128": "decay_rate",
    "hf_adafactor/relstep_warmup_scale": "warmup_init",
    "torch_adafactor/adafactor_bf16": "learning_rate",
    "optax_adafactor/adafactor_orbax_v1": "learning_rate clipping_threshold min_dim_size_to_factor",
    "keras/adafactor_default": "",
    "keras/lamb_default": "learning_rate",
    "keras/adamw_ema_schedule_clip": "learning_rate epsilon amsgrad "
    "ema_momentum global_norm_clip_threshold use_ema weight_decay_rate",
    "torch_adafactor/adamw_fused_named": "learning_rate beta2 weight_decay_rate",
    "optax_adafactor/adamw_flax_msgpack": "learning_rate beta2 "
    "epsilon exclude_from_weight_decay weight_decay_rate",
    "optax_adafactor/lamb_pytree_noocdbt": "learning_rate beta1 beta2 epsilon weight_decay_rate",
    "mesh_tf/adamw_2device_stacked_sharded": "learning_rate exclude_from_weight_decay weight_decay_rate",
    "mxnet_lans/fused_trainer": "learning_rate wd",
    "mxnet_lans/unfused_trainer": "learning_rate wd",
    "scaled_adam/gptsovits_clipping": "lr betas clipping_scale "
    "clipping_update_period parameters_names show_dominant_parameters",
    "scaled_adam/pt7_two_groups_eden": "lr clipping_scale clipping_update_period "
    "param_max_rms parameters_names scalar_max",
    "scaled_adam/zipformer202305_basic": "lr clipping_scale clipping_update_period "
    "param_max_rms param_min_rms scalar_max",
    "scaled_adam/zipformer202407_clipping": "lr clipping_scale "
    "clipping_update_period param_max_rms scalar_max",
    "scaled_adam/zipformer2025_bf16": "lr clipping_scale clipping_update_period",
}
"""What a recording sets itself; everything else it left at the original's default."""

NO_RULE = {
    "name",
    "use_locking",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "lr_scheduler",
    "param_idx2name",
    "sym",
}
"""Arguments of originals that don't touch values, or are objects of their own."""


@pytest.mark.parametrize("case", [case for case in SET_BY_BUNDLE if case in RECORDED])
def test_defaults_are_those_the_original_was_built_with(case: str) -> None:
    name, variant = judged(GOLDEN / case)
    schema = load_schema(name)
    native: Data = json.loads((GOLDEN / case / "meta.json").read_text(encoding="utf-8"))["hyperparameters"]
    explained = set(NO_RULE)
    for key, default in schema.settings(variant).items():
        spelling = schema.hyperparameters[key]["native"].get(variant, {"name": key})
        argument, _, index = spelling["name"].rstrip("]").partition("[")
        if argument not in native:
            continue
        explained.add(argument)
        if key not in SET_BY_BUNDLE[case].split() and spelling.get("note") is None:
            value = native[argument][int(index)] if index else native[argument]
            assert _same(value, default, spelling.get("sign", 1)), (
                f"{key}: {value} is recorded, {default} the default"
            )
    assert explained >= native.keys()


def _same(value: object, default: object, sign: int) -> bool:
    if isinstance(value, float) and isinstance(default, float):
        return bool(np.float32(sign * value) == np.float32(default))  # Keras reports its own float32
    return value == default


def test_t5x_defaults_are_exactly_those_of_its_constructor() -> None:
    native = json.loads((GOLDEN / "t5x/default_heuristics/meta.json").read_text(encoding="utf-8"))[
        "hyperparameters"
    ]
    assert dict(load_schema("adafactor").variant("t5x")["defaults"]) == native


def run(*arguments: str) -> str:
    result = CliRunner().invoke(schemas_command.command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", schema_names())
def test_cli_shows_a_schema(name: str) -> None:
    text, data = run(name), read(name)
    for word in [
        *data["slots"],
        *data["variants"],
        *data["hyperparameters"],
        *(step["name"] for step in data["steps"]),
    ]:
        assert word in text
    for key in data["differences"]:
        values = {json.dumps(v["constants"][key]) for v in data["variants"].values()}
        assert len(values) == 1 or f"\n{key} " in text, key


def test_cli_lists_all_schemas() -> None:
    text = run()
    assert all(name in text for name in schema_names())
    listed = json.loads(run("--json"))
    assert listed["format"] == "statekit.schemas/1"
    assert listed["schemas"] == {name: read(name) for name in schema_names()}


@pytest.mark.parametrize("name", schema_names())
def test_cli_json_is_the_file(name: str) -> None:
    assert json.loads(run(name, "--json")) == read(name)


def test_cli_compares_variants_side_by_side() -> None:
    text = run("adafactor", "--variant", "t5x", "--variant", "mesh_tf").split("How the variants differ")[1]
    rows = {
        line.split()[0]: line.split()[1:] for line in text.split("Defaults,")[0].splitlines() if line.split()
    }
    assert rows["constant"] == ["t5x", "mesh_tf"]
    assert rows["tie_break"] == ["last", "first"]
    assert rows["clipping_over"] == ["non_batch", "tensor"]
    assert "epsilon1_place" not in rows  # equal in both


def test_cli_shows_one_variant_in_full() -> None:
    text = run("lans", "--variant", "habana")
    assert "epsilon_place" in text and "mxnet_unfused" not in text.split("Variants")[1]
    assert "epsilon_place isn't known. Not in the reference" in text


def test_cli_refuses_unknown_names() -> None:
    for arguments in (["adagrad"], ["adafactor", "--variant", "jaxopt"]):
        assert isinstance(CliRunner().invoke(schemas_command.command, arguments).exception, UsageError)
    assert CliRunner().invoke(schemas_command.command, ["--variant", "t5x"]).exit_code == 2


def test_cli_imports_no_framework() -> None:
    code = (
        "import sys; from statekit.cli.main import main; main(['schemas', 'adafactor']);"
        "found = {'torch', 'jax', 'tensorflow', 'tensorstore', 'orbax'} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def test_document_explains_every_part_and_its_commands_run() -> None:
    text = (ROOT / "docs/schemas.md").read_text(encoding="utf-8")
    for key in [*META["properties"], *META["$defs"]["variant"]["properties"]]:
        assert f"`{key}`" in text or key in ("$schema", "versions", "notes"), key
    commands = [line.partition("#")[0].split() for line in text.splitlines() if line.startswith("statekit ")]
    assert len(commands) == 4
    for command in commands:
        assert CliRunner().invoke(statekit, command[1:], catch_exceptions=False).exit_code == 0


def test_a_tensor_where_a_number_changes_its_sign_is_refused() -> None:
    """torch's `beta2_decay` is our decay rate turned about: a tensor kept its sign, or ended in a TypeError."""
    decay = in_memory(np.array(-0.8, np.float32))
    with pytest.raises(StateError, match="expected a number"):
        load_schema("adafactor").canonical("torch", {"beta2_decay": decay})
    assert load_schema("adafactor").canonical("torch", {"beta2_decay": -0.8})["decay_rate"] == 0.8


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ([3.4, -4.7, 2.0], True),
        ([[3.4, -4.7, 2.0], [4, 5, 6]], True),
        ([], False),
        ([1, 2], False),
        ([[1, 2, 3], 4], False),
        ([1, "x", 3], False),
        ([1, [2], 3], False),
        ([[1, 2, float("inf")]], False),
    ],
)
def test_a_table_of_coefficients_has_rows_of_three_numbers(value: Any, fits: bool) -> None:
    assert (load_schema("muon").fault("ns_coefficients", value) == "") == fits
