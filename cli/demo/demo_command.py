"""`statekit demo`: a T5X run goes on in PyTorch, beside what T5X itself did next.

A recording of a whole run goes on in Transformers' T5 (`t5`), one of gradients in a bare optimizer.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click
import numpy as np

from statekit.arrays.backend import Backend, backend
from statekit.arrays.intervals import Interval
from statekit.cli import convert_command, inspect_command, output
from statekit.cli.arguments import local_file
from statekit.cli.demo import t5
from statekit.cli.demo.loss_plot import Curve, Panel, picture
from statekit.cli.demo.t5 import MAP, Run
from statekit.cli.output import Screen, Table
from statekit.cli.replay_command import BOUND
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.convert import convert, plan
from statekit.errors import MissingExtraError, NotFoundError, TargetExistsError, extra
from statekit.files.durable import replace_file
from statekit.maps.model_map import maps_of
from statekit.optim.adafactor import defaults
from statekit.optim.run import Live, Move, Rates, store
from statekit.optim.steps import Arrays, Execution
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import Array, Tensor
from statekit.verify.recording import Recording, open_recording
from statekit.verify.replay import Replay, Subject, replay
from statekit.verify.verdict import Row, compare

if TYPE_CHECKING:
    import torch

BUNDLE = Path(__file__).parents[1] / "recording"
"""A recording of T5X that comes with statekit; in a checkout, a link to it."""
WEIGHTS = "param"
WEIGHT_ERROR, SLOT_ERROR = "weights: error/update", "slots: error/update"
LEGEND = (
    "error/update: the largest difference from T5X's own recording over the whole run, over T5X's largest update.",
    "error/bound: of each update by itself, over what rounding can make of it (docs/bounds.md); up to 1 is equivalent.",
)
EVERYTHING = Interval(np.array(-np.inf), np.array(np.inf))
Values: TypeAlias = Mapping[str, Mapping[str, Array]]
"""For each parameter: `param` and each slot."""


@click.command("demo")
@click.argument("bundle", required=False, callback=local_file)
@click.option(
    "--out",
    callback=local_file,
    metavar="DIR",
    default="demo-out",
    show_default=True,
    help="The place of the PyTorch checkpoint.",
)
@click.option(
    "--sample",
    callback=local_file,
    metavar="DIR",
    help="Write two small checkpoints into this folder for trying the other commands.",
)
def command(bundle: Path | None, out: Path, sample: Path | None) -> int:
    """Continues a T5X run in PyTorch.

    demo inspects the checkpoint of BUNDLE, a recording of T5X, and converts it to Transformers'
    T5ForConditionalGeneration with its optimizer. It trains on T5X's batches and compares losses and weights with
    T5X's. The exit code is 1 if they differ by more than rounding. A recording with gradients instead of batches is
    resumed in statekit.torch.Adafactor; demo then compares every element of every step.
    """
    stdout = output.screen()
    bundle = bundle or _default_bundle()
    if sample is not None:
        for path, title in write_sample(bundle, sample):
            stdout.say(f"Wrote {path}: {title}.")
        return 0
    if t5.Run.fits(bundle):
        return _as_t5(stdout, t5.Run(bundle), out)
    out.mkdir(parents=True, exist_ok=True)
    target = out / "torch-ckpt.pt"
    with open_recording(bundle) as recording:
        start = recording.checkpoint_step
        if start is None:
            raise NotFoundError("The recording has no checkpoint.", place=recording.folder)
        source = recording.folder / recording.checkpoint
        hints = _hyperparameters(recording, start + 1)
        stdout.say("1. What T5X wrote", bold=True)
        _run(stdout, inspect_command.command, [str(source), *hints])
        stdout.title("2. As a PyTorch checkpoint")
        _run(stdout, convert_command.command, [str(source), str(target), *hints, "--replace"])
        stdout.title(f"3. Updates {start + 1} to {recording.last} in PyTorch")
        stdout.say()
        run = list(resume(recording, target))
        judged = _judge(recording, target)
        _show(stdout, recording, list(_differences(recording, run)), judged)
    stdout.say(" ".join(_verdict(judged)), bold=True)
    return 0 if judged.passed else 1


def _as_t5(stdout: Screen, run: t5.Run, out: Path) -> int:
    """Goes on from a recording of a whole T5 in Transformers' model."""
    t5.check_installed()
    out.mkdir(parents=True, exist_ok=True)
    folder, first = out / "hf-t5", run.updates[0]
    hparams = [f"min_dim_size_to_factor={run.meta['hyperparameters']['min_dim_size_to_factor']}"]
    stdout.say("1. What T5X wrote", bold=True)
    asked = [
        "--filter",
        "*decoder/layers_1/mlp*",
        *(word for hparam in hparams for word in ("--hparams", hparam)),
    ]
    _run(stdout, inspect_command.command, [str(run.checkpoint), *asked])
    stdout.title("2. As Transformers' T5ForConditionalGeneration, with its optimizer")
    words = ["--map", t5.MAP, "--to", "hf-trainer", *asked[2:], "--replace"]
    _run(stdout, convert_command.command, [str(run.checkpoint), str(folder), *words])
    ways = dict(t5.go_on(run, folder))
    stdout.title(f"3. Updates {first} to {run.updates[-1]} in PyTorch")
    stdout.say()
    apart = {name: t5.errors(run, way) for name, way in ways.items()}
    grid = Table(("update", "T5X's loss", *ways), right=("update", "T5X's loss", *ways))
    for update in run.updates:
        grid.add_row(
            str(update),
            f"{run.losses['loss_float64'][update - 1]:.4f}",
            *(f"{way.losses[update]:.4f} ({apart[name][update]:.0e})" for name, way in ways.items()),
        )
    stdout.show(grid)
    stdout.say()
    plot = out / "losses.svg"
    replace_file(plot, t5_picture(run, ways).encode("utf-8"))
    stdout.say(f"In parentheses: how far from T5X's loss, relatively. The curves are in {plot}.")
    loss, weights = max(apart[t5.GOES_ON].values()), ways[t5.GOES_ON].weights
    passed = loss <= t5.WITHIN_LOSS and (weights is None or weights <= t5.WITHIN_WEIGHTS)
    verdict = "PyTorch goes on as T5X did." if passed else "PyTorch does NOT go on as T5X did."
    moved = "" if weights is None else f", weights by {weights:.0e} of their movement"
    stdout.say(f"Losses differ by {loss:.0e} at most{moved}: {verdict}", bold=True)
    if weights is None:
        stdout.say("T5X's own weights, for comparison, are in a clone of the repository alone.")
    return 0 if passed else 1


def t5_picture(run: t5.Run, ways: Mapping[str, t5.Continued]) -> str:
    """Returns the losses of a run as SVG: T5X's and PyTorch's per token, and how far each way is from T5X's."""
    tokens, losses = run.losses["weight_sum"], run.losses["loss_float64"]
    colors = dict(zip(ways, ("#0969da", "#bc4c00", "#8250df"), strict=True))
    losses_by_step = {
        n: float(loss / weight) for n, (loss, weight) in enumerate(zip(losses, tokens, strict=True), 1)
    }
    torch_losses = {n: loss / float(tokens[n - 1]) for n, loss in ways[t5.GOES_ON].losses.items()}
    panels = (
        Panel(
            "loss per token",
            (
                Curve("T5X", losses_by_step, "#8c959f"),
                Curve("PyTorch", torch_losses, colors[t5.GOES_ON], True),
            ),
        ),
        Panel(
            "difference from T5X's loss, relative",
            [Curve(name, t5.errors(run, way), colors[name]) for name, way in ways.items()],
            powers=True,
        ),
    )
    return picture(panels, run.updates[0] - 1, "converted")


def _default_bundle() -> Path:
    if not BUNDLE.is_dir():
        raise NotFoundError(
            "The recording of T5X that comes with statekit isn't here.",
            expected=BUNDLE,
            remedy="install statekit anew, or name a recording: statekit demo BUNDLE",
        )
    bundle = BUNDLE.resolve()
    return bundle.relative_to(Path.cwd()) if bundle.is_relative_to(Path.cwd()) else bundle


def _hyperparameters(recording: Recording, update: int) -> list[str]:
    """Returns --hparams for what T5X was configured with and doesn't store."""
    usual = defaults()
    hyperparameters = recording.hints(update).hyperparameters
    unusual = {
        name: value for name, value in hyperparameters.items() if name not in usual or usual[name] != value
    }
    if not hyperparameters.get("logical_factor_rules"):  # without them, nothing uses the axes' names
        unusual.pop("logical_axes", None)
    return [part for name, value in unusual.items() for part in ("--hparams", f"{name}={json.dumps(value)}")]


def _run(stdout: Screen, verb: click.Command, arguments: Sequence[str]) -> None:
    stdout.say()
    stdout.say(f"$ {shlex.join(['statekit', str(verb.name), *arguments])}", fold=False)
    verb.main(args=list(arguments), prog_name=f"statekit {verb.name}", standalone_mode=False)


def resume(recording: Recording, checkpoint: Path) -> Iterator[Values]:
    """Goes on from a checkpoint with `statekit.torch` on the recorded gradients and learning rates.

    Yields:
        After each update, for each parameter, its value and its slots'. The run is free: each update starts from our
        own result of the one before.
    """
    try:
        import statekit.torch
    except ImportError as error:
        raise MissingExtraError("The demo needs PyTorch.", remedy=extra("torch")) from error
    xp = backend("torch")
    first = (recording.checkpoint_step or 0) + 1
    model = _model(recording.state(first - 1, recording.trajectories[0], first))
    statekit.torch.load_params(checkpoint, model)
    optimizer = statekit.torch.load_optimizer(checkpoint, model.named_parameters())
    params = {name.replace(".", "/"): param for name, param in model.named_parameters()}
    with output.progress("updates") as bar:
        task = bar.add_task("training", total=recording.last + 1 - first)
        for update in range(first, recording.last + 1):
            bar.advance(task)
            rates = np.broadcast_to(np.asarray(recording.rate(update)), len(optimizer.param_groups))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = float(rate)
            for path, grad in recording.gradients(update).items():
                params[path].grad = xp.asarray(grad.read()).to(params[path].dtype)
            optimizer.step()
            yield {
                path: {n: xp.numpy(v).copy() for n, v in {WEIGHTS: param, **optimizer.state[param]}.items()}
                for path, param in params.items()
            }


def _model(state: TrainState) -> torch.nn.Module:
    """Returns empty modules with a state's parameters; `encoder/norm/scale` is `encoder.norm.scale`."""
    import torch

    root = torch.nn.Module()
    for path, tensor in state.params.items():
        *modules, leaf = path.split("/")
        node = root
        for name in modules:
            if name not in dict(node.named_children()):
                node.add_module(name, torch.nn.Module())
            node = node.get_submodule(name)
        empty = torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype.name))
        node.register_parameter(leaf, torch.nn.Parameter(empty))
    return root


def _differences(recording: Recording, run: Sequence[Values]) -> Iterator[Row]:
    """Yields how far each parameter and slot is, after each update, from what T5X recorded."""
    judge, first = recording.trajectories[0], (recording.checkpoint_step or 0) + 1
    before = recording.state(first - 1, judge, first)
    for update, update_values in enumerate(run, first):
        recorded = recording.state(update, judge, update)
        for path, values in update_values.items():
            old, new = _named(before, path), _named(recorded, path)
            for name, tensor in new.items():
                yield compare(update, path, name, values[name], tensor.read(), old[name].read(), EVERYTHING)
        before = recorded


def _named(state: TrainState, path: str) -> dict[str, Tensor]:
    return {WEIGHTS: state.params[path], **state.slots.get(path, {})}


def by_class(xp: Backend, state: TrainState, execution: Execution) -> Move:
    """Returns the step of the class of statekit.torch that goes on with a state, as a user's loop calls it."""
    from statekit.torch.from_checkpoint import optimizer_for

    def move(live: Live, grads: Arrays, rates: Rates) -> Live:
        now = store(xp, live, state)
        model = _model(now)
        params = {name.replace(".", "/"): param for name, param in model.named_parameters()}
        for path, param in params.items():
            param.data.copy_(live.params[path])
            param.grad = grads.get(path)
        optimizer = optimizer_for(now, model.named_parameters())
        groups = optimizer.param_groups
        for group, rate in zip(groups, np.broadcast_to(np.asarray(rates), len(groups)), strict=True):
            group["lr"] = float(rate)
        optimizer.step()
        slots = {path: dict(optimizer.state[params[path]]) for path in live.slots}
        return Live(
            {path: param.detach() for path, param in params.items()}, slots, live.shared, live.updates + 1
        )

    return move


def _judge(recording: Recording, checkpoint: Path) -> Replay:
    """Judges every update of the class by itself, each from the recorded state before it, against the bound."""
    with output.progress("updates") as bar:
        task = bar.add_task("comparing", total=recording.last - (recording.checkpoint_step or 0))
        subject = Subject(recording, "checkpoint", checkpoint)
        result = replay(subject, backend("torch"), None, lambda step: bar.advance(task), by_class)
    # The class rounds bfloat16 as a compiled original does; where that wasn't recorded, both round alike.
    compiled = tuple(judged for judged in result.judged if judged.trajectory.execution == "compiled")
    return replace(result, judged=compiled or result.judged)


def _show(stdout: Screen, recording: Recording, rows: Sequence[Row], judged: Replay) -> None:
    verdict = judged.judged[0].rows
    grid = Table(
        ("parameter", "shape", WEIGHT_ERROR, SLOT_ERROR, BOUND), right=(WEIGHT_ERROR, SLOT_ERROR, BOUND)
    )
    state = recording.state(recording.last, recording.trajectories[0], recording.last)
    for path, tensor in state.params.items():
        weights = [row for row in rows if row.path == path and row.tensor == WEIGHTS]
        slots = [row for row in rows if row.path == path and row.tensor != WEIGHTS]
        grid.add_row(
            path,
            str(list(tensor.shape)),
            f"{max(row.relative for row in weights):.1e}",
            f"{max((row.relative for row in slots), default=0):.1e}",
            f"{max((row.ratio for row in verdict if row.path == path), default=0):.2f}",
        )
    stdout.show(grid)
    stdout.say()
    for line in LEGEND:
        stdout.say(line)


def _verdict(judged: Replay) -> Iterator[str]:
    elements = sum(row.size for j in judged.judged for row in j.rows)
    yield f"{elements - sum(j.outside for j in judged.judged)} of {elements} elements lie within the bound:"
    yield "PyTorch goes on as T5X did." if judged.passed else "PyTorch does NOT go on as T5X did."


T5X, TRAINER = "t5x-ckpt", "trainer-run"
_HEADS = 4


def write_sample(recording: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Writes both checkpoints into a folder.

    Args:
        recording: The recording whose checkpoint is copied.
        folder: Where they shall be.

    Yields:
        The path of each checkpoint, and its description.

    Raises:
        NotFoundError: The folder isn't there.
        TargetExistsError: Something of the name of one is there.
    """
    if not folder.is_dir():
        raise NotFoundError("The folder isn't there.", place=folder, remedy=f"mkdir -p {folder}")
    for path in (folder / T5X, folder / TRAINER):
        if os.path.lexists(path):
            raise TargetExistsError("The target exists.", place=path, remedy="choose another folder")
    run = Run(recording)
    shutil.copytree(run.checkpoint, folder / T5X / run.checkpoint.name)
    yield folder / T5X, "a T5 that T5X trained for 8 updates with Adafactor"
    rate = float(run.losses["learning_rate"][run.meta["checkpoint_step"]])
    hparams = {"min_dim_size_to_factor": run.meta["hyperparameters"]["min_dim_size_to_factor"]}
    converted = plan(
        CheckpointRef(folder / T5X, hparams={**hparams, "learning_rate": rate}),
        folder / TRAINER,
        to="hf-trainer",
        maps=maps_of(MAP, {"num_heads": _HEADS}, {}),
    )
    convert(converted)
    yield folder / TRAINER, "the same run as a folder of Transformers' Trainer"
