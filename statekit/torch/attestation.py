"""Whether a live run in PyTorch is the run of its checkpoint: any trainer, any optimizer that a layout knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any, TypeAlias, Unpack

import torch

from statekit.attestation.attest import ORDERED
from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.faults import fault
from statekit.attestation.live_run import LiveRun
from statekit.attestation.unknown_rule import attested
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.loading import AttestOptions, Call
from statekit.errors import StateError, StatekitError, UsageError
from statekit.files.checkpoint import Checkpoint
from statekit.state.comparison import Rate
from statekit.torch.from_checkpoint import Model, NamedParameters, hints_of, maps_to, pairs_of
from statekit.torch.generators import compare_generators
from statekit.torch.live import is_dense, live_checkpoint, live_state, unread_options
from statekit.torch.sharding import FLAT_PREFIX, FlatPart, flat_parts, is_sharded
from statekit.torch.zero import gathered, zero_optimizer

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What makes a run's updates: one optimizer, or all that share its parameters, in the order in which they are saved."""


def attest(
    optimizer: Optimizers,
    named_parameters: NamedParameters | torch.nn.Module,
    path: CheckpointRef | str | PathLike[str],
    *,
    scheduler: Any = None,
    scaler: Any = None,
    generators: bool = False,
    strict: bool = False,
    sample: int | None = None,
    seed: int = 0,
    strict_schedule: bool = True,
    **options: Unpack[AttestOptions],
) -> Attestation:
    """Compares a live run with the checkpoint that it goes on from, by name and bit for bit.

    Call it after every loader, scheduler and wrapper, and before the first update. Nothing is changed. Compared are
    parameters, every slot with its dtype, the updates done by each parameter, groups and hyperparameters by parameter,
    the schedule and the loss scaler. Of sharded parameters (DTensor, as FSDP2 makes them) each process compares the
    part that it has, and nothing but findings is gathered: all processes call it, and all get what each has found.
    Under DeepSpeed's ZeRO, of which the model is given, each process gathers parameters and slots as wholes.
    Where no schema has the optimizer's rule, as of SGD and Lion, its state is compared by its own names, which is said.

    Args:
        optimizer: What makes the updates, wrapped or not: torch.optim's, transformers' Adafactor, statekit's; of a run
            that has several all of them, in the order in which they are saved.
        named_parameters: `model.named_parameters()`; or the model, of which the buffers are compared too, and which
            FSDP1 (`use_orig_params=True`) needs.
        path: Anything statekit reads: a Trainer's folder, a torch file, a T5X run.
        scheduler: What moves the learning rate, if something does; all of them, if several do.
        scaler: The `torch.amp.GradScaler`, if there is one.
        generators: Whether to compare the random generators of Python, NumPy, the CPU and CUDA with the states that the
            checkpoint keeps of them: where nothing was drawn since they were loaded.
        strict: Whether to raise what is wrong.
        sample: How many parameters are compared by value, drawn with `seed`; all if None.
        seed: Of the sample.
        strict_schedule: Whether it is a finding that only an update after the next has another learning rate, as with
            another number of updates in all; a warning otherwise.
        **options: As in `load_params`: what the files don't say, `names`, and a map.

    Returns:
        The verdict with every finding. `print` shows it, `.json()` is for programs.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; or the checkpoint can't be decoded; or, of
            sharded parameters, another process failed.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    run = live_run(
        optimizer,
        named_parameters,
        path,
        scheduler=scheduler,
        scaler=scaler,
        generators=generators,
        strict_schedule=strict_schedule,
        **options,
    )
    return attested(run.run, path, sample, seed, strict)


@dataclass(frozen=True)
class TorchRun:
    """A run in memory, and what it is made of.

    Attributes:
        params: The model's parameters by name.
        optimizers: What makes the updates, without wrappers.
        flat: What this process has of parameters that FSDP1 keeps flat, by their `id`.
        run: It, as it is held against a checkpoint.
    """

    params: Mapping[str, torch.Tensor]
    optimizers: Sequence[torch.optim.Optimizer]
    flat: Mapping[int, FlatPart]
    run: LiveRun


def _by_name(named_parameters: NamedParameters | torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters by name, without what FSDP1 puts before names."""
    is_model = isinstance(named_parameters, torch.nn.Module)
    named: Any = unwrapped(named_parameters).named_parameters() if is_model else named_parameters
    return {name.replace(FLAT_PREFIX, ""): param for name, param in pairs_of(named)}


def _states_beside(schedulers: Sequence[Any], scaler: Any) -> dict[str, Any]:
    """Returns the states of schedulers and of a scaler as checkpoints hold them; one that is switched off has none."""
    states_by_kind: dict[str, Any] = {}
    states = [scheduler.state_dict() for scheduler in schedulers]
    if states:
        states_by_kind |= {"scheduler": states[0]} if len(states) == 1 else {"schedulers": states}
    if scaler is not None and (state := scaler.state_dict()):
        states_by_kind["scaler"] = state
    return states_by_kind


def live_run(
    optimizer: Optimizers,
    named_parameters: NamedParameters | torch.nn.Module,
    path: CheckpointRef | str | PathLike[str],
    *,
    scheduler: Any = None,
    scaler: Any = None,
    generators: bool = False,
    strict_schedule: bool = True,
    **options: Unpack[AttestOptions],
) -> TorchRun:
    """Returns a run as it is held against a checkpoint; arguments are those of `attest`."""
    inner = [_innermost(wrapped, "optimizer", torch.optim.Optimizer) for wrapped in _all(optimizer)]
    driven = inner
    inner, named_parameters = _without_zero(optimizer, inner, named_parameters)
    is_model = isinstance(named_parameters, torch.nn.Module)
    flat = flat_parts(named_parameters) if isinstance(named_parameters, torch.nn.Module) else {}
    every = _by_name(named_parameters)
    here = {name: param for name, param in every.items() if id(param) not in flat or flat[id(param)].count}
    call, model = Call.of(path, options).alone(), Model(list(here.items()))
    hints = hints_of(call, model, _identities(inner))
    moved = [_innermost(wrapped, "scheduler") for wrapped in _all(scheduler)]
    extra = _states_beside(moved, scaler)

    def checkpoint() -> Checkpoint:
        return live_checkpoint(here, inner, extra, flat, _buffers(named_parameters)[0] if is_model else {})

    is_apart = bool(flat) or any(is_sharded(param) for param in here.values())
    shared = is_apart and torch.distributed.is_initialized()
    run = LiveRun(
        live=lambda opened: live_state(checkpoint()),
        findings=[
            *_strangers(inner, every),
            *_moved_twice(inner, every),
            *_drives_another(moved, driven),
            *_of_another_class(inner),
        ],
        live_rates=_rates(moved, driven),
        live_length=_length(moved),
        strict_schedule=strict_schedule,
        generators=compare_generators if generators else None,
        names=call.names,
        maps=maps_to(call, model),
        unchecked=_buffers(named_parameters)[1] if is_model else (),
        require=call.require,
        whole_model=is_model,
        hints=hints,
        instead=_in_order(hints, inner, every, call.names),
        elsewhere=[name for name in every if name not in here],
        checkpoint=checkpoint,
    )
    return TorchRun(here, inner, flat, replace(run, gathered=_of_all_processes) if shared else run)


def _identities(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Returns the identities of the parameters that optimizers have."""
    return {id(param) for group in _groups(optimizers) for param in group["params"]}


def _without_zero(
    optimizer: Any, inner: list[Any], named_parameters: NamedParameters | torch.nn.Module
) -> tuple[list[Any], NamedParameters | torch.nn.Module]:
    """Returns optimizers and parameters as wholes where DeepSpeed's ZeRO has cut them, else as they are."""
    zero = zero_optimizer(optimizer)
    if zero is None or not isinstance(named_parameters, torch.nn.Module):
        return inner, named_parameters
    whole, named = gathered(zero, unwrapped(named_parameters))
    return [whole], named


def _of_all_processes(of_this_process: Callable[[], Attestation]) -> Attestation:
    """Returns the findings of all processes. A process that fails takes part too, as the others wait for it."""
    result: Attestation | None = None
    error: Exception | None = None
    try:
        result = of_this_process()
    except Exception as failed:  # whatever it is, the others are waiting
        error = failed
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, (result and result.findings, error and _line(error)))
    if error is not None:
        raise error
    lines = {rank: line for rank, (_, line) in enumerate(gathered) if line is not None}
    if lines or result is None:
        raise StateError(
            "The live run isn't attested: other processes failed.",
            place=", ".join(f"rank {rank}" for rank in lines),
            expected="findings of each process",
            found="; ".join(dict.fromkeys(lines.values())),
            remedy="give every process the same checkpoint, which it can read",
        )
    return result.of_all([findings for findings, _ in gathered])


def _line(error: Exception) -> str:
    return error.line if isinstance(error, StatekitError) else f"{type(error).__name__}: {error}"


_WRAPPERS = {
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
"""Classes that wrap a model, of torch.nn.parallel, FSDP1, torch.compile and DeepSpeed -> where it is."""


def unwrapped(model: Any) -> Any:
    """Returns the module inside of wrappers, whose names are the checkpoint's."""
    while (inside := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, inside)
    return model


def _buffers(model: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Returns the tensors of a model that are no parameters and that its `state_dict` has, such as batch statistics.

    What can't be read, as it is sparse, quantized or not made yet, is said by a sentence instead.
    """
    modules = unwrapped(model).named_modules(remove_duplicate=False)
    every = {
        f"{around}.{name}".removeprefix(".").replace(FLAT_PREFIX, ""): buffer
        for around, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    dense = {name: tensor for name, tensor in every.items() if is_dense(tensor)}
    return dense, [f"the buffer {name}: its values can't be read" for name in every if name not in dense]


def only(parts: Sequence[Any], subject: str) -> Any:
    """Returns the one part of a trainer that has one; a verdict of the first would pass the others in silence.

    Raises:
        UsageError: There are none, or several.
    """
    if len(parts) != 1:
        raise UsageError(
            f"A run is attested here that has one {subject}.",
            found=f"{len(parts)} of them",
            remedy="give statekit.torch.attest all optimizers of a model, and call it for each model",
        )
    return parts[0]


def _innermost(outer: Any, name: str, kind: type = object) -> Any:
    """Returns what wrappers such as Accelerate's and Lightning's hold."""
    while isinstance(inner := getattr(outer, name, None), kind) and inner is not None and inner is not outer:
        outer = inner
    return outer


def _in_order(
    hints: CheckpointRef,
    optimizers: Sequence[torch.optim.Optimizer],
    params: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
) -> list[tuple[CheckpointRef, str]]:
    """Returns hints with the checkpoint's names in the order of the live optimizers; none if they move others too."""
    by_id = {id(param): names.get(name, name) for name, param in params.items()}
    order = [by_id.get(id(param)) for group in _groups(optimizers) for param in group["params"]]
    if hints.param_names is not None or None in order:
        return []
    return [(replace(hints, param_names=tuple(name for name in order if name is not None)), ORDERED)]


def _strangers(
    optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, torch.Tensor]
) -> list[Finding]:
    ids = {id(param) for param in params.values()}
    strange = [
        f"group {i}, {tuple(param.shape)}"
        for i, group in enumerate(_groups(optimizers))
        for param in group["params"]
        if id(param) not in ids
    ]
    if not strange:
        return []
    return [fault("optimizer-elsewhere", strange, "the model's parameters", f"{len(strange)} other tensors")]


def _moved_twice(
    optimizers: Sequence[torch.optim.Optimizer], params: Mapping[str, torch.Tensor]
) -> list[Finding]:
    groups = [[group["params"] for group in _groups([optimizer])] for optimizer in optimizers]
    times = [Counter(id(param) for params in lists for param in params) for lists in groups]
    twice = [name for name, param in params.items() if any(counts[id(param)] > 1 for counts in times)]
    return [fault("moved-twice", twice, "each parameter once", "some twice")] if twice else []


def _drives_another(schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> list[Finding]:
    driven = [_driven(scheduler) for scheduler in schedulers]
    strange = [
        driver
        for driver in driven
        if driver is not None and all(driver is not optimizer for optimizer in optimizers)
    ]
    names = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
    return [
        fault("schedule-elsewhere", ["the scheduler"], f"this {names}", f"another {type(driver).__name__}")
        for driver in strange
    ]


def _of_another_class(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Finding]:
    """Yields the optimizers into whose groups another class' were loaded."""
    for optimizer in optimizers:
        if lacking := unread_options(optimizer):
            name = type(optimizer).__name__
            yield fault(
                "rule",
                ["optimizer"],
                f"the class that saved these groups, without {', '.join(lacking)}",
                name,
            )


def _driven(scheduler: Any) -> Any:
    """Returns the optimizer whose rate a scheduler moves; None if it doesn't say it."""
    return _innermost(getattr(scheduler, "optimizer", None), "optimizer", torch.optim.Optimizer)


def _rates(schedulers: Sequence[Any], optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, Rate]:
    """Returns what schedules do to groups, by their numbers, where no state says it: those that call a function.

    Source: pytorch/pytorch torch/optim/lr_scheduler.py, `LambdaLR`; `MultiplicativeLR` keeps functions too, of factors.
    """
    numbers = {id(group): i for i, group in enumerate(_groups(optimizers))}
    rates: dict[int, Rate] = {}
    for scheduler in (
        scheduler for scheduler in schedulers if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    ):
        bases, functions = getattr(scheduler, "base_lrs", ()), getattr(scheduler, "lr_lambdas", ())
        groups = getattr(_driven(scheduler), "param_groups", ())
        for group, base, function in zip(groups, bases, functions, strict=False):
            if id(group) in numbers:
                rates[numbers[id(group)]] = partial(_scaled, function, base)
    return rates


def _length(schedulers: Sequence[Any]) -> int | None:
    """Returns how many updates a run has in all, where a function of Transformers makes its rate.

    Source: huggingface/transformers, optimization.py, `get_cosine_schedule_with_warmup`.
    """
    functions = [function for scheduler in schedulers for function in getattr(scheduler, "lr_lambdas", ())]
    stated = [getattr(function, "keywords", {}).get("num_training_steps") for function in functions]
    return next((number for number in stated if type(number) is int), None)


def _scaled(function: Callable[[int], float], base: float, updates: int) -> float:
    return float(base * function(updates))


def _all(one_or_several: Any) -> list[Any]:
    if isinstance(one_or_several, (list, tuple)):
        return list(one_or_several)
    return [] if one_or_several is None else [one_or_several]


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]
