"""Whether a live run in JAX is the run of its checkpoint: any Optax state that a layout knows."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

from statekit.attestation.attestation import Attestation
from statekit.attestation.live_run import LiveRun
from statekit.attestation.unknown_rule import attested
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.dropin.loading import AttestOptions, Call
from statekit.jax.from_checkpoint import maps_to
from statekit.jax.generators import compare_generators
from statekit.jax.leaves import floating_leaves
from statekit.jax.live import live_checkpoint, live_state, variables_of


def attest(
    params: Any,
    opt_state: Any,
    path: CheckpointRef | str | PathLike[str],
    *,
    generators: Any = None,
    strict: bool = False,
    sample: int | None = None,
    seed: int = 0,
    **options: Unpack[AttestOptions],
) -> Attestation:
    """Compares a live run with the checkpoint that it goes on from, by name and bit for bit.

    Call it after all is restored and before the first update. Compared are parameters, every slot with its dtype, and
    the counts; hyperparameters where the state has them. Of sharded arrays each process compares what its devices hold,
    shard by shard. Where no schema has the optimizer's rule, as of Lion, its state is compared by its own names, which
    is said.

    Args:
        params: The parameters; a leaf's name is its keys joined by `/`.
        opt_state: The optimizer's state: of Optax, chained and wrapped as it may be, or of `statekit.jax`.
        path: Anything statekit reads: an Orbax or T5X run, a torch file.
        generators: The run's PRNG keys in a tree, by the names that the checkpoint has them by: `{"rng": key}`.
        strict: Whether to raise what is wrong.
        sample: How many parameters are compared by value, drawn with `seed`; all if None.
        seed: Of the sample.
        **options: As in `load_params`: what the files don't say, `names`, and a map.

    Returns:
        The verdict with every finding. `print` shows it, `.json()` is for programs.

    Raises:
        StateError: With `strict`, the live run isn't the checkpoint's; or the checkpoint can't be decoded.
        InexactError: A map is less exact than required; lists every parameter.
        NotFoundError: Nothing is there.
        FormatError: The bytes can't be trusted, or no format fits.
    """
    run = live_run(
        Live(params, opt_state),
        path,
        generators=generators,
        **options,
    )
    return attested(run, path, sample, seed, strict)


@dataclass
class Live:
    """What a run has in memory by now.

    Attributes:
        params: The parameters.
        opt_state: The optimizer's state.
    """

    params: Any
    opt_state: Any


def live_run(
    live: Live,
    path: CheckpointRef | str | PathLike[str],
    *,
    generators: Any = None,
    **options: Unpack[AttestOptions],
) -> LiveRun:
    """Returns a run as it is held against a checkpoint, with what it has by then; arguments are those of `attest`."""
    call = Call.of(path, options).alone()
    return LiveRun(
        live=lambda opened: live_state(live.params, live.opt_state),
        generators=compare_generators(generators),
        names=call.names,
        maps=maps_to(call, floating_leaves(variables_of(live.params))),
        require=call.require,
        hints=call.ref,
        checkpoint=lambda: live_checkpoint(live.params, live.opt_state),
    )
