"""The lines of Python that make an optimizer of Optax for a state's groups: a call, with a mask, or with parts.

Which parameters a mask or a part has is read from the checkpoint: there may be thousands. What a run had around its
optimizer is made too, where its names show it: `inject_hyperparams` and `MultiSteps`; else a comment says where it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from statekit.converters.layouts.optax.kinds import LINK_CODE, WRAPPERS, Wrapper
from statekit.converters.layouts.optax.links import CHAIN_INDEX
from statekit.lines.printing import quoted

DECAY = "weight_decay_rate"
RULES = ("factor_map", "logical_factor_rules")
BY_RATE = ("relative_step", "warmup_init")
"""Hyperparameters that say how the learning rate comes about: in Optax that is the user's schedule."""
INNER, PARTS, FROZEN = "inner_state", "inner_states", "frozen"
"""The fields of MaskedState and PartitionState; the label of parameters that nothing moves."""
Call: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, str]], str]
Form: TypeAlias = Literal["one", "mask", "parts"]
_PATH = 'jax.tree_util.keystr(keys, simple=True, separator="/")'


def form_of_groups(
    settings: Iterable[Mapping[str, Any]], frozen: bool, schemas: Collection[str | None] = ()
) -> Form:
    """Returns what groups become.

    Args:
        settings: The hyperparameters of each.
        frozen: Whether there are parameters in none of them.
        schemas: The schema of each, where they have several.
    """
    if len({*schemas}) > 1:
        return "parts"
    groups = [{**setting, DECAY: setting.get(DECAY) or 0} for setting in settings]
    differing = {
        name for group in groups for name in group if any(group[name] != other.get(name) for other in groups)
    }
    differing -= {*RULES, *BY_RATE}
    if not differing:
        return "one"
    decays = {group[DECAY] for group in groups if group[DECAY]}
    return "mask" if differing == {DECAY} and len(decays) == 1 and not frozen else "parts"


OF_MUON = {"muon": "muon", "adamw": "adam"}
"""By schema, the labels of the two parts of `optax.contrib.muon`.

Source: google-deepmind/optax optax/contrib/_muon.py, `muon`.
"""


def part_labels(schemas: Sequence[str | None]) -> Mapping[str, str]:
    """Returns by schema the labels of a partition's parts, if they are those of one call; else parts have numbers."""
    return OF_MUON if sorted(map(str, schemas)) == sorted(OF_MUON) else {}


def _form(groups: Sequence[Mapping[str, Any]], frozen: bool) -> Form:
    """Returns what groups become that lie in no partition of their own; arguments are those of `form_of_groups`."""
    settings = [group["hyperparameters"] for group in groups]
    schemas = [group.get("schema") for group in groups]
    return form_of_groups(settings, frozen or len({*schemas}) > 1, schemas)


def construction(
    groups: Sequence[Mapping[str, Any]],
    names: Collection[str],
    empty: Collection[str],
    call: Call,
    reading: Sequence[str],
    mask: str,
) -> list[str]:
    """Returns the lines that make `optimizer`, as `Constructing` says.

    Args:
        groups: The groups, each with its label.
        names: Names of the checkpoint's tensors.
        empty: Names of its leaves that hold nothing.
        call: Gives the call of the optimizer's class.
        reading: Lines that make `groups`.
        mask: The argument for the mask of weight decay; "" if there is none, and groups are always parts.
    """
    moved = {path for group in groups for path in group["paths"]}
    frozen = not _params_in(names) <= moved
    partition = _partition(groups, names, empty)
    form = "parts" if partition else _form(groups, frozen or not mask)
    groups, frozen_label = (partition.groups, partition.frozen) if partition else (groups, FROZEN)
    place = _place(names, moved)
    inner = f"{place}/{INNER}" if frozen else place
    places = {
        group["label"]: f"{place}/{PARTS}/{group['label']}/{INNER}" if form == "parts" else inner
        for group in groups
    }
    # A rate that doesn't count is a number.
    or_number = partition is not None or bool(names and mask and form != "parts")
    rates = {
        group["label"]: _rate_of(group, names, places[group["label"]], form, or_number) for group in groups
    }
    return [
        *_schedule_lines(groups, rates),
        *_lines(
            form,
            frozen_label if frozen else None,
            groups,
            _injecting(call, names, places),
            rates,
            reading,
            mask,
        ),
        *_around(place, names, empty),
    ]


_WHOLE = "opt_state"
_CORE = ("mu", "nu", "v_row", "v_col", "v")
_STATIC = ("dtype_momentum", "min_dim_size_to_factor", "decay_offset")
"""Arguments of Adafactor that inject_hyperparams takes for no hyperparameter, unless it is asked to."""


def _place(names: Collection[str], paths: Collection[str]) -> str:
    """Returns where an optimizer lies, or the partition or mask that it is in; the usual place if nothing tells."""
    link = re.compile(rf"({_WHOLE}(?:/.*?)??)(?:/{PARTS}/[^/]+)?(?:/{INNER})*/\d+")
    moved = {*paths}
    for name in names:
        parts = name.split("/")
        for i in (i for i, part in enumerate(parts) if part in _CORE and "/".join(parts[i + 1 :]) in moved):
            if (match := link.fullmatch("/".join(parts[:i]))) is not None:
                return _inside(match[1], names)
    return _WHOLE


def _inside(place: str, names: Collection[str]) -> str:
    """Returns the innermost place below the wrappers that keep an optimizer's state as a mask does."""
    while (wrapper := _wrapper(place, names)) is not None and wrapper.code and wrapper.inner == INNER:
        place = f"{place}/{INNER}"
    return place


def _wrapper(place: str, names: Collection[str]) -> Wrapper | None:
    """Returns what wrapper's state lies in a place, by its fields; None if it is none's."""
    return WRAPPERS.get(_fields_at(place, names))


def _fields_at(place: str, names: Collection[str]) -> frozenset[str]:
    start = len(place) + 1
    return frozenset(name[start:].partition("/")[0] for name in names if name.startswith(f"{place}/"))


def _injecting(call: Call, names: Collection[str], places: Mapping[str, str]) -> Call:
    """Returns what gives the call of a group's optimizer, within inject_hyperparams where the run had it."""

    def injecting(group: Mapping[str, Any], code: Mapping[str, str]) -> str:
        above = f"{places[group['label']]}/{_INJECTED}/"
        injected = {name.removeprefix(above) for name in names if name.startswith(above)}
        whole = call(group, code)
        callee, opens, arguments = whole.partition("(")
        if not injected or not opens:
            return whole
        static = tuple(name for name in _STATIC if name not in injected and callee == "optax.adafactor")
        static_code = f", static_args={static!r}" if static else ""
        return f"optax.inject_hyperparams({callee}{static_code})({arguments}"

    return injecting


_INJECTED = "hyperparams"
"""The field of the state of inject_hyperparams that has their values."""


def _around(place: str, names: Collection[str], empty: Collection[str]) -> list[str]:
    """Returns the lines that put `optimizer` into what a run had around it, the innermost first.

    Source: google-deepmind/optax optax/transforms/_combining.py, `chain`; of the wrappers, as `kinds` says.
    """
    lines, at = [], _WHOLE
    for step in place.split("/")[1:]:
        wrapper = _wrapper(at, [*names, *empty])
        if wrapper is not None and wrapper.code and step == wrapper.inner:
            call = wrapper.code
        elif CHAIN_INDEX.fullmatch(step):
            call = _chain(int(step), at, names, empty)
        else:
            return [f"# the state lies in {place} there: put the optimizer where the run had it"]
        lines.append(f"optimizer = {call}")
        at = f"{at}/{step}"
    return lines[::-1]


def _chain(number: int, place: str, names: Collection[str], empty: Collection[str]) -> str:
    """Returns the call of a chain in which `optimizer` is a link, and others stand that the names don't tell."""
    link = re.compile(rf"{re.escape(place)}/({CHAIN_INDEX.pattern})(?:/.*)?")
    numbers = {int(match[1]) for match in filter(None, map(link.fullmatch, [*names, *empty]))}
    codes = [
        "optimizer" if i == number else LINK_CODE.get(_fields_at(f"{place}/{i}", names), "...")
        for i in range(max(numbers) + 1)
    ]
    call = f"optax.chain({', '.join(codes)})"
    other = "  # ...: another link of the run's, often optax.clip_by_global_norm(1.0)"
    return f"{call}{other}" if "..." in codes else call


def _schedule_lines(groups: Sequence[Mapping[str, Any]], rates: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns the lines that make the schedules, each once for all groups that it moves."""
    moved: dict[str, list[Mapping[str, Any]]] = {}
    for group in groups:
        for rate in rates[group["label"]].values():
            moved.setdefault(rate, []).append(group)
    return [line for rate, of_rate in moved.items() if rate != "..." for line in _schedule(rate, of_rate)]


def _schedule(name: str, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines that make a schedule of groups, or say of it what is known."""
    codes = {group.get("schedule") for group in groups}
    if len(codes) == 1 and (code := codes.pop()):
        return [*(["import jax"] if "jax.numpy" in code else []), f"{name} = {code}"]
    why = "groups have several" if codes else groups[0].get("unscheduled")
    return [f"# {name}: the run's learning rate as a function of the updates done{f'; {why}' if why else ''}"]


@dataclass(frozen=True)
class _Partition:
    """A partition that lies in a checkpoint under labels of its run's own.

    Attributes:
        groups: The groups, each with its label there.
        frozen: The label of parameters that nothing moves.
    """

    groups: list[Mapping[str, Any]]
    frozen: str


def _partition(
    groups: Sequence[Mapping[str, Any]], names: Collection[str], empty: Collection[str]
) -> _Partition | None:
    """Returns the partition in a checkpoint's names; None if it is statekit's own, or unclear."""
    link = re.compile(rf"(.*)/{PARTS}/([^/]+)/{INNER}(?:/(.*))?")
    names_of: dict[str, list[str]] = {}
    above: dict[str, None] = {}
    for match in filter(None, map(link.fullmatch, names)):
        above[match[1]] = None
        names_of.setdefault(match[2], []).append(f"/{match[3]}")
    labels = [
        next(
            (
                label
                for label, slot_names in names_of.items()
                if any(name.endswith(f"/{group['paths'][0]}") for name in slot_names)
            ),
            "",
        )
        for group in groups
    ]
    if not all(labels) or len(above) != 1 or len({*labels}) != len(groups):
        return None
    still = [match[2] for match in filter(None, map(link.fullmatch, empty)) if match[2] not in names_of]
    labelled: list[Mapping[str, Any]] = [
        {**group, "label": label} for group, label in zip(groups, labels, strict=True)
    ]
    return _Partition(labelled, next(iter(still), FROZEN))


def _lines(
    form: Form,
    frozen: str | None,
    groups: Sequence[Mapping[str, Any]],
    call: Call,
    rates: Mapping[str, Mapping[str, str]],
    reading: Sequence[str],
    mask: str,
) -> list[str]:
    first = groups[0]
    lines = ["import jax", *reading]
    if form == "one" and frozen is None:
        return [f"optimizer = {call(first, rates[first['label']])}"]
    if form == "parts":
        return [*lines, *_part_lines(groups, frozen, call, rates)]
    if form == "mask":
        decayed = next(group for group in groups if group["hyperparameters"].get(DECAY))
        return [
            *lines,
            f'decayed = {{path for one in groups if one["hyperparameters"].get("{DECAY}") for path in one["paths"]}}',
            f"mask = jax.tree_util.tree_map_with_path(lambda keys, _: {_PATH} in decayed, params)",
            f"optimizer = {call(decayed, {**rates[decayed['label']], mask: 'mask'})}",
        ]
    code, mark, comment = call(first, rates[first["label"]]).partition("  #")
    return [
        *lines,
        'moved = {path for group in groups for path in group["paths"]}',
        f"mask = jax.tree_util.tree_map_with_path(lambda keys, _: {_PATH} in moved, params)",
        "import optax",
        f"rule = optax.masked({code}, mask){mark}{comment}",
        "still = lambda grads: jax.tree.map(lambda grad, moved: grad if moved else 0 * grad, grads, mask)",
        "update = lambda grads, state, params=None: rule.update(still(grads), state, params)",
        "optimizer = optax.GradientTransformation(rule.init, update)",
    ]


def _part_lines(
    groups: Sequence[Mapping[str, Any]],
    frozen: str | None,
    call: Call,
    rates: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Returns the lines of a partition, or of the one call that makes it."""
    if lines := _muon_lines(groups, frozen, call, rates):
        return lines
    rules = [f"rules[{quoted(group['label'])}] = {call(group, rates[group['label']])}" for group in groups]
    usual = all(group["label"] == str(group["number"]) for group in groups)
    named = {str(group["number"]): group["label"] for group in groups}
    other = quoted(frozen or FROZEN)
    return [
        *([] if usual else [f"names = {named!r}"]),
        f"label = {{path: {'str(i)' if usual else 'names[str(i)]'} for i, group in enumerate(groups) "
        'for path in group["paths"]}',
        f"labels = jax.tree_util.tree_map_with_path(lambda keys, _: label.get({_PATH}, {other}), params)",
        "import optax",
        f"rules = {{{quoted(frozen)}: optax.set_to_zero()}}" if frozen else "rules = {}",
        *rules,
        "optimizer = optax.partition(rules, labels)",
    ]


_OF_ADAM = ("b1", "b2", "eps_root", "weight_decay", "learning_rate")
"""What `optax.contrib.muon` takes for its Adam, with `adam_` before it; the rest is what Muon is told."""


def _muon_lines(
    groups: Sequence[Mapping[str, Any]],
    frozen: str | None,
    call: Call,
    rates: Mapping[str, Mapping[str, str]],
) -> list[str]:
    """Returns the lines of `optax.contrib.muon`, whose call has both rules; none if the groups aren't its parts."""
    of_label = {group["label"]: group for group in groups}
    if frozen is not None or {*of_label} != {*OF_MUON.values()}:
        return []
    muon, adam = (call(of_label[label], rates[label]) for label in ("muon", "adam"))
    if not muon.startswith("optax.contrib.muon(") or not adam.startswith("optax.adam"):
        return []
    shared = muon.removesuffix(")").partition("(")[2]
    of_adam = dict(re.findall(r"(\w+)=([^,()]+)", adam))
    adam_arguments = [
        f"adam_{name}={of_adam[name]}"
        for name in _OF_ADAM
        if name in of_adam and f"{name}={of_adam[name]}" not in shared
    ]
    adam_arguments = [argument for argument in adam_arguments if not argument.endswith("=None")]
    arguments = [shared, *adam_arguments, "muon_weight_dimension_numbers=numbers"]
    return [
        f'moved = {{*groups[{of_label["muon"]["number"]}]["paths"]}}',
        "import optax.contrib",
        "matrix = optax.contrib.MuonDimensionNumbers()",
        "dims = lambda leaf: matrix if leaf.ndim == 2 else ...",
        f"numbers = jax.tree_util.tree_map_with_path(lambda keys, x: dims(x) if {_PATH} in moved else None, params)",
        f"optimizer = optax.contrib.muon({', '.join(filter(None, arguments))})",
    ]


def _number(group: Mapping[str, Any]) -> dict[str, str]:
    """Returns the code for a learning rate that is a number, where the group doesn't say it."""
    return {"learning_rate": "..."} if group["hyperparameters"].get("learning_rate") is None else {}


def _params_in(names: Collection[str]) -> set[str]:
    """Returns the parameters among the names of a checkpoint's tensors."""
    return {name.removeprefix("params/") for name in names if name.startswith("params/")}


def _rate_of(
    group: Mapping[str, Any], names: Collection[str], place: str, form: Form, or_number: bool
) -> dict[str, str]:
    """Returns the code for a group's learning rate: its schedule, else the number if one has to be given."""
    if schedule := _rate(names, place, _ending(group) if form == "parts" else ""):
        return schedule
    return _number(group) if or_number else {}


def _ending(group: Mapping[str, Any]) -> str:
    """Returns what the name of a group's schedule ends in: its label, which a checkpoint may choose, if it can."""
    label = str(group["label"])
    return f"_{label}" if re.fullmatch(r"\w+", label, re.ASCII) else f"_of_{group['number']}"


def _rate(names: Collection[str], place: str, ending: str) -> dict[str, str]:
    """Returns the code for the learning rate, if the checkpoint counts for a schedule: the user's own function."""
    link = re.compile(rf"{re.escape(place)}/(?:{INNER}/)?([1-9]\d*)/(count|ema/.*)")
    fields_at: dict[str, set[str]] = {}
    for match in filter(None, map(link.fullmatch, names)):
        fields_at.setdefault(match[1], set()).add(match[2])
    injected = f"{place}/{_INJECTED}_states/learning_rate/count" in names
    counts = injected or any(fields == {"count"} for fields in fields_at.values())
    return {"learning_rate": f"schedule{ending}"} if counts else {}
