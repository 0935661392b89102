"""Names of containers and layouts, each loaded when asked for. Other packages add theirs through entry points.

Which one fits is asked in two rounds: first of those whose signs are there; of the rest only if none does. Signs are
what is cheap to see of a path, or of the names in an opened checkpoint, and lets a format fit; they are data,
`converters/signs.json`. They leave out, they don't decide: a format without signs may always fit.

A card says what is known of a container or layout without loading it. The cards of our own formats lie in
`converters/cards.json`, made from the formats themselves by `make tables`; those of other packages are made when they
are asked for, which loads them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar, cast

from statekit.budget import Account, Budget, collecting_rarely
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import (
    AlsoCalled,
    Container,
    Contents,
    Describes,
    Evidence,
    FindsNames,
    HoldsSeveral,
    Layout,
    OnlyIfAsked,
    ReadsOthers,
    StandsIn,
    StoresValues,
)
from statekit.conversion.kept import with_kept, with_scales
from statekit.errors import (
    StateError,
    StatekitError,
    UnknownFormatError,
    UsageError,
    check_name,
    listed,
    meant,
    plural,
)
from statekit.files.checkpoint import Checkpoint
from statekit.files.integrity import check_undamaged, check_whole, proven
from statekit.files.source import first_bytes, listing, looking, not_there, reading, walked
from statekit.files.tree import Place, StoredPlace, size_of
from statekit.state.facts import contradictions, with_optimizer, with_own_rate
from statekit.state.schema import WEIGHTS, is_native, load_schema
from statekit.state.told_schedule import told_schedule
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import nbytes
from statekit.tensors.tree import shipped_json

MayFit: TypeAlias = Callable[[str], bool]
"""Tells of a format's name whether its signs are there, or it has none."""

_HEAD = 64
"""Bytes of a file that signs are looked for in."""
_NUMBERED = re.compile(r"(\d{1,18})/$")


@dataclass(frozen=True)
class ContainerCard:
    """A container, as `Container` describes it."""

    name: str
    title: str
    suffixes: tuple[str, ...]
    target_kind: Literal["file", "folder"] | None
    schedule_in: str | None = None
    other_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayoutCard:
    """What is known of a layout without loading it; `Layout` and `StandsIn` explain the fields.

    `stores_values` tells whether its files, or the constructors that read them, fill in every hyperparameter.
    `only_if_asked` tells whether no target gets it but by name, or from a source in it.
    """

    name: str
    title: str
    containers: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]]
    holds_several: bool | tuple[str, ...] = False
    schedule_in: str | None = None
    stores_values: bool = False
    only_if_asked: bool = False

    def holds(self, schemas: Iterable[str], container: str | None = None) -> bool:
        """Tells whether it holds the state of a run with optimizers of these schemas, in a container or in any."""
        names, several = list(schemas), self.holds_several
        fits = container in several if container and isinstance(several, tuple) else bool(several)
        return all(name in self.variants for name in names) and (fits or len(names) == 1)

    def keeps_rule(self, schema: str, makers: Collection[str]) -> bool:
        """Tells whether a run goes on here by its own rule, if it has to go by any.

        Args:
            schema: The optimizer's.
            makers: Variants that may have made the run; none where nobody knows.

        Example:
            >>> card = LayoutCard("torch-optim", "", (), {"adamw": ("torch",), "adafactor": ("hf", "torch")})
            >>> card.keeps_rule("adafactor", ["torch"]), card.keeps_rule("adafactor", ["t5x"])
            (True, False)
        """
        followed = self.variants.get(schema, ())
        return not followed or not makers or not set(makers).isdisjoint(followed)


def of_container(container: Container) -> ContainerCard:
    """Returns the card of a loaded container."""
    suffixes, kind = tuple(container.suffixes), container.target_kind
    others = tuple(container.other_names) if isinstance(container, AlsoCalled) else ()
    return ContainerCard(container.name, container.title, suffixes, kind, _schedule_in(container), others)


def of_layout(layout: Layout) -> LayoutCard:
    """Returns the card of a loaded layout."""
    variants = {schema: tuple(names) for schema, names in layout.variants.items()}
    several = layout.holds_several if isinstance(layout, HoldsSeveral) else False
    containers = tuple(layout.containers)
    stores = isinstance(layout, StoresValues) and layout.stores_values
    asked = isinstance(layout, OnlyIfAsked) and layout.only_if_asked
    schedule_in = _schedule_in(layout)
    return LayoutCard(layout.name, layout.title, containers, variants, several, schedule_in, stores, asked)


def _schedule_in(converter: Container | Layout) -> str | None:
    return converter.schedule_in if isinstance(converter, StandsIn) else None


def kept_container(name: str) -> ContainerCard | None:
    """Returns the card of one of our own containers; None if there is none."""
    card = _kept()["containers"].get(name)
    return card and ContainerCard(
        name,
        card["title"],
        tuple(card["suffixes"]),
        card["target_kind"],
        card["schedule_in"],
        tuple(card.get("other_names", ())),
    )


def kept_layout(name: str) -> LayoutCard | None:
    """Returns the card of one of our own layouts; None if there is none."""
    card = _kept()["layouts"].get(name)
    if card is None:
        return None
    variants = {schema: tuple(names) for schema, names in card["variants"].items()}
    several = card.get("holds_several", False)
    several = tuple(several) if isinstance(several, list) else several
    containers = tuple(card["containers"])
    stores = bool(card.get("stores_values", False))
    asked = bool(card.get("only_if_asked", False))
    return LayoutCard(name, card["title"], containers, variants, several, card["schedule_in"], stores, asked)


def _kept() -> Mapping[str, Mapping[str, Any]]:
    return _data("cards.json")


def containers_for(path: Place) -> MayFit:
    """Returns which containers may fit a path: a file, a folder, or a prefix of file names."""
    if path.is_file():
        seen = {"name": path.name, "begins": _head(path)}
    elif path.is_dir():
        seen = {"holds": _entries(path)}
    else:
        seen = {"holds": _entries(path.parent, path.name)}
    return lambda name: _shows(_signs("containers").get(name), partial(_is_seen, seen))


def layouts_for(checkpoint: Checkpoint) -> MayFit:
    """Returns which layouts may fit the names of a checkpoint's tensors."""
    seen = {"names": "\n".join(checkpoint.tensors)}
    is_seen = cache(partial(_is_seen, seen))  # several layouts have one sign
    return lambda name: _shows(_signs("layouts").get(name), is_seen)


def _shows(signs: Mapping[str, str] | None, is_seen: Callable[[str, str], bool]) -> bool:
    return signs is None or any(is_seen(key, sign) for key, sign in signs.items())


def _is_seen(seen: Mapping[str, str], key: str, sign: str) -> bool:
    return key in seen and re.search(sign, seen[key], _FLAGS[key]) is not None


_FLAGS = {"name": re.DOTALL, "begins": re.DOTALL, "holds": re.MULTILINE, "names": re.MULTILINE}


def _head(path: Place) -> str:
    """Returns a file's first bytes, a character a byte; none of one that can't be read."""
    try:
        return first_bytes(path, _HEAD).decode("latin-1")
    except StatekitError:
        return ""


def _entries(folder: Place, start: str = "") -> str:
    """Returns the names in a folder that start so, folders with a slash, then those in its newest numbered folder."""
    names = _names(folder, start)
    numbered = {int(number[1]): name for name in names if (number := _NUMBERED.search(name))}
    newest = _names(folder / numbered[max(numbered)], "") if numbered and not start else []
    return "\n".join([*names, *newest])


def _names(folder: Place, start: str) -> list[str]:
    """Returns the names in a folder that start so; none of one that can't be read."""
    if isinstance(folder, StoredPlace):
        entries = [entry for entry in folder.entries() if entry.name.startswith(start)]
        return [f"{entry.name}/" if entry.is_dir() else entry.name for entry in entries]
    try:
        with os.scandir(folder) as items:
            return [f"{e.name}/" if e.is_dir() else e.name for e in items if e.name.startswith(start)]
    except OSError:
        return []


def _signs(kind: str) -> Mapping[str, Mapping[str, str]]:
    return dict(_data("signs.json")[kind])


@cache
def _data(name: str) -> Mapping[str, Mapping[str, Any]]:
    return dict(shipped_json("statekit.converters", name))


CONTAINERS = "statekit.containers"
LAYOUTS = "statekit.layouts"
F = TypeVar("F")
TENSOR_BYTES = 1536
"""What a layout, and what is said of its state, keep of a tensor beside what its reader holds. In bytes, measured."""
MOST_ENTRIES = 1000
"""How many entries of a folder are looked at for checkpoints."""
_MOST_BARE = 20_000
"""Folders below a folder that are looked through for a file."""


def _points(group: str) -> dict[str, EntryPoint]:
    return _installed()[group]


@cache
def _installed() -> dict[str, dict[str, EntryPoint]]:
    """Returns the entry points of both groups; they are looked up once, in a file of each installed package."""
    every = entry_points()
    return {
        group: {point.name: point for point in sorted(every.select(group=group))}
        for group in (CONTAINERS, LAYOUTS)
    }


def _load(group: str, name: str, options: str) -> object:
    points, kind = _points(group), group.rpartition(".")[2][:-1]
    remedy = _meant_layout if group == LAYOUTS else _meant_container
    return points[check_name(kind, name, points, options, remedy)].load()


SEE_FORMATS = "`statekit formats` says whose files each is"


def _meant_layout(name: str) -> str:
    """Says which layouts hold an optimizer whose name stands in a layout's place."""
    schema = name.lower()
    holding = [card.name for card in map(layout_card, layout_names()) if schema in card.variants]
    if not holding:
        return meant(name, layout_names()) or SEE_FORMATS
    return f"{schema} is an optimizer; its layout says whose files: {', '.join(holding)}"


def _meant_container(name: str) -> str:
    return meant(name, container_names()) or SEE_FORMATS


def container_names() -> list[str]:
    """Returns the names of all containers, without loading one."""
    return list(_points(CONTAINERS))


def layout_names() -> list[str]:
    """Returns the names of all layouts, without loading one."""
    return list(_points(LAYOUTS))


def container(name: str) -> Container:
    """Returns a container by name.

    Raises:
        UsageError: No such container.
    """
    return cast(Container, _load(CONTAINERS, name, "--from, --to"))


def layout(name: str) -> Layout:
    """Returns a layout by name.

    Raises:
        UsageError: No such layout.
    """
    return cast(Layout, _load(LAYOUTS, name, "--layout"))


def container_card(name: str) -> ContainerCard:
    """Returns what is known of a container; loads none of ours.

    Raises:
        UsageError: No such container.
    """
    return (_is_ours(CONTAINERS, name) and kept_container(name)) or of_container(container(name))


def layout_card(name: str) -> LayoutCard:
    """Returns what is known of a layout; loads none of ours.

    Raises:
        UsageError: No such layout.
    """
    return (_is_ours(LAYOUTS, name) and kept_layout(name)) or of_layout(layout(name))


def _is_ours(group: str, name: str) -> bool:
    point = _points(group).get(name)
    return isinstance(point, EntryPoint) and point.module.startswith("statekit.converters.")


def detect_container(path: Place) -> tuple[Container, Evidence]:
    """Finds the container of a path by its content; the most specific one wins.

    Raises:
        NotFoundError: Nothing is there.
        UnknownFormatError: No container fits, or several fit equally well. Lists the checkpoints in a folder.
        FormatError: What is there may not be read.
        CorruptError: Nothing fits, and a manifest in the folder names files that aren't there.
    """
    with reading(path), suppress(OSError):
        path.is_symlink()
    with looking(path):
        fitting = _fitting(path)
        if not fitting and not path.exists():  # a prefix of file names isn't there itself
            raise not_there(path)
        if not fitting:
            _check_readable(path)
            check_whole(path)
            _check_filled(path)
        if not fitting and path.is_dir() and (inside := checkpoints_inside(path)):
            raise UnknownFormatError(
                "The folder isn't a checkpoint, but there are checkpoints in it.",
                place=path,
                found=listed(f"{name}: {kind}" for name, kind in inside.items()),
                remedy=f"name one of them; `statekit ls {shlex.quote(str(path))}` shows which can be resumed",
            )
        if not fitting:
            _check_named(path)
        if not fitting and path.is_dir():
            raise UnknownFormatError(
                "No container fits.",
                place=path,
                remedy=f"`statekit ls {shlex.quote(str(path))}` looks for checkpoints below it",
            )
        best = _best([(c.name, e) for c, e in fitting], f"{path}", "container", "--from")
        return fitting[best]


def fits(container: Container, path: Place) -> Evidence | None:
    """Asks a container about a path.

    Raises:
        FormatError: What it would have to look at may not be read.
    """
    with looking(path):
        return container.detect(path)


def _check_readable(path: Place) -> None:
    """Reads a byte of a file, or of the first files of a folder, none of which fits a format."""
    below = (top / name for top, _, names in walked(path) for name in names)
    files = (file for file in below if file.is_file()) if path.is_dir() else iter([path])
    for file in islice(files, MOST_ENTRIES):
        first_bytes(file, 1)


_ZARR = (".zarray", "zarr.json")
_NPY = b"\x93NUMPY"


def _check_named(path: Place) -> None:
    """Refuses what holds a tree's arrays and not the tree: they are read by the program that has its structure.

    Source: stanford-crfm/levanter src/levanter/tensorstore_serialization.py; patrick-kidger/equinox
    equinox/_serialisation.py, `tree_serialise_leaves`.
    """
    remedy = "load it with the program that wrote it, and save the state by Orbax or as Flax' msgpack"
    if not path.is_dir() and first_bytes(path, len(_NPY)) == _NPY:
        raise UnknownFormatError(
            "The file has arrays of NumPy one after another and no names, as Equinox writes leaves.",
            place=path,
            remedy=remedy,
        )
    below = islice(walked(path), MOST_ENTRIES) if path.is_dir() else iter(())
    arrays = (top for top, _, names in below if {*_ZARR} & {*names})
    if (array := next(arrays, None)) is not None and array != path:
        raise UnknownFormatError(
            "The folder has bare zarr arrays and no index of the tree, as Levanter saves it.",
            place=path,
            found=f"an array in {array}",
            remedy=remedy,
        )


def _check_filled(path: Place) -> None:
    """Refuses an empty file, and a folder of empty files alone."""
    below = (top / name for top, _, names in walked(path) for name in names)
    files = list(islice(below, MOST_ENTRIES)) if path.is_dir() else [path]
    if any(size_of(file) for file in files):
        return
    if path.is_dir():
        content = "no file" if not files else f"{plural(len(files), 'file')} of 0 bytes"
        raise UnknownFormatError(
            "The folder is empty.",
            place=path,
            found=content,
            remedy="look whether saving or copying ended early",
        )
    raise UnknownFormatError(
        "The file is empty.", place=path, found="0 bytes", remedy="look whether saving or copying ended early"
    )


def _fitting(path: Place) -> list[tuple[Container, Evidence]]:
    if _is_bare(path):
        return []
    return _asked(
        container_names(), containers_for(path), lambda name: (container(name), container(name).detect(path))
    )


def _is_bare(path: Place) -> bool:
    """Tells whether a path is a folder without a file, however deep: no container need look at it."""
    if not path.is_dir():
        return False
    try:
        for number, (_, _, names) in enumerate(walked(path, links=True)):
            if names or number == _MOST_BARE:
                return False
    except StatekitError:  # a folder that can't be listed: whoever looks there says so
        return False
    return True


def _asked(
    names: list[str], may_fit: MayFit, ask: Callable[[str], tuple[F, Evidence | None]]
) -> list[tuple[F, Evidence]]:
    """Returns the formats that fit, each with its evidence."""
    likely = [name for name in names if may_fit(name)]
    for round_ in (likely, [name for name in names if name not in likely]):
        fitting = [(form, evidence) for form, evidence in map(ask, round_) if evidence is not None]
        if fitting:
            return fitting
    return []


def _by_step(path: Place) -> list[tuple[int, str]]:
    """Returns what sorts names by the numbers in them: step5 before step40."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


_FURTHER_SUFFIXES = (".msgpack",)
"""Ends of names, beside those that containers give their files, by which a file says that it is a checkpoint."""


def checkpoint_suffixes() -> tuple[str, ...]:
    """Returns the ends of names by which a file says that it is a checkpoint."""
    suffixes = (end for name in container_names() for end in container_card(name).suffixes)
    return tuple(dict.fromkeys((*_FURTHER_SUFFIXES, *suffixes)))


def checkpoints_inside(folder: Place) -> dict[str, str]:
    """Returns the checkpoints directly in a folder, by name, each with its container and why it is one.

    Last come the files that have the suffix of one of these, and fit nothing: a save that ended early leaves them, and
    one of them may be the newest.
    """
    inside, unfit = {}, []
    for entry in islice(sorted(listing(folder), key=_by_step), MOST_ENTRIES):
        fitting = _fitting(entry)
        top = max((e.specificity for _, e in fitting), default=0)
        fits = [f"{c.name} ({e.because})" for c, e in fitting if e.specificity == top]
        if fits and not entry.name.startswith("."):
            inside[entry.name] = " or ".join(fits)
        elif not fits and entry.suffix in checkpoint_suffixes() and entry.is_file():
            unfit.append(entry)
    suffixes = {os.path.splitext(name)[1] for name in inside}
    broken = [entry for entry in unfit if entry.suffix in suffixes]
    return inside | {entry.name: "no container fits" if size_of(entry) else "0 bytes" for entry in broken}


def detect_layout(checkpoint: Checkpoint) -> tuple[Layout, Evidence]:
    """Finds what the names of an opened checkpoint mean; the most specific layout wins.

    Raises:
        UnknownFormatError: No layout fits, or several fit equally well.
    """
    fitting = _asked(
        layout_names(), layouts_for(checkpoint), lambda name: (layout(name), layout(name).detect(checkpoint))
    )
    seen = None if fitting else contents(checkpoint)
    if seen is not None:
        raise UnknownFormatError(
            "No layout makes a state of this checkpoint.",
            place=checkpoint.path,
            expected="weights and an optimizer of a schema that `statekit schemas` lists",
            found=seen.what,
            remedy=seen.remedy,
        )
    best = _best([(lay.name, e) for lay, e in fitting], f"{checkpoint.path}", "layout", "--layout")
    return fitting[best]


@collecting_rarely()
def opened(
    container: Container, path: Place, step: int | None, hints: CheckpointRef, budget: Budget | None = None
) -> Checkpoint:
    """Opens a checkpoint by its container, and refuses one that its manifest contradicts, unless the hints accept it.

    Raises:
        NotFoundError, FormatError: It can't be opened.
        CorruptError: It isn't what its manifest says, as far as opening looks.
    """
    budget = budget or hints.job_budget()
    with looking(path):
        checkpoint = container.open(path, step, budget)
    account, close_files = Account(budget), checkpoint.on_close

    def close() -> None:
        close_files()
        account.close()

    checkpoint = replace(checkpoint, on_close=close)
    try:
        with looking(path):
            checkpoint = hints.keyed(proven(checkpoint, budget))
        count = len(checkpoint.tensors)
        account.hold(TENSOR_BYTES * count, f"What is known of {count} tensors", f"{path}")
        total = sum(map(nbytes, checkpoint.tensors.values()))
        if total > budget.limits.decoded(0):  # what is stored once may have any number of names
            with looking(path):
                account.explain(total - _file_bytes(checkpoint), "What its tensors show", f"{path}")
        if not hints.accept_damaged:
            check_undamaged(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _file_bytes(checkpoint: Checkpoint) -> int:
    """Returns how many bytes the files of a checkpoint have, and those beside it, whatever of them is stored."""
    top, total = checkpoint.path, 0
    files = {top, *checkpoint.parts}
    with suppress(StatekitError):  # a folder that may not be listed may be entered
        inside = (folder / name for folder, _, names in walked(top) for name in names)
        files.update(inside if top.is_dir() else listing(top.parent))
    for file in files:
        total += size_of(file)  # reading it says what is wrong
    return total


def contents(checkpoint: Checkpoint, names: Sequence[str] | None = None) -> Contents | None:
    """Returns what a checkpoint holds that no layout decodes, as the first layout at home in its container says.

    Args:
        checkpoint: The checkpoint.
        names: Parameters in the optimizer's order, where it numbers them.
    """
    for name in layout_names():
        if checkpoint.container in layout_card(name).containers and isinstance(layout(name), Describes):
            described = cast(Describes, layout(name)).describe(checkpoint, names)
            if described is not None:
                return described
    return None


def _check_hints(layout: Layout, hints: CheckpointRef) -> None:
    """Refuses a variant that no schema of the layout has, and names from where the layout doesn't look."""
    if hints.variant is not None:
        variants = [variant for schema in layout.variants for variant in load_schema(schema).variants]
        for variant in hints.variants.values():
            check_name("variant", variant, variants, "--variant")
    ways = layout.names_from if isinstance(layout, FindsNames) else ()
    if hints.names_from is not None and hints.names_from not in ways:
        raise UsageError(
            "The checkpoint's names don't come from there.",
            place="--names-from",
            expected=", ".join(ways) or f"nothing: {layout.title} has them by itself",
            found=hints.names_from,
            remedy="leave it out; of two checkpoints say it of the one that numbers its parameters: "
            f"--left-names-from {hints.names_from}",
        )


@collecting_rarely()
def decoded(layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
    """Decodes a checkpoint by a layout, which may be one that somebody named for names that aren't its own.

    What the manifest of a conversion kept of a run's records is in the state's extra again.

    Raises:
        FormatError: What the manifest kept isn't a part of a state.
        StateError: The checkpoint's names aren't the layout's.
        UsageError: A hint that no schema of the layout knows, a variant that the checkpoint itself speaks against, or a
            schedule that isn't the run's.
    """
    _check_hints(layout, hints)
    # What is said may be said of the one optimizer by its name: adafactor/decay_rate=0.8.
    if len(layout.variants) == 1 and WEIGHTS not in layout.variants:
        ((_, hints),) = hints.of(layout.variants).items()
    try:
        state = with_optimizer(layout.decode(checkpoint, hints), hints.optimizer)
        if hints.variant is not None:
            _check_variant(layout, checkpoint, hints)
        if hints.hyperparameters:
            state = _with_contradictions(layout, checkpoint, hints, state)
    except StatekitError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if layout.detect(checkpoint) is not None:
            raise
        raise StateError(
            "The checkpoint hasn't the names of this layout.",
            place=checkpoint.path,
            expected=layout.title,
            found=f"{type(error).__name__}: {error}",
            remedy="leave out --layout: the names say which it is",
        ) from error
    if checkpoint.manifest is not None:
        state = with_kept(state, checkpoint.manifest, checkpoint.path)
        state = with_scales(state, checkpoint.manifest, checkpoint.path)
    if hints.schedule is not None:
        return told_schedule(state, hints.schedule)
    return with_own_rate(state) if hints.hyperparameters else state


def _with_contradictions(
    layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef, state: TrainState
) -> TrainState:
    """Returns a state with a fact for each hyperparameter whose value the user gives in place of the file's."""
    try:
        stored = layout.decode(checkpoint, replace(hints, hparams={}))
    except StatekitError:  # the files alone don't tell
        return state
    groups_of = {path: group for group in stored.optimizer.groups for path in group.paths}
    groups = tuple(
        replace(group, facts=(*group.facts, *contradictions(group, groups_of)))
        for group in state.optimizer.groups
    )
    return replace(state, optimizer=replace(state.optimizer, groups=groups))


def _check_variant(layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef) -> None:
    """Refuses a variant other than the file's, or, if the file has none, one without such names."""
    # Where a state may have no schema, numbers may be of the optimizer that the variant names.
    numbers = {} if any(map(is_native, layout.variants)) else hints.hparams
    unsaid = replace(hints, variant=None, hparams=numbers)
    stored = dict(layout.decode(checkpoint, unsaid).optimizer.kinds)
    if any(map(is_native, stored)):
        return  # nothing in the file says whose rule it is
    for schema, part in hints.of(stored).items():
        variant = stored[schema]
        possible = (variant,) if variant is not None else layout.variants.get(schema, ())
        if isinstance(layout, ReadsOthers):
            possible = (*possible, *layout.reads.get(schema, ()))
        if part.variant is None or part.variant in possible:
            continue
        evidence = layout.detect(checkpoint)
        raise UsageError(
            f"The checkpoint speaks against the variant {part.variant}.",
            place=checkpoint.path,
            expected=", ".join(possible),
            found=f"layout {layout.name}: {evidence.because if evidence else layout.title}",
            remedy="leave out --variant; --layout shows how the run continues elsewhere",
        )


def _best(fitting: list[tuple[str, Evidence]], place: str, kind: str, option: str) -> int:
    if not fitting:
        raise UnknownFormatError(
            f"No {kind} fits.", place=place, remedy="`statekit formats` lists what statekit reads"
        )
    top = max(e.specificity for _, e in fitting)
    best = [i for i, (_, e) in enumerate(fitting) if e.specificity == top]
    if len(best) > 1:
        raise UnknownFormatError(
            f"Several {kind}s fit equally well.",
            place=place,
            found="; ".join(f"{fitting[i][0]} ({fitting[i][1].because})" for i in best),
            remedy=f"name one with {option}",
        )
    return best[0]
