"""Muon as a drop-in: it goes on from the originals' files as they recorded their next updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_muon import RECORDINGS, checkpoint_of

import statekit
from statekit.attestation.doctor import doctor
from statekit.attestation.implied_updates import moved_otherwise
from statekit.conversion.open_state import open_state
from statekit.errors import UnknownRuleError
from statekit.optim.newton_schulz import WITHIN
from statekit.verify.recording import open_recording

LIMIT = WITHIN["bfloat16"]
"""How far an update may be from the original's, of its largest entry (docs/bounds.md)."""
EMERGING = {
    "variant": "muon/emerging",
    "hparams": {
        "muon/nesterov": True,
        "muon/coefficient_type": "quintic",
        "muon/num_ns_steps": 5,
        "muon/scale_mode": "spectral",
        "muon/extra_scale_factor": 0.2,
        "muon/fp32_matmul_prec": "medium",
        "muon/weight_decay_method": "decoupled",
    },
}
"""What only the constructor of Emerging-Optimizers' Muon knows, as the recording was made."""
TOLD: Mapping[str, Mapping[str, Any]] = {
    "emerging_optimizers_spectral": EMERGING,
    "keller_single_conv": {"variant": "muon/keller"},
    "optax_default_standard": {},
}
"""What the files don't say."""
ORIGINALS = (
    "torch_list",
    "torch_accelerate",
    "torch_dcp",
    "torch_dcp_flattened",
    "torch_dict_rms",
    "torch_groups_flatkeys",
    "keller_aux_adam",
    "keller_single_conv",
    "moonlight",
    "optax_default_standard",
    "emerging_optimizers_spectral",
)


VARYING = ("torch_dict_rms",)
"""Recordings in which the rate changes."""


class Recorded:
    """A recorded run from its checkpoint on."""

    def __init__(self, name: str) -> None:
        self.meta = json.loads((RECORDINGS / name / "meta.json").read_text())
        self._grads = load_file(RECORDINGS / name / "grads.safetensors")
        self._states = load_file(RECORDINGS / name / "trajectory.safetensors")
        self.names = {path: self.meta["extra"].get("fqn", {}).get(path, path) for path in self.meta["params"]}
        self.step = self.meta["checkpoint_step"]

    @property
    def rate(self) -> dict[str, float] | None:
        """The rate of each optimizer; None where an optimizer's groups have several, which the files say."""
        rates = self.meta["learning_rate"][-1]
        rates = rates if isinstance(rates, list) else [rates] * 2
        return dict(zip(("muon", "adamw"), rates, strict=True)) if len(rates) == 2 else None

    def params(self, step: int) -> dict[str, np.ndarray]:
        return {name: self._states[f"{step}/param/{path}"] for path, name in self.names.items()}

    def __iter__(self) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
        """Yields the rate or the rates of each further update, and its gradients."""
        for step in range(self.step + 1, self.meta["steps"] + 1):
            grads = {name: self._grads[f"{step}/{path}"] for path, name in self.names.items()}
            yield self.meta["learning_rate"][step - 1], grads

    def misses(self, step: int, params: Mapping[str, Any]) -> dict[str, float]:
        """Returns how far each parameter is from where it was, of the largest movement of that update."""
        before, after = self.params(step - 1), self.params(step)
        moved = {name: np.abs(after[name] - before[name]).max() for name in after}
        off = {name: np.abs(np.asarray(params[name]) - after[name]).max() for name in after}
        return {name: float(off[name] / (moved[name] or 1.0)) for name in after}


@pytest.mark.torch
@pytest.mark.parametrize("name", ORIGINALS)
def test_pytorch_goes_on_as_recorded(name: str) -> None:
    torch = pytest.importorskip("torch")
    from statekit.torch import Partition, load_optimizer

    recorded = Recorded(name)
    model = {
        n: torch.nn.Parameter(torch.from_numpy(value.copy()))
        for n, value in recorded.params(recorded.step).items()
    }
    optimizer = load_optimizer(checkpoint_of(name), model.items(), lr=0.02, **TOLD.get(name, {}))
    assert isinstance(optimizer, Partition)
    for step, (rates, grads) in enumerate(recorded, recorded.step + 1):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[i] if isinstance(rates, list) else rates
        for n, param in model.items():
            param.grad = torch.from_numpy(grads[n])
        optimizer.step()
        off = recorded.misses(step, {n: param.detach() for n, param in model.items()})
        assert max(off.values()) < LIMIT
        assert sorted(off.values())[len(off) // 2] < 1e-5


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize("name", [name for name in ORIGINALS if name != "torch_dict_rms"])
def test_jax_goes_on_as_recorded(name: str) -> None:
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from statekit.jax import load_optimizer

    recorded = Recorded(name)
    rate = recorded.rate
    params = {n: jax.numpy.asarray(value) for n, value in recorded.params(recorded.step).items()}
    optimizer, state = load_optimizer(checkpoint_of(name), params, learning_rate=rate, **TOLD.get(name, {}))
    update = jax.jit(optimizer.update)
    for step, (_, grads) in enumerate(recorded, recorded.step + 1):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert max(recorded.misses(step, params).values()) < LIMIT


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "name",
    ["keras_muon_default"] + [pytest.param(n, marks=pytest.mark.slow) for n in ORIGINALS if n not in VARYING],
)
def test_keras_goes_on_as_recorded_with_one_optimizer(name: str) -> None:
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    from statekit.tensorflow import load_optimizer

    recorded = Recorded(name)
    rate = recorded.rate
    start = recorded.params(recorded.step)
    variables = {n: keras.Variable(v, name=n.replace("/", "-")) for n, v in start.items()}
    hints = TOLD.get(name, {})
    optimizer = load_optimizer(checkpoint_of(name), variables, rate, **hints)
    for step, (_, grads) in enumerate(recorded, recorded.step + 1):
        optimizer.apply([tf.constant(grads[n]) for n in variables], [*variables.values()])
        off = recorded.misses(step, {n: variable.numpy() for n, variable in variables.items()})
        assert max(off.values()) < LIMIT


def muon_of_keras(**options: Any) -> Any:
    """Returns a model of Keras whose optimizer has made two updates."""
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Dense(6, name=name) for name in ("up", "down", "head")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="net")
    model.compile(optimizer=keras.optimizers.Muon(0.02, **options), loss="mse")
    trained(model, 2)
    return model


def trained(model: Any, updates: int) -> None:
    x = np.random.default_rng(3).normal(size=(4, 6)).astype("float32")
    model.fit(x, x[::-1], batch_size=4, epochs=updates, shuffle=False, verbose=0)


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_own_class_is_muon_beside_its_adam_there_and_back(tmp_path: Path) -> None:
    """The state has two optimizers of schemas; Keras loads what is written again, and goes on to the bit."""
    keras = pytest.importorskip("keras")
    from statekit.tensorflow import attest, load_optimizer, load_params

    options = {"exclude_layers": ["head"], "adam_lr_ratio": 0.3, "adam_weight_decay": 0.1, "ns_steps": 4}
    model = muon_of_keras(**options)
    model.save(tmp_path / "run.keras")
    with open_state(tmp_path / "run.keras") as opened:
        muon, adamw = opened.state.optimizer.groups
        assert opened.state.optimizer.kinds == (("muon", "keras"), ("adamw", "keras"))
        assert len(muon.paths) == 2 and muon.hyperparameters["ns_steps"] == 4
        assert adamw.hyperparameters["learning_rate"] == muon.hyperparameters["learning_rate"] * 0.3
        assert (adamw.hyperparameters["weight_decay_rate"], adamw.hyperparameters["beta2"]) == (
            0.1 / 0.3,
            0.999,
        )
    statekit.convert(tmp_path / "run.keras", tmp_path / "neutral", to="statekit")
    statekit.convert(tmp_path / "neutral", tmp_path / "back.keras", layout="keras")
    back = keras.models.load_model(tmp_path / "back.keras")
    assert back.optimizer.get_config() == model.optimizer.get_config()
    assert attest(back.optimizer, back, tmp_path / "run.keras").passed
    ours = keras.models.load_model(tmp_path / "run.keras")
    load_params(tmp_path / "run.keras", ours)
    ours.compile(optimizer=load_optimizer(tmp_path / "run.keras", ours), loss="mse")
    start = model.get_weights()
    for each in (model, back, ours):
        trained(each, 1)
    weights = (m.get_weights() for m in (model, back, ours))
    for old, theirs, written, stepped in zip(start, *weights, strict=True):
        assert np.array_equal(theirs, written)
        assert np.abs(stepped - theirs).max() <= WITHIN["float32"] * np.abs(theirs - old).max()


@pytest.mark.tensorflow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_run_of_torch_becomes_keras_own_class(tmp_path: Path) -> None:
    """Matrices that aren't Muon's are named by exclude_layers; a mean becomes the sum that Keras keeps."""
    keras = pytest.importorskip("keras")
    torch = pytest.importorskip("torch")
    model = muon_of_keras()
    model.save(tmp_path / "model.keras")
    names = [v.path for v in model.trainable_variables]
    params = {
        v.path: torch.nn.Parameter(torch.from_numpy(v.numpy().copy())) for v in model.trainable_variables
    }
    moved = [name for name in names if name.endswith("kernel") and "head" not in name]
    rest = [name for name in names if name not in moved]
    optimizers = [
        torch.optim.Muon([params[n] for n in moved], lr=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([params[n] for n in rest], lr=0.003, eps=1e-7),
    ]
    for param in params.values():
        param.grad = torch.full_like(param, 0.1)
    for optimizer in optimizers:
        optimizer.step()
    file = {
        "model": {n: p.detach() for n, p in params.items()},
        "optimizers": [o.state_dict() for o in optimizers],
    }
    torch.save(file, tmp_path / "run.pt")
    target = tmp_path / "run.keras"
    statekit.convert(
        tmp_path / "run.pt", target, layout="keras", like=tmp_path / "model.keras",
        param_names=[*moved, *rest], require="lossy",
    )  # fmt: skip
    loaded = keras.models.load_model(target)
    assert isinstance(loaded.optimizer, keras.optimizers.Muon)
    momenta = dict(zip(names, loaded.optimizer.momentums, strict=True))
    velocities = dict(zip(names, loaded.optimizer.adam_velocities, strict=True))
    assert [n for n in names if velocities[n] is not None] == [n for n in names if n in rest]
    for name in moved:
        mean = optimizers[0].state[params[name]]["momentum_buffer"].numpy()
        np.testing.assert_allclose(momenta[name].numpy(), mean * 20, rtol=1e-6)
    assert loaded.optimizer.rms_rate == 0.2 and loaded.optimizer.adam_lr_ratio == 0.15


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"nesterov": False, "rms_rate": None}, marks=pytest.mark.slow)]
)
def test_tensorflow_makes_the_updates_of_keras(options: dict[str, Any]) -> None:
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    from statekit.tensorflow import Muon

    draw = np.random.default_rng(0).normal
    values = [draw(size=shape).astype("float32") for shape in ((8, 5), (8, 5), (5, 8))]
    theirs, ours = ([keras.Variable(v, name=f"kernel{i}") for i, v in enumerate(values)] for _ in range(2))
    original, optimizer = keras.optimizers.Muon(0.02, **options), Muon(0.02, **options)
    for _ in range(3):
        before = [variable.numpy() for variable in theirs]
        grads = [tf.constant(draw(size=value.shape).astype("float32")) for value in values]
        original.apply(grads, theirs)
        optimizer.apply(grads, ours)
        for old, left, right in zip(before, theirs, ours, strict=True):
            moved = np.abs(left.numpy() - old).max()
            assert np.abs(left.numpy() - right.numpy()).max() < WITHIN["float32"] * moved


@pytest.mark.torch
def test_groups_may_be_as_kellers_classes_take_them(tmp_path: Path) -> None:
    """And what they save is converted into the file that his classes load."""
    torch = pytest.importorskip("torch")
    from statekit.torch import Partition

    recorded = Recorded("keller_aux_adam")
    shown = recorded.meta["extra"]["optimizers"][0]["param_groups"]
    model = {n: torch.nn.Parameter(torch.from_numpy(v.copy())) for n, v in recorded.params(0).items()}
    groups = [{**group, "params": [(n, model[n]) for n in group["params"]]} for group in shown]
    optimizer = Partition(groups)
    grads = load_file(RECORDINGS / "keller_aux_adam" / "grads.safetensors")
    for step in range(1, recorded.step + 1):
        for path, n in recorded.names.items():
            model[n].grad = torch.from_numpy(grads[f"{step}/{path}"])
        optimizer.step()
    weights = {n: param.detach() for n, param in model.items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "ours.pt")
    statekit.convert(tmp_path / "ours.pt", tmp_path / "his.pt", layout="torch-optim")
    left, right = (
        torch.load(file, weights_only=True)["optimizer"]
        for file in (checkpoint_of("keller_aux_adam"), tmp_path / "his.pt")
    )
    for old, new in zip(left["param_groups"], right["param_groups"], strict=True):
        assert {**new, **old} == new
    for index, record in left["state"].items():
        assert right["state"][index].keys() == record.keys()
        for slot, value in record.items():
            torch.testing.assert_close(right["state"][index][slot], value, rtol=1e-4, atol=1e-6)


@pytest.mark.torch
def test_a_state_that_may_be_anothers_is_muons_where_somebody_says_so(tmp_path: Path) -> None:
    source = checkpoint_of("emerging_optimizers_spectral")
    with open_state(source) as opened:
        assert opened.state.optimizer.kinds == (("torch_native", None), ("adamw", "torch"))
    statekit.convert(source, tmp_path / "there.pt", variant="muon/emerging")
    assert not statekit.diff(source, tmp_path / "there.pt").differences
    with open_state(tmp_path / "there.pt") as opened:
        assert opened.state.optimizer.kinds == (("torch_native", None), ("adamw", "torch"))


@pytest.mark.torch
def test_a_vector_is_refused_by_its_name() -> None:
    torch = pytest.importorskip("torch")
    from statekit.torch import Muon

    linear = torch.nn.Linear(4, 3)
    optimizer = Muon(linear.named_parameters(), lr=0.01)
    linear(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UnknownRuleError, match="bias"):
        optimizer.step()


def test_coefficients_are_three_numbers_or_rows_of_them() -> None:
    from statekit.state.options import read_options

    for wrong in ([1, 2], [1, 2, "x"], [[1, 2, 3], [1, 2]], []):
        assert read_options("muon", "torch", {"ns_coefficients": wrong}).faults
    assert read_options("muon", "keras", {"muon_b": -3.0}).values == {
        "ns_coefficients": [3.4445, -3.0, 2.0315]
    }


FAULTS: dict[str, Callable[..., Any]] = {
    "zero": lambda m, other, before: np.zeros_like(m),
    "swapped": lambda m, other, before: other,
    "transposed": lambda m, other, before: np.ascontiguousarray(m.T),
    "stale": lambda m, other, before: before,
    "a sum": lambda m, other, before: m * np.float32(20.0),
}
"""What a momentum becomes: of itself, of another matrix's, and of that of the step before."""


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["none", *FAULTS])
def test_a_momentum_that_is_wrong_is_found_by_every_verb(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from statekit.torch import attest, load_optimizer

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(12, 12, bias=False) for name in ("a", "b", "c")})
    params = dict(model.named_parameters())
    original = torch.optim.Muon(params.values(), lr=0.02)
    saved = []
    for step in (1, 2, 3):
        for param in params.values():
            param.grad = torch.randn_like(param)
        original.step()
        saved.append(original.state_dict())
        saved[-1]["state"] = {i: {k: v.clone() for k, v in r.items()} for i, r in saved[-1]["state"].items()}
        file = {"model": {n: p.detach() for n, p in params.items()}, "optimizer": saved[-1], "step": step}
        torch.save(file, tmp_path / f"checkpoint_{step}.pt")
    earlier, right = (tmp_path / f"checkpoint_{step}.pt" for step in (2, 3))
    state = saved[-1]["state"]
    if kind != "none":
        before, m, other = (
            record["momentum_buffer"].clone().numpy()
            for record in (saved[-2]["state"][0], state[0], state[1])
        )
        wrong = torch.from_numpy(FAULTS[kind](m, other, before).copy())
        state[0]["momentum_buffer"] = wrong
        if kind == "swapped":
            state[1]["momentum_buffer"] = torch.from_numpy(m.copy())
    torch.save(file, tmp_path / "wrong_3.pt")
    examined = doctor(earlier, tmp_path / "wrong_3.pt")[-1]
    assert [finding.name for finding in examined.findings] == {
        "none": [],
        "stale": ["moments-stale"],
    }.get(kind, ["momentum-differs"])
    live = {n: torch.nn.Parameter(p.detach().clone()) for n, p in params.items()}
    optimizer = load_optimizer(tmp_path / "wrong_3.pt", live.items())
    assert attest(optimizer, live.items(), right).passed == (kind == "none")
    assert bool(statekit.diff(right, tmp_path / "wrong_3.pt").differences) == (kind != "none")


@pytest.mark.parametrize("name", sorted(folder.name for folder in RECORDINGS.iterdir()))
def test_doctor_takes_no_update_of_the_originals_for_another(name: str) -> None:
    with open_recording(RECORDINGS / name) as recording:
        for step in range(recording.first + 1, recording.first + 4):
            one, other = (recording.state(k, recording.trajectories[0], 1) for k in (step, step + 1))
            rates = recording.learning_rate[step - recording.first]
            by_group = rates if isinstance(rates, tuple) else (rates,) * len(one.optimizer.groups)
            groups = (
                replace(group, hyperparameters={**group.hyperparameters, "learning_rate": rate})
                for group, rate in zip(one.optimizer.groups, by_group, strict=True)
            )
            one = replace(one, optimizer=replace(one.optimizer, groups=tuple(groups)))
            counted = (
                replace(s, counts=replace(s.counts, updates=k)) for s, k in ((one, step), (other, step + 1))
            )
            assert moved_otherwise(*counted) == []
