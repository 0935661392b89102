"""The certificates in docs/certificates: whole, as their schema says, shown in docs/proof.md; some are made again."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from certificates import BEGIN, END, FOLDER, PAGE, RECIPES, ROOT, Recipe, made, table
from telling import once_asked

from goldens import COMPACT
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import convert, plan
from statekit.conversion.plan import Plan
from statekit.errors import StatekitError, UnknownRuleError
from statekit.verify.certificate import read_certificate
from statekit.verify.recording import open_recording
from statekit.verify.repetition import differences
from statekit.verify.verification import verify

SCHEMA = json.loads((ROOT / "schemas/statekit-certificate.schema.json").read_text())
AGAIN = (pytest.param("t5x-torch", marks=pytest.mark.slow), "lans-torch")
"""Those that are made again: they need one framework."""


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_certificate_is_whole_and_passes(recipe: Recipe) -> None:
    stored = read_certificate(FOLDER / f"{recipe.name}.json")
    jsonschema.validate(stored.to_json(), SCHEMA)
    assert stored.passed, stored.data["verdict"]["because"]
    assert not any(one["in_the_update"] is None for one in stored.data["controls"] if one["detected"])


def test_a_page_shows_the_certificates() -> None:
    text = (ROOT / PAGE).read_text()
    shown = text.split(BEGIN, 1)[1].split(END, 1)[0].strip()
    assert shown == table({one.name: read_certificate(FOLDER / f"{one.name}.json") for one in RECIPES})


@pytest.mark.torch
@pytest.mark.parametrize("name", AGAIN)
def test_a_certificate_comes_out_the_same_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink(ROOT / "tests", tmp_path / "tests")
    monkeypatch.chdir(tmp_path)
    (recipe,) = [one for one in RECIPES if one.name == name]
    stored = read_certificate(FOLDER / f"{name}.json")
    assert list(differences(stored, made(recipe, Path("made")))) == []


def test_another_processors_rounding_speaks_against_no_certificate() -> None:
    """On another machine the same bytes may be stepped to other last bits; another content or rule may not pass."""
    stored = read_certificate(FOLDER / "lans-torch.json")
    for verdict, speaks in (("bit-exact", 0), ("within the rounding bound", 0), ("refuted", 1)):
        data = copy.deepcopy(stored.data)
        (row, *_) = data["map"]["tensors"]
        row["verdict"] = verdict
        assert len(list(differences(stored, replace(stored, data=data)))) == speaks
    data = copy.deepcopy(stored.data)
    data["identity"]["target"]["root"] = "0" * 64
    assert len(list(differences(stored, replace(stored, data=data)))) == 1


def said_in(folder: str) -> CheckpointRef:
    """Returns what a recording says of its run, where the checkpoint doesn't say it for each optimizer."""
    with open_recording(COMPACT / folder) as recording:
        return recording.hints(recording.first + 1)


SOURCES = {
    "t5x/momentum_f32/checkpoint/checkpoint_4": Hints({"beta1": 0.9}),
    "t5x/momentum_bf16_wd/checkpoint/checkpoint_4": Hints({"beta1": 0.9, "dtype_momentum": "bfloat16"}),
    "t5x/bf16_params/checkpoint/checkpoint_4": Hints(),
    "t5x/default_heuristics/checkpoint/checkpoint_3": Hints(),
    "t5x/scale_map_maxscale_gnorm/checkpoint/checkpoint_4": Hints(),
    "t5x/multi_optimizer/checkpoint/checkpoint_4": said_in("t5x/multi_optimizer"),
    "t5x_train/t5_11_unscanned/checkpoint/checkpoint_8": Hints(),
    "t2t/late_beta1_scaled_extlr/checkpoint": Hints({"beta1": 0.9}, "t2t_late"),
    "mxnet_lans/fused_bounds_clip_rescale/checkpoint": Hints(),
    "mxnet_lans/zero_grad_nan/checkpoint": Hints(),
    "scaled_adam/zipformer2025_basic/checkpoint/checkpoint-6.pt": Hints(variant="zip2025"),
    "scaled_adam/zipformer202407_clipping/checkpoint/checkpoint-7.pt": Hints(variant="zip202407"),
    "scaled_adam/gptsovits_basic/checkpoint/checkpoint-6.pt": Hints(variant="gptsovits"),
    "torch_formats/adamw_legacy/checkpoint/checkpoint.pt": Hints(),
    "torch_formats/adamw_trainer/checkpoint/checkpoint-4": Hints(),
    "torch_formats/adamw_deepspeed_bf16_zero1/checkpoint/global_step4": Hints(),
    "torch_formats/adafactor_lightning/checkpoint/epoch=0-step=4.ckpt": Hints(),
    "torch_adafactor/adafactor_bf16/checkpoint/checkpoint.pt": Hints(),
    "torch_adafactor/adafactor_foreach_eps/checkpoint/checkpoint.pt": Hints(),
    "hf_adafactor/fixedlr_scale_beta1_wd/checkpoint": Hints(),
    "hf_adafactor/trainer_linear_wd/checkpoint/checkpoint-4": Hints(),
    "keras/adamw_ema_schedule_clip/checkpoint/model.keras": Hints(),
}
TARGETS = {
    "statekit": ("statekit", ""), "statekit-torch": ("torch", ".pt"), "torch-optim": ("torch", ".pt"),
    "torch-fqn": ("dcp", ""), "optax": ("orbax", ""), "statekit-jax": ("flax", ""),
    "keras": ("keras-h5", ".weights.h5"), "statekit-keras": ("keras-h5", ".weights.h5"), "t5x": ("t5x", ""),
    "t2t": ("tf-bundle", ""), "mesh-tf": ("tf-bundle", ""), "mxnet-lans": ("mxnet", ""),
}  # fmt: skip
LEAST = 3
"""Conversions of a source that are verified at the least: what refuses them all would raise no alarm either."""
CAST = ("torch-optim", "torch-fqn")
"""Layouts whose class casts slots of T5X's low precision when it loads them: verify says so, by right."""
QUICK = (
    ("t5x/bf16_params/checkpoint/checkpoint_4", "statekit"),
    ("mxnet_lans/zero_grad_nan/checkpoint", "mxnet-lans"),
    ("scaled_adam/zipformer202407_clipping/checkpoint/checkpoint-7.pt", "statekit"),
    ("torch_adafactor/adafactor_bf16/checkpoint/checkpoint.pt", "torch-optim"),
)


def alarms(source: str, layout: str, folder: Path) -> list[str] | None:
    """Returns what verify says against a conversion that convert makes; None of one that it refuses."""
    container, suffix = TARGETS[layout]
    target = folder / f"out{suffix}"

    def planned(hints: CheckpointRef) -> tuple[Plan, CheckpointRef]:
        return plan(COMPACT / source, target, to=container, layout=layout, hints=hints), hints

    try:
        made_plan, hints = once_asked(SOURCES[source], planned)
        convert(made_plan)
    except StatekitError:
        return None
    try:
        made = verify(COMPACT / source, target, hints=hints, steps=2)
    except UnknownRuleError:  # asked for by name, which is no alarm
        return None
    return [] if made.passed else list(made.data["verdict"]["because"])


@pytest.mark.torch
@pytest.mark.parametrize(("source", "layout"), QUICK)
def test_a_valid_conversion_raises_no_alarm(source: str, layout: str, tmp_path: Path) -> None:
    assert alarms(source, layout, tmp_path) == []


@pytest.mark.torch
@pytest.mark.parametrize("name", ["momentum_bf16_wd", "bf16_params"])
def test_a_class_that_casts_what_it_loads_is_named(name: str, tmp_path: Path) -> None:
    source = next(one for one in SOURCES if f"/{name}/" in one)
    assert any("casts it from" in one for one in alarms(source, "torch-optim", tmp_path) or ())


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.tensorflow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore")  # the frameworks' own
def test_no_valid_conversion_raises_an_alarm(source: str, tmp_path: Path) -> None:
    low = "bf16" in source and source.startswith("t5x/")
    raised = {}
    for layout in TARGETS:
        if not (low and layout in CAST):
            (tmp_path / layout).mkdir()
            raised[layout] = alarms(source, layout, tmp_path / layout)
    assert {layout: said for layout, said in raised.items() if said} == {}
    assert sum(said is not None for said in raised.values()) >= LEAST, "most conversions were refused"
