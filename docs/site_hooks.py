"""What the site needs beside its pages: README as the first, the help of each command, and nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import griffe
from click.testing import CliRunner

from statekit.cli.main import VERBS, statekit

ROOT = Path(__file__).parents[1]
SITE = ROOT / "docs"
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
SHIM = "https://unpkg.com/iframe-worker/shim"
"""What the theme asks for to search pages that lie on a disk: ours stands in for it."""


class Examples(griffe.Extension):
    """Shows as code what a docstring has below `Example:`; the parser knows `Examples:` only."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns a page's text; what leads out of the site has become the name of a file of the repository."""
    place = SITE / page.file.src_path
    if page.file.src_path == "index.md":
        place = ROOT / "README.md"
        markdown = place.read_text(encoding="utf-8")
    if page.file.src_path == "reference/commands.md":
        markdown += "".join(_helps())
    up = "../" * page.file.src_path.count("/")

    def changed(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        name, hash_, anchor = target.partition("#")
        file = (place.parent / name).resolve()
        if not name or re.match(r"[a-z]+:", target) or not file.exists():  # strict mode names what is nowhere
            return link.group()
        if file.is_file() and file.is_relative_to(SITE):
            return f"{mark}[{text}]({up}{file.relative_to(SITE).as_posix()}{hash_}{anchor})"
        path = f"`{file.relative_to(ROOT).as_posix()}`"
        return path if text.strip("`") in path else f"{text} ({path})"

    return LINK.sub(changed, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Returns a page's HTML that asks no other host for anything."""
    return output.replace(SHIM, "../" * page.file.url.count("/") + "assets/offline_search.js")


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Returns the page of what is not found, which has no page of its own."""
    return output_content.replace(SHIM, "assets/offline_search.js")


def _helps() -> list[str]:
    """Returns all of the help of each command, as a terminal shows it."""
    verbs = {name: statekit.get_command(click.Context(statekit), name) for name in VERBS}
    texts = []
    for name, verb in verbs.items():
        flag = (
            "--help-all" if verb and any("--help-all" in option.opts for option in verb.params) else "--help"
        )
        shown = CliRunner().invoke(statekit, [name, flag], prog_name="statekit", terminal_width=80)
        assert shown.exit_code == 0, shown.output
        texts.append(f"\n## {name}\n\n```text\n{shown.output}```\n")
    return texts
