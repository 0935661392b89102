"""statekit moves the optimizer state of a training run between frameworks.

What the command line does (`statekit --help`), as functions:

    state = statekit.open("t5x-ckpt")                    params, slots, groups, counts, hyperparameters
    print(statekit.inspect("t5x-ckpt").totals())         what a checkpoint holds, as data
    print(statekit.plan("t5x-ckpt", "run.pt").exactness) what a conversion would do, tensor by tensor
    statekit.convert("t5x-ckpt", "run.pt")               writes, reads again, compares
    statekit.replay("recording").passed                  whether our updates are the original's
    statekit.diff("t5x-ckpt", "run.pt").first            in what two checkpoints differ, of any two systems
    statekit.split(plan, "run.work")                     a conversion that many processes carry out
    statekit.seal("t5x-ckpt"), statekit.check("t5x-ckpt") write a manifest beside a checkpoint, and prove it by that

A path names a checkpoint of any system that `statekit formats` lists, or a run's folder. statekit executes nothing in
it, and reads tensors only when asked. `hparams` gives what checkpoints don't say, in the original's own names. Errors
are subclasses of `statekit.errors.StatekitError`. The verbs return statekit.OpenState, Inspection, Plan, Report and
Replay.

`statekit.torch`, `statekit.jax` and `statekit.tensorflow` hold the optimizers that go on with a state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack

if TYPE_CHECKING:
    from statekit.conversion.check import CheckReport, check
    from statekit.conversion.checkpoint_ref import CheckpointRef, RefOptions, SourceOptions
    from statekit.conversion.contracts import Exactness
    from statekit.conversion.convert import Report
    from statekit.conversion.diff import Diff, diff
    from statekit.conversion.inspection import Inspection
    from statekit.conversion.open_state import OpenState
    from statekit.conversion.plan import Plan
    from statekit.conversion.seal import SealReport, seal
    from statekit.files.stage import Progress
    from statekit.scale.work import Work, split
    from statekit.state.exactness import Level as _Level
    from statekit.state.train_state import StepOffset, TrainState
    from statekit.tensors.tensor import Tensor
    from statekit.verify.replay import Replay

    __version__: str

_Path: TypeAlias = str | os.PathLike[str]
_Source: TypeAlias = "CheckpointRef | _Path"

_TYPES = {
    "CheckReport": "statekit.conversion.check",
    "CheckpointRef": "statekit.conversion.checkpoint_ref",
    "Diff": "statekit.conversion.diff",
    "Exactness": "statekit.conversion.contracts",
    "Inspection": "statekit.conversion.inspection",
    "OpenState": "statekit.conversion.open_state",
    "Plan": "statekit.conversion.plan",
    "Replay": "statekit.verify.replay",
    "Report": "statekit.conversion.convert",
    "SealReport": "statekit.conversion.seal",
    "Tensor": "statekit.tensors.tensor",
    "TrainState": "statekit.state.train_state",
    "Work": "statekit.scale.work",
    "check": "statekit.conversion.check",
    "diff": "statekit.conversion.diff",
    "seal": "statekit.conversion.seal",
    "split": "statekit.scale.work",
}
_VERBS = ["convert", "inspect", "open", "plan", "replay"]

__all__ = [  # noqa: RUF022 (the verbs first)
    "convert", "inspect", "open", "plan", "replay", "check", "diff", "seal", "split",
    "CheckReport", "CheckpointRef", "Diff", "Exactness", "Inspection", "OpenState", "Plan", "Replay", "Report",
    "SealReport", "Tensor", "TrainState", "Work", "__version__",
]  # fmt: skip


def open(path: _Source, **options: Unpack[RefOptions]) -> OpenState:
    """Opens a checkpoint and decodes it to its canonical state; reads headers and scalars only.

    Args:
        path: A checkpoint, a run's folder, or a `CheckpointRef`, which holds the options too.
        **options: What the files don't say, and how far to trust them. Each verb and framework takes these:
            container: How its arrays lie in files; found by its content if None.
            layout: What its names mean; found by the names if None.
            step: Which step of a run's folder; the newest if None.
            hparams: Hyperparameters, in the original's own names.
            optimizer: Which optimizer ran, where the files fit several.
            variant: Which variant of the optimizer ran.
            param_names: Names in the order of the optimizer's parameters, where it only numbers them.
            names_from: `config`: that order as the architecture in config.json beside a Trainer's weights has it.
            schedule: The call that makes the learning rate: `optax.cosine_decay_schedule(1e-3, 10000)`. It isn't run.
            model_key, optimizer_key: Where both lie in a PyTorch file, keys joined by `/`; the first in JAX' trees too.
            accept_damaged: Whether to go on with files that the manifest contradicts; `checkpoint.findings` lists them.
            follow_links: Whether to read files that links outside the checkpoint point at.
            budget: Bytes for headers, pickles and trees, and work in proportion; 512 MiB if None. Values stream.

    Returns:
        The opened state: `params`, `slots`, `groups`, `counts`, `hyperparameters`, and `tensors` by name.

    Raises:
        NotFoundError: Nothing is there, or no such step.
        FormatError: The bytes can't be trusted, or no format fits.
        StateError: The names break the layout.
        UsageError: No container, layout, variant or hyperparameter of that name.

    Example:
        >>> import statekit
        >>> with statekit.open("t5x-ckpt", hparams={"beta1": 0.9}) as state:
        ...     print(state.counts.updates, sorted(state.slots["token_embedder/embedding"]))
        ...     print(state.hyperparameters[0]["beta1"])
        ...     print(state.tensors["slots/token_embedder/embedding/v_row"].read().shape)
        4 ['m', 'v_col', 'v_row']
        Hyperparameter(value=0.9, known_from='given')
        (12,)
    """
    from statekit.conversion.open_state import open_state

    return open_state(_ref(path, options), builds=True)


def inspect(
    path: _Source, *, filter: str | None = None, stats: bool = False, **options: Unpack[RefOptions]
) -> Inspection:
    """Says what a checkpoint holds, whether or not a layout fits its names.

    Args:
        path: As in `open`.
        filter: Glob for parameter paths and names of other tensors; `*` also matches `/`.
        stats: Whether to read all values and add norm, rms, min, max, zeros, NaN and Inf.
        **options: As in `open`.

    Raises:
        NotFoundError: Nothing is there, no such step, or nothing matches the filter.
        FormatError, UsageError: As of `open`.

    Example:
        >>> import statekit
        >>> inspection = statekit.inspect("t5x-ckpt", filter="*embedding")
        >>> [(p.tensor.name, [slot.name for slot in p.slots]) for p in inspection.parameters][1]
        ('token_embedder/embedding', ['v_row', 'v_col', 'm'])
    """
    from statekit.conversion.inspection import Request
    from statekit.conversion.inspection import inspect as inspected

    return inspected(_ref(path, options), Request(filter, stats))


def plan(
    source: _Source,
    target: _Path,
    *,
    from_: str | None = None,
    to: str | None = None,
    layout: str | None = None,
    step_offset: StepOffset = "keep",
    require: _Level = "rounding",
    like: _Path | None = None,
    map: str | None = None,
    config: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
    schedule_step: StepOffset = "keep",
    slot_policy: str | Sequence[str] | Mapping[str, str] = (),
    params_only: bool = False,
    state_only: bool = False,
    drop_slots_of: str | Sequence[str] = (),
    param_dtype: str | None = None,
    slot_dtype: str | Mapping[str, str] | None = None,
    loss_scale: float | None = None,
    init_missing: _Path | None = None,
    **options: Unpack[SourceOptions],
) -> Plan:
    """Says what a conversion will do, tensor by tensor, without reading or writing a value.

    Args:
        source: As in `open`. The source's layout is found by the names, unless a `CheckpointRef` tells it.
        target: Where the result shall be.
        from_: Container of the source; found by its content if None.
        to: Container of the target, or `<layout>-<container>`; by the target's name if None.
        layout: Layout of the target; the container's usual one if None.
        step_offset: `keep`; `reset`, so that the second-moment decay starts anew; or the step where it starts.
        require: The least exactness allowed.
        like: A file that Keras saved of the same model, trained or not: the target's parameters lie as in it.
        map: Gives parameters, and their slots, the names and axes of another codebase's model, e.g. `t5x-t5:hf-t5`.
        config: What the map needs to know of the model and no checkpoint says, e.g. `{"num_heads": 12}`.
        rename: Regular expression -> replacement, as `re.sub` takes them, for the names of parameters; before the map.
        schedule_step: `keep`; `reset`, so that the learning-rate schedule begins anew; or the step where it stands.
        slot_policy: What becomes of slots, by canonical name: `reset:v` begins it anew, `drop:m` leaves it behind where
            the rule goes on without it, `reset:count` makes the updates done 0; or `{"v*": "reset"}`.
        params_only: Whether the optimizer is left behind.
        state_only: Whether the parameters are left behind: what `torch.save(optimizer.state_dict())` holds.
        drop_slots_of: Patterns of parameters that are frozen: without slots, and nothing moves them.
        param_dtype: The dtype of parameters; the report says how far a narrower one is off.
        slot_dtype: The dtype of all slots that are no counts, or of each by its name: `{"m": "bfloat16"}`.
        loss_scale: How many times as large the loss is from now on: moments of gradients are rescaled with it.
        init_missing: A file of the target's model: what it has and the source lacks, or has in another shape, is taken
            from it, and its slots begin anew.
        **options: As in `open`: what is said of the source.

    Raises:
        InexactError: The conversion would be less exact than required.
        UsageError: The options contradict each other, or the target can't take the source.
        NotFoundError, FormatError, StateError: The source can't be opened.

    Example:
        >>> import statekit
        >>> planned = statekit.plan("t5x-ckpt", "run.pt")
        >>> planned.exactness.name, len(planned.entries), planned.target.layout
        ('BITWISE', 22, 'statekit-torch')
    """
    from statekit.conversion.changing.changes import Changes
    from statekit.conversion.contracts import Exactness
    from statekit.conversion.convert import plan as planned
    from statekit.files.source import target_place
    from statekit.maps.model_map import maps_of

    ref = _ref(source, {**options, "container": from_})
    return planned(
        ref,
        target_place(target),
        to=to,
        layout=layout,
        step_offset=step_offset,
        require=Exactness.named(require),
        like=None if like is None else _local(like),
        maps=maps_of(map, config, rename, budget=ref.job_budget()),
        map_options={"map": map, "config": config, "rename": rename},
        changes=Changes.of(
            {
                "schedule_step": schedule_step,
                "slot_policy": slot_policy,
                "params_only": params_only,
                "state_only": state_only,
                "drop_slots_of": drop_slots_of,
                "param_dtype": param_dtype,
                "slot_dtype": slot_dtype,
                "loss_scale": loss_scale,
                "init_missing": init_missing,
            }
        ),
    )


def convert(
    source: _Source | Plan,
    target: _Path | None = None,
    *,
    replace: bool = False,
    replace_foreign: bool = False,
    threads: int | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    task_bytes: int | None = None,
    **options: Any,
) -> Report:
    """Converts a checkpoint: writes beside the target, proves what was written, then gives it the target's name.

    Args:
        source: As in `open`; or a plan, which says the target and all else.
        target: Where the result shall be.
        replace: Whether a target that statekit wrote may be replaced; it stays until the new one is proven and synced.
        replace_foreign: Whether any other file or folder may be replaced, too.
        threads: How many threads work on it; as many as there are cores for this process if None.
        on_progress: Told about every block.
        task_bytes: Bytes of tensors in a file of the target at most; as its container does it by itself if None.
        **options: Those of `plan`.

    Raises:
        TargetExistsError: The target exists and mustn't be replaced.
        CorruptError: The source isn't what its manifest says.
        CommitError: Writing failed, or the written target differs from the data; nothing was left at the target.
        InexactError, UsageError, NotFoundError, FormatError, StateError: As of `plan`.

    Example:
        >>> import statekit
        >>> report = statekit.convert("t5x-ckpt", "run.pt", hparams={"beta1": 0.9}, step_offset="reset")
        >>> report.verified, report.plan.state["groups"][0]["hyperparameters"]["step_offset"]
        (22, 4)
    """
    from statekit.conversion.convert import convert as converted
    from statekit.conversion.plan import Plan
    from statekit.errors import UsageError

    if isinstance(source, Plan):
        if target is not None or options:
            raise UsageError("A plan says the target and the options.", expected="convert(plan)")
        planned = source
    elif target is None:
        raise UsageError("A conversion needs a target.", expected="convert(source, target), or convert(plan)")
    else:
        planned = plan(source, target, **options)
    return converted(
        planned,
        replace=replace,
        replace_foreign=replace_foreign,
        threads=threads,
        on_progress=on_progress,
        task_bytes=task_bytes,
    )


def replay(
    recording: _Path,
    *,
    backend: Literal["numpy", "torch", "jax", "tensorflow"] = "numpy",
    start: Literal["checkpoint", "init"] = "checkpoint",
    checkpoint: CheckpointRef | _Path | None = None,
    hparams: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    budget: int | None = None,
) -> Replay:
    """Continues a recorded run by our steps, and compares every element of every update with the original's.

    Args:
        recording: The folder of a recording (docs/recordings.md).
        backend: Which framework makes the updates.
        start: From the recording's checkpoint, or from fresh slots.
        checkpoint: Start from this checkpoint instead, a path or a `CheckpointRef`; it must hold the same state.
        hparams: Canonical hyperparameters that our side uses instead of the recorded ones.
        follow_links: As in `open`.
        budget: As in `open`.

    Raises:
        NotFoundError: There is no recording, or it has no checkpoint.
        FormatError, StateError: The recording, or where it starts, can't be read.
        UnknownRuleError: The recording doesn't say a rule or a hyperparameter.

    Example:
        >>> import statekit
        >>> result = statekit.replay("recording")
        >>> result.passed, result.steps
        (True, (4, 8))
    """
    from statekit.arrays.backend import backend as backend_named
    from statekit.conversion.checkpoint_ref import CheckpointRef
    from statekit.verify.recording import open_recording
    from statekit.verify.replay import Subject
    from statekit.verify.replay import replay as replayed

    options = {"follow_links": follow_links or None, "budget": budget}
    ref = CheckpointRef.given(checkpoint or CheckpointRef(), **options)
    with open_recording(_local(recording)) as opened:
        subject = Subject(opened, start, ref, dict(hparams or {}))
        return replayed(subject, backend_named(backend))


def _local(path: _Path) -> Any:
    from pathlib import Path

    return Path(path)


def _ref(source: _Source, options: Mapping[str, Any]) -> CheckpointRef:
    from statekit.conversion.checkpoint_ref import CheckpointRef

    return CheckpointRef.given(source, **options)


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return getattr(import_module(_TYPES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("statekit")
    raise AttributeError(f"module 'statekit' has no attribute {name!r}")


def __dir__() -> list[str]:
    # The types are reached by name; listed here, help(statekit) would be a page for each of them.
    return ["__doc__", "__file__", "__name__", "__path__", "__version__", *_VERBS]
