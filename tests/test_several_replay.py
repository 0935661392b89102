"""A recorded run with several optimizers is replayed: torch's side by side, and Optax' partition, from either start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import several_driving
import test_optimizers_side_by_side as side_by_side

from replaying import BACKENDS, marks
from statekit.arrays.backend import backend
from statekit.errors import FormatError, UnknownRuleError
from statekit.tensors.tensor import Array
from statekit.verify.contract import DESCRIPTION, GRADS, TRAJECTORY
from statekit.verify.recorder import Recorder, Spool, write_trajectory
from statekit.verify.recording import open_recording
from statekit.verify.replay import Replay, Subject, free_run, replay

EVERYWHERE = [pytest.param(name, marks=marks(name)) for name in BACKENDS]
SAVED, ALL = 3, 6
UNSAID = ("params", "initial_lr")
OPTAX = {
    "adafactor": {
        "min_dim_size_to_factor": 128, "decay_rate": 0.8, "decay_offset": 0, "multiply_by_parameter_scale": True,
        "clipping_threshold": 1.0, "momentum": 0.9, "dtype_momentum": "float32", "weight_decay_rate": None,
        "eps": 1e-30, "factored": True,
    },
    "adamw": {
        "b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0, "weight_decay": 0.1, "nesterov": False, "amsgrad": False,
        "dtype_momentum": "float32",
    },
}  # fmt: skip
"""What the drawn run says, and what Optax has otherwise."""


def path_of(name: str) -> str:
    return name.replace(".", "/")


@pytest.fixture(scope="module")
def of_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records six updates of torch's Adafactor and AdamW, with what torch.save wrote after three."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_by_side, "SAVED", 0)  # it begins before its first update
        run = side_by_side.Run()
    names = {param: path_of(name) for name, param in run.params.items()}
    groups = [
        {
            **{name: value for name, value in group.items() if name not in UNSAID},
            "schema": type(optimizer).__name__.lower(),
            "variant": "torch",
            "params": [names[param] for param in group["params"]],
        }
        for optimizer in run.optimizers
        for group in optimizer.param_groups
    ]

    def params() -> dict[str, Array]:
        return {names[param]: param.detach().numpy().copy() for param in run.params.values()}

    def slots() -> dict[str, dict[str, Array]]:
        state = {param: slots for one in run.optimizers for param, slots in one.state.items()}
        return {
            path: {slot: value.numpy().copy() for slot, value in state.get(param, {}).items()}
            for param, path in names.items()
        }

    folder = tmp_path_factory.mktemp("torch") / "run"
    spec = {"groups": groups, "counts": {"slots": ["step"], "dtype": "float32"}}
    recorder = Recorder(folder, system="torch_adafactor", hyperparameters=spec)
    recorder.start(params(), {})
    for update, grads in enumerate(run.grads):
        run.step(update, update + 1)
        recorder.update(
            {path_of(name): grad for name, grad in grads.items()}, params(), slots(), (0.02, 0.003)
        )
        if update + 1 == SAVED:
            run.save("list", folder / "run.pt")
    recorder.close("run.pt", SAVED)
    return folder


def linked(state: Any, paths: Mapping[str, Any]) -> dict[str, Array]:
    """The leaves of a state of Optax by the names that recordings give them."""
    import jax

    named = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts = [next(str(getattr(k, n)) for n in ("name", "key", "idx") if hasattr(k, n)) for k in keys]
        ways = (("/".join(parts[i:]), ".".join(parts[:i])) for i in range(1, len(parts)))
        path, field = next(((path, field) for path, field in ways if path in paths), ("", ""))
        named[f"slot/{path}/{field}" if path else f"global/{'.'.join(parts)}"] = np.asarray(leaf)
    return named


@pytest.fixture(scope="module")
def of_optax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records six updates of Optax' partition, jitted, with what Orbax wrote after three."""
    import jax
    import optax

    folder, run = tmp_path_factory.mktemp("optax") / "run", several_driving.Run()
    folder.mkdir()
    grads, states = Spool(folder), Spool(folder)
    params = several_driving.nested(run.start)
    state = run.optimizer.init(params)

    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, state = run.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step)
    for number in range(ALL + 1):
        if number:
            params, state = compiled(several_driving.nested(run.grads[number - 1]), state, params)
            for path, grad in run.grads[number - 1].items():
                grads.add(f"{number}/{path}", grad)
        for path, value in several_driving.flat(params).items():
            states.add(f"{number}/param/{path}", value)
        for name, value in linked(state, run.start).items():
            states.add(f"{number}/{name}", value)
    run.save(folder / "saved", "orbax")
    grads.write(folder / GRADS)
    states.write(folder / TRAJECTORY)
    labels = {"adafactor": "big", "adamw": "small"}
    groups = [
        {
            **arguments,
            **dict.fromkeys(("exclude_from_weight_decay", "clipvalue", "global_norm_clip_threshold")),
            "schema": schema,
            "variant": "optax",
            "params": [path for path, label in several_driving.LABELS.items() if label == labels[schema]],
        }
        for schema, arguments in OPTAX.items()
    ]
    said = {
        "format": "statekit-recording", "version": 1, "system": "optax_adafactor", "steps": [0, ALL],
        "phases": [{"updates": [1, ALL], "hyperparameters": {"groups": groups}}],
        "learning_rate": [[1e-2, 1e-3]] * ALL,
        "trajectories": [{"file": TRAJECTORY, "execution": "compiled"}],
        "checkpoint": {"path": "saved", "step": SAVED},
    }  # fmt: skip
    (folder / DESCRIPTION).write_text(json.dumps(said))
    return folder


def replayed(folder: Path, name: str, start: Any, **changes: Any) -> Replay:
    with open_recording(folder) as recording:
        return replay(Subject(recording, start, changes=changes or None), backend(name))


def holds(result: Replay, start: str) -> None:
    assert result.decoded == () and result.passed
    rows = result.judged[0].rows
    assert {row.step for row in rows} == {*range((0 if start == "init" else SAVED) + 1, ALL + 1)}
    assert {"param", "m", "v", "v_row", "v_col"} == {row.tensor for row in rows}
    assert np.median([row.width for row in rows]) < 2e-4, "a bound this wide proves nothing"


@pytest.mark.torch
@pytest.mark.parametrize("start", ["init", "checkpoint"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_torchs_optimizers_side_by_side(name: str, start: Any, of_torch: Path) -> None:
    holds(replayed(of_torch, name, start), start)


@pytest.mark.jax
@pytest.mark.parametrize("start", ["init", "checkpoint"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_optaxs_partition(name: str, start: Any, of_optax: Path) -> None:
    holds(replayed(of_optax, name, start), start)


@pytest.mark.torch
@pytest.mark.parametrize("wrong", [{"lr": 0.004}, {"betas": [0.8, 0.96]}, {"weight_decay": 0.0}])
def test_one_optimizers_mistake_is_noticed(wrong: dict[str, Any], of_torch: Path) -> None:
    with open_recording(of_torch) as recording:
        spec = recording.phases[0].hyperparameters
        assert [group["schema"] for group in spec["groups"]] == ["adafactor", "adamw"]
        rates = [(0.02, wrong.get("lr", 0.003))] * ALL
        groups = [spec["groups"][0], {**spec["groups"][1], **wrong}]
        said = json.loads((of_torch / DESCRIPTION).read_text())
        said["phases"][0]["hyperparameters"]["groups"], said["learning_rate"] = groups, rates
        place = of_torch.with_name(f"wrong-{'-'.join(wrong)}")
    place.mkdir()
    for file in (GRADS, TRAJECTORY):
        (place / file).symlink_to(of_torch / file)
    (place / DESCRIPTION).write_text(json.dumps({**said, "checkpoint": None}))
    with open_recording(of_torch) as right, open_recording(place) as recording:
        ours = [*free_run(Subject(recording, "init"), backend("numpy"))][-1]
        theirs = right.state(ALL, right.trajectories[0], ALL)
        apart = {
            path: np.max(np.abs(one.read() - theirs.params[path].read())) for path, one in ours.params.items()
        }
    moved = {path for path, distance in apart.items() if distance > 1e-6}
    assert moved == {*groups[1]["params"]}


@pytest.mark.torch
def test_the_free_run_has_the_recordings_own_names(of_torch: Path, tmp_path: Path) -> None:
    with open_recording(of_torch) as recording:
        last = write_trajectory(
            tmp_path / "free.safetensors", free_run(Subject(recording, "init"), backend("numpy")), recording
        )
        names = set(recording.states(recording.trajectories[0]))
    from safetensors import safe_open

    with safe_open(tmp_path / "free.safetensors", "np") as file:
        assert {*file.keys()} == names
    assert last.optimizer.kinds == (("adafactor", "torch"), ("adamw", "torch"))


@pytest.mark.torch
def test_a_group_of_nobody_is_named(of_torch: Path, tmp_path: Path) -> None:
    said = json.loads((of_torch / DESCRIPTION).read_text())
    del said["phases"][0]["hyperparameters"]["groups"][1]["variant"]
    for file in (GRADS, TRAJECTORY):
        (tmp_path / file).symlink_to(of_torch / file)
    (tmp_path / DESCRIPTION).write_text(json.dumps(said))
    with pytest.raises(FormatError, match=r"which optimizer(.|\n)*a/bias, c/bias @ groups/1"):
        replayed(tmp_path, "numpy", "init")


@pytest.mark.torch
def test_the_form_of_torchs_own_description_says_it_by_group(of_torch: Path, tmp_path: Path) -> None:
    spec = json.loads((of_torch / DESCRIPTION).read_text())["phases"][0]["hyperparameters"]
    classes = {"adafactor": "torch.optim.Adafactor", "adamw": "torch.optim.AdamW"}
    kept = ("schema", "variant")
    groups: list[dict[str, Any]] = [
        {name: value for name, value in group.items() if name not in kept} for group in spec["groups"]
    ]
    paths = [path for group in groups for path in group["params"]]
    meta = {
        "system": "torch_formats", "optimizer": "torch.optim.Adafactor and torch.optim.AdamW", "steps": ALL,
        "hyperparameters": {}, "learning_rate": [[0.02, 0.003]] * ALL, "checkpoint_step": SAVED,
        "checkpoint": {"files": ["run.pt"]},
        "extra": {"param_groups": groups, "fqn": {path: path.replace("/", ".") for path in paths}},
    }  # fmt: skip
    for file in (GRADS, TRAJECTORY, "run.pt"):
        (tmp_path / file).symlink_to(of_torch / file)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(
        UnknownRuleError, match=r"several optimizers(.|\n)*adamw(.|\n)*adafactor(.|\n)*param_groups"
    ):
        open_recording(tmp_path)
    for group, one in zip(groups, spec["groups"], strict=True):
        group["optimizer"] = classes[one["schema"]]
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    holds(replayed(tmp_path, "numpy", "init"), "init")
