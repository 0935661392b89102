"""Runs in JAX with arrays on eight devices that are attested; run by itself, since it needs them before JAX starts.

    python attest_jax_driving.py FOLDER [all]

writes to `FOLDER/result.json` what was found of honest resumes and of the faults that Orbax and Flax make easy, and of
the updates after them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
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


def mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def params_of(seed: int) -> Any:
    split = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("a", "b"))
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


def by_labels() -> Any:
    parts = {"matrices": optax.adafactor(1e-3, min_dim_size_to_factor=4), "rest": optax.adamw(1e-2)}
    return optax.multi_transform(parts, {"enc": {"u": "matrices", "w": "matrices", "b": "rest"}})


STEPPED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "adamw": (OPTIMIZERS["adamw"], {
        "learning_rate": optax.linear_schedule(0.1, 0.0, 10),
        "hparams": {"global_norm_clip_threshold": 1.0, "clipvalue": None, "weight_decay_rate": 1e-4},
    }),
    "adafactor": (OPTIMIZERS["adafactor"], {"learning_rate": 1e-3, "hparams": {"beta1": 0.9}}),
    "statekit": (OPTIMIZERS["statekit"], {"learning_rate": 1e-2, "variant": "optax"}),
    "several": (by_labels, {"learning_rate": {"adafactor": 1e-3, "adamw": 1e-2}}),
    "injected": (lambda: optax.inject_hyperparams(optax.adamw)(1e-2, eps=1e-7), {}),
    "waiting": (lambda: optax.MultiSteps(optax.adamw(1e-2), 2), {"learning_rate": 1e-2}),
    "skipping": (lambda: optax.apply_if_finite(optax.adamw(1e-2), 3), {"learning_rate": 1e-2}),
}  # fmt: skip
"""Optimizers whose updates are attested, and what is said of them, as their states don't."""


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


def placed(node: Any) -> Any:
    """Returns a tree in which what no axis splits lies on all devices."""
    whole = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec())
    return jax.tree.map(lambda x: x if len(x.sharding.device_set) > 1 else jax.device_put(x, whole), node)


def grads_of(params: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x * 0.1 + i, params)


def trained(made: Any, updates: int = 3) -> dict[str, Any]:
    def step(params: Any, state: Any, i: Any) -> tuple[Any, Any]:
        updates_of, state = made.update(grads_of(params, i), state, params)
        return optax.apply_updates(params, updates_of), state

    jitted = jax.jit(step)  # one program, where each operation on eight devices would be one
    params = params_of(0)
    state = made.init(params)
    for i in range(updates):
        params, state = jitted(params, state, i)
    return {"params": params, "opt_state": state}


Update = Callable[[Any, Any, Any], tuple[Any, Any]]
Hide = Callable[[Update, Any, Any, Any], tuple[Any, Any]]


def counted(change: Callable[[Any], Any], before: Any, after: Any) -> Any:
    """Returns a state after an update in which the counts are made of those before it."""
    pairs = (lambda old, new: change(old) if jnp.issubdtype(old.dtype, jnp.integer) else new), before, after
    return jax.tree.map(*pairs)


def powers_cached(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, after = update(grads, counts(lambda x: x * 0, state), params)
    return updates, counted(lambda old: old + 1, state, after)


def gradients_changed(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return update(jax.tree.map(lambda x: x.at[0].mul(3), grads), state, params)


def state_elsewhere(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return update(grads, floats(lambda x: x * 0, state), params)


def another_rate(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, after = update(grads, state, params)
    return jax.tree.map(lambda x: x * 1.001, updates), after


def epsilon_moved(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, after = optax.apply_if_finite(optax.adamw(1e-2, eps=1e-4), 3).update(grads, state, params)
    return updates, after


def count_left(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, after = update(grads, state, params)
    return updates, counted(lambda old: old, state, after)


HIDDEN: dict[str, tuple[str, Hide]] = {
    hide.__name__: (kind, hide)
    for kind, hide in (
        ("several", powers_cached),
        ("several", gradients_changed),
        ("injected", state_elsewhere),
        ("injected", another_rate),
        ("skipping", epsilon_moved),
        ("skipping", count_left),
    )
}
"""What a state doesn't show before its update, and of which optimizer it is tried."""


def honest(update: Update, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return update(grads, state, params)


def stepped(kind: str, out: Path, hide: Hide = honest, calls: int = 1) -> Any:
    """Attests the update after a run that Orbax restores, jitted and donating what it had."""
    make, said = STEPPED[kind]
    made = make()
    whole = trained(made)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        if not out.exists():
            checkpointer.save(out, whole)
            checkpointer.wait_until_finished()
        same = checkpointer.restore(out, whole)
    params, state = placed(same["params"]), placed(same["opt_state"])

    def train_step(params: Any, state: Any, i: Any) -> Any:
        grads = grads_of(params, i)
        updates, state = hide(made.update, grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    jitted = jax.jit(train_step, donate_argnums=(0, 1))
    with statekit.jax.attested_step(params, state, out, **said) as step:
        for i in range(calls):
            params, state, grads = jitted(params, state, jnp.float32(3 + i))
            step.check(grads, params, state)
    assert step.result is not None
    return step.result


FEW = ("several", "waiting", "count_left")
SAMPLE = ("adamw", "adafactor")


def steps_of(work: Path, names: Sequence[str]) -> dict[str, Any]:
    """Returns what was found of the updates after honest resumes, and of those with something hidden."""
    result: dict[str, Any] = {}
    for kind in (name for name in names if name in STEPPED):
        one = stepped(kind, work / f"step {kind}", calls=2)
        said = [line for line in (*one.unchecked, *one.assumptions) if "update" in line or "Multi" in line]
        result[kind] = [*map(str, one.findings), one.stepped, *said]
    for name in (name for name in names if name in HIDDEN):
        kind, hide = HIDDEN[name]
        result[name] = [finding.name for finding in stepped(kind, work / f"step {kind}", hide).findings]
    return result


def attested(kind: str, out: Path) -> dict[str, list[str]]:
    made = OPTIMIZERS[kind]()
    whole = trained(made)
    params, state = whole["params"], whole["opt_state"]
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


def main(work: Path, which: str = "") -> None:
    """Attests all runs and updates, or a sample of both."""
    is_all = which == "all"
    result: dict[str, Any] = {
        kind: attested(kind, work / kind) for kind in (OPTIMIZERS if is_all else SAMPLE)
    }
    result["steps"] = steps_of(work, [*STEPPED, *HIDDEN] if is_all else FEW)
    (work / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
