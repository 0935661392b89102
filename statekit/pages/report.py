"""Reports: the result of a verb as one HTML file, without network, scripts or further files.

Input: the verb's name and its result as plain data, as `--json` prints it. The verdict stands first.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from markupsafe import Markup

from statekit.pages.environment import environment, script, stylesheet
from statekit.pages.verdicts import VERDICTS

MARK = "<!-- statekit.report/1 -->"
"""The end of a report's first line, which distinguishes it from other pages."""


def report(verb: str, result: Mapping[str, Any]) -> str:
    """Returns a report.

    Args:
        verb: One of `statekit.pages.verdicts.VERDICTS`.
        result: What the verb's `--json` prints.
    """
    css, code = stylesheet(), script()
    policy = (
        f"default-src 'none'; style-src '{_digest(css)}'; script-src '{_digest(code)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        environment()
        .get_template("report.html")
        .render(
            verb=verb,
            result=result,
            judged=VERDICTS[verb](result),
            css=Markup(css),
            code=Markup(code),
            policy=policy,
            mark=Markup(MARK),
            version=version("statekit"),
        )
    )


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
