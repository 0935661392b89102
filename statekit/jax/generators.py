"""Whether a run's PRNG keys are where its checkpoint's are. JAX has none of its own: the run's are given by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from statekit.attestation.attestation import Finding
from statekit.attestation.faults import fault
from statekit.conversion.open_state import OpenState
from statekit.errors import UsageError
from statekit.jax.leaves import key_names
from statekit.state.run import run_of
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import walk

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
