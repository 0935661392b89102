"""The step of every optimizer, compiled ahead of time for TPUs, without one; run as a script, in a process of its own.

Prints a line of JSON for each: what it is, and the bytes it accesses over the least possible.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import statekit.jax as sj

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1"}
RULES: dict[str, Any] = {
    "adafactor": lambda: sj.adafactor(1e-2),
    "scaled_adam": lambda: sj.scaled_adam(1e-2, clipping_scale=2.0),
    "lans": lambda: sj.lans(1e-2),
    "lamb": lambda: sj.lamb(1e-2),
    "adamw": lambda: sj.adamw(1e-2),
}
LOW_PARAMS = ("adafactor", "scaled_adam")
"""Rules that say how they round parameters of bfloat16; the others get bfloat16 gradients."""


def measured(name: str, kind: str, dtype: str, size: int, count: int) -> dict[str, Any]:
    """Compiles one step for one TPU, and weighs the bytes it accesses against the least possible."""
    rule = RULES[name]()
    params = dtype if name in LOW_PARAMS else "float32"
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[kind]).devices[0]
    sharding = SingleDeviceSharding(device)

    def there(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    def matrices(dtype: str) -> Any:
        return {str(i): jax.ShapeDtypeStruct((size, size), jnp.dtype(dtype)) for i in range(count)}

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(rule.init, matrices(params))
    given = (there(matrices(params)), there(state), there(matrices(dtype)))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile()
    weights = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) for tree in given]
    least = 2 * weights[0] + 2 * weights[1] + weights[2]
    cost = compiled.cost_analysis()
    accessed = (cost[0] if isinstance(cost, list) else cost)["bytes accessed"]
    return {
        "rule": name,
        "tpu": kind,
        "dtype": dtype,
        "bytes": accessed,
        "weights": weights,
        "least": least,
        "ratio": accessed / least,
    }


if __name__ == "__main__":
    _, names, kinds, dtypes, size, count = sys.argv
    for name in names.split(","):
        for kind in kinds.split(","):
            for dtype in dtypes.split(","):
                print(json.dumps(measured(name, kind, dtype, int(size), int(count))), flush=True)
