"""Arguments that several verbs share, the names that a shell may complete, and the pages of help.

A page has options in groups and three examples; what one seldom needs stands only on that of `--help-all`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from statekit.budget import bytes_of
from statekit.conversion.checkpoint_ref import OPTIONS, CheckpointRef, option
from statekit.errors import Faults, NotFoundError, TargetExistsError, UsageError, printable
from statekit.files.source import checkpoint_place, target_place
from statekit.files.tree import Place, local_path
from statekit.state.train_state import StepOffset

if TYPE_CHECKING:  # entered only where an option names a file
    from statekit.files.source import Files

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def completing(names: Callable[[], Iterable[str]]) -> Complete:
    """Returns what completes one of the names."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def _containers() -> Iterable[str]:
    from statekit.conversion.registry import container_names

    return container_names()


def _targets() -> Iterable[str]:
    from statekit.conversion.target import target_names

    return target_names()


def _layouts() -> Iterable[str]:
    from statekit.conversion.registry import layout_names

    return layout_names()


def _maps() -> Iterable[str]:
    from statekit.maps.model_map import map_names

    return map_names()


def _variants() -> Iterable[str]:
    from statekit.state.schema import load_schema, schema_names

    return sorted({variant for name in schema_names() for variant in load_schema(name).variants})


complete_containers, complete_targets = completing(_containers), completing(_targets)
complete_layouts, complete_variants = completing(_layouts), completing(_variants)
complete_maps = completing(_maps)


_COMPLETIONS: Mapping[str, Complete] = {
    "containers": complete_containers,
    "layouts": complete_layouts,
    "variants": complete_variants,
}


def read_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Turns an option such as 2GiB into bytes; a callback for click.

    Raises:
        UsageError: It is no size.
    """
    return None if value is None else bytes_of(value, param.opts[0])


def ref_option(
    name: str, *, help: str = "", side: str = ""
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns the option of a field of `CheckpointRef`; the command gets its words under the field's name.

    Args:
        name: The field.
        help: What `--help` says, where a verb means something else by it.
        side: `left` or `right`, where a verb takes two checkpoints and the option is of one of them.
    """
    described = option(name)
    flag = f"--{side}-{described.flag[2:]}" if side else described.flag
    text = help or (f"As {described.flag}, of {SIDES[side]} alone." if side else described.help)
    if described.kind == "flag":
        return click.option(flag, f"{side}_{name}" if side else name, is_flag=True, help=text)
    return click.option(
        flag,
        f"{side}_{name}" if side else name,
        type=click.Choice(described.choices)
        if described.choices
        else int
        if described.kind == "number"
        else None,
        multiple=described.kind == "values",
        metavar=described.metavar or None,
        callback=read_size if described.kind == "bytes" else None,
        shell_complete=_COMPLETIONS.get(described.completes),
        help=text,
    )


def _added(command: Callable[..., Any], options: Iterable[Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a command with options, which `--help` lists in their order."""
    return functools.reduce(lambda decorated, add: add(decorated), reversed([*options]), command)


def ref_options(
    argument: str = "", *, without: Collection[str] = (), help: Mapping[str, str] = {}
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns what adds the options of a `CheckpointRef`; the command gets it as `ref`.

    Args:
        argument: The argument that is the path of `ref`; the command doesn't get it itself. None if empty.
        without: Fields that are no options of this verb.
        help: What `--help` says of fields by which the verb means something else.
    """
    names = [entry.name for entry in OPTIONS if entry.name not in without]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def run(*args: Any, **options: Any) -> Any:
            path = options.pop(argument) if argument else None
            return command(
                *args, ref=ref_of_words(path, {name: options.pop(name) for name in names}), **options
            )

        return _added(run, (ref_option(name, help=help.get(name, "")) for name in names))

    return decorate


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CHECKPOINT and the options of a `CheckpointRef`; the command gets both as `ref`."""
    argument = click.argument("checkpoint", type=click.Path(), callback=source_place)
    return argument(ref_options("checkpoint")(command))


def checkpoints_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds CHECKPOINT..., of which each may be several, and what their bytes are read by.

    The command gets `checkpoints`, `container`, `step`, `follow_links` and `budget`.
    """
    return _added(
        command,
        (
            click.argument(
                "checkpoints", metavar="CHECKPOINT...", nargs=-1, required=True, callback=source_places
            ),
            ref_option("container", help=OF_FILES["container"]),
            ref_option("step", help="Examine one step of a run's folder. Default: all."),
            ref_option("follow_links"),
            ref_option("budget"),
        ),
    )


OF_FILES = {"container": "The container of the files, if statekit cannot detect it."}
"""What options of several checkpoints mean, where that isn't what they mean of one."""


def source_places(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Place, ...]:
    """Turns arguments into places of checkpoints, as `source_place` does."""
    return tuple(place for value in values if (place := source_place(ctx, param, value)) is not None)


def local_files(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Path, ...]:
    """Turns arguments into paths of this machine, as `local_file` does."""
    return tuple(path for value in values if (path := local_file(ctx, param, value)) is not None)


SIDES = {"left": "A", "right": "B"}
"""What begins the options of one of two checkpoints -> how its argument is called."""


def sides_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of two checkpoints, `left` and `right`; the command gets a ref of each under these names.

    What is said of one side goes before what is said of both.
    """
    names = [entry.name for entry in OPTIONS]

    @functools.wraps(command)
    def run(*args: Any, left: Place, right: Place, **options: Any) -> Any:
        both = {name: options.pop(name) for name in names}
        refs = {}
        for side, path in (("left", left), ("right", right)):
            words = {name: options.pop(f"{side}_{name}") for name in names}
            hparams = (*both["hparams"], *words["hparams"])
            given = {name: value for name, value in words.items() if value not in (None, False, ())}
            refs[side] = ref_of_words(path, {**both, **given, "hparams": hparams})
        return command(*args, **refs, **options)

    of_both = [ref_option(name) for name in names]
    return _added(run, [*of_both, *(ref_option(name, side=side) for side in SIDES for name in names)])


def read_step(ctx: click.Context, param: click.Parameter, value: str) -> StepOffset:
    """Turns `keep`, `reset` or a number into a place in a count; a callback for click."""
    if value in STEPS:
        return STEPS[value]
    try:
        return int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither keep, reset nor a number.") from None


STEPS: dict[str, StepOffset] = {"keep": "keep", "reset": "reset"}


def changes_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say what shall be changed of a run; the command gets `changes`, None if nothing is."""

    @click.option(
        "--schedule-step",
        metavar="keep|reset|N",
        callback=read_step,
        default="keep",
        show_default=True,
        help="The step of the learning-rate schedule. reset: its beginning.",
    )
    @click.option(
        "--slot-policy",
        multiple=True,
        metavar="keep|drop:SLOT|reset:SLOT",
        help="What becomes of slots, by canonical name: reset:v begins it anew, drop:m leaves it behind where the rule "
        "goes on without it; 'reset:v*' is all that fit, reset:count the updates done, 'reset:*@GLOB' all of the "
        "parameters that fit or of a label, their count too. May be repeated.",
    )
    @click.option("--params-only", is_flag=True, help="Convert the parameters alone.")
    @click.option("--state-only", is_flag=True, help="Convert the optimizer's state alone, to PyTorch.")
    @click.option(
        "--drop-slots-of",
        multiple=True,
        metavar="GLOB",
        help="Freeze parameters: keep their values and drop their slots. May be repeated.",
    )
    @click.option(
        "--param-dtype",
        metavar="DTYPE",
        help="The dtype of the parameters. A narrower dtype rounds them, and the report gives the largest error.",
    )
    @click.option(
        "--slot-dtype",
        multiple=True,
        metavar="[SLOT=]DTYPE",
        help="The dtype of one slot, or of all slots but counts, where the target's rule keeps it.",
    )
    @click.option(
        "--loss-scale",
        type=float,
        metavar="C",
        help="The factor by which the loss grows: 1/tokens from a sum to a mean. The moments are rescaled.",
    )
    @click.option(
        "--init-missing",
        metavar="FILE",
        type=click.Path(),
        callback=local_file,
        help="A file of the target's model. Parameters that the source lacks, or has in another shape, "
        "come from it, and their slots start fresh.",
    )
    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> Any:
        values = {name: options.pop(name) for name in CHANGES}
        unsaid = ("keep", ())  # and False and None themselves: 0 equals False, and is a step
        values = {
            name: value
            for name, value in values.items()
            if value is not False and value is not None and value not in unsaid
        }
        changes = None
        if values:
            from statekit.conversion.changing.changes import Changes

            changes = Changes.of(values)
        return command(*args, changes=changes, **options)

    return run


CHANGES = (
    "schedule_step", "slot_policy", "params_only", "state_only", "drop_slots_of", "param_dtype", "slot_dtype",
    "loss_scale", "init_missing",
)  # fmt: skip


def ref_of_words(path: Place | None, words: Mapping[str, Any]) -> CheckpointRef:
    """Returns the ref that the words of a command line make; files that they name draw on the job's budget."""
    ref = CheckpointRef(path, **{name: value for name, value in words.items() if name not in _WRITTEN})
    written = {name: words[name] for name in _WRITTEN if words.get(name)}
    if not written:
        return ref
    from statekit.files.source import Files

    with Files(ref.job_budget()) as files:
        if hparams := written.get("hparams"):
            ref = replace(ref, hparams=said_hparams(hparams, files))
        for name, read in (("param_names", _names), ("schedule", _schedule)):
            if text := written.get(name):
                value, is_file = read(text, files)
                ref = replace(ref, files={**ref.files, **({name: text} if is_file else {})}, **{name: value})
    return ref


_WRITTEN = ("hparams", "param_names", "schedule")
"""Fields whose words name a file or are a text to be read."""


def _names(text: str, files: Files) -> tuple[Any, bool]:
    """Returns the names that words give, and whether they stand in a file."""
    from statekit.cli.param_names import names_of, read_param_names

    return (names_of(text), False) if text.startswith("[") else (read_param_names(Path(text), files), True)


def said_hparams(arguments: tuple[str, ...], files: Files) -> Mapping[str, Any]:
    """Returns what `--hparams` says, and prints on stderr what of its files can't be read."""
    from statekit.converters.formats.hparams import read_hparams

    settings = read_hparams(arguments, files=files)
    for note in settings.left_out:
        click.echo(f"Note: {printable(note)}", err=True)
    return settings.values


def _schedule(text: str, files: Files) -> tuple[Any, bool]:
    """Returns the call that words give, or the gin file that they name, and whether it stands in a file."""
    if not text.endswith(".gin"):
        return text, False
    from statekit.converters.formats.hparams import read_gin_schedule

    return vars(read_gin_schedule(Path(text), files)), True


def read_config(arguments: tuple[str, ...], name: str | None, files: Files) -> dict[str, Any]:
    """Returns what `--config` says of a model, by the names of the map; later ones win.

    Raises:
        UsageError: It isn't of that map's model, or can't be read; lists every fault.
    """
    from statekit.converters.formats.hparams import read_gin, read_hparams, read_text
    from statekit.maps.model_map import settings_in

    settings, faults = settings_in(name, files), Faults()
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for argument in arguments:
        if not argument.endswith(".gin") or "=" in argument:
            read = read_hparams([argument], files=files).values
            whole = argument.endswith((".yml", ".yaml"))
            values |= settings.translated(settings.of_config(read) if whole else read, faults)
            continue
        path = Path(argument)
        text = read_text(path, files)
        bound = {setting: vars(read_gin(text, path, setting, files.account)) for setting in settings.gin}
        read, others = settings.of_gin(bound, faults)
        if not read and not others:
            faults.add(f"binds nothing of {' or '.join(settings.gin) or 'a model of the map'}", argument)
        values, unread = values | read, unread | others
    faults += [
        (f"is {setting:.80}, which is no plain value", key)
        for key, setting in unread.items()
        if key not in values
    ]
    remedy = "say it: --config KEY=VALUE"
    faults.check(UsageError, "The configuration can't be taken", place="--config", remedy=remedy)
    return values


def place_of(what: str, is_one: Callable[[Path], bool]) -> Callable[..., Path | None]:
    """Returns a callback for click that refuses, before any work, a path at which a file can't be written.

    Args:
        what: What the file is called: `report`.
        is_one: Whether a file is such a one, which a new one may replace.
    """

    def check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
        if value is None:
            return None
        from statekit.files.homes import check_name

        check_name(value)
        if not value.parent.is_dir():
            raise NotFoundError(
                f"The {what}'s folder isn't there.", place=value.parent, remedy=f"mkdir -p {value.parent}"
            )
        if os.path.lexists(value) and (value.is_symlink() or not value.is_file() or not is_one(value)):
            raise TargetExistsError(
                f"There is something else in the {what}'s place.",
                place=value,
                expected=f"nothing, or a {what}",
                remedy="choose another name",
            )
        places: dict[Path, str] = ctx.meta.setdefault(_PLACES, {})
        if (other := places.setdefault(value.resolve(), what)) != what:
            raise UsageError(f"The {other} and the {what} are to be one file.", place=value)
        return value

    return check


_PLACES = "statekit.places"
"""Key of what one call writes beside its target: path -> what it is called."""


def _is_certificate(path: Path) -> bool:
    from statekit.verify.certificate import is_certificate

    return is_certificate(path)


certificate_place = place_of("certificate", _is_certificate)


def local_file(ctx: click.Context, param: click.Parameter, value: str | None) -> Path | None:
    """Turns an argument into a path of this machine; a callback for click.

    Raises:
        UsageError: It is an address such as gs://bucket/run; says what to do instead.
    """
    return None if value is None else local_path(value)


def written_place(ctx: click.Context, param: click.Parameter, value: str) -> Place:
    """Turns an argument into a target's place, on this machine or in a store; a callback for click.

    Raises:
        UsageError: It is an address that isn't written.
    """
    return target_place(value)


def source_place(ctx: click.Context, param: click.Parameter, value: str | None) -> Place | None:
    """Turns an argument into a checkpoint's place, on this machine or in a store; a callback for click.

    Raises:
        UsageError: It is an address that isn't read.
    """
    return None if value is None else checkpoint_place(value)


SAFETY, OUTPUT, OTHERS = "Safety", "Output", "Other options"
_ALL = "statekit.help_all"


class Page(click.Command):
    """A verb whose help has groups.

    Args:
        everyday: Title of a group -> the names of its everyday options, in their order.
        more: The same of options that only `--help-all` shows. An option of neither comes last there.
        examples: Lines of a shell.
        options: What click takes.
    """

    def __init__(
        self,
        *args: Any,
        everyday: Mapping[str, Sequence[str]],
        more: Mapping[str, Sequence[str]] = {},
        examples: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.everyday, self.more, self.examples = everyday, more, examples
        self.params.append(_help_all())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the examples, and the options in their groups."""
        params = {param.name or "": param for param in self.params}
        if help_option := self.get_help_option(ctx):
            params["help"] = help_option
        whole = ctx.meta.get(_ALL, False)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
        shown = 0
        for title, names in self._groups(params, whole):
            records = [record for name in names if (record := params[name].get_help_record(ctx))]
            shown += len(records)
            with formatter.section(title):
                formatter.write_dl(records)
        left = sum(isinstance(param, click.Option) and not param.hidden for param in params.values()) - shown
        if left:
            formatter.write_paragraph()
            formatter.write(f"{ctx.command_path} --help-all shows {left} more options.\n")

    def _groups(self, params: Mapping[str, click.Parameter], whole: bool) -> Iterator[tuple[str, list[str]]]:
        """Yields each group with its options, in which one that nobody put into a group comes last."""
        groups = {title: [*names] for title, names in self.everyday.items()}
        if whole:
            for title, names in self.more.items():
                groups.setdefault(title, []).extend(names)
            grouped = {name for names in groups.values() for name in names}
            rest = [name for name in params if name not in grouped]
            groups[OTHERS] = rest
        for title, names in groups.items():
            options = [name for name in names if isinstance(params.get(name), click.Option)]
            if options:
                yield title, options


def _help_all() -> click.Option:
    """Returns the option that prints all of a verb's help."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_ALL] = True
            click.echo(ctx.get_help())
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option and exit.",
    )


def about_checkpoint(title: str) -> dict[str, list[str]]:
    """Returns the groups of the options that tell what a checkpoint is, and how far its files are trusted."""
    trusts = [entry.name for entry in OPTIONS if entry.use == "trust"]
    return {title: [entry.name for entry in OPTIONS if entry.name not in trusts], SAFETY: trusts}


def with_more(
    everyday: Mapping[str, Sequence[str]], *mores: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Returns groups of further options as one, without those that are everyday options already."""
    usual = {name for names in everyday.values() for name in names}
    groups: dict[str, list[str]] = {}
    for more in mores:
        for title, names in more.items():
            groups.setdefault(title, []).extend(name for name in names if name not in usual)
    return groups


_FIRST_LINE = 200


def _is_report(path: Path) -> bool:
    from statekit.pages.report import MARK

    with path.open("rb") as file:
        return MARK.encode() in file.readline(_FIRST_LINE)


def report_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the option; the command gets `report`, where to write one."""
    return click.option(
        "--report",
        metavar="FILE.html",
        type=click.Path(path_type=Path),
        callback=place_of("report", _is_report),
        help="Also write a self-contained HTML page. It replaces an earlier report.",
    )(command)


def write_report(path: Path | None, verb: str, result: Mapping[str, Any]) -> None:
    """Writes a verb's result as a page, if one is asked for; what was there stays until all of it is on the disk."""
    if path is None:
        return
    from statekit.files.durable import replace_file
    from statekit.pages.report import report
    from statekit.tensors.tree import to_json

    replace_file(path, report(verb, to_json(dict(result))).encode("utf-8"))
