"""A run with an optimizer for each group is a state: Optax' own files, there and back, and going on."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import pytest
from several_driving import ALL, LABELS, SAVED, SHAPES, WRAPPERS, Run, flat, nested, saved

import statekit
from formats import save, values
from statekit.arrays.backend import backend
from statekit.conversion.convert import convert, plan
from statekit.conversion.open_state import open_state
from statekit.conversion.resume import of_plan, resume_lines
from statekit.errors import StateError, UsageError
from statekit.optim.run import initial, load, mover, store
from statekit.state.train_state import Optimizer
from statekit.tensors.tree import tensor_names, to_json

pytestmark = pytest.mark.jax
BIG, SMALL = ("emb/kernel", "head/kernel"), ("norm/bias", "norm/scale")


@cache
def run(wrapper: str = "bare") -> Run:
    return Run(wrapper)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what saves a run once: (wrapper, container) -> its checkpoint."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def file(wrapper: str, container: str) -> Path:
        return run(wrapper).save(folder / f"{wrapper}-{container}", container)

    return lambda wrapper="bare", container="orbax": file(wrapper, container)


def same_leaves(left: Any, right: Any) -> None:
    import jax

    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("container", ["orbax", "flax"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_group_is_of_its_own_optimizer(wrapper: str, container: str, files: Any) -> None:
    with open_state(files(wrapper, container)) as opened:
        state = opened.state
        assert state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))
        by_schema = {group.schema: {*group.paths} for group in state.optimizer.groups}
        assert by_schema == {"adafactor": {*BIG}, "adamw": {*SMALL}}
        assert state.counts.updates == SAVED
        slot_names = {path: {*tensors} for path, tensors in state.slots.items()}
        assert slot_names == {
            "emb/kernel": {"v_row", "v_col", "m"},
            "head/kernel": {"v", "m"},
            "norm/bias": {"m", "v"},
            "norm/scale": {"m", "v"},
        }
        if wrapper == "injected":
            decay = state.optimizer.groups[1]
            assert decay.schema == "adamw" and decay.known_from["weight_decay_rate"] == "file"
            assert decay.hyperparameters["weight_decay_rate"] == pytest.approx(0.1)


@pytest.mark.parametrize("container", ["orbax", "flax"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_it_comes_back_from_the_neutral_folder_bit_for_bit(
    wrapper: str, container: str, files: Any, tmp_path: Path
) -> None:
    source = files(wrapper, container)
    convert(plan(source, tmp_path / "neutral", to="statekit"))
    convert(plan(tmp_path / "neutral", tmp_path / "back", to=container))
    with open_state(source) as before, open_state(tmp_path / "back") as after:
        assert values(before.tensors) == values(after.tensors)
        assert values(tensor_names(before.checkpoint.tree)) == values(tensor_names(after.checkpoint.tree))
        assert json.dumps(to_json(before.state.to_json())) == json.dumps(to_json(after.state.to_json()))


def gone_on(source: Path, target: Path, container: str, **fills: str) -> dict[str, Any]:
    """Converts to Optax, runs the printed lines on blank parameters, and returns what these define."""
    import jax

    planned = plan(source, target, to=container, layout="optax")
    convert(planned)
    lines = "\n".join(resume_lines(of_plan(planned), planned.state))
    for left, right in fills.items():
        head, _, tail = left.partition("__")
        place = lines.index(f"optax.{head}(")
        lines = lines[:place] + lines[place:].replace(f"{tail}=...", f"{tail}={right}", 1)
    names: dict[str, Any] = {"params": jax.tree.map(lambda leaf: 0 * leaf, run().saved[0])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Orbax says that shardings aren't given
        exec(compile(lines, "to go on", "exec"), names)
    return names


FILLS = {
    "adafactor__learning_rate": "0.01",
    "adafactor__momentum": "0.9",
    "adamw__learning_rate": "0.001",
}


@pytest.mark.parametrize("container", ["orbax", "flax"])
@pytest.mark.parametrize("own_labels", [True, False])
def test_optax_goes_on_from_the_printed_lines_and_saves_again(
    own_labels: bool, container: str, files: Any, tmp_path: Path
) -> None:
    """Under the run's own labels, and, where nothing of its tree is left, under the numbers of the groups."""
    convert(plan(files(), tmp_path / "neutral", to="statekit", hints=hints("adamw/weight_decay=0.1")))
    source = tmp_path / "neutral"
    if not own_labels:
        with open_state(source) as opened:
            known = {"adafactor": 1e-2, "adamw": 1e-3}
            groups = tuple(
                replace(
                    group,
                    hyperparameters={**group.hyperparameters, "learning_rate": known[str(group.schema)]},
                    known_from={**group.known_from, "learning_rate": "given"},
                )
                for group in opened.state.optimizer.groups
            )
            optimizer = replace(opened.state.optimizer, groups=groups)
            source = save(replace(opened.state, extra={}, optimizer=optimizer), tmp_path / "bare")
    names = gone_on(source, tmp_path / "out", container, **FILLS)
    labels = {"big", "small", "fixed"} if own_labels else {"0", "1", "frozen"}
    assert names["state"]["opt_state"].inner_states.keys() == labels
    params, state = names["state"]["params"], names["state"]["opt_state"]
    same_leaves(params, run().saved[0])
    moved, kept = run().gone(params, state, SAVED, ALL, names["optimizer"])
    assert {path: leaf.tobytes() for path, leaf in flat(moved).items()} == {
        path: leaf.tobytes() for path, leaf in flat(run().ended[0]).items()
    }
    with open_state(saved(tmp_path / "again", container, moved, kept)) as opened:
        assert opened.counts.updates == ALL
        assert opened.state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))
        after = {path: tensor.read().tobytes() for path, tensor in opened.params.items()}
        assert after == {path: leaf.tobytes() for path, leaf in flat(run().ended[0]).items()}


def test_the_control_with_exchanged_schemas_is_refused(files: Any) -> None:
    with open_state(files()) as opened:
        state = opened.state
        kinds = [state.optimizer.kind(group) for group in state.optimizer.groups]
        with pytest.raises(StateError, match="v_row, which adamw doesn't know") as caught:
            replace(state, optimizer=Optimizer.of(state.optimizer.groups, kinds[::-1]))
        assert "emb/kernel" in str(caught.value)


def test_slots_of_a_parameter_in_no_group_are_refused(files: Any) -> None:
    with open_state(files()) as opened:
        state = opened.state
        first, second = state.optimizer.groups
        groups = (replace(first, paths=first.paths[:1]), second)
        with pytest.raises(StateError, match="no group says of which optimizer @ head/kernel"):
            replace(state, optimizer=replace(state.optimizer, groups=groups))


def hints(*hparams: str, variant: str | None = None) -> Any:
    from statekit.conversion.contracts import Hints
    from statekit.converters.formats.hparams import read_hparams

    return Hints(read_hparams(hparams).values, variant)


def test_what_is_said_reaches_the_optimizer_that_is_meant(files: Any) -> None:
    said = hints("decay_rate=0.7", "adamw/weight_decay_rate=0.2", "adafactor/beta1=0.9", "b2=0.98")
    with open_state(files(), hints=said) as opened:
        adafactor, adamw = (group.hyperparameters for group in opened.groups)
    assert (adafactor["decay_rate"], adafactor["beta1"], adafactor["weight_decay_rate"]) == (0.7, 0.9, None)
    assert (adamw["weight_decay_rate"], adamw["beta2"], adamw["beta1"]) == (0.2, 0.98, 0.9)


@pytest.mark.parametrize(
    ("hparams", "variant", "error"),
    [
        (("weight_decay_rate=0.2",), None, "adafactor or adamw @ weight_decay_rate"),
        (("lamb/b1=0.2",), None, "none @ lamb/b1"),
        (("nonsense=0.2",), None, "none @ nonsense"),
        ((), "optax", "adafactor or adamw @ optax"),
        ((), "lamb/optax", "none @ optax"),
        ((), "adafactor/hf,adamw/optax", "speaks against the variant hf"),
        ((), "adafactor/optax,adamw/optax,adamw/torch", "has one variant, but several are given"),
        ((), "optax,torch", "has one variant, but several are given"),
    ],
)
def test_what_may_be_said_of_several_is_asked(
    hparams: tuple[str, ...], variant: str | None, error: str, files: Any
) -> None:
    with pytest.raises(UsageError, match=error):
        open_state(files(), hints=hints(*hparams, variant=variant))


def test_variants_are_said_of_each_optimizer(files: Any) -> None:
    with open_state(files(), hints=hints(variant="adamw/optax, adafactor/optax")) as opened:
        assert opened.state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))


def test_a_target_of_one_optimizer_refuses_both(files: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="adafactor and adamw in one run") as caught:
        plan(files(), tmp_path / "out", to="t5x")
    assert "statekit, statekit-jax" in str(caught.value)


@pytest.mark.parametrize("which", ["lion", "trace"])
def test_a_part_without_a_schema_is_named_and_its_parameters_are_not_frozen(
    which: str, tmp_path: Path
) -> None:
    """They were taken for frozen, without a word about their slots."""
    import optax

    small = {path: np.ones(shape, np.float32) for path, shape in SHAPES.items()}
    params = nested(small)
    rules = {"big": getattr(optax, which, optax.sgd)(0.1), "small": optax.adamw(0.1)}
    traced = {"trace": optax.sgd(0.1, momentum=0.9)}
    optimizer = optax.partition(
        {**rules, "big": traced.get(which, rules["big"]), "fixed": optax.set_to_zero()}, nested(LABELS)
    )
    file = saved(tmp_path / "run", "orbax", params, optimizer.init(params))
    name = {"lion": "Lion", "trace": "SGD with momentum"}[which]
    with open_state(file) as opened:
        [(schema, variant)] = opened.state.optimizer.kinds
        assert schema == "optax_native" and variant == f"{name} and AdamW or its like"
        assert {*opened.slots["emb/kernel"]} == ({"trace"} if which == "trace" else {"mu"})
        assert {*opened.slots["norm/scale"]} == {"mu", "nu"}
        assert {"emb/kernel", "head/kernel", "norm/scale"} <= {*opened.groups[0].paths}


def masked(first: Any, second: Any) -> Any:
    """Returns a chain in which each of two optimizers moves its own part, and nothing moves the rest."""
    import optax

    def mask(*labels: str) -> Any:
        return nested({path: label in labels for path, label in LABELS.items()})

    return optax.chain(optax.masked(first, mask("big")), optax.masked(second, mask("small", "fixed")))


def test_a_chain_of_masked_optimizers_is_told_apart_too(tmp_path: Path) -> None:
    import optax

    params = run().saved[0]
    pair = masked(optax.adafactor(0.1), optax.adamw(0.1))
    with open_state(saved(tmp_path / "run", "orbax", params, pair.init(params))) as opened:
        assert opened.state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))
        assert opened.groups[0].paths == BIG
    pair = masked(optax.lion(0.1), optax.adamw(0.1))
    file = saved(tmp_path / "lion", "orbax", params, pair.init(params))
    with open_state(file) as opened:
        assert opened.state.optimizer.kinds == (("optax_native", "Lion and AdamW or its like"),)
        assert {*BIG} < {*opened.groups[0].paths}


def test_what_is_missing_is_asked_of_each_optimizer(files: Any) -> None:
    from statekit.conversion.resume import of_checkpoint

    with open_state(files()) as opened:
        place, state = of_checkpoint(opened), to_json(opened.state.to_json())
        for framework, rate in (("torch", "lr"), ("jax", "learning_rate"), ("tensorflow", "learning_rate")):
            line = resume_lines(place, state, framework)[-1]
            asked = '{"adafactor": ..., "adamw": ...}, hparams={"adafactor/beta1": ...}'
            assert line.endswith(f", {rate}={asked})")


@pytest.mark.parametrize("where", ["optax", "neutral"])
def test_a_drop_in_of_jax_goes_on_as_optax_does(where: str, files: Any, tmp_path: Path) -> None:
    import jax

    from statekit.jax import load_optimizer

    source = files()
    if where == "neutral":
        convert(plan(source, tmp_path / "neutral", to="statekit"))
        source = tmp_path / "neutral"
    optimizer, state = load_optimizer(
        source,
        run().saved[0],
        learning_rate={"adafactor": 1e-2, "adamw": lambda count: 1e-3},
        hparams={"adafactor/beta1": 0.9, "adamw/weight_decay": 0.1},
    )
    moved, kept = run().gone(run().saved[0], state, SAVED, ALL, optimizer)
    near(flat(moved))
    tree = {"params": moved, "opt_state": kept}
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((tmp_path / "again").absolute(), tree)
    with open_state(tmp_path / "again", hints=hints(variant="adafactor/optax,adamw/optax")) as opened:
        assert (opened.layout, opened.counts.updates) == ("statekit-jax", ALL)
        assert {group.schema for group in opened.groups} == {"adafactor", "adamw"}
    assert jax.tree.structure(kept) == jax.tree.structure(state)


def near(moved: Any) -> None:
    """Asserts that parameters are those of the run going on, within the rounding of three updates."""
    for path, start in flat(run().saved[0]).items():
        theirs, ours = flat(run().ended[0])[path], moved[path]
        # each update rounds parameter and step a few times; what moves is bounded by lr * (1 + decay)
        bound = (ALL - SAVED) * 16 * np.finfo(np.float32).eps * max(1e-3, float(abs(start).max()))
        assert float(abs(ours - theirs).max()) <= bound, path
        assert (path == "still") == np.array_equal(start, ours)


def test_the_text_of_the_updates_moves_each_group_by_its_own(files: Any) -> None:
    """What replay steps with, in NumPy: `mover` of a state with several optimizers."""
    xp = backend("numpy")
    with open_state(files(), hints=hints("adafactor/beta1=0.9", "adamw/weight_decay=0.1")) as opened:
        state, live = opened.state, load(xp, opened.state)
    move, moved = mover(xp, state), {*BIG, *SMALL}
    for grads in run().grads[SAVED:ALL]:
        live = move(live, {path: xp.asarray(grads[path]) for path in moved}, (1e-2, 1e-3))
    near({path: xp.numpy(value) for path, value in live.params.items()})
    after = store(xp, live, state)
    assert after.optimizer.kinds == state.optimizer.kinds and after.counts.updates == ALL
    fresh = initial(replace(state, slots={}))
    assert {path: {*tensors} for path, tensors in fresh.slots.items()} == {
        path: {*tensors} for path, tensors in state.slots.items()
    }


@pytest.mark.torch
@pytest.mark.parametrize("foreach", [True, False])
def test_a_drop_in_of_torch_goes_on_as_optax_does(foreach: bool, files: Any, tmp_path: Path) -> None:
    import torch

    import statekit.torch as st

    names = {path.replace("/", "."): path for path in SHAPES}
    saved_params = flat(run().saved[0])
    params = {name: torch.nn.Parameter(torch.from_numpy(saved_params[p].copy())) for name, p in names.items()}
    hparams = {"adafactor/beta1": 0.9, "adamw/weight_decay": 0.1}
    optimizer = st.load_optimizer(
        files(), params.items(), lr={"adafactor": 1e-2, "adamw": 1e-3}, hparams=hparams
    )
    assert isinstance(optimizer, st.Partition)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    step(optimizer, params, names, SAVED, ALL - 1)
    state = copy.deepcopy(optimizer).state_dict()
    torch.save({"model": {n: p.data for n, p in params.items()}, "optimizer": state}, tmp_path / "run.pt")
    again = st.load_optimizer(tmp_path / "run.pt", params.items())
    assert isinstance(again, st.Partition)
    step(again, params, names, ALL - 1, ALL)
    near({names[name]: param.detach().numpy() for name, param in params.items()})
    with open_state(tmp_path / "run.pt") as opened:
        assert opened.state.optimizer.kinds == (("adafactor", "optax"), ("adamw", "optax"))


def step(optimizer: Any, params: Any, names: Any, first: int, last: int) -> None:
    import torch

    for grads in run().grads[first:last]:
        for name, param in params.items():
            param.grad = torch.from_numpy(grads[names[name]].copy())
        optimizer.step()


@pytest.mark.torch
def test_exchanged_schemas_go_on_otherwise(files: Any) -> None:
    """The control: the same slots of momentum and second moment under the other rule aren't the run any more."""
    import torch

    import statekit.torch as st

    names = {path.replace("/", "."): path for path in SHAPES}
    params = {
        n: torch.nn.Parameter(torch.from_numpy(flat(run().saved[0])[p].copy())) for n, p in names.items()
    }
    hparams = {"adafactor/beta1": 0.9, "adamw/weight_decay": 0.1}
    optimizer = st.load_optimizer(
        files(), params.items(), lr={"adafactor": 1e-3, "adamw": 1e-2}, hparams=hparams
    )
    step(optimizer, params, names, SAVED, ALL)
    with pytest.raises(AssertionError):
        near({names[name]: param.detach().numpy() for name, param in params.items()})
    state = optimizer.state_dict()
    kinds = [(group["schema"], group["variant"]) for group in state["param_groups"]]
    for group, (schema, variant) in zip(state["param_groups"], kinds[::-1], strict=True):
        group["schema"], group["variant"] = schema, variant
    with pytest.raises(StateError, match="is of adamw, the optimizer of adafactor"):
        optimizer.load_state_dict(state)


@pytest.mark.tensorflow
def test_one_optimizer_of_keras_moves_each_group_as_optax_does_and_is_saved(
    files: Any, tmp_path: Path
) -> None:
    keras = pytest.importorskip("keras")
    from statekit.tensorflow import load_optimizer

    start = flat(run().saved[0])
    variables = {p: keras.Variable(v, name=p.replace("/", "-")) for p, v in start.items() if p != "still"}
    options: Any = {"hparams": {"adafactor/beta1": 0.9, "adamw/weight_decay": 0.1}}
    rates = {"adafactor": 1e-2, "adamw": 1e-3}
    with pytest.raises(UsageError, match="a number for each optimizer"):
        load_optimizer(files(), variables, {**rates, "adamw": lambda: 1e-3}, **options)
    optimizer = load_optimizer(files(), variables, rates, **options)
    again = type(optimizer).from_config(optimizer.get_config())
    for grads in run().grads[SAVED:ALL]:
        optimizer.apply([grads[path] for path in variables], [*variables.values()])
    near({**start, **{path: variable.numpy() for path, variable in variables.items()}})
    again.build([*variables.values()])
    assert again.get_config() == optimizer.get_config()
    assert {path: [*slots] for path, slots in again.slots().items()} == {
        path: [*slots] for path, slots in optimizer.slots().items()
    }
    statekit.convert(files(), tmp_path / "run.weights.h5", layout="statekit-keras", **options)
    with open_state(tmp_path / "run.weights.h5") as opened, open_state(files(), hints=hints()) as source:
        assert opened.state.optimizer.kinds == source.state.optimizer.kinds
        for path, slots in source.state.slots.items():
            for name, tensor in slots.items():
                assert np.array_equal(opened.state.slots[path][name].read(), tensor.read())


@pytest.mark.parametrize(
    ("to", "layout"),
    [
        ("torch", "statekit-torch"),
        ("dcp", "statekit-torch"),
        ("orbax", "statekit-jax"),
        ("flax", "statekit-jax"),
    ],
)
def test_our_own_checkpoints_hold_it(to: str, layout: str, files: Any, tmp_path: Path) -> None:
    source = files()
    convert(plan(source, tmp_path / "out", to=to, layout=layout))
    convert(plan(tmp_path / "out", tmp_path / "back", to="statekit"))
    with (
        open_state(source) as before,
        open_state(tmp_path / "out") as there,
        open_state(tmp_path / "back") as back,
    ):
        assert there.layout == layout
        for after in (there, back):
            assert values(after.params) == values(before.params)
            assert {p: values(slots) for p, slots in after.slots.items()} == {
                p: values(slots) for p, slots in before.slots.items()
            }
            assert after.state.optimizer.kinds == before.state.optimizer.kinds
            for ours, theirs in zip(after.groups, before.groups, strict=True):
                assert (ours.schema, ours.paths) == (theirs.schema, theirs.paths)
                assert ours.hyperparameters == theirs.hyperparameters


def test_the_printed_lines_of_statekit_jax_go_on(files: Any, tmp_path: Path) -> None:
    import jax

    planned = plan(files(), tmp_path / "out", to="orbax", layout="statekit-jax")
    convert(planned)
    lines = "\n".join(resume_lines(of_plan(planned), planned.state))
    assert 'rules["0"] = statekit.jax.adafactor(' in lines and 'rules["1"] = statekit.jax.adamw(' in lines
    lines = lines.replace("beta1=...", "beta1=0.9").replace("learning_rate=...", "learning_rate=0.01", 1)
    lines = lines.replace("learning_rate=...", "learning_rate=0.001, weight_decay=0.1", 1)
    names: dict[str, Any] = {"params": jax.tree.map(lambda leaf: 0 * leaf, run().saved[0])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(lines, "to go on", "exec"), names)
    restored = names["state"]
    near(flat(run().gone(restored["params"], restored["opt_state"], SAVED, ALL, names["optimizer"])[0]))


BEFORE = """
import sys
import torch

sys.path.insert(0, {tests!r})
from several_driving import ALL, SAVED, SHAPES, Run

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for path, shape in SHAPES.items():
            *above, last = path.split("/")
            module = self
            for name in above:
                if not hasattr(module, name):
                    setattr(module, name, torch.nn.Module())
                module = getattr(module, name)
            setattr(module, last, torch.nn.Parameter(torch.zeros(shape)))

model = Net()
"""
AFTER = """
def update(model, optimizer, first, last):
    named = dict(model.named_parameters())
    for grads in Run().grads[first:last]:
        for path in SHAPES:
            named[path.replace("/", ".")].grad = torch.from_numpy(grads[path].copy())
        optimizer.step()

update(model, optimizer, SAVED, ALL - 1)
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, {again!r})
model = Net()
statekit.torch.load_params({again!r}, model)
optimizer = statekit.torch.load_optimizer({again!r}, model.named_parameters())
update(model, optimizer, ALL - 1, ALL)
torch.save({{name.replace(".", "/"): one.data for name, one in model.named_parameters()}}, {end!r})
"""


@pytest.mark.torch
@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_the_printed_lines_of_statekit_torch_go_on_as_optax_does_and_through_a_save(
    to: str, files: Any, tmp_path: Path
) -> None:
    """As they are printed, in a program of its own."""
    import torch

    said = ("adafactor/learning_rate=0.01", "adafactor/beta1=0.9", "adamw/learning_rate=0.001")
    planned = plan(
        files(),
        tmp_path / "out",
        to=to,
        layout="statekit-torch",
        hints=hints(*said, "adamw/weight_decay=0.1"),
    )
    report = convert(planned)
    lines = resume_lines(of_plan(planned, report.files), planned.state)
    assert not any("..." in line for line in lines)
    places = {name: str(tmp_path / f"{name}.pt") for name in ("again", "end")}
    before = BEFORE.format(tests=str(Path(__file__).parent))
    program = tmp_path / "program.py"
    program.write_text("\n".join([before, *lines, AFTER.format(**places)]))
    done = drivers.run(program, imports=["torch", "optax", "statekit.torch"])
    assert done.returncode == 0, done.stderr[-3000:]
    near({path: value.numpy() for path, value in torch.load(places["end"]).items()})
