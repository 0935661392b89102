"""Parameters in parts on eight devices, and what is checked of them; run by itself, before JAX counts its devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_judging import faults, spec_by

import statekit.jax as sj

RATE = 0.1
RULES = [("s", ["BATCH", "ROW", "COLUMN"]), (".*", "HEURISTIC")]
SPECS = {"s": P("b", "r", "c"), "v": P("r")}
CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (sj.adafactor, {"factor_map": RULES, "beta1": 0.9}),
    (sj.scaled_adam, {"clipping_scale": 2.0}),
    (sj.lans, {}),
    (sj.lamb, {}),
    (sj.adamw, {}),
)


def sharded(mesh: Any) -> dict[str, Any]:
    """Returns parameters whose batch, row and column axes lie over the mesh."""
    rng = np.random.default_rng(0)
    plain = {"s": jnp.asarray(rng.standard_normal((4, 8, 6), np.float32)), "v": jnp.ones(8)}
    return {name: jax.device_put(plain[name], NamedSharding(mesh, spec)) for name, spec in SPECS.items()}


def one_part_of(old: Any, new: Any) -> Any:
    """Returns an array whose part on one device hasn't moved."""
    parts = [shard.data for shard in new.addressable_shards]
    parts[-1] = old.addressable_shards[-1].data
    return jax.make_array_from_single_device_arrays(new.shape, new.sharding, parts)


def check(rule: Any, spec: Any, start: dict[str, Any]) -> None:
    """Requires that three updates stay within the bound and keep how slots lie, and that a lost part is noticed."""
    wrapped = optax.chain(optax.identity(), rule)
    laid = (jax.tree.map(lambda x: x.sharding, start), sj.state_shardings(wrapped.init, start)[1])

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    moved = jax.jit(step, out_shardings=laid)
    trail, grads = (
        [(start, rule.init(start))],
        [jax.tree.map(lambda p, n=n: jnp.cos(p + n), start) for n in range(3)],
    )
    for slope in grads:
        trail.append(moved(*trail[-1], slope))
    assert faults(spec, RATE, trail, grads) == []
    params, state = trail[-1]
    lost = ({**params, "s": one_part_of(trail[-2][0]["s"], params["s"])}, state)
    assert faults(spec, RATE, [trail[-2], lost], grads[-1:]) != []
    if hasattr(state, "v_row"):
        fresh = trail[0][1]
        assert fresh.v_row["s"].sharding.spec == P("b", "r") == state.v_row["s"].sharding.spec
        assert fresh.v_col["s"].sharding.spec == P("b", "c") and fresh.m["s"].sharding.spec == SPECS["s"]


if __name__ == "__main__":
    start = sharded(jax.make_mesh((2, 2, 2), ("b", "r", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3))
    for make, options in CASES:
        check(make(RATE, **options), spec_by(make, options), start)
    print(f"{len(CASES)} within the bound")
