"""Runs in JAX with arrays on eight devices that are attested; run by itself, since it needs them before JAX starts.

    python attest_jax_driving.py FOLDER

writes to `FOLDER/result.json` what was found of honest resumes and of the faults that Orbax and Flax make easy.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint

import statekit.jax


def params_of(seed: int) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    keys = jax.random.split(jax.random.PRNGKey(seed), 2)
    u, w = (jax.device_put(jax.random.normal(key, (8, 4)), split) for key in keys)
    return {"enc": {"u": u, "w": w, "b": jnp.ones(4)}}


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0.0, 10))
    ),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
    "statekit": lambda: statekit.jax.lamb(1e-2),
}


def tree(change: Callable[[str, Any], Any], node: Any) -> Any:
    """Returns a tree in which leaves have changed; their keys and values are given."""
    return jax.tree_util.tree_map_with_path(lambda path, x: change(jax.tree_util.keystr(path), x), node)


def floats(change: Callable[[Any], Any], node: Any, of: str = "") -> Any:
    """Returns a tree in which the arrays of floats have changed whose keys have a part."""
    return tree(
        lambda key, x: change(x) if x.ndim and jnp.issubdtype(x.dtype, jnp.floating) and of in key else x,
        node,
    )


def counts(change: Callable[[Any], Any], node: Any) -> Any:
    return tree(lambda key, x: change(x) if jnp.issubdtype(x.dtype, jnp.integer) else x, node)


def swapped(node: Any) -> Any:
    """Returns a state in which two parameters of one shape have each other's slots."""
    leaves = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_flatten_with_path(node)[0]}
    others = {"['u']": "['w']", "['w']": "['u']"}
    return tree(lambda key, x: leaves[key[:-5] + others[key[-5:]]] if key[-5:] in others else x, node)


def first_shard(x: Any) -> Any:
    """Returns an array of which one device has what it had before."""
    return x.at[(slice(0, 2),) * x.ndim].set(0)


FAULTS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "moments zero": lambda p, s: (p, floats(lambda x: x * 0, s)),
    "moments of one parameter zero": lambda p, s: (p, floats(lambda x: x * 0, s, "['b']")),
    "moments exchanged": lambda p, s: (p, swapped(s)),
    "moments negated": lambda p, s: (p, floats(lambda x: -x, s)),
    "moments doubled": lambda p, s: (p, floats(lambda x: 2 * x, s)),
    "moments rounded": lambda p, s: (p, floats(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), s)),
    "moments cast": lambda p, s: (p, floats(lambda x: x.astype(jnp.bfloat16), s)),
    "moments not finite": lambda p, s: (p, floats(lambda x: x * jnp.nan, s, "['u']")),
    "moments one bit apart": lambda p, s: (p, floats(lambda x: jnp.nextafter(x, jnp.inf), s, "['b']")),
    "moments reversed": lambda p, s: (p, floats(lambda x: x[::-1], s)),
    "one device's moments new": lambda p, s: (p, floats(first_shard, s)),
    "count lost": lambda p, s: (p, counts(lambda x: x * 0, s)),
    "count one on": lambda p, s: (p, counts(lambda x: x + 1, s)),
    "weights new": lambda p, s: (params_of(1), s),
    "weights cast": lambda p, s: (floats(lambda x: x.astype(jnp.bfloat16), p), s),
    "weights rounded": lambda p, s: (floats(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), p), s),
    "weights one bit apart": lambda p, s: (floats(lambda x: jnp.nextafter(x, jnp.inf), p, "['b']"), s),
    "weights exchanged": lambda p, s: (swapped(p), s),
    "a weight missing": lambda p, s: ({"enc": {n: x for n, x in p["enc"].items() if n != "b"}}, s),
}
"""What goes wrong with a restored run."""


def attested(kind: str, out: Path) -> dict[str, list[str]]:
    made = OPTIMIZERS[kind]()
    params = params_of(0)
    state = made.init(params)
    for i in range(3):
        grads = jax.tree.map(lambda x, i=i: x * 0.1 + i, params)
        updates, state = made.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    whole = {"params": params, "opt_state": state}
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(out, whole)
        checkpointer.wait_until_finished()
        same = checkpointer.restore(out, whole)
        halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, state)
        cast = checkpointer.restore(out, {"params": params, "opt_state": halved})
    exchanged = {"enc": {**params["enc"], "u": params["enc"]["w"], "w": params["enc"]["u"]}}
    tries = {
        "honest": (same["params"], same["opt_state"]),
        "unused": (same["params"], made.init(params)),  # what was restored stayed a local
        "weights": (params_of(1), same["opt_state"]),
        "cast": (cast["params"], cast["opt_state"]),  # Orbax casts to the template's dtype
        "exchanged": (exchanged, same["opt_state"]),
        **{name: make(same["params"], same["opt_state"]) for name, make in FAULTS.items()},
    }
    if kind == "adamw":
        tries["reset"] = (
            same["params"],
            jax.tree.map(
                lambda part: (
                    part._replace(count=part.count * 0)
                    if isinstance(part, optax.ScaleByScheduleState)
                    else part
                ),
                same["opt_state"],
                is_leaf=lambda part: isinstance(part, optax.ScaleByScheduleState),
            ),
        )
    return {
        name: sorted({one.name for one in statekit.jax.attest(*pair, out).findings})
        for name, pair in tries.items()
    }


def main(work: Path) -> None:
    """Runs all."""
    result = {kind: attested(kind, work / kind) for kind in OPTIMIZERS}
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
