"""Names of containers and layouts, each loaded when asked for. Other packages add theirs through entry points.

Which one fits is asked in two rounds: first of those whose signs are there (cards.py); of the rest only if none does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import islice
from typing import TypeVar, cast

from statekit.budget import Account, Budget
from statekit.conversion.cards import (
    ContainerCard,
    LayoutCard,
    MayFit,
    containers_for,
    kept_container,
    kept_layout,
    layouts_for,
    of_container,
    of_layout,
)
from statekit.conversion.checkpoint_ref import CheckpointRef
from statekit.conversion.contracts import (
    Container,
    Contents,
    Describes,
    Evidence,
    FindsNames,
    Layout,
    ReadsOthers,
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
from statekit.files.tree import Place, size_of
from statekit.state.facts import with_optimizer
from statekit.state.schema import WEIGHTS, is_native, load_schema
from statekit.state.told_schedule import told_schedule, with_own_rate
from statekit.state.train_state import TrainState
from statekit.tensors.tensor import nbytes

CONTAINERS = "statekit.containers"
LAYOUTS = "statekit.layouts"
F = TypeVar("F")
TENSOR_BYTES = 1536
"""What a layout, and what is said of its state, keep of a tensor beside what its reader holds. In bytes, measured."""
MOST_ENTRIES = 1000
"""How many entries of a folder are looked at for checkpoints."""


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
                remedy=f"name one of them; `statekit ls {shlex.quote(str(path))}` says which can go on",
            )
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
    """Reads a byte of a file, or of the first files of a folder, none of which fits a format.

    Raises:
        FormatError: One may not be read, so that nobody can tell.
        RefusedError: It is a pipe, a socket or a device.
    """
    below = (top / name for top, _, names in walked(path) for name in names)
    files = (file for file in below if file.is_file()) if path.is_dir() else iter([path])
    for file in islice(files, MOST_ENTRIES):
        first_bytes(file, 1)


def _check_filled(path: Place) -> None:
    """Refuses a file without a byte, and a folder in which no file has one: no container can tell what it was.

    Raises:
        UnknownFormatError: It is empty.
    """
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
    return _asked(
        container_names(), containers_for(path), lambda name: (container(name), container(name).detect(path))
    )


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


def checkpoints_inside(folder: Place) -> dict[str, str]:
    """Returns the checkpoints directly in a folder, by name, each with its container and why it is one."""
    inside = {}
    for entry in islice(sorted(listing(folder), key=_by_step), MOST_ENTRIES):
        fitting = _fitting(entry)
        top = max((e.specificity for _, e in fitting), default=0)
        fits = [f"{c.name} ({e.because})" for c, e in fitting if e.specificity == top]
        if fits and not entry.name.startswith("."):
            inside[entry.name] = " or ".join(fits)
    return inside


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
            remedy="`statekit inspect` lists its tensors",
        )
    best = _best([(lay.name, e) for lay, e in fitting], f"{checkpoint.path}", "layout", "--layout")
    return fitting[best]


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


def decoded(layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef) -> TrainState:
    """Decodes a checkpoint by a layout, which may be one that somebody named for names that aren't its own.

    What the manifest of a conversion kept of a run's records is in the state's extra again.

    Raises:
        FormatError: What the manifest kept isn't a part of a state.
        StateError: The checkpoint's names aren't the layout's.
        UsageError: A hint that no schema of the layout knows, a variant that the checkpoint itself speaks against, or a
            schedule that isn't the run's.
    """
    if hints.variant is not None:
        known = [variant for schema in layout.variants for variant in load_schema(schema).variants]
        for said in hints.variants.values():
            check_name("variant", said, known, "--variant")
    if hints.names_from is not None:
        ways = layout.names_from if isinstance(layout, FindsNames) else ()
        if hints.names_from not in ways:
            raise UsageError(
                "The checkpoint's names don't come from there.",
                place="--names-from",
                expected=", ".join(ways) or f"nothing: {layout.title} has them by itself",
                found=hints.names_from,
                remedy="leave it out; of two checkpoints say it of the one that numbers its parameters: "
                f"--left-names-from {hints.names_from}",
            )
    # What is said may be said of the one optimizer by its name: adafactor/decay_rate=0.8.
    if len(layout.variants) == 1 and WEIGHTS not in layout.variants:
        ((_, hints),) = hints.of(layout.variants).items()
    try:
        state = with_optimizer(layout.decode(checkpoint, hints), hints.optimizer)
        if hints.variant is not None:
            _check_variant(layout, checkpoint, hints)
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


def _check_variant(layout: Layout, checkpoint: Checkpoint, hints: CheckpointRef) -> None:
    """Refuses a variant that isn't the file's own, or, where the file doesn't say one, none that has such names."""
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
            remedy="leave out --variant; how the run goes on elsewhere is said by --layout",
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
