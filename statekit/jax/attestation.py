"""Whether a live run in JAX is the run of its checkpoint: any Optax state that a layout knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from statekit.attestation.attestation import Attestation, Finding
from statekit.attestation.faults import fault
from statekit.attestation.live_run import LiveRun
from statekit.attestation.unknown_rule import attested
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.open_state import OpenState
from statekit.dropin.loading import AttestOptions, Call
from statekit.errors import UsageError
from statekit.jax.from_checkpoint import maps_to
from statekit.jax.leaves import floating_leaves, key_names
from statekit.jax.live import live_checkpoint, live_state, variables_of
from statekit.state.run import run_of
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import walk


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
    run = live_run(Live(params, opt_state), path, generators=generators, **options)
    return attested(run, path, sample, seed, strict)


@dataclass
class Live:
    """What a run has in memory by now."""

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


Compare = Callable[[OpenState], tuple[list[Finding], list[str]]]


def _not_given(opened: OpenState, paths: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yields the tensors at paths of a checkpoint that are keys, as keys that were not compared."""
    random = [part.place for part in run_of(opened.state.extra).parts if part.what == "random"]
    for path in paths:
        where = "/".join(("extra", *path))
        if any(f"{where}/".startswith(f"{place}/") for place in random):
            yield f"random: {where}: no live key was given for it"


def compare_generators(keys: Any) -> Compare | None:
    """Returns what compares PRNG keys with a checkpoint's, each with what is kept under its name.

    Args:
        keys: A tree of keys, typed or as raw integers; None where there are none to compare.

    Raises:
        UsageError: It isn't a tree of keys.
    """
    if keys is None:
        return None
    live = {tuple(key_names(path)): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(keys)[0]}
    if wrong := ["/".join(name) or "it" for name, leaf in live.items() if not name or not _is_key(leaf)]:
        raise UsageError(
            "JAX has no generators of its own: the run's keys are compared by their names in the checkpoint.",
            place="generators",
            expected="a tree of PRNG keys by name, as {'rng': key}",
            found=f"something else at {', '.join(wrong)}",
        )

    def compare(opened: OpenState) -> tuple[list[Finding], list[str]]:
        kept = {
            tuple(map(str, path)): leaf for path, leaf in walk(opened.state.extra) if isinstance(leaf, Tensor)
        }
        wrong, unsaid, seen = [], list[str](), set[tuple[str, ...]]()
        for name, key in live.items():
            place = min((path for path in kept if path[-len(name) :] == name), key=len, default=None)
            if place is None:
                unsaid.append(
                    f"random: {'/'.join(name)}: the checkpoint ({opened.checkpoint.container}) keeps no such key"
                )
                continue
            seen.add(place)
            if not np.array_equal(np.asarray(kept[place].read()), _numbers(key)):
                wrong.append("/".join(name))
        unsaid += _not_given(opened, [path for path in kept if path not in seen])
        return [fault("random", wrong, "the keys as they were saved", "others")] if wrong else [], unsaid

    return compare


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and (
        jnp.issubdtype(dtype, jax.dtypes.prng_key) or jnp.issubdtype(dtype, jnp.integer)
    )


def _numbers(key: Any) -> Any:
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key)
