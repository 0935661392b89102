"""Layout `maxtext`: the tree in which MaxText keeps a run, and finds it again.

    params/params/...              parameters, in names of Flax
    opt_state/0/{count, mu, nu}    opt_type=adamw: Adam, weight decay (None), the count of the rate's schedule
    opt_state/{count, mu, nu}      opt_type=adam_pax, whose moments are corrected
    opt_state/inner_states/{adam, muon}/inner_state    opt_type=muon, whose moments have no `params` above their names
    step                           updates done
    nnx_aux/...                    streams of random numbers; MaxText makes those anew that a checkpoint lacks

The item's name is `items`, and the folder's number is that of the update that was finished last, from 0 on.
Source: AI-Hypercomputer/maxtext 0.2.5 common/checkpointing.py, `load_state_if_possible`, `maybe_save_checkpoint`;
common/train_state_nnx.py, `to_checkpoint_dict`; optimizers/optimizers.py, `get_optimizer`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import Contents, Encoded, Evidence, dropped_from
from statekit.converters.layouts.hyperparameters import require_optimizer
from statekit.converters.layouts.optax.layout import Optax
from statekit.converters.layouts.optax.links import links
from statekit.converters.layouts.optax.maxtext_lines import maxtext_lines
from statekit.converters.layouts.optax.skeleton import names_of_others, own_form
from statekit.errors import Faults, InexactError
from statekit.files.checkpoint import Checkpoint, Finding
from statekit.lines.printing import SavedRun, State
from statekit.state.evidence import Fact
from statekit.state.hyperparameters import IS_EXCLUDED
from statekit.state.schedules.called import KEY as CALLED
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, Group, Rule, TrainState
from statekit.tensors.tensor import in_memory, scalar
from statekit.tensors.tree import Tree, at

ADAMW, PAX = "maxtext", "maxtext_pax"
_OPTAX = Optax(usual=ADAMW, makes=("adamw", "adam_pax", "scale_by_adam"))
_ITEM = "items"
_NAMES = {"adamw": "adamw", "adam_pax": "adam_pax"}
"""opt_type -> the optimizer."""
_CLIP, _THRESHOLD, _USUAL_CLIP = "global_norm_clip_threshold", "gradient_clipping_threshold", 1.0
_MUON = Optax(assumes={
    "adamw": {"beta2": 0.95, "weight_decay_rate": 0.1, _CLIP: _USUAL_CLIP}, "muon": {_CLIP: _USUAL_CLIP},
})  # fmt: skip
"""A run with opt_type=muon: Optax' Muon, and its Adam for the rest, with the defaults of MaxText's base.yml."""
_OF_MUON = {
    **{f"muon_{name}": (f"muon/{name}",) for name in ("beta", "weight_decay", "consistent_rms")},
    **{f"adam_{name}": (f"adamw/{name}",) for name in ("b1", "b2", "eps_root", "weight_decay")},
    **{name: (f"adamw/{short}", f"muon/{short}") for name, short in (
        ("learning_rate", "learning_rate"), ("adam_eps", "eps"), ("mu_dtype", "mu_dtype"), (_CLIP, _CLIP))},
}  # fmt: skip
"""MaxText's option -> what it means of the optimizers in a run with opt_type=muon."""
_OPTIONS = (
    *("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask", "mu_dtype"),
    *("muon_beta", "muon_weight_decay", "muon_consistent_rms", _THRESHOLD),
)
"""What of MaxText's configuration the optimizer's updates depend on; the rate follows its schedule."""
_ATTENTION = {
    **dict.fromkeys(("query", "key", "value"), (Axis.COLUMN, Axis.ROW, Axis.ROW)),
    "out": (Axis.COLUMN, Axis.COLUMN, Axis.ROW),
}
_MOMENTS = ("mu", "nu")
_DENSE = (Axis.COLUMN, Axis.ROW)
"""The axes of a kernel without that of layers, which is the second: inputs (COLUMN) and outputs (ROW) of Muon's matrix.

Source: AI-Hypercomputer/maxtext 0.2.5 utils/muon_utils.py, `transform_logic`.
"""
_OF_ADAM = ("nesterov", "amsgrad", "clipvalue", "clipnorm")
"""What Optax' Adam can do; MaxText's adamw has none of it, and the Adam beside its Muon the first."""
_STRANGE = (
    "MaxText finds parameters below params/ alone, and these have other names: a map makes them MaxText's."
)
_BY_MASK = ("weight_decay_rate", "exclude_from_weight_decay")
"""What may differ between groups: MaxText keeps parameters from decay by their names (`adamw_mask`)."""


@dataclass(frozen=True)
class MaxText:
    """A run of MaxText with adamw, adam_pax or muon."""

    name: str = "maxtext"
    title: str = "MaxText: params/params, opt_state, step and nnx_aux in the item `items`"
    variants: Mapping[str, tuple[str, ...]] = field(
        default_factory=lambda: {"adamw": (ADAMW, PAX, _OPTAX.name), "muon": (_OPTAX.name,)}
    )
    containers: tuple[str, ...] = ("orbax",)
    holds_several: bool = True
    schedule_in: str = "apart"
    only_if_asked: bool = True

    def detect(self, checkpoint: Checkpoint) -> Evidence | None:
        """Looks for MaxText's network below `params/params`, beside a step and an optimizer that Optax has."""
        network = at(checkpoint.tree, ("params", "params"))
        whole = (
            isinstance(checkpoint.tree, Mapping) and {"params", "opt_state", "step"} <= checkpoint.tree.keys()
        )
        if (
            not whole
            or not isinstance(network, Mapping)
            or not {"decoder", "token_embedder"} <= network.keys()
        ):
            return None
        if _OPTAX.detect(checkpoint) is None:
            return None
        return Evidence(25, "params/params has token_embedder and decoder beside step, as MaxText keeps them")

    def describe(self, checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
        """Leaves other optimizers to Optax."""
        return None

    def decode(self, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
        """Returns the canonical state; hyperparameters that are not given are those of MaxText's base.yml."""
        config, named, from_file = _settings(checkpoint, hints)
        hints = replace(hints, optimizer=hints.optimizer or _NAMES.get(str(config.get("opt_type"))))
        layout = _OPTAX
        if any(link.kind == "muon" for link in links(checkpoint.tree)):
            layout = _MUON
            named = {meant: value for name, value in named.items() for meant in _OF_MUON.get(name, (name,))}
        if _is_wrapped(at(checkpoint.tree, ("opt_state",))):
            checkpoint = replace(checkpoint, tree=_below_params(checkpoint.tree))
        state = _numbered(_clipped(layout.decode(checkpoint, replace(hints, hparams=named))))
        state = replace(state, rules={**state.rules, **dict(_matrices(state))})
        return _masked(_configured(state, config, from_file))

    def losses(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        """Yields what wrappers do that no other system goes on with."""
        return _OPTAX.losses(checkpoint)

    def encode(self, state: TrainState) -> Encoded:
        """Returns the tree that MaxText restores, for the folder that it looks for."""
        require_optimizer(state, ("adamw", "muon"), self.name)
        Faults(_faults(state)).check(InexactError, "MaxText can't go on with the state")
        state = _in_one_group(state)
        form = own_form(state, _OPTAX.name)
        is_foreign = form is not None and not _is_of(form, state)
        # A tree that another codebase keeps is no tree of MaxText: it goes, and each of its records is named.
        kept = {key: part for key, part in state.extra.items() if key != _OPTAX.name or not is_foreign}
        encoded = _OPTAX.encode(replace(state, extra=kept))
        gone = dropped_from(state.extra, tuple(kept), "MaxText")
        tree, updates = encoded.tree, state.counts.updates
        if "step" not in tree:
            chain = _chain(state, tree["opt_state"])
            tree = {**tree, "opt_state": chain, "step": in_memory(np.asarray(updates, np.int32), "step")}
        if _is_wrapped(tree["opt_state"]):
            tree = {**tree, "opt_state": _above_params(tree["opt_state"])}
        scans = "layers" in (at(tree, ("params", "params", "decoder")) or ())
        custom = {"scan_layers": scans}
        strange = [_STRANGE] if not all(map(_is_maxtexts, state.params)) else []
        return replace(
            encoded,
            tree=tree,
            step=_steps(tree["step"], updates) - 1,
            place=f"{{step}}/{_ITEM}",
            custom=custom,
            assumptions=(*encoded.assumptions, *strange),
            dropped={**encoded.dropped, **gone},
        )

    def lines(self, state: State, saved: SavedRun) -> list[str]:
        return maxtext_lines(state, saved)


def _steps(node: Tree, updates: int) -> int:
    """Returns the steps of the run, by which MaxText looks for its folder: updates, and those that a watch skipped."""
    steps = scalar(node)
    return steps if type(steps) is int and steps > 0 else updates


def _is_wrapped(opt_state: Tree) -> bool:
    """Tells whether MaxText's optimizer is several, or one in a wrapper: moments have no `params` above their names."""
    # Flax writes a chain, which is a tuple, as a mapping by index.
    is_chain = isinstance(opt_state, Mapping) and all(str(key).isdigit() for key in opt_state)
    return isinstance(opt_state, Mapping) and not is_chain and not opt_state.keys() >= {*_MOMENTS}


def _below_params(tree: Tree) -> Tree:
    """Returns a tree in which moments stand below `params`, as parameters do; undone by `_above_params`."""
    if not isinstance(tree, Mapping):
        return tree
    moments = {name: tree[name] for name in _MOMENTS if name in tree}
    return {
        key: {"params": part} if key in moments else part if key == "params" else _below_params(part)
        for key, part in tree.items()
    }


def _above_params(tree: Tree) -> Tree:
    """Returns a tree whose moments have no `params` above their names; undoes `_below_params`."""
    if isinstance(tree, list):
        return [_above_params(part) for part in tree]
    if not isinstance(tree, Mapping):
        return tree
    return {
        key: part.get("params", part)
        if key in _MOMENTS and isinstance(part, Mapping)
        else _above_params(part)
        for key, part in tree.items()
    }


def _has_muon(state: TrainState) -> bool:
    return "muon" in state.optimizer.schemas


def _is_of(form: Tree, state: TrainState) -> bool:
    """Tells whether a form is MaxText's, of a state's parameters, and of its rule: adam_pax alone has no chain."""
    if not isinstance(form, Mapping) or not {"opt_state", "step"} <= form.keys():
        return False
    is_flat = isinstance(form["opt_state"], Mapping) and form["opt_state"].keys() >= {*_MOMENTS}
    return is_flat is (state.optimizer.variant == PAX) and not names_of_others(form, state.params)


def _in_one_group(state: TrainState) -> TrainState:
    """Returns a state of MaxText's Muon whose optimizers have one group each, as no option of theirs differs."""
    if not _has_muon(state):
        return state
    of: dict[str | None, Group] = {}
    for group in state.optimizer.groups:
        before = of.get(group.schema)
        of[group.schema] = group if before is None else replace(before, paths=(*before.paths, *group.paths))
    return replace(state, optimizer=replace(state.optimizer, groups=tuple(of.values())))


def _matrices(state: TrainState) -> Iterator[tuple[str, Rule]]:
    """Yields which axes of a decoder's kernels make the matrices that MaxText's Muon sees."""
    for path in (path for group in state.optimizer.groups if group.schema == "muon" for path in group.paths):
        parts = path.split("/")
        axes = _ATTENTION.get(parts[-2], _DENSE) if "self_attention" in parts else _DENSE
        if "layers" in parts:
            axes = (axes[0], Axis.BATCH, *axes[1:])
        if len(axes) == len(state.params[path].shape):
            yield path, Rule(axes, "inferred")


def _settings(
    checkpoint: Checkpoint, hints: CheckpointRef
) -> tuple[Mapping[str, Any], dict[str, Any], set[str]]:
    """Returns MaxText's configuration, its and the user's hyperparameters, and the names that it alone gives.

    It lies beside a checkpoint, or the user names its file: that has all options, and the optimizer's count.
    """
    config = dict((checkpoint.meta.get("config") or {}).get("values", {}))
    is_whole = "opt_type" in hints.hparams
    config |= hints.hparams if is_whole else {}
    given = {} if is_whole else dict(hints.hparams)
    stated = {name: config[name] for name in _OPTIONS if config.get(name, "") not in ("", None)}
    named = {_CLIP if name == _THRESHOLD else name: value for name, value in {**stated, **given}.items()}
    if named.get(_CLIP) == 0:
        named[_CLIP] = None
    return config, named, stated.keys() - given.keys()


def _configured(state: TrainState, config: Mapping[str, Any], names: Collection[str]) -> TrainState:
    """Returns a state with the hyperparameters and the schedule of a configuration."""
    schema = load_schema("adamw")
    usual = schema.variant(ADAMW)["defaults"]
    meant = {name for name in usual if schema.spelling(ADAMW, name).argument in names}
    meant |= {_CLIP} if _THRESHOLD in names else set()
    groups = tuple(
        replace(
            group,
            known_from={
                name: "file" if name in meant and origin == "given" else origin
                for name, origin in group.known_from.items()
            },
        )
        for group in state.optimizer.groups
    )
    call = _schedule_call(config)
    extra = {**state.extra, **({CALLED: call} if call else {})}
    return replace(state, optimizer=replace(state.optimizer, groups=groups), extra=extra)


def _masked(state: TrainState) -> TrainState:
    """Returns a state in which a group of its own holds what `adamw_mask` keeps from decay, by its expressions.

    Source: AI-Hypercomputer/maxtext 0.2.5 optimizers/optimizers.py, `get_adamw_mask`.
    """
    groups = tuple(part for group in state.optimizer.groups for part in _parts_by_mask(group))
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _parts_by_mask(group: Group) -> Iterator[Group]:
    """Yields what of a group decays, and what a mask keeps from it; the group itself without a mask."""
    decay, mask = _BY_MASK
    patterns, origins = group.hyperparameters.get(mask), group.known_from
    spared = [path for path in group.paths if IS_EXCLUDED["mask"](path.removeprefix("params/"), patterns)]
    kept = [path for path in group.paths if path not in spared]
    settings = {**group.hyperparameters, mask: None}
    if kept or not spared:
        yield replace(group, paths=tuple(kept), hyperparameters=settings) if patterns else group
    if spared:
        from_mask = {**origins, decay: origins.get(mask, "given")}
        without = {**settings, decay: 0.0}
        yield replace(group, paths=tuple(spared), hyperparameters=without, known_from=from_mask)


def _schedule_call(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the call that makes MaxText's schedule by cosine, until it ends; empty for any other.

    Source: AI-Hypercomputer/maxtext 0.2.5 utils/maxtext_utils.py, `create_learning_rate_schedule`.
    """
    steps: Any = config.get("learning_rate_schedule_steps", -1)
    steps = config.get("steps") if steps in (-1, None) else steps
    peak: Any = config.get("learning_rate")
    fraction: Any = config.get("warmup_steps_fraction", 0.1)
    numbers = (steps, peak, fraction, final := config.get("learning_rate_final_fraction", 0.1))
    if config.get("lr_schedule_type", "cosine") != "cosine" or not all(
        type(n) in (int, float) for n in numbers
    ):
        return {}
    warmup = int(steps * fraction)
    arguments = {"init_value": 0.0, "peak_value": peak, "warmup_steps": warmup, "decay_steps": steps - 1}
    return {
        "function": "warmup_cosine_decay_schedule",
        "arguments": {**arguments, "end_value": peak * final},
        "whole": True,
    }


def _numbered(state: TrainState) -> TrainState:
    """Returns a state that leaves out its folder's number, where that follows from the updates done."""
    form = state.extra[_OPTAX.name]
    if not isinstance(form, Mapping) or form.get("step") != state.counts.updates - 1:
        return state
    rest = {key: part for key, part in form.items() if key != "step"}
    return replace(state, extra={**state.extra, _OPTAX.name: rest})


def _clipped(state: TrainState) -> TrainState:
    """Returns a state whose groups have MaxText's clipping of gradients; base.yml's if it is not given."""
    fact = Fact(
        _CLIP, _USUAL_CLIP, "assumed", "what MaxText's base.yml clips gradients by, before the optimizer"
    )
    groups = tuple(
        group
        if _CLIP in group.hyperparameters
        else replace(
            group,
            hyperparameters={**group.hyperparameters, _CLIP: _USUAL_CLIP},
            known_from={**group.known_from, _CLIP: "assumed"},
            facts=(*group.facts, fact),
        )
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _faults(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields why MaxText can't go on with a state."""
    if state.counts.updates < 1:
        yield "has made no update: MaxText names a folder by the last one", "counts/updates"
    for schema in state.optimizer.schemas:
        groups = [g for g in state.optimizer.groups if g.paths and state.optimizer.kind(g)[0] == schema]
        yield from _of_one_optimizer([group.hyperparameters for group in groups], _has_muon(state))
    if _has_muon(state):
        yield from _otherwise_cut(state)
    if _has_muon(state) and "adamw" not in state.optimizer.schemas and any(map(_is_maxtexts, state.params)):
        yield "moves all parameters, and MaxText moves embeddings, norms and the head by Adam", "optimizer"


def _of_one_optimizer(settings: Sequence[Mapping[str, Any]], beside_muon: bool) -> Iterator[tuple[str, str]]:
    """Yields what MaxText can't do of the settings of an optimizer's groups: each optimizer has one for all.

    Source: AI-Hypercomputer/maxtext 0.2.5 optimizers/optimizers.py, `get_optimizer`: its Muon has no mask of decay, and
    moves the rest by Adam as Optax' Muon does, with nesterov.
    """
    spared = () if beside_muon else _BY_MASK
    for name in sorted({name for values in settings for name in values} - {*spared}):
        if len({repr(values.get(name)) for values in settings}) > 1:
            yield "differs between groups, and MaxText has one for all parameters", name
    if not beside_muon and len({values.get("weight_decay_rate") for values in settings} - {0, None}) > 1:
        yield "differs between groups that decay, and MaxText has one for all parameters", "weight_decay_rate"
    yield from _without_option(settings[0] if settings else {}, beside_muon)


def _without_option(settings: Mapping[str, Any], beside_muon: bool) -> Iterator[tuple[str, str]]:
    """Yields the settings of an optimizer that no option of MaxText makes."""
    if beside_muon and not settings.get("nesterov"):
        yield "is off, and MaxText's run with Muon has it on for both of its optimizers", "nesterov"
    for name in _OF_ADAM[1 if beside_muon else 0 :]:
        if settings.get(name):
            yield f"is {settings[name]!r:.40}, which MaxText has no option for", name


def _is_maxtexts(path: str) -> bool:
    return path.startswith("params/")


def _otherwise_cut(state: TrainState) -> Iterator[tuple[str, str]]:
    """Yields the parameters of Muon that MaxText moves by Adam, and those in which it sees another matrix."""
    expected = dict(_matrices(state))
    for path in (path for group in state.optimizer.groups if group.schema == "muon" for path in group.paths):
        rule = state.rules.get(path)
        is_kernel = path.endswith("/kernel") and "logits_dense" not in path
        if not is_kernel or path not in expected:
            yield "is moved by Muon, and MaxText moves it by Adam", path
        elif rule is not None and rule.axes != expected[path].axes:
            yield f"is a matrix along {[axis.value for axis in rule.axes]}, and another for MaxText", path


def _chain(state: TrainState, opt_state: Tree) -> Tree:
    """Returns the state of MaxText's optimizer: Optax' chain, whose rate is a schedule and whose mask keeps nothing."""
    counted: dict[str, Any] = {"count": in_memory(np.asarray(state.counts.schedule, np.int32), "count")}
    if _has_muon(state):
        parts = at(opt_state, ("inner_states",)) or {"muon": {"inner_state": opt_state}}
        return {"inner_states": {
            label: {"inner_state": [*part["inner_state"][:-1], counted]} for label, part in parts.items()
        }}  # fmt: skip
    core = opt_state[0] if isinstance(opt_state, list) else opt_state
    return core if state.optimizer.variant == PAX else [core, None, counted]


LAYOUT = MaxText()
