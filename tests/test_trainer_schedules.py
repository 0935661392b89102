"""A run with a schedule of another library goes on in Trainer at its rates, by the lines, through the next save."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest
import torch

from goldens import GOLDEN
from statekit.conversion.contracts import Hints
from statekit.conversion.convert import plan
from statekit.conversion.resume import of_plan, resume_lines
from statekit.lines.rates import RatesOf
from statekit.state.run import TRAINER_ARGUMENTS, run_of
from statekit.state.schedules.call_text import parse_call
from statekit.state.schedules.called import KEY as CALLED

pytestmark = [pytest.mark.torch]
DONE, MORE = 3, 20
Case = tuple[dict[str, Any], list[list[float]]]
"""What the driver is told, and the rates that are due."""
WARM = "optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 30, 0.01)"
T5X = {"base_learning_rate": 0.5, "warmup_steps": 8}


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def of_torch(
    folder: Path, make: Callable[[Any], Any], groups: int = 1
) -> tuple[Path, list[str], list[list[float]]]:
    """Saves a run of AdamW; returns where, its names, and the rates of its next updates."""
    model = net()
    named = dict(model.named_parameters())
    parts = [[*named][i::groups] for i in range(groups)]
    options = [{"params": [named[n] for n in part], "lr": 0.05 / (i + 1)} for i, part in enumerate(parts)]
    optimizer = torch.optim.AdamW(options)
    schedule = make(optimizer)
    due = []
    for step in range(DONE + MORE):
        if step == DONE:
            tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**tree, "scheduler": schedule.state_dict()}, folder / "run.pt")
        due.append([group["lr"] for group in optimizer.param_groups])
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        schedule.step()
    return folder / "run.pt", [name for part in parts for name in part], due[DONE:]


def torch_class(folder: Path) -> Case:
    def make(optimizer: Any) -> Any:
        from torch.optim import lr_scheduler

        warm = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 9)], [4])

    file, names, due = of_torch(folder, make, 2)
    return {"source": str(file), "layout": "statekit-torch", "names": names}, due


def torch_lambda(folder: Path) -> Case:
    from transformers import get_linear_schedule_with_warmup

    file, names, due = of_torch(folder, lambda one: get_linear_schedule_with_warmup(one, 6, 30), 2)
    call = "get_linear_schedule_with_warmup(optimizer, 6, 30)"
    return {"source": str(file), "layout": "torch-optim", "names": names, "schedule": call}, due


def of_optax(folder: Path) -> Case:
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    schedule = eval(WARM, {"optax": optax})
    optimizer = optax.adamw(schedule)
    params = {"a": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)}}
    state = optimizer.init(params)
    for _ in range(DONE):
        updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
        params = optax.apply_updates(params, updates)
    with ocp.StandardCheckpointer() as saver:
        saver.save(
            folder.absolute() / "source" / str(DONE) / "default", {"params": params, "opt_state": state}
        )
    due = [[float(schedule(DONE + i))] for i in range(MORE)]
    said = {"weight_decay": 1e-4}
    return {"source": str(folder / "source"), "layout": "torch-optim", "schedule": WARM, "hparams": said}, due


def of_t5x(folder: Path) -> Case:
    """Its rule: base * min(1, t / warm-up) / sqrt(max(t, warm-up)). Source: t5x/utils.py."""
    source = GOLDEN / "t5x/momentum_f32/checkpoint"
    base, warm = T5X["base_learning_rate"], T5X["warmup_steps"]
    due = [[base * min(1, t / warm) / max(t, warm) ** 0.5] for t in range(4, 4 + MORE)]
    arguments = ", ".join(f"{name}={value}" for name, value in T5X.items())
    call = f"create_learning_rate_scheduler(factors='constant * linear_warmup * rsqrt_decay', {arguments})"
    hparams = {"beta1": 0.9, "multiply_by_parameter_scale": False}
    case = {"source": str(source), "layout": "statekit-torch", "schedule": call, "hparams": hparams}
    return case, due


def of_mxnet(folder: Path) -> Case:
    """FactorScheduler(step, factor): the rate of update n, from 1 on, falls after each `step` of them."""
    source = GOLDEN / "mxnet_lans/trainer_scheduler_unfused"
    if not source.exists():
        pytest.skip("in the whole set only")
    base, due = 0.04, []
    for number in range(
        5, 5 + MORE
    ):  # warmed up in two updates; the state has counted to 2 with 0.7 of the base
        due.append([max(0.7 * base * 0.7 ** ((number - 3) // 2), 1e-8)])
    return {"source": str(source / "checkpoint"), "layout": "statekit-torch"}, due


def of_keras(folder: Path) -> Case:
    import keras

    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 12, end_learning_rate=0.01, power=2.0)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="a")(inputs))
    model.compile(optimizer=keras.optimizers.AdamW(schedule), loss="mse")
    model.fit(np.ones((DONE, 4)), np.ones((DONE, 3)), batch_size=1, verbose=0)
    model.save(folder / "run.keras")
    due = [[float(schedule(DONE + i))] for i in range(MORE)]
    return {"source": str(folder / "run.keras"), "layout": "statekit-torch"}, due


SOURCES: dict[str, Callable[[Path], Case]] = {
    "a class of torch": torch_class,
    "torch, told": torch_lambda,
    "optax, told": of_optax,
    "t5x, told": of_t5x,
    "mxnet": of_mxnet,
    "keras": of_keras,
}


SAMPLE = ("torch, told", "optax, told", "keras")
"""Those that aren't left to the long run."""


def driven(root: Path, sources: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Runs trainer_schedule_driving.py; returns for each source what it found, and the rates that are due."""
    folders, due = {name: root / str(i) for i, name in enumerate(sources)}, {}
    for name, folder in folders.items():
        folder.mkdir()
        case, due[name] = SOURCES[name](folder)
        (folder / "case.json").write_text(json.dumps(case))
    script = Path(__file__).with_name("trainer_schedule_driving.py")
    done = drivers.run(script, *folders.values(), imports=["transformers.trainer", "statekit.torch"])
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: (json.loads((folder / "result.json").read_text()), due[name])
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    return driven(tmp_path_factory.mktemp("sampled"), SAMPLE)


@pytest.mark.jax
@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR's own use of it
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras on NumPy 2
@pytest.mark.parametrize(
    "source", [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.slow) for one in SOURCES]
)
def test_trainer_goes_on_at_the_runs_rates(
    source: str, sampled: dict[str, tuple[Any, Any]], tmp_path: Path
) -> None:
    """They were those of Trainer's arguments, linear to 0 unless these say otherwise, and nothing said so."""
    result, due = (sampled if source in SAMPLE else driven(tmp_path, [source]))[source]
    assert result["finite"] and len(result["rates"]) == MORE
    for rates, meant in zip(result["rates"], due, strict=True):
        assert rates == pytest.approx(meant * (len(rates) if len(meant) == 1 else 1), rel=2e-6, abs=1e-9)
    assert result["later"] == result["lines"]


def lines_of(file: Path, to: Path, names: list[str]) -> str:
    planned = plan(file, to, to="hf-trainer", layout="torch-optim", hints=Hints(param_names=tuple(names)))
    return "\n".join(resume_lines(of_plan(planned), planned.state))


def test_what_trainer_would_make_instead_is_never_passed_over(tmp_path: Path) -> None:
    """Nothing was said of a run without a schedule's record, nor of a function that no file has."""
    from torch.optim import lr_scheduler

    file, names, _ = of_torch(tmp_path, lambda one: lr_scheduler.LambdaLR(one, lambda step: 0.9**step))
    assert "(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda))" in lines_of(
        file, tmp_path / "function", names
    )
    whole = torch.load(file)
    del whole["scheduler"]
    torch.save(whole, file)
    lines = lines_of(file, tmp_path / "nothing", names)
    assert "# nothing tells the run's schedule: args makes the rates after the next update's" in lines
    assert "optimizers=(optimizer, None)" in lines


@pytest.mark.parametrize("is_given", [False, True])
def test_a_schedule_that_trainer_was_given_is_not_taken_for_that_of_its_arguments(is_given: bool) -> None:
    """A Trainer with a LambdaLR of the program's own was shown the rates of `lr_scheduler_type`, linear by default."""
    from transformers.optimization import get_scheduler

    optimizer = torch.optim.AdamW(net().parameters(), lr=0.1)
    schedule = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        if is_given
        else get_scheduler("linear", optimizer, 0, 50)
    )
    for _ in range(DONE):
        optimizer.step()
        schedule.step()
    said = {"lr_scheduler_type": "linear", "max_steps": 50, "learning_rate": 0.1}
    state = {**schedule.state_dict()}
    [read] = run_of({"torch": {"scheduler": state, TRAINER_ARGUMENTS: said}}).schedules
    assert isinstance(read.of_group(0), str) == is_given
    if is_given:
        assert str(read.of_group(0)).startswith("its rate after 3 updates is 0.0729")
    call = parse_call("get_linear_schedule_with_warmup(optimizer, 0, 50)")
    [read] = run_of({"torch": {"scheduler": state}, CALLED: call}).schedules
    assert isinstance(read.of_group(0), str) == is_given


def test_rows_of_schedules_are_made_again_of_their_parts() -> None:
    from torch.optim import lr_scheduler

    optimizer = torch.optim.AdamW(net().parameters(), lr=0.1)
    steps = lr_scheduler.MultiStepLR(optimizer, [2, 5, 5], 0.3)
    row = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer, 0.5, 3), steps], [4])
    state = {**row.state_dict(), "_schedulers": [dict(one) for one in row.state_dict()["_schedulers"]]}
    [read] = run_of({"torch": {"scheduler": state}}).schedules
    of_state = {
        "groups": [{"hyperparameters": {"learning_rate": 0.1}}],
        "counts": {"schedule": 0, "updates": 0},
    }
    call = RatesOf([read], of_state).torch_call()
    assert call == (
        "torch.optim.lr_scheduler.SequentialLR(optimizer, ["
        "torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=3), "
        "torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 5, 5], gamma=0.3)], milestones=[4])"
    )
