"""Attesting a live run in Keras: honest resumes pass, and each fault that Keras makes easy is found by its name."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from statekit.attestation.attestation import Attestation
from statekit.errors import StateError, UsageError

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on NumPy 2
    pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning"),  # a fault that is made here
    pytest.mark.filterwarnings("ignore:The saved state of .* isn't loaded:UserWarning"),  # the same, in ours
]
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
from statekit import tensorflow as st

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X[:, :2] * 0.5
falling = keras.optimizers.schedules.PolynomialDecay
KINDS: dict[str, Callable[..., Any]] = {
    "Adam": lambda rate=0.01, **k: keras.optimizers.Adam(rate, use_ema=True, **k),
    "AdamW": lambda rate=0.01, **k: keras.optimizers.AdamW(rate, weight_decay=0.1, amsgrad=True, **k),
    "Lamb": lambda rate=0.01, **k: keras.optimizers.Lamb(rate, gradient_accumulation_steps=2, **k),
    "Adafactor": lambda rate=0.01, **k: keras.optimizers.Adafactor(rate, **k),
    "scheduled": lambda rate=0.01, **k: keras.optimizers.AdamW(falling(rate, 20, rate / 4), **k),
    "ours": lambda rate=0.01, **k: st.AdamW(rate, variant="keras", **k),
    "our Adafactor": lambda rate=0.01, **k: st.Adafactor(falling(rate, 20, rate / 4), factored=False, **k),
}  # fmt: skip
SCHEDULED = ("scheduled", "our Adafactor")


def model(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    inputs = keras.Input((4,), name="inputs")
    frozen = layers.Dense(4, name="frozen", trainable=False)
    x = layers.BatchNormalization(name="norm")(layers.Dense(4, name="first")(frozen(inputs)))
    x = layers.Dropout(0.1, name="drop")(layers.Dense(4, name="second")(x))
    return keras.Model(inputs, layers.Dense(2, name="last")(x), name="net")


def compiled(optimizer: Any, seed: int = 1, *, eager: bool = False) -> Any:
    net = model(seed)
    net.compile(optimizer=optimizer, loss="mse", jit_compile=False, run_eagerly=eager)
    return net


def trained(kind: str, updates: int = 3) -> Any:
    """Returns a model after updates without a graph, whose tracing takes longer than they do."""
    net = compiled(KINDS[kind](), eager=True)
    for _ in range(updates * (net.optimizer.gradient_accumulation_steps or 1)):
        net.train_on_batch(X, Y)
    net.optimizer.build(net.trainable_variables)
    return net


def attested(net: Any, path: Path, **options: Any) -> Attestation:
    return st.attest(net.optimizer, net, path, **options)


def loaded(kind: str, path: Path, **options: Any) -> Any:
    """Resumes as programs do: builds, then loads the weights, which have the optimizer's in them."""
    net = compiled(KINDS[kind](**options), seed=2)
    net.optimizer.build(net.trainable_variables)
    net.load_weights(path)
    return net


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder, made = tmp_path_factory.mktemp("runs"), dict[tuple[str, str], Path]()

    def path_of(kind: str, form: str = "weights.h5") -> Path:
        if (kind, form) not in made:
            net = trained(kind)
            for which in ("weights.h5", "keras"):
                made[kind, which] = folder / f"{kind.replace(' ', '_')}.{which}"
                (net.save_weights if which == "weights.h5" else net.save)(made[kind, which])
        return made[kind, form]

    return path_of


@pytest.mark.parametrize("kind", KINDS)
def test_an_honest_resume_passes(kind: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    weights, whole = saved(kind), saved(kind, "keras")
    again = keras.models.load_model(whole)
    for net, path in ((loaded(kind, weights), weights), (again, whole), (again, weights)):
        result = attested(net, path, strict=True)
        assert (result.updates, result.passed) == (3, True), str(result)
        assert result.tensors >= len(net.weights) + len(net.trainable_variables), str(result)
        assert st.attest(net.optimizer, net.trainable_variables, whole).passed
    begun = trained(kind, 0)
    begun.save(tmp_path / "begun.keras")
    assert attested(compiled(KINDS[kind]()), tmp_path / "begun.keras").passed  # isn't built yet
    again.run_eagerly = True
    again.train_on_batch(X, Y)
    again.train_on_batch(X, Y)
    names = {one.name for one in attested(again, whole).findings}
    assert {"parameter-differs", "slot-differs", "step"} <= names


def test_fit_is_attested_before_its_first_update(saved: Callable[..., Path]) -> None:
    path = saved("AdamW")
    net, callback = loaded("AdamW", path), st.AttestCallback(path)
    net.fit(X, Y, epochs=2, verbose=0, callbacks=[callback])
    assert callback.result is not None
    assert callback.result.passed
    forgot = compiled(KINDS["AdamW"](), seed=2)
    forgot.load_weights(path)  # Keras skips the state of an optimizer that isn't built, and warns
    with pytest.raises(StateError, match="optimizer-empty"):
        forgot.fit(X, Y, verbose=0, callbacks=[st.AttestCallback(path)])
    assert int(forgot.optimizer.iterations) == 0


class Nameless(keras.optimizers.Optimizer):  # type: ignore[name-defined,misc]  # its base is untyped
    def __init__(self) -> None:
        super().__init__(0.1)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        variable.assign_sub(learning_rate * gradient)


def test_an_optimizer_that_cannot_be_copied_is_a_finding(saved: Callable[..., Path]) -> None:
    """Seen red: TypeError of the user's class at the first batch."""
    (finding,) = attested(compiled(Nameless()), saved("AdamW")).findings
    assert "call optimizer.build" in f"{finding.found}"


def slots_of(net: Any) -> list[Any]:
    skipped = ("iteration", "learning_rate")
    return [v for v in net.optimizer.variables if v.name not in skipped and "float" in str(v.dtype)]


def unbuilt(kind: str, path: Path) -> Any:
    net = compiled(KINDS[kind](), seed=2)
    net.load_weights(path)
    return net


def weights_alone(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    net.compile(optimizer=KINDS[kind](), loss="mse")
    net.optimizer.build(net.trainable_variables)
    return net


def count_lost(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    net.optimizer._iterations.assign(0)
    return net


def other_rate(kind: str, path: Path) -> Any:
    if kind in SCHEDULED:
        return loaded(kind, path, rate=0.02)
    net = loaded(kind, path)
    net.optimizer.learning_rate = 0.02
    return net


def zeroed(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    for variable in slots_of(net):
        variable.assign(variable * 0)
    return net


def exchanged(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    alike: dict[tuple[int, ...], list[Any]] = {}
    for variable in slots_of(net):
        alike.setdefault((*variable.shape, "velocity" in variable.path or variable.name == "v"), []).append(
            variable
        )
    for one, other, *_ in (each for each in alike.values() if len(each) > 1):
        value = one.numpy()
        one.assign(other)
        other.assign(value)
    return net


def model_left(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    for variable, new in zip(net.weights, model(2).weights, strict=True):
        variable.assign(new)
    return net


def statistics_left(kind: str, path: Path) -> Any:
    net = loaded(kind, path)
    net.get_layer("norm").moving_mean.assign(np.ones(4, np.float32))
    return net


def changed(of: str, change: Callable[[Any], Any]) -> Callable[[str, Path], Any]:
    """Returns a resume after which the first slot, the weights or the count have changed."""

    def resume(kind: str, path: Path) -> Any:
        net = loaded(kind, path)
        moved = [v for v in slots_of(net) if v.numpy().any() and "accumulator" not in v.path][:1]
        parts = {"slot": moved, "weights": net.trainable_variables[:1], "count": [net.optimizer._iterations]}
        for variable in parts[of]:
            variable.assign(change(variable.numpy()))
        return net

    return resume


def rounded(values: Any) -> Any:
    return np.frombuffer((values.view(np.uint32) & np.uint32(0xFFFF0000)).tobytes(), np.float32).reshape(
        values.shape
    )


CHANGES: dict[str, tuple[Callable[[str, Path], Any], str]] = {
    "count two on": (changed("count", lambda n: n + 2), "step"),
    "slot negated": (changed("slot", lambda x: -x), "slot-differs"),
    "slot doubled": (changed("slot", lambda x: 2 * x), "slot-differs"),
    "slot rounded": (changed("slot", rounded), "slot-differs"),
    "slot not finite": (changed("slot", lambda x: x * np.float32(np.nan)), "slot-differs"),
    "slot one bit apart": (changed("slot", lambda x: np.nextafter(x, np.float32(9))), "slot-differs"),
    "slot reversed": (changed("slot", lambda x: x[::-1]), "slot-differs"),
    "weights rounded": (changed("weights", rounded), "parameter-differs"),
    "weights one bit apart": (
        changed("weights", lambda x: np.nextafter(x, np.float32(9))),
        "parameter-differs",
    ),
    "weights negated": (changed("weights", lambda x: -x), "parameter-differs"),
}


def test_summed_gradients_are_called_so(saved: Callable[..., Path]) -> None:
    net = loaded("Lamb", saved("Lamb"))
    summed = next(v for v in net.optimizer.variables if "accumulator" in v.path)
    summed.assign(summed + 1)
    assert [one.name for one in attested(net, saved("Lamb")).findings] == ["beside-differs"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "AdamW" else pytest.mark.slow) for k in KINDS]
)
def test_a_change_is_found_by_its_name(kind: str, saved: Callable[..., Path]) -> None:
    path = saved(kind)
    named = {
        name: {one.name for one in attested(make(kind, path), path).findings}
        for name, (make, _) in CHANGES.items()
    }
    assert {name: CHANGES[name][1] in each for name, each in named.items()} == dict.fromkeys(CHANGES, True), (
        named
    )


FAULTS: dict[Callable[[str, Path], Any], str] = {
    unbuilt: "optimizer-empty",
    weights_alone: "optimizer-empty",
    count_lost: "step",
    zeroed: "slot-zero",
    exchanged: "slot-of-another-parameter",
    model_left: "parameter-differs",
    statistics_left: "parameter-differs",
    other_rate: "learning-rate",
}
FEW = ("AdamW", "our Adafactor")
CASES = [
    pytest.param(kind, fault, id=f"{kind}-{fault.__name__}", marks=() if kind in FEW else pytest.mark.slow)
    for kind in KINDS
    for fault in FAULTS
]


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_a_fault_is_found_by_its_name(
    kind: str, fault: Callable[[str, Path], Any], saved: Callable[..., Path]
) -> None:
    path = saved(kind)
    result = attested(fault(kind, path), saved(kind, "keras"))
    name = "schedule" if fault is other_rate and kind in SCHEDULED else FAULTS[fault]
    assert name in {one.name for one in result.findings}, str(result)


def test_generators_that_no_file_of_keras_keeps_are_named(saved: Callable[..., Path]) -> None:
    path = saved("AdamW", "keras")
    result = attested(keras.models.load_model(path), path, generators=True, strict=True)
    assert [line for line in result.unchecked if line.startswith("random: ")] == [
        "random: the seed generator of drop: Keras keeps it in no file",
        "random: generators that are no layer's: no file of Keras keeps them",
    ]


def test_an_optimizer_of_another_model_and_a_model_given_in_part(saved: Callable[..., Path]) -> None:
    path = saved("AdamW")
    net, other = loaded("AdamW", path), loaded("AdamW", path)
    result = st.attest(other.optimizer, net, path)
    assert "optimizer-elsewhere" in {one.name for one in result.findings}, str(result)
    part = st.attest(net.optimizer, net.trainable_variables, path)
    assert part.passed
    assert "the params/frozen/kernel: the checkpoint has it, and none was given" in part.unchecked
    result = st.attest(net.optimizer, net, saved("AdamW", "keras"), sample=2, seed=1)
    assert result == st.attest(net.optimizer, net, saved("AdamW", "keras"), sample=2, seed=1)
    assert result.tensors < 10


def test_a_resume_from_pytorch_passes_and_one_with_the_wrong_rate_does_not(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    parts = {"first": torch.nn.Linear(4, 4), "last": torch.nn.Linear(4, 2)}
    net = torch.nn.ModuleDict({"net": torch.nn.Sequential(OrderedDict(parts))})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net["net"](torch.ones(3, 4)).sum().backward()
        optimizer.step()
    path = tmp_path / "run.pt"
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    layers = [keras.Input((4,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(2, name="last")]
    here = keras.Sequential(layers, name="net")
    options: dict[str, Any] = {
        "map": "torch:keras",
        "param_names": [name for name, _ in net.named_parameters()],
    }
    st.load_params(path, here, **options)
    resumed = st.load_optimizer(path, here, **options)
    result = st.attest(resumed, here, path, **options)
    assert result.passed, str(result)
    assert result.tensors == 12
    resumed.learning_rate = 0.011
    assert [one.name for one in st.attest(resumed, here, path, **options).findings] == ["learning-rate"]
    fresh = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    fresh.build(here.trainable_variables)
    assert "optimizer-empty" in {one.name for one in st.attest(fresh, here, path, **options).findings}


def fitted(net: Any) -> None:
    net.fit(X, Y, batch_size=8, verbose=0)


def by_hand(net: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(X, training=True) - Y) ** 2)
    pairs = zip(tape.gradient(loss, net.trainable_variables), net.trainable_variables, strict=True)
    net.optimizer.apply_gradients(pairs)


def on_a_batch(net: Any) -> None:
    net.train_on_batch(X, Y)


def stepped(net: Any, path: Path, update: Callable[[Any], object] = fitted, **options: Any) -> Attestation:
    with st.attested_step(net.optimizer, net, path, **options) as step:
        update(net)
    assert step.result is not None
    return step.result


STEPPED = ("scheduled", "Lamb")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in STEPPED else pytest.mark.slow) for k in KINDS]
)
def test_an_honest_update_passes(kind: str, saved: Callable[..., Path]) -> None:
    net = loaded(kind, saved(kind))
    result = stepped(net, saved(kind, "keras"), strict=True)
    assert (result.updates, result.stepped) == (3, 8), str(result)
    assert not [one for one in result.unchecked if "update" in one], str(result)
    assert "apply" not in vars(net.optimizer)


def test_so_does_one_by_hand(saved: Callable[..., Path]) -> None:
    for update in (by_hand, tf.function(by_hand)):
        assert stepped(loaded("AdamW", saved("AdamW")), saved("AdamW"), update, strict=True).stepped == 8


OTHERWISE = ("clipped", "compiled", "begun", "scaled")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "scaled" else pytest.mark.slow) for k in OTHERWISE]
)
def test_so_does_one_that_is(kind: str, tmp_path: Path) -> None:
    inner = keras.optimizers.Adam(0.01, global_clipnorm=0.01 if kind == "clipped" else None)
    net, path = compiled(inner), tmp_path / "run.keras"
    if kind == "begun":
        inner.build(net.trainable_variables)
    else:
        net.train_on_batch(X, Y)
    net.save(path)
    live = {"begun": keras.optimizers.Adam(0.01), "scaled": keras.optimizers.LossScaleOptimizer(inner)}
    net.compile(live.get(kind, inner), "mse", jit_compile=kind == "compiled")
    assert stepped(net, path, on_a_batch, strict=True).stepped == 8


def patched(optimizer: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    object.__setattr__(optimizer, name, change(getattr(optimizer, name)))


def rate_of_the_constructor(optimizer: Any) -> None:
    patched(optimizer, "_backend_update_step", lambda update: lambda g, v, rate: update(g, v, rate * 1.01))


def gradients_changed(optimizer: Any) -> None:
    patched(
        optimizer,
        "_backend_update_step",
        lambda update: lambda g, v, rate: update([x * 2 for x in g], v, rate),
    )


def state_elsewhere(optimizer: Any) -> None:
    def change(update: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> None:
            for variable in (v for v in optimizer.variables if "velocity" in v.path):
                variable.assign(variable * 0)
            update(*args)

        return moved

    patched(optimizer, "_backend_update_step", change)


def powers_cached(optimizer: Any) -> None:
    def change(update: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> None:
            count = optimizer._iterations
            object.__setattr__(optimizer, "_iterations", tf.zeros((), tf.int64))
            update(*args)
            object.__setattr__(optimizer, "_iterations", count)

        return moved

    patched(optimizer, "_backend_update_step", change)


def epsilon_moved(optimizer: Any) -> None:
    def change(update: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> None:
            kept, optimizer.epsilon = optimizer.epsilon, 1e-3
            update(*args)
            optimizer.epsilon = kept

        return moved

    patched(optimizer, "_backend_update_step", change)


def count_left(optimizer: Any) -> None:
    def change(update: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any) -> None:
            update(*args)
            optimizer._iterations.assign_sub(1)

        return moved

    patched(optimizer, "_backend_update_step", change)


HIDDEN = (
    rate_of_the_constructor, gradients_changed, state_elsewhere, powers_cached, epsilon_moved, count_left
)  # fmt: skip


SEEN = (powers_cached, count_left)


@pytest.mark.parametrize(
    "hide",
    [pytest.param(one, id=one.__name__, marks=() if one in SEEN else pytest.mark.slow) for one in HIDDEN],
)
def test_what_the_state_does_not_show_the_update_does(
    hide: Callable[[Any], None], saved: Callable[..., Path]
) -> None:
    net = loaded("AdamW", saved("AdamW"))
    hide(net.optimizer)
    result = stepped(net, saved("AdamW"), on_a_batch)
    name = "step" if hide is count_left else "update-differs"
    assert [one.name for one in result.findings] == [name], str(result)


def test_updates_that_cannot_be_looked_at_are_refused(saved: Callable[..., Path]) -> None:
    net = loaded("AdamW", saved("AdamW"))
    with pytest.raises(UsageError, match="without an update"):
        stepped(net, saved("AdamW"), lambda net: None)
    net.compile(net.optimizer, "mse", steps_per_execution=2)
    with pytest.raises(UsageError, match="Several updates"):
        stepped(net, saved("AdamW"))
