"""Optimizers of Optax that no schema describes: their state goes there and back, and the original goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import statekit
from statekit.cli.main import main
from statekit.conversion.open_state import open_state
from statekit.converters.layouts.optax.optax_native import Layers, _with_lists
from statekit.errors import StatekitError, UnknownRuleError
from statekit.tensors.tensor import in_memory
from statekit.verify.cold_start import cold_start
from statekit.verify.verification import verify

pytestmark = pytest.mark.jax
RATE = 0.01


def originals() -> dict[str, Callable[[], Any]]:
    """Returns optimizers of Optax by name: each as a program would make it."""
    import optax
    from optax import contrib

    schedule = optax.linear_schedule(0.1, 0.0, 20)
    labels = {"dense": "lion", "out": "sgd", "scale": "lion"}
    return {
        "lion": lambda: optax.lion(schedule),
        "sgd": lambda: optax.sgd(RATE),
        "rmsprop": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9, nesterov=True),
        "two traces": lambda: optax.chain(
            optax.trace(0.9), optax.clip(1.0), optax.trace(0.5), optax.scale(-RATE)
        ),
        "novograd": lambda: optax.novograd(RATE),
        "sm3": lambda: optax.sm3(RATE),
        "partition": lambda: optax.partition({"lion": optax.lion(RATE), "sgd": optax.sgd(RATE, 0.9)}, labels),
        "mixed": lambda: optax.partition({"lion": optax.lion(RATE), "sgd": optax.adamw(RATE)}, labels),
        "schedule_free": lambda: contrib.schedule_free_sgd(RATE),
        "accumulated": lambda: optax.MultiSteps(optax.lion(RATE), 2),
        "injected": lambda: optax.inject_hyperparams(optax.lion)(learning_rate=schedule),
        "momentum": lambda: optax.sgd(RATE, 0.9),
        "adagrad": lambda: optax.adagrad(RATE),
        "adadelta": lambda: optax.adadelta(RATE),
        "adan": lambda: optax.adan(RATE),
        "rprop": lambda: optax.rprop(RATE),
        "optimistic": lambda: optax.optimistic_gradient_descent(RATE),
        "lars": lambda: optax.lars(RATE),
        "ademamix": lambda: contrib.ademamix(RATE),
        "prodigy": contrib.prodigy,
        "dadapt": contrib.dadapt_adamw,
        "cocob": contrib.cocob,
        "dog": contrib.dog,
        "schedule_free_adamw": lambda: contrib.schedule_free_adamw(RATE),
        **{name: partial(getattr(optax, name), RATE) for name in ADAM_LIKE},
    }


ADAM_LIKE = ("nadam", "radam", "adamax", "yogi", "adabelief", "amsgrad")
FAST = ("lion", "mixed")
NAMES = (
    *FAST, "sgd", "rmsprop", "sm3", "two traces", "novograd", "partition", "schedule_free", "accumulated", "injected",
    "momentum", "adagrad",
    "adadelta", "adan", "rprop", "optimistic", "lars", "ademamix", "prodigy", "dadapt", "cocob", "dog",
    "schedule_free_adamw", *ADAM_LIKE,
)  # fmt: skip


def drawn(seed: int) -> Any:
    """Returns a tree like the parameters."""
    import jax.numpy as jnp

    random = np.random.default_rng(seed)

    def of(*shape: int) -> Any:
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    return {"dense": {"bias": of(4), "kernel": of(3, 4)}, "out": {"0": of(4, 2)}, "scale": of(1)}


def updated(optimizer: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    import optax

    for number in range(first, last):
        updates, state = optimizer.update(drawn(100 + number), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def as_flax(path: Path, run: Any) -> None:
    from flax import serialization

    path.write_bytes(serialization.to_bytes(run))


def from_flax(path: Path, like: Any) -> Any:
    from flax import serialization

    return serialization.from_bytes(like, path.read_bytes())


def as_orbax(path: Path, run: Any) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, run)


def from_orbax(path: Path, like: Any) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def unlike(left: Any, right: Any) -> list[str]:
    """Returns the places in which two trees differ: values to the bit, dtypes, structure."""
    import jax

    assert jax.tree.structure(left) == jax.tree.structure(right)
    pairs = zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True)
    return [
        jax.tree_util.keystr(path)
        for (path, one), other in pairs
        if np.asarray(one).dtype != np.asarray(other).dtype
        or np.asarray(one).tobytes() != np.asarray(other).tobytes()
    ]


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_the_original_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    optimizer = originals()[name]()
    start = drawn(0)
    params, state = updated(optimizer, start, optimizer.init(start), 0, 3)
    run = {"params": params, "opt_state": state, "step": 3}
    as_orbax(tmp_path / "run", run)
    statekit.convert(tmp_path / "run", tmp_path / "neutral", to="statekit")
    statekit.convert(tmp_path / "neutral", tmp_path / "flax", to="flax")
    statekit.convert(tmp_path / "flax", tmp_path / "back", to="orbax")
    begun = {"params": start, "opt_state": optimizer.init(start), "step": 0}
    as_flax(tmp_path / "original", run)
    for original, path, restored in (
        ("original", "flax/checkpoint_3", from_flax),
        ("run", "back/3/default", from_orbax),
    ):
        # What is weakly typed in memory is so in no file, and Flax restores arrays of NumPy.
        due, back = (restored(tmp_path / file, begun) for file in (original, path))
        assert unlike(run, back) == []
        ends = [updated(optimizer, each["params"], each["opt_state"], 3, 5) for each in (due, back)]
        assert unlike(*ends) == []


def saved(path: Path, optimizer: Any) -> Path:
    """Saves a run of an optimizer in Flax' msgpack."""
    start = drawn(0)
    params, state = updated(optimizer, start, optimizer.init(start), 0, 2)
    as_flax(path, {"params": params, "opt_state": state})
    return path


def test_its_slots_have_their_own_names_and_its_rule_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = saved(tmp_path / "run.msgpack", originals()["rmsprop"]())
    with open_state(source) as opened:
        assert opened.state.optimizer.kinds == (("optax_native", "centered RMSprop with momentum"),)
        assert {*opened.state.slots["dense/kernel"]} == {"mu", "nu", "trace"}
    made = statekit.plan(source, tmp_path / "out", to="orbax")
    assert made.headline == "BITWISE; unknown: the rule of centered RMSprop with momentum"
    with pytest.raises(UnknownRuleError, match="statekit has no step of centered RMSprop with momentum"):
        cold_start(source)
    assert main(["resume", str(source)]) == 0
    assert "= ...  # the run's own optimizer: centered RMSprop with momentum" in capsys.readouterr().out
    with pytest.raises(StatekitError, match="state of centered RMSprop"):
        statekit.plan(source, tmp_path / "out.pt")


def test_two_links_of_a_kind_are_told_by_their_places(tmp_path: Path) -> None:
    with open_state(saved(tmp_path / "run.msgpack", originals()["two traces"]())) as opened:
        assert {*opened.state.slots["scale"]} == {"0.trace", "2.trace"}


def test_what_an_axis_has_of_its_own_is_a_slot_by_its_number(tmp_path: Path) -> None:
    with open_state(saved(tmp_path / "run.msgpack", originals()["sm3"]())) as opened:
        shapes = {name: slot.shape for name, slot in opened.state.slots["dense/kernel"].items()}
        assert shapes == {"mu.0": (3,), "mu.1": (4,), "nu": (3, 4)}


@pytest.mark.parametrize("name", ["radam", "adamax", "yogi", "adabelief", "novograd"])
def test_a_rule_that_the_user_names_is_the_one_that_is_unknown(name: str, tmp_path: Path) -> None:
    import optax

    source = saved(tmp_path / "run.msgpack", getattr(optax, name)(RATE))
    made = statekit.plan(source, tmp_path / "out", to="orbax", optimizer=name)
    assert made.headline.lower() == f"bitwise; unknown: the rule of {name}"
    with pytest.raises(StatekitError, match=f"(?i){name}"):
        statekit.plan(source, tmp_path / "out.pt", optimizer=name)


def test_a_far_index_makes_no_list_and_a_near_one_does() -> None:
    count = in_memory(np.asarray(1, np.int32))
    tree = {"params": {"w": in_memory(np.ones(2, np.float32))}, "opt_state": {"500000": {"count": count}}}
    layers = Layers(("params",), ("opt_state",))
    assert _with_lists(tree, layers) == {"500000": {"count": count}}
    assert _with_lists({**tree, "opt_state": {"2": {"count": count}}}, layers) == [
        None,
        None,
        {"count": count},
    ]


NAMED = {
    "signum": "Signum",
    "lars": "LARS",
    "noisy_sgd": "noisy SGD",
    "galore": "GaLore",
    "schedule_free_sgd": "schedule_free",
    "schedule_free_adamw": "schedule_free around RMSprop",
    "sgd": "SGD without momentum, or sign SGD",
    "fromage": "Fromage, or another chain of three links without slots",
}


@pytest.mark.parametrize("name", NAMED)
def test_no_optimizer_without_a_schema_is_called_by_anothers_name(name: str, tmp_path: Path) -> None:
    """LARS was SGD with momentum, and GaLore a damaged AdamW; without a state the chain names those that make it."""
    import jax
    import optax
    from optax import contrib

    make: Any = {**vars(optax), **vars(contrib)}[name]
    params = drawn(0)
    options = {"key": jax.random.key(0)} if name == "noisy_sgd" else {}

    def as_stored(leaf: Any) -> Any:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    state = jax.tree.map(as_stored, make(RATE, **options).init(params))
    source = tmp_path / "run.msgpack"
    as_flax(source, {"params": params, "opt_state": state})
    with open_state(source) as opened:
        assert opened.state.optimizer.kinds == (("optax_native", NAMED[name]),)
    statekit.convert(source, tmp_path / "again", to="statekit")
    verdict = verify(source, tmp_path / "again", steps=1)
    assert "no step of" in json.dumps(verdict.to_json())
