"""Recordings of Optax: slots and counts under the path of their link in the chain, as `1.0.mu`; jitted.

They are decoded through Optax' layout, as a checkpoint is: which links there are, what each counts and what injected
hyperparameters it holds is told by no description. Where a recording names no links, slots have the schema's names.

What counts in `meta.json`: `hyperparameters`, in Optax' names, or by the names of the chain's links; a clipping link
stands before the optimizer, and a mask is described in words. `extra.factored_dims_d1_d0` says which axes are factored.

MultiSteps counts micro-batches; what is replayed are its updates, each with the running mean of its gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from statekit.conversion.contracts import Hints
from statekit.conversion.registry import layout
from statekit.errors import Faults, NotFoundError, StateError, UnknownRuleError
from statekit.files.checkpoint import Checkpoint
from statekit.state.constants import of_xla
from statekit.state.schema import load_schema
from statekit.state.train_state import Axis, TrainState
from statekit.tensors.tensor import Tensor
from statekit.tensors.tree import Path as Keys
from statekit.tensors.tree import Tree, nested, walk
from statekit.verify.contract import Phase
from statekit.verify.systems import schema_named
from statekit.verify.systems.schema_named import checkpoint_of, described, kind

KINDS = {
    "adamw": ("adamw", "optax"),
    "lamb": ("lamb", "optax"),
    "adafactor": ("adafactor", "optax"),
    "scale_by_factored_rms": ("adafactor", "optax"),
    "scale_by_adam": ("adamw", "optax"),
    "adam": ("adamw", "optax"),
    "amsgrad": ("adamw", "optax"),
}
ALIASES: Mapping[str, Mapping[str, Any]] = {
    "adam": {"weight_decay": 0.0},
    "nadam": {"weight_decay": 0.0, "nesterov": True},
    "nadamw": {"nesterov": True},
    "amsgrad": {"weight_decay": 0.0, "amsgrad": True},
}
"""What constructors say that are others with arguments. Source: google-deepmind/optax 0.2.8, _src/alias.py."""
MASKS = {"ndim > 1": lambda shape: len(shape) > 1}
"""Which parameters are decayed, by the words for it."""
UNSAID: Mapping[str, Sequence[str]] = {
    "adamw": ("amsgrad", "nesterov"),
    "lamb": (),
    "adafactor": ("dtype_momentum",),
}
"""What no link says that is as usual; AMSGrad is another link."""
ELSEWHERE = ("beta1", "weight_decay_rate")
"""What other links of a chain do, and as usual is done by none."""
GRADIENTS_PER_UPDATE = "every_k_schedule"
LINKS = (
    "clip", "clip_by_global_norm", "scale_by_factored_rms", "clip_by_block_rms", "scale_by_param_block_rms", "scale",
)  # fmt: skip
"""Links of a chain that are read; `scale` has the learning rate, which is recorded of every update."""
DECAY, RATES = "add_decayed_weights", ("scale_by_learning_rate", "scale_by_schedule", "scale")
BEHIND = (DECAY, *RATES[:-1])
"""Links of a chain behind scale_by_adam or scale_by_factored_rms: the decay, and one that has the rate with its sign.

The rate of every update is recorded, so that a schedule in its place says nothing more.
"""
INJECTED = ("inject_hyperparams", "inject_stateful_hyperparams")
"""What keeps numbers in the state, as float32."""
_SAID_APART = ("learning_rate", "exclude_from_weight_decay", "clipvalue", "global_norm_clip_threshold")
"""Hyperparameters that a recording says elsewhere than among its arguments."""
READ_HERE = (*LINKS, GRADIENTS_PER_UPDATE, "static_args", "mask", "weight_decay_mask", "epsilon")
"""Arguments that go into a group under other names; `static_args` says which ones inject_hyperparams leaves alone."""
WORDS = (
    "optax",
    "chain",
    "MultiSteps",
    GRADIENTS_PER_UPDATE,
    *INJECTED,
    *ALIASES,
    "in",
    "flax",
    "TrainState",
)
"""What else an optimizer's name may say."""


PARAMS, STATE = "params", "opt_state"
READ = "optax"
"""In a state's extra: the form of the tree that Optax' layout read it from."""


class Optax:
    """Reads recordings of Optax."""

    def describe(self, folder: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of `recording.json` for Optax' `meta.json`."""
        schema, variant = kind(meta, KINDS)
        code = str(meta["optimizer"])
        _require_known_links(code)
        links = _links(code)
        arguments = {
            **_of_alias(code),
            **_arguments(meta["hyperparameters"], links, meta.get("learning_rate", ())),
        }
        group = {
            **_usual(schema, _defaults(schema, arguments)),
            **{name: value for name, value in arguments.items() if name not in (*READ_HERE, *links)},
        }
        if any(name in code for name in INJECTED):
            group = _as_injected(group, arguments.get("static_args", ()))
        group |= {
            "exclude_from_weight_decay": excluded(
                meta, arguments.get("mask", arguments.get("weight_decay_mask"))
            ),
            "clipvalue": arguments.get("clip"),
            "global_norm_clip_threshold": arguments.get("clip_by_global_norm"),
            "params": list(meta["params"]),
        }
        spec: dict[str, Any] = {"schema": schema, "variant": variant, "groups": [group]}
        if "factored_dims_d1_d0" in meta["extra"]:
            spec["rules"] = _rules(meta)
        recorded = described(
            meta,
            [(1, int(meta["steps"]), spec)],
            checkpoint_of(meta["checkpoint"]["files"]),
            of_xla(str(meta.get("versions", {}).get("backend", "cpu"))),
        )
        return by_update(recorded, arguments.get(GRADIENTS_PER_UPDATE) or every(code))

    def decode(self, tensors: Mapping[str, Tensor], step: int, phase: Phase) -> TrainState:
        """Returns the canonical state of one step, through Optax' layout.

        Raises:
            StateError: It lies between two updates, its links don't fit the parameters, or its tensors contradict the
                description.
        """
        spec = phase.hyperparameters
        if not any(name.startswith("slot/") and "." in name.rpartition("/")[2] for name in tensors):
            return schema_named.decode(tensors, step, phase)
        counted = (name for name in tensors if name.rpartition("/")[2].rpartition(".")[2] == "mini_step")
        begun = next((name for name in counted if tensors[name].read()), None)
        if begun is not None:
            raise StateError(
                "A recorded state lies between two updates and has only some of the gradients.", place=begun
            )
        checkpoint = Checkpoint("orbax", Path(f"step {step}"), _tree(tensors), step=step)
        schemas = {schema for schema, _ in schema_named.kinds_of(spec)}
        hints = Hints({"optimizer": next(iter(schemas))}) if len(schemas) == 1 else Hints()
        state = layout("optax").decode(checkpoint, hints)
        if state.counts.updates != step:
            raise StateError(
                "A recorded state has made another number of updates than its name says.",
                place=checkpoint.path,
                expected=step,
                found=state.counts.updates,
            )
        return schema_named.as_described(state, spec)

    def encode(self, state: TrainState, phase: Phase) -> dict[str, Tensor]:
        """Returns the tensors of a state under the trajectory's names, through Optax' layout where they name links."""
        if READ not in state.extra:
            return schema_named.encode(state, phase)
        tree: Any = layout("optax").encode(state).tree
        named = {f"param/{path}": tensor for path, tensor in state.params.items()}
        leaves = ((tuple(map(str, keys)), leaf) for keys, leaf in walk(tree[STATE]))
        return named | {_name(keys, state.params): leaf for keys, leaf in leaves if isinstance(leaf, Tensor)}


def _require_known_links(optimizer: str) -> None:
    """Raises UnknownRuleError if an optimizer's name has a link, or something else, that isn't known."""
    names = {*WORDS, *KINDS, *LINKS, *_links(optimizer)}
    words = re.findall(r"[A-Za-z_]\w*", optimizer)
    Faults([("isn't known", word) for word in words if word not in names]).check(
        UnknownRuleError,
        "A recording's optimizer has a part that statekit doesn't know, so that no step can follow it",
        place=optimizer,
        expected=", ".join(sorted(names)),
    )


def every(optimizer: str) -> int:
    """Returns how many gradients make an update, by an optimizer's name: `MultiSteps(adafactor, 3)`."""
    called = re.search(r"MultiSteps\(.*,\s*(?:every_k_schedule\s*=\s*)?(\d+)\)", optimizer)
    return int(called[1]) if called else 1


def _tree(tensors: Mapping[str, Tensor]) -> Tree:
    """Returns the parameters, and the states of links, as a checkpoint of Optax has them."""
    params: dict[Keys, Tensor] = {}
    fields: dict[Keys, Any] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        path, _, field = rest.rpartition("/")
        if kind == "param":
            params[tuple(rest.split("/"))] = tensor
        elif kind == "slot":
            fields.setdefault(tuple(field.split(".")), {})[tuple(path.split("/"))] = tensor
        else:
            fields[tuple(rest.split("."))] = tensor
    links = {keys: nested(field) if isinstance(field, dict) else field for keys, field in fields.items()}
    return {PARAMS: nested(params), STATE: _chain(links)}


def _chain(fields: Mapping[Keys, Tree]) -> Tree:
    """Returns the links that have these fields; one of which nothing was recorded is empty."""
    if () in fields:
        return fields[()]
    below: dict[str, dict[Keys, Tree]] = {}
    for keys, field in fields.items():
        below.setdefault(keys[0], {})[keys[1:]] = field
    parts = {key: _chain(rest) for key, rest in below.items()}
    if not all(key.isdecimal() and len(key) < 3 for key in parts):
        return parts
    return [parts.get(str(i)) for i in range(1 + max(map(int, parts)))]


def _name(keys: Keys, params: Mapping[str, Tensor]) -> str:
    """Returns the name of a tensor of the links: a slot's field is a tree like the parameters."""
    for i in range(1, len(keys)):
        if (path := "/".join(keys[i:])) in params:
            return f"slot/{path}/{'.'.join(keys[:i])}"
    return f"global/{'.'.join(keys)}"


def _links(optimizer: str) -> list[str]:
    """Returns the links of a chain around a core, in their order; none of an optimizer that has all in itself."""
    words = re.findall(r"[A-Za-z_]\w*", optimizer)
    cores = [word for word in words if word in ("scale_by_adam", "scale_by_factored_rms")]
    return [word for word in words if word in (*cores, *LINKS, *BEHIND)] if cores else []


def _arguments(
    hyperparameters: Mapping[str, Any], links: Sequence[str], rates: Sequence[float]
) -> Mapping[str, Any]:
    """Returns hyperparameters under the names of adamw() or adafactor(), if a chain of its links is described."""
    decay, mask = _decay(hyperparameters, links)
    if "scale_by_adam" in hyperparameters:
        behind = {"weight_decay": decay, "mask": mask}
        return {**hyperparameters, **hyperparameters["scale_by_adam"], **behind}
    if "scale_by_factored_rms" not in hyperparameters:
        return hyperparameters
    if decay and len({*rates}) > 1:
        raise UnknownRuleError(
            "A chain multiplies its weight decay with a rate that changes, which no step of Optax' Adafactor does.",
            expected="one learning rate for all updates",
        )
    floor = hyperparameters.get("scale_by_param_block_rms")
    usual = _usual("adafactor", ["epsilon2"])["epsilon2"]
    if floor not in (None, usual):
        raise NotFoundError(
            "adafactor() has another floor of the parameter scale.", expected=usual, found=floor
        )
    return {
        **_usual("adafactor", ELSEWHERE),
        **hyperparameters,
        **hyperparameters["scale_by_factored_rms"],
        **({"weight_decay_rate": decay * rates[0], "mask": mask} if decay else {}),
        "eps": hyperparameters["scale_by_factored_rms"]["epsilon"],
        "clipping_threshold": hyperparameters.get("clip_by_block_rms"),
        "multiply_by_parameter_scale": floor is not None,
    }


def _decay(hyperparameters: Mapping[str, Any], links: Sequence[str]) -> tuple[float, str | None]:
    """Returns what a chain's link adds of the weights, before the rate multiplies it, and the words for its mask."""
    decay = hyperparameters.get(DECAY) or 0.0
    value, mask = (
        (decay.get("weight_decay", 0.0), decay.get("mask")) if isinstance(decay, Mapping) else (decay, None)
    )
    if value and not (links[-2:-1] == [DECAY] and links[-1] in RATES):
        raise UnknownRuleError(
            "A recording's chain adds decayed weights where no step follows.",
            expected=f"at its end, {DECAY} and one of {', '.join(RATES)}",
            found=", ".join(links),
        )
    return float(value), mask


def _of_alias(optimizer: str) -> Mapping[str, Any]:
    """Returns the arguments that a constructor's name stands for."""
    words = re.findall(r"[A-Za-z_]\w*", optimizer)
    return next((ALIASES[word] for word in words if word in ALIASES), {})


def _as_injected(group: Mapping[str, Any], static: Sequence[str]) -> dict[str, Any]:
    """Returns a group as a link has it that keeps its numbers in the state.

    Source: google-deepmind/optax 0.2.8, schedules/_inject.py, `inject_stateful_hyperparams`: arrays of float32.
    """
    return {
        name: float(np.float32(value)) if isinstance(value, float) and name not in static else value
        for name, value in group.items()
    }


def _defaults(schema: str, arguments: Mapping[str, Any]) -> list[str]:
    """Returns the hyperparameters that a constructor was not told, and that are Optax' defaults."""
    rules = load_schema(schema)
    names = {
        name: {name, rules.hyperparameters[name].get("native", {}).get("optax", {}).get("name", name)}
        for name in (*rules.variant("optax")["defaults"], *UNSAID[schema])
    }
    return [name for name, both in names.items() if name not in _SAID_APART and both.isdisjoint(arguments)]


def _usual(schema: str, names: Iterable[str]) -> dict[str, Any]:
    """Returns hyperparameters as Optax has them if nothing is said."""
    settings = load_schema(schema).settings("optax")
    return {name: settings[name] for name in names}


def excluded(meta: Mapping[str, Any], mask: str | None) -> dict[str, bool] | None:
    """Returns which parameters a mask keeps from weight decay; None where there is no mask."""
    if mask is None:
        return None
    if mask not in MASKS:
        raise NotFoundError("A mask is described in unknown words.", expected=", ".join(MASKS), found=mask)
    return {path: not MASKS[mask](spec["shape"]) for path, spec in meta["params"].items()}


def _rules(meta: Mapping[str, Any]) -> dict[str, list[str]]:
    """Returns the labels of each parameter's axes: v_row averages the largest (d0) away, v_col the second largest."""
    rules = {}
    for path, dims in meta["extra"]["factored_dims_d1_d0"].items():
        labels = [Axis.NONE.value] * len(meta["params"][path]["shape"])
        if dims is not None:
            labels[dims[0]], labels[dims[1]] = Axis.ROW.value, Axis.COLUMN.value
        rules[path] = labels
    return rules


def by_update(recorded: dict[str, Any], gradients: int) -> dict[str, Any]:
    """Returns a description whose steps are updates, each of several gradients; unfinished ones are left out."""
    if gradients == 1:
        return recorded
    updates = recorded["steps"][1] // gradients
    phase, checkpoint = recorded["phases"][0], recorded["checkpoint"]
    return {
        **recorded,
        "steps": [0, updates],
        "gradients_per_update": gradients,
        "phases": [{**phase, "updates": [1, updates]}],
        "learning_rate": recorded["learning_rate"][gradients - 1 :: gradients],
        "checkpoint": {**checkpoint, "step": checkpoint["step"] // gradients},
    }
