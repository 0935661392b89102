"""An optimizer of Optax is recognised by its exact structure: what is convertible goes on as Optax does."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.arrays.numpy_backend import NumpyBackend
from statekit.cli.main import main
from statekit.conversion.changing.changed import changed
from statekit.conversion.changing.changes import Changes
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Exactness
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.registry import contents, decoded
from statekit.conversion.rule_change import change_rule
from statekit.converters.layouts.optax.layout import LAYOUT
from statekit.errors import InexactError, StateError, UnknownRuleError, UsageError
from statekit.files.checkpoint import EMPTY_LEFT_OUT, MODEL_KEY, SEQUENCES_AS_MAPS, Checkpoint
from statekit.optim.run import load, mover
from statekit.pages.verdicts import of_verify
from statekit.state.evidence import BEYOND, OPTIMIZER, Fact
from statekit.state.train_state import TrainState
from statekit.verify.verification import verify

pytestmark = pytest.mark.jax
DONE, MORE, RATE = 5, 3, 0.01
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "dense": {"kernel": (8, 6), "bias": (6,)},
    "out": {"kernel": (6, 4)},
}
SHORT = ("adam", "adamax", "radam", "nadam", "yogi", "adabelief", "adopt")
LONG = ("adamw", "nadamw", "adamaxw", "acprop")


def drawn(seed: int, size: float) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(seed)
    return {
        name: {key: (size * random.normal(size=shape)).astype(np.float32) for key, shape in inner.items()}
        for name, inner in SHAPES.items()
    }


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}/{key}": np.asarray(leaf) for name, inner in tree.items() for key, leaf in inner.items()}


def updated(tx: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    """Makes updates of Optax, compiled."""
    import jax
    import optax

    update = jax.jit(optax.with_extra_args_support(tx).update)
    extra = {} if "sam." in repr(tx.update) else {"value": np.float32(1.0)}  # which takes no more arguments
    for i in range(first, last):
        updates, state = update(drawn(100 + i, 0.1), state, params, **extra)
        params = optax.apply_updates(params, updates)
    return params, state


def run_of(tx: Any) -> tuple[Any, Any]:
    return updated(tx, drawn(0, 0.3), tx.init(drawn(0, 0.3)), 0, DONE)


def tree_of(params: Any, state: Any) -> dict[str, Any]:
    """Returns what Orbax would keep."""
    from statekit.jax.live import live_tree

    tree: dict[str, Any] = live_tree({"params": params, "opt_state": state})
    return tree


def read(tree: Any, *, meta: Mapping[str, Any] | None = None, **options: Any) -> TrainState:
    return decoded(LAYOUT, Checkpoint("orbax", Path("run"), tree, dict(meta or {})), CheckpointRef(**options))


def facts(state: TrainState, name: str) -> list[Fact]:
    return [fact for group in state.optimizer.groups for fact in group.facts if fact.name == name]


def fitting(state: TrainState) -> set[str]:
    return {name for fact in facts(state, OPTIMIZER) for name in (fact.value, *fact.others) if name}


def gone_on(state: TrainState, updates: int = MORE, rates: Callable[[int], float] | None = None) -> Any:
    """Makes updates by statekit's own rule; the rates are the groups', unless a schedule gives them."""
    xp = NumpyBackend()
    live, move = load(xp, state), mover(xp, state)
    for i in range(DONE, DONE + updates):
        stored = tuple(group.hyperparameters.get("learning_rate") for group in state.optimizer.groups)
        grads = {path: grad for path, grad in flat(drawn(100 + i, 0.1)).items() if path in state.params}
        live = move(live, grads, tuple(rates(live.updates) for _ in stored) if rates else stored)
    return {path: np.asarray(param) for path, param in live.params.items()}


def off(ours: Mapping[str, Any], theirs: Any, before: Any) -> float:
    """Returns the largest difference, relative to what that parameter moved."""
    due, start = flat(theirs), flat(before)
    moved = {path: np.abs(due[path] - start[path]).max() for path in due}
    return float(max(np.abs(ours[path] - due[path]).max() / moved[path] for path in due))


def test_every_optimizer_of_optax_fits_its_own_name_or_is_described_by_it() -> None:
    """The zoo: no optimizer is called by another's name, with a constant rate or a schedule."""
    import optax
    from optax import contrib

    library = {**vars(optax), **vars(contrib)}
    names = [*SHORT, *LONG, "amsgrad", "lamb", "adafactor", *STRANGERS]
    seen = {}
    for name in (name for name in names if name in library):
        for rate in (RATE, optax.linear_schedule(RATE, 0.0, 20)):
            options = (
                {"learning_rate": rate}
                if "learning_rate" in inspect.signature(library[name]).parameters
                else {}
            )
            try:
                tree = tree_of(drawn(0, 0.3), library[name](**options).init(drawn(0, 0.3)))
            except (TypeError, ValueError):  # some take no schedule
                continue
            checkpoint = Checkpoint("orbax", Path("run"), tree)
            if name in STRANGERS:
                assert LAYOUT.detect(checkpoint) is None, name
                described = LAYOUT.describe(checkpoint)
                assert described is not None and STRANGERS[name] in described.what, name
                continue
            state = LAYOUT.decode(checkpoint, CheckpointRef())
            assert name in (fitting(state) or {state.optimizer.schema}), name
            seen[name] = [fact.source for fact in facts(state, OPTIMIZER)]
            assert state.counts.says_schedule == callable(rate), name
    assert {name for name, sources in seen.items() if sources == ["unknown"]} == {*SHORT} & library.keys()


STRANGERS = {
    "lion": "Lion",
    "adan": "Adan",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "rmsprop": "RMSprop",
    "novograd": "NovoGrad",
    "rprop": "Rprop",
    "sm3": "SM3",
    "lbfgs": "L-BFGS",
    "optimistic_gradient_descent": "optimistic gradient descent",
    "ademamix": "AdEMAMix",
    "simplified_ademamix": "simplified AdEMAMix",
    "prodigy": "Prodigy",
    "dadapt_adamw": "D-Adaptation AdamW",
    "momo": "MoMo",
    "momo_adam": "MoMo-Adam",
    "dog": "DoG",
    "dowg": "DoWG",
    "cocob": "COCOB",
    "sophia": "Sophia",
}
"""Optimizers without a schema, and what they are called."""


def convertible() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Returns optimizers that statekit steps, each with what has to be told."""
    import optax

    rate = {"learning_rate": RATE}
    clipped = {"clipvalue": None, "global_norm_clip_threshold": 0.1}
    return {
        "adam": (optax.adam(RATE), {"optimizer": "adam", "hparams": rate}),
        "nadam": (optax.nadam(RATE), {"optimizer": "nadam", "hparams": rate}),
        "amsgrad": (optax.amsgrad(RATE), {"hparams": rate}),
        "adamw": (optax.adamw(RATE), {"hparams": rate}),
        "nadamw": (optax.nadamw(RATE), {"optimizer": "nadamw", "hparams": rate}),
        "lamb": (optax.lamb(RATE), {"hparams": rate}),
        "clipped": (
            optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE, weight_decay=0.1)),
            {"hparams": {**rate, **clipped, "weight_decay": 0.1}},
        ),
        "old idiom": (
            optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda count: RATE), optax.scale(-1)),
            {"optimizer": "adam", "hparams": rate},
        ),
        "if finite": (optax.apply_if_finite(optax.adamw(RATE), 5), {"hparams": rate}),
    }


def test_what_is_convertible_goes_on_as_optax_does() -> None:
    for name, (tx, options) in convertible().items():
        params, state = run_of(tx)
        due, _ = updated(tx, params, state, DONE, DONE + MORE)
        ours = read(tree_of(params, state), **options)
        assert not facts(ours, BEYOND), name
        assert off(gone_on(ours), due, params) < 1e-5, name


def changing() -> dict[str, tuple[Any, str]]:
    """Returns optimizers whose updates aren't those of a schema, and what is said of them."""
    import optax
    from optax import contrib

    adam = optax.adam(RATE)
    return {
        "schedule_free": (
            contrib.schedule_free(optax.adamw(RATE, b1=0.0), RATE),
            "schedule_free stands around",
        ),
        "mechanize": (contrib.mechanize(adam), "mechanize stands around"),
        "sam": (contrib.sam(adam, optax.sgd(0.05), opaque_mode=False), "sam stands around"),
        "conditional": (
            optax.transforms.conditionally_transform(adam, lambda step: step % 2 == 0),
            "conditionally_transform",
        ),
        "ema behind": (
            optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-RATE)),
            "ema, an average",
        ),
        "trace behind": (
            optax.chain(optax.scale_by_adam(), optax.trace(0.9), optax.scale(-RATE)),
            "trace, a mom",
        ),
        "ema in a chain around": (optax.chain(adam, optax.ema(0.9)), "ema, an average"),
        "noise": (optax.chain(optax.add_noise(0.01, 0.55, 0), adam), "add_noise stands before"),
        "schedule before": (
            optax.chain(
                optax.scale_by_schedule(lambda count: 0.5), optax.scale_by_adam(), optax.scale(-RATE)
            ),
            "A schedule scales the gradients before Adam",
        ),
        "optimistic": (optax.optimistic_adam_v2(RATE), "scale_by_optimistic_gradient stands behind"),
        "schedule before adafactor": (
            optax.chain(optax.scale_by_schedule(lambda count: 0.5), optax.adafactor(RATE)),
            "A schedule scales the gradients before Adafactor",
        ),
    }


@pytest.mark.filterwarnings("ignore:Specifying a key:UserWarning")
def test_what_changes_the_updates_is_said_by_its_name() -> None:
    for name, (tx, sentence) in changing().items():
        tree = tree_of(drawn(0, 0.3), tx.init(drawn(0, 0.3)))
        state = read(tree)
        assert any(sentence in fact.because for fact in facts(state, BEYOND)), name
        assert "a learning-rate schedule" not in str(state.assumptions) and not state.counts.says_schedule, (
            name
        )


def test_a_schedule_right_behind_adam_is_of_the_decay_or_of_the_rate() -> None:
    import optax

    tree = tree_of(*run_of(optax.adamw(RATE, weight_decay=optax.linear_schedule(0.1, 0.0, 20))))
    state = read(tree)
    assert fitting(state) == {"adamw", "nadamw", "adamaxw", "adam"} and not state.counts.says_schedule
    said = read(tree, optimizer="adamw", hparams={"learning_rate": RATE})
    assert (
        not said.counts.says_schedule and "weight_decay_rate" not in said.optimizer.groups[0].hyperparameters
    )
    (decay,) = facts(said, "weight_decay_rate")
    assert "follows a schedule" in decay.because
    idiom = read(tree, optimizer="adam")
    assert (
        idiom.counts.says_schedule and idiom.optimizer.groups[0].hyperparameters["weight_decay_rate"] == 0.0
    )


def test_the_scale_that_reduce_on_plateau_stored_is_a_factor_of_the_rate() -> None:
    import optax
    from optax import contrib

    tx = optax.chain(optax.adamw(RATE), contrib.reduce_on_plateau(factor=0.5, patience=2))
    params, state = run_of(tx)
    scale = float(state[1].scale)
    assert scale < 1
    due, _ = updated(tx, params, state, DONE, DONE + 1)  # the next one may change it again
    ours = read(tree_of(params, state), hparams={"learning_rate": RATE})
    assert any(f"multiplies the rate by {scale:g}" in said for said in ours.assumptions)
    assert off(gone_on(ours, 1), due, params) < 1e-5


def test_a_masked_decay_is_asked_for() -> None:
    import optax

    mask = {"dense": {"kernel": True, "bias": False}, "out": {"kernel": True}}
    state = read(tree_of(*run_of(optax.adamw(RATE, mask=mask))))
    [group] = state.optimizer.groups
    assert not {"weight_decay_rate", "exclude_from_weight_decay"} & group.hyperparameters.keys()
    assert "A masked link" in facts(state, "exclude_from_weight_decay")[0].because


def test_a_mask_decides_nothing_where_no_weight_decays() -> None:
    import optax

    state = read(tree_of(*run_of(optax.adamw(RATE, mask=True))), hparams={"weight_decay": 0.0})
    assert not facts(state, "exclude_from_weight_decay")


def test_a_chain_around_adamw_leaves_the_decay_unknown_as_its_gaps_do() -> None:
    """One run gets one answer: as a tuple, and as nnx writes it, without the states that hold nothing."""
    import optax

    tree = tree_of(*run_of(optax.chain(optax.clip(1.0), optax.adamw(RATE))))
    tuples = read(tree)
    gaps = read(
        {"params": tree["params"], "opt_state": {"1": {"0": tree["opt_state"][1][0]}}},
        meta={EMPTY_LEFT_OUT: True, SEQUENCES_AS_MAPS: True},
        optimizer="adamw",
    )
    for state in (tuples, gaps):
        assert "weight_decay_rate" not in state.optimizer.groups[0].hyperparameters
        assert facts(state, "weight_decay_rate")[0].source == "unknown"


def test_verify_proves_nothing_while_nobody_knows_what_decays(tmp_path: Path) -> None:
    """T5X goes on without a decay that Optax has: the next update is 11 times its size off."""
    import optax
    import orbax.checkpoint as ocp

    mask = {"dense": {"kernel": True, "bias": False}, "out": {"kernel": True}}
    trained = run_of(optax.adafactor(RATE, weight_decay_rate=0.1, weight_decay_mask=mask))
    ocp.PyTreeCheckpointer().save(tmp_path / "run", dict(zip(("params", "opt_state"), trained, strict=True)))
    source = CheckpointRef(tmp_path / "run", hparams={"learning_rate": RATE})
    convert(plan(source, tmp_path / "t5x", to="t5x"))
    made = verify(source, tmp_path / "t5x")
    assert made.verdict == "not comparable" and not made.passed
    assert "exclude_from_weight_decay" in of_verify(made.data).text
    without = CheckpointRef(tmp_path / "run", hparams={"learning_rate": RATE, "weight_decay_rate": None})
    assert verify(without, tmp_path / "t5x").passed


def test_moments_that_maxtext_corrects_in_advance_become_averages() -> None:
    """As praxis' sharded_adam has it, whose decays are corrected: MaxText's opt_type=adam_pax."""
    import jax
    import jax.numpy as jnp
    import optax

    first, second = 0.9, 0.95

    def corrected(decay: float, done: Any) -> Any:
        updates = done.astype(jnp.float32) + 1
        return decay * (1 - decay ** (updates - 1)) / (1 - decay**updates)

    def init(params: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros([], jnp.int32), zeros, zeros)

    def update(grads: Any, state: Any, params: Any) -> Any:
        b1, b2 = corrected(first, state.count), corrected(second, state.count)
        mu = jax.tree.map(lambda g, m: (1 - b1) * g + b1 * m, grads, state.mu)
        nu = jax.tree.map(lambda g, v: (1 - b2) * g * g + b2 * v, grads, state.nu)
        step = jax.tree.map(lambda m, v, p: -RATE * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), mu, nu, params)
        return step, optax.ScaleByAdamState(state.count + 1, mu, nu)

    tx = optax.GradientTransformation(init, update)
    params, state = run_of(tx)
    tree = tree_of(params, state)
    assert fitting(read(tree)) == {"adam_pax", "scale_by_adam"}
    due, _ = updated(tx, params, state, DONE, DONE + MORE)
    ways: list[dict[str, Any]] = [{"optimizer": "adam_pax"}, {"variant": "maxtext_pax"}]
    for options in ways:
        ours = read(tree, hparams={"learning_rate": RATE}, **options)
        assert ours.optimizer.variant == "maxtext_pax"
        way = change_rule(ours, "maxtext_pax", "optax")
        assert way.exactness == Exactness.ROUNDING
        assert off(gone_on(way.state), due, params) < 1e-5


def test_each_label_of_a_partition_has_its_own_rate_and_may_begin_anew() -> None:
    import optax

    labels = {"dense": {"kernel": "a", "bias": "a"}, "out": {"kernel": "b"}}
    tx = optax.partition({"a": optax.adam(RATE), "b": optax.adam(0.3 * RATE)}, labels)
    params, state = run_of(tx)
    rates = {"a/learning_rate": RATE, "b/learning_rate": 0.3 * RATE}
    ours = read(tree_of(params, state), optimizer="adam", hparams=rates)
    assert [(group.label, len(group.paths)) for group in ours.optimizer.groups] == [("a", 2), ("b", 1)]
    due, _ = updated(tx, params, state, DONE, DONE + MORE)
    assert off(gone_on(ours), due, params) < 1e-5
    inner = {"a": tx.init(params).inner_states["a"], "b": state.inner_states["b"]}
    due, _ = updated(tx, params, state._replace(inner_states=inner), DONE, DONE + MORE)
    for policy in ("reset:*@a", "reset:*@dense/*"):
        anew, _ = changed(ours, Changes.of({"slot_policy": policy}) or Changes(), ())
        assert anew.counts.behind == {"dense/bias": 0, "dense/kernel": 0}
        for path in anew.counts.behind:  # torch keeps a count for each parameter
            assert not any(slot.read().any() for slot in anew.slots[path].values())
        torch = change_rule(anew, "optax", "torch").state
        assert off(gone_on(torch), due, params) < 1e-4
    with pytest.raises(UsageError, match="can be reset"):
        changed(ours, Changes.of({"slot_policy": "reset:*@c"}) or Changes(), ())


@pytest.mark.parametrize(
    ("names", "key", "updates", "assumed"),
    [
        (("actor/params", "actor/opt_state", "critic/params", "critic/opt_state"), "critic/params", 3, False),
        (("g_params", "g_opt", "d_params", "d_opt"), "g_params", DONE, True),
        (("params_d", "opt_g", "params_g", "opt_d"), "params_d", DONE, True),
    ],
)
def test_each_network_has_the_optimizer_of_its_branch_or_of_its_name(
    names: tuple[str, ...], key: str, updates: int, assumed: bool
) -> None:
    import optax

    tx = optax.adamw(RATE)
    first = run_of(tx)
    second = updated(tx, drawn(1, 0.3), tx.init(drawn(1, 0.3)), 0, 3)
    values = dict(zip(names, (*first, *second), strict=True))
    if names[1] == "opt_g":
        values = {"params_d": first[0], "opt_d": first[1], "params_g": second[0], "opt_g": second[1]}
    tree: dict[str, Any] = {}
    for name, value in values.items():
        branch, _, leaf = name.rpartition("/")
        (tree.setdefault(branch, {}) if branch else tree)[leaf] = tree_of({}, value)["opt_state"]
    with pytest.raises(StateError, match="--model-key"):
        read(tree)
    state = read(tree, meta={MODEL_KEY: key})
    assert state.counts.updates == updates
    assert any("by its name" in said for said in state.assumptions) == assumed
    other = {"a": tree_of({}, first[1])["opt_state"], "b": tree_of({}, second[1])["opt_state"]}
    nothing = {"params": tree_of(first[0], None)["params"], **other}
    with pytest.raises(StateError, match="--optimizer-key"):
        read(nothing, meta={MODEL_KEY: "params"})
    assert read(nothing, meta={MODEL_KEY: "params", "optimizer_key": "b"}).counts.updates == 3


def test_a_look_alike_is_asked_for_across_frameworks_and_carried_otherwise(tmp_path: Path) -> None:
    import optax
    import orbax.checkpoint as ocp

    params, state = run_of(optax.radam(RATE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": params, "opt_state": state})
    with pytest.raises(UnknownRuleError, match=r"radam.*(?s:.*)statekit convert .*--optimizer adam"):
        plan(tmp_path / "run", tmp_path / "run.pt")
    with pytest.raises(InexactError, match="radam"):
        plan(tmp_path / "run", tmp_path / "run.pt", hints=CheckpointRef(optimizer="radam"))
    convert(plan(tmp_path / "run", tmp_path / "neutral", to="statekit"))
    with pytest.raises(UnknownRuleError, match="radam"):
        plan(tmp_path / "neutral", tmp_path / "run.pt")
    convert(plan(tmp_path / "neutral", tmp_path / "back", to="orbax"))
    with open_state(tmp_path / "run") as before, open_state(tmp_path / "back") as after:
        assert before.tensors.keys() == after.tensors.keys() and "radam" in fitting(after.state)


def test_what_wrappers_of_optax_do_is_a_finding_of_a_conversion_that_leaves_optax(tmp_path: Path) -> None:
    """MultiSteps in mid-accumulation, apply_if_finite's counter, MaxText's skip_step_on_spikes, which counts more."""
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    adamw = optax.adamw(RATE)
    params, inner = run_of(adamw)
    skipped: Any = optax.apply_if_finite(adamw, 5).init(params)
    skipped = skipped._replace(inner_state=inner, notfinite_count=jnp.asarray(3, jnp.int32))
    spikes = {"inner_state": inner, "losses": jnp.ones(8), "grad_norms": jnp.ones(8)}
    spikes |= {"count": jnp.asarray(DONE + 2, jnp.int32), "is_skipped": jnp.asarray(False)}
    waiting = run_of(optax.MultiSteps(adamw, 2))[1]
    cases = {
        "lost here: 1 gradients of k": waiting,
        "the last 3 updates weren't": skipped,
        "no spikes": spikes,
    }
    for sentence, state in cases.items():
        run = tmp_path / sentence[:8] / str(DONE + 2)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(run / "default", {"params": params, "opt_state": state})
        sentences = [finding.what for finding in plan(run, tmp_path / "run.pt").findings]
        assert any(sentence in what for what in sentences)
        assert not any(sentence in one.what for one in plan(run, tmp_path / "kept", to="statekit").findings)
        if state is spikes:
            assert not any("another step" in what for what in sentences)


def test_a_module_and_an_optimizer_of_nnx_are_read_attested_and_written_again(tmp_path: Path) -> None:
    """nnx leaves empty states out: a gap in a chain's indices is a link whose settings nobody knows."""
    import jax
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    import statekit.jax

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.dense, self.norm = nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    def built() -> tuple[Any, Any]:
        rate = optax.linear_schedule(RATE, 0.0, 20)
        net = Net(nnx.Rngs(0))
        return net, nnx.Optimizer(net, optax.chain(optax.clip(1.0), optax.adamw(rate)), wrt=nnx.Param)

    net, optimizer = built()
    for _ in range(DONE):
        optimizer.update(net, jax.tree.map(lambda leaf: 0.1 + 0 * leaf, nnx.state(net, nnx.Param)))
    whole = {"model": nnx.state(net), "optimizer": nnx.state(optimizer)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", whole)
    with open_state(tmp_path / "run") as opened:
        assert opened.params.keys() == {"dense/kernel", "dense/bias", "norm/scale", "norm/bias"}
        assert opened.state.extra["buffers"].keys() >= {"norm.mean", "norm.var", "drop.rngs.key"}
        assert "adamw" in fitting(opened.state) and opened.counts.says_schedule
        unknown = {"weight_decay_rate", "clipvalue", "global_norm_clip_threshold"}
        assert not unknown & opened.groups[0].hyperparameters.keys()
    assert statekit.jax.attest(net, optimizer, tmp_path / "run").findings == ()
    fresh = statekit.jax.attest(net, built()[1], tmp_path / "run")
    assert [finding.name for finding in fresh.findings] == ["optimizer-empty"]
    convert(plan(tmp_path / "run", tmp_path / "again", to="orbax", layout="optax"))
    with ocp.StandardCheckpointer() as checkpointer:
        again = checkpointer.restore(tmp_path / "again" / str(DONE) / "default", whole)
    for ours, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        is_key = jax.numpy.issubdtype(theirs.dtype, jax.dtypes.prng_key)
        assert np.array_equal(ours, jax.random.key_data(theirs) if is_key else theirs)


def test_an_optimizer_without_its_parameters_is_named() -> None:
    import optax

    tree = {"opt_state": tree_of(*run_of(optax.adamw(RATE)))["opt_state"]}
    holds = contents(Checkpoint("orbax", Path("run"), tree, {}))
    assert holds is not None and "(opt_state/0) without its parameters" in holds.what


def test_slots_in_one_vector_are_named() -> None:
    """As optax.flatten makes them. Seen red: "without its parameters", which lay beside them."""
    import optax

    tree = tree_of(*run_of(optax.flatten(optax.adamw(RATE))))
    holds = contents(Checkpoint("orbax", Path("run"), tree, {}))
    assert holds is not None and "(opt_state/0) whose slots are one vector of all parameters" in holds.what


def test_printed_lines_make_a_chain_as_long_as_the_file_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp

    params, state = run_of(optax.adam(RATE))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"params": params, "opt_state": state})
    assert (
        main(["resume", str(tmp_path / "run"), "--optimizer", "adam", "--hparams", f"learning_rate={RATE}"])
        == 0
    )
    lines = capsys.readouterr().out.partition("\n\n")[0]
    scope: dict[str, Any] = {"params": params, "jnp": jnp}
    exec(lines, scope)
    assert int(scope["state"]["opt_state"][0].count) == DONE


def lines_of(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["resume", str(folder), "--hparams", f"learning_rate={RATE}", *options]) == 0
    return capsys.readouterr().out.partition("\n\n")[0]


def test_printed_lines_name_every_optimizer_that_fits_and_wrap_it_as_the_run_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines that the user completes make the state that is in the file, and its next update."""
    import jax
    import jax.numpy as jnp
    import optax
    import orbax.checkpoint as ocp
    from optax import contrib

    def kept(name: str, params: Any, state: Any) -> Path:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / name, {"params": params, "opt_state": state})
        return tmp_path / name

    params, state = run_of(optax.adabelief(RATE))
    lines = lines_of(folder := kept("adabelief", params, state), capsys)
    assert "optimizer = ..." in lines and "optax.adam(" not in lines
    assert all(f"optax.{name}" in lines for name in (*SHORT[:5], "contrib.adopt"))
    assert f"optimizer = optax.adabelief(learning_rate={RATE})" in lines_of(
        folder, capsys, "--optimizer", "adabelief"
    )
    completed = {"reduce_on_plateau(...)": "reduce_on_plateau(factor=0.5, patience=2)"}
    completed |= {
        "conditionally_transform(optimizer, ...)": "conditionally_transform(optimizer, lambda step: True)"
    }
    completed |= {"sam(optimizer, ...)": "sam(optimizer, optax.sgd(0.05), opaque_mode=False)"}
    completed |= {
        "free(optimizer, learning_rate=...)": "free(optimizer, learning_rate=0.01)",
        "optax.adamw(...)": "adamw",
    }
    adamw = optax.adamw(RATE)
    wrapped = {
        "plateau": optax.chain(adamw, contrib.reduce_on_plateau(factor=0.5, patience=2)),
        "conditional": optax.transforms.conditionally_transform(adamw, lambda step: True),
        "sam": contrib.sam(adamw, optax.sgd(0.05), opaque_mode=False),
        "mechanize": contrib.mechanize(adamw),
        "schedule_free": contrib.schedule_free(adamw, learning_rate=0.01),
    }
    for name, tx in wrapped.items():
        params, state = run_of(tx)
        lines = lines_of(kept(name, params, state), capsys)
        assert "# taken for optax.adamw; optax.nadamw" in lines, name
        for unsaid, value in completed.items():
            lines = lines.replace(unsaid, value)
        scope: dict[str, Any] = {"params": params, "jnp": jnp, "adamw": adamw}
        exec(lines, scope)
        due, _ = updated(tx, params, state, DONE, DONE + 1)
        ours, _ = updated(scope["optimizer"], params, scope["state"]["opt_state"], DONE, DONE + 1)
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, due)), name
    params, inner = run_of(adamw)
    spikes = {"inner_state": inner, "losses": jnp.ones(8), "grad_norms": jnp.ones(8)}
    spikes |= {"count": jnp.asarray(DONE, jnp.int32), "is_skipped": jnp.asarray(False)}
    lines = lines_of(kept("spikes", params, spikes), capsys)
    assert "optimizer = skip_step_on_spikes(optimizer, interval=..., scaling_factor=...)" in lines


def test_a_link_that_averages_updates_is_no_average_of_the_run() -> None:
    import optax

    from statekit.state.run import run_of

    momentum = optax.adafactor(RATE, momentum=0.9, min_dim_size_to_factor=4)
    behind = optax.chain(optax.scale_by_adam(), optax.ema(0.9), optax.scale(-RATE))
    for tx in (momentum, behind):
        params, state = drawn(0, 0.3), tx.init(drawn(0, 0.3))
        tree = tree_of(params, state)
        assert run_of(read(tree).extra).parts == ()
        [part] = run_of(read({**tree, "ema": tree["params"]}, meta={MODEL_KEY: "params"}).extra).parts
        assert part.what == "averages"


@pytest.mark.parametrize("wrapped", ["zero_nans", "schedule_free", "MultiSteps"])
def test_of_a_pickled_pair_no_field_of_the_optimizers_state_is_taken_for_the_parameters(
    wrapped: str, tmp_path: Path
) -> None:
    """Seen red: `0` and `1/0/found_nan`, or `1/z`, might both have been the parameters."""
    import jax
    import optax

    tx = {
        "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adamw(0.01)),
        "schedule_free": lambda: optax.contrib.schedule_free_adamw(0.01),
        "MultiSteps": lambda: optax.MultiSteps(optax.adamw(0.01), 4).gradient_transformation(),
    }[wrapped]()
    pair = jax.tree.map(np.asarray, run_of(tx))
    (tmp_path / "run.pkl").write_bytes(pickle.dumps(pair))
    expected = flat(pair[0])
    with open_state(tmp_path / "run.pkl") as opened:
        assert opened.params.keys() == expected.keys()
        assert all(np.array_equal(opened.params[path].read(), value) for path, value in expected.items())


def test_four_links_with_adam_first_are_lambs_or_those_of_another_chain() -> None:
    """Seen red: the headline of such a chain didn't say that it was taken for LAMB."""
    import optax

    links = (optax.scale_by_adam(), optax.clip_by_block_rms(1.0), optax.add_decayed_weights(0.1))
    state = read(tree_of(*run_of(optax.chain(*links, optax.scale_by_learning_rate(0.01)))))
    [fact] = facts(state, OPTIMIZER)
    assert (fact.value, fact.source, fact.others) == ("lamb", "inferred", ("scale_by_adam",))
    assert fact.is_weak
