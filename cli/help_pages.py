"""Pages of help: options in groups, three examples, and what one seldom needs only with `--help-all`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from statekit.conversion.checkpoint_ref import OPTIONS

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
    """Returns the groups of the options that tell what a checkpoint is, and how far its files are trusted.

    Args:
        title: Of the first of both groups.
    """
    trusts = [known.name for known in OPTIONS if known.use == "trust"]
    return {title: [known.name for known in OPTIONS if known.name not in trusts], SAFETY: trusts}


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
