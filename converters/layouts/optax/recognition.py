"""Which optimizer a core link is of: by its fields, its place in the chain, its dtypes and what stands around it.

Optax stores no class names, so that one structure may be of several optimizers:

    [adam, link]               adam, adamax, radam, nadam, yogi, adabelief, adopt
    [adam, link, link]         adamw, nadamw, adamaxw, acprop; LAMB's links without a decay; rmsprop that is
                               centered and corrects its bias
    [adam, link, link, link]   lamb
    [adam, schedule, link]     adamw with a scheduled decay, or Adam, a schedule of the rate and a sign
    adam                       scale_by_adam whose rate is applied elsewhere, or MaxText's adam_pax

A name that is told has to be among those that fit. What changes the updates besides is said, a sentence each.
Source: google-deepmind/optax optax/_src/alias.py, optax/contrib/; AI-Hypercomputer/maxtext optimizers.py, `adam_pax`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from statekit.converters.layouts.optax.kinds import PLATEAU
from statekit.converters.layouts.optax.links import Link, is_tensor, leaves
from statekit.converters.layouts.optax.surroundings import CoreLink, Neighbour
from statekit.errors import UsageError


@dataclass(frozen=True)
class Alias:
    """An optimizer that Adam's state may be of.

    Attributes:
        schema: Its schema; None if it has none, and is carried under AdamW's.
        settings: What its name says of the schema's hyperparameters.
        variant: Its variant, where that isn't Optax' own.
        mu_dtype: Whether its first moment may have a dtype of its own.
    """

    schema: str | None
    settings: Mapping[str, Any] = field(default_factory=dict)
    variant: str | None = None
    mu_dtype: bool = False


_NO_DECAY = {"weight_decay_rate": 0.0}
ALIASES: Final[dict[str, Alias]] = {
    "adafactor": Alias("adafactor", mu_dtype=True),
    "adam": Alias("adamw", _NO_DECAY, mu_dtype=True),
    "adamw": Alias("adamw", mu_dtype=True),
    "amsgrad": Alias("adamw", {"amsgrad": True}, mu_dtype=True),
    "nadam": Alias("adamw", {**_NO_DECAY, "nesterov": True}, mu_dtype=True),
    "nadamw": Alias("adamw", {"nesterov": True}, mu_dtype=True),
    "lamb": Alias("lamb", mu_dtype=True),
    "muon": Alias("muon", mu_dtype=True),
    "muon_adam": Alias("adamw", {**_NO_DECAY, "nesterov": True}, mu_dtype=True),
    "scale_by_adam": Alias("adamw", mu_dtype=True),
    "adam_pax": Alias("adamw", variant="maxtext_pax"),
    "adamax": Alias(None),
    "adamaxw": Alias(None),
    "radam": Alias(None),
    "yogi": Alias(None),
    "adabelief": Alias(None),
    "adopt": Alias(None),
    "acprop": Alias(None),
    "rmsprop": Alias(None),
}
_SHORT = ("adam", "adamax", "radam", "nadam", "yogi", "adabelief", "adopt")
_LONG = ("adamw", "nadamw", "adamaxw", "acprop", "lamb", "rmsprop")
_BY_LENGTH = {1: _SHORT, 2: _LONG, 3: ("lamb", "scale_by_adam")}
"""By how many links stand behind Adam, the last of them the rate, the optimizers of Optax that have so many."""
_BY_FIELDS = {"adafactor": "its state has v_row and v_col", "muon": "its state has ns_coeffs"}
"""The kinds of links that are of one optimizer, and why."""
_BARE = ("scale_by_adam", "adam_pax")
OF_MUON = "muon_adam"
"""What moves the parameters that aren't Muon's: adamw without decay, and with nesterov as Muon has it.

Source: google-deepmind/optax optax/contrib/_muon.py, `muon`.
"""
TAKEN = {2: "adamw", 3: "lamb"}
"""Which optimizer a chain with so many links behind Adam is taken for."""


@dataclass(frozen=True)
class Recognised:
    """What a core link is of.

    Attributes:
        name: The optimizer that it is, or is carried as.
        fitting: All that its structure fits; one if that is certain.
        settled: Whether nobody has to be asked: it was told, is certain, or is taken for the commonest.
        is_named: Whether the user named it.
        because: What the structure is, in a few words.
        exact: Whether its chain is as an optimizer of Optax makes it, with no link left out.
        rate: The link that counts for the schedule of the rate.
        decay: The link that counts for a schedule of the decay.
        beyond: What else changes its updates, a sentence each.
    """

    name: str
    fitting: tuple[str, ...]
    settled: bool
    is_named: bool
    because: str
    exact: bool = False
    rate: Link | None = None
    decay: Link | None = None
    beyond: tuple[str, ...] = ()

    @property
    def alias(self) -> Alias:
        """What its name means."""
        return ALIASES[self.name]

    def variant(self, usual: str, strange: bool) -> str | None:
        """Returns its variant; None if several fit, or if statistics of other links lie around it."""
        several = len({ALIASES[name].variant for name in self.fitting}) > 1
        return None if strange or (several and not self.settled) else self.alias.variant or usual

    def notes(self) -> Iterator[str]:
        """Yields assumptions: the optimizer, if no file names it, and all that its updates do besides."""
        others = [name for name in self.fitting if name != self.name]
        if others and not self.is_named:
            how = f"it is taken for {self.name}" if self.settled else f"it is shown as {self.name}"
            yield (
                f"A file doesn't say which optimizer its Adam-like state is of: {self.because}; {how} "
                f"(--optimizer says otherwise: {', '.join(others)})."
            )
        yield from self.beyond


def recognised_all(
    cores: Sequence[CoreLink], asked: str | None, variants: Mapping[str, str], makes: Sequence[str] = ()
) -> list[Recognised]:
    """Returns what each core link of a run is of.

    Args:
        cores: The core links.
        asked: The optimizer that the user names: of each core link that it fits.
        variants: The variants that the user names; one that a single optimizer has names that optimizer.
        makes: The optimizers that the program makes; empty for all.

    Raises:
        UsageError: None can be that.
    """
    named = {alias.variant: name for name, alias in ALIASES.items() if alias.variant is not None}
    asked = asked or next((named[variant] for variant in variants.values() if variant in named), None)
    candidates = [_fitting(core, makes) for core in cores]
    fitting = [asked in (*names, ALIASES[names[0]].schema) for names, _ in candidates]
    beside_muon = any(core.link.kind == "muon" for core in cores)
    return [
        recognised(core, asked if fits or not any(fitting) else None, beside_muon, makes)
        for core, fits in zip(cores, fitting, strict=True)
    ]


def recognised(
    core: CoreLink, asked: str | None, beside_muon: bool = False, makes: Sequence[str] = ()
) -> Recognised:
    """Returns what a core link is of.

    Args:
        core: The core link.
        asked: The optimizer that the user names; None if none is named.
        beside_muon: Whether Muon is another part of the run. Its `nesterov`, which is usually on, is Adam's too.
        makes: The optimizers that the program makes; empty for all.

    Raises:
        UsageError: It can't be that.
    """
    fitting, because = _fitting(core, makes)
    taken = _taken(core, fitting)
    if beside_muon and taken == "adamw":
        fitting, taken = (OF_MUON, *fitting), OF_MUON
    if len(fitting) == 1 and asked == ALIASES[fitting[0]].schema:
        asked = fitting[0]
    if asked is not None and asked not in fitting:
        raise UsageError(
            "The optimizer can't be that.",
            place="--optimizer",
            expected=f"{', '.join(fitting)}: {because}",
            found=asked,
            remedy="leave it out, or name one of those",
        )
    name = asked or taken or fitting[0]
    rate, decay = _schedules(core, name, asked is not None)
    return Recognised(
        name=name,
        fitting=fitting,
        settled=asked is not None or taken is not None,
        is_named=asked is not None,
        because=because,
        exact=_is_exact(core),
        rate=rate,
        decay=decay,
        beyond=tuple(_beyond(core)),
    )


def _fitting(core: CoreLink, makes: Sequence[str] = ()) -> tuple[tuple[str, ...], str]:
    """Returns the optimizers that a core link may be of, the likeliest first, and what its structure is.

    What the program makes are all, where that leaves one.
    """
    names, because = _by_structure(core)
    fitting = tuple(name for name in names if name in makes)
    return (fitting or names), because


def _by_structure(core: CoreLink) -> tuple[tuple[str, ...], str]:
    behind = core.kinds_behind
    if core.link.kind in _BY_FIELDS:
        return (core.link.kind,), _BY_FIELDS[core.link.kind]
    if "nu_max" in core.link.state:
        return ("amsgrad",), "its state has nu_max"
    names: tuple[str, ...]
    # a chain that leaves empty states out may have more links than it shows
    if core.behind is None:
        names, because = _BARE, "Adam's state stands in no chain"
    elif core.gaps and len(behind) < 2:
        names, because = (*_SHORT, *_LONG), "its chain leaves out the states that hold nothing"
    elif behind[:1] == ("schedule",) and len(behind) > 1:
        names = ("adamw", "nadamw", "adamaxw", "adam")
        because = "the schedule behind Adam is of the weight decay (adamw), or of the rate (adam, and a sign)"
    elif "schedule" in behind[:-1] or len(behind) not in _BY_LENGTH:
        names = ("adamw", "adam", "nadam", "nadamw", "lamb", "rmsprop")
        because = f"no optimizer of Optax has these links behind Adam: {', '.join(behind) or 'none'}"
    else:
        names = _BY_LENGTH[len(behind)]
        because = f"{len(behind)} link{'s stand' if len(behind) > 1 else ' stands'} behind Adam"
    if _has_own_dtype(core.link):
        names = tuple(name for name in names if ALIASES[name].mu_dtype)
        because = f"{because}; mu has a dtype of its own"
    return names, because


def _has_own_dtype(link: Link) -> bool:
    first, second = (
        {leaf.dtype.name for _, leaf in leaves(link.state[name]) if is_tensor(leaf)} for name in ("mu", "nu")
    )
    return len(first) == 1 and first != second


def _taken(core: CoreLink, fitting: tuple[str, ...]) -> str | None:
    """Returns the optimizer that a structure is taken for without a question; None if somebody has to say it."""
    if len(fitting) == 1:
        return fitting[0]
    behind = core.kinds_behind
    usual = {"stateless", "masked", "schedule"}
    if core.behind is None or not {*behind} <= usual or behind[:1] == ("schedule",):
        return None
    return None if "schedule" in behind[:-1] else TAKEN.get(len(behind))


def _is_exact(core: CoreLink) -> bool:
    """Tells whether a chain is as an optimizer of Optax makes it: it begins with the core, and shows all its links.

    Links without a state around that chain are somebody's own program. nnx shows them as gaps: one run, one answer.
    """
    is_around = any(link.kind in ("stateless", "masked") for link in (*core.before, *core.after))
    return core.behind is not None and not core.gaps and not is_around and str(core.link.path[-1]) == "0"


def _schedules(core: CoreLink, name: str, is_named: bool) -> tuple[Link | None, Link | None]:
    """Returns the links that count for schedules of the rate and of the decay.

    A schedule right behind Adam with links behind it is of the decay in adamw, and of the rate in an older idiom:
    chain(scale_by_adam(), scale_by_schedule(f), scale(-1)). Only the user knows which.
    """
    injected = core.injected_schedules
    counts = [link for link in (*(core.behind or ()), *core.after) if link.kind == "schedule"]
    rate = injected.get("learning_rate")
    decay = injected.get("weight_decay")
    if core.link.kind == "adam" and core.kinds_behind[:1] == ("schedule",) and len(core.kinds_behind) > 1:
        first, *counts = counts
        if name != "adam":
            decay = _link(first) if is_named else decay
        elif is_named:
            counts = [first, *counts]
    if rate is None and counts:
        rate = _link(counts[-1])
    return rate, decay


def _link(neighbour: Neighbour) -> Link:
    return Link("schedule", neighbour.path, neighbour.state)


def _beyond(core: CoreLink) -> Iterator[str]:
    """Yields what changes an optimizer's updates and is no part of its rule."""
    rule = core.link.kind.capitalize()
    for wrapper in core.wrappers:
        if wrapper.changes:
            yield f"{wrapper.name} stands around {rule} and makes other updates of its own."
    for fields in core.unknown:
        yield f"A wrapper that statekit doesn't know stands around {rule}: it keeps {fields}."
    for link in core.before:
        place = "/".join(map(str, link.path))
        if link.kind == "schedule":
            yield f"A schedule scales the gradients before {rule} ({place})."
        elif link.kind not in ("stateless", "masked", "idle"):
            yield f"{link.what} stands before {rule} and changes its gradients ({place})."
    kept = core.momentum.path if core.momentum is not None else None
    for link in (*(core.behind or ()), *core.after):
        if link.kind in ("ema", "other") and link.path != kept:
            yield f"{link.what} stands behind {rule} and changes its updates ({'/'.join(map(str, link.path))})."


def stored_scale(core: CoreLink) -> float | None:
    """Returns the factor of the rate that reduce_on_plateau keeps behind an optimizer; None without one."""
    scales = [link.state["scale"] for link in core.named("plateau") if link not in core.before]
    if not scales:
        return None
    factor = 1.0
    for scale in scales:
        factor *= float(scale.read())
    return factor


STORED_SCALE: Final = "stored_scale"
"""The fact that the rate counts a factor which Optax keeps in the state: Optax' own rate is without it."""
PLATEAU_LOST: Final = f"What changes it later ({PLATEAU}'s best value and counts) stays with Optax."
