"""`make certificates`: proves conversions of recorded checkpoints; writes docs/certificates and docs/proof.md's table.

    python tests/certificates.py [NAME ...]

Sources lie in tests/golden, so a clean clone makes the same certificates; one run is trained here. Targets are
temporary; `convert` says in the certificate how each is made again. Without every framework installed our own step
takes the place of a class, and the certificate says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness, Hints
from statekit.conversion.convert import convert, plan
from statekit.maps.model_map import maps_of
from statekit.verify.certificate import Certificate
from statekit.verify.verification import verify

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/certificates"
GOLDEN = "tests/golden"
PAGE = "docs/proof.md"
BEGIN, END = "<!-- certificates -->", "<!-- /certificates -->"


@dataclass(frozen=True)
class Recipe:
    """A conversion that is proven.

    Attributes:
        name: Of the certificate.
        title: From what to what, for people.
        source: Below tests/golden; or the name of the recipe whose target it goes on from; or of `TRAINED`.
        target: Name of the target.
        to: Container.
        layout: Layout.
        hparams: What the source doesn't say.
        variant: Whose rule it is, where the source can't tell.
        map: The map, if the model gets other names.
        config: What the map is told.
        require: The least exactness that is asked for.
    """

    name: str
    title: str
    source: str
    target: str
    to: str
    layout: str
    hparams: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    map: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    require: Exactness = Exactness.ROUNDING

    @property
    def hints(self) -> CheckpointRef:
        """What is said of the source."""
        return Hints(dict(self.hparams), self.variant)


_T5X, _BETA1 = "t5x/momentum_f32/checkpoint/checkpoint_4", {"beta1": 0.9}
_T5 = "t5x_train/t5_11_unscanned/checkpoint/checkpoint_8"
_T2T, _SAID = "t2t/late_beta1_scaled_extlr/checkpoint", {"beta1": 0.9}
_MESH = "mesh_tf/adafactor_bf16_master_t5/checkpoint"
_ICEFALL = "scaled_adam/zipformer2025_basic/checkpoint/checkpoint-6.pt"
_LANS = "mxnet_lans/fused_bounds_clip_rescale/checkpoint"
_ADAMW = "torch_formats/adamw_megatron_core/checkpoint/iter_0000004"
_KERAS = "keras/adamw_ema_schedule_clip/checkpoint/model.keras"
RECIPES = (
    Recipe("t5x-torch", "T5X to statekit.torch", _T5X, "t.pt", "torch", "statekit-torch", _BETA1),
    Recipe(
        "t5x-hf", "T5X to Transformers' Adafactor", _T5X, "t.pt", "torch", "torch-optim", _BETA1,
        require=Exactness.STATISTICS,
    ),
    Recipe(
        "t5x-hf-t5", "T5X's T5 to Hugging Face's T5", _T5, "t5", "hf-trainer", "statekit-torch",
        map="t5x-t5:hf-t5", config={"num_heads": 4},
    ),
    Recipe("t5x-optax", "T5X to Optax in Orbax", _T5X, "ckpt", "orbax", "optax", _BETA1),
    Recipe("t2t-t5x", "Tensor2Tensor to T5X", _T2T, "checkpoint_3", "t5x", "t5x", _SAID, "t2t_late"),
    Recipe("mesh-t5x", "Mesh-TensorFlow to T5X", _MESH, "checkpoint_4", "t5x", "t5x", {"min_dim_size_to_factor": 8}),
    Recipe(
        "mesh-t5x-torch", "the same on to statekit.torch", "mesh-t5x", "t.pt", "torch", "statekit-torch",
        {"factor_map": [["expert", ["NONE", "ROW", "COLUMN"]], [".*", "HEURISTIC"]], "min_dim_size_to_factor": 8},
    ),
    Recipe("icefall-jax", "icefall to statekit.jax", _ICEFALL, "ckpt", "orbax", "statekit-jax", variant="zip2025"),
    Recipe("lans-torch", "MXNet's LANS to statekit.torch", _LANS, "t.pt", "torch", "statekit-torch"),
    Recipe("lans-jax", "MXNet's LANS to statekit.jax", _LANS, "ckpt", "orbax", "statekit-jax"),
    Recipe(
        "lans-tensorflow", "MXNet's LANS to statekit.tensorflow", _LANS, "t.weights.h5", "keras-h5", "statekit-keras"
    ),
    Recipe("adamw-torch-optax", "AdamW: torch to Optax", _ADAMW, "ckpt", "orbax", "optax"),
    Recipe("adamw-optax-torch", "AdamW: Optax to torch", "adamw-torch-optax", "t.pt", "torch", "torch-optim"),
    Recipe(
        "adamw-torch-keras", "AdamW: torch to Keras", _ADAMW, "t.weights.h5", "keras-h5", "keras",
        require=Exactness.LOSSY,
    ),
    Recipe("adamw-keras-torch", "AdamW: Keras to statekit.torch", _KERAS, "t.pt", "torch", "statekit-torch"),
    Recipe(  # of the recorded Keras run nothing: it keeps an average of its weights, for which Optax has no place
        "adamw-keras-optax", "AdamW: Keras to Optax", "trained.keras", "ckpt", "orbax", "optax",
        require=Exactness.STATISTICS,
    ),
)  # fmt: skip


def _by_keras(path: Path) -> None:
    """Lets Keras make three updates of one group without averages, and save the model.

    Its AdamW goes by elements, and weights and gradients are drawn by NumPy, so that a run is the same everywhere.
    """
    import keras

    draw = np.random.default_rng(15)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01)
    model.compile(optimizer, "mse")
    for variable in model.trainable_variables:
        variable.assign(draw.standard_normal(variable.shape).astype(np.float32))
    for _ in range(3):
        grads = [
            (1e-3 * draw.standard_normal(one.shape)).astype(np.float32) for one in model.trainable_variables
        ]
        optimizer.apply([keras.ops.convert_to_tensor(grad) for grad in grads], model.trainable_variables)
    model.save(path)


TRAINED: Mapping[str, Callable[[Path], None]] = {"trained.keras": _by_keras}
"""Runs that their own library makes here, as none was recorded."""


def made(recipe: Recipe, folder: Path) -> Certificate:
    """Converts as a recipe says, and returns the certificate; paths in it are relative, as in a clone.

    Args:
        recipe: The recipe.
        folder: Where targets are, one folder for each recipe.
    """
    other = next((one for one in RECIPES if one.name == recipe.source), None)
    source = Path(GOLDEN, recipe.source) if other is None else folder / other.name / other.target
    if other is not None and not source.exists():
        made(other, folder)
    elif recipe.source in TRAINED:
        source = folder / recipe.source
        folder.mkdir(exist_ok=True)
        TRAINED[recipe.source](source)
    target = folder / recipe.name / recipe.target
    target.parent.mkdir(parents=True, exist_ok=True)
    maps = maps_of(recipe.map, dict(recipe.config)) if recipe.map else ()
    convert(
        plan(
            source,
            target,
            to=recipe.to,
            layout=recipe.layout,
            hints=recipe.hints,
            maps=maps,
            require=recipe.require,
        ),
        replace=True,
    )
    return verify(source, target, hints=recipe.hints, require=recipe.require)


def table(certificates: Mapping[str, Certificate]) -> str:
    """Returns the table of docs/proof.md."""
    rows = [
        "| run | rule | updates by | faults seen | apart at most | verdict |",
        "|---|---|---|--:|--:|---|",
    ]
    for recipe in RECIPES:
        data = certificates[recipe.name].data
        replay, controls = data["replay"], data["controls"]
        by = f"{_by(replay['source'])}, {_by(replay['target'])}" if replay["stepped"] else "none"
        usual = [one for one in replay.get("probes", ()) if one["name"] == "as large as the run's"]
        apart = f"{float(usual[0]['relative']):.0e} of an update" if usual else "-"
        seen = f"{sum(one['detected'] for one in controls)} of {len(controls)}"
        link = f"[{recipe.title}](certificates/{recipe.name}.json)"
        rule = data["rule"]["exactness"]
        rows.append(f"| {link} | {rule} | {by} | {seen} | {apart} | {data['verdict']['whole']} |")
    return "\n".join(rows)


def _by(title: str) -> str:
    name = title.partition(" (")[0].partition(",")[0]
    return "our step" if name.startswith("statekit.optim") else f"`{name}`"


def main(names: Iterable[str]) -> None:
    os.chdir(ROOT)
    FOLDER.mkdir(exist_ok=True)
    chosen = [one for one in RECIPES if not names or one.name in names]
    certificates = {}
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / GOLDEN.partition("/")[0], Path(folder) / "tests")
        os.chdir(folder)  # so that targets have relative names too
        for recipe in chosen:
            if recipe.source in TRAINED and importlib.util.find_spec("keras") is None:
                print(f"{recipe.name}: left as it was, as Keras isn't installed", flush=True)
                continue
            certificates[recipe.name] = made(recipe, Path("made"))
            certificates[recipe.name].save(FOLDER / f"{recipe.name}.json")
            print(f"{recipe.name}: {certificates[recipe.name].verdict}", flush=True)
            for why in certificates[recipe.name].data["verdict"]["because"][:3]:
                print(f"  {why}", flush=True)
        os.chdir(ROOT)
    for recipe in RECIPES:
        if recipe.name not in certificates and (FOLDER / f"{recipe.name}.json").exists():
            data = json.loads((FOLDER / f"{recipe.name}.json").read_text())
            data.pop("digest")
            certificates[recipe.name] = Certificate(data)
    page = ROOT / PAGE
    text = page.read_text()
    if BEGIN in text and len(certificates) == len(RECIPES):
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        page.write_text(f"{before}{BEGIN}\n{table(certificates)}\n{END}{after}")


if __name__ == "__main__":
    main(sys.argv[1:])
