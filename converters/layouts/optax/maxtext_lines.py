"""The command by which MaxText goes on from a checkpoint.

Source: AI-Hypercomputer/maxtext 0.2.5 trainers/pre_train/train.py, `loss_fn`, `main`; configs/base.yml;
utils/maxtext_utils.py, `create_learning_rate_schedule`, `apply_gradient_clipping`; common/checkpointing.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from statekit.lines.printing import UNKNOWN, SavedRun, State
from statekit.state.rates import Piece, Rates
from statekit.state.schema import load_schema

_MODULE = "python3 -m maxtext.trainers.pre_train.train"
_FOLDER = "checkpoints"
_DECAY = "weight_decay_rate"
_MASK = "exclude_from_weight_decay"
_CLIP = "global_norm_clip_threshold"
_THRESHOLD = "gradient_clipping_threshold"
_TYPES = {"maxtext": "adamw", "maxtext_pax": "adam_pax"}
"""Variant -> MaxText's opt_type."""
_OPTIONS = ("beta1", "beta2", "epsilon", "epsilon_root", _DECAY, _MASK, "dtype_momentum", _CLIP)


def maxtext_lines(state: State, saved: SavedRun) -> list[str]:
    """Returns MaxText's command line, and what of the run no option of it and no file says."""
    run = saved.path.absolute()
    if run.name == str(saved.step) or (run.name.isdigit() and run.parent.name == _FOLDER):
        run = run.parent
    lies_there = run.name == _FOLDER
    base, name = (run.parent.parent, run.parent.name) if lies_there else (UNKNOWN, UNKNOWN)
    flags = " ".join(
        [f"base_output_directory={shlex.quote(str(base))}", f"run_name={shlex.quote(str(name))}"]
    )
    moved = (
        []
        if lies_there
        else [f"# MaxText looks in <base_output_directory>/<run_name>/{_FOLDER}: move {run} there"]
    )
    return [
        *moved,
        f"{_MODULE} config.yml {flags} {' '.join([*_options(state), *_schedule(state, saved)])}",
        *_comments(state),
        *([] if _schedule(state, saved) else saved.rates(state).comment()),
    ]


def _options(state: State) -> Iterator[str]:
    """Yields the options of the run's optimizer."""
    of_muon = next((g["hyperparameters"] for g in state["groups"] if g.get("schema") == "muon"), None)
    settings = _settings(state)
    schema, variant = load_schema("adamw"), state["variant"] if of_muon is None else "maxtext"
    variant = variant if variant in _TYPES else "maxtext"
    yield f"opt_type={_TYPES[variant] if of_muon is None else 'muon'}"
    yield from _of_muon(of_muon) if of_muon is not None else ()
    usual = schema.variant(variant)["defaults"]
    for name in _OPTIONS:
        if name not in usual and name != _CLIP:
            continue
        argument = _THRESHOLD if name == _CLIP else schema.spelling(variant, name).argument
        is_setting = name in settings
        value = settings.get(name)
        if value is None and is_setting:
            value = {_MASK: [], _CLIP: 0.0}.get(name, "")
        yield shlex.quote(f"{argument}={value if is_setting else UNKNOWN}")


def _of_muon(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the options of Muon's own rule."""
    is_rms = settings.get("shape_scale") == "match_rms"
    yield f"muon_beta={settings.get('momentum', UNKNOWN)}"
    yield f"muon_weight_decay={settings.get('weight_decay_rate', UNKNOWN)}"
    yield f"muon_consistent_rms={settings.get('scale_factor', UNKNOWN) if is_rms else None}"


def _of_adam(state: State) -> Iterator[Mapping[str, Any]]:
    """Yields the groups that Adam moves."""
    return (group for group in state["groups"] if group["paths"] and group.get("schema") != "muon")


def _settings(state: State) -> dict[str, Any]:
    """Returns the hyperparameters of all groups; those that differ by name are a mask."""
    groups = list(_of_adam(state))
    decaying = [group for group in groups if group["hyperparameters"].get(_DECAY)]
    settings = dict((decaying or groups)[0]["hyperparameters"])
    spared = [path for group in groups if not group["hyperparameters"].get(_DECAY) for path in group["paths"]]
    if decaying and spared:
        ends = sorted({path.rpartition("/")[2] for path in spared})
        kept = {path.rpartition("/")[2] for group in decaying for path in group["paths"]}
        settings[_MASK] = ends if kept.isdisjoint(ends) else sorted(spared)
    return settings


def _schedule(state: State, saved: SavedRun) -> list[str]:
    """Returns the options of MaxText's cosine schedule, if the run's schedule is one.

    Its cosine of S steps has come to the end after S - 1, W = int(S * fraction) of them warmup.
    """
    groups = state["groups"]
    rates = saved.rates(state).of(0) if groups else ""
    pieces = rates.pieces if isinstance(rates, Rates) else ()
    if len(pieces) > 1 and _stays(pieces[-1], pieces[-2]):
        pieces = pieces[:-1]
    *before, cosine = pieces or (None,)
    warmup = before[0].numbers if before else {"start": 0, "steps": 0}
    if cosine is None or cosine.kind != "cosine" or len(before) > 1 or not (peak := cosine.numbers["start"]):
        return []
    if cosine.begins != warmup["steps"] or warmup["start"] != 0:
        return []
    steps = round(warmup["steps"] + cosine.numbers["steps"]) + 1
    # Half a step more, as MaxText cuts the product off.
    fraction = (warmup["steps"] + 0.5) / steps if warmup["steps"] else 0.0
    return [
        f"learning_rate={peak!r}",
        "lr_schedule_type=cosine",
        f"learning_rate_schedule_steps={steps}",
        f"warmup_steps_fraction={fraction:.9g}",
        f"learning_rate_final_fraction={cosine.numbers['end'] / peak:.9g}",
    ]


def _stays(last: Piece, cosine: Piece) -> bool:
    """Tells whether a schedule stays at the rate to which its cosine has come."""
    return (last.kind, cosine.kind) == ("constant", "cosine") and last.numbers["rate"] == cosine.numbers[
        "end"
    ]


def _comments(state: State) -> Iterator[str]:
    """Yields what MaxText does that the source's loop may not."""
    counts: Mapping[str, Any] = state["counts"]
    yield "# it resumes behind the checkpoint's `step`, updates and skipped ones: the folder's number is that less one"
    yield "# gradients are clipped before the optimizer, by gradient_clipping_threshold; 0 is off"
    yield "# the loss is the mean over tokens whose targets_segmentation isn't 0, of all microbatches together"
    yield "# z_loss_multiplier=0.0 unless the run had one: it is part of the loss that is logged"
    at = counts["schedule"]
    yield (
        f"# the rate is a function of the count: the next update takes that of {at} "
        "(learning_rate, warmup_steps_fraction, learning_rate_schedule_steps, learning_rate_final_fraction); "
        "a warmup's first update has rate 0"
    )
